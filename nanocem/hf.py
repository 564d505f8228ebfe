"""Hugging Face: Llama's weights in ours, and our models in the hub's form."""
import os
from typing import Any

from huggingface_hub import PyTorchModelHubMixin
from safetensors import SafetensorError
from torch import Tensor

from configurator import fail
from model import ModelConfig, Transformer

OURS = {  # in a block -> in a Hugging Face layer
    'attn.norm.gain': 'input_layernorm',
    'attn.W_Q': 'self_attn.q_proj',
    'attn.W_K': 'self_attn.k_proj',
    'attn.W_V': 'self_attn.v_proj',
    'attn.W_O': 'self_attn.o_proj',
    'mlp.norm.gain': 'post_attention_layernorm',
    'mlp.W': 'mlp.up_proj',
    'mlp.V': 'mlp.gate_proj',
    'mlp.W_d': 'mlp.down_proj',
}


def from_hf(source: Any, n_head: int | None = None) -> Transformer:
    """A LlamaForCausalLM, or its state dict and n_head, as a Transformer of float32 weights with
    the same logits. ValueError where our baseline has no such part (scaled rope, biases, another
    activation)."""
    state = source if isinstance(source, dict) else source.state_dict()
    config = getattr(source, 'config', None)
    n_head = n_head or getattr(config, 'num_attention_heads', None)
    if n_head is None:
        raise ValueError('a state dict does not say how many heads: from_hf(state, n_head=...)')
    rope = getattr(config, 'rope_parameters', None) or {}
    activation = getattr(config, 'hidden_act', 'silu')
    if rope.get('rope_type', 'default') != 'default' or activation != 'silu':
        raise ValueError(f'only plain rope and SiLU: rope {rope}, activation {activation}')
    if biases := [name for name in state if name.endswith('bias')]:
        raise ValueError(f'only Llamas without biases: {biases[0]}')
    vocab_size, D = state['model.embed_tokens.weight'].shape
    R = getattr(config, 'head_dim', None) or D // n_head
    if R * n_head != D:
        raise ValueError(f'head_dim {R} x {n_head} heads is not the width {D}')
    layers = [int(name.split('.')[2]) for name in state if name.startswith('model.layers.')]
    model = Transformer(ModelConfig(
        attn='llama', mlp='llama', d_model=D, n_layer=1 + max(layers), n_head=n_head,
        d_mlp=len(state['model.layers.0.mlp.up_proj.weight']), vocab_size=vocab_size,
        context_length=getattr(config, 'max_position_embeddings', 2048),
        rope_theta=rope.get('rope_theta') or getattr(config, 'rope_theta', None) or 10_000.0,
        norm_eps=getattr(config, 'rms_norm_eps', 1e-5)))
    tied = 'lm_head.weight' not in state
    weights = {
        'embedding': state['model.embed_tokens.weight'],
        'norm.gain': state['model.norm.weight'],
        'head': state['model.embed_tokens.weight' if tied else 'lm_head.weight'],
    }
    for i in range(len(model.blocks)):
        for name, theirs in OURS.items():
            w = state[f'model.layers.{i}.{theirs}.weight']
            weights[f'blocks.{i}.{name}'] = in_our_shape(name, w, D, R)
    model.load_state_dict(weights)
    return model


def in_our_shape(name: str, w: Tensor, D: int, R: int) -> Tensor:
    if name.endswith(('W_O', 'W_d')):
        return w.T
    if name.endswith(('W_K', 'W_V')) and len(w) < D:
        # grouped queries: a head's own copy of its group's rows
        return w.unflatten(0, (-1, R)).repeat_interleave(D // len(w), dim=0).flatten(0, 1)
    return w


CARD = """---
{{ card_data }}
---
A language model by nanoCEM, the reference implementation of
[Causal Energy Minimization]({{ paper_url }}). With that code at hand:

    from nanocem.hf import HubTransformer
    model = HubTransformer.from_pretrained('this folder, or OWNER/NAME on the hub')

{{ about | default('', true) }}
"""


class HubTransformer(
        Transformer, PyTorchModelHubMixin, model_card_template=CARD, library_name='nanocem',
        pipeline_tag='text-generation', paper_url='https://arxiv.org/abs/2605.07588'):
    """A Transformer with save_pretrained, from_pretrained and push_to_hub: model.safetensors and
    config.json, {"cfg": the ModelConfig's fields}."""
    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, **rest: Any) -> 'HubTransformer':
        return super()._from_pretrained(strict=strict, **rest)  # the hub's default: anything fits


def to_hub(model: Transformer) -> HubTransformer:
    """The same model with the hub's methods; the two share their weights."""
    shared = HubTransformer(model.cfg)
    shared.load_state_dict(model.state_dict(), assign=True)
    return shared.eval()


def export(model: Transformer, folder: str, data: dict[str, Any]) -> None:
    """Write the model to a new or empty folder as the hub has it; `data`, a checkpoint's, names its
    tokenizer. SystemExit."""
    about = f'Tokenizer: {data["tokenizer"]}, vocabulary {data["vocab_size"]}.'
    try:
        os.makedirs(folder, exist_ok=True)
        if os.listdir(folder):
            fail(f'export={folder} is not empty; expected a new folder')
        to_hub(model).save_pretrained(folder, model_card_kwargs={'about': about})
    except (OSError, SafetensorError) as error:  # a full disk is safetensors' own error
        words = getattr(error, 'strerror', None) or error
        fail(f'export={folder}: {words}; expected a folder to write in')

"""The baseline is Hugging Face's Llama: the same logits and loss from its weights."""
import pytest
import torch
from torch import Tensor

from model import ModelConfig, Transformer

transformers = pytest.importorskip('transformers')
NAMES = {  # ours, and Hugging Face's
    'embedding': 'model.embed_tokens', 'norm.gain': 'model.norm', 'head': 'lm_head',
    'attn.norm.gain': 'input_layernorm', 'attn.W_Q': 'self_attn.q_proj',
    'attn.W_K': 'self_attn.k_proj', 'attn.W_V': 'self_attn.v_proj', 'attn.W_O': 'self_attn.o_proj',
    'mlp.norm.gain': 'post_attention_layernorm', 'mlp.W': 'mlp.up_proj', 'mlp.V': 'mlp.gate_proj',
    'mlp.W_d': 'mlp.down_proj'}


def weight(theirs: dict[str, Tensor], name: str) -> Tensor:
    """Hugging Face's weight for one of our names. W_O and W_d are transposed there."""
    if not name.startswith('blocks.'):
        return theirs[f'{NAMES[name]}.weight']
    _, n, name = name.split('.', 2)
    w = theirs[f'model.layers.{n}.{NAMES[name]}.weight']
    return w.T if name in ('attn.W_O', 'mlp.W_d') else w


@torch.no_grad()
def test_logits_and_loss_equal_hugging_face() -> None:
    torch.manual_seed(1)
    rope = {'rope_type': 'default', 'rope_theta': 500.0}
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=100, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        rms_norm_eps=1e-5, rope_parameters=rope, initializer_range=0.2)).eval()
    model = Transformer(ModelConfig(
        attn='llama', mlp='llama', d_model=48, n_layer=3, n_head=4, d_mlp=80, vocab_size=100,
        context_length=64, rope_theta=500.0))
    theirs = hf.state_dict()
    assert len(model.state_dict()) == len(theirs)
    model.load_state_dict({name: weight(theirs, name) for name in model.state_dict()})
    idx = torch.randint(100, (2, 40))
    assert (model(idx)[0] - hf(idx).logits).abs().max() < 1e-4
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    assert loss.item() == pytest.approx(hf(idx, labels=idx).loss.item(), abs=1e-5)

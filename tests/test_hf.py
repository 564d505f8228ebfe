"""The baseline is Hugging Face's Llama: the same logits from its weights."""
import pytest
import torch

from model import ModelConfig, Transformer

transformers = pytest.importorskip('transformers')
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


def ours_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {'embedding': state['model.embed_tokens.weight'],
             'norm.gain': state['model.norm.weight'], 'head': state['lm_head.weight']}
    for i in range(3):
        for name, theirs in OURS.items():
            w = state[f'model.layers.{i}.{theirs}.weight']
            found[f'blocks.{i}.{name}'] = w.T if name.endswith(('W_O', 'W_d')) else w
    return found


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
    model.load_state_dict(ours_of(hf.state_dict()))
    idx = torch.randint(100, (2, 40))
    assert (model(idx)[0] - hf(idx).logits).abs().max() < 1e-4
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    assert loss.item() == pytest.approx(hf(idx, labels=idx).loss.item(), abs=1e-5)

"""The baseline is Hugging Face's Llama: the same logits and loss from its weights."""
import pytest
import torch

from model import ModelConfig, Transformer
from nanocem.hf import from_llama_weights, to_llama_weights

transformers = pytest.importorskip('transformers')


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
    weights = hf.state_dict()
    model.load_state_dict(from_llama_weights(weights, model.state_dict()))
    back = to_llama_weights(model.state_dict())
    assert back.keys() == weights.keys()
    assert all(torch.equal(w, weights[name]) for name, w in back.items())
    idx = torch.randint(100, (2, 40))
    assert (model(idx)[0] - hf(idx).logits).abs().max() < 1e-4
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    assert loss.item() == pytest.approx(hf(idx, labels=idx).loss.item(), abs=1e-5)

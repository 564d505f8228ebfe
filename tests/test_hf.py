"""Hugging Face's Llama: the same logits from its weights."""
import pytest
import torch

from nanocem.hf import from_hf

transformers = pytest.importorskip('transformers')
ROPE = {'rope_type': 'default', 'rope_theta': 500.0}


def llama(**changes) -> torch.nn.Module:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**dict(
        vocab_size=100, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, rms_norm_eps=1e-5,
        initializer_range=0.2), **changes})).eval()


@pytest.mark.parametrize('changes', [
    {}, {'num_key_value_heads': 2}, {'tie_word_embeddings': True}, {'rope_parameters': ROPE}])
@torch.no_grad()
def test_logits_equal_hugging_face(changes: dict) -> None:
    hf = llama(**changes)
    idx = torch.randint(100, (2, 40))
    theirs = hf(idx).logits
    ours, _ = from_hf(hf)(idx)
    assert (ours - theirs).abs().max() < 1e-4
    if not changes:
        from_state, _ = from_hf(hf.state_dict(), n_head=4)(idx)
        assert torch.equal(from_state, ours)
        loss = from_hf(hf)(idx[:, :-1], idx[:, 1:])[1]
        assert loss.item() == pytest.approx(hf(idx, labels=idx).loss.item(), abs=1e-5)


@pytest.mark.parametrize('changes, message', [
    (dict(attention_bias=True), 'without biases'), (dict(hidden_act='gelu'), 'SiLU'),
    (dict(rope_parameters={'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 1e4}), 'plain rope'),
    (dict(head_dim=8), 'head_dim 8')], ids=str)
def test_what_our_baseline_has_no_part_for_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(llama(**changes))


def test_a_state_dict_needs_its_heads() -> None:
    with pytest.raises(ValueError, match='n_head'):
        from_hf(llama().state_dict())

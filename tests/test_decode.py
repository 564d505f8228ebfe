"""Decoding: what the cache holds, and that it changes no logit and no token."""
import pytest
import torch

from model import ModelConfig, Transformer
from nanocem.decode import Cache, generate
from test_model import SETS, TINY, describe, randomize


@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_cached_logits_equal_uncached_ones(cfg: ModelConfig) -> None:
    model, idx = randomize(Transformer(cfg), seed=10), torch.randint(50, (2, 16))
    cache, parts = Cache(16), []
    for part in idx.split([6, 1, 1, 3, 1, 4], dim=1):  # a prompt, single tokens, several at once
        parts.append(model(part, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, 1), model(idx)[0], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match='do not fit: 16 of 16 are taken'):
        model(idx[:, :1], cache=cache)
    # Numbers a token, for each use of attention: 2 D for Llama, and if a diagonal meets RoPE or the
    # exact update; else D
    diagonal_and_rope = cfg.kq_diag != 'none' and cfg.positions == 'rope'
    widths = 2 if cfg.attn == 'llama' or cfg.exact_update or diagonal_and_rope else 1
    uses = cfg.loops * cfg.attn_reuse * cfg.n_layer
    assert cache.floats_per_token() == widths * cfg.d_model * uses


@pytest.mark.parametrize('options', [
    dict(attn='llama', mlp='llama'), dict(attn_steps=2, mlp_steps=2),
    dict(positions='rope', kq_diag='none'), dict(attn_reuse=2, mlp_reuse=2),
    dict(positions='rope', kq_diag='per_head')], ids=str)
def test_generation_with_the_cache_gives_the_same_tokens(options: dict) -> None:
    model = randomize(Transformer(ModelConfig(**TINY, **options)), seed=15).eval()
    prompt = torch.randint(50, (2, 5))
    fast, slow = (generate(model, prompt, 40, temperature=0, use_cache=c) for c in (True, False))
    assert torch.equal(fast, slow) and fast.shape == (2, 45)  # past the context of 16
    assert torch.equal(fast[:, :5], prompt)
    seeds = [torch.Generator().manual_seed(s) for s in (1, 1, 2)]
    drawn = [generate(model, prompt, 10, 0.9, 5, seed) for seed in seeds]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    long = torch.randint(50, (1, 30))  # a prompt longer than the context
    fast, slow = (generate(model, long, 3, temperature=0, use_cache=c) for c in (True, False))
    assert torch.equal(fast, slow)


def test_top_k_keeps_to_the_likeliest_tokens() -> None:
    model = randomize(Transformer(ModelConfig(**TINY)), seed=16)
    prompt = torch.randint(50, (64, 4))
    allowed = model(prompt)[0][:, -1].topk(3).indices
    new = generate(model, prompt, 1, 5.0, 3, torch.Generator().manual_seed(0))[:, -1:]
    assert (new == allowed).any(1).all() and len(new.unique()) > 3

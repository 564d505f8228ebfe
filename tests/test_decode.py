"""Decoding: what the cache holds, and that it changes no logit and no token."""
import pytest
import torch

from model import ModelConfig, Transformer
from nanocem.decode import Cache
from test_model import SETS, TINY, describe, randomize


def cached(model: Transformer, *args, **options) -> torch.Tensor:
    with Cache(model):
        return model.generate(*args, **options)


plain = Transformer.generate


@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_cached_logits_equal_uncached_ones(cfg: ModelConfig) -> None:
    model, idx = randomize(Transformer(cfg), seed=10), torch.randint(50, (2, 16))
    logits, before = model(idx)[0].float(), list(vars(model))
    with Cache(model) as cache:
        # A prompt, single tokens, the same call again, several, another start
        for n in (6, 7, 8, 8, 11, 12, 16, 16, 9, 10):
            torch.testing.assert_close(
                model.next_logits(idx[:, :n]), logits[:, n - 1], rtol=0, atol=1e-5)
        other = idx.roll(1, 0)  # ids that do not begin as those read before
        torch.testing.assert_close(
            model.next_logits(other), logits.roll(1, 0)[:, -1], rtol=0, atol=1e-5)
    assert list(vars(model)) == before and torch.equal(model(idx)[0].float(), logits)
    # Numbers a token, for each use of attention: 2 D for Llama, and where RoPE or the exact update
    # needs keys beside h; else D. With the match bias Llama stores h, too
    needs_h = cfg.kq_diag != 'none' or cfg.match_bias != 'none'
    widths = 2 if cfg.exact_update or (needs_h and cfg.positions == 'rope') else 1
    if cfg.attn == 'llama':
        widths = 2 if cfg.match_bias == 'none' else 3
    uses = cfg.loops * cfg.attn_reuse * cfg.n_layer
    assert cache.floats_per_token() == widths * cfg.d_model * uses


@pytest.mark.parametrize('options', [
    dict(attn='llama', mlp='llama'), dict(attn_steps=2, mlp_steps=2),
    dict(positions='rope', kq_diag='none'), dict(attn_reuse=2, mlp_reuse=2),
    dict(positions='rope', kq_diag='per_head'),
    dict(key_shift='half'), dict(key_shift='half', match_bias='pair', attn_steps=2, loops=2),
    dict(key_shift='half', match_bias='token', kq_diag='shared'),
    dict(key_shift='half', match_bias='pair', attn='llama', mlp='llama'),
    dict(key_shift='half', match_bias='token', positions='rope')], ids=str)
def test_generation_with_the_cache_gives_the_same_tokens(options: dict) -> None:
    model = randomize(Transformer(ModelConfig(**TINY, **options)), seed=15).eval()
    prompt = torch.randint(50, (2, 5))
    fast, slow = (generate(model, prompt, 40, temperature=0) for generate in (cached, plain))
    assert torch.equal(fast, slow) and fast.shape == (2, 45)  # past the context of 16
    assert torch.equal(fast[:, :5], prompt)
    seeds = [torch.Generator().manual_seed(s) for s in (1, 1, 2)]
    drawn = [cached(model, prompt, 10, 0.9, 5, seed) for seed in seeds]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    long = torch.randint(50, (1, 30))  # a prompt longer than the context
    fast, slow = (generate(model, long, 3, temperature=0) for generate in (cached, plain))
    assert torch.equal(fast, slow)


def test_top_k_keeps_to_the_likeliest_tokens() -> None:
    model = randomize(Transformer(ModelConfig(**TINY)), seed=16)
    prompt = torch.randint(50, (64, 4))
    allowed = model(prompt)[0][:, -1].topk(3).indices
    new = model.generate(prompt, 1, 5.0, 3, torch.Generator().manual_seed(0))[:, -1:]
    assert (new == allowed).any(1).all() and len(new.unique()) > 3


def test_a_text_may_grow_by_more_than_its_length_at_once() -> None:
    model = randomize(Transformer(ModelConfig(**TINY, match_bias='token')), seed=16).eval()
    idx = torch.randint(50, (1, 50))  # the context is 16
    with Cache(model):
        for n in (1, 50):
            logits = model.next_logits(idx[:, :n])
    torch.testing.assert_close(logits, model.next_logits(idx), rtol=0, atol=1e-5)


def test_ids_that_change_in_place_and_another_T_are_read_anew() -> None:
    model = randomize(Transformer(ModelConfig(**TINY)), seed=19).eval()
    idx = torch.randint(50, (1, 12))
    with Cache(model):
        model.next_logits(idx[:, :8])
        idx[0, 3] = (idx[0, 3] + 1) % 50
        edited = model.next_logits(idx[:, :9])
        model.set_steps(attn_steps=3)
        of_three_steps = model.next_logits(idx[:, :10])
    torch.testing.assert_close(of_three_steps, model.next_logits(idx[:, :10]), rtol=0, atol=1e-5)
    model.set_steps(attn_steps=1)
    torch.testing.assert_close(edited, model.next_logits(idx[:, :9]), rtol=0, atol=1e-5)


def test_ids_of_an_interrupted_pass_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(Transformer(ModelConfig(**TINY, key_shift='half')), seed=17).eval()
    idx = torch.randint(50, (1, 8))
    with Cache(model):
        model.next_logits(idx[:, :5])
        with monkeypatch.context() as patch:
            patch.delattr(model.blocks[0], 'mlp')
            with pytest.raises(AttributeError):
                model.next_logits(idx[:, :7])
        logits = model.next_logits(idx)
    torch.testing.assert_close(logits, model.next_logits(idx), rtol=0, atol=1e-5)


@pytest.mark.parametrize('options', [dict(), dict(key_shift='half', match_bias='pair')], ids=str)
def test_other_passes_are_not_the_caches(options: dict) -> None:
    model = randomize(Transformer(ModelConfig(**TINY, **options)), seed=18).eval()
    idx = torch.randint(50, (2, 8))
    logits = model(idx)[0]
    with Cache(model) as cache:
        for n in (5, 6):
            model.next_logits(idx[:, :n])
        n_floats = cache.floats_per_token()
        for n in (1, 8):
            assert torch.allclose(model(idx[:, :n])[0], logits[:, :n], atol=1e-5)
        assert cache.floats_per_token() == n_floats
        torch.testing.assert_close(model.next_logits(idx), logits[:, -1].float(), rtol=0, atol=1e-5)

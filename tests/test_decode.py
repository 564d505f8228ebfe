"""Decoding: what the cache keeps, and that it changes no logit and no token."""
import copy

import pytest
import torch

from model import Cache, ModelConfig, Transformer
from test_model import GROUPED, SETS, TINY, describe, randomize


def logits_in_parts(model: Transformer, idx: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return the logits after each of these numbers of ids, which one cache reads in turn."""
    cache, begin, found = Cache(), 0, []
    with torch.no_grad():
        for end in ends:
            found.append(model(idx[:, begin:end], next_only=True, cache=cache)[0])
            begin = end
    assert cache.length == ends[-1]
    return torch.stack(found, dim=1)


@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_cached_logits_equal_uncached_ones(cfg: ModelConfig) -> None:
    """A prompt, single ids, and several at once."""
    model, idx = randomize(Transformer(cfg), seed=10), torch.randint(50, (2, 16))
    ends = [5, 6, 7, 10, 15, 16]
    found = logits_in_parts(model, idx, ends)
    right = model(idx)[0][:, [end - 1 for end in ends]]
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_what_a_cache_keeps(cfg: ModelConfig) -> None:
    """The keys, which are CEM's values; values that are not the keys; h where scores need it; and
    the halves of keys that key_shift brings to the next token."""
    model, cache = randomize(Transformer(cfg), seed=10), Cache()
    with torch.no_grad():
        model(torch.randint(50, (2, 9)), next_only=True, cache=cache)
    needs_h = cfg.kq_diag != 'none' or cfg.match_bias != 'none'
    own_values = cfg.attn == 'llama' and (not cfg.ties('kv') or cfg.positions == 'rope')
    of_keys = cfg.n_kv_head * cfg.d_model // cfg.n_head
    width = (1 + own_values + (cfg.key_shift == 'half') / 2) * of_keys + needs_h * cfg.d_model
    uses = cfg.attn_reuse * cfg.n_layer
    assert cache.numbers_per_token() == width * uses


@pytest.mark.parametrize(('options', 'share'), [
    (dict(), 1), (dict(attn_steps=2, positions='rope'), 1), (dict(attn='llama', mlp='llama'), 2),
    (dict(attn='llama', mlp='llama', tie='kv', positions='alibi'), 1)], ids=str)
def test_a_cache_of_grouped_queries_keeps_a_head_for_each_group(options: dict, share: int) -> None:
    """Two heads of width 6 for four of queries: half of what four keep, with the same logits."""
    model, idx = Transformer(ModelConfig(**TINY | GROUPED, **options)), torch.randint(50, (2, 16))
    cache = Cache()
    randomize(model, seed=10).next_logits(idx, cache)
    assert cache.numbers_per_token() == model.cfg.n_layer * share * 2 * 6
    found = logits_in_parts(model, idx, [5, 6, 7, 16])
    torch.testing.assert_close(found, model(idx)[0][:, [4, 5, 6, 15]], rtol=0, atol=1e-12)


@pytest.mark.parametrize('options', [
    dict(attn='llama', mlp='llama'), dict(attn_steps=2, mlp_steps=2),
    dict(positions='rope', kq_diag='none'), dict(attn_reuse=2, mlp_reuse=2),
    dict(positions='rope', kq_diag='per_head'), dict(preconditioner='diag_lowrank'),
    dict(key_shift='half'), dict(key_shift='half', match_bias='token', attn_steps=2),
    dict(key_shift='half', match_bias='token', kq_diag='shared'),
    dict(key_shift='half', match_bias='token', kq_diag='scaled'),
    dict(key_shift='half', match_bias='token', kq_diag='scaled', attn='llama', mlp='llama'),
    dict(attn='llama', mlp='llama', tie='kv', positions='alibi'),
    dict(key_shift='half', value_shift='half', attn='llama', mlp='llama', n_kv_head=1),
    dict(key_shift='half', match_bias='token', positions='rope', n_kv_head=1)], ids=str)
def test_generation_with_the_cache_gives_the_same_tokens(options: dict) -> None:
    model = randomize(Transformer(ModelConfig(**TINY, **options)), seed=15).eval()
    prompt = torch.randint(50, (2, 5))
    fast, slow = (model.generate(prompt, 40, temperature=0, use_cache=use) for use in (True, False))
    assert torch.equal(fast, slow) and fast.shape == (2, 45)  # past the context of 16
    assert torch.equal(fast[:, :5], prompt)
    drawn = [model.generate(prompt, 10, 0.9, 5, torch.Generator().manual_seed(seed))
             for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    long = torch.randint(50, (1, 30))  # a prompt longer than the context
    fast, slow = (model.generate(long, 3, temperature=0, use_cache=use) for use in (True, False))
    assert torch.equal(fast, slow)


def test_each_token_is_read_once() -> None:
    model, read = randomize(Transformer(ModelConfig(**TINY)), seed=16), []
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    model.generate(torch.randint(50, (1, 5)), 13, temperature=0)
    # When the context of 16 is full, its last half is read again
    assert read == [5, *[1] * 11, 8]


def test_p_is_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the weight of attention, while one cache is read. The MLP applies it to its step."""
    cfg = ModelConfig(**TINY, preconditioner='diag_lowrank', attn_steps=2)
    model, calls = randomize(Transformer(cfg), seed=17), []
    own = type(model.blocks[0].attn.P).forward
    monkeypatch.setattr(type(model.blocks[0].attn.P), 'forward',
                        lambda self, rows: calls.append(self) or own(self, rows))
    idx = torch.randint(50, (1, 5))
    model.generate(idx, 6, temperature=0)
    for block in model.blocks:
        assert (calls.count(block.attn.P), calls.count(block.mlp.P)) == (1, 6)
    # Weights that change afterwards are folded anew
    before = model(idx)[0]
    with torch.no_grad():
        model.blocks[0].attn.W_Q.mul_(2)
    assert not torch.allclose(model(idx)[0], before)


def test_a_text_may_grow_by_more_than_its_length_at_once() -> None:
    model = randomize(Transformer(ModelConfig(**TINY, match_bias='token')), seed=16).eval()
    idx = torch.randint(50, (1, 50))  # the context is 16
    found = logits_in_parts(model, idx, [1, 50])
    torch.testing.assert_close(found[:, -1], model.next_logits(idx), rtol=0, atol=1e-5)


def test_under_autocast_the_cache_gives_the_same_logits_but_for_rounding() -> None:
    model = randomize(Transformer(ModelConfig(**TINY, key_shift='half', match_bias='token',
                                              kq_diag='shared')), seed=18).float()
    idx = torch.randint(50, (2, 12))
    with torch.autocast('cpu', torch.bfloat16):
        found = logits_in_parts(model, idx, [5, 6, 12])
        right = model(idx)[0][:, [4, 5, 11]].float()
    assert (found - right).norm() < 0.05 * right.norm()


def test_a_copy_of_a_model_generates_the_same() -> None:
    model = randomize(Transformer(ModelConfig(**TINY, preconditioner='diag')), seed=19)
    idx = torch.randint(50, (1, 5))
    other = copy.deepcopy(model)
    assert torch.equal(model.generate(idx, 9, temperature=0),
                       other.generate(idx, 9, temperature=0))
    assert model.state_dict().keys() == other.state_dict().keys()

"""nanocem/fast.py: each implementation against the readable one, and which one runs where."""
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from model import ModelConfig, Transformer
from nanocem import fast, triton_attention
from test_model import SETS, TINY, describe, randomize

CASES = [  # batch, positions, heads, head width, heads with their own diagonal (0: none), ALiBi
    (1, 1, 2, 16, 1, True), (2, 17, 3, 16, 1, True), (1, 130, 3, 56, 1, True),
    (2, 67, 2, 72, 2, True), (1, 67, 2, 84, 0, True), (1, 67, 2, 84, 1, True),
    (1, 130, 2, 16, 2, False), (1, 140, 2, 64, 1, False), (1, 17, 1, 88, 0, False),
    (1, 40, 12, 16, 1, True)]
NAMES = ('q', 'k', 'du', 'h', 'b')
SMALL = dict(d_model=32, n_layer=2, n_head=2, d_mlp=20, vocab_size=50, context_length=20)
SCALE = 0.25


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaNs, which shows memory that is read before written."""
    # By torch.utils.deterministic.fill_uninitialized_memory, its default
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def alpha_and_parts(q: Tensor, k: Tensor, n_head: int, du: Tensor | None, h: Tensor | None,
                    b: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute alpha (B, K, J, J) by the formula. Returns it with q and k by head."""
    q, k = (x.unflatten(-1, (n_head, -1)).transpose(1, 2) for x in (q, k))  # (B, K, J, R)
    i = torch.arange(q.shape[2], device=q.device)
    scores = q @ k.mT * SCALE
    if du is not None:
        scores = scores + du @ h[:, None].mT
    if b is not None:
        m = slopes(n_head).to(q)
        scores = scores - m[:, None, None] * (i[:, None] - i).abs()
        scores = scores + torch.where(i[:, None] == i, b[:, None, None], 0)
    return scores.masked_fill(i > i[:, None], -math.inf).softmax(-1), q, k


def slopes(n_head: int) -> Tensor:
    """ALiBi's m_k."""
    each = [2.0 ** -k if n_head <= 8 else 2.0 ** (-8 * k / n_head) for k in range(1, n_head + 1)]
    return torch.tensor(each, dtype=torch.float64)


def readable(q: Tensor, k: Tensor, n_head: int, scale: float, du: Tensor | None, h: Tensor | None,
             b: Tensor | None) -> Tensor:
    alpha, _, k = alpha_and_parts(q, k, n_head, du, h, b)
    return (alpha @ k).transpose(1, 2).flatten(-2)


def sizes_of_summed_terms(tensors: list[Tensor | None], n_head: int, do: Tensor) -> list[Tensor]:
    """Return o and the gradients of q, k, du, h, b with absolute values of all summed terms. It
    bounds rounding errors: terms round, and their sum may cancel, even to zero where J = 1."""
    q, k, du, h, b = tensors
    alpha, q, k = alpha_and_parts(q, k, n_head, du, h, b)
    q, k, do = q.abs(), k.abs(), do.abs().unflatten(-1, (n_head, -1)).transpose(1, 2)
    o = alpha @ k
    ds = alpha * (do @ k.mT + (do * o).sum(-1, keepdim=True))
    sizes = [o, ds @ k * SCALE, alpha.mT @ do + ds.mT @ q * SCALE]
    sizes = [x.transpose(1, 2).flatten(-2) for x in sizes]
    if du is not None:
        ds_of_du = ds if du.shape[1] > 1 else ds.sum(1, keepdim=True)
        sizes += [ds_of_du @ h.abs()[:, None], (ds_of_du.mT @ du.abs()).sum(1)]
    if b is not None:
        sizes.append(ds.diagonal(dim1=2, dim2=3).sum((0, 2)))
    return [x.detach() for x in sizes]


def inputs(B: int, J: int, K: int, R: int, n: int, alibi: bool,
           ) -> tuple[list[Tensor | None], Tensor]:
    """Random q, k, du, h, b as leaves, and a gradient of the output."""
    torch.manual_seed(J + R)
    q, k, h, do = torch.randn(4, B, J, K * R).unbind()
    du = torch.randn(B, n, J, K * R) / (K * R) ** 0.5 if n else None
    b = torch.randn(K) if alibi else None
    tensors = (q, k, du, h if n else None, b)
    return [None if t is None else t.clone().requires_grad_() for t in tensors], do


def run(tensors: list[Tensor | None], n_head: int, do: Tensor, function: Callable) -> list[Tensor]:
    """Return the output and the gradients of all tensors that are not None."""
    q, k, *rest = tensors
    o = function(q, k, n_head, SCALE, *rest)
    return [o, *torch.autograd.grad(o, [t for t in tensors if t is not None], do)]


def names(tensors: list[Tensor | None]) -> list[str]:
    """What run returns, in words."""
    return ['o', *(name for name, t in zip(NAMES, tensors, strict=True) if t is not None)]


# Attention

@pytest.mark.parametrize('cfg', [
    *(c for c in SETS if not c.exact_update),
    ModelConfig(**{**TINY, 'd_model': 30}),  # a width that the fused path pads
], ids=describe)
def test_faster_attention_equals_the_readable_path(cfg: ModelConfig) -> None:
    model, idx = randomize(Transformer(cfg), seed=8), torch.randint(50, (2, 17))
    results = []
    for impl in ('readable', 'sdpa'):
        model.set_attn_impl(impl)
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


def losses(cfg: ModelConfig, impls: tuple[str, ...], idx: Tensor, compiled: bool = False,
           ) -> list[list[Tensor]]:
    """Return the model's logits, loss and all gradients, for each implementation."""
    results = []
    for impl in impls:
        torch.manual_seed(0)
        model = Transformer(cfg)
        model.set_attn_impl(impl)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        call = torch.compile(model, fullgraph=True, backend='aot_eager') if compiled else model
        loss = call(idx[:, :-1], idx[:, 1:])[1]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append([model(idx)[0], loss, *gradients])
    return results


WHOLE = pytest.mark.parametrize('options', [
    dict(attn_steps=1, preconditioner='none'), dict(kq_diag='per_head', preconditioner='diag'),
    dict(kq_diag='none'), dict(attn_steps=2, mlp_steps=2), dict(positions='rope'),
    dict(residual='normed', attn_steps=2),
    dict(score_scale='head', mlp='llama')], ids=str)


def agree(options: dict, impl: str) -> None:
    """Compare norms of whole tensors in float32, because single elements may cancel."""
    cfg = ModelConfig(**{**SMALL, **options})
    idx = torch.randint(50, (2, 18), generator=torch.Generator().manual_seed(1))
    for slow, other in zip(*losses(cfg, ('readable', impl), idx), strict=True):
        assert (other - slow).norm() <= 2e-4 * slow.norm()


def is_one_graph(impl: str) -> None:
    """fullgraph=True: torch.compile would refuse a break."""
    cfg = ModelConfig(**{**SMALL, 'n_layer': 1, 'attn_steps': 2})
    idx = torch.randint(50, (2, 18))
    (eager,), (compiled,) = losses(cfg, (impl,), idx), losses(cfg, (impl,), idx, compiled=True)
    for a, b in zip(eager, compiled, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


def test_a_training_step_is_one_graph() -> None:
    is_one_graph('readable')


@pytest.mark.parametrize('options', [
    dict(attn='llama', mlp='llama'), dict(attn='llama', positions='alibi'), dict(attn_steps=2),
    dict(positions='rope', kq_diag='per_head')], ids=str)
def test_padding_changes_no_logit(options: dict) -> None:
    """Two texts in a batch, the shorter one padded on the left or on the right, against each
    alone; every implementation falls back to the one that takes a mask."""
    model = randomize(Transformer(ModelConfig(**TINY, **options)), seed=21)
    idx = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(22))
    mask = torch.ones(2, 9, dtype=torch.bool)
    for impl in ('auto', 'sdpa', 'triton'):
        model.set_attn_impl(impl)
        for hidden, shown in ((slice(0, 4), slice(4, 9)), (slice(5, 9), slice(0, 5))):
            mask[1] = True
            mask[1, hidden] = False
            both, alone = model.hidden(idx, key_mask=mask), model.hidden(idx[1:, shown])
            torch.testing.assert_close(both[1:, shown], alone, rtol=0, atol=1e-11)
            torch.testing.assert_close(both[:1], model.hidden(idx[:1]), rtol=0, atol=1e-11)
            assert both.isfinite().all()


# Which implementation runs

def test_attention_falls_back_by_itself_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, half = torch.device('cpu'), torch.device('cuda'), torch.bfloat16
    def path(device: torch.device, dtype: torch.dtype, impl: str = 'auto', **options) -> str:
        with torch.device('meta'):
            model = Transformer(ModelConfig(**{**SMALL, **options}))
        model.set_attn_impl(impl)
        return fast.attention_path(model, device, dtype)
    llama, rope = dict(attn='llama'), dict(positions='rope', kq_diag='none')
    alibi = {**llama, 'positions': 'alibi'}
    by_softmax, by_torch, ours = 'readable attention', 'sdpa attention', 'triton attention'
    assert path(cpu, torch.float32) == path(cpu, half, **alibi) == by_softmax
    assert path(cpu, torch.float32, **rope) == by_torch
    if fast.HAS_TRITON:
        assert path(cpu, torch.float32, 'triton') == ours  # interpreted
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    monkeypatch.setattr(fast, 'HAS_TRITON', True)
    monkeypatch.setattr(triton_attention, 'agrees', lambda *case: True)
    assert path(gpu, half) == path(gpu, half, **{**rope, 'kq_diag': 'shared'}) == ours
    for options in (rope, llama, alibi, dict(impl='sdpa'), dict(d_model=300)):
        assert path(gpu, half, **options) == by_torch
    for options in dict(impl='readable'), dict(exact_update=True):
        assert path(gpu, half, **options) == by_softmax
    assert path(gpu, torch.float32) == by_torch
    assert 'triton cannot run' in path(cpu, torch.float32, 'triton')
    monkeypatch.setattr(triton_attention, 'agrees', lambda *case: False)
    assert path(gpu, half) == by_torch
    monkeypatch.setattr(fast, 'HAS_TRITON', False)
    assert path(gpu, half) == by_torch

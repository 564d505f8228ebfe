"""model.py's attention and loss: each way to compute them against the sums written out, and what
an edit of model.py does to them."""
import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import model as model_py
from model import CEMAttention, LossInParts, ModelConfig, Transformer, make_positions
from nanocem import same, triton_attention
from test_model import SETS, TINY, describe, randomize

OLD = (triton_attention.HAS_TRITON and triton_attention.triton.__version__.startswith('3.6.')
       and np.lib.NumpyVersion(np.__version__) >= '2.4.0')
interpreted = pytest.mark.skipif(
    not triton_attention.HAS_TRITON or OLD,
    reason="no Triton, or Triton 3.6, whose interpreter does not run with numpy 2.4 and later")
PROMPT = torch.tensor([7, 3])
SMALL = dict(d_model=32, n_layer=2, n_head=2, d_mlp=20, vocab_size=50, context_length=20)


def loss_and_gradients(cfg: ModelConfig, impl: str, dtype: torch.dtype,
                       compiler: Callable = lambda model: model) -> list[Tensor]:
    """Return the loss of a model with random weights, and the gradients of all parameters."""
    torch.manual_seed(8)
    model = randomize(Transformer(cfg), seed=9).to(dtype)
    if impl == 'triton':
        assert triton_attention.use_kernels(model, dtype) or not cfg.has_bias()
    idx = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(1))
    loss = compiler(model)(idx[:, :-1], idx[:, 1:])[1]
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's fused attention take a bias, as on a GPU."""
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True, raising=False)


@pytest.mark.parametrize('gpu', [False, True])
@pytest.mark.parametrize('cfg', [
    *SETS, ModelConfig(**{**TINY, 'd_model': 30}),  # a width that attend pads
], ids=describe)
def test_attend_is_the_softmax_of_the_scores(
        cfg: ModelConfig, gpu: bool, request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of the queries, and fused, with all gradients, against the sums written out."""
    if gpu:
        request.getfixturevalue('as_on_a_gpu')
    monkeypatch.setattr(model_py, 'FEW_QUERIES', 4)  # of 9 queries
    attn, (K, R, D) = (randomize(Transformer(cfg), seed=9).blocks[0].attn,
                       (cfg.n_head, cfg.d_model // cfg.n_head, cfg.d_model))
    q, k, v = torch.randn(3, 2, K, 9, R, dtype=torch.float64, requires_grad=True)
    u, h = torch.randn(2, 2, 9, D, dtype=torch.float64, requires_grad=True)
    pos = make_positions(cfg, h)
    alpha = attn.scores(q, k, pos, u, h).softmax(dim=-1)
    right = [alpha @ v, *([attn.diagonal_update(alpha, h)] if attn.adds_diagonal else [])]
    found = [x for x in attn.attend(q, k, v, pos, u, h) if torch.is_tensor(x)]
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    inputs = [q, k, v, *attn.parameters(), *([u, h] if cfg.needs_h() else [])]
    found, right = (torch.autograd.grad(sum(x.square().sum() for x in o), inputs,
                                        allow_unused=True, retain_graph=True)
                    for o in (found, right))
    for a, b in zip(found, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize('options', [
    dict(), dict(match_bias='token', kq_diag='scaled'),
    dict(attn='llama', mlp='llama', attn_steps=1)], ids=str)
@pytest.mark.parametrize('impl', ['own', pytest.param('triton', marks=interpreted)])
def test_a_training_step_is_one_graph(impl: str, options: dict) -> None:
    """With fullgraph=True torch.compile refuses a break."""
    if impl == 'triton' and options:
        pytest.skip('the kernels have no whole gradient, and need a bias')
    attn_steps = 2 if impl == 'own' else 1  # Triton's interpreter takes seconds for a step
    cfg = ModelConfig(**{**SMALL, 'n_layer': 1, 'attn_steps': attn_steps, **options})
    compiled = loss_and_gradients(cfg, impl, torch.float32, lambda model: torch.compile(
        model, fullgraph=True, backend='aot_eager'))
    for a, b in zip(loss_and_gradients(cfg, impl, torch.float32), compiled, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


def test_second_derivatives_need_torchs_math() -> None:
    """The fused attention has none on a CPU, and says so."""
    model = randomize(Transformer(ModelConfig(**TINY, attn='llama', mlp='llama')), seed=21)
    idx = torch.randint(50, (1, 9))

    def second() -> Tensor:
        gradient, = torch.autograd.grad(model(idx, idx)[1], model.embedding, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), model.embedding)[0]
    with sdpa_kernel(SDPBackend.MATH):
        assert second().isfinite().all() and second().any()
    with pytest.raises(RuntimeError):
        second()


# The kernels

def test_what_the_kernels_compute() -> None:
    def fits(**options) -> bool:
        with torch.device('meta'):
            model = Transformer(ModelConfig(**{**SMALL, **options}))
        return triton_attention.fits(model.blocks[0].attn)
    llama, rope, alibi = dict(attn='llama'), dict(positions='rope'), dict(positions='alibi')
    match = dict(match_bias='token')
    for options in ({}, dict(**rope, kq_diag='shared'), dict(**llama, **alibi, tie='kv'),
                    dict(**match, kq_diag='shared'), dict(**llama, **alibi, **match, tie='kv')):
        assert fits(**options)
    # With RoPE Llama's tied values are not rotated: they are not the keys. The whole gradient needs
    # the weights, which the kernels do not give
    for options in (rope, llama, {**llama, **alibi}, dict(**llama, **rope, **match, tie='kv'),
                    dict(**match, kq_diag='per_head'),
                    dict(exact_update=True, kq_diag='shared'), dict(kq_diag='scaled')):
        assert not fits(**options)


@interpreted
def test_kernels_that_compute_something_else_are_not_used(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    model, idx = randomize(Transformer(ModelConfig(**SMALL)), seed=3).float(), torch.arange(9)[None]
    right = model(idx)[0]
    own = triton_attention.attention
    monkeypatch.setattr(triton_attention, 'attention', lambda *of: 1.001 * own(*of))
    assert not triton_attention.use_kernels(model, torch.float32)
    assert 'triton attention gives another output than' in capsys.readouterr().err
    assert torch.equal(model(idx)[0], right)
    monkeypatch.setattr(triton_attention, 'attention', lambda *of: 1 / 0)
    assert not triton_attention.use_kernels(model, torch.float32)
    assert 'triton attention does not run (ZeroDivisionError' in capsys.readouterr().err


def soft_cap(attend: Callable) -> Callable:
    def capped(self, *args):
        o, update = attend(self, *args)
        return 0.97 * o, update
    return capped


def clamped(scores: Callable) -> Callable:
    return lambda self, *args: scores(self, *args).clamp(max=0.1)


def windowed(bias: Callable) -> Callable:
    return lambda self, pos, u, h: bias(self, pos, u, h).masked_fill(pos.distance >= 3, -torch.inf)


EDITS = {'attend': soft_cap, 'scores': clamped, 'bias': windowed}


def by_lines(attn: CEMAttention, q: Tensor, k: Tensor, v: Tensor, pos: model_py.Positions,
             u: Tensor, h: Tensor) -> Tensor:
    """What the kernels compute, by model.py as it was before an edit."""
    b = BIAS(attn, pos, u, h)
    return ((q / attn.tau) @ k.mT + b).softmax(-1) @ k


BIAS = CEMAttention.bias


@pytest.mark.parametrize('kq_diag', ['none', 'shared'])
@pytest.mark.parametrize('edit', [None, *EDITS])
def test_kernels_beside_an_edit_are_not_used(
        edit: str | None, kq_diag: str, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture) -> None:
    """They are compared with the lines as they are. What is around attend holds for them, too. No
    Triton is needed."""
    used = edit in (None, 'attend')
    model = randomize(Transformer(ModelConfig(**SMALL, kq_diag=kq_diag)), seed=3).float()
    idx = torch.arange(12)[None]
    unedited = model(idx)[0]
    if edit:
        monkeypatch.setattr(CEMAttention, edit, EDITS[edit](getattr(CEMAttention, edit)))
    right = model(idx)[0]
    assert torch.equal(right, unedited) == (edit is None)
    monkeypatch.setattr(triton_attention, 'runs_triton', lambda *of: True)
    monkeypatch.setattr(triton_attention, 'attend', by_lines)
    assert triton_attention.use_kernels(model, torch.float32) == used
    assert ('is not used' in capsys.readouterr().err) == (not used)
    torch.testing.assert_close(model(idx)[0], right)


# The loss

@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Let a model compute its loss in parts of so many logits."""
    return lambda n: monkeypatch.setitem(model_py.FEW_LOGITS, 'cpu', (n, n))


def test_the_loss_in_parts_is_the_mean_over_targets_that_count(few: Callable) -> None:
    torch.manual_seed(4)
    model = Transformer(ModelConfig(**{**SMALL, 'vocab_size': 50})).double()
    x, W = torch.randn(3, 170, 32).double().requires_grad_(), model.head
    targets = torch.randint(50, (3, 170))
    for counts in torch.rand(3, 170) < 0.6, torch.ones(3, 170, dtype=torch.bool):
        mean = F.cross_entropy((x @ W.mT)[counts], targets[counts])
        gradients = torch.autograd.grad(3 * mean, (x, W))
        for n in (2 ** 26, 7000, 50, 1):  # all rows; 128 rows at a time, the last part shorter
            few(n)
            loss = model.loss(x, targets.where(counts, -100))
            total = loss.grad_fn  # the loss is where(..., total / number, NaN)
            for _ in range(2):
                total = next(f for f, _ in total.next_functions if f is not None)
            assert (type(total).__name__ == 'LossInPartsBackward') == (n < 2 ** 26)
            torch.testing.assert_close(loss, mean)
            torch.testing.assert_close(torch.autograd.grad(3 * loss, (x, W)), gradients)
            # Without a target that counts there is no mean, and nothing to learn
            nothing = model.loss(x, torch.full_like(targets, -100))
            assert nothing.isnan() and not torch.autograd.grad(nothing, x)[0].any()


@pytest.mark.slow
@pytest.mark.parametrize('autocast', [False, True])
def test_the_loss_in_parts_is_compiled_and_cast(autocast: bool, few: Callable) -> None:
    torch.manual_seed(2)
    model = Transformer(ModelConfig(**{**SMALL, 'n_layer': 1}))
    idx, results = torch.randint(50, (12, 18)), []
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    for at_once, call in ((2 ** 26, model), (350, model), (350, compiled)):
        few(at_once)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            loss = call(idx[:, :-1], idx[:, 1:])[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        assert all(g.dtype == torch.float32 for g in results[-1])
    for whole, piece, by_compiler in zip(*results, strict=True):
        for other in (piece, by_compiler):
            assert (whole - other).norm() <= (2e-2 if autocast else 1e-5) * whole.norm()


def test_a_second_derivative_of_the_loss_in_parts_is_an_error() -> None:
    x, W = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    loss = LossInParts.apply(x, W, torch.zeros(10, dtype=torch.long), 2)
    with pytest.raises(RuntimeError, match='no second derivative of a loss in parts'):
        torch.autograd.grad(loss, x, create_graph=True)


# The cache

def test_a_cache_beside_an_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used if it gives the logits of the whole text."""
    class LooksBack(model_py.CEMMLP):
        def forward(self, x):
            return super().forward(x + torch.roll(x, 6, dims=1))
    model = randomize(Transformer(ModelConfig(**SMALL, kq_diag='shared')), seed=5)
    assert same.cache_agrees(model, PROMPT)
    other = copy.deepcopy(model)
    other.blocks[1].mlp.__class__ = LooksBack
    assert not same.cache_agrees(other, PROMPT)
    monkeypatch.setattr(F, 'silu', F.gelu)  # an edit that is one for the cache, too
    assert same.cache_agrees(model, PROMPT)
    monkeypatch.setattr(CEMAttention, 'bias', windowed(CEMAttention.bias))
    assert same.cache_agrees(model, PROMPT)


def test_a_model_is_saved_and_copied(tmp_path: Path) -> None:
    model, idx = Transformer(ModelConfig(**SMALL)), torch.arange(12)[None]
    right = model(idx, idx)[1]
    torch.save(model, tmp_path / 'model.pt')
    for other in (torch.load(tmp_path / 'model.pt', weights_only=False), copy.deepcopy(model)):
        assert torch.equal(other(idx, idx)[1], right)

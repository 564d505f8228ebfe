"""kernels.py against the readable path, Triton's under its interpreter, which conftest.py sets; compiled for GPUs that need not
be there; and the loss in pieces. What needs a GPU runs on one, in a process of its own, where the kernels are compiled."""
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model as model_module
import nanocem.triton_attention as kernels
from model import ModelConfig, Transformer

needs_triton = pytest.mark.skipif(not model_module.HAS_TRITON, reason='Triton is not installed')
CASES = [  # batch, positions, heads, head width, heads with a diagonal of their own (0: none), ALiBi
    (1, 1, 2, 16, 1, True), (2, 17, 3, 16, 1, True), (1, 130, 3, 56, 1, True), (2, 67, 2, 72, 2, True), (1, 67, 2, 84, 0, True),
    (1, 67, 2, 84, 1, True), (1, 130, 2, 16, 2, False), (1, 140, 2, 64, 1, False), (1, 17, 1, 88, 0, False)]
SMALL = dict(d_model=32, n_layer=2, n_head=2, d_mlp=20, vocab_size=50, context_length=20)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever torch.empty gives is full of NaNs: what a kernel leaves unwritten, or reads unasked, shows."""
    torch.use_deterministic_algorithms(True)  # with torch.utils.deterministic.fill_uninitialized_memory, its default
    yield
    torch.use_deterministic_algorithms(False)


def readable(q: Tensor, k: Tensor, n_head: int, scale: float, du: Tensor | None, h: Tensor | None, b: Tensor | None) -> Tensor:
    """kernels.attention's equations as they stand."""
    q, k = (x.unflatten(-1, (n_head, -1)).transpose(1, 2) for x in (q, k))  # (B, K, J, R)
    i = torch.arange(q.shape[2], device=q.device)
    scores = q @ k.mT * scale
    if du is not None:
        scores = scores + du @ h[:, None].mT
    if b is not None:
        m = 2.0 ** (-8 / n_head * torch.arange(1, n_head + 1, device=q.device, dtype=q.dtype))[:, None, None]
        scores = scores - m * (i[:, None] - i).abs() + torch.where(i[:, None] == i, b[:, None, None], 0)
    return (scores.masked_fill(i > i[:, None], -math.inf).softmax(-1) @ k).transpose(1, 2).flatten(-2)


def inputs(B: int, J: int, K: int, R: int, n: int, alibi: bool) -> tuple[list[Tensor | None], Tensor]:
    """Random q, k, du, h, b as leaves, and a gradient of the output."""
    torch.manual_seed(J + R)
    q, k, h, do = torch.randn(4, B, J, K * R).unbind()
    du, b = torch.randn(B, n, J, K * R) / (K * R) ** 0.5 if n else None, torch.randn(K) if alibi else None
    return [None if t is None else t.clone().requires_grad_() for t in (q, k, du, h if n else None, b)], do


by_triton, by_rows = (partial(kernels.attention, use_triton=b) for b in (True, False))


def run(tensors: list[Tensor | None], n_head: int, do: Tensor, function=by_triton) -> list[Tensor]:
    """The output and the gradients of those that are there."""
    q, k, *rest = tensors
    o = function(q, k, n_head, 0.25, *rest)
    return [o, *torch.autograd.grad(o, [t for t in tensors if t is not None], do)]


@needs_triton
@pytest.mark.parametrize('case', CASES, ids=str)
def test_triton_equals_the_readable_formula(case: tuple) -> None:
    tensors, do = inputs(*case)
    fast, again = (run(tensors, case[2], do) for _ in range(2))
    slow = run([None if t is None else t.double() for t in tensors], case[2], do.double(), readable)
    for name, one, two, exact in zip(('o', 'q', 'k', 'du', 'h', 'b'), fast, again, slow, strict=False):
        assert torch.equal(one, two), name  # nothing atomic
        assert (one - exact).norm() <= 2e-6 * (1 + exact.norm()), name


@pytest.mark.parametrize('at_once', [2 ** 20, 140 * 32, 1])  # all at once, some of the cases in pieces, 32 rows each
@pytest.mark.parametrize('case', [(5, 65, 2, 7, 2, True), *CASES], ids=str)
def test_rows_equal_the_readable_formula(case: tuple, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', at_once)
    tensors, do = inputs(*case)
    tensors, do = [None if t is None else t.detach().double().requires_grad_() for t in tensors], do.double()
    fast, slow = (run(tensors, case[2], do, f) for f in (by_rows, readable))
    for name, one, exact in zip(('o', 'q', 'k', 'du', 'h', 'b'), fast, slow, strict=False):
        torch.testing.assert_close(one, exact, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize('use_triton', [pytest.param(True, marks=needs_triton), False])
def test_operator_keeps_torchs_contract(use_triton: bool) -> None:
    for case in (2, 17, 2, 16, 1, True), (1, 17, 2, 16, 0, False):
        tensors, do = inputs(*case)
        tensors[2:4] = (t if t is None else t.detach().mT.contiguous().mT.requires_grad_() for t in tensors[2:4])  # transposed
        how = case[2], 0.25, use_triton
        torch.library.opcheck(kernels.attention_op, (*tensors, *how))
        o, lse = kernels.attention_op(*tensors, *how)
        detached = [None if t is None else t.detach() for t in (do, *tensors, o, lse)]
        torch.library.opcheck(kernels.backward_op, (*detached, *how), test_utils=('test_schema', 'test_faketensor'))


def losses(cfg: ModelConfig, paths: tuple[str, ...], idx: Tensor, compiled: bool = False) -> list[list[Tensor]]:
    """For each path of the same model its logits, loss and every parameter's gradient."""
    results = []
    for cfg.attn_impl in paths:
        torch.manual_seed(0)
        model = Transformer(cfg)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        call = torch.compile(model, fullgraph=True, backend='aot_eager') if compiled else model
        loss = call(idx[:, :-1], idx[:, 1:])[1]
        results.append([model(idx)[0], loss, *torch.autograd.grad(loss, list(model.parameters()))])
    return results


@pytest.mark.parametrize('options', [
    dict(attn_steps=1, preconditioner='none'), dict(kq_diag='per_head', preconditioner='diag'), dict(kq_diag='none'), {},
    dict(positions='rope'), dict(residual='raw', score_scale='head', mlp='llama', mlp_steps=1)], ids=str)
@pytest.mark.parametrize('impl', ['rows', pytest.param('triton', marks=needs_triton)])
def test_whole_models_agree(options: dict, impl: str) -> None:
    cfg = ModelConfig(**{**SMALL, **options})
    for readable, fast in zip(*losses(cfg, ('math', impl), torch.randint(50, (2, 18))), strict=True):
        torch.testing.assert_close(fast, readable, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize('impl', ['math', 'rows', pytest.param('triton', marks=needs_triton)])
def test_a_training_step_is_one_graph(impl: str) -> None:
    """fullgraph=True: torch.compile would refuse a break."""
    cfg, idx = ModelConfig(**{**SMALL, 'n_layer': 1}), torch.randint(50, (2, 18))
    (eager,), (compiled,) = losses(cfg, (impl,), idx), losses(cfg, (impl,), idx, compiled=True)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# Which path runs

def test_path_falls_back_by_itself_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, half = torch.device('cpu'), torch.device('cuda'), torch.bfloat16
    def path(device: torch.device, dtype: torch.dtype, **options) -> str:
        with torch.device('meta'):
            return Transformer(ModelConfig(**{**SMALL, **options})).attention_path(device, dtype)
    llama, rope = dict(attn='llama', attn_steps=1), dict(positions='rope', kq_diag='none')
    rows, long = 'attention by kernels.py, a few rows at a time', dict(context_length=65)
    assert path(cpu, torch.float32) == path(cpu, half, **long) == path(cpu, torch.float32, **llama, **long, positions='alibi') \
        == 'attention by readable softmax'
    assert path(cpu, torch.float32, **long) == path(cpu, torch.float64, attn_impl='rows') == rows
    assert path(cpu, torch.float32, **long, **rope) == "attention by torch's fused kernel"
    assert 'attn_impl=rows needs' in path(cpu, half, attn_impl='rows')
    if model_module.HAS_TRITON:
        assert path(cpu, torch.float32, attn_impl='triton') == "attention by kernels.py's Triton"  # interpreted
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    monkeypatch.setattr(model_module, 'HAS_TRITON', True)
    assert path(gpu, half) == path(gpu, half, **{**rope, 'kq_diag': 'shared'}) == "attention by kernels.py's Triton"
    for options in (rope, llama, {**llama, 'positions': 'alibi'}, dict(attn_impl='sdpa'), dict(d_model=300)):
        assert path(gpu, half, **options) == "attention by torch's fused kernel"
    for options in dict(attn_impl='math'), dict(exact_update=True):
        assert path(gpu, half, **options) == 'attention by readable softmax'
    assert path(gpu, torch.float32) == "attention by torch's fused kernel"
    assert 'attn_impl=triton needs' in path(cpu, torch.float32, attn_impl='triton')
    monkeypatch.setattr(model_module, 'HAS_TRITON', False)
    assert path(gpu, half) == "attention by torch's fused kernel"


# Compiled for GPUs

def python(*arguments: str) -> str:
    """The output of a Python process in which kernels are not interpreted."""
    done = subprocess.run([sys.executable, *arguments], env={**os.environ, 'TRITON_INTERPRET': '0'}, capture_output=True,
                          text=True, cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.parametrize('arch, widths', [(80, ('84',)), (90, ('64',))])
def test_kernels_compile_ahead_within_a_gpus_means(arch: int, widths: tuple[str, ...]) -> None:
    rows = [line.split() for line in python('-m', 'nanocem.triton_attention', str(arch), *widths).splitlines()[2:]]
    assert len(rows) == 4 * len(widths)
    for name, sm, *_, registers, shared, spilled in rows:
        assert sm == f'sm_{arch}' and int(registers) <= 255
        assert int(shared) <= 163 * 1024, name  # bytes, an A100's
        assert int(spilled) <= 256, name  # bytes a thread, written and read; a few where a width is odd


def check_16_bits(device: str, dtype: torch.dtype, cases: list[tuple], most: float) -> None:
    """The kernels' relative errors against float64 are at most so many times SDPA's with the same bias, and the same twice."""
    def sdpa(q, k, n_head, scale, du, h, b):
        q, k = (x.unflatten(-1, (n_head, -1)).transpose(1, 2) for x in (q, k))
        i = torch.arange(q.shape[2], device=device)
        m = 2.0 ** (-8 / n_head * torch.arange(1, n_head + 1, device=device))[:, None, None]
        bias = du @ h[:, None].mT - m * (i[:, None] - i).abs() + torch.where(i[:, None] == i, b[:, None, None], 0)
        bias = bias.masked_fill(i > i[:, None], -math.inf).to(dtype)
        return F.scaled_dot_product_attention(q, k, k, bias, scale=scale).transpose(1, 2).flatten(-2)
    for case in cases:
        tensors, do = inputs(*case)
        tensors, do = [t.detach().to(device, dtype).requires_grad_() for t in tensors], do.to(device, dtype)
        exact = run([t.double() for t in tensors], case[2], do.double(), readable)
        ours, again, theirs = (run(tensors, case[2], do, f) for f in (by_triton, by_triton, sdpa))
        for name, one, two, other, x in zip(('o', 'q', 'k', 'du', 'h', 'b'), ours, again, theirs, exact, strict=True):
            assert torch.equal(one, two), name
            one, other = (((y.double() - x).norm() / x.norm()).item() for y in (one, other))
            print(f'{case} {name}: {one:.2e}, SDPA {other:.2e}')
            assert one <= most * other + 1e-4, (case, name, one, other)


@needs_triton
def test_float16_error_is_near_sdpas() -> None:
    """The interpreter has no bfloat16; SDPA on a CPU rounds less along the way than fused kernels do."""
    check_16_bits('cpu', torch.float16, [(1, 130, 4, 64, 1, True), (2, 67, 2, 84, 2, True)], 1.7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_bfloat16_error_is_no_worse_than_sdpas() -> None:
    cases = [(2, 1024, 12, 64, 1, True), (2, 515, 12, 72, 1, True), (1, 777, 8, 84, 8, True)]
    print(python('-c', 'import torch, tests.test_triton_attention as t\n'
                 f't.check_16_bits("cuda", torch.bfloat16, {cases}, 1.05)'))


# The loss

def test_loss_in_pieces_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, idx = Transformer(ModelConfig(**SMALL)).double(), torch.randint(50, (3, 18))
    results = []
    for at_once in (2 ** 26, 350, 50, 1):  # whole; 7 rows, the last piece shorter; a row; less than a row
        monkeypatch.setattr(model_module, 'LOGITS_AT_ONCE', at_once)
        logits, loss = model(idx[:, :-1], idx[:, 1:])
        assert logits is None
        results.append([loss, *torch.autograd.grad(3 * loss, list(model.parameters()))])
        with torch.no_grad():
            assert torch.equal(model(idx[:, :-1], idx[:, 1:])[1], loss)
    for whole, *pieces in zip(*results, strict=True):
        for piece in pieces:
            torch.testing.assert_close(piece, whole, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize('autocast', [False, True])
def test_loss_in_pieces_is_compiled_and_cast(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    cfg = ModelConfig(**{**SMALL, 'n_layer': 1}, kq_diag='none', preconditioner='none', attn_steps=1, mlp_steps=1)
    model, idx, results = Transformer(cfg), torch.randint(50, (3, 18)), []
    model.activation_checkpointing = True
    for at_once, call in ((2 ** 26, model), (350, model), (350, torch.compile(model, fullgraph=True, backend='aot_eager'))):
        monkeypatch.setattr(model_module, 'LOGITS_AT_ONCE', at_once)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            loss = call(idx[:, :-1], idx[:, 1:])[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        assert all(g.dtype == torch.float32 for g in results[-1])
    for whole, piece, compiled in zip(*results, strict=True):
        for other in (piece, compiled):
            assert (whole - other).norm() <= (2e-2 if autocast else 1e-5) * whole.norm()

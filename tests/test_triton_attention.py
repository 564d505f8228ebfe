"""The GPU kernels: under Triton's interpreter, which conftest.py sets; compiled for GPUs that need
not be there; and on a GPU, if any, in a process of its own, where they are not interpreted."""
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from nanocem import fast
from tests.test_fast import (
    CASES,
    WHOLE,
    agree,
    by_triton,
    inputs,
    is_one_graph,
    keeps_torchs_contract,
    names,
    poisoned_memory,  # noqa: F401 (a fixture)
    readable,
    run,
    sizes_of_summed_terms,
    slopes,
)

needs_triton = pytest.mark.skipif(not fast.HAS_TRITON, reason='Triton is not installed')


@needs_triton
@pytest.mark.parametrize('case', CASES, ids=str)
def test_triton_equals_the_readable_formula(case: tuple) -> None:
    tensors, do = inputs(*case)
    once, again = (run(tensors, case[2], do) for _ in range(2))
    tensors, do = [None if t is None else t.double() for t in tensors], do.double()
    exact = run(tensors, case[2], do, readable)
    sizes = sizes_of_summed_terms(tensors, case[2], do)
    for name, one, two, slow, size in zip(names(tensors), once, again, exact, sizes, strict=True):
        assert torch.equal(one, two), name  # nothing atomic
        # float32 rounds a term by 6e-8, and alpha by the scores' rounding besides
        assert (one - slow).norm() <= 2e-6 * size.norm(), name


@needs_triton
def test_operator_keeps_torchs_contract() -> None:
    keeps_torchs_contract(use_triton=True)


@needs_triton
@WHOLE
def test_whole_models_agree(options: dict) -> None:
    agree(options, 'triton')


@needs_triton
def test_a_training_step_is_one_graph() -> None:
    is_one_graph('triton')


# Compiled for GPUs

def python(*arguments: str) -> str:
    """The output of a Python process in which kernels are not interpreted."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, 'TRITON_INTERPRET': '0'}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True,
                          text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.parametrize('arch, widths', [(80, ('72',)), (90, ('64',))])
def test_kernels_compile_ahead_within_a_gpus_means(arch: int, widths: tuple[str, ...]) -> None:
    report = python('-m', 'nanocem.triton_attention', str(arch), *widths)
    rows = [line.split() for line in report.splitlines()[2:]]
    assert len(rows) == 4 * len(widths)
    for name, sm, *_, registers, shared, spilled in rows:
        assert sm == f'sm_{arch}' and int(registers) <= 255
        assert int(shared) <= 163 * 1024, name  # bytes, an A100's
        assert int(spilled) <= 256, name  # bytes a thread, written and read; a few at odd widths


def check_16_bits(device: str, dtype: torch.dtype, cases: list[tuple], most: float) -> None:
    """The kernels' relative errors against float64 are at most so many times SDPA's with the same
    bias, and the same twice."""
    def sdpa(q, k, n_head, scale, du, h, b):
        q, k = (x.unflatten(-1, (n_head, -1)).transpose(1, 2) for x in (q, k))
        i = torch.arange(q.shape[2], device=device)
        m = slopes(n_head).to(device, torch.float32)[:, None, None]
        bias = du @ h[:, None].mT - m * (i[:, None] - i).abs()
        bias = bias + torch.where(i[:, None] == i, b[:, None, None], 0)
        bias = bias.masked_fill(i > i[:, None], -math.inf).to(dtype)
        o = F.scaled_dot_product_attention(q, k, k, bias, scale=scale)
        return o.transpose(1, 2).flatten(-2)
    for case in cases:
        tensors, do = inputs(*case)
        tensors = [t.detach().to(device, dtype).requires_grad_() for t in tensors]
        do = do.to(device, dtype)
        exact = run([t.double() for t in tensors], case[2], do.double(), readable)
        ours, again, theirs = (run(tensors, case[2], do, f) for f in (by_triton, by_triton, sdpa))
        named = zip(names(tensors), ours, again, theirs, exact, strict=True)
        for name, one, two, other, x in named:
            assert torch.equal(one, two), name
            one, other = (((y.double() - x).norm() / x.norm()).item() for y in (one, other))
            print(f'{case} {name}: {one:.2e}, SDPA {other:.2e}')
            assert one <= most * other + 1e-4, (case, name, one, other)


@needs_triton
def test_float16_error_is_near_sdpas() -> None:
    """The interpreter has no bfloat16; a CPU's SDPA rounds less on the way than fused kernels."""
    check_16_bits('cpu', torch.float16, [(1, 130, 4, 64, 1, True), (2, 67, 2, 84, 2, True)], 1.7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_bfloat16_error_is_no_worse_than_sdpas() -> None:
    cases = [(2, 1024, 12, 64, 1, True), (2, 515, 12, 72, 1, True), (1, 777, 8, 84, 8, True)]
    print(python('-c', 'import torch, tests.test_triton_attention as t\n'
                 f't.check_16_bits("cuda", torch.bfloat16, {cases}, 1.05)'))

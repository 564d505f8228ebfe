"""The GPU kernels: under Triton's interpreter, which conftest.py sets; compiled for GPUs that need
not be there; and on a GPU, if any, in a process of its own, where they are not interpreted."""
import contextlib
import io
import math
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanocem import fast, triton_attention
from nanocem.triton_attention import TILES, settings, triton
from tests.test_fast import (
    CASES,
    SCALE,
    WHOLE,
    agree,
    inputs,
    is_one_graph,
    names,
    poisoned_memory,  # noqa: F401 (a fixture)
    readable,
    run,
    sizes_of_summed_terms,
    slopes,
)

by_triton = triton_attention.attention
needs_triton = pytest.mark.skipif(not fast.HAS_TRITON, reason='Triton is not installed')


@needs_triton
@pytest.mark.parametrize('case', CASES, ids=str)
def test_triton_equals_the_readable_formula(case: tuple) -> None:
    tensors, do = inputs(*case)
    once, again = (run(tensors, case[2], do, by_triton) for _ in range(2))
    tensors, do = [None if t is None else t.double() for t in tensors], do.double()
    exact = run(tensors, case[2], do, readable)
    sizes = sizes_of_summed_terms(tensors, case[2], do)
    for name, one, two, slow, size in zip(names(tensors), once, again, exact, sizes, strict=True):
        assert torch.equal(one, two), name  # nothing atomic
        # float32 rounds a term by 6e-8, and alpha by the scores' rounding besides
        assert (one - slow).norm() <= 2e-6 * size.norm(), name


@needs_triton
def test_operator_keeps_torchs_contract() -> None:
    for case in (2, 17, 2, 16, 1, True), (1, 17, 2, 16, 0, False):
        tensors, do = inputs(*case)
        for n in (2, 3):  # transposed
            if tensors[n] is not None:
                tensors[n] = tensors[n].detach().mT.contiguous().mT.requires_grad_()
        how = case[2], SCALE
        torch.library.opcheck(triton_attention.attention_op, (*tensors, *how))
        saved = triton_attention.attention_op(*tensors, *how)
        detached = [None if t is None else t.detach() for t in (do, *tensors, *saved)]
        torch.library.opcheck(triton_attention.backward_op, (*detached, *how),
                              test_utils=('test_schema', 'test_faketensor'))


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


def print_needs(arch: int, R: int, n_head: int = 12) -> None:
    """In a process of its own, a line a kernel: what it needs on sm_<arch> in bfloat16, with every
    option: bytes of shared memory, bytes spilled a thread."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    for kernel in TILES[80]:
        options = settings(kernel, arch, R)
        launched = {n: options.pop(n) for n in ('num_warps', 'num_stages')}
        constants = dict(K=n_head, N=1, R=R, BIAS=True, ALIBI=True, **options)
        known = {'J': 'i32', 'width': 'i32', 'scale': 'fp32',
                 **dict.fromkeys(constants, 'constexpr'),
                 **dict.fromkeys(('B_k', 'LSE', 'Delta', 'DB'), '*fp32')}
        types = {name: known.get(name, '*bf16') for name in kernel.arg_names}
        constants = {name: value for name, value in constants.items() if name in types}
        aligned = {(n,): [['tt.divisibility', 16]] for n, kind in enumerate(types.values())
                   if kind[0] == '*' or kind == 'i32'}
        source = ASTSource(kernel, types, constants, aligned)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            target = GPUTarget('cuda', arch, 32)
            compiled = triton.compile(source, target=target, options=launched)
        spilled = sum(map(int, re.findall(r'(\d+) bytes spill', said.getvalue())))
        assert 'Used' in said.getvalue()  # ptxas has spoken
        print(kernel.__name__, compiled.metadata.shared, spilled)


@needs_triton
@pytest.mark.parametrize('arch, width', [(80, 72), (90, 64)])
def test_kernels_compile_ahead_within_a_gpus_means(arch: int, width: int) -> None:
    command = f'import tests.test_triton_attention as t; t.print_needs({arch}, {width})'
    rows = [line.split() for line in python('-c', command).splitlines()]
    assert len(rows) == 4
    for name, shared, spilled in rows:
        assert int(shared) <= 163 * 1024, name  # bytes, an A100's
        assert int(spilled) <= 256, name  # bytes a thread, written and read; a few at odd widths


# The check before the kernels' first use on a GPU; here Triton's interpreter runs it

HALF = (torch.device('cpu'), torch.float16, 2, 16, 1, True)


@needs_triton
def test_right_kernels_agree_and_the_programs_random_numbers_stay() -> None:
    before = torch.random.get_rng_state()
    with torch.no_grad(), torch.autocast('cpu'):
        assert triton_attention.agrees(*HALF)
    assert triton_attention.agrees(torch.device('cpu'), torch.float16, 1, 24, 0, True)
    assert torch.equal(torch.random.get_rng_state(), before)


@needs_triton
@pytest.mark.parametrize('op, i, message', [
    ('attention_op', 0, 'give a wrong output (off by'),
    ('backward_op', 1, 'give a wrong gradient of k (off by'),
    ('backward_op', 2, 'give a wrong gradient of du (off by'),
    ('backward_op', 4, 'give a wrong gradient of b (off by'),
    ('launch', None, 'do not run (ValueError: ptxas exited with code 255): torch')])
def test_wrong_kernels_give_a_warning_and_are_not_used(
        op: str, i: int | None, message: str, capsys: pytest.CaptureFixture,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one result is wrong, or nothing compiles."""
    right = getattr(triton_attention, op)

    def wrong(*args: object, **options: object) -> list[Tensor]:
        if i is None:
            raise ValueError('ptxas exited with code 255\nand a page of assembly')
        results = [x.clone() for x in right(*args)]
        results[i][..., -1] *= 1.5
        return results
    monkeypatch.setattr(triton_attention, op, wrong)
    triton_attention.agrees.cache_clear()
    assert not triton_attention.agrees(*HALF) and not triton_attention.agrees(*HALF)
    triton_attention.agrees.cache_clear()
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and message in error


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
        R = q.shape[-1]
        q, k = (F.pad(x, (0, -R % 8)) for x in (q, k))  # as fast.sdpa, or torch takes another path
        o = F.scaled_dot_product_attention(q, k, k, bias, scale=scale)[..., :R]
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

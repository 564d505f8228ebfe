"""The GPU kernels: under Triton's interpreter, which conftest.py sets; compiled for GPUs that need
not be there; and on a GPU, if any, in a process of its own, where they are not interpreted."""
import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import CEMAttention, ModelConfig, Transformer, make_positions
from nanocem import triton_attention
from nanocem.triton_attention import TILES, load_bias, settings, tl, triton
from test_model import randomize
from tests.test_attention import SMALL, interpreted, loss_and_gradients


def layer(K: int, R: int, n_diagonals: int, alibi: bool, match: bool = False) -> CEMAttention:
    """Return a layer with K heads of width R."""
    return CEMAttention(ModelConfig(
        d_model=K * R, n_head=K, positions='alibi' if alibi else 'rope',
        match_bias='token' if match else 'none',
        kq_diag={0: 'none', 1: 'shared'}.get(n_diagonals, 'per_head')))


needs_triton = pytest.mark.skipif(not triton_attention.HAS_TRITON, reason='Triton is not installed')
CPU = torch.device('cpu')


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaNs: reading it before writing shows. Deterministic mode
    does so."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@interpreted
@pytest.mark.parametrize('case', [
    # positions, heads, head width, heads with their own diagonal (0: none), ALiBi, match bias
    (2, 2, 16, 1, True), (130, 2, 56, 1, True), (67, 2, 72, 2, True), (67, 2, 84, 0, True),
    (130, 2, 16, 2, False), (17, 1, 88, 0, False), (200, 1, 16, 1, True),
    (2, 2, 16, 1, True, True), (130, 2, 56, 0, True, True), (128, 2, 16, 0, False, True),
    (140, 1, 64, 1, False, True), (17, 9, 16, 1, True, True)], ids=str)
def test_kernels_equal_the_lines_of_the_model(case: tuple) -> None:
    """In float32, where the scores' own rounding counts, too."""
    assert triton_attention.find_error(layer(*case[1:]), torch.float32, case[0]) == ''


@triton.jit
def last_of(Bias, Out, width):
    i = width - 1 + tl.arange(0, 1)
    tl.store(Out + tl.arange(0, 1), load_bias(Bias, i, i, width, True))


def print_last(path: str) -> None:
    """Print the last element of a bias of 46,400 positions, in a sparse file: it is 7."""
    width = 46_400
    bias = torch.from_file(path, shared=True, size=width ** 2, dtype=torch.int8)
    bias[-1], out = 7, torch.zeros(1, dtype=torch.int8)
    last_of[(1,)](bias, out, width)
    print(out.item())


@pytest.mark.slow
@interpreted
def test_a_bias_may_have_more_elements_than_int32_counts(tmp_path: Path) -> None:
    """In a process of its own, which an offset that is too small would end."""
    code = f"import tests.test_triton_attention as t; t.print_last('{tmp_path / 'bias'}')"
    assert python('-c', code, interpret='1') == '7\n'


@pytest.mark.slow
@interpreted
def test_operators_keep_torchs_contract_and_repeat_to_the_bit() -> None:
    """Also for transposed inputs, a single position, and without diagonal, ALiBi and match."""
    torch.manual_seed(1)
    for J, every_term in ((17, True), (17, False), (1, True)):
        q, k, h, do = torch.randn(4, 2, J, 32)
        optional = [torch.randn(2, 1, J, 32).mT.contiguous().mT, h.mT.contiguous().mT,
                    torch.randn(2), torch.randn(2, J, J).mT, torch.randn(2),
                    ] if every_term else [None] * 5
        tensors = [None if t is None else t.requires_grad_() for t in (q, k, *optional)]
        tensors += [None, None]  # no window
        torch.library.opcheck(triton_attention.attention_op, (*tensors, 2, 0.25))
        detached = [None if t is None else t.detach() for t in (do, *tensors)]
        once, again = (triton_attention.attention_op(*detached[1:], 2, 0.25) for _ in range(2))
        arguments = (*detached, *once, 2, 0.25)
        torch.library.opcheck(triton_attention.backward_op, arguments,
                              test_utils=('test_schema', 'test_faketensor'))
        assert torch.equal(once[0], again[0]) and (J > 1 or torch.allclose(once[0], k))
        for a, b in zip(*(triton_attention.backward_op(*arguments) for _ in range(2)), strict=True):
            assert torch.equal(a, b)


@interpreted
@pytest.mark.parametrize('options', [
    dict(kq_diag='per_head', preconditioner='diag'), dict(attn_steps=2, residual='normed'),
    dict(positions='rope', score_scale='head', mlp='llama'),
    dict(attn_steps=2, key_shift='half', match_bias='token', kq_diag='shared', n_kv_head=1),
    dict(kq_diag='none', positions='rope', key_shift='half', match_bias='token'),
    dict(attn='llama', positions='alibi', tie='kv', key_shift='half', match_bias='token'),
    dict(attn='llama', mlp='llama', positions='alibi', tie='kv', n_kv_head=1)], ids=str)
def test_whole_models_agree(options: dict) -> None:
    """Compare norms of whole tensors in float32, because single elements may cancel."""
    cfg = ModelConfig(**{**SMALL, 'n_layer': 1, **options})
    slow, other = (loss_and_gradients(cfg, impl, torch.float32) for impl in ('own', 'triton'))
    for a, b in zip(slow, other, strict=True):
        assert (b - a).norm() <= 2e-4 * a.norm()


@interpreted
@pytest.mark.parametrize('options', [
    dict(), dict(attn='llama', tie='kv', positions='rope')], ids=str)
def test_values_that_are_not_the_keys_are_attended_to(options: dict) -> None:
    """Llama's with RoPE, or those of an edited layer: kernels read the keys alone."""
    torch.manual_seed(2)
    cfg = ModelConfig(**SMALL, match_bias='token', **options)
    attn = randomize(Transformer(cfg), seed=3).float().blocks[0].attn
    q, k, v = torch.randn(3, 2, 2, 9, 16)
    u, h = torch.randn(2, 2, 9, 32)
    pos = make_positions(cfg, h)
    for values in (k, v):
        attn.kernel = None
        right = attn.attend(q, k, values, pos, u, h)
        attn.kernel = triton_attention.attend
        torch.testing.assert_close(attn.attend(q, k, values, pos, u, h), right, rtol=1e-4,
                                   atol=1e-4)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize('size', [0.1, 1.0, 9.0])
def test_a_window_leaves_out_keys_that_weigh_nothing(size: float) -> None:
    """ALiBi's slopes are 1/2, 1/4 and 1/8, and scores small or large: the larger, the further a
    query reaches. What is left out is below rounding, in the output and in all gradients."""
    torch.manual_seed(4)
    attn = layer(3, 16, 0, True)
    with torch.no_grad():
        attn.W_Q.mul_(size)
        attn.b_self.normal_()
    assert triton_attention.find_error(attn, torch.float32, 300) == ''
    h = torch.randn(1, 300, 48)
    q, k = h @ attn.W_Q.mT, h @ attn.W_K.mT
    first, end = triton_attention.window(q, k, 3, 1 / attn.tau, attn.b_self - attn.b_cross)
    block = torch.arange(5)
    left = (block + 1 - first / 64).sum() / (3 * 15)
    assert (left < 0.85 if size < 9 else left > 0.9) and (end[..., -1] == 320).all()
    # The weights of all keys that a block leaves out
    pos = make_positions(attn.cfg, h)
    alpha = attn.scores(attn.split_heads(q), attn.split_heads(k), pos, h, h).softmax(dim=-1)
    for n, head in itertools.product(range(5), range(3)):
        rows = alpha[0, head, 64 * n:64 * (n + 1)]
        assert rows[:, :first[0, head, n]].sum() < 1e-6 * len(rows)


# Compiled for GPUs

def python(*arguments: str, interpret: str = '0') -> str:
    """Return the output of a Python process in which kernels are not interpreted, or are with 1."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True,
                          cwd=Path(__file__).parents[1],
                          env={**os.environ, 'TRITON_INTERPRET': interpret})
    assert done.returncode == 0, done.stderr
    return done.stdout


def print_needs(arch: int, R: int, n_head: int = 12, match: bool = True) -> None:
    """Print what each kernel needs on sm_<arch> in bfloat16, with every option: bytes of shared
    memory, and of spilled registers a thread. Kernels must not be interpreted in this process."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    for kernel in TILES:
        options = settings(kernel, R, both=match)
        launched = {n: options.pop(n) for n in ('num_warps', 'num_stages')}
        constants = dict(K=n_head, N=1, R=R, BIAS=True, MATCH=match, ALIBI=True, WINDOW=True,
                         **options)
        known = {'J': 'i32', 'width': 'i32', 'scale': 'fp32', 'First': '*i32', 'End': '*i32',
                 **dict.fromkeys(constants, 'constexpr'),
                 **dict.fromkeys(('B_k', 'W_k', 'LSE', 'Delta', 'DB', 'DW'), '*fp32')}
        types = {name: known.get(name, '*bf16') for name in kernel.arg_names}
        constants = {name: value for name, value in constants.items() if name in types}
        aligned = {(n,): [['tt.divisibility', 16]] for n, kind in enumerate(types.values())
                   if kind[0] == '*' or kind == 'i32'}
        source, target = ASTSource(kernel, types, constants, aligned), GPUTarget('cuda', arch, 32)
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled = triton.compile(source, target=target, options=launched)
        spilled = sum(map(int, re.findall(r'(\d+) bytes spill', log.getvalue())))
        assert 'Used' in log.getvalue()  # ptxas has reported
        print(kernel.__name__, compiled.metadata.shared, spilled)


@pytest.mark.slow
@needs_triton
def test_kernels_compile_ahead_within_a_gpus_means() -> None:
    """An A100's and an H100's."""
    command = ('import tests.test_triton_attention as t; t.print_needs(80, 64); '
               't.print_needs(90, 84)')
    rows = [line.split() for line in python('-c', command).splitlines()]
    assert len(rows) == 2 * 4
    for name, shared, spilled in rows:
        assert int(shared) <= 163 * 1024, name  # bytes, an A100's
        assert int(spilled) <= 256, name  # bytes a thread, written and read; a few at odd widths


def test_no_tile_reaches_beyond_the_bias() -> None:
    """A forward tile of 64 x 128 ended a GPU's process with an illegal memory access."""
    of_two = triton_attention.dbias_kernel, {64: triton_attention.TILE_OF_TWO}
    for kernel, tiles in [*TILES.items(), of_two]:
        for BM, BN, *_ in tiles.values():
            assert triton_attention.PAD % BM == triton_attention.PAD % BN == 0
            outer, inner = (BN, BM) if kernel is triton_attention.dk_kernel else (BM, BN)
            assert outer % inner == 0 or kernel is triton_attention.dbias_kernel


# The check before the kernels' first use on a GPU; here Triton's interpreter runs it

def agree(model: Transformer) -> bool:
    return triton_attention.use_kernels(model, torch.float16)


@interpreted
def test_right_kernels_agree() -> None:
    model = Transformer(ModelConfig(**{**SMALL, 'kq_diag': 'shared'}))
    before = torch.random.get_rng_state()
    with torch.no_grad(), torch.autocast('cpu'):
        assert agree(model)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize('op, i, message', [
    ('attention_op', 0, 'triton attention gives another output than'),
    ('backward_op', 2, 'triton attention gives another gradient of u than'),
    ('launch', None, 'does not run (ValueError: ptxas exited with code 255): it')])
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
    assert not agree(Transformer(ModelConfig(**{**SMALL, 'kq_diag': 'shared'})))
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and message in error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_kernels_equal_the_lines_of_the_model_on_a_gpu() -> None:
    script = ('import torch\nfrom nanocem.triton_attention import find_error\n'
              'from tests.test_triton_attention import layer\n'
              'for case in ((12, 64, 1, True), (12, 72, 1, True), (8, 84, 8, True),\n'
              '             (12, 88, 0, True), (12, 64, 1, True, True), (12, 72, 1, True, True),\n'
              '             (8, 84, 0, True, True), (12, 88, 1, False, True)):\n'
              '    for length in 300, 256:\n'
              '        attn = layer(*case).cuda()\n'
              '        wrong = find_error(attn, torch.bfloat16, length)\n'
              '        assert not wrong, (case, length, wrong)\n')
    print(python('-c', script))

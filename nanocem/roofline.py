"""
What one step of CEM attention costs a GPU at least, forward and backward, by our Triton kernels, by
flash attention, which has no bias, and by torch's with the bias formed: counted, not measured.

    python -m nanocem.roofline              134m, 162m and 86m on an A100 and an H100
    python -m nanocem.roofline --compile    with registers, shared memory and spills; needs Triton

A kernel's bound is the longest of three: its products on the tensor cores, its exponentials on the
special function units, its bytes at the memory's rate. Counted are whole tiles, as they run: those
that the diagonal cuts, and heads padded to powers of two. Every matrix comes from memory once;
what is read again, by other tiles or by other heads, comes from the cache.
"""
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from nanocem import triton_attention
from nanocem.triton_attention import GEMM_ROWS, PAD, TILES, compile_ahead, settings


class GPU(NamedTuple):
    arch: int
    flops: float  # a second, dense bfloat16
    bytes: float  # a second
    exps: float  # a second: 16 a clock and multiprocessor


GPUS = {'A100': GPU(80, 312e12, 2.04e12, 16 * 108 * 1.41e9),
        'H100': GPU(90, 989e12, 3.35e12, 16 * 132 * 1.83e9)}
SHAPES = {'134m': (12, 64), '162m': (12, 72), '86m': (8, 84)}  # K heads of width R
FORWARD, DQ, DK, DBIAS = TILES[80]
PRODUCTS = {FORWARD: 2, DQ: 3, DK: 4, DBIAS: 2}  # with a tile of scores
FLASH_WIDTHS = (32, 64, 96, 128)  # what flash attention pads heads to
FLASH_TILE = 128


class Cost(NamedTuple):
    """Of one kernel, or several."""
    macs: float = 0  # multiply-adds
    exps: float = 0
    bytes: float = 0

    def bound(self, gpu: GPU) -> tuple[float, str]:
        """Seconds at least, and what binds."""
        return max((2 * self.macs / gpu.flops, 'products'), (self.exps / gpu.exps, 'exponentials'),
                   (self.bytes / gpu.bytes, 'memory'))


def scores_computed(kernel: Any, J: int, BM: int, BN: int) -> int:
    """Those of one head, masked ones of cut tiles included: rows in tiles of BM, columns of BN."""
    if kernel is DK:
        # rows from each block of columns on
        return sum(BN * BM * (len(range(j, min(j + BN, J), BM)) + len(range(j + BN, J, BM)))
                   for j in range(0, J, BN))
    if kernel is DBIAS:
        return sum(BM * BN for i in range(0, J, BM) for j in range(0, J, BN) if j < i + BM)
    return sum(BM * BN * len(range(0, min(i + BM, J), BN)) for i in range(0, J, BM))


def kernel_cost(kernel: Any, arch: int, B: int, J: int, K: int, R: int) -> Cost:
    """One of ours, with a diagonal that heads share and ALiBi."""
    tile = settings(kernel, arch, R)
    scores = B * K * scores_computed(kernel, J, tile['BM'], tile['BN'])
    width = tile['BR'] + tile['BT']
    matrix, column, bias = 2 * B * J * K * R, 4 * B * J * K, B * (-(-J // PAD) * PAD) ** 2
    moved = {
        FORWARD: 3 * matrix + column + bias,  # q, k, o; log-sum-exp; the bias's lower half
        DQ: 5 * matrix + 3 * column + bias,  # q, k, o, do, dq; log-sum-exp, delta, db
        DK: 4 * matrix + 2 * column + bias,  # q, k, do, dk
        DBIAS: 3 * matrix + 2 * column + 3 * bias,  # q, k, do; and all of dbias
    }
    return Cost(PRODUCTS[kernel] * scores * width, scores, moved[kernel])


def bias_cost(B: int, J: int, D: int, backward: bool) -> Cost:
    """du h^T where j <= i; backward: made again, and its two products with dbias."""
    pairs = sum((min(i + GEMM_ROWS, J) - i) * min(i + GEMM_ROWS, J) for i in range(0, J, GEMM_ROWS))
    if not backward:
        return Cost(B * pairs * D, 0, 2 * 2 * B * J * D + 2 * B * pairs)
    below = sum((min(i + GEMM_ROWS, J) - i) * (J - i) for i in range(0, J, GEMM_ROWS))
    return Cost(B * (2 * pairs + below) * D, 0, 8 * 2 * B * J * D + 3 * 2 * B * pairs)


def flash_cost(B: int, J: int, K: int, R: int, backward: bool) -> Cost:
    """Flash attention's, in square tiles: two products forward, five backward."""
    scores = B * K * scores_computed(FORWARD, J, FLASH_TILE, FLASH_TILE)
    width = min(width for width in FLASH_WIDTHS if width >= R)
    matrix, column = 2 * B * J * K * R, 4 * B * J * K
    if not backward:
        return Cost(2 * scores * width, scores, 4 * matrix + column)
    return Cost(5 * scores * width, scores, 8 * matrix + 2 * column)


def formed_cost(B: int, J: int, K: int, R: int) -> Cost:
    """Torch's fused attention with the bias formed, both ways: every score, those that the mask in
    the bias takes away too; the bias of every head is written, read twice, and its gradient written
    and read, as if all sums were fused and no head padded."""
    scores = B * K * J * J
    width = -(-R // 8) * 8
    return Cost(7 * scores * width + 3 * B * J * J * K * R, 2 * scores, 10 * scores)


def total(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(sum, zip(*costs, strict=True)))


def report(B: int = 8, J: int = 2048, compiled: bool = False) -> str:
    """A table for each GPU and shape."""
    lines = [f'Bounds of one step, {B} x {J} tokens, bfloat16, one diagonal for all heads, ALiBi.']
    for gpu_name, gpu in GPUS.items():
        for size, (K, R) in SHAPES.items():
            lines += ['', f'{gpu_name}, {size}: {K} heads of {R}', '',
                      '| | multiply-adds, 1e9 | MB | ms at least | bound by |'
                      + (' registers | shared, KB | spilled, bytes |' if compiled else ''),
                      '|' + '---|' * (8 if compiled else 5)]
            shape = B, J, K, R
            ours = {kernel: kernel_cost(kernel, gpu.arch, *shape) for kernel in PRODUCTS}
            bias = [bias_cost(B, J, K * R, backward) for backward in (False, True)]
            flash = [flash_cost(*shape, backward) for backward in (False, True)]
            rows = {'flash, forward': [flash[0]], 'flash, backward': [flash[1]],
                    'bias, forward': [bias[0]], 'bias, backward': [bias[1]],
                    **{kernel.__name__: [cost] for kernel, cost in ours.items()},
                    'ours, both ways': [*ours.values(), *bias], 'flash, both ways': flash,
                    "torch's, bias formed": [formed_cost(*shape)]}
            for name, costs in rows.items():
                # kernels run one after the other
                seconds = sum(cost.bound(gpu)[0] for cost in costs)
                binds = costs[0].bound(gpu)[1] if len(costs) == 1 else '-'
                cost = total(costs)
                lines.append(f'| {name} | {cost.macs / 1e9:.1f} | {cost.bytes / 1e6:.0f} | '
                             f'{1e3 * seconds:.3f} | {binds} |')
                if compiled:
                    kernel = getattr(triton_attention, name, None)
                    got = compile_ahead(kernel, gpu.arch, R) if kernel else None
                    lines[-1] += (f' {got["registers"]} | {got["shared"] / 1024:.0f} | '
                                  f'{got["spilled"]} |' if got else ' | | |')
    return '\n'.join(lines)


if __name__ == '__main__':
    if sys.argv[1:] not in ([], ['--compile']):
        sys.exit('nanocem.roofline: it takes no options but --compile')
    print(report(compiled=bool(sys.argv[1:])))

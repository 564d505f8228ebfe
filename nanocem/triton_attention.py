"""
Compute CEM attention on a GPU without its (B, K, J, J) scores: Triton kernels, both ways.

flex_attention would need 18 lines. But its backward pass runs only on CUDA, and it adds gradients
of captured tensors atomically: results differ from run to run, and some 200 million numbers are
added to the biases of twelve heads. On an H100 it takes 130 times as long as these kernels; without
the biases' gradient it takes no longer than they do (docs/speed.md).

For head k, with values = keys and everything causal (j <= i),

    s_ijk = q_ik . k_jk / tau + bias_ijk + w_k S_ij - m_k (i - j) + b_k [i = j]
    o_ik = sum_j softmax_j(s_ijk) k_jk,       bias = (d * u / tau) h^T,  m_k = 2^(-8 k / max(8, K))

The bias is a matrix product (B, n, J, J): n = 1 for a diagonal that all heads share, else n = K.
With n = 1 it is kept for the backward pass, with n = K it is computed again. S is the match bias
(B, J, J), a product that model.py computes once for all heads and steps; beside it n must be 1.
b_k is the self bias minus the cross bias, because softmax depends only on their difference.

Backward, with p = softmax(s), delta_i = do_i . o_i and ds_ij = p_ij (do_i . k_j - delta_i):

    dq_i = sum_j ds_ij k_j / tau        dk_j = sum_i p_ij do_i + ds_ij q_i / tau
    dbias_ij = sum_heads ds_ij          db = sum_i ds_ii
    dS_ij = sum_heads w_k ds_ij         dw = sum_ij ds_ij S_ij

dq, db and dw share a kernel, dbias and dS another, and dk has its own; each tile is one program.

ALiBi takes m_k (i - j) off a score, whose other part is at most |q_i| |k_j| / tau, and at least
minus that for a token's own key. So with no bias and no match, a key further back than

    reach_ik = (20 + |q_i| (max_j |k_j| + |k_i|) / tau - b_k) / m_k

weighs less than e^-20 of the row's largest weight, and all such keys together less than
e^-20 / m_k < 1e-6. The kernels skip tiles of such keys. The bound is computed anew in each call.

Nothing is added atomically, so results are the same to the bit: sums over rows are torch's. Scores
are in base 2, because the hardware has exp2.

Shapes: B batch, J positions, K heads, R = D / K. Matrices are (B, J, D), head k in columns k R to
(k + 1) R. One number per row (the scores' log-sum-exp, delta) is (B, K, J). In the kernels J of the
bias and of S is padded to `width`. A tile's width is a power of two, so a head of width 72 is held
as two pieces, BR = 64 and BT = 16 columns wide; BT = 0 means that one piece is enough.
"""
import copy
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import warn
from model import BaseAttention, Transformer, alibi_slopes, make_positions
from nanocem.same import first_line

try:
    import triton
    import triton.language as tl
    HAS_TRITON = True
except ImportError:  # without Triton this file can still be imported
    triton = tl = SimpleNamespace(jit=lambda f: f, constexpr=lambda x: x)
    HAS_TRITON = False

MOST_ERROR = 8  # the largest error of a row that is rounding, in units of its dtype's epsilon
LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = 20.0  # a weight of e^-20 of the largest is nothing
WINDOW_TILE = 64  # rows of a tile in the forward and dq kernels, columns in the dk kernel
GEMM_ROWS = 512  # rows per matrix product of the bias; columns above the diagonal are left out
PAD = 128  # the bias's width is a multiple of this, so that no tile reaches beyond it


@triton.jit
def load_columns(x, i, J, first: tl.constexpr, n: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Load n columns of one head at rows i, (len(i), n); zero beyond row J and column R."""
    r = first + tl.arange(0, n)
    mask = i[:, None] < J
    if first + n > R:
        mask = mask & (r < R)[None, :]
    return tl.load(x + i[:, None] * D + r[None, :], mask=mask, other=0.0)


@triton.jit
def load_rows(x, i, J, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr):
    """Load rows i of one head of matrix x, as its two pieces."""
    rows = load_columns(x, i, J, 0, BR, D, R)
    return rows, load_columns(x, i, J, BR, BT, D, R) if BT else rows


@triton.jit
def store_columns(x, value, i, J, first: tl.constexpr, n: tl.constexpr, D: tl.constexpr,
                  R: tl.constexpr):
    r = first + tl.arange(0, n)
    mask = (i < J)[:, None] & (r < R)[None, :]
    tl.store(x + i[:, None] * D + r[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(x, rows, scale, i, J, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
               BT: tl.constexpr):
    """Store scale times rows; scale is a number or (len(i), 1)."""
    store_columns(x, rows[0] * scale, i, J, 0, BR, D, R)
    if BT:
        store_columns(x, rows[1] * scale, i, J, BR, BT, D, R)


@triton.jit
def zero_rows(n: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr):
    """Return zeros for two pieces, to sum in. Nothing reads the second one if BT = 0."""
    return tl.zeros((n, BR), tl.float32), tl.zeros((n, BT if BT else 1), tl.float32)


@triton.jit
def dot_products(a, b, BT: tl.constexpr):
    """Return all a_i . b_j, (len(i), len(j)), each summed over both pieces."""
    s = tl.dot(a[0], tl.trans(b[0]))
    return tl.dot(a[1], tl.trans(b[1]), s) if BT else s


@triton.jit
def add_weighted(acc, p, rows, BT: tl.constexpr):
    """Return acc_i + sum_j p_ij rows_j."""
    p = p.to(rows[0].dtype)
    return tl.dot(p, rows[0], acc[0]), tl.dot(p, rows[1], acc[1]) if BT else acc[1]


@triton.jit
def bias_at(bias, i, j, width):
    # i * width exceeds int32 beyond 46,340 positions
    return bias + i.to(tl.int64) * width + j


@triton.jit
def load_bias(bias, i, j, width, BIAS: tl.constexpr):
    return tl.load(bias_at(bias, i, j, width)) if BIAS else tl.zeros((1, 1), tl.float32)


@triton.jit
def store_bias(bias, value, i, j, width):
    tl.store(bias_at(bias, i, j, width), value.to(bias.dtype.element_ty))


@triton.jit
def slope(head, K: tl.constexpr):
    """Return ALiBi's m_k in base 2."""
    return tl.exp2((head + 1) * (-8.0 / (K if K > 8 else 8))) * LOG2E


@triton.jit
def score_bias(bias, S, i, j, origin, m, b, w, MATCH: tl.constexpr, ALIBI: tl.constexpr,
               DIAGONAL: tl.constexpr):
    """Return the score without q_i . k_j, in base 2, for i (M, 1) and j (1, N), or transposed. Each
    row is shifted by m (i - origin), which softmax ignores: of ALiBi's -m (i - j) this leaves
    m (j - origin), small near the diagonal, where precision counts. DIAGONAL: i = j is inside."""
    s = bias.to(tl.float32) * LOG2E
    if MATCH:
        s += S.to(tl.float32) * (w * LOG2E)
    if ALIBI:
        s += m * (j - origin)
    if DIAGONAL:
        if ALIBI:
            s += tl.where(i == j, b * LOG2E, 0.0)
        s = tl.where(i >= j, s, -float('inf'))
    return s


@triton.jit
def forward_kernel(Q, Keys, Bias, Match, B_k, W_k, First, O, LSE, J, width, scale, K: tl.constexpr,
                   N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, MATCH: tl.constexpr,
                   ALIBI: tl.constexpr, WINDOW: tl.constexpr):
    """Compute o and the scores' log-sum-exp in base 2. Grid: heads, batch, blocks of rows, the
    longest first."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    i0 = block * BM
    first = tl.load(First + (batch * K + head) * tl.num_programs(2) + block) if WINDOW else 0
    D: tl.constexpr = K * R
    offset, row_offset = batch * J * D + head * R, (batch * K + head) * J
    bias = Bias + (batch * N + head % N) * width * width if BIAS else Bias
    match = Match + batch * width * width if MATCH else Match
    m = slope(head, K) if ALIBI else 0.0
    b = tl.load(B_k + head) if ALIBI else 0.0
    w = tl.load(W_k + head) if MATCH else 0.0
    i = i0 + tl.arange(0, BM)
    q = load_rows(Q + offset, i, J, D, R, BR, BT)
    row_max = tl.full((BM,), -float('inf'), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    acc = zero_rows(BM, BR, BT)
    for DIAGONAL in tl.static_range(2):  # the tiles left of the diagonal, then those on it
        for j0 in range(i0 if DIAGONAL else first, min(i0 + BM, J) if DIAGONAL else i0, BN):
            j = j0 + tl.arange(0, BN)
            s = load_bias(bias, i[:, None], j[None, :], width, BIAS)
            S = load_bias(match, i[:, None], j[None, :], width, MATCH)
            s = score_bias(s, S, i[:, None], j[None, :], i0, m, b, w, MATCH, ALIBI, DIAGONAL)
            k = load_rows(Keys + offset, j, J, D, R, BR, BT)
            s += dot_products(q, k, BT) * (scale * LOG2E)
            new_max = tl.maximum(row_max, tl.max(s, 1))
            p = tl.exp2(s - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            rescaled = acc[0] * rescale[:, None], acc[1] * rescale[:, None] if BT else acc[1]
            acc = add_weighted(rescaled, p, k, BT)
            row_max = new_max
    store_rows(O + offset, acc, 1 / row_sum[:, None], i, J, D, R, BR, BT)
    tl.store(LSE + row_offset + i, row_max + tl.log2(row_sum) - m * (i - i0), mask=i < J)


@triton.jit
def dq_kernel(Q, Keys, Bias, Match, B_k, W_k, First, O, DO, LSE, Delta, DQ, DB, DW, J, width, scale,
              K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
              BT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
              MATCH: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr):
    """Compute dq, each row's part of db and dw, and delta for the other two kernels. Grid: as the
    forward kernel's."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    i0 = block * BM
    first = tl.load(First + (batch * K + head) * tl.num_programs(2) + block) if WINDOW else 0
    D: tl.constexpr = K * R
    offset, row_offset = batch * J * D + head * R, (batch * K + head) * J
    bias = Bias + (batch * N + head % N) * width * width if BIAS else Bias
    match = Match + batch * width * width if MATCH else Match
    m = slope(head, K) if ALIBI else 0.0
    b = tl.load(B_k + head) if ALIBI else 0.0
    w = tl.load(W_k + head) if MATCH else 0.0
    i = i0 + tl.arange(0, BM)
    q, do = load_rows(Q + offset, i, J, D, R, BR, BT), load_rows(DO + offset, i, J, D, R, BR, BT)
    o = load_rows(O + offset, i, J, D, R, BR, BT)
    delta = tl.sum(do[0].to(tl.float32) * o[0].to(tl.float32), 1)
    if BT:
        delta += tl.sum(do[1].to(tl.float32) * o[1].to(tl.float32), 1)
    tl.store(Delta + row_offset + i, delta, mask=i < J)
    lse = tl.load(LSE + row_offset + i, mask=i < J, other=float('inf')) + m * (i - i0)
    acc = zero_rows(BM, BR, BT)
    db = tl.zeros((BM,), tl.float32)
    dw = tl.zeros((BM,), tl.float32)
    for DIAGONAL in tl.static_range(2):  # the tiles left of the diagonal, then those on it
        for j0 in range(i0 if DIAGONAL else first, min(i0 + BM, J) if DIAGONAL else i0, BN):
            j = j0 + tl.arange(0, BN)
            s = load_bias(bias, i[:, None], j[None, :], width, BIAS)
            S = load_bias(match, i[:, None], j[None, :], width, MATCH)
            s = score_bias(s, S, i[:, None], j[None, :], i0, m, b, w, MATCH, ALIBI, DIAGONAL)
            k = load_rows(Keys + offset, j, J, D, R, BR, BT)
            s += dot_products(q, k, BT) * (scale * LOG2E)
            ds = tl.exp2(s - lse[:, None]) * (dot_products(do, k, BT) - delta[:, None])
            acc = add_weighted(acc, ds, k, BT)
            if DIAGONAL and ALIBI:
                db += tl.sum(tl.where(i[:, None] == j[None, :], ds, 0.0), 1)
            if MATCH:
                dw += tl.sum(ds * S.to(tl.float32), 1)
    store_rows(DQ + offset, acc, scale, i, J, D, R, BR, BT)
    if ALIBI:
        tl.store(DB + row_offset + i, db, mask=i < J)
    if MATCH:
        tl.store(DW + row_offset + i, dw, mask=i < J)


@triton.jit
def dk_kernel(Q, Keys, Bias, Match, B_k, W_k, End, DO, LSE, Delta, DK, J, width, scale,
              K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
              BT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
              MATCH: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr):
    """Compute dk, as keys and as values. Scores are transposed, (j, i). Grid: heads, batch, blocks
    of keys, the longest first."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    j0 = tl.program_id(2) * BN
    end = J
    if WINDOW:
        end = min(tl.load(End + (batch * K + head) * tl.num_programs(2) + tl.program_id(2)), J)
    D: tl.constexpr = K * R
    offset, row_offset = batch * J * D + head * R, (batch * K + head) * J
    bias = Bias + (batch * N + head % N) * width * width if BIAS else Bias
    match = Match + batch * width * width if MATCH else Match
    m = slope(head, K) if ALIBI else 0.0
    b = tl.load(B_k + head) if ALIBI else 0.0
    w = tl.load(W_k + head) if MATCH else 0.0
    j = j0 + tl.arange(0, BN)
    k = load_rows(Keys + offset, j, J, D, R, BR, BT)
    acc = zero_rows(BN, BR, BT)
    for BELOW in tl.static_range(2):  # the tiles on the diagonal, then those below it
        for i0 in range(j0 + BN if BELOW else j0, end if BELOW else min(j0 + BN, J), BM):
            i = i0 + tl.arange(0, BM)
            s = load_bias(bias, i[None, :], j[:, None], width, BIAS)
            S = load_bias(match, i[None, :], j[:, None], width, MATCH)
            s = score_bias(s, S, i[None, :], j[:, None], i0, m, b, w, MATCH, ALIBI, not BELOW)
            lse = tl.load(LSE + row_offset + i, mask=i < J, other=float('inf')) + m * (i - i0)
            q = load_rows(Q + offset, i, J, D, R, BR, BT)
            p = tl.exp2(s + dot_products(k, q, BT) * (scale * LOG2E) - lse[None, :])
            do = load_rows(DO + offset, i, J, D, R, BR, BT)
            acc = add_weighted(acc, p, do, BT)
            delta = tl.load(Delta + row_offset + i, mask=i < J, other=0.0)
            ds = p * (dot_products(k, do, BT) * scale - delta[None, :] * scale)
            acc = add_weighted(acc, ds, q, BT)
    store_rows(DK + offset, acc, 1.0, j, J, D, R, BR, BT)


@triton.jit
def dbias_kernel(Q, Keys, Bias, Match, B_k, W_k, DO, LSE, Delta, DBias, DMatch, J, width, scale,
                 K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
                 BT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
                 MATCH: tl.constexpr, ALIBI: tl.constexpr):
    """Compute the gradients of bias and match, zero above the diagonal: ds summed over the heads
    that share it, for the match times w_k. Grid: tiles (j, i), B N. MATCH needs N = 1."""
    j0, i0 = tl.program_id(0) * BN, tl.program_id(1) * BM
    first, batch = tl.program_id(2) % N, (tl.program_id(2) // N).to(tl.int64)
    D: tl.constexpr = K * R
    tile = (batch * N + first) * width * width
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    bias = load_bias(Bias + tile if BIAS else Bias, i[:, None], j[None, :], width, BIAS)
    S = load_bias(Match + tile if MATCH else Match, i[:, None], j[None, :], width, MATCH)
    dbias = tl.zeros((BM, BN), tl.float32)
    dmatch = tl.zeros((BM, BN), tl.float32)
    for DIAGONAL in tl.static_range(2):  # at most one runs: the tile is below the diagonal or on it
        if j0 < i0 + BM and (j0 + BN > i0) == DIAGONAL:
            for head in range(first, first + K // N):
                offset, row_offset = batch * J * D + head * R, (batch * K + head) * J
                m = slope(head, K) if ALIBI else 0.0
                b = tl.load(B_k + head) if ALIBI else 0.0
                w = tl.load(W_k + head) if MATCH else 0.0
                s = score_bias(bias, S, i[:, None], j[None, :], i0, m, b, w, MATCH, ALIBI,
                               DIAGONAL)
                lse = tl.load(LSE + row_offset + i, mask=i < J, other=float('inf')) + m * (i - i0)
                delta = tl.load(Delta + row_offset + i, mask=i < J, other=0.0)
                q = load_rows(Q + offset, i, J, D, R, BR, BT)
                k = load_rows(Keys + offset, j, J, D, R, BR, BT)
                p = tl.exp2(s + dot_products(q, k, BT) * (scale * LOG2E) - lse[:, None])
                do = load_rows(DO + offset, i, J, D, R, BR, BT)
                ds = p * (dot_products(do, k, BT) - delta[:, None])
                if BIAS:
                    dbias += ds
                if MATCH:
                    dmatch += w * ds
    if BIAS:
        store_bias(DBias + tile, dbias, i[:, None], j[None, :], width)
    if MATCH:
        store_bias(DMatch + tile, dmatch, i[:, None], j[None, :], width)


# For each kernel and head width (up to 64, up to 128): a tile's rows BM and columns BN, warps,
# pipeline stages. Of five to ten tried at widths 64, 72 and 84 these are the fastest on an H100, to
# 2%. None has been timed on an A100, where dbias_kernel spills registers above 64. BM and BN divide
# PAD; BN divides BM, and in dk_kernel BM divides BN, or tiles would reach beyond the bias.
TILES: dict[Any, dict[int, tuple[int, int, int, int]]] = {
    forward_kernel: {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)},
    dq_kernel: {64: (64, 32, 4, 3), 128: (64, 64, 4, 2)},
    dk_kernel: {64: (64, 64, 4, 2), 128: (64, 64, 4, 2)},
    dbias_kernel: {64: (64, 64, 4, 3), 128: (64, 64, 4, 2)},
}

# With bias and match, dbias_kernel has two sums, for which a tile of 64 columns spills. Not timed
TILE_OF_TWO = (64, 32, 4, 3)


def settings(kernel: Any, R: int, both: bool = False) -> dict[str, Any]:
    """Return a kernel's compile-time constants for head width R; both: with bias and match."""
    BR, BT = max(16, triton.next_power_of_2(R)), 0
    if 64 < R <= 96:
        BR, BT = 64, max(16, triton.next_power_of_2(R - 64))
    BM, BN, warps, stages = TILES[kernel][64 if R <= 64 else 128]
    if both and kernel is dbias_kernel:
        BM, BN, warps, stages = TILE_OF_TWO
    return dict(BR=BR, BT=BT, BM=BM, BN=BN, num_warps=warps, num_stages=stages)


def launch(kernel: Any, q: Tensor, k: Tensor, bias: Tensor | None, match: Tensor | None,
           b: Tensor | None, w: Tensor | None, *args: Tensor | None, scale: float,
           n_head: int) -> None:
    """Run a kernel over the tiles of q (B, J, D). Of all but dbias_kernel the first argument that
    follows is the window, (B, K, blocks), or None."""
    B, J, D = q.shape
    N, width = 1 if bias is None else bias.shape[1], bias_width(J)
    R = D // n_head
    BIAS, MATCH = bias is not None, match is not None
    options = dict(settings(kernel, R, BIAS and MATCH), K=n_head, N=N, R=R, BIAS=BIAS, MATCH=MATCH,
                   ALIBI=b is not None)
    if kernel is not dbias_kernel:
        options['WINDOW'] = args[0] is not None
    rows, columns = triton.cdiv(J, options['BM']), triton.cdiv(J, options['BN'])
    if kernel is dbias_kernel:
        grid = columns, rows, B * N
    else:
        grid = n_head, B, columns if kernel is dk_kernel else rows
    with torch.cuda.device_of(q):
        kernel[grid](q, k, bias, match, b, w, *args, J, width, scale, **options)


def window(q: Tensor, k: Tensor, n_head: int, scale: float, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first key that each block of queries reads, and the end of the queries that read
    each block of keys, both (B, K, blocks), int32, for q and k (B, J, D)."""
    J, n = q.shape[1], -(-q.shape[1] // WINDOW_TILE)
    norms = []
    for x in (q, k):  # the largest norm of each block, (B, K, n)
        norm = x.detach().unflatten(-1, (n_head, -1)).float().square().sum(-1).sqrt()
        norm = F.pad(norm, (0, 0, 0, n * WINDOW_TILE - J))
        norms.append(norm.unflatten(1, (n, WINDOW_TILE)).amax(2).mT)
    q_norm, k_norm = norms
    largest = q_norm * (k_norm.amax(-1, keepdim=True) + k_norm) * scale
    m = alibi_slopes(n_head, largest)[:, None]
    reach = (NOTHING + largest - b.detach()[:, None]) / m
    # A block's first query is the one that reaches furthest back
    block = torch.arange(n, device=q.device)
    first = ((block * WINDOW_TILE - (WINDOW_TILE - 1) - reach) / WINDOW_TILE).ceil()
    first = first.clamp(min=0).minimum(block)
    reads = first[..., None] <= block  # (B, K, blocks of queries, blocks of keys)
    end = torch.where(reads, block[:, None] + 1, 0).amax(-2)
    return (first * WINDOW_TILE).int(), (end * WINDOW_TILE).int()


def bias_width(J: int) -> int:
    """Round J up to whole tiles."""
    return -(-J // PAD) * PAD


def padded(match: Tensor | None) -> Tensor | None:
    """Return match (B, J, J) with zeros after its rows and columns, (B, width, width)."""
    if match is None:
        return None
    pad = bias_width(match.shape[1]) - match.shape[1]
    return F.pad(match, (0, pad, 0, pad)).contiguous() if pad > 0 else match.contiguous()


def diagonal_bias(du: Tensor, h: Tensor) -> Tensor:
    """Return du h^T (B, n, width, width) for j <= i, of du (B, n, J, D) and h (B, J, D). Above the
    diagonal it is undefined, as those scores become -inf. Padding is 0: NaN would reach dk."""
    B, n, J, _ = du.shape
    width = bias_width(J)
    bias = (du.new_empty if width == J else du.new_zeros)(B, n, width, width)
    for start in range(0, J, GEMM_ROWS):
        end = min(start + GEMM_ROWS, J)
        for head in range(n):
            torch.bmm(du[:, head, start:end], h[:, :end].mT, out=bias[:, head, start:end, :end])
    return bias


def diagonal_bias_backward(dbias: Tensor, du: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of du and h, without the products of zeros above the diagonal."""
    ddu, dh = du.new_empty(du.shape), h.new_empty(h.shape)
    for start in range(0, h.shape[1], GEMM_ROWS):
        end = min(start + GEMM_ROWS, h.shape[1])
        for head in range(du.shape[1]):
            torch.bmm(dbias[:, head, start:end, :end], h[:, :end], out=ddu[:, head, start:end])
        below = dbias[:, :, start:h.shape[1], start:end]
        dh[:, start:end] = torch.einsum('bnij,bnid->bjd', below, du[:, :, start:])
    return ddu, dh


# Two operators, which torch.compile leaves whole. There is no second derivative.

def forward(q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None, b: Tensor | None,
            match: Tensor | None, w: Tensor | None, first: Tensor | None, end: Tensor | None,
            n_head: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return o (B, J, D) and, for the backward pass, the scores' log-sum-exp (B, K, J) and the bias
    if it is shared, else an empty tensor."""
    q, k, match = q.contiguous(), k.contiguous(), padded(match)
    o, lse = torch.empty_like(q), q.new_empty(q.shape[0], n_head, q.shape[1], dtype=torch.float32)
    bias = None if du is None else diagonal_bias(du.contiguous(), h.contiguous())
    first = None if first is None else first.contiguous()
    launch(forward_kernel, q, k, bias, match, b, w, first, o, lse, scale=scale, n_head=n_head)
    shared = du is not None and du.shape[1] == 1
    return o, lse, bias if shared else q.new_empty(0)


def backward(do: Tensor, q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None,
             b: Tensor | None, match: Tensor | None, w: Tensor | None, first: Tensor | None,
             end: Tensor | None, o: Tensor, lse: Tensor, kept_bias: Tensor, n_head: int,
             scale: float,
             ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, du, h, b, match, w; empty tensors for those that are None. o, lse
    and kept_bias are the forward pass's results."""
    do, q, k, match = do.contiguous(), q.contiguous(), k.contiguous(), padded(match)
    dq, dk, delta, db_rows, dw_rows = (torch.empty_like(t) for t in (q, k, lse, lse, lse))
    ddu, dh, db, dS, dw = (q.new_empty(0) for _ in range(5))
    bias = None
    if du is not None:
        recompute = kept_bias.numel() == 0
        bias = diagonal_bias(du.contiguous(), h.contiguous()) if recompute else kept_bias
    given, common = (q, k, bias, match, b, w), dict(scale=scale, n_head=n_head)
    first, end = (None if t is None else t.contiguous() for t in (first, end))
    launch(dq_kernel, *given, first, o, do, lse, delta, dq, db_rows, dw_rows, **common)
    launch(dk_kernel, *given, end, do, lse, delta, dk, **common)
    dbias, dmatch = (None if t is None else torch.empty_like(t) for t in (bias, match))
    if bias is not None or match is not None:
        launch(dbias_kernel, *given, do, lse, delta, dbias, dmatch, **common)
    if bias is not None:
        ddu, dh = diagonal_bias_backward(dbias, du, h)
    if b is not None:
        db = db_rows.sum(dim=(0, 2))
    if match is not None:
        J = q.shape[1]
        dS, dw = dmatch[:, :J, :J].contiguous(), dw_rows.sum(dim=(0, 2))
    return dq, dk, ddu, dh, db, dS, dw


attention_op = torch.library.custom_op('nanocem::attention', forward, mutates_args=())
backward_op = torch.library.custom_op('nanocem::attention_backward', backward, mutates_args=())


@attention_op.register_fake
def _(q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None, b: Tensor | None,
      match: Tensor | None, w: Tensor | None, first: Tensor | None, end: Tensor | None,
      n_head: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    B, J, _ = q.shape
    shared = du is not None and du.shape[1] == 1
    bias = q.new_empty((B, 1, bias_width(J), bias_width(J)) if shared else 0)
    return q.new_empty(q.shape), q.new_empty(B, n_head, J, dtype=torch.float32), bias


@backward_op.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None, b: Tensor | None,
      match: Tensor | None, w: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    inputs = q, k, du, h, b, match, w
    return tuple(q.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs)


def save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.n_head, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def gradients(ctx: Any, do: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, first, end, o, lse, bias = ctx.saved_tensors
    found = backward_op(do, *inputs, first, end, o, lse, bias, ctx.n_head, ctx.scale)
    present = [None if t is None else g for t, g in zip(inputs, found, strict=True)]
    return *present, None, None, None, None


attention_op.register_autograd(gradients, setup_context=save_for_backward)


def attention(q: Tensor, k: Tensor, n_head: int, scale: float, du: Tensor | None, h: Tensor | None,
              b: Tensor | None, match: Tensor | None = None, w: Tensor | None = None) -> Tensor:
    """Return o for q, k and h, all (B, J, D), and scale = 1 / tau. du is d_k * u / tau (B, 1 or K,
    J, D); du and h are None without a diagonal. b (K,) is the self bias minus the cross bias, or
    None without ALiBi. match (B, J, J) and its heads' weights w (K,) are None without a match bias,
    beside which du must be (B, 1, J, D)."""
    h = None if du is None else h.to(q.dtype)
    du = None if du is None else du.to(q.dtype)
    b = None if b is None else b.float()
    match = None if match is None else match.to(q.dtype)
    w = None if w is None else w.float()
    first = end = None
    if b is not None and du is None and match is None:
        first, end = window(q, k, n_head, scale, b)
    return attention_op(q, k, du, h, b, match, w, first, end, n_head, scale)[0]


# In a model

def use_kernels(model: Transformer, dtype: torch.dtype) -> bool:
    """Set these kernels as `kernel` in all layers of a model, if they run on its device and in
    dtype, and if the first layer gives the same results with them as without, for texts of several
    lengths. Return whether they are set. If results differ, a warning names the first that does."""
    layers = [getattr(block, 'attn', None) for block in model.blocks]
    if not all(isinstance(attn, BaseAttention) and fits(attn)
               and runs_triton(attn.W_Q.device, dtype, attn.cfg.d_model // attn.K)
               for attn in layers):
        return False
    # A GPU has other kernels for a multiple of 16 than for 300, whose last tile is cut off. Some
    # edits, such as a window of 512 tokens, only show in a long context
    lengths = [150]
    if layers[0].W_Q.is_cuda:
        lengths = [300, 256, min(layers[0].cfg.context_length, 2048)]
    for length in lengths:
        if wrong := find_error(layers[0], dtype, length):
            warn(f'triton attention {wrong}: it is not used')
            return False
    for attn in layers:
        attn.kernel = attend
    return True


def fits(attn: BaseAttention) -> bool:
    """Return whether the kernels can compute this attention, and are worth using: the values must
    be the keys, there must be a bias, and with a match bias there can be only one diagonal."""
    cfg = attn.cfg
    # With RoPE Llama's tied values are the keys before their rotation
    tied = cfg.attn == 'cem' or (cfg.ties('kv') and cfg.positions == 'alibi')
    one_match = cfg.match_bias == 'none' or cfg.kq_diag != 'per_head'
    return tied and cfg.has_bias() and one_match and not attn.adds_diagonal


def runs_triton(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return whether there are kernels for this device and dtype, and heads of this width R."""
    if not HAS_TRITON or head_width > 128:
        return False
    if os.environ.get('TRITON_INTERPRET') == '1':  # on a CPU, in tests; without bfloat16
        return device.type == 'cpu' and dtype in (torch.float16, torch.float32)
    return device.type == 'cuda' and dtype in (torch.float16, torch.bfloat16)


def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor,
           h: Tensor) -> Tensor | None:
    """Attend to a whole text: (B, K, J, R) -> (B, K, J, R). None for values that are not the keys,
    a mask of one's own, and a dtype without kernels, as of the sample at the end of a run."""
    own_mask = pos.mask is not None and pos.mask.dim() > 2
    if v is not k or own_mask or not runs_triton(q.device, q.dtype, q.shape[-1]):
        return None
    b = None
    if attn.cfg.positions == 'alibi':  # softmax depends only on the difference of the biases
        b = attn.b_self - attn.b_cross
    d_u = None
    if attn.kq_diag is not None:
        d_u = attn.diagonal_queries(u)
    match = w = None
    if attn.cfg.match_bias == 'token':
        match, w = attn.match(h, pos), attn.match_weight
    q, k = attn.merge_heads(q), attn.merge_heads(k)  # (B, I, D)
    return attn.split_heads(attention(q, k, attn.K, 1 / attn.tau, d_u, h, b, match, w))


def find_error(attn: BaseAttention, dtype: torch.dtype, length: int) -> str:
    """Compare the kernels' output and gradients, for random inputs and parameters of this layer,
    with its own lines in float64 on a CPU. Return how one of them is wrong by more than rounding,
    or ''. Triton, LLVM, ptxas and the driver may all be wrong."""
    random = torch.Generator().manual_seed(0)  # which disturbs no other numbers
    with torch.inference_mode(False), torch.no_grad():
        layer = copy.deepcopy(attn).requires_grad_()
        for p in layer.parameters():  # zeros hide errors
            p.add_((0.3 * torch.randn(p.shape, generator=random)).to(p))
    exact, layer.kernel = copy.deepcopy(layer).to('cpu', torch.float64), attend
    K, D, device = attn.K, attn.cfg.d_model, attn.W_Q.device
    B = 2 if length <= 300 else 1
    q, k = torch.randn(2, B, K, length, D // K, generator=random).to(dtype)
    u, h = torch.randn(2, B, length, D, generator=random)

    def results(layer: Any, *inputs: Tensor) -> dict[str, Tensor]:
        q, k, u, h = inputs = [x.requires_grad_() for x in inputs]
        o, _ = layer.attend(q, k, k, make_positions(layer.cfg, h), u, h)
        weights = torch.linspace(-1, 1.5, o.numel(), device=o.device).view(o.shape)
        leaves = dict(zip('qkuh', inputs, strict=True)) | dict(layer.named_parameters())
        found = torch.autograd.grad((o * weights.to(o)).sum(), [*leaves.values()],
                                    allow_unused=True)
        return {'output': o} | {f'gradient of {name}': g for name, g in
                                zip(leaves, found, strict=True) if g is not None}
    try:
        with (torch.inference_mode(False), torch.enable_grad(),
              torch.autocast(device.type, enabled=False)):
            ours = results(layer, *(x.to(device) for x in (q, k, u, h)))
            right = results(exact, *(x.double() for x in (q, k, u, h)))
    except Exception as error:  # of many types
        return f'does not run ({first_line(error)})'
    eps = torch.finfo(dtype).eps  # of float32 more is allowed: rounding of long sums is no error
    limit = MOST_ERROR * (100 * eps if eps < 1e-6 else eps)
    for name, expected in right.items():
        error = largest_error(ours[name], expected)
        if not error <= limit:  # true for NaN
            return (f'gives another {name} than the lines of model.py (off by {error:.2g}, at most '
                    f'{limit:.2g} is rounding)')
    return ''


def largest_error(found: Tensor, right: Tensor) -> float:
    """Return the largest error of a row, relative to its right norm plus a typical row's."""
    found, right = (x.detach().cpu().double().reshape(-1, x.shape[-1] if x.dim() else 1)
                    for x in (found, right))
    rows = right.norm(dim=-1)
    typical = rows.square().mean().sqrt() + 1e-30  # not 0
    return float(((found - right).norm(dim=-1) / (rows + typical)).max())

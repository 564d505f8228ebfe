"""
What model.py computes, by faster ways. Same numbers; tests hold each way to the readable one.

    sdpa       torch's fused attention
    rows       on a CPU, a few rows of scores at a time, so that they stay in its cache
    triton     on a GPU, without a (B, K, J, J) tensor of scores: triton_attention.py
    absorbed   decoding behind a cache of h: W_K joins the query and the output
    cross_entropy   the loss, without a tensor of all logits

All compute o_ik = sum_j alpha_ijk v_jk, alpha_ijk = softmax_j(s_ijk), j <= i, with the scores of
Attention.scores. rows and triton are for values that are keys; their bias is made where it is used:

    s_ijk = q_ik . k_jk / tau + du_ik . h_j - m_k (i - j) + b_k [i = j],    du_ik = d_k * u_i / tau

Shapes: B batch, I new positions, J positions attended to, D width, K heads, R = D / K.
"""
import importlib.util
import math
import os
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import fail
from nanocem.files import say

WORTH_COMPILING = 2e12  # FLOPs; a run of fewer, a minute on a CPU, ends before that pays
LOGITS_AT_ONCE = 2 ** 26  # the loss of more logits than this is taken a few rows at a time
NO_TARGET = -100  # what is not to be learned, as in F.cross_entropy
SCORES_AT_ONCE = 2 ** 20  # of rows: 4 MB, for a CPU's cache
HAS_TRITON = importlib.util.find_spec('triton') is not None
MAKES_ITS_BIAS = ('rows', 'triton')  # all others take the table of Attention.bias


# Which way

def choose_way(attn: Any, k: Tensor | None, pos: Any) -> str:
    """How `attn` attends to keys k, (B, K, J, R), or None behind a cache of h."""
    if k is None:
        return 'absorbed'
    I, J = pos.mask.shape
    return way_for(attn, k.device, k.dtype, I == J, torch.compiler.is_compiling())


def way_for(attn: Any, device: torch.device, dtype: torch.dtype, whole: bool = True,
            compiled: bool = False, batch_size: int = 1) -> str:
    """readable, sdpa, rows or triton; whole: no past in a cache. batch_size: see prove."""
    cfg = attn.cfg
    biased = attn.kq_diag is not None or not attn.rope
    # only the readable way gives alpha away
    if cfg.attn_impl == 'readable' or cfg.exact_update:
        return 'readable'
    # on a CPU torch.compile makes one loop of a short context's softmax and what is around it
    if cfg.attn_impl == 'auto' and compiled and device.type == 'cpu' and cfg.context_length <= 256:
        return 'readable'
    if cfg.attn_impl == 'sdpa':
        return 'sdpa'
    if attn.cem and biased and whole:
        narrow = cfg.d_model <= 128 * cfg.n_head
        wanted = cfg.attn_impl == 'triton' or device.type == 'cuda'
        if wanted and narrow and runs_triton(device, dtype):
            n = 0 if attn.kq_diag is None else len(attn.kq_diag)
            shape = attn.K, cfg.d_model // attn.K, n, not attn.rope, cfg.context_length
            if proven(device, dtype, *shape, batch_size):
                return 'triton'
        # the scores of a short context fit a CPU's cache as they are
        wanted = cfg.attn_impl == 'rows' or cfg.context_length > 64
        if wanted and runs_rows(device, dtype):
            return 'rows'
    # on a CPU torch's fused attention has no backward pass for a bias
    return 'sdpa' if device.type == 'cuda' or not biased else 'readable'


def runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our Triton kernels take such tensors: a GPU's, or (no bfloat16) its interpreter's."""
    if os.environ.get('TRITON_INTERPRET') == '1':
        return HAS_TRITON and device.type == 'cpu' and dtype in (torch.float16, torch.float32)
    return HAS_TRITON and device.type == 'cuda' and dtype in (torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def proven(*case: Any) -> bool:
    """Whether the kernels passed selfcheck.py; torch.compile asks once, as it traces."""
    from nanocem import selfcheck
    return selfcheck.proven(*case)


def prove(model: Any, device: torch.device, dtype: torch.dtype, batch_size: int = 1) -> None:
    """Try the Triton kernels, where the model would take them, at the batch size that is to come.
    Else they are tried at first use, on one sequence."""
    way_for(model.blocks[0].attn, device, dtype, batch_size=batch_size)


def runs_rows(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == 'cpu' and dtype in (torch.bfloat16, torch.float32, torch.float64)


def attention_path(model: Any, device: torch.device, dtype: torch.dtype,
                   compiled: bool = False) -> str:
    """How the model attends to whole sequences there, in words."""
    way = way_for(model.blocks[0].attn, device, dtype, compiled=compiled)
    words = {
        'readable': 'attention by readable softmax',
        'sdpa': "attention by torch's fused kernel",
        'rows': 'attention a few rows at a time',
        'triton': 'attention by our Triton kernels',
    }[way]
    needs = {'triton': 'Triton kernels that pass their check, a GPU, bfloat16', 'rows': 'a CPU'}
    asked = model.cfg.attn_impl
    if asked in needs and asked != way:
        words += f' (attn_impl={asked} needs {needs[asked]}, and CEM attention with a bias)'
    return words + ('; the first step compiles, which takes a while' if compiled else '')


# Precision, and torch.compile

def precision_and_compiler(device: torch.device, dtype: str, compiled: bool | None, flops: float,
                           ) -> tuple[torch.dtype, bool]:
    """What train.py's dtype and compile mean for a run of so many FLOPs. On a CPU bfloat16 pays
    where it is multiplied in hardware (AMX) and what lies between the products is compiled."""
    on_gpu, on_cpu = device.type == 'cuda', device.type == 'cpu'
    asked = compiled
    if asked is None:
        compiled = on_gpu or (on_cpu and flops > WORTH_COMPILING)
    if compiled and not compiles(device):
        if asked:
            fail(f'compile=True: torch.compile does not work here on {device.type}; does it find a '
                 'C++ compiler?')
        say('Not compiled: torch.compile does not work here; does it find a C++ compiler?')
        compiled = False
    if dtype == 'auto':
        bf16 = ((on_gpu and torch.cuda.is_bf16_supported(including_emulation=False))
                or (on_cpu and compiled and torch.cpu._is_amx_tile_supported()))
        dtype = 'bfloat16' if bf16 else 'float32'
    return getattr(torch, dtype), compiled


@cache
def compiles(device: torch.device) -> bool:
    """Whether torch.compile works there, which asks for a C++ compiler."""
    try:
        torch.compile(torch.relu)(torch.ones(64, device=device))
    except Exception:  # of many kinds: nothing depends on which
        return False
    return True


def compile_for(device: torch.device, model: Any) -> Any:
    """The compiled model: on a GPU all of it; elsewhere its blocks, which are alike, so that what
    is compiled for one serves all."""
    if device.type == 'cuda':
        return torch.compile(model, dynamic=False)
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


def eager() -> Any:
    """A context in which compiled models run as if they were not: for shapes seen once."""
    return torch.compiler.set_stance('force_eager')


# Attention

def attend(way: str, attn: Any, q: Tensor, u: Tensor, k: Tensor | None, v: Tensor | None,
           h: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """o (B, K, I, R), alpha where it is made: q, k, v (B, K, ., R), u (B, I, D), h (B, J, D)."""
    du = None
    if attn.kq_diag is not None:
        du = u[:, None] * (attn.kq_diag[:, None] / attn.tau)  # (B, 1 or K, I, D)
    if way == 'absorbed':
        return absorbed(attn, q, du, h, bias)
    if way == 'sdpa':
        return sdpa(attn, q, k, v, du, h, bias), None
    b = None if attn.rope else attn.b_self - attn.b_cross  # softmax sees no more of the two
    o = attention(merge(q), merge(k), attn.K, 1 / attn.tau, du, h, b, way == 'triton')
    return heads(o, attn.K), None


def absorbed(attn: Any, q: Tensor, du: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """k_j . q_i = h_j . (W_K^T q_i), so that h alone need be kept; and read once for all heads,
    which are rows of one product."""
    W_K, I = attn.W_K.unflatten(0, (attn.K, -1)), q.shape[2]  # (K, R, D)
    reads = (q / attn.tau @ W_K + du).flatten(1, 2)  # (B, K I, D)
    alpha = ((reads @ h.mT).unflatten(1, (-1, I)) + bias).softmax(dim=-1).type_as(h)
    return (alpha.flatten(1, 2) @ h).unflatten(1, (-1, I)) @ W_K.mT, alpha


def sdpa(attn: Any, q: Tensor, k: Tensor, v: Tensor, du: Tensor | None, h: Tensor, bias: Tensor,
         ) -> Tensor:
    I, R = q.shape[2:]
    scale = 1 / attn.tau
    if attn.rope and du is None and I in (1, k.shape[2]):  # no bias but causality
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=I > 1)
    if du is not None:
        bias = du @ h[:, None].mT + bias
    if pad := -R % 8:  # with a bias, the fused kernel takes widths in steps of 8
        q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=scale)[..., :R]


def heads(x: Tensor, n_head: int) -> Tensor:
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)  # (B, J, D) -> (B, K, J, R)


def slopes(n_head: int, like: Tensor) -> Tensor:
    """ALiBi's m_k, (K,), in the dtype and on the device of `like`: 2^-k, or from eight heads on
    2^(-8k/K), so that none is below 1/256."""
    k = torch.arange(1, n_head + 1, dtype=like.dtype, device=like.device)
    return 2.0 ** (-8 / max(8, n_head) * k)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)  # (B, K, J, R) -> (B, J, D)


def attention(q: Tensor, k: Tensor, n_head: int, scale: float, du: Tensor | None, h: Tensor,
              b: Tensor | None, use_triton: bool) -> Tensor:
    """o (B, J, D) by rows or triton: q, k (B, J, D); scale = 1 / tau; du (B, 1 or K, J, D) and
    h (B, J, D), or du None; b (K,), the self bias less the cross bias, or None: no ALiBi either.
    use_triton: tensors of a GPU, or of a CPU that interprets; else of a CPU."""
    if du is None:
        h = None
    else:
        du, h = du.to(q.dtype), h.to(q.dtype)
    if b is not None:
        b = b.to(torch.float32 if use_triton else at_least_float(q).dtype)
    return attention_op(q, k, du, h, b, n_head, scale, use_triton)[0]


# One operator, which torch.compile leaves whole. It has a gradient, and neither forward mode nor a
# second derivative.

@torch.library.custom_op('nanocem::attention', mutates_args=())
def attention_op(q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None, b: Tensor | None,
                 n_head: int, scale: float, use_triton: bool) -> tuple[Tensor, Tensor]:
    """o (B, J, D) and, for Triton's backward pass, the scores' log-sum-exp (B, K, J)."""
    q, k = q.contiguous(), k.contiguous()
    if use_triton:
        from nanocem import triton_attention
        return triton_attention.forward(q, k, du, h, b, n_head, scale)
    return by_rows(q, k, du, h, b, n_head, scale), q.new_empty(0)


@torch.library.custom_op('nanocem::attention_backward', mutates_args=())
def backward_op(do: Tensor, q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None,
                b: Tensor | None, o: Tensor, lse: Tensor, n_head: int, scale: float,
                use_triton: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, du, h, b; empty tensors for those that are None."""
    do, q, k = do.contiguous(), q.contiguous(), k.contiguous()
    if use_triton:
        from nanocem import triton_attention
        return triton_attention.backward(do, q, k, du, h, b, o, lse, n_head, scale)
    return tuple(by_rows_backward(do, q, k, du, h, b, o, n_head, scale))


@attention_op.register_fake
def _(q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None, b: Tensor | None, n_head: int,
      scale: float, use_triton: bool) -> tuple[Tensor, Tensor]:
    B, J, _ = q.shape
    lse = q.new_empty(B, n_head, J, dtype=torch.float32) if use_triton else q.new_empty(0)
    return q.new_empty(q.shape), lse


@backward_op.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None, b: Tensor | None,
      *args: Any) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0) if t is None else t.new_empty(t.shape) for t in (q, k, du, h, b))


def save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.n_head, ctx.scale, ctx.use_triton = inputs
    ctx.save_for_backward(*tensors, *output)


def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, o, lse = ctx.saved_tensors
    gradients = backward_op(do, *inputs, o, lse, ctx.n_head, ctx.scale, ctx.use_triton)
    present = [None if t is None else g for t, g in zip(inputs, gradients, strict=True)]
    return *present, None, None, None


attention_op.register_autograd(backward, setup_context=save_for_backward)


# A few rows of a few sequences at a time, `seqs` and `rows`. In the loops q (over tau), k and their
# gradients are (B, K, J, R); the columns that a piece has are `past`, all up to its last row. Of
# bfloat16 only products are made: scores, softmax and sums over pieces are float32.

def pieces(B: int, K: int, J: int) -> Iterator[tuple[slice, slice]]:
    """Slices of sequences and of rows, 32 rows or more, of SCORES_AT_ONCE scores at most where that
    allows."""
    row = max(1, K * J)
    n_rows = min(64, max(32, SCORES_AT_ONCE // row))
    n_seqs = max(1, SCORES_AT_ONCE // (row * min(n_rows, max(1, J))))
    for n in range(0, B, n_seqs):
        for i in range(0, J, n_rows):
            yield slice(n, min(n + n_seqs, B)), slice(i, min(i + n_rows, J))


def piece_of_alpha(q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None, b: Tensor | None,
                   seqs: slice, rows: slice) -> Tensor:
    """softmax_j(s_ijk): (sequences, K, rows, past)."""
    K, past = q.shape[1], slice(rows.stop)
    # m_k j, which is all that softmax sees of -m_k (i - j)
    m = at_least_float(q.new_zeros(1))
    if b is not None:
        m = slopes(K, m)
    s = m[:, None, None] * (torch.arange(rows.stop) - rows.start)
    if du is not None:
        by_diagonal = du[seqs, :, rows].flatten(1, 2) @ h[seqs, past].mT
        s = s + by_diagonal.unflatten(1, (du.shape[1], -1))
    s = s.broadcast_to(seqs.stop - seqs.start, K, rows.stop - rows.start, rows.stop).contiguous()
    square = s[..., rows]  # the columns that j <= i cuts
    if b is not None:
        square.diagonal(dim1=2, dim2=3).add_(b[:, None])
    square += square.new_full(square.shape[2:], -torch.inf).triu(1)
    q, k = q[seqs, :, rows].flatten(0, 1), k[seqs, :, past].flatten(0, 1)
    flat = s.view(-1, *s.shape[2:])
    if s.dtype == q.dtype:
        flat.baddbmm_(q, k.mT)
    else:
        flat += q @ k.mT
    return s.softmax(dim=-1)


@torch.autocast('cpu', enabled=False)
def by_rows(q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None, b: Tensor | None,
            n_head: int, scale: float) -> Tensor:
    """o (B, J, D)."""
    o = torch.empty_like(q)
    q, k, o_heads = heads(q, n_head) * scale, heads(k, n_head), heads(o, n_head)
    for seqs, rows in pieces(*q.shape[:3]):
        alpha = piece_of_alpha(q, k, du, h, b, seqs, rows).to(q.dtype)
        o_heads[seqs, :, rows] = alpha @ k[seqs, :, :rows.stop]
    return o


@torch.autocast('cpu', enabled=False)
def by_rows_backward(do: Tensor, q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None,
                     b: Tensor | None, o: Tensor, n_head: int, scale: float) -> list[Tensor]:
    """Gradients of q, k, du, h, b as they came; empty tensors for those that are None."""
    inputs, sums = (q, k, du, h, b), at_least_float(q.new_zeros(0))
    gradients = [sums.new_zeros(0 if t is None else t.shape) for t in inputs]
    ddu, dh, db = gradients[2:]
    dq, dk, do, o = (heads(t, n_head) for t in (*gradients[:2], do, o))
    q, k = heads(q * scale, n_head), heads(k, n_head)
    delta = (at_least_float(do) * o).sum(dim=-1, keepdim=True)
    for seqs, rows in pieces(*q.shape[:3]):
        past = slice(rows.stop)
        alpha = piece_of_alpha(q, k, du, h, b, seqs, rows)
        # of the scores: alpha_ij (do_i . k_j - do_i . o_i)
        do_k = at_least_float(do[seqs, :, rows] @ k[seqs, :, past].mT)
        ds = do_k.sub_(delta[seqs, :, rows]).mul_(alpha)
        if b is not None:
            db += ds[..., rows].diagonal(dim1=2, dim2=3).sum(dim=(0, 2))
        if du is not None:
            dbias = ds if du.shape[1] > 1 else ds.sum(dim=1)
            dbias = dbias.flatten(1, -2).to(q.dtype)  # (sequences, n rows, past)
            ddu[seqs, :, rows] = (dbias @ h[seqs, past]).unflatten(1, (du.shape[1], -1))
            dh[seqs, past] += dbias.mT @ du[seqs, :, rows].flatten(1, 2)
        alpha, ds = alpha.to(q.dtype), ds.to(q.dtype)
        dq[seqs, :, rows] = at_least_float(ds @ k[seqs, :, past]) * scale
        # as values, and as keys
        dk[seqs, :, past] += alpha.mT @ do[seqs, :, rows] + ds.mT @ q[seqs, :, rows]
    return [g if t is None else g.to(t.dtype) for t, g in zip(inputs, gradients, strict=True)]


# The loss

def at_least_float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cross_entropy(x: Tensor, W: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the logits x W^T: x (B, J, D), W (vocabulary, D), targets (B, J), of
    which those of -100 do not count."""
    x, targets = x.flatten(0, 1), targets.flatten()
    if len(x) * len(W) <= LOGITS_AT_ONCE:
        return F.cross_entropy(at_least_float(F.linear(x, W)), targets, ignore_index=NO_TARGET)
    return LinearCrossEntropy.apply(x, W, targets, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    """A few rows at a time: no (N, V) tensor exists. With `learn`, gradients are made along the
    way, where the logits are at hand."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, targets: Tensor, learn: bool) -> Tensor:
        loss, dx, dW = 0, [], torch.zeros_like(W) if learn else None
        rows = max(1, LOGITS_AT_ONCE // len(W))
        counts = (targets != NO_TARGET)[:, None]
        targets = targets[:, None].where(counts, 0)
        pieces = zip(x.split(rows), targets.split(rows), counts.split(rows), strict=True)
        for x_n, target, count in pieces:
            logits = F.linear(x_n, W)
            log_p = at_least_float(logits).log_softmax(dim=-1)
            loss = loss - (log_p.gather(-1, target) * count).sum()
            if learn:
                one = torch.ones_like(log_p[:, :1])
                d = log_p.exp_().scatter_add_(-1, target, -one).to(logits.dtype)  # p - one-hot
                dx.append((d @ W).to(x.dtype) * count)
                dW += d.mT @ (x_n * count)
        n = counts.sum()
        if learn:
            ctx.save_for_backward(torch.cat(dx), dW, n)
        return loss / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dW, n = ctx.saved_tensors
        grad = grad / n
        return grad * dx, grad * dW, None, None


# FLOPs: a model's, a machine's

DENSE_BF16 = {'A100': 312e12, 'H100 PCIe': 756e12, 'NVL': 835e12, 'H100': 989e12, 'H200': 989e12,
              'B200': 2250e12}  # a second; the first that the GPU's name has


def flops_per_token(model: Any, training: bool) -> float:
    """FLOPs of a token at full context: 2 a multiply-add of every product with tokens in it
    (projections, scores, weighted values, the diagonal's scores, the head), T steps of them, half
    of attention masked away; a backward pass counts as two forward ones. Not counted: elementwise
    work, the folding of P."""
    cfg, D = model.cfg, model.cfg.d_model
    seen = (cfg.context_length + 1) / 2  # positions attended to, on average
    macs = cfg.vocab_size * D
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        if attn.cem:
            diagonals = 0 if attn.kq_diag is None else len(attn.kq_diag)
            step = 2 * D * D + (2 + diagonals) * seen * D
            if cfg.exact_update:
                rank = cfg.attn_rank if cfg.preconditioner == 'diag_lowrank' else 0
                step += cfg.n_head * (seen * D + 4 * rank * D)
            macs += D * D + attn.steps * step
        else:
            macs += attn.steps * (4 * D * D + 2 * seen * D)
        if mlp.cem:
            macs += mlp.W.numel() * (1 + 2 * mlp.steps)
        else:
            macs += mlp.W.numel() * 3 * mlp.steps
    return 2.0 * macs * (3 if training else 1)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second that `device` can do: the data sheet's dense bf16 figure where it is known,
    else what the fastest of some matrix products reaches."""
    if device.type == 'cuda' and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, flops in DENSE_BF16.items():
            if known in name:
                return flops
    n = 1024 if device.type == 'cpu' else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(40):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n ** 3 / best

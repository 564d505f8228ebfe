"""
What model.py computes, by faster ways. Same numbers; tests hold each way to the readable one.

    sdpa            torch's fused attention
    triton          on a GPU, without the softmax weights in memory: triton_attention.py
    absorbed        decoding behind a cache of h: W_K joins the query and the output
    cross_entropy   the loss, without a tensor of all logits

Shapes: B batch, I new positions, J positions attended to, D width, K heads, R = D / K.
"""
import contextlib
import ctypes
import importlib.util
import math
import os
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import spence
from torch import Tensor

WORTH_COMPILING = 2e12  # FLOPs; a run of fewer, a minute on a CPU, ends before that pays
SHORT_CONTEXT = 256  # on a CPU torch.compile makes one fast loop of the readable way up to here
LOGITS_AT_ONCE = 2 ** 26  # the loss of more logits than this is taken a few rows at a time
NO_TARGET = -100  # what is not to be learned, as in F.cross_entropy
HAS_TRITON = importlib.util.find_spec('triton') is not None


# Attention

def way(attn: Any, k: Tensor | None, pos: Any) -> str:
    """How to attend: readable, as model.py has it, or by `attend`. k (B, K, J, R), or None behind a
    cache of h."""
    if k is None:
        return 'absorbed'
    I, J = pos.mask.shape
    return choose_impl(attn, k.device, k.dtype, I == J, torch.compiler.is_compiling())


def attend(way: str, attn: Any, q: Tensor, u: Tensor, k: Tensor | None, v: Tensor | None, h: Tensor,
           pos: Any) -> Tensor:
    """o (B, K, I, R) = sum_j softmax_j(attn.scores)_ijk v_j, of q, k, v (B, K, ., R), u (B, I, D)
    and h (B, J, D)."""
    if way == 'absorbed':
        return absorbed(attn, q, u, h, pos)
    if way == 'sdpa':
        return sdpa(attn, q, u, k, v, h, pos)
    from nanocem import triton_attention
    b = None if attn.rope else attn.b_self - attn.b_cross  # softmax sees no more of the two
    du = scaled_diagonal(attn, u)
    o = triton_attention.attention(merge(q), merge(k), attn.K, 1 / attn.tau, du, h, b)
    return heads(o, attn.K)


def choose_impl(attn: Any, device: torch.device, dtype: torch.dtype, no_past: bool = True,
                compiled: bool = False) -> str:
    """readable, sdpa or triton: what attn_impl asks for, or the fastest that runs there."""
    cfg = attn.cfg
    on_gpu = device.type == 'cuda'
    biased = attn.kq_diag is not None or not attn.rope
    if cfg.attn_impl == 'readable' or cfg.exact_update:  # no other way gives alpha away
        return 'readable'
    if cfg.attn_impl == 'sdpa':
        return 'sdpa'
    # our kernels: for values that are keys, and a bias
    if (on_gpu or cfg.attn_impl == 'triton') and attn.cem and biased and no_past:
        diagonals = 0 if attn.kq_diag is None else len(attn.kq_diag)
        if runs_triton(device, dtype, attn.K, cfg.d_model // attn.K, diagonals, not attn.rope):
            return 'triton'
    if on_gpu:
        return 'sdpa'
    # on a CPU torch's fused attention has no backward pass for a bias
    return 'readable' if biased or (compiled and cfg.context_length <= SHORT_CONTEXT) else 'sdpa'


@torch.compiler.assume_constant_result
def runs_triton(device: torch.device, dtype: torch.dtype, n_head: int, width: int, diagonals: int,
                alibi: bool) -> bool:
    """Whether our Triton kernels take such tensors, a GPU's or (no bfloat16) its interpreter's, and
    agree there with the formula: tried once a process. torch.compile asks once, as it traces."""
    if not HAS_TRITON or width > 128:
        return False
    if os.environ.get('TRITON_INTERPRET') == '1':  # the tests compare it
        return device.type == 'cpu' and dtype in (torch.float16, torch.float32)
    if device.type != 'cuda' or dtype not in (torch.float16, torch.bfloat16):
        return False
    from nanocem import triton_attention
    return triton_attention.agrees(device, dtype, n_head, width, diagonals, alibi)


def scaled_diagonal(attn: Any, u: Tensor) -> Tensor | None:
    """d_k * u_i / tau, (B, 1 or K, I, D); None where there is no diagonal."""
    if attn.kq_diag is None:
        return None
    return u[:, None] * (attn.kq_diag[:, None] / attn.tau)


def absorbed(attn: Any, q: Tensor, u: Tensor, h: Tensor, pos: Any) -> Tensor:
    """k_j . q_i = h_j . (W_K^T q_i), so that h alone need be kept; and read once for all heads,
    which are rows of one product."""
    I = q.shape[2]
    W_K = attn.W_K.unflatten(0, (attn.K, -1))  # (K, R, D)
    reads = (q / attn.tau @ W_K + scaled_diagonal(attn, u)).flatten(1, 2)  # (B, K I, D)
    a = (reads @ h.mT).unflatten(1, (-1, I)) + attn.bias(pos)  # (B, K, I, J)
    alpha = a.softmax(dim=-1).type_as(h)
    return (alpha.flatten(1, 2) @ h).unflatten(1, (-1, I)) @ W_K.mT


def sdpa(attn: Any, q: Tensor, u: Tensor, k: Tensor, v: Tensor, h: Tensor, pos: Any) -> Tensor:
    I, R = q.shape[2:]
    if attn.rope and attn.kq_diag is None and I in (1, k.shape[2]):  # no bias but causality
        return F.scaled_dot_product_attention(q, k, v, scale=1 / attn.tau, is_causal=I > 1)
    bias = attn.bias(pos)
    if attn.kq_diag is not None:
        bias = scaled_diagonal(attn, u) @ h[:, None].mT + bias
    if pad := -R % 8:  # with a bias, the fused kernel takes widths in steps of 8
        q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=1 / attn.tau)
    return o[..., :R]


def heads(x: Tensor, n_head: int) -> Tensor:
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)  # (B, J, D) -> (B, K, J, R)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)  # (B, K, J, R) -> (B, J, D)


def attention_path(model: Any, device: torch.device, dtype: torch.dtype,
                   compiled: bool = False) -> str:
    """How the model attends to whole sequences there, in words."""
    impl = choose_impl(model.blocks[0].attn, device, dtype, compiled=compiled)
    words = f'{impl} attention'
    if model.cfg.attn_impl not in ('auto', impl):
        words += f' ({model.cfg.attn_impl} cannot run this model here)'
    return words + ('; the first step compiles, which takes a while' if compiled else '')


# Precision, and torch.compile

def precision_and_compiler(device: torch.device, dtype: str, compiled: bool | None, flops: float,
                           ) -> tuple[torch.dtype, bool]:
    """What train.py's dtype and compile mean for a run of so many FLOPs. On a CPU bfloat16 pays
    where it is multiplied in hardware (AMX) and what lies between the products is compiled.
    ValueError where compile=True cannot be."""
    on_gpu, on_cpu = device.type == 'cuda', device.type == 'cpu'
    if compiled is None:
        compiled = (on_gpu or (on_cpu and flops > WORTH_COMPILING)) and compiles(device)
    elif compiled and not compiles(device):
        raise ValueError(f'compile=True: torch.compile does not work here on {device.type}; does '
                         'it find a C++ compiler?')
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
    """The compiled model: on a GPU all of it; elsewhere its blocks, alike, by one graph for all."""
    if device.type == 'cuda':
        return torch.compile(model, dynamic=False)
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


def keep_freed_memory() -> None:
    """On a CPU: tensors take the memory of those before them. glibc would give it back to Linux,
    which clears each page that it hands out again; other C libraries are left as they are."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of malloc.h
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**25)  # bytes, the most that glibc takes
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 2**28)


def eager() -> Any:
    """A context in which compiled models run as if they were not: for shapes seen once."""
    return torch.compiler.set_stance('force_eager')


# The loss, and phi

def cross_entropy(x: Tensor, W: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the logits x W^T: x (B, J, D), W (vocabulary, D), targets (B, J), of
    which those of -100 do not count. ValueError where the shapes differ."""
    if x.shape[:-1] != targets.shape:
        raise ValueError(f'targets {tuple(targets.shape)}: expected a target for each token')
    x, targets = x.flatten(0, 1), targets.flatten()
    if len(x) * len(W) <= LOGITS_AT_ONCE:
        logits = F.linear(x, W)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    return LinearCrossEntropy.apply(x, W, targets, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    """A few rows at a time. With `learn`, gradients are made where the logits are at hand."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, targets: Tensor, learn: bool) -> Tensor:
        loss, dx, dW = 0, [], torch.zeros_like(W) if learn else None
        rows = max(1, LOGITS_AT_ONCE // len(W))
        counts = (targets != NO_TARGET)[:, None]
        targets = targets[:, None].where(counts, 0)
        parts = zip(x.split(rows), targets.split(rows), counts.split(rows), strict=True)
        for x_n, target, count in parts:
            logits = F.linear(x_n, W)
            log_p = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
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


class Phi(torch.autograd.Function):
    """phi(z) = z softplus(z) + Li2(-e^z), elementwise: the integral of SiLU from -inf to z."""
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        a = z.detach().double().cpu().numpy()
        dilog = spence(1 + np.exp(-abs(a)))  # Li2(-e^a); where a > 0 by its inversion: no overflow
        dilog = np.where(a > 0, -math.pi ** 2 / 6 - a ** 2 / 2 - dilog, dilog)
        return torch.as_tensor(a * np.logaddexp(0, a) + dilog).to(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * F.silu(ctx.saved_tensors[0])


# FLOPs: a model's, a machine's

DENSE_BF16 = {'A100': 312e12, 'H100 PCIe': 756e12, 'NVL': 835e12, 'H100': 989e12, 'H200': 989e12,
              'B200': 2250e12}  # a second; the first that the GPU's name has


def flops_per_token(model: Any, training: bool = True) -> float:
    """FLOPs of a token at full context: 2 a multiply-add of every product with tokens in it
    (projections, scores, weighted values, the diagonal's scores, the head), T steps of them, half
    of attention masked away; a backward pass counts as two forward ones. No elementwise work."""
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
            macs += attn.reuse * (4 * D * D + 2 * seen * D)
        if mlp.cem:
            macs += mlp.W.numel() * (1 + 2 * mlp.steps)
        else:
            macs += mlp.W.numel() * 3 * mlp.reuse
    return 2.0 * macs * (3 if training else 1)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second that a GPU can do by its data sheet, dense bf16; NaN where that is unknown."""
    if device.type == 'cuda' and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, flops in DENSE_BF16.items():
            if known in name:
                return flops
    return math.nan

"""
What model.py computes, by faster ways. Same numbers; tests hold each way to the readable one.

    sdpa            torch's fused attention
    triton          on a GPU, without the softmax weights in memory: triton_attention.py
    absorbed        decoding behind a cache of h: W_K joins the query and the output

Shapes: B batch, I new positions, J positions attended to, D width, K heads, R = D / K.
"""
import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT_CONTEXT = 256  # on a CPU torch.compile makes one fast loop of the readable way up to here
HAS_TRITON = importlib.util.find_spec('triton') is not None


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

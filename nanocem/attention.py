"""
Choose and run faster implementations of attention. Tests compare each with the readable one.

    readable               the lines in model.py
    blockwise              the same for a block of queries at a time, without the keys after it
    sdpa                   torch's fused attention; for second derivatives on a CPU, which it lacks
                           without a bias, use set_attn_impl('readable')
    triton                 GPU kernels that keep no attention weights in memory: triton_attention.py
    h_cache                decoding from a cache of h; W_K is multiplied into queries and output

Shapes: B batch, I new positions, J attended positions, D width, K heads, R = D / K.
"""
import importlib.util
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT_CONTEXT = 256  # up to here, blockwise attention compiled for a CPU is faster than sdpa
BLOCK = 64  # the smallest block of queries in blockwise attention
HAS_TRITON = importlib.util.find_spec('triton') is not None


def choose_impl(attn: Any, k: Tensor | None, pos: Any) -> str:
    """Choose how to attend to keys k (B, K, J, R), or None if the cache holds h alone."""
    if k is None:
        return 'h_cache'
    I, J = pos.mask.shape
    return impl_for(attn, k.device, k.dtype, I == J, torch.compiler.is_compiling())


def impl_for(attn: Any, device: torch.device, dtype: torch.dtype, whole_sequence: bool = True,
             compiled: bool = False) -> str:
    """Return attn.impl, or the fastest implementation if it is auto or cannot run. With
    whole_sequence all keys are of the new positions: none comes from a cache."""
    cfg, on_gpu = attn.cfg, device.type == 'cuda'
    alibi = cfg.positions == 'alibi'
    biased = alibi or cfg.kq_diag != 'none'
    if attn.impl == 'readable' or cfg.exact_update:  # the exact update needs alpha
        return 'readable'
    if attn.impl == 'sdpa' or (attn.impl == 'blockwise' and whole_sequence):
        return attn.impl
    # The kernels need values that equal the keys, and pay only with a bias
    tied = cfg.attn == 'cem' or cfg.tie in ('kv', 'both')
    if (on_gpu or attn.impl == 'triton') and tied and biased and whole_sequence:
        n_diagonals = 0 if cfg.kq_diag == 'none' else len(attn.kq_diag)
        if runs_triton(device, dtype, attn.K, cfg.d_model // attn.K, n_diagonals, alibi):
            return 'triton'
    if on_gpu:
        return 'sdpa'
    # On a CPU torch's fused attention has no backward pass for a bias. Without a bias it is the
    # fastest, unless blockwise attention is compiled for a short context
    compiled_and_short = compiled and cfg.context_length <= SHORT_CONTEXT
    if not biased and not compiled_and_short:
        return 'sdpa'
    return 'blockwise' if whole_sequence else 'readable'


@torch.compiler.assume_constant_result
def runs_triton(device: torch.device, dtype: torch.dtype, n_head: int, width: int,
                n_diagonals: int, alibi: bool) -> bool:
    """Return whether the Triton kernels can compute attention with heads of this width R. On a GPU
    they must also agree with the formula, which is tried once for each such model."""
    if not HAS_TRITON or width > 128:
        return False
    if os.environ.get('TRITON_INTERPRET') == '1':  # on a CPU, in tests; without bfloat16
        return device.type == 'cpu' and dtype in (torch.float16, torch.float32)
    if device.type != 'cuda' or dtype not in (torch.float16, torch.bfloat16):
        return False
    from nanocem import triton_attention
    return triton_attention.agrees(device, dtype, n_head, width, n_diagonals, alibi)


def attend(impl: str, attn: Any, q: Tensor, k: Tensor | None, v: Tensor | None, pos: Any,
           u: Tensor | None = None, h: Tensor | None = None) -> Tensor:
    """Return o_ik = sum_j softmax_j(a_ijk) v_jk, with model.py's scores a, for q and o
    (B, K, I, R), k and v (B, K, J, R), u (B, I, D) and h (B, J, D)."""
    if impl == 'h_cache':
        return attention_from_h_cache(attn, q, u, h, pos)
    if impl == 'blockwise':
        return blockwise(attn, q, k, v, pos, u, h)
    if impl == 'sdpa':
        return sdpa(attn, q, k, v, pos, u, h)
    from nanocem import triton_attention
    b = None
    if attn.cfg.positions == 'alibi':  # softmax depends on the difference of the biases alone
        b = attn.b_self - attn.b_cross
    d_u = scaled_diagonal(attn, u)
    q, k = attn.merge_heads(q), attn.merge_heads(k)  # (B, I, D)
    return attn.split_heads(triton_attention.attention(q, k, attn.K, 1 / attn.tau, d_u, h, b))


def scaled_diagonal(attn: Any, u: Tensor | None) -> Tensor | None:
    """Return d_k * u_i / tau, (B, 1 or K, I, D); None if there is no diagonal."""
    if attn.cfg.kq_diag == 'none':
        return None
    return u[:, None] * (attn.kq_diag[:, None] / attn.tau)


def attention_from_h_cache(attn: Any, q: Tensor, u: Tensor, h: Tensor, pos: Any) -> Tensor:
    """Attend without keys, since k_j . q_i = h_j . (W_K^T q_i): the cache stores h alone. The
    queries of all heads are rows of one matrix, so that h is read once. Returns (B, K, I, R)."""
    I = q.shape[2]
    W_K = attn.W_K.unflatten(0, (attn.K, -1))  # (K, R, D)
    queries = (q / attn.tau @ W_K + scaled_diagonal(attn, u)).flatten(1, 2)  # (B, K I, D)
    a = (queries @ h.mT).unflatten(1, (-1, I)) + attn.bias(pos)  # (B, K, I, J)
    alpha = a.softmax(dim=-1).type_as(h)
    return (alpha.flatten(1, 2) @ h).unflatten(1, (-1, I)) @ W_K.mT


def blockwise(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None,
              h: Tensor | None) -> Tensor:
    """Attend as model.py does, in at most four blocks of queries. A block leaves out the keys after
    it, so four blocks compute 5/8 of all scores. Returns (B, K, I, R)."""
    I = q.shape[2]
    size = max(BLOCK, math.ceil(I / 4))
    outputs = []
    for begin in range(0, I, size):
        end = min(begin + size, I)
        block = slice(begin, end)
        block_pos = pos._replace(distance=pos.distance[block, :end], mask=pos.mask[block, :end])
        u_and_h = (u[:, block], h[:, :end]) if attn.cfg.attn == 'cem' else ()
        a = attn.scores(q[:, :, block], k[:, :, :end], block_pos, *u_and_h)  # (B, K, size, end)
        alpha = a.softmax(dim=-1).type_as(v)
        outputs.append(alpha @ v[:, :, :end])
    return torch.cat(outputs, dim=2)


def sdpa(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None,
         h: Tensor | None) -> Tensor:
    """Attend with torch's fused attention, whose mask is causal, or the biases: (B, K, I, R)."""
    I, R = q.shape[2:]
    # Without a bias, torch's causal mask suits a whole sequence, and a single query needs none
    causal_only = attn.cfg.positions == 'rope' and attn.cfg.kq_diag == 'none'
    if causal_only and I in (1, k.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, scale=1 / attn.tau, is_causal=I > 1)
    bias = attn.bias(pos)
    if attn.cfg.kq_diag != 'none':
        bias = bias + scaled_diagonal(attn, u) @ h[:, None].mT
    if pad := -R % 8:  # with a bias, the fused kernel needs widths that are multiples of 8
        q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=1 / attn.tau)
    return o[..., :R]


def describe_attention(model: Any, device: torch.device, dtype: torch.dtype,
                   compiled: bool = False) -> str:
    """Describe in words how the model attends to whole sequences on this device."""
    attn = model.blocks[0].attn
    impl = impl_for(attn, device, dtype, compiled=compiled)
    description = f'{impl} attention'
    if attn.impl not in ('auto', impl):
        description += f' ({attn.impl} cannot run this model here)'
    return description + ('; the first step compiles, which takes a while' if compiled else '')

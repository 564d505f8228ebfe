"""
Llama and Causal Energy Minimization (CEM, arXiv 2605.07588) in one file.

A Transformer layer as descent on two conditional energies. Attention steps down the interaction energy (Eq. 2), the MLP
down the element-wise energy (Eq. 7); the gradients are attention with W_V = W_K, W_O = W_Q and a gated MLP with W_d = V^T.
Both sublayers here are one class each, where 'llama' (untied weights) or 'cem' (tied) is a flag:

    h = norm(x)                       the context, fixed: keys = values = W_K h, gamma = W h
    for t in range(T):                T = attn_steps or mlp_steps
        x = x + eta * P * update(norm(x) | h)

Notable: preconditioners P are folded into the output weight, never applied to activations; rotary positions are exact for
CEM; `energy(u, h)` of every CEM sublayer; decoding caches D_h numbers a token and layer, half of Llama's.

Shapes: B batch, I new positions, J positions attended to, D = D_h model width, K heads, R = D_r = D / K.
"""
import importlib.util
import math
import os
import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.special import spence
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# The paper's Table 1 (vocabulary 32,000). 256m is ours: the paper names it and gives no shape, only that its CEM model has
# two layers more. mini is for a laptop; nano and micro are reproduce.py's, for hundreds of runs on one.
# All have 8 heads or more: ALiBi's slopes begin at 2^(-8/K).
SIZES: dict[str, dict[str, int]] = {
    'nano': dict(d_model=32, n_layer=2, n_head=8, d_mlp=86),
    'micro': dict(d_model=48, n_layer=2, n_head=8, d_mlp=128),
    'mini': dict(d_model=64, n_layer=3, n_head=8, d_mlp=172),
    '86m': dict(d_model=672, n_layer=8, n_head=8, d_mlp=1792),
    '108m': dict(d_model=672, n_layer=12, n_head=12, d_mlp=1792),
    '134m': dict(d_model=768, n_layer=12, n_head=12, d_mlp=2048),
    '162m': dict(d_model=864, n_layer=12, n_head=12, d_mlp=2304),
    '256m': dict(d_model=1056, n_layer=14, n_head=12, d_mlp=2816),
}

LOGITS_AT_ONCE = 2 ** 26  # the loss of more logits than this is taken a few rows at a time
HAS_TRITON = importlib.util.find_spec('triton') is not None


@dataclass
class ModelConfig:
    """The architecture. None means: what the comment says, resolved on construction."""
    size: Literal['nano', 'micro', 'mini', '86m', '108m', '134m', '162m', '256m'] = 'mini'  # preset for the next four
    d_model: int | None = None  # D_h; default: the size's
    n_layer: int | None = None  # default: the size's
    n_head: int | None = None  # K; default: the size's
    d_mlp: int | None = None  # MLP width of the Llama model; default: the size's
    extra_layers: int | None = None  # layers beyond n_layer; default: 2 for an all-CEM 256m (paper, appendix), else 0
    vocab_size: int = 32_000  # train.py takes it from the data
    context_length: int = 2048  # J, tokens
    attn: Literal['llama', 'cem'] = 'cem'  # attention: untied weights, or the gradient of the interaction energy
    mlp: Literal['llama', 'cem'] = 'cem'  # MLP: untied weights, or the gradient of the element-wise energy
    attn_steps: int = 2  # T_eps; a Llama sublayer with more than 1 is the paper's plain layer reuse
    mlp_steps: int = 2  # T_xi
    attn_step_size: float = 1.0  # eta_eps
    mlp_step_size: float = 1.0  # eta_xi
    positions: Literal['alibi', 'rope'] | None = None  # default: rope for Llama attention, alibi for CEM
    kq_diag: Literal['none', 'shared', 'per_head'] | None = None  # d_k in A_k = diag(d_k) + W_Q^T W_K; default: shared
    kq_diag_init: float = 0.0  # where d_k starts
    score_scale: Literal['head', 'model'] | None = None  # tau = sqrt(D_r) or sqrt(D_h); default: model for CEM, as Algorithm 1
    preconditioner: Literal['none', 'diag', 'diag_lowrank'] | None = None  # P_k and P_mlp; default: diag_lowrank
    attn_rank: int = 4  # rank of each head's low-rank preconditioner
    mlp_rank: int = 16  # rank of the MLP's
    residual: Literal['normed', 'raw'] | None = None  # x starts at norm(x), as Algorithm 1, or at x; default: normed
    exact_update: bool = False  # add the part of the gradient that Algorithm 1 leaves out: sum_j alpha_ijk d_k * h_j
    mlp_energy: Literal['gated', 'sign_convex'] | None = None  # Eq. 7, or the Hopfield appendix's; default: gated
    mlp_match: Literal['dims', 'params'] | None = None  # CEM MLP as wide as Llama's, or with as many weights; default: dims
    init_std: float | None = None  # weights start from N(0, init_std); default: 0.02 sqrt(768 / D_h)
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # RMSNorm's epsilon
    attn_impl: Literal['auto', 'math', 'sdpa', 'rows', 'triton'] = 'auto'  # readable softmax, torch's, or kernels.py's two

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f'size={self.size}: expected one of {", ".join(SIZES)}')
        for name, value in SIZES[self.size].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        all_cem = self.attn == self.mlp == 'cem'
        if self.extra_layers is None:
            self.extra_layers = 2 if self.size == '256m' and all_cem else 0
        if self.positions is None:
            self.positions = 'alibi' if self.attn == 'cem' else 'rope'
        # Options of CEM sublayers: the default where there is one to act on, else neutral; asking for more is an error.
        either = 'cem' if 'cem' in (self.attn, self.mlp) else 'llama'
        for name, kind, flag, default, neutral in (
                ('kq_diag', self.attn, 'attn', 'shared', 'none'),
                ('score_scale', self.attn, 'attn', 'model', 'head'),
                ('exact_update', self.attn, 'attn', False, False),
                ('mlp_energy', self.mlp, 'mlp', 'gated', 'gated'),
                ('mlp_match', self.mlp, 'mlp', 'dims', 'dims'),
                ('preconditioner', either, 'attn or mlp', 'diag_lowrank', 'none'),
                ('residual', either, 'attn or mlp', 'normed', 'raw')):
            if getattr(self, name) is None:
                setattr(self, name, default if kind == 'cem' else neutral)
            elif kind != 'cem' and getattr(self, name) != neutral:
                raise ValueError(f'{name}={getattr(self, name)} acts on CEM sublayers only: set {flag}=cem')
        for name in ('d_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'context_length', 'attn_steps', 'mlp_steps',
                     'attn_rank', 'mlp_rank'):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise ValueError(f'{name}={getattr(self, name)}: expected 1 to 1,000,000')
        if not 0 <= self.extra_layers <= 1_000_000:
            raise ValueError(f'extra_layers={self.extra_layers}: expected 0 to 1,000,000')
        if self.d_model % self.n_head:
            raise ValueError(f'd_model={self.d_model} is not a multiple of n_head={self.n_head}')
        if self.positions == 'rope' and self.d_model // self.n_head % 2:
            raise ValueError(f'positions=rope turns pairs of features: d_model / n_head = {self.d_model // self.n_head} is odd')
        if self.exact_update and self.kq_diag == 'none':
            raise ValueError('exact_update adds a term of the kq diagonal: set kq_diag=shared or per_head')
        if self.attn_impl not in ('auto', 'math') and self.exact_update:
            raise ValueError('exact_update needs the attention weights themselves: set attn_impl=auto or math')
        if self.init_std is None:
            self.init_std = 0.02 * math.sqrt(768 / self.d_model)
        for name in ('init_std', 'rope_theta', 'norm_eps'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name}={getattr(self, name)}: expected above 0')

    def llama(self) -> 'ModelConfig':
        """The Llama counterpart, whose parameter count sets the token budget."""
        names = ('size', 'd_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'context_length')
        positions = 'alibi' if self.d_model // self.n_head % 2 else 'rope'  # rope needs an even head width
        return ModelConfig(**{n: getattr(self, n) for n in names}, positions=positions, attn='llama', mlp='llama',
                           attn_steps=1, mlp_steps=1)


class RMSNorm(nn.Module):
    """u = x / rms(x) * gain over the last dimension."""
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, self.eps)


class Preconditioner(nn.Module):
    """n matrices P = diag(softplus(d)) + U V^T + V U^T of shape (D, D) (Eq. 13), with d = sqrt(D) p; never formed."""
    def __init__(self, n: int, dim: int, rank: int):
        super().__init__()
        self.p = nn.Parameter(torch.full((n, dim), dim ** -0.5))  # d starts at 1
        self.U = nn.Parameter(torch.empty(n, dim, rank)) if rank else None  # N(0, 0.02)
        self.V = nn.Parameter(torch.zeros(n, dim, rank)) if rank else None

    def forward(self, rows: Tensor) -> Tensor:
        """Each row times its P: (..., n, m, D) -> (..., n, m, D)."""
        out = rows * F.softplus(self.p * self.p.shape[1] ** 0.5)[:, None]
        if self.U is not None:
            out = out + (rows @ self.U) @ self.V.mT + (rows @ self.V) @ self.U.mT
        return out


def preconditioner(cfg: ModelConfig, n: int, rank: int) -> nn.Module:
    if cfg.preconditioner == 'none':
        return nn.Identity()
    return Preconditioner(n, cfg.d_model, rank if cfg.preconditioner == 'diag_lowrank' else 0)


def as_multiplied(x: Tensor) -> Tensor:
    """x in the precision of autocast's matrix products, where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Cache:
    """What decoding keeps of the past: named buffers of shape (B, max_length, features), filled up to `length`; and output
    weights with their preconditioners folded in, the same for every token."""
    def __init__(self, max_length: int):
        self.max_length, self.length, self.buffers, self.weights = max_length, 0, {}, {}

    def append(self, name: Any, new: Tensor) -> Tensor:
        """Store `new` (B, I, features) behind the past and return past and new, (B, length + I, features)."""
        new = as_multiplied(new)
        B, I, features = new.shape
        if name not in self.buffers:
            self.buffers[name] = new.new_empty(B, self.max_length, features)
        self.buffers[name][:, self.length:self.length + I] = new
        return self.buffers[name][:, :self.length + I]

    def output_weight(self, sublayer: 'Attention | MLP') -> Tensor:
        if sublayer not in self.weights:
            self.weights[sublayer] = as_multiplied(sublayer.output_weight())
        return self.weights[sublayer]

    def floats_per_token(self) -> int:
        return sum(buffer.shape[-1] for buffer in self.buffers.values())


class Positions(NamedTuple):
    """Where the new tokens stand, for all layers of a forward pass."""
    distance: Tensor  # |i - j|, (I, J)
    mask: Tensor  # 0 where j <= i, -inf elsewhere, (I, J)
    cos: Tensor  # the rotary tables, (I, R / 2)
    sin: Tensor


def positions(cfg: ModelConfig, I: int, past: int = 0, device: torch.device | str = 'cpu',
              dtype: torch.dtype = torch.float32) -> Positions:
    """Positions of I tokens behind `past` cached ones."""
    dtype = torch.promote_types(dtype, torch.float32)
    i, j = torch.arange(past, past + I, device=device), torch.arange(past + I, device=device)
    mask = torch.zeros(I, past + I, device=device, dtype=dtype).masked_fill_(j > i[:, None], -torch.inf)
    R = cfg.d_model // cfg.n_head
    angle = i[:, None] * cfg.rope_theta ** (-torch.arange(0, R, 2, device=device, dtype=dtype) / R)
    return Positions((i[:, None] - j).abs(), mask, angle.cos(), angle.sin())


def rotate(x: Tensor, pos: Positions, inverse: bool = False) -> Tensor:
    """R(i) x for every position i, or R(i)^T x: x (B, K, I, R); feature r turns with r + R / 2, as in Hugging Face's Llama."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = pos.cos, -pos.sin if inverse else pos.sin
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Context(NamedTuple):
    """What every step of an attention layer's recursion shares."""
    pos: Positions
    h: Tensor  # (B, J, D)
    k: Tensor | None  # (B, K, J, R); None where decoding reads h alone
    v: Tensor | None
    path: str  # math, sdpa, rows or triton
    bias: Tensor | None  # causal mask, ALiBi, self and cross bias: (I, J) or (K, I, J); None on kernels.py's paths


def runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels.py's Triton takes such tensors: on a GPU, or under its interpreter, which knows no bfloat16."""
    if os.environ.get('TRITON_INTERPRET') == '1':
        return HAS_TRITON and device.type == 'cpu' and dtype in (torch.float16, torch.float32)
    return HAS_TRITON and device.type == 'cuda' and dtype in (torch.float16, torch.bfloat16)


def runs_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels.py takes such tensors a few rows at a time."""
    return device.type == 'cpu' and dtype in (torch.float32, torch.float64)


class Attention(nn.Module):
    """Multi-head attention with its residual, x (B, I, D) -> (B, I, D): Llama's, or T steps down the interaction energy."""
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        D, K = cfg.d_model, cfg.n_head
        self.cfg, self.layer, self.cem = cfg, layer, cfg.attn == 'cem'
        self.rope, self.diag = cfg.positions == 'rope', cfg.kq_diag != 'none'
        self.steps, self.eta = cfg.attn_steps, cfg.attn_step_size
        self.tau = math.sqrt(D // K if cfg.score_scale == 'head' else D)
        self.norm = RMSNorm(D, cfg.norm_eps)
        self.W_Q = nn.Parameter(torch.empty(D, D))  # W_k^Q are its K blocks of R rows
        self.W_K = nn.Parameter(torch.empty(D, D))
        if self.cem:
            self.P = preconditioner(cfg, K, cfg.attn_rank)
        else:
            self.W_V = nn.Parameter(torch.empty(D, D))
            self.W_O = nn.Parameter(torch.empty(D, D))  # in W_Q's shape: the paper's orientation
        if self.diag:
            self.kq_diag = nn.Parameter(torch.full((K if cfg.kq_diag == 'per_head' else 1, D), cfg.kq_diag_init))
        if not self.rope:
            self.b_self, self.b_cross = nn.Parameter(torch.zeros(K)), nn.Parameter(torch.zeros(K))

    def forward(self, x: Tensor, pos: Positions, cache: Cache | None = None) -> Tensor:
        h = u = self.norm(x)
        context, W_out = self.context(h, pos, cache), (cache.output_weight(self) if cache else self.output_weight())
        if self.cem and self.cfg.residual == 'normed':
            x, u = h, self.norm(h)
        for t in range(self.steps):
            if t > 0:
                u = self.norm(x)
            if t > 0 and not self.cem:
                context = self.context(u, pos, cache, t)  # plain layer reuse: the whole sublayer again
            x = x + self.eta * self.update(u, context, W_out)
        return x

    def context(self, h: Tensor, pos: Positions, cache: Cache | None = None, t: int = 0) -> Context:
        """Keys and values of h (B, I, D), behind the cached past: values are keys for CEM, rotated ones with rope."""
        absorb = cache is not None and cache.length > 0 and self.diag and not self.rope  # W_K goes into query and output
        k = None if absorb else self.heads(F.linear(h, self.W_K))  # (B, K, I, R)
        v = None if self.cem else self.heads(F.linear(h, self.W_V))
        if self.rope:
            k = rotate(k, pos)
        if cache is not None:  # keys for CEM, h where a diagonal needs it; rope needs both then, like Llama's k and v
            if self.rope or not self.diag:
                k = self.heads(cache.append((self.layer, t, 'k'), self.merge(k)))
            if self.diag:
                h = cache.append((self.layer, t, 'h'), h)
            if not self.cem:
                v = self.heads(cache.append((self.layer, t, 'v'), self.merge(v)))
        if absorb:
            return Context(pos, h, None, None, 'math', self.bias(pos))
        path = self.path(k.device, k.dtype, whole=k.shape[2] == len(pos.mask))
        return Context(pos, h, k, k if self.cem else v, path, None if path in ('rows', 'triton') else self.bias(pos))

    def path(self, device: torch.device, dtype: torch.dtype, whole: bool = True) -> str:
        """What computes the attention: math, the readable path; sdpa, torch's fused attention; rows or triton, kernels.py on
        a CPU or a GPU. Only math gives weights away, or has second and forward-mode derivatives. kernels.py is for values that
        are keys, a bias, and whole sequences; on a CPU sdpa has no fused backward pass for a bias, and a short context's scores
        fit the cache as they are."""
        impl, biased = self.cfg.attn_impl, self.diag or not self.rope
        if impl == 'math' or self.cfg.exact_update:
            return 'math'
        if impl != 'sdpa' and self.cem and biased and whole:
            narrow = self.cfg.d_model <= 128 * self.cfg.n_head
            if narrow and runs_triton(device, dtype) and (impl == 'triton' or device.type == 'cuda'):
                return 'triton'
            if runs_rows(device, dtype) and (impl == 'rows' or self.cfg.context_length > 64):
                return 'rows'
        return 'sdpa' if impl == 'sdpa' or device.type == 'cuda' or not biased else 'math'

    def bias(self, pos: Positions) -> Tensor:
        """b_ijk = -m_k |i - j| + b_self [i = j] + b_cross [i != j], or 0 with rope; -inf where j > i: (K, I, J) or (I, J)."""
        if self.rope:
            return pos.mask
        K = self.cfg.n_head
        m = 2.0 ** (-8 / K * torch.arange(1, K + 1, device=pos.mask.device, dtype=pos.mask.dtype))
        b_self, b_cross, m = (b[:, None, None] for b in (self.b_self, self.b_cross, m))
        return pos.mask + torch.where(pos.distance == 0, b_self, b_cross) - m * pos.distance

    def output_weight(self) -> Tensor:
        """K blocks (R, D): W_k^Q P_k, so that o_k through them gives sum_k P_k W_k^Q^T o_k (Eq. 14)."""
        return self.P(self.per_head(self.W_Q)).flatten(0, 1) if self.cem else self.W_O

    def update(self, u: Tensor, context: Context, W_out: Tensor) -> Tensor:
        """sum_k P_k W_k^Q^T sum_j alpha_ijk v_j: u (B, I, D) -> (B, I, D)."""
        q, alpha = self.query(u, context), None  # (B, K, I, R)
        if context.path != 'math':
            o = self.by_sdpa(q, u, context) if context.path == 'sdpa' else self.by_kernels(q, u, context)
        else:
            alpha = self.scores(q, u, context).softmax(dim=-1)  # (B, K, I, J)
            o = alpha @ context.v if context.k is not None else alpha @ context.h[:, None] @ self.per_head(self.W_K).mT
        if self.cem and self.rope:
            o = rotate(o, context.pos, inverse=True)  # R(i)^T sum_j alpha_ijk R(j) W_K h_j
        dx = self.merge(o) @ W_out
        if self.cfg.exact_update:  # sum_k P_k (d_k * sum_j alpha_ijk h_j)
            dx = dx + self.P(self.kq_diag[:, None] * (alpha @ context.h[:, None])).sum(dim=1)
        return dx

    def by_sdpa(self, q: Tensor, u: Tensor, context: Context) -> Tensor:
        """sum_j alpha_ijk v_j by torch's fused attention: (B, K, I, R)."""
        (_, _, I, R), k, v = q.shape, context.k, context.v
        if self.rope and not self.diag and I in (1, k.shape[2]):  # no bias but causality
            return F.scaled_dot_product_attention(q, k, v, scale=1 / self.tau, is_causal=I > 1)
        if pad := -R % 8:  # with a bias, the fused kernel takes widths in steps of 8
            q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, self.score_bias(u, context).to(q.dtype), scale=1 / self.tau)[..., :R]

    def by_kernels(self, q: Tensor, u: Tensor, context: Context) -> Tensor:
        """The same by kernels.py."""
        import nanocem.triton_attention as kernels
        du = self.diagonal_query(u) if self.diag else None
        b = None if self.rope else self.b_self - self.b_cross  # softmax sees no more of the two
        return self.heads(kernels.attention(self.merge(q), self.merge(context.k), self.cfg.n_head, 1 / self.tau, du,
                                            context.h if self.diag else None, b, context.path == 'triton'))

    def query(self, u: Tensor, context: Context) -> Tensor:
        q = self.heads(F.linear(u, self.W_Q))
        return rotate(q, context.pos) if self.rope else q  # (B, K, I, R)

    def scores(self, q: Tensor, u: Tensor, context: Context) -> Tensor:
        """s_ijk = (k_j . q_i + h_j . (d_k * u_i)) / tau + b_ijk, -inf where j > i: (B, K, I, J)."""
        if context.k is None:  # k_j . q_i = h_j . (W_K^T q_i)
            return q / self.tau @ self.per_head(self.W_K) @ context.h[:, None].mT + self.score_bias(u, context)
        return q / self.tau @ context.k.mT + self.score_bias(u, context)

    def score_bias(self, u: Tensor, context: Context) -> Tensor:
        """All of the scores but k . q: broadcasts to (B, K, I, J)."""
        if not self.diag:
            return context.bias
        return self.diagonal_query(u) @ context.h[:, None].mT + context.bias

    def diagonal_query(self, u: Tensor) -> Tensor:
        """d_k * u / tau: (B, n, I, D); n = 1 if shared: one product with h for all heads."""
        return u[:, None] * (self.kq_diag[:, None] / self.tau)

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """eps(u_i | h_1..i) = -tau sum_k log sum_j exp(s_ijk) (Eq. 2, with the biases): u, h (B, J, D) -> (B, J).
        Minus its gradient in u is the update if P is the identity and the diagonal is none or exact_update is on."""
        if not self.cem:
            raise ValueError('a Llama sublayer has no energy: its weights are not tied; set attn=cem')
        pos = positions(self.cfg, h.shape[1], 0, h.device, h.dtype)
        context = self.context(h, pos)._replace(bias=self.bias(pos))
        return -self.tau * self.scores(self.query(u, context), u, context).logsumexp(dim=-1).sum(dim=1)

    def per_head(self, W: Tensor) -> Tensor:
        return W.unflatten(0, (self.cfg.n_head, -1))  # (D, D) -> (K, R, D)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.cfg.n_head, -1)).transpose(1, 2)  # (B, J, D) -> (B, K, J, R)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(-2)  # (B, K, J, R) -> (B, J, D)


class Phi(torch.autograd.Function):
    """phi(z), the integral of SiLU from -inf to z: z softplus(z) + Li2(-e^z), elementwise; SiLU is its derivative."""
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        a = z.detach().double().cpu().numpy()
        dilog = spence(1 + np.exp(-abs(a)))  # Li2(-e^a); where a > 0 by its inversion, so that nothing overflows
        dilog = np.where(a > 0, -math.pi ** 2 / 6 - a ** 2 / 2 - dilog, dilog)
        return torch.as_tensor(a * np.logaddexp(0, a) + dilog).to(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * F.silu(ctx.saved_tensors[0])


class MLP(nn.Module):
    """Gated MLP with its residual, x (B, J, D) -> (B, J, D): Llama's, or T steps down the element-wise energy."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg, self.cem = cfg, cfg.mlp == 'cem'
        self.steps, self.eta = cfg.mlp_steps, cfg.mlp_step_size
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        width = cfg.d_mlp * 3 // 2 if cfg.mlp_match == 'params' else cfg.d_mlp  # two matrices instead of three
        self.W = nn.Parameter(torch.empty(width, cfg.d_model))  # the gate gamma: Hugging Face's up_proj
        self.V = nn.Parameter(torch.empty(width, cfg.d_model))  # inside SiLU: Hugging Face's gate_proj
        if self.cem:
            self.P = preconditioner(cfg, 1, cfg.mlp_rank)
        else:
            self.W_d = nn.Parameter(torch.empty(width, cfg.d_model))  # in V's shape

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        h = u = self.norm(x)
        gamma, W_out = F.linear(h, self.W), (cache.output_weight(self) if cache else self.output_weight())
        if self.cem and self.cfg.residual == 'normed':
            x, u = h, self.norm(h)
        for t in range(self.steps):
            if t > 0:
                u = self.norm(x)
            if t > 0 and not self.cem:
                gamma = F.linear(u, self.W)  # plain layer reuse
            x = x + self.eta * self.update(u, gamma, W_out)
        return x

    def output_weight(self) -> Tensor:
        """(D_v, D): V P, so that P V^T g is g through it."""
        return self.P(self.V[None])[0] if self.cem else self.W_d

    def update(self, u: Tensor, gamma: Tensor, W_out: Tensor) -> Tensor:
        """P V^T (gamma * phi'(V u)), phi' = SiLU (Eq. 15): u (B, J, D), gamma (B, J, D_v) -> (B, J, D)."""
        return gamma * F.silu(self.signed(F.linear(u, self.V), gamma)) @ W_out

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """xi(u | h) = -gamma . phi(V u), gamma = W h (Eq. 7), or sign-convex -|gamma| . phi(sign(gamma) * V u):
        u, h (B, J, D) -> (B, J). Minus its gradient in u is the update if P is the identity."""
        if not self.cem:
            raise ValueError('a Llama sublayer has no energy: its weights are not tied; set mlp=cem')
        gamma = F.linear(h, self.W)
        return -(self.signed(gamma, gamma) * Phi.apply(self.signed(F.linear(u, self.V), gamma))).sum(dim=-1)

    def signed(self, z: Tensor, gamma: Tensor) -> Tensor:
        """z, or for the sign-convex energy sign(gamma) * z, the sign's gradient straight through. (Convex as far as phi is:
        SiLU falls below -1.28.)"""
        return z * (gamma + (gamma.sign() - gamma).detach()) if self.cfg.mlp_energy == 'sign_convex' else z


class Block(nn.Module):
    """One layer: a step of attention, a step of the MLP (Algorithm 1, Main Block)."""
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.attn, self.mlp = Attention(cfg, layer), MLP(cfg)

    def forward(self, x: Tensor, pos: Positions, cache: Cache | None = None) -> Tensor:
        return self.mlp(self.attn(x, pos, cache), cache)


def at_least_float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the logits x W^T against targets, x (N, D), W (V, D), targets (N,), a few rows at a time: no
    (N, V) tensor exists. With `learn`, gradients are made along the way, where the logits are at hand."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, targets: Tensor, learn: bool) -> Tensor:
        loss, dx, dW = 0, [], torch.zeros_like(W) if learn else None
        rows = max(1, LOGITS_AT_ONCE // len(W))
        for x_n, target in zip(x.split(rows), targets[:, None].split(rows), strict=True):
            logits = F.linear(x_n, W)
            log_p = at_least_float(logits).log_softmax(dim=-1)
            loss = loss - log_p.gather(-1, target).sum()
            if learn:
                d = log_p.exp_().scatter_add_(-1, target, -torch.ones_like(log_p[:, :1])).to(logits.dtype)  # p - one-hot
                dx.append((d @ W).to(x.dtype))
                dW += d.mT @ x_n
        if learn:
            ctx.save_for_backward(torch.cat(dx), dW)
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dW = ctx.saved_tensors
        grad = grad / len(dx)
        return grad * dx, grad * dW, None, None


class Transformer(nn.Module):
    """A causal language model: embedding, blocks, norm, untied head."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg, self.activation_checkpointing = cfg, False
        self.embedding = nn.Parameter(torch.empty(cfg.vocab_size, cfg.d_model))
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer + cfg.extra_layers))
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.head = nn.Parameter(torch.empty(cfg.vocab_size, cfg.d_model))
        self.init_weights()

    def init_weights(self) -> None:
        """Every scale that is not a constant: weights N(0, init_std), the preconditioners' U N(0, 0.02)."""
        for name, p in self.named_parameters():
            if name.endswith('P.U'):
                nn.init.normal_(p, std=0.02)
            elif p.ndim == 2 and not name.endswith(('P.p', 'kq_diag')):
                nn.init.normal_(p, std=self.cfg.init_std)

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that weight decay acts on: all but norm gains, diagonals and biases."""
        return [p for n, p in self.named_parameters() if p.ndim >= 2 and not n.endswith(('P.p', 'kq_diag'))]

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: Cache | None = None) -> tuple[Tensor, Tensor | None]:
        """Token ids (B, J) -> logits (B, J, vocabulary) and None; with targets (B, J), None and their mean cross-entropy."""
        hidden = self.hidden(idx, cache)
        if targets is None:
            return F.linear(hidden, self.head), None
        if targets.numel() * len(self.head) > LOGITS_AT_ONCE:
            return None, LinearCrossEntropy.apply(hidden.flatten(0, 1), self.head, targets.flatten(), torch.is_grad_enabled())
        return None, F.cross_entropy(at_least_float(F.linear(hidden, self.head)).flatten(0, 1), targets.flatten())

    def hidden(self, idx: Tensor, cache: Cache | None = None) -> Tensor:
        """What the head reads: (B, I) -> (B, I, D). With a cache, idx are the tokens behind those it holds."""
        x = F.embedding(idx, self.embedding)
        pos = positions(self.cfg, idx.shape[1], cache.length if cache else 0, x.device, x.dtype)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, pos, use_reentrant=False)
            else:
                x = block(x, pos, cache)
        if cache is not None:
            cache.length += idx.shape[1]
        return self.norm(x)

    def attention_path(self, device: torch.device, dtype: torch.dtype) -> str:
        """Which path the attention of whole sequences takes there, in words."""
        path = self.blocks[0].attn.path(device, dtype)
        words = {'math': 'by readable softmax', 'sdpa': "by torch's fused kernel", 'triton': "by kernels.py's Triton",
                 'rows': 'by kernels.py, a few rows at a time'}[path]
        needs = {'triton': 'Triton, a GPU, bfloat16', 'rows': 'a CPU, no bfloat16'}
        if (impl := self.cfg.attn_impl) in needs and impl != path:
            words += f' (attn_impl={impl} needs {needs[impl]}, and CEM attention with a bias)'
        return f'attention {words}'

    def set_steps(self, attn_steps: int | None = None, mlp_steps: int | None = None) -> None:
        """Change T after training; None leaves it. ValueError below 1."""
        for name, steps in (('attn', attn_steps), ('mlp', mlp_steps)):
            if steps is not None and steps < 1:
                raise ValueError(f'{name}_steps={steps}: expected at least 1')
            for block in self.blocks:
                sublayer = getattr(block, name)
                sublayer.steps = steps or sublayer.steps

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 generator: torch.Generator | None = None, use_cache: bool = True) -> Tensor:
        """Continue idx (B, J) by max_new_tokens: (B, J + max_new_tokens). Temperature 0 takes the likeliest token.
        When the context is full, it starts again from the last half of it."""
        length, cache, start = self.cfg.context_length, None, max(0, idx.shape[1] - self.cfg.context_length)
        for _ in range(max_new_tokens):
            if idx.shape[1] - start > length:
                start, cache = idx.shape[1] - max(1, length // 2), None
            if use_cache and cache is None:
                cache = Cache(length)
            hidden = self.hidden(idx[:, start + (cache.length if cache else 0):], cache)
            logits = F.linear(hidden[:, -1], self.head).float()  # (B, vocabulary)
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -torch.inf)
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            idx = torch.cat([idx, new], dim=1)
        return idx

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, training: bool = True) -> float:
        """FLOPs of a token at full context: 2 a multiply-add of every product with tokens in it (projections, scores,
        weighted values, the diagonal's scores, the head), T steps of them, half of them masked away in attention; a
        training step counts its backward pass as two forward ones. Not counted: elementwise work, the folding of P."""
        cfg, D, avg = self.cfg, self.cfg.d_model, (self.cfg.context_length + 1) / 2  # avg: positions attended to
        macs = cfg.vocab_size * D
        for block in self.blocks:
            attn, mlp = block.attn, block.mlp
            if attn.cem:
                step = 2 * D * D + 2 * avg * D + (len(attn.kq_diag) * avg * D if attn.diag else 0)
                if cfg.exact_update:
                    rank = cfg.attn_rank if cfg.preconditioner == 'diag_lowrank' else 0
                    step += cfg.n_head * (avg * D + 4 * rank * D)
                macs += D * D + attn.steps * step
            else:
                macs += attn.steps * (4 * D * D + 2 * avg * D)
            macs += mlp.W.numel() * (1 + 2 * mlp.steps if mlp.cem else 3 * mlp.steps)
        return 2.0 * macs * (3 if training else 1)

    def estimate_mfu(self, tokens_per_second: float, peak_flops: float) -> float:
        """Model FLOPs utilisation of training: the rate at which counted FLOPs were done over `peak_flops` a second."""
        return self.flops_per_token() * tokens_per_second / peak_flops

    @classmethod
    def from_hf(cls, source: Any, n_head: int | None = None) -> 'Transformer':
        """A Hugging Face Llama (a LlamaForCausalLM, or its state dict and n_head) as a Transformer of float32 weights with
        the same logits. ValueError where our baseline has no such part (scaled rope, biases, another activation)."""
        state = source if isinstance(source, dict) else source.state_dict()
        config = getattr(source, 'config', None)
        n_head = n_head or getattr(config, 'num_attention_heads', None)
        if n_head is None:
            raise ValueError('a state dict does not tell the number of heads: from_hf(state_dict, n_head=...)')
        rope = getattr(config, 'rope_parameters', None) or {}
        if rope.get('rope_type', 'default') != 'default' or getattr(config, 'hidden_act', 'silu') != 'silu':
            raise ValueError(f'only plain rope and SiLU: rope {rope}, activation {getattr(config, "hidden_act", None)}')
        if biases := [name for name in state if name.endswith('bias')]:
            raise ValueError(f'only Llamas without biases: {biases[0]}')
        vocab_size, D = state['model.embed_tokens.weight'].shape
        R = getattr(config, 'head_dim', None) or D // n_head
        if R * n_head != D:
            raise ValueError(f'head_dim {R} x {n_head} heads is not the width {D}')
        n_layer = 1 + max(int(name.split('.')[2]) for name in state if name.startswith('model.layers.'))
        model = cls(ModelConfig(
            attn='llama', mlp='llama', attn_steps=1, mlp_steps=1, d_model=D, n_layer=n_layer, n_head=n_head,
            d_mlp=len(state['model.layers.0.mlp.up_proj.weight']), vocab_size=vocab_size,
            context_length=getattr(config, 'max_position_embeddings', 2048),
            rope_theta=rope.get('rope_theta') or getattr(config, 'rope_theta', None) or 10_000.0,
            norm_eps=getattr(config, 'rms_norm_eps', 1e-5)))
        ours = {'embedding': 'model.embed_tokens', 'norm.gain': 'model.norm', 'head': 'lm_head'}
        if 'lm_head.weight' not in state:
            ours['head'] = 'model.embed_tokens'  # tied
        for i in range(n_layer):
            for name, theirs in (('attn.norm.gain', 'input_layernorm'), ('attn.W_Q', 'self_attn.q_proj'),
                                 ('attn.W_K', 'self_attn.k_proj'), ('attn.W_V', 'self_attn.v_proj'),
                                 ('attn.W_O', 'self_attn.o_proj'), ('mlp.norm.gain', 'post_attention_layernorm'),
                                 ('mlp.W', 'mlp.up_proj'), ('mlp.V', 'mlp.gate_proj'), ('mlp.W_d', 'mlp.down_proj')):
                ours[f'blocks.{i}.{name}'] = f'model.layers.{i}.{theirs}'
        weights = {}
        for name, theirs in ours.items():
            w = state[theirs + '.weight']
            if name.endswith(('W_O', 'W_d')):
                w = w.T
            if name.endswith(('W_K', 'W_V')) and len(w) < D:  # grouped queries: a head's own copy of its group's rows
                w = w.unflatten(0, (-1, R)).repeat_interleave(D // len(w), dim=0).flatten(0, 1)
            weights[name] = w
        model.load_state_dict(weights)
        return model


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second that `device` can do: the data sheet's dense bf16 figure where it is known, else what the fastest of
    some matrix products reaches."""
    if device.type == 'cuda' and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, flops in (('A100', 312e12), ('H100', 989e12), ('H200', 989e12), ('B200', 2250e12)):
            if known in name:
                return flops
    n = 1024 if device.type == 'cpu' else 8192
    a, best = torch.randn(n, n, device=device, dtype=dtype), math.inf
    for _ in range(40):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n ** 3 / best

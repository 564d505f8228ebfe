"""
Llama and Causal Energy Minimization (CEM, arXiv 2605.07588): all layers in one file.

A CEM layer is gradient descent on two energies. Attention takes T steps down the interaction
energy (Eq. 2), the MLP takes T steps down the element-wise energy (Eq. 7). Both have this form:

    h = norm(x)                            the fixed context: keys = values = W_K h, gate = W h
    for t in range(T):
        u = norm(x)
        x = x + eta P update(u | h)        update = minus the energy's gradient with respect to u

energy.py has these energies, and lets autograd take the gradient; here it is written out. P and
the key-query diagonal d_k of Eq. 12 are options of the paper. Algorithm 1 leaves out the gradient
of the diagonal's part of the energy, and exact_update=True adds it.

Read LlamaAttention beside CEMAttention, and LlamaMLP beside CEMMLP: their difference is the paper.
Comments at the ends of lines are the formulas of Algorithm 1. Its steps are added to norm(x), which
diverged at the paper's width, so by default we add them to x. RoPE is not in it: its lines begin
with "rope:". docs/paper.md lists our choices where the paper is silent. nanocem/attention.py
computes the same attention faster.

Shapes: B batch, I new and J attended positions (I < J in decoding), D = D_h the model's width,
K heads of width R = D_r = D / K, D_v the MLP's width. A subscript k is a head; k_j is a key.
"""
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from configurator import check, convert_types, in_range, only_with, resolve_defaults
from energy import Phi
from nanocem.attention import attend, choose_impl
from nanocem.loss import cross_entropy

# 86m to 162m are the paper's (Table 1), the shape of 256m is our choice. CEM has 16 layers there,
# and the token budget of the Llama of 14: --size=256m --n_layer=16 --tokens=5.1B.
SIZES: dict[str, dict[str, int]] = {
    'nano': dict(d_model=32, n_layer=2, n_head=2, d_mlp=86),
    'mini': dict(d_model=64, n_layer=3, n_head=4, d_mlp=172),
    '86m': dict(d_model=672, n_layer=8, n_head=8, d_mlp=1792),
    '108m': dict(d_model=672, n_layer=12, n_head=12, d_mlp=1792),
    '134m': dict(d_model=768, n_layer=12, n_head=12, d_mlp=2048),
    '162m': dict(d_model=864, n_layer=12, n_head=12, d_mlp=2304),
    '256m': dict(d_model=1056, n_layer=14, n_head=12, d_mlp=2816),
}

NORM_EPS = 1e-5  # added to the mean square in RMSNorm
EMBEDDING_STD = 1.0  # standard deviation of the initial token embedding


@dataclass
class ModelConfig:
    """Describe the architecture. A field that is None gets the default that its comment names.
    To change a field make a new ModelConfig: dataclasses.replace would keep derived defaults."""
    size: Literal[tuple(SIZES)] = '134m'  # preset of the next four options
    d_model: int | None = None  # D_h, width of the residual stream; default: the size's
    n_layer: int | None = None  # number of layers; default: the size's
    n_head: int | None = None  # K, number of attention heads; default: the size's
    d_mlp: int | None = None  # width of the Llama MLP; default: the size's
    vocab_size: int = 32_000  # in train.py the default is the data's
    context_length: int = 2048  # J, tokens
    attn: Literal['llama', 'cem'] = 'cem'  # attention: Llama's, or steps down an energy
    mlp: Literal['llama', 'cem'] = 'cem'  # MLP: Llama's, or steps down an energy
    tie: Literal['none', 'kv', 'qo', 'both'] = 'none'  # in Llama: kv, W_V = W_K; qo, W_O = W_Q
    attn_steps: int = 1  # T_eps, gradient steps of CEM attention on one context
    mlp_steps: int = 1  # T_xi, gradient steps of the CEM MLP on one context
    attn_reuse: int = 1  # apply each attention sublayer this often, with a fresh context each time
    mlp_reuse: int = 1  # apply each MLP sublayer this often, with a fresh context each time
    loops: int = 1  # apply the stack of all layers this often, as looped Transformers do
    attn_step_size: float | None = None  # eta_eps; default: 1 / attn_steps, or init_from's
    mlp_step_size: float | None = None  # eta_xi; default: 1 / mlp_steps, or init_from's
    positions: Literal['alibi', 'rope'] | None = None  # default: alibi for CEM attention, else rope
    kq_diag: Literal['none', 'shared', 'per_head'] = 'none'  # d_k, the key-query diagonal
    score_scale: Literal['head', 'model'] | None = None  # tau: sqrt(D_r), or CEM's sqrt(D_h)
    preconditioner: Literal['none', 'diag', 'diag_lowrank'] = 'none'  # P, symmetric and learned
    attn_rank: int = 4  # rank of P's low-rank part, in each attention head
    mlp_rank: int = 16  # rank of P's low-rank part, in the MLP
    residual: Literal['raw', 'normed'] = 'raw'  # start from x, or norm(x) as in Algorithm 1
    exact_update: bool = False  # add sum_j alpha_ijk d_k * h_j, which Algorithm 1 leaves out
    mlp_energy: Literal['gated', 'sign_convex'] = 'gated'  # Eq. 7, or the appendix's: convex phi
    mlp_match: Literal['dims', 'params'] = 'dims'  # match Llama's MLP in width or parameters
    init_std: float | None = None  # standard deviation of weights; default: 0.02 sqrt(768 / D_h)
    rope_theta: float = 10_000.0  # base of the rotary frequencies

    def __post_init__(self) -> None:
        """Resolve defaults and validate. UserError for a bad value, or CEM's options on Llama."""
        convert_types(self)
        in_range(self, 1, 10**6, 'd_model n_layer n_head d_mlp loops vocab_size context_length')
        in_range(self, 1, 10**6, 'attn_steps mlp_steps attn_rank mlp_rank attn_reuse mlp_reuse')
        in_range(self, 1e-30, 1e30, 'attn_step_size mlp_step_size init_std rope_theta')
        # Resolve defaults that depend on other options
        resolve_defaults(self, **SIZES[self.size])
        resolve_defaults(
            self, init_std=0.02 * math.sqrt(768 / self.d_model),
            attn_step_size=1 / self.attn_steps, mlp_step_size=1 / self.mlp_steps,
            positions='alibi' if self.attn == 'cem' else 'rope',
            score_scale='model' if self.attn == 'cem' else 'head')
        # Refuse options of another kind of layer
        if self.attn == 'cem':
            only_with(self, 'attn=llama', tie='none')
        else:
            only_with(self, 'attn=cem', attn_steps=1, attn_step_size=1.0, kq_diag='none',
                      score_scale='head', exact_update=False, attn_rank=ModelConfig.attn_rank)
        if self.mlp == 'llama':
            only_with(self, 'mlp=cem', mlp_steps=1, mlp_step_size=1.0, mlp_energy='gated',
                      mlp_match='dims', mlp_rank=ModelConfig.mlp_rank)
        if self.attn == self.mlp == 'llama':
            only_with(self, 'attn=cem or mlp=cem', preconditioner='none', residual='raw')
        if self.preconditioner != 'diag_lowrank':
            only_with(self, 'preconditioner=diag_lowrank', attn_rank=ModelConfig.attn_rank,
                      mlp_rank=ModelConfig.mlp_rank)
        if self.positions == 'alibi':
            only_with(self, 'positions=rope', rope_theta=ModelConfig.rope_theta)
        # Refuse options that contradict each other
        D, K = self.d_model, self.n_head
        check(D % K == 0, f'd_model={D} is not a multiple of n_head={K}')
        check(self.positions == 'alibi' or D // K % 2 == 0,
              f'positions=rope: d_model / n_head = {D // K} is odd, expected an even number')
        check(self.kq_diag != 'none' or not self.exact_update,
              'exact_update needs the diagonal: set kq_diag=shared or per_head')

    def llama(self) -> 'ModelConfig':
        """Return the Llama of the same shape. Its parameter count sets the token budget."""
        names = ('size', 'd_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'context_length')
        options = {name: getattr(self, name) for name in names}
        positions = 'alibi' if self.d_model // self.n_head % 2 else 'rope'  # RoPE: even widths
        return ModelConfig(**options, attn='llama', mlp='llama', positions=positions)


def normal_param(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=std))


class RMSNorm(nn.Module):
    """Algorithm 1's rms with a gain: x / sqrt(mean(x^2) + eps) * gain over the last dimension."""
    def __init__(self, dim: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, NORM_EPS)


class Preconditioner(nn.Module):
    """Apply n symmetric (D, D) matrices P = diag(softplus(d)) + U V^T + V U^T (Eq. 13). None is
    formed. The parameter is p = d / sqrt(D): an Adam step on p moves d sqrt(D) times as far."""
    def __init__(self, cfg: ModelConfig, n: int, rank: int):
        super().__init__()
        D = cfg.d_model
        self.p = self.U = None  # without them P is the identity
        if cfg.preconditioner != 'none':
            self.p = nn.Parameter(torch.full((n, D), D ** -0.5))  # d starts at 1, P at 1.31 I
        if cfg.preconditioner == 'diag_lowrank':
            self.U = normal_param(n, D, rank, std=0.02)
            self.V = nn.Parameter(torch.zeros(n, D, rank))

    def forward(self, rows: Tensor) -> Tensor:
        """Apply P to each row: (..., n, m, D) -> (..., n, m, D)."""
        out = rows
        if self.p is not None:
            d = self.p * self.p.shape[1] ** 0.5
            out = rows * F.softplus(d)[:, None]
        if self.U is not None:
            out = out + (rows @ self.U) @ self.V.mT + (rows @ self.V) @ self.U.mT
        return out


class Positions(NamedTuple):
    """Positions i of the queries and j of the keys, in the forms that attention needs."""
    distance: Tensor  # |i - j|, (I, J)
    mask: Tensor  # 0 where i may attend to j, -inf elsewhere: (I, J)
    cos: Tensor  # cosines of RoPE's angles, (I, R / 2)
    sin: Tensor  # their sines


def make_positions(cfg: ModelConfig, x: Tensor, past: int = 0) -> Positions:
    """Return the positions of x (B, I, D), which follows `past` cached tokens."""
    I, R = x.shape[1], cfg.d_model // cfg.n_head
    options = dict(device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    i = torch.arange(past, past + I, device=x.device)[:, None]
    j = torch.arange(past + I, device=x.device)
    mask = torch.zeros(I, past + I, **options).masked_fill_(j > i, -torch.inf)
    angle = i * cfg.rope_theta ** (-torch.arange(0, R, 2, **options) / R)
    return Positions((i - j).abs().type_as(mask), mask, angle.cos(), angle.sin())


def alibi_slopes(n_head: int, like: Tensor) -> Tensor:
    """Return ALiBi's slopes m_k, (K,): 2^-k, the paper's example; 2^(-8k/K) above 8 heads."""
    k = torch.arange(1, n_head + 1, dtype=like.dtype, device=like.device)
    return 2.0 ** (-8 / max(8, n_head) * k)


class BaseAttention(nn.Module):
    """What both kinds of attention share: norm, W_Q, W_K, heads and positions."""
    impl = 'auto'  # or readable, blockwise, sdpa, triton: see nanocem/attention.py

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D, K = cfg.d_model, cfg.n_head
        self.cfg, self.K = cfg, K
        # The temperature of the scores: sqrt(D_r) for Llama, sqrt(D_h) for CEM
        self.tau = math.sqrt(D // K if cfg.score_scale == 'head' else D)
        self.norm = RMSNorm(D)
        self.W_Q = normal_param(D, D, std=cfg.init_std)  # W_k^Q is its k-th block of R rows
        self.W_K = normal_param(D, D, std=cfg.init_std)
        if cfg.positions == 'alibi':  # learned biases of a token's own key and of all others
            self.b_self = nn.Parameter(torch.zeros(K))
            self.b_cross = nn.Parameter(torch.zeros(K))

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.K, -1)).transpose(1, 2)  # (B, I, D) -> (B, K, I, R)

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(-2)  # (B, K, I, R) -> (B, I, D)

    def rotate(self, x: Tensor, pos: Positions, inverse: bool = False) -> Tensor:
        """Rotate x (B, K, I, R) by RoPE's Rot(i) at each position i, or back by Rot(i)^T."""
        if self.cfg.positions == 'alibi':
            return x
        a, b = x.chunk(2, dim=-1)
        sin = -pos.sin if inverse else pos.sin
        return torch.cat([a * pos.cos - b * sin, b * pos.cos + a * sin], dim=-1).type_as(x)

    def scores(self, q: Tensor, k: Tensor, pos: Positions) -> Tensor:
        """Return a_ijk = k_j . q_i / tau + b_ijk, (B, K, I, J); -inf for keys after the query."""
        return q / self.tau @ k.mT + self.bias(pos)

    def bias(self, pos: Positions) -> Tensor:
        """Return b_ijk = -m_k |i - j| + (b_self_k if i = j else b_cross_k), (K, I, J); -inf where i
        may not attend to j. With RoPE return the mask alone, (I, J)."""
        if self.cfg.positions == 'rope':
            return pos.mask
        m = alibi_slopes(self.K, pos.mask)[:, None, None]
        b_self = self.b_self[:, None, None]
        b_cross = self.b_cross[:, None, None]
        return pos.mask + torch.where(pos.distance == 0, b_self, b_cross) - m * pos.distance


class LlamaAttention(BaseAttention):
    """Multi-head attention. Its four matrices are untied, unless `tie` says otherwise. Norm and
    residual are inside."""
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        D, std = cfg.d_model, cfg.init_std
        self.W_V = self.W_K if cfg.tie in ('kv', 'both') else normal_param(D, D, std=std)
        # W_O is stored in blocks of rows, as W_Q is, and used as o @ W_O
        self.W_O = self.W_Q if cfg.tie in ('qo', 'both') else normal_param(D, D, std=std)

    def forward(self, x: Tensor, pos: Positions, cache: Any = None) -> Tensor:
        """Return x plus the attention output, (B, I, D)."""
        # Project the normed input to queries, keys and values
        h = self.norm(x)
        q = self.split_heads(F.linear(h, self.W_Q))              # (B, K, I, R)
        k = self.split_heads(F.linear(h, self.W_K))
        # With tie=kv the values are the keys before RoPE
        v = k if self.W_V is self.W_K else self.split_heads(F.linear(h, self.W_V))
        # With RoPE, rotate queries and keys by their positions
        q = self.rotate(q, pos)
        k = self.rotate(k, pos)
        # Insert the new keys and values into the cache, and get those of all tokens so far
        if cache is not None:
            _, k, v = cache.update(self, h, k, v)                # (B, K, J, R)
        # Attend to the context
        impl = choose_impl(self, k, pos)
        if impl == 'readable':
            a = self.scores(q, k, pos)                           # (B, K, I, J)
            alpha = a.softmax(dim=-1).type_as(v)
            o = alpha @ v                                        # (B, K, I, R)
        else:
            o = attend(impl, self, q, k, v, pos)
        # Merge the heads, project, and add to the residual stream
        return x + self.merge_heads(o) @ self.W_O                # (B, I, D)


class CEMAttention(BaseAttention):
    """T steps down the interaction energy. Its gradient ties W_V = W_K and W_O = W_Q (Eq. 5)."""
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.T, self.eta = cfg.attn_steps, cfg.attn_step_size
        self.P = Preconditioner(cfg, cfg.n_head, cfg.attn_rank)
        n = {'none': 0, 'shared': 1, 'per_head': cfg.n_head}[cfg.kq_diag]
        self.kq_diag = nn.Parameter(torch.zeros(n, cfg.d_model)) if n else None

    def forward(self, x: Tensor, pos: Positions, cache: Any = None) -> Tensor:
        """Take the steps of Algorithm 1, MHA, for all i and k at once: (B, I, D) -> (B, I, D)."""
        # Project the normed input to keys, which are also the values and fixed for all steps
        h = self.norm(x)                                         # h_j <- rms(x_j), (B, I, D)
        k = self.split_heads(F.linear(h, self.W_K))              # k_j <- W_k^K h_j, (B, K, I, R)
        k = self.rotate(k, pos)                                  # rope: k_j <- Rot(j) k_j
        x = h if self.cfg.residual == 'normed' else x            # normed: x_i <- h_i
        # Insert the new h or keys into the cache, and get those of all tokens so far. It may hold h
        # alone (nanocem/decode.py): then k is None, and attend works from h
        if cache is not None:
            h, k, _ = cache.update(self, h, k, k)                # (B, J, D), (B, K, J, R)
        # Fold the preconditioners into the output projection: its blocks are W_k^Q P_k
        W_O = self.output_weight() if cache is None else cache.output_weight(self)  # (D, D)
        impl = choose_impl(self, k, pos)  # how to compute attention
        for _ in range(self.T):
            # Project the current state to queries
            u = self.norm(x)                                     # u_i <- rms(x_i)
            q = self.split_heads(F.linear(u, self.W_Q))          # q_i <- W_k^Q u_i, (B, K, I, R)
            q = self.rotate(q, pos)                              # rope: q_i <- Rot(i) q_i
            # Attend to the context
            if impl == 'readable':
                a = self.scores(q, k, pos, u, h)                 # a_ijk, (B, K, I, J)
                alpha = a.softmax(dim=-1).type_as(k)             # softmax_j(a_ijk)
                o = alpha @ k                                    # o_i <- sum_j alpha_ijk k_j
            else:
                o = attend(impl, self, q, k, k, pos, u, h)
            o = self.rotate(o, pos, inverse=True)                # rope: o_i <- Rot(i)^T o_i
            # Merge the heads, project, and take one gradient step on the energy
            dx = self.merge_heads(o) @ W_O                       # dx_i <- sum_k P_k W_k^Q^T o_i
            if self.cfg.exact_update:  # + sum_k P_k (d_k * sum_j alpha_ijk h_j); impl is readable
                dx = dx + self.P(self.kq_diag[:, None] * (alpha @ h[:, None])).sum(dim=1)
            x = x + self.eta * dx                                # x_i <- x_i + eta dx_i
        return x

    def scores(self, q: Tensor, k: Tensor, pos: Positions, u: Tensor, h: Tensor) -> Tensor:
        """Return a_ijk = (k_j . q_i + h_j . (d_k * u_i)) / tau + b_ijk (Eq. 12), (B, K, I, J); -inf
        for keys after the query. RoPE does not rotate the diagonal's term."""
        a = super().scores(q, k, pos)
        if self.kq_diag is not None:
            d_u = u[:, None] * (self.kq_diag[:, None] / self.tau)  # (B, 1 or K, I, D)
            a = a + d_u @ h[:, None].mT
        return a

    def output_weight(self) -> Tensor:
        """Return the preconditioned W_O (Eq. 14), (D, D). Its k-th block of R rows is W_k^Q P_k,
        the transpose of P_k W_k^Q^T."""
        return self.P(self.W_Q.unflatten(0, (self.K, -1))).flatten(0, 1)

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """Return eps(u_i | h_1:i) = -tau sum_k log sum_j exp(a_ijk) (Eq. 2 with biases), (B, J),
        for normed u and h. If P = I, forward's dx is -d eps/du; with d_k it needs exact_update."""
        pos = make_positions(self.cfg, h)
        q = self.rotate(self.split_heads(F.linear(u, self.W_Q)), pos)
        k = self.rotate(self.split_heads(F.linear(h, self.W_K)), pos)
        return -self.tau * self.scores(q, k, pos, u, h).logsumexp(dim=-1).sum(dim=1)


class LlamaMLP(nn.Module):
    """Gated MLP with three untied matrices. Norm and residual are inside. Hugging Face's gate_proj
    is V, and its up_proj is W."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(cfg.d_model)
        self.W = normal_param(cfg.d_mlp, cfg.d_model, std=cfg.init_std)
        self.V = normal_param(cfg.d_mlp, cfg.d_model, std=cfg.init_std)
        self.W_d = normal_param(cfg.d_mlp, cfg.d_model, std=cfg.init_std)  # (D_v, D), as V

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        """Return x plus the MLP's output, (B, I, D)."""
        # Project the normed input to the gate gamma and to z
        h = self.norm(x)
        gamma = F.linear(h, self.W)                              # (B, I, D_v)
        z = F.linear(h, self.V)
        # Apply the activation and the gate
        g = gamma * F.silu(z)
        # Project down, and add to the residual stream
        return x + g @ self.W_d


class CEMMLP(nn.Module):
    """T steps down the element-wise energy. Its gradient ties W_d = V^T (Eq. 11)."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg, self.T, self.eta = cfg, cfg.mlp_steps, cfg.mlp_step_size
        # With mlp_match=params, two matrices have as many parameters as Llama's three
        width = cfg.d_mlp * 3 // 2 if cfg.mlp_match == 'params' else cfg.d_mlp
        self.norm = RMSNorm(cfg.d_model)
        self.W = normal_param(width, cfg.d_model, std=cfg.init_std)
        self.V = normal_param(width, cfg.d_model, std=cfg.init_std)
        self.P = Preconditioner(cfg, 1, cfg.mlp_rank)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        """Take the steps of Algorithm 1, MLP, for all i at once: (B, I, D) -> (B, I, D)."""
        # Project the normed input to the gate, which stays fixed for all steps
        h = self.norm(x)                                         # h_i <- rms(x_i)
        gamma = F.linear(h, self.W)                              # gamma = W h_i, (B, I, D_v)
        x = h if self.cfg.residual == 'normed' else x            # normed: x_i <- h_i
        # Fold the preconditioner into the down projection. Algorithm 1 has V^T in its g, not here
        W_d = self.output_weight() if cache is None else cache.output_weight(self)  # (P V^T)^T
        for _ in range(self.T):
            # Project the current state up
            u = self.norm(x)                                     # u_i <- rms(x_i)
            z = F.linear(u, self.V)                              # V u_i
            # Apply the activation and the gate
            if self.cfg.mlp_energy == 'gated':
                g = gamma * F.silu(z)                            # gamma * phi'(V u_i), phi' = SiLU
            else:
                g = gamma * torch.sigmoid(z * straight_through_sign(gamma))  # phi = softplus
            # Project down, and take one gradient step on the energy
            x = x + self.eta * (g @ W_d)                         # x_i <- x_i + eta P V^T g
        return x

    def output_weight(self) -> Tensor:
        """Return (P V^T)^T (Eq. 15), (D_v, D): P applied to each row of V."""
        return self.P(self.V[None])[0]

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """Return xi(u | h) = -gamma . phi(V u), gamma = W h (Eq. 7), (B, J), for normed u and h.
        phi is the integral of SiLU. With sign_convex, -|gamma| . phi(sign(gamma) * V u) and
        phi = softplus. If P = I, forward's g @ W_d is -d xi/du."""
        gamma = F.linear(h, self.W)
        z = F.linear(u, self.V)
        if self.cfg.mlp_energy == 'sign_convex':
            z = z * straight_through_sign(gamma)
            return -(gamma.abs() * F.softplus(z)).sum(dim=-1)
        return -(gamma * Phi.apply(z)).sum(dim=-1)


def straight_through_sign(x: Tensor) -> Tensor:
    """Return sign(x), with the gradient of x."""
    return x.sign().detach() + (x - x.detach())


class Block(nn.Module):
    """One layer (Algorithm 1, Main Block). A sublayer with reuse > 1 is applied again to its own
    output, with a fresh context: the paper's plain layer reuse."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn = CEMAttention(cfg) if cfg.attn == 'cem' else LlamaAttention(cfg)
        self.mlp = CEMMLP(cfg) if cfg.mlp == 'cem' else LlamaMLP(cfg)
        self.attn_reuse, self.mlp_reuse = cfg.attn_reuse, cfg.mlp_reuse

    def forward(self, x: Tensor, pos: Positions, cache: Any = None) -> Tensor:
        for _ in range(self.attn_reuse):
            x = self.attn(x, pos, cache)
        for _ in range(self.mlp_reuse):
            x = self.mlp(x, cache)
        return x


class Transformer(nn.Module):
    """A causal language model: embedding, blocks, norm, untied head."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embedding = normal_param(cfg.vocab_size, cfg.d_model, std=EMBEDDING_STD)
        self.head = normal_param(cfg.vocab_size, cfg.d_model, std=cfg.init_std)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.d_model)

    def forward(self, idx: Tensor, targets: Tensor | None = None,
                cache: Any = None) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits (B, I, vocabulary) of ids (B, I) and None; or with targets (B, I) None
        and the mean loss, without targets of -100. With a cache, idx follows the tokens in it."""
        x = self.hidden(idx, cache)
        if targets is None:
            return F.linear(x, self.head), None
        return None, cross_entropy(x, self.head, targets)

    def hidden(self, idx: Tensor, cache: Any = None) -> Tensor:
        """Map ids (B, I) to the head's input, (B, I, D)."""
        x = F.embedding(idx, self.embedding)
        past = 0 if cache is None else cache.begin(idx)
        pos = make_positions(self.cfg, x, past)
        for _ in range(self.cfg.loops):
            for block in self.blocks:
                x = block(x, pos, cache)
        return self.norm(x)

    def set_steps(self, attn_steps: int | None = None, mlp_steps: int | None = None) -> None:
        """Change T, but not eta; None keeps T. UserError if T < 1, or for a Llama sublayer."""
        steps = {name: T for name, T in (('attn', attn_steps), ('mlp', mlp_steps)) if T is not None}
        # Check both before changing either
        for name, T in steps.items():
            check(T >= 1, f'{name}_steps={T}: expected 1, 2, 3, ...')
            check(getattr(self.cfg, name) == 'cem',
                  f'{name}_steps={T}: a Llama sublayer takes no steps; expected a CEM one')
        for name, T in steps.items():
            for block in self.blocks:
                getattr(block, name).T = T

    def set_attn_impl(self, impl: str) -> None:
        """Choose how attention is computed: auto, readable, blockwise, sdpa or triton, which
        nanocem/attention.py describes. Second derivatives on a CPU need readable."""
        for block in self.blocks:
            block.attn.impl = impl

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

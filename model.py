"""
Llama and Causal Energy Minimization (CEM, arXiv 2605.07588) in one file.

A Transformer layer as descent on two conditional energies: attention steps down the interaction
energy (Eq. 2), the MLP down the element-wise energy (Eq. 7). Each sublayer is one class, in which
'llama' (untied weights) or 'cem' (tied weights) is a flag. A CEM sublayer:

    h = norm(x0)                                 the context: keys = values = W_K h, gamma = W h
    x = x0                                       Algorithm 1 prints x = h; see the function `start`
    for t in range(T):
        x = x + eta * P * update(norm(x) | h)    minus the energy's gradient: see exact_update
    return x

Read Attention.forward beside Algorithm 1's MHA, and MLP.forward beside its MLP. Faster ways to the
same numbers are in nanocem/fast.py, decoding with a cache in nanocem/decode.py.

Shapes: B batch, I new and J attended positions (I < J in decoding), D = D_h the model's width, K
heads R = D_r = D / K wide. A subscript k is a head, k_j a key.
"""
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanocem import fast
from nanocem.energy import Phi

# 86m to 162m: the paper's Table 1. Of 256m it says only that its CEM model has two layers more.
SIZES: dict[str, dict[str, int]] = {
    'nano': dict(d_model=32, n_layer=2, n_head=2, d_mlp=86),
    'micro': dict(d_model=48, n_layer=2, n_head=3, d_mlp=128),
    'mini': dict(d_model=64, n_layer=3, n_head=4, d_mlp=172),
    '86m': dict(d_model=672, n_layer=8, n_head=8, d_mlp=1792),
    '108m': dict(d_model=672, n_layer=12, n_head=12, d_mlp=1792),
    '134m': dict(d_model=768, n_layer=12, n_head=12, d_mlp=2048),
    '162m': dict(d_model=864, n_layer=12, n_head=12, d_mlp=2304),
    '256m': dict(d_model=1056, n_layer=14, n_head=12, d_mlp=2816),
}

# option: the sublayers it acts on, its default where one of them is CEM, its value where none is
CEM_OPTIONS: dict[str, tuple[tuple[str, ...], Any, Any]] = {
    'positions': (('attn',), 'alibi', 'rope'),
    'attn_steps': (('attn',), 2, 1),
    'mlp_steps': (('mlp',), 2, 1),
    'attn_step_size': (('attn',), None, 1.0),  # None: 1 / T
    'mlp_step_size': (('mlp',), None, 1.0),
    'residual': (('attn', 'mlp'), 'raw', 'raw'),
    'preconditioner': (('attn', 'mlp'), 'diag_lowrank', 'none'),
    'kq_diag': (('attn',), 'shared', 'none'),
    'score_scale': (('attn',), 'model', 'head'),
    'exact_update': (('attn',), False, False),
    'mlp_energy': (('mlp',), 'gated', 'gated'),
    'mlp_match': (('mlp',), 'dims', 'dims'),
    'attn_rank': (('attn',), 4, 4), 'mlp_rank': (('mlp',), 16, 16),
}
LLAMA_TOO = ('positions', 'attn_steps', 'mlp_steps')  # a Llama sublayer takes these too


@dataclass
class ModelConfig:
    """The architecture. None means CEM_OPTIONS's default, or what the comment says."""
    size: Literal[tuple(SIZES)] = 'mini'  # preset for the next four
    d_model: int | None = None  # D_h; default: the size's
    n_layer: int | None = None  # default: the size's
    n_head: int | None = None  # K; default: the size's
    d_mlp: int | None = None  # MLP width of the Llama model; default: the size's
    extra_layers: int | None = None  # beyond n_layer; default: 2 for an all-CEM 256m, else 0
    vocab_size: int = 32_000  # train.py takes it from the data
    context_length: int = 2048  # J, tokens
    attn: Literal['llama', 'cem'] = 'cem'  # untied weights, or those of the interaction energy
    mlp: Literal['llama', 'cem'] = 'cem'  # untied weights, or those of the element-wise energy
    attn_steps: int | None = None  # T_eps; default: 2, Llama's 1 (more is plain layer reuse)
    mlp_steps: int | None = None  # T_xi; default: 2, Llama's 1
    attn_step_size: float | None = None  # eta_eps; default: 1 / attn_steps, Llama's 1
    mlp_step_size: float | None = None  # eta_xi; default: 1 / mlp_steps, Llama's 1
    positions: Literal['alibi', 'rope'] | None = None  # default: alibi for CEM attention, else rope
    kq_diag: Literal['none', 'shared', 'per_head'] | None = None  # d_k; default: shared
    kq_diag_init: float = 0.0  # where d_k starts
    score_scale: Literal['head', 'model'] | None = None  # tau^2 = D_r or D_h; default: model
    preconditioner: Literal['none', 'diag', 'diag_lowrank'] | None = None  # default: diag_lowrank
    attn_rank: int = 4  # rank of each head's low-rank preconditioner
    mlp_rank: int = 16  # rank of the MLP's
    residual: Literal['raw', 'displacement', 'normed'] | None = None  # default: raw
    exact_update: bool = False  # add sum_j alpha_ijk d_k * h_j, which Algorithm 1 leaves out
    mlp_energy: Literal['gated', 'sign_convex'] | None = None  # Eq. 7, or the Hopfield appendix's
    mlp_match: Literal['dims', 'params'] | None = None  # Llama's MLP width, or its parameter count
    init_std: float | None = None  # weights ~ N(0, init_std); default: 0.02 sqrt(768 / D_h)
    embedding_std: float = 1.0  # the token embedding ~ N(0, embedding_std)
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # RMSNorm's epsilon
    attn_impl: Literal['auto', 'readable', 'sdpa', 'rows', 'triton'] = 'auto'  # see nanocem/fast.py

    def __post_init__(self) -> None:
        require(self.size in SIZES, f'size={self.size}: expected one of {", ".join(SIZES)}')
        for name, value in SIZES[self.size].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name, (sublayers, if_cem, if_llama) in CEM_OPTIONS.items():
            cem = any(getattr(self, sublayer) == 'cem' for sublayer in sublayers)
            if getattr(self, name) is None:
                setattr(self, name, if_cem if cem else if_llama)
            value = getattr(self, name)
            require(cem or value == if_llama or name in LLAMA_TOO,
                    f'{name}={value} acts on CEM sublayers only: set {" or ".join(sublayers)}=cem')
        for kind in ('attn', 'mlp'):
            if getattr(self, f'{kind}_step_size') is None:  # T steps are as long as one was
                setattr(self, f'{kind}_step_size', 1 / max(1, getattr(self, f'{kind}_steps')))
        if self.extra_layers is None:
            self.extra_layers = 2 if self.size == '256m' and self.attn == self.mlp == 'cem' else 0
        if self.init_std is None:
            self.init_std = 0.02 * math.sqrt(768 / max(1, self.d_model))
        for field in fields(self):
            name, value, parts = field.name, getattr(self, field.name), get_args(field.type)
            kind = parts[0] if type(None) in parts else field.type  # X, where it is X | None
            if get_origin(kind) is Literal:
                allowed = get_args(kind)
                require(value in allowed, f'{name}={value}: expected one of {", ".join(allowed)}')
            if kind is int:
                least = 0 if name == 'extra_layers' else 1
                require(least <= value <= 10**6, f'{name}={value}: expected {least} to 1,000,000')
            if kind is float:
                least = -math.inf if name == 'kq_diag_init' else 0
                require(least < value < math.inf, f'{name}={value}: expected finite, above {least}')
        D, K = self.d_model, self.n_head
        require(D % K == 0, f'd_model={D} is not a multiple of n_head={K}')
        require(self.positions == 'alibi' or D // K % 2 == 0,
                f'positions=rope turns pairs of features: d_model / n_head = {D // K} is odd')
        require(self.kq_diag != 'none' or not (self.exact_update or self.kq_diag_init),
                'exact_update and kq_diag_init need the diagonal: set kq_diag=shared or per_head')
        require(not self.exact_update or self.attn_impl in ('auto', 'readable'),
                'exact_update needs the attention weights: set attn_impl=auto or readable')

    def llama(self) -> 'ModelConfig':
        """The Llama counterpart, whose parameter count sets the token budget."""
        names = ('size', 'd_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'context_length')
        positions = 'alibi' if self.d_model // self.n_head % 2 else 'rope'
        return ModelConfig(**{name: getattr(self, name) for name in names}, positions=positions,
                           attn='llama', mlp='llama')


def require(ok: bool, otherwise: str) -> None:
    if not ok:
        raise ValueError(otherwise)


def drawn(*shape: int, std: float) -> nn.Parameter:
    """A weight from N(0, std)."""
    return nn.Parameter(torch.empty(shape).normal_(std=std))


class RMSNorm(nn.Module):
    """Algorithm 1's rms, with a gain: x / sqrt(mean(x^2) + eps) * gain over the last dimension."""
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, self.eps)


def start(residual: str, norm: RMSNorm, x0: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Where a sublayer's steps start: x, and the first u = norm(x). h = norm(x0).

    raw: at x0, as in Llama's pre-norm layer; but the larger x0, the less a step moves u.
    displacement: at x0 / rms(x0), whose norm is h; the layer's skip is x0 + (x - x_start).
    normed: at h, as Algorithm 1 is printed; but then no skip leads past the norm."""
    if residual == 'normed':
        return h, norm(h)
    x = x0 if residual == 'raw' else F.rms_norm(x0, norm.gain.shape, eps=norm.eps)
    return x, h


class Preconditioner(nn.Module):
    """n symmetric matrices P = diag(softplus(d)) + U V^T + V U^T, (D, D), never formed (Eq. 13; its
    V is not the MLP's). Adam moves d = sqrt(D) p faster than it moves p. rank 0: no U, V."""
    decayed = ('U', 'V')  # what weight decay acts on: no other weights of the class

    def __init__(self, n: int, dim: int, rank: int):
        super().__init__()
        self.p = nn.Parameter(torch.full((n, dim), dim ** -0.5))  # d starts at 1, P at 1.31 I
        self.U = drawn(n, dim, rank, std=0.02) if rank else None
        self.V = nn.Parameter(torch.zeros(n, dim, rank)) if rank else None

    def forward(self, rows: Tensor) -> Tensor:
        """P applied to each row: (..., n, m, D) -> (..., n, m, D)."""
        out = rows * F.softplus(self.p * self.p.shape[1] ** 0.5)[:, None]
        if self.U is not None:
            out = out + (rows @ self.U) @ self.V.mT + (rows @ self.V) @ self.U.mT
        return out


def preconditioner(cfg: ModelConfig, n: int, rank: int) -> nn.Module:
    if cfg.preconditioner == 'none':
        return nn.Identity()
    return Preconditioner(n, cfg.d_model, {'diag': 0, 'diag_lowrank': rank}[cfg.preconditioner])


class PositionTables(NamedTuple):
    """Where the new tokens stand, for all layers of a forward pass."""
    distance: Tensor  # |i - j|, (I, J)
    mask: Tensor  # 0 where j <= i, -inf elsewhere, (I, J)
    cos: Tensor  # of the rotary angles, (I, R / 2)
    sin: Tensor


def position_tables(cfg: ModelConfig, x: Tensor, past: int = 0) -> PositionTables:
    """Those of x (B, I, D), behind `past` cached tokens."""
    I, R = x.shape[1], cfg.d_model // cfg.n_head
    like = dict(device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    i = torch.arange(past, past + I, device=x.device)[:, None]
    j = torch.arange(past + I, device=x.device)
    mask = torch.zeros(I, past + I, **like).masked_fill_(j > i, -torch.inf)
    angle = i * cfg.rope_theta ** (-torch.arange(0, R, 2, **like) / R)
    return PositionTables((i - j).abs(), mask, angle.cos(), angle.sin())


def rotate(x: Tensor, pos: PositionTables, inverse: bool = False) -> Tensor:
    """Rot(i) x at each i, or Rot(i)^T x: x (B, K, I, R); feature r turns with r + R / 2."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = pos.cos, -pos.sin if inverse else pos.sin
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    """Multi-head attention with its residual. attn='cem': T steps down the interaction energy, with
    W_V = W_K and W_O = W_Q (Eq. 5). attn='llama': untied weights; T > 1 is plain reuse."""
    decayed = ('W_Q', 'W_K', 'W_V', 'W_O')  # by weight decay

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D, K = cfg.d_model, cfg.n_head
        self.cfg, self.K, self.cem = cfg, K, cfg.attn == 'cem'
        self.residual = cfg.residual if self.cem else 'raw'
        self.steps, self.eta = cfg.attn_steps, cfg.attn_step_size
        self.tau = math.sqrt(D // K if cfg.score_scale == 'head' else D)  # temperature of scores
        self.rope = cfg.positions == 'rope'
        self.norm = RMSNorm(D, cfg.norm_eps)
        self.W_Q = drawn(D, D, std=cfg.init_std)  # W_k^Q: its k-th R rows
        self.W_K = drawn(D, D, std=cfg.init_std)
        if self.cem:
            self.P = preconditioner(cfg, K, cfg.attn_rank)
        else:
            self.W_V = drawn(D, D, std=cfg.init_std)
            self.W_O = drawn(D, D, std=cfg.init_std)  # in W_Q's shape
        n = {'none': 0, 'shared': 1, 'per_head': K}[cfg.kq_diag]
        self.kq_diag = nn.Parameter(torch.full((n, D), cfg.kq_diag_init)) if n else None  # d_k
        if not self.rope:
            self.b_self, self.b_cross = (nn.Parameter(torch.zeros(K)) for _ in range(2))

    def forward(self, x0: Tensor, pos: PositionTables, cache: Any = None, use: int = 0) -> Tensor:
        """Algorithm 1, MHA, for all i and k: (B, I, D) -> (B, I, D). use: plain reuse's, 0, 1.."""
        # Main Block: the context, the same in all steps
        h_i = self.norm(x0)                                      # h_i <- rms(h_i), (B, I, D)
        if cache is None:
            h = h_i                                              # h_1:J
            k = self.project(h, self.W_K, pos)                   # k_j <- W_k^K h_j, (B, K, J, R)
            v = k if self.cem else self.project(h, self.W_V)     # v_j <- k_j (rope: turned)
        else:
            h, k, v = cache.context(self, use, h_i, pos)         # of the past and of x0
        once = self if cache is None else cache.of(self)         # decoding: not at every token
        W_out = once.output_weight()
        way = fast.choose_way(self, k, pos)                      # attn_impl; auto: the best here
        bias = None if way in fast.MAKES_ITS_BIAS else once.bias(pos)
        x_start, u = start(self.residual, self.norm, x0, h_i)    # printed: x_i <- h_i
        x = x_start
        for t in range(self.steps if self.cem else 1):           # Llama's T: see Block
            if t > 0:
                u = self.norm(x)                                 # u_i <- rms(x_i)
            q = self.project(u, self.W_Q, pos)                   # q_i <- W_k^Q u_i, (B, K, I, R)
            if way == 'readable':
                a = self.scores(q, u, k, h, bias)                # a_ijk, (B, K, I, J)
                alpha = a.softmax(dim=-1).type_as(v)             # softmax_j(a_ijk)
                o = alpha @ v                                    # o_i <- sum_j alpha_ijk v_j
            else:
                o, alpha = fast.attend(way, self, q, u, k, v, h, bias)
            if self.cem and self.rope:
                # q_i and v_j were turned: o_i <- sum_j alpha_ijk Rot(i)^T Rot(j) W_k^K h_j
                o = rotate(o, pos, inverse=True)
            dx = o.transpose(1, 2).flatten(-2) @ W_out           # dx_i <- sum_k P_k W_k^Q^T o_i
            if self.cfg.exact_update:
                # sum_k P_k (d_k * sum_j alpha_ijk h_j), which Algorithm 1 leaves out
                dx = dx + self.P(self.kq_diag[:, None] * (alpha @ h[:, None])).sum(dim=1)
            x = x + self.eta * dx                                # x_i <- x_i + eta dx_i
        return x0 + (x - x_start) if self.residual == 'displacement' else x

    def project(self, x: Tensor, W: Tensor, pos: PositionTables | None = None) -> Tensor:
        """The heads of W x, (B, K, I, R), with rope turned by Rot(i) if `pos` is given."""
        heads = F.linear(x, W).unflatten(-1, (self.K, -1)).transpose(1, 2)
        return rotate(heads, pos) if self.rope and pos is not None else heads

    def scores(self, q: Tensor, u: Tensor, k: Tensor, h: Tensor, bias: Tensor) -> Tensor:
        """a_ijk = (k_j . q_i + h_j . (d_k * u_i)) / tau + b_ijk, -inf where j > i: (B, K, I, J)."""
        if self.kq_diag is not None:  # rope does not turn its term
            du = u[:, None] * (self.kq_diag[:, None] / self.tau)  # (B, 1 or K, I, D)
            bias = du @ h[:, None].mT + bias
        return q / self.tau @ k.mT + bias

    def bias(self, pos: PositionTables) -> Tensor:
        """b_ijk = -m_k |i - j| + b_self_k [i = j] + b_cross_k [i != j], and -inf where j > i:
        (K, I, J). With rope that alone, (I, J). m_k = 2^-k, from eight heads on 2^(-8k/K)."""
        if self.rope:
            return pos.mask
        m, b_self, b_cross = fast.slopes(self.K, pos.mask), self.b_self, self.b_cross
        b = torch.where(pos.distance == 0, b_self[:, None, None], b_cross[:, None, None])
        return pos.mask + b - m[:, None, None] * pos.distance

    def output_weight(self) -> Tensor:
        """P_k times each row of W_k^Q, (K R, D): o^T times it is (P_k W_k^Q^T o)^T (Eq. 14)."""
        return self.P(self.W_Q.unflatten(0, (self.K, -1))).flatten(0, 1) if self.cem else self.W_O

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """eps(u_i | h_1:i) = -tau sum_k log sum_j exp(a_ijk) (Eq. 2 with biases): normed u and h,
        (B, J, D) -> (B, J). If P = I and (exact_update or no diagonal), dx = -d eps/du, h fixed."""
        require(self.cem, 'a Llama sublayer has no energy: its weights are not tied; set attn=cem')
        pos = position_tables(self.cfg, h)
        q, k = self.project(u, self.W_Q, pos), self.project(h, self.W_K, pos)
        return -self.tau * self.scores(q, u, k, h, self.bias(pos)).logsumexp(dim=-1).sum(dim=1)


class MLP(nn.Module):
    """Gated MLP with its residual. mlp='cem': T steps down the element-wise energy, with W_d = V^T
    (Eq. 11). mlp='llama': untied weights; T > 1 is plain reuse."""
    decayed = ('W', 'V', 'W_d')  # by weight decay

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D = cfg.d_model
        width = cfg.d_mlp * 3 // 2 if cfg.mlp_match == 'params' else cfg.d_mlp  # 2 matrices, not 3
        self.cem = cfg.mlp == 'cem'
        self.residual = cfg.residual if self.cem else 'raw'
        self.sign_convex = cfg.mlp_energy == 'sign_convex'
        self.steps, self.eta = cfg.mlp_steps, cfg.mlp_step_size
        self.norm = RMSNorm(D, cfg.norm_eps)
        self.W = drawn(width, D, std=cfg.init_std)  # gamma's: Hugging Face's up_proj
        self.V = drawn(width, D, std=cfg.init_std)  # SiLU's: Hugging Face's gate_proj
        if self.cem:
            self.P = preconditioner(cfg, 1, cfg.mlp_rank)
        else:
            self.W_d = drawn(width, D, std=cfg.init_std)  # in V's shape

    def forward(self, x0: Tensor, cache: Any = None) -> Tensor:
        """Algorithm 1, MLP, for all i at once: (B, I, D) -> (B, I, D)."""
        W_out = (self if cache is None else cache.of(self)).output_weight()
        h = self.norm(x0)                                        # h_i <- rms(h_i)
        gamma = F.linear(h, self.W)                              # gamma = W h_i
        x_start, u = start(self.residual, self.norm, x0, h)      # printed: x_i <- h_i
        x = x_start
        for t in range(self.steps if self.cem else 1):           # Llama's T: see Block
            if t > 0:
                u = self.norm(x)                                 # u_i <- rms(x_i)
            z = F.linear(u, self.V)
            if self.sign_convex:
                z = z * straight_through_sign(gamma)
            g = gamma * F.silu(z)                                # gamma * phi'(V u_i), phi' = SiLU
            x = x + self.eta * (g @ W_out)                       # x_i <- x_i + eta P V^T g
        return x0 + (x - x_start) if self.residual == 'displacement' else x

    def output_weight(self) -> Tensor:
        """P times each row of V, (D_v, D): g^T times it is (P V^T g)^T (Eq. 15)."""
        return self.P(self.V[None])[0] if self.cem else self.W_d

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """xi(u | h) = -gamma . phi(V u), gamma = W h (Eq. 7), or -|gamma| . phi(sign(gamma) * V u)
        (sign_convex): normed u and h, (B, J, D) -> (B, J). If P = I, the step is minus its gradient
        in u, h held fixed; the gradient that the sign lacks is taken to be the identity's."""
        require(self.cem, 'a Llama sublayer has no energy: its weights are not tied; set mlp=cem')
        gamma, z = F.linear(h, self.W), F.linear(u, self.V)
        if self.sign_convex:
            sign = straight_through_sign(gamma)
            gamma, z = gamma * sign, z * sign
        return -(gamma * Phi.apply(z)).sum(dim=-1)


def straight_through_sign(x: Tensor) -> Tensor:
    """sign(x), with the gradient of x."""
    return x + (x.sign() - x).detach()


class Block(nn.Module):
    """One layer (Algorithm 1, Main Block). Plain reuse: a Llama sublayer acts T times."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn, self.mlp = Attention(cfg), MLP(cfg)

    def forward(self, x: Tensor, pos: PositionTables, cache: Any = None) -> Tensor:
        for use in range(1 if self.attn.cem else self.attn.steps):
            x = self.attn(x, pos, cache, use)
        for _ in range(1 if self.mlp.cem else self.mlp.steps):
            x = self.mlp(x, cache)
        return x


class Transformer(nn.Module):
    """A causal language model: embedding, blocks, norm, untied head."""
    decayed = ('embedding', 'head')  # by weight decay

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg, self.activation_checkpointing = cfg, False
        self.embedding = drawn(cfg.vocab_size, cfg.d_model, std=cfg.embedding_std)
        self.head = drawn(cfg.vocab_size, cfg.d_model, std=cfg.init_std)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer + cfg.extra_layers))
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: Any = None,
                ) -> tuple[Tensor | None, Tensor | None]:
        """Ids (B, I) -> logits (B, I, vocabulary), None; with targets (B, I), -100 for none: None,
        mean loss. With a cache, idx are the tokens behind those it holds."""
        x = self.hidden(idx, cache)
        if targets is None:
            return F.linear(x, self.head), None
        return None, fast.cross_entropy(x, self.head, targets)

    def hidden(self, idx: Tensor, cache: Any = None) -> Tensor:
        """What the head reads: (B, I) -> (B, I, D)."""
        x = F.embedding(idx, self.embedding)
        pos = position_tables(self.cfg, x, 0 if cache is None else cache.length)
        lean = self.activation_checkpointing and self.training
        for block in self.blocks:
            x = checkpoint(block, x, pos, use_reentrant=False) if lean else block(x, pos, cache)
        if cache is not None:
            cache.length += idx.shape[1]
        return self.norm(x)

    def decayed_parameters(self) -> list[nn.Parameter]:
        """What weight decay acts on: the parameters that their class names in `decayed`."""
        return [p for module in self.modules() for name, p in module.named_parameters(recurse=False)
                if name in getattr(module, 'decayed', ())]

    def set_steps(self, attn_steps: int | None = None, mlp_steps: int | None = None) -> None:
        """Change T after training, eta as it was; None leaves T. ValueError below 1."""
        for name, steps in (('attn', attn_steps), ('mlp', mlp_steps)):
            require(steps is None or steps >= 1, f'{name}_steps={steps}: expected at least 1')
            for block in self.blocks if steps else ():
                getattr(block, name).steps = steps

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, training: bool = True) -> float:
        return fast.flops_per_token(self, training)

    def estimate_mfu(self, tokens_per_second: float, peak_flops: float) -> float:
        """Model FLOPs utilisation of training: counted FLOPs done a second, over `peak_flops`."""
        return self.flops_per_token() * tokens_per_second / peak_flops

"""
Llama and Causal Energy Minimization (CEM, arXiv 2605.07588): all layers in one file.

A Transformer layer as descent on two conditional energies: attention steps down the interaction
energy (Eq. 2), the MLP down the element-wise energy (Eq. 7). Each sublayer is one class, in which
'llama' (untied weights) or 'cem' (tied weights) is a flag. A CEM sublayer:

    h = norm(x)                            the context: keys = values = W_K h, gamma = W h
    for t in range(T):
        u = norm(x)
        x = x + eta * P * update(u | h)    minus dE/du, E the energy (see exact_update)

Read Attention.forward beside Algorithm 1's MHA, and MLP.forward beside its MLP. docs/paper.md has
the choices where the paper is silent, nanocem/fast.py faster ways to the same numbers.

Shapes: B batch, I new and J attended positions (I < J in decoding), D = D_h the model's width, K
heads R = D_r = D / K wide. A subscript k is a head, k_j a key.
"""
import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from configurator import check_types, expect, in_range, require, resolve_defaults
from nanocem import compute, fast

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

# The parameters that weight decay acts on, in whatever module: matrices, and P's low-rank part
DECAYED = ('embedding', 'head', 'W_Q', 'W_K', 'W_V', 'W_O', 'W', 'V', 'W_d', 'U')
PositionTables = namedtuple('PositionTables', 'distance mask cos sin')  # see position_tables


@dataclass
class ModelConfig:
    """The architecture. None means what the comment, which --help prints, says."""
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
    residual: Literal['raw', 'normed'] = 'raw'  # steps start at the layer's input, or at its norm
    exact_update: bool = False  # add sum_j alpha_ijk d_k * h_j, which Algorithm 1 leaves out
    mlp_energy: Literal['gated', 'sign_convex'] = 'gated'  # Eq. 7, or the Hopfield appendix's
    mlp_match: Literal['dims', 'params'] = 'dims'  # Llama's MLP width, or its parameter count
    init_std: float | None = None  # weights ~ N(0, init_std); default: 0.02 sqrt(768 / D_h)
    embedding_std: float = 1.0  # the token embedding ~ N(0, embedding_std)
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # RMSNorm's epsilon
    attn_impl: Literal['auto', 'readable', 'sdpa', 'triton'] = 'auto'  # see nanocem/fast.py

    def __post_init__(self) -> None:
        """Fill in what is None. ValueError for a bad value, or CEM's options on Llama sublayers."""
        check_types(self)
        attn, mlp = self.attn == 'cem', self.mlp == 'cem'
        resolve_defaults(self, **SIZES[self.size], extra_layers=2 * (self.size == '256m' and attn and mlp),
             attn_steps=2 if attn else 1, mlp_steps=2 if mlp else 1,
             positions='alibi' if attn else 'rope', kq_diag='shared' if attn else 'none',
             score_scale='model' if attn else 'head',
             preconditioner='diag_lowrank' if attn or mlp else 'none')
        in_range(self, 1, 10**6, 'd_model n_layer n_head d_mlp vocab_size context_length')
        in_range(self, 1, 10**9, 'attn_steps mlp_steps attn_rank mlp_rank rope_theta')
        in_range(self, 0, 10**6, 'extra_layers')
        resolve_defaults(self, init_std=0.02 * math.sqrt(768 / self.d_model),
             attn_step_size=1 / self.attn_steps if attn else 1.0,
             mlp_step_size=1 / self.mlp_steps if mlp else 1.0)
        in_range(self, 1e-30, 1e30, 'attn_step_size mlp_step_size init_std embedding_std norm_eps')
        # A Llama sublayer has none of CEM's parts: the only values of their options there
        if not attn:
            expect(self, 'attn=cem', kq_diag='none', score_scale='head', exact_update=False,
                   attn_step_size=1.0, attn_rank=ModelConfig.attn_rank)
        if not mlp:
            expect(self, 'mlp=cem', mlp_energy='gated', mlp_match='dims', mlp_step_size=1.0,
                   mlp_rank=ModelConfig.mlp_rank)
        if not attn and not mlp:
            expect(self, 'attn=cem or mlp=cem', preconditioner='none', residual='raw')
        # What does not go together
        D, K = self.d_model, self.n_head
        require(D % K == 0, f'd_model={D} is not a multiple of n_head={K}')
        require(self.positions == 'alibi' or D // K % 2 == 0, 'rope: d_model / n_head is odd')
        require(self.kq_diag != 'none' or not (self.exact_update or self.kq_diag_init),
                'exact_update and kq_diag_init need the diagonal: set kq_diag=shared or per_head')

    def llama(self) -> 'ModelConfig':
        """The Llama counterpart, whose parameter count sets the token budget."""
        names = ('size', 'd_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'context_length')
        positions = 'alibi' if self.d_model // self.n_head % 2 else 'rope'
        return ModelConfig(**{name: getattr(self, name) for name in names}, positions=positions,
                           attn='llama', mlp='llama')


def drawn(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=std))  # a weight from N(0, std)


class RMSNorm(nn.Module):
    """Algorithm 1's rms, with a gain: x / sqrt(mean(x^2) + eps) * gain over the last dimension."""
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, self.eps)


class Preconditioner(nn.Module):
    """n symmetric matrices P = diag(softplus(d)) + U V^T + V U^T, (D, D), never formed (Eq. 13; its
    V is not the MLP's). Adam moves d = sqrt(D) p faster than it moves p."""
    def __init__(self, cfg: ModelConfig, n: int, rank: int):
        super().__init__()
        D = cfg.d_model
        self.p = self.U = self.V = None  # P = I
        if cfg.preconditioner != 'none':
            self.p = nn.Parameter(torch.full((n, D), D ** -0.5))  # d starts at 1, P at 1.31 I
        if cfg.preconditioner == 'diag_lowrank':
            self.U = drawn(n, D, rank, std=0.02)
            self.V = nn.Parameter(torch.zeros(n, D, rank))

    def forward(self, rows: Tensor) -> Tensor:
        """P applied to each row: (..., n, m, D) -> (..., n, m, D)."""
        if self.p is None:
            return rows
        out = rows * F.softplus(self.p * self.p.shape[1] ** 0.5)[:, None]
        if self.U is not None:
            out = out + (rows @ self.U) @ self.V.mT + (rows @ self.V) @ self.U.mT
        return out


def position_tables(cfg: ModelConfig, x: Tensor, past: int = 0) -> PositionTables:
    """Where x (B, I, D) stands after `past` cached tokens: |i - j|, (I, J); the mask, 0 where
    j <= i, -inf elsewhere, (I, J); cosine and sine of the rotary angles, (I, R / 2)."""
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
    sin = -pos.sin if inverse else pos.sin
    return torch.cat([a * pos.cos - b * sin, b * pos.cos + a * sin], dim=-1).type_as(x)


def slopes(n_head: int, like: Tensor) -> Tensor:
    """ALiBi's m_k, (K,): the paper's 2^-k; above eight heads 2^(-8k/K), as its inventors have."""
    k = torch.arange(1, n_head + 1, dtype=like.dtype, device=like.device)
    return 2.0 ** (-8 / max(8, n_head) * k)


def start(cfg: ModelConfig, cem: bool, x: Tensor, h: Tensor) -> Tensor:
    """Where a sublayer's steps start. raw: at its input x, as in Llama's pre-norm layer. normed: at
    h = norm(x), as Algorithm 1 is printed; then no skip leads past the norm."""
    return h if cem and cfg.residual == 'normed' else x


class Attention(nn.Module):
    """Multi-head attention with its residual. attn='cem': T steps down the interaction energy, with
    W_V = W_K and W_O = W_Q (Eq. 5). attn='llama': untied weights; see Block for its T."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D, K = cfg.d_model, cfg.n_head
        self.cfg, self.K, self.cem = cfg, K, cfg.attn == 'cem'
        self.steps = cfg.attn_steps if self.cem else 1  # T, from one context
        self.reuse = 1 if self.cem else cfg.attn_steps  # T, of the whole sublayer: see Block
        self.eta = cfg.attn_step_size
        self.tau = math.sqrt(D // K if cfg.score_scale == 'head' else D)  # temperature of scores
        self.rope = cfg.positions == 'rope'
        self.norm = RMSNorm(D, cfg.norm_eps)
        self.W_Q = drawn(D, D, std=cfg.init_std)  # W_k^Q: its k-th R rows
        self.W_K = drawn(D, D, std=cfg.init_std)
        if self.cem:
            self.P = Preconditioner(cfg, K, cfg.attn_rank)
        else:
            self.W_V = drawn(D, D, std=cfg.init_std)
            self.W_O = drawn(D, D, std=cfg.init_std)  # in W_Q's shape
        n = {'none': 0, 'shared': 1, 'per_head': K}[cfg.kq_diag]  # of the diagonals d_k
        self.kq_diag = nn.Parameter(torch.full((n, D), float(cfg.kq_diag_init))) if n else None
        if not self.rope:
            self.b_self = nn.Parameter(torch.zeros(K))
            self.b_cross = nn.Parameter(torch.zeros(K))

    def forward(self, x: Tensor, pos: PositionTables, cache: Any = None) -> Tensor:
        """Algorithm 1, MHA, for all i and k at once: (B, I, D) -> (B, I, D)."""
        # Main Block: the context, the same in all steps
        h = self.norm(x)                                     # h_j <- rms(h_j), (B, J, D)
        k = self.project(h, self.W_K, pos)                   # k_j <- W_k^K h_j, (B, K, J, R)
        v = k if self.cem else self.project(h, self.W_V)     # v_j <- k_j (rope: turned)
        x = start(self.cfg, self.cem, x, h)                  # x_i <- h_i as printed; raw: the input
        if cache is not None:
            h, k, v = cache.update(self, h, k, v)            # the past, then these; see Cache
        W_out = self.output_weight()                         # (P_k W_k^Q^T)^T of all heads, (D, D)
        way = fast.way(self, k, pos)                         # to the o_i: this, or a faster one
        for _ in range(self.steps):
            u = self.norm(x)                                 # u_i <- rms(x_i)
            q = self.project(u, self.W_Q, pos)               # q_i <- W_k^Q u_i, (B, K, I, R)
            if way == 'readable':
                a = self.scores(q, u, k, h, pos)             # a_ijk, (B, K, I, J)
                alpha = a.softmax(dim=-1).type_as(v)         # softmax_j(a_ijk)
                o = alpha @ v                                # o_i <- sum_j alpha_ijk v_j
            else:
                o = fast.attend(way, self, q, u, k, v, h, pos)  # the same o_i, faster
            dx = self.merge(o, pos) @ W_out                  # dx_i <- sum_k P_k W_k^Q^T o_i
            if self.cfg.exact_update:
                # sum_k P_k (d_k * sum_j alpha_ijk h_j), which Algorithm 1 leaves out
                dx = dx + self.P(self.kq_diag[:, None] * (alpha @ h[:, None])).sum(dim=1)
            x = x + self.eta * dx                            # x_i <- x_i + eta dx_i
        return x

    def project(self, x: Tensor, W: Tensor, pos: PositionTables | None = None) -> Tensor:
        """The heads of W x, (B, K, I, R), with rope turned by Rot(i) if `pos` is given."""
        heads = F.linear(x, W).unflatten(-1, (self.K, -1)).transpose(1, 2)
        return rotate(heads, pos) if self.rope and pos is not None else heads

    def merge(self, o: Tensor, pos: PositionTables) -> Tensor:
        """Heads (B, K, I, R) side by side, (B, I, D). CEM's values turn with rope as its keys do:
        Rot(i)^T turns their sum, o_i = sum_j alpha_ijk Rot(i)^T Rot(j) W_k^K h_j."""
        if self.cem and self.rope:
            o = rotate(o, pos, inverse=True)
        return o.transpose(1, 2).flatten(-2)

    def scores(self, q: Tensor, u: Tensor, k: Tensor, h: Tensor, pos: PositionTables) -> Tensor:
        """a_ijk = (k_j . q_i + h_j . (d_k * u_i)) / tau + b_ijk, -inf where j > i: (B, K, I, J)."""
        rest = self.bias(pos)
        if self.kq_diag is not None:  # rope does not turn its term
            du = u[:, None] * (self.kq_diag[:, None] / self.tau)  # (B, 1 or K, I, D)
            rest = du @ h[:, None].mT + rest
        return q / self.tau @ k.mT + rest

    def bias(self, pos: PositionTables) -> Tensor:
        """b_ijk = -m_k |i - j| + b_self_k [i = j] + b_cross_k [i != j], and -inf where j > i:
        (K, I, J). With rope that alone, (I, J)."""
        if self.rope:
            return pos.mask
        m = slopes(self.K, pos.mask)[:, None, None]
        b_self = self.b_self[:, None, None]
        b_cross = self.b_cross[:, None, None]
        return pos.mask + torch.where(pos.distance == 0, b_self, b_cross) - m * pos.distance

    def output_weight(self) -> Tensor:
        """P_k, symmetric, times each row of W_k^Q: o^T times it is (P_k W_k^Q^T o)^T (Eq. 14)."""
        return self.P(self.W_Q.unflatten(0, (self.K, -1))).flatten(0, 1) if self.cem else self.W_O

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """eps(u_i | h_1:i) = -tau sum_k log sum_j exp(a_ijk) (Eq. 2 with biases): normed u and h,
        (B, J, D) -> (B, J). If P = I and (exact_update or no diagonal), dx = -d eps/du, h fixed."""
        require(self.cem, 'a Llama sublayer has no energy: its weights are not tied; set attn=cem')
        pos = position_tables(self.cfg, h)
        q = self.project(u, self.W_Q, pos)
        k = self.project(h, self.W_K, pos)
        return -self.tau * self.scores(q, u, k, h, pos).logsumexp(dim=-1).sum(dim=1)


class MLP(nn.Module):
    """Gated MLP with its residual. mlp='cem': T steps down the element-wise energy, with W_d = V^T
    (Eq. 11). mlp='llama': untied weights; see Block for its T."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D = cfg.d_model
        width = cfg.d_mlp * 3 // 2 if cfg.mlp_match == 'params' else cfg.d_mlp  # 2 matrices, not 3
        self.cfg, self.cem = cfg, cfg.mlp == 'cem'
        self.steps = cfg.mlp_steps if self.cem else 1
        self.reuse = 1 if self.cem else cfg.mlp_steps
        self.eta = cfg.mlp_step_size
        self.norm = RMSNorm(D, cfg.norm_eps)
        self.W = drawn(width, D, std=cfg.init_std)  # gamma's; W^g, Hugging Face's up_proj
        self.V = drawn(width, D, std=cfg.init_std)  # SiLU's; W^u, Hugging Face's gate_proj
        if self.cem:
            self.P = Preconditioner(cfg, 1, cfg.mlp_rank)
        else:
            self.W_d = drawn(width, D, std=cfg.init_std)  # W^d transposed, in V's shape

    def forward(self, x: Tensor) -> Tensor:
        """Algorithm 1, MLP, for all i at once: (B, I, D) -> (B, I, D)."""
        h = self.norm(x)                                     # h_i <- rms(h_i)
        gamma = F.linear(h, self.W)                          # gamma = W h_i
        x = start(self.cfg, self.cem, x, h)                  # x_i <- h_i as printed; raw: the input
        W_out = self.output_weight()                         # (P V^T)^T
        for _ in range(self.steps):
            u = self.norm(x)                                 # u_i <- rms(x_i)
            z = F.linear(u, self.V)                          # V u_i
            if self.cfg.mlp_energy == 'sign_convex':
                g = gamma * torch.sigmoid(z * straight_through_sign(gamma))  # phi = softplus
            else:
                g = gamma * F.silu(z)                        # gamma * phi'(V u_i), phi' = SiLU
            x = x + self.eta * (g @ W_out)                   # x_i <- x_i + eta P V^T g
        return x

    def output_weight(self) -> Tensor:
        """P times each row of V, (D_v, D): g^T times it is (P V^T g)^T (Eq. 15)."""
        return self.P(self.V[None])[0] if self.cem else self.W_d

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """xi(u | h) = -gamma . phi(V u), gamma = W h (Eq. 7), or -|gamma| . phi(sign(gamma) * V u),
        phi = softplus (sign_convex): (B, J, D) -> (B, J). If P = I, dx = -d xi/du, h fixed."""
        require(self.cem, 'a Llama sublayer has no energy: its weights are not tied; set mlp=cem')
        gamma = F.linear(h, self.W)
        z = F.linear(u, self.V)
        if self.cfg.mlp_energy == 'sign_convex':
            z = z * straight_through_sign(gamma)
            return -(gamma.abs() * F.softplus(z)).sum(dim=-1)
        return -(gamma * compute.Phi.apply(z)).sum(dim=-1)


def straight_through_sign(x: Tensor) -> Tensor:
    """sign(x), with the gradient of x."""
    return x + (x.sign() - x).detach()


class Block(nn.Module):
    """One layer (Algorithm 1, Main Block). A CEM sublayer takes its T steps from one context; a
    Llama sublayer of T > 1 acts T times, context and all: the paper's plain layer reuse."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn, self.mlp = Attention(cfg), MLP(cfg)

    def forward(self, x: Tensor, pos: PositionTables, cache: Any = None) -> Tensor:
        for _ in range(self.attn.reuse):
            x = self.attn(x, pos, cache)
        for _ in range(self.mlp.reuse):
            x = self.mlp(x)
        return x


class Transformer(nn.Module):
    """A causal language model: embedding, blocks, norm, untied head."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg, self.activation_checkpointing = cfg, False
        self.embedding = drawn(cfg.vocab_size, cfg.d_model, std=cfg.embedding_std)
        self.head = drawn(cfg.vocab_size, cfg.d_model, std=cfg.init_std)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer + cfg.extra_layers))
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: Any = None) -> tuple:
        """Ids (B, I) -> (logits (B, I, vocabulary), None). With targets (B, I) -> (None, their mean
        loss); -100 marks no target. With a cache, idx are the tokens after those it holds."""
        x = self.hidden(idx, cache)
        if targets is None:
            return F.linear(x, self.head), None
        return None, compute.cross_entropy(x, self.head, targets)

    def hidden(self, idx: Tensor, cache: Any = None) -> Tensor:
        """What the head reads: (B, I) -> (B, I, D)."""
        x = F.embedding(idx, self.embedding)
        pos = position_tables(self.cfg, x, 0 if cache is None else cache.begin(idx.shape[1]))
        lean = self.activation_checkpointing and self.training
        for block in self.blocks:
            x = checkpoint(block, x, pos, use_reentrant=False) if lean else block(x, pos, cache)
        return self.norm(x)

    def decayed_parameters(self) -> list[nn.Parameter]:
        """What weight decay acts on."""
        return [p for name, p in self.named_parameters() if name.split('.')[-1] in DECAYED]

    def set_steps(self, attn_steps: int | None = None, mlp_steps: int | None = None) -> None:
        """Change T after training, eta as it was; None leaves T. ValueError below 1."""
        for name, steps in (('attn', attn_steps), ('mlp', mlp_steps)):
            whole = steps is None or (type(steps) is int and steps >= 1)
            require(whole, f'{name}_steps={steps}: expected at least 1')
        for block in self.blocks:
            for sublayer, steps in ((block.attn, attn_steps), (block.mlp, mlp_steps)):
                if steps is not None:
                    setattr(sublayer, 'steps' if sublayer.cem else 'reuse', steps)

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

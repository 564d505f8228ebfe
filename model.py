"""
Llama and Causal Energy Minimization (CEM, arXiv 2605.07588): all layers in one file.

A CEM layer is gradient descent on two energies. Attention takes T steps down the interaction
energy (Eq. 2), the MLP takes T steps down the element-wise energy (Eq. 7). Both have this form:

    h = norm(x)                            the fixed context: keys = values = W_K h, gamma = W h
    for t in range(T):
        u = norm(x)
        x = x + eta P update(u | h)        update = minus the energy's gradient with respect to u

Here the gradients are written out, and each CEM layer has its `energy` beside its `forward`.
energy.py has the same energies, and lets autograd differentiate them. train.py warns if `forward`
no longer matches `energy` (step_errors in nanocem/same.py).

Read LlamaAttention.forward beside CEMAttention.forward, and LlamaMLP beside CEMMLP: their
difference is the paper. BaseAttention, which stands before them, can wait. Comments at the ends of
lines are shapes, or the formulas of Algorithm 1. Whatever is not in the paper is marked "rope:"
(Algorithm 1 has no RoPE) or "ours:". Ours are the default residual=raw, exact_update, grouped
queries (n_kv_head: `repeat`), Llama's ties (tie) and five options: key_shift changes `keys`,
value_shift changes Llama's values, match_bias changes `bias`, untied_output changes `queries` and
`output_weight`, and kq_diag=scaled adds to `bias` and to the update. docs/paper.md lists our
choices where the paper is silent.

This file needs only torch, and can be copied into another project (docs/options.md). On a CPU, a
model runs only the code below; on a GPU, train.py can give attention a faster `kernel`.

Shapes: B batch, I new and J attended positions (J - I are cached), D = D_h the model's width,
K heads of width R = D_r = D / K, G heads of keys and values (n_kv_head: K, or fewer), D_v the MLP's
width. i is a query's token, j a key's, k a head; k_j is a key of head k.
"""
import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# 86m to 162m are the paper's (Table 1), named for the parameters of a Llama with a vocabulary of
# 32,000. The shape of 256m is our choice. At this size the paper gives CEM two more layers, and
# Llama's token budget: --size=256m --n_layer=16 --tokens=5.1B
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
# A loss over more logits than the first number is computed in chunks of about as many logits as
# the second number, but of at least 128 rows
FEW_LOGITS = {'cuda': (2 ** 26, 2 ** 26), 'cpu': (2 ** 22, 2 ** 20)}
FEW_QUERIES = 64  # `attend` divides more queries than these into parts


@dataclass
class ModelConfig:
    """Describe the architecture: first the fields that Llama shares, then CEM's options, then
    variants, then our additions. A field that is None gets the default that its comment names. To
    change a field, make a new ModelConfig: dataclasses.replace would keep d_mlp, init_std and
    others as derived from the old values. ValueError for a bad value, or CEM's options on Llama."""
    size: Literal[tuple(SIZES)] | None = None  # preset of widths, layers and heads; default: 134m
    d_model: int | None = None  # D_h, width of the residual stream; default: the size's
    n_layer: int | None = None  # number of layers; default: the size's
    n_head: int | None = None  # K, heads; default: as many as fit, none narrower than the size's
    n_kv_head: int | None = None  # ours: G, heads of keys and values; default: n_head
    d_mlp: int | None = None  # D_v, width of the MLP; default: the size's, or 8/3 of d_model
    vocab_size: int = 32_000  # in train.py the default is the data's
    context_length: int = 2048  # J, tokens of a training sequence; layers take any number
    positions: Literal['alibi', 'rope'] | None = None  # default: rope for attn=llama, else alibi
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    init_std: float | None = None  # standard deviation of weights; default: 0.02 sqrt(768 / D_h)

    attn: str = 'cem'  # cem: steps down an energy; llama; or a name that you add to ATTENTION
    mlp: str = 'cem'  # cem: steps down an energy; llama; or a name that you add to MLP
    attn_steps: int = 1  # T_eps, gradient steps of CEM attention on one context
    mlp_steps: int = 1  # T_xi, gradient steps of the CEM MLP on one context
    attn_step_size: float | None = None  # eta_eps, step length; default: 1 / attn_steps
    mlp_step_size: float | None = None  # eta_xi, step length; default: 1 / mlp_steps
    preconditioner: Literal['none', 'diag', 'diag_lowrank'] = 'none'  # P, symmetric and learned
    attn_rank: int = 4  # rank of P's low-rank part, in each attention head
    mlp_rank: int = 16  # rank of P's low-rank part, in the MLP
    kq_diag: Literal['none', 'shared', 'per_head', 'scaled'] = 'none'  # diagonal d_k; ours: scaled

    residual: Literal['raw', 'normed'] = 'raw'  # steps are added to x, or to norm(x)
    score_scale: Literal['head', 'model'] | None = None  # tau^2: D_r (default: Llama) or D_h (CEM)
    exact_update: bool = False  # ours: add sum_j alpha_ijk d_k * h_j, left out by Algorithm 1
    mlp_energy: Literal['gated', 'sign_convex'] = 'gated'  # Eq. 7, or the appendix's: convex phi
    mlp_match: Literal['dims', 'params'] = 'dims'  # dims: Llama's width; params: 1.5 times it
    tie: Literal['none', 'kv', 'qo', 'both'] = 'none'  # ours, in Llama: W_V = W_K, W_O = W_Q
    attn_reuse: int = 1  # times that attention is applied in a row, each time with a new context
    mlp_reuse: int = 1  # times that the MLP is applied in a row, each time with a new context

    key_shift: Literal['none', 'half'] = 'none'  # ours: half of each key is token j - 1's
    value_shift: Literal['none', 'half'] = 'none'  # ours, in Llama: the same for values
    match_bias: Literal['none', 'token'] = 'none'  # ours: scores compare token i with j - 1
    untied_output: bool = False  # ours: queries W_Q h + W_O (u - h), so that W_O is not W_Q

    # For config files: a size drops the widths, layers and heads that an earlier file gave
    RESETS = (('size', 'd_model', 'n_layer', 'n_head', 'n_kv_head', 'd_mlp'),)
    # The options that --help shows; --help=all shows all
    FIRST = ('size', 'context_length', 'positions', 'attn', 'mlp', 'attn_steps', 'mlp_steps',
             'preconditioner', 'kq_diag')

    def __post_init__(self) -> None:
        check_values(self)
        resolve_defaults(self)
        check_combination(self)

    def needs_h(self) -> bool:
        """Return whether scores depend on the context h other than through the keys."""
        return self.kq_diag != 'none' or self.match_bias != 'none'

    def ties(self, pair: str) -> bool:
        """Return whether in Llama's attention W_V is W_K (pair=kv), or W_O is W_Q (pair=qo)."""
        return self.tie in (pair, 'both')

    def has_bias(self) -> bool:
        """Return whether something is added to the products of queries and keys, besides the causal
        mask."""
        return self.positions == 'alibi' or self.needs_h()

    def llama(self) -> 'ModelConfig':
        """Return the Llama of the same shape. Its parameter count sets the token budget."""
        # Leave out n_kv_head and tie: a model with grouped queries or ties then reads as many
        # tokens as the Llama that it is compared with
        names = ('d_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'context_length')
        shape = {name: getattr(self, name) for name in names}
        # RoPE has no parameters, but needs heads of an even width
        head_width = self.d_model // self.n_head
        positions = 'rope' if head_width % 2 == 0 else 'alibi'
        return ModelConfig(**shape, attn='llama', mlp='llama', positions=positions)


def normal_param(*shape: int, std: float) -> nn.Parameter:
    """Return a matrix of weights. It is not an nn.Linear, since CEM also uses W_Q and V
    transposed."""
    return nn.Parameter(torch.empty(shape).normal_(std=std))


class RMSNorm(nn.Module):
    """Algorithm 1's rms with a gain: x / sqrt(mean(x^2) + eps) * gain over the last dimension."""
    def __init__(self, dim: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, NORM_EPS)


class Positions(NamedTuple):
    """What attention needs to know about queries i and keys j besides their vectors."""
    distance: Tensor  # i - j, (I, J): below 0 for keys after the query
    mask: Tensor | None  # 0 where i may attend to j, -inf elsewhere, (I, J); None: torch's causal
    cos: Tensor | None = None  # cosines of RoPE's angles at the queries, (I, R / 2)
    sin: Tensor | None = None  # their sines
    cache: 'Cache | None' = None  # what is kept of past tokens, while text is generated


class Cache:
    """The KV cache, which saves `generate` from running the model on past tokens again. It holds
    keys, values unless they are the keys, half keys with key_shift, and h if scores need it.
    Without options these are G R numbers per token and layer for CEM, and 2 G R for Llama (without
    grouped queries G R is D). Sublayers append in the same order in each forward pass. If you edit
    a model so that tokens mix outside attention, call generate(use_cache=False)."""
    def __init__(self) -> None:
        self.length = 0  # how many tokens have been read
        self.buffers: list[Tensor] = []  # (..., J or more, width) each
        self.next = 0  # the index of the buffer that the next `append` is for
        self.W_O: dict[nn.Module, Tensor] = {}  # each CEM attention's preconditioned W_O

    def append(self, new: Tensor) -> Tensor:
        """Append the new tokens' rows (..., I, width) to those of past tokens. Return all rows,
        (..., J, width)."""
        n, J = self.next, self.length + new.shape[-2]
        self.next += 1
        if n == len(self.buffers):  # the first pass
            self.buffers.append(new)
            return new
        room = self.buffers[n].shape[-2]
        if room < J:  # make room for twice as many tokens
            self.buffers[n] = F.pad(self.buffers[n], (0, 0, 0, 2 * J - room))
        self.buffers[n][..., self.length:J, :] = new
        return self.buffers[n][..., :J, :]

    def numbers_per_token(self) -> int:
        """Return how many numbers are kept per token, in all layers."""
        return sum(part[0].numel() // part.shape[-2] for part in self.buffers)


def previous(x: Tensor) -> Tensor:
    """Return x (..., J, D) of the previous token at each position, and zeros at the first."""
    return F.pad(x, (0, 0, 1, -1))


def shift_half(first: Tensor, second: Tensor) -> Tensor:
    """Return vectors (..., I, R) whose first half is the previous token's, given both halves:
    `second` (..., I, R / 2) of some tokens, and `first` (..., J, R / 2) also of those before."""
    return torch.cat([previous(first)[..., -second.shape[-2]:, :], second], dim=-1)


def make_positions(cfg: ModelConfig, x: Tensor, cache: Cache | None = None,
                   table: tuple[Tensor, Tensor] | None = None) -> Positions:
    """Return the positions of x (B, I, D), which follows the tokens that a cache holds. `table` is
    a rope_table of enough positions; by default it is made."""
    past = 0 if cache is None else cache.length
    end = past + x.shape[1]
    i = torch.arange(past, end, device=x.device)[:, None]
    distance = (i - torch.arange(end, device=x.device)).to(exact_dtype(x))
    # Without a bias the mask is None: attend then asks torch for its own causal attention, which
    # makes no mask. To edit the mask, begin with causal_mask(distance)
    mask = causal_mask(distance) if cfg.has_bias() or past > 0 else None
    cos = sin = None
    if cfg.positions == 'rope':
        cos, sin = table or rope_table(cfg, x, end)
        cos, sin = cos[past:end], sin[past:end]
    return Positions(distance, mask, cos, sin, cache)


def rope_table(cfg: ModelConfig, x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE's angles i theta^(-2r/R) at positions i below `length`,
    (length, R / 2) each, on the device of x."""
    R, options = cfg.d_model // cfg.n_head, dict(device=x.device, dtype=exact_dtype(x))
    frequencies = cfg.rope_theta ** (-torch.arange(0, R, 2, **options) / R)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def exact_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or float64 for float64: bfloat16 is only exact for integers up to 256."""
    return torch.promote_types(x.dtype, torch.float32)


def causal_mask(distance: Tensor) -> Tensor:
    """Return 0 where i - j is 0 or more, and -inf for keys after the query."""
    return torch.zeros_like(distance).masked_fill_(distance < 0, -torch.inf)


class BaseAttention(nn.Module):
    """What both kinds of attention share: the norm, W_Q and W_K, and o_i = sum_j alpha_ijk v_j with
    alpha = softmax_j(a_ijk). The scores are a_ijk = k_j . q_i / tau + bias_ijk."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D, K = cfg.d_model, cfg.n_head
        self.cfg, self.K, self.R = cfg, K, D // K
        # The temperature of the scores: by default sqrt(D_r) for Llama, sqrt(D_h) for CEM
        self.tau = math.sqrt(self.R if cfg.score_scale == 'head' else D)
        self.norm = RMSNorm(D)
        self.W_Q = normal_param(D, D, std=cfg.init_std)  # W_k^Q is its k-th block of R rows
        self.W_K = normal_param(cfg.n_kv_head * self.R, D, std=cfg.init_std)
        if cfg.positions == 'alibi':  # learned biases of a token's own key and of all others
            self.b_self = nn.Parameter(torch.zeros(K))
            self.b_cross = nn.Parameter(torch.zeros(K))
        if cfg.match_bias == 'token':  # ours: a weight for each feature, and one for each head
            self.match_diag = nn.Parameter(torch.ones(D))
            self.match_weight = nn.Parameter(torch.zeros(K))
        # The key-query diagonal: a vector d_k for each head, or one for all. It has no weight
        # decay, though it has two dimensions. Ours: with kq_diag=scaled d_k is g_k d
        self.kq_diag = None
        if cfg.kq_diag == 'scaled':
            self.kq_diag = nn.Parameter(torch.ones(1, D))  # d
            self.diag_weight = nn.Parameter(torch.zeros(K))  # g_k
        elif cfg.kq_diag != 'none':
            self.kq_diag = nn.Parameter(torch.zeros(1 if cfg.kq_diag == 'shared' else K, D))
        # Whether a step adds the diagonal's part of the gradient, which Algorithm 1 leaves out
        self.adds_diagonal = cfg.exact_update or cfg.kq_diag == 'scaled'
        self.kernel: Any = None  # a faster `attend` without a cache: nanocem/triton_attention.py

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.R)).transpose(1, 2)  # (B, I, K R) -> (B, K, I, R)

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(-2)  # (B, K, I, R) -> (B, I, D)

    def keys(self, h: Tensor, pos: Positions) -> Tensor:
        """Return the keys W_k^K h_j, (B, G, I, R), before RoPE. Ours: with key_shift=half the first
        R / 2 numbers of each key are the previous token's. A head can then look for what follows a
        token."""
        k = self.split_heads(F.linear(h, self.W_K))
        if self.cfg.key_shift == 'half':
            first, second = k.chunk(2, dim=-1)
            first = first if pos.cache is None else pos.cache.append(first)
            k = shift_half(first, second)
        return k

    def rotate(self, x: Tensor, pos: Positions, inverse: bool = False) -> Tensor:
        """With RoPE rotate x (B, K, I, R) by Rot(i) at each position i, or back by Rot(i)^T. With
        ALiBi return x itself."""
        if self.cfg.positions == 'alibi':
            return x
        # Rotate as (B, I, K, R), which is the layout in memory: attention then needs no copy
        a, b = x.transpose(1, 2).chunk(2, dim=-1)
        cos, sin = pos.cos[:, None], pos.sin[:, None]
        sin = -sin if inverse else sin
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return rotated.type_as(x).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor, pos: Positions, u: Tensor, h: Tensor) -> Tensor:
        """Return a_ijk = k_j . q_i / tau + bias_ijk, (B, K, I, J)."""
        b = self.bias(pos, u, h)
        if b is None:
            b = causal_mask(pos.distance)
        return (q / self.tau) @ k.mT + b

    def bias(self, pos: Positions, u: Tensor, h: Tensor) -> Tensor | None:
        """Return what is added to the products of queries and keys, (B, K, I, J) or a shape that
        broadcasts, for u (B, I, D) and h (B, J, D). None stands for only the causal mask."""
        # The causal mask: -inf for keys after the query
        b = pos.mask
        # ALiBi: -m_k (i - j), and learned biases of a token's own key and of all others
        if self.cfg.positions == 'alibi':
            slopes = alibi_slopes(self.K, pos.distance)[:, None, None]
            b_self = self.b_self[:, None, None]
            b_cross = self.b_cross[:, None, None]
            b = b + torch.where(pos.distance == 0, b_self, b_cross) - slopes * pos.distance
        # The key-query diagonal (Eq. 12)
        if self.kq_diag is not None:
            b = b + self.diagonal_scores(u, h)
        # Ours: compare the query's token with the one before the key
        if self.cfg.match_bias == 'token':
            b = b + self.match_weight[:, None, None] * self.match(h, pos)[:, None]
        return b

    def match(self, h: Tensor, pos: Positions) -> Tensor:
        """Return (match_diag * h_i) . h_(j-1) / sqrt(D), (B, I, J), for h (B, J, D), whose last I
        tokens are the queries'."""
        h_i = h[:, -pos.distance.shape[0]:]
        return (h_i * (self.match_diag / math.sqrt(h.shape[-1]))) @ previous(h).mT

    def diagonal_scores(self, u: Tensor, h: Tensor) -> Tensor:
        """Return h_j . (d_k * u_i) / tau, (B, 1 or K, I, J). RoPE does not rotate them."""
        a = self.diagonal_queries(u) @ h[:, None].mT
        if self.cfg.kq_diag == 'scaled':  # one product for all heads
            a = self.diag_weight[:, None, None] * a
        return a

    def diagonal_queries(self, u: Tensor) -> Tensor:
        """Return d_k * u_i / tau, (B, 1 or K, I, D), whose products with h_j are added to the
        scores. For kq_diag=scaled, return d * u_i / tau: `diagonal_scores` multiplies by g_k."""
        return u[:, None] * (self.kq_diag[:, None] / self.tau)

    def softmax_attention(self, q: Tensor, k: Tensor, v: Tensor, pos: Positions, u: Tensor,
                          h: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return o_i = sum_j alpha_ijk v_j, (B, K, I, R), for q (B, K, I, R), k and v (B, K, J, R);
        and diagonal_update, (B, I, D), or 0 where it is not part of the update."""
        alpha = self.scores(q, k, pos, u, h).softmax(dim=-1)     # alpha_ijk <- softmax_j(a_ijk)
        alpha = alpha.type_as(v)
        diagonal = self.diagonal_update(alpha, h) if self.adds_diagonal else 0
        return alpha @ v, diagonal

    def diagonal_update(self, alpha: Tensor, h: Tensor) -> Tensor:
        """Return the part of minus the gradient, (B, I, D), that kq_diag=scaled adds, for alpha
        (B, K, I, J): d * sum_j (sum_k g_k alpha_ijk) h_j, one product for all heads. Llama has no
        other diagonal."""
        alpha = (self.diag_weight[:, None, None] * alpha).sum(dim=1)
        return self.kq_diag * (alpha.type_as(h) @ h)

    # The rest is not in Algorithm 1: shared heads, past tokens, and faster ways to the same sums

    def context(self, k: Tensor, v: Tensor, h: Tensor, pos: Positions) -> tuple[Tensor, ...]:
        """Return what queries attend to, keys and values (B, K, J, R) and h (B, J, D), given those
        of the new tokens, (B, G, I, R) and (B, I, D). A cache adds the past tokens, to h only if
        scores need it. Values that are the keys stay the keys."""
        tied = v is k
        if pos.cache is not None:
            k = pos.cache.append(k)
            v = k if tied else pos.cache.append(v)
            h = pos.cache.append(h) if self.cfg.needs_h() else h
        k = self.repeat(k)
        v = k if tied else self.repeat(v)
        return k, v, h

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat each head of keys or values, (B, G, J, R), for the K / G consecutive heads of
        queries that share it: (B, K, J, R)."""
        return x[:, :, None].expand(-1, -1, self.K // x.shape[1], -1, -1).flatten(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pos: Positions, u: Tensor,
               h: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return what softmax_attention returns, by the fastest implementation. Only
        softmax_attention computes diagonal_update; where a step has none, it is 0."""
        # A GPU's kernel, which train.py sets, and compares with the lines below
        if self.kernel is not None and pos.cache is None:
            o = self.kernel(self, q, k, v, pos, u, h)            # None where it cannot
            if o is not None:
                return o, 0
        # Torch's own attention, if its causal mask is enough, or on a GPU if there is no
        # diagonal_update
        if pos.mask is None or (q.is_cuda and not self.adds_diagonal):
            return fused_attention(q, k, v, self.bias(pos, u, h), self.tau), 0
        # The scores of all queries at once, if there are few. (torch.export records only one
        # branch, and its graph must take any number of queries)
        if torch.compiler.is_exporting() or q.shape[2] <= FEW_QUERIES:
            return self.softmax_attention(q, k, v, pos, u, h)
        return self.attend_in_parts(q, k, v, pos, u, h)

    def attend_in_parts(self, q: Tensor, k: Tensor, v: Tensor, pos: Positions, u: Tensor,
                        h: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return what softmax_attention returns, for one part of the queries at a time. Each
        part leaves out the keys after it: four parts compute 5/8 of all scores."""
        I, past = q.shape[2], k.shape[2] - q.shape[2]
        size = max(FEW_QUERIES, math.ceil(I / 4))
        outputs, diagonals = [], []
        for start in range(0, I, size):
            end = min(start + size, I)
            queries, keys = slice(start, end), slice(past + end)
            # RoPE is done by now: cos and sin stay as they are
            part = pos._replace(distance=pos.distance[queries, keys],
                                mask=pos.mask[..., queries, keys])
            o, diagonal = self.softmax_attention(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], part, u[:, queries], h[:, keys])
            outputs.append(o)
            diagonals.append(diagonal)
        diagonal = torch.cat(diagonals, dim=1) if self.adds_diagonal else 0
        return torch.cat(outputs, dim=2), diagonal


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, tau: float) -> Tensor:
    """Return sum_j softmax_j(k_j . q_i / tau + bias_ijk) v_j, (B, K, I, R), by torch's kernels,
    which keep few scores in memory. A bias that is None is the causal mask."""
    R = q.shape[-1]
    if bias is not None:
        bias = bias.to(q.dtype)  # the kernels require q's dtype, though bfloat16 rounds the bias
        if q.is_cuda and R % 8 > 0:  # with a bias, a GPU's kernel needs R to be a multiple of 8
            q, k, v = (F.pad(x, (0, -R % 8)) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, bias, scale=1 / tau, is_causal=bias is None)
    return o[..., :R]


def alibi_slopes(n_head: int, like: Tensor) -> Tensor:
    """Return ALiBi's slopes m_k, (K,): 2^-k, the paper's example; 2^(-8k/K) above 8 heads. They
    have the dtype and device of `like`."""
    k = torch.arange(1, n_head + 1, dtype=like.dtype, device=like.device)
    return 2.0 ** (-8 / max(8, n_head) * k)


class LlamaAttention(BaseAttention):
    """Multi-head attention with four matrices; cfg.tie ties two or all of them, as CEM does. Norm
    and residual are inside."""
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        D, std = cfg.d_model, cfg.init_std
        # W_O is stored in blocks of rows, like W_Q, and used as o @ W_O
        self.W_V = None if cfg.ties('kv') else normal_param(cfg.n_kv_head * self.R, D, std=std)
        self.W_O = None if cfg.ties('qo') else normal_param(D, D, std=std)

    def forward(self, x: Tensor, pos: Positions) -> Tensor:
        """Return x plus the attention output, (B, I, D)."""
        # Project the normed input to queries, keys and values
        u = h = self.norm(x)                                     # in CEM h stays, and u moves on
        q = self.split_heads(F.linear(h, self.W_Q))              # (B, K, I, R)
        k = self.keys(h, pos)                                    # (B, G, I, R)
        v = k if self.cfg.ties('kv') else self.split_heads(F.linear(h, self.W_V))
        # With RoPE, rotate queries and keys by their positions
        q = self.rotate(q, pos)
        k = self.rotate(k, pos)
        # Gather the context: past tokens from a cache, keys and values for all K heads
        k, v, h_all = self.context(k, v, h, pos)                 # (B, K, J, R), h_all: (B, J, D)
        # Ours: with value_shift=half the first R / 2 numbers of each value are the previous token's
        if self.cfg.value_shift == 'half':
            v = shift_half(*v.chunk(2, dim=-1))                  # (B, K, J, R)
        # Attend to the context
        o, diagonal = self.attend(q, k, v, pos, u, h_all)        # (B, K, I, R)
        # Merge the heads, project, and add to the residual stream
        W_O = self.W_Q if self.cfg.ties('qo') else self.W_O
        return x + self.merge_heads(o) @ W_O + diagonal          # ours: diagonal; by default 0


class CEMAttention(BaseAttention):
    """T steps down the interaction energy: each is -eta P d energy / du. The gradient ties W_V to
    W_K, and W_O to W_Q (Eq. 5). With kq_diag=shared or per_head Algorithm 1 leaves a part of it
    out, which exact_update=True adds.

    Ours: an energy ties W_O only to how the queries depend on u. With untied_output the queries are
    W_Q h + W_O (u - h). With ALiBi, score_scale=head and residual=raw, one step of length 1 without
    P is then Llama's attention with W_V = W_K."""
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        D, std = cfg.d_model, cfg.init_std
        self.T, self.eta = cfg.attn_steps, cfg.attn_step_size
        self.W_O = normal_param(D, D, std=std) if cfg.untied_output else None  # or else W_Q
        self.P = Preconditioner(cfg, cfg.n_head, cfg.attn_rank)

    def forward(self, x: Tensor, pos: Positions) -> Tensor:
        """Take the steps of Algorithm 1, MHA, for all i and k at once: (B, I, D) -> (B, I, D)."""
        # Project the normed input to keys, which are also the values and stay fixed for all steps
        h = self.norm(x)                                         # h_j <- rms(x_j), (B, I, D)
        k = self.keys(h, pos)                                    # k_j <- W_k^K h_j, (B, G, I, R)
        k = self.rotate(k, pos)                                  # rope: k_j <- Rot(j) k_j
        v = k                                                    # v_j <- k_j: W_V is W_K
        # Gather the context: past tokens from a cache, keys and values for all K heads
        k, v, h_all = self.context(k, v, h, pos)                 # (B, K, J, R), h_all: (B, J, D)
        # The output matrix is W_Q again (ours: with untied_output W_O), with P folded in
        W_O = self.output_weight(pos.cache)                      # (D, D), blocks W_k^Q P_k
        # Algorithm 1 starts from the norm. Ours, raw: start from the residual stream itself
        if self.cfg.residual == 'normed':
            x = h                                                # x_i <- h_i
        for _ in range(self.T):
            # Project the current state to queries
            u = self.norm(x)                                     # u_i <- rms(x_i); raw: at first h
            q = self.queries(u, h)                               # q_i <- W_k^Q u_i, (B, K, I, R)
            q = self.rotate(q, pos)                              # rope: q_i <- Rot(i) q_i
            # Attend to the context
            o, diagonal = self.attend(q, k, v, pos, u, h_all)    # o_i <- sum_j softmax(a_ijk) v_j
            o = self.rotate(o, pos, inverse=True)                # rope: o_i <- Rot(i)^T o_i
            # Merge the heads, project, and take one gradient step on the energy. The diagonal's
            # part of the gradient is 0 by default
            dx = self.merge_heads(o) @ W_O + diagonal            # dx_i <- sum_k P_k W_k^Q^T o_i
            x = x + self.eta * dx                                # x_i <- x_i + eta dx_i
        return x

    def queries(self, u: Tensor, h: Tensor) -> Tensor:
        """Return the queries W_k^Q u_i, (B, K, I, R), before RoPE, for u and h (B, I, D). With
        untied_output: W_k^Q h_i + W_k^O (u_i - h_i)."""
        if self.cfg.untied_output:
            return self.split_heads(F.linear(h, self.W_Q) + F.linear(u - h, self.W_O))
        return self.split_heads(F.linear(u, self.W_Q))

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """Return eps(u_i | h_1:i) = -tau sum_k log sum_j exp(a_ijk) (Eq. 2 with biases), (B, J),
        for normed u and h of the same shape."""
        require_one_shape(u, h)
        pos = make_positions(self.cfg, h)
        q = self.rotate(self.queries(u, h), pos)
        k = self.rotate(self.keys(h, pos), pos)
        k = self.repeat(k)
        return -self.tau * self.scores(q, k, pos, u, h).logsumexp(dim=-1).sum(dim=1)

    def diagonal_update(self, alpha: Tensor, h: Tensor) -> Tensor:
        """Return the diagonal's part of minus the gradient, (B, I, D), for alpha (B, K, I, J):
        sum_k P_k (d_k * sum_j alpha_ijk h_j)."""
        if self.cfg.kq_diag == 'scaled':  # one product for all heads
            return super().diagonal_update(alpha, h)
        return self.P(self.kq_diag[:, None] * (alpha @ h[:, None])).sum(dim=1)

    def output_weight(self, cache: Cache | None = None) -> Tensor:
        """Return the preconditioned W_O (Eq. 14), (D, D). Its k-th block of R rows is W_k^O P_k,
        the transpose of P_k W_k^O^T, since P_k is symmetric. W_k^O is W_k^Q, unless untied_output
        gives it weights of its own. A cache keeps the product for later tokens."""
        if cache is not None and self in cache.W_O:
            return cache.W_O[self]
        W_O = self.W_O if self.cfg.untied_output else self.W_Q
        W_O = self.P(W_O.unflatten(0, (self.K, -1))).flatten(0, 1)
        if cache is not None:
            cache.W_O[self] = W_O
        return W_O


class LlamaMLP(nn.Module):
    """Gated MLP with three untied matrices. Norm and residual are inside. The paper's gate gamma is
    the factor without SiLU: W is Hugging Face's up_proj, and V its gate_proj."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(cfg.d_model)
        self.W = normal_param(cfg.d_mlp, cfg.d_model, std=cfg.init_std)
        self.V = normal_param(cfg.d_mlp, cfg.d_model, std=cfg.init_std)
        self.W_d = normal_param(cfg.d_mlp, cfg.d_model, std=cfg.init_std)  # like V: CEM ties them

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the MLP's output, (B, I, D)."""
        # Project the normed input to gamma and to z, which gets the SiLU
        h = self.norm(x)
        gamma = F.linear(h, self.W)                              # (B, I, D_v)
        z = F.linear(h, self.V)
        # Apply the activation, and multiply the two
        g = gamma * F.silu(z)
        # Project down, and add to the residual stream
        return x + g @ self.W_d


class CEMMLP(nn.Module):
    """T steps down the element-wise energy: each is -eta P d energy / du. The gradient ties the
    down projection to V (Eq. 11)."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg, self.T, self.eta = cfg, cfg.mlp_steps, cfg.mlp_step_size
        # With mlp_match=params, two matrices have as many parameters as Llama's three
        width = cfg.d_mlp * 3 // 2 if cfg.mlp_match == 'params' else cfg.d_mlp
        self.norm = RMSNorm(cfg.d_model)
        self.W = normal_param(width, cfg.d_model, std=cfg.init_std)
        self.V = normal_param(width, cfg.d_model, std=cfg.init_std)
        self.P = Preconditioner(cfg, 1, cfg.mlp_rank)

    def forward(self, x: Tensor) -> Tensor:
        """Take the steps of Algorithm 1, MLP, for all i at once: (B, I, D) -> (B, I, D)."""
        # Project the normed input to gamma, which stays fixed for all steps
        h = self.norm(x)                                         # h_i <- rms(x_i)
        gamma = F.linear(h, self.W)                              # gamma = W h_i, (B, I, D_v)
        # Algorithm 1 starts from the norm. Ours, raw: start from the residual stream itself
        if self.cfg.residual == 'normed':
            x = h                                                # x_i <- h_i
        for _ in range(self.T):
            # Project the current state up
            u = self.norm(x)                                     # u_i <- rms(x_i)
            z = F.linear(u, self.V)                              # V u_i
            # Apply the activation, and multiply by gamma
            g = gamma * self.phi_prime(z, gamma)                 # gamma * phi'(V u_i)
            # Project down, and take one gradient step on the energy
            dx = self.P(g @ self.V)                              # dx_i <- P V^T g (Eq. 15)
            x = x + self.eta * dx                                # x_i <- x_i + eta dx_i
        return x

    def phi_prime(self, z: Tensor, gamma: Tensor) -> Tensor:
        """Return the activation of z = V u: SiLU, or for sign_convex the sigmoid of sign(gamma) z,
        which is the derivative of softplus."""
        if self.cfg.mlp_energy == 'sign_convex':
            return torch.sigmoid(z * straight_through_sign(gamma))
        return F.silu(z)

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """Return xi(u | h) = -gamma . phi(V u), gamma = W h (Eq. 7), (B, J), for normed u and h of
        the same shape. phi is the integral of SiLU. With sign_convex, -|gamma| . phi(sign(gamma) *
        V u) and phi = softplus."""
        require_one_shape(u, h)
        gamma, z = F.linear(h, self.W), F.linear(u, self.V)
        gamma, z = gamma.to(exact_dtype(gamma)), z.to(exact_dtype(z))
        if self.cfg.mlp_energy == 'sign_convex':
            z = z * straight_through_sign(gamma)
            return -(gamma.abs() * F.softplus(z)).sum(dim=-1)
        return -(gamma * phi(z)).sum(dim=-1)


def straight_through_sign(x: Tensor) -> Tensor:
    """Return sign(x), with the gradient of x (the paper's straight-through estimator): the sign's
    own is 0, and gamma would get none through it."""
    return x.sign().detach() + (x - x.detach())


class Preconditioner(nn.Module):
    """Apply n symmetric (D, D) matrices P = diag(softplus(sqrt(D) diag)) + left right^T +
    right left^T (Eq. 13, whose U and V are left and right). No P is formed in memory."""
    def __init__(self, cfg: ModelConfig, n: int, rank: int):
        super().__init__()
        D = cfg.d_model
        # Without these parameters P is the identity
        self.diag = self.left = self.right = None
        if cfg.preconditioner != 'none':
            # The paper's diagonal starts at 1, and so P at softplus(1) I = 1.31 I. The diagonal is
            # stored divided by sqrt(D), so that a step of Adam changes it by the same relative
            # amount as a weight
            self.diag = nn.Parameter(torch.full((n, D), D ** -0.5))  # n vectors: no weight decay
        if cfg.preconditioner == 'diag_lowrank':
            self.left = normal_param(n, D, rank, std=0.02)
            self.right = nn.Parameter(torch.zeros(n, D, rank))

    def forward(self, rows: Tensor) -> Tensor:
        """Apply each of the n matrices to its m rows, (..., n, m, D), or one to (B, I, D)."""
        out = rows
        if self.diag is not None:
            D = rows.shape[-1]
            diagonal = F.softplus(D ** 0.5 * self.diag)
            out = rows * diagonal[:, None]
        if self.left is not None:
            # Both low-rank parts in one product: [left, right] [right, left]^T
            left_right = torch.cat([self.left, self.right], dim=-1)
            right_left = torch.cat([self.right, self.left], dim=-1)
            out = out + (rows @ left_right) @ right_left.mT
        return out


# The layers that the options attn and mlp can name. To add one, write a class whose constructor
# takes a ModelConfig, and give it a name here. It may use the options of CEM's layers. If it has
# norm, T, eta and energy, train.py and evaluate.py measure its steps (docs/new_energy.py)
ATTENTION: dict[str, type] = {'llama': LlamaAttention, 'cem': CEMAttention}
MLP: dict[str, type] = {'llama': LlamaMLP, 'cem': CEMMLP}


class Block(nn.Module):
    """One layer (Algorithm 1, Main Block). A sublayer with reuse > 1 is applied again to its own
    output, with a fresh context: the paper's plain layer reuse."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn = ATTENTION[cfg.attn](cfg)
        self.mlp = MLP[cfg.mlp](cfg)
        self.attn_reuse, self.mlp_reuse = cfg.attn_reuse, cfg.mlp_reuse

    def forward(self, x: Tensor, pos: Positions) -> Tensor:
        for _ in range(self.attn_reuse):
            x = self.attn(x, pos)
        for _ in range(self.mlp_reuse):
            x = self.mlp(x)
        return x


class Transformer(nn.Module):
    """A causal language model: embedding, blocks, norm, untied head. The initial values are

        the embedding                                        normal, standard deviation 1
        the head and all matrices of attention and MLP       normal, standard deviation init_std
        left of P                                            normal, standard deviation 0.02
        right of P                                           0
        diag of P                                            1 / sqrt(D)
        gains of the norms, match_diag, scaled's kq_diag     1
        kq_diag, b_self, b_cross, match_weight, diag_weight  0

    Save the options, vars(cfg), beside the weights: attn_steps, residual and others change the
    computation, but no parameter's name or shape."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embedding = normal_param(cfg.vocab_size, cfg.d_model, std=EMBEDDING_STD)
        self.head = normal_param(cfg.vocab_size, cfg.d_model, std=cfg.init_std)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.d_model)
        # RoPE's cosines and sines, made once: a compiler would compute them again in every layer.
        # They are not buffers, because .bfloat16() would round those
        self.table = None
        if cfg.positions == 'rope':
            self.table = rope_table(cfg, self.embedding, cfg.context_length)

    def forward(self, idx: Tensor, targets: Tensor | None = None, next_only: bool = False,
                cache: Cache | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Without targets return the logits (B, I, vocabulary) of ids (B, I), with targets (B, I)
        their mean loss; the other of the two is None. Targets of -100 are ignored (nanoGPT: -1).
        With next_only return only next_logits, (B, vocabulary). With a cache the ids follow those
        that it has. ValueError for targets of another shape."""
        if next_only:
            return self.next_logits(idx, cache), None
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f'targets {tuple(targets.shape)}: expected a target for each token')
        x = self.hidden(idx, cache)
        if targets is None:
            return F.linear(x, self.head), None
        return None, self.loss(x, targets)

    def hidden(self, idx: Tensor, cache: Cache | None = None) -> Tensor:
        """Map ids (B, I), which follow those in the cache, to the head's input, (B, I, D)."""
        x = F.embedding(idx, self.embedding)
        pos = self.positions(x, cache)
        if cache is not None:
            cache.next = 0
        for block in self.blocks:
            x = block(x, pos)
        if cache is not None:
            cache.length += idx.shape[1]
        return self.norm(x)

    def positions(self, x: Tensor, cache: Cache | None = None) -> Positions:
        """Return the positions of x (B, I, D), which follows the tokens in the cache. RoPE's table
        is made anew if x is longer, on another device, or of another dtype."""
        if self.table is not None:
            cos, _ = self.table
            end = x.shape[1] + (0 if cache is None else cache.length)
            fits = cos.device == x.device and cos.dtype == exact_dtype(x) and cos.shape[0] >= end
            if not fits:
                with torch.inference_mode(False):  # training may follow: no inference tensor
                    self.table = rope_table(self.cfg, x, max(end, cos.shape[0]))
        return make_positions(self.cfg, x, cache, self.table)

    def next_logits(self, idx: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of the token after ids (B, I), which follow those in the cache:
        (B, vocabulary)."""
        logits = F.linear(self.hidden(idx, cache)[:, -1], self.head)
        return logits.to(exact_dtype(logits))  # generate samples from them

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy for x from `hidden`, (B, I, D), and targets (B, I)."""
        x, targets = x.flatten(0, 1), targets.flatten()
        few, at_once = FEW_LOGITS['cuda' if x.is_cuda else 'cpu']
        vocab_size = self.head.shape[0]
        if x.shape[0] * vocab_size > few:
            rows = max(1, at_once // vocab_size // 128) * 128  # 128 at least: whole tiles
            total = LossInParts.apply(x, self.head, targets, rows)
        else:
            total = sum_losses(F.linear(x, self.head), targets)
        # If no target counts, the mean is NaN and the gradients are 0, as in torch
        n = (targets != -100).sum()
        return torch.where(n > 0, total / n.clamp(min=1), torch.nan)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
                 top_k: int | None = None, generator: torch.Generator | None = None,
                 use_cache: bool = True) -> Tensor:
        """Continue ids (B, J), J > 0, to (B, J + max_new_tokens). Temperature 0 chooses the
        likeliest token. When the context is full, its last half becomes the context, so that the
        cache is refilled once per half context, and not at each token."""
        length = self.cfg.context_length
        start = max(0, idx.shape[1] - length)  # the first token of the context
        cache = Cache() if use_cache else None
        for _ in range(max_new_tokens):
            if idx.shape[1] - start > length:  # the context is full
                start = idx.shape[1] - max(1, length // 2)
                cache = Cache() if use_cache else None
            # Read the ids that are not in the cache yet. Call the module, not next_logits, so that
            # forward hooks run and FSDP gathers the weights
            unread = start if cache is None else start + cache.length
            logits, _ = self(idx[:, unread:], next_only=True, cache=cache)
            if top_k is not None:  # keep exactly top_k logits, even if some are equal
                top = logits.topk(min(top_k, logits.shape[-1]))
                logits = torch.full_like(logits, -torch.inf).scatter(-1, top.indices, top.values)
            # Choose or sample the next token, and append it
            if temperature == 0:
                next_ids = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
            else:
                p = (logits / temperature).softmax(dim=-1)
                next_ids = torch.multinomial(p, 1, generator=generator)
            idx = torch.cat([idx, next_ids], dim=1)
        return idx

    def set_steps(self, attn_steps: int | None = None, mlp_steps: int | None = None) -> None:
        """Change T, but not eta; None keeps T. cfg keeps the T of training. ValueError if T < 1,
        or for a sublayer that takes no steps."""
        for name, T in (('attn', attn_steps), ('mlp', mlp_steps)):
            if T is None:
                continue
            require(T >= 1, f'{name}_steps={T}: expected 1, 2, 3, ...')
            sublayers = [getattr(block, name) for block in self.blocks]
            with_steps = [sublayer for sublayer in sublayers if hasattr(sublayer, 'T')]
            require(len(with_steps) > 0, f'{name}_steps={T}: a Llama sublayer takes no steps; '
                    'expected a CEM one')
            for sublayer in with_steps:
                sublayer.T = T

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())


# The loss

def sum_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of -log p of the targets (N,) for logits (N, vocabulary), in float32 at least.
    Targets of -100 are ignored."""
    logits = logits.to(exact_dtype(logits))
    return F.cross_entropy(logits, targets, reduction='sum')


class LossInParts(torch.autograd.Function):
    """sum_losses(F.linear(x, W), targets) for x (N, D), W (vocabulary, D) and targets (N,), `rows`
    rows at a time. forward computes the gradients, too, so that no logits are kept."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, targets: Tensor, rows: int) -> Tensor:
        total, dx = 0, []
        dW = torch.zeros_like(W, dtype=exact_dtype(W))
        for part, target in zip(x.split(rows), targets.split(rows), strict=True):
            logits = F.linear(part, W)                           # (rows, vocabulary)
            dlogits, losses = torch.func.grad_and_value(sum_losses)(logits, target)
            total = total + losses
            dx.append((dlogits @ W).to(x.dtype))
            dW += dlogits.mT @ part
        ctx.save_for_backward(torch.cat(dx), dW.to(W.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # autograd would take dx and dW for constants, and be wrong
            raise RuntimeError('no second derivative of a loss in parts: set FEW_LOGITS higher')
        dx, dW = ctx.saved_tensors
        return grad * dx, grad * dW, None, None


# Only for energies

def require_one_shape(u: Tensor, h: Tensor) -> None:
    """ValueError unless u and h have the same shape: otherwise they would broadcast silently."""
    require(u.shape == h.shape, f'u {tuple(u.shape)}, h {tuple(h.shape)}: expected a state u for '
            'each h')


# The same code is in energy.py, because each of the two files must run alone
# B_2n / (2n + 1)! for n = 1 to 7, with Bernoulli's numbers B_2n
SERIES = [B / math.factorial(2 * n + 1) for n, B in enumerate(
    (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6), start=1)]


def phi(z: Tensor) -> Tensor:
    """The integral of SiLU: phi(z) = z L + Li2(-e^z), where L = log(1 + e^z) and
    Li2(-e^z) = -L - L^2 / 4 - sum_n B_2n L^(2n+1) / (2n + 1)!"""
    m = torch.where(z > 0, -z, z)                    # -|z|: then L <= log 2; seven terms suffice
    L = m.exp().log1p()
    square, series = L ** 2, 0
    for coefficient in reversed(SERIES):             # the sum over n, divided by L^3
        series = series * square + coefficient
    left = m * L - L - square / 4 - L ** 3 * series  # phi(-|z|)
    right = m ** 2 / 2 - torch.pi ** 2 / 6 - left    # phi(|z|), by inversion of Li2
    return torch.where(z > 0, right, left)


# Options: defaults and checks

def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def check_values(cfg: ModelConfig) -> None:
    """ValueError unless each option is, as its type demands, one of its allowed words, a bool or a
    number above 0. Values of NumPy's types are converted to Python's."""
    for name, kind in get_type_hints(type(cfg)).items():
        value = getattr(cfg, name)
        if type(None) in get_args(kind):  # X | None
            if value is None:
                continue
            kind = get_args(kind)[0]
        if kind is bool:
            ok, expected = type(value).__name__ in ('bool', 'bool_'), 'True or False'
        elif kind in (int, float):
            number = numbers.Integral if kind is int else numbers.Real
            is_number = isinstance(value, number) and not isinstance(value, bool)
            ok = is_number and 0 < value < math.inf
            expected = 'a whole number from 1' if kind is int else 'a number above 0'
        else:
            layers = {'attn': ATTENTION, 'mlp': MLP}
            words = [*layers[name]] if name in layers else get_args(kind)
            ok, expected = value in words, f'one of {", ".join(words)}'
            kind = str  # a Literal cannot be called
        require(ok, f'{name}={value}: expected {expected}')
        setattr(cfg, name, kind(value))


def default_values(cfg: ModelConfig) -> dict[str, Any]:
    """Return the defaults of the fields that depend on other fields."""
    size = SIZES[cfg.size or '134m']
    D, R = cfg.d_model or size['d_model'], size['d_model'] // size['n_head']
    # The largest number of heads that divides D, with heads at least as wide as the size's
    n_head = next((K for K in range(D // R, 1, -1) if D % K == 0), 1)
    llama = cfg.attn == 'llama'
    return dict(
        d_model=D, n_layer=size['n_layer'],
        n_head=n_head, n_kv_head=cfg.n_head or n_head,
        # For a width other than the size's, 8/3 D rounded up to an even number, as in all sizes
        d_mlp=size['d_mlp'] if size['d_model'] == D else 2 * math.ceil(4 * D / 3),
        init_std=0.02 * math.sqrt(768 / D),
        attn_step_size=1 / cfg.attn_steps, mlp_step_size=1 / cfg.mlp_steps,
        positions='rope' if llama else 'alibi', score_scale='head' if llama else 'model')


def resolve_defaults(cfg: ModelConfig) -> None:
    """Set the fields that are None to their defaults, and size to the one with this shape, or else
    to None."""
    for name, value in default_values(cfg).items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)
    shape = {name: getattr(cfg, name) for name in SIZES['nano']}
    cfg.size = next((size for size, preset in SIZES.items() if preset == shape), None)


def unused_options(cfg: Any) -> dict[str, str]:
    """Return the options that this model does not use, each with the setting that would use it."""
    # A custom layer may use all of CEM's options
    cem_attn, cem_mlp = cfg.attn != 'llama', cfg.mlp != 'llama'
    groups = [
        ('attn=llama', cfg.attn == 'llama', ['tie', 'value_shift']),
        ('attn=cem', cem_attn, ['attn_steps', 'attn_step_size', 'attn_rank', 'score_scale',
                                'exact_update', 'untied_output']),
        ('mlp=cem', cem_mlp, ['mlp_steps', 'mlp_step_size', 'mlp_rank', 'mlp_energy', 'mlp_match']),
        ('attn=cem or mlp=cem', cem_attn or cem_mlp, ['preconditioner', 'residual']),
        ('preconditioner=diag_lowrank', cfg.preconditioner == 'diag_lowrank',
         ['attn_rank', 'mlp_rank']),
        ('positions=rope', cfg.positions == 'rope', ['rope_theta'])]
    unused: dict[str, str] = {}
    for setting, holds, names in groups:
        if not holds:
            for name in names:
                unused.setdefault(name, setting)
    return unused


def check_combination(cfg: ModelConfig) -> None:
    """ValueError for an option that this model does not use, or that contradicts another."""
    defaults = vars(ModelConfig) | default_values(cfg)  # a dataclass keeps defaults as attributes
    for name, setting in unused_options(cfg).items():
        value, default = getattr(cfg, name), defaults[name]
        require(value == default,
                f'{name}={value} is only for {setting}: set that, or else {name}={default}')
    R = cfg.d_model / cfg.n_head
    llama = cfg.attn == 'llama'
    diagonal = f'kq_diag={cfg.kq_diag}'
    require(R.is_integer(), f'd_model={cfg.d_model} is not a multiple of n_head={cfg.n_head}')
    require(cfg.n_head % cfg.n_kv_head == 0,
            f'n_head={cfg.n_head} is not a multiple of n_kv_head={cfg.n_kv_head}')
    for name, value in (('positions', 'rope'), ('key_shift', 'half'), ('value_shift', 'half')):
        require(getattr(cfg, name) != value or R % 2 == 0,
                f'{name}={value}: d_model / n_head = {R:g} is odd, expected an even number')
    require(cfg.value_shift == 'none' or not cfg.ties('kv'), f'value_shift={cfg.value_shift}: with '
            f'tie={cfg.tie} the values are the keys: set key_shift, or else value_shift=none')
    require(not llama or cfg.kq_diag in ('none', 'scaled'),
            f'{diagonal} is only for attn=cem: set that, or else kq_diag=none or scaled')
    require(not cfg.exact_update or cfg.kq_diag in ('shared', 'per_head'), 'exact_update needs a '
            'diagonal whose gradient is left out: set kq_diag=shared or per_head')
    require(llama or cfg.kq_diag != 'scaled' or cfg.preconditioner == 'none',
            f'{diagonal} sums over heads before P_k could act on each: set preconditioner=none')

"""
Attend in ways that keep few scores in memory. This file needs torch alone.

    readable               the lines in model.py
    blockwise              the same for a block of queries at a time, without the keys after it
    sdpa                   torch's fused attention; on a CPU it has no second derivatives
    automatic              the fastest of these

A plug takes the place of a method on one object. It is a functools.partial of a function, since
torch.save and deepcopy can copy that, and model.plugs has the function by the method's name.
trial.py says whether a plug computes what the method did.

Shapes: B batch, I queries, J keys (J = I, or more with a cache), D width, K heads, R = D / K.
"""
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT_CONTEXT = 256  # up to here, blockwise attention compiled for a CPU is faster than sdpa
BLOCK = 64  # the smallest block of queries in blockwise attention


def blockwise(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None = None,
              h: Tensor | None = None) -> Tensor:
    """Attend as model.py does, in at most four blocks of queries. A block leaves out the keys after
    it, so four blocks compute 5/8 of all scores. Returns (B, K, I, R)."""
    I = q.shape[2]
    size = max(BLOCK, math.ceil(I / 4))
    outputs = []
    for begin in range(0, I, size):
        end = min(begin + size, I)
        block = slice(begin, end)
        # A copy of the named tuple, with these positions alone
        block_pos = pos._replace(distance=pos.distance[block, :end], mask=pos.mask[block, :end])
        for name in ('match', 'pair_match'):
            if (match := getattr(pos, name)) is not None:
                block_pos = block_pos._replace(**{name: match[:, block, :end]})
        u_and_h = (None, None) if u is None else (u[:, block], h[:, :end])
        a = attn.scores(q[:, :, block], k[:, :, :end], block_pos, *u_and_h)  # (B, K, size, end)
        alpha = a.softmax(dim=-1).type_as(v)
        outputs.append(alpha @ v[:, :, :end])
    return torch.cat(outputs, dim=2)


def sdpa(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None = None,
         h: Tensor | None = None) -> Tensor:
    """Attend with torch's fused attention, whose mask is causal, or the biases: (B, K, I, R). On a
    CPU it has no second derivatives."""
    I, R = q.shape[2:]
    bias = attn.bias(pos)
    # Without a bias, torch's causal mask suits a whole sequence, and a single query needs none. An
    # edited bias is no longer the mask itself
    if not has_bias(attn) and bias is pos.mask and I in (1, k.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, scale=1 / attn.tau, is_causal=I > 1)
    if attn.cfg.kq_diag != 'none':
        bias = bias + attn.scaled_diagonal(u) @ h[:, None].mT
    # With a bias, the fused kernel needs widths that are multiples of 8
    pad = (8 - R % 8) % 8
    if pad > 0:
        q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=1 / attn.tau)
    return o[..., :R]


def has_bias(attn: Any) -> bool:
    """Return whether something but the causal mask is added to the products of queries and keys."""
    cfg = attn.cfg
    return cfg.positions == 'alibi' or cfg.kq_diag != 'none' or cfg.match_bias != 'none'


def choose_attention(attn: Any, device: torch.device, compiled: bool = False) -> str:
    """Return which of readable, blockwise and sdpa is the fastest on this device."""
    if attn.cfg.exact_update:  # it attends to h, whose width is D, a second time
        return 'readable'
    # On a CPU torch's fused attention has no backward pass for a bias. Without a bias it is the
    # fastest, unless blockwise attention is compiled for a short context
    compiled_and_short = compiled and attn.cfg.context_length <= SHORT_CONTEXT
    if device.type == 'cuda' or not (has_bias(attn) or compiled_and_short):
        return 'sdpa'
    return 'blockwise'


def automatic(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None = None,
              h: Tensor | None = None) -> Tensor:
    """Attend in the fastest of these ways. A compiled model runs a smaller last batch uncompiled,
    and there another way can be the fastest: so the choice is made at each call."""
    chosen = choose_attention(attn, q.device, torch.compiler.is_compiling())
    attend = {'readable': type(attn).attend, 'blockwise': blockwise, 'sdpa': sdpa}[chosen]
    return attend(attn, q, k, v, pos, u, h)


# Plugs

def plug(model: Any, name: str, function: Callable, owners: list[Any]) -> None:
    """Let function(owner, ...) take the place of the method of this name on each of the owners."""
    for owner in owners:
        setattr(owner, name, partial(function, owner))
    model.plugs = {**vars(model).get('plugs', {}), name: function}


def unplug(model: Any, name: str, owners: list[Any]) -> None:
    """Let the owners' own method run again. One that someone else has put there is their own."""
    for owner in owners:
        if is_plug(model, name, owner):
            delattr(owner, name)
    model.plugs = {other: f for other, f in vars(model).get('plugs', {}).items() if other != name}


def is_plug(model: Any, name: str, owner: Any) -> bool:
    """Return whether what runs as the method of this name is a plug."""
    function = getattr(vars(owner).get(name), 'func', None)
    return function is not None and function is vars(model).get('plugs', {}).get(name)


def plug_attention(model: Any, attend: Callable) -> None:
    """Let all layers attend by attend(attn, q, k, v, pos, u, h)."""
    plug(model, 'attend', attend, [block.attn for block in model.blocks])


def unplug_attention(model: Any) -> None:
    unplug(model, 'attend', [block.attn for block in model.blocks])

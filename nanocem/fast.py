"""
Plug faster functions into a model of model.py, on the device that it is on: attention.py's, the
GPU kernels of triton_attention.py, and the loss in parts of loss.py. trial.py tries each first.

Shapes: B batch, I queries, D width, K heads, R = D / K.
"""
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from configurator import warn
from model import Transformer
from nanocem.attention import (
    automatic,
    blockwise,
    choose_attention,
    has_bias,
    plug,
    plug_attention,
    sdpa,
    unplug,
    unplug_attention,
)
from nanocem.loss import cross_entropy, find_loss_error
from nanocem.trial import agrees, values_are_keys

HAS_TRITON = importlib.util.find_spec('triton') is not None


def plug_in(model: Transformer, impl: str = 'auto', dtype: torch.dtype = torch.float32,
            compiled: bool = False) -> str:
    """Plug attention and loss into a model that stays on its device, and whose products are in
    dtype. Return the name of the attention that runs. With impl=readable it is model.py's again."""
    plug_loss(model)
    unplug_attention(model)
    attn, device = model.blocks[0].attn, model.head.device
    # A GPU has other kernels for a multiple of 16 than for 300, whose last tile is cut off
    lengths = (300, 256) if device.type == 'cuda' else None
    for name in candidates(attn, impl, device, dtype):
        if name == 'auto':
            # A compiled model runs a smaller last batch uncompiled: automatic chooses at each call
            name, function = choose_attention(attn, device, compiled), automatic
            tried = {name, choose_attention(attn, device)}
        else:
            tried, function = {name}, FUNCTIONS[name]
        if all(agrees(model, FUNCTIONS[other], other, dtype, lengths) for other in sorted(tried)):
            plug_attention(model, function)
            return name
    return 'readable'


def candidates(attn: Any, impl: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return which implementations to try, the first one first: none for the readable lines."""
    cfg = attn.cfg
    if impl == 'readable' or cfg.exact_update:  # the exact update attends to h, whose width is D
        return []
    if impl in ('blockwise', 'sdpa'):
        return [impl]
    # The kernels need values that equal the keys, have room for one diagonal beside the match bias,
    # and pay only with a bias
    tied = values_are_keys(cfg)
    wanted = impl == 'triton' or device.type == 'cuda'
    one_match = cfg.match_bias == 'none' or (cfg.match_bias == 'token'
                                             and cfg.kq_diag != 'per_head')
    kernels_fit = tied and has_bias(attn) and one_match
    if wanted and kernels_fit and runs_triton(device, dtype, cfg.d_model // attn.K):
        return ['triton', 'auto']
    return ['auto']


def runs_triton(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return whether there are Triton kernels for this device and dtype, and heads of this width R.
    Whether they compute the right numbers is tried later."""
    if not HAS_TRITON or head_width > 128:
        return False
    if os.environ.get('TRITON_INTERPRET') == '1':  # on a CPU, in tests; without bfloat16
        return device.type == 'cpu' and dtype in (torch.float16, torch.float32)
    return device.type == 'cuda' and dtype in (torch.float16, torch.bfloat16)


def triton_kernels(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None = None,
                   h: Tensor | None = None) -> Tensor:
    """Attend by the kernels of triton_attention.py, which read k alone: other values are attended
    to in another way. Returns (B, K, I, R)."""
    # A sample at the end has no autocast. In an edited layer v may be no longer k
    if v is not k or not runs_triton(q.device, q.dtype, q.shape[-1]):
        return automatic(attn, q, k, v, pos, u, h)
    from nanocem import triton_attention
    b = None
    if attn.cfg.positions == 'alibi':  # softmax depends on the difference of the biases alone
        b = attn.b_self - attn.b_cross
    d_u = None if attn.cfg.kq_diag == 'none' else attn.scaled_diagonal(u)
    w = None if attn.cfg.match_bias == 'none' else attn.match_weight
    q, k = attn.merge_heads(q), attn.merge_heads(k)  # (B, I, D)
    return attn.split_heads(triton_attention.attention(
        q, k, attn.K, 1 / attn.tau, d_u, h, b, pos.match, w))


FUNCTIONS = {'blockwise': blockwise, 'sdpa': sdpa, 'triton': triton_kernels}


# Loss

def loss_in_parts(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    """Return model.py's loss. Of many logits it is computed in parts, which are not kept."""
    return cross_entropy(x, model.head, targets)


def plug_loss(model: Transformer) -> None:
    """Plug the loss in parts into the model, if it is what the model's own lines compute for random
    inputs; else print a line on stderr that says what differs."""
    unplug(model, 'loss', [model])
    if wrong := find_loss_error(model):
        warn(f'the loss in parts {wrong}: it is not used')
    else:
        plug(model, 'loss', loss_in_parts, [model])

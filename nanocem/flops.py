"""FLOPs of training a model."""
import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def flops_per_token(model: Any) -> float:
    """Count the FLOPs of training per token, at full context. A multiply-add counts as two, and a
    backward pass as two forward passes. Keys after a query do not count, though some are computed.
    NaN for a model.py of one's own that does not run on torch's meta device."""
    try:
        # Torch counts the products of a forward pass of n tokens: a n + b n^2 + c. The squares are
        # attention's. Folding P into weights is the constant
        two, three, four = (count_products(model, n) for n in (2, 3, 4))
    except Exception:  # of any kind
        return math.nan
    b = (four - 2 * three + two) / 2
    a = three - two - 5 * b
    mean_context = (model.cfg.context_length + 1) / 2  # average number of keys up to the query
    return 3 * (a + b * mean_context)


def count_products(model: Any, n: int) -> int:
    """Return the FLOPs of the matrix products of a forward pass of n tokens, without computing."""
    with (torch.device('meta'), torch.enable_grad(), FlopCounterMode(display=False) as counter,
          sdpa_kernel(SDPBackend.MATH)):  # the products in a fused attention are not counted
        type(model)(model.cfg)(torch.zeros(1, n, dtype=torch.long))
    return counter.get_total_flops()

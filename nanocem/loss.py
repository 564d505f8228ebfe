"""Losses as they are measured: summed in float64, over targets that count."""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

NO_TARGET = -100  # a token with this target does not count, as in F.cross_entropy


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss in nats of each target (B, J) of logits (B, J, vocabulary): (B, J), float64,
    on the CPU. It is 0 for targets of -100."""
    # Compute a sequence at a time: float32 logits take much memory
    return torch.stack([
        F.cross_entropy(row.float(), y, reduction='none', ignore_index=NO_TARGET)
        for row, y in zip(logits, targets, strict=True)]).cpu().double()


def sum_losses(logits: Tensor, targets: Tensor, is_text: Tensor) -> Tensor:
    """Return three sums over the targets (B, J) of logits (B, J, vocabulary): their number, their
    loss in nats, and the loss of those where is_text (B, J) is True. (3,), float64, on the CPU.
    Targets of -100 count in none."""
    losses = token_losses(logits, targets)
    n_targets = (targets != NO_TARGET).sum().cpu()
    return torch.stack([n_targets, losses.sum(), losses[is_text].sum()])


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity from a loss of 50 on, which only a diverged model has."""
    return math.inf if loss >= 50 else math.exp(loss)  # NaN stays NaN

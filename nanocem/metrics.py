"""Losses summed over tokens, perplexity, and tables of such numbers."""
import math
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocem.loss import NO_TARGET

Losses = dict[tuple[str, int], float]  # y of (model, seed), for the runs of one size


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


def split_failed(y: Losses) -> tuple[Losses, set[str]]:
    """Return the losses of runs that did not fail, and the models with failed runs. A run fails if
    y is not finite, or 0.5 nats above the median of the model's seeds."""
    finished = {}
    for (model, seed), loss in y.items():
        median = statistics.median(other for (name, _), other in y.items() if name == model)
        if loss < min(math.inf, median + 0.5):
            finished[model, seed] = loss
    return finished, {model for model, seed in y if (model, seed) not in finished}


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in lines)

"""What a run's losses say: steps to skip, spikes, and a model that does not learn."""
import math
import statistics
from collections.abc import Iterator
from typing import Any


def perplexity(loss: float) -> float:
    """exp(loss); finite for any finite loss."""
    return math.exp(min(loss, 700.0))


class Health:
    """The losses of the last 100 steps, and how many steps were skipped for their numbers. Kept in
    a checkpoint as vars(health)."""
    def __init__(self) -> None:
        self.recent: list[float] = []
        self.skipped = 0
        self.in_a_row = 0  # of those, up to now

    def look(self, step: int, loss: float, norm: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in a step's loss and gradient norm; yields what is to be said, and logged."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.in_a_row += 1
            self.skipped += 1
            yield (f'step {step} skipped: loss {loss}, gradient norm {norm}',
                   dict(event='skipped', loss=loss, grad_norm=norm))
            return
        self.in_a_row = 0
        if len(self.recent) >= 20:
            mean = statistics.fmean(self.recent)
            if loss > mean + max(0.5, 6 * statistics.stdev(self.recent)):
                yield (f'step {step}: loss spike, {loss:.3f} after {mean:.3f}',
                       dict(event='spike', loss=loss))
        self.recent = [*self.recent[-99:], loss]

    def no_context(self, entropy: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Whether the loss is still what a model reaches that sees no context: `entropy`, that of
        its data's single tokens. A model that learns is far below it soon after the warm-up."""
        mean = statistics.fmean(self.recent or [math.inf])
        if mean > 0.93 * entropy:
            yield (f'WARNING: no context learned yet: the loss, {mean:.2f}, has not left the '
                   f'unigram entropy of the data, {entropy:.2f}; try a lower learning_rate or '
                   'another residual', dict(event='no context', loss=mean))

"""The learning rate over a run, and over one whose length was changed on the way."""
import math
from dataclasses import dataclass, replace


@dataclass
class Schedule:
    """The learning rate of step 0, 1, ..., steps - 1: a linear warm-up to `peak`, then a cosine
    from `share` of it at step `start` down to `final` of it at the last."""
    steps: int
    warmup: int  # steps
    peak: float
    final: float
    start: int
    share: float = 1.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * self.share_at(step)

    def share_at(self, step: int) -> float:
        progress = min(1.0, (step - self.start) / max(1, self.steps - 1 - self.start))
        return self.final + (self.share - self.final) * (1 + math.cos(math.pi * progress)) / 2

    def extended(self, steps: int, step: int) -> 'Schedule':
        """Another length, decided after `step` steps: from the rate reached there, without a jump,
        a cosine down to the same end. A finished run goes on at its last rate."""
        start = max(step, self.warmup)
        return replace(self, steps=steps, start=start, share=self.share_at(start))

"""
The rules for verdicts, as functions of the losses y of one size's runs.

y is a run's loss in nats per Llama token, and d is the mean of y(A) - y(B) over the n seeds that
both models have. The interval of d is

    d +- t(1 - 0.025 / m; f) sqrt((s_A^2 + s_B^2) / n)      m: comparisons (Bonferroni)

where s is the standard deviation of a run, with f degrees of freedom. The first family
(results/tokens/RULE.md) pools all models of a size, the second (results/tokens/second/RULE.md)
those of one kind, the third (results/tokens/third/RULE.md) those of one kind at all its sizes.

A claim holds if the interval lies inside its bounds, does not hold if it lies outside, and is
otherwise undecided. If a run failed, the claim does not hold.
"""
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

from nanocem.metrics import Losses, split_failed


class Effect(NamedTuple):
    """The difference d of the y of A and B at a size, half of its interval, and the differences of
    the seeds. d is infinite if a run failed; without an interval, half_width is NaN."""
    size: str
    d: float
    half_width: float = math.nan
    by_seed: Mapping[int, float] = {}

    def percent(self) -> list[float]:
        """Return the change in perplexity and the ends of its interval."""
        return [100 * math.expm1(self.d + x) for x in (0, -self.half_width, self.half_width)]

    def __str__(self) -> str:
        d, low, high = self.percent()
        by_seed = sorted(self.by_seed.items())
        seeds = ', '.join(f'{n}: {100 * math.expm1(x):+.1f}' for n, x in by_seed)
        interval = '' if math.isnan(low) else f' ({low:+.1f} to {high:+.1f}; seeds {seeds})'
        return f'{self.size} failed' if math.isinf(d) else f'{self.size} {d:+.1f}%{interval}'


def residual_error(tables: Sequence[Losses], means_of_seeds: bool) -> tuple[float, int]:
    """Fit a mean for each model of each table and, with means_of_seeds, one for each seed. Return
    the standard deviation of the residuals of all tables, and its degrees of freedom."""
    residuals, freedom = [], 0
    for y in tables:
        columns = sorted({(n, cell[n]) for cell in y for n in range(1 + means_of_seeds)})
        design = np.array([[float(cell[n] == name) for n, name in columns] for cell in y])
        values = np.array(list(y.values()))
        fit, _, rank, _ = np.linalg.lstsq(design, values)
        residuals.append(values - design @ fit)
        freedom += len(y) - int(rank)
    return float(np.linalg.norm(np.concatenate(residuals))) / math.sqrt(freedom), freedom


def compare(y: Losses, A: str, B: str, size: str, m: int, kinds: Mapping[str, Any],
            others: Sequence[Losses] = ()) -> Effect | None:
    """Compare two models at a size, one of m comparisons. None if no seed has both. `kinds` has the
    kind of each model for the rules of later families; without them it is that of the first. The
    third family estimates noise from `others`, the losses at its other sizes, too."""
    finished, failed = split_failed(y)
    if {A, B} & failed:
        return Effect(size, math.inf)
    d = {seed: loss - finished[B, seed] for (model, seed), loss in finished.items()
         if model == A and (B, seed) in finished}
    if len(d) < 2:
        return Effect(size, *d.values()) if d else None

    # Estimate the noise of A and of B from all models of their kinds
    noise = []
    for kind in kinds.get(A), kinds.get(B):
        tables = [{cell: loss for cell, loss in table.items() if kinds.get(cell[0]) == kind}
                  for table in (finished, *(split_failed(other)[0] for other in others))]
        noise.append(residual_error([table for table in tables if table], not kinds))
    (s_A, f_A), (s_B, f_B) = noise
    variance, freedom = s_A ** 2 + s_B ** 2, f_A
    if kinds.get(A) != kinds.get(B):  # Welch and Satterthwaite
        freedom = variance ** 2 / (s_A ** 4 / f_A + s_B ** 4 / f_B)
    half_width = student.ppf(1 - 0.025 / m, freedom) * math.sqrt(variance / len(d))
    return Effect(size, statistics.fmean(d.values()), float(half_width), d)


def decide(effect: Effect, above: float, below: float) -> str:
    """Return the verdict for bounds in per cent; an empty text if there is no interval."""
    _, low, high = effect.percent()
    if above < low and high < below:
        return 'holds'
    if math.isinf(effect.d) or high < above or low > below:
        return 'does not hold'
    return '' if math.isnan(low) else 'undecided'

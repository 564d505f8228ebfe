"""
The paper's claims as comparisons of runs, and what each says.

A comparison is paired: both sides have read the same data in the same order, so a seed's
difference is one number, the log of A's perplexity over B's. At one size: its mean and 95% interval
(the paired t-test). Over sizes: a straight line in log N, read at the largest size that was run.
What is said of a claim follows from that line alone, by `verdict` and `direction`.
"""
import csv
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.stats import linregress
from scipy.stats import t as student

from nanocem.files import table

SPLITS = {'test': 'Test', 'val': 'Validation'}  # the texts whose perplexity a run has
LITTLE, CLOSE = 0.01, 0.02

Results = Mapping[Any, dict[str, Any]]  # a run (its size, model, rate and seed) -> its numbers


class Comparison(NamedTuple):
    """`kind` is what is claimed of A's perplexity against B's: better, worse; no better: by less
    than 1%; close: at most 2% worse; alike: within 2% either way; higher: of A's best rate. `of`:
    the runs at each model's own rate, or those of the sweeps, by the best rate that was run: these
    rates, the perplexities there, or both at B's."""
    text: str
    kind: Literal['better', 'worse', 'no better', 'close', 'alike', 'higher']
    A: str
    B: str
    of: Literal['own', 'rate', 'best', 'fixed'] = 'own'


P = 'diagonal + low rank P'
CLAIMS: dict[str, tuple[str, list[Comparison]]] = {
    'a': ('CEM attention, T = 1: close to Llama with half the attention weights', [
        Comparison(f'CEM attention, {P}, against Llama', 'close', 'attn-1', 'llama'),
        Comparison('CEM attention, no P, against Llama', 'close', 'attn-1-none', 'llama'),
        Comparison(f'CEM attention, {P}, against Llama with ALiBi, ours', 'close', 'attn-1',
                   'llama-alibi'),
        Comparison('CEM attention, no P, against Llama with ALiBi', 'close', 'attn-1-none',
                   'llama-alibi')]),
    'b': ('CEM MLP, T = 1: worse dimension-matched, a little better parameter-matched', [
        Comparison('CEM MLP, no P, same width', 'worse', 'mlp-1-none', 'llama'),
        Comparison('CEM MLP, no P, same weights', 'better', 'mlp-1-none-params', 'llama')]),
    'c': ('T = 2 beats T = 1 for both; attention at T = 2 can beat Llama', [
        Comparison(f'attention, {P}, T = 2 against 1', 'better', 'attn-2', 'attn-1'),
        Comparison('attention, no P, T = 2 against 1', 'better', 'attn-2-none', 'attn-1-none'),
        Comparison(f'MLP, {P}, T = 2 against 1', 'better', 'mlp-2', 'mlp-1'),
        Comparison('MLP, no P, T = 2 against 1', 'better', 'mlp-2-none', 'mlp-1-none'),
        Comparison('all-CEM, T = 2 against 1', 'better', 'cem-2', 'cem-1'),
        Comparison(f'attention, {P}, T = 2, against Llama', 'better', 'attn-2', 'llama')]),
    'd': ('no consistent gain at T = 3', [
        Comparison('attention, T = 3 against 2', 'no better', 'attn-3', 'attn-2'),
        Comparison('MLP, T = 3 against 2', 'no better', 'mlp-3', 'mlp-2')]),
    'e': ('preconditioners make little difference', [
        Comparison(f'{kind}, T = {T}, {name} P against none', 'alike', f'{layer}-{T}{end}',
                   f'{layer}-{T}-none')
        for kind, layer in (('attention', 'attn'), ('MLP', 'mlp')) for T in (1, 2)
        for name, end in (('diagonal', '-diag'), ('diagonal + low rank', ''))]),
    'f': ('a diagonal in A_k is essential; one shared by the heads is close to one per head', [
        Comparison('T = 1, shared against none', 'better', 'attn-1', 'attn-1-nodiag'),
        Comparison('T = 2, shared against none', 'better', 'attn-2', 'attn-2-nodiag'),
        Comparison('T = 1, shared against per head', 'close', 'attn-1', 'attn-1-perhead')]),
    'g': ('plain layer reuse gives little or nothing, recursion within the layer does', [
        Comparison('Llama, MLP twice against once', 'no better', 'llama-mlp-twice', 'llama'),
        Comparison('Llama, attention twice against once', 'no better', 'llama-attn-twice', 'llama'),
        Comparison('CEM MLP, same weights, T = 2 against 1', 'better', 'mlp-2-params',
                   'mlp-1-params')]),
    'h': ('all-CEM, T = 2, trains stably and comes near Llama with fewer weights', [
        Comparison('all-CEM, T = 2, against Llama', 'close', 'cem-2', 'llama'),
        Comparison('all-CEM, T = 2, against Llama with ALiBi, ours', 'close', 'cem-2',
                   'llama-alibi')]),
    'i': ('CEM prefers a higher learning rate', [
        Comparison('best rate, all-CEM T = 2 over Llama', 'higher', 'cem-2', 'llama', 'rate'),
        Comparison('all-CEM T = 2 against Llama, each at its best rate', 'close', 'cem-2', 'llama',
                   'best'),
        Comparison("the same, both at Llama's best rate", 'close', 'cem-2', 'llama', 'fixed')]),
    'j': ('deeper recursion helps, not monotonically', []),  # synthetic_gp.py's
    'k': ('exact RoPE against ALiBi with a diagonal (ours)', [
        *(Comparison(f'all-CEM, T = {T}', 'better', f'rope-{T}', f'cem-{T}') for T in (1, 2)),
        *(Comparison(f'CEM attention, T = {T}', 'better', f'attn-{T}-rope', f'attn-{T}')
          for T in (1, 2))]),
}


# Differences, and the line through them.

def differences(test: Comparison, size: str, own: Results, swept: Results, split: str,
                ) -> list[float]:
    """The log ratios of A over B at a size, of the seeds that both have. A sweep counts from three
    rates on."""
    runs, fewest = (own, 1) if test.of == 'own' else (swept, 3)
    losses: dict[tuple[str, int], dict[float, float]] = {}  # model, seed -> rate -> loss
    for run, result in runs.items():
        if run.size == size:
            by_rate = losses.setdefault((run.model, run.seed), {})
            by_rate[run.rate] = math.log(result[f'{split}_perplexity'])
    found = []
    for (model, seed), a in losses.items():
        b = losses.get((test.B, seed), {})
        if model != test.A or min(len(a), len(b)) < fewest:
            continue
        best_a, best_b = min(a, key=a.get), min(b, key=b.get)
        if test.of == 'rate':
            found.append(math.log(best_a / best_b))
        elif test.of == 'fixed' and best_b in a:
            found.append(a[best_b] - b[best_b])
        elif test.of != 'fixed':
            found.append(a[best_a] - b[best_b])
    return found


class Estimate(NamedTuple):
    """A log ratio that was read off runs."""
    value: float
    error: float  # its standard error
    freedom: int  # 0: nothing is known of the error

    def interval(self) -> tuple[float, float]:
        """95%."""
        half = student.ppf(0.975, self.freedom) * self.error if self.freedom else math.inf
        return self.value - half, self.value + half

    def p_below(self, bound: float) -> float:
        """How likely so low a value is, were the truth `bound`: small says it lies below."""
        return float(student.cdf((self.value - bound) / max(self.error, 1e-12), self.freedom))

    def __str__(self) -> str:
        """As a change in per cent."""
        low, high = (100 * math.expm1(min(end, 700)) for end in self.interval())
        interval = f' ({low:+.1f} to {high:+.1f})' if self.freedom else ''
        return f'{100 * math.expm1(self.value):+.1f}%{interval}'


def line_through(N: Sequence[float], d: Sequence[float], at: float) -> tuple[Estimate, Estimate]:
    """The line through the differences d at sizes N: its value at size `at`, and what a tenfold N
    adds. With one size it is flat, and the interval the paired t-test's."""
    if len(set(N)) == 1:
        error = statistics.stdev(d) / math.sqrt(len(d)) if len(d) > 1 else 0.0
        return Estimate(statistics.fmean(d), error, len(d) - 1), Estimate(0.0, 0.0, 0)
    line = linregress(np.log10(N) - math.log10(at), d)
    freedom = len(d) - 2
    return (Estimate(float(line.intercept), float(line.intercept_stderr), freedom),
            Estimate(float(line.slope), float(line.stderr), freedom))


# What a line says.

def verdict(kind: str, line: Estimate) -> tuple[str, float]:
    """What is said of a claim, and its two-sided p: below 0.05, where the 95% interval lies on one
    side of a bound, or it is within noise."""
    if not line.freedom:
        return 'within noise', 1.0
    zero, little = line.p_below(0.0), line.p_below(math.log1p(-LITTLE))
    close, far = line.p_below(math.log1p(CLOSE)), line.p_below(math.log1p(-CLOSE))
    holds, fails = {
        'better': (zero, 1 - zero), 'worse': (1 - zero, zero), 'higher': (1 - zero, zero),
        'no better': (1 - little, little), 'close': (close, 1 - close),
        'alike': (max(close, 1 - far), min(1 - close, far))}[kind]
    p = min(1.0, 2 * min(holds, fails))
    return 'within noise' if p >= 0.05 else 'holds' if holds < fails else 'does not hold', p


def direction(kind: str, said: str, line: Estimate, slope: Estimate) -> str:
    """`said` with where the trend goes, if its slope is surely not zero."""
    low, high = slope.interval()
    if low <= 0 <= high:
        return said
    good_sign = {'better': -1, 'close': -1, 'alike': -math.copysign(1, line.value)}.get(kind, 1)
    toward = slope.value * good_sign > 0
    if said == 'within noise':
        return f'within noise, {"nearer" if toward else "farther"} with size'
    if said == 'holds':
        return 'holds and grows' if toward else 'holds, and shrinks with size'
    here = str(line).split()[0]
    trend = f'shrinks to {here} at the largest size' if toward else 'grows with size'
    return f'does not hold, and {trend}'


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjustment for so many comparisons, in the given order."""
    adjusted, highest = [0.0] * len(p), 0.0
    for n, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, (len(p) - n) * p[i]))
        adjusted[i] = highest
    return adjusted


# The table.

class Row(NamedTuple):
    """A comparison's line. `p` is that of what is said; None where nothing was tested."""
    key: str
    text: str
    cells: list[str]  # at each size
    line: str = ''
    slope: str = ''
    said: str = 'not run'
    p: float | None = None


def answer(key: str, test: Comparison, sizes: Mapping[str, float], own: Results, swept: Results,
           split: str) -> Row:
    """A comparison at every size, and what its line says."""
    cells, N, d = [], [], []
    for size, weights in sizes.items():
        values = differences(test, size, own, swept, split)
        here = [weights] * len(values)
        cells.append(str(line_through(here, values, weights)[0]) if values else '')
        N += here
        d += values
    row = Row(key, f'{test.text} ({test.kind})', cells)
    if not d:
        return row
    line, slope = line_through(N, d, max(N))
    said, p = verdict(test.kind, line)
    row = row._replace(line=str(line), said=direction(test.kind, said, line, slope), p=p)
    return row if len(set(N)) == 1 else row._replace(slope=str(slope))


def recursion_on_gp(sizes: Iterable[str], path: str = 'results/gp/blind/table.csv') -> Row:
    """Claim j, from synthetic_gp.py's table under the protocol that has not seen the CEM rows."""
    row = Row('j', 'train RMSE of the Gaussian-process table, blind protocol', ['' for _ in sizes],
              said='not run: python synthetic_gp.py --protocol=blind')
    if not os.path.exists(path):
        return row
    with open(path, encoding='utf-8') as file:
        train = {(r['kernel'], r['model']): float(r['train_rmse']) for r in csv.DictReader(file)}
    kernels = dict.fromkeys(kernel for kernel, _ in train)
    curves = [[train.get((kernel, f'CEM-T{T}'), math.nan) for T in (1, 2, 4, 8)]
              for kernel in kernels]
    two, four, eight = np.sum(np.diff(curves) < 0, axis=0)  # kernels where T is below T / 2
    said = 'holds in part'
    if not two:
        said = 'does not hold'
    elif two == len(kernels) and min(four, eight) < len(kernels):
        said = 'holds'
    return row._replace(said=said, line=f'T = 2 below 1, 4 below 2, 8 below 4 on {two}, {four}, '
                                        f'{eight} of {len(kernels)} kernels')


def pages(sizes: Mapping[str, float], own: Results, swept: Results, split: str,
          ) -> tuple[str, str]:
    """claims.md and a short table, by a split, as far as runs are finished: `own` at
    their models' rates, `swept` over rates. `sizes`: name -> weights of Llama's blocks."""
    rows = []
    for key, (_, tests) in CLAIMS.items():
        rows += [answer(key, test, sizes, own, swept, split) for test in tests]
        if key == 'j':
            rows.append(recursion_on_gp(sizes))

    tested = [n for n, row in enumerate(rows) if row.p is not None]
    adjusted = dict(zip(tested, holm([rows[n].p for n in tested]), strict=True))
    introduction = (
        f'{SPLITS[split]} perplexity of A over that of B, less one, with its 95% interval, paired '
        'by seed; below zero A is better. "No better": by less than 1%; "close": at most 2% worse; '
        '"alike": within 2% either way; "higher": the best rates. What holds at the largest size '
        'and what a tenfold N adds are read off the straight line through all pairs over log N. '
        'Claim i takes the best rate that was run; rates lie a factor of two apart. Holm: the p of '
        f'what is said, adjusted for {len(tested)} comparisons.')
    lines = []
    for n, row in enumerate(rows):
        new = n == 0 or row.key != rows[n - 1].key
        claim = [row.key, CLAIMS[row.key][0]] if new else ['', '']
        firm = f'{adjusted[n]:.3f}' if n in adjusted else ''
        lines.append([*claim, row.text, *row.cells, row.line, row.slope, row.said, firm])
    words = ['', 'claim', 'A against B', *sizes, 'at the largest size', 'a tenfold N adds',
             '', 'Holm']
    short = table(['', 'A against B', 'at the largest size', ''],
                  [[row.key, row.text, row.line, row.said] for row in rows])
    return f'{introduction}\n\n{table(words, lines)}\n', short

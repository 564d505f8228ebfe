"""
The paper's claims as comparisons of runs, and what each says.

A comparison is paired: both sides have read the same data in the same order, so a seed's
difference is one number, the log of A's perplexity over B's, on the test text or, to see how much
of it hangs on that text, on the validation text. At one size: its mean and 95% interval (scipy's
paired t-test). Over sizes: a straight line in log N, read at the largest size that was run. What is
said of a claim follows from that line alone, by `verdict`, `direction`.
"""
import csv
import io
import math
import re
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.interpolate import Akima1DInterpolator
from scipy.stats import ttest_rel

from nanocem.files import write_whole
from nanocem.ladder import SPLITS, Task
from nanocem.records import events_of
from nanocem.scaling import (
    Runs,
    Trend,
    akima_optimum,
    bootstrap_phi,
    equal_flops,
    fit_law,
    trend,
)

Results = Mapping[tuple[str, str], Sequence[dict[str, Any]]]  # (size, model) -> a result a seed
# (size, model) -> seed -> rate -> test perplexity
Sweeps = Mapping[tuple[str, str], Mapping[int, Mapping[float, float]]]
# size -> steps, A's own spikes, shared ones: of runs whose logs are not kept
Counts = Mapping[str, tuple[int, int, int]]

LARGE = 43.4e6  # weights of the paper's smallest Llama, 86m, without its embeddings
LITTLE, CLOSE = 0.01, 0.02
DRAWS = 500  # of the bootstrap


class Comparison(NamedTuple):
    """`kind` is what is claimed of A's perplexity against B's: better, worse; no better: by
    less than 1%; close: at most 2% worse; alike: within 2% either way; higher: of A's best rate;
    none: of A's loss spikes and skipped steps, where B has none at that step. `of`: the runs at
    each model's own carried rate, or the sweeps: their best rates, the perplexities there, or both
    at B's best rate."""
    text: str
    kind: Literal['better', 'worse', 'no better', 'close', 'alike', 'higher', 'none']
    A: str
    B: str = ''
    of: Literal['runs', 'rate', 'best', 'fixed'] = 'runs'


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
                   'llama-alibi'),
        Comparison('loss spikes and skipped steps where Llama has none', 'none', 'cem-2',
                   'llama')]),
    'i': ('CEM prefers a higher learning rate', [
        Comparison('best rate, all-CEM T = 2 over Llama', 'higher', 'cem-2', 'llama', 'rate'),
        Comparison("all-CEM T = 2 against Llama, each at its best rate", 'close', 'cem-2', 'llama',
                   'best'),
        Comparison("the same, both at Llama's best rate", 'close', 'cem-2', 'llama', 'fixed')]),
    'j': ('deeper recursion helps, not monotonically', []),  # synthetic_gp.py's
    'k': ('exact RoPE against ALiBi with a diagonal (ours)', [
        *(Comparison(f'all-CEM, T = {T}', 'better', f'rope-{T}', f'cem-{T}') for T in (1, 2)),
        *(Comparison(f'CEM attention, T = {T}', 'better', f'attn-{T}-rope', f'attn-{T}')
          for T in (1, 2))]),
}


class Row(NamedTuple):
    """A line of the table. `p` is that of what is said, for Holm's adjustment; None where nothing
    was tested."""
    key: str
    claim: str
    text: str
    cells: dict[str, str]
    line: str = ''
    slope: str = ''
    large: str = ''
    said: str = 'not run'
    p: float | None = None


def differences(test: Comparison, size: str, results: Results, sweeps: Sweeps) -> dict[int, float]:
    """seed -> the log ratio of A over B at a size, for the seeds that both have."""
    if test.of == 'runs':
        a, b = ({r['seed']: math.log(r['perplexity']) for r in results.get((size, side), ())}
                for side in (test.A, test.B))
        return {seed: a[seed] - b[seed] for seed in a if seed in b}
    found = {}
    a, b = (sweeps.get((size, side), {}) for side in (test.A, test.B))
    for seed in a:
        if seed in b and min(len(a[seed]), len(b[seed])) > 2:
            found[seed] = sweep_difference(test.of, a[seed], b[seed])
    return found


def sweep_difference(of: str, a: Mapping[float, float], b: Mapping[float, float]) -> float:
    """The same from two sweeps, rate -> perplexity."""
    (x, low), (y, base) = (akima_optimum(sorted(side), [math.log(side[r]) for r in sorted(side)])
                           for side in (a, b))
    if of == 'rate':
        return math.log(x / y)
    if of == 'best':
        return low - base
    rates = sorted(a)
    curve = Akima1DInterpolator(np.log(rates), [math.log(a[r]) for r in rates])
    return float(curve(math.log(min(max(y, rates[0]), rates[-1])))) - base


def verdict(kind: str, low: float, high: float) -> str:
    """What a 95% interval of a log ratio says of a claim."""
    little, close, far = math.log1p(-LITTLE), math.log1p(CLOSE), math.log1p(-CLOSE)
    holds, fails = {
        'better': (high < 0, low > 0), 'worse': (low > 0, high < 0), 'higher': (low > 0, high < 0),
        'no better': (low > little, high < little), 'close': (high < close, low > close),
        'alike': (far < low and high < close, low > close or high < far)}[kind]
    return 'holds' if holds else 'does not hold' if fails else 'within noise'


def p_of(kind: str, line: Trend) -> float:
    """Two-sided p of what `verdict` says: below 0.05 where that is not 'within noise'."""
    bounds = {'no better': [math.log1p(-LITTLE)], 'close': [math.log1p(CLOSE)],
              'alike': [math.log1p(-CLOSE), math.log1p(CLOSE)]}.get(kind, [0.0])
    below = [line.p_below(bound) for bound in bounds]
    above = [1 - p if line.freedom > 0 else 1.0 for p in below]
    if kind == 'alike':
        return min(1.0, 2 * min(max(above[0], below[1]), below[0], above[1]))
    return min(1.0, 2 * min(below[0], above[0]))


def direction(kind: str, line: Trend, said: str) -> str:
    """`said` with where the trend goes, if its slope is surely not zero."""
    low, high = line.slope_interval()
    if low <= 0 <= high:
        return said
    wanted = {'better': -1, 'close': -1, 'alike': -math.copysign(1, line.at)}.get(kind, 1)
    toward = line.slope * wanted > 0
    at = f'{100 * math.expm1(line.at):+.1f}%'
    return {'holds': 'holds and grows' if toward else 'holds, and shrinks with size',
            'does not hold': f'does not hold, and shrinks to {at} at the largest size' if toward
            else 'does not hold, and grows with size',
            'within noise': 'within noise, nearer with size' if toward
            else 'within noise, farther with size'}[said]


def as_percent(middle: float, low: float, high: float) -> str:
    """A log ratio and its interval as a change in per cent."""
    if not math.isfinite(low + high):
        return f'{100 * math.expm1(middle):+.1f}%'
    return (f'{100 * math.expm1(middle):+.1f}% '
            f'({100 * math.expm1(low):+.1f} to {100 * math.expm1(high):+.1f})')


def at_one_size(d: Mapping[int, float]) -> str:
    """Mean and 95% interval of the paired differences, in per cent; one seed has no interval."""
    values = list(d.values())
    if not values:
        return ''
    if len(values) == 1:
        return f'{100 * math.expm1(values[0]):+.1f}%'
    interval = ttest_rel(values, [0.0] * len(values)).confidence_interval()
    return as_percent(statistics.fmean(values), float(interval.low), float(interval.high))


def answer(key: str, claim: str, test: Comparison, sizes: Mapping[str, float], results: Results,
           sweeps: Sweeps, counted: Counts) -> Row:
    """A comparison at every size (name -> Llama's weights), and what its line says."""
    text = f'{test.text} ({test.kind})'
    if test.kind == 'none':
        return events(key, claim, text, test, sizes, results, counted)
    found = {size: differences(test, size, results, sweeps) for size in sizes}
    points = [(sizes[size], d) for size, of in found.items() for d in of.values()]
    cells = {size: at_one_size(of) for size, of in found.items()}
    if not points:
        return Row(key, claim, text, cells)
    N, d = zip(*points, strict=True)
    line, far = trend(N, d, max(N)), trend(N, d, LARGE)
    said = direction(test.kind, line, verdict(test.kind, *line.interval()))
    slope, large = '', ''
    if len(set(N)) > 1:
        slope = as_percent(line.slope, *line.slope_interval())
        large = as_percent(far.at, *far.interval())
    return Row(key, claim, text, cells, as_percent(line.at, *line.interval()), slope, large, said,
               p_of(test.kind, line))


def events(key: str, claim: str, text: str, test: Comparison, sizes: Mapping[str, float],
           results: Results, counted: Counts) -> Row:
    """A's loss spikes and skipped steps. Where B has one at the same step of the same seed, it is
    the batch that is hard: such are counted apart."""
    cells, total = {}, None
    for size in sizes:
        steps, own, shared = counted.get(size, (0, 0, 0))
        a, b = ({r['seed']: (r, at) for r in results.get((size, side), ())
                 if (at := events_of(r)) is not None} for side in (test.A, test.B))
        for seed, (r, at) in a.items():
            if seed in b or not test.B:
                in_b = b[seed][1] if test.B else set()
                steps += r['steps']
                own += len(at - in_b)
                shared += len(at & in_b)
        cells[size] = ''
        if steps:
            cells[size] = f'{own} in {steps:,} steps{f"; {shared} shared" if shared else ""}'
            total = (total or 0) + own
    said = 'not run' if total is None else 'does not hold' if total else 'holds'
    return Row(key, claim, text, cells, said=said)


def recursion_on_gp(path: str = 'results/gp/blind/table.csv') -> Row:
    """Claim j, from synthetic_gp.py's table under the protocol that has not seen the CEM rows."""
    row = Row('j', CLAIMS['j'][0], 'train RMSE of the Gaussian-process table', {},
              said='not run: python synthetic_gp.py --protocol=blind')
    try:
        with open(path, encoding='utf-8') as file:
            lines = list(csv.DictReader(file))
        train = {(r['kernel'], r['model']): float(r['train_rmse']) for r in lines}
        kernels = [kernel for kernel in dict.fromkeys(kernel for kernel, _ in train)
                   if all((kernel, f'CEM-T{T}') in train for T in (1, 2, 4, 8))]
        rmse = np.array([[train[of, f'CEM-T{T}'] for T in (1, 2, 4, 8)] for of in kernels])
    except (OSError, KeyError, ValueError):  # no table, or a damaged one
        return row
    if not kernels:
        return row
    falls = np.diff(rmse) < 0  # (kernels, 3)
    two, four, eight = falls.sum(axis=0)
    said = 'holds in part'
    if not falls[:, 0].any():
        said = 'does not hold'
    elif falls[:, 0].all() and not falls.all():
        said = 'holds'
    line = (f'T = 2 below 1, 4 below 2, 8 below 4 on {two}, {four}, {eight} of {len(kernels)} '
            'kernels')
    return row._replace(line=line, said=said)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjustment for so many comparisons, in the given order."""
    adjusted, highest = [0.0] * len(p), 0.0
    for n, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, (len(p) - n) * p[i]))
        adjusted[i] = highest
    return adjusted


def all_rows(sizes: Mapping[str, float], results: Results, sweeps: Sweeps, counted: Counts,
             ) -> list[Row]:
    """Every claim, answered as far as the runs are finished."""
    rows = []
    for key, (claim, tests) in CLAIMS.items():
        if key == 'j':
            rows.append(recursion_on_gp())
        rows += [answer(key, claim, test, sizes, results, sweeps, counted) for test in tests]
    return rows


def table(rows: Sequence[Row], sizes: Mapping[str, float], split: str = 'test') -> list[str]:
    """The claims in Markdown, every comparison with its numbers."""
    asked = [n for n, row in enumerate(rows) if row.p is not None]
    adjusted = dict(zip(asked, holm([rows[n].p for n in asked]), strict=True))
    lines = [
        f'{SPLITS[split]} perplexity of A over that of B, less one, with its 95% interval, paired '
        'by seed; below zero A is better. "No better": by less than 1%; "close": at most 2% worse; '
        '"alike": within 2% either way; "higher": the best rates. At the largest size, a tenfold '
        f'and {LARGE / 1e6:.1f} M weights are read off the straight line through all pairs over '
        'log N; the last lies far outside what was run and promises nothing. Holm: the p of what '
        f'is said, adjusted for {len(asked)} comparisons.', '',
        f'| | claim | A against B | {" | ".join(sizes)} | at the largest size | a tenfold N adds | '
        f'the line at {LARGE / 1e6:.1f} M | | Holm |', '|' + '---|' * (len(sizes) + 8)]
    last = ''
    for n, row in enumerate(rows):
        first = (row.key, row.claim) if row.key != last else ('', '')
        p = f'{adjusted[n]:.3f}' if n in adjusted else ''
        cells = [row.cells.get(size, '') for size in sizes]
        words = [*first, row.text, *cells, row.line, row.slope, row.large, row.said, p]
        lines.append(f'| {" | ".join(words)} |')
        last = row.key
    return lines


def front_table(rows: Sequence[Row]) -> list[str]:
    """The README's: a line a comparison, only what it says."""
    lines = ['| | claim | at the largest size | |', '|---|---|---|---|']
    last = ''
    for row in rows:
        text = f'{row.claim}: {row.text}' if row.key != last else row.text
        first = row.key if row.key != last else ''
        lines.append(f'| {first} | {text} | {row.line} | {row.said} |')
        last = row.key
    return lines


def into_readme(lines: Sequence[str], path: str = 'README.md') -> None:
    """Put a table between the README's marks, where it has them."""
    with open(path, encoding='utf-8') as file:
        text = file.read()
    whole = '<!-- claims -->\n' + '\n'.join(lines) + '\n<!-- /claims -->'
    new = re.sub('<!-- claims -->.*?<!-- /claims -->', lambda _: whole, text, flags=re.DOTALL)
    if new != text:
        write_whole(path, new.encode())


def pages(sizes: Mapping[str, float], models: Iterable[str], found: Mapping[Task, dict[str, Any]],
          own: Container[Task], swept: Container[Task], counted: Counts, split: str = 'test',
          ) -> tuple[dict[str, str], list[str]]:
    """The finished runs as claims.md, claims.csv and ladder.md; and the README's table. `own`: runs
    at their model's rate; `swept`: those of the sweeps; the rest check the rates. `counted`: spikes
    in runs whose logs are not kept. By validation the files' names say so."""
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    sweeps: dict[tuple[str, str], dict[int, dict[float, float]]] = {}
    others = []
    for task, r in sorted(found.items(), key=lambda item: item[0]):
        at, value = (task.size, task.model), r[f'{split}_perplexity']
        kept = math.isfinite(value)
        if task in own and kept:
            results.setdefault(at, []).append({**r, 'perplexity': value})
        if task in swept and kept:
            sweeps.setdefault(at, {}).setdefault(task.seed, {})[task.rate] = value
        if task not in own and task not in swept:
            others.append(f'{task.model} at {task.size}, rate {task.rate:g}: '
                          f'{f"{value:.3f}" if kept else "not kept"}')
    rows = all_rows(sizes, results, sweeps, counted)
    timed = [r['seconds'] for r in found.values() if math.isfinite(r['seconds'])]
    some = f' for the {len(timed)} whose time was kept' * (len(timed) < len(found))
    page = [*ladder_table(sizes, models, results, split), '',
            f'{len(found)} runs, {sum(timed) / 3600:.1f} hours of one core{some}. Beside the '
            f'carried rates: {"; ".join(others) or "nothing yet"}.', '', *worth(sizes, results), '']
    end = '' if split == 'test' else '_validation'
    return {f'claims{end}.md': '\n'.join([*table(rows, sizes, split), '']),
            f'claims{end}.csv': as_csv(rows, sizes),
            f'ladder{end}.md': '\n'.join(page)}, front_table(rows)


def ladder_table(sizes: Mapping[str, float], models: Iterable[str], results: Results, split: str,
                 ) -> list[str]:
    """Every model at every size: perplexity, learning rate, seeds."""
    lines = [f'{SPLITS[split]} perplexity, mean ± standard deviation; learning rate; seeds.', '',
             f'| model | {" | ".join(sizes)} |', '|' + '---|' * (len(sizes) + 1)]
    for model in models:
        words = []
        for size in sizes:
            of = results.get((size, model), ())
            values = [r['perplexity'] for r in of]
            spread = f' ± {statistics.stdev(values):.3f}' if len(values) > 1 else ''
            words.append(f'{statistics.fmean(values):.3f}{spread}; {of[0]["rate"]:g}; {len(of)}'
                         if of else '')
        if any(words):
            lines.append(f'| {model} | {" | ".join(words)} |')
    return lines


class Recursion(NamedTuple):
    """A kind of layer whose second step is weighed: its models at T = 1 and 2, and which of their
    weights the step uses again."""
    once: str
    twice: str
    weights: tuple[str, ...]


RECURSIONS = {
    'attention': Recursion('attn-1', 'attn-2', ('attn',)),
    'MLP': Recursion('mlp-1', 'mlp-2', ('mlp',)),
    'all-CEM': Recursion('cem-1', 'cem-2', ('attn', 'mlp')),
    'all-CEM, exact RoPE': Recursion('rope-1', 'rope-2', ('attn', 'mlp')),
    "plain reuse of Llama's attention": Recursion('llama', 'llama-attn-twice', ('attn',)),
    "plain reuse of Llama's MLP": Recursion('llama', 'llama-mlp-twice', ('mlp',))}


def runs_of(recursion: Recursion, sizes: Mapping[str, float], results: Results) -> Runs:
    """The finished runs of a recursion, as `fit_law` takes them."""
    rows = []
    for size in sizes:
        for T, model in ((1, recursion.once), (2, recursion.twice)):
            for r in results.get((size, model), ()):
                rec = sum(r['weights'][kind] for kind in recursion.weights)
                once = sum(r['weights'].values()) - rec
                rows.append((once, rec, T, r['seed'], math.log(r['perplexity'])))
    return Runs(*np.array(rows, dtype=float).reshape(-1, 5).T)


def worth(sizes: Mapping[str, float], results: Results) -> list[str]:
    """What a second step is worth, in Markdown: phi with its interval, and its price in FLOPs."""
    lines = [
        'L = E + A (N_once + T^phi N_rec)^-alpha over all sizes and seeds, tokens tied to size; N: '
        "the blocks' weights, N_rec those of the recursed sublayers. phi = 1: a second step is "
        'worth as many new weights, 0: nothing. Interval: 95%, of '
        f'{DRAWS} resamples of sizes and seeds, up to three sizes of seeds only. Void: the misfit '
        'is as large as the difference between T = 1 and 2 (mean over sizes). FLOPs: what T = 2 '
        'takes over T = 1 at each size, and what a T = 1 model as good would take (between sizes, '
        'log FLOPs over log(L - E)): a step pays where the second is the larger.', '',
        '| second step of | phi | misfit, nats | difference | alpha | runs | FLOPs of T = 2 / of '
        'its equal at T = 1, by size |', '|' + '---|' * 7]
    for name, recursion in RECURSIONS.items():
        runs = runs_of(recursion, sizes, results)
        try:
            law = fit_law(runs)
        except ValueError:
            lines.append(f'| {name} | not enough runs | | | | {len(runs.loss)} | |')
            continue
        low, high = np.percentile(bootstrap_phi(runs, DRAWS, seed=1), (2.5, 97.5))
        interval = f'({low:+.2f} to {high:+.2f})'
        if len(set(runs.seed)) == 1 and len(set(runs.once + runs.rec)) < 4:
            interval = '(one seed: no interval)'  # every resample is the sample
        apart = differs(runs)
        void = ', void' if law.misfit >= apart else ''
        price = ', '.join(prices(recursion, sizes, results, law.E))
        lines.append(f'| {name} | {law.phi:+.2f} {interval}{void} | {law.misfit:.4f} | '
                     f'{apart:.4f} | {law.alpha:.2f} | {len(runs.loss)} | {price} |')
    return lines


def differs(runs: Runs) -> float:
    """How far T = 2 lies from T = 1, either way, in nats: of seeds' means, mean over the sizes that
    have both."""
    N = runs.once + runs.rec
    found = []
    for size in np.unique(N[runs.steps == 2]):
        one, two = (runs.loss[(size == N) & (runs.steps == T)] for T in (1, 2))
        if len(one):
            found.append(abs(two.mean() - one.mean()))
    return float(np.mean(found))


def prices(recursion: Recursion, sizes: Mapping[str, float], results: Results, E: float,
           ) -> list[str]:
    """At each size that has both: FLOPs of T = 2 over T = 1, and those of a T = 1 model as good."""
    loss, flops = {}, {}
    for size in sizes:
        for T, model in ((1, recursion.once), (2, recursion.twice)):
            if of := results.get((size, model)):
                loss[size, T] = statistics.fmean(math.log(r['perplexity']) for r in of)
                flops[size, T] = of[0]['tokens'] * of[0]['flops_per_token']
    single = [size for size in sizes if (size, 1) in loss]
    if len(single) < 2:
        return []
    curve = [loss[size, 1] for size in single], [flops[size, 1] for size in single]
    E = min(E, 0.9 * min(loss.values()))
    return [f'{flops[size, 2] / flops[size, 1]:.2f} / '
            f'{equal_flops(loss[size, 2], *curve, E) / flops[size, 1]:.2f}'
            for size in single if (size, 2) in loss]


def as_csv(rows: Sequence[Row], sizes: Mapping[str, float]) -> str:
    """The same table for a program."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(['claim', 'comparison', *sizes, 'at_largest', 'per_tenfold', 'line_at_86m',
                     'said', 'p'])
    for row in rows:
        cells = [row.cells.get(size, '') for size in sizes]
        p = '' if row.p is None else f'{row.p:.4g}'
        writer.writerow([row.key, row.text, *cells, row.line, row.slope, row.large, row.said, p])
    return text.getvalue()

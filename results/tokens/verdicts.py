"""
The verdicts on all claims of the study, computed again from its CSVs.

    python results/tokens/verdicts.py                                print the tables
    python results/tokens/verdicts.py --runs=out/reproduce/runs.csv  your own runs count, too

y is a run's loss in nats per Llama token, and d is the mean of y(A) - y(B) over the n seeds that
both models have. The interval of d is

    d +- t(1 - 0.025 / m; f) sqrt((s_A^2 + s_B^2) / n)      m: comparisons (Bonferroni)

where s is the standard deviation of a run, with f degrees of freedom. A claim holds if the interval
lies inside its bounds, does not hold if it lies outside, and is otherwise undecided. If a run
failed, the claim does not hold.

Each family of claims has a folder with its RULE.md, claims (verdicts.csv), models and runs. What
its rule says of runs and noise is a function; those of the three families here stand in RULES. The
effects are written to effects.csv, beside this file or beside your own runs; `python
results/reproduce.py` draws them.
"""
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

STUDY = Path(__file__).resolve().parent
# configurator.py is two folders above, study.py one
sys.path[:0] = [str(STUDY.parents[1]), str(STUDY.parent)]

import numpy as np
from scipy.stats import t as student

from configurator import PathStr, build, command_line, read_options
from nanocem.files import csv_text, markdown_table, read_csv, write_atomic
from study import (
    TRIAL_SEEDS,
    Losses,
    Row,
    Run,
    load_study,
    planned_cells,
    read_published_rows,
    read_runs,
    split_failed,
)

EFFECTS = STUDY / 'effects.csv'
COLUMNS = ('family', 'id', 'claim', 'A', 'B', 'unit', 'size', 'seeds', 'effect_%', 'low_%',
           'high_%', 'above_%', 'below_%', 'verdict')  # of effects.csv


# The interval of a paired difference

class Noise(NamedTuple):
    """How the runs of a kind of models scatter: by a standard deviation s, which was estimated with
    f degrees of freedom."""
    kind: str
    s: float
    f: int


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
    the standard deviation of the residuals of all tables, and its degrees of freedom. The first is
    NaN if the second is 0."""
    residuals, freedom = [], 0
    for y in tables:
        columns = sorted({(n, cell[n]) for cell in y for n in range(1 + means_of_seeds)})
        design = np.array([[float(cell[n] == name) for n, name in columns] for cell in y])
        values = np.array(list(y.values()))
        fit, _, rank, _ = np.linalg.lstsq(design, values)
        residuals.append(values - design @ fit)
        freedom += len(y) - int(rank)
    if freedom == 0:
        return math.nan, 0
    return float(np.linalg.norm(np.concatenate(residuals))) / math.sqrt(freedom), freedom


def noise_by_kind(tables: Sequence[Losses], kinds: Mapping[str, str],
                  means_of_seeds: bool = False) -> dict[str, Noise]:
    """Return the noise of each model of `kinds`, which has the kind of each. Runs of a kind are
    pooled over the tables, one for each size. Failed runs make no noise."""
    finished = [split_failed(table)[0] for table in tables]
    found = {}
    for kind in dict.fromkeys(kinds.values()):
        of_kind = [{cell: loss for cell, loss in table.items() if kinds.get(cell[0]) == kind}
                   for table in finished]
        found[kind] = Noise(kind, *residual_error([y for y in of_kind if y], means_of_seeds))
    return {model: found[kind] for model, kind in kinds.items()}


def compare(y: Losses, A: str, B: str, size: str, m: int,
            noise: Mapping[str, Noise]) -> Effect | None:
    """Compare two models at a size, one of m comparisons. `noise` has that of each model. None if
    no seed has both."""
    finished, failed = split_failed(y)
    if {A, B} & failed:
        return Effect(size, math.inf)
    d = {seed: loss - finished[B, seed] for (model, seed), loss in finished.items()
         if model == A and (B, seed) in finished}
    if not d:
        return None
    mean = statistics.fmean(d.values())
    if len(d) == 1:  # no interval
        return Effect(size, mean)
    (kind_A, s_A, f_A), (kind_B, s_B, f_B) = noise[A], noise[B]
    variance, freedom = s_A ** 2 + s_B ** 2, f_A
    if kind_A != kind_B:  # Welch and Satterthwaite
        freedom = variance ** 2 / (s_A ** 4 / f_A + s_B ** 4 / f_B)
    half_width = student.ppf(1 - 0.025 / m, freedom) * math.sqrt(variance / len(d))
    return Effect(size, mean, float(half_width), d)


def decide(effect: Effect, above: float, below: float) -> str:
    """Return the verdict for bounds in per cent; an empty text if there is no interval."""
    _, low, high = effect.percent()
    if above < low and high < below:
        return 'holds'
    if math.isinf(effect.d) or high < above or low > below:
        return 'does not hold'
    return '' if math.isnan(low) else 'undecided'


# The rules of the families

class Table(NamedTuple):
    """The runs of one size: y of each, and the noise of each model."""
    y: Losses
    noise: Mapping[str, Noise]


Tables = dict[tuple[str, str], Table]  # of each unit and size


def first_rule(folder: Path, claims: list[Row], own: dict[Run, Row]) -> Tables:
    """RULE.md: the family's own runs alone. At a size all models scatter alike, and each seed has a
    mean, too. One claim compares the logs of the trials' best rates."""
    rows = read_csv(f'{folder}/runs.csv')
    y = {('perplexity', size): losses for size, losses in losses_by_size(rows).items()}
    for row in read_csv(f'{folder}/best_rates.csv'):
        rates = y.setdefault(('rate', row['size']), {})
        rates[row['model'], int(row['seed'])] = math.log(float(row['rate']))
    return {key: Table(losses, noise_by_kind([losses], {model: 'all' for model, _ in losses},
                                             means_of_seeds=True))
            for key, losses in y.items()}


def second_rule(folder: Path, claims: list[Row], own: dict[Run, Row]) -> Tables:
    """second/RULE.md: also the first family's runs. At a size models whose MLP is CEM's or is
    repeated scatter in one way, all others in another."""
    mlps = {row['model']: row['mlp'] for each in (STUDY, folder)
            for row in read_csv(f'{each}/models.csv')}
    kinds = {model: 'plain' if mlps[model] == 'plain' else 'not plain'
             for model in models_of(claims)}
    return {('perplexity', size): Table(y, noise_by_kind([y], kinds))
            for size, y in losses_by_size(planned_rows([STUDY, folder], own)).items()}


def third_rule(folder: Path, claims: list[Row], own: dict[Run, Row]) -> Tables:
    """third/RULE.md: also the runs of the families before. There are kinds of noise, each that of
    all sizes together."""
    rows = planned_rows([STUDY, STUDY / 'second', folder], own)
    return pooled_over_sizes(folder, claims, losses_by_size(rows))


def pooled_over_sizes(folder: Path, claims: list[Row], y: dict[str, Losses]) -> Tables:
    """Pool the noise of each kind of models over all sizes of the claims. The folder's models.csv
    has the kinds; only models of the claims make noise."""
    noise_of = {row['model']: row['noise'] for row in read_csv(f'{folder}/models.csv')}
    kinds = {model: noise_of[model] for model in models_of(claims)}
    sizes = dict.fromkeys(size for claim in claims for size in claim['sizes'].split())
    noise = noise_by_kind([y[size] for size in sizes if size in y], kinds)
    return {('perplexity', size): Table(losses, noise) for size, losses in y.items()}


# The families, in the order in which they were asked
RULES = {STUDY: first_rule, STUDY / 'second': second_rule, STUDY / 'third': third_rule}


# Which runs count

def models_of(claims: list[Row]) -> dict[str, None]:
    """Return the models of claims, each once and in their order."""
    return dict.fromkeys(claim[side] for claim in claims for side in 'AB')


def losses_by_size(rows: Iterable[Row]) -> dict[str, Losses]:
    """Return y of the runs at each size, without trials. Of two rates of a model the later row
    counts: only `cem-2-normed` at XS has two, the first one by mistake (results/tokens)."""
    y: dict[str, Losses] = {}
    for row in rows:
        if int(row['seed']) < TRIAL_SEEDS:
            y.setdefault(row['size'], {})[row['model'], int(row['seed'])] = float(row['y'])
    return y


def planned_rows(folders: list[Path], own: dict[Run, Row]) -> list[Row]:
    """Return the rows of the runs that the first and these later families plan. Each may have been
    published by any family in this folder, or be one of the own runs."""
    planned = [*planned_cells(folders), *read_runs(f'{STUDY}/more_seeds.csv')]
    known = own | read_published_rows(load_study().families)
    return [known[run] for run in planned if run in known]


# Verdicts

Verdict = tuple[Row, list[Effect], str]  # a claim, its effect at each size, the word


def judge(folder: Path, rule: Callable[..., Tables],
          own: dict[Run, Row] | None = None) -> list[Verdict]:
    """Return the verdicts on all claims in a folder, by its rule. `own` has runs to count that are
    not published."""
    claims = [{'unit': 'perplexity'} | row for row in read_csv(f'{folder}/verdicts.csv')]
    tables = rule(folder, claims, own or {})
    verdicts = []
    for claim in claims:
        effects = find_effects(claim, claims, tables)
        verdicts.append((claim, effects, find_word(claim, effects, tables)))
    return verdicts


def find_effects(claim: Row, claims: list[Row], tables: Tables) -> list[Effect]:
    """Compare the two models of a claim, which is one of `claims`, at each size that has both."""
    effects = []
    for size in claim['sizes'].split():
        # Count the comparisons of the same unit at this size
        alike = [row for row in claims if row['unit'] == claim['unit']]
        m = sum(size in row['sizes'].split() for row in alike)
        # A side may name two models, of which the trials chose one: the other has no runs
        y, noise = tables.get((claim['unit'], size), Table({}, {}))
        for A, B in itertools.product(claim['A'].split('/'), claim['B'].split('/')):
            effect = compare(y, A, B, size, m, noise)
            if effect is not None:
                effects.append(effect)
    return effects


def find_word(claim: Row, effects: list[Effect], tables: Tables) -> str:
    """Return the word for a claim with these effects."""
    # A claim on kernels has no size, and one on failed runs no effect
    sizes = claim['sizes'].split()
    if not sizes:
        return 'see results/gp'
    if claim['unit'] == 'failed runs':
        failed = set()
        for size in sizes:
            failed |= split_failed(tables['perplexity', size].y)[1]
        return 'does not hold' if any('cem' in model for model in failed) else 'holds'

    # Decide at each size with an interval
    above, below = float(claim['above_%'] or '-inf'), float(claim['below_%'] or 'inf')
    words = [decide(effect, above, below) for effect in effects]
    words = [word for word in words if word]
    if not words:
        return 'one seed' if effects else 'not run'

    # The largest size counts, or where sizes.csv says so all sizes, which then must agree
    all_agree = len(words) == len(sizes) and len(set(words)) == 1
    if all_agree or load_study().sizes[sizes[0]]['word'] == 'largest size':
        return words[-1]
    return 'undecided'


def verdict_table(verdicts: list[Verdict]) -> str:
    """Format the verdicts, beside the expected effects if verdicts.csv has them."""
    names = 'id', 'claim', 'question', 'A', 'B', 'kind', 'expected_S', 'expected_M'
    columns = [name for name in names if name in verdicts[0][0]]
    rows = [[*map(claim.get, columns), '; '.join(map(str, effects)), word]
            for claim, effects, word in verdicts]
    return markdown_table([*columns, 'A over B', 'verdict'], rows)


def effects_csv(families: Mapping[str, list[Verdict]], columns: Sequence[str] = COLUMNS) -> str:
    """Return the verdicts of all families as a CSV: a row for each effect, with its claim's word.
    The ends of an interval are empty where there is none, and a claim without effects has a row
    without a size."""
    rows = []
    for family, verdicts in families.items():
        for claim, effects, word in verdicts:
            row = claim | {'family': family, 'verdict': word}
            for effect in effects:
                percent = zip(('effect_%', 'low_%', 'high_%'), effect.percent(), strict=True)
                rows.append(row | {'size': effect.size, 'seeds': len(effect.by_seed) or ''} | {
                    name: '' if math.isnan(value) else f'{value:.6f}' for name, value in percent})
            if not effects:
                rows.append(row)
    return csv_text([{name: row.get(name, '') for name in columns} for row in rows])


@dataclass
class VerdictsConfig:
    """Which runs count beside the published ones."""
    runs: PathStr | None = None  # a CSV of your own runs, as results/reproduce.py writes it


@command_line
def main(argv: list[str]) -> None:
    cfg = build(VerdictsConfig, read_options(argv, VerdictsConfig))
    own = read_runs(cfg.runs) if cfg.runs else {}
    families = {folder.name: judge(folder, rule, own) for folder, rule in RULES.items()}
    print('A over B: how much higher the perplexity per Llama token of A is than that of B, '
          'the interval over seeds, and each seed alone.\n')
    for verdicts in families.values():
        print(f'{verdict_table(verdicts)}\n')
    path = Path(cfg.runs).with_name(EFFECTS.name) if cfg.runs else EFFECTS
    write_atomic(str(path), effects_csv(families).encode())
    option = f' --effects={path}' if cfg.runs else ''
    print(f'{path} has all effects: python results/reproduce.py{option} draws them', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])

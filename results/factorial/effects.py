"""
The factorial's effects: runs.csv to effects.md and effects.png.

    python results/factorial/effects.py

Sixteen runs at each of two budgets, five factors at two levels each, residual = -(T x P x diagonal
x rate) in signs: a fraction of resolution V, in which the five effects and their ten two-way
interactions are the 15 contrasts there are. Their standard error is Lenth's (1989): most contrasts
are small, and 1.5 times the median of the small ones tells how large chance makes them.
"""
import csv
import itertools
import math
import os

import matplotlib
import numpy as np
from scipy.stats import t as student

matplotlib.use('Agg')
import matplotlib.pyplot as plt

FACTORS = {'T': ('1', '2'), 'P': ('none', 'diag_lowrank'), 'diagonal': ('none', 'shared'),
           'rate': ('0.005', '0.01'), 'residual': ('raw', 'normed')}
NAMES = {'T': 'a second step', 'P': 'P', 'diagonal': 'the diagonal', 'rate': 'twice the rate',
         'residual': 'normed'}
BUDGETS = {'1': '1.5 bytes a parameter', '2': 'ten bytes'}  # by runs.csv's design
HERE = os.path.dirname(os.path.abspath(__file__))


def contrasts(runs: list[dict[str, str]], column: str) -> dict[str, float]:
    """Effects on log perplexity: the mean at a factor's second level less that at its first; of
    two factors half the difference that one makes to the other's effect."""
    y = np.log([float(run[column]) for run in runs])
    sign = {name: np.array([2 * levels.index(run[name]) - 1 for run in runs])
            for name, levels in FACTORS.items()}
    found = {NAMES[name]: 2 * np.mean(s * y) for name, s in sign.items()}
    for a, b in itertools.combinations(FACTORS, 2):
        found[f'{NAMES[a]} x {NAMES[b]}'] = 2 * np.mean(sign[a] * sign[b] * y)
    return found


def margin(effects: list[float]) -> float:
    """Half a 95% interval, by Lenth's pseudo standard error with m / 3 degrees of freedom."""
    size = np.abs(effects)
    first = 1.5 * np.median(size)
    error = 1.5 * np.median(size[size < 2.5 * first])
    return float(error * student.ppf(0.975, len(effects) / 3))


def percent(effect: float) -> float:
    return 100 * math.expm1(effect)


def verdict(effect: float, margin: float) -> str:
    """The rule of expectations.md."""
    if abs(effect) > margin and abs(effect) >= 0.01:
        return 'holds'
    return 'none' if abs(effect) + margin <= 0.01 else 'cannot be told'


def read(design: str) -> list[dict[str, str]]:
    with open(os.path.join(HERE, 'runs.csv'), encoding='utf-8') as file:
        return [run for run in csv.DictReader(file) if run['design'] == design]


def main() -> None:
    figure, axes = plt.subplots(figsize=(7, 5), layout='constrained')
    axes.axvspan(-1, 1, color='gray', alpha=0.15, lw=0, label='within 1%')
    columns: list[list[str]] = []
    for n, (design, budget) in enumerate(BUDGETS.items()):
        runs = read(design)
        both = {split: contrasts(runs, f'{split}_perplexity') for split in ('val', 'test')}
        half = {split: margin(list(effects.values())) for split, effects in both.items()}
        val, test = both['val'], both['test']
        names = [*val, 'margin, 95%']
        columns.append([f'{budget}: validation',
                        *(f'{percent(effect):+.1f}%' for effect in val.values()),
                        f'± {percent(half["val"]):.1f}%'])
        columns.append(['test', *(f'{percent(effect):+.1f}%' for effect in test.values()),
                        f'± {percent(half["test"]):.1f}%'])
        columns.append(['', *(verdict(effect, half['val']) for effect in val.values()), ''])
        places = np.arange(len(val))[::-1] + 0.15 - 0.3 * n
        colour = f'C{n}'
        axes.errorbar([percent(effect) for effect in val.values()], places, fmt='o', ms=5,
                      xerr=percent(half['val']), capsize=3, color=colour,
                      label=f'{budget}: validation, 95%')
        axes.plot([percent(effect) for effect in test.values()], places, 'x', color=colour,
                  label='test')
    axes.set_yticks(np.arange(len(val))[::-1], list(val))
    axes.axvline(0, color='black', lw=0.8)
    axes.set(xlabel='change of perplexity, % (left is better)')
    figure.legend(loc='outside lower center', ncols=3, fontsize=8)
    figure.savefig(os.path.join(HERE, 'effects.png'), dpi=100)

    rows = list(zip(['effect on perplexity', *names], *columns, strict=True))
    lines = ['| ' + ' | '.join(row) + ' |' for row in rows]
    lines.insert(1, '|' + '---|' * len(rows[0]))
    with open(os.path.join(HERE, 'effects.md'), 'w', encoding='utf-8') as file:
        file.write('\n'.join(lines) + '\n')
    print('\n'.join(lines))


if __name__ == '__main__':
    main()

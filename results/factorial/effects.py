"""
The factorial's effects: runs.csv to effects.md and effects.png.

    python results/factorial/effects.py

Sixteen runs, five factors at two levels each, residual = -(T x P x diagonal x rate) in signs: a
fraction of resolution V, in which the five effects and their ten two-way interactions are the 15
contrasts there are. Their standard error is Lenth's (1989): most contrasts are small, and 1.5 times
the median of the small ones tells how large chance makes them.
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


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    with open(f'{here}/runs.csv', encoding='utf-8') as file:
        runs = [run for run in csv.DictReader(file) if run['design'] == '1']
    both = {column: contrasts(runs, f'{column}_perplexity') for column in ('val', 'test')}
    half = {column: margin(list(effects.values())) for column, effects in both.items()}
    lines = ['| effect on perplexity | validation | test | |', '|---|---|---|---|']
    for name, effect in both['val'].items():
        lines.append(f'| {name} | {percent(effect):+.1f}% | {percent(both["test"][name]):+.1f}% | '
                     f'{verdict(effect, half["val"])} |')
    lines.append(f'| margin, 95% | ± {percent(half["val"]):.1f}% | '
                 f'± {percent(half["test"]):.1f}% | |')
    with open(f'{here}/effects.md', 'w', encoding='utf-8') as file:
        file.write('\n'.join(lines) + '\n')
    print('\n'.join(lines))

    names = list(both['val'])[::-1]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
    axes.axvspan(-1, 1, color='gray', alpha=0.15, lw=0, label='within 1%')
    axes.errorbar([percent(both['val'][name]) for name in names], names, fmt='o',
                  xerr=percent(half['val']), capsize=3, label='validation, 95%')
    axes.plot([percent(both['test'][name]) for name in names], names, 'x', color='tab:orange',
              label='test')
    axes.axvline(0, color='black', lw=0.8)
    axes.set(xlabel='change of perplexity, % (left is better)')
    axes.legend(fontsize=8)
    figure.savefig(f'{here}/effects.png', dpi=100)


if __name__ == '__main__':
    main()

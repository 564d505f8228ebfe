"""What synthetic_gp.py writes and draws: its table beside the paper's, what the paper reads off
that table, and the figures."""
import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean, mean, stdev
from typing import Any

import matplotlib.pyplot as plt

from nanocem.files import say, write_whole

TITLES = {
    'rbf': 'RBF',
    'matern': 'Matern',
    'periodic': 'Periodic',
    'rational_quadratic': 'Rational Quadratic',
    'non_stationary': 'Non-Stationary',
}
CEM = ('CEM-T1', 'CEM-T2', 'CEM-T4', 'CEM-T8')
PAPER_SIZES = {
    'Plain': ('33.98K', '6.76M'),
    'Gated': ('33.94K', '6.73M'),
    'CEM-T1': ('22.66K', '6.73M'),
    'CEM-T2': ('22.66K', '11.08M'),
    'CEM-T4': ('22.66K', '19.79M'),
    'CEM-T8': ('22.66K', '37.20M'),
}
# The paper's table: train RMSE, its std, test RMSE, its std.
PAPER = {
    ('rbf', 'Plain'): (0.0139, 0.0022, 0.0158, 0.0024),
    ('rbf', 'Gated'): (0.0109, 0.0014, 0.0122, 0.0015),
    ('rbf', 'CEM-T1'): (0.0102, 0.0010, 0.0119, 0.0011),
    ('rbf', 'CEM-T2'): (0.0074, 0.0008, 0.0092, 0.0008),
    ('rbf', 'CEM-T4'): (0.0068, 0.0006, 0.0086, 0.0007),
    ('rbf', 'CEM-T8'): (0.0066, 0.0008, 0.0088, 0.0012),
    ('matern', 'Plain'): (0.2129, 0.0205, 0.2308, 0.0237),
    ('matern', 'Gated'): (0.1903, 0.0205, 0.2162, 0.0253),
    ('matern', 'CEM-T1'): (0.1836, 0.0199, 0.2194, 0.0267),
    ('matern', 'CEM-T2'): (0.1623, 0.0170, 0.2166, 0.0274),
    ('matern', 'CEM-T4'): (0.1742, 0.0206, 0.2168, 0.0271),
    ('matern', 'CEM-T8'): (0.1676, 0.0174, 0.2161, 0.0248),
    ('periodic', 'Plain'): (0.0557, 0.0056, 0.0614, 0.0058),
    ('periodic', 'Gated'): (0.0386, 0.0036, 0.0445, 0.0043),
    ('periodic', 'CEM-T1'): (0.0352, 0.0036, 0.0421, 0.0044),
    ('periodic', 'CEM-T2'): (0.0240, 0.0022, 0.0342, 0.0033),
    ('periodic', 'CEM-T4'): (0.0238, 0.0029, 0.0340, 0.0042),
    ('periodic', 'CEM-T8'): (0.0242, 0.0037, 0.0344, 0.0053),
    ('rational_quadratic', 'Plain'): (0.0791, 0.0109, 0.0885, 0.0108),
    ('rational_quadratic', 'Gated'): (0.0599, 0.0070, 0.0715, 0.0075),
    ('rational_quadratic', 'CEM-T1'): (0.0578, 0.0072, 0.0709, 0.0082),
    ('rational_quadratic', 'CEM-T2'): (0.0409, 0.0039, 0.0596, 0.0068),
    ('rational_quadratic', 'CEM-T4'): (0.0417, 0.0033, 0.0606, 0.0067),
    ('rational_quadratic', 'CEM-T8'): (0.0406, 0.0035, 0.0606, 0.0060),
    ('non_stationary', 'Plain'): (0.0385, 0.0052, 0.0426, 0.0062),
    ('non_stationary', 'Gated'): (0.0315, 0.0030, 0.0358, 0.0039),
    ('non_stationary', 'CEM-T1'): (0.0305, 0.0044, 0.0356, 0.0051),
    ('non_stationary', 'CEM-T2'): (0.0257, 0.0027, 0.0330, 0.0042),
    ('non_stationary', 'CEM-T4'): (0.0267, 0.0030, 0.0330, 0.0043),
    ('non_stationary', 'CEM-T8'): (0.0243, 0.0030, 0.0317, 0.0043),
}

Key = tuple[str, str]  # kernel, model
Numbers = dict[Key, tuple[float, float, float, float]]  # as in PAPER
Cells = dict[Key, dict[str, Any]]  # train, test: RMSE of each repeat; test_steps: after 1, 2, ...
Sizes = dict[str, tuple[int, int]]  # of each model: parameters, FLOPs


def trained_steps(model: str) -> int:
    """T of a model's name."""
    return int(model.removeprefix('CEM-T')) if model.startswith('CEM-T') else 1


def tested_steps(model: str) -> int:
    """Up to how many steps a model is tested: at T alone, CEM beyond."""
    return 2 * max(trained_steps(model), 8) if model.startswith('CEM-T') else 0


def read_cell(path: str, model: str, repeats: int) -> dict[str, Any] | None:
    """A finished cell; None where there is none, or a damaged one."""
    try:
        with open(path, encoding='utf-8') as file:
            cell = json.load(file)
        lists = [cell['train'], cell['test'], *cell.get('test_steps', [])]
        numbers = all(type(value) is float for values in lists for value in values)
        finite = math.isfinite(sum(cell['train'] + cell['test']))
        whole = [*map(len, lists)] == [repeats] * (2 + tested_steps(model))
        return cell if numbers and finite and whole else None
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over repeats; nan where one of them diverged."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def deviations(ours: Numbers, key: Key) -> tuple[float, float]:
    """How far our train and test RMSE lie from the paper's, in the paper's standard deviations."""
    return tuple((ours[key][i] - PAPER[key][i]) / PAPER[key][i + 1] for i in (0, 2))


def in_print(size: tuple[int, int]) -> tuple[str, str]:
    """Parameters and FLOPs as the paper prints them."""
    parameters, flops = size
    return f'{parameters / 1e3:.2f}K', f'{flops / 1e6:.2f}M'


def table(ours: Numbers, sizes: Sizes) -> list[list[str]]:
    """The lines of the table, header first; in ours and in the paper's columns a kernel's best is
    **bold**."""
    def number(source: Numbers, key: Key, i: int) -> str:
        if key not in source:
            return '-'
        best = min(v[i] for (k, _), v in source.items() if k == key[0])
        text = f'{source[key][i]:.4f} ± {source[key][i + 1]:.4f}'
        return f'**{text}**' if source[key][i] == best else text

    lines = [['Model', 'Parameters', 'FLOPs', 'Kernel', 'Train RMSE', 'paper', 'Test RMSE', 'paper',
              "off by (paper's std)"]]
    for key in ours:
        k, m = key
        off = '{:+.1f}, {:+.1f}'.format(*deviations(ours, key)) if key in PAPER else '-'
        numbers = [number(source, key, i) for i in (0, 2) for source in (ours, PAPER)]
        lines.append([m, *in_print(sizes[m]), TITLES[k], *numbers, off])
    return lines


def findings(ours: Numbers, sizes: Sizes) -> list[str]:
    """What the paper reads off its table, in ours and in the paper's numbers, and how near our rows
    land."""
    kernels = [k for k in TITLES if any(k == of for of, _ in ours)]
    same = [a == b for m in PAPER_SIZES if m in sizes
            for a, b in zip(in_print(sizes[m]), PAPER_SIZES[m], strict=True)]
    lines = [f'Parameters and FLOPs as printed in the paper: {sum(same)} of {len(same)}.']

    def falls(row: dict[str, tuple[float, ...]], i: int) -> bool:
        return all(row[a][i] > row[b][i] for a, b in pairwise(CEM))

    def best_is_plain(row: dict[str, tuple[float, ...]]) -> bool:
        return row['Plain'][2] == min(v[2] for v in row.values())

    claims = (
        ('CEM-T1 at or below Gated in train RMSE', ('Gated', 'CEM-T1'),
         lambda row: row['CEM-T1'][0] <= row['Gated'][0]),
        ('CEM-T2 below CEM-T1 in train RMSE', CEM[:2],
         lambda row: row['CEM-T2'][0] < row['CEM-T1'][0]),
        ('Train RMSE not monotone over T = 1, 2, 4, 8', CEM, lambda row: not falls(row, 0)),
        ('Test RMSE not monotone over T = 1, 2, 4, 8', CEM, lambda row: not falls(row, 2)),
        ('Best test RMSE not at Plain', tuple(PAPER_SIZES), lambda row: not best_is_plain(row)),
    )
    for claim, models, holds in claims:
        asked = [k for k in kernels if all((k, m) in ours for m in models)]
        if asked:
            yes, paper = ([k for k in asked if holds({m: source[k, m] for m in models})]
                          for source in (ours, PAPER))
            but = ', '.join(TITLES[k] for k in asked if k not in yes)
            but = f' (not {but})' if but else ''
            lines.append(f'{claim}: {len(yes)} of {len(asked)} kernels{but}; paper {len(paper)}.')
    asked = [k for k in kernels if (k, 'CEM-T1') in ours and (k, 'CEM-T2') in ours]
    if asked:
        gains = [[1 - source[k, 'CEM-T2'][0] / source[k, 'CEM-T1'][0] for source in (ours, PAPER)]
                 for k in asked]
        each = ', '.join(f'{TITLES[k]} {a:.0%} (paper {b:.0%})'
                         for k, (a, b) in zip(asked, gains, strict=True))
        close = sum(abs(a - b) <= 0.08 for a, b in gains)
        lines.append(f'Train RMSE saved by the second step: {each}; within 8 points of the '
                     f"paper's: {close} of {len(asked)}.")

    rows = [key for key in ours if key in PAPER]
    spreads = [ours[key][i] / PAPER[key][i] for key in rows for i in (1, 3)]
    alike = sum(1 / 1.5 <= ratio <= 1.5 for ratio in spreads)
    lines.append("Spread over repeats within a factor of 1.5 of the paper's: "
                 f'{alike} of {len(spreads)}.')
    for what, plain in (('The rows of Plain', True), ('The other rows', False)):
        of = [(k, m) for k, m in rows if (m == 'Plain') == plain]
        one, two = ([key for key in of if all(abs(off) <= z for off in deviations(ours, key))]
                    for z in (1, 2))
        far = ', '.join(f'{TITLES[k]} {m}' for k, m in of if (k, m) not in two)
        far = f' (not {far})' if far else ''
        lines.append(f"{what}, train and test RMSE both within one of the paper's std: "
                     f'{len(one)} of {len(of)}; within two: {len(two)}{far}.')
    return lines


def draw_rmse(ours: Numbers, path: str) -> None:
    """RMSE against T for each kernel, the paper's beside ours."""
    kernels = [k for k in TITLES if any(k == of for of, _ in ours)]
    cem = list(dict.fromkeys(m for _, m in ours if m.startswith('CEM')))
    fig, axes = panels(kernels, 2, 'T, steps of the recursion')
    for row, i, what in ((0, 0, 'train'), (1, 2, 'test')):
        axes[row, 0].set_ylabel(f'{what} RMSE')
        for ax, k in zip(axes[row], kernels, strict=True):
            for source, who, line in ((ours, 'ours', '-'), (PAPER, 'paper', ':')):
                for m, colour in (('Plain', 'tab:gray'), ('Gated', 'tab:green')):
                    if (k, m) in source and (k, m) in ours:
                        ax.axhline(source[k, m][i], color=colour, ls=line, label=f'{m}, {who}')
                # side by side, so that error bars do not hide each other
                beside = 1 if who == 'ours' else 1.07
                face = 'tab:blue' if who == 'ours' else 'white'
                points = [(trained_steps(m) * beside, *source[k, m][i:i + 2])
                          for m in cem if (k, m) in source]
                if points:
                    ax.errorbar(*zip(*points, strict=True), color='tab:blue', ls=line, marker='o',
                                capsize=3, mfc=face, label=f'CEM, {who}')
    save(fig, axes, path)


def draw_test_steps(cells: Cells, path: str) -> None:
    """Test RMSE against the steps taken at test time, a line for each T trained with."""
    kernels = [k for k in TITLES if any(k == of for of, _ in cells)]
    cem = list(dict.fromkeys(m for _, m in cells if m.startswith('CEM')))
    fig, axes = panels(kernels, 1, 'steps at test time')
    for ax, k in zip(axes[0], kernels, strict=True):
        for i, m in enumerate(cem):
            if (k, m) not in cells:  # it diverged
                continue
            colour = plt.cm.viridis(0.9 * i / max(1, len(cem) - 1))
            curve = [fmean(values) for values in cells[k, m]['test_steps']]
            label = f'trained with T = {trained_steps(m)}'
            ax.plot(range(1, len(curve) + 1), curve, color=colour, label=label)
            ax.plot(trained_steps(m), curve[trained_steps(m) - 1], 'o', color=colour)
        ax.set_yscale('log')
        ax.set_ylim(top=2)  # the draws have variance 1: beyond, nothing is left to see
    axes[0, 0].set_ylabel('test RMSE')
    save(fig, axes, path)


def panels(kernels: list[str], rows: int, xlabel: str) -> tuple[plt.Figure, Any]:
    """Rows of one panel a kernel, T on a logarithmic axis."""
    size = (3.2 * len(kernels), 0.8 + 2.5 * rows)
    fig, axes = plt.subplots(rows, len(kernels), figsize=size, squeeze=False)
    for ax, k in zip(axes[0], kernels, strict=True):
        ax.set_title(TITLES[k])
    for ax in axes.flat:
        ax.set_xscale('log', base=2)
        ax.xaxis.set_major_formatter(lambda T, _: f'{T:g}')
        ax.grid(alpha=0.3)
    for ax in axes[-1]:
        ax.set_xlabel(xlabel)
    return fig, axes


def save(fig: plt.Figure, axes: Any, path: str) -> None:
    """One legend below all panels, and into the file."""
    named = [ax.get_legend_handles_labels() for ax in axes.flat]
    handles = {label: handle for found in named for handle, label in zip(*found, strict=True)}
    if handles:
        fig.legend(handles.values(), handles.keys(), loc='lower center', ncol=len(handles),
                   frameon=False)
    fig.tight_layout(rect=(0, 0.3 / fig.get_figheight(), 1, 1))
    image = io.BytesIO()
    fig.savefig(image, format='png', dpi=130)
    plt.close(fig)
    write_whole(path, image.getvalue())


def csv_bytes(lines: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(lines)
    return text.getvalue().encode()


def markdown(lines: list[list[str]]) -> str:
    """A table with its columns aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ruled = [lines[0], ['-' * width for width in widths], *lines[1:]]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in ruled)


def report(caption: str, cells: Cells, sizes: Sizes, out_dir: str) -> str:
    """Table and findings of the cells that did not diverge, on the screen and in files, and the
    figures. Returns the names of those that did."""
    diverged = ', '.join(f'{TITLES[k]} {m}' for k, m in cells if not cells[k, m])
    cells = {key: cell for key, cell in cells.items() if cell}
    if not cells:
        return diverged
    ours = {key: (*spread(cell['train']), *spread(cell['test'])) for key, cell in cells.items()}
    found = findings(ours, sizes)
    if diverged:
        found.append(f'Not in the table, as they diverged: {diverged}.')
    aligned = markdown(table(ours, sizes))
    text = '\n\n'.join([caption, aligned, '\n'.join(f'- {line}' for line in found)]) + '\n'
    write_whole(f'{out_dir}/table.md', text.encode())

    header = ['model', 'parameters', 'flops', 'kernel',
              'train_rmse', 'train_std', 'test_rmse', 'test_std']
    rows = [header + [f'paper_{name}' for name in header[4:]]]
    for (k, m), row in ours.items():
        numbers = [f'{value:.6f}' for value in row]
        rows.append([m, *sizes[m], TITLES[k], *numbers, *PAPER.get((k, m), [''] * 4)])
    write_whole(f'{out_dir}/table.csv', csv_bytes(rows))

    draw_rmse(ours, f'{out_dir}/figure.png')
    if any(m.startswith('CEM') for _, m in cells):
        draw_test_steps(cells, f'{out_dir}/test_steps.png')
    if sys.stdout and sys.stdout.isatty():
        aligned = re.sub(r'\*\*(.+?)\*\*', '\033[1m\\1\033[0m    ', aligned)
    files = ', '.join(sorted(name for name in os.listdir(out_dir) if '.' in name))
    say('\n'.join([caption, aligned, *found, f'Written to {out_dir}: {files}']))
    return diverged

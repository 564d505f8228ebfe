"""What reproduce.py draws of its runs: each figure is a table of models and a way to draw them."""
import io
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib

from nanocem.claims import SPLITS
from nanocem.files import table

matplotlib.use('Agg')
import matplotlib.pyplot as plt


def deviation(values: Sequence[float]) -> float:
    """The standard deviation, 0 of one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Cell(NamedTuple):
    """One bar, marker or line: a model at a size, with the results of its finished seeds."""
    size: str
    group: str
    label: str
    model: str
    results: Sequence[dict[str, Any]]

    @property
    def values(self) -> list[float]:
        return [r['test_perplexity'] for r in self.results]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        return deviation(self.values)


class Figure(NamedTuple):
    """group -> label -> model, by the names of reproduce.py's table."""
    title: str
    draw: Callable[[list[Cell]], plt.Figure]
    groups: dict[str, dict[str, str]]


COLOURS = {
    'Llama': 'hotpink', 'Llama, ALiBi': 'plum', 'T = 1': 'tab:orange', 'T = 2': 'tab:blue',
    'T = 3': 'tab:green', 'CEM attention': 'tab:blue', 'CEM MLP': 'tab:blue', 'CEM': 'tab:blue',
    'CEM MLP, parameter-matched': 'tab:orange', 'no preconditioner': 'tab:gray',
    'diagonal': 'tab:cyan', 'diagonal + low rank': 'tab:blue'}
MARKERS = {'Llama': 'D', 'Llama, ALiBi': 'D', 'CEM MLP, parameter-matched': '^'}


def grouped(cells: Iterable[Cell], by: Literal['size', 'group', 'label']) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(getattr(cell, by), []).append(cell)
    return found


def legend(axes: plt.Axes, **options: Any) -> None:
    """Each label once."""
    handles, labels = axes.get_legend_handles_labels()
    handle = dict(zip(labels, handles, strict=True))
    axes.legend(handle.values(), handle.keys(), fontsize=7, **options)


def draw_scatter(cells: list[Cell]) -> plt.Figure:
    """Test perplexity against parameters; CEM linked to its Llama, a size's tokens above its
    highest marker (the paper's 2a and 2b)."""
    figure, axes = plt.subplots(figsize=(6, 4.2))
    for same in grouped(cells, 'size').values():
        points = [(cell.results[0]['parameters'] / 1e6, cell.mean) for cell in same]
        for cell, point in zip(same, points, strict=True):
            if same[0].label == 'Llama':
                axes.plot(*zip(points[0], point, strict=True), color='lightgray', zorder=0)
            axes.errorbar(*point, cell.std, color=COLOURS[cell.label], ls='', ms=8, capsize=3,
                          marker=MARKERS.get(cell.label, 'o'), label=cell.label)
        top = max(same, key=lambda cell: cell.mean + cell.std)
        first = top.results[0]
        axes.annotate(f'{first["tokens"] / 1e6:,.1f}M tokens',
                      (first['parameters'] / 1e6, top.mean + top.std), (0, 9),
                      textcoords='offset points', ha='center', fontsize=7)
    axes.set(xlabel='parameters (millions)', ylabel='test perplexity')
    axes.margins(0.15)
    legend(axes)
    return figure


def draw_bars(cells: list[Cell]) -> plt.Figure:
    """A panel a size, a block of bars a group, a colour a label; Llama is the dashed line, as in
    the paper's 2c and 2d."""
    sizes = grouped(cells, 'size')
    figure, grid = plt.subplots(1, len(sizes), figsize=(4.6 * len(sizes), 4), squeeze=False)
    for axes, (size, same) in zip(grid[0], sizes.items(), strict=True):
        bars = [cell for cell in same if cell.label != 'Llama']
        labels = list(dict.fromkeys(cell.label for cell in bars))
        groups = grouped(bars, 'group')
        width = 0.8 / max(map(len, groups.values()), default=1)
        for g, block in enumerate(groups.values()):
            for n, cell in enumerate(block):
                colour = COLOURS.get(cell.label, f'C{labels.index(cell.label)}')
                x = g + (n - (len(block) - 1) / 2) * width
                axes.bar(x, cell.mean, width * 0.9, yerr=cell.std or None, color=colour, capsize=3,
                         label=cell.label)
                axes.annotate(f'{cell.mean:.2f}', (x, cell.mean + cell.std), (0, 3), ha='center',
                              textcoords='offset points', fontsize=7)
        for cell in same:
            if cell.label == 'Llama':
                low, high = cell.mean - cell.std, cell.mean + cell.std
                axes.axhline(cell.mean, color=COLOURS['Llama'], ls='--', label='Llama')
                axes.axhspan(low, high, color=COLOURS['Llama'], alpha=0.15, zorder=0)
        values = [v for cell in same for v in cell.values]
        spread = max(values) - min(values)
        axes.set_ylim(min(values) - 0.25 * spread - 1e-3, max(values) + 0.3 * spread + 1e-3)
        axes.set(title=size, ylabel='test perplexity')
        names = [textwrap.fill(group, 16) for group in groups]
        axes.set_xticks(range(len(groups)), names, fontsize=8)
        legend(axes, ncols=2)
    return figure


def draw_sweep(cells: list[Cell]) -> plt.Figure:
    """Test perplexity against learning rate (a cell's group), a star at the best rate that was run
    (the paper's 3a)."""
    figure, axes = plt.subplots(figsize=(6, 4.5))
    lowest = []
    for n, (size, same) in enumerate(grouped(cells, 'size').items()):
        for label, colour in (('Llama', 'tab:orange'), ('CEM', 'tab:blue')):
            points = sorted((float(c.group), c.mean, c.std) for c in same if c.label == label)
            if not points:
                continue
            axes.errorbar(*zip(*points, strict=True), color=colour, marker='osDv^'[n % 5], lw=1,
                          label=f'{label}, {size}')
            rate, value, _ = min(points, key=lambda point: point[1])
            axes.plot(rate, value, '*', color=colour, ms=14, mec='black')
            lowest.append(value)
    axes.set(xscale='log', xlabel='learning rate', ylabel='test perplexity')
    axes.set_ylim(0.95 * min(lowest), 1.5 * max(lowest))  # rates that diverge leave the picture
    ticks = sorted({float(cell.group) for cell in cells})
    axes.set_xticks(ticks, [f'{rate:g}' for rate in ticks])
    axes.minorticks_off()
    legend(axes)
    return figure


def draw_gap(cells: list[Cell]) -> plt.Figure:
    """Perplexity over Llama's, same seeds, against Llama's parameters, a panel a text; the bars
    are standard deviations over the pairs."""
    figure, both = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    llama = {cell.size: cell.results for cell in cells if cell.label == 'Llama'}
    others = [cell for cell in cells if cell.label != 'Llama' and cell.size in llama]
    for axes, (split, title) in zip(both, SPLITS.items(), strict=True):
        for n, (group, same) in enumerate(grouped(others, 'group').items()):
            for label, line in grouped(same, 'label').items():
                name, colour = (f'{group}, {label}', f'C{n}') if group else (label, COLOURS[label])
                points = []
                for cell in line:
                    base = {r['seed']: r[f'{split}_perplexity'] for r in llama[cell.size]}
                    gaps = [100 * (r[f'{split}_perplexity'] / base[r['seed']] - 1)
                            for r in cell.results if r['seed'] in base]
                    if gaps:
                        N = llama[cell.size][0]['parameters']
                        points.append((N, statistics.fmean(gaps), deviation(gaps)))
                if points:
                    axes.errorbar(*zip(*points, strict=True), color=colour, label=name, marker='o',
                                  ms=4, capsize=2, ls='--' if label == 'T = 1' else '-')
        axes.axhline(0, color=COLOURS['Llama'], lw=1)
        axes.set(xscale='log', xlabel="Llama's parameters", title=title)
        axes.grid(alpha=0.3)
    both[0].set(ylabel='perplexity over Llama, %')
    legend(both[1], loc='upper left', bbox_to_anchor=(1.02, 1), handlelength=4)
    return figure


P_NAMES = {'-none': 'no preconditioner', '-diag': 'diagonal', '': 'diagonal + low rank'}
KINDS = {'CEM attention': 'attn', 'CEM MLP': 'mlp', 'all-CEM': 'cem', 'all-CEM, exact RoPE': 'rope'}
STEPS = {kind: {f'T = {T}': f'{name}-{T}' for T in (1, 2)} for kind, name in KINDS.items()}


def by_P(kind: str) -> dict[str, dict[str, str]]:
    """Llama, and a kind of CEM layer by steps and preconditioners."""
    steps = {f'T = {T}': {name: f'{kind}-{T}{P}' for P, name in P_NAMES.items()} for T in (1, 2)}
    return {'': {'Llama': 'llama'}, **steps, 'T = 3': {P_NAMES['']: f'{kind}-3'}}


FIGURES: dict[str, Figure] = {
    'fig_gap': Figure('The gap to Llama against size', draw_gap, {
        '': {'Llama': 'llama', 'Llama, ALiBi': 'llama-alibi'}, **STEPS}),
    'fig_attn': Figure('CEM attention, no P, against Llama, T = 1', draw_scatter, {
        '': {'Llama': 'llama', 'Llama, ALiBi': 'llama-alibi', 'CEM attention': 'attn-1-none'}}),
    'fig_mlp': Figure('CEM MLP, no P, against Llama, T = 1', draw_scatter, {
        '': {'Llama': 'llama', 'CEM MLP': 'mlp-1-none',
             'CEM MLP, parameter-matched': 'mlp-1-none-params'}}),
    'fig_attn_T': Figure('CEM attention: steps and preconditioners', draw_bars, by_P('attn')),
    'fig_mlp_T': Figure('CEM MLP: steps and preconditioners', draw_bars, by_P('mlp')),
    'fig_lr': Figure('Learning rate: Llama, and all-CEM with T = 2', draw_sweep, {
        '': {'Llama': 'llama', 'CEM': 'cem-2'}}),
    'fig_kq_diag': Figure('The diagonal of A_k: CEM attention, T = 1, P diagonal', draw_bars, {
        '': {'Llama': 'llama'}, 'none': {'CEM attention': 'attn-1-diag-nodiag'},
        'shared': {'CEM attention': 'attn-1-diag'},
        'per head': {'CEM attention': 'attn-1-diag-perhead'}}),
    'fig_reuse_mlp': Figure('MLP: recursion within a layer against plain reuse of it', draw_bars, {
        'plain reuse': {'T = 1': 'llama', 'T = 2': 'llama-mlp-twice'},
        'dimension-matched': {'T = 1': 'mlp-1', 'T = 2': 'mlp-2'},
        'parameter-matched': {'T = 1': 'mlp-1-params', 'T = 2': 'mlp-2-params'}}),
    'fig_reuse_attn': Figure('Attention: recursion within a layer against plain reuse', draw_bars, {
        'plain reuse': {'T = 1': 'llama', 'T = 2': 'llama-attn-twice'},
        'dimension-matched': {'T = 1': 'attn-1', 'T = 2': 'attn-2'}}),
}


def figure_files(figure: Figure, cells: list[Cell]) -> tuple[bytes, str]:
    """A figure as a PNG, and as a page with a line a cell."""
    rows = []
    for cell in cells:
        same = [c for c in cells if (c.size, c.model) == (cell.size, 'llama')]
        same.sort(key=lambda c: c.group != cell.group)  # its own group's first
        relative = f'{100 * (cell.mean / same[0].mean - 1):+.1f}%' if same else ''
        spread = f' ± {cell.std:.3f}' if len(cell.results) > 1 else ''
        first = cell.results[0]
        rows.append([cell.size, cell.group, cell.label, f'{first["parameters"]:,}',
                     f'{first["tokens"]:,}', f'{cell.mean:.3f}{spread}', relative,
                     str(len(cell.results))])
    header = ['size', 'group', 'model', 'parameters', 'tokens', 'test perplexity', 'to Llama',
              'seeds']
    text = (f'{figure.title}. Test perplexity, mean ± standard deviation over seeds.\n\n'
            f'{table(header, rows)}\n')
    picture = figure.draw(cells)
    picture.suptitle(figure.title, fontsize=10)
    picture.tight_layout()
    image = io.BytesIO()
    picture.savefig(image, format='png', dpi=100)
    plt.close(picture)
    return image.getvalue(), text

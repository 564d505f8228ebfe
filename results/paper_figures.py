"""The figures of the paper, drawn from the published runs and your own, for reproduce.py."""
import math
import statistics
import textwrap
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator
from scipy.interpolate import Akima1DInterpolator

from model import SIZES
from nanocem.files import markdown_table
from study import (
    TRIAL_SEEDS,
    HeldOut,
    Results,
    Row,
    Run,
    configs,
    finished,
    leave_out,
    load_study,
    planned_cells,
    split_failed,
    unique,
)

WIDTH, DPI = 8.3, 200  # of all pictures, in inches; pages show them 830 pixels wide
FIGURE_SIZES = ('XS', 'S', 'M', *SIZES)


# Points

class Point(NamedTuple):
    """A model's runs at one size and rate. The perplexity is that of the mean loss of the runs that
    did not fail, NaN if all did; `std` is its standard deviation over seeds."""
    series: str
    x: str  # what varies within the series; `baseline`: Llama, drawn as what others compare with
    size: str
    model: str
    rate: float
    held_out: HeldOut
    parameters: float
    tokens: float
    seeds: str
    failed: str  # those of the seeds whose runs failed
    perplexity: float
    std: float


def show_figure(figure: str, size: str | None, found: Results) -> None:
    """Print the table of a figure, at one size or at all, and draw it in out/figures."""
    points = collect(figure, size, found)
    if not points:
        print(f'Figure {figure} has no finished runs: --figure={figure} '
              f'--size={size or "XS"} --todo prints their commands\n', flush=True)
        return
    print(figure_table(figure, points, found), flush=True)
    if all(math.isnan(p.perplexity) for p in points):
        print(f'All runs of figure {figure} failed: it is not drawn\n', flush=True)
        return
    # The title is what the published runs show, at all their sizes
    title = load_study().figures[figure]['finding'].rstrip('.')
    if size or any(result.folder for result in found.values()):
        title = ''
    draw_figure(figure, points, title).savefig(f'out/figures/{figure}.png', dpi=DPI)
    print(f'out/figures/{figure}.png\n', flush=True)


def collect(figure: str, size: str | None, found: Results) -> list[Point]:
    """Return the points of a figure, at one size or at all: one for each series, size, rate and
    held-out text. A sweep has all rates, and the seeds of the trials at sizes that have trials. In
    other figures a model has one rate. Own runs that are left out have a line on stderr."""
    study = load_study()
    sizes = [size] if size else FIGURE_SIZES
    order = list(study.options)  # of sizes
    sweep = study.figures[figure]['plot'] == 'rates'
    trial_sizes = [name for name, row in study.sizes.items() if sweep and row['trial_seeds']]
    points = []
    for series in study.series:
        if series['figure'] != figure:
            continue

        # Group the model's runs by size and text, and these by rate
        groups: dict[tuple[str, HeldOut], dict[float, Results]] = {}
        for run, result in found.items():
            if run.model != series['model'] or run.size not in sizes:
                continue
            if (run.seed >= TRIAL_SEEDS) != (run.size in trial_sizes):
                kind = 'from' if run.size in trial_sizes else 'below'
                leave_out(result.folder, f'at {run.size} figure {figure} has the seeds {kind} '
                          f'{TRIAL_SEEDS} alone')
                continue
            rates = groups.setdefault((run.size, result.held_out), {})
            rates.setdefault(run.rate, {})[run] = result

        # Summarize the runs of each rate, or of one rate alone, in a point
        by_size = sorted(groups, key=lambda group: (order.index(group[0]), str(group[1])))
        for run_size, held_out in by_size:
            rates = groups[run_size, held_out]
            if not sweep:
                rates = choose_rate(figure, run_size, series['model'], rates)
            for rate in sorted(rates):
                points.append(summarize(series, rates[rate]))
    return points


def choose_rate(figure: str, size: str, model: str,
                rates: dict[float, Results]) -> dict[float, Results]:
    """Keep the runs of the planned rate, or else of the rate with most runs."""
    plan = {run.rate for run in planned(figure, size) if run.model == model}
    kept = max(rates, key=lambda rate: (rate in plan, len(rates[rate])))
    for rate, runs in rates.items():
        if rate != kept:
            for result in runs.values():
                leave_out(result.folder, f'figure {figure} has its model at the rate {kept:g}')
    return {kept: rates[kept]}


def summarize(series: Row, runs: Results) -> Point:
    """Return the point of a model's runs at one size and rate."""
    # Find the seeds whose runs failed
    y = {(run.model, run.seed): runs[run].y for run in sorted(runs)}
    ended, _ = split_failed(y)
    seeds = ' '.join(str(seed) for _, seed in y)
    failed = ' '.join(str(seed) for model, seed in y if (model, seed) not in ended)
    # Average the losses of all others
    losses = list(ended.values())
    perplexity = math.exp(statistics.fmean(losses)) if losses else math.nan
    std = statistics.stdev(map(math.exp, losses)) if len(losses) > 1 else 0
    # Failed runs know no parameters: take those of the best
    best = min(runs, key=lambda run: runs[run].y)
    return Point(series['series'], series['x'], best.size, best.model, best.rate,
                 runs[best].held_out, runs[best].parameters, runs[best].tokens, seeds, failed,
                 perplexity, std)


def planned(figure: str, size: str) -> list[Run]:
    """Return the runs of a figure at a size. A sweep has five rates, octaves around the size's. In
    other figures a model has the rate of the study, or that of the model that models.csv names, or
    Llama's, as in the paper. Series that are drawn only where there are runs have none."""
    study = load_study()
    sweep = study.figures[figure]['plot'] == 'rates'
    row = study.sizes.get(size, {})
    seeds = row.get('trial_seeds' if sweep else 'seeds') or '1'
    middle = float(row.get('middle_rate') or configs(study.options[size])[0].learning_rate)

    # Look up which rates the study has at this size
    known = {}
    for run in planned_cells(study.families):
        if run.size == size and run.seed < TRIAL_SEEDS:
            known[run.model] = run.rate

    # Plan each model once, whatever number of series has it
    models = [row['model'] for row in study.series
              if row['figure'] == figure and row['planned'] == 'yes']
    runs = []
    for model in unique(models):
        rates = [middle / 4, middle / 2, middle, middle * 2, middle * 4]
        if not sweep:
            names = model, study.models[model]['rate_of'], 'llama'
            rates = [next((known[name] for name in names if name in known), middle)]
        for rate in rates:
            runs += [Run(size, model, float(f'{rate:.3g}'), int(seed)) for seed in seeds.split()]
    return runs


def figure_table(figure: str, points: list[Point], found: Results) -> str:
    """Format the points, and the planned runs of their sizes that are missing. Name the data where
    there are two."""
    header = ['data', 'model', 'size', 'parameters', 'tokens', 'rate', 'seeds', 'perplexity',
              'lacks']
    # Write a row for each point
    rows = []
    for p in points:
        rows.append([str(p.held_out), p.model, p.size, f'{p.parameters:,.0f}', f'{p.tokens:,.0f}',
                     f'{p.rate:g}', p.seeds, f'{p.perplexity:.2f}',
                     f'failed: {p.failed}' if p.failed else ''])
    # Write a row for each run that is missing
    done = finished(found)
    for size in unique(p.size for p in points):
        for run in planned(figure, size):
            if run not in done:
                rows.append(['', run.model, size, '', '', f'{run.rate:g}', str(run.seed), '',
                             'missing'])
    # Leave the first column out where all have the same data
    first = 0 if len({p.held_out for p in points}) > 1 else 1
    table = markdown_table(header[first:], [row[first:] for row in rows])
    return f'Figure {figure}. The paper: {load_study().figures[figure]["paper"]}.\n\n{table}\n'


# Pictures

LLAMA_COLORS = {'llama': 'hotpink', 'llama-alibi': 'darkviolet'}
LLAMA_NAMES = {'llama': 'Llama with RoPE', 'llama-alibi': 'Llama with ALiBi'}
# Markers of models that hardly differ: later ones are smaller, or hollow and larger
SHAPES = [('D', 7, 'full'), ('v', 8, 'full'), ('o', 5, 'full'), ('s', 11, 'none'),
          ('^', 11, 'none')]


def draw_figure(figure: str, points: list[Point], title: str = '') -> Figure:
    """Draw the points, not all of which may have failed, below a title that says what they show: a
    picture for each held-out text, and of changes for each size, too."""
    # Divide the points among pictures
    plot = load_study().figures[figure]['plot']
    changes = plot == 'changes'
    groups: dict[tuple[str, HeldOut], list[Point]] = defaultdict(list)
    for p in points:
        groups[p.size if changes else '', p.held_out].append(p)
    groups = {key: group for key, group in groups.items()
              if not all(math.isnan(p.perplexity) for p in group)}

    # Leave out those without a comparison, of Llamas or a model alone, unless all are such
    compared = {}
    for key, group in groups.items():
        has_others = any(p.model not in LLAMA_COLORS for p in group)
        n_models = sum(p.x != 'baseline' for p in group)
        if has_others and (not changes or n_models > 1):
            compared[key] = group
    groups = compared or groups

    # Draw them, changes two beside each other at one scale
    columns = min(2, len(groups)) if changes else 1
    rows = math.ceil(len(groups) / columns)
    picture = Figure((WIDTH, 1 + 4 * rows), layout='constrained')
    picture.suptitle(textwrap.fill(title, 72), fontsize=11)
    all_axes = list(picture.subplots(rows, columns, squeeze=False, sharey=changes).flat)
    plots = {'parameters': plot_parameters, 'changes': plot_changes, 'rates': plot_rates}
    handles = {}
    for axes, ((size, held_out), group) in zip(all_axes, groups.items(), strict=False):
        plots[plot](axes, group)
        name = f'{size}, {held_out}' if changes else str(held_out)
        axes.set_title(textwrap.fill(f'{figure}: {name}', 100 // columns), fontsize=9)
        if not changes:
            axes.set_ylabel(f'perplexity {held_out.unit}')
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    for axes in all_axes[len(groups):]:
        axes.remove()

    # Explain each marker once, below all pictures
    picture.legend(handles.values(), handles.keys(), loc='outside lower center', ncols=2,
                   fontsize=9)
    return picture


def plot_parameters(axes: Axes, points: list[Point]) -> None:
    """Perplexity over parameters, with standard deviations, linked to that of the Llama with the
    same position encoding. Above the points of a size stand its tokens. Sizes with Llamas alone are
    left out, if others have a comparison."""
    points = [p for p in points if not math.isnan(p.perplexity)]
    compared = {p.size for p in points if p.x != 'baseline'}
    points = [p for p in points if p.size in compared] or points
    for size in unique(p.size for p in points):
        group = [p for p in points if p.size == size]

        # Link each point to the Llama with its position encoding
        llamas = {has_alibi(p): p for p in group if p.x == 'baseline'}
        for p in group:
            llama = llamas.get(has_alibi(p), p)
            axes.plot([llama.parameters, p.parameters], [llama.perplexity, p.perplexity], 'k-',
                      lw=0.3)

        # Write the size and its tokens above the middle of its points
        parameters = [p.parameters for p in group]
        center = math.sqrt(min(parameters) * max(parameters))
        top = max(p.perplexity + p.std for p in group)
        tokens = ' or '.join(unique(f'{p.tokens / 1e6:,.3g} M' for p in group))
        axes.annotate(f'{size}: {tokens} tokens', (center, top), (0, 8), ha='center', fontsize=9,
                      textcoords='offset points')

    # Draw the points of each series
    for n, (name, model) in enumerate(unique((p.series, p.model) for p in points)):
        marker, ms, fill = SHAPES[n % len(SHAPES)]
        shown = [p for p in points if p.series == name]
        axes.errorbar([p.parameters for p in shown], [p.perplexity for p in shown],
                      [p.std for p in shown], fmt=marker, ms=ms, fillstyle=fill, capsize=3,
                      color=LLAMA_COLORS.get(model), label=name)

    # Write a few plain numbers at both axes
    axes.set(xscale='log', xlabel='parameters', yscale='log')
    axes.margins(0.1, 0.12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(EngFormatter())


def has_alibi(p: Point) -> bool:
    return 'alibi' in load_study().models[p.model]['options']


def plot_changes(axes: Axes, points: list[Point]) -> None:
    """By how many per cent each perplexity differs from that of the Llama with the same position
    encoding, with standard deviations over seeds. Models of a series are linked, and both Llamas
    are dashed lines in bands."""
    # Compare with the Llama that has the position encoding of the first CEM model
    ended = [p for p in points if not math.isnan(p.perplexity)]
    ours = next((p for p in ended if 'llama' not in p.model), ended[0])
    zero = min(ended, key=lambda p: (p.model not in LLAMA_NAMES, has_alibi(p) != has_alibi(ours)))

    def percent(perplexity: float) -> float:
        return perplexity / zero.perplexity * 100

    # Draw the points in their order, those of a series in one colour
    shown = [p for p in points if p.x != 'baseline']
    for series in unique(p.series for p in shown):
        group = {place: p for place, p in enumerate(shown) if p.series == series}
        axes.errorbar(group.keys(), [percent(p.perplexity) - 100 for p in group.values()],
                      [percent(p.std) for p in group.values()], fmt='o-', ms=6, capsize=3,
                      label=series)
    # Draw a line for each Llama
    for p in ended:
        if p.model in LLAMA_NAMES:
            color, y, std = LLAMA_COLORS[p.model], percent(p.perplexity) - 100, percent(p.std)
            axes.axhline(y, ls='--', color=color, label=LLAMA_NAMES[p.model])
            axes.axhspan(y - std, y + std, color=color, alpha=0.15, lw=0)
    axes.set_xticks(range(len(shown)), [f'{p.x}\nfailed' if p.failed else p.x for p in shown],
                    fontsize=9)
    axes.margins(x=0.1)
    axes.set_ylabel(f'perplexity over that of {LLAMA_NAMES.get(zero.model, zero.series)}, %')


def plot_rates(axes: Axes, points: list[Point]) -> None:
    """Perplexity over the learning rate, a colour for each model and a marker for each size.
    Akima's interpolation over the log of the rate has a star at its minimum, if that is between
    two neighbours of the lowest point. Crosses are rates with failed runs. Sizes at which every
    model has one rate are left out, if others have more."""
    # Find the sizes with a sweep
    rates = Counter((p.series, p.size) for p in points)
    swept = {size for (_, size), n in rates.items() if n > 1}
    points = [p for p in points if p.size in swept] or points

    names, sizes = unique(p.series for p in points), unique(p.size for p in points)
    for name, size in unique((p.series, p.size) for p in points):
        curve = [p for p in points if (p.series, p.size) == (name, size)]
        color = LLAMA_COLORS.get(curve[0].model, f'C{names.index(name)}')
        marker = 'osD^v<>'[sizes.index(size) % 7]

        # Draw a curve through the points, with a star at its minimum
        star = None
        for part in segments(curve):
            if len(part) > 2:
                star = plot_segment(axes, part, lowest_of(curve), color) or star

        # Draw the points
        ended = [p for p in curve if not p.failed]
        axes.errorbar([p.rate for p in ended], [p.perplexity for p in ended],
                      [p.std for p in ended], fmt=marker, color=color, ms=5, capsize=2,
                      label=f'{name}, {size}: {describe_lowest(curve, star)}')

        # Draw a cross at the top for each rate with a failed run
        for p in curve:
            if p.failed:
                axes.plot(p.rate, 0.98, 'x', color=color, transform=axes.get_xaxis_transform(),
                          label='x: a run failed')

    # Write a few plain numbers at both axes
    axes.set(xscale='log', xlabel='learning rate', yscale='log')
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter('{x:g}')


def lowest_of(curve: list[Point]) -> Point | None:
    """Return the point of the lowest perplexity, of those without a failed run."""
    ended = [p for p in curve if not p.failed]
    return min(ended, key=lambda p: p.perplexity, default=None)


def segments(points: list[Point]) -> list[list[Point]]:
    """Split the points of a curve, sorted by rate, where interpolation cannot be believed: at rates
    with a failed run, a loss 0.5 nats above the lowest or other seeds than the lowest has, and
    between rates that are more than an octave apart."""
    lowest = lowest_of(points)
    parts: list[list[Point]] = [[]]
    for p in points:
        if p.failed or p.seeds != lowest.seeds or p.perplexity > lowest.perplexity * math.exp(0.5):
            parts.append([])
        elif parts[-1] and p.rate > 2.1 * parts[-1][-1].rate:  # rates are rounded
            parts.append([p])
        else:
            parts[-1].append(p)
    return [part for part in parts if part]


def plot_segment(axes: Axes, part: list[Point], lowest: Point,
                 color: str) -> tuple[float, float] | None:
    """Interpolate a part of a curve. If the curve's lowest point has two neighbours in it, draw and
    return a star: the rate and perplexity of the minimum between these."""
    rates = [p.rate for p in part]
    spline = Akima1DInterpolator(np.log(rates), [p.perplexity for p in part])
    x = np.geomspace(rates[0], rates[-1], 1001)
    axes.plot(x, spline(np.log(x)), color=color, lw=1)
    if lowest not in part[1:-1]:
        return None
    n = part.index(lowest)
    x = np.geomspace(rates[n - 1], rates[n + 1], 1001)
    y = spline(np.log(x))
    star = x[y.argmin()], y.min()
    axes.plot(*star, '*', color=color, mec='black', ms=13, zorder=3)
    return star


def describe_lowest(curve: list[Point], star: tuple[float, float] | None) -> str:
    """Say where a curve is lowest, and how well that is known."""
    lowest = lowest_of(curve)
    if lowest is None:
        return 'all rates failed'
    if star is not None:
        rate, perplexity = star
        return f'star {perplexity:.1f} at {rate:.3g}'
    why = 'one rate' if len(curve) == 1 else 'lowest, at the edge'
    return f'{lowest.perplexity:.1f} at {lowest.rate:.3g}, {why}'

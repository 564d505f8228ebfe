"""
Does the paper hold? Its claims with their verdicts, its figures, and the runs behind both.

    python reproduce.py                                  print the verdicts on all claims
    python reproduce.py --todo | sh                      train the missing runs, one by one
    python reproduce.py --figure=3a                      draw a figure of the paper, print its table
    python reproduce.py --figure=3a --size=86m --todo    print the commands of its missing runs

results/tokens has the first family of claims, models, sizes and the rule. Its folders second and
third have later families, and results/figures the paper's figures. Your own runs are in
out/reproduce/SIZE/ and out/figures/SIZE/. `--todo | xargs -P 2 -I{} sh -c "{}"` trains two at a
time; the same command goes on after a stop.

A run's loss y is in nats per Llama token of the held-out text, validation and test together. At
sizes other than those of results/tokens it is in nats per token of the test text.
"""
import csv
import glob
import math
import os
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

if __name__ == '__main__':  # pictures go into files, whatever backend a notebook asks for
    os.environ['MPLBACKEND'] = 'agg'

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator
from scipy.interpolate import Akima1DInterpolator

from configurator import build, check, command_line, fail, read_options
from model import SIZES, ModelConfig, Transformer
from nanocem.files import read_json, read_json_lines
from nanocem.flops import flops_per_token
from nanocem.metrics import markdown_table
from nanocem.runs import read_result
from nanocem.verdicts import Effect, Losses, compare, decide, split_failed
from train import MAX_SKIPPED, RECIPE, TrainConfig

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results')
# Each family of claims has a folder with its rule, claims, models, planned runs and finished runs
FAMILIES = [f'{RESULTS}/tokens', f'{RESULTS}/tokens/second', f'{RESULTS}/tokens/third']
FIRST, FIGURE_DATA = FAMILIES[0], f'{RESULTS}/figures'
TRIAL_SEEDS = 101  # seeds from here on belong to trials, which choose learning rates


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


STUDY_SIZES = {row['size']: row for row in read_csv(f'{FIRST}/sizes.csv')}
MODELS: dict[str, dict[str, str]] = defaultdict(dict)  # what all families say of a model
for folder in FAMILIES:
    for row in read_csv(f'{folder}/models.csv'):
        MODELS[row['model']] |= row
FIGURES = {row['figure']: row for row in read_csv(f'{FIGURE_DATA}/figures.csv')}
SERIES = read_csv(f'{FIGURE_DATA}/series.csv')
# train.py's options for each size: of the paper, of a laptop, and of the study
SIZE_OPTIONS = {size: f'--size={size}' for size in SIZES}
SIZE_OPTIONS |= {size: f'config/{size}.py --vocab_size=257' for size in ('nano', 'mini')}
SIZE_OPTIONS |= {size: row['options'] for size, row in STUDY_SIZES.items()}


# Models and runs

class Run(NamedTuple):
    """One training run."""
    size: str
    model: str
    rate: float
    seed: int


Results = dict[Run, dict[str, Any]]  # y, parameters, tokens, panel; of own runs also result.json


def read_runs(*paths: str) -> dict[Run, dict[str, str]]:
    """Read CSVs that have a run in each row."""
    return {Run(row['size'], row['model'], float(row['rate']), int(row['seed'])): row
            for path in paths for row in read_csv(path)}


def run_options(run: Run) -> str:
    """Return train.py's options for a run."""
    model = MODELS[run.model]
    options = f'{SIZE_OPTIONS[run.size]} {model["options"]}'
    if column := model.get('d_mlp'):  # the width that gives as many weights as another model has
        options += f' --d_mlp={STUDY_SIZES[run.size][column]}'
    if run.size == '256m' and run.model.startswith('cem'):
        options += ' --n_layer=16 --tokens=5.1B'  # two more layers, and the tokens of the Llama
    options += f' --learning_rate={run.rate:g} --seed={run.seed}'
    # Of an option that is given twice keep the later value
    return ' '.join({option.partition('=')[0]: option for option in options.split()}.values())


@cache
def configs(options: str) -> tuple[TrainConfig, ModelConfig]:
    """Return what train.py makes of these options."""
    given = read_options(options.split(), TrainConfig, ModelConfig)
    return build(TrainConfig, given), build(ModelConfig, given)


def print_todo(runs: list[Run], root: str) -> None:
    """Print shell commands that train or resume the runs in `root`: on eight GPUs at the paper's
    sizes, on one thread at others. Estimate the hours on an A100 at 1e14 FLOP/s, a third of its
    peak, or on a CPU core at 3e10."""
    for run in runs:
        options = run_options(run)
        train, cfg = configs(options)
        with torch.device('meta'):
            tokens = train.tokens or 20 * Transformer(cfg.llama()).num_params()
            flops = tokens * flops_per_token(Transformer(cfg))
        start, hours = 'torchrun --nproc_per_node=8', f'{flops / 1e14 / 3600:.2g} A100-hours'
        if run.size in ('nano', 'mini', *STUDY_SIZES):
            start, hours = 'OMP_NUM_THREADS=1 python', f'{flops / 3e10 / 3600:.2g} core-hours'
        folder = f'{root}/{run.size}/{run.model}_rate={run.rate:g}_seed={run.seed}'
        resume = ' --init_from=resume' if os.path.exists(f'{folder}/config.json') else ''
        print(f'{start} train.py {options} --out_dir={folder}{resume}  # {hours}', flush=True)


def panel(size: str, train: TrainConfig, model: ModelConfig) -> str:
    """Describe the data of a run: only points of the same data share a picture."""
    measured = f'{train.test_tokens / 1e6:g} M test tokens; per token'
    if size in STUDY_SIZES:
        measured = 'all held-out text; per Llama token'
    return (f'{train.data}, vocabulary {model.vocab_size:,}, context {model.context_length:,}, '
            f'{measured}')


def read_published() -> Results:
    """Read the published runs of all families and of the figures."""
    runs = read_runs(f'{FIRST}/more_seeds.csv',
                     *(f'{folder}/runs.csv' for folder in (*FAMILIES, FIGURE_DATA)))
    return {run: {'panel': panel(run.size, *configs(SIZE_OPTIONS[run.size]))}
            | {name: float(row[name]) for name in ('y', 'parameters', 'tokens')}
            for run, row in runs.items()}


def read_own() -> Results:
    """Read the finished runs in out/. Folders that are no run, or another one than their name says,
    are left out, with a line on stderr."""
    own: Results = {}
    for folder in sorted(glob.glob('out/reproduce/*/*') + glob.glob('out/figures/*/*')):
        try:
            own |= read_run(folder)
        except (OSError, ValueError, TypeError, KeyError) as error:
            print(f'{folder} is left out: {error}', file=sys.stderr, flush=True)
    return own


def read_run(folder: str) -> Results:
    """Return the result of a run, whose y is infinite if it failed; nothing if it has not ended.
    UserError, ValueError, TypeError or KeyError if it is damaged, or another run than its name."""
    # Compare what was trained with what the folder's name says
    match = (re.fullmatch(r'out/\w+/(.+)/(.+)_rate=(.+)_seed=(\d+)', folder)
             or fail('expected SIZE/MODEL_rate=0.01_seed=1'))
    run = Run(match[1], match[2], float(match[3]), int(match[4]))
    config = read_json(f'{folder}/config.json') or fail('it has no config.json')
    train, cfg = build(TrainConfig, config['train']), build(ModelConfig, config['model'])
    named_train, named_cfg = configs(f'{run_options(run)} --vocab_size={cfg.vocab_size}')
    same = [getattr(train, name) == getattr(named_train, name)
            for name in ('tokens', 'tokens_per_param', 'test_tokens', 'init_from', *RECIPE)]
    check(all(same) and cfg == named_cfg, 'its config.json is that of another run')
    # Read the loss
    row = {'panel': panel(run.size, train, cfg)}
    check(not config.get('rescheduled'), f'its first {config.get("rescheduled")} steps had the '
          'learning rate of a run of another length: delete the folder to train it anew')
    if result := read_result(folder, config):
        y = float(result['test_loss'])
        if run.size in STUDY_SIZES:
            y = loss_per_llama_token(result, train.data)
        return {run: row | result | {'y': y}}
    # train.py ends a run after more than MAX_SKIPPED consecutive steps without a finite loss
    log = read_json_lines(f'{folder}/log.jsonl')
    skipped = [line['step'] for line in log if line.get('event') == 'skipped'][-MAX_SKIPPED - 1:]
    if len(skipped) <= MAX_SKIPPED or skipped[-1] - skipped[0] > MAX_SKIPPED:
        return {}
    return {run: row | {'y': math.inf, 'parameters': math.nan, 'tokens': math.nan}}


def loss_per_llama_token(result: dict[str, Any], data: str) -> float:
    """Convert bits per byte of both splits to nats per Llama token, by text.csv. UserError if the
    data folder is there and holds another text."""
    meta = read_json(f'{data}/meta.json')
    bits, llama_tokens = 0.0, 0
    for row in read_csv(f'{FIRST}/text.csv'):
        split, n_bytes = row['split'], int(row['bytes'])
        # The text has so many tokens with bpe2048, or as bytes with a BOS before each document
        known = int(row['bpe2048_tokens']), n_bytes + int(row['documents'])
        check(meta is None or meta['splits'][split]['tokens'] in known,
              f'{data} is not the text whose tokens results/tokens/text.csv counts')
        bits += result[f'{split}_bits_per_byte'] * n_bytes
        llama_tokens += int(row['llama_tokens'])
    return math.log(2) * bits / llama_tokens


def planned_cells(families: list[str]) -> list[Run]:
    """Return the runs that count in these families, finished or not. The first family's are those
    that it has published."""
    paths = [f'{folder}/{"runs" if folder == FIRST else "cells"}.csv' for folder in families]
    return list(read_runs(*paths))


# Verdicts

Verdict = tuple[dict[str, str], list[Effect], str]  # a claim, its effect at each size, the word


def judge(folder: str, found: Results) -> list[Verdict]:
    """Return the verdicts on all claims in a folder, by its RULE.md."""
    claims = [{'unit': 'perplexity'} | row for row in read_csv(f'{folder}/verdicts.csv')]
    # The first family counts its own runs. Later ones count those of the families before them, too,
    # but only of their own models, and pool noise by kinds of models
    number = FAMILIES.index(folder)
    runs, kinds = planned_cells(FAMILIES[:number + 1]), {}
    if number > 0:
        runs += read_runs(f'{FIRST}/more_seeds.csv')
        models = {claim[side]: MODELS[claim[side]] for claim in claims for side in 'AB'}
        # The second family tells models whose MLP is CEM's or repeated from all others
        kinds = {name: row['mlp'] == 'plain' if number == 1 else row['noise']
                 for name, row in models.items()}
    # Collect the losses at each size, without trials. Of two rates of a model the later line
    # counts: only `cem-2-normed` at XS has two, the first one by mistake (results/tokens)
    y: dict[tuple[str, str], Losses] = defaultdict(dict)
    for run in runs:
        if run in found and run.seed < TRIAL_SEEDS and (not kinds or run.model in kinds):
            y['perplexity', run.size][run.model, run.seed] = found[run]['y']
    # One claim compares the logs of the trials' best rates
    for row in read_csv(f'{FIRST}/best_rates.csv'):
        y['rate', row['size']][row['model'], int(row['seed'])] = math.log(float(row['rate']))
    all_sizes = list(dict.fromkeys(size for row in claims for size in row['sizes'].split()))
    verdicts = []
    for claim in claims:
        # Compare its two models at each size
        unit, sizes, effects = claim['unit'], claim['sizes'].split(), []
        for size in sizes:
            m = sum(row['unit'] == unit and size in row['sizes'].split() for row in claims)
            # From the third family on, the noise is that of all its sizes
            others = [y[unit, other] for other in all_sizes if other != size and number > 1]
            # A side may name two models, of which the trials chose one: the other has no runs
            effects += [effect for A in claim['A'].split('/') for B in claim['B'].split('/')
                        if (effect := compare(y[unit, size], A, B, size, m, kinds, others))]
        # Decide by the largest size with an interval, or by all sizes where sizes.csv says so
        above, below = float(claim['above_%'] or '-inf'), float(claim['below_%'] or 'inf')
        words = [word for effect in effects if (word := decide(effect, above, below))]
        if not sizes:
            word = 'see results/gp'
        elif unit == 'failed runs':
            failed = set().union(*(split_failed(y['perplexity', size])[1] for size in sizes))
            word = 'does not hold' if any('cem' in model for model in failed) else 'holds'
        elif not words:
            word = 'one seed' if effects else 'not run'
        elif STUDY_SIZES[sizes[0]]['word'] == 'largest size' or words == words[:1] * len(sizes):
            word = words[-1]
        else:
            word = 'undecided'
        verdicts.append((claim, effects, word))
    return verdicts


def verdict_table(verdicts: list[Verdict]) -> str:
    """Format the verdicts, beside the expected effects if verdicts.csv has them."""
    columns = [name for name in ('id', 'claim', 'A', 'B', 'kind', 'expected_S', 'expected_M')
               if name in verdicts[0][0]]
    rows = [[*map(claim.get, columns), '; '.join(map(str, effects)), word]
            for claim, effects, word in verdicts]
    return markdown_table([*columns, 'A over B', 'verdict'], rows)


def draw_verdicts(verdicts: list[Verdict]) -> plt.Figure:
    """Draw the interval of every claim, at the largest size that has one, coloured by verdict."""
    # A later claim about the same models repeats an earlier one with fewer seeds: leave it out
    shown = {}
    for claim, effects, word in verdicts:
        effect = next((effect for effect in reversed(effects) if effect.half_width > 0), None)
        if effect and claim['unit'] == 'perplexity':
            shown.setdefault((claim['A'], claim['B'], effect.size), (claim, effect, word))
    # Draw them from bottom to top
    colors, labels = {'holds': 'C2', 'does not hold': 'C3', 'undecided': 'gray'}, []
    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(shown)), layout='constrained')
    for place, (claim, effect, word) in enumerate(reversed(shown.values())):
        d, low, high = effect.percent()
        axes.errorbar(d, place, xerr=[[d - low], [high - d]], fmt='o', ms=4, color=colors[word])
        bounds = [float(claim[name]) for name in ('above_%', 'below_%') if claim[name]]
        axes.plot(bounds, [place] * len(bounds), '|', color='black', ms=12)
        text = claim['claim'].replace('d_k', 'key-query diagonal')
        labels.append(f'{text}; {effect.size}, {len(effect.by_seed)} seeds')
    axes.set_yticks(range(len(shown)), labels, fontsize=7)
    axes.set_xscale('symlog', linthresh=10)
    axes.set_xticks(ticks := [-10, -5, -2, 0, 2, 5, 10, 20, 50], ticks)
    axes.set_xlabel('change in perplexity, %, logarithmic beyond 10; black: bounds of the claim\n'
                    'green: the claim holds, red: it does not hold, grey: undecided\n'
                    'a Llama without ALiBi has RoPE')
    return figure


# The paper's figures

class Point(NamedTuple):
    """A model's runs at one size and rate. The perplexity is that of the mean loss of the runs that
    did not fail, NaN if all did; `std` is its standard deviation over seeds."""
    series: str
    x: str  # what varies within the series; `baseline`: Llama, drawn as what others compare with
    size: str
    model: str
    rate: float
    panel: str
    parameters: float
    tokens: float
    seeds: str
    failed: str  # those of the seeds whose runs failed
    perplexity: float
    std: float


def collect(figure: str, size: str | None, found: Results) -> list[Point]:
    """Return the points of a figure, at one size or at all: one for each series, size, rate and
    panel. A sweep of rates has the seeds of the trials, at sizes that have trials."""
    sweep = FIGURES[figure]['plot'] == 'rates'
    trial_sizes = {name for name, row in STUDY_SIZES.items() if sweep and row['trial_seeds']}
    points = []
    for series in (row for row in SERIES if row['figure'] == figure):
        # Group the model's runs
        groups: dict[tuple[str, float, str], Results] = defaultdict(dict)
        for run, row in found.items():
            if (run.model == series['model'] and size in (run.size, None)
                    and (run.seed >= TRIAL_SEEDS) == (run.size in trial_sizes)):
                groups[run.size, run.rate, row['panel']][run] = row
        # Summarize each group
        for (run_size, rate, panel_name), runs in sorted(groups.items()):
            y = {(run.model, run.seed): row['y'] for run, row in runs.items()}
            finished, _ = split_failed(y)
            losses = finished.values()
            best = min(runs.values(), key=lambda row: row['y'])
            points.append(Point(
                series['series'], series['x'], run_size, series['model'], rate, panel_name,
                best['parameters'], best['tokens'], ' '.join(str(seed) for _, seed in y),
                ' '.join(str(seed) for model, seed in y if (model, seed) not in finished),
                math.exp(statistics.fmean(losses)) if losses else math.nan,
                statistics.stdev(map(math.exp, losses)) if len(losses) > 1 else 0))
    return points


def planned(figure: str, size: str) -> list[Run]:
    """Return the runs of a figure at a size. A sweep has five rates, octaves around the size's. In
    other figures a model has its published rate, or that of the model that models.csv names, or
    Llama's, as in the paper."""
    sweep = FIGURES[figure]['plot'] == 'rates'
    study = STUDY_SIZES.get(size, {})
    seeds = study.get('trial_seeds' if sweep else 'seeds') or '1'
    middle = float(study.get('middle_rate') or configs(SIZE_OPTIONS[size])[0].learning_rate)
    published = {run.model: run.rate for run in read_runs(f'{FIRST}/runs.csv')
                 if run.size == size and run.seed < TRIAL_SEEDS}
    runs = []
    for model in dict.fromkeys(row['model'] for row in SERIES if row['figure'] == figure):
        names = model, MODELS[model]['rate_of'], 'llama'
        best = next((published[name] for name in names if name in published), middle)
        for rate in [middle * 2 ** n for n in (-2, -1, 0, 1, 2)] if sweep else [best]:
            runs += [Run(size, model, float(f'{rate:.3g}'), int(seed)) for seed in seeds.split()]
    return runs


def figure_table(figure: str, points: list[Point], found: Results) -> str:
    """Format the points, and the planned runs of their sizes that are missing."""
    rows = [[p.model, p.size, f'{p.parameters:,.0f}', f'{p.tokens:,.0f}', f'{p.rate:g}', p.seeds,
             f'{p.perplexity:.2f}', p.failed and f'failed: {p.failed}'] for p in points]
    rows += [[run.model, run.size, '', '', f'{run.rate:g}', str(run.seed), '', 'missing']
             for size in dict.fromkeys(p.size for p in points) for run in planned(figure, size)
             if run not in found]
    header = ['model', 'size', 'parameters', 'tokens', 'rate', 'seeds', 'perplexity', 'lacks']
    paper = FIGURES[figure]['paper']
    return f'Figure {figure}. The paper: {paper}.\n\n{markdown_table(header, rows)}\n'


def plot_parameters(axes: Axes, points: list[Point]) -> None:
    """Perplexity over parameters, linked to Llama's, with the tokens above the markers."""
    llama = {p.size: p for p in points if p.x == 'baseline'}
    for p in points:
        start = llama.get(p.size, p)
        axes.plot([start.parameters, p.parameters], [start.perplexity, p.perplexity], 'k-', lw=0.3)
        axes.annotate(f'{p.tokens / 1e6:.3g} M', (p.parameters, p.perplexity), (0, 6),
                      textcoords='offset points', ha='center', fontsize=7)
    for name, marker in zip(dict.fromkeys(p.series for p in points), 'Dos', strict=False):
        shown = [p for p in points if p.series == name]
        axes.plot([p.parameters for p in shown], [p.perplexity for p in shown], marker, label=name)
    axes.set(xscale='log', xlabel='parameters', yscale='log')
    for axis in (axes.xaxis, axes.yaxis):  # a few plain numbers
        axis.set_major_locator(MaxNLocator(4))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(EngFormatter())


def plot_bars(axes: Axes, points: list[Point]) -> None:
    """A bar for each model, coloured by series. What T = 2 brings is shaded, Llama's perplexity
    dashed."""
    shown = [p for p in points if p.x != 'baseline']
    for series in dict.fromkeys(p.series for p in shown):
        bars = {place: p for place, p in enumerate(shown) if p.series == series}
        axes.bar(bars.keys(), [p.perplexity for p in bars.values()], label=series,
                 yerr=[p.std for p in bars.values()], capsize=2)
        before = {p.x: p.perplexity for p in bars.values()}.get('T = 1')
        for place, p in bars.items():
            if before and p.x == 'T = 2':
                axes.bar(place, before - p.perplexity, bottom=p.perplexity, color='gray', alpha=0.4)
    for p in points:
        if p.x == 'baseline':
            axes.axhline(p.perplexity, ls='--', color='hotpink', label=p.series)
    axes.set_xticks(range(len(shown)), [p.x for p in shown])
    perplexities = [p.perplexity for p in points]
    axes.set_ylim(0.95 * min(perplexities), 1.1 * max(perplexities))


def plot_rates(axes: Axes, points: list[Point]) -> None:
    """Perplexity over the learning rate, with Akima's interpolation over the log of the rate and a
    star at its minimum."""
    for curve in dict.fromkeys((p.series, p.size) for p in points):
        shown = [(p.rate, p.perplexity) for p in points if (p.series, p.size) == curve]
        rates, perplexities = np.array(sorted(shown)).T
        (dots,) = axes.plot(rates, perplexities, 'o', label=', '.join(curve))
        if len(rates) >= 3:
            x = np.geomspace(rates[0], rates[-1], 1001)
            y = Akima1DInterpolator(np.log(rates), perplexities)(np.log(x))
            axes.plot(x, y, color=dots.get_color(), lw=1)
            axes.plot(x[y.argmin()], y.min(), '*', color=dots.get_color(), ms=14,
                      label=f'{y.min():.2f} at {x[y.argmin()]:.3g}')
    axes.set(xscale='log', xlabel='learning rate')
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter('{x:g}')


PLOTS = {'parameters': plot_parameters, 'bars': plot_bars, 'rates': plot_rates}


def draw_figure(figure: str, points: list[Point]) -> plt.Figure:
    """Draw the points that did not fail, a picture for each panel, and for each size of bars."""
    plot = FIGURES[figure]['plot']
    panels: dict[str, list[Point]] = defaultdict(list)
    for p in points:
        if not math.isnan(p.perplexity):
            panels[f'{p.size}, {p.panel}' if plot == 'bars' else p.panel].append(p)
    # Leave out panels with Llama alone, unless all are such
    panels = {name: group for name, group in panels.items()
              if len({p.series for p in group}) > 1} or panels
    picture, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False,
                                 layout='constrained')
    for ax, (name, group) in zip(axes[0], panels.items(), strict=True):
        PLOTS[plot](ax, group)
        ax.set_title(f'{figure}: {name}', fontsize=7)
        ax.set_ylabel('perplexity per ' + name.partition('; per ')[2])
        ax.legend(fontsize=7)
    return picture


@dataclass
class ReproduceConfig:
    """What to print."""
    todo: bool = False  # print the commands of missing runs
    figure: Literal[(*FIGURES, 'all')] | None = None  # draw this figure of the paper
    size: Literal[('XS', 'S', 'M', *SIZES)] | None = None  # for --figure: only this; --todo: XS


@command_line
def main(argv: list[str]) -> None:
    cfg = build(ReproduceConfig, read_options(argv, ReproduceConfig))
    check(cfg.size is None or cfg.figure is not None, f'size={cfg.size} is for --figure')
    own = read_own()
    found = own | read_published()
    figures = FIGURES if cfg.figure == 'all' else [cfg.figure]
    if cfg.todo:
        runs, root = planned_cells(FAMILIES), 'out/reproduce'
        if cfg.figure:
            runs = dict.fromkeys(run for f in figures for run in planned(f, cfg.size or 'XS'))
            root = 'out/figures'
        print_todo([run for run in runs if run not in found], root)
    elif cfg.figure:
        os.makedirs('out/figures', exist_ok=True)
        for figure in figures:
            points = collect(figure, cfg.size, found)
            if points:
                print(figure_table(figure, points, found), flush=True)
                draw_figure(figure, points).savefig(f'out/figures/{figure}.png')
                print(f'out/figures/{figure}.png\n', flush=True)
            else:
                print(f'Figure {figure} has no finished runs: --figure={figure} '
                      f'--size={cfg.size or "XS"} --todo prints their commands\n', flush=True)
    else:
        os.makedirs('out/results', exist_ok=True)
        families = [judge(folder, found) for folder in FAMILIES]
        print('A over B: how much higher the perplexity per Llama token of A is than that of B, '
              'the interval over seeds, and each seed alone.\n', flush=True)
        for verdicts in families:
            print(f'{verdict_table(verdicts)}\n', flush=True)
        latest_first = [verdict for verdicts in reversed(families) for verdict in verdicts]
        draw_verdicts(latest_first).savefig('out/results/rows.png')
        print('out/results/rows.png shows all effects', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])

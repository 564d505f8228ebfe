"""
Does the paper hold? Its claims with their verdicts, its figures, and the runs behind both.

    python results/reproduce.py                  draw and print the verdicts on the claims
    python results/reproduce.py --todo | sh      train the missing runs, one by one
    python results/reproduce.py --figure=3a      draw a figure of the paper, print its table
    python results/reproduce.py --figure=3a --size=86m --todo    commands of its missing runs

results/tokens has the first family of claims, models and sizes, and its folders second and third
have later ones; verdicts.py there computes effects.csv, whose verdicts are printed and drawn here.
results/figures has the paper's figures. Your own runs are in out/reproduce/SIZE/ and
out/figures/SIZE/.
`--todo | xargs -P 2 -I{} sh -c "{}"` trains two at a time; the same command goes on after a stop.

Runs of the sizes of results/tokens that read its text have a loss y in nats per Llama token of the
held-out text, validation and test together. Other runs have one in nats per token of the test text,
and stand in no row. A run that is left out has a line on stderr.
"""
import glob
import math
import os
import re
import statistics
import sys
import textwrap
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # model.py is a folder above

if __name__ == '__main__':  # pictures go into files, whatever backend a notebook asks for
    os.environ['MPLBACKEND'] = 'agg'

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator
from scipy.interpolate import Akima1DInterpolator

from configurator import PathStr, build, command_line, read_options
from model import SIZES, ModelConfig, Transformer
from nanocem.errors import check, fail
from nanocem.files import read_json, read_json_lines, write_atomic
from nanocem.flops import flops_per_token
from nanocem.report import markdown_table, read_csv
from nanocem.runs import RECIPE, load_model, read_result, short_list, split_failed
from nanocem.same import differing, in_use
from train import MAX_SKIPPED, TrainConfig

RESULTS = f'{ROOT}/results'
# Each family of claims has a folder with its rule, claims, models, planned runs and finished runs
FAMILIES = [f'{RESULTS}/tokens', f'{RESULTS}/tokens/second', f'{RESULTS}/tokens/third']
FIRST, FIGURE_DATA = FAMILIES[0], f'{RESULTS}/figures'
LLAMA_COLORS = {'llama': 'hotpink', 'llama-alibi': 'darkviolet'}
WIDTH, DPI = 8.3, 200  # of all pictures, in inches; pages show them 830 pixels wide
TRIAL_SEEDS = 101  # seeds from here on belong to trials, which choose learning rates
# The study's text, as 2,048 byte-pair tokens and as bytes: what identifies it, by vocabulary
TEXTS = {text['vocab_size']: text for text in (
    read_json(f'{FIRST}/text.json'), read_json(f'{FIRST}/english_bytes.json'))}
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
FIGURE_SIZES = ('XS', 'S', 'M', *SIZES)
# Of a family's runs.csv
RUN_COLUMNS = ('size', 'model', 'rate', 'seed', 'parameters', 'tokens', 'flops_per_token',
               'seconds', 'val_bits_per_byte', 'test_bits_per_byte', 'y')


# Models and runs

class Run(NamedTuple):
    """One training run. `data` is empty for a planned run, and for one of the study's text at a
    size of the study. Other runs name what they read."""
    size: str
    model: str
    rate: float
    seed: int
    data: str = ''


# y, parameters, tokens, panel; of own runs also the folder, and result.json
Results = dict[Run, dict[str, Any]]


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


def name_data(size: str, folder: str, data: dict[str, Any]) -> str:
    """Name what a run read by the checksums of its data, since other data may have the same
    folder. Empty for the study's text at a size of the study. KeyError if one is missing."""
    known = {name: data[name] for name in TEXTS[257]}
    if size in STUDY_SIZES and known == TEXTS[configs(SIZE_OPTIONS[size])[1].vocab_size]:
        return ''
    return f'{folder} ({zlib.crc32(repr(known).encode()):08x})'


def panel(run: Run, train: TrainConfig, model: ModelConfig) -> str:
    """Describe the data of a run: only points of the same data share a picture."""
    measured = f'{train.test_tokens / 1e6:g} M test tokens; per token'
    if run.size in STUDY_SIZES and not run.data:
        measured = 'all held-out text; per Llama token'
    return (f'{run.data or "English manuals"}, vocabulary {model.vocab_size:,}, '
            f'context {model.context_length:,}, {measured}')


def read_published() -> Results:
    """Read the published runs of all families and of the figures. All read the study's text."""
    runs = read_runs(f'{FIRST}/more_seeds.csv',
                     *(f'{folder}/runs.csv' for folder in (*FAMILIES, FIGURE_DATA)))
    return {run: {'panel': panel(run, *configs(SIZE_OPTIONS[run.size]))}
            | {name: float(row[name]) for name in ('y', 'parameters', 'tokens')}
            for run, row in runs.items()}


def leave_out(folder: str, reason: Any) -> None:
    """Say on stderr why a folder does not count."""
    print(f'{folder} is left out: {reason}', file=sys.stderr, flush=True)


def read_own() -> Results:
    """Read the finished runs in out/. Folders that are no run, another one than their name says, or
    a second copy of one, are left out."""
    own: Results = {}
    for folder in sorted(glob.glob('out/reproduce/*/*') + glob.glob('out/figures/*/*')):
        try:
            for run, row in read_run(folder).items():
                if run in own:
                    leave_out(folder, f'{own[run]["folder"]} is the same run')
                else:
                    own[run] = row | {'folder': folder}
        except (OSError, ValueError, TypeError, KeyError) as error:
            leave_out(folder, error)
    return own


def read_all() -> Results:
    """Read published and own runs. Own copies of published runs are left out."""
    published, own = read_published(), read_own()
    for run in own:
        if run in published:
            leave_out(own[run]['folder'], 'the run is published with a loss of '
                      f'{published[run]["y"]:.4f}; here it is {own[run]["y"]:.4f}')
    return own | published


def read_run(folder: str) -> Results:
    """Return the result of a run, whose y is infinite if it failed; nothing if it has not ended.
    UserError, ValueError, TypeError or KeyError if it is damaged, or another run than its name."""
    # Compare what was trained with what the folder's name says
    match = (re.fullmatch(r'out/\w+/(.+)/(.+)_rate=(.+)_seed=(\d+)', folder)
             or fail('expected SIZE/MODEL_rate=0.01_seed=1'))
    check(match[1] in SIZE_OPTIONS and match[2] in MODELS,
          f'no size {match[1]} has a model {match[2]} here: expected those of models.csv')
    run = Run(match[1], match[2], float(match[3]), int(match[4]))
    config = read_json(f'{folder}/config.json') or fail('it has no config.json')
    train, cfg = build(TrainConfig, config['train']), build(ModelConfig, config['model'])
    named_train, named_cfg = configs(f'{run_options(run)} --vocab_size={cfg.vocab_size}')
    same = [getattr(train, name) == getattr(named_train, name)
            for name in ('tokens', 'tokens_per_param', 'test_tokens', 'init_from', *RECIPE)]
    check(all(same) and cfg == named_cfg, 'its config.json is that of another run')
    if edited := differing(config.get('code', in_use()), in_use()):
        # A text that computes the same is no other model: ask the weights
        _, state = load_model(folder)
        check(not state['change'],
              f'{short_list(edited)} of model.py differ, and {state["change"]}')
    run = run._replace(data=name_data(run.size, train.data, config['data']))
    # Read the loss
    row = {'panel': panel(run, train, cfg)}
    if result := read_result(folder, config):
        y = float(result['test_loss'])
        if run.size in STUDY_SIZES and not run.data:
            y = loss_per_llama_token(result)
        return {run: row | result | {'y': y}}
    # train.py ends a run after more than MAX_SKIPPED consecutive steps without a finite loss
    log = read_json_lines(f'{folder}/log.jsonl')
    skipped = [line['step'] for line in log if line.get('event') == 'skipped'][-MAX_SKIPPED - 1:]
    if len(skipped) <= MAX_SKIPPED or skipped[-1] - skipped[0] > MAX_SKIPPED:
        return {}
    return {run: row | {'y': math.inf, 'parameters': math.nan, 'tokens': math.nan}}


def loss_per_llama_token(result: dict[str, Any]) -> float:
    """Convert bits per byte of both splits of the study's text to nats per Llama token."""
    bits, llama_tokens = 0.0, 0
    for row in read_csv(f'{FIRST}/text.csv'):
        bits += result[f'{row["split"]}_bits_per_byte'] * int(row['bytes'])
        llama_tokens += int(row['llama_tokens'])
    return math.log(2) * bits / llama_tokens


def finished(found: Results) -> set[Run]:
    """Return the planned runs that are done: at the study's sizes those of its text, at others
    those of any data."""
    return {run if run.size in STUDY_SIZES else run._replace(data='') for run in found}


def planned_cells(families: list[str]) -> list[Run]:
    """Return the runs that count in these families, finished or not. The first family's are those
    that it has published."""
    paths = [f'{folder}/{"runs" if folder == FIRST else "cells"}.csv' for folder in families]
    return list(read_runs(*paths))


# Verdicts

def leave_out_of_rows(found: Results) -> Results:
    """Return the own runs that count in a row of the study, and name those at its sizes that count
    in none."""
    planned, counted = set(planned_cells(FAMILIES)), {}
    for run, row in found.items():
        if run.size not in STUDY_SIZES or 'folder' not in row:
            continue
        if run.data:
            leave_out(row['folder'], f'it read {run.data}, not the text of the study')
        elif run.seed >= TRIAL_SEEDS:
            leave_out(row['folder'], f'seeds from {TRIAL_SEEDS} on choose learning rates')
        elif run not in planned:
            leave_out(row['folder'], 'no row has its model at its size, rate and seed')
        else:
            counted[run] = row
    return counted


def write_runs(runs: Results, path: str) -> None:
    """Write runs as a CSV with the columns of the families' runs.csv."""
    lines = [','.join(RUN_COLUMNS)]
    for run, row in runs.items():
        values = run._asdict() | row
        lines.append(','.join(str(values.get(name, '')) for name in RUN_COLUMNS))
    write_atomic(path, ('\n'.join(lines) + '\n').encode())


# What pictures write for words of the claims
PLAIN_WORDS = {'one d_k': 'one key-query diagonal', 'd_k': 'the key-query diagonal',
               'taken twice': 'repeated'}


class Shown(NamedTuple):
    """A row of a picture: the effect of a claim at a size. The change in perplexity, its interval
    and the bounds of the claim are in per cent."""
    label: str
    A: str
    B: str
    size: str
    seeds: int
    effect: float
    low: float
    high: float
    above: float  # -1000 or 1000 for a claim without this bound
    below: float
    word: str


def all_rows(effects: list[dict[str, str]]) -> list[Shown]:
    """Return the rows of an effects.csv that have an interval, at their largest size. Of the rows
    of the same models at the same size the one of the last family counts: it has most seeds."""
    largest = {(row['family'], row['id']): row for row in effects
               if row['unit'] == 'perplexity' and row['low_%']}  # the last line of each claim
    families = list(dict.fromkeys(row['family'] for row in effects))
    shown: dict[tuple[str, str, str], Shown] = {}
    for row in sorted(largest.values(), key=lambda row: -families.index(row['family'])):
        label = row['claim']
        for old, new in PLAIN_WORDS.items():
            label = label.replace(old, new)
        numbers = (float(row[name]) for name in ('effect_%', 'low_%', 'high_%'))
        shown.setdefault((row['A'], row['B'], row['size']), Shown(
            label, row['A'], row['B'], row['size'], int(row['seeds']), *numbers,
            float(row['above_%'] or -1000), float(row['below_%'] or 1000), row['verdict']))
    return list(shown.values())


def claim_rows(effects: list[dict[str, str]]) -> list[Shown]:
    """Return the rows of claims.csv, with its labels. Of a claim that several families have, the
    last with an interval counts."""
    rows = {(row.A, row.B): row for row in reversed(all_rows(effects))}
    return [rows[claim['A'], claim['B']]._replace(label=claim['label'])
            for claim in read_csv(f'{RESULTS}/claims.csv') if (claim['A'], claim['B']) in rows]


def claim_table(rows: list[Shown]) -> str:
    """Format the rows of a picture."""
    return markdown_table(
        ['claim', 'A', 'B', 'size', 'seeds', 'A over B', 'verdict'],
        [[row.label, row.A, row.B, row.size, str(row.seeds),
          f'{row.effect:+.1f}% ({row.low:+.1f} to {row.high:+.1f})', row.word] for row in rows])


# How a picture shows a verdict: the marker, its colour, and whether it is filled
MARKS = {'holds': ('o', 'C0', 'full'), 'does not hold': ('X', 'C3', 'full'),
         'undecided': ('s', '0.4', 'none')}


def draw_verdicts(rows: list[Shown]) -> Figure:
    """Draw the interval of each row, marked by verdict, and where its claim would hold."""
    labels = [textwrap.fill(row.label, 50) for row in rows]
    heights = [0.2 + 0.14 * label.count('\n') for label in labels]  # inches
    figure = Figure((WIDTH, 1.6 + 1.3 * sum(heights)), layout='constrained')
    axes = figure.subplots()
    # Draw the rows from top to bottom
    places = np.cumsum(heights) - np.array(heights) / 2
    for place, height, row in zip(places, heights, rows, strict=True):
        axes.barh(place, row.below - row.above, left=row.above, height=0.8 * height, color='0.9')
        marker, color, fill = MARKS[row.word]
        axes.errorbar(row.effect, place, fmt=marker, ms=6, color=color, fillstyle=fill,
                      xerr=[[row.effect - row.low], [row.high - row.effect]])
    axes.set_yticks(places, labels)
    axes.set_ylim(sum(heights), 0)
    right = axes.secondary_yaxis('right')
    right.set_yticks(places, [f'{row.size}, {row.seeds}' for row in rows])
    right.set_ylabel('size, seeds')
    axes.set_xlim(min(row.low for row in rows) - 1, max(row.high for row in rows) + 1)
    axes.set_xlabel('change in perplexity, %: minus is better for what is named first\n'
                    'a Llama that is not said to have ALiBi has RoPE')
    axes.tick_params(labelsize=9)
    right.tick_params(labelsize=9)
    # Explain marks and bands above the rows
    handles = [Line2D([], [], marker=marker, color=color, fillstyle=fill, label=word)
               for word, (marker, color, fill) in MARKS.items()]
    handles.append(Patch(color='0.9', label='where the claim would hold'))
    figure.legend(handles=handles, loc='outside upper center', ncols=4, fontsize=9)
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
    panel. A sweep has all rates, and the seeds of the trials at sizes that have trials. In other
    figures a model has one rate. Own runs that are left out have a line on stderr."""
    sweep = FIGURES[figure]['plot'] == 'rates'
    trial_sizes = {name for name, row in STUDY_SIZES.items() if sweep and row['trial_seeds']}
    points = []
    for series in (row for row in SERIES if row['figure'] == figure):
        # Group the model's runs
        groups: dict[tuple[str, str], dict[float, Results]] = defaultdict(lambda: defaultdict(dict))
        for run, row in found.items():
            if run.model != series['model'] or run.size not in ([size] if size else FIGURE_SIZES):
                continue
            if (run.seed >= TRIAL_SEEDS) == (run.size in trial_sizes):
                groups[run.size, row['panel']][run.rate][run] = row
            elif 'folder' in row:
                kind = 'from' if run.size in trial_sizes else 'below'
                leave_out(row['folder'], f'at {run.size} figure {figure} has the seeds {kind} '
                          f'{TRIAL_SEEDS} alone')
        # Summarize each group
        for (run_size, panel_name), rates in sorted(groups.items(), key=by_size):
            if not sweep:
                rates = choose_rate(figure, run_size, series['model'], rates)
            for rate, runs in sorted(rates.items()):
                y = {(run.model, run.seed): row['y'] for run, row in sorted(runs.items())}
                ended, _ = split_failed(y)
                losses = ended.values()
                best = min(runs.values(), key=lambda row: row['y'])
                points.append(Point(
                    series['series'], series['x'], run_size, series['model'], rate, panel_name,
                    best['parameters'], best['tokens'], ' '.join(str(seed) for _, seed in y),
                    ' '.join(str(seed) for model, seed in y if (model, seed) not in ended),
                    math.exp(statistics.fmean(losses)) if losses else math.nan,
                    statistics.stdev(map(math.exp, losses)) if len(losses) > 1 else 0))
    return points


def by_size(group: tuple[tuple[str, str], Any]) -> tuple[int, str]:
    """Sort groups of runs by the order of sizes, then by panel."""
    (size, panel_name), _ = group
    return list(SIZE_OPTIONS).index(size), panel_name


def choose_rate(figure: str, size: str, model: str,
                rates: dict[float, Results]) -> dict[float, Results]:
    """Keep the runs of the planned rate, or else of the rate with most runs."""
    plan = {run.rate for run in planned(figure, size) if run.model == model}
    kept = max(rates, key=lambda rate: (rate in plan, len(rates[rate])))
    for rate, runs in rates.items():
        for row in runs.values():
            if rate != kept and 'folder' in row:
                leave_out(row['folder'], f'figure {figure} has its model at the rate {kept:g}')
    return {kept: rates[kept]}


def planned(figure: str, size: str) -> list[Run]:
    """Return the runs of a figure at a size. A sweep has five rates, octaves around the size's. In
    other figures a model has the rate of the study, or that of the model that models.csv names, or
    Llama's, as in the paper. Series that are drawn only where there are runs have none."""
    sweep = FIGURES[figure]['plot'] == 'rates'
    study = STUDY_SIZES.get(size, {})
    seeds = study.get('trial_seeds' if sweep else 'seeds') or '1'
    middle = float(study.get('middle_rate') or configs(SIZE_OPTIONS[size])[0].learning_rate)
    known = {run.model: run.rate for run in planned_cells(FAMILIES)
             if run.size == size and run.seed < TRIAL_SEEDS}
    models = [row['model'] for row in SERIES if row['figure'] == figure and row['planned'] == 'yes']
    runs = []
    for model in dict.fromkeys(models):
        names = model, MODELS[model]['rate_of'], 'llama'
        best = next((known[name] for name in names if name in known), middle)
        for rate in [middle * 2 ** n for n in (-2, -1, 0, 1, 2)] if sweep else [best]:
            runs += [Run(size, model, float(f'{rate:.3g}'), int(seed)) for seed in seeds.split()]
    return runs


def figure_table(figure: str, points: list[Point], found: Results) -> str:
    """Format the points, and the planned runs of their sizes that are missing. Name the data where
    there are two."""
    rows = [[p.panel, p.model, p.size, f'{p.parameters:,.0f}', f'{p.tokens:,.0f}', f'{p.rate:g}',
             p.seeds, f'{p.perplexity:.2f}', p.failed and f'failed: {p.failed}'] for p in points]
    done = finished(found)
    rows += [['', run.model, run.size, '', '', f'{run.rate:g}', str(run.seed), '', 'missing']
             for size in dict.fromkeys(p.size for p in points) for run in planned(figure, size)
             if run not in done]
    header = ['data', 'model', 'size', 'parameters', 'tokens', 'rate', 'seeds', 'perplexity',
              'lacks']
    first = 0 if len({p.panel for p in points}) > 1 else 1
    table = markdown_table(header[first:], [row[first:] for row in rows])
    return f'Figure {figure}. The paper: {FIGURES[figure]["paper"]}.\n\n{table}\n'


def plot_parameters(axes: Axes, points: list[Point]) -> None:
    """Perplexity over parameters, with standard deviations, linked to that of the Llama with the
    same position encoding. Above the points of a size stand its tokens."""
    points = [p for p in points if not math.isnan(p.perplexity)]
    for size in dict.fromkeys(p.size for p in points):
        group = [p for p in points if p.size == size]
        llamas = {'alibi' in MODELS[p.model]['options']: p for p in group if p.x == 'baseline'}
        for p in group:
            llama = llamas.get('alibi' in MODELS[p.model]['options'], p)
            axes.plot([llama.parameters, p.parameters], [llama.perplexity, p.perplexity], 'k-',
                      lw=0.3)
        center = math.sqrt(min(p.parameters for p in group) * max(p.parameters for p in group))
        top = max(p.perplexity + p.std for p in group)
        tokens = ' or '.join(dict.fromkeys(f'{p.tokens / 1e6:,.3g} M' for p in group))
        axes.annotate(f'{size}: {tokens} tokens', (center, top), (0, 8), ha='center', fontsize=9,
                      textcoords='offset points')
    # Models that hardly differ stay apart: later ones are smaller, or hollow and larger
    shapes = [('D', 7, 'full'), ('v', 8, 'full'), ('o', 5, 'full'), ('s', 11, 'none'),
              ('^', 11, 'none')]
    for n, (name, model) in enumerate(dict.fromkeys((p.series, p.model) for p in points)):
        marker, ms, fill = shapes[n % len(shapes)]
        shown = [p for p in points if p.series == name]
        axes.errorbar([p.parameters for p in shown], [p.perplexity for p in shown],
                      [p.std for p in shown], fmt=marker, ms=ms, fillstyle=fill, capsize=3,
                      color=LLAMA_COLORS.get(model), label=name)
    axes.set(xscale='log', xlabel='parameters', yscale='log')
    axes.margins(0.1, 0.12)
    for axis in (axes.xaxis, axes.yaxis):  # a few plain numbers
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(EngFormatter())


def plot_bars(axes: Axes, points: list[Point]) -> None:
    """A bar for each model, coloured by series. What T = 2 brings is shaded, the Llamas'
    perplexities are dashed."""
    shown = [p for p in points if p.x != 'baseline']
    for series in dict.fromkeys(p.series for p in shown):
        bars = {place: p for place, p in enumerate(shown) if p.series == series}
        axes.bar(bars.keys(), [p.perplexity for p in bars.values()], label=series,
                 yerr=[p.std for p in bars.values()], capsize=2)
    one_step = {p.series: p.perplexity for p in shown if p.x == 'T = 1'}
    for place, p in enumerate(shown):
        if p.x == 'T = 2' and p.series in one_step:
            axes.bar(place, one_step[p.series] - p.perplexity, bottom=p.perplexity, color='gray',
                     alpha=0.4, label='change from T = 1 to T = 2')
    for p in points:
        if p.x == 'baseline':
            axes.axhline(p.perplexity, ls='--', color=LLAMA_COLORS[p.model], label=p.series)
    axes.set_xticks(range(len(shown)), [f'{p.x}\nfailed' if p.failed else p.x for p in shown],
                    fontsize=9)
    perplexities = [p.perplexity for p in points if not math.isnan(p.perplexity)]
    axes.set_ylim(0.95 * min(perplexities), 1.05 * max(perplexities))


def segments(points: list[Point]) -> list[list[Point]]:
    """Split the points of a curve, sorted by rate, where interpolation cannot be believed: at rates
    with a failed run, a loss 0.5 nats above the lowest or other seeds than the lowest has, and
    between rates that are more than an octave apart."""
    ended = [p for p in points if not p.failed]
    lowest = min(ended, key=lambda p: p.perplexity, default=None)
    parts: list[list[Point]] = [[]]
    for p in points:
        if p.failed or p.seeds != lowest.seeds or p.perplexity > lowest.perplexity * math.exp(0.5):
            parts.append([])
        elif parts[-1] and p.rate > 2.1 * parts[-1][-1].rate:  # rates are rounded
            parts.append([p])
        else:
            parts[-1].append(p)
    return [part for part in parts if part]


def plot_rates(axes: Axes, points: list[Point]) -> None:
    """Perplexity over the learning rate, a colour for each model and a marker for each size.
    Akima's interpolation over the log of the rate has a star at its minimum, if that is between
    two neighbours of the lowest point. Crosses are rates with failed runs."""
    names = list(dict.fromkeys(p.series for p in points))
    sizes = list(dict.fromkeys(p.size for p in points))
    for name, size in dict.fromkeys((p.series, p.size) for p in points):
        curve = [p for p in points if (p.series, p.size) == (name, size)]
        color = LLAMA_COLORS.get(curve[0].model, f'C{names.index(name)}')
        marker = 'osD^v<>'[sizes.index(size) % 7]
        ended = [p for p in curve if not p.failed]
        lowest = min(ended, key=lambda p: p.perplexity, default=None)
        label = 'all rates failed'
        if lowest:
            label = f'{lowest.perplexity:.1f} at {lowest.rate:.3g}, '
            label += 'one rate' if len(curve) == 1 else 'lowest, at the edge'
        for part in segments(curve):
            if len(part) < 3:
                continue
            rates = np.array([p.rate for p in part])
            spline = Akima1DInterpolator(np.log(rates), [p.perplexity for p in part])
            x = np.geomspace(rates[0], rates[-1], 1001)
            axes.plot(x, spline(np.log(x)), color=color, lw=1)
            if lowest in part[1:-1]:
                n = part.index(lowest)
                x = np.geomspace(rates[n - 1], rates[n + 1], 1001)
                y = spline(np.log(x))
                axes.plot(x[y.argmin()], y.min(), '*', color=color, mec='black', ms=13, zorder=3)
                label = f'star {y.min():.1f} at {x[y.argmin()]:.3g}'
        axes.errorbar([p.rate for p in ended], [p.perplexity for p in ended],
                      [p.std for p in ended], fmt=marker, color=color, ms=5, capsize=2,
                      label=f'{name}, {size}: {label}')
        for p in curve:
            if p.failed:  # at the top
                axes.plot(p.rate, 0.98, 'x', color=color, transform=axes.get_xaxis_transform(),
                          label='x: a run failed')
    axes.set(xscale='log', xlabel='learning rate', yscale='log')
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter('{x:g}')


PLOTS = {'parameters': plot_parameters, 'bars': plot_bars, 'rates': plot_rates}


def draw_figure(figure: str, points: list[Point]) -> Figure:
    """Draw the points, not all of which may have failed: a picture for each panel, and for each
    size of bars."""
    plot = FIGURES[figure]['plot']
    panels: dict[str, list[Point]] = defaultdict(list)
    for p in points:
        panels[f'{p.size}, {p.panel}' if plot == 'bars' else p.panel].append(p)
    panels = {name: group for name, group in panels.items()
              if not all(math.isnan(p.perplexity) for p in group)}
    # Leave out pictures without a comparison: with Llamas or a bar alone, unless all are such
    panels = {name: group for name, group in panels.items()
              if {p.model for p in group} - {*LLAMA_COLORS}
              and (plot != 'bars' or sum(p.x != 'baseline' for p in group) > 1)} or panels
    columns = min(2, len(panels)) if plot == 'bars' else 1
    rows = math.ceil(len(panels) / columns)
    picture = Figure((WIDTH, 1 + 4 * rows), layout='constrained')
    all_axes = list(picture.subplots(rows, columns, squeeze=False).flat)
    handles = {}
    for axes, (name, group) in zip(all_axes, panels.items(), strict=False):
        PLOTS[plot](axes, group)
        axes.set_title(textwrap.fill(f'{figure}: {name}', 100 // columns), fontsize=9)
        unit = 'perplexity per ' + name.partition('; per ')[2]
        if plot == 'bars':
            unit += '\n(the axis does not start at zero)'
        axes.set_ylabel(unit)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for axes in all_axes[len(panels):]:
        axes.remove()
    picture.legend(handles.values(), handles.keys(), loc='outside lower center', ncols=2,
                   fontsize=9)
    return picture


@dataclass
class ReproduceConfig:
    """What to print."""
    todo: bool = False  # print the commands of missing runs
    figure: Literal[(*FIGURES, 'all')] | None = None  # draw this figure of the paper
    size: Literal[FIGURE_SIZES] | None = None  # for --figure: only this; --todo: XS
    effects: PathStr | None = None  # verdicts to draw; default: results/tokens/effects.csv


@command_line
def main(argv: list[str]) -> None:
    cfg = build(ReproduceConfig, read_options(argv, ReproduceConfig))
    check(cfg.size is None or cfg.figure is not None, f'size={cfg.size} is for --figure')
    found = read_all()
    figures = FIGURES if cfg.figure == 'all' else [cfg.figure]
    if cfg.todo:
        runs, root = planned_cells(FAMILIES), 'out/reproduce'
        if cfg.figure:
            runs = dict.fromkeys(run for f in figures for run in planned(f, cfg.size or 'XS'))
            root = 'out/figures'
        done = finished(found)
        print_todo([run for run in runs if run not in done], root)
    elif cfg.figure:
        os.makedirs('out/figures', exist_ok=True)
        for figure in figures:
            points = collect(figure, cfg.size, found)
            if points:
                print(figure_table(figure, points, found), flush=True)
            if points and all(math.isnan(p.perplexity) for p in points):
                print(f'All runs of figure {figure} failed: it is not drawn\n', flush=True)
            elif points:
                draw_figure(figure, points).savefig(f'out/figures/{figure}.png', dpi=DPI)
                print(f'out/figures/{figure}.png\n', flush=True)
            else:
                print(f'Figure {figure} has no finished runs: --figure={figure} '
                      f'--size={cfg.size or "XS"} --todo prints their commands\n', flush=True)
    else:
        os.makedirs('out/results', exist_ok=True)
        if counted := leave_out_of_rows(found):
            write_runs(counted, 'out/reproduce/runs.csv')
            print(f'Your own runs, {len(counted)}, count in the tables and the effects.csv of '
                  'python results/tokens/verdicts.py --runs=out/reproduce/runs.csv\n', flush=True)
        effects = read_csv(cfg.effects or f'{FIRST}/effects.csv')
        claims = claim_rows(effects)
        print('A over B: how much higher the perplexity per Llama token of A is than that of B, '
              f'and the interval over seeds.\n\n{claim_table(claims)}\n', flush=True)
        draw_verdicts(all_rows(effects)).savefig('out/results/rows.png', dpi=DPI)
        draw_verdicts(claims).savefig('out/results/claims.png', dpi=DPI)
        print('out/results/rows.png shows all effects, claims.png those of results/claims.csv',
              flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])

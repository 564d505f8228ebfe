"""
Does the paper hold? Its claims with their verdicts, its figures, and the runs behind both.

    python reproduce.py                                  print the verdicts on all claims
    python reproduce.py --todo | sh                      train the missing runs, one by one
    python reproduce.py --figure=3a                      draw a figure of the paper, print its table
    python reproduce.py --figure=3a --size=86m --todo    print the commands of its missing runs
    python reproduce.py --publish                        append finished runs to the published ones

results/tokens has the claims of the first family, models, sizes and RULE.md, which explains them;
results/tokens/second has the second family; results/figures lists the paper's figures. One's own
runs are in out/reproduce/SIZE/ and out/figures/SIZE/. `--todo | xargs -P 2 -I{} sh -c "{}"` trains
two at a time; the same command goes on after a stop.

A loss y is in nats per Llama token of the held-out text, validation and test together; at sizes
other than those of results/tokens it is in nats per token of the test text.
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

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from scipy.interpolate import Akima1DInterpolator

from configurator import build, check, command_line, read_options
from model import SIZES as PRESETS
from model import ModelConfig, Transformer
from nanocem import verdicts as rule
from nanocem.files import read_json, read_json_lines, table, write_atomic
from nanocem.loss import flops_per_token
from train import MAX_SKIPPED, TrainConfig

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results')
FIRST, SECOND = f'{RESULTS}/tokens', f'{RESULTS}/tokens/second'
FIGURE_DATA = f'{RESULTS}/figures'
TRIAL_SEEDS = 101  # seeds from here on belong to trials, which choose learning rates


def read_csv(path: str) -> list[dict[str, str]]:
    """Read the rows of a CSV; none if there is no file."""
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


SIZES = {row['size']: row for row in read_csv(f'{FIRST}/sizes.csv')}
MODELS = {row['model']: row for folder in (FIRST, SECOND, FIGURE_DATA)
          for row in read_csv(f'{folder}/models.csv')}
FIGURES = {row['figure']: row for row in read_csv(f'{FIGURE_DATA}/figures.csv')}
SERIES = read_csv(f'{FIGURE_DATA}/series.csv')
FIGURE_SIZES = ('XS', 'S', 'M', *PRESETS)

# Estimated FLOP/s: an A100 by docs/speed.md, a CPU thread by the published runs
A100_FLOPS = {False: 0.37 * 312e12, True: 0.29 * 312e12}  # without and with CEM
CPU_FLOPS = 30e9


# Models and runs

@cache
def configs(options: str) -> tuple[TrainConfig, ModelConfig]:
    """Return what train.py makes of these options. The vocabulary is that of the data folder, if it
    is there."""
    given = read_options(options.split(), TrainConfig, ModelConfig)
    train = build(TrainConfig, given)
    meta = read_json(f'{train.data}/meta.json') or {}
    known = {'vocab_size': meta['vocab_size']} if meta else {}
    return train, build(ModelConfig, known | given)


def meta_model(cfg: ModelConfig) -> Transformer:
    """Return the model without memory for its weights."""
    with torch.device('meta'):
        return Transformer(cfg)


@cache
def count_weights(options: str) -> int:
    """Count the parameters of the layers, without embedding and head."""
    return sum(p.numel() for p in meta_model(configs(options)[1]).blocks.parameters())


def size_options(size: str) -> str:
    """Return train.py's options for a size: of the study, of a config file, or of the paper."""
    if size in SIZES:
        return SIZES[size]['options']
    return f'config/{size}.py' if on_laptop(size) else f'--size={size}'


def on_laptop(size: str) -> bool:
    return size in SIZES or size in ('nano', 'mini')


@cache
def run_options(size: str, model: str) -> str:
    """Return train.py's options for a model at a size."""
    options = f'{size_options(size)} {MODELS[model]["options"]}'
    if size == '256m' and model.startswith('cem'):
        options += ' --n_layer=16 --tokens=5.1B'  # two more layers, and the tokens of the Llama
    # If the model has as many weights as another, choose d_mlp for that
    if other := MODELS[model].get('weights_of'):
        weights = count_weights(run_options(size, other))
        at_1, at_2 = (count_weights(f'{options} --d_mlp={width}') for width in (1, 2))
        options += f' --d_mlp={1 + round((weights - at_1) / (at_2 - at_1))}'
    # If an option is given twice, keep the later value
    values = dict(option.partition('=')[::2] for option in options.split())
    return ' '.join(f'{name}={value}' if value else name for name, value in values.items())


class Run(NamedTuple):
    """One training run. Its learning rate has three digits, as in the folder's name."""
    size: str
    model: str
    rate: float
    seed: int

    def command(self, root: str) -> str:
        """Return a shell command that trains or resumes the run in `root`: on eight GPUs at the
        paper's sizes, on one thread at others."""
        folder = f'{root}/{self.size}/{self.model}_rate={self.rate:g}_seed={self.seed}'
        resume = ' --init_from=resume' if os.path.exists(f'{folder}/config.json') else ''
        start = ('OMP_NUM_THREADS=1 python' if on_laptop(self.size)
                 else 'torchrun --nproc_per_node=8')
        return (f'{start} train.py {run_options(self.size, self.model)} '
                f'--learning_rate={self.rate:g} --seed={self.seed} --out_dir={folder}{resume}')


def read_cells(path: str) -> list[Run]:
    """Read the size, model, rate and seed of each row."""
    return [Run(row['size'], row['model'], float(row['rate']), int(row['seed']))
            for row in read_csv(path)]


# The results of runs. A panel names what points of one picture must share: text, vocabulary,
# context, test tokens and unit. The other values are the columns of runs.csv.

COLUMNS = ('parameters', 'weights', 'tokens', 'flops_per_token', 'seconds', 'val_bpb', 'test_bpb',
           'y', 'skipped', 'spikes')
Results = dict[Run, dict[str, Any]]


def panel(train: TrainConfig, model: ModelConfig, unit: str) -> str:
    return (f'{train.data}, vocabulary {model.vocab_size:,}, context {model.context_length:,}, '
            f'up to {train.test_tokens / 1e6:,g} M test tokens; per {unit}')


def read_published(path: str) -> Results:
    found = {}
    for run, row in zip(read_cells(path), read_csv(path), strict=True):
        found[run] = {name: float(row.get(name) or 'nan') for name in COLUMNS}
        found[run]['panel'] = panel(*configs(size_options(run.size)), 'Llama token')
    return found


def read_own() -> Results:
    """Read the finished runs in out/. Other folders are left out, with a line on stderr."""
    found = {}
    for folder in sorted(glob.glob('out/reproduce/*/*') + glob.glob('out/figures/*/*')):
        size, name = folder.split('/')[2:]
        try:
            match = re.fullmatch(r'(.+)_rate=([^_]+)_seed=(\d+)', name)
            check(bool(match), 'expected a name like MODEL_rate=0.01_seed=1')
            run = Run(size, match[1], float(match[2]), int(match[3]))
            check(run.model in MODELS, f'there is no model {run.model}')
            check(size in SIZES or size in PRESETS, f'there is no size {size}')
            if result := read_run(folder, run):
                found[run] = result
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f'its files lack {error}' if isinstance(error, KeyError) else error
            print(f'{folder} is left out: {reason}', file=sys.stderr, flush=True)
    return found


def read_run(folder: str, run: Run) -> dict[str, Any] | None:
    """Return the results of a run; None if it is not finished. The losses of a failed run are
    infinite. UserError, ValueError, TypeError or KeyError if it is damaged, or another run."""
    config = read_json(f'{folder}/config.json')
    check(config is not None, 'it has no config.json')
    train, cfg = build(TrainConfig, config['train']), build(ModelConfig, config['model'])
    options = f'{run_options(run.size, run.model)} --vocab_size={cfg.vocab_size}'
    rate = float(f'{train.learning_rate:.3g}')
    check(cfg == configs(options)[1] and (rate, train.seed) == (run.rate, run.seed),
          'its config.json is that of another run')
    model = meta_model(cfg)
    lines = read_json_lines(f'{folder}/log.jsonl')
    losses = [line['loss'] or math.inf for line in lines if 'lr' in line]
    # A spike is a loss 0.5 nats above the median of the 50 batches before
    spikes = sum(losses[n] > statistics.median(losses[n - 50:n]) + 0.5
                 for n in range(50, len(losses)))
    in_study = run.size in SIZES
    row = dict.fromkeys(COLUMNS, math.nan) | dict(
        parameters=model.num_params(), weights=count_weights(options), spikes=spikes,
        flops_per_token=flops_per_token(model), skipped=count_skips(lines),
        panel=panel(train, cfg, 'Llama token' if in_study else 'token'))
    if result := read_json(f'{folder}/result.json'):
        row |= {name: result[name] for name in ('tokens', 'seconds')}
        row |= dict(val_bpb=result['val_bits_per_byte'], test_bpb=result['test_bits_per_byte'],
                    y=result['test_loss'], skipped=result.get('skipped', row['skipped']))
        if in_study:
            check(None not in row.values(), 'its result.json has no bits per byte')
            row['y'] = loss_per_llama_token(row['val_bpb'], row['test_bpb'], train.data)
        return row
    # train.py ends a run after more than MAX_SKIPPED consecutive skips
    last = sorted({line['step'] for line in lines})[-MAX_SKIPPED:]
    failed = count_skips([line for line in lines if line['step'] in last]) >= MAX_SKIPPED
    return row | dict.fromkeys(('val_bpb', 'test_bpb', 'y'), math.inf) if failed else None


def count_skips(lines: list[dict[str, Any]]) -> int:
    """Count the steps whose loss or gradient norm was not finite: null in the log."""
    return len({line['step'] for line in lines
                if line.get('loss', 0) is None or line.get('grad_norm', 0) is None})


def loss_per_llama_token(val_bpb: float, test_bpb: float, data: str) -> float:
    """Convert bits per byte of both splits to nats per Llama token, by text.csv. UserError if the
    data folder is there and holds another text."""
    counts = {row['split']: {name: int(row[name]) for name in row if name != 'split'}
              for row in read_csv(f'{FIRST}/text.csv')}
    val, test = counts['val'], counts['test']
    if meta := read_json(f'{data}/meta.json'):
        for split, n in counts.items():
            same = meta['splits'][split]['tokens'] in (
                n['bpe2048_tokens'], n['bytes'] + n['documents'])
            check(same, f'{data} is not the text whose tokens results/tokens/text.csv counts')
    bits = val_bpb * val['bytes'] + test_bpb * test['bytes']
    return math.log(2) * bits / (val['llama_tokens'] + test['llama_tokens'])


def publish(own: Results) -> None:
    """Append finished runs of the second family's and the figures' cells to their runs.csv."""
    for folder in (SECOND, FIGURE_DATA):
        published = read_published(f'{folder}/runs.csv')
        cells = read_cells(f'{folder}/cells.csv')
        new = [run for run in cells if run in own and run not in published]
        found = published | {run: own[run] for run in new}
        rows = [[*run, *(f'{found[run][name]:.12g}' for name in COLUMNS)]
                for run in cells if run in found]
        lines = [','.join(map(str, row)) for row in [[*Run._fields, *COLUMNS], *rows]]
        if new:
            write_atomic(f'{folder}/runs.csv', '\n'.join([*lines, '']).encode())
        print(f'{folder}/runs.csv: {len(new)} new runs, {len(rows)} of {len(cells)}', flush=True)


# Verdicts

# A claim, its effect at each size, and the word
Verdict = tuple[dict[str, str], list[rule.Effect], str]


class Family(NamedTuple):
    """Claims, the losses of each size, and the models' kinds: None for the first family's rule."""
    claims: list[dict[str, str]]
    losses: dict[str, rule.Losses]
    kinds: dict[str, str] | None = None


def first_family(found: Results) -> Family:
    """The runs of results/tokens/runs.csv, without trials. Of two rates of a model the later line
    counts: only `cem-2-normed` at XS has two, the first one by mistake (results/tokens)."""
    losses: dict[str, rule.Losses] = {size: {} for size in SIZES}
    for run in read_cells(f'{FIRST}/runs.csv'):
        if run.seed < TRIAL_SEEDS and run in found:
            losses[run.size][run.model, run.seed] = found[run]['y']
    return Family(read_csv(f'{FIRST}/verdicts.csv'), losses)


def second_family(found: Results) -> Family:
    """The runs of the models in the rows of each size, with those of the first family."""
    claims = [{'unit': 'perplexity'} | row for row in read_csv(f'{SECOND}/verdicts.csv')]
    files = (f'{FIRST}/runs.csv', f'{FIRST}/more_seeds.csv', f'{SECOND}/cells.csv')
    runs = [run for path in files for run in read_cells(path)]
    losses: dict[str, rule.Losses] = {}
    for size in ('S', 'M'):
        rows = [claim for claim in claims if size in claim['sizes'].split()]
        models = {claim[side] for claim in rows for side in 'AB'}
        losses[size] = {(run.model, run.seed): found[run]['y'] for run in runs if run in found
                        and run.size == size and run.model in models and run.seed < TRIAL_SEEDS}
    return Family(claims, losses, {claim[side]: kind(claim[side]) for claim in claims
                                   for side in 'AB'})


def kind(model: str) -> str:
    """Return the kind of model whose noise is pooled with this one's."""
    _, cfg = configs(run_options('S', model))
    special = cfg.mlp == 'cem' or cfg.mlp_reuse > 1 or cfg.loops > 1
    return 'CEM or repeated MLP' if special else 'other'


def measure(family: Family, claim: dict[str, str], size: str) -> rule.Effect | None:
    """Compare a claim's models at a size; None if no seed has both."""
    y = family.losses[size]
    trained = {model for model, _ in y}
    # Of two models, `A/B`, the trials chose one, which was trained on more seeds
    A, B = (next((name for name in claim[side].split('/') if name in trained), '') for side in 'AB')
    if claim['unit'] == 'perplexity':
        m = sum(size in row['sizes'].split() for row in family.claims
                if row['unit'] == 'perplexity')
        return rule.compare(y, A, B, size, m, family.kinds)
    # The same rule for the logs of the trials' best rates, as the only comparison
    rates = {(row['model'], int(row['seed'])): math.log(float(row['rate']))
             for row in read_csv(f'{FIRST}/best_rates.csv') if row['size'] == size}
    return rule.compare(rates, A, B, size, m=1) if claim['unit'] == 'rate' else None


def judge(family: Family) -> list[Verdict]:
    """Return every claim with its effects and its verdict: of the largest size with two seeds, or
    of all sizes where sizes.csv says so."""
    verdicts = []
    for claim in family.claims:
        sizes = claim['sizes'].split()
        effects = [effect for size in sizes if (effect := measure(family, claim, size))]
        above, below = float(claim['above_%'] or '-inf'), float(claim['below_%'] or 'inf')
        words = [word for effect in effects if (word := rule.decide(effect, above, below))]
        word = 'not run' if claim['unit'] else 'see results/gp'
        if effects:
            word = 'one seed'
        if words:
            word = words[-1] if SIZES[sizes[0]]['word'] == 'largest size' else 'undecided'
            if words == [words[0]] * len(sizes):  # the sizes agree
                word = words[0]
        if claim['unit'] == 'failed runs' and any(family.losses[size] for size in sizes):
            failed = set.union(*(rule.split_failed(family.losses[size])[1] for size in sizes))
            word = 'does not hold' if any('cem' in model for model in failed) else 'holds'
        verdicts.append((claim, effects, word))
    return verdicts


def verdict_table(family: Family, verdicts: list[Verdict]) -> str:
    """Format the verdicts, beside the expected effects if verdicts.csv has them."""
    expected = [name for name in ('expected_S', 'expected_M') if name in family.claims[0]]
    rows = [[*map(claim.get, ('id', 'claim', 'A', 'B', 'kind')), '; '.join(map(str, effects)),
             *map(claim.get, expected), word] for claim, effects, word in verdicts]
    lines = ['A over B: how much higher the perplexity per Llama token of A is than that of B, the '
             'interval over seeds, and each seed alone.']
    for size, y in family.losses.items():
        finished, _ = rule.split_failed(y)
        kinds = family.kinds or dict.fromkeys([model for model, _ in y], '')
        for name in sorted(set(kinds.values())):
            n = sum(kinds[model] == name for model, _ in y)
            s, freedom = (rule.error_of_kind(finished, kinds, name) if family.kinds
                          else rule.residual_error(finished))
            if freedom:
                lines.append(f'{size}{name and ", "}{name}: {n} runs, '
                             f's = {100 * math.expm1(s):.1f}%, f = {freedom}.')
    header = ['id', 'claim', 'A', 'B', 'kind', 'A over B', *expected, 'verdict']
    return ' '.join(lines) + f'\n\n{table(header, rows)}\n'


def draw_rows(verdicts: list[Verdict]) -> plt.Figure:
    """Draw the interval of every claim, at the largest size that has one, coloured by verdict."""
    colors = {'holds': 'C2', 'does not hold': 'C3', 'undecided': 'gray'}
    shown = [(claim, [effect for effect in effects if effect.half_width > 0], word)
             for claim, effects, word in reversed(verdicts)]
    shown = [(claim, effects[-1], word) for claim, effects, word in shown if effects]
    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(shown)), layout='constrained')
    for place, (claim, effect, word) in enumerate(shown):
        d, low, high = effect.percent()
        axes.errorbar([d], [place], xerr=[[d - low], [high - d]], fmt='o', ms=4, color=colors[word])
        for bound in filter(None, (claim['above_%'], claim['below_%'])):
            axes.plot([float(bound)] * 2, [place - 0.4, place + 0.4], color='black', lw=1)
    labels = [f'{"second family: " * ("question" in claim)}{claim["claim"]}, {effect.size}'
              for claim, effect, _ in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=7)
    axes.margins(y=0.01)
    axes.set_xscale('symlog', linthresh=10)
    axes.set_xticks(ticks := [-10, -5, -2, 0, 2, 5, 10, 20, 50], ticks)
    axes.set_xlabel('A over B, %; black: bounds, green: holds, red: does not hold')
    return figure


# The paper's figures

class Point(NamedTuple):
    """A model's runs at one size and rate. The perplexity is that of the mean loss of the runs that
    did not fail, NaN if all did; `std` is its standard deviation over seeds."""
    series: str
    x: str
    size: str
    model: str
    parameters: float
    tokens: float
    rate: float
    seeds: tuple[int, ...]
    failed: tuple[int, ...]
    perplexity: float
    std: float
    panel: str


def make_point(series: dict[str, str], runs: Results) -> Point:
    """Summarize runs of one model, size, rate and panel."""
    finished, _ = rule.split_failed({(run.model, run.seed): row['y'] for run, row in runs.items()})
    losses = list(finished.values())
    seeds = {run.seed for run in runs}
    failed = seeds - {seed for _, seed in finished}
    run, row = next(iter(runs.items()))
    return Point(
        series['series'], series['x'], run.size, run.model, row['parameters'], row['tokens'],
        run.rate, tuple(sorted(seeds)), tuple(sorted(failed)),
        math.exp(statistics.fmean(losses)) if losses else math.nan,
        statistics.stdev(map(math.exp, losses)) if len(losses) > 1 else 0, row['panel'])


def collect(figure: str, size: str | None, found: Results) -> list[Point]:
    """Return the points of a figure, sorted by size: all rates of a sweep, otherwise the rate with
    the most seeds. Sweeps of the study have the seeds of its trials."""
    sweep = FIGURES[figure]['plot'] == 'rates'
    points = []
    for series in (row for row in SERIES if row['figure'] == figure):
        groups: dict[tuple[str, str], dict[float, Results]] = defaultdict(lambda: defaultdict(dict))
        for run, row in found.items():
            trial = sweep and run.size in SIZES and SIZES[run.size]['trial_seeds'] != ''
            if run.model == series['model'] and (run.seed >= TRIAL_SEEDS) == trial:
                groups[run.size, row['panel']][run.rate][run] = row
        for (at, _), rates in groups.items():
            if at == (size or at) and at in FIGURE_SIZES:
                shown = sorted(rates) if sweep else [max(rates, key=lambda rate: len(rates[rate]))]
                points += [make_point(series, rates[rate]) for rate in shown]
    return sorted(points, key=lambda point: FIGURE_SIZES.index(point.size))


def planned(figure: str, size: str) -> list[Run]:
    """Return the runs of a figure at a size. A sweep has five rates, octaves around the size's. In
    other figures a model has its rate in the published lists, or else Llama's, as in the paper."""
    middle = (float(SIZES[size]['middle_rate']) if size in SIZES
              else configs(size_options(size))[0].learning_rate)
    cells = [run for folder, name in ((FIRST, 'runs'), (SECOND, 'cells'), (FIGURE_DATA, 'cells'))
             for run in read_cells(f'{folder}/{name}.csv') if run.seed < TRIAL_SEEDS]
    rates = {run.model: run.rate for run in cells if run.size == size}
    sweep = FIGURES[figure]['plot'] == 'rates'
    seeds = SIZES[size]['trial_seeds' if sweep else 'seeds'] if size in SIZES else ''
    runs = []
    for model in dict.fromkeys(row['model'] for row in SERIES if row['figure'] == figure):
        own = [rates.get(model, rates.get('llama', middle))]
        for rate in [middle * 2 ** n for n in (-2, -1, 0, 1, 2)] if sweep else own:
            runs += [Run(size, model, float(f'{rate:.3g}'), int(seed))
                     for seed in (seeds or '1').split()]
    return runs


def hours(run: Run) -> float:
    """Estimate the hours of a run on one A100, or on one CPU thread at laptop sizes."""
    train, cfg = configs(run_options(run.size, run.model))
    tokens = train.tokens or 20 * meta_model(cfg.llama()).num_params()
    flops = tokens * flops_per_token(meta_model(cfg))
    speed = CPU_FLOPS if on_laptop(run.size) else A100_FLOPS['cem' in (cfg.attn, cfg.mlp)]
    return flops / speed / 3600


def print_todo(runs: list[Run], root: str) -> None:
    for run in runs:
        unit = 'core-hours' if on_laptop(run.size) else 'A100-hours'
        print(f'{run.command(root)}  # {hours(run):.2g} {unit}', flush=True)


def figure_table(figure: str, points: list[Point], found: Results) -> str:
    """Format the points, the planned runs that are missing, and the optima of sweeps."""
    rows = [[p.model, p.size, f'{p.parameters:,.0f}', f'{p.tokens:,.0f}', f'{p.rate:g}',
             ' '.join(map(str, p.seeds)), f'{p.perplexity:.2f}',
             'failed: ' + ' '.join(map(str, p.failed)) if p.failed else ''] for p in points]
    missing: dict[tuple[str, str, float], list[str]] = defaultdict(list)
    for size in dict.fromkeys(point.size for point in points):
        for run in planned(figure, size):
            if run not in found:
                missing[run[:3]].append(str(run.seed))
    rows += [[model, size, '', '', f'{rate:g}', '', '', 'missing: ' + ' '.join(seeds)]
             for (size, model, rate), seeds in missing.items()]
    header = ['model', 'size', 'parameters', 'tokens', 'rate', 'seeds', 'perplexity', 'lacks']
    lines = [f'Figure {figure}. The paper: {FIGURES[figure]["paper"]}.', '', table(header, rows)]
    if FIGURES[figure]['plot'] == 'rates':
        for (series, size), group in by_curve(points).items():
            if len(group) >= 3:
                _, rate, lowest = akima(group)
                lines.append(f'{series}, {size}: perplexity {lowest:.2f} at rate {rate:.3g}, '
                             'the lowest of the interpolation')
    return '\n'.join([*lines, ''])


def by_curve(points: list[Point]) -> dict[tuple[str, str], list[Point]]:
    """Group the points that are finished by series and size, sorted by rate."""
    curves = defaultdict(list)
    for point in sorted(points, key=lambda point: point.rate):
        if not math.isnan(point.perplexity):
            curves[point.series, point.size].append(point)
    return curves


def akima(points: list[Point]) -> tuple[Akima1DInterpolator, float, float]:
    """Interpolate perplexity over the log of the rate. Return the curve and its minimum."""
    x = np.log([point.rate for point in points])
    curve = Akima1DInterpolator(x, [point.perplexity for point in points])
    candidates = np.array([x[0], *curve.derivative().roots(extrapolate=False), x[-1]])
    best = candidates[np.argmin(curve(candidates))]
    return curve, float(np.exp(best)), float(curve(best))


def plot_parameters(axes: Axes, points: list[Point]) -> None:
    """Perplexity over parameters, linked to Llama's, with the tokens above the markers."""
    llama = {point.size: point for point in points if point.x == 'baseline'}
    markers = dict(zip(dict.fromkeys(point.series for point in points), 'Dos', strict=False))
    for series, marker in markers.items():
        shown = [point for point in points if point.series == series]
        axes.plot([p.parameters for p in shown], [p.perplexity for p in shown], marker,
                  label=series)
    for p in points:
        start = llama.get(p.size, p)
        axes.plot([start.parameters, p.parameters], [start.perplexity, p.perplexity], color='gray',
                  lw=0.5, zorder=0)
        axes.annotate(f'{p.tokens / 1e6:.3g} M', (p.parameters, p.perplexity), (0, 6),
                      textcoords='offset points', ha='center', fontsize=7)
    axes.set(xscale='log', xlabel='parameters', yscale='log')


def plot_bars(axes: Axes, points: list[Point]) -> None:
    """A bar for each x, coloured by series, with Llama's perplexity dashed."""
    series = list(dict.fromkeys(p.series for p in points if p.x != 'baseline'))
    places = list(dict.fromkeys(p.x for p in points if p.x != 'baseline'))
    width = 1 / (len(series) + 1)
    for p in points:
        if p.x == 'baseline':
            axes.axhline(p.perplexity, ls='--', color='hotpink', label=p.series)
            continue
        n = series.index(p.series)
        axes.bar(places.index(p.x) + n * width, p.perplexity, width, yerr=p.std, color=f'C{n}',
                 capsize=2, label=p.series)
    axes.set_xticks(np.arange(len(places)) + (len(series) - 1) / 2 * width, places)
    shown = [p.perplexity for p in points]
    axes.set_ylim(0.95 * min(shown), 1.05 * max(shown))


def plot_rates(axes: Axes, points: list[Point]) -> None:
    """Perplexity over the learning rate, interpolated, with a star at the minimum."""
    sizes = list(dict.fromkeys(point.size for point in points))
    for (series, size), group in by_curve(points).items():
        color = 'C1' if series == 'Llama' else 'C0'
        axes.plot([p.rate for p in group], [p.perplexity for p in group],
                  'osD^v<>'[sizes.index(size)], color=color, label=f'{series}, {size}')
        if len(group) >= 3:
            curve, *star = akima(group)
            rates = np.geomspace(group[0].rate, group[-1].rate, 200)
            axes.plot(rates, curve(np.log(rates)), color=color, lw=1)
            axes.plot(*star, '*', color=color, ms=14)
    axes.set(xscale='log', xlabel='learning rate')


def plot_gain(axes: Axes, points: list[Point]) -> None:
    """What a second step or use brings each series: the shaded area from T = 1 to T = 2."""
    series = list(dict.fromkeys(p.series for p in points))
    before = {p.series: p.perplexity for p in points if p.x == '1'}
    for p in points:
        n = series.index(p.series)
        axes.errorbar([n], [p.perplexity], [p.std], fmt='o', capsize=2, label=f'T = {p.x}',
                      color={'1': 'C1', '2': 'C0'}[p.x])
        if p.x == '2' and p.series in before:
            axes.bar(n, before[p.series] - p.perplexity, 0.5, bottom=p.perplexity, alpha=0.3,
                     color=f'C{n + 2}')
    axes.set_xticks(range(len(series)), [name.replace(', ', '\n') for name in series], fontsize=7)


PLOTS = {'parameters': plot_parameters, 'bars': plot_bars, 'rates': plot_rates, 'gain': plot_gain}


def draw_figure(figure: str, points: list[Point]) -> plt.Figure:
    """Draw the points that did not fail: a panel for each text, vocabulary and so on, and for each
    size, too, if the figure has bars."""
    plot = FIGURES[figure]['plot']
    panels: dict[str, list[Point]] = defaultdict(list)
    for p in points:
        if not math.isnan(p.perplexity):
            panels[f'{p.size}, {p.panel}' if plot in ('bars', 'gain') else p.panel].append(p)
    # Leave out panels with Llama alone, unless all are such
    whole = {name: group for name, group in panels.items() if len({p.series for p in group}) > 1}
    panels = whole or panels
    picture, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False,
                                 layout='constrained')
    for ax, (name, group) in zip(axes[0], panels.items(), strict=True):
        PLOTS[plot](ax, group)
        ax.set_title(f'{figure}: {name}', fontsize=7)
        ax.set_ylabel('perplexity per ' + name.partition('; per ')[2])
        # Name each series once
        handles, labels = ax.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        ax.legend(once.values(), once.keys(), fontsize=7)
    return picture


@dataclass
class ReproduceConfig:
    """What to print."""
    todo: bool = False  # print the commands of missing runs
    figure: Literal[(*FIGURES, 'all')] | None = None  # draw this figure of the paper
    size: Literal[FIGURE_SIZES] | None = None  # for --figure: this size only; for --todo: XS
    publish: bool = False  # append finished runs of the published lists to results/
    anew: bool = False  # leave the published runs out


@command_line
def main(argv: list[str]) -> None:
    cfg = build(ReproduceConfig, read_options(argv, ReproduceConfig))
    check(cfg.size is None or cfg.figure is not None, f'size={cfg.size} is for --figure')
    own = read_own()
    if cfg.publish:
        return publish(own)
    lists = (FIRST, 'runs'), (FIRST, 'more_seeds'), (SECOND, 'runs'), (FIGURE_DATA, 'runs')
    found = dict(own)
    for folder, name in [] if cfg.anew else lists:
        found |= read_published(f'{folder}/{name}.csv')
    if cfg.figure:
        names = list(FIGURES) if cfg.figure == 'all' else [cfg.figure]
        return print_figures(names, cfg.size, cfg.todo, found)
    if cfg.todo:
        cells = read_cells(f'{FIRST}/runs.csv') + read_cells(f'{SECOND}/cells.csv')
        print_todo([run for run in cells if run not in found], 'out/reproduce')
        cells = read_cells(f'{FIGURE_DATA}/cells.csv')
        return print_todo([run for run in cells if run not in found], 'out/figures')
    verdicts = []
    for family in (first_family(found), second_family(found)):
        rows = judge(family)
        print(verdict_table(family, rows), flush=True)
        verdicts += rows
    os.makedirs('out/results', exist_ok=True)
    draw_rows(verdicts).savefig('out/results/rows.png')
    print('out/results/rows.png shows all effects', flush=True)


def print_figures(figures: list[str], size: str | None, todo: bool, found: Results) -> None:
    """Print the tables of figures and draw them, or print the commands of their missing runs."""
    os.makedirs('out/figures', exist_ok=True)
    missing: dict[Run, None] = {}
    for figure in figures:
        fixed = FIGURES[figure]['size'] or size
        if len(figures) > 1 and size not in (None, fixed):
            continue  # the appendix's figure has one size
        if todo:
            missing |= dict.fromkeys(run for run in planned(figure, fixed or 'XS')
                                     if run not in found)
        elif points := collect(figure, fixed, found):
            print(figure_table(figure, points, found), flush=True)
            draw_figure(figure, points).savefig(f'out/figures/{figure}.png')
            print(f'out/figures/{figure}.png\n', flush=True)
        else:
            print(f'Figure {figure} has no finished runs: --figure={figure} --size={fixed or "XS"} '
                  '--todo prints their commands\n', flush=True)
    print_todo(list(missing), 'out/figures')


if __name__ == '__main__':
    main(sys.argv[1:])

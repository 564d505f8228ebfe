"""
Does the paper hold? Its claims, the training runs that decide them, and the verdicts.

    python reproduce.py                              the verdicts and pictures of results/tokens
    python reproduce.py --todo --text=FILE | sh      train what is missing on a text, one by one
    python reproduce.py --anew                       the verdicts of your own runs alone
    python reproduce.py --scale=paper                the commands at the paper's sizes

The claims, models and sizes are verdicts.csv, models.csv and sizes.csv in results/tokens; RULE.md
explains them. Learning rates are chosen by trials, runs of their own: --todo prints more once these
are finished, so repeat it until it prints nothing. `| xargs -P 2 -I{} sh -c "{}"` trains two at a
time. Runs live in out/reproduce/; tables and pictures are written to out/results/tokens/.

The rule. y is the loss of the held-out text, validation and test together, in nats a Llama token. At
each size the runs are a table of models by seeds, to which a mean for each model and each seed is
fitted; s is the root mean square of the residuals, with f degrees of freedom. d is the mean of
y(A) - y(B) over the n seeds that both have, its interval

    d +- t(1 - 0.025 / m; f) s sqrt(2 / n)      m: the number of rows of this size (Bonferroni)

A row holds if its interval lies inside its bounds, does not hold if it lies outside, and is
undecided else; with a failed run it does not hold. Bounds are per cent of perplexity, A over B. The
largest size with two seeds or more gives the word; the scarce sizes must agree.
"""
import csv
import glob
import math
import os
import re
import statistics
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import t as student

from configurator import build, command_line, fail, read_options
from model import ModelConfig, Transformer
from nanocem.compute import flops_per_token
from nanocem.data import open_shard, read_meta
from nanocem.files import read_json, read_json_lines, say, table
from nanocem.tokenizers import SentencePieceTokenizer, load_tokenizer
from train import MAX_SKIPPED, TrainConfig

PUBLISHED = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results/tokens')
OUT = 'out/results/tokens'
CPU_FLOPS = 30e9  # a second, of one core: an estimate
MFU = {'llama': 0.37, 'cem': 0.29}  # on an A100: estimates, 'cem' that of all-CEM with two steps
A100_FLOPS = 312e12  # a second, of dense bf16 products

COMMON = (
    '--attn_reuse=1 --mlp_reuse=1 --warmup=0.05 --final_lr=0.1 --weight_decay=0.1 --grad_clip=1 '
    '--beta1=0.9 --beta2=0.95 --adam_eps=1e-9 --dtype=float32 --compile=True --eval_tokens=1B '
    '--test_tokens=1B --eval_interval=1M --log_interval=1 --checkpoint_interval=500 '
    '--keep_checkpoints=1 --tensorboard=False --sample_tokens=0')


def read_csv(name: str) -> list[dict[str, str]]:
    with open(os.path.join(PUBLISHED, name), encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


ROWS = read_csv('verdicts.csv')
MODELS = {row['model']: row for row in read_csv('models.csv')}
SIZES = {row['size']: row for row in read_csv('sizes.csv')}  # in the order of their runs


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def names(text: str) -> list[str]:
    return text.split('; ') if text else []


@cache
def meta_model(options: str) -> Transformer:
    """Return the model that train.py makes of these options, without memory for its weights."""
    with torch.device('meta'):
        return Transformer(build(ModelConfig, read_options(options.split(), TrainConfig, ModelConfig)))


def count_weights(options: str) -> int:
    """Count the parameters of the layers, without embedding and head."""
    return sum(p.numel() for p in meta_model(options).blocks.parameters())


@cache
def model_options(shape: str, model: str) -> str:
    """Return the options of a model of a shape, each of them once. If the layers must have the
    weights of another model, the width of the MLP sees to it."""
    options = f'{shape} {MODELS[model]["options"]}'
    if like := MODELS[model]['weights_of']:
        target = count_weights(model_options(shape, like))
        one, two = (count_weights(f'{options} --d_mlp={width}') for width in (1, 2))
        options += f' --d_mlp={1 + round((target - one) / (two - one))}'
    return ' '.join({option.split('=')[0]: option for option in options.split()}.values())


class Run(NamedTuple):
    """One training run. Its rate has three digits, as in the folder's name."""
    size: str
    model: str
    rate: float
    seed: int

    @property
    def options(self) -> str:
        return model_options(f'{COMMON} {SIZES[self.size]["options"]}', self.model)

    @property
    def folder(self) -> str:
        return f'out/reproduce/{self.size}/{self.model}_rate={self.rate:g}_seed={self.seed}'

    @property
    def command(self) -> str:
        """A line of shell that trains the run or goes on with it, on one thread."""
        resume = ' --init_from=resume' * os.path.exists(f'{self.folder}/config.json')
        return (f'OMP_NUM_THREADS=1 python train.py {self.options} --learning_rate={self.rate:g} '
                f'--seed={self.seed} --out_dir={self.folder}{resume}')

    @property
    def hours(self) -> float:
        """An estimate of the core-hours."""
        tokens = read_options(self.options.split(), TrainConfig, ModelConfig)['tokens']
        return tokens * flops_per_token(meta_model(self.options)) / CPU_FLOPS / 3600


# Results: the columns of runs.csv after those of Run. The losses of a failed run are infinite.

NUMBERS = ('parameters', 'weights', 'tokens', 'flops_per_token', 'seconds', 'val_bpb', 'test_bpb',
           'y', 'skipped', 'spikes')
Results = dict[Run, dict[str, float]]


def read_results(anew: bool) -> Results:
    """Read the published runs, unless `anew`, and those that are finished in out/reproduce."""
    found: Results = {}
    if os.path.exists(f'{PUBLISHED}/runs.csv') and not anew:
        for row in read_csv('runs.csv'):
            run = Run(row['size'], row['model'], float(row['rate']), int(row['seed']))
            found[run] = {name: float(row[name]) for name in NUMBERS}
    for path in sorted(glob.glob('out/reproduce/*/*/log.jsonl')):
        size, name = path.split('/')[2:4]
        model, rate, seed = re.split('_rate=|_seed=', name)
        run = Run(size, model, float(rate), int(seed))
        if run not in found and (result := read_run(run)):
            found[run] = result
    return found


def read_run(run: Run) -> dict[str, float] | None:
    """Read a run in out/reproduce; None where it is not finished."""
    lines, model = read_json_lines(f'{run.folder}/log.jsonl'), meta_model(run.options)
    losses = [line['loss'] or math.inf for line in lines if 'lr' in line]
    # A spike is 0.5 nats above the median of the 50 batches before
    spikes = sum(losses[n] > statistics.median(losses[n - 50:n]) + 0.5
                 for n in range(50, len(losses)))
    found = dict.fromkeys(NUMBERS, math.nan) | {
        'weights': count_weights(run.options), 'parameters': model.num_params(),
        'flops_per_token': flops_per_token(model), 'spikes': spikes}
    if result := read_json(f'{run.folder}/result.json'):
        val, test = result['val_bits_per_byte'], result['test_bits_per_byte']
        own = {name: result[name] for name in ('tokens', 'seconds', 'skipped')}
        return found | own | dict(val_bpb=val, test_bpb=test, y=loss_per_llama_token(val, test))
    # train.py gives a run up after MAX_SKIPPED skipped steps in a row; each leaves two lines
    skipped = sum(line.get('event') == 'skipped' for line in lines[-2 * MAX_SKIPPED - 2:])
    failed = dict.fromkeys(('val_bpb', 'test_bpb', 'y'), math.inf)
    return found | failed if skipped > MAX_SKIPPED else None


def loss_per_llama_token(val_bpb: float, test_bpb: float) -> float:
    """Convert bits a byte to nats a Llama token, of both splits; NaN while there is no text.csv."""
    path = os.path.abspath(f'{OUT}/text.csv')  # of a text of one's own
    path = path if os.path.exists(path) else f'{PUBLISHED}/text.csv'
    if not os.path.exists(path):
        return math.nan
    val, test = read_csv(path)
    bits = val_bpb * int(val['bytes']) + test_bpb * int(test['bytes'])
    return math.log(2) * bits / (int(val['llama_tokens']) + int(test['llama_tokens']))


def count_text(folder: str) -> str:
    """Count documents, bytes and Llama tokens of a data folder's held-out splits, for text.csv. Each
    document is encoded alone, without BOS, its line ends kept."""
    meta, tokenizer = read_meta(folder), load_tokenizer(folder)
    llama = SentencePieceTokenizer(os.environ.get('LLAMA_TOKENIZER', 'tokenizer.model'))
    lines = ['split,documents,bytes,llama_tokens']
    for split in ('val', 'test'):
        (shard,) = meta['splits'][split]['shards']
        ids = open_shard(folder, meta, shard)
        documents = np.split(ids, np.flatnonzero(ids == meta['bos']))[1:]
        texts = [tokenizer.decode(document[1:].tolist()) for document in documents]
        size = sum(len(text.encode()) for text in texts)
        lines.append(f'{split},{len(texts)},{size},{sum(len(llama.encode(text)) for text in texts)}')
    return '\n'.join(lines)


# Learning rates

class Trials(NamedTuple):
    """The learning rates to try; and, once all were, their lowest loss and the best rate."""
    rates: list[float]
    lowest: float = math.nan  # bits a byte of the validation text
    best: float | None = None


def search(found: Results, size: str, model: str, seed: int | None = None) -> Trials:
    """Try three rates, and further ones while the best is at an end. The best rate is the vertex of
    the parabola, in log rate, through the lowest loss and its neighbours: of the mean over seeds,
    or of one seed."""
    rate, ratio = (float(SIZES[size][name]) for name in ('rate', 'ratio'))
    low, high = -1, 1
    while True:
        rates = [float(f'{rate * ratio ** n:.3g}') for n in range(low, high + 1)]
        losses = []
        for tried in rates:
            runs = [Run(size, model, tried, of) for of in numbers(SIZES[size]['trial_seeds'])]
            if not all(run in found for run in runs):
                return Trials(rates)
            losses.append(statistics.fmean(found[run]['val_bpb'] for run in runs))
        best = int(np.argmin(losses))
        if 0 < best < len(rates) - 1 or len(rates) == 7:
            break
        low, high = (low - 1, high) if best == 0 else (low, high + 1)
    if seed:
        losses = [found[Run(size, model, tried, seed)]['val_bpb'] for tried in rates]
        best = int(np.argmin(losses))
    left, middle, right = [math.inf, *losses, math.inf][best:best + 3]
    curvature = left + right - 2 * middle
    shift = (left - right) / curvature / 2 if 0 < curvature < math.inf else 0
    return Trials(rates, middle, float(f'{rates[best] * ratio ** shift:.3g}'))


def best_rate(found: Results, size: str, model: str) -> float | None:
    """Return a model's learning rate; None while trials that decide on it are missing."""
    base = 'scarce-25k' if size.startswith('scarce') else 'XS'
    family = MODELS[model]['rate_of']
    rate = search(found, base, family).best
    if size not in ('S', 'M') or rate is None:
        return rate
    # The change from XS to S of the two models that are tuned at both; to M by a power law
    changes = {}
    for tuned in names(SIZES['S']['tuned']):
        small, large = (search(found, name, tuned).best for name in ('XS', 'S'))
        if small is None or large is None:
            return None
        changes[tuned] = math.log(large / small)
    change = changes.get(family, statistics.fmean(changes.values()))
    XS, S, here = (math.log(count_weights(Run(name, 'llama', 0, 0).options))
                   for name in ('XS', 'S', size))
    return float(f'{rate * math.exp(change * (here - XS) / (S - XS)):.3g}')


def choose(found: Results, model: str) -> str | None:
    """Return the better of 'A or B' in their trials; None while some are missing."""
    if ' or ' not in model:
        return model
    trials = {name: search(found, 'scarce-25k', MODELS[name]['rate_of'])
              for name in model.split(' or ')}
    if any(trial.best is None for trial in trials.values()):
        return None
    return min(trials, key=lambda name: trials[name].lowest)


# The plan

def planned(found: Results, size: str) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the trials of a size; the runs that are reported, seed by seed; and those to report
    whose learning rate is not known yet."""
    here, runs, waiting = SIZES[size], [], []
    trials = [Run(size, model, rate, seed) for model in names(here['tuned'])
              for rate in search(found, size, model).rates
              for seed in numbers(here['trial_seeds'])]
    in_rows = [row[side] for row in ROWS if size in row['sizes'].split() for side in 'AB']
    for name in dict.fromkeys([*names(here['first']), *filter(None, in_rows)]):
        model = choose(found, name)
        rate = model and best_rate(found, size, model)
        run = Run(size, model or name.split(' or ')[0], rate or math.nan, 0)
        seeds = numbers(here['seeds'])
        (runs if rate else waiting).extend(run._replace(seed=seed) for seed in seeds)
    return trials, sorted(runs, key=lambda run: run.seed), waiting


def say_todo(found: Results, text: str | None) -> None:
    """Print the commands of missing runs, up to the first size that waits for learning rates; after
    each block its core-hours."""
    if text:
        prepare = f'python prepare_slimpajama.py --input={text} --held_out=0.05'
        say(f'{prepare} --tokenizer=bpe2048 --out_dir=data/english')
        say(f'{prepare} --tokenizer=byte --out_dir=data/english-bytes')
    elif not os.path.exists('data/english/meta.json'):
        fail('text=None and there is no data/english: --text=FILE prepares it')
    for size in SIZES:
        trials, runs, waiting = planned(found, size)
        for name, block in ((f'{size} rates', trials), (size, runs)):
            missing = [run for run in block if run not in found]
            for run in missing:
                say(run.command)
            if missing:
                hours = sum(run.hours for run in missing)
                say(f'# {name}: {len(missing)} runs, {hours:.1f} core-hours')
        if waiting:
            hours = sum(run.hours for run in waiting)
            return say(f'# {size}: {len(waiting)} runs, {hours:.1f} core-hours, after these')


def say_paper() -> None:
    """Print the commands at the paper's sizes, with their A100-hours."""
    for size in ('86m', '108m', '134m', '162m', '256m'):
        llama = meta_model(f'--size={size} {MODELS["llama"]["options"]}')
        for model in dict.fromkeys(run.model for run in planned({}, 'XS')[2]):
            larger = '_cem' * (size == '256m' and model.startswith('cem'))
            shape = f'--size={size}{larger} --tokens={20 * llama.num_params()}'
            options = model_options(shape, model)
            mfu = MFU['cem' if '=cem' in options else 'llama']
            flops = 20 * llama.num_params() * flops_per_token(meta_model(options))
            say(f'torchrun --nproc_per_node=8 train.py {options} --learning_rate=0.002 --seed=1 '
                f'--out_dir=out/reproduce/{size}/{model}  '
                f'# {flops / mfu / A100_FLOPS / 3600:.0f} A100-hours')


# Verdicts

Cells = dict[tuple[str, int], float]  # y of (model, seed): the runs of one size


class Effect(NamedTuple):
    """A's y less B's at a size: the mean over seeds, and half of its interval, NaN with one seed.
    It is infinite where a run failed."""
    size: str
    d: float
    half: float = math.nan

    def percent(self) -> list[float]:
        """The change in perplexity, and the ends of its interval."""
        return [100 * math.expm1(x) for x in (self.d, self.d - self.half, self.d + self.half)]

    def __str__(self) -> str:
        d, low, high = self.percent()
        interval = '' if math.isnan(low) else f' ({low:+.1f} to {high:+.1f})'
        return f'{self.size} failed' if math.isinf(d) else f'{self.size} {d:+.1f}%{interval}'


def split_failed(y: Cells) -> tuple[Cells, set[str]]:
    """Return the runs that did not fail, and the models of those that did: their y is not finite,
    or 0.5 nats above the median of the model's seeds."""
    medians = {name: statistics.median(of for (model, _), of in y.items() if model == name)
               for name, _ in y}
    sound = {cell: of for cell, of in y.items() if of < min(math.inf, medians[cell[0]] + 0.5)}
    return sound, {model for model, seed in y if (model, seed) not in sound}


def residual_error(y: Cells) -> tuple[float, int]:
    """Fit a mean for each model and each seed. Return the root mean square of the residuals, and
    its degrees of freedom."""
    models, seeds = (sorted(set(factor)) for factor in zip(*y, strict=True))
    design = np.zeros((len(y), len(models) + len(seeds)))
    for row, (model, seed) in enumerate(y):
        design[row, models.index(model)] = 1
        design[row, len(models) + seeds.index(seed)] = 1
    values = np.array(list(y.values()))
    fit, _, rank, _ = np.linalg.lstsq(design, values)
    freedom = len(y) - int(rank)
    return float(np.linalg.norm(values - design @ fit)) / math.sqrt(freedom or math.nan), freedom


def differences(y: Cells, A: str, B: str) -> list[float]:
    """Return A's y less B's, for each seed that both have."""
    return [of - y[B, seed] for (model, seed), of in y.items() if model == A and (B, seed) in y]


def compare(y: Cells, A: str, B: str, size: str, m: int) -> Effect | None:
    """Compare two models of a size, one of m comparisons; None where no seed has both."""
    sound, failed = split_failed(y)
    if {A, B} & failed:
        return Effect(size, math.inf)
    d = differences(sound, A, B)
    if len(d) < 2:
        return Effect(size, d[0]) if d else None
    s, freedom = residual_error(sound)
    half = student.ppf(1 - 0.025 / m, freedom) * s * math.sqrt(2 / len(d))
    return Effect(size, statistics.fmean(d), float(half))


def decide(effect: Effect, above: float, below: float) -> str:
    """Say whether the interval lies inside the bounds; nothing where there is no interval."""
    _, low, high = effect.percent()
    if above < low and high < below:
        return 'holds'
    if math.isinf(effect.d) or high < above or low > below:
        return 'does not hold'
    return '' if math.isnan(low) else 'undecided'


Verdict = tuple[dict[str, str], list[Effect], str]  # row, effects by size, word


def judge(found: Results, tables: dict[str, Cells]) -> list[Verdict]:
    """Decide every row of verdicts.csv."""
    verdicts = []
    for row in ROWS:
        effects, sizes = [], row['sizes'].split()
        above, below = float(row['above_%'] or '-inf'), float(row['below_%'] or 'inf')
        for size in sizes if row['A'] else []:
            A, B = choose(found, row['A']), choose(found, row['B'])
            y, m = tables[size], sum(size in of['sizes'].split() and of['A'] != '' and
                                     of['kind'] != 'higher rate' for of in ROWS)
            if row['kind'] == 'higher rate':  # the same rule for log rates, one row
                y, m = tuned_rates(found, size), 1
            effects += filter(None, [compare(y, A, B, size, m)])
        words = [word for effect in effects if (word := decide(effect, above, below))]
        if row['kind'] == 'stable':
            failed = [size for size in sizes if any(
                model.startswith('cem') for model in split_failed(tables[size])[1])]
            words = ['does not hold'] if failed else ['holds'] * any(map(tables.get, sizes))
        if row['kind'] == 'elsewhere':
            words = ['see results/gp']
        if words and row['id'].startswith('s') and words != words[:1] * len(sizes):
            words = ['undecided']
        verdicts.append((row, effects, words[-1] if words else 'not run'))
    return verdicts


def tuned_rates(found: Results, size: str) -> Cells:
    """Return the log of the best rate of every tuned model and seed."""
    best = {(model, seed): search(found, size, model, seed).best
            for model in names(SIZES[size]['tuned'])
            for seed in numbers(SIZES[size]['trial_seeds'])}
    return {cell: math.log(rate) for cell, rate in best.items() if rate}


def in_weights(tables: dict[str, Cells], size: str, model: str) -> str:
    """Return the weights of the Llama with ALiBi of the same loss, if it lies between its sizes."""
    def mean(size: str, model: str) -> float:
        return statistics.fmean(of for (name, _), of in tables[size].items() if name == model)

    grid = ('XS', 'S', 'M')
    line = sorted((mean(name, 'llama-alibi'), count_weights(Run(name, 'llama-alibi', 0, 0).options))
                  for name in grid if ('llama-alibi', 1) in tables[name])
    y = mean(size, model) if size in grid else math.nan
    if len(line) < 2 or not line[0][0] <= y <= line[-1][0]:
        return ''
    losses, weights = zip(*line, strict=True)
    return f'{math.exp(np.interp(math.log(y), np.log(losses), np.log(weights))) / 1e3:.0f} k'


def verdict_table(tables: dict[str, Cells], verdicts: list[Verdict]) -> str:
    rows = [[row['id'], row['claim'], f'{row["A"]} / {row["B"]}', row['kind'],
             '; '.join(map(str, effects)),
             in_weights(tables, effects[-1].size, row['A']) if effects else '', word]
            for row, effects, word in verdicts]
    header = ['', 'claim', 'A / B', 'A is', 'A over B', 'A is a Llama with ALiBi of', 'verdict']
    return ('Perplexity a Llama token of the held-out text, A over B less one, and its interval '
            f'over seeds.\n\n{table(header, rows)}\n')


# Pictures

def draw_rows(verdicts: list[Verdict]) -> plt.Figure:
    """Draw the interval of every row at its largest size, coloured by the verdict."""
    colors = {'holds': 'C2', 'does not hold': 'C3', 'undecided': 'gray'}
    shown = [of for of in verdicts if of[1] and math.isfinite(of[1][-1].d)][::-1]
    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(shown)), layout='constrained')
    for place, (row, effects, word) in enumerate(shown):
        d, low, high = effects[-1].percent()
        bars = None if math.isnan(low) else [[d - low], [high - d]]
        axes.errorbar([d], [place], xerr=bars, fmt='o', ms=4, color=colors.get(word, 'black'))
        for bound in filter(None, (row['above_%'], row['below_%'])):
            axes.plot([float(bound)] * 2, [place - 0.4, place + 0.4], color='black', lw=1)
    axes.set_yticks(range(len(shown)), [f'{row["id"]} {row["claim"]}' for row, _, _ in shown])
    axes.tick_params('y', labelsize=7)
    axes.set_xscale('symlog', linthresh=10)
    axes.set_xlabel('perplexity a Llama token, A over B, %; black: bound, green: holds, red: not')
    return figure


# A picture's lines: for each label the places (x, size, model)
GAP = {label: [(count_weights(Run(size, 'llama', 0, 0).options), size, model)
               for size in ('XS', 'S', 'M')] for label, model in {
    'Llama with ALiBi': 'llama-alibi', 'the same, weights of all-CEM': 'llama-alibi-narrow',
    'CEM attention, T = 1, no P': 'attn-1-none', 'all-CEM, T = 1': 'cem-1',
    'all-CEM, T = 2': 'cem-2'}.items()}
STEPS = {f'{label}, {P or "low-rank P"}': [(T, 'XS', f'{kind}-{T}{P and "-" + P}')
                                           for T in (1, 2, 3) if f'{kind}-{T}{P and "-" + P}' in MODELS]
         for label, kind in {'CEM attention': 'attn', 'CEM MLP': 'mlp'}.items()
         for P in ('none', 'diag', '')}
SCARCE = {label: [(x, size, model) for x, size in (
    (40, 'scarce-25k-40'), (240, 'scarce-25k-240'), (1440, 'scarce-25k'))] for label, model in {
    'all-CEM, one step': 'cem-1-equal', 'all-CEM, two steps': 'cem-2-equal',
    'all-CEM, two steps of 1': 'cem-2-equal-eta1',
    'all-CEM, one step, twice with a fresh context': 'cem-1-equal-twice',
    'Llama with ALiBi twice': 'llama-alibi-twice'}.items()}


def draw_lines(tables: dict[str, Cells], lines: dict[str, list[tuple[float, str, str]]], base: str,
               xlabel: str) -> plt.Figure:
    """Draw perplexity over the base's: means over seeds and their standard deviations."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
    for label, places in lines.items():
        found = [(x, [100 * math.expm1(of) for of in d]) for x, size, model in places
                 if (d := differences(split_failed(tables[size])[0], model, base))]
        if found:
            bars = [statistics.stdev(d) if len(d) > 1 else 0 for _, d in found]
            axes.errorbar([x for x, _ in found], [statistics.fmean(d) for _, d in found], bars,
                          marker='o', ms=4, capsize=2, label=label)
            axes.legend(fontsize=8)
    axes.axhline(0, color='hotpink', lw=1)
    axes.set(xscale='log', xlabel=xlabel, ylabel=f'perplexity a Llama token over {base}, %')
    return figure


@dataclass
class ReproduceConfig:
    """What to print."""
    scale: Literal['english', 'paper'] = 'english'  # the runs of results/tokens; the paper's sizes
    todo: bool = False  # print the commands of the runs that are missing, and no more
    text: str | None = None  # a text that --todo has prepared; default: data/english is there
    anew: bool = False  # leave the published runs out
    count: str | None = None  # print text.csv of this data folder, by the model $LLAMA_TOKENIZER


@command_line
def main(argv: list[str]) -> None:
    cfg = build(ReproduceConfig, read_options(argv, ReproduceConfig))
    if cfg.count:
        return say(count_text(cfg.count))
    if cfg.scale == 'paper':
        return say_paper()
    found = read_results(cfg.anew)
    if cfg.todo:
        return say_todo(found, cfg.text)
    tables = {size: {(run.model, run.seed): found[run]['y'] for run in planned(found, size)[1]
                     if run in found and not math.isnan(found[run]['y'])} for size in SIZES}
    verdicts = judge(found, tables)
    page = verdict_table(tables, verdicts)
    say(page)
    os.makedirs(OUT, exist_ok=True)
    with open(f'{OUT}/verdicts.md', 'w', encoding='utf-8') as file:
        file.write(page)
    with open(f'{OUT}/runs.csv', 'w', encoding='utf-8', newline='') as file:
        rows = [[*run, *(found[run][name] for name in NUMBERS)] for run in sorted(found)]
        csv.writer(file, lineterminator='\n').writerows([[*Run._fields, *NUMBERS], *rows])
    draw_rows(verdicts).savefig(f'{OUT}/rows.png')
    for name, picture in {
            'gap': (GAP, 'llama', "weights of Llama's layers"), 'steps': (STEPS, 'llama', 'T'),
            'scarce': (SCARCE, 'llama-alibi', 'bytes of text a weight')}.items():
        draw_lines(tables, *picture).savefig(f'{OUT}/{name}.png')
    say(f'{OUT}: runs.csv, verdicts.md, and the pictures')


if __name__ == '__main__':
    main(sys.argv[1:])

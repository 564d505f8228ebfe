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

The unit is the loss of the held-out text, validation and test together, in nats a Llama token.
A row compares models A and B by the rule of nanocem/verdicts.py, with bounds in per cent of
perplexity. The largest size with two seeds or more gives the word; the scarce sizes must agree.
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
from typing import Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

from configurator import build, command_line, fail, read_options
from model import ModelConfig, Transformer
from nanocem.compute import DENSE_BF16, MFU_ESTIMATE, flops_per_token
from nanocem.data import open_shard, read_meta
from nanocem.files import read_json, read_json_lines, say, table, write_atomic
from nanocem.tokenizers import SentencePieceTokenizer, load_tokenizer
from nanocem.verdicts import Cells, Effect, compare, decide, differences, split_failed, vertex
from train import MAX_SKIPPED, TrainConfig

PUBLISHED = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results/tokens')
OUT = 'out/results/tokens'
CPU_FLOPS = 30e9  # a second, of one core: an estimate


def read_csv(name: str) -> list[dict[str, str]]:
    with open(os.path.join(PUBLISHED, name), encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


ROWS = read_csv('verdicts.csv')
MODELS = {row['model']: row for row in read_csv('models.csv')}
SIZES = {row['size']: row for row in read_csv('sizes.csv')}  # in the order of their runs


@cache
def meta_model(options: str) -> Transformer:
    """Return the model that train.py makes of these options, without memory for its weights."""
    with torch.device('meta'):
        given = read_options(options.split(), TrainConfig, ModelConfig)
        return Transformer(build(ModelConfig, given))


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
    rate: float = math.nan
    seed: int = 0

    @property
    def options(self) -> str:
        return model_options(SIZES[self.size]['options'], self.model)

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
    y = [line['loss'] or math.inf for line in lines if 'lr' in line]
    # A spike is 0.5 nats above the median of the 50 batches before
    spikes = sum(y[n] > statistics.median(y[n - 50:n]) + 0.5 for n in range(50, len(y)))
    numbers = dict.fromkeys(NUMBERS, math.nan) | dict(
        weights=count_weights(run.options), parameters=model.num_params(),
        flops_per_token=flops_per_token(model), spikes=spikes)
    if result := read_json(f'{run.folder}/result.json'):
        val, test = result['val_bits_per_byte'], result['test_bits_per_byte']
        same = {name: result[name] for name in ('tokens', 'seconds', 'skipped')}
        return numbers | same | dict(val_bpb=val, test_bpb=test, y=loss_per_llama_token(val, test))
    # train.py gives a run up after MAX_SKIPPED skipped steps in a row; each leaves two lines
    skipped = sum(line.get('event') == 'skipped' for line in lines[-2 * MAX_SKIPPED - 2:])
    failed = numbers | dict.fromkeys(('val_bpb', 'test_bpb', 'y'), math.inf)
    return failed if skipped > MAX_SKIPPED else None


def loss_per_llama_token(val_bpb: float, test_bpb: float) -> float:
    """Convert bits a byte to nats a Llama token, of both splits; NaN while there is no text.csv."""
    own, published = os.path.abspath(f'{OUT}/text.csv'), f'{PUBLISHED}/text.csv'
    if not os.path.exists(own) and not os.path.exists(published):
        return math.nan
    val, test = read_csv(own if os.path.exists(own) else published)
    bits = val_bpb * int(val['bytes']) + test_bpb * int(test['bytes'])
    return math.log(2) * bits / (int(val['llama_tokens']) + int(test['llama_tokens']))


def say_counts(folder: str) -> None:
    """Print text.csv for a data folder's held-out splits: documents, bytes and Llama tokens, each
    document encoded alone, without BOS, its line ends kept."""
    meta, tokenizer = read_meta(folder), load_tokenizer(folder)
    llama = SentencePieceTokenizer(os.environ.get('LLAMA_TOKENIZER', 'tokenizer.model'))
    say('split,documents,bytes,llama_tokens')
    for split in ('val', 'test'):
        (shard,) = meta['splits'][split]['shards']
        ids = open_shard(folder, meta, shard)
        documents = np.split(ids, np.flatnonzero(ids == meta['bos']))[1:]
        texts = [tokenizer.decode(document[1:].tolist()) for document in documents]
        size = sum(len(text.encode()) for text in texts)
        say(f'{split},{len(texts)},{size},{sum(len(llama.encode(text)) for text in texts)}')


# Learning rates

class Trials(NamedTuple):
    """The learning rates to try; once all were, their lowest loss, and the best rate of the mean
    over seeds and of each seed."""
    rates: list[float]
    lowest: float = math.nan  # bits a byte of the validation text
    best: float | None = None
    best_of_seed: dict[int, float] | None = None


def search(found: Results, size: str, model: str) -> Trials:
    """Try three rates, and further ones while the best is at an end."""
    middle, ratio = float(SIZES[size]['rate']), float(SIZES[size]['ratio'])
    seeds = list(map(int, SIZES[size]['trial_seeds'].split()))
    low, high = -1, 1
    while True:
        rates = [float(f'{middle * ratio ** n:.3g}') for n in range(low, high + 1)]
        runs = [[Run(size, model, rate, seed) for seed in seeds] for rate in rates]
        if any(run not in found for row in runs for run in row):
            return Trials(rates)
        losses = np.array([[found[run]['val_bpb'] for run in row] for row in runs])
        mean = losses.mean(1)
        best = int(mean.argmin())
        if 0 < best < len(rates) - 1 or len(rates) == 7:
            by_seed = {seed: vertex(rates, losses[:, n]) for n, seed in enumerate(seeds)}
            return Trials(rates, mean[best], vertex(rates, mean), by_seed)
        low, high = (low - 1, high) if best == 0 else (low, high + 1)


def best_rate(found: Results, size: str, model: str) -> float | None:
    """Return a model's learning rate; None while trials that decide on it are missing."""
    family = MODELS[model]['rate_of']
    rate = search(found, 'scarce-25k' if size.startswith('scarce') else 'XS', family).best
    if size not in ('S', 'M') or rate is None:
        return rate
    # The change from XS to S of the two models that are tuned at both; to M by a power law
    changes = {}
    for tuned in SIZES['S']['tuned'].split():
        small, large = (search(found, name, tuned).best for name in ('XS', 'S'))
        if small is None or large is None:
            return None
        changes[tuned] = math.log(large / small)
    change = changes.get(family, statistics.fmean(changes.values()))
    XS, S, here = (math.log(count_weights(Run(of, 'llama').options)) for of in ('XS', 'S', size))
    return float(f'{rate * math.exp(change * (here - XS) / (S - XS)):.3g}')


def choose(found: Results, model: str) -> str | None:
    """Return the better of 'A/B' in their trials; None while some are missing."""
    if '/' not in model:
        return model
    lowest = {search(found, 'scarce-25k', MODELS[name]['rate_of']).lowest: name
              for name in model.split('/')}
    return None if any(map(math.isnan, lowest)) else lowest[min(lowest)]


# The plan

def planned(found: Results, size: str) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the trials of a size; the runs that are reported, seed by seed; and those to report
    whose learning rate is not known yet."""
    here, runs, waiting = SIZES[size], [], []
    trials = [Run(size, model, rate, int(seed)) for model in here['tuned'].split()
              for rate in search(found, size, model).rates for seed in here['trial_seeds'].split()]
    in_rows = [row[side] for row in ROWS if size in row['sizes'].split() for side in 'AB']
    for name in dict.fromkeys([*here['first'].split(), *filter(None, in_rows)]):
        model = choose(found, name)
        rate = model and best_rate(found, size, model)
        run = Run(size, model or name.split('/')[0], rate or math.nan)
        (runs if rate else waiting).extend(run._replace(seed=int(n)) for n in here['seeds'].split())
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
        for name, block in ((f'{size} rates', trials), (size, runs), (f'later, {size}', waiting)):
            missing = [run for run in block if run not in found]
            for run in missing if block is not waiting else []:
                say(run.command)
            if missing:
                hours = sum(run.hours for run in missing)
                say(f'# {name}: {len(missing)} runs, {hours:.1f} core-hours')
        if waiting:
            return


def say_paper() -> None:
    """Print the commands at the paper's sizes, with their A100-hours."""
    for size in ('86m', '108m', '134m', '162m', '256m'):
        tokens = 20 * meta_model(f'--size={size} {MODELS["llama"]["options"]}').num_params()
        for model in dict.fromkeys(run.model for run in planned({}, 'XS')[2]):
            larger = '_cem' * (size == '256m' and model.startswith('cem'))
            options = model_options(f'--size={size}{larger} --tokens={tokens}', model)
            mfu = MFU_ESTIMATE['cem' if '=cem' in options else 'llama']
            hours = tokens * flops_per_token(meta_model(options)) / mfu / DENSE_BF16['A100'] / 3600
            say(f'torchrun --nproc_per_node=8 train.py {options} --learning_rate=0.002 --seed=1 '
                f'--out_dir=out/paper/{size}/{model}  # {hours:.0f} A100-hours')


# Verdicts

Verdict = tuple[dict[str, str], list[Effect], str]


def judge(found: Results, tables: dict[str, Cells]) -> list[Verdict]:
    """Return every row of verdicts.csv, its effect at each size, and the word for it."""
    verdicts = []
    for row in ROWS:
        sizes, effects = row['sizes'].split(), []
        A, B = choose(found, row['A']), choose(found, row['B'])
        for size in sizes:
            if row['unit'] == 'perplexity':
                m = sum(size in of['sizes'].split() for of in ROWS if of['unit'] == 'perplexity')
                effects.append(compare(tables[size], A, B, size, m))
            elif row['unit'] == 'rate':  # the same rule for the logs of the best rates, one row
                rates = {(model, seed): math.log(rate) for model in SIZES[size]['tuned'].split()
                         for seed, rate in (search(found, size, model).best_of_seed or {}).items()}
                effects.append(compare(rates, A, B, size, 1))
        effects = list(filter(None, effects))
        above, below = float(row['above_%'] or '-inf'), float(row['below_%'] or 'inf')
        words = [word for effect in effects if (word := decide(effect, above, below))]
        if words and row['id'].startswith('s') and words != words[:1] * len(sizes):
            words = ['undecided']
        if row['unit'] == 'failed runs' and any(map(tables.get, sizes)):
            failed = set.union(*(split_failed(tables[size])[1] for size in sizes))
            words = ['does not hold' if 'cem' in str(failed) else 'holds']
        words = words or ['not run' if row['unit'] else 'see results/gp']
        verdicts.append((row, effects, words[-1]))
    return verdicts


def in_weights(tables: dict[str, Cells], size: str, model: str) -> str:
    """Return the weights of the Llama with ALiBi of the same loss, if it lies between its sizes."""
    def log_loss(of: str, name: str) -> float:
        return math.log(statistics.fmean(y for cell, y in tables[of].items() if cell[0] == name))

    grid = [of for of in ('M', 'S', 'XS') if ('llama-alibi', 1) in tables[of]]
    if size not in grid:
        return ''
    losses = [log_loss(of, 'llama-alibi') for of in grid]
    weights = [math.log(count_weights(Run(of, 'llama-alibi').options)) for of in grid]
    same = np.interp(log_loss(size, model), losses, weights, math.nan, math.nan)
    return '' if math.isnan(same) else f'{math.exp(same) / 1e3:.0f} k'


def verdict_table(tables: dict[str, Cells], verdicts: list[Verdict]) -> str:
    names = ('id', 'claim', 'A', 'B', 'kind')
    rows = [[*map(row.get, names), '; '.join(map(str, effects)),
             in_weights(tables, effects[-1].size, row['A']) if effects else '', word]
            for row, effects, word in verdicts]
    header = [*names, 'A over B', 'A as Llama with ALiBi', 'verdict']
    return ('Perplexity a Llama token of the held-out text, A over B less one, and its interval '
            f'over seeds.\n\n{table(header, rows)}\n')


# Pictures

def draw_rows(verdicts: list[Verdict]) -> plt.Figure:
    """Draw the interval of every row, at the largest size that has one, coloured by verdict."""
    colors = {'holds': 'C2', 'does not hold': 'C3', 'undecided': 'gray'}
    shown = [of for of in verdicts if any(effect.half > 0 for effect in of[1])][::-1]
    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(shown)), layout='constrained')
    for place, (row, effects, word) in enumerate(shown):
        d, low, high = [effect for effect in effects if effect.half > 0][-1].percent()
        axes.errorbar([d], [place], xerr=[[d - low], [high - d]], fmt='o', ms=4, color=colors[word])
        for bound in filter(None, (row['above_%'], row['below_%'])):
            axes.plot([float(bound)] * 2, [place - 0.4, place + 0.4], color='black', lw=1)
    axes.set_yticks(range(len(shown)), [row['claim'] for row, _, _ in shown], fontsize=7)
    axes.margins(y=0.01)
    axes.set_xscale('symlog', linthresh=10)
    axes.set_xticks(ticks := [-10, -5, -2, 0, 2, 5, 10, 20, 50], ticks)
    axes.set_xlabel('A over B, %; black: bounds, green: holds, red: does not hold')
    return figure


def draw_lines(tables: dict[str, Cells], base: str, models: dict[str, str], xlabel: str,
               places: list[tuple[float, str]]) -> plt.Figure:
    """Draw perplexity over the base's at places (x, size), means over seeds and their standard
    deviations; a model may have x in its name."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
    for label, model in models.items():
        found = {x: 100 * np.expm1(d) for x, size in places
                 if (d := differences(split_failed(tables[size])[0], model.format(x), base))}
        bars = [d.std(ddof=1) if len(d) > 1 else 0 for d in found.values()]
        axes.errorbar(list(found), [d.mean() for d in found.values()], bars, fmt='o-', ms=4,
                      capsize=2, label=label)
    axes.legend(fontsize=8)
    axes.axhline(0, color='hotpink', lw=1)
    axes.set(xscale='log', xlabel=xlabel, ylabel=f'perplexity a Llama token over {base}, %')
    axes.set_xticks(ticks := [x for x, _ in places], [f'{x:,}' for x in ticks], minor=False)
    axes.minorticks_off()
    return figure


def draw(tables: dict[str, Cells], verdicts: list[Verdict]) -> dict[str, plt.Figure]:
    """Draw all rows; the gap to Llama; steps and P, as in the paper's Figures 2 and 3; and what a
    second pass is worth where weights are scarce."""
    weights = [(count_weights(Run(size, 'llama').options), size) for size in ('XS', 'S', 'M')]
    gap = {'Llama with ALiBi': 'llama-alibi', "with all-CEM's weights": 'llama-alibi-narrow',
           'CEM attention, no P': 'attn-1-none', 'all-CEM': 'cem-1', 'all-CEM, T = 2': 'cem-2'}
    steps = {label + P: kind + end for label, kind in (('attention', 'attn-{}'), ('MLP', 'mlp-{}'))
             for P, end in ((', P', ''), (', diagonal P', '-diag'), (', no P', '-none'))}
    scarce = {'one step': 'cem-1-equal', 'two steps': 'cem-2-equal', 'of 1': 'cem-2-equal-eta1',
              'all-CEM twice': 'cem-1-equal-twice', 'Llama twice': 'llama-alibi-twice'}
    bytes_a_weight = [(40, 'scarce-25k-40'), (240, 'scarce-25k-240'), (1440, 'scarce-25k')]
    return {'rows': draw_rows(verdicts),
            'gap': draw_lines(tables, 'llama', gap, "weights of Llama's layers", weights),
            'steps': draw_lines(tables, 'llama', steps, 'T', [(T, 'XS') for T in (1, 2, 3)]),
            'scarce': draw_lines(tables, 'llama-alibi', scarce, 'bytes a weight', bytes_a_weight)}


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
        return say_counts(cfg.count)
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
    write_atomic(f'{OUT}/verdicts.md', page.encode())
    rows = [[*run, *(found[run][name] for name in NUMBERS)] for run in sorted(found)]
    lines = [','.join(map(str, row)) for row in [[*Run._fields, *NUMBERS], *rows]]
    write_atomic(f'{OUT}/runs.csv', '\n'.join([*lines, '']).encode())
    for name, figure in draw(tables, verdicts).items():
        figure.savefig(f'{OUT}/{name}.png')
    say(f'{OUT}: runs.csv, verdicts.md, and the pictures')


if __name__ == '__main__':
    main(sys.argv[1:])

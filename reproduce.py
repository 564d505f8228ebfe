"""
Does the paper hold? Its claims, the training runs that decide them, and the verdicts.

    python reproduce.py                              verdicts and pictures, of results/tokens/runs.csv
    python reproduce.py --todo --text=FILE | sh      train what is missing on a text, one by one
    python reproduce.py --anew                       verdicts of your own runs alone
    python reproduce.py --scale=paper                the commands at the paper's sizes

Learning rates are chosen by trials, runs of their own: --todo prints more once these are finished,
so repeat it until it prints nothing. `| xargs -P 2 -I{} sh -c "{}"` trains two at a time. Runs live
in out/reproduce/; tables and pictures are written to out/results/tokens/.

The rule (results/tokens/RULE.md). y is the loss of the held-out text, validation and test together,
in nats a Llama token. At each size the runs are a table of models by seeds, to which a mean for each
model and each seed is fitted; s is the root mean square of the residuals, with f degrees of freedom.
d is the mean of y(A) - y(B) over the n seeds that both have, its interval

    d +- t(1 - 0.025 / m; f) s sqrt(2 / n)      m: the number of rows of this size (Bonferroni)

A row of verdicts.csv holds if its interval lies inside its bounds, does not hold if it lies outside,
and is undecided else. A row with a failed run does not hold. The largest size with two seeds or more
gives the word; the scarce sizes must agree. Bounds are per cent of perplexity, A over B.
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

# The models. A name says which sublayers are CEM's, then T, then words: cem-2-normed

ATTN = ('--attn=cem --attn_steps={T} --attn_step_size={eta:g} --attn_rank=4 --kq_diag=shared '
        '--score_scale=model')
MLP = '--mlp=cem --mlp_steps={T} --mlp_step_size={eta:g} --mlp_rank=16'
CEM = '--preconditioner=diag_lowrank --residual=raw'
KINDS = {
    'llama': '--attn=llama --mlp=llama --positions=rope',
    'attn': f'{ATTN} --mlp=llama --positions=alibi {CEM}',
    'mlp': f'--attn=llama {MLP} --positions=rope {CEM}',
    'cem': f'{ATTN} {MLP} --positions=alibi {CEM}',
}
WORDS = {
    'alibi': '--positions=alibi',
    'rope': '--positions=rope --kq_diag=none --score_scale=head',
    'none': '--preconditioner=none',
    'diag': '--preconditioner=diag',
    'nodiag': '--kq_diag=none',
    'perhead': '--kq_diag=per_head',
    'normed': '--residual=normed',
    'eta1': '--attn_step_size=1 --mlp_step_size=1',
    'attn_twice': '--attn_reuse=2',
    'mlp_twice': '--mlp_reuse=2',
    'twice': '--attn_reuse=2 --mlp_reuse=2',
    'params': '--mlp_match=params',  # an MLP with the weights of Llama's
    'narrow': '',  # layers with the weights of all-CEM, by the width of the MLP
    'equal': '',  # layers with the weights of Llama with ALiBi
    'mlp87': '--d_mlp=87',  # 18.7 k weights in all-CEM,
    'mlp54': '--d_mlp=54',  # in Llama with ALiBi,
    '24x97': '--d_model=24 --d_mlp=97',  # and in a narrower one
    '1.8x': '--tokens=64.4M',  # one pass with the FLOPs of Llama taken twice,
    '2.1x': '--tokens=76.3M',  # and of two steps of CEM
}


# The sizes, in the order of their runs

class Size(NamedTuple):
    """One size of models, and their training. The models are those of its rows in verdicts.csv."""
    options: str
    seeds: tuple[int, ...]
    more: tuple[str, ...] = ()  # models to train first; some are in no row
    tuned: tuple[str, ...] = ()  # models whose learning rates are tried at this size,
    rate: float = math.nan  # three of them, the middle one this,
    ratio: float = math.nan  # in these steps,
    trial_seeds: tuple[int, ...] = ()  # with seeds that are not reported


COMMON = (
    '--attn_reuse=1 --mlp_reuse=1 --warmup=0.05 --final_lr=0.1 --weight_decay=0.1 --grad_clip=1 '
    '--beta1=0.9 --beta2=0.95 --adam_eps=1e-9 --dtype=float32 --compile=True --eval_tokens=1B '
    '--test_tokens=1B --eval_interval=1M --log_interval=1 --checkpoint_interval=500 '
    '--keep_checkpoints=1 --tensorboard=False --sample_tokens=0')
TOKENS = (f'--context_length=256 --batch_size=16 --micro_batch_size=16 --data=data/english '
          f'--vocab_size=2048 --optimizer=adamw {COMMON}')
BYTES = (f'--context_length=128 --batch_size=64 --micro_batch_size=64 --data=data/english-bytes '
         f'--vocab_size=257 --optimizer=muon {COMMON}')
SCARCE = f'--n_layer=2 --d_model=32 --n_head=2 --d_mlp=86 {BYTES}'
FIVE = ('llama-alibi', 'llama-alibi-twice', 'cem-1-equal-twice', 'cem-1-equal',
        'cem-2-equal or cem-2-equal-eta1')  # the better one in trials
SIZES = {
    'XS': Size(f'--n_layer=3 --d_model=48 --n_head=3 --d_mlp=128 {TOKENS} --tokens=5.6M', (1, 2, 3),
               (), ('llama', 'llama-alibi', 'attn-1', 'attn-2', 'mlp-1', 'mlp-2', 'cem-1', 'cem-2',
                    'cem-2-normed'), 0.014, math.sqrt(2), (101, 102)),
    'S': Size(f'--n_layer=5 --d_model=80 --n_head=5 --d_mlp=216 {TOKENS} --tokens=14.3M', (1, 2),
              (), ('llama', 'cem-2'), 0.007, math.sqrt(2), (101,)),
    'scarce-25k': Size(
        f'{SCARCE} --tokens=35.8M', (1, 2, 3, 4), FIVE,
        ('llama-alibi', 'llama-alibi-twice', 'cem-2-equal', 'cem-2-equal-eta1', 'cem-1-equal-twice',
         'llama-alibi-mlp54', 'llama-alibi-24x97'), 0.016, 2.0, (101,)),
    'scarce-25k-more': Size(f'{SCARCE} --tokens=35.8M', (1,), (
        'cem-4-equal', 'llama-alibi-1.8x', 'llama-alibi-2.1x')),
    'scarce-25k-240': Size(f'{SCARCE} --tokens=5.96M', (1, 2, 3, 4), FIVE),
    'scarce-25k-40': Size(f'{SCARCE} --tokens=994K', (1, 2, 3, 4), FIVE),
    'M': Size(f'--n_layer=7 --d_model=112 --n_head=7 --d_mlp=296 {TOKENS} --tokens=30M', (1,),
              ('llama-alibi', 'cem-2')),
    'scarce-83k': Size(f'--n_layer=3 --d_model=48 --n_head=3 --d_mlp=129 {BYTES} --tokens=26.8M',
                       (1, 2, 3)),
}
# Models with the learning rate of another one; the rest have that of the one they are named after
RATE_OF = {'attn-3': 'attn-2', 'mlp-3': 'mlp-2', 'cem-1-twice': 'cem-2', 'cem-1-equal': 'cem-2-equal',
           'cem-4-equal': 'cem-2-equal', 'cem-2-mlp87': 'cem-2-equal'}


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
    """Return the options of a model of a shape, each of them once."""
    kind, *words = model.split('-')
    T = int(words.pop(0)) if words and words[0].isdigit() else 1
    options = ' '.join([shape, KINDS[kind], *map(WORDS.__getitem__, words)]).format(T=T, eta=1 / T)
    if {'narrow', 'equal'} & set(words):
        like = 'cem-1' if 'narrow' in words else 'llama-alibi'
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
        return model_options(SIZES[self.size].options, self.model)

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

NUMBERS = ('parameters', 'weights', 'tokens', 'flops_per_token', 'seconds', 'val_bpb', 'test_bpb', 'y',
           'skipped', 'spikes')
Results = dict[Run, dict[str, float]]


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def write_csv(path: str, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    with open(path, 'w', encoding='utf-8', newline='') as file:
        csv.writer(file, lineterminator='\n').writerows([header, *rows])


ROWS = read_csv(f'{PUBLISHED}/verdicts.csv')


def read_results(anew: bool) -> Results:
    """Read the published runs, unless `anew`, and those that are finished in out/reproduce."""
    found: Results = {}
    if os.path.exists(f'{PUBLISHED}/runs.csv') and not anew:
        for row in read_csv(f'{PUBLISHED}/runs.csv'):
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
    numbers = dict.fromkeys(NUMBERS, math.nan) | {
        'weights': count_weights(run.options), 'parameters': model.num_params(),
        'flops_per_token': flops_per_token(model), 'spikes': spikes}
    if result := read_json(f'{run.folder}/result.json'):
        val, test = result['val_bits_per_byte'], result['test_bits_per_byte']
        own = {name: result[name] for name in ('tokens', 'seconds', 'skipped')}
        return numbers | own | dict(val_bpb=val, test_bpb=test, y=loss_per_llama_token(val, test))
    # train.py gives a run up after MAX_SKIPPED skipped steps in a row; each leaves two lines
    skipped = sum(line.get('event') == 'skipped' for line in lines[-2 * MAX_SKIPPED - 2:])
    failed = dict.fromkeys(('val_bpb', 'test_bpb', 'y'), math.inf)
    return numbers | failed if skipped > MAX_SKIPPED else None


def loss_per_llama_token(val_bpb: float, test_bpb: float) -> float:
    """Convert bits a byte to nats a Llama token, of both splits; NaN while there is no text.csv."""
    paths = [path for path in (f'{OUT}/text.csv', f'{PUBLISHED}/text.csv') if os.path.exists(path)]
    if not paths:
        return math.nan
    val, test = read_csv(paths[0])
    bits = val_bpb * int(val['bytes']) + test_bpb * int(test['bytes'])
    return math.log(2) * bits / (int(val['llama_tokens']) + int(test['llama_tokens']))


def count_text(folder: str, llama_tokenizer: str) -> None:
    """Write text.csv: documents, bytes and Llama tokens of a data folder's held-out splits. Each
    document is encoded alone, without BOS, its line ends kept."""
    meta, tokenizer = read_meta(folder), load_tokenizer(folder)
    llama, rows = SentencePieceTokenizer(llama_tokenizer), []
    for split in ('val', 'test'):
        (shard,) = meta['splits'][split]['shards']
        ids = open_shard(folder, meta, shard)
        documents = np.split(ids, np.flatnonzero(ids == meta['bos']))[1:]
        texts = [tokenizer.decode(document[1:].tolist()) for document in documents]
        rows.append((split, len(texts), sum(len(text.encode()) for text in texts),
                     sum(len(llama.encode(text)) for text in texts)))
    write_csv(f'{OUT}/text.csv', ('split', 'documents', 'bytes', 'llama_tokens'), rows)


# Learning rates

class Trials(NamedTuple):
    """The learning rates to try; and, once all were, their lowest loss and the best rate."""
    rates: list[float]
    lowest: float = math.nan  # bits a byte of the validation text
    best: float | None = None


def search(found: Results, size: str, model: str, seed: int | None = None) -> Trials:
    """Try three rates, and further ones while the best is at an end. The best rate is the vertex of
    the parabola, in log rate, through the lowest loss and its neighbours: of the mean over seeds, or
    of one seed."""
    _, _, _, _, rate, ratio, seeds = SIZES[size]
    low, high = -1, 1
    while True:
        rates = [float(f'{rate * ratio ** n:.3g}') for n in range(low, high + 1)]
        trials = [[Run(size, model, rate, seed) for seed in seeds] for rate in rates]
        if not all(run in found for some in trials for run in some):
            return Trials(rates)
        losses = [statistics.fmean(found[run]['val_bpb'] for run in some) for some in trials]
        best = int(np.argmin(losses))
        if 0 < best < len(rates) - 1 or len(rates) == 7:
            break
        low, high = (low - 1, high) if best == 0 else (low, high + 1)
    if seed:
        losses = [found[Run(size, model, rate, seed)]['val_bpb'] for rate in rates]
        best = int(np.argmin(losses))
    left, middle, right = [math.inf, *losses, math.inf][best:best + 3]
    curvature = left + right - 2 * middle
    shift = (left - right) / curvature / 2 if 0 < curvature < math.inf else 0
    return Trials(rates, middle, float(f'{rates[best] * ratio ** shift:.3g}'))


def best_rate(found: Results, size: str, model: str) -> float | None:
    """Return a model's learning rate; None while trials that decide on it are missing."""
    base = 'scarce-25k' if size.startswith('scarce') else 'XS'
    family = RATE_OF.get(model) or max(filter(model.startswith, SIZES[base].tuned), key=len)
    rate = search(found, base, family).best
    if size not in ('S', 'M') or rate is None:
        return rate
    # The change from XS to S of the two models that are tuned at both; to M by a power law
    changes = {}
    for tuned in SIZES['S'].tuned:
        small, large = (search(found, name, tuned).best for name in ('XS', 'S'))
        if small is None or large is None:
            return None
        changes[tuned] = math.log(large / small)
    change = changes.get(family, statistics.fmean(changes.values()))
    XS, S, here = (math.log(count_weights(SIZES[name].options)) for name in ('XS', 'S', size))
    return float(f'{rate * math.exp(change * (here - XS) / (S - XS)):.3g}')


def choose(found: Results, model: str) -> str | None:
    """Return the better of 'A or B' in the trials, None while some are missing."""
    names = model.split(' or ')
    trials = {name: search(found, 'scarce-25k', name.removesuffix('-twice')) for name in names}
    if len(names) > 1 and any(trial.best is None for trial in trials.values()):
        return None
    return min(names, key=lambda name: trials[name].lowest)


# The plan

def planned(found: Results, size: str) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the trials of a size; the runs that are reported, seed by seed; and those to report
    whose learning rate is not known yet."""
    here, runs, waiting = SIZES[size], [], []
    trials = [Run(size, model, rate, seed) for model in here.tuned
              for rate in search(found, size, model).rates for seed in here.trial_seeds]
    in_rows = [row[side] for row in ROWS if size in row['sizes'].split() for side in 'AB']
    for name in dict.fromkeys([*here.more, *filter(None, in_rows)]):
        model = choose(found, name)
        rate = model and best_rate(found, size, model)
        run = Run(size, model or name.split(' or ')[0], rate or math.nan, 0)
        (runs if rate else waiting).extend(run._replace(seed=seed) for seed in here.seeds)
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
        tokens = 20 * meta_model(f'--size={size} {KINDS["llama"]}').num_params()
        for model in dict.fromkeys(run.model for run in planned({}, 'XS')[2]):
            larger = '_cem' * (size == '256m' and model.startswith('cem'))
            options = model_options(f'--size={size}{larger} --tokens={tokens}', model)
            mfu = MFU['cem' if '=cem' in options else 'llama']
            hours = tokens * flops_per_token(meta_model(options)) / mfu / A100_FLOPS / 3600
            say(f'torchrun --nproc_per_node=8 train.py {options} --learning_rate=0.002 --seed=1 '
                f'--out_dir=out/reproduce/{size}/{model}  # {hours:.0f} A100-hours')


# Verdicts

Cells = dict[tuple[str, int], float]  # y of (model, seed), the runs of one size


class Effect(NamedTuple):
    """A's y less B's at a size, the mean over seeds; half of its interval, NaN with one seed."""
    size: str
    d: float
    half: float = math.nan

    def percent(self) -> list[float]:
        """The effect, and the ends of its interval, on perplexity."""
        return [100 * math.expm1(x) for x in (self.d, self.d - self.half, self.d + self.half)]

    def __str__(self) -> str:
        d, low, high = self.percent()
        interval = '' if math.isnan(low) else f' ({low:+.1f} to {high:+.1f})'
        return f'{self.size} ' + (f'{d:+.1f}%{interval}' if math.isfinite(d) else 'failed')


def split_failed(y: Cells) -> tuple[Cells, set[str]]:
    """Return the runs that did not fail, and the models of those that did: whose y is not finite, or
    0.5 nats above the median of the model's seeds."""
    medians = {name: statistics.median(of for (model, _), of in y.items() if model == name)
               for name, _ in y}
    sound = {cell: of for cell, of in y.items() if of < min(math.inf, medians[cell[0]] + 0.5)}
    return sound, {model for model, seed in y if (model, seed) not in sound}


def residual_error(y: Cells) -> tuple[float, int]:
    """Fit a mean for each model and each seed. Return the root mean square of the residuals, and its
    degrees of freedom."""
    models, seeds = (sorted(set(names)) for names in zip(*y, strict=True))
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


def compare_rates(found: Results, A: str, B: str, size: str) -> Effect | None:
    """Compare the logs of two models' best rates, one a seed, by the pooled t-test."""
    seeds = SIZES[size].trial_seeds
    best = [[search(found, size, model, seed).best for seed in seeds] for model in (A, B)]
    if not seeds or None in best[0] + best[1]:
        return None
    (a, b), n = np.log(best), len(seeds)
    if n == 1:
        return Effect(size, float(a[0] - b[0]))
    error = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / n)
    return Effect(size, float(a.mean() - b.mean()), float(student.ppf(0.975, 2 * n - 2) * error))


def decide(effect: Effect, row: dict[str, str]) -> str:
    """Say whether the interval lies inside the row's bounds; nothing where there is none."""
    if math.isinf(effect.d):
        return 'does not hold'
    _, low, high = effect.percent()
    above, below = float(row['above_%'] or '-inf'), float(row['below_%'] or 'inf')
    if math.isnan(low):
        return ''
    if above < low and high < below:
        return 'holds'
    return 'does not hold' if high < above or low > below else 'undecided'


class Verdict(NamedTuple):
    row: dict[str, str]
    effects: list[Effect]
    word: str
    shown: str


def judge(found: Results, tables: dict[str, Cells]) -> list[Verdict]:
    """Decide every row of verdicts.csv."""
    compared = [row for row in ROWS if row['A'] and row['kind'] != 'higher rate']
    verdicts = []
    for row in ROWS:
        effects, sizes = [], row['sizes'].split()
        for size in sizes if row['A'] else []:
            A, B = choose(found, row['A']), choose(found, row['B'])
            m = sum(size in other['sizes'].split() for other in compared)
            effects.append(compare(tables[size], A, B, size, m) if row in compared else
                           compare_rates(found, A, B, size))
        effects = [effect for effect in effects if effect]
        words = [word for effect in effects if (word := decide(effect, row))] or ['not run']
        if sizes and sizes[0].startswith('scarce') and effects and words != words[:1] * len(sizes):
            words = ['undecided']
        verdict = Verdict(row, effects, words[-1], '; '.join(map(str, effects)))
        verdicts.append(verdict if row['A'] else stability(found, row))
    return verdicts


def stability(found: Results, row: dict[str, str]) -> Verdict:
    """Count the failed runs of all-CEM, and its loss spikes beside Llama's."""
    shown, failed = [], 0
    for size in row['sizes'].split():
        runs = [run for run in planned(found, size)[1] if run in found]
        cem, llama = ([run for run in runs if run.model.startswith(kind)] for kind in ('cem', 'llama'))
        if cem and llama:
            failed += len(split_failed({(run.model, run.seed): found[run]['y'] for run in cem})[1])
            a, b = (statistics.fmean(found[run]['spikes'] for run in of) for of in (cem, llama))
            shown.append(f'{size} {len(cem)} runs, {a:.1f} spikes each, Llama {b:.1f}')
    word = ('does not hold' if failed else 'holds') if shown else 'see results/gp'
    return Verdict(row, [], word, '; '.join(shown))


def in_weights(tables: dict[str, Cells], size: str, model: str) -> str:
    """Return the weights of the Llama with ALiBi of the same loss, where it lies between sizes."""
    def mean(size: str, model: str) -> float:
        return statistics.fmean(of for (name, _), of in tables[size].items() if name == model)

    line = sorted((mean(name, 'llama-alibi'), math.log(Run(name, 'llama-alibi', 0, 0).weights))
                  for name in ('XS', 'S', 'M') if ('llama-alibi', 1) in tables[name])
    y = mean(size, model) if size in ('XS', 'S', 'M') else math.nan
    if len(line) < 2 or not line[0][0] <= y <= line[-1][0]:
        return ''
    same = math.exp(np.interp(y, *zip(*line, strict=True)))
    return f'{Run(size, model, 0, 0).weights / 1e3:.0f} k as {same / 1e3:.0f} k'


def verdict_table(tables: dict[str, Cells], verdicts: list[Verdict]) -> str:
    rows = [[v.row['id'], v.row['claim'], f'{v.row["A"]} / {v.row["B"]}', v.row['kind'], v.shown,
             in_weights(tables, v.effects[-1].size, v.row['A']) if v.effects else '', v.word]
            for v in verdicts]
    header = ['', 'claim', 'A / B', 'A is', 'A over B', 'A as Llama with ALiBi', 'verdict']
    return ('Perplexity a Llama token of the held-out text, A over B less one, and its interval over '
            f'seeds.\n\n{table(header, rows)}\n')


# Pictures

def percents(y: Cells, A: str, B: str) -> list[float]:
    return [100 * math.expm1(d) for d in differences(y, A, B)]


def draw_rows(verdicts: list[Verdict]) -> plt.Figure:
    """Every row with an effect: its interval at the largest size, coloured by the verdict."""
    colors = {'holds': 'C2', 'does not hold': 'C3', 'undecided': 'gray'}
    shown = [v for v in verdicts if v.effects and math.isfinite(v.effects[-1].d)][::-1]
    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(shown)), layout='constrained')
    for place, v in enumerate(shown):
        d, low, high = v.effects[-1].percent()
        bars = None if math.isnan(low) else [[d - low], [high - d]]
        axes.errorbar([d], [place], xerr=bars, fmt='o', ms=4, color=colors.get(v.word, 'black'))
        for bound in filter(None, (v.row['above_%'], v.row['below_%'])):
            axes.plot([float(bound)] * 2, [place - 0.4, place + 0.4], color='black', lw=1)
    axes.set_yticks(range(len(shown)), [f'{v.row["id"]} {v.row["claim"]}' for v in shown], fontsize=7)
    axes.set_xscale('symlog', linthresh=10)
    axes.set(xlabel='perplexity a Llama token, A over B, % (line: bound; green holds, red does not)')
    return figure


def draw_lines(tables: dict[str, Cells], sizes: dict[str, float], models: dict[str, str], base: str,
               xlabel: str) -> plt.Figure:
    """A line a model over sizes: perplexity over the base's, means and standard deviations."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
    for label, names in models.items():
        found = [(x, d) for size, x in sizes.items() for name in names.split(' or ')
                 if (d := percents(tables[size], name, base))]
        if found:
            bars = [statistics.stdev(d) if len(d) > 1 else 0 for _, d in found]
            axes.errorbar([x for x, _ in found], [statistics.fmean(d) for _, d in found], bars,
                          marker='o', ms=4, capsize=2, label=label)
            axes.legend(fontsize=8)
    axes.axhline(0, color='hotpink', lw=1)
    axes.set(xscale='log', xlabel=xlabel, ylabel=f'perplexity a Llama token over {base}, %')
    return figure


def draw_bars(y: Cells) -> plt.Figure:
    """Steps, P and d_k at XS over Llama, as in the paper's Figures 2 and 3."""
    panels = {'CEM attention': [f'attn-{T}{P}' for T in (1, 2, 3) for P in ('-none', '-diag', '')],
              'CEM MLP': [f'mlp-{T}{P}' for T in (1, 2, 3) for P in ('-none', '-diag', '', '-params')],
              'd_k': ['attn-1-diag-nodiag', 'attn-1-diag', 'attn-1-diag-perhead']}
    figure, grid = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout='constrained')
    for axes, (title, models) in zip(grid, panels.items(), strict=True):
        found = {model: d for model in models if (d := percents(y, model, 'llama'))}
        bars = [statistics.stdev(d) if len(d) > 1 else 0 for d in found.values()]
        axes.bar(list(found), [statistics.fmean(d) for d in found.values()], yerr=bars, capsize=3)
        axes.axhline(0, color='hotpink', ls='--')
        axes.set_title(title)
        axes.tick_params('x', rotation=60)
    grid[0].set_ylabel('perplexity a Llama token over Llama, %')
    return figure


@dataclass
class ReproduceConfig:
    """What to print."""
    scale: Literal['english', 'paper'] = 'english'  # the runs of results/tokens; the paper's sizes
    todo: bool = False  # print the commands of the runs that are missing, and no more
    text: str | None = None  # a text that --todo has prepared; default: data/english is there
    anew: bool = False  # leave the published runs out
    count: str | None = None  # count a data folder's bytes and tokens by $LLAMA_TOKENIZER, a model file


@command_line
def main(argv: list[str]) -> None:
    cfg = build(ReproduceConfig, read_options(argv, ReproduceConfig))
    if cfg.scale == 'paper':
        return say_paper()
    found = read_results(cfg.anew)
    if cfg.todo:
        return say_todo(found, cfg.text)
    os.makedirs(OUT, exist_ok=True)
    if cfg.count:
        return count_text(cfg.count, os.environ.get('LLAMA_TOKENIZER', 'tokenizer.model'))
    tables = {size: {(run.model, run.seed): found[run]['y'] for run in planned(found, size)[1]
                     if run in found and not math.isnan(found[run]['y'])} for size in SIZES}
    verdicts = judge(found, tables)
    page = verdict_table(tables, verdicts)
    say(page)
    write_csv(f'{OUT}/runs.csv', (*Run._fields, *NUMBERS),
              [(*run, *(found[run][name] for name in NUMBERS)) for run in sorted(found)])
    with open(f'{OUT}/verdicts.md', 'w', encoding='utf-8') as file:
        file.write(page)
    draw_rows(verdicts).savefig(f'{OUT}/rows.png')
    draw_lines(tables, {size: Run(size, 'llama', 0, 0).weights for size in ('XS', 'S', 'M')}, {
        'Llama with ALiBi': 'llama-alibi', 'the same with all-CEM\'s weights': 'llama-alibi-narrow',
        'CEM attention, T = 1, no P': 'attn-1-none', 'all-CEM, T = 1': 'cem-1',
        'all-CEM, T = 2': 'cem-2'}, 'llama', "weights of Llama's layers").savefig(f'{OUT}/gap.png')
    draw_bars(tables['XS']).savefig(f'{OUT}/steps.png')
    draw_lines(tables, {'scarce-25k-40': 40, 'scarce-25k-240': 240, 'scarce-25k': 1440}, {
        'all-CEM, one step': 'cem-1-equal', 'two steps': 'cem-2-equal or cem-2-equal-eta1',
        'one step, taken twice with a fresh context': 'cem-1-equal-twice',
        'Llama with ALiBi, taken twice': 'llama-alibi-twice'}, 'llama-alibi',
        'bytes of text a weight').savefig(f'{OUT}/scarce.png')
    say(f'{OUT}: runs.csv, verdicts.md, and the pictures')


if __name__ == '__main__':
    main(sys.argv[1:])

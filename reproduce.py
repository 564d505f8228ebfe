"""
Does the paper hold? Its claims as rows with bounds, the training runs that decide them, the verdicts.

    python reproduce.py                                 the verdicts and pictures of results/tokens
    python reproduce.py --todo --text=english.jsonl.zst | sh     train what is missing, one by one
    python reproduce.py --anew                          the verdicts of your own runs alone
    python reproduce.py --scale=paper                   the commands at the paper's sizes

Learning rates are chosen by runs of their own, so that --todo has more to print once these are
finished: repeat it until it prints nothing. `| xargs -P 2 -I{} sh -c "{}"` trains two at a time.
Runs live in out/reproduce/; tables and pictures are written to out/results/tokens/.

The rule (results/tokens/RULE.md). y is the loss of the held-out text, validation and test together,
in nats a Llama token. At each size the runs are a table of models by seeds, from which a mean for
each model and each seed is fitted; s is the root mean square of the residuals, with f degrees of
freedom. d is the mean of y(A) - y(B) over the n seeds that both have, its interval

    d +- t(1 - 0.025 / m; f) s sqrt(2 / n)      m: the number of rows of this size (Bonferroni)

A row of verdicts.csv holds if its interval lies inside its bounds, does not hold if it lies outside,
and is undecided else. A row with a failed run does not hold. The largest size with two seeds or more
gives the word; the scarce sizes must agree.
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
from nanocem.tokenizers import load_tokenizer
from prepare_slimpajama import LLAMA, hub
from train import MAX_SKIPPED, TrainConfig

PUBLISHED = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results/tokens')
OUT = 'out/results/tokens'
CPU_FLOPS = 30e9  # FLOPs a second of one core at these sizes: an estimate
MFU = {'llama': 0.37, 'cem': 0.29}  # on an A100: estimates, 'cem' from all-CEM with two steps
A100_FLOPS = 312e12


# The models

def layers(attn: str, mlp: str, T: int = 1, P: str = 'diag_lowrank', kq_diag: str = 'shared',
           positions: str = 'alibi', eta: float | None = None, residual: str = 'raw',
           reuse: tuple[int, int] = (1, 1)) -> str:
    """Return the model's options for train.py, written out so that no default decides."""
    options = f'--attn={attn} --mlp={mlp} --attn_reuse={reuse[0]} --mlp_reuse={reuse[1]}'
    options += f' --positions={positions}'
    step = f'{eta or 1 / T:g}'
    if attn == 'cem':
        scale = 'head' if positions == 'rope' else 'model'
        options += f' --attn_steps={T} --attn_step_size={step} --attn_rank=4'
        options += f' --kq_diag={kq_diag} --score_scale={scale}'
    if mlp == 'cem':
        options += f' --mlp_steps={T} --mlp_step_size={step} --mlp_rank=16'
    if 'cem' in (attn, mlp):
        options += f' --preconditioner={P} --residual={residual}'
    return options


def cem(T: int = 1, **changes: Any) -> str:
    return layers('cem', 'cem', T, **changes)


def attn(T: int, **changes: Any) -> str:
    return layers('cem', 'llama', T, **changes)


def mlp(T: int, **changes: Any) -> str:
    return layers('llama', 'cem', T, positions='rope', **changes)


LLAMA_ALIBI = layers('llama', 'llama')
ALIBI_TWICE = layers('llama', 'llama', reuse=(2, 2))
ROPE = dict(positions='rope')
MODELS = {
    'llama': layers('llama', 'llama', **ROPE),
    'llama-attn-twice': layers('llama', 'llama', reuse=(2, 1), **ROPE),
    'llama-mlp-twice': layers('llama', 'llama', reuse=(1, 2), **ROPE),
    'llama-alibi': LLAMA_ALIBI,
    'llama-alibi-twice': ALIBI_TWICE,
    'llama-alibi-narrow': LLAMA_ALIBI,  # its width: see MATCH
    **{f'attn-{T}': attn(T) for T in (1, 2, 3)},
    **{f'attn-{T}-none': attn(T, P='none') for T in (1, 2)},
    **{f'attn-{T}-diag': attn(T, P='diag') for T in (1, 2)},
    'attn-1-diag-nodiag': attn(1, P='diag', kq_diag='none'),
    'attn-1-diag-perhead': attn(1, P='diag', kq_diag='per_head'),
    **{f'mlp-{T}': mlp(T) for T in (1, 2, 3)},
    'mlp-1-none': mlp(1, P='none'),
    'mlp-1-diag': mlp(1, P='diag'),
    'mlp-1-equal': mlp(1) + ' --mlp_match=params',
    'mlp-2-equal': mlp(2) + ' --mlp_match=params',
    'mlp-1-none-equal': mlp(1, P='none') + ' --mlp_match=params',
    'cem-1': cem(1),
    'cem-2': cem(2),
    'cem-1-twice': cem(1, reuse=(2, 2)),
    'cem-2-normed': cem(2, residual='normed'),
    'cem-1-rope': cem(1, kq_diag='none', **ROPE),
}
TOKEN_MODELS = list(MODELS)
MODELS |= {  # where weights are scarce
    'cem-1-equal': cem(1),
    'cem-2-equal': cem(2),
    'cem-2-equal-eta1': cem(2, eta=1.0),
    'cem-4-equal': cem(4),
    'cem-1-equal-twice': cem(1, reuse=(2, 2)),
    'cem-2-fewer': cem(2) + ' --d_mlp=87',
    'llama-alibi-fewer': LLAMA_ALIBI + ' --d_mlp=54',
    'llama-alibi-fewer-twice': ALIBI_TWICE + ' --d_mlp=54',
    'llama-alibi-small': LLAMA_ALIBI + ' --d_model=24 --d_mlp=97',
    'llama-alibi-small-twice': ALIBI_TWICE + ' --d_model=24 --d_mlp=97',
    # one pass with the FLOPs of Llama taken twice, and of two steps
    'llama-alibi-1.8x': LLAMA_ALIBI + ' --tokens=64.4M',
    'llama-alibi-2.1x': LLAMA_ALIBI + ' --tokens=76.3M',
}
# MLPs as wide as gives the layers the weights of another model
MATCH = {'llama-alibi-narrow': 'cem-1', 'cem-1-equal': 'llama-alibi', 'cem-2-equal': 'llama-alibi',
         'cem-2-equal-eta1': 'llama-alibi', 'cem-4-equal': 'llama-alibi',
         'cem-1-equal-twice': 'llama-alibi'}


# The sizes

class Size(NamedTuple):
    """Models of one size, and their training."""
    options: str
    models: dict[str, tuple[int, ...]]  # with their seeds; 'A or B': the better at the middle rate
    tuned: tuple[str, ...] = ()  # models for which learning rates are tried at this size
    tried: tuple[str, ...] = ()  # models that are tried at the middle rate only
    middle: float = math.nan  # of the learning rates that are tried
    ratio: float = math.nan  # of one to the next
    seeds: tuple[int, ...] = ()  # of the runs that try learning rates


COMMON = (
    '--warmup=0.05 --final_lr=0.1 --weight_decay=0.1 --grad_clip=1 --beta1=0.9 --beta2=0.95 '
    '--adam_eps=1e-9 --dtype=float32 --compile=True --eval_tokens=1B --test_tokens=1B '
    '--eval_interval=1M --log_interval=1 --checkpoint_interval=500 --keep_checkpoints=1 '
    '--tensorboard=False --sample_tokens=0')
TOKENS = ('--context_length=256 --batch_size=16 --micro_batch_size=16 --data=data/english '
          '--vocab_size=2048 --optimizer=adamw')
BYTES = ('--context_length=128 --batch_size=64 --micro_batch_size=64 --data=data/english-bytes '
         '--vocab_size=257 --optimizer=muon')
TINY = f'--n_layer=2 --d_model=32 --n_head=2 --d_mlp=86 {BYTES}'
STEPS = 'cem-2-equal or cem-2-equal-eta1'
SCARCE = ('llama-alibi', 'llama-alibi-twice', STEPS, 'cem-1-equal-twice')
FEWER = ('cem-2-fewer', 'llama-alibi-fewer or llama-alibi-small',
         'llama-alibi-fewer-twice or llama-alibi-small-twice')
SIZES = {
    'XS': Size(f'--n_layer=3 --d_model=48 --n_head=3 --d_mlp=128 {TOKENS} --tokens=5.6M',
               dict.fromkeys(TOKEN_MODELS, (1, 2, 3)),
               ('llama', 'llama-alibi', 'attn-1', 'attn-2', 'mlp-1', 'mlp-2', 'cem-1', 'cem-2',
                'cem-2-normed'), (), 0.014, math.sqrt(2), (101, 102)),
    'S': Size(f'--n_layer=5 --d_model=80 --n_head=5 --d_mlp=216 {TOKENS} --tokens=14.3M',
              dict.fromkeys(('llama-alibi', 'cem-2', 'llama', 'attn-1-none', 'llama-alibi-narrow',
                             'cem-1', 'attn-1', 'attn-2', 'attn-1-diag', 'attn-1-diag-nodiag'),
                            (1, 2)) | {'llama': (1, 2, 3)},
              ('llama', 'cem-2'), (), 0.007, math.sqrt(2), (101,)),
    'scarce-25k': Size(f'{TINY} --tokens=35.8M',
                       dict.fromkeys((*SCARCE, *FEWER, 'cem-1-equal'), (1, 2, 3, 4)) | dict.fromkeys(
                           ('cem-4-equal', 'llama-alibi-1.8x', 'llama-alibi-2.1x'), (1,)),
                       ('llama-alibi', 'llama-alibi-twice', 'cem-2-equal', 'cem-1-equal-twice'),
                       ('cem-2-equal-eta1', 'llama-alibi-fewer', 'llama-alibi-small'),
                       0.016, 2.0, (101,)),
    'scarce-25k-240': Size(f'{TINY} --tokens=5.96M',
                           dict.fromkeys((*SCARCE, 'cem-1-equal'), (1, 2, 3, 4))),
    'scarce-25k-40': Size(f'{TINY} --tokens=994K',
                          dict.fromkeys((*SCARCE, 'cem-1-equal'), (1, 2, 3, 4))),
    'M': Size(f'--n_layer=7 --d_model=112 --n_head=7 --d_mlp=296 {TOKENS} --tokens=30M',
              dict.fromkeys(('llama-alibi', 'cem-2', 'llama', 'attn-1-none'), (1,))),
    'scarce-83k': Size(f'--n_layer=3 --d_model=48 --n_head=3 --d_mlp=129 {BYTES} --tokens=26.8M',
                       dict.fromkeys(SCARCE, (1, 2, 3))),
}
PAPER_SIZES = ('86m', '108m', '134m', '162m', '256m')

# Models that take the learning rate of another; the rest that of the tuned one they are named after
RATE_OF = {
    'attn-3': 'attn-2', 'mlp-3': 'mlp-2', 'cem-1-twice': 'cem-2', 'cem-1-equal': 'cem-2-equal',
    'cem-4-equal': 'cem-2-equal', 'cem-2-fewer': 'cem-2-equal',
    'llama-alibi-fewer-twice': 'llama-alibi-twice', 'llama-alibi-small-twice': 'llama-alibi-twice'}


@cache
def meta_model(options: str) -> Transformer:
    """Return the model that train.py makes of these options, without memory for its weights."""
    cfg = build(ModelConfig, read_options(options.split(), TrainConfig, ModelConfig))
    with torch.device('meta'):
        return Transformer(cfg)


def count_weights(options: str) -> int:
    """Count the parameters of the layers, without embedding and head."""
    return sum(p.numel() for p in meta_model(options).blocks.parameters())


def full_options(shape: str, model: str) -> str:
    """Return a model's options at a size; MATCH gives the width of some MLPs."""
    options = f'{shape} {MODELS[model]}'
    if model not in MATCH:
        return options
    target = count_weights(f'{shape} {MODELS[MATCH[model]]}')
    one = count_weights(f'{options} --d_mlp=1')
    slope = count_weights(f'{options} --d_mlp=2') - one
    return f'{options} --d_mlp={1 + round((target - one) / slope)}'


class Run(NamedTuple):
    """One training run. Rates have three digits, as in the folder's name."""
    size: str
    model: str
    rate: float
    seed: int

    @property
    def options(self) -> str:
        return full_options(SIZES[self.size].options, self.model)

    @property
    def folder(self) -> str:
        return f'out/reproduce/{self.size}/{self.model}_rate={self.rate:g}_seed={self.seed}'

    @property
    def command(self) -> str:
        """A line of shell that trains the run or goes on with it, on one thread."""
        resume = ' --init_from=resume' * os.path.exists(f'{self.folder}/config.json')
        return (f'OMP_NUM_THREADS=1 python train.py {self.options} {COMMON} '
                f'--learning_rate={self.rate:g} --seed={self.seed} --out_dir={self.folder}{resume}')

    @property
    def hours(self) -> float:
        """An estimate of the core-hours."""
        given = read_options(self.options.split(), TrainConfig, ModelConfig)
        flops = given['tokens'] * flops_per_token(meta_model(self.options))
        return flops / CPU_FLOPS / 3600


# Results: columns of runs.csv after those of Run. A failed run has infinite losses.

NUMBERS = ('parameters', 'weights', 'tokens', 'steps', 'flops_per_token', 'seconds', 'val_bpb',
           'test_bpb', 'y', 'skipped', 'spikes')
Results = dict[Run, dict[str, float]]


def read_results(anew: bool) -> Results:
    """Read the published runs, unless `anew`, and over them those that are finished in out/."""
    found: Results = {}
    if os.path.exists(f'{PUBLISHED}/runs.csv') and not anew:
        for row in read_csv(f'{PUBLISHED}/runs.csv'):
            run = Run(row['size'], row['model'], float(row['rate']), int(row['seed']))
            found[run] = {name: float(row[name] or 'nan') for name in NUMBERS}
    for folder in sorted(glob.glob('out/reproduce/*/*')):
        size, name = folder.split('/')[-2:]
        parts = re.fullmatch(r'(.+)_rate=(.+)_seed=(\d+)', name)
        if parts and size in SIZES and parts[1] in MODELS:
            run = Run(size, parts[1], float(parts[2]), int(parts[3]))
            if result := read_run(run):
                found.setdefault(run, result)
    return found


def read_run(run: Run) -> dict[str, float] | None:
    """Read a run in out/; None where it is not finished."""
    log = f'{run.folder}/log.jsonl'
    lines = read_json_lines(log) if os.path.exists(log) else []
    losses = [line['loss'] or math.inf for line in lines if 'lr' in line]
    result = read_json(f'{run.folder}/result.json')
    numbers = dict.fromkeys(NUMBERS, math.nan) | {
        'weights': count_weights(run.options), 'parameters': meta_model(run.options).num_params(),
        'flops_per_token': flops_per_token(meta_model(run.options)), 'spikes': spikes(losses)}
    if result:
        val, test = result['val_bits_per_byte'], result['test_bits_per_byte']
        return numbers | {
            'tokens': result['tokens'], 'steps': result['steps'], 'seconds': result['seconds'],
            'skipped': result['skipped'], 'val_bpb': val, 'test_bpb': test,
            'y': loss_per_llama_token(val, test)}
    given_up = sum(line.get('event') == 'skipped' for line in lines[-2 * MAX_SKIPPED - 2:])
    if given_up > MAX_SKIPPED:  # in a row; each has a second line, of its step
        return numbers | dict.fromkeys(('val_bpb', 'test_bpb', 'y'), math.inf)
    return None


def spikes(losses: list[float]) -> int:
    """Count the batches whose loss is 0.5 nats above the median of the 50 before them."""
    return sum(losses[n] > statistics.median(losses[n - 50:n]) + 0.5
               for n in range(50, len(losses)))


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def write_csv(path: str, header: list[str], rows: list[list[Any]]) -> None:
    with open(path, 'w', encoding='utf-8', newline='') as file:
        csv.writer(file, lineterminator='\n').writerows([header, *rows])


# The unit

def loss_per_llama_token(val_bpb: float, test_bpb: float) -> float:
    """Convert bits a byte of both splits to nats a Llama token of both; NaN without text.csv."""
    own, published = f'{OUT}/text.csv', f'{PUBLISHED}/text.csv'
    path = own if os.path.exists(own) else published
    if not os.path.exists(path):
        return math.nan
    counts = {row['split']: row for row in read_csv(path)}
    bits = (val_bpb * int(counts['val']['bytes']) + test_bpb * int(counts['test']['bytes']))
    tokens = int(counts['val']['llama_tokens']) + int(counts['test']['llama_tokens'])
    return math.log(2) * bits / tokens


def count_text(folder: str, llama_tokenizer: str | None) -> None:
    """Write text.csv: documents, bytes and Llama tokens of a data folder's held-out splits, each
    document encoded alone. The tokenizer's default is the Hub's."""
    from sentencepiece import SentencePieceProcessor
    if llama_tokenizer is None:
        with hub() as hf:
            llama_tokenizer = hf.HfApi().hf_hub_download(*LLAMA)
    llama = SentencePieceProcessor(model_file=llama_tokenizer)
    meta, tokenizer, rows = read_meta(folder), load_tokenizer(folder), []
    for split in ('val', 'test'):
        (shard,) = meta['splits'][split]['shards']
        ids = open_shard(folder, meta, shard)
        parts = np.split(ids, np.flatnonzero(ids == meta['bos']))
        texts = [tokenizer.decode(part[part != meta['bos']].tolist()) for part in parts if len(part)]
        size = sum(len(text.encode()) for text in texts)
        rows.append([split, len(texts), size, sum(map(len, llama.encode(texts)))])
    write_csv(f'{OUT}/text.csv', ['split', 'documents', 'bytes', 'llama_tokens'], rows)
    say(f'{OUT}/text.csv: {rows}')


# Learning rates

def three_digits(rate: float) -> float:
    return float(f'{rate:.3g}')


def validation(found: Results, size: str, model: str, rate: float, seeds: tuple[int, ...]) -> float:
    """Return bits a byte of the validation text, the mean over seeds; NaN where a run is missing."""
    runs = [Run(size, model, rate, seed) for seed in seeds]
    return statistics.fmean(found[run]['val_bpb'] if run in found else math.nan for run in runs)


def tried_rates(found: Results, size: str, model: str) -> list[float]:
    """Return the learning rates to try: three, and further ones where the best is at an end."""
    _, _, tuned, _, middle, ratio, seeds = SIZES[size]
    low, high = (-1, 1) if model in tuned else (0, 0)
    while True:
        rates = [three_digits(middle * ratio ** n) for n in range(low, high + 1)]
        losses = [validation(found, size, model, rate, seeds) for rate in rates]
        best = min(range(len(rates)), key=losses.__getitem__)
        if len(rates) in (1, 7) or any(map(math.isnan, losses)) or 0 < best < len(rates) - 1:
            return rates
        low, high = (low - 1, high) if best == 0 else (low, high + 1)


def vertex(found: Results, size: str, model: str, seeds: tuple[int, ...]) -> float | None:
    """Return the best rate: the vertex of the parabola, in log rate, through the best of those tried
    and its neighbours; None while runs are missing."""
    rates = tried_rates(found, size, model)
    losses = [validation(found, size, model, rate, seeds) for rate in rates]
    if any(map(math.isnan, losses)):
        return None
    best = min(range(len(rates)), key=losses.__getitem__)
    left, lowest, right = [math.inf, *losses, math.inf][best:best + 3]
    if math.isinf(left + right):
        return rates[best]
    shift = (left - right) / (left + right - 2 * lowest) / 2 if left + right > 2 * lowest else 0
    return three_digits(rates[best] * SIZES[size].ratio ** shift)


def best_rate(found: Results, size: str, model: str) -> float | None:
    """Return a model's learning rate; None while runs that decide on it are missing."""
    base = 'scarce-25k' if size.startswith('scarce') else 'XS'
    names = [name for name in SIZES[base].tuned if model.startswith(name)]
    family = RATE_OF.get(model) or max(names, key=len)
    rate = vertex(found, base, family, SIZES[base].seeds)
    if base == 'scarce-25k' or size == 'XS' or rate is None:
        return rate
    # From XS to S by the change of the two models that are tuned at both, then by a power law
    changes = {}
    for tuned in SIZES['S'].tuned:
        large = vertex(found, 'S', tuned, SIZES['S'].seeds)
        small = vertex(found, 'XS', tuned, SIZES['XS'].seeds)
        if large is None or small is None:
            return None
        changes[tuned] = math.log(large / small)
    change = changes.get(family, statistics.fmean(changes.values()))
    XS, S, here = (math.log(count_weights(full_options(SIZES[name].options, 'llama')))
                   for name in ('XS', 'S', size))
    return three_digits(rate * math.exp(change * (here - XS) / (S - XS)))


def choose(found: Results, size: str, model: str) -> str | None:
    """Return the better of 'A or B' by validation at the middle rate, seeds that are not reported."""
    names = model.split(' or ')
    if len(names) == 1:
        return model
    base = SIZES['scarce-25k']
    losses = [validation(found, 'scarce-25k', name.removesuffix('-twice'), base.middle, base.seeds)
              for name in names]
    return None if any(map(math.isnan, losses)) else names[losses.index(min(losses))]


# The plan

def planned(found: Results, size: str) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the runs that try learning rates; those that are reported, seed by seed; and those to
    report whose learning rate is not known yet."""
    models, tuned, tried = SIZES[size].models, SIZES[size].tuned, SIZES[size].tried
    trials = [Run(size, model, rate, seed) for model in (*tuned, *tried)
              for rate in tried_rates(found, size, model) for seed in SIZES[size].seeds]
    runs, waiting = [], []
    for name, seeds in models.items():
        model = choose(found, size, name)
        rate = model and best_rate(found, size, model)
        if rate is None:
            waiting += [Run(size, name.split(' or ')[0], math.nan, seed) for seed in seeds]
        else:
            runs += [Run(size, model, rate, seed) for seed in seeds]
    return trials, sorted(runs, key=lambda run: run.seed), waiting


def say_todo(found: Results, text: str | None) -> None:
    """Print the commands of the runs that are missing, each block's core-hours below it."""
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
                say(f'# {name}: {len(missing)} runs, {sum(run.hours for run in missing):.1f} core-hours')
        if waiting:
            hours = sum(run.hours for run in waiting)
            say(f'# {size}: {len(waiting)} runs, {hours:.1f} core-hours, once these are finished')
            break


def say_paper() -> None:
    """Print the commands at the paper's sizes, with their A100-hours."""
    for size in PAPER_SIZES:
        for model in TOKEN_MODELS:
            large_cem = size == '256m' and model.startswith('cem')
            options = full_options(f'--size={size}{"_cem" * large_cem}', model)
            tokens = 20 * meta_model(full_options(f'--size={size}', 'llama')).num_params()
            mfu = MFU['cem' if 'cem' in MODELS[model] else 'llama']
            hours = tokens * flops_per_token(meta_model(options)) / mfu / A100_FLOPS / 3600
            say(f'torchrun --nproc_per_node=8 train.py {options} --learning_rate=0.002 --seed=1 '
                f'--out_dir=out/reproduce/{size}/{model}  # {hours:.0f} A100-hours')


# Verdicts

class Effect(NamedTuple):
    """A's y less B's at a size: the mean over seeds, half of its interval, NaN with one seed."""
    size: str
    d: float
    half: float
    failed: bool = False

    def __str__(self) -> str:
        if self.failed:
            return f'{self.size} failed'
        low, d, high = (100 * math.expm1(x) for x in (self.d - self.half, self.d, self.d + self.half))
        return f'{self.size} {d:+.1f}%' + ('' if math.isnan(low) else f' ({low:+.1f} to {high:+.1f})')


def residual_error(y: dict[tuple[str, int], float]) -> tuple[float, int]:
    """Fit y of (model, seed) by a mean for each model and each seed. Return the root mean square of
    the residuals, and its degrees of freedom."""
    models = sorted({model for model, _ in y})
    seeds = sorted({seed for _, seed in y})
    design = np.zeros((len(y), len(models) + len(seeds)))
    for row, (model, seed) in enumerate(y):
        design[row, models.index(model)] = 1
        design[row, len(models) + seeds.index(seed)] = 1
    values = np.array(list(y.values()))
    fit, _, rank, _ = np.linalg.lstsq(design, values)
    freedom = len(y) - int(rank)
    squares = float(np.sum((values - design @ fit) ** 2))
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def split_failed(y: dict[tuple[str, int], float]) -> tuple[dict[tuple[str, int], float], set[str]]:
    """Return the y of the runs that did not fail, and the models of those that did: not finite, or
    0.5 nats above the median of the model's seeds."""
    medians = {name: statistics.median(value for (model, _), value in y.items() if model == name)
               for name, _ in y}
    sound = {(model, seed): value for (model, seed), value in y.items()
             if math.isfinite(value) and value <= medians[model] + 0.5}
    return sound, {model for model, seed in y if (model, seed) not in sound}


def compare(y: dict[tuple[str, int], float], A: str, B: str, size: str, m: int) -> Effect | None:
    """Compare two models of a size, one of m comparisons; None where no seed has both."""
    sound, failed = split_failed(y)
    if {A, B} & failed:
        return Effect(size, math.nan, math.nan, failed=True)
    differences = [value - sound[B, seed] for (model, seed), value in sound.items()
                   if model == A and (B, seed) in sound]
    n = len(differences)
    if n == 0:
        return None
    s, freedom = residual_error(sound)
    half = math.nan
    if n > 1 and freedom:
        half = student.ppf(1 - 0.025 / m, freedom) * s * math.sqrt(2 / n)
    return Effect(size, statistics.fmean(differences), half)


def decide(effect: Effect, above: float, below: float) -> str:
    """Say whether the interval lies inside the bounds, which are logs; '' where it has none."""
    low, high = effect.d - effect.half, effect.d + effect.half
    if effect.failed:
        return 'does not hold'
    if math.isnan(low):
        return ''
    if above < low and high < below:
        return 'holds'
    return 'does not hold' if high < above or low > below else 'undecided'


def log_of_percent(text: str, otherwise: float) -> float:
    return math.log1p(float(text) / 100) if text else otherwise


def compare_rates(found: Results, A: str, B: str, size: str) -> Effect | None:
    """Compare the logs of two models' best rates, one a seed, by the pooled t-test."""
    seeds = SIZES[size].seeds
    best = [[vertex(found, size, model, (seed,)) for seed in seeds] for model in (A, B)]
    if not seeds or None in best[0] + best[1]:
        return None
    a, b = np.log(best)
    n, half = len(seeds), math.nan
    if n > 1:
        pooled = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
        half = student.ppf(0.975, 2 * n - 2) * pooled * math.sqrt(2 / n)
    return Effect(size, float(a.mean() - b.mean()), half)


class Verdict(NamedTuple):
    row: dict[str, str]
    effects: list[Effect]
    word: str
    shown: str


def judge(found: Results) -> list[Verdict]:
    """Decide every row of verdicts.csv."""
    rows = read_csv(f'{PUBLISHED}/verdicts.csv')
    y = {size: {(run.model, run.seed): found[run]['y'] for run in planned(found, size)[1]
                if run in found and not math.isnan(found[run]['y'])} for size in SIZES}
    verdicts = []
    for row in rows:
        sizes = row['sizes'].split()
        bounds = (log_of_percent(row['above_%'], -math.inf), log_of_percent(row['below_%'], math.inf))
        if row['kind'] in ('stable', 'elsewhere'):
            verdicts.append(Verdict(row, [], *stability(found, sizes)) if sizes
                            else Verdict(row, [], 'see results/gp', ''))
            continue
        effects = []
        for size in sizes:
            m = sum(size in other['sizes'].split() and other['kind'] not in (
                'stable', 'elsewhere', 'higher rate') for other in rows)
            A, B = choose(found, size, row['A']), choose(found, size, row['B'])
            effects.append(compare_rates(found, A, B, size) if row['kind'] == 'higher rate'
                           else compare(y[size], A, B, size, m))
        effects = [effect for effect in effects if effect]
        words = [word for effect in effects if (word := decide(effect, *bounds))]
        word = words[-1] if words else 'not run'
        if words and sizes[0].startswith('scarce') and (len(words) < len(sizes) or len(set(words)) > 1):
            word = 'undecided'
        verdicts.append(Verdict(row, effects, word, '; '.join(map(str, effects))))
    return verdicts


def stability(found: Results, sizes: list[str]) -> tuple[str, str]:
    """Count failed runs and loss spikes of all-CEM, these beside Llama's."""
    shown, any_failed = [], False
    for size in sizes:
        runs = [run for run in planned(found, size)[1] if run in found]
        cem = [run for run in runs if run.model.startswith('cem')]
        llama = [run for run in runs if run.model.startswith('llama')]
        if cem and llama:
            _, failed = split_failed({(r.model, r.seed): found[r]['y'] for r in cem})
            any_failed |= bool(failed)
            per_run = [statistics.fmean(found[r]['spikes'] for r in some) for some in (cem, llama)]
            shown.append(f'{size} {len(cem)} runs, {len(failed)} models failed, spikes a run '
                         f'{per_run[0]:.1f}, Llama {per_run[1]:.1f}')
    return ('does not hold' if any_failed else 'holds') if shown else 'not run', '; '.join(shown)


def in_weights(found: Results, model: str) -> str:
    """Return how many weights a Llama with ALiBi of the same loss has, at the largest size where that
    lies between two that were trained."""
    means: dict[str, dict[str, tuple[float, float]]] = {}
    for size in ('XS', 'S', 'M'):
        runs = [run for run in planned(found, size)[1] if run in found]
        for name in {run.model for run in runs}:
            some = [found[run] for run in runs if run.model == name]
            y = statistics.fmean(result['y'] for result in some)
            means.setdefault(name, {})[size] = (y, math.log(some[0]['weights']))
    line = sorted(means.get('llama-alibi', {}).values())
    for _, (y, weights) in reversed(means.get(model, {}).items()):
        if len(line) > 1 and line[0][0] <= y <= line[-1][0]:
            same = math.exp(np.interp(y, *zip(*line, strict=True)))
            return f'{math.exp(weights) / 1e3:.0f} k as {same / 1e3:.0f} k'
    return ''


def verdict_table(found: Results, verdicts: list[Verdict]) -> str:
    rows = [[v.row['id'], v.row['claim'], f'{v.row["A"]} / {v.row["B"]}', v.row['kind'], v.shown,
             in_weights(found, v.row['A']), v.word] for v in verdicts]
    header = ['', 'claim', 'A / B', 'A is', 'A over B', 'A as Llama with ALiBi', 'verdict']
    return ('Perplexity a Llama token of the held-out text, A over B less one, with its interval over '
            f'seeds.\n\n{table(header, rows)}\n')


@dataclass
class ReproduceConfig:
    """What to print."""
    scale: Literal['english', 'paper'] = 'english'  # the runs of results/tokens; the paper's sizes
    todo: bool = False  # print the commands of the runs that are not finished, and no more
    text: str | None = None  # the text that --todo has prepared; default: data/english is there
    anew: bool = False  # leave the published runs out
    count: str | None = None  # count bytes and Llama tokens of this data folder's held-out text
    llama_tokenizer: str | None = None  # tokenizer.model for --count; default: from the Hub


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
        return count_text(cfg.count, cfg.llama_tokenizer)
    rows = [[*run, *(found[run][name] for name in NUMBERS)] for run in sorted(found)]
    write_csv(f'{OUT}/runs.csv', [*Run._fields, *NUMBERS], rows)
    verdicts = judge(found)
    page = verdict_table(found, verdicts)
    say(page)


if __name__ == '__main__':
    main(sys.argv[1:])

"""
The paper's claims, from runs that are done; and the commands of those that are not.

    python reproduce.py                           verdicts and pictures, of results/ladder/runs.csv
    python reproduce.py --anew                    of runs of your own alone
    python reproduce.py --todo | sh               the ladder's missing runs, one after another
    python reproduce.py --scale=gpu --todo | sh   the claims at 3 and 10 M weights
    python reproduce.py --scale=paper --todo      the paper's sizes, with what each run takes

Runs are train.py's, in out/reproduce/; `| xargs -P 8 -I{} sh -c "{}"` does eight at a time. Tables
and pictures go to out/results/.

A comparison is paired: both sides have read the same data in the same order, so a seed's
difference is one number, the log of A's perplexity over B's. At one size: its mean and 95% interval
(the paired t-test). Over sizes: a straight line in log N, read at the largest size that was run.
A claim holds where that interval lies within what it says, and does not hold where it lies outside.
"""
import csv
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import linregress
from scipy.stats import t as student

from configurator import build, command_line, read_options
from model import ModelConfig, Transformer
from nanocem.compute import flops_per_token
from nanocem.files import read_json, say, table
from train import TrainConfig


def layers(attn: str, mlp: str, attn_steps: int, mlp_steps: int, P: str = 'diag_lowrank') -> str:
    words = f'--attn={attn} --mlp={mlp} --attn_steps={attn_steps} --mlp_steps={mlp_steps}'
    return words if attn == mlp == 'llama' else f'{words} --preconditioner={P}'


def shape(n: int, d_mlp: int) -> str:
    return f'config/ladder.py --n_layer={n} --d_model={16 * n} --n_head={n} --d_mlp={d_mlp}'


# The models, as train.py's options
LLAMA = layers('llama', 'llama', 1, 1)
ROPE = '--positions=rope --kq_diag=none'
MODELS = {
    'llama': LLAMA,
    'llama-alibi': f'{LLAMA} --positions=alibi',
    'llama-attn-twice': layers('llama', 'llama', 2, 1),
    'llama-mlp-twice': layers('llama', 'llama', 1, 2),
}
for T in (1, 2, 3):
    MODELS |= {f'attn-{T}': layers('cem', 'llama', T, 1), f'mlp-{T}': layers('llama', 'cem', 1, T)}
for T in (1, 2):
    attn, mlp, cem = MODELS[f'attn-{T}'], MODELS[f'mlp-{T}'], layers('cem', 'cem', T, T)
    MODELS |= {
        f'cem-{T}': cem,
        f'rope-{T}': f'{cem} {ROPE} --score_scale=head',
        f'attn-{T}-none': layers('cem', 'llama', T, 1, 'none'),
        f'attn-{T}-diag': layers('cem', 'llama', T, 1, 'diag'),
        f'attn-{T}-nodiag': f'{attn} --kq_diag=none',
        f'attn-{T}-rope': f'{attn} {ROPE} --score_scale=head',
        f'mlp-{T}-none': layers('llama', 'cem', 1, T, 'none'),
        f'mlp-{T}-diag': layers('llama', 'cem', 1, T, 'diag'),
        f'mlp-{T}-params': f'{mlp} --mlp_match=params'}
MODELS |= {
    'attn-1-perhead': f'{MODELS["attn-1"]} --kq_diag=per_head',
    'attn-1-diag-nodiag': f'{MODELS["attn-1-diag"]} --kq_diag=none',
    'attn-1-diag-perhead': f'{MODELS["attn-1-diag"]} --kq_diag=per_head',
    'mlp-1-none-params': f'{MODELS["mlp-1-none"]} --mlp_match=params'}

# The sizes. The ladder and two more for a GPU: n layers, n heads of 16, so d = 16 n: one number
# grows, depth and width keep their ratio. In heads of 16 RoPE has more room than in 4 to 6, and
# three are the fewest whose ALiBi slopes see near and far. Names: the weights of Llama's blocks.
LARGE_BATCH = '--batch_size=128 --micro_batch_size=128'
SIZES = {
    'ladder': {
        '83k': f'{shape(3, 128)} --dtype=float32 --compile=False',  # too short a run to compile
        '195k': shape(4, 168), '387k': shape(5, 216), '664k': shape(6, 256),
        '1.05m': shape(7, 296)},
    'gpu': {'3.06m': f'{shape(10, 424)} {LARGE_BATCH}', '10.4m': f'{shape(15, 640)} {LARGE_BATCH}'},
    'paper': {size: f'--size={size}' for size in ('86m', '108m', '134m', '162m', '256m')},
}

# The learning rates at the ladder's sizes, smallest first, from sweeps (results/ladder). A model
# without a row is trained at the two smallest, at the rates of the one that its name begins with.
RATES = {
    'llama': (0.014, 0.0093, 0.0068, 0.0053, 0.0043),
    'llama-alibi': (0.014, 0.0093, 0.0068, 0.0053, 0.0043),
    'llama-attn-twice': (0.014, 0.0093, 0.0068),
    'llama-mlp-twice': (0.014, 0.0093, 0.0068),
    'attn-1': (0.017, 0.012, 0.0085, 0.0066, 0.0054),
    'attn-1-nodiag': (0.017, 0.012, 0.0085),
    'attn-2': (0.015, 0.0099, 0.0072, 0.0057, 0.0046),
    'attn-3': (0.015, 0.0099),
    'mlp-1': (0.013, 0.0088, 0.0064, 0.005, 0.0041),
    'mlp-2': (0.011, 0.0073, 0.0053, 0.0042, 0.0034),
    'mlp-3': (0.011, 0.0073),
    'cem-1': (0.014, 0.0094, 0.0068, 0.0053, 0.0043),
    'cem-2': (0.013, 0.0086, 0.0063, 0.0049, 0.004),
    'rope-1': (0.016, 0.011, 0.008, 0.0063, 0.0051),
    'rope-2': (0.017, 0.011, 0.0082, 0.0064, 0.0052),
}
EVERY_SIZE = [name for name, rates in RATES.items() if len(rates) == 5]
ONE_RATE = {'gpu': 0.004, 'paper': 0.002}  # of all models at all sizes


class Run(NamedTuple):
    """One training run."""
    scale: str
    size: str
    model: str
    rate: float
    seed: int

    @property
    def options(self) -> str:
        size = SIZES[self.scale][self.size]
        return f'{size} {MODELS[self.model]} --learning_rate={self.rate:g}'

    @property
    def folder(self) -> str:
        return (f'out/reproduce/{self.scale}/{self.size}/'
                f'{self.model}_rate={self.rate:g}_seed={self.seed}')


def planned(scale: str) -> list[Run]:
    """Every model at its own rate, the small sizes first; at the ladder with three seeds, of exact
    RoPE at the two largest sizes with one."""
    runs = []
    for place, size in enumerate(SIZES[scale]):
        for model in MODELS:
            rates = RATES.get(model)
            if rates is None:
                rates = next(RATES[name] for name in RATES if model.startswith(name))[:2]
            if (scale == 'ladder' and place >= len(rates)) or (scale == 'gpu' and len(rates) < 5):
                continue
            rate = ONE_RATE.get(scale) or rates[place]
            three = scale == 'ladder' and not (model.startswith('rope') and place > 2)
            runs += [Run(scale, size, model, rate, seed) for seed in range(1, 4 if three else 2)]
    return runs


def configs(options: str) -> tuple[TrainConfig, ModelConfig]:
    """What train.py makes of a run's options."""
    given = read_options(options.split(), TrainConfig, ModelConfig)
    return build(TrainConfig, given), build(ModelConfig, given)


def command(run: Run) -> str:
    """A line of shell that trains a run or goes on with it: at the ladder on one CPU thread, so
    that numbers depend on nothing else that runs; at the paper's scale with its A100-hours."""
    start, note = 'python', ''
    if run.scale == 'ladder':
        start = 'OMP_NUM_THREADS=1 python'
    if run.scale == 'paper':
        train, cfg = configs(run.options)
        with torch.device('meta'):
            model, llama = Transformer(cfg), Transformer(cfg.llama())
        flops = train.tokens_per_param * llama.num_params() * flops_per_token(model)
        start = 'torchrun --nproc_per_node=8'
        note = f'  # {flops / (0.4 * 312e12 * 3600):.1f} A100-hours at an MFU of 40%'
    resume = ' --init_from=resume' * os.path.exists(f'{run.folder}/config.json')
    return (f'{start} train.py {run.options} --seed={run.seed} --out_dir={run.folder} '
            f'--tensorboard=False --sample_tokens=0{resume}{note}')


NUMBERS = ('parameters', 'tokens', 'flops_per_token', 'steps', 'test_perplexity', 'val_perplexity')
Results = dict[Run, dict[str, Any]]


def read_results(scale: str, anew: bool) -> Results:
    """Of the planned runs that are finished: in runs.csv, or here."""
    published: Results = {}
    path = f'results/{scale}/runs.csv'
    if os.path.exists(path) and not anew:
        with open(path, encoding='utf-8', newline='') as file:
            for row in csv.DictReader(file):
                key = row['size'], row['model'], float(row['learning_rate']), int(row['seed'])
                numbers = {name: json.loads(row[name] or 'NaN') for name in NUMBERS}
                published[Run(scale, *key)] = numbers
    found = {run: published.get(run) or read_json(f'{run.folder}/result.json') or {}
             for run in planned(scale)}
    return {run: of for run, of in found.items() if all(of.get(name) for name in NUMBERS)}


# The claims: kind, A, B. What each kind says of A's perplexity over B's, as a log

KINDS = {'better': (-math.inf, 0), 'worse': (0, math.inf), 'no better': (math.log(0.99), math.inf),
         'close': (-math.inf, math.log(1.02)), 'alike': (math.log(0.98), math.log(1.02))}
CLAIMS: dict[str, list[tuple[str, str, str]]] = {
    'a: CEM attention, T = 1: close to Llama with half the attention weights': [
        ('close', 'attn-1', 'llama'), ('close', 'attn-1-none', 'llama'),
        ('close', 'attn-1', 'llama-alibi'), ('close', 'attn-1-none', 'llama-alibi')],
    'b: CEM MLP, T = 1: worse dimension-matched, a little better parameter-matched': [
        ('worse', 'mlp-1-none', 'llama'), ('better', 'mlp-1-none-params', 'llama')],
    'c: T = 2 beats T = 1 for both; attention at T = 2 can beat Llama': [
        *(('better', f'{kind}-2{P}', f'{kind}-1{P}')
          for kind in ('attn', 'mlp') for P in ('', '-none')),
        ('better', 'cem-2', 'cem-1'), ('better', 'attn-2', 'llama')],
    'd: no consistent gain at T = 3': [
        ('no better', 'attn-3', 'attn-2'), ('no better', 'mlp-3', 'mlp-2')],
    'e: preconditioners make little difference': [
        ('alike', f'{kind}-{T}{P}', f'{kind}-{T}-none')
        for kind in ('attn', 'mlp') for T in (1, 2) for P in ('-diag', '')],
    'f: a diagonal in A_k is essential; one shared by the heads is close to one per head': [
        ('better', 'attn-1', 'attn-1-nodiag'), ('better', 'attn-2', 'attn-2-nodiag'),
        ('close', 'attn-1', 'attn-1-perhead')],
    'g: plain layer reuse gives little or nothing, recursion within the layer does': [
        ('no better', 'llama-mlp-twice', 'llama'), ('no better', 'llama-attn-twice', 'llama'),
        ('better', 'mlp-2-params', 'mlp-1-params')],
    'h: all-CEM, T = 2, comes near Llama with fewer weights': [
        ('close', 'cem-2', 'llama'), ('close', 'cem-2', 'llama-alibi')],
    'k: exact RoPE is better than ALiBi with a diagonal (ours)': [
        ('better', 'rope-1', 'cem-1'), ('better', 'rope-2', 'cem-2'),
        ('better', 'attn-1-rope', 'attn-1'), ('better', 'attn-2-rope', 'attn-2')],
}


class Estimate(NamedTuple):
    """A log ratio that was read off runs."""
    value: float
    error: float  # its standard error
    freedom: int  # 0: nothing is known of the error

    def interval(self) -> tuple[float, float]:
        """95%."""
        half = student.ppf(0.975, self.freedom) * self.error if self.freedom else math.inf
        return self.value - half, self.value + half

    def __str__(self) -> str:
        """As a change in per cent."""
        low, high = (100 * math.expm1(min(end, 700)) for end in self.interval())
        interval = f' ({low:+.1f} to {high:+.1f})' if self.freedom else ''
        return f'{100 * math.expm1(self.value):+.1f}%{interval}'


def line_through(N: Sequence[float], d: Sequence[float]) -> tuple[Estimate, Estimate | str]:
    """The line through the differences d at sizes N: its value at the largest, and what a tenfold N
    adds. With one size it is flat, and the interval the paired t-test's."""
    if len(set(N)) == 1:
        error = statistics.stdev(d) / math.sqrt(len(d)) if len(d) > 1 else 0.0
        return Estimate(statistics.fmean(d), error, len(d) - 1), ''
    line = linregress(np.log10(N) - math.log10(max(N)), d)
    return (Estimate(line.intercept, line.intercept_stderr, len(d) - 2),
            Estimate(line.slope, line.stderr, len(d) - 2))


def verdict(kind: str, line: Estimate) -> str:
    (low, high), (least, most) = line.interval(), KINDS[kind]
    if least <= low and high <= most:
        return 'holds'
    return 'does not hold' if high < least or low > most else 'within noise'


def claims(scale: str, found: Results, split: str) -> str:
    """A line a comparison: at each size, at the largest by the line, and what is said."""
    weights = {}  # of Llama's blocks, the N of every line
    for size, options in SIZES[scale].items():
        with torch.device('meta'):
            llama = Transformer(configs(f'{options} {LLAMA}')[1])
        weights[size] = sum(p.numel() for p in llama.blocks.parameters())
    log_ppl = {(run.size, run.model, run.seed): math.log(result[f'{split}_perplexity'])
               for run, result in found.items()}
    rows = []
    for claim, tests in CLAIMS.items():
        for kind, A, B in tests:
            cells, N, d = [], [], []
            for size in weights:
                pairs = [a - log_ppl[size, B, seed] for (of, model, seed), a in log_ppl.items()
                         if (of, model) == (size, A) and (size, B, seed) in log_ppl]
                here = [weights[size]] * len(pairs)
                cells.append(str(line_through(here, pairs)[0]) if pairs else '')
                N, d = N + here, d + pairs
            line, slope = line_through(N, d) if d else ('', '')
            said = verdict(kind, line) if d else 'not run'
            rows.append([claim, f'{A} / {B}', kind, *cells, str(line), str(slope), said])
            claim = ''
    header = ['claim', 'A / B', 'A is', *weights, 'at the largest size', 'a tenfold N adds', '']
    return (f'{split} perplexity of A over that of B, less one, with its 95% interval, paired by '
            f'seed.\n\n{table(header, rows)}\n')


# The pictures

def deviation(values: Sequence[float]) -> float:
    """The standard deviation, 0 of one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw_gap(found: Results, models: dict[str, str]) -> plt.Figure | None:
    """Perplexity over Llama's, same seeds, against Llama's parameters, a panel a text; the bars
    are standard deviations over the pairs."""
    figure, both = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout='constrained')
    llama = {(run.size, run.seed): of for run, of in found.items() if run.model == 'llama'}
    for axes, split in zip(both, ('test', 'val'), strict=True):
        for n, (label, model) in enumerate(models.items()):
            gaps: dict[int, list[float]] = {}
            for run, result in found.items():
                base = llama.get((run.size, run.seed))
                if run.model == model and base:
                    ratio = result[f'{split}_perplexity'] / base[f'{split}_perplexity']
                    gaps.setdefault(base['parameters'], []).append(100 * (ratio - 1))
            if gaps:
                means, bars = zip(*((statistics.fmean(g), deviation(g)) for g in gaps.values()),
                                  strict=True)
                axes.errorbar(list(gaps), means, bars, color=f'C{(n + 1) // 2}', label=label, marker='o',
                              ms=4, capsize=2, ls='--' if 'T = 1' in label else '-')
        axes.axhline(0, color='hotpink', lw=1)
        axes.set(xscale='log', xlabel="Llama's parameters", title=split)
        axes.grid(alpha=0.3)
    both[0].set(ylabel='perplexity over Llama, %')
    both[1].legend(loc='upper left', bbox_to_anchor=(1.02, 1), handlelength=4, fontsize=7)
    return figure


def draw_bars(found: Results, models: dict[str, str]) -> plt.Figure | None:
    """A panel a size that has all the models, a bar a model; Llama is the dashed line, as in the
    paper's 2c and 2d."""
    values: dict[str, dict[str, list[float]]] = {}
    for run, result in found.items():
        of_size = values.setdefault(run.size, {})
        of_size.setdefault(run.model, []).append(result['test_perplexity'])
    values = {size: of for size, of in values.items() if {*models.values(), 'llama'} <= of.keys()}
    if not values:
        return None
    figure, grid = plt.subplots(1, len(values), figsize=(4.6 * len(values), 4), squeeze=False,
                                layout='constrained')
    for axes, (size, of) in zip(grid[0], values.items(), strict=True):
        means = [statistics.fmean(of[model]) for model in models.values()]
        errors = [deviation(of[model]) for model in models.values()]
        bars = axes.bar(range(len(means)), means, yerr=errors, capsize=3,
                        color=[f'C{int(T)}' if (T := label.partition("T = ")[2][:1]) else 'gray'
                               for label in models])
        axes.bar_label(bars, fmt='%.2f', fontsize=7)
        axes.axhline(statistics.fmean(of['llama']), color='hotpink', ls='--')
        low, high = min(means), max(means)
        axes.set_ylim(low - 0.5 * (high - low) - 0.01, high + 0.5 * (high - low) + 0.01)
        axes.set(title=size, ylabel='test perplexity (dashed: Llama)')
        axes.set_xticks(range(len(models)), models, fontsize=7, rotation=30, ha='right')
    return figure


def by_P(kind: str) -> dict[str, str]:
    names = {'no P': '-none', 'diagonal': '-diag', 'diagonal + low rank': ''}
    steps = {f'T = {T}, {name}': f'{kind}-{T}{P}' for T in (1, 2) for name, P in names.items()}
    return {**steps, 'T = 3, diagonal + low rank': f'{kind}-3'}


FIGURES: dict[str, tuple[Any, dict[str, str]]] = {
    'fig_gap': (draw_gap, {'Llama, ALiBi': 'llama-alibi', **{
        f'{name}, T = {T}': f'{kind}-{T}' for name, kind in (
            ('CEM attention', 'attn'), ('CEM MLP', 'mlp'), ('all-CEM', 'cem'),
            ('all-CEM, exact RoPE', 'rope')) for T in (1, 2)}}),
    'fig_attn_T': (draw_bars, by_P('attn')),
    'fig_mlp_T': (draw_bars, by_P('mlp')),
    'fig_kq_diag': (draw_bars, {
        'none': 'attn-1-diag-nodiag', 'shared': 'attn-1-diag', 'per head': 'attn-1-diag-perhead'}),
    'fig_reuse': (draw_bars, {
        'Llama, MLP twice': 'llama-mlp-twice', 'Llama, attention twice': 'llama-attn-twice',
        **{f'{name}, T = {T}': model.format(T) for name, model in (
            ('CEM MLP', 'mlp-{}'), ('CEM MLP, same weights', 'mlp-{}-params'),
            ('CEM attention', 'attn-{}')) for T in (1, 2)}}),
}


@dataclass
class ReproduceConfig:
    """Which runs."""
    scale: Literal['ladder', 'gpu', 'paper'] = 'ladder'  # to a million weights; to ten; the paper's
    todo: bool = False  # print the commands of the runs that are not finished, and no more
    anew: bool = False  # leave results/ladder/runs.csv out


@command_line
def main(argv: list[str]) -> None:
    cfg = build(ReproduceConfig, read_options(argv, ReproduceConfig))
    found = read_results(cfg.scale, cfg.anew)
    missing = [run for run in planned(cfg.scale) if run not in found]
    if cfg.todo:
        corpus = cfg.scale != 'paper' and missing
        lines = ['python prepare_slimpajama.py --input=corpus'] if corpus else []
        return say('\n'.join([*lines, *map(command, missing)]))
    say(f'{len(found):,} runs are finished, {len(missing):,} not; --todo prints their commands')
    folder = f'out/results/{cfg.scale}'
    os.makedirs(folder, exist_ok=True)
    for split in ('val', 'test'):
        page = claims(cfg.scale, found, split)
        with open(f'{folder}/claims_{split}.md', 'w', encoding='utf-8') as file:
            file.write(page)
    say(page)
    for name, (draw, models) in FIGURES.items():
        if figure := draw(found, models):
            figure.savefig(f'{folder}/{name}.png', dpi=100)
    say(f'{folder}: claims_test.md, claims_val.md, and the pictures')


if __name__ == '__main__':
    main(sys.argv[1:])

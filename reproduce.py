"""
Does the paper hold? Its claims, the training runs that decide them, and the verdicts.

    python reproduce.py                              the verdicts and pictures of results/tokens
    python reproduce.py --todo --text=FILE | sh      train the missing runs on a text, one by one
    python reproduce.py --anew                       the verdicts of your own runs alone
    python reproduce.py --scale=paper                the commands at the paper's sizes

results/tokens has the claims (verdicts.csv), the models, the sizes, and RULE.md, which explains
them. Trials choose the learning rates: when all runs are finished, repeat --todo without --text,
until it prints nothing. `| xargs -P 2 -I{} sh -c "{}"` trains two at a time. Runs are in
out/reproduce/; tables and pictures are written to out/results/tokens/.

A loss is in nats per Llama token of the held-out text, validation and test together. A claim
compares models A and B by the rule of nanocem/verdicts.py, with bounds in per cent of perplexity.
The largest size with two seeds or more decides it; the scarce sizes must agree.
"""
import csv
import glob
import math
import os
import re
import shlex
import statistics
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

from configurator import build, check, command_line, fail, read_options
from model import ModelConfig, Transformer
from nanocem.data import open_shard, read_meta
from nanocem.files import read_json, read_json_lines, say, table, write_atomic
from nanocem.loss import DENSE_BF16, MFU_ESTIMATE, flops_per_token
from nanocem.tokenizers import SentencePieceTokenizer, load_tokenizer
from nanocem.verdicts import (
    Effect,
    Losses,
    compare,
    decide,
    differences,
    residual_error,
    split_failed,
    vertex,
)
from train import MAX_SKIPPED, TrainConfig

PUBLISHED = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results/tokens')
OUT = 'out/results/tokens'


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


CLAIMS = read_csv(f'{PUBLISHED}/verdicts.csv')
MODELS = {row['model']: row for row in read_csv(f'{PUBLISHED}/models.csv')}
SIZES = {row['size']: row for row in read_csv(f'{PUBLISHED}/sizes.csv')}  # in the order of runs


@cache
def meta_model(options: str) -> Transformer:
    """Return the model that train.py makes of these options, without memory for its weights."""
    given = read_options(options.split(), TrainConfig, ModelConfig)
    with torch.device('meta'):
        return Transformer(build(ModelConfig, given))


def count_weights(options: str) -> int:
    """Count the parameters of the layers, without embedding and head."""
    return sum(p.numel() for p in meta_model(options).blocks.parameters())


@cache
def model_options(size_options: str, model: str) -> str:
    """Return train.py's options for a model at a size. If the model has to have as many weights as
    another, choose d_mlp for that. At 256m CEM has two more layers, as in the paper."""
    if model.startswith('cem'):
        size_options = size_options.replace('--size=256m ', '--size=256m_cem ')
    options = f'{size_options} {MODELS[model]["options"]}'
    if other := MODELS[model]['weights_of']:
        weights = count_weights(model_options(size_options, other))
        at_1, at_2 = (count_weights(f'{options} --d_mlp={width}') for width in (1, 2))
        options += f' --d_mlp={1 + round((weights - at_1) / (at_2 - at_1))}'
    # If an option is given twice, keep the later value
    values = dict(option.split('=') for option in options.split())
    return ' '.join(f'{name}={value}' for name, value in values.items())


class Run(NamedTuple):
    """One training run. Its learning rate has three digits, as in the folder's name."""
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
        """Return a shell command that trains or resumes the run on one thread."""
        resume = ' --init_from=resume' if os.path.exists(f'{self.folder}/config.json') else ''
        return (f'OMP_NUM_THREADS=1 python train.py {self.options} --learning_rate={self.rate:g} '
                f'--seed={self.seed} --out_dir={self.folder}{resume}')


# Results of runs. In runs.csv these columns follow those of Run; y is the loss per Llama token.

COLUMNS = ('parameters', 'weights', 'tokens', 'flops_per_token', 'seconds', 'val_bpb', 'test_bpb',
           'y', 'skipped', 'spikes')
Results = dict[Run, dict[str, float]]


def read_results(anew: bool) -> Results:
    """Read the published runs, unless `anew`, and the finished runs in out/reproduce."""
    found: Results = {}
    for row in [] if anew else read_csv(f'{PUBLISHED}/runs.csv'):
        run = Run(row['size'], row['model'], float(row['rate']), int(row['seed']))
        found[run] = {name: float(row[name]) for name in COLUMNS}
    for path in sorted(glob.glob('out/reproduce/*/*_rate=*_seed=*/log.jsonl')):
        size, name = path.split('/')[2:4]
        model, rate, seed = re.split('_rate=|_seed=', name)
        run = Run(size, model, float(rate), int(seed))
        if run not in found and (result := read_run(run)):
            found[run] = result
    return found


def read_run(run: Run) -> dict[str, float] | None:
    """Return the results of a run in out/reproduce; None if it is not finished. The losses of a
    failed run are infinite."""
    lines = read_json_lines(f'{run.folder}/log.jsonl')
    losses = [line['loss'] or math.inf for line in lines if 'lr' in line]
    # A spike is a loss 0.5 nats above the median of the 50 batches before
    spikes = sum(losses[n] > statistics.median(losses[n - 50:n]) + 0.5
                 for n in range(50, len(losses)))
    model = meta_model(run.options)
    row = dict.fromkeys(COLUMNS, math.nan) | dict(
        parameters=model.num_params(), weights=count_weights(run.options),
        flops_per_token=flops_per_token(model), spikes=spikes)
    if result := read_json(f'{run.folder}/result.json'):
        val, test = result['val_bits_per_byte'], result['test_bits_per_byte']
        row |= {name: result[name] for name in ('tokens', 'seconds', 'skipped')}
        return row | dict(val_bpb=val, test_bpb=test, y=loss_per_llama_token(val, test))
    # train.py ends a run after more than MAX_SKIPPED consecutive skips; each logs two lines
    skipped = sum(line.get('event') == 'skipped' for line in lines[-2 * MAX_SKIPPED - 2:])
    failed = row | dict.fromkeys(('val_bpb', 'test_bpb', 'y'), math.inf)
    return failed if skipped > MAX_SKIPPED else None


def loss_per_llama_token(val_bpb: float, test_bpb: float) -> float:
    """Convert bits per byte of both splits to nats per Llama token, by your text.csv or ours."""
    own = f'{OUT}/text.csv'
    val, test = read_csv(own if os.path.exists(own) else f'{PUBLISHED}/text.csv')
    bits = val_bpb * int(val['bytes']) + test_bpb * int(test['bytes'])
    return math.log(2) * bits / (int(val['llama_tokens']) + int(test['llama_tokens']))


def print_counts(folder: str) -> None:
    """Print text.csv for a data folder: documents, bytes and Llama tokens of its held-out splits.
    Each document is encoded alone, without BOS, and keeps its line ends."""
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
    """The learning rates to try. The other fields are known once all rates were tried."""
    rates: list[float]
    lowest: float = math.nan  # lowest mean of the seeds' validation losses, in bits per byte
    best: float | None = None  # the best rate by these means
    best_of_seed: dict[int, float] | None = None


def search_rates(found: Results, size: str, model: str) -> Trials:
    """Name three learning rates. While the best is at an end, add one beyond it, up to seven."""
    middle, ratio = float(SIZES[size]['rate']), float(SIZES[size]['ratio'])
    seeds = [int(seed) for seed in SIZES[size]['trial_seeds'].split()]
    exponents = [-1, 0, 1]
    while True:
        rates = [float(f'{middle * ratio ** n:.3g}') for n in exponents]
        runs = [[Run(size, model, rate, seed) for seed in seeds] for rate in rates]
        if any(run not in found for row in runs for run in row):
            return Trials(rates)
        # Here each rate is a model
        y = {(str(run.rate), run.seed): found[run]['y'] for row in runs for run in row}
        finished, _ = split_failed(y)
        losses = np.array([[found[run]['val_bpb'] if (str(run.rate), run.seed) in finished
                            else math.inf for run in row] for row in runs])
        mean = losses.mean(axis=1)
        best = int(mean.argmin())
        if 0 < best < len(rates) - 1 or len(rates) == 7:
            by_seed = {seed: vertex(rates, losses[:, n]) for n, seed in enumerate(seeds)}
            return Trials(rates, mean[best], vertex(rates, mean), by_seed)
        if best == 0:
            exponents.insert(0, exponents[0] - 1)
        else:
            exponents.append(exponents[-1] + 1)


def best_rate(found: Results, size: str, model: str) -> float | None:
    """Return a model's learning rate at a size; None while trials for it are missing."""
    tried = MODELS[model]['rate_of']  # the model whose trials count
    rate = search_rates(found, 'scarce-25k' if size.startswith('scarce') else 'XS', tried).best
    if size not in ('S', 'M') or rate is None:
        return rate
    # Models with trials at S have their own change from XS to S, others the mean of these changes.
    # It goes on to M as a power of the Llama's weights.
    changes = {}
    for name in SIZES['S']['tuned'].split():
        small, large = (search_rates(found, at, name).best for at in ('XS', 'S'))
        if small is None or large is None:
            return None
        changes[name] = math.log(large / small)
    change = changes.get(tried, statistics.fmean(changes.values()))
    x = {name: math.log(count_weights(Run(name, 'llama').options)) for name in ('XS', 'S', size)}
    return float(f'{rate * math.exp(change * (x[size] - x["XS"]) / (x["S"] - x["XS"])):.3g}')


def choose(found: Results, model: str) -> str | None:
    """Return the better of the models 'A/B' in their trials; None while some are missing."""
    if '/' not in model:
        return model
    lowest = {name: search_rates(found, 'scarce-25k', MODELS[name]['rate_of']).lowest
              for name in model.split('/')}
    return None if any(map(math.isnan, lowest.values())) else min(lowest, key=lowest.get)


# The plan

def planned(found: Results, size: str) -> tuple[list[Run], list[Run]]:
    """Return the trials of a size, and the runs to report, sorted by seed. A learning rate is NaN
    while it waits for trials."""
    row = SIZES[size]
    trials = [Run(size, model, rate, int(seed)) for model in row['tuned'].split()
              for rate in search_rates(found, size, model).rates
              for seed in row['trial_seeds'].split()]
    compared = [claim[side] for claim in CLAIMS if size in claim['sizes'].split() for side in 'AB']
    runs = []
    for name in dict.fromkeys([*row['first'].split(), *filter(None, compared)]):
        model = choose(found, name)
        rate = best_rate(found, size, model) if model else None
        for seed in map(int, row['seeds'].split()):
            runs.append(Run(size, model or name.split('/')[0], rate or math.nan, seed))
    return trials, sorted(runs, key=lambda run: run.seed)


def print_todo(found: Results, text: str | None) -> None:
    """Print the commands of missing runs, up to the first size that waits for learning rates."""
    if text:
        check(os.path.exists(text), f'text={text}: no such file or folder')
        prepare = f'python prepare_slimpajama.py --input={shlex.quote(text)} --held_out=0.05'
        say(f'{prepare} --tokenizer=bpe2048 --out_dir=data/english || exit 1')
        say(f'{prepare} --tokenizer=byte --out_dir=data/english-bytes || exit 1')
    elif not os.path.exists('data/english/meta.json'):
        fail('text=None and there is no data/english: --text=FILE prepares it')
    for size in SIZES:
        trials, runs = planned(found, size)
        missing = [run for run in [*trials, *runs] if run not in found]
        waiting = [run for run in missing if math.isnan(run.rate)]
        for run in missing:
            if run not in waiting:
                say(run.command)
        if missing:
            say(f'# {size}: {len(missing)} runs; {len(waiting)} of them wait for learning rates')
        if waiting:
            return


def print_paper() -> None:
    """Print the commands at the paper's sizes, with their A100-hours. Figure 3a has five rates."""
    figure_3a = dict.fromkeys(('llama', 'cem-2'), (0.0005, 0.001, 0.002, 0.004, 0.008))
    for size in ('86m', '108m', '134m', '162m', '256m'):
        tokens = 20 * meta_model(f'--size={size} {MODELS["llama"]["options"]}').num_params()
        for model in dict.fromkeys(run.model for run in planned({}, 'XS')[1]):
            options = model_options(f'--size={size} --tokens={tokens}', model)
            mfu = MFU_ESTIMATE['cem' if '=cem' in options else 'llama']
            hours = tokens * flops_per_token(meta_model(options)) / mfu / DENSE_BF16['A100'] / 3600
            for rate in figure_3a.get(model, (2e-3,)):
                say(f'torchrun --nproc_per_node=8 train.py {options} --learning_rate={rate:g} '
                    f'--seed=1 --out_dir=out/paper/{size}/{model}_rate={rate:g}'
                    f'  # {hours:.0f} A100-hours')


# Verdicts

Verdict = tuple[dict[str, str], list[Effect], str]  # a claim, its effect at each size, the word


def measure(claim: dict[str, str], size: str, found: Results,
            losses: dict[str, Losses]) -> Effect | None:
    """Compare a claim's models at a size; None if no seed has both."""
    A, B = choose(found, claim['A']), choose(found, claim['B'])
    if claim['unit'] == 'perplexity':
        m = sum(size in row['sizes'].split() for row in CLAIMS if row['unit'] == 'perplexity')
        return compare(losses[size], A, B, size, m)
    if claim['unit'] != 'rate':
        return None
    # The same rule for the logs of the best rates, as the only comparison
    rates = {(model, seed): math.log(rate) for model in SIZES[size]['tuned'].split()
             for seed, rate in (search_rates(found, size, model).best_of_seed or {}).items()}
    return compare(rates, A, B, size, m=1)


def judge(found: Results, losses: dict[str, Losses]) -> list[Verdict]:
    """Return every claim with its effects and its verdict."""
    verdicts = []
    for claim in CLAIMS:
        sizes = claim['sizes'].split()
        effects = [effect for size in sizes if (effect := measure(claim, size, found, losses))]
        above, below = float(claim['above_%'] or '-inf'), float(claim['below_%'] or 'inf')
        words = [word for effect in effects if (word := decide(effect, above, below))]
        word = 'not run' if claim['unit'] else 'see results/gp'
        if effects:
            word = 'one seed'
        if words:
            word = words[-1]
            if claim['id'].startswith('s') and words != [word] * len(sizes):
                word = 'undecided'  # the scarce sizes do not agree
        if claim['unit'] == 'failed runs' and any(losses[size] for size in sizes):
            failed = set.union(*(split_failed(losses[size])[1] for size in sizes))
            word = 'does not hold' if any('cem' in model for model in failed) else 'holds'
        verdicts.append((claim, effects, word))
    return verdicts


def equal_llama(losses: dict[str, Losses], size: str, model: str) -> str:
    """Interpolate how many weights Llama with ALiBi needs for a model's loss, within its sizes."""
    def log_loss(at: str, name: str) -> float:
        return math.log(statistics.fmean(y for cell, y in losses[at].items() if cell[0] == name))

    grid = [name for name in ('M', 'S', 'XS') if ('llama-alibi', 1) in losses[name]]
    if size not in grid or (model, 1) not in losses[size]:
        return ''
    x = [log_loss(name, 'llama-alibi') for name in grid]
    weights = [math.log(count_weights(Run(name, 'llama-alibi').options)) for name in grid]
    needed = np.interp(log_loss(size, model), x, weights, math.nan, math.nan)
    return '' if math.isnan(needed) else f'{math.exp(needed) / 1e3:.0f} k'


def verdict_table(losses: dict[str, Losses], verdicts: list[Verdict]) -> str:
    names = ('id', 'claim', 'A', 'B', 'kind')
    rows = [[*map(claim.get, names), '; '.join(map(str, effects)),
             equal_llama(losses, effects[-1].size, claim['A'])
             if effects and claim['unit'] == 'perplexity' else '', word]
            for claim, effects, word in verdicts]
    header = [*names, 'A over B', 'equal Llama with ALiBi', 'verdict']
    lines = ['A over B: how much higher the perplexity per Llama token of A is than that of B, the '
             'interval over seeds, and each seed alone.']
    for size, y in losses.items():
        s, freedom = residual_error(split_failed(y)[0])
        if freedom:
            lines.append(f'{size}: {len(y)} runs, s = {100 * math.expm1(s):.1f}%, f = {freedom}.')
    return ' '.join(lines) + f'\n\n{table(header, rows)}\n'


# Pictures

def draw_claims(verdicts: list[Verdict]) -> plt.Figure:
    """Draw the interval of every claim, at the largest size that has one, coloured by verdict."""
    colors = {'holds': 'C2', 'does not hold': 'C3', 'undecided': 'gray'}
    shown = [(claim, [effect for effect in effects if effect.half > 0], word)
             for claim, effects, word in reversed(verdicts)]
    shown = [(claim, effects[-1], word) for claim, effects, word in shown if effects]
    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(shown)), layout='constrained')
    for place, (claim, effect, word) in enumerate(shown):
        d, low, high = effect.percent()
        axes.errorbar([d], [place], xerr=[[d - low], [high - d]], fmt='o', ms=4, color=colors[word])
        for bound in filter(None, (claim['above_%'], claim['below_%'])):
            axes.plot([float(bound)] * 2, [place - 0.4, place + 0.4], color='black', lw=1)
    axes.set_yticks(range(len(shown)), [claim['claim'] for claim, _, _ in shown], fontsize=7)
    axes.margins(y=0.01)
    axes.set_xscale('symlog', linthresh=10)
    axes.set_xticks(ticks := [-10, -5, -2, 0, 2, 5, 10, 20, 50], ticks)
    axes.set_xlabel('A over B, %; black: bounds, green: holds, red: does not hold')
    return figure


def draw_lines(losses: dict[str, Losses], base: str, models: dict[str, str], xlabel: str,
               points: list[tuple[float, str]]) -> plt.Figure:
    """Draw models' perplexity over that of `base` at points (x, size): means and standard
    deviations over seeds. {} in a model's name is x."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
    for label, model in models.items():
        percent = {}
        for x, size in points:
            finished, _ = split_failed(losses[size])
            if d := differences(finished, model.format(x), base):
                percent[x] = 100 * np.expm1([*d.values()])
        if not percent:
            continue
        bars = [d.std(ddof=1) if len(d) > 1 else 0 for d in percent.values()]
        axes.errorbar(list(percent), [d.mean() for d in percent.values()], bars, fmt='o-', ms=4,
                      capsize=2, label=label)
    axes.legend(fontsize=8)
    axes.axhline(0, color='hotpink', lw=1)
    axes.set(xscale='log', xlabel=xlabel, ylabel=f'perplexity per Llama token over {base}, %')
    axes.set_xticks(ticks := [x for x, _ in points], [f'{x:,}' for x in ticks], minor=False)
    axes.minorticks_off()
    return figure


def draw(losses: dict[str, Losses], verdicts: list[Verdict]) -> dict[str, plt.Figure]:
    """Draw all claims; the gap to Llama with ALiBi; steps and P, as in the paper's Figures 2 and 3;
    and what a second pass is worth where weights are scarce."""
    weights = [(count_weights(Run(size, 'llama').options), size) for size in ('XS', 'S', 'M')]
    gap = {'Llama with RoPE': 'llama', "Llama with all-CEM's weights": 'llama-alibi-narrow',
           'CEM attention, no P': 'attn-1-none', 'all-CEM': 'cem-1', 'all-CEM, T = 2': 'cem-2'}
    steps = {'attention, P': 'attn-{}', 'attention, diagonal P': 'attn-{}-diag',
             'attention, no P': 'attn-{}-none', 'MLP, P': 'mlp-{}',
             'MLP, diagonal P': 'mlp-{}-diag', 'MLP, no P': 'mlp-{}-none'}
    scarce = {'one step': 'cem-1-equal', 'two steps': 'cem-2-equal',
              'two steps, eta = 1': 'cem-2-equal-eta1', 'all-CEM twice': 'cem-1-equal-twice',
              'Llama twice': 'llama-alibi-twice'}
    bytes_per_weight = [(40, 'scarce-25k-40'), (240, 'scarce-25k-240'), (1440, 'scarce-25k')]
    return {'rows': draw_claims(verdicts),
            'gap': draw_lines(losses, 'llama-alibi', gap, "weights of Llama's layers", weights),
            'steps': draw_lines(losses, 'llama', steps, 'T', [(T, 'XS') for T in (1, 2, 3)]),
            'scarce': draw_lines(losses, 'llama-alibi', scarce, 'bytes a weight', bytes_per_weight)}


@dataclass
class ReproduceConfig:
    """What to print."""
    scale: Literal['english', 'paper'] = 'english'  # the runs of results/tokens, or of the paper
    todo: bool = False  # print the commands of missing runs instead of verdicts
    text: str | None = None  # text that --todo prepares; not needed if data/english exists
    anew: bool = False  # leave the published runs out
    count: str | None = None  # print text.csv of this data folder; $LLAMA_TOKENIZER: Llama's model


@command_line
def main(argv: list[str]) -> None:
    options = read_options(argv, ReproduceConfig)
    cfg = build(ReproduceConfig, options)
    check(cfg.text is None or cfg.todo, f'text={cfg.text} is for --todo')
    alone = cfg.count is not None or cfg.scale == 'paper'
    check(not alone or len(options) == 1, 'count or scale=paper: give no other option')
    if cfg.count is not None:
        return print_counts(cfg.count)
    if cfg.scale == 'paper':
        return print_paper()
    found = read_results(cfg.anew)
    if cfg.todo:
        return print_todo(found, cfg.text)
    losses: dict[str, Losses] = {}
    for size in SIZES:
        finished = [run for run in planned(found, size)[1] if run in found]
        losses[size] = {(run.model, run.seed): found[run]['y'] for run in finished}
    verdicts = judge(found, losses)
    page = verdict_table(losses, verdicts)
    say(page)
    os.makedirs(OUT, exist_ok=True)
    write_atomic(f'{OUT}/verdicts.md', page.encode())
    rows = [[*run, *(f'{found[run][name]:.12g}' for name in COLUMNS)] for run in sorted(found)]
    lines = [','.join(map(str, row)) for row in [[*Run._fields, *COLUMNS], *rows]]
    write_atomic(f'{OUT}/runs.csv', '\n'.join([*lines, '']).encode())
    for name, figure in draw(losses, verdicts).items():
        figure.savefig(f'{OUT}/{name}.png')
    say(f'{OUT}: runs.csv, verdicts.md, and the pictures')


if __name__ == '__main__':
    main(sys.argv[1:])

"""
Muon beside AdamW: the runs of this folder's page.

    python results/muon/measure.py          train what runs.csv lacks, then print the tables
    python results/muon/measure.py --time   time a step of each, on an idle machine: seconds.csv
    python results/muon/measure.py --draw   only print and draw what there is

From the project's root. Each model under each optimizer is trained at RATES with the first seed, at
one further rate where the best is at an edge, and at its best rate, by validation, with the other
seeds. Two runs at a time, one thread each; what is finished in out/muon is not done again.
"""
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import matplotlib
import torch
from scipy.stats import ttest_rel

matplotlib.use('Agg')
import matplotlib.pyplot as plt

HERE = os.path.dirname(os.path.relpath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', '..'))

from configurator import build, read_options  # noqa: E402  after the path is set
from model import ModelConfig, Transformer  # noqa: E402
from train import TrainConfig, make_optimizer  # noqa: E402

MODELS = {
    'llama': '--attn=llama --mlp=llama --attn_steps=1 --mlp_steps=1',
    'llama-alibi': '--attn=llama --mlp=llama --attn_steps=1 --mlp_steps=1 --positions=alibi',
    'cem-1': '--attn_steps=1 --mlp_steps=1',
    'cem-2': '--attn_steps=2 --mlp_steps=2',
}
NAMES = {'llama': 'Llama', 'llama-alibi': 'Llama, ALiBi', 'cem-1': 'all-CEM, T = 1',
         'cem-2': 'all-CEM, T = 2'}
COMMON = ('--size=mini --n_layer=12 --context_length=64 --data=data/builtin --tokens=1.5M '
          '--batch_size=32 --micro_batch_size=32 --eval_interval=1000000 --eval_tokens=300000 '
          '--test_tokens=300000 --checkpoint_interval=100 --keep_checkpoints=1 --dtype=float32 '
          '--compile=False --tensorboard=False --sample_tokens=0')
TOKENS_A_STEP = 32 * 64
OPTIMIZERS = ('adamw', 'muon')
RATES = (4e-3, 8e-3, 16e-3)
SEEDS = (1, 2, 3)
VARIANTS = {  # looked at once: all-CEM, T = 1, at its best rate, first seed
    'no decay': 'train.py --optimizer=muon --weight_decay=0',
    **{name: f'{HERE}/variants.py {name} --optimizer=muon'
       for name in ('three_steps', 'heads', 'preconditioner')}}


class Run(NamedTuple):
    model: str
    optimizer: str
    rate: float
    seed: int

    @property
    def folder(self) -> str:
        return f'out/muon/{self.model}-{self.optimizer.replace(" ", "_")}-{self.rate:g}-{self.seed}'


Found = dict[Run, tuple[float, float]]  # validation loss, test perplexity


def train(run: Run) -> None:
    """One run of train.py, or what is left of it. One that fails says why in the folder's .txt."""
    program = VARIANTS.get(run.optimizer, f'train.py --optimizer={run.optimizer}')
    command = (f'{sys.executable} {program} {MODELS[run.model]} {COMMON} --seed={run.seed} '
               f'--learning_rate={run.rate:g} --out_dir={run.folder}')
    if os.path.exists(f'{run.folder}/config.json'):
        command += ' --init_from=resume'
    os.makedirs('out/muon', exist_ok=True)
    with open(f'{run.folder}.txt', 'w', encoding='utf-8') as file:
        subprocess.run(command.split(), env={**os.environ, 'OMP_NUM_THREADS': '1'}, stdout=file,
                       stderr=file, check=False)


def collect(runs: Iterable[Run]) -> Found:
    """The runs of runs.csv, and those in out/muon, which are added to it with their curves."""
    found: Found = {}
    curves: dict[Run, list[tuple[int, float]]] = {}
    for name, rows in (('runs', found), ('curves', curves)):
        if os.path.exists(f'{HERE}/{name}.csv'):
            with open(f'{HERE}/{name}.csv', encoding='utf-8') as file:
                for model, optimizer, rate, seed, a, b in list(csv.reader(file))[1:]:
                    run = Run(model, optimizer, float(rate), int(seed))
                    if rows is found:
                        found[run] = float(a), float(b)
                    else:
                        curves.setdefault(run, []).append((int(a), float(b)))
    for run in runs:
        if run not in found and os.path.exists(f'{run.folder}/result.json'):
            with open(f'{run.folder}/result.json', encoding='utf-8') as file:
                result = json.load(file)
            found[run] = result['val_loss'], result['test_perplexity']
            with open(f'{run.folder}/log.jsonl', encoding='utf-8') as file:
                lines = [line for line in map(json.loads, file) if 'lr' in line]
            curves[run] = [(line['tokens'], line['loss']) for line in lines]
    columns = ['model', 'optimizer', 'learning_rate', 'seed']
    write_rows('runs', [*columns, 'validation_loss', 'test_perplexity'],
               [(*run, f'{a:.6f}', f'{b:.5f}') for run, (a, b) in sorted(found.items())])
    write_rows('curves', [*columns, 'tokens', 'training_loss'],
               [(*run, *point) for run, points in sorted(curves.items()) for point in points])
    return found


def write_rows(name: str, columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    with open(f'{HERE}/{name}.csv.tmp', 'w', encoding='utf-8', newline='') as file:
        csv.writer(file, lineterminator='\n').writerows([columns, *rows])
    os.replace(f'{HERE}/{name}.csv.tmp', f'{HERE}/{name}.csv')


def best_rate(found: Found, model: str, optimizer: str) -> float | None:
    swept = {run.rate: loss for run, (loss, _) in found.items()
             if run[:2] == (model, optimizer) and run.seed == SEEDS[0]}
    return min(swept, key=swept.get) if swept else None


def next_runs(found: Found) -> list[Run]:
    """What is to be run now: the sweep, then its edges, then the further seeds."""
    pairs = [(model, optimizer) for optimizer in OPTIMIZERS for model in MODELS]
    sweep = [Run(*pair, rate, SEEDS[0]) for rate in (RATES[1], RATES[2], RATES[0])
             for pair in pairs]
    if missing := [run for run in sweep if run not in found]:
        return missing
    edges = {RATES[0]: RATES[0] / 2, RATES[-1]: RATES[-1] * 2}
    beyond = [Run(*pair, edges[best], SEEDS[0]) for pair in pairs
              if (best := best_rate(found, *pair)) in edges]
    further = [Run(model, optimizer, best_rate(found, model, optimizer), seed)
               for models in (('llama-alibi', 'cem-1'), ('llama', 'cem-2')) for seed in SEEDS[1:]
               for model in models for optimizer in OPTIMIZERS]
    looks = [Run('cem-1', name, best_rate(found, 'cem-1', 'muon'), SEEDS[0]) for name in VARIANTS]
    return ([run for run in beyond if run not in found]
            or [run for run in further + looks if run not in found])


def at_best(found: Found, model: str, optimizer: str) -> dict[int, tuple[float, float]]:
    rate = best_rate(found, model, optimizer)
    return {run.seed: values for run, values in found.items()
            if run[:3] == (model, optimizer, rate)}


def paired(found: Found, a: tuple[str, str], b: tuple[str, str]) -> str:
    """Test perplexity of a over b's, less one, paired by seed, with its 95% interval."""
    one, other = at_best(found, *a), at_best(found, *b)
    logs = [math.log(one[seed][1] / other[seed][1]) for seed in one if seed in other]
    if not logs:
        return ''
    text = f'{100 * math.expm1(statistics.fmean(logs)):+.1f}%'
    if len(logs) > 1:
        low, high = ttest_rel(logs, [0.0] * len(logs)).confidence_interval()
        text += f' ({100 * math.expm1(low):+.1f} to {100 * math.expm1(high):+.1f})'
    return text


def time_steps(rounds: int = 15) -> None:
    """Seconds a step of each model under each optimizer, which take turns: medians, seconds.csv. Of
    them, the optimizer's."""
    pairs = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
    made, times = {}, {pair: [] for pair in pairs}
    for model, optimizer in pairs:
        given = read_options(f'{MODELS[model]} {COMMON} --optimizer={optimizer}'.split(),
                             TrainConfig, ModelConfig)
        cfg = build(TrainConfig, given)
        net = Transformer(build(ModelConfig, {**given, 'vocab_size': 257}))
        made[model, optimizer] = net, make_optimizer(net, cfg)
    idx = torch.randint(257, (32, 65))
    for _ in range(rounds):
        for pair, (net, optimizer) in made.items():
            began = time.perf_counter()
            net(idx[:, :-1], idx[:, 1:])[1].backward()
            between = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            end = time.perf_counter()
            times[pair].append((end - began, end - between))
    rows = [(*pair, *(f'{statistics.median(column):.4f}' for column in
                      zip(*of[2:], strict=True))) for pair, of in times.items()]
    write_rows('seconds', ['model', 'optimizer', 'seconds_a_step', 'of_them_the_optimizers'], rows)


def smooth(points: list[tuple[int, float]], window: int = 5) -> list[tuple[int, float]]:
    """Means over five logged losses, at the last one's tokens."""
    return [(points[n][0], statistics.fmean(loss for _, loss in points[n - window + 1:n + 1]))
            for n in range(window - 1, len(points))]


def read_curves(found: Found) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Training loss at each model's best rate, mean over seeds, smoothed."""
    losses: dict[tuple[str, str], dict[int, list[float]]] = {}
    with open(f'{HERE}/curves.csv', encoding='utf-8') as file:
        for model, optimizer, rate, _, tokens, loss in list(csv.reader(file))[1:]:
            if float(rate) == best_rate(found, model, optimizer):
                losses.setdefault((model, optimizer), {}).setdefault(int(tokens), []).append(
                    float(loss))
    return {key: smooth([(tokens, statistics.fmean(of)) for tokens, of in sorted(points.items())])
            for key, points in losses.items()}


def report(found: Found) -> None:
    """Tables on the screen and in table.md; curves.png."""
    curves = read_curves(found)
    lines = ['| model | optimizer | best rate | test perplexity, by seed | Muon over AdamW | over '
             'Llama with ALiBi | tokens to AdamW\'s final loss |', '|' + '---|' * 7]
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            of = at_best(found, model, optimizer)
            if not of:
                continue
            gain = paired(found, (model, 'muon'), (model, 'adamw')) if optimizer == 'muon' else ''
            gap = paired(found, (model, optimizer), ('llama-alibi', optimizer))
            share = ''
            if optimizer == 'muon':
                *_, (total, goal) = curves[model, 'adamw']
                reached = [tokens for tokens, loss in curves[model, 'muon'] if loss <= goal]
                share = f'{reached[0] / total:.2f}' if reached else 'not reached'
            values = ', '.join(f'{of[seed][1]:.3f}' for seed in sorted(of))
            lines.append(f'| {NAMES[model]} | {optimizer} | {best_rate(found, model, optimizer):g} '
                         f'| {values} | {gain} | {gap} | {share} |')
    lines += ['', '| T = 2 over T = 1, all-CEM | |', '|---|---|']
    lines += [f'| {optimizer} | {paired(found, ("cem-2", optimizer), ("cem-1", optimizer))} |'
              for optimizer in OPTIMIZERS]
    lines += ['', '| another Muon, over Muon, all-CEM, T = 1 | |', '|---|---|']
    lines += [f'| {name} | {paired(found, ("cem-1", name), ("cem-1", "muon"))} |'
              for name in VARIANTS]
    print('\n'.join(lines))
    with open(f'{HERE}/table.md', 'w', encoding='utf-8') as file:
        file.write('\n'.join([*lines, '']))
    draw(curves)


def draw(curves: dict[tuple[str, str], list[tuple[int, float]]]) -> None:
    """curves.png: training loss against bytes, and against time by seconds.csv."""
    with open(f'{HERE}/seconds.csv', encoding='utf-8') as file:
        seconds = {(row['model'], row['optimizer']): float(row['seconds_a_step'])
                   for row in csv.DictReader(file)}
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout='constrained')
    for n, model in enumerate(MODELS):
        for optimizer, style in (('adamw', '--'), ('muon', '-')):
            if (model, optimizer) in curves:
                tokens, loss = zip(*curves[model, optimizer], strict=True)
                steps = [t / TOKENS_A_STEP for t in tokens]
                for axes, x in ((panels[0], [t / 1e6 for t in tokens]),
                                (panels[1], [s * seconds[model, optimizer] for s in steps])):
                    axes.plot(x, loss, style, color=f'C{n}', label=f'{NAMES[model]}, {optimizer}')
    panels[0].set(xlabel='million bytes', ylabel='training loss, nats a byte', ylim=(1.15, 2.0))
    panels[1].set(xlabel='seconds on two cores')
    panels[0].legend(fontsize=7)
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.savefig(f'{HERE}/curves.png', dpi=90)


def main(argv: list[str]) -> None:
    if '--time' in argv:
        return time_steps()
    pairs = [(model, optimizer) for optimizer in OPTIMIZERS for model in MODELS]
    pairs += [('cem-1', name) for name in VARIANTS]
    every = [Run(*pair, rate, seed) for pair in pairs for seed in SEEDS
             for rate in (RATES[0] / 2, *RATES, RATES[-1] * 2)]
    found = collect(every)
    while '--draw' not in argv and (runs := next_runs(found)):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(train, runs))
        before, found = found, collect(every)
        if len(found) == len(before):
            raise SystemExit(f'no run finished; see {runs[0].folder}.txt')
    report(found)


if __name__ == '__main__':
    main(sys.argv[1:])

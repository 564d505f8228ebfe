"""
Every figure of the paper, and a few of our own: the runs each needs, done where missing, then drawn.

    python reproduce.py --list                               the figures, their runs, and which are finished
    python reproduce.py fig_attn                             one figure; all: every figure, then the table of claims
    python reproduce.py claims                               the paper's claims, answered from the runs that are finished
    python reproduce.py all --scale=paper                    the plan: torchrun commands, tokens, GPU-hours, disk; --run does it

A run is train.py with the options in the tables below, in out/reproduce/: runs are shared among figures, finished ones are
not done again, cut-off ones go on. What a figure gives goes to results/<scale>/: a PNG, a CSV and a Markdown table.
"""
import csv
import io
import json
import math
import os
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import torch
from scipy.interpolate import Akima1DInterpolator
from scipy.stats import ttest_ind

from configurator import build, fail, read_options
from model import MLP, Attention, ModelConfig, Transformer
from nanocem.energy import energies_along
from nanocem.files import write_whole
from nanocem.runs import last_checkpoint
from nanocem.shards import BUILTIN, Pieces
from nanocem.tokenizers import ByteTokenizer
from prepare_slimpajama import prepare_builtin
from train import TrainConfig, perplexity

matplotlib.use('Agg')
import matplotlib.pyplot as plt

LLAMA = '--attn=llama --mlp=llama --attn_steps=1 --mlp_steps=1'


def attn(T: int, P: str = 'diag') -> str:
    """CEM attention of T steps with preconditioner P among Llama MLPs."""
    return f'--attn=cem --mlp=llama --attn_steps={T} --mlp_steps=1 --preconditioner={P}'


def mlp(T: int, P: str = 'diag') -> str:
    """CEM MLPs of T steps with preconditioner P among Llama attention."""
    return f'--attn=llama --mlp=cem --attn_steps=1 --mlp_steps={T} --preconditioner={P}'


def cem(T: int) -> str:
    """All-CEM, the paper's full model."""
    return f'--attn=cem --mlp=cem --attn_steps={T} --mlp_steps={T} --preconditioner=diag_lowrank'


P_NAMES = {'none': 'no preconditioner', 'diag': 'diagonal', 'diag_lowrank': 'diagonal + low rank'}
MATCHED, ALIBI, ROPE = ' --mlp_match=params', ' --positions=alibi', ' --positions=rope --kq_diag=none --score_scale=head'


@dataclass(frozen=True)
class Scale:
    """Where the figures are run: common options of every run by model size, the learning-rate sweep, seeds, launcher."""
    name: str
    sizes: dict[str, str]
    rates: tuple[float, ...]
    sweep_sizes: dict[str, str]  # further sizes of the sweep alone
    seeds: tuple[int, ...]
    launcher: tuple[str, ...]


# The learning rate of a size is Llama's best of the sweep, as in the paper.
SCALES = {
    'mini': Scale('mini', {s: f'config/ladder.py --size={s} --learning_rate=0.016' for s in ('nano', 'micro')},
                  (0.004, 0.008, 0.016, 0.032, 0.064), {}, (1, 2, 3), (sys.executable,)),
    'paper': Scale('paper', {s: f'--size={s} --learning_rate=0.002' for s in ('86m', '108m', '134m', '162m')},
                   (0.0005, 0.001, 0.002, 0.004, 0.008), {'256m': '--size=256m --learning_rate=0.002'}, (1,),
                   ('torchrun', '--nproc_per_node=8')),
}
MFU, A100_FLOPS = 0.4, 312e12  # what the plan reckons with
PAPER_GPU_HOURS = 10_000  # all of the paper's results (appendix, "Compute resources")


@dataclass(frozen=True)
class Figure:
    """What a figure compares: group -> label -> options of train.py, at every size of the scale."""
    title: str
    draw: Callable[[list['Run']], plt.Figure]
    groups: dict[str, dict[str, str]]
    scales: tuple[str, ...] = ('mini', 'paper')


class Run(NamedTuple):
    """One bar, marker or line: at one size, trained once a seed; `results` are those of its finished seeds."""
    size: str
    group: str
    label: str
    options: str
    results: Sequence[dict[str, Any]] = ()

    @property
    def values(self) -> list[float]:
        return [r['test_perplexity'] for r in self.results]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


def canonical(options: str) -> str:
    """The same options in one spelling: config files first, of each --key its last value."""
    words = options.split()
    last = {word.partition('=')[0]: word for word in words if word.startswith('--')}
    return ' '.join([*(word for word in words if not word.startswith('--')), *last.values()])


def runs_of(name: str, scale: Scale) -> list[Run]:
    """The runs of a figure at a scale. The sweep's groups are the scale's learning rates, and it has sizes of its own."""
    groups, sizes = FIGURES[name].groups, scale.sizes
    if name == 'fig_lr':
        groups = {f'{rate:g}': {label: f'{options} --learning_rate={rate:g}' for label, options in groups[''].items()}
                  for rate in scale.rates}
        sizes = {**scale.sizes, **scale.sweep_sizes}
    return [Run(size, group, label, canonical(f'{base} {options}')) for size, base in sizes.items()
            for group, labels in groups.items() for label, options in labels.items()]


def folder(options: str, seed: int) -> str:
    """Where a run lives."""
    words = [word.removeprefix('--').removeprefix('config/').removesuffix('.py') for word in options.split()]
    return os.path.join('out', 'reproduce', '_'.join([*words, f'seed={seed}']))


@cache
def configs(options: str) -> tuple[TrainConfig, ModelConfig]:
    """What train.py makes of a run's options."""
    given = read_options(options.split(), TrainConfig, ModelConfig)
    train = build(TrainConfig, given)
    given.setdefault('vocab_size', ByteTokenizer.vocab_size if train.data == BUILTIN else 32_000)
    return train, build(ModelConfig, given)


def read_json(path: str) -> dict[str, Any] | None:
    """None where there is no such file."""
    if not os.path.exists(path):
        return None
    with open(path, encoding='utf-8') as file:
        return json.load(file)


def finished(options: str, seed: int) -> dict[str, Any] | None:
    """A run's result.json, None until it is finished. SystemExit if what the folder holds was begun with other settings: a
    config file or a default has changed since."""
    out_dir = folder(options, seed)
    if config := read_json(f'{out_dir}/config.json'):
        saved = {**config['train'], **config['model']}
        train, model = map(asdict, configs(options))
        own = ('out_dir', 'init_from', 'seed', 'tensorboard', 'sample_tokens')
        if changed := [k for k, v in {**train, **model}.items() if k not in own and k in saved and saved[k] != v]:
            fail(f'{out_dir} holds a run of another {", ".join(changed)}: remove it to train it anew')
    result = read_json(f'{out_dir}/result.json')
    return result and {**result, 'seed': seed, 'out_dir': out_dir}


def results_of(options: str, scale: Scale) -> list[dict[str, Any]]:
    """The results of a run's finished seeds."""
    return [result for seed in scale.seeds if (result := finished(options, seed))]


def read_log(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that a finished run logged."""
    with open(os.path.join(result['out_dir'], 'log.jsonl'), encoding='utf-8') as file:
        return [json.loads(line) for line in file]


def wanted(names: Iterable[str], scale: Scale) -> list[tuple[str, int]]:
    """The options and seeds of all runs of these figures, each once, a seed after the other."""
    return list(dict.fromkeys((run.options, seed) for seed in scale.seeds for name in names for run in runs_of(name, scale)))


class Cost(NamedTuple):
    tokens: float
    flops: float  # of training
    disk: float  # bytes: three checkpoints of weights and AdamW's two moments, float32


@cache
def cost(options: str) -> Cost:
    """What a run takes, from its options alone."""
    train, cfg = configs(options)
    with torch.device('meta'):
        model, llama = Transformer(cfg), Transformer(cfg.llama())
    tokens = train.tokens or train.tokens_per_param * llama.num_params()
    return Cost(tokens, tokens * model.flops_per_token(), 3 * 12 * model.num_params())


def command(options: str, seed: int, scale: Scale) -> list[str]:
    """The command line of a run."""
    out_dir = folder(options, seed)
    words = [*scale.launcher, 'train.py', *options.split(), f'--seed={seed}', f'--out_dir={out_dir}', '--tensorboard=False',
             '--sample_tokens=0']
    return [*words, '--init_from=resume'] if os.path.exists(os.path.join(out_dir, 'config.json')) else words


def do_run(options: str, seed: int, scale: Scale) -> str | None:
    """Do or finish one run, on one CPU thread, so that its numbers depend on nothing else that runs; None if it went well,
    else its exit code and the last line it printed. torchrun's runs print for themselves."""
    environment, quiet = {**os.environ, 'OMP_NUM_THREADS': '1'}, scale.launcher[0] == sys.executable
    done = subprocess.run(command(options, seed, scale), capture_output=quiet, text=True, env=environment, check=False)
    last_line = (done.stderr or done.stdout or '').strip().rpartition('\n')[2]
    return None if done.returncode == 0 else f'exit code {done.returncode}. {last_line}'


def run_missing(names: Sequence[str], scale: Scale, jobs: int) -> int:
    """All unfinished runs of these figures; returns how many failed: they are named, the rest go on."""
    runs = wanted(names, scale)
    missing = [run for run in runs if not finished(*run)]
    print(f'{len(runs)} runs, {len(runs) - len(missing)} finished', flush=True)
    if any('ladder' in options for options, _ in missing) and not os.path.exists(f'{BUILTIN}/meta.json'):
        prepare_builtin(BUILTIN)  # once, before runs side by side would
    total, done, failed, start = sum(cost(options).flops for options, _ in missing), 0.0, 0, time.monotonic()
    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = {pool.submit(do_run, *run, scale): run for run in missing}
        for n, future in enumerate(as_completed(waiting), 1):
            options, seed = waiting[future]
            done += cost(options).flops
            left = timedelta(seconds=round((time.monotonic() - start) * (total / done - 1)))
            if error := future.result():
                failed, text = failed + 1, f'FAILED: {error}'
            else:
                text = f'test perplexity {finished(options, seed)["test_perplexity"]:.3f}'
            print(f'{n}/{len(missing)} {folder(options, seed)}: {text} | ETA {left}', flush=True)
    except KeyboardInterrupt:
        pool.shutdown(cancel_futures=True)
        fail('stopped; the same command goes on')
    return failed


# Figures: what is drawn of the runs.

COLOURS = {**dict.fromkeys(('Llama', 'Llama, RoPE'), 'hotpink'), 'Llama, ALiBi': 'plum',
           **dict.fromkeys(('CEM MLP, parameter-matched', 'T = 1'), 'tab:orange'),
           **dict.fromkeys(('CEM', 'CEM attention', 'CEM attention, ALiBi', 'CEM MLP', 'T = 2'), 'tab:blue'),
           P_NAMES['none']: 'tab:gray', P_NAMES['diag']: 'tab:cyan', P_NAMES['diag_lowrank']: 'tab:blue'}
MARKERS = {'Llama': 'D', 'Llama, ALiBi': 'D', 'CEM MLP, parameter-matched': '^'}
AREAS = {'plain reuse': 'moccasin', 'dimension-matched': 'lightblue', 'parameter-matched': 'mistyrose'}


def grouped(runs: Iterable[Run], by: Literal['size', 'group']) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(getattr(run, by), []).append(run)
    return found


def panels(found: list[Run], columns: int = 0) -> tuple[plt.Figure, Iterator[tuple[Any, str, list[Run]]]]:
    """A figure with a panel a size side by side, or with a row of `columns` panels a size: (axes, size, its runs)."""
    sizes = grouped(found, 'size')
    shape, area = ((len(sizes), columns), (9, 3.4 * len(sizes))) if columns else ((1, len(sizes)), (5.2 * len(sizes), 4))
    figure, grid = plt.subplots(*shape, figsize=area, squeeze=False)
    return figure, ((axes, *item) for axes, item in zip(grid if columns else grid[0], sizes.items(), strict=True))


def draw_scatter(found: list[Run]) -> plt.Figure:
    """Test perplexity against parameters; CEM linked to its Llama, tokens above the markers (the paper's 2a and 2b)."""
    figure, axes = plt.subplots(figsize=(6, 4.2))
    for same in grouped(found, 'size').values():
        llama = next((run for run in same if run.label == 'Llama'), None)
        for run in same:
            x, y = run.results[0]['parameters'] / 1e6, run.mean
            if llama and run is not llama:
                axes.plot([llama.results[0]['parameters'] / 1e6, x], [llama.mean, y], color='lightgray', zorder=0)
            axes.errorbar(x, y, run.std, color=COLOURS[run.label], marker=MARKERS.get(run.label, 'o'), ms=8,
                          capsize=3, ls='', label=run.label)
            axes.annotate(f'{run.results[0]["tokens"] / 1e6:,.1f}M tokens', (x, y), (0, 9), textcoords='offset points',
                          ha='center', fontsize=7)
    axes.set(xlabel='parameters (millions)', ylabel='test perplexity')
    axes.margins(0.15)
    legend(axes)
    return figure


def draw_bars(found: list[Run]) -> plt.Figure:
    """A panel a size, a block of bars a group, a colour a label; Llama is the dashed line, as in the paper's 2c and 2d."""
    figure, parts = panels(found)
    for axes, size, same in parts:
        bars = [run for run in same if run.label != 'Llama']
        labels, groups = list(dict.fromkeys(run.label for run in bars)), grouped(bars, 'group')
        width = 0.8 / max(map(len, groups.values()), default=1)
        for g, (group, block) in enumerate(groups.items()):
            if group in AREAS:
                axes.axvspan(g - 0.48, g + 0.48, color=AREAS[group], alpha=0.5, zorder=0)
            for n, run in enumerate(block):
                colour = COLOURS.get(run.label, f'C{labels.index(run.label)}')
                x = g + (n - (len(block) - 1) / 2) * width
                axes.bar(x, run.mean, width * 0.9, yerr=run.std or None, color=colour, capsize=3, label=run.label)
                axes.annotate(f'{run.mean:.2f}', (x, run.mean + run.std), (0, 3), textcoords='offset points', ha='center',
                              fontsize=7)
        for run in same:
            if run.label == 'Llama':
                axes.axhline(run.mean, color=COLOURS['Llama'], ls='--', label='Llama')
                axes.axhspan(run.mean - run.std, run.mean + run.std, color=COLOURS['Llama'], alpha=0.15, zorder=0)
        values = [v for run in same for v in run.values]
        spread = max(values) - min(values)
        axes.set_ylim(min(values) - 0.25 * spread - 1e-3, max(values) + 0.3 * spread + 1e-3)
        axes.set(title=size, ylabel='test perplexity')
        axes.set_xticks(range(len(groups)), [textwrap.fill(group, 16) for group in groups], fontsize=8)
        legend(axes, ncols=2)
    return figure


def draw_sweep(found: list[Run]) -> plt.Figure:
    """Test perplexity against learning rate, Akima's curve through the means, stars at its optima (the paper's 3a)."""
    figure, axes = plt.subplots(figsize=(6, 4.5))
    lowest = []
    for n, (size, same) in enumerate(grouped(found, 'size').items()):
        for label, colour in (('Llama', 'tab:orange'), ('CEM', 'tab:blue')):
            points = sorted((float(run.group), run.mean, run.std) for run in same if run.label == label)
            if len(points) < 2:
                continue
            rates, means, stds = zip(*points, strict=True)
            axes.errorbar(rates, means, stds, color=colour, marker='osDv^'[n % 5], ls='', label=f'{label}, {size}')
            fine = np.geomspace(rates[0], rates[-1], 200)
            axes.plot(fine, Akima1DInterpolator(np.log(rates), means)(np.log(fine)), color=colour, lw=1)
            best, value = akima_optimum(rates, means)
            axes.plot(best, value, '*', color=colour, ms=14, mec='black')
            lowest.append(value)
    axes.set(xscale='log', xlabel='learning rate', ylabel='test perplexity')
    axes.set_ylim(0.95 * min(lowest, default=1), 1.5 * max(lowest, default=2))  # rates that diverge leave the picture
    ticks = sorted({float(run.group) for run in found})
    axes.set_xticks(ticks, [f'{rate:g}' for rate in ticks])
    axes.minorticks_off()
    legend(axes)
    return figure


def draw_steps(found: list[Run]) -> plt.Figure:
    """Test perplexity and mean energy against the number of steps at test time; a ring at the number trained with."""
    figure, parts = panels(found, columns=2)
    for row, size, same in parts:
        for n, run in enumerate(same):
            inside = [look_inside(r['out_dir']) for r in run.results]
            for axes, key in zip(row, ('perplexity', 'energy'), strict=True):
                values = np.array([i[key] for i in inside])
                T, mean = np.arange(1, values.shape[1] + 1), values.mean(axis=0)
                axes.errorbar(T, mean, values.std(axis=0, ddof=1) if len(values) > 1 else None, color=f'C{n}', marker='o', ms=4,
                              capsize=2, label=f'trained with {run.label}')
                trained = inside[0]['trained_steps']
                axes.plot(trained, mean[trained - 1], 'o', ms=12, mfc='none', mec=f'C{n}')
                axes.set(xlabel='T at test time', title=size)
        row[0].set(ylabel='test perplexity', yscale='log')
        row[1].set(ylabel='energy, summed over sublayers')
        legend(row[0])
    return figure


def draw_energy(found: list[Run]) -> plt.Figure:
    """The energy of every sublayer along its steps, less its value at the start; the trained T is the dashed line."""
    figure, parts = panels(found, columns=2)
    for row, size, same in parts:
        inside = [look_inside(r['out_dir']) for r in same[0].results]
        for axes, kind in zip(row, ('attn', 'mlp'), strict=True):
            energies = np.mean([i[kind] for i in inside], axis=0)  # (layers, steps + 1)
            for layer, energy in enumerate(energies):
                axes.plot(energy - energy[0], marker='o', ms=4, label=f'layer {layer + 1}')
            axes.axvline(inside[0]['trained_steps'], color='gray', ls='--', lw=1)
            axes.set(xlabel='step t', ylabel='energy at step t less at 0', title=f'{size}, {kind}')
            legend(axes)
    return figure


def draw_curves(found: list[Run]) -> plt.Figure:
    """Training loss against tokens, mean over seeds, smoothed."""
    figure, parts = panels(found)
    for axes, size, same in parts:
        for run in same:
            logs = [[(line['tokens'], line['loss']) for line in read_log(r) if 'lr' in line] for r in run.results]
            tokens, loss = np.array(logs, dtype=float).mean(axis=0).T  # a skipped step's loss is None: nan, a gap in the line
            window = max(1, len(loss) // 10)
            axes.plot(tokens[window - 1:] / 1e6, np.convolve(loss, np.ones(window) / window, 'valid'), label=run.label)
        axes.set(xlabel='million tokens', ylabel='training loss, nats a token', title=size)
        axes.grid(alpha=0.3)
        legend(axes)
    return figure


def legend(axes: plt.Axes, **options: Any) -> None:
    """Each label once."""
    handles, labels = axes.get_legend_handles_labels()
    handle = dict(zip(labels, handles, strict=True))
    axes.legend(handle.values(), handle.keys(), fontsize=7, **options)


def akima_optimum(rates: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Where Akima's interpolant of `values` over log(rates) (increasing) is lowest, and its value there; of equals the lowest
    rate. At an edge of the sweep the optimum may lie beyond. ValueError below two points."""
    if len(rates) < 2:
        raise ValueError(f'{len(rates)} rates: a sweep needs at least two')
    curve = Akima1DInterpolator(x := np.log(rates), values)
    flat = curve.derivative().roots(extrapolate=False)
    candidates = np.sort(np.concatenate([x, flat[np.isfinite(flat)]]))  # roots() gives nan where a whole piece is flat
    best = candidates[np.argmin(np.round(curve(candidates), 12))]
    return float(np.exp(best)), float(curve(best))


@torch.no_grad()
def look_inside(out_dir: str, max_steps: int = 8, tokens: int = 4096) -> dict[str, Any]:
    """A trained all-CEM model at test time, on some test tokens, kept in its folder: perplexity and energy (mean over tokens,
    summed over sublayers) after T = 1, ..., max_steps steps in every sublayer, and each sublayer's energy before every step,
    all others doing the steps they were trained with: attn and mlp, (layers, max_steps + 1)."""
    path = os.path.join(out_dir, 'energies.json')
    if found := read_json(path):
        return found
    state = last_checkpoint(out_dir) or fail(f'{out_dir}: its checkpoint is gone; remove the folder to train it again')
    cfg = ModelConfig(**state['model_config'])
    model = Transformer(cfg)
    model.load_state_dict(state['model'])
    data = Pieces(state['data_dir'], 'test', cfg.context_length)
    pieces = min(math.ceil(tokens / data.length), len(data))
    x, y = data.batch(np.linspace(0, len(data), pieces, endpoint=False).astype(int))
    seen: dict[Attention | MLP, tuple[Any, ...]] = {}  # what a sublayer was given last
    for block in model.blocks:
        for layer in (block.attn, block.mlp):
            layer.register_forward_hook(lambda layer, given, _: seen.update({layer: given}))

    def energies(layer: Attention | MLP, steps: int) -> list[float]:
        return energies_along(layer, *seen[layer], steps=steps).mean(dim=(1, 2)).tolist()

    found = {'trained_steps': cfg.attn_steps, 'perplexity': [], 'energy': [], 'attn': [], 'mlp': []}
    for T in range(1, max_steps + 1):
        model.set_steps(T, T)
        found['perplexity'].append(perplexity(float(model(x, y)[1])))
        found['energy'].append(sum(energies(layer, T)[-1] for layer in seen))
    model.set_steps(cfg.attn_steps, cfg.mlp_steps)
    model(x)
    for layer in seen:
        found['attn' if isinstance(layer, Attention) else 'mlp'].append(energies(layer, max_steps))
    write_whole(path, json.dumps(found).encode())
    return found


FIGURES: dict[str, Figure] = {
    'fig_attn': Figure('CEM attention against Llama, T = 1', draw_scatter, {
        '': {'Llama': LLAMA, 'Llama, ALiBi': LLAMA + ALIBI, 'CEM attention': attn(1, 'none')}}),
    'fig_mlp': Figure('CEM MLP against Llama, T = 1', draw_scatter, {
        '': {'Llama': LLAMA, 'CEM MLP': mlp(1, 'none'), 'CEM MLP, parameter-matched': mlp(1, 'none') + MATCHED}}),
    'fig_attn_T': Figure('CEM attention: steps and preconditioners', draw_bars, {
        '': {'Llama': LLAMA}, **{f'T = {T}': {P_NAMES[P]: attn(T, P) for P in P_NAMES} for T in (1, 2)},
        'T = 3': {P_NAMES['diag']: attn(3)}}),
    'fig_mlp_T': Figure('CEM MLP: steps and preconditioners', draw_bars, {
        '': {'Llama': LLAMA}, **{f'T = {T}': {P_NAMES[P]: mlp(T, P) for P in P_NAMES} for T in (1, 2)},
        'T = 3': {P_NAMES['diag']: mlp(3)}}),
    'fig_lr': Figure('Learning rate: Llama, and all-CEM with T = 2, diagonal + low rank', draw_sweep, {
        '': {'Llama': LLAMA, 'CEM': cem(2)}}),
    'fig_kq_diag': Figure('The diagonal of A_k: CEM attention, T = 1, diagonal preconditioner', draw_bars, {
        '': {'Llama': LLAMA}, 'none': {'CEM attention': attn(1) + ' --kq_diag=none'}, 'shared': {'CEM attention': attn(1)},
        'per head': {'CEM attention': attn(1) + ' --kq_diag=per_head'}}),
    'fig_reuse_mlp': Figure('MLP: recursion within a layer against plain reuse of it', draw_bars, {
        'plain reuse': {'T = 1': LLAMA, 'T = 2': LLAMA + ' --mlp_steps=2'},
        'dimension-matched': {'T = 1': mlp(1), 'T = 2': mlp(2)},
        'parameter-matched': {'T = 1': mlp(1) + MATCHED, 'T = 2': mlp(2) + MATCHED}}),
    'fig_reuse_attn': Figure('Attention: recursion within a layer against plain reuse of it', draw_bars, {
        'plain reuse': {'T = 1': LLAMA, 'T = 2': LLAMA + ' --attn_steps=2'},
        'dimension-matched': {'T = 1': attn(1), 'T = 2': attn(2)}}),
    'fig_test_T': Figure('All-CEM models with more or fewer steps at test time', draw_steps, {
        '': {f'T = {T}': cem(T) for T in (1, 2, 3)}}),
    'fig_energy': Figure('Energy along the steps of each layer, all-CEM, T = 2', draw_energy, {'': {'CEM': cem(2)}}),
    'fig_rope': Figure('CEM attention: exact RoPE against ALiBi with a shared diagonal', draw_bars, {
        '': {'Llama': LLAMA},
        **{f'T = {T}': {'ALiBi, shared diagonal': attn(T), 'exact RoPE': attn(T) + ROPE} for T in (1, 2)}}),
    'fig_exact': Figure('The whole gradient against Algorithm 1, CEM attention', draw_bars, {
        '': {'Llama': LLAMA},
        **{f'T = {T}': {'Algorithm 1': attn(T), 'exact update': attn(T) + ' --exact_update'} for T in (1, 2)}}),
    'fig_choices': Figure('Scale of the scores and start of the residual', draw_bars, {
        '': {'Llama': LLAMA},
        **{f'attention, T = {T}': {'Algorithm 1': attn(T), 'score_scale=head': attn(T) + ' --score_scale=head',
                                   'residual=raw': attn(T) + ' --residual=raw'} for T in (1, 2)},
        **{f'MLP, T = {T}': {'Algorithm 1': mlp(T), 'residual=raw': mlp(T) + ' --residual=raw'} for T in (1, 2)}}),
    'fig_heads': Figure("Heads: ALiBi's slopes 2^(-8k/K) begin flat where K is small (CEM attention, T = 1)", draw_bars, {
        f'{K} heads': {'Llama, RoPE': heads + LLAMA, 'Llama, ALiBi': heads + LLAMA + ALIBI,
                       'CEM attention, ALiBi': heads + attn(1)}
        for K, heads in ((2, '--n_head=2 '), (4, '--n_head=4 '), (8, ''))}, ('mini',)),
    'fig_remedies': Figure('Where T = 2 did not help: half the learning rate, twice the tokens, half the step', draw_bars, {
        remedy: {'attn, T = 1': attn(1) + more, 'attn, T = 2': attn(2) + more,
                 'mlp, T = 1': mlp(1) + more.replace('attn', 'mlp'), 'mlp, T = 2': mlp(2) + more.replace('attn', 'mlp')}
        for remedy, more in (('as in the other figures', ''), ('half the rate', ' --learning_rate=0.008'),
                             ('twice the tokens', ' --tokens_per_param=40'), ('half the step', ' --attn_step_size=0.5'))},
        ('mini',)),
    'fig_init': Figure('Initial weights N(0, sigma^2), and where the diagonal starts', draw_bars, {
        '': {'Llama': LLAMA},
        **{kind: {'0.02': options + ' --init_std=0.02', 'default': options, '0.2': options + ' --init_std=0.2'}
           for kind, options in (('Llama, sigma', LLAMA), ('all-CEM, sigma', cem(2)))},
        'all-CEM, d_k': {'d_k from 0': cem(2), 'd_k from 1': cem(2) + ' --kq_diag_init=1'}}, ('mini',)),
    'fig_curves': Figure('Training: Llama, and all-CEM with T steps', draw_curves, {
        '': {'Llama': LLAMA, **{f'CEM, T = {T}': cem(T) for T in (1, 2, 3)}}}),
}


def save(scale: Scale, name: str, data: bytes) -> None:
    """A file of results/<scale>/."""
    os.makedirs(f'results/{scale.name}', exist_ok=True)
    write_whole(f'results/{scale.name}/{name}', data)


def save_table(scale: Scale, name: str, lines: list[str]) -> None:
    """A Markdown file of results/<scale>/, printed as well."""
    save(scale, name, '\n'.join([*lines, '']).encode())
    print('\n'.join(lines), flush=True)


def write(name: str, scale: Scale) -> None:
    """results/<scale>/<figure>.png, .csv (a line a seed) and .md (a line a run)."""
    every = [run._replace(results=results_of(run.options, scale)) for run in runs_of(name, scale)]
    found = [run for run in every if run.results]
    if not found:
        print(f'{name}: no run is finished')
        return
    text, image = io.StringIO(), io.BytesIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(['size', 'group', 'model', 'options', 'parameters', 'tokens', 'seed', 'val_perplexity', 'test_perplexity'])
    lines = [f'{FIGURES[name].title}. Test perplexity, mean ± standard deviation over seeds.', '',
             '| size | group | model | parameters | tokens | test perplexity | to Llama | seeds |', '|' + '---|' * 8]
    for run in found:
        for r in run.results:
            writer.writerow([run.size, run.group, run.label, run.options, r['parameters'], r['tokens'], r['seed'],
                             f'{r["val_perplexity"]:.4f}', f'{r["test_perplexity"]:.4f}'])
        llamas = [other for other in found if other.size == run.size and other.options.endswith(LLAMA)]
        llama = next((other for other in llamas if other.group == run.group), llamas[0] if llamas else None)
        spread = f' ± {run.std:.3f}' if len(run.results) > 1 else ''
        relative = f'{100 * (run.mean / llama.mean - 1):+.1f}%' if llama else ''
        lines.append(f'| {run.size} | {run.group} | {run.label} | {run.results[0]["parameters"]:,} | '
                     f'{run.results[0]["tokens"]:,} | {run.mean:.3f}{spread} | {relative} | {len(run.results)} |')
    figure = FIGURES[name].draw(found)
    figure.suptitle(FIGURES[name].title, fontsize=10)
    figure.tight_layout()
    figure.savefig(image, format='png', dpi=100)
    plt.close(figure)
    save(scale, f'{name}.csv', text.getvalue().encode())
    save(scale, f'{name}.png', image.getvalue())
    save_table(scale, f'{name}.md', lines)


# Claims: the paper's findings as comparisons of test perplexity, A against B.

class Test(NamedTuple):
    """`kind` is what is claimed of A's mean test perplexity against B's: better, worse; no better: by less than 1%; close: at
    most 2% worse; alike: within 2% either way. Or higher: of A's best learning rate; none: of A's spikes and skipped steps."""
    text: str
    kind: Literal['better', 'worse', 'no better', 'close', 'alike', 'higher', 'none']
    A: str
    B: str = ''


CLAIMS: dict[str, tuple[str, list[Test]]] = {
    'a': ('CEM attention, T = 1: close to Llama with half the attention weights', [
        Test('CEM attention against Llama', 'close', attn(1, 'none'), LLAMA),
        Test('CEM attention against Llama with ALiBi', 'close', attn(1, 'none'), LLAMA + ALIBI)]),
    'b': ('CEM MLP, T = 1: worse dimension-matched, a little better parameter-matched', [
        Test('CEM MLP, same width, against Llama', 'worse', mlp(1, 'none'), LLAMA),
        Test('CEM MLP, same parameters, against Llama', 'better', mlp(1, 'none') + MATCHED, LLAMA)]),
    'c': ('T = 2 beats T = 1 for both; attention at T = 2 can beat Llama', [
        *(Test(f'{kind}, {P_NAMES[P]}, T = 2 against 1', 'better', layer(2, P), layer(1, P))
          for kind, layer in (('attention', attn), ('MLP', mlp)) for P in P_NAMES),
        Test('attention, T = 2, against Llama', 'better', attn(2), LLAMA)]),
    'd': ('no consistent gain at T = 3', [
        Test('attention, T = 3 against 2', 'no better', attn(3), attn(2)),
        Test('MLP, T = 3 against 2', 'no better', mlp(3), mlp(2))]),
    'e': ('preconditioners make little difference', [
        Test(f'{kind}, T = {T}, {P_NAMES[P]} against none', 'alike', layer(T, P), layer(T, 'none'))
        for kind, layer in (('attention', attn), ('MLP', mlp)) for T in (1, 2) for P in ('diag', 'diag_lowrank')]),
    'f': ('a diagonal in A_k is essential; one shared by the heads is close to one per head', [
        Test('shared against none', 'better', attn(1), attn(1) + ' --kq_diag=none'),
        Test('shared against per head', 'close', attn(1), attn(1) + ' --kq_diag=per_head')]),
    'g': ('plain layer reuse gives little or nothing, recursion within the layer does', [
        Test('Llama, MLP twice against once', 'no better', LLAMA + ' --mlp_steps=2', LLAMA),
        Test('Llama, attention twice against once', 'no better', LLAMA + ' --attn_steps=2', LLAMA),
        Test('CEM MLP, same parameters, T = 2 against 1', 'better', mlp(2) + MATCHED, mlp(1) + MATCHED)]),
    'h': ('all-CEM, T = 2, trains stably and comes near Llama with fewer parameters', [
        Test('all-CEM against Llama', 'close', cem(2), LLAMA), Test('loss spikes and skipped steps', 'none', cem(2))]),
    'i': ('CEM prefers a higher learning rate', [
        Test('best rate, all-CEM over Llama', 'higher', cem(2), LLAMA)]),
    'j': ('deeper recursion helps, not monotonically', []),  # synthetic_gp.py's
    'k': ('exact RoPE against ALiBi with a diagonal, in CEM attention (ours)', [
        Test(f'T = {T}, exact RoPE against ALiBi', 'better', attn(T) + ROPE, attn(T)) for T in (1, 2)]),
}


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean a less mean b, and the half-width of its 95% interval (Welch's t: spreads differ), infinite with one seed."""
    d = statistics.fmean(a) - statistics.fmean(b)
    if min(len(a), len(b)) < 2:
        return d, math.inf
    interval = ttest_ind(a, b, equal_var=False).confidence_interval()
    return d, float(interval.high - interval.low) / 2


def verdict(kind: str, d: float, h: float) -> str:
    """What a difference d, 95% sure within +- h, says of a claim."""
    low, high = d - h, d + h
    holds, fails = {
        'better': (high < 0, low > 0), 'worse': (low > 0, high < 0), 'no better': (low > -0.01, high < -0.01),
        'close': (high < 0.02, low > 0.02), 'alike': (max(-low, high) < 0.02, low > 0.02 or high < -0.02),
        'higher': (low > 0, high < 0)}[kind]
    return 'holds' if holds else 'does not hold at this scale' if fails else 'within noise'


def compare(test: Test, base: str, scale: Scale) -> tuple[str, str]:
    """A test at the size of options `base`: what stands in its column, and the verdict ('' where a side is not run)."""
    a, b = ([r['test_perplexity'] for r in results_of(canonical(f'{base} {side}'), scale)] for side in (test.A, test.B))
    if not (a and b):
        return 'not run', ''
    d, h = (x / statistics.fmean(b) for x in difference(a, b))
    return f'{100 * d:+.1f} ± {100 * h:.1f}%', verdict(test.kind, d, h)


def compare_rates(test: Test, base: str, scale: Scale) -> tuple[str, str]:
    """The same of the best learning rates, each Akima's optimum of a seed's sweep."""
    logs: list[list[float]] = [[], []]
    for values, side in zip(logs, (test.A, test.B), strict=True):
        for seed in scale.seeds:
            sweep = [finished(canonical(f'{base} {side} --learning_rate={rate:g}'), seed) for rate in scale.rates]
            if all(sweep):
                values.append(math.log(akima_optimum(scale.rates, [r['test_perplexity'] for r in sweep])[0]))
    if not all(logs):
        return 'not run', ''
    d, h = difference(*logs)
    a, b = (math.exp(statistics.fmean(v)) for v in logs)
    return f'{a:.4f} / {b:.4f} = {math.exp(d):.2f} (x or / {math.exp(h):.2f})', verdict(test.kind, d, h)


def count_events(test: Test, base: str, scale: Scale) -> tuple[str, str]:
    """The same of A's loss spikes and skipped steps."""
    logs = [read_log(result) for result in results_of(canonical(f'{base} {test.A}'), scale)]
    if not logs:
        return 'not run', ''
    events, steps = sum('event' in line for log in logs for line in log), sum(log[-1]['step'] for log in logs)
    return f'{events} in {steps:,} steps', 'does not hold at this scale' if events else 'holds'


def recursion_on_gp(sizes: int) -> str:
    """Claim j, from synthetic_gp.py's table."""
    start = f'| j | {CLAIMS["j"][0]} | train RMSE of the Gaussian-process table'
    try:
        with open('results/gp/table.csv', encoding='utf-8') as file:
            train = {(r['kernel'], r['model']): float(r['train_rmse']) for r in csv.DictReader(file)}
        kernels = dict.fromkeys(kernel for kernel, _ in train)
        rmse = np.array([[train[kernel, f'CEM-T{T}'] for T in (1, 2, 4, 8)] for kernel in kernels])
    except (FileNotFoundError, KeyError):  # no table, or one of other models
        return f'{start} {"| " * sizes}| not run: python synthetic_gp.py |'
    falls = np.diff(rmse) < 0  # (kernels, 3)
    two, four, eight = falls.sum(axis=0)
    said = 'does not hold' if not falls[:, 0].any() else 'holds' if falls[:, 0].all() and not falls.all() else 'holds in part'
    return (f'{start} | T = 2 below 1, 4 below 2, 8 below 4 on {two}, {four}, {eight} of {len(kernels)} kernels '
            f'{"| " * (sizes - 1)}| {said} |')


def claims(scale: Scale) -> None:
    """results/<scale>/claims.md: every claim with its numbers, as far as the runs are finished."""
    lines = ['Mean test perplexity of A over that of B, less one, with its 95% interval over seeds (Welch), each by itself. '
             '"No better": by less than 1%; "close": at most 2% worse; "alike": within 2% either way.', '',
             f'| | claim | A against B | {" | ".join(scale.sizes)} | |', '|' + '---|' * (len(scale.sizes) + 4)]
    for key, (text, tests) in CLAIMS.items():
        if key == 'j':
            lines.append(recursion_on_gp(len(scale.sizes)))
        for n, test in enumerate(tests):
            answer = {'higher': compare_rates, 'none': count_events}.get(test.kind, compare)
            answers = [answer(test, base, scale) for base in scale.sizes.values()]
            said = ' / '.join(dict.fromkeys(said for _, said in answers if said))  # what the sizes say, once where they agree
            first = (key, text) if n == 0 else ('', '')
            lines.append(f'| {" | ".join([*first, f"{test.text} ({test.kind})", *(cell for cell, _ in answers), said])} |')
    save_table(scale, 'claims.md', lines)


def plan(names: Sequence[str], scale: Scale) -> None:
    """The commands of a scale's unfinished runs, and what all its runs take on A100s at a stated utilisation."""
    rows, counted = [], []
    for name in names:
        runs = wanted([name], scale)
        new = [run for run in runs if run not in counted]
        rows.append((name, len(runs), new))
        counted += new
    for options, seed in counted:
        if not finished(options, seed):
            print(' '.join(command(options, seed, scale)))
    print('\n| figure | runs | new ones | tokens | training FLOPs | GPU-hours | disk |\n|---|---|---|---|---|---|---|')
    for name, n, new in [*rows, ('all', len(counted), counted)]:
        costs = [cost(options) for options, _ in new]
        flops = sum(c.flops for c in costs)
        print(f'| {name} | {n} | {len(new)} | {sum(c.tokens for c in costs) / 1e9:,.1f} B | {flops:.2e} | '
              f'{flops / MFU / A100_FLOPS / 3600:,.0f} | {sum(c.disk for c in costs) / 1e9:,.0f} GB |')
    print(f'\nGPU-hours of A100s ({A100_FLOPS / 1e12:.0f} TFLOP/s) at an MFU of {MFU:.0%}; a run that figures share is counted '
          f'once. The paper: on the order of {PAPER_GPU_HOURS:,} GPU-hours for all its results.')


@dataclass
class ReproduceConfig:
    """Which runs, and how."""
    scale: Literal['mini', 'paper'] = 'mini'  # mini: laptop-sized models on the built-in corpus; paper: its sizes and tokens
    seeds: tuple[int, ...] | None = None  # every run is done once a seed; default: 1, 2, 3 at mini, 1 at paper
    sizes: tuple[str, ...] | None = None  # of the scale's model sizes; default: all
    jobs: int | None = None  # runs side by side; default: one a core at mini, one at paper
    run: bool = False  # at scale=paper: execute the commands instead of printing them
    list: bool = False  # print the runs and whether they are finished, and do nothing

    def __post_init__(self) -> None:
        if self.jobs is None:
            self.jobs = (os.cpu_count() or 1) if self.scale == 'mini' else 1
        if self.jobs < 1:
            raise ValueError(f'jobs={self.jobs}: expected at least 1')
        known = {**SCALES[self.scale].sizes, **SCALES[self.scale].sweep_sizes}
        if unknown := [size for size in self.sizes or () if size not in known]:
            raise ValueError(f'sizes={",".join(unknown)}: scale={self.scale} has {", ".join(known)}')


def main(argv: list[str]) -> None:
    names = [a for a in argv if not a.startswith('-')]
    cfg = build(ReproduceConfig, read_options([a for a in argv if a.startswith('-')], ReproduceConfig))
    scale = replace(SCALES[cfg.scale], seeds=cfg.seeds or SCALES[cfg.scale].seeds)
    if cfg.sizes:
        scale = replace(scale, sizes={s: o for s, o in scale.sizes.items() if s in cfg.sizes},
                        sweep_sizes={s: o for s, o in scale.sweep_sizes.items() if s in cfg.sizes})
    known = [name for name in FIGURES if cfg.scale in FIGURES[name].scales]
    if unknown := [name for name in names if name not in (*known, 'all', 'claims')]:
        fail(f'{", ".join(unknown)}: scale={cfg.scale} has {", ".join(known)}, all, claims')
    figures = [name for name in known if name in names or 'all' in names or not names]
    if cfg.list or not names:
        for name in figures:
            print(f'{name}: {FIGURES[name].title}')
            for run in runs_of(name, scale):
                done, label = len(results_of(run.options, scale)), ' '.join(filter(None, run[:3]))
                print(f'    {label}: train.py {run.options} ({done} of {len(scale.seeds)} seeds finished)')
        return
    if cfg.scale == 'paper' and not cfg.run and figures:
        plan(figures, scale)
        return
    failed = run_missing(figures, scale, cfg.jobs) if figures else 0
    for name in figures:
        write(name, scale)
    if {'all', 'claims'} & set(names):
        claims(scale)
    if failed:
        fail(f'{failed} runs failed; they are named above, the same command tries them again')


if __name__ == '__main__':
    main(sys.argv[1:])

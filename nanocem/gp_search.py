"""
Which protocol did the paper's Gaussian-process table have? A search scored on all thirty rows.

    python -m nanocem.gp_search    searches for --hours; the same command goes on
    python -m nanocem.gp_trials    what the trials so far say

CHOICES is what the paper leaves open. A trial is a protocol on one kernel: its lengthscale is the
one at which Plain has the paper's level, and its misfit the RMS of log(ours / paper) over the
models' train and test RMSE that is left when Plain's level is taken off. A protocol's misfit is the
RMS over kernels, each at its best shape. Successive halving through STAGES: each round proposes
a few protocols, and the best so far move up a stage. First come LEADS, then the best of them with
every choice changed alone, then changes of one to three choices in the best eight.

Every trial is a line of out_dir/trials.csv. What is proposed follows from the lines of earlier
rounds, so that an interrupted search goes on where it was.
"""
import csv
import fcntl
import io
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import IO, Any, Literal, NamedTuple

import torch

import synthetic_gp as gp
from configurator import build, fail, read_options
from nanocem.files import write_whole
from nanocem.gp_report import PAPER, spread

# The first value of each choice is the base's.
CHOICES = {
    'points': (4000, 1000, 2000, 5000, 8000),
    'test_points': (1000, 200),
    'inputs': ('cube', 'unit', 'normal'),
    'standardise': (False, True),
    'noise': (0.0, 0.005),
    'batch_size': (200, 64, 100, 256),
    'steps': (2000, 500, 1000, 4000),
    'learning_rate': (1e-3, 5e-4, 2e-3, 5e-3),
    'schedule': ('constant', 'cosine'),
    'recipe': ('paper', 'torch', 'adam'),
    'init': ('linear', 'xavier', 'n02'),
    'init_cem': ('normal', 'linear', 'n02', 'xavier', 'orthogonal'),
    'activation': ('silu', 'gelu', 'relu', 'tanh'),
    'residual': ('normed', 'displacement', 'raw'),
    'stop': ('test', 'valid', 'end'),
    'patience': (1000, 5, 20),
}
SHAPES = {  # nu; period; alpha; slope, nu; the first is tried before the others
    'rbf': ((),),
    'matern': ((0.5,), (1.5,), (2.5,)),
    'periodic': ((4.0,), (2.0,), (8.0,)),
    'rational_quadratic': ((1.0,), (0.5,), (2.0,), (0.25,), (0.1,)),
    'non_stationary': ((0.5,), (0.25,), (1.0,), (0.5, 2.5), (0.5, 1.5)),
}
BASE = {name: values[0] for name, values in CHOICES.items()}
LEADS = tuple(BASE | changes for changes in (
    {},
    dict(standardise=True),
    dict(stop='valid'),
    dict(schedule='cosine', learning_rate=2e-3),
    dict(learning_rate=5e-4),
    dict(recipe='torch', init_cem='linear'),
    dict(batch_size=100, steps=4000),
    dict(recipe='adam', init_cem='linear', standardise=True, stop='valid', patience=20),
    dict(points=2000, standardise=True),
    dict(points=5000, learning_rate=2e-3, steps=1000, stop='end'),
    dict(learning_rate=2e-3, steps=1000, stop='end'),
    dict(points=1000, test_points=200, standardise=True, batch_size=64),
    # added when the first four rounds had found batches of 64 and a rate of 5e-4
    dict(batch_size=64, learning_rate=5e-4, init_cem='xavier'),
    dict(batch_size=64, learning_rate=5e-4, init_cem='xavier', points=5000),
    dict(batch_size=64, init_cem='xavier'),
    dict(batch_size=100, learning_rate=5e-4, init_cem='xavier'),
    dict(batch_size=64, learning_rate=5e-4, init_cem='xavier', init='xavier'),
))


class Stage(NamedTuple):
    kernels: tuple[str, ...]
    shapes: Literal['first', 'others', 'best']  # of SHAPES; best: by the stages before
    repeats: int
    models: tuple[str, ...]
    kept: int  # protocols of a round that reach it
    every: int  # in how many rounds it happens once


UP_TO_T4 = ('Plain', 'Gated', 'CEM-T1', 'CEM-T2', 'CEM-T4')
STAGES = (
    Stage(('rbf', 'matern'), 'first', 2, UP_TO_T4, 6, 1),
    Stage(('periodic', 'rational_quadratic', 'non_stationary'), 'first', 2, UP_TO_T4, 2, 1),
    Stage(tuple(gp.KERNELS), 'others', 2, UP_TO_T4, 1, 3),
    Stage(tuple(gp.KERNELS), 'best', 5, (*UP_TO_T4, 'CEM-T8'), 1, 6),
)
LAST = len(STAGES) - 1
RATIO, LOWEST, HIGHEST = 1.12, 0.3, 60.0  # lengthscales tried: powers of RATIO between these
NUMBERS = ('train', 'train_std', 'test', 'test_std')

Protocol = dict[str, Any]
Trial = dict[str, Any]


@dataclass
class Options:
    """The search."""
    hours: float = 3.0  # after which no new trial starts
    out_dir: str = 'out/gp_search'  # trials.csv and the draws


# One trial

Rows = dict[str, tuple[float, ...]]  # of one kernel, by model


def misfit(rows: Rows, k: str, paper: dict[tuple[str, str], tuple[float, ...]] = PAPER) -> float:
    """RMS of log(ours / paper) over train and test RMSE of the models, the mean of Plain's two
    taken off all; inf where training diverged."""
    if not all(math.isfinite(v) and v > 0 for row in rows.values() for v in (row[0], row[2])):
        return math.inf
    off = {m: [math.log(row[i] / paper[k, m][i]) for i in (0, 2)] for m, row in rows.items()}
    level = fmean(off['Plain'])
    return math.sqrt(fmean((v - level) ** 2 for pair in off.values() for v in pair))


def draws(o: gp.Options, k: str, parameters: tuple[float, ...], folder: str) -> gp.Data:
    """gp.draw, each repeat kept in a file: protocols share draws. They have 1000 test points, of
    which o.test_points are used."""
    inputs = 'normal' if o.inputs == 'normal' else 'cube'
    raw = replace(o, test_points=1000, inputs=inputs, standardise=False)
    parts = []
    for repeat in range(o.repeats):
        named = [k, *parameters, inputs, o.points, o.noise, repeat]
        path = f'{folder}/{"_".join(map(str, named))}.pt'
        if not os.path.exists(path):
            file = io.BytesIO()
            torch.save([part.clone() for part in gp.draw(raw, k, [repeat], parameters)], file)
            write_whole(path, file.getvalue())
        parts.append(torch.load(path))
    x, y, x_test, y_test = (torch.cat(part) for part in zip(*parts, strict=True))
    return gp.as_seen(o, gp.Data(x, y, x_test[:, :o.test_points], y_test[:, :o.test_points]))


def lengthscale(o: gp.Options, k: str, shape: tuple[float, ...], start: float,
                folder: str) -> float | None:
    """The power of RATIO at which Plain's train x test RMSE is nearest to the paper's, by secant
    steps in logarithms; None where there is none."""
    target = math.log(PAPER[k, 'Plain'][0] * PAPER[k, 'Plain'][2]) / 2
    lowest, highest = (round(math.log(end, RATIO)) for end in (LOWEST, HIGHEST))
    levels: dict[int, float] = {}
    i = round(math.log(start, RATIO))
    while i not in levels and len(levels) < 8:
        _, found = gp.fit(o, 'Plain', draws(o, k, (RATIO ** i, *shape), folder), range(o.repeats))
        levels[i] = math.log(fmean(found['train']) * fmean(found['test'])) / 2
        if not math.isfinite(levels[i]):
            return None
        # the slope between the two nearest to the target, at first that of RMSE ~ lengthscale^-2
        near = sorted(levels, key=lambda j: abs(levels[j] - target))
        slope = -2 * math.log(RATIO)
        if len(near) > 1:
            secant = (levels[near[0]] - levels[near[1]]) / (near[0] - near[1])
            slope = min(-0.3 * math.log(RATIO), secant)
        move = max(-8, min(8, round((target - levels[near[0]]) / slope)))
        i = max(lowest, min(highest, near[0] + move))
    best = min(levels, key=lambda j: abs(levels[j] - target))
    return RATIO ** best if abs(levels[best] - target) < 0.3 else None


def run_trial(protocol: Protocol, k: str, shape: tuple[float, ...], stage: int, round_: int,
              start: float, folder: str) -> Trial:
    """Find the lengthscale, train the stage's models there, and compare with the paper."""
    began = time.perf_counter()
    o = gp.Options(**protocol, repeats=STAGES[stage].repeats, device='cpu')
    trial = dict(round=round_, **protocol, kernel=k, shape=in_words(shape), stage=stage,
                 lengthscale='')
    rows: Rows = {}
    found = lengthscale(o, k, shape, start, folder)
    if found:
        trial['lengthscale'] = float(f'{found:.4g}')
        data = draws(o, k, (found, *shape), folder)
        for model in STAGES[stage].models:
            _, cell = gp.fit(o, model, data, range(o.repeats))
            rows[model] = (*spread(cell['train']), *spread(cell['test']))
    trial['misfit'] = float(f'{misfit(rows, k):.5f}') if rows else math.inf
    trial['seconds'] = round(time.perf_counter() - began)
    for model in STAGES[LAST].models:
        for i, number in enumerate(NUMBERS):
            trial[f'{model} {number}'] = f'{rows[model][i]:.6f}' if model in rows else ''
    return trial


# Trials on disk

def in_words(shape: tuple[float, ...]) -> str:
    return ' '.join(map(str, shape))


class Trials:
    """Trials by what was tried."""

    def __init__(self, all_: Iterable[Trial]) -> None:
        self.all = list(all_)
        self.by_key = {self.key(t, t['kernel'], t['shape'], t['stage']): t for t in self.all}

    @staticmethod
    def key(protocol: Protocol, k: str, shape: str, stage: int) -> str:
        return json.dumps([[protocol[name] for name in BASE], k, shape, stage])

    def get(self, protocol: Protocol, k: str, shape: tuple[float, ...], stage: int) -> Trial | None:
        return self.by_key.get(self.key(protocol, k, in_words(shape), stage))

    def until(self, round_: int) -> 'Trials':
        """Those of earlier rounds."""
        return Trials(t for t in self.all if t['round'] < round_)

    def add(self, trial: Trial) -> None:
        self.all.append(trial)
        self.by_key[self.key(trial, trial['kernel'], trial['shape'], trial['stage'])] = trial


def read(file: IO[bytes]) -> Trials:
    """The trials of an open trials.csv but a last line that is not whole."""
    file.seek(0)
    text = file.read()
    whole = text.rfind(b'\n') + 1
    trials = []
    for line in csv.DictReader(text[:whole].decode().splitlines()):
        protocol = {name: type(value)(line[name]) for name, value in BASE.items()}
        protocol['standardise'] = line['standardise'] == 'True'
        numbers = dict(round=int(line['round']), stage=int(line['stage']))
        trials.append(line | protocol | numbers | dict(misfit=float(line['misfit'])))
    return Trials(trials)


def append(file: IO[bytes], trial: Trial) -> None:
    """One whole line, on the disk before the next trial starts; half a line that a kill left at the
    end goes."""
    file.seek(0)
    file.truncate(file.read().rfind(b'\n') + 1)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(trial), lineterminator='\n')
    if file.seek(0, os.SEEK_END) == 0:
        writer.writeheader()
    writer.writerow(trial)
    file.write(text.getvalue().encode())
    file.flush()
    os.fsync(file.fileno())


def rows_of(trial: Trial) -> Rows:
    """Each model's numbers, as in PAPER."""
    return {m: tuple(float(trial[f'{m} {number}']) for number in NUMBERS)
            for m in STAGES[LAST].models if trial[f'{m} train']}


def best_shapes(trials: Trials, protocol: Protocol, stage: int) -> dict[str, Trial]:
    """The protocol's best trial of each kernel up to a stage; the last stage stands alone."""
    best: dict[str, Trial] = {}
    for s in [LAST] if stage == LAST else range(stage + 1):
        for k, shape in itertools.chain(*([(k, v) for v in SHAPES[k]] for k in STAGES[s].kernels)):
            trial = trials.get(protocol, k, shape, s)
            if trial and (k not in best or trial['misfit'] < best[k]['misfit']):
                best[k] = trial
    return best


def cells(trials: Trials, protocol: Protocol, stage: int) -> list[tuple[str, tuple[float, ...]]]:
    """What a stage asks of a protocol: kernels and shapes."""
    kernels, shapes = STAGES[stage].kernels, STAGES[stage].shapes
    if shapes == 'best':
        before = best_shapes(trials, protocol, stage - 1)
        return [(k, tuple(map(float, before[k]['shape'].split()))) for k in kernels if k in before]
    part = slice(0, 1) if shapes == 'first' else slice(1, None)
    return [(k, shape) for k in kernels for shape in SHAPES[k][part]]


def score(trials: Trials, protocol: Protocol, stage: int) -> float | None:
    """RMS misfit over the kernels up to a stage; None where a trial is missing."""
    asked = cells(trials, protocol, stage)
    if not asked or not all(trials.get(protocol, k, shape, stage) for k, shape in asked):
        return None
    best = best_shapes(trials, protocol, stage)
    return math.sqrt(fmean(t['misfit'] ** 2 for t in best.values()))


def ranking(trials: Trials, stage: int) -> list[tuple[float, Protocol]]:
    """(misfit, protocol) of all that have passed a stage, best first."""
    protocols = {json.dumps([t[name] for name in BASE]): {name: t[name] for name in BASE}
                 for t in trials.all}
    scored = [(score(trials, protocol, stage), protocol) for protocol in protocols.values()]
    return sorted(((s, p) for s, p in scored if s is not None), key=lambda pair: pair[0])


# The search

def valid(protocol: Protocol) -> bool:
    """Neither a duplicate (patience without early stopping) nor too dear."""
    idle = protocol['stop'] == 'end' and protocol['patience'] != BASE['patience']
    return not idle and protocol['steps'] * protocol['batch_size'] <= 400_000


def proposals(trials: Trials, round_: int) -> list[Protocol]:
    """The protocols of a round: the leads; the best lead with each choice changed alone; then
    changes of one to three choices in the best eight. `trials`: those of earlier rounds."""
    kept = STAGES[0].kept
    first = math.ceil(len(LEADS) / kept)
    if round_ < first:
        return list(LEADS[round_ * kept:(round_ + 1) * kept])
    best = next(protocol for _, protocol in ranking(trials, 0) if protocol in LEADS)
    alone = [best | {name: value} for name, values in CHOICES.items() for value in values
             if value != best[name]]
    alone = list(filter(valid, alone))[(round_ - first) * kept:]
    if alone:
        return alone[:kept]
    rng = random.Random(round_)
    parents = [protocol for _, protocol in ranking(trials, 0)[:8]]
    proposed: list[Protocol] = []
    while len(proposed) < kept:
        child = dict(rng.choice(parents))
        for name in rng.sample(list(CHOICES), rng.choice((1, 2, 3))):
            child[name] = rng.choice(CHOICES[name])
        if valid(child) and child not in proposed and score(trials, child, 0) is None:
            proposed.append(child)
    return proposed


def plan(trials: Trials) -> Iterator[tuple[Protocol, str, tuple[float, ...], int, int]]:
    """What to try, without end: (protocol, kernel, shape, stage, round). Between two of them the
    caller adds the trial."""
    for round_ in itertools.count():
        earlier = trials.until(round_)
        for stage, at in enumerate(STAGES):
            if stage == 0:
                protocols = proposals(earlier, round_)
            else:
                passed = [p for _, p in ranking(trials.until(round_ + 1), stage - 1)]
                protocols = [p for p in passed if score(earlier, p, stage) is None][:at.kept]
            if round_ % at.every == at.every - 1:
                for protocol in protocols:
                    for k, shape in cells(trials, protocol, stage):
                        yield protocol, k, shape, stage, round_


def near(trials: Trials, protocol: Protocol, k: str, shape: str) -> float:
    """Where to look for the lengthscale: at that of the most similar protocol."""
    like = [t for t in trials.all if (t['kernel'], t['shape']) == (k, shape) and t['lengthscale']]
    most = max(like, key=lambda t: sum(t[name] == protocol[name] for name in BASE), default=None)
    return float(most['lengthscale']) if most else gp.KERNELS[k].inferred[0]


def search(o: Options, file: IO[bytes]) -> None:
    """Trials until the time is up."""
    trials, began = read(file), time.time()
    folder = f'{o.out_dir}/draws'
    os.makedirs(folder, exist_ok=True)
    print(f'{len(trials.all)} trials found in {o.out_dir}', flush=True)
    for protocol, k, shape, stage, round_ in plan(trials):
        if trials.get(protocol, k, shape, stage):
            continue
        if time.time() - began > 3600 * o.hours:
            break
        start = near(trials, protocol, k, in_words(shape))
        trial = run_trial(protocol, k, shape, stage, round_, start, folder)
        trials.add(trial)
        append(file, trial)
        changes = {name: value for name, value in protocol.items() if value != BASE[name]}
        print(f"round {round_} stage {stage} {k} {trial['shape']}: misfit {trial['misfit']:.3f}, "
              f"lengthscale {trial['lengthscale']}, {trial['seconds']} s, {changes}", flush=True)


def main() -> None:
    o = build(Options, read_options(sys.argv[1:], Options))
    torch.set_num_threads(1)
    try:
        os.makedirs(o.out_dir, exist_ok=True)
        with open(f'{o.out_dir}/trials.csv', 'ab+') as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f'{o.out_dir}: another search is at work there; wait for it, or give another '
                     '--out_dir')
            search(o, file)
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}')
    except KeyboardInterrupt:
        fail(f'interrupted; {o.out_dir}/trials.csv has the trials, and the same command goes on')


if __name__ == '__main__':
    main()

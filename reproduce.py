"""
Every figure of the paper, and a few of our own: the runs each needs, done where missing, drawn.

    python reproduce.py --list               the figures, their runs, and which are finished
    python reproduce.py ladder               all of them, the most telling runs first; also: all
    python reproduce.py ladder --plan        what that takes: stages, runs, hours
    python reproduce.py fig_attn             one figure
    python reproduce.py claims               claims and figures from the runs that are finished
    python reproduce.py claims --publish     the same into results/ and the README's table
    python reproduce.py ladder --from_published    go on from the runs that results/ has
    python reproduce.py ladder --scale=gpu   the claims at 3 and 10 M weights, on a GPU
    python reproduce.py all --scale=paper    the plan at the paper's sizes; --run does it

A run is train.py with the options in nanocem/ladder.py, in out/reproduce/: figures share runs,
finished ones are not done again, cut-off ones go on. Pictures and tables go to out/results/.
"""
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from configurator import build, fail, read_options
from model import ModelConfig, Transformer
from nanocem import claims, ladder, records
from nanocem.figures import FIGURES, Cell, figure_files
from nanocem.files import say, write_whole
from nanocem.jobs import run_side_by_side
from nanocem.ladder import FAMILIES, LLAMA, MODELS, SCALES, Scale, Task, canonical
from nanocem.options import new_options
from nanocem.scaling import akima_optimum, carry_rates
from nanocem.shards import BUILTIN, CORPUS
from nanocem.tokenizers import ByteTokenizer
from prepare_slimpajama import find_data
from train import RECIPE, TrainConfig

SWEEP_SEED = 1  # the rates come from it alone, so that they hold still while other seeds run
LOWEST_RATE, HIGHEST_RATE = 0.0005, 0.064
# What the plans reckon with: a core's speed, a layer of the ladder, as it was seen; A100s; and what
# all the paper's results took, by its appendix.
CORE_FLOPS_A_LAYER = 11e9
MFU, A100_FLOPS, PAPER_GPU_HOURS = 0.4, 312e12, 10_000
GPU_HOURS_NOTE = f'GPU-hours of A100s ({A100_FLOPS / 1e12:.0f} TFLOP/s) at an MFU of {MFU:.0%}.'

Found = dict[Task, dict[str, Any]]  # the results of the finished runs
PUBLISHED: Found = {}  # from_published: those in results/, which hold


@cache
def configs(options: str) -> tuple[TrainConfig, ModelConfig]:
    """What train.py makes of a run's options."""
    given = read_options(options.split(), TrainConfig, ModelConfig)
    given = new_options(given, TrainConfig, RECIPE)[0]
    train = build(TrainConfig, given)
    bytes_only = train.data in (CORPUS, BUILTIN)
    given.setdefault('vocab_size', ByteTokenizer.vocab_size if bytes_only else 32_000)
    return train, build(ModelConfig, given)


class Undrawn(TorchFunctionMode):
    """Models that are only counted: no weight is drawn, which on the meta device is slow."""
    def __torch_function__(self, call: Any, types: Any, args: Any = (), given: Any = None) -> Any:
        return args[0] if call is torch.Tensor.normal_ else call(*args, **(given or {}))


class Cost(NamedTuple):
    tokens: float
    flops: float  # of training
    disk: float  # bytes: three checkpoints of weights and AdamW's two moments, float32
    weights: dict[str, int]  # of the blocks, by sublayer


@cache
def cost(options: str) -> Cost:
    """What a run takes, from its options alone; the learning rate may be left out."""
    train, cfg = configs(options)
    with torch.device('meta'), Undrawn():
        model, llama = Transformer(cfg), Transformer(cfg.llama())
    tokens = train.tokens or train.tokens_per_param * llama.num_params()
    weights = {kind: sum(p.numel() for block in model.blocks
                         for p in getattr(block, kind).parameters()) for kind in ('attn', 'mlp')}
    return Cost(tokens, tokens * model.flops_per_token(), 3 * 12 * model.num_params(), weights)


def weights_at(scale: Scale, size: str) -> float:
    """The weights of Llama's blocks at a size: the N of every trend."""
    return sum(cost(canonical(f'{scale.sizes[size]} {LLAMA}')).weights.values())


def finished(task: Task) -> dict[str, Any] | None:
    """A run's result.json, or what is published of it; None until it is finished.
    SystemExit if what the folder holds was begun with other settings: a config file or a default
    has changed since."""
    if task in PUBLISHED:
        return describe(task, PUBLISHED[task])
    if saved := ladder.read_settings(task.folder):
        own = ('out_dir', 'init_from', 'seed', 'tensorboard', 'sample_tokens')
        if changed := [k for part in configs(task.options) for k, v in asdict(part).items()
                       if k not in own and k in saved and saved[k] != v]:
            fail(f'{task.folder} holds a run of another {", ".join(changed)}: remove it to train '
                 'it anew')
    result = ladder.read_result(task.folder)
    return result and describe(task, result)


def describe(task: Task, result: dict[str, Any]) -> dict[str, Any]:
    """A run's result, with what the tables need beside it."""
    return {**result, 'seed': task.seed, 'rate': task.rate, 'out_dir': task.folder,
            'weights': cost(task.shape).weights}


def read_published(scale: Scale) -> Found:
    """The runs that results/ has. SystemExit if there are none, or of other shapes than today's."""
    path = f'results/{scale.name}/runs.csv'
    found = records.read_runs(path, scale) or fail(f'{path}: no runs are published there')
    for task, result in found.items():
        tokens, flops, *_ = cost(task.shape)
        if not math.isclose(flops / tokens, result['flops_per_token'], rel_tol=1e-9):
            fail(f'{path} has {task.model} at {task.size} in another shape: leave --from_published '
                 'out, and it is trained anew')
    return found


def look(tasks: Iterable[Task]) -> Found:
    """Those of the runs that are finished."""
    return {task: result for task in tasks if (result := finished(task))}


# Rates: a sweep at the two smallest sizes, and a power law upward.

FAILED: set[Task] = set()  # of this call


def done(task: Task) -> bool:
    return task in FAILED or finished(task) is not None


def sweep(scale: Scale, size: str, model: str, seed: int) -> list[Task]:
    """The sweep of a model at a size, as far as it is known: the scale's rates, and at the ladder
    one more wherever the best of them is at an edge. A run that failed counts as the worst."""
    rates = list(scale.rates)
    while True:
        tasks = [Task(scale.name, size, model, rate, seed) for rate in rates]
        if scale.rate or not all(done(task) for task in tasks):
            return tasks
        values = [of['val_perplexity'] if (of := finished(task)) else math.inf for task in tasks]
        best = values.index(min(values))
        if best == 0 and rates[0] / 2 >= LOWEST_RATE:
            rates.insert(0, rates[0] / 2)
        elif best == len(rates) - 1 and rates[-1] * 2 <= HIGHEST_RATE:
            rates.append(rates[-1] * 2)
        else:
            return tasks


def all_sweeps(scale: Scale, seed: int, models: Sequence[str]) -> list[Task]:
    return [task for size in scale.sweep_sizes for model in models
            for task in sweep(scale, size, model, seed)]


def choose_rates(scale: Scale) -> dict[str, Any]:
    """From the finished sweeps: each one's optimum by validation, the power law, and the rates it
    gives at every size."""
    best: dict[str, dict[float, float]] = {}
    for family in FAMILIES:
        best[family] = {}
        for size in scale.sweep_sizes:
            found = look(sweep(scale, size, family, SWEEP_SEED))
            points = sorted((task.rate, r['val_perplexity']) for task, r in found.items())
            if len(points) < 3:
                fail(f'{family} at {size}: {len(points)} runs of its sweep are finished, three are '
                     'needed; the same command tries them again')
            rates, values = zip(*points, strict=True)
            optimum = akima_optimum(rates, [math.log(v) for v in values])[0]
            best[family][weights_at(scale, size)] = optimum
    exponent, carried = carry_rates(best, [weights_at(scale, size) for size in scale.sizes])
    return {'exponent': exponent,
            'best': {family: [float(f'{rate:.3g}') for rate in best[family].values()]
                     for family in FAMILIES},
            'rates': {family: dict(zip(scale.sizes, carried[family], strict=True))
                      for family in FAMILIES}}


def chosen_rates(scale: Scale) -> dict[str, Any] | None:
    """What the sweeps chose, None until they are finished."""
    if scale.rate:
        return {'rates': {family: dict.fromkeys(scale.sizes, scale.rate) for family in FAMILIES}}
    return ladder.read_rates(scale)


def own_runs(scale: Scale, models: Sequence[str], sizes: Iterable[str], seeds: Iterable[int],
             ) -> list[Task]:
    """Runs at the models' own rates; until those are chosen the sweep's middle one stands in."""
    chosen = chosen_rates(scale)
    middle = scale.rates[len(scale.rates) // 2]

    def rate(size: str, model: str) -> float:
        return chosen['rates'][MODELS[model].family][size] if chosen else middle

    return [Task(scale.name, size, model, rate(size, model), seed)
            for seed in seeds for size in sizes for model in models]


class Stage(NamedTuple):
    title: str
    tasks: list[Task]


def stages(scale: Scale) -> list[Stage]:
    """All runs of a scale, in an order whose every beginning gives tables."""
    runs = partial(own_runs, scale)
    sizes, first, further = list(scale.sizes), scale.seeds[:1], scale.seeds[1:]
    swept, control = ['llama', 'cem-2'], ladder.CONTROL
    if scale.rate:
        models = FAMILIES + control if scale.name == 'gpu' else [*MODELS]
        plan = [Stage('the sweep', all_sweeps(scale, SWEEP_SEED, swept)),
                Stage('every model', runs(models, sizes, scale.seeds))]
        return asked(plan, scale)
    check = [task._replace(rate=float(f'{task.rate * factor:.2g}'))
             for task in runs(swept, sizes[2:3], first) for factor in (0.5, 2)]
    again = [task for seed in scale.seeds if seed != SWEEP_SEED
             for task in all_sweeps(scale, seed, swept)]
    sweeps = all_sweeps(scale, SWEEP_SEED, FAMILIES)
    plan = [  # the published rates hold, whether or not all of their runs are kept
        Stage('the sweep', [task for task in sweeps if task in PUBLISHED or not PUBLISHED]),
        Stage('three smallest sizes, first seed', runs(FAMILIES, sizes[:3], first)),
        Stage('two smallest sizes, further seeds', runs(FAMILIES, sizes[:2], further)),
        Stage('third size, further seeds', runs(FAMILIES, sizes[2:3], further)),
        Stage('variants, two smallest sizes', runs(ladder.VARIANTS, sizes[:2], scale.seeds)),
        Stage('four variants, third size', runs(ladder.THIRD_SIZE, sizes[2:3], scale.seeds)),
        Stage('fourth size, first seed', runs(FAMILIES + control, sizes[3:4], first)),
        Stage('fifth size, first seed', runs(FAMILIES + control, sizes[4:], first)),
        Stage('rates at a third size', check),
        Stage('further variants', runs(ladder.FURTHER, sizes[:2], scale.seeds)),
        Stage('fourth size, further seeds', runs(ladder.PAPERS + control, sizes[3:4], further)),
        Stage('twice the tokens', runs(ladder.LONGER, sizes[:2], first)),
        *(Stage(f'fifth size, seed {seed}', runs(ladder.PAPERS + control, sizes[4:], [seed]))
          for seed in further),
        Stage('sweeps of further seeds', again),
        Stage('exact RoPE, further seeds', runs(FAMILIES, sizes[3:], further))]
    return asked(plan, scale)


def asked(plan: Iterable[Stage], scale: Scale) -> list[Stage]:
    """The runs at the sizes that were asked for."""
    return [Stage(title, [task for task in tasks if task.size in (scale.only or (task.size,))])
            for title, tasks in plan]


def cells_of(name: str, scale: Scale, plan: Sequence[Stage],
             ) -> dict[tuple[str, str, str, str], list[Task]]:
    """The cells of a figure, (size, group, label, model), with the runs that the plan has for them;
    of a figure about variants only at sizes where it has some besides the control. The sweep's
    groups are the rates, and it has sizes of its own."""
    planned = {task for stage in plan for task in stage.tasks}
    models = {model for labels in FIGURES[name].groups.values() for model in labels.values()}
    variants = models - {*FAMILIES, *ladder.CONTROL}
    sizes = {task.size for task in planned if task.model in (variants or models)}
    found: dict[tuple[str, str, str, str], list[Task]] = {}
    for group, labels in FIGURES[name].groups.items():
        for label, model in labels.items():
            tasks = own_runs(scale, [model], scale.sizes, scale.seeds)
            if name == 'fig_lr':
                tasks = [task for s in scale.seeds for task in all_sweeps(scale, s, [model])]
            for task in tasks:
                key = (task.size, f'{task.rate:g}' if name == 'fig_lr' else group, label, model)
                if task in planned and task.size in sizes:
                    found.setdefault(key, []).append(task)
    return found


def wanted(names: Sequence[str], scale: Scale) -> list[Stage]:
    """The plan, less what these figures do not draw."""
    plan = stages(scale)
    drawn = {t for name in names for tasks in cells_of(name, scale, plan).values() for t in tasks}
    return [Stage(title, [task for task in tasks if task in drawn]) for title, tasks in plan]


# Running.

def command(task: Task) -> list[str]:
    """The command line of a run."""
    words = [*SCALES[task.scale].launcher, 'train.py', *task.options.split(), f'--seed={task.seed}',
             f'--out_dir={task.folder}', '--tensorboard=False', '--sample_tokens=0']
    begun = os.path.exists(f'{task.folder}/config.json')
    return [*words, '--init_from=resume'] if begun else words


def run_missing(tasks: Sequence[Task], jobs: int) -> None:
    """These runs; those that fail are named and remembered in FAILED, the rest go on. Stopped, the
    runs write their checkpoints. torchrun's runs print for themselves."""
    total, reached, start = sum(cost(t.shape).flops for t in tasks), 0.0, time.monotonic()
    quiet = SCALES[tasks[0].scale].launcher[0] == sys.executable
    commands = {task: command(task) for task in tasks}
    with closing(run_side_by_side(commands, jobs, quiet)) as ended:
        for n, (task, error) in enumerate(ended, 1):
            reached += cost(task.shape).flops
            left = timedelta(seconds=round((time.monotonic() - start) * (total / reached - 1)))
            if result := None if error else finished(task):
                text = f'test perplexity {result["test_perplexity"]:.3f}'
            else:
                text = f'FAILED: {error or "no result"}'
                FAILED.add(task)
            say(f'{n}/{len(tasks)} {task.folder}: {text} | ETA {left}')


def settle_rates(scale: Scale, jobs: int) -> None:
    """Do the sweeps and choose the rates, unless that is done."""
    if chosen_rates(scale):
        return
    while missing := [t for t in all_sweeps(scale, SWEEP_SEED, FAMILIES) if not done(t)]:
        say(f'the sweep: {len(missing)} runs')
        run_missing(missing, jobs)
    save(f'out/results/{scale.name}', 'rates.json', json.dumps(choose_rates(scale), indent=1))


# What comes out: pictures and tables, in out/results/ or, published, in results/.

def save(folder: str, name: str, data: bytes | str) -> None:
    os.makedirs(folder, exist_ok=True)
    write_whole(os.path.join(folder, name), data.encode() if isinstance(data, str) else data)


def write_figure(name: str, cells: Mapping[tuple[str, str, str, str], list[Task]], found: Found,
                 folder: str, whole: bool) -> None:
    """A figure's picture and tables; `whole`: only if all its cells have runs."""
    if FIGURES[name].reads_runs:  # of which results/ has only the results
        here = {t: r for t, r in found.items() if os.path.exists(f'{t.folder}/result.json')}
        gone = [t for of in cells.values() for t in of if t in found and t not in here]
        if gone and whole:
            return say(f'{name}: {folder} keeps the one it has, {gone[0].folder} is not here')
        found = here
    every = [Cell(*key, [found[task] for task in tasks if task in found])
             for key, tasks in cells.items()]
    cells = [cell for cell in every if cell.results]
    missing = [f'{cell.model} at {cell.size}' for cell in every if not cell.results]
    if not cells or (whole and missing):
        lacks = f'no finished run of {missing[0]}' if missing else 'none of its runs is asked for'
        return say(f'{name}: not written to {folder}, {lacks}')
    for ending, data in figure_files(FIGURES[name], cells).items():
        save(folder, f'{name}.{ending}', data)
    say(f'{folder}/{name}: .md, .csv, .png; {len(cells)} of {len(every)} cells')


def write_claims(scale: Scale, found: Found, folder: str) -> list[str]:
    """claims.md, claims.csv and ladder.md, by test and by validation; returns the README's table,
    by test."""
    own = set(own_runs(scale, [*MODELS], scale.sizes, scale.seeds))
    swept = {t for seed in scale.seeds for t in all_sweeps(scale, seed, FAMILIES)}
    sizes = {size: weights_at(scale, size) for size in scale.sizes}
    counted = records.read_counts(f'results/{scale.name}/spikes.csv') if PUBLISHED else {}
    front = {}
    for split in ladder.SPLITS:
        pages, front[split] = claims.pages(sizes, MODELS, found, own, swept, counted, split)
        for name, page in pages.items():
            save(folder, name, page)
    return front['test']


def write_out(names: Sequence[str], scale: Scale, with_claims: bool, publish: bool) -> None:
    """All that the finished runs give, to out/results/."""
    plan, folder = stages(scale), f'out/results/{scale.name}'
    found = look(task for stage in plan for task in stage.tasks)
    if with_claims:  # before the pictures, some of which want checkpoints
        say('\n'.join(write_claims(scale, found, folder)))
    for name in names:
        write_figure(name, cells_of(name, scale, plan), found, folder, whole=False)
    if publish:
        publish_stages(names, scale, with_claims, plan, found)


def publish_stages(names: Sequence[str], scale: Scale, with_claims: bool, plan: Sequence[Stage],
                   found: Found) -> None:
    """What the finished stages give, to results/ and the README."""
    chosen, folder = chosen_rates(scale), f'results/{scale.name}'
    # a run of the first sweep may have failed: its rates are what counts
    missing = [not chosen, *(any(task not in found for task in of.tasks) for of in plan[1:]), True]
    finished_stages = plan[:missing.index(True)]
    say(f'finished stages: {"; ".join(stage.title for stage in finished_stages) or "none"}')
    if len(finished_stages) < 2:
        return say('nothing is published before two of them are')
    path = f'{folder}/runs.csv'
    if lost := [task for task in records.read_runs(path, scale) if task not in found]:
        fail(f'{path} has {len(lost)} runs that are not here: --from_published keeps them; to '
             'publish without them remove it, and spikes.csv beside it')
    save(folder, 'rates.json', json.dumps(chosen, indent=1))
    save(folder, 'runs.csv', records.as_csv(found, scale))  # of unfinished stages too
    # tables from what is written there, so that another machine makes the same ones
    written = {task: describe(task, result) for task, result in read_published(scale).items()}
    whole = {t: written[t] for of in finished_stages for t in of.tasks if t in written}
    if with_claims:
        front = write_claims(scale, whole, folder)
        if scale.name == 'ladder':
            claims.into_readme(front)
    reached = {task.size for stage in finished_stages for task in stage.tasks}
    for name in names:
        cells = {key: of for key, of in cells_of(name, scale, plan).items() if key[0] in reached}
        write_figure(name, cells, whole, folder, whole=True)


def seconds(task: Task) -> float:
    """About what a run takes: core-seconds at the ladder, A100-seconds at the other scales."""
    flops = cost(task.shape).flops
    if task.scale == 'ladder':
        return flops / CORE_FLOPS_A_LAYER / configs(task.options)[1].n_layer
    return flops / MFU / A100_FLOPS


def show_plan(plan: Sequence[Stage], scale: Scale, jobs: int) -> None:
    """Stages with their runs and hours."""
    unit = 'core-hours' if scale.name == 'ladder' else 'GPU-hours'
    say(f'| stage | runs | finished | tokens | FLOPs | {unit} | so far |\n|' + '---|' * 7)
    seen: set[Task] = set()
    total = 0.0
    for stage in plan:
        new = [task for task in dict.fromkeys(stage.tasks) if task not in seen]
        seen.update(new)
        hours = sum(seconds(task) for task in new) / 3600
        total += hours
        say(f'| {stage.title} | {len(new)} | {len(look(new))} | '
            f'{sum(cost(t.shape).tokens for t in new) / 1e6:,.0f} M | '
            f'{sum(cost(t.shape).flops for t in new):.2e} | {hours:,.1f} | {total:,.1f} |')
    if scale.name == 'ladder':
        say(f'\n{total / jobs:.1f} hours with {jobs} runs side by side, at '
            f'{CORE_FLOPS_A_LAYER / 1e9:.0f} GFLOP/s a core times the layers. Where sweeps meet an '
            'edge they go on, and take longer.')
    else:
        say(f'\n{GPU_HOURS_NOTE} Small models reach less.')


def show_gpu_plan(names: Sequence[str], scale: Scale) -> None:
    """The commands of a scale's unfinished runs, and what all its runs take on A100s."""
    rows, counted, plan = [], {}, stages(scale)
    for name in names:
        cells = cells_of(name, scale, plan)
        tasks = list(dict.fromkeys(task for of in cells.values() for task in of))
        new = [task for task in tasks if task not in counted]
        rows.append((name, len(tasks), new))
        counted |= dict.fromkeys(new)
    for task in counted:
        if not finished(task):
            say(' '.join(command(task)))
    say('\n| figure | runs | new ones | tokens | training FLOPs | GPU-hours | disk |')
    say('|' + '---|' * 7)
    for name, n, new in [*rows, ('all', len(counted), counted)]:
        costs = [cost(task.shape) for task in new]
        say(f'| {name} | {n} | {len(new)} | {sum(c.tokens for c in costs) / 1e9:,.1f} B | '
            f'{sum(c.flops for c in costs):.2e} | {sum(map(seconds, new)) / 3600:,.0f} | '
            f'{sum(c.disk for c in costs) / 1e9:,.0f} GB |')
    say(f'\n{GPU_HOURS_NOTE} A run that figures share is counted once. The paper: on the order of '
        f'{PAPER_GPU_HOURS:,} GPU-hours for all its results.')


@dataclass
class ReproduceConfig:
    """Which runs, and how."""
    scale: Literal['ladder', 'gpu', 'paper'] = 'ladder'  # to a million weights; to ten; the paper's
    seeds: tuple[int, ...] | None = None  # every run once a seed; default: the scale's
    sizes: tuple[str, ...] | None = None  # of the scale's model sizes; default: all
    jobs: int | None = None  # runs side by side; default: one a core at the ladder, else one
    run: bool = False  # scale=paper: execute what is printed; scale=gpu: even without a GPU
    list: bool = False  # print the runs and whether they are finished, and do nothing
    plan: bool = False  # print the stages and what they take, and do nothing
    from_published: bool = False  # count the runs in results/ as finished
    publish: bool = False  # write results/ and the README's table from the stages that are finished

    def __post_init__(self) -> None:
        scale = SCALES[self.scale]
        if self.jobs is None:
            self.jobs = (os.cpu_count() or 1) if self.scale == 'ladder' else 1
        if self.jobs < 1:
            raise ValueError(f'jobs={self.jobs}: expected at least 1')
        known = {**scale.sizes, **scale.sweep_sizes}
        if unknown := [size for size in self.sizes or () if size not in known]:
            raise ValueError(f'sizes={",".join(unknown)}: scale={self.scale} has '
                             f'{", ".join(known)}')
        for name in ('seeds', 'sizes'):
            given = getattr(self, name) or ()
            if twice := [str(x) for x in dict.fromkeys(given) if given.count(x) > 1]:
                raise ValueError(f'{name}: {", ".join(twice)} is given twice; each counts once')
        if self.publish and (self.seeds or self.sizes):
            raise ValueError('publish writes whole tables: leave seeds and sizes out')


def show_list(names: Sequence[str], scale: Scale) -> None:
    """The figures with their runs."""
    plan = stages(scale)
    for name in names:
        say(f'{name}: {FIGURES[name].title}')
        for (*where, _), tasks in cells_of(name, scale, plan).items():
            say(f'    {" ".join(filter(None, where))}: train.py {tasks[0].options} '
                f'({len(look(tasks))} of {len(tasks)} seeds finished)')


def run_plan(names: Sequence[str], scale: Scale, everything: bool, jobs: int) -> None:
    """The stages one after the other: of the whole plan, or of what the figures draw. A sweep may
    ask for more once it is done."""
    if scale.name != 'paper':
        find_data(CORPUS)
        settle_rates(scale, jobs)
    for n in range(len(stages(scale))):
        ran = False
        while True:
            stage = (stages(scale) if everything else wanted(names, scale))[n]
            missing = [task for task in dict.fromkeys(stage.tasks) if not done(task)]
            if not missing:
                break
            say(f'{stage.title}: {len(missing)} runs')
            run_missing(missing, jobs)
            ran = True
        if everything and ran:
            write_out(names, scale, with_claims=True, publish=False)


def stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(argv: list[str]) -> None:
    names = [a for a in argv if not a.startswith('-')]
    options = read_options([a for a in argv if a.startswith('-')], ReproduceConfig)
    cfg = build(ReproduceConfig, options)
    seeds = cfg.seeds or SCALES[cfg.scale].seeds
    scale = replace(SCALES[cfg.scale], only=cfg.sizes, seeds=seeds)
    known = [name for name in FIGURES if cfg.scale in FIGURES[name].scales]
    if unknown := [name for name in names if name not in (*known, 'all', 'ladder', 'claims')]:
        fail(f'{", ".join(unknown)}: scale={cfg.scale} has {", ".join(known)}, ladder, all, claims')
    PUBLISHED.clear()
    PUBLISHED.update(read_published(scale) if cfg.from_published else {})
    everything = bool({'all', 'ladder'} & set(names))
    figures = [name for name in known if name in names or everything or not names]
    if cfg.list or (not names and not cfg.plan):
        return show_list(figures, scale)
    if cfg.plan:
        plan = stages(scale) if everything or not names else wanted(figures, scale)
        return show_plan(plan, scale, cfg.jobs)
    if cfg.scale == 'gpu' and everything and not (cfg.run or torch.cuda.is_available()):
        fail('scale=gpu: torch finds no GPU here, and a CPU core would take a week; --run does it')
    if cfg.scale == 'paper' and not cfg.run and figures:
        return show_gpu_plan(figures, scale)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, stop)
    try:
        if figures or everything:
            run_plan(figures, scale, everything and cfg.scale != 'paper', cfg.jobs)
        drawn = known if 'claims' in names else figures
        write_out(drawn, scale, everything or 'claims' in names, cfg.publish)
    except KeyboardInterrupt:
        fail('stopped; the same command goes on')
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}; the same command goes on')
    if FAILED:
        fail(f'{len(FAILED)} runs failed; they are named above, the same command tries them again')


if __name__ == '__main__':
    main(sys.argv[1:])

"""
The paper's figures and claims, and one of our own: the runs each takes, done where missing.

    python reproduce.py                      the figures, and what their missing runs take
    python reproduce.py fig_attn             one figure
    python reproduce.py claims               the paper's claims, with paired 95% intervals
    python reproduce.py all                  all of it
    python reproduce.py fig_attn --anew      from runs of your own alone
    python reproduce.py all --scale=gpu      the claims at 3 and 10 M weights, on a GPU
    python reproduce.py all --scale=paper    commands at the paper's sizes, A100-hours; --run: do it

The runs in results/ladder/runs.csv are finished, and drawn at once. All others are train.py's, in
out/reproduce/, where finished ones are not done again and cut-off ones go on. Pictures and tables
go to out/results/.
"""
import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from configurator import build, fail, read_options
from model import ModelConfig, Transformer
from nanocem import claims
from nanocem.fast import flops_per_token
from nanocem.figures import FIGURES, Cell, figure_files
from nanocem.files import read_json, say, table, write_whole
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
# The sweeps of Llama and all-CEM, T = 2; where 0.016 was the best, 0.032 was run too
SWEPT = {'ladder': (0.004, 0.008, 0.016), 'paper': (0.0005, 0.001, 0.002, 0.004, 0.008), 'gpu': ()}
EDGES = [('83k', 'llama', 2), ('83k', 'cem-2', 2), ('83k', 'cem-2', 3), ('195k', 'llama', 1)]


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


Results = dict[Run, dict[str, Any]]
Cells = dict[tuple[str, str, str, str], list[Run]]  # size, group, label, model -> its runs


# Which runs there are.

def own_runs(scale: str, seeds: tuple[int, ...] | None = None) -> list[Run]:
    """Every model at its own rate, the small sizes first. Seeds: those given, or at the ladder
    three, at the other scales one."""
    drawn = {model for figure in FIGURES.values()
             for labels in figure.groups.values() for model in labels.values()}
    runs = []
    for place, size in enumerate(SIZES[scale]):
        for model in MODELS:
            rates = RATES.get(model)
            if rates is None:
                rates = next(RATES[name] for name in RATES if model.startswith(name))[:2]
            trained = {'ladder': place < len(rates), 'gpu': model in EVERY_SIZE,
                       'paper': model in drawn and size != '256m'}  # which is of the sweep alone
            if not trained[scale]:
                continue
            rate = ONE_RATE.get(scale) or rates[place]
            # of exact RoPE at the two largest sizes the ladder has one
            single = model.startswith('rope') and place > 2
            for seed in seeds or ((1,) if single or scale != 'ladder' else (1, 2, 3)):
                runs.append(Run(scale, size, model, rate, seed))
    return runs


def swept_runs(scale: str, seeds: tuple[int, ...] | None = None) -> list[Run]:
    """Llama and all-CEM, T = 2, over learning rates."""
    runs = []
    for size in list(SIZES[scale])[:2 if scale == 'ladder' else None]:
        for model in ('llama', 'cem-2'):
            for seed in seeds or ((1, 2, 3) if scale == 'ladder' else (1,)):
                rates = SWEPT[scale] + ((0.032,) if (size, model, seed) in EDGES else ())
                runs += [Run(scale, size, model, rate, seed) for rate in rates]
    return runs


def cells_of(name: str, own: Sequence[Run], swept: Sequence[Run]) -> Cells:
    """The cells of a figure with their runs; of a figure about variants at the sizes that have
    some. Groups of the sweep are its rates."""
    runs = swept if name == 'fig_lr' else own
    models = {model for labels in FIGURES[name].groups.values() for model in labels.values()}
    variants = models - set(EVERY_SIZE) or models
    sizes = {run.size for run in runs if run.model in variants}
    cells: Cells = {}
    for group, labels in FIGURES[name].groups.items():
        for label, model in labels.items():
            for run in runs:
                if run.model == model and run.size in sizes:
                    group = f'{run.rate:g}' if name == 'fig_lr' else group
                    cells.setdefault((run.size, group, label, model), []).append(run)
    return cells


# What they take, and what they left.

CORE_FLOPS_A_LAYER = 11e9  # a core's speed a layer of the ladder, as it was seen
MFU, A100_FLOPS = 0.4, 312e12
NUMBERS = ('parameters', 'tokens', 'flops_per_token', 'steps', 'test_perplexity', 'val_perplexity')
THEIR_OWN = ('out_dir', 'init_from', 'seed', 'tensorboard', 'sample_tokens')  # options of each run


def configs(options: str) -> tuple[TrainConfig, ModelConfig]:
    """What train.py makes of a run's options."""
    given = read_options(options.split(), TrainConfig, ModelConfig)
    return build(TrainConfig, given), build(ModelConfig, given)


@cache
def hours(run: Run) -> float:
    """About how long a run takes: of a core at the ladder, of an A100 at the other scales."""
    train, cfg = configs(run.options)
    with torch.device('meta'):
        model, llama = Transformer(cfg), Transformer(cfg.llama())
    flops = train.tokens_per_param * llama.num_params() * flops_per_token(model)
    speed = CORE_FLOPS_A_LAYER * cfg.n_layer if run.scale == 'ladder' else MFU * A100_FLOPS
    return flops / speed / 3600


def read_result(run: Run) -> dict[str, Any] | None:
    """A finished run's result.json. None where a number is missing: where steps were skipped it is
    null. SystemExit if the folder's run has other settings: a config file or a default changed."""
    saved = read_json(f'{run.folder}/config.json')
    if saved is None:
        return None
    for part, cfg in zip(('train', 'model'), configs(run.options), strict=True):
        before = saved.get(part)
        if not isinstance(before, dict):
            fail(f'{run.folder}/config.json is damaged: delete the folder')
        for key, value in asdict(cfg).items():
            if key not in THEIR_OWN and before.get(key, value) != value:
                fail(f'{run.folder} holds a run of another {key}: remove it to train it anew')
    result = read_json(f'{run.folder}/result.json') or {}
    values = [result.get(name) for name in NUMBERS]
    finished = all(type(value) in (int, float) and value > 0 for value in values)
    return result if finished else None


def read_runs(path: str, scale: str) -> Results:
    """The runs in a runs.csv, {} where there is none."""
    found: Results = {}
    if os.path.exists(path):
        with open(path, encoding='utf-8', newline='') as file:
            for row in csv.DictReader(file):
                run = Run(scale, row['size'], row['model'], float(row['learning_rate']),
                          int(row['seed']))
                found[run] = {name: json.loads(row[name] or 'NaN') for name in NUMBERS}
    return found


def show(missing: Mapping[str, Sequence[Run]], scale: str) -> None:
    """A line a figure: what its missing runs take."""
    rows = [[name, FIGURES[name].title if name in FIGURES else '', str(len(runs)),
             f'{sum(map(hours, runs)):,.1f}'] for name, runs in missing.items()]
    unit = 'core-hours' if scale == 'ladder' else f'A100-hours at an MFU of {MFU:.0%}'
    say(table(['', '', 'runs to do', unit], rows))


# Training.

def command(run: Run) -> list[str]:
    """The command line of a run."""
    launcher = ['torchrun', '--nproc_per_node=8'] if run.scale == 'paper' else [sys.executable]
    words = [*launcher, 'train.py', *run.options.split(), f'--seed={run.seed}',
             f'--out_dir={run.folder}', '--tensorboard=False', '--sample_tokens=0']
    begun = os.path.exists(f'{run.folder}/config.json')
    return [*words, '--init_from=resume'] if begun else words


def train_all(runs: Sequence[Run], jobs: int) -> Results:
    """Train these runs, `jobs` side by side, one CPU thread each, so that numbers depend on nothing
    else that runs. Those that fail are named, the rest go on. Where this program is stopped, the
    runs are, and write their checkpoints. torchrun's print for themselves."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    children: set[subprocess.Popen] = set()

    def train(run: Run, words: list[str]) -> str:
        """The last line it printed."""
        pipe = None if run.scale == 'paper' else subprocess.PIPE
        with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment,
                              errors='replace') as child:
            children.add(child)
            out, err = child.communicate()
            children.discard(child)
        return (err or out or f'exit code {child.returncode}').strip().rpartition('\n')[2]

    found = {}
    pool = ThreadPoolExecutor(jobs)
    try:
        # config files are parsed in this thread alone: in Python 3.11 two of ast's parsers collide
        futures = {pool.submit(train, run, command(run)): run for run in runs}
        for n, future in enumerate(as_completed(futures), 1):
            run = futures[future]
            text = f'FAILED: {future.result()}'
            if result := read_result(run):
                found[run] = result
                text = f'test perplexity {result["test_perplexity"]:.3f}'
            say(f'{n}/{len(runs)} {run.folder}: {text}')
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in list(children):
            child.terminate()
        pool.shutdown()
    return found


# What comes out.

def save(scale: str, name: str, content: bytes) -> None:
    os.makedirs(f'out/results/{scale}', exist_ok=True)
    write_whole(f'out/results/{scale}/{name}', content)
    say(f'out/results/{scale}/{name}')


def draw(name: str, cells: Cells, found: Results, scale: str) -> None:
    """A figure's picture and table, of the cells that have finished runs."""
    drawn = []
    for key, runs in cells.items():
        if results := [{**found[run], 'seed': run.seed} for run in runs if run in found]:
            drawn.append(Cell(*key, results))
    say(f'{name}: {len(drawn)} of {len(cells)} cells have finished runs')
    if drawn:
        picture, page = figure_files(FIGURES[name], drawn)
        save(scale, f'{name}.png', picture)
        save(scale, f'{name}.md', page.encode())


def write_claims(scale: str, own: Results, swept: Results) -> None:
    """A page by validation and one by test, of which a short table goes on the screen."""
    weights = {}  # of Llama's blocks, the N of every trend
    for size in dict.fromkeys(run.size for run in own_runs(scale)):
        with torch.device('meta'):
            llama = Transformer(configs(f'{SIZES[scale][size]} {LLAMA}')[1])
        weights[size] = sum(p.numel() for p in llama.blocks.parameters())
    for split, name in (('val', 'claims_validation.md'), ('test', 'claims.md')):
        page, short = claims.pages(weights, own, swept, split)
        save(scale, name, page.encode())
    say(short)


@dataclass
class ReproduceConfig:
    """Which runs, and how."""
    scale: Literal['ladder', 'gpu', 'paper'] = 'ladder'  # to a million weights; to ten; the paper's
    seeds: tuple[int, ...] | None = None  # every run with each of these; default: as planned
    sizes: tuple[str, ...] | None = None  # of the scale's model sizes; default: all
    jobs: int | None = None  # runs side by side; default: one a core at the ladder, else one
    anew: bool = False  # leave results/ladder/runs.csv out: all is trained here
    run: bool = False  # scale=paper: execute what is printed; scale=gpu: even without a GPU

    def __post_init__(self) -> None:
        if self.jobs is None:
            self.jobs = (os.cpu_count() or 1) if self.scale == 'ladder' else 1
        if self.jobs < 1:
            raise ValueError(f'jobs={self.jobs}: expected at least 1')
        if unknown := set(self.sizes or ()) - set(SIZES[self.scale]):
            raise ValueError(f'sizes={",".join(unknown)}: scale={self.scale} has '
                             f'{", ".join(SIZES[self.scale])}')


def main(argv: list[str]) -> None:
    names = [word for word in argv if not word.startswith('-')]
    options = read_options([word for word in argv if word.startswith('-')], ReproduceConfig)
    cfg = build(ReproduceConfig, options)
    seeds = cfg.seeds and tuple(dict.fromkeys(cfg.seeds))  # each counts only once

    # The figures, and their runs at the given sizes and seeds
    own, swept = ([run for run in runs if run.size in (cfg.sizes or SIZES[cfg.scale])]
                  for runs in (own_runs(cfg.scale, seeds), swept_runs(cfg.scale, seeds)))
    figures = {name: cells for name, figure in FIGURES.items()
               if (cells := cells_of(name, own, swept))}
    if unknown := [name for name in names if name not in (*figures, 'claims', 'all')]:
        fail(f'{", ".join(unknown)}: scale={cfg.scale} has {", ".join(figures)}, claims, all')
    everything = 'all' in names or not names
    figures = {name: cells for name, cells in figures.items() if everything or name in names}

    # Which of them are missing: neither in runs.csv nor here
    planned = dict.fromkeys([*own, *swept])
    found = {} if cfg.anew else read_runs(f'results/{cfg.scale}/runs.csv', cfg.scale)
    for run in planned:
        if run not in found and (result := read_result(run)):
            found[run] = result
    missing = {name: [run for runs in cells.values() for run in runs if run not in found]
               for name, cells in figures.items()}
    if everything:
        missing['claims'] = [run for run in planned if run not in found]
    new = list(dict.fromkeys(run for runs in missing.values() for run in runs))

    # What is only printed: what there is to do, and at the paper's scale its commands
    on_paper = new and cfg.scale == 'paper' and not cfg.run
    if not names or on_paper:
        if names:
            say('\n'.join(' '.join(command(run)) for run in new))
        return show(missing | {'together': new}, cfg.scale)
    if new and cfg.scale == 'gpu' and not (cfg.run or torch.cuda.is_available()):
        fail('scale=gpu: torch finds no GPU here, and a CPU core would take a week; --run does it')

    # Training and drawing
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, signal.default_int_handler)  # KeyboardInterrupt
    try:
        if new and cfg.scale != 'paper' and not os.path.exists('data/corpus/meta.json'):
            words = [sys.executable, 'prepare_slimpajama.py', '--input=corpus']
            if subprocess.run(words, check=False).returncode:
                fail('data/corpus is not made; the same command goes on')
        found |= train_all(new, cfg.jobs)
        for name, cells in figures.items():
            draw(name, cells, found, cfg.scale)
        if everything or 'claims' in names:
            both = ({run: found[run] for run in runs if run in found} for runs in (own, swept))
            write_claims(cfg.scale, *both)
    except KeyboardInterrupt:
        fail('stopped; the same command goes on')
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}; the same command goes on')
    if failed := [run for run in new if run not in found]:
        fail(f'{len(failed)} runs failed; they are named above, the same command tries them again')


if __name__ == '__main__':
    main(sys.argv[1:])

"""
The study: its sizes, models and text, the runs that were published, and your own runs in out/.

The scripts of this folder import what they share from here; load_study() reads the files when it
is first called. Each family of claims has a folder with its rule, claims, models, planned and
finished runs: results/tokens has the first, and its folders second and third have later ones.
"""
import glob
import json
import math
import re
import statistics
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from configurator import build, check, fail, read_options
from model import SIZES, ModelConfig
from nanocem.files import read_csv, read_json, read_json_lines
from nanocem.runs import MODEL_TEXT, RECIPE, load_model, read_result
from train import MAX_SKIPPED, TrainConfig

RESULTS = Path(__file__).resolve().parent
FIRST = RESULTS / 'tokens'  # the first family's folder, which has the text and the sizes, too
LLAMA = 'llama-alibi-three'  # Llama with all three additions
TRIAL_SEEDS = 101  # seeds from here on belong to trials, which choose learning rates
# How often the pair of a repeated target stands in training, as gradient/run.py divides it
COUNTS = '0 to 10', '11 to 100', '101 to 1,000', 'more'
Row = dict[str, str]  # of a CSV
Losses = dict[tuple[str, int], float]  # y of (model, seed), for the runs of one size


# What is studied

@dataclass
class Study:
    """What the files of the study say."""
    families: list[Path]  # the folder of each family of claims, in the order of asking
    sizes: dict[str, Row]  # sizes of the study
    models: dict[str, Row]  # what all families say of a model
    texts: dict[int, dict[str, Any]]  # what identifies the study's text, by size of vocabulary
    figures: dict[str, Row]  # the paper's figures
    series: list[Row]  # what is drawn in each figure
    options: dict[str, str]  # train.py's options for each size of the paper, a laptop, the study


@cache
def load_study() -> Study:
    """Read the files of the study, once."""
    families = [FIRST, FIRST / 'second', FIRST / 'third']
    sizes = {row['size']: row for row in read_csv(f'{FIRST}/sizes.csv')}
    # Join what the families say of a model: a later one may add a column
    models: dict[str, Row] = {}
    for folder in families:
        for row in read_csv(f'{folder}/models.csv'):
            models.setdefault(row['model'], {}).update(row)
    # The text was prepared twice: as 2,048 byte-pair tokens, and as bytes
    texts = {}
    for name in 'text.json', 'english_bytes.json':
        text = read_json(f'{FIRST}/{name}')
        texts[text['vocab_size']] = text
    # Figures are drawn in the order in which these sizes stand here
    options = {size: f'--size={size}' for size in SIZES}
    for size in 'nano', 'mini':
        options[size] = f'config/{size}.py --vocab_size=257'
    for size, row in sizes.items():
        options[size] = row['options']
    figures = {row['figure']: row for row in read_csv(f'{RESULTS}/figures/figures.csv')}
    series = read_csv(f'{RESULTS}/figures/series.csv')
    return Study(families, sizes, models, texts, figures, series, options)


# Runs and their results

@dataclass(frozen=True, order=True)
class Run:
    """One training run. `data` is empty for a planned run, and for one of the study's text at a
    size of the study. Other runs name what they read."""
    size: str
    model: str
    rate: float
    seed: int
    data: str = ''


@dataclass(frozen=True)
class HeldOut:
    """The text that a loss is measured on. Only losses of the same text share a picture."""
    data: str  # the study's text, or what else a run read
    vocab_size: int
    context_length: int
    test_tokens: int | None  # None: all of the text, validation and test, in Llama tokens

    @property
    def unit(self) -> str:
        return 'per Llama token' if self.test_tokens is None else 'per token'

    def __str__(self) -> str:
        """Return such as 'English manuals, vocabulary 257, context 128, 10 M test tokens; per
        token'."""
        amount = 'all held-out text'
        if self.test_tokens is not None:
            amount = f'{self.test_tokens / 1e6:g} M test tokens'
        return (f'{self.data}, vocabulary {self.vocab_size:,}, context {self.context_length:,}, '
                f'{amount}; {self.unit}')


@dataclass(frozen=True)
class Result:
    """What a run ended with. A failed run has an infinite y, and NaN parameters and tokens."""
    y: float  # loss in nats, in the unit of `held_out`
    parameters: float
    tokens: float  # that it was trained on
    held_out: HeldOut
    folder: str | None = None  # of an own run; None: it is published
    # Columns of runs.csv, which only own runs that did not fail have
    flops_per_token: float | None = None
    seconds: float | None = None
    val_bits_per_byte: float | None = None
    test_bits_per_byte: float | None = None


Results = dict[Run, Result]


def run_options(run: Run) -> str:
    """Return train.py's options for a run."""
    study = load_study()
    model = study.models[run.model]
    options = f'{study.options[run.size]} {model["options"]}'
    if column := model.get('d_mlp'):  # the width that gives as many weights as another model has
        options += f' --d_mlp={study.sizes[run.size][column]}'
    if run.size == '256m' and run.model.startswith('cem'):
        options += ' --n_layer=16 --tokens=5.1B'  # two more layers, and the tokens of the Llama
    options += f' --learning_rate={run.rate:g} --seed={run.seed}'
    # Of an option that is given twice keep the later value
    return ' '.join({option.partition('=')[0]: option for option in options.split()}.values())


@cache
def configs(options: str) -> tuple[TrainConfig, ModelConfig]:
    """Return what train.py makes of these options."""
    given = read_options(options.split(), TrainConfig, ModelConfig)
    return build(TrainConfig, given), build(ModelConfig, given)


def held_out_of(run: Run, train: TrainConfig, model: ModelConfig) -> HeldOut:
    """Return what the loss of a run is measured on."""
    in_the_study = run.size in load_study().sizes and not run.data
    return HeldOut(run.data or 'English manuals', model.vocab_size, model.context_length,
                   None if in_the_study else train.test_tokens)


def planned_cells(families: list[Path]) -> list[Run]:
    """Return the runs that count in these families, finished or not. The first family's are those
    that it has published."""
    paths = [f'{folder}/{"runs" if folder == FIRST else "cells"}.csv' for folder in families]
    return list(read_runs(*paths))


def finished(found: Results) -> set[Run]:
    """Return the planned runs that are done: at the study's sizes those of its text, at others
    those of any data."""
    sizes = load_study().sizes
    return {run if run.size in sizes else replace(run, data='') for run in found}


# Read runs

def read_runs(*paths: str) -> dict[Run, Row]:
    """Read CSVs that have a run in each row."""
    runs = {}
    for path in paths:
        for row in read_csv(path):
            runs[Run(row['size'], row['model'], float(row['rate']), int(row['seed']))] = row
    return runs


def read_published_rows(families: list[Path]) -> dict[Run, Row]:
    """Read the published runs of these families. Some of the first one's came later, in a file of
    their own."""
    return read_runs(f'{FIRST}/more_seeds.csv', *(f'{folder}/runs.csv' for folder in families))


def read_published() -> Results:
    """Read the published runs of all families and of the figures. All read the study's text."""
    study = load_study()
    published = {}
    for run, row in read_published_rows([*study.families, RESULTS / 'figures']).items():
        held_out = held_out_of(run, *configs(study.options[run.size]))
        published[run] = Result(float(row['y']), float(row['parameters']), float(row['tokens']),
                                held_out)
    return published


def read_own() -> Results:
    """Read the finished runs in out/. Folders that are no run, another one than their name says, or
    a second copy of one, are left out."""
    own: Results = {}
    for folder in sorted(glob.glob('out/reproduce/*/*') + glob.glob('out/figures/*/*')):
        try:
            ended = read_run(folder)
        except (OSError, ValueError, TypeError, KeyError) as error:
            leave_out(folder, error)
            continue
        if ended is None:
            continue
        run, result = ended
        if run in own:
            leave_out(folder, f'{own[run].folder} is the same run')
        else:
            own[run] = result
    return own


def read_all() -> Results:
    """Read published and own runs. Own copies of published runs are left out."""
    published, own = read_published(), read_own()
    for run, result in own.items():
        if run in published:
            leave_out(result.folder, 'the run is published with a loss of '
                      f'{published[run].y:.4f}; here it is {result.y:.4f}')
    return own | published


def leave_out(folder: str | None, reason: Any) -> None:
    """Say on stderr why a folder does not count. A published run has none."""
    if folder is not None:
        print(f'{folder} is left out: {reason}', file=sys.stderr, flush=True)


def read_run(folder: str) -> tuple[Run, Result] | None:
    """Return a run with its result, whose y is infinite if it failed; None if it has not ended.
    UserError, ValueError, TypeError or KeyError if it is damaged, or another run than its name."""
    # Find out from the folder's name which run it is
    study = load_study()
    match = (re.fullmatch(r'out/\w+/(.+)/(.+)_rate=(.+)_seed=(\d+)', folder)
             or fail('expected SIZE/MODEL_rate=0.01_seed=1'))
    check(match[1] in study.options and match[2] in study.models,
          f'no size {match[1]} has a model {match[2]} here: expected those of models.csv')
    run = Run(match[1], match[2], float(match[3]), int(match[4]))

    # Compare it with what was trained
    config = read_json(f'{folder}/config.json') or fail('it has no config.json')
    train, cfg = build(TrainConfig, config['train']), build(ModelConfig, config['model'])
    named_train, named_cfg = configs(f'{run_options(run)} --vocab_size={cfg.vocab_size}')
    names = ('tokens', 'tokens_per_param', 'eval_tokens', 'test_tokens', 'init_from', 'seed',
             *RECIPE)
    same = all(getattr(train, name) == getattr(named_train, name) for name in names)
    check(same and cfg == named_cfg, 'its config.json is that of another run')

    # Ask the weights about another text of model.py: the same logits make it the same model
    path = Path(folder, 'model.py')
    if path.exists() and path.read_text(encoding='utf-8') != MODEL_TEXT:
        _, state = load_model(folder)
        check(not state['change'], f'model.py differs, and {state["change"]}')

    # Read the loss
    run = replace(run, data=name_data(run.size, train.data, config['data']))
    held_out = held_out_of(run, train, cfg)
    if result := read_result(folder, config):
        y = float(result['test_loss'])
        if held_out.test_tokens is None:
            y = loss_per_llama_token(result)
        others = {name: result.get(name) for name in (
            'flops_per_token', 'seconds', 'val_bits_per_byte', 'test_bits_per_byte')}
        return run, Result(y, result['parameters'], result['tokens'], held_out, folder, **others)

    # train.py ends a run after more than MAX_SKIPPED consecutive steps without a finite loss
    log = read_json_lines(f'{folder}/log.jsonl')
    skipped = [line['step'] for line in log if line.get('event') == 'skipped'][-MAX_SKIPPED - 1:]
    if len(skipped) <= MAX_SKIPPED or skipped[-1] - skipped[0] > MAX_SKIPPED:
        return None
    return run, Result(math.inf, math.nan, math.nan, held_out, folder)


def name_data(size: str, folder: str, data: dict[str, Any]) -> str:
    """Name what a run read by the checksums of its data, since other data may have the same
    folder. Empty for the study's text at a size of the study. KeyError if one is missing."""
    study = load_study()
    known = {name: data[name] for name in study.texts[257]}
    if size in study.sizes and known == study.texts[configs(study.options[size])[1].vocab_size]:
        return ''
    return f'{folder} ({zlib.crc32(repr(known).encode()):08x})'


def loss_per_llama_token(result: dict[str, Any]) -> float:
    """Convert bits per byte of both splits of the study's text to nats per Llama token."""
    bits, llama_tokens = 0.0, 0
    for row in read_csv(f'{FIRST}/text.csv'):
        bits += result[f'{row["split"]}_bits_per_byte'] * int(row['bytes'])
        llama_tokens += int(row['llama_tokens'])
    return math.log(2) * bits / llama_tokens


def bits_per_byte(y: float) -> float:
    """Convert nats per Llama token of both splits together to bits per byte."""
    of_one_bit = loss_per_llama_token({'val_bits_per_byte': 1.0, 'test_bits_per_byte': 1.0})
    return y / of_one_bit


def unique(values: Iterable[Any]) -> list[Any]:
    """Return these values in their order, each once."""
    return list(dict.fromkeys(values))


# How runs copy

def counting_runs(*folders: Path) -> list[Row]:
    """Return the rows of the finished runs of these studies, without trials."""
    rows = []
    for folder in folders:
        rows += read_csv(f'{folder}/runs.csv')
    return [row for row in rows if int(row['seed']) < TRIAL_SEEDS]


def by_model(runs: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the runs of each size and model, ablations left out."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        if not run['variant']:
            groups.setdefault((run['size'], run['model']), []).append(run)
    return groups


def mean(rows: list[Row], name: str) -> float:
    return statistics.fmean(float(row[name]) for row in rows)


def copying_rows(runs: list[Row]) -> list[Row]:
    """Return for each size and model its means over seeds: losses of repeated and of other targets
    in nats per own token, and by how many per cent a second reading changes perplexity."""
    found = []
    for (size, model), of_model in by_model(runs).items():
        again = statistics.fmean(math.expm1(float(run['read_again_loss'])
                                            - float(run['read_once_loss'])) for run in of_model)
        y = mean(of_model, 'y')
        found.append({
            'size': size, 'model': model, 'seeds': str(len(of_model)),
            'parameters': of_model[0]['parameters'],
            'flops_per_token': of_model[0]['flops_per_token'],
            'bits per byte': f'{bits_per_byte(y):.4f}',
            'perplexity per Llama token': f'{math.exp(y):.2f}',
            'repeated, nats': f'{mean(of_model, "repeated_loss"):.3f}',
            'other, nats': f'{mean(of_model, "other_loss"):.3f}',
            'read again, %': f'{100 * again:+.1f}'})
    return sorted(found, key=lambda row: (row['size'], float(row['perplexity per Llama token'])))


def count_rows(runs: list[Row]) -> list[Row]:
    """Return the mean loss of repeated targets, by how often their pair stands in the training
    text. Runs that did not measure it are left out."""
    found = []
    for (size, model), of_model in by_model([run for run in runs if run.get('by_count')]).items():
        row = {'size': size, 'model': model, 'seeds': str(len(of_model))}
        for n, words in enumerate(COUNTS):
            parts = [json.loads(run['by_count'])[n] for run in of_model]
            row[f'{words} times: targets'] = f'{parts[0][0]}'
            row[f'{words}: nats'] = f'{statistics.fmean(loss for _, loss in parts):.3f}'
        found.append(row)
    return sorted(found, key=lambda row: (row['size'], row['model']))


# How runs train

def draw_curves(losses: list[Row], lines: list[tuple[str, str, str, str]], title: str) -> Any:
    """Return a matplotlib figure of how far training losses are above that of Llama with all three
    additions. `losses` are rows of losses.csv; a line has a size, a model, a format and a label.
    Each line is the mean over the seeds that its model and Llama both have. A line without runs is
    left out."""
    from matplotlib.figure import Figure  # only for this: most scripts of the study draw nothing
    by_run: dict[tuple[str, str, str], list[float]] = {}
    for row in losses:
        if not row['variant']:
            run = row['size'], row['model'], row['seed']
            by_run.setdefault(run, []).append(float(row['loss']))
    figure = Figure((8.3, 4), layout='constrained')
    axes = figure.subplots()
    for size, model, line_format, label in lines:
        over = [np.subtract(of_run, by_run[size, LLAMA, run[2]]) for run, of_run in by_run.items()
                if run[:2] == (size, model) and (size, LLAMA, run[2]) in by_run]
        if over:
            # Each point is the mean of a twentieth of the run
            points = [part.mean() for part in np.array_split(np.mean(over, axis=0), 20)]
            axes.plot(np.arange(2.5, 100, 5), points, line_format, label=label)
    axes.axhline(0, color='0.6', lw=1)
    axes.set_xlabel('training, %')
    axes.set_ylabel('training loss over Llama, nats')
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=8, loc='outside right')
    return figure


# Which runs failed

def split_failed(y: Losses) -> tuple[Losses, set[str]]:
    """Return the losses of runs that did not fail, and the models with failed runs. A run fails if
    y is not finite, or 0.5 nats above the median of the model's seeds."""
    ended, failed = {}, set()
    for (model, seed), loss in y.items():
        median = statistics.median(other for (name, _), other in y.items() if name == model)
        if loss < min(math.inf, median + 0.5):
            ended[model, seed] = loss
        else:
            failed.add(model)
    return ended, failed

"""
Does the paper hold? Its claims with their verdicts, its figures, and the runs behind both.

    python results/reproduce.py                  draw and print the verdicts on the claims
    python results/reproduce.py --todo | sh      train the missing runs, one by one
    python results/reproduce.py --figure=3a      draw a figure of the paper, print its table
    python results/reproduce.py --figure=3a --size=86m --todo    commands of its missing runs

results/tokens has the first family of claims, models and sizes, and its folders second and third
have later ones; verdicts.py there computes effects.csv, whose verdicts are printed and drawn here.
results/figures has the paper's figures. Your own runs are in out/reproduce/SIZE/ and
out/figures/SIZE/.
`--todo | xargs -P 2 -I{} sh -c "{}"` trains two at a time; the same command goes on after a stop.

Runs of the sizes of results/tokens that read its text have a loss y in nats per Llama token of the
held-out text, validation and test together. Other runs have one in nats per token of the test text,
and stand in no row. A run that is left out has a line on stderr.
"""
import os
import sys
import textwrap
from dataclasses import dataclass
from typing import Literal, NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # model.py is a folder above

if __name__ == '__main__':  # pictures go into files, whatever backend a notebook asks for
    os.environ['MPLBACKEND'] = 'agg'

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from configurator import PathStr, build, check, command_line, read_options
from model import Transformer
from nanocem.files import csv_text, markdown_table, read_csv, write_atomic
from nanocem.hardware import flops_per_token
from paper_figures import DPI, FIGURE_SIZES, WIDTH, planned, show_figure
from study import (
    FIRST,
    RESULTS,
    TRIAL_SEEDS,
    Results,
    Row,
    Run,
    configs,
    finished,
    leave_out,
    load_study,
    planned_cells,
    read_all,
    run_options,
    unique,
)

FigureName = Literal['2a', '2b', '2c', '2d', '3a', '3b', '3c', 'attention', 'all']


@dataclass
class ReproduceConfig:
    """What to print."""
    todo: bool = False  # print the commands of missing runs
    figure: FigureName | None = None  # draw this figure of the paper
    size: Literal[FIGURE_SIZES] | None = None  # for --figure: only this; --todo: XS
    effects: PathStr | None = None  # verdicts to draw; default: results/tokens/effects.csv


@command_line
def main(argv: list[str]) -> None:
    cfg = build(ReproduceConfig, read_options(argv, ReproduceConfig))
    check(cfg.size is None or cfg.figure is not None, f'size={cfg.size} is for --figure')
    study = load_study()
    figures = list(study.figures) if cfg.figure == 'all' else [cfg.figure]

    # Read the published runs, and your own
    found = read_all()

    # Print the commands of missing runs, of all families of claims or of these figures
    if cfg.todo:
        runs, root = planned_cells(study.families), 'out/reproduce'
        if cfg.figure:
            runs, root = [], 'out/figures'
            for figure in figures:
                runs += planned(figure, cfg.size or 'XS')
        done = finished(found)
        print_todo([run for run in unique(runs) if run not in done], root)

    # Or draw figures of the paper
    elif cfg.figure:
        os.makedirs('out/figures', exist_ok=True)
        for figure in figures:
            show_figure(figure, cfg.size, found)

    # Or draw the verdicts on the claims
    else:
        os.makedirs('out/results', exist_ok=True)
        show_verdicts(cfg.effects or f'{FIRST}/effects.csv', found)


# Commands of missing runs

def print_todo(runs: list[Run], root: str) -> None:
    """Print shell commands that train or resume the runs in `root`: on eight GPUs at the paper's
    sizes, on one thread at others. Estimate the hours on an A100 at 1e14 FLOP/s, a third of its
    peak, or on a CPU core at 3e10."""
    counted: dict[tuple[str, str], float] = {}  # the FLOPs of a size and model, at all rates
    for run in runs:
        # Count the FLOPs, of models without memory for their weights
        options = run_options(run)
        if (run.size, run.model) not in counted:
            train, cfg = configs(options)
            with torch.device('meta'):
                llama_params = Transformer(cfg.llama()).num_params()
                tokens = train.tokens or train.tokens_per_param * llama_params
                counted[run.size, run.model] = tokens * flops_per_token(Transformer(cfg))
        flops = counted[run.size, run.model]
        start, hours = 'torchrun --nproc_per_node=8', f'{flops / 1e14 / 3600:.2g} A100-hours'
        if run.size in ('nano', 'mini', *load_study().sizes):
            start, hours = 'OMP_NUM_THREADS=1 python', f'{flops / 3e10 / 3600:.2g} core-hours'
        # Go on with a run that has begun
        folder = f'{root}/{run.size}/{run.model}_rate={run.rate:g}_seed={run.seed}'
        resume = ' --init_from=resume' if os.path.exists(f'{folder}/config.json') else ''
        print(f'{start} train.py {options} --out_dir={folder}{resume}  # {hours}', flush=True)


# Verdicts on the claims

# Of a family's runs.csv
RUN_COLUMNS = ('size', 'model', 'rate', 'seed', 'parameters', 'tokens', 'flops_per_token',
               'seconds', 'val_bits_per_byte', 'test_bits_per_byte', 'y')
# What pictures write for words of the claims
PLAIN_WORDS = {'one d_k': 'one key-query diagonal', 'd_k': 'the key-query diagonal',
               'taken twice': 'repeated'}
# How a picture shows a verdict: the marker, its colour, and whether it is filled
MARKS = {'holds': ('o', 'C0', 'full'), 'does not hold': ('X', 'C3', 'full'),
         'undecided': ('s', '0.4', 'none')}


class Shown(NamedTuple):
    """A row of a picture: the effect of a claim at a size. The change in perplexity, its interval
    and the bounds of the claim are in per cent."""
    label: str
    A: str
    B: str
    size: str
    seeds: int
    effect: float
    low: float
    high: float
    above: float  # -1000 or 1000 for a claim without this bound
    below: float
    word: str


def show_verdicts(path: str, found: Results) -> None:
    """Print the verdicts of an effects.csv on the rows of claims.csv, and draw these and all others
    in out/results. Write the own runs that count to a CSV, which verdicts.py can read."""
    # Keep your own runs that count in a row
    if counted := leave_out_of_rows(found):
        write_runs(counted, 'out/reproduce/runs.csv')
        print(f'Your own runs, {len(counted)}, count in the tables and the effects.csv of '
              'python results/tokens/verdicts.py --runs=out/reproduce/runs.csv\n', flush=True)

    # Print the verdicts on the rows of claims.csv
    effects = read_csv(path)
    claims = claim_rows(effects)
    print('A over B: how much higher the perplexity per Llama token of A is than that of B, '
          f'and the interval over seeds.\n\n{claim_table(claims)}\n', flush=True)

    # Draw all effects, and those of the claims
    draw_verdicts(all_rows(effects)).savefig('out/results/rows.png', dpi=DPI)
    draw_verdicts(claims).savefig('out/results/claims.png', dpi=DPI)
    print('out/results/rows.png shows all effects, claims.png those of results/claims.csv',
          flush=True)


def leave_out_of_rows(found: Results) -> Results:
    """Return the own runs that count in a row of the study, and name those at its sizes that count
    in none."""
    study = load_study()
    cells, counted = set(planned_cells(study.families)), {}
    for run, result in found.items():
        if run.size not in study.sizes or result.folder is None:
            continue
        if run.data:
            leave_out(result.folder, f'it read {run.data}, not the text of the study')
        elif run.seed >= TRIAL_SEEDS:
            leave_out(result.folder, f'seeds from {TRIAL_SEEDS} on choose learning rates')
        elif run not in cells:
            leave_out(result.folder, 'no row has its model at its size, rate and seed')
        else:
            counted[run] = result
    return counted


def write_runs(runs: Results, path: str) -> None:
    """Write runs as a CSV with the columns of the families' runs.csv."""
    rows = []
    for run, result in runs.items():
        values = vars(run) | vars(result)
        rows.append({name: '' if values[name] is None else str(values[name])
                     for name in RUN_COLUMNS})
    write_atomic(path, csv_text(rows).encode())


def claim_rows(effects: list[Row]) -> list[Shown]:
    """Return the rows of claims.csv, with its labels. Of a claim that several families have, the
    last with an interval counts."""
    rows = {(row.A, row.B): row for row in reversed(all_rows(effects))}
    shown = []
    for claim in read_csv(f'{RESULTS}/claims.csv'):
        if row := rows.get((claim['A'], claim['B'])):
            shown.append(row._replace(label=claim['label']))
    return shown


def all_rows(effects: list[Row]) -> list[Shown]:
    """Return the rows of an effects.csv that have an interval, at their largest size. Of the rows
    of the same models at the same size the one of the last family counts: it has most seeds."""
    # Find the largest size with an interval, which is the last line of each claim
    largest = {}
    for row in effects:
        if row['unit'] == 'perplexity' and row['low_%']:
            largest[row['family'], row['id']] = row

    # Show the last family's rows first, and of earlier ones those that no later one has
    shown: dict[tuple[str, str, str], Shown] = {}
    for family in reversed(unique(row['family'] for row in effects)):
        for row in largest.values():
            key = row['A'], row['B'], row['size']
            if row['family'] != family or key in shown:
                continue
            label = row['claim']
            for old, new in PLAIN_WORDS.items():
                label = label.replace(old, new)
            shown[key] = Shown(
                label, *key, int(row['seeds']), float(row['effect_%']), float(row['low_%']),
                float(row['high_%']), float(row['above_%'] or -1000),
                float(row['below_%'] or 1000), row['verdict'])
    return list(shown.values())


def claim_table(rows: list[Shown]) -> str:
    """Format the rows of a picture."""
    header = ['claim', 'A', 'B', 'size', 'seeds', 'A over B', 'verdict']
    cells = [[row.label, row.A, row.B, row.size, str(row.seeds),
              f'{row.effect:+.1f}% ({row.low:+.1f} to {row.high:+.1f})', row.word] for row in rows]
    return markdown_table(header, cells)


def draw_verdicts(rows: list[Shown]) -> Figure:
    """Draw the interval of each row, and where its claim would hold, in a group for each verdict.
    The title counts them."""
    rows = sorted(rows, key=lambda row: list(MARKS).index(row.word))
    words = [row.word for row in rows]
    labels = [textwrap.fill(row.label, 50) for row in rows]
    heights = [0.2 + 0.14 * label.count('\n') for label in labels]  # inches
    # A row that begins a group has a gap above it
    gaps = [0.15 * (n > 0 and word != words[n - 1]) for n, word in enumerate(words)]
    length = sum(heights) + sum(gaps)
    figure = Figure((WIDTH, 1.9 + 1.3 * length), layout='constrained')
    figure.suptitle(f'Of {len(rows)} claims, {words.count("holds")} hold, '
                    f'{words.count("does not hold")} do not, and '
                    f'{words.count("undecided")} are undecided', fontsize=12)
    axes = figure.subplots()

    # Draw the rows from top to bottom
    places = np.cumsum(np.add(heights, gaps)) - np.array(heights) / 2
    for place, height, gap, row in zip(places, heights, gaps, rows, strict=True):
        if gap:
            axes.axhline(place - height / 2 - gap / 2, color='0.7', lw=0.8)
        axes.barh(place, row.below - row.above, left=row.above, height=0.8 * height, color='0.9')
        marker, color, fill = MARKS[row.word]
        axes.errorbar(row.effect, place, fmt=marker, ms=6, color=color, fillstyle=fill,
                      xerr=[[row.effect - row.low], [row.high - row.effect]])

    # Write claims on the left, sizes and seeds on the right
    axes.set_yticks(places, labels)
    axes.set_ylim(length, 0)
    right = axes.secondary_yaxis('right')
    right.set_yticks(places, [f'{row.size}, {row.seeds} seeds' for row in rows])
    axes.set_xlim(min(row.low for row in rows) - 1, max(row.high for row in rows) + 1)
    axes.set_xlabel('change in perplexity, %: left is better for what is named first\n'
                    'a Llama that is not said to have ALiBi has RoPE')
    axes.tick_params(labelsize=9)
    right.tick_params(labelsize=9)

    # Explain marks and bands below the rows
    handles = [Line2D([], [], marker=marker, color=color, fillstyle=fill, label=word)
               for word, (marker, color, fill) in MARKS.items()]
    handles.append(Patch(color='0.9', label='where the claim would hold'))
    figure.legend(handles=handles, loc='outside lower center', ncols=4, fontsize=9)
    return figure


if __name__ == '__main__':
    main(sys.argv[1:])

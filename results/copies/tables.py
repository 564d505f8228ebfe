"""
What the runs of this study say, computed again from runs.csv:

    python results/copies/tables.py

The verdicts on all rows of verdicts.csv by RULE.md, how each model copies, and the ablations are
printed and written to effects.csv, copying.csv and ablations.csv beside this file; copies.png shows
four models.
"""
import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / 'tokens')]

from matplotlib.figure import Figure

from nanocem.files import csv_text, markdown_table, read_csv, write_atomic
from study import Row, Run, copying_rows, counting_runs
from verdicts import (
    Tables,
    effects_csv,
    judge,
    losses_by_size,
    pooled_over_sizes,
    verdict_table,
)

SHOWN = {'llama-alibi': 'Llama with ALiBi', 'llama-alibi-copies': '... with both additions',
         'attn-1-none': 'CEM attention', 'attn-1-copies': '... with both additions'}
KINDS = {'repeated, nats': 'repeated targets: 16%', 'other, nats': 'all others: 84%'}


def copies_rule(folder: Path, claims: list[Row], own: dict[Run, Row]) -> Tables:
    """RULE.md: noise by kinds, as in the third family, but from this study's own runs. Ablations
    have no word."""
    rows = [row for row in read_csv(f'{folder}/runs.csv') if not row['variant']]
    return pooled_over_sizes(folder, claims, losses_by_size(rows))


def ablation_rows(runs: list[Row]) -> list[Row]:
    """Return how much each ablation changes the perplexity of its model, in per cent, at seed 1."""
    same = {run['model']: run for run in runs
            if (run['size'], run['seed'], run['variant']) == ('S', '1', '')}
    found = []
    for run in (run for run in runs if run['variant']):
        change = math.expm1(float(run['y']) - float(same[run['model']]['y']))
        found.append({'ablation': run['variant'], 'model': run['model'],
                      'perplexity, %': f'{100 * change:+.1f}',
                      'repeated, nats': run['repeated_loss'], 'other, nats': run['other_loss']})
    return sorted(found, key=lambda row: (row['model'], row['ablation']))


def table(rows: list[Row]) -> str:
    return markdown_table([*rows[0]], [[*row.values()] for row in rows])


def draw(rows: list[Row], size: str = 'S') -> Figure:
    """Draw the losses of repeated and of other targets of four models, at one scale."""
    figure = Figure((8.3, 3.3), layout='constrained')
    figure.suptitle('The shifted key and the match bias lower the loss of repeated targets')
    of = {row['model']: row for row in rows if row['size'] == size}
    both = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, (name, title) in zip(both, KINDS.items(), strict=True):
        values = [float(of[model][name]) for model in SHOWN]
        colors = ['#4477aa' if 'llama' in model else '#ee6677' for model in SHOWN]
        bars = axes.barh(range(len(SHOWN)), values, color=colors)
        axes.bar_label(bars, [f'{value:.2f}' for value in values], padding=3)
        axes.set_title(title, fontsize=10)
        axes.set(xlabel='loss, nats per token', yticks=range(len(SHOWN)),
                 yticklabels=SHOWN.values(), ylim=(len(SHOWN) - 0.5, -0.5))
        axes.margins(x=0.12)
        axes.spines[['top', 'right']].set_visible(False)
    return figure


def main() -> None:
    runs = counting_runs(HERE)
    verdicts = judge(HERE, copies_rule)
    copying = copying_rows(runs)
    ablations = ablation_rows(runs)
    for text in (verdict_table(verdicts), table(copying), table(ablations)):
        print(f'{text}\n')
    write_atomic(f'{HERE}/effects.csv', effects_csv({'copies': verdicts}).encode())
    write_atomic(f'{HERE}/copying.csv', csv_text(copying).encode())
    write_atomic(f'{HERE}/ablations.csv', csv_text(ablations).encode())
    draw(copying).savefig(f'{HERE}/copies.png', dpi=200)


if __name__ == '__main__':
    main()

"""
What the runs of this study say, computed again from runs.csv and those of CEM that copies:

    python results/gradient/tables.py

The verdicts on all rows of verdicts.csv by RULE.md, how each model copies, by how often a pair
stands in the training text, the weights of all heads, and the ablations are printed and written
beside this file: effects.csv, copying.csv, counts.csv, heads.csv, ablations.csv. gaps.csv is
made from pretrained.csv, which run.py of commit b47f8ef measured in the models of pretrained/.
curves.png shows when a model falls behind.
"""
import json
import math
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / 'tokens')]

from matplotlib.figure import Figure

from nanocem.files import csv_text, markdown_table, read_csv, write_atomic
from study import (
    Row,
    Run,
    copying_rows,
    count_rows,
    counting_runs,
    load_study,
    read_published_rows,
)
from verdicts import (
    Tables,
    effects_csv,
    judge,
    losses_by_size,
    pooled_over_sizes,
    verdict_table,
)

COPIES = HERE.parent / 'copies'
# Drawn in curves.png, at S, over Llama with all three
CURVES = {'cem-1-three': 'plain all-CEM, one step', 'cem-1-three-wide': "... Llama's parameters",
          'attn-1-three': 'CEM attention', 'attn-1-three-wide': "... Llama's parameters",
          'attn-1-both-wide': "... Llama's parameters, without the diagonal"}


def all_runs() -> list[Row]:
    """Return the rows of this study's runs and of those of CEM that copies, without trials."""
    return counting_runs(COPIES, HERE)


def gradient_rule(folder: Path, claims: list[Row], own: dict[Run, Row]) -> Tables:
    """RULE.md: noise by kinds, as in the third family, from the runs of this study, of CEM that
    copies, and the study's of Llama with RoPE. Ablations have no word."""
    rows = [row for row in all_runs() if not row['variant']]
    rope = [row for run, row in read_published_rows(load_study().families).items()
            if run.size in ('S', 'M') and run.model == 'llama']
    return pooled_over_sizes(folder, claims, losses_by_size(rope + rows))


def head_rows(runs: list[Row]) -> list[Row]:
    """Return w_k and g_k of each layer and head of the runs of seed 1."""
    found = []
    for run in runs:
        for name in ('w_k', 'g_k'):
            if run['seed'] == '1' and not run['variant'] and run.get(name):
                for layer, values in enumerate(json.loads(run[name]), 1):
                    found.append({'size': run['size'], 'model': run['model'], 'weight': name,
                                  'layer': str(layer), 'heads': ' '.join(map(str, values))})
    return found


def ablation_rows(runs: list[Row]) -> list[Row]:
    """Return how much each ablation changes the perplexity of its model, in per cent, at seed 1 of
    size S."""
    same = {run['model']: run for run in runs
            if (run['size'], run['seed'], run['variant']) == ('S', '1', '')}
    found = []
    for run in (run for run in runs if run['variant'] and 'by_count' in run):
        change = math.expm1(float(run['y']) - float(same[run['model']]['y']))
        found.append({'ablation': run['variant'], 'model': run['model'],
                      'parameters': run['parameters'], 'perplexity, %': f'{100 * change:+.1f}',
                      'repeated, nats': run['repeated_loss'], 'other, nats': run['other_loss']})
    return sorted(found, key=lambda row: (row['model'], row['ablation']))


def gap_rows() -> list[Row]:
    """Return where the models of pretrained/ lose to Llama with ALiBi: for each kind of target the
    difference in nats, and its share of the whole difference."""
    losses: dict[str, dict[str, tuple[int, float]]] = {}
    for row in read_csv(f'{HERE}/pretrained.csv'):
        kinds = losses.setdefault(row['model'], {})
        kinds[row['pair_in_training_from']] = int(row['targets']), float(row['loss'])
    llama = losses.pop('llama_alibi')
    all_targets = sum(targets for targets, _ in llama.values())
    found = []
    for model, kinds in losses.items():
        whole = sum(targets * (loss - llama[kind][1]) for kind, (targets, loss) in kinds.items())
        for kind, (targets, loss) in kinds.items():
            over = loss - llama[kind][1]
            found.append({'model': model, 'pair in training, from': kind,
                          'targets, %': f'{100 * targets / all_targets:.1f}',
                          'over Llama, nats': f'{over:+.3f}',
                          'share of the difference, %': f'{100 * targets * over / whole:.0f}'})
    return found


def draw_curves() -> Figure:
    """Draw the training loss of models at S less that of Llama with all three, the mean of seeds
    that both have."""
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for row in read_csv(f'{HERE}/losses.csv'):
        if row['size'] == 'S' and not row['variant']:
            of_run = losses.setdefault((row['model'], row['seed']), {})
            of_run[int(row['step'])] = float(row['loss'])
    figure = Figure((8.3, 4), layout='constrained')
    axes = figure.subplots()
    for n, (model, label) in enumerate(CURVES.items()):
        seeds = [seed for name, seed in losses
                 if name == model and ('llama-alibi-three', seed) in losses]
        steps = [*losses[model, '1']]
        over = [statistics.fmean(losses[model, seed][step] - losses['llama-alibi-three', seed][step]
                                 for seed in seeds) for step in steps]
        # Each point is the mean of four, which are of 50 steps each
        points = [statistics.fmean(over[i - 4:i]) for i in range(4, len(over) + 1, 4)]
        style = '--' if label.startswith('...') else '-'
        axes.plot(steps[3::4], points, style, color=f'C{(0, 0, 1, 1, 2)[n]}', label=label)
    axes.axhline(0, color='0.6', lw=1)
    axes.set_xlabel('step')
    axes.set_ylabel('training loss over Llama, nats')
    axes.set_title('With as many parameters CEM approaches Llama in the second half (S,\n'
                   'all with shifted key and match bias, all but one with the scaled diagonal)',
                   fontsize=10)
    axes.legend(fontsize=8, loc='lower right', bbox_to_anchor=(0.95, 0))
    return figure


def main() -> None:
    runs = all_runs()
    verdicts = judge(HERE, gradient_rule)
    print(f'{verdict_table(verdicts)}\n')
    write_atomic(f'{HERE}/effects.csv', effects_csv({'gradient': verdicts}).encode())
    models = {row['model'] for row in read_csv(f'{HERE}/models.csv')}
    runs = [run for run in runs if run['model'] in models]
    for name, rows in (('copying', copying_rows(runs)), ('counts', count_rows(runs)),
                       ('heads', head_rows(runs)), ('ablations', ablation_rows(runs)),
                       ('gaps', gap_rows())):
        if rows:
            print(f'{markdown_table([*rows[0]], [[*row.values()] for row in rows])}\n')
            write_atomic(f'{HERE}/{name}.csv', csv_text(rows).encode())
    draw_curves().savefig(HERE / 'curves.png', dpi=200)


if __name__ == '__main__':
    main()

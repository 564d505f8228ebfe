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
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / 'tokens')]

from nanocem.files import csv_text, markdown_table, read_csv, write_atomic
from study import (
    Row,
    Run,
    copying_rows,
    count_rows,
    counting_runs,
    draw_curves,
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
CURVES = [('S', 'cem-1-three', 'C0-', 'plain all-CEM, one step'),
          ('S', 'cem-1-three-wide', 'C0--', "... Llama's parameters"),
          ('S', 'attn-1-three', 'C1-', 'CEM attention'),
          ('S', 'attn-1-three-wide', 'C1--', "... Llama's parameters"),
          ('S', 'attn-1-both-wide', 'C2--', "... Llama's parameters, without the diagonal")]
CURVES_TITLE = ('With as many parameters CEM approaches Llama in the second half (S,\n'
                'all with shifted key and match bias, all but one with the scaled diagonal)')


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
    curves = draw_curves(read_csv(f'{HERE}/losses.csv'), CURVES, CURVES_TITLE)
    curves.savefig(HERE / 'curves.png', dpi=200)


if __name__ == '__main__':
    main()

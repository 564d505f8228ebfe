"""
What the runs of this study say, computed again from its runs.csv and those of copies and gradient:

    python results/ties/tables.py

The verdicts on the rows of verdicts.csv by RULE.md, the differences of differences.csv, and how
each model copies, also by how often a pair stands in the training text, are printed and written
beside this file: effects.csv, differences_found.csv, copying.csv, counts.csv. curves.png has the
losses during training. Finished runs count, so it can be run at any time.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / 'tokens')]

import torch

from configurator import read_options
from model import Cache, ModelConfig, Transformer
from nanocem.files import csv_text, markdown_table, read_csv, write_atomic
from study import Row, Run, copying_rows, count_rows, counting_runs, draw_curves
from verdicts import (
    Table,
    Tables,
    Verdict,
    effects_csv,
    find_effects,
    judge,
    losses_by_size,
    noise_by_kind,
    verdict_table,
)

# The study itself, and those whose runs count where the model is the same
STUDIES = [HERE.parent / 'copies', HERE.parent / 'gradient', HERE]
DIFFERENCES = ('id', 'question', 'A', 'B', 'size', 'seeds', 'effect_%', 'low_%', 'high_%',
               'expected_S', 'expected_M', 'source')  # of differences_found.csv
CURVES = [('S', 'llama-alibi-three-shifted', 'k-', 'no tie, but shifted values'),
          ('M', 'llama-alibi-three-shifted', 'k--', '... at M'),
          ('S', 'llama-kv-three-wide', 'C0-', 'first tie, W_V = W_K'),
          ('M', 'llama-kv-three-wide', 'C0--', '... at M'),
          ('S', 'attn-1-three-wide', 'C1-', 'first and second: CEM attention'),
          ('M', 'attn-1-three-wide', 'C1--', '... at M'),
          ('S', 'llama-qo-three-wide', 'C2-', 'second tie, W_O = W_Q'),
          ('S', 'mlp-1-three-wide', 'C3-', 'third tie, W_d = V')]
CURVES_TITLE = 'What the first tie gains, shifted values gain without it (S, unless M is named)'


def ties_rule(folder: Path, claims: list[Row], own: dict[Run, Row]) -> Tables:
    """RULE.md: two kinds of models, without a CEM MLP and with one. Noise is pooled over S and M,
    from all runs of the three studies. Models at 0.7 of their rate have one seed: no noise."""
    kinds = {}
    for study in STUDIES:
        for row in read_csv(f'{study}/models.csv'):
            kinds[row['model']] = 'CEM MLP' if row['noise'] == 'CEM MLP' else 'no CEM MLP'
    runs = [run for run in counting_runs(*STUDIES) if not run['variant']]
    y = losses_by_size(runs)
    noise = noise_by_kind([y[size] for size in 'SM' if size in y], kinds)
    return {('perplexity', size): Table(losses, noise) for size, losses in y.items()}


def differences() -> list[Verdict]:
    """Return the effects of the rows of differences.csv, each alone (m = 1) and without a word."""
    rows = [{'unit': 'perplexity'} | row for row in read_csv(f'{HERE}/differences.csv')]
    tables = ties_rule(HERE, rows, {})
    return [(row, find_effects(row, [row], tables), '') for row in rows]


def numbers_per_token(model: Row) -> float:
    """Return how many numbers a model's cache keeps per token, relative to those of a Llama without
    additions: keys, values where they are not the keys, and the layer's input where scores need
    it."""
    options = {'d_model': 80, 'n_head': 5, 'vocab_size': 8, 'context_length': 8}
    options |= read_options(model['options'].split(), ModelConfig) | {'n_layer': 1}
    cache = Cache()
    with torch.no_grad():
        Transformer(ModelConfig(**options)).next_logits(torch.arange(5)[None], cache)
    return cache.numbers_per_token() / (2 * options['d_model'])


def study_runs(models: dict[str, Row]) -> list[Row]:
    """Return the runs of this study's models. RULE.md: the FLOPs of g2 are those of g1."""
    runs = [run for run in counting_runs(*STUDIES) if run['model'] in models]
    flops = {models[run['model']]['row']: run['flops_per_token'] for run in runs}
    for run in runs:
        if models[run['model']]['row'] == 'g2':
            run['flops_per_token'] = flops.get('g1', '')
    return runs


def main() -> None:
    models = {row['model']: row for row in read_csv(f'{HERE}/models.csv')}
    verdicts, found, runs = judge(HERE, ties_rule), differences(), study_runs(models)
    copying = [row | {'cache': f'{numbers_per_token(models[row["model"]]):g}'}
               for row in copying_rows(runs)]
    tables = {'effects': effects_csv({'ties': verdicts}),
              'differences_found': effects_csv({'ties': found}, DIFFERENCES)}
    print(f'{verdict_table(verdicts)}\n\n{verdict_table(found)}\n')
    for name, rows in ('copying', copying), ('counts', count_rows(runs)):
        if rows:
            print(f'{markdown_table([*rows[0]], [[*row.values()] for row in rows])}\n')
            tables[name] = csv_text(rows)
    for name, text in tables.items():
        write_atomic(f'{HERE}/{name}.csv', text.encode())
    losses = [row for study in STUDIES[1:] for row in read_csv(f'{study}/losses.csv')]
    draw_curves(losses, CURVES, CURVES_TITLE).savefig(HERE / 'curves.png', dpi=200)


if __name__ == '__main__':
    main()

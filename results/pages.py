"""
Write the tables of the pages, computed again from the CSVs of the studies:

    python results/pages.py

In README.md and results/README.md a table stands between `<!-- results/pages.py: NAME -->` and
`<!-- end -->`, and a function here has its NAME. The studies' own tables.py and
verdicts.py compute effects, intervals and verdicts, and are run first after new runs; this file
only chooses and formats what they wrote.
A test fails where a page is not what this command writes.
"""
import math
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
sys.path[:0] = [str(RESULTS.parent), str(RESULTS)]

from nanocem.files import markdown_table, read_csv, write_atomic
from study import LLAMA, TRIAL_SEEDS, Row, load_study, read_published_rows

ROOT = RESULTS.parent
PAGES = ROOT / 'README.md', RESULTS / 'README.md'
BLOCK = re.compile(r'(<!-- results/pages\.py: ([\w-]+) -->\n).*?(<!-- end -->)', re.DOTALL)

# The study of the ties: its models of as many weights as Llama, by the ties that they have
TIES = {
    LLAMA: 'Llama with our additions',
    'llama-alibi-three-shifted': 'Llama, its values shifted',
    'llama-kv-three-wide': 'first tie: W_V = W_K',
    'llama-kv-three-wide-unshifted': 'first tie, its values not shifted',
    'llama-qo-three-wide': 'second tie: W_O = W_Q',
    'mlp-1-three-wide': 'third tie: W_d = V, a CEM MLP',
    'attn-1-three-wide': 'first and second: CEM attention',
    'kv-mlp-1-three-wide': 'first and third',
    'cem-1-three-wide': 'all three: CEM attention and CEM MLP'}

# CEM beside Llama, without and with the additions: a model, its effect over the Llama with the same
# additions, and over Llama with ALiBi alone (the study and the row of its verdicts.csv)
ADDITIONS = [
    ('CEM attention, no additions', 'copies p4', ''),
    ('... shifted key and match bias', 'copies r1', 'copies k1'),
    ('... these two, no diagonal, wider MLP', 'gradient w3', ''),
    ('... all three', 'gradient w1', 'gradient w8a'),
    ('... all three, wider MLP', 'gradient w2a', ''),
    ('plain all-CEM, two steps, shifted key and match bias', 'copies r4', 'copies k4'),
    ('plain all-CEM, one step, all three', 'gradient w4', ''),
    ('plain all-CEM, one step, all three, wider MLP', 'gradient w5', ''),
    ('Llama, shifted key and match bias', '', 'copies k10')]

# What else the studies of the additions asked, in the words of the page
QUESTIONS = {
    'gradient w2b': 'CEM attention with as many parameters is level with Llama (within 2%), both '
                    'with all three',
    'copies p1': 'the shifted key improves CEM attention that has the match bias by at least 2%',
    'gradient w7': 'CEM attention with all three is level (within 2%) without the shifted key',
    'gradient w6a': "the scaled diagonal instead of the paper's improves CEM attention with the "
                    'other two by at least 2%',
    'gradient w6b': 'the scaled diagonal improves Llama with the other two by at least 2%',
    'copies p2': 'a second step improves CEM attention with shifted key and match bias by at least '
                 '2%',
    'copies p3': 'a second step improves plain all-CEM with shifted key and match bias by at '
                 'least 2%',
    'gradient w9': 'CEM attention is at most 5% behind a Llama whose values are tied to its keys, '
                   'both with shifted key and match bias',
    'gradient w8b': 'CEM attention with all three is better than Llama with RoPE and no additions'}

# Losses of repeated and of other targets: models of the studies of the additions
COPYING = {'llama-alibi': 'Llama', 'llama-alibi-half': '... shifted key',
           'llama-alibi-match': '... match bias', 'llama-alibi-copies': '... both',
           LLAMA: '... both and the scaled diagonal', 'attn-1-none': 'CEM attention',
           'attn-1-half': '... shifted key', 'attn-1-match': '... match bias',
           'attn-1-copies': '... both', 'attn-1-three': '... both and the scaled diagonal',
           'attn-1-three-wide': '... all three, wider MLP'}

# Where CEM without additions loses to Llama with ALiBi, at M: each with a seed that Llama has too
GAPS = [('CEM attention', 'attn-1-none', 2), ('all-CEM', 'cem-2', 1),
        ('plain all-CEM', 'cem-2-plain', 1), ('Llama with RoPE', 'llama', 2)]


# Cells

def signed(number: str) -> str:
    return f'{float(number):+g}' if float(number) else '0'


def rounded(number: str) -> str:
    return f'{round(float(number), 1) + 0.0:+.1f}'  # never -0.0


def percent(row: Row) -> str:
    """Format a row of an effects.csv: the change, and its interval if it has one."""
    text = rounded(row['effect_%'])
    if row['low_%']:
        text += f' ({rounded(row["low_%"])} to {rounded(row["high_%"])})'
    return text


def was_run(row: Row | None) -> bool:
    return row is not None and bool(row['effect_%'])


def effects(study: str) -> list[Row]:
    return read_csv(f'{RESULTS}/{study}/effects.csv')


def effect(name: str, size: str = 'S') -> Row | None:
    """Return the effect of a row such as 'copies r1' at a size; None if it was not run there."""
    study, row_id = name.split()
    return next((row for row in effects(study) if (row['id'], row['size']) == (row_id, size)), None)


def copying(study: str) -> dict[tuple[str, str], Row]:
    """Return what a study measured of each size and model, the means over its seeds."""
    return {(row['size'], row['model']): row for row in read_csv(f'{RESULTS}/{study}/copying.csv')}


def ratio(row: Row, other: Row, name: str) -> float:
    return float(row[name]) / float(other[name])


# Tables

def ties_effects() -> list[Row]:
    """Return what the study of the ties found."""
    return effects('ties') + read_csv(f'{RESULTS}/ties/differences_found.csv')


def over_llama(model: str, size: str = 'S') -> Row | None:
    """Return the effect of a model of the ties over Llama. None if it was not run at this size."""
    return next((row for row in ties_effects()
                 if (row['A'], row['B'], row['size']) == (model, LLAMA, size)), None)


def change(model: str, size: str) -> str:
    """Format what a model of the ties changes over Llama; '' if it was not run at this size."""
    if model == LLAMA:
        return '0'
    found = over_llama(model, size)
    return percent(found) if was_run(found) else ''


def ties_table(columns: list[str]) -> str:
    """Format these columns of the models of the study of the ties. The last one is of size M, and
    all others are of size S."""
    measured = copying('ties')
    llama, rows = measured['S', LLAMA], []
    for model, label in TIES.items():
        found = measured['S', model]
        cells = {
            '': label,
            'parameters, M': f'{int(found["parameters"]) / 1e6:.3f}',
            'FLOPs': f'{ratio(found, llama, "flops_per_token"):.2f}',
            'KV cache': f'{float(found["cache"]):.2f}',
            'bits per byte': f'{float(found["bits per byte"]):.3f}',
            'repeated targets, nats': found['repeated, nats'],
            'perplexity vs. Llama, %': change(model, 'S'),
            'seeds': found['seeds'],
            'at 1.51 M, one seed, %': change(model, 'M')}
        rows.append([cells[name] for name in columns])
    return markdown_table(columns, rows)


def front() -> str:
    """The front page's table of the ties."""
    return ties_table(['', 'FLOPs', 'bits per byte', 'perplexity vs. Llama, %', 'seeds',
                       'at 1.51 M, one seed, %'])


def ties() -> str:
    """Which of the three ties pays? All models of as many weights as Llama."""
    return ties_table(['', 'parameters, M', 'FLOPs', 'KV cache', 'bits per byte',
                       'repeated targets, nats', 'perplexity vs. Llama, %', 'seeds',
                       'at 1.51 M, one seed, %'])


def expected() -> str:
    """What was expected of the ties beside what was found. The largest size with an interval gives
    the verdict, and has it in its row."""
    rows, waiting = [], []
    for row in (read_csv(f'{RESULTS}/ties/verdicts.csv')
                + read_csv(f'{RESULTS}/ties/differences.csv')):
        found = {one['size']: one for one in ties_effects() if one['id'] == row['id']}
        decided = [size for size, one in found.items() if one['low_%']]
        for size in row['sizes'].split():
            if not was_run(found.get(size)):
                waiting.append(f'{row["id"]} at {size}')
                continue
            word = found[size].get('verdict', '') if size in decided[-1:] else ''
            rows.append([row.get('claim') or row['question'], size,
                         signed(row[f'expected_{size}']), percent(found[size]), word])
    note = f'Not run yet (ids of ties/*.csv): {", ".join(waiting)}.' if waiting else ''
    if not rows:
        return note
    table = markdown_table(['', 'size', 'expected, %', 'found, %', 'verdict'], rows)
    return '\n\n'.join(filter(None, [table, note]))


def gap() -> str:
    """Where CEM without additions is behind: repeated targets, and a text that is read again."""
    measured = {(row['size'], row['model'], row['seed']): row
                for row in read_csv(f'{RESULTS}/tokens/third/copying.csv')}
    published = read_published_rows(load_study().families)
    y = {(run.size, run.model, str(run.seed)): float(row['y'])
         for run, row in published.items() if run.seed < TRIAL_SEEDS}

    def again(row: Row) -> str:
        change = float(row['read_again_loss']) - float(row['read_once_loss'])
        return f'{100 * math.expm1(change):+.0f}'

    llama = [row for (size, model, _), row in measured.items()
             if (size, model) == ('M', 'llama-alibi')]
    rows = [['Llama with ALiBi', '', '', ' and '.join(map(again, llama))]]
    for label, model, seed in GAPS:
        key, base = ('M', model, str(seed)), ('M', 'llama-alibi', str(seed))
        parts = [int(measured[key][f'{kind}_targets'])
                 * (float(measured[key][f'{kind}_loss']) - float(measured[base][f'{kind}_loss']))
                 for kind in ('repeated', 'other')]
        rows.append([label, f'{100 * math.expm1(y[key] - y[base]):+.1f}',
                     f'{100 * parts[0] / sum(parts):.0f}', again(measured[key])])
    return markdown_table(['one seed each', "perplexity over Llama's with ALiBi, %",
                           'share of the gap on repeated targets, %',
                           'change in perplexity when a text is read again, %'], rows)


def expected_of(name: str) -> str:
    """Return the effect that was expected of a row such as 'copies r1' at S."""
    study, row_id = name.split()
    claims = read_csv(f'{RESULTS}/{study}/verdicts.csv')
    return next(signed(row['expected_S']) for row in claims if row['id'] == row_id)


def additions() -> str:
    """CEM beside Llama, without and with the additions."""
    measured = copying('copies') | copying('gradient')
    rows = []
    for label, same, alone in ADDITIONS:
        found = effect(same or alone)
        model = measured['S', found['A']]
        # Llama itself has no other with the same additions
        llama = measured['S', found['B']] if same else model
        row = [label, f'{int(model["parameters"]) / 1e6:.3f}',
               f'{ratio(model, llama, "flops_per_token"):.2f}',
               f'{float(model["bits per byte"]):.3f}']
        row += [expected_of(same), percent(found), found['verdict']] if same else ['', '', '']
        rows.append([*row, percent(effect(alone)) if alone else ''])
    return markdown_table(['at S', 'parameters, M', 'FLOPs', 'bits per byte', 'expected, %',
                           'over Llama with the same additions, %', 'at most 5% behind',
                           'over Llama with ALiBi and no additions, %'], rows)


def questions() -> str:
    """What else was asked of the additions, with the verdict of the study's rule."""
    rows = []
    for name, words in QUESTIONS.items():
        found = effect(name)
        rows.append([words, expected_of(name), percent(found), found['seeds'] or '1',
                     found['verdict']])
    return markdown_table(['at S', 'expected, %', 'change in perplexity, %', 'seeds', 'verdict'],
                          rows)


def parts() -> str:
    """Losses of repeated and of other targets with each addition."""
    measured = copying('copies') | copying('gradient')
    names = 'repeated, nats', 'other, nats', 'read again, %'
    rows = [[label, *map(measured['S', model].get, (*names, 'seeds'))]
            for model, label in COPYING.items()]
    return markdown_table(['at S', 'repeated targets, nats', 'other targets, nats',
                           'change in perplexity when read again, %', 'seeds'], rows)


def claims() -> str:
    """The paper's claims with their verdicts. The last family that decides a claim counts."""
    found = effects('tokens')
    rows = []
    for claim in read_csv(f'{RESULTS}/claims.csv'):
        of_claim = [row for row in found if (row['A'], row['B']) == (claim['A'], claim['B'])]
        at = {row['size']: row for row in of_claim}  # the last family's
        decided = [row for row in of_claim if row['low_%']]
        small = percent(at['S']) if 'S' in at else f'at XS: {percent(at["XS"])}'
        rows.append([claim['in_the_papers_words'],
                     f'{decided[-1]["verdict"]} at {decided[-1]["size"]}', small,
                     percent(at['M']) if 'M' in at else ''])
    return markdown_table(['claim', 'verdict', 'change in perplexity at S, %', 'at M, %'], rows)


TABLES = {table.__name__: table
          for table in (front, ties, expected, gap, additions, questions, parts, claims)}


def with_tables(page: str) -> str:
    """Return a page's text with its tables written again. KeyError if a block has no function."""
    return BLOCK.sub(lambda block: f'{block[1]}{TABLES[block[2]]()}\n{block[3]}', page)


def main() -> None:
    for path in PAGES:
        text = path.read_text(encoding='utf-8')
        write_atomic(str(path), with_tables(text).encode())
        print(f'{path.relative_to(ROOT)}: {", ".join(name for _, name, _ in BLOCK.findall(text))}')


if __name__ == '__main__':
    main()

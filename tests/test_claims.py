"""nanocem/claims.py: what is said of made-up runs. Seeds: fixed."""
import json
import math
import os
import re

import numpy as np
import pytest
from scipy.stats import ttest_rel

from nanocem import claims
from nanocem.claims import CLAIMS, Comparison, answer, direction, holm, p_of, verdict
from nanocem.ladder import MODELS, Task
from nanocem.scaling import trend

SIZES = {'small': 8e4, 'middle': 3e5, 'large': 1e6}
HOLDS, FAILS, NOISE = 'holds', 'does not hold', 'within noise'


def runs(gaps, model='a', seeds=(1, 2, 3), noise=0.001, draw=None):
    """Results of model "b" and of `model`, whose log perplexity lies gaps[size] higher, give or
    take `noise`: -1, 0, 1 times it for the seeds, or drawn. Seeds differ by 5% in both."""
    rng = np.random.default_rng(draw)
    found = {}
    for size, gap in gaps.items():
        offsets = rng.normal(size=len(seeds)) if draw else np.arange(len(seeds)) - len(seeds) // 2
        for name, of in (('b', 0 * offsets), (model, gap + noise * offsets)):
            logs = np.array([0.05 * seed for seed in seeds]) + of
            found[size, name] = [{'seed': seed, 'perplexity': 5 * math.exp(log)}
                                 for seed, log in zip(seeds, logs, strict=True)]
    return found


def said(kind, gaps, **more):
    return answer('x', 'claim', Comparison('A', kind, 'a', 'b'), SIZES, runs(gaps, **more), {}, {})


def test_every_model_that_is_asked_for_is_trained():
    for _, tests in CLAIMS.values():
        assert {name for test in tests for name in (test.A, test.B) if name} <= set(MODELS)
    for recursion in claims.RECURSIONS.values():
        assert {recursion.once, recursion.twice} <= set(MODELS)


@pytest.mark.parametrize(('kind', 'd', 'h', 'right'), [
    ('better', -0.03, 0.01, HOLDS), ('better', 0.03, 0.01, FAILS), ('better', -0.03, 0.04, NOISE),
    ('worse', 0.03, 0.01, HOLDS), ('worse', -0.03, 0.01, FAILS),
    ('no better', 0.03, 0.01, HOLDS), ('no better', -0.03, 0.01, FAILS),
    ('no better', 0.0, 0.02, NOISE), ('no better', 0.0, 0.005, HOLDS),
    ('close', 0.01, 0.005, HOLDS), ('close', -0.2, 0.1, HOLDS), ('close', 0.05, 0.01, FAILS),
    ('alike', 0.0, 0.01, HOLDS), ('alike', -0.05, 0.01, FAILS), ('alike', 0.01, 0.02, NOISE),
    ('higher', 0.3, 0.1, HOLDS), ('better', -0.03, math.inf, NOISE)])
def test_verdicts(kind, d, h, right):
    assert verdict(kind, d - h, d + h) == right


@pytest.mark.parametrize('kind', ['better', 'worse', 'no better', 'close', 'alike', 'higher'])
def test_p_agrees_with_the_verdict(kind):
    """Below 0.05 exactly where the 95% interval speaks."""
    rng = np.random.default_rng(2)
    for _ in range(200):
        line = trend([1e5] * 3, rng.normal() * 0.02 + rng.normal(size=3) * 0.006, 1e5)
        speaks = verdict(kind, *line.interval()) != NOISE
        assert (p_of(kind, line) < 0.05) == speaks


def test_comparisons_are_paired():
    """Seeds differ by 5%, pairs by 0.1%: the interval is the pairs'. A seed that one side lacks
    does not count."""
    found = runs({'small': -0.01})
    found['small', 'b'].append({'seed': 4, 'perplexity': 99.0})
    row = answer('x', '', Comparison('A', 'better', 'a', 'b'), SIZES, found, {}, {})
    logs = [[math.log(r['perplexity']) for r in found['small', side]][:3] for side in 'ab']
    right = ttest_rel(*logs).confidence_interval()
    low, high = (f'{100 * math.expm1(end):+.1f}' for end in right)
    assert row.cells == {'small': f'-1.0% ({low} to {high})', 'middle': '', 'large': ''}
    assert row.line == row.cells['small'] and row.said == HOLDS
    assert row.slope == row.large == ''  # one size has no trend


def test_one_seed_says_nothing():
    row = said('better', {'small': -0.1}, seeds=(1,), noise=0.0)
    assert row.cells['small'] == '-9.5%' and row.said == NOISE and row.p == 1.0


TO = 'does not hold, and shrinks to {} at the largest size'


@pytest.mark.parametrize(('kind', 'gaps', 'right'), [
    ('better', (-0.01, -0.03), 'holds and grows'),
    ('better', (-0.05, -0.02), 'holds, and shrinks with size'),
    ('better', (0.09, 0.03), TO.format('+3.0%')),
    ('better', (0.01, 0.05), 'does not hold, and grows with size'),
    ('better', (0.12, 0.0), 'within noise, nearer with size'),
    ('close', (0.14, 0.02), 'within noise, nearer with size'),
    ('alike', (0.09, 0.05), TO.format('+5.1%')), ('alike', (-0.09, -0.05), TO.format('-4.9%')),
    ('no better', (-0.06, -0.03), TO.format('-3.0%')), ('worse', (0.01, 0.03), 'holds and grows')])
def test_trends(kind, gaps, right):
    noise = 0.02 if right.startswith(NOISE) else 0.001
    x = np.log10(list(SIZES.values()))
    # the same differences, on a straight line over log N
    line = np.interp(x, [x[0], x[-1]], [gaps[0], gaps[-1]])
    row = said(kind, dict(zip(SIZES, line, strict=True)), noise=noise)
    number = r'[+-]\d\.\d'
    assert re.sub(number, '#', row.said) == re.sub(number, '#', right)
    if found := re.search(number, right):
        assert float(re.search(number, row.said)[0]) == pytest.approx(float(found[0]), abs=0.3)


def test_a_flat_gap_seldom_has_a_trend():
    """A trend is said at 95%: of 60 flat gaps a few have one by chance."""
    flat = dict.fromkeys(SIZES, -0.02)
    found = [said('better', flat, draw=seed + 1).said for seed in range(60)]
    assert 51 <= found.count(HOLDS) < 60


def test_the_line_is_carried_to_86m():
    gaps = {size: 0.1 - 0.02 * math.log10(N) for size, N in SIZES.items()}
    row = said('better', gaps, noise=1e-6)
    assert row.line.startswith(f'{100 * math.expm1(0.1 - 0.12):+.1f}%')
    assert row.large.startswith(f'{100 * math.expm1(0.1 - 0.02 * math.log10(43.4e6)):+.1f}%')
    assert row.slope.startswith('-2.0%')


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_sweeps_answer_at_best_and_at_fixed_rates():
    """Two parabolas in log rate: B's optimum 0.004, A's twice that and 3% lower."""
    rates = [0.001 * 2 ** n for n in range(6)]

    def curve(best, low):
        return {r: 5 * math.exp(low + 0.05 * math.log(r / best) ** 2) for r in rates}

    sweeps = {('small', 'a'): {s: curve(0.008, -0.03) for s in (1, 2)},
              ('small', 'b'): {s: curve(0.004, 0.0) for s in (1, 2)}}
    answers = {}
    for of, kind in (('rate', 'higher'), ('best', 'close'), ('fixed', 'close')):
        test = Comparison('A', kind, 'a', 'b', of)
        answers[of] = claims.differences(test, 'small', {}, sweeps)[1]
    assert answers['rate'] == pytest.approx(math.log(2), abs=0.02)
    assert answers['best'] == pytest.approx(-0.03, abs=1e-3)
    assert answers['fixed'] == pytest.approx(-0.03 + 0.05 * math.log(2) ** 2, abs=1e-3)


def test_events_are_counted(tmp_path):
    lines = [{'step': 10}, {'step': 11, 'event': 'spike'}, {'step': 20}]
    text = '\n'.join(map(json.dumps, lines)) + '\n{"step": 2'  # the last line is half written
    (tmp_path / 'log.jsonl').write_text(text)
    found = {('small', 'a'): [{'out_dir': str(tmp_path), 'seed': 1, 'steps': 20}]}
    row = answer('x', '', Comparison('A', 'none', 'a'), SIZES, found, {}, {})
    assert row.cells['small'] == '1 in 20 steps' and row.said == FAILS
    assert answer('x', '', Comparison('A', 'none', 'a'), SIZES, {}, {}, {}).said == 'not run'
    beside = Comparison('A', 'none', 'a', 'b')
    assert answer('x', '', beside, SIZES, found, {}, {}).said == 'not run'
    # of A's two seeds the first has its spike at step 11, the second another event
    (tmp_path / 'log2').mkdir()
    (tmp_path / 'log2/log.jsonl').write_text('{"step": 11, "event": "no context"}\n{"step": 20}')
    found['small', 'a'].append({'out_dir': str(tmp_path / 'log2'), 'seed': 2, 'steps': 20})
    for n, (seed, step, cell, said) in enumerate([
            (1, 11, '0 in 20 steps; 1 shared', HOLDS), (1, 12, '1 in 20 steps', FAILS),
            (2, 11, '0 in 20 steps', HOLDS), (3, 11, '', 'not run')]):
        (tmp_path / f'b{n}').mkdir()
        (tmp_path / f'b{n}/log.jsonl').write_text(json.dumps({'step': step, 'event': 'spike'}))
        found['small', 'b'] = [{'out_dir': str(tmp_path / f'b{n}'), 'seed': seed}]
        row = answer('x', '', beside, SIZES, found, {}, {})
        assert (row.cells['small'], row.said) == (cell, said)


@pytest.mark.parametrize(('curves', 'line', 'right'), [
    ({'a': (4, 3, 2, 1), 'b': (4, 3, 2, 1)}, 'on 2, 2, 2 of 2 kernels', 'holds in part'),
    ({'a': (4, 3, 2, 1), 'b': (4, 3, 2, 5)}, 'on 2, 2, 1 of 2 kernels', 'holds'),
    ({'a': (4, 5, 2, 1)}, 'on 0, 1, 1 of 1 kernels', FAILS)])
def test_recursion_on_gp(curves, line, right, tmp_path):
    path = tmp_path / 'table.csv'
    not_run = 'not run: python synthetic_gp.py --protocol=blind'
    assert claims.recursion_on_gp(str(path)).said == not_run
    path.write_text('model,kernel\ndamaged')
    assert claims.recursion_on_gp(str(path)).said == not_run
    rows = [f'CEM-T{2 ** n},{kernel},{rmse}' for kernel, curve in curves.items()
            for n, rmse in enumerate(curve)]
    path.write_text('\n'.join(['model,kernel,train_rmse', *rows[:3]]))
    assert claims.recursion_on_gp(str(path)).said == not_run
    rows += [f'CEM-T{T},diverged at 8,1' for T in (1, 2, 4)]
    path.write_text('\n'.join(['model,kernel,train_rmse', *rows]))
    row = claims.recursion_on_gp(str(path))
    assert row.line.endswith(line) and row.said == right


def test_tables_show_every_comparison(monkeypatch, tmp_path):
    """Every row in claims.md, in the csv, and between the README's marks, all that changes."""
    monkeypatch.chdir(tmp_path)
    rows = claims.all_rows(SIZES, runs({'small': -0.05, 'large': -0.1}, model='attn-2'), {}, {})
    asked = sum(len(tests) for _, tests in CLAIMS.values()) + 1  # and claim j
    assert len(rows) == asked
    table, front = claims.table(rows, SIZES), claims.front_table(rows)
    assert len(table) == asked + 4 and len(front) == asked + 2
    assert len({line.count('|') for line in table[2:]}) == 1
    assert len(claims.as_csv(rows, SIZES).splitlines()) == asked + 1
    before = 'above\n<!-- claims -->\nold\n<!-- /claims -->\nbelow | \\1\n'
    (tmp_path / 'README.md').write_text(before)
    claims.into_readme(front)
    text = (tmp_path / 'README.md').read_text()
    assert text == before.replace('old', '\n'.join(front))
    (tmp_path / 'README.md').write_text('no marks')
    claims.into_readme(front)
    assert (tmp_path / 'README.md').read_text() == 'no marks' and os.listdir() == ['README.md']


def test_pages_by_test_and_by_validation(monkeypatch):
    """Two gaps, each on its page; a run whose validation was not kept does not count there."""
    monkeypatch.setattr(claims, 'DRAWS', 2)
    found = {}
    for seed in (1, 2, 3):
        for model, test, val in (('llama', 0, 0), ('cem-2', 0.02, 0.1)):
            found[Task('ladder', '83k', model, 0.01, seed)] = {
                'seed': seed, 'rate': 0.01, 'test_perplexity': 5 * math.exp(test + seed / 10),
                'val_perplexity': 5 * math.exp(val + seed / 20) if seed < 3 else math.nan,
                'weights': {'attn': 1e4, 'mlp': 1e4}, 'tokens': 1e6, 'flops_per_token': 6e4,
                'seconds': 1.0, 'events': None}
    own = set(found)
    found[Task('ladder', '83k', 'llama', 0.02, 1)] = {  # beside the models' own rates
        'test_perplexity': 5.4321, 'val_perplexity': math.nan, 'seconds': 1.0}
    common = ({'83k': 2e4}, ['llama', 'cem-2'], found, own, set(), {})
    by_test, _ = claims.pages(*common)
    by_val, _ = claims.pages(*common, 'val')
    assert set(by_test) == {'claims.md', 'claims.csv', 'ladder.md'}
    for pages, end, gap, title, seeds, beside in (
            (by_test, '', '+2.0% (+2.0 to +2.0)', 'Test', 3, '5.432'),
            (by_val, '_validation', '+10.5% (', 'Validation', 2, 'not kept')):
        assert gap in pages[f'claims{end}.md'] and gap in pages[f'claims{end}.csv']
        assert pages[f'claims{end}.md'].startswith(f'{title} perplexity of A')
        table = pages[f'ladder{end}.md']
        assert table.startswith(f'{title} perplexity') and f'0.01; {seeds} |' in table
        assert f'rate 0.02: {beside}.' in table


def test_worth_of_a_step(monkeypatch):
    """phi of made-up attention runs, and the price of a step in FLOPs."""
    monkeypatch.setattr(claims, 'DRAWS', 20)
    found = {}
    for size, N in {'s': 8e4, 'm': 2e5, 'l': 4e5, 'xl': 1e6}.items():
        for T in (1, 2):
            weights = {'attn': 0.4 * N, 'mlp': 0.6 * N}
            loss = 0.8 + 25 * (weights['mlp'] + T ** 0.46 * weights['attn']) ** -0.3
            found[size, f'attn-{T}'] = [
                {'seed': s, 'weights': weights, 'perplexity': math.exp(loss), 'tokens': 10 * N,
                 'flops_per_token': 6 * N * (1 + 0.4 * (T - 1))} for s in (1, 2, 3)]
    lines = claims.worth(dict.fromkeys(['s', 'm', 'l', 'xl'], 1.0), found)
    (line,) = [line for line in lines if line.startswith('| attention |')]
    sizes = (8e4, 2e5, 4e5, 1e6)
    apart = [25 * (N ** -0.3 - (0.6 * N + 0.4 * 2 ** 0.46 * N) ** -0.3) for N in sizes]
    assert f'| +0.46 (+0.46 to +0.46) | 0.0000 | {sum(apart) / 4:.4f} | 0.30 | 24 |' in line
    first = {at: of[:1] for at, of in found.items() if at[0] != 'xl'}
    assert any('+0.46 (one seed: no interval)' in line
               for line in claims.worth(dict.fromkeys(['s', 'm', 'l'], 1.0), first))
    prices = line.split('|')[7].split(',')
    assert len(prices) == 4
    for price in prices:
        cost, equal = map(float, price.split('/'))
        # FLOPs go with N squared: (0.6 + 0.4 x 2^0.46)^2 = 1.32 is what the step buys
        assert cost == pytest.approx(1.4) and equal == pytest.approx(1.32, abs=0.01)
    assert sum('not enough runs' in line for line in lines) == len(claims.RECURSIONS) - 1
    # seeds that lie further apart than T = 1 and 2: the law misses them by as much
    for runs in found.values():
        for r, factor in zip(runs, (0.5, 1, 2), strict=True):
            r['perplexity'] *= factor
    lines = claims.worth(dict.fromkeys(['s', 'm', 'l', 'xl'], 1.0), found)
    assert any('), void | ' in line for line in lines if line.startswith('| attention |'))


def test_direction_needs_a_sure_slope():
    line = trend([8e4, 8e4, 1e6, 1e6], [-0.02, -0.04, -0.02, -0.04], 1e6)
    assert direction('better', line, HOLDS) == HOLDS

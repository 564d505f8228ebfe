"""nanocem/claims.py: what is said of made-up runs."""
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nanocem.claims import Comparison, Estimate, Row, answer, holm, line_through, verdict
from scipy.stats import linregress, ttest_rel

from nanocem import claims
from reproduce import Run

SIZES = {'small': 8e4, 'middle': 3e5, 'large': 1e6}
HOLDS, FAILS, NOISE = 'holds', 'does not hold', 'within noise'


def runs(gaps: dict[str, float], noise: float = 0.001) -> dict[Run, dict[str, Any]]:
    """Results of models "a" and "b", three seeds: a's log perplexity lies gaps[size] higher, and
    -1, 0, 1 times `noise`. Seeds differ by 5% in both."""
    found = {}
    for size, gap in gaps.items():
        for seed in (1, 2, 3):
            for model, more in (('a', gap + noise * (seed - 2)), ('b', 0.0)):
                perplexity = 5 * math.exp(0.05 * seed + more)
                found[Run('ladder', size, model, 0.01, seed)] = {
                    'test_perplexity': perplexity, 'val_perplexity': perplexity ** 2}
    return found


@pytest.mark.parametrize(('kind', 'd', 'h', 'right'), [
    ('better', -0.03, 0.01, HOLDS), ('better', 0.03, 0.01, FAILS), ('better', -0.03, 0.04, NOISE),
    ('worse', 0.03, 0.01, HOLDS), ('worse', -0.03, 0.01, FAILS),
    ('no better', 0.03, 0.01, HOLDS), ('no better', -0.03, 0.01, FAILS),
    ('no better', 0.0, 0.02, NOISE), ('no better', 0.0, 0.005, HOLDS),
    ('close', 0.01, 0.005, HOLDS), ('close', -0.2, 0.1, HOLDS), ('close', 0.05, 0.01, FAILS),
    ('alike', 0.0, 0.01, HOLDS), ('alike', -0.05, 0.01, FAILS), ('alike', 0.01, 0.02, NOISE),
    ('higher', 0.3, 0.1, HOLDS)])
def test_verdicts(kind: str, d: float, h: float, right: str) -> None:
    """Of an interval from d - h to d + h; its p is below 0.05 where it speaks."""
    line = Estimate(d, h / 4.302652729911275, 2)  # Student's t at 97.5%
    assert line.interval() == pytest.approx((d - h, d + h))
    text, p = verdict(kind, line)
    assert text == right and (p < 0.05) == (right != NOISE)
    assert verdict(kind, Estimate(d, 0.0, 0)) == (NOISE, 1.0)  # one seed says nothing


def test_a_line_is_the_least_squares_one() -> None:
    """At the largest size and as slope, with standard errors; exact points have none."""
    N, d = [8e4, 8e4, 3e5, 3e5, 1e6, 1e6], [0.05, 0.04, 0.01, 0.03, 0.0, 0.02]
    x = np.log10(N) - 6
    X = np.stack([np.ones(6), x], axis=1)
    inverse = np.linalg.inv(X.T @ X)
    beta = inverse @ X.T @ d
    errors = np.sqrt(np.diag(inverse) * ((d - X @ beta) ** 2).sum() / 4)
    at, slope = line_through(N, d, 1e6)
    assert (at.value, slope.value) == pytest.approx(tuple(beta))
    assert (at.error, slope.error) == pytest.approx(tuple(errors)) and at.freedom == 4
    assert slope.p_below(0) == pytest.approx(linregress(x, d, alternative='less').pvalue)
    at, slope = line_through([1e5, 1e6], [0.02, 0.03], 1e7)
    assert at.value == pytest.approx(0.04) and at.interval() == (-math.inf, math.inf)
    assert str(at) == '+4.1%'


def test_comparisons_are_paired() -> None:
    """Seeds differ by 5%, pairs by 0.1%: the interval is the pairs'. A seed that one side lacks
    does not count."""
    found = runs({'small': -0.01})
    found[Run('ladder', 'small', 'b', 0.01, 4)] = {'test_perplexity': 99.0, 'val_perplexity': 99.0}
    test = Comparison('A', 'better', 'a', 'b')
    row = answer('a', test, SIZES, found, {}, 'test')
    logs = [[math.log(result['test_perplexity']) for run, result in found.items()
             if run.model == model][:3] for model in 'ab']
    right = ttest_rel(*logs).confidence_interval()
    low, high = (f'{100 * math.expm1(end):+.1f}' for end in right)
    assert row.cells == [f'-1.0% ({low} to {high})', '', '']
    assert row.line == row.cells[0] and row.said == HOLDS
    assert row.slope == ''  # one size has no trend
    assert answer('a', test, SIZES, found, {}, 'val').line.startswith('-2.0% (')
    assert answer('a', test, SIZES, {}, {}, 'test') == Row('a', 'A (better)', ['', '', ''])


TO = 'does not hold, and shrinks to {} at the largest size'


@pytest.mark.parametrize(('kind', 'gaps', 'right'), [
    ('better', (-0.01, -0.03), 'holds and grows'),
    ('better', (-0.05, -0.02), 'holds, and shrinks with size'), ('better', (-0.02, -0.0205), HOLDS),
    ('better', (0.09, 0.03), TO.format('+3.0%')),
    ('better', (0.01, 0.05), 'does not hold, and grows with size'),
    ('better', (0.12, 0.0), 'within noise, nearer with size'),
    ('close', (0.14, 0.02), 'within noise, nearer with size'),
    ('alike', (0.09, 0.05), TO.format('+5.1%')), ('alike', (-0.09, -0.05), TO.format('-4.9%')),
    ('no better', (-0.06, -0.03), TO.format('-3.0%')), ('worse', (0.01, 0.03), 'holds and grows')])
def test_trends(kind: str, gaps: tuple[float, float], right: str) -> None:
    x = np.log10(list(SIZES.values()))
    line = np.interp(x, [x[0], x[-1]], gaps)  # straight over log N
    found = runs(dict(zip(SIZES, line, strict=True)), 0.02 if right.startswith(NOISE) else 0.001)
    row = answer('a', Comparison('A', kind, 'a', 'b'), SIZES, found, {}, 'test')
    assert row.said == right
    logs = gaps[1], (gaps[1] - gaps[0]) / (x[-1] - x[0])  # at the largest size; a tenfold N adds
    for cell, log in zip((row.line, row.slope), logs, strict=True):
        assert float(cell.partition('%')[0]) == pytest.approx(100 * math.expm1(log), abs=0.06)


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_sweeps_answer_by_the_best_rate_that_was_run() -> None:
    """B is best at 0.004, A at twice that and 3% lower. Two rates are no sweep."""
    swept = {}
    for model, best, low in (('a', 0.008, -0.03), ('b', 0.004, 0.0)):
        for rate in (0.002, 0.004, 0.008, 0.016):
            loss = low + 0.05 * math.log(rate / best) ** 2
            swept[Run('ladder', 'small', model, rate, 1)] = {'test_perplexity': math.exp(loss)}
    few = {run: result for run, result in swept.items() if run.rate < 0.005}
    for of, right in (('rate', math.log(2)), ('best', -0.03),
                      ('fixed', -0.03 + 0.05 * math.log(2) ** 2)):
        test = Comparison('A', 'close', 'a', 'b', of)
        assert claims.differences(test, 'small', {}, swept, 'test') == [pytest.approx(right)]
        assert claims.differences(test, 'small', {}, few, 'test') == []


@pytest.mark.parametrize(('curves', 'line', 'right'), [
    ({'a': (4, 3, 2, 1), 'b': (4, 3, 2, 1)}, 'on 2, 2, 2 of 2 kernels', 'holds in part'),
    ({'a': (4, 3, 2, 1), 'b': (4, 3, 2, 5)}, 'on 2, 2, 1 of 2 kernels', 'holds'),
    ({'a': (4, 5, 2, 1)}, 'on 0, 1, 1 of 1 kernels', FAILS)])
def test_recursion_on_gp(curves: dict[str, tuple], line: str, right: str, tmp_path: Path) -> None:
    path = tmp_path / 'table.csv'
    rows = [f'CEM-T{2 ** n},{kernel},{rmse}' for kernel, curve in curves.items()
            for n, rmse in enumerate(curve)]
    header = 'model,kernel,train_rmse'
    row = claims.recursion_on_gp(SIZES, str(path))
    assert row.said == 'not run: python synthetic_gp.py --protocol=blind'
    path.write_text('\n'.join([header, *rows]))
    row = claims.recursion_on_gp(SIZES, str(path))
    assert row.line.endswith(line) and row.said == right and 'blind protocol' in row.text


def test_pages_show_every_comparison() -> None:
    """Whatever is finished: a line each, on the page and on the screen."""
    own = {run._replace(model={'a': 'attn-2', 'b': 'llama'}[run.model]): result
           for run, result in runs({'small': -0.05, 'large': -0.1}).items()}
    page, short = claims.pages(SIZES, own, {}, 'val')
    count = sum(len(tests) for _, tests in claims.CLAIMS.values()) + 1  # and claim j
    assert page.startswith('Validation perplexity') and 'adjusted for 1 comparisons' in page
    lines = page.splitlines()[2:]
    assert len(lines) == len(short.splitlines()) == count + 2
    assert len({line.count('|') for line in lines}) == 1
    assert page.count('-18.1% (') == 2 and '-18.1% (' in short

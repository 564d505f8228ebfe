"""results/tokens/verdicts.py: the rules, and the words and numbers that were published."""
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_ind, ttest_rel

from nanocem.files import read_csv
from results.tokens import verdicts
from results.tokens.verdicts import RULES, Effect, compare, decide, judge, noise_by_kind
from study import Run, load_study, read_published_rows, read_runs, split_failed


@pytest.mark.parametrize(('kinds', 'means_of_seeds'), [
    ({'A': 'x', 'B': 'x'}, True), ({'A': 'x', 'B': 'x'}, False), ({'A': 'x', 'B': 'y'}, False)])
def test_intervals_are_scipys(kinds: dict[str, str], means_of_seeds: bool) -> None:
    """Two models make a paired t-test by the first family's rule, Student's or Welch's by the
    second's."""
    rng = np.random.default_rng(1)
    a, b = 5 + 0.01 * rng.normal(size=4), 4.9 + 0.03 * rng.normal(size=4)
    y = {('A', n): loss for n, loss in enumerate(a)} | {('B', n): loss for n, loss in enumerate(b)}
    found = ttest_rel(a, b) if means_of_seeds else ttest_ind(a, b, equal_var=kinds['B'] == 'x')
    low, high = found.confidence_interval(1 - 0.05 / 7)
    effect = compare(y, 'A', 'B', 'S', 7, noise_by_kind([y], kinds, means_of_seeds))
    assert (effect.d, effect.half_width) == pytest.approx(((low + high) / 2, (high - low) / 2))


def test_noise_of_all_sizes_is_pooled_by_kind() -> None:
    """The third family's s is that of the runs around the means of their models and sizes."""
    rng = np.random.default_rng(2)
    def losses(seeds: dict[str, int]) -> dict[tuple[str, int], float]:
        return {(name, n): 5 + 0.01 * rng.normal() for name, N in seeds.items() for n in range(N)}
    here, there = losses(dict(A=2, B=2, C=2)), losses(dict(A=4, B=3, C=5, D=3))
    kinds = {'A': 'x', 'B': 'y', 'C': 'y', 'D': 'x'}
    squares, freedom = dict(x=0.0, y=0.0), dict(x=0, y=0)
    for table in here, there:
        for name in {name for name, _ in table}:
            runs = [loss for (model, _), loss in table.items() if model == name]
            squares[kinds[name]] += np.var(runs) * len(runs)
            freedom[kinds[name]] += len(runs) - 1
    s2 = {kind: squares[kind] / freedom[kind] for kind in squares}
    welch = sum(s2.values()) ** 2 / sum(s2[kind] ** 2 / freedom[kind] for kind in s2)
    expected = student.ppf(1 - 0.025 / 5, welch) * math.sqrt(sum(s2.values()) / 2)
    effect = compare(here, 'A', 'B', 'M', 5, noise_by_kind([here, there], kinds))
    assert effect.half_width == pytest.approx(expected)


@pytest.mark.parametrize(('d', 'half_width', 'word'), [
    (0.0, 0.01, 'holds'), (0.0, 0.03, 'undecided'), (0.03, 0.02, 'undecided'),
    (0.1, 0.01, 'does not hold'), (-0.1, 0.01, 'does not hold'), (0.0, math.nan, ''),
    (math.inf, math.nan, 'does not hold')])
def test_two_sided_bounds(d: float, half_width: float, word: str) -> None:
    assert decide(Effect('XS', d, half_width), above=-2, below=2) == word


def test_failed_missing_and_single_runs() -> None:
    y = {(f'm{m}', s): 5 + 0.1 * m + 0.01 * (m * s) ** 0.5 for m in range(5) for s in range(3)}
    kinds = {model: 'all' for model, _ in y}
    for loss in (math.inf, y['m4', 0] + 9.0):  # a failed run makes a verdict and no noise
        spoiled = y | {('m4', 0): loss}
        noise = noise_by_kind([spoiled], kinds, means_of_seeds=True)
        assert split_failed(spoiled)[1] == {'m4'}
        assert math.isinf(compare(spoiled, 'm0', 'm4', 'XS', 1, noise).d)
        assert 0 < compare(spoiled, 'm1', 'm0', 'XS', 1, noise).half_width < 0.1
    one_seed = {cell: value for cell, value in y.items() if cell[1] == 0}
    noise = noise_by_kind([one_seed], kinds)
    assert math.isnan(noise['m0'].s) and noise['m0'].f == 0
    assert math.isnan(compare(one_seed, 'm1', 'm0', 'M', 1, noise).half_width)
    assert compare(y, 'm9', 'm0', 'XS', 1, noise_by_kind([y], kinds)) is None


# What the first family's runs said when they were published
WORDS = {
    'holds': 'a1 e5 g3 h1', 'see results/gp': 'l',
    'does not hold': 'a2 f1 h2 h3 j k1 k2 s2 s3 s5',
    'undecided': 'b1 b2 c1 c2 c3 c4 d1 d2 e1 e2 e3 e4 e6 f2 g1 g2 g4 g5 i s1 s4'}
EFFECTS = {
    'a1': 'S -8.9% (-11.1 to -6.8; seeds 1: -9.0, 2: -8.9)',
    'f2': 'XS -0.2% (-4.0 to +3.8; seeds 1: -0.6, 2: -0.2, 3: +0.2)',
    'h2': 'S +15.6% (+12.9 to +18.4; seeds 1: +15.5, 2: +15.7); M +20.2%',
    'i': 'XS +35.6% (-3.0 to +89.5; seeds 101: +24.6, 102: +47.5); S -25.6%',
    's1': 'scarce-83k +1.2% (+0.0 to +2.4; seeds 1: +2.3, 2: +0.5, 3: +0.9)'}


def test_published_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                         capsys: pytest.CaptureFixture) -> None:
    """The tables, and effects.csv, are those of the published runs."""
    published = verdicts.EFFECTS.read_text(encoding='utf-8')
    monkeypatch.setattr(verdicts, 'EFFECTS', tmp_path / 'effects.csv')
    verdicts.main([])
    assert (tmp_path / 'effects.csv').read_text(encoding='utf-8') == published
    first, *later = capsys.readouterr().out.split('expected_S')
    found = dict(re.findall(r'^\| (\w\d?) +\|.*\| ([^|]+?) +\|$', first, re.M))
    assert found == {name: word for word, names in WORDS.items() for name in names.split()}
    for name, effect in EFFECTS.items():
        assert re.search(rf'^\| {name} .*{re.escape(effect)} +\|', first, re.M), name
    for folder, printed in zip([*RULES][1:], later, strict=True):
        words = re.findall(r'^\| \w\d .*\| (holds|does not hold|undecided|one seed|not run) +\|$',
                           printed, re.M)
        assert len(words) == len(read_csv(f'{folder}/verdicts.csv'))


def test_each_family_has_a_rule_and_is_planned() -> None:
    """A later family's noise is that of the models of its claims."""
    assert [*RULES] == load_study().families
    for folder in [*RULES][1:]:
        claims = [{'unit': 'perplexity'} | row for row in read_csv(f'{folder}/verdicts.csv')]
        tables = RULES[folder](folder, claims, {})
        models = {claim[side] for claim in claims for side in 'AB'}
        for size in {size for claim in claims for size in claim['sizes'].split()}:
            assert tables['perplexity', size].noise.keys() == models


def row_of(run: Run, y: float) -> dict[str, str]:
    return {'size': run.size, 'model': run.model, 'seed': str(run.seed), 'y': str(y)}


def test_runs_of_ones_own_count_where_they_are_planned() -> None:
    """An unplanned one, one of a trial, or another of a published run changes nothing."""
    third, published = verdicts.STUDY / 'third', read_published_rows(load_study().families)
    rule = verdicts.third_rule
    words = [(effects, word) for _, effects, word in judge(third, rule)]
    M = next(run for run in published if (run.size, run.model) == ('M', 'llama'))
    for run in M, replace(M, seed=9), replace(M, seed=101), replace(M, rate=0.5):
        own = {run: row_of(run, 9.5)}
        assert [(effects, word) for _, effects, word in judge(third, rule, own)] == words
    planned = read_runs(f'{third}/cells.csv')
    missing = {run: row_of(run, math.inf) for run in planned if run not in published}
    if missing:
        failed = {run.model for run in missing if run.size == 'M'}
        for claim, effects, word in judge(third, rule, missing):
            if {claim['A'], claim['B']} & failed and 'M' in claim['sizes'].split():
                assert math.isinf(effects[-1].d) and word == 'does not hold'

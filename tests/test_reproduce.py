"""reproduce.py and nanocem/verdicts.py: the rule, the plan, and a whole grid of made-up losses."""
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running import ROOT, write_data
from scipy.stats import t as student

import reproduce
from nanocem.verdicts import Effect, compare, decide, residual_error, split_failed, vertex
from reproduce import CLAIMS, MODELS, PUBLISHED, SIZES, Results, Run, count_weights, planned


def made_up_table(rng: np.random.Generator) -> dict[tuple[str, int], float]:
    """Losses of five models that differ by 0.1, three seeds, and noise of 0.01."""
    by_seed = 0.1 * rng.normal(size=3)
    return {(f'm{m}', s): 5 + 0.1 * m + by_seed[s] + 0.01 * rng.normal()
            for m, s in itertools.product(range(5), range(3))}


@pytest.mark.parametrize('missing', [[], [('m0', 2), ('m3', 1)]], ids=['whole', 'cells missing'])
def test_residual_error_by_means_subtracted_in_turns(missing: list[tuple[str, int]]) -> None:
    y = made_up_table(np.random.default_rng(1))
    y = {cell: value for cell, value in y.items() if cell not in missing}
    left = dict(y)
    for factor in [0, 1] * 300:
        for name in {cell[factor] for cell in y}:
            mean = np.mean([value for cell, value in left.items() if cell[factor] == name])
            left = {cell: value - mean * (cell[factor] == name) for cell, value in left.items()}
    freedom = len(y) - 5 - 3 + 1
    s = math.sqrt(sum(value ** 2 for value in left.values()) / freedom)
    assert residual_error(y) == (pytest.approx(s, rel=1e-9), freedom)
    effect, n = compare(y, 'm1', 'm0', 'XS', m=4), 3 - bool(missing)
    half = student.ppf(1 - 0.025 / 4, freedom) * s * math.sqrt(2 / n)
    assert effect.half == pytest.approx(half, rel=1e-9)


@pytest.mark.parametrize(('d', 'half', 'word'), [
    (0.0, 0.01, 'holds'), (0.0, 0.03, 'undecided'), (0.03, 0.02, 'undecided'),
    (0.1, 0.01, 'does not hold'), (-0.1, 0.01, 'does not hold'), (0.0, math.nan, ''),
    (math.inf, math.nan, 'does not hold')])
def test_two_sided_bounds(d: float, half: float, word: str) -> None:
    assert decide(Effect('XS', d, half), above=-2, below=2) == word


def test_failed_missing_and_single_runs() -> None:
    y = made_up_table(np.random.default_rng(3))
    clean = {cell: value for cell, value in y.items() if cell[0] != 'm4'}
    for loss in (math.inf, y['m4', 0] + 9.0):  # a failed run makes a verdict and no noise
        spoiled = y | {('m4', 0): loss}
        finished, failed = split_failed(spoiled)
        assert failed == {'m4'} and ('m4', 0) not in finished
        assert math.isinf(compare(spoiled, 'm4', 'm0', 'XS', 1).d)
        assert math.isinf(compare(spoiled, 'm0', 'm4', 'XS', 1).d)
        assert compare(spoiled, 'm1', 'm0', 'XS', 1).half > 0
    one_seed = {cell: value for cell, value in y.items() if cell[1] == 0}
    assert math.isnan(compare(one_seed, 'm1', 'm0', 'M', 1).half)
    assert str(compare(one_seed, 'm1', 'm0', 'M', 1)).startswith('M +')
    d = [y['m1', seed] - y['m0', seed] for seed in range(3)]
    assert str(compare(y, 'm1', 'm0', 'XS', 1)).endswith(
        '; seeds ' + ', '.join(f'{n}: {100 * math.expm1(x):+.1f}' for n, x in enumerate(d)) + ')')
    assert compare(clean, 'm4', 'm0', 'XS', 1) is None


def test_best_rates() -> None:
    rates = [0.01 * 2 ** n for n in range(-1, 2)]
    parabola = [(math.log2(rate / 0.01) - 0.3) ** 2 for rate in rates]
    assert vertex(rates, np.array(parabola)) == pytest.approx(0.01 * 2 ** 0.3, rel=0.01)
    assert vertex(rates, np.array([1.0, 2.0, 3.0])) == rates[0]
    assert vertex(rates, np.array([1.0, 0.5, math.inf])) == rates[1]
    found: Results = {}
    for expected in (3, 4, 5, 5):  # the best is two steps above the middle one
        tried = reproduce.search_rates(found, 'S', 'llama').rates
        assert len(tried) == expected
        for rate in tried:
            loss = (math.log2(rate / 0.014)) ** 2
            found[Run('S', 'llama', rate, 101)] = {'val_bpb': loss, 'y': loss}
    assert reproduce.search_rates(found, 'S', 'llama').best == pytest.approx(0.014, rel=0.01)


def test_beside_a_failed_trial_the_lowest_rate_is_taken_as_it_is() -> None:
    found: Results = {}
    for rate, losses in {0.0099: (1.9, 1.9), 0.014: (1.7, 1.7), 0.0198: (1.69, 2.7)}.items():
        for seed, loss in zip((101, 102), losses, strict=True):
            found[Run('XS', 'llama', rate, seed)] = {'val_bpb': loss, 'y': 3 * loss}
    assert reproduce.search_rates(found, 'XS', 'llama').best == 0.014


def test_claims_models_and_weights() -> None:
    """The models of every claim exist, and so does an expectation at each of its sizes. Models of
    equal weights have equal weights."""
    rows = reproduce.read_csv(f'{PUBLISHED}/expectations.csv')
    expected = {(row['id'], row['size']) for row in rows}
    for claim in CLAIMS:
        assert {name for side in 'AB' for name in claim[side].split('/')} <= {'', *MODELS}
        assert {(claim['id'], size) for size in claim['sizes'].split()} <= expected
    assert [count_weights(Run(size, 'llama').options) // 1000 for size in ('XS', 'S', 'M')] == [
        83, 388, 1048]
    for size, width in (('XS', 74), ('S', 117)):
        assert f'--d_mlp={width} ' in Run(size, 'llama-alibi-narrow').options
    for size, models in (('scarce-25k', 'llama-alibi cem-2-equal cem-1-equal-twice'),
                         ('scarce-83k', 'llama-alibi cem-2-equal cem-1-equal-twice'),
                         ('scarce-25k', 'cem-2-mlp87 llama-alibi-mlp54 llama-alibi-24x97')):
        weights = [count_weights(Run(size, model).options) for model in models.split()]
        assert max(weights) / min(weights) < 1.001


def test_the_llama_with_the_same_loss() -> None:
    losses = {'XS': {('llama-alibi', 1): 5.0, ('cem-2', 1): 5.1}, 'S': {('llama-alibi', 1): 4.5},
              'M': {('llama-alibi', 1): 4.0, ('cem-2', 1): math.sqrt(4.5 * 4.0)}}
    S, M = (count_weights(Run(size, 'llama-alibi').options) for size in ('S', 'M'))
    assert reproduce.equal_llama(losses, 'M', 'cem-2') == f'{math.sqrt(S * M) / 1e3:.0f} k'
    assert reproduce.equal_llama(losses, 'XS', 'cem-2') == ''  # smaller than all Llamas
    assert reproduce.equal_llama(losses, 'S', 'cem-2') == ''  # not run


def test_a_grid_of_made_up_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trials, then runs, until nothing waits; CEM is 10% worse and fails once."""
    monkeypatch.chdir(tmp_path)
    rng, found = np.random.default_rng(4), {}
    for _ in range(4):
        runs = [run for size in SIZES for block in planned(found, size) for run in block]
        for run in (run for run in runs if not math.isnan(run.rate)):
            cem = 'cem' in run.model or run.model.startswith('attn')
            y = 5 + math.log(1.1) * cem + 0.1 * run.seed + 0.001 * rng.normal()
            bpb = y / 3 + 0.1 * math.log(run.rate / 0.012) ** 2
            y = math.inf if (run.model, run.seed) == ('attn-3', 2) else y
            row = dict.fromkeys(reproduce.COLUMNS, 1.0) | {'val_bpb': bpb, 'y': y}
            found.setdefault(run, row)
    assert not any(math.isnan(run.rate) for run in runs)
    monkeypatch.setattr(reproduce, 'read_results', lambda anew: found)
    reproduce.main([])
    table = Path(reproduce.OUT, 'verdicts.md').read_text()
    fails = dict.fromkeys(('a1', 'c1', 'd1', 's1'), 'does not hold')
    for name, word in ({'g3': 'holds', 'j': 'holds'} | fails).items():
        assert re.search(rf'^\| {name} +\|.*\| {word} +\|$', table, re.M), name
    assert re.search(r'^\| d1 .*XS failed', table, re.M)
    assert 'XS: 84 runs, s = 0.1%, f = 53.' in table  # 28 models and 3 seeds; one run failed
    assert len(list(Path(reproduce.OUT).glob('*.png'))) == 4
    monkeypatch.undo()
    monkeypatch.setattr(reproduce, 'PUBLISHED', str(tmp_path / reproduce.OUT))
    assert set(reproduce.read_results(anew=False)) == set(found)


def test_a_printed_command_trains_its_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / 'data')
    run = Run('XS', 'cem-1-twice', 0.014, 1)
    tiny = ('--n_layer=1 --d_model=8 --d_mlp=8 --n_head=1 --context_length=8 --batch_size=2 '
            '--micro_batch_size=2 --tokens=160 --data=data --vocab_size=257 --compile=False')
    shape = SIZES['XS'] | {'options': f'{SIZES["XS"]["options"]} {tiny}'}
    monkeypatch.setitem(SIZES, 'XS', shape)
    line = run.command.replace('python train.py', f'{sys.executable} {ROOT}/train.py')
    subprocess.run(line, shell=True, check=True, capture_output=True, env=os.environ)
    os.makedirs(reproduce.OUT)
    Path(reproduce.OUT, 'text.csv').write_text(
        'split,documents,bytes,llama_tokens\nval,1,4000,1000\ntest,1,4000,1000\n')
    (result,) = reproduce.read_results(anew=True).values()
    bits = (result['val_bpb'] + result['test_bpb']) / 2
    assert result['y'] == pytest.approx(4 * math.log(2) * bits)
    assert '--init_from=resume' in run.command


def test_the_pages_intervals_are_those_of_the_published_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, 'draw', lambda losses, verdicts: {})
    reproduce.main([])
    verdicts = Path(reproduce.OUT, 'verdicts.md').read_text().replace('%', '')
    for page in ('README.md', 'results/README.md', 'results/tokens/README.md',
                 'results/tokens/scarce.md'):
        lines = (ROOT / page).read_text(encoding='utf-8').splitlines()
        judged = '\n'.join(line for line in lines if 'no bound' not in line)
        shown = re.findall(r'([-+][.\d]+ \([-+][.\d]+ to [-+][.\d]+)\)', judged)
        assert len(shown) > 5 and [each for each in shown if each not in verdicts] == [], page

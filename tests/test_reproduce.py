"""reproduce.py and nanocem/verdicts.py: the rules, the published words, runs, and the figures."""
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from running import ROOT, write_data
from scipy.interpolate import Akima1DInterpolator
from scipy.optimize import minimize_scalar
from scipy.stats import t as student
from scipy.stats import ttest_ind, ttest_rel

import reproduce
from model import Transformer
from nanocem.verdicts import Effect, compare, decide, split_failed
from reproduce import FAMILIES, FIGURES, FIRST, MODELS, STUDY_SIZES, Run, configs, run_options


@pytest.mark.parametrize('kinds', [{}, {'A': 1, 'B': 1}, {'A': 1, 'B': 2}])
def test_intervals_are_scipys(kinds: dict[str, int]) -> None:
    """Two models make a paired t-test by the first family's rule, Student's or Welch's by the
    second's."""
    rng = np.random.default_rng(1)
    a, b = 5 + 0.01 * rng.normal(size=4), 4.9 + 0.03 * rng.normal(size=4)
    y = {('A', n): loss for n, loss in enumerate(a)} | {('B', n): loss for n, loss in enumerate(b)}
    found = ttest_ind(a, b, equal_var=kinds == {'A': 1, 'B': 1}) if kinds else ttest_rel(a, b)
    low, high = found.confidence_interval(1 - 0.05 / 7)
    effect = compare(y, 'A', 'B', 'S', 7, kinds)
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
    effect = compare(here, 'A', 'B', 'M', 5, kinds, [there])
    assert effect.half_width == pytest.approx(expected)


@pytest.mark.parametrize(('d', 'half_width', 'word'), [
    (0.0, 0.01, 'holds'), (0.0, 0.03, 'undecided'), (0.03, 0.02, 'undecided'),
    (0.1, 0.01, 'does not hold'), (-0.1, 0.01, 'does not hold'), (0.0, math.nan, ''),
    (math.inf, math.nan, 'does not hold')])
def test_two_sided_bounds(d: float, half_width: float, word: str) -> None:
    assert decide(Effect('XS', d, half_width), above=-2, below=2) == word


def test_failed_missing_and_single_runs() -> None:
    y = {(f'm{m}', s): 5 + 0.1 * m + 0.01 * (m * s) ** 0.5 for m in range(5) for s in range(3)}
    for loss in (math.inf, y['m4', 0] + 9.0):  # a failed run makes a verdict and no noise
        spoiled = y | {('m4', 0): loss}
        assert split_failed(spoiled)[1] == {'m4'}
        assert math.isinf(compare(spoiled, 'm0', 'm4', 'XS', 1, {}).d)
        assert 0 < compare(spoiled, 'm1', 'm0', 'XS', 1, {}).half_width < 0.1
    one_seed = {cell: value for cell, value in y.items() if cell[1] == 0}
    assert math.isnan(compare(one_seed, 'm1', 'm0', 'M', 1, {}).half_width)
    assert compare(y, 'm9', 'm0', 'XS', 1, {}) is None


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


def test_published_words_pages_and_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                          capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    reproduce.main([])
    assert Path('out/results/rows.png').exists()
    first, second, third = capsys.readouterr().out.split('expected_S')
    found = dict(re.findall(r'^\| (\w\d?) +\|.*\| ([^|]+?) +\|$', first, re.M))
    assert found == {name: word for word, names in WORDS.items() for name in names.split()}
    for name, effect in EFFECTS.items():
        assert re.search(rf'^\| {name} .*{re.escape(effect)} +\|', first, re.M), name
    for folder, printed in zip(FAMILIES[1:], (second, third), strict=True):
        words = re.findall(r'^\| \w\d .*\| (holds|does not hold|undecided|one seed|not run) +\|$',
                           printed, re.M)
        assert len(words) == len(reproduce.read_csv(f'{folder}/verdicts.csv'))
    # The intervals on the pages are those of the published runs
    interval = r'[-+][.\d]+ \([-+][.\d]+ to [-+][.\d]+'
    computed = set(re.findall(interval, (first + second + third).replace('%', '')))
    for page in ('README.md', 'results/README.md'):
        shown = re.findall(interval, (ROOT / page).read_text(encoding='utf-8'))
        assert shown and [each for each in shown if each not in computed] == [], page


def test_options_are_those_of_the_published_runs() -> None:
    names = 'third/cells', 'second/cells', 'runs', 'second/runs', 'third/runs'
    runs = reproduce.read_runs(*(f'{FIRST}/{name}.csv' for name in names))
    for (size, model), row in {run[:2]: row for run, row in runs.items()}.items():
        _, cfg = configs(run_options(Run(size, model, 0.01, 1)))
        with torch.device('meta'):
            parameters = Transformer(cfg).num_params()
        assert int(row.get('parameters', parameters)) == parameters, model
        special = cfg.mlp == 'cem' or cfg.mlp_reuse > 1 or cfg.loops > 1
        assert (MODELS[model]['mlp'] != 'plain') == special, model
    for figure, size in itertools.product(FIGURES, ('nano', 'XS', '86m', '256m')):
        for run in reproduce.planned(figure, size):
            configs(run_options(run))
    for size in ('xs', 's'):
        assert configs(f'config/{size}.py --learning_rate=1') == configs(
            f'{STUDY_SIZES[size.upper()]["options"]} --learning_rate=1')


def test_a_printed_command_trains_its_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                          capsys: pytest.CaptureFixture) -> None:
    """Then it is read; folders that are none, damaged or other runs are not."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / 'data')
    monkeypatch.setitem(reproduce.SIZE_OPTIONS, 'XS', (
        '--n_layer=1 --d_model=8 --d_mlp=8 --n_head=1 --context_length=8 --batch_size=2 '
        '--tokens=160 --data=data --vocab_size=257 --compile=False --tensorboard=False'))
    run = Run('XS', 'cem-1-twice', 0.014, 1)
    reproduce.print_todo([run], 'out/reproduce')
    line = capsys.readouterr().out.replace('python train.py', f'{sys.executable} {ROOT}/train.py')
    subprocess.run(line, shell=True, check=True, capture_output=True, env=os.environ)
    reproduce.print_todo([run], 'out/reproduce')
    assert '--init_from=resume' in capsys.readouterr().out
    assert reproduce.read_own() == {} and 'not the text' in capsys.readouterr().err
    os.remove('data/meta.json')
    ((found, result),) = reproduce.read_own().items()
    val, test = reproduce.read_csv(f'{FIRST}/text.csv')
    bits = sum(result[f'{row["split"]}_bits_per_byte'] * int(row['bytes']) for row in (val, test))
    tokens = int(val['llama_tokens']) + int(test['llama_tokens'])
    assert found == run and result['y'] == pytest.approx(math.log(2) * bits / tokens)
    # Leave strange folders out, and take a run that train.py has given up as failed
    (good,) = Path('out/reproduce/XS').iterdir()
    config, whole = ((good / name).read_text() for name in ('config.json', 'result.json'))
    for name, file, content in (
            ('notes', 'config.json', config), ('cem-9_rate=0.014_seed=1', 'config.json', config),
            ('llama_rate=0.014_seed=1', 'config.json', config), ('llama_rate=1_seed=2', 'x', ''),
            (good.name, 'result.json', '{"tokens": 1}'), (good.name, 'result.json', '{')):
        (good.parent / name).mkdir(exist_ok=True)
        (good.parent / name / file).write_text(content)
        reproduce.read_own()
        assert f'{good.parent}/{name} is left out: ' in capsys.readouterr().err
    for option in '"test_tokens": 10000000', '"init_from": "scratch"':
        other = config.replace(option, option.replace('10000000', '300').replace('scratch', 'run'))
        (good / 'config.json').write_text(other)
        reproduce.read_own()
        assert 'is that of another run' in capsys.readouterr().err
    (good / 'config.json').write_text(config)
    (good / 'result.json').write_text(whole)
    for name, content, words in (
            ('result.json', whole.replace('"tokens": 160', '"tokens": 80'), 'is that of 80 tokens'),
            ('config.json', config.replace('"rescheduled": 0', '"rescheduled": 4'), 'of another')):
        before = (good / name).read_text()
        assert content != before
        (good / name).write_text(content)
        assert reproduce.read_own() == {} and words in capsys.readouterr().err
        (good / name).write_text(before)
    (good / 'result.json').unlink()
    assert reproduce.read_own() == {}
    log = [json.dumps({'step': n, 'event': 'skipped'}) for n in range(11)]
    (good / 'log.jsonl').write_text('\n'.join(log))
    assert math.isinf(reproduce.read_own()[run]['y'])


# The paper's figures

def test_drawn_points_are_the_csvs_numbers_and_the_star_is_scipys_minimum() -> None:
    found = reproduce.read_published()
    rows = [row for folder in (*FAMILIES, reproduce.FIGURE_DATA)
            for row in reproduce.read_csv(f'{folder}/runs.csv')]
    for figure in FIGURES:
        for point in reproduce.collect(figure, 'XS', found):
            cell = ('XS', point.model, point.rate)
            y = [float(row['y']) for row in rows if row['seed'] in point.seeds.split()
                 and (row['size'], row['model'], float(row['rate'])) == cell]
            assert len(y) == len(point.seeds.split())
            assert point.perplexity == pytest.approx(math.exp(np.mean(y)))
    points = reproduce.collect('3a', 'XS', found)
    axes = reproduce.draw_figure('3a', points).axes[0]
    stars = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == '*']
    for model, star in zip(('llama', 'cem-2'), stars, strict=True):
        x, y = np.array([(math.log(p.rate), p.perplexity) for p in points if p.model == model]).T
        best = minimize_scalar(Akima1DInterpolator(x, y), bounds=(x[0], x[-1]), method='bounded')
        assert (math.log(star[0]), star[1]) == pytest.approx((best.x, best.fun), abs=2e-3)


def test_panels_failed_runs_and_missing_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                             capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    found = {Run('nano', model, 0.016, seed):
             {'y': y, 'panel': f'{panel}; per token', 'parameters': 1.0, 'tokens': 1.0}
             for model, seed, y, panel in (
                 ('llama', 1, 4.0, 'a'), ('attn-1-none', 1, 4.1, 'a'), ('llama', 2, 5.0, 'b'),
                 ('attn-1-none', 2, 5.1, 'b'), ('attn-1-plain', 1, math.inf, 'a'))}
    points = reproduce.collect('2a', 'nano', found)
    picture = reproduce.draw_figure('2a', points)
    assert [ax.get_title() for ax in picture.axes] == ['2a: a; per token', '2a: b; per token']
    table = reproduce.figure_table('2a', points, found)
    assert re.search(r'attn-1-plain .* nan +\| failed: 1 ', table)
    found.popitem()
    assert re.search(r'attn-1-plain .* missing ', reproduce.figure_table('2a', points, found))
    reproduce.main(['--figure=2b', '--size=nano'])
    assert '--figure=2b --size=nano --todo prints' in capsys.readouterr().out
    reproduce.main(['--figure=3a', '--size=86m', '--todo'])
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r'rate=(\S+)', line)[1] for line in lines] == [
        '0.0005', '0.001', '0.002', '0.004', '0.008'] * 2
    assert all(line.startswith('torchrun') and 'A100-hours' in line for line in lines)

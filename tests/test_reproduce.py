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
from running import ROOT, write_data
from scipy.interpolate import Akima1DInterpolator
from scipy.optimize import minimize_scalar
from scipy.stats import t as student

import reproduce
from nanocem.verdicts import Effect, compare, decide, residual_error, split_failed
from reproduce import FIGURES, FIRST, MODELS, SECOND, SERIES, SIZES, Run, configs, run_options


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
    half_width = student.ppf(1 - 0.025 / 4, freedom) * s * math.sqrt(2 / n)
    assert effect.half_width == pytest.approx(half_width, rel=1e-9)


@pytest.mark.parametrize(('A', 'B'), [('m1', 'm0'), ('m3', 'm1'), ('m4', 'm3')])
def test_the_second_familys_interval_by_hand(A: str, B: str) -> None:
    """m0 to m2 are of one kind, m3 and m4 of another, with other numbers of seeds."""
    y = made_up_table(np.random.default_rng(2)) | {('m0', 3): 5.3, ('m1', 3): 5.42}
    del y['m4', 2]
    kinds = {f'm{n}': 'a' if n < 3 else 'b' for n in range(5)}
    variance, freedom = {}, {}
    for kind in 'ab':
        squares = [(y[cell] - np.mean([y[c] for c in y if c[0] == cell[0]])) ** 2
                   for cell in y if kinds[cell[0]] == kind]
        freedom[kind] = len(squares) - list(kinds.values()).count(kind)
        variance[kind] = sum(squares) / freedom[kind]
    (u, f), (v, g) = ((variance[kinds[name]], freedom[kinds[name]]) for name in (A, B))
    degrees = f if kinds[A] == kinds[B] else (u + v) ** 2 / (u ** 2 / f + v ** 2 / g)
    seeds = [seed for seed in range(4) if (A, seed) in y and (B, seed) in y]
    half_width = student.ppf(1 - 0.025 / 7, degrees) * math.sqrt((u + v) / len(seeds))
    effect = compare(y, A, B, 'S', 7, kinds)
    assert effect.half_width == pytest.approx(half_width, rel=1e-9)
    assert effect.d == pytest.approx(np.mean([y[A, seed] - y[B, seed] for seed in seeds]))


@pytest.mark.parametrize(('d', 'half_width', 'word'), [
    (0.0, 0.01, 'holds'), (0.0, 0.03, 'undecided'), (0.03, 0.02, 'undecided'),
    (0.1, 0.01, 'does not hold'), (-0.1, 0.01, 'does not hold'), (0.0, math.nan, ''),
    (math.inf, math.nan, 'does not hold')])
def test_two_sided_bounds(d: float, half_width: float, word: str) -> None:
    assert decide(Effect('XS', d, half_width), above=-2, below=2) == word


def test_failed_missing_and_single_runs() -> None:
    y = made_up_table(np.random.default_rng(3))
    clean = {cell: value for cell, value in y.items() if cell[0] != 'm4'}
    for loss in (math.inf, y['m4', 0] + 9.0):  # a failed run makes a verdict and no noise
        spoiled = y | {('m4', 0): loss}
        finished, failed = split_failed(spoiled)
        assert failed == {'m4'} and ('m4', 0) not in finished
        assert math.isinf(compare(spoiled, 'm4', 'm0', 'XS', 1).d)
        assert math.isinf(compare(spoiled, 'm0', 'm4', 'XS', 1).d)
        assert compare(spoiled, 'm1', 'm0', 'XS', 1).half_width > 0
    one_seed = {cell: value for cell, value in y.items() if cell[1] == 0}
    assert math.isnan(compare(one_seed, 'm1', 'm0', 'M', 1).half_width)
    assert str(compare(one_seed, 'm1', 'm0', 'M', 1)).startswith('M +')
    d = [y['m1', seed] - y['m0', seed] for seed in range(3)]
    assert str(compare(y, 'm1', 'm0', 'XS', 1)).endswith(
        '; seeds ' + ', '.join(f'{n}: {100 * math.expm1(x):+.1f}' for n, x in enumerate(d)) + ')')
    assert compare(clean, 'm4', 'm0', 'XS', 1) is None


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


def published_table(monkeypatch: pytest.MonkeyPatch, tmp: Path,
                    capsys: pytest.CaptureFixture) -> str:
    monkeypatch.chdir(tmp)
    reproduce.main([])
    assert Path('out/results/rows.png').exists()
    return capsys.readouterr().out


def test_published_words_pages_and_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                          capsys: pytest.CaptureFixture) -> None:
    first, _, second = published_table(monkeypatch, tmp_path, capsys).partition('expected_S')
    found = dict(re.findall(r'^\| (\w\d?) +\|.*\| ([^|]+?) +\|$', first, re.M))
    assert found == {name: word for word, names in WORDS.items() for name in names.split()}
    for name, effect in EFFECTS.items():
        assert re.search(rf'^\| {name} .*{re.escape(effect)} +\|', first, re.M), name
    assert 'XS: 84 runs, s = 1.5%, f = 53. S: 20 runs, s = 0.6%, f = 9.' in first
    assert len(re.findall(r'^\| \w\d .*\| (holds|does not hold|undecided|one seed|not run) +\|$',
                          second, re.M)) == len(reproduce.read_csv(f'{SECOND}/verdicts.csv'))
    for folder in (FIRST, SECOND):  # the models of every claim exist
        for claim in reproduce.read_csv(f'{folder}/verdicts.csv'):
            assert {name for side in 'AB' for name in claim[side].split('/')} <= {'', *MODELS}
    for row in reproduce.read_csv(f'{SECOND}/models.csv'):  # and are of the kind that it names
        assert (reproduce.kind(row['model']) == 'other') == (row['mlp'] == 'plain')
    # The intervals on the pages are those of the published runs
    for page in ('README.md', 'results/README.md', 'results/tokens/README.md',
                 'results/tokens/scarce.md'):
        lines = (ROOT / page).read_text(encoding='utf-8').splitlines()
        judged = '\n'.join(line for line in lines if 'no bound' not in line)
        shown = re.findall(r'([-+][.\d]+ \([-+][.\d]+ to [-+][.\d]+)\)', judged)
        numbers = (first + second).replace('%', '')
        assert len(shown) > 5 and [each for each in shown if each not in numbers] == [], page


def test_models_of_equal_weights_and_sizes_of_the_config_files() -> None:
    for size, width in (('XS', 74), ('S', 117)):
        assert f'--d_mlp={width}' in run_options(size, 'llama-alibi-narrow').split()
        assert configs(f'config/{size.lower()}.py --learning_rate=1') == configs(
            f'{SIZES[size]["options"]} --learning_rate=1')
    for size, models in (('XS', 'llama-alibi-narrow cem-1'),
                         ('scarce-25k', 'llama-alibi cem-2-equal cem-1-equal-twice')):
        weights = [reproduce.count_weights(run_options(size, model))
                   for model in models.split()]
        assert max(weights) / min(weights) < 1.004


def test_a_printed_command_trains_its_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                          capsys: pytest.CaptureFixture) -> None:
    """Then it is read and published once; folders that are none, damaged or other runs are not."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / 'data')
    tiny = ('--n_layer=1 --d_model=8 --d_mlp=8 --n_head=1 --context_length=8 --batch_size=2 '
            '--micro_batch_size=2 --tokens=160 --data=data --vocab_size=257 --compile=False')
    shape = SIZES['XS'] | {'options': f'{SIZES["XS"]["options"]} {tiny}'}
    monkeypatch.setitem(SIZES, 'XS', shape)
    run_options.cache_clear()
    run = Run('XS', 'cem-1-twice', 0.014, 1)
    line = run.command('out/reproduce')
    line = line.replace('python train.py', f'{sys.executable} {ROOT}/train.py')
    subprocess.run(line, shell=True, check=True, capture_output=True, env=os.environ)
    assert '--init_from=resume' in run.command('out/reproduce')
    assert reproduce.read_own() == {} and 'not the text' in capsys.readouterr().err
    os.remove('data/meta.json')
    (found,) = reproduce.read_own().items()
    val, test = reproduce.read_csv(f'{FIRST}/text.csv')
    bits = sum(found[1][f'{row["split"]}_bpb'] * int(row['bytes']) for row in (val, test))
    tokens = int(val['llama_tokens']) + int(test['llama_tokens'])
    assert found[0] == run and found[1]['y'] == pytest.approx(math.log(2) * bits / tokens)
    # Publish it
    for folder in ('SECOND', 'FIGURE_DATA'):
        Path(folder).mkdir()
        monkeypatch.setattr(reproduce, folder, str(tmp_path / folder))
        Path(folder, 'cells.csv').write_text('size,model,rate,seed\nXS,cem-1-twice,0.014,1\n')
    for new in (1, 0):
        reproduce.main(['--publish'])
        assert capsys.readouterr().out.count(f'runs.csv: {new} new runs, 1 of 1') == 2
    assert reproduce.read_published('SECOND/runs.csv')[run] == {
        name: pytest.approx(value) for name, value in found[1].items()}
    # Strange folders
    folder = Path('out/reproduce/XS')
    (good,) = folder.iterdir()
    content = {path.name: path.read_bytes() for path in good.glob('*.json*')}
    log = [{'step': n, 'loss': None, 'lr': 0.1, 'grad_norm': None} for n in range(11)]
    failed = '\n'.join(map(json.dumps, log)).encode()
    for name, change in (
            ('cem-1-twice_rate=0.014_seed=1.bak', {}), ('cem-9_rate=0.014_seed=1', {}),
            ('cem-1-twice_rate=0.014_seed=2', {}), ('llama_rate=0.014_seed=1', {}),
            ('cem-1-twice_rate=0.014_seed=1', {'result.json': b'{"tokens": 1}'}),
            ('cem-1-twice_rate=0.014_seed=1', {'config.json': b'{'}),
            ('cem-1-twice_rate=0.014_seed=1', {'result.json': b''}),
            ('cem-1-twice_rate=0.014_seed=1', {'log.jsonl': failed, 'result.json': None})):
        (folder / name).mkdir(exist_ok=True)
        for file, data in (content | change).items():
            (folder / name / file).unlink(missing_ok=True)
            if data is not None:
                (folder / name / file).write_bytes(data)
        own = reproduce.read_own()
        if 'log.jsonl' in change:
            assert math.isinf(own[run]['y'])
        else:
            assert f'{folder}/{name} is left out: ' in capsys.readouterr().err
    run_options.cache_clear()


# The paper's figures

@pytest.mark.parametrize('figure', FIGURES)
def test_each_figures_options_build_models(figure: str) -> None:
    for size in ('nano', 'XS', '86m', '256m'):
        for run in reproduce.planned(figure, size)[:12]:
            train, cfg = configs(run_options(size, run.model))
            assert cfg.attn == 'cem' or cfg.mlp == 'cem' or 'llama' in run.model
            assert reproduce.hours(run) > 0 and train.tokens != 0
    sweep = [run.rate for run in reproduce.planned('3a', '86m')]
    assert sweep == [0.0005, 0.001, 0.002, 0.004, 0.008] * 2


def test_drawn_points_are_the_csvs_numbers_and_the_star_is_scipys_minimum() -> None:
    found = reproduce.read_published(f'{FIRST}/runs.csv')
    rows = reproduce.read_csv(f'{FIRST}/runs.csv')
    for figure in FIGURES:
        for point in reproduce.collect(figure, 'XS', found):
            cell = ('XS', point.model, point.rate)
            y = [float(row['y']) for row in rows if int(row['seed']) in point.seeds
                 and (row['size'], row['model'], float(row['rate'])) == cell]
            assert len(y) > 1 and point.perplexity == pytest.approx(math.exp(np.mean(y)))
    assert {row['model'] for row in SERIES} <= set(MODELS)
    points = reproduce.collect('3a', 'XS', found)
    curves = reproduce.by_curve(points)
    assert len(curves) == 2
    for group in curves.values():
        x, y = np.log([p.rate for p in group]), [p.perplexity for p in group]
        best = minimize_scalar(Akima1DInterpolator(x, y), bounds=(x[0], x[-1]), method='bounded',
                               options={'xatol': 1e-9})
        _, rate, lowest = reproduce.akima(group)
        assert (math.log(rate), lowest) == pytest.approx((best.x, best.fun), abs=1e-4)
    axes = reproduce.draw_figure('3a', points).axes[0]
    stars = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == '*']
    assert stars == [pytest.approx(reproduce.akima(group)[1:]) for group in curves.values()]


def test_panels_failed_runs_and_missing_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                             capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    row = dict.fromkeys(reproduce.COLUMNS, 1.0)
    found = {Run('nano', 'llama', 0.016, 1): row | {'y': 4.0, 'panel': 'a; per token'},
             Run('nano', 'attn-1-none', 0.016, 1): row | {'y': 4.1, 'panel': 'a; per token'},
             Run('nano', 'attn-1-plain', 0.016, 1): row | {'y': math.inf, 'panel': 'a; per token'},
             Run('nano', 'llama', 0.016, 2): row | {'y': 5.0, 'panel': 'b; per token'},
             Run('nano', 'attn-1-none', 0.016, 2): row | {'y': 5.1, 'panel': 'b; per token'}}
    points = reproduce.collect('2a', 'nano', found)
    picture = reproduce.draw_figure('2a', points)
    assert [ax.get_title() for ax in picture.axes] == ['2a: a; per token', '2a: b; per token']
    table = reproduce.figure_table('2a', points, found)
    assert re.search(r'attn-1-plain .* nan +\| failed: 1 ', table)
    del found[Run('nano', 'attn-1-plain', 0.016, 1)]
    assert 'missing: 1' in reproduce.figure_table('2a', points, found)
    reproduce.main(['--figure=2b', '--size=nano'])
    assert '--figure=2b --size=nano --todo prints' in capsys.readouterr().out
    reproduce.main(['--figure=2b', '--size=nano', '--todo'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all('train.py config/nano.py' in line for line in lines)
    reproduce.main(['--figure=3a', '--size=86m', '--todo'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all(line.startswith('torchrun') for line in lines)
    assert all('A100-hours' in line for line in lines)
    for argv, word in ((['--figure=3d'], "expected one of"), (['--figure=3a', '--size=85m'], '86m'),
                       (['--size=XS'], 'is for --figure')):
        with pytest.raises(SystemExit, match=word):
            reproduce.main(argv)

"""reproduce.py: runs, the pictures of the claims, and the figures."""
import csv
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from scipy.interpolate import Akima1DInterpolator
from scipy.optimize import minimize_scalar

import pages
import paper_figures
import reproduce
import study
from model import SIZES, Transformer
from nanocem.files import read_csv
from results.tokens import verdicts
from running import ROOT, write_data
from study import FIRST, RESULTS, HeldOut, Result, Run, configs, load_study, run_options

STUDY = load_study()
FAMILIES, FIGURES = STUDY.families, STUDY.figures


def test_options_are_those_of_the_published_runs() -> None:
    cells = (f'{folder}/cells.csv' for folder in FAMILIES[1:])
    runs = study.read_runs(*cells, *(f'{folder}/runs.csv' for folder in FAMILIES))
    rows = {(run.size, run.model): row for run, row in runs.items()}
    for (size, model), row in rows.items():
        if '--loops' in STUDY.models[model]['options']:  # commit 16b281a has this option
            continue
        _, cfg = configs(run_options(Run(size, model, 0.01, 1)))
        with torch.device('meta'):
            parameters = Transformer(cfg).num_params()
        assert int(row.get('parameters', parameters)) == parameters, model
        special = cfg.mlp == 'cem' or cfg.mlp_reuse > 1
        assert (STUDY.models[model]['mlp'] != 'plain') == special, model
    assert get_args(reproduce.FigureName) == (*FIGURES, 'all')
    for figure, size in itertools.product(FIGURES, ('nano', 'XS', '86m', '256m')):
        for run in paper_figures.planned(figure, size):
            configs(run_options(run))
    for size in ('xs', 's'):
        assert configs(f'config/{size}.py --learning_rate=1') == configs(
            f'{STUDY.options[size.upper()]} --learning_rate=1')


@pytest.mark.slow
def test_a_printed_command_trains_its_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                          capsys: pytest.CaptureFixture) -> None:
    """Then it is read; folders that are none, damaged or other runs are not."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / 'data')
    monkeypatch.setitem(STUDY.options, 'XS', (
        '--n_layer=1 --d_model=8 --d_mlp=8 --n_head=1 --context_length=8 --batch_size=2 '
        '--tokens=160 --data=data --vocab_size=257 --compile=False --tensorboard=False '
        '--eval_tokens=200 --test_tokens=200 --sample_tokens=0'))
    run = Run('XS', 'cem-1-twice', 0.014, 1)
    reproduce.print_todo([run], 'out/reproduce')
    line = capsys.readouterr().out.replace('python train.py', f'{sys.executable} {ROOT}/train.py')
    subprocess.run(line, shell=True, check=True, capture_output=True, env=os.environ)
    reproduce.print_todo([run], 'out/reproduce')
    assert '--init_from=resume' in capsys.readouterr().out
    # It read another text than the study's. Then this text is the study's
    ((found, result),) = study.read_own().items()
    assert astuple(found)[:4] == astuple(run)[:4] and found.data.startswith('data (')
    written = json.loads(Path(result.folder, 'result.json').read_text())
    assert result.y == written['test_loss'] and str(result.held_out).endswith('; per token')
    data = json.loads(Path(result.folder, 'config.json').read_text())['data']
    text = {name: data[name] for name in STUDY.texts[257]}
    monkeypatch.setitem(STUDY.texts, 257, text)
    ((found, result),) = study.read_own().items()
    val, test = read_csv(f'{FIRST}/text.csv')
    bits = sum(written[f'{row["split"]}_bits_per_byte'] * int(row['bytes']) for row in (val, test))
    tokens = int(val['llama_tokens']) + int(test['llama_tokens'])
    assert found == run and result.y == pytest.approx(math.log(2) * bits / tokens)
    # Leave strange folders out, and take a run that train.py has given up as failed
    (good,) = Path('out/reproduce/XS').iterdir()
    config, whole = ((good / name).read_text() for name in ('config.json', 'result.json'))
    for name, file, content in (
            ('notes', 'config.json', config), ('cem-9_rate=0.014_seed=1', 'config.json', config),
            ('llama_rate=0.014_seed=1', 'config.json', config), ('llama_rate=1_seed=2', 'x', ''),
            (good.name, 'result.json', '{"tokens": 1}'), (good.name, 'result.json', '{')):
        (good.parent / name).mkdir(exist_ok=True)
        (good.parent / name / file).write_text(content)
        study.read_own()
        assert f'{good.parent}/{name} is left out: ' in (error := capsys.readouterr().err)
    assert 'left out: no size XS has a model cem-9 here' in error
    for option in '"test_tokens": 10000000', '"init_from": "scratch"':
        other = config.replace(option, option.replace('10000000', '300').replace('scratch', 'run'))
        (good / 'config.json').write_text(other)
        study.read_own()
        assert 'is that of another run' in capsys.readouterr().err
    (good / 'config.json').write_text(config)
    shorter = whole.replace('"steps": 10,', '"steps": 5,').replace('"tokens": 160', '"tokens": 80')
    (good / 'result.json').write_text(shorter)
    assert study.read_own() == {} and 'is that of 5 steps' in capsys.readouterr().err
    (good / 'result.json').write_text(whole)
    # Another text of model.py counts where it computes something else
    (good / 'model.py').write_text('another text')
    assert len(study.read_own()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, 'silu', torch.nn.functional.gelu)
        assert study.read_own() == {}
    said = 'its logits are not those that were kept'
    assert said in capsys.readouterr().err
    (good / 'result.json').unlink()
    assert study.read_own() == {}
    log = [json.dumps({'step': n, 'event': 'skipped'}) for n in range(11)]
    (good / 'log.jsonl').write_text('\n'.join(log))
    assert math.isinf(study.read_own()[run].y)


def write_run(run: Run, root: str = 'out/reproduce', name: str | None = None,
              bits: float = 1.5, **data: Any) -> str:
    """Write the folder of a finished run, as train.py does. Without `data` it read the study's
    text."""
    folder = Path(root, run.size, name or f'{run.model}_rate={run.rate:g}_seed={run.seed}')
    folder.mkdir(parents=True, exist_ok=True)
    train, cfg = configs(run_options(run))
    text = STUDY.texts[cfg.vocab_size] | data
    step = train.batch_size * cfg.context_length
    steps = math.ceil(train.tokens / step)
    (folder / 'config.json').write_text(json.dumps({
        'train': asdict(train), 'model': asdict(cfg) | {'vocab_size': text['vocab_size']},
        'data': text, 'max_steps': steps}))
    (folder / 'result.json').write_text(json.dumps({
        'steps': steps, 'tokens': steps * step, 'parameters': 9, 'test_loss': 2.0,
        'val_bits_per_byte': bits, 'test_bits_per_byte': bits}))
    return str(folder)


def test_the_studys_text_is_that_of_text_csv() -> None:
    for row in read_csv(f'{FIRST}/text.csv'):
        name = f'{row["split"]} tokens'
        assert STUDY.texts[2048][name] == int(row['bpe2048_tokens'])
        assert STUDY.texts[257][name] == int(row['bytes']) + int(row['documents'])


LAST = Run('S', 'attn-1-none', 0.0157, 4)  # a run of the second family


def keep(monkeypatch: pytest.MonkeyPatch, *left_out: Run) -> None:
    """Publish all runs but these."""
    rows = study.read_published_rows
    for script in study, verdicts:
        monkeypatch.setattr(script, 'read_published_rows', lambda families: {
            run: row for run, row in rows(families).items() if run not in left_out})


@pytest.mark.parametrize(('data', 'counts'), [
    ({}, True), ({'test checksum': 1}, False), ({'train checksum': 1}, False),
    ({'tokenizer_sha256': 'x'}, False), ({'vocab_size': 2100}, False)])
def test_rows_count_runs_of_the_studys_text_alone(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture,
        data: dict[str, Any], counts: bool) -> None:
    """Whatever the name of the folder says."""
    monkeypatch.chdir(tmp_path)
    keep(monkeypatch, LAST)
    folder = write_run(LAST, **data)
    if not counts:  # The picture is the one of the first case, which draws it.
        monkeypatch.setattr(Figure, 'savefig', lambda *of, **options: None)
    reproduce.main([])
    found = study.read_all()
    error = capsys.readouterr().err
    own = {}
    assert Path('out/reproduce/runs.csv').exists() == counts
    if counts:
        verdicts.main(['--runs=out/reproduce/runs.csv'])
        assert 'reproduce.py --effects=out/reproduce/effects.csv draws' in capsys.readouterr().out
        reproduce.main(['--effects=out/reproduce/effects.csv'])
        own = study.read_runs('out/reproduce/runs.csv')
        assert read_csv('out/reproduce/effects.csv') == list(csv.DictReader(
            io.StringIO(verdicts.effects_csv({
                folder.name: verdicts.judge(folder, rule, own)
                for folder, rule in verdicts.RULES.items()}))))
    second = verdicts.judge(verdicts.STUDY / 'second', verdicts.second_rule, own)
    (effect,) = [effect for claim, effects, _ in second
                 if claim['id'] == 'a1' for effect in effects if effect.size == 'S']
    assert list(effect.by_seed) == ([1, 2, 3, 4] if counts else [1, 2, 3])
    assert (f'{folder} is left out: it read data/english (' in error) == (not counts)
    assert (LAST in study.finished(found)) == counts


def test_figures_average_no_two_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The table and the titles name the data where there are two: two texts in folders of one
    name."""
    monkeypatch.chdir(tmp_path)
    for model in 'llama', 'attn-1-none':
        run = next(run for run in paper_figures.planned('2a', 'S') if run.model == model)
        write_run(replace(run, seed=5), 'out/figures', **{'val checksum': 1})
        for seed in 1, 2:
            write_run(Run('nano', model, 0.016, seed), 'out/figures', **{'test tokens': seed})
    found = study.read_all()
    points = paper_figures.collect('2a', 'S', found)
    seeds = {(p.model, p.held_out.data == 'English manuals'): p.seeds for p in points}
    assert seeds['llama', True] == '1 2 3 4' and seeds['llama', False] == '5'
    table = paper_figures.figure_table('2a', points, found)
    assert table.count('| English manuals, vocabulary 2,048') == 3
    assert re.search(r'\| data/english \(\w{8}\), vocabulary 2,048.*; per token +\| llama', table)
    assert 'English' not in paper_figures.figure_table('2a', points[:1], found)
    titles = [ax.get_title() for ax in paper_figures.draw_figure('2a', points).axes]
    assert len(titles) == len(set(titles)) == 2
    points = paper_figures.collect('2a', 'nano', found)
    assert sorted(p.seeds for p in points if p.model == 'llama') == ['1', '2']
    assert len(paper_figures.draw_figure('2a', points).axes) == 2


def test_each_run_that_is_left_out_has_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                              capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    keep(monkeypatch, LAST)
    first = write_run(LAST, 'out/figures')
    copied = replace(LAST, seed=1)
    y = study.read_published()[copied].y
    rows = read_csv(f'{FIRST}/text.csv')
    n_bytes, n_tokens = (sum(int(row[name]) for row in rows) for name in ('bytes', 'llama_tokens'))
    lines = {
        write_run(LAST, bits=1.6): f'{first} is the same run',
        write_run(LAST, name='attn-1-none_rate=1.57e-2_seed=4'): f'{first} is the same run',
        write_run(copied): f'the run is published with a loss of {y:.4f}; here it is '
                           f'{math.log(2) * 1.5 * n_bytes / n_tokens:.4f}',
        write_run(replace(LAST, seed=102)): 'seeds from 101 on choose learning rates',
        write_run(replace(LAST, rate=0.03)): 'no row has its model at its size, rate and seed'}
    found = study.read_all()
    reproduce.leave_out_of_rows(found)
    error = capsys.readouterr().err
    for folder, reason in lines.items():
        assert error.count(f'{folder} is left out: {reason}\n') == 1, (folder, error)
    assert error.count('\n') == len(lines) and found[LAST].folder == first
    # A picture of changes has one rate of each model
    points = paper_figures.collect('2c', 'S', found)
    assert len({p.model for p in points}) == len(points)
    (point,) = [p for p in points if p.model == 'attn-1-none']
    assert point.rate == 0.0157 and point.seeds == '1 2 3 4'
    error = capsys.readouterr().err
    assert '_rate=0.03_seed=4 is left out: figure 2c has its model at the rate 0.0157' in error
    assert '_seed=102 is left out: at S figure 2c has the seeds below 101 alone' in error
    write_run(Run('S', 'cem-2', 0.0125, 6))
    paper_figures.collect('3a', 'S', study.read_all())
    assert 'seed=6 is left out: at S figure 3a has the seeds from 101 alone' in (
        capsys.readouterr().err)


def test_a_run_is_published_once() -> None:
    folders = *FAMILIES, RESULTS / 'figures'
    paths = [f'{FIRST}/more_seeds.csv', *(f'{folder}/runs.csv' for folder in folders)]
    rows = [row for path in paths for row in read_csv(path)]
    assert len(rows) == len(study.read_published())


def test_a_model_has_one_rate_at_a_size() -> None:
    """Of two rates the later line of a CSV would count. One model has two, by mistake."""
    runs = [*study.planned_cells(FAMILIES), *study.read_runs(f'{FIRST}/more_seeds.csv')]
    rates: dict[tuple[str, str], set[float]] = {}
    for run in runs:
        if run.seed < study.TRIAL_SEEDS:
            rates.setdefault((run.size, run.model), set()).add(run.rate)
    assert [cell for cell, values in rates.items() if len(values) > 1] == [('XS', 'cem-2-normed')]


def test_the_claims_picture() -> None:
    """It has the rows of claims.csv, with the last family's numbers if it has an interval, as the
    page's table has them; no text is cut off or small."""
    effects = read_csv(f'{FIRST}/effects.csv')
    rows = reproduce.claim_rows(effects)
    table = pages.claims()
    assert len(rows) == len(read_csv(f'{RESULTS}/claims.csv')) <= 24
    for row in rows:
        assert f'{row.effect:+.1f} ({row.low:+.1f} to {row.high:+.1f})' in table, row.label
    # With two seeds of each model at M the third family decides on the headline
    M = {replace(run, seed=2): row | {'seed': '2'}
         for run, row in study.read_published_rows(FAMILIES).items() if run.size == 'M'}
    later = {folder.name: verdicts.judge(folder, rule, M)
             for folder, rule in verdicts.RULES.items()}
    decided = {(claim['A'], claim['B']): effects[-1] for claim, effects, _ in later['third']
               if effects}
    text = io.StringIO(verdicts.effects_csv(later))
    at_M = [row for row in reproduce.claim_rows(list(csv.DictReader(text))) if row.size == 'M']
    assert len(at_M) == 4
    for row in at_M:
        numbers = row.effect, row.low, row.high
        assert decided[row.A, row.B].percent() == pytest.approx(numbers, abs=1e-5)
    for shown in rows, reproduce.all_rows(effects):
        figure = reproduce.draw_verdicts(shown)
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if re.search('[a-z]', text.get_text(), re.I)]
        assert len(texts) > 2 * len(shown) and figure.get_figwidth() == 8.3
        for text in texts:
            box = text.get_window_extent()
            assert text.get_fontsize() >= 9, text
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    # The verdicts stand in three groups
    words = sorted((row.word for row in rows), key=list(reproduce.MARKS).index)
    ticks = reproduce.draw_verdicts(rows).axes[0].get_yticklabels()
    word_of = {textwrap.fill(row.label, 50): row.word for row in rows}
    assert [word_of[tick.get_text()] for tick in ticks] == words
    marks = [mark for mark, _, _ in reproduce.MARKS.values()]
    assert len(set(marks)) == 3


# The paper's figures

def test_drawn_points_are_the_csvs_numbers_and_the_star_is_scipys_minimum() -> None:
    found = study.read_published()
    rows = [row for folder in (*FAMILIES, RESULTS / 'figures')
            for row in read_csv(f'{folder}/runs.csv')]
    for figure in FIGURES:
        for point in paper_figures.collect(figure, 'XS', found):
            cell = ('XS', point.model, point.rate)
            y = [float(row['y']) for row in rows if row['seed'] in point.seeds.split()
                 and (row['size'], row['model'], float(row['rate'])) == cell]
            assert len(y) == len(point.seeds.split())
            assert point.perplexity == pytest.approx(math.exp(np.mean(y)))
    points = paper_figures.collect('3a', 'XS', found)
    axes = paper_figures.draw_figure('3a', points).axes[0]
    stars = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == '*']
    for model, star in zip(('llama', 'llama-alibi', 'cem-2'), stars, strict=True):
        x, y = np.array([(math.log(p.rate), p.perplexity) for p in points if p.model == model]).T
        best = minimize_scalar(Akima1DInterpolator(x, y), bounds=(x[0], x[-1]), method='bounded')
        assert (math.log(star[0]), star[1]) == pytest.approx((best.x, best.fun), abs=2e-3)


def text(data: str) -> HeldOut:
    return HeldOut(data, 257, 128, 10_000_000)


def draw_sweep(*runs: tuple[float, float]) -> tuple[list, list, str]:
    """Draw one model's curve of (rate, perplexity), where an infinite one is a failed run. Return
    the lines and the stars of the picture, and the legend's text."""
    found = {Run('nano', 'llama', rate, 1): Result(math.log(perplexity), 1.0, 1.0, text('a'))
             for rate, perplexity in runs}
    axes = paper_figures.draw_figure('3a', paper_figures.collect('3a', 'nano', found)).axes[0]
    curves = [line.get_xydata() for line in axes.lines if len(line.get_xydata()) > 100]
    stars = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == '*']
    return curves, stars, axes.get_legend_handles_labels()[1][-1]


@pytest.mark.parametrize(('runs', 'n_curves', 'label'), [
    ([(0.008, 6.7), (0.016, 6.5), (0.032, 257)], 0, '6.5 at 0.016, lowest, at the edge'),
    ([(0.004, 6.9), (0.008, 6.7), (0.016, 6.5)], 1, '6.5 at 0.016, lowest, at the edge'),
    ([(0.016, 6.5), (0.032, 6.7), (0.064, 6.9)], 1, '6.5 at 0.016, lowest, at the edge'),
    ([(0.004, 6.9), (0.016, 6.5), (0.064, 6.7)], 0, '6.5 at 0.016, lowest, at the edge'),
    ([(0.004, 6.9), (0.008, 6.5), (0.016, math.inf), (0.032, 6.6), (0.064, 6.9)], 0,
     '6.5 at 0.008, lowest, at the edge'),
    ([(0.002, 7.1), (0.004, 6.9), (0.008, 6.8), (0.016, math.inf), (0.032, 6.7)], 1,
     '6.7 at 0.032, lowest, at the edge'),
    ([(0.016, 6.5)], 0, '6.5 at 0.016, one rate')])
def test_no_star_without_two_near_neighbours(runs: list[tuple[float, float]], n_curves: int,
                                             label: str) -> None:
    curves, stars, legend = draw_sweep(*runs)
    assert stars == [] and legend == f'Llama with RoPE, nano: {label}'
    assert len(curves) == n_curves
    failed = [rate for rate, perplexity in runs if math.isinf(perplexity)]
    for curve in curves:
        assert not any(curve[0, 0] < rate < curve[-1, 0] for rate in failed)


def test_a_star_between_two_near_neighbours() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        rates = 0.004 * 2.0 ** np.arange(5)
        values = 6 + rng.uniform(0, 1, 5)
        values[rng.integers(1, 4)] = 5.8
        ((curve,), (star,), legend) = draw_sweep(*zip(rates, values, strict=True))
        n = values.argmin()
        assert rates[n - 1] < star[0] < rates[n + 1]
        assert star[1] == pytest.approx(curve[:, 1].min(), abs=1e-4) and star[1] <= values.min()
        assert legend == f'Llama with RoPE, nano: star {star[1]:.1f} at {star[0]:.3g}'


def test_a_curve_has_equal_seeds_and_no_failed_run() -> None:
    """A mean over other seeds, or over those that did not fail, is no point of a curve."""
    points = paper_figures.collect('3a', 'XS', study.read_published())
    curve = [p for p in points if p.model == 'llama']
    n = min(range(len(curve)), key=lambda n: curve[n].perplexity)
    assert paper_figures.segments(curve) == [curve]
    for change in {'failed': '102'}, {'seeds': '101'}, {'perplexity': math.nan, 'failed': '101'}:
        changed = [*curve[:n + 1], curve[n + 1]._replace(**change), *curve[n + 2:]]
        assert paper_figures.segments(changed) == [curve[:n + 1], curve[n + 2:]]


def test_both_llamas_are_drawn_and_planned_once() -> None:
    found = study.read_published()
    for figure, row in FIGURES.items():
        points = paper_figures.collect(figure, None, found)
        assert {(p.size, p.x) for p in points if p.model == 'llama-alibi'} >= {
            ('XS', '' if figure == '3a' else 'baseline')}
        for ax in paper_figures.draw_figure(figure, points).axes:
            names = ' '.join(ax.get_legend_handles_labels()[1])
            assert 'Llama with RoPE' in names and 'Llama with ALiBi' in names
            if row['plot'] == 'changes':
                like = 'RoPE' if figure in ('2d', '3c') else 'ALiBi'
                assert ax.get_ylabel() == f'perplexity over that of Llama with {like}, %'
        for size in SIZES:
            runs = [run for run in paper_figures.planned(figure, size)
                    if run.model == 'llama-alibi']
            assert len(runs) == (figure != '3a')
        assert [run for run in paper_figures.planned(figure, 'XS') if run not in found] == []


def test_changes_are_those_of_perplexities() -> None:
    """The figure's Llama is at zero, and a change is in per cent of its perplexity."""
    points = paper_figures.collect('2d', 'XS', study.read_published())
    (ax,) = paper_figures.draw_figure('2d', points).axes
    perplexity = {(p.series, p.x): p.perplexity for p in points}
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert lines['Llama with RoPE'][0] == 0
    llama = perplexity['Llama with RoPE', 'baseline']
    for bars in ax.containers:
        changes = bars[0].get_ydata() / 100
        expected = [perplexity[bars.get_label(), x] / llama - 1 for x in ('T = 1', 'T = 2')]
        assert changes == pytest.approx(np.array(expected))


def test_titles_say_the_findings_of_the_page() -> None:
    page = (ROOT / 'results/figures/README.md').read_text(encoding='utf-8')
    page = re.sub(r'\n(?=\w)', ' ', page)  # a line for each paragraph
    found = study.read_published()
    for figure, row in FIGURES.items():
        assert re.search(rf'\*\*{figure}\b.*\*\*.* {re.escape(row["finding"])}\n', page, re.I)
        points = paper_figures.collect(figure, None, found)
        picture = paper_figures.draw_figure(figure, points, row['finding'])
        picture.draw_without_rendering()
        box = picture._suptitle.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= picture.bbox.x1


def test_panels_failed_runs_and_missing_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                             capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    found = {Run('nano', model, 0.016, seed, data): Result(y, 1.0, 1.0, text(data))
             for model, seed, y, data in (
                 ('llama', 1, 4.0, 'a'), ('attn-1-none', 1, 4.1, 'a'), ('llama', 2, 5.0, 'b'),
                 ('attn-1-none', 2, 5.1, 'b'), ('attn-1-plain', 1, math.inf, 'a'))}
    points = paper_figures.collect('2a', 'nano', found)
    picture = paper_figures.draw_figure('2a', points)
    assert [ax.get_title() for ax in picture.axes] == [
        f'2a: {data}, vocabulary 257, context 128, 10 M test tokens; per token' for data in 'ab']
    table = paper_figures.figure_table('2a', points, found)
    assert re.search(r'attn-1-plain .* nan +\| failed: 1 ', table)
    failed = Run('nano', 'attn-1-plain', 0.016, 1, 'a')  # alone it has a table, but no picture
    monkeypatch.setattr(reproduce, 'read_all', lambda: {failed: found[failed]})
    reproduce.main(['--figure=2a'])
    assert 'All runs of figure 2a failed: it is not drawn' in capsys.readouterr().out
    assert not Path('out/figures/2a.png').exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    found.popitem()
    assert re.search(r'attn-1-plain .* missing ', paper_figures.figure_table('2a', points, found))
    reproduce.main(['--figure=2b', '--size=nano'])
    assert '--figure=2b --size=nano --todo prints' in capsys.readouterr().out
    reproduce.main(['--figure=3a', '--size=86m', '--todo'])
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r'rate=(\S+)', line)[1] for line in lines] == [
        '0.0005', '0.001', '0.002', '0.004', '0.008'] * 2
    assert all(line.startswith('torchrun') and 'A100-hours' in line for line in lines)


def test_pages_show_pictures_830_pixels_wide() -> None:
    pictures = sorted((ROOT / 'results').rglob('*.png'))
    assert len(pictures) == len(FIGURES) + 5  # rows, gp, copies, gradient, ties
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.width == 2 * 830, path

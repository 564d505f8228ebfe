"""nanocem/gp_search.py, gp_trials.py and gp_calibrate.py: the search goes on where it was, scores
what it says, and finds what it is shown."""
import csv
import fcntl
import itertools
import math
import os
import random
import sys

import pytest
import torch

import synthetic_gp as gp
from nanocem import gp_calibrate, gp_search, gp_trials
from nanocem.gp_report import PAPER
from nanocem.gp_search import BASE, CHOICES, LEADS, SHAPES, STAGES, Trials

torch.set_num_threads(1)
UP_TO_T4 = STAGES[0].models


def made_up(protocol, k, shape, stage, round_, start, folder):
    """A trial whose numbers hang on what was tried alone: each choice adds to the misfit."""
    g = random.Random(Trials.key(protocol, k, gp_search.in_words(shape), stage))
    worse = sum(list(CHOICES[name]).index(value) for name, value in protocol.items())
    trial = dict(round=round_, **protocol, kernel=k, shape=gp_search.in_words(shape), stage=stage,
                 lengthscale=round(g.uniform(1, 9), 2))
    trial['misfit'] = round(0.1 + 0.02 * worse + g.uniform(0, 0.01), 5)
    trial['seconds'] = 1
    for m in STAGES[-1].models:
        for i, number in enumerate(gp_search.NUMBERS):
            known = m in STAGES[stage].models
            trial[f'{m} {number}'] = f'{PAPER[k, m][i] * g.uniform(1, 1.1):.6f}' if known else ''
    return trial


def main(monkeypatch, module, *args: str) -> None:
    monkeypatch.setattr(sys, 'argv', [module.__name__, *args])
    module.main()


def searched(monkeypatch, out_dir, trials: int) -> list[dict[str, str]]:
    """The lines of trials.csv after a search that is interrupted once it holds so many."""
    count = itertools.count(len(lines_of(out_dir)))

    def interrupted(*args):
        if next(count) == trials:
            raise KeyboardInterrupt
        return made_up(*args)
    monkeypatch.setattr(gp_search, 'run_trial', interrupted)
    with pytest.raises(SystemExit, match='interrupted'):
        main(monkeypatch, gp_search, f'--out_dir={out_dir}')
    return lines_of(out_dir)


def lines_of(out_dir) -> list[dict[str, str]]:
    """The whole ones."""
    if not os.path.exists(out_dir / 'trials.csv'):
        return []
    text = (out_dir / 'trials.csv').read_text()
    return list(csv.DictReader(text[:text.rfind('\n') + 1].splitlines()))


def test_the_search_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    """280 trials at one go; or interrupted after 7, 60 and 130, once in the middle of a line."""
    whole = searched(monkeypatch, tmp_path / 'a', 280)
    parts = tmp_path / 'b'
    for until in (7, 60, 130):
        assert len(searched(monkeypatch, parts, until)) == until
        with open(parts / 'trials.csv', 'a') as file:
            file.write('3,4000,1000,cube,Fal' * (until == 60))
    assert searched(monkeypatch, parts, 280) == whole
    assert len({Trials.key(t, t['kernel'], t['shape'], t['stage']) for t in whole}) == 280


def test_what_is_tried(monkeypatch, tmp_path, capsys):
    """First the leads, then the best lead with every choice changed alone; the best move up."""
    whole = searched(monkeypatch, tmp_path, 280)
    with open(tmp_path / 'trials.csv', 'rb') as file:
        trials = gp_search.read(file)
    first = [{name: t[name] for name in BASE} for t in trials.all if t['stage'] == 0]
    first = [p for i, p in enumerate(first) if p not in first[:i]]
    assert first[:len(LEADS)] == list(LEADS)
    best = min(LEADS, key=lambda p: gp_search.score(trials, p, 0))
    alone = [best | {name: value} for name, values in CHOICES.items() for value in values
             if value != best[name] and gp_search.valid(best | {name: value})]
    alone = [p for p in alone if p not in LEADS]
    assert first[len(LEADS):len(LEADS) + len(alone)] == alone and len(alone) > 25
    later = first[len(LEADS) + len(alone):]
    assert later and all(gp_search.valid(p) for p in later)
    for stage in (1, 2, 3):
        assert {t['stage'] for t in whole} == {'0', '1', '2', '3'}
        moved = [p for _, p in gp_search.ranking(trials, stage)]
        before = [p for _, p in gp_search.ranking(trials, stage - 1)]
        assert moved and before[0] in moved and len(moved) < len(before)


def test_a_second_search_in_the_same_folder_is_told(monkeypatch, tmp_path):
    with open(tmp_path / 'trials.csv', 'ab+') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match='another search'):
            main(monkeypatch, gp_search, f'--out_dir={tmp_path}')


@pytest.mark.parametrize('module', [gp_search, gp_trials, gp_calibrate])
def test_a_file_in_place_of_the_folder_is_one_clear_line(monkeypatch, tmp_path, module):
    (tmp_path / 'file').write_text('')
    with pytest.raises(SystemExit) as error:
        main(monkeypatch, module, f'--out_dir={tmp_path}/file')
    assert 'file' in error.value.code and '\n' not in error.value.code


def test_misfit_leaves_out_plains_level():
    rows = {m: PAPER['rbf', m] for m in UP_TO_T4}
    assert gp_search.misfit(rows, 'rbf') == 0
    level = {m: tuple(1.3 * v for v in row) for m, row in rows.items()}
    assert gp_search.misfit(level, 'rbf') == pytest.approx(0, abs=1e-12)
    train, std, test, test_std = rows['Gated']
    one = rows | {'Gated': (train * math.exp(0.5), std, test, test_std)}
    assert gp_search.misfit(one, 'rbf') == pytest.approx(0.5 / math.sqrt(10))
    assert gp_search.misfit(rows | {'Gated': (math.nan, std, test, test_std)}, 'rbf') == math.inf


def test_the_lengthscale_is_plains(monkeypatch):
    """On a made-up law, RMSE = the paper's at lengthscale 7, falling as its power 1.5; and where no
    lengthscale has it, none."""
    o = gp.Options(repeats=2, device='cpu')
    train, _, test, _ = PAPER['rbf', 'Plain']
    monkeypatch.setattr(gp_search, 'draws', lambda o, k, parameters, folder: parameters[0])
    for floor, expected in ((0, 7), (3, None)):
        def fit(o, model, scale, repeats, floor=floor):
            like = max(floor, (scale / 7) ** -1.5)
            return {}, dict(train=[train * like] * 2, test=[test * like] * 2)
        monkeypatch.setattr(gp, 'fit', fit)
        found = gp_search.lengthscale(o, 'rbf', (), 2.0, '')
        assert found == (expected and pytest.approx(expected, rel=gp_search.RATIO ** 0.5 - 1))


def test_draws_are_shared_between_protocols(monkeypatch, tmp_path):
    """Files of 1000 test points, of which a protocol takes its own; each drawn once."""
    drawn, draw = [], gp.draw
    monkeypatch.setattr(gp, 'draw', lambda *args: drawn.append(1) or draw(*args))
    small = dict(points=40, batch_size=20, repeats=2, device='cpu')
    many = gp_search.draws(gp.Options(**small), 'rbf', (4.0,), str(tmp_path))
    few = gp.Options(**small, test_points=200, standardise=True, inputs='unit')
    data = gp_search.draws(few, 'rbf', (4.0,), str(tmp_path))
    assert len(drawn) == 2
    torch.testing.assert_close(data.x_test, (many.x_test[:, :200] + 1) / 2)
    torch.testing.assert_close(data.y.std(1), torch.ones(2, 1))


def test_a_real_trial(monkeypatch, tmp_path):
    """40 steps on 60 points: rows for the stage's models, and the misfit is theirs."""
    tiny = dict(points=60, test_points=20, batch_size=20, steps=40)
    monkeypatch.setattr(gp_search, 'HIGHEST', 6.0)
    monkeypatch.setitem(PAPER, ('rbf', 'Plain'), (0.1, 0.01, 0.2, 0.01))
    trial = gp_search.run_trial(BASE | tiny, 'rbf', (), 0, 0, 3.0, str(tmp_path))
    rows = gp_search.rows_of(trial)
    assert tuple(rows) == UP_TO_T4 and trial['lengthscale'] <= 6.0
    assert trial['misfit'] == pytest.approx(gp_search.misfit(rows, 'rbf'), abs=1e-3)


def test_what_the_trials_say(monkeypatch, tmp_path, capsys):
    """Ranking, chance and picture; --settle finds the best protocol's lengthscales anew."""
    searched(monkeypatch, tmp_path, 280)
    found = dict(lengthscale=3.21, train=0.1, test=0.2)
    asked = []
    monkeypatch.setattr(gp_trials, 'match', lambda o, k, *args: asked.append((o, k)) or found)
    main(monkeypatch, gp_trials, f'--out_dir={tmp_path}', '--settle')
    assert (tmp_path / 'choices.png').stat().st_size > 10_000
    text = (tmp_path / 'search.md').read_text()
    with open(tmp_path / 'trials.csv', 'rb') as file:
        trials = gp_search.read(file)
    (best, protocol), (second, _) = gp_search.ranking(trials, gp_trials.furthest(trials))[:2]
    for part in ('280 trials', f'best: {best:.3f}', f'runner-up: {second:.3f}', 'std in every'):
        assert part in text
    assert [k for _, k in asked] == list(gp.KERNELS)
    assert all(getattr(o, name) == value for o, _ in asked for name, value in protocol.items())
    assert 'matern: (3.21, ' in capsys.readouterr().out


def test_chance_is_what_shuffled_rows_give(monkeypatch, tmp_path, capsys):
    """Trials near the paper's table: no shuffle of its rows is as near."""
    trials = Trials([])
    for protocol in LEADS[:2]:
        for stage in (0, 1):
            for k in STAGES[stage].kernels:
                trial = made_up(protocol, k, SHAPES[k][0], stage, 0, 1.0, '')
                trial['misfit'] = gp_search.misfit(gp_search.rows_of(trial), k)
                trials.add(trial)
    best = gp_search.ranking(trials, 1)[0][0]
    chance = gp_trials.by_chance(trials, 1, 50)
    assert best < 0.06 < min(chance)


# The blind calibration

@pytest.mark.parametrize('k', gp.KERNELS)
def test_calibration_finds_the_lengthscale_and_the_misfit(monkeypatch, k):
    """On a made-up law, RMSE = 1.1 x the paper's at the middle lengthscale, falling as its power
    1.5; test 5% more."""
    shape, middle = next(iter(gp_calibrate.SHAPES[k].items()))
    train, _, test, _ = PAPER[k, 'Plain']

    def draw(o, kernel, repeats, parameters):
        assert (kernel, parameters[1:]) == (k, shape)
        like = torch.full((len(repeats), 1, 1), parameters[0] / middle)
        return gp.Data(like, like, like, like)

    def fit(o, model, data, repeats):
        like = 1.1 * data.x[:, 0, 0] ** -1.5
        return {}, dict(train=(train * like).tolist(), test=(1.05 * test * like).tolist())
    monkeypatch.setattr(gp, 'draw', draw)
    monkeypatch.setattr(gp, 'fit', fit)
    found = gp_calibrate.match(gp.Options(device='cpu', repeats=2), k, shape, middle, {})
    assert found['misfit'] == pytest.approx(math.log(1.05), rel=1e-4)
    exact = middle * (1.1 * 1.05 ** 0.5) ** (1 / 1.5)
    assert found['lengthscale'] == pytest.approx(exact, rel=0.01)
    assert found['train'] * found['test'] == pytest.approx(train * test, rel=1e-4)


def test_calibration_takes_the_first_of_the_best(monkeypatch, tmp_path, capsys):
    """Protocols 3 and 5 are tied, 3 is taken; of the shapes the last but for RBF, which has one."""
    def match(o, k, shape, middle, draws):
        protocol = {name: getattr(o, name) for name in gp_calibrate.NAMES}
        i = gp_calibrate.PROTOCOLS.index(protocol)
        assert o.schedule == 'cosine' and o.stop == 'end' and o.init_cem == o.init
        last = shape == [*gp_calibrate.SHAPES[k]][-1] and shape != ()
        return dict(kernel=k, shape=' '.join(map(str, shape)), lengthscale=1.0, train=0.1, test=0.1,
                    misfit=-0.001 if last else {3: 0.105, 5: -0.1}.get(i, 0.2), chosen='')
    monkeypatch.setattr(gp_calibrate, 'match', match)
    main(monkeypatch, gp_calibrate, f'--out_dir={tmp_path}')
    with open(tmp_path / 'calibration.csv') as file:
        rows = list(csv.DictReader(file))
    chosen = [row for row in rows if row['chosen']]
    shapes = gp_calibrate.SHAPES
    others = sum(len(of) - 1 for of in shapes.values())
    assert len(rows) == len(gp_calibrate.PROTOCOLS) * 5 + others
    assert [row['kernel'] for row in chosen] == list(gp.KERNELS)
    taken = gp_calibrate.PROTOCOLS[3]
    for row in chosen:
        assert row['steps'] == str(taken['steps']) and row['points'] == str(taken['points'])
        assert row['shape'] == ' '.join(map(str, [*shapes[row['kernel']]][-1]))

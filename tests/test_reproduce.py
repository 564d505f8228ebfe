"""reproduce.py: its tables of runs, its statistics, and one figure from nothing. Seeds: 1."""
import json
import math
import os
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy.stats import t as student

import reproduce
from model import ModelConfig, Transformer
from nanocem.runs import last_checkpoint
from nanocem.shards import Pieces
from reproduce import CLAIMS, FIGURES, SCALES, akima_optimum, canonical, cost, difference, folder, runs_of, verdict

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with the project's files in it."""
    for name in os.listdir(ROOT):
        if name.endswith('.py') or name == 'config':
            os.symlink(os.path.join(ROOT, name), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(('name', 'scale'), [(name, scale) for name in FIGURES for scale in FIGURES[name].scales])
def test_runs_are_valid(name, scale, monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = runs_of(name, SCALES[scale])
    sizes = {**SCALES[scale].sizes, **(SCALES[scale].sweep_sizes if name == 'fig_lr' else {})}
    assert {run.size for run in runs} == set(sizes)
    assert len({run[:3] for run in runs}) == len(runs)  # no two bars of one name
    for run in runs:
        of = cost(run.options)  # builds both configs: bad or contradictory options would end here
        assert of.disk > 0 and of.tokens >= 20 * 40_000 and of.flops > 6 * of.tokens
        assert len(folder(run.options, 1).split('/')[-1]) < 256
    for size in sizes:  # models of a size see the same tokens
        same = [run.options for run in runs if run.size == size and 'tokens_per_param' not in run.options]
        assert len({cost(options).tokens for options in same}) == 1


@pytest.mark.parametrize('scale', SCALES)
def test_claims_are_drawn(scale):
    """Every comparison's two sides are runs of some figure, at every size."""
    known = {run.options for name in FIGURES if scale in FIGURES[name].scales for run in runs_of(name, SCALES[scale])}
    for _, tests in CLAIMS.values():
        for test in tests:
            for base in SCALES[scale].sizes.values():
                assert {canonical(f'{base} {test.A}'), canonical(f'{base} {test.B or test.A}')} <= known


def test_canonical():
    assert canonical('config/a.py --x=1 --y=2 --x=3') == 'config/a.py --x=3 --y=2'


def test_the_256m_sweep_is_at_the_papers_scale_only():
    assert '256m' in {run.size for run in runs_of('fig_lr', SCALES['paper'])}
    assert '256m' not in {run.size for run in runs_of('fig_attn', SCALES['paper'])}


class TestAkima:
    rates = tuple(0.0005 * 2 ** i for i in range(5))

    def test_interior(self):
        """A parabola in log rate, its minimum between two rates."""
        values = [3 + (math.log(r) - math.log(0.0017)) ** 2 for r in self.rates]
        rate, value = akima_optimum(self.rates, values)
        assert rate == pytest.approx(0.0017, rel=0.03) and value == pytest.approx(3, abs=0.01)

    def test_edges(self):
        assert akima_optimum(self.rates, [5, 4, 3, 2, 1]) == (pytest.approx(0.008), pytest.approx(1))
        assert akima_optimum(self.rates, [1, 2, 3, 4, 5]) == (pytest.approx(0.0005), pytest.approx(1))

    def test_ties(self):
        assert akima_optimum(self.rates, [2, 2, 2, 2, 2]) == (pytest.approx(0.0005), pytest.approx(2))
        rate, _ = akima_optimum(self.rates, [2, 1, 3, 1, 2])
        assert rate < self.rates[2]  # of two equal valleys the lower rate's

    def test_never_above_the_points(self):
        rng = np.random.default_rng(1)
        for _ in range(50):
            values = rng.normal(size=5)
            assert akima_optimum(self.rates, values)[1] <= values.min() + 1e-9

    def test_too_few(self):
        with pytest.raises(ValueError, match='at least two'):
            akima_optimum([0.001], [1.0])


def test_difference_is_welchs():
    rng = np.random.default_rng(1)
    a, b = rng.normal(5.1, 0.1, 3), rng.normal(5, 0.4, 4)
    d, h = difference(list(a), list(b))
    u, v = a.var(ddof=1) / 3, b.var(ddof=1) / 4
    freedom = (u + v) ** 2 / (u ** 2 / 2 + v ** 2 / 3)
    assert d == pytest.approx(a.mean() - b.mean()) and h == pytest.approx(student.ppf(0.975, freedom) * (u + v) ** 0.5)
    assert difference([5.0], [4.0]) == (1, math.inf) and difference([5.0, 5.2], [4.0])[1] == math.inf


@pytest.mark.parametrize(('kind', 'd', 'h', 'said'), [
    ('better', -0.03, 0.01, 'holds'), ('better', 0.03, 0.01, 'does not hold at this scale'),
    ('better', -0.03, 0.04, 'within noise'), ('worse', 0.03, 0.01, 'holds'),
    ('worse', -0.03, 0.01, 'does not hold at this scale'),
    ('no better', 0.03, 0.01, 'holds'), ('no better', -0.03, 0.01, 'does not hold at this scale'),
    ('no better', 0.0, 0.02, 'within noise'), ('no better', 0.0, 0.005, 'holds'),
    ('close', 0.01, 0.005, 'holds'), ('close', -0.2, 0.1, 'holds'),
    ('close', 0.05, 0.01, 'does not hold at this scale'), ('alike', 0.0, 0.01, 'holds'),
    ('alike', -0.05, 0.01, 'does not hold at this scale'), ('alike', 0.01, 0.02, 'within noise'),
    ('better', -0.03, math.inf, 'within noise')])
def test_verdicts(kind, d, h, said):
    assert verdict(kind, d, h) == said


@pytest.mark.parametrize(('curves', 'said'), [
    ({'a': (4, 3, 2, 1), 'b': (4, 3, 2, 1)}, 'on 2, 2, 2 of 2 kernels | | holds in part |'),
    ({'a': (4, 3, 2, 1), 'b': (4, 3, 2, 5)}, 'on 2, 2, 1 of 2 kernels | | holds |'),
    ({'a': (4, 5, 2, 1)}, 'on 0, 1, 1 of 1 kernels | | does not hold |')])
def test_recursion_on_gp(curves, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reproduce.recursion_on_gp(2).endswith('| | | not run: python synthetic_gp.py |')
    os.makedirs('results/gp')
    rows = [f'CEM-T{2 ** n},{kernel},{rmse}' for kernel, curve in curves.items() for n, rmse in enumerate(curve)]
    (tmp_path / 'results/gp/table.csv').write_text('\n'.join(['model,kernel,train_rmse', *rows]))
    assert reproduce.recursion_on_gp(2).endswith(said)


def test_finished_runs_are_skipped_and_failed_ones_named(here, monkeypatch, capsys):
    nano = {'nano': SCALES['mini'].sizes['nano']}
    scale, done = replace(SCALES['mini'], sizes=nano, seeds=(1, 2)), []

    def do_run(options, seed, scale):
        done.append((options, seed))
        if 'attn=cem' in options:
            return 'the disk is on fire'
        os.makedirs(folder(options, seed))
        result = {'test_perplexity': 5.0 + seed, 'val_perplexity': 5.0, 'parameters': 10, 'tokens': 100}
        train, model = map(asdict, reproduce.configs(options))
        for name, content in (('result', result), ('config', {'train': train, 'model': model})):
            with open(os.path.join(folder(options, seed), name + '.json'), 'w', encoding='utf-8') as file:
                json.dump(content, file)
        return None
    monkeypatch.setattr(reproduce, 'do_run', do_run)
    monkeypatch.setattr(reproduce, 'prepare_builtin', lambda folder: None)
    assert reproduce.run_missing(['fig_attn'], scale, jobs=1) == 2
    assert len(done) == 6  # the rest went on
    printed = capsys.readouterr().out
    assert printed.count('FAILED: the disk is on fire') == 2 and 'test perplexity 6.000' in printed
    done.clear()
    reproduce.run_missing(['fig_attn'], scale, jobs=1)
    assert len(done) == 2 and all('attn=cem' in options for options, _ in done)  # Llama's were finished
    reproduce.write('fig_attn', scale)
    assert '| Llama | 10 | 100 | 6.500 ± 0.707 | +0.0% | 2 |' in (here / 'results/mini/fig_attn.md').read_text()
    reproduce.claims(scale)  # nearly nothing is finished
    assert 'not run' in (here / 'results/mini/claims.md').read_text()

    (config,) = here.glob('out/reproduce/*attn=llama_mlp=llama_attn_steps=1_mlp_steps=1_seed=1/config.json')
    config.write_text(config.read_text().replace('"learning_rate": 0.016', '"learning_rate": 0.001'))
    with pytest.raises(SystemExit, match='another learning_rate: remove it'):
        reproduce.run_missing(['fig_attn'], scale, jobs=1)
    (config.parent / 'result.json').unlink()  # a cut-off run is not taken on with other settings either
    with pytest.raises(SystemExit, match='another learning_rate: remove it'):
        reproduce.run_missing(['fig_attn'], scale, jobs=1)


@pytest.mark.parametrize('bad', ['fig_none', '--seeds=', '--jobs=0', '--sizes=86m', '--scale=huge', 'fig_heads --scale=paper'])
def test_bad_options(bad, here):
    with pytest.raises(SystemExit) as error:
        reproduce.main(['fig_attn', *bad.split()])
    assert error.value.code not in (0, None) and '\n' not in str(error.value)


def test_plan(here, capsys):
    reproduce.main(['fig_attn', 'fig_energy', '--scale=paper', '--sizes=86m'])
    printed = capsys.readouterr().out.splitlines()
    commands = [line for line in printed if line.startswith('torchrun --nproc_per_node=8 train.py --size=86m')]
    assert len(commands) == 4
    expected = sum(cost(run.options).flops for name in ('fig_attn', 'fig_energy')
                   for run in runs_of(name, replace(SCALES['paper'], sizes={'86m': SCALES['paper'].sizes['86m']})))
    (total,) = [line for line in printed if line.startswith('| all |')]
    assert f'| {expected:.2e} | {expected / 0.4 / 312e12 / 3600:,.0f} |' in total


def test_a_figure_from_nothing(here, monkeypatch):
    """Three tiny runs, their energies, picture and tables; the second time nothing is trained and the files are the same."""
    tiny = 'config/ladder.py --size=nano --tokens=8K --batch_size=8 --micro_batch_size=8 --eval_tokens=1K --test_tokens=1K'
    monkeypatch.setitem(SCALES, 'mini', replace(SCALES['mini'], sizes={'nano': tiny}))
    argv = ['fig_test_T', 'fig_energy', 'fig_curves', '--seeds=1', '--jobs=2']
    reproduce.main(argv)
    files = {path.name: path.read_bytes() for path in (here / 'results/mini').iterdir()}
    assert set(files) == {f'{name}.{ending}' for name in argv[:3] for ending in ('png', 'csv', 'md')}
    monkeypatch.setattr(reproduce, 'do_run', lambda *run: pytest.fail('trained again'))
    reproduce.main(argv)
    assert {path.name: path.read_bytes() for path in (here / 'results/mini').iterdir()} == files

    out_dir = folder(canonical(f'{tiny} {reproduce.cem(2)}'), 1)
    inside = reproduce.look_inside(out_dir)
    state = last_checkpoint(out_dir)
    model = Transformer(ModelConfig(**state['model_config']))
    model.load_state_dict(state['model'])
    data = Pieces(state['data_dir'], 'test', model.cfg.context_length)
    x, y = data.batch(np.linspace(0, len(data), 64, endpoint=False).astype(int))
    for T in (1, 2, 5):
        model.set_steps(T, T)
        with torch.no_grad():
            assert math.log(inside['perplexity'][T - 1]) == pytest.approx(float(model(x, y)[1]), rel=1e-5)
    assert np.array(inside['attn']).shape == np.array(inside['mlp']).shape == (2, 9)
    assert all(energies[1] < energies[0] for energies in inside['mlp'])  # the first step goes down

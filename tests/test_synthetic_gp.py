"""synthetic_gp.py: kernels, draws, the models and their batched training, and what a user meets. Seeds stand in the tests."""
import csv
import filecmp
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from glob import glob

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern, RationalQuadratic

import synthetic_gp as gp
from synthetic_gp import KERNELS, PAPER, PAPER_SIZES, Data, Options

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
TINY = dict(repeats=3, points=60, test_points=20, batch_size=20, steps=8, device='cpu')


def cube(seed: int, n: int) -> torch.Tensor:
    return torch.rand(n, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def doubled(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in w.items()}


# Kernels and draws

@pytest.mark.parametrize('ours, theirs', [
    (lambda a, b: gp.rbf(a, b, 1.7), RBF(1.7)),
    (lambda a, b: gp.matern(a, b, 1.7, nu=0.5), Matern(1.7, nu=0.5)),
    (lambda a, b: gp.matern(a, b, 1.7, nu=1.5), Matern(1.7, nu=1.5)),
    (lambda a, b: gp.matern(a, b, 1.7, nu=2.5), Matern(1.7, nu=2.5)),
    (lambda a, b: gp.rational_quadratic(a, b, 1.7, alpha=0.6), RationalQuadratic(1.7, alpha=0.6)),
])
def test_kernels_are_scikit_learns(ours, theirs):
    a, b = cube(0, 40), cube(1, 30)
    np.testing.assert_allclose(ours(a, b).numpy(), theirs(a.numpy(), b.numpy()), atol=1e-7)


def test_periodic_is_the_product_of_scikit_learns_over_dimensions():
    a, b = cube(0, 40), cube(1, 30)
    theirs = np.prod([ExpSineSquared(4.0, periodicity=1.3)(a.numpy()[:, [d]], b.numpy()[:, [d]]) for d in range(10)], axis=0)
    np.testing.assert_allclose(gp.periodic(a, b, 4.0, period=1.3).numpy(), theirs, atol=1e-12)


def test_gibbs_is_its_formula_dimension_by_dimension():
    a, b = cube(0, 6), cube(1, 5)
    for (i, x), (j, y) in [((i, x), (j, y)) for i, x in enumerate(a.tolist()) for j, y in enumerate(b.tolist())]:
        lx, ly, value = 3 * np.exp(0.7 * x[0]), 3 * np.exp(0.7 * y[0]), 1.0
        for p, q in zip(x, y, strict=True):
            value *= np.sqrt(2 * lx * ly / (lx ** 2 + ly ** 2)) * np.exp(-(p - q) ** 2 / (lx ** 2 + ly ** 2))
        assert gp.gibbs(a, b, 3.0, slope=0.7)[i, j].item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(gp.gibbs(a, b, 3.0, slope=0.0), gp.rbf(a, b, 3.0))  # one lengthscale everywhere


@pytest.mark.parametrize('k', KERNELS)
@pytest.mark.parametrize('lengthscale', [0.5, None])
def test_kernels_are_positive_definite(k, lengthscale):
    x = cube(2, 300)
    K = KERNELS[k].function(x, x, lengthscale or KERNELS[k].lengthscale, *KERNELS[k].shape)
    torch.testing.assert_close(K.diagonal(), torch.ones(300, dtype=torch.float64), atol=1e-7, rtol=0)
    torch.testing.assert_close(K, K.T)
    assert torch.linalg.eigvalsh(K).min() > -1e-9


def test_the_sine_of_the_whole_distance_is_not_positive_definite():
    """Why Periodic is a product; and the check above can fail."""
    assert np.linalg.eigvalsh(ExpSineSquared(0.5, periodicity=2.0)(cube(2, 300).numpy())).min() < -0.1


@pytest.mark.parametrize('k', KERNELS)
def test_draws_have_the_kernels_covariance(k):
    """Along the six strongest eigenvectors of its own kernel matrix a draw is six independent N(0, 1), times sqrt(eigenvalue).
    1000 draws, seed 3: an entry of their sample covariance has standard error 0.032, on the diagonal 0.045."""
    R, o = 1000, Options(**TINY | dict(points=25, test_points=15, batch_size=5, seed=3))
    data = gp.draw(o, KERNELS[k], range(R))
    x, y = torch.cat([data.x, data.x_test], dim=1).double(), torch.cat([data.y, data.y_test], dim=1).double()
    assert x.abs().max() <= 1 and x.mean().abs() < 0.01 and abs(x.std() - 3 ** -0.5) < 0.01
    for wrong, scale in ((False, 1.0), (True, 0.7)):
        K = torch.stack([KERNELS[k].function(a, a, scale * KERNELS[k].lengthscale, *KERNELS[k].shape) for a in x])
        values, vectors = torch.linalg.eigh(K)
        white = (vectors[:, :, -6:].mT @ y)[:, :, 0] / values[:, -6:].sqrt()  # (R, 6)
        off = (white.T @ white / R - torch.eye(6)).abs().max()
        assert off > 0.25 if wrong else off < 0.2


def test_a_repeat_is_the_same_alone_and_for_every_kernel():
    o = Options(**TINY)
    three, alone = gp.draw(o, KERNELS['rbf'], range(3)), gp.draw(o, KERNELS['rbf'], [2])
    for part, of in zip(alone, three, strict=True):
        assert torch.equal(part[0], of[2]) and not torch.equal(of[0], of[1])
    assert torch.equal(gp.draw(o, KERNELS['matern'], [2]).x, alone.x)
    assert not torch.equal(gp.draw(replace(o, seed=1), KERNELS['rbf'], [2]).x, alone.x)


# Models and training

def test_the_twelve_sizes():
    exact = {'Plain': (33_985, 6_758_400), 'Gated': (33_941, 6_732_800), 'CEM-T1': (22_657, 6_732_800),
             'CEM-T2': (22_657, 11_084_800), 'CEM-T4': (22_657, 19_788_800), 'CEM-T8': (22_657, 37_196_800)}
    o = Options(device='cpu')
    assert {m: gp.sizes(o, m) for m in o.models} == exact
    assert {m: gp.sizes_text(o, m) for m in o.models} == PAPER_SIZES


def phi(z: torch.Tensor) -> torch.Tensor:
    """The integral of SiLU from 0 to z by quadrature, so that its derivative is not SiLU by construction."""
    s, weights = np.polynomial.legendre.leggauss(200)
    s, weights = torch.from_numpy((s + 1) / 2), torch.from_numpy(weights / 2)
    return z * (weights * F.silu(z[..., None] * s)).sum(-1)


@pytest.mark.parametrize('options', [{}, dict(precond='diag'), dict(precond='diag_lowrank'), dict(norm=True),
                                     dict(precond='diag_lowrank', norm=True)], ids=str)
def test_recursion_is_gradient_descent_on_the_energy(options):
    """Five steps in float64, two repeats, seed 4: x <- x - P grad_u xi(u | h), u = x or its RMSNorm, P formed as a matrix."""
    torch.manual_seed(4)
    w = {name: p.detach().double() for name, p in gp.init(Options(**TINY, **options), 'CEM-T5', [0, 1]).items()}
    w = {name: p + 0.1 * torch.randn_like(p) for name, p in w.items()}
    h = torch.randn(2, 7, 64, dtype=torch.float64)
    x, P = h, torch.eye(64, dtype=torch.float64)
    if 'P_d' in w:
        P = torch.diag_embed(F.softplus(8 * w['P_d'][:, 0]))
    if 'P_U' in w:
        P = P + w['P_U'] @ w['P_V'].mT + w['P_V'] @ w['P_U'].mT
    for _ in range(5):
        u = x.detach()
        if 'rms_gain' in w:
            u = u / (u.square().mean(-1, keepdim=True) + torch.finfo(u.dtype).eps).sqrt() * w['rms_gain']
        u.requires_grad_()
        energy = -((h @ w['W'].mT) * phi(u @ w['V'].mT)).sum()
        x = x - torch.autograd.grad(energy, u)[0] @ P
    torch.testing.assert_close(gp.recursion(w, h, 5), x, atol=1e-9, rtol=1e-9)


def test_switches_start_where_they_change_nothing_but_the_diagonal():
    """The low-rank part of P starts at zero and softplus(1) scales the update: three steps of P = softplus(1) I."""
    o, h = Options(**TINY), torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(5))
    plain = gp.init(o, 'CEM-T1', [0])
    lowrank = gp.init(replace(o, precond='diag_lowrank'), 'CEM-T1', [0])
    step, preconditioned = gp.recursion(plain, h, 1) - h, gp.recursion(lowrank, h, 1) - h
    torch.testing.assert_close(preconditioned, step * F.softplus(torch.tensor(1.0)))
    assert lowrank['P_U'].std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize('model, options', [('Plain', {}), ('Gated', {}), ('CEM-T1', {}), ('CEM-T4', {}),
                                            ('CEM-T2', dict(precond='diag_lowrank', norm=True)),
                                            ('CEM-T4', dict(recipe='torch')), ('Gated', dict(init='n02'))], ids=str)
def test_batched_training_is_one_by_one_training(model, options):
    """25 steps over three epochs and a bit: all weights of three repeats, in float64 to rounding, in float32 nearly."""
    o, T = Options(**TINY | options | dict(steps=25, points=160)), gp.trained_steps(model)
    data = gp.draw(o, KERNELS['rbf'], range(3))
    for convert, tolerance in ((doubled, 1e-11), (lambda w: w, 2e-3)):
        cast = Data(*(part.double() for part in data)) if convert is doubled else data
        together = convert(gp.init(o, model, range(3)))
        start = {name: p.detach().clone() for name, p in together.items()}
        gp.train(o, together, T, cast, range(3))
        assert all((together[name] - p).abs().max() > 1e-4 for name, p in start.items())  # every weight learns
        for r in range(3):
            alone = convert(gp.init(o, model, [r]))
            gp.train(o, alone, T, Data(*(part[[r]] for part in cast)), [r])
            for name, p in alone.items():
                torch.testing.assert_close(together[name][r], p[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize('model', ['Plain', 'Gated', 'CEM-T2'])
def test_training_learns(model):
    o = Options(**TINY | dict(points=500, batch_size=100, steps=300, repeats=2))
    data, w = gp.draw(o, KERNELS['rbf'], range(2)), gp.init(o, model, range(2))
    gp.train(o, w, gp.trained_steps(model), data, range(2))
    assert all(e < 0.25 * y.std() for e, y in zip(gp.rmse(w, data.x_test, data.y_test, 2), data.y_test, strict=True))


# Table and calibration

def test_findings_of_the_papers_own_table():
    lines = '\n'.join(gp.findings(Options(device='cpu'), PAPER))
    assert len(PAPER) == 30
    for text in ('12 of 12', 'CEM-T1 at or below Gated in train RMSE: 5 of 5', 'CEM-T2 below CEM-T1 in train RMSE: 5 of 5',
                 'not at Plain: 5 of 5', 'RBF 27% (paper 27%)', "of the paper's std: 25 of 25; within two: 25."):
        assert text in lines


def test_rows_far_from_the_paper_are_named():
    far = PAPER | {('rbf', 'CEM-T2'): (0.0074 + 2.5 * 0.0008, 0, 0.0092, 0), ('matern', 'Gated'): (0.1903, 0, float('nan'), 0),
                   ('periodic', 'Gated'): (0.0386, 0, 0.0445 - 1.5 * 0.0043, 0)}
    assert "std: 22 of 25; within two: 23 (not RBF CEM-T2, Matern Gated)." in gp.findings(Options(device='cpu'), far)[-1]


def test_schedules_of_both_recipes():
    paper, torchs = Options(steps=100), Options(steps=100, recipe='torch')
    assert [gp.learning_rate(paper, step) for step in (0, 4, 5)] == pytest.approx([4e-4, 2e-3, 2e-3])
    assert gp.learning_rate(paper, 99) == pytest.approx(2e-4, rel=0.01)
    assert gp.learning_rate(torchs, 0) == 2e-3 and gp.learning_rate(torchs, 50) == pytest.approx(1e-3)


def test_the_gradient_of_a_repeat_is_clipped_to_norm_one(monkeypatch):
    o, norms = Options(**TINY), []
    data = gp.draw(o, KERNELS['rbf'], range(3))
    data = data._replace(y=1000 * data.y)
    w = gp.init(o, 'Plain', range(3))
    monkeypatch.setattr(torch.optim.AdamW, 'step', lambda self: norms.append(
        sum(p.grad.square().sum(dim=(1, 2)) for p in w.values()).sqrt()))
    gp.train(o, w, 1, data, range(3))
    torch.testing.assert_close(torch.stack(norms), torch.ones(8, 3))


@pytest.mark.parametrize('k', KERNELS)
def test_calibration_finds_the_lengthscale_and_the_misfit(monkeypatch, k):
    """On a made-up law, RMSE = 1.1 x the paper's at the middle lengthscale, falling as its power 1.5; test 5% more."""
    shape, middle = next(iter(gp.SHAPES[k].items()))
    train, _, test, _ = PAPER[k, 'Plain']

    def draw(o, kernel, repeats):
        assert kernel.shape == shape
        like = torch.full((len(repeats), 1, 1), kernel.lengthscale / middle)
        return Data(train * like ** -1.5, like, 1.05 * test * like ** -1.5, like)
    monkeypatch.setattr(gp, 'draw', draw)
    monkeypatch.setattr(gp, 'train', lambda *args: None)
    monkeypatch.setattr(gp, 'rmse', lambda w, x, y, T: (1.1 * x[:, 0, 0]).tolist())
    found = gp.match(Options(device='cpu', repeats=2), k, shape, {})
    assert found['misfit'] == pytest.approx(math.log(1.05), rel=1e-4)
    assert found['lengthscale'] == pytest.approx(middle * (1.1 * 1.05 ** 0.5) ** (1 / 1.5), rel=0.01)
    assert found['train'] * found['test'] == pytest.approx(train * test, rel=1e-4)


def test_calibration_takes_the_first_of_the_best(monkeypatch, tmp_path, capsys):
    """Protocols 3 and 5 are tied, 3 is taken; of the shapes the last but for RBF, which has one."""
    def match(o, k, shape, draws):
        i = gp.PROTOCOLS.index({name: getattr(o, name) for name in gp.PROTOCOLS[0]})
        last = shape == [*gp.SHAPES[k]][-1] and shape != ()
        misfit = -0.001 if last else {3: 0.105, 5: -0.1}.get(i, 0.2)
        return dict(kernel=k, shape=' '.join(map(str, shape)), lengthscale=1.0, train=0.1, test=0.1, misfit=misfit, chosen='')
    monkeypatch.setattr(gp, 'match', match)
    gp.calibrate(Options(device='cpu', out_dir=str(tmp_path)))
    with open(tmp_path / 'calibration.csv') as file:
        rows = list(csv.DictReader(file))
    chosen = [row for row in rows if row['chosen']]
    assert len(rows) == len(gp.PROTOCOLS) * 5 + sum(len(shapes) - 1 for shapes in gp.SHAPES.values())
    assert [row['kernel'] for row in chosen] == list(KERNELS)
    for row in chosen:
        assert row['steps'] == str(gp.PROTOCOLS[3]['steps']) and row['points'] == str(gp.PROTOCOLS[3]['points'])
        assert row['shape'] == ' '.join(map(str, [*gp.SHAPES[row['kernel']]][-1]))


def test_the_frozen_constants_are_the_recorded_calibrations():
    with open(os.path.join(os.path.dirname(gp.__file__), 'results/gp/calibration.csv')) as file:
        chosen = [row for row in csv.DictReader(file) if row['chosen']]
    assert sorted(row['kernel'] for row in chosen) == sorted(KERNELS)
    for row in chosen:
        kernel = KERNELS[row['kernel']]
        assert float(row['lengthscale']) == kernel.lengthscale and tuple(map(float, row['shape'].split())) == kernel.shape
        assert all(row[name] == str(getattr(Options, name)) for name in gp.PROTOCOLS[0])


# What a user meets

def run(monkeypatch, *args: str) -> None:
    monkeypatch.setattr(sys, 'argv', ['synthetic_gp.py', *args])
    gp.main()


@pytest.mark.parametrize('arg, says', [
    ('--kernels=rbf,linear', 'non_stationary'), ('--models=Plain,CEM', 'CEM-T1'), ('--models=CEM-T0', 'CEM-T1'),
    ('--repeats=0', 'at least 1'), ('--steps=0', 'at least 1'), ('--T_max=0', 'at least 1'), ('--seed=-1', 'at least 0'),
    ('--jobs=0', 'at least 1'), ('--init=he', 'xavier'), ('--learning_rate=fast', 'a number'),
    ('--batch_size=7000', 'points=4000'), ('--points=1M', '30,000'),
    ('--precond=full', 'diag_lowrank'), ('--device=tpu', 'cuda'), ('--repeat=3', 'repeats'), ('--kernels=', 'rbf')])
def test_bad_options_are_one_clear_line(monkeypatch, arg, says):
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, arg)
    assert says in error.value.code and '\n' not in error.value.code and arg[2:].split('=')[0] in error.value.code


@pytest.mark.parametrize('args', [('--calibrate', '--steps=30'), ('--calibrate', '--quick'), ('--benchmark', '--kernels=rbf')])
def test_options_that_a_command_sets_itself(monkeypatch, args):
    with pytest.raises(SystemExit, match='leave it out'):
        run(monkeypatch, *args)


@pytest.mark.skipif(torch.cuda.is_available(), reason='has a GPU')
def test_no_gpu_is_one_clear_line(monkeypatch):
    with pytest.raises(SystemExit, match='no GPU'):
        run(monkeypatch, '--device=cuda')


def test_out_dir_that_is_a_file_is_one_clear_line(monkeypatch, tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(SystemExit, match='file'):
        run(monkeypatch, '--quick', f'--out_dir={tmp_path}/file')


ARGS = ('--quick', '--points=60', '--test_points=20', '--batch_size=20', '--steps=4', '--T_max=2', '--kernels=rbf,periodic',
        '--device=cpu', '--jobs=1')


def test_an_interrupted_run_goes_on(monkeypatch, tmp_path, capsys):
    """Interrupted in the third of eight cells, it keeps two, trains the other six, and gives the table of an unbroken run."""
    trained, train = [], gp.train

    def interrupted(*args):
        if len(trained) == 2:
            raise KeyboardInterrupt
        train(*args)
        trained.append(1)
    monkeypatch.setattr(gp, 'train', interrupted)
    with pytest.raises(SystemExit, match='interrupted'):
        run(monkeypatch, *ARGS, f'--out_dir={tmp_path}/a')
    assert len(glob(f'{tmp_path}/a/cells/*.json')) == 2

    monkeypatch.setattr(gp, 'train', lambda *args: (train(*args), trained.append(1)))
    run(monkeypatch, *ARGS, f'--out_dir={tmp_path}/a')
    assert len(trained) == 8
    run(monkeypatch, *ARGS, f'--out_dir={tmp_path}/a')
    assert len(trained) == 8
    run(monkeypatch, *ARGS, '--seed=1', f'--out_dir={tmp_path}/a')  # another seed: nothing to reuse
    assert len(trained) == 16
    run(monkeypatch, *ARGS, f'--out_dir={tmp_path}/b')
    run(monkeypatch, *ARGS, f'--out_dir={tmp_path}/a')
    assert not glob(f'{tmp_path}/**/*.tmp', recursive=True)
    for name in ('table.csv', 'table.md'):
        with open(tmp_path / 'a' / name) as a, open(tmp_path / 'b' / name) as b:
            assert a.read() == b.read()


@pytest.mark.slow  # it races the clock: not on a machine that other work fills
def test_no_process_outlives_the_program(monkeypatch, tmp_path):
    """Two processes train. kill -9 reaches the parent alone, Ctrl-C all three; what is finished stays, and the third run ends
    in the table of a single process."""
    options, kept = [*ARGS[:-1], '--steps=120', '--T_max=8'], 0
    command = [sys.executable, gp.__file__, *options, f'--out_dir={tmp_path}/a']
    for how in (signal.SIGKILL, signal.SIGINT):
        program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.monotonic() + 60
        while len(glob(f'{tmp_path}/a/cells/*.json')) == kept and time.monotonic() < deadline:
            time.sleep(0.02)
        program.kill() if how == signal.SIGKILL else os.killpg(program.pid, how)
        errors = program.communicate(timeout=30)[1]
        assert program.returncode == (1 if how == signal.SIGINT else -how)
        assert 'Traceback' not in errors and ('the same command goes on' in errors) == (how == signal.SIGINT)
        with pytest.raises(ProcessLookupError):
            for _ in range(100):
                os.killpg(program.pid, 0)  # is anyone left?
                time.sleep(0.05)
        before, kept = kept, len(glob(f'{tmp_path}/a/cells/*.json'))
        assert before < kept < 12
    last = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert last.returncode == 0 and f'{kept} of 12 cells found' in last.stderr
    run(monkeypatch, *options, '--jobs=1', f'--out_dir={tmp_path}/b')
    assert filecmp.cmp(tmp_path / 'a' / 'table.csv', tmp_path / 'b' / 'table.csv', shallow=False)


def test_a_cell_is_reused_only_where_its_numbers_are_the_same():
    o, rbf = Options(), KERNELS['rbf']
    changes = dict(repeats=6, seed=1, points=300, test_points=10, batch_size=20, steps=3, learning_rate=1e-3, recipe='torch',
                   init='n02', precond='diag', norm=True)
    paths = [gp.cell_path(o, rbf, 'CEM-T2'), gp.cell_path(o, rbf, 'CEM-T4'), gp.cell_path(o, KERNELS['matern'], 'CEM-T2'),
             gp.cell_path(o, rbf._replace(lengthscale=2.0), 'CEM-T2'), gp.cell_path(o, rbf._replace(shape=(2.0,)), 'CEM-T2'),
             *(gp.cell_path(replace(o, **{name: value}), rbf, 'CEM-T2') for name, value in changes.items())]
    assert len(set(paths)) == len(paths) == 16
    assert gp.cell_path(replace(o, T_max=16, models=('Plain',), kernels=('rbf',)), rbf, 'CEM-T2') == paths[0]


def test_what_a_run_leaves(monkeypatch, tmp_path, capsys):
    run(monkeypatch, *ARGS, '--T_max=3', '--kernels=matern', '--precond=diag_lowrank', '--norm', f'--out_dir={tmp_path}')
    assert sorted(os.listdir(tmp_path)) == ['cells', 'figure.png', 'table.csv', 'table.md', 'test_steps.png']
    with open(tmp_path / 'table.csv') as file:
        rows = list(csv.DictReader(file))
    assert [row['model'] for row in rows] == ['Plain', 'Gated', 'CEM-T1', 'CEM-T2', 'CEM-T3']
    assert [row['paper_test_rmse'] for row in rows[3:]] == ['0.2166', '']  # the paper has no T = 3
    assert '--quick' in capsys.readouterr().out
    with open(glob(f'{tmp_path}/cells/*CEM-T3*')[0]) as file:
        cell = json.load(file)
    assert len(cell['test_steps']) == 16 and cell['test_steps'][2] == cell['test'] != cell['test_steps'][3]


def test_benchmark_runs(monkeypatch, tmp_path, capsys):
    run(monkeypatch, *(a for a in ARGS if not a.startswith(('--steps', '--kernels'))), '--benchmark', f'--out_dir={tmp_path}')
    assert 'x faster' in capsys.readouterr().out.splitlines()[-2]

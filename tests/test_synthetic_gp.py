"""synthetic_gp.py: kernels, samples, models, batched training, and the tables that it writes."""
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern, RationalQuadratic

import synthetic_gp as gp
from energy import phi
from nanocem.files import read_csv as table
from running import wait_for
from synthetic_gp import KERNELS, PROTOCOLS, GPConfig

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
RESULTS = Path(gp.__file__).parent / 'results/gp'
TINY = dict(repeats=3, points=60, test_points=20, batch_size=20, steps=8)


def cube(seed: int, n: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, 10, generator=g, dtype=torch.float64) * 2 - 1


def sampled(cfg: GPConfig, k: str, repeats: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = gp.sample_gp(cfg, k, repeats)
    return torch.from_numpy(x), torch.from_numpy(y)


def doubled(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in w.items()}


def periodic_by_dimension(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    one = ExpSineSquared(4.0, periodicity=1.3)
    return np.prod([one(a[:, [d]], b[:, [d]]) for d in range(10)], axis=0)


@pytest.mark.parametrize('ours, theirs', [
    (partial(gp.matern, lengthscale=1.7), RBF(1.7)),
    (partial(gp.matern, lengthscale=1.7, nu=0.5), Matern(1.7, nu=0.5)),
    (partial(gp.matern, lengthscale=1.7, nu=1.5), Matern(1.7, nu=1.5)),
    (partial(gp.rational_quadratic, lengthscale=1.7, alpha=0.6), RationalQuadratic(1.7, alpha=0.6)),
    (partial(gp.periodic, lengthscale=4.0, period=1.3), periodic_by_dimension)])
def test_kernels_are_scikit_learns(ours: Callable, theirs: Callable) -> None:
    a, b = cube(0, 40), cube(1, 30)
    np.testing.assert_allclose(ours(a, b).numpy(), theirs(a.numpy(), b.numpy()), atol=1e-7)


@pytest.mark.parametrize('nu', [0.5, 1.5, math.inf])
def test_non_stationary_is_its_formula_point_by_point(nu):
    """Two Gaussians' overlap, one as wide as l(x), one as l(y), times scikit-learn's Matern at the
    root of their mean variance. At nu = inf this is Gibbs's kernel."""
    a, b = cube(0, 6), cube(1, 5)
    ours = gp.non_stationary(a, b, 3.0, slope=0.7, nu=nu)
    for i, x in enumerate(a.numpy()):
        for j, y in enumerate(b.numpy()):
            lx, ly = 3 * np.exp(0.7 * x[0]), 3 * np.exp(0.7 * y[0])
            s = (lx ** 2 + ly ** 2) / 2
            theirs = (lx * ly / s) ** 5 * Matern(math.sqrt(s), nu=nu)(x[None], y[None])[0, 0]
            assert ours[i, j].item() == pytest.approx(theirs, rel=1e-12)
    one_lengthscale = gp.non_stationary(a, b, 3.0, slope=0.0, nu=nu)
    torch.testing.assert_close(one_lengthscale, gp.matern(a, b, 3.0, nu))


@pytest.mark.parametrize('protocol', PROTOCOLS)
@pytest.mark.parametrize('k', KERNELS)
def test_samples_have_the_kernels_covariance(k: str, protocol: str) -> None:
    """Along the six strongest eigenvectors of its kernel matrix a sample is sqrt(eigenvalue) times
    six independent N(0, 1). An entry of the covariance of 1000 samples (seed 3) has a standard
    error of 0.032, on the diagonal 0.045. A wrong lengthscale is found."""
    R = 1000
    cfg = GPConfig(protocol, points=25, test_points=15, batch_size=5, seed=3)
    x, y = (part.double() for part in sampled(cfg, k, range(R)))
    assert x.abs().max() <= 1 and x.mean().abs() < 0.01 and abs(x.std() - 3 ** -0.5) < 0.01
    _, function = KERNELS[k]
    lengthscale, *shape = PROTOCOLS[protocol].parameters[k]
    for wrong, scale in ((False, 1.0), (True, 0.7)):
        K = torch.stack([function(a, a, scale * lengthscale, *shape) for a in x])
        values, vectors = torch.linalg.eigh(K)
        white = (vectors[:, :, -6:].mT @ y)[:, :, 0] / values[:, -6:].sqrt()  # (R, 6)
        off = (white.T @ white / R - torch.eye(6)).abs().max()
        assert off > 0.25 if wrong else off < 0.2


def test_the_twelve_sizes():
    """As the paper prints them."""
    paper = table(RESULTS / 'paper.csv')
    assert len(paper) == 30
    for row in paper:
        parameters, flops = gp.sizes(row['model'])
        printed = f'{parameters / 1e3:.2f}K', f'{flops / 1e6:.2f}M'
        assert printed == (row['parameters'], row['flops'])


def test_recursion_is_gradient_descent_on_the_energy() -> None:
    """x <- x - grad_x xi(x | h), five steps in float64."""
    torch.manual_seed(4)
    w = doubled(gp.init(GPConfig(**TINY), 'CEM-T5', [0, 1]))
    h = torch.randn(2, 7, 64, dtype=torch.float64)
    x = h
    for _ in range(5):
        u = x.detach().requires_grad_()
        energy = -((h @ w['W'].mT) * phi(u @ w['V'].mT)).sum()
        x = x - torch.autograd.grad(energy, u)[0]
    torch.testing.assert_close(gp.recursion(w, h, 5), x, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize('model, update', [
    ('Plain', lambda h, w: F.silu(h @ w['fc'].mT + w['fc_bias']) @ w['proj'].mT + w['proj_bias']),
    ('Gated', lambda h, w: (F.silu(h @ w['gate'].mT + w['gate_bias'])
                            * (h @ w['up'].mT + w['up_bias'])) @ w['down'].mT + w['down_bias']),
    ('CEM-T2', lambda h, w: gp.recursion(w, h, 2) - h)])
def test_updates_are_added_to_the_normed_h(model, update):
    """In float64 with a head that is the identity on the first coordinate."""
    w = doubled(gp.init(GPConfig(**TINY), model, [0]))
    w['out'] = torch.eye(64, dtype=torch.float64)[None, :1]
    w['out_bias'] = torch.zeros(1, 1, 1, dtype=torch.float64)
    x = cube(0, 5)[None]
    h = F.layer_norm(x @ w['in'].mT + w['in_bias'], (64,))
    torch.testing.assert_close(gp.forward(w, x, 2), (h + update(h, w))[..., :1])


@pytest.mark.parametrize('protocol, model, name, std', [
    ('inferred', 'CEM-T1', 'W', 1 / 8), ('inferred', 'CEM-T1', 'V', 1 / 8),
    ('inferred', 'Gated', 'gate', 1 / math.sqrt(3 * 64)),
    ('inferred', 'Gated', 'gate_bias', 1 / math.sqrt(3 * 64)),
    ('blind', 'CEM-T1', 'V', 1 / math.sqrt(3 * 64))])
def test_initial_weights_have_their_spread(protocol: str, model: str, name: str,
                                           std: float) -> None:
    w = gp.init(GPConfig(protocol, **TINY), model, range(3))
    assert ('W_bias' in w, 'V_bias' in w) == (False, False)
    if name.endswith('V'):  # uniform in the blind protocol: within sqrt(3) of its deviation
        assert (w[name].abs().max() < 1.75 * std) == (protocol == 'blind')
    assert w[name].std().item() == pytest.approx(std, rel=0.08 if 'bias' in name else 0.03)


def test_the_best_epoch_is_found_for_each_repeat():
    """A learning rate that ruins a repeat now and then. The best weights are those after the epoch
    that was best on the test points, found here by training for one epoch, two, three, ..."""
    cfg = GPConfig(**TINY | dict(learning_rate=0.05, steps=42))
    (x, y), ends = sampled(cfg, 'rbf', range(3)), []

    def trained(**changes: Any) -> dict[str, torch.Tensor]:
        return gp.train(replace(cfg, **changes), gp.init(cfg, 'Plain', range(3)), 1, x, y, range(3))

    for steps in range(3, cfg.steps + 1, 3):
        w = trained(steps=steps, checkpoint='last')
        ends.append((gp.rmse(w, x[:, 60:], y[:, 60:], 1), w))
    best = trained()
    at = [min(range(len(ends)), key=lambda i: ends[i][0][r]) for r in range(3)]
    # the test can tell repeats and epochs apart
    assert len(set(at)) > 1 and min(at) < len(ends) - 1
    for r, i in enumerate(at):
        torch.testing.assert_close(best['fc'][r], ends[i][1]['fc'][r])


def test_the_gradient_of_a_repeat_is_clipped_to_norm_one(monkeypatch):
    cfg, norms = GPConfig(**TINY), []
    x, y = sampled(cfg, 'rbf', range(3))
    w = gp.init(cfg, 'Plain', range(3))
    monkeypatch.setattr(torch.optim.AdamW, 'step', lambda self: norms.append(
        sum(p.grad.square().sum(dim=(1, 2)) for p in w.values()).sqrt()))
    gp.train(cfg, w, 1, x, 1000 * y, range(3))
    torch.testing.assert_close(torch.stack(norms), torch.ones(8, 3))


@pytest.mark.slow
def test_the_table_is_what_the_models_have_after_training(
        tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each number against training here, one repeat at a time."""
    options = dict(repeats=2, points=60, test_points=20, batch_size=20, steps=9)
    gp.main([f'--{name}={value}' for name, value in options.items()]
            + ['--kernels=rbf,periodic', '--models=Plain,CEM-T2', f'--out_dir={tmp_path}'])
    cfg = GPConfig(**options)
    name = '_'.join(f'{name}={value}' for name, value in options.items())
    name += '_kernels=rbf-periodic_models=Plain-CEM-T2'
    assert (tmp_path / f'table_{name}.md').read_text() in capsys.readouterr().out
    assert (tmp_path / f'figure_{name}.png').stat().st_size > 10_000
    rows = table(tmp_path / f'table_{name}.csv')
    assert len(rows) == 4
    for row in rows:
        k = {title: k for k, (title, *_) in KERNELS.items()}[row['kernel']]
        T, errors = gp.STEPS[row['model']], []
        for r in range(2):
            x, y = sampled(cfg, k, [r])
            w = gp.train(cfg, gp.init(cfg, row['model'], [r]), T, x, y, [r])
            errors.append([gp.rmse(w, x[:, part], y[:, part], T).item()
                           for part in (slice(60), slice(60, None))])
        mean, std = np.mean(errors, axis=0), np.std(errors, axis=0, ddof=1)
        numbers = [float(row[column]) for column in gp.COLUMNS]
        np.testing.assert_allclose(numbers, [mean[0], std[0], mean[1], std[1]], rtol=1e-3,
                                   atol=1e-5)


def test_the_rate_is_constant_or_a_warm_up_and_a_cosine() -> None:
    inferred, blind = GPConfig(), GPConfig('blind')
    assert [gp.learning_rate(inferred, step) for step in (0, 1000, 1999)] == [5e-4] * 3
    rates = [gp.learning_rate(blind, step) for step in (0, 49, 50, 525, 1000)]
    np.testing.assert_allclose(rates, [2e-3 / 50, 2e-3, 2e-3, 1.1e-3, 2e-4])


@pytest.mark.parametrize('protocol, file, within', [
    ('inferred', 'table.csv', (21, 29)), ('blind', 'blind.csv', (13, 17))])
def test_a_committed_table_is_as_near_the_paper_as_its_page_says(
        protocol: str, file: str, within: tuple[int, int], tmp_path: Path,
        capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many of 30 rows are within one and within two of the paper's std. The paper lacks
    CEM-T3."""
    kernels = {title: k for k, (title, *_) in KERNELS.items()}
    committed = table(RESULTS / file)
    results = {(kernels[row['kernel']], row['model']): [float(row[name]) for name in gp.COLUMNS]
               for row in committed} | {('rbf', 'CEM-T3'): [math.nan] * 4}
    monkeypatch.setattr(gp, 'run_table', lambda cfg: results)
    gp.main([f'--protocol={protocol}', f'--models={",".join((*gp.MODELS, "CEM-T3"))}',
             f'--out_dir={tmp_path}'])
    printed = capsys.readouterr().out
    assert printed.startswith(f'Protocol: {protocol}, ')
    assert (f"both within one of the paper's std: {within[0]} of 30 rows; within two: "
            f'{within[1]}.') in printed
    page = (RESULTS / 'README.md').read_text(encoding='utf-8').replace('*', '')
    rows_within = [line for line in page.splitlines() if line.startswith('| rows within')]
    column = 2 if protocol == 'inferred' else 3
    for line, number in zip(rows_within, reversed(within), strict=True):
        assert line.split('|')[column].split()[0] == str(number)
    # The front page says it, too, and the default is the inferred one
    assert gp.GPConfig().protocol == 'inferred'
    front = (RESULTS.parents[1] / 'README.md').read_text(encoding='utf-8')
    said = {'inferred': rf'\[{within[1]} of\s+them\]', 'blind': rf'=blind`\),\s+{within[1]}\s+do'}
    assert re.search(said[protocol], front)
    *rows, other = table(next(tmp_path.glob('table*CEM-T3.csv')))
    assert rows == committed and other['paper_train_rmse'] == ''


def test_the_table_of_many_models_has_a_name(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all 34 models it would be longer than a file system allows. Others have other names."""
    monkeypatch.setattr(gp, 'run_table', lambda cfg: {('rbf', 'Plain'): [1.0] * 4})
    for models in [*gp.STEPS], [*gp.STEPS][:-1]:
        gp.main([f'--models={",".join(models)}', f'--out_dir={tmp_path}'])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted(2 * ['.csv', '.md', '.png'])


def test_ctrl_c_ends_the_pool_at_once(tmp_path: Path) -> None:
    """It does not wait for the rows that are being trained, which take minutes."""
    def interrupt() -> None:
        wait_for(multiprocessing.active_children)
        time.sleep(4)  # begins a row
        os.kill(os.getpid(), signal.SIGINT)
    # A shell starts what it puts into the background without this handler
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    begin = time.monotonic()
    try:
        with pytest.raises(SystemExit, match='stopped'):
            gp.main(['--kernels=rbf', '--models=Plain', '--steps=900K', '--jobs=1', '--points=200',
                     '--test_points=100', f'--out_dir={tmp_path}'])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 120
    assert multiprocessing.active_children() == [] and not [*tmp_path.iterdir()]

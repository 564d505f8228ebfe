"""nanocem/gp_steps.py: what it prints is the recursion's own energy and its curvature."""
import sys

import pytest
import torch

import synthetic_gp as gp
from nanocem import gp_steps

torch.set_num_threads(1)


def one_point() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """CEM's weights in float64 and one normed h (1, 1, 64)."""
    o = gp.Options(device='cpu', init_cem='normal')
    w = {name: p.detach().double() for name, p in gp.init(o, 'CEM-T1', [0]).items()}
    g = torch.Generator().manual_seed(6)
    return w, gp_steps.hidden(w, torch.rand(1, 1, 10, generator=g, dtype=torch.float64))


def test_a_step_goes_down_the_energys_gradient():
    w, h = one_point()
    x = gp.recursion(w, h, 3).requires_grad_()
    slope, = torch.autograd.grad(gp_steps.energy_change(w, h, x).sum(), x)
    torch.testing.assert_close(gp.recursion(w, h, 4), x - slope, atol=1e-9, rtol=1e-9)
    assert gp_steps.energy_change(w, h, h).abs().max() == 0


def test_eigenvalues_are_those_of_the_energys_curvature():
    w, h = one_point()
    x = gp.recursion(w, h, 2)

    def energy(u: torch.Tensor) -> torch.Tensor:
        return gp_steps.energy_change(w, h, u[None, None]).sum()
    hessian = torch.autograd.functional.hessian(energy, x[0, 0])
    exact = torch.linalg.eigvalsh(-hessian)
    torch.testing.assert_close(gp_steps.eigenvalues(w, h, x)[0, 0], exact, atol=1e-8, rtol=1e-8)


def run(monkeypatch, *args: str) -> None:
    monkeypatch.setattr(sys, 'argv', ['gp_steps', '--quick', '--points=60', '--test_points=20',
                                      '--batch_size=20', '--steps=4', '--kernels=rbf', *args])
    gp_steps.main()


def test_a_line_for_each_step(monkeypatch, tmp_path, capsys):
    """At t = T the RMSE is the table's, and the step that is none has energy 0."""
    run(monkeypatch, '--models=Plain,CEM-T3', f'--out_dir={tmp_path}')
    lines = [line.split('|')[1:-1] for line in (tmp_path / 'steps.md').read_text().splitlines()]
    rows = [dict(zip(gp_steps.HEADER, map(str.strip, line), strict=True)) for line in lines[2:]]
    assert [row['t'] for row in rows] == list('0123456') and {row['T'] for row in rows} == {'3'}
    o = gp.Options(points=60, test_points=20, batch_size=20, steps=4, repeats=2)
    data = gp.draw(o, 'rbf', range(2))
    _, cell = gp.fit(o, 'CEM-T3', data, range(2))
    assert float(rows[3]['test RMSE']) == pytest.approx(sum(cell['test']) / 2, abs=1e-4)
    assert float(rows[0]['energy']) == 0 > float(rows[1]['energy'])


def test_switches_that_change_a_step_are_refused(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match='precond'):
        run(monkeypatch, '--norm', f'--out_dir={tmp_path}')


def test_diverged_training_is_one_clear_line(monkeypatch, tmp_path):
    """What did not diverge is written."""
    with pytest.raises(SystemExit, match='RBF CEM-T400 diverged: a learning_rate below'):
        run(monkeypatch, '--models=CEM-T400,CEM-T1', f'--out_dir={tmp_path}')
    assert len((tmp_path / 'steps.md').read_text().splitlines()) == 2 + 5


def test_lines_end_where_a_step_overflows():
    """x grows a hundredfold and more with every step: not for 2 T = 80 of them in float32."""
    o = gp.Options(points=60, test_points=20, batch_size=20, repeats=1)
    w = {name: p.detach() for name, p in gp.init(o, 'CEM-T40', [0]).items()}
    w['V'] = 100 * w['V']
    lines = gp_steps.step_by_step(o, w, 40, gp.draw(o, 'rbf', range(1)))
    assert 1 < len(lines) < 81

"""The front page's picture of a descent shows what it says."""
import sys

import torch
from PIL import Image
from running import ROOT

sys.path.insert(0, str(ROOT / 'docs'))
import draw_descent


def test_every_energy_falls_at_every_step() -> None:
    u, energy = draw_descent.descend()
    assert u.shape == (draw_descent.T + 1, draw_descent.N, 3)
    assert (energy.diff(dim=0) < 0).all()


def test_the_first_step_is_softmax_times_the_keys() -> None:
    u, _ = draw_descent.descend()
    alpha = (u[0] @ draw_descent.KEYS.T / 3 ** 0.5).softmax(dim=-1)
    step = alpha @ draw_descent.KEYS / draw_descent.T  # values are the keys
    moved = torch.nn.functional.rms_norm(u[0] + step, (3,))
    torch.testing.assert_close(u[1], moved, rtol=1e-4, atol=1e-4)  # but for the norm's epsilon
    assert (u[1] - u[0]).norm(dim=-1).max() > 0.1


def test_the_picture_is_small_and_has_a_frame_for_each_step() -> None:
    path = ROOT / 'docs/descent.gif'
    assert path.stat().st_size < 600_000
    with Image.open(path) as picture:
        assert picture.n_frames == 1 + draw_descent.T + 1  # the end, and steps 0 to T
        assert picture.size == (830, 400)

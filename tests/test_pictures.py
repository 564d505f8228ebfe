"""The pictures show what they say: the front page's descent, and the tour's planes."""
import sys

import torch
from PIL import Image

from model import CEMMLP, CEMAttention, ModelConfig
from running import ROOT

sys.path.insert(0, str(ROOT / 'docs'))
import draw_descent
import tour_plots


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


def test_the_card_has_the_size_that_others_show() -> None:
    path = ROOT / 'docs/card.png'
    assert path.stat().st_size < 150_000
    with Image.open(path) as picture:
        assert picture.size == (1200, 630)


def test_a_plane_of_the_tour_is_drawn_to_scale_with_the_layers_energy() -> None:
    torch.manual_seed(0)
    cfg = ModelConfig(d_model=12, n_layer=1, n_head=2, d_mlp=20, init_std=0.5)
    for layer in (CEMAttention(cfg), CEMMLP(cfg)):
        layer.requires_grad_(False)
        h = layer.norm(torch.randn(1, 5, 12))
        states = torch.randn(3, 12)
        path, energy = tour_plots.energy_around(layer, h, states, n=31)
        length = (states[2] - states[0]).norm()
        torch.testing.assert_close(torch.cdist(path, path) * length, torch.cdist(states, states))
        # The first and the last state are points of the grid, at -0.5 and 0.5
        for state, column in ((states[0], 10), (states[2], 20)):
            u = torch.cat([h[:, :-1], layer.norm(state)[None, None]], dim=1)
            torch.testing.assert_close(energy[15, column], layer.energy(u, h)[0, -1])

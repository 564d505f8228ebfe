"""docs/descent.html takes the steps of energy.py, and begins with those of docs/descent.gif."""
import json
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from energy import Descent
from running import ROOT

quickjs = pytest.importorskip('quickjs')
sys.path.insert(0, str(ROOT / 'docs'))
import draw_descent  # noqa: E402

PAGE = (ROOT / 'docs/descent.html').read_text(encoding='utf-8')
MATHEMATICS, REST = re.findall('<script>\n(.*?)</script>', PAGE, re.DOTALL)
KEYS = draw_descent.KEYS.double()
DRAWN = (3 ** 0.5, 1 / 12)  # tau and eta of the picture


def descend(values: str, tau: float, eta: float, T: int) -> tuple[Tensor, Tensor]:
    """Return the page's states x, (40, T + 1, 3), and their energies, (40, T + 1)."""
    page = quickjs.Context()
    page.eval(MATHEMATICS)
    paths = json.loads(page.eval(
        f'const keys = {KEYS.tolist()}, tau = {tau}, eta = {eta}, T = {T}, values = {values}; '
        'JSON.stringify(starts(40).map(x => descend(x, {keys, values, tau, eta, T})))'))
    x, energy = (torch.tensor([[step[name] for step in path] for path in paths]).double()
                 for name in ('x', 'energy'))
    return x, energy


@pytest.mark.parametrize('tau, eta', [DRAWN, (0.01, 1 / 12), (30, 0.01), (1, 20)])
def test_the_page_takes_the_steps_of_energy_py(tau: float, eta: float) -> None:
    x, energy = descend('keys', tau, eta, T=12)
    layer = Descent(D=3, T=1).double()
    layer.eta = eta
    layer.energy = lambda u, h=None: -tau * (u @ KEYS.T / tau).logsumexp(dim=-1)
    torch.testing.assert_close(energy, layer.energy(layer.norm(x)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x[:, 1:], layer(x[:, :-1]), rtol=1e-6, atol=1e-6)
    assert (energy.diff(dim=1) < 1e-9).all()


def test_turned_values_are_attention_whose_energies_rise() -> None:
    tau, eta = DRAWN
    x, energy = descend('turn(keys)', tau, eta, T=96)
    axis = F.normalize(KEYS.sum(dim=0), dim=0)
    values = torch.linalg.cross(axis[None], KEYS)  # at right angles to the keys and the axis
    alpha = (F.rms_norm(x, (3,), eps=1e-5) @ KEYS.T / tau).softmax(dim=-1)
    torch.testing.assert_close(x[:, 1:], (x + eta * alpha @ values)[:, :-1], rtol=1e-6, atol=1e-6)
    assert (energy.diff(dim=1) > 1e-3).any(dim=1).all()


def test_the_page_begins_with_the_pictures_keys_and_steps() -> None:
    keys, colors = re.search(r'const KEYS = (.*?), COLORS = (.*?);', REST).groups()
    assert json.loads(keys) == [pytest.approx(key) for key in draw_descent.KEYS.tolist()]
    assert json.loads(colors.replace("'", '"')) == list(draw_descent.COLORS)
    _, energy = descend('keys', *DRAWN, T=draw_descent.T)
    torch.testing.assert_close(energy.T, draw_descent.descend()[1].double(), rtol=1e-4, atol=1e-4)


def test_the_sliders_begin_with_the_pictures_steps() -> None:
    """And eta = 1, which a trained layer has, is a place of its slider."""
    sliders = {name: tuple(map(float, numbers)) for name, *numbers in re.findall(
        r'id="(tau|eta|T)" min="(\S+)" max="(\S+)" (?:step="0.5" )?value="(\S+)"', PAGE)}
    assert 3 ** 0.5 * 2 ** sliders['tau'][2] == DRAWN[0]
    assert 12 ** (sliders['eta'][2] / 6) == pytest.approx(DRAWN[1])
    assert sliders['eta'][0] < 0 < sliders['eta'][1]


def test_the_page_loads_nothing() -> None:
    """It links to the paper."""
    text = PAGE.replace('<a href="https://arxiv.org/abs/', '')
    assert re.findall(r'https?:|src=|@import|fetch\(|url\(', text) == []


def test_words_are_said_to_be_an_illustration() -> None:
    assert re.search(r"WORDS = \['river', 'money', 'sit'\], WORD = 'bank';", REST)
    assert 'The words are an illustration' in PAGE

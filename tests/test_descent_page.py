"""docs/descent.html takes the steps of energy.py, and begins with those of docs/descent.gif."""
import json
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from browser import javascript
from energy import Descent
from running import ROOT

sys.path.insert(0, str(ROOT / 'docs'))
import draw_descent

PAGE = (ROOT / 'docs/descent.html').read_text(encoding='utf-8')
MATHEMATICS, REST = re.findall('<script>\n(.*?)</script>', PAGE, re.DOTALL)
KEYS = draw_descent.KEYS.double()
DRAWN = (3 ** 0.5, 1 / 12)  # tau and eta of the picture


def descend(values: str, tau: float, eta: float, T: int) -> tuple[Tensor, Tensor]:
    """Return the page's states x, (40, T + 1, 3), and their energies, (40, T + 1)."""
    given = f'const keys = {KEYS.tolist()}, tau = {tau}, eta = {eta}, T = {T}, values = {values};'
    paths = javascript(f'{MATHEMATICS}\n{given}',
                       'starts(40).map(x => descend(x, {keys, values, tau, eta, T}))')
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


@pytest.mark.parametrize('name', ['descent', 'index'])
def test_the_page_loads_nothing(name: str) -> None:
    """It links to the paper. index.html shows descent.html in a frame."""
    text = (ROOT / f'docs/{name}.html').read_text('utf-8')
    text = text.replace('<a href="https://arxiv.org/abs/', '').replace('src="descent.html#', '')
    assert re.findall(r'https?:|src=|@import|fetch\(|url\(', text) == []


def test_words_are_said_to_be_an_illustration() -> None:
    words = re.search(r"WORDS = \[(.*?)\], WORD = '(.*?)';", REST)
    sentence = re.sub('<[^>]*>', '', re.search('id="sentence">(.*?)</p>', PAGE, re.DOTALL)[1])
    assert {*re.findall(r'\w+', words[1]), words[2]} < {*re.findall(r'\w+', sentence)}
    assert 'The words are an illustration' in PAGE
    assert 'placed by hand' in (ROOT / 'docs/index.html').read_text('utf-8')


def test_the_story_rolls_to_the_word_that_is_in_the_sentence() -> None:
    """With the short key of `looked`, wherever the ball rests under the other word: each small step
    goes down, and it ends nearest to the word's key."""
    looked = float(re.search('const LOOKED = (.*?);', REST)[1])
    for j in 0, 1:
        strength = torch.tensor([float(j == 0), float(j == 1), looked]).double()
        present = (KEYS * strength[:, None]).tolist()
        start = F.normalize(KEYS[1 - j], dim=0) * 3 ** 0.5
        path = torch.tensor(javascript(MATHEMATICS, f'''(() => {{
            const keys = {present}, found = [];
            let u = {start.tolist()};
            for (let n = 0; n < 90; n++) {{
                const [, step] = descend(u, {{keys, values: keys, tau: R, eta: 4 / 60, T: 1}});
                u = step.u;
                found.push([...u, step.energy]);
            }}
            return found;
        }})()''')).double()
        assert (path[:, 3].diff() < 1e-9).all()
        near = F.normalize(path[-1, :3], dim=0) @ F.normalize(KEYS, dim=1).double().T
        assert near.argmax() == j and near[j] > 0.95, near

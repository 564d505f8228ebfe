"""
Draw attention as descent: forty states go down the energy of three keys, and their energies fall.

    python docs/draw_descent.py              writes docs/descent.gif, and docs/card.png

A layer of energy.py takes T = 12 steps. It has three dimensions, where the norm puts a state u on
a sphere, and one head. Its keys are given, and the values are the keys. docs/descent.html is the
same to play with. The card is what others show beside a link to a page.
"""
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # energy.py is in the folder above
from energy import Descent

T = 12  # steps
N = 40  # states
R = 3 ** 0.5  # radius of the sphere
KEYS = torch.tensor([[2.5, 1.2, 2.9], [-2.6, 2.6, 1.7], [-0.8, -3.3, 2.1]])
COLORS = ('#ff8a80', '#ffd866', '#7ee787')  # of the keys
PAGE = '#0d1117'  # background


class Attention(Descent):
    """The energy of attention (Eq. 2) with one head, whose keys are KEYS."""
    def energy(self, u: Tensor, h: Tensor | None = None) -> Tensor:
        return -R * (u @ KEYS.T / R).logsumexp(dim=-1)  # tau = sqrt(D) = R


def descend() -> tuple[Tensor, Tensor]:
    """Return the states u after 0 to T steps, (T + 1, N, 3), and their energies, (T + 1, N)."""
    # Start on a spiral over the whole sphere
    i = torch.arange(N)
    y = 1 - (2 * i + 1) / N
    across = (1 - y ** 2).sqrt()
    x = R * torch.stack([across * (2.4 * i).cos(), y, across * (2.4 * i).sin()], dim=-1)
    # Take the steps
    layer = Attention(D=3, T=T)
    states = []
    for t in range(T + 1):
        layer.T = t
        states.append(layer.norm(layer(x)).detach())
    u = torch.stack(states)
    return u, layer.energy(u)


def draw(t: int, figure: Figure, u: Tensor, energy: Tensor) -> None:
    """Draw the sphere after t steps on the left, the energies up to there on the right."""
    layer = Attention(D=3, T=T)
    figure.clear()
    figure.text(0.52, 0.92, 'Attention takes each state downhill', fontsize=15)
    figure.text(0.52, 0.84, 'point: a state u     star: a key     dark: low energy', fontsize=11)
    sphere = figure.add_axes((0.01, 0.02, 0.463, 0.96), xlim=(-1.8, 1.8), ylim=(-1.8, 1.8))
    sphere.axis('off')
    chart = figure.add_axes((0.585, 0.15, 0.39, 0.62), xlim=(-0.5, T), xlabel='step',
                            ylabel='energy of u (no unit)', xticks=range(0, T + 1, 4))
    # Turn the sphere a little, there and back
    a = 0.5 + 0.2 * torch.tensor(2 * torch.pi * t / T).sin()
    turn = torch.tensor([[a.cos(), 0, -a.sin()], [0, 1, 0], [a.sin(), 0, a.cos()]])
    # Colour its front by the energy, and the chart's left edge as a scale
    side = torch.linspace(-R, R, 401)
    x, y = torch.meshgrid(side, side, indexing='xy')
    front = torch.stack([x, y, (3 - x ** 2 - y ** 2).sqrt()], dim=-1)  # NaN beside the sphere
    levels = torch.linspace(-7.2, 2, 24)
    style = dict(levels=levels, cmap='Blues_r', vmin=-7.2, vmax=-1, antialiased=False)
    sphere.contourf(side, side, layer.energy(front @ turn.T), **style)
    chart.contourf([-0.5, 0], levels, levels[:, None].tile(2), **style)
    # A state has the colour of the key with the most weight at its end
    ends = (u[-1] @ KEYS.T).argmax(dim=-1)
    for key, color in enumerate(COLORS):
        x, y, z = (u[:t + 1, ends == key] @ turn).unbind(dim=-1)
        x[z < 0] = torch.nan  # behind the sphere
        sphere.plot(x, y, color=color)
        sphere.plot(x[-1:], y[-1:], 'o', color=color, mec=PAGE, mew=0.5)
        star = (layer.norm(KEYS[key]) @ turn).detach()
        sphere.plot(*star[:2], '*', color=color, mec='w', ms=20)
        chart.plot(energy[:t + 1, ends == key], color=color)
        chart.plot([t], energy[t:t + 1, ends == key], 'o', color=color, ms=4, clip_on=False)


def draw_card(figure: Figure, u: Tensor, energy: Tensor) -> None:
    """Draw the end of the descent, with the words of docs/index.html."""
    draw(T, figure, u, energy)
    sphere, chart = figure.axes
    chart.remove()
    figure.texts.clear()
    sphere.set_position((0.01, 0.02, 0.5, 0.96))
    figure.text(0.53, 0.6, 'Meaning rolls\ndownhill', fontsize=27, weight='bold', linespacing=1.3)
    figure.text(0.53, 0.44, 'Attention is a step down an energy.', fontsize=13)
    figure.text(0.53, 0.33, 'nanoCEM', fontsize=13, color=COLORS[1])


if __name__ == '__main__':
    plt.style.use(['dark_background', {'font.size': 12, 'axes.facecolor': PAGE}])
    card = plt.figure(figsize=(8, 4.2), facecolor=PAGE)
    draw_card(card, *descend())
    card.savefig(Path(__file__).with_name('card.png'), dpi=150)  # 1200 x 630
    figure = plt.figure(figsize=(8.3, 4), facecolor=PAGE)
    frames = [T] * 8 + [*range(T + 1)]  # the end first: viewers without motion show one frame
    film = FuncAnimation(figure, draw, frames, fargs=(figure, *descend()))
    film.save(Path(__file__).with_name('descent.gif'), PillowWriter(fps=5), dpi=100)

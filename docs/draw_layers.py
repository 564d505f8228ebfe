"""
Draw Llama's layer beside CEM's, and which matrices are one.

    python docs/draw_layers.py               writes docs/layers.png

A colour is a matrix. Coordinates are those of a panel, 10 wide and 4 high.
"""
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

INK, PALE, RED = '#24292f', '#57606a', '#cf222e'
COLOURS = {'W_Q': '#9ecae9', 'W_K': '#ffbf79', 'W_V': '#b5e3a1', 'W_O': '#d6b9e8',
           'V': '#83d0c9', 'W': '#ff9d98', 'W_d': '#e3d284', 'norm': '#ffffff', 'op': '#eef1f4'}


def box(ax: Axes, x: float, y: float, text: str, colour: str, width: float = 1.15) -> None:
    """A matrix, or an operation, centred at x, y."""
    shape = FancyBboxPatch((x - width / 2, y - 0.3), width, 0.6, facecolor=COLOURS[colour],
                           edgecolor=INK, linewidth=0.9, zorder=3,
                           boxstyle='round,pad=0,rounding_size=0.12')
    ax.add_patch(shape)
    ax.text(x, y, text, ha='center', va='center', fontsize=10, color=INK, zorder=4)


def line(ax: Axes, *points: tuple[float, float], colour: str = INK) -> None:
    """Through the points, with an arrow at the last."""
    xs, ys = zip(*points, strict=True)
    ax.plot(xs, ys, color=colour, linewidth=1.1, zorder=1, solid_joinstyle='round')
    ax.annotate('', points[-1], points[-2], zorder=2, arrowprops=dict(
        arrowstyle='-|>', color=colour, linewidth=0, mutation_scale=10, shrinkA=0, shrinkB=0))


def note(ax: Axes, x: float, y: float, text: str, colour: str = INK, size: float = 9,
         ha: str = 'center') -> None:
    ax.text(x, y, text, ha=ha, va='center', fontsize=size, color=colour, zorder=5)


def plus(ax: Axes, x: float) -> None:
    circle = dict(boxstyle='circle,pad=0.12', facecolor='white', edgecolor=INK, linewidth=0.9)
    ax.text(x, 1.6, '+', ha='center', va='center_baseline', fontsize=12, color=INK, zorder=4,
            bbox=circle)


def stream(ax: Axes) -> None:
    """Into the sublayer's norm, and past it to its sum."""
    note(ax, 0.05, 1.6, 'x', size=11)
    line(ax, (0.3, 1.6), (0.75, 1.6))
    box(ax, 1.2, 1.6, 'norm', 'norm', 0.9)
    line(ax, (0.3, 1.6), (0.3, 3.4), (9.4, 3.4), (9.4, 1.88))
    plus(ax, 9.4)
    line(ax, (9.66, 1.6), (10.1, 1.6))


def context(ax: Axes, name: str, colour: str) -> None:
    """What all steps of a CEM sublayer share."""
    line(ax, (1.65, 1.6), (1.95, 1.6), (1.95, 2.6), (2.9, 2.6))
    note(ax, 1.8, 2.6, 'context:\nmade once', PALE, ha='right')
    note(ax, 2.4, 2.77, 'h', size=11)
    box(ax, 3.48, 2.6, name, colour)


def steps(ax: Axes) -> None:
    """From the stream to a step's norm, and back from where the step ends: x itself moves."""
    line(ax, (0.3, 1.6), (0.3, 1.0), (2.1, 1.0))
    box(ax, 2.55, 1.0, 'norm', 'norm', 0.9)
    line(ax, (3.0, 1.0), (3.52, 1.0))
    note(ax, 3.24, 1.17, 'u', size=11)
    line(ax, (8.05, 1.6), (9.12, 1.6))
    note(ax, 8.62, 1.8, 'times $\\eta$', PALE)
    line(ax, (9.4, 1.34), (9.4, 0.2), (2.55, 0.2), (2.55, 0.7), colour=RED)
    note(ax, 5.5, -0.02, 'repeat T times, with the same weights', RED)


def llama_attention(ax: Axes) -> None:
    stream(ax)
    for y, name in ((2.6, 'Q'), (1.6, 'K'), (0.6, 'V')):
        line(ax, (1.65, 1.6), (2.2, 1.6), (2.2, y), (2.62, y))
        box(ax, 3.2, y, f'$W_{name}$', f'W_{name}')
    line(ax, (3.77, 2.6), (5.3, 2.6), (5.3, 1.9))
    line(ax, (3.77, 1.6), (4.62, 1.6))
    line(ax, (3.77, 0.6), (5.3, 0.6), (5.3, 1.3))
    note(ax, 4.5, 2.8, 'queries', PALE)
    note(ax, 4.2, 1.8, 'keys', PALE)
    note(ax, 4.5, 0.4, 'values', PALE)
    box(ax, 5.35, 1.6, 'softmax', 'op', 1.45)
    line(ax, (6.08, 1.6), (6.72, 1.6))
    box(ax, 7.3, 1.6, '$W_O$', 'W_O')
    line(ax, (7.88, 1.6), (9.12, 1.6))


def cem_attention(ax: Axes) -> None:
    stream(ax)
    context(ax, '$W_K$', 'W_K')
    line(ax, (4.06, 2.6), (5.75, 2.6), (5.75, 1.9))
    note(ax, 5.05, 2.8, 'keys = values')
    steps(ax)
    box(ax, 4.1, 1.0, '$W_Q$', 'W_Q')
    line(ax, (4.68, 1.0), (5.0, 1.0), (5.0, 1.6), (5.07, 1.6))
    box(ax, 5.8, 1.6, 'softmax', 'op', 1.45)
    line(ax, (6.53, 1.6), (6.85, 1.6))
    box(ax, 7.45, 1.6, '$W_Q^\\mathsf{T}$', 'W_Q', 1.2)


def llama_mlp(ax: Axes) -> None:
    stream(ax)
    line(ax, (1.65, 1.6), (2.2, 1.6), (2.2, 2.3), (2.62, 2.3))
    line(ax, (1.65, 1.6), (2.2, 1.6), (2.2, 0.9), (2.62, 0.9))
    box(ax, 3.2, 2.3, '$W$', 'W')
    box(ax, 3.2, 0.9, '$V$', 'V')
    line(ax, (3.77, 2.3), (5.5, 2.3), (5.5, 1.85))
    line(ax, (3.77, 0.9), (4.15, 0.9))
    box(ax, 4.7, 0.9, 'SiLU', 'op', 1.1)
    line(ax, (5.25, 0.9), (5.5, 0.9), (5.5, 1.35))
    note(ax, 5.5, 1.58, '$\\odot$', size=17)
    line(ax, (5.75, 1.6), (6.72, 1.6))
    box(ax, 7.3, 1.6, '$W_d$', 'W_d')
    line(ax, (7.88, 1.6), (9.12, 1.6))


def cem_mlp(ax: Axes) -> None:
    stream(ax)
    context(ax, '$W$', 'W')
    line(ax, (4.06, 2.6), (6.3, 2.6), (6.3, 1.85))
    note(ax, 5.0, 2.82, '$\\gamma$', INK, 11)
    steps(ax)
    box(ax, 4.1, 1.0, '$V$', 'V')
    line(ax, (4.68, 1.0), (4.95, 1.0))
    box(ax, 5.5, 1.0, 'SiLU', 'op', 1.1)
    line(ax, (6.05, 1.0), (6.3, 1.0), (6.3, 1.35))
    note(ax, 6.3, 1.58, '$\\odot$', size=17)
    line(ax, (6.55, 1.6), (6.85, 1.6))
    box(ax, 7.45, 1.6, '$V^\\mathsf{T}$', 'V', 1.2)


PANELS = (('Llama: attention, four matrices', llama_attention),
          ('CEM: attention, two: a step down the interaction energy', cem_attention),
          ('Llama: gated MLP, three matrices', llama_mlp),
          ('CEM: gated MLP, two: a step down the element-wise energy', cem_mlp))


def draw() -> Figure:
    figure = Figure(figsize=(10.4, 5), facecolor='white')
    for ax, (title, panel) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        panel(ax)
        ax.set(xlim=(-0.3, 10.3), ylim=(-0.3, 4))
        ax.set_title(title, fontsize=11.5, loc='left', color=INK)
        ax.axis('off')
    figure.text(0.5, 0.015, 'A colour is a matrix. In CEM the keys are the values, and the matrix '
                'that reads the moving state also writes to it.', ha='center', fontsize=10.5,
                color=INK)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.95, bottom=0.06, wspace=0.05, hspace=0.18)
    return figure


if __name__ == '__main__':
    draw().savefig(Path(__file__).with_name('layers.png'), dpi=160)

"""
Draw Llama's layer beside CEM's, and which matrices are one.

    python docs/draw_layers.py               writes docs/layers.png

Each colour is one matrix. Coordinates are those of a panel, 10 wide and 4 high.
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


def plus(ax: Axes) -> None:
    """The sum at the end of the stream, and what leaves the sublayer."""
    circle = dict(boxstyle='circle,pad=0.12', facecolor='white', edgecolor=INK, linewidth=0.9)
    ax.text(9.0, 1.6, '+', ha='center', va='center_baseline', fontsize=12, color=INK, zorder=4,
            bbox=circle)
    line(ax, (9.26, 1.6), (10.1, 1.6))


def around(ax: Axes, x: float) -> None:
    """The residual connection, from x on the stream to the sum."""
    line(ax, (x, 1.6), (x, 0.25), (9.0, 0.25), (9.0, 1.34))


def product(ax: Axes, x: float) -> None:
    note(ax, x, 1.58, '$\\odot$', size=17)


def llama(ax: Axes) -> None:
    """x, its norm, and its way around the sublayer."""
    note(ax, 0.05, 1.6, 'x', size=11)
    line(ax, (0.3, 1.6), (0.75, 1.6))
    box(ax, 1.2, 1.6, 'norm', 'norm', 0.9)
    around(ax, 0.3)
    plus(ax)


def cem(ax: Axes, context: str, reads: str) -> None:
    """The context, which all steps share; x, which moves from step to step; the way back."""
    note(ax, 0.05, 1.6, 'x', size=11)
    line(ax, (0.3, 1.6), (0.3, 2.8), (1.2, 2.8))
    box(ax, 1.65, 2.8, 'norm', 'norm', 0.9)
    line(ax, (2.1, 2.8), (2.9, 2.8))
    note(ax, 2.45, 2.97, 'h', size=11)
    box(ax, 3.48, 2.8, context, context.strip('$'))
    note(ax, 1.2, 3.4, 'the context: computed once', PALE, ha='left')
    line(ax, (0.3, 1.6), (2.0, 1.6))
    box(ax, 2.45, 1.6, 'norm', 'norm', 0.9)
    line(ax, (2.9, 1.6), (3.42, 1.6))
    note(ax, 3.14, 1.77, 'u', size=11)
    box(ax, 4.0, 1.6, reads, reads.strip('$'))
    around(ax, 1.6)
    line(ax, (8.08, 1.6), (8.72, 1.6))
    note(ax, 8.38, 1.82, '$\\times\\,\\eta$', PALE)
    plus(ax)
    line(ax, (9.6, 1.6), (9.6, -0.3), (0.95, -0.3), (0.95, 1.56), colour=RED)
    note(ax, 5.3, -0.05, 'the next step: T in all, with the same weights', RED)


def llama_attention(ax: Axes) -> None:
    llama(ax)
    for y, name in ((2.6, 'Q'), (1.6, 'K'), (0.75, 'V')):
        line(ax, (1.65, 1.6), (2.2, 1.6), (2.2, y), (2.62, y))
        box(ax, 3.2, y, f'$W_{name}$', f'W_{name}')
    line(ax, (3.77, 2.6), (5.3, 2.6), (5.3, 1.9))
    line(ax, (3.77, 1.6), (4.5, 1.6))
    line(ax, (3.77, 0.75), (5.3, 0.75), (5.3, 1.3))
    note(ax, 4.5, 2.8, 'queries', PALE)
    note(ax, 4.15, 1.8, 'keys', PALE)
    note(ax, 4.5, 0.55, 'values', PALE)
    box(ax, 5.35, 1.6, 'attention', 'op', 1.7)
    line(ax, (6.2, 1.6), (6.72, 1.6))
    box(ax, 7.3, 1.6, '$W_O^\\mathsf{T}$', 'W_O', 1.2)
    line(ax, (7.88, 1.6), (8.72, 1.6))


def cem_attention(ax: Axes) -> None:
    cem(ax, '$W_K$', '$W_Q$')
    line(ax, (4.06, 2.8), (5.8, 2.8), (5.8, 1.9))
    note(ax, 5.05, 3.0, 'keys = values')
    line(ax, (4.58, 1.6), (4.95, 1.6))
    box(ax, 5.8, 1.6, 'attention', 'op', 1.7)
    line(ax, (6.65, 1.6), (6.88, 1.6))
    box(ax, 7.48, 1.6, '$W_Q^\\mathsf{T}$', 'W_Q', 1.2)


def llama_mlp(ax: Axes) -> None:
    llama(ax)
    line(ax, (1.65, 1.6), (2.2, 1.6), (2.2, 2.3), (2.62, 2.3))
    line(ax, (1.65, 1.6), (2.2, 1.6), (2.2, 0.9), (2.62, 0.9))
    box(ax, 3.2, 2.3, '$W$', 'W')
    box(ax, 3.2, 0.9, '$V$', 'V')
    line(ax, (3.77, 2.3), (5.5, 2.3), (5.5, 1.85))
    line(ax, (3.77, 0.9), (4.15, 0.9))
    box(ax, 4.7, 0.9, 'SiLU', 'op', 1.1)
    line(ax, (5.25, 0.9), (5.5, 0.9), (5.5, 1.35))
    product(ax, 5.5)
    line(ax, (5.75, 1.6), (6.72, 1.6))
    box(ax, 7.3, 1.6, '$W_d^\\mathsf{T}$', 'W_d', 1.2)
    line(ax, (7.88, 1.6), (8.72, 1.6))


def cem_mlp(ax: Axes) -> None:
    cem(ax, '$W$', '$V$')
    line(ax, (4.06, 2.8), (6.4, 2.8), (6.4, 1.85))
    note(ax, 5.2, 3.0, '$W h$', size=10)
    line(ax, (4.58, 1.6), (4.8, 1.6))
    box(ax, 5.35, 1.6, 'SiLU', 'op', 1.1)
    line(ax, (5.9, 1.6), (6.15, 1.6))
    product(ax, 6.4)
    line(ax, (6.65, 1.6), (6.88, 1.6))
    box(ax, 7.48, 1.6, '$V^\\mathsf{T}$', 'V', 1.2)


PANELS = (('Llama attention: four matrices', llama_attention),
          ('CEM attention: two matrices, a step down an energy', cem_attention),
          ('Llama gated MLP: three matrices', llama_mlp),
          ('CEM gated MLP: two matrices, a step down an energy', cem_mlp))


def draw() -> Figure:
    figure = Figure(figsize=(10.4, 5), facecolor='white')
    for ax, (title, panel) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        panel(ax)
        ax.set(xlim=(-0.3, 10.3), ylim=(-0.5, 3.6))
        ax.set_title(title, fontsize=11.5, loc='left', color=INK)
        ax.axis('off')
    figure.text(0.5, 0.015, 'Each colour is one matrix. In CEM, keys serve as values, and the '
                'matrix that reads u also writes the step, transposed.', ha='center',
                fontsize=10.5, color=INK)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.95, bottom=0.06, wspace=0.05, hspace=0.18)
    return figure


if __name__ == '__main__':
    draw().savefig(Path(__file__).with_name('layers.png'), dpi=160)

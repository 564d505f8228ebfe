"""
The pictures of tour.ipynb. Each function draws what a cell of the tour has computed.

Tensors of points end in (..., 2): x and y. Stars are keys.
"""
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

PATH = 'tab:red'
LOW_IS_DARK = 'Blues_r'

plt.rcParams['figure.dpi'] = 80


def panels(n: int, width: float, height: float, **options: Any) -> Sequence[Axes]:
    _, axes = plt.subplots(1, n, figsize=(width, height), layout='constrained', **options)
    return axes


def plane(width: float, n: int = 101) -> tuple[Tensor, Tensor]:
    """Return n numbers from -width to width, and the square grid that they make, (n, n, 2)."""
    side = torch.linspace(-width, width, n)
    return side, torch.stack(torch.meshgrid(side, side, indexing='xy'), dim=-1)


def draw_arrows(axes: Axes, at: Tensor, steps: Tensor, scale: float) -> None:
    axes.quiver(*at.unbind(dim=-1), *steps.unbind(dim=-1), width=0.006, scale=scale, pivot='mid')


def draw_hill(energy: Callable, attention: Callable, keys: Tensor, turned: Tensor,
              path: Tensor) -> None:
    """Draw attention's steps with both kinds of values, and a path of u, (steps, 2)."""
    left, middle, right = panels(3, 11, 4.1)
    side, grid = plane(2)
    some = grid[6::11, 6::11]
    for axes in (left, right):
        axes.contourf(side, side, energy(grid), levels=16, cmap=LOW_IS_DARK)
        axes.set(xlabel='colour: energy, dark is low')
    # The curl of the steps whose values are not the keys
    x, y = attention(grid, turned).unbind(dim=-1)
    curl = (torch.gradient(y, spacing=(side,), dim=1)[0]
            - torch.gradient(x, spacing=(side,), dim=0)[0])
    middle.contourf(side, side, curl, levels=16, cmap='Oranges', vmin=0, vmax=4)
    middle.set(xlabel='colour: curl of the arrows')
    draw_arrows(left, some, attention(some, keys), scale=16)
    draw_arrows(middle, some, attention(some, turned), scale=16)
    # The circle on which the norm puts u
    angle = torch.linspace(0, 2 * torch.pi, 200)
    circle = 2 ** 0.5 * torch.stack([angle.cos(), angle.sin()])
    middle.plot(*circle, '--', color=PATH)
    right.plot(*circle, '--', color='white')
    right.plot(*path.T, 'o-', color=PATH, mec='white', mew=0.5)
    for name, u in (('start', path[0]), (f'{len(path) - 1}', path[-1])):
        right.text(*1.15 * u, name, color=PATH, ha='center', va='center')
    for axes, title in ((left, 'values are the keys: downhill'),
                        (middle, 'values are not the keys: no hill'),
                        (right, 'with the norm: along a circle')):
        axes.plot(*keys.T, '*', color='gold', mec='black', ms=13)
        axes.set(title=title, aspect='equal', xticks=[], yticks=[], xlim=(-2, 2), ylim=(-2, 2))


def draw_two_energies(z: Tensor, phi: Tensor, silu: Tensor, attention: Callable, keys: Tensor,
                      mlp: Callable, mlp_step: Callable, V: Tensor, gamma: Tensor) -> None:
    """Draw phi and its slope; then attention's energy, and beside it the MLP's with its steps."""
    left, middle, right = panels(3, 11, 3.9)
    left.plot(z, phi, label='phi')
    left.plot(z, silu, '--', label='SiLU, its slope')
    left.axhline(0, color='gray', lw=0.5)
    left.set(title='phi of the MLP', xlabel='z', box_aspect=1)
    left.legend()
    side, grid = plane(3)
    some = grid[6::11, 6::11]
    gradient = torch.func.vmap(torch.func.grad(attention))(some.flatten(0, 1)).view_as(some)
    for axes, energy, steps, scale in ((middle, attention, -gradient, 16),
                                       (right, mlp, mlp_step(some), 40)):
        heights = energy(grid)
        low, high = heights.quantile(torch.tensor([0.03, 0.97]))
        axes.contourf(side, side, heights, torch.linspace(low, high, 20), cmap=LOW_IS_DARK,
                      extend='both')
        draw_arrows(axes, some, steps, scale)
        axes.set(aspect='equal', xticks=[], yticks=[], xlim=(-3, 3), ylim=(-3, 3),
                 xlabel='colour: energy, dark is low')
    middle.plot(*keys.T, '*', color='gold', mec='black', ms=13)
    middle.set(title="attention's: down to the keys")
    for v, gate in zip(V, gamma, strict=True):
        color = 'gold' if gate > 0 else PATH
        right.annotate('', v.tolist(), (0, 0), arrowprops=dict(color=color, width=2, headwidth=9))
    right.set(title="the MLP's: slopes and a wall")


def draw_matrices(matrices: dict[str, Tensor]) -> None:
    """Draw square matrices, each with its name as title; red and blue are plus and minus."""
    for axes, (name, matrix) in zip(panels(len(matrices), 7, 2.6), matrices.items(), strict=True):
        most = matrix.abs().max()
        axes.imshow(matrix, cmap='RdBu_r', vmin=-most, vmax=most)
        axes.set(title=name, xticks=[], yticks=[])


def draw_descents(descents: dict[str, dict[str, list[float]]]) -> None:
    """Draw mean energies over the length of the steps so far, a panel for each kind of layer."""
    both = panels(len(descents), 7.5, 2.8)
    for axes, (kind, paths) in zip(both, descents.items(), strict=True):
        for name, path in paths.items():
            axes.plot(torch.linspace(0, 1, len(path)), path, 'o-', ms=3, label=name)
        axes.set(title=kind, xlabel='length of the steps so far')
    both[0].set_ylabel('mean energy of a token')
    both[-1].legend()


def energy_around(layer: Any, h: Tensor, states: Tensor, n: int = 31) -> tuple[Tensor, Tensor]:
    """Return three states of the last token, (3, D), in their plane, (3, 2), in units of the way
    from first to last; and the layer's energy on a square grid of that plane, (n, n). h is the
    context, (1, J, D). Nothing is projected, since three points lie in one plane."""
    start, middle, end = states
    length = (end - start).norm()
    along = (end - start) / length
    across = middle - start - (middle - start) @ along * along
    axes = torch.stack([along, across / across.norm()])  # (2, D)
    centre = torch.tensor([0.5, 0.0])
    _, grid = plane(1.5, n)
    u = layer.norm(start + length * (grid + centre) @ axes).flatten(0, 1)
    context = h.expand(len(u), -1, -1)
    states_of_all = torch.cat([context[:, :-1], u[:, None]], dim=1)  # only the last token moves
    energy = layer.energy(states_of_all, context)[:, -1]
    return (states - start) @ axes.T / length - centre, energy.view(n, n)


def draw_word(text: str, views: list[tuple[Tensor, Tensor, float]], guesses: list[str]) -> None:
    """Draw what energy_around returns, and the change of energy, for the attention and the MLP of
    each layer in turn; and below each layer its guess."""
    n = len(guesses)
    figure, rows = plt.subplots(2, n, figsize=(9.6, 4.4))
    figure.subplots_adjust(0.05, 0.2, 0.995, 0.84, wspace=0.08, hspace=0.28)
    figure.text(0.05, 0.93, f'{text} ...', fontsize=14)
    figure.text(0.05, 0.02, 'the next token, if the head reads the state after this layer')
    side = torch.linspace(-1.5, 1.5, len(views[0][1]))
    for i, (path, energy, change) in enumerate(views):
        axes = rows[i % 2, i // 2]
        axes.contourf(side, side, energy, 14, cmap=LOW_IS_DARK)
        axes.plot(*path.T, 'o-', color='gold', mec='black', mew=0.5, ms=5)
        axes.set(aspect='equal', xticks=[], yticks=[], frame_on=False)
        axes.set_xlabel(f'{change:+.1f}'.replace('-', '\N{MINUS SIGN}'), labelpad=2)
    for column, guess in enumerate(guesses):
        rows[0, column].set_title(f'layer {column + 1}', fontsize=10)
        rows[1, column].text(0, -2.6, guess, ha='center', weight='bold')
    rows[0, 0].set_ylabel('attention')
    rows[1, 0].set_ylabel('MLP')


def draw_cosines(points: dict[str, list[tuple[float, float]]], n_layer: int) -> None:
    """Draw for each kind of sublayer the cosine with steepest descent and the share lowered."""
    left, right = panels(2, 8, 2.8)
    styles = ('o-', 'o--', 's-', ':')
    colors = ('tab:blue', 'tab:blue', 'tab:orange', 'gray')
    for (name, found), style, color in zip(points.items(), styles, colors, strict=True):
        layers = torch.linspace(1, n_layer, len(found))  # `both` has two in each layer
        cosines, shares = zip(*found, strict=True)
        left.plot(layers, cosines, style, label=name, color=color)
        right.plot(layers, shares, style, label=name, color=color)
    left.set(title='cosine with steepest descent', xlabel='layer', ylim=(0, 1.03))
    right.set(title='share of tokens whose energy falls', xlabel='layer', ylim=(0, 1.03))
    right.legend(loc='lower right', fontsize=8)


def draw_more_steps(falls: dict[str, list[float]], steps: Sequence[int],
                    losses: dict[str, list[float]], trained: int) -> None:
    """Draw the energies of each sublayer, as changes, and the losses at some numbers of steps."""
    attention, mlp, right = panels(3, 9.5, 2.8)
    for name, path in falls.items():
        n = int(name.split()[-1])
        axes = mlp if name.startswith('MLP') else attention
        axes.plot([energy - path[0] for energy in path], 'o-', ms=2, lw=1.2, label=f'layer {n}',
                  color=plt.cm.viridis_r(n / 7))
    for name, found in losses.items():
        right.plot(steps, found, 'o-', ms=3, label=name)
    titles = ('attention: change of energy', 'MLP: change of energy', 'loss, nats per token')
    for axes, title in zip((attention, mlp, right), titles, strict=True):
        axes.axvline(trained, color='gray', ls='--', lw=1)
        axes.set(title=title, xlabel='steps (dashed: as trained)')
    mlp.legend(fontsize=6, labelspacing=0.2, loc='lower left')
    right.legend(fontsize=8)


def draw_attention(words: list[str], heads: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Draw for each head the weights of its first step, (J, J), queries down and keys across, and
    below how the second step changes them. `words` names the J tokens."""
    J = len(words)
    _, grid = plt.subplots(2, len(heads), figsize=(10.5, 5.9), layout='constrained')
    for (name, (first, second)), (above, below) in zip(heads.items(), grid.T, strict=True):
        moved = (second - first).abs().sum(dim=-1).mean() / 2
        above.imshow(first.sqrt(), cmap='Greys', vmin=0, vmax=1)
        below.imshow(second - first, cmap='RdBu_r', vmin=-0.25, vmax=0.25)
        above.set(title=name)
        below.set(title=f'{moved:.0%} moved')
        for axes in (above, below):
            axes.set_xticks(range(J), words, fontsize=8, rotation=90)
            axes.set_yticks(range(J), words if axes in grid[:, 0] else [''] * J, fontsize=8)
    grid[0, 0].set_ylabel('first step')
    grid[1, 0].set_ylabel('change by the second')


def draw_copying(perplexities: dict[str, dict[str, float]]) -> None:
    """Draw each model's perplexities of the kinds of targets that results/copying.py measures."""
    names = {'repeated': 'its pair\nstood earlier', 'other': 'all other\ntokens',
             'first': 'a text,\nread once', 'second': 'the same,\nread again'}
    _, axes = plt.subplots(figsize=(8, 3), layout='constrained')
    for n, (model, found) in enumerate(perplexities.items()):
        at = [kind + 0.27 * (n - 1) for kind in range(len(names))]
        bars = axes.bar(at, [found[kind] for kind in names], 0.25, label=model)
        axes.bar_label(bars, fmt='%.1f', fontsize=8)
    axes.set_xticks(range(len(names)), names.values())
    axes.set(ylabel='perplexity, lower is better', ylim=(0, 37))
    axes.legend()


def draw_looking(w: Tensor, looks: Tensor, words: list[str], title: str, alpha: Tensor) -> None:
    """Draw w_k and the shares of attention that go to what came next, (layers, heads); and beside
    them the weights of one head, (J, J), queries down and keys across, for the J `words`."""
    left, middle, right = panels(3, 9.5, 3.7, width_ratios=(1, 1, 1.2))
    left.imshow(w, cmap='RdBu_r', vmin=-5, vmax=5)
    middle.imshow(looks, cmap='Greys', vmin=0, vmax=1)
    for axes, numbers, form in ((left, w, 'z.1f'), (middle, 100 * looks, '.0f')):
        for n, row in enumerate(numbers):
            for k, number in enumerate(row):
                text = f'{number.item():{form}}'.replace('-', '\N{MINUS SIGN}')
                color = 'white' if axes is middle and number > 50 else 'black'
                axes.text(k, n, text, ha='center', va='center', fontsize=8, color=color)
        axes.set_xticks(range(len(row)), range(1, len(row) + 1))
        axes.set_yticks(range(len(numbers)), range(1, len(numbers) + 1))
        axes.set(xlabel='head', ylabel='layer')
    right.imshow(alpha.sqrt(), cmap='Greys', vmin=0, vmax=1)
    right.set_yticks(range(len(words)), words, fontsize=6)
    right.set(ylabel='down attends to across', xticks=[])
    for axes, name in ((left, '$w_k$'), (middle, 'attention to what came next, %'), (right, title)):
        axes.set_title(name, fontsize=10)

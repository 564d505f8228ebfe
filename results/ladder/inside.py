"""
Trained models looked into: what a second step does, the diagonal of A_k, and copying.

    python results/ladder/inside.py [PAGE.md [SPLIT]]

Of the runs of `python reproduce.py ladder` whose folders are here, on the test or the val split;
writes the page, inside.md by test where nothing is said, beside itself.
"""
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import torch  # noqa: E402  after the path is set
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from configurator import fail  # noqa: E402
from model import MLP, Attention, Transformer  # noqa: E402
from nanocem.files import write_whole  # noqa: E402
from nanocem.ladder import SCALES, SPLITS  # noqa: E402
from nanocem.runs import load_run  # noqa: E402
from nanocem.shards import Sequences, evenly_spaced  # noqa: E402
from reproduce import finished, own_runs  # noqa: E402

TOKENS = 16_384  # of the split, spread over it
GRAM = 4  # bytes that say what may be copied
INTRODUCTION = '''The ladder's trained models looked into, by `python results/ladder/inside.py{}`:
{} perplexity on {:,} bytes of each model as it was trained and, with no further training,
changed. Means over seeds, tokens and layers.
'''
NAMES = {'llama': 'Llama', 'llama-alibi': 'Llama with ALiBi',
         **{f'{model}-{T}': f'{name}, T = {T}' for model, name in (
             ('attn', 'CEM attention'), ('mlp', 'CEM MLP'), ('cem', 'all-CEM'),
             ('rope', 'all-CEM, exact RoPE')) for T in (1, 2)}}


def perplexity(model: Transformer, x: Tensor, y: Tensor) -> float:
    return math.exp(float(model(x, y)[1]))


def cem_layers(model: Transformer, kind: str) -> list[Attention | MLP]:
    """The model's sublayers of a kind (attn, mlp), if they are CEM's."""
    layers = [getattr(block, kind) for block in model.blocks]
    return layers if layers[0].cem else []


# The second step, of models with T = 2

def in_one_step(model: Transformer, kind: str, x: Tensor, y: Tensor) -> float:
    """Perplexity where all sublayers of a kind take one step of twice the length."""
    layers = cem_layers(model, kind)
    for layer in layers:
        layer.steps, layer.eta = 1, 2 * layer.eta
    found = perplexity(model, x, y)
    for layer in layers:
        layer.steps, layer.eta = 2, layer.eta / 2
    return found


def second_update(layer: Attention | MLP, model: Transformer, x: Tensor) -> tuple[float, float]:
    """A sublayer's second update beside its first, with residual=raw, means over tokens: the cosine
    between the two, and how long it is as a part of the first's length."""
    seen = []  # x_0, x_1 go into the norm, x_2 is what comes out
    hooks = [layer.norm.register_forward_hook(lambda of, given, out: seen.append(given[0])),
             layer.register_forward_hook(lambda of, given, out: seen.append(out))]
    model.hidden(x)
    for hook in hooks:
        hook.remove()
    start, middle, end = seen
    first, second = middle - start, end - middle
    length = (second.norm(dim=-1) / first.norm(dim=-1)).mean()
    return float(F.cosine_similarity(first, second, dim=-1).mean()), float(length)


def second_step(model: Transformer, x: Tensor, y: Tensor) -> list[float]:
    """For attention, then for the MLP: perplexity in one step, cosine, length; nan of Llama's."""
    found = []
    for kind in ('attn', 'mlp'):
        layers = cem_layers(model, kind)
        if not layers:
            found += [math.nan] * 3
            continue
        both = zip(*(second_update(layer, model, x) for layer in layers), strict=True)
        found += [in_one_step(model, kind, x, y), *map(statistics.fmean, both)]
    return found


# The diagonal, of models that have one shared by the heads

def diagonal(model: Transformer, x: Tensor, y: Tensor) -> list[float]:
    """Perplexity with d = 0 in all layers; and the mean of |d|."""
    diagonals = [layer.kq_diag for layer in cem_layers(model, 'attn')]
    trained = [d.clone() for d in diagonals]
    for d in diagonals:
        d.zero_()
    found = perplexity(model, x, y)
    for d, value in zip(diagonals, trained, strict=True):
        d.copy_(value)
    return [found, statistics.fmean(float(d.abs().mean()) for d in diagonals)]


# Copying, of all models

def copying(model: Transformer, x: Tensor, y: Tensor) -> list[float]:
    """Perplexity of the second halves of texts of half the context, and of the same bytes where
    each text is given twice in a row, the second time."""
    text = x[:, :x.shape[1] // 2]
    twice = torch.cat([text, text], dim=1)
    losses = F.cross_entropy(model(twice)[0][:, :-1].mT, twice[:, 1:], reduction='none')
    known = text.shape[1] // 2  # of each text; the loss of byte i is at i - 1
    first, again = losses[:, known - 1:text.shape[1] - 1], losses[:, -known:]
    return [math.exp(float(part.mean())) for part in (first, again)]


def seen_before(x: Tensor) -> Tensor:
    """Where the last GRAM bytes stood in the context before, so that what followed them can be
    copied: (B, J) -> (B, J)."""
    grams = x.unfold(1, GRAM, 1)  # (B, J - GRAM + 1, GRAM)
    equal = (grams[:, :, None] == grams[:, None]).all(dim=-1)
    return F.pad(equal.tril(-1).any(dim=-1), (GRAM - 1, 0))


def copying_in_text(model: Transformer, x: Tensor, y: Tensor) -> list[float]:
    """`copying`; and of the text as it is, the perplexity where the last bytes were seen before,
    and of the rest."""
    losses = F.cross_entropy(model(x)[0].mT, y, reduction='none')
    seen = seen_before(x)
    return [*copying(model, x, y),
            *(math.exp(float(losses[where].mean())) for where in (seen, ~seen))]


@cache
def open_run(out_dir: str, split: str) -> tuple[Transformer, Tensor, Tensor, float]:
    """A run's model, what of a split it is given, and its perplexity there."""
    model, state = load_run(out_dir, 'last')
    data = Sequences(state['data_dir'], split, model.cfg.context_length)
    x, y = data.batch(evenly_spaced(len(data), TOKENS // data.length))
    return model, x, y, perplexity(model, x, y)


@torch.no_grad()
def look(out_dir: str, split: str,
         into: Callable[[Transformer, Tensor, Tensor], list[float]]) -> list[float]:
    """A run's perplexity as trained, and what `into` finds, which leaves the model as it was."""
    model, x, y, before = open_run(out_dir, split)
    return [before, *into(model, x, y)]


def table(split: str, models: Sequence[str], header: Sequence[str],
          into: Callable[[Transformer, Tensor, Tensor], list[float]],
          cells: Callable[..., list[str]]) -> list[str]:
    """A line for each model and size of which runs are finished: its name, size, seeds, and `cells`
    of the means over seeds."""
    scale = SCALES['ladder']
    lines = [f'| {" | ".join(["model", "size", "seeds", "as trained", *header])} |']
    lines.append('|' + '---|' * (4 + len(header)))
    for name in models:
        for size in scale.sizes:
            runs = [run for task in own_runs(scale, [name], [size], scale.seeds)
                    if (run := finished(task))]
            if not runs:
                continue
            found = zip(*(look(run['out_dir'], split, into) for run in runs), strict=True)
            trained, *rest = map(statistics.fmean, found)
            seeds = ', '.join(str(run['seed']) for run in runs)
            words = [NAMES[name], size, seeds, f'{trained:.3f}', *cells(trained, *rest)]
            lines.append(f'| {" | ".join(words)} |')
            print(lines[-1], flush=True)
    return lines


def against(trained: float, changed: float) -> str:
    return f'{changed:.3f} ({100 * (changed / trained - 1):+.1f}%)'


def second_step_cells(trained: float, *found: float) -> list[str]:
    words = []
    for perplexity, cosine, length in (found[:3], found[3:]):
        words += ['', ''] if math.isnan(cosine) else [
            against(trained, perplexity), f'cosine {cosine:.2f}, length {length:.2f}']
    return words


def diagonal_cells(trained: float, without: float, size: float) -> list[str]:
    return [against(trained, without), f'{size:.2f}']


def copying_cells(trained: float, first: float, again: float, seen: float, rest: float,
                  ) -> list[str]:
    return [f'{first:.3f}', against(first, again), f'{seen:.3f}', f'{rest:.3f}']


def main(argv: Sequence[str]) -> None:
    name, split, *more = [*argv, *('inside.md', 'test')[len(argv):]]
    if more or split not in SPLITS or not name.endswith('.md') or os.path.basename(name) != name:
        fail(f'{" ".join(argv)}: expected at most the name of a page beside this file, PAGE.md, '
             f'and {" or ".join(SPLITS)}')
    torch.set_num_threads(1)
    tabled = partial(table, split)
    steps = tabled(
        ['cem-2', 'rope-2', 'attn-2', 'mlp-2'],
        ['attention in one step', 'attention: second update', 'MLP in one step',
         'MLP: second update'], second_step, second_step_cells)
    diagonals = tabled(['attn-1', 'attn-2', 'cem-1', 'cem-2'], ['d = 0', 'mean of abs d'],
                       diagonal, diagonal_cells)
    copies = tabled([*NAMES], ['a text', 'the same again', 'after bytes seen before', 'the rest'],
                    copying_in_text, copying_cells)
    if len(copies) == 2:
        fail('no run of the ladder is finished: python reproduce.py ladder')
    page = [
        INTRODUCTION.format(''.join(f' {a}' for a in argv), SPLITS[split].lower(), TOKENS),
        '## The second step', '',
        'In one step: attention, or the MLP, takes one step of twice the length in place of two. '
        "The second update is set beside the first: the cosine between them, and the second's "
        "length over the first's.", '', *steps, '', '## The diagonal of A_k', '',
        'd = 0: the diagonal, shared by the heads, is taken away in all layers.', '', *diagonals,
        '', '## Copying', '',
        'A text of 64 bytes, and the same once more behind it: its second half, read the first and '
        'the second time. A model that copies has seen the answer. And the text as it is: where '
        f'the last {GRAM} bytes stood in the context before, and the rest.', '', *copies]
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    write_whole(path, '\n'.join([*page, '']).encode())


if __name__ == '__main__':
    os.chdir(ROOT)
    main(sys.argv[1:])

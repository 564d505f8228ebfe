"""
Draw the attention maps of a text, and what later steps change in them.

    python docs/attention.py --prompt="The cat"                  of the newest run
    python docs/attention.py --prompt="The cat" --layer=3        one layer alone
    python docs/attention.py --prompt="The cat" --out_dir=RUN --attn_steps=4

A table says which fraction of its attention each step after the first moves to other keys. The
picture, in out/results, has heads across, layers and steps down.
"""
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # model.py is in the folder above
if __name__ == '__main__':  # pictures go into files, whatever backend a notebook asks for
    os.environ['MPLBACKEND'] = 'agg'

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from configurator import PathStr, build, check, command_line, in_range, read_options, user_errors
from model import BaseAttention, Transformer
from nanocem.files import markdown_table, save_picture
from nanocem.runs import load_model, newest_run
from nanocem.tokenizers import tokenizer_of


@dataclass
class AttentionConfig:
    """A model and a text."""
    prompt: str = ''  # the text
    out_dir: PathStr | None = None  # a run (its best.pt), a .pt or export; default: newest in out/
    layer: int | None = None  # draw this layer alone, counted from 1
    attn_steps: int | None = None  # T of CEM attention; default: as trained
    mlp_steps: int | None = None  # T of the CEM MLP; default: as trained
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda if there is a GPU

    def __post_init__(self) -> None:
        in_range(self, 1, 10**15, 'layer attn_steps mlp_steps')


@torch.no_grad()
def attention_maps(model: Transformer, idx: Tensor) -> list[Tensor]:
    """Return the weights alpha_ijk of ids (1, J) at each step: one tensor (T, K, J, J) for each
    layer, or for each use of its attention, those of layer 1 first. Llama's T is 1."""
    steps: dict[BaseAttention, list[Tensor]] = defaultdict(list)  # (K, J, J) each

    def attend(attn: BaseAttention, own: Callable, q: Tensor, k: Tensor, v: Tensor,
               *others: Any) -> tuple:
        steps[attn].append(attn.scores(q, k, *others).softmax(dim=-1)[0].cpu())
        return own(q, k, v, *others)

    # Run the model with a function before its attention that keeps the weights
    for block in model.blocks:
        block.attn.attend = partial(attend, block.attn, block.attn.attend)
    try:
        model.hidden(idx)
    finally:
        for block in model.blocks:
            del block.attn.attend
    # Divide all steps of each layer into its uses
    uses = model.cfg.attn_reuse
    return [use for alphas in steps.values() for use in torch.stack(alphas).chunk(uses)]


def names_of_maps(model: Transformer) -> list[str]:
    """Return a name for each of attention_maps: of a layer, or of a use of its attention."""
    uses = model.cfg.attn_reuse
    return [f'layer {n}' + (f', use {use}' if uses > 1 else '')
            for n in range(1, model.cfg.n_layer + 1) for use in range(1, uses + 1)]


def moved_table(maps: dict[str, Tensor]) -> str:
    """Format which fraction of its attention each step after the first moves to other keys, mean
    over heads and queries: half the sum of the weights' changes."""
    T = len(next(iter(maps.values())))
    if T == 1:
        return 'No attention takes a second step, so none moves.'
    header = ['attention moved', *(f'by step {t}' for t in range(2, T + 1))]
    rows = []
    for name, alpha in maps.items():  # (T, K, J, J)
        moved = alpha.diff(dim=0).abs().sum(dim=-1).mean(dim=(1, 2)) / 2  # (T - 1,)
        rows.append([name, *(f'{fraction:.2%}' for fraction in moved.tolist())])
    return markdown_table(header, rows)


def draw(maps: dict[str, Tensor], words: Sequence[str]) -> Figure:
    """Draw a panel for each head of each step: the maps of the first step, and what later steps
    change in them."""
    T, K = next(iter(maps.values())).shape[:2]
    figure = Figure((1 + 1.5 * K, 0.5 + 1.7 * T * len(maps)), layout='constrained')
    title = 'query down, key across; grey: square root of the weight'
    most = 0.0
    if T > 1:
        most = max(float((alpha[1:] - alpha[:1]).abs().max()) for alpha in maps.values())
        title += f'; later steps: less than in step 1 (blue) or more (red), up to {most:.2g}'
    figure.suptitle(title, fontsize=7)
    panels = figure.subplots(T * len(maps), K, squeeze=False)
    drawn = [*maps.items()]
    for (row, k), axes in np.ndenumerate(panels):
        n, t = divmod(row, T)
        name, alpha = drawn[n]
        if t == 0:
            axes.imshow(alpha[0, k].sqrt().numpy(), cmap='Greys', vmin=0, vmax=1)
        else:
            axes.imshow((alpha[t, k] - alpha[0, k]).numpy(), cmap='RdBu_r', vmin=-most, vmax=most)
        step = f'step {t + 1}, ' if T > 1 else ''
        axes.set_title(f'{name}\n{step}head {k + 1}', fontsize=6)
        axes.set(xticks=[], yticks=[])
        if k == 0 and len(words) <= 24:
            axes.set_yticks(range(len(words)), words, fontsize=5, parse_math=False)
    return figure


@command_line
def main(argv: list[str]) -> None:
    cfg = build(AttentionConfig, read_options(argv, AttentionConfig))
    path = cfg.out_dir or newest_run()
    model, state = load_model(path, cfg.device)
    n_layer, length = model.cfg.n_layer, model.cfg.context_length
    check(cfg.layer is None or cfg.layer <= n_layer, f'layer={cfg.layer}: expected 1 to {n_layer}')
    with user_errors():
        model.set_steps(cfg.attn_steps, cfg.mlp_steps)
    # Run the model on the text
    tokenizer = tokenizer_of(state)
    ids = [tokenizer.bos, *tokenizer.encode(cfg.prompt)]
    check(1 < len(ids) <= length, f'prompt: the text has {len(ids) - 1} tokens; expected 1 to '
          f'{length - 1}')
    words = ['BOS', *(tokenizer.decode([i]) for i in ids[1:])]
    found = attention_maps(model, torch.tensor([ids], device=model.embedding.device))
    maps = dict(zip(names_of_maps(model), found, strict=True))
    # Print the table of all layers, and draw one of them, or all
    subject = f'{path}; {cfg.prompt!r:.80}'
    print(f'{subject}\n\n{moved_table(maps)}')
    if cfg.layer:
        uses = len(maps) // n_layer
        maps = dict([*maps.items()][(cfg.layer - 1) * uses:cfg.layer * uses])
    print(save_picture(draw(maps, words), 'attention', path, subject), flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])

"""
A run under the lens.

    python evaluate.py                         loss, perplexity and bits a byte of the newest run
    python evaluate.py --text=book.txt         the same on a text; --data=FOLDER: on other data
    python evaluate.py --steps=1,2,3,4,8       the same for other T at test time
    python evaluate.py --energies              the energy along the steps of every CEM sublayer
    python evaluate.py --attention="The cat"   the attention maps of a text, and what steps change
    python evaluate.py --compare out/a out/b   curves of runs on one plot, and a table of results
    python evaluate.py --export=DIR            safetensors and config.json, as on Hugging Face's hub

What is asked for is done and no more. A run's tables and pictures go into its folder, those of
--compare into out/results/compare.
"""
import io
import math
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from configurator import build, fail, read_options
from model import Transformer
from nanocem import lens
from nanocem.files import say, write_whole
from nanocem.hf import export
from nanocem.runs import load_run, newest_run
from nanocem.shards import Sequences, evenly_spaced
from nanocem.tokenizers import load_tokenizer

Look = tuple[str, Figure]  # a table and a picture
LOSSES = ['loss, nats a token', 'perplexity', 'bits a byte']


@dataclass
class EvaluateConfig:
    """What to look at."""
    out_dir: str | None = None  # the run; default: the newest under out/
    checkpoint: Literal['best', 'last'] = 'best'  # best by validation, or the last one written
    data: str | None = None  # folder of token shards; default: the run's own
    split: Literal['train', 'val', 'test'] = 'test'  # of the data
    text: str | None = None  # a UTF-8 text file to look at instead
    tokens: int = 500_000  # read at most this many, in evenly spaced sequences
    steps: tuple[int, ...] = ()  # T of all CEM sublayers; energies and attention take the largest
    energies: bool = False  # energies along the steps; 8 of them where steps does not say
    attention: str | None = None  # a text to show the attention maps of
    compare: tuple[str, ...] = ()  # folders of runs; written --compare out/a out/b
    export: str | None = None  # a folder to write the model to, as Hugging Face's hub has it
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda where there is one

    def __post_init__(self) -> None:
        if self.text is not None and self.data is not None:
            raise ValueError(f'text={self.text} and data={self.data}: give one')
        if self.tokens < 1:
            raise ValueError(f'tokens={self.tokens}: expected at least 1')
        if any(not 1 <= T <= 1000 for T in self.steps):
            raise ValueError(f'steps={",".join(map(str, self.steps))}: expected 1 to 1,000 each')


# What is read: sequences of context_length + 1 tokens

def sequences_of_text(path: str, tokenizer: Any, length: int) -> list[Tensor]:
    """All of a text file behind BOS; each sequence begins with the last token of the one before,
    the last one may be shorter."""
    regular = os.path.isfile(path) or os.path.isdir(path)
    if os.path.exists(path) and not regular:  # a pipe would be waited for, for ever
        fail(f'text={path} is no file; expected a text file')
    try:
        with open(path, encoding='utf-8', newline='') as file:
            text = file.read()
    except OSError as error:
        fail(f'text={path}: {error.strerror}; expected a text file')
    except UnicodeDecodeError as error:
        fail(f'text={path}: byte {error.start} is not UTF-8; expected a text file in UTF-8')
    if not text:
        fail(f'text={path} is empty')
    ids = torch.tensor([tokenizer.bos, *tokenizer.encode(text)])
    return [ids[at:at + length + 1] for at in range(0, len(ids) - 1, length)]


def read(cfg: EvaluateConfig, state: dict[str, Any], tokenizer: Any, length: int) -> list[Tensor]:
    """Evenly spaced sequences of the text or the split, cfg.tokens tokens of them at most."""
    wanted = cfg.tokens // length
    if cfg.text is not None:
        found = sequences_of_text(cfg.text, tokenizer, length)
        return [found[n] for n in evenly_spaced(len(found), wanted)]
    folder = cfg.data or state['data_dir']
    data = Sequences(folder, cfg.split, length)
    for name in ('tokenizer', 'tokenizer_sha256', 'vocab_size'):
        if data.identity[name] != state['data'][name]:
            fail(f'data={folder}: its {name} is {data.identity[name]}, that of the run '
                 f'{state["data"][name]}; expected data of the same tokenizer')
    x, y = data.batch(evenly_spaced(len(data), wanted))
    return list(torch.cat([x, y[:, -1:]], dim=1))


# Loss

def in_words(found: lens.Measured) -> list[str]:
    return [f'{found.loss:.4f}', f'{found.perplexity:.3f}', f'{found.bits_per_byte:.4f}']


def draw_by_position(axes: Any, losses: np.ndarray, **options: Any) -> None:
    """Loss by position in the context, in about twenty bins that widen with it."""
    edges = np.unique(np.geomspace(1, len(losses) + 1, 21).astype(int))[:-1]
    widths = np.diff(edges, append=len(losses) + 1)
    mean = np.add.reduceat(losses, edges - 1) / widths
    axes.plot(edges + (widths - 1) / 2, mean, marker='o', ms=3, **options)
    axes.set(xscale='log', xlabel='position in the context', ylabel=LOSSES[0])


def look_at_loss(model: Transformer, sequences: list[Tensor], spelled: Tensor) -> Look:
    found = lens.measure(model, sequences, spelled)
    figure = Figure((5, 3.5), layout='constrained')
    draw_by_position(figure.subplots(), found.by_position)
    return table(['tokens', *LOSSES], [[f'{found.tokens:,}', *in_words(found)]]), figure


# Steps

def change_steps(model: Transformer, T: int | None) -> None:
    """T steps in every CEM sublayer; Llama's stay, and all where T is None."""
    cfg = model.cfg
    model.set_steps(T if cfg.attn == 'cem' else None, T if cfg.mlp == 'cem' else None)


def look_at_steps(model: Transformer, sequences: list[Tensor], spelled: Tensor,
                  steps: tuple[int, ...]) -> Look:
    """Loss for each T at test time; the model goes on with the last of them."""
    cfg = model.cfg
    trained = {T for kind, T in ((cfg.attn, cfg.attn_steps), (cfg.mlp, cfg.mlp_steps))
               if kind == 'cem'}
    figure = Figure((9, 3.5), layout='constrained')
    left, right = figure.subplots(1, 2)
    rows, losses = [], []
    for T in steps:
        change_steps(model, T)
        found = lens.measure(model, sequences, spelled)
        losses.append(found.loss)
        rows.append([f'{T}, as trained' if trained == {T} else f'{T}', *in_words(found)])
        draw_by_position(right, found.by_position, label=f'T = {T}')
    left.plot(steps, losses, marker='o')
    for T in trained:
        left.axvline(T, color='gray', ls='--', lw=1)
    left.set(xlabel='T at test time (dashed: as trained)', ylabel=LOSSES[0])
    right.legend(fontsize=7)
    return table(['T', *LOSSES], rows), figure


def look_at_energies(model: Transformer, sequences: list[Tensor], steps: int) -> Look:
    """Along the steps of each CEM sublayer, what comes to it being that of the model as trained."""
    x, _ = next(lens.batches(sequences, model.cfg.vocab_size))
    x = x[:max(1, 4096 // x.shape[1])]
    found = lens.energies(model, x.to(model.embedding.device), steps)
    figure = Figure((9, 3.5), layout='constrained')
    for axes, kind in zip(figure.subplots(1, 2), ('attn', 'mlp'), strict=True):
        axes.set(title=kind, xlabel='step (dashed: as trained)', ylabel='energy, less that at 0')
        for name, along in found.items():
            if name.startswith(kind):
                axes.plot(along - along[0], marker='o', ms=3, label=name)
        if axes.lines:
            axes.legend(fontsize=7)
            axes.axvline(getattr(model.cfg, f'{kind}_steps'), color='gray', ls='--', lw=1)
    header = ['energy at step', *map(str, range(steps + 1))]
    return table(header, [[name, *(f'{e:.4g}' for e in found[name])] for name in found]), figure


# Attention

def draw_attention(maps: list[Tensor], words: list[str]) -> Figure:
    """Heads by layers: the maps (T, K, J, J) of the first step, below them what others change."""
    rows = [(n, t) for n, layer in enumerate(maps) for t in range(len(layer))]
    K = maps[0].shape[1]
    figure = Figure((1 + 1.3 * K, 0.5 + 1.4 * len(rows)), layout='constrained')
    figure.suptitle('query down, key across\nred: more than a step before', fontsize=7)
    for line, (n, t) in zip(figure.subplots(len(rows), K, squeeze=False), rows, strict=True):
        for k, axes in enumerate(line):
            if t == 0:
                axes.imshow(maps[n][0, k].sqrt().numpy(), cmap='Greys', vmin=0, vmax=1)
                axes.set_title(f'head {k + 1}', fontsize=7)
            else:
                change = (maps[n][t, k] - maps[n][t - 1, k]).numpy()
                top = max(abs(change).max(), 1e-9)
                axes.imshow(change, cmap='RdBu_r', vmin=-top, vmax=top)
                axes.set_title(f'{float(lens.moved(maps[n])[t - 1, k]):.1%} moved', fontsize=7)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(f'layer {n + 1}\nstep {t + 1}', fontsize=7)
        if len(words) <= 24:
            line[0].set_yticks(range(len(words)), words, fontsize=5, parse_math=False)
    return figure


def look_at_attention(model: Transformer, tokenizer: Any, text: str) -> Look:
    """The share of attention that each step moves, and the maps."""
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    if not 1 < len(ids) <= model.cfg.context_length:
        fail(f'attention: the text has {len(ids) - 1} tokens; expected 1 to '
             f'{model.cfg.context_length - 1}')
    maps = lens.attention_maps(model, torch.tensor([ids], device=model.embedding.device))
    words = ['BOS', *(tokenizer.decode([i]) for i in ids[1:])]
    header = ['attention moved', *(f'by step {t}' for t in range(2, len(maps[0]) + 1))]
    rows = [[f'layer {n}', *(f'{share:.2%}' for share in lens.moved(layer).mean(dim=1).tolist())]
            for n, layer in enumerate(maps, 1)]
    return table(header, rows), draw_attention(maps, words)


# Runs side by side

def compare(folders: tuple[str, ...]) -> Look:
    """Training loss of runs against tokens, FLOPs and time; results, best validation first."""
    figure = Figure((13, 4), layout='constrained')
    panels = figure.subplots(1, 3, sharey=True)
    rows = {}
    for folder in folders:
        run = lens.read_history(folder)
        if run is None:
            say(f'{folder}: no run with a log; passed over')
            continue
        window = max(1, len(run.losses) // 20)
        smooth = np.convolve(run.losses, np.ones(window) / window, 'valid')
        for axes, x in zip(panels, (run.tokens, run.flops, run.hours), strict=True):
            axes.plot(x[window - 1:], smooth, label=os.path.basename(folder.rstrip('/')))
        rows[folder] = run.val_loss, [
            folder, f'{run.parameters:,}', f'{run.tokens[-1]:,.0f}', f'{run.flops[-1]:.2e}',
            f'{run.hours[-1]:.3f}', f'{run.val_loss:.4f}', f'{run.test_loss:.4f}',
            f'{math.exp(min(run.test_loss, 700)):.3f}']
    if not rows:
        fail('compare: no runs; expected their folders, as in --compare out/a out/b')
    for axes, unit in zip(panels, ('tokens', 'FLOPs', 'hours'), strict=True):
        axes.set(xlabel=unit)
    panels[0].set_ylabel(f'training {LOSSES[0]}')
    panels[0].legend(fontsize=7)
    header = ['run', 'weights', 'tokens', 'FLOPs', 'hours', 'val loss', 'test loss', 'perplexity']
    best_first = sorted(rows.values(), key=lambda row: math.inf if math.isnan(row[0]) else row[0])
    return table(header, [cells for _, cells in best_first]), figure


# Tables and pictures

def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with its columns aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in lines)


def show(folder: str, name: str, look: Look) -> None:
    """Print a table; keep it and its picture as name.md and name.png."""
    path = os.path.join(folder, name)
    picture = io.BytesIO()
    look[1].savefig(picture, dpi=100)
    try:
        os.makedirs(folder, exist_ok=True)
        write_whole(f'{path}.md', f'{look[0]}\n'.encode())
        write_whole(f'{path}.png', picture.getvalue())
    except OSError as error:
        fail(f'{path}.png: {error.strerror}; expected a folder to write in')
    say(f'{look[0]}\n{path}.md and .png')


def main(argv: list[str]) -> None:
    """Run the command line."""
    comparing = '--compare' in argv
    folders = [arg for arg in argv if comparing and not arg.startswith('--')]
    argv = [arg for arg in argv if arg not in ('--compare', *folders)]
    cfg = build(EvaluateConfig, read_options(argv, EvaluateConfig))
    if comparing or cfg.compare:
        return show('out/results/compare', 'curves', compare((*cfg.compare, *folders)))
    out_dir = cfg.out_dir or newest_run() or fail('no run in out/: python train.py makes one')
    model, state = load_run(out_dir, cfg.checkpoint, cfg.device)
    looks = cfg.steps or cfg.energies or cfg.attention
    if (cfg.steps or cfg.energies) and 'cem' not in (model.cfg.attn, model.cfg.mlp):
        fail(f'{out_dir} is all Llama; steps and energies are those of CEM sublayers')
    if cfg.export:
        export(model, cfg.export, state['data'])
        say(f'{cfg.export}: nanocem.hf.HubTransformer.from_pretrained loads it')
        if not looks:
            return
    tokenizer = load_tokenizer(state['data_dir'])
    if cfg.steps or cfg.energies or not looks:
        sequences = read(cfg, state, tokenizer, model.cfg.context_length)
        spelled = lens.bytes_of_tokens(tokenizer)
    if not looks:
        show(out_dir, 'loss', look_at_loss(model, sequences, spelled))
    if cfg.energies:
        show(out_dir, 'energies', look_at_energies(model, sequences, max(cfg.steps, default=8)))
    if cfg.attention:
        change_steps(model, max(cfg.steps, default=None))
        show(out_dir, 'attention', look_at_attention(model, tokenizer, cfg.attention))
    if cfg.steps:
        show(out_dir, 'steps', look_at_steps(model, sequences, spelled, cfg.steps))


if __name__ == '__main__':
    main(sys.argv[1:])

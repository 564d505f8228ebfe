"""
A run under the lens.

    python evaluate.py                         loss, perplexity and bits a byte of the newest run
    python evaluate.py --text=book.txt         the same on a text; --data=FOLDER: on other data
    python evaluate.py --steps=1,2,3,4,8       the same for other T at test time
    python evaluate.py --energies              the energy along the steps of every CEM sublayer
    python evaluate.py --attention="The cat"   the attention maps of a text, and what steps change
    python evaluate.py --compare out/a out/b   curves of runs on one plot, and a table of results
    python evaluate.py --export=DIR            a folder that Hugging Face's transformers loads

What is asked for is done and no more. A run's tables and pictures go into its folder, those of
--compare into out/results/compare. --out_dir takes a folder that --export wrote, too; its tables go
into out/results.
"""
import io
import math
import os
import shlex
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from configurator import build, command_line, fail, in_range, read_options
from model import CEMMLP, BaseAttention, CEMAttention, Transformer
from nanocem.compute import LOGITS_AT_ONCE, NO_TARGET
from nanocem.data import TokenDataset, evenly_spaced
from nanocem.files import read_json, read_json_lines, read_text_file, say, table, write_atomic
from nanocem.hf import export
from nanocem.runs import changed_fields, load_run, newest_run, perplexity, read_config
from nanocem.tokenizers import load_tokenizer, tokenizer_of
from prepare_slimpajama import find_data

Report = tuple[str, Figure | None]  # a table and a picture
LOSSES = ['loss, nats a token', 'perplexity', 'bits a byte']


@dataclass
class EvaluateConfig:
    """What to report."""
    out_dir: str | None = None  # the run, or an exported folder; default: the newest under out/
    checkpoint: Literal['best', 'last'] = 'best'  # best by validation, or the last one written
    data: str | None = None  # folder of token shards; default: the run's own
    split: Literal['train', 'val', 'test'] = 'test'  # of the data
    text: str | None = None  # a UTF-8 text file to read instead
    tokens: int = 500_000  # read at most this many, in evenly spaced sequences
    steps: tuple[int, ...] = ()  # T of all CEM sublayers; energies and attention take the largest
    energies: bool = False  # energies along the steps; 8 of them where steps does not say
    attention: str | None = None  # a text to show the attention maps of
    compare: tuple[str, ...] = ()  # folders of runs; written --compare out/a out/b
    export: str | None = None  # a new folder for the model as transformers loads it
    export_dtype: Literal['float32', 'bfloat16'] = 'float32'  # of its weights
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda where there is one

    def __post_init__(self) -> None:
        if self.text is not None and self.data is not None:
            fail(f'text={self.text} and data={self.data}: give one')
        in_range(self, 1, 10**12, 'tokens')
        if any(not 1 <= T <= 1000 for T in self.steps):
            fail(f'steps={",".join(map(str, self.steps))}: expected 1 to 1,000 each')


# What is read

def read_sequences(cfg: EvaluateConfig, state: dict[str, Any], length: int) -> Tensor:
    """(n, length + 1), evenly spaced in the text or the split, cfg.tokens tokens of them at most;
    NO_TARGET behind the end of a text, all of whose tokens but BOS are targets once."""
    if cfg.text is not None:
        tokenizer = tokenizer_of(state)
        ids = torch.tensor([tokenizer.bos, *tokenizer.encode(read_text_file(cfg.text, 'text='))])
        length = min(length, len(ids) - 1) or fail(f'text={cfg.text} is empty')
        ids = F.pad(ids, (0, -(len(ids) - 1) % length), value=NO_TARGET)
        sequences = ids.unfold(0, length + 1, length)
        return sequences[evenly_spaced(len(sequences), cfg.tokens // length)]
    folder = find_data(cfg.data) if cfg.data else state['data_dir']
    if not os.path.exists(folder):
        fail(f'{folder}, which the model was trained on, is not here: --data=data/builtin makes '
             "this Python's source, --text=FILE reads a text")
    data = TokenDataset(folder, cfg.split, length)
    for name in ('tokenizer', 'tokenizer_sha256', 'vocab_size'):
        if data.identity[name] != state['data'][name]:
            fail(f'data={folder}: its {name} is {data.identity[name]}, that of the run '
                 f'{state["data"][name]}; expected data of the same tokenizer')
    if cfg.data is None and changed_fields(state['data'], data.identity):
        fail(f'the {cfg.split} split of {folder} has changed since the run was trained; '
             f'--data={shlex.quote(folder)} reads it as it is now')
    x, y = data.batch(evenly_spaced(len(data), cfg.tokens // length))
    return torch.cat([x, y[:, -1:]], dim=1)


# Loss, with the steps of training or others

@torch.no_grad()
def measure(model: Transformer, sequences: Tensor, spelled: Tensor) -> tuple[int, float, float]:
    """Targets in sequences (n, J + 1), each with all before it in its sequence as its context;
    their mean loss; and the bits a byte of those that spell text, comparable across tokenizers.
    `spelled`: the bytes of each token."""
    device = model.embedding.device
    at_once = LOGITS_AT_ONCE // ((sequences.shape[1] - 1) * model.cfg.vocab_size)
    tokens, nats = 0, 0.0
    text_bytes, text_nats = 0, 0.0
    for block in sequences.split(max(1, min(32, at_once))):
        x, y = block[:, :-1].clamp(min=0), block[:, 1:].flatten()
        logits = model(x.to(device))[0].float().flatten(0, 1)
        losses = F.cross_entropy(logits, y.to(device), reduction='none', ignore_index=NO_TARGET)
        losses = losses.cpu().double()
        tokens += int((y != NO_TARGET).sum())
        nats += float(losses.sum())
        bytes_of_y = spelled[y.clamp(min=0)] * (y != NO_TARGET)
        text_bytes += int(bytes_of_y.sum())
        text_nats += float(losses[bytes_of_y > 0].sum())
    bits = text_nats / math.log(2) / text_bytes if text_bytes else math.nan
    return tokens, nats / tokens, bits


def set_steps(model: Transformer, T: int | None) -> None:
    """T steps in every CEM sublayer; Llama's stay, and all where T is None."""
    cfg = model.cfg
    model.set_steps(T if cfg.attn == 'cem' else None, T if cfg.mlp == 'cem' else None)


def report_loss(model: Transformer, sequences: Tensor, spelled: Tensor,
                steps: tuple[int, ...] = ()) -> Report:
    """As trained, or for each T of `steps`, the picture being loss against T; the model goes on
    with the last of them."""
    cfg = model.cfg
    trained = {T for kind, T in ((cfg.attn, cfg.attn_steps), (cfg.mlp, cfg.mlp_steps))
               if kind == 'cem'}
    rows, losses = [], []
    for T in steps or (None,):
        set_steps(model, T)
        tokens, loss, bits = measure(model, sequences, spelled)
        losses.append(loss)
        name = f'{T}, as trained' if trained == {T} else str(T or 'as trained')
        rows.append([name, f'{tokens:,}', f'{loss:.4f}', f'{perplexity(loss):.3f}', f'{bits:.4f}'])
    text = table(['T', 'tokens', *LOSSES], rows)
    if not steps:
        return text, None
    figure = Figure((5, 3.5), layout='constrained')
    axes = figure.subplots()
    axes.plot(steps, losses, marker='o')
    axes.set(xlabel='T at test time (dashed: as trained)', ylabel=LOSSES[0])
    for T in trained:
        axes.axvline(T, color='gray', ls='--', lw=1)
    return text, figure


# Energies

@torch.no_grad()
def energies_along(sublayer: CEMAttention | CEMMLP, x: Tensor, *rest: Any, steps: int) -> Tensor:
    """A CEM sublayer's energy at each u_t of its steps from x, u_0 to u_steps: (steps + 1, B, J).
    `rest`: what forward takes after x."""
    normed: list[Tensor] = []  # h, u_0, u_1, ...
    hook = sublayer.norm.register_forward_hook(lambda norm, given, out: normed.append(out))
    trained_T = sublayer.T
    sublayer.T = steps + 1
    sublayer.forward(x, *rest)
    sublayer.T = trained_T
    hook.remove()
    return torch.stack([sublayer.energy(u, normed[0]) for u in normed[1:]])


@torch.no_grad()
def energies(model: Transformer, x: Tensor, steps: int) -> dict[str, np.ndarray]:
    """The energy of every CEM sublayer at its steps 0 to `steps`, mean over the tokens x (B, J);
    what comes to a sublayer is that of the model as it stands."""
    layers = {f'{kind} {n}': getattr(block, kind) for kind in ('attn', 'mlp')
              for n, block in enumerate(model.blocks, 1) if getattr(block, kind).cem}
    inputs: dict[Any, tuple[Any, ...]] = {}
    hooks = [layer.register_forward_pre_hook(inputs.__setitem__) for layer in layers.values()]
    model.hidden(x)
    for hook in hooks:
        hook.remove()
    return {name: energies_along(layer, *inputs[layer], steps=steps).mean(dim=(1, 2)).cpu().numpy()
            for name, layer in layers.items()}


def report_energies(model: Transformer, sequences: Tensor, steps: int) -> Report:
    """Of each CEM sublayer, as trained, along its steps and beyond them."""
    x = sequences[:max(1, 4096 // sequences.shape[1]), :-1].clamp(min=0)
    by_layer = energies(model, x.to(model.embedding.device), steps)
    figure = Figure((9, 3.5), layout='constrained')
    for axes, kind in zip(figure.subplots(1, 2), ('attn', 'mlp'), strict=True):
        axes.set(title=kind, xlabel='step (dashed: as trained)', ylabel='energy, less that at 0')
        for name, along in by_layer.items():
            if name.startswith(kind):
                axes.plot(along - along[0], marker='o', ms=3, label=name)
        if axes.lines:
            axes.legend(fontsize=7)
            axes.axvline(getattr(model.cfg, f'{kind}_steps'), color='gray', ls='--', lw=1)
    rows = [[name, *(f'{energy:.4g}' for energy in along)] for name, along in by_layer.items()]
    return table(['energy at step', *map(str, range(steps + 1))], rows), figure


# Attention

@torch.no_grad()
def attention_maps(model: Transformer, idx: Tensor) -> list[Tensor]:
    """alpha_ijk of ids (1, J), at each step of each layer: a (T, K, J, J) a layer."""
    maps: dict[BaseAttention, list[Tensor]] = {block.attn: [] for block in model.blocks}

    def record(attn: BaseAttention, scores: Any) -> Any:
        def recorded(*args: Any) -> Tensor:
            a = scores(*args)
            maps[attn].append(a.softmax(dim=-1)[0].cpu())
            return a
        return recorded

    # Only the readable lines ask for all scores of a step
    for attn in maps:
        attn.impl, attn.scores = 'readable', record(attn, attn.scores)
    model.hidden(idx)
    for attn in maps:
        del attn.impl, attn.scores
    return [torch.stack(steps) for steps in maps.values()]


def moved(maps: Tensor) -> Tensor:
    """The share of each head's attention that goes elsewhere with each further step, mean over
    queries: (T, K, J, J) -> (T - 1, K)."""
    return maps.diff(dim=0).abs().sum(dim=-1).mean(dim=-1) / 2


def report_attention(model: Transformer, tokenizer: Any, text: str) -> Report:
    """The share of attention that each step moves; and, layers down and heads across, the maps of
    the first step, and below them what the others change."""
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    if not 1 < len(ids) <= model.cfg.context_length:
        fail(f'attention: the text has {len(ids) - 1} tokens; expected 1 to '
             f'{model.cfg.context_length - 1}')
    words = ['BOS', *(tokenizer.decode([i]) for i in ids[1:])]
    maps = attention_maps(model, torch.tensor([ids], device=model.embedding.device))
    T, K = maps[0].shape[:2]
    figure = Figure((1 + 1.3 * K, 0.5 + 1.4 * T * len(maps)), layout='constrained')
    figure.suptitle('query down, key across\nred: more than a step before', fontsize=7)
    panels = figure.subplots(T * len(maps), K, squeeze=False)
    for row, line in enumerate(panels):
        n, t = divmod(row, T)
        for k, axes in enumerate(line):
            if t == 0:
                axes.imshow(maps[n][0, k].sqrt().numpy(), cmap='Greys', vmin=0, vmax=1)
                axes.set_title(f'head {k + 1}', fontsize=7)
            else:
                change = (maps[n][t, k] - maps[n][t - 1, k]).numpy()
                top = max(abs(change).max(), 1e-9)
                axes.imshow(change, cmap='RdBu_r', vmin=-top, vmax=top)
                axes.set_title(f'{float(moved(maps[n])[t - 1, k]):.1%} moved', fontsize=7)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(f'layer {n + 1}\nstep {t + 1}', fontsize=7)
        if len(words) <= 24:
            line[0].set_yticks(range(len(words)), words, fontsize=5, parse_math=False)
    header = ['attention moved', *(f'by step {t}' for t in range(2, T + 1))]
    rows = [[f'layer {n}', *(f'{share:.2%}' for share in moved(layer).mean(dim=1).tolist())]
            for n, layer in enumerate(maps, 1)]
    return table(header, rows), figure


# Runs side by side

def compare(folders: tuple[str, ...]) -> Report:
    """Training loss of runs against tokens and hours, and their results."""
    figure = Figure((9, 4), layout='constrained')
    panels = figure.subplots(1, 2, sharey=True)
    names = ('parameters', 'tokens', 'val_loss', 'test_loss', 'test_perplexity')
    rows = []
    for folder in folders or fail('compare: expected folders of runs, as in --compare out/a out/b'):
        config = read_config(folder) or fail(f'{folder}: no run: no config.json that can be read')
        lines = [line for line in read_json_lines(f'{folder}/log.jsonl') if line.get('loss')]
        logged = [[line[name] for name in ('tokens', 'tokens_per_s', 'loss')] for line in lines
                  if line.get('tokens')] or fail(f'{folder}: no run: no logged step')
        tokens, rates, losses = np.array(logged).T
        hours = np.cumsum(np.diff(tokens, prepend=0) / rates) / 3600
        window = max(1, len(losses) // 20)
        smooth = np.convolve(losses, np.ones(window) / window, 'valid')
        for axes, x in zip(panels, (tokens, hours), strict=True):
            axes.plot(x[window - 1:], smooth)
        result = read_json(f'{folder}/result.json') or {}
        rows.append([folder, *(f'{result[name]:,.7g}' if result.get(name) else '' for name in names),
                     f'{hours[-1]:.3f}', str(config['train'].get('data'))])
    panels[0].set(xlabel='tokens', ylabel=f'training {LOSSES[0]}')
    panels[1].set(xlabel='hours')
    # given with their lines, names may begin with _; not parsed, they may hold $
    for text in panels[0].legend(panels[0].lines, folders, fontsize=7).get_texts():
        text.set_parse_math(False)
    return table(['run', *names, 'hours', 'data'], rows), figure


# Tables, pictures, the command line

def show(folder: str, name: str, report: Report, subject: str = '') -> None:
    """Print what a report is of, and its table; then write both to name.md, and the picture, if
    there is one, to name.png. Where they cannot be written, a warning: the numbers were printed."""
    text, figure = report
    if subject:
        text = f'{subject}\n\n{text}'
    say(text)
    files = {f'{name}.md': f'{text}\n'.encode('utf-8', 'replace')}
    if figure is not None:
        picture = io.BytesIO()
        figure.savefig(picture, dpi=100)
        files[f'{name}.png'] = picture.getvalue()
    try:
        os.makedirs(folder, exist_ok=True)
        for file, content in files.items():
            write_atomic(os.path.join(folder, file), content)
        say(f'{folder}: {", ".join(files)}')
    except OSError as error:
        say(f'WARNING: {folder}: {", ".join(files)} not written ({error.strerror})')


@command_line
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
    if (cfg.steps or cfg.energies) and 'cem' not in (model.cfg.attn, model.cfg.mlp):
        fail(f'{out_dir} is all Llama; steps and energies are those of CEM sublayers')
    losses = bool(cfg.steps) or not (cfg.energies or cfg.attention or cfg.export)
    if cfg.export:
        export(model, cfg.export, state, getattr(torch, cfg.export_dtype))
        say(f'{cfg.export}: transformers loads it, as its README.md says')

    # of what the reports are, and where they go: out_dir may be exported, or a checkpoint's file
    folder, weights = out_dir, f'{cfg.checkpoint} checkpoint of {out_dir}'
    if 'folder' in state:
        folder, weights = f'out/results/{os.path.basename(os.path.abspath(out_dir))}', out_dir
    elif os.path.isfile(out_dir):
        folder, weights = os.path.dirname(out_dir) or '.', out_dir
    text = cfg.text or f'{cfg.split} split of {cfg.data or state["data_dir"]}'
    subject = f'{weights}, step {state["step"]}; {text}'
    if losses or cfg.energies:
        sequences = read_sequences(cfg, state, model.cfg.context_length)
    if losses or cfg.attention:
        tokenizer = load_tokenizer(cfg.data, state['data']) if cfg.data else tokenizer_of(state)
    if cfg.energies:
        report = report_energies(model, sequences, max(cfg.steps, default=8))
        show(folder, 'energies', report, subject)
    if cfg.attention:
        set_steps(model, max(cfg.steps, default=None))
        report = report_attention(model, tokenizer, cfg.attention)
        show(folder, 'attention', report, f'{weights}; {cfg.attention!r:.80}')
    if losses:
        report = report_loss(model, sequences, tokenizer.token_bytes(), cfg.steps)
        show(folder, 'steps' if cfg.steps else 'loss', report, subject)


if __name__ == '__main__':
    main(sys.argv[1:])

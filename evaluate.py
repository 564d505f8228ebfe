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
--compare into out/results/compare.
"""
import io
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from configurator import build, check_values, fail, read_options
from model import Attention, ModelConfig, Transformer
from nanocem.fast import LOGITS_AT_ONCE, NO_TARGET, flops_per_token
from nanocem.figures import energies_along
from nanocem.files import read_json, read_json_lines, say, table, write_whole
from nanocem.hf import export
from nanocem.runs import load_run, newest_run, perplexity, read_config
from nanocem.shards import Sequences, evenly_spaced
from nanocem.sources import text_of
from nanocem.tokenizers import load_tokenizer

Report = tuple[str, Figure]  # a table and a picture
LOSSES = ['loss, nats a token', 'perplexity', 'bits a byte']


@dataclass
class EvaluateConfig:
    """What to report."""
    out_dir: str | None = None  # the run; default: the newest under out/
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
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda where there is one

    def __post_init__(self) -> None:
        if self.text is not None and self.data is not None:
            raise ValueError(f'text={self.text} and data={self.data}: give one')
        if self.tokens < 1:
            raise ValueError(f'tokens={self.tokens}: expected at least 1')
        if any(not 1 <= T <= 1000 for T in self.steps):
            raise ValueError(f'steps={",".join(map(str, self.steps))}: expected 1 to 1,000 each')


# What is read

def read_sequences(cfg: EvaluateConfig, state: dict[str, Any], tokenizer: Any,
                   length: int) -> Tensor:
    """(n, length + 1), evenly spaced in the text or the split, cfg.tokens tokens of them at most;
    NO_TARGET behind the end of a text, all of whose tokens but BOS are targets once."""
    if cfg.text is not None:
        ids = torch.tensor([tokenizer.bos, *tokenizer.encode(text_of(cfg.text, 'text='))])
        length = min(length, len(ids) - 1) or fail(f'text={cfg.text} is empty')
        ids = F.pad(ids, (0, -(len(ids) - 1) % length), value=NO_TARGET)
        sequences = ids.unfold(0, length + 1, length)
        return sequences[evenly_spaced(len(sequences), cfg.tokens // length)]
    folder = cfg.data or state['data_dir']
    data = Sequences(folder, cfg.split, length)
    for name in ('tokenizer', 'tokenizer_sha256', 'vocab_size'):
        if data.identity[name] != state['data'][name]:
            fail(f'data={folder}: its {name} is {data.identity[name]}, that of the run '
                 f'{state["data"][name]}; expected data of the same tokenizer')
    x, y = data.batch(evenly_spaced(len(data), cfg.tokens // length))
    return torch.cat([x, y[:, -1:]], dim=1)


def bytes_of_tokens(tokenizer: Any) -> Tensor:
    """How many bytes of text each token spells, (vocabulary,): BOS and its like none."""
    if tokenizer.name == 'byte':
        return torch.tensor([1] * 256 + [0])
    if tokenizer.name == 'gpt2':
        decode = tokenizer.bpe.decode_single_token_bytes
        return torch.tensor([len(decode(i)) for i in range(tokenizer.bos)] + [0])
    spelled = []
    model = tokenizer.model
    for i in range(tokenizer.vocab_size):
        if model.is_byte(i):
            spelled.append(1)
        elif model.is_control(i) or model.is_unknown(i):
            spelled.append(0)
        else:  # SentencePiece's sign for a space is three bytes long
            spelled.append(len(model.id_to_piece(i).replace('\u2581', ' ').encode()))
    return torch.tensor(spelled)


# Loss, with the steps of training or others

class Measured(NamedTuple):
    """Losses in nats."""
    tokens: int
    loss: float  # a token
    bits_per_byte: float  # of the tokens that spell text: comparable across tokenizers
    by_position: np.ndarray  # loss at positions 1 to J of the context


@torch.no_grad()
def measure(model: Transformer, sequences: Tensor, spelled: Tensor) -> Measured:
    """The loss of every target in sequences (n, J + 1), what stands before it in its own sequence
    being its context; `spelled`: the bytes of each token."""
    device = model.embedding.device
    J = sequences.shape[1] - 1
    nats = torch.zeros(J, dtype=torch.float64)
    count = torch.zeros(J, dtype=torch.int64)
    text_nats, text_bytes = 0.0, 0
    for block in sequences.split(max(1, min(32, LOGITS_AT_ONCE // (J * model.cfg.vocab_size)))):
        x, y = block[:, :-1].clamp(min=0), block[:, 1:]  # (B, J)
        logits = model(x.to(device))[0].float().flatten(0, 1)
        losses = F.cross_entropy(logits, y.to(device).flatten(), reduction='none',
                                 ignore_index=NO_TARGET).view(y.shape).cpu().double()
        nats += losses.sum(dim=0)
        count += (y != NO_TARGET).sum(dim=0)
        bytes_of_y = spelled[y.clamp(min=0)] * (y != NO_TARGET)
        text_nats += float(losses[bytes_of_y > 0].sum())
        text_bytes += int(bytes_of_y.sum())
    bits = text_nats / math.log(2) / text_bytes if text_bytes else math.nan
    return Measured(int(count.sum()), float(nats.sum() / count.sum()), bits, (nats / count).numpy())


def set_steps(model: Transformer, T: int | None) -> None:
    """T steps in every CEM sublayer; Llama's stay, and all where T is None."""
    cfg = model.cfg
    model.set_steps(T if cfg.attn == 'cem' else None, T if cfg.mlp == 'cem' else None)


def report_loss(model: Transformer, sequences: Tensor, spelled: Tensor,
                steps: tuple[int, ...] = ()) -> Report:
    """As trained, or for each T of `steps`; the model goes on with the last of them. The picture:
    loss by position in the context, in about twenty bins that widen with it, and against T."""
    cfg = model.cfg
    trained = {T for kind, T in ((cfg.attn, cfg.attn_steps), (cfg.mlp, cfg.mlp_steps))
               if kind == 'cem'}
    figure = Figure((9 if steps else 5, 3.5), layout='constrained')
    by_position, *by_steps = figure.subplots(1, 2 if steps else 1, squeeze=False)[0]
    by_position.set(xscale='log', xlabel='position in the context', ylabel=LOSSES[0])
    rows, losses = [], []
    for T in steps or (None,):
        set_steps(model, T)
        measured = measure(model, sequences, spelled)
        losses.append(measured.loss)
        name = str(T or 'as trained')
        if trained == {T}:
            name += ', as trained'
        rows.append([name, f'{measured.tokens:,}', f'{measured.loss:.4f}',
                     f'{perplexity(measured.loss):.3f}', f'{measured.bits_per_byte:.4f}'])
        edges = np.unique(np.geomspace(1, len(measured.by_position) + 1, 21).astype(int))[:-1]
        widths = np.diff(edges, append=len(measured.by_position) + 1)
        mean = np.add.reduceat(measured.by_position, edges - 1) / widths
        by_position.plot(edges + (widths - 1) / 2, mean, marker='o', ms=3, label=f'T: {name}')
    by_position.legend(fontsize=7)
    for axes in by_steps:
        axes.plot(steps, losses, marker='o')
        axes.set(xlabel='T at test time (dashed: as trained)', ylabel=LOSSES[0])
        for T in trained:
            axes.axvline(T, color='gray', ls='--', lw=1)
    return table(['T', 'tokens', *LOSSES], rows), figure


# Energies

@torch.no_grad()
def energies(model: Transformer, x: Tensor, steps: int) -> dict[str, np.ndarray]:
    """The energy of every CEM sublayer at its steps 0 to `steps`, mean over the tokens x (B, J);
    what comes to a sublayer is that of the model as it stands."""
    along = {}

    def record(name: str, layer: Any, args: tuple[Any, ...]) -> None:
        along[name] = energies_along(layer, *args, steps=steps).mean(dim=(1, 2)).cpu().numpy()
    layers = {f'{kind} {n}': getattr(block, kind) for kind in ('attn', 'mlp')
              for n, block in enumerate(model.blocks, 1) if getattr(block, kind).cem}
    hooks = [layer.register_forward_pre_hook(partial(record, name))
             for name, layer in layers.items()]
    model.hidden(x)
    for hook in hooks:
        hook.remove()
    return {name: along[name] for name in layers}


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
    maps: dict[Attention, list[Tensor]] = {block.attn: [] for block in model.blocks}
    plain_scores = Attention.scores

    def scores(attn: Attention, *args: Any) -> Tensor:
        a = plain_scores(attn, *args)
        maps[attn].append(a.softmax(dim=-1)[0].cpu())
        return a

    # only the readable path asks for all scores of a step
    readable = patch.object(model.cfg, 'attn_impl', 'readable')
    with readable, patch.object(Attention, 'scores', scores):
        model.hidden(idx)
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

class History(NamedTuple):
    """A run from its files."""
    data: str  # the folder that it was trained on
    model: ModelConfig
    losses: np.ndarray  # training, nats a token, at the logged steps
    spent: dict[str, np.ndarray]  # until then: tokens, FLOPs, hours
    val_loss: float  # the last; NaN where there is none yet
    cells: list[str]  # its row in the table


HEADER = ['run', 'weights', 'tokens', 'FLOPs', 'hours', 'val loss', 'test loss', 'perplexity']


def number(value: Any) -> float:
    """A number of a log; NaN for null, which is a log's NaN, and for whatever damage put there."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.nan


def read_history(folder: str) -> History:
    """SystemExit where there is no run, none that has logged a step, or a damaged one."""
    config = read_config(folder) or fail('no run: no config.json that can be read')
    options = check_values(config['model'], f'{folder}/config.json', ModelConfig)
    with torch.device('meta'):
        model = Transformer(build(ModelConfig, options))
    try:
        lines = read_json_lines(os.path.join(folder, 'log.jsonl'))
    except OSError as error:
        fail(f'no run: no log.jsonl ({error.strerror})')
    logged = [[number(line.get(name)) for name in ('tokens', 'tokens_per_s', 'loss')]
              for line in lines]
    logged = [row for row in logged if row[0] > 0 and row[1] > 0 and math.isfinite(row[2])]
    if not logged:
        fail('no run: no logged step')
    tokens, rates, losses = np.array(logged).T
    hours = np.cumsum(np.diff(tokens, prepend=0) / rates) / 3600
    spent = {'tokens': tokens, 'FLOPs': tokens * flops_per_token(model), 'hours': hours}
    val_loss = [math.nan, *(number(line['val_loss']) for line in lines if 'val_loss' in line)][-1]
    # a run that went on has logged more steps than its older result counts
    result = read_json(os.path.join(folder, 'result.json')) or {}
    last_step = max((line['step'] for line in lines if type(line.get('step')) is int), default=0)
    test_loss = number(result.get('test_loss')) if result.get('steps') == last_step else math.nan
    return History(str(config['train'].get('data')), model.cfg, losses, spent, val_loss, [
        folder, f'{model.num_params():,}', f'{tokens[-1]:,.0f}', f'{spent["FLOPs"][-1]:.2e}',
        f'{hours[-1]:.3f}', f'{val_loss:.4f}', f'{test_loss:.4f}', f'{perplexity(test_loss):.3f}'])


def bytes_a_token(data: str, length: int) -> float:
    """Of a data folder's validation split; NaN where the folder or its tokenizer is not here."""
    try:
        tokenizer = load_tokenizer(data)
        split = Sequences(data, 'val', length, tokenizer.vocab_size)
        _, y = split.batch(evenly_spaced(len(split), 2_000_000 // length))
    except SystemExit:
        return math.nan
    return float(bytes_of_tokens(tokenizer)[y].double().mean()) or math.nan


def results(runs: list[History]) -> str:
    """A row a run. Losses a token compare within one data folder and vocabulary: runs of several
    are ranked by bits a byte, or, where the bytes of one are not known, apart."""
    groups: dict[Any, list[History]] = {}
    for n in np.argsort([run.val_loss for run in runs]):  # NaN comes last
        key = os.path.realpath(runs[n].data), runs[n].model.vocab_size
        groups.setdefault(key, []).append(runs[n])
    if len(groups) == 1:
        return table(HEADER, [run.cells for group in groups.values() for run in group])
    sizes = [bytes_a_token(group[0].data, group[0].model.context_length)
             for group in groups.values()]
    if any(map(math.isnan, sizes)):
        parts = ['Of different data: losses a token do not compare from table to table.']
        for group in groups.values():
            parts.append(f'{group[0].data}, vocabulary {group[0].model.vocab_size:,}:')
            parts.append(table(HEADER, [run.cells for run in group]))
        return '\n\n'.join(parts)
    bits, rows = [], []
    for size, group in zip(sizes, groups.values(), strict=True):
        for run in group:
            bits.append(run.val_loss / math.log(2) / size)
            rows.append([*run.cells, f'{bits[-1]:.4f}', run.data])
    return ('Of different data: best first by bits a byte, of the validation text of each.\n\n'
            + table([*HEADER, 'bits a byte', 'data'], [rows[n] for n in np.argsort(bits)]))


def compare(folders: tuple[str, ...]) -> Report:
    """Training loss of runs against tokens, FLOPs and time; and their results."""
    runs = []
    for folder in folders:
        try:
            runs.append(read_history(folder))
        except SystemExit as error:
            reason = str(error).partition(': ')[2]  # behind the name of the program
            say(f'{folder}: {reason}; passed over')
    if not runs:
        fail('compare: no runs; expected their folders, as in --compare out/a out/b')
    figure = Figure((13, 4), layout='constrained')
    panels = figure.subplots(1, 3, sharey=True)
    for axes, unit in zip(panels, ('tokens', 'FLOPs', 'hours'), strict=True):
        for run in runs:
            window = max(1, len(run.losses) // 20)
            smooth = np.convolve(run.losses, np.ones(window) / window, 'valid')
            axes.plot(run.spent[unit][window - 1:], smooth)
        axes.set(xlabel=unit)
    panels[0].set_ylabel(f'training {LOSSES[0]}')
    # given with their lines, names may begin with _; not parsed, they may hold $
    names = [os.path.basename(run.cells[0].rstrip('/')) for run in runs]
    for text in panels[0].legend(panels[0].lines, names, fontsize=7).get_texts():
        text.set_parse_math(False)
    return results(runs), figure


# Tables, pictures, the command line

def show(folder: str, name: str, report: Report, subject: str = '') -> None:
    """Print what a report is of, and its table; then write both and the picture to name.md and
    name.png. Where they cannot be written, a warning: the numbers were printed."""
    text, figure = report
    if subject:
        text = f'{subject}\n\n{text}'
    say(text)
    path = os.path.join(folder, name)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100)
    try:
        os.makedirs(folder, exist_ok=True)
        write_whole(f'{path}.md', f'{text}\n'.encode('utf-8', 'replace'))
        write_whole(f'{path}.png', picture.getvalue())
        say(f'{path}.md and .png')
    except OSError as error:
        say(f'WARNING: {path}.md and .png not written ({error.strerror}); the numbers are above')


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
        export(model, cfg.export, state)
        say(f'{cfg.export}: transformers loads it, as its README.md says')

    # of what the reports are, and where they go: out_dir may be a checkpoint's file
    is_file = os.path.isfile(out_dir)
    folder = os.path.dirname(out_dir) or '.' if is_file else out_dir
    weights = out_dir if is_file else f'{cfg.checkpoint} checkpoint of {out_dir}'
    text = cfg.text or f'{cfg.split} split of {cfg.data or state["data_dir"]}'
    subject = f'{weights}, step {state["step"]}; {text}'
    if losses or cfg.energies or cfg.attention:
        tokenizer = load_tokenizer(state['data_dir'])
    if losses or cfg.energies:
        sequences = read_sequences(cfg, state, tokenizer, model.cfg.context_length)
    if cfg.energies:
        report = report_energies(model, sequences, max(cfg.steps, default=8))
        show(folder, 'energies', report, subject)
    if cfg.attention:
        set_steps(model, max(cfg.steps, default=None))
        report = report_attention(model, tokenizer, cfg.attention)
        show(folder, 'attention', report, f'{weights}; {cfg.attention!r:.80}')
    if losses:
        report = report_loss(model, sequences, bytes_of_tokens(tokenizer), cfg.steps)
        show(folder, 'steps' if cfg.steps else 'loss', report, subject)


if __name__ == '__main__':
    main(sys.argv[1:])

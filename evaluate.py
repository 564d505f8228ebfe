"""
Evaluate a trained model.

    python evaluate.py                         loss, perplexity, bits per byte of the newest run
    python evaluate.py --text=book.txt         the same on a text; --data=FOLDER: on other data
    python evaluate.py --steps=1,2,3,4,8       the same for other T at test time
    python evaluate.py --energies              the energy along the steps of every CEM sublayer
    python evaluate.py --attention="The cat"   the attention maps of a text, and what steps change
    python evaluate.py --compare out/a out/b   curves of runs on one picture, and a table of results
    python evaluate.py --export=DIR            a folder that Hugging Face's transformers loads

Tables and pictures go into the run's folder: loss.md is about the test split, loss-book.txt.md
about a text. --out_dir can also name an exported folder; its tables and pictures go into a folder
in out/results, and those of --compare into out/results/compare.
"""
import io
import math
import os
import re
import shlex
import sys
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from configurator import build, command_line, fail, in_range, read_options, require
from model import CEMMLP, BaseAttention, CEMAttention, Transformer
from nanocem.compute import LOGITS_AT_ONCE, NO_TARGET
from nanocem.data import TokenDataset, evenly_spaced
from nanocem.files import read_json, read_json_lines, read_text_file, say, table, write_atomic
from nanocem.hf import export
from nanocem.runs import changed_fields, load_run, newest_run, perplexity, read_config
from nanocem.tokenizers import find_llama_model, load_tokenizer, make_tokenizer, tokenizer_of
from prepare_slimpajama import find_data

Report = tuple[str, Figure | None]  # a Markdown table, and a picture or None


@dataclass
class EvaluateConfig:
    """What to report."""
    out_dir: str | None = None  # the run, or an exported folder; default: the newest under out/
    checkpoint: Literal['best', 'last'] = 'best'  # best by validation, or the last one written
    data: str | None = None  # folder of token shards; default: the run's own
    split: Literal['train', 'val', 'test'] = 'test'  # of the data
    text: str | None = None  # a UTF-8 text file to read instead
    tokens: int = 500_000  # evaluate at most this many, in evenly spaced sequences
    steps: tuple[int, ...] = ()  # T of all CEM sublayers; energies, attention: the largest
    energies: bool = False  # energies at steps 0 to 8, or to the largest of steps
    attention: str | None = None  # a text whose attention maps to show
    compare: tuple[str, ...] = ()  # folders of runs; written --compare out/a out/b
    export: str | None = None  # a new folder for the model in transformers' format
    export_dtype: Literal['float32', 'bfloat16'] = 'float32'  # of its weights
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda if there is one

    def __post_init__(self) -> None:
        require(self.attention != '', 'attention= is empty: expected a text')
        in_range(self, 1, 10**12, 'tokens')
        require(all(1 <= T <= 1000 for T in self.steps),
                f'steps={",".join(map(str, self.steps))}: expected 1 to 1,000 each')


# The sequences

def read_sequences(cfg: EvaluateConfig, state: dict[str, Any], tokenizer: Any, length: int,
                   ) -> tuple[Tensor, int]:
    """Return evenly spaced sequences (n, length + 1), at most cfg.tokens tokens, and how many
    sequences the whole text or split has. In a text, each token but BOS is the target of one
    sequence, and NO_TARGET pads the last sequence."""
    if cfg.text is not None:
        ids = torch.tensor([tokenizer.bos, *tokenizer.encode(read_text_file(cfg.text, 'text='))])
        require(len(ids) > 1, f'text={cfg.text} is empty')
        length = min(length, len(ids) - 1)
        ids = F.pad(ids, (0, -(len(ids) - 1) % length), value=NO_TARGET)
        sequences = ids.unfold(0, length + 1, length)
        chosen = evenly_spaced(len(sequences), cfg.tokens // length)
        return sequences[chosen], len(sequences)
    folder = find_data(cfg.data) if cfg.data else state['data_dir']
    require(bool(cfg.data) or os.path.exists(folder),
            f'{folder}, which the model was trained on, is not here: --data=data/builtin makes '
            "this Python's source, --text=FILE reads a text")
    data = TokenDataset(folder, cfg.split, length)
    for name in ('tokenizer', 'tokenizer_sha256', 'vocab_size'):
        require(data.identity[name] == state['data'][name],
                f'data={folder}: its {name} is {data.identity[name]}, that of the run '
                f'{state["data"][name]}; expected data of the same tokenizer')
    require(bool(cfg.data) or not changed_fields(state['data'], data.identity),
            f'the {cfg.split} split of {folder} has changed since the run was trained; '
            f'--data={shlex.quote(folder)} reads it as it is now')
    x, y = data.batch(evenly_spaced(len(data), cfg.tokens // length))
    return torch.cat([x, y[:, -1:]], dim=1), len(data)


def count_llama_tokens(sequences: Tensor, tokenizer: Any, folder: str) -> int | None:
    """Count the Llama tokens of the text of the targets. None if Llama's tokenizer.model is
    neither in the data folder nor at $LLAMA_TOKENIZER."""
    path = find_llama_model(folder)
    if path is None:
        return None
    ids = sequences[:, 1:].flatten()
    ids = ids[ids != NO_TARGET]
    documents = ids.tensor_split((ids == tokenizer.bos).nonzero().flatten())
    texts = (tokenizer.decode(part[part != tokenizer.bos].tolist()) for part in documents)
    llama = make_tokenizer('llama', path)
    return sum(len(llama.encode(text)) for text in texts)


# Loss, with T as trained or another T

@torch.no_grad()
def evaluate_loss(model: Transformer, sequences: Tensor, token_bytes: Tensor,
                  ) -> tuple[int, float, int, float]:
    """Return the number of targets in sequences (n, J + 1) and their summed loss in nats; then the
    number of bytes of the targets that are text, and the summed loss of these. `token_bytes`
    (vocabulary,) is the number of bytes of each token."""
    device = model.embedding.device
    at_once = LOGITS_AT_ONCE // ((sequences.shape[1] - 1) * model.cfg.vocab_size)
    n_tokens, nats = 0, 0.0
    text_bytes, text_nats = 0, 0.0
    for block in sequences.split(max(1, min(32, at_once))):
        x, y = block[:, :-1].clamp(min=0), block[:, 1:].flatten()
        logits = model(x.to(device))[0].float().flatten(0, 1)
        losses = F.cross_entropy(logits, y.to(device), reduction='none', ignore_index=NO_TARGET)
        losses = losses.cpu().double()
        n_tokens += int((y != NO_TARGET).sum())
        nats += float(losses.sum())
        bytes_of_y = token_bytes[y.clamp(min=0)] * (y != NO_TARGET)
        text_bytes += int(bytes_of_y.sum())
        text_nats += float(losses[bytes_of_y > 0].sum())
    return n_tokens, nats, text_bytes, text_nats


def set_steps(model: Transformer, T: int | None) -> None:
    """Set T of every CEM sublayer; None leaves it."""
    cfg = model.cfg
    model.set_steps(T if cfg.attn == 'cem' else None, T if cfg.mlp == 'cem' else None)


def report_loss(model: Transformer, sequences: Tensor, token_bytes: Tensor,
                llama_tokens: int | None = None, steps: tuple[int, ...] = ()) -> Report:
    """Report the loss as trained, or at each T of `steps` with a picture of loss against T; the
    model keeps the last T. `llama_tokens` is the text's length in Llama tokens."""
    cfg = model.cfg
    trained = {T for kind, T in ((cfg.attn, cfg.attn_steps), (cfg.mlp, cfg.mlp_steps))
               if kind == 'cem'}
    header = ['T', 'tokens', 'loss, nats a token', 'perplexity', 'bits a byte',
              *['perplexity a Llama token'] * bool(llama_tokens)]
    rows, losses = [], []
    for T in steps or (None,):
        set_steps(model, T)
        n_tokens, nats, text_bytes, text_nats = evaluate_loss(model, sequences, token_bytes)
        losses.append(nats / n_tokens)
        bits = text_nats / math.log(2) / text_bytes if text_bytes else math.nan
        rows.append([f'{T}, as trained' if trained == {T} else str(T or 'as trained'),
                     f'{n_tokens:,}', f'{losses[-1]:.4f}', f'{perplexity(losses[-1]):.3f}',
                     f'{bits:.4f}'])
        if llama_tokens:
            rows[-1].append(f'{perplexity(text_nats / llama_tokens):.3f}')
    if not steps:
        return table(header, rows), None
    figure = Figure((5, 3.5), layout='constrained')
    axes = figure.subplots()
    axes.plot(steps, losses, marker='o')
    axes.set(xlabel='T at test time (dashed: as trained)', ylabel='loss, nats a token')
    for T in trained:
        axes.axvline(T, color='gray', ls='--', lw=1)
    return table(header, rows), figure


# Energies

@torch.no_grad()
def energies_along(sublayer: CEMAttention | CEMMLP, x: Tensor, *rest: Any, steps: int) -> Tensor:
    """Return a CEM sublayer's energy at u_0 to u_steps for its input x: (steps + 1, B, J). `rest`
    are the other arguments of forward."""
    normed: list[Tensor] = []  # h, u_0, u_1, ...
    hook = sublayer.norm.register_forward_hook(lambda norm, args, out: normed.append(out))
    trained_T = sublayer.T
    sublayer.T = steps + 1
    sublayer.forward(x, *rest)
    sublayer.T = trained_T
    hook.remove()
    return torch.stack([sublayer.energy(u, normed[0]) for u in normed[1:]])


@torch.no_grad()
def energies(model: Transformer, x: Tensor, steps: int) -> dict[str, np.ndarray]:
    """Return the mean energy over the tokens x (B, J) of every CEM sublayer at its steps 0 to
    `steps`. The sublayers before it take their usual number of steps."""
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
    """Report the energy of each CEM sublayer along its steps, those of training and more."""
    x = sequences[:max(1, 4096 // sequences.shape[1]), :-1].clamp(min=0)
    by_layer = energies(model, x.to(model.embedding.device), steps)
    figure = Figure((9, 3.5), layout='constrained')
    for axes, kind in zip(figure.subplots(1, 2), ('attn', 'mlp'), strict=True):
        axes.set(title=kind, xlabel='step (dashed: as trained)', ylabel='energy minus that at 0')
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
    """Return the weights alpha_ijk of ids (1, J) at each step of each layer: a (T, K, J, J) a
    layer. A reused sublayer has its T steps once for each use."""
    maps: dict[BaseAttention, list[Tensor]] = {block.attn: [] for block in model.blocks}

    def record(attn: BaseAttention, scores: Any) -> Any:
        def recorded(*args: Any) -> Tensor:
            a = scores(*args)
            maps[attn].append(a.softmax(dim=-1)[0].cpu())
            return a
        return recorded

    # Only the readable implementation computes all scores of a step
    impl = model.blocks[0].attn.impl
    model.set_attn_impl('readable')
    for attn in maps:
        attn.scores = record(attn, attn.scores)
    model.hidden(idx)
    for attn in maps:
        del attn.scores
    model.set_attn_impl(impl)
    return [torch.stack(steps) for steps in maps.values()]


def attention_shift(maps: Tensor) -> Tensor:
    """Return the fraction of each head's attention that each step after the first moves to
    other keys, averaged over queries: (T, K, J, J) -> (T - 1, K)."""
    return maps.diff(dim=0).abs().sum(dim=-1).mean(dim=-1) / 2


def report_attention(model: Transformer, tokenizer: Any, text: str) -> Report:
    """Report how much attention each step moves. The picture has layers down and heads across: the
    maps of the first step, and below them what each further step changes."""
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    longest = model.cfg.context_length
    require(1 < len(ids) <= longest,
            f'attention: the text has {len(ids) - 1} tokens; expected 1 to {longest - 1}')
    words = ['BOS', *(tokenizer.decode([i]) for i in ids[1:])]
    maps = attention_maps(model, torch.tensor([ids], device=model.embedding.device))
    T, K = maps[0].shape[:2]
    title, largest = 'query down, key across; grey: square root of the weight', 1.0
    if T > 1:
        largest = max(float(layer.diff(dim=0).abs().max()) for layer in maps)
        title += f'\nred, blue: more, less than a step before; full colour is {largest:.2g}'
    figure = Figure((1 + 1.3 * K, 0.5 + 1.4 * T * len(maps)), layout='constrained')
    figure.suptitle(title, fontsize=7, wrap=True)
    panels = figure.subplots(T * len(maps), K, squeeze=False)
    for (row, k), axes in np.ndenumerate(panels):
        n, t = divmod(row, T)
        if t == 0:
            axes.imshow(maps[n][0, k].sqrt().numpy(), cmap='Greys', vmin=0, vmax=1)
            axes.set_title(f'head {k + 1}', fontsize=7)
        else:
            change = maps[n][t, k] - maps[n][t - 1, k]
            axes.imshow(change.numpy(), cmap='RdBu_r', vmin=-largest, vmax=largest)
            shift = float(attention_shift(maps[n])[t - 1, k])
            axes.set_title(f'{shift:.1%} moved', fontsize=7)
        axes.set(xticks=[], yticks=[])
        if k == 0:
            axes.set_ylabel(f'layer {n + 1}' + f'\nstep {t + 1}' * (T > 1), fontsize=7)
            if len(words) <= 24:
                axes.set_yticks(range(len(words)), words, fontsize=5, parse_math=False)
    if T == 1:
        return f'{len(maps)} layers, one step each', figure
    header = ['attention moved', *(f'by step {t}' for t in range(2, T + 1))]
    rows = [[f'layer {n}', *(f'{s:.2%}' for s in attention_shift(layer).mean(dim=1).tolist())]
            for n, layer in enumerate(maps, 1)]
    return table(header, rows), figure


# Runs side by side

def compare(folders: list[str]) -> Report:
    """Report the results of runs, and draw their training losses against tokens and hours; a row of
    panels for each data folder. UserError if a folder has no logged step."""
    curves: dict[str, list[tuple[str, np.ndarray, np.ndarray]]] = {}  # of each data folder
    names = ('parameters', 'tokens', 'val_loss', 'test_loss', 'test_bits_per_byte')
    rows = []
    for folder in dict.fromkeys(folders):
        config = read_config(folder) or fail(f'{folder}: no run: no config.json that can be read')
        log = [[line.get(name) for name in ('tokens', 'tokens_per_s', 'loss')]
               for line in read_json_lines(f'{folder}/log.jsonl')]
        log = [line for line in log if all(type(x) in (int, float) and x > 0 for x in line)]
        tokens, rates, losses = np.array(log or fail(f'{folder}: no run: no logged step')).T
        hours = np.cumsum(np.diff(tokens, prepend=0) / rates) / 3600
        window = max(1, len(losses) // 20)
        smooth = np.convolve(losses, np.ones(window) / window, 'valid')
        data = os.path.relpath(str(config['train'].get('data')))
        x = np.stack([tokens, hours])[:, window - 1:]
        curves.setdefault(data, []).append((folder, x, smooth))
        result = read_json(f'{folder}/result.json') or {}
        cells = [f'{result[name]:,.7g}' if type(result.get(name)) in (int, float) else ''
                 for name in names]
        rows.append([folder, *cells, f'{hours[-1]:.3f}', data])
    figure = Figure((9, 0.5 + 3.5 * len(curves)), layout='constrained')
    panels = figure.subplots(len(curves), 2, squeeze=False, sharey='row')
    for line, (data, runs) in zip(panels, curves.items(), strict=True):
        for axes, n, unit in zip(line, (0, 1), ('tokens', 'hours'), strict=True):
            axes.set(xlabel=unit, ylabel='training loss, nats a token')
            for _, x, smooth in runs:
                axes.plot(x[n], smooth, marker='o' if len(smooth) == 1 else None)
        line[0].set_title(data, fontsize=8, parse_math=False)
        # A legend without its lines leaves out names that begin with _
        legend = line[0].legend(line[0].lines, [folder for folder, *_ in runs], fontsize=7)
        for text in legend.get_texts():
            text.set_parse_math(False)
    return table(['run', *names, 'hours', 'data'], rows), figure


# Tables, pictures, the command line

def file_name(text: str) -> str:
    """Return a file name for a path or text: itself if it is a valid file name, or else its
    beginning and a checksum."""
    name = re.sub(r'[^\w.]+', '-', text, flags=re.A)[:40].strip('-.')
    return name if name == text else f'{name}-{zlib.crc32(text.encode("utf-8", "replace")):08x}'


def print_report(folder: str, about: list[str | None], report: Report, subject: str = '') -> None:
    """Print a report's subject and table, and write both to a .md file and its picture, if any, to
    a .png file. Their name says what the report is about. If they cannot be written, warn."""
    name = '-'.join(file_name(part) for part in about if part not in (None, 'best.pt', 'test'))
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
    options = read_options([arg for arg in argv if arg not in ('--compare', *folders)],
                           EvaluateConfig)
    cfg = build(EvaluateConfig, options)
    if comparing or 'compare' in options:
        folders = [os.path.expanduser(path) for path in (*cfg.compare, *folders)]
        require(any(folders) and options.keys() <= {'compare'},
                'compare: expected folders of runs and no other option, as --compare out/a out/b')
        return print_report('out/results/compare', [' '.join(folders)], compare(folders))
    out_dir = cfg.out_dir or newest_run() or fail('no run in out/: python train.py makes one')
    model, state = load_run(out_dir, cfg.checkpoint, cfg.device)
    cem = 'cem' in (model.cfg.attn, model.cfg.mlp)
    require(cem or not (cfg.steps or cfg.energies),
            f'{out_dir} is all Llama: steps and energies are those of CEM sublayers')
    if cfg.export:
        export(model, cfg.export, state, getattr(torch, cfg.export_dtype))
        say(f'{cfg.export}: transformers loads it, as its README.md says')
    losses = bool(cfg.steps) or not (cfg.energies or cfg.attention or cfg.export)
    if not (losses or cfg.energies or cfg.attention):
        return None

    # Where the reports go, and what they are about: their files are named after it
    folder, checkpoint = out_dir, None if cfg.checkpoint == 'best' else 'last'
    if 'exported' in state:
        folder, checkpoint = f'out/results/export-{file_name(os.path.normpath(out_dir))}', None
    elif os.path.isfile(out_dir):
        folder, checkpoint = os.path.split(os.path.abspath(out_dir))
    about = [checkpoint, cfg.text, cfg.data, cfg.split if cfg.text is None else None]
    data_dir = cfg.data or state['data_dir']
    weights = f'{cfg.checkpoint} checkpoint of {out_dir}' if folder == out_dir else out_dir
    subject = f'{weights}, step {state["step"]}; {cfg.text or f"{cfg.split} split of {data_dir}"}'

    tokenizer = load_tokenizer(cfg.data, state['data']) if cfg.data else tokenizer_of(state)
    if losses or cfg.energies:
        sequences, n_all = read_sequences(cfg, state, tokenizer, model.cfg.context_length)
    if cfg.energies:
        report = report_energies(model, sequences, max(cfg.steps, default=8))
        print_report(folder, ['energies', *about], report, subject)
    if cfg.attention:
        set_steps(model, max(cfg.steps, default=None))
        report = report_attention(model, tokenizer, cfg.attention)
        print_report(folder, ['attention', checkpoint, cfg.attention], report,
                     f'{weights}; {cfg.attention!r:.80}')
    if losses:
        # Count Llama tokens only in a whole text: pieces of a text have more of them in total
        whole = len(sequences) == n_all
        llama_tokens = count_llama_tokens(sequences, tokenizer, data_dir) if whole else None
        report = report_loss(model, sequences, tokenizer.token_bytes(), llama_tokens, cfg.steps)
        print_report(folder, ['steps' if cfg.steps else 'loss', *about], report, subject)


if __name__ == '__main__':
    main(sys.argv[1:])

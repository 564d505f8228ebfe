"""
Evaluate a trained model.

    python evaluate.py                         loss, perplexity, bits per byte of the newest run
    python evaluate.py --text=book.txt         the same on a text; --data=FOLDER: on other data
    python evaluate.py --steps=1,2,3,4,8       the same for other T at test time
    python evaluate.py --energies              the energy along the steps of every CEM sublayer
    python evaluate.py --attention="The cat"   the attention maps of a text, and what steps change
    python evaluate.py --compare out/a out/b   a table of the results of runs, and their losses
    python evaluate.py --export=DIR            a folder that Hugging Face's transformers loads

Tables are printed. Pictures go into the run's folder: energies.png, attention.png, and loss.png of
--steps. Those of --compare and of an exported folder go into out/results.
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

from configurator import build, check, command_line, convert_types, fail, in_range, read_options
from model import CEMMLP, BaseAttention, CEMAttention, Transformer
from nanocem.data import TOKENIZER_KEYS, TokenDataset, evenly_spaced
from nanocem.files import read_json, read_json_lines, read_text_file, say, table, write_atomic
from nanocem.hf import export
from nanocem.loss import LOGITS_AT_ONCE, NO_TARGET
from nanocem.runs import load_model, newest_run, perplexity, read_config
from nanocem.tokenizers import find_llama_model, make_tokenizer, tokenizer_of
from prepare_slimpajama import find_data

Report = tuple[str, Figure | None]  # a Markdown table, and a picture or None

# Options of each report
DATA_OPTIONS = ('data', 'split', 'text', 'tokens', 'steps')
OPTIONS = {'loss': DATA_OPTIONS, 'energies': DATA_OPTIONS,
           'attention': ('attention', 'steps'), 'export': ('export', 'export_dtype')}


@dataclass
class EvaluateConfig:
    """What to report."""
    out_dir: str | None = None  # a run (its best.pt), a .pt or an export; default: newest in out/
    data: str | None = None  # folder of token shards; default: the run's own
    split: Literal['train', 'val', 'test'] = 'test'  # of the data
    text: str | None = None  # a UTF-8 text file to read instead
    tokens: int = 500_000  # evaluate at most this many, in evenly spaced sequences
    steps: tuple[int, ...] = ()  # each T to test; energies and attention take the largest
    energies: bool = False  # energies at steps 0 to 8, or to the largest of steps
    attention: str | None = None  # a text whose attention maps to show
    compare: bool = False  # compare the runs whose folders follow: --compare out/a out/b
    export: str | None = None  # a new folder for the model in transformers' format
    export_dtype: Literal['float32', 'bfloat16'] = 'float32'  # of its weights
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda if there is one

    def __post_init__(self) -> None:
        convert_types(self)
        check(self.attention != '', 'attention= is empty: expected a text')
        in_range(self, 1, 10**12, 'tokens')
        check(all(1 <= T <= 1000 for T in self.steps),
                f'steps={",".join(map(str, self.steps))}: expected 1 to 1,000 each')


# The sequences

def read_sequences(cfg: EvaluateConfig, state: dict[str, Any], tokenizer: Any, length: int,
                   ) -> tuple[Tensor, bool]:
    """Return evenly spaced sequences (n, length + 1), at most cfg.tokens tokens, and whether they
    are the whole text or split. In a text, each token but BOS is the target of one sequence, and
    NO_TARGET pads the last sequence."""
    if cfg.text is not None:
        ids = torch.tensor([tokenizer.bos, *tokenizer.encode(read_text_file(cfg.text, 'text='))])
        check(len(ids) > 1, f'text={cfg.text} is empty')
        length = min(length, len(ids) - 1)
        ids = F.pad(ids, (0, -(len(ids) - 1) % length), value=NO_TARGET)
        sequences = ids.unfold(0, length + 1, length)
        chosen = evenly_spaced(len(sequences), cfg.tokens // length)
        return sequences[chosen], len(chosen) == len(sequences)
    folder = find_data(cfg.data) if cfg.data else state['data_dir']
    check(bool(cfg.data) or os.path.exists(folder),
            f'{folder}, which the model was trained on, is not here: --text=FILE evaluates on a '
            'text, --data=FOLDER on other data')
    data = TokenDataset(folder, cfg.split, length)
    for name in TOKENIZER_KEYS:
        check(data.must_match[name] == state['data'][name],
                f'data={folder}: its {name} is {data.must_match[name]}, that of the run '
                f'{state["data"][name]}; expected data of the same tokenizer')
    check(bool(cfg.data) or data.must_match.items() <= state['data'].items(),
            f'the {cfg.split} split of {folder} has changed since the run was trained; '
            f'--data={shlex.quote(folder)} reads it as it is now')
    chosen = evenly_spaced(len(data), cfg.tokens // length)
    x, y = data.batch(chosen)
    return torch.cat([x, y[:, -1:]], dim=1), len(chosen) == len(data)


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
    header = ['T', 'tokens', 'loss, nats a token', 'perplexity', 'bits per byte',
              *['perplexity per Llama token'] * bool(llama_tokens)]
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
    """Report the mean energy of each CEM sublayer at steps 0 to `steps`, over the first sequences:
    some 4,096 tokens."""
    x = sequences[:max(1, 4096 // sequences.shape[1]), :-1]
    x = x[(x != NO_TARGET).all(dim=1)]  # without the last sequence of a text if it is padded
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
    """Return the weights alpha_ijk of ids (1, J) at each step, one tensor (T, K, J, J) for each
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
    """Report how much attention each step moves. The picture has the maps: heads across, layers and
    their steps down."""
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    longest = model.cfg.context_length
    check(1 < len(ids) <= longest,
            f'attention: the text has {len(ids) - 1} tokens; expected 1 to {longest - 1}')
    words = ['BOS', *(tokenizer.decode([i]) for i in ids[1:])]
    maps = attention_maps(model, torch.tensor([ids], device=model.embedding.device))
    T, K = maps[0].shape[:2]
    figure = Figure((1 + 1.3 * K, 0.5 + 1.4 * T * len(maps)), layout='constrained')
    figure.suptitle('query down, key across; grey: square root of the weight', fontsize=7)
    panels = figure.subplots(T * len(maps), K, squeeze=False)
    for (row, k), axes in np.ndenumerate(panels):
        n, t = divmod(row, T)
        axes.imshow(maps[n][t, k].sqrt().numpy(), cmap='Greys', vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        if row == 0:
            axes.set_title(f'head {k + 1}', fontsize=7)
        if k == 0:
            axes.set_ylabel(f'layer {n + 1}\nstep {t + 1}', fontsize=7)
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
    """Report the results of runs, and draw their training losses; a panel for each data folder.
    UserError if a folder has no run."""
    names = ('parameters', 'tokens', 'val_loss', 'test_loss', 'test_bits_per_byte', 'seconds')
    rows, by_data = [], {}
    for folder in folders:
        config = read_config(folder) or fail(f'{folder}: no run: no config.json that can be read')
        data = os.path.relpath(str(config['train'].get('data')))
        by_data.setdefault(data, []).append(folder)
        result = read_json(f'{folder}/result.json') or {}
        cells = [f'{result[name]:,.7g}' if type(result.get(name)) in (int, float) else ''
                 for name in names]
        rows.append([folder, *cells, data])
    figure = Figure((7, 4 * len(by_data)), layout='constrained')
    panels = figure.subplots(len(by_data), squeeze=False)[:, 0]
    for axes, (data, runs) in zip(panels, by_data.items(), strict=True):
        axes.set(xlabel='tokens', ylabel='training loss, nats a token')
        axes.set_title(f'data {data}', parse_math=False)
        for folder in runs:
            path = f'{folder}/log.jsonl'  # not there yet if the run has just begun
            lines = read_json_lines(path) if os.path.exists(path) else []
            log = [line for line in lines if line.get('loss') and 'tokens' in line]
            axes.plot([line['tokens'] for line in log], [line['loss'] for line in log], marker='.',
                      ms=3, lw=1, label=f'run {folder}')
        for text in axes.legend(fontsize=7).get_texts():
            text.set_parse_math(False)
    return table(['run', *names, 'data'], rows), figure


# Tables, pictures, the command line

def print_report(subject: str, report: Report, path: str) -> None:
    """Print a report's subject and table, and write its picture, if any, to `path`. If that fails,
    warn."""
    text, figure = report
    say(f'{subject}\n\n{text}')
    if figure is not None:
        picture = io.BytesIO()
        figure.savefig(picture, dpi=100)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomic(path, picture.getvalue())
            say(path)
        except OSError as error:
            say(f'WARNING: {path} not written ({error.strerror})')


def write_reports(cfg: EvaluateConfig, model: Transformer, state: dict[str, Any], out_dir: str,
                  reports: list[str]) -> None:
    """Print the reports of a run."""
    # Pictures go beside the checkpoint, but not into an exported folder
    folder = out_dir if os.path.isdir(out_dir) else os.path.dirname(out_dir) or '.'
    folder = 'out/results' if 'exported' in state else folder
    weights = f'{out_dir}, step {state["step"]}'
    tokenizer = tokenizer_of(state)
    if 'loss' in reports or cfg.energies:
        data_dir = cfg.data or state['data_dir']
        sequences, whole = read_sequences(cfg, state, tokenizer, model.cfg.context_length)
        subject = f'{weights}; {cfg.text or f"{cfg.split} split of {data_dir}"}'
    if cfg.energies:
        report = report_energies(model, sequences, max(cfg.steps, default=8))
        print_report(subject, report, f'{folder}/energies.png')
    if cfg.attention:
        set_steps(model, max(cfg.steps, default=None))
        report = report_attention(model, tokenizer, cfg.attention)
        print_report(f'{weights}; {cfg.attention!r:.80}', report, f'{folder}/attention.png')
    if 'loss' in reports:
        # Llama tokens are counted in a whole text only: pieces of it have more of them in total
        llama_tokens = count_llama_tokens(sequences, tokenizer, data_dir) if whole else None
        report = report_loss(model, sequences, tokenizer.token_bytes(), llama_tokens, cfg.steps)
        print_report(subject, report, f'{folder}/loss.png')


@command_line
def main(argv: list[str]) -> None:
    folders = [arg for arg in argv if '--compare' in argv and not arg.startswith('--')]
    options = read_options([arg for arg in argv if arg not in folders], EvaluateConfig)
    cfg = build(EvaluateConfig, options)
    if cfg.compare:
        check(bool(folders) and len(options) == 1,
                'compare: expected folders of runs and no other option, as --compare out/a out/b')
        return print_report('Runs', compare(folders), 'out/results/compare.png')

    # What to do. An option that none of it uses is refused
    reports = [name for name in ('energies', 'attention', 'export') if getattr(cfg, name)]
    if cfg.steps or not reports:
        reports.append('loss')
    used = {'out_dir', 'device', 'energies'}.union(*(OPTIONS[report] for report in reports))
    for name, value in options.items():
        check(name in used, f'{name}={value}: of no use to {" and ".join(reports)}')
    check(cfg.text is None or 'split' not in options, 'text and split: give one')
    out_dir = cfg.out_dir or newest_run()
    model, state = load_model(out_dir, cfg.device)
    cem = 'cem' in (model.cfg.attn, model.cfg.mlp)
    check(cem or not (cfg.steps or cfg.energies),
            f'{out_dir} is all Llama: steps and energies are those of CEM sublayers')
    if reports != ['export']:
        write_reports(cfg, model, state, out_dir, reports)
    if cfg.export:
        export(model, cfg.export, state, getattr(torch, cfg.export_dtype))
        say(f'{cfg.export}: transformers loads it, as its README.md says')


if __name__ == '__main__':
    main(sys.argv[1:])

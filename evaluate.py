"""
Evaluate a trained model.

    python evaluate.py                         loss, perplexity, bits per byte of the newest run
    python evaluate.py --text=book.txt         the same on a text; --data=FOLDER: on other data
    python evaluate.py --steps=1,2,3,4,8       the same for other T at test time
    python evaluate.py --energies              the energy along the steps of every CEM sublayer, and
                                               whether its first step descends
    python evaluate.py --attention="The cat"   the attention maps of a text, and what steps change
    python evaluate.py --compare out/a out/b   a table of the results of runs, and their losses
    python evaluate.py --export=DIR            a folder that Hugging Face's transformers loads

Tables are printed. Pictures go into the run's folder: energies.png, attention.png, and loss.png of
--steps. Those of --compare and of an exported folder go into out/results.
"""
import io
import math
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from configurator import build, check, command_line, convert_types, fail, in_range, read_options
from model import CEMMLP, BaseAttention, CEMAttention, Transformer
from nanocem.data import TOKENIZER_KEYS, TokenDataset, evenly_spaced
from nanocem.files import read_json, read_json_lines, table, write_atomic
from nanocem.hf import export
from nanocem.loss import LOGITS_AT_ONCE, NO_TARGET
from nanocem.runs import load_model, newest_run, perplexity, read_config
from nanocem.tokenizers import find_llama_model, keeps_text, make_tokenizer, tokenizer_of
from prepare_slimpajama import find_data, text_documents

Report = tuple[str, Figure | None]  # a Markdown table, and a picture or None
DESCENT = """cosine: of the first step with minus the gradient of the energy, mean over tokens
lowered: the share of tokens whose energy the first step lowers"""


@dataclass
class EvaluateConfig:
    """What to report."""
    out_dir: str | None = None  # a run (its best.pt), a .pt or an export; default: newest in out/
    data: str | None = None  # folder of token shards; default: the run's own
    split: Literal['train', 'val', 'test'] = 'test'  # of the data
    text: str | None = None  # a text to read instead: .txt, .jsonl, .parquet, as train.py's
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
        in_range(self, 1, 10**12, 'tokens')
        check(all(1 <= T <= 1000 for T in self.steps),
                f'steps={",".join(map(str, self.steps))}: expected 1 to 1,000 each')


# The sequences

class Sequences(NamedTuple):
    """What the loss is measured on."""
    ids: Tensor  # (n, length + 1); NO_TARGET pads the last sequence of a text
    text_bytes: int | None  # bytes of the text; None if the tokenizer loses some of it
    documents: list[str] | None  # all documents; None if the sequences are a part of them


def read_text(path: str, tokenizer: Any, length: int, tokens: int) -> Sequences:
    """Read evenly spaced sequences of a text, of at most so many tokens. A BOS begins each
    document, and each token but the first is the target of one sequence."""
    documents = list(text_documents(path))
    check(any(documents), f'text={path} is empty')
    encoded = [[tokenizer.bos, *tokenizer.encode(document)] for document in documents]
    ids = torch.tensor([i for document in encoded for i in document])
    length = min(length, len(ids) - 1)
    ids = F.pad(ids, (0, -(len(ids) - 1) % length), value=NO_TARGET).unfold(0, length + 1, length)
    chosen = evenly_spaced(len(ids), tokens // length)
    if len(chosen) == len(ids):
        return Sequences(ids, sum(len(document.encode()) for document in documents), documents)
    lossless = all(keeps_text(tokenizer, document_ids[1:], document)
                   for document_ids, document in zip(encoded, documents, strict=True))
    return Sequences(ids[chosen], spelled(ids[chosen], tokenizer) if lossless else None, None)


def read_shards(cfg: EvaluateConfig, state: dict[str, Any], tokenizer: Any, length: int,
                ) -> Sequences:
    """Read evenly spaced sequences of token shards, of at most cfg.tokens tokens. UserError if the
    shards are not there, or are another tokenizer's."""
    folder = find_data(cfg.data) if cfg.data else state['data_dir']
    check(bool(cfg.data) or os.path.exists(folder),
            f'{folder}, which the model was trained on, is not here: --text=FILE evaluates on a '
            'text, --data=FOLDER on other data')
    data = TokenDataset(folder, cfg.split, length)
    for name in TOKENIZER_KEYS:
        check(data.meta.get(name) == state['data'][name],
              f'data={folder}: its {name} is {data.meta.get(name)}, that of the run '
              f'{state["data"][name]}; expected data of the same tokenizer')
    chosen = evenly_spaced(len(data), cfg.tokens // length)
    x, y = data.batch(chosen)
    ids = torch.cat([x, y[:, -1:]], dim=1)
    if not data.meta.get('lossless', True):
        return Sequences(ids, None, None)
    documents = None
    if len(chosen) == len(data):
        parts = y.flatten().tensor_split((y.flatten() == tokenizer.bos).nonzero().flatten())
        documents = [tokenizer.decode(part[part != tokenizer.bos].tolist()) for part in parts]
    return Sequences(ids, spelled(ids, tokenizer), documents)


def spelled(ids: Tensor, tokenizer: Any) -> int:
    """Count the bytes that the targets of sequences (n, J + 1) spell."""
    y = ids[:, 1:]
    return int(tokenizer.token_bytes()[y[y != NO_TARGET]].sum())


def count_llama_tokens(documents: list[str] | None, folder: str) -> tuple[int | None, str]:
    """Count the documents' tokens of Llama's tokenizer, which is in a data folder or at
    $LLAMA_TOKENIZER. If that is not possible, a line says why; without the variable it is ''."""
    path = find_llama_model(folder)
    if path is None:
        return None, ''
    if documents is None:  # pieces of documents would have more tokens in total
        return None, 'Perplexity per Llama token is known of a whole text or split only (--tokens).'
    llama = make_tokenizer('llama', path)
    return sum(len(llama.encode(document)) for document in documents), ''


# Loss, with T as trained or another T

@torch.no_grad()
def evaluate_loss(model: Transformer, ids: Tensor, bos: int) -> tuple[int, float, float]:
    """Return the number of targets in sequences (n, J + 1), their summed loss in nats, and the
    summed loss of those that are not BOS."""
    device = model.embedding.device
    at_once = LOGITS_AT_ONCE // ((ids.shape[1] - 1) * model.cfg.vocab_size)
    n_tokens, nats, text_nats = 0, 0.0, 0.0
    for block in ids.split(max(1, min(32, at_once))):
        x, y = block[:, :-1].clamp(min=0), block[:, 1:].flatten()
        logits = model(x.to(device))[0].float().flatten(0, 1)
        losses = F.cross_entropy(logits, y.to(device), reduction='none', ignore_index=NO_TARGET)
        losses = losses.cpu().double()
        n_tokens += int((y != NO_TARGET).sum())
        nats += float(losses.sum())
        text_nats += float(losses[y != bos].sum())
    return n_tokens, nats, text_nats


def set_steps(model: Transformer, T: int | None) -> None:
    """Set T of every CEM sublayer; None leaves it."""
    cfg = model.cfg
    model.set_steps(T if cfg.attn == 'cem' else None, T if cfg.mlp == 'cem' else None)


def report_loss(model: Transformer, sequences: Sequences, bos: int, data_dir: str,
                steps: tuple[int, ...] = ()) -> Report:
    """Report the loss as trained, or at each T of `steps` with a picture of loss against T; the
    model keeps the last T."""
    cfg, text_bytes = model.cfg, sequences.text_bytes
    trained = {T for kind, T in ((cfg.attn, cfg.attn_steps), (cfg.mlp, cfg.mlp_steps))
               if kind == 'cem'}
    llama_tokens, note = count_llama_tokens(sequences.documents, data_dir)
    lossy = 'Bits per byte are known of a whole text only (--text), as the tokenizer loses some.'
    notes = [*[lossy] * (text_bytes is None), *[note] * bool(note)]
    header = ['T', 'tokens', 'loss, nats a token', 'perplexity']
    header += ['bits per byte'] * bool(text_bytes)
    header += ['perplexity per Llama token'] * bool(llama_tokens)
    rows, losses = [], []
    for T in steps or (None,):
        set_steps(model, T)
        n_tokens, nats, text_nats = evaluate_loss(model, sequences.ids, bos)
        losses.append(nats / n_tokens)
        row = [f'{T}, as trained' if trained == {T} else str(T or 'as trained'),
               f'{n_tokens:,}', f'{losses[-1]:.4f}', f'{perplexity(losses[-1]):.6g}']
        if text_bytes:
            row.append(f'{text_nats / math.log(2) / text_bytes:.4f}')
        if llama_tokens:
            row.append(f'{perplexity(text_nats / llama_tokens):.6g}')
        rows.append(row)
    text = '\n\n'.join([table(header, rows), *notes])
    if not steps:
        return text, None
    figure = Figure((5, 3.5), layout='constrained')
    axes = figure.subplots()
    axes.plot(steps, losses, marker='o')
    axes.set(xlabel='T at test time (dashed: as trained)', ylabel='loss, nats a token')
    for T in trained:
        axes.axvline(T, color='gray', ls='--', lw=1)
    return text, figure


# Energies

def name_use(name: str, use: int, uses: int) -> str:
    """Name a sublayer, and if it is applied several times, which of its uses is meant."""
    return f'{name}, use {use}' if uses > 1 else name


@torch.no_grad()
def inputs_of_cem(model: Transformer, x: Tensor) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Run the model on ids x (B, J). Return the name, the sublayer and the inputs of every use of
    a CEM sublayer, attention first. A sublayer is used again by reuse and by loops."""
    kinds = [kind for kind in ('attn', 'mlp') if getattr(model.cfg, kind) == 'cem']
    found = [(f'{kind} {n}', getattr(block, kind), [])
             for kind in kinds for n, block in enumerate(model.blocks, 1)]
    hooks = [sublayer.register_forward_pre_hook(lambda _, inputs, calls=calls: calls.append(inputs))
             for _, sublayer, calls in found]
    model.hidden(x)
    for hook in hooks:
        hook.remove()
    return [(name_use(name, use, len(calls)), sublayer, inputs)
            for name, sublayer, calls in found for use, inputs in enumerate(calls, 1)]


@torch.no_grad()
def trajectory(sublayer: CEMAttention | CEMMLP, *inputs: Any, steps: int) -> tuple[Tensor, Tensor]:
    """Take steps on the inputs of a CEM sublayer's forward. Return the context h (B, J, D) and the
    states x_0 to x_steps, (steps + 1, B, J, D)."""
    seen: list[tuple[Tensor, Tensor]] = []  # what the norm gets and returns: for h, then each step
    hook = sublayer.norm.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    trained_T = sublayer.T
    sublayer.T = steps + 1  # the last step shows the state after the one before
    sublayer.forward(*inputs)
    sublayer.T = trained_T
    hook.remove()
    (_, h), *states = seen
    return h, torch.stack([x for x, _ in states])


@torch.no_grad()
def energies(model: Transformer, x: Tensor, steps: int) -> dict[str, np.ndarray]:
    """Return the mean energy over the tokens x (B, J) at steps 0 to `steps`, for every use of a CEM
    sublayer. The sublayers before it take their usual number of steps."""
    found = {}
    for name, sublayer, inputs in inputs_of_cem(model, x):
        h, states = trajectory(sublayer, *inputs, steps=steps)
        along = [sublayer.energy(sublayer.norm(x_t), h).mean() for x_t in states]
        found[name] = torch.stack(along).cpu().numpy()
    return found


def descent(model: Transformer, x: Tensor) -> list[tuple[str, float, float]]:
    """Measure on tokens x (B, J) whether every use of a CEM sublayer descends by its first step.
    Return its name, the cosine of the step with minus the gradient of the energy (of a token's
    whole vectors, mean over tokens), and the share of tokens whose energy the step lowers."""
    found = []
    for name, sublayer, inputs in inputs_of_cem(model, x):
        h, (x_0, x_1) = trajectory(sublayer, *inputs, steps=1)
        # The energy before the step, and its gradient
        with torch.enable_grad():
            u = sublayer.norm(x_0).detach().requires_grad_()
            before = sublayer.energy(u, h)
            gradient, = torch.autograd.grad(before.sum(), u)
        cosine = F.cosine_similarity(x_1 - x_0, -gradient, dim=-1).mean()
        # The energy after the step, with the same context
        with torch.no_grad():
            after = sublayer.energy(sublayer.norm(x_1), h)
        share = (after < before).double().mean()
        found.append((name, float(cosine), float(share)))
    return found


def report_energies(model: Transformer, sequences: Tensor, steps: int) -> Report:
    """Report the mean energy at steps 0 to `steps` for each use of a CEM sublayer, and whether its
    first step descends, over the first sequences: some 4,096 tokens."""
    x = sequences[:max(1, 4096 // sequences.shape[1]), :-1]
    x = x[(x != NO_TARGET).all(dim=1)]  # without the last sequence of a text if it is padded
    x = x.to(model.embedding.device)
    by_use = energies(model, x, steps)
    figure = Figure((9, 3.5), layout='constrained')
    for axes, kind in zip(figure.subplots(1, 2), ('attn', 'mlp'), strict=True):
        axes.set(title=kind, xlabel='step (dashed: as trained)', ylabel='energy minus that at 0')
        for name, along in by_use.items():
            if name.startswith(kind):
                axes.plot(along - along[0], marker='o', ms=3, label=name)
        if axes.lines:
            axes.legend(fontsize=7)
            axes.axvline(getattr(model.cfg, f'{kind}_steps'), color='gray', ls='--', lw=1)
    rows = [[name, *(f'{energy:.4g}' for energy in by_use[name]), f'{cosine:.2f}', f'{share:.0%}']
            for name, cosine, share in descent(model, x)]
    header = ['energy at step', *map(str, range(steps + 1)), 'cosine', 'lowered']
    return f'{table(header, rows)}\n\n{DESCENT}', figure


# Attention

@torch.no_grad()
def attention_maps(model: Transformer, idx: Tensor) -> list[Tensor]:
    """Return the weights alpha_ijk of ids (1, J) at each step: one tensor (T, K, J, J) for each
    layer, or for each use of its attention, those of layer 1 first. Llama's T is 1."""
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
    uses = model.cfg.attn_reuse * model.cfg.loops
    return [use for steps in maps.values() for use in torch.stack(steps).chunk(uses)]


def attention_shift(maps: Tensor) -> Tensor:
    """Return the fraction of each head's attention that each step after the first moves to
    other keys, averaged over queries: (T, K, J, J) -> (T - 1, K)."""
    return maps.diff(dim=0).abs().sum(dim=-1).mean(dim=-1) / 2


def report_attention(model: Transformer, tokenizer: Any, text: str) -> Report:
    """Report how much attention each step moves. The picture has the maps: heads across, layers,
    their uses and steps down."""
    cfg = model.cfg
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    check(1 < len(ids) <= cfg.context_length,
            f'attention: the text has {len(ids) - 1} tokens; expected 1 to '
            f'{cfg.context_length - 1}')
    words = ['BOS', *(tokenizer.decode([i]) for i in ids[1:])]
    maps = attention_maps(model, torch.tensor([ids], device=model.embedding.device))
    uses = cfg.attn_reuse * cfg.loops
    names = [name_use(f'layer {n}', use, uses)
             for n in range(1, cfg.n_layer + 1) for use in range(1, uses + 1)]
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
            step = f'\nstep {t + 1}' if cfg.attn == 'cem' else ''
            axes.set_ylabel(names[n] + step, fontsize=7)
            if len(words) <= 24:
                axes.set_yticks(range(len(words)), words, fontsize=5, parse_math=False)
    if T == 1:
        return 'No attention takes a second step, so none moves.', figure
    header = ['attention moved', *(f'by step {t}' for t in range(2, T + 1))]
    rows = [[name, *(f'{shift:.2%}' for shift in attention_shift(use).mean(dim=1).tolist())]
            for name, use in zip(names, maps, strict=True)]
    return table(header, rows), figure


# Runs side by side

def compare(folders: list[str]) -> Report:
    """Report the results of runs, and draw their training losses; a panel for each data folder. A
    line names what makes their losses incomparable. UserError if a folder has no run."""
    names = ('parameters', 'tokens', 'val_loss', 'test_loss', 'test_bits_per_byte', 'seconds')
    rows, by_data = [], {}
    settings: dict[str, set[Any]] = {}
    for folder in folders:
        config = read_config(folder) or fail(f'{folder}: no run: no config.json that can be read')
        data = os.path.relpath(str(config['train'].get('data')))
        by_data.setdefault(data, []).append(folder)
        options = {**config['train'], **config['model'], 'data': data}
        for name in ('data', 'vocab_size', 'context_length', 'eval_tokens', 'test_tokens'):
            settings.setdefault(name, set()).add(options.get(name))
        result = read_json(f'{folder}/result.json') or {}
        cells = [f'{result[name]:,.7g}' if type(result.get(name)) in (int, float) else ''
                 for name in names]
        rows.append([folder, *cells, data])
    text = table(['run', *names, 'data'], rows)
    if different := [f'{name} ({", ".join(sorted(map(str, values)))})'
                     for name, values in settings.items() if len(values) > 1]:
        text += f'\n\nLosses cannot be compared: the runs differ in {"; ".join(different)}.'

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
        for label in axes.legend(fontsize=7).get_texts():
            label.set_parse_math(False)
    return text, figure


# The command line

def show(subject: str, report: Report, path: str) -> None:
    """Print a report's subject and table, and write its picture, if any, to `path`."""
    text, figure = report
    print(f'{subject}\n\n{text}', flush=True)
    if figure is not None:
        picture = io.BytesIO()
        figure.savefig(picture, dpi=100)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomic(path, picture.getvalue())
        print(path, flush=True)


@command_line
def main(argv: list[str]) -> None:
    folders = [arg for arg in argv if '--compare' in argv and not arg.startswith('--')]
    cfg = build(EvaluateConfig, read_options([a for a in argv if a not in folders], EvaluateConfig))
    if cfg.compare:
        check(bool(folders), 'compare: expected folders of runs, as --compare out/a out/b')
        return show('Runs', compare(folders), 'out/results/compare.png')

    # Load the model and its tokenizer
    out_dir = cfg.out_dir or newest_run()
    model, state = load_model(out_dir, cfg.device)
    check('cem' in (model.cfg.attn, model.cfg.mlp) or not (cfg.steps or cfg.energies),
            f'{out_dir} is all Llama: steps and energies are those of CEM sublayers')
    if cfg.export:
        export(model, cfg.export, state, getattr(torch, cfg.export_dtype))
        print(f'{cfg.export}: transformers loads it, as its README.md says', flush=True)
    with_loss = bool(cfg.steps) or not (cfg.energies or cfg.attention or cfg.export)
    if not (with_loss or cfg.energies or cfg.attention):
        return None
    tokenizer = tokenizer_of(state)
    weights = f'{out_dir}, step {state["step"]}'
    # Pictures go beside the checkpoint, but not into an exported folder
    folder = out_dir if os.path.isdir(out_dir) else os.path.dirname(out_dir) or '.'
    folder = 'out/results' if 'exported' in state else folder

    # Report
    if with_loss or cfg.energies:
        data_dir, length = cfg.data or state['data_dir'], model.cfg.context_length
        subject = f'{weights}; {cfg.text or f"{cfg.split} split of {data_dir}"}'
        if cfg.text:
            sequences = read_text(cfg.text, tokenizer, length, cfg.tokens)
        else:
            sequences = read_shards(cfg, state, tokenizer, length)
    if cfg.energies:
        report = report_energies(model, sequences.ids, max(cfg.steps, default=8))
        show(subject, report, f'{folder}/energies.png')
    if cfg.attention:
        set_steps(model, max(cfg.steps, default=None))
        report = report_attention(model, tokenizer, cfg.attention)
        show(f'{weights}; {cfg.attention!r:.80}', report, f'{folder}/attention.png')
    if with_loss:
        report = report_loss(model, sequences, tokenizer.bos, data_dir, cfg.steps)
        show(subject, report, f'{folder}/loss.png')
    return None


if __name__ == '__main__':
    main(sys.argv[1:])

"""
Evaluate a trained model.

    python evaluate.py                         loss, perplexity, bits per byte of the newest run
    python evaluate.py --text=book.txt         the same on a text; --data=FOLDER: on other data
    python evaluate.py --steps=1,2,3,4,8       the same for other T at test time
    python evaluate.py --energies              energies along the steps; does the first one descend?
    python evaluate.py --attention="The cat"   the attention maps of a text, and what steps change;
                                               --layer=3 draws one layer
    python evaluate.py --copying               how well does it repeat what stood in its context?
    python evaluate.py --copying=out/b         the same beside another run: where is the gap?
    python evaluate.py --compare=out/a,out/b   a table of the results of runs, and their losses;
                                               with --text=FILE their losses on it, of exports too

Tables are printed. Pictures of --energies, --attention and --compare go into out/results.
"""
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

if __name__ == '__main__':  # pictures go into files, whatever backend a notebook asks for
    os.environ['MPLBACKEND'] = 'agg'

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import PathStr, build, command_line, in_range, read_options
from model import BaseAttention, ModelConfig, Transformer
from nanocem.data import TOKENIZER_KEYS, TokenDataset, evenly_spaced
from nanocem.documents import READING, Reading, text_documents
from nanocem.errors import UserError, check
from nanocem.fast import plug_in
from nanocem.files import read_json_lines
from nanocem.hub import WEIGHTS_FILE, read_export
from nanocem.loss import NO_TARGET, perplexity, sum_losses, token_losses
from nanocem.report import markdown_table, short_name
from nanocem.runs import (
    check_match,
    load_model,
    newest_run,
    read_config,
    read_result,
    short_list,
    with_defaults,
)
from nanocem.same import differing, in_use
from nanocem.tokenizers import find_llama, keeps_text, spelled_bytes, tokenizer_of

TOKENS_AT_ONCE = 2048  # in a forward pass: more need much memory for float32 logits
# Ids (n, length + 1), the bytes of their text, and its number of Llama tokens; None if unknown
Sequences = tuple[Tensor, int | None, int | None]
CHECKSUMS = ('val checksum', 'test checksum')  # of the data
# Options in which runs must agree if their losses are to be compared
MUST_AGREE = ('vocab_size', 'context_length', 'eval_tokens', 'test_tokens', *CHECKSUMS)
SMALLEST_GAP = 0.02  # of perplexity: what is smaller is not divided into parts
COPYING = {'repeated': 'repeated: their {} stood earlier', 'other': 'other',
           'first': 'half a context, read once', 'second': 'the same, read again'}
NO_LLAMA = ('results/ have perplexities per token of Llama, whose tokenizer.model is not here '
            '($LLAMA_TOKENIZER names it). Bits per byte need none.')
DESCENT = """cosine: between the first step and minus the energy's gradient, mean over tokens
lowered: the share of tokens whose energy the first step lowers"""


@dataclass
class EvaluateConfig(Reading):
    """A model, the text that it is evaluated on, and what to report."""
    EXCLUSIVE = (('text', 'data'),)
    out_dir: PathStr | None = None  # a run (its best.pt), a .pt or export; default: newest in out/
    data: PathStr | None = None  # folder of token shards; default: the run's own
    split: Literal['train', 'val', 'test'] = 'test'  # of the data
    text: PathStr | None = None  # a file or folder to read instead, whole, as train.py --text does
    tokens: int = 500_000  # tokens of the shards at most, in evenly spaced sequences
    steps: tuple[int, ...] = ()  # each T to test; energies go to the largest, attention: the last
    energies: bool = False  # energies at steps 0 to 8, or to the largest of steps
    attention: str | None = None  # a text whose attention maps to show
    layer: int | None = None  # for --attention: draw this layer alone, counted from 1
    copying: bool | PathStr = False  # losses of repeated targets and others; RUN: of both runs
    compare: tuple[PathStr, ...] = ()  # folders of runs to compare: --compare=out/a,out/b
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda if there is one

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, 1, 10**15, 'tokens layer')
        check(self.layer is None or self.attention is not None, 'layer is for --attention=TEXT')
        self.check_text(self.text)
        check(all(T >= 1 for T in self.steps), f'steps={self.steps}: expected 1, 2, 3, ...')
        check(all(self.compare), 'compare: expected folders of runs, as --compare=out/a,out/b')
        self.compare = tuple(map(os.path.expanduser, self.compare))


class Report(NamedTuple):
    """What is printed of a subject, and the picture that is drawn of it, if any."""
    subject: str
    text: str
    figure: Figure | None = None
    name: str = ''  # of the picture's file


def same_model(a: Transformer, b: Transformer) -> bool:
    """Return whether two models have the same options and weights, wherever they were read."""
    return a.cfg == b.cfg and all(map(torch.equal, a.parameters(), b.parameters()))


def cem_kinds(model: Transformer) -> list[str]:
    """Return which of attn and mlp are CEM's in this model."""
    return [kind for kind in ('attn', 'mlp') if getattr(model.cfg, kind) == 'cem']


# What the loss is measured on

def read_text_sequences(path: str, tokenizer: Any, length: int, data_dir: str,
                        reading: Reading) -> Sequences:
    """Read a whole text as sequences; NO_TARGET pads the last. A BOS begins each document. Each
    token but the first is a target once. Bytes and Llama's tokens are not counted if the tokenizer
    loses text. Llama's need its tokenizer, at $LLAMA_TOKENIZER or in data_dir."""
    llama = find_llama(data_dir)
    n_ids = text_bytes = llama_tokens = 0
    lossless = True
    with tempfile.TemporaryFile() as file:  # of the ids: a text may be larger than memory
        for document in text_documents(path, reading):
            begins = True
            for block in document:
                encoded = tokenizer.encode(block, begins)
                ids = [tokenizer.bos, *encoded] if begins else encoded
                file.write(np.array(ids, np.int32).tobytes())
                n_ids += len(ids)
                lossless = lossless and keeps_text(tokenizer, encoded, block)
                text_bytes += len(block.encode())
                if llama:
                    llama_tokens += len(llama.encode(block, begins))
                begins = False
        check(n_ids > 1, f'text={path} is empty')
        length = min(length, n_ids - 1)
        padding = -(n_ids - 1) % length  # up to a multiple of length
        file.write(np.full(padding, NO_TARGET, np.int32).tobytes())
        file.flush()
        ids = torch.from_numpy(np.memmap(file, np.int32, 'r+'))
    # Divide the ids into sequences, which share one token each: the last target is the next input
    sequences = ids.unfold(0, length + 1, length)
    if spelled_bytes(tokenizer, {'lossless': lossless}) is None:
        return sequences, None, None
    return sequences, text_bytes, llama_tokens if llama else None


def read_shards(cfg: EvaluateConfig, state: dict[str, Any], folder: str, tokenizer: Any,
                length: int) -> Sequences:
    """Read evenly spaced sequences of token shards, with at most cfg.tokens targets. UserError if
    the shards are not there, were made with another tokenizer, or, in the run's own folder, have
    changed."""
    check(os.path.exists(folder), f'{folder}, the data to evaluate on, is not here: --text=FILE '
          'evaluates on a text, --data=FOLDER on other data')
    data = TokenDataset(folder, cfg.split, length)
    for name, value in data.identity.items():
        saved = state['data'].get(name, value)
        check(value == saved or bool(cfg.data and name not in TOKENIZER_KEYS),
              f'data={folder}: its {name} is {value}, that of the run {saved}; expected '
              'data of the same tokenizer, or the same data as in training unless --data is given')
    x, y = data.batch(evenly_spaced(len(data), cfg.tokens // length))
    token_bytes = spelled_bytes(tokenizer, data.meta)
    text_bytes = None if token_bytes is None else int(token_bytes[y].sum())
    return torch.cat([x, y[:, -1:]], dim=1), text_bytes, None


# Loss

@torch.no_grad()
def evaluate_loss(model: Transformer, ids: Tensor, bos: int) -> list[float]:
    """Return the number of targets in sequences (n, length + 1), their summed loss in nats, and the
    summed loss of those that are not BOS."""
    device = model.embedding.device
    sums = torch.zeros(3, dtype=torch.float64)
    for block in ids.split(max(1, TOKENS_AT_ONCE // ids.shape[1])):
        x, y = block[:, :-1].long().clamp(min=0), block[:, 1:].long()
        sums += sum_losses(model(x.to(device))[0], y.to(device), is_text=y != bos)
    return sums.tolist()


def report_loss(run: 'Evaluated') -> Report:
    """Report the loss with T as trained, or at each T of `steps`. The model keeps the last T."""
    model, bos = run.model, run.tokenizer.bos
    ids, text_bytes, llama_tokens = run.sequences
    rows = []
    for T in run.cfg.steps or (None,):
        model.set_steps(**{f'{kind}_steps': T for kind in cem_kinds(model)})
        n_targets, nats, text_nats = evaluate_loss(model, ids, bos)
        loss = nats / n_targets
        row = {'T': str(T or 'as trained'), 'tokens': f'{n_targets:,.0f}',
               'loss, nats a token': f'{loss:.4f}', 'perplexity': f'{perplexity(loss):.6g}'}
        if text_bytes:
            row['bits per byte'] = f'{text_nats / math.log(2) / text_bytes:.4f}'
        if llama_tokens:
            row['perplexity per Llama token'] = f'{perplexity(text_nats / llama_tokens):.6g}'
        rows.append(row)
    text = markdown_table([*row], [[*row.values()] for row in rows])
    if text_bytes and run.cfg.text and not llama_tokens:
        text += f'\n\n{NO_LLAMA}'
    return Report(run.subject, text)


# Copying

@torch.no_grad()
def target_losses(model: Transformer, ids: Tensor, bos: int) -> Tensor:
    """Return the loss of each target of sequences (n, length + 1), in nats: (n, length), float64.
    It is NaN where the target is BOS or padding."""
    device = model.embedding.device
    losses = []
    blocks = ids.split(max(1, TOKENS_AT_ONCE // ids.shape[1]))
    for block in tqdm(blocks, disable=None, leave=False):
        x, y = block[:, :-1].long().clamp(min=0), block[:, 1:].long()
        loss = token_losses(model(x.to(device))[0], y.to(device))
        check(not loss.isnan().any(), 'a loss is NaN: the model has diverged, or is damaged')
        losses.append(loss.masked_fill((y == bos) | (y == NO_TARGET), torch.nan))
    return torch.cat(losses)


def repeated_targets(ids: Tensor, vocab_size: int, n_before: int = 1) -> Tensor:
    """Return which targets of sequences (n, length + 1) are repeated, (n, length): the target and
    the n_before tokens before it stood earlier in the same sequence, in this order. Padding counts
    as text; it stands at the end, where nothing comes after it."""
    # Give each run of n_before + 1 tokens a number of its own
    runs = ids.unfold(1, n_before + 1, 1)  # (n, length + 1 - n_before, n_before + 1)
    number = torch.zeros_like(runs[..., 0], dtype=torch.int64)
    for tokens in runs.unbind(-1):
        number = number * vocab_size + tokens
    # A stable sort puts equal numbers side by side, the earliest first: the others are repeated
    number, order = number.sort(dim=1, stable=True)
    equal = F.pad(number[:, 1:] == number[:, :-1], (1, 0))
    repeated = torch.empty_like(equal).scatter(1, order, equal)
    return F.pad(repeated, (n_before - 1, 0))  # the first targets have too few tokens before them


def stretch(n_before: int) -> str:
    """Return what stood earlier, in words: a target, and what is before it. Four are of bytes."""
    return 'pair' if n_before == 1 else f'last {n_before + 1} bytes'


def copying(model: Transformer, ids: Tensor, bos: int, n_before: int = 1) -> dict[str, Tensor]:
    """Measure how well a model repeats what stands in its context. Return the losses in nats of

        repeated    targets that complete a pair (the token before, the target) that stood earlier
                    in the same sequence; with n_before=4, for bytes: the four before and the target
        other       all other targets
        first       the first half of each sequence, less a token, after a BOS
        second      the same tokens once more, after these

    The sequences (n, length + 1) are cut as training cuts them. BOS is no target."""
    check(ids.shape[1] > 4, f'copying: the sequences have {ids.shape[1] - 1} tokens: expected a '
          'text, and a context, of 4 or more')
    losses = target_losses(model, ids, bos)
    repeated = torch.cat([repeated_targets(block, model.cfg.vocab_size, n_before)
                          for block in ids.split(max(1, 1_000_000 // ids.shape[1]))])
    # Read the first half of each sequence twice. Without padding: a text's last one may have some
    half = ids[(ids != NO_TARGET).all(dim=1), :ids.shape[1] // 2 - 1]
    begin = torch.full_like(half[:, :1], bos)
    first, second = target_losses(model, torch.cat([begin, half, half], dim=1), bos).chunk(2, dim=1)
    found = {'repeated': losses[repeated], 'other': losses[~repeated],
             'first': first, 'second': second}
    for kind, loss in found.items():
        check(not loss.isnan().all(), 'copying: no target is of the kind '
              f'"{COPYING[kind].format(stretch(n_before))}": expected a longer text')
    return found


def report_copying(run: 'Evaluated') -> Report:
    """Report the losses of repeated and other targets, and of a text read twice, of one run or two.
    Of two, also which part of the gap between them comes from repeated targets: the sum over these
    of the difference of the losses, over the same sum over all targets."""
    n_before = 4 if run.tokenizer.name == 'byte' else 1
    ids, *_ = run.sequences
    found, rows, gains = [], [], []
    for name, model in run.models.items():
        losses = {kind: loss[~loss.isnan()]
                  for kind, loss in copying(model, ids, run.tokenizer.bos, n_before).items()}
        n_targets = len(losses['repeated']) + len(losses['other'])
        for kind, words in COPYING.items():
            n, mean = len(losses[kind]), float(losses[kind].mean())
            share = f'{n / n_targets:.1%}' if kind in ('repeated', 'other') else ''
            kind_in_words = words.format(stretch(n_before))
            rows.append([name, kind_in_words, f'{n:,}', share, f'{mean:.4f}',
                         f'{perplexity(mean):.6g}'])
        gain = math.expm1(losses['second'].mean() - losses['first'].mean())
        gains.append(f'{gain:+.1%} in {name}')
        found.append(losses)
    header = ['run', 'targets', 'number', 'share', 'loss, nats a token', 'perplexity']
    text = markdown_table(header, rows)
    text += f'\n\nA second reading changes perplexity by {", ".join(gains)}.'
    if len(found) == 1:
        return Report(run.subject, text)
    # Divide the gap between the two runs
    A, B = found
    gap = {kind: float((A[kind] - B[kind]).sum()) for kind in ('repeated', 'other')}
    total = gap['repeated'] + gap['other']
    over = {'repeated': gap['repeated'] / len(A['repeated']),
            'other': gap['other'] / len(A['other']), 'all': total / n_targets}
    differences = ', '.join(f'{kind} {math.expm1(d):+.1%}' for kind, d in over.items())
    text += (f'\nPerplexity a token of {" over ".join(run.models)}, on {run.source}: '
             f'{differences}.')
    if abs(math.expm1(over['all'])) < SMALLEST_GAP:
        text += f'\nA gap of less than {SMALLEST_GAP:.0%} is not divided.'
    elif gap['repeated'] * gap['other'] < 0:
        parts = (f'{kind} targets {value / n_targets:+.4f}' for kind, value in gap.items())
        text += f'\nIn nats a token the gap is {" and ".join(parts)}.'
    else:
        text += f'\nOf the gap {gap["repeated"] / total:.0%} comes from repeated targets.'
    return Report(run.subject, text)


# Energies

@torch.no_grad()
def descent(model: Transformer, x: Tensor, steps: int = 1) -> list[tuple]:
    """Measure on ids x (B, J) whether CEM sublayers descend. Return for each use of a sublayer,
    attention first, its name and what measure_steps returns."""
    # Run the model, and record the inputs of each use: reuse and loops use a sublayer again
    uses: dict[Any, list[tuple]] = defaultdict(list)
    hook = register_module_forward_pre_hook(lambda module, inputs: uses[module].append(inputs))
    try:
        model.hidden(x)
    finally:
        hook.remove()
    found = []
    for kind in cem_kinds(model):
        for n, block in enumerate(model.blocks, 1):
            sublayer = getattr(block, kind)
            for use, inputs in enumerate(uses[sublayer], 1):
                name = f'{kind} {n}, use {use}' if len(uses[sublayer]) > 1 else f'{kind} {n}'
                found.append((name, *measure_steps(sublayer, inputs, steps)))
    return found


def measure_steps(sublayer: Any, inputs: tuple, steps: int) -> tuple[float, float, list[float]]:
    """Return the cosine between a token's first step and minus the gradient of the energy, mean
    over tokens; the share of tokens whose energy the first step lowers; and the mean energies at
    steps 0 to `steps`."""
    # Take the steps: states x_0 to x_steps, (B, J, D) each
    trained_T = sublayer.T
    states = []
    try:
        for t in range(steps + 1):
            sublayer.T = t
            states.append(sublayer(*inputs))
    finally:
        sublayer.T = trained_T
    # Compare the first step with the gradient at its beginning
    h = sublayer.norm(inputs[0])
    with torch.enable_grad():
        u = sublayer.norm(states[0]).detach().requires_grad_()
        gradient, = torch.autograd.grad(sublayer.energy(u, h).sum(), u)
    cosine = F.cosine_similarity(states[1] - states[0], -gradient, dim=-1).mean()
    # Compute the energies along the steps, with the same context h
    energies = torch.stack([sublayer.energy(sublayer.norm(x_t), h) for x_t in states])
    share = (energies[1] < energies[0]).double().mean()
    return float(cosine), float(share), energies.mean(dim=(1, 2)).tolist()


def report_energies(run: 'Evaluated') -> Report:
    """Report the mean energy at steps 0 to 8, or to the largest of `steps`, for each use of a CEM
    sublayer, and whether its first step descends. The picture has the energies, from that at step
    0. Of the tokens only some 4,096 are read."""
    steps = max(run.cfg.steps, default=8)
    ids, *_ = run.sequences
    x = ids[:max(1, 4096 // ids.shape[1]), :-1].long()
    x = x[(x != NO_TARGET).all(dim=1)]  # leave out the last sequence of a text if it is padded
    figure = Figure((9, 3.5), layout='constrained')
    panels = dict(zip(('attn', 'mlp'), figure.subplots(1, 2), strict=True))
    rows = []
    for name, cosine, share, energies in descent(run.model, x.to(run.model.head.device), steps):
        rows.append([name, *(f'{energy:.4g}' for energy in energies), f'{cosine:.2f}',
                     f'{share:.0%}'])
        axes = panels[name.split()[0]]
        axes.plot(np.subtract(energies, energies[0]), marker='o', ms=3, label=name)
        axes.set(xlabel='step', ylabel='energy minus that at step 0')
        axes.legend(fontsize=7)
    header = ['energy at step', *map(str, range(steps + 1)), 'cosine', 'lowered']
    return Report(run.subject, f'{markdown_table(header, rows)}\n\n{DESCENT}', figure,
                  picture_name('energies', run.path))


# Attention

@torch.no_grad()
def attention_maps(model: Transformer, idx: Tensor) -> list[Tensor]:
    """Return the weights alpha_ijk of ids (1, J) at each step: one tensor (T, K, J, J) for each
    layer, or for each use of its attention, those of layer 1 first. Llama's T is 1."""
    steps: dict[BaseAttention, list[Tensor]] = defaultdict(list)  # (K, J, J) each

    def attend(attn: BaseAttention, own: Callable, q: Tensor, k: Tensor, *context: Any) -> tuple:
        _, *others = context  # the values
        steps[attn].append(attn.scores(q, k, *others).softmax(dim=-1)[0].cpu())
        return own(q, k, *context)

    # Run the model with a function before its attention that keeps the weights
    plugged = [vars(block.attn).get('attend') for block in model.blocks]
    for block in model.blocks:
        block.attn.attend = partial(attend, block.attn, block.attn.attend)
    try:
        model.hidden(idx)
    finally:
        for block, method in zip(model.blocks, plugged, strict=True):
            del block.attn.attend
            if method is not None:
                block.attn.attend = method
    # Divide all steps of each layer into its uses
    uses = model.cfg.attn_reuse * model.cfg.loops
    return [use for alphas in steps.values() for use in torch.stack(alphas).chunk(uses)]


def report_attention(run: 'Evaluated') -> Report:
    """Report which fraction of its attention each step after the first moves to other keys, mean
    over heads and queries. The picture has the maps, heads across, layers and steps down: those of
    the first step, and what later steps change in them."""
    model, tokenizer, cfg = run.model, run.tokenizer, run.model.cfg
    ids = [tokenizer.bos, *tokenizer.encode(run.cfg.attention)]
    check(1 < len(ids) <= cfg.context_length, f'attention: the text has {len(ids) - 1} tokens; '
          f'expected 1 to {cfg.context_length - 1}')
    words = ['BOS', *(tokenizer.decode([i]) for i in ids[1:])]
    maps = attention_maps(model, torch.tensor([ids], device=model.embedding.device))
    uses = cfg.attn_reuse * cfg.loops
    names = [f'layer {n}' + (f', use {use}' if uses > 1 else '')
             for n in range(1, cfg.n_layer + 1) for use in range(1, uses + 1)]
    # Draw one layer, or all
    drawn = [*zip(names, maps, strict=True)]
    if run.cfg.layer:
        check(run.cfg.layer <= cfg.n_layer, f'layer={run.cfg.layer}: expected 1 to {cfg.n_layer}')
        drawn = drawn[(run.cfg.layer - 1) * uses:run.cfg.layer * uses]
    T, K = maps[0].shape[:2]
    # Draw a panel for each head of each step
    figure = Figure((1 + 1.5 * K, 0.5 + 1.7 * T * len(drawn)), layout='constrained')
    title = 'query down, key across; grey: square root of the weight'
    most = max(float((alpha[1:] - alpha[:1]).abs().max()) for _, alpha in drawn) if T > 1 else 0
    if T > 1:
        title += f'; later steps: less than in step 1 (blue) or more (red), up to {most:.2g}'
    figure.suptitle(title, fontsize=7)
    panels = figure.subplots(T * len(drawn), K, squeeze=False)
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
    # Measure what fraction of attention moves: half the sum of the weights' changes
    report = Report(f'{run.path}; {run.cfg.attention!r:.80}',
                    'No attention takes a second step, so none moves.', figure,
                    picture_name('attention', run.path))
    if T == 1:
        return report
    header = ['attention moved', *(f'by step {t}' for t in range(2, T + 1))]
    rows = []
    for name, alpha in zip(names, maps, strict=True):  # (T, K, J, J)
        moved = alpha.diff(dim=0).abs().sum(dim=-1).mean(dim=(1, 2)) / 2  # (T - 1,)
        rows.append([name, *(f'{fraction:.2%}' for fraction in moved.tolist())])
    return report._replace(text=markdown_table(header, rows))


# Runs side by side

def compare_on_text(cfg: EvaluateConfig) -> Report:
    """Report the losses of runs and exports on a text, and the perplexity of each over that of the
    last one, if their tokens are the same."""
    rows, losses, tokenizers = [], [], []
    for folder in cfg.compare:
        run = Evaluated(replace(cfg, compare=(), out_dir=folder))
        ids, text_bytes, _ = run.sequences
        n_targets, nats, text_nats = evaluate_loss(run.model, ids, run.tokenizer.bos)
        losses.append(nats / n_targets)
        tokenizers.append([run.state['data'][name] for name in TOKENIZER_KEYS])
        bits = f'{text_nats / math.log(2) / text_bytes:.4f}' if text_bytes else ''
        rows.append([folder, f'{run.model.num_params():,}', f'{n_targets:,.0f}', bits,
                     f'{perplexity(losses[-1]):.6g}'])
    for row, loss, tokenizer in zip(rows, losses, tokenizers, strict=True):
        same = tokenizer == tokenizers[-1]
        row.append(f'{math.expm1(loss - losses[-1]):+.1%}' if same else 'other tokens')
    header = ['run', 'parameters', 'tokens', 'bits per byte', 'perplexity',
              f'perplexity over {cfg.compare[-1]}']
    return Report(f'Runs on {cfg.text}', markdown_table(header, rows))


def read_run(folder: str) -> dict[str, Any]:
    """Return the config.json of a run, or what an export knows of it. Raises UserError."""
    if not os.path.isfile(f'{folder}/{WEIGHTS_FILE}'):
        return read_config(folder)
    state = read_export(folder)
    return {'train': {}, 'model': state['model_config'], 'data': state['data'], 'code': in_use()}


def compare_runs(folders: Sequence[str]) -> Report:
    """Report the results of runs and the options in which they differ, and plot their training
    losses. A line names what makes the losses incomparable. UserError if a folder has no run."""
    configs = [read_run(folder) for folder in folders]
    results, notes = compare_results(folders, configs)
    parts = [results]
    different = differing_options(configs)
    if different:
        parts.append(markdown_table(['option', *folders], different))
    reasons = [name for name, *_ in different if name in MUST_AGREE]
    if reasons:
        notes.append(f'Losses cannot be compared: the runs differ in {", ".join(reasons)}.')
    data = [config.get('data', {}) for config in configs]
    if len({tuple(of_run.get(name) for name in TOKENIZER_KEYS) for of_run in data}) > 1:
        notes.append('Bits per byte of different tokenizers can be compared, if the runs were '
                     'tested on the same text.')
    logs = [folder for folder in folders if os.path.exists(f'{folder}/log.jsonl')]
    figure = plot_training_losses(folders) if logs else None
    return Report('Runs', '\n\n'.join([*parts, *notes]), figure,
                  picture_name('compare', *folders))


def compare_results(folders: Sequence[str],
                    configs: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Format the results of runs, which have these config.json. Return the table, and notes on
    results that do not count and on edits of model.py in the middle of a run."""
    names = ('parameters', 'tokens', 'val_loss', 'test_loss', 'test_perplexity',
             'test_bits_per_byte', 'seconds')
    rows, notes = [], []
    for folder, config in zip(folders, configs, strict=True):
        # Before a run ends it has no result, and its row is empty
        result = {}
        try:
            result = read_result(folder, config)
        except UserError as error:
            notes.append(f'No result of {folder}: {error}.')
        cells = [f'{result[name]:,.7g}' if result.get(name) else '' for name in names]
        if not cells[0]:
            with torch.device('meta'):
                model = Transformer(build(ModelConfig, config['model']))
            cells[0] = f'{model.num_params():,}'
        rows.append([folder, *cells])
        if not config['train']:
            notes.append(f'{folder} is an export, without results: --text=FILE measures its loss.')
        for edit in result.get('edits', []):
            notes.append(f'{folder}: {short_list(edit["definitions"])} of model.py were edited '
                         f'after step {edit["after_step"]:,}.')
    return markdown_table(['run', *names], rows), notes


def plot_training_losses(folders: Sequence[str]) -> Figure:
    """Plot the training loss of each run over the tokens that it has read."""
    figure = Figure((7, 4), layout='constrained')
    axes = figure.subplots()
    axes.set(xlabel='tokens', ylabel='training loss, nats a token')
    for folder in folders:
        lines = []  # of a run that has just begun
        if os.path.exists(f'{folder}/log.jsonl'):
            lines = read_json_lines(f'{folder}/log.jsonl')
        log = [line for line in lines if line.get('loss') and 'tokens' in line]
        axes.plot([line['tokens'] for line in log], [line['loss'] for line in log], lw=1,
                  label=f'run {folder}')
    for label in axes.legend(fontsize=7).get_texts():
        label.set_parse_math(False)
    return figure


def differing_options(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the options in which runs with these config.json differ, each with its value in every
    run. The checksums of the data, and the text of model.py, count as options."""
    # Collect the options of each run
    all_options = []
    for config in configs:
        options = config['train'] | with_defaults(config['model'])
        for name in CHECKSUMS:
            options[name] = config.get('data', {}).get(name)
        edited = differing(config.get('code', {}), in_use())
        options['model.py'] = f'another: {short_list(edited)}' if edited else 'this one'
        all_options.append(options)
    # Compare those that all have: an older run lacks some
    different = []
    for name in all_options[0]:
        if name == 'out_dir' or not all(name in options for options in all_options):
            continue
        values = [str(options[name]) for options in all_options]
        if len(set(values)) > 1:
            different.append([name, *values])
    return different


# The command line

class Evaluated:
    """A run, another one that --copying may set beside it, and what they are evaluated on, which is
    read when a report asks for it. UserError if the two cannot be compared."""
    def __init__(self, cfg: EvaluateConfig):
        self.cfg = cfg
        self.path = cfg.out_dir or newest_run()
        self.model, self.state = load_model(self.path, cfg.device)
        self.tokenizer = tokenizer_of(self.state)
        self.models = {self.path: self.model}
        if isinstance(cfg.copying, str):
            self.load_beside(cfg.copying)
        for model in self.models.values():
            plug_in(model)

    def load_beside(self, path: str) -> None:
        """Load another run, whose tokens must be the same."""
        other, state = load_model(path, self.cfg.device)
        check(not same_model(other, self.model), f'copying={path} has the weights of {self.path}: '
              'expected another run, or --copying alone')
        tokenizer = {name: self.state['data'][name] for name in TOKENIZER_KEYS}
        check_match(path, (state['data'], tokenizer),
                    remedy=f'the tokens of {self.path} and of {path} are others, whose losses '
                    'cannot be set side by side')
        length, own_length = other.cfg.context_length, self.model.cfg.context_length
        check(length == own_length, f'copying={path} has a context of {length} tokens, and '
              f'{self.path} one of {own_length}: expected the same')
        self.models[path] = other

    @property
    def data_dir(self) -> str:
        return self.cfg.data or self.state['data_dir']

    @property
    def source(self) -> str:
        return self.cfg.text or f'{self.cfg.split} split of {self.data_dir}'

    @property
    def subject(self) -> str:
        return f'{self.path}, step {self.state["step"]}; {self.source}'

    @cached_property
    def sequences(self) -> Sequences:
        length = self.model.cfg.context_length
        if self.cfg.text:
            return read_text_sequences(self.cfg.text, self.tokenizer, length, self.data_dir,
                                       self.cfg)
        return read_shards(self.cfg, self.state, self.data_dir, self.tokenizer, length)


def choose_reports(cfg: EvaluateConfig, on_text: bool) -> list[Callable[[Evaluated], Report]]:
    """Return what the options ask for, in the order in which it is printed. The loss is the report
    of no other option but `steps`, and of a text or data beside attention maps. It leaves the last
    T of --steps in the model, for these maps."""
    reports = []
    if cfg.energies:
        reports.append(report_energies)
    if cfg.copying:
        reports.append(report_copying)
    if cfg.steps or (not reports and (cfg.attention is None or on_text)):
        reports.append(report_loss)
    if cfg.attention is not None:
        reports.append(report_attention)
    return reports


def picture_name(kind: str, *paths: str) -> str:
    """Return the name of a picture of these runs: those of other runs have other names."""
    runs = [os.path.normpath(path).removeprefix('out/').strip('/') for path in paths]
    return short_name(f'{kind}-{"-".join(runs)}'.replace('/', '-')) + '.png'


def show(report: Report) -> None:
    """Print a report, and write its picture, if any, to out/results."""
    print(f'{report.subject}\n\n{report.text}', flush=True)
    if report.figure is not None:
        report.figure.supxlabel(report.subject, fontsize=7, parse_math=False)
        os.makedirs('out/results', exist_ok=True)
        report.figure.savefig(f'out/results/{report.name}', dpi=100)
        print(f'out/results/{report.name}', flush=True)


@command_line
def main(argv: list[str]) -> None:
    given = read_options(argv, EvaluateConfig)
    cfg = build(EvaluateConfig, given)
    on = {'text', 'data', 'split', 'tokens'} & given.keys()
    check(not cfg.text or on == {'text'}, 'a text is read whole: no split, no tokens')
    check(not (cfg.copying and cfg.steps), 'copying is measured with T as trained: no steps')
    if cfg.compare:
        allowed = {'compare', 'text', 'device', *READING}
        others = ', '.join(name for name in given if name not in allowed)
        check(not others, f'--compare takes folders and a --text alone, and not {others}')
        return show(compare_on_text(cfg) if cfg.text else compare_runs(cfg.compare))
    run = Evaluated(cfg)
    check(bool(cem_kinds(run.model)) or not (cfg.steps or cfg.energies),
          f'{run.path} is all Llama: steps and energies are those of CEM sublayers')
    for report in choose_reports(cfg, on_text=bool(on)):
        show(report(run))


if __name__ == '__main__':
    main(sys.argv[1:])

"""
How well does a model repeat what stood in its context?

    python results/copying.py                      the newest run, on its test split
    python results/copying.py RUN                  a run (its best.pt), a .pt or an export
    python results/copying.py RUN OTHER            the same beside another one: where is the gap?
    python results/copying.py RUN --text=book.txt  on a text; --data=FOLDER: on other data
"""
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # model.py is in the folder above

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from configurator import build, check, command_line, read_options
from model import Transformer
from nanocem.data import TOKENIZER_KEYS
from nanocem.documents import keep_piped
from nanocem.files import markdown_table
from nanocem.measure import (
    NO_TARGET,
    TOKENS_AT_ONCE,
    Measured,
    describe_source,
    perplexity,
    read_sequences,
    token_losses,
)
from nanocem.runs import check_same, load_model, newest_run
from nanocem.tokenizers import tokenizer_of

SMALLEST_GAP = 0.02  # of perplexity: what is smaller is not divided into parts
KINDS = {'repeated': 'repeated: their {} stood earlier', 'other': 'other',
         'first': 'half a context, read once', 'second': 'the same, read again'}



# What is measured

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

    The sequences (n, length + 1) are cut as training cuts them. BOS is not a target. UserError if
    no target is of one of these kinds, or if a loss is NaN."""
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
              f'"{KINDS[kind].format(stretch(n_before))}": expected a longer text')
    return found


# The report

def report(models: dict[str, Transformer], ids: Tensor, tokenizer: Any, source: str) -> str:
    """Report the losses of repeated and other targets, and of a text read twice, of one run or two.
    Of two, also which part of the gap between them comes from repeated targets: the sum over these
    of the difference of the losses, over the same sum over all targets."""
    n_before = 4 if tokenizer.name == 'byte' else 1
    found, rows, gains = [], [], []
    for name, model in models.items():
        losses = {kind: loss[~loss.isnan()]
                  for kind, loss in copying(model, ids, tokenizer.bos, n_before).items()}
        n_targets = len(losses['repeated']) + len(losses['other'])
        for kind, words in KINDS.items():
            n, mean = len(losses[kind]), float(losses[kind].mean())
            share = f'{n / n_targets:.1%}' if kind in ('repeated', 'other') else ''
            kind_in_words = words.format(stretch(n_before))
            rows.append([name, kind_in_words, f'{n:,}', share, f'{mean:.4f}',
                         f'{perplexity(mean):.6g}'])
        gain = math.expm1(losses['second'].mean() - losses['first'].mean())
        gains.append(f'{gain:+.1%} in {name}')
        found.append(losses)
    header = ['run', 'targets', 'number', 'share', 'loss, nats per token', 'perplexity']
    text = markdown_table(header, rows)
    text += f'\n\nA second reading changes perplexity by {", ".join(gains)}.'
    if len(found) == 1:
        return text
    # Divide the gap between the two runs
    A, B = found
    gap = {kind: float((A[kind] - B[kind]).sum()) for kind in ('repeated', 'other')}
    total = gap['repeated'] + gap['other']
    over = {'repeated': gap['repeated'] / len(A['repeated']),
            'other': gap['other'] / len(A['other']), 'all': total / n_targets}
    differences = ', '.join(f'{kind} {math.expm1(d):+.1%}' for kind, d in over.items())
    text += f'\nPerplexity a token of {" over ".join(models)}, on {source}: {differences}.'
    if abs(math.expm1(over['all'])) < SMALLEST_GAP:
        text += f'\nA gap of less than {SMALLEST_GAP:.0%} is not divided.'
    elif gap['repeated'] * gap['other'] < 0:
        parts = (f'{kind} targets {value / n_targets:+.4f}' for kind, value in gap.items())
        text += f'\nIn nats per token the gap is {" and ".join(parts)}.'
    else:
        text += f'\nOf the gap {gap["repeated"] / total:.0%} comes from repeated targets.'
    return text


def same_model(a: Transformer, b: Transformer) -> bool:
    """Return whether two models have the same options and weights, wherever they were read."""
    return a.cfg == b.cfg and all(map(torch.equal, a.parameters(), b.parameters()))


def load_beside(path: str, of: str, model: Transformer, data: dict, device: str) -> Transformer:
    """Load another run than the one in the folder `of`, whose model and data are these. UserError
    if the two cannot be compared token by token."""
    other, state = load_model(path, device)
    check(not same_model(other, model), f'{path} has the weights of {of}: expected another run, or '
          f'{of} alone')
    # Losses of other tokens cannot be set side by side
    check_same(path, state['data'], {name: data[name] for name in TOKENIZER_KEYS})
    length, own_length = other.cfg.context_length, model.cfg.context_length
    check(length == own_length, f'{path} has a context of {length} tokens, and {of} one of '
          f'{own_length}: expected the same')
    return other


@command_line
def main(argv: list[str]) -> None:
    # Read the folders of the runs, and then the options
    paths = [word for word in argv if not word.startswith('-')]
    given = read_options([word for word in argv if word.startswith('-')], Measured)
    cfg = build(Measured, given)
    check(len(paths) <= 2, f'{" ".join(paths)}: expected one run, or two')
    cfg.check_given(given)
    if cfg.text:
        cfg.text = keep_piped(cfg.text)
    # Load them, and what they are measured on
    path, *others = paths or [newest_run()]
    model, state = load_model(path, cfg.device)
    models = {path: model}
    for other in others:
        models[other] = load_beside(other, path, model, state['data'], cfg.device)
    tokenizer = tokenizer_of(state)
    source = describe_source(cfg, state)
    ids, *_ = read_sequences(cfg, state, tokenizer, model.cfg.context_length)
    text = report(models, ids, tokenizer, source)
    print(f'{path}, step {state["step"]}; {source}\n\n{text}', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])

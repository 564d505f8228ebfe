"""Read a text or shards as sequences, and sum up a model's losses on them."""
import math
import os
import tempfile
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import PathStr, check, in_range
from nanocem.data import TOKENIZER_KEYS, TokenDataset, evenly_spaced
from nanocem.documents import Reading, text_documents
from nanocem.files import name_in_errors
from nanocem.tokenizers import find_llama, keeps_text, spelled_bytes

NO_TARGET = -100  # the loss ignores tokens with this target, as F.cross_entropy does
TOKENS_AT_ONCE = 2048  # in a forward pass that measures: more need much memory for float32 logits
# Ids (n, length + 1), the bytes of their text, and its number of Llama tokens; None if unknown
Sequences = tuple[Tensor, int | None, int | None]


@dataclass
class Measured(Reading):
    """What a model is measured on: a split of token shards, or a text, which is read whole."""
    EXCLUSIVE = (('text', 'data'),)
    data: PathStr | None = None  # folder of token shards; default: the run's own
    split: Literal['train', 'val', 'test'] = 'test'  # which part of the data
    text: PathStr | None = None  # read all of this file or folder instead, as train.py --text does
    tokens: int = 500_000  # maximum number of tokens of the shards, in evenly spaced sequences
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda if there is a GPU

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, 1, 10**15, 'tokens')
        self.check_text(self.text)

    def check_given(self, given: dict[str, Any]) -> None:
        """UserError if options of shards were given for a text."""
        check(not self.text or not {'split', 'tokens'} & given.keys(),
              'a text is read whole: no split, no tokens')


# Sequences

def read_sequences(options: Measured, state: dict[str, Any], tokenizer: Any,
                   length: int) -> Sequences:
    """Read what the options ask for, as sequences. Without `text` and `data` it is the data of the
    run with this checkpoint. Raises UserError."""
    folder = options.data or state['data_dir']
    if options.text:
        return read_text_sequences(options.text, tokenizer, length, folder, options)
    known = state['data']
    if options.data:
        known = {name: known[name] for name in TOKENIZER_KEYS}
    return read_shards(folder, options.split, options.tokens, length, tokenizer, known)


def describe_source(options: Measured, state: dict[str, Any]) -> str:
    """Return in words what read_sequences reads."""
    return options.text or f'{options.split} split of {options.data or state["data_dir"]}'


def read_text_sequences(path: str, tokenizer: Any, length: int, data_dir: str,
                        reading: Reading) -> Sequences:
    """Read a whole text as sequences; NO_TARGET pads the last. A BOS begins each document. Each
    token but the first is a target once. Bytes and Llama's tokens are not counted if the tokenizer
    loses text. Llama's need its tokenizer, at $LLAMA_TOKENIZER or in data_dir."""
    llama = find_llama(data_dir)
    n_ids = text_bytes = llama_tokens = 0
    lossless = True
    # The ids go to a file: a text may be larger than memory
    with name_in_errors(tempfile.gettempdir()), tempfile.TemporaryFile() as file:
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
    if not lossless:
        print('No bits per byte: the tokenizer loses some of this text', flush=True)
        return sequences, None, None
    return sequences, text_bytes, llama_tokens if llama else None


def read_shards(folder: str, split: str, tokens: int, length: int, tokenizer: Any,
                known: dict[str, Any]) -> Sequences:
    """Read evenly spaced sequences of token shards, with at most so many targets. UserError if the
    shards are not there, or if their identity differs from what is `known` of it: the tokenizer,
    and for a run's own data all of it."""
    check(os.path.exists(folder), f'{folder}, the data to evaluate on, is not here: --text=FILE '
          'evaluates on a text, --data=FOLDER on other data')
    data = TokenDataset(folder, split, length)
    for name, value in data.identity.items():
        saved = known.get(name, value)
        check(value == saved, f'data={folder}: its {name} is {value}, that of the run {saved}; '
              'expected data of the same tokenizer, or the same data as in training unless '
              '--data is given')
    x, y = data.batch(evenly_spaced(len(data), tokens // length))
    token_bytes = spelled_bytes(tokenizer, data.meta)
    text_bytes = None if token_bytes is None else int(token_bytes[y].sum())
    return torch.cat([x, y[:, -1:]], dim=1), text_bytes, None


# Losses

def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss in nats of each target (B, J) of logits (B, J, vocabulary): (B, J), float64,
    on the CPU. It is 0 for targets of -100."""
    # Compute a sequence at a time: float32 logits take much memory
    return torch.stack([
        F.cross_entropy(row.float(), y, reduction='none', ignore_index=NO_TARGET)
        for row, y in zip(logits, targets, strict=True)]).cpu().double()


def loss_sums(logits: Tensor, targets: Tensor, bos: int) -> Tensor:
    """Return three sums over the targets (B, J) of logits (B, J, vocabulary): their number, their
    loss in nats, and the loss of text: of those that are not BOS. (3,), float64, on the CPU.
    Targets of -100 count in none."""
    losses, targets = token_losses(logits, targets), targets.cpu()
    n_targets = (targets != NO_TARGET).sum()
    return torch.stack([n_targets, losses.sum(), losses[targets != bos].sum()])


def bits_per_byte(nats: float, text_bytes: float) -> float:
    """Return the loss of a whole text, in nats, as bits per byte."""
    return nats / math.log(2) / text_bytes


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity from a loss of 50 on, which only a diverged model has."""
    return math.inf if loss >= 50 else math.exp(loss)  # NaN stays NaN

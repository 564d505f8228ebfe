"""Folders of token shards, and the order in which training reads them."""
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from configurator import fail
from nanocem.files import read_json, say

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
BUILTIN = 'data/builtin'


class Sequences:
    """A split cut into sequences of `length` tokens: sequence n's inputs are tokens[n * length:]
    [:length], its targets the same one further on. Each shard is cut by itself. `meta` is the
    folder's meta.json. Bad files end the program with a line that names them."""
    def __init__(self, folder: str, split: str, length: int, vocab_size: int | None = None):
        self.meta = read_meta(folder)
        self.length = length
        self.vocab_size = vocab_size or self.meta['vocab_size']
        self.paths: list[str] = []
        self.shards: list[np.ndarray] = []
        dtype = np.dtype(self.meta['dtype']).newbyteorder('<')
        fingerprint = 0
        for shard in self.meta['splits'].get(split, {}).get('shards', []):
            path = os.path.join(folder, shard['file'])
            if not os.path.isfile(path):
                fail(f'{path} is missing; prepare the data again')
            if os.path.getsize(path) != shard['tokens'] * dtype.itemsize:
                fail(f'{path} has {os.path.getsize(path)} bytes, {folder}/meta.json says '
                     f'{shard["tokens"]} tokens of {dtype.itemsize}: it was cut off or changed; '
                     'prepare the data again')
            if shard['tokens'] <= length:
                continue  # too short for a sequence
            try:
                tokens = np.memmap(path, dtype=dtype, mode='r')
            except OSError as error:
                fail(f'{path} cannot be read ({error.strerror})')
            places = np.linspace(0, len(tokens) - 4096, 32).clip(0).astype(int)  # a look at 32
            for at in places:
                self.check(tokens[at:at + 4096], path)
                fingerprint = zlib.crc32(tokens[at:at + 4096].tobytes(), fingerprint)
            self.paths.append(path)
            self.shards.append(tokens)
        if not self.shards:
            fail(f'{folder}: no shard of the {split} split holds a sequence of context_length + 1 '
                 f'= {length + 1} tokens')
        counts = [(len(tokens) - 1) // length for tokens in self.shards]
        self.starts = np.cumsum([0, *counts])  # the first sequence of each shard
        self.identity = {
            'tokenizer': self.meta['tokenizer'],
            'tokenizer_sha256': self.meta.get('tokenizer_sha256'),
            'vocab_size': self.meta['vocab_size'],
            f'{split} tokens': sum(map(len, self.shards)),
            f'{split} fingerprint': fingerprint}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def check(self, tokens: np.ndarray, path: str) -> None:
        highest = int(tokens.max())
        if highest >= self.vocab_size:
            fail(f'{path} holds token {highest}, outside the vocabulary of {self.vocab_size}: the '
                 "data is another tokenizer's or damaged (prepare_slimpajama.py --verify checks "
                 'it)', everywhere=True)

    def batch(self, numbers: np.ndarray) -> 'tuple[Tensor, Tensor]':
        """Inputs and targets (B, length) of these sequences."""
        import torch  # here: preparing data needs this file and no torch
        rows = []
        for number in numbers:
            shard = int(np.searchsorted(self.starts, number, side='right')) - 1
            at = int(number - self.starts[shard]) * self.length
            rows.append(self.shards[shard][at:at + self.length + 1])
            self.check(rows[-1], self.paths[shard])
        block = torch.from_numpy(np.stack(rows).astype(np.int64))
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def unigram_entropy(self, tokens: int = 1_000_000) -> float:
        """Nats a token, over the first `tokens`: the loss of a model that knows how often each
        token occurs, and nothing of the context."""
        counts = np.bincount(self.shards[0][:tokens])
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


def evenly_spaced(n_sequences: int, count: int) -> np.ndarray:
    """The numbers of `count` evenly spaced sequences, at least one, at most all."""
    count = min(n_sequences, max(1, count))
    return np.arange(count) * n_sequences // count


def find_data(folder: str, text: str | None = None, tokenizer: str | None = None) -> str:
    """The data folder: made from a text of the user's, or, at first use, from Python's sources."""
    if text:
        from prepare_slimpajama import prepare_text
        return prepare_text(text, tokenizer)
    if folder.rstrip('/') == BUILTIN and not os.path.exists(os.path.join(BUILTIN, 'meta.json')):
        say(f"Preparing {BUILTIN} from the Python standard library's source")
        from prepare_slimpajama import prepare_builtin
        prepare_builtin(BUILTIN)
    return folder


def read_meta(folder: str) -> dict[str, Any]:
    """A data folder's meta.json, its parts there and of the right kind. SystemExit."""
    path = os.path.join(folder, 'meta.json')
    meta = read_json(path, 'prepare the data again') if os.path.isdir(folder) else None
    if meta is None:
        fail(f'{path} is missing: python prepare_slimpajama.py makes data/slimpajama; '
             f'--data={BUILTIN} needs no download')
    if 'format' in meta and meta['format'] != FORMAT:
        fail(f'{path}: format {meta["format"]}, this version reads {FORMAT}; prepare the data '
             'again')
    try:
        sizes = [meta['format'], meta['vocab_size'], np.dtype(meta['dtype']).itemsize]
        names = [meta['tokenizer']]
        for split in meta['splits'].values():
            sizes += [shard['tokens'] for shard in split.get('shards', [])]
            names += [shard['file'] for shard in split.get('shards', [])]
        whole = all(type(size) is int for size in sizes) and all(type(n) is str for n in names)
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        fail(f'{path} is damaged: prepare the data again')
    return meta


class Order:
    """Which sequences step s reads: a pure function of (seed, s). Every epoch is a permutation of
    all sequences."""
    def __init__(self, n_sequences: int, batch_size: int, seed: int):
        self.n_sequences = n_sequences
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = -1  # of self.permutation
        self.permutation = np.empty(0, int)

    def __call__(self, step: int) -> np.ndarray:
        first = step * self.batch_size
        return np.array([self.sequence(first + b) for b in range(self.batch_size)])

    def sequence(self, n: int) -> int:
        """The n-th sequence read since the start of training."""
        epoch = n // self.n_sequences
        if epoch != self.epoch:
            self.epoch = epoch
            rng = np.random.default_rng([self.seed, epoch])
            self.permutation = rng.permutation(self.n_sequences)
        return self.permutation[n % self.n_sequences]

"""Folders of token shards: how they are written, and the order in which training reads them."""
import hashlib
import os
import re
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configurator import fail
from nanocem.files import read_json

FORMAT = 1
SPLITS = ('train', 'val', 'test')
OUR_SHARD = re.compile(r'(train_\d{5,}|val|test)\.bin')


def read_meta(folder: str) -> dict[str, Any]:
    """A data folder's meta.json, its parts there and of the right kind. SystemExit."""
    path = os.path.join(folder, 'meta.json')
    meta = read_json(path, 'prepare the data again') if os.path.isdir(folder) else None
    if meta is None:
        fail(f'{path} is missing: python prepare_slimpajama.py makes data/slimpajama; '
             '--data=data/builtin needs no download')
    try:
        shards = [shard for split in meta['splits'].values() for shard in split.get('shards', [])]
        sizes = [meta['vocab_size'], *(shard['tokens'] for shard in shards)]
        whole = all(type(size) is int and size > 0 for size in sizes)
        whole &= type(meta['tokenizer']) is str and meta['dtype'] in ('uint16', 'uint32')
        whole &= meta['format'] == FORMAT
        # a bare name: a path could lead out of the folder
        whole &= all(shard['file'] == os.path.basename(shard['file']) for shard in shards)
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        fail(f'{path} is damaged, or of another version: prepare the data again')
    return meta


def open_shard(folder: str, meta: dict[str, Any], shard: dict[str, Any]) -> np.memmap:
    """A shard's tokens, left on the disk; as many as meta.json says. SystemExit."""
    path = os.path.join(folder, shard['file'])
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    size = os.path.getsize(path) if os.path.isfile(path) else 0  # a pipe would be waited for
    if size != shard['tokens'] * dtype.itemsize:
        fail(f'{path} has {size} bytes, {folder}/meta.json says {shard["tokens"]} tokens of '
             f'{dtype.itemsize}: it is missing, cut off or changed; prepare the data again')
    try:
        return np.memmap(path, dtype, 'r')
    except OSError as error:
        fail(f'{path} cannot be read ({error.strerror})')


# Reading

class Sequences:
    """A split cut into sequences of `length` tokens: sequence n's inputs are tokens[n * length:]
    [:length], its targets the same one further on. Each shard is cut by itself. SystemExit."""
    def __init__(self, folder: str, split: str, length: int, vocab_size: int | None = None):
        self.meta = read_meta(folder)
        self.length = length
        self.vocab_size = vocab_size or self.meta['vocab_size']
        self.shards: list[np.memmap] = []
        fingerprint = 0
        for shard in self.meta['splits'].get(split, {}).get('shards', []):
            tokens = open_shard(folder, self.meta, shard)
            if len(tokens) <= length:
                continue  # too short for a sequence
            # 32 places tell damaged and other data from this
            for at in np.linspace(0, len(tokens) - 4096, 32).clip(0).astype(int):
                self.check(tokens[at:at + 4096])
                fingerprint = zlib.crc32(tokens[at:at + 4096].tobytes(), fingerprint)
            self.shards.append(tokens)
        if not self.shards:
            fail(f'{folder}: no shard of the {split} split holds a sequence of context_length + 1 '
                 f'= {length + 1} tokens')
        counts = [(len(tokens) - 1) // length for tokens in self.shards]
        self.first = np.cumsum([0, *counts])  # the first sequence of each shard
        self.identity = {
            'tokenizer': self.meta['tokenizer'],
            'tokenizer_sha256': self.meta.get('tokenizer_sha256'),
            'vocab_size': self.meta['vocab_size'],
            f'{split} tokens': sum(map(len, self.shards)),
            f'{split} fingerprint': fingerprint}

    def __len__(self) -> int:
        return int(self.first[-1])

    def check(self, tokens: np.memmap) -> None:
        highest = int(tokens.max())
        if highest >= self.vocab_size:
            fail(f'{tokens.filename} holds token {highest}, outside the vocabulary of '
                 f"{self.vocab_size}: the data is another tokenizer's or damaged",
                 everywhere=True)

    def batch(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, length) of these sequences."""
        rows = []
        for number in numbers:
            shard = int(np.searchsorted(self.first, number, side='right')) - 1
            at = int(number - self.first[shard]) * self.length
            rows.append(self.shards[shard][at:at + self.length + 1])
            self.check(rows[-1])
        block = torch.from_numpy(np.stack(rows).astype(np.int64))
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


class Order:
    """Which sequences step s reads, a function of (seed, s): every epoch is a permutation."""
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


def evenly_spaced(n_sequences: int, count: int) -> np.ndarray:
    """The numbers of `count` evenly spaced sequences, at least one, at most all."""
    count = min(n_sequences, max(1, count))
    return np.arange(count) * n_sequences // count


# Writing

class Writer:
    """The shards of a folder while they grow."""
    def __init__(self, folder: str, vocab_size: int, shard_tokens: int):
        self.folder = folder
        self.shard_tokens = shard_tokens
        self.dtype = np.dtype('<u2' if vocab_size <= 2 ** 16 else '<u4')
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.waiting = {split: bytearray() for split in SPLITS}  # not on the disk yet

    def shards(self, split: str) -> dict[str, int]:
        """The names of a split's shards, and their tokens; val and test have one."""
        total = self.tokens[split]
        if split != 'train':
            return {f'{split}.bin': total} if total else {}
        return {f'train_{number:05d}.bin': min(self.shard_tokens, total - first)
                for number, first in enumerate(range(0, total, self.shard_tokens))}

    def rewind(self, tokens: dict[str, int]) -> None:
        """Go back to so many tokens a split."""
        self.flush()
        self.tokens = dict(tokens)
        right = {name: n for split in SPLITS for name, n in self.shards(split).items()}
        for name in filter(OUR_SHARD.fullmatch, os.listdir(self.folder)):
            if name not in right:
                os.remove(os.path.join(self.folder, name))
        for name, count in right.items():
            path = os.path.join(self.folder, name)
            size = count * self.dtype.itemsize
            if not os.path.isfile(path) or os.path.getsize(path) < size:
                fail(f'{path} is shorter than progress.json says: delete the folder')
            os.truncate(path, size)

    def append(self, split: str, ids: np.ndarray) -> None:
        """Tokens to a split's end; on the disk after `flush`."""
        self.waiting[split] += ids.astype(self.dtype).tobytes()
        self.tokens[split] += len(ids)
        if len(self.waiting[split]) > 1 << 23:
            self.flush()

    def flush(self) -> None:
        """All tokens to the disk."""
        for split, data in self.waiting.items():
            self.waiting[split] = bytearray()
            at = self.tokens[split] * self.dtype.itemsize - len(data)
            while data:
                name, room = f'{split}.bin', len(data)
                if split == 'train':
                    number, used = divmod(at, self.shard_tokens * self.dtype.itemsize)
                    name = f'train_{number:05d}.bin'
                    room = self.shard_tokens * self.dtype.itemsize - used
                with open(os.path.join(self.folder, name), 'ab') as file:
                    file.write(data[:room])
                    file.flush()
                    os.fsync(file.fileno())
                at += room
                data = data[room:]

    def describe(self, bos: int) -> dict[str, Any]:
        """What meta.json says of the splits."""
        splits = {}
        for split in SPLITS:
            shards = [{'file': name, **summary(os.path.join(self.folder, name), self.dtype, bos)}
                      for name in self.shards(split)]
            documents = sum(shard['documents'] for shard in shards)
            splits[split] = {'tokens': self.tokens[split], 'documents': documents, 'shards': shards}
        return splits


def summary(path: str, dtype: np.dtype, bos: int) -> dict[str, Any]:
    """What meta.json says of a shard: tokens, documents, SHA-256."""
    tokens = documents = 0
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while data := file.read(1 << 24):
            ids = np.frombuffer(data[:len(data) // dtype.itemsize * dtype.itemsize], dtype)
            digest.update(data)
            tokens += len(ids)
            documents += int(np.count_nonzero(ids == bos))  # no text has a BOS in it
    return {'tokens': tokens, 'documents': documents, 'sha256': digest.hexdigest()}

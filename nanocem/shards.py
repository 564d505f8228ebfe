"""Folders of token shards, and the order in which training reads them."""
import json
import os
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configurator import fail

FORMAT = 1
BUILTIN = 'data/builtin'


class Pieces:
    """A split cut into pieces of `length` tokens: inputs tokens[p * length:][:length], targets the same one further on.
    Each shard is cut by itself. `meta` is the folder's meta.json. Bad files end the program with a line that names them."""
    def __init__(self, folder: str, split: str, length: int, vocab_size: int | None = None):
        self.meta, self.length = read_meta(folder), length
        self.vocab_size = vocab_size or self.meta['vocab_size']
        dtype = np.dtype(self.meta['dtype']).newbyteorder('<')
        self.paths, self.shards, fingerprint = [], [], 0
        for shard in self.meta['splits'].get(split, {}).get('shards', []):
            path = os.path.join(folder, shard['file'])
            if not os.path.isfile(path):
                fail(f'{path} is missing; prepare the data again')
            if os.path.getsize(path) != shard['tokens'] * dtype.itemsize:
                fail(f'{path} has {os.path.getsize(path)} bytes, {folder}/meta.json says {shard["tokens"]} tokens of '
                     f'{dtype.itemsize}: it was cut off or changed; prepare the data again')
            if shard['tokens'] <= length:
                continue  # too short for a piece
            tokens = np.memmap(path, dtype=dtype, mode='r')
            for at in np.linspace(0, len(tokens) - 4096, 32).clip(0).astype(int):  # a look at 32 places
                self.check(tokens[at:at + 4096], path)
                fingerprint = zlib.crc32(tokens[at:at + 4096].tobytes(), fingerprint)
            self.paths.append(path)
            self.shards.append(tokens)
        counts = [(len(tokens) - 1) // length for tokens in self.shards]
        self.starts = np.cumsum([0, *counts])  # the first piece of each shard
        if not self.shards:
            fail(f'{folder}: no shard of the {split} split holds a piece of context_length + 1 = {length + 1} tokens')
        self.identity = {'tokenizer': self.meta['tokenizer'], 'tokenizer_sha256': self.meta.get('tokenizer_sha256'),
                         'vocab_size': self.meta['vocab_size'], f'{split} tokens': sum(map(len, self.shards)),
                         f'{split} fingerprint': fingerprint}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def check(self, tokens: np.ndarray, path: str) -> None:
        if (highest := int(tokens.max())) >= self.vocab_size:
            fail(f'{path} holds token {highest}, outside the vocabulary of {self.vocab_size}: the data is another '
                 "tokenizer's or damaged (prepare_slimpajama.py --verify checks it)", everywhere=True)

    def batch(self, pieces: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, length) of these pieces."""
        rows = []
        for piece in pieces:
            shard = int(np.searchsorted(self.starts, piece, side='right')) - 1
            at = int(piece - self.starts[shard]) * self.length
            rows.append(self.shards[shard][at:at + self.length + 1])
            self.check(rows[-1], self.paths[shard])
        block = torch.from_numpy(np.stack(rows).astype(np.int64))
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def read_meta(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, 'meta.json')
    try:
        with open(path, encoding='utf-8') as file:
            meta = json.load(file)
        if meta['format'] != FORMAT:
            fail(f'{path}: format {meta["format"]}, this version reads {FORMAT}; prepare the data again')
        if not {'splits', 'vocab_size', 'dtype', 'tokenizer'} <= set(meta):
            raise KeyError
        return meta
    except FileNotFoundError:
        fail(f'{path} is missing: python prepare_slimpajama.py makes data/slimpajama; --data={BUILTIN} needs no download')
    except (ValueError, KeyError, TypeError):
        fail(f'{path} is damaged: prepare the data again')


class Order:
    """Which pieces step s reads: a pure function of (seed, s). Every epoch is a permutation of all pieces."""
    def __init__(self, n_pieces: int, batch_size: int, seed: int):
        self.n_pieces, self.batch_size, self.seed, self.epoch, self.permutation = n_pieces, batch_size, seed, -1, None

    def __call__(self, step: int) -> np.ndarray:
        return np.array([self.piece(step * self.batch_size + b) for b in range(self.batch_size)])

    def piece(self, n: int) -> int:
        if n // self.n_pieces != self.epoch:
            self.epoch = n // self.n_pieces
            self.permutation = np.random.default_rng([self.seed, self.epoch]).permutation(self.n_pieces)
        return self.permutation[n % self.n_pieces]

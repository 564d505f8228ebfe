"""Read data folders: the sequences of a split, and which of them each batch holds."""
import os
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configurator import check
from nanocem.files import read_json

FORMAT = 1  # the version of meta.json
TOKENIZER_KEYS = ('tokenizer', 'tokenizer_sha256', 'vocab_size')  # in meta.json


def read_meta(folder: str) -> dict[str, Any]:
    """Read the meta.json of a data folder. UserError if it is missing or not of this format."""
    path = os.path.join(folder, 'meta.json')
    meta = read_json(path)
    check(meta is not None,
          f'{path} is missing: python prepare_slimpajama.py makes data/slimpajama; '
          'python train.py config/mini.py trains on a laptop, without a download')
    check(meta['format'] == FORMAT, f'{path} is of another version: prepare the data again')
    return meta


class TokenDataset:
    """Sequences of `length` tokens of a split. Sequence n of a shard begins at token n * length,
    its targets one token later. A resumed run needs equal `must_match`. UserError if the split
    holds no sequence."""
    def __init__(self, folder: str, split: str, length: int):
        self.meta = read_meta(folder)
        self.length = length
        # Map the tokens of each shard, (n,), into memory
        dtype = np.dtype(self.meta['dtype']).newbyteorder('<')
        shards = []
        for shard in self.meta['splits'][split]['shards']:
            path = os.path.join(folder, shard['file'])
            check(os.path.getsize(path) >= shard['tokens'] * dtype.itemsize,
                  f'{path} is cut off: copy it or prepare the data again')
            shards.append(np.memmap(path, dtype, 'r', shape=shard['tokens']))
        self.shards = [tokens for tokens in shards if len(tokens) > length]
        check(len(self.shards) > 0, f'{folder}: no shard of the {split} split holds a sequence of '
              f'context_length + 1 = {length + 1} tokens: expected a smaller context_length, or '
              'longer text')
        # Find the index of the first sequence of each shard, and at the end their number
        self.first_sequence = np.cumsum([0, *((len(t) - 1) // length for t in self.shards)])
        # Compute a checksum of 32 pieces of each shard, to recognize damaged or other data
        fingerprint = 0
        for tokens in self.shards:
            for begin in np.linspace(0, len(tokens) - 4096, 32).clip(0).astype(int):
                fingerprint = zlib.crc32(tokens[begin:begin + 4096].tobytes(), fingerprint)
        self.must_match = {name: self.meta.get(name) for name in TOKENIZER_KEYS} | {
            f'{split} tokens': sum(map(len, self.shards)), f'{split} fingerprint': fingerprint}

    def __len__(self) -> int:
        return int(self.first_sequence[-1])

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read the inputs and targets, both (B, length), of the sequences with these indices."""
        sequences = []
        for index in indices:
            shard = int(np.searchsorted(self.first_sequence, index, side='right')) - 1  # its shard
            begin = int(index - self.first_sequence[shard]) * self.length
            sequences.append(self.shards[shard][begin:begin + self.length + 1])
        ids = torch.from_numpy(np.stack(sequences).astype(np.int64))  # (B, length + 1)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class BatchSampler:
    """Choose the sequences of each step. Every epoch reads all of them once, in a random order. The
    choice depends on the seed and the step alone, so that a resumed run reads the same data."""
    def __init__(self, n_sequences: int, batch_size: int, seed: int):
        self.n_sequences = n_sequences
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = -1  # the epoch for which self.permutation was made
        self.permutation = np.empty(0, int)

    def __call__(self, step: int) -> np.ndarray:
        """Return the indices (batch_size,) of the sequences of this step."""
        first = step * self.batch_size
        return np.array([self.sequence(n) for n in range(first, first + self.batch_size)])

    def sequence(self, n: int) -> int:
        """Return the index of the n-th sequence that training reads."""
        epoch = n // self.n_sequences
        if epoch != self.epoch:
            self.epoch = epoch
            rng = np.random.default_rng([self.seed, epoch])
            self.permutation = rng.permutation(self.n_sequences)
        return self.permutation[n % self.n_sequences]


def evenly_spaced(n_sequences: int, count: int) -> np.ndarray:
    """Return the indices (count,) of evenly spaced sequences: at least one, and at most all."""
    count = min(n_sequences, max(1, count))
    return np.arange(count) * n_sequences // count

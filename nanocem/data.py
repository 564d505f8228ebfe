"""Read data folders: the sequences of a split, and which of them each batch holds."""
import os
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configurator import check
from nanocem.files import other_files, read_json

FORMAT = 1  # the version of meta.json
CHECKED = 1 << 20  # bytes of a shard for each checksum
TOKENIZER_KEYS = ('tokenizer', 'tokenizer_sha256', 'vocab_size')  # in meta.json


def read_meta(folder: str) -> dict[str, Any]:
    """Read the meta.json of a data folder. UserError if it is missing or not of this format."""
    path = os.path.join(folder, 'meta.json')
    meta = read_json(path)
    others = other_files(folder)
    check(meta is not None or not others, f'{path} is missing: {folder} is not a data folder, and '
          f'holds {", ".join(others[:3])}. --text=FILE trains on a text, such as the input.txt of '
          "one of nanoGPT's folders")
    check(meta is not None,
          f'{path} is missing: python prepare_slimpajama.py --out_dir={folder} makes it of '
          'SlimPajama, or of --input=TEXT; python train.py config/mini.py needs neither')
    check(meta.get('format') == FORMAT, f'{path} is of another version: prepare the data again')
    return meta


def checksums(path: str) -> list[int]:
    """Return the checksum (CRC-32) of each CHECKED bytes of a file."""
    with open(path, 'rb') as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(CHECKED), b'')]


class TokenDataset:
    """Sequences of `length` tokens of a split. Sequence n of a shard begins at token n * length,
    its targets one token later. `identity` says which tokens it has. UserError if the split
    holds no sequence."""
    def __init__(self, folder: str, split: str, length: int):
        self.meta = read_meta(folder)
        self.folder = folder
        self.length = length
        check(folder == folder.encode(errors='replace').decode(), f'{folder!r} is not UTF-8: give '
              'the folder another name')  # torch maps no such file
        all_shards = self.meta['splits'][split]['shards']
        check(len(all_shards) > 0, f'{folder}: no shard of the {split} split: prepare the '
              'data again, with --held_out above 0')
        dtype = np.dtype(self.meta['dtype']).newbyteorder('<')
        # Leave out shards that are too short for a sequence
        self.described = [shard for shard in all_shards if shard['tokens'] > length]
        check(len(self.described) > 0, f'{folder}: no shard of the {split} split holds a sequence '
              f'of context_length + 1 = {length + 1} tokens (it has '
              f'{sum(shard["tokens"] for shard in all_shards):,}): expected a smaller '
              'context_length, a longer text, or data that prepare_slimpajama.py made with a '
              'larger --held_out')
        # Map the tokens of each shard, (n,), into memory. torch keeps no file open, NumPy does
        self.shards = []
        for shard in self.described:
            path = os.path.join(folder, shard['file'])
            size = shard['tokens'] * dtype.itemsize
            check(os.path.getsize(path) >= size,
                  f'{path} is cut off: copy it or prepare the data again')
            mapped = torch.from_file(path, size=size, dtype=torch.uint8)
            self.shards.append(mapped.numpy().view(dtype))
        # Find the index of the first sequence of each shard, and at the end their number
        self.first_sequence = np.cumsum([0, *((len(t) - 1) // length for t in self.shards)])
        # Identify the data by the checksum of all blocks' checksums. Shards that another program
        # wrote may have none: theirs are computed here, by reading the whole shard
        sums = [shard.get('crc32') or checksums(os.path.join(folder, shard['file']))
                for shard in self.described]
        self.identity = {name: self.meta.get(name) for name in TOKENIZER_KEYS} | {
            f'{split} tokens': sum(map(len, self.shards)),
            f'{split} checksum': zlib.crc32(repr(sums).encode())}
        # Remember which blocks of each shard have been compared with their checksum
        self.intact = [set() for _ in self.shards]

    def check_blocks(self, shard: int, begin: int, end: int) -> None:
        """UserError if one of the blocks that hold tokens `begin` to `end` of a shard is damaged.
        Each block is compared when it is first read, so that no start waits for a large shard.
        Shards that another program wrote may have no checksums."""
        tokens, described = self.shards[shard], self.described[shard]
        n = CHECKED // tokens.itemsize  # tokens of a block
        for block in range(begin // n, (end - 1) // n + 1):
            if block in self.intact[shard] or 'crc32' not in described:
                continue
            found = zlib.crc32(tokens[block * n:(block + 1) * n])
            check(found == described['crc32'][block], f'{self.folder}/{described["file"]} is '
                  f'damaged near token {block * n:,}: copy it or prepare the data again')
            self.intact[shard].add(block)

    def __len__(self) -> int:
        return int(self.first_sequence[-1])

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read the inputs and targets, both (B, length), of the sequences with these indices.
        UserError if the shards are damaged."""
        sequences = []
        for index in indices:
            shard = int(np.searchsorted(self.first_sequence, index, side='right')) - 1  # its shard
            begin = int(index - self.first_sequence[shard]) * self.length
            end = begin + self.length + 1
            self.check_blocks(shard, begin, end)
            sequences.append(self.shards[shard][begin:end])
        ids = torch.from_numpy(np.stack(sequences).astype(np.int64))  # (B, length + 1)
        check(int(ids.max()) < self.meta['vocab_size'], f'{self.folder} has id {int(ids.max())}, '
              f'and its vocabulary {self.meta["vocab_size"]} ids: prepare the data again')
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class BatchSampler:
    """Choose the sequences of each step. Every epoch reads all of them once, in a random order. The
    choice depends only on the seed and the step, so that a resumed run reads the same data."""
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

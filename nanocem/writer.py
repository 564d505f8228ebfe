"""Token shards while they grow, and what a shard holds."""
import hashlib
import os
import re
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

from configurator import fail

SPLITS = ('train', 'val', 'test')
OUR_SHARD = re.compile(r'(?:train_\d{5,}|val|test)\.bin(?:\.part)?')


def is_whole(state: dict[str, Any]) -> bool:
    """Whether a progress.json is what a stopped run leaves."""
    kinds = dict(source=str, listing=str, by_position=bool, file=int, tokens=dict, last=dict,
                 skipped=dict)
    return all(type(state.get(name)) is kind for name, kind in kinds.items()) and all(
        type(n) is int and n >= 0
        for n in (state['file'], *map(state['tokens'].get, SPLITS), *state['last'].values()))


class Writer:
    """The shards of a folder. They grow as NAME.part and get their names together, at the end."""
    def __init__(self, folder: str, dtype: np.dtype, bos: int, shard_tokens: int):
        self.folder, self.dtype, self.bos, self.shard_tokens = folder, dtype, bos, shard_tokens
        self.open: dict[str, BinaryIO] = {}
        self.tokens = dict.fromkeys(SPLITS, 0)

    def shards(self, split: str) -> list[tuple[str, int]]:
        """(file name, tokens) of the shards of a split; val and test have one."""
        total, size = self.tokens[split], self.shard_tokens
        if split != 'train':
            return [(f'{split}.bin', total)] if total else []
        count = -(-total // size)
        return [(f'train_{i:05d}.bin', min(size, total - i * size)) for i in range(count)]

    def rewind(self, tokens: dict[str, int]) -> None:
        """Go back to so many tokens a split."""
        for file in self.open.values():
            file.close()
        self.open, self.tokens = {}, dict(tokens)
        right = dict(chain.from_iterable(self.shards(split) for split in SPLITS))
        for name in filter(OUR_SHARD.fullmatch, os.listdir(self.folder)):
            path = os.path.join(self.folder, name)
            if name.removesuffix('.part') not in right:
                os.remove(path)
            elif not name.endswith('.part'):  # the run was stopped while it named them
                os.replace(path, path + '.part')
        for name, count in right.items():
            path = os.path.join(self.folder, name + '.part')
            size = count * self.dtype.itemsize
            if not os.path.isfile(path) or os.path.getsize(path) < size:
                fail(f'{path} is shorter than progress.json says: delete the folder and start '
                     'again')
            os.truncate(path, size)

    def append(self, split: str, ids: np.ndarray) -> None:
        while len(ids):
            name, room = f'{split}.bin', len(ids)
            if split == 'train':
                number, at = divmod(self.tokens[split], self.shard_tokens)
                name, room = f'train_{number:05d}.bin', self.shard_tokens - at
            if name not in self.open:
                path = os.path.join(self.folder, name + '.part')
                self.open[name] = open(path, 'ab')  # noqa: SIM115  open to the end
            self.open[name].write(ids[:room].astype(self.dtype).tobytes())
            self.tokens[split] += len(ids[:room])
            ids = ids[room:]

    def sync(self) -> None:
        """All tokens to the disk."""
        for file in self.open.values():
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> dict[str, Any]:
        """Name the shards; what meta.json says of them."""
        self.sync()
        splits = {}
        for split in SPLITS:
            shards = []
            for name, tokens in self.shards(split):
                path = os.path.join(self.folder, name)
                seen = look_at(path + '.part', self.dtype, self.bos)
                shards.append({'file': name, 'tokens': tokens, 'documents': seen['documents'],
                               'sha256': seen['sha256']})
                os.replace(path + '.part', path)
            documents = sum(shard['documents'] for shard in shards)
            splits[split] = {'tokens': self.tokens[split], 'documents': documents, 'shards': shards}
        return splits


def look_at(path: str, dtype: np.dtype, bos: int) -> dict[str, Any]:
    """What a shard holds: tokens, documents, highest token, SHA-256."""
    seen = {'tokens': 0, 'documents': 0, 'highest': 0}
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while data := file.read(1 << 24):
            ids = np.frombuffer(data[:len(data) // dtype.itemsize * dtype.itemsize], dtype)
            digest.update(data)
            seen['tokens'] += len(ids)
            seen['documents'] += int(np.count_nonzero(ids == bos))  # no text has a BOS in it
            seen['highest'] = max(seen['highest'], int(ids.max(initial=0)))
    return {**seen, 'sha256': digest.hexdigest()}

"""
Text to token shards that train.py reads.

    python prepare_slimpajama.py --input=builtin --out_dir=data/builtin

A folder of shards: train_00000.bin, ..., val.bin, test.bin (little-endian uint16) and meta.json (format version, tokenizer,
vocabulary, and for every split its documents, tokens and shards with their SHA-256).
"""
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from typing import Any

import numpy as np

FORMAT = 1


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and BOS, 256."""
    name, vocab_size, bos, sha256 = 'byte', 257, 256, None

    def encode(self, text: str) -> list[int]:
        return list(text.encode('utf-8', 'surrogateescape'))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode('utf-8', 'replace')


def load_tokenizer(data_dir: str) -> ByteTokenizer:
    """The tokenizer that made `data_dir`."""
    return ByteTokenizer()


def builtin_documents() -> Iterator[str]:
    """The Python standard library's own source, a file a document, without its tests; in the order of the file names."""
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}
    for folder, subfolders, files in os.walk(sysconfig.get_paths()['stdlib']):
        subfolders[:] = sorted(set(subfolders) - left_out)
        for name in sorted(files):
            if name.endswith('.py'):
                with open(os.path.join(folder, name), encoding='utf-8', errors='surrogateescape') as file:
                    yield file.read()


def split_of(text: str, held_out: float) -> str:
    """The split of a document, by a hash of its text alone: val and test get a share of `held_out` each."""
    x = int.from_bytes(hashlib.sha256(text.encode('utf-8', 'surrogateescape')).digest()[:8], 'big') / 2 ** 64
    return 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'


def write_whole(path: str, data: bytes) -> None:
    """Write a file whole or not at all."""
    with open(path + '.tmp', 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.tmp', path)


def prepare_builtin(out_dir: str) -> None:
    """Make the built-in corpus in `out_dir`: about 12 million bytes, nothing downloaded."""
    tokenizer, tokens, documents = ByteTokenizer(), {}, {}
    for text in builtin_documents():
        if text:
            split = split_of(text, held_out=0.05)
            tokens.setdefault(split, []).append(np.array([tokenizer.bos, *tokenizer.encode(text)], dtype='<u2'))
            documents[split] = documents.get(split, 0) + 1
    os.makedirs(out_dir, exist_ok=True)
    splits: dict[str, Any] = {}
    for split, name in (('train', 'train_00000.bin'), ('val', 'val.bin'), ('test', 'test.bin')):
        data = np.concatenate(tokens[split]).tobytes()
        write_whole(os.path.join(out_dir, name), data)
        shard = {'file': name, 'tokens': len(data) // 2, 'documents': documents[split],
                 'sha256': hashlib.sha256(data).hexdigest()}
        splits[split] = {'tokens': shard['tokens'], 'documents': shard['documents'], 'shards': [shard]}
    meta = {'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
            'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': 'uint16', 'splits': splits}
    write_whole(os.path.join(out_dir, 'meta.json'), json.dumps(meta, indent=1).encode())


if __name__ == '__main__':
    prepare_builtin('data/builtin')

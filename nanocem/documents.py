"""The documents of a file, and each in pieces that can be tokenized apart."""
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

from nanocem.tokenizers import CUT


class Bad(Exception):
    """A file that cannot be read to its end."""


@dataclass
class TextFile:
    """A text file as chunks of text, read anew at each pass: it may be larger than memory."""
    path: str

    def __iter__(self) -> Iterator[str]:
        with open(self.path, encoding='utf-8', errors='replace', newline='') as file:
            yield from iter(lambda: file.read(1 << 20), '')


def read_documents(path: str, column: str) -> Iterator[tuple[Iterable[str], float]]:
    """The documents of a file, each as chunks of text, and the share of the file read by then. Bad
    where it is damaged."""
    import pyarrow
    kind = path.lower()
    if kind.endswith(('.txt', '.py')):
        yield TextFile(path), 1.0
        return
    read = read_parquet if kind.endswith('.parquet') else read_jsonl
    try:
        for text, share in read(path, column):
            if not isinstance(text, str | None):
                raise Bad(f'a "{column}" that is no string but {text!r:.40}')
            # half a surrogate pair is no text
            whole = (text or '').encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
            yield [whole], share
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise Bad(str(error).partition('\n')[0]) from error


def read_parquet(path: str, column: str) -> Iterator[tuple[Any, float]]:
    from pyarrow.parquet import ParquetFile
    # buffer_size and pre_buffer: or pyarrow keeps all it has read in memory
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise Bad(f'no "{column}" column, only {", ".join(names)} (--column chooses)')
        done = 0
        for batch in file.iter_batches(64, columns=[column], use_threads=False):
            for text in batch.column(0).to_pylist():
                done += 1
                yield text, done / file.metadata.num_rows


def read_jsonl(path: str, column: str) -> Iterator[tuple[Any, float]]:
    from pyarrow import CompressedInputStream, OSFile
    codec = {'.zst': 'zstd', '.gz': 'gzip'}.get(os.path.splitext(path)[1].lower())
    with OSFile(path) as raw:
        size = raw.size()
        if codec and not size:
            raise Bad('empty')
        stream = CompressedInputStream(raw, codec) if codec else raw
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise Bad(f'line {number} is not JSON') from None
            if not isinstance(record, dict) or column not in record:
                raise Bad(f'line {number} has no "{column}" field (--column chooses)')
            yield record[column], raw.tell() / size


class Piece(NamedTuple):
    """A part of a document, of one split, that can be tokenized by itself."""
    split: str
    text: str
    begins: bool  # a document, or its part of this split
    ends: bool


def survey(chunks: Iterable[str]) -> tuple[float, int]:
    """A document's hash as a number in [0, 1), from its text alone, and its length."""
    digest = hashlib.sha256()
    length = 0
    for chunk in chunks:
        digest.update(chunk.encode())
        length += len(chunk)
    return int.from_bytes(digest.digest()[:8], 'big') / 2 ** 64, length


def split_of(x: float, held_out: float) -> str:
    """The split at x in [0, 1]: val and test get a share of `held_out` each."""
    return 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'


def cut(chunks: Iterable[str], size: int) -> Iterator[tuple[int, str]]:
    """A document as (position, text), each of `size` characters or, up to the next CUT, more."""
    rest = ''
    position = 0
    for chunk in chunks:
        rest += chunk
        at = 0
        while found := CUT.search(rest, at + size - 1):
            yield position + at, rest[at:found.end()]
            at = found.end()
        rest = rest[at:]
        position += at
    if rest:
        yield position, rest


def pieces(chunks: Iterable[str], size: int, split_at: Callable[[int], str]) -> Iterator[Piece]:
    """A document in pieces, each of the split that `split_at` gives its position."""
    before = None
    parts = ((split_at(position), text) for position, text in cut(chunks, size))
    for (split, text), (after, _) in pairwise(chain(parts, [(None, '')])):
        yield Piece(split, text, split != before, split != after)
        before = split


def batches(items: Iterable[tuple[Piece, float]], least: int,
            ) -> Iterator[tuple[list[Piece], float]]:
    """(piece, share) of a file together, so that a batch has at least so many characters."""
    batch, size, share = [], 0, 0.0
    for piece, share in items:
        batch.append(piece)
        size += len(piece.text)
        if size >= least:
            yield batch, share
            batch, size = [], 0
    yield batch, share

"""Where text comes from: files, folders, this Python's library, the Hub; and how it is cut."""
import codecs
import contextlib
import hashlib
import io
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from configurator import fail
from nanocem.tokenizers import CUT

HUB = 'hf://datasets/'
SUFFIXES = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz', '.txt')
CORPUS_SUFFIXES = ('.py', '.md', '.rst', '.txt')
LIBRARY = sysconfig.get_paths()['stdlib']
NO_LIBRARY = {'site-packages', 'dist-packages', '__pycache__'}
PART = 1 << 16  # characters a thread gets at a time; longer documents are cut
BATCH = 1 << 21  # characters all threads get at a time
SPLIT_IN_PATH = re.compile(r'(?:^|/)(train|val|test)(?:(?<=val)id(?:ation)?)?(?=[/._-])')


# Files

class File(NamedTuple):
    name: str  # below the source's folder
    size: int  # bytes; -1: no file to read
    changed: int = 0  # when, in nanoseconds; 0 on the Hub, where a commit never changes
    split: str | None = None  # the source's own: train, val, test


class Source(NamedTuple):
    """Files of documents, in the order they are read."""
    name: str  # a path, 'builtin', 'corpus', or hf://datasets/OWNER/NAME@COMMIT
    folder: str  # where the files are; the Hub's are in its cache
    files: list[File]
    left_out: list[str]  # files of other kinds

    def listing(self) -> str:
        """A digest of the files' names, sizes and times: another says that the input changed."""
        return hashlib.sha256(json.dumps(self.files).encode()).hexdigest()

    def path(self, file: File) -> str:
        """Where a file is; one of the Hub is downloaded to its cache first."""
        if not self.name.startswith(HUB):
            return os.path.join(self.folder, file.name)
        repository, commit = self.name.removeprefix(HUB).split('@')
        with hub() as hf:
            return hf.HfApi().hf_hub_download(repository, file.name, repo_type='dataset',
                                              revision=commit.split('/')[0])


def find_source(where: str, seed: int = 0) -> Source:
    """The files of an --input: its own held-out splits first, then by name, or shuffled where there
    is a seed. SystemExit where there are none."""
    name, folder = where, where
    if where == 'builtin':
        found = list_folder(LIBRARY, NO_LIBRARY | {'test', 'tests', 'idle_test'})
        python = [file for file in found if file.name.endswith('.py')]
        return Source(where, LIBRARY, python, [])
    if where == 'corpus':
        return Source(where, '', list_corpus(), [])
    if where.startswith(HUB):
        name, found = list_hub(where)
    elif os.path.isdir(where):
        found = list_folder(where)
    elif os.path.isfile(where):
        folder, base = os.path.split(where)
        found = [describe(where, base)]
    else:
        fail(f'input={where}: no such file or folder; the Hub is {HUB}OWNER/NAME')
    files, left_out = [], []
    for file in found:
        if file.size >= 0 and file.name.lower().endswith(SUFFIXES):
            files.append(file)
        else:
            left_out.append(file.name)
    if not files:
        fail(f'input={where} holds no {", ".join(SUFFIXES)} file')
    found = [SPLIT_IN_PATH.search(file.name) for file in files]
    # or else it is a folder that happens to be called test
    if any(match and match[1] == 'train' for match in found):
        files = [file._replace(split=match and match[1])
                 for file, match in zip(files, found, strict=True)]
    if seed:
        files.sort(key=lambda file: hashlib.sha256(os.fsencode(f'{seed}:{file.name}')).digest())
    files.sort(key=lambda file: file.split not in ('val', 'test'))
    return Source(name, folder, files, left_out)


def describe(path: str, name: str) -> File:
    if not os.path.isfile(path):  # a pipe would be waited for, for ever
        return File(name, -1)
    status = os.stat(path)
    return File(name, status.st_size, status.st_mtime_ns)


def list_folder(root: str, skip: Iterable[str] = ()) -> list[File]:
    """The files below a folder, its own before those of its folders, by name. Hidden ones are
    passed over, links to folders followed, no folder read twice."""
    def stop(error: OSError) -> None:
        raise error

    files, seen = [], set()
    for folder, subfolders, names in os.walk(root, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if name[0] != '.' and name not in skip)
        for name in sorted(name for name in names if name[0] != '.'):
            path = os.path.join(folder, name)
            files.append(describe(path, os.path.relpath(path, root)))
    return files


def list_corpus() -> list[File]:
    """Source and English of the standard library and of the packages in requirements.txt: no
    content twice, none that is blank or not UTF-8."""
    paths = [os.path.join(LIBRARY, file.name) for file in list_folder(LIBRARY, NO_LIBRARY)]
    requirements = os.path.join(os.path.dirname(__file__), '..', 'requirements.txt')
    with open(requirements, encoding='utf-8') as lines:
        packages = [re.split(r'[=;<>~ ]', line)[0] for line in lines if re.match(r'\w', line)]
    for package in packages:
        try:
            of_package = sorted(metadata.files(package) or [], key=str)
        except metadata.PackageNotFoundError:
            fail(f'{package} is not installed: pip install -r requirements.txt')
        paths += [str(file.locate()) for file in of_package if '..' not in file.parts]
    files = {}
    for path in paths:
        if path.endswith(CORPUS_SUFFIXES) and os.path.isfile(path):
            with open(path, 'rb') as file, contextlib.suppress(UnicodeDecodeError):
                content = file.read()
                if content.decode().strip():
                    files.setdefault(hashlib.sha256(content).digest(), describe(path, path))
    return list(files.values())


# The Hub

@contextlib.contextmanager
def hub() -> Iterator[Any]:
    """The Hub; whatever goes wrong with it ends the program with one line."""
    import huggingface_hub
    try:
        yield huggingface_hub
    except Exception as error:  # the HTTP library's own too, too many to name
        fail(f'the Hugging Face Hub: {error} (is there a network? the same command goes on)')


def list_hub(where: str) -> tuple[str, list[File]]:
    """`where` with the commit it is at now, and its files."""
    with hub() as hf:
        uri = hf.parse_hf_uri(where.rstrip('/'))
        commit = hf.HfApi().dataset_info(uri.id, revision=uri.revision).sha
        root = f'{HUB}{uri.id}@{commit}'
        name = f'{root}/{uri.path_in_repo}'.rstrip('/')
        found = hf.HfFileSystem().find(name, detail=True)
    files = [File(f'hf://{path}'.removeprefix(f'{root}/'), entry['size'])
             for path, entry in sorted(found.items())]
    return name, [file for file in files if not os.path.basename(file.name).startswith('.')]


# Documents

class Bad(ValueError):
    """A file that cannot be read to its end."""


def text_of(path: str, option: str) -> str:
    """The text file that an option (text=) names. SystemExit where it is none, or not in UTF-8."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for, for ever
        fail(f'{option}{path} is no file; expected a text file')
    try:
        with open(path, 'rb') as file:
            return ''.join(decode(file))
    except OSError as error:
        fail(f'{option}{path}: {error.strerror}; expected a text file')
    except ValueError as error:
        fail(f'{option}{path}: {error}')


def decode(file: BinaryIO) -> Iterator[str]:
    """A text file from its beginning, a chunk at a time. Bad where it is not UTF-8."""
    # Python's own library comes as it is
    errors = 'replace' if file.name.endswith('.py') else 'strict'
    decoder = codecs.getincrementaldecoder('utf-8')(errors)
    file.seek(0)
    try:
        while data := file.read(1 << 20):
            yield decoder.decode(data)
        yield decoder.decode(b'', True)
    except UnicodeDecodeError as error:
        place = file.tell() - len(error.object) + error.start
        raise Bad(f'byte {place:,} is not UTF-8: no text, or of another encoding (iconv -f latin1 '
                  '-t utf-8 makes it UTF-8)') from None


def read_documents(file: BinaryIO, column: str) -> Iterator[Callable[[], Any]]:
    """The documents of a file: functions that give the text a chunk at a time, from its beginning
    at each call. Bad where it is damaged."""
    import pyarrow
    kind = os.path.splitext(file.name.lower())[1]
    if kind not in ('.parquet', '.jsonl', '.zst', '.gz'):
        yield partial(decode, file)  # it may be larger than memory
        return
    texts = read_parquet(file, column) if kind == '.parquet' else read_jsonl(file, column, kind)
    try:
        for text in texts:
            if not isinstance(text, str | None):
                raise Bad(f'a "{column}" that is no string but {text!r:.40}')
            # half a surrogate pair is no text
            whole = (text or '').encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
            yield partial(iter, [whole])
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise Bad(str(error).partition('\n')[0]) from error


def read_parquet(file: BinaryIO, column: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile
    # buffer_size and pre_buffer: or pyarrow keeps all it has read in memory
    with ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        if column not in names:
            raise Bad(f'no "{column}" column, only {", ".join(names)} (--column chooses)')
        for batch in table.iter_batches(64, columns=[column], use_threads=False):
            yield from batch.column(0).to_pylist()


def read_jsonl(file: BinaryIO, column: str, kind: str) -> Iterator[Any]:
    from pyarrow import CompressedInputStream
    lines = file
    if kind != '.jsonl':
        stream = CompressedInputStream(file, 'zstd' if kind == '.zst' else 'gzip')
        lines = io.BufferedReader(stream, 1 << 20)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[column]
        except (ValueError, RecursionError, LookupError, TypeError):
            raise Bad(f'line {number} is no JSON with "{column}" (--column chooses)') from None
        yield text


# Cutting

class Part(NamedTuple):
    """A part of a document, of one split, that can be tokenized by itself."""
    split: str
    text: str
    begins: bool  # a document, or its part of this split


def survey(chunks: Iterable[str]) -> tuple[float, int]:
    """A document's hash as a number in [0, 1), from its text alone, and its length."""
    digest, length = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk.encode())
        length += len(chunk)
    return int.from_bytes(digest.digest()[:8], 'big') / 2 ** 64, length


def split_of(x: float, held_out: float) -> str:
    """The split at x in [0, 1]: val and test get a share of `held_out` each."""
    return 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'


def cut(chunks: Iterable[str], size: int) -> Iterator[tuple[int, str]]:
    """A document as (position, text), each of `size` characters or, up to the next place to cut at,
    more."""
    rest, position = '', 0
    for chunk in chunks:
        searched = len(rest) - 1  # all but the last character, which had nothing after it yet
        rest += chunk
        at = 0
        while found := CUT.search(rest, max(at + size - 1, searched)):
            yield position + at, rest[at:found.end()]
            at = found.end()
        rest = rest[at:]
        position += at
    if rest:
        yield position, rest


def read_parts(file: BinaryIO, column: str, held_out: float, become: dict[str, str],
               by_position: bool) -> Iterator[Part]:
    """The documents of a file in parts, cut at spaces and line ends. A document is of the split
    that its hash says, or, where they are cut `by_position`, its end is test, as much before that
    val; `become` renames."""
    for chunks in read_documents(file, column):
        hashed, length = survey(chunks())
        size = min(PART, max(1, round(held_out * length / 2))) if by_position else PART
        before = None
        for at, text in cut(chunks(), size):
            split = become[split_of(1 - at / length if by_position else hashed, held_out)]
            yield Part(split, text, split != before)
            before = split


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts together, as much as all threads get at a time."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def encode(parts: Iterable[Part], tokenizer: Any, threads: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tokens of parts and of which split they are, with BOS."""
    bos = np.array([tokenizer.bos])
    for batch in batches(parts):
        encoded = tokenizer.encode_parts(batch, threads)
        for part, ids in zip(batch, encoded, strict=True):
            yield part.split, np.concatenate([bos[:part.begins], ids])

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
from itertools import chain, pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from configurator import fail
from nanocem.tokenizers import CUT

HUB = 'hf://datasets/'
SUFFIXES = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz', '.txt')
CORPUS_SUFFIXES = ('.py', '.md', '.rst', '.txt')
LIBRARY = sysconfig.get_paths()['stdlib']
NO_LIBRARY = {'site-packages', 'dist-packages', '__pycache__'}
SPLIT_NAMES = {'train': 'train', 'valid': 'val', 'val': 'val', 'validation': 'val', 'test': 'test'}
ANYWHERE = re.compile('.', re.DOTALL)  # in the place of CUT: between any two characters
PART = 1 << 16  # characters a thread gets at a time; longer documents are cut
BATCH = 1 << 21  # characters all threads get at a time
SPLIT_IN_PATH = re.compile(rf'(?:^|/)({"|".join(SPLIT_NAMES)})(?=[/._-])')


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
        from huggingface_hub import parse_hf_uri
        uri = parse_hf_uri(self.name)
        return ask_hub(lambda api: api.hf_hub_download(
            uri.id, file.name, repo_type='dataset', revision=uri.revision))


def find_source(where: str, seed: int = 0) -> Source:
    """The files of an --input: its own held-out splits first, then by name, or shuffled where there
    is a seed. SystemExit where there are none."""
    name, folder, suffixes = where, where, SUFFIXES
    if where.startswith(HUB):
        name, found = list_hub(where)
    elif where == 'builtin':
        folder, suffixes = LIBRARY, ('.py',)
        found = list_folder(LIBRARY, NO_LIBRARY | {'test', 'tests', 'idle_test'})
    elif where == 'corpus':
        folder, suffixes = '', CORPUS_SUFFIXES
        found = list_corpus()
    elif os.path.isdir(where):
        found = list_folder(where)
    elif os.path.isfile(where):
        folder, base = os.path.split(where)
        found = [describe(where, base)]
    else:
        fail(f'input={where}: no such file or folder; the Hub is {HUB}OWNER/NAME')
    files, left_out = [], []
    for file in found:
        right = file.size >= 0 and file.name.lower().endswith(suffixes)
        (files if right else left_out).append(file)
    if not files:
        fail(f'input={where} holds no {", ".join(suffixes)} file')
    if suffixes is SUFFIXES:  # not this Python's own
        split = [file._replace(split=split_in_path(file.name)) for file in files]
        # or else it is a folder that happens to be called test
        if any(file.split == 'train' for file in split):
            files = split
    if seed:
        files.sort(key=lambda file: hashlib.sha256(os.fsencode(f'{seed}:{file.name}')).digest())
    files.sort(key=lambda file: file.split not in ('val', 'test'))
    return Source(name, folder, files, [file.name for file in left_out if suffixes is SUFFIXES])


def split_in_path(name: str) -> str | None:
    match = SPLIT_IN_PATH.search(name)
    return SPLIT_NAMES[match[1]] if match else None


def describe(path: str, name: str) -> File:
    if not os.path.isfile(path):  # a pipe would be waited for, for ever
        return File(name, -1)
    status = os.stat(path)
    return File(name, status.st_size, status.st_mtime_ns)


def list_folder(root: str, skip: Iterable[str] = ()) -> list[File]:
    """The files below a folder, its own before those of its folders, by name. Hidden ones are
    passed over. A link to a folder is followed where that is elsewhere, and once: within `root` its
    files are met in their own place."""
    def stop(error: OSError) -> None:
        raise error

    top = os.path.realpath(root)
    files, seen = [], {top}
    for folder, subfolders, names in os.walk(root, onerror=stop, followlinks=True):
        inside = []
        for name in sorted(set(subfolders).difference(skip)):
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            met_there = os.path.islink(path) and real.startswith(os.path.join(top, ''))
            if not name.startswith('.') and real not in seen and not met_there:
                seen.add(real)
                inside.append(name)
        subfolders[:] = inside
        for name in sorted(name for name in names if not name.startswith('.')):
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

def list_hub(where: str) -> tuple[str, list[File]]:
    """`where` with the commit it is at now, and its files."""
    from huggingface_hub import HfFileSystem, parse_hf_uri
    uri = ask_hub(lambda api: parse_hf_uri(where.rstrip('/')))
    commit = ask_hub(lambda api: api.dataset_info(uri.id, revision=uri.revision).sha)
    root = f'{HUB}{uri.id}@{commit}'
    name = f'{root}/{uri.path_in_repo}'.rstrip('/')
    found = ask_hub(lambda api: HfFileSystem().find(name, detail=True))
    files = [File(f'hf://{path}'.removeprefix(f'{root}/'), entry['size'])
             for path, entry in sorted(found.items())]
    return name, [file for file in files if not os.path.basename(file.name).startswith('.')]


def ask_hub(question: Callable[[Any], Any]) -> Any:
    """question(HfApi()); whatever goes wrong ends the program with one line."""
    from huggingface_hub import HfApi
    try:
        return question(HfApi())
    except Exception as error:  # the HTTP library's own too, too many to name
        fail(f'the Hugging Face Hub: {error} (is there a network? the same command goes on from '
             'here)')


# Documents

class Bad(ValueError):
    """A file that cannot be read to its end."""


def read_text(path: str, encoding: str = 'utf-8') -> str:
    """A text file. Bad where it is of another encoding."""
    with open(path, 'rb') as file:
        return ''.join(decode(file, encoding))


def text_of(path: str, option: str) -> str:
    """The text file that an option (text=) names. SystemExit where it is none, or not in UTF-8."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for, for ever
        fail(f'{option}{path} is no file; expected a text file')
    try:
        return read_text(path)
    except OSError as error:
        fail(f'{option}{path}: {error.strerror}; expected a text file')
    except ValueError as error:
        fail(f'{option}{path}: {error}')


def decode(file: BinaryIO, encoding: str) -> Iterator[str]:
    """A text file from its beginning, a chunk at a time. Bad where it is of another encoding."""
    # Python's own library comes as it is
    errors = 'replace' if file.name.endswith('.py') else 'strict'
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    file.seek(0)
    try:
        while data := file.read(1 << 20):
            yield decoder.decode(data)
        yield decoder.decode(b'', True)
    except UnicodeDecodeError as error:
        place = file.tell() - len(error.object) + error.start
        likely = 'utf-16' if error.object[:2] in (b'\xff\xfe', b'\xfe\xff') else 'latin-1'
        raise Bad(f'byte {place:,} is not {encoding.upper()}: no text, or perhaps {likely}, which '
                  f'prepare_slimpajama.py --encoding={likely} reads') from None


def read_documents(file: BinaryIO, column: str, encoding: str,
                   ) -> Iterator[Callable[[], Iterable[str]]]:
    """The documents of a file: functions that give the text a chunk at a time, from its beginning
    at each call. Bad where it is damaged."""
    import pyarrow
    kind = os.path.splitext(file.name.lower())[1]
    if kind not in ('.parquet', '.jsonl', '.zst', '.gz'):
        yield partial(decode, file, encoding)  # it may be larger than memory
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
        if not file.peek(1):
            raise Bad('empty')
        stream = CompressedInputStream(file, 'zstd' if kind == '.zst' else 'gzip')
        lines = io.BufferedReader(stream, 1 << 20)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise Bad(f'line {number} is not JSON') from None
        if not isinstance(record, dict) or column not in record:
            raise Bad(f'line {number} has no "{column}" field (--column chooses)')
        yield record[column]


# Cutting

class Part(NamedTuple):
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


def cut(chunks: Iterable[str], size: int, after: re.Pattern = CUT) -> Iterator[tuple[int, str]]:
    """A document as (position, text), each of `size` characters or, up to the next match of
    `after`, more."""
    rest, position = '', 0
    for chunk in chunks:
        searched = len(rest) - 1  # all but the last character, which had nothing after it yet
        rest += chunk
        at = 0
        while found := after.search(rest, max(at + size - 1, searched)):
            yield position + at, rest[at:found.end()]
            at = found.end()
        rest = rest[at:]
        position += at
    if rest:
        yield position, rest


def parts(texts: Iterable[tuple[str, str]]) -> Iterator[Part]:
    """A document's texts, each with its split, as parts."""
    before = None
    for (split, text), (after, _) in pairwise(chain(texts, [(None, '')])):
        yield Part(split, text, split != before, split != after)
        before = split


def read_parts(file: BinaryIO, column: str, encoding: str, held_out: float, become: dict[str, str],
               by_position: bool, anywhere: bool) -> Iterator[Part]:
    """The documents of a file in parts. A document is of the split that its hash says, or, where
    they are cut `by_position`, its end is test, as much before that val; `become` renames."""
    for chunks in read_documents(file, column, encoding):
        hashed, length = survey(chunks())
        grain = round(held_out * length / (50 if anywhere else 2))
        size = min(PART, max(1, grain)) if by_position else PART
        texts = cut(chunks(), size, ANYWHERE if anywhere else CUT)
        drawn = ((split_of(1 - at / length if by_position else hashed, held_out), text)
                 for at, text in texts)
        yield from parts((become[split], text) for split, text in drawn)


def batches(items: Iterable[Part], least: int) -> Iterator[list[Part]]:
    """Parts together, at least so many characters at a time."""
    batch, size = [], 0
    for part in items:
        batch.append(part)
        size += len(part.text)
        if size >= least:
            yield batch
            batch, size = [], 0
    yield batch


def encode(parts: Iterable[Part], tokenizer: Any, eos: bool, threads: int,
           ) -> Iterator[tuple[str, np.ndarray]]:
    """The tokens of parts and of which split they are, with BOS, and with `eos` EOS."""
    before = np.array([tokenizer.bos])
    behind = np.array([tokenizer.eos] if eos else [], int)
    for batch in batches(parts, BATCH):
        encoded = tokenizer.encode_parts(batch, threads)
        for part, ids in zip(batch, encoded, strict=True):
            yield part.split, np.concatenate([before[:part.begins], ids, behind[:part.ends]])

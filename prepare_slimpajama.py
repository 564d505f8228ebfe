"""
SlimPajama, or any text, to token shards that train.py reads.

    python prepare_slimpajama.py                      the paper's subset: 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --size=86m           as much as one model needs
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT
    python prepare_slimpajama.py --input=corpus       what results/ladder was trained on

Documents are tokenized in their order, BOS before each, and laid end to end: train_00000.bin, ...,
val.bin, test.bin (little-endian unsigned integers) and meta.json. A folder is there when it is whole,
and not before; what was downloaded stays in the Hub's cache.
"""
import hashlib
import io
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from configurator import (
    build,
    command_line,
    fail,
    in_range,
    read_options,
    require,
    resolve_defaults,
)
from nanocem.data import FORMAT
from nanocem.files import BadFile, locked, read_json, read_text, say, write_atomic
from nanocem.tokenizers import CUT, make_tokenizer, train_bpe

HUB = 'hf://datasets/'
SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # a mirror of Llama 1's and 2's
# 20 tokens a parameter, and 1% more
SIZES = {'86m': 1.75e9, '108m': 2.2e9, '134m': 2.7e9, '162m': 3.3e9, '256m': 5.2e9}
OWN_TEXTS = {'builtin': ('byte', 0.05), 'corpus': ('byte', 0.01)}  # tokenizer, held_out
SUFFIXES = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz', '.txt')
LIBRARY = sysconfig.get_paths()['stdlib']
SPLITS = ('train', 'val', 'test')
SPLIT_IN_PATH = re.compile(r'(?:^|/)(train|val|test)(?:(?<=val)id(?:ation)?)?(?=[/._-])')
PART = 1 << 16  # characters a thread gets at a time; longer documents are cut
LONGEST_PART = 1 << 20  # characters; a part may end inside a word beyond it
BATCH = 1 << 21  # characters all threads get at a time
BPE_TEXT = 32_000_000  # bytes of text that a tokenizer is trained on
TOKEN_BYTES = 8  # more than a token has on average
FEW_TOKENS = 4096  # of a held-out split
SMALL_TEXT = 20_000_000  # bytes; below it prepare_text's tokens are bytes


@dataclass
class PrepareConfig:
    """Where the text comes from and what becomes of it."""
    input: str = SLIMPAJAMA  # path, builtin, corpus, hf://datasets/OWNER/NAME[@REV][/FOLDER]
    out_dir: str | None = None  # the data folder; default: data/ and the name of the input
    tokens: int | None = None  # training tokens, or as many as there are; default 3.3B
    size: Literal['86m', '108m', '134m', '162m', '256m'] | None = None  # tokens for such a model
    tokenizer: str | None = None  # llama, gpt2, byte, bpe2048 (trained), a model file; default llama
    held_out: float | None = None  # share of val, and of test; default 0.005, builtin 0.05
    seed: int = 0  # shuffle the order of the files; 0: by name
    column: str = 'text'  # the column of .parquet files, the field of .jsonl lines
    shard_tokens: int = 100_000_000  # tokens a shard of the train split
    workers: int = os.cpu_count() or 1  # threads; default: one a core
    skip_bad: bool = False  # leave damaged files out, and name them

    def __post_init__(self) -> None:
        require(not (self.tokens and self.size), 'tokens and size: give one')
        tokenizer, held_out = OWN_TEXTS.get(self.input, ('llama', 0.005))
        # For texts of few documents, whose end is held out
        self.held_out_end = 0.05 if self.held_out is None else self.held_out
        tokens = round(SIZES[self.size or '162m'])
        resolve_defaults(self, tokens=tokens, tokenizer=tokenizer, held_out=held_out)
        pieces = re.fullmatch(r'bpe(\d+)', self.tokenizer)
        known = pieces or self.tokenizer in ('llama', 'gpt2', 'byte')
        require(known or os.path.isfile(self.tokenizer), f'tokenizer={self.tokenizer}: no such file'
                ', and none of llama, gpt2, byte, bpe2048')
        require(not pieces or 512 <= int(pieces[1]) <= 65_536,
                f'tokenizer={self.tokenizer}: expected bpe512 to bpe65536')
        in_range(self, 1, 10**15, 'tokens shard_tokens')
        in_range(self, 1, 1024, 'workers')
        in_range(self, 0, 0.49, 'held_out')
        self.least = 1  # bytes of each split; with fewer, the end of the text is held out
        name = os.path.basename(self.input).partition('.')[0] or 'text'
        if self.input.startswith(HUB):
            name = '-'.join(self.input.removeprefix(HUB).rstrip('/').split('/')[1:])
        elif self.input not in OWN_TEXTS:
            self.input = os.path.abspath(self.input)
        name = 'slimpajama' if self.input == SLIMPAJAMA else name
        resolve_defaults(self, out_dir=f'data/{name}')

    def identity(self) -> dict[str, Any]:
        """Return what the bytes of a data folder depend on, beside the files."""
        names = ('input', 'tokenizer', 'tokens', 'held_out', 'seed', 'column', 'shard_tokens')
        return {name: getattr(self, name) for name in names}


# Files

class File(NamedTuple):
    name: str  # below the source's folder
    size: int
    changed: int = 0  # when, in nanoseconds; 0 on the Hub, where a commit never changes
    split: str | None = None  # the source's own: train, val, test


class Source(NamedTuple):
    """Files of documents, in the order they are read."""
    name: str  # a path, 'builtin', 'corpus', or hf://datasets/OWNER/NAME@COMMIT
    folder: str  # where the files are; the Hub's are in its cache
    files: list[File]

    def splits(self) -> set[str | None]:
        """Return the splits that the source has files of."""
        return {file.split for file in self.files}

    def digest(self, tokenizer: str) -> str:
        """Of the files' names, sizes and times: another says that something changed."""
        text = json.dumps([self.name, tokenizer, self.files])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

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
    if where in OWN_TEXTS:
        return Source(where, LIBRARY, described(LIBRARY, list_builtin() if where == 'builtin'
                                                else list_corpus()))
    name, folder = where, where
    if where.startswith(HUB):
        name, found = list_hub(where)
    elif os.path.isdir(where):
        found = described(where, walk(where))
    elif os.path.isfile(where):
        folder, base = os.path.split(where)
        found = described(folder, [base])
    else:
        fail(f'input={where}: no such file or folder; the Hub is {HUB}OWNER/NAME')
    files = [file for file in found if file.name.lower().endswith(SUFFIXES)]
    if not files:
        fail(f'input={where} holds no {", ".join(SUFFIXES)} file')
    if others := [file.name for file in found if file not in files]:
        say(f'left out: {len(others):,} files of other kinds, as {", ".join(others[:5])}')
    splits = [SPLIT_IN_PATH.search(file.name) for file in files]
    # or else it is a folder that happens to be called test
    if any(match and match[1] == 'train' for match in splits):
        files = [file._replace(split=match and match[1])
                 for file, match in zip(files, splits, strict=True)]
    if seed:
        files.sort(key=lambda file: hashlib.sha256(os.fsencode(f'{seed}:{file.name}')).digest())
    files.sort(key=lambda file: file.split not in ('val', 'test'))
    return Source(name, folder, files)


def walk(root: str) -> list[str]:
    """The files below a folder, its own before those of its folders, by name. Hidden ones and what
    is no file are passed over (a pipe would be waited for), no folder is read twice."""
    names, seen = [], set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        paths = [os.path.join(folder, name) for name in sorted(files) if name[0] != '.']
        if real not in seen:
            names += [os.path.relpath(path, root) for path in paths if os.path.isfile(path)]
        subfolders[:] = sorted(name for name in subfolders if name[0] != '.' and real not in seen)
        seen.add(real)
    return names


def described(folder: str, names: Iterable[str]) -> list[File]:
    stats = ((name, os.stat(os.path.join(folder, name))) for name in names)
    return [File(name, of.st_size, of.st_mtime_ns) for name, of in stats]


def list_builtin(leave: Iterable[str] = ('test', 'tests', 'idle_test'), suffixes: Any = '.py',
                 ) -> list[str]:
    """Python's own library, without its tests."""
    leave = {'site-packages', 'dist-packages', '__pycache__', *leave}
    return [name for name in walk(LIBRARY)
            if name.endswith(suffixes) and leave.isdisjoint(name.split('/'))]


def list_corpus() -> list[str]:
    """Source and English of the standard library and of the packages in requirements.txt: no
    content twice, none that is blank or not UTF-8."""
    suffixes = ('.py', '.md', '.rst', '.txt')
    paths = [os.path.join(LIBRARY, name) for name in list_builtin((), suffixes)]
    with open(os.path.join(os.path.dirname(__file__), 'requirements.txt')) as lines:
        packages = [re.split(r'[=;<>~ ]', line)[0] for line in lines if re.match(r'\w', line)]
    for package in packages:
        try:
            files = sorted(metadata.files(package) or [], key=str)
        except metadata.PackageNotFoundError:
            fail(f'{package} is not installed: pip install -r requirements.txt')
        paths += [str(file.locate()) for file in files if '..' not in file.parts]
    found: dict[bytes, str] = {}
    for path in paths:
        if path.endswith(suffixes) and os.path.isfile(path):
            with open(path, 'rb') as file, suppress(UnicodeDecodeError):
                if (content := file.read()).decode().strip():
                    found.setdefault(hashlib.sha256(content).digest(), path)
    return list(found.values())


@contextmanager
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


# Documents, and their parts

def read_documents(path: str, column: str) -> Iterator[Callable[[], Iterator[str]]]:
    """The documents of a file: functions that give the text a chunk at a time, from its beginning
    at each call. BadFile where it is damaged."""
    import pyarrow
    kind = os.path.splitext(path.lower())[1]
    if kind not in ('.parquet', '.jsonl', '.zst', '.gz'):
        yield partial(read_text, path)  # it may be larger than memory
        return
    texts = read_parquet(path, column) if kind == '.parquet' else read_jsonl(path, column, kind)
    try:
        for text in texts:
            if not isinstance(text, str | None):
                raise BadFile(f'a "{column}" that is no string but {text!r:.40}')
            # half a surrogate pair is no text
            whole = (text or '').encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
            yield partial(iter, [whole])
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadFile(str(error).partition('\n')[0]) from error


def read_parquet(path: str, column: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile
    # buffer_size and pre_buffer: or pyarrow keeps all it has read in memory
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        if column not in names:
            raise BadFile(f'no "{column}" column, only {", ".join(names)} (--column chooses)')
        for batch in table.iter_batches(64, columns=[column], use_threads=False):
            yield from batch.column(0).to_pylist()


def read_jsonl(path: str, column: str, kind: str) -> Iterator[Any]:
    from pyarrow import CompressedInputStream
    with open(path, 'rb', 1 << 20) as file:
        lines: Any = file
        if kind != '.jsonl':
            stream = CompressedInputStream(file, 'zstd' if kind == '.zst' else 'gzip')
            lines = io.BufferedReader(stream, 1 << 20)
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)[column]
                except (ValueError, RecursionError, LookupError, TypeError):
                    raise BadFile(f'line {number} is no JSON with "{column}" (--column chooses)') from None


class Part(NamedTuple):
    """A part of a document that can be tokenized by itself."""
    split: str
    text: str
    begins: bool  # a document


def split_text(chunks: Iterable[str], size: int = PART) -> Iterator[str]:
    """Cut a document into parts of `size` characters or, up to the next space or line end, more."""
    rest = ''
    for chunk in chunks:
        searched = len(rest) - 1  # all but the last character, which had nothing after it yet
        rest += chunk
        at = 0
        while found := CUT.search(rest, max(at + size - 1, searched)):
            yield rest[at:found.end()]
            at = found.end()
        rest = rest[at:]
        if len(rest) > LONGEST_PART:  # a text without spaces
            yield rest
            rest = ''
    if rest:
        yield rest


def read_parts(o: PrepareConfig, source: Source, ends: dict[str, int] | None,
               skipped: dict[str, str], is_full: Callable[[str], bool]) -> Iterator[Part]:
    """Yield the parts of all documents, each with its split. Files of a split that is full are
    not opened; damaged ones are added to `skipped`, or end the program."""
    held_out = o.held_out if ends is None else 0
    own = source.splits()
    position = 0  # bytes of the documents read so far
    for file in source.files:
        if is_full(file.split or 'train'):
            continue
        path = source.path(file)
        try:
            for chunks in read_documents(path, o.column):
                split = file.split
                if split not in ('val', 'test'):
                    split = split_by_hash(chunks, held_out)
                    # A split that the source has files of gets no other documents
                    split = 'train' if split in own else split
                for n, text in enumerate(split_text(chunks())):
                    part = Part(split, text, n == 0)
                    if ends is None or file.split in ('val', 'test'):
                        yield part
                    else:
                        yield from split_by_position(part, position, ends)
                        position += len(text.encode())
        except BadFile as error:
            if not o.skip_bad:
                fail(f'{path}: {error}; prepare_slimpajama.py --skip_bad leaves it out')
            skipped[file.name] = str(error)


def split_by_hash(chunks: Callable[[], Iterator[str]], held_out: float) -> str:
    """Choose the split of a document by a hash of its text: val and test each get a share of
    `held_out`."""
    if not held_out:
        return 'train'
    digest = hashlib.sha256()
    for chunk in chunks():
        digest.update(chunk.encode())
    x = int.from_bytes(digest.digest()[:8], 'big') / 2 ** 64
    return 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'


def split_by_position(part: Part, position: int, ends: dict[str, int]) -> Iterator[Part]:
    """Cut a part that begins `position` bytes after the beginning of the text where train, val and
    test end, at the next space or line end. What lies behind the last end is left out."""
    text, begins = part.text, part.begins
    for split, end in ends.items():
        content = text.encode()
        at = len(text)
        if position + len(content) > end:
            at = len(content[:max(0, end - position)].decode(errors='ignore'))
            found = CUT.search(text, at)
            at = found.end() if found and at else at
        if at:
            yield Part(split, text[:at], begins)
            position += len(text[:at].encode())
            text, begins = text[at:], False


def find_ends(o: PrepareConfig, source: Source, skipped: dict[str, str]) -> dict[str, int] | None:
    """Find the bytes where train, val and test end, for a text of so few documents that their
    hashes would leave a split empty. None where there are enough."""
    drawn = [split for split in SPLITS if split == 'train' or split not in source.splits()]
    if not o.held_out or len(drawn) == 1:
        return None
    sizes = dict.fromkeys(SPLITS, 0)
    for part in read_parts(o, source, None, skipped, lambda split: split != 'train'):
        sizes[part.split] += len(part.text.encode())
        # A token has a byte at least, but for those that begin a document
        if 2 * sizes['train'] <= o.tokens and min(sizes[split] for split in drawn) >= o.least:
            return None
        if sizes['train'] > TOKEN_BYTES * o.tokens:
            break
    total = sum(sizes.values())
    held_out = round(o.held_out_end * total)
    say(f'{o.input} has few documents: the last {o.held_out_end:.3g} of the text is {drawn[-1]}'
        + ', as much before that val' * (len(drawn) == 3))
    return {split: total - held_out * n for n, split in zip((2, 1, 0)[-len(drawn):], drawn,
                                                            strict=True)}


# Shards

class Writer:
    """The shards of a folder while they grow; val and test have one."""
    def __init__(self, folder: str, vocab_size: int, shard_tokens: int):
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = np.dtype('<u2' if vocab_size <= 2 ** 16 else '<u4')
        self.tokens = dict.fromkeys(SPLITS, 0)

    def append(self, split: str, ids: np.ndarray) -> None:
        while len(ids):
            name, room = f'{split}.bin', len(ids)
            if split == 'train':
                number, used = divmod(self.tokens[split], self.shard_tokens)
                name, room = f'train_{number:05d}.bin', self.shard_tokens - used
            with open(os.path.join(self.folder, name), 'ab') as file:
                file.write(ids[:room].astype(self.dtype).tobytes())
            self.tokens[split] += min(room, len(ids))
            ids = ids[room:]

    def describe(self) -> dict[str, Any]:
        """Return the `splits` of meta.json: the shards of each split and their tokens."""
        splits = {}
        for split, total in self.tokens.items():
            size = self.shard_tokens if split == 'train' else total
            shards = [{'file': f'train_{n:05d}.bin' if split == 'train' else f'{split}.bin',
                       'tokens': min(size, total - first)}
                      for n, first in enumerate(range(0, total, size or 1))]
            splits[split] = {'tokens': total, 'shards': shards}
        return splits


# From one to the other

def prepare(o: PrepareConfig, source: Source | None = None) -> None:
    """Make the data folder o.out_dir, or leave it as it is if it is made already. It is made in a
    hidden folder beside it, which is renamed when it is whole. UserError, OSError."""
    if is_prepared(o):
        return
    source = source or find_source(o.input, o.seed)
    parent, name = os.path.split(os.path.realpath(o.out_dir))
    folder = os.path.join(parent, f'.{name}.partial')
    os.makedirs(parent, exist_ok=True)
    with locked(os.path.join(parent, f'.{name}.lock'), f'{o.out_dir} is being prepared'):
        if is_prepared(o):
            return
        try:
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
            os.mkdir(folder)
            meta = fill(o, source, folder)
            os.replace(folder, os.path.join(parent, name))
        except OSError as error:
            error.filename = error.filename or folder
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    for split, of in meta['splits'].items():
        say(f'{split:5} {of["tokens"]:>15,} tokens')
        if 0 < of['tokens'] < FEW_TOKENS and split != 'train':
            say(f'WARNING: {split} has fewer than {FEW_TOKENS:,} tokens: too few for a perplexity')
    for name, why in meta['skipped'].items():
        say(f'damaged, left out from there on: {name}: {why}')


def is_prepared(o: PrepareConfig) -> bool:
    """Whether o.out_dir is made already, with these options. UserError where it is made with others
    or holds anything else."""
    if meta := read_json(os.path.join(o.out_dir, 'meta.json'), 'choose another --out_dir'):
        was = meta.get('config')
        if not isinstance(was, dict):
            fail(f'{o.out_dir} holds a meta.json of something else: choose another --out_dir')
        if different := [f'{name}={was.get(name)}, not {value}'
                         for name, value in o.identity().items() if was.get(name) != value]:
            fail(f'{o.out_dir} was made otherwise: {"; ".join(different)}. Choose another '
                 '--out_dir')
        say(f'{o.out_dir} is prepared already; delete it to prepare it anew')
    elif os.path.exists(o.out_dir) and os.listdir(o.out_dir):
        fail(f'{o.out_dir} holds other files: choose another --out_dir')
    return meta is not None


def fill(o: PrepareConfig, source: Source, folder: str) -> dict[str, Any]:
    """Write tokenizer, shards and meta.json to an empty folder. Returns what meta.json holds."""
    skipped: dict[str, str] = {}
    ends = find_ends(o, source, skipped)
    tokenizer = find_tokenizer(o, source, folder, ends)
    writer = Writer(folder, tokenizer.vocab_size, o.shard_tokens)
    tokenize(o, source, ends, tokenizer, writer, skipped)
    empty = [split for split in SPLITS if not writer.tokens[split]]
    if 'train' in empty or (empty and o.held_out):
        fail(f'{o.input} holds too little text for {" and ".join(empty)}: give more '
             '(prepare_slimpajama.py --held_out=0 makes train alone)')
    meta = {
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': writer.describe(), 'config': o.identity(), 'source': source.name,
        'files': [file.name for file in source.files], 'skipped': skipped}
    write_atomic(os.path.join(folder, 'meta.json'), json.dumps(meta, indent=1).encode())
    return meta


def find_tokenizer(o: PrepareConfig, source: Source, folder: str,
                   ends: dict[str, int] | None) -> Any:
    """Make the tokenizer of the options. A SentencePiece model is put into the folder: Llama's, the
    file that was given, or one trained on text of the train split."""
    model = os.path.join(folder, 'tokenizer.model')
    if o.tokenizer == 'llama':
        with hub() as hf:
            shutil.copyfile(hf.HfApi().hf_hub_download(*LLAMA), model)
    elif o.tokenizer.startswith('bpe'):
        train_bpe(model, int(o.tokenizer.removeprefix('bpe')), sample_train(o, source, ends))
    elif o.tokenizer not in ('byte', 'gpt2'):
        shutil.copyfile(o.tokenizer, model)
    return make_tokenizer(o.tokenizer, folder)


def sample_train(o: PrepareConfig, source: Source, ends: dict[str, int] | None) -> list[str]:
    """Read at most BPE_TEXT bytes of the train split, evenly spaced through it."""
    texts: list[str] = []
    stride, kept, total = 1, 0, 0
    parts = read_parts(o, source, ends, {}, lambda split: split != 'train')
    for n, part in enumerate(part for part in parts if part.split == 'train'):
        size = len(part.text.encode())
        total += size
        if n % stride == 0:
            texts.append(part.text)
            kept += size
        if kept > BPE_TEXT:
            texts = texts[::2]
            stride *= 2
            kept = sum(len(text.encode()) for text in texts)
        if total > TOKEN_BYTES * o.tokens:
            break
    say(f'Training the tokenizer {o.tokenizer} on {kept / 1e6:.1f} of {total / 1e6:.1f} MB of text')
    return texts


def tokenize(o: PrepareConfig, source: Source, ends: dict[str, int] | None, tokenizer: Any,
             writer: Writer, skipped: dict[str, str]) -> None:
    """Write the tokens of all documents, until the train split has o.tokens of them."""
    own = source.splits()
    limit = dict.fromkeys(SPLITS, sys.maxsize) | {'train': o.tokens}
    for split in ('val', 'test'):
        if ends or split in own:
            limit[split] = max(1, round(o.tokens * (o.held_out_end if ends else o.held_out)))

    def room(split: str) -> int:
        return limit[split] - writer.tokens[split]

    parts = read_parts(o, source, ends, skipped, lambda split: room(split) <= 0)
    bos = np.array([tokenizer.bos])
    with tqdm(unit=' tokens', unit_scale=True, mininterval=1, leave=False, disable=None) as bar:
        for batch in batches(parts, room):
            ids: dict[str, list[np.ndarray]] = {split: [bos[:0]] for split in SPLITS}
            for part, of in zip(batch, tokenizer.encode_parts(batch, o.workers), strict=True):
                ids[part.split] += [bos[:part.begins], of]
            for split, arrays in ids.items():
                new = np.concatenate(arrays)[:room(split)]
                writer.append(split, new)
                bar.update(len(new))
            if ends is None and room('train') <= 0:
                return


def batches(parts: Iterable[Part], room: Callable[[str], int]) -> Iterator[list[Part]]:
    """Group parts, as many as all threads get at a time: few where a split has little room left."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        if room(part.split) <= 0:
            continue
        batch.append(part)
        size += len(part.text)
        if size >= min(BATCH, room(part.split)):
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# Its callers

def find_data(folder: str, text: str | None = None, tokenizer: str | None = None) -> str:
    """The data folder: made from a text of the user's, or, at first use, from this Python's."""
    if text:
        return prepare_text(text, tokenizer)
    parent, name = os.path.split(folder.rstrip('/'))
    if parent == 'data' and name in OWN_TEXTS and not os.path.exists(f'{folder}/meta.json'):
        say(f"Preparing {folder} from this Python's own text")
        prepare(PrepareConfig(input=name))
    return folder


def prepare_text(path: str, tokenizer: str | None) -> str:
    """A text of one's own, one file or a folder, as a data folder under data/, named after the
    text, its files and the tokenizer: made once, and anew after a change."""
    o = build(PrepareConfig, {'input': path, 'tokenizer': tokenizer or 'byte'})
    source = find_source(o.input)
    size = sum(file.size for file in source.files)
    if size < SMALL_TEXT:
        o.held_out = 0.05
    elif not tokenizer:
        o.tokenizer = 'llama'
    o.least = min(4096, size // 100)
    o.out_dir += f'-{source.digest(o.tokenizer)}'
    if not os.path.exists(os.path.join(o.out_dir, 'meta.json')):
        tokens = 'one token a byte' if o.tokenizer == 'byte' else f'tokenizer {o.tokenizer}'
        say(f'Preparing {path}, {size / 1e6:,.1f} MB, in {o.out_dir}: {tokens}')
        prepare(o, source)
    return o.out_dir


@command_line
def main(argv: list[str]) -> None:
    prepare(build(PrepareConfig, read_options(argv, PrepareConfig)))


if __name__ == '__main__':
    main(sys.argv[1:])

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
import itertools
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
from tempfile import TemporaryDirectory
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
BATCH = 1 << 21  # characters all threads get at a time
SMALL_TEXT = 20_000_000  # bytes; below it prepare_text's tokens are bytes


@dataclass
class PrepareConfig:
    """Where the text comes from and what becomes of it."""
    input: str = SLIMPAJAMA  # path, builtin, corpus, hf://datasets/OWNER/NAME[@REV][/FOLDER]
    out_dir: str | None = None  # the data folder; default: data/ and the name of the input
    tokens: int | None = None  # training tokens, or as many as there are; default 3.3B
    size: Literal['86m', '108m', '134m', '162m', '256m'] | None = None  # tokens for such a model
    tokenizer: str | None = None  # llama, gpt2, byte, bpe4096 (trained), a model file; default llama
    held_out: float | None = None  # share of val, and of test; default 0.005, builtin 0.05
    seed: int = 0  # shuffle the order of the files; 0: by name
    column: str = 'text'  # the column of .parquet files, the field of .jsonl lines
    shard_tokens: int = 100_000_000  # tokens a shard of the train split
    workers: int = os.cpu_count() or 1  # threads; default: one a core
    skip_bad: bool = False  # leave damaged files out, and name them

    def __post_init__(self) -> None:
        require(not (self.tokens and self.size), 'tokens and size: give one')
        tokenizer, held_out = OWN_TEXTS.get(self.input, ('llama', 0.005))
        resolve_defaults(self, tokens=round(SIZES[self.size or '162m']), tokenizer=tokenizer, held_out=held_out)
        known = re.fullmatch(r'llama|gpt2|byte|bpe[1-9]\d{2,5}', self.tokenizer)
        require(known or os.path.isfile(self.tokenizer), f'tokenizer={self.tokenizer}: no such file'
                ', and none of llama, gpt2, byte, bpe4096')
        in_range(self, 1, 10**15, 'tokens shard_tokens')
        in_range(self, 1, 1024, 'workers')
        in_range(self, 0, 0.49, 'held_out')
        self.least = 1  # tokens of each split; with fewer, the end of the text is held out
        name = os.path.basename(self.input).partition('.')[0] or 'text'
        if self.input.startswith(HUB):
            name = '-'.join(self.input.removeprefix(HUB).rstrip('/').split('/')[1:])
        elif self.input not in OWN_TEXTS:
            self.input = os.path.abspath(self.input)
        resolve_defaults(self, out_dir='data/' + ('slimpajama' if self.input == SLIMPAJAMA else name))

    def identity(self) -> dict[str, Any]:
        """What a data folder's bytes depend on, beside the files."""
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
    """A document in parts of `size` characters or, up to the next space or line end, more."""
    rest = ''
    for chunk in chunks:
        searched = len(rest) - 1  # all but the last character, which had nothing after it yet
        rest += chunk
        at = 0
        while found := CUT.search(rest, max(at + size - 1, searched)):
            yield rest[at:found.end()]
            at = found.end()
        rest = rest[at:]
    if rest:
        yield rest


def read_parts(path: str, column: str, held_out: float, fixed: str | None) -> Iterator[Part]:
    """The documents of a file in parts. A document is of the split that is `fixed`, or that a hash
    of its text says: val and test get a share of `held_out` each."""
    for chunks in read_documents(path, column):
        digest = hashlib.sha256()
        for chunk in chunks():
            digest.update(chunk.encode())
        x = int.from_bytes(digest.digest()[:8], 'big') / 2 ** 64
        split = fixed or ('test' if x < held_out else 'val' if x < 2 * held_out else 'train')
        for n, text in enumerate(split_text(chunks())):
            yield Part(split, text, n == 0)


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


# Shards

class Writer:
    """The shards of a folder while they grow; val and test have one."""
    def __init__(self, folder: str, vocab_size: int, shard_tokens: int):
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = np.dtype('<u2' if vocab_size <= 2 ** 16 else '<u4')
        self.tokens = dict.fromkeys(SPLITS, 0)

    def shards(self, split: str) -> dict[str, int]:
        """The names of a split's shards, and their tokens."""
        total = self.tokens[split]
        if split != 'train':
            return {f'{split}.bin': total} if total else {}
        return {f'train_{number:05d}.bin': min(self.shard_tokens, total - first)
                for number, first in enumerate(range(0, total, self.shard_tokens))}

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

    def take_end(self, count: int) -> np.ndarray:
        """So many tokens off the end of train."""
        taken = [np.zeros(0, self.dtype)]
        while count:
            name, n = list(self.shards('train').items())[-1]
            path = os.path.join(self.folder, name)
            ids = np.fromfile(path, self.dtype)
            left = max(0, n - count)
            taken.insert(0, ids[left:])
            os.truncate(path, left * self.dtype.itemsize) if left else os.remove(path)
            self.tokens['train'] -= n - left
            count -= n - left
        return np.concatenate(taken)


# From one to the other

def prepare(o: PrepareConfig, source: Source | None = None) -> None:
    """Make o.out_dir; nothing where it is made. SystemExit with one line where that cannot be."""
    parent, name = os.path.split(os.path.abspath(o.out_dir))
    os.makedirs(parent, exist_ok=True)
    with locked(os.path.join(parent, f'.{name}.lock')), TemporaryDirectory(dir=parent) as folder:
        if meta := read_json(os.path.join(o.out_dir, 'meta.json'), 'delete the folder'):
            was = meta.get('config', {})
            if different := [f'{name}={was.get(name)}, not {value}'
                             for name, value in o.identity().items() if was.get(name) != value]:
                fail(f'{o.out_dir} was made otherwise: {"; ".join(different)}. Choose another '
                     '--out_dir')
            return say(f'{o.out_dir} is prepared already; delete it to prepare it anew')
        if os.path.exists(o.out_dir) and os.listdir(o.out_dir):
            fail(f'{o.out_dir} holds other files: choose another --out_dir')
        source = source or find_source(o.input, o.seed)
        tokenizer = bring_tokenizer(o, source, folder)
        writer = Writer(folder, tokenizer.vocab_size, o.shard_tokens)
        skipped = tokenize(o, source, tokenizer, writer, True, o.tokens)

        # Where documents are too few to draw val and test from, they are the end of the text
        own = {file.split for file in source.files}
        drawn = [split for split in SPLITS if split == 'train' or split not in own]
        fewest = min(writer.tokens[split] for split in drawn)
        if fewest < o.least and o.held_out and any(writer.tokens.values()):
            writer.take_end(writer.tokens['train'])
            for split in ('val', 'test'):
                with suppress(FileNotFoundError):
                    os.remove(os.path.join(folder, f'{split}.bin'))
            writer.tokens = dict.fromkeys(SPLITS, 0)
            share = max(o.held_out, 0.05)
            most = round(share * o.tokens)  # for each of the others
            tokenize(o, source, tokenizer, writer, False, o.tokens + most * (len(drawn) - 1))
            say(f'{o.input} has few documents: its last {share:.3g} is test, as much before that val')
            count = min(most, round(share * writer.tokens['train']))
            for split in ('test', 'val'):
                if split not in own:
                    writer.append(split, writer.take_end(count))
        empty = [split for split in SPLITS if not writer.tokens[split]]
        if 'train' in empty or (empty and o.held_out):
            fail(f'{o.input} holds too little text for {" and ".join(empty)}: give more')

        splits = {split: {'tokens': n, 'shards': [
            {'file': name, 'tokens': n} for name, n in writer.shards(split).items()]}
            for split, n in writer.tokens.items()}
        write_atomic(os.path.join(folder, 'meta.json'), json.dumps({
            'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
            'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
            'splits': splits, 'config': o.identity(), 'source': source.name,
            'files': [file.name for file in source.files], 'skipped': skipped}, indent=1).encode())
        os.chmod(folder, 0o755)
        os.replace(folder, o.out_dir)
        os.mkdir(folder)  # which goes again
    for split, n in writer.tokens.items():
        say(f'{split:5} {n:>15,} tokens')
    for name, why in skipped.items():
        say(f'damaged, left out from there on: {name}: {why}')


def bring_tokenizer(o: PrepareConfig, source: Source, folder: str) -> Any:
    """The tokenizer of the options; a SentencePiece model is put into the folder: Llama's, the file
    that was given, or one trained on the first 512 parts of the text."""
    model = os.path.join(folder, 'tokenizer.model')
    if o.tokenizer == 'llama':
        with hub() as hf:
            shutil.copyfile(hf.HfApi().hf_hub_download(*LLAMA), model)
    elif os.path.isfile(o.tokenizer):
        shutil.copyfile(o.tokenizer, model)
    elif o.tokenizer.startswith('bpe'):
        parts = (part.text for file in source.files
                 for part in read_parts(source.path(file), o.column, 0, None))
        lines = (line for text in itertools.islice(parts, 512) for line in text.splitlines() if line)
        train_bpe(model, int(o.tokenizer.removeprefix('bpe')), lines)
    return make_tokenizer(o.tokenizer, folder)


def tokenize(o: PrepareConfig, source: Source, tokenizer: Any, writer: Writer, by_hash: bool,
             most: int) -> dict[str, str]:
    """All documents to the writer, until train has `most` tokens: of the splits that their hashes
    say, or all of train. Returns damaged files, and why."""
    own, skipped = {file.split for file in source.files}, {}
    limit = {split: round(o.tokens * o.held_out) if split in own else sys.maxsize
             for split in SPLITS} | {'train': most}
    bos = np.array([tokenizer.bos])
    with tqdm(unit=' tokens', unit_scale=True, mininterval=1, leave=False) as bar:
        for file in source.files:
            if writer.tokens[file.split or 'train'] >= limit[file.split or 'train']:
                continue
            path = source.path(file)
            fixed = file.split if file.split != 'train' else None
            try:
                for batch in batches(read_parts(path, o.column, o.held_out * by_hash, fixed)):
                    ids: dict[str, list[np.ndarray]] = {split: [bos[:0]] for split in SPLITS}
                    encoded = tokenizer.encode_parts(batch, o.workers)
                    for part, of in zip(batch, encoded, strict=True):
                        # a split that the source has files of is drawn from no others
                        split = 'train' if part.split in own and not fixed else part.split
                        ids[split] += [bos[:part.begins], of]
                    for split, arrays in ids.items():
                        new = np.concatenate(arrays)[:limit[split] - writer.tokens[split]]
                        writer.append(split, new)
                        bar.update(len(new))
                    if writer.tokens['train'] >= limit['train']:
                        break
            except BadFile as error:
                if not o.skip_bad:
                    fail(f'{path}: {error}; prepare_slimpajama.py --skip_bad leaves it out')
                skipped[file.name] = str(error)
    return skipped


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

"""
Turn SlimPajama, or any text, into token shards that train.py reads.

    python prepare_slimpajama.py                      its first 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    python prepare_slimpajama.py --input=book.txt --tokenizer=bpe2048
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT

A BOS token begins each document; they are concatenated in train_00000.bin, ..., val.bin and
test.bin (little-endian unsigned integers). meta.json describes them. A row of a .parquet or .jsonl
file is a document, and a hash of its text sends it to train, val or test. The end of a .txt file is
test, and as much before it val. The folder appears when it is complete.
"""
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from configurator import check, command_line, fail, in_range, read_options, resolve_defaults
from nanocem.data import FORMAT
from nanocem.files import read_json
from nanocem.tokenizers import (
    BLOCK,
    MODEL_FILE,
    UnsuitedVocabulary,
    keeps_text,
    make_tokenizer,
    read_text,
    refuse_encoding,
    tokenizer_of,
    train_bpe,
)

HUB = 'hf://datasets/'
SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # Llama 1 and 2 have the same
# Default tokenizers of train.py --text: each is for texts with fewer bytes than its key
TEXT_TOKENIZERS = {1e6: 'byte', 5e6: 'bpe1024', 20e6: 'bpe2048', 1e9: 'bpe4096',
                   math.inf: 'bpe32000'}
ROWS = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz')  # files in which each row is a document
SUFFIXES = (*ROWS, '.txt')
LIBRARY = sysconfig.get_paths()['stdlib']
SPLITS = ('train', 'val', 'test')
SPLIT_WORDS = {'train': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'test': 'test'}
SHARD_TOKENS = 100_000_000  # tokens per file of the train split
BPE_TEXT = 32_000_000  # A tokenizer is trained on about this many bytes.
BATCH = 64  # Threads tokenize this many documents or blocks together.
MANY = 1000  # Of so many files each is a document with one split, and not cut into splits.


@dataclass
class PrepareConfig:
    """Choose the text, the tokenizer and the splits."""
    input: str = SLIMPAJAMA  # path, builtin, hf://datasets/OWNER/NAME[@REVISION][/FOLDER]
    out_dir: str | None = None  # data folder to make; default: data/ and the name of the input
    tokens: int = 3_300_000_000  # training tokens at most; the default is enough for 162m
    tokenizer: str | None = None  # llama (default; builtin: byte), gpt2, byte, bpe2048, FILE.model
    held_out: float | None = None  # share of val and of test; 0.005, builtin 0.05
    column: str = 'text'  # column of .parquet files and field of .jsonl lines that hold the text
    workers: int = os.cpu_count() or 1  # threads that tokenize; default: the number of CPU cores

    def __post_init__(self) -> None:
        tokenizer, held_out = ('byte', 0.05) if self.input == 'builtin' else ('llama', 0.005)
        resolve_defaults(self, tokenizer=tokenizer, held_out=held_out)
        in_range(self, 1, 10**15, 'tokens')
        in_range(self, 1, 1024, 'workers')
        in_range(self, 0, 0.49, 'held_out')
        pieces = re.fullmatch(r'bpe(\d{3,5})', self.tokenizer)
        check(bool(pieces and 512 <= int(pieces[1]) <= 65_536)
              or self.tokenizer in ('llama', 'gpt2', 'byte') or os.path.isfile(self.tokenizer),
              f'tokenizer={self.tokenizer}: no such file, and none of llama, gpt2, byte, '
              'bpe512 to bpe65536')

        name = os.path.basename(os.path.abspath(self.input)).partition('.')[0] or 'text'
        if self.input == SLIMPAJAMA:
            name = 'slimpajama'
        elif self.input.startswith(HUB):
            owner, _, name = self.input.removeprefix(HUB).rstrip('/').partition('/')
            check(bool(owner and name), f'input={self.input}: expected {HUB}OWNER/NAME')
            name = name.replace('/', '-')
        elif self.input != 'builtin':
            self.input = os.path.abspath(self.input)
        resolve_defaults(self, out_dir=f'data/{name}')

    def content_options(self) -> dict[str, Any]:
        """Return the options that decide the content of the data folder."""
        names = ('input', 'tokenizer', 'tokens', 'held_out', 'column')
        return {name: getattr(self, name) for name in names}


# Files

class Source(NamedTuple):
    """Files of documents, in the order in which they are read."""
    root: str  # a folder, or hf://datasets/OWNER/NAME@COMMIT
    files: dict[str, str | None]  # paths inside it, and the split that each is named after
    ignored: list[str]  # files with other suffixes

    def path(self, file: str) -> str:
        """Return the path of a file, after downloading it if it is on the Hub."""
        if not self.root.startswith(HUB):
            return os.path.join(self.root, file)
        repository, commit = self.root.removeprefix(HUB).split('@')
        with hub() as hf:
            return hf.HfApi().hf_hub_download(repository, file, repo_type='dataset',
                                              revision=commit)


def find_source(where: str) -> Source:
    """List the files of an input, those of held-out splits first. UserError if there are none."""
    if where == 'builtin':  # the standard library, without its tests and installed packages
        excluded = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}
        names = [name for name in list_files(LIBRARY)
                 if name.endswith('.py') and excluded.isdisjoint(name.split('/'))]
        return Source(LIBRARY, dict.fromkeys(names), [])
    if os.path.isfile(where):
        packed = where.lower().endswith(('.json', '.gz', '.zst', '.zip'))
        check(where.lower().endswith(ROWS) or not packed,
              f'{where}: expected {", ".join(SUFFIXES)}, or unpacked text')
        root, name = os.path.split(where)
        return Source(root, {name: None}, [])
    if where.startswith(HUB):
        root, names = list_hub(where)
    else:
        check(os.path.isdir(where), f'{where}: no such file or folder')
        root, names = where, list_files(where)
    files = {name: find_split(name) for name in names if name.lower().endswith(SUFFIXES)}
    check(bool(files), f'{where} holds no {", ".join(SUFFIXES)} file')
    if 'train' not in files.values():  # Then a name like test is there by chance.
        files = dict.fromkeys(files)
    ordered = sorted(files.items(), key=lambda item: item[1] not in ('val', 'test'))
    return Source(root, dict(ordered), [name for name in names if name not in files])


def find_split(name: str) -> str | None:
    """Return the split in a path such as train/a.jsonl, TinyStories-valid.txt or ptb.test.txt."""
    words = re.split('[/._-]', name.lower())[:-1]  # without the suffix
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def list_files(root: str) -> list[str]:
    """List the files in a folder by name, and then those in its subfolders, without hidden ones.
    Links are followed. OSError if a folder cannot be listed."""
    def refuse(error: OSError) -> None:
        raise error

    names = []
    for folder, subfolders, files in os.walk(root, onerror=refuse, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if name[0] != '.')
        paths = [os.path.join(folder, name) for name in sorted(files) if name[0] != '.']
        names += [os.path.relpath(path, root) for path in paths]
    return names


@contextmanager
def hub() -> Iterator[Any]:
    """Give access to the Hub. UserError for any error in the with block."""
    import huggingface_hub
    try:
        yield huggingface_hub
    except Exception as error:  # The HTTP library raises many classes of its own.
        fail(f'the Hugging Face Hub: {error} (is there a network? downloads are kept)')


def list_hub(where: str) -> tuple[str, list[str]]:
    """Return a repository with its current commit, and the names of its files below `where`."""
    with hub() as hf:
        uri = hf.parse_hf_uri(where.rstrip('/'))
        commit = hf.HfApi().dataset_info(uri.id, revision=uri.revision).sha
        root = f'{HUB}{uri.id}@{commit}'
        paths = hf.HfFileSystem().find(f'{root}/{uri.path_in_repo}'.rstrip('/'))
    names = sorted(f'hf://{path}'.removeprefix(f'{root}/') for path in paths)
    return root, [name for name in names if not os.path.basename(name).startswith('.')]


# Documents

def read_parquet(path: str, column: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile
    # Without buffer_size and pre_buffer, pyarrow keeps everything in memory that it has read.
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        check(column in names,
              f'{path} has no "{column}" column, only {", ".join(names)} (--column chooses)')
        for batch in table.iter_batches(64, columns=[column], use_threads=False):
            yield from batch.column(0).to_pylist()


def read_jsonl(path: str, column: str) -> Iterator[Any]:
    from pyarrow import CompressedInputStream
    with open(path, 'rb') as file:
        lines: Any = file
        if not path.lower().endswith('.jsonl'):
            check(os.path.getsize(path) > 0, f'{path} is empty')
            kind = 'zstd' if path.lower().endswith('.zst') else 'gzip'
            lines = io.BufferedReader(CompressedInputStream(file, kind), 1 << 20)
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield parse_line(line, column, f'{path}, line {number}')


def parse_line(line: bytes, column: str, where: str) -> Any:
    """Return the text in a line of JSON. UserError, which begins with `where`, if there is none."""
    expected = f'expected an object like {{"{column}": "..."}} on each line, without commas or [ ]'
    try:
        row = json.loads(line.decode('utf-8-sig'))
    except UnicodeDecodeError as error:
        refuse_encoding(where, line, error)
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos:].strip()
        fail(f'{where} is no JSON ({error.msg}: {rest[:20]!r}): {expected}')
    check(isinstance(row, dict), f'{where} is {row!r:.20}: {expected}')
    check(column in row, f'{where} has no "{column}", only {", ".join(row)} (--column chooses)')
    return row[column]


def read_documents(path: str, column: str) -> Iterator[str]:
    """Yield the documents of a file, whole. UserError if it is damaged."""
    import pyarrow
    if path.endswith('.py'):  # The library has some files that are not UTF-8.
        yield Path(path).read_bytes().decode('utf-8', 'replace')
        return
    if not path.lower().endswith(ROWS):
        yield ''.join(read_text(path))
        return
    read_rows = read_parquet if path.lower().endswith('.parquet') else read_jsonl
    try:
        for text in read_rows(path, column):
            check(isinstance(text, str | None), f'{path}: a "{column}" is no text but {text!r:.40}')
            # JSON can spell half a surrogate pair, which is not text and becomes "?".
            yield (text or '').encode('utf-8', 'replace').decode()
    except (pyarrow.ArrowException, OSError) as error:
        packed = path.lower().endswith(('.gz', '.zst'))
        remedy = '; unpack it, if gzip -d or zstd -d --long=31 can' if packed else ''
        fail(f'{path}: {error}'.partition('\n')[0] + remedy)


def text_documents(path: str) -> Iterator[str]:
    """Yield the documents of a file or folder, whole, as train.py --text reads them. UserError."""
    source = find_source(os.path.abspath(path))
    for file in source.files:
        yield from filter(None, read_documents(source.path(file), 'text'))


class Part(NamedTuple):
    """A document, or a block of a longer one."""
    split: str
    text: str
    begins: bool = True  # whether it is the first block of its document


def read_parts(o: PrepareConfig, source: Source) -> Iterator[Part]:
    """Yield all documents. The name of a file decides the split, or else a hash of a document. A
    .txt file is read in blocks, and its end is held out, unless it is one of many."""
    named = {'val', 'test'}.intersection(source.files.values())  # splits with files of their own
    many = o.input == 'builtin' or len(source.files) >= MANY
    for file, file_split in source.files.items():
        path = source.path(file)
        if many or path.lower().endswith(ROWS):
            for text in filter(None, read_documents(path, o.column)):
                split = file_split if file_split in named else split_by_hash(text, o.held_out)
                if split in named and split != file_split:
                    split = 'train'
                yield Part(split, text)
            continue
        splits = [file_split or 'train']
        if file_split not in named:
            splits += [split for split in ('val', 'test') if split not in named]
        for split, begin, end in cut_file(path, splits, o.held_out):
            for n, text in enumerate(read_text(path, begin, end)):
                yield Part(split, text, n == 0)


def split_by_hash(text: str, held_out: float) -> str:
    """Choose the split of a document by a hash of its text. Val and test each get the fraction
    `held_out` of all documents."""
    x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64
    return 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'


def cut_file(path: str, splits: list[str], held_out: float) -> Iterator[tuple[str, int, int]]:
    """Yield (split, first byte, end) of the parts of a .txt file, the last one first. All but the
    first have the fraction `held_out` of it. Cuts are at a space or line end, if one is near."""
    end = size = os.path.getsize(path)
    with open(path, 'rb') as file:
        for n, split in enumerate(reversed(splits[1:]), 1):
            begin = file.seek(size - n * round(held_out * size))
            text = file.read(BLOCK)
            cut = re.search(rb'[ \n]', text) or re.search(rb'[^\x80-\xbf]|\Z', text)
            begin = min(end, begin + cut.start())
            yield split, begin, end
            end = begin
    yield splits[0], 0, end


# Tokens and shards

def find_tokenizer(o: PrepareConfig, source: Source, folder: str) -> Any:
    """Load or train the tokenizer that the options name. A SentencePiece model is put into the
    folder: Llama's, the user's, or the trained one."""
    model = os.path.join(folder, MODEL_FILE)
    if o.tokenizer == 'llama':
        with hub() as hf:
            downloaded = hf.HfApi().hf_hub_download(*LLAMA)
        shutil.copyfile(downloaded, model)
    elif pieces := re.fullmatch(r'bpe(\d+)', o.tokenizer):
        train_bpe(model, int(pieces[1]), sample_train(o, source))
    elif o.tokenizer not in ('gpt2', 'byte'):
        make_tokenizer('sentencepiece', o.tokenizer)  # UserError, which names the user's file
        shutil.copyfile(o.tokenizer, model)
    return make_tokenizer(o.tokenizer, model)


def sample_train(o: PrepareConfig, source: Source) -> list[str]:
    """Read about BPE_TEXT bytes of the train split, evenly spaced through it."""
    def train_texts() -> Iterator[str]:
        size = 0  # bytes
        for part in read_parts(o, source):
            if part.split == 'train':
                yield part.text
                size += len(part.text.encode())
                if size > 4 * o.tokens:  # enough: a token has some four bytes
                    return
    print(f'Reading {o.input} for the tokenizer {o.tokenizer}', flush=True)
    total = sum(len(text.encode()) for text in train_texts())
    return list(islice(train_texts(), 0, None, max(1, math.ceil(total / BPE_TEXT))))


class Writer:
    """Write the shards of a data folder: several for train, one each for val and test."""
    def __init__(self, folder: str, vocab_size: int):
        self.folder = folder
        self.dtype = np.dtype('<u2' if vocab_size <= 2 ** 16 else '<u4')
        self.splits = {split: {'tokens': 0, 'shards': []} for split in SPLITS}  # for meta.json

    def append(self, split: str, ids: np.ndarray) -> None:
        shards = self.splits[split]['shards']
        self.splits[split]['tokens'] += len(ids)
        limit = SHARD_TOKENS if split == 'train' else sys.maxsize
        while len(ids):
            if not shards or shards[-1]['tokens'] == limit:
                name = f'train_{len(shards):05d}.bin' if split == 'train' else f'{split}.bin'
                shards.append({'file': name, 'tokens': 0})
            new, ids = np.split(ids, [limit - shards[-1]['tokens']])
            with open(os.path.join(self.folder, shards[-1]['file']), 'ab') as file:
                file.write(new.astype(self.dtype).tobytes())
            shards[-1]['tokens'] += len(new)


def tokenize(o: PrepareConfig, source: Source, tokenizer: Any, writer: Writer) -> bool:
    """Write the tokens of all documents, until the train split is full. Return whether the
    tokenizer spells the text: one part of each batch is compared."""
    def encode(part: Part) -> np.ndarray:
        ids = tokenizer.encode(part.text, part.begins)
        return np.array([tokenizer.bos] * part.begins + ids, np.uint32)

    parts = read_parts(o, source)
    train, lossless = writer.splits['train'], True
    with (ThreadPoolExecutor(o.workers) as pool,
          tqdm(unit=' tokens', unit_scale=True, mininterval=1, leave=False, disable=None) as bar):
        while train['tokens'] < o.tokens and (batch := list(islice(parts, BATCH))):
            encoded = list(pool.map(encode, batch))
            first = batch[0]
            lossless &= keeps_text(tokenizer, encoded[0][first.begins:].tolist(), first.text)
            for split in SPLITS:
                new = [ids for part, ids in zip(batch, encoded, strict=True) if part.split == split]
                room = o.tokens - train['tokens'] if split == 'train' else None
                ids = np.concatenate([*new, np.empty(0, np.uint32)])[:room]
                writer.append(split, ids)
                bar.update(len(ids))
    return lossless


# The data folder

def prepare(o: PrepareConfig) -> None:
    """Make the data folder o.out_dir unless it exists. It is written to a hidden folder beside it,
    which is renamed when it is complete. UserError, OSError."""
    if is_prepared(o):
        return
    parent, name = os.path.split(os.path.realpath(o.out_dir))
    partial_folder = os.path.join(parent, f'.{name}.partial')
    os.makedirs(parent, exist_ok=True)
    with FileLock(os.path.join(parent, f'.{name}.lock')):
        if is_prepared(o):  # by another process, which held the lock
            return
        shutil.rmtree(partial_folder, ignore_errors=True)  # of a process that was killed
        try:
            os.mkdir(partial_folder)
            write_folder(o, partial_folder)
            os.replace(partial_folder, os.path.join(parent, name))
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)


def is_prepared(o: PrepareConfig) -> bool:
    """Return whether o.out_dir was made with these options. UserError if it holds anything else."""
    meta = read_json(os.path.join(o.out_dir, 'meta.json'), 'choose another --out_dir')
    if meta is None:
        check(not os.path.exists(o.out_dir) or not os.listdir(o.out_dir),
              f'{o.out_dir} holds other files: choose another --out_dir')
        return False
    options = ', '.join(f'{name}={value}' for name, value in meta['config'].items())
    check(meta['config'] == o.content_options(),
          f'{o.out_dir} was made with {options}: delete it, or choose another --out_dir')
    print(f'{o.out_dir} is prepared already; delete it to prepare it anew', flush=True)
    return True


def write_folder(o: PrepareConfig, folder: str) -> None:
    """Write tokenizer, shards and meta.json to an empty folder. UserError, OSError."""
    source = find_source(o.input)
    groups = {split: [file for file, file_split in source.files.items() if file_split == split]
              for split in SPLITS}
    for what, files in (groups | {'ignored, of other kinds': source.ignored}).items():
        more = f' and {len(files) - 3:,} more' if len(files) > 3 else ''
        if files:
            print(f'{what}: {", ".join(files[:3])}{more}', flush=True)

    tokenizer = find_tokenizer(o, source, folder)
    writer = Writer(folder, tokenizer.vocab_size)
    lossless = tokenize(o, source, tokenizer, writer)
    sizes = {split: content['tokens'] for split, content in writer.splits.items()}
    empty = [split for split, size in sizes.items() if not size]
    check('train' not in empty and not (empty and o.held_out),
          f'{o.input} holds too little text for {", ".join(empty)}: give more, or '
          'prepare_slimpajama.py --held_out with a larger fraction')

    meta = {
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': writer.splits, 'config': o.content_options(),
        'source': source.root if o.input.startswith(HUB) else o.input, 'files': list(source.files)}
    if not lossless:
        meta['lossless'] = False
        print('The tokenizer loses some of this text: there will be no bits per byte', flush=True)
    Path(folder, 'meta.json').write_text(json.dumps(meta, indent=1), encoding='utf-8')
    for split, size in sizes.items():
        print(f'{split:5} {size:>15,} tokens', flush=True)
    if sizes['train'] == o.tokens and o.input != SLIMPAJAMA:
        print(f'Train is full at {o.tokens:,} tokens, and the rest of {o.input} is left out: '
              'prepare_slimpajama.py --tokens=N takes more', flush=True)


# What train.py and evaluate.py call

def find_data(folder: str, text: str | None = None, tokenizer: str | None = None,
              checkpoint: dict[str, Any] | None = None) -> str:
    """Return the data folder: `folder`, or that of a user's text. The folder of a text, and
    data/builtin, are made on first use. If training starts from the weights of `checkpoint`, its
    tokenizer is the default for a text. UserError, OSError."""
    if text:
        if checkpoint and not tokenizer:
            saved = tokenizer_of(checkpoint)
            tokenizer = saved.path or saved.name
        return prepare_text(text, tokenizer)
    builtin = os.path.relpath(folder) == os.path.join('data', 'builtin')
    if builtin and not os.path.exists(f'{folder}/meta.json'):
        print(f"Preparing {folder} from the source of this Python's library", flush=True)
        prepare(PrepareConfig(input='builtin'))
    return folder


def prepare_text(path: str, tokenizer: str | None) -> str:
    """Prepare a user's file or folder of text, and return the data folder. Its name contains a hash
    of the files' paths, sizes and times, and of the tokenizer: a changed text is prepared anew."""
    source = find_source(os.path.abspath(path))
    files = [source.path(file) for file in source.files]
    states = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns)
              for file in [*files, tokenizer] if file and os.path.exists(file)]
    digest = hashlib.sha256(repr((tokenizer, states)).encode()).hexdigest()
    size = sum(map(os.path.getsize, files))

    # A default that does not suit the text is followed by the next larger one, at last by bytes.
    defaults = [name for limit, name in TEXT_TOKENIZERS.items() if size < limit] + ['byte']
    for name in [tokenizer] if tokenizer else defaults:
        # A user's folder may be called builtin: with ./ it does not name the built-in text.
        o = PrepareConfig(input=os.path.join('.', path), tokenizer=name,
                          held_out=0.05 if size < 20e6 else 0.005)
        o.out_dir += f'-{digest[:8]}'
        if os.path.exists(os.path.join(o.out_dir, 'meta.json')):
            break
        tokens = 'one token a byte' if name == 'byte' else f'tokenizer {name}'
        print(f'Preparing {path}, {size / 1e6:,.2f} MB, in {o.out_dir}: {tokens}', flush=True)
        try:
            prepare(o)
            break
        except UnsuitedVocabulary as error:
            if tokenizer:
                raise
            print(f'The default {error}', flush=True)
    return o.out_dir


@command_line
def main(argv: list[str]) -> None:
    prepare(PrepareConfig(**read_options(argv, PrepareConfig)))


if __name__ == '__main__':
    main(sys.argv[1:])

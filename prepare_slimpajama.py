"""
Turn SlimPajama, or any text, into token shards that train.py reads.

    python prepare_slimpajama.py                      its first 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    python prepare_slimpajama.py --input=book.txt --tokenizer=bpe2048
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT

A BOS token begins each document; they are concatenated in train_00000.bin, ..., val.bin and
test.bin (little-endian unsigned integers). meta.json describes them. A row of a .parquet or .jsonl
file is a document, and a hash of its text sends it to train, val or test. The end of a .txt file is
test, and an equal part before it is val. The folder appears when it is complete.
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
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from configurator import check, command_line, fail, in_range, read_options, resolve_defaults
from nanocem import tokenizers
from nanocem.data import FORMAT
from nanocem.files import read_json

HUB = 'hf://datasets/'
SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # Llama 1 and 2 have the same
# The default tokenizer of train.py --text, for texts below each size in bytes
TEXT_TOKENIZERS = {1e6: 'byte', 5e6: 'bpe1024', 20e6: 'bpe2048', 1e9: 'bpe4096',
                   math.inf: 'bpe32000'}
ROWS = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz')  # files in which each row is a document
SUFFIXES = (*ROWS, '.txt')
LIBRARY = sysconfig.get_paths()['stdlib']
SPLITS = ('train', 'val', 'test')
SPLIT_WORDS = {'train': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'test': 'test'}
SHARD_TOKENS = 100_000_000  # tokens per file of the train split
BPE_TEXT = 32_000_000  # A tokenizer is trained on about this many bytes.
BATCH = 64  # Threads tokenize this many documents, or blocks of text files, together.


@dataclass
class PrepareConfig:
    """Choose the text, the tokenizer and the splits."""
    input: str = SLIMPAJAMA  # path, builtin, hf://datasets/OWNER/NAME[@REVISION][/FOLDER]
    out_dir: str | None = None  # data folder to make; default: data/ and the name of the input
    tokens: int = 3_300_000_000  # training tokens at most; the default is enough for 162m
    tokenizer: str | None = None  # llama (default; builtin: byte), gpt2, byte, bpe2048, FILE.model
    held_out: float | None = None  # share of val and of test; 0.005, builtin 0.05
    column: str = 'text'  # column of .parquet files and field of .jsonl lines that hold the text

    def __post_init__(self) -> None:
        in_range(self, 0, 0.49, 'held_out')  # train gets what val and test leave
        if self.input == 'builtin':
            resolve_defaults(self, tokenizer='byte', held_out=0.05)
        elif not self.input.startswith(HUB):
            self.input = os.path.abspath(self.input)
        name = os.path.basename(self.input.rstrip('/')).partition('.')[0] or 'text'
        name = 'slimpajama' if self.input == SLIMPAJAMA else name
        resolve_defaults(self, tokenizer='llama', held_out=0.005, out_dir=f'data/{name}')

    def content_options(self) -> dict[str, Any]:
        """Return the options that decide the content of the data folder."""
        return {name: value for name, value in vars(self).items() if name != 'out_dir'}


# Files

class Source(NamedTuple):
    """Files of text, in the order in which they are read."""
    root: str  # a folder, or hf://datasets/OWNER/NAME@COMMIT
    files: dict[str, str | None]  # paths below root, and the split that each is named after

    def path(self, file: str) -> str:
        """Return the path of a file, after downloading it if it is on the Hub."""
        if not self.root.startswith(HUB):
            return os.path.join(self.root, file)
        repository, commit = self.root.removeprefix(HUB).split('@')
        with hub() as hf:
            return hf.HfApi().hf_hub_download(repository, file, repo_type='dataset',
                                              revision=commit)


def find_source(where: str) -> Source:
    """Find the files of an input. UserError if there are none."""
    if where == 'builtin':  # the standard library, without its tests and installed packages
        excluded = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}
        names = [name for name in list_files(LIBRARY)
                 if name.endswith('.py') and excluded.isdisjoint(name.split('/'))]
        return Source(LIBRARY, dict.fromkeys(names))
    if os.path.isfile(where):
        root, name = os.path.split(where)
        return Source(root, {name: None})
    check(os.path.isdir(where) or where.startswith(HUB), f'{where}: no such file or folder')
    root, names = list_hub(where) if where.startswith(HUB) else (where, list_files(where))
    files = {name: find_split(name) for name in names if name.lower().endswith(SUFFIXES)}
    check(bool(files), f'{where} holds no {", ".join(SUFFIXES)} file')
    if 'train' not in files.values():  # Then a name like test does not mean a split.
        files = dict.fromkeys(files)
    # Read val and test first: reading stops when the train split is full
    names = sorted(files, key=lambda name: files[name] not in ('val', 'test'))
    return Source(root, {name: files[name] for name in names})


def find_split(name: str) -> str | None:
    """Return the split that a path names: train/a.jsonl, TinyStories-valid.txt, ptb.test.txt."""
    words = re.split('[/._-]', name.lower())[:-1]  # without the suffix
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def list_files(root: str, folder: str = '') -> list[str]:
    """List the files in a folder below root, and then those in its subfolders, by name and without
    hidden ones, as paths below root. Links are followed. OSError if a folder cannot be listed."""
    names = sorted(name for name in os.listdir(os.path.join(root, folder)) if name[0] != '.')
    paths = [os.path.join(folder, name) for name in names]
    subfolders = [path for path in paths if os.path.isdir(os.path.join(root, path))]
    files = [path for path in paths if path not in subfolders]
    here = os.path.realpath(os.path.join(root, folder)) + os.sep
    for subfolder in subfolders:
        if not here.startswith(os.path.realpath(os.path.join(root, subfolder)) + os.sep):
            files += list_files(root, subfolder)  # not a link to a folder that holds this one
    return files


@contextmanager
def hub() -> Iterator[Any]:
    """Import huggingface_hub. Any error in the with block becomes a UserError."""
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
    return root, sorted(f'hf://{path}'.removeprefix(f'{root}/') for path in paths)


# Documents

def read_parquet(path: str, column: str) -> Iterator[str | None]:
    from pyarrow.parquet import ParquetFile
    # Without buffer_size and pre_buffer, pyarrow keeps everything in memory that it has read.
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        check(column in names,
              f'{path} has no "{column}" column, only {", ".join(names)} (--column chooses)')
        for batch in table.iter_batches(batch_size=64, columns=[column], use_threads=False):
            yield from batch.column(0).to_pylist()


def read_jsonl(path: str, column: str) -> Iterator[str]:
    from pyarrow import input_stream
    with input_stream(path) as stream:  # It decompresses .zst and .gz.
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line.decode('utf-8-sig'))[column] or ''
                # JSON can hold half of a surrogate pair, which is not text: replace it by "?".
                text = text.encode('utf-8', 'replace').decode()
            except UnicodeDecodeError as error:
                tokenizers.refuse_encoding(f'{path}, line {number}', error)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                fail(f'{path}, line {number}: expected {{"{column}": "..."}} on each line '
                     f'(--column names another field), not {line[:60]!r} ({error})')
            yield text


def read_documents(path: str, column: str) -> Iterator[str]:
    """Yield the documents of a file that are not empty: its rows, or a whole text. UserError if it
    is damaged."""
    import pyarrow
    if path.lower().endswith('.parquet'):
        texts = read_parquet(path, column)
    elif path.lower().endswith(ROWS):
        texts = read_jsonl(path, column)
    else:
        texts = [tokenizers.read_text(path)]
    try:
        yield from filter(None, texts)
    except (pyarrow.ArrowException, OSError) as error:
        fail(f'{path}: {error}')


def text_documents(path: str) -> Iterator[str]:
    """Yield the documents of a file or folder, as train.py --text reads them. UserError."""
    source = find_source(os.path.abspath(path))
    for file in source.files:
        yield from read_documents(source.path(file), 'text')


def read_parts(o: PrepareConfig, source: Source) -> Iterator[tuple[str, str, bool]]:
    """Yield (split, text, whether it begins a document) for each document, or each block of a text
    file. A file that is named after val or test belongs to that split. The others are divided:
    rows by their hash, a text file by position."""
    separate = {'val', 'test'}.intersection(source.files.values())  # splits with files of their own
    others = [split for split in SPLITS if split not in separate]
    for file, named in source.files.items():
        splits = [named] if named in separate else others
        path = source.path(file)
        if o.input == 'builtin' or path.lower().endswith(ROWS):
            for text in read_documents(path, o.column):
                split = split_by_hash(text, o.held_out)
                yield (split if split in splits else splits[0]), text, True
        else:
            for split, begin, end in cut_text(path, splits, o.held_out):
                for n, text in enumerate(tokenizers.read_blocks(path, begin, end)):
                    yield split, text, n == 0


def split_by_hash(text: str, held_out: float) -> str:
    """Choose the split of a document by a hash of its text. Val and test each get the fraction
    `held_out` of all documents."""
    x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64  # 0 to 1
    if x < held_out:
        return 'test'
    return 'val' if x < 2 * held_out else 'train'


def cut_text(path: str, splits: list[str], held_out: float) -> Iterator[tuple[str, int, int]]:
    """Cut a text file into parts for these splits, in this order. Yield (split, first byte, end)
    from the last part to the first. Each but the first is the fraction `held_out` of the file."""
    end = size = os.path.getsize(path)
    with open(path, 'rb') as file:
        for n, split in enumerate(reversed(splits[1:]), 1):
            begin = file.seek(size - n * round(held_out * size))
            # Begin at a space or line end, or else with a whole UTF-8 character
            text = file.read(tokenizers.BLOCK)
            cut = re.search(rb'[ \n]', text) or re.search(rb'[^\x80-\xbf]|\Z', text)
            begin = min(end, begin + cut.start())
            yield split, begin, end
            end = begin
    yield splits[0], 0, end


# Tokens and shards

def find_tokenizer(o: PrepareConfig, source: Source, folder: str) -> Any:
    """Load or train the tokenizer that the options name. If it is a SentencePiece model, its file
    is written to the folder. UserError."""
    path = model = os.path.join(folder, tokenizers.MODEL_FILE)
    if o.tokenizer == 'llama':
        with hub() as hf:
            path = hf.HfApi().hf_hub_download(*LLAMA)
    elif match := re.fullmatch(r'bpe(\d+)', o.tokenizer):
        tokenizers.train_bpe(model, int(match[1]), sample_train(o, source))
    elif o.tokenizer not in ('gpt2', 'byte'):
        path = o.tokenizer
        check(os.path.isfile(path),
              f'tokenizer={path}: no such file, and none of llama, gpt2, byte, bpe2048')
    tokenizer = tokenizers.make_tokenizer(o.tokenizer, path)
    if path != model:
        shutil.copyfile(path, model)
    return tokenizer


def sample_train(o: PrepareConfig, source: Source) -> list[str]:
    """Return every n-th text of the train split, about BPE_TEXT bytes in all. The split is read
    twice: once for its size."""
    def train_texts() -> Iterator[str]:
        size = 0  # bytes
        for split, text, _ in read_parts(o, source):
            if split == 'train':
                yield text
                size += len(text.encode())
                if size > 4 * o.tokens:  # A token has some four bytes: train will be full.
                    return

    print(f'Reading {o.input} for the tokenizer {o.tokenizer}', flush=True)
    total = sum(len(text.encode()) for text in train_texts())
    n = max(1, math.ceil(total / BPE_TEXT))
    return list(islice(train_texts(), 0, None, n))


class Writer:
    """Append token ids to the shards of a data folder: several for train, one for val and test."""
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
            space = limit - shards[-1]['tokens']
            with open(os.path.join(self.folder, shards[-1]['file']), 'ab') as file:
                file.write(ids[:space].astype(self.dtype).tobytes())
            shards[-1]['tokens'] += len(ids[:space])
            ids = ids[space:]


def tokenize(o: PrepareConfig, source: Source, tokenizer: Any, writer: Writer) -> bool:
    """Write the tokens of all documents, until the train split is full. Return whether decoding
    gives the text back: the first part of each batch is decoded."""
    def encode(part: tuple[str, str, bool]) -> np.ndarray:
        _, text, begins = part
        bos = [tokenizer.bos] if begins else []
        return np.array(bos + tokenizer.encode(text, begins), np.uint32)

    parts = read_parts(o, source)
    train = writer.splits['train']
    lossless = True
    with (ThreadPoolExecutor() as pool,
          tqdm(unit=' tokens', unit_scale=True, mininterval=1, leave=False, disable=None) as bar):
        while train['tokens'] < o.tokens and (batch := list(islice(parts, BATCH))):
            encoded = list(pool.map(encode, batch))
            _, text, begins = batch[0]
            without_bos = encoded[0][1:] if begins else encoded[0]
            lossless &= tokenizers.keeps_text(tokenizer, without_bos.tolist(), text)
            for (split, *_), ids in zip(batch, encoded, strict=True):
                limit = o.tokens - train['tokens'] if split == 'train' else None
                writer.append(split, ids[:limit])
                bar.update(len(ids))
    return lossless


# The data folder

def prepare(o: PrepareConfig) -> None:
    """Make the data folder o.out_dir unless it exists. It is written to a hidden folder beside it,
    which is renamed when it is complete. UserError, OSError."""
    parent, name = os.path.split(os.path.realpath(o.out_dir))
    partial_folder = os.path.join(parent, f'.{name}.partial')
    os.makedirs(parent, exist_ok=True)
    with FileLock(os.path.join(parent, f'.{name}.lock')):
        meta = read_json(os.path.join(o.out_dir, 'meta.json'))
        if meta and meta['config'] == o.content_options():
            print(f'{o.out_dir} is prepared already; delete it to prepare it anew', flush=True)
            return
        check(not os.path.exists(o.out_dir) or not os.listdir(o.out_dir),
              f'{o.out_dir} holds other files, or data made with other options: choose another '
              '--out_dir')
        shutil.rmtree(partial_folder, ignore_errors=True)  # of a process that was killed
        try:
            os.mkdir(partial_folder)
            write_folder(o, partial_folder)
            os.replace(partial_folder, os.path.join(parent, name))
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)


def write_folder(o: PrepareConfig, folder: str) -> None:
    """Write tokenizer, shards and meta.json to an empty folder. UserError, OSError."""
    source = find_source(o.input)
    for split in SPLITS:
        if files := [file for file, named in source.files.items() if named == split]:
            print(f'{split}: {len(files)} of {len(source.files)} files, first {files[0]}',
                  flush=True)

    tokenizer = find_tokenizer(o, source, folder)
    writer = Writer(folder, tokenizer.vocab_size)
    lossless = tokenize(o, source, tokenizer, writer)
    sizes = {split: writer.splits[split]['tokens'] for split in SPLITS}
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
    if sizes['train'] == o.tokens:
        print(f'Train is full at {o.tokens:,} tokens: --tokens=N takes more of it', flush=True)


# What train.py and evaluate.py call

def find_data(folder: str, text: str | None = None, tokenizer: str | None = None,
              checkpoint: dict[str, Any] | None = None) -> str:
    """Return the data folder: `folder`, or that of a user's `text`. That of a text, and
    data/builtin, are made on first use. The default tokenizer of a text is that of `checkpoint`,
    from which training starts, or else chosen by size. UserError, OSError."""
    if text:
        if checkpoint and not tokenizer:
            saved = tokenizers.tokenizer_of(checkpoint)
            tokenizer = saved.path or saved.name
        return prepare_text(text, tokenizer)
    builtin = os.path.normpath(folder) == os.path.join('data', 'builtin')
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
    default = next(name for limit, name in TEXT_TOKENIZERS.items() if size < limit)
    o = PrepareConfig(input=os.path.abspath(path), tokenizer=tokenizer or default,
                      held_out=0.05 if size < 20e6 else 0.005)
    o.out_dir += f'-{digest[:8]}'
    if os.path.exists(os.path.join(o.out_dir, 'meta.json')):
        return o.out_dir

    print(f'Preparing {path}, {size / 1e6:,.2f} MB, in {o.out_dir}: tokenizer {o.tokenizer}',
          flush=True)
    try:
        prepare(o)
    except tokenizers.UnsuitedVocabulary as error:
        if tokenizer:
            raise
        print(f'The default {error}; it gets one token a byte', flush=True)
        prepare(replace(o, tokenizer='byte'))
    return o.out_dir


@command_line
def main(argv: list[str]) -> None:
    prepare(PrepareConfig(**read_options(argv, PrepareConfig)))


if __name__ == '__main__':
    main(sys.argv[1:])

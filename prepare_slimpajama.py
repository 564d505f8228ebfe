"""
Turn SlimPajama, or any text, into token shards that train.py reads.

    python prepare_slimpajama.py                      its first 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --size=86m           as much as one model needs
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    python prepare_slimpajama.py --input=FOLDER --tokenizer=bpe2048
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT

Documents keep their order. A BOS token begins each, and they are concatenated in train_00000.bin,
..., val.bin and test.bin (little-endian unsigned integers). meta.json describes them. The folder
appears when it is complete. A preparation that was stopped begins again; downloads are kept.
"""
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from configurator import check, command_line, fail, in_range, read_options, resolve_defaults
from nanocem.data import FORMAT
from nanocem.files import locked, read_json, read_text, say, write_atomic
from nanocem.tokenizers import MODEL_FILE, WORD_END, make_tokenizer, tokenizer_of, train_bpe

HUB = 'hf://datasets/'
SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # Llama 1 and 2 have the same
# Training tokens for each size of model: 20 per parameter of its Llama, rounded up
SIZES = {'86m': 1.75e9, '108m': 2.2e9, '134m': 2.7e9, '162m': 3.3e9, '256m': 5.2e9}
# Default tokenizers of train.py --text: each is for texts with fewer bytes than its key
TEXT_TOKENIZERS = {1e6: 'byte', 5e6: 'bpe1024', 20e6: 'bpe2048', 1e9: 'bpe4096',
                   math.inf: 'bpe32000'}
SUFFIXES = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz', '.txt')
LIBRARY = sysconfig.get_paths()['stdlib']
SPLITS = ('train', 'val', 'test')
SPLIT_WORDS = {'train': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'test': 'test'}
SHARD_TOKENS = 100_000_000  # tokens per file of the train split
PART = 1 << 16  # A longer document is tokenized in parts of at least this many characters.
LONGEST_PART = 1 << 20  # A .txt file without a space in this many characters is cut in a word.
BATCH = 1 << 21  # Threads tokenize about this many characters together.
BPE_TEXT = 32_000_000  # A tokenizer is trained on about this many bytes.
TOKEN_BYTES = 8  # No tokenizer has more bytes per token on average.
MANY = 2000  # A text of fewer documents is split by position, others by hash: see find_ends.
TOO_FEW = 4096  # The perplexity of a val or test split of fewer tokens says little.


@dataclass
class PrepareConfig:
    """Choose the text, the tokenizer and the splits."""
    input: str = SLIMPAJAMA  # path, builtin, hf://datasets/OWNER/NAME[@REVISION][/FOLDER]
    out_dir: str | None = None  # data folder to make; default: data/ and the name of the input
    tokens: int | None = None  # training tokens at most; default 3.3B
    size: Literal[tuple(SIZES)] | None = None  # instead of tokens: what this size needs
    tokenizer: str | None = None  # llama (default; builtin: byte), gpt2, byte, bpe2048, FILE.model
    held_out: float | None = None  # share of val and of test; 0.005, builtin 0.05
    column: str = 'text'  # column of .parquet files and field of .jsonl lines that hold the text
    workers: int = os.cpu_count() or 1  # threads that tokenize; default: the number of CPU cores

    def __post_init__(self) -> None:
        check(not (self.tokens and self.size), 'tokens and size: give one')
        builtin = self.input == 'builtin'
        tokenizer, held_out = ('byte', 0.05) if builtin else ('llama', 0.005)
        tokens = round(SIZES[self.size or '162m'])
        resolve_defaults(self, tokens=tokens, tokenizer=tokenizer, held_out=held_out)
        in_range(self, 1, 10**15, 'tokens')
        in_range(self, 1, 1024, 'workers')
        in_range(self, 0, 0.49, 'held_out')

        self.model_file: str | None = None  # the SentencePiece model that --tokenizer names
        pieces = re.fullmatch(r'bpe(\d{1,9})', self.tokenizer)
        if pieces:
            check(512 <= int(pieces[1]) <= 65_536,
                    f'tokenizer={self.tokenizer}: expected bpe512 to bpe65536')
        elif self.tokenizer not in ('llama', 'gpt2', 'byte'):
            check(os.path.isfile(self.tokenizer), f'tokenizer={self.tokenizer}: no such file, '
                    'and none of llama, gpt2, byte, bpe2048')
            self.model_file = self.tokenizer
            model = make_tokenizer('sentencepiece', self.model_file)
            self.tokenizer = 'llama' if model.name == 'llama' else f'{model.name} {model.sha256:.8}'

        name = os.path.basename(os.path.abspath(self.input)).partition('.')[0] or 'text'
        if self.input == SLIMPAJAMA:
            name = 'slimpajama'
        elif self.input.startswith(HUB):
            name = '-'.join(self.input.removeprefix(HUB).rstrip('/').split('/')[1:])
        elif not builtin:
            self.input = os.path.abspath(self.input)
        if name == 'builtin' and not builtin:
            name += '-text'
        resolve_defaults(self, out_dir=f'data/{name}')

    def content_options(self) -> dict[str, Any]:
        """Return the options that decide the content of the data folder."""
        names = ('input', 'tokenizer', 'tokens', 'held_out', 'column')
        return {name: getattr(self, name) for name in names}


# Files

class Source(NamedTuple):
    """Files of documents, in the order in which they are read."""
    name: str  # a path, builtin, or hf://datasets/OWNER/NAME@COMMIT[/FOLDER]
    folder: str  # the folder of local files
    files: dict[str, str | None]  # paths inside the folder, and the split that each is named after
    ignored: list[str]  # files with other suffixes
    ends: dict[str, int] | None = None  # the byte at which each split ends: see find_ends

    def path(self, file: str) -> str:
        """Return the path of a file, after downloading it if it is on the Hub."""
        if not self.name.startswith(HUB):
            return os.path.join(self.folder, file)
        repository, commit = self.name.removeprefix(HUB).split('@', 1)
        with hub() as hf:
            return hf.HfApi().hf_hub_download(repository, file, repo_type='dataset',
                                              revision=commit.split('/')[0])


def find_source(where: str) -> Source:
    """List the files of an input, those of held-out splits first. UserError if there are none."""
    if where == 'builtin':
        return Source(where, LIBRARY, dict.fromkeys(list_library()), [])
    if os.path.isfile(where):
        folder, base = os.path.split(where)
        return Source(where, folder, {base: None}, [])
    name = where
    if where.startswith(HUB):
        name, names = list_hub(where)
    elif os.path.isdir(where):
        names = list_files(where)
    else:
        fail(f'{where}: no such file or folder')
    files = {file: find_split(file) for file in names if file.lower().endswith(SUFFIXES)}
    check(bool(files), f'{where} holds no {", ".join(SUFFIXES)} file')
    if 'train' not in files.values():  # Then a name like test is there by chance.
        files = dict.fromkeys(files)
    ordered = sorted(files.items(), key=lambda item: item[1] not in ('val', 'test'))
    return Source(name, where, dict(ordered), [file for file in names if file not in files])


def find_split(name: str) -> str | None:
    """Return the split in a path such as train/a.jsonl, TinyStories-valid.txt or ptb.test.txt."""
    words = re.split('[/._-]', name.lower())[:-1]  # without the suffix
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def list_files(root: str) -> list[str]:
    """List the files in a folder by name, and then those in its subfolders. Hidden files and pipes
    are left out. Links are followed, but no folder is listed twice."""
    names, visited = [], set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if name[0] != '.')
        paths = [os.path.join(folder, name) for name in sorted(files) if name[0] != '.']
        names += [os.path.relpath(path, root).replace(os.sep, '/') for path in paths
                  if os.path.isfile(path)]
    return names


def list_library() -> list[str]:
    """List the source files of Python's standard library, without its tests and without installed
    packages."""
    excluded = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}
    return [name for name in list_files(LIBRARY)
            if name.endswith('.py') and excluded.isdisjoint(name.split('/'))]


@contextmanager
def hub() -> Iterator[Any]:
    """Give access to the Hub. UserError for any error in the with block, except a full disk."""
    import huggingface_hub
    try:
        yield huggingface_hub
    except Exception as error:  # The HTTP library raises many classes of its own.
        if getattr(error, 'errno', None) == errno.ENOSPC:
            raise
        fail(f'the Hugging Face Hub: {error} (is there a network? downloads are kept)')


def list_hub(where: str) -> tuple[str, list[str]]:
    """Return `where` with its current commit, and the names of its files in the repository."""
    with hub() as hf:
        uri = hf.parse_hf_uri(where.rstrip('/'))
        commit = hf.HfApi().dataset_info(uri.id, revision=uri.revision).sha
        root = f'{HUB}{uri.id}@{commit}'
        name = f'{root}/{uri.path_in_repo}'.rstrip('/')
        paths = sorted(hf.HfFileSystem().find(name))
    names = [f'hf://{path}'.removeprefix(f'{root}/') for path in paths]
    return name, [name for name in names if not os.path.basename(name).startswith('.')]


# Documents, and their parts

def read_documents(path: str, column: str) -> Iterator[Iterable[str]]:
    """Yield the documents of a file, each as chunks of its text. UserError if the file is damaged.
    """
    import pyarrow
    suffix = os.path.splitext(path.lower())[1]
    if suffix == '.parquet':
        texts = read_parquet(path, column)
    elif suffix in ('.jsonl', '.zst', '.gz'):
        texts = read_jsonl(path, column, suffix)
    else:
        yield read_text(path)  # in many chunks, because the file may be larger than memory
        return
    try:
        for text in texts:
            if not isinstance(text, str | None):
                raise ValueError(f'a "{column}" is not text but {text!r:.40}')
            # JSON can spell half a surrogate pair, which is not text.
            text = (text or '').encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
            yield [text]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        first_line = str(error).partition('\n')[0]
        fail(f'{path}: {first_line}')


def read_parquet(path: str, column: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile
    # Without buffer_size and pre_buffer, pyarrow keeps everything in memory that it has read.
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        if column not in names:
            raise ValueError(f'no "{column}" column, only {", ".join(names)} (--column chooses)')
        for batch in table.iter_batches(64, columns=[column], use_threads=False):
            yield from batch.column(0).to_pylist()


def read_jsonl(path: str, column: str, suffix: str) -> Iterator[Any]:
    from pyarrow import CompressedInputStream
    with open(path, 'rb', 1 << 20) as file:
        lines: Any = file
        if suffix != '.jsonl':
            if not os.path.getsize(path):  # pyarrow would read an empty file as no lines
                raise ValueError('unexpected end of file')
            stream = CompressedInputStream(file, 'zstd' if suffix == '.zst' else 'gzip')
            lines = io.BufferedReader(stream, 1 << 20)
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)[column]
                except (ValueError, RecursionError, LookupError, TypeError):
                    raise ValueError(f'line {number} is no JSON with "{column}" '
                                     '(--column chooses)') from None


class Part(NamedTuple):
    """A part of a document that can be tokenized by itself."""
    split: str
    text: str
    begins: bool  # whether it is the first part of its document


def split_text(chunks: Iterable[str], size: int = PART) -> Iterator[str]:
    """Cut a document into parts of `size` characters and the rest of their last word."""
    rest = ''
    for chunk in chunks:
        rest += chunk
        begin = 0
        while word_end := WORD_END.search(rest, begin + size - 1):
            yield rest[begin:word_end.end()]
            begin = word_end.end()
        rest = rest[begin:]
        if len(rest) > LONGEST_PART:
            yield rest
            rest = ''
    if rest:
        yield rest


def read_parts(o: PrepareConfig, source: Source, skip: Callable[[str], bool]) -> Iterator[Part]:
    """Yield the parts of all documents. The split is in the name of a file, or else is decided by
    the position in the text (see find_ends) or by a hash of the document. Files of a split for
    which `skip` is true are not read."""
    ends = source.ends
    position = 0  # bytes of the text that have been read
    for file, file_split in source.files.items():
        held_out = file_split if file_split in ('val', 'test') else None
        # Where splits are positions in the text, val and test come after the train split is full
        if skip(file_split or 'train') and (held_out or not ends):
            continue
        for chunks in read_documents(source.path(file), o.column):
            if held_out and skip(held_out):  # it is full
                break
            split = held_out
            if split is None and not ends:
                chunks = list(chunks)
                split = split_by_hash(''.join(chunks), o.held_out)
                split = 'train' if split in source.files.values() else split  # it has own files
            for n, text in enumerate(split_text(chunks)):
                if split:
                    yield Part(split, text, n == 0)
                else:
                    yield from split_by_position(text, n == 0, position, ends)
                    position += len(text.encode())
        if ends and position >= max(ends.values()):
            return


def split_by_hash(text: str, held_out: float) -> str:
    """Choose the split of a document by a hash of its text. Val and test each get the fraction
    `held_out` of all documents."""
    x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64
    return 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'


def split_by_position(text: str, begins: bool, position: int,
                      ends: dict[str, int]) -> Iterator[Part]:
    """Cut a text, which begins at byte `position`, at the first end of a word after each split's
    end, or at that byte if no word ends after it. What comes after the last split is left out."""
    for split, end in ends.items():
        before = text.encode()[:max(0, end - position)].decode(errors='ignore')
        word_end = WORD_END.search(text, len(before)) if before else None
        cut = word_end.end() if word_end else len(before)
        if cut:
            yield Part(split, text[:cut], begins)
            position += len(text[:cut].encode())
            text, begins = text[cut:], False


def find_ends(o: PrepareConfig, source: Source) -> dict[str, int] | None:
    """Return the byte at which train, val and test each end, for a text of few documents. None for
    other texts, which are split by hash."""
    if o.input == 'builtin':
        return None
    files = [file for file, split in source.files.items() if split not in ('val', 'test')]
    documents = (chunks for file in files for chunks in read_documents(source.path(file), o.column))
    enough = round(TOKEN_BYTES * o.tokens / (1 - 2 * o.held_out))
    total = 0  # bytes
    for n, chunks in enumerate(documents, 1):
        for chunk in chunks:
            total = min(enough, total + len(chunk.encode()))
            if total == enough:  # the rest of a large file is not read
                break
        if total == enough:  # few documents hold all the tokens that are wanted
            break
        if n == MANY:
            return None
    splits = [split for split in SPLITS
              if split == 'train' or split not in source.files.values()]
    size = round(o.held_out * total)
    return {split: total - (len(splits) - n) * size for n, split in enumerate(splits, 1)}


# Shards

class Writer:
    """Write the shards of a data folder: several for train, one each for val and test."""
    def __init__(self, folder: str, vocab_size: int):
        self.folder = folder
        self.dtype = np.dtype('<u2' if vocab_size <= 2 ** 16 else '<u4')
        self.splits = {split: {'tokens': 0, 'shards': []} for split in SPLITS}  # for meta.json

    def tokens(self, split: str) -> int:
        return self.splits[split]['tokens']

    def append(self, split: str, ids: np.ndarray) -> None:
        shards = self.splits[split]['shards']
        self.splits[split]['tokens'] += len(ids)
        limit = SHARD_TOKENS if split == 'train' else sys.maxsize
        while len(ids):
            if not shards or shards[-1]['tokens'] == limit:
                name = f'train_{len(shards):05d}.bin' if split == 'train' else f'{split}.bin'
                shards.append({'file': name, 'tokens': 0})
            new = ids[:limit - shards[-1]['tokens']]
            with open(os.path.join(self.folder, shards[-1]['file']), 'ab') as file:
                file.write(new.astype(self.dtype).tobytes())
            shards[-1]['tokens'] += len(new)
            ids = ids[len(new):]


# The data folder

def prepare(o: PrepareConfig) -> None:
    """Make the data folder o.out_dir unless it exists. It is written to a hidden folder beside it,
    which is renamed when it is complete. UserError, OSError."""
    if is_prepared(o):
        return
    source = find_source(o.input)
    parent, name = os.path.split(os.path.realpath(o.out_dir))
    partial_folder = os.path.join(parent, f'.{name}.partial')
    os.makedirs(parent, exist_ok=True)
    with locked(os.path.join(parent, f'.{name}.lock'), f'{o.out_dir} is being prepared'):
        if is_prepared(o):  # by the process that held the lock
            return
        try:
            shutil.rmtree(partial_folder, ignore_errors=True)  # of a process that was killed
            os.mkdir(partial_folder)
            meta = write_folder(o, source, partial_folder)
            os.replace(partial_folder, os.path.join(parent, name))
        except OSError as error:
            error.filename = error.filename or o.out_dir  # writing to a full disk names no file
            raise
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
    for split, content in meta['splits'].items():
        say(f'{split:5} {content["tokens"]:>15,} tokens')
        if 0 < content['tokens'] < TOO_FEW and split != 'train':
            say(f'WARNING: {split} has few tokens: a larger --held_out makes it longer')
    if meta['splits']['train']['tokens'] == o.tokens and o.input != SLIMPAJAMA:
        say(f'Train is full at {o.tokens:,} tokens, and the rest of {o.input} is left out: '
            'prepare_slimpajama.py --tokens=N takes more')


def is_prepared(o: PrepareConfig) -> bool:
    """Return whether o.out_dir was made with these options. UserError if it holds anything else."""
    meta = read_json(os.path.join(o.out_dir, 'meta.json'), 'choose another --out_dir')
    if meta is None and not (os.path.exists(o.out_dir) and os.listdir(o.out_dir)):
        return False
    saved = meta and meta.get('config')
    if not isinstance(saved, dict):
        fail(f'{o.out_dir} holds other files: choose another --out_dir')
    different = [f'{name}={saved.get(name)}, not {value}'
                 for name, value in o.content_options().items() if saved.get(name) != value]
    if different:
        fail(f'{o.out_dir} was made with {"; ".join(different)}: choose another --out_dir')
    say(f'{o.out_dir} is prepared already; delete it to prepare it anew')
    return True


def write_folder(o: PrepareConfig, source: Source, folder: str) -> dict[str, Any]:
    """Write tokenizer, shards and meta.json to an empty folder. Return the content of meta.json."""
    groups = {split: [file for file, file_split in source.files.items() if file_split == split]
              for split in SPLITS}
    for what, files in (groups | {'ignored, of other kinds': source.ignored}).items():
        if files:
            more = f' and {len(files) - 3:,} more' if len(files) > 3 else ''
            say(f'{what}: {", ".join(files[:3])}{more}')
    source = source._replace(ends=find_ends(o, source))
    tokenizer = find_tokenizer(o, source, folder)
    writer = Writer(folder, tokenizer.vocab_size)
    tokenize(o, source, tokenizer, writer)
    empty = [split for split in SPLITS if not writer.tokens(split)]
    if 'train' in empty or (empty and o.held_out):
        fail(f'{o.input} holds too little text for {" and ".join(empty)}: give more, or '
             'prepare_slimpajama.py --held_out with a larger fraction')
    meta = {
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': writer.splits, 'config': o.content_options(), 'source': source.name,
        'files': list(source.files)}
    write_atomic(os.path.join(folder, 'meta.json'), json.dumps(meta, indent=1).encode())
    return meta


def find_tokenizer(o: PrepareConfig, source: Source, folder: str) -> Any:
    """Load or train the tokenizer that the options name. A SentencePiece model is put into the
    folder: Llama's, the user's, or the trained one."""
    model = os.path.join(folder, MODEL_FILE)
    if o.model_file:
        shutil.copyfile(o.model_file, model)
    elif o.tokenizer == 'llama':
        with hub() as hf:
            downloaded = hf.HfApi().hf_hub_download(*LLAMA)
        shutil.copyfile(downloaded, model)
    elif o.tokenizer.startswith('bpe'):
        train_bpe(model, int(o.tokenizer.removeprefix('bpe')), sample_train(o, source))
    tokenizer = make_tokenizer(o.tokenizer, model)
    if o.model_file and tokenizer.model.bos_id() < 0:
        piece = tokenizer.model.id_to_piece(tokenizer.bos)
        say(f'{o.model_file} has no BOS: {piece} begins each document')
    return tokenizer


def sample_train(o: PrepareConfig, source: Source) -> list[str]:
    """Read about BPE_TEXT bytes of the train split, evenly spaced through it."""
    def train_texts() -> Iterator[str]:
        size = 0  # bytes
        for part in read_parts(o, source, lambda split: split != 'train'):
            if part.split == 'train':
                yield part.text
                size += len(part.text.encode())
                if size > 4 * o.tokens:  # enough: a token has some four bytes
                    return
    say(f'Reading {o.input} for the tokenizer')
    total = sum(len(text.encode()) for text in train_texts())
    stride = max(1, math.ceil(total / BPE_TEXT))
    say(f'Training the tokenizer {o.tokenizer} on {total / stride / 1e6:.2f} of {total / 1e6:.2f} '
        'MB of text')
    return list(islice(train_texts(), 0, None, stride))


def tokenize(o: PrepareConfig, source: Source, tokenizer: Any, writer: Writer) -> None:
    """Write the tokens of all documents, until the splits are full."""
    limit = dict.fromkeys(SPLITS, sys.maxsize) | {'train': o.tokens}
    for split in ('val', 'test'):  # a split by hash needs no limit: it grows with train
        if source.ends or split in source.files.values():
            limit[split] = round(o.tokens * o.held_out)

    def room(split: str) -> int:
        return limit[split] - writer.tokens(split)

    parts = read_parts(o, source, lambda split: room(split) <= 0)
    bos = np.array([tokenizer.bos], np.int32)
    with tqdm(unit=' tokens', unit_scale=True, mininterval=1, leave=False, disable=None) as bar:
        for batch in batches(parts, room):
            ids: dict[str, list[np.ndarray]] = {part.split: [] for part in batch}
            encoded = tokenizer.encode_parts(batch, o.workers)
            for part, part_ids in zip(batch, encoded, strict=True):
                ids[part.split] += [bos, part_ids] if part.begins else [part_ids]
            for split, arrays in ids.items():
                new = np.concatenate(arrays)[:room(split)]
                writer.append(split, new)
                bar.update(len(new))
            if room('train') <= 0 and not source.ends:  # with ends, val and test come after train
                return


def batches(parts: Iterable[Part], room: Callable[[str], int]) -> Iterator[list[Part]]:
    """Group parts for encode_parts, without those of full splits. A batch ends at BATCH characters,
    or earlier, as soon as it may fill the split of its last part."""
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
        say(f"Preparing {folder} from the source of this Python's library")
        prepare(PrepareConfig(input='builtin'))
    return folder


def prepare_text(path: str, tokenizer: str | None) -> str:
    """Prepare a user's file or folder of text, and return the data folder. Its name contains a hash
    of path, text and tokenizer, so that a changed text is prepared anew."""
    source = find_source(os.path.abspath(path))
    size = sum(os.path.getsize(source.path(file)) for file in source.files)
    tokenizer = tokenizer or next(name for limit, name in TEXT_TOKENIZERS.items() if size < limit)
    held_out = 0.05 if size < 20e6 else 0.005
    # A user's folder may be called builtin: with ./ it does not name the built-in text.
    o = PrepareConfig(input=os.path.join('.', path), tokenizer=tokenizer, held_out=held_out)

    digest = hashlib.sha256(os.fsencode(f'{source.name} {o.tokenizer}'))
    if size > 1e9:
        say(f'Reading {path}, {size / 1e9:,.0f} GB, to see whether it has changed')
    for file in source.files:
        digest.update(os.fsencode(file))
        with open(source.path(file), 'rb') as opened:
            digest.update(hashlib.file_digest(opened, 'sha256').digest())
    o.out_dir += f'-{digest.hexdigest()[:8]}'
    if not os.path.exists(os.path.join(o.out_dir, 'meta.json')):
        tokens = 'one token a byte' if o.tokenizer == 'byte' else f'tokenizer {o.tokenizer}'
        say(f'Preparing {path}, {size / 1e6:,.2f} MB, in {o.out_dir}: {tokens}')
        prepare(o)
    return o.out_dir


@command_line
def main(argv: list[str]) -> None:
    prepare(PrepareConfig(**read_options(argv, PrepareConfig)))


if __name__ == '__main__':
    main(sys.argv[1:])

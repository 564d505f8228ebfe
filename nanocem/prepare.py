"""Make data folders: divide documents among splits, tokenize them, and write shards of tokens."""
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from configurator import PathStr, check, in_range, set_if_none
from nanocem import tokenizers
from nanocem.data import FORMAT
from nanocem.documents import BLOCK, HUB, ROWS, Source, find_source, read_blocks, read_documents
from nanocem.files import read_json, short_name

SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # Llama 1 and 2 have the same
# The default tokenizer of train.py --text, for texts below each size in bytes
TEXT_TOKENIZERS = {1e6: 'byte', 5e6: 'bpe1024', 20e6: 'bpe2048', 1e9: 'bpe4096',
                   math.inf: 'bpe32000'}
SPLITS = ('train', 'val', 'test')
SHARD_TOKENS = 100_000_000  # tokens per file of the train split
BPE_TEXT = 32_000_000  # A tokenizer is trained on about this many bytes.
MANY = 2000  # Of fewer rows a hash may leave val or test too few.
FEW = 4096  # The perplexity of fewer tokens says little.
BATCH = 64  # Threads tokenize this many documents, or blocks of text files, at a time.


@dataclass
class PrepareConfig:
    """Choose the text, the tokenizer and the splits."""
    input: PathStr = SLIMPAJAMA  # path, builtin, hf://datasets/OWNER/NAME[@REVISION][/FOLDER]
    out_dir: PathStr | None = None  # data folder to make; default: data/ and the name of the input
    tokens: int = 3_300_000_000  # training tokens at most; the default is enough for 162m
    tokenizer: PathStr | None = None  # default llama, of builtin byte; or gpt2, bpe2048, FILE.model
    held_out: float | None = None  # share of val and of test; 0.005, builtin 0.05
    column: str = 'text'  # column of .parquet files and field of .jsonl lines that hold the text

    def __post_init__(self) -> None:
        in_range(self, 1, 10**15, 'tokens')
        in_range(self, 0, 0.49, 'held_out')  # train gets what val and test leave
        if self.input == 'builtin':
            set_if_none(self, tokenizer='byte', held_out=0.05)
        elif not self.input.startswith(HUB):
            self.input = os.path.abspath(self.input)
        name = short_name(os.path.basename(self.input.rstrip('/')).partition('.')[0])
        name = 'slimpajama' if self.input == SLIMPAJAMA else name
        set_if_none(self, tokenizer='llama', held_out=0.005, out_dir=f'data/{name}')

    def content_options(self) -> dict[str, Any]:
        """Return the options that decide the content of the data folder."""
        return {name: value for name, value in vars(self).items() if name != 'out_dir'}


# Splits

def read_parts(o: PrepareConfig, source: Source) -> Iterator[tuple[str, str, bool]]:
    """Yield (split, text, whether it begins a document) for each document, or each block of a text
    file. A file that is named after val or test belongs to that split. The other files are divided
    among train and the splits without a file: rows by their hash, or few of them by position, and a
    text file by position."""
    divided = divided_splits(source)
    few = few_rows(o, source)  # their number; 0 if there are many
    n_rows = 0
    for file, named_after in source.files.items():
        splits = [named_after] if named_after in ('val', 'test') else divided
        path = source.path(file)
        if has_rows(o, file):
            for text in read_documents(path, o.column):
                split = split_by_hash(text, o.held_out)
                if few and splits is divided:
                    split = split_by_row(n_rows, few, splits, o.held_out)
                    n_rows += 1
                yield (split if split in splits else splits[0]), text, True
        else:
            for split, begin, end in split_by_position(path, splits, o.held_out):
                for n, text in enumerate(read_blocks(path, begin, end)):
                    yield split, text, n == 0


def has_rows(o: PrepareConfig, file: str) -> bool:
    """Return whether a file holds documents, each to be given to a split as a whole."""
    return o.input == 'builtin' or file.lower().endswith(ROWS)


def divided_splits(source: Source) -> list[str]:
    """Return the splits among which files are divided: train, and those without a file."""
    named = source.files.values()
    return [split for split in SPLITS if split == 'train' or split not in named]


def few_rows(o: PrepareConfig, source: Source) -> int:
    """Return the number of rows to divide if they are so few that by their hash val or test would
    get less than half its share of them; else 0."""
    if o.held_out == 0:
        return 0
    rows = dict.fromkeys(divided_splits(source), 0)
    for file in (file for file, named in source.files.items() if named not in ('val', 'test')):
        for text in read_documents(source.path(file), o.column) if has_rows(o, file) else ():
            split = split_by_hash(text, o.held_out)
            rows[split if split in rows else 'train'] += 1
            if sum(rows.values()) == MANY:
                return 0
    n_rows = sum(rows.values())
    return n_rows if min(rows.values()) < o.held_out * n_rows / 2 else 0


def split_by_row(n: int, n_rows: int, splits: list[str], held_out: float) -> str:
    """Choose the split of the n-th row (from 0) of few. The last rows are the last split's."""
    each = max(1, round(held_out * n_rows))  # rows of val, and of test
    from_end = (n_rows - 1 - n) // each
    return [*reversed(splits[1:]), splits[0]][min(from_end, len(splits) - 1)]


def split_by_hash(text: str, held_out: float) -> str:
    """Choose the split of a document by a hash of its text. Val and test each get the fraction
    `held_out` of all documents."""
    x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64  # 0 to 1
    if x < held_out:
        return 'test'
    return 'val' if x < 2 * held_out else 'train'


def split_by_position(path: str, splits: list[str],
                      held_out: float) -> Iterator[tuple[str, int, int]]:
    """Cut a text file into parts for these splits, in this order. Yield (split, first byte, end)
    from the last part to the first. Each but the first is the fraction `held_out` of the file."""
    end = size = os.path.getsize(path)
    with open(path, 'rb') as file:
        for n, split in enumerate(reversed(splits[1:]), 1):
            begin = file.seek(size - n * round(held_out * size))
            # Begin at the next space or line end, or else with the next UTF-8 character
            text = file.read(BLOCK)
            match = re.search(rb'[ \n]', text) or re.search(rb'[^\x80-\xbf]|\Z', text)
            begin += match.start()
            yield split, begin, end
            end = begin
    yield splits[0], 0, end


# Tokens and shards

def find_tokenizer(o: PrepareConfig, source: Source, folder: str) -> Any:
    """Load or train the tokenizer that the options name. If it is a SentencePiece model, its file
    is written to the folder. Raises UserError."""
    model = os.path.join(folder, tokenizers.MODEL_FILE)
    if o.tokenizer in tokenizers.WITHOUT_FILE:
        return tokenizers.WITHOUT_FILE[o.tokenizer]()
    if match := re.fullmatch(r'bpe(\d+)', o.tokenizer):
        tokenizers.train_bpe(model, int(match[1]), sample_train(o, source))
        return tokenizers.SentencePieceTokenizer(model)
    path = o.tokenizer
    if path == 'llama':
        from huggingface_hub import hf_hub_download
        path = hf_hub_download(*LLAMA)
    check(os.path.isfile(path),
          f'tokenizer={path}: no such file, and none of llama, gpt2, byte, bpe2048')
    shutil.copyfile(path, model)
    return tokenizers.SentencePieceTokenizer(path)


def sample_train(o: PrepareConfig, source: Source) -> list[str]:
    """Return every n-th text of the train split, about BPE_TEXT bytes in all. The split is read
    twice: once for its size."""
    def train_texts() -> Iterator[str]:
        return (text for split, text, _ in read_parts(o, source) if split == 'train')

    print(f'Reading {o.input} for the tokenizer {o.tokenizer}', flush=True)
    count = size = 0
    for text in train_texts():
        count += 1
        size += len(text.encode())
        if size > 4 * o.tokens:  # A token has some four bytes: train will be full.
            break
    n = max(1, math.ceil(size / BPE_TEXT))
    return list(islice(train_texts(), 0, count, n))


class Writer:
    """Append tokens to the shards of a data folder: of train several, of val and test one."""
    def __init__(self, folder: str, vocab_size: int):
        self.folder = folder
        self.dtype = np.dtype('<u2' if vocab_size <= 2 ** 16 else '<u4')
        self.splits = {split: {'tokens': 0, 'shards': []} for split in SPLITS}  # for meta.json

    def append(self, split: str, ids: list[int]) -> None:
        shards = self.splits[split]['shards']
        self.splits[split]['tokens'] += len(ids)
        limit = SHARD_TOKENS if split == 'train' else sys.maxsize
        while ids:
            if not shards or shards[-1]['tokens'] == limit:
                name = f'train_{len(shards):05d}.bin' if split == 'train' else f'{split}.bin'
                shards.append({'file': name, 'tokens': 0})
            space = limit - shards[-1]['tokens']
            with open(os.path.join(self.folder, shards[-1]['file']), 'ab') as file:
                file.write(np.array(ids[:space], self.dtype).tobytes())
            shards[-1]['tokens'] += len(ids[:space])
            ids = ids[space:]


def tokenize(o: PrepareConfig, source: Source, tokenizer: Any, writer: Writer) -> bool:
    """Write the tokens of all documents, until the train split is full. Return whether decoding
    gives the text back: the first text of each batch is decoded."""
    parts = read_parts(o, source)
    train = writer.splits['train']
    lossless = True
    with ThreadPoolExecutor() as pool, tqdm(unit=' tokens', unit_scale=True, disable=None) as bar:
        while train['tokens'] < o.tokens and (batch := list(islice(parts, BATCH))):
            splits, texts, begins = zip(*batch, strict=True)
            encoded = list(pool.map(tokenizer.encode, texts, begins))
            lossless &= tokenizers.keeps_text(tokenizer, encoded[0], texts[0])
            for split, ids, begins_document in zip(splits, encoded, begins, strict=True):
                if begins_document:
                    ids = [tokenizer.bos, *ids]
                limit = o.tokens - train['tokens'] if split == 'train' else None
                writer.append(split, ids[:limit])
                bar.update(len(ids))
    return lossless


# The data folder

def prepare(o: PrepareConfig) -> None:
    """Make the data folder o.out_dir unless it exists. It is written to a hidden folder beside it,
    which is renamed when it is complete. Raises UserError, OSError."""
    folder = Path(o.out_dir).resolve()
    partial = folder.with_name(f'.{folder.name}.partial')
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f'.{folder.name}.lock')):
        if folder.exists() and any(folder.iterdir()):
            meta = read_json(f'{folder}/meta.json') or {}
            check(meta.get('config') == o.content_options(), f'{o.out_dir} holds other files, or '
                  'data made with other options: choose another --out_dir')
            print(f'{o.out_dir} is prepared already; delete it to prepare it anew', flush=True)
            return
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        try:
            write_folder(o, str(partial))
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def write_folder(o: PrepareConfig, folder: str) -> None:
    """Write tokenizer, shards and meta.json to an empty folder. Raises UserError, OSError."""
    source = find_source(o.input)
    for split in SPLITS:
        if files := [file for file, named in source.files.items() if named == split]:
            print(f'{split}: {len(files)} of {len(source.files)} files, first {files[0]}',
                  flush=True)

    tokenizer = find_tokenizer(o, source, folder)
    writer = Writer(folder, tokenizer.vocab_size)
    lossless = tokenize(o, source, tokenizer, writer)
    for split in SPLITS:
        size = writer.splits[split]['tokens']
        may_be_empty = split != 'train' and o.held_out == 0
        check(size > 0 or may_be_empty, f'{o.input} holds too little text for {split}: expected '
              'a longer text, or three rows or more; prepare_slimpajama.py has --held_out')
        print(f'{split:5} {size:>15,} tokens', flush=True)
        if split != 'train' and 0 < size < FEW:
            print(f'{split} has few tokens: a perplexity of so few says little', flush=True)
    if writer.splits['train']['tokens'] == o.tokens:
        print(f'Train is full at {o.tokens:,} tokens: --tokens=N takes more of it', flush=True)

    meta = {
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': writer.splits, 'config': o.content_options(),
        'source': source.root if o.input.startswith(HUB) else o.input, 'files': list(source.files)}
    if not lossless:
        meta['lossless'] = False
        print('The tokenizer loses some of this text: there will be no bits per byte', flush=True)
    Path(folder, 'meta.json').write_text(json.dumps(meta, indent=1), encoding='utf-8')


# The data folder of a run

def find_data(folder: str, text: str | None = None, tokenizer: str | None = None,
              checkpoint: dict[str, Any] | None = None) -> str:
    """Return the data folder: `folder`, or that of a user's `text`. That of a text, and
    data/builtin, are made on first use. The default tokenizer of a text is that of `checkpoint`,
    from which training goes on, or else chosen by size. Raises UserError, OSError."""
    if not text:
        if Path(folder) == Path('data/builtin') and not os.path.exists(f'{folder}/meta.json'):
            print(f"Preparing {folder} from the source of this Python's library", flush=True)
            prepare(PrepareConfig(input='builtin'))
        return folder

    if checkpoint and not tokenizer:
        saved = tokenizers.tokenizer_of(checkpoint)
        tokenizer = saved.path or saved.name
    path = os.path.abspath(text)
    source = find_source(path)
    files = [source.path(file) for file in source.files]
    size = sum(map(os.path.getsize, files))
    default = next(name for limit, name in TEXT_TOKENIZERS.items() if size < limit)
    held_out = 0.05 if size < 20e6 else 0.005
    o = PrepareConfig(path, tokenizer=tokenizer or default, held_out=held_out)

    # A text that changes, or another tokenizer, gives the folder another name
    states = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns)
              for file in [*files, tokenizer] if file and os.path.exists(file)]
    o.out_dir += '-' + hashlib.sha256(repr((tokenizer, states)).encode()).hexdigest()[:8]
    if os.path.exists(f'{o.out_dir}/meta.json'):
        return o.out_dir
    print(f'Preparing {text}, {size / 1e6:,.2f} MB, in {o.out_dir}: tokenizer {o.tokenizer}',
          flush=True)
    try:
        prepare(o)
    except tokenizers.UnsuitedVocabulary as error:
        if tokenizer:
            raise
        print(f'The default {error}; it gets one token a byte', flush=True)
        prepare(replace(o, tokenizer='byte'))
    return o.out_dir

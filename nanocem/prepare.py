"""Make data folders: divide documents among splits, tokenize them, and write shards of tokens."""
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from configurator import PathStr, in_range, set_if_none
from nanocem import tokenizers
from nanocem.data import FORMAT, checksums
from nanocem.documents import (
    BLOCK,
    HUB,
    Source,
    check_separator,
    count_suffixes,
    find_source,
    has_rows,
    keep_piped,
    read_blocks,
    read_documents,
)
from nanocem.errors import UserError, check, fail
from nanocem.files import fill_folder, finish_folder, other_files, read_json, write_atomic
from nanocem.report import short_name

SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # Llama 1 and 2 have the same
# The default tokenizer of train.py --text, for texts below each size in bytes
TEXT_TOKENIZERS = {1e6: 'byte', 5e6: 'bpe1024', 20e6: 'bpe2048', 1e9: 'bpe4096',
                   math.inf: 'bpe32000'}
SPLITS = ('train', 'val', 'test')
SHARD_TOKENS = 100_000_000  # tokens per file of the train split
BPE_TEXT = 32_000_000  # A tokenizer is trained on about this many bytes.
WHOLE = 20  # Of so many documents each goes to a split whole, text files, too.
MANY = 2000  # Of fewer documents a hash may leave val or test too few.
SHORT = 4096  # bytes; parts of text files are longer
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
    separator: str | None = None  # of documents in .txt files, such as <|endoftext|>; none

    def __post_init__(self) -> None:
        in_range(self, 1, 10**15, 'tokens')
        in_range(self, 0, 0.49, 'held_out')  # train gets what val and test leave
        if self.input == 'builtin':
            set_if_none(self, tokenizer='byte', held_out=0.05)
        elif not self.input.startswith(HUB):
            self.input = os.path.abspath(self.input)
        name = os.path.basename(self.input.rstrip('/')).partition('.')[0]
        name = os.fsencode(name).decode('utf-8', 'replace')  # of a file from another system
        name = short_name(name)
        name = 'slimpajama' if self.input == SLIMPAJAMA else name
        set_if_none(self, tokenizer='llama', held_out=0.005, out_dir=f'data/{name}')

    def content_options(self) -> dict[str, Any]:
        """Return the options that decide the content of the data folder."""
        return {name: value for name, value in vars(self).items()
                if name != 'out_dir' and value is not None}


# Splits: one rule for all input, retold in docs/data.md

class Rule(NamedTuple):
    """How the files that are named after neither val nor test are divided."""
    splits: list[str]  # train, and the splits that no file is named after
    cut: list[list[str]]  # text files that are cut by position; those of a list as one text
    few: int  # the number of documents, if their hash would give val or test too few; else 0


def find_rule(o: PrepareConfig, source: Source) -> Rule:
    """Choose how to divide the files: whole documents by hash or, if they are few, the last ones.
    Fewer than WHOLE documents leave text files to be cut by position."""
    named = source.files.values()
    splits = [split for split in SPLITS
              if split == 'train' or (split not in named and o.held_out > 0)]
    if len(splits) == 1:
        return Rule(splits, [], 0)
    files = [file for file, split in source.files.items() if split not in ('val', 'test')]
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for file in files:
        kinds[is_rows(o, source, file)].append(file)
    rows, texts = kinds[True], kinds[False]
    cut: list[list[str]] = []
    if 0 < len(texts) < WHOLE:
        n_rows = sum(1 for _ in itertools.islice(hashed_documents(o, source, rows), WHOLE))
        if len(texts) + n_rows < WHOLE:
            sizes = [os.path.getsize(source.path(file)) for file in texts]
            cut = [texts] if o.held_out * min(sizes) < SHORT else [[file] for file in texts]
            files = rows
    # Count what a hash would give to each split
    counts = dict.fromkeys(splits, 0)
    for split, _ in itertools.islice(hashed_documents(o, source, files), MANY):
        counts[split if split in splits else 'train'] += 1
    n = sum(counts.values())
    is_few = n < MANY and min(counts.values()) < o.held_out * n / 2
    return Rule(splits, cut, n if is_few else 0)


def read_parts(o: PrepareConfig, source: Source,
               rule: Rule | None = None) -> Iterator[tuple[str, str, bool]]:
    """Yield (split, text, whether it begins a document) for each document, or each block of a text
    file. A file that is named after val or test belongs to that split, and the others follow the
    rule."""
    rule = rule or find_rule(o, source)
    splits, cut, few = rule
    number = 0
    for file in [file for file in source.files if not any(file in texts for texts in cut)]:
        named = source.files[file]
        for hashed, blocks in hashed_documents(o, source, [file]):
            split = hashed if hashed in splits else 'train'
            if named in ('val', 'test'):
                split = named
            elif few:
                split = split_by_number(number, few, splits, o.held_out)
                number += 1
            for n, text in enumerate(blocks):
                yield split, text, n == 0
    for texts in cut:
        paths = [source.path(file) for file in texts]
        for split, path, begin, end in split_by_position(paths, splits, o.held_out):
            for n, text in enumerate(read_blocks(path, begin, end)):
                yield split, text, n == 0


def describe_rule(source: Source, rule: Rule) -> str:
    """Return in words by what the files are divided."""
    names, held_out = any(source.files.values()), rule.splits[1:]
    if not held_out:
        return 'the names of files' if names else 'nothing, since held_out is 0'
    if rule.cut:
        how = 'position: the end of the text is held out'
    elif rule.few:
        how = f'position: the last of {rule.few} documents are held out'
    else:
        how = 'a hash of each document'
    return f'the names of files, and {" and ".join(held_out)} by {how}' if names else how


def is_rows(o: PrepareConfig, source: Source, file: str) -> bool:
    """Return whether a file is read as documents and not in blocks of text."""
    path = os.path.join(source.root, file)  # one on the Hub need not be there: its suffix says it
    return o.input == 'builtin' or has_rows(path, o.separator)


def hashed_documents(o: PrepareConfig, source: Source,
                     files: list[str]) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the split by hash, and the text in blocks, of each document of these files."""
    for file in files:
        path = source.path(file)
        if is_rows(o, source, file):
            for text in read_documents(path, o.column, o.separator):
                yield split_by_hash(text, o.held_out), [text]
        elif os.path.getsize(path) > 0:
            with open(path, 'rb') as stream:
                digest = hashlib.file_digest(stream, 'sha256').digest()
            yield split_of_digest(digest, o.held_out), read_blocks(path)


def split_by_number(n: int, n_documents: int, splits: list[str], held_out: float) -> str:
    """Choose the split of the n-th document (from 0) of few. The last are the last split's."""
    each = max(1, round(held_out * n_documents))  # documents of val, and of test
    from_end = (n_documents - 1 - n) // each
    return [*reversed(splits[1:]), splits[0]][min(from_end, len(splits) - 1)]


def split_by_hash(text: str, held_out: float) -> str:
    """Choose the split of a document by a hash of its text. Val and test each get the fraction
    `held_out` of all documents."""
    return split_of_digest(hashlib.sha256(text.encode()).digest(), held_out)


def split_of_digest(digest: bytes, held_out: float) -> str:
    x = int.from_bytes(digest[:8], 'big') / 2 ** 64  # 0 to 1
    if x < held_out:
        return 'test'
    return 'val' if x < 2 * held_out else 'train'


def split_by_position(paths: list[str], splits: list[str],
                      held_out: float) -> Iterator[tuple[str, str, int, int]]:
    """Cut text files, end to end, into parts for these splits, in this order. Yield (split, path,
    first byte, end) from the last part to the first. Each but the first is the fraction `held_out`
    of the text."""
    first = [0, *itertools.accumulate(map(os.path.getsize, paths))]  # byte of each file, and end
    end = size = first[-1]
    for n, split in enumerate([*reversed(splits[1:]), splits[0]], 1):
        begin = size - n * round(held_out * size) if split != splits[0] else 0
        if 0 < begin < size:
            # Begin at the next space or line end, or else with the next UTF-8 character
            file = bisect_right(first, begin) - 1
            with open(paths[file], 'rb') as stream:
                stream.seek(begin - first[file])
                text = stream.read(BLOCK)
            match = re.search(rb'[ \n]', text) or re.search(rb'[^\x80-\xbf]|\Z', text)
            begin += match.start()
        for path, start, stop in zip(paths, first, first[1:], strict=False):
            if max(begin, start) < min(end, stop):
                yield split, path, max(begin, start) - start, min(end, stop) - start
        end = begin


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
        self.splits = {split: {'tokens': 0, 'documents': 0, 'shards': []} for split in SPLITS}

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


def tokenize(o: PrepareConfig, source: Source, rule: Rule, tokenizer: Any, writer: Writer) -> bool:
    """Write the tokens of all documents, until the train split is full. Return whether decoding
    gives the text back: the first text of each batch is decoded. UserError with the place of a text
    that the tokenizer refuses."""
    def encode(text: str, begins: bool) -> list[int]:
        try:
            return tokenizer.encode(text, begins)
        except UserError as error:
            fail(f'{find_place(o, source, text)}: {error}')

    parts = read_parts(o, source, rule)
    train = writer.splits['train']
    lossless = True
    with ThreadPoolExecutor() as pool, tqdm(unit=' tokens', unit_scale=True, disable=None) as bar:
        while train['tokens'] < o.tokens and (batch := list(islice(parts, BATCH))):
            splits, texts, begins = zip(*batch, strict=True)
            encoded = list(pool.map(encode, texts, begins))
            lossless &= tokenizers.keeps_text(tokenizer, encoded[0], texts[0])
            for split, ids, begins_document in zip(splits, encoded, begins, strict=True):
                limit = o.tokens - train['tokens'] if split == 'train' else None
                if begins_document:
                    ids = [tokenizer.bos, *ids]
                    writer.splits[split]['documents'] += limit != 0
                writer.append(split, ids[:limit])
                bar.update(len(ids))
    return lossless


def find_place(o: PrepareConfig, source: Source, text: str) -> str:
    """Return the path of the file that holds this text, and the number of its document, in words,
    for an error. It reads everything before it again."""
    for file in source.files:
        for n, (_, blocks) in enumerate(hashed_documents(o, source, [file]), 1):
            if text in blocks:
                return f'{os.path.join(source.root, file)}, document {n}'
    return o.input  # part of a text that was cut


# The data folder

def prepare(o: PrepareConfig) -> None:
    """Make the data folder o.out_dir unless it exists. It is filled from inside, with meta.json
    last: without that it is no data. Raises UserError, OSError."""
    folder = Path(o.out_dir).resolve()
    if (folder / 'meta.json').exists() and is_prepared(o):  # It may be read-only.
        return
    with lock_new_folder(folder):
        finish_folder(str(folder), 'meta.json')
        if not is_prepared(o):
            with fill_folder(str(folder), 'meta.json') as partial:
                write_folder(o, str(partial))


def is_prepared(o: PrepareConfig) -> bool:
    """Return whether o.out_dir holds this data. UserError if it holds something else."""
    others = other_files(o.out_dir)
    if not others:
        return False
    meta = read_json(f'{o.out_dir}/meta.json') or {}
    check('format' in meta, f'{o.out_dir} holds other files, such as {others[0]}: choose another '
          '--out_dir')
    check(meta.get('config') == o.content_options(), f'{o.out_dir} holds data made with other '
          'options: choose another --out_dir')
    print(f'{o.out_dir} is prepared already; delete it to prepare it anew', flush=True)
    return True


@contextlib.contextmanager
def lock_new_folder(folder: Path) -> Iterator[None]:
    """Make a folder if it is missing, and lock it by a file inside: its parent may be another
    user's. A second process waits for the first. A folder that was made here and stays empty is
    removed."""
    made = not folder.exists()
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / '.lock')
        with lock:
            if not (folder / '.lock').exists():  # Another process has removed the folder.
                continue
            try:
                yield
            finally:
                if made and os.listdir(folder) == ['.lock']:
                    (folder / '.lock').unlink()
                    folder.rmdir()
            return


def write_folder(o: PrepareConfig, folder: str) -> None:
    """Write tokenizer, shards and meta.json to an empty folder. Raises UserError, OSError."""
    source = find_source(o.input, o.column)
    if any(source.files.values()):
        for split in (*SPLITS, None):
            if files := [file for file, named in source.files.items() if named == split]:
                name = split or 'train, by none of these names'
                print(f'{name}: {len(files)} of {len(source.files)} files, first {files[0]}',
                      flush=True)
        check(not {*source.files.values()} <= {'val', 'test'}, f'{o.input} has files that are '
              'named after val and test, and none for train: add one, or name them otherwise')

    if o.separator:
        check_separator(source, o.input, o.separator)
    rule = find_rule(o, source)
    tokenizer = find_tokenizer(o, source, folder)
    writer = Writer(folder, tokenizer.vocab_size)
    lossless = tokenize(o, source, rule, tokenizer, writer)
    # Say which rule was taken, what each split has, and what was not read
    counts = [f'{writer.splits[split]["documents"]:,} {split}' for split in SPLITS]
    left_out = count_suffixes(source.left_out)
    print(f'Split by {describe_rule(source, rule)}; documents: {", ".join(counts)}'
          + (f'; files left out: {left_out}' if left_out else ''), flush=True)
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
    for shard in itertools.chain(*(split['shards'] for split in writer.splits.values())):
        shard['crc32'] = checksums(os.path.join(folder, shard['file']))

    meta = {
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': writer.splits, 'config': o.content_options(),
        'source': source.root if o.input.startswith(HUB) else o.input, 'files': list(source.files)}
    if not lossless:
        meta['lossless'] = False
        print('The tokenizer loses some of this text: there will be no bits per byte', flush=True)
    write_atomic(f'{folder}/meta.json', json.dumps(meta, indent=1).encode())


# The data folder of a run

def find_data(folder: str, text: str | None = None, tokenizer: str | None = None,
              checkpoint: dict[str, Any] | None = None, separator: str | None = None) -> str:
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
    path = os.path.abspath(keep_piped(text))
    source = find_source(path)
    files = [source.path(file) for file in source.files]
    size = sum(map(os.path.getsize, files))
    default = next(name for limit, name in TEXT_TOKENIZERS.items() if size < limit)
    held_out = 0.05 if size < 20e6 else 0.005
    o = PrepareConfig(path, tokenizer=tokenizer or default, held_out=held_out, separator=separator)

    # A text that changes, or another tokenizer, gives the folder another name
    states = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns)
              for file in [*files, tokenizer] if file and os.path.exists(file)]
    # Without a separator the name is as it always was, so that a folder is found again
    content = (tokenizer, states, separator) if separator else (tokenizer, states)
    o.out_dir += '-' + hashlib.sha256(repr(content).encode()).hexdigest()[:8]
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

"""From documents to a data folder: divide them among splits, and write shards of their tokens."""
import hashlib
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock

from configurator import PathStr, check, fail, in_range, set_if_none
from nanocem import tokenizers
from nanocem.data import FORMAT, checksums
from nanocem.documents import (
    BLOCK,
    HUB,
    Documents,
    Reading,
    Source,
    find_source,
    state_of,
    text_path,
)
from nanocem.files import (
    fill_folder,
    finish_folder,
    other_files,
    read_json,
    short_name,
    write_json,
)
from nanocem.process import progress_bar

SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # Llama 1 and 2 have the same
# The default tokenizer of train.py --text, for texts below each size in bytes
TEXT_TOKENIZERS = {1e6: 'byte', 5e6: 'bpe1024', 20e6: 'bpe2048', 1e9: 'bpe4096',
                   math.inf: 'bpe32000'}
RULE = 4  # the version of the rule by which texts are read and divided
SPLITS = ('train', 'val', 'test')
# The words that Hugging Face's datasets knows in the names of files and folders
SPLIT_WORDS = {'train': 'train', 'training': 'train',
               'val': 'val', 'valid': 'val', 'validation': 'val', 'dev': 'val',
               'test': 'test', 'testing': 'test', 'eval': 'test', 'evaluation': 'test'}
MANY = 2000  # With at least this many texts, a hash gives val and test about their share
WHOLE = 20  # With at least this many documents, each goes to one split as a whole
PLACES = 8  # If documents are few, val and test each get pieces from about this many places
SMALLEST_PIECE = 256  # characters
LONGEST_WORD = 100  # characters; a text is cut at the next space if it is no further away
BPE_TEXT = 32_000_000  # A tokenizer is trained on about this many bytes
BATCH = 64  # Threads tokenize this many documents, or blocks of text files, at a time
SHARD_TOKENS = 100_000_000  # tokens per file of the train split
FEW = 4096  # The perplexity of fewer tokens says little


@dataclass
class PrepareConfig(Reading):
    """Choose the text, the tokenizer and the splits."""
    input: PathStr = SLIMPAJAMA  # path, or hf://datasets/OWNER/NAME[@REVISION][/FOLDER]
    out_dir: PathStr | None = None  # data folder to make; default: data/ and the name of the input
    tokens: int = 3_300_000_000  # training tokens at most; the default is enough for 162m
    tokenizer: PathStr = 'llama'  # llama, byte, gpt2, bpe2048 or FILE.model
    held_out: float = 0.005  # share of val and of test

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, 1, 10**15, 'tokens')
        in_range(self, 0, 0.49, 'held_out')  # train gets what val and test leave
        if not self.input.startswith(HUB):
            self.input = os.path.abspath(self.input)
        # Name the folder after the input, without its suffix and the dots of a hidden one
        name = os.path.basename(self.input.rstrip('/')).lstrip('.').partition('.')[0] or 'text'
        name = 'slimpajama' if self.input == SLIMPAJAMA else short_name(name)
        set_if_none(self, out_dir=f'data/{name}')

    def content_options(self) -> dict[str, Any]:
        """Return the options that decide the content of the data folder."""
        return {name: [*value] if isinstance(value, tuple) else value
                for name, value in vars(self).items() if name != 'out_dir' and value is not None}


# The data folder

def find_data(text: str, tokenizer: str | None = None, checkpoint: dict[str, Any] | None = None,
              reading: Reading | None = None) -> str:
    """Return the data folder of a user's text, which is made on first use. The default tokenizer is
    that of `checkpoint`, from which training goes on, or else chosen by size. Raises UserError,
    OSError."""
    if checkpoint and not tokenizer:
        saved = tokenizers.tokenizer_of(checkpoint)
        tokenizer = saved.path or saved.name
    reading = reading or Reading()
    path = text_path(text)
    source = find_source(path, reading)
    size = source.size()
    default = next(name for limit, name in TEXT_TOKENIZERS.items() if size < limit)
    o = PrepareConfig(input=path, tokenizer=tokenizer or default,
                      held_out=0.05 if size < 20e6 else 0.005, **reading.options())

    # A text that changes, another tokenizer or another reading gives the folder another name
    states = [(source.path(name), *state) for name, state in source.files.items()]
    if tokenizer and os.path.exists(tokenizer):
        states.append((tokenizer, *state_of(tokenizer)))
    content = (RULE, tokenizer, states, reading.options())
    o.out_dir += '-' + hashlib.sha256(repr(content).encode()).hexdigest()[:8]
    if not os.path.exists(f'{o.out_dir}/meta.json'):
        print(f'Preparing {text}, {size / 1e6:,.2f} MB, in {o.out_dir}: tokenizer {o.tokenizer}',
              flush=True)
        prepare(o, source)
    return o.out_dir


def prepare(o: PrepareConfig, source: Source | None = None) -> None:
    """Make the data folder o.out_dir unless it exists, from the files of o.input, which may have
    been found already. meta.json is moved into it last: a folder without that does not count as
    data. A second process waits for the first. Raises UserError, OSError."""
    folder = Path(o.out_dir).resolve()
    if (folder / 'meta.json').exists() and is_prepared(o):  # It may be read-only.
        return
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / '.lock'):  # inside: its parent may be another user's
            finish_folder(str(folder), 'meta.json')
            if not is_prepared(o):
                with fill_folder(str(folder), 'meta.json') as partial:
                    write_folder(o, str(partial), source or find_source(o.input, o))
    finally:
        if made and os.listdir(folder) == ['.lock']:  # nothing stays of what fails
            (folder / '.lock').unlink()
            folder.rmdir()


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


def write_folder(o: PrepareConfig, folder: str, source: Source) -> None:
    """Write tokenizer, shards and meta.json to an empty folder. Raises UserError, OSError."""
    if len(source.files) > 1 or source.left_out:
        print(source.describe(), flush=True)
    division = Division(o, source)
    tokenizer = find_tokenizer(o, folder, division)
    writer = Writer(folder, tokenizer.vocab_size)
    lossless = tokenize(o, division.parts(), tokenizer, writer)
    division.documents.check_options()
    # What has changed since it was found may have been divided in two ways
    if not source.root.startswith(HUB):
        for name, state in source.files.items():
            check(state_of(source.path(name)) == state, f'{source.path(name)} has changed while it '
                  'was read: start again when nothing writes to it, or with a copy')

    # Say what each split has
    if division.documents.without_text:
        print(division.documents.describe(), flush=True)
    counts = [f'{writer.splits[split]["documents"]:,} {split}' for split in SPLITS]
    print(f'Split by {division.describe()}; documents: {", ".join(counts)}', flush=True)
    full = writer.splits['train']['tokens'] == o.tokens
    for split in SPLITS:
        size = writer.splits[split]['tokens']
        if size == 0 and (split == 'train' or o.held_out > 0):
            fail(f'train is full at {o.tokens:,} tokens, before {split} has any: --tokens=N takes '
                 f'more of {o.input}' if full else
                 f'{o.input} holds too little text for {split}: expected a longer text, or three '
                 'rows or more; prepare_slimpajama.py has --held_out')
        print(f'{split:5} {size:>15,} tokens', flush=True)
        if split != 'train' and 0 < size < FEW:
            print(f'{split} has few tokens: a perplexity of so few says little', flush=True)
    if full:
        print(f'Train is full at {o.tokens:,} tokens: --tokens=N takes more of it', flush=True)

    for split in SPLITS:
        for shard in writer.splits[split]['shards']:
            shard['crc32'] = checksums(os.path.join(folder, shard['file']))
    meta = {
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': writer.splits, 'config': o.content_options(),
        'source': source.root if o.input.startswith(HUB) else o.input, 'files': [*source.files]}
    if not lossless:
        meta['lossless'] = False
        print('The tokenizer loses some of this text: there will be no bits per byte', flush=True)
    write_json(Path(folder, 'meta.json'), **meta)


# Splits: one rule for all input, retold in docs/data.md

class Part(NamedTuple):
    """A block of text for a split."""
    split: str
    text: str
    begins: bool  # a document, or a part of one


class Division:
    """The documents of an input, divided among the splits.

    File names decide if each of them names a split, and at least one names train. A split that no
    file is named after is held out from train's documents: a hash of each text, from 0 to 1,
    chooses its split, so that copies stay together. With fewer than WHOLE documents, or if one of
    them is most of the text, documents are cut into pieces, and each piece is hashed. With fewer
    than MANY texts, if a split would get less than half its share, val and test get the texts with
    the lowest hashes."""
    def __init__(self, o: PrepareConfig, source: Source):
        self.o = o
        self.source = source
        self.split_of_file = splits_of_names([*source.files])
        self.held_out = [split for split in ('test', 'val')
                         if o.held_out > 0 and split not in self.split_of_file.values()]
        # Upper bounds of hashes: the lowest ones go to test, the next to val
        self.bounds = {split: (n + 1) * o.held_out for n, split in enumerate(self.held_out)}
        self.piece = 0  # characters; 0: documents stay whole
        if self.held_out:
            self.decide()

    def decide(self) -> None:
        """Choose the pieces and the bounds, from the first MANY texts, or all of fewer."""
        sizes = self.sizes_by_hash()
        if len(sizes) < MANY:  # all was read
            self.documents.check_options()
        check(bool(sizes), f'{self.o.input} holds no text')
        total = sum(sizes.values())
        if len(sizes) < WHOLE or max(sizes.values()) > total / 2:
            self.piece = round(min(BLOCK, max(SMALLEST_PIECE, self.o.held_out * total / PLACES)))
            sizes = self.sizes_by_hash()
        n = len(sizes)
        counts = Counter(map(self.split_of_hash, sizes))
        fewest = min(counts[split] for split in ('train', *self.held_out))
        if 3 <= n < MANY and fewest < self.o.held_out * n / 2:
            lowest = sorted(sizes)
            each = max(1, min(round(self.o.held_out * n), (n - 1) // 2))
            self.bounds = {split: lowest[each * (k + 1)] for k, split in enumerate(self.held_out)}

    def sizes_by_hash(self) -> dict[float, int]:
        """Return the sizes in characters of the first MANY texts of train's files, or pieces, by
        their hashes. Copies count once."""
        hashed = (hash_text(blocks) for split, blocks, _ in self.texts() if split == 'train')
        return dict(islice(hashed, MANY))

    def split_of_hash(self, x: float) -> str:
        """Return the split of a text of train's files."""
        return next((split for split in self.held_out if x < self.bounds[split]), 'train')

    def texts(self) -> Iterator[tuple[str, Iterable[str], bool]]:
        """Yield all documents, or the pieces of train's: the split of the file, the text in blocks,
        and whether it begins a document. Val and test come first: reading stops when train is
        full."""
        self.documents = Documents(self.source, self.o)
        for name in sorted(self.source.files, key=lambda name: self.split_of_file[name] == 'train'):
            split = self.split_of_file[name]
            for blocks in self.documents.of(name):
                if self.piece and split == 'train':
                    for number, piece in enumerate(cut(blocks, self.piece)):
                        yield split, [piece], number == 0
                else:
                    yield split, blocks, True

    def parts(self) -> Iterator[Part]:
        """Yield the text of all documents in blocks, each with its split."""
        last = ''
        for split, blocks, begins in self.texts():
            if self.held_out and split == 'train':
                split = self.split_of_hash(hash_text(blocks)[0])
            begins = begins or split != last
            for text in blocks:
                yield Part(split, text, begins)
                begins = False
            last = split

    def describe(self) -> str:
        """Return in words what decides."""
        of_names = len({*self.split_of_file.values()}) > 1
        of_hashes = f'a hash of each {"piece of a document" if self.piece else "document"}'
        words = ['the names of files'] * of_names + [of_hashes] * bool(self.held_out)
        return ' and '.join(words) or 'nothing: everything goes to train'


def splits_of_names(files: list[str]) -> dict[str, str]:
    """Return the split of each file: that of its name, if each has one and one is train; or else
    train."""
    named = {}
    for name in files:
        words = re.split(r'[\W\d_]+', name.lower())
        named[name] = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
    found = {*named.values()}
    if None not in found and 'train' in found:
        return named
    if found != {None} and len(files) > 1:
        print('Names of splits do not count: '
              + ('not each file has one' if None in found else 'no file has that of train'),
              flush=True)
    return dict.fromkeys(files, 'train')


def hash_text(blocks: Iterable[str]) -> tuple[float, int]:
    """Return a hash of a text, from 0 to 1, and its size in characters."""
    digest = hashlib.sha256()
    size = 0
    for block in blocks:
        digest.update(block.encode())
        size += len(block)
    return int.from_bytes(digest.digest()[:8], 'big') / 2 ** 64, size


def cut(blocks: Iterable[str], size: int) -> Iterator[str]:
    """Yield the pieces of a text: so many characters each, and the rest of a word."""
    text = ''
    for block in blocks:
        text += block
        at = 0
        while len(text) - at > size + LONGEST_WORD:
            end = at + size
            space = re.compile('[ \n]').search(text, end, end + LONGEST_WORD)
            end = space.start() if space else end
            yield text[at:end]
            at = end
        text = text[at:]
    if text:
        yield text


# Tokens and shards

def find_tokenizer(o: PrepareConfig, folder: str, division: Division) -> Any:
    """Load the tokenizer that the options name, or train it on the text of train. If it is a
    SentencePiece model, its file is written to the folder. Raises UserError."""
    model = os.path.join(folder, tokenizers.MODEL_FILE)
    if re.fullmatch(r'bpe\d+', o.tokenizer):
        print(f'Reading {o.input} for the tokenizer {o.tokenizer}', flush=True)
        texts = (part.text for part in division.parts() if part.split == 'train')
        # A token has some four bytes: what train will not hold is not read
        sample = evenly_spaced_texts(texts, at_most=4 * o.tokens)
        tokenizers.train_bpe(model, int(o.tokenizer.removeprefix('bpe')), sample)
        return tokenizers.SentencePieceTokenizer(model)
    path = o.tokenizer
    try:
        if path in tokenizers.WITHOUT_FILE:
            return tokenizers.WITHOUT_FILE[path]()
        if path == 'llama':
            from huggingface_hub import hf_hub_download
            path = hf_hub_download(*LLAMA)
    except Exception as error:  # the libraries for HTTP raise many classes of their own
        fail(f'tokenizer={path} cannot be downloaded: without a network --tokenizer=bpe2048, byte '
             f'or FILE.model can be used, of which bpe2048 is trained on the text ({error})')
    check(os.path.isfile(path),
          f'tokenizer={path}: no such file, and none of llama, gpt2, byte, bpe2048')
    tokenizer = tokenizers.SentencePieceTokenizer(path)  # before the copy: an error names this path
    shutil.copyfile(path, model)
    return tokenizer


def evenly_spaced_texts(texts: Iterable[str], at_most: int) -> list[str]:
    """Return every n-th of the texts in the first `at_most` bytes. n is 1, 2, 4, ..., so that they
    have BPE_TEXT bytes at most."""
    kept: list[str] = []
    every = 1
    total = size = 0  # bytes of all texts, and of those that are kept
    for number, text in enumerate(texts):
        text_size = len(text.encode())
        total += text_size
        if number % every == 0:
            kept.append(text)
            size += text_size
        while size > BPE_TEXT and len(kept) > 1:
            kept = kept[::2]
            every *= 2
            size = sum(len(text.encode()) for text in kept)
        if total > at_most:
            break
    return kept


def tokenize(o: PrepareConfig, parts: Iterator[Part], tokenizer: Any, writer: 'Writer') -> bool:
    """Write the tokens of all documents, until the train split is full. Return whether decoding
    gives the text back: all texts of val and test are decoded, and of train one in each batch."""
    train = writer.splits['train']
    lossless = True
    with (ThreadPoolExecutor() as pool,
          progress_bar(unit=' tokens', unit_scale=True, disable=None) as bar):
        while train['tokens'] < o.tokens and (batch := list(islice(parts, BATCH))):
            encoded = list(pool.map(lambda part: tokenizer.encode(part.text, part.begins), batch))
            for n, (part, ids) in enumerate(zip(batch, encoded, strict=True)):
                if n == 0 or part.split != 'train':
                    lossless &= tokenizers.keeps_text(tokenizer, ids, part.text)
                limit = o.tokens - train['tokens'] if part.split == 'train' else None
                if part.begins:
                    ids = [tokenizer.bos, *ids]
                    writer.splits[part.split]['documents'] += limit != 0
                writer.append(part.split, ids[:limit])
                bar.update(len(ids))
    return lossless


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

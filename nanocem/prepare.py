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
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from filelock import FileLock

from configurator import PathStr, UserError, check, fail, in_range, set_if_none
from nanocem import tokenizers
from nanocem.data import FORMAT, checksums
from nanocem.documents import Reading, read_documents
from nanocem.files import (
    fill_folder,
    finish_folder,
    other_files,
    read_json,
    short_name,
    write_atomic,
)
from nanocem.process import progress_bar
from nanocem.sources import HUB, Source, check_separator, find_source, keep_piped

SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # Llama 1 and 2 have the same
# The default tokenizer of train.py --text, for texts below each size in bytes
TEXT_TOKENIZERS = {1e6: 'byte', 5e6: 'bpe1024', 20e6: 'bpe2048', 1e9: 'bpe4096',
                   math.inf: 'bpe32000'}
SPLITS = ('train', 'val', 'test')
SHARD_TOKENS = 100_000_000  # tokens per file of the train split
BPE_TEXT = 32_000_000  # A tokenizer is trained on about this many bytes.
RULE = 2  # the version of the rule by which texts are read and divided
WHOLE = 20  # Of so many documents each goes to a split whole.
MANY = 2000  # Of fewer documents a hash may leave val or test too few.
PART = 256  # characters; a document is long if each split gets so many of it
PLACES = 8  # from which a split gets parts of a long document, at most
MARGIN = 0.15  # of a long document, at its beginning and its end, nothing is held out
LONGEST_WORD = 100  # characters; a text is cut before the next word that begins within so many
SHORT = 100  # characters; documents of so few may be lines of longer ones
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
    column: str = 'text'  # column of tables, and field of JSON, that holds the text
    separator: str | None = None  # of documents in text files, such as <|endoftext|>; none
    encoding: str | None = None  # of text that is not UTF-8, such as cp1252
    suffixes: tuple[str, ...] | None = None  # of a folder's files, such as .md,.org; default: all
    splits: Literal['names', 'none'] = 'names'  # names: files may be named after val and test

    def __post_init__(self) -> None:
        in_range(self, 1, 10**15, 'tokens')
        in_range(self, 0, 0.49, 'held_out')  # train gets what val and test leave
        if self.input == 'builtin':
            set_if_none(self, tokenizer='byte', held_out=0.05)
        elif not self.input.startswith(HUB):
            self.input = os.path.abspath(self.input)
        # Name the folder after the input, without its suffix and the dots of a hidden one
        name = os.path.basename(self.input.rstrip('/')).lstrip('.').partition('.')[0] or 'text'
        name = os.fsencode(name).decode('utf-8', 'replace')  # of a file from another system
        name = short_name(name)
        name = 'slimpajama' if self.input == SLIMPAJAMA else name
        set_if_none(self, tokenizer='llama', held_out=0.005, out_dir=f'data/{name}')

    def content_options(self) -> dict[str, Any]:
        """Return the options that decide the content of the data folder."""
        options = {name: value for name, value in vars(self).items()
                   if name not in ('out_dir', 'suffixes', 'splits') and value is not None}
        # Those that an older version did not have are left out where they are the defaults
        if self.suffixes:
            options['suffixes'] = [*self.suffixes]
        return options | ({'splits': self.splits} if self.splits != 'names' else {})


# Splits: one rule for all input, retold in docs/data.md

class Document(NamedTuple):
    """A text in blocks, the split that its file is named after, and where it was read."""
    blocks: Iterable[str]
    named: str | None  # val or test
    place: str


class Part(NamedTuple):
    """A block of text for a split."""
    split: str
    text: str
    begins: bool  # a document, or what one split has of it
    place: str


Ends = list[tuple[float, str]]  # where the parts of a document end, in characters; their splits


def read_documents_of(o: PrepareConfig, source: Source) -> Iterator[Document]:
    """Yield all documents of an input, in their order."""
    reading = Reading.of(o)
    for name, file in source.files.items():
        named = file.split if file.split in ('val', 'test') else None
        place = os.path.join(source.root, name)
        for number, blocks in enumerate(read_documents(source.path(name), file, reading), 1):
            yield Document(blocks, named, f'{place}, document {number}')


def read_parts(o: PrepareConfig, source: Source, rule: 'Rule') -> Iterator[Part]:
    """Yield the text of all documents in blocks, each with its split."""
    number = 0  # of a document whose file is named after neither val nor test
    for document in read_documents_of(o, source):
        if document.named:
            ends = whole(document.named)
        else:
            ends = rule.ends_of(number, document.blocks)
            number += 1
        for split, text, begins in cut(document.blocks, ends):
            yield Part(split, text, begins, document.place)


class Rule:
    """What each split gets of the documents that are named after neither val nor test. A split is
    held out of them if no file is named after it. Of fewer than WHOLE documents the long ones are
    each cut. Of others one that is most of the text is train's. Of fewer than MANY the last are
    held out whole, if a hash of their texts would leave val or test less than half its share. Of
    more the hash decides. Copies count once, and go where the first one goes: texts are copies that
    differ in line ends and in space around them alone."""
    def __init__(self, o: PrepareConfig, source: Source):
        named = {file.split for file in source.files.values()}
        self.names = named != {None}
        self.held_out = [split for split in ('val', 'test')
                         if split not in named and o.held_out > 0]
        self.share = o.held_out
        self.how = ''  # in words
        self.ends: list[Ends] = []  # of the first MANY documents
        self.split_of: dict[int, str] = {}  # of what documents say, by a hash of it
        self.cut: set[int] = set()  # those of documents that are cut

    def ends_of(self, number: int, blocks: Iterable[str]) -> Ends:
        """Return where the parts of a document end, by its number or else by its hash."""
        if number < len(self.ends):
            return self.ends[number]
        if not self.held_out:
            return whole('train')
        text = hash_text(blocks)
        if text.says in self.cut:  # a copy
            return []
        return whole(self.split_of.setdefault(text.says, self.split_by_hash(text)))

    def split_by_hash(self, text: 'HashedText') -> str:
        split = split_of_digest(text.digest, self.share)
        return split if split in self.held_out else 'train'

    def decide(self, texts: list['HashedText']) -> None:
        """Choose how to divide, from the first MANY documents, or all if there are fewer."""
        for text in texts:
            self.split_of.setdefault(text.says, self.split_by_hash(text))
        n = len(self.split_of)
        longest = max((text.size for text in texts), default=0)
        counts = Counter(self.split_of.values())
        fewest = min(counts[split] for split in ('train', *self.held_out))
        few, total = len(texts) < MANY, sum(text.size for text in texts)
        most = {text.says for text in texts if text.size > total / 2}
        if n < WHOLE and ((n < 3 and few) or self.share * longest >= PART):
            self.how = 'position: val and test get parts from several places of each long text'
            # Cut the long ones, or if none is long all; leave out copies, whose parts would overlap
            long = min(longest, PART / self.share)
            for text in texts:
                ends = places(text.size, self.share, self.held_out)
                ends = ends if text.size >= long else whole('train')
                self.ends.append([] if text.says in self.cut else ends)
                self.cut.add(text.says)
            return
        if n >= 3 and (few or n < WHOLE) and fewest < self.share * n / 2:
            self.how = f'position: the last of {n} documents are held out'
            most_first = sorted(self.split_of, key=lambda says: says not in most)
            self.split_of = split_by_number(most_first, self.held_out, self.share)
        else:
            self.how = 'a hash of each document'
        # Val or test would be what is most of the text, and nothing else
        self.split_of |= dict.fromkeys(most, 'train')
        self.ends = [whole(self.split_of[text.says]) for text in texts]

    def describe(self) -> str:
        """Return in words by what the documents are divided."""
        if not self.held_out:
            return 'the names of files' if self.names else 'nothing, since held_out is 0'
        how = f'the names of files, and {" and ".join(self.held_out)} by ' if self.names else ''
        return how + self.how


def find_rule(o: PrepareConfig, source: Source, sample: 'Sample | None') -> Rule:
    """Read the first MANY documents, and choose how to divide all. If a tokenizer is to be trained,
    read on, and take a sample of the text of train."""
    rule, texts = Rule(o, source), []
    decided = not rule.held_out
    if decided and not sample:
        return rule
    unnamed = {name: file for name, file in source.files.items()
               if file.split not in ('val', 'test')}
    for number, document in enumerate(read_documents_of(o, source._replace(files=unnamed))):
        if number == MANY and not decided:
            rule.decide(texts)
            decided = True
            if sample:
                sample.keep_train(rule)
        if decided and not sample:
            break
        if not decided:
            texts.append(hash_text(document.blocks, sample, number))
        elif rule.ends_of(number, document.blocks) == whole('train'):
            for block in document.blocks:
                sample.add(block)
            if sample.total > 4 * o.tokens:  # A token has some four bytes: train will be full
                break
    if not decided:
        rule.decide(texts)
        if sample:
            sample.keep_train(rule)
    return rule


def whole(split: str) -> Ends:
    return [(math.inf, split)]


def places(size: int, share: float, held_out: list[str]) -> Ends:
    """Return where the parts of a text of so many characters end. In up to PLACES places a part is
    held out for each split. They are evenly spaced, but for the beginning and end of the text: what
    stands there, such as a licence, is unlike the rest."""
    n = int(min(PLACES, max(1, share * size // PART)))
    part = share * size / n
    margin = min(MARGIN, (1 - share * len(held_out)) / 2) * size
    ends: Ends = []
    for place in range(n):
        middle = margin + (place + 0.5) * (size - 2 * margin) / n
        begin = middle - part * len(held_out) / 2
        ends.append((begin, 'train'))
        ends += [(begin + k * part, split) for k, split in enumerate(held_out, 1)]
    return [*ends, (math.inf, 'train')]


def cut(blocks: Iterable[str], ends: Ends, begin: int = 0) -> Iterator[tuple[str, str, bool]]:
    """Divide the blocks of a text, which begin at character `begin`, where its parts end. Yield
    (split, text, whether a part begins). Without parts nothing is yielded."""
    parts = iter([end for end in ends if end[0] > begin])
    end, split = next(parts, (math.inf, ''))
    begins = True
    for block in blocks if ends else ():
        at = 0
        while at < len(block):
            stop = max(at, place_to_cut(block, end - begin))
            if stop > at:
                yield split, block[at:stop], begins
                begins = False
            if end <= begin + len(block):
                end, split = next(parts)
                begins = True
            at = stop
        begin += len(block)


def place_to_cut(block: str, at: float) -> int:
    """Return where to cut a block: at the first space or line end from `at` on, if it is near. A
    block ends with a word."""
    if at >= len(block):
        return len(block)
    at = max(0, round(at))
    if space := re.compile('[ \n]').search(block, at, at + LONGEST_WORD):
        return space.start()
    return len(block) if len(block) - at < LONGEST_WORD else at


def split_by_number(texts: list[int], held_out: list[str], share: float) -> dict[int, str]:
    """Hold out the last of few texts: those of the last split last."""
    each = max(1, round(share * len(texts)))  # of val, and of test
    splits = [split for split in ['test', 'val'] if split in held_out for _ in range(each)]
    last_first = itertools.chain(splits, itertools.repeat('train'))
    return dict(zip(reversed(texts), last_first, strict=False))


class HashedText(NamedTuple):
    """What decides the split of a document."""
    digest: bytes  # of the text as it is
    says: int  # a hash of what it says: without space around it, and with one kind of line end
    size: int  # in characters


def hash_text(blocks: Iterable[str], sample: 'Sample | None' = None, number: int = 0) -> HashedText:
    """Hash a document, and add its blocks to a sample. Texts that are blank say what they are."""
    digest, says = hashlib.sha256(), hashlib.sha256()
    size, space = 0, ['']  # space: what has been read since the last word
    begun = False
    for block in blocks:
        if sample:
            sample.add(block, number, size)
        size += len(block)
        digest.update(block.encode())
        text = block if begun else block.lstrip()
        words = text.rstrip()
        if words:
            said = ''.join([*space, words])
            if '\r' in said:
                said = said.replace('\r\n', '\n').replace('\r', '\n')
            says.update(said.encode())
            space, begun = [], True
        space.append(text[len(words):])
    of_words = says.digest() if begun else digest.digest()
    return HashedText(digest.digest(), int.from_bytes(of_words[:7], 'big'), size)


def split_of_digest(digest: bytes, held_out: float) -> str:
    """Choose the split of a document by a hash of its text. Val and test each get the fraction
    `held_out` of all documents."""
    x = int.from_bytes(digest[:8], 'big') / 2 ** 64  # 0 to 1
    if x < held_out:
        return 'test'
    return 'val' if x < 2 * held_out else 'train'


# Tokens and shards

class Sample:
    """Every n-th of the texts that are added: n is 1, 2, 4, ..., so that they have some BPE_TEXT
    bytes at most."""
    def __init__(self) -> None:
        self.texts: list[tuple[str, int, int]] = []  # and number and place of their documents
        self.every = 1
        self.count = 0  # of all texts
        self.total = self.size = 0  # bytes of all texts, and of those that are kept

    def add(self, text: str, number: int = 0, place: int = 0) -> None:
        size = len(text.encode())
        self.total += size
        if self.count % self.every == 0:
            self.texts.append((text, number, place))
            self.size += size
        self.count += 1
        while self.size > BPE_TEXT and len(self.texts) > 1:
            self.texts = self.texts[::2]
            self.every *= 2
            self.size = sum(len(text.encode()) for text, *_ in self.texts)

    def keep_train(self, rule: Rule) -> None:
        """Keep what the splits that were decided on leave to train."""
        found, self.texts = self.texts, []
        every, self.every = self.every, 1
        self.count = self.total = self.size = 0
        for text, number, place in found:
            for split, part, _ in cut([text], rule.ends[number], place):
                if split == 'train':
                    self.add(part)
        self.every, self.count, self.total = (
            n * every for n in (self.every, self.count, self.total))


def find_tokenizer(o: PrepareConfig, folder: str) -> Any:
    """Load the tokenizer that the options name; None if it is to be trained. If it is a
    SentencePiece model, its file is written to the folder. Raises UserError."""
    if re.fullmatch(r'bpe\d+', o.tokenizer):
        return None
    without_network = ('without a network --tokenizer=bpe2048, byte or FILE.model can be used, of '
                       'which bpe2048 is trained on the text')
    try:
        if o.tokenizer in tokenizers.WITHOUT_FILE:
            return tokenizers.WITHOUT_FILE[o.tokenizer]()
        path = o.tokenizer
        if path == 'llama':
            from huggingface_hub import hf_hub_download
            path = hf_hub_download(*LLAMA)
    except Exception as error:  # the libraries for HTTP raise many classes of their own
        fail(f'tokenizer={o.tokenizer} cannot be downloaded: {without_network} ({error})')
    check(os.path.isfile(path),
          f'tokenizer={path}: no such file, and none of llama, gpt2, byte, bpe2048')
    shutil.copyfile(path, os.path.join(folder, tokenizers.MODEL_FILE))
    return tokenizers.SentencePieceTokenizer(path)


class Writer:
    """Append tokens to the shards of a data folder: of train several, of val and test one."""
    def __init__(self, folder: str, vocab_size: int):
        self.folder = folder
        self.dtype = np.dtype('<u2' if vocab_size <= 2 ** 16 else '<u4')
        self.characters = 0  # of the text
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


def tokenize(o: PrepareConfig, parts: Iterator[Part], tokenizer: Any, writer: Writer) -> bool:
    """Write the tokens of all documents, until the train split is full. Return whether decoding
    gives the text back: the first text of each batch is decoded. UserError with the place of a text
    that the tokenizer refuses."""
    def encode(part: Part) -> list[int]:
        try:
            return tokenizer.encode(part.text, part.begins)
        except UserError as error:
            fail(f'{part.place}: {error}')

    train = writer.splits['train']
    lossless = True
    with (ThreadPoolExecutor() as pool,
          progress_bar(unit=' tokens', unit_scale=True, disable=None) as bar):
        while train['tokens'] < o.tokens and (batch := list(islice(parts, BATCH))):
            encoded = list(pool.map(encode, batch))
            lossless &= tokenizers.keeps_text(tokenizer, encoded[0], batch[0].text)
            for part, ids in zip(batch, encoded, strict=True):
                limit = o.tokens - train['tokens'] if part.split == 'train' else None
                if part.begins:
                    ids = [tokenizer.bos, *ids]
                    writer.splits[part.split]['documents'] += limit != 0
                writer.append(part.split, ids[:limit])
                writer.characters += len(part.text)
                bar.update(len(ids))
    return lossless


# The data folder

def prepare(o: PrepareConfig, source: Source | None = None) -> None:
    """Make the data folder o.out_dir unless it exists, from the files of o.input, which may have
    been found already. It is filled from inside, with meta.json last: without that it is no data.
    Raises UserError, OSError."""
    folder = Path(o.out_dir).resolve()
    if (folder / 'meta.json').exists() and is_prepared(o):  # It may be read-only.
        return
    with lock_new_folder(folder):
        finish_folder(str(folder), 'meta.json')
        if not is_prepared(o):
            with fill_folder(str(folder), 'meta.json') as partial:
                write_folder(o, str(partial), source or find_source(o.input, Reading.of(o)))


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


def write_folder(o: PrepareConfig, folder: str, source: Source) -> None:
    """Write tokenizer, shards and meta.json to an empty folder. Raises UserError, OSError."""
    # Say what is read, and which splits files are named after
    if len(source.files) > 1 or source.left_out:
        print(source.describe(), flush=True)
    named = {name: file.split for name, file in source.files.items()}
    if any(named.values()):
        for split in (*SPLITS, None):
            if files := [name for name in named if named[name] == split]:
                words = split or 'train, by none of these names'
                print(f'{words}: {len(files)} of {len(named)} files, first {files[0]}', flush=True)
        print('These are names of splits; --splits=none reads them as any other', flush=True)
        check(not {*named.values()} <= {'val', 'test'}, f'{o.input} has files that are '
              'named after val and test, and none for train: add one, or name them otherwise, or '
              '--splits=none takes no split from names')

    # Find the tokenizer and the splits; a tokenizer is trained on the text of train
    check_separator(source, o.input, o.separator)
    tokenizer = find_tokenizer(o, folder)
    sample = None
    if tokenizer is None:
        print(f'Reading {o.input} for the tokenizer {o.tokenizer}', flush=True)
        sample = Sample()
    rule = find_rule(o, source, sample)
    if sample:
        model = os.path.join(folder, tokenizers.MODEL_FILE)
        texts = [text for text, *_ in sample.texts]
        tokenizers.train_bpe(model, int(o.tokenizer.removeprefix('bpe')), texts)
        tokenizer = tokenizers.SentencePieceTokenizer(model)

    # Write the tokens. What has changed since it was found may be divided in two ways
    writer = Writer(folder, tokenizer.vocab_size)
    lossless = tokenize(o, read_parts(o, source, rule), tokenizer, writer)
    if not source.root.startswith(HUB):
        for name, file in source.files.items():
            state = os.stat(source.path(name))
            check((state.st_size, state.st_mtime_ns) == (file.size, file.changed),
                  f'{source.path(name)} has changed while it was read: start again when nothing '
                  'writes to it, or with a copy')
    # Say which rule was taken, and what each split has
    counts = [f'{writer.splits[split]["documents"]:,} {split}' for split in SPLITS]
    copies = rule.ends.count([])
    print(f'Split by {rule.describe()}; documents: {", ".join(counts)}'
          + (f'; copies left out: {copies}' if copies else ''), flush=True)
    mean = writer.characters / max(1, sum(split['documents'] for split in writer.splits.values()))
    if 0 < mean < SHORT:
        print(f'A document has {mean:.0f} characters on average, and no context but these: if '
              'several belong together, as the messages of a chat do, docs/data.md joins them',
              flush=True)
    full = writer.splits['train']['tokens'] == o.tokens
    for split in SPLITS:
        size = writer.splits[split]['tokens']
        may_be_empty = split != 'train' and o.held_out == 0
        check(size > 0 or may_be_empty or not full, f'train is full at {o.tokens:,} tokens, before '
              f'{split} has any: --tokens=N takes more of {o.input}')
        check(size > 0 or may_be_empty, f'{o.input} holds too little text for {split}: expected '
              'a longer text, or three rows or more; prepare_slimpajama.py has --held_out')
        print(f'{split:5} {size:>15,} tokens', flush=True)
        if split != 'train' and 0 < size < FEW:
            print(f'{split} has few tokens: a perplexity of so few says little', flush=True)
    if full:
        print(f'Train is full at {o.tokens:,} tokens: --tokens=N takes more of it', flush=True)
    for shard in itertools.chain(*(split['shards'] for split in writer.splits.values())):
        shard['crc32'] = checksums(os.path.join(folder, shard['file']))

    meta = {
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': writer.splits, 'config': o.content_options(),
        'source': source.root if o.input.startswith(HUB) else o.input, 'files': [*source.files]}
    if not lossless:
        meta['lossless'] = False
        print('The tokenizer loses some of this text: there will be no bits per byte', flush=True)
    write_atomic(f'{folder}/meta.json', json.dumps(meta, indent=1).encode())


# The data folder of a run

def find_data(folder: str, text: str | None = None, tokenizer: str | None = None,
              checkpoint: dict[str, Any] | None = None, reading: Reading | None = None) -> str:
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
    reading = reading or Reading()
    path = os.path.abspath(keep_piped(text, reading))
    source = find_source(path, reading)
    size = source.size()
    default = next(name for limit, name in TEXT_TOKENIZERS.items() if size < limit)
    held_out = 0.05 if size < 20e6 else 0.005
    o = PrepareConfig(path, tokenizer=tokenizer or default, held_out=held_out,
                      **reading._asdict())

    # A text that changes, another tokenizer or another reading gives the folder another name
    states = [(source.path(name), file.size, file.changed) for name, file in source.files.items()]
    if tokenizer and os.path.exists(tokenizer):
        states.append((tokenizer, os.path.getsize(tokenizer), os.stat(tokenizer).st_mtime_ns))
    content = (RULE, tokenizer, states, reading.given())
    o.out_dir += '-' + hashlib.sha256(repr(content).encode()).hexdigest()[:8]
    if os.path.exists(f'{o.out_dir}/meta.json'):
        return o.out_dir
    print(f'Preparing {text}, {size / 1e6:,.2f} MB, in {o.out_dir}: tokenizer {o.tokenizer}',
          flush=True)
    try:
        prepare(o, source)
    except tokenizers.UnsuitedVocabulary as error:
        if tokenizer:
            raise
        print(f'The default {error}; it gets one token a byte', flush=True)
        prepare(replace(o, tokenizer='byte'), source)
    return o.out_dir

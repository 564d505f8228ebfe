"""
SlimPajama, or any text, to token shards that train.py reads.

    python prepare_slimpajama.py                      the paper's subset: 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --size=86m           as much as one model needs
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT
    python prepare_slimpajama.py --verify --out_dir=data/slimpajama      check every shard fully
    python prepare_slimpajama.py --peek=val --out_dir=data/slimpajama    read a split's beginning

Documents are tokenized in their order, BOS before each, and laid end to end: train_00000.bin, ...,
val.bin, test.bin (little-endian unsigned integers) and meta.json. A stopped run goes on, file by
file, when the same command is given again; the bytes depend neither on stops nor on --workers.
"""
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from configurator import build, fail, read_options
from nanocem.documents import Bad, Piece, batches, pieces, read_documents, split_of, survey
from nanocem.files import lock, read_json, say, write_whole
from nanocem.shards import FORMAT, read_meta
from nanocem.sources import HUB, SUFFIXES, File, Source, ask_hub, find_source
from nanocem.tokenizers import LlamaTokenizer, load_tokenizer, make_tokenizer
from nanocem.writer import OUR_SHARD, SPLITS, Writer, is_whole, look_at

DOWNLOADS = '.download'  # a folder in out_dir
SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # a mirror of Llama 1's and 2's
# 20 tokens a parameter, and 1% more
SIZES = {'86m': 1.75e9, '108m': 2.2e9, '134m': 2.7e9, '162m': 3.3e9, '256m': 5.2e9}
PIECE = 1 << 16  # characters a thread gets at a time; longer documents are cut
BATCH = 1 << 21  # characters all threads get at a time
SAVE_BYTES = 1 << 20  # of input, between two notes of how far the run has come
SMALL_TEXT = 20_000_000  # bytes; below it prepare_text's tokens are bytes
# macOS does not tell which cores a process may use
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


@dataclass
class PrepareConfig:
    """Where the text comes from and what becomes of it."""
    input: str = SLIMPAJAMA  # file, folder, builtin, hf://datasets/OWNER/NAME[@REVISION][/FOLDER]
    out_dir: str | None = None  # the data folder; default: data/ and the name of the input
    tokens: int | None = None  # training tokens, or as many as there are; default 3.3B
    size: Literal['86m', '108m', '134m', '162m', '256m'] | None = None  # tokens for such a model
    tokenizer: str | None = None  # llama, gpt2, byte, or Llama's model file; default llama
    eos: bool = False  # put EOS after each document
    held_out: float | None = None  # share of val, and of test; default 0.005, builtin 0.05
    seed: int = 0  # shuffle the order of the files; 0: by name
    column: str = 'text'  # the column of .parquet files, the field of .jsonl lines
    shard_tokens: int = 100_000_000  # tokens a shard of the train split
    workers: int = CORES  # threads; default: one a core
    skip_bad: bool = False  # leave damaged files out, and name them
    verify: bool = False  # check out_dir fully
    peek: Literal['train', 'val', 'test'] | None = None  # print a split's first documents

    def __post_init__(self) -> None:
        builtin = self.input == 'builtin'
        self.model: str | None = None  # path of Llama's tokenizer.model, where it was given
        self.tokenizer = self.tokenizer or ('byte' if builtin else 'llama')
        if self.tokenizer not in ('llama', 'gpt2', 'byte'):
            if not os.path.isfile(self.tokenizer):
                raise ValueError(f'tokenizer={self.tokenizer}: no such file, and none of llama, '
                                 'gpt2, byte')
            self.model, self.tokenizer = self.tokenizer, 'llama'
        if self.eos and self.tokenizer != 'llama':
            raise ValueError(f'eos: the {self.tokenizer} tokenizer has no EOS beside its BOS')
        if self.tokens and self.size:
            raise ValueError('tokens and size: give one')
        if self.tokens is None:
            self.tokens = round(SIZES[self.size or '162m'])
        for name, most in (('tokens', 10**15), ('shard_tokens', 10**15), ('workers', 1024)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f'{name}={getattr(self, name)}: expected 1 to {most:,}')
        # where val or test gets fewer tokens than `least`, a share of each document is held out
        self.least = 1
        self.held_out_by_position = 0.05 if self.held_out is None else self.held_out
        if self.held_out is None:
            self.held_out = 0.05 if builtin else 0.005
        if not 0 <= self.held_out < 0.5:
            raise ValueError(f'held_out={self.held_out}: expected at least 0 and below 0.5')
        if self.input != 'builtin' and not self.input.startswith(HUB):
            self.input = os.path.abspath(self.input)
        self.out_dir = self.out_dir or os.path.join('data', self.name())

    def name(self) -> str:
        """Of the folder under data/: the input's."""
        if self.input == SLIMPAJAMA:
            return 'slimpajama'
        if self.input.startswith(HUB):
            owner, *rest = self.input.removeprefix(HUB).rstrip('/').split('/')
            return '-'.join(rest) or owner
        return os.path.basename(self.input).partition('.')[0] or 'text'

    def identity(self) -> dict[str, Any]:
        """What a data folder's bytes depend on."""
        names = ('input', 'tokenizer', 'eos', 'tokens', 'held_out', 'seed', 'column',
                 'shard_tokens')
        return {name: getattr(self, name) for name in names}


# From text to tokens

def read_pieces(path: str, o: PrepareConfig, split: str | None, own: set[str | None],
                by_position: bool) -> Iterator[tuple[Piece, float]]:
    """The documents of a file in pieces, and the share of the file read by then. `split` is the
    file's own, `own` those of the whole source. Each other document is of one split by its hash,
    or is cut in three, `by_position`."""
    held_out = o.held_out_by_position if by_position else o.held_out
    for chunks, share in read_documents(path, o.column):
        hashed, length = survey(chunks)
        size = min(PIECE, max(1, round(held_out * length / 2))) if by_position else PIECE

        def split_at(position: int, hashed: float = hashed, length: int = length) -> str:
            if split in ('val', 'test'):
                return split
            there = split_of(1 - position / length if by_position else hashed, held_out)
            return 'train' if there in own else there  # the source has that split from elsewhere

        for piece in pieces(chunks, size, split_at):
            yield piece, share


# A data folder

def prepare(o: PrepareConfig) -> None:
    """Make o.out_dir, or go on with it. SystemExit with one line where that cannot be; the caller
    holds the folder's lock."""
    def path(name: str) -> str:
        return os.path.join(o.out_dir, name)

    # what is there already
    remedy = 'delete the folder and prepare the data again'
    state = read_json(path('progress.json'), remedy)
    meta = read_json(path('meta.json'), remedy)
    ours = [name for name in os.listdir(o.out_dir)
            if OUR_SHARD.fullmatch(name) or name == DOWNLOADS]
    if meta or state:
        check_identity(o, meta or state)
        if not meta and not is_whole(state):
            fail(f'{path("progress.json")} is damaged: {remedy}')
        if meta:
            check_input(o, meta)
            say(f'{o.out_dir} is prepared already')
            return
    elif ours:
        fail(f'{o.out_dir} holds {ours[0]} but no meta.json: choose another --out_dir, or delete '
             'it')

    # the tokenizer and the files
    if o.tokenizer == 'llama' and not os.path.exists(path('tokenizer.model')):
        model = o.model or ask_hub(LLAMA[0], lambda api: api.hf_hub_download(*LLAMA))
        LlamaTokenizer(model)  # checks it
        with open(model, 'rb') as file:
            write_whole(path('tokenizer.model'), file.read())
    tokenizer = make_tokenizer(o.tokenizer, path('tokenizer.model'))
    source = find_source(state['source'] if state else o.input, o.seed, path(DOWNLOADS))
    if source.left_out:
        names = ', '.join(source.left_out[:5]) + ', ...' * (len(source.left_out) > 5)
        say(f'left out: {len(source.left_out):,} files that are not '
            f'{", ".join(SUFFIXES)}: {names}')
    if state and (state['listing'] != source.listing() or state['file'] > len(source.files)):
        fail(f'the files of {o.input} have changed since {o.out_dir} was begun: delete it and '
             'start again')

    # from the beginning, or where the run before stopped
    if not state:
        state = {'config': o.identity(), 'source': source.name, 'listing': source.listing()}
        begin_anew(o, state, by_position=False)
    dtype = np.dtype('<u2' if tokenizer.vocab_size <= 2 ** 16 else '<u4')
    writer = Writer(o.out_dir, dtype, tokenizer.bos, o.shard_tokens)
    writer.rewind(state['tokens'])
    before = sum(writer.tokens.values())
    begin = time.monotonic()
    tokenize(o, source, tokenizer, writer, state)
    if too_few(writer.tokens, o, source) and not state['by_position'] and any(
            writer.tokens.values()):
        say(f'{o.input} has few documents: the last {o.held_out_by_position:.3g} of each is test, '
            'as much before that val')
        begin_anew(o, state, by_position=True)
        writer.rewind(state['tokens'])
        tokenize(o, source, tokenizer, writer, state)
    empty = [split for split in SPLITS if not writer.tokens[split]]
    if len(empty) == 3 or (empty and o.held_out):
        writer.rewind(dict.fromkeys(SPLITS, 0))
        os.remove(path('progress.json'))
        source.close()
        fail(f'{o.input} holds no text' if len(empty) == 3 else
             f'{o.input} holds too little text for {" and ".join(empty)}; give more, or '
             '--held_out=0')

    # names for the shards, and meta.json last: a folder with it is whole
    used = [file.name for number, file in enumerate(source.files)
            if number <= state['last'].get(file.split or 'train', -1)
            and file.name not in state['skipped']]
    splits = writer.finish()
    write_whole(path('meta.json'), json.dumps({
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': dtype.name,
        'splits': splits, 'config': o.identity(), 'source': source.name,
        'listing': state['listing'], 'by_position': state['by_position'], 'files': used,
        'skipped': state['skipped']}, indent=1).encode())
    os.remove(path('progress.json'))
    source.close()
    for split, s in splits.items():
        say(f'{split:5} {s["tokens"]:>15,} tokens {s["documents"]:>11,} documents '
            f'{len(s["shards"]):>4} shards')
        if not s['tokens']:
            say(f'      train.py needs a {split} split: give a --held_out above 0')
    for name, why in state['skipped'].items():
        say(f'left out: {name}: {why}')
    tokens = sum(writer.tokens.values()) - before
    seconds = max(1e-9, time.monotonic() - begin)
    say(f'{o.out_dir}: {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} a second')


def begin_anew(o: PrepareConfig, state: dict[str, Any], by_position: bool) -> None:
    """Note that nothing is written yet."""
    state.update(by_position=by_position, file=0, tokens=dict.fromkeys(SPLITS, 0), last={},
                 skipped={})
    save(o, state)


def save(o: PrepareConfig, state: dict[str, Any]) -> None:
    write_whole(os.path.join(o.out_dir, 'progress.json'), json.dumps(state).encode())


def check_identity(o: PrepareConfig, found: dict[str, Any]) -> None:
    """The folder's meta.json or progress.json must be of these options."""
    before = found.get('config')
    if not isinstance(before, dict):
        fail(f'{o.out_dir} holds a meta.json or progress.json of something else: choose another '
             '--out_dir')
    before = {'column': 'text', **before}  # folders older than that option
    if different := [f'{name}={before.get(name)}, not {value}'
                     for name, value in o.identity().items() if before.get(name) != value]:
        fail(f'{o.out_dir} holds another configuration: {"; ".join(different)}. Choose another '
             '--out_dir, or delete it')


def check_input(o: PrepareConfig, meta: dict[str, Any]) -> None:
    """A finished folder's input, where it is still there, must be what it was made from."""
    if 'listing' not in meta or not (o.input == 'builtin' or os.path.exists(o.input)):
        return  # a folder older than that note; a commit of the Hub, which never changes
    if find_source(o.input, o.seed, '').listing() != meta['listing']:
        fail(f'{o.input} has changed since {o.out_dir} was made from it: choose another '
             '--out_dir, or delete it')


def too_few(tokens: dict[str, int], o: PrepareConfig, source: Source) -> bool:
    """Whether documents are so few that a split drawn from them stays empty, or nearly."""
    own = {file.split for file in source.files} - {'train'}
    return o.held_out > 0 and any(tokens[split] < o.least for split in SPLITS if split not in own)


def tokenize(o: PrepareConfig, source: Source, tokenizer: Any, writer: Writer,
             state: dict[str, Any]) -> None:
    """All documents from file number state['file'] on to the writer, until there are enough."""
    own = {file.split for file in source.files}
    limit = {split: sys.maxsize if split not in own else round(o.tokens * o.held_out)
             for split in SPLITS}
    if state['by_position']:  # val and test are met only after train
        limit = dict.fromkeys(SPLITS, max(1, round(o.tokens * o.held_out_by_position)))
    limit['train'] = o.tokens
    needed = SPLITS if state['by_position'] else ('train',)
    bos = np.array([tokenizer.bos], writer.dtype)
    eos = np.array([tokenizer.eos] if o.eos else [], writer.dtype)
    # of each file, in the bytes of all
    starts = [0, *accumulate(file.size for file in source.files)]
    saved = starts[state['file']]

    def wanted(file: File) -> bool:
        split = file.split or 'train'
        return writer.tokens[split] < limit[split]

    bar = tqdm(initial=sum(writer.tokens.values()), total=o.tokens, unit=' tokens',
               unit_scale=True, mininterval=1, smoothing=0.05)
    with bar:
        for number, path in source.paths(state['file'], wanted):
            file = source.files[number]
            start = dict(writer.tokens)
            try:
                read = read_pieces(path, o, file.split, own, state['by_position'])
                for batch, share in batches(read, BATCH):
                    texts = [(piece.text, piece.begins) for piece in batch]
                    encoded = tokenizer.encode_pieces(texts, o.workers)
                    for piece, ids in zip(batch, encoded, strict=True):
                        ids = np.concatenate([bos[:piece.begins], ids, eos[:piece.ends]])
                        room = limit[piece.split] - writer.tokens[piece.split]
                        writer.append(piece.split, ids[:room])
                        if room > 0:
                            state['last'][file.split or 'train'] = number
                        if all(writer.tokens[split] >= limit[split] for split in needed):
                            return
                    done = sum(writer.tokens.values())
                    so_far = starts[number] + share * file.size
                    bar.total = min(o.tokens, round(done * starts[-1] / max(1, so_far)))
                    bar.update(done - bar.n)
            except Bad as error:
                if not o.skip_bad:
                    source.release(file)  # a download may come out well the next time
                    fail(f'{os.path.join(o.input, file.name)}: {error}; --skip_bad leaves damaged '
                         'files out')
                state['skipped'][file.name] = str(error)
                writer.rewind(start)
            state['file'] = number + 1
            if starts[number + 1] - saved >= SAVE_BYTES:
                saved = starts[number + 1]
                writer.sync()
                state['tokens'] = dict(writer.tokens)
                save(o, state)
            source.release(file)


@contextmanager
def locked(folder: str, wait: bool) -> Iterator[None]:
    """A folder, made if need be, for this process alone."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, '.lock')
    handle = lock(path)
    if handle is None:
        if not wait:
            fail(f'{folder}: another process is preparing it')
        say(f'{folder} is being prepared by another process: waiting for it')
        handle = lock(path, wait=True)
    try:
        yield
    finally:
        os.close(handle)


def run(o: PrepareConfig, wait: bool = False) -> None:
    """prepare, alone in the folder; what the machine refuses ends the program with one line."""
    try:
        with locked(o.out_dir, wait):
            prepare(o)
    except OSError as error:
        fail(f'{error.filename or o.out_dir}: {error.strerror or error}; the same command goes on '
             'from here')
    except KeyboardInterrupt:
        fail('stopped; the same command goes on from here')


def prepare_builtin(out_dir: str) -> None:
    """Make the built-in corpus, the Python standard library's source, in `out_dir`: about 12
    million bytes, nothing downloaded. Where another process is at it, wait for that."""
    run(PrepareConfig(input='builtin', out_dir=out_dir), wait=True)


def prepare_text(path: str, tokenizer: str | None = None) -> str:
    """A text of one's own, one file or a folder, as a data folder under data/, named after the
    text, its state and the tokenizer: made once, and anew after a change. Returns the folder."""
    given = {'input': path, 'tokenizer': tokenizer or 'byte'}
    source = find_source(build(PrepareConfig, given).input, 0, '')
    size = sum(file.size for file in source.files)
    if not tokenizer and size >= SMALL_TEXT:
        given['tokenizer'] = 'llama'
    if size < SMALL_TEXT:
        given['held_out'] = 0.05
    o = build(PrepareConfig, given)
    state = f'{source.name} {source.listing()} {o.tokenizer}'
    o.least = min(4096, size // 100)
    o.out_dir += '-' + hashlib.sha256(state.encode()).hexdigest()[:8]
    if not os.path.exists(os.path.join(o.out_dir, 'meta.json')):
        tokens = 'one token a byte' if o.tokenizer == 'byte' else f'tokenizer {o.tokenizer}'
        say(f'Preparing {path}, {size / 1e6:,.1f} MB, in {o.out_dir}: {tokens}')
        run(o, wait=True)
    return o.out_dir


def verify(data_dir: str) -> None:
    """Check every shard of a folder fully: there, length, range, documents, SHA-256; and the
    tokenizer. SystemExit if not."""
    meta = read_meta(data_dir)
    tokenizer = load_tokenizer(data_dir)
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    wrong = []
    for split, s in meta['splits'].items():
        for shard in s['shards']:
            path = os.path.join(data_dir, shard['file'])
            try:
                seen = look_at(path, dtype, tokenizer.bos)
            except FileNotFoundError:
                wrong.append(f'{path} is missing')
                continue
            wrong += [f'{path}: {key} {seen[key]}, meta.json says {shard[key]}'
                      for key in ('tokens', 'documents', 'sha256') if seen[key] != shard[key]]
            if seen['highest'] >= tokenizer.vocab_size:
                wrong.append(f'{path}: token {seen["highest"]}, outside the vocabulary of '
                             f'{tokenizer.vocab_size}')
        for key in ('tokens', 'documents'):
            if s[key] != sum(shard[key] for shard in s['shards']):
                wrong.append(f'{data_dir}/meta.json: the {split} shards do not add up to {s[key]} '
                             f'{key}')
    if wrong:
        fail('; '.join(wrong))
    say(f'{data_dir}: all shards are what meta.json says')


def peek(data_dir: str, split: str) -> None:
    """Print the beginnings of the first five documents of a split."""
    meta = read_meta(data_dir)
    tokenizer = load_tokenizer(data_dir)
    shards = meta['splits'].get(split, {}).get('shards')
    if not shards:
        fail(f'{data_dir} has no {split} split')
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    ids = np.memmap(os.path.join(data_dir, shards[0]['file']), dtype, 'r')
    starts = [*np.flatnonzero(ids[:1 << 22] == tokenizer.bos)[:6], len(ids)]
    for begin, end in list(pairwise(starts))[:5]:
        say(f'--- {end - begin:,} tokens: {ids[begin:begin + 12].tolist()} ...')
        say(tokenizer.decode(ids[begin:min(end, begin + 200)].tolist()))


def main(argv: list[str]) -> None:
    argv = ['--peek=train' if arg == '--peek' else arg for arg in argv]
    o = build(PrepareConfig, read_options(argv, PrepareConfig))
    if not (o.verify or o.peek):
        run(o)
        return
    try:
        if o.verify:
            verify(o.out_dir)
        if o.peek:
            peek(o.out_dir, o.peek)
    except OSError as error:
        fail(f'{error.filename or o.out_dir}: {error.strerror or error}')
    except (KeyError, TypeError, ValueError, AttributeError):
        fail(f'{o.out_dir}/meta.json is damaged: prepare the data again')


if __name__ == '__main__':
    main(sys.argv[1:])

"""
SlimPajama, or any text, to token shards that train.py reads.

    python prepare_slimpajama.py                      the paper's subset: 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --size=86m           as much as one model needs
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT
    python prepare_slimpajama.py --input=corpus       what results/ladder was trained on

Documents are tokenized in their order, BOS before each, and laid end to end: train_00000.bin, ...,
val.bin, test.bin (little-endian unsigned integers) and meta.json. A stopped run goes on, file by
file, when the same command is given again; the bytes depend neither on stops nor on --workers.
"""
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tqdm import tqdm

from configurator import build, fail, in_range, read_options, require
from nanocem.files import lock, read_json, say, write_whole
from nanocem.shards import FORMAT, OUR_SHARD, SPLITS, Writer
from nanocem.sources import HUB, Bad, Source, encode, find_source, hub, read_parts
from nanocem.tokenizers import LlamaTokenizer, make_tokenizer

SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # a mirror of Llama 1's and 2's
# 20 tokens a parameter, and 1% more
SIZES = {'86m': 1.75e9, '108m': 2.2e9, '134m': 2.7e9, '162m': 3.3e9, '256m': 5.2e9}
OWN_TEXTS = {'builtin': ('byte', 0.05), 'corpus': ('byte', 0.01)}  # tokenizer, held_out
SAVE_TOKENS = 1 << 20  # between two notes of how far the run has come
SMALL_TEXT = 20_000_000  # bytes; below it prepare_text's tokens are bytes
REMEDY = 'delete the folder and prepare the data again'
# macOS does not tell which cores a process may use
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


@dataclass
class PrepareConfig:
    """Where the text comes from and what becomes of it."""
    input: str = SLIMPAJAMA  # path, builtin, corpus, hf://datasets/OWNER/NAME[@REV][/FOLDER]
    out_dir: str | None = None  # the data folder; default: data/ and the name of the input
    tokens: int | None = None  # training tokens, or as many as there are; default 3.3B
    size: Literal['86m', '108m', '134m', '162m', '256m'] | None = None  # tokens for such a model
    tokenizer: str | None = None  # llama, gpt2, byte, or Llama's model file; default llama
    held_out: float | None = None  # share of val, and of test; default 0.005, builtin 0.05
    seed: int = 0  # shuffle the order of the files; 0: by name
    column: str = 'text'  # the column of .parquet files, the field of .jsonl lines
    shard_tokens: int = 100_000_000  # tokens a shard of the train split
    workers: int = CORES  # threads; default: one a core
    skip_bad: bool = False  # leave damaged files out, and name them

    def __post_init__(self) -> None:
        tokenizer, held_out = OWN_TEXTS.get(self.input, ('llama', 0.005))
        self.model: str | None = None  # path of Llama's tokenizer.model, where it was given
        self.tokenizer = self.tokenizer or tokenizer
        if self.tokenizer not in ('llama', 'gpt2', 'byte'):
            require(os.path.isfile(self.tokenizer), f'tokenizer={self.tokenizer}: no such file, '
                    'and none of llama, gpt2, byte')
            self.model, self.tokenizer = self.tokenizer, 'llama'
        require(not (self.tokens and self.size), 'tokens and size: give one')
        if self.tokens is None:
            self.tokens = round(SIZES[self.size or '162m'])
        in_range(self, 1, 10**15, 'tokens shard_tokens')
        in_range(self, 1, 1024, 'workers')
        in_range(self, 0, 0.49, 'held_out')
        # where val or test gets fewer tokens than `least`, a share of each document is held out
        self.least = 1
        self.held_out_by_position = 0.05 if self.held_out is None else self.held_out
        self.held_out = held_out if self.held_out is None else self.held_out
        if self.input not in OWN_TEXTS and not self.input.startswith(HUB):
            self.input = os.path.abspath(self.input)
        self.out_dir = self.out_dir or os.path.join('data', self.name())

    def name(self) -> str:
        """Of the folder under data/: the input's."""
        if self.input == SLIMPAJAMA:
            return 'slimpajama'
        if self.input.startswith(HUB):
            return '-'.join(self.input.removeprefix(HUB).rstrip('/').split('/')[1:])
        return os.path.basename(self.input).partition('.')[0] or 'text'

    def identity(self) -> dict[str, Any]:
        """What a data folder's bytes depend on."""
        names = ('input', 'tokenizer', 'tokens', 'held_out', 'seed', 'column', 'shard_tokens')
        return {name: getattr(self, name) for name in names}


@dataclass
class Progress:
    """How far a run has come: progress.json."""
    config: dict[str, Any]
    source: str  # its name
    listing: str  # of its files
    by_position: bool = False  # each document is cut in three, for lack of documents
    file: int = 0  # the number of the next one
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    files: list[str] = field(default_factory=list)  # read so far
    skipped: dict[str, str] = field(default_factory=dict)  # damaged, and why

    def save(self, folder: str) -> None:
        write_whole(os.path.join(folder, 'progress.json'), json.dumps(asdict(self)).encode())


def prepare(o: PrepareConfig) -> None:
    """Make o.out_dir, or go on with it. SystemExit with one line where that cannot be; the caller
    holds the folder's lock."""
    def path(name: str) -> str:
        return os.path.join(o.out_dir, name)

    # What is there already
    if meta := read_json(path('meta.json'), REMEDY):
        check_same(o, meta, find_source(o.input, o.seed) if os.path.exists(o.input) else None)
        say(f'{o.out_dir} is prepared already')
        return
    before = read_json(path('progress.json'), REMEDY)
    if before and before.keys() != Progress.__dataclass_fields__.keys():
        fail(f'{path("progress.json")} is damaged, or of another version: {REMEDY}')
    shards = list(filter(OUR_SHARD.fullmatch, os.listdir(o.out_dir)))
    if shards and not before:
        fail(f'{o.out_dir} holds {shards[0]} but no meta.json: choose another --out_dir')

    # The files and the tokenizer
    source = find_source(before['source'] if before else o.input, o.seed)
    if source.left_out:
        names = ', '.join(source.left_out[:5])
        say(f'left out: {len(source.left_out):,} files of other kinds, as {names}')
    progress = Progress(o.identity(), source.name, source.listing())
    if before:
        check_same(o, before, source)
        progress = Progress(**before)
    if o.tokenizer == 'llama' and not os.path.exists(path('tokenizer.model')):
        if not o.model:
            with hub() as hf:
                o.model = hf.HfApi().hf_hub_download(*LLAMA)
        LlamaTokenizer(o.model)  # checks it
        with open(o.model, 'rb') as file:
            write_whole(path('tokenizer.model'), file.read())
    tokenizer = make_tokenizer(o.tokenizer, path('tokenizer.model'))

    # The tokens, from the beginning or where the run before stopped; and again where documents are
    # too few to draw val and test from them
    writer = Writer(o.out_dir, tokenizer.vocab_size, o.shard_tokens)
    tokenize(o, source, tokenizer, writer, progress)
    own = {file.split for file in source.files}
    fewest = min(writer.tokens[split] for split in SPLITS if split == 'train' or split not in own)
    if fewest < o.least and o.held_out and any(writer.tokens.values()) and not progress.by_position:
        say(f'{o.input} has few documents: the last {o.held_out_by_position:.3g} of each is test, '
            'as much before that val')
        progress = Progress(progress.config, source.name, progress.listing, by_position=True)
        tokenize(o, source, tokenizer, writer, progress)
    empty = [split for split in SPLITS if not writer.tokens[split]]
    if len(empty) == 3 or (empty and o.held_out):
        writer.rewind(dict.fromkeys(SPLITS, 0))
        os.remove(path('progress.json'))
        fail(f'{o.input} holds too little text for {" and ".join(empty)}, or too few spaces and '
             'line ends to cut it at: give more (prepare_slimpajama.py --held_out=0: train alone)')

    # meta.json last: a folder with it is whole
    writer.flush()
    splits = writer.describe(tokenizer.bos)
    write_whole(path('meta.json'), json.dumps({
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': splits, 'config': o.identity(), 'source': source.name,
        'listing': progress.listing, 'by_position': progress.by_position,
        'files': progress.files, 'skipped': progress.skipped}, indent=1).encode())
    os.remove(path('progress.json'))
    for split, of in splits.items():
        say(f'{split:5} {of["tokens"]:>15,} tokens {of["documents"]:>11,} documents '
            f'{len(of["shards"]):>4} shards')
    for name, why in progress.skipped.items():
        say(f'left out: {name}: {why}')


def check_same(o: PrepareConfig, found: dict[str, Any], source: Source | None) -> None:
    """The options and the files must be those of the folder's meta.json or progress.json."""
    before = found.get('config')
    if not isinstance(before, dict):
        fail(f'{o.out_dir} holds a meta.json of something else: choose another --out_dir')
    different = [f'{name}={before.get(name)}, not {value}'
                 for name, value in o.identity().items() if before.get(name) != value]
    if source and source.listing() != found.get('listing'):
        different.append(f'{o.input} has changed since')
    if different:
        fail(f'{o.out_dir} was made otherwise: {"; ".join(different)}. Choose another --out_dir')


def tokenize(o: PrepareConfig, source: Source, tokenizer: Any, writer: Writer,
             progress: Progress) -> None:
    """All documents from file number progress.file on to the writer, until there are enough."""
    writer.rewind(progress.tokens)
    progress.save(o.out_dir)

    # The most tokens of each split; the run ends when those of `needed` have them
    own = {file.split for file in source.files}
    held_out, needed = o.held_out, ('train',)
    limit = {split: round(o.tokens * held_out) if split in own else sys.maxsize for split in SPLITS}
    if progress.by_position:  # val and test are met only after train
        held_out, needed = o.held_out_by_position, SPLITS
        limit = dict.fromkeys(SPLITS, max(1, round(o.tokens * held_out)))
    limit['train'] = o.tokens

    with tqdm(unit=' tokens', unit_scale=True, mininterval=1, leave=False) as bar:
        for file in source.files[progress.file:]:
            progress.file += 1
            drawn = file.split or 'train'
            if writer.tokens[drawn] >= limit[drawn]:
                continue
            # a split that the source has files of is drawn from no others
            become = {split: drawn if drawn != 'train' or split in own else split
                      for split in SPLITS}
            before = dict(writer.tokens)
            path = source.path(file)
            try:
                with open(path, 'rb', 1 << 20) as opened:
                    progress.files.append(file.name)
                    parts = read_parts(opened, o.column, held_out, become, progress.by_position)
                    for split, ids in encode(parts, tokenizer, o.workers):
                        writer.append(split, ids[:limit[split] - writer.tokens[split]])
                        bar.update(len(ids))
                        if all(writer.tokens[split] >= limit[split] for split in needed):
                            return
            except Bad as error:
                if not o.skip_bad:
                    fail(f'{path}: {error}; prepare_slimpajama.py --skip_bad leaves it out')
                progress.skipped[progress.files.pop()] = str(error)
                writer.rewind(before)
            if sum(writer.tokens.values()) - sum(progress.tokens.values()) >= SAVE_TOKENS:
                writer.flush()
                progress.tokens = dict(writer.tokens)
                progress.save(o.out_dir)


# Its callers

@contextmanager
def in_one_line(folder: str) -> Iterator[None]:
    """What the machine refuses, and Ctrl-C, end the program with one line."""
    try:
        yield
    except OSError as error:
        fail(f'{error.filename or folder}: {error.strerror or error}; the same command goes on')
    except KeyboardInterrupt:
        fail('stopped; the same command goes on')


def run(o: PrepareConfig) -> None:
    """prepare, alone in the folder. A new folder goes again where nothing comes of it."""
    new = not os.path.exists(o.out_dir)
    os.makedirs(o.out_dir, exist_ok=True)
    path = os.path.join(o.out_dir, '.lock')
    handle = lock(path)
    if handle is None:
        say(f'{o.out_dir} is being prepared by another process: waiting for it')
        handle = lock(path, wait=True)
    try:
        prepare(o)
    except SystemExit:
        if new and not any(map(OUR_SHARD.fullmatch, os.listdir(o.out_dir))):
            shutil.rmtree(o.out_dir)
        raise
    finally:
        os.close(handle)


def find_data(folder: str, text: str | None = None, tokenizer: str | None = None) -> str:
    """The data folder: made from a text of the user's, or, at first use, from this Python's."""
    with in_one_line(text or folder):
        if text:
            return prepare_text(text, tokenizer)
        parent, name = os.path.split(folder.rstrip('/'))
        if parent == 'data' and name in OWN_TEXTS and not os.path.exists(f'{folder}/meta.json'):
            say(f"Preparing {folder} from this Python's own text")
            run(PrepareConfig(input=name))
    return folder


def prepare_text(path: str, tokenizer: str | None) -> str:
    """A text of one's own, one file or a folder, as a data folder under data/, named after the
    text, its content and the tokenizer: made once, and anew after a change."""
    o = build(PrepareConfig, {'input': path, 'tokenizer': tokenizer or 'byte'})
    source = find_source(o.input)
    size = sum(file.size for file in source.files)
    if size < SMALL_TEXT:
        o.held_out = 0.05
    elif not tokenizer:
        o.tokenizer = 'llama'
    o.least = min(4096, size // 100)
    digest = hashlib.sha256(os.fsencode(f'{source.name} {o.tokenizer}'))
    for file in source.files:
        digest.update(os.fsencode(file.name))
        if not source.name.startswith(HUB):  # whose commit is in the name
            with open(source.path(file), 'rb') as opened:
                digest.update(hashlib.file_digest(opened, 'sha256').digest())
    o.out_dir += '-' + digest.hexdigest()[:8]
    if not os.path.exists(os.path.join(o.out_dir, 'meta.json')):
        tokens = 'one token a byte' if o.tokenizer == 'byte' else f'tokenizer {o.tokenizer}'
        say(f'Preparing {path}, {size / 1e6:,.1f} MB, in {o.out_dir}: {tokens}')
        run(o)
    return o.out_dir


def main(argv: list[str]) -> None:
    o = build(PrepareConfig, read_options(argv, PrepareConfig))
    with in_one_line(o.out_dir):
        run(o)


if __name__ == '__main__':
    main(sys.argv[1:])

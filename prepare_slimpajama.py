"""
Turn SlimPajama, or any text, into token shards that train.py reads.

    python prepare_slimpajama.py                      the paper's subset: 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --size=86m           as much as one model needs
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    python prepare_slimpajama.py --input=FOLDER --tokenizer=bpe2048
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT
    python prepare_slimpajama.py --input=corpus       what results/earlier was trained on

Documents keep their order. A BOS token begins each, and they are concatenated in train_00000.bin,
..., val.bin and test.bin (little-endian unsigned integers). meta.json describes them. The folder
appears when it is complete. A preparation that was stopped begins again; downloads are kept.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
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
from nanocem.tokenizers import (
    CUT,
    MODEL_FILE,
    SentencePieceTokenizer,
    make_tokenizer,
    tokenizer_of,
    train_bpe,
)

HUB = 'hf://datasets/'
SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # a mirror of Llama 1's and 2's
# 20 tokens a parameter, and 1% more
SIZES = {'86m': 1.75e9, '108m': 2.2e9, '134m': 2.7e9, '162m': 3.3e9, '256m': 5.2e9}
OWN_TEXTS = {'builtin': ('byte', 0.05), 'corpus': ('byte', 0.01)}  # tokenizer, held_out
# The default tokenizer of train.py --text: the first whose number of bytes exceeds the text's
TEXT_TOKENIZERS = {4e6: 'byte', 20e6: 'bpe1024', 100e6: 'bpe2048', 1e9: 'bpe4096',
                   math.inf: 'bpe32000'}
SUFFIXES = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz', '.txt')
LIBRARY = sysconfig.get_paths()['stdlib']
SPLITS = ('train', 'val', 'test')
SPLIT_IN_NAME = re.compile(r'(?:^|[/._-])(train|val|test)(?:(?<=val)id(?:ation)?)?(?=[/._-])', re.I)
PART = 1 << 16  # characters a thread gets at a time; longer documents are cut
LONGEST_PART = 1 << 20  # characters; a longer part ends inside a word
BATCH = 1 << 21  # characters all threads get at a time
BPE_TEXT = 32_000_000  # bytes of text that a tokenizer is trained on
TOKEN_BYTES = 8  # more bytes than a token has on average
FEW_TOKENS = 4096  # a held-out split of fewer gets a warning


@dataclass
class PrepareConfig:
    """Where the text comes from and what becomes of it."""
    input: str = SLIMPAJAMA  # path, builtin, corpus, hf://datasets/OWNER/NAME[@REV][/FOLDER]
    out_dir: str | None = None  # the data folder; default: data/ and the name of the input
    tokens: int | None = None  # training tokens, or as many as there are; default 3.3B
    size: Literal['86m', '108m', '134m', '162m', '256m'] | None = None  # tokens for such a model
    tokenizer: str | None = None  # llama, gpt2, byte, bpe2048 (trained), FILE.model; default llama
    held_out: float | None = None  # share of val, and of test; default 0.005, builtin 0.05
    seed: int = 0  # shuffle the order of the files; 0: by name
    column: str = 'text'  # the column of .parquet files, the field of .jsonl lines
    shard_tokens: int = 100_000_000  # tokens a shard of the train split
    workers: int = os.cpu_count() or 1  # threads; default: one a core
    skip_bad: bool = False  # leave damaged files out, and name them

    def __post_init__(self) -> None:
        require(not (self.tokens and self.size), 'tokens and size: give one')
        require('' not in (self.input, self.out_dir), 'input= or out_dir= is empty')
        tokenizer, held_out = OWN_TEXTS.get(self.input, ('llama', 0.005))
        # If documents are few, the end of the text is held out instead of some documents.
        self.held_out_end = 0.05 if self.held_out is None else self.held_out
        self.min_bytes = 1  # documents are few if a split gets fewer bytes
        tokens = round(SIZES[self.size or '162m'])
        resolve_defaults(self, tokens=tokens, tokenizer=tokenizer, held_out=held_out)
        in_range(self, 1, 10**15, 'tokens shard_tokens')
        in_range(self, 1, 1024, 'workers')
        in_range(self, 0, 0.49, 'held_out')

        self.model_file: str | None = None  # the SentencePiece model that --tokenizer names
        pieces = re.fullmatch(r'bpe(\d{1,9})', self.tokenizer)
        if pieces:
            require(512 <= int(pieces[1]) <= 65_536,
                    f'tokenizer={self.tokenizer}: expected bpe512 to bpe65536')
        elif self.tokenizer not in ('llama', 'gpt2', 'byte'):
            require(os.path.isfile(self.tokenizer), f'tokenizer={self.tokenizer}: no such file, '
                    'and none of llama, gpt2, byte, bpe2048')
            self.model_file = self.tokenizer
            model = SentencePieceTokenizer(self.model_file)
            self.tokenizer = 'llama' if model.name == 'llama' else f'{model.name} {model.sha256:.8}'

        name = os.path.basename(self.input).partition('.')[0] or 'text'
        if self.input.startswith(HUB):
            name = '-'.join(self.input.removeprefix(HUB).rstrip('/').split('/')[1:])
        elif self.input not in OWN_TEXTS:
            self.input = os.path.abspath(self.input)
        name = 'slimpajama' if self.input == SLIMPAJAMA else name
        resolve_defaults(self, out_dir=f'data/{name}')

    def identity(self) -> dict[str, Any]:
        """Return what the bytes of a data folder depend on, beside the files."""
        names = ('input', 'tokenizer', 'tokens', 'held_out', 'seed', 'column', 'shard_tokens')
        return {name: getattr(self, name) for name in names}


# Files

class File(NamedTuple):
    """A file of a source."""
    name: str  # below the source's folder
    size: int  # bytes
    split: str | None = None  # train, val or test, where the file's name says so


class Source(NamedTuple):
    """Files of documents, in the order they are read."""
    name: str  # a path, 'builtin', 'corpus', or hf://datasets/OWNER/NAME@COMMIT
    folder: str  # the folder of the files; the Hub's are in its cache
    files: list[File]
    left_out: list[str]  # names of files of other kinds

    def splits(self) -> set[str | None]:
        """Return the splits that files are named after."""
        return {file.split for file in self.files}

    def digest(self, tokenizer: str) -> str:
        """Hash the tokenizer and all files, names and contents, to eight digits."""
        digest = hashlib.sha256(os.fsencode(f'{self.name} {tokenizer}'))
        for file in self.files:
            digest.update(os.fsencode(file.name))
            if not self.name.startswith(HUB):  # a commit, which is in the name, never changes
                with open(self.path(file), 'rb') as opened:
                    digest.update(hashlib.file_digest(opened, 'sha256').digest())
        return digest.hexdigest()[:8]

    def path(self, file: File) -> str:
        """Return the path of a file. A file of the Hub is downloaded to its cache first."""
        if not self.name.startswith(HUB):
            return os.path.join(self.folder, file.name)
        repository, commit = self.name.removeprefix(HUB).split('@')
        with hub() as hf:
            return hf.HfApi().hf_hub_download(repository, file.name, repo_type='dataset',
                                              revision=commit.split('/')[0])


def find_source(where: str, seed: int = 0, option: str = 'input') -> Source:
    """List the files of an --input: held-out splits first, the rest by name, or shuffled if there
    is a seed. UserError if there are none."""
    name, folder = where, where
    if where in OWN_TEXTS:
        names = list_builtin() if where == 'builtin' else list_corpus()
        return Source(where, LIBRARY, add_sizes(LIBRARY, names), [])
    if where.startswith(HUB):
        name, files = list_hub(where)
    elif os.path.isdir(where):
        files = add_sizes(where, list_files(where))
    elif os.path.isfile(where):
        folder, base = os.path.split(where)
        return Source(name, folder, add_sizes(folder, [base]), [])
    else:
        fail(f'{option}={where}: no such file or folder')
    left_out = [file.name for file in files if not file.name.lower().endswith(SUFFIXES)]
    files = [file for file in files if file.name.lower().endswith(SUFFIXES)]
    if not files:
        fail(f'{option}={where} holds no {", ".join(SUFFIXES)} file')
    # Without a file named train, "test" is only a folder that happens to be called so.
    splits = [SPLIT_IN_NAME.search(file.name) for file in files]
    splits = [match and match[1].lower() for match in splits]
    if 'train' in splits:
        files = [file._replace(split=split) for file, split in zip(files, splits, strict=True)]
    if seed:
        files.sort(key=lambda file: hashlib.sha256(os.fsencode(f'{seed}:{file.name}')).digest())
    files.sort(key=lambda file: file.split not in ('val', 'test'))
    return Source(name, folder, files, left_out)


def list_files(root: str) -> list[str]:
    """List the files below a folder by name, its own before those of its subfolders. Hidden files
    and pipes are left out, links are followed, and no folder is read twice."""
    names, seen = [], set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        paths = [os.path.join(folder, name) for name in sorted(files) if name[0] != '.']
        if real not in seen:
            names += [os.path.relpath(path, root) for path in paths if os.path.isfile(path)]
        subfolders[:] = sorted(name for name in subfolders if name[0] != '.' and real not in seen)
        seen.add(real)
    return names


def add_sizes(folder: str, names: Iterable[str]) -> list[File]:
    return [File(name, os.path.getsize(os.path.join(folder, name))) for name in names]


def list_builtin(leave_out: Iterable[str] = ('test', 'tests', 'idle_test'),
                 suffixes: str | tuple[str, ...] = '.py') -> list[str]:
    """List the files of Python's own library, without its tests."""
    leave_out = {'site-packages', 'dist-packages', '__pycache__', *leave_out}
    return [name for name in list_files(LIBRARY)
            if name.endswith(suffixes) and leave_out.isdisjoint(name.split('/'))]


def list_corpus() -> list[str]:
    """List source and English of the standard library and of the packages in requirements.txt. No
    content appears twice, and none is blank or not UTF-8."""
    suffixes = ('.py', '.md', '.rst', '.txt')
    paths = [os.path.join(LIBRARY, name) for name in list_builtin((), suffixes)]
    with open(os.path.join(os.path.dirname(__file__), 'requirements.txt')) as lines:
        packages = [re.split(r'[=;<>~ ]', line)[0] for line in lines if re.match(r'\w', line)]
    packages.remove('filelock')  # it was required only after the corpus was fixed
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
    """Give access to the Hub. UserError whatever goes wrong with it."""
    import huggingface_hub
    try:
        yield huggingface_hub
    except Exception as error:  # the HTTP library's own too, too many to name
        fail(f'the Hugging Face Hub: {error} (is there a network? what was downloaded is kept)')


def list_hub(where: str) -> tuple[str, list[File]]:
    """Return `where` with its current commit, and its files."""
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
    """Yield the documents of a file, each as a function that reads it in chunks from its beginning.
    BadFile if the file is damaged."""
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
            # Half a surrogate pair, which JSON can spell, is not text.
            whole = (text or '').encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
            yield partial(iter, [whole])
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadFile(str(error).partition('\n')[0]) from error


def read_parquet(path: str, column: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile
    # Without buffer_size and pre_buffer, pyarrow keeps all that it has read in memory.
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
                    raise BadFile(f'line {number} is no JSON with "{column}" (--column chooses)'
                                  ) from None


class Part(NamedTuple):
    """A part of a document that can be tokenized by itself."""
    split: str
    text: str
    begins: bool  # whether a document begins with it


def split_text(chunks: Iterable[str], size: int = PART) -> Iterator[str]:
    """Cut a document into parts of `size` characters or, up to the next space or line end, more."""
    rest = ''
    for chunk in chunks:
        searched = len(rest) - 1  # all but the last character, which had nothing after it yet
        rest += chunk
        at = 0
        while found := CUT.search(rest, max(at + size - 1, searched)):
            yield rest[at:found.end()]
            at = found.end()
        rest = rest[at:]
        if len(rest) > LONGEST_PART:  # a text without spaces
            yield rest
            rest = ''
    if rest:
        yield rest


def read_parts(o: PrepareConfig, source: Source, ends: dict[str, int] | None,
               skipped: dict[str, str], is_full: Callable[[str], bool]) -> Iterator[Part]:
    """Yield the parts of all documents, each with its split: by hash, or by position if there are
    `ends`. Files of a full split are not opened. Damaged files are added to `skipped`, or end the
    program."""
    splits = source.splits()
    position = 0  # bytes of the documents read so far
    for file in source.files:
        if is_full(file.split or 'train'):
            continue
        path = source.path(file)
        try:
            for chunks in read_documents(path, o.column):
                named = file.split in ('val', 'test')
                split = file.split if named else split_by_hash(chunks, 0 if ends else o.held_out)
                if not named and split in splits:
                    split = 'train'  # val or test has files of its own
                for n, text in enumerate(split_text(chunks())):
                    part = Part(split, text, n == 0)
                    if named or ends is None:
                        yield part
                    else:
                        yield from split_by_position(part, position, ends)
                        position += len(text.encode())
        except BadFile as error:
            if not o.skip_bad:
                fail(f'{path}: {error}; prepare_slimpajama.py --skip_bad leaves it out')
            skipped[file.name] = str(error)
        if ends and position >= max(ends.values()):
            return


def split_by_hash(chunks: Callable[[], Iterator[str]], held_out: float) -> str:
    """Choose the split of a document by a hash of its text: val and test each get a share of
    `held_out`."""
    if not held_out:
        return 'train'
    digest = hashlib.sha256()
    for chunk in chunks():
        digest.update(chunk.encode())
    x = int.from_bytes(digest.digest()[:8], 'big') / 2 ** 64
    return 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'


def split_by_position(part: Part, position: int, ends: dict[str, int]) -> Iterator[Part]:
    """Cut a part that begins `position` bytes into the text at the first space or line end after
    the end of each split. Text after the last end is left out."""
    text, begins = part.text, part.begins
    for split, end in ends.items():
        content = text.encode()
        at = len(text)
        if position + len(content) > end:
            at = len(content[:max(0, end - position)].decode(errors='ignore'))
            found = CUT.search(text, at)
            at = found.end() if found and at else at
        if at:
            yield Part(split, text[:at], begins)
            position += len(text[:at].encode())
            text, begins = text[at:], False


def find_ends(o: PrepareConfig, source: Source, skipped: dict[str, str]) -> dict[str, int] | None:
    """Find at which bytes train, val and test end if documents are so few that their hashes would
    leave a split empty. None if there are enough."""
    drawn = [split for split in SPLITS if split == 'train' or split not in source.splits()]
    if not o.held_out or len(drawn) == 1:
        return None
    sizes = dict.fromkeys(SPLITS, 0)
    for part in read_parts(o, source, None, skipped, lambda split: split != 'train'):
        sizes[part.split] += len(part.text.encode())
        # Half: every token has at least one byte, except BOS and a space that Llama's model adds.
        if 2 * sizes['train'] <= o.tokens and min(sizes[split] for split in drawn) >= o.min_bytes:
            return None
        if sizes['train'] > TOKEN_BYTES * o.tokens:
            break
    say(f'{o.input} has few documents: the last {o.held_out_end:.3g} of the text is {drawn[-1]}'
        + ', as much before that val' * (len(drawn) == 3))
    total = sum(sizes.values())
    shares = {'train': len(drawn) - 1, 'val': len(drawn) - 2, 'test': 0}
    return {split: total - shares[split] * round(o.held_out_end * total) for split in drawn}


# Shards

class Writer:
    """The shards of a folder while they grow: several of the train split, one of val and test."""
    def __init__(self, folder: str, vocab_size: int, shard_tokens: int):
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = np.dtype('<u2' if vocab_size <= 2 ** 16 else '<u4')
        self.shards: dict[str, dict[str, int]] = {split: {} for split in SPLITS}  # file: tokens

    def tokens(self, split: str) -> int:
        return sum(self.shards[split].values())

    def append(self, split: str, ids: np.ndarray) -> None:
        while len(ids):
            name, room = f'{split}.bin', len(ids)
            if split == 'train':
                number, used = divmod(self.tokens(split), self.shard_tokens)
                name, room = f'train_{number:05d}.bin', self.shard_tokens - used
            with open(os.path.join(self.folder, name), 'ab') as file:
                file.write(ids[:room].astype(self.dtype).tobytes())
            self.shards[split][name] = self.shards[split].get(name, 0) + len(ids[:room])
            ids = ids[room:]

    def describe(self) -> dict[str, Any]:
        """Return the entry `splits` of meta.json."""
        return {split: {'tokens': self.tokens(split), 'shards': [
            {'file': name, 'tokens': n} for name, n in shards.items()]}
            for split, shards in self.shards.items()}


# The data folder

def prepare(o: PrepareConfig, source: Source | None = None) -> None:
    """Make the data folder o.out_dir unless it exists. It grows in a hidden folder beside it, which
    is renamed when it is complete. UserError, OSError."""
    if is_prepared(o):
        return
    source = source or find_source(o.input, o.seed)
    parent, name = os.path.split(os.path.realpath(o.out_dir))
    folder = os.path.join(parent, f'.{name}.partial')
    os.makedirs(parent, exist_ok=True)
    with locked(os.path.join(parent, f'.{name}.lock'), f'{o.out_dir} is being prepared'):
        if is_prepared(o):
            return
        try:
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
            os.mkdir(folder)
            meta = write_folder(o, source, folder)
            os.replace(folder, os.path.join(parent, name))
        except OSError as error:
            error.filename = error.filename or folder
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    for split, content in meta['splits'].items():
        say(f'{split:5} {content["tokens"]:>15,} tokens')
        if 0 < content['tokens'] < FEW_TOKENS and split != 'train':
            say(f'WARNING: {split} has so few tokens that its perplexity says little')
    for name, why in meta['skipped'].items():
        say(f'damaged, left out from there on: {name}: {why}')


def is_prepared(o: PrepareConfig) -> bool:
    """Whether o.out_dir was made with these options. UserError if it was made with other options,
    or holds anything else."""
    if meta := read_json(os.path.join(o.out_dir, 'meta.json'), 'choose another --out_dir'):
        was = meta.get('config')
        if not isinstance(was, dict):
            fail(f"{o.out_dir} holds another program's meta.json: choose another --out_dir")
        if different := [f'{name}={was.get(name)}, not {value}'
                         for name, value in o.identity().items() if was.get(name) != value]:
            fail(f'{o.out_dir} was made otherwise: {"; ".join(different)}. Choose another '
                 '--out_dir')
        say(f'{o.out_dir} is prepared already; delete it to prepare it anew')
    elif os.path.exists(o.out_dir) and os.listdir(o.out_dir):
        fail(f'{o.out_dir} holds other files: choose another --out_dir')
    return meta is not None


def write_folder(o: PrepareConfig, source: Source, folder: str) -> dict[str, Any]:
    """Write tokenizer, shards and meta.json to an empty folder, and return the content of
    meta.json."""
    if names := source.left_out:
        say(f'left out: {len(names):,} files of other kinds, for example {", ".join(names[:5])}')
    for split in SPLITS:
        if names := [file.name for file in source.files if file.split == split]:
            say(f'{split}: {", ".join(names[:3])}' + f' and {len(names) - 3:,} more files'
                * (len(names) > 3))
    skipped: dict[str, str] = {}
    ends = find_ends(o, source, skipped)
    tokenizer = find_tokenizer(o, source, folder, ends)
    writer = Writer(folder, tokenizer.vocab_size, o.shard_tokens)
    tokenize(o, source, ends, tokenizer, writer, skipped)
    empty = [split for split in SPLITS if not writer.tokens(split)]
    if 'train' in empty or (empty and o.held_out):
        fail(f'{o.input} holds too little text for {" and ".join(empty)}: give more '
             '(prepare_slimpajama.py --held_out=0 makes train alone)')
    meta = {
        'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
        'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name,
        'splits': writer.describe(), 'config': o.identity(), 'source': source.name,
        'files': [file.name for file in source.files], 'skipped': skipped}
    write_atomic(os.path.join(folder, 'meta.json'), json.dumps(meta, indent=1).encode())
    return meta


def find_tokenizer(o: PrepareConfig, source: Source, folder: str,
                   ends: dict[str, int] | None) -> Any:
    """Make the tokenizer of the options. A SentencePiece model is put into the folder: Llama's, the
    user's file, or one that is trained on the train split."""
    model = os.path.join(folder, MODEL_FILE)
    if o.model_file:
        shutil.copyfile(o.model_file, model)
    elif o.tokenizer == 'llama':
        with hub() as hf:
            shutil.copyfile(hf.HfApi().hf_hub_download(*LLAMA), model)
    elif o.tokenizer.startswith('bpe'):
        train_bpe(model, int(o.tokenizer.removeprefix('bpe')), sample_train(o, source, ends))
    tokenizer = make_tokenizer(o.tokenizer, model)
    if o.model_file and tokenizer.model.bos_id() < 0:
        piece = tokenizer.model.id_to_piece(tokenizer.bos)
        say(f'{o.model_file} has no BOS: {piece} begins each document')
    return tokenizer


def sample_train(o: PrepareConfig, source: Source, ends: dict[str, int] | None) -> list[str]:
    """Read at most BPE_TEXT bytes of the train split, evenly spaced through it."""
    texts: list[str] = []
    stride, kept, total = 1, 0, 0
    parts = read_parts(o, source, ends, {}, lambda split: split != 'train')
    for n, part in enumerate(part for part in parts if part.split == 'train'):
        size = len(part.text.encode())
        total += size
        if n % stride == 0:
            texts.append(part.text)
            kept += size
        if kept > BPE_TEXT:
            texts = texts[::2]
            stride *= 2
            kept = sum(len(text.encode()) for text in texts)
        if total > TOKEN_BYTES * o.tokens:
            break
    say(f'Training the tokenizer {o.tokenizer} on {kept / 1e6:.2f} of {total / 1e6:.2f} MB of text')
    return texts


def tokenize(o: PrepareConfig, source: Source, ends: dict[str, int] | None, tokenizer: Any,
             writer: Writer, skipped: dict[str, str]) -> None:
    """Write the tokens of all documents, until the train split has o.tokens of them."""
    limit = dict.fromkeys(SPLITS, sys.maxsize) | {'train': o.tokens}
    for split in ('val', 'test'):
        if ends or split in source.splits():
            limit[split] = max(1, round(o.tokens * (o.held_out_end if ends else o.held_out)))

    def room(split: str) -> int:
        return limit[split] - writer.tokens(split)

    parts = read_parts(o, source, ends, skipped, lambda split: room(split) <= 0)
    bos = np.array([tokenizer.bos])
    with tqdm(unit=' tokens', unit_scale=True, mininterval=1, leave=False, disable=None) as bar:
        for batch in batches(parts, room):
            ids: dict[str, list[np.ndarray]] = {split: [bos[:0]] for split in SPLITS}
            encoded = tokenizer.encode_parts(batch, o.workers)
            for part, part_ids in zip(batch, encoded, strict=True):
                ids[part.split] += [bos[:part.begins], part_ids]
            for split, arrays in ids.items():
                new = np.concatenate(arrays)[:room(split)]
                writer.append(split, new)
                bar.update(len(new))
            if ends is None and room('train') <= 0:
                return


def batches(parts: Iterable[Part], room: Callable[[str], int]) -> Iterator[list[Part]]:
    """Group parts into batches for all threads, small ones when a split has little room left. Parts
    of a full split are left out."""
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
              source_state: dict[str, Any] | None = None) -> str:
    """Return the data folder. For a user's text, data/builtin and data/corpus it is made on first
    use. A text without a `tokenizer` gets that of the checkpoint `source_state`, if there is one,
    so that training can continue from its weights. UserError, OSError."""
    if text:
        if source_state and not tokenizer:
            origin = tokenizer_of(source_state)
            tokenizer = origin.path or origin.name
        return prepare_text(text, tokenizer)
    parent, name = os.path.split(os.path.relpath(folder))
    if parent == 'data' and name in OWN_TEXTS and not os.path.exists(f'{folder}/meta.json'):
        say(f"Preparing {folder} from this Python's own text")
        prepare(PrepareConfig(input=name))
    return folder


def prepare_text(path: str, tokenizer: str | None) -> str:
    """Prepare a user's text, a file or a folder, below data/, and return the data folder. Its name
    contains a hash of the text and the tokenizer, so that a changed text is prepared anew."""
    if path in OWN_TEXTS:
        path = os.path.join('.', path)  # the user's folder of that name
    source = find_source(path if path.startswith(HUB) else os.path.abspath(path), option='text')
    size = sum(file.size for file in source.files)
    tokenizer = tokenizer or next(name for most, name in TEXT_TOKENIZERS.items() if size < most)
    held_out = 0.05 if size < 20e6 else 0.005
    o = PrepareConfig(input=path, tokenizer=tokenizer, held_out=held_out)
    o.min_bytes = min(FEW_TOKENS, size // 100)
    o.out_dir += f'-{source.digest(o.tokenizer)}'
    if not os.path.exists(os.path.join(o.out_dir, 'meta.json')):
        tokens = 'one token a byte' if o.tokenizer == 'byte' else f'tokenizer {o.tokenizer}'
        say(f'Preparing {path}, {size / 1e6:,.2f} MB, in {o.out_dir}: {tokens}')
        prepare(o, source)
    return o.out_dir


@command_line
def main(argv: list[str]) -> None:
    prepare(build(PrepareConfig, read_options(argv, PrepareConfig)))


if __name__ == '__main__':
    main(sys.argv[1:])

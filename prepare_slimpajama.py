"""
SlimPajama, or any text, to token shards that train.py reads.

    python prepare_slimpajama.py                                            the paper's subset: 3.3 B tokens from the Hub
    python prepare_slimpajama.py --size=86m --workers=16                    as much as one model needs
    python prepare_slimpajama.py --input=FOLDER --tokenizer=tokenizer.model .parquet, .jsonl, .jsonl.zst, .txt files
    python prepare_slimpajama.py --input=builtin                            the Python standard library's source
    python prepare_slimpajama.py --verify --out_dir=data/slimpajama         check every shard fully
    python prepare_slimpajama.py --peek=val --out_dir=data/slimpajama       read the first documents of a split

Documents are tokenized in their order, BOS before each, and laid end to end: train_00000.bin, ..., val.bin, test.bin
(little-endian unsigned integers) and meta.json. A killed run goes on where it was when the same command is given again; the
bytes depend neither on kills nor on the number of workers.
"""
import argparse
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape, glob
from itertools import accumulate, chain, pairwise
from multiprocessing import get_context, parent_process
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
from tqdm import tqdm

from nanocem.files import read_json, write_whole
from nanocem.shards import FORMAT, read_meta
from nanocem.tokenizers import LlamaTokenizer, load_tokenizer, make_tokenizer

SPLITS = ('train', 'val', 'test')
HUB = 'hf://datasets/'
SLIMPAJAMA = HUB + 'gmongaras/SlimPajama-627B_Reupload'
LLAMA = ('hf-internal-testing/llama-tokenizer', 'tokenizer.model')  # a public mirror of the Llama 1 and 2 tokenizer
SIZES = {'86m': 1.75e9, '108m': 2.2e9, '134m': 2.7e9, '162m': 3.3e9, '256m': 5.2e9}  # 20 tokens a parameter, and 1% more
SUFFIXES = ('.parquet', '.jsonl', '.jsonl.zst', '.txt')
BATCH = 1 << 19  # characters a worker gets at a time; longer documents are cut
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1  # macOS has none
SAVE_SECONDS = 1.0  # between two notes of how far the run has come: what a kill can lose
# A space or line end after something else: no token of any of our tokenizers crosses it (BPE words of gpt2 begin there, no
# Llama piece holds a space after a letter, nor a line end), so that both sides can be tokenized apart.
CUT = re.compile('[^\\s\u2581](?=[ \\n])')


def fail(message: str) -> NoReturn:
    raise SystemExit(f'prepare_slimpajama.py: {message}')


def ask_hub(repo: str, question: Callable[[Any], Any]) -> Any:
    """question(HfApi()); whatever goes wrong ends the program with one line."""
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import disable_progress_bars
    disable_progress_bars()
    api = HfApi()
    try:
        return question(api)
    except errors.GatedRepoError:
        fail(f'{repo} is gated: accept its terms on {api.endpoint}, then give your token in HF_TOKEN')
    except errors.RevisionNotFoundError:
        fail(f'{repo} on {api.endpoint} has no such revision')
    except errors.RepositoryNotFoundError:
        fail(f'{repo} is not on {api.endpoint}, or is private: check the name, and HF_TOKEN if you have access')
    except errors.RemoteEntryNotFoundError as error:
        fail(f'{repo} on {api.endpoint} has no such file: {error.response.url.path}')
    except Exception as error:  # the HTTP library's own, too many to name
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        cause = str(error.__cause__ or error).strip().partition('\n')[0]
        fail(f'cannot get {repo} from {api.endpoint}: {cause} (is there a network? the same command goes on from here)')


class File(NamedTuple):
    name: str  # below the source's folder
    size: int  # bytes
    split: str | None = None  # the source's own: train, val, test


@dataclass
class Source:
    """Files of documents, in the order they are read."""
    name: str  # a path, 'builtin', or hf://datasets/OWNER/NAME@COMMIT
    folder: str  # where the files are, or are downloaded to
    files: list[File]

    def fetch(self, file: File) -> Future:
        """The path of a file, once it is there."""
        if self.name.startswith(HUB):
            repo, _, commit = self.name.removeprefix(HUB).partition('@')
            return in_thread(ask_hub, repo, lambda api: api.hf_hub_download(
                repo, file.name, repo_type='dataset', revision=commit, local_dir=self.folder))
        here: Future = Future()
        here.set_result(os.path.join(self.folder, file.name))
        return here

    def paths(self, first: int, wanted: Callable[[File], bool]) -> Iterator[tuple[int, str | None]]:
        """(number, path) of the wanted files from number `first` on. The next is downloaded while one is read; before a wait
        for it comes (number, None)."""
        ready: tuple[int, Future] | None = None
        for number in [*range(first, len(self.files)), None]:
            if number is not None and not wanted(self.files[number]):
                continue
            coming = None if number is None else (number, self.fetch(self.files[number]))
            if ready:
                if not ready[1].done():
                    yield ready[0], None
                yield ready[0], ready[1].result()
            ready = coming

    def release(self, file: File) -> None:
        """A downloaded file is not kept once its tokens are safe."""
        if self.name.startswith(HUB):
            os.remove(os.path.join(self.folder, file.name))


def in_thread(function: Callable[..., Any], *args: Any) -> Future:
    """function(*args) in a thread that does not keep the program from ending, as an executor's would."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # SystemExit too: the main thread raises it
            future.set_exception(error)
    threading.Thread(target=work, daemon=True).start()
    return future


def find_source(where: str, seed: int, downloads: str) -> Source:
    """The files of a --input: its own held-out splits first, then by name, or shuffled where there is a seed."""
    name, folder = where, where
    if where.startswith(HUB):
        repo, _, revision = where.removeprefix(HUB).partition('@')
        commit = ask_hub(repo, lambda api: api.dataset_info(repo, revision=revision or None)).sha
        tree = ask_hub(repo, lambda api: list(api.list_repo_tree(repo, repo_type='dataset', revision=commit, recursive=True)))
        found = sorted((x.path, x.size) for x in tree if hasattr(x, 'size') and x.path.endswith(SUFFIXES))
        name, folder = f'{HUB}{repo}@{commit}', downloads
    elif where == 'builtin':
        folder = sysconfig.get_paths()['stdlib']
        found = list(walk(folder, ('.py',), {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}))
    elif os.path.isdir(where):
        found = list(walk(where, SUFFIXES, set()))
    elif os.path.isfile(where):
        folder, base = os.path.split(where)
        found = [(base, os.path.getsize(where))] if base.endswith(SUFFIXES) else []
    else:
        fail(f'--input={where}: no such file or folder; the Hub is {HUB}OWNER/NAME')
    if not found:
        fail(f'--input={where} holds no {", ".join(SUFFIXES)} file')
    own = {'train': 'train', 'valid': 'val', 'val': 'val', 'validation': 'val', 'test': 'test'}
    named = re.compile(rf'(?:^|/)({"|".join(own)})(?=[/._-])')
    files = [File(path, size, own[match[1]] if (match := named.search(path)) else None) for path, size in found]
    if where == 'builtin' or not any(file.split == 'train' for file in files):
        files = [file._replace(split=None) for file in files]  # a folder that happens to be called test
    if seed:
        files.sort(key=lambda file: hashlib.sha256(f'{seed}:{file.name}'.encode()).digest())
    return Source(name, folder, sorted(files, key=lambda file: file.split not in ('val', 'test')))


def walk(root: str, suffixes: tuple[str, ...], left_out: set[str]) -> Iterator[tuple[str, int]]:
    """(name, size) of the files below a folder: its own first, then those of its folders, by name."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in set(subfolders) - left_out if not s.startswith('.'))
        for name in sorted(names):
            if name.endswith(suffixes) and not name.startswith('.'):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, root), os.path.getsize(path)


class Bad(Exception):
    """A file that cannot be read to its end."""


@dataclass
class TextFile:
    """A text file as chunks of text, read anew at each pass: it may be larger than memory."""
    path: str

    def __iter__(self) -> Iterator[str]:
        with open(self.path, encoding='utf-8', errors='replace', newline='') as file:
            yield from iter(lambda: file.read(1 << 20), '')


def read_documents(path: str) -> Iterator[tuple[Iterable[str], float]]:
    """The documents of a file, each as chunks of text, and the share of the file read by then. Bad where it is damaged."""
    import pyarrow
    if path.endswith(('.txt', '.py')):
        yield TextFile(path), 1.0
        return
    try:
        for text, share in read_parquet(path) if path.endswith('.parquet') else read_jsonl(path):
            if not isinstance(text, str | None):
                raise Bad(f'a "text" that is no string but {text!r:.40}')
            yield [(text or '').encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')], share
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise Bad(str(error).partition('\n')[0]) from error


def read_parquet(path: str) -> Iterator[tuple[Any, float]]:
    from pyarrow.parquet import ParquetFile
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:  # or pyarrow keeps all it has read in memory
        if 'text' not in file.schema_arrow.names:
            raise Bad(f'no "text" column, only {", ".join(file.schema_arrow.names)}')
        done = 0
        for batch in file.iter_batches(64, columns=['text'], use_threads=False):
            for text in batch.column(0).to_pylist():
                done += 1
                yield text, done / file.metadata.num_rows


def read_jsonl(path: str) -> Iterator[tuple[Any, float]]:
    from pyarrow import CompressedInputStream, OSFile
    with OSFile(path) as raw:
        size = raw.size()
        if path.endswith('.zst') and not size:
            raise Bad('empty')
        stream = CompressedInputStream(raw, 'zstd') if path.endswith('.zst') else raw
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise Bad(f'line {number} is not JSON') from None
            if not isinstance(record, dict) or 'text' not in record:
                raise Bad(f'line {number} has no "text" field')
            yield record['text'], raw.tell() / size


def split_of(chunks: Iterable[str], held_out: float) -> str:
    """The split of a document, by a hash of its text alone: val and test get a share of `held_out` each."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk.encode())
    x = int.from_bytes(digest.digest()[:8], 'big') / 2 ** 64
    return 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'


def pieces(chunks: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """A document as (text, whether it begins it, whether it ends it), of BATCH characters or, up to the next CUT, more.
    Nothing for an empty one."""
    rest, begins = '', True
    for chunk in chunks:
        rest, at = rest + chunk, 0
        while cut := CUT.search(rest, at + BATCH - 1):
            yield rest[at:cut.end()], begins, False
            at, begins = cut.end(), False
        rest = rest[at:]
    if rest:
        yield rest, begins, True


class Batch(NamedTuple):
    """Work for a process: pieces of documents of one file, in their order."""
    file: int
    items: list[tuple[str, str, bool, bool]]  # split, and a piece
    documents: int | None  # read of the file by the end of the batch; None within a document
    share: float  # read of the file, about
    last: bool  # of its file
    bad: str = ''  # what is wrong with the file: nothing more comes of it


def batches(source: Source, first: int, skip: int, held_out: float, wanted: Callable[[File], bool]) -> Iterator[Batch | None]:
    """The documents of the wanted files, from document `skip` of file `first` on. None before a wait for a download."""
    own = {file.split for file in source.files}
    for number, path in source.paths(first, wanted):
        if path is None:
            yield None
            continue
        items, size, documents, share, bad = [], 0, 0, 0.0, ''
        try:
            for documents, (chunks, share) in enumerate(read_documents(path), 1):
                if number == first and documents <= skip:
                    continue
                split = source.files[number].split
                if split in (None, 'train'):
                    split = split_of(chunks, held_out)
                    split = 'train' if split in own else split  # the source has that split from elsewhere
                for piece in pieces(chunks):
                    items.append((split, *piece))
                    size += len(piece[0])
                    if size >= BATCH:
                        yield Batch(number, items, documents if piece[2] else None, share, False)
                        items, size = [], 0
        except Bad as error:
            items, bad = [], str(error)
        yield Batch(number, items, documents, share, True, bad)


def start_worker(name: str, model: str, eos: bool, child: bool) -> None:
    """Make encode_batch ready in this process."""
    global worker
    tokenizer = make_tokenizer(name, model)
    worker = tokenizer, [tokenizer.eos] if eos else []
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
        in_thread(lambda: (parent_process().join(), os._exit(1)))  # a killed one leaves no workers behind


def encode_batch(items: list[tuple[str, str, bool, bool]]) -> list[np.ndarray]:
    """The tokens of each piece."""
    tokenizer, eos = worker
    return [np.array([tokenizer.bos] * begins + tokenizer.encode(text, begins) + eos * ends, dtype=np.uint32)
            for _, text, begins, ends in items]


def encoded(work: Iterator[Batch | None], workers: int, setup: tuple[str, str, bool],
            ) -> Iterator[tuple[Batch, list[np.ndarray]]]:
    """Batches with their tokens, in their order, made by as many processes."""
    if workers == 1:
        start_worker(*setup, child=False)
        for batch in filter(None, work):
            yield batch, encode_batch(batch.items)
        return
    pool = ProcessPoolExecutor(workers, get_context('spawn'), start_worker, (*setup, True))
    try:
        under_way: deque[tuple[Batch, Future]] = deque()
        for batch in chain(work, [None]):
            if batch:
                under_way.append((batch, pool.submit(encode_batch, batch.items)))
            while under_way and (not batch or len(under_way) > 2 * workers):  # no more, so that memory stays flat
                done, future = under_way.popleft()
                yield done, future.result()
    except BrokenProcessPool:
        fail('a worker process was killed, for lack of memory? The same command with fewer --workers goes on from here')
    finally:
        pool.shutdown(cancel_futures=True)


class Writer:
    """The shards of a folder. They grow as NAME.part and get their names together, at the end."""
    def __init__(self, folder: str, dtype: np.dtype, bos: int, shard_tokens: int):
        self.folder, self.dtype, self.bos, self.shard_tokens = folder, dtype, bos, shard_tokens
        self.open: dict[str, BinaryIO] = {}

    def shards(self, split: str) -> list[tuple[str, int]]:
        """(file name, tokens) of the shards of a split; val and test have one."""
        total, size = self.tokens[split], self.shard_tokens
        if split != 'train':
            return [(f'{split}.bin', total)] if total else []
        return [(f'train_{i:05d}.bin', min(size, total - i * size)) for i in range(-(-total // size))]

    def rewind(self, tokens: dict[str, int]) -> None:
        """Go back to so many tokens a split."""
        for file in self.open.values():
            file.close()
        self.open, self.tokens = {}, dict(tokens)
        for path in glob(os.path.join(escape(self.folder), '*.bin')):  # the run was stopped while it named them
            os.replace(path, path + '.part')
        right = {name: count * self.dtype.itemsize for split in SPLITS for name, count in self.shards(split)}
        there = {os.path.basename(path)[:-5]: path for path in glob(os.path.join(escape(self.folder), '*.bin.part'))}
        for name, size in right.items():
            if name not in there or os.path.getsize(there[name]) < size:
                fail(f'{self.folder}/{name}.part is shorter than progress.json says: delete the folder and start again')
        for name, path in there.items():
            os.truncate(path, right[name]) if name in right else os.remove(path)

    def append(self, split: str, ids: np.ndarray) -> None:
        while len(ids):
            number, at = divmod(self.tokens[split], self.shard_tokens)
            name, room = (f'train_{number:05d}.bin', self.shard_tokens - at) if split == 'train' else (f'{split}.bin', len(ids))
            if name not in self.open:
                self.open[name] = open(os.path.join(self.folder, name + '.part'), 'ab')  # noqa: SIM115  open to the end
            self.open[name].write(ids[:room].astype(self.dtype).tobytes())
            self.tokens[split] += len(ids[:room])
            ids = ids[room:]

    def sync(self) -> None:
        """All tokens to the disk."""
        for file in self.open.values():
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> dict[str, Any]:
        """Name the shards; what meta.json says of them."""
        self.sync()
        splits = {}
        for split in SPLITS:
            shards = []
            for name, tokens in self.shards(split):
                path = os.path.join(self.folder, name)
                shard = look_at(path + '.part', self.dtype, self.bos)
                shards.append({'file': name, 'tokens': tokens, 'documents': shard['documents'], 'sha256': shard['sha256']})
                os.replace(path + '.part', path)
            splits[split] = {'tokens': self.tokens[split], 'documents': sum(s['documents'] for s in shards), 'shards': shards}
        return splits


def look_at(path: str, dtype: np.dtype, bos: int) -> dict[str, Any]:
    """What a shard holds: tokens, documents, highest token, SHA-256."""
    seen, digest = {'tokens': 0, 'documents': 0, 'highest': 0}, hashlib.sha256()
    with open(path, 'rb') as file:
        while data := file.read(1 << 24):
            ids = np.frombuffer(data[:len(data) // dtype.itemsize * dtype.itemsize], dtype)
            digest.update(data)
            seen['tokens'] += len(ids)
            seen['documents'] += int(np.count_nonzero(ids == bos))  # no text has a BOS in it
            seen['highest'] = max(seen['highest'], int(ids.max(initial=0)))
    return {**seen, 'sha256': digest.hexdigest()}


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """A folder, made if need be, for this process alone."""
    os.makedirs(folder, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        fail(f'{folder}: another process is preparing it')
    finally:
        os.close(handle)


def prepare(o: argparse.Namespace, quiet: bool = False) -> None:
    """Make o.out_dir, or go on with it. SystemExit with one line where that cannot be; the caller holds the folder's lock."""
    def path(name: str) -> str:
        return os.path.join(o.out_dir, name)

    config = {key: getattr(o, key) for key in ('input', 'tokenizer', 'eos', 'tokens', 'held_out', 'seed', 'shard_tokens')}
    meta, state = read_json(path('meta.json')), read_json(path('progress.json'))
    if found := meta or state:
        before = found.get('config', {})
        if different := [f'{k}={before.get(k)}, not {v}' for k, v in config.items() if before.get(k) != v]:
            fail(f'{o.out_dir} holds another configuration: {"; ".join(different)}. Choose another --out_dir, or delete it')
        if meta:
            print(f'{o.out_dir} is prepared already')
            return
    elif left := glob(os.path.join(escape(o.out_dir), '*.bin')):
        fail(f'{o.out_dir} holds {os.path.basename(left[0])} but no meta.json: choose another --out_dir, or delete it')
    if o.tokenizer == 'llama' and not os.path.exists(path('tokenizer.model')):
        model = o.model or ask_hub(LLAMA[0], lambda api: api.hf_hub_download(*LLAMA))
        LlamaTokenizer(model)  # checks it
        with open(model, 'rb') as file:
            write_whole(path('tokenizer.model'), file.read())
    tokenizer = make_tokenizer(o.tokenizer, path('tokenizer.model'))
    source = find_source(state['source'] if state else o.input, o.seed, path('download'))
    listing = hashlib.sha256(json.dumps(source.files).encode()).hexdigest()
    if state and state['listing'] != listing:
        fail(f'the files of {o.input} have changed since {o.out_dir} was begun: delete it and start again')
    none = dict.fromkeys(SPLITS, 0)
    state = state or {'config': config, 'source': source.name, 'listing': listing, 'file': 0, 'documents': 0,
                      'tokens': none, 'start': none, 'last': {}, 'skipped': {}}
    writer = Writer(o.out_dir, np.dtype('<u2' if tokenizer.vocab_size <= 2 ** 16 else '<u4'), tokenizer.bos, o.shard_tokens)
    writer.rewind(state['tokens'])
    own = {file.split for file in source.files}
    limit = {split: o.tokens if split == 'train' else round(o.tokens * o.held_out) if split in own else sys.maxsize
             for split in SPLITS}

    def wanted(file: File) -> bool:
        return writer.tokens[file.split or 'train'] < limit[file.split or 'train']

    def save() -> None:
        writer.sync()
        write_whole(path('progress.json'), json.dumps({**state, 'tokens': writer.tokens}).encode())

    starts = [0, *accumulate(file.size for file in source.files)]  # of each file, in the bytes of all
    begin = saved = time.monotonic()
    before = sum(writer.tokens.values())
    bar = tqdm(initial=before, total=o.tokens, unit=' tokens', unit_scale=True, mininterval=1, smoothing=0.05, disable=quiet)
    work = batches(source, state['file'], state['documents'], o.held_out, wanted)
    with bar:
        for batch, tokens in encoded(work, o.workers, (o.tokenizer, path('tokenizer.model'), o.eos)):
            file = source.files[batch.file]
            if batch.bad:
                if not o.skip_bad:
                    source.release(file)  # a download may come out well the next time
                    fail(f'{os.path.join(o.input, file.name)}: {batch.bad}; --skip_bad leaves damaged files out')
                state['skipped'][file.name] = batch.bad
                writer.rewind(state['start'])
            for (split, *_), ids in zip(batch.items, tokens, strict=True):
                if writer.tokens[split] < limit[split]:
                    writer.append(split, ids[:limit[split] - writer.tokens[split]])
                    state['last'][file.split or 'train'] = batch.file
                if not wanted(File('', 0)):
                    break
            done = sum(writer.tokens.values())
            bar.total = min(o.tokens, round(done * starts[-1] / max(1, starts[batch.file] + batch.share * file.size)))
            bar.update(done - bar.n)
            if not wanted(File('', 0)):
                break
            if batch.last:
                state.update(file=batch.file + 1, documents=0, start=dict(writer.tokens))
            elif batch.documents is not None:
                state.update(file=batch.file, documents=batch.documents)
            at_end = batch.last and file.size > 1 << 20
            if at_end or (batch.documents is not None and time.monotonic() - saved > SAVE_SECONDS):
                save()
                saved = time.monotonic()
            if batch.last:
                source.release(file)
    if not any(writer.tokens.values()):
        fail(f'{o.input} holds no text')
    used = [file.name for number, file in enumerate(source.files)
            if number <= state['last'].get(file.split or 'train', -1) and file.name not in state['skipped']]
    save()
    splits = writer.finish()
    meta = {'format': FORMAT, 'tokenizer': tokenizer.name, 'tokenizer_sha256': tokenizer.sha256,
            'vocab_size': tokenizer.vocab_size, 'bos': tokenizer.bos, 'dtype': writer.dtype.name, 'splits': splits,
            'config': config, 'source': source.name, 'files': used, 'skipped': state['skipped']}
    write_whole(path('meta.json'), json.dumps(meta, indent=1).encode())
    os.remove(path('progress.json'))
    shutil.rmtree(path('download'), ignore_errors=True)
    if not quiet:
        seconds, new = time.monotonic() - begin, sum(writer.tokens.values()) - before
        for split, s in splits.items():
            print(f'{split:5} {s["tokens"]:>15,} tokens {s["documents"]:>11,} documents {len(s["shards"]):>4} shards')
            if not s['tokens']:
                print(f'      train.py needs a {split} split: try a larger --held_out')
        for name, why in state['skipped'].items():
            print(f'left out: {name}: {why}')
        print(f'{o.out_dir}: {new:,} tokens in {seconds:.1f} s, {new / seconds:,.0f} a second, {o.workers} workers; '
              f'{len(used):,} of {len(source.files):,} files read')


def prepare_builtin(out_dir: str) -> None:
    """Make the built-in corpus in `out_dir`: about 12 million bytes, nothing downloaded."""
    with locked(out_dir):
        prepare(parse(['--input=builtin', f'--out_dir={out_dir}', '--workers=1']), quiet=True)


def verify(data_dir: str) -> None:
    """Check every shard of a folder fully: there, length, range, documents, SHA-256; and the tokenizer. SystemExit if not."""
    meta = read_meta(data_dir)
    tokenizer, wrong = load_tokenizer(data_dir), []
    for split, s in meta['splits'].items():
        for shard in s['shards']:
            path = os.path.join(data_dir, shard['file'])
            try:
                seen = look_at(path, np.dtype(meta['dtype']).newbyteorder('<'), tokenizer.bos)
            except FileNotFoundError:
                wrong.append(f'{path} is missing')
                continue
            wrong += [f'{path}: {key} {seen[key]}, meta.json says {shard[key]}'
                      for key in ('tokens', 'documents', 'sha256') if seen[key] != shard[key]]
            if seen['highest'] >= tokenizer.vocab_size:
                wrong.append(f'{path}: token {seen["highest"]}, outside the vocabulary of {tokenizer.vocab_size}')
        for key in ('tokens', 'documents'):
            if s[key] != sum(shard[key] for shard in s['shards']):
                wrong.append(f'{data_dir}/meta.json: the {split} shards do not add up to {s[key]} {key}')
    if wrong:
        fail('\n'.join(wrong))
    print(f'{data_dir}: all shards are what meta.json says')


def peek(data_dir: str, split: str) -> None:
    """Print the beginnings of the first five documents of a split."""
    meta, tokenizer = read_meta(data_dir), load_tokenizer(data_dir)
    shards = meta['splits'].get(split, {}).get('shards')
    if not shards:
        fail(f'{data_dir} has no {split} split')
    ids = np.memmap(os.path.join(data_dir, shards[0]['file']), np.dtype(meta['dtype']).newbyteorder('<'), 'r')
    starts = [*np.flatnonzero(ids[:1 << 22] == tokenizer.bos)[:6], len(ids)]
    for begin, end in list(pairwise(starts))[:5]:
        print(f'--- {end - begin:,} tokens: {ids[begin:begin + 12].tolist()} ...')
        print(tokenizer.decode(ids[begin:min(end, begin + 200)].tolist()))


def count(text: str) -> int:
    """3.3B, 50M, 8K or a plain number."""
    match = re.fullmatch(r'(\d+(?:\.\d+)?)([KMB]?)', text)
    if not match or (number := round(float(match[1]) * {'': 1, 'K': 1e3, 'M': 1e6, 'B': 1e9}[match[2]])) < 1:
        raise argparse.ArgumentTypeError(f'{text}: expected a number such as 3.3B or 50M')
    return number


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, all defaults filled in. SystemExit on bad ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = fail  # one line, without the usage
    add = parser.add_argument
    add('--input', default=SLIMPAJAMA, help=f'a file or folder of {", ".join(SUFFIXES)}; {HUB}OWNER/NAME[@REVISION]; or '
        'builtin (default: the reupload the paper used)')
    add('--out_dir', help='the data folder (default: data/ and slimpajama, builtin, or the name of the input)')
    add('--tokens', type=count, help='training tokens, or as many as there are (default 3.3B)')
    add('--size', choices=SIZES, help='as many tokens as a model of this size trains for, instead of --tokens')
    add('--tokenizer', help='llama, gpt2, byte, or a path of the Llama tokenizer.model (default: llama, for builtin byte)')
    add('--eos', action='store_true', help='put EOS after each document')
    add('--held_out', type=float, help='share of the documents that goes to val, and to test, where the input has none of its '
        'own (default 0.005, for builtin 0.05)')
    add('--seed', type=int, default=0, help='shuffle the order of the files (default 0: by name)')
    add('--shard_tokens', type=count, default=100_000_000, help='tokens a shard of the train split (default 100M)')
    add('--workers', type=int, default=CORES, help='processes (default: one a core)')
    add('--skip_bad', action='store_true', help='leave damaged files out, name and count them')
    add('--verify', action='store_true', help='check out_dir fully')
    add('--peek', nargs='?', const='train', choices=SPLITS, help='print the first documents of a split of out_dir')
    o = parser.parse_args(argv)
    builtin = o.input == 'builtin'
    if o.tokens and o.size:
        fail('--tokens and --size: give one')
    if o.workers < 1:
        fail(f'--workers={o.workers}: expected at least 1')
    o.held_out = o.held_out if o.held_out is not None else 0.05 if builtin else 0.005
    if not 0 <= o.held_out < 0.5:
        fail(f'--held_out={o.held_out}: expected at least 0 and below 0.5')
    o.tokens = o.tokens or round(SIZES[o.size or '162m'])
    o.model, o.tokenizer = None, o.tokenizer or ('byte' if builtin else 'llama')
    if o.tokenizer not in ('llama', 'gpt2', 'byte'):
        if not os.path.isfile(o.tokenizer):
            fail(f'--tokenizer={o.tokenizer}: no such file, and none of llama, gpt2, byte')
        o.model, o.tokenizer = o.tokenizer, 'llama'
    if o.eos and o.tokenizer != 'llama':
        fail(f'--eos: the {o.tokenizer} tokenizer has no EOS beside its BOS')
    if not builtin and not o.input.startswith(HUB):
        o.input = os.path.abspath(o.input)
    name = 'slimpajama' if o.input == SLIMPAJAMA else os.path.basename(o.input).partition('.')[0]
    o.out_dir = o.out_dir or os.path.join('data', name)
    return o


def main(argv: list[str]) -> None:
    o = parse(argv)
    try:
        if o.verify:
            verify(o.out_dir)
        if o.peek:
            peek(o.out_dir, o.peek)
        if not (o.verify or o.peek):
            with locked(o.out_dir):
                prepare(o)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # | head has seen enough
    except OSError as error:
        fail(f'{error.filename or o.out_dir}: {error.strerror or error}; the same command goes on from here')
    except KeyboardInterrupt:
        fail('stopped; the same command goes on from here')


if __name__ == '__main__':
    main(sys.argv[1:])

"""Read texts: find the files of an input, and read their documents, or text files in blocks."""
import codecs
import io
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from configurator import check, fail

HUB = 'hf://datasets/'
ROWS = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz')  # files in which each row is a document
SUFFIXES = (*ROWS, '.txt')
LIBRARY = sysconfig.get_paths()['stdlib']
SPLIT_WORDS = {'train': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'test': 'test'}
BLOCK = 1 << 16  # A text file is read in blocks of at most this many bytes.
# Matches a text up to its last word that a space or line end follows. No token spans that place, so
# the two parts can be encoded separately. (A user's model may differ.)
WHOLE_WORDS = re.compile('.*[^\\s\u2581](?=[ \\n])', re.DOTALL)


# Files

class Source(NamedTuple):
    """Files of text, in the order in which they are read."""
    root: str  # a folder, or hf://datasets/OWNER/NAME@COMMIT
    files: dict[str, str | None]  # paths below root, and the split that each is named after

    def path(self, file: str) -> str:
        """Return the path of a file, after downloading it if it is on the Hub."""
        if not self.root.startswith(HUB):
            return os.path.join(self.root, file)
        from huggingface_hub import hf_hub_download
        repository, commit = self.root.removeprefix(HUB).split('@')
        return hf_hub_download(repository, file, repo_type='dataset', revision=commit)


def find_source(where: str) -> Source:
    """Find the files of an input. UserError if there are none."""
    if where == 'builtin':  # the standard library, without its tests and installed packages
        excluded = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}
        names = [name for name in list_files(LIBRARY)
                 if name.endswith('.py') and excluded.isdisjoint(name.split('/'))]
        return Source(LIBRARY, dict.fromkeys(names))
    if os.path.isfile(where):
        folder, name = os.path.split(where)
        return Source(folder, {name: None})
    check(os.path.isdir(where) or where.startswith(HUB), f'{where}: no such file or folder')
    root, names = list_hub(where) if where.startswith(HUB) else (where, list_files(where))
    splits = {name: find_split(name) for name in names if name.lower().endswith(SUFFIXES)}
    check(bool(splits), f'{where} holds no {", ".join(SUFFIXES)} file')
    if 'train' not in splits.values():  # Then a name like test does not mean a split.
        splits = dict.fromkeys(splits)
    # Read val and test first: reading stops when the train split is full
    order = sorted(splits, key=lambda name: splits[name] not in ('val', 'test'))
    return Source(root, {name: splits[name] for name in order})


def find_split(name: str) -> str | None:
    """Return the split that a path names: train/a.jsonl, TinyStories-valid.txt, ptb.test.txt."""
    words = re.split('[/._-]', name.lower())[:-1]  # without the suffix
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def list_files(root: str) -> list[str]:
    """List the files of a folder and then those of its subfolders, by name and without hidden ones,
    as paths below root. Links are followed. UserError if a folder is unreadable."""
    paths = []
    for folder, subfolders, files in os.walk(root, onerror=lambda error: fail(str(error)),
                                             followlinks=True):
        # Leave out links to a folder that holds this one
        here = os.path.realpath(folder) + os.sep
        subfolders[:] = sorted(
            name for name in subfolders if name[0] != '.'
            and not here.startswith(os.path.realpath(os.path.join(folder, name)) + os.sep))
        paths += [os.path.join(folder, name) for name in sorted(files) if name[0] != '.']
    return [os.path.relpath(path, root) for path in paths]


def list_hub(where: str) -> tuple[str, list[str]]:
    """Return a dataset of the Hub at its current commit, and the names of its files below `where`.
    Raises UserError."""
    from huggingface_hub import HfFileSystem, dataset_info, parse_hf_uri
    try:
        uri = parse_hf_uri(where.rstrip('/'))
        commit = dataset_info(uri.id, revision=uri.revision).sha
        root = f'{HUB}{uri.id}@{commit}'
        paths = HfFileSystem().find(f'{root}/{uri.path_in_repo}'.rstrip('/'))
    except Exception as error:  # The HTTP library raises many classes of its own.
        fail(f'{where}: {error} (is there a network?)')
    return root, [f'hf://{path}'.removeprefix(f'{root}/') for path in paths]


# Documents

def read_documents(path: str, column: str = 'text') -> Iterator[str]:
    """Yield the documents of a file that are not empty: its rows, or a whole text. UserError if it
    is damaged."""
    import pyarrow
    if path.lower().endswith('.parquet'):
        texts = read_parquet(path, column)
    elif path.lower().endswith(ROWS):
        texts = read_jsonl(path, column)
    else:
        texts = [read_text(path)]
    try:
        yield from filter(None, texts)
    except (pyarrow.ArrowException, OSError) as error:
        fail(f'{path}: {error}')


def read_parquet(path: str, column: str) -> Iterator[str | None]:
    from pyarrow.parquet import ParquetFile
    # Without buffer_size and pre_buffer, pyarrow keeps everything in memory that it has read.
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        check(column in names,
              f'{path} has no "{column}" column, only {", ".join(names)} '
              '(prepare_slimpajama.py --column=NAME reads another one)')
        for batch in table.iter_batches(batch_size=64, columns=[column], use_threads=False):
            yield from batch.column(0).to_pylist()


def read_jsonl(path: str, column: str) -> Iterator[str]:
    from pyarrow import input_stream
    with input_stream(path) as stream:  # It decompresses .zst and .gz.
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)[column] or ''
                # JSON can hold half of a surrogate pair, which is not text: replace it by "?".
                text = text.encode('utf-8', 'replace').decode()
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                fail(f'{path}, line {number}: expected {{"{column}": "..."}} in UTF-8 on each line '
                     '(prepare_slimpajama.py --column=NAME reads another field), '
                     f'not {line[:60]!r} ({error})')
            yield text


def text_documents(path: str) -> Iterator[str]:
    """Yield the documents of a file or folder, as train.py --text reads them. Raises UserError."""
    source = find_source(os.path.abspath(path))
    for file in source.files:
        yield from read_documents(source.path(file))


# Text files

def read_blocks(path: str, begin: int = 0, end: int | None = None) -> Iterator[str]:
    """Yield the text from byte `begin` to byte `end` of a UTF-8 file, in blocks that end with a
    word if possible. UserError if it is not UTF-8."""
    end = os.path.getsize(path) if end is None else end
    with open(path, 'rb') as file:
        while begin < end:
            file.seek(begin)
            data = file.read(min(BLOCK, end - begin))
            is_last = begin + len(data) >= end
            try:
                text, _ = codecs.utf_8_decode(data, 'strict', is_last)
            except UnicodeDecodeError as error:
                packed = path.lower().endswith(('.gz', '.zst', '.zip', '.xz', '.bz2'))
                check(not packed, f'{path} is compressed: unpack it first')
                fail(f'{path}: not UTF-8 at byte {begin + error.start:,} ({error.reason}). If it '
                     'has another encoding, iconv -f ENCODING -t utf-8 converts it; if a few '
                     'characters are damaged, iconv -c -f utf-8 -t utf-8 leaves them out')
            if not is_last and (words := WHOLE_WORDS.match(text)):
                text = words[0]
            yield text
            begin += len(text.encode())


def read_text(path: str) -> str:
    """Read a text file. Raises UserError if it is not UTF-8, OSError."""
    return ''.join(read_blocks(path))

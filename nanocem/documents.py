"""From an input to its documents: find its files, and read their rows and texts."""
import codecs
import csv
import hashlib
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from configurator import UserError, check, fail, warn

HUB = 'hf://datasets/'
SHAKESPEARE = Path(__file__).resolve().parents[1] / 'shakespeare'  # the text of config/mini.py
# A file is what its suffix says: rows, or else a text. Both may be packed; pyarrow unpacks them
ROWS = ('.jsonl', '.ndjson', '.json', '.csv', '.tsv', '.parquet')
TEXTS = ('.txt', '.md')  # what is read of a folder without rows, unless suffixes are given
PACKED = {'.gz': 'gzip', '.bz2': 'bz2', '.zst': 'zstd'}
# Folders of packages, by their names, and our own data, runs and exports, by files that they hold
INSTALLED = {'node_modules', 'site-packages', 'dist-packages', '__pycache__'}
OURS = ({'meta.json', 'train_00000.bin'}, {'config.json', 'log.jsonl'},
        {'config.json', 'model.safetensors'})
NAMED = 8  # a message names at most this many of a folder's suffixes
BLOCK = 1 << 15  # characters: texts are read in blocks of about this many
ENOUGH_ROWS = 100_000  # If none of this many rows has the column, no more are read
# Matches a text up to its last word that is followed by a space or a line end. No token spans that
# place, so the two parts can be encoded separately. (A user's model may differ.)
WHOLE_WORDS = re.compile('.*[^\\s\u2581](?=[ \\n])', re.DOTALL)


@dataclass
class Reading:
    """How a text is read: options of each script that reads one."""
    column: str = 'text'  # column of tables, and field of JSON, that holds the text
    separator: str | None = None  # what stands between documents of a text: <|endoftext|>, say
    encoding: str | None = None  # of text that is not UTF-8, such as cp1252
    suffixes: tuple[str, ...] | None = None  # of a folder's files; default: rows, or .txt and .md

    def __post_init__(self) -> None:
        try:
            'a'.encode(self.encoding or 'utf-8')
        except LookupError:
            fail(f'encoding={self.encoding}: expected the name of one, such as cp1252, latin1 or '
                 'utf-16')
        if self.suffixes:
            ends = [suffix.lower().strip('.* ') for suffix in self.suffixes]
            self.suffixes = tuple(end and f'.{end}' for end in ends)  # '': files without a suffix

    def options(self) -> dict[str, Any]:
        """Return these options, without what a subclass adds."""
        return {name: getattr(self, name) for name in READING}

    def check_text(self, text: str | None) -> None:
        """UserError for an option of reading without a text to read."""
        for name, value in self.options().items():
            check(bool(text) or value == getattr(Reading, name),
                  f'{name} is for --text=FILE: data is read already')


READING = tuple(Reading.__dataclass_fields__)


# Files

State = tuple[int, int]  # of a file: bytes, and time of change in ns


class Source(NamedTuple):
    """The files of an input, in their order, and those that are not read, with their states."""
    root: str  # a folder, or hf://datasets/OWNER/NAME@COMMIT
    files: dict[str, State]  # by their paths below root
    left_out: dict[str, State]

    def path(self, name: str) -> str:
        """Return the path of a file, after downloading it if it is on the Hub."""
        if not self.root.startswith(HUB):
            return os.path.join(self.root, name)
        from huggingface_hub import hf_hub_download
        repository, commit = self.root.removeprefix(HUB).split('@')
        return hf_hub_download(repository, name, repo_type='dataset', revision=commit)

    def where(self) -> str:
        """Return the path of the only file, or of the folder of several."""
        return os.path.join(self.root, *self.files) if len(self.files) == 1 else self.root

    def size(self) -> int:
        return size_of(self.files)

    def describe(self) -> str:
        """Return what is read, and what is left out, in one line each."""
        left_out = f'\nLeft out: {count(self.left_out)}' if self.left_out else ''
        return f'Files: {count(self.files)}{left_out}'


def find_source(where: str, reading: Reading) -> Source:
    """Find the files of an input. In a folder, or a dataset on the Hub, these are the files with
    the given suffixes. If no suffixes are given, they are the files of rows, or, if there are none,
    the texts. UserError if nothing is found, or if more bytes are left out than read and no
    suffixes are given."""
    if os.path.isfile(where):
        root, name = os.path.split(where)
        return Source(root, {name: state_of(where)}, {})
    check(os.path.isdir(where) or where.startswith(HUB),
          f'{where}: no such file or folder (standard input is -)')
    root, found = list_hub(where) if where.startswith(HUB) else (where, list_folder(where))
    check(len(found) > 0, f'{where} has nothing to read: hidden files, installed packages, and '
          'runs and data of nanoCEM are left out')
    has_rows = any(suffix_of(name) in ROWS for name in found)
    suffixes = reading.suffixes or (ROWS if has_rows else TEXTS)
    files = {name: state for name, state in found.items() if suffix_of(name) in suffixes}
    left_out = {name: state for name, state in found.items() if name not in files}
    known = ','.join(suffix for suffix, _, _ in by_suffix(found)[:NAMED])
    check(len(files) > 0 and (bool(reading.suffixes) or size_of(left_out) <= size_of(files)),
          f'{where}: {count(files)} would be read, and more left out ({count(left_out)}). Name '
          f'what to read, of --suffixes={known}')
    return Source(root, files, left_out)


def list_folder(root: str) -> dict[str, State]:
    """List the regular files of a folder and then those of its subfolders, by name, as paths below
    root, with their states. Links are followed, and no folder is entered twice. What is hidden,
    installed, or of our own data and runs is not listed. UserError if a folder is unreadable."""
    found: dict[str, State] = {}
    entered: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(root, onerror=lambda error: fail(str(error)),
                                             followlinks=True):
        state = os.stat(folder)
        if (state.st_dev, state.st_ino) in entered or any(ours <= {*names} for ours in OURS):
            subfolders.clear()
            continue
        entered.add((state.st_dev, state.st_ino))
        subfolders[:] = sorted(name for name in {*subfolders} - INSTALLED if name[0] != '.')
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name[0] != '.' and os.path.isfile(path):
                found[os.path.relpath(path, root)] = state_of(path)
    return found


def state_of(path: str) -> State:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


def list_hub(where: str) -> tuple[str, dict[str, State]]:
    """Return a dataset of the Hub at its current commit, and the files of it below `where` that are
    not hidden, with their states: a commit does not change, so that its time is 0. Raises
    UserError."""
    from huggingface_hub import HfFileSystem, dataset_info, parse_hf_uri
    try:
        uri = parse_hf_uri(where.rstrip('/'))
        commit = dataset_info(uri.id, revision=uri.revision).sha
        root = f'{HUB}{uri.id}@{commit}'
        found = HfFileSystem().find(f'{root}/{uri.path_in_repo}'.rstrip('/'), detail=True)
    except Exception as error:  # The HTTP library raises many classes of its own.
        fail(f'{where}: {error} (is there a network?)')
    return root, {f'hf://{path}'.removeprefix(f'{root}/'): (info['size'], 0)
                  for path, info in found.items() if os.path.basename(path)[0] != '.'}


def suffix_of(name: str) -> str:
    """Return a file's suffix in lower case, without that of a packed one: .jsonl of a.jsonl.gz."""
    stem, suffix = os.path.splitext(os.path.basename(name).lower())
    return os.path.splitext(stem)[1] if suffix in PACKED else suffix


def by_suffix(files: dict[str, State]) -> list[tuple[str, int, int]]:
    """Return each suffix of these files, how many have it, and their bytes; the largest first."""
    sizes: dict[str, list[int]] = {}
    for name, (size, _) in files.items():
        sizes.setdefault(suffix_of(name), []).append(size)
    groups = [(suffix, len(group), sum(group)) for suffix, group in sizes.items()]
    return sorted(groups, key=lambda group: -group[2])


def count(files: dict[str, State]) -> str:
    """Return how many files there are and their bytes, by suffix, in words: '2 .md, 1,234 bytes;
    1 without suffix, 9 bytes'."""
    groups = by_suffix(files)
    words = [f'{n:,} {suffix or "without suffix"}, {size:,} bytes'
             for suffix, n, size in groups[:NAMED]]
    if others := groups[NAMED:]:
        words.append(f'{sum(n for _, n, _ in others):,} others, '
                     f'{sum(size for _, _, size in others):,} bytes')
    return '; '.join(words) or 'nothing'


def size_of(files: dict[str, State]) -> int:
    return sum(size for size, _ in files.values())


def keep_piped(path: str) -> str:
    """Return the path of an input. Standard input, '-', is first kept in data/ as a file that is
    named after a hash of its content: .jsonl if its first line is a row, or else .txt. The file is
    hidden, so that it is part of no folder. Raises UserError, OSError."""
    if path != '-':
        return path
    os.makedirs('data', exist_ok=True)
    temporary = Path(f'data/.stdin-{os.getpid()}')
    try:
        with open(0, 'rb', closefd=False) as pipe, open(temporary, 'wb') as file:
            shutil.copyfileobj(pipe, file)
        size = temporary.stat().st_size
        check(size > 0, 'standard input gave no text')
        with open(temporary, 'rb') as file:
            digest = hashlib.file_digest(file, 'sha256').hexdigest()
            file.seek(0)
            head = file.read(BLOCK).decode(errors='replace')
        kept = f'data/.stdin-{digest[:16]}{".jsonl" if begins_with_row(head) else ".txt"}'
        if not os.path.exists(kept):  # its time of change stays, by which its data are found
            temporary.replace(kept)
    finally:
        temporary.unlink(missing_ok=True)
    print(f'Read {size:,} bytes of standard input, kept as {kept}', flush=True)
    return kept


def text_path(text: str) -> str:
    """Return the absolute path of a user's text. The built-in one is found from any folder."""
    built_in = text == SHAKESPEARE.name and not os.path.exists(text)
    return str(SHAKESPEARE) if built_in else os.path.abspath(text)


# Documents

def text_documents(path: str, reading: Reading) -> Iterator[Iterable[str]]:
    """Yield the documents of an input, in blocks, as train.py --text reads them: for evaluate.py.
    Raises UserError."""
    source = find_source(text_path(path), reading)
    if source.left_out:
        warn(f'{path} is not read whole. Left out: {count(source.left_out)}')
    documents = Documents(source, reading)
    for name in source.files:
        yield from documents.of(name)
    documents.check_options()
    if documents.without_text:
        warn(documents.describe())


class Documents:
    """The documents of an input, read file by file. What its rows lack is counted."""
    def __init__(self, source: Source, reading: Reading):
        self.source = source
        self.reading = reading
        self.rows = 0
        self.without_text = 0
        self.without_column = 0
        self.columns: list[str] = []  # of the last row without it
        self.separators = 0

    def of(self, name: str) -> Iterator[Iterable[str]]:
        """Yield the documents of a file that are not empty, each in blocks: its rows, the texts
        between separators, or a whole text. A document can be iterated again. UserError if the file
        is damaged."""
        path = self.source.path(name)
        if suffix_of(name) in ROWS:
            for text in self.read_rows(path):
                yield [text]
            return
        blocks: Iterable[str] = TextFile(path, self.reading.encoding)
        if os.path.getsize(path) <= BLOCK:
            blocks = [*blocks]  # it is not opened again
        check(not begins_with_row(next(iter(blocks), '')), f'{path}: its first line is an object '
              'of JSON. If its lines are rows, rename it to .jsonl')
        if self.reading.separator:
            for text in self.divide(blocks, self.reading.separator):
                yield [text]
        elif blocks:
            yield blocks

    def read_rows(self, path: str) -> Iterator[str]:
        """Yield the texts of a file's rows. A row without the column, or of null, has none."""
        column, number = self.reading.column, 0
        try:
            for number, row in enumerate(parse_rows(path, self.reading), 1):
                text = row.get(column) if isinstance(row, dict) else row
                check(isinstance(row, dict) and isinstance(text, str | None),
                      f'{path}, row {number}: expected text in the column "{column}" '
                      f'(--column=NAME reads another one), not {str(text)[:60]!r}')
                self.rows += 1
                if column not in row:
                    self.without_column += 1
                    self.columns = [*row]
                    if self.without_column == self.rows == ENOUGH_ROWS:
                        self.check_options()
                if text:
                    # JSON can hold half of a surrogate pair, which is not text: replace it by "?"
                    yield text.encode('utf-8', 'replace').decode()
                else:
                    self.without_text += 1
        except (OSError, ValueError, RecursionError, csv.Error) as error:
            fail_to_read(f'{path}, after row {number}', error)

    def divide(self, blocks: Iterable[str], separator: str) -> Iterator[str]:
        """Yield the texts between the separators, without line ends around them."""
        parts: list[str] = []  # of the text that has begun
        end = ''  # what follows these, in which a separator may begin
        for block in blocks:
            *texts, end = (end + block).split(separator)
            self.separators += len(texts)
            for text in texts:
                if text := ''.join([*parts, text]).strip('\r\n'):
                    yield text
                parts = []
            finished = max(0, len(end) - len(separator) + 1)
            parts.append(end[:finished])
            end = end[finished:]
        if text := ''.join([*parts, end]).strip('\r\n'):
            yield text

    def check_options(self) -> None:
        """UserError if most of the rows that were read lack the column, or no text had the
        separator: both are hardly meant."""
        where = self.source.where()
        check(2 * self.without_column <= self.rows, f'{where}: {self.without_column:,} of '
              f'{self.rows:,} rows have no column "{self.reading.column}", but '
              f'{", ".join(map(str, self.columns[:20]))}: --column=NAME reads another one')
        separator = self.reading.separator
        check(not separator or self.separators > 0, f'separator={separator!r} is in no text of '
              f"{where}: expected one that is. A shell writes line ends as $'\\n\\n'; files from "
              'Windows have \\r\\n')

    def describe(self) -> str:
        return f'{self.without_text:,} of {self.rows:,} rows have no text'


def parse_rows(path: str, reading: Reading) -> Iterator[Any]:
    """Yield the rows of a file, which are dicts if it is not damaged."""
    suffix = suffix_of(path)
    if suffix == '.parquet':
        yield from parse_parquet(path, reading.column)
        return
    with open_text(path, reading.encoding) as file:
        if suffix in ('.csv', '.tsv'):
            yield from parse_table(file, suffix, reading.column)
        elif suffix == '.json':
            yield from json_values(file.read)
        else:
            yield from (json.loads(line) for line in file if not line.isspace())


def parse_parquet(path: str, column: str) -> Iterator[dict[str, Any]]:
    from pyarrow.parquet import ParquetFile
    # Without buffer_size and pre_buffer pyarrow keeps everything in memory that it has read
    with open(path, 'rb') as file, \
            ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        if column not in names:
            yield from itertools.repeat(dict.fromkeys(names), table.metadata.num_rows)
            return
        for batch in table.iter_batches(batch_size=64, columns=[column], use_threads=False):
            yield from ({column: value.as_py()} for value in batch.column(0))


def parse_table(file: io.TextIOBase, suffix: str, column: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table, of which the first one has the names of the columns."""
    first = file.readline()
    delimiter = '\t' if suffix == '.tsv' else max(',;', key=first.count)
    csv.field_size_limit(2**31 - 1)
    lines = csv.reader(itertools.chain([first], file), delimiter=delimiter, strict=True)
    names = next(lines, [])
    index = names.index(column) if column in names else None
    for cells in lines:
        if cells and len(cells) != len(names):
            raise ValueError(f'{len(cells)} columns, and its first line has {len(names)}')
        if cells:
            yield dict.fromkeys(names) if index is None else {column: cells[index]}


def json_values(read: Callable[[int], str]) -> Iterator[Any]:
    """Yield the values of an array of JSON, or values that follow one another. `read` returns the
    next characters; only as much is kept as the longest value needs. JSONDecodeError."""
    decoder = json.JSONDecoder()
    text = read(BLOCK)
    in_array = text.lstrip().startswith('[')
    at = text.index('[') + 1 if in_array else 0
    while True:
        at = re.compile(r'[\s,]*').match(text, at).end()
        if in_array and text.startswith(']', at):
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            # The value may end later: read as much again
            more = read(max(BLOCK, len(text) - at))
            if not more and at == len(text) and not in_array:
                return
            if not more:
                raise
            text, at = text[at:] + more, 0
            continue
        yield value
        at = end
    if (text[at + 1:] + read(BLOCK)).strip():
        raise json.JSONDecodeError('more text after the array', text, at)


class TextFile:
    """A text, read in blocks each time it is iterated. Blocks end with a word if possible."""
    def __init__(self, path: str, encoding: str | None = None):
        self.path = path
        self.encoding = encoding

    def __iter__(self) -> Iterator[str]:
        rest = ''
        try:
            with open_text(self.path, self.encoding) as file:
                while text := file.read(BLOCK):
                    check('\0' not in text, f'{self.path} has NUL bytes: it is damaged, or no text')
                    text = rest + text
                    words = WHOLE_WORDS.match(text)
                    end = words.end() if words else len(text)
                    yield text[:end]
                    rest = text[end:]
        except (OSError, ValueError) as error:
            fail_to_read(self.path, error)
        if rest:
            yield rest


def begins_with_row(head: str) -> bool:
    """Return whether the first line of a text is a JSON object. `head` is the beginning of the
    text; a long first line that does not end in `head` counts if it begins like an object."""
    line, end, _ = head.lstrip().partition('\n')
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return not end and len(line) > BLOCK // 2 and line.startswith('{"')


def open_text(path: str, encoding: str | None = None) -> io.TextIOBase:
    """Open a file for reading text as it is, unpacked if its suffix says that it is packed."""
    if codecs.lookup(encoding or 'utf-8').name == 'utf-8':
        encoding = 'utf-8-sig'  # without the mark that some programs write first
    options = {'encoding': encoding, 'newline': '\n'}
    packed = PACKED.get(os.path.splitext(path)[1].lower())
    if not packed:
        return open(path, **options)
    from pyarrow import input_stream
    stream = input_stream(open(path, 'rb'), compression=packed)  # noqa: SIM115
    return io.TextIOWrapper(io.BufferedReader(stream, 1 << 20), **options)


def fail_to_read(place: str, error: Exception) -> NoReturn:
    """Raise UserError: what is wrong, where, and what helps."""
    if isinstance(error, UserError):
        raise error
    if isinstance(error, UnicodeDecodeError):
        near = error.object[max(0, error.start - 20):error.start + 10]
        if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            helps = '--encoding=utf-16 reads it'
        elif b'\0' in error.object:
            helps = 'It has NUL bytes: it is no text, or one for --encoding=utf-16'
        else:
            helps = 'Another --encoding, such as cp1252, may read it'
        fail(f'{place}: not {error.encoding.upper()} in {near!r} ({error.reason}). {helps}')
    if isinstance(error, json.JSONDecodeError):
        fail(f'{place}: no JSON ({error.msg}); expected {{"text": "..."}}. --suffixes of the other '
             'files leave it out')
    fail(f'{place}: {error}')

"""Read texts: find the files of an input, say what each of them is, and yield their documents."""
import codecs
import contextlib
import csv
import hashlib
import io
import json
import os
import re
import shlex
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from nanocem.errors import check, fail, warn

HUB = 'hf://datasets/'
JSON_ROWS = ('.jsonl', '.ndjson', '.json')
ROWS = (*JSON_ROWS, '.csv', '.tsv', '.parquet')  # files in which each row is a document
PACKED = {'.gz': 'gzip', '.zst': 'zstd', '.bz2': 'bz2'}  # rows are read packed, too
LIBRARY = sysconfig.get_paths()['stdlib']
# The words that Hugging Face's datasets knows in the names of files and folders
SPLIT_WORDS = {'train': 'train', 'training': 'train',
               'val': 'val', 'valid': 'val', 'validation': 'val', 'dev': 'val',
               'test': 'test', 'testing': 'test', 'eval': 'test', 'evaluation': 'test'}
INSTALLED = {'node_modules', 'site-packages', 'dist-packages', '__pycache__'}  # folders' names
INSTALLED_MARKS = {'CACHEDIR.TAG', 'pyvenv.cfg'}  # files that mark such a folder
KEPT_INPUT = re.compile(r'stdin-[0-9a-f]{16}\.\w+')  # what keep_piped writes into data/
# Names of files that describe the rows beside them
CARDS = re.compile(r'(readme|licen[cs]e|copying|notice|citation|changelog)\b', re.IGNORECASE)
BLOCK = 1 << 16  # Text is read in blocks of at most this many bytes.
LONGEST_ROW = 1 << 24  # bytes; rows of tables are shorter, and of JSON those that tell what it is
LONGEST_LINE = 1 << 28  # bytes; what is longer, such as a hole in a file, is no row
LARGEST_OBJECT = 1 << 26  # bytes of a file of JSON that is looked into for rows
# Matches a text up to its last word that a space or line end follows. No token spans that place, so
# the two parts can be encoded separately. (A user's model may differ.)
WHOLE_WORDS = re.compile('.*[^\\s\u2581](?=[ \\n])', re.DOTALL)
CONTROL = re.compile(rb'[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]')  # bytes that are in hardly any text


class Reading(NamedTuple):
    """How an input is read: options that several scripts have."""
    column: str = 'text'
    separator: str | None = None
    encoding: str | None = None
    suffixes: tuple[str, ...] | None = None
    splits: str = 'names'

    @classmethod
    def of(cls, options: Any) -> 'Reading':
        """Take them from a script's options, which may lack some. Raises UserError."""
        found = {name: getattr(options, name) for name in cls._fields if hasattr(options, name)}
        if encoding := found.get('encoding'):
            try:
                'a'.encode(encoding)
            except LookupError:
                fail(f'encoding={encoding}: expected the name of one, such as cp1252, latin1 or '
                     'utf-16-le')
        if suffixes := found.get('suffixes'):
            ends = [suffix.lower().strip('.* ') for suffix in suffixes]
            found['suffixes'] = tuple(end and f'.{end}' for end in ends)  # '': without suffix
        return cls(**found)

    def given(self) -> dict[str, Any]:
        """Return those that are not the defaults."""
        return {name: value for name, value in self._asdict().items()
                if value != self._field_defaults[name]}


# Files

class Reason(NamedTuple):
    """Why a file is not read."""
    words: str
    remedy: str = ''  # what makes text of it; '': it was hardly meant
    detail: str = ''  # about this file alone
    is_rows: bool = False  # not one document


class File(NamedTuple):
    """A file that is read."""
    kind: str  # text, or rows: lines or an array of JSON, table (.csv, .tsv), parquet
    encoding: str = 'utf-8'
    split: str | None = None  # that its name says
    size: int = 0  # bytes
    changed: int = 0  # when it was last changed, in ns


class LeftOut(NamedTuple):
    """A file or folder that is not read."""
    name: str
    size: int
    reason: Reason


class Source(NamedTuple):
    """Files of text, in the order in which they are read, and what is not read."""
    root: str  # a folder, or hf://datasets/OWNER/NAME@COMMIT
    files: dict[str, File]  # by their paths below root
    left_out: list[LeftOut]

    def path(self, name: str) -> str:
        """Return the path of a file, after downloading it if it is on the Hub."""
        if not self.root.startswith(HUB):
            return os.path.join(self.root, name)
        from huggingface_hub import hf_hub_download
        repository, commit = self.root.removeprefix(HUB).split('@')
        return hf_hub_download(repository, name, repo_type='dataset', revision=commit)

    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def describe(self) -> str:
        """Return how many files and bytes are read, and how many are left out, in two lines."""
        lines = [f'Files: {len(self.files):,}, {self.size():,} bytes ({count(self.files)})']
        if self.left_out:
            lines.append(f'Left out: {describe_left_out(self.left_out)}')
        return '\n'.join(lines)


HIDDEN = Reason('hidden')
NO_FILE = Reason('no file, or a link that leads nowhere')
OURS = Reason('of our own runs and data')
OF_PACKAGES = Reason('of installed packages or a cache')
OTHER_SUFFIX = Reason('without one of the suffixes')
BINARY = Reason('binary')
CARD = Reason('about the rows')
ABOUT_OTHERS = Reason('JSON without rows')
TEXTS = Reason('JSON, a list of texts', "jq -c '.[] | {text: .}' FILE > NEW.jsonl makes rows of it",
               is_rows=True)
NOTEBOOK = Reason('Jupyter', 'jupyter nbconvert --to markdown FILE converts it')
WITH_NUL = Reason('text with NUL bytes', "damaged? tr -d '\\000' < FILE > NEW leaves them out")
NOT_UTF8 = Reason('not UTF-8', '--encoding=cp1252, or the name of another encoding, reads it')
DAMAGED = Reason('damaged UTF-8', 'iconv -c -f utf-8 -t utf-8 FILE > NEW leaves it out')
# How files begin that hold text in another form, or elsewhere, and what makes text of them
CONTAINERS = {
    b'%PDF': Reason('PDF', 'pdftotext FILE converts it'),
    b'{\\rtf': Reason('RTF', 'pandoc -f rtf -t plain FILE -o NEW.txt converts it'),
    b'%!PS': Reason('PostScript', 'ps2ascii FILE > NEW.txt converts it'),
    b'\xd0\xcf\x11\xe0': Reason('of Office', 'soffice --convert-to txt FILE converts it'),
    b'PK\x03\x04': Reason('zipped', 'pandoc -t plain FILE -o NEW.txt converts a .docx, .odt or '
                          '.epub; unzip FILE unpacks others'),
    b'\x1f\x8b': Reason('compressed', 'unpack it first (gunzip FILE, or tar xf FILE)'),
    b'\x28\xb5\x2f\xfd': Reason('compressed', 'unpack it first (unzstd FILE)'),
    b'BZh': Reason('compressed', 'unpack it first (bunzip2 FILE, or tar xf FILE)'),
    b'\xfd7zXZ': Reason('compressed', 'unpack it first (unxz FILE, or tar xf FILE)'),
    b'7z\xbc\xaf\x27': Reason('compressed', 'unpack it first (7z x FILE)'),
    b'Rar!\x1a': Reason('compressed', 'unpack it first (unrar x FILE)'),
    b'ustar': Reason('packed', 'unpack it first (tar xf FILE)'),  # at byte 257
    b'version https://git-lfs': Reason('left to Git LFS', 'git lfs pull fetches it'),
    b'/annex/objects/': Reason('left to git-annex', 'git annex get FILE fetches it'),
}


def find_source(where: str, reading: Reading) -> Source:
    """Find the files of an input, and say which of them are read. UserError if there are none, or
    if most of what may be meant is not read."""
    if where == 'builtin':  # the standard library, without its tests and installed packages
        excluded = {*INSTALLED, 'test', 'tests', 'idle_test'}
        files = {}
        for name in list_files(LIBRARY)[0]:
            if name.endswith('.py') and excluded.isdisjoint(name.split('/')):
                files[name] = with_state(File('text'), os.stat(os.path.join(LIBRARY, name)))
        return Source(LIBRARY, files, [])
    if os.path.isfile(where):
        folder, name = os.path.split(where)
        found = look(where, reading)
        if isinstance(found, Reason):
            fail(not_read(where, found))
        return Source(folder, {name: found}, [])
    check(os.path.isdir(where) or where.startswith(HUB), f'{where}: no such file or folder')
    if where.startswith(HUB):
        source = look_at_hub(where, reading)
    else:
        source = look_at_folder(where, reading)
    check_meant(where, source)
    # Read val and test first: reading stops when the train split is full
    order = sorted(source.files, key=lambda name: source.files[name].split not in ('val', 'test'))
    return source._replace(files={name: source.files[name] for name in order})


def look_at_folder(root: str, reading: Reading) -> Source:
    """Say of each file of a folder what it is."""
    check(not is_ours(root), f'{root} is a run or a data folder of nanoCEM: --data=FOLDER reads '
          'data, and a text is another folder or file')
    names, left_out = list_files(root)
    files: dict[str, File] = {}
    for name in names:
        path = os.path.join(root, name)
        if not has_suffix(name, reading):
            found = OTHER_SUFFIX
        elif not os.path.isfile(path):
            found = NO_FILE
        else:
            found = look(path, reading)
        if isinstance(found, Reason):
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            left_out.append(LeftOut(name, size, found))
        else:
            files[name] = found._replace(split=find_split(name, reading))
    # Beside rows, a README or a licence is about them
    if any(file.kind != 'text' for file in files.values()):
        for name in [*files]:
            if files[name].kind == 'text' and CARDS.match(os.path.basename(name)):
                left_out.append(LeftOut(name, files.pop(name).size, CARD))
    return Source(root, files, left_out)


def look_at_hub(where: str, reading: Reading) -> Source:
    """Say by its suffix of each file of a dataset on the Hub what it is: nothing is downloaded but
    .json, which may be about the others."""
    root, names = list_hub(where)
    kinds = {'.jsonl': 'lines', '.ndjson': 'lines', '.csv': 'table', '.tsv': 'table',
             '.parquet': 'parquet'}
    source = Source(root, {}, [])
    for name in names:
        suffix = row_suffix(name)
        if os.path.basename(name)[0] == '.':
            found = HIDDEN
        elif not has_suffix(name, reading):
            found = OTHER_SUFFIX
        elif suffix == '.json':
            found = look(source.path(name), reading)
        elif suffix or name.lower().endswith('.txt'):
            found = File(kinds.get(suffix, 'text'))
        else:
            found = Reason('neither rows nor .txt')
        if isinstance(found, Reason):
            source.left_out.append(LeftOut(name, 0, found))
        else:
            source.files[name] = found._replace(split=find_split(name, reading))
    return source


def check_meant(where: str, source: Source) -> None:
    """UserError if nothing is read, or if more files or bytes that may be meant are left out than
    read. A file counts as read if its text stands beside it: book.pdf, book.txt."""
    if not source.files:
        if len(source.left_out) == 1 and source.left_out[0].size > 0:
            left = source.left_out[0]
            fail(not_read(os.path.join(source.root, left.name), left.reason))
        fail(f'{where} holds no text'
             + (f': {describe_left_out(source.left_out)}' if source.left_out else ', and no file'))
    texts = {os.path.splitext(name)[0] for name in source.files} | {*source.files}
    lost = [left for left in source.left_out
            if left.reason.remedy and os.path.splitext(left.name)[0] not in texts]
    most = sum(left.size for left in lost) > source.size()
    # Files are counted where each is a document
    if all(file.kind == 'text' for file in source.files.values()):
        most = most or sum(not left.reason.is_rows for left in lost) > len(source.files)
    suffixes = ','.join(sorted({suffix_of(name) for name in source.files}))
    check(not most,
          f'{where}: most is not read: {describe_left_out(lost)}. --suffixes={suffixes} reads the '
          f'rest alone, {source.size():,} bytes ({count(source.files)})')


def not_read(path: str, reason: Reason) -> str:
    """Return what a user reads who has given a file that is no text."""
    remedy = reason.remedy.replace('FILE', shlex.quote(path)) or (
        'expected text, or rows with the column "text" (--column=NAME reads another one)')
    return f'{path} is {reason.words}{reason.detail}: {remedy}'


def list_files(root: str) -> tuple[list[str], list[LeftOut]]:
    """List the files of a folder and then those of its subfolders, by name, as paths below root.
    Links are followed, last, and no folder is entered twice. List also what is not entered: hidden
    files, our own runs and data, installed packages. UserError if a folder is unreadable."""
    names: list[str] = []
    left_out: list[LeftOut] = []
    entered: set[tuple[int, int | str]] = set()
    starts = [root]
    for start in starts:
        for folder, subfolders, files in os.walk(start, onerror=lambda error: fail(str(error))):
            # Enter each folder once, by its device and inode, whatever links lead to it
            state = os.stat(folder)
            if (state.st_dev, state.st_ino or folder) in entered:
                subfolders.clear()
                continue
            entered.add((state.st_dev, state.st_ino or folder))
            for name in sorted(files):
                path = os.path.relpath(os.path.join(folder, name), root)
                if name[0] == '.':
                    left_out.append(LeftOut(path, 0, HIDDEN))
                elif KEPT_INPUT.fullmatch(name):
                    left_out.append(LeftOut(path, 0, OURS))
                else:
                    names.append(path)
            # Choose the subfolders to enter: now, or if it is a link to elsewhere, at the end
            inside = os.path.realpath(folder) + os.sep
            chosen = []
            for name in sorted(subfolders):
                path = os.path.join(folder, name)
                if reason := why_not_enter(path):
                    left_out.append(LeftOut(os.path.relpath(path, root), 0, reason))
                elif not os.path.islink(path):
                    chosen.append(name)
                elif not inside.startswith(os.path.realpath(path) + os.sep):
                    starts.append(path)
            subfolders[:] = chosen
    return names, left_out


def why_not_enter(folder: str) -> Reason | None:
    name = os.path.basename(folder)
    if name[0] == '.':
        return HIDDEN
    if name in INSTALLED or any(os.path.exists(f'{folder}/{mark}') for mark in INSTALLED_MARKS):
        return OF_PACKAGES
    return OURS if is_ours(folder) else None


def is_ours(folder: str) -> bool:
    """Return whether a folder is a run, a data folder or an export of nanoCEM."""
    for name, keys in (('meta.json', {'format', 'splits', 'tokenizer'}),
                       ('config.json', {'train', 'model'}), ('config.json', {'model_type'})):
        try:
            found = json.loads(Path(folder, name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and keys <= {*found}:
            return 'model_type' not in keys or found['model_type'] == 'nanocem'
    return False


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


def find_split(name: str, reading: Reading) -> str | None:
    """Return the split that a path names: train/a.jsonl, TinyStories-valid.txt, testset2.txt."""
    if reading.splits == 'none':
        return None
    stem = name.lower().removesuffix(suffix_of(name))
    words = [re.sub('(set|data)$', '', word) for word in re.split(r'[\W\d_]+', stem)]
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def suffix_of(name: str) -> str:
    """Return a file's suffix in lower case, with that before a packed one's: '.json.gz'."""
    base = os.path.basename(name).lower()
    return re.search(r'((\.\w+)?\.(gz|zst|bz2|xz|zip)|\.\w+|)\Z', base)[0]


def has_suffix(name: str, reading: Reading) -> bool:
    """Return whether the suffix of a file is one of those that are read."""
    suffix = suffix_of(name)
    return not reading.suffixes or any(suffix.endswith(end) if end else not suffix
                                       for end in reading.suffixes)


def row_suffix(name: str) -> str:
    """Return a file's suffix without that of a packed one, if it is one of rows, or else ''."""
    suffix = suffix_of(name)
    for packed in PACKED:
        suffix = suffix.removesuffix(packed)
    return suffix if suffix in ROWS else ''


def count(names: Iterable[str]) -> str:
    """Return how many files there are of each suffix in words: '2 .md, 1 without suffix'."""
    counts = Counter(map(suffix_of, names)).most_common()
    words = [f'{n:,} {suffix or "without suffix"}' for suffix, n in counts[:6]]
    if others := sum(n for _, n in counts[6:]):
        words.append(f'{others:,} of other suffixes')
    return ', '.join(words)


def describe_left_out(left_out: list[LeftOut]) -> str:
    """Return how much is left out for each reason, in words, and what makes text of it."""
    by_words: dict[str, list[LeftOut]] = {}
    for left in left_out:
        by_words.setdefault(left.reason.words, []).append(left)
    parts = []
    for words, group in by_words.items():
        size = sum(left.size for left in group)
        part = f'{len(group):,} {words}'
        details = {left.reason.detail for left in group}
        if len(details) == 1:
            part += details.pop()
        if size:
            part += f', {size:,} bytes ({count(left.name for left in group)})'
        if remedies := [*dict.fromkeys(left.reason.remedy for left in group if left.reason.remedy)]:
            part += f': {" or ".join(remedies[:2])}'
        parts.append(part)
    return '; '.join(parts)


# What a file is: asked here alone

def look(path: str, reading: Reading) -> File | Reason:
    """Say what a file is, by how it begins; a table is known by its suffix. Raises UserError."""
    with open(path, 'rb') as file:
        head = file.read(BLOCK)
        state = os.fstat(file.fileno())
    found = look_at(path, head, reading)
    return found if isinstance(found, Reason) else with_state(found, state)


def with_state(file: File, state: os.stat_result) -> File:
    return file._replace(size=state.st_size, changed=state.st_mtime_ns)


def look_at(path: str, head: bytes, reading: Reading) -> File | Reason:
    """Say what a file is that begins with `head`."""
    suffix = row_suffix(path)
    if not head and suffix != '.parquet':
        return File('text')
    # Rows are read if they are packed, too
    if suffix and packed_by(head):
        with unpacked(path) as stream:
            head = stream.read(BLOCK)
    for beginning, reason in CONTAINERS.items():
        if head.startswith(beginning, 257 if beginning == b'ustar' else 0):
            return reason
    if suffix == '.parquet' or head.startswith(b'PAR1'):
        return missing(parquet_columns(path), reading) or File('parquet')
    encoding = find_encoding(path, head, reading.encoding)
    if isinstance(encoding, Reason):
        return encoding
    text = decode(head, encoding)
    if suffix in ('.csv', '.tsv'):
        return missing(table_columns(text), reading) or File('table', encoding)
    found = look_at_json(path, text, len(head) < BLOCK, encoding, reading) or 'text'
    return found if isinstance(found, Reason) else File(found, encoding)


def look_at_json(path: str, text: str, whole: bool, encoding: str,
                 reading: Reading) -> str | Reason | None:
    """Return the kind of rows of a file that begins with `text`, or is that: lines or array. Or say
    why it has none; None if it is no JSON."""
    suffix = row_suffix(path)
    rows: list[Any] = []
    # An array of rows
    if re.match(r'\s*\[\s*\{', text):
        with contextlib.suppress(ValueError, RecursionError):  # it ends with the block, or is none
            for row in array_values(io.StringIO(text).read):
                rows.append(row)
        if rows or suffix:
            has_column = not rows or any(isinstance(row, dict) and reading.column in row
                                         for row in rows)
            return 'array' if has_column else missing([*rows[0]], reading)
    # A row on each line. The first one may be longer than the block
    if re.match(r'\s*\{', text):
        rows = first_rows(text, whole, bool(suffix)) or first_rows(first_line(path, encoding),
                                                                   True, False)
        if any(reading.column in row for row in rows):
            return 'lines'
        if len(rows) > 1 or (rows and suffix in ('.jsonl', '.ndjson')):
            return missing([*rows[0]], reading)
    if suffix in ('.jsonl', '.ndjson'):
        return 'lines'  # its first line will be refused
    if suffix or re.match(r'\s*\{\s*["}]', text):
        return look_at_object(path, encoding, reading)
    return None


def look_at_object(path: str, encoding: str, reading: Reading) -> Reason | None:
    """Say what a file is that holds one value of JSON. None if it holds something else, and has no
    suffix of JSON."""
    value: Any = None
    if os.path.getsize(path) < LARGEST_OBJECT:
        try:
            with unpacked(path) as stream:
                value = json.loads(stream.read().decode(encoding))
        except (ValueError, RecursionError):
            if not row_suffix(path):
                return None
    if isinstance(value, dict) and {'cells', 'nbformat'} <= {*value}:
        return NOTEBOOK
    if isinstance(value, list) and value and isinstance(value[0], str):
        return TEXTS
    if place := rows_inside(value, reading.column):
        return Reason('JSON with rows inside', f"jq -c '{place}' FILE > NEW.jsonl writes them; "
                      'docs/data.md has a line that makes one document of a conversation',
                      is_rows=True)
    keys = ', '.join([*value][:20]) if isinstance(value, dict) else ''
    return ABOUT_OTHERS._replace(detail=f', only {keys}' if keys else '')


def rows_inside(value: Any, column: str) -> str:
    """Return where a value of JSON has rows with this column, as jq writes it; '' if nowhere."""
    if isinstance(value, list):
        if any(isinstance(item, dict) and column in item for item in value[:100]):
            return '[]'
        inside = next(filter(None, (rows_inside(item, column) for item in value[:100])), '')
        return inside and f'[]{inside}'
    for key, item in value.items() if isinstance(value, dict) else ():
        if inside := rows_inside(item, column):
            name = key if re.fullmatch(r'[A-Za-z_]\w*', key, re.ASCII) else json.dumps(key)
            return f'.{name}{inside}'
    return ''


def first_rows(text: str, whole: bool, until_damaged: bool) -> list[dict[str, Any]]:
    """Return the rows on the lines of the beginning of a file: those before the first damaged line,
    or [] if there is one. Its last line is left out unless it is the whole."""
    lines = text.split('\n')
    rows = []
    for line in lines if whole else lines[:-1]:
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return rows if until_damaged else []
        if not isinstance(row, dict):
            return []
        rows.append(row)
    return rows


def first_line(path: str, encoding: str) -> str:
    with unpacked(path) as stream:
        return stream.readline(LONGEST_ROW).decode(encoding, 'replace')


def missing(names: list[str], reading: Reading) -> Reason | None:
    """Say that rows lack the column that is read. None if they have it."""
    if reading.column in names:
        return None
    known = ', '.join(map(str, names[:20]))
    return Reason(f'without "{reading.column}" in its rows', '--column=NAME reads another one',
                  f', only {known}', is_rows=True)


def parquet_columns(path: str) -> list[str]:
    from pyarrow.parquet import ParquetFile
    with reading_errors(path), open(path, 'rb') as file, ParquetFile(file) as table:
        return table.schema_arrow.names


def table_columns(text: str) -> list[str]:
    """Return the names of a table's columns, from its beginning."""
    with io.StringIO(text, newline='') as lines:
        return next(csv.reader(lines, delimiter=delimiter(text)), [])


def delimiter(text: str) -> str:
    """Return what stands between the columns of a table: what its first line has most of."""
    line = text.lstrip().partition('\n')[0]
    return max(',;\t', key=line.count)


def packed_by(head: bytes) -> str | None:
    """Return what packed a file that begins with `head`, if pyarrow unpacks it."""
    begins = {b'\x1f\x8b': 'gzip', b'\x28\xb5\x2f\xfd': 'zstd', b'BZh': 'bz2'}
    return next((name for begin, name in begins.items() if head.startswith(begin)), None)


@contextlib.contextmanager
def unpacked(path: str) -> Iterator[io.BufferedReader]:
    """Open a file as bytes, unpacked if it is packed. pyarrow opens no path that is not UTF-8."""
    from pyarrow import input_stream
    with reading_errors(path), open(path, 'rb') as file:
        packed = packed_by(file.read(4))
        file.seek(0)
        with input_stream(file, compression=packed) as stream:
            yield io.BufferedReader(stream, 1 << 20)


@contextlib.contextmanager
def reading_errors(path: str) -> Iterator[None]:
    """Give pyarrow's errors, and the system's, one line with the path."""
    from pyarrow import ArrowException
    try:
        yield
    except (ArrowException, OSError) as error:
        fail(f'{path}: {error}')


# Encodings

def find_encoding(path: str, head: bytes, given: str | None) -> str | Reason:
    """Return the encoding of a text that begins with `head`: UTF-8, what a byte order mark says, or
    else the given one. Or say why it is no text."""
    marked = encoding_of_mark(head)
    if given is None:
        return marked if is_text(head, marked) else why_no_text(head)
    # Where there is another one to try, the whole file tells which it has
    if is_text(head, marked) and is_whole_text(path, marked):
        return marked
    if b'\0' not in head and is_damaged_utf8(islice(decoded(path, 'utf-8', 'replace'), 1000)):
        return DAMAGED
    if is_text(head, given) and is_whole_text(path, given):
        return given
    reason = why_no_text(head)
    return reason if reason == BINARY else Reason(
        f'neither UTF-8 nor {given}', 'the name of another --encoding may read it')


def encoding_of_mark(head: bytes) -> str:
    """Return the encoding that a byte order mark names, or else UTF-8."""
    marks = {codecs.BOM_UTF8: 'utf-8-sig', codecs.BOM_UTF32_LE: 'utf-32',
             codecs.BOM_UTF16_LE: 'utf-16', codecs.BOM_UTF16_BE: 'utf-16'}
    return next((name for mark, name in marks.items() if head.startswith(mark)), 'utf-8')


def decode(head: bytes, encoding: str) -> str:
    """Decode the first block of a file, which may end inside a character. UnicodeDecodeError."""
    return codecs.getincrementaldecoder(encoding)().decode(head, final=len(head) < BLOCK)


def is_text(head: bytes, encoding: str) -> bool:
    """Return whether the first block of a file is text in this encoding, without NUL."""
    try:
        return '\0' not in decode(head, encoding)
    except UnicodeDecodeError:
        return False


def decoded(path: str, encoding: str, errors: str = 'strict') -> Iterator[str]:
    """Yield a whole file, decoded. UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    with unpacked(path) as stream:
        while data := stream.read(BLOCK):
            yield decoder.decode(data)
    yield decoder.decode(b'', final=True)


def is_whole_text(path: str, encoding: str) -> bool:
    try:
        return not any('\0' in text for text in decoded(path, encoding))
    except UnicodeDecodeError:
        return False


def is_damaged_utf8(texts: Iterable[str]) -> bool:
    """Return whether a text that is not UTF-8 has more characters that are than others. `texts` is
    the text, in which U+FFFD replaces the others. Text of another encoding has hardly any."""
    good = bad = 0
    for text in texts:
        damaged = text.count('\ufffd')
        good += sum(character > '\x7f' for character in text) - damaged
        bad += damaged
    return good > bad


def why_no_text(head: bytes) -> Reason:
    """Say what a file is that begins with `head`, which is no text."""
    if b'\0' not in head:
        if len(CONTROL.findall(head)) > len(head) / 100:
            return BINARY
        reason = DAMAGED if is_damaged_utf8([head.decode(errors='replace')]) else NOT_UTF8
        try:
            head.decode()
        except UnicodeDecodeError as error:
            reason = reason._replace(detail=f' at byte {error.start:,} ({error.reason})')
        return reason
    # UTF-16 has spaces, and what can be printed
    for encoding in ('utf-16-le', 'utf-16-be'):
        if is_text(head, encoding):
            text = decode(head, encoding)
            printable = sum(map(str.isprintable, text)) + sum(map(str.isspace, text))
            if text.count(' ') > len(text) / 50 and printable > 0.95 * len(text):
                return Reason('UTF-16 without a mark of byte order',
                              f'--encoding={encoding} reads it')
    rest = head.replace(b'\0', b'')
    return WITH_NUL if rest and is_text(rest, 'utf-8') and not CONTROL.search(rest) else BINARY


# Documents

class TextFile:
    """A text, read in blocks each time it is iterated."""
    def __init__(self, path: str, encoding: str = 'utf-8'):
        self.path = path
        self.encoding = encoding

    def __iter__(self) -> Iterator[str]:
        """Yield blocks that end with a word if possible. UserError if it is not text."""
        decoder = codecs.getincrementaldecoder(self.encoding)()
        text = ''  # decoded, and not yet yielded
        with open(self.path, 'rb') as file:
            left = os.fstat(file.fileno()).st_size  # what is appended meanwhile is not read
            while left > 0:
                begin = file.tell() - len(decoder.getstate()[0])
                data = file.read(min(left, max(1, BLOCK - len(text.encode()))))
                check(bool(data), f'{self.path} became shorter while it was read: start again when '
                      'nothing writes to it, or with a copy')
                left -= len(data)
                try:
                    text += decoder.decode(data, final=left == 0)
                except UnicodeDecodeError as error:
                    fail(not_in(self.encoding, self.path, begin + error.start, error.reason))
                check('\0' not in text, f'{self.path} has a NUL after byte {begin:,}: '
                      + WITH_NUL.remedy.replace('FILE', self.path))
                words = WHOLE_WORDS.match(text) if left > 0 else None
                end = words.end() if words else len(text)
                if end > 0:
                    yield text[:end]
                text = text[end:]


def not_in(encoding: str, path: str, byte: int, reason: str) -> str:
    """Return what a user reads whose file is not in this encoding."""
    return (f'{path}: not {encoding.upper()} at byte {byte:,} ({reason}). If it has another '
            'encoding, --encoding=NAME reads it as a --text, and iconv -f ENCODING -t utf-8 '
            'converts it; if a few characters are damaged, iconv -c -f utf-8 -t utf-8 leaves them '
            'out')


def read_documents(path: str, file: File, reading: Reading) -> Iterator[Iterable[str]]:
    """Yield the documents of a file that are not empty, each in blocks: its rows, the texts between
    separators, or a whole text. A document can be iterated again. UserError if it is damaged."""
    if file.kind == 'text' and not reading.separator:
        text: Iterable[str] = TextFile(path, file.encoding)
        if os.path.getsize(path) <= BLOCK:
            text = [*text]  # one block, or none: it is not opened again
        if text:
            yield text
        return
    if file.kind == 'text':
        texts = split_text(path, file.encoding, reading.separator)
    elif file.kind == 'parquet':
        texts = read_parquet(path, reading.column)
    elif file.kind == 'table':
        texts = read_table(path, file.encoding, reading.column)
    else:
        texts = read_json_rows(path, file, reading.column)
    for text in texts:
        if text:
            yield [text]


def read_parquet(path: str, column: str) -> Iterator[str | None]:
    from pyarrow.parquet import ParquetFile
    number = 0
    # Without buffer_size and pre_buffer pyarrow keeps everything in memory that it has read
    with reading_errors(path), open(path, 'rb') as file, \
            ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
        for batch in table.iter_batches(batch_size=64, columns=[column], use_threads=False):
            for value in batch.column(0):
                number += 1
                try:
                    text = value.as_py()
                except ValueError as error:
                    fail(f'{path}, row {number}: not UTF-8 ({error})')
                yield check_row(text, column, f'{path}, row {number}')


def read_table(path: str, encoding: str, column: str) -> Iterator[str | None]:
    from pyarrow import csv as table_csv
    from pyarrow import string
    with unpacked(path) as stream:
        head = decode(stream.peek(BLOCK)[:BLOCK], encoding)
        batches = table_csv.open_csv(
            stream, table_csv.ReadOptions(block_size=LONGEST_ROW, use_threads=False,
                                          encoding=encoding.removesuffix('-sig')),
            table_csv.ParseOptions(delimiter=delimiter(head), newlines_in_values=True),
            table_csv.ConvertOptions(include_columns=[column], column_types={column: string()}))
        for batch in batches:
            yield from batch.column(0).to_pylist()


def read_json_rows(path: str, file: File, column: str) -> Iterator[str | None]:
    with unpacked(path) as stream:
        if file.kind == 'array':
            yield from read_array(path, stream, file.encoding, column)
            return
        # Lines of bytes are decoded as they are parsed
        in_utf8 = file.encoding.startswith('utf-8')
        lines = stream if in_utf8 else io.TextIOWrapper(stream, file.encoding, newline='\n')
        end = b'' if in_utf8 else ''
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), end), 1):
            if line.isspace():
                continue
            try:
                value = json.loads(line)[column]
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                fail(f'{path}, line {number}: expected {{"{column}": "..."}} in UTF-8 on each line '
                     f'(--column=NAME reads another field), not {line[:60]!r} ({error})')
            yield check_row(value, column, f'{path}, line {number}')


def read_array(path: str, stream: io.BufferedReader, encoding: str,
               column: str) -> Iterator[str | None]:
    try:
        values = array_values(io.TextIOWrapper(stream, encoding).read)
        for number, row in enumerate(values, 1):
            check(isinstance(row, dict) and column in row, f'{path}, row {number}: expected '
                  f'{{"{column}": "..."}} (--column=NAME reads another field), not '
                  f'{str(row)[:60]!r}')
            yield check_row(row[column], column, f'{path}, row {number}')
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        fail(f'{path} is no array of rows: {error}')


def array_values(read: Callable[[int], str]) -> Iterator[Any]:
    """Yield the values of an array of JSON, of which `read` returns the next characters. Only as
    much is kept as the longest value needs. JSONDecodeError if it is none."""
    decoder = json.JSONDecoder()
    text = read(BLOCK)
    at = re.match(r'\s*\[', text).end()
    while True:
        at = re.compile(r'[\s,]*').match(text, at).end()
        if text.startswith(']', at):
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            # The value may end later: read as much again
            more = read(max(BLOCK, len(text) - at))
            if not more:
                raise
            text, at = text[at:] + more, 0
            continue
        yield value
        at = end
    rest = text[at + 1:] + read(BLOCK)
    if rest.strip():
        raise json.JSONDecodeError('more text after its end', rest, 0)


def check_row(value: Any, column: str, place: str) -> str | None:
    """Return the text of a row, None if it has none. UserError if it is no text."""
    if value is None:
        return None
    kinds = {list: 'a list', dict: 'an object', bytes: 'bytes'}
    check(isinstance(value, str), f'{place}: expected text in the column "{column}", not '
          f'{kinds.get(type(value), "a number")}, {str(value)[:60]!r} (--column=NAME reads another '
          'one)')
    # JSON can hold half of a surrogate pair, which is not text: replace it by "?"
    return value.encode('utf-8', 'replace').decode()


def split_text(path: str, encoding: str, separator: str) -> Iterator[str]:
    """Yield the texts between the separators of a text file, without line ends around them."""
    parts: list[str] = []  # of the text that has begun
    end = ''  # what follows these, in which a separator may begin
    for block in TextFile(path, encoding):
        *texts, end = (end + block).split(separator)
        for text in texts:
            yield ''.join([*parts, text]).strip('\r\n')
            parts = []
        finished = max(0, len(end) - len(separator) + 1)
        parts.append(end[:finished])
        end = end[finished:]
    yield ''.join([*parts, end]).strip('\r\n')


def check_separator(source: Source, where: str, separator: str | None) -> None:
    """UserError unless a separator of documents stands in a text file; rows have none."""
    if not separator:
        return
    texts = (TextFile(source.path(name), file.encoding)
             for name, file in source.files.items() if file.kind == 'text')
    check(any(has_separator(text, separator) for text in texts),
          f'separator={separator!r} is in no text file of {where}: expected one that is. A shell '
          "writes line ends as $'\\n\\n'; files from Windows have \\r\\n")


def has_separator(text: TextFile, separator: str) -> bool:
    """Return whether a separator of documents stands in a text file."""
    end = ''  # of the blocks before, where one may begin
    for block in text:
        if separator in end + block:
            return True
        end = (end + block)[-len(separator):]
    return False


def text_documents(path: str, reading: Reading) -> Iterator[Iterable[str]]:
    """Yield the documents of a file or folder, in blocks, as train.py --text reads them. Raises
    UserError."""
    source = find_source(os.path.abspath(keep_piped(path, reading)), reading)
    check_separator(source, path, reading.separator)
    if source.left_out:
        warn(f'{path} is not read whole. Left out: {describe_left_out(source.left_out)}')
    for name, file in source.files.items():
        yield from read_documents(source.path(name), file, reading)


# Standard input, and other pipes

def is_pipe(path: str) -> bool:
    """Return whether a path is standard input, '-', or another pipe, which is read only once."""
    return path == '-' or (os.path.exists(path) and not os.path.isfile(path)
                           and not os.path.isdir(path))


def keep_piped(path: str, reading: Reading) -> str:
    """Return the path of a text. Standard input, '-', or another pipe is first kept as a file in
    data/ that is named stdin, its hash, and what it is. Equal content is kept once. Raises
    UserError, OSError."""
    if not is_pipe(path):
        return path
    os.makedirs('data', exist_ok=True)
    temporary = f'data/.stdin-{os.getpid()}'
    digest = hashlib.sha256()
    try:
        with open(0 if path == '-' else path, 'rb', closefd=path != '-') as pipe, \
                open(temporary, 'wb') as file:
            while block := pipe.read(BLOCK):
                digest.update(block)
                file.write(block)
        check(os.path.getsize(temporary) > 0, f'{path} gave no text')
        found = look(temporary, reading)
        if isinstance(found, Reason):
            fail(not_read(path, found))
        suffix = {'text': '.txt', 'lines': '.jsonl', 'array': '.json', 'parquet': '.parquet'}
        kept = f'data/stdin-{digest.hexdigest()[:16]}{suffix[found.kind]}'
        if not os.path.exists(kept):  # its time of change stays, by which its data are found
            os.replace(temporary, kept)
    finally:
        Path(temporary).unlink(missing_ok=True)
    print(f'Read {os.path.getsize(kept):,} bytes of {path}, kept as {kept}', flush=True)
    return kept


def read_text(path: str) -> str:
    """Read a text file, or a pipe, whole. Raises UserError if it is no text, OSError."""
    if not is_pipe(path):
        with open(path, 'rb') as file:
            encoding = encoding_of_mark(file.read(4))
        return ''.join(TextFile(path, encoding))
    with open(0 if path == '-' else path, 'rb', closefd=path != '-') as pipe:
        content = pipe.read()
    try:
        return content.decode(encoding_of_mark(content))
    except UnicodeDecodeError as error:
        fail(not_in(error.encoding, path, error.start, error.reason))

"""Find the files of an input, and say what each of them is: text, rows, or why it is not read."""
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
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from configurator import check, fail, warn
from nanocem.documents import (
    BLOCK,
    LONGEST_ROW,
    NUL_REMEDY,
    PACKED,
    ROWS,
    File,
    Reading,
    TextFile,
    array_values,
    decode_block,
    decode_file,
    delimiter,
    encoding_of_mark,
    has_separator,
    not_in,
    packed_by,
    read_documents,
    reading_errors,
    unpacked,
)

HUB = 'hf://datasets/'
LIBRARY = sysconfig.get_paths()['stdlib']
# The words that Hugging Face's datasets knows in the names of files and folders
SPLIT_WORDS = {'train': 'train', 'training': 'train',
               'val': 'val', 'valid': 'val', 'validation': 'val', 'dev': 'val',
               'test': 'test', 'testing': 'test', 'eval': 'test', 'evaluation': 'test'}
INSTALLED = {'node_modules', 'site-packages', 'dist-packages', '__pycache__'}  # folders' names
INSTALLED_MARKS = {'CACHEDIR.TAG', 'pyvenv.cfg'}  # files that mark such a folder
KEPT_INPUT = re.compile(r'stdin-[0-9a-f]{16}\.\w+')  # what keep_piped writes into data/
CARDS = re.compile(r'(readme|licen[cs]e|copying|notice|citation|changelog)\b', re.IGNORECASE)
LARGEST_OBJECT = 1 << 26  # bytes of a file of JSON that is looked into for rows
CONTROL = re.compile(rb'[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]')  # bytes that are in hardly any text


class Reason(NamedTuple):
    """Why a file is not read."""
    words: str
    remedy: str = ''  # what makes text of it; '': it was hardly meant
    detail: str = ''  # about this file alone
    is_rows: bool = False  # not one document


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
ONE_ROW = Reason('JSON, one row on many lines', 'jq -c . FILE >> NEW.jsonl makes a row of it')
NOTEBOOK = Reason('Jupyter', 'jupyter nbconvert --to markdown FILE converts it')
WITH_NUL = Reason('text with NUL bytes', NUL_REMEDY)
NOT_UTF8 = Reason('not UTF-8', '--encoding=cp1252, or the name of another encoding, reads it')
DAMAGED = Reason('damaged UTF-8', 'iconv -c -f utf-8 -t utf-8 FILE > NEW leaves it out')
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


# Files

def find_source(where: str, reading: Reading) -> Source:
    """Find the files of an input, and say which of them are read. UserError if there are none, or
    if most of what may be meant is not read."""
    if where == 'builtin':  # the standard library, without its tests and installed packages
        excluded = {'test', 'tests', 'idle_test'}
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
    text = decode_block(head, encoding)
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
    place = ''
    with contextlib.suppress(RecursionError):  # it is nested too deeply for rows
        place = rows_inside(value, reading.column)
    if place:
        place = '.' + place.removeprefix('.')  # for jq an array at the top is .[]
        return Reason('JSON with rows inside', f"jq -c '{place}' FILE > NEW.jsonl writes them; "
                      'docs/data.md has a line that makes one document of a conversation',
                      is_rows=True)
    if isinstance(value, dict) and isinstance(value.get(reading.column), str):
        return ONE_ROW
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
    return Reason(f'without "{reading.column}" in its rows', '--column=NAME reads another one '
                  '(docs/data.md: conversations, and tables without a first line of names)',
                  f', only {known}', is_rows=True)


def parquet_columns(path: str) -> list[str]:
    from pyarrow.parquet import ParquetFile
    with reading_errors(path), open(path, 'rb') as file, ParquetFile(file) as table:
        return table.schema_arrow.names


def table_columns(text: str) -> list[str]:
    """Return the names of a table's columns, from its beginning."""
    with io.StringIO(text, newline='') as lines:
        return next(csv.reader(lines, delimiter=delimiter(text)), [])


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
    if b'\0' not in head and is_damaged_utf8(islice(decode_file(path, 'utf-8', 'replace'), 1000)):
        return DAMAGED
    if is_text(head, given) and is_whole_text(path, given):
        return given
    reason = why_no_text(head)
    return reason if reason == BINARY else Reason(
        f'neither UTF-8 nor {given}', 'the name of another --encoding may read it')


def is_text(head: bytes, encoding: str) -> bool:
    """Return whether the first block of a file is text in this encoding, without NUL."""
    try:
        return '\0' not in decode_block(head, encoding)
    except UnicodeError:  # also of UTF-16 without its mark
        return False


def is_whole_text(path: str, encoding: str) -> bool:
    try:
        return not any('\0' in text for text in decode_file(path, encoding))
    except UnicodeError:  # also of UTF-16 without its mark
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
            text = decode_block(head, encoding)
            printable = sum(map(str.isprintable, text)) + sum(map(str.isspace, text))
            if text.count(' ') > len(text) / 50 and printable > 0.95 * len(text):
                return Reason('UTF-16 without a mark of byte order',
                              f'--encoding={encoding} reads it')
    rest = head.replace(b'\0', b'')
    return WITH_NUL if rest and is_text(rest, 'utf-8') and not CONTROL.search(rest) else BINARY


# What evaluate.py reads

def text_documents(path: str, reading: Reading) -> Iterator[Iterable[str]]:
    """Yield the documents of a file or folder, in blocks, as train.py --text reads them. Raises
    UserError."""
    source = find_source(os.path.abspath(keep_piped(path, reading)), reading)
    check_separator(source, path, reading.separator)
    if source.left_out:
        warn(f'{path} is not read whole. Left out: {describe_left_out(source.left_out)}')
    for name, file in source.files.items():
        yield from read_documents(source.path(name), file, reading)


def check_separator(source: Source, where: str, separator: str | None) -> None:
    """UserError unless a separator of documents stands in a text file; rows have none."""
    if not separator:
        return
    texts = (TextFile(source.path(name), file.encoding)
             for name, file in source.files.items() if file.kind == 'text')
    check(any(has_separator(text, separator) for text in texts),
          f'separator={separator!r} is in no text file of {where}: expected one that is. A shell '
          "writes line ends as $'\\n\\n'; files from Windows have \\r\\n")


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

"""Read the documents of a file: its rows, the texts between separators, or a whole text."""
import codecs
import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from configurator import check, fail

# Files in which each row is a document
ROWS = ('.jsonl', '.ndjson', '.json', '.csv', '.tsv', '.parquet')
# Rows are read packed, too: suffixes, pyarrow's names, and how such files begin
PACKED = {'.gz': ('gzip', b'\x1f\x8b'), '.zst': ('zstd', b'\x28\xb5\x2f\xfd'),
          '.bz2': ('bz2', b'BZh')}
BLOCK = 1 << 16  # Text is read in blocks of at most this many bytes.
LONGEST_ROW = 1 << 24  # bytes; rows of tables are shorter, and of JSON those that tell what it is
LONGEST_LINE = 1 << 28  # bytes; what is longer, such as a hole in a file, is no row
# Matches a text up to its last word that a space or line end follows. No token spans that place, so
# the two parts can be encoded separately. (A user's model may differ.)
WHOLE_WORDS = re.compile('.*[^\\s\u2581](?=[ \\n])', re.DOTALL)
NUL_REMEDY = "damaged? tr -d '\\000' < FILE > NEW leaves them out"


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

    def check_text(self, text: str | None) -> None:
        """UserError for an option of reading without a text to read."""
        for name in self.given():
            check(bool(text), f'{name} is for --text=FILE: data is read already')

    def given(self) -> dict[str, Any]:
        """Return those that are not the defaults."""
        return {name: value for name, value in self._asdict().items()
                if value != self._field_defaults[name]}


class File(NamedTuple):
    """A file that is read."""
    kind: str  # text, or rows: lines or an array of JSON, table (.csv, .tsv), parquet
    encoding: str = 'utf-8'
    split: str | None = None  # that its name says
    size: int = 0  # bytes
    changed: int = 0  # when it was last changed, in ns


# Documents

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
                      + NUL_REMEDY.replace('FILE', shlex.quote(self.path)))
                words = WHOLE_WORDS.match(text) if left > 0 else None
                end = words.end() if words else len(text)
                if end > 0:
                    yield text[:end]
                text = text[end:]


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


def has_separator(text: TextFile, separator: str) -> bool:
    """Return whether a separator of documents stands in a text file."""
    end = ''  # of the blocks before, where one may begin
    for block in text:
        if separator in end + block:
            return True
        end = (end + block)[-len(separator):]
    return False


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
        head = decode_block(stream.peek(BLOCK)[:BLOCK], encoding)
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


# Bytes and characters

@contextlib.contextmanager
def unpacked(path: str) -> Iterator[io.BufferedReader]:
    """Open a file as bytes, unpacked if it is packed. pyarrow opens no path that is not UTF-8."""
    try:
        with open(path, 'rb') as file:
            packed = packed_by(file.peek(4)[:4])
            if not packed:
                yield file
                return
            from pyarrow import input_stream
            with reading_errors(path), input_stream(file, compression=packed) as stream:
                yield io.BufferedReader(stream, 1 << 20)
    except OSError as error:
        fail(f'{path}: {error}')


def packed_by(head: bytes) -> str | None:
    """Return what packed a file that begins with `head`, if pyarrow unpacks it."""
    return next((name for name, begin in PACKED.values() if head.startswith(begin)), None)


@contextlib.contextmanager
def reading_errors(path: str) -> Iterator[None]:
    """Give pyarrow's errors, and the system's, one line with the path."""
    from pyarrow import ArrowException
    try:
        yield
    except (ArrowException, OSError) as error:
        hint = ' (--encoding=cp1252, or another, reads what is not UTF-8)'
        fail(f'{path}: {error}' + (hint if 'UTF8' in str(error) else ''))


def delimiter(text: str) -> str:
    """Return what stands between the columns of a table: what its first line has most of."""
    line = re.sub('"[^"]*"', '', text.lstrip().partition('\n')[0])  # not inside quotes
    return max(',;\t', key=line.count)


def encoding_of_mark(head: bytes) -> str:
    """Return the encoding that a byte order mark names, or else UTF-8."""
    marks = {codecs.BOM_UTF8: 'utf-8-sig', codecs.BOM_UTF32_LE: 'utf-32',
             codecs.BOM_UTF16_LE: 'utf-16', codecs.BOM_UTF16_BE: 'utf-16'}
    return next((name for mark, name in marks.items() if head.startswith(mark)), 'utf-8')


def decode_block(head: bytes, encoding: str) -> str:
    """Decode the first block of a file, which may end inside a character. UnicodeDecodeError."""
    return codecs.getincrementaldecoder(encoding)().decode(head, final=len(head) < BLOCK)


def decode_file(path: str, encoding: str, errors: str = 'strict') -> Iterator[str]:
    """Yield a whole file, decoded. UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    with unpacked(path) as stream:
        while data := stream.read(BLOCK):
            yield decoder.decode(data)
    yield decoder.decode(b'', final=True)


def not_in(encoding: str, path: str, byte: int, reason: str) -> str:
    """Return what a user reads whose file is not in this encoding."""
    return (f'{path}: not {encoding.upper()} at byte {byte:,} ({reason}). If it has another '
            'encoding, --encoding=NAME reads it as a --text, and iconv -f ENCODING -t utf-8 '
            'converts it; if a few characters are damaged, iconv -c -f utf-8 -t utf-8 leaves them '
            'out')

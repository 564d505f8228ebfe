"""Read texts: find the files of an input, and read their documents, or text files in blocks."""
import codecs
import hashlib
import io
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nanocem.errors import check, fail

HUB = 'hf://datasets/'
PACKED = {'.gz': 'gzip', '.zst': 'zstd', '.bz2': 'bz2'}  # what is read packed, and its name
JSON_ROWS = tuple(kind + packed for kind in ('.jsonl', '.ndjson', '.json')
                  for packed in ('', *PACKED))
ROWS = ('.parquet', *JSON_ROWS)  # files in which each row is a document
SUFFIXES = (*ROWS, '.txt')
TABLES = ('.csv', '.tsv')  # not read: a column of text needs a parser of quotes
LIBRARY = sysconfig.get_paths()['stdlib']
# The words that Hugging Face's datasets knows in the names of files and folders
SPLIT_WORDS = {'train': 'train', 'training': 'train',
               'val': 'val', 'valid': 'val', 'validation': 'val', 'dev': 'val',
               'test': 'test', 'testing': 'test', 'eval': 'test', 'evaluation': 'test'}
MAGIC = (b'\x1f\x8b', b'\x28\xb5\x2f\xfd', b'BZh', b'\xfd7zXZ', b'PK')  # how packed files begin
LONGEST_ROW = 1 << 24  # bytes that are looked at, to find out whether a file has rows
BLOCK = 1 << 16  # A text file is read in blocks of at most this many bytes.
# Matches a text up to its last word that a space or line end follows. No token spans that place, so
# the two parts can be encoded separately. (A user's model may differ.)
WHOLE_WORDS = re.compile('.*[^\\s\u2581](?=[ \\n])', re.DOTALL)


# Files

class Source(NamedTuple):
    """Files of text, in the order in which they are read."""
    root: str  # a folder, or hf://datasets/OWNER/NAME@COMMIT
    files: dict[str, str | None]  # paths below root, and the split that each is named after
    left_out: dict[str, int]  # how many other files there are of each suffix

    def path(self, file: str) -> str:
        """Return the path of a file, after downloading it if it is on the Hub."""
        if not self.root.startswith(HUB):
            return os.path.join(self.root, file)
        from huggingface_hub import hf_hub_download
        repository, commit = self.root.removeprefix(HUB).split('@')
        return hf_hub_download(repository, file, repo_type='dataset', revision=commit)


def find_source(where: str, column: str = 'text') -> Source:
    """Find the files of an input. UserError if there are none."""
    if where == 'builtin':  # the standard library, without its tests and installed packages
        excluded = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}
        names = [name for name in list_files(LIBRARY)
                 if name.endswith('.py') and excluded.isdisjoint(name.split('/'))]
        return Source(LIBRARY, dict.fromkeys(names), {})
    if os.path.isfile(where):
        folder, name = os.path.split(where)
        check(suffix_of(name) not in TABLES, f'{where} is a table, which is not read: expected '
              'text or rows of JSON, which pandas.read_csv(FILE).to_json("rows.jsonl", '
              'orient="records", lines=True) writes')
        return Source(folder, {name: None}, {})
    check(os.path.isdir(where) or where.startswith(HUB), f'{where}: no such file or folder')
    root, names = list_hub(where) if where.startswith(HUB) else (where, list_files(where))
    source = Source(root, {name: find_split(name) for name in names
                           if name.lower().endswith(SUFFIXES)}, {})
    # Beside other files, a .json that does not begin with a row describes them: leave it out.
    # Where none of them surely has rows, one with other fields may be meant, and is refused later
    unsure = [name for name in source.files if suffix_of(name) == '.json']
    sure = [name for name in source.files if name.lower().endswith(ROWS) and name not in unsure]
    if len(unsure) < len(source.files):
        for name in unsure:
            if not begins_with_row(source.path(name), column if sure else None):
                del source.files[name]
    left_out = Counter(suffix_of(name) for name in names
                       if name not in source.files and os.path.basename(name)[0] != '.')
    check(bool(source.files), f'{where} holds no .parquet, .jsonl, .ndjson, .json (also '
          f'{", ".join(PACKED)}) or .txt file'
          + (f', only {count_suffixes(left_out)}; as one text: cat FILES | python train.py --text=-'
             if left_out else ''))
    # Read val and test first: reading stops when the train split is full
    order = sorted(source.files, key=lambda name: source.files[name] not in ('val', 'test'))
    return Source(root, {name: source.files[name] for name in order}, dict(left_out))


def find_split(name: str) -> str | None:
    """Return the split that a path names: train/a.jsonl, TinyStories-valid.txt, testset2.txt."""
    stem = name.lower().removesuffix(suffix_of(name))
    words = [re.sub('(set|data)$', '', word) for word in re.split(r'[\W\d_]+', stem)]
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def suffix_of(name: str) -> str:
    """Return a file's suffix in lower case, with that before a packed one's: '.json.gz'."""
    base = os.path.basename(name).lower()
    return re.search(r'((\.\w+)?\.(gz|zst|bz2|xz|zip)|\.\w+|)\Z', base)[0]


def count_suffixes(counts: dict[str, int]) -> str:
    """Return how many files there are of each suffix in words: '2 .md, 1 without suffix'."""
    return ', '.join(f'{n} {suffix or "without suffix"}' for suffix, n in sorted(counts.items()))


def is_pipe(path: str) -> bool:
    """Return whether a path is standard input, '-', or another pipe, which is read only once."""
    return path == '-' or (os.path.exists(path) and not os.path.isfile(path)
                           and not os.path.isdir(path))


def keep_piped(path: str) -> str:
    """Return the path of a text. Standard input, '-', or another pipe is first kept as a file:
    data/stdin-HASH.jsonl if it begins with a row, or else .txt. Equal content is kept once. Raises
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
        suffix = '.jsonl' if begins_with_row(temporary) else '.txt'
        kept = f'data/stdin-{digest.hexdigest()[:16]}{suffix}'
        if not os.path.exists(kept):  # its time of change stays, by which its data are found
            os.replace(temporary, kept)
    finally:
        Path(temporary).unlink(missing_ok=True)
    print(f'Read {os.path.getsize(kept):,} bytes of {path}, kept as {kept}', flush=True)
    return kept


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

def has_rows(path: str, separator: str | None = None) -> bool:
    """Return whether a file holds many documents: rows, or texts between separators. Where its
    suffix does not say so, its first line does."""
    if path.lower().endswith(ROWS) or separator:
        return True
    return not path.lower().endswith('.txt') and begins_with_row(path)


def begins_with_row(path: str, column: str | None = None) -> bool:
    """Return whether the first line of a file is a row of JSON, with the field `column` if that is
    given, or whether it begins an array of rows, which is refused when it is read."""
    with open(path, 'rb') as file:
        if re.match(rb'\s*\[\s*\{', file.read(BLOCK)):
            return True
        file.seek(0)
        lines = iter(lambda: file.readline(LONGEST_ROW), b'')
        line = next((line for line in lines if not line.isspace()), b'')
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and (column is None or column in row)


def read_documents(path: str, column: str = 'text', separator: str | None = None) -> Iterator[str]:
    """Yield the documents of a file that are not empty: its rows, the texts between separators, or
    a whole text. UserError if it is damaged."""
    import pyarrow
    if path.lower().endswith('.parquet'):
        texts = read_parquet(path, column)
    elif path.lower().endswith(ROWS) or (not separator and has_rows(path)):
        texts = read_jsonl(path, column)
    elif separator:
        texts = split_text(path, separator)
    else:
        texts = [read_text(path)]
    try:
        yield from filter(None, texts)
    except (pyarrow.ArrowException, OSError) as error:
        fail(f'{path}: {error}')


def read_parquet(path: str, column: str) -> Iterator[str | None]:
    from pyarrow.parquet import ParquetFile
    number = 0
    # pyarrow opens no path that is not UTF-8. Without buffer_size and pre_buffer it keeps
    # everything in memory that it has read.
    with open(path, 'rb') as file, \
            ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        check(column in names,
              f'{path} has no "{column}" column, only {", ".join(names)} '
              '(prepare_slimpajama.py --column=NAME reads another one)')
        for batch in table.iter_batches(batch_size=64, columns=[column], use_threads=False):
            for value in batch.column(0):
                number += 1
                try:
                    text = value.as_py()
                except ValueError as error:
                    fail(f'{path}, row {number}: not UTF-8 ({error})')
                check(text is None or isinstance(text, str), f'{path}, row {number}: expected '
                      f'text in the column "{column}", not {str(text)[:60]!r} '
                      '(prepare_slimpajama.py --column=NAME reads another one)')
                yield text


def read_jsonl(path: str, column: str) -> Iterator[str]:
    from pyarrow import input_stream
    packed = next((name for end, name in PACKED.items() if path.lower().endswith(end)), None)
    with open(path, 'rb') as file, input_stream(file, compression=packed) as stream:
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)[column] or ''
                # JSON can hold half of a surrogate pair, which is not text: replace it by "?".
                text = text.encode('utf-8', 'replace').decode()
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                array = number == 1 and line.lstrip().startswith(b'[')
                hint = "; of an array jq -c '.[]' FILE > NEW.jsonl writes the rows" if array else ''
                fail(f'{path}, line {number}: expected {{"{column}": "..."}} in UTF-8 on each line '
                     f'(prepare_slimpajama.py --column=NAME reads another field{hint}), '
                     f'not {line[:60]!r} ({error})')
            yield text


def split_text(path: str, separator: str) -> Iterator[str]:
    """Yield the texts between the separators of a text file, without line ends around them."""
    rest = ''
    for block in read_blocks(path):
        *texts, rest = (rest + block).split(separator)
        yield from (text.strip('\r\n') for text in texts)
    yield rest.strip('\r\n')


def check_separator(source: Source, where: str, separator: str) -> None:
    """UserError unless a separator of documents stands in a text file; files of rows have none."""
    texts = (file for file in source.files if not file.lower().endswith(ROWS))
    check(any(has_separator(source.path(file), separator) for file in texts),
          f'separator={separator!r} is in no text file of {where}: expected one that is. A shell '
          "writes line ends as $'\\n\\n'; files from Windows have \\r\\n")


def has_separator(path: str, separator: str) -> bool:
    """Return whether a separator of documents stands in a text file."""
    end = ''  # of the blocks before, where one may begin
    for block in read_blocks(path):
        if separator in end + block:
            return True
        end = (end + block)[-len(separator):]
    return False


def text_documents(path: str, separator: str | None = None) -> Iterator[str]:
    """Yield the documents of a file or folder, as train.py --text reads them. Raises UserError."""
    source = find_source(os.path.abspath(keep_piped(path)))
    if separator:
        check_separator(source, path, separator)
    for file in source.files:
        yield from read_documents(source.path(file), separator=separator)


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
                file.seek(0)
                check(not file.read(6).startswith(MAGIC), f'{path} is compressed: unpack it first')
                fail(f'{path}: not UTF-8 at byte {begin + error.start:,} ({error.reason}). If it '
                     'has another encoding, iconv -f ENCODING -t utf-8 converts it; if a few '
                     'characters are damaged, iconv -c -f utf-8 -t utf-8 leaves them out')
            if not is_last and (words := WHOLE_WORDS.match(text)):
                text = words[0]
            yield text
            begin += len(text.encode())


def read_text(path: str) -> str:
    """Read a text file, or a pipe. Raises UserError if it is not UTF-8, OSError."""
    return ''.join(read_blocks(keep_piped(path)))

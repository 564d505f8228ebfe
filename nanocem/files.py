"""Files and folders that are written completely or not at all; JSON, CSV, tables and pictures."""
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configurator import fail

PARTIAL = '.partial'  # inside a folder that is being filled: what is written so far
WHOLE = '.whole'  # the same when all is written and its files are being moved into the folder
LONGEST_NAME = 150  # bytes of a name from options; a file system allows 255, suffixes included
NEW_DISK = ('lost+found', 'System Volume Information', '$RECYCLE.BIN')  # what an empty disk has


@contextlib.contextmanager
def name_in_errors(path: str) -> Iterator[None]:
    """Add a path to each OSError that has none: open() names the file in its errors, but write(),
    which fails when the disk is full, does not."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = path
        raise


def write_atomic(path: str, data: bytes) -> None:
    """Write a file completely or not at all. OSError if that fails."""
    temporary = Path(f'{path}.tmp')
    try:
        with name_in_errors(path), open(temporary, 'wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def fill_folder(folder: str, last: str) -> Iterator[Path]:
    """Fill a folder with files: all of them or none. It is made if it is missing. Yield an empty
    folder inside it, on the same disk, to write to. At the end its files are moved up, the one
    named `last` after all others: where that is, the folder is whole. After an error what was
    written is deleted, and so is a folder that was made here. Raises OSError."""
    path = Path(folder)
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    partial = path / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        with name_in_errors(folder):
            partial.mkdir()
            yield partial
        partial.rename(path / WHOLE)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):  # it has other files by now
                path.rmdir()
        raise
    finish_folder(folder, last)


def finish_folder(folder: str, last: str) -> None:
    """Move the files up that fill_folder has written, in case its process was killed before."""
    whole = Path(folder, WHOLE)
    if whole.exists():
        for file in sorted(whole.iterdir(), key=lambda file: file.name == last):
            file.replace(Path(folder, file.name))
        whole.rmdir()


def other_files(folder: str) -> list[str]:
    """Return the names of what a folder holds, without hidden files and what a new disk has. []
    if there is no folder."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if name[0] != '.' and name not in NEW_DISK)


def read_json(path: str) -> dict[str, Any] | None:
    """Read the object in a JSON file; None if there is no file. UserError if it is damaged."""
    if not os.path.exists(path):
        return None
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:  # no JSON, or no UTF-8
        fail(f'{path} is damaged ({error})')


def read_json_lines(path: str) -> list[dict[str, Any]]:
    """Read the objects in a file of JSON lines. Damaged lines, such as the last one of a process
    that was killed, are left out. OSError."""
    found = []
    for line in Path(path).read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def to_json(values: dict[str, Any], indent: int | None = None) -> bytes:
    """Encode as JSON, by what `plain` makes of the values."""
    return json.dumps(plain(values), indent=indent, allow_nan=False).encode()


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: a tensor or an array as its numbers, NaN and infinity as
    None, since JSON has neither, and anything but numbers, text, lists and dictionaries as text."""
    if hasattr(value, 'tolist'):  # of torch or NumPy
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (int, str)) else str(value)


def write_json(path: Path, **values: Any) -> None:
    path.write_bytes(to_json(values, indent=2) + b'\n')


# What was measured

def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def csv_text(rows: list[dict[str, str]]) -> str:
    """Format rows of the same names as a CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in lines)


def save_picture(figure: Any, kind: str, run: str, subject: str) -> str:
    """Write matplotlib's figure of a run to out/results, with its subject below, and return its
    path. OSError."""
    run = os.path.normpath(run).removeprefix('out/').strip('/').replace('/', '-')
    path = f'out/results/{short_name(f"{kind}-{run}")}.png'
    figure.supxlabel(subject, fontsize=7, parse_math=False)
    os.makedirs('out/results', exist_ok=True)
    with name_in_errors(path):
        figure.savefig(path, dpi=100)
    return path


def short_name(name: str) -> str:
    """Return a file's name from options as it is, or if it is too long its beginning and a hash of
    the whole, so that different names stay different."""
    encoded = os.fsencode(name)
    if len(encoded) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:12]
    beginning = encoded[:LONGEST_NAME - 1 - len(digest)].decode(errors='ignore')
    return f'{beginning}-{digest}'

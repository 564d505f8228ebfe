"""Files that are written whole or not at all; locks; lines on the screen that cannot end a run."""
import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from filelock import FileLock, Timeout

from configurator import UserError, fail


def say(text: str, end: str = '\n') -> None:
    """Print a line, at once. A closed pipe, a full disk behind stdout, or a locale that lacks a
    character costs the line at most, never the program."""
    stream = sys.stdout
    line = (text + end).encode(getattr(stream, 'encoding', None) or 'utf-8', 'backslashreplace')
    with contextlib.suppress(OSError, ValueError, AttributeError):  # None, or closed
        stream.flush()
        try:
            while line:
                line = line[os.write(stream.fileno(), line):]
        except io.UnsupportedOperation:  # a notebook's or a test's stdout
            stream.write(line.decode(stream.encoding or 'utf-8'))


def on_terminal() -> bool:
    """Whether what is said is read as it comes."""
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with its columns aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in lines)


def write_atomic(path: str, data: bytes) -> None:
    """Write a file whole or not at all. OSError where the disk does not take it."""
    try:
        with open(path + '.tmp', 'wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + '.tmp', path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        raise


def read_json(path: str, remedy: str = 'delete it') -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file. UserError, with what to do, where it is
    damaged or holds something else."""
    if not os.path.exists(path):
        return None
    with open(path, encoding='utf-8') as file, contextlib.suppress(ValueError, RecursionError):
        if isinstance(content := json.load(file), dict):
            return content
    fail(f'{path} is damaged: {remedy}')


def read_json_lines(path: str) -> list[dict[str, Any]]:
    """The objects in a file of one to a line, damaged lines left out. OSError."""
    found = []
    with open(path, encoding='utf-8', errors='replace') as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return [content for content in found if isinstance(content, dict)]


def to_json(values: dict[str, Any], indent: int | None = None) -> bytes:
    """As JSON, where NaN and infinity, which JSON does not have, become null."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value
             for key, value in values.items()}
    return json.dumps(plain, indent=indent, allow_nan=False).encode()


def lock(path: str, wait: bool = False) -> contextlib.AbstractContextManager[Any] | None:
    """Lock the file `path`, made if need be, until the returned context ends or this process does.
    None where another process holds it. A file system without locks holds nothing back."""
    try:
        return FileLock(path, timeout=-1 if wait else 0).acquire()
    except Timeout:
        return None
    except OSError:
        return contextlib.nullcontext()


@contextlib.contextmanager
def locked(path: str, busy: str) -> Iterator[None]:
    """Hold the file `path`, once no other process does; say `busy` where there is one. The file is
    deleted at the end."""
    handle = lock(path)
    if handle is None:
        say(f'{busy} by another process: waiting for it')
        handle = lock(path, wait=True)
    with handle:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.remove(path)


class BadFile(UserError):
    """A file that cannot be read to its end."""


def read_text(path: str) -> Iterator[str]:
    """A text file, a chunk at a time. BadFile where it is not UTF-8; Python's library comes as it is."""
    try:
        errors = 'replace' if path.endswith('.py') else 'strict'
        with open(path, encoding='utf-8', errors=errors, newline='') as file:
            yield from iter(lambda: file.read(1 << 20), '')
    except UnicodeDecodeError as error:
        raise BadFile(f'{path} is not UTF-8 ({error.reason}): no text, or of another encoding (iconv -f latin1 -t '
                  'utf-8 makes it UTF-8)') from None


def read_text_file(path: str, option: str) -> str:
    """The text file that an option (text=) names. SystemExit where it is none, or not in UTF-8."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for, for ever
        fail(f'{option}{path} is no file; expected a text file')
    return ''.join(read_text(path))

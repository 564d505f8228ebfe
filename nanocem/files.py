"""Tables, JSON, and files that are written completely or not at all."""
import codecs
import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from filelock import FileLock, Timeout

from configurator import fail


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in lines)


def write_atomic(path: str, data: bytes) -> None:
    """Write a file completely or not at all. OSError, with the file's name, if that fails."""
    try:
        with open(path + '.tmp', 'wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + '.tmp', path)
    except BaseException as error:  # a Ctrl-C, too
        if isinstance(error, OSError):
            error.filename = path
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        raise


def read_json(path: str, remedy: str = 'delete it') -> dict[str, Any] | None:
    """Read the object in a JSON file; None if there is no file. UserError, with what to do, if the
    file is damaged or holds something else."""
    if not os.path.exists(path):
        return None
    with open(path, encoding='utf-8') as file, contextlib.suppress(ValueError):
        if isinstance(content := json.load(file), dict):
            return content
    fail(f'{path} is damaged: {remedy}')


def read_json_lines(path: str) -> list[dict[str, Any]]:
    """Read the objects in a file of JSON lines. Damaged lines are left out. OSError."""
    found = []
    with open(path, encoding='utf-8', errors='replace') as file:
        for line in file:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [content for content in found if isinstance(content, dict)]


def to_json(values: dict[str, Any], indent: int | None = None) -> bytes:
    """Encode as JSON. Values that are NaN or infinite become null, because JSON has neither. Inside
    other values they raise ValueError."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value
             for key, value in values.items()}
    return json.dumps(plain, indent=indent, allow_nan=False).encode()


# Until the last room that calls these has changed

def say(text: str) -> None:
    """Print a line immediately. A closed pipe or a full disk loses the line, but does not end the
    program. Characters that the locale lacks are escaped."""
    stream = sys.stdout
    encoding = getattr(stream, 'encoding', None) or 'utf-8'
    line = f'{text}\n'.encode(encoding, 'backslashreplace')
    with contextlib.suppress(OSError, ValueError, AttributeError):  # None, or closed
        stream.flush()
        # A notebook's or a test's stdout is no file, though a notebook's has a descriptor
        if not isinstance(getattr(stream, 'buffer', None), io.BufferedWriter | io.FileIO):
            stream.write(line.decode(encoding))
            return stream.flush()
        while line:
            line = line[os.write(stream.fileno(), line):]


def lock(path: str, wait: bool = False) -> contextlib.AbstractContextManager[Any] | None:
    """Create and lock the file `path` until the returned context or this process ends. Return None
    if another process holds the lock. Where files cannot be locked, do nothing."""
    try:
        return FileLock(path, timeout=-1 if wait else 0).acquire()
    except Timeout:
        return None
    except OSError:
        return contextlib.nullcontext()


@contextlib.contextmanager
def locked(path: str, busy: str) -> Iterator[None]:
    """Lock the file `path`. If another process holds the lock, say `busy` and wait. The file is
    deleted at the end."""
    held = lock(path)
    if held is None:
        say(f'{busy} by another process: waiting for it')
        held = lock(path, wait=True)
    with held:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.remove(path)


def read_text(path: str) -> Iterator[str]:
    """Read a text file in chunks. UserError if it is not UTF-8, except for Python source, where
    undecodable bytes are replaced."""
    errors = 'replace' if path.endswith('.py') else 'strict'
    try:
        with open(path, encoding='utf-8', errors=errors, newline='') as file:
            yield from iter(lambda: file.read(1 << 20), '')
    except UnicodeDecodeError as error:
        with open(path, 'rb') as file:
            utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = 'utf-16' if utf16 else 'latin1'
        fail(f'{path}: not UTF-8 ({error.reason}); if it is text, iconv -f {encoding} -t utf-8 '
             'converts it')


def read_text_file(path: str, option: str) -> str:
    """Read the text file that an option names, for example text=. UserError if it is not a file or
    not UTF-8."""
    path = os.path.expanduser(path)  # the shell leaves the ~ of --prompt=FILE:~/x
    if not path or (os.path.exists(path) and not os.path.isfile(path)):  # a pipe would wait forever
        fail(f'{option}{path} is not a file; expected a text file')
    return ''.join(read_text(path))

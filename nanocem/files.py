"""Tables, JSON, and files that are written completely or not at all."""
import contextlib
import json
import math
import os
from typing import Any

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


def read_json(path: str, remedy: str = 'it holds no JSON object') -> dict[str, Any] | None:
    """Read the object in a JSON file; None if there is no file. UserError, with `remedy`, if the
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

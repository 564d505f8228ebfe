"""JSON, Markdown tables, and files that are written completely or not at all."""
import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

from configurator import fail


def write_atomic(path: str, data: bytes) -> None:
    """Write a file completely or not at all. OSError if that fails."""
    temporary = Path(f'{path}.tmp')
    try:
        with open(temporary, 'wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
    """Encode as JSON. Values that are NaN or infinite become null, because JSON has neither. Inside
    other values they raise ValueError."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value
             for key, value in values.items()}
    return json.dumps(plain, indent=indent, allow_nan=False).encode()


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in lines)

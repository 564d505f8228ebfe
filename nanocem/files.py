"""Files that are written completely or not at all, their names; JSON, CSV, tables and pictures."""
import contextlib
import csv
import hashlib
import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

from configurator import fail, warn

LONGEST_NAME = 150  # bytes of a name from options; a file system allows 255, suffixes included


def short_name(name: str) -> str:
    """Return a file's name from options as it is, or if it is too long its beginning and a hash of
    the whole, so that different names stay different."""
    encoded = os.fsencode(name)
    if len(encoded) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:12]
    beginning = encoded[:LONGEST_NAME - 1 - len(digest)].decode(errors='ignore')
    return f'{beginning}-{digest}'


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


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def to_json(values: dict[str, Any], indent: int | None = None) -> bytes:
    """Encode as JSON. Values that are NaN or infinite become null, because JSON has neither. Inside
    other values they raise ValueError."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value
             for key, value in values.items()}
    return json.dumps(plain, indent=indent, allow_nan=False).encode()


def write_json(path: Path, **values: Any) -> None:
    path.write_bytes(to_json(values, indent=2) + b'\n')


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ['-' * width for width in widths], *rows]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in lines)


def save_picture(figure: Any, path: str, dpi: int) -> None:
    """Write a figure of matplotlib. Its font may lack characters, which then are boxes: a line on
    stderr names them, in place of a warning for each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings('always', 'Glyph ')
        figure.savefig(path, dpi=dpi)
    lacking = []
    for warning in caught:
        if glyph := re.match(r'Glyph (\d+) ', str(warning.message)):
            lacking.append(chr(int(glyph[1])))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename,
                                   warning.lineno)
    if lacking:
        warn(f'boxes stand in {path} for characters that its font lacks: '
             f'{"".join(dict.fromkeys(lacking))}')

"""What was measured, for people: CSVs, tables of Markdown, and pictures."""
import csv
import hashlib
import io
import os
from typing import Any

LONGEST_NAME = 150  # bytes of a name from options; a file system allows 255, suffixes included


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

"""Errors that a user can fix: each ends a script with one line."""
import sys
from typing import NoReturn


class UserError(ValueError):
    """An error that the user can fix: it ends a script with one line."""


def fail(message: str) -> NoReturn:
    raise UserError(message)


def check(ok: bool, message: str) -> None:
    if not ok:
        fail(message)


def warn(message: str) -> None:
    """Print a warning on stderr: what a script prints on stdout has none."""
    print(f'Warning: {message}', file=sys.stderr, flush=True)

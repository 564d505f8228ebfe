"""Files written whole or not at all, and read with one clear line where they are damaged."""
import contextlib
import json
import os
from typing import Any

from configurator import fail


def write_whole(path: str, data: bytes) -> None:
    """Write a file whole or not at all."""
    with open(path + '.tmp', 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.tmp', path)


def read_json(path: str) -> dict[str, Any] | None:
    """A JSON file's contents, None where there is no such file."""
    try:
        with open(path, encoding='utf-8') as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError:
        fail(f'{path} is damaged: delete the folder and prepare the data again')


def say(text: str) -> None:
    """Print a line; a closed pipe or a full disk ends no run."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

"""Files that are written completely or not at all, JSON and tables."""
import json
import math
from pathlib import Path

import pytest

from configurator import UserError
from nanocem.files import read_json, read_json_lines, table, to_json, write_atomic


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / 'a'
    write_atomic(str(path), b'first')
    (tmp_path / 'a.tmp').mkdir()  # so that no file of this name can be opened
    with pytest.raises(OSError):
        write_atomic(str(path), b'second')
    assert path.read_bytes() == b'first'


def test_json_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / 'a.json'
    assert read_json(str(path)) is None
    path.write_bytes(to_json({'a': math.nan, 'b': math.inf, 'c': 1.5}))
    assert read_json(str(path)) == {'a': None, 'b': None, 'c': 1.5} == json.loads(path.read_text())
    for content in (b'[1]', b'{"a": ', b'\xff'):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r'a.json is damaged: make it again$'):
            read_json(str(path), 'make it again')
    path.write_bytes(b'5\n{"a": 1}\n{"a": \n\xff\n{"b": 2}')
    assert read_json_lines(str(path)) == [{'a': 1}, {'b': 2}]


def test_a_table_is_aligned() -> None:
    assert table(['a', 'name'], [['1.25', 'b'], ['2', 'long name']]) == (
        '| a    | name      |\n| ---- | --------- |\n| 1.25 | b         |\n| 2    | long name |')

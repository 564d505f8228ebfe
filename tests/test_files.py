"""Files that are written completely or not at all, JSON and tables."""
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from running import ROOT

from nanocem.files import markdown_table, read_json, read_json_lines, to_json, write_atomic


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / 'a'
    write_atomic(str(path), b'first')
    (tmp_path / 'a.tmp').mkdir()  # so that no file of this name can be opened
    with pytest.raises(OSError):
        write_atomic(str(path), b'second')
    assert path.read_bytes() == b'first'


def test_json_has_null_for_nan_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / 'a.json'
    assert read_json(str(path)) is None
    path.write_bytes(to_json({'a': math.nan, 'b': math.inf, 'c': 1.5}))
    assert read_json(str(path)) == {'a': None, 'b': None, 'c': 1.5}
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\n{"b": 2}')
    assert read_json_lines(str(path)) == [{'a': 1}, {'b': 2}]


def test_a_table_is_aligned() -> None:
    assert markdown_table(['a', 'name'], [['1.25', 'b'], ['2', 'long name']]) == (
        '| a    | name      |\n| ---- | --------- |\n| 1.25 | b         |\n| 2    | long name |')


def test_committed_text_is_bytes(tmp_path: Path) -> None:
    """A clone with Windows's setting has every line end as committed: in texts, tables, scripts."""
    def git(*argv: str) -> None:
        subprocess.run(['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *argv], cwd=tmp_path,
                       check=True, capture_output=True)

    names = ['.gitattributes', 'pretrained/held_out.txt', 'docs/slurm.sh', 'results/gp/paper.csv']
    git('init', 'here')
    for name in names:
        path = tmp_path / 'here' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, path)
    git('-C', 'here', 'add', '.')
    git('-C', 'here', 'commit', '-m', 'files')
    git('clone', '-c', 'core.autocrlf=true', 'here', 'there')
    for name in names:
        assert (tmp_path / 'there' / name).read_bytes() == (ROOT / name).read_bytes(), name

"""Files that are written completely or not at all, their names; JSON and tables."""
import errno
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from nanocem.files import (
    LONGEST_NAME,
    fill_folder,
    finish_folder,
    markdown_table,
    other_files,
    read_json,
    read_json_lines,
    short_name,
    to_json,
    write_atomic,
)
from nanocem.prepare import PrepareConfig
from running import ROOT


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / 'a'
    write_atomic(str(path), b'first')
    (tmp_path / 'a.tmp').mkdir()  # so that no file of this name can be opened
    with pytest.raises(OSError):
        write_atomic(str(path), b'second')
    assert path.read_bytes() == b'first'


def test_a_folder_is_filled_completely_or_not_at_all(tmp_path: Path) -> None:
    """A folder that exists stays itself. Without the last file nothing is moved up."""
    for folder, exists in ((tmp_path / 'new/a', False), (tmp_path / 'mount', True)):
        if exists:
            folder.mkdir(parents=True)
        with pytest.raises(RuntimeError), fill_folder(str(folder), 'last') as inside:
            (inside / 'last').write_text('half')
            raise RuntimeError
        assert folder.exists() == exists and other_files(str(folder)) == []
        (folder / 'lost+found').mkdir(parents=True)
        with fill_folder(str(folder), 'last') as inside:
            assert inside.parent == folder and not [*inside.iterdir()]
            for name in ('a', 'last', 'z'):
                (inside / name).write_text(name)
            assert other_files(str(folder)) == []
        assert other_files(str(folder)) == ['a', 'last', 'z']
        assert sorted(os.listdir(folder)) == ['a', 'last', 'lost+found', 'z']


def test_a_folder_that_was_filled_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is lost that was written before an error of the disk, and `last` is moved last."""
    def fill() -> None:
        with fill_folder(str(tmp_path), 'last') as inside:
            for name in ('a', 'last', 'z'):
                (inside / name).write_text(name)

    real, moved = Path.replace, []

    def replace(path: Path, target: Path) -> None:
        if len(moved) == 2:
            raise OSError('disk')
        moved.append(path.name)
        real(path, target)

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(Path, 'replace', replace)
        fill()
    assert sorted(moved) == other_files(str(tmp_path)) == ['a', 'z']
    finish_folder(str(tmp_path), 'last')
    assert sorted(os.listdir(tmp_path)) == ['a', 'last', 'z']


def test_an_error_of_a_full_disk_names_the_file(tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error of a write has no path."""
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/a'"):
        write_atomic(f'{tmp_path}/a', b'text')
    with (pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/folder'"),
          fill_folder(f'{tmp_path}/folder', 'last')):
        full(0)
    assert [*tmp_path.iterdir()] == []


def test_json_has_null_for_nan_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / 'a.json'
    assert read_json(str(path)) is None
    path.write_bytes(to_json({'a': math.nan, 'b': math.inf, 'c': 1.5}))
    assert read_json(str(path)) == {'a': None, 'b': None, 'c': 1.5}
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\n{"b": 2}')
    assert read_json_lines(str(path)) == [{'a': 1}, {'b': 2}]


def test_json_takes_the_values_of_torch_and_numpy(tmp_path: Path) -> None:
    """And what it cannot hold as text."""
    path = tmp_path / 'a.json'
    tensor = torch.tensor([1.5, math.nan], requires_grad=True)
    half = torch.tensor(0.5, dtype=torch.bfloat16)
    values = {'tensor': tensor, 'number': tensor[0], 'half': half,
              'float32': np.float32(0.25), 'nan': np.float32('nan'), 'int64': np.int64(7),
              'array': np.ones((1, 2)), 'flag': torch.tensor(True), 'path': Path('a/b'),
              'nested': [{'loss': torch.tensor(2)}, (math.inf, None)], 'of': {1: 'text'}}
    path.write_bytes(to_json(values))
    assert read_json(str(path)) == {
        'tensor': [1.5, None], 'number': 1.5, 'half': 0.5, 'float32': 0.25, 'nan': None,
        'int64': 7, 'array': [[1.0, 1.0]], 'flag': True, 'path': 'a/b',
        'nested': [{'loss': 2}, [None, None]], 'of': {'1': 'text'}}


def test_a_table_is_aligned() -> None:
    assert markdown_table(['a', 'name'], [['1.25', 'b'], ['2', 'long name']]) == (
        '| a    | name      |\n| ---- | --------- |\n| 1.25 | b         |\n| 2    | long name |')


def test_long_names_are_cut_and_stay_different(tmp_path: Path) -> None:
    """By bytes, of which a character may have four. Bytes that are not UTF-8 are a name, too."""
    for name in ('a' * LONGEST_NAME, 'é' * 75, '_models=Plain-Gated'):
        assert short_name(name) == name
    for letter in ('a', 'é', '世', '👍', os.fsdecode(b'\xff')):
        names = [short_name(letter * 200 + end) for end in ('x', 'y')]
        assert names[0] != names[1] and max(len(os.fsencode(name)) for name in names) <= 150
        write_atomic(f'{tmp_path}/figure{names[0]}.png', b'')
    # A text with a long name has a data folder, whose lock and partial folder have longer names
    folder = PrepareConfig(input='世' * 80 + '.txt').out_dir
    assert folder.startswith('data/世世') and len(folder.encode()) <= len('data/') + LONGEST_NAME


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

"""Files that are written completely or not at all, and printing that cannot end a program."""
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import ROOT

from configurator import UserError
from nanocem import files
from nanocem.files import lock, locked, read_json, read_text_file, say, to_json, write_atomic

SAYS = "from nanocem.files import say\nfor n in range(3): say('caf\\u00e9 %d' % n)\n"


def run_says(stdout: int | None, **env: str) -> subprocess.CompletedProcess:
    """Run a process that says three lines."""
    return subprocess.run([sys.executable, '-c', SAYS], cwd=ROOT, stdout=stdout,
                          stderr=subprocess.PIPE, env={**os.environ, **env}, check=False)


def test_a_line_that_cannot_be_printed_ends_nothing(capsys: pytest.CaptureFixture) -> None:
    done = run_says(subprocess.PIPE)
    assert done.stdout.decode() == 'café 0\ncafé 1\ncafé 2\n'
    done = run_says(subprocess.PIPE, PYTHONIOENCODING='ascii')
    assert done.stdout == b'caf\\xe9 0\ncaf\\xe9 1\ncaf\\xe9 2\n' and not done.stderr
    with open('/dev/full', 'wb') as full:
        done = run_says(full.fileno())
    assert done.returncode == 0 and not done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = run_says(writer)
    os.close(writer)
    assert done.returncode == 0 and not done.stderr
    say('to a captured screen')
    assert capsys.readouterr().out == 'to a captured screen\n'


def test_a_notebooks_lines_are_in_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its stdout has a file descriptor, which is that of the server's terminal."""
    class Notebook(io.StringIO):
        def fileno(self) -> int:
            return 2

    monkeypatch.setattr(sys, 'stdout', Notebook())
    say('caf\u00e9')
    assert sys.stdout.getvalue() == 'caf\u00e9\n'
    lines: list[str] = []  # of a stdout that has no more than these two
    monkeypatch.setattr(sys, 'stdout', SimpleNamespace(write=lines.append, flush=lambda: None))
    say('caf\u00e9')
    assert lines == ['caf\u00e9\n']


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
    for content in (b'[1]', b'{"a": ', b'\xff', b'[' * 100_000):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r'a.json is damaged: make it again$'):
            read_json(str(path), 'make it again')
    path.write_bytes(b'5\n{"a": 1}\n{"a": \n\xff\n{"b": 2}')
    assert files.read_json_lines(str(path)) == [{'a': 1}, {'b': 2}]


def test_text_is_utf8_or_refused_with_what_would_convert_it(tmp_path: Path) -> None:
    path = tmp_path / 'a.txt'
    path.write_bytes('\ufeffcafé\r\n\0'.encode())
    assert read_text_file(str(path), 'text=') == '\ufeffcafé\r\n\0'
    for encoding in ('utf-16', 'latin1'):
        path.write_bytes('café'.encode(encoding))
        with pytest.raises(UserError, match=rf'a\.txt: not UTF-8 .* iconv -f {encoding} -t'):
            read_text_file(str(path), 'text=')
    with pytest.raises(UserError, match='is not a file'):
        read_text_file(str(tmp_path), 'text=')


def test_a_lock_excludes_others(tmp_path: Path) -> None:
    path = str(tmp_path / 'a.lock')
    with lock(path):
        assert lock(path) is None
    with locked(path, 'busy'):
        assert lock(path) is None
    assert not os.path.exists(path)
    with lock(str(tmp_path)):  # A folder cannot be locked.
        pass


def test_a_table_is_aligned() -> None:
    assert files.table(['a', 'name'], [['1.25', 'b'], ['2', 'long name']]) == (
        '| a    | name      |\n| ---- | --------- |\n| 1.25 | b         |\n| 2    | long name |')

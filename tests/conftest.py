"""Fixtures of several test files."""
import re
import shlex
from pathlib import Path

import pytest

import export
from running import ROOT, straight_and_stopped, write_data


@pytest.fixture(scope='session')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of random token shards."""
    return write_data(tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='session')
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return straight_and_stopped(tmp_path_factory.mktemp('halves'))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the data of TEXT and a CEM run, out/run."""
    from test_evaluate import TEXT, model_of, write_run
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('LLAMA_TOKENIZER', raising=False)
    write_data(tmp_path / 'data', vocab_size=257, ids=[256, *TEXT.encode()])
    write_run(tmp_path / 'out/run', Path('data'), model_of())
    return tmp_path


@pytest.fixture(scope='session')
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return play.html, made by the command of docs/programs.md."""
    text = (ROOT / 'docs/programs.md').read_text('utf-8').replace('\\\n', ' ')
    command, = re.findall('^    python export.py (.*--page=docs/play.html .*)$', text, re.MULTILINE)
    path = tmp_path_factory.mktemp('pages') / 'play.html'
    path.with_name('descent.html').touch()  # the other pages are beside it
    command = command.replace('docs/play.html', str(path))
    export.main(shlex.split(command.replace('pretrained/', f'{ROOT}/pretrained/')))
    return path

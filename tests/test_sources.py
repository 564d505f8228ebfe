"""Sources of text: folders, damaged files, the library, the Hub. Nothing is downloaded: the class
Hub below replaces it."""
import gzip
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_prepare import expected, prepare, refused, shards, train_of, write
from test_tokenizers import LLAMA, documents, needs_llama

import prepare_slimpajama as prep


def test_links_and_other_kinds_of_files(tmp_path: Path) -> None:
    texts = [f'text {i} ' * 9 for i in range(6)]
    folder, elsewhere = tmp_path / 'in', tmp_path / 'elsewhere'
    write(folder / 'A.JSONL', texts[:1])
    write(folder / 'b.jsonl', texts[1:2])
    write(folder / 'c.jsonl.gz', texts[2:3])
    write(folder / os.fsdecode(b'\xff.jsonl'), texts[3:4])
    write(folder / 'd/e.parquet', texts[4:5])
    write(elsewhere / 'f.jsonl', texts[5:])
    (folder / 'link').symlink_to(elsewhere)
    (folder / 'README.md').write_text('text')
    (folder / '.hidden.txt').write_text('not read')
    made = prepare(folder, tmp_path / 'out', '--held_out=0')
    assert made['files'][-2:] == ['d/e.parquet', 'link/f.jsonl']
    assert made['train_00000.bin'] == train_of(texts)
    assert 'no such file' in refused(folder / 'none.txt', tmp_path / 'none')
    (folder / 'loop').symlink_to(folder)
    assert 'Too many levels' in refused(folder, tmp_path / 'none')


def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / 'in/a/a.jsonl', ['text'])
    write(tmp_path / 'in/b/b.jsonl', ['text'])
    scandir = os.scandir

    def denied(folder: str | int) -> Any:  # root may list every folder
        if str(folder).endswith('/b'):
            raise PermissionError(13, 'Permission denied', folder)
        return scandir(folder)

    monkeypatch.setattr(os, 'scandir', denied)
    assert 'in/b: Permission denied' in refused(tmp_path / 'in', tmp_path / 'out')


@pytest.mark.parametrize('name, content, message', [
    ('a.jsonl', b'{"text": "a"}\n{"text": "caf\xe9"}\n', 'a.jsonl, line 2: not UTF-8 at byte 13'),
    ('a.jsonl', '{"text": "a"}\n'.encode('utf-16'), 'line 1: not UTF-8 at byte 0 .* utf-16'),
    ('a.jsonl', b'["a"]', r'line 1: expected {"text": "..."} on each line .* not b.\["a"\]'),
    ('a.jsonl', b'{"text": "a"},\n', r'line 1: expected .* \(Extra data: line 1 column 14'),
    ('a.jsonl', b'{"text": "a"}\n\n{"text": "', 'line 3: expected'),
    ('a.jsonl', b'{"title": "a"}\n', r'--column names another field\), not .*{"title": "a"}'),
    ('a.jsonl', b'{"text": 1}\n', 'line 1: expected'),
    ('a.jsonl.gz', gzip.compress(b'{"text": "a"}')[:-9], 'a.jsonl.gz: Truncated compressed stream'),
    ('a.txt.gz', gzip.compress(b'a'), 'a.txt.gz: not UTF-8'),
    ('a.parquet', b'PAR1' * 9, 'a.parquet: .*Parquet'),
    ('a.txt', b'', 'a.txt holds too little text for train, val, test.* --held_out'),
    ('a.txt', b'a', 'a.txt holds too little text for val, test.* --held_out')])
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(message, refused(tmp_path / name, tmp_path / 'out'))


def test_the_documents_of_a_text(tmp_path: Path) -> None:
    """evaluate.py --text reads what train.py --text reads."""
    texts = [*documents(5, seed=1), 'last']
    for name in ('a.jsonl', 'a.parquet'):
        assert list(prep.text_documents(str(write(tmp_path / name, [*texts, ''])))) == texts
    (tmp_path / 'a.txt').write_text(texts[0])
    assert list(prep.text_documents(str(tmp_path / 'a.txt'))) == texts[:1]


def test_a_column_of_another_name(tmp_path: Path) -> None:
    (tmp_path / 'in').mkdir()
    pq.write_table(pa.table({'text': ['no'], 'content': ['yes']}), tmp_path / 'in/a.parquet')
    (tmp_path / 'in/b.jsonl').write_text('{"content": "yes too"}')
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--column=content', '--held_out=0')
    assert made['train_00000.bin'] == train_of(['yes', 'yes too'])
    assert '--column chooses' in refused(tmp_path / 'in', tmp_path / 'other', '--column=none')


def test_the_builtin_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's Python without its tests and installed packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prep, 'LIBRARY', str(tmp_path / 'lib'))
    for name in ('b.py', 'c.md', 'z/e.py', 'test/b.py', 'site-packages/p/a.py'):
        write(tmp_path / 'lib' / name, ['text'])
    assert list(prep.find_source('builtin').files) == ['b.py', 'z/e.py']
    for n, text in enumerate(documents(600, seed=1)):
        (tmp_path / f'lib/{n}.py').write_text(text)
    assert prep.find_data('./data/builtin') == './data/builtin'
    assert os.path.exists('data/builtin/val.bin')


# The Hub

DATA = 'hf://datasets/org/data'


class Hub:
    """Replaces HfApi and HfFileSystem: a dataset of three files, and Llama's tokenizer."""
    def __init__(self, folder: Path):
        self.folder = folder
        self.texts = documents(300, seed=50)
        self.names = [f'data/train-0000{i}-of-00003.parquet' for i in range(3)]
        for i, name in enumerate(self.names):
            write(folder / name, self.texts[i * 100:][:100])
        self.sha = 'c' * 40
        self.downloads: list[str] = []
        self.gone = ''

    def dataset_info(self, repo: str, revision: str | None) -> SimpleNamespace:
        if repo != 'org/data':
            raise ValueError('404 Client Error.\n\nRepository Not Found')
        return SimpleNamespace(sha=revision or self.sha)

    def find(self, where: str) -> list[str]:
        root, _, inside = where.removeprefix('hf://').partition('@' + 'c' * 40)
        names = [path.relative_to(self.folder) for path in self.folder.rglob('*') if path.is_file()]
        return [f'{root}@{"c" * 40}/{name}' for name in names
                if name.is_relative_to(inside.strip('/'))]

    def hf_hub_download(self, repo: str, name: str, **options: str) -> str:
        assert options == {'repo_type': 'dataset', 'revision': 'c' * 40} or 'llama' in repo
        self.downloads.append(name)
        if name == self.gone:
            raise ConnectionError('Entry Not Found')
        return str(self.folder / name) if repo == 'org/data' else LLAMA


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / 'hub')
    monkeypatch.setattr('huggingface_hub.HfApi', lambda: made)
    monkeypatch.setattr('huggingface_hub.HfFileSystem', lambda: made)
    return made


def test_a_folder_or_a_file_of_a_hub_repository(tmp_path: Path, hub: Hub) -> None:
    texts = documents(200, seed=51)
    write(hub.folder / 'sample/10BT/000.parquet', texts[:100])
    write(hub.folder / 'sample/10BT/001.parquet', texts[100:])
    (hub.folder / 'README.md').write_text('#')
    for where, content in ((f'{DATA}/sample/10BT', texts), (f'{DATA}@{hub.sha}/sample', texts),
                           (f'{DATA}/sample/10BT/001.parquet', texts[100:])):
        out = tmp_path / str(len(where))
        assert shards(prepare(where, out, '--held_out=0.2')) == expected(content, 0.2)
    assert 'holds no .parquet' in refused(f'{DATA}/nothing', tmp_path / 'n')
    assert 'Repository Not Found' in refused('hf://datasets/org/none', tmp_path / 'n')
    says = refused('hf://datasets/data', tmp_path / 'n')
    assert "must be 'namespace/name', got 'data'" in says
    o = prep.PrepareConfig(input='hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT')
    assert o.out_dir == 'data/10BT'


def test_a_download_that_fails_is_one_line(tmp_path: Path, hub: Hub) -> None:
    out = tmp_path / 'out'
    hub.gone = hub.names[2]
    says = refused(DATA, out, '--held_out=0.1')
    assert 'Entry Not Found (is there a network?' in says
    hub.gone = ''
    assert shards(prepare(DATA, out, '--held_out=0.1')) == expected(hub.texts, 0.1)
    meta = json.loads((out / 'meta.json').read_text())
    assert meta['source'] == f'{DATA}@{"c" * 40}' and meta['files'] == hub.names


@needs_llama
def test_the_hub_brings_the_llama_tokenizer(tmp_path: Path, hub: Hub) -> None:
    options = ('--tokenizer=llama', '--tokens=1K', '--held_out=0')
    assert prepare(DATA, tmp_path / 'out', *options)['splits']['train']['tokens'] == 1000
    assert (tmp_path / 'out/tokenizer.model').read_bytes() == Path(LLAMA).read_bytes()
    assert {*hub.downloads} == {'tokenizer.model', hub.names[0]}  # no more than the tokens need

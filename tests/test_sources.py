"""Sources of text: folders, damaged files, the library, the Hub. Nothing is downloaded: the class
Hub below replaces it."""
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_prepare import expected, prepare, refused, shards, train_of, write
from test_tokenizers import LLAMA, documents, needs_llama

import prepare_slimpajama as prep


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    texts = [f'text {i} ' * 9 for i in range(4)]
    folder = tmp_path / 'in'
    write(folder / 'A.JSONL', texts[:1])
    write(folder / 'c.jsonl.gz', texts[1:2])
    write(folder / 'd/e.parquet', texts[2:3])
    write(tmp_path / 'elsewhere/f.jsonl', texts[3:])
    (folder / 'link').symlink_to(tmp_path / 'elsewhere')
    for name in ('README.md', '.hidden.txt'):
        (folder / name).write_text('not read')
    made = prepare(folder, tmp_path / 'out', '--held_out=0')
    assert made['files'] == ['A.JSONL', 'c.jsonl.gz', 'd/e.parquet', 'link/f.jsonl']
    assert made['train_00000.bin'] == train_of(texts)
    assert 'no such file' in refused(folder / 'none.txt', tmp_path / 'none')
    with pytest.raises(FileNotFoundError):  # A folder that cannot be listed is an error.
        prep.list_files(str(folder / 'none'))


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
    texts = documents(2, seed=1)
    for n, name in enumerate(('a.parquet', 'b.jsonl')):
        write(tmp_path / 'in' / name, texts[n:n + 1], 'content')
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--column=content', '--held_out=0')
    assert made['train_00000.bin'] == train_of(texts)
    assert '--column chooses' in refused(tmp_path / 'in', tmp_path / 'other', '--column=none')


def test_the_builtin_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's Python without its tests and installed packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prep, 'LIBRARY', str(tmp_path / 'lib'))
    texts = documents(600, seed=1)
    for n, text in enumerate(texts):
        write(tmp_path / f'lib/{n:03d}.py', [text])
    for name in ('c.md', 'test/b.py', 'site-packages/p/a.py'):
        write(tmp_path / 'lib' / name, ['not read'])
    assert prep.find_data('./data/builtin') == './data/builtin'
    meta = json.loads(Path('data/builtin/meta.json').read_text())
    assert meta['files'] == [f'{n:03d}.py' for n in range(600)]


# The Hub

DATA = 'hf://datasets/org/data'
COMMIT = 'c' * 40


class Hub:
    """Replaces HfApi and HfFileSystem: a dataset of three files, and Llama's tokenizer."""
    def __init__(self, folder: Path):
        self.folder = folder
        self.texts = documents(300, seed=50)
        self.names = [f'data/{n}.parquet' for n in range(3)]
        for n, name in enumerate(self.names):
            write(folder / name, self.texts[n * 100:][:100])
        self.downloads: list[str] = []
        self.gone = ''

    def dataset_info(self, repo: str, revision: str | None) -> SimpleNamespace:
        assert repo == 'org/data' and revision in (None, COMMIT)
        return SimpleNamespace(sha=COMMIT)

    def find(self, where: str) -> list[str]:
        inside = where.removeprefix(f'{DATA}@{COMMIT}').strip('/')
        names = [name for name in [*self.names, 'README.md'] if Path(name).is_relative_to(inside)]
        return [f'datasets/org/data@{COMMIT}/{name}' for name in names]

    def hf_hub_download(self, repo: str, name: str, **options: str) -> str:
        assert options == {'repo_type': 'dataset', 'revision': COMMIT} or 'llama' in repo
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
    for where, texts in ((f'{DATA}/data', hub.texts), (f'{DATA}@{COMMIT}', hub.texts),
                         (f'{DATA}/data/1.parquet', hub.texts[100:200])):
        made = prepare(where, tmp_path / str(len(where)), '--held_out=0.2')
        assert shards(made) == expected(texts, 0.2)
        assert made['source'] == f'{DATA}@{COMMIT}' and {*made['files']} <= {*hub.names}
    assert 'holds no .parquet' in refused(f'{DATA}/nothing', tmp_path / 'n')
    assert "must be 'namespace/name'" in refused('hf://datasets/data', tmp_path / 'n')


def test_a_download_that_fails_is_one_line(tmp_path: Path, hub: Hub) -> None:
    hub.gone = hub.names[2]
    assert 'Entry Not Found (is there a network?' in refused(DATA, tmp_path / 'out')


@needs_llama
def test_the_hub_brings_the_llama_tokenizer(tmp_path: Path, hub: Hub) -> None:
    options = ('--tokenizer=llama', '--tokens=1K', '--held_out=0')
    assert prepare(DATA, tmp_path / 'out', *options)['splits']['train']['tokens'] == 1000
    assert (tmp_path / 'out/tokenizer.model').read_bytes() == Path(LLAMA).read_bytes()
    assert {*hub.downloads} == {'tokenizer.model', hub.names[0]}  # no more than the tokens need

"""nanocem/sources.py: folders, links, pipes, the corpus, and a stand-in for the Hub. Nothing is
downloaded."""
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_prepare import SCRIPT, command, expected, prepare, refused, result, run, train_of, write
from test_tokenizers import LLAMA, documents, needs_llama

import prepare_slimpajama as prep
from nanocem import sources


def test_links_other_kinds_and_pipes(tmp_path: Path) -> None:
    texts = [f'text {i} ' * 9 for i in range(8)]
    folder, elsewhere = tmp_path / 'in', tmp_path / 'elsewhere'
    write(folder / 'b.jsonl', texts[1:2])
    (folder / 'c.jsonl.gz').write_bytes(gzip.compress(b'{"text": "text 2"}\n'))
    write(folder / 'd' / 'e.parquet', texts[3:4])
    write(elsewhere / 'more' / 'f.jsonl', texts[4:5])
    (folder / 'link').symlink_to(elsewhere)
    (folder / 'again').symlink_to(elsewhere / 'more')
    (folder / 'inside').symlink_to(folder / 'd')
    (folder / 'd' / 'loop').symlink_to(folder)
    (elsewhere / 'up').symlink_to(tmp_path)
    (elsewhere / 'self').symlink_to(elsewhere)
    os.mkfifo(folder / 'pipe.txt')
    (folder / 'gone.txt').symlink_to(tmp_path / 'nothing')
    for name in ('README.md', 'table.csv', 'old.json.xz'):
        (folder / name).write_text('text')
    (folder / '.hidden.txt').write_text('not read')
    (folder / 'A.JSONL').write_text(json.dumps({'text': 'text 0'}) + '\n')
    odd = folder / os.fsdecode(b'\xff.jsonl')
    odd.write_text('{"text": "odd"}\n')
    ended = run(folder, tmp_path / 'out', '--held_out=0')
    assert ended.code == 0, ended.err
    assert ('left out: 5 files that are not .parquet, .jsonl, .jsonl.zst, .jsonl.gz, .txt: '
            'README.md, gone.txt, old.json.xz, pipe.txt, table.csv') in ended.out
    meta = json.loads((tmp_path / 'out' / 'meta.json').read_text())
    assert meta['files'] == ['A.JSONL', 'b.jsonl', 'c.jsonl.gz', odd.name, 'again/f.jsonl',
                             'd/e.parquet']
    texts = ['text 0', texts[1], 'text 2', 'odd', texts[4], texts[3]]
    assert result(tmp_path / 'out')['train_00000.bin'] == train_of(texts)
    assert 'no such file' in refused(folder / 'pipe.txt', tmp_path / 'none')


def test_a_column_of_another_name(tmp_path: Path) -> None:
    (tmp_path / 'in').mkdir()
    pq.write_table(pa.table({'text': ['no'], 'content': ['yes']}), tmp_path / 'in/a.parquet')
    (tmp_path / 'in/b.jsonl').write_text('{"content": "yes too"}')
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--column=content', '--held_out=0')
    assert made['train_00000.bin'] == train_of(['yes', 'yes too'])
    assert '--column chooses' in refused(tmp_path / 'in', tmp_path / 'other', '--column=none')


def test_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's files and the packages', each content once, as a jsonl file of them was."""
    monkeypatch.chdir(tmp_path)
    contents = {'b.py': 'same', 'c.md': 'english', 'd.txt': ' ', 'a.css': 'english', 'z/e.py': 'deep',
                'site-packages/p/a.py': 'of a package', 'site-packages/p/same.py': 'same'}
    for name, text in contents.items():
        (tmp_path / 'lib' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'lib' / name).write_text(text)
    (tmp_path / 'lib/latin.py').write_bytes(b'\xff\xfe')
    path = tmp_path / 'lib/site-packages/p/a.py'
    package = SimpleNamespace(parts=path.parts, locate=lambda: path)
    asked = []
    monkeypatch.setattr(sources, 'LIBRARY', str(tmp_path / 'lib'))
    monkeypatch.setattr(sources.metadata, 'files', lambda name: asked.append(name) or [package])
    files = [file.name.removeprefix(f'{tmp_path}/lib/') for file in
             sources.find_source('corpus').files]
    assert files == ['b.py', 'c.md', 'z/e.py', 'site-packages/p/a.py']
    assert asked[:2] == ['torch', 'numpy']
    # a folder that an earlier version made of it stays as it is
    lines = [json.dumps({'text': text}) for text in documents(600, seed=1)]
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data/corpus.jsonl').write_text('\n'.join(lines))
    prepare('data/corpus.jsonl', Path('data/corpus'), '--held_out=0.01')
    os.remove('data/corpus.jsonl')
    assert 'is prepared already' in run('corpus', Path('data/corpus')).out
    shutil.rmtree('data/corpus')
    (tmp_path / 'lib/long.py').write_text('\n'.join(lines))
    assert prep.find_data('data/corpus') == 'data/corpus' and os.path.exists('data/corpus/val.bin')

    def missing(name: str) -> None:
        raise sources.metadata.PackageNotFoundError

    monkeypatch.setattr(sources.metadata, 'files', missing)
    with pytest.raises(SystemExit, match='torch is not installed'):
        sources.find_source('corpus')


# The Hub

class StandIn(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the Hub, for one dataset, org/data, and the tokenizer."""
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b'', length: int | None = None,
               **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace('_', '-'), value)
        self.send_header('Content-Length', str(len(body) if length is None else length))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server.hub, self.path.partition('?')[0]
        if path in ('/api/datasets/org/data', f'/api/datasets/org/data/revision/{hub.sha}'):
            sha = hub.sha if path.endswith(hub.sha) else hub.sha_now
            info = {'id': 'org/data', 'sha': sha, 'siblings': [], 'tags': []}
            return self.answer(200, json.dumps(info).encode())
        _, found, inside = path.partition(f'/tree/{hub.sha}')
        if found:
            return self.list_tree(unquote(inside).strip('/'))
        name = re.sub(rf'^/datasets/org/data/resolve/{hub.sha}/', '', path)
        data = hub.files.get(name) or hub.tokenizer.get(path)
        if data is None or name in hub.gone:
            code = 'EntryNotFound' if name in hub.gone else 'RepoNotFound'
            return self.answer(404, X_Error_Code=code)
        headers = {'ETag': f'"{hashlib.sha256(data).hexdigest()}"', 'X_Repo_Commit': hub.sha,
                   'Accept_Ranges': 'bytes'}
        if self.command == 'HEAD':
            return self.answer(200, data, **headers)
        hub.gets.append((name, self.headers.get('Range')))
        while name == hub.hold:
            time.sleep(0.05)
        if match := re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range') or ''):
            at = int(match[1])
            headers['Content_Range'] = f'bytes {at}-{len(data) - 1}/{len(data)}'
            return self.answer(206, data[at:], **headers)
        if name in hub.drop:  # the connection breaks in the middle of the file
            hub.drop.discard(name)
            self.close_connection = True
            return self.answer(200, data[:len(data) // 2], length=len(data), **headers)
        return self.answer(200, data, **headers)

    def list_tree(self, inside: str) -> None:
        files = {'README.md': b'#', **self.server.hub.files}
        files = {name: data for name, data in files.items() if f'/{name}'.startswith(f'/{inside}')}
        folders = {str(folder) for name in files for folder in Path(name).parents} - {'.', inside}
        folders -= {str(folder) for folder in Path(inside).parents}
        tree = [{'type': 'file', 'path': name, 'size': len(data), 'oid': 'b' * 40}
                for name, data in files.items() if name != inside]
        tree += [{'type': 'directory', 'path': folder, 'oid': 'd' * 40} for folder in folders]
        if not files or inside in files:
            return self.answer(404, X_Error_Code='EntryNotFound')
        return self.answer(200, json.dumps(tree).encode(), Content_Type='application/json')


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A stand-in Hub with three parquet files."""
    from huggingface_hub import HfFileSystem, constants
    texts = documents(300, seed=50, characters=5000)
    names = [f'data/train-0000{i}-of-00003.parquet' for i in range(3)]
    files = {name: write(tmp_path / 'hub' / name, texts[i * 100:][:100]).read_bytes()
             for i, name in enumerate(names)}
    state = SimpleNamespace(sha='c' * 40, sha_now='c' * 40, files=files, texts=texts, tokenizer={},
                            gone=set(), drop=set(), hold='', gets=[])
    server = ThreadingHTTPServer(('127.0.0.1', 0), StandIn)
    server.hub = state
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f'http://127.0.0.1:{server.server_port}'
    state.cache = tmp_path / 'cache'
    HfFileSystem.clear_instance_cache()
    monkeypatch.setattr(constants, 'ENDPOINT', state.url)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE',
                        state.url + '/{repo_id}/resolve/{revision}/{filename}')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(state.cache))
    monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    yield state
    server.shutdown()
    server.server_close()


DATA = 'hf://datasets/org/data'


def made_of(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in result(out).items() if name != 'splits'}


def test_hub_with_a_dropped_connection(tmp_path: Path, hub: SimpleNamespace) -> None:
    dropped, out = sorted(hub.files)[1], tmp_path / 'out'
    hub.texts[100:200] = [os.urandom(120_000).hex() for _ in range(100)]
    pq.write_table(pa.table({'text': hub.texts[100:200]}), tmp_path / 'large', compression='none')
    hub.files[dropped] = (tmp_path / 'large').read_bytes()
    hub.drop.add(dropped)
    ended = run(DATA, out, '--held_out=0.1', '--workers=1')
    assert ended.code == 0, ended.err
    assert made_of(out) == expected(hub.texts, 0.1)
    ranges = [of for name, of in hub.gets if name == dropped]
    assert ranges == [None, f'bytes={10 * 2**20}-']  # it writes 10 MB at a time
    assert len(hub.gets) == 4
    assert {path.name for path in out.iterdir()} == {
        '.lock', 'meta.json', 'test.bin', 'train_00000.bin', 'val.bin'}
    meta = json.loads((out / 'meta.json').read_text())
    assert meta['source'] == f'{DATA}@{hub.sha}' and meta['files'] == sorted(hub.files)
    # the files are in the Hub's cache now
    made = prepare(DATA, tmp_path / 'again', '--tokens=100K', '--held_out=0')
    assert made['train_00000.bin'] == train_of(hub.texts)[:200_000] and len(hub.gets) == 4
    # and no more of them are taken than the tokens need
    shutil.rmtree(hub.cache)
    assert run(DATA, tmp_path / 'few', '--tokens=100K', '--held_out=0').code == 0
    assert len(hub.gets) == 5


def test_a_folder_or_a_file_of_a_hub_repository(tmp_path: Path, hub: SimpleNamespace) -> None:
    texts = documents(60, seed=51)
    hub.files['sample/10BT/000.parquet'] = write(tmp_path / '0.parquet', texts[:30]).read_bytes()
    hub.files['sample/10BT/001.parquet'] = write(tmp_path / '1.parquet', texts[30:]).read_bytes()
    for where, mine in ((f'{DATA}/sample/10BT', texts), (f'{DATA}@{hub.sha}/sample', texts),
                        (f'{DATA}/sample/10BT/001.parquet', texts[30:])):
        out = tmp_path / str(len(where))
        assert run(where, out, '--held_out=0.2').code == 0
        assert made_of(out) == expected(mine, 0.2)
    assert 'holds no .parquet' in refused(f'{DATA}/nothing', tmp_path / 'n')
    assert 'left out: 1 files' in run(DATA, tmp_path / 'all', '--tokens=1K').out
    o = prep.PrepareConfig(input='hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT')
    assert o.out_dir == 'data/fineweb-edu-sample-10BT'


def test_hub_killed_and_restarted_never_fetches_a_finished_file_again(
    tmp_path: Path, hub: SimpleNamespace
) -> None:
    names, out = sorted(hub.files), tmp_path / 'out'
    hub.hold = names[2]
    env = {'HF_ENDPOINT': hub.url, 'HF_HUB_CACHE': str(hub.cache), 'HF_HUB_DISABLE_XET': '1'}
    process = subprocess.Popen([sys.executable, SCRIPT, *command(DATA, out, '--held_out=0.1')],
                               env={**os.environ, **env})
    while names[2] not in [name for name, _ in hub.gets]:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    # the repository has moved on: the run stays with the commit it began with
    hub.hold, hub.sha_now = '', 'e' * 40
    assert run(DATA, out, '--held_out=0.1').code == 0
    assert made_of(out) == expected(hub.texts, 0.1)
    assert sorted(name for name, _ in hub.gets) == [*names, names[2]]


@needs_llama
def test_hub_brings_the_llama_tokenizer(tmp_path: Path, hub: SimpleNamespace) -> None:
    at = '/hf-internal-testing/llama-tokenizer/resolve/main/tokenizer.model'
    hub.tokenizer[at] = b'another model'
    options = ('--tokenizer=llama', '--tokens=1K', '--held_out=0')
    assert "is not Llama's" in refused(DATA, tmp_path / 'out', *options)
    shutil.rmtree(hub.cache)
    hub.tokenizer[at] = Path(LLAMA).read_bytes()
    assert prepare(DATA, tmp_path / 'out', *options)['splits']['train']['tokens'] == 1000


def test_hub_errors_are_one_line(
    tmp_path: Path, hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / 'out'
    assert 'Repository Not Found' in refused('hf://datasets/org/none', out)
    assert 'Invalid HF URI' in refused('hf://datasets/data', out)
    hub.gone.add(sorted(hub.files)[1])
    assert 'Entry Not Found' in refused(DATA, out, '--workers=1')
    hub.gone.clear()
    assert run(DATA, out, '--workers=1').code == 0
    assert made_of(out) == expected(hub.texts, 0.005)
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', 'http://127.0.0.1:9')
    assert 'is there a network?' in refused(DATA, tmp_path / 'nowhere')

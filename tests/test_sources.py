"""nanocem/sources.py: folders, links, pipes, and a stand-in for the Hub. Nothing is downloaded."""

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_prepare import LLAMA_SAYS, command, expected, prepare, refused, result, run, write
from test_tokenizers import LLAMA, documents, needs_llama

import prepare_slimpajama as prep
from nanocem.tokenizers import LlamaTokenizer

# Folders


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
    done = run(folder, tmp_path / 'out', '--held_out=0')
    assert done.returncode == 0, done.stderr
    assert (
        'left out: 5 files that are not .parquet, .jsonl, .jsonl.zst, .jsonl.gz, .txt: '
        'README.md, gone.txt, old.json.xz, pipe.txt, table.csv'
    ) in done.stdout
    meta = json.loads((tmp_path / 'out' / 'meta.json').read_text())
    assert meta['files'] == ['A.JSONL', 'b.jsonl', 'c.jsonl.gz', 'again/f.jsonl', 'd/e.parquet']
    made = result(tmp_path / 'out')['train_00000.bin']
    texts = ['text 0', texts[1], 'text 2', texts[4], texts[3]]
    assert made == expected(texts, 0)['train_00000.bin']
    assert 'no such file' in refused(folder / 'pipe.txt', tmp_path / 'none')


def test_a_column_of_another_name(tmp_path: Path) -> None:
    texts = documents(50, seed=72)
    (tmp_path / 'in').mkdir()
    pq.write_table(
        pa.table({'text': ['no'] * 25, 'content': texts[:25]}), tmp_path / 'in/a.parquet'
    )
    lines = [json.dumps({'content': text}) for text in texts[25:]]
    (tmp_path / 'in' / 'b.jsonl').write_text('\n'.join(lines))
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--column=content', '--held_out=0')
    assert made['train_00000.bin'] == expected(texts, 0)['train_00000.bin']
    assert '--column chooses' in refused(tmp_path / 'in', tmp_path / 'other', '--column=none')
    done = run(tmp_path / 'in', tmp_path / 'out', '--held_out=0')
    assert done.returncode == 1 and 'column=content, not text' in done.stderr


# The Hub


class StandIn(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the Hub, for one dataset, org/data, and the tokenizer."""

    protocol_version = 'HTTP/1.1'

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b'', **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace('_', '-'), value)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server.hub, self.path.partition('?')[0]
        if path.startswith('/api/datasets/org/gated') or '/org/gated/resolve' in path:
            return self.answer(403, X_Error_Code='GatedRepo', X_Error_Message='accept the terms')
        if path.startswith('/api/datasets/org/data/revision/nosuch'):
            return self.answer(404, X_Error_Code='RevisionNotFound')
        if path in ('/api/datasets/org/data', f'/api/datasets/org/data/revision/{hub.sha}'):
            sha = hub.sha if path.endswith(hub.sha) else hub.sha_now
            return self.answer(
                200, json.dumps({'id': 'org/data', 'sha': sha, 'siblings': [], 'tags': []}).encode()
            )
        tree, _, folder = path.partition(f'/tree/{hub.sha}')
        if tree == '/api/datasets/org/data' and path != tree:
            inside = unquote(folder).strip('/')
            tree = [{'type': 'directory', 'path': 'data', 'oid': 'd' * 40}]
            tree += [
                {'type': 'file', 'path': name, 'size': len(data), 'oid': 'b' * 40}
                for name, data in {'README.md': b'#', **hub.files}.items()
                if not inside or name.startswith(inside + '/')
            ]
            if len(tree) == 1:
                return self.answer(404, X_Error_Code='EntryNotFound')
            return self.answer(200, json.dumps(tree).encode(), Content_Type='application/json')
        name = path.removeprefix(f'/datasets/org/data/resolve/{hub.sha}/')
        data = hub.files.get(name) or hub.tokenizer.get(path)
        if data is None or name in hub.gone:
            code = 'EntryNotFound' if name in hub.gone else 'RepoNotFound'
            return self.answer(404, X_Error_Code=code)
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {'ETag': etag, 'X_Repo_Commit': hub.sha, 'Accept_Ranges': 'bytes'}
        if self.command == 'HEAD':
            return self.answer(200, data, **headers)
        hub.gets.append((name, self.headers.get('Range')))
        while name == hub.hold:
            time.sleep(0.05)
        match = re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range') or '')
        if match:
            at = int(match[1])
            return self.answer(
                206, data[at:], **headers, Content_Range=f'bytes {at}-{len(data) - 1}/{len(data)}'
            )
        if name in hub.drop:  # the connection breaks in the middle of the file
            hub.drop.discard(name)
            self.send_response(200)
            for key, value in {**headers, 'Content_Length': str(len(data))}.items():
                self.send_header(key.replace('_', '-'), value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            return None
        return self.answer(200, data, **headers)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A stand-in Hub with three parquet files; env is what a run needs to find it."""
    texts = documents(900, seed=50, characters=5000)
    names = [f'data/train-0000{i}-of-00003.parquet' for i in range(3)]
    files = {
        name: write(tmp_path / 'hub' / name, texts[i * 300 :][:300]).read_bytes()
        for i, name in enumerate(names)
    }
    state = SimpleNamespace(
        sha='c' * 40,
        files=files,
        sha_now='c' * 40,
        tokenizer={},
        gone=set(),
        drop=set(),
        hold='',
        gets=[],
        texts=texts,
    )
    server = ThreadingHTTPServer(('127.0.0.1', 0), StandIn)
    server.hub = state
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.env = {
        'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}',
        'HF_HOME': str(tmp_path / 'hf'),
        'HF_TOKEN': '',
        'HF_HUB_DISABLE_XET': '1',
        'no_proxy': '127.0.0.1',
        'HF_HUB_OFFLINE': '0',
    }
    yield state
    server.shutdown()
    server.server_close()


DATA = 'hf://datasets/org/data'


def test_no_file_of_the_users_is_touched(tmp_path: Path, hub: SimpleNamespace) -> None:
    out = tmp_path / 'out'
    theirs = [
        write(out / 'download' / 'a.jsonl', documents(300, seed=70)),
        out / 'x.bin.part',
        out / 'notes.bin',
        out / 'meta.json.bak',
        out / 'training.bin.part',
        out / 'download' / 'val.bin.part',
    ]
    for path in theirs[1:]:
        path.write_bytes(b'mine')
    before = [path.read_bytes() for path in theirs]
    assert run(out / 'download', out, '--held_out=0.1').returncode == 0
    assert [path.read_bytes() for path in theirs] == before
    other = tmp_path / 'other'
    other.mkdir()
    theirs = [other / 'val.bin.part', other / '.download' / 'mine.txt']
    for path, where, env in ((theirs[0], out / 'download', {}), (theirs[1], DATA, hub.env)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b'mine')
        done = run(where, other, **env)
        assert done.returncode == 1 and 'but no meta.json' in done.stderr, done.stderr
        assert path.read_bytes() == b'mine'
        path.unlink()
    (other / 'meta.json').write_text('{"name": "another program"}')
    done = run(out / 'download', other)
    assert done.returncode == 1 and 'of something else' in done.stderr
    assert (other / 'meta.json').read_text() == '{"name": "another program"}'


def test_hub_with_a_dropped_connection(tmp_path: Path, hub: SimpleNamespace) -> None:
    dropped = sorted(hub.files)[1]
    hub.texts[300:600] = [random.Random(i).randbytes(40_000).hex() for i in range(300)]
    pq.write_table(
        pa.table({'text': hub.texts[300:600]}), tmp_path / 'large.parquet', compression='none'
    )
    hub.files[dropped] = (tmp_path / 'large.parquet').read_bytes()
    hub.drop.add(dropped)
    done = run(DATA, tmp_path / 'out', '--held_out=0.1', '--workers=1', **hub.env)
    assert done.returncode == 0, done.stderr
    made = result(tmp_path / 'out')
    assert {k: v for k, v in made.items() if k != 'splits'} == expected(hub.texts, 0.1)
    assert [r for name, r in hub.gets if name == dropped] == [
        None,
        f'bytes={10 * 2**20}-',
    ]  # it writes 10 MB at a time
    assert len(hub.gets) == 4
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == [
        '.lock',
        'meta.json',
        'test.bin',
        'train_00000.bin',
        'val.bin',
    ]
    meta = json.loads((tmp_path / 'out' / 'meta.json').read_text())
    assert meta['source'] == f'{DATA}@{hub.sha}' and meta['files'] == sorted(hub.files)
    assert (
        run(DATA, tmp_path / 'out', '--held_out=0.1', HF_ENDPOINT='http://127.0.0.1:9').returncode
        == 0
    )  # nothing to ask


def test_a_folder_or_a_file_of_a_hub_repository(tmp_path: Path, hub: SimpleNamespace) -> None:
    texts = documents(60, seed=51)
    hub.files['sample/10BT/000.parquet'] = write(tmp_path / '0.parquet', texts[:30]).read_bytes()
    hub.files['sample/10BT/001.parquet'] = write(tmp_path / '1.parquet', texts[30:]).read_bytes()
    for where, mine in (
        (f'{DATA}/sample/10BT', texts),
        (f'{DATA}@{hub.sha}/sample', texts),
        (f'{DATA}/sample/10BT/001.parquet', texts[30:]),
    ):
        out = tmp_path / str(len(where))
        done = run(where, out, '--held_out=0.2', **hub.env)
        assert done.returncode == 0, done.stderr
        assert {k: v for k, v in result(out).items() if k != 'splits'} == expected(mine, 0.2)
    assert 'no such file or folder' in refused(f'{DATA}/nothing', tmp_path / 'n', **hub.env)
    assert 'left out: 1 files' in run(DATA, tmp_path / 'all', '--tokens=1K', **hub.env).stdout
    o = prep.PrepareConfig(input='hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT')
    assert o.out_dir == 'data/fineweb-edu-sample-10BT'


def test_hub_takes_no_more_files_than_the_tokens_need(tmp_path: Path, hub: SimpleNamespace) -> None:
    done = run(DATA, tmp_path / 'out', '--tokens=100K', '--held_out=0', '--workers=1', **hub.env)
    assert done.returncode == 0, done.stderr
    assert (
        result(tmp_path / 'out')['train_00000.bin']
        == expected(hub.texts, 0)['train_00000.bin'][:200_000]
    )
    assert {name for name, _ in hub.gets} <= set(
        sorted(hub.files)[:2]
    )  # the one used, and the one fetched beside it
    assert (
        json.loads((tmp_path / 'out' / 'meta.json').read_text())['files'] == sorted(hub.files)[:1]
    )


def test_hub_killed_and_restarted_never_fetches_a_finished_file_again(
    tmp_path: Path, hub: SimpleNamespace
) -> None:
    names, out = sorted(hub.files), tmp_path / 'out'
    hub.hold = names[2]
    process = subprocess.Popen(
        command(DATA, out, '--held_out=0.1', '--workers=2'), env={**os.environ, **hub.env}
    )
    while (
        not (out / 'progress.json').exists()
        or json.loads((out / 'progress.json').read_text())['file'] < 2
    ):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    hub.hold, hub.sha_now = (
        '',
        'e' * 40,
    )  # the repository has moved on: the run stays with the commit it began with
    assert run(DATA, out, '--held_out=0.1', '--workers=2', **hub.env).returncode == 0
    assert {k: v for k, v in result(out).items() if k != 'splits'} == expected(hub.texts, 0.1)
    assert sorted(name for name, _ in hub.gets) == [*names, names[2]]


def test_a_damaged_download_is_fetched_again(tmp_path: Path, hub: SimpleNamespace) -> None:
    name = sorted(hub.files)[1]
    good = hub.files[name]
    hub.files[name] = good[:-9] + bytes(9)
    assert name in refused(DATA, tmp_path / 'out', '--held_out=0.1', '--workers=1', **hub.env)
    hub.files[name] = good
    assert run(DATA, tmp_path / 'out', '--held_out=0.1', '--workers=1', **hub.env).returncode == 0
    assert {k: v for k, v in result(tmp_path / 'out').items() if k != 'splits'} == expected(
        hub.texts, 0.1
    )


@needs_llama
def test_hub_brings_the_llama_tokenizer(tmp_path: Path, hub: SimpleNamespace) -> None:
    llama = LlamaTokenizer(LLAMA)
    at = '/hf-internal-testing/llama-tokenizer/resolve/main/tokenizer.model'
    hub.tokenizer[at] = b'another model'
    assert LLAMA_SAYS in refused(DATA, tmp_path / 'out', '--tokenizer=llama', **hub.env)
    shutil.rmtree(tmp_path / 'hf')
    hub.tokenizer[at] = Path(LLAMA).read_bytes()
    done = run(
        DATA,
        tmp_path / 'out',
        '--tokenizer=llama',
        '--tokens=10K',
        '--held_out=0',
        '--workers=1',
        **hub.env,
    )
    assert done.returncode == 0, done.stderr
    ids = np.frombuffer(result(tmp_path / 'out')['train_00000.bin'], '<u2').tolist()
    assert ids == [i for text in hub.texts[:60] for i in (1, *llama.encode(text))][:10_000]


def test_hub_errors_are_one_line(tmp_path: Path, hub: SimpleNamespace) -> None:
    out = tmp_path / 'out'
    assert 'org/none is not on http' in refused('hf://datasets/org/none', out, **hub.env)
    assert 'org/gated is gated' in refused('hf://datasets/org/gated', out, **hub.env)
    assert 'no such revision' in refused(DATA + '@nosuch', out, **hub.env)
    nowhere = {**hub.env, 'HF_ENDPOINT': 'http://127.0.0.1:9'}
    assert 'is there a network?' in refused(DATA, out, **nowhere)
    hub.gone.add(sorted(hub.files)[1])
    assert 'no such file' in refused(DATA, out, '--workers=1', **hub.env)
    hub.gone.clear()
    assert run(DATA, out, '--workers=1', **hub.env).returncode == 0
    assert result(out)['train_00000.bin'] == expected(hub.texts, 0.005)['train_00000.bin']

"""prepare_slimpajama.py: bytes, interruptions, the user's files, damage, the Hub. Nothing is
downloaded; tests that need Llama's tokenizer.model are skipped without it."""

import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tokenizers import LLAMA, NASTY, REPO, documents, llama_of_2023, needs_llama

import prepare_slimpajama as prep
from nanocem.documents import survey
from nanocem.shards import Sequences
from nanocem.tokenizers import LLAMA_SHA256, ByteTokenizer, LlamaTokenizer, load_tokenizer


@pytest.fixture(scope='module')
def llama() -> LlamaTokenizer:
    return LlamaTokenizer(LLAMA)


def write(path: Path, texts: list[str]) -> Path:
    """`texts` in the format that the name of `path` says; a folder of .txt without a suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ''.join(json.dumps({'text': text, 'meta': {'n': 1}}) + '\n' for text in texts).encode()
    if path.suffix == '.parquet':
        pq.write_table(
            pa.table({'meta': ['x'] * len(texts), 'text': texts}),
            path,
            row_group_size=100,
            compression='none',
        )
    elif path.suffix == '.zst':
        path.write_bytes(pa.Codec('zstd').compress(lines, asbytes=True))
    elif path.suffix == '.jsonl':
        path.write_bytes(lines)
    else:
        path.mkdir()
        for i, text in enumerate(texts):
            (path / f'{i:06d}.txt').write_bytes(text.encode())
    return path


def command(where: Path | str, out: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        os.path.join(REPO, 'prepare_slimpajama.py'),
        f'--input={where}',
        f'--out_dir={out}',
        *(options if any('--tokenizer' in o for o in options) else ('--tokenizer=byte', *options)),
    ]


def run(where: Path | str, out: Path, *options: str, **env: str) -> subprocess.CompletedProcess:
    """The command, as a user gives it; in this process, unless it has an environment of its own."""
    argv = command(where, out, *options)
    if env:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=120, env={**os.environ, **env}
        )
    says, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(says), redirect_stderr(errors):
        patch.setattr(sys, 'argv', argv[1:])
        try:
            prep.main(argv[2:])
        except SystemExit as stop:
            code = 1
            print(stop.code, file=errors)
    return subprocess.CompletedProcess(argv, code, says.getvalue(), errors.getvalue())


def refused(where: Path | str, out: Path, *options: str, **env: str) -> str:
    """The one line that the command ends with; it must fail, and leave nothing that could be taken
    for a data folder."""
    done = run(where, out, *options, **env)
    lines = [
        line for line in done.stderr.splitlines() if line.startswith('prepare_slimpajama.py: ')
    ]
    assert done.returncode == 1 and len(lines) == 1 and done.stderr.rstrip().endswith(lines[0]), (
        done.stderr
    )
    assert not list(out.glob('*.bin')) and not (out / 'meta.json').exists()
    return lines[0]


def prepare(where: Path | str, out: Path, *options: str) -> dict[str, Any]:
    """The same in this process. Returns the bytes of the shards and of meta.json's `splits`."""
    prep.main(command(where, out, *options)[2:])
    return result(out)


def result(out: Path) -> dict[str, Any]:
    assert (
        not list(out.glob('*.part'))
        and not list(out.glob('*.tmp'))
        and not (out / 'progress.json').exists()
    )
    return {
        **{path.name: path.read_bytes() for path in out.glob('*.bin')},
        'splits': json.loads((out / 'meta.json').read_text())['splits'],
    }


def expected(texts: list[str], held_out: float) -> dict[str, bytes]:
    """The byte tokenizer's shards, made the plain way."""
    ids = {split: [] for split in prep.SPLITS}
    for text in texts:
        x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2**64
        split = 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'
        ids[split] += [256, *text.encode()] if text else []
    files = {'train': 'train_00000.bin', 'val': 'val.bin', 'test': 'test.bin'}
    return {files[split]: np.array(i, '<u2').tobytes() for split, i in ids.items() if i}


# Bytes


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.zst', 'a.parquet', 'folder'])
def test_every_format_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    texts = [*documents(300, seed=2), '', *[text for text in NASTY if text], 'z' * 5000]
    made = prepare(write(tmp_path / name, texts), tmp_path / 'out', '--held_out=0.1', '--workers=1')
    right = expected(texts, 0.1)
    assert len(right) == 3 and {k: v for k, v in made.items() if k != 'splits'} == right
    for split, s in made['splits'].items():
        name = s['shards'][0]['file']
        data = right[name]
        assert s['shards'] == [
            {
                'file': name,
                'tokens': len(data) // 2,
                'documents': s['documents'],
                'sha256': hashlib.sha256(data).hexdigest(),
            }
        ]
        assert s['documents'] == np.count_nonzero(np.frombuffer(data, '<u2') == 256)
        assert s['tokens'] == len(Sequences(str(tmp_path / 'out'), split, 64).shards[0])


def test_a_broken_surrogate_and_a_null_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / 'a.jsonl'
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n\n{"text": null}\n{"text": "c"}\n')
    made = prepare(path, tmp_path / 'out', '--held_out=0')
    assert made['train_00000.bin'] == expected(['a\ufffdb \U0001f600', 'c'], 0)['train_00000.bin']


def test_workers_shards_and_long_documents_do_not_show(tmp_path: Path) -> None:
    texts = [*documents(3000, seed=3), 'a long document ' * 150_000, *documents(10, seed=4)]
    where = write(tmp_path / 'a.parquet', texts)
    one = prepare(where, tmp_path / 'one', '--held_out=0.1', '--workers=1', '--shard_tokens=500K')
    two = prepare(where, tmp_path / 'two', '--held_out=0.1', '--workers=2', '--shard_tokens=500K')
    assert one == two and len(one['splits']['train']['shards']) > 2
    assert (
        b''.join(v for k, v in sorted(one.items()) if k.startswith('train'))
        == expected(texts, 0.1)['train_00000.bin']
    )
    assert all(shard['tokens'] == 500_000 for shard in one['splits']['train']['shards'][:-1])
    limited = [
        prepare(
            where, tmp_path / f'limited{w}', '--tokens=700K', '--held_out=0.1', f'--workers={w}'
        )
        for w in (1, 2)
    ]
    assert limited[0] == limited[1] and limited[0]['splits']['train']['tokens'] == 700_000
    assert limited[0]['train_00000.bin'] == expected(texts, 0.1)['train_00000.bin'][:1_400_000]
    assert (
        one['val.bin'].startswith(limited[0]['val.bin']) and limited[0]['val.bin'] != one['val.bin']
    )


@needs_llama
def test_a_llama_folder_is_whole(tmp_path: Path, llama: LlamaTokenizer) -> None:
    made = prepare(
        write(tmp_path / 'a.jsonl', ['Hello <s> world', ' x']),
        tmp_path / 'out',
        f'--tokenizer={LLAMA}',
        '--eos',
        '--held_out=0',
    )
    right = [1, *llama.encode('Hello <s> world'), 2, 1, *llama.encode(' x'), 2]
    assert np.frombuffer(made['train_00000.bin'], '<u2').tolist() == right
    tokenizer = load_tokenizer(str(tmp_path / 'out'))
    assert (tokenizer.vocab_size, tokenizer.bos) == (32_000, 1)
    assert tokenizer.decode(right[: right.index(2)]) == 'Hello <s> world'
    meta = tmp_path / 'out' / 'meta.json'
    for key, value in (('vocab_size', 32_001), ('tokenizer_sha256', 'f' * 64)):
        good = meta.read_text()
        meta.write_text(json.dumps({**json.loads(good), key: value}))
        with pytest.raises(SystemExit, match=f'another llama tokenizer: .*{value}'):
            load_tokenizer(str(tmp_path / 'out'))
        meta.write_text(good)
    (tmp_path / 'out' / 'tokenizer.model').write_bytes(b'damaged')
    with pytest.raises(SystemExit, match="is not Llama's"):
        load_tokenizer(str(tmp_path / 'out'))
    (tmp_path / 'out' / 'tokenizer.model').unlink()
    with pytest.raises(SystemExit, match=r'tokenizer\.model is missing'):
        load_tokenizer(str(tmp_path / 'out'))


def test_large_vocabularies_take_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, 'vocab_size', 2**16 + 1)
    monkeypatch.setattr(ByteTokenizer, 'bos', 2**16)
    texts = documents(20, seed=5)
    made = prepare(
        write(tmp_path / 'a.jsonl', texts), tmp_path / 'out', '--held_out=0', '--workers=1'
    )
    ids = np.frombuffer(made['train_00000.bin'], '<u4')
    assert (ids == 2**16).sum() == 20 and len(ids) == sum(1 + len(t.encode()) for t in texts)
    prep.verify(str(tmp_path / 'out'))
    x, _ = Sequences(str(tmp_path / 'out'), 'train', 16).batch(np.array([0]))
    assert x[0, 0] == 2**16 and bytes(x[0, 1:].tolist()) == texts[0].encode()[:15]


def test_a_document_has_one_split() -> None:
    texts, rng = [text for text in NASTY if text], random.Random(0)
    for text in texts:
        at = rng.randrange(len(text) + 1)
        assert survey([text]) == survey([text[:at], text[at:]])
        assert survey([text])[1] == len(text)
    assert {prep.split_of(survey([text])[0], 0.3) for text in texts} == set(prep.SPLITS)


def test_native_splits(tmp_path: Path) -> None:
    texts = documents(400, seed=6)
    for name, part in (
        ('train/chunk1/a.jsonl.zst', texts[:300]),
        ('validation/chunk1/b.jsonl.zst', texts[300:]),
    ):
        write(tmp_path / 'in' / name, part)
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2', '--tokens=10M')
    right = expected(texts[:300], 0.2)
    assert (
        made['val.bin'] == expected(texts[300:], 0)['train_00000.bin']
        and made['test.bin'] == right['test.bin']
    )
    kept = [text for text in texts[:300] if prep.split_of(survey([text])[0], 0.2) != 'test']
    assert made['train_00000.bin'] == expected(kept, 0)['train_00000.bin']
    short = prepare(tmp_path / 'in', tmp_path / 'short', '--held_out=0.2', '--tokens=20K')
    assert short['splits']['val']['tokens'] == 4000 and short['splits']['train']['tokens'] == 20_000


def test_a_seed_shuffles_the_files(tmp_path: Path) -> None:
    for i in range(5):
        write(tmp_path / 'in' / f'{i}.jsonl', [f'file {i} ' * 20])
    made = [
        prepare(tmp_path / 'in', tmp_path / f'out{n}', f'--seed={seed}', '--held_out=0')[
            'train_00000.bin'
        ]
        for n, seed in enumerate((0, 1, 1))
    ]
    assert made[0] != made[1] == made[2] and sorted(made[0]) == sorted(made[1])
    orders = [json.loads((tmp_path / f'out{n}' / 'meta.json').read_text())['files'] for n in (0, 1)]
    assert orders[0] == sorted(orders[1]) == [f'{i}.jsonl' for i in range(5)]


def test_builtin_is_the_standard_library(tmp_path: Path) -> None:
    prep.prepare_builtin(str(tmp_path / 'out'))
    root, texts = os.path.dirname(os.__file__), []
    for folder, subfolders, files in os.walk(root):
        left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}
        subfolders[:] = sorted(set(subfolders) - left_out)
        texts += [
            Path(folder, name).read_bytes().decode(errors='replace')
            for name in sorted(files)
            if name.endswith('.py')
        ]
    made = result(tmp_path / 'out')
    assert {k: v for k, v in made.items() if k != 'splits'} == expected(texts, 0.05)
    tokenizer = load_tokenizer(str(tmp_path / 'out'))
    assert (tokenizer.bos, tokenizer.vocab_size, tokenizer.decode(tokenizer.encode('é'))) == (
        256,
        257,
        'é',
    )


# Interruptions


def test_killed_and_restarted_gives_the_same_bytes(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f'random moments of seed {seed}')
    rng = random.Random(seed)
    for i in range(20):
        write(tmp_path / 'in' / f'{i:02d}.parquet', documents(100, seed=10 + i, characters=4000))
    options = ('--shard_tokens=500K', '--held_out=0.05', '--workers=2')
    straight = prepare(tmp_path / 'in', tmp_path / 'straight', *options)
    slow = dict(os.environ, PYTHONPATH=REPO, SLOW=str(rng.uniform(0.0005, 0.001)))
    out, kills = tmp_path / 'out', 0
    script = (
        'import os, sys, time, prepare_slimpajama as prep\nprep.BATCH = prep.SAVE_BYTES = 1 << 16\n'
        'append = prep.Writer.append\n'
        'def slow(*args): time.sleep(float(os.environ["SLOW"])); append(*args)\n'
        'prep.Writer.append = slow\nprep.main(sys.argv[1:])\n'
    )
    (tmp_path / 'slow.py').write_text(script)
    argv = [sys.executable, str(tmp_path / 'slow.py'), *command(tmp_path / 'in', out, *options)[2:]]
    positions = [0]

    def position() -> int:
        state = out / 'progress.json'
        return json.loads(state.read_text())['tokens']['train'] if state.exists() else 0

    while kills < 3:
        process = subprocess.Popen(argv, env=slow, stderr=subprocess.PIPE, text=True)
        while position() <= positions[-1]:
            time.sleep(0.01)
            assert process.poll() is None, process.stderr.read()
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.wait()
        kills += 1
        positions.append(position())
        assert not (out / 'meta.json').exists()
    print(f'killed after {positions} tokens')
    assert positions == sorted(set(positions))  # every run went on where the one before was
    done = subprocess.run(argv, env=dict(slow, SLOW='0'), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert result(out) == straight


def test_killed_while_it_names_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        write(tmp_path / 'in' / f'{i}.jsonl', documents(200, seed=60 + i))
    options = ('--shard_tokens=20K', '--held_out=0.1')
    straight = prepare(tmp_path / 'in', tmp_path / 'straight', *options)
    out = tmp_path / 'out'
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(prep, 'SAVE_BYTES', 1)
        look_at, calls = prep.look_at, []

        def dies(*args: Any) -> Any:
            calls.append(args)
            return look_at(*args) if len(calls) < 4 else {}['killed here']

        patch.setattr('nanocem.writer.look_at', dies)
        prepare(tmp_path / 'in', out, *options)
    state = out / 'progress.json'
    before = json.loads(state.read_text())
    assert len(list(out.glob('*.bin'))) == 3 and before['file'] == 4
    # the last note was made long before
    before.update(file=0, tokens=dict.fromkeys(prep.SPLITS, 0), last={})
    state.write_text(json.dumps(before))
    assert prepare(tmp_path / 'in', out, *options) == straight


def test_a_run_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    where, out = (
        write(tmp_path / 'a.jsonl', documents(1000, seed=7, characters=2000)),
        tmp_path / 'out',
    )
    straight = prepare(where, tmp_path / 'straight', '--workers=1')
    limit = len(straight['train_00000.bin']) // 2
    done = subprocess.run(
        command(where, out, '--workers=1'),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert re.match(
        r'prepare_slimpajama.py: .*(File too large|No space left)', done.stderr.splitlines()[-1]
    )
    assert not list(out.glob('*.bin')) and not (out / 'meta.json').exists()
    assert prepare(where, out, '--workers=1') == straight


def test_a_full_disk_for_real(tmp_path: Path) -> None:
    where, out = (
        write(tmp_path / 'a.jsonl', documents(1000, seed=7, characters=2000)),
        tmp_path / 'small',
    )
    out.mkdir()
    inside = ' '.join(command(where, out, '--workers=1'))
    if subprocess.run(
        ['unshare', '-rm', 'mount', '-t', 'tmpfs', 'x', str(out)], capture_output=True
    ).returncode:
        pytest.skip('this machine lets nobody mount a small disk')
    done = subprocess.run(
        [
            'unshare',
            '-rm',
            'sh',
            '-c',
            f'mount -t tmpfs -o size=512k x {out} && {inside}; code=$?; ls {out}; exit $code',
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        'prepare_slimpajama.py: '
    )
    assert 'No space left on device' in done.stderr.splitlines()[-1]
    assert '.bin\n' not in done.stdout and 'meta.json' not in done.stdout


def test_an_unfinished_folder_is_kept_to_its_configuration(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'in' / 'a.jsonl', documents(50, seed=8)).parent, tmp_path / 'out'
    prepare(where, out)
    before = (out / 'meta.json').read_bytes()
    done = run(where, out, '--held_out=0.2', '--seed=3')
    assert done.returncode == 1 and 'held_out=0.005, not 0.2; seed=0, not 3' in done.stderr
    assert run(where, out).returncode == 0 and (out / 'meta.json').read_bytes() == before
    (out / 'meta.json').unlink()
    done = run(where, out)
    assert done.returncode == 1 and 'no meta.json' in done.stderr
    unfinished = tmp_path / 'unfinished'
    write(where / 'b.parquet', documents(50, seed=9)).write_bytes(b'PAR1 damaged')
    assert 'b.parquet' in refused(where, unfinished, '--workers=1')


# The user's files


def test_a_changed_input_is_noticed(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'in' / 'a.jsonl', documents(50, seed=71)).parent, tmp_path / 'out'
    prepare(where, out, '--held_out=0.1')
    assert 'is prepared already' in run(where, out, '--held_out=0.1').stdout
    path = where / 'a.jsonl'
    data, at = path.read_bytes(), path.stat().st_mtime_ns

    def asked() -> subprocess.CompletedProcess:
        return run(where, out, '--held_out=0.1')

    path.write_bytes(data.replace(b'energy', b'Energy', 1))  # of the same size
    assert asked().returncode == 1 and 'has changed since' in asked().stderr
    path.write_bytes(data)
    os.utime(path, ns=(at, at))
    assert asked().returncode == 0
    write(where / 'b.jsonl', ['one more'])
    assert asked().returncode == 1 and 'has changed since' in asked().stderr
    shutil.rmtree(where)  # the tokens are enough
    assert asked().returncode == 0 and 'is prepared already' in asked().stdout


def test_two_at_once(tmp_path: Path) -> None:
    script = (
        'import sys, prepare_slimpajama as prep\nprepare = prep.prepare\n'
        'def slow(*args): print("at it", flush=True); sys.stdin.readline(); prepare(*args)\n'
        'prep.prepare = slow\nprep.prepare_builtin(sys.argv[1])\n'
    )
    argv = [sys.executable, '-c', script, str(tmp_path / 'out')]

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            argv,
            env=dict(os.environ, PYTHONPATH=REPO),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    first = start()
    assert first.stdout.readline() == 'at it\n'
    done = run('builtin', tmp_path / 'out')
    assert done.returncode == 1 and 'another process is preparing it' in done.stderr
    second = start()
    assert 'waiting for it' in second.stdout.readline()
    time.sleep(0.5)
    assert second.poll() is None and not (tmp_path / 'out' / 'meta.json').exists()
    first.communicate('go on\n', timeout=60)
    assert first.returncode == 0 and set(result(tmp_path / 'out')) > {'val.bin', 'test.bin'}
    says, _ = second.communicate('go on\n', timeout=60)
    assert second.returncode == 0 and says.splitlines()[-1].endswith('is prepared already')


def test_a_message_is_of_the_program_that_was_run(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    script = tmp_path / 'train.py'
    script.write_text('import sys, prepare_slimpajama as prep\nprep.prepare_builtin(sys.argv[1])\n')
    done = subprocess.run(
        [sys.executable, script, tmp_path / 'file'],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=REPO),
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith('train.py: ') and 'prepare_slimpajama' not in done.stderr


# A text of one's own


def book(words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return ''.join(
        rng.choice(['of ', 'energy ', 'the\n', 'naïve ', 'minimum. ', '世界 '])
        for _ in range(words)
    )


@pytest.mark.parametrize('options', [(), ('--held_out=0.1',), ('--column=text', '--tokens=20K')])
def test_few_documents_are_split_by_position(tmp_path: Path, options: tuple[str, ...]) -> None:
    text = book(20_000)
    (tmp_path / 'book.txt').write_text(text)
    done = run(tmp_path / 'book.txt', tmp_path / 'out', *options)
    assert done.returncode == 0 and 'has few documents' in done.stdout, done.stderr
    made = result(tmp_path / 'out')
    share = 0.1 if '--held_out=0.1' in options else 0.05
    parts = [
        np.frombuffer(made[name], '<u2') for name in ('train_00000.bin', 'val.bin', 'test.bin')
    ]
    assert all(part[0] == 256 and (part == 256).sum() == 1 for part in parts)
    texts = [bytes(part[1:].tolist()) for part in parts]
    if '--tokens=20K' in options:
        assert [len(part) for part in parts] == [20_000, 1000, 1000]
        assert text.encode().startswith(texts[0]) and texts[1] in text.encode()
        return
    assert b''.join(texts) == text.encode()
    for part in texts[1:]:
        assert share / 2 < len(part) / len(text.encode()) < share * 1.5


def test_few_documents_with_splits_of_their_own(tmp_path: Path) -> None:
    for name in ('train', 'validation'):
        (tmp_path / 'in' / name).mkdir(parents=True)
        (tmp_path / 'in' / name / 'a.txt').write_text(book(5000, seed=len(name)))
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.1', '--tokens=1M')
    whole = made['train_00000.bin'] + made['test.bin'][2:]
    assert whole == expected([book(5000, seed=5)], 0)['train_00000.bin']
    assert made['val.bin'] == expected([book(5000, seed=10)], 0)['train_00000.bin']


def test_stopped_while_it_splits_by_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(6):
        (tmp_path / 'in').mkdir(exist_ok=True)
        (tmp_path / 'in' / f'{i}.txt').write_text(book(5000, seed=i))
    straight = prepare(tmp_path / 'in', tmp_path / 'straight')
    assert all(split['documents'] == 6 for split in straight['splits'].values())
    monkeypatch.setattr(prep, 'SAVE_BYTES', 1)
    append, counts = prep.Writer.append, []
    for stop in (60, 60, 20):

        def dies(writer: Any, *args: Any, stop: int = stop) -> None:
            counts.append(1)
            if len(counts) > stop:
                raise KeyboardInterrupt
            append(writer, *args)

        with monkeypatch.context() as patch, pytest.raises(SystemExit, match='goes on from here'):
            patch.setattr(prep.Writer, 'append', dies)
            counts.clear()
            prepare(tmp_path / 'in', tmp_path / 'out')
    assert prepare(tmp_path / 'in', tmp_path / 'out') == straight


def test_too_little_text_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('word')
    assert 'too little text for val and test' in refused(tmp_path / 'a.txt', tmp_path / 'out')
    assert os.listdir(tmp_path / 'out') == ['.lock']
    made = prepare(tmp_path / 'a.txt', tmp_path / 'out', '--held_out=0')
    assert made['train_00000.bin'] == expected(['word'], 0)['train_00000.bin']


def test_prepare_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'My book.v2.txt'
    path.write_text(book(20_000))
    made = prep.prepare_text('My book.v2.txt')
    assert re.fullmatch(r'data/My book-[0-9a-f]{8}', made)
    assert 'one token a byte' in capsys.readouterr().out
    for split in prep.SPLITS:
        assert len(Sequences(made, split, 128)) > 10
    at = os.path.getmtime(f'{made}/meta.json')
    assert prep.prepare_text(str(path)) == made and os.path.getmtime(f'{made}/meta.json') == at
    assert capsys.readouterr().out == ''
    path.write_text(book(20_000, seed=1))
    changed = prep.prepare_text(str(path))
    assert changed != made and load_tokenizer(changed).name == 'byte'
    with pytest.raises(SystemExit, match='none of llama, gpt2, byte'):
        prep.prepare_text(str(path), 'bert')
    with pytest.raises(SystemExit, match='no such file or folder'):
        prep.prepare_text(str(tmp_path / 'nothing'))
    # thirty documents of which, at random, few or none or short ones would be held out
    (tmp_path / 'folder').mkdir()
    for i in range(30):
        (tmp_path / 'folder' / f'{i}.txt').write_text(book(1000, seed=i) if i % 5 else 'short')
    folder = prep.prepare_text(str(tmp_path / 'folder'))
    assert all(len(Sequences(folder, split, 128)) > 10 for split in prep.SPLITS)


@needs_llama
def test_prepare_text_takes_larger_tokens_for_a_larger_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'book.txt').write_text(book(20_000))
    made = prep.prepare_text('book.txt', LLAMA)
    assert load_tokenizer(made).name == 'llama'
    asked = []
    monkeypatch.setattr(prep, 'SMALL_TEXT', 1000)
    monkeypatch.setattr(prep, 'ask_hub', lambda repo, question: asked.append(repo) or LLAMA)
    made = prep.prepare_text('book.txt')
    assert load_tokenizer(made).name == 'llama' and asked == [] and made.startswith('data/book-')
    monkeypatch.chdir(tmp_path / 'data')
    assert load_tokenizer(prep.prepare_text('../book.txt')).name == 'llama' and len(asked) == 1


# Damage


def damage(folder: Path, kind: str) -> str:
    """A folder of three files, the second damaged. Returns what the message must say."""
    texts = documents(700, seed=20, characters=1000)
    write(folder / 'a.jsonl', texts[:100])
    write(folder / 'c.jsonl', texts[600:])
    name, says = {
        'cut parquet': ('b.parquet', ''),
        'broken parquet': ('b.parquet', ''),
        'not parquet': ('b.parquet', 'magic'),
        'no column': ('b.parquet', 'no "text" column, only words'),
        'numbers': ('b.parquet', 'no string but 1'),
        'cut zst': ('b.jsonl.zst', 'Truncated'),
        'broken zst': ('b.jsonl.zst', 'ZSTD'),
        'empty zst': ('b.jsonl.zst', 'empty'),
        'not JSON': ('b.jsonl', 'line 400 is not JSON'),
        'no field': ('b.jsonl', 'line 401 has no "text" field'),
        'not UTF-8': ('b.jsonl', 'line 400 is not JSON'),
    }[kind]
    path = write(folder / name, texts[100:600])
    data = path.read_bytes()
    middle = len(data) // 2
    if kind == 'no column':
        pq.write_table(pa.table({'words': ['a']}), path)
    elif kind == 'numbers':
        pq.write_table(pa.table({'text': [1]}), path)
    elif name == 'b.jsonl':
        lines = data.splitlines()
        lines[399 + (kind == 'no field')] = {
            'not JSON': b'{"text": "a',
            'no field': b'{"txt": "a"}',
            'not UTF-8': b'{"text": "\xff"}',
        }[kind]
        path.write_bytes(b'\n'.join(lines))
    else:
        broken = data[: middle - 99] + random.Random(21).randbytes(200) + data[middle + 101 :]
        path.write_bytes(
            {'cut': data[:middle], 'broken': broken, 'empty': b'', 'not': b'not parquet'}[
                kind.split()[0]
            ]
        )
    return says


@pytest.mark.parametrize(
    'kind',
    [
        'cut parquet',
        'broken parquet',
        'not parquet',
        'no column',
        'numbers',
        'cut zst',
        'broken zst',
        'empty zst',
        'not JSON',
        'no field',
        'not UTF-8',
    ],
)
def test_a_damaged_file_is_named_and_left_out_only_on_demand(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that documents before the damage are written before it is met
    monkeypatch.setattr(prep, 'BATCH', 50_000)
    monkeypatch.setattr(prep, 'SAVE_BYTES', 1)
    folder, out = tmp_path / 'in', tmp_path / 'out'
    says = damage(folder, kind)
    with pytest.raises(
        SystemExit, match=r'/in/b\.(parquet|jsonl|jsonl\.zst): .*--skip_bad'
    ) as stop:
        prepare(folder, out, '--held_out=0.1', '--workers=1', '--shard_tokens=200K')
    assert says in str(stop.value) and '\n' not in str(stop.value)
    assert not list(out.glob('*.bin')) and not (out / 'meta.json').exists()
    skipped = prepare(
        folder, out, '--held_out=0.1', '--workers=1', '--shard_tokens=200K', '--skip_bad'
    )
    meta = json.loads((out / 'meta.json').read_text())
    assert list(meta['skipped']) == [next(p.name for p in folder.glob('b.*'))] and meta[
        'files'
    ] == ['a.jsonl', 'c.jsonl']
    next(folder.glob('b.*')).unlink()
    assert skipped == prepare(
        folder, tmp_path / 'without', '--held_out=0.1', '--workers=1', '--shard_tokens=200K'
    )


def test_bad_options_and_inputs_are_refused(tmp_path: Path) -> None:
    out, some = tmp_path / 'out', write(tmp_path / 'a.jsonl', ['text'])
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'empty.jsonl').touch()
    (tmp_path / 'other.model').write_bytes(b'not a tokenizer')
    for where, options, says in (
        (tmp_path / 'nothing', (), 'no such file or folder'),
        (tmp_path / 'empty', (), 'holds no .parquet, .jsonl'),
        (tmp_path / 'empty.jsonl', ('--workers=1',), 'holds no text'),
        (some, ('--tokens=many',), 'expected a whole number'),
        (some, ('--tokens=0',), 'expected 1 to'),
        (some, ('--tokens=1.5',), 'expected a whole number'),
        (some, ('--shard_tokens=0.5K1',), 'expected a whole number'),
        (some, ('--tokenizer=bert',), 'none of llama, gpt2, byte'),
        (some, (f'--tokenizer={tmp_path}/other.model',), LLAMA_SAYS),
        (some, ('--nonsense=1',), 'no such option'),
        (some, ('--workers=0',), 'expected 1 to'),
        (some, ('--held_out=0.7',), 'below 0.5'),
        (some, ('--eos',), 'no EOS'),
        (some, ('--size=86m', '--tokens=1M'), 'give one'),
        (some, ('--size=1m',), 'expected one of 86m, 108m'),
    ):
        assert says in refused(where, out, *options)


LLAMA_SAYS = f'expected {LLAMA_SHA256}'


def test_verify_and_train_find_damage(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'a.jsonl', documents(300, seed=30)), tmp_path / 'out'
    prepare(where, out, '--held_out=0.1', '--shard_tokens=10K', '--workers=1')
    prep.verify(str(out))
    path = out / 'train_00001.bin'
    good = np.fromfile(path, '<u2')

    def check(data: bytes, says: str, train_says: str | None) -> None:
        path.write_bytes(data)
        with pytest.raises(SystemExit, match=says):
            prep.verify(str(out))
        if train_says:
            with pytest.raises(SystemExit, match=train_says):
                Sequences(str(out), 'train', 64)
        path.write_bytes(good.tobytes())

    changed = good.copy()
    changed[1234] ^= 1
    check(changed.tobytes(), 'sha256', None)
    changed[1234] = 257
    check(changed.tobytes(), 'token 257, outside the vocabulary of 257', 'holds token 257')
    check(good[:-1].tobytes(), 'tokens 9999, meta.json says 10000', 'cut off')
    changed[:] = np.where(good == 256, 32, good)
    check(changed.tobytes(), 'documents 0, meta', None)
    path.rename(out / 'away')
    with pytest.raises(SystemExit, match=r'train_00001\.bin is missing'):
        prep.verify(str(out))
    with pytest.raises(SystemExit, match=r'train_00001\.bin is missing'):
        Sequences(str(out), 'train', 64)
    (out / 'away').rename(path)
    prep.verify(str(out))
    with pytest.raises(SystemExit, match='holds token 256, outside the vocabulary of 200'):
        Sequences(str(out), 'train', 64, vocab_size=200)
    with pytest.raises(SystemExit, match=r'python prepare_slimpajama\.py'):
        Sequences(str(tmp_path / 'nothing'), 'train', 64)
    (out / 'meta.json').write_text('{"format": 1')
    with pytest.raises(SystemExit, match='damaged'):
        prep.verify(str(out))


def test_peek(tmp_path: Path) -> None:
    texts = [f'document {i}: ' + 'naïve ' * i for i in range(9)]
    prepare(write(tmp_path / 'a.jsonl', texts), tmp_path / 'out', '--held_out=0')
    done = run('builtin', tmp_path / 'out', '--peek')
    assert (
        done.returncode == 0
        and [line for line in done.stdout.splitlines() if not line.startswith('---')] == texts[:5]
    )
    assert run('builtin', tmp_path / 'out', '--peek=val').stderr.startswith(
        'prepare_slimpajama.py: '
    )


def test_memory_is_flat(tmp_path: Path) -> None:
    script = (
        'import sys, prepare_slimpajama as prep\nprep.main(sys.argv[1:])\n'
        'print([line for line in open("/proc/self/status") if "VmHWM" in line][0].split()[1])'
    )
    text = ' '.join(documents(10, seed=40, characters=2000))
    for name in ('a.parquet', 'a.jsonl.zst', 'a.txt'):
        peak = []
        for n in (5, 50):
            path = tmp_path / f'{n}{name[1:]}'
            parts = [f'{i} {text}' for i in range(n * 1_000_000 // len(text))]
            path.write_text(' '.join(parts)) if name == 'a.txt' else write(path, parts)
            options = command(path, tmp_path / f'{n}{name}', '--workers=1')[2:]
            done = subprocess.run(
                [sys.executable, '-c', script, *options], capture_output=True, text=True, cwd=REPO
            )
            peak.append(int(done.stdout.split()[-1]) // 1024)
        print(name, peak)
        assert peak[1] < peak[0] + 40, peak  # MB; the larger input is 50 MB of text


@pytest.mark.slow
@needs_llama
def test_speed(tmp_path: Path, llama: LlamaTokenizer, capsys: pytest.CaptureFixture) -> None:
    """pytest -m slow -k speed: a whole run, beside SentencePiece alone in one thread and
    transformers' fast tokenizer (as many threads as cores) on the same text, by turns; medians of
    three. $SPEED_TEXT is a .jsonl of your own."""
    cores, where = len(os.sched_getaffinity(0)), os.environ.get('SPEED_TEXT')
    if not where:
        where = str(
            write(
                tmp_path / 'a.jsonl',
                [
                    path.read_text(errors='replace')
                    for path in sorted(Path(os.__file__).parent.rglob('*.py'))
                ][:2000],
            )
        )
    lines = Path(where).read_text(encoding='utf-8').split('\n')
    texts = [text for line in lines if line and (text := json.loads(line)['text'])]
    megabytes, fast = sum(len(text.encode()) for text in texts) / 1e6, llama_of_2023(llama.model)
    seconds: dict[str, list[tuple[float, float]]] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        begin, before = time.perf_counter(), os.times()
        got = work()
        after = os.times()
        seconds.setdefault(name, []).append(
            (time.perf_counter() - begin, sum(after[:4]) - sum(before[:4]))
        )
        return got

    for turn in range(3):
        ids = measure('SentencePiece alone', lambda: [llama.model.encode(text) for text in texts])
        tokens = sum(len(i) + 1 for i in ids)
        measure('transformers fast', lambda: fast(texts, add_special_tokens=False))
        out = tmp_path / f'out{turn}'
        done = measure(
            f'prepare_slimpajama.py, {cores} workers',
            lambda out=out: run(where, out, f'--tokenizer={LLAMA}', OMP_NUM_THREADS='1'),
        )
        assert (
            done.returncode == 0
            and sum(s['tokens'] for s in result(out)['splits'].values()) == tokens
        ), done.stderr
    with capsys.disabled():
        print(f'\n{megabytes:.1f} MB, {tokens:,} tokens, {cores} cores; medians of three turns')
        medians = {
            name: [sorted(row[i] for row in rows)[1] for i in (0, 1)]
            for name, rows in seconds.items()
        }
        for name, (wall, cpu) in medians.items():
            print(
                f'{name:35} {megabytes / wall:6.2f} MB/s {tokens / wall:12,.0f} tokens/s   '
                f'{cpu / megabytes:.3f} CPU s a MB'
            )
        alone, _, ours = medians.values()
        print(
            f'{alone[0] / ours[0] / cores:.2f} x cores x SentencePiece alone; of its CPU time a '
            f'MB, {ours[1] / alone[1]:.2f}'
        )
    assert ours[1] < alone[1] / 0.8  # of CPU time, which other load disturbs less than the clock

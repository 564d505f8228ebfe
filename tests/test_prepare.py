"""prepare_slimpajama.py: bytes, interruptions, a text of one's own, damage. Nothing is downloaded;
tests that need Llama's tokenizer.model are skipped without it."""
import contextlib
import gzip
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
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import ROOT
from test_tokenizers import LLAMA, NASTY, documents, needs_llama

import prepare_slimpajama as prep

sources = prep
from nanocem.data import TokenDataset
from nanocem.tokenizers import SentencePieceTokenizer as LlamaTokenizer
from nanocem.tokenizers import load_tokenizer

LLAMA_SHA256 = ""

SCRIPT = str(ROOT / 'prepare_slimpajama.py')


def write(path: Path, texts: list[str]) -> Path:
    """`texts` in the format that the name of `path` says; a folder of .txt without a suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ''.join(json.dumps({'text': text, 'meta': {'n': 1}}) + '\n' for text in texts).encode()
    if path.suffix == '.parquet':
        pq.write_table(pa.table({'meta': ['x'] * len(texts), 'text': texts}), path,
                       row_group_size=100, compression='none')
    elif path.suffix == '.zst':
        path.write_bytes(pa.Codec('zstd').compress(lines, asbytes=True))
    elif path.suffix == '.gz':
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == '.jsonl':
        path.write_bytes(lines)
    else:
        path.mkdir()
        for i, text in enumerate(texts):
            (path / f'{i:06d}.txt').write_bytes(text.encode())
    return path


def command(where: Path | str, out: Path, *options: str) -> list[str]:
    byte = [] if any('--tokenizer' in option for option in options) else ['--tokenizer=byte']
    return [f'--input={where}', f'--out_dir={out}', *byte, *options]


def run(where: Path | str, out: Path, *options: str) -> SimpleNamespace:
    """The command as a user gives it, in this process."""
    says, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(says), redirect_stderr(errors):
        patch.setattr(sys, 'argv', [SCRIPT])
        try:
            prep.main(command(where, out, *options))
        except SystemExit as stop:
            code = 1
            print(stop.code, file=errors)
    return SimpleNamespace(code=code, out=says.getvalue(), err=errors.getvalue())


def refused(where: Path | str, out: Path, *options: str) -> str:
    """The one line that the command ends with; nothing may stay that a new run would trip over."""
    ended = run(where, out, *options)
    lines = [line for line in ended.err.splitlines() if line.startswith('prepare_slimpajama.py: ')]
    assert ended.code == 1 and len(lines) == 1 and ended.err.rstrip().endswith(lines[0]), ended.err
    assert not (out / 'meta.json').exists()
    return lines[0]


def prepare(where: Path | str, out: Path, *options: str) -> dict[str, Any]:
    """The bytes of the shards, and meta.json's `splits`."""
    prep.main(command(where, out, *options))
    return result(out)


def result(out: Path) -> dict[str, Any]:
    assert not list(out.glob('*.tmp')) and not (out / 'progress.json').exists()
    shards = {path.name: path.read_bytes() for path in out.glob('*.bin')}
    return {**shards, 'splits': json.loads((out / 'meta.json').read_text())['splits']}


def expected(texts: list[str], held_out: float) -> dict[str, bytes]:
    """The byte tokenizer's shards, made the plain way."""
    ids = {split: [] for split in prep.SPLITS}
    for text in texts:
        x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2**64
        split = 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'
        ids[split] += [256, *text.encode()] if text else []
    files = {'train': 'train_00000.bin', 'val': 'val.bin', 'test': 'test.bin'}
    return {files[split]: np.array(i, '<u2').tobytes() for split, i in ids.items() if i}


def train_of(texts: list[str]) -> bytes:
    return expected(texts, 0)['train_00000.bin']


# Bytes

@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.parquet', 'folder'])
def test_every_format_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    texts = [*documents(300, seed=2), '', *[text for text in NASTY if text], 'z' * 5000]
    made = prepare(write(tmp_path / name, texts), tmp_path / 'out', '--held_out=0.1', '--workers=1')
    splits = made.pop('splits')
    assert made == expected(texts, 0.1) and len(made) == 3
    for split, s in splits.items():
        (shard,) = s['shards']
        data = made[shard['file']]
        ids = np.frombuffer(data, '<u2')
        assert shard == {'file': shard['file'], 'tokens': len(ids)} and s['tokens'] == len(ids)
        assert len(ids) == len(TokenDataset(str(tmp_path / 'out'), split, 64).shards[0])


def test_workers_shards_and_long_documents_do_not_show(tmp_path: Path) -> None:
    texts = [*documents(1000, seed=3), 'one long document ' * 150_000, *documents(10, seed=4)]
    where = write(tmp_path / 'a.parquet', texts)
    right = expected(texts, 0.1)
    one = prepare(where, tmp_path / 'one', '--held_out=0.1', '--workers=1', '--shard_tokens=500K')
    two = prepare(where, tmp_path / 'two', '--held_out=0.1', '--workers=2', '--shard_tokens=500K')
    assert one == two and len(one['splits']['train']['shards']) > 2
    shards = [value for name, value in sorted(one.items()) if name.startswith('train')]
    assert b''.join(shards) == right['train_00000.bin']
    assert all(len(shard) == 1_000_000 for shard in shards[:-1])
    limited = prepare(where, tmp_path / 'limited', '--tokens=200K', '--held_out=0.1')
    assert limited['train_00000.bin'] == right['train_00000.bin'][:400_000]
    assert right['val.bin'].startswith(limited['val.bin']) and limited['val.bin'] != one['val.bin']


@needs_llama
def test_a_llama_folder_is_whole(tmp_path: Path) -> None:
    llama, out = LlamaTokenizer(LLAMA), tmp_path / 'out'
    made = prepare(write(tmp_path / 'a.jsonl', ['Hello <s> world', ' x']), out,
                   f'--tokenizer={LLAMA}', '--held_out=0')
    right = [1, *llama.encode('Hello <s> world'), 1, *llama.encode(' x')]
    assert np.frombuffer(made['train_00000.bin'], '<u2').tolist() == right
    assert load_tokenizer(str(out)).decode(right) == 'Hello <s> world  x'
    meta = json.loads((out / 'meta.json').read_text())
    (out / 'meta.json').write_text(json.dumps({**meta, 'tokenizer_sha256': 'f' * 64}))
    with pytest.raises((SystemExit, ValueError), match=r'another llama tokenizer: .*fff'):
        load_tokenizer(str(out))
    (out / 'tokenizer.model').write_bytes(b'damaged')
    with pytest.raises((SystemExit, ValueError), match="is not Llama's"):
        load_tokenizer(str(out))
    (out / 'tokenizer.model').unlink()
    with pytest.raises((SystemExit, ValueError), match=r'No such file .*tokenizer\.model'):
        load_tokenizer(str(out))


def test_splits_of_the_inputs_own(tmp_path: Path) -> None:
    texts = documents(400, seed=6)
    write(tmp_path / 'in/train/chunk1/a.jsonl.zst', texts[:300])
    write(tmp_path / 'in/validation/chunk1/b.jsonl.zst', texts[300:])
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2', '--tokens=10M')
    test = expected(texts[:300], 0.2)['test.bin']
    drawn = [text for text in texts[:300] if train_of([text]) not in test]
    assert made['val.bin'] == train_of(texts[300:])
    assert made['test.bin'] == expected(texts[:300], 0.2)['test.bin']
    assert made['train_00000.bin'] == train_of(drawn)
    short = prepare(tmp_path / 'in', tmp_path / 'short', '--held_out=0.2', '--tokens=20K')
    assert short['splits']['val']['tokens'] == 4000 and short['splits']['train']['tokens'] == 20_000
    # and where documents are few
    for name in ('train', 'validation'):
        (tmp_path / 'few' / name).mkdir(parents=True)
        (tmp_path / 'few' / name / 'a.txt').write_text(book(5000, seed=len(name)))
    made = prepare(tmp_path / 'few', tmp_path / 'out few', '--held_out=0.1', '--tokens=1M')
    assert made['train_00000.bin'] + made['test.bin'] == train_of([book(5000, seed=5)])
    assert made['val.bin'] == train_of([book(5000, seed=10)])


# Interruptions

class Killed(BaseException):
    """Nobody catches it: what a process leaves that is killed."""


@pytest.mark.parametrize('few', [False, True])
def test_killed_and_restarted_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    seed = random.randrange(2**32)
    print(f'random moments of seed {seed}')
    rng = random.Random(seed)
    for i in range(6):
        texts = [book(5000, seed=i)] if few else documents(100, seed=10 + i)
        write(tmp_path / 'in' / f'{i}.jsonl', texts)
    straight = prepare(tmp_path / 'in', tmp_path / 'straight', '--shard_tokens=20K')
    assert not few or all(split['documents'] == 6 for split in straight['splits'].values())
    monkeypatch.setattr(prep, 'SAVE_TOKENS', 1)
    left = [0]

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args)
        return wrapped

    for name in ('append', 'flush', 'describe'):
        monkeypatch.setattr(prep.Writer, name, mortal(getattr(prep.Writer, name)))
    files = 0
    for _ in range(6):
        left[0] = rng.randrange(150)
        with contextlib.suppress(Killed):
            prepare(tmp_path / 'in', tmp_path / 'out', '--shard_tokens=20K')
        progress = tmp_path / 'out/progress.json'
        if progress.exists() and not few:  # it goes on, it does not begin anew
            assert files <= (files := json.loads(progress.read_text())['file'])
    left[0] = sys.maxsize
    assert prepare(tmp_path / 'in', tmp_path / 'out', '--shard_tokens=20K') == straight


def test_a_run_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    where = write(tmp_path / 'a.jsonl', documents(1000, seed=7, characters=2000))
    straight = prepare(where, tmp_path / 'straight')
    limit = len(straight['train_00000.bin']) // 2
    done = subprocess.run(
        [sys.executable, SCRIPT, *command(where, tmp_path / 'out')], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert re.match(r'prepare_slimpajama.py: .*File too large.* goes on',
                    done.stderr.splitlines()[-1])
    assert prepare(where, tmp_path / 'out') == straight


def test_a_folder_is_kept_to_its_options_and_its_input(tmp_path: Path) -> None:
    path = write(tmp_path / 'in/a.jsonl', documents(50, seed=8))
    where, out = path.parent, tmp_path / 'out'
    out.mkdir()
    (out / 'x.bin').write_bytes(b'not ours')
    prepare(where, out)
    assert (out / 'x.bin').read_bytes() == b'not ours'
    (out / 'x.bin').unlink()
    assert 'held_out=0.005, not 0.2; seed=0, not 3' in run(
        where, out, '--held_out=0.2', '--seed=3').err
    assert 'is prepared already' in run(where, out).out
    write(where / 'b.jsonl', ['one more'])
    assert 'has changed since' in run(where, out).err
    shutil.rmtree(where)  # the tokens are enough
    assert 'is prepared already' in run(where, out).out
    # files of another program, of nobody, and of a run whose notes were edited
    write(where / 'a.jsonl', ['text'])
    for name, content, says in (('meta.json', '{"name": "another program"}', 'of something else'),
                                ('notes', '', 'no meta.json'),
                                ('progress.json', '{"tokens": [1]}', 'progress.json is damaged')):
        (out / 'meta.json').unlink(missing_ok=True)
        (out / name).write_text(content)
        assert says in run(where, out).err


def test_two_at_once(tmp_path: Path) -> None:
    """The second waits for the first, and finds its folder made."""
    script = ('import sys, prepare_slimpajama as prep\nprepare = prep.prepare\n'
              'def slow(*args): print("at it", flush=True); sys.stdin.readline(); prepare(*args)\n'
              'prep.prepare = slow\nprep.find_data("data/builtin")\n')
    processes, says = [], []
    for _ in range(2):
        processes.append(subprocess.Popen(
            [sys.executable, '-c', script], env=dict(os.environ, PYTHONPATH=str(ROOT)), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path))
        says += [processes[-1].stdout.readline() for _ in range(2)]
    assert says[1] == 'at it\n' and 'waiting for it' in says[3]
    assert 'documents' in processes[0].communicate('\n', timeout=60)[0]
    assert processes[1].communicate('\n', timeout=60)[0].endswith('is prepared already\n')


# A text of one's own

def book(words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    choice = ['of ', 'energy ', 'the\n', 'naïve ', 'minimum. ', '世界 ']
    return ''.join(rng.choice(choice) for _ in range(words))


@pytest.mark.parametrize('options', [('--held_out=0.1',), ('--tokens=20K',)])
def test_few_documents_are_split_by_position(tmp_path: Path, options: tuple[str, ...]) -> None:
    text, out = book(20_000).encode(), tmp_path / 'out'
    (tmp_path / 'book.txt').write_bytes(text)
    ended = run(tmp_path / 'book.txt', out, *options)
    assert ended.code == 0 and 'has few documents' in ended.out, ended.err
    texts = texts_of(out)
    if '--tokens=20K' in options:
        assert [len(part) for part in texts] == [19_999, 1000, 1000]
        assert text.startswith(texts[0]) and texts[1] in text
        return
    assert b''.join(texts) == text
    assert all(0.05 < len(part) / len(text) < 0.15 for part in texts[1:])


def texts_of(out: Path) -> list[bytes]:
    """The one document of train, of val, of test."""
    ids = [np.fromfile(out / name, '<u2') for name in ('train_00000.bin', 'val.bin', 'test.bin')]
    assert ids[0][0] == 256 and sum((part == 256).sum() for part in ids) == 1
    return [bytes(part[part < 256].tolist()) for part in ids]


def test_too_little_text_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.txt').write_text('w')
    says = refused('a.txt', tmp_path / 'out')
    assert 'too little text for val and test' in says
    with pytest.raises((SystemExit, ValueError), match='too little text for val and test'):
        prep.find_data('data/slimpajama', 'a.txt')
    assert sorted(os.listdir()) == ['a.txt', 'data'] and not os.listdir('data')
    assert prepare('a.txt', tmp_path / 'out', '--held_out=0')['train_00000.bin'] == train_of(['w'])


def test_a_text_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'My book.v2.txt'
    path.write_text(book(20_000))

    def made_of(text: Path | str) -> str:
        return prep.find_data('data/slimpajama', str(text))

    made = made_of('My book.v2.txt')
    assert re.fullmatch(r'data/My book-[0-9a-f]{8}', made)
    assert 'one token a byte' in capsys.readouterr().out
    assert all(len(TokenDataset(made, split, 128)) > 10 for split in prep.SPLITS)
    at = os.path.getmtime(f'{made}/meta.json')
    assert made_of(path) == made and os.path.getmtime(f'{made}/meta.json') == at
    assert capsys.readouterr().out == ''
    # another text of the same size and time
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b'energy', b'Energy', 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert made_of(path) != made
    # thirty documents of which, at random, few or none or short ones would be held out
    (tmp_path / 'folder').mkdir()
    for i in range(30):
        (tmp_path / 'folder' / f'{i}.txt').write_text(book(1000, seed=i) if i % 5 else 'short')
    folder = made_of(tmp_path / 'folder')
    assert all(len(TokenDataset(folder, split, 128)) > 10 for split in prep.SPLITS)


@needs_llama
def test_larger_tokens_for_a_larger_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'book.txt').write_text(book(20_000))
    (tmp_path / 'zh.txt').write_text('你好世界' * 1000)
    made = prep.prepare_text('book.txt', LLAMA)
    monkeypatch.setattr(prep, 'SMALL_TEXT', 1000)
    assert prep.prepare_text('book.txt', None) == made and load_tokenizer(made).name == 'llama'
    with pytest.raises((SystemExit, ValueError), match='too few spaces and line ends to cut it at'):
        prep.prepare_text('zh.txt', LLAMA)


# Damage

DAMAGES = {
    'b.parquet': {'cut': '', 'numbers': 'no string but'},
    'b.jsonl.zst': {'cut': 'Truncated'},
    'b.jsonl': {'line': 'line 400 is no JSON with "text"'},
    'b.txt': {'latin': 'is not UTF-8 (invalid continuation byte): no text, or of another encoding (iconv'},
}


@pytest.mark.parametrize('name, kind', [(n, k) for n, kinds in DAMAGES.items() for k in kinds])
def test_a_damaged_file_is_named_and_left_out_only_on_demand(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that documents before the damage are written before it is met
    monkeypatch.setattr(sources, 'BATCH', 50_000)
    folder, path, out = tmp_path / 'in', tmp_path / 'in' / name, tmp_path / 'out'
    texts = documents(700, seed=20, characters=1000)
    write(folder / 'a.jsonl', texts[:100])
    write(folder / 'c.jsonl', texts[600:])
    data = b'' if name == 'b.txt' else write(path, texts[100:600]).read_bytes()
    lines = data.splitlines()[:399]
    if kind == 'numbers':
        pq.write_table(pa.table({'text': [1]}), path)
    else:
        path.write_bytes({
            'cut': data[:len(data) // 2], 'latin': b'un caf\xe9 noir ' * 9,
            'line': b'\n'.join([*lines, b'{"text": "\xff"}'])}[kind])
    options = ('--held_out=0.1', '--workers=1', '--shard_tokens=200K')
    says = refused(folder, out, *options)
    assert f'/in/{name}: ' in says and DAMAGES[name][kind] in says and '--skip_bad' in says
    skipped = prepare(folder, out, *options, '--skip_bad')
    meta = json.loads((out / 'meta.json').read_text())
    assert list(meta['skipped']) == [name]
    path.unlink()
    assert skipped == prepare(folder, tmp_path / 'without', *options)


def test_bad_options_and_inputs_are_refused(tmp_path: Path) -> None:
    some = write(tmp_path / 'a.jsonl', ['text'])
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'empty.jsonl').write_text('{"text": null}\n')
    for where, option, says in (
        (tmp_path / 'nothing', '--seed=0', 'no such file or folder'),
        (tmp_path / 'empty', '--seed=0', 'holds no .parquet, .jsonl'),
        (tmp_path / 'empty.jsonl', '--seed=0', 'too little text for train and val and test'),
        (some, '--tokens=0', 'expected 1 to'),
        (some, '--tokenizer=bert', 'none of llama, gpt2, byte'),
        (some, f'--tokenizer={some}', f'whose SHA-256 is {LLAMA_SHA256}'),
        (some, '--held_out=0.7', 'expected 0 to 0.49'),
    ):
        assert says in refused(where, tmp_path / 'out', option)
        assert not (tmp_path / 'out').exists()


def test_memory_is_flat(tmp_path: Path) -> None:
    script = ('import sys, prepare_slimpajama as prep\n'
              'for n in "3", "30":\n'
              '    prep.main([option.replace("N", n) for option in sys.argv[1:]])\n'
              '    status = open("/proc/self/status").read()\n'
              '    print("peak", status.partition("VmHWM:")[2].split()[0])\n')
    text = ' '.join(documents(10, seed=40, characters=2000))
    for name in ('parquet', 'txt'):
        for n in (3, 30):
            texts = [f'{i} {text}' for i in range(n * 1_000_000 // len(text))]
            path = tmp_path / f'{n}.{name}'
            path.write_text(' '.join(texts)) if name == 'txt' else write(path, texts)
        options = command(tmp_path / f'N.{name}', tmp_path / f'N{name}', '--workers=1')
        done = subprocess.run([sys.executable, '-c', script, *options], capture_output=True,
                              text=True, cwd=ROOT)
        peaks = [int(n) // 1024 for n in re.findall(r'peak (\d+)', done.stdout)]
        assert peaks[1] < peaks[0] + 50, (name, peaks)  # MB

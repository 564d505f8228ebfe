"""prepare_slimpajama.py: bytes, splits, interruptions, a user's text, damage. Nothing is
downloaded; tests that need Llama's tokenizer.model are skipped without it."""
import gzip
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import ROOT, Run, assert_one_line, without_room
from test_tokenizers import NASTY, PAGES, documents

import prepare_slimpajama as prep
from configurator import UserError
from nanocem.data import TokenDataset
from nanocem.tokenizers import load_tokenizer

FILES = {'train': 'train_00000.bin', 'val': 'val.bin', 'test': 'test.bin'}


@pytest.fixture(autouse=True)
def hundred_documents_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep, 'MANY', 100)


def write(path: Path, texts: list[str]) -> Path:
    """Write `texts` in the format of the suffix of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ''.join(json.dumps({'text': text, 'meta': {'n': 1}}) + '\n' for text in texts).encode()
    if path.suffix == '.parquet':
        pq.write_table(pa.table({'meta': ['x'] * len(texts), 'text': texts}), path,
                       row_group_size=100, compression='none')
    elif path.suffix == '.zst':
        path.write_bytes(pa.Codec('zstd').compress(lines, asbytes=True))
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == '.gz' else lines)
    return path


def command(where: Path | str, out: Path, *options: str) -> list[str]:
    byte = [] if any('--tokenizer' in option for option in options) else ['--tokenizer=byte']
    return [f'--input={where}', f'--out_dir={out}', *byte, *options]


def refused(where: Path | str, out: Path, *options: str) -> str:
    """Return the one line that ends the command, which leaves nothing behind."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(SystemExit) as stop:
        prep.main(command(where, out, *options))
    assert sorted(out.parent.iterdir()) == before and '\n' not in stop.value.code
    return stop.value.code


def prepare(where: Path | str, out: Path, *options: str) -> dict[str, Any]:
    """Run the command. Return the bytes of the shards, the `splits` of meta.json, and what was
    printed."""
    with redirect_stdout(io.StringIO()) as printed:
        prep.main(command(where, out, *options))
    assert not list(out.parent.glob('.*'))
    shards = {path.name: path.read_bytes() for path in out.glob('*.bin')}
    meta = json.loads((out / 'meta.json').read_text())
    return {**shards, 'splits': meta['splits'], 'printed': printed.getvalue()}


def shards(made: dict[str, Any]) -> dict[str, bytes]:
    return {name: data for name, data in made.items() if name.endswith('.bin')}


def expected(texts: list[str], held_out: float) -> dict[str, bytes]:
    """Return the shards of the byte tokenizer, by a plain loop."""
    ids = {split: [] for split in prep.SPLITS}
    for text in texts:
        x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2**64
        split = 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'
        ids[split] += [256, *text.encode()] if text else []
    return {FILES[split]: np.array(i, '<u2').tobytes() for split, i in ids.items() if i}


def train_of(texts: list[str]) -> bytes:
    return expected(texts, 0)['train_00000.bin']


def book(words: int, seed: int = 0) -> str:
    choice = ['of ', 'energy ', 'the\n', 'naïve ', 'minimum. ', '世界 ']
    return ''.join(random.Random(seed).choices(choice, k=words))


# Bytes

@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.parquet'])
def test_every_format_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    texts = [*documents(300, seed=2), '', *[text for text in NASTY if text], 'z' * 5000]
    made = prepare(write(tmp_path / name, texts), tmp_path / 'out', '--held_out=0.1', '--workers=1')
    assert shards(made) == expected(texts, 0.1)
    for split, file in FILES.items():
        n = len(made[file]) // 2
        assert made['splits'][split] == {'tokens': n, 'shards': [{'file': file, 'tokens': n}]}
        assert len(TokenDataset(str(tmp_path / 'out'), split, 64).shards[0]) == n


def test_workers_shards_and_long_documents_do_not_change_the_tokens(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep, 'SHARD_TOKENS', 500_000)
    texts = [*documents(1000, seed=3), 'one long document ' * 150_000, *documents(10, seed=4)]
    where = write(tmp_path / 'a.parquet', texts)
    right = expected(texts, 0.1)
    one, two = (shards(prepare(where, tmp_path / n, '--held_out=0.1', f'--workers={n}'))
                for n in '12')
    train = [value for name, value in sorted(one.items()) if name.startswith('train')]
    assert one == two and len(train) > 2 and b''.join(train) == right['train_00000.bin']
    assert all(len(shard) == 1_000_000 for shard in train[:-1])
    limited = prepare(where, tmp_path / 'limited', '--tokens=200K', '--held_out=0.1')
    assert 'Train is full at 200,000 tokens' in limited['printed']
    assert limited['train_00000.bin'] == right['train_00000.bin'][:400_000]
    assert right['val.bin'].startswith(limited['val.bin']) and limited['val.bin'] != one['val.bin']


def test_a_folder_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'a.jsonl', PAGES), tmp_path / 'out'
    prepare(where, out, '--tokenizer=bpe600', '--held_out=0')
    meta, model = json.loads((out / 'meta.json').read_text()), out / 'tokenizer.model'
    with pytest.raises(UserError, match=r'another sentencepiece tokenizer, .*fff'):
        load_tokenizer(str(out), {**meta, 'tokenizer_sha256': 'f' * 64})
    again = prepare(where, tmp_path / 'again', f'--tokenizer={model}', '--held_out=0')
    assert again['train_00000.bin'] == (out / 'train_00000.bin').read_bytes()
    model.write_text('damaged')
    with pytest.raises(UserError, match='is not a SentencePiece model'):
        load_tokenizer(str(out))
    model.unlink()
    with pytest.raises(UserError, match='no tokenizer sentencepiece'):
        load_tokenizer(str(out))


@pytest.mark.parametrize('train, val', [('train/chunk1/a', 'validation/chunk1/b'),
                                        ('Tiny-train', 'Tiny-valid'), ('a.train', 'a.val'),
                                        ('a_TRAIN', 'dev/a_valid')])
def test_files_that_are_named_after_splits(tmp_path: Path, train: str, val: str) -> None:
    texts = documents(400, seed=6)
    write(tmp_path / f'in/{train}.jsonl.zst', texts[:300])
    write(tmp_path / f'in/{val}.jsonl.zst', texts[300:])
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2', '--tokens=10M')
    assert f'train: {train}.jsonl.zst\nval: {val}.jsonl.zst\n' in made['printed']
    right = expected(texts[:300], 0.2)
    kept = [text for text in texts[:300] if train_of([text]) not in right['test.bin']]
    assert shards(made) == {'train_00000.bin': train_of(kept), 'val.bin': train_of(texts[300:]),
                            'test.bin': right['test.bin']}


def test_text_files_that_are_named_after_splits_and_a_limit(tmp_path: Path) -> None:
    """The end of the train file is the test split, which no file is named after."""
    train, val = book(5000, seed=5), book(5000, seed=10)
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/ptb.train.txt').write_text(train)
    (tmp_path / 'in/ptb.valid.txt').write_text(val)
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.1', '--tokens=1M')
    assert made['train_00000.bin'] + made['test.bin'] == train_of([train])
    assert made['val.bin'] == train_of([val])
    short = prepare(tmp_path / 'in', tmp_path / 'short', '--held_out=0.1', '--tokens=10K')
    assert [short['splits'][split]['tokens'] for split in prep.SPLITS] == [10_000, 1000, 1000]
    alone = prepare(tmp_path / 'in', tmp_path / 'alone', '--held_out=0')
    assert shards(alone) == {'train_00000.bin': train_of([train])}


@pytest.mark.parametrize('text', [book(20_000), '你好世界' * 300_000], ids=['words', 'no spaces'])
def test_text_files_are_split_by_position(tmp_path: Path, text: str) -> None:
    def texts_of(made: dict[str, Any]) -> list[str]:
        ids = [np.frombuffer(made[file], '<u2') for file in FILES.values()]
        assert ids[0][0] == 256 and sum((part == 256).sum() for part in ids) == 1
        return [bytes(part[part < 256].tolist()).decode(errors='ignore') for part in ids]

    (tmp_path / 'book.txt').write_text(text)
    texts = texts_of(prepare(tmp_path / 'book.txt', tmp_path / 'out', '--held_out=0.1'))
    assert ''.join(texts) == text
    assert all(0.09 < len(part) / len(text) < 0.11 for part in texts[1:])
    assert ' ' not in text or all(part[0] in ' \n' for part in texts[1:])
    made = prepare(tmp_path / 'book.txt', tmp_path / 'short', '--tokens=20K', '--held_out=0.05')
    assert [made['splits'][split]['tokens'] for split in prep.SPLITS] == [20_000, 1000, 1000]
    texts = texts_of(made)
    assert text.startswith(texts[0]) and texts[1] in text


def test_the_folder_is_named_after_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ('books', './books/', f'{tmp_path}/books.jsonl.zst'):
        assert prep.PrepareConfig(input=name).out_dir == 'data/books'
    assert prep.PrepareConfig(input='/').out_dir == 'data/text'
    for name in ('builtin/', 'hf://datasets/someone/builtin'):  # not the built-in one
        assert prep.PrepareConfig(input=name).out_dir == 'data/builtin-text'


# A trained tokenizer

@pytest.mark.parametrize('name', ['a.jsonl', 'a.txt'])
def test_a_tokenizer_is_trained_on_the_train_split_alone(tmp_path: Path, name: str) -> None:
    """A word of the held-out text becomes a piece only if all text is in train."""
    def held_out(text: str) -> bool:
        return prep.split_by_hash(text, 0.1) != 'train'

    def pieces(folder: Path) -> str:
        model = load_tokenizer(str(folder)).model
        return ' '.join(model.id_to_piece(i) for i in range(model.vocab_size()))

    lines = [f'{line} {n}' for n, line in enumerate('\n'.join(PAGES).split('\n') * 3)]
    marked = [line + ' zyzzyva' for line in lines]
    if name == 'a.jsonl':
        texts = [new if held_out(new) else line for line, new in zip(lines, marked, strict=True)]
        write(tmp_path / name, texts)
    else:
        end = len(lines) * 7 // 8
        texts = ['\n'.join(lines[:end] + marked[end:])]
        (tmp_path / name).write_text(texts[0])
    options = ('--tokenizer=bpe1000', '--workers=1')
    prepare(tmp_path / name, tmp_path / 'out', *options, '--held_out=0.1')
    prepare(tmp_path / name, tmp_path / 'all', *options, '--held_out=0')
    assert 'zyzz' in pieces(tmp_path / 'all') and 'zyzz' not in pieces(tmp_path / 'out')
    tokenizer = load_tokenizer(str(tmp_path / 'all'))
    ids = np.fromfile(tmp_path / 'all/train_00000.bin', '<u2').tolist()
    assert tokenizer.decode(ids) == ''.join(texts)
    assert ids.count(tokenizer.bos) == len(texts)


def test_a_large_text_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f'{n:04d}' + 'x' * 996 for n in range(1000)]
    o = prep.PrepareConfig(input=str(write(tmp_path / 'a.jsonl', texts)), tokenizer='byte')
    monkeypatch.setattr(prep, 'BPE_TEXT', 100_000)
    numbers = [int(text[:4]) for text in prep.sample_train(o, prep.find_source(o.input))]
    assert 95 <= len(numbers) <= 100 and set(np.diff(numbers)) <= {10, 11}  # 1% are held out


# Interruptions

def test_a_killed_preparation_begins_again(tmp_path: Path) -> None:
    """The next preparation is not changed by what a killed one left."""
    where = write(tmp_path / 'a.jsonl', documents(300, seed=7))
    (tmp_path / '.out.partial').mkdir()
    (tmp_path / '.out.partial/train_00000.bin').write_bytes(b'half of a shard')
    assert prepare(where, tmp_path / 'out') == prepare(where, tmp_path / 'undisturbed')


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    where = write(tmp_path / 'in/a.jsonl', documents(300, seed=7))
    run = Run(tmp_path, *command(where, where.parent / 'out'), script='prepare_slimpajama',
              damage=partial(without_room, 10_000)).wait()
    assert_one_line(run, f'{where.parent}/out: File too large')
    assert os.listdir(where.parent) == ['a.jsonl']


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path / 'in/a.jsonl', documents(600, seed=8))
    where, out = path.parent, tmp_path / 'out'
    out.mkdir()
    prepare(where, out)
    other = refused(where, out, '--held_out=0.2', '--tokens=3K')
    assert 'tokens=3300000000, not 3000; held_out=0.005, not 0.2: choose another --out_dir' in other
    path.unlink()  # the tokens suffice, even if nothing can be written
    os.chmod(out, 0o555)
    os.chmod(tmp_path, 0o555)
    try:
        assert 'is prepared already' in prepare(where, out)['printed']
    finally:
        os.chmod(tmp_path, 0o755)
        os.chmod(out, 0o755)
    for content, message in (('{"config": []}', 'holds other files: choose another --out_dir'),
                             ('{', 'meta.json is damaged: choose another --out_dir')):
        (out / 'meta.json').write_text(content)
        assert message in refused(where, out)
    (out / 'meta.json').unlink()
    assert 'holds other files: choose another --out_dir' in refused(where, out)


def test_two_at_once(tmp_path: Path) -> None:
    """The second process waits for the first, and uses its folder."""
    script = ('import sys, prepare_slimpajama as prep\nwrite = prep.write_folder\n'
              'def slow(*args):\n'
              '    print("writing", flush=True); sys.stdin.readline(); return write(*args)\n'
              'prep.write_folder = slow\nprep.find_data("./data/builtin")\n')
    processes, printed = [], []
    for _ in range(2):
        processes.append(subprocess.Popen(
            [sys.executable, '-c', script], env=dict(os.environ, PYTHONPATH=str(ROOT)), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path))
        printed += [processes[-1].stdout.readline() for _ in range(2)]
    assert printed[1] == 'writing\n' and 'waiting for it' in printed[3]
    assert 'train' in processes[0].communicate('\n', timeout=60)[0]
    last = processes[1].communicate('\n', timeout=60)[0]
    assert 'data/builtin is prepared already' in last and 'writing' not in last
    assert os.listdir(tmp_path / 'data') == ['builtin']


# A user's text

def test_a_users_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'My book.v2.md'  # one file is text, whatever its suffix
    path.write_text(book(20_000))

    def made_of(text: Path | str) -> str:
        return prep.find_data('data/slimpajama', str(text))

    made = made_of('My book.v2.md')
    assert re.fullmatch(r'data/My book-[0-9a-f]{8}', made)
    assert 'one token a byte' in capsys.readouterr().out
    assert all(len(TokenDataset(made, split, 128)) > 10 for split in prep.SPLITS)
    written = os.path.getmtime(f'{made}/meta.json')
    os.utime(path, ns=(0, 0))  # the content is the same
    assert made_of(path) == made and os.path.getmtime(f'{made}/meta.json') == written
    assert capsys.readouterr().out == ''
    path.write_bytes(path.read_bytes().replace(b'energy', b'Energy', 1))
    assert made_of(path) != made
    # The folder is the user's, although it has the name of the built-in text
    (tmp_path / 'builtin').mkdir()
    texts = [book(1000, seed=n) for n in range(30)]
    for n, text in enumerate(texts):
        (tmp_path / f'builtin/{n:02d}.txt').write_text(text)
    parts = [Path(made_of('builtin'), file).read_bytes() for file in FILES.values()]
    assert b''.join(parts) == train_of(texts) and len(parts[1]) > 0.04 * len(parts[0])


def test_the_tokenizer_of_a_users_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the text or the run whose weights training starts from chooses it, and nothing
    is downloaded."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text('\n'.join(PAGES))
    monkeypatch.setattr(prep, 'TEXT_TOKENIZERS', {1e4: 'byte', 1e9: 'bpe800'})
    trained = prep.find_data('data', 'a.txt')
    assert load_tokenizer(trained).vocab_size == 800
    Path('b.txt').write_text('\n'.join(PAGES[::-1]))
    for folder in (trained, prep.find_data('data', 'b.txt', 'byte')):
        meta = json.loads(Path(folder, 'meta.json').read_text())
        state = {'data_dir': folder, 'data': {name: meta[name] for name in (
            'tokenizer', 'tokenizer_sha256', 'vocab_size')}}
        made = prep.find_data('data', 'b.txt', None, state)
        assert load_tokenizer(made).sha256 == load_tokenizer(folder).sha256


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
        options = command(tmp_path / f'N.{name}', tmp_path / f'N{name}', '--held_out=0')
        done = subprocess.run([sys.executable, '-c', script, *options], capture_output=True,
                              text=True, cwd=ROOT)
        peaks = [int(n) // 1024 for n in re.findall(r'peak (\d+)', done.stdout)]
        assert peaks[1] < peaks[0] + 50, (name, peaks)  # MB

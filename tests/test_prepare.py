"""prepare_slimpajama.py: bytes, splits, interruptions, a user's text. Nothing is downloaded."""
import gzip
import hashlib
import io
import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import ROOT
from test_tokenizers import NASTY, PAGES, documents

import prepare_slimpajama as prep
from configurator import UserError
from nanocem.data import TokenDataset
from nanocem.tokenizers import load_tokenizer, spelled_bytes

FILES = {'train': 'train_00000.bin', 'val': 'val.bin', 'test': 'test.bin'}


def write(path: Path, texts: list[str], field: str = 'text') -> Path:
    """Write `texts` in the format of the suffix of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ''.join(json.dumps({field: text, 'n': 1}) + '\n' for text in texts).encode()
    if path.suffix == '.parquet':
        pq.write_table(pa.table({'n': [1] * len(texts), field: texts}), path, row_group_size=100)
    elif path.suffix == '.zst':
        path.write_bytes(pa.Codec('zstd').compress(lines, asbytes=True))
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == '.gz' else lines)
    return path


def command(where: Path | str, out: Path, *options: str) -> list[str]:
    byte = [] if any('--tokenizer' in option for option in options) else ['--tokenizer=byte']
    return [f'--input={where}', f'--out_dir={out}', *byte, *options]


def refused(where: Path | str, out: Path, *options: str) -> str:
    """Return the one line that ends the command, which leaves no folder behind."""
    before = {path for path in out.parent.iterdir() if path.is_dir()}
    with pytest.raises(SystemExit) as stop:
        prep.main(command(where, out, *options))
    assert {path for path in out.parent.iterdir() if path.is_dir()} == before
    assert '\n' not in stop.value.code
    return stop.value.code


def prepare(where: Path | str, out: Path, *options: str) -> dict[str, Any]:
    """Run the command. Return the bytes of the shards, meta.json, and what was printed."""
    with redirect_stdout(io.StringIO()) as printed:
        prep.main(command(where, out, *options))
    assert not list(out.parent.glob('.*.partial'))
    made = {path.name: path.read_bytes() for path in out.glob('*.bin')}
    meta = json.loads((out / 'meta.json').read_text())
    return {**made, **meta, 'printed': printed.getvalue()}


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


def texts_of(made: dict[str, Any]) -> list[str]:
    """Return the text of train, val and test, each of which has one BOS."""
    texts = []
    for file in FILES.values():
        ids = np.frombuffer(made[file], '<u2')
        assert ids[0] == 256 and (ids == 256).sum() == 1
        texts.append(bytes(ids[1:].tolist()).decode())
    return texts


def book(words: int, seed: int = 0) -> str:
    choice = ['of ', 'energy ', 'the\n', 'naïve ', 'minimum. ', '世界 ']
    return ''.join(random.Random(seed).choices(choice, k=words))


# Bytes

@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.parquet'])
def test_every_format_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    texts = [*documents(300, seed=2), '', *[text for text in NASTY if text], 'z' * 5000]
    made = prepare(write(tmp_path / name, texts), tmp_path / 'out', '--held_out=0.1')
    assert shards(made) == expected(texts, 0.1)
    for split, file in FILES.items():
        n = len(made[file]) // 2
        assert made['splits'][split] == {'tokens': n, 'shards': [{'file': file, 'tokens': n}]}


def test_shards_and_the_limit_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep, 'SHARD_TOKENS', 500_000)
    texts = [*documents(1000, seed=3), 'one long document ' * 150_000, *documents(10, seed=4)]
    where = write(tmp_path / 'a.parquet', texts)
    right = expected(texts, 0.1)
    whole = shards(prepare(where, tmp_path / 'whole', '--held_out=0.1'))
    train = [value for name, value in sorted(whole.items()) if name.startswith('train')]
    assert len(train) > 2 and b''.join(train) == right['train_00000.bin']
    assert all(len(shard) == 1_000_000 for shard in train[:-1])
    limited = prepare(where, tmp_path / 'limited', '--tokens=200K', '--held_out=0.1')
    assert 'Train is full at 200,000 tokens' in limited['printed']
    assert limited['train_00000.bin'] == right['train_00000.bin'][:400_000]
    assert right['val.bin'].startswith(limited['val.bin'])


def test_a_folder_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'a.jsonl', PAGES), tmp_path / 'out'
    prepare(where, out, '--tokenizer=bpe600', '--held_out=0')
    meta, model = json.loads((out / 'meta.json').read_text()), out / 'tokenizer.model'
    with pytest.raises(UserError, match=r'another sentencepiece tokenizer, .*fff'):
        load_tokenizer(str(out), {**meta, 'tokenizer_sha256': 'f' * 64})
    again = prepare(where, tmp_path / 'again', f'--tokenizer={model}', '--held_out=0')
    assert again['train_00000.bin'] == (out / 'train_00000.bin').read_bytes()
    model.unlink()
    with pytest.raises(UserError, match='no such file; copy it'):
        load_tokenizer(str(out))


def test_files_that_are_named_after_splits(tmp_path: Path) -> None:
    texts = documents(400, seed=6)
    write(tmp_path / 'in/train/a.jsonl.zst', texts[:300])
    write(tmp_path / 'in/dev/b_valid.jsonl', texts[300:])
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2')
    right = expected(texts[:300], 0.2)
    kept = [text for text in texts[:300] if train_of([text]) not in right['test.bin']]
    assert shards(made) == {'train_00000.bin': train_of(kept), 'val.bin': train_of(texts[300:]),
                            'test.bin': right['test.bin']}


def test_text_files_that_are_named_after_splits(tmp_path: Path) -> None:
    """The second file is the val split; the end of the train file is the test split."""
    train, val = book(5000, seed=5), book(5000, seed=10)
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/TinyStories-train.txt').write_text(train)
    (tmp_path / 'in/TinyStories-valid.txt').write_text(val)
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.1', '--tokens=1M')
    assert 'val: 1 of 2 files, first TinyStories-valid.txt' in made['printed']
    parts = texts_of(made)
    assert parts[0] + parts[2] == train and parts[1] == val and len(parts[2]) > 0.09 * len(train)


@pytest.mark.parametrize('text', [book(50_000), '你好世界' * 90_000], ids=['words', 'no spaces'])
def test_the_end_of_a_text_file_is_held_out(tmp_path: Path, text: str) -> None:
    (tmp_path / 'book.txt').write_text(text)
    made = prepare(tmp_path / 'book.txt', tmp_path / 'out', '--held_out=0.1')
    parts = texts_of(made)
    assert ''.join(parts) == text
    assert all(0.09 < len(part) / len(text) < 0.11 for part in parts[1:])
    assert ' ' not in text or all(part[0] in ' \n' for part in parts[1:])
    short = prepare(tmp_path / 'book.txt', tmp_path / 'short', '--tokens=20K', '--held_out=0.1')
    assert short['train_00000.bin'] == made['train_00000.bin'][:40_000]
    assert short['val.bin'] == made['val.bin']
    none = prepare(tmp_path / 'book.txt', tmp_path / 'none', '--held_out=0')
    assert shards(none) == {'train_00000.bin': train_of([text])}


# A trained tokenizer

def test_a_tokenizer_is_trained_on_an_even_sample_of_the_train_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prep, 'BPE_TEXT', 100_000)
    texts = [f'{n:04d}' + 'x' * 996 for n in range(1000)]
    o = prep.PrepareConfig(input=str(write(tmp_path / 'a.jsonl', texts)), tokenizer='byte')
    sample = prep.sample_train(o, prep.find_source(o.input))
    assert {prep.split_by_hash(text, 0.005) for text in sample} == {'train'}
    numbers = [int(text[:4]) for text in sample]
    assert 95 <= len(numbers) <= 100 and set(np.diff(numbers)) <= {10, 11}  # 1% are held out


def test_a_tokenizer_that_loses_text(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceTrainer
    SentencePieceTrainer.train(sentence_iterator=iter('\n'.join(PAGES).split('\n')), vocab_size=400,
                               model_prefix=str(tmp_path / 'uni'), minloglevel=2)
    options = (f'--tokenizer={tmp_path / "uni.model"}', '--held_out=0')
    lossy = prepare(write(tmp_path / 'a.jsonl', PAGES), tmp_path / 'lossy', *options)
    assert lossy['lossless'] is False and 'loses some of this text' in lossy['printed']
    assert spelled_bytes(load_tokenizer(str(tmp_path / 'lossy')), lossy) is None
    kept = prepare(write(tmp_path / 'b.jsonl', ['the data']), tmp_path / 'kept', *options)
    assert 'lossless' not in kept


# Interruptions

def test_a_killed_preparation_begins_again(tmp_path: Path) -> None:
    """The next preparation is not changed by what a killed one left."""
    where = write(tmp_path / 'a.jsonl', documents(300, seed=7))
    (tmp_path / '.out.partial').mkdir()
    (tmp_path / '.out.partial/train_00000.bin').write_bytes(b'half of a shard')
    assert prepare(where, tmp_path / 'out') == prepare(where, tmp_path / 'undisturbed')


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path / 'in/a.jsonl', documents(600, seed=8))
    where, out = path.parent, tmp_path / 'out'
    out.mkdir()
    prepare(where, out)
    assert 'data made with other options: choose' in refused(where, out, '--held_out=0.2')
    path.unlink()  # the tokens suffice
    assert 'is prepared already' in prepare(where, out)['printed']
    (out / 'meta.json').unlink()
    assert 'holds other files' in refused(where, out)


def test_two_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The second waits for the first, and uses its folder."""
    where = str(write(tmp_path / 'a.jsonl', documents(300, seed=9)))
    o = prep.PrepareConfig(where, str(tmp_path / 'out'), tokenizer='byte', held_out=0.1)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(prep.prepare, [o, o]))
    assert capsys.readouterr().out.count('is prepared already') == 1


# A user's text

def test_a_users_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'My book.v2.md'  # one file is text, whatever its suffix
    path.write_text(book(20_000))
    made = prep.find_data('data/slimpajama', 'My book.v2.md')
    assert re.fullmatch(r'data/My book-[0-9a-f]{8}', made)
    assert 'tokenizer byte' in capsys.readouterr().out
    assert all(len(TokenDataset(made, split, 128)) > 10 for split in prep.SPLITS)
    assert prep.find_data('', str(path)) == made and capsys.readouterr().out == ''
    path.write_bytes(path.read_bytes().replace(b'energy', b'Energy', 1))
    assert prep.find_data('', str(path)) != made


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


def test_a_default_tokenizer_that_does_not_suit_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    letters = [chr(0x4e00 + n) for n in range(700)]
    Path('zh.txt').write_text(''.join(random.Random(0).choices(letters, k=20_000)))
    monkeypatch.setattr(prep, 'TEXT_TOKENIZERS', {1: 'byte', 1e7: 'bpe600'})
    made = prep.find_data('data', 'zh.txt')
    assert load_tokenizer(made).name == 'byte'
    assert 'The default tokenizer=bpe600 does not suit this text' in capsys.readouterr().out
    assert prep.find_data('data', 'zh.txt') == made and capsys.readouterr().out == ''
    with pytest.raises(UserError, match=r'tokenizer=bpe600 does not suit .* --tokenizer=byte'):
        prep.find_data('data', 'zh.txt', 'bpe600')


def test_memory_is_flat(tmp_path: Path) -> None:
    """Both texts, of 12 and 36 MB, fill more than one batch of blocks."""
    script = ('import sys, prepare_slimpajama as prep\n'
              'for n in "12", "36":\n'
              '    prep.main([option.replace("N", n) for option in sys.argv[1:]])\n'
              '    status = open("/proc/self/status").read()\n'
              '    print("peak", status.partition("VmHWM:")[2].split()[0])\n')
    text = ' '.join(documents(10, seed=40, characters=2000))
    for name in ('parquet', 'txt'):
        for n in (12, 36):
            texts = [f'{i} {text}' for i in range(n * 1_000_000 // len(text))]
            path = tmp_path / f'{n}.{name}'
            path.write_text(' '.join(texts)) if name == 'txt' else write(path, texts)
        options = command(tmp_path / f'N.{name}', tmp_path / f'N{name}', '--held_out=0')
        done = subprocess.run([sys.executable, '-c', script, *options], capture_output=True,
                              text=True, cwd=ROOT)
        peaks = [int(n) // 1024 for n in re.findall(r'peak (\d+)', done.stdout)]
        assert peaks[1] < peaks[0] + 50, (name, peaks)  # MB

"""prepare_slimpajama.py: bytes, splits, sources, a user's text. Nothing is downloaded."""
import bz2
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tokenizers import LLAMA, NASTY, PAGES, documents, needs_llama

import prepare_slimpajama
from configurator import UserError
from nanocem import documents as docs
from nanocem import prepare as prep
from nanocem import sources
from nanocem.data import TokenDataset, read_meta
from nanocem.documents import Reading
from nanocem.tokenizers import load_tokenizer, spelled_bytes
from running import RESUME, ROOT, TINY, override, run_script, steps, write_data

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


def prepare(where: Path | str, out: Path, *options: str) -> dict[str, Any]:
    """Run the command, by default with the byte tokenizer. Return meta.json, with the bytes of the
    shards and what was printed."""
    with redirect_stdout(io.StringIO()) as printed:
        prepare_slimpajama.main(override(
            [f'--input={where}', f'--out_dir={out}', '--tokenizer=byte'], *options))
    meta = json.loads((out / 'meta.json').read_text())
    return {**meta, 'shards': {path.name: path.read_bytes() for path in out.glob('*.bin')},
            'printed': printed.getvalue()}


def refused(where: Path | str, out: Path, *options: str) -> str:
    """Return the one line that ends the command, which leaves no folder behind."""
    before = {path for path in out.parent.iterdir() if path.is_dir()}
    with pytest.raises(SystemExit) as stop:
        prepare(where, out, *options)
    assert {path for path in out.parent.iterdir() if path.is_dir()} == before
    assert '\n' not in stop.value.code
    return stop.value.code


def expected(texts: list[str], held_out: float) -> dict[str, bytes]:
    """Return the shards of the byte tokenizer, by a plain loop. Copies go where the first went."""
    ids = {split: [] for split in prep.SPLITS}
    found: dict[str, str] = {}
    for text in texts:
        x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2**64
        split = 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'
        split = found.setdefault(says(text), split)
        ids[split] += [256, *text.encode()] if text else []
    return {FILES[split]: np.array(i, '<u2').tobytes() for split, i in ids.items() if i}


def says(text: str) -> str:
    """Return what copies of a text have in common."""
    return re.sub('\r\n?', '\n', text).strip() or text


def texts_in(path: str, **reading: Any) -> list[str]:
    """Return the documents that evaluate.py --text reads."""
    return [''.join(blocks) for blocks in sources.text_documents(path, Reading(**reading))]


def train_of(texts: list[str]) -> bytes:
    return expected(texts, 0)['train_00000.bin']


def parts_of(made: dict[str, Any]) -> list[list[str]]:
    """Return the texts of train, val and test, each of which follows a BOS."""
    found = []
    for file in FILES.values():
        ids = np.frombuffer(made['shards'].get(file, b''), '<u2')
        texts = np.split(ids, np.flatnonzero(ids == 256))[1:]
        found.append([bytes(text[1:].tolist()).decode() for text in texts])
    return found


def joined(train: list[str], val: list[str], test: list[str]) -> str:
    """Return a text that was cut: train, val, test, train, ... and at the end train."""
    between = [''.join(part) for part in zip(train, val, test, strict=False)]
    return ''.join([*between, train[-1]])


def book(words: int, seed: int = 0) -> str:
    choice = ['of ', 'energy ', 'the\n', 'naïve ', 'minimum. ', '世界 ']
    return ''.join(random.Random(seed).choices(choice, k=words))


# Bytes and splits

@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.parquet'])
def test_every_format_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    texts = [*documents(300, seed=2), *NASTY, 'z' * 5000]
    where = write(tmp_path / name, texts, 'content')
    made = prepare(where, tmp_path / 'out', '--held_out=0.1', '--column=content')
    assert made['shards'] == expected(texts, 0.1)
    for split, file in FILES.items():
        n = len(made['shards'][file]) // 2
        (shard,) = made['splits'][split]['shards']
        assert (shard['file'], shard['tokens'], made['splits'][split]['tokens']) == (file, n, n)
        begins = np.frombuffer(made['shards'][file], '<u2') == 256
        assert made['splits'][split]['documents'] == begins.sum()
    assert re.search(r'"text".*--column', refused(where, tmp_path / 'other'))


def test_shards_and_the_limit_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep, 'SHARD_TOKENS', 500_000)
    texts = [*documents(1000, seed=3), 'one long document ' * 150_000, *documents(10, seed=4)]
    where = write(tmp_path / 'a.parquet', texts)
    right = expected(texts, 0.1)
    whole = prepare(where, tmp_path / 'whole', '--held_out=0.1')['shards']
    train = [value for name, value in sorted(whole.items()) if name.startswith('train')]
    assert len(train) > 2 and b''.join(train) == right['train_00000.bin']
    assert all(len(shard) == 1_000_000 for shard in train[:-1])
    limited = prepare(where, tmp_path / 'limited', '--tokens=200K', '--held_out=0.1')
    assert 'Train is full at 200,000 tokens' in limited['printed']
    assert limited['shards']['train_00000.bin'] == right['train_00000.bin'][:400_000]
    assert right['val.bin'].startswith(limited['shards']['val.bin'])


@pytest.mark.parametrize(('n', 'held_out'), [(3, 0.05), (10, 0.05), (60, 0.05), (100, 0.005)])
@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
def test_the_last_of_few_rows_are_held_out(
    tmp_path: Path, name: str, n: int, held_out: float
) -> None:
    """Where their hash leaves val or test less than half its share. Texts with seed 7."""
    rng, changed = random.Random(7), 0
    for attempt in range(14):
        texts = [str(rng.random()) * 9 for _ in range(n)]
        where = write(tmp_path / f'{attempt}/{name}', texts)
        made = prepare(where, tmp_path / f'out/{attempt}', f'--held_out={held_out}')
        assert 'val has few tokens: a perplexity of so few says little' in made['printed']
        right = expected(texts, held_out)
        rows = [np.frombuffer(right.get(file, b''), '<u2') for file in FILES.values()][1:]
        if min((ids == 256).sum() for ids in rows) < held_out * n / 2:
            held = max(1, round(held_out * n))
            parts = texts[:-2 * held], texts[-2 * held:-held], texts[-held:]
            right = {file: train_of(part)
                     for file, part in zip(FILES.values(), parts, strict=True)}
            changed += 1
        assert made['shards'] == right
    assert changed > 0


def test_rows_beside_a_file_that_is_named_after_a_split(tmp_path: Path) -> None:
    """Three rows are train's and test's."""
    texts = ['one ' * 9, 'two ' * 9, 'three ' * 9]
    write(tmp_path / 'in/train.jsonl', texts)
    write(tmp_path / 'in/val.jsonl', ['four'])
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.01')
    assert made['shards'] == {'train_00000.bin': train_of(texts[:2]), 'val.bin': train_of(['four']),
                              'test.bin': train_of(texts[2:])}


def test_files_that_are_named_after_splits(tmp_path: Path) -> None:
    texts = documents(400, seed=6)
    write(tmp_path / 'in/train/a.jsonl.zst', texts[:300])
    write(tmp_path / 'in/dev/b_valid.jsonl', texts[300:])
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2')
    test = expected(texts[:300], 0.2)['test.bin']
    kept = [text for text in texts[:300] if train_of([text]) not in test]
    assert made['shards'] == {'train_00000.bin': train_of(kept), 'val.bin': train_of(texts[300:]),
                              'test.bin': test}


def test_text_files_that_are_named_after_splits(tmp_path: Path) -> None:
    """The second file is the val split; the end of the train file is the test split."""
    train, val = book(5000, seed=5), book(5000, seed=10)
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/TinyStories-train.txt').write_text(train)
    (tmp_path / 'in/TinyStories-valid.txt').write_text(val)
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.1')
    assert 'val: 1 of 2 files, first TinyStories-valid.txt' in made['printed']
    parts = parts_of(made)
    assert parts[1] == [val] and sum(map(len, parts[2])) > 0.09 * len(train)
    assert joined(parts[0], [''] * 9, parts[2]) == train


@pytest.mark.parametrize('n', [20, 300])
def test_many_text_files_are_split_like_rows(tmp_path: Path, n: int) -> None:
    """Each goes to one split whole, the one where the same text in a .jsonl would go."""
    texts = [*documents(n - 1, seed=12), book(40_000)]  # the last is read in several blocks
    for number, text in enumerate(texts):
        (tmp_path / f'many/{number // 9:03d}').mkdir(parents=True, exist_ok=True)
        (tmp_path / f'many/{number // 9:03d}/{number:03d}.txt').write_text(text)
    if n > 20:
        (tmp_path / 'many/empty.txt').touch()
    made = prepare(tmp_path / 'many', tmp_path / 'files', '--held_out=0.1')
    rows = prepare(write(tmp_path / 'a.jsonl', texts), tmp_path / 'rows', '--held_out=0.1')
    assert made['shards'] == rows['shards'] and made['splits'] == rows['splits']
    counts = [made['splits'][split]['documents'] for split in prep.SPLITS]
    assert made['printed'].endswith(rows['printed']) and sum(counts) == n
    assert f'documents: {counts[0]} train, {counts[1]} val, {counts[2]} test' in made['printed']


@pytest.mark.parametrize('size', [6000, 60])
def test_ten_texts_that_are_repeated_2500_times_do_not_leak(tmp_path: Path, size: int) -> None:
    """More rows than decide the rule, and fewer texts than are held out whole."""
    texts = [book(size, seed=n) for n in range(10)]
    made = prepare(write(tmp_path / 'a.jsonl', texts * 250), tmp_path / 'out', '--held_out=0.1')
    train, val, test = (''.join(part) for part in parts_of(made))
    for held_out in val, test:
        pieces = [held_out[i:i + 90] for i in range(0, len(held_out) - 90, 90)] or [held_out]
        assert pieces and not any(piece in train for piece in pieces)


@pytest.mark.parametrize('n', [30, 300])
def test_a_text_that_is_most_of_all_is_no_split_of_its_own(tmp_path: Path, n: int) -> None:
    for number, text in enumerate(documents(n, seed=3)):
        (tmp_path / f'in/{number:03d}.txt').parent.mkdir(exist_ok=True)
        (tmp_path / f'in/{number:03d}.txt').write_text(text)
    for seed in range(4):  # of the hash
        (tmp_path / 'in/server.log').write_text(book(900_000, seed=seed))
        made = prepare(tmp_path / 'in', tmp_path / f'out{seed}', '--held_out=0.1')
        sizes = [sum(map(len, part)) for part in parts_of(made)]
        assert sizes[0] > 900_000 and all(0 < size < 100_000 for size in sizes[1:])


@pytest.mark.parametrize('suffix', ['txt', 'jsonl'])
def test_of_few_documents_each_long_one_is_cut(tmp_path: Path, suffix: str) -> None:
    """Whether they are files or rows. Val and test get their share from several places of each, and
    not its beginning or end. A short one is train's, and of a copy nothing is read."""
    texts = [f'{n} {book(20_000, seed=n)}' for n in range(3)]
    texts = [*texts, 'a short one', texts[1].strip().replace('\n', '\r\n') + '\r\n']
    for n, text in enumerate(texts if suffix == 'txt' else ['']):
        path = write(tmp_path / f'in/{n}.{suffix}', texts)
        if suffix == 'txt':
            path.write_bytes(text.encode())
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.1')
    assert 'Split by position: val and test get parts from several places' in made['printed']
    assert 'copies left out: 1' in made['printed']
    train, val, test = parts_of(made)
    assert train.pop() == 'a short one' and (len(train), len(val), len(test)) == (27, 24, 24)
    for n in range(3):
        mine = train[9 * n:][:9], val[8 * n:][:8], test[8 * n:][:8]
        assert joined(*mine) == texts[n]
        assert len(mine[0][0]) > len(texts[n]) / 25 < len(mine[0][8])
        for part in mine[1:]:
            assert 0.09 < sum(map(len, part)) / len(texts[n]) < 0.11
            assert max(map(len, part)) < 1.5 * min(map(len, part))


@pytest.mark.parametrize('size, share, n', [
    (5_000, 0.05, 1), (10_239, 0.05, 1), (10_240, 0.05, 2), (40_960, 0.05, 8), (10**7, 0.05, 8)])
def test_as_many_places_as_have_parts_worth_reading(size: int, share: float, n: int) -> None:
    """Of 256 characters at least, and at most eight. Each split gets its share to a character."""
    ends = prep.places(size, share, ['val', 'test'])
    assert [split for _, split in ends] == ['train', 'val', 'test'] * n + ['train']
    begins = [0, *(end for end, _ in ends)]
    for split in ('val', 'test'):
        parts = [end - begin for begin, (end, of) in zip(begins, ends, strict=False) if of == split]
        assert sum(parts) == pytest.approx(share * size) and max(parts) < min(parts) + 1
    assert begins[1] > 0.1 * size < size - begins[-2]


def test_a_licence_at_an_end_is_hardly_held_out(tmp_path: Path) -> None:
    """Nor is a table of contents at the beginning. They are a tenth of the text each."""
    texts = ['contents. ' * 1400, book(18_000), 'licence. ' * 1500]
    (tmp_path / 'book.txt').write_text(''.join(texts))
    made = prepare(tmp_path / 'book.txt', tmp_path / 'out', '--held_out=0.05')
    for part in parts_of(made)[1:]:
        text = ''.join(part)
        assert len(text) > 5000 and 'contents' not in text and 'licence' not in text


@pytest.mark.parametrize('n', [3, 10, 19, 60])
def test_short_documents_are_never_cut(tmp_path: Path, n: int) -> None:
    texts = [book(40, seed=seed) for seed in range(n)]
    made = prepare(write(tmp_path / 'a.jsonl', texts), tmp_path / 'out', '--held_out=0.05')
    parts = parts_of(made)
    assert sorted(itertools.chain(*parts)) == sorted(texts) and all(parts)


@pytest.mark.parametrize('n', [1, 2])
def test_fewer_documents_than_splits_are_cut_however_short(tmp_path: Path, n: int) -> None:
    """The longest of them."""
    texts = [book(120, seed=seed) for seed in range(n)]
    made = prepare(write(tmp_path / 'a.jsonl', texts), tmp_path / 'out', '--held_out=0.05')
    assert [split['documents'] for split in made['splits'].values()] == [n + 1, 1, 1]
    assert 'train has few' not in made['printed'] and 'test has few tokens' in made['printed']


@pytest.mark.parametrize('n', [12, 300, 2500])
def test_copies_go_where_the_first_went(tmp_path: Path, n: int) -> None:
    """They differ in line ends and in space around them. Copies of few documents count once. Texts
    with seed 3."""
    rng = random.Random(3)
    texts = [f'{k}\n{book(rng.randrange(3, 60), seed=k)}.' for k in range(n)]
    changes = [str.strip, lambda text: text + '\n', lambda text: f'\n  {text}\t',
               lambda text: text.replace('\n', '\r\n') + '\r\n', lambda text: text + '\r']
    copies = [rng.choice(changes)(rng.choice(texts)) for _ in range(n)]
    everything = [*texts, *copies]
    rng.shuffle(everything)
    where = tmp_path / 'in'
    for k, text in enumerate(everything):
        where.mkdir(exist_ok=True)
        (where / f'{k:04d}.md').write_bytes(text.encode())
    made = prepare(where, tmp_path / 'out', '--held_out=0.1')
    parts = parts_of(made)
    assert sorted(itertools.chain(*parts)) == sorted(everything) and all(parts)
    held = [{says(text) for text in part} for part in parts]
    assert not held[0] & held[1] and not held[0] & held[2] and not held[1] & held[2]
    assert made['shards'] == expected(everything, 0.1) or n == 12


@pytest.mark.parametrize('name, split', [
    ('train.jsonl', 'train'), ('training.jsonl', 'train'), ('trainset.jsonl', 'train'),
    ('c4-train.00000-of-00001.json.gz', 'train'), ('Training Set (1).jsonl', 'train'),
    ('train2.jsonl', 'train'), ('data/train-00000-of-00002.parquet', 'train'),
    ('dev.jsonl', 'val'), ('valset.jsonl', 'val'), ('val01.jsonl', 'val'), ('valid.txt', 'val'),
    ('a_validation_matched.jsonl', 'val'), ('TinyStoriesV2-GPT4-valid.txt', 'val'),
    ('testing.jsonl', 'test'), ('test_set.jsonl', 'test'), ('testdata.ndjson', 'test'),
    ('eval/a.jsonl', 'test'), ('evaluation3.jsonl', 'test'), ('ptb.test.txt', 'test'),
    ('contest.jsonl', None), ('détest.txt', None), ('a.jsonl', None), ('trained.txt', None)])
def test_the_names_of_splits(name: str, split: str | None) -> None:
    """The words of Hugging Face's datasets, also with a number, set or data behind."""
    assert sources.find_split(name, Reading()) == split


@pytest.mark.parametrize('names', [
    ('train', 'validation', 'test'), ('training', 'validation', 'testing'), ('a', 'dev', 'eval'),
    ('trainset', 'valset', 'testset'), ('train-1', 'valid_2', 'test.3'), ('z', 'a/val', 'b/test')])
def test_files_are_read_for_the_split_of_their_name(tmp_path: Path, names: tuple[str]) -> None:
    """Where none is named train, the others are."""
    rows = dict(zip(prep.SPLITS, (documents(300, 1), documents(50, 2), documents(40, 3)),
                    strict=True))
    for name, texts in zip(names, rows.values(), strict=True):
        write(tmp_path / f'in/{name}.jsonl', texts)
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2')
    assert made['shards'] == {FILES[split]: train_of(texts) for split, texts in rows.items()}
    assert 'Split by the names of files; documents: 300 train, 50 val, 40 test' in made['printed']
    assert all(f'1 of 3 files, first {name}.jsonl' in made['printed'] for name in names)


def test_names_of_splits_without_files_to_train_on(tmp_path: Path) -> None:
    write(tmp_path / 'in/test.jsonl', documents(60, 1))
    assert 'named after val and test, and none for train' in refused(
        tmp_path / 'in', tmp_path / 'out')
    assert texts_in(str(tmp_path / 'in')) == documents(60, 1)  # evaluate.py's
    write(tmp_path / 'in/other.jsonl', documents(200, 2))
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2')
    assert 'Split by the names of files, and val by a hash of each document' in made['printed']
    assert made['splits']['test']['documents'] == 60


@pytest.mark.parametrize('text', [book(50_000), '你好世界' * 90_000], ids=['words', 'no spaces'])
def test_a_text_is_cut_at_words(tmp_path: Path, text: str) -> None:
    (tmp_path / 'book.txt').write_text(text)
    made = prepare(tmp_path / 'book.txt', tmp_path / 'out', '--held_out=0.1')
    parts = parts_of(made)
    assert joined(*parts) == text and [len(part) for part in parts] == [9, 8, 8]
    for part in parts[1:]:
        assert 0.09 < sum(map(len, part)) / len(text) < 0.11
        assert ' ' not in text or all(words[0] in ' \n' for words in part)
    short = prepare(tmp_path / 'book.txt', tmp_path / 'short', '--tokens=20K', '--held_out=0.1')
    assert short['shards']['train_00000.bin'] == made['shards']['train_00000.bin'][:40_000]
    assert short['shards']['val.bin'] == made['shards']['val.bin']
    none = prepare(tmp_path / 'book.txt', tmp_path / 'none', '--held_out=0')
    assert none['shards'] == {'train_00000.bin': train_of([text])}


def test_memory_is_flat(tmp_path: Path) -> None:
    """Texts of 12 and 36 MB, which are more than one batch of blocks, need the same memory."""
    script = ('import sys, prepare_slimpajama as prep\n'
              'for path in sys.argv[1:]:\n'
              '    prep.main([f"--input={path}", f"--out_dir={path}-out", "--tokenizer=byte"])\n'
              '    status = open("/proc/self/status").read()\n'
              '    print("peak", status.partition("VmHWM:")[2].split()[0])\n')
    paths = [tmp_path / '12.txt', tmp_path / '36.txt']
    for path in paths:
        path.write_text('some words ' * (int(path.stem) * 1_000_000 // 11))
    done = subprocess.run([sys.executable, '-c', script, *paths], capture_output=True, text=True,
                          cwd=ROOT)
    small, large = (int(n) // 1024 for n in re.findall(r'peak (\d+)', done.stdout))  # MB
    assert large < small + 50


# Tokenizers

def test_a_folder_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'a.jsonl', PAGES), tmp_path / 'out'
    made = prepare(where, out, '--tokenizer=bpe600', '--held_out=0')
    with pytest.raises(UserError, match=r'another sentencepiece tokenizer, .*fff'):
        load_tokenizer(str(out), {**made, 'tokenizer_sha256': 'f' * 64})
    again = prepare(where, tmp_path / 'again', f'--tokenizer={out}/tokenizer.model', '--held_out=0')
    assert again['shards'] == made['shards']
    (out / 'tokenizer.model').unlink()
    with pytest.raises(UserError, match='no such file; copy it'):
        load_tokenizer(str(out))


def test_a_tokenizer_is_trained_on_an_even_sample_of_the_train_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f'{n:04d}' + 'x' * 996 for n in range(3000)]
    train = [text for text in texts
             if prep.split_of_digest(hashlib.sha256(text.encode()).digest(), 0.005) == 'train']
    o = prep.PrepareConfig(input=str(write(tmp_path / 'a.jsonl', texts)), tokenizer='byte')
    for size in (100_000, 2_100_000):
        monkeypatch.setattr(prep, 'BPE_TEXT', size)
        sample = prep.Sample()
        prep.find_rule(o, sources.find_source(o.input, Reading()), sample)
        found = [text for text, *_ in sample.texts]
        assert size * 0.45 < sum(map(len, found)) <= size and {*found} <= {*train}
        gaps = {*np.diff([int(text[:4]) for text in found])}
        assert max(gaps) <= 2 * min(gaps) + 2
    assert found == train[::2]


@pytest.mark.parametrize('n, words', [(1, 90_000), (15, 9000), (60, 300), (2100, 20)])
def test_a_tokenizer_is_trained_on_text_of_train_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, words: int
) -> None:
    """By whichever part of the rule it is divided: cut, the last held out, or by a hash."""
    monkeypatch.setattr(prep, 'BPE_TEXT', 300_000)
    texts = [f'{k}: {book(words, seed=k)}' for k in range(n)]
    o = prep.PrepareConfig(str(write(tmp_path / 'a.jsonl', texts)), tokenizer='byte', held_out=0.1)
    sample = prep.Sample()
    prep.find_rule(o, sources.find_source(o.input, Reading()), sample)
    train, *held = parts_of(prepare(o.input, tmp_path / 'out', '--held_out=0.1'))
    found = [text for text, *_ in sample.texts]
    assert 50_000 < sum(map(len, found)) <= 300_000
    for text in found:
        assert any(text in part for part in train)
    assert sum(any(text in part for part in itertools.chain(*held)) for text in found) == 0


def test_a_tokenizer_that_loses_text(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceTrainer
    SentencePieceTrainer.train(sentence_iterator=iter('\n'.join(PAGES).split('\n')), vocab_size=400,
                               model_prefix=str(tmp_path / 'uni'), minloglevel=2)
    options = (f'--tokenizer={tmp_path / "uni.model"}', '--held_out=0')
    lossy = prepare(write(tmp_path / 'a.jsonl', PAGES), tmp_path / 'lossy', *options)
    assert lossy['lossless'] is False and 'loses some of this text' in lossy['printed']
    assert spelled_bytes(load_tokenizer(str(tmp_path / 'lossy')), lossy) is None
    assert 'lossless' not in prepare(write(tmp_path / 'b.jsonl', ['the data']), tmp_path / 'kept',
                                     *options)


# The data folder

def test_a_killed_preparation_is_no_data_and_the_next_one_ends_it(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'a.jsonl', documents(300, seed=7)), tmp_path / 'out'
    undisturbed = prepare(where, tmp_path / 'undisturbed', '--held_out=0.1')
    # It was killed while it wrote shards: begin again
    (out / '.partial').mkdir(parents=True)
    (out / '.partial/train_00000.bin').write_bytes(b'half of a shard')
    with pytest.raises(UserError, match='is missing'):
        TokenDataset(str(out), 'train', 64)
    assert prepare(where, out, '--held_out=0.1') == undisturbed
    # It was killed before the last n files were moved up: move them
    for n in range(1, 5):
        (out / '.whole').mkdir()
        for name in ['meta.json', *FILES.values()][:n]:
            (out / name).rename(out / '.whole' / name)
        with pytest.raises(UserError, match='is missing'):
            TokenDataset(str(out), 'train', 64)
        again = prepare(where, out, '--held_out=0.1')
        assert 'is prepared already' in again['printed']
        assert again == undisturbed | {'printed': again['printed']}
    assert sorted(os.listdir(out)) == ['.lock', 'meta.json', *sorted(FILES.values())]


@pytest.mark.parametrize('fails', [False, True])
def test_a_folder_that_exists_is_filled_from_inside(tmp_path: Path, fails: bool) -> None:
    """Nothing is written beside it, where another user's folder or a smaller disk may be; what a
    new disk has stays there."""
    out = tmp_path / 'mount/out'
    (out / 'lost+found').mkdir(parents=True)
    where = write(tmp_path / 'in/a.jsonl', documents(300, seed=7) if not fails else ['one'])
    inode = out.stat().st_ino
    real, written = open, []

    def note(path: Any, mode: str = 'r', *args: Any, **options: Any) -> Any:
        if not set(mode).isdisjoint('wax') and tmp_path in Path(path).parents:
            written.append(Path(path))
        return real(path, mode, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('builtins.open', note)
        if fails:
            assert 'too little text' in refused(where, out, '--held_out=0.1')
        else:
            prepare(where, out, '--held_out=0.1')
    assert written and all(out in path.parents for path in written)
    assert os.listdir(out.parent) == ['out'] and out.stat().st_ino == inode
    files = [] if fails else ['meta.json', *FILES.values()]
    assert sorted(os.listdir(out)) == sorted(['.lock', 'lost+found', *files])


def test_a_preparation_outlives_its_console(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text(book(2000))
    with open('/dev/full', 'w') as full:
        done = subprocess.run([sys.executable, ROOT / 'prepare_slimpajama.py', '--input=a.txt',
                               '--out_dir=out', '--tokenizer=byte', '--held_out=0.1'],
                              cwd=tmp_path, stdout=full, stderr=full)
    assert done.returncode == 0 and (tmp_path / 'out/meta.json').exists()


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'a.jsonl', documents(600, seed=8)), tmp_path / 'out'
    prepare(where, out)
    assert 'data made with other options: choose' in refused(where, out, '--held_out=0.2')
    where.unlink()  # the tokens suffice
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
        state = {'data_dir': folder, 'data': json.loads(Path(folder, 'meta.json').read_text())}
        made = prep.find_data('data', 'b.txt', None, state)
        assert load_tokenizer(made).sha256 == load_tokenizer(folder).sha256


@pytest.mark.parametrize('size, tokenizer, held_out', [
    (999_999, 'byte', 0.05), (1_000_000, 'bpe1024', 0.05), (4_999_999, 'bpe1024', 0.05),
    (5_000_000, 'bpe2048', 0.05), (19_999_999, 'bpe2048', 0.05), (20_000_000, 'bpe4096', 0.005),
    (999_999_999, 'bpe4096', 0.005), (1_000_000_000, 'bpe32000', 0.005)])
def test_what_the_size_of_a_text_decides(
    size: int, tokenizer: str, held_out: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer and the share held out are those of the page. An older rule has other data."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text('a text')
    monkeypatch.setattr(sources.Source, 'size', lambda self: size)
    made = []
    monkeypatch.setattr(prep, 'prepare', lambda o, source: made.append(o))
    folder = prep.find_data('data', 'a.txt')
    monkeypatch.setattr(prep, 'RULE', prep.RULE - 1)
    assert prep.find_data('data', 'a.txt') != folder
    assert [(o.tokenizer, o.held_out) for o in made] == [(tokenizer, held_out)] * 2


def test_ids_take_two_bytes_where_that_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only train has several shards."""
    monkeypatch.setattr(prep, 'SHARD_TOKENS', 3)
    for vocab_size, dtype in ((65_536, '<u2'), (65_537, '<u4')):
        (tmp_path / dtype).mkdir()
        writer = prep.Writer(str(tmp_path / dtype), vocab_size)
        for split in prep.SPLITS:
            for ids in ([1, 2], [3, vocab_size - 1, 5], [6, 7]):
                writer.append(split, ids)
            named = [(shard['file'], shard['tokens']) for shard in writer.splits[split]['shards']]
            in_train = [(f'train_0000{n}.bin', size) for n, size in enumerate([3, 3, 1])]
            assert named == (in_train if split == 'train' else [(f'{split}.bin', 7)])
            content = b''.join((tmp_path / dtype / name).read_bytes() for name, _ in named)
            assert np.frombuffer(content, dtype).tolist() == [1, 2, 3, vocab_size - 1, 5, 6, 7]


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


# Sources

@pytest.mark.parametrize('name', ['a.ndjson', 'a.json', 'A.JSONL.GZ', 'a.Json.zst', 'a.json.bz2',
                                  'a.jsonlines', 'a', 'a.PARQUET'])
@pytest.mark.parametrize('in_folder', [False, True])
def test_rows_under_any_suffix(tmp_path: Path, name: str, in_folder: bool) -> None:
    texts = documents(300, seed=2)
    path = write(tmp_path / 'in' / name.lower(), texts)
    if name.endswith('bz2'):
        path.write_bytes(bz2.compress(path.read_bytes()))
    path.rename(path.with_name(name))
    where = tmp_path / 'in' if in_folder else tmp_path / 'in' / name
    made = prepare(where, tmp_path / 'out', '--held_out=0.1')
    assert made['shards'] == expected(texts, 0.1)


def test_what_a_folder_leaves_out_is_counted(tmp_path: Path) -> None:
    """Beside rows, what describes them: JSON without rows, rows of other fields, README.md."""
    folder, texts = tmp_path / 'in', documents(300, seed=2)
    write(folder / 'a.jsonl', texts[:100])
    write(folder / 'b.json', texts[100:200])
    (folder / 'c.json').write_text(json.dumps([{'text': text} for text in texts[200:]], indent=1))
    (folder / 'dataset_infos.json').write_text('{"default": {"splits": 1}}')
    (folder / 'indented.json').write_text(json.dumps({'text': 1}, indent=1))
    (folder / 'index.csv').write_text('name,size\na.jsonl,100\n')
    (folder / 'names.jsonl').write_text('{"name": "a"}\n{"name": "b"}\n')
    for name in ('README.md', 'LICENSE'):
        (folder / name).write_text('about the rows')
    (folder / 'logo.png').write_bytes(b'\x89PNG\r\n\x1a\n\0\0')
    made = prepare(folder, tmp_path / 'out', '--held_out=0.1')
    assert made['shards'] == expected(texts, 0.1)
    assert made['files'] == ['a.jsonl', 'b.json', 'c.json']
    assert re.search(r'Files: 3, [\d,]+ bytes \(2 \.json, 1 \.jsonl\)\n', made['printed'])
    for words in ('2 JSON without rows, 40 bytes (2 .json)', '1 binary, 10 bytes (1 .png)',
                  '2 without "text" in its rows, 50 bytes (1 .csv, 1 .jsonl): --column=',
                  '2 about the rows, 28 bytes (1 without suffix, 1 .md)'):
        assert words in made['printed'], words


@pytest.mark.parametrize('name, content, message', [
    ('a.csv', 'id,n\n1,a\n', 'a.csv is without "text" in its rows, only id, n: --column'),
    ('a.TSV', 'id\treview\n1\ta\n', r'a.TSV is without "text" in its rows, only id, review'),
    ('a.json', '[{"body": "a"}]', 'a.json is without "text" in its rows, only body: --column'),
    ('a.json', '["a", "b"]', r"a.json is JSON, a list of texts: jq -c '.\[\] \| {text: .}' "),
    ('a.json', '{\n "text": "a"\n}', r'a.json is JSON, one row on many lines: jq -c . \S+a.json '),
    ('a.json', '{"content": "a"}\n', 'a.json is JSON without rows, only content: .*--column=NAME'),
    ('a.json', '{"chats": {"list": [{"messages": [{"text": "a"}]}]}}',
     r"a.json is JSON with rows inside: jq -c '.chats.list\[\].messages\[\]' \S+a.json > NEW.jso"),
    ('a.json', '[[{"text": "a"}]]', r"a.json is JSON with rows inside: jq -c '.\[\]\[\]' "),
    ('a.json', '[' * 600 + ']' * 600, 'a.json is JSON without rows: '),
    ('a', '{"cells": [],\n "nbformat": 4}', 'a is Jupyter: jupyter nbconvert --to markdown .*a'),
    ('in/a.csv', 'name', 'a.csv is without "text" in its rows, only name: --column'),
    ('in/a.json.gz', gzip.compress(b'{"n": "a"}\n', mtime=0), 'is JSON without rows, only n: '),
    ('in/.a.txt', 'text', 'in holds no text: 1 hidden'),
    ('data', '', 'data is a run or a data folder of nanoCEM: --data')])
def test_what_is_not_read_is_refused(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name == 'data':
        write_data(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    where = tmp_path / name.partition('/')[0]
    assert re.search(message, refused(where, tmp_path / 'out'))


@pytest.mark.parametrize('column, message', [
    ('n', r'row 1: expected text in the column "n", not a number, .1. .*--column'),
    ('bytes', r'row 1: expected text in the column "bytes", not bytes'),
    ('lists', r'row 1: expected text in the column "lists", not a list'),
    ('broken', r'row 2: not UTF-8')])
def test_columns_that_are_not_text(tmp_path: Path, column: str, message: str) -> None:
    broken = pa.array([b'a', b'caf\xe9'], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({'n': [1, 2], 'bytes': [b'a', b'b'], 'lists': [['a'], ['b']],
                             'broken': broken}), tmp_path / 'a.parquet')
    assert re.search(f'a.parquet, {message}', refused(tmp_path / 'a.parquet', tmp_path / 'out',
                                                      f'--column={column}'))


@pytest.mark.parametrize('suffix', ['txt', 'jsonl', 'parquet', 'jsonl.gz'])
def test_a_name_that_is_not_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """As a zip from Windows may have it. The data folder's name is UTF-8."""
    monkeypatch.chdir(tmp_path)
    texts = documents(300, seed=2)
    name = os.fsdecode(b'caf\xe9.') + suffix
    path = write(tmp_path / f'a.{suffix}', texts)
    if suffix == 'txt':
        path.write_text('\n'.join(texts))
    os.makedirs('in')
    path.rename(f'in/{name}')
    for where in ('in', f'in/{name}'):
        folder = prep.find_data('', where, 'byte')
        assert folder.encode() and len(TokenDataset(folder, 'train', 64)) > 100


def test_a_text_that_the_tokenizer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust's panics are no Exceptions."""
    class PanicException(BaseException):
        pass

    def encode(text: str) -> list[int]:
        if len(text) > 1000:
            raise PanicException('stack overflow')
        return [1]

    bpe = SimpleNamespace(encode_ordinary=encode, decode=lambda ids: '')
    monkeypatch.setattr('tiktoken.get_encoding', lambda name: bpe)
    where = write(tmp_path / 'in/b.jsonl', [*documents(5, seed=1, characters=100), '\n' * 2000])
    write(tmp_path / 'in/a.jsonl', documents(90, seed=2, characters=100))
    assert re.search(r'in/b.jsonl, document 6: tiktoken cannot encode a text of 2,000 characters',
                     refused(where.parent, tmp_path / 'out', '--tokenizer=gpt2', '--held_out=0.1'))


def test_texts_between_separators_are_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the blocks fall in which a file is read. Without the option nothing is divided."""
    texts = [text.strip('\r\n') for text in [*documents(300, seed=4), 'a  <|x|>', book(30_000)]]
    path = tmp_path / 'a.txt'
    path.write_text('\n<|endoftext|>\n'.join([*texts, '']))
    monkeypatch.setattr(docs, 'BLOCK', 300)
    made = prepare(path, tmp_path / 'out', '--separator=<|endoftext|>', '--held_out=0.1')
    assert made['shards'] == expected(texts, 0.1)
    whole = prepare(path, tmp_path / 'whole', '--held_out=0')
    assert whole['shards'] == {'train_00000.bin': train_of([path.read_text()])}
    assert 'separator' not in whole['config']  # as in folders of an older version
    monkeypatch.chdir(tmp_path)
    folder = prep.find_data('', 'a.txt', reading=Reading(separator='<|endoftext|>'))
    assert folder != prep.find_data('', 'a.txt')
    assert json.loads(Path(folder, 'meta.json').read_text())['splits']['test']['documents'] > 1


@pytest.mark.parametrize('separator', [r'\n\n', '<|end_of_text|>'])
def test_a_separator_that_no_text_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    r"""As a shell's "\n\n". Whole files would be documents, and the separators text. It may begin
    in one block of a file and end in the next one."""
    monkeypatch.setattr(docs, 'BLOCK', 7)
    write(tmp_path / 'in/rows.jsonl', [*documents(30, seed=5), f'a {separator} b'])
    for n in range(3):
        (tmp_path / f'in/{n}.txt').write_text('\n\n'.join(documents(20, seed=n)))
    assert f'separator={separator!r} is in no text file of ' in refused(
        tmp_path / 'in', tmp_path / 'out', f'--separator={separator}')
    with open(tmp_path / 'in/2.txt', 'a') as file:
        file.write(f'{separator}another')
    prepare(tmp_path / 'in', tmp_path / 'out', f'--separator={separator}', '--held_out=0.2')


def pipe_into(fd: int, file: Path) -> None:
    """Let this process read from `fd` what another one writes into a pipe."""
    with subprocess.Popen(['cat', file], stdout=subprocess.PIPE).stdout as pipe:
        os.dup2(pipe.fileno(), fd)


@pytest.mark.parametrize('rows', [False, True])
def test_a_pipe_is_kept_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: bool
) -> None:
    """Equal content gives the same file, so that its data folder is found again."""
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / ('a.jsonl' if rows else 'a.txt'), documents(300, seed=2))
    if not rows:
        source.write_text(book(9000))
    found, changed = [], []
    script, options = ROOT / 'prepare_slimpajama.py', ('--tokenizer=byte', '--held_out=0.1')
    for path, fd in ('-', 0), ('/dev/stdin', 0), ('/dev/fd/63', 63):  # bash's <(cat FILE) is 63
        done = run_script(script, f'--input={path}', *options, cwd=tmp_path,
                          before=partial(pipe_into, fd, source))
        assert done.returncode == 0, done.stderr
        found.append(re.findall(r'kept as (data/\S+)', done.stdout))
        changed.append(Path(found[-1][0]).stat().st_mtime_ns)
    (kept,) = {*map(tuple, found)}
    assert len({*changed}) == 1  # find_data's folder has it in its name
    assert Path(kept[0]).read_bytes() == source.read_bytes()
    made = prepare(source, tmp_path / 'out', '--held_out=0.1')
    for name, shard in made['shards'].items():
        assert Path('data', Path(kept[0]).stem, name).read_bytes() == shard
    empty = run_script(script, '--input=-', cwd=tmp_path,
                       before=partial(pipe_into, 0, Path(os.devnull)))
    assert empty.returncode == 1 and 'gave no text' in empty.stderr
    assert not list(Path('data').glob('.stdin*'))


def test_a_run_on_standard_input_is_resumed(tmp_path: Path) -> None:
    def train(*options: str) -> str:
        done = run_script(ROOT / 'train.py', *options, cwd=tmp_path,
                          before=partial(pipe_into, 0, tmp_path / 'book'))
        assert done.returncode in (0, 75), done.stderr
        return done.stdout

    (tmp_path / 'book').write_text(book(9000))
    train(*TINY, '--text=-', '--tokenizer=byte', steps(4), '--stop_step=2', '--out_dir=out/a')
    (tmp_path / 'book').write_text('')
    config = json.loads((tmp_path / 'out/a/config.json').read_text())['train']
    assert (tmp_path / config['text']).read_text() == book(9000)
    shutil.rmtree(tmp_path / config['data'])  # made again from what was kept
    assert 'resuming after step 2' in train(RESUME, '--out_dir=out/a')


def test_the_files_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents(3, seed=1)
    folder = tmp_path / 'in'
    for name, text in zip(('B.JSONL', 'c.jsonl.gz', 'a/d.parquet'), texts, strict=True):
        write(folder / name, [text])
    for name in ('README.md', '.hidden.txt'):
        (folder / name).write_text('not read')
    (tmp_path / 'elsewhere').mkdir()
    (folder / 'a' / 'd.parquet').rename(tmp_path / 'elsewhere' / 'd.parquet')
    (folder / 'a').rmdir()
    (folder / 'a').symlink_to(tmp_path / 'elsewhere')
    (folder / 'link').symlink_to(folder)  # it holds itself
    (tmp_path / 'out').symlink_to(tmp_path / 'disk')  # which is not there yet
    made = prepare(folder, tmp_path / 'out', '--held_out=0')
    assert made['files'] == ['B.JSONL', 'c.jsonl.gz', 'a/d.parquet']
    assert made['shards'] == expected(texts, 0)
    unreadable = Mock(side_effect=PermissionError(13, 'Permission denied'))
    monkeypatch.setattr('os.scandir', unreadable)
    with pytest.raises(UserError, match='Permission denied'):
        sources.list_files(str(folder))


@pytest.mark.parametrize('name, content, message', [
    ('a.jsonl', b'{"text": "a"}\n{"text": "caf\xe9"}\n',
     'a.jsonl is not UTF-8 at byte 27 .*: --encoding=cp1252'),
    ('a.jsonl', b'{"text": "a"}\n' * 9000 + b'{"text": "caf\xe9"}',
     'a.jsonl, line 9001: .* byte 0xe9 in posit'),
    ('a.jsonl', b'{"text": "a"}\n{"text": "a", "n": ' + b'[' * 10**5 + b']' * 10**5 + b'}\n',
     'a.jsonl, line 2: expected .*recursion'),
    ('a.jsonl', b'{"text": "a", "n": ' + b'9' * 5000 + b'}\n', 'line 1: expected .*digits'),
    ('a.jsonl', b'["a"]', r'line 1: expected {"text": "..."} in UTF-8 on .* not b.\["a"\]'),
    ('a.jsonl', b'{"text": "a"},\n', r'line 1: expected .* \(Extra data: line 1 column 14'),
    ('a.jsonl', b'{"text": "a"}\n\n{"text": "', 'line 3: expected'),
    ('a.jsonl', b'{"title": "a"}\n', 'without "text" in its rows, only title: --column'),
    ('a.jsonl.gz', gzip.compress(b'{"text": "a"}', mtime=0)[:-9],
     'a.jsonl.gz: Truncated compressed stream'),
    ('a.parquet', b'PAR1' * 9, 'a.parquet: .*Parquet'),
    ('a.txt', b'', 'a.txt holds too little text for train'),
    ('a.txt', b'a', 'a.txt holds too little text for val.* --held_out')])
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(message, refused(tmp_path / name, tmp_path / 'out'))


def test_the_documents_of_a_text(tmp_path: Path) -> None:
    """evaluate.py --text reads what train.py --text reads."""
    texts = [*documents(5, seed=1), 'last']
    for name in ('a.jsonl', 'a.parquet'):
        assert texts_in(str(write(tmp_path / name, [*texts, '']))) == texts
    (tmp_path / 'a.txt').write_text(texts[0])
    assert texts_in(str(tmp_path / 'a.txt')) == texts[:1]


def test_the_builtin_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's Python without its tests and installed packages, split by hash."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, 'LIBRARY', str(tmp_path / 'lib'))
    texts = documents(600, seed=1)
    Path('lib/test').mkdir(parents=True)
    Path('lib/site-packages').mkdir()
    for n, text in enumerate(texts):
        Path(f'lib/{n:03d}.py').write_text(text)
    for name in ('c.md', 'test/b.py', 'site-packages/a.py'):
        Path('lib', name).write_text('not read')
    assert prep.find_data('./data/builtin') == './data/builtin'
    meta = json.loads(Path('data/builtin/meta.json').read_text())
    assert meta['files'] == [f'{n:03d}.py' for n in range(600)]
    for file, data in expected(texts, 0.05).items():
        assert Path('data/builtin', file).read_bytes() == data


# The Hub

DATA = 'hf://datasets/org/data'
COMMIT = 'c' * 40
HUB_TEXTS = documents(300, seed=50)


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a dataset of three files, and Llama's tokenizer, in place of the Hub. Return the list of
    the files that are downloaded."""
    names = []
    for n in range(3):
        write(tmp_path / f'hub/data/{n}.parquet', HUB_TEXTS[n * 100:][:100])

    def find(where: str) -> list[str]:
        paths = [f'{DATA}@{COMMIT}/{name}' for name in (
            'README.md', 'data/0.parquet', 'data/1.parquet', 'data/2.parquet')]
        return [path.removeprefix('hf://') for path in paths if path.startswith(where)]

    def download(repo: str, name: str, **options: str) -> str:
        assert options == {'repo_type': 'dataset', 'revision': COMMIT} or 'llama' in repo
        names.append(name)
        return str(tmp_path / 'hub' / name) if repo == 'org/data' else LLAMA

    monkeypatch.setattr('huggingface_hub.HfFileSystem', lambda: SimpleNamespace(find=find))
    info = SimpleNamespace(sha=COMMIT)
    monkeypatch.setattr('huggingface_hub.dataset_info', lambda repo, revision: info)
    monkeypatch.setattr('huggingface_hub.hf_hub_download', download)
    return names


def test_a_folder_or_a_file_of_a_hub_repository(tmp_path: Path, downloads: list[str]) -> None:
    for where, texts in ((f'{DATA}/data', HUB_TEXTS), (f'{DATA}@main/', HUB_TEXTS),
                         (f'{DATA}/data/1.parquet', HUB_TEXTS[100:200])):
        made = prepare(where, tmp_path / str(len(where)), '--held_out=0.2')
        assert made['shards'] == expected(texts, 0.2)
        assert made['source'] == f'{DATA}@{COMMIT}' and 'data/1.parquet' in made['files']
    assert 'holds no text' in refused(f'{DATA}/nothing', tmp_path / 'n')
    assert "must be 'namespace/name'" in refused('hf://datasets/data', tmp_path / 'n')


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('huggingface_hub.dataset_info', lambda *_, **__: 1 / 0)
    assert 'by zero (is there a network?)' in refused(DATA, tmp_path / 'out')


def test_without_a_network_other_tokenizers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('huggingface_hub.hf_hub_download', lambda *_, **__: 1 / 0)
    path = write(tmp_path / 'a.jsonl', documents(30, seed=1))
    assert re.search('tokenizer=llama cannot be downloaded: without a network --tokenizer=bpe2048, '
                     r'byte or FILE\.model', refused(path, tmp_path / 'out', '--tokenizer=llama'))


def test_a_limit_of_tokens_before_a_split_has_any_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is long enough."""
    monkeypatch.setattr(prep, 'BATCH', 1)
    (tmp_path / 'a.txt').write_text(book(90_000))
    said = refused(tmp_path / 'a.txt', tmp_path / 'out', '--tokens=5K', '--held_out=0.05')
    assert 'train is full at 5,000 tokens, before val has any: --tokens=N takes more' in said
    made = prepare(tmp_path / 'a.txt', tmp_path / 'out', '--tokens=200K', '--held_out=0.05')
    assert made['splits']['train']['tokens'] == 200_000


def test_another_programs_data_folder_is_told(tmp_path: Path) -> None:
    """As nanoGPT's. Its name is not given to prepare_slimpajama.py, which would refuse it."""
    for name in ('train.bin', 'val.bin', 'meta.pkl'):
        (tmp_path / name).write_bytes(b'1')
    with pytest.raises(UserError, match=r'is no data folder, and holds meta\.pkl, train\.bin, val'
                       r'\.bin\. --text=FILE trains on a text'):
        read_meta(str(tmp_path))
    with pytest.raises(UserError, match=r'prepare_slimpajama\.py --out_dir=.*none makes'):
        read_meta(str(tmp_path / 'none'))


def test_a_piped_prompt_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / 'a').write_text('The river')
    done = run_script(ROOT / 'sample.py', f'--out_dir={ROOT}/pretrained/cem', '--prompt_file=-',
                      '--tokens=3', '--device=cpu', cwd=tmp_path,
                      before=partial(pipe_into, 0, tmp_path / 'a'))
    assert done.stdout.startswith('The river') and [*tmp_path.iterdir()] == [tmp_path / 'a']


@pytest.mark.parametrize('script', ['train', 'sample', 'evaluate', 'export', 'bench',
                                    'synthetic_gp', 'prepare_slimpajama'])
def test_a_script_finds_its_files_with_a_safe_path(tmp_path: Path, script: str) -> None:
    done = subprocess.run([sys.executable, '-P', ROOT / f'{script}.py', '--help'], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and '--' in done.stdout, done.stderr


@needs_llama
def test_the_hub_brings_the_llama_tokenizer(tmp_path: Path, downloads: list[str]) -> None:
    options = ('--tokenizer=llama', '--tokens=1K', '--held_out=0')
    assert prepare(DATA, tmp_path / 'out', *options)['splits']['train']['tokens'] == 1000
    assert (tmp_path / 'out/tokenizer.model').read_bytes() == Path(LLAMA).read_bytes()
    assert downloads == ['tokenizer.model', 'data/0.parquet']  # no more than the tokens need

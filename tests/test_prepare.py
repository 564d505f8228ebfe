"""prepare_slimpajama.py: shards, splits, tokenizers, data folders. Nothing is downloaded."""
import bz2
import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tokenizers import LLAMA, NASTY, PAGES, documents, needs_llama

import prepare_slimpajama
from configurator import UserError
from nanocem import documents as docs
from nanocem import prepare as prep
from nanocem.data import TokenDataset, read_meta
from nanocem.tokenizers import load_tokenizer, spelled_bytes
from running import ROOT, override

FILES = {'train': 'train_00000.bin', 'val': 'val.bin', 'test': 'test.bin'}


def write(path: Path, texts: list[str], field: str = 'text') -> Path:
    """Write `texts` as rows, in the format of the suffixes of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    suffixes = path.name.lower().split('.')[1:]
    rows = [{'n': '1', field: text} for text in texts]
    if suffixes[0] == 'parquet':
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
        return path
    content = ''.join(json.dumps(row) + '\n' for row in rows)
    if suffixes[0] in ('csv', 'tsv'):
        with io.StringIO(newline='') as file:
            lines = csv.writer(file, delimiter=',' if suffixes[0] == 'csv' else '\t')
            lines.writerows([['n', field], *(row.values() for row in rows)])
            content = file.getvalue()
    pack = {'gz': gzip.compress, 'bz2': bz2.compress,
            'zst': lambda data: pa.Codec('zstd').compress(data, asbytes=True)}.get(suffixes[-1])
    path.write_bytes(pack(content.encode()) if pack else content.encode())
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
    """Return the shards of the byte tokenizer, by a plain loop."""
    ids = {split: [] for split in FILES}
    for text in filter(None, texts):
        x = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64
        split = 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'
        ids[split] += [256, *text.encode()]
    return {FILES[split]: np.array(i, '<u2').tobytes() for split, i in ids.items() if i}


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


def numbered(words: int, name: str = 'w') -> str:
    """Return a text of different words, so that each piece of it says where it stood."""
    return ''.join(f'{name}{n}{" " if n % 9 else chr(10)}' for n in range(words))


# Shards

@pytest.mark.parametrize('name', [
    'a.jsonl', 'A.JSONL.GZ', 'a.ndjson', 'a.json', 'a.Json.zst', 'a.jsonl.bz2', 'a.csv', 'a.TSV.gz',
    'a.parquet'])
@pytest.mark.parametrize('in_folder', [False, True])
def test_every_format_gives_the_same_bytes(tmp_path: Path, name: str, in_folder: bool) -> None:
    texts = [*documents(2200, seed=2, characters=60), *NASTY, 'z' * 5000, 'a,"b"\n\r\n"', '"']
    where = write(tmp_path / 'in' / name, texts, 'content')
    made = prepare(where.parent if in_folder else where, tmp_path / 'out', '--held_out=0.1',
                   '--column=content')
    assert made['shards'] == expected(texts, 0.1)
    n = f'{len(texts):,}'
    assert f'1 of {n} rows have no text' in made['printed']
    for split, file in FILES.items():
        size = len(made['shards'][file]) // 2
        (shard,) = made['splits'][split]['shards']
        assert (shard['file'], shard['tokens']) == (file, size)
        assert made['splits'][split]['tokens'] == size
        begins = np.frombuffer(made['shards'][file], '<u2') == 256
        assert made['splits'][split]['documents'] == begins.sum()
    assert f'{n} of {n} rows have no column "text", but n, content: --column' in refused(
        where, tmp_path / 'other')


def test_shards_and_the_limit_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep, 'SHARD_TOKENS', 500_000)
    texts = [*documents(2000, seed=3, characters=800), 'one long document ' * 20_000,
             *documents(10, seed=4)]
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


# Splits

@pytest.mark.parametrize(('n', 'held_out'), [(20, 0.05), (60, 0.05), (100, 0.005)])
def test_of_few_documents_the_lowest_hashes_are_held_out(
    tmp_path: Path, n: int, held_out: float
) -> None:
    """Where a hash leaves val or test less than half its share. Texts with seed 7."""
    rng, changed = random.Random(7), 0
    for attempt in range(14):
        texts = [str(rng.random()) * 9 for _ in range(n)]
        made = prepare(write(tmp_path / f'{attempt}.jsonl', texts), tmp_path / f'out/{attempt}',
                       f'--held_out={held_out}')
        assert 'val has few tokens: a perplexity of so few says little' in made['printed']
        right = expected(texts, held_out)
        counts = [(np.frombuffer(right.get(file, b''), '<u2') == 256).sum()
                  for file in ('val.bin', 'test.bin')]
        if min(counts) < held_out * n / 2:
            lowest = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
            held = max(1, round(held_out * n))
            test, val = lowest[:held], lowest[held:2 * held]
            rest = [text for text in texts if text not in test + val]
            right = {FILES[split]: train_of([text for text in texts if text in chosen])
                     for split, chosen in zip(FILES, (rest, val, test), strict=True)}
            changed += 1
        assert made['shards'] == right
    assert changed > 0


@pytest.mark.parametrize('name, split', [
    ('train.jsonl', 'train'), ('c4-train.00000-of-00001.json.gz', 'train'), ('train2.md', 'train'),
    ('Training Set (1).jsonl', 'train'), ('data/train-00000-of-00002.parquet', 'train'),
    ('dev/a.jsonl', 'val'), ('val01.jsonl', 'val'), ('TinyStoriesV2-GPT4-valid.txt', 'val'),
    ('a_validation_matched.jsonl', 'val'), ('testing.jsonl', 'test'), ('eval/a.jsonl', 'test'),
    ('evaluation3.jsonl', 'test'), ('ptb.test.txt', 'test'), ('contest.jsonl', None),
    ('détest.txt', None), ('a.jsonl', None), ('trained.txt', None)])
def test_the_names_of_splits(name: str, split: str | None) -> None:
    """They count if each file has one and one is train."""
    assert prep.splits_of_names([name, 'train.a'])[name] == (split or 'train')
    assert {*prep.splits_of_names([name, 'train.a', 'b'])} == {name, 'train.a', 'b'}
    assert {*prep.splits_of_names([name, 'train.a', 'b']).values()} == {'train'}
    assert {*prep.splits_of_names([name, 'test.a']).values()} == (
        {'train', 'test'} if split == 'train' else {'train'})


@pytest.mark.parametrize('names', [
    ('train', 'validation', 'test'), ('training/a', 'dev/a', 'eval/a'), ('train', 'val', None),
    ('train', None, 'test')])
def test_files_are_read_for_the_split_of_their_name(
    tmp_path: Path, names: tuple[str | None, ...]
) -> None:
    """A split that no file is named after is held out of train's."""
    rows = documents(2500, 1, 60), documents(50, 2), documents(40, 3)
    for name, texts in zip(names, rows, strict=True):
        if name:
            write(tmp_path / f'in/{name}.jsonl', texts)
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2')
    if None in names:  # the texts with the lowest hashes are held out
        lowest = expected(rows[0], 0.2)['test.bin']
        held = [text for text in rows[0] if train_of([text]) in lowest]
        train = [text for text in rows[0] if text not in held]
        right = [train, *(texts if name else held
                          for name, texts in zip(names[1:], rows[1:], strict=True))]
    else:
        right = rows
    assert made['shards'] == {FILES[split]: train_of(texts)
                              for split, texts in zip(FILES, right, strict=True)}
    assert ('Split by the names of files and a hash of each document; ' if None in names else
            'Split by the names of files; ') in made['printed']


@pytest.mark.parametrize('names, words', [
    (('train', 'val', 'other'), 'not each file has one'), (('test', 'val'), 'no file has that of')])
def test_names_that_do_not_count_are_said(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    texts = documents(2400, 1, 60)
    for n, name in enumerate(names):
        write(tmp_path / f'in/{name}.jsonl', texts[n::len(names)])
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.1')
    assert f'Names of splits do not count: {words}' in made['printed']
    assert sorted(itertools.chain(*parts_of(made))) == sorted(texts)
    for n, text in enumerate(['one ' * 99] * 30):  # a story "The Test" among others is a story
        (tmp_path / f'tales/{n}').mkdir(parents=True)
        (tmp_path / f'tales/{n}/{"The Test" if n == 3 else n}.txt').write_text(f'{n} {text}')
    held = parts_of(prepare(tmp_path / 'tales', tmp_path / 'told', '--held_out=0.1'))
    assert all(len(part) > 1 for part in held)


@pytest.mark.parametrize('n', [20, 300])
def test_many_text_files_are_split_like_rows(tmp_path: Path, n: int) -> None:
    """Each goes to one split whole, the one where the same text in a .jsonl would go."""
    texts = [*documents(n - 1, seed=12, characters=6000), numbered(12_000)]
    for number, text in enumerate(texts):
        (tmp_path / f'many/{number // 9:03d}').mkdir(parents=True, exist_ok=True)
        (tmp_path / f'many/{number // 9:03d}/{number:03d}.txt').write_text(text)
    (tmp_path / 'many/empty.txt').touch()
    made = prepare(tmp_path / 'many', tmp_path / 'files', '--held_out=0.1')
    rows = prepare(write(tmp_path / 'a.jsonl', texts), tmp_path / 'rows', '--held_out=0.1')
    assert made['shards'] == rows['shards'] and made['splits'] == rows['splits']
    counts = [made['splits'][split]['documents'] for split in FILES]
    assert made['printed'].endswith(rows['printed']) and sum(counts) == n
    assert f'documents: {counts[0]} train, {counts[1]} val, {counts[2]} test' in made['printed']


@pytest.mark.parametrize('names', [['book'], ['a', 'b'], ['a', 'b', 'c', 'short'],
                                   [*(f's{n}' for n in range(30)), 'most']])
@pytest.mark.parametrize('suffix', ['txt', 'jsonl'])
def test_few_documents_or_one_that_is_most_are_cut_in_pieces(
    tmp_path: Path, names: list[str], suffix: str
) -> None:
    """Of text files and rows. Every word is in one split once; val and test get their share, more
    or less, in several pieces, which begin where a word ends."""
    words = {name: 3 if name == 'short' else 20 if name[0] == 's' else 60_000 for name in names}
    texts = {name: numbered(n, f'{name}-') for name, n in words.items()}
    (tmp_path / 'in').mkdir()
    for name, text in texts.items():
        if suffix == 'txt':
            (tmp_path / f'in/{name}.txt').write_text(text)
    if suffix == 'jsonl':
        write(tmp_path / 'in/a.jsonl', [*texts.values()])
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.1')
    assert 'Split by a hash of each piece of a document; ' in made['printed']
    parts = parts_of(made)
    read = [word for part in itertools.chain(*parts) for word in part.split()]
    assert sorted(read) == sorted(itertools.chain(*(text.split() for text in texts.values())))
    everything = sum(map(len, texts.values()))
    for split in parts[1:]:
        assert 0.04 < sum(map(len, split)) / everything < 0.2 and len(split) > 2
        assert all(part[0] in ' \n' or part.startswith(tuple(texts.values())) or
                   any(text.startswith(part) for text in texts.values()) for part in split)
    assert sum(map(len, itertools.chain(*parts))) == everything


@pytest.mark.parametrize('text', [numbered(30_000), '你好世界' * 9000 + numbered(9000, '世')])
def test_a_text_is_read_to_its_limit_or_whole(tmp_path: Path, text: str) -> None:
    (tmp_path / 'book.md').write_text(text)
    made = prepare(tmp_path / 'book.md', tmp_path / 'out', '--held_out=0.1')
    assert sum(len(part) for part in itertools.chain(*parts_of(made))) == len(text)
    short = prepare(tmp_path / 'book.md', tmp_path / 'short', '--tokens=60K', '--held_out=0.1')
    assert short['shards']['train_00000.bin'] == made['shards']['train_00000.bin'][:120_000]
    assert made['shards']['val.bin'].startswith(short['shards']['val.bin'])
    none = prepare(tmp_path / 'book.md', tmp_path / 'none', '--held_out=0')
    assert none['shards'] == {'train_00000.bin': train_of([text])}


@pytest.mark.parametrize('size', [6000, 60])
@pytest.mark.parametrize('copies', [1, 2, 250])
def test_no_text_is_in_two_splits(tmp_path: Path, size: int, copies: int) -> None:
    """Ten texts that are repeated, more rows than decide the rule, and fewer than stay whole."""
    texts = [numbered(size // 6, f'{n}-') for n in range(10)]
    made = prepare(write(tmp_path / 'a.jsonl', texts * copies), tmp_path / 'out', '--held_out=0.1')
    train, val, test = ({*' '.join(part).split()} for part in parts_of(made))
    assert train and val and test and not train & val and not train & test and not val & test


@pytest.mark.parametrize('rows, words', [
    ([], 'holds no text'), (['a'], 'too little text for val.* --held_out'),
    (['yes '] * 9000, 'too little text for'), (['one ' * 9, 'two ' * 9], 'too little text for')])
def test_too_little_text_is_told(tmp_path: Path, rows: list[str], words: str) -> None:
    assert re.search(words, refused(write(tmp_path / 'a.jsonl', rows), tmp_path / 'out'))
    (tmp_path / 'a.txt').write_text(''.join(rows[:1]))
    assert re.search('holds no text|too little text', refused(tmp_path / 'a.txt', tmp_path / 'out'))


def test_a_limit_of_tokens_before_a_split_has_any_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is long enough."""
    monkeypatch.setattr(prep, 'BATCH', 1)
    (tmp_path / 'a.txt').write_text(numbered(90_000))
    said = refused(tmp_path / 'a.txt', tmp_path / 'out', '--tokens=5K', '--held_out=0.05')
    assert 'train is full at 5,000 tokens, before val has any: --tokens=N takes more' in said
    made = prepare(tmp_path / 'a.txt', tmp_path / 'out', '--tokens=400K', '--held_out=0.05')
    assert made['splits']['train']['tokens'] == 400_000


@pytest.mark.slow
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


def test_evenly_spaced_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the limits of bytes, by the numbers that the texts are."""
    texts = [f'{n:04d}' + 'é' * 498 for n in range(3000)]
    for size, at_most, every, last in ((10**7, 10**9, 1, 2999), (2_100_000, 10**9, 2, 2998),
                                       (100_000, 10**9, 32, 2976), (10**7, 9999, 1, 9)):
        monkeypatch.setattr(prep, 'BPE_TEXT', size)
        found = [int(text[:4]) for text in prep.evenly_spaced_texts(texts, at_most)]
        assert found == [*range(0, last + 1, every)]


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.parquet', 'a.csv'])
@pytest.mark.parametrize('n, words', [(1, 90_000), (15, 9000), (2100, 20)])
def test_a_tokenizer_is_trained_on_text_of_train_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, n: int, words: int
) -> None:
    """However it is divided and packed, and on text of all of it: an ordered one has its end."""
    seen: list[str] = []
    real = prep.tokenizers.train_bpe
    monkeypatch.setattr(prep.tokenizers, 'train_bpe', lambda path, size, texts: (
        seen.extend(texts), real(path, size, PAGES)))
    monkeypatch.setattr(prep, 'BPE_TEXT', 250_000)
    texts = [numbered(words, f'{k}-') for k in range(n)]
    where = write(tmp_path / name, texts)
    prepare(where, tmp_path / 'bpe', '--tokenizer=bpe600', '--held_out=0.1')
    train, *held = parts_of(prepare(where, tmp_path / 'out', '--held_out=0.1'))
    found = {*' '.join(seen).split()}
    assert 20_000 < sum(map(len, seen)) <= 250_000
    assert found <= {*' '.join(train).split()}
    assert not found & {*' '.join(itertools.chain(*held)).split()}
    last = max(int(word.partition('-')[0]) * words + int(word.partition('-')[2]) for word in found)
    assert last > 0.8 * n * words


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
    # All texts of val and test are decoded, and not only the first of a batch
    words = sorted({word for page in PAGES for word in page.split() if word.isalpha()})
    rows = [' '.join(pair) for pair in itertools.islice(itertools.permutations(words, 2), 60)]
    for name, unknown in ('d', ''), ('e', ' 世界'):
        some = write(tmp_path / f'{name}.jsonl', [rows[0], *(row + unknown for row in rows[1:])])
        found = prepare(some, tmp_path / name, options[0], '--held_out=0.2')
        assert ('lossless' in found) == bool(unknown)


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
    (tmp_path / 'a.txt').write_text(numbered(2000))
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
    o = prep.PrepareConfig(input=where, out_dir=str(tmp_path / 'out'), tokenizer='byte',
                           held_out=0.1)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(prep.prepare, [o, o]))
    assert capsys.readouterr().out.count('is prepared already') == 1


# A user's text

def test_a_users_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'My book.v2.md'  # one file is text, whatever its suffix
    path.write_text(numbered(20_000))
    made = prep.find_data('My book.v2.md')
    assert re.fullmatch(r'data/My book-[0-9a-f]{8}', made)
    assert 'tokenizer byte' in capsys.readouterr().out
    assert all(len(TokenDataset(made, split, 128)) > 10 for split in prep.SPLITS)
    assert prep.find_data(str(path)) == made and capsys.readouterr().out == ''
    path.write_bytes(path.read_bytes().replace(b'w9', b'W9', 1))
    assert prep.find_data(str(path)) != made


def test_the_tokenizer_of_a_users_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the text or the run whose weights training starts from chooses it, and nothing
    is downloaded."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text('\n'.join(PAGES))
    monkeypatch.setattr(prep, 'TEXT_TOKENIZERS', {1e4: 'byte', 1e9: 'bpe800'})
    trained = prep.find_data('a.txt')
    assert load_tokenizer(trained).vocab_size == 800
    Path('b.txt').write_text('\n'.join(PAGES[::-1]))
    for folder in (trained, prep.find_data('b.txt', 'byte')):
        state = {'data_dir': folder, 'data': json.loads(Path(folder, 'meta.json').read_text())}
        made = prep.find_data('b.txt', None, state)
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
    monkeypatch.setattr(docs.Source, 'size', lambda self: size)
    made = []
    monkeypatch.setattr(prep, 'prepare', lambda o, source: made.append(o))
    folder = prep.find_data('a.txt')
    monkeypatch.setattr(prep, 'RULE', prep.RULE - 1)
    assert prep.find_data('a.txt') != folder
    assert [(o.tokenizer, o.held_out) for o in made] == [(tokenizer, held_out)] * 2


def test_the_built_in_text_is_tiny_shakespeare(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Its three files are the published one, whose first nine tenths are train, and each byte of a
    file is a token of its split."""
    monkeypatch.chdir(tmp_path)
    texts = {split: (ROOT / f'shakespeare/{split}.txt').read_bytes()
             for split in ('train', 'val', 'test')}
    whole = b''.join(texts.values())
    published = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
    assert hashlib.sha256(whole).hexdigest() == published
    assert len(texts['train']) == int(0.9 * len(whole))
    folder = Path(prep.find_data('shakespeare', 'byte'))
    for split, file in ('train', 'train_00000'), ('val', 'val'), ('test', 'test'):
        ids = np.fromfile(folder / f'{file}.bin', dtype=np.uint16)
        assert ids.tolist() == [256, *texts[split]]
    read = [''.join(blocks) for blocks in docs.text_documents('shakespeare', docs.Reading())]
    assert sorted(read) == sorted(text.decode() for text in texts.values())


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

    def find(where: str, detail: bool) -> dict[str, dict[str, int]]:
        sizes = {'README.md': 9, '.gitattributes': 9, 'data/0.parquet': 30, 'data/1.parquet': 31,
                 'data/2.parquet': 32}
        return {f'datasets/org/data@{COMMIT}/{name}': {'size': size} for name, size in sizes.items()
                if f'{DATA}@{COMMIT}/{name}'.startswith(where)}

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
    assert 'Files: 3 .parquet, 93 bytes\nLeft out: 1 .md, 9 bytes\n' in prepare(
        DATA, tmp_path / 'all')['printed']
    assert 'nothing has nothing to read' in refused(f'{DATA}/nothing', tmp_path / 'n')
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


def test_another_programs_data_folder_is_told(tmp_path: Path) -> None:
    """As nanoGPT's. Its name is not given to prepare_slimpajama.py, which would refuse it."""
    for name in ('train.bin', 'val.bin', 'meta.pkl'):
        (tmp_path / name).write_bytes(b'1')
    with pytest.raises(UserError, match=r'not a data folder, and holds meta\.pkl, train\.bin, val'
                       r'\.bin\. --text=FILE trains on a text'):
        read_meta(str(tmp_path))
    with pytest.raises(UserError, match=r'prepare_slimpajama\.py --out_dir=.*none makes'):
        read_meta(str(tmp_path / 'none'))


# Run each script as `python -P SCRIPT --help` would, but import torch once
WITH_A_SAFE_PATH = '''
import contextlib, io, runpy, sys
path, (root, *scripts) = sys.path[:], sys.argv[1:]
for script in scripts:
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        file = getattr(module, '__file__', None) or ''
        if file.startswith(root) and 'site-packages' not in file:  # an environment may be below it
            del sys.modules[name]
    sys.argv[1:] = ['--help']
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(script, run_name='__main__')
        except SystemExit as end:
            assert not end.code, end.code
    assert '--' in said.getvalue(), script
'''


def test_scripts_find_their_files_with_a_safe_path(tmp_path: Path) -> None:
    names = 'train', 'sample', 'evaluate', 'export', 'bench', 'synthetic_gp', 'prepare_slimpajama'
    done = subprocess.run(
        [sys.executable, '-P', '-c', WITH_A_SAFE_PATH, ROOT,
         *(ROOT / f'{name}.py' for name in names)],
        cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_llama
def test_the_hub_brings_the_llama_tokenizer(tmp_path: Path, downloads: list[str]) -> None:
    options = ('--tokenizer=llama', '--tokens=1K', '--held_out=0')
    assert prepare(DATA, tmp_path / 'out', *options)['splits']['train']['tokens'] == 1000
    assert (tmp_path / 'out/tokenizer.model').read_bytes() == Path(LLAMA).read_bytes()
    assert downloads == ['tokenizer.model', 'data/0.parquet']  # no more than the tokens need

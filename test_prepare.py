"""prepare_slimpajama.py: ids, bytes, interruptions, damage, the Hub. Nothing is downloaded; tests that need Llama's
tokenizer.model look for it at $LLAMA_TOKENIZER or ../shared/data/llama_tokenizer.model and are skipped without it."""
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_slimpajama as prep
import train

REPO = os.path.dirname(os.path.abspath(__file__))
LLAMA = os.environ.get('LLAMA_TOKENIZER') or os.path.join(REPO, '..', 'shared', 'data', 'llama_tokenizer.model')
needs_llama = pytest.mark.skipif(not os.path.isfile(LLAMA), reason='no Llama tokenizer.model ($LLAMA_TOKENIZER)')

NASTY = ['', ' ', '  ', '\n', '\n\n', '\t', '\r\n', '\0', '\x7f\x01', 'a', ' a', 'a ', '  a  b   c', 'a\n b\n\n  c\t\td', '\u2581',
         '\u2581a \u2581\u2581b', 'a\u00a0b\u3000c\u2028d\u200be', '\ufeffBOM', 'naïve café Ünï', 'e\u0301 é', 'ﬁ ½ Å',
         '你好，世界', 'こんにちは 世界', 'مرحبا بالعالم', 'हिन्दी में', '👩‍👩‍👧‍👦🏳️‍🌈 👍🏽', '\U0001f600' * 50, '\U0010ffff\ue000',
         'def f(x):\n    return {"a": [x, "\\n"]}\n', 'https://a.b/c?d=%20&e#f', '<0x0A> <unk >', '1234567890 3.14159',
         'x' * 1000, ' ' * 1000, '\n' * 1000, 'word ' * 1000, 'don\'t "quote" — … –', '\r', ' \r ', '\u2581\r\u2581\u00a0\u2002']


@pytest.fixture(scope='module')
def llama() -> prep.LlamaTokenizer:
    return prep.LlamaTokenizer(LLAMA)


def documents(n: int, seed: int, characters: int = 400) -> list[str]:
    """Texts of random words, some with line ends and other scripts."""
    rng = random.Random(seed)
    words = ['the', 'of', 'energy', 'é', '世界', 'x=1', '👍', '\n', '\n\n', ' ', 'a' * 30, 'minimization', 'Hopfield,', '\t']
    return [' '.join(rng.choices(words, k=rng.randrange(1, characters // 2))) + f' {i}' for i in range(n)]


def write(path: Path, texts: list[str]) -> Path:
    """`texts` in the format that the name of `path` says; a folder of .txt for a name without a suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ''.join(json.dumps({'text': text, 'meta': {'n': 1}}) + '\n' for text in texts).encode()
    if path.suffix == '.parquet':
        pq.write_table(pa.table({'meta': ['x'] * len(texts), 'text': texts}), path, row_group_size=100)
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
    return [sys.executable, os.path.join(REPO, 'prepare_slimpajama.py'), f'--input={where}', f'--out_dir={out}',
            *(options if any('--tokenizer' in o for o in options) else ('--tokenizer=byte', *options))]


def run(where: Path | str, out: Path, *options: str, **env: str) -> subprocess.CompletedProcess:
    """The command, as a user gives it."""
    return subprocess.run(command(where, out, *options), capture_output=True, text=True, timeout=120,
                          env={**os.environ, **env})


def refused(where: Path | str, out: Path, *options: str, **env: str) -> str:
    """The one line that the command ends with; it must fail, and leave nothing that could be taken for a data folder."""
    done = run(where, out, *options, **env)
    lines = [line for line in done.stderr.splitlines() if line.startswith('prepare_slimpajama.py: ')]
    assert done.returncode == 1 and len(lines) == 1 and done.stderr.rstrip().endswith(lines[0]), done.stderr
    assert not list(out.glob('*.bin')) and not (out / 'meta.json').exists()
    return lines[0]


def prepare(where: Path | str, out: Path, *options: str) -> dict[str, Any]:
    """The same in this process. Returns the bytes of the shards and of meta.json's `splits`."""
    prep.prepare(prep.parse(command(where, out, *options)[2:]), quiet=True)
    return result(out)


def result(out: Path) -> dict[str, Any]:
    assert not list(out.glob('*.part')) and not list(out.glob('*.tmp')) and not (out / 'progress.json').exists()
    return {**{path.name: path.read_bytes() for path in out.glob('*.bin')},
            'splits': json.loads((out / 'meta.json').read_text())['splits']}


def expected(texts: list[str], held_out: float) -> dict[str, bytes]:
    """The byte tokenizer's shards, made the plain way."""
    ids = {split: [] for split in prep.SPLITS}
    for text in texts:
        x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big') / 2 ** 64
        split = 'test' if x < held_out else 'val' if x < 2 * held_out else 'train'
        ids[split] += [256, *text.encode()] if text else []
    return {f'{"train_00000" if split == "train" else split}.bin': np.array(i, '<u2').tobytes() for split, i in ids.items() if i}


# Ids

@needs_llama
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.one_of(st.characters(exclude_categories=['Cs']), st.sampled_from(' \n\u2581\r\tae.<')), max_size=60))
def test_llama_ids_are_sentencepieces(llama: prep.LlamaTokenizer, text: str) -> None:
    assert llama.encode(text) == llama.model.encode(text)
    llama.cache.clear()
    assert llama.encode(text) == llama.model.encode(text)


def llama_of_2023(model: Any) -> Any:
    """LlamaTokenizerFast as transformers 4 made it, with the installed transformers: merges in the order of the pieces'
    scores, and always a space in front. (transformers 5 orders by id, and puts none before a space.)"""
    pytest.importorskip('transformers', reason='transformers is not installed')
    from tokenizers import normalizers
    from transformers import LlamaTokenizerFast
    vocab = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    merges = [(-model.get_score(i), -cut, piece) for piece, i in vocab.items() for cut in range(1, len(piece))
              if i > 258 and piece[:cut] in vocab and piece[cut:] in vocab]
    fast = LlamaTokenizerFast(vocab=vocab, merges=[(piece[:-cut], piece[-cut:]) for _, cut, piece in sorted(merges)])
    fast.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
    fast.backend_tokenizer.pre_tokenizer = None
    return fast


@needs_llama
def test_llama_ids_are_transformers(llama: prep.LlamaTokenizer) -> None:
    fast = llama_of_2023(llama.model)
    for text in [*NASTY, *documents(50, seed=1), 'ab' * 500_000, 'a ' * 500_000, Path(os.__file__).read_text()]:
        assert llama.encode(text) == fast.encode(text, add_special_tokens=False), repr(text[:80])


@needs_llama
def test_llama_marks_in_a_text_are_text(llama: prep.LlamaTokenizer) -> None:
    fast, text = llama_of_2023(llama.model), 'a <s>struck out</s> word <unk>'
    assert llama.encode(text) == fast.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert not {0, 1, 2} & set(llama.encode(text))
    assert 1 in fast.encode(text, add_special_tokens=False)  # the difference on purpose
    assert llama.decode([1, *llama.encode(text)]) == text


def tokenizers() -> Iterator[Any]:
    yield prep.ByteTokenizer()
    if os.path.isfile(LLAMA):
        yield prep.LlamaTokenizer(LLAMA)
    if os.environ.get('TIKTOKEN_CACHE_DIR'):
        yield prep.Gpt2Tokenizer()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(['word', ' ', '\n', '  ', '\u2581', 'é', '.', '世', "'s", '12', '\t', '\r\n', '\u00a0']), max_size=80),
       st.integers(1, 12), st.integers(1, 30))
def test_a_document_in_pieces_has_the_ids_of_the_whole(parts: list[str], batch: int, chunk: int) -> None:
    text = ''.join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prep, 'BATCH', batch)
        cut = list(prep.pieces([text[i:i + chunk] for i in range(0, len(text), chunk)]))
    assert ''.join(piece for piece, _, _ in cut) == text
    assert [b for _, b, _ in cut] == [True] * bool(text) + [False] * (len(cut) - 1)
    assert [e for _, _, e in cut] == [False] * (len(cut) - 1) + [True] * bool(text)
    for tokenizer in TOKENIZERS:
        assert sum((tokenizer.encode(piece, begins) for piece, begins, _ in cut), []) == tokenizer.encode(text)


TOKENIZERS = list(tokenizers())


@pytest.mark.skipif(not os.environ.get('TIKTOKEN_CACHE_DIR'), reason='tiktoken would download gpt2 ($TIKTOKEN_CACHE_DIR)')
def test_gpt2(tmp_path: Path) -> None:
    made = prepare(write(tmp_path / 'a.jsonl', ['Hello world<|endoftext|>']), tmp_path / 'out', '--tokenizer=gpt2', '--held_out=0')
    ids = np.frombuffer(made['train_00000.bin'], '<u2')
    assert ids[:3].tolist() == [50256, 15496, 995] and (ids == 50256).sum() == 1
    assert prep.load_tokenizer(str(tmp_path / 'out')).decode(ids.tolist()) == 'Hello world<|endoftext|>'


# Bytes

@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.zst', 'a.parquet', 'folder'])
def test_every_format_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    texts = [*documents(300, seed=2), '', *[text for text in NASTY if text], 'z' * 5000]
    made = prepare(write(tmp_path / name, texts), tmp_path / 'out', '--held_out=0.1', '--workers=1')
    right = expected(texts, 0.1)
    assert len(right) == 3 and {k: v for k, v in made.items() if k != 'splits'} == right
    for split, s in made['splits'].items():
        data = right[s['shards'][0]['file']]
        assert s['shards'] == [{'file': s['shards'][0]['file'], 'tokens': len(data) // 2, 'sha256': hashlib.sha256(data).hexdigest(),
                                'documents': s['documents']}]
        assert s['documents'] == np.count_nonzero(np.frombuffer(data, '<u2') == 256)
        assert s['tokens'] == len(train.Pieces(str(tmp_path / 'out'), split, 64).shards[0])


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
    assert b''.join(v for k, v in sorted(one.items()) if k.startswith('train')) == expected(texts, 0.1)['train_00000.bin']
    assert all(shard['tokens'] == 500_000 for shard in one['splits']['train']['shards'][:-1])
    limited = [prepare(where, tmp_path / f'limited{w}', '--tokens=700K', '--held_out=0.1', f'--workers={w}') for w in (1, 2)]
    assert limited[0] == limited[1] and limited[0]['splits']['train']['tokens'] == 700_000
    assert limited[0]['train_00000.bin'] == expected(texts, 0.1)['train_00000.bin'][:1_400_000]
    assert one['val.bin'].startswith(limited[0]['val.bin']) and limited[0]['val.bin'] != one['val.bin']


@needs_llama
def test_a_llama_folder_is_whole(tmp_path: Path, llama: prep.LlamaTokenizer) -> None:
    made = prepare(write(tmp_path / 'a.jsonl', ['Hello <s> world', ' x']), tmp_path / 'out', f'--tokenizer={LLAMA}', '--eos',
                   '--held_out=0')
    right = [1, *llama.encode('Hello <s> world'), 2, 1, *llama.encode(' x'), 2]
    assert np.frombuffer(made['train_00000.bin'], '<u2').tolist() == right
    tokenizer = prep.load_tokenizer(str(tmp_path / 'out'))
    assert (tokenizer.vocab_size, tokenizer.bos) == (32_000, 1) and tokenizer.decode(right[:right.index(2)]) == 'Hello <s> world'


def test_large_vocabularies_take_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep.ByteTokenizer, 'vocab_size', 2 ** 16 + 1)
    monkeypatch.setattr(prep.ByteTokenizer, 'bos', 2 ** 16)
    texts = documents(20, seed=5)
    made = prepare(write(tmp_path / 'a.jsonl', texts), tmp_path / 'out', '--held_out=0', '--workers=1')
    ids = np.frombuffer(made['train_00000.bin'], '<u4')
    assert (ids == 2 ** 16).sum() == 20 and len(ids) == sum(1 + len(t.encode()) for t in texts)
    prep.verify(str(tmp_path / 'out'))
    x, _ = train.Pieces(str(tmp_path / 'out'), 'train', 16).batch(np.array([0]))
    assert x[0, 0] == 2 ** 16 and bytes(x[0, 1:].tolist()) == texts[0].encode()[:15]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=5), min_size=1, max_size=30), st.randoms())
def test_a_document_has_one_split(texts: list[str], rng: random.Random) -> None:
    for text in texts:
        at = rng.randrange(len(text) + 1)
        assert prep.split_of([text], 0.3) == prep.split_of([text[:at], text[at:]], 0.3)
    if len(set(texts)) > 20:
        assert len({prep.split_of([text], 0.3) for text in texts}) > 1


def test_native_splits(tmp_path: Path) -> None:
    texts = documents(400, seed=6)
    for name, part in (('train/chunk1/a.jsonl.zst', texts[:300]), ('validation/chunk1/b.jsonl.zst', texts[300:])):
        write(tmp_path / 'in' / name, part)
    made = prepare(tmp_path / 'in', tmp_path / 'out', '--held_out=0.2', '--tokens=10M')
    right = expected(texts[:300], 0.2)
    assert made['val.bin'] == expected(texts[300:], 0)['train_00000.bin'] and made['test.bin'] == right['test.bin']
    kept = [text for text in texts[:300] if prep.split_of([text], 0.2) != 'test']
    assert made['train_00000.bin'] == expected(kept, 0)['train_00000.bin']
    short = prepare(tmp_path / 'in', tmp_path / 'short', '--held_out=0.2', '--tokens=20K')
    assert short['splits']['val']['tokens'] == 4000 and short['splits']['train']['tokens'] == 20_000


def test_a_seed_shuffles_the_files(tmp_path: Path) -> None:
    for i in range(5):
        write(tmp_path / 'in' / f'{i}.jsonl', [f'file {i} ' * 20])
    made = [prepare(tmp_path / 'in', tmp_path / f'out{n}', f'--seed={seed}', '--held_out=0')['train_00000.bin']
            for n, seed in enumerate((0, 1, 1))]
    assert made[0] != made[1] == made[2] and sorted(made[0]) == sorted(made[1])
    orders = [json.loads((tmp_path / f'out{n}' / 'meta.json').read_text())['files'] for n in (0, 1)]
    assert orders[0] == sorted(orders[1]) == [f'{i}.jsonl' for i in range(5)]


def test_builtin_is_the_standard_library(tmp_path: Path) -> None:
    prep.prepare_builtin(str(tmp_path / 'out'))
    root, texts = os.path.dirname(os.__file__), []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'})
        texts += [Path(folder, name).read_bytes().decode(errors='replace') for name in sorted(files) if name.endswith('.py')]
    made = result(tmp_path / 'out')
    assert {k: v for k, v in made.items() if k != 'splits'} == expected(texts, 0.05)
    tokenizer = prep.load_tokenizer(str(tmp_path / 'out'))
    assert (tokenizer.bos, tokenizer.vocab_size, tokenizer.decode(tokenizer.encode('é'))) == (256, 257, 'é')


# Interruptions

def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    except OSError:
        return False


def test_killed_and_restarted_gives_the_same_bytes(tmp_path: Path) -> None:
    seed = random.randrange(2 ** 32)
    print(f'random moments of seed {seed}')
    rng = random.Random(seed)
    for i in range(4):
        write(tmp_path / 'in' / f'{i}.parquet', documents(1500, seed=10 + i, characters=4000))
    straight = prepare(tmp_path / 'in', tmp_path / 'straight', '--shard_tokens=1M', '--held_out=0.05', '--workers=1')
    slow = dict(os.environ, PYTHONPATH=REPO, SLOW=str(rng.uniform(0.02, 0.05)))
    out, kills = tmp_path / 'out', 0
    script = ('import os, sys, time, prepare_slimpajama as prep\nprep.BATCH, prep.SAVE_SECONDS = 1 << 16, 0.1\n'
              'append = prep.Writer.append\n'
              'def slow(*args): time.sleep(float(os.environ["SLOW"]) / 100); append(*args)\n'
              'prep.Writer.append = slow\nif __name__ == "__main__": prep.main(sys.argv[1:])\n')
    (tmp_path / 'slow.py').write_text(script)
    argv = [sys.executable, str(tmp_path / 'slow.py'),
            *command(tmp_path / 'in', out, '--shard_tokens=1M', '--held_out=0.05', '--workers=2')[2:]]
    positions = []
    while kills < 3:
        process = subprocess.Popen(argv, env=slow, stderr=subprocess.PIPE, text=True)
        while not (out / 'progress.json').exists() or json.loads((out / 'progress.json').read_text())['tokens']['train'] < sum(
                positions[-1:]) + 1:
            time.sleep(0.01)
            assert process.poll() is None, process.stderr.read()
        time.sleep(rng.uniform(0, 0.3))
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        positions.append(json.loads((out / 'progress.json').read_text())['tokens']['train'])
        deadline = time.time() + 10
        while any(alive(pid) for pid in workers):
            assert time.time() < deadline, 'workers outlive a killed run'
            time.sleep(0.05)
        assert not (out / 'meta.json').exists()
    print(f'killed after {positions} tokens')
    assert positions == sorted(set(positions))  # every run went on where the one before was
    done = subprocess.run(argv, env=dict(slow, SLOW='0'), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert result(out) == straight

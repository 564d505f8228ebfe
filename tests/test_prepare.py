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

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LLAMA = os.environ.get('LLAMA_TOKENIZER') or os.path.join(REPO, '..', 'shared', 'data', 'llama_tokenizer.model')
needs_llama = pytest.mark.skipif(not os.path.isfile(LLAMA), reason='no Llama tokenizer.model ($LLAMA_TOKENIZER)')

NASTY = ['', ' ', '  ', '\n', '\n\n', '\t', '\r\n', '\0', '\x7f\x01', 'a', ' a', 'a ', '  a  b   c', 'a\n b\n\n  c\t\td',
         '\u2581', '\u2581a \u2581\u2581b', 'a\u00a0b\u3000c\u2028d\u200be', '\ufeffBOM', 'naïve café Ünï', 'e\u0301 é',
         'ﬁ ½ Å', '你好\uff0c世界', 'こんにちは 世界', 'مرحبا بالعالم', 'हिन्दी में', '👩‍👩‍👧‍👦🏳️‍🌈 👍🏽',
         '\U0001f600' * 50, '\U0010ffff\ue000',
         'def f(x):\n    return {"a": [x, "\\n"]}\n', 'https://a.b/c?d=%20&e#f', '<0x0A> <unk >', '1234567890 3.14159',
         'x' * 1000, ' ' * 1000, '\n' * 1000, 'word ' * 1000, 'don\'t "quote" — …', '\r', ' \r ',
         '\u2581\r\u2581\u00a0\u2002']


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
        pq.write_table(pa.table({'meta': ['x'] * len(texts), 'text': texts}), path, row_group_size=100, compression='none')
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
    prep.main(command(where, out, *options)[2:])
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
    files = {'train': 'train_00000.bin', 'val': 'val.bin', 'test': 'test.bin'}
    return {files[split]: np.array(i, '<u2').tobytes() for split, i in ids.items() if i}


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
    fast.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
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
@given(st.lists(st.sampled_from(['word', ' ', '\n', '  ', '\u2581', 'é', '.', '世', "'s", '12', '\t', '\r\n', '\u00a0']),
                max_size=80), st.integers(1, 12), st.integers(1, 30))
def test_a_document_in_pieces_has_the_ids_of_the_whole(parts: list[str], batch: int, chunk: int) -> None:
    text = ''.join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prep, 'BATCH', batch)
        cut = list(prep.pieces([text[i:i + chunk] for i in range(0, len(text), chunk)]))
    assert ''.join(piece for piece, _, _ in cut) == text
    assert [b for _, b, _ in cut] == [True] * bool(text) + [False] * (len(cut) - 1)
    assert [e for _, _, e in cut] == [False] * (len(cut) - 1) + [True] * bool(text)
    for tokenizer in TOKENIZERS:
        assert [i for piece, begins, _ in cut for i in tokenizer.encode(piece, begins)] == tokenizer.encode(text)


TOKENIZERS = list(tokenizers())


@pytest.mark.skipif(not os.environ.get('TIKTOKEN_CACHE_DIR'), reason='tiktoken would download gpt2 ($TIKTOKEN_CACHE_DIR)')
def test_gpt2(tmp_path: Path) -> None:
    where = write(tmp_path / 'a.jsonl', ['Hello world<|endoftext|>'])
    made = prepare(where, tmp_path / 'out', '--tokenizer=gpt2', '--held_out=0')
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
        name = s['shards'][0]['file']
        data = right[name]
        assert s['shards'] == [{'file': name, 'tokens': len(data) // 2, 'documents': s['documents'],
                                'sha256': hashlib.sha256(data).hexdigest()}]
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
    assert (tokenizer.vocab_size, tokenizer.bos) == (32_000, 1)
    assert tokenizer.decode(right[:right.index(2)]) == 'Hello <s> world'
    meta = tmp_path / 'out' / 'meta.json'
    for key, value in (('vocab_size', 32_001), ('tokenizer_sha256', 'f' * 64)):
        good = meta.read_text()
        meta.write_text(json.dumps({**json.loads(good), key: value}))
        with pytest.raises(SystemExit, match=f'another llama tokenizer: .*{value}'):
            prep.load_tokenizer(str(tmp_path / 'out'))
        meta.write_text(good)
    (tmp_path / 'out' / 'tokenizer.model').write_bytes(b'damaged')
    with pytest.raises(SystemExit, match="is not Llama's"):
        prep.load_tokenizer(str(tmp_path / 'out'))
    (tmp_path / 'out' / 'tokenizer.model').unlink()
    with pytest.raises(SystemExit, match=r'tokenizer\.model is missing'):
        prep.load_tokenizer(str(tmp_path / 'out'))


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
@given(st.lists(st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=5), min_size=1, max_size=30),
       st.randoms())
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
        left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}
        subfolders[:] = sorted(set(subfolders) - left_out)
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


def test_a_run_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'a.jsonl', documents(1000, seed=7, characters=2000)), tmp_path / 'out'
    straight = prepare(where, tmp_path / 'straight', '--workers=1')
    limit = len(straight['train_00000.bin']) // 2
    done = subprocess.run(command(where, out, '--workers=1'), capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert done.returncode == 1
    assert re.match(r'prepare_slimpajama.py: .*(File too large|No space left)', done.stderr.splitlines()[-1])
    assert not list(out.glob('*.bin')) and not (out / 'meta.json').exists()
    assert prepare(where, out, '--workers=1') == straight


def test_a_full_disk_for_real(tmp_path: Path) -> None:
    where, out = write(tmp_path / 'a.jsonl', documents(1000, seed=7, characters=2000)), tmp_path / 'small'
    out.mkdir()
    inside = ' '.join(command(where, out, '--workers=1'))
    if subprocess.run(['unshare', '-rm', 'mount', '-t', 'tmpfs', 'x', str(out)], capture_output=True).returncode:
        pytest.skip('this machine lets nobody mount a small disk')
    done = subprocess.run(['unshare', '-rm', 'sh', '-c', f'mount -t tmpfs -o size=512k x {out} && {inside}; code=$?; ls {out}; '
                           'exit $code'], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith('prepare_slimpajama.py: ')
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


# Damage

def damage(folder: Path, kind: str) -> str:
    """A folder of three files, the second damaged. Returns what the message must say."""
    texts = documents(700, seed=20, characters=1000)
    write(folder / 'a.jsonl', texts[:100])
    write(folder / 'c.jsonl', texts[600:])
    name, says = {'cut parquet': ('b.parquet', ''), 'broken parquet': ('b.parquet', ''), 'not parquet': ('b.parquet', 'magic'),
                  'no column': ('b.parquet', 'no "text" column, only words'), 'numbers': ('b.parquet', 'no string but 1'),
                  'cut zst': ('b.jsonl.zst', 'Truncated'), 'broken zst': ('b.jsonl.zst', 'ZSTD'),
                  'empty zst': ('b.jsonl.zst', 'empty'), 'not JSON': ('b.jsonl', 'line 400 is not JSON'),
                  'no field': ('b.jsonl', 'line 401 has no "text" field'),
                  'not UTF-8': ('b.jsonl', 'line 400 is not JSON')}[kind]
    path = write(folder / name, texts[100:600])
    data = path.read_bytes()
    middle = len(data) // 2
    if kind == 'no column':
        pq.write_table(pa.table({'words': ['a']}), path)
    elif kind == 'numbers':
        pq.write_table(pa.table({'text': [1]}), path)
    elif name == 'b.jsonl':
        lines = data.splitlines()
        lines[399 + (kind == 'no field')] = {'not JSON': b'{"text": "a', 'no field': b'{"txt": "a"}',
                                             'not UTF-8': b'{"text": "\xff"}'}[kind]
        path.write_bytes(b'\n'.join(lines))
    else:
        broken = data[:middle - 99] + random.Random(21).randbytes(200) + data[middle + 101:]
        path.write_bytes({'cut': data[:middle], 'broken': broken, 'empty': b'', 'not': b'not parquet'}[kind.split()[0]])
    return says


@pytest.mark.parametrize('kind', ['cut parquet', 'broken parquet', 'not parquet', 'no column', 'numbers', 'cut zst',
                                  'broken zst', 'empty zst', 'not JSON', 'no field', 'not UTF-8'])
def test_a_damaged_file_is_named_and_left_out_only_on_demand(tmp_path: Path, kind: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep, 'BATCH', 50_000)  # so that documents before the damage are written before it is met
    monkeypatch.setattr(prep, 'SAVE_SECONDS', 0)
    folder, out = tmp_path / 'in', tmp_path / 'out'
    says = damage(folder, kind)
    with pytest.raises(SystemExit, match=r'^prepare_slimpajama.py: .*/in/b\.(parquet|jsonl|jsonl\.zst): .*--skip_bad') as stop:
        prepare(folder, out, '--held_out=0.1', '--workers=1', '--shard_tokens=200K')
    assert says in str(stop.value) and '\n' not in str(stop.value)
    assert not list(out.glob('*.bin')) and not (out / 'meta.json').exists()
    skipped = prepare(folder, out, '--held_out=0.1', '--workers=1', '--shard_tokens=200K', '--skip_bad')
    meta = json.loads((out / 'meta.json').read_text())
    assert list(meta['skipped']) == [next(p.name for p in folder.glob('b.*'))] and meta['files'] == ['a.jsonl', 'c.jsonl']
    next(folder.glob('b.*')).unlink()
    assert skipped == prepare(folder, tmp_path / 'without', '--held_out=0.1', '--workers=1', '--shard_tokens=200K')


def test_bad_options_and_inputs_are_refused(tmp_path: Path) -> None:
    out, some = tmp_path / 'out', write(tmp_path / 'a.jsonl', ['text'])
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'empty.jsonl').touch()
    (tmp_path / 'other.model').write_bytes(b'not a tokenizer')
    for where, options, says in (
            (tmp_path / 'nothing', (), 'no such file or folder'), (tmp_path / 'empty', (), 'holds no .parquet, .jsonl'),
            (tmp_path / 'empty.jsonl', ('--workers=1',), 'holds no text'), (some, ('--tokens=many',), 'expected a number'),
            (some, ('--tokens=0',), 'expected a number'), (some, ('--tokenizer=bert',), 'none of llama, gpt2, byte'),
            (some, (f'--tokenizer={tmp_path}/other.model',), LLAMA_SAYS), (some, ('--nonsense=1',), 'unrecognized'),
            (some, ('--workers=0',), 'at least 1'), (some, ('--held_out=0.7',), 'below 0.5'), (some, ('--eos',), 'no EOS'),
            (some, ('--size=86m', '--tokens=1M'), 'give one'), (some, ('--size=1m',), 'invalid choice')):
        assert says in refused(where, out, *options)


LLAMA_SAYS = f'expected {prep.LLAMA_SHA256}'


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
                train.Pieces(str(out), 'train', 64)
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
        train.Pieces(str(out), 'train', 64)
    (out / 'away').rename(path)
    prep.verify(str(out))
    with pytest.raises(SystemExit, match='holds token 256, outside the vocabulary of 200'):
        train.Pieces(str(out), 'train', 64, vocab_size=200)
    with pytest.raises(SystemExit, match=r'python prepare_slimpajama\.py'):
        train.Pieces(str(tmp_path / 'nothing'), 'train', 64)
    (out / 'meta.json').write_text('{"format": 1')
    with pytest.raises(SystemExit, match='damaged'):
        prep.verify(str(out))


def test_peek(tmp_path: Path) -> None:
    texts = [f'document {i}: ' + 'naïve ' * i for i in range(9)]
    prepare(write(tmp_path / 'a.jsonl', texts), tmp_path / 'out', '--held_out=0')
    done = run('builtin', tmp_path / 'out', '--peek')
    assert done.returncode == 0 and [line for line in done.stdout.splitlines() if not line.startswith('---')] == texts[:5]
    assert run('builtin', tmp_path / 'out', '--peek=val').stderr.startswith('prepare_slimpajama.py: ')


def test_memory_is_flat(tmp_path: Path) -> None:
    script = ('import sys, prepare_slimpajama as prep\nprep.main(sys.argv[1:])\n'
              'print([line for line in open("/proc/self/status") if "VmHWM" in line][0].split()[1])')
    text = ' '.join(documents(10, seed=40, characters=2000))
    for name in ('a.parquet', 'a.jsonl.zst', 'a.txt'):
        peak = []
        for n in (5, 50):
            path = tmp_path / f'{n}{name[1:]}'
            parts = [f'{i} {text}' for i in range(n * 1_000_000 // len(text))]
            path.write_text(' '.join(parts)) if name == 'a.txt' else write(path, parts)
            options = command(path, tmp_path / f'{n}{name}', '--workers=1')[2:]
            done = subprocess.run([sys.executable, '-c', script, *options], capture_output=True, text=True, cwd=REPO)
            peak.append(int(done.stdout.split()[-1]) // 1024)
        print(name, peak)
        assert peak[1] < peak[0] + 40, peak  # MB; the larger input is 50 MB of text

@pytest.mark.slow
@needs_llama
def test_speed(tmp_path: Path, llama: prep.LlamaTokenizer, capsys: pytest.CaptureFixture) -> None:
    """pytest -m slow -k speed: a whole run, beside SentencePiece alone in one process and transformers' fast tokenizer (as
    many threads as cores) on the same text, by turns; medians of three. $SPEED_TEXT is a .jsonl of your own."""
    cores, where = len(os.sched_getaffinity(0)), os.environ.get('SPEED_TEXT')
    if not where:
        where = str(write(tmp_path / 'a.jsonl', [path.read_text(errors='replace') for path in sorted(
            Path(os.__file__).parent.rglob('*.py'))][:2000]))
    texts = [text for line in open(where, encoding='utf-8') if (text := json.loads(line)['text'])]  # noqa: SIM115
    megabytes, fast = sum(len(text.encode()) for text in texts) / 1e6, llama_of_2023(llama.model)
    seconds: dict[str, list[tuple[float, float]]] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        begin, before = time.perf_counter(), os.times()
        got = work()
        after = os.times()
        seconds.setdefault(name, []).append((time.perf_counter() - begin, sum(after[:4]) - sum(before[:4])))
        return got

    for turn in range(3):
        ids = measure('SentencePiece alone', lambda: [llama.model.encode(text) for text in texts])
        tokens = sum(len(i) + 1 for i in ids)
        measure('transformers fast', lambda: fast(texts, add_special_tokens=False))
        out = tmp_path / f'out{turn}'
        done = measure(f'prepare_slimpajama.py, {cores} workers', lambda out=out: run(where, out, f'--tokenizer={LLAMA}'))
        assert done.returncode == 0 and sum(s['tokens'] for s in result(out)['splits'].values()) == tokens, done.stderr
    with capsys.disabled():
        print(f'\n{megabytes:.1f} MB, {tokens:,} tokens, {cores} cores; medians of three turns')
        medians = {name: [sorted(row[i] for row in rows)[1] for i in (0, 1)] for name, rows in seconds.items()}
        for name, (wall, cpu) in medians.items():
            print(f'{name:35} {megabytes / wall:6.2f} MB/s {tokens / wall:12,.0f} tokens/s   {cpu / megabytes:.3f} CPU s a MB')
        alone, _, ours = medians.values()
        print(f'{alone[0] / ours[0] / cores:.2f} x cores x SentencePiece alone; of its CPU time a MB, {ours[1] / alone[1]:.2f}')
    assert ours[1] < alone[1] / 0.8  # of CPU time, which other load disturbs less than the clock


# The Hub

class StandIn(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the Hub, for one dataset repository, org/data, and the tokenizer's."""
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
            return self.answer(200, json.dumps({'id': 'org/data', 'sha': sha, 'siblings': [], 'tags': []}).encode())
        if path == f'/api/datasets/org/data/tree/{hub.sha}':
            tree = [{'type': 'directory', 'path': 'data', 'oid': 'd' * 40}]
            tree += [{'type': 'file', 'path': name, 'size': len(data), 'oid': 'b' * 40}
                     for name, data in {'README.md': b'#', **hub.files}.items()]
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
            return self.answer(206, data[at:], **headers, Content_Range=f'bytes {at}-{len(data) - 1}/{len(data)}')
        if name in hub.drop:  # the connection breaks in the middle of the file
            hub.drop.discard(name)
            self.send_response(200)
            for key, value in {**headers, 'Content_Length': str(len(data))}.items():
                self.send_header(key.replace('_', '-'), value)
            self.end_headers()
            self.wfile.write(data[:len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            return None
        return self.answer(200, data, **headers)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A stand-in Hub with three parquet files; where() is the --input, env what a run needs to find it."""
    texts = documents(900, seed=50, characters=5000)
    names = [f'data/train-0000{i}-of-00003.parquet' for i in range(3)]
    files = {name: write(tmp_path / 'hub' / name, texts[i * 300:][:300]).read_bytes() for i, name in enumerate(names)}
    state = SimpleNamespace(sha='c' * 40, files=files, sha_now='c' * 40, tokenizer={}, gone=set(), drop=set(),
                            hold='', gets=[], texts=texts)
    server = ThreadingHTTPServer(('127.0.0.1', 0), StandIn)
    server.hub = state
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.env = {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HOME': str(tmp_path / 'hf'), 'HF_TOKEN': '',
                 'HF_HUB_DISABLE_XET': '1', 'no_proxy': '127.0.0.1', 'HF_HUB_OFFLINE': '0'}
    yield state
    server.shutdown()
    server.server_close()


DATA = 'hf://datasets/org/data'


def test_hub_with_a_dropped_connection(tmp_path: Path, hub: SimpleNamespace) -> None:
    dropped = sorted(hub.files)[1]
    hub.texts[300:600] = [random.Random(i).randbytes(40_000).hex() for i in range(300)]
    pq.write_table(pa.table({'text': hub.texts[300:600]}), tmp_path / 'large.parquet', compression='none')
    hub.files[dropped] = (tmp_path / 'large.parquet').read_bytes()
    hub.drop.add(dropped)
    done = run(DATA, tmp_path / 'out', '--held_out=0.1', '--workers=1', **hub.env)
    assert done.returncode == 0, done.stderr
    made = result(tmp_path / 'out')
    assert {k: v for k, v in made.items() if k != 'splits'} == expected(hub.texts, 0.1)
    assert [r for name, r in hub.gets if name == dropped] == [None, f'bytes={10 * 2 ** 20}-']  # it writes 10 MB at a time
    assert len(hub.gets) == 4
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == ['meta.json', 'test.bin', 'train_00000.bin', 'val.bin']
    meta = json.loads((tmp_path / 'out' / 'meta.json').read_text())
    assert meta['source'] == f'{DATA}@{hub.sha}' and meta['files'] == sorted(hub.files)
    assert run(DATA, tmp_path / 'out', '--held_out=0.1', HF_ENDPOINT='http://127.0.0.1:9').returncode == 0  # nothing to ask


def test_hub_takes_no_more_files_than_the_tokens_need(tmp_path: Path, hub: SimpleNamespace) -> None:
    done = run(DATA, tmp_path / 'out', '--tokens=100K', '--held_out=0', '--workers=1', **hub.env)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / 'out')['train_00000.bin'] == expected(hub.texts, 0)['train_00000.bin'][:200_000]
    assert {name for name, _ in hub.gets} <= set(sorted(hub.files)[:2])  # the one used, and the one fetched beside it
    assert json.loads((tmp_path / 'out' / 'meta.json').read_text())['files'] == sorted(hub.files)[:1]


def test_hub_killed_and_restarted_never_fetches_a_finished_file_again(tmp_path: Path, hub: SimpleNamespace) -> None:
    names, out = sorted(hub.files), tmp_path / 'out'
    hub.hold = names[2]
    process = subprocess.Popen(command(DATA, out, '--held_out=0.1', '--workers=2'), env={**os.environ, **hub.env})
    while not (out / 'progress.json').exists() or json.loads((out / 'progress.json').read_text())['file'] < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    hub.hold, hub.sha_now = '', 'e' * 40  # the repository has moved on: the run stays with the commit it began with
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
    assert {k: v for k, v in result(tmp_path / 'out').items() if k != 'splits'} == expected(hub.texts, 0.1)


@needs_llama
def test_hub_brings_the_llama_tokenizer(tmp_path: Path, hub: SimpleNamespace, llama: prep.LlamaTokenizer) -> None:
    at = '/hf-internal-testing/llama-tokenizer/resolve/main/tokenizer.model'
    hub.tokenizer[at] = b'another model'
    assert LLAMA_SAYS in refused(DATA, tmp_path / 'out', '--tokenizer=llama', **hub.env)
    shutil.rmtree(tmp_path / 'hf')
    hub.tokenizer[at] = Path(LLAMA).read_bytes()
    done = run(DATA, tmp_path / 'out', '--tokenizer=llama', '--tokens=10K', '--held_out=0', '--workers=1', **hub.env)
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

"""Token shards: their order, and what happens to a run whose data is damaged."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import LENGTH, Run, assert_one_line, edit_meta, steps, write_data

from nanocem.runs import checkpoints, read_checkpoint
from nanocem.shards import FORMAT, Order, Sequences, evenly_spaced


def test_every_epoch_reads_every_piece_once(data: Path) -> None:
    order = Order(n_sequences=7, batch_size=3, seed=5)
    drawn = np.concatenate([order(s) for s in range(14)])
    for epoch in np.split(drawn, 6):
        assert sorted(epoch) == list(range(7))
    assert (
        list(order(4)) == list(Order(7, 3, 5)(4)) == list(drawn[12:15])
    )  # a function of (seed, step) alone
    assert list(Order(100, 50, 5)(0)) != list(Order(100, 50, 6)(0))
    pieces = Sequences(str(data), 'train', LENGTH)
    whole = [np.fromfile(data / f'train_{s:05d}.bin', '<u2').astype(int) for s in range(2)]
    assert len(pieces) == sum((len(w) - 1) // LENGTH for w in whole)
    x, y = pieces.batch(np.arange(len(pieces)))
    first = (len(whole[0]) - 1) // LENGTH
    for shard, rows in ((whole[0], slice(0, first)), (whole[1], slice(first, None))):
        assert x[rows].flatten().tolist() == shard[: x[rows].numel()].tolist()
        assert y[rows].flatten().tolist() == shard[1 : x[rows].numel() + 1].tolist()


def shorten(folder: Path) -> None:
    meta = json.loads((folder / 'meta.json').read_text())
    meta['splits']['val']['shards'][0]['tokens'] = LENGTH
    os.truncate(folder / 'val.bin', 2 * LENGTH)
    (folder / 'meta.json').write_text(json.dumps(meta))


def large_token(folder: Path) -> None:
    tokens = np.fromfile(folder / 'train_00000.bin', '<u2')
    tokens[50] = 40_000
    tokens.tofile(folder / 'train_00000.bin')


CORRUPTIONS = {
    'missing shard': (lambda f: (f / 'train_00001.bin').unlink(), ['train_00001.bin', 'missing']),
    'empty shard': (
        lambda f: (f / 'train_00001.bin').write_bytes(b''),
        ['train_00001.bin', '0 bytes', '4013 tokens'],
    ),
    'truncated shard': (
        lambda f: os.truncate(f / 'test.bin', 4000),
        ['test.bin', '4000 bytes', '4000 tokens'],
    ),
    'odd length': (lambda f: (f / 'val.bin').open('ab').write(b'x'), ['val.bin', '8001 bytes']),
    'token outside the vocabulary': (
        large_token,
        ['train_00000.bin', 'token 40000', 'vocabulary of 30'],
    ),
    'shard shorter than a piece': (shorten, ['val', 'context_length + 1 = 9']),
    'no split': (lambda f: edit_meta(f, splits={}), ['train', 'no shard']),
    'no meta.json': (
        lambda f: (f / 'meta.json').unlink(),
        ['meta.json is missing', 'prepare_slimpajama.py'],
    ),
    'cut meta.json': (lambda f: os.truncate(f / 'meta.json', 50), ['meta.json is damaged']),
    'meta.json without a key': (
        lambda f: (f / 'meta.json').write_text(f'{{"format": {FORMAT}}}'),
        ['meta.json is damaged'],
    ),
    'meta.json of no object': (
        lambda f: (f / 'meta.json').write_text('[1]'),
        ['meta.json is damaged'],
    ),
    'another format': (lambda f: edit_meta(f, format=99), ['format 99']),
    'no folder': (shutil.rmtree, ['meta.json is missing']),
}


@pytest.mark.parametrize('name', CORRUPTIONS)
def test_corrupt_data_is_one_line_before_any_step(name: str, tmp_path: Path) -> None:
    folder = write_data(tmp_path / 'data')
    corrupt, words = CORRUPTIONS[name]
    corrupt(folder)
    assert_one_line(
        Run(tmp_path, f'--data={folder}', f'--out_dir={tmp_path / "o"}', steps(5)).wait(), *words
    )
    assert not (tmp_path / 'o').exists()


def test_a_token_outside_the_vocabulary_that_no_sample_saw_is_met_in_its_batch(
    tmp_path: Path,
) -> None:
    folder = write_data(tmp_path / 'data', tokens=400_000, shards=1)
    tokens = np.fromfile(folder / 'train_00000.bin', '<u2')
    tokens[5000:8000] = 999  # between two of the places looked at
    tokens.tofile(folder / 'train_00000.bin')
    run = Run(
        tmp_path,
        f'--data={folder}',
        f'--out_dir={tmp_path / "o"}',
        '--batch_size=1024',
        '--micro_batch_size=128',
        '--tokens=1M',
        '--eval_interval=1000',
        world=2,
    ).wait()
    assert (
        1 in run.codes
        and 0 not in run.codes
        and 'token 999' in run.text
        and 'Traceback' not in run.text
    ), run.text


@pytest.mark.parametrize(
    'change, words',
    [
        (lambda f: write_data(f, seed=1), ['train fingerprint']),
        (lambda f: edit_meta(f, tokenizer='other'), ['tokenizer=byte (now other)']),
        (lambda f: write_data(f, tokens=4100), ['train tokens=8013 (now 8213)']),
    ],
    ids=['content', 'tokenizer', 'length'],
)
def test_data_changed_before_a_resume_is_refused(
    change: Any, words: list[str], tmp_path: Path
) -> None:
    folder, out = write_data(tmp_path / 'data'), tmp_path / 'o'
    Run(tmp_path, f'--data={folder}', f'--out_dir={out}', steps(10), '--stop_step=4').wait()
    change(folder)
    assert_one_line(Run(tmp_path, f'--out_dir={out}', '--init_from=resume').wait(), *words)
    assert read_checkpoint(checkpoints(str(out))[-1])['step'] == 4


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 10_000), count=st.integers(0, 20_000))
def test_spread_sequences_are_in_order_and_as_far_apart_as_they_can_be(n, count):
    numbers = evenly_spaced(n, count)
    assert len(numbers) == min(n, max(1, count)) and numbers[0] == 0
    gaps = np.diff(np.append(numbers, n))
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1

"""Data folders: sequences, their order and their losses."""
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configurator import UserError
from nanocem.data import BatchSampler, TokenDataset, checksums, evenly_spaced
from nanocem.measure import NO_TARGET, loss_sums, perplexity, token_losses
from nanocem.tokenizers import load_tokenizer
from running import LENGTH, edit_meta, write_data


def test_every_epoch_reads_every_sequence_once(data: Path) -> None:
    sampler = BatchSampler(n_sequences=7, batch_size=3, seed=5)
    chosen = np.concatenate([sampler(s) for s in range(14)])
    for epoch in np.split(chosen, 6):
        assert sorted(epoch) == list(range(7))
    # The choice depends on seed and step alone.
    assert list(sampler(4)) == list(BatchSampler(7, 3, 5)(4)) == list(chosen[12:15])
    assert list(BatchSampler(100, 50, 5)(0)) != list(BatchSampler(100, 50, 6)(0))
    sequences = TokenDataset(str(data), 'train', LENGTH)
    whole = [np.fromfile(data / f'train_{s:05d}.bin', '<u2').astype(int) for s in range(2)]
    assert len(sequences) == sum((len(w) - 1) // LENGTH for w in whole)
    x, y = sequences.batch(np.arange(len(sequences)))
    first = (len(whole[0]) - 1) // LENGTH
    for shard, rows in ((whole[0], slice(0, first)), (whole[1], slice(first, None))):
        assert x[rows].flatten().tolist() == shard[: x[rows].numel()].tolist()
        assert y[rows].flatten().tolist() == shard[1 : x[rows].numel() + 1].tolist()


def test_every_epoch_has_another_order() -> None:
    sampler = BatchSampler(n_sequences=50, batch_size=50, seed=5)
    epochs = [tuple(sampler(step)) for step in range(3)]
    assert len({*epochs}) == 3 and epochs[1] == tuple(BatchSampler(50, 50, 5)(1))


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    """Return a data folder with checksums, whose train split has two shards of three blocks."""
    folder = write_data(tmp_path / 'data')
    splits = edit_meta(folder)
    for shard in splits['train']['shards']:
        path = folder / shard['file']
        path.write_bytes(path.read_bytes()[:8000] * 300)
        shard['tokens'] = 4000 * 300
    for split in splits.values():
        for shard in split['shards']:
            shard['crc32'] = checksums(str(folder / shard['file']))
    assert [len(shard['crc32']) for shard in splits['train']['shards']] == [3, 3]
    edit_meta(folder, splits=splits)
    return folder


@pytest.mark.parametrize('shard', [0, 1])
@pytest.mark.parametrize('token', [0, 600_001, 1_199_999])
def test_damaged_tokens_are_refused_when_they_are_read(
    checked: Path, shard: int, token: int
) -> None:
    """Zeros of a bad copy, or another id. Batches that do not read their block are not held up."""
    path = checked / f'train_{shard:05d}.bin'
    ids = np.fromfile(path, '<u2')
    intact = TokenDataset(str(checked), 'train', 100)
    intact.batch(np.arange(len(intact)))
    ids[token] += 1
    ids.tofile(path)
    data = TokenDataset(str(checked), 'train', 100)
    block = token * 2 >> 20
    begins = np.concatenate([np.arange(11_999) * 100] * 2)
    shards = np.repeat([0, 1], 11_999)
    touches = (begins * 2 >> 20 == block) | ((begins + 100) * 2 >> 20 == block)
    touches &= shards == shard
    assert len(data) == len(touches)
    data.batch(np.flatnonzero(~touches))
    for index in (np.flatnonzero(touches)[0], np.flatnonzero(touches)[-1]):
        with pytest.raises(UserError, match=rf'train_{shard:05d}.bin is damaged near token'):
            data.batch(np.array([index]))


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """Also where an older version has written no checksums."""
    folder = write_data(tmp_path, ids=[1, 2, 29, 30] * 50)
    data = TokenDataset(str(folder), 'train', LENGTH)
    with pytest.raises(UserError, match='has id 30, and its vocabulary 30 ids'):
        data.batch(np.arange(len(data)))
    edit_meta(folder, vocab_size=31)
    TokenDataset(str(folder), 'train', LENGTH).batch(np.arange(len(data)))


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    folder = write_data(tmp_path / 'a')
    splits = edit_meta(folder)
    edit_meta(folder, splits={**splits, 'val': {'tokens': 0, 'shards': []}})
    with pytest.raises(UserError, match=r'no shard of the val split: .* with --held_out above 0'):
        TokenDataset(str(folder), 'val', LENGTH)
    with pytest.raises(UserError, match='not UTF-8: give the folder another name'):
        TokenDataset(str(folder.rename(os.fsdecode(bytes(tmp_path) + b'/caf\xe9'))), 'val', LENGTH)
    folder = write_data(tmp_path / 'b')
    edit_meta(folder, format=None)
    with pytest.raises(UserError, match='is of another version'):
        TokenDataset(str(folder), 'train', LENGTH)


def test_many_shards_need_few_open_files(tmp_path: Path) -> None:
    folder = write_data(tmp_path)
    splits = edit_meta(folder)
    train = splits['train']
    for n in range(2, 111):
        train['shards'].append({'file': f'train_{n:05d}.bin', 'tokens': 4000})
        (folder / f'train_{n:05d}.bin').write_bytes((folder / 'val.bin').read_bytes()[:8000])
    edit_meta(folder, splits=splits)
    opened = len(os.listdir('/proc/self/fd'))
    data = TokenDataset(str(folder), 'train', LENGTH)
    assert len(data.shards) == 111 and len(os.listdir('/proc/self/fd')) == opened
    x, _ = data.batch(np.array([len(data) - 1]))
    assert x[0].tolist() == np.fromfile(folder / 'val.bin', '<u2')[3984:3992].tolist()


def test_a_vocabulary_beyond_the_tokenizers_is_refused(tmp_path: Path) -> None:
    assert load_tokenizer(str(write_data(tmp_path, vocab_size=257))).vocab_size == 257
    with pytest.raises(UserError, match='another byte tokenizer, of vocabulary 258'):
        load_tokenizer(str(write_data(tmp_path, vocab_size=258)))


@pytest.mark.parametrize('n', [1, 7, 10_000])
@pytest.mark.parametrize('count', [0, 1, 5, 7, 20_000])
def test_evenly_spaced_sequences(n: int, count: int) -> None:
    numbers = evenly_spaced(n, count)
    assert len(numbers) == min(n, max(1, count)) and numbers[0] == 0
    gaps = np.diff(np.append(numbers, n))
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


def test_measured_losses_are_sums_over_targets_that_count() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 7, 5).double(), torch.randint(5, (3, 7))
    counts = torch.rand(3, 7) < 0.6
    bos = 3
    is_text = (targets != bos) & counts
    expected = F.cross_entropy(logits.mT, targets, reduction='none').where(counts, 0)
    targets = targets.where(counts, NO_TARGET)
    torch.testing.assert_close(token_losses(logits, targets), expected, rtol=1e-6, atol=0)
    sums = loss_sums(logits, targets, bos).tolist()
    right = [int(counts.sum()), float(expected.sum()), float(expected[is_text].sum())]
    assert sums == pytest.approx(right, rel=1e-6)
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(50) == math.inf and math.isnan(perplexity(math.nan))

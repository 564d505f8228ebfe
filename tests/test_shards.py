"""Data folders: sequences and their order."""
from pathlib import Path

import numpy as np
import pytest
from running import LENGTH, write_data

from configurator import UserError
from nanocem.data import BatchSampler, TokenDataset, evenly_spaced
from nanocem.tokenizers import load_tokenizer


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

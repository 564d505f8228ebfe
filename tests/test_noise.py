"""results/ladder/noise.py: whose document a target is, and how far seeds lie apart."""
import importlib.util
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / 'results/ladder/noise.py'
spec = importlib.util.spec_from_file_location('noise', PATH)
noise = importlib.util.module_from_spec(spec)
spec.loader.exec_module(noise)

BOS = 256
TEXT = [BOS, *b'#!/bin/env python\n"""\nShort words here', BOS, *b'and two', BOS, *b'=' * 9]
DATA = SimpleNamespace(shards=[np.array(TEXT)], length=4)


def test_documents():
    """Each target's document, by counting the marks before it; what all add is the mean."""
    numbers = np.array([0, 5, 7])
    of = noise.documents(DATA, numbers, BOS)
    assert of.shape == (3, 4)
    for row, number in zip(of, numbers, strict=True):
        places = range(4 * number + 1, 4 * number + 5)
        assert row.tolist() == [TEXT[:at + 1].count(BOS) for at in places]
    loss = np.random.default_rng(1).random(of.shape)
    parts = noise.added(loss, of, np.unique(of))
    assert parts.sum() == pytest.approx(loss.mean())
    assert parts[0] == pytest.approx(loss[of == 1].sum() / 12)
    assert [noise.first_line(DATA, n, BOS) for n in (1, 2, 3)] == [
        'Short words here', 'no words', 'no words']


def test_spread():
    """Of one model the standard deviation over its seeds; of models their pooled one."""
    a, b = np.random.default_rng(2).random((2, 3, 5))
    assert noise.spread([a])[1] == pytest.approx(statistics.stdev(a[:, 1]))
    pooled = (statistics.variance(a[:, 1]) + statistics.variance(b[:, 1])) / 2
    assert noise.spread([a, b])[1] == pytest.approx(pooled ** 0.5)

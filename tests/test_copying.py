"""The study of copying, results/copying/measure.py."""
import sys

import pytest
import torch
from running import ROOT

sys.path.insert(0, str(ROOT / 'results/copying'))
import measure


def test_a_text_stands_over_and_over() -> None:
    generator = torch.Generator().manual_seed(1)
    for row in measure.draw_texts(generator):
        lengths = [n for n in range(measure.SHORTEST, measure.LONGEST + 1)
                   if torch.equal(row[n:], row[:-n])]
        assert lengths and row.max() < measure.KINDS


@pytest.mark.parametrize('name', measure.MODELS)
def test_a_run_that_does_not_learn_ends(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(measure, 'LIMIT', 3)
    assert measure.batches_to_copy(measure.MODELS[name], 0.008, 1) == 3


def test_batches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one kind of token all losses are 0: the mean falls from 4.2 by 5% a batch."""
    monkeypatch.setattr(measure, 'KINDS', 1)
    assert measure.batches_to_copy(measure.LLAMA, 0.008, 1) == 28

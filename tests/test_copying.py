"""The study of copying, results/copying/measure.py."""
import sys
from pathlib import Path

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


def test_rows_that_exist_are_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the row that is missing is run, and the others stay as they are."""
    text = (measure.FOLDER / 'steps.csv').read_text()
    kept, last = text.splitlines(keepends=True)[:20], 'Llama with RoPE,0.016,280,280,307,218\n'
    assert kept[-1] == last
    (tmp_path / 'steps.csv').write_text(''.join(kept[:-1]))
    monkeypatch.setattr(measure, 'FOLDER', tmp_path)
    monkeypatch.setattr(measure, 'MODELS', dict(list(measure.MODELS.items())[:6]))
    steps = iter((280, 307, 218))
    monkeypatch.setattr(measure, 'batches_to_copy', lambda *args: next(steps))
    measure.main()
    assert (tmp_path / 'steps.csv').read_text() == ''.join(kept)
    assert next(steps, None) is None

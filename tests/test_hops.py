"""The study of two hops, results/copies/hops.py."""
import sys
from pathlib import Path

import pytest
import torch
from running import ROOT

sys.path.insert(0, str(ROOT / 'results/copies'))
import hops


@pytest.mark.parametrize('questions', hops.QUESTIONS)
def test_the_edges_answer_each_question(questions: str) -> None:
    ids, answers, two = hops.draw(torch.Generator().manual_seed(1), questions)
    assert ids.shape == (hops.BATCH, hops.CONTEXT)
    for row, row_answers, row_two in zip(ids.tolist(), answers.tolist(), two.tolist(), strict=True):
        edges, asked = row[:3 * hops.SYMBOLS], row[3 * hops.SYMBOLS:]
        assert set(edges[2::3]) == {hops.SEPARATOR}
        follows = dict(zip(edges[::3], edges[1::3], strict=True))
        assert sorted(follows) == sorted(follows.values()) == list(range(hops.SYMBOLS))
        assert len(set(asked[1::2])) == hops.ASKED
        for kind, x, answer, two_hops in zip(asked[::2], asked[1::2], row_answers, row_two,
                                             strict=True):
            assert kind == (hops.TWO if two_hops else hops.ONE)
            assert answer == (follows[follows[x]] if two_hops else follows[x])
            # Who knows less than an edge has 1 / 15 of the answers, who knows one hop 1 / 14
            assert answer != x and not (two_hops and answer == follows[x])
    asked_for = {'one': {False}, 'two': {True}, 'mixed': {False, True}}[questions]
    assert set(two.flatten().tolist()) == asked_for


def test_answers_are_spread_evenly() -> None:
    """How often the answer is a symbol, or stands in the n-th edge, is 1 / 16. Edges have no
    order: each symbol is the first of some sequences."""
    generator = torch.Generator().manual_seed(2)
    batches = [hops.draw(generator, 'two') for _ in range(100)]
    ids, answers = (torch.cat([batch[n] for batch in batches]) for n in (0, 1))
    places = (ids[:, None, 1:3 * hops.SYMBOLS:3] == answers[:, :, None]).nonzero()[:, 2]
    for values in (answers.flatten(), places):
        shares = values.bincount(minlength=hops.SYMBOLS) / answers.numel()
        assert shares.sub(1 / hops.SYMBOLS).abs().max() < 0.015
    assert len(set(ids[:, 0].tolist())) == hops.SYMBOLS


@pytest.mark.parametrize('name', hops.MODELS)
def test_rows_that_exist_are_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                           name: str) -> None:
    monkeypatch.setattr(hops, 'FOLDER', tmp_path)
    cells = [('mixed', looks, name, 0.004, 1) for looks in hops.OPTIONS]
    for key, value in dict(LIMIT=2, FRESH=1, cells=lambda: cells).items():
        monkeypatch.setattr(hops, key, value)
    hops.main()
    rows = hops.read_csv(str(tmp_path / 'hops.csv'))
    assert [row['options'] for row in rows] == list(hops.OPTIONS)
    assert {row['batches'] for row in rows} == {'2'} and hops.table(rows).count(name) == len(rows)
    monkeypatch.setattr(hops, 'train_and_measure', None)
    hops.main()
    assert hops.read_csv(str(tmp_path / 'hops.csv')) == rows

"""The study of two hops, results/copies/hops.py."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from running import ROOT

sys.path.insert(0, str(ROOT / 'results/copies'))
import hops

from model import ModelConfig, Transformer


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
    hops.main(['mixed', 'half'])
    hops.main([])
    rows = hops.read_csv(str(tmp_path / 'hops.csv'))
    others = [looks for looks in hops.OPTIONS if looks != 'half']
    assert [row['options'] for row in rows] == ['half', *others]
    assert {row['batches'] for row in rows} == {'2'} and hops.table(rows).count(name) == len(rows)
    monkeypatch.setattr(hops, 'train_and_measure', None)
    hops.main([])
    assert hops.read_csv(str(tmp_path / 'hops.csv')) == rows


@torch.no_grad()
def model_by_hand() -> Transformer:
    """Return one layer with half keys, whose weights are chosen so that two steps take two hops.
    The first head finds x and brings y into the features S1, the second finds S1's y and brings
    the y of y into S2. One-hot tokens stand in the features from 0."""
    D, N = 128, hops.SYMBOLS
    cfg = ModelConfig(d_model=D, n_head=2, n_layer=1, d_mlp=1, vocab_size=hops.TWO + 1, attn='cem',
                      mlp='llama', attn_steps=2, key_shift='half', context_length=hops.CONTEXT)
    model = Transformer(cfg)
    for weights in model.parameters():
        if weights.dim() == 2:
            nn.init.zeros_(weights)
    attn, symbols = model.blocks[0].attn, torch.arange(N)
    nn.init.eye_(model.embedding)
    nn.init.constant_(attn.b_self, -100)
    S1, S2 = 32 + symbols, 64 + symbols
    scale = 10 ** 0.5  # of all weights: scores of some 100 outdo ALiBi's slopes
    half = D // 4
    for head, (reads, writes) in enumerate([(symbols, S1), (S1, S2)]):
        W_Q, W_K = (W.unflatten(0, (2, 2, half))[head] for W in (attn.W_Q, attn.W_K))
        for part in (0, 1):  # the token before and the token, one-hot
            W_K[part, :hops.TWO + 1, :hops.TWO + 1] = scale * torch.eye(hops.TWO + 1)
        W_Q[0, symbols, reads] = scale
        W_Q[1, symbols, writes] = scale
        W_Q[1, N:hops.TWO + 1, :N] = -scale  # no key that is a ";", "?" or "!"
    model.head[symbols, S2] = 1
    model.head[symbols, symbols] = -1  # x is not the answer
    model.head[symbols, S1] = -1
    return model


@torch.no_grad()
def test_two_steps_can_take_two_hops() -> None:
    model = model_by_hand()
    ids, answers, _ = hops.draw(torch.Generator().manual_seed(3), 'two')
    shares = []
    for T in (1, 2):
        model.set_steps(attn_steps=T)
        right = model(ids)[0][:, -2 * hops.ASKED + 1::2].argmax(dim=-1) == answers
        shares.append(right.float().mean())
    assert shares[0] < 0.2 and shares[1] > 0.95, shares

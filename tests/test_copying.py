"""results/copying/measure.py: its texts, when it stops, and what its table says."""
import importlib.util
from pathlib import Path

import torch

from model import ModelConfig

PATH = Path(__file__).parents[1] / 'results/copying/measure.py'
spec = importlib.util.spec_from_file_location('copying', PATH)
copying = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copying)


def test_texts_repeat():
    """Each row has a period, of SHORTEST to LONGEST tokens, and they differ."""
    x = copying.texts(10_000, 64, torch.Generator().manual_seed(0))
    periods = {next(p for p in range(1, 64) if torch.equal(row[p:], row[:-p])) for row in x}
    assert x.shape == (copying.BATCH, 64) and len(periods) > 10
    assert min(periods) >= copying.SHORTEST and max(periods) <= copying.LONGEST


def test_steps_to_copy(monkeypatch):
    """A Llama learns it, at the same step each time; without a rate it does not."""
    monkeypatch.setattr(copying, 'SHORTEST', 4)
    monkeypatch.setattr(copying, 'LONGEST', 8)
    cfg = ModelConfig(size='nano', n_layer=2, d_model=32, n_head=2, d_mlp=64, vocab_size=8,
                      context_length=24, attn='llama', mlp='llama')
    steps = copying.steps_to_copy(cfg, 8e-3, seed=1)
    assert 20 < steps < copying.LIMIT
    monkeypatch.setattr(copying, 'LIMIT', steps + 1)
    assert copying.steps_to_copy(cfg, 8e-3, seed=1) == steps
    assert copying.steps_to_copy(cfg, 1e-9, seed=1) == steps + 1


def test_the_best_rate_counts(monkeypatch):
    monkeypatch.setattr(copying, 'ROWS', {'Llama': '', 'CEM': ''})
    monkeypatch.setattr(copying, 'RATES', (1.0, 2.0))
    found = {'Llama; 1.0; 1': 30, 'Llama; 1.0; 2': 10, 'Llama; 1.0; 3': 20,
             'Llama; 2.0; 1': 15, 'Llama; 2.0; 2': 16, 'Llama; 2.0; 3': copying.LIMIT,
             **{f'CEM; {rate}; {seed}': copying.LIMIT for rate in (1.0, 2.0) for seed in (1, 2, 3)}}
    llama, cem = copying.table(found)[2:]
    assert llama == '| Llama | 2 | 16 | 15, 16, over 1500 | 20, 16 |'
    assert cem.split('|')[3] == ' over 1500 '

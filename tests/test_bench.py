"""bench.py prints a row for each model, and its FLOPs are the model's."""
import importlib.util
import math
import re

import pytest
import torch

import bench
from configurator import UserError, read_options
from model import ModelConfig, Transformer
from nanocem.loss import flops_per_token

TINY = dict(size='nano', context_length=32, batch_size=2, repeats=1, device='cpu')
HAS_PEER = importlib.util.find_spec('transformers') is not None


def test_a_row_for_each_model() -> None:
    rows = {row['model']: row for row in bench.measure(bench.BenchConfig(**TINY))}
    assert list(rows) == [*bench.MODELS, *([bench.PEER] if HAS_PEER else [])]
    for name, files in bench.MODELS.items():
        cfg = ModelConfig(**read_options(files, ModelConfig), size='nano', vocab_size=257,
                          context_length=32)
        model = Transformer(cfg)
        assert rows[name]['parameters'] == model.num_params()
        assert rows[name]['MFLOP/token'] == flops_per_token(model) / 1e6
        assert cfg.attn_steps == cfg.mlp_steps == (2 if 'T = 2' in name else 1)
        assert (cfg.attn == 'llama') == (name == 'Llama')
    if HAS_PEER:  # as many parameters and FLOPs as our Llama
        for column in 'parameters', 'MFLOP/token':
            assert rows[bench.PEER][column] == rows['Llama'][column]


def test_the_table_has_a_column_for_each_value(monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bench, 'peak_flops', lambda device, dtype: 1e12)
    bench.main([f'--{name}={value}' for name, value in TINY.items()])
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith('nano, 2 x 32 tokens, vocabulary 257; CPU')
    table = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    assert table[0] == list(bench.COLUMNS) and len({len(line) for line in lines}) == 1
    assert [row[0] for row in table[2:]] == [*bench.MODELS, *([bench.PEER] if HAS_PEER else [])]
    for _, parameters, speed, ratio, _, mfu, gigabytes in table[2:]:
        assert re.fullmatch(r'[\d,]+', parameters) and float(speed.replace(',', '')) > 0
        assert float(ratio) > 0 and mfu.endswith('%') and gigabytes == '-'


def test_mfu_is_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, 'peak_flops', lambda device, dtype: 1e12)
    row = next(bench.measure(bench.BenchConfig(**TINY)))
    assert math.isclose(row['MFU'], row['MFLOP/token'] * 1e6 * row['tokens/s'] / 1e12)


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(UserError, match='finds no GPU'):
        bench.BenchConfig(device='cuda')

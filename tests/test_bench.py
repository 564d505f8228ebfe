"""bench.py prints a row for each model, and its FLOPs are the model's."""
import re

import pytest
import torch

import bench
from configurator import read_options
from model import ModelConfig, Transformer
from nanocem.hardware import flops_per_token

TINY = dict(size='nano', context_length=32, batch_size=2, repeats=1, device='cpu')


@pytest.mark.slow
def test_a_row_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, 'peak_flops', lambda device, dtype: 1e12)
    rows = {row['model']: row for row in bench.measure(bench.BenchConfig(**TINY))}
    assert list(rows) == list(bench.MODELS)
    for name, row in rows.items():
        files = bench.MODELS['Llama' if name == bench.HF_LLAMA else name]
        wider = {'d_mlp': 96} if name == bench.ONE_TIE else {}
        cfg = ModelConfig(**read_options(files, ModelConfig), size='nano', vocab_size=257,
                          context_length=32, **wider)
        model = Transformer(cfg)
        assert row['parameters'] == model.num_params()
        assert row['MFLOP/token'] == flops_per_token(model) / 1e6
        assert row['MFU'] == pytest.approx(flops_per_token(model) * row['tokens/s'] / 1e12)
        assert cfg.attn_steps == cfg.mlp_steps == (2 if 'T = 2' in name else 1)
        assert (cfg.attn == 'llama') == ('Llama' in name)
    tied, llama = (rows[name]['parameters'] for name in (bench.ONE_TIE, 'Llama, additions'))
    assert tied == pytest.approx(llama, rel=0.01)


def test_the_table_has_a_column_for_each_value(capsys: pytest.CaptureFixture) -> None:
    bench.main([f'--{name}={value}' for name, value in TINY.items()])
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith('nano, 2 x 32 tokens, vocabulary 257; CPU')
    table = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    assert table[0] == list(bench.COLUMNS) and len({len(line) for line in lines}) == 1
    assert [row[0] for row in table[2:]] == list(bench.MODELS)
    for _, parameters, speed, ratio, _, mfu, gigabytes in table[2:]:
        assert re.fullmatch(r'[\d,]+', parameters) and float(speed.replace(',', '')) > 0
        assert float(ratio) > 0 and mfu == gigabytes == '-'


def test_defaults_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, defaults in ((False, ('mini', 257, 128, 32, 'cpu', 'float32', False)),
                          (True, ('134m', 32_000, 2048, 8, 'cuda', 'bfloat16', True))):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda gpu=gpu: gpu)
        cfg = bench.BenchConfig()
        assert (cfg.size, cfg.vocab_size, cfg.context_length, cfg.batch_size, cfg.device,
                cfg.dtype, cfg.compile) == defaults

"""bench.py runs whole on a CPU, and counts what it says it counts."""
import pytest
import torch

import bench
from model import ModelConfig, Transformer
from nanocem.loss import flops_per_token

TINY = dict(size='nano', context_length=32, batch_size=2, repeats=1, device='cpu',
            decode_context=16, decode_tokens=4)


def test_training_beside_peers() -> None:
    rows = {row['model']: row for row in bench.train_table(bench.BenchConfig(**TINY))}
    assert set(bench.VARIANTS) <= set(rows)
    llama = rows['Llama']
    for name, options in bench.VARIANTS.items():
        cfg = ModelConfig(size='nano', vocab_size=257, context_length=32, **options)
        model, row = Transformer(cfg), rows[name]
        assert row['parameters'] == model.num_params()
        assert row['MFLOP/token'] == flops_per_token(model) / 1e6
        assert row['speed / Llama'] == row['tokens/s'] / llama['tokens/s']
        budget = 20 * llama['parameters']
        assert row['hours'] == pytest.approx(budget / row['tokens/s'] / 3600)
        assert cfg.attn_steps == cfg.mlp_steps == (2 if 'T = 2' in name else 1)


def test_attention_and_decoding() -> None:
    cfg = bench.BenchConfig(**TINY)
    attention = {row['attention']: row for row in bench.attention_table(cfg)}
    assert set(attention) == {'Llama', 'CEM, exact RoPE', 'CEM, readable', 'CEM, sdpa'}
    assert attention['CEM, readable']['path'] == 'readable'
    cache = {row['decoding']: row['cache, bytes a token'] for row in bench.decode_table(cfg)}
    # keys and values, of two layers, in float32
    assert cache['Llama'] == 2 * cache['CEM, T = 2, diag_lowrank'] == 4 * 2 * 2 * 32
    assert all(row['ms'] > 0 for row in attention.values())


def test_gpt_peer_has_llamas_flops() -> None:
    """The GPT and the Llama have as many weights that multiply tokens."""
    pytest.importorskip('transformers')
    llama, gpt = (make() for make in bench.peers(bench.BenchConfig(device='cpu', size='mini'),
                                                 64).values())
    s = bench.SIZES['mini']
    weights = s['n_layer'] * (4 * s['d_model'] ** 2 + 3 * s['d_model'] * s['d_mlp'])
    for layers in llama.model.layers, gpt.transformer.h:
        assert sum(p.numel() for p in layers.parameters() if p.ndim == 2) == weights


@pytest.mark.parametrize('table, broken, failed', [
    ('train', 'transformers.LlamaForCausalLM.forward', {'Hugging Face Llama'}),
    ('attention', 'nanocem.attention.sdpa', {'Llama', 'CEM, exact RoPE', 'CEM, sdpa'})])
def test_a_row_that_fails_says_so_and_the_others_stay(
        table: str, broken: str, failed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise RuntimeError('no kernel\nand a page of more')
    pytest.importorskip('transformers')
    monkeypatch.setattr(broken, fails)
    rows = bench.TABLES[table](bench.BenchConfig(**TINY))
    errors = {next(iter(row.values())): row['error'] for row in rows if 'error' in row}
    assert errors == dict.fromkeys(failed, 'no kernel') and len(rows) > len(failed)
    assert '| no kernel' in bench.markdown(rows)


def test_what_gpu_measures_every_table(monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture) -> None:
    """A row without numbers costs no other table, and is named at the end."""
    measured = []

    def table(cfg: bench.BenchConfig, name: str) -> list[bench.Row]:
        measured.append((name, cfg.size))
        return [{'model': 'Llama', 'tokens/s': 1234.5, 'MFU': 0.41234, 'GB': None},
                {'model': 'CEM'} | ({'error': 'no memory'} if name == 'attention' else {})]
    for name in bench.TABLES:
        monkeypatch.setitem(bench.TABLES, name, lambda cfg, name=name: table(cfg, name))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *args: 'NVIDIA H200')
    monkeypatch.setattr(torch, 'set_float32_matmul_precision', lambda precision: None)
    with pytest.raises(SystemExit, match='without numbers: attention at 134m, attention at 162m;'):
        bench.main(['--what=gpu'])
    assert tuple(measured) == bench.GPU_TABLES
    printed = capsys.readouterr().out
    assert 'train: 162m, 8 x 2048 tokens, vocabulary 32,000; NVIDIA H200' in printed
    assert 'decode: 134m, 32 tokens after 1024, vocabulary' in printed and '41.2%' in printed

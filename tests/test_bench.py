"""bench.py runs whole on a CPU, and counts what it says it counts."""
import json

import pytest
import torch

import bench
from model import ModelConfig, Transformer


def test_all_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bench.main(['--size=nano', '--context_length=32', '--batch_size=2', '--repeats=2', '--device=cpu', '--json=out.json',
                '--what=train,attention,decode,cost', '--decode_context=16', '--decode_tokens=4', '--threads=1'])
    found = json.loads((tmp_path / 'out.json').read_text())
    assert (tmp_path / 'results/bench/cost_cpu.png').stat().st_size > 10_000
    train = {row['model']: row for row in found['train']}
    assert set(bench.VARIANTS) <= set(train)
    for name, options in bench.VARIANTS.items():
        model = Transformer(ModelConfig(size='nano', vocab_size=257, context_length=32, **options))
        assert train[name]['parameters'] == model.num_params()
        assert train[name]['MFLOP/token'] == model.flops_per_token() / 1e6
        assert train[name]['speed / Llama'] == train[name]['tokens/s'] / train['Llama']['tokens/s']
    cache = {row['decoding']: row['cache, bytes a token'] for row in found['decode']}
    assert cache['Llama'] == 2 * cache['CEM, T = 2, diag_lowrank'] == 4 * 2 * 2 * 32  # keys and values, of two layers
    assert all(row['ms'] > 0 for row in found['attention'] + found['cost'])
    assert '| Llama | 41,312 |' in capsys.readouterr().out


def test_turns_are_taken_in_turn():
    calls, cfg = [], bench.BenchConfig(device='cpu', repeats=2)
    bench.turns({name: lambda name=name: calls.append(name) for name in 'ab'}, cfg, warmup=1)
    assert ''.join(calls) == 'ab' + 2 * 'aabb'  # a warm-up, then each once to settle and once timed


def test_gpt_peer_has_llamas_flops():
    """Weights that multiply tokens: as many in the GPT as in the Llama."""
    cfg = bench.BenchConfig(device='cpu', size='micro')
    found = bench.peers(cfg, 64)
    if not found:
        pytest.skip('transformers is not installed')
    llama, gpt = found.values()
    s = bench.SIZES['micro']
    block = 4 * s['d_model'] ** 2 + 3 * s['d_model'] * s['d_mlp']
    assert sum(p.numel() for p in llama.model.layers.parameters() if p.ndim == 2) == s['n_layer'] * block
    assert sum(p.numel() for p in gpt.transformer.h.parameters() if p.ndim == 2) == s['n_layer'] * block


@pytest.mark.parametrize('bad', ['--repeats=0', '--size=9m', '--what=speed', '--batch_size=x'])
def test_bad_options(bad):
    with pytest.raises(SystemExit) as error:
        bench.main([bad])
    assert error.value.code not in (0, None) and '\n' not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_cuda_without_a_gpu():
    with pytest.raises(SystemExit, match='no GPU'):
        bench.main(['--device=cuda'])

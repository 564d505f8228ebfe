"""bench.py runs whole on a CPU, and counts what it says it counts."""
import json

import pytest
import torch

import bench
from model import ModelConfig, Transformer
from nanocem.compute import flops_per_token

TINY = dict(size='nano', context_length=32, batch_size=2, repeats=1, device='cpu',
            decode_context=16, decode_tokens=4)
TRAINED = {'model': 'Llama', 'tokens/s': 1234.5, 'MFU': 0.41234, 'GB': None}


def refused(*options: str) -> str:
    """The one line that ends it."""
    with pytest.raises(SystemExit) as error:
        bench.main(list(options))
    assert error.value.code not in (0, None) and '\n' not in str(error.value)
    return str(error.value)


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
        assert row['MFU / Llama'] == pytest.approx(row['MFU'] / llama['MFU'])
        assert row['hours'] == pytest.approx(20 * 41_312 / row['tokens/s'] / 3600)


def test_attention_and_decoding() -> None:
    cfg = bench.BenchConfig(**TINY)
    attention = {row['attention']: row for row in bench.attention_table(cfg)}
    assert set(attention) == {'Llama', 'CEM, exact RoPE', 'CEM, readable', 'CEM, sdpa'}
    assert attention['CEM, readable']['path'] == 'readable'
    cache = {row['decoding']: row['cache, bytes a token'] for row in bench.decode_table(cfg)}
    # keys and values, of two layers, in float32
    assert cache['Llama'] == 2 * cache['CEM, T = 2, diag_lowrank'] == 4 * 2 * 2 * 32
    assert all(row['ms'] > 0 for row in attention.values())


def test_turns_are_taken_in_turn() -> None:
    calls, cfg = [], bench.BenchConfig(device='cpu', repeats=2)
    bench.turns({name: lambda name=name: calls.append(name) for name in 'ab'}, cfg, warmup=1)
    assert ''.join(calls) == 'ab' + 2 * 'aabb'  # a warm-up, then each once to settle and once timed


def test_gpt_peer_has_llamas_flops() -> None:
    """Weights that multiply tokens: as many in the GPT as in the Llama."""
    pytest.importorskip('transformers')
    llama, gpt = (make() for make in bench.peers(bench.BenchConfig(device='cpu', size='micro'),
                                                 64).values())
    s = bench.SIZES['micro']
    weights = s['n_layer'] * (4 * s['d_model'] ** 2 + 3 * s['d_model'] * s['d_mlp'])
    for layers in llama.model.layers, gpt.transformer.h:
        assert sum(p.numel() for p in layers.parameters() if p.ndim == 2) == weights


def test_a_line_to_paste_into_an_issue(monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(bench.TABLES, 'train', lambda cfg: [TRAINED])
    bench.main(['--what=train', '--json', '--size=nano', '--device=cpu'])
    *_, line = capsys.readouterr().out.splitlines()
    content = json.loads(line)
    assert content['tokens/s'] == {'Llama': 1234} and content['MFU'] == {'Llama': 0.4123}
    assert content['torch'] == torch.__version__ and 'CPU' in content['device']
    assert (content['size'], content['batch_size'], content['context_length']) == ('nano', 32, 128)


def test_a_gpus_day_is_the_tables_in_turn(monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture) -> None:
    """A table that the memory does not suffice for costs no other one, and is named."""
    measured = []

    def table(cfg: bench.BenchConfig, name: str) -> list[bench.Row]:
        measured.append((name, cfg.size))
        if name == 'attention':
            words = "[enforce fail] DefaultCPUAllocator: can't allocate memory"
            raise torch.OutOfMemoryError if cfg.size == '134m' else RuntimeError(words)
        return [TRAINED]
    for name in bench.TABLES:
        monkeypatch.setitem(bench.TABLES, name, lambda cfg, name=name: table(cfg, name))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *args: 'NVIDIA H200')
    before = torch.get_float32_matmul_precision()
    assert 'attention at 134m, attention at 162m; give a smaller' in refused('--what=gpu')
    torch.set_float32_matmul_precision(before)
    assert tuple(measured) == bench.GPU_DAY
    said = capsys.readouterr().out
    assert 'train: 162m, 8 x 2048 tokens, vocabulary 32,000; NVIDIA H200' in said
    assert 'decode (not compiled)' in said and '41.2%' in said


def test_bad_options() -> None:
    for bad in ('--repeats=0', '--size=9m', '--what=speed', '--batch_size=x',
                '--what=gpu,train', '--what=gpu --size=nano'):
        refused(*bad.split())
    if not torch.cuda.is_available():
        assert 'no GPU' in refused('--device=cuda')
        assert 'no GPU' in refused('--what=gpu')

"""bench.py runs whole on a CPU, and counts what it says it counts."""
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from running import wait_for

import bench
from model import ModelConfig, Transformer
from nanocem import first_day

TINY = ['--size=nano', '--context_length=32', '--batch_size=2', '--repeats=1', '--device=cpu',
        '--decode_context=16', '--decode_tokens=4', '--threads=1']


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file())


def refused(*options: str) -> str:
    """The one line that ends it."""
    with pytest.raises(SystemExit) as error:
        bench.main([*TINY, *options])
    assert error.value.code not in (0, None) and '\n' not in str(error.value)
    return str(error.value)


def test_all_tables(elsewhere: Path, capsys: pytest.CaptureFixture) -> None:
    bench.main([*TINY, '--what=train,attention,decode,cost', '--json=out.json'])
    found = json.loads(Path('out.json').read_text())
    assert files(elsewhere) == ['out.json', 'out/results/bench/cost_cpu.png']
    assert Path('out/results/bench/cost_cpu.png').stat().st_size > 10_000
    train = {row['model']: row for row in found['train']}
    assert set(bench.VARIANTS) <= set(train)
    llama = train['Llama']
    for name, options in bench.VARIANTS.items():
        cfg = ModelConfig(size='nano', vocab_size=257, context_length=32, **options)
        model, row = Transformer(cfg), train[name]
        assert row['parameters'] == model.num_params()
        assert row['MFLOP/token'] == model.flops_per_token() / 1e6
        assert row['speed / Llama'] == row['tokens/s'] / llama['tokens/s']
        assert row['MFU / Llama'] == pytest.approx(row['MFU'] / llama['MFU'])
        assert row['hours'] == pytest.approx(20 * 41_312 / row['tokens/s'] / 3600)
    cache = {row['decoding']: row['cache, bytes a token'] for row in found['decode']}
    # keys and values, of two layers, in float32
    assert cache['Llama'] == 2 * cache['CEM, T = 2, diag_lowrank'] == 4 * 2 * 2 * 32
    assert all(row['ms'] > 0 for row in found['attention'] + found['cost'])
    of_T = [row['FLOPs / first'] for row in found['cost'] if row['against'] == 'T']
    assert of_T[:4] == sorted(of_T[:4]) and of_T[0] == 1 and 4 < of_T[3] < 8
    assert '| Llama | 41,312 |' in capsys.readouterr().out


def test_published_cost_goes_to_results(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {'at': 1, 'variant': 'CEM', 'ms': 1.0, 'time / first': 1.0, 'FLOPs / first': 1.0}
    monkeypatch.setitem(bench.TABLES, 'cost', lambda cfg: [{'against': 'T', **row}])
    bench.main([*TINY, '--what=cost', '--publish'])
    assert files(elsewhere) == ['results/bench/cost_cpu.png']


def test_turns_are_taken_in_turn() -> None:
    calls, cfg = [], bench.BenchConfig(device='cpu', repeats=2)
    bench.turns({name: lambda name=name: calls.append(name) for name in 'ab'}, cfg, warmup=1)
    assert ''.join(calls) == 'ab' + 2 * 'aabb'  # a warm-up, then each once to settle and once timed


def test_attention_is_the_same_by_every_way() -> None:
    """What is timed beside each other; FlexAttention has no backward pass on a CPU."""
    torch.manual_seed(0)
    cfg = bench.BenchConfig(device='cpu', size='micro', context_length=40, batch_size=2)
    runs, leaves = bench.attention_cores(cfg)
    biased = {name: run for name, run in runs.items() if name.startswith('biased')}
    assert len(biased) == 4
    right = biased.pop('biased: readable')
    grad = torch.randn(2, 3, 40, 16)
    for leaf in leaves:
        leaf.requires_grad_(False)
    for name, run in biased.items():
        torch.testing.assert_close(run(), right(), msg=name)
    del biased['biased: FlexAttention']
    for leaf in leaves:
        leaf.requires_grad_()
    for name, run in biased.items():
        for one, other in zip(*(torch.autograd.grad(way(), leaves, grad, allow_unused=True)
                                for way in (run, right)), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=name)


def test_gpt_peer_has_llamas_flops() -> None:
    """Weights that multiply tokens: as many in the GPT as in the Llama."""
    cfg = bench.BenchConfig(device='cpu', size='micro')
    found = bench.peers(cfg, 64)
    if not found:
        pytest.skip('transformers is not installed')
    llama, gpt = found.values()
    s = bench.SIZES['micro']
    weights = s['n_layer'] * (4 * s['d_model'] ** 2 + 3 * s['d_model'] * s['d_mlp'])
    for layers in llama.model.layers, gpt.transformer.h:
        assert sum(p.numel() for p in layers.parameters() if p.ndim == 2) == weights


@pytest.mark.parametrize('bad', [
    '--repeats=0', '--size=9m', '--what=speed', '--batch_size=x', '--what=gpu,train', '--publish',
    '--threads=100000', '--what=cost --against=T --publish', '--what=gpu --rehearse --publish',
    '--what=gpu --parts=lunch', '--what=gpu --rehearse --json=/no/such/folder/x.json'])
def test_bad_options(bad: str) -> None:
    refused(*bad.split())


def test_a_place_that_cannot_be_written_is_known_before_anything_is_measured(
        elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(cfg: bench.BenchConfig) -> None:
        raise AssertionError('measured')
    monkeypatch.setitem(bench.TABLES, 'train', never)
    Path('folder').mkdir()
    Path('file').write_text('')
    Path('loop').symlink_to('loop')
    Path('notes.json').write_text('{"mine": 1}')
    Path('notes.txt').write_text('mine')
    for path in 'folder', 'no/x.json', 'file/x.json', 'loop', 'notes.json', 'notes.txt', '':
        assert 'json=' in (line := refused('--what=train', f'--json={path}')) or path in line
    assert Path('notes.json').read_text() == '{"mine": 1}'
    assert Path('notes.txt').read_text() == 'mine'


def test_a_full_disk_costs_the_file_and_not_the_numbers(
        capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, data: bytes) -> None:
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(bench, 'write_whole', full)
    monkeypatch.setitem(bench.TABLES, 'train', lambda cfg: [{'model': 'Llama', 'ms': 12.5}])
    assert 'No space left' in refused('--what=train', '--json=x.json')
    assert '| Llama | 12.5 |' in capsys.readouterr().out


def test_memory_that_does_not_suffice_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError(), torch.OutOfMemoryError('CUDA'),
                  RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")):
        def table(cfg: bench.BenchConfig, error: Exception = error) -> None:
            raise error
        monkeypatch.setitem(bench.TABLES, 'train', table)
        assert '--batch_size' in refused('--what=train')


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_cuda_without_a_gpu() -> None:
    assert 'no GPU' in refused('--device=cuda')
    assert '--rehearse' in refused('--what=gpu')


# A GPU's first day

def row(model: str, **values: float) -> dict:
    return {'model': model, 'tokens/s': 5e4, 'MFU': 0.4, 'MFU / Llama': 1.0, 'GB': 9.5,
            'hours': 2.0, 'A100-hours': 6.0, **values}


DONE = {
    'tests': {'command': '-m pytest', 'seconds': 9.0, 'said': '4 passed'},
    'train 134m': {'command': 'bench.py', 'seconds': 9.0, 'train': [row('Llama'), row('CEM')]},
    'train 162m': {'command': 'bench.py', 'seconds': 9.0,
                   'train': [row('Llama'), row('CEM', GB=70.0)]},
    'cost T': {'command': 'bench.py', 'seconds': 9.0, 'cost': [
        {'against': 'T', 'at': T, 'variant': 'CEM', 'ms': 1.0, 'time / first': 1.0,
         'FLOPs / first': 1.0} for T in (1, 2)]},
}


def day(monkeypatch: pytest.MonkeyPatch, done: dict, *options: str) -> list[str]:
    """The parts that a first day ran, when `done` was in its file; two of them always fail."""
    ran = []

    def run(arguments: list[str], limit: float, cwd: str | None) -> tuple[int | str, str]:
        name = next(name for name, command in first_day.PARTS.items()
                    if all(word in ' '.join(arguments) for word in command.split()[1:]))
        ran.append(name)
        if name == 'decode 134m':
            return 'more than 600 s', 'half a table'
        if name == 'cost J':
            return 1, 'Traceback'
        table = arguments[1].removeprefix('--what=')
        if arguments[-1].startswith('--json='):
            rows = [row('Llama')] if table == 'train' else [{'attention': 'ours', 'ms': 2.0}]
            Path(arguments[-1].removeprefix('--json=')).write_text(json.dumps({table: rows}))
        return 0, '3 passed'
    monkeypatch.setattr(first_day, 'run', run)
    if done:
        content = {'machine': f'rehearsal, tiny: {bench.machine(bench.BenchConfig(device="cpu"))}',
                   'parts': done}
        Path('day.json').write_text(json.dumps(content))
    bench.main(['--what=gpu', '--rehearse', '--json=day.json', *options])
    return ran


def test_a_day_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match=r'decode 134m.*600 s.*cost J.*exit code 1'):
        day(monkeypatch, DONE)
    said = capsys.readouterr().out
    assert said.count('measured already') == len(DONE)
    done = json.loads(Path('day.json').read_text())['parts']
    assert first_day.missing_parts(done) == ['decode 134m', 'cost J']
    assert {name: done[name] for name in DONE} == DONE
    ran = day(monkeypatch, {}, '--parts=tests,attention 134m')
    assert ran == []


def test_a_days_page_and_files(elsewhere: Path, monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture) -> None:
    assert day(monkeypatch, DONE, '--parts=attention 162m') == ['attention 162m']
    page = Path('out/results/bench/rehearsal.md').read_text()
    assert page in capsys.readouterr().out
    assert '| CEM | 50,000 | 40.0% | 1 | 9.5 | 2 | 6 | 50,000 | 40.0% | 1 | 70 | 2 | 6 |' in page
    assert '4 passed' in page and '| ours | 2 |' in page
    assert files(elsewhere) == ['day.json', *(f'out/results/bench/rehearsal{end}'
                                              for end in ('.json', '.md', '_cost.png'))]


def test_a_day_belongs_to_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    Path('day.json').write_text('{"machine": "another", "parts": {}}')
    with pytest.raises(SystemExit, match='another kind'):
        bench.main(['--what=gpu', '--rehearse', '--json=day.json'])


def test_only_a_whole_day_is_published(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *args: 'NVIDIA H200')
    monkeypatch.setattr(bench, 'measure_parts', lambda *args: [])
    rest = {name: {'command': '', 'seconds': 1.0} for name in first_day.PARTS}
    whole = {**rest, **DONE}
    for parts in DONE, whole:
        where = bench.machine(bench.BenchConfig(device='cuda'))
        Path('day.json').write_text(json.dumps({'machine': where, 'parts': parts}))
        if parts is DONE:
            with pytest.raises(SystemExit, match='not measured: attention 134m'):
                bench.main(['--what=gpu', '--publish', '--json=day.json'])
            assert files(elsewhere) == ['day.json']
    bench.main(['--what=gpu', '--publish', '--json=day.json'])
    assert files(elsewhere) == ['day.json', *(f'results/bench/nvidia_h200{end}'
                                              for end in ('.json', '.md', '_cost.png'))]


def test_a_part_that_hangs_is_ended_with_all_that_it_started() -> None:
    hang = ('import subprocess, sys\nchild = subprocess.Popen(["sleep", "300"])\n'
            'print("said", child.pid, flush=True)\nchild.wait()')
    start = time.monotonic()
    code, output = first_day.run(['-c', hang], 20.0)
    assert code == 'more than 20 s' and time.monotonic() - start < 200
    word, pid = output.split()
    assert word == 'said'
    state = Path(f'/proc/{pid}/stat')
    # a busy machine ends it later
    wait_for(lambda: not state.exists() or state.read_text().split()[2] == 'Z', 60)


def test_a_part_that_is_cut_off_may_write_first(tmp_path: Path) -> None:
    slow = ('import pathlib, signal, sys, time\n'
            'def end(*_): pathlib.Path(sys.argv[1]).write_text("kept"); sys.exit()\n'
            'signal.signal(signal.SIGTERM, end)\ntime.sleep(300)')
    code, _ = first_day.run(['-c', slow, str(tmp_path / 'x')], 10.0)
    assert code == 'more than 10 s' and (tmp_path / 'x').read_text() == 'kept'


def test_a_parts_exit_code_and_output() -> None:
    code, output = first_day.run(['-c', 'import sys; print("x"); sys.exit("y")'], 300.0)
    assert code == 1 and set(output.split()) == {'x', 'y'}
    assert sys.executable

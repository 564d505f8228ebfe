"""Training: what it computes, and what happens when things break. Runs are real processes, and the
damage is real."""
import contextlib
import io
import itertools
import math
import os
import pty
import random
import re
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

import model as model_py
import running
import train
from model import ModelConfig, Transformer
from nanocem import process, runs
from nanocem.data import TokenDataset, evenly_spaced
from nanocem.hardware import compile_for, peak_flops
from nanocem.runs import checkpoints, load_model, read_checkpoint
from running import RESUME, Run, log, losses, override, result, same, steps, write_data
from train import TrainConfig, choose_dtype, learning_rate, should_compile

CPU = torch.device('cpu')
SMALL = dict(d_model=8, n_layer=2, n_head=2, d_mlp=8, vocab_size=30, context_length=20)


def compiler_works() -> bool:
    return should_compile(TrainConfig(), CPU, run_flops=1e13)


# What training computes

def test_schedule_and_budget_are_the_papers(data: Path, tmp_path: Path) -> None:
    rates = [learning_rate(TrainConfig(), step, steps=1000) for step in range(1000)]
    assert rates[0] == 2e-3 / 50 and rates[49] == 2e-3 == max(rates)
    assert rates[-1] == pytest.approx(2e-4)
    assert rates[525] == pytest.approx(1.1e-3, rel=1e-2)  # half way down the cosine
    assert learning_rate(TrainConfig(), 0, steps=1) == 2e-3
    constant = TrainConfig(warmup=0, final_lr=1)
    assert {learning_rate(constant, step, steps=9) for step in range(9)} == {2e-3}
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "o"}', '--stop_step=1').wait()
    llama = ModelConfig(**SMALL | dict(n_layer=1, context_length=running.LENGTH)).llama()
    tokens = 20 * Transformer(llama).num_params()
    max_steps = math.ceil(tokens / (running.BATCH * running.LENGTH))
    assert run.codes == [train.STOPPED] and f' {max_steps:,} steps of 32 tokens' in run.text


def test_accumulation_and_several_processes_give_one_processs_losses(
    data: Path, tmp_path: Path
) -> None:
    """In as many micro-batches as there are processes, and with Muon."""
    options = [f'--data={data}', steps(6), '--eval_interval=3', '--optimizer=muon']
    kinds = {'one': (1, 4), 'accumulated': (1, 1), 'two': (2, 1), 'four': (4, 1)}
    started = {name: Run(tmp_path, *options, f'--micro_batch_size={micro}',
                         f'--out_dir={tmp_path / name}', world=world)
               for name, (world, micro) in kinds.items()}
    for name, run in started.items():
        assert set(run.wait().codes) == {0}, run.text
        assert run.text.count('/6 | loss ') == run.text.count(' | ETA ') == 2
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / 'one'), rel=1e-6, abs=0)
        test_loss = result(tmp_path / 'one')['test_loss']
        assert result(tmp_path / name)['test_loss'] == pytest.approx(test_loss, rel=1e-6, abs=0)


@pytest.mark.parametrize('options, right', [
    ('--batch_size=127', 'does not divide among 2 processes; try batch_size=128'),
    ('--batch_size=16 --micro_batch_size=3', 'batch_size / processes = 8; .* one of 1, 2, 4, 8')])
def test_what_divides_a_batch_is_named(
    options: str, right: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(SystemExit, match=right):
        train.main([f'--data={data}', '--device=cpu', '--context_length=128', *options.split()])


# Compiler and precision

@pytest.mark.parametrize('dtype, compiled, flops, amx, works, expected', [
    ('auto', None, 1e13, True, True, (torch.bfloat16, True)),
    ('auto', None, 1e12, True, True, (torch.float32, False)),  # too short a run
    ('bfloat16', False, 1e13, True, True, (torch.bfloat16, False)),
    ('auto', None, 1e13, False, True, (torch.float32, True)),
    ('auto', None, 1e13, True, False, (torch.float32, False)),
])
def test_precision_and_compiler(
    dtype: str, compiled: bool | None, flops: float, amx: bool, works: bool, expected: tuple,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError('Failed to find C compiler.\nand a page of more')

    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: amx)
    monkeypatch.setattr(torch, 'compile', (lambda function: function) if works else fails)
    cfg = TrainConfig(dtype=dtype, compile=compiled)
    compiled = should_compile(cfg, CPU, flops)
    assert (choose_dtype(cfg, CPU, compiled), compiled) == expected
    assert works or 'memory: RuntimeError: Failed to find C compiler.\n' in capsys.readouterr().out


@pytest.mark.slow
def test_a_compiled_run_stays_close_and_resumes_to_the_bit(tmp_path: Path) -> None:
    if not compiler_works():
        pytest.skip('needs a C++ compiler')
    data = running.write_data(tmp_path / 'data', vocab_size=257)
    common = [f'--data={data}', '--n_layer=2', steps(4), '--test_tokens=72', '--sample_tokens=3']
    plain = Run(tmp_path, *common, f'--out_dir={tmp_path / "plain"}').wait()
    fast = [*common, '--compile=True', '--dtype=bfloat16']
    straight = Run(tmp_path, *fast, f'--out_dir={tmp_path / "straight"}').wait()
    stopped = Run(tmp_path, *fast, f'--out_dir={tmp_path / "stopped"}', '--stop_step=2').wait()
    resumed = Run(tmp_path, f'--out_dir={tmp_path / "stopped"}', RESUME).wait()
    codes = [run.codes[0] for run in (plain, straight, stopped, resumed)]
    assert codes == [0, 0, train.STOPPED, 0], straight.text + resumed.text
    same(tmp_path / 'straight', tmp_path / 'stopped')
    assert losses(tmp_path / 'straight') == pytest.approx(losses(tmp_path / 'plain'), rel=1e-2)


def test_ddp_leaves_a_gpus_model_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients that it has uncompiled. A CPU stands in for the GPU."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        graphs.append(graph)
        return lookup_backend('aot_eager')(graph, inputs)

    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=backend))
    monkeypatch.setitem(model_py.FEW_LOGITS, 'cpu', (350, 350))
    model, ids = Transformer(ModelConfig(**SMALL, attn_steps=2)), torch.randint(30, (3, 20))
    expected = torch.autograd.grad(model(ids, ids)[1], list(model.parameters()))
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    with (torch._dynamo.config.patch(optimize_ddp=True),
          torch._functorch.config.patch(ban_recompute_materialized_backward=True,
                                        ban_recompute_used_far_apart=True)):
        compiled = compile_for(torch.device('cuda'), model, True)
        DistributedDataParallel(compiled, bucket_cap_mb=0.001)(ids, ids)[1].backward()
    dist.destroy_process_group()
    assert len(graphs) == 1
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)


def test_any_attention_can_be_compiled_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the user's has nothing of BaseAttention. A CPU stands in for the GPU."""
    class Mean(torch.nn.Module):
        def __init__(self, cfg: ModelConfig):
            super().__init__()

        def forward(self, x: torch.Tensor, pos: Any) -> torch.Tensor:
            return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='eager'))
    monkeypatch.setitem(model_py.ATTENTION, 'mean', Mean)
    model, ids = Transformer(ModelConfig(**SMALL, attn='mean')), torch.randint(30, (2, 20))
    with torch._functorch.config.patch(ban_recompute_materialized_backward=True,
                                       ban_recompute_used_far_apart=True):
        compiled = compile_for(torch.device('cuda'), model, False)
        torch.testing.assert_close(compiled(ids)[0], model(ids)[0])


def with_an_unused_parameter() -> None:
    init = Transformer.__init__

    def edited(model: Transformer, *args: Any) -> None:
        init(model, *args)
        model.blocks[0].temperature = torch.nn.Parameter(torch.ones(2))

    Transformer.__init__ = edited


@pytest.mark.parametrize('world', [1, 2])
def test_a_parameter_without_gradient_is_named(world: int, data: Path, tmp_path: Path) -> None:
    """One process goes on. Several could not: DDP waits for its gradient."""
    run = Run(tmp_path, f'--data={data}', steps(3), world=world,
              damage=with_an_unused_parameter).wait()
    assert 'the loss does not depend on blocks.0.temperature, which cannot learn' in run.text
    assert run.codes == ([0] if world == 1 else [1, 1]) and 'Traceback' not in run.text, run.text


# What it says

def on_a_terminal() -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    sys.stderr = Terminal(sys.stderr.buffer)


def test_a_run_shows_a_bar_and_writes_what_it_measures(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    run = Run(tmp_path, f'--data={data}', f'--out_dir={out}', steps(40), '--tensorboard=True',
              damage=on_a_terminal).wait()
    assert run.codes == [0] and 'step/s' in run.text and ' | ETA 0:00:00' in run.text, run.text
    lines = [line for line in runs.read_json_lines(f'{out}/log.jsonl') if 'lr' in line]
    assert lines[-1].keys() == {'step', 'tokens', 'loss', 'lr', 'grad_norm', 'tokens_per_s', 'mfu',
                                'memory_gb', 'skipped', 'seconds'}
    assert lines[-1]['mfu'] is lines[-1]['memory_gb'] is None  # neither is known on a CPU
    events = EventAccumulator(str(out)).Reload().Tags()['scalars']
    assert {'loss', 'val_loss', 'seconds'} <= set(events) and 'mfu' not in events


def test_the_first_step_does_not_count_in_the_time_that_is_left(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It compiles. Of 100 steps all but the first take some milliseconds."""
    late = 0

    def slow_at_first(cfg: train.TrainConfig, step: int, steps: int) -> float:
        nonlocal late
        late += 3 if step == 0 else 0  # seconds
        return 1e-3
    monkeypatch.setattr(train, 'learning_rate', slow_at_first)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    monkeypatch.setattr(train, 'time', clock)
    for interval in 10, 1000:
        options = override(running.TINY, f'--data={data}', f'--out_dir={tmp_path}/{interval}',
                           f'--log_interval={interval}', steps(100), '--eval_interval=100')
        assert train.main(options) == 0
        seconds = re.search(r'step +10/100 .* ETA 0:00:(\d\d)', capsys.readouterr().out)[1]
        assert int(seconds) < 15  # 27 if the first one counts


# Kill and go on

def kill(moment: str, n: int) -> None:
    """Kill this process before the n-th call of a function, or half way through a file."""
    owner, name = MOMENTS[moment]
    original, calls = getattr(owner, name), itertools.count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == n:
            if moment == 'inside a checkpoint':
                path, content = args
                Path(path + '.tmp').write_bytes(bytes(content)[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, deadly)


MOMENTS = {
    'between steps': (train, 'learning_rate'),
    'inside a step': (torch.nn.utils, 'clip_grad_norm_'),
    'before the update': (torch.optim.AdamW, 'step'),
    'while loading': (TokenDataset, 'batch'),
    'inside a checkpoint': (runs, 'write_atomic'),
}


@pytest.mark.slow
@pytest.mark.parametrize('world', [1, 2])
def test_killed_at_random_moments_a_run_ends_as_a_straight_one(
    world: int, data: Path, tmp_path: Path
) -> None:
    """One kill at each of MOMENTS, at a call drawn with seed 20."""
    rng = random.Random(20)
    options = [f'--data={data}', '--checkpoint_interval=3', steps(80)]
    straight = Run(tmp_path, *options, f'--out_dir={tmp_path / "straight"}', world=world)
    out = tmp_path / 'killed'
    for moment in MOMENTS:
        init = [RESUME] if (out / 'config.json').exists() else []
        run = Run(tmp_path, *options, f'--out_dir={out}', *init, world=world,
                  damage=partial(kill, moment, rng.randint(4, 12)))
        assert -signal.SIGKILL in run.wait().codes, run.text
    run = Run(tmp_path, *options, f'--out_dir={out}', RESUME, world=world).wait()
    assert {*run.codes, *straight.wait().codes} == {0}, run.text
    same(tmp_path / 'straight', out)
    assert not list(out.glob('*.tmp'))


# Signals

def test_a_signal_to_one_process_stops_all_and_leaves_a_checkpoint(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'a run'
    options = [f'--data={data}', f'--out_dir={out}', '--checkpoint_interval=100000']
    run = Run(tmp_path, *options, steps(100_000), world=2)
    running.wait_for(lambda: (out / 'log.jsonl').exists() and len(log(out)) > 10)
    os.kill(run.processes[1].pid, signal.SIGTERM)  # rank 1 alone is told
    assert run.wait().codes == [train.STOPPED] * 2
    assert f"go on with --init_from=resume --out_dir='{out}'" in run.text  # as a shell reads it
    step = read_checkpoint(checkpoints(str(out))[-1])['step']
    assert step == log(out)[-1]['step'] >= 10
    # A job that is queued twice takes no step more
    run = Run(tmp_path, f'--out_dir={out}', RESUME, f'--stop_step={step}').wait()
    assert run.codes == [train.STOPPED] and len(losses(out)) == step


def interrupt(times: int, number: int = signal.SIGINT) -> None:
    """Send the process a signal in its first step, so often."""
    signal.signal(number, signal.SIG_DFL)  # who started the tests may ignore it
    original = train.learning_rate

    def learning_rate(*args: Any) -> float:
        for _ in range(times):
            os.kill(os.getpid(), number)
        return original(*args)

    train.learning_rate = learning_rate


@pytest.mark.parametrize('name', ['HUP', 'USR1', 'USR2', 'XCPU', 'PWR'])
def test_a_last_word_is_heard(name: str, data: Path, tmp_path: Path) -> None:
    """Of a terminal that closes, a batch system before the limit, a machine that loses power."""
    number = getattr(signal, f'SIG{name}')
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "o"}', steps(9),
              damage=partial(interrupt, 1, number)).wait()
    assert run.codes == [train.STOPPED] and 'Stopped after step 1;' in run.text
    assert read_checkpoint(checkpoints(str(tmp_path / 'o'))[0])['step'] == 1


def test_a_run_leaves_its_process_as_it_was(data: Path, tmp_path: Path) -> None:
    """Also one that fails. In a thread it cannot note signals, and trains all the same."""
    def process() -> list:
        return [sys.stdout, sys.stderr, *map(signal.getsignal, signal.Signals)]

    before, codes = process(), []
    options = [*running.TINY, f'--data={data}', steps(2)]
    assert train.main([*options, f'--out_dir={tmp_path / "a"}']) == 0
    assert process() == before
    thread = threading.Thread(
        target=lambda: codes.append(train.main([*options, f'--out_dir={tmp_path / "b"}'])))
    thread.start()
    thread.join()
    same(tmp_path / 'a', tmp_path / 'b')
    assert process() == before and codes == [0]
    with pytest.raises(SystemExit, match='consecutive steps'):
        train.main(override(options, steps(40), '--learning_rate=1e6',
                            f'--out_dir={tmp_path / "c"}'))
    assert process() == before


# What is printed is for people, who may be gone

def print_to(fd: int) -> None:
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout, sys.stderr = os.fdopen(1, 'w'), os.fdopen(2, 'w')


def closed_pipe() -> None:
    """Give this process a stdout and stderr that nobody reads."""
    read, write = os.pipe()
    print_to(write)
    os.close(read)


def closed_terminal() -> None:
    """Close the terminal in which this process shows its bar, in the first step."""
    master, slave = pty.openpty()
    print_to(slave)
    os.close(slave)
    assert sys.stderr.isatty()
    original, step = train.learning_rate, itertools.count()

    def learning_rate(*args: Any) -> float:
        if next(step) == 0:
            os.close(master)
        return original(*args)

    train.learning_rate = learning_rate


def full_disk() -> None:
    with open('/dev/full', 'w') as full:
        print_to(full.fileno())


def no_streams() -> None:
    sys.stdout = sys.stderr = sys.__stderr__ = None


def there(folder: Path, damage: Any) -> None:
    """Run in this folder, with this damage, and with a loss of step 3 that is not finite."""
    os.chdir(folder)
    bad_numbers(2)
    damage()


@pytest.mark.parametrize('damage', [closed_pipe, closed_terminal, full_disk, no_streams])
def test_a_run_outlives_its_console(damage: Any, tmp_path: Path) -> None:
    """Also where it prepares a text, skips a step, cannot write best.pt, and shows a sample."""
    (tmp_path / 'a.txt').write_text('A few words. ' * 2000)
    (tmp_path / 'o/best.pt.tmp').mkdir(parents=True)  # so that best.pt cannot be written
    run = Run(tmp_path, '--text=a.txt', '--tokenizer=byte', '--out_dir=o', steps(12),
              '--eval_interval=2', '--sample_tokens=20', '--micro_batch_size=4',
              damage=partial(there, tmp_path, damage))
    assert run.wait().codes == [0], run.text
    assert result(tmp_path / 'o')['skipped'] == 1
    assert checkpoints(str(tmp_path / 'o')) and not (tmp_path / 'o/best.pt').exists()


def interrupt_twice_while_writing() -> None:
    """Send two SIGTERMs while a checkpoint is written."""
    fsync = os.fsync

    def slow_fsync(fd: int) -> None:
        if 'step_' in os.readlink(f'/proc/self/fd/{fd}'):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        fsync(fd)

    os.fsync = slow_fsync


def test_a_second_signal_leaves_no_half_file(data: Path, tmp_path: Path) -> None:
    """It ends the process at once. A checkpoint has its name when it is whole, and what a kill
    leaves beside it a resume removes."""
    out = tmp_path / 'o'
    run = Run(tmp_path, f'--data={data}', f'--out_dir={out}', steps(9), '--checkpoint_interval=2',
              damage=interrupt_twice_while_writing).wait()
    assert run.codes == [-signal.SIGTERM], run.text
    assert [path.name for path in out.glob('*.pt*')] == ['step_00000002.pt.tmp']
    assert Run(tmp_path, f'--out_dir={out}', RESUME).wait().codes == [0]
    assert not list(out.glob('*.tmp'))


def test_bits_per_byte_leave_bos_out(tmp_path: Path) -> None:
    """BOS counts as a token, and neither its loss nor a byte of it in the bits: by a plain loop."""
    ids = [i for n in range(300) for i in (256, *f'{n} words of text'.encode())]
    data, out = write_data(tmp_path / 'data', vocab_size=257, ids=ids), tmp_path / 'o'
    assert train.main([*running.TINY, f'--data={data}', f'--out_dir={out}', steps(1)]) == 0
    model, _ = load_model(str(out))
    n = running.LENGTH
    starts = evenly_spaced((len(ids) - 1) // n, 200 // n) * n
    x, y = (torch.tensor([ids[at + k:at + k + n] for at in starts]) for k in (0, 1))
    nats = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), reduction='none')
    text = nats[y.flatten() != 256]
    assert 0 < len(text) < len(nats)
    assert result(out)['test_loss'] == pytest.approx(float(nats.detach().mean()), rel=1e-5)
    for split in ('val', 'test'):
        bits = result(out)[f'{split}_bits_per_byte']
        assert bits == pytest.approx(float(text.detach().mean()) / math.log(2), rel=1e-5)


def no_checkpoint(after: int, times: int) -> None:
    """Let this process write no checkpoint from this step on, for so many times."""
    write, failed = runs.write_atomic, itertools.count()

    def write_or_fail(path: str, content: Any) -> None:
        step = re.search(r'step_(\d+)\.pt$', path)
        if step and int(step[1]) >= after and next(failed) < times:
            raise OSError(27, 'File too large')
        write(path, content)

    runs.write_atomic = write_or_fail


@pytest.mark.parametrize('after, times, stop, evals, code', [
    (1, 99, 4, 10, 1), (4, 99, 4, 10, 1), (4, 1, 4, 10, 0), (1, 99, 3, 10, 1),
    (3, 99, 3, 10, train.STOPPED), (3, 1, 3, 10, train.STOPPED), (2, 1, 4, 10, 0),
    (1, 99, 3, 1, train.STOPPED)], ids=str)  # the last goes on from best.pt
def test_a_last_checkpoint_that_cannot_be_written_is_told(
    after: int, times: int, stop: int, evals: int, code: int, data: Path, tmp_path: Path
) -> None:
    """It is written once more at the end. A run that could not is no success, but one that stops
    can go on from what is there."""
    out = tmp_path / 'o'
    run = Run(tmp_path, f'--data={data}', f'--out_dir={out}', steps(4), f'--stop_step={stop}',
              '--checkpoint_interval=2', f'--eval_interval={evals}',
              damage=partial(no_checkpoint, after, times)).wait()
    assert run.codes == [code], run.text
    line = f'the checkpoint of step {stop} could not be written: once there is room'
    lost = times == 99
    assert (line in run.text) == lost, run.text
    assert ('Stopped after' in run.text) == (code == train.STOPPED and not lost)
    assert (out / 'result.json').exists() == (stop == 4)
    assert (out / f'step_{stop:08d}.pt').exists() == (not lost)


@pytest.mark.parametrize('env, starts', [
    (dict(SLURM_STEP_NUM_TASKS='2'), False), (dict(OMPI_COMM_WORLD_SIZE='2'), False),
    (dict(PMI_SIZE='4'), False), (dict(SLURM_STEP_NUM_TASKS='2', GROUP_WORLD_SIZE=''), False),
    (dict(SLURM_NTASKS='2'), True),  # in an allocation of two, without srun
    (dict(SLURM_NTASKS='8', SLURM_STEP_NUM_TASKS='1'), True),
    (dict(SLURM_STEP_NUM_TASKS='', OMPI_COMM_WORLD_SIZE=''), True),
    # As docs/slurm.sh starts it, and with a torchrun on each machine that knows no other
    (dict(SLURM_STEP_NUM_TASKS='2', WORLD_SIZE='16', GROUP_WORLD_SIZE='2'), True),
    (dict(SLURM_STEP_NUM_TASKS='2', WORLD_SIZE='8', GROUP_WORLD_SIZE='1'), False),
    (dict(SLURM_STEP_NUM_TASKS='2', WORLD_SIZE='2'), True)], ids=str)
def test_another_launcher_is_told_of_torchrun(env: dict[str, str], starts: bool) -> None:
    """Each of its tasks would train the whole run."""
    expected = contextlib.nullcontext() if starts else pytest.raises(
        ValueError, match=r'^(\w+)=\d: .* would train the whole run: start one torchrun .* '
        r'docs/slurm\.sh does; in a shell that is the only task, unset \1$')
    with expected:
        process.check_launcher(env)


def test_a_launcher_is_checked_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '2')
    with pytest.raises(SystemExit, match='start one torchrun on each machine'):
        train.main(['--data=none'])


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA A100-SXM4-80GB', 312e12), ('A100-PCIE-40GB', 312e12), ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 NVL', 835e12), ('NVIDIA H200', 989e12),
    ('NVIDIA B200', 2250e12), ('NVIDIA RTX A1000', None), ('NVIDIA GB200', None),
    ('NVIDIA A100-SXM4-40GB MIG 1g.5gb', None), ('GRID A100-10C', None), ('NVIDIA A100X', None),
    ('NVIDIA H100 80GB HBM3 MIG 2g.20gb', None), ('NVIDIA GH200 480GB', None)])
def test_a_gpus_peak_is_that_of_its_whole_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: name)
    found = peak_flops(torch.device('cuda'), torch.bfloat16)
    assert math.isnan(found) if peak is None else found == peak


@pytest.mark.parametrize('times, code', [(1, train.STOPPED), (2, -signal.SIGINT)])
def test_ctrl_c_stops_after_the_step_and_a_second_one_at_once(
    times: int, code: int, data: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "o"}', steps(9),
              damage=partial(interrupt, times)).wait()
    assert run.codes == [code] and 'stopping after this step' in run.text
    assert times > 1 or 'Stopped after step 1;' in run.text


def blind() -> None:
    """Let rank 1 see no checkpoint, as where a file system is slow."""
    if os.environ['RANK'] == '1':
        runs.last_checkpoint = lambda path: None


def test_processes_that_read_different_checkpoints_say_so(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(halves[1], tmp_path / 'o')
    run = Run(tmp_path, f'--out_dir={out}', RESUME, world=2, damage=blind).wait()
    said = 'the processes have read different checkpoints, process 0 one of step'
    assert run.codes[0] == 1 and said in run.text


# Numbers

def bad_numbers(*at: int) -> None:
    """On the last rank, which has one micro-batch a step, make the losses of these steps (counted
    from 0) infinite or NaN."""
    original, steps_begun = train.Transformer.forward, itertools.count()

    def forward(model: Transformer, *args: Any, **options: Any) -> Any:
        logits, loss = original(model, *args, **options)
        is_last = os.environ.get('RANK') in ('1', None)
        step = next(steps_begun) if model.training and is_last else None
        return logits, loss * (math.nan if step % 2 else math.inf) if step in at else loss

    train.Transformer.forward = forward


def test_steps_without_finite_numbers_are_skipped_by_all_and_too_many_end_the_run(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'o'
    options = [f'--data={data}', steps(40), f'--out_dir={out}', '--checkpoint_interval=4']
    damage = partial(bad_numbers, 5, 6, 7, *range(21, 40))
    run = Run(tmp_path, *options, world=2, damage=damage).wait()
    assert run.codes == [1, 1] and 'Traceback' not in run.text
    assert run.text.splitlines()[-1] == (
        'train.py: 11 consecutive steps, up to step 32, without finite loss and gradient: try a '
        'lower learning_rate')
    skipped = [line['step'] for line in log(out) if line.get('event') == 'skipped']
    assert skipped == [6, 7, 8, *range(22, 33)]
    assert [s for s, loss in enumerate(losses(out), 1) if loss is None] == skipped[:-1]  # null
    assert 'NaN' not in (out / 'log.jsonl').read_text()
    assert all(torch.isfinite(w).all() for w in running.weights(out).values())
    assert Run(tmp_path, f'--out_dir={out}', RESUME).wait().codes == [0]
    assert result(out)['skipped'] == 3 + 9  # from best.pt, of step 30


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The square root of zero has no derivative."""
    original, steps_begun = train.Transformer.forward, itertools.count(1)

    def forward(model: Transformer, *args: Any, **options: Any) -> Any:
        logits, loss = original(model, *args, **options)
        if model.training and next(steps_begun) == 3:
            loss = loss + (0 * model.head.sum()).sqrt()
        return logits, loss

    monkeypatch.setattr(train.Transformer, 'forward', forward)
    out = tmp_path / 'o'
    assert train.main(override(running.TINY, '--micro_batch_size=4', f'--data={data}',
                               f'--out_dir={out}', steps(5))) == 0
    (event,) = [line for line in log(out) if line.get('event') == 'skipped']
    assert event['step'] == 3 and event['loss'] > 0 and event['grad_norm'] is None
    assert result(out)['skipped'] == 1
    assert all(torch.isfinite(w).all() for w in running.weights(out).values())

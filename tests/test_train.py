"""Training: what it computes, and what happens when things break. Runs are real processes, and the
damage is real."""

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nanocem.health import Health
from nanocem.schedule import Schedule
from running import (
    BATCH,
    FORK,
    LENGTH,
    ROOT,
    TINY,
    VOCAB,
    Run,
    assert_one_line,
    edit_meta,
    free_port,
    log,
    losses,
    make_trainer,
    same,
    steps,
    wait_for,
    weights,
    write_data,
)

import configurator
import train
from model import ModelConfig, Transformer
from nanocem import fast, runs
from nanocem.runs import checkpoints, read_checkpoint
from nanocem.shards import Sequences
from nanocem.world import start_world
from train import TrainConfig

# What training computes


def fresh(n: int, cfg: TrainConfig) -> Schedule:
    """The schedule that train.py makes for a run of n steps."""
    warmup = round(cfg.warmup * n)
    return Schedule(n, warmup, cfg.learning_rate, cfg.final_lr, start=warmup)


def test_schedule_and_budget_are_the_papers() -> None:
    cfg = TrainConfig(learning_rate=2e-3)
    rates = [fresh(1000, cfg)(s) for s in range(1000)]
    assert (
        rates[0] == 2e-3 / 50
        and rates[49] == 2e-3 == max(rates)
        and rates[-1] == pytest.approx(2e-4)
    )
    assert rates[525] == pytest.approx(1.1e-3, rel=1e-2)  # half way down the cosine
    assert fresh(1, cfg)(0) == 2e-3
    expected = {'86m': 6590, '108m': 8244, '134m': 10_232, '162m': 12_422}
    for size, n in expected.items():
        with torch.device('meta'):
            params = Transformer(ModelConfig(size=size).llama()).num_params()
        assert math.ceil(20 * params / (128 * 2048)) == n
    big = ModelConfig(size='256m')
    assert (
        big.n_layer + big.extra_layers == big.llama().n_layer + 2 and big.llama().extra_layers == 0
    )


def test_decay_on_matrices_only_and_optimizer_as_the_paper(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(data, tmp_path)
    decayed, rest = trainer.optimizer.param_groups
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    assert (decayed['weight_decay'], rest['weight_decay'], decayed['betas'], decayed['eps']) == (
        0.1,
        0.0,
        (0.9, 0.95),
        1e-9,
    )
    kinds = [{names[id(p)].split('.')[-1] for p in group['params']} for group in (decayed, rest)]
    assert kinds == [
        {'embedding', 'head', 'W_Q', 'W_K', 'W', 'V', 'U'},
        {'gain', 'p', 'kq_diag', 'b_self', 'b_cross'},
    ]
    assert sum(len(g['params']) for g in (decayed, rest)) == len(names)


def test_accumulation_equals_one_large_batch(data: Path, tmp_path: Path) -> None:
    results = []
    for micro in (1, 4):
        trainer = make_trainer(data, tmp_path / str(micro), micro_batch_size=micro)
        results.append(
            (trainer.train_step(), [p.detach().clone() for p in trainer.model.parameters()])
        )
    (a, ps), (b, qs) = results
    assert a == pytest.approx(b, rel=1e-5)
    assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(ps, qs, strict=True))


def test_bfloat16_steps_stay_close(data: Path, tmp_path: Path) -> None:
    plain, bf16 = (
        make_trainer(data, tmp_path / d, dtype=d).train_step()[0] for d in ('float32', 'bfloat16')
    )
    assert bf16 == pytest.approx(plain, rel=2e-2) and bf16 != plain


@pytest.mark.skipif(not fast.compiles(torch.device('cpu')), reason='needs a C++ compiler')
def test_compiled_steps_stay_close(tmp_path: Path) -> None:
    """One graph serves all blocks' steps, one their evaluation; smaller batches and sampling run
    as they are."""
    data = write_data(tmp_path / 'data', vocab_size=257)
    plain, compiled = (make_trainer(data, tmp_path / str(c), compile=c, n_layer=2, sample_tokens=4)
                       for c in (False, True))
    graphs = [graphs_made()]
    for _ in range(3):
        assert compiled.train_step() == pytest.approx(plain.train_step(), rel=1e-3)
    graphs.append(graphs_made())
    tokens = 3 * compiled.cfg.micro_batch_size * compiled.model_cfg.context_length // 2
    of_both = [trainer.evaluate('val', tokens) for trainer in (compiled, plain)]
    assert of_both[0] == pytest.approx(of_both[1], rel=1e-3)
    graphs.append(graphs_made())
    compiled.sample()
    graphs.append(graphs_made())
    assert [b - a for a, b in itertools.pairwise(graphs)] == [1, 1, 0]


def test_a_data_folder_without_its_tokenizer_costs_the_samples_alone(tmp_path: Path) -> None:
    data = write_data(tmp_path / 'data')
    edit_meta(data, tokenizer='llama')
    common = [f'--data={data}', steps(4), '--sample_interval=2']
    asked = Run(tmp_path, *common, '--sample_tokens=3', f'--out_dir={tmp_path / "asked"}').wait()
    plain = Run(tmp_path, *common, f'--out_dir={tmp_path / "plain"}').wait()
    assert asked.codes == plain.codes == [0] and losses(tmp_path / 'asked') == losses(
        tmp_path / 'plain')
    assert asked.text.count('No sample: ') == 2 and 'tokenizer.model is missing' in asked.text


def graphs_made() -> int:
    return torch._dynamo.utils.counters['stats']['unique_graphs']


@pytest.mark.skipif(not fast.compiles(torch.device('cpu')), reason='needs a C++ compiler')
def test_a_compiled_run_resumes_to_the_bit(data: Path, tmp_path: Path) -> None:
    """In bfloat16; one that goes on otherwise says so."""
    common = [f'--data={data}', steps(6), '--compile', '--dtype=bfloat16']
    for name, stops, code in (('whole', (), 0), ('cut', ('--stop_step=3',), train.STOPPED)):
        run = Run(tmp_path, *common, *stops, f'--out_dir={tmp_path / name}').wait()
        assert run.codes == [code]
    shutil.copytree(tmp_path / 'cut', tmp_path / 'changed')
    again = ['--init_from=resume', '--stop_step=100']
    assert Run(tmp_path, *again, '--compile', f'--out_dir={tmp_path / "cut"}').wait().codes == [0]
    same(tmp_path / 'cut', tmp_path / 'whole')
    changed = Run(tmp_path, *again, f'--out_dir={tmp_path / "changed"}').wait()
    assert changed.codes == [0]
    assert 'so far were bfloat16, compiled; from here on bfloat16' in changed.text


def test_precision_and_compiler_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, f32, bf16 = torch.device('cpu'), torch.float32, torch.bfloat16
    amx, found = [True], [True]
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: amx[0])
    monkeypatch.setattr(fast, 'compiles', lambda device: found[0])
    assert fast.precision_and_compiler(cpu, 'auto', None, 1e13) == (bf16, True)
    assert fast.precision_and_compiler(cpu, 'auto', None, 1e12) == (f32, False)
    assert fast.precision_and_compiler(cpu, 'bfloat16', False, 1e13) == (bf16, False)
    amx[0] = False
    assert fast.precision_and_compiler(cpu, 'auto', None, 1e13) == (f32, True)
    found[0] = False
    assert fast.precision_and_compiler(cpu, 'auto', None, 1e13) == (f32, False)
    with pytest.raises(SystemExit, match=r'compile=True: .* does not work'):
        fast.precision_and_compiler(cpu, 'auto', True, 1e13)


COMPILED = [('compiled', 2, ['--compile', '--activation_checkpointing'])]
if not fast.compiles(torch.device('cpu')):
    COMPILED = []


def test_two_processes_and_checkpointing_give_one_processs_losses(
    data: Path, tmp_path: Path
) -> None:
    runs = {}
    for name, world, more in (
        ('one', 1, []),
        ('two', 2, []),
        ('recomputed', 1, ['--activation_checkpointing']),
        *COMPILED,
    ):
        out = tmp_path / name
        assert (
            Run(tmp_path, f'--data={data}', f'--out_dir={out}', steps(20), *more, world=world)
            .wait()
            .codes
            == [0] * world
        )
        runs[name] = losses(out), json.loads((out / 'result.json').read_text())['test_loss']
    assert runs['two'][0] == pytest.approx(runs['one'][0], rel=1e-4) and len(runs['one'][0]) == 20
    assert runs['two'][1] == pytest.approx(runs['one'][1], rel=1e-4)
    assert runs['recomputed'] == runs['one']
    for name, *_ in COMPILED:
        assert runs[name][0] == pytest.approx(runs['one'][0], rel=2e-3)


def test_fresh_runs_with_one_seed_are_equal_to_the_bit(data: Path, tmp_path: Path) -> None:
    outs = [tmp_path / n for n in 'abc']
    for out, seed in zip(outs, (1, 1, 2), strict=True):
        assert Run(
            tmp_path, f'--data={data}', f'--out_dir={out}', steps(12), f'--seed={seed}'
        ).wait().codes == [0]
    same(outs[0], outs[1])
    assert losses(outs[0]) != losses(outs[2])


def prepares() -> None:
    os._exit('prepare_slimpajama' in sys.modules)


def test_training_does_not_import_data_preparation() -> None:
    process = FORK.Process(target=prepares)  # a child that has imported train
    process.start()
    process.join()
    assert process.exitcode == 0


# Kill and go on


class Death:
    """SIGKILL at a chosen moment: the n-th call of a function, before it, or half way through a
    file."""

    def __init__(self, moment: str, n: int):
        self.moment, self.n = moment, n

    def __call__(self) -> None:
        owner, name = {
            'between steps': (train.Trainer, 'tell'),
            'inside a step': (torch.nn.utils, 'clip_grad_norm_'),
            'before the update': (torch.optim.AdamW, 'step'),
            'while loading': (Sequences, 'batch'),
            'inside a checkpoint': (runs, 'write_whole'),
        }[self.moment]
        original, calls = getattr(owner, name), [0]

        def deadly(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == self.n:
                if self.moment == 'inside a checkpoint':
                    path, content = args
                    Path(path + '.tmp').write_bytes(bytes(content)[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, deadly)


@pytest.mark.parametrize('world, kills', [(1, 20), (2, 6)])
def test_killed_at_random_moments_a_run_ends_as_a_straight_one(
    world: int, kills: int, data: Path, tmp_path: Path
) -> None:
    """Seed 20. In half of the lives the moment is a place in the program, else the clock's."""
    rng = random.Random(20)
    options = [f'--data={data}', '--checkpoint_interval=3', steps(150)]
    assert (
        Run(tmp_path, *options, f'--out_dir={tmp_path / "straight"}', world=world).wait().codes
        == [0] * world
    )
    out, killed, lives = tmp_path / 'killed', 0, 0
    while killed < kills:
        lives += 1
        assert lives < 4 * kills, 'the run ended before it could be killed often enough'
        if (out / 'result.json').exists():
            shutil.rmtree(out)  # it got through: start again
        moment = rng.choice(
            [
                'between steps',
                'inside a step',
                'before the update',
                'while loading',
                'inside a checkpoint',
            ]
        )
        by_clock = killed % 2
        death = None if by_clock else Death(moment, rng.randint(1, 12))
        init = ['--init_from=resume'] if (out / 'config.json').exists() else []
        run = Run(tmp_path, *options, f'--out_dir={out}', *init, world=world, damage=death)
        if by_clock:
            time.sleep(rng.uniform(0.15, 0.6))
            for process in run.processes:
                process.kill()
        run.wait()
        killed += -signal.SIGKILL in run.codes
    run = Run(tmp_path, *options, f'--out_dir={out}', '--init_from=resume', world=world).wait()
    assert run.codes == [0] * world, run.text
    same(tmp_path / 'straight', out)
    assert not list(out.glob('*.tmp'))


def test_stopped_and_resumed_equals_straight_to_the_bit(data: Path, tmp_path: Path) -> None:
    """40 steps against 20, a restart, and 20: given --out_dir alone, the options are the run's."""
    options = [f'--data={data}', steps(40)]
    Run(tmp_path, *options, f'--out_dir={tmp_path / "straight"}').wait()
    out = tmp_path / 'stopped'
    assert Run(tmp_path, *options, f'--out_dir={out}', '--stop_step=20').wait().codes == [
        train.STOPPED
    ]
    assert len(losses(out)) == 20
    assert Run(tmp_path, f'--out_dir={out}', '--init_from=resume').wait().codes == [0]
    same(tmp_path / 'straight', out)


# Signals and the clock


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(
    number: int, data: Path, tmp_path: Path
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip('nohup asks for this signal to be ignored, and train.py keeps to it')
    out = tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', '--checkpoint_interval=100000']
    run = Run(tmp_path, *options, steps(100_000))
    wait_for(lambda: 'step     20/' in run.text)
    os.kill(run.processes[0].pid, number)
    run.wait()
    assert run.codes == [train.STOPPED] and signal.Signals(number).name in run.text
    state = read_checkpoint(checkpoints(str(out))[-1])
    assert state['step'] == log(out)[-1]['step'] >= 20
    assert Run(
        tmp_path, f'--out_dir={out}', '--init_from=resume', f'--stop_step={state["step"] + 2}'
    ).wait().codes == [75]
    assert losses(out)


class SlowSteps:
    def __call__(self) -> None:
        original = Sequences.batch

        def slow(self: Sequences, pieces: np.ndarray) -> Any:
            time.sleep(5)
            return original(self, pieces)

        Sequences.batch = slow


def test_a_second_interrupt_stops_at_once(data: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "o"}', damage=SlowSteps())
    wait_for(lambda: 'parameters' in run.text)
    for _ in range(2):
        os.kill(run.processes[0].pid, signal.SIGINT)
        time.sleep(0.3)
    run.processes[0].join(3)
    assert run.codes == [-signal.SIGINT]


def test_max_minutes_stops_by_the_clock_and_one_process_stops_all(
    data: Path, tmp_path: Path
) -> None:
    run = Run(
        tmp_path,
        f'--data={data}',
        f'--out_dir={tmp_path / "o"}',
        '--max_minutes=0.01',
        steps(100_000),
        world=2,
    ).wait()
    assert run.codes == [train.STOPPED] * 2 and 'max_minutes' in run.text
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "p"}', steps(100_000), world=2)
    wait_for(lambda: 'step     10/' in run.text)
    os.kill(run.processes[1].pid, signal.SIGTERM)  # rank 1 alone is told
    assert run.wait().codes == [train.STOPPED] * 2
    assert checkpoints(str(tmp_path / 'p'))


# Elastic

KILL_ONE = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
original = train.Trainer.train_step
def deadly(self):
    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'
    if self.step == 13 and os.environ['RANK'] == '1' and first:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self)
train.Trainer.train_step = deadly
sys.exit(train.main(sys.argv[1:]))
"""


def torchrun(*args: str, cwd: Path, prefix: tuple[str, ...] = (), **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*prefix, sys.executable, '-m', 'torch.distributed.run', *args],
        cwd=cwd,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize('named', [True, False], ids=['out_dir given', 'default out_dir'])
def test_torchrun_restarts_a_killed_group_from_its_last_checkpoint(
    named: bool, data: Path, tmp_path: Path
) -> None:
    options = [*TINY, f'--data={data}', steps(30), '--checkpoint_interval=5']
    straight = tmp_path / 'straight'
    Run(tmp_path, *options, f'--out_dir={straight}', world=2).wait()
    script = tmp_path / 'deadly.py'
    script.write_text(KILL_ONE.format(root=str(ROOT)))
    out = tmp_path / 'out' / 'named'
    process = torchrun(
        '--nproc_per_node=2',
        '--max-restarts=1',
        f'--master_port={free_port()}',
        str(script),
        *options,
        *([f'--out_dir={out}'] if named else []),
        cwd=tmp_path,
    )
    text = process.communicate(timeout=600)[0]
    assert process.returncode == 0 and 'after step 10' in text, text
    (out,) = (tmp_path / 'out').iterdir()
    same(straight, out)


def test_the_number_of_processes_may_change_between_restarts(data: Path, tmp_path: Path) -> None:
    options = [f'--data={data}', steps(30)]
    Run(tmp_path, *options, f'--out_dir={tmp_path / "one"}').wait()
    out = tmp_path / 'changing'
    for n, (world, stop) in enumerate(((2, ['--stop_step=10']), (1, ['--stop_step=20']), (2, []))):
        init = ['--init_from=resume'] if n else []
        Run(tmp_path, *options, f'--out_dir={out}', *stop, *init, world=world).wait()
    assert (
        losses(out) == pytest.approx(losses(tmp_path / 'one'), rel=1e-4) and len(losses(out)) == 30
    )


def test_a_batch_that_does_not_divide_says_what_would(data: Path, tmp_path: Path) -> None:
    run = Run(
        tmp_path, f'--data={data}', f'--out_dir={tmp_path / "o"}', '--batch_size=6', world=2
    ).wait()
    assert_one_line(run, 'batch_size=6', '2 x 2', 'batch_size=8', 'micro_batch_size=1')


@pytest.fixture
def two_hosts() -> Any:
    """Two network namespaces joined by a virtual link: (command prefix of each, names)."""
    names = [f'cem{os.getpid()}{c}' for c in 'ab']

    def ip(*args: str) -> None:
        subprocess.run(['ip', *args], check=True, capture_output=True)

    try:
        for name in names:
            ip('netns', 'add', name)
        ip(
            'link',
            'add',
            'veth0',
            'netns',
            names[0],
            'type',
            'veth',
            'peer',
            'name',
            'veth0',
            'netns',
            names[1],
        )
        for n, name in enumerate(names):
            ip('-n', name, 'addr', 'add', f'10.77.0.{n + 1}/24', 'dev', 'veth0')
            for device in ('lo', 'veth0'):
                ip('-n', name, 'link', 'set', device, 'up')
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            subprocess.run(['ip', 'netns', 'del', name], capture_output=True, check=False)
        pytest.skip(f'needs root and iproute2 for network namespaces: {error}')
    yield names
    for name in names:
        subprocess.run(['ip', 'netns', 'del', name], capture_output=True, check=False)


def on_two_hosts(names: list[str], tmp: Path, *options: str) -> list[subprocess.Popen]:
    return [
        torchrun(
            '--nnodes=2',
            '--nproc_per_node=1',
            f'--node_rank={n}',
            '--master_addr=10.77.0.1',
            '--master_port=29511',
            str(ROOT / 'train.py'),
            *TINY,
            *options,
            cwd=tmp,
            prefix=('ip', 'netns', 'exec', name),
            GLOO_SOCKET_IFNAME='veth0',
        )
        for n, name in enumerate(names)
    ]


def test_two_machines_equal_one_process(two_hosts: list[str], data: Path, tmp_path: Path) -> None:
    Run(tmp_path, f'--data={data}', steps(20), f'--out_dir={tmp_path / "one"}').wait()
    hosts = on_two_hosts(
        two_hosts, tmp_path, f'--data={data}', steps(20), f'--out_dir={tmp_path / "two"}'
    )
    texts = [p.communicate(timeout=120)[0] for p in hosts]
    assert [p.returncode for p in hosts] == [0, 0], texts
    assert losses(tmp_path / 'two') == pytest.approx(losses(tmp_path / 'one'), rel=1e-4)


def test_a_cut_link_ends_both_sides_in_time_with_nothing_corrupt(
    two_hosts: list[str], data: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'o'
    hosts = on_two_hosts(
        two_hosts,
        tmp_path,
        f'--data={data}',
        steps(100_000),
        f'--out_dir={out}',
        '--timeout_minutes=0.1',
        '--checkpoint_interval=5',
    )
    wait_for(lambda: len(checkpoints(str(out))) >= 2)
    subprocess.run(['ip', '-n', two_hosts[0], 'link', 'set', 'veth0', 'down'], check=True)
    start = time.monotonic()
    texts = [p.communicate(timeout=90)[0] for p in hosts]
    assert all(p.returncode not in (0, None) for p in hosts) and time.monotonic() - start < 60
    assert all('lost the others' in text and '--init_from=resume' in text for text in texts), texts
    run = Run(
        tmp_path, f'--out_dir={out}', '--init_from=resume', f'--stop_step={len(losses(out)) + 3}'
    ).wait()
    assert run.codes == [train.STOPPED] and 'damaged' not in run.text
    assert losses(out)


# Numbers


class BadNumbers:
    """On one rank, the losses of some steps (counted from 0) become `value`."""

    def __init__(self, at: range, value: float, rank: int = 0):
        self.at, self.value, self.rank = at, value, rank

    def __call__(self) -> None:
        original, step = train.Transformer.forward, train.Trainer.train_step
        now = [-1]

        def counted(trainer: train.Trainer) -> Any:
            now[0] = trainer.step
            return step(trainer)

        def forward(model: Transformer, *args: Any) -> Any:
            logits, loss = original(model, *args)
            bad = (
                now[0] in self.at and model.training and int(os.environ.get('RANK', 0)) == self.rank
            )
            return logits, loss * self.value if bad else loss

        train.Transformer.forward, train.Trainer.train_step = forward, counted


@pytest.mark.parametrize('world', [1, 2])
def test_a_step_without_finite_numbers_is_skipped_by_all(
    world: int, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'o'
    damage = BadNumbers(range(5, 8), math.nan if world == 1 else math.inf, rank=world - 1)
    run = Run(
        tmp_path, f'--data={data}', steps(15), f'--out_dir={out}', world=world, damage=damage
    ).wait()
    assert run.codes == [0] * world, run.text
    assert [line['step'] for line in log(out) if line.get('event') == 'skipped'] == [6, 7, 8]
    assert log(out)[-2]['skipped'] == 3 and all(
        torch.isfinite(w).all() for w in weights(out).values()
    )
    assert [s for s, loss in enumerate(losses(out), 1) if loss is None] == [6, 7, 8]  # JSON's null


def test_too_many_skipped_steps_end_the_run_and_point_at_checkpoint_and_batch(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'o'
    options = [
        f'--data={data}',
        steps(40),
        f'--out_dir={out}',
        '--checkpoint_interval=4',
        '--max_skipped=3',
    ]
    run = Run(tmp_path, *options, world=2, damage=BadNumbers(range(9, 40), math.nan, rank=1)).wait()
    assert run.codes == [1, 1] and 'Traceback' not in run.text
    line = run.text.splitlines()[-1]
    assert '4 steps in a row' in line and 'batch 12' in line and 'step_00000012.pt' in line
    assert all(torch.isfinite(w).all() for w in weights(out).values())
    assert Run(tmp_path, *options, '--init_from=resume').wait().codes == [0]


def test_a_loss_spike_is_logged(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    Run(
        tmp_path,
        f'--data={data}',
        steps(40),
        f'--out_dir={out}',
        damage=BadNumbers(range(30, 31), 3.0),
    ).wait()
    assert [line['step'] for line in log(out) if line.get('event') == 'spike'] == [31]


def test_a_run_whose_steps_were_all_skipped_is_no_result(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    run = Run(tmp_path, f'--data={data}', steps(4), f'--out_dir={out}',
              damage=BadNumbers(range(9), math.nan)).wait()
    assert run.codes == [1] and 'no model came of 4 steps' in run.text.splitlines()[-1], run.text
    assert 'Traceback' not in run.text and not (out / 'result.json').exists()
    assert 'NaN' not in (out / 'log.jsonl').read_text()


def test_a_model_that_learns_no_context_is_warned_of_once() -> None:
    """After the warm-up and some time: near the entropy of single tokens a warning, below none."""
    for loss, warned in ((3.1, 1), (2.7, 0)):
        health = Health()
        for step in range(150):
            assert not list(health.look(step, loss, 1.0))
        assert len(list(health.no_context(3.15))) == warned
    assert len(list(Health().no_context(3.15))) == 1  # all skipped


def test_the_unigram_entropy_is_the_datas(data: Path, tmp_path: Path) -> None:
    entropy = Sequences(str(data), 'train', LENGTH).unigram_entropy()
    assert entropy == pytest.approx(math.log(VOCAB), abs=0.01)
    trainer = make_trainer(data, tmp_path)
    trainer.step = 2 * trainer.schedule.warmup + 200
    told = []
    trainer.tell = lambda text, **values: told.append(text)
    for _ in range(2):
        trainer.judge(3.4, 1.0)  # log(30) = 3.401
        trainer.step += 1
    assert len(told) == 1 and 'no context learned yet' in told[0] and 'residual' in told[0]


class Screen:
    """stdout is a full disk, or a pipe that nobody reads."""
    def __init__(self, kind: str):
        self.kind = kind

    def __call__(self) -> None:
        reader, writer = os.pipe()
        os.dup2(writer if self.kind == 'closed' else os.open('/dev/full', os.O_WRONLY), 1)
        os.close(reader)


@pytest.mark.parametrize('kind', ['closed', 'full'])
def test_a_run_that_cannot_speak_finishes(kind: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    run = Run(tmp_path, f'--data={data}', steps(4), f'--out_dir={out}', damage=Screen(kind)).wait()
    assert run.codes == [0] and not run.text, run.text
    assert (out / 'result.json').exists() and len(losses(out)) == 4


def test_a_finished_run_is_not_overwritten(data: Path, tmp_path: Path) -> None:
    options = [f'--data={data}', f'--out_dir={tmp_path / "o"}', steps(3)]
    Run(tmp_path, *options).wait()
    assert_one_line(Run(tmp_path, *options).wait(), 'holds a run already', '--init_from=resume')
    assert_one_line(
        Run(tmp_path, f'--out_dir={tmp_path / "none"}', '--init_from=resume').wait(), 'no run in'
    )


VALUES = [
    '0',
    '1',
    '2',
    '3',
    '4',
    '7',
    '-1',
    '0.5',
    '1e-3',
    '1e9K',
    'nan',
    'inf',
    '',
    'None',
    'True',
    'False',
    'abc',
    'cem',
    'llama',
    'none',
    'shared',
    'diag',
    'rope',
    'mini',
]
TRAINED = {'trained': 0, 'refused': 0}


def fuzzed_options() -> st.SearchStrategy:
    """One to four options: any with a value of any kind, those with a set of values mostly with
    one of it, so that valid and contradictory sets occur too; now and then no option at all."""
    hints = {
        k: h
        for c in (TrainConfig, ModelConfig)
        for k, h in typing.get_type_hints(c).items()
        if k
        not in (
            'data',
            'text',
            'tokenizer',
            'out_dir',
            'init_from',
            'device',
            'compile',
            'timeout_minutes',
        )
    }
    sets = {
        k: [a for a in (h, *typing.get_args(h)) if typing.get_origin(a) is typing.Literal]
        for k, h in hints.items()
    }
    own = {k: list(typing.get_args(sets[k][0])) * 20 if sets[k] else [] for k in hints}
    options = [f'--{k}={v}' for k in sorted(hints) for v in VALUES + own[k]]
    return st.lists(
        st.sampled_from(options + ['--', '--x', '--=1', '--attn_step=1', '--size', 'nofile'] * 10),
        min_size=1,
        max_size=4,
    )


@settings(
    max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(fuzzed_options())
def test_any_option_set_trains_or_is_refused_in_one_line(argv: list[str]) -> None:
    data, out = any_option_set_place()
    try:
        given = configurator.read_options([*TINY, *argv], TrainConfig, ModelConfig)
        given |= {'data': str(data), 'out_dir': str(out)}
        cfg = configurator.build(TrainConfig, given)
        world = start_world(cfg.device, cfg.batch_size, cfg.micro_batch_size, 1.0)
        trainer = train.Trainer(
            cfg, {k: v for k, v in given.items() if k in ModelConfig.__dataclass_fields__}, world
        )
        trainer.train_step()
        TRAINED['trained'] += 1
    except SystemExit as error:
        TRAINED['refused'] += 1
        assert isinstance(error.code, str) and '\n' not in error.code
        names = [a.removeprefix('--').partition('=')[0] for a in argv]
        assert any(n in error.code for n in names), (argv, error.code)
    finally:
        torch.use_deterministic_algorithms(False)


def any_option_set_place() -> tuple[Path, Path]:
    base = Path(os.environ.get('TMPDIR', '/tmp')) / f'nanocem-options-{os.getpid()}'
    if not (base / 'data').exists():
        write_data(base / 'data')
    return base / 'data', base / 'out'


def test_option_sets_of_both_kinds_were_tried() -> None:
    """Runs after the property test: it is worth nothing if all its option sets end one way."""
    shutil.rmtree(any_option_set_place()[0].parent)
    print(TRAINED)
    assert min(TRAINED.values()) > 300, TRAINED


# Long


@pytest.mark.slow
def test_soak(data: Path, tmp_path: Path) -> None:
    """20,000 steps: memory, open files and step time at 1,000 and at 20,000 (pytest -m slow -s -k
    soak prints them)."""
    trainer = make_trainer(
        data,
        tmp_path / 'o',
        tokens=20_000 * BATCH * LENGTH,
        log_interval=100,
        checkpoint_interval=500,
    )
    figures, start, original = {}, [time.monotonic()], trainer.train_step

    def measured() -> Any:
        if trainer.step in (1, 1000, 19_000, 19_999):
            rss = (
                int(Path('/proc/self/statm').read_text().split()[1])
                * os.sysconf('SC_PAGESIZE')
                / 1e6
            )
            figures[trainer.step] = (
                rss,
                len(os.listdir('/proc/self/fd')),
                time.monotonic() - start[0],
            )
        return original()

    trainer.train_step = measured
    assert trainer.train(runs.Signals()) == 0
    first, last = (figures[b][2] - figures[a][2] for a, b in ((1, 1000), (19_000, 19_999)))
    print(
        f'\nat 1,000 steps: {figures[1000][0]:.1f} MB, {figures[1000][1]} files, {first:.2f} ms a '
        'step; '
        f'at 20,000: {figures[19_999][0]:.1f} MB, {figures[19_999][1]} files, {last:.2f} ms a step'
    )
    assert figures[19_999][0] < figures[1000][0] + 20 and figures[19_999][1] == figures[1000][1]

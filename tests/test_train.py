"""Training: configuration, data, and what happens when things break. Runs are real processes, and the damage is real."""
import hashlib
import io
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
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

import configurator
import train
from model import ModelConfig, Transformer
from nanocem.runs import checkpoints, read_checkpoint
from nanocem.shards import FORMAT, Order, Pieces
from train import TrainConfig, World, lr_at

ROOT = Path(__file__).parent.parent
FORK = multiprocessing.get_context('forkserver')  # children start with torch already imported
FORK.set_forkserver_preload(['train'])
VOCAB, LENGTH, BATCH = 30, 8, 4
TINY = [f'--d_model=8 --n_layer=1 --n_head=2 --d_mlp=8 --context_length={LENGTH} --batch_size={BATCH} --micro_batch_size=2'
        ' --log_interval=1 --eval_interval=10 --eval_tokens=200 --tensorboard=False --sample_tokens=0 --device=cpu'][0].split()


def write_data(folder: Path, seed: int = 0, tokens: int = 4000, shards: int = 2) -> Path:
    """A folder of random shards as prepare_slimpajama.py writes them, byte tokenizer by name."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, splits = np.random.default_rng(seed), {}
    for split, n in (('train', shards), ('val', 1), ('test', 1)):
        entries = []
        for s in range(n):
            data = rng.integers(0, VOCAB, tokens + 13 * s).astype('<u2').tobytes()
            name = f'train_{s:05d}.bin' if split == 'train' else f'{split}.bin'
            (folder / name).write_bytes(data)
            entries.append({'file': name, 'tokens': len(data) // 2, 'documents': 1,
                            'sha256': hashlib.sha256(data).hexdigest()})
        splits[split] = {'tokens': sum(e['tokens'] for e in entries), 'documents': n, 'shards': entries}
    (folder / 'meta.json').write_text(json.dumps({
        'format': FORMAT, 'tokenizer': 'byte', 'tokenizer_sha256': None, 'vocab_size': VOCAB, 'bos': 0, 'dtype': 'uint16',
        'splits': splits}))
    return folder


@pytest.fixture(scope='session')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp('data'))


def child(argv: list[str], output: str, env: dict[str, str], damage: Any) -> None:
    """In a fresh process: train.main with its output in a file, after `damage` has been done to it."""
    with open(output, 'wb') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ['train.py', *argv]
    os.environ.update(env)
    torch.set_num_threads(1)
    if damage:
        damage()
    try:
        code = train.main(argv)
    except SystemExit as error:  # as the interpreter would end it
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else 1
    sys.stdout.flush()
    os._exit(code)


class Run:
    """One call of train.py, as one process or several."""
    def __init__(self, tmp: Path, *argv: str, world: int = 1, damage: Any = None, env: dict[str, str] | None = None):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        self.outputs, self.processes = [], []
        for rank in range(world):
            self.outputs.append(tmp / f'output-{random.getrandbits(40)}-{rank}.txt')
            group = dict(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR='127.0.0.1',
                         MASTER_PORT=str(port)) if world > 1 else {}
            self.processes.append(FORK.Process(
                target=child, args=([*TINY, *argv], str(self.outputs[-1]), {**group, **(env or {})}, damage)))
            self.processes[-1].start()

    def wait(self, timeout: float = 120) -> 'Run':
        for process in self.processes:
            process.join(timeout)
            assert process.exitcode is not None, f'still running: {self.text}'
        return self

    @property
    def codes(self) -> list[int]:
        return [p.exitcode for p in self.processes]

    @property
    def text(self) -> str:
        return ''.join(p.read_text(errors='replace') for p in self.outputs if p.exists())


def log(out: Path) -> list[dict]:
    """What a run logged, without what depends on the clock and the machine."""
    lines = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ('tokens_per_s', 'mfu', 'memory_gb')} for line in lines]


def losses(out: Path) -> list[float]:
    lines = [line for line in log(out) if 'lr' in line]
    assert [line['step'] for line in lines] == list(range(1, len(lines) + 1)), 'every step once'
    return [line['loss'] for line in lines]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(checkpoints(str(out))[-1])['model']


def same(a: Path, b: Path) -> None:
    """Two runs that ended alike, to the last bit."""
    assert log(a) == log(b)
    for one, other in zip(weights(a).values(), weights(b).values(), strict=True):
        assert torch.equal(one, other)
    assert {k: v for k, v in json.loads((a / 'result.json').read_text()).items() if k != 'seconds'} == {
        k: v for k, v in json.loads((b / 'result.json').read_text()).items() if k != 'seconds'}


def steps(n: int) -> str:
    return f'--tokens={n * BATCH * LENGTH}'


# What training computes

def test_schedule_and_budget_are_the_papers() -> None:
    cfg = TrainConfig(learning_rate=2e-3)
    rates = [lr_at(s, 1000, cfg) for s in range(1000)]
    assert rates[0] == 2e-3 / 50 and rates[49] == 2e-3 == max(rates) and rates[-1] == pytest.approx(2e-4)
    assert rates[525] == pytest.approx(1.1e-3, rel=1e-2)  # half way down the cosine
    assert lr_at(0, 1, cfg) == 2e-3
    expected = {'86m': 6590, '108m': 8244, '134m': 10_232, '162m': 12_422}
    for size, n in expected.items():
        with torch.device('meta'):
            params = Transformer(ModelConfig(size=size).llama()).num_params()
        assert math.ceil(20 * params / (128 * 2048)) == n
    big = ModelConfig(size='256m')
    assert big.n_layer + big.extra_layers == big.llama().n_layer + 2 and big.llama().extra_layers == 0


def test_every_epoch_reads_every_piece_once(data: Path) -> None:
    order = Order(n_pieces=7, batch_size=3, seed=5)
    drawn = np.concatenate([order(s) for s in range(14)])
    for epoch in np.split(drawn, 6):
        assert sorted(epoch) == list(range(7))
    assert list(order(4)) == list(Order(7, 3, 5)(4)) == list(drawn[12:15])  # a function of (seed, step) alone
    assert list(Order(100, 50, 5)(0)) != list(Order(100, 50, 6)(0))
    pieces = Pieces(str(data), 'train', LENGTH)
    whole = [np.fromfile(data / f'train_{s:05d}.bin', '<u2').astype(int) for s in range(2)]
    assert len(pieces) == sum((len(w) - 1) // LENGTH for w in whole)
    x, y = pieces.batch(np.arange(len(pieces)))
    first = (len(whole[0]) - 1) // LENGTH
    for shard, rows in ((whole[0], slice(0, first)), (whole[1], slice(first, None))):
        assert x[rows].flatten().tolist() == shard[:x[rows].numel()].tolist()
        assert y[rows].flatten().tolist() == shard[1:x[rows].numel() + 1].tolist()


def test_decay_on_matrices_only_and_optimizer_as_the_paper(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(data, tmp_path)
    decayed, rest = trainer.optimizer.param_groups
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    assert (decayed['weight_decay'], rest['weight_decay'], decayed['betas'], decayed['eps']) == (0.1, 0.0, (0.9, 0.95), 1e-9)
    kinds = [{names[id(p)].split('.')[-1] for p in group['params']} for group in (decayed, rest)]
    assert kinds == [{'embedding', 'head', 'W_Q', 'W_K', 'W', 'V', 'U'}, {'gain', 'p', 'kq_diag', 'b_self', 'b_cross'}]
    assert sum(len(g['params']) for g in (decayed, rest)) == len(names)


def make_trainer(data: Path, out: Path, **options: Any) -> train.Trainer:
    given = configurator.read_options(TINY, TrainConfig, ModelConfig) | {'data': str(data), 'out_dir': str(out), **options}
    cfg = configurator.build(TrainConfig, given)
    return train.Trainer(cfg, {k: v for k, v in given.items() if k in ModelConfig.__dataclass_fields__},
                         World(0, 1, torch.device('cpu')))


def test_accumulation_equals_one_large_batch(data: Path, tmp_path: Path) -> None:
    results = []
    for micro in (1, 4):
        trainer = make_trainer(data, tmp_path / str(micro), micro_batch_size=micro)
        results.append((trainer.train_step(), [p.detach().clone() for p in trainer.model.parameters()]))
    (a, ps), (b, qs) = results
    assert a == pytest.approx(b, rel=1e-5)
    assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(ps, qs, strict=True))


def test_bfloat16_steps_stay_close(data: Path, tmp_path: Path) -> None:
    plain, bf16 = (make_trainer(data, tmp_path / d, dtype=d).train_step()[0] for d in ('float32', 'bfloat16'))
    assert bf16 == pytest.approx(plain, rel=2e-2) and bf16 != plain


@pytest.mark.slow
def test_compiled_steps_stay_close(data: Path, tmp_path: Path) -> None:
    """Needs a C++ compiler, and a minute."""
    plain, compiled = (make_trainer(data, tmp_path / str(c), compile=c) for c in (False, True))
    for _ in range(3):
        assert compiled.train_step() == pytest.approx(plain.train_step(), rel=1e-4)
    assert compiled.evaluate('val', 100) == pytest.approx(plain.evaluate('val', 100), rel=1e-4)


def test_two_processes_and_checkpointing_give_one_processs_losses(data: Path, tmp_path: Path) -> None:
    runs = {}
    for name, world, more in (('one', 1, []), ('two', 2, []), ('recomputed', 1, ['--activation_checkpointing'])):
        out = tmp_path / name
        assert Run(tmp_path, f'--data={data}', f'--out_dir={out}', steps(20), *more, world=world).wait().codes == [0] * world
        runs[name] = losses(out), json.loads((out / 'result.json').read_text())['test_loss']
    assert runs['two'][0] == pytest.approx(runs['one'][0], rel=1e-4) and len(runs['one'][0]) == 20
    assert runs['two'][1] == pytest.approx(runs['one'][1], rel=1e-4)
    assert runs['recomputed'] == runs['one']


def test_fresh_runs_with_one_seed_are_equal_to_the_bit(data: Path, tmp_path: Path) -> None:
    outs = [tmp_path / n for n in 'abc']
    for out, seed in zip(outs, (1, 1, 2), strict=True):
        assert Run(tmp_path, f'--data={data}', f'--out_dir={out}', steps(12), f'--seed={seed}').wait().codes == [0]
    same(outs[0], outs[1])
    assert losses(outs[0]) != losses(outs[2])


# Kill and go on

class Death:
    """SIGKILL at a chosen moment: the n-th call of a function of train.py, before it, or half way through a file."""
    def __init__(self, moment: str, n: int):
        self.moment, self.n = moment, n

    def __call__(self) -> None:
        owner, name = {'between steps': (train.Trainer, 'report'), 'inside a step': (torch.nn.utils, 'clip_grad_norm_'),
                       'before the update': (torch.optim.AdamW, 'step'), 'while loading': (Pieces, 'batch'),
                       'inside a checkpoint': (train, 'write_whole')}[self.moment]
        original, calls = getattr(owner, name), [0]

        def deadly(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == self.n:
                if self.moment == 'inside a checkpoint':
                    path, content = args
                    Path(path + '.tmp').write_bytes(bytes(content)[:len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(owner, name, deadly)


@pytest.mark.parametrize('world, kills', [(1, 20), (2, 6)])
def test_killed_at_random_moments_a_run_ends_as_a_straight_one(world: int, kills: int, data: Path, tmp_path: Path) -> None:
    """Seed 20. In half of the lives the moment is a place in the program, in the other half the clock's."""
    rng = random.Random(20)
    options = [f'--data={data}', '--checkpoint_interval=3', steps(150)]
    assert Run(tmp_path, *options, f'--out_dir={tmp_path / "straight"}', world=world).wait().codes == [0] * world
    out, killed, lives = tmp_path / 'killed', 0, 0
    while killed < kills:
        lives += 1
        assert lives < 4 * kills, 'the run ended before it could be killed often enough'
        if (out / 'result.json').exists():
            shutil.rmtree(out)  # it got through: start again
        moment = rng.choice(['between steps', 'inside a step', 'before the update', 'while loading', 'inside a checkpoint'])
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
    """40 steps against 20, a restart, and 20: also with only --out_dir given, the options come from the run."""
    options = [f'--data={data}', steps(40)]
    Run(tmp_path, *options, f'--out_dir={tmp_path / "straight"}').wait()
    out = tmp_path / 'stopped'
    assert Run(tmp_path, *options, f'--out_dir={out}', '--stop_step=20').wait().codes == [train.STOPPED]
    assert len(losses(out)) == 20
    assert Run(tmp_path, f'--out_dir={out}', '--init_from=resume').wait().codes == [0]
    same(tmp_path / 'straight', out)


# Checkpoints

@pytest.mark.parametrize('damage', ['cut', 'empty', 'flipped', 'rubbish'])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage: str, data: Path, tmp_path: Path) -> None:
    options, rng = [f'--data={data}', steps(30), '--checkpoint_interval=5'], random.Random(3)
    Run(tmp_path, *options, f'--out_dir={tmp_path / "straight"}').wait()
    out = tmp_path / 'damaged'
    Run(tmp_path, *options, f'--out_dir={out}', '--stop_step=20').wait()
    newest = Path(checkpoints(str(out))[-1])
    whole = newest.read_bytes()
    for place in range(25 if damage == 'flipped' else 1):
        content = bytearray(whole)
        if damage == 'flipped':  # somewhere in the tensors' bytes
            at = int(len(content) * rng.random())
            content[at] ^= 1 << rng.randrange(8)
        newest.write_bytes({'cut': whole[:len(whole) // 3], 'empty': b'', 'rubbish': b'x' * 1000}.get(damage, bytes(content)))
        try:
            state = read_checkpoint(str(newest))
        except ValueError as error:
            assert str(newest) in str(error) and '\n' not in str(error)
        else:  # a bit between the records, which nothing reads
            expected = torch.load(io.BytesIO(whole), weights_only=True)
            assert damage == 'flipped' and all(torch.equal(a, b) for a, b in zip(
                state['model'].values(), expected['model'].values(), strict=True)), place
    newest.write_bytes(whole[:-100])
    run = Run(tmp_path, *options, f'--out_dir={out}', '--init_from=resume').wait()
    assert run.codes == [0] and f'{newest} is damaged' in run.text and 'after step 15' in run.text
    same(tmp_path / 'straight', out)


def test_the_last_checkpoints_are_kept_and_the_best_apart(data: Path, tmp_path: Path) -> None:
    options = ['--checkpoint_interval=4', '--keep_checkpoints=3']
    Run(tmp_path, f'--data={data}', steps(30), f'--out_dir={tmp_path / "o"}', *options).wait()
    assert [os.path.basename(p) for p in checkpoints(str(tmp_path / 'o'))] == [f'step_{s:08d}.pt' for s in (24, 28, 30)]
    best = read_checkpoint(str(tmp_path / 'o' / 'best.pt'))
    evaluated = {line['step']: line['val_loss'] for line in log(tmp_path / 'o') if 'val_loss' in line}
    assert best['best'] == min(evaluated.values()) == evaluated[best['step']]


class FullDisk:
    """No file of this process may grow beyond `limit` bytes: writing fails as on a full disk."""
    def __init__(self, limit: int):
        self.limit = limit

    def __call__(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))


def test_a_full_disk_leaves_the_run_going_and_the_old_checkpoint_whole(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', steps(20), '--checkpoint_interval=2', '--eval_interval=5']
    Run(tmp_path, *options, '--stop_step=6').wait()
    before = {p: Path(p).read_bytes() for p in checkpoints(str(out))}
    run = Run(tmp_path, *options, '--init_from=resume', '--stop_step=16', damage=FullDisk(6000)).wait()
    assert 'not written (File too large)' in run.text and run.codes == [train.STOPPED]
    assert {p: Path(p).read_bytes() for p in checkpoints(str(out))} == before and not list(out.glob('*.tmp'))
    assert Run(tmp_path, *options, '--init_from=resume').wait().codes == [0]
    assert len(losses(out)) == 20


class Malice:
    def __reduce__(self) -> tuple:
        return os.system, (f'touch {self.target}',)


def test_a_malicious_checkpoint_runs_nothing(data: Path, tmp_path: Path) -> None:
    out, malice = tmp_path / 'o', Malice()
    malice.target = tmp_path / 'harm'
    Run(tmp_path, f'--data={data}', f'--out_dir={out}', steps(10), '--stop_step=3').wait()
    torch.save({'model': malice}, checkpoints(str(out))[-1])
    run = Run(tmp_path, f'--out_dir={out}', '--init_from=resume', '--stop_step=4').wait()
    assert 'is damaged' in run.text and run.codes == [train.STOPPED]
    assert not (tmp_path / 'harm').exists()


@pytest.mark.parametrize('change, named', [('--d_model=16', 'd_model=8 (now 16)'), ('--kq_diag=per_head', 'kq_diag=shared'),
                                           ('--vocab_size=64', f'vocab_size={VOCAB} (now 64)')])
def test_another_architecture_is_refused_with_the_fields(change: str, named: str, data: Path, tmp_path: Path) -> None:
    out, other = tmp_path / 'o', tmp_path / 'other'
    options = [f'--data={data}', steps(10), '--stop_step=3']
    Run(tmp_path, *options, f'--out_dir={out}').wait()
    run = Run(tmp_path, *options, f'--out_dir={out}', '--init_from=resume', change).wait()
    assert_one_line(run, named)
    Run(tmp_path, *options, f'--out_dir={other}', change).wait()  # a checkpoint carried over from another run
    shutil.copy(checkpoints(str(out))[-1], checkpoints(str(other))[-1])
    assert_one_line(Run(tmp_path, f'--out_dir={other}', '--init_from=resume', change).wait(), named)


def assert_one_line(run: Run, *words: str) -> None:
    """The run ended with code 1 before its first step, and said why in one line."""
    lines = [line for line in run.text.splitlines() if line]
    assert run.codes == [1] * len(run.codes) and 'Traceback' not in run.text and 'norm' not in run.text, run.text
    assert len(lines) == 1 and all(w in lines[0] for w in words), run.text


# Signals and the clock

@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(number: int, data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', '--checkpoint_interval=100000']
    run = Run(tmp_path, *options, steps(100_000))
    wait_for(lambda: 'step     20/' in run.text)
    os.kill(run.processes[0].pid, number)
    run.wait()
    assert run.codes == [train.STOPPED] and signal.Signals(number).name in run.text
    state = read_checkpoint(checkpoints(str(out))[-1])
    assert state['step'] == log(out)[-1]['step'] >= 20
    assert Run(tmp_path, f'--out_dir={out}', '--init_from=resume', f'--stop_step={state["step"] + 2}').wait().codes == [75]
    assert losses(out)


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(0.02)


class SlowSteps:
    def __call__(self) -> None:
        original = Pieces.batch

        def slow(self: Pieces, pieces: np.ndarray) -> Any:
            time.sleep(5)
            return original(self, pieces)
        Pieces.batch = slow


def test_a_second_interrupt_stops_at_once(data: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "o"}', damage=SlowSteps())
    wait_for(lambda: 'parameters' in run.text)
    for _ in range(2):
        os.kill(run.processes[0].pid, signal.SIGINT)
        time.sleep(0.3)
    run.processes[0].join(3)
    assert run.codes == [-signal.SIGINT]


def test_max_minutes_stops_by_the_clock_and_one_process_stops_all(data: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "o"}', '--max_minutes=0.01', steps(100_000), world=2).wait()
    assert run.codes == [train.STOPPED] * 2 and 'max_minutes' in run.text
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "p"}', steps(100_000), world=2)
    wait_for(lambda: 'step     10/' in run.text)
    os.kill(run.processes[1].pid, signal.SIGTERM)  # rank 1 alone is told
    assert run.wait().codes == [train.STOPPED] * 2
    assert checkpoints(str(tmp_path / 'p'))


# Elastic

KILL_ONE = '''
import os, signal, sys
sys.path.insert(0, {root!r})
import train
original = train.Trainer.train_step
def deadly(self):
    if self.step == 13 and os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self)
train.Trainer.train_step = deadly
sys.exit(train.main(sys.argv[1:]))
'''


def torchrun(*args: str, cwd: Path, prefix: tuple[str, ...] = (), **env: str) -> subprocess.Popen:
    return subprocess.Popen([*prefix, sys.executable, '-m', 'torch.distributed.run', *args], cwd=cwd, text=True,
                            env={**os.environ, 'OMP_NUM_THREADS': '1', **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize('named', [True, False], ids=['out_dir given', 'default out_dir'])
def test_torchrun_restarts_a_killed_group_from_its_last_checkpoint(named: bool, data: Path, tmp_path: Path) -> None:
    options = [*TINY, f'--data={data}', steps(30), '--checkpoint_interval=5']
    straight = tmp_path / 'straight'
    Run(tmp_path, *options, f'--out_dir={straight}', world=2).wait()
    script = tmp_path / 'deadly.py'
    script.write_text(KILL_ONE.format(root=str(ROOT)))
    out = tmp_path / 'out' / ('named' if named else 'mini-cem2-cem2')
    process = torchrun('--nproc_per_node=2', '--max-restarts=1', f'--master_port={free_port()}', str(script), *options,
                       *([f'--out_dir={out}'] if named else []), cwd=tmp_path)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and 'after step 10' in text, text
    same(straight, out)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def test_the_number_of_processes_may_change_between_restarts(data: Path, tmp_path: Path) -> None:
    options = [f'--data={data}', steps(30)]
    Run(tmp_path, *options, f'--out_dir={tmp_path / "one"}').wait()
    out = tmp_path / 'changing'
    for n, (world, stop) in enumerate(((2, ['--stop_step=10']), (1, ['--stop_step=20']), (2, []))):
        init = ['--init_from=resume'] if n else []
        Run(tmp_path, *options, f'--out_dir={out}', *stop, *init, world=world).wait()
    assert losses(out) == pytest.approx(losses(tmp_path / 'one'), rel=1e-4) and len(losses(out)) == 30


def test_a_batch_that_does_not_divide_says_what_would(data: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / "o"}', '--batch_size=6', world=2).wait()
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
        ip('link', 'add', 'veth0', 'netns', names[0], 'type', 'veth', 'peer', 'name', 'veth0', 'netns', names[1])
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
    return [torchrun('--nnodes=2', '--nproc_per_node=1', f'--node_rank={n}', '--master_addr=10.77.0.1', '--master_port=29511',
                     str(ROOT / 'train.py'), *TINY, *options, cwd=tmp, prefix=('ip', 'netns', 'exec', name),
                     GLOO_SOCKET_IFNAME='veth0') for n, name in enumerate(names)]


def test_two_machines_equal_one_process(two_hosts: list[str], data: Path, tmp_path: Path) -> None:
    Run(tmp_path, f'--data={data}', steps(20), f'--out_dir={tmp_path / "one"}').wait()
    hosts = on_two_hosts(two_hosts, tmp_path, f'--data={data}', steps(20), f'--out_dir={tmp_path / "two"}')
    texts = [p.communicate(timeout=120)[0] for p in hosts]
    assert [p.returncode for p in hosts] == [0, 0], texts
    assert losses(tmp_path / 'two') == pytest.approx(losses(tmp_path / 'one'), rel=1e-4)


def test_a_cut_link_ends_both_sides_in_time_with_nothing_corrupt(two_hosts: list[str], data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    hosts = on_two_hosts(two_hosts, tmp_path, f'--data={data}', steps(100_000), f'--out_dir={out}', '--timeout_minutes=0.1',
                         '--checkpoint_interval=5')
    wait_for(lambda: len(checkpoints(str(out))) >= 2)
    subprocess.run(['ip', '-n', two_hosts[0], 'link', 'set', 'veth0', 'down'], check=True)
    start = time.monotonic()
    texts = [p.communicate(timeout=90)[0] for p in hosts]
    assert all(p.returncode not in (0, None) for p in hosts) and time.monotonic() - start < 60
    assert all('lost the others' in text and '--init_from=resume' in text for text in texts), texts
    run = Run(tmp_path, f'--out_dir={out}', '--init_from=resume', f'--stop_step={len(losses(out)) + 3}').wait()
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
            bad = now[0] in self.at and model.training and int(os.environ.get('RANK', 0)) == self.rank
            return logits, loss * self.value if bad else loss
        train.Transformer.forward, train.Trainer.train_step = forward, counted


@pytest.mark.parametrize('world', [1, 2])
def test_a_step_without_finite_numbers_is_skipped_by_all(world: int, data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    damage = BadNumbers(range(5, 8), math.nan if world == 1 else math.inf, rank=world - 1)
    run = Run(tmp_path, f'--data={data}', steps(15), f'--out_dir={out}', world=world, damage=damage).wait()
    assert run.codes == [0] * world, run.text
    assert [line['step'] for line in log(out) if line.get('event') == 'skipped'] == [6, 7, 8]
    assert log(out)[-2]['skipped'] == 3 and all(torch.isfinite(w).all() for w in weights(out).values())
    assert [s for s, loss in enumerate(losses(out), 1) if loss is None] == [6, 7, 8]  # JSON's null


def test_too_many_skipped_steps_end_the_run_and_point_at_checkpoint_and_batch(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    options = [f'--data={data}', steps(40), f'--out_dir={out}', '--checkpoint_interval=4', '--max_skipped=3']
    run = Run(tmp_path, *options, world=2, damage=BadNumbers(range(9, 40), math.nan, rank=1)).wait()
    assert run.codes == [1, 1] and 'Traceback' not in run.text
    line = run.text.splitlines()[-1]
    assert '4 steps in a row' in line and 'batch 12' in line and 'step_00000012.pt' in line
    assert all(torch.isfinite(w).all() for w in weights(out).values())
    assert Run(tmp_path, *options, '--init_from=resume').wait().codes == [0]


def test_a_loss_spike_is_logged(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    Run(tmp_path, f'--data={data}', steps(40), f'--out_dir={out}', damage=BadNumbers(range(30, 31), 3.0)).wait()
    assert [line['step'] for line in log(out) if line.get('event') == 'spike'] == [31]


# Data

def edit_meta(folder: Path, **changes: Any) -> None:
    meta = json.loads((folder / 'meta.json').read_text())
    (folder / 'meta.json').write_text(json.dumps({**meta, **changes}))


def shorten(folder: Path) -> None:
    meta = json.loads((folder / 'meta.json').read_text())
    meta['splits']['val']['shards'][0]['tokens'] = LENGTH
    os.truncate(folder / 'val.bin', 2 * LENGTH)
    (folder / 'meta.json').write_text(json.dumps(meta))


def large_token(folder: Path) -> None:
    tokens = np.fromfile(folder / 'train_00000.bin', '<u2')
    tokens[50] = 40_000
    tokens.tofile(folder / 'train_00000.bin')


CORRUPTIONS = {
    'missing shard': (lambda f: (f / 'train_00001.bin').unlink(), ['train_00001.bin', 'missing']),
    'empty shard': (lambda f: (f / 'train_00001.bin').write_bytes(b''), ['train_00001.bin', '0 bytes', '4013 tokens']),
    'truncated shard': (lambda f: os.truncate(f / 'test.bin', 4000), ['test.bin', '4000 bytes', '4000 tokens']),
    'odd length': (lambda f: (f / 'val.bin').open('ab').write(b'x'), ['val.bin', '8001 bytes']),
    'token outside the vocabulary': (large_token, ['train_00000.bin', 'token 40000', 'vocabulary of 30']),
    'shard shorter than a piece': (shorten, ['val', 'context_length + 1 = 9']),
    'no split': (lambda f: edit_meta(f, splits={}), ['train', 'no shard']),
    'no meta.json': (lambda f: (f / 'meta.json').unlink(), ['meta.json is missing', 'prepare_slimpajama.py']),
    'cut meta.json': (lambda f: os.truncate(f / 'meta.json', 50), ['meta.json is damaged']),
    'meta.json without a key': (lambda f: (f / 'meta.json').write_text(f'{{"format": {FORMAT}}}'), ['meta.json is damaged']),
    'meta.json of no object': (lambda f: (f / 'meta.json').write_text('[1]'), ['meta.json is damaged']),
    'another format': (lambda f: edit_meta(f, format=99), ['format 99']),
    'no folder': (shutil.rmtree, ['meta.json is missing']),
}


@pytest.mark.parametrize('name', CORRUPTIONS)
def test_corrupt_data_is_one_line_before_any_step(name: str, tmp_path: Path) -> None:
    folder = write_data(tmp_path / 'data')
    corrupt, words = CORRUPTIONS[name]
    corrupt(folder)
    assert_one_line(Run(tmp_path, f'--data={folder}', f'--out_dir={tmp_path / "o"}', steps(5)).wait(), *words)
    assert not (tmp_path / 'o').exists()


def test_a_token_outside_the_vocabulary_that_no_sample_saw_is_met_in_its_batch(tmp_path: Path) -> None:
    folder = write_data(tmp_path / 'data', tokens=400_000, shards=1)
    tokens = np.fromfile(folder / 'train_00000.bin', '<u2')
    tokens[5000:8000] = 999  # between two of the places looked at
    tokens.tofile(folder / 'train_00000.bin')
    run = Run(tmp_path, f'--data={folder}', f'--out_dir={tmp_path / "o"}', '--batch_size=1024', '--micro_batch_size=128',
              '--tokens=1M', '--eval_interval=1000', world=2).wait()
    assert 1 in run.codes and 0 not in run.codes and 'token 999' in run.text and 'Traceback' not in run.text, run.text


@pytest.mark.parametrize('change, words', [
    (lambda f: write_data(f, seed=1), ['train fingerprint']),
    (lambda f: edit_meta(f, tokenizer='other'), ['tokenizer=byte (now other)']),
    (lambda f: write_data(f, tokens=4100), ['train tokens=8013 (now 8213)'])], ids=['content', 'tokenizer', 'length'])
def test_data_changed_before_a_resume_is_refused(change: Any, words: list[str], tmp_path: Path) -> None:
    folder, out = write_data(tmp_path / 'data'), tmp_path / 'o'
    Run(tmp_path, f'--data={folder}', f'--out_dir={out}', steps(10), '--stop_step=4').wait()
    change(folder)
    assert_one_line(Run(tmp_path, f'--out_dir={out}', '--init_from=resume').wait(), *words)
    assert read_checkpoint(checkpoints(str(out))[-1])['step'] == 4


def test_a_finished_run_is_not_overwritten(data: Path, tmp_path: Path) -> None:
    options = [f'--data={data}', f'--out_dir={tmp_path / "o"}', steps(3)]
    Run(tmp_path, *options).wait()
    assert_one_line(Run(tmp_path, *options).wait(), 'holds a run already', '--init_from=resume')
    assert_one_line(Run(tmp_path, f'--out_dir={tmp_path / "none"}', '--init_from=resume').wait(), 'no run in')


# Configuration

def options_of(argv: list[str]) -> dict[str, Any]:
    return configurator.read_options(argv, TrainConfig, ModelConfig)


def test_later_options_win_and_types_are_the_fields(tmp_path: Path) -> None:
    config = tmp_path / 'c.py'
    config.write_text('"""Doc."""\nsize = \'86m\'\nlearning_rate = 1\nattn_steps = 3\ntokens = 1_000\n')
    got = options_of([str(config), '--attn_steps=4', '--tokens=3.3B', '--compile', '--max_minutes=None', '--out_dir=123'])
    assert got == {'size': '86m', 'learning_rate': 1.0, 'attn_steps': 4, 'tokens': 3_300_000_000, 'compile': True,
                   'max_minutes': None, 'out_dir': '123'}
    assert isinstance(got['learning_rate'], float) and isinstance(got['tokens'], int)


@pytest.mark.parametrize('argument, words', [
    ('--atn_steps=2', ['atn_steps', 'no such option', 'attn_steps']), ('--size', ['--size=VALUE']),
    ('--size=7b', ['size=7b', 'mini, 86m']), ('--attn_steps=2.5', ['attn_steps=2.5', 'a whole number']),
    ('--attn_steps=two', ['attn_steps=two']), ('--learning_rate=nan', ['a number']), ('--tensorboard=maybe', ['True or False']),
    ('config/none.py', ['config/none.py', 'No such file']), ('size', ['config file size']),
    ('--attn_steps=inf', ['attn_steps'])])
def test_a_bad_option_is_one_clear_line(argument: str, words: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        options_of([argument])
    assert '\n' not in error.value.code and all(w in error.value.code for w in words), error.value.code


@pytest.mark.parametrize('text, words', [
    ('import os', ['c.py:1', 'name = plain value']), ('learning_rate = print(1)', ['c.py:1', 'plain value']),
    ('learning_rate = open("f")', ['c.py:1']), ('a, b = 1, 2', ['c.py:1']), ('size = ', ['not Python']),
    ('size = 3', ['size = 3']),
    ('attn_steps = [1]', ['attn_steps = [1]', 'whole number']), ('d = {}', ['d: no such option'])])
def test_config_files_are_read_not_run(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / 'c.py').write_text(text)
    with pytest.raises(SystemExit) as error:
        options_of([str(tmp_path / 'c.py')])
    assert all(w in error.value.code for w in words), error.value.code


def test_help_lists_every_option(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        options_of(['--help'])
    text = capsys.readouterr().out
    assert error.value.code == 0
    for cls in (TrainConfig, ModelConfig):
        for name in cls.__dataclass_fields__:
            assert f'  --{name}=' in text


@pytest.mark.parametrize('path', sorted((ROOT / 'config').glob('*.py')), ids=lambda p: p.name)
def test_every_config_file_makes_a_model(path: Path) -> None:
    given = options_of([str(path)])
    configurator.build(TrainConfig, given)
    for size in ('mini', '86m', '256m'):
        configurator.build(ModelConfig, {**given, 'size': size})


VALUES = ['0', '1', '2', '3', '4', '7', '-1', '0.5', '1e-3', '1e9K', 'nan', 'inf', '', 'None', 'True', 'False', 'abc', 'cem',
          'llama', 'none', 'shared', 'diag', 'rope', 'mini']
TRAINED = {'trained': 0, 'refused': 0}


def fuzzed_options() -> st.SearchStrategy:
    """One to four options: any with a value of any kind, those with a set of values mostly with one of it, so that valid
    and contradictory sets occur too; now and then no option at all."""
    hints = {k: h for c in (TrainConfig, ModelConfig) for k, h in typing.get_type_hints(c).items()
             if k not in ('data', 'out_dir', 'init_from', 'device', 'compile', 'timeout_minutes')}
    sets = {k: [a for a in (h, *typing.get_args(h)) if typing.get_origin(a) is typing.Literal] for k, h in hints.items()}
    own = {k: list(typing.get_args(sets[k][0])) * 20 if sets[k] else [] for k in hints}
    options = [f'--{k}={v}' for k in sorted(hints) for v in VALUES + own[k]]
    return st.lists(st.sampled_from(options + ['--', '--x', '--=1', '--attn_step=1', '--size', 'nofile'] * 10),
                    min_size=1, max_size=4)


@settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(fuzzed_options())
def test_any_option_set_trains_or_is_refused_in_one_line(argv: list[str]) -> None:
    data, out = any_option_set_place()
    try:
        given = options_of([*TINY, *argv]) | {'data': str(data), 'out_dir': str(out)}
        cfg = configurator.build(TrainConfig, given)
        world = train.start_world(cfg)
        trainer = train.Trainer(cfg, {k: v for k, v in given.items() if k in ModelConfig.__dataclass_fields__}, world)
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
    """20,000 steps: memory, open files and step time at 1,000 and at 20,000 (pytest -m slow -s -k soak prints them)."""
    trainer = make_trainer(data, tmp_path / 'o', tokens=20_000 * BATCH * LENGTH, log_interval=100, checkpoint_interval=500)
    figures, start, original = {}, [time.monotonic()], trainer.train_step

    def measured() -> Any:
        if trainer.step in (1, 1000, 19_000, 19_999):
            rss = int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGESIZE') / 1e6
            figures[trainer.step] = rss, len(os.listdir('/proc/self/fd')), time.monotonic() - start[0]
        return original()
    trainer.train_step = measured
    assert trainer.train(train.Signals()) == 0
    first, last = (figures[b][2] - figures[a][2] for a, b in ((1, 1000), (19_000, 19_999)))
    print(f'\nat 1,000 steps: {figures[1000][0]:.1f} MB, {figures[1000][1]} files, {first:.2f} ms a step; '
          f'at 20,000: {figures[19_999][0]:.1f} MB, {figures[19_999][1]} files, {last:.2f} ms a step')
    assert figures[19_999][0] < figures[1000][0] + 20 and figures[19_999][1] == figures[1000][1]

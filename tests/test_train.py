"""Training: what it computes, and what happens when things break. Runs are real processes, and the
damage is real."""
import importlib
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import running
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import (
    BATCH,
    MODEL_FILES,
    RESUME,
    TINY,
    Run,
    log,
    losses,
    make_trainer,
    result,
    same,
    steps,
)

import configurator
import train
from configurator import UserError
from model import ModelConfig, Transformer
from nanocem import loss, runs
from nanocem.data import TokenDataset
from nanocem.runs import Signals, checkpoints, read_checkpoint
from nanocem.tokenizers import ByteTokenizer
from nanocem.world import Distributed, divide_batch, read_environment, report_errors
from train import TrainConfig, learning_rate

CPU = torch.device('cpu')


# What training computes

def test_schedule_and_budget_are_the_papers(data: Path, tmp_path: Path) -> None:
    rates = [learning_rate(TrainConfig(), step, steps=1000) for step in range(1000)]
    assert rates[0] == 2e-3 / 50 and rates[49] == 2e-3 == max(rates)
    assert rates[-1] == pytest.approx(2e-4)
    assert rates[525] == pytest.approx(1.1e-3, rel=1e-2)  # half way down the cosine
    assert learning_rate(TrainConfig(), 0, steps=1) == 2e-3
    constant = TrainConfig(warmup=0, final_lr=1)
    assert {learning_rate(constant, step, steps=9) for step in range(9)} == {2e-3}
    trainer = make_trainer(data, tmp_path)
    tokens = 20 * Transformer(trainer.model_cfg.llama()).num_params()
    assert trainer.max_steps == math.ceil(tokens / (BATCH * running.LENGTH))


def test_decay_on_matrices_only_and_optimizer_as_the_paper(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(data, tmp_path, preconditioner='diag_lowrank', kq_diag='shared')
    decayed, rest = trainer.optimizers[0].param_groups
    assert decayed['weight_decay'] == 0.1 and rest['weight_decay'] == 0.0
    assert decayed['betas'] == (0.9, 0.95) and decayed['eps'] == 1e-9
    names = {id(p): n for n, p in trainer.raw_model.named_parameters()}
    kinds = [{names[id(p)].split('.')[-1] for p in group['params']} for group in (decayed, rest)]
    assert kinds == [{'embedding', 'head', 'W_Q', 'W_K', 'W', 'V', 'U'},
                     {'gain', 'p', 'kq_diag', 'b_self', 'b_cross'}]
    assert sum(len(g['params']) for g in (decayed, rest)) == len(names)


def test_accumulation_equals_one_large_batch(data: Path, tmp_path: Path) -> None:
    one, four = (make_trainer(data, tmp_path, micro_batch_size=micro) for micro in (1, 4))
    assert one.train_step() == pytest.approx(four.train_step(), rel=1e-5)
    for p, q in zip(one.raw_model.parameters(), four.raw_model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-4)


def graphs_made() -> int:
    return torch._dynamo.utils.counters['stats']['unique_graphs']


def test_compiled_steps_stay_close_and_resume_to_the_bit(halves: Any, tmp_path: Path) -> None:
    """One graph serves all blocks' steps, one their evaluation; smaller batches and sampling run
    uncompiled."""
    if loss.compiler_error(CPU):
        pytest.skip('needs a C++ compiler')
    data = halves[0].parent / 'data'
    plain, compiled = (make_trainer(data, tmp_path, compile=c, n_layer=2, sample_tokens=4)
                       for c in (False, True))
    graphs = [graphs_made()]
    for _ in range(3):
        assert compiled.train_step() == pytest.approx(plain.train_step(), rel=1e-3)
    graphs.append(graphs_made())
    tokens = 3 * compiled.cfg.micro_batch_size * compiled.model_cfg.context_length // 2
    of_both = [trainer.evaluate('val', tokens)[0] for trainer in (compiled, plain)]
    assert of_both[0] == pytest.approx(of_both[1], rel=1e-3)
    graphs.append(graphs_made())
    compiled.log, compiled.tokenizer = lambda *args, **values: None, ByteTokenizer()
    compiled.sample()
    graphs.append(graphs_made())
    assert [b - a for a, b in itertools.pairwise(graphs)] == [1, 1, 0]

    first, again = (make_trainer(data, tmp_path, compile=True, dtype='bfloat16') for _ in range(2))
    for first.step in range(4):
        if first.step == 2:
            first.checkpoint()
        first.train_step()
    again.restore(resume=True)
    for again.step in (2, 3):
        again.train_step()
    for name, w in first.raw_model.state_dict().items():
        assert torch.equal(w, again.raw_model.state_dict()[name])


def test_two_processes_and_checkpointing_give_one_processs_losses(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    kinds = {'two': (2, []), 'recomputed': (1, ['--activation_checkpointing'])}
    if not loss.compiler_error(CPU):
        kinds['compiled'] = 2, ['--compile', '--activation_checkpointing']
    common = [f'--data={halves[0].parent / "data"}', steps(12), '--eval_interval=4']
    started = {name: Run(tmp_path, *common, *more, f'--out_dir={tmp_path / name}', world=world)
               for name, (world, more) in kinds.items()}
    for name, run in started.items():
        assert set(run.wait().codes) == {0}, run.text
        assert run.text.count('/12 | loss ') == run.text.count(' | validation loss ') == 3
        rel = {'two': 1e-4, 'recomputed': 0, 'compiled': 2e-3}[name]
        assert losses(tmp_path / name) == pytest.approx(losses(halves[0]), rel=rel, abs=0)
        test_loss = result(halves[0])['test_loss']
        assert result(tmp_path / name)['test_loss'] == pytest.approx(test_loss, rel=rel, abs=0)


@pytest.mark.parametrize('model', MODEL_FILES)
def test_each_model_file_trains_a_laptop_model(model: str, data: Path, tmp_path: Path) -> None:
    options = [model, 'config/mini.py', f'--data={data}', '--context_length=16', '--compile=False']
    given = configurator.read_options(options, TrainConfig, ModelConfig)
    trainer = train.Trainer(configurator.build(TrainConfig, given), given, Distributed())
    numbers = [trainer.train_step() for trainer.step in range(3)]
    assert all(math.isfinite(loss) and norm > 0 for loss, norm in numbers)


def test_micro_batches_divide_each_processs_share() -> None:
    sizes = {'mini': (16, 128), 'nano': (32, 64), 'paper': (128, 2048)}
    got = [divide_batch(batch, None, processes, length)
           for batch, length in sizes.values() for processes in (1, 2, 4)]
    assert got == [16, 8, 4, 32, 16, 8, 8, 8, 8]
    for micro, batch in ((16, 16), (None, 15)):
        with pytest.raises(UserError, match='right would be'):
            divide_batch(batch, micro, 2, 128)


# What it says

def test_data_without_its_tokenizer_trains_and_is_named_at_the_start(
    data: Path, tmp_path: Path
) -> None:
    lacking = Path(shutil.copytree(data, tmp_path / 'lacking'))
    running.edit_meta(lacking, tokenizer='sentencepiece')
    (lacking / 'tokenizer.model').write_bytes(b'damaged')
    for folder, said, bits in ((data, 'No sample: the model has no token 256', float),
                               (lacking, 'tokenizer.model is not a SentencePiece model; the run '
                                         'goes on, without samples and bits per byte', type(None))):
        out = tmp_path / folder.name
        run = Run(tmp_path, f'--data={folder}', f'--out_dir={out}/o', steps(2),
                  '--sample_tokens=3').wait()
        assert run.codes == [0] and said in run.text, run.text
        assert isinstance(result(out / 'o')['test_bits_per_byte'], bits)
    assert run.text.index('WARNING') < run.text.index('2 steps of')


# Kill and go on

class Death:
    """SIGKILL at a chosen moment: the n-th call of a function, before it, or half way through a
    file."""
    def __init__(self, moment: str, n: int):
        self.moment, self.n = moment, n

    def __call__(self) -> None:
        owner, name = MOMENTS[self.moment]
        original, calls = getattr(owner, name), itertools.count(1)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == self.n:
                if self.moment == 'inside a checkpoint':
                    path, content = args
                    Path(path + '.tmp').write_bytes(bytes(content)[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, deadly)


MOMENTS = {
    'between steps': (train.Trainer, 'count_skips'),
    'inside a step': (torch.nn.utils, 'clip_grad_norm_'),
    'before the update': (torch.optim.AdamW, 'step'),
    'while loading': (TokenDataset, 'batch'),
    'inside a checkpoint': (runs, 'write_atomic'),
}


@pytest.mark.parametrize('world', [1, 2])
def test_killed_at_random_moments_a_run_ends_as_a_straight_one(
    world: int, data: Path, tmp_path: Path
) -> None:
    """One kill at each of MOMENTS, at a call drawn with seed 20."""
    rng = random.Random(20)
    options = [f'--data={data}', '--checkpoint_interval=3', steps(80)]
    straight = Run(tmp_path, *options, f'--out_dir={tmp_path / "straight"}', world=world)
    out = tmp_path / 'killed'
    for moment in [*MOMENTS, 'between steps', 'while loading']:
        init = [RESUME] if (out / 'config.json').exists() else []
        run = Run(tmp_path, *options, f'--out_dir={out}', *init, world=world,
                  damage=Death(moment, rng.randint(4, 12)))
        assert -signal.SIGKILL in run.wait().codes, run.text
    run = Run(tmp_path, *options, f'--out_dir={out}', RESUME, world=world).wait()
    assert {*run.codes, *straight.wait().codes} == {0}, run.text
    same(tmp_path / 'straight', out)
    assert not list(out.glob('*.tmp'))


# Signals and the clock

def test_a_signal_to_one_process_stops_all_and_leaves_a_checkpoint(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'o $x'
    options = [f'--data={data}', f'--out_dir={out}', '--checkpoint_interval=100000']
    run = Run(tmp_path, *options, steps(100_000), world=2)
    running.wait_for(lambda: (out / 'log.jsonl').exists() and len(log(out)) > 10)
    os.kill(run.processes[1].pid, signal.SIGTERM)  # rank 1 alone is told
    assert run.wait().codes == [train.STOPPED] * 2
    assert f"go on with --init_from=resume --out_dir='{out}'" in run.text
    state = read_checkpoint(checkpoints(str(out))[-1])
    assert state['step'] == log(out)[-1]['step'] >= 10
    stop = f'--stop_step={state["step"] + 2}'
    assert Run(tmp_path, f'--out_dir={out}', RESUME, stop).wait().codes == [train.STOPPED]
    assert losses(out)


def interrupted() -> None:
    """The three signals ask for a stop; a second interrupt ends the process."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # whoever started the tests may ignore them
        signals = Signals()
        os.kill(os.getpid(), number)
        assert signals.received == number.name
    os.kill(os.getpid(), signal.SIGINT)


def test_signals_are_taken_in_and_a_second_interrupt_stops_at_once() -> None:
    process = running.FORK.Process(target=interrupted)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGINT


@pytest.mark.parametrize('script, function', [('train', 'find_data'), ('sample', 'load_run')])
def test_an_interrupt_ends_in_one_line(
    script: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(*given: Any) -> None:
        raise KeyboardInterrupt

    module = importlib.import_module(script)
    monkeypatch.setattr(module, function, ctrl_c)
    with pytest.raises(SystemExit, match=r': stopped$'):
        module.main(['--out_dir=o'])


def test_a_stop_before_the_first_step_and_the_line_at_once(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """A job that is queued twice takes no step more."""
    out = Path(shutil.copytree(halves[1], tmp_path / 'o'))
    run = Run(tmp_path, f'--out_dir={out}', RESUME, '--stop_step=6').wait()
    assert run.codes == [train.STOPPED] and 'Stopped after step 6 (stop_step)' in run.text
    assert len(losses(out)) == 6
    run = Run(tmp_path, f'--out_dir={out}', RESUME, damage=interrupt_the_first_step).wait()
    lines = run.text.splitlines()
    assert run.codes == [train.STOPPED] and len(losses(out)) == 7, run.text
    assert lines.index('SIGINT: stopping after this step, with a checkpoint; a second Ctrl-C stops '
                       'at once') < lines.index('the step goes on')


def interrupt_the_first_step() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started the tests may ignore it
    original = train.Trainer.train_step

    def train_step(self: train.Trainer) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        print('the step goes on', flush=True)
        return original(self)

    train.Trainer.train_step = train_step


@pytest.mark.parametrize('error, local_rank, says', [
    (UserError('no such file'), 0, 'no such file'), (UserError('no such file'), 1, ''),
    (UserError('no GPU', everywhere=True), 1, 'no GPU'), (KeyboardInterrupt(), 0, 'stopped'),
    (torch.distributed.DistBackendError('NCCL timed out'), 1,
     'process 1 of 2 failed or lost the others: NCCL timed out'),
    (RuntimeError('shapes cannot be multiplied'), 1, 'RuntimeError: shapes cannot be multiplied'),
    (torch.OutOfMemoryError('CUDA'), 1, 'out of memory: halve micro_batch_size'),
    (RuntimeError('CUBLAS_STATUS_ALLOC_FAILED'), 1, 'out of memory: halve micro_batch_size'),
    (ZeroDivisionError('a bug'), 1, 'ZeroDivisionError: a bug')])
def test_with_nccl_an_error_ends_the_process_without_destructors(
    error: BaseException, local_rank: int, says: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture
) -> None:
    """NCCL's destructor can wait for the other processes; os._exit runs no destructors."""
    codes: list[int] = []
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'get_backend', lambda: 'nccl')
    monkeypatch.setattr(os, '_exit', codes.append)
    with report_errors(Distributed(local_rank, 2, local_rank)):
        raise error
    said = capfd.readouterr().err
    assert codes == [1] and says in said and bool(says) == bool(said)
    assert ('Traceback' in said) == ('Error:' in says)


@pytest.mark.parametrize('env, words', [
    (dict(RANK='1'), 'unset both'), (dict(WORLD_SIZE='0'), 'unset both'),
    (dict(RANK='x'), 'RANK=x in the environment'), (dict(RANK='', WORLD_SIZE=''), '')])
def test_ranks_left_in_the_environment(
    env: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if words:
        with pytest.raises(UserError, match=words):
            read_environment()
    else:
        assert read_environment() == Distributed()


@pytest.mark.parametrize('rank', ['0', '1'])
def test_a_process_that_finds_no_others_says_so(rank: str, data: Path, tmp_path: Path) -> None:
    env = dict(RANK=rank, WORLD_SIZE='2', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1',
               MASTER_PORT=str(running.free_port()))
    run = Run(tmp_path, f'--data={data}', '--timeout_minutes=0.01', env=env).wait(60)
    assert run.codes == [1] and 'Traceback' not in run.text
    assert f'process {rank} of 2 finds no others' in run.text


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


def test_torchrun_restarts_a_killed_group_from_its_last_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*TINY, f'--data={data}', steps(30), '--checkpoint_interval=5']
    straight = Run(tmp_path, *options, f'--out_dir={tmp_path / "straight"}', world=2)
    (tmp_path / 'deadly.py').write_text(KILL_ONE.format(root=str(running.ROOT)))
    out = tmp_path / 'out'
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2',
               '--max-restarts=1', f'--master_port={running.free_port()}', 'deadly.py', *options]
    run = subprocess.run([*command, f'--out_dir={out}'], cwd=tmp_path, text=True, timeout=600,
                         env={**os.environ, 'OMP_NUM_THREADS': '1'}, capture_output=True)
    assert run.returncode == 0 and 'after step 10' in run.stdout, run.stdout + run.stderr
    assert straight.wait().codes == [0, 0]
    same(tmp_path / 'straight', out)
    monkeypatch.setenv('TORCHELASTIC_MAX_RESTARTS', '1')  # as torchrun --max-restarts=1 does
    with pytest.raises(UserError, match='--max-restarts needs --out_dir'):
        runs.find_run(None, None)
    for name, value in dict(LOCAL_WORLD_SIZE='8', WORLD_SIZE='16', RANK='0',
                            TORCHELASTIC_USE_AGENT_STORE='True').items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r'several machines needs .* TORCH_DISABLE_SHARE_RDZV'):
        read_environment()


def test_a_process_that_answers_no_more_ends_all_in_time_with_nothing_corrupt(
    data: Path, tmp_path: Path
) -> None:
    """As behind a cut link."""
    out = tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', steps(100_000), '--checkpoint_interval=5']
    run = Run(tmp_path, *options, '--timeout_minutes=0.1', world=2)
    running.wait_for(lambda: len(checkpoints(str(out))) >= 2)
    os.kill(run.processes[1].pid, signal.SIGSTOP)
    run.processes[0].join(60)
    assert run.processes[0].exitcode == 1 and RESUME in run.text.splitlines()[-1]
    assert 'lost the others' in run.text and 'Traceback' not in run.text, run.text
    os.kill(run.processes[1].pid, signal.SIGKILL)
    run = Run(tmp_path, f'--out_dir={out}', RESUME, f'--stop_step={len(losses(out)) + 3}').wait()
    assert run.codes == [train.STOPPED] and 'damaged' not in run.text and losses(out)


# Numbers

class BadNumbers:
    """On rank 1, which has one micro-batch a step, the losses of some steps (counted from 0) become
    infinite or NaN."""
    def __init__(self, *at: int):
        self.at = at

    def __call__(self) -> None:
        original, steps_begun = train.Transformer.forward, itertools.count()

        def forward(model: Transformer, *args: Any) -> Any:
            logits, loss = original(model, *args)
            step = next(steps_begun) if model.training and os.environ['RANK'] == '1' else None
            return logits, loss * (math.nan if step % 2 else math.inf) if step in self.at else loss

        train.Transformer.forward = forward


def test_steps_without_finite_numbers_are_skipped_by_all_and_too_many_end_the_run(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'o'
    options = [f'--data={data}', steps(40), f'--out_dir={out}', '--checkpoint_interval=4']
    run = Run(tmp_path, *options, world=2, damage=BadNumbers(5, 6, 7, *range(21, 40))).wait()
    assert run.codes == [1, 1] and 'Traceback' not in run.text
    line = run.text.splitlines()[-1]
    assert '11 consecutive steps' in line and 'step 32' in line
    skipped = [line['step'] for line in log(out) if line.get('event') == 'skipped']
    assert skipped == [6, 7, 8, *range(22, 33)]
    assert [s for s, loss in enumerate(losses(out), 1) if loss is None] == skipped[:-1]  # null
    assert 'NaN' not in (out / 'log.jsonl').read_text()
    assert all(torch.isfinite(w).all() for w in running.weights(out).values())
    assert Run(tmp_path, f'--out_dir={out}', RESUME).wait().codes == [0]
    assert result(out)['skipped'] == 3 + 9  # from best.pt, of step 30


# Options

def test_samples_between_steps_and_a_loss_that_is_not_finite(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """Token 299 is none of the tokenizer's."""
    options = [f'--data={halves[0].parent / "data"}', steps(3), f'--out_dir={tmp_path / "o"}']
    more = ['--vocab_size=300', '--sample_interval=1', '--sample_tokens=2']
    run = Run(tmp_path, *options, *more).wait()
    assert run.codes == [0] and len([line for line in log(tmp_path / 'o') if 'sample' in line]) == 3
    options[-1] = f'--out_dir={tmp_path / "infinite"}'
    run = Run(tmp_path, *options, '--init_std=1e30').wait()
    assert run.codes == [1] and 'Traceback' not in run.text
    assert run.text.splitlines()[-1].endswith('try a lower learning_rate or init_std')


VALUES = ['0', '1', '2', '3', '4', '7', '-1', '0.5', '1e-3', '1e9K', 'nan', 'inf', '', 'None',
          'True', 'False', 'abc', 'cem', 'llama', 'none', 'shared', 'diag', 'rope', 'mini']
NOT_TRIED = ('data', 'text', 'tokenizer', 'out_dir', 'init_from', 'device', 'compile',
             'timeout_minutes')


def some_options() -> st.SearchStrategy:
    """One to four options: any with a value of any kind, those with a set of values mostly with
    one of it, so that valid and contradictory sets occur too; now and then no option at all."""
    options = ['--', '--x', '--=1', '--attn_step=1', '--size', 'nofile'] * 10
    for cls in (TrainConfig, ModelConfig):
        for name, hint in typing.get_type_hints(cls).items():
            if name not in NOT_TRIED:
                kinds = [hint, *typing.get_args(hint)]
                own = [value for kind in kinds if typing.get_origin(kind) is typing.Literal
                       for value in typing.get_args(kind)]
                options += [f'--{name}={value}' for value in VALUES + own * 30]
    return st.lists(st.sampled_from(options), min_size=1, max_size=4)


def test_any_option_set_trains_or_is_refused_in_one_line(data: Path, tmp_path: Path) -> None:
    ended: Counter = Counter()

    @settings(max_examples=600, deadline=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(some_options())
    def walk(argv: list[str]) -> None:
        try:
            given = configurator.read_options([*TINY, *argv], TrainConfig, ModelConfig)
            given |= {'data': str(data), 'out_dir': str(tmp_path)}
            cfg = configurator.build(TrainConfig, given)
            train.Trainer(cfg, given, Distributed()).train_step()
            ended['trained'] += 1
        except UserError as error:
            ended['refused'] += 1
            names = [arg.removeprefix('--').partition('=')[0] for arg in argv]
            assert any(name in str(error) for name in names), (argv, error)

    walk()
    assert min(ended['trained'], ended['refused']) > 100, ended

"""Run folders: checkpoints, log, names and locks. The damage is real."""

import contextlib
import errno
import io
import json
import math
import os
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from running import VOCAB, Run, assert_one_line, log, losses, same, steps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from nanocem.runs import Log, checkpoints, claim, read_checkpoint, save_checkpoint

# Checkpoints


@pytest.mark.parametrize('damage', ['cut', 'empty', 'flipped', 'rubbish'])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    damage: str, data: Path, tmp_path: Path
) -> None:
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
        newest.write_bytes(
            {'cut': whole[: len(whole) // 3], 'empty': b'', 'rubbish': b'x' * 1000}.get(
                damage, bytes(content)
            )
        )
        try:
            state = read_checkpoint(str(newest))
        except ValueError as error:
            assert str(newest) in str(error) and '\n' not in str(error)
        else:  # a bit between the records, which nothing reads
            expected = torch.load(io.BytesIO(whole), weights_only=True)
            assert damage == 'flipped' and all(
                torch.equal(a, b)
                for a, b in zip(state['model'].values(), expected['model'].values(), strict=True)
            ), place
    newest.write_bytes(whole[:-100])
    run = Run(tmp_path, *options, f'--out_dir={out}', '--init_from=resume').wait()
    assert run.codes == [0] and f'{newest} is damaged' in run.text and 'after step 15' in run.text
    same(tmp_path / 'straight', out)


def test_the_last_checkpoints_are_kept_and_the_best_apart(data: Path, tmp_path: Path) -> None:
    options = ['--checkpoint_interval=4', '--keep_checkpoints=3']
    Run(tmp_path, f'--data={data}', steps(30), f'--out_dir={tmp_path / "o"}', *options).wait()
    assert [os.path.basename(p) for p in checkpoints(str(tmp_path / 'o'))] == [
        f'step_{s:08d}.pt' for s in (24, 28, 30)
    ]
    best = read_checkpoint(str(tmp_path / 'o' / 'best.pt'))
    evaluated = {
        line['step']: line['val_loss'] for line in log(tmp_path / 'o') if 'val_loss' in line
    }
    assert best['best'] == min(evaluated.values()) == evaluated[best['step']]


class FullDisk:
    """No file of this process may grow beyond `limit` bytes: writing fails as on a full disk."""

    def __init__(self, limit: int):
        self.limit = limit

    def __call__(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))


def test_a_full_disk_leaves_the_run_going_and_the_old_checkpoint_whole(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / 'o'
    options = [
        f'--data={data}',
        f'--out_dir={out}',
        steps(20),
        '--checkpoint_interval=2',
        '--eval_interval=5',
    ]
    Run(tmp_path, *options, '--stop_step=6').wait()
    before = {p: Path(p).read_bytes() for p in checkpoints(str(out))}
    run = Run(
        tmp_path, *options, '--init_from=resume', '--stop_step=16', '--tensorboard=True',
        damage=FullDisk(6000)
    ).wait()
    assert 'not written (File too large)' in run.text and run.codes == [train.STOPPED]
    assert 'Traceback' not in run.text
    assert {p: Path(p).read_bytes() for p in checkpoints(str(out))} == before and not list(
        out.glob('*.tmp')
    )
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


@pytest.mark.parametrize(
    'change, named',
    [
        ('--d_model=16', 'd_model=8 (now 16)'),
        ('--kq_diag=per_head', 'kq_diag=shared'),
        ('--vocab_size=64', f'vocab_size={VOCAB} (now 64)'),
    ],
)
def test_another_architecture_is_refused_with_the_fields(
    change: str, named: str, data: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / 'o', tmp_path / 'other'
    options = [f'--data={data}', steps(10), '--stop_step=3']
    Run(tmp_path, *options, f'--out_dir={out}').wait()
    run = Run(tmp_path, *options, f'--out_dir={out}', '--init_from=resume', change).wait()
    assert_one_line(run, named)
    Run(
        tmp_path, *options, f'--out_dir={other}', change
    ).wait()  # a checkpoint carried over from another run
    shutil.copy(checkpoints(str(out))[-1], checkpoints(str(other))[-1])
    assert_one_line(Run(tmp_path, f'--out_dir={other}', '--init_from=resume', change).wait(), named)


def test_a_checkpoint_just_written_is_never_the_one_let_go(tmp_path: Path) -> None:
    """Nor a user's file of a similar name, nor a damaged one of a later step."""
    out = str(tmp_path)
    for name in ('step_00000099.pt', 'step_mine.pt', 'step_1.pt'):
        (tmp_path / name).write_bytes(b'x')
    for step in (3, 6, 9):
        save_checkpoint(out, {'step': step}, keep=1)
        assert (tmp_path / f'step_{step:08d}.pt').exists()
    names = [os.path.basename(path) for path in checkpoints(out)]
    assert names == ['step_00000009.pt', 'step_00000099.pt']
    assert {'step_mine.pt', 'step_1.pt'} <= set(os.listdir(out))


def test_what_is_not_a_runs_own_stays(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    out.mkdir()
    for name in ('mine.tmp', 'notes.txt', 'step_00000003.pt.tmp', 'config.json.tmp'):
        (out / name).write_text('mine')
    with contextlib.ExitStack() as held:
        assert claim(str(out), 'name', held) == str(out)
    assert sorted(os.listdir(out)) == ['.lock', 'mine.tmp', 'notes.txt']
    (out / 'config.json').write_text('{"of": "another program"}')
    with pytest.raises(SystemExit, match=r'holds a config.json that no run wrote'):
        claim(str(out), 'name', contextlib.ExitStack())
    assert (out / 'config.json').read_text() == '{"of": "another program"}'


def test_a_half_line_is_repaired_and_no_line_is_glued(tmp_path: Path) -> None:
    path = tmp_path / 'log.jsonl'
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    Log(str(tmp_path), 5, False)(3, loss=math.nan)
    assert path.read_text() == '{"step": 1}\n{"step": 3, "loss": null}\n'
    Log(str(tmp_path), 1, False)
    assert path.read_text() == '{"step": 1}\n'


def test_loggers_fail_apart_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    log = Log(str(tmp_path), 0, True)
    log(1, loss=1.0)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr('torch.utils.tensorboard.SummaryWriter.add_scalar', full)
        log(2, loss=2.0)
        log(3, loss=3.0)
    with monkeypatch.context() as patch:
        patch.setattr('nanocem.runs.append_whole', full)
        log(4, loss=4.0)
    said = capfd.readouterr().out
    assert said.count('WARNING: TensorBoard does not') == said.count('WARNING: log.jsonl') == 1
    monkeypatch.setattr('time.monotonic', lambda: 1e9)  # a minute later
    log(5, loss=5.0)
    lines = (tmp_path / 'log.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in lines] == [1, 2, 3, 5]
    events = EventAccumulator(str(tmp_path)).Reload().Scalars('loss')
    assert [event.step for event in events] == [1, 5]

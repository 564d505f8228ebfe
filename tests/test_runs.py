"""Run folders: checkpoints, log, names and locks. The damage is real."""
import errno
import io
import json
import math
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from running import RESUME, Run, log, losses, same, without_room
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from configurator import UserError
from nanocem.runs import (
    Log,
    checkpoints,
    last_checkpoint,
    newest_run,
    read_checkpoint,
    save_checkpoint,
)

# Checkpoints


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    rng = random.Random(3)
    out = Path(shutil.copytree(halves[1], tmp_path / 'o'))
    newest = Path(checkpoints(str(out))[-1])
    whole = newest.read_bytes()
    expected = torch.load(io.BytesIO(whole), weights_only=True)['model']
    damages = [whole[:len(whole) // 3], b'', b'x' * 1000]
    for _ in range(25):  # a bit somewhere
        at = rng.randrange(len(whole))
        damages.append(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1:])
    for n, content in enumerate(damages):
        newest.write_bytes(content)
        try:
            state = read_checkpoint(str(newest))
        except ValueError as error:
            assert str(newest) in str(error) and '\n' not in str(error)
        else:  # a bit between the records, which nothing reads
            assert n > 2
            assert all(torch.equal(w, expected[name]) for name, w in state['model'].items())
    newest.write_bytes(b'x')
    run = Run(tmp_path, f'--out_dir={out}', RESUME).wait()
    assert run.codes == [0] and f'{newest} is damaged' in run.text and 'after step 3' in run.text
    same(halves[0], out)
    for path in checkpoints(str(out)):
        Path(path).write_bytes(b'x')
    best = torch.load(out / 'best.pt', weights_only=True)
    assert last_checkpoint(str(out))['step'] == best['step']
    (out / 'best.pt').write_bytes(b'x')
    with pytest.raises(UserError, match='no intact checkpoint in'):
        last_checkpoint(str(out))


def test_the_last_checkpoints_stay_and_the_best_apart(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """And a user's files of similar names."""
    names = [os.path.basename(path) for path in checkpoints(str(halves[0]))]
    assert names == ['step_00000009.pt', 'step_00000012.pt']
    best = read_checkpoint(str(halves[0] / 'best.pt'))
    evaluated = {line['step']: line['val_loss'] for line in log(halves[0]) if 'val_loss' in line}
    assert best['best'] == min(evaluated.values()) == evaluated[best['step']]
    out = str(tmp_path)
    for name in ('step_mine.pt', 'step_1.pt'):
        (tmp_path / name).write_bytes(b'x')
    (tmp_path / 'step_00000099.pt').write_bytes(b'damaged')  # it does not count
    for step in (3, 6, 9):
        save_checkpoint(out, f'step_{step:08d}.pt', {'step': step})
    names = [os.path.basename(path) for path in checkpoints(out)]
    assert names == [f'step_{step:08d}.pt' for step in (6, 9, 99)]
    assert {'step_mine.pt', 'step_1.pt'} <= set(os.listdir(out))


def test_a_full_disk_leaves_the_run_going_and_the_old_checkpoint_whole(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(halves[1], tmp_path / 'o'))
    before = {p: Path(p).read_bytes() for p in checkpoints(str(out))}
    options = [f'--out_dir={out}', RESUME]
    run = Run(tmp_path, *options, '--stop_step=10', '--tensorboard=True', '--eval_interval=1',
              damage=partial(without_room, 6000)).wait()
    assert 'not written (File too large)' in run.text and run.codes == [train.STOPPED], run.text
    assert 'Traceback' not in run.text and not list(out.glob('*.tmp'))
    assert {p: Path(p).read_bytes() for p in checkpoints(str(out))} == before
    assert Run(tmp_path, *options).wait().codes == [0]
    assert losses(out) == losses(halves[0])


# Folders and logs

def test_the_newest_run_is_the_one_started_or_resumed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of other programs are left out."""
    monkeypatch.chdir(tmp_path)
    run = '{"train": {}, "model": {}}'
    for n, (name, config) in enumerate([('b', run), ('a', run), ('c', '{}')]):
        path = tmp_path / 'out' / name / 'config.json'
        path.parent.mkdir(parents=True)
        path.write_text(config)
        os.utime(path, (n, n))
    assert newest_run() == 'out/a'


def test_a_half_line_is_repaired_and_no_line_is_glued(tmp_path: Path) -> None:
    path = tmp_path / 'log.jsonl'
    path.write_bytes(b'{"step": 1}\n5\n{}\n\xff\n{"step": 2, "lo')
    Log(str(tmp_path), 5, False)(3, loss=math.nan)
    assert path.read_text() == '{"step": 1}\n{"step": 3, "loss": null}\n'
    Log(str(tmp_path), 1, False)
    assert path.read_text() == '{"step": 1}\n'


def test_a_log_that_cannot_be_written_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')

    log = Log(str(tmp_path), 0, True)
    log(1, loss=1.0)
    broken = ('nanocem.runs.open', 'torch.utils.tensorboard.SummaryWriter.add_scalar')
    for step, name in enumerate(broken, 2):
        with monkeypatch.context() as patch:
            patch.setattr(name, full, raising=False)  # open is not yet a name of the module
            log(step, loss=float(step))
    assert capsys.readouterr().out.count('No space left on device); the run goes on') == 2
    log(5, loss=5.0)
    Log(str(tmp_path), 5, True)(6, loss=6.0)
    lines = (tmp_path / 'log.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in lines] == [1, 3, 5, 6]
    events = EventAccumulator(str(tmp_path)).Reload().Scalars('loss')
    assert [event.step for event in events] == [1, 5, 6]

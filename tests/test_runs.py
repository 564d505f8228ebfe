"""Run folders: checkpoints, log, names and locks. The damage is real."""
import io
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import evaluate
import train
from configurator import UserError
from model import ModelConfig
from nanocem import runs
from nanocem.runs import Log, checkpoints, last_checkpoint, read_checkpoint, save_checkpoint
from running import RESUME, TINY, Run, log, losses, same, steps, write_data

# Checkpoints

def test_a_llama_is_read_whatever_the_defaults_of_cem(tmp_path: Path) -> None:
    """A model.py with another default of attn_steps has saved another one, which has no part."""
    data, out = write_data(tmp_path / 'data'), tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', steps(2), '--attn=llama', '--attn_steps=1',
               '--attn_step_size=None', '--mlp=llama', '--mlp_steps=1']
    assert Run(tmp_path, *options, '--stop_step=1').wait().codes == [75]
    other = {'attn_steps': 7, 'attn_step_size': 1 / 7, 'mlp_rank': 9}
    config = json.loads((out / 'config.json').read_text())
    (out / 'config.json').write_text(json.dumps(config | {'model': config['model'] | other}))
    for path in out.glob('*.pt'):
        state = torch.load(path, weights_only=True)
        torch.save(state | {'model_config': state['model_config'] | other}, path)
    model, _ = runs.load_model(str(out))
    assert model.cfg.attn_steps == 1
    # evaluate.py --compare reads a run that has not ended in the same way
    assert f'| {model.num_params():,} ' in evaluate.compare_runs([str(out), str(out)])
    assert Run(tmp_path, f'--out_dir={out}', RESUME).wait().codes == [0]
    tuned = [f'--init_from={out}', f'--out_dir={tmp_path / "t"}', steps(1)]
    names = {'--d_model', '--n_layer', '--n_head', '--d_mlp', '--attn_steps', '--mlp_steps'}
    flags = [flag for flag in TINY if flag.partition('=')[0] not in names]
    assert train.main([*flags, *tuned]) == 0


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
    assert read_checkpoint(str(out / 'best.pt'))['step'] == 4  # of later than step 3
    run = Run(tmp_path, f'--out_dir={out}', RESUME).wait()
    assert run.codes == [0] and f'{newest} is damaged' in run.text and 'after step 4' in run.text
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
    """And files of other programs with similar names."""
    names = [os.path.basename(path) for path in checkpoints(str(halves[0]))]
    assert names == ['step_00000009.pt', 'step_00000012.pt']
    best = read_checkpoint(str(halves[0] / 'best.pt'))
    evaluated = {line['step']: line['val_loss'] for line in log(halves[0]) if 'val_loss' in line}
    assert best['best'] == min(evaluated.values()) == evaluated[best['step']]
    out = f'{tmp_path}/'  # as tab completion writes it
    for name in ('step_mine.pt', 'step_1.pt'):
        (tmp_path / name).write_bytes(b'x')
    (tmp_path / 'step_00000099.pt').write_bytes(b'damaged')  # it does not count
    for step in (3, 6, 9):
        save_checkpoint(f'{out}/step_{step:08d}.pt', {'step': step})
    names = [os.path.basename(path) for path in checkpoints(out)]
    assert names == [f'step_{step:08d}.pt' for step in (6, 9, 99)]
    assert {'step_mine.pt', 'step_1.pt'} <= set(os.listdir(out))


def test_an_old_checkpoint_that_cannot_be_deleted_loses_no_new_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)
    monkeypatch.setattr(os, 'remove', refuse)
    names = [f'step_{step:08d}.pt' for step in (3, 6, 9)]
    assert all(save_checkpoint(f'{tmp_path}/{name}', {'step': 1}) for name in names)
    assert [os.path.basename(path) for path in checkpoints(str(tmp_path))] == names


def disk_is_full() -> None:
    """Let no file of this process grow beyond 6,000 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))


def test_a_full_disk_leaves_the_run_going_and_the_old_checkpoint_whole(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(halves[1], tmp_path / 'o'))
    before = {p: Path(p).read_bytes() for p in checkpoints(str(out))}
    options = [f'--out_dir={out}', RESUME]
    run = Run(tmp_path, *options, '--stop_step=10', '--tensorboard=True', '--eval_interval=1',
              damage=disk_is_full).wait()
    assert 'not written (File too large)' in run.text and run.codes == [train.STOPPED], run.text
    assert not list(out.glob('*.tmp'))
    assert {p: Path(p).read_bytes() for p in checkpoints(str(out))} == before
    assert Run(tmp_path, *options).wait().codes == [0]
    assert losses(out) == losses(halves[0])


def one_full_disk() -> None:
    """Let the first best.pt of this process not be written."""
    write, calls = runs.write_atomic, itertools.count()

    def write_or_fail(path: str, data: Any) -> None:
        if path.endswith('best.pt') and next(calls) == 0:
            raise OSError(28, 'No space left on device')
        write(path, data)

    runs.write_atomic = write_or_fail


def test_best_loss_and_seconds_go_on(tmp_path: Path) -> None:
    """A best.pt that could not be written is no best one."""
    data, out = write_data(tmp_path / 'data'), tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', '--eval_interval=1', steps(8)]
    run = Run(tmp_path, *options, '--stop_step=4', damage=one_full_disk).wait()
    assert run.codes == [train.STOPPED] and 'best.pt not written' in run.text
    evaluated = {line['step']: line['val_loss'] for line in log(out) if 'val_loss' in line}
    del evaluated[1]  # the one of the full disk
    state = read_checkpoint(checkpoints(str(out))[-1])
    best = read_checkpoint(str(out / 'best.pt'))
    assert state['best'] == best['best'] == min(evaluated.values()) == evaluated[best['step']]
    # Let the first part have a better loss than any, and an hour
    torch.save(state | {'best': 1e-3, 'seconds': 3600.0}, checkpoints(str(out))[-1])
    assert Run(tmp_path, f'--out_dir={out}', RESUME).wait().codes == [0]
    assert read_checkpoint(str(out / 'best.pt'))['step'] == best['step']
    assert read_checkpoint(checkpoints(str(out))[-1])['best'] == 1e-3
    seconds = [line['seconds'] for line in runs.read_json_lines(f'{out}/log.jsonl') if 'lr' in line]
    assert seconds[3] < 1000 < 3600 < seconds[4] < seconds[7] < 4000
    assert 3600 < runs.read_json(f'{out}/result.json')['seconds'] < 4000


def test_a_checkpoint_holds_plain_values_alone(tmp_path: Path) -> None:
    """Another one could run any code when it is read."""
    hostile = tmp_path / 'hostile.pt'
    torch.save({'model': {}, 'step': Touch(str(tmp_path / 'touched'))}, hostile)
    with pytest.raises(UserError, match=r'hostile.pt is not a checkpoint .* could run any code'):
        read_checkpoint(str(hostile))
    assert not (tmp_path / 'touched').exists()


class Touch:
    """What makes a file when it is unpickled."""
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (Path(self.path),)


def test_weights_of_another_model_py_are_refused(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(halves[1], tmp_path / 'o'))
    state = torch.load(out / 'best.pt')
    state['model']['blocks.0.mlp.bias'] = torch.zeros(1)
    torch.save(state, out / 'best.pt')
    with pytest.raises(UserError, match=r'not have the weights of these options.*mlp.bias'):
        runs.load_model(str(out))
    with pytest.raises(SystemExit, match=r'not have the weights of these options'):
        train.main([*TINY, f'--init_from={out}', f'--out_dir={tmp_path / "other"}', '--tokens=1'])


@pytest.mark.parametrize('stop', [1, 6, 12])
def test_a_class_that_was_edited_in_place_is_said(
    stop: int, data: Path, halves: tuple[Path, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Its names, options and weights are those of the run, but it computes something else. A resume
    is refused, other scripts warn."""
    out = tmp_path / 'o'
    if stop == 1:
        argv = [*TINY, f'--data={data}', f'--out_dir={out}', '--tokens=96', '--stop_step=1']
        assert train.main(argv) == train.STOPPED
    else:
        shutil.copytree(halves[stop != 12], out)
    monkeypatch.setattr(torch.nn.functional, 'silu', torch.nn.functional.gelu)
    if stop != 12:  # after its end nothing is resumed
        with pytest.raises(SystemExit, match=r'cannot be resumed: its logits are not'):
            train.main([f'--out_dir={out}', RESUME])
    warning = f'Warning: {out}: its logits are not those that were kept'
    for options in [], ['--attn_steps=1']:  # other options are no other model.py
        monkeypatch.undo()
        tuned = [*TINY, *options, f'--init_from={out}', '--tokens=1']
        capsys.readouterr()
        runs.load_model(str(out))
        assert train.main([*tuned, f'--out_dir={tmp_path}/{len(options)}']) == 0
        assert 'Warning' not in capsys.readouterr().err
        monkeypatch.setattr(torch.nn.functional, 'silu', torch.nn.functional.gelu)
        runs.load_model(str(out))
        assert warning in capsys.readouterr().err
        assert train.main([*tuned, f'--out_dir={tmp_path}/edited-{len(options)}']) == 0
        assert warning in capsys.readouterr().err


# Folders and logs

def test_runs_that_start_together_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All look for a free name before any makes its folder."""
    monkeypatch.chdir(tmp_path)
    mkdir = os.mkdir

    def slow_mkdir(*args: Any) -> None:
        time.sleep(0.05)
        mkdir(*args)

    monkeypatch.setattr(os, 'mkdir', slow_mkdir)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: runs.new_folder(None, ModelConfig(size='nano')), range(8)))
    assert len({folder for folder, _ in found}) == 8 == len(os.listdir('out'))


def test_one_folder_takes_one_of_two_runs(
    halves: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends between the first look at the folder and its lock is seen; a checkpoint is
    read when no other process can write another one."""
    out = tmp_path / 'o'
    lock_folder = runs.lock_folder

    def other_run_ends(path: str) -> Any:
        (out / 'config.json').write_text('{}')
        return lock_folder(path)

    options = [*TINY, f'--data={halves[0].parent / "data"}', f'--out_dir={out}']
    monkeypatch.setattr(runs, 'lock_folder', other_run_ends)
    with pytest.raises(SystemExit, match='holds a run already'):
        train.main([*options, steps(1)])
    monkeypatch.undo()
    out = shutil.copytree(halves[1], tmp_path / 'copied')
    monkeypatch.setattr(runs, 'last_checkpoint', runs.lock_folder)
    with pytest.raises(SystemExit, match='another process is training there'):
        train.main([f'--out_dir={out}', RESUME])


# Logs

def test_new_folders_and_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Damaged folders, and those of other programs, are left out with a line."""
    monkeypatch.chdir(tmp_path)
    config = '{"train": {}, "model": {}}'
    for n, (name, text) in enumerate([('-2', config), ('', config), ('-3', '{}'), ('-4', '')]):
        folder, _ = runs.new_folder(f'out/nano-cem1-cem1-alibi{name}', ModelConfig(size='nano'))
        path = Path(folder, 'config.json')
        path.write_text(text)
        os.utime(path, (n, n))
    assert runs.new_folder(None, ModelConfig(size='nano'))[0] == 'out/nano-cem1-cem1-alibi-5'
    assert runs.newest_run() == 'out/nano-cem1-cem1-alibi'
    llama = ModelConfig(size='nano', n_layer=3, attn='llama', mlp='llama')
    assert runs.new_folder(None, llama)[0] == 'out/3x32-llama-llama-rope'
    copies = ModelConfig(size='nano', mlp='llama', kq_diag='shared', key_shift='half',
                         match_bias='token')
    assert runs.new_folder(None, copies)[0] == 'out/nano-cem1-llama-alibi-diagonal-half-match'
    untied = ModelConfig(size='nano', mlp='llama', untied_output=True)
    assert runs.new_folder(None, untied)[0] == 'out/nano-cem1-llama-alibi-untied'
    tied = ModelConfig(size='nano', attn='llama', tie='kv', mlp_energy='sign_convex')
    assert runs.new_folder(None, tied)[0] == 'out/nano-llama-cem1-rope-tie_kv-sign_convex'
    grouped = ModelConfig(size='nano', mlp='llama', key_shift='half', n_kv_head=1)
    assert runs.new_folder(None, grouped)[0] == 'out/nano-cem1-llama-alibi-half-gqa1'
    assert capsys.readouterr().out.count('is left out') == 2
    (tmp_path / 'best.pt').touch()
    with pytest.raises(UserError, match='holds a run already'):
        runs.new_folder(str(tmp_path), ModelConfig())


def test_a_resumed_log_drops_later_steps_and_a_half_line(tmp_path: Path) -> None:
    path = tmp_path / 'log.jsonl'
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 2, "lo')
    Log(str(tmp_path), 1, True)(2, loss=math.nan, lr=0.5)
    assert path.read_text() == '{"step": 1}\n{"step": 2, "loss": null, "lr": 0.5}\n'
    (event,) = EventAccumulator(str(tmp_path)).Reload().Scalars('lr')
    assert (event.step, event.value) == (2, 0.5)


def test_a_log_takes_tensors_and_arrays_beside_the_loss(tmp_path: Path) -> None:
    """And keeps the loss, in both places, whatever stands beside it."""
    gains = torch.tensor([0.5, math.nan])
    Log(str(tmp_path), 0, True)(1, loss=np.float32(2.5), gain=gains[0], gains=gains, path=tmp_path)
    assert runs.read_json_lines(f'{tmp_path}/log.jsonl') == [
        {'step': 1, 'loss': 2.5, 'gain': 0.5, 'gains': [0.5, None], 'path': str(tmp_path)}]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {name: events.Scalars(name)[0].value for name in events.Tags()['scalars']} == {
        'loss': 2.5, 'gain': 0.5}


def test_a_log_that_cannot_be_written_says_so_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    log = Log(str(tmp_path), 0, False)
    (tmp_path / 'log.jsonl').mkdir()
    log(1, loss=1.0)
    assert 'Warning: step 1 is not in the log (' in capsys.readouterr().err
    # If only TensorBoard fails, the line is there
    (tmp_path / 'log.jsonl').rmdir()
    log.writer = 'no writer'
    log(2, loss=1.0)
    assert "Warning: step 2 is not in TensorBoard's events (" in capsys.readouterr().err
    assert '"step": 2' in (tmp_path / 'log.jsonl').read_text()

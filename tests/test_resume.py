"""A run that goes on is the run it was, or it is refused; two processes never share a folder."""
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import running
import torch
from running import BATCH, RESUME, Run, losses, make_trainer, result, same, steps, weights

import train
from configurator import UserError
from nanocem import runs
from nanocem.runs import checkpoints, read_checkpoint, resumed_state
from train import RECIPE


def copied(run: Path, tmp: Path) -> Path:
    return Path(shutil.copytree(run, tmp / 'copied'))


def resume(out: Path, *argv: str, world: int = 1) -> Run:
    return Run(out.parent, f'--out_dir={out}', RESUME, *argv, world=world).wait()


@pytest.mark.parametrize('changes, world, rel', [
    ('', 1, 0),
    ('--test_tokens=300 --keep_checkpoints=1 --checkpoint_interval=5 --sample_interval=8 '
     '--activation_checkpointing --sample_tokens=5 --tensorboard=True', 1, 0),
    ('--micro_batch_size=1 --attn_impl=sdpa', 2, 1e-4),
    ('--dtype=bfloat16', 1, 2e-2),
], ids=['nothing', 'to the bit', 'two processes', 'dtype'])
def test_what_may_change_leaves_the_losses(
    changes: str, world: int, rel: float, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """Equal to the bit, or as near as sums in another order (1e-4) or precision (2e-2) come."""
    straight, out = halves[0], copied(halves[1], tmp_path)
    run = resume(out, *changes.split(), world=world)
    assert run.codes == [0] * world, run.text
    assert losses(out) == pytest.approx(losses(straight), rel=rel, abs=0)
    if not changes:
        same(straight, out)
    if not rel:
        assert all(torch.equal(w, weights(straight)[name]) for name, w in weights(out).items())
    assert result(out)['tokens'] == 12 * BATCH * running.LENGTH
    assert read_checkpoint(checkpoints(str(out))[-1])['step'] == 12


def test_muon_goes_on_to_the_bit_and_two_processes_equal_one(tmp_path: Path) -> None:
    straight, out = running.straight_and_stopped(tmp_path, '--optimizer=muon')
    two = Run(tmp_path, f'--data={straight.parent / "data"}', f'--out_dir={tmp_path / "two"}',
              '--optimizer=muon', steps(12), world=2)
    assert resume(out).codes == [0]
    same(straight, out)
    assert two.wait().codes == [0, 0], two.text
    assert losses(tmp_path / 'two') == pytest.approx(losses(straight), rel=1e-4, abs=0)


OTHER = dict.fromkeys(RECIPE, 'other')
MODEL = dict(d_model=16, kq_diag='per_head', vocab_size=300)


def test_what_would_bend_a_run_is_refused_by_name(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """Another recipe, another model; and any split that changed."""
    out, data = str(halves[1]), tmp_path / 'data'
    shutil.copytree(halves[0].parent / 'data', data)
    now = make_trainer(data, halves[1], learning_rate=8e-3).identity()
    assert resumed_state(out, now)['step'] == 6
    for part, changes in (('recipe', OTHER), ('model_config', MODEL)):
        for name, value in changes.items():
            other = {**now, part: {**now[part], name: value}}
            with pytest.raises(UserError, match=f'has another .*: {name}=.* another --out_dir'):
                resumed_state(out, other)
    for name in ('val.bin', 'test.bin', 'train_00001.bin'):
        content = (data / name).read_bytes()
        split = name.removesuffix('.bin').partition('_')[0]
        (data / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(UserError, match=f'has another data: {split} fingerprint='):
            resumed_state(out, make_trainer(data, halves[1], learning_rate=8e-3).identity())
        (data / name).write_bytes(content)


# Another length

def test_a_finished_run_is_left_as_it_is_or_trained_on(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """And its seconds are the sum over sessions."""
    out = copied(halves[0], tmp_path)
    run = resume(out)
    assert run.codes == [0] and 'is finished after 12 steps' in run.text
    for name in ('config.json', 'result.json', 'log.jsonl', 'best.pt'):
        assert (out / name).read_bytes() == (halves[0] / name).read_bytes(), name
    path = checkpoints(str(out))[-1]
    torch.save({**read_checkpoint(path), 'seconds': 1000.0}, path)
    longer = resume(out, steps(15))
    assert longer.codes == [0] and 'resuming after step 12' in longer.text, longer.text
    assert losses(out)[:12] == losses(halves[0]) and len(losses(out)) == 15
    rates = [line['lr'] for line in running.log(out) if 'lr' in line]
    cfg = train.TrainConfig(learning_rate=8e-3)
    assert rates[12:] == [train.learning_rate(cfg, step, steps=15) for step in (12, 13, 14)]
    assert result(out)['tokens'] == 15 * BATCH * running.LENGTH
    assert json.loads((out / 'result.json').read_text())['seconds'] > 1000
    shorter = resume(out, steps(5))
    running.assert_one_line(shorter, f'has seen {15 * BATCH * running.LENGTH} already')


# Weights of another run

def test_weights_of_another_run_start_a_new_one(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    data, out = halves[0].parent / 'data', tmp_path / 'tuned'
    run = Run(tmp_path, f'--data={data}', f'--out_dir={out}', f'--init_from={halves[0]}',
              '--learning_rate=0', steps(2), '--attn_steps=3').wait()
    assert run.codes == [0], run.text
    best = read_checkpoint(str(halves[0] / 'best.pt'))['model']
    for name, value in weights(out).items():  # at a rate of 0 they stay
        assert torch.equal(value, best[name]), name
    model, state = runs.load_run(str(out / 'step_00000002.pt'))
    assert model.cfg.attn_steps == 3 and state['step'] == 2 and not model.training

    trainer = make_trainer(data, tmp_path / 'again', init_from=str(halves[0]))
    trainer.restore(resume=True)  # as a run does that was stopped before its first checkpoint
    assert torch.equal(trainer.raw_model.embedding, best['embedding'])


def test_weights_that_do_not_fit_are_refused(halves: tuple[Path, Path], tmp_path: Path) -> None:
    other = running.write_data(tmp_path / 'data', vocab_size=257)
    running.edit_meta(other, tokenizer='another')
    common = [f'--data={other}', f'--out_dir={tmp_path / "o"}', steps(2)]
    from_run = f'--init_from={halves[0]}'
    running.assert_one_line(Run(tmp_path, *common, from_run).wait(), 'another tokenizer')
    shutil.rmtree(tmp_path / 'o')
    running.edit_meta(other, tokenizer='byte')
    running.assert_one_line(Run(tmp_path, *common, from_run, '--d_model=16').wait(), 'does not fit')


# Folders

def test_a_folder_has_one_run_at_a_time(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', '--checkpoint_interval=5']
    first = Run(tmp_path, *options, steps(100_000))
    running.wait_for(lambda: len(checkpoints(str(out))) >= 2)
    for more, world in (([], 1), ([RESUME], 1), ([RESUME], 2)):
        second = Run(tmp_path, *options, *more, world=world).wait()
        running.assert_one_line(second, f'out_dir={out}', 'another process is training there')
    os.kill(first.processes[0].pid, signal.SIGKILL)
    first.wait()
    third = Run(tmp_path, *options, RESUME, f'--stop_step={len(losses(out)) + 2}')
    assert third.wait().codes == [train.STOPPED], third.text


def test_runs_started_together_have_folders_of_their_own(data: Path, tmp_path: Path) -> None:
    there = partial(os.chdir, tmp_path)
    both = [Run(tmp_path, f'--data={data}', steps(4), damage=there) for _ in range(2)]
    assert [run.wait().codes for run in both] == [[0], [0]], both[0].text + both[1].text
    one, other = sorted((tmp_path / 'out').iterdir())
    assert [one.name, other.name] == ['134m-cem2-cem2', '134m-cem2-cem2-2']
    same(one, other)

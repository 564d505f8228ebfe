"""A run that goes on is the run it was, or it is refused; two processes never share a folder."""

import itertools
import json
import os
import shutil
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from nanocem.schedule import Schedule
from running import (
    BATCH,
    LENGTH,
    Run,
    assert_one_line,
    edit_meta,
    log,
    losses,
    make_trainer,
    same,
    steps,
    wait_for,
    weights,
    write_data,
)

import train
from model import ModelConfig
from nanocem import options
from nanocem.runs import checkpoints, load_run, read_checkpoint
from train import RECIPE, TrainConfig

# What may change when a run is resumed, besides its length and the processes it has.
FREE = {
    'data', 'out_dir', 'init_from', 'tokens', 'tokens_per_param', 'micro_batch_size',
    'eval_interval', 'test_tokens', 'log_interval', 'checkpoint_interval', 'keep_checkpoints',
    'stop_step', 'max_minutes', 'max_skipped', 'device', 'dtype', 'compile',
    'activation_checkpointing', 'deterministic', 'timeout_minutes', 'tensorboard',
    'sample_interval', 'sample_tokens'
}


def resumed(stopped: Path, tmp: Path, *argv: str, world: int = 1) -> tuple[Path, Run]:
    """A copy of the stopped run, gone on with under other options."""
    out = tmp / 'resumed'
    shutil.copytree(stopped, out)
    run = Run(tmp, f'--out_dir={out}', '--init_from=resume', *argv, world=world).wait()
    return out, run


def test_every_option_is_kept_or_free() -> None:
    """Who adds an option decides whether it may change on the way."""
    assert set(RECIPE) | FREE == {field.name for field in fields(TrainConfig)}
    assert not set(RECIPE) & FREE


@pytest.mark.parametrize(
    'changes, world, rel',
    [
        (
            '--test_tokens=300 --keep_checkpoints=1 --checkpoint_interval=5 --max_skipped=3 '
            '--deterministic --activation_checkpointing --sample_interval=8 --sample_tokens=5 '
            '--max_minutes=9 --tensorboard=True',
            1,
            0,
        ),
        ('--micro_batch_size=1', 1, 1e-4),
        ('--micro_batch_size=1 --attn_impl=sdpa', 2, 1e-4),
        ('--dtype=bfloat16', 1, 2e-2),
    ],
    ids=['to the bit', 'micro_batch_size', 'two processes', 'dtype'],
)
def test_what_may_change_leaves_the_losses(
    changes: str, world: int, rel: float, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """Equal to the bit, or as near as sums in another order (1e-4) or precision (2e-2) come."""
    straight, stopped = halves
    out, run = resumed(stopped, tmp_path, *changes.split(), world=world)
    assert run.codes == [0] * world, run.text
    assert losses(out) == (pytest.approx(losses(straight), rel=rel) if rel else losses(straight))
    if not rel:
        for one, other in zip(weights(out).values(), weights(straight).values(), strict=True):
            assert torch.equal(one, other)
    result = json.loads((out / 'result.json').read_text())
    assert result['tokens'] == 12 * BATCH * LENGTH
    state = read_checkpoint(checkpoints(str(out))[-1])
    assert state['tokens'] == result['tokens'] and state['step'] == 12


OTHER = dict(
    text='a.txt',
    tokenizer='byte',
    seed=1,
    batch_size=8,
    learning_rate=1e-3,
    warmup=0.5,
    final_lr=0.5,
    beta1=0.5,
    beta2=0.5,
    adam_eps=1e-3,
    weight_decay=0.5,
    grad_clip=0.5,
    eval_tokens=100,
)


@pytest.mark.parametrize('name', RECIPE)
def test_what_would_bend_a_run_is_refused_by_name(name: str, halves: tuple[Path, Path]) -> None:
    out = str(halves[1])
    assert options.resumed_options(out, {}, TrainConfig, RECIPE)['seed'] == 1337
    with pytest.raises(SystemExit, match=f'{name}=.* would bend the run in'):
        options.resumed_options(out, {name: OTHER[name]}, TrainConfig, RECIPE)


def test_a_config_edited_by_hand_is_checked(halves: tuple[Path, Path], tmp_path: Path) -> None:
    """Against its types, and against the recipe in the checkpoint."""
    out = tmp_path / 'o'
    shutil.copytree(halves[1], out)
    config = json.loads((out / 'config.json').read_text())
    for change, words in (
        (dict(seed='many'), ['config.json', 'seed', 'a whole number']),
        (dict(learning_rate=1.0), ['recipe', 'learning_rate=0.008 (now 1.0)']),
        (dict(compile=[1]), ['compile', 'True or False']),
    ):
        edited = {**config, 'train': {**config['train'], **change}}
        (out / 'config.json').write_text(json.dumps(edited))
        assert_one_line(Run(tmp_path, f'--out_dir={out}', '--init_from=resume').wait(), *words)
    edited = {**config, 'train': {**config['train'], 'tensorboard': 'False'}}
    (out / 'config.json').write_text(json.dumps(edited))
    given = options.resumed_options(str(out), {}, TrainConfig, RECIPE)
    assert given['tensorboard'] is False


# Another length


def test_another_length_goes_on_from_the_rate_reached_without_a_jump() -> None:
    first = Schedule(steps=100, warmup=10, peak=1.0, final=0.1, start=10)
    for at, steps_now in ((40, 200), (40, 60), (100, 150), (3, 50)):
        then = first.extended(steps_now, at)
        rates = [then(step) for step in range(at, steps_now)]
        assert rates[0] == first(at) if at < 100 else rates[0] == pytest.approx(0.1)
        largest = max(abs(b - a) for a, b in itertools.pairwise(rates))
        assert largest <= 0.1 + 1e-9  # a step of the warm-up; nowhere more
        assert rates[-1] == pytest.approx(0.1)
        after = rates[max(0, 10 - at) :]
        assert after == sorted(after, reverse=True)
    again = first.extended(200, 40).extended(300, 90)
    assert again(90) == pytest.approx(first.extended(200, 40)(90))


def test_a_finished_run_is_left_as_it_is_or_trained_on(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    out, run = resumed(halves[0], tmp_path)
    kept = ('config.json', 'result.json', 'log.jsonl', 'best.pt')
    assert run.codes == [0] and 'is finished after 12 steps' in run.text
    for name in kept:
        assert (out / name).read_bytes() == (halves[0] / name).read_bytes(), name
    longer = Run(tmp_path, f'--out_dir={out}', '--init_from=resume', steps(15)).wait()
    assert longer.codes == [0] and '15 steps instead of 12' in longer.text, longer.text
    assert losses(out)[:12] == losses(halves[0]) and len(losses(out)) == 15
    rates = [line['lr'] for line in log(out) if 'lr' in line]
    assert rates[11:] == pytest.approx([8e-4] * 4)
    assert json.loads((out / 'result.json').read_text())['tokens'] == 15 * BATCH * LENGTH
    shorter = Run(tmp_path, f'--out_dir={out}', '--init_from=resume', steps(5)).wait()
    assert_one_line(shorter, f'has seen {15 * BATCH * LENGTH} already')


def test_seconds_are_the_sum_over_sessions(halves: tuple[Path, Path], tmp_path: Path) -> None:
    before = read_checkpoint(checkpoints(str(halves[1]))[-1])['seconds']
    assert before > 0
    out = tmp_path / 'o'
    shutil.copytree(halves[1], out)
    path = checkpoints(str(out))[-1]
    torch.save({**read_checkpoint(path), 'seconds': before + 1000}, path)
    Run(tmp_path, f'--out_dir={out}', '--init_from=resume').wait()
    seconds = json.loads((out / 'result.json').read_text())['seconds']
    assert 1000 + before < seconds < 1000 + before + 120


# Weights of another run


def test_weights_of_another_run_start_a_new_one(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    data = halves[0].parent / 'data'
    out = tmp_path / 'tuned'
    run = Run(
        tmp_path,
        f'--data={data}',
        f'--out_dir={out}',
        f'--init_from={halves[0]}',
        '--learning_rate=0',
        steps(2),
        '--attn_steps=3',
    ).wait()
    assert run.codes == [0], run.text
    best = read_checkpoint(str(halves[0] / 'best.pt'))['model']
    for name, value in weights(out).items():  # at a rate of 0 they stay
        assert torch.equal(value, best[name]), name
    model, state = load_run(str(out), 'last')
    assert model.cfg.attn_steps == 3 and state['step'] == 2 and not model.training

    trainer = make_trainer(data, tmp_path / 'again', init_from=str(halves[0]))
    trainer.begin_with(None)  # as a run does that was stopped before its first checkpoint
    assert torch.equal(trainer.model.embedding, best['embedding'])


def test_weights_that_do_not_fit_are_refused(halves: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_data(tmp_path / 'data', vocab_size=257)
    edit_meta(other, tokenizer='another')
    common = [f'--data={other}', f'--out_dir={tmp_path / "o"}', steps(2)]
    from_run = f'--init_from={halves[0]}'
    assert_one_line(Run(tmp_path, *common, from_run).wait(), 'another tokenizer')
    assert_one_line(Run(tmp_path, *common, from_run, '--size=86m').wait(), 'size=mini (now 86m)')
    edit_meta(other, tokenizer='byte')
    assert_one_line(Run(tmp_path, *common, from_run, '--d_model=16').wait(), 'do not fit')
    assert_one_line(
        Run(tmp_path, *common, '--init_from=nowhere').wait(), 'no checkpoint in nowhere'
    )


def test_a_checkpoint_of_an_earlier_version_gives_its_weights(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / 'old'
    shutil.copytree(halves[1], out)
    for path in (*checkpoints(str(out)), str(out / 'best.pt')):
        state = read_checkpoint(path)
        names = ('model', 'optimizer', 'step', 'best', 'model_config', 'data', 'data_dir')
        torch.save({name: state[name] for name in names}, path)
    run = Run(tmp_path, f'--out_dir={out}', '--init_from=resume').wait()
    assert_one_line(run, 'earlier version', f'--init_from={out}')
    model, _ = load_run(str(out))
    assert model.cfg == ModelConfig(**state['model_config'])


# Two at once


class Chdir:
    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self) -> None:
        os.chdir(self.folder)


def test_a_folder_has_one_run_at_a_time(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', '--checkpoint_interval=5']
    first = Run(tmp_path, *options, steps(100_000))
    wait_for(lambda: len(checkpoints(str(out))) >= 2)
    for more, world in (([], 1), (['--init_from=resume'], 1), (['--init_from=resume'], 2)):
        second = Run(tmp_path, *options, *more, world=world).wait()
        assert_one_line(second, f'out_dir={out}', 'another process is training there')
    os.kill(first.processes[0].pid, signal.SIGKILL)
    first.wait()
    assert [line['step'] for line in log(out) if 'lr' in line] == list(
        range(1, len(losses(out)) + 1)
    )
    third = Run(tmp_path, *options, '--init_from=resume', f'--stop_step={len(losses(out)) + 2}')
    assert third.wait().codes == [train.STOPPED], third.text


def test_runs_started_together_have_folders_of_their_own(data: Path, tmp_path: Path) -> None:
    both = [Run(tmp_path, f'--data={data}', steps(4), damage=Chdir(tmp_path)) for _ in range(2)]
    assert [run.wait().codes for run in both] == [[0], [0]], both[0].text + both[1].text
    one, other = sorted((tmp_path / 'out').iterdir())
    assert other.name == one.name + '-2' and one.name.startswith('mini-cem2-cem2-d_model=8')
    same(one, other)


def test_a_folders_name_says_what_was_changed() -> None:
    def name(**given: Any) -> str:
        return options.new_options(given, TrainConfig, RECIPE)[1]

    assert name() == 'mini-cem2-cem2'
    assert (
        name(device='cpu', learning_rate=8e-3, tokens=4_000_000) == 'mini-cem2-cem2'
    )  # mini's own
    assert name(residual='normed', seed=2) == 'mini-cem2-cem2-residual=normed-seed=2'
    assert name(attn='llama', mlp='llama', data='a/b/') == 'mini-llama1-llama1-data=b'
    assert len(name(data='x' * 500)) <= 150

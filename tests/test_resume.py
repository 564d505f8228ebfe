"""A run that goes on is the run it was, or it is refused; two processes never share a folder."""
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import running
import train
from model import Transformer
from nanocem import runs
from nanocem.runs import checkpoints, read_checkpoint
from running import (
    BATCH,
    RESUME,
    Run,
    assert_one_line,
    losses,
    override,
    result,
    same,
    steps,
    weights,
)


def copied(run: Path, tmp: Path) -> Path:
    return Path(shutil.copytree(run, tmp / 'copied'))


def resume(out: Path, *argv: str, world: int = 1) -> Run:
    return Run(out.parent, f'--out_dir={out}', RESUME, *argv, world=world).wait()


LLAMA = '--attn=llama --mlp=llama --attn_steps=1 --mlp_steps=1'
MODELS = {
    'AdamW, exact update': '--kq_diag=shared --exact_update',
    'reuse, preconditioner': '--attn_reuse=2 --mlp_reuse=2 --preconditioner=diag_lowrank',
    'Muon, reuse': '--optimizer=muon --attn_reuse=2',
    'Muon, Llama, ties, RoPE': f'--optimizer=muon --tie=both {LLAMA}',
}


@pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)
def test_a_run_goes_on_to_the_bit(model: str, tmp_path: Path) -> None:
    straight, out = running.straight_and_stopped(tmp_path, *model.split())
    run = resume(out)
    assert run.codes == [0] and 'resuming after step 6' in run.text, run.text
    same(straight, out)


def with_a_dropout() -> None:
    """Edit model.py in this process: drop a third of the embedding's numbers in training."""
    hidden = Transformer.hidden

    def dropped(model: Transformer, idx: torch.Tensor, *cache: Any) -> torch.Tensor:
        x = hidden(model, idx, *cache)
        return torch.nn.functional.dropout(x, 1 / 3, model.training)

    Transformer.hidden = dropped


def test_a_dropout_of_ones_own_draws_the_same_after_a_resume(data: Path, tmp_path: Path) -> None:
    """In any number of processes, whose micro-batches have masks of their own."""
    def run(out: str, *options: str, world: int = 1) -> Path:
        process = Run(tmp_path, f'--data={data}', f'--out_dir={tmp_path / out}', steps(6), *options,
                      world=world, damage=with_a_dropout).wait()
        assert set(process.codes) <= {0, train.STOPPED}, process.text
        return tmp_path / out

    straight = run('straight')
    for n, world in ((1, 1), (2, 2)):
        run(f'stopped{n}', '--stop_step=3', world=world)
        out = run(f'stopped{n}', RESUME, world=world)
        assert losses(out) == pytest.approx(losses(straight), rel=1e-6 if world > 1 else 0)
    other = run('other', '--seed=7')
    assert losses(other) != losses(straight)


@pytest.mark.parametrize('changes, world, rel', [
    ('--test_tokens=300 --checkpoint_interval=5 --sample_tokens=5 --tensorboard=True', 1, 0),
    ('--micro_batch_size=1 --kernels=False', 2, 1e-4),
], ids=['to the bit', 'two processes'])
def test_what_may_change_leaves_the_losses(
    changes: str, world: int, rel: float, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """Equal to the bit, or as near as sums in another order come."""
    straight, out = halves[0], copied(halves[1], tmp_path)
    run = resume(out, *changes.split(), world=world)
    assert run.codes == [0] * world, run.text
    assert losses(out) == pytest.approx(losses(straight), rel=rel, abs=0)
    if not rel:
        assert all(torch.equal(w, weights(straight)[name]) for name, w in weights(out).items())
    assert result(out)['tokens'] == 12 * BATCH * running.LENGTH


@pytest.mark.parametrize('change', ['seed=1', 'optimizer=muon', 'd_model=16', 'kq_diag=per_head'])
def test_another_recipe_is_refused_by_name(change: str, halves: tuple[Path, Path]) -> None:
    name, value = change.split('=')
    with pytest.raises(SystemExit, match=f'has {name}=.* .now {value}'):
        train.main([f'--out_dir={halves[1]}', RESUME, f'--{change}'])


def remove(entry: str, out: Path) -> None:
    """Let a run be of a time before it had this option or entry."""
    config = json.loads((out / 'config.json').read_text())
    states = {path: torch.load(path, weights_only=True) for path in out.glob('*.pt')}
    for saved in (config, *states.values()):
        for part in (saved, saved.get('model_config', saved['model'])):
            part.pop(entry, None)
    (out / 'config.json').write_text(json.dumps(config))
    for path, state in states.items():
        torch.save(state, path)


@pytest.mark.parametrize(('change', 'default'), [
    ('key_shift=half', 'none'), ('match_bias=token', 'none'), ('n_kv_head=1', '2')])
def test_an_option_that_is_newer_than_a_run_has_its_default(
    change: str, default: str, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    name, value = change.split('=')
    out = copied(halves[1], tmp_path)
    remove(name, out)
    with pytest.raises(SystemExit, match=f'has {name}={default} .now {value}'):
        train.main([f'--out_dir={out}', RESUME, f'--{change}'])
    if name in runs.WEIGHTS:
        with pytest.raises(SystemExit, match=f'has {name}={default} .now {value}'):
            train.main([f'--out_dir={tmp_path / "new"}', f'--init_from={out}', f'--{change}'])
    assert resume(out).codes == [0]
    same(halves[0], out)


def test_before_the_first_checkpoint_too(halves: tuple[Path, Path], tmp_path: Path) -> None:
    out = copied(halves[1], tmp_path)
    for path in out.glob('*.pt'):
        path.unlink()
    with pytest.raises(SystemExit, match=r'has attn_steps=.*, learning_rate='):
        train.main([f'--out_dir={out}', RESUME, '--attn_steps=3', '--learning_rate=0.5'])


def test_other_data_are_refused(halves: tuple[Path, Path], tmp_path: Path) -> None:
    data = Path(shutil.copytree(halves[0].parent / 'data', tmp_path / 'data'))
    content = (data / 'val.bin').read_bytes()
    (data / 'val.bin').write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(SystemExit, match='has val checksum='):
        train.main([f'--out_dir={halves[1]}', RESUME, f'--data={data}'])


def test_a_text_may_be_named_again_and_must_be_the_same(tmp_path: Path) -> None:
    there = partial(os.chdir, tmp_path)
    options = ['--text=a.txt', '--tokenizer=byte', '--out_dir=o', steps(4)]
    (tmp_path / 'a.txt').write_text('A few words. ' * 2000)
    run = Run(tmp_path, *options, '--stop_step=2', damage=there).wait()
    assert run.codes == [train.STOPPED], run.text
    run = Run(tmp_path, *options, RESUME, damage=there).wait()
    assert run.codes == [0] and 'resuming after step 2' in run.text, run.text
    run = Run(tmp_path, '--text=./a.txt', '--out_dir=o', RESUME, damage=there).wait()
    assert run.codes == [0], run.text
    run = Run(tmp_path, *override(options, '--text=b.txt'), RESUME, damage=there).wait()
    assert run.codes == [1] and 'the run in o has text=a.txt (now b.txt)' in run.text, run.text


def test_fine_tuning_keeps_its_tokenizer(tmp_path: Path) -> None:
    """Also if it is resumed without a checkpoint, and without its data."""
    there = partial(os.chdir, tmp_path)
    shutil.copy(running.ROOT / 'README.md', tmp_path / 'a.txt')
    first = ['--text=a.txt', '--tokenizer=bpe400', '--out_dir=first', steps(1)]
    assert Run(tmp_path, *first, damage=there).wait().codes == [0]
    tuned = ['--text=a.txt', '--init_from=first', '--out_dir=o', steps(2), '--stop_step=1']
    assert Run(tmp_path, *tuned, damage=there).wait().codes == [train.STOPPED]
    for path in (tmp_path / 'o').glob('*.pt'):
        path.unlink()
    shutil.rmtree(tmp_path / 'data')
    run = Run(tmp_path, '--out_dir=o', RESUME, damage=there).wait()
    assert run.codes == [0], run.text
    read = [runs.best_checkpoint(str(tmp_path / name))['data'] for name in ('first', 'o')]
    assert read[0]['tokenizer_sha256'] == read[1]['tokenizer_sha256'] is not None


# Another length

def files(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.iterdir() if path.name != '.lock'}


def test_a_finished_run_stays_as_it_is(halves: tuple[Path, Path], tmp_path: Path) -> None:
    """Its result is that of its own precision and test, whatever a reader asks for."""
    out = copied(halves[0], tmp_path)
    before = files(out)
    for world in 1, 2:
        run = resume(out, '--dtype=bfloat16', '--test_tokens=300', '--sample_tokens=5', world=world)
        assert run.codes == [0] * world and files(out) == before
        assert run.text.count(f'{out} is finished, and result.json has its test') == 1
    with pytest.raises(SystemExit, match='has seed='):
        train.main([f'--out_dir={out}', RESUME, '--seed=5'])
    assert files(out) == before


def test_a_result_names_every_precision(halves: tuple[Path, Path], tmp_path: Path) -> None:
    """Also if the last weights were only tested in another one."""
    for n, source in enumerate(halves):
        out = copied(source, tmp_path / str(n))
        (out / 'result.json').unlink(missing_ok=True)
        run = resume(out, '--dtype=bfloat16')
        assert run.codes == [0] and result(out)['precision'] == 'float32 then bfloat16', run.text
    assert result(halves[0])['precision'] == 'float32'


@pytest.mark.parametrize('stop', [12, 6], ids=['after its end', 'before its end'])
def test_another_length_is_another_run(
    stop: int, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its learning rates would be those of no run."""
    out = copied(halves[stop != 12], tmp_path)
    before = files(out)
    for n in 5, 20:
        with pytest.raises(SystemExit, match=rf'tokens=384 \(now {32 * n}\).*--init_from={out}'):
            train.main([f'--out_dir={out}', RESUME, steps(n)])
    assert files(out) == before
    run = resume(out, steps(12))
    assert run.codes == [0] and losses(out) == losses(halves[0]), run.text
    tuned = Run(tmp_path, f'--init_from={out}', f'--out_dir={tmp_path / "tuned"}', steps(3)).wait()
    assert tuned.codes == [0], tuned.text


def test_an_old_result_ends_where_a_new_run_begins(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """In a folder whose run was deleted."""
    new = tmp_path / 'new'
    new.mkdir()
    (new / 'result.json').write_bytes((halves[0] / 'result.json').read_bytes())
    run = Run(tmp_path, f'--data={halves[0].parent / "data"}', f'--out_dir={new}', steps(12),
              '--stop_step=1').wait()
    assert run.codes == [train.STOPPED] and not (new / 'result.json').exists()


# Weights of another run

def test_weights_of_another_run_start_a_new_one(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    """Also if a loop of one's own has saved them."""
    out, source = tmp_path / 'tuned', tmp_path / 'own.pt'
    best = read_checkpoint(str(halves[0] / 'best.pt'))
    torch.save(best, source)
    run = Run(tmp_path, f'--out_dir={out}', f'--init_from={source}', steps(2),  # on its data
              '--learning_rate=0', '--attn_steps=3', '--stop_step=1').wait()
    assert run.codes == [train.STOPPED], run.text
    for path in [*out.glob('*.pt')]:  # a run that was stopped before its first checkpoint
        path.unlink()
    assert resume(out).codes == [0]
    for name, value in weights(out).items():  # at a rate of 0 they stay
        assert torch.equal(value, best['model'][name]), name
    model, state = runs.load_model(str(out / 'step_00000002.pt'))
    assert model.cfg.attn_steps == 3 and state['step'] == 2 and not model.training


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    data, out = running.write_data(tmp_path / 'data'), tmp_path / 'o'
    run = Run(tmp_path, f'--data={data}', f'--out_dir={out}', steps(2), '--d_model=64',
              *LLAMA.split(), '--tie=both').wait()
    assert run.codes == [0], run.text
    state = read_checkpoint(checkpoints(str(out))[-1])
    assert not [name for name in state['model'] if name.endswith(('W_V', 'W_O'))]
    runs.load_model(str(out))
    # The weights and the two moments of AdamW
    n_bytes = 3 * 4 * result(out)['parameters']
    assert n_bytes < os.path.getsize(out / 'step_00000002.pt') < n_bytes + 2e4


def test_weights_that_do_not_fit_are_refused(halves: tuple[Path, Path], tmp_path: Path) -> None:
    other = running.write_data(tmp_path / 'data', vocab_size=257)
    running.edit_meta(other, tokenizer='another')
    options = [f'--data={other}', f'--init_from={halves[0]}', '--device=cpu']
    with pytest.raises(SystemExit, match=r'has tokenizer=byte .now another'):
        train.main(options)
    with pytest.raises(SystemExit, match=r'has attn=cem .now llama'):
        train.main([*options, '--attn=llama', '--attn_steps=1'])


def test_one_more_epoch_keeps_the_recipe(data: Path, tmp_path: Path) -> None:
    """The line that refuses more steps has the options of a new run that trains the weights on."""
    out, new = tmp_path / 'o', tmp_path / 'new'
    recipe = dict(batch_size=2, optimizer='muon', learning_rate=0.003, warmup=0.1, seed=7)
    flags = [f'--{name}={value}' for name, value in recipe.items()]
    flags = running.override(running.TINY, f'--data={data}', '--micro_batch_size=1', *flags)
    assert train.main([*flags, steps(1), f'--out_dir={out}']) == 0
    with pytest.raises(SystemExit) as stop:
        train.main([RESUME, f'--out_dir={out}', steps(2)])
    _, _, line = stop.value.code.partition('A new run can train its weights further: ')
    given = [*line.replace('--tokens=N', steps(1)).split(), '--device=cpu', '--compile=False']
    assert train.main([*given, f'--out_dir={new}', '--sample_tokens=0']) == 0
    before, after = (json.loads((run / 'config.json').read_text()) for run in (out, new))
    assert {name: after['train'][name] for name in runs.RECIPE} == {
        name: before['train'][name] for name in runs.RECIPE}
    assert after['model'] == before['model'] and after['train']['batch_size'] == 2


# Folders

def test_a_folder_has_one_run_at_a_time(data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    options = [f'--data={data}', f'--out_dir={out}', '--checkpoint_interval=5']
    first = Run(tmp_path, *options, steps(100_000))
    running.wait_for(lambda: len(checkpoints(str(out))) >= 2)
    assert_one_line(Run(tmp_path, *options).wait(), f'out_dir={out}: another process is training')
    assert_one_line(resume(out), f'out_dir={out}', 'another process is training there')
    os.kill(first.processes[0].pid, signal.SIGKILL)
    first.wait()
    third = Run(tmp_path, *options, RESUME, f'--stop_step={len(losses(out)) + 2}')
    assert third.wait().codes == [train.STOPPED], third.text

"""Whatever a command meets, it works or says in one line why not, within seconds.

A folder holds what the scripts left: a finished run in run/ and its data in data/, texts/ and what
became of them in prepared/, and a table in gp/. Each command is started there once,
after something happened to a path that concerns it, or to its process, drawn at random.
"""
import gzip
import json
import os
import random
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running import Run, steps, without_room, write_data


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def holding(content: bytes) -> Callable[[Path], Any]:
    """Whatever was there becomes a file with this content."""
    return lambda path: (removed(path), path.write_bytes(content))


def linked_to(target: str) -> Callable[[Path], Any]:
    return lambda path: (removed(path), path.symlink_to(target))


def cut(path: Path) -> None:
    if path.is_file():
        os.truncate(path, path.stat().st_size // 3)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    'as it was': lambda path: None,
    'gone': removed,
    'cut': cut,
    'empty': holding(b''),
    'no text': holding(b'\xff\xfe\x00'),
    'no object': holding(b'[1]'),
    'other lines': holding(b'5\n"a"\n{}\n\xff\n{"text": 1}\n'),
    'nested': holding(b'[' * 100_000),
    'a folder': lambda path: (removed(path), path.mkdir()),
    'a dangling link': linked_to('none/o'),
    'a link to itself': linked_to('.'),
    'a device': linked_to('/dev/null'),
}
RUN = 'run run/config.json run/log.jsonl run/result.json run/best.pt run/*.pt run/.lock'
DATA = 'data data/meta.json data/train_00000.bin data/test.bin'
TEXTS = 'texts texts/a.txt texts/b.jsonl texts/c.jsonl.gz texts/p.parquet texts/caf\udce9.txt'
PREPARED = 'prepared prepared/.lock prepared/meta.json prepared/val.bin'
PATHS = {'train': f'{RUN} {DATA} c.py', 'sample': RUN, 'evaluate': f'{RUN} {DATA} {TEXTS} out',
         'prepare_slimpajama': f'{TEXTS} {PREPARED}',
         'synthetic_gp': 'gp gp/table*.md gp/figure*.png out'}


def into_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)


# What is wrong with the process that runs the command
PROCESS: dict[str, Callable[[], Any]] = {
    'stdout a closed pipe': into_a_closed_pipe,
    'stdout ASCII': lambda: sys.stdout.reconfigure(encoding='ascii', errors='strict'),
    'no room on the disk': partial(without_room, 3000),
    'as ever': lambda: None,
}


def in_folder(folder: str, process: str = 'as ever') -> None:
    """In the child: go there, and do to its process what is wrong with it."""
    os.chdir(folder)
    PROCESS[process]()


RESUMED = '--init_from=resume --out_dir=run'
NEW = f'--data=data --stop_step=2 {steps(20)}'
EVALUATE = '--out_dir=run --tokens=100 --device=cpu'
PREPARE = '--tokenizer=byte --input=texts'
GP = ('--points=40 --test_points=10 --batch_size=20 --steps=3 --repeats=2 --kernels=rbf '
      '--models=Plain,CEM-T2 --jobs=1')
COMMANDS = {
    'train': [
        RESUMED, f'{RESUMED} {steps(14)} --stop_step=13 --sample_tokens=3', f'{RESUMED} --seed=3',
        f'{NEW} --out_dir=run', f'c.py {NEW} --out_dir=caf\udce9', f'{NEW} --init_from=run',
        f'{NEW} --init_from=run/best.pt', f'{NEW} --device=cuda',
        f'{NEW} --init_std=1e30 --stop_step=99 {steps(3)}',
        f'{NEW} --tensorboard=True --sample_interval=1 --sample_tokens=2 --vocab_size=300'],
    'sample': [
        '--tokens=3', '--out_dir=run/best.pt --tokens=3 --top_k=1000000 --attn_steps=5',
        '--out_dir=run --checkpoint=last --tokens=3 --prompt=caf\udce9 --num_samples=2',
        '--out_dir=run --temperature=0 --tokens=3 --prompt=FILE:run/config.json'],
    'evaluate': [
        EVALUATE, f'{EVALUATE} --split=val --checkpoint=last', f'{EVALUATE} --text=texts/a.txt',
        f'{EVALUATE} --steps=1,2 --energies', f'{EVALUATE} --export=new',
        f'{EVALUATE} --attention="A cat" --steps=3', f'{EVALUATE} --data=prepared',
        '--compare run data run'],
    'prepare_slimpajama': [
        f'{PREPARE} --out_dir=new', f'{PREPARE} --out_dir=prepared', f'{PREPARE} --out_dir=texts',
        f'{PREPARE} --out_dir=new --tokens=500',
        f'{PREPARE}/c.jsonl.gz --out_dir=new'],
    'synthetic_gp': [f'{GP} --out_dir=gp', f'{GP} --out_dir=gp --learning_rate=1e30', GP],
}


@pytest.fixture(scope='session')
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that each command finds, in its place, here/."""
    tmp = tmp_path_factory.mktemp('situations')
    here = tmp / 'here'
    write_data(here / 'data', vocab_size=257)
    lines = ''.join(json.dumps({'text': f'Line {n}, and more of it.'}) + '\n' for n in range(200))
    (here / 'texts').mkdir()
    (here / 'texts/a.txt').write_text('The text of a caf\u00e9.\n' * 50)
    (here / 'texts/b.jsonl').write_text(lines)
    (here / 'texts/c.jsonl.gz').write_bytes(gzip.compress(lines.encode()))
    for script, options in (('train', f'--data=data {steps(12)} --out_dir=run --eval_interval=4'),
                            ('prepare_slimpajama', f'{PREPARE} --out_dir=prepared'),
                            ('synthetic_gp', f'{GP} --out_dir=gp')):
        run = Run(tmp, *options.split(), script=script, damage=partial(in_folder, str(here))).wait()
        assert run.codes == [0], run.text
    (here / 'out/results').mkdir(parents=True)
    return here.rename(tmp / 'whole')


Case = tuple[str, str, str, str, str]  # script, options, path, what happens to it, to the process


def cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    return [(script, options, rng.choice(PATHS[script].split()), rng.choice([*DAMAGE]),
             rng.choice([*PROCESS, *['as ever'] * 8]))
            for script, given in COMMANDS.items() for options in given]


@pytest.mark.parametrize('case', cases(seed=1), ids=' | '.join)
def test_a_command_in_a_situation_works_or_says_why_not(
    case: Case, whole: Path, tmp_path: Path
) -> None:
    script, options, path, damage, process = case
    here = whole.with_name('here')
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(whole, here, symlinks=True)
    for found in list(here.glob(path)) or [here / path]:
        DAMAGE[damage](found)
    changed = partial(in_folder, str(here), process)
    run = Run(tmp_path, *shlex.split(options), script=script, damage=changed).wait(300)
    about = (*case, run.codes, run.text)
    assert 'Traceback' not in run.text and 'Exception' not in run.text, about
    assert run.codes[0] in (0, 1, 75), about
    said = [line for line in run.text.splitlines() if line.startswith(f'{script}.py: ')]
    assert len(said) == (run.codes[0] == 1), about

"""Whatever a command meets, it works or says in one line why not, within seconds.

A situation is done to a folder that holds what the scripts left: a finished run in run/ and its
data in data/, texts/ and what became of them in prepared/, and the cells of a table in gp/. A
command is a script and its options, started in that folder. Random pairs of a command and a
situation that concerns it are tried.
"""
import gzip
import json
import os
import random
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Run, steps


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def holding(content: bytes) -> Callable[[Path], None]:
    """Whatever was there becomes a file with this content."""
    return lambda path: (removed(path), path.write_bytes(content))


def linked_to(target: str) -> Callable[[Path], None]:
    return lambda path: (removed(path), path.symlink_to(target))


def cut(path: Path) -> None:
    if path.is_file():
        os.truncate(path, path.stat().st_size // 3)


def edited(**changes: Any) -> Callable[[Path], None]:
    """A JSON file with other values; of a value that is an object, what is given."""
    def edit(path: Path) -> None:
        config = json.loads(path.read_text())
        for key, value in changes.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        path.write_text(json.dumps(config))
    return edit


# What can happen to any path, and to some
DAMAGE: dict[str, Callable[[Path], Any]] = {
    'gone': removed,
    'cut': cut,
    'empty': holding(b''),
    'a byte': holding(b'x'),
    'no text': holding(b'\xff\xfe\x00'),
    'no object': holding(b'[1]'),
    'other lines': holding(b'5\n"a"\n{}\n\xff\n{"text": 1}\n'),
    'nested': holding(b'[' * 100_000),
    'a folder': lambda path: (removed(path), path.mkdir()),
    'a dangling link': linked_to('none/o'),
    'a device': linked_to('/dev/null'),
    'in /proc': linked_to('/proc'),
}
PATHS = {
    'run': ['run', 'run/config.json', 'run/log.jsonl', 'run/result.json', 'run/best.pt', 'run/*.pt',
            'run/.lock', 'data', 'data/meta.json', 'data/train_00000.bin', 'data/test.bin', 'c.py'],
    'texts': ['texts', 'texts/a.txt', 'texts/b.jsonl', 'texts/c.jsonl.gz', 'texts/p.parquet',
              'texts/p.jsonl.zst', 'texts/caf\udce9.txt'],
    'prepared': ['prepared', 'prepared/.lock', 'prepared/meta.json', 'prepared/val.bin'],
    'gp': ['gp', 'gp/cells', 'gp/table.md', 'gp/figure.png', 'gp/cells/*'],
    'out': ['out', 'out/results'],
}
Situation = tuple[str, Callable[[Path], Any]]  # of which path, and what is done to it
SITUATIONS: dict[str, dict[str, Situation]] = {
    group: {f'{path} {name}': (path, damage) for path in paths for name, damage in DAMAGE.items()}
    for group, paths in PATHS.items()}
SITUATIONS['run'] |= {
    'nothing': ('run', lambda path: None),
    'config of a list': ('run/config.json', edited(train={'seed': [1]})),
    'config of an unknown option': ('run/config.json', edited(model={'b': 1})),
    'best.pt a tensor': ('run/best.pt', lambda path: torch.save(torch.zeros(2), path)),
    'meta of wrong types': ('data/meta.json', edited(vocab_size='a', dtype=5, splits=[])),
}
SITUATIONS['texts'] |= {
    'a pipe that nobody writes to': ('texts/p.txt', lambda path: os.mkfifo(path)),
    'a link to itself': ('texts/more', linked_to('.')),
    'half a pair': ('texts/b.jsonl', holding(b'{"text": "\\ud800"}')),
}
CONCERNS = {'train': ['run'], 'sample': ['run'], 'evaluate': ['run', 'texts', 'out'],
            'prepare_slimpajama': ['texts', 'prepared'], 'synthetic_gp': ['gp', 'out'],
            'reproduce': ['out'], 'bench': ['out']}


def into_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)


def without_room() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))


# What is wrong with the process that runs the command
PROCESS: dict[str, Callable[[], Any]] = {
    'as ever': lambda: None,
    'stdout a closed pipe': into_a_closed_pipe,
    'stdout ASCII': lambda: sys.stdout.reconfigure(encoding='ascii', errors='strict'),
    'no room on the disk': without_room,
}


def in_folder(folder: str, process: str) -> None:
    """In the child: go there, and do to its process what is wrong with it."""
    os.chdir(folder)
    PROCESS[process]()


RESUMED = '--init_from=resume --out_dir=run'
NEW = f'--data=data --stop_step=2 {steps(20)}'
EVALUATE = '--out_dir=run --tokens=100 --device=cpu'
PREPARE = '--tokenizer=byte --input=texts'
GP = ('--points=40 --test_points=10 --batch_size=20 --steps=3 --repeats=2 --kernels=rbf '
      '--models=Plain,CEM-T2 --jobs=1')
COMMANDS: dict[str, list[str]] = {
    'train': [
        RESUMED, f'{RESUMED} {steps(14)} --stop_step=13 --sample_tokens=3', f'{RESUMED} --seed=3',
        f'{RESUMED} --dtype=bfloat16 {steps(13)}', f'{NEW} --out_dir=run', NEW, f'c.py {NEW}',
        f'{NEW} --init_from=run', f'{NEW} --init_from=run/best.pt', f'{NEW} --device=cuda',
        f'{NEW} --init_std=1e30 --stop_step=99 {steps(3)}',
        f'{NEW} --tensorboard=True --sample_interval=1 --sample_tokens=2 --vocab_size=300',
    ],
    'sample': [
        '--out_dir=run --tokens=3', '--out_dir=run/best.pt --tokens=3', '--tokens=3',
        '--out_dir=run --checkpoint=last --tokens=3 --prompt=caf\udce9 --num_samples=2',
        '--out_dir=run --temperature=0 --tokens=3 --prompt=FILE:run/config.json',
        '--out_dir=run --seed=99999999999999999999', '--out_dir=run --prompt=FILE:gone',
        '--out_dir=run --tokens=3 --top_k=1000000 --attn_steps=5', '--out_dir=run --attn_steps=0',
    ],
    'evaluate': [
        EVALUATE, f'{EVALUATE} --split=val', f'{EVALUATE} --text=texts/a.txt', '--device=cpu',
        f'{EVALUATE} --steps=1,2', f'{EVALUATE} --energies', f'{EVALUATE} --export=run',
        f'{EVALUATE} --attention="A cat" --steps=3', f'{EVALUATE} --data=prepared',
        '--compare run data run', '--compare', f'{EVALUATE} --checkpoint=last',
    ],
    'prepare_slimpajama': [
        f'{PREPARE} --out_dir=new', f'{PREPARE} --out_dir=prepared', f'{PREPARE} --out_dir=texts',
        f'{PREPARE} --out_dir=new --skip_bad --seed=3 --tokens=500 --shard_tokens=100', PREPARE,
        f'{PREPARE}/c.jsonl.gz --out_dir=new', f'{PREPARE}/a.txt --out_dir=new --held_out=0',
        '--tokenizer=byte --input=prepared --out_dir=prepared', f'{PREPARE} --workers=0',
    ],
    'synthetic_gp': [
        f'{GP} --out_dir=gp', f'{GP} --out_dir=gp --models=CEM-T2,Gated', GP, f'{GP} --models=CEM',
        f'{GP} --out_dir=run/best.pt', f'{GP} --out_dir=gp --learning_rate=1e30',
        f'{GP} --out_dir=new --points=1 --batch_size=1', f'{GP} --batch_size=50',
    ],
    'reproduce': ['--list', 'fig_none', '--jobs=0', '--sizes=none'],
    'bench': ['--size=huge', '--device=cuda', '--threads=9999', '--what=none'],
}


@pytest.fixture(scope='session')
def whole(halves: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that each command gets a copy of."""
    tmp = tmp_path_factory.mktemp('situations')
    here = tmp / 'whole'
    shutil.copytree(halves[0], here / 'run')
    shutil.copytree(halves[0].parent / 'data', here / 'data')
    for path in (here / 'run').glob('*.pt'):
        torch.save({**torch.load(path, weights_only=True), 'data_dir': 'data'}, path)
    edited(train={'data': 'data'})(here / 'run/config.json')
    lines = ''.join(json.dumps({'text': f'Line {n}, and more of it.'}) + '\n' for n in range(200))
    (here / 'texts').mkdir()
    (here / 'out/results').mkdir(parents=True)
    (here / 'texts/a.txt').write_text('The text of a caf\u00e9.\n' * 50)
    (here / 'texts/b.jsonl').write_text(lines)
    (here / 'texts/c.jsonl.gz').write_bytes(gzip.compress(lines.encode()))
    for script, options in (('prepare_slimpajama', f'{PREPARE} --out_dir=prepared'),
                            ('synthetic_gp', f'{GP} --out_dir=gp')):
        damage = partial(in_folder, str(here), 'as ever')
        run = Run(tmp, *options.split(), script=script, damage=damage).wait()
        assert run.codes == [0], run.text
    return here


Pair = tuple[str, str, str, str, str]  # group, situation, what is wrong with the process, command


def pairs(n: int, seed: int) -> list[Pair]:
    """As many of each script."""
    rng = random.Random(seed)
    made = []
    for script in (sorted(COMMANDS) * n)[:n]:
        process = rng.choice(sorted(PROCESS)) if rng.random() < 0.3 else 'as ever'
        group = rng.choice(CONCERNS[script])
        situation = rng.choice(sorted(SITUATIONS[group]))
        made.append((group, situation, process, script, rng.choice(COMMANDS[script])))
    return made


@pytest.mark.parametrize('pair', pairs(28, seed=1), ids=' | '.join)
def test_a_command_in_a_situation_works_or_says_why_not(
    pair: Pair, whole: Path, tmp_path: Path
) -> None:
    group, situation, process, script, options = pair
    here = Path(shutil.copytree(whole, tmp_path / 'here', symlinks=True))
    meta = here / 'prepared/meta.json'  # it names its input by an absolute path
    meta.write_text(meta.read_text().replace(str(whole), str(here)))
    path, damage = SITUATIONS[group][situation]
    for found in list(here.glob(path)) or [here / path]:
        damage(found)
    changed = partial(in_folder, str(here), process)
    run = Run(tmp_path, *shlex.split(options), script=script, damage=changed).wait(300)
    about = (*pair, run.codes, run.text)
    assert 'Traceback' not in run.text and 'Exception' not in run.text, about
    assert run.codes[0] in (0, 1, 75), about
    said = [line for line in run.text.splitlines() if line.startswith(f'{script}.py: ')]
    assert len(said) == (run.codes[0] == 1), about

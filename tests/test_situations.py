"""Whatever a command meets, it works or says in one line why not, within seconds.

A situation is done to a folder that holds a finished run, run/, and its data, data/; a command is a
script and its options, started in that folder. Random pairs of them are tried: a few by default,
many with -m slow. Add situations and commands to the two tables.
"""
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Run, steps

STOPPED = 75


def replaced(path: Path, content: bytes) -> None:
    """Whatever is at `path` becomes a file with this content."""
    removed(path)
    path.write_bytes(content)


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def folder_at(path: Path) -> None:
    removed(path)
    path.mkdir()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def edited(path: Path, part: str, **changes: Any) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, part: {**config[part], **changes}}))


def other_checkpoint(path: Path, content: Any) -> None:
    torch.save(content, path)


# What happened to the folder before the command.
FOLDER: dict[str, Callable[[Path], Any]] = {
    'nothing': lambda f: None,
    'config.json cut': lambda f: cut(f / 'run/config.json'),
    'config.json no object': lambda f: replaced(f / 'run/config.json', b'[1]'),
    'config.json a folder': lambda f: folder_at(f / 'run/config.json'),
    'config.json of wrong types': lambda f: edited(f / 'run/config.json', 'train', seed=[1]),
    'config.json of an unknown option': lambda f: edited(f / 'run/config.json', 'model', b=1),
    'config.json of another model': lambda f: edited(f / 'run/config.json', 'model', d_model=6),
    'False as text': lambda f: edited(f / 'run/config.json', 'train', tensorboard='False'),
    'log.jsonl cut': lambda f: cut(f / 'run/log.jsonl'),
    'log.jsonl of other lines': lambda f: replaced(f / 'run/log.jsonl', b'5\n"a"\n{}\n\xff\n'),
    'log.jsonl a folder': lambda f: folder_at(f / 'run/log.jsonl'),
    'result.json a folder': lambda f: folder_at(f / 'run/result.json'),
    'result.json cut': lambda f: cut(f / 'run/result.json'),
    'result.json gone': lambda f: removed(f / 'run/result.json'),
    '.lock a folder': lambda f: folder_at(f / 'run/.lock'),
    'best.pt cut': lambda f: cut(f / 'run/best.pt'),
    'best.pt empty': lambda f: replaced(f / 'run/best.pt', b''),
    'best.pt a folder': lambda f: folder_at(f / 'run/best.pt'),
    'best.pt a tensor': lambda f: other_checkpoint(f / 'run/best.pt', torch.zeros(2)),
    'best.pt of other words': lambda f: other_checkpoint(f / 'run/best.pt', {'model': 1}),
    'best.pt of wrong types': lambda f: other_checkpoint(
        f / 'run/best.pt', dict(model=[1], model_config={'size': 3}, step=1, data={}, data_dir='')),
    'checkpoints cut': lambda f: [cut(p) for p in (f / 'run').glob('step_*.pt')],
    'checkpoints gone': lambda f: [removed(p) for p in (f / 'run').glob('*.pt')],
    'the run gone': lambda f: removed(f / 'run'),
    'the run a file': lambda f: replaced(f / 'run', b'x'),
    'the run a device': lambda f: (removed(f / 'run'), (f / 'run').symlink_to('/dev/null')),
    'the run a dangling link': lambda f: (removed(f / 'run'), (f / 'run').symlink_to('none/o')),
    'the run an empty folder': lambda f: folder_at(f / 'run'),
    'the run in /proc': lambda f: (removed(f / 'run'), (f / 'run').symlink_to('/proc')),
    'data gone': lambda f: removed(f / 'data'),
    'data a file': lambda f: replaced(f / 'data', b'x'),
    'meta.json cut': lambda f: cut(f / 'data/meta.json'),
    'meta.json of wrong types': lambda f: replaced(
        f / 'data/meta.json', b'{"format": 1, "vocab_size": "a", "dtype": 5, "splits": [], '
        b'"tokenizer": 1}'),
    'meta.json of another tokenizer': lambda f: replaced(
        f / 'data/meta.json',
        (f / 'data/meta.json').read_bytes().replace(b'"byte"', b'"other"')),
    'a shard cut': lambda f: cut(f / 'data/train_00000.bin'),
    'a shard a folder': lambda f: folder_at(f / 'data/test.bin'),
    'a config with a mark in front': lambda f: replaced(f / 'c.py', b'\xef\xbb\xbfseed = 2\n'),
    'a config that is no text': lambda f: replaced(f / 'c.py', b'\xff\xfe\x00'),
}


def into(path: str) -> None:
    """stdout and stderr go to this file."""
    handle = os.open(path, os.O_WRONLY)
    os.dup2(handle, 1)


def into_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)


def without_room() -> None:
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))


# What is wrong with the process that runs the command.
PROCESS: dict[str, Callable[[], Any]] = {
    'as ever': lambda: None,
    'stdout full': lambda: into('/dev/full'),
    'stdout a closed pipe': into_a_closed_pipe,
    'stdout ASCII': lambda: sys.stdout.reconfigure(encoding='ascii', errors='strict'),
    'no room on the disk': without_room,
}


@dataclass
class Damage:
    """In the child: what is wrong with its process, in the folder."""
    folder: str
    name: str
    keep: list[Any] = field(default_factory=list)

    def __call__(self) -> None:
        os.chdir(self.folder)
        PROCESS[self.name]()


RESUME = '--init_from=resume --out_dir=run'
NEW = f'--data=data --stop_step=2 {steps(20)}'
COMMANDS: dict[str, list[str]] = {
    'train': [
        RESUME, f'{RESUME} {steps(14)}', f'{RESUME} {steps(14)} --stop_step=13 --sample_tokens=3',
        f'{RESUME} --seed=3', f'{RESUME} --dtype=bfloat16 {steps(13)}', f'{NEW} --out_dir=run',
        f'{NEW} --out_dir=new', NEW, f'{NEW} --init_from=run', f'{NEW} --init_from=run/best.pt',
        f'c.py {NEW}', f'{NEW} --device=cuda', f'{NEW} --attn_step_size=inf', f'{NEW} --tokens=1.5',
        f'{NEW} --init_std=1e30 --max_skipped=1000 --stop_step=99 {steps(3)}',
        f'{NEW} --tensorboard=True --sample_interval=1 --sample_tokens=2 --vocab_size=300',
    ],
    'sample': [
        '--out_dir=run --tokens=3', '--out_dir=run/best.pt --tokens=3', '--tokens=3',
        '--out_dir=run --checkpoint=last --tokens=3 --prompt=caf\udce9 --samples=2',
        '--out_dir=run --device=cuda', '--out_dir=run --temperature=1e-30',
        '--out_dir=run --temperature=0 --tokens=3', '--out_dir=run --seed=99999999999999999999',
        '--out_dir=run --seed=9223372036854775807 --samples=2 --tokens=2',
        '--out_dir=run --tokens=3 --top_k=1000000 --attn_steps=5', '--out_dir=run --attn_steps=0',
    ],
}


def tried(folder: str, process: str, script: str, options: str, halves: tuple[Path, Path],
          tmp: Path) -> int:
    """One command in one situation. Returns its exit code."""
    here = tmp / 'here'
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(halves[0], here / 'run')
    shutil.copytree(halves[0].parent / 'data', here / 'data')
    for path in (here / 'run').glob('*.pt'):
        state = torch.load(path, weights_only=True)
        torch.save({**state, 'data_dir': 'data'}, path)
    edited(here / 'run/config.json', 'train', data='data')
    FOLDER[folder](here)
    run = Run(tmp, *options.split(), script=script, damage=Damage(str(here), process)).wait(60)
    about = (folder, process, script, options, run.codes, run.text)
    assert 'Traceback' not in run.text and 'Exception' not in run.text, about
    assert run.codes[0] in (0, 1, STOPPED), about
    said = [line for line in run.text.splitlines() if line.startswith(f'{script}.py: ')]
    assert len(said) == (run.codes[0] == 1), about
    return run.codes[0]


def pairs(n: int, seed: int) -> list[tuple[str, str, str, str]]:
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        script = rng.choice(sorted(COMMANDS))
        process = rng.choice(sorted(PROCESS)) if rng.random() < 0.3 else 'as ever'
        made.append((rng.choice(sorted(FOLDER)), process, script, rng.choice(COMMANDS[script])))
    return made


@pytest.mark.parametrize('pair', pairs(12, seed=1), ids=' | '.join)
def test_a_command_in_a_situation_works_or_says_why_not(
    pair: tuple[str, str, str, str], halves: tuple[Path, Path], tmp_path: Path
) -> None:
    tried(*pair, halves, tmp_path)


@pytest.mark.slow
def test_many_pairs(halves: tuple[Path, Path], tmp_path: Path) -> None:
    """(pytest -m slow -s -k many_pairs prints how they ended.)"""
    codes = [tried(*pair, halves, tmp_path) for pair in pairs(400, seed=2)]
    counts = {code: codes.count(code) for code in sorted(set(codes))}
    print(f'\n{len(codes)} pairs of a situation and a command: exit codes {counts}, no traceback')
    assert min(counts[0], counts[1]) > 40

"""Whatever a command meets, it works or says in one line why not, within seconds.

A situation is done to a folder that holds what the scripts left: a finished run in run/ and its
data in data/, texts/ and what became of them in prepared/, the cells of a table in gp/, and the
only run of a tiny ladder in out/. A command is a script and its options, started in that folder.
Random pairs of a command and a situation that concerns it are tried: a few by default, many with
-m slow. Add situations and commands to the two tables.
"""
import gzip
import json
import os
import random
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import ROOT, Run, steps

from nanocem import ladder
from nanocem.ladder import FAMILIES

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


def linked(path: Path, target: str) -> None:
    removed(path)
    path.symlink_to(target)


def piped(path: Path) -> None:
    """A pipe that nobody writes to: to read it is to wait for ever."""
    removed(path)
    os.mkfifo(path)


def each(folder: Path, pattern: str, damage: Callable[..., Any], *more: Any,
         **changes: Any) -> None:
    """The same damage to all files of a pattern, which there must be."""
    found = list(folder.glob(pattern))
    assert found, pattern
    for path in found:
        damage(path, *more, **changes)


def edited(path: Path, **changes: Any) -> None:
    """A JSON file with other values; of a value that is an object, what is given."""
    config = json.loads(path.read_text())
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if both else value
    path.write_text(json.dumps(config))


def edited_shards(folder: Path, **changes: Any) -> None:
    meta = json.loads((folder / 'prepared/meta.json').read_text())
    meta['splits']['val']['shards'][0] |= changes
    (folder / 'prepared/meta.json').write_text(json.dumps(meta))


def begun(folder: Path, **changes: Any) -> None:
    """prepared/ as a run leaves it that is stopped before it names its shards."""
    path = folder / 'prepared/meta.json'
    meta = json.loads(path.read_text())
    state = {name: meta[name] for name in ('config', 'source', 'listing', 'by_position', 'skipped')}
    state |= dict(file=len(meta['files']), last={'train': len(meta['files']) - 1},
                  tokens={split: of['tokens'] for split, of in meta['splits'].items()})
    (folder / 'prepared/progress.json').write_text(json.dumps({**state, **changes}))
    path.unlink()


def other_checkpoint(path: Path, content: Any) -> None:
    torch.save(content, path)


# What happened to the folder before the command, by what it happened to.
LADDER = 'out/reproduce/ladder/s1/*'
FOLDER: dict[str, dict[str, Callable[[Path], Any]]] = {
    'run': {
        'nothing': lambda f: None,
        'config.json cut': lambda f: cut(f / 'run/config.json'),
        'config.json no object': lambda f: replaced(f / 'run/config.json', b'[1]'),
        'config.json a folder': lambda f: folder_at(f / 'run/config.json'),
        'config.json of wrong types': lambda f: edited(f / 'run/config.json', train={'seed': [1]}),
        'config.json of an unknown option': lambda f: edited(f / 'run/config.json', model={'b': 1}),
        'config.json of another model': lambda f: edited(
            f / 'run/config.json', model={'d_model': 6}),
        'False as text': lambda f: edited(
            f / 'run/config.json', train={'tensorboard': 'False'}),
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
        'best.pt of wrong types': lambda f: other_checkpoint(f / 'run/best.pt', dict(
            model=[1], model_config={'size': 3}, step=1, data={}, data_dir='')),
        'checkpoints cut': lambda f: [cut(p) for p in (f / 'run').glob('step_*.pt')],
        'checkpoints gone': lambda f: [removed(p) for p in (f / 'run').glob('*.pt')],
        'the run gone': lambda f: removed(f / 'run'),
        'the run a file': lambda f: replaced(f / 'run', b'x'),
        'the run a device': lambda f: linked(f / 'run', '/dev/null'),
        'the run a dangling link': lambda f: linked(f / 'run', 'none/o'),
        'the run an empty folder': lambda f: folder_at(f / 'run'),
        'the run in /proc': lambda f: linked(f / 'run', '/proc'),
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
    },
    'texts': {
        'texts gone': lambda f: removed(f / 'texts'),
        'texts a file': lambda f: replaced(f / 'texts', b'x'),
        'texts an empty folder': lambda f: folder_at(f / 'texts'),
        'texts with a link to themselves': lambda f: linked(f / 'texts/more', '.'),
        'texts with a pipe': lambda f: piped(f / 'texts/p.txt'),
        'texts with a text of a byte': lambda f: replaced(f / 'texts/b.txt', b'x'),
        'texts with a .parquet that is none': lambda f: replaced(f / 'texts/p.parquet', b'PAR1'),
        'texts with a .zst that is none': lambda f: replaced(f / 'texts/p.jsonl.zst', b'x' * 99),
        'a name that is no text': lambda f: replaced(f / 'texts/caf\udce9.txt', b'caf\xe9 ' * 99),
        'a.txt empty': lambda f: replaced(f / 'texts/a.txt', b''),
        'a.txt not UTF-8': lambda f: replaced(f / 'texts/a.txt', b'caf\xe9 ' * 99),
        'a.txt a folder': lambda f: folder_at(f / 'texts/a.txt'),
        'a.txt a pipe': lambda f: piped(f / 'texts/a.txt'),
        'a.txt a dangling link': lambda f: linked(f / 'texts/a.txt', 'none'),
        'a .gz cut': lambda f: cut(f / 'texts/c.jsonl.gz'),
        'a .gz empty': lambda f: replaced(f / 'texts/c.jsonl.gz', b''),
        'a .gz that is none': lambda f: replaced(f / 'texts/c.jsonl.gz', b'{"text": "x"}\n'),
        'a .jsonl cut': lambda f: cut(f / 'texts/b.jsonl'),
        'a .jsonl of other lines': lambda f: replaced(f / 'texts/b.jsonl', b'5\n\xff\n{"text": 1}'),
        'a .jsonl of a number': lambda f: replaced(f / 'texts/b.jsonl', b'{"text": 1}\n'),
        'a .jsonl of half a pair': lambda f: replaced(f / 'texts/b.jsonl', b'{"text": "\\ud800"}'),
    },
    'prepared': {
        'prepared gone': lambda f: removed(f / 'prepared'),
        'prepared a file': lambda f: replaced(f / 'prepared', b'x'),
        'prepared in /proc': lambda f: linked(f / 'prepared', '/proc'),
        'prepared a dangling link': lambda f: linked(f / 'prepared', 'none'),
        'its .lock a folder': lambda f: folder_at(f / 'prepared/.lock'),
        'its meta.json gone': lambda f: removed(f / 'prepared/meta.json'),
        'its meta.json cut': lambda f: cut(f / 'prepared/meta.json'),
        'its meta.json a folder': lambda f: folder_at(f / 'prepared/meta.json'),
        'its meta.json of a folder above': lambda f: edited_shards(f, file='../../x'),
        'its meta.json of no tokens': lambda f: edited_shards(f, tokens=0),
        'its meta.json of few words': lambda f: edited(
            f / 'prepared/meta.json', splits={'val': {}}),
        'its meta.json of text': lambda f: edited(f / 'prepared/meta.json', dtype='U5'),
        'its meta.json of objects': lambda f: edited(f / 'prepared/meta.json', dtype='object'),
        'its meta.json of a list': lambda f: edited(f / 'prepared/meta.json', config=[1]),
        'a prepared shard cut': lambda f: cut(f / 'prepared/val.bin'),
        'a prepared shard of a byte': lambda f: replaced(f / 'prepared/val.bin', b'x'),
        'a prepared shard empty': lambda f: replaced(f / 'prepared/val.bin', b''),
        'a prepared shard gone': lambda f: removed(f / 'prepared/val.bin'),
        'a prepared shard a folder': lambda f: folder_at(f / 'prepared/val.bin'),
        'begun': lambda f: begun(f),
        'begun, its shards gone': lambda f: (begun(f), each(f, 'prepared/*.bin', removed)),
        'begun, its shards folders': lambda f: (begun(f), each(f, 'prepared/*.bin', folder_at)),
        'begun, without its file': lambda f: begun(f, file=None),
        'begun, beyond its files': lambda f: begun(f, file=99),
        'begun, its tokens a list': lambda f: begun(f, tokens=[1]),
        'begun, its tokens below none': lambda f: begun(f, tokens=dict(train=-1, val=-1, test=-1)),
        'begun, its source a number': lambda f: begun(f, source=5),
        'begun, its skipped a number': lambda f: begun(f, skipped=5, last=5),
    },
    'gp': {
        'gp a file': lambda f: replaced(f / 'gp', b'x'),
        'gp in /proc': lambda f: linked(f / 'gp', '/proc'),
        'gp/cells a file': lambda f: replaced(f / 'gp/cells', b'x'),
        'gp/table.md a folder': lambda f: folder_at(f / 'gp/table.md'),
        'gp/figure.png a folder': lambda f: folder_at(f / 'gp/figure.png'),
        'GP cells cut': lambda f: each(f, 'gp/cells/*', cut),
        'GP cells folders': lambda f: each(f, 'gp/cells/*', folder_at),
        'GP cells no objects': lambda f: each(f, 'gp/cells/*', replaced, b'[1]'),
    },
    'out': {
        'out a file': lambda f: replaced(f / 'out', b'x'),
        'out in /proc': lambda f: linked(f / 'out', '/proc'),
        'out a dangling link': lambda f: linked(f / 'out', 'none'),
        'out/results a file': lambda f: replaced(f / 'out/results', b'x'),
        'out/results in /proc': lambda f: linked(f / 'out/results', '/proc'),
    },
    'ladder': {
        'results a file': lambda f: replaced(f / 'results', b'x'),
        'rates.json a folder': lambda f: folder_at(f / 'results/ladder/rates.json'),
        'rates.json cut': lambda f: cut(f / 'results/ladder/rates.json'),
        'rates.json without rates': lambda f: replaced(f / 'results/ladder/rates.json', b'{}'),
        'rates.json of few models': lambda f: replaced(
            f / 'results/ladder/rates.json', b'{"rates": {"llama": {"s1": 0.004}}}'),
        'rates.json of text': lambda f: edited(
            f / 'results/ladder/rates.json', rates={of: {'s1': 'a'} for of in FAMILIES}),
        'train.py gone': lambda f: removed(f / 'train.py'),
        'the ladder its own': lambda f: removed(f / 'out'),
        'result.json of the ladder cut': lambda f: each(f, f'{LADDER}/result.json', cut),
        'result.json of the ladder a folder': lambda f: each(f, f'{LADDER}/result.json', folder_at),
        'result.json of the ladder gone': lambda f: each(f, f'{LADDER}/result.json', removed),
        'result.json of the ladder empty': lambda f: each(
            f, f'{LADDER}/result.json', replaced, b'{}'),
        'result.json of the ladder of text': lambda f: each(
            f, f'{LADDER}/result.json', edited, test_perplexity='a'),
        'result.json of the ladder below 0': lambda f: each(
            f, f'{LADDER}/result.json', edited, test_perplexity=-1.0),
        'result.json of the ladder of few numbers': lambda f: each(
            f, f'{LADDER}/result.json', replaced, b'{"test_perplexity": 5.0}'),
        'config.json of the ladder cut': lambda f: each(f, f'{LADDER}/config.json', cut),
        'config.json of the ladder gone': lambda f: each(f, f'{LADDER}/config.json', removed),
        'config.json of the ladder no object': lambda f: each(
            f, f'{LADDER}/config.json', replaced, b'{"train": 1, "model": [1]}'),
        'config.json of the ladder another': lambda f: each(
            f, f'{LADDER}/config.json', edited, train={'batch_size': 3}),
        'log.jsonl of the ladder gone': lambda f: each(f, f'{LADDER}/log.jsonl', removed),
        'log.jsonl of the ladder of other lines': lambda f: each(
            f, f'{LADDER}/log.jsonl', replaced, b'5\n"a"\n{}\n\xff\n{"tokens": 3}\n'),
        'checkpoints of the ladder cut': lambda f: each(f, f'{LADDER}/*.pt', cut),
        'checkpoints of the ladder gone': lambda f: each(f, f'{LADDER}/*.pt', removed),
    },
}
CONCERNS = {
    'train': ['run'], 'sample': ['run'], 'evaluate': ['run', 'run', 'texts', 'out'],
    'prepare_slimpajama': ['texts', 'prepared'], 'synthetic_gp': ['gp', 'gp', 'out'],
    'reproduce': ['ladder', 'ladder', 'out', 'run'], 'bench': ['out', 'out', 'run'],
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
        ladder.SCALES['ladder'] = SCALE
        os.chdir(self.folder)
        PROCESS[self.name]()


# A ladder of a size and a seed, at rates that are chosen already.
SIZE = {'s1': 'config/ladder.py --n_layer=1 --d_model=16 --n_head=1 --d_mlp=24 --context_length=16 '
        '--tokens_per_param=0.1 --batch_size=8 --micro_batch_size=8 --eval_tokens=500 '
        '--test_tokens=500'}
SCALE = replace(ladder.SCALES['ladder'], sizes=SIZE, sweep_sizes=SIZE, seeds=(1,))
RATES = {'exponent': 0, 'best': {}, 'rates': {of: {'s1': 0.004} for of in FAMILIES}}

RESUME = '--init_from=resume --out_dir=run'
NEW = f'--data=data --stop_step=2 {steps(20)}'
LOOK = '--out_dir=run --tokens=100 --device=cpu'
PREPARE = '--tokenizer=byte --input=texts'
GP = ('--points=40 --test_points=10 --batch_size=20 --steps=3 --repeats=2 --kernels=rbf '
      '--models=Plain,CEM-T2 --jobs=1')
BENCH = ('--size=nano --context_length=32 --batch_size=2 --repeats=1 --decode_context=16 '
         '--decode_tokens=4 --threads=1 --device=cpu')
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
    'evaluate': [
        LOOK, f'{LOOK} --split=val', f'{LOOK} --text=texts/a.txt', f'{LOOK} --text=none.txt',
        f'{LOOK} --steps=1,2', f'{LOOK} --energies', f'{LOOK} --attention="A cat" --steps=3',
        f'{LOOK} --attention="more than seven tokens"', f'{LOOK} --data=prepared', '--device=cpu',
        f'{LOOK} --export=hub', f'{LOOK} --export=run', f'{LOOK} --export=texts/a.txt',
        '--compare run data run', '--compare', '--compare=none', f'{LOOK} --checkpoint=last',
        '--out_dir=run/best.pt --tokens=9', f'{LOOK} --data=data --text=texts/a.txt',
        f'{LOOK} --steps=0', f'{LOOK} --device=cuda', '--compare run out/reproduce/ladder/s1/*',
    ],
    'prepare_slimpajama': [
        f'{PREPARE} --out_dir=new', f'{PREPARE} --out_dir=prepared', f'{PREPARE} --out_dir=texts',
        f'{PREPARE} --out_dir=new --skip_bad', f'{PREPARE} --out_dir=prepared --skip_bad',
        f'{PREPARE} --out_dir=texts/a.txt', f'{PREPARE}/a.txt --out_dir=new --held_out=0',
        f'{PREPARE}/c.jsonl.gz --out_dir=new', f'{PREPARE}/none --out_dir=new', PREPARE,
        f'{PREPARE} --out_dir=new --seed=3 --tokens=500 --shard_tokens=100 --skip_bad',
        '--tokenizer=byte --input=prepared --out_dir=prepared', f'{PREPARE} --workers=0',
        '--tokenizer=byte --input=data --out_dir=new', f'{PREPARE} --column=words --out_dir=new',
        '--input=texts --tokenizer=texts/a.txt --out_dir=new', f'{PREPARE} --eos --out_dir=new',
        '--peek=val --out_dir=prepared', '--peek --out_dir=prepared', '--peek --out_dir=data',
        '--verify --out_dir=prepared', '--verify --out_dir=data', '--verify --out_dir=none',
    ],
    'synthetic_gp': [
        f'{GP} --out_dir=gp', f'{GP} --out_dir=gp', f'{GP} --out_dir=gp --models=CEM-T2,Gated', GP,
        f'{GP} --out_dir=new --quick', f'{GP} --out_dir=run/best.pt',
        f'{GP} --out_dir=gp --kernels=rbf,matern --jobs=2', f'{GP} --batch_size=50',
        f'{GP} --out_dir=gp --learning_rate=1e30', f'{GP} --kernels=linear', f'{GP} --models=CEM',
        f'{GP} --out_dir=new --steps=1 --repeats=1 --points=1 --batch_size=1 --test_points=1',
        f'{GP} --out_dir=new --points=1 --batch_size=1 --seed=3', f'{GP} --device=cuda',
        f'{GP} --out_dir=gp --points=9 --batch_size=9 --stop=end',
    ],
    'reproduce': [
        '--list', '--plan --jobs=1', 'ladder --plan', 'fig_energy --list', 'fig_energy --jobs=1',
        'fig_energy --jobs=1', 'fig_energy claims --publish --jobs=1', 'claims', 'claims',
        'claims --publish', 'fig_none', '--sizes=83k', '--jobs=0', 'claims --seeds=7',
        'fig_energy --scale=paper --sizes=86m', 'ladder --seeds=1,1', 'fig_tokens --list',
    ],
    'bench': [
        f'{BENCH} --what=cost --against=T', f'{BENCH} --what=cost --against=T --json=b.json',
        f'{BENCH} --what=attention', f'{BENCH} --what=attention --json=run/config.json',
        f'{BENCH} --what=attention --json=out/results/b.json', f'{BENCH} --what=cost --publish',
        f'{BENCH} --what=attention --json=run', f'{BENCH} --json=/proc/b.json',
        f'{BENCH} --what=gpu', f'{BENCH} --what=gpu,cost', f'{BENCH} --publish --what=decode',
        f'{BENCH} --what=gpu --rehearse --parts="cost T"', f'{BENCH} --threads=9999',
        f'{BENCH} --what=attention --json=', f'{BENCH} --size=huge',
    ],
}


@pytest.fixture(scope='session')
def whole(halves: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that each command gets a copy of."""
    tmp = tmp_path_factory.mktemp('situations')
    here = tmp / 'whole'
    shutil.copytree(halves[0], here / 'run')
    shutil.copytree(halves[0].parent / 'data', here / 'data')
    for path in (here / 'run').glob('*.pt'):
        state = torch.load(path, weights_only=True)
        torch.save({**state, 'data_dir': 'data'}, path)
    edited(here / 'run/config.json', train={'data': 'data'})
    lines = ''.join(json.dumps({'text': f'Line {n}, and more of it.'}) + '\n' for n in range(200))
    for folder in ('texts', 'results/ladder'):
        (here / folder).mkdir(parents=True)
    (here / 'texts/a.txt').write_text('The text of a caf\u00e9.\n' * 50)
    (here / 'texts/b.jsonl').write_text(lines)
    (here / 'texts/c.jsonl.gz').write_bytes(gzip.compress(lines.encode()))
    (here / 'results/ladder/rates.json').write_text(json.dumps(RATES))
    (here / 'data/corpus').symlink_to('.')
    (here / 'train.py').symlink_to(ROOT / 'train.py')
    for script, options in (('prepare_slimpajama', f'{PREPARE} --out_dir=prepared'),
                            ('synthetic_gp', f'{GP} --out_dir=gp'),
                            ('reproduce', 'fig_energy --jobs=1')):
        run = Run(tmp, *options.split(), script=script, damage=Damage(str(here), 'as ever')).wait()
        assert run.codes == [0], run.text
    return here


def tried(group: str, folder: str, process: str, script: str, options: str, whole: Path, tmp: Path,
          ) -> int:
    """One command in one situation. Returns its exit code."""
    here = tmp / 'here'
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(whole, here, symlinks=True)
    meta = here / 'prepared/meta.json'  # it names its input by an absolute path
    meta.write_text(meta.read_text().replace(str(whole), str(here)))
    FOLDER[group][folder](here)
    damage = Damage(str(here), process)
    run = Run(tmp, *shlex.split(options), script=script, damage=damage).wait(300)
    about = (folder, process, script, options, run.codes, run.text)
    assert 'Traceback' not in run.text and 'Exception' not in run.text, about
    assert run.codes[0] in (0, 1, STOPPED), about
    said = [line for line in run.text.splitlines() if line.startswith(f'{script}.py: ')]
    assert len(said) == (run.codes[0] == 1), about
    return run.codes[0]


Pair = tuple[str, str, str, str, str]


def pairs(n: int, seed: int) -> list[Pair]:
    """As many of each script."""
    rng = random.Random(seed)
    made = []
    for script in (sorted(COMMANDS) * n)[:n]:
        process = rng.choice(sorted(PROCESS)) if rng.random() < 0.3 else 'as ever'
        group = rng.choice(CONCERNS[script])
        made.append((group, rng.choice(sorted(FOLDER[group])), process, script,
                     rng.choice(COMMANDS[script])))
    return made


@pytest.mark.parametrize('pair', pairs(20, seed=1), ids=' | '.join)
def test_a_command_in_a_situation_works_or_says_why_not(
    pair: Pair, whole: Path, tmp_path: Path
) -> None:
    tried(*pair, whole, tmp_path)


@pytest.mark.slow
def test_many_pairs(whole: Path, tmp_path: Path) -> None:
    """(pytest -m slow -s -k many_pairs prints how they ended.)"""
    codes = Counter((pair[3], tried(*pair, whole, tmp_path)) for pair in pairs(400, seed=2))
    for script in COMMANDS:
        counts = {code: n for (of, code), n in sorted(codes.items()) if of == script}
        print(f'{script}: {sum(counts.values())} pairs, exit codes {counts}, no traceback')
        assert min(counts[0], counts[1]) > 10

"""Helpers of several test files: token shards, runs as processes, and the files that they write."""
import atexit
import contextlib
import json
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train
from nanocem.data import FORMAT
from nanocem.runs import checkpoints, read_checkpoint

ROOT = Path(__file__).parent.parent
FORK = multiprocessing.get_context('forkserver')  # children start with torch already imported
FORK.set_forkserver_preload(['train', 'pytest', 'torch._dynamo'])  # which every optimizer needs
VOCAB, LENGTH, BATCH = 30, 8, 4
TINY = (
    f'--d_model=8 --n_layer=1 --n_head=2 --d_mlp=8 --context_length={LENGTH} --batch_size={BATCH} '
    '--micro_batch_size=2 --log_interval=1 --eval_interval=10 --eval_tokens=200 --test_tokens=200 '
    '--tensorboard=False --sample_tokens=0 --device=cpu --compile=False --optimizer=adamw '
    '--learning_rate=8e-3 --attn_steps=2 --mlp_steps=2'
).split()
RESUME = '--init_from=resume'
SIZE_FILES = [f'config/{size}.py' for size in ('mini', 'nano', 'shakespeare', 'xs', 's', 'm')]
MODEL_FILES = sorted({f'config/{path.name}' for path in (ROOT / 'config').glob('*.py')}
                     - {*SIZE_FILES, 'config/finetune.py'})


def write_data(folder: Path, vocab_size: int = VOCAB, ids: list[int] | None = None) -> Path:
    """Write a data folder as prepare_slimpajama.py does, with random tokens or with `ids`. Its
    tokenizer is byte."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    splits = {}
    for split, n in (('train', 2), ('val', 1), ('test', 1)):
        entries = []
        for s in range(n):
            shard = rng.integers(0, VOCAB, 4000 + 13 * s) if ids is None else np.array(ids)
            name = f'train_{s:05d}.bin' if split == 'train' else f'{split}.bin'
            shard.astype('<u2').tofile(folder / name)
            entries.append(dict(file=name, tokens=len(shard)))
        splits[split] = dict(tokens=sum(e['tokens'] for e in entries), shards=entries)
    meta = dict(format=FORMAT, tokenizer='byte', tokenizer_sha256=None, bos=0, dtype='uint16',
                vocab_size=vocab_size, splits=splits)
    (folder / 'meta.json').write_text(json.dumps(meta))
    return folder


def edit_meta(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change entries of meta.json. Returns its splits as they were."""
    meta = json.loads((folder / 'meta.json').read_text())
    (folder / 'meta.json').write_text(json.dumps({**meta, **changes}))
    return meta['splits']


def override(flags: list[str], *given: str) -> list[str]:
    """Return flags without those that are given in their place, and then these."""
    names = {word.partition('=')[0] for word in given}
    return [*(flag for flag in flags if flag.partition('=')[0] not in names), *given]


def child(work: Callable[[], Any], output: Path, errors: Path, env: dict[str, str]) -> None:
    """Call `work` in this fresh process, with what it prints in files, and end as Python does."""
    for fd, path in ((1, output), (2, errors)):
        with open(path, 'ab') as file:
            os.dup2(file.fileno(), fd)
    os.environ.update(env)
    torch.set_num_threads(1)
    code: Any = 1
    try:
        work()
        code = 0
    except SystemExit as error:  # do what the interpreter does
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # of a stream that is gone
            stream.flush()
    os._exit(code or 0)


def train_main(argv: list[str], damage: Any) -> None:
    """Call `damage`, then train.main."""
    sys.argv = ['train.py', *argv]
    if damage:
        damage()
    sys.exit(train.main(argv))


def script_main(path: Path, argv: list[str], cwd: Path, before: Any) -> None:
    """Call `before`, then what `python path argv` would in this folder."""
    os.chdir(cwd)
    if before:
        before()
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name='__main__')


def run_script(path: Path, *argv: str, cwd: Path, before: Any = None,
               **env: str) -> subprocess.CompletedProcess:
    """Run a script as a process that has torch and train.py imported already: it starts in no time.
    `before` is called in it first. The result is that of subprocess.run."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, 'out'), Path(folder, 'err')
        work = partial(script_main, path, argv, cwd, before)
        process = FORK.Process(target=child, args=(work, output, errors, env))
        process.start()
        process.join()
        return subprocess.CompletedProcess([path, *argv], process.exitcode, output.read_text(),
                                           errors.read_text())


class Run:
    """Start train.py in `world` processes."""
    def __init__(self, tmp: Path, *argv: str, world: int = 1, damage: Any = None):
        options = list(argv) if RESUME in argv else override(TINY, *argv)
        port = free_port()
        self.outputs: list[Path] = []
        self.processes: list[Any] = []
        for rank in range(world):
            output = tmp / f'output-{random.getrandbits(40)}-{rank}.txt'
            group = dict(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                         MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
            env = group if world > 1 else {}
            work = partial(train_main, options, damage)
            process = FORK.Process(target=child, args=(work, output, output, env))
            process.start()
            self.outputs.append(output)
            self.processes.append(process)

    def wait(self, timeout: float = 600) -> 'Run':
        for process in self.processes:
            process.join(timeout)
            hangs = process.exitcode is None
            process.kill()
            assert not hangs, f'still running: {self.text}'
        return self

    @property
    def codes(self) -> list[int]:
        return [p.exitcode for p in self.processes]

    @property
    def text(self) -> str:
        return ''.join(p.read_text(errors='replace') for p in self.outputs if p.exists())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def steps(n: int) -> str:
    """Return the option for a run of n steps."""
    return f'--tokens={n * BATCH * LENGTH}'


def straight_and_stopped(tmp: Path, *options: str) -> tuple[Path, Path]:
    """Return two folders of the same run, one after 12 steps and one stopped after 6. The data is
    beside them, and its vocabulary holds all bytes, so that both can be sampled."""
    data = write_data(tmp / 'data', vocab_size=257)
    common = [f'--data={data}', steps(12), '--eval_interval=4', '--checkpoint_interval=3', *options]
    straight = Run(tmp, *common, f'--out_dir={tmp / "straight"}')
    stopped = Run(tmp, *common, f'--out_dir={tmp / "stopped"}', '--stop_step=6')
    codes = straight.wait().codes, stopped.wait().codes
    assert codes == ([0], [train.STOPPED]), straight.text + stopped.text
    return tmp / 'straight', tmp / 'stopped'


def log(out: Path) -> list[dict]:
    """Read a run's log, without the values that depend on the clock and the machine."""
    lines = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    clock = ('tokens_per_s', 'mfu', 'memory_gb', 'seconds')
    return [{k: v for k, v in line.items() if k not in clock} for line in lines]


def losses(out: Path) -> list[float]:
    lines = [line for line in log(out) if 'lr' in line]
    assert [line['step'] for line in lines] == list(range(1, len(lines) + 1)), 'every step once'
    return [line['loss'] for line in lines]


def result(out: Path) -> dict[str, Any]:
    content = json.loads((out / 'result.json').read_text())
    return {k: v for k, v in content.items() if k != 'seconds'}


def weights(out: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(checkpoints(str(out))[-1])['model']


def same(a: Path, b: Path) -> None:
    """Assert that two runs have equal logs, results and weights, to the last bit."""
    assert log(a) == log(b) and result(a) == result(b)
    assert weights(a).keys() == weights(b).keys()
    assert all(torch.equal(w, weights(b)[name]) for name, w in weights(a).items())


def wait_for(condition: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'timeout'
        time.sleep(0.02)


def assert_one_line(run: Run, *words: str) -> None:
    """Assert that all processes ended with code 1 and that the output is one line with `words`."""
    lines = [line for line in run.text.splitlines() if line]
    assert run.codes == [1] * len(run.codes) and 'Traceback' not in run.text, run.text
    assert len(lines) == 1 and all(w in lines[0] for w in words), run.text

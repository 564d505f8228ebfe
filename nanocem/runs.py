"""Run folders: their names and locks, checkpoints, log, and the signals that stop a run."""
import contextlib
import glob
import io
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
import zipfile
from dataclasses import asdict
from typing import Any, Literal

import torch

from configurator import build, check_values, fail
from model import ModelConfig, Transformer
from nanocem.files import append_whole, lock, read_json, say, to_json, write_whole
from nanocem.world import find_device

OWN = ('config.json', 'log.jsonl', 'result.json', 'best.pt')  # and step_*.pt: what a run writes
KEPT = {'model', 'model_config', 'step', 'data', 'data_dir'}  # in every checkpoint, old ones too


# Folders

def claim(out_dir: str | None, name: str, held: contextlib.ExitStack) -> str:
    """A folder for a new run, made, and locked while `held` is open: `out_dir`, or the first free
    one of out/name, out/name-2, ... SystemExit where it holds a run or another program's files."""
    try:
        path = out_dir or free_folder(f'out/{name}')
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        fail(f'out_dir={out_dir or f"out/{name}"}: {error.strerror}; expected a folder to write in')
    hold(path, held)
    found = [own for own in OWN if os.path.lexists(os.path.join(path, own))]
    if checkpoints(path) or 'result.json' in found or 'best.pt' in found:
        fail(f'out_dir={path} holds a run already: --init_from=resume goes on with it, another '
             '--out_dir starts beside it')
    if found and read_config(path) is None:
        fail(f'out_dir={path} holds a {found[0]} that no run wrote; expected a folder of its own')
    return path


def free_folder(path: str) -> str:
    """Make and return path, or path-2, ...: the first that is not there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for n in itertools.count(1):
        numbered = f'{path}-{n}' if n > 1 else path
        try:
            os.mkdir(numbered)
            return numbered
        except FileExistsError:
            continue


def which(origin: str | None, out_dir: str | None) -> tuple[str | None, bool]:
    """The folder of the run that init_from=`origin` means, if it is known yet, and whether the run
    goes on: because it was asked to, or because torchrun --max-restarts starts it again."""
    if origin == 'resume':
        return out_dir or newest_run(), True
    if restarted():
        out_dir = out_dir or newest_run(mine=True)
        return out_dir, read_config(out_dir) is not None
    return out_dir, False


def restarted() -> bool:
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)) > 0


def hold(out_dir: str, held: contextlib.ExitStack) -> None:
    """Lock a run's folder while `held` is open. SystemExit where another process has it; but what
    torchrun starts again waits for its former life to end."""
    try:
        handle = lock(os.path.join(out_dir, '.lock'), wait=restarted())
        if handle is None:
            fail(f'out_dir={out_dir}: another process is training there; wait for it, stop it, or '
                 'start beside it with another --out_dir')
        held.callback(os.close, handle)
        for name in glob.glob('*.tmp', root_dir=out_dir):  # left half written by a killed run
            whole = name.removesuffix('.tmp')
            if whole in OWN or checkpoint_step(whole) is not None:
                os.remove(os.path.join(out_dir, name))
    except OSError as error:
        fail(f'out_dir={out_dir}: {error.strerror}; expected a folder to write in')


def launcher() -> str:
    """What started this process, the same after torchrun restarts it."""
    return f'{socket.gethostname()}:{os.getppid()}'


def read_config(out_dir: str | None) -> dict[str, Any] | None:
    """A run's config.json; None where there is none that can be read."""
    try:
        config = read_json(os.path.join(out_dir or '', 'config.json'))
    except SystemExit:
        return None
    if config is None or not all(isinstance(config.get(k), dict) for k in ('train', 'model')):
        return None
    return config


def save_config(out_dir: str, train: dict[str, Any], model: dict[str, Any], new: bool) -> None:
    """Write config.json. A new run cannot be without it; one that goes on has it already."""
    config = {'train': train, 'model': model, 'launcher': launcher()}
    try:
        os.makedirs(out_dir, exist_ok=True)
        write_whole(os.path.join(out_dir, 'config.json'), json.dumps(config, indent=1).encode())
    except OSError as error:
        if new:
            fail(f'out_dir={out_dir}: config.json not written ({error.strerror})')
        say(f'WARNING: config.json not written ({error.strerror}); the run goes on')


def save_result(out_dir: str, result: dict[str, Any]) -> bool:
    """Write result.json. False, with a warning, where the disk does not take it."""
    try:
        write_whole(os.path.join(out_dir, 'result.json'), to_json(result, indent=1))
        return True
    except OSError as error:
        say(f'WARNING: result.json not written ({error.strerror}); once there is room, '
            f'--init_from=resume --out_dir={out_dir} writes it')
        return False


def is_finished(out_dir: str, steps: int) -> bool:
    """Whether the run has its result after so many steps. Says so; its files stay as they are."""
    result = read_json(os.path.join(out_dir, 'result.json')) or {}
    finished = result.get('steps') == steps
    if finished:
        say(f'{out_dir} is finished after {steps:,} steps: test perplexity '
            f'{result.get("test_perplexity")}; --tokens=N, above its {result.get("tokens")}, '
            'trains on')
    return finished


def newest_run(mine: bool = False) -> str | None:
    """The folder under out/ whose run was started or resumed last; or last by this launcher."""
    paths = sorted(glob.glob('out/*/config.json'), key=os.path.getmtime)
    runs = [os.path.dirname(path) for path in paths]
    if mine:
        runs = [run for run in runs if (read_config(run) or {}).get('launcher') == launcher()]
    return runs[-1] if runs else None


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """The fields of two descriptions that differ, in words; how attention is computed (attn_impl)
    makes no difference."""
    return ', '.join(f'{key}={saved.get(key)} (now {now[key]})' for key in now
                     if key != 'attn_impl' and now[key] != saved.get(key))


# Checkpoints

def checkpoint_step(name: str) -> int | None:
    """The step in the name of a numbered checkpoint; None for any other file."""
    match = re.fullmatch(r'step_(\d{8,})\.pt', os.path.basename(name))
    return int(match[1]) if match else None


def checkpoints(out_dir: str) -> list[str]:
    """The numbered checkpoints, oldest first."""
    paths = glob.glob(os.path.join(glob.escape(out_dir), 'step_*.pt'))
    return sorted((p for p in paths if checkpoint_step(p) is not None), key=checkpoint_step)


def save_checkpoint(out_dir: str, state: dict[str, Any], best: bool = False, keep: int = 2) -> None:
    """Write best.pt or step_*.pt, whole or not at all; a warning where the disk does not take it.
    Then let the numbered ones up to this step go, but the last `keep`. (One of a later step is
    damaged, or the run would have begun from it.)"""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = os.path.join(out_dir, 'best.pt' if best else f'step_{state["step"]:08d}.pt')
    try:
        write_whole(path, buffer.getbuffer())
        numbered = [p for p in checkpoints(out_dir) if checkpoint_step(p) <= state['step']]
        for old in [] if best else numbered[:-keep]:
            os.remove(old)
    except OSError as error:
        say(f'WARNING: {path} not written ({error.strerror}); the run goes on, earlier checkpoints '
            'are whole')


def read_checkpoint(path: str) -> dict[str, Any]:
    """A checkpoint's content: tensors and plain values only, every byte checked. ValueError where
    it is damaged or something else."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f'checksum of {damaged}')
        state = torch.load(path, map_location='cpu', weights_only=True)
        if missing := KEPT - set(state):
            raise ValueError(f'it holds no {", ".join(sorted(missing))}')
        if not isinstance(state['model_config'], dict):
            raise ValueError('its model_config is none')
        return state
    except Exception as error:  # a damaged file can fail in any way
        words = str(error).partition('\n')[0] or type(error).__name__
        raise ValueError(f'{path} is damaged ({words})') from None


def last_checkpoint(out_dir: str) -> dict[str, Any] | None:
    """The newest whole checkpoint; damaged ones are named and passed over. None where none is."""
    for path in reversed(checkpoints(out_dir)):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            say(f'WARNING: {error}; trying the one before it')
    return None


def where_it_stood(out_dir: str) -> dict[str, Any] | None:
    """The checkpoint that a resumed run goes on from; None where it was stopped before its first.
    SystemExit where a finished run has none left."""
    state = last_checkpoint(out_dir)
    if state is None and os.path.exists(os.path.join(out_dir, 'result.json')):
        fail(f'out_dir={out_dir}: the run is finished, and has no whole checkpoint to go on from')
    if state is None:
        say(f'No checkpoint in {out_dir} yet: starting from step 0')
    return state


def read_run(path: str, checkpoint: Literal['best', 'last'] = 'best') -> dict[str, Any]:
    """A run's checkpoint, the best by validation where there is one, or a checkpoint file. Its
    model_config is complete and checked. SystemExit."""
    best = path if os.path.isfile(path) else os.path.join(path, 'best.pt')
    try:
        wanted = checkpoint == 'best' or best == path
        state = read_checkpoint(best) if wanted and os.path.exists(best) else last_checkpoint(path)
    except ValueError as error:
        fail(f'{error}; the last checkpoint of the run may be whole')
    if state is None:
        fail(f'no checkpoint in {path}: python train.py makes one')
    given = check_values(state['model_config'], f'the checkpoint in {path}', ModelConfig)
    return {**state, 'model_config': asdict(build(ModelConfig, given))}


def check_same(out_dir: str, state: dict[str, Any], now: dict[str, Any]) -> None:
    """SystemExit unless the checkpoint is of the run that `now` describes."""
    if 'schedule' not in state:
        fail(f'{out_dir} was trained by an earlier version and lacks what an exact resume needs; '
             f'--init_from={out_dir} with another --out_dir starts a new run from its weights')
    for part in ('model_config', 'data', 'recipe'):
        if different := differences(state[part], now[part]):
            name = {'model_config': 'architecture'}.get(part, part)
            fail(f'the checkpoint in {out_dir} is of another {name}: {different}')


def check_same_tokenizer(where: str, was: dict[str, Any], now: dict[str, Any]) -> None:
    """SystemExit unless the data a run was trained on has the tokenizer of today's."""
    names = ('tokenizer', 'tokenizer_sha256')
    if different := differences(was, {name: now[name] for name in names}):
        fail(f'the data is of another tokenizer than that of the run in {where}: {different}')


def load_weights(model: Transformer, state: dict[str, Any], where: str) -> None:
    """A checkpoint's weights into the model; SystemExit where they do not fit."""
    try:
        model.load_state_dict(state['model'])
    except (RuntimeError, TypeError, AttributeError) as error:
        words = ' '.join(str(error).split())[:300]
        fail(f'the weights in {where} do not fit the model: {words}')


def load_run(out_dir: str | None, checkpoint: Literal['best', 'last'] = 'best',
             device: str = 'cpu') -> tuple[Transformer, dict[str, Any]]:
    """The model of a run (None: the newest under out/) on a device, ready to evaluate, and its
    checkpoint: step, data (what it was trained on), data_dir, model_config. SystemExit."""
    out_dir = out_dir or newest_run() or fail('no run in out/: python train.py makes one')
    state = read_run(out_dir, checkpoint)
    model = Transformer(ModelConfig(**state['model_config']))
    load_weights(model, state, out_dir)
    return model.to(find_device(device)).eval(), state


# Log and signals

class Log:
    """log.jsonl and TensorBoard from the same numbers. Each fails by itself, with a warning when it
    begins to, and takes new lines when it can again: lines are lost, not the run."""
    def __init__(self, out_dir: str, step: int, tensorboard: bool):
        self.out_dir = out_dir
        self.path = os.path.join(out_dir, 'log.jsonl')
        self.tensorboard = tensorboard
        self.writer: Any = None
        self.purge: int | None = step + 1  # TensorBoard forgets what came after the checkpoint
        self.failed: dict[str, float] = {}  # who failed, and when
        self.attempt('log.jsonl', self.cut, step)

    def __call__(self, step: int, **values: Any) -> None:
        line = to_json({'step': step, **values}) + b'\n'
        self.attempt('log.jsonl', append_whole, self.path, line)
        if self.tensorboard:
            self.attempt('TensorBoard', self.add_events, step, values)

    def attempt(self, who: str, write: Any, *args: Any) -> None:
        if time.monotonic() < self.failed.get(who, -60.0) + 60 * (who == 'TensorBoard'):
            return  # every attempt makes it a new file
        try:
            write(*args)
            self.failed.pop(who, None)
        except Exception as error:  # of any kind: no logger ends a run
            if who not in self.failed:
                words = getattr(error, 'strerror', None) or error
                say(f'WARNING: {who} does not get its lines ({words}); the run goes on')
            self.failed[who] = time.monotonic()

    def cut(self, step: int) -> None:
        """Remove the lines after `step`, which will be done and logged again, and damaged ones."""
        content, kept = b'', b''
        if os.path.exists(self.path):
            with open(self.path, 'rb') as file:
                content = file.read()
        for line in content.splitlines(keepends=True):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if json.loads(line)['step'] <= step and line.endswith(b'\n'):
                    kept += line
        if kept != content and content.startswith(kept):
            os.truncate(self.path, len(kept))  # needs no room
        elif kept != content:
            write_whole(self.path, kept)

    def add_events(self, step: int, values: dict[str, Any]) -> None:
        try:
            if self.writer is None:
                from torch.utils.tensorboard import SummaryWriter
                threading.excepthook = without_traceback
                self.writer = SummaryWriter(self.out_dir, purge_step=self.purge)
                self.purge = None
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.writer.add_scalar(name, value, step)
                elif name == 'sample':
                    self.writer.add_text(name, value, step)
            self.writer.flush()
        except ImportError:
            say('TensorBoard is not installed; log.jsonl has the same numbers')
            self.tensorboard = False
        except Exception:
            self.writer = None  # its thread may be dead
            raise


def without_traceback(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread ends when its disk is full; its next call tells us, in one line."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


class Signals:
    """SIGTERM, SIGHUP and SIGINT ask for a stop after the step; a second SIGINT stops at once."""
    def __init__(self) -> None:
        self.received: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number: int, frame: Any) -> None:
        if self.received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.received = signal.Signals(number).name

"""Run folders: options, checkpoints, the log, and signals to stop."""
import contextlib
import errno
import glob
import io
import itertools
import math
import os
import shlex
import signal
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from configurator import UserError, build, check, check_values, fail, merge
from model import ModelConfig, Transformer
from nanocem import hf
from nanocem.data import TOKENIZER_KEYS
from nanocem.files import lock, read_json, read_json_lines, say, to_json, write_atomic
from nanocem.tokenizers import MODEL_FILE
from nanocem.world import find_device, may_restart, out_of_memory

# Keys that a checkpoint or an exported folder must have; its 'data' must have TOKENIZER_KEYS
CHECKPOINT_KEYS = {'model', 'model_config', 'step', 'data', 'data_dir'}
# Errors of the disk, the network or the process: the file itself may be intact
UNREADABLE = {errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE,
              errno.ETIMEDOUT}


# Folders

def find_run(init_from: str | None, out_dir: str | None) -> tuple[str | None, bool]:
    """Return the run's folder (None: make a new one in out/) and whether to resume the run in it.
    A run is resumed by init_from=resume. Under torchrun --max-restarts it is also resumed if its
    folder holds one. UserError if the folder cannot be found."""
    if init_from == 'resume':
        return out_dir or newest_run(), True
    # All processes decide alike. The number of restarts can differ between machines
    if may_restart() and out_dir is None:
        fail('torchrun --max-restarts needs --out_dir=FOLDER, to find the run again')
    return out_dir, may_restart() and read_config(out_dir) is not None


def newest_run() -> str:
    """Return the folder under out/ of the run that was started or resumed last. UserError."""
    paths = glob.glob('out/*/config.json')
    folders = map(os.path.dirname, sorted(paths, key=os.path.getmtime, reverse=True))
    return next(filter(read_config, folders), None) or fail(
        'no run in out/: python train.py makes one, --out_dir=FOLDER names one elsewhere')


def new_folder(out_dir: str | None, cfg: ModelConfig, locks: contextlib.ExitStack) -> str:
    """Make and lock the folder of a new run: `out_dir`, or the first free one of out/NAME,
    out/NAME-2, ..., where NAME describes the model. UserError if `out_dir` holds a run."""
    name = f'out/{cfg.size}-{cfg.attn}{cfg.attn_steps}-{cfg.mlp}{cfg.mlp_steps}'
    for n in itertools.count(1):
        path = out_dir or (f'{name}-{n}' if n > 1 else name)
        with contextlib.suppress(FileExistsError if out_dir is None else ()):  # then try the next
            os.makedirs(path, exist_ok=out_dir is not None)
            break
    lock_folder(path, locks)
    if checkpoints(path) or {'config.json', 'result.json', 'best.pt'} & set(os.listdir(path)):
        fail(f'out_dir={path} holds a run already, or another config.json: --init_from=resume '
             'continues a run, another --out_dir starts a new one')
    return path


def lock_folder(out_dir: str, locks: contextlib.ExitStack) -> None:
    """Lock a run's folder until `locks` closes. UserError if another process trains there. A
    process that torchrun restarted waits for its predecessor to end instead."""
    restarted = int(os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0) > 0  # by torchrun
    handle = lock(os.path.join(out_dir, '.lock'), wait=restarted)
    if handle is None:
        fail(f'out_dir={out_dir}: another process is training there; wait for it, stop it, or '
             'start beside it with another --out_dir')
    locks.enter_context(handle)


def read_config(out_dir: str) -> dict[str, Any] | None:
    """Read a run's config.json; None if missing or another program's. UserError if damaged."""
    config = read_json(f'{out_dir}/config.json',
                       f'the options of this run are lost; --init_from={out_dir} with another '
                       '--out_dir starts a new run from its weights') or {}
    return config if all(isinstance(config.get(k), dict) for k in ('train', 'model')) else None


def is_finished(out_dir: str, steps: int) -> bool:
    """Return whether the run's result.json is that of `steps` steps."""
    result = read_json(f'{out_dir}/result.json', 'delete it to evaluate the run again') or {}
    return result.get('steps') == steps


# Options

def new_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a new run: init_from's model options, overridden by `given`."""
    if given.get('tokenizer') and not given.get('text'):
        fail(f'tokenizer={given["tokenizer"]} is for --text=FILE: data has its own')
    origin = given.get('init_from', 'scratch')
    source = {} if origin == 'scratch' else read_run(origin)['model_config']
    for name in ('size', 'attn', 'mlp'):
        if source and given.get(name, source[name]) != source[name]:
            fail(f'init_from={origin} has another {name}: {source[name]} (now {given[name]})')
    return merge(source, given)


def resumed_options(out_dir: str, given: dict[str, Any], cls: type) -> dict[str, Any]:
    """Return the saved options of the run in `out_dir`, overridden by `given`. Options that this
    version no longer has are left out. UserError if there is no run, a value is not valid, or
    `given` asks for other data, which is then not prepared."""
    config = read_config(out_dir) or fail(f'init_from=resume: no run in {out_dir}')
    fields = {*cls.__dataclass_fields__, *ModelConfig.__dataclass_fields__}
    saved = {**config['train'], **config['model']}
    saved = check_values({k: v for k, v in saved.items() if k in fields},
                         f'{out_dir}/config.json', cls, ModelConfig)
    given = dict(given)
    for name in ('data', 'text', 'tokenizer'):
        before, now = saved.get(name), given.get(name)
        if now is None or (before and os.path.realpath(now) == os.path.realpath(before)):
            given.pop(name, None)
        elif name != 'data' or not os.path.isdir(now):  # the data may have moved
            fail(f'{name}={now}: the run in {out_dir} has {name}={before}, and a resumed run keeps '
                 'its data; another --out_dir starts a new run')
    return {**merge({**saved, 'stop_step': None}, given),
            'init_from': saved.get('init_from', 'scratch')}


def changed_fields(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the fields that differ. Fields that `saved` lacks are left out."""
    return ', '.join(f'{key}={saved[key]} (now {now[key]})' for key in now
                     if key in saved and now[key] != saved[key])


# Checkpoints

def checkpoints(out_dir: str) -> list[str]:
    """List the numbered checkpoints, oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(out_dir), f'step_{"[0-9]" * 8}.pt')))


def save_checkpoint(out_dir: str, state: dict[str, Any], best: bool = False, keep: int = 2) -> None:
    """With `best` write best.pt, else step_*.pt, and delete all numbered checkpoints but the last
    `keep`. If writing fails, print a warning and keep the earlier ones."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = os.path.join(out_dir, 'best.pt' if best else f'step_{state["step"]:08d}.pt')
    try:
        write_atomic(path, buffer.getbuffer())
        for old in [] if best else checkpoints(out_dir)[:-keep]:
            os.remove(old)
    except OSError as error:
        say(f'WARNING: {path} not written ({error.strerror}); the run goes on, earlier checkpoints '
            'are intact')


def read_checkpoint(path: str) -> dict[str, Any]:
    """Read a checkpoint, or an exported folder as if it were one. Checksums are verified, only
    tensors and plain values are loaded, and model_config gets the default of every option that it
    lacks. UserError if it is damaged, OSError if it cannot be read."""
    try:
        if os.path.isdir(path):
            state = hf.read_export(path)
        else:
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise ValueError(f'checksum of {damaged}')
            state = torch.load(path, map_location='cpu', weights_only=True)
            if os.path.exists(os.path.join(os.path.dirname(path), MODEL_FILE)):
                state['folder'] = os.path.dirname(path)
        if missing := (CHECKPOINT_KEYS - state.keys()
                       or set(TOKENIZER_KEYS) - state['data'].keys()):
            raise ValueError(f'it holds no {", ".join(sorted(missing))}')
        cfg = build(ModelConfig, state['model_config'])
        with torch.device('meta'):  # compare names and shapes before memory is used for them
            # A copy, because load_state_dict(assign=True) leaves a mark in its argument that would
            # make later calls assign as well
            Transformer(cfg).load_state_dict(dict(state['model']), assign=True)
        return {**state, 'model_config': asdict(cfg)}
    except Exception as error:  # a damaged file can fail in any way
        if out_of_memory(error):
            raise OSError(errno.ENOMEM, 'out of memory', path) from None
        if isinstance(error, OSError) and error.errno in UNREADABLE:
            raise
        reason = ' '.join(str(error).split())[:200] or type(error).__name__
        raise UserError(f'{path} is damaged ({reason})') from None


def last_checkpoint(out_dir: str) -> dict[str, Any] | None:
    """Read the checkpoint with the most steps, which may be best.pt. Damaged ones are skipped with
    a warning. None if none is intact."""
    states = []
    best = os.path.join(out_dir, 'best.pt')
    for path in [*reversed(checkpoints(out_dir)), best]:
        if os.path.exists(path) and (path == best or not states):
            try:
                states.append(read_checkpoint(path))
            except UserError as error:
                say(f'WARNING: {error}; it is skipped')
    return max(states, key=lambda state: state['step'], default=None)


def read_run(path: str) -> dict[str, Any]:
    """Read a checkpoint. `path` is a checkpoint file, a folder that evaluate.py --export wrote, or
    a run's folder, of which best.pt is read, or else the last one. UserError if there is none."""
    exported = os.path.isfile(os.path.join(path, hf.WEIGHTS_FILE))
    if exported or os.path.isfile(path):
        check(exported or path.endswith('.pt'),
                f'{path}: expected the folder of a run or an export, or a checkpoint (.pt)')
        return read_checkpoint(path)
    best = os.path.join(path, 'best.pt')
    if os.path.exists(best):
        return read_checkpoint(best)
    return last_checkpoint(path) or fail(f'no checkpoint in {path}: python train.py makes one')


def resumed_state(out_dir: str, now: dict[str, Any]) -> dict[str, Any] | None:
    """Read the checkpoint from which the run described by `now` continues; None if it stopped
    before its first one. Later checkpoints, all damaged, are renamed. UserError if `now` does not
    match the checkpoint."""
    state = last_checkpoint(out_dir)
    if state is None:
        if checkpoints(out_dir) or os.path.exists(f'{out_dir}/result.json'):
            fail(f'out_dir={out_dir}: the run has no intact checkpoint to go on from')
        say(f'No checkpoint in {out_dir} yet: starting from step 0')
        return None
    new_run = (f'--init_from={shlex.quote(out_dir)} with another --out_dir starts a new run from '
               'its weights')
    for part in ('model_config', 'data', 'recipe'):
        if different := changed_fields(state[part], now[part]):
            fail(f'the checkpoint in {out_dir} has another {part}: {different}; {new_run}')
    for path in checkpoints(out_dir):
        if os.path.basename(path) > f'step_{state["step"]:08d}.pt':
            os.replace(path, f'{path}.damaged')  # or save_checkpoint would keep it as a later one
    return state


def load_weights(model: Transformer, state: dict[str, Any], now: dict[str, Any],
                 origin: str) -> None:
    """Load the weights of another run into the model of the run described by `now`. UserError if
    their tokenizers or shapes differ."""
    tokenizer = {name: now['data'][name] for name in ('tokenizer', 'tokenizer_sha256')}
    if different := changed_fields(state['data'], tokenizer):
        fail(f'init_from={origin} was trained with another tokenizer: {different}')
    try:
        model.load_state_dict(state['model'])
    except RuntimeError as error:
        fail(f'the model in {origin} does not fit: {" ".join(str(error).split())[:300]}')


def load_run(path: str, device: str = 'cpu') -> tuple[Transformer, dict[str, Any]]:
    """Load a model onto a device, in evaluation mode, from a path as in read_run. Returns it and
    its checkpoint, in which `data` describes what it was trained on. UserError."""
    state = read_run(path)
    model = Transformer(ModelConfig(**state['model_config']))
    model.load_state_dict(state['model'])
    return model.to(find_device(device)).eval(), state


# Log and signals

def perplexity(loss: float) -> float:
    """Return exp(loss), finite for every finite loss."""
    return math.exp(min(loss, 700.0))


class Log:
    """log.jsonl and TensorBoard, with the same numbers. If a line cannot be written, one warning
    says so and the run goes on. OSError if the log of a resumed run cannot be read or rewritten."""
    def __init__(self, out_dir: str, step: int, tensorboard: bool):
        self.path, self.writer, self.warned = os.path.join(out_dir, 'log.jsonl'), None, False
        if os.path.exists(self.path):  # drop damaged lines, and those of steps after `step`
            lines = [line for line in read_json_lines(self.path)
                     if isinstance(line.get('step'), int) and line['step'] <= step]
            write_atomic(self.path, b''.join(to_json(line) + b'\n' for line in lines))
        with self.warn_once():
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter
                self.writer = SummaryWriter(out_dir, purge_step=step + 1)

    def __call__(self, step: int, **values: Any) -> None:
        """Write a line. Numbers go to TensorBoard as well."""
        with self.warn_once():
            with open(self.path, 'ab') as file:
                file.write(to_json({'step': step, **values}) + b'\n')
            if self.writer:
                for name, value in values.items():
                    if isinstance(value, (int, float)):
                        self.writer.add_scalar(name, value, step)
                self.writer.flush()

    @contextlib.contextmanager
    def warn_once(self) -> Iterator[None]:
        """Turn the first error into a warning, and ignore later ones: a log ends no run."""
        try:
            yield
        except Exception as error:  # TensorBoard raises errors of many types
            if not self.warned:
                say(f'WARNING: the log cannot be written ({error}); the run goes on')
            self.warned = True


class Signals:
    """SIGTERM, SIGHUP and SIGINT (Ctrl-C) ask for a stop after the current step. With `announce` a
    line says so, because a step that compiles is slow. A second SIGINT ends the process at once."""
    def __init__(self, announce: bool = True) -> None:
        self.received: str | None = None
        self.announce = announce
        for name in ('SIGTERM', 'SIGINT', 'SIGHUP'):
            number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup ignores it
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: Any) -> None:
        self.received = signal.Signals(number).name
        again = ''
        if number == signal.SIGINT:
            again = '; a second Ctrl-C stops at once'
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        line = f'\n{self.received}: stopping after this step, with a checkpoint{again}\n'
        if self.announce:
            with contextlib.suppress(OSError):
                os.write(2, line.encode())  # print is not reentrant

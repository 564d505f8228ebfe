"""Run folders: which run, its options, checkpoints, the learning rate, the log, signals to stop."""
import contextlib
import glob
import io
import itertools
import math
import os
import shlex
import signal
import zipfile
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from configurator import UserError, build, check_values, fail, merge
from model import ModelConfig, Transformer
from nanocem import hf
from nanocem.files import lock, read_json, read_json_lines, say, to_json, write_atomic
from nanocem.world import find_device

NEEDED = {'model', 'model_config', 'step', 'data', 'data_dir'}  # in checkpoints and exported folders
TOKENIZER = ('tokenizer', 'tokenizer_sha256', 'vocab_size')  # in their 'data'


# Folders

def find_run(init_from: str | None, out_dir: str | None) -> tuple[str | None, bool]:
    """The run's folder, None for a new one of its own; and whether the run goes on: because
    init_from=resume says so, or because torchrun --max-restarts starts it again."""
    if init_from == 'resume':
        return out_dir or newest_run(), True
    if int(os.environ.get('TORCHELASTIC_MAX_RESTARTS', 0)) and out_dir is None:
        fail('torchrun --max-restarts needs --out_dir=FOLDER, to find the run again')
    return out_dir, restarted() and read_config(out_dir) is not None


def newest_run() -> str | None:
    """The folder under out/ whose run was started or resumed last."""
    paths = glob.glob('out/*/config.json')
    return os.path.dirname(max(paths, key=os.path.getmtime)) if paths else None


def restarted() -> bool:
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)) > 0


def new_folder(out_dir: str | None, cfg: ModelConfig, locks: contextlib.ExitStack) -> str:
    """A folder for a new run, made and locked: `out_dir`, or the first free one of out/name,
    out/name-2, ..., named after its layers. SystemExit where it holds a run; OSError."""
    name = f'out/{cfg.size}-{cfg.attn}{cfg.attn_steps}-{cfg.mlp}{cfg.mlp_steps}'
    for n in itertools.count(1):
        path = out_dir or (f'{name}-{n}' if n > 1 else name)
        with contextlib.suppress(FileExistsError if out_dir is None else ()):
            os.makedirs(path, exist_ok=out_dir is not None)
            break
    lock_folder(path, locks)
    if checkpoints(path) or {'config.json', 'result.json', 'best.pt'} & set(os.listdir(path)):
        fail(f'out_dir={path} holds a run already, or another config.json: --init_from=resume goes '
             'on with a run, another --out_dir starts beside it')
    return path


def lock_folder(out_dir: str, locks: contextlib.ExitStack) -> None:
    """Lock a run's folder while `locks` is open. SystemExit where another process trains there; but
    what torchrun starts again waits for its former life to end. OSError."""
    handle = lock(os.path.join(out_dir, '.lock'), wait=restarted())
    if handle is None:
        fail(f'out_dir={out_dir}: another process is training there; wait for it, stop it, or '
             'start beside it with another --out_dir')
    locks.enter_context(handle)


def read_config(out_dir: str | None) -> dict[str, Any] | None:
    """A run's config.json; None where there is none, or another program's. SystemExit."""
    config = read_json(os.path.join(out_dir or '', 'config.json')) or {}
    return config if all(isinstance(config.get(k), dict) for k in ('train', 'model')) else None


# Options

def new_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a new run: those given, over the model that init_from names."""
    origin = given.get('init_from', 'scratch')
    source = {} if origin == 'scratch' else read_run(origin)['model_config']
    if source and given.get('size', source['size']) != source['size']:
        fail(f'init_from={origin} is of another size: {source["size"]} (now {given["size"]})')
    return merge(source, given)


def resumed_options(out_dir: str | None, given: dict[str, Any], cls: type) -> dict[str, Any]:
    """The options of the run in `out_dir`, without those that earlier versions had, and over them
    those `given` for its next session."""
    config = read_config(out_dir) or fail(f'init_from=resume: no run in {out_dir or "out/"}')
    known = {*cls.__dataclass_fields__, *ModelConfig.__dataclass_fields__}
    saved = {**config['train'], **upgrade_config(config['model'])}
    saved = check_values({k: v for k, v in saved.items() if k in known},
                         f'{out_dir}/config.json', cls, ModelConfig)
    return {**merge({**saved, 'stop_step': None}, given), 'init_from': saved['init_from']}


def upgrade_config(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved ModelConfig in today's options. UserError where an option that is gone had
    another value than its default."""
    saved = dict(saved)
    if saved.get('size') == '256m' and saved.get('extra_layers') == 2:
        saved.update(size='256m_cem', n_layer=saved['n_layer'] + 2, extra_layers=0)
    if saved.get('size') == 'micro':  # its numbers are saved beside it
        saved['size'] = 'mini'
    gone = dict(extra_layers=0, kq_diag_init=0.0, embedding_std=1.0, norm_eps=1e-5)
    for name, default in gone.items():
        if saved.pop(name, default) != default:
            fail(f'{name} is not an option any more, and the saved model has another value than '
                 f'{default}: an earlier version of nanoCEM loads it')
    if 'attn_reuse' not in saved:  # Llama's steps were how often a sublayer is applied
        for kind in ('attn', 'mlp'):
            if saved.get(kind) == 'llama':
                saved[f'{kind}_reuse'] = saved.pop(f'{kind}_steps', 1)
    return saved


def upgrade_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Translate a checkpoint of an earlier version. UserError from upgrade_config."""
    state = {**state, 'model_config': upgrade_config(state['model_config'])}
    if 'optimizer' in state:
        old, health = state['optimizer'], state['health']
        state['optimizers'] = [old['adamw'], old['muon']] if 'muon' in old else [old]
        state['skipped'] = health['skipped'], health['in_a_row']
    return state


def changed_fields(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """The fields of two descriptions that differ, in words; what an
    earlier version did not save makes no difference."""
    return ', '.join(f'{key}={saved[key]} (now {now[key]})' for key in now
                     if key in saved and now[key] != saved[key])


# Checkpoints

def checkpoints(out_dir: str) -> list[str]:
    """The numbered checkpoints, oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(out_dir), f'step_{"[0-9]" * 8}.pt')))


def save_checkpoint(out_dir: str, state: dict[str, Any], best: bool = False, keep: int = 2) -> None:
    """Write best.pt or step_*.pt, whole or not at all; a warning where the disk does not take it.
    Then let the numbered ones up to this step go, but the last `keep`. (One of a later step is
    damaged, or the run would have begun from it.)"""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = os.path.join(out_dir, 'best.pt' if best else f'step_{state["step"]:08d}.pt')
    try:
        write_atomic(path, buffer.getbuffer())
        for old in [] if best else [p for p in checkpoints(out_dir) if p <= path][:-keep]:
            os.remove(old)
    except OSError as error:
        say(f'WARNING: {path} not written ({error.strerror}); the run goes on, earlier checkpoints '
            'are whole')


def read_checkpoint(path: str) -> dict[str, Any]:
    """A checkpoint's content, of which every byte is checked, or that of an exported folder:
    tensors and plain values only, its model_config completed. ValueError where it is damaged or
    something else."""
    try:
        if os.path.isdir(path):
            state = hf.read_export(path)
        else:
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise ValueError(f'checksum of {damaged}')
            state = torch.load(path, map_location='cpu', weights_only=True)
        if missing := NEEDED - state.keys() or set(TOKENIZER) - state['data'].keys():
            raise ValueError(f'it holds no {", ".join(sorted(missing))}')
        state = upgrade_checkpoint(state)
        cfg = build(ModelConfig, state['model_config'])
        if cfg.n_layer > len(state['model']):
            raise ValueError('its weights are not of its model_config')
        with torch.device('meta'):  # names and sizes, before memory is taken for them
            Transformer(cfg).load_state_dict(dict(state['model']), assign=True)
        return {**state, 'model_config': asdict(cfg)}
    except Exception as error:  # a damaged file can fail in any way
        words = ' '.join(str(error).split())[:200] or type(error).__name__
        raise UserError(f'{path} is damaged ({words})') from None


def last_checkpoint(out_dir: str) -> dict[str, Any] | None:
    """The newest whole checkpoint; damaged ones are named and passed over. None where none is."""
    for path in reversed(checkpoints(out_dir)):
        try:
            return read_checkpoint(path)
        except UserError as error:
            say(f'WARNING: {error}; trying the one before it')
    return None


def read_run(path: str, checkpoint: Literal['best', 'last'] = 'best') -> dict[str, Any]:
    """A run's checkpoint, the best by validation where there is one; or a checkpoint file, or a
    folder that evaluate.py --export wrote. SystemExit."""
    exported = os.path.isfile(os.path.join(path, hf.WEIGHTS_FILE))
    best = path if exported or os.path.isfile(path) else os.path.join(path, 'best.pt')
    if os.path.exists(best) and (checkpoint == 'best' or best == path):
        return read_checkpoint(best)
    return last_checkpoint(path) or fail(f'no checkpoint in {path}: python train.py makes one')


def resumed_state(out_dir: str, now: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint that the run which `now` describes goes on from; None where it was stopped
    before its first. SystemExit where it is of another run."""
    state = last_checkpoint(out_dir)
    if state is None:
        if checkpoints(out_dir) or os.path.exists(f'{out_dir}/result.json'):
            fail(f'out_dir={out_dir}: the run has no whole checkpoint to go on from')
        say(f'No checkpoint in {out_dir} yet: starting from step 0')
        return None
    for part in ('model_config', 'data', 'recipe'):
        if different := changed_fields(state[part], now[part]):
            fail(f'the checkpoint in {out_dir} is of another {part}: {different}; --init_from='
                 f'{shlex.quote(out_dir)} with another --out_dir starts a new run from its weights')
    return state


def load_run(out_dir: str | None, checkpoint: Literal['best', 'last'] = 'best',
             device: str = 'cpu') -> tuple[Transformer, dict[str, Any]]:
    """The model of a run (None: the newest under out/) or an exported one on a device, ready to
    evaluate, and its checkpoint: step, data (what it was trained on), data_dir, model_config.
    SystemExit."""
    out_dir = out_dir or newest_run() or fail('no run in out/: python train.py makes one')
    state = read_run(out_dir, checkpoint)
    model = Transformer(ModelConfig(**state['model_config']))
    model.load_state_dict(state['model'])
    return model.to(find_device(device)).eval(), state


# The learning rate

@dataclass
class Schedule:
    """The learning rate of step 0, 1, ..., steps - 1: a linear warm-up to `peak`, then a cosine
    from `share` of it at step `start` down to `final` of it at the last."""
    steps: int
    warmup: int  # steps
    peak: float
    final: float
    start: int
    share: float = 1.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * self.share_at(step)

    def share_at(self, step: int) -> float:
        progress = min(1.0, (step - self.start) / max(1, self.steps - 1 - self.start))
        return self.final + (self.share - self.final) * (1 + math.cos(math.pi * progress)) / 2

    def extended(self, steps: int, step: int) -> 'Schedule':
        """Another length, decided after `step` steps: from the rate reached there, without a jump,
        a cosine down to the same end. A finished run goes on at its last rate."""
        start = max(step, self.warmup)
        return replace(self, steps=steps, start=start, share=self.share_at(start))


def perplexity(loss: float) -> float:
    """exp(loss); finite for any finite loss."""
    return math.exp(min(loss, 700.0))


# Log and signals

class Log:
    """log.jsonl and TensorBoard from the same numbers. What cannot be written is lost, not the run:
    the first time a line says so."""
    def __init__(self, out_dir: str, step: int, tensorboard: bool):
        self.path, self.writer, self.failed = os.path.join(out_dir, 'log.jsonl'), None, False
        if os.path.exists(self.path):  # lines after `step` will come again; damaged ones go
            lines = [line for line in read_json_lines(self.path)
                     if isinstance(line.get('step'), int) and line['step'] <= step]
            write_atomic(self.path, b''.join(to_json(line) + b'\n' for line in lines))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(out_dir, purge_step=step + 1)

    def __call__(self, step: int, **values: Any) -> None:
        try:
            with open(self.path, 'ab') as file:
                file.write(to_json({'step': step, **values}) + b'\n')
            if self.writer:
                for name, value in values.items():
                    if isinstance(value, (int, float)):
                        self.writer.add_scalar(name, value, step)
                self.writer.flush()
        except Exception as error:  # of any kind: no log ends a run
            if not self.failed:
                say(f'WARNING: the log does not get its lines ({error}); the run goes on')
            self.failed = True


class Signals:
    """SIGTERM, SIGHUP and SIGINT ask for a stop after the step; a second SIGINT stops at once."""
    def __init__(self) -> None:
        self.received: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: Any) -> None:
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

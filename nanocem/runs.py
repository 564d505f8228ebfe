"""Run folders: their names, checkpoints, log and signals."""
import contextlib
import glob
import io
import json
import math
import os
import signal
import socket
import zipfile
from typing import Any

import torch

from configurator import build
from model import ModelConfig
from nanocem.files import write_whole


def save_checkpoint(out_dir: str, name: str, state: dict[str, Any]) -> bool:
    """Write a checkpoint whole or not at all. False, with a warning, where the disk does not take it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = os.path.join(out_dir, name)
    try:
        write_whole(path, buffer.getbuffer())
        return True
    except OSError as error:
        print(f'WARNING: {path} not written ({error.strerror}); the run goes on, earlier checkpoints are whole', flush=True)
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        return False


def checkpoints(out_dir: str) -> list[str]:
    """The numbered checkpoints, oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(out_dir), 'step_*.pt')))


def read_checkpoint(path: str) -> dict[str, Any]:
    """A checkpoint's content: tensors and plain values only, every byte checked. ValueError where it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f'checksum of {damaged}')
        return torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f'{path} is damaged ({str(error).splitlines()[0] if str(error) else type(error).__name__})') from None


def last_checkpoint(out_dir: str) -> dict[str, Any] | None:
    """The newest whole checkpoint; damaged ones are named and passed over. None where there is none."""
    for path in reversed(checkpoints(out_dir)):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            print(f'WARNING: {error}; trying the one before it', flush=True)
    return None


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """The fields of two descriptions that differ, in words; how attention is computed (attn_impl) makes no difference."""
    return ', '.join(f'{k}={saved.get(k)} (now {now[k]})' for k in now if now[k] != saved.get(k) and k != 'attn_impl')


class Log:
    """log.jsonl and TensorBoard from the same numbers; a disk that takes no more loses lines, not the run."""
    def __init__(self, out_dir: str, step: int, tensorboard: bool):
        self.path, self.writer = os.path.join(out_dir, 'log.jsonl'), None
        lines = []
        if os.path.exists(self.path):  # what came after the checkpoint will be done, and logged, again
            with open(self.path, encoding='utf-8', errors='replace') as file:
                for line in file:
                    with contextlib.suppress(ValueError):
                        if json.loads(line)['step'] <= step:
                            lines.append(line)
        write_whole(self.path, ''.join(lines).encode())
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
                self.writer = SummaryWriter(out_dir, purge_step=step + 1)
            except ImportError:
                print('TensorBoard is not installed; log.jsonl has the same numbers', flush=True)

    def __call__(self, step: int, **values: Any) -> None:
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}  # JSON has no NaN
        try:
            with open(self.path, 'a', encoding='utf-8') as file:
                file.write(json.dumps({'step': step, **values}) + '\n')
            for name, value in values.items():
                if self.writer and isinstance(value, (int, float)):
                    self.writer.add_scalar(name, value, step)
        except OSError as error:
            print(f'WARNING: step {step} not logged ({error.strerror})', flush=True)


class Signals:
    """SIGTERM and SIGINT ask for a stop after the step; a second SIGINT stops at once."""
    def __init__(self) -> None:
        self.received: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: Any) -> None:
        if self.received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.received = signal.Signals(number).name


def launcher() -> str:
    """What started this process, the same after torchrun restarts it."""
    return f'{socket.gethostname()}:{os.getppid()}'


def read_config(out_dir: str | None) -> dict[str, Any] | None:
    """A run's config.json; None where there is none that can be read."""
    try:
        with open(os.path.join(out_dir or '', 'config.json'), encoding='utf-8') as file:
            config = json.load(file)
        return config if {'train', 'model', 'launcher'} <= set(config) else None
    except (OSError, ValueError, TypeError):
        return None


def newest_run(mine: bool = False) -> str | None:
    """The folder under out/ whose run was started or resumed last, or last by this process's launcher."""
    runs = [os.path.dirname(path) for path in sorted(glob.glob('out/*/config.json'), key=os.path.getmtime)]
    if mine:
        runs = [run for run in runs if (read_config(run) or {}).get('launcher') == launcher()]
    return runs[-1] if runs else None


def fresh_run(model_options: dict[str, Any]) -> str:
    """A new folder under out/, named after the model."""
    cfg = build(ModelConfig, model_options)
    name = f'out/{cfg.size}-{cfg.attn}{cfg.attn_steps}-{cfg.mlp}{cfg.mlp_steps}'
    return next(path for n in range(1, 10_000) if not os.path.exists(path := name + (f'-{n}' if n > 1 else '')))

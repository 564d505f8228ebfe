"""The process of a run: its progress, a console that may go away, and signals that ask to stop."""
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from configurator import check

# Ctrl-C, a closed terminal, and what batch systems send before a job's time is up
STOP_SIGNALS = ('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGXCPU', 'SIGPWR',
                'SIGBREAK')


def check_launcher(env: Mapping[str, str]) -> None:
    """UserError if srun or mpirun has started more tasks than torchrun has connected machines:
    each task would train the whole run."""
    connected = int(env.get('GROUP_WORLD_SIZE') or env.get('WORLD_SIZE') or 1)
    for name in ('SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE'):
        tasks = int(env.get(name) or 1)
        check(tasks <= connected, f'{name}={tasks}: a launcher has started {tasks} tasks, and each '
              'would train the whole run: start one torchrun on each machine, as docs/slurm.sh '
              f'does; in a shell that is the only task, unset {name}')


class NoBar:
    """A progress bar that shows nothing, where tqdm is not installed."""
    disable = True

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **options: None

    def __enter__(self) -> 'NoBar':
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def progress_bar(**options: Any) -> Any:
    """Return tqdm's progress bar with these options if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return NoBar()
    return tqdm(**options)


class Console:
    """stdout or stderr. What it cannot print, because its terminal or reader has gone or its disk
    is full, is lost. It is for people, and no reason to end a run."""
    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()


@contextlib.contextmanager
def keep_console_and_signals() -> Iterator[None]:
    """Make stdout and stderr a Console each. At the end put both back, and all signal handlers."""
    streams, handlers = (sys.stdout, sys.stderr), {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in signal.Signals}
    # A closed one is None, which tqdm cannot take
    nowhere = open(os.devnull, 'w')  # noqa: SIM115
    sys.stdout, sys.stderr = (Console(stream or nowhere) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        for stream in filter(None, streams):
            try:
                stream.flush()
            except OSError:  # Python would try again at its end, and exit with code 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def note_signals() -> list[int]:
    """Return a list to which each of STOP_SIGNALS adds its number from now on. A second one of the
    same ends the process at once. Signals that are ignored stay so, such as SIGHUP with nohup. Only
    the main thread can do this: in another one the list stays empty."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.signal(number, signal.SIG_DFL)
        if sys.__stderr__:  # without it, 2 may be the number of any file
            with contextlib.suppress(OSError):
                os.write(2, b'\nstopping after this step; the same signal again ends the process\n')

    if threading.current_thread() is threading.main_thread():
        for number in signal.Signals:
            if number.name in STOP_SIGNALS and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, note)
    return noted

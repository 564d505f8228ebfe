"""A GPU's first day: what is to be measured on it, in parts that are commands of their own, so that
one that fails, hangs or fills the memory costs no other."""
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

from nanocem.files import say

# The most telling first. Memory at the paper's micro-batch of 8 and the hours of its runs are in
# the training tables.
PARTS: dict[str, str] = {
    'tests': '-m pytest tests -m gpu -s',
    'attention 134m': 'bench.py --what=attention --size=134m',
    'train 134m': 'bench.py --what=train --size=134m',
    'train 162m': 'bench.py --what=train --size=162m',
    'decode 134m': 'bench.py --what=decode --size=134m',
    'attention 162m': 'bench.py --what=attention --size=162m',
    'cost T': 'bench.py --what=cost --against=T',
    'cost J': 'bench.py --what=cost --against=J',
    # longer than one part may take: its runs go on in the next call
    'claims': 'reproduce.py all --scale=gpu',
}
CHECKPOINT_SECONDS = 20
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Later options win.
TINY = ('--device=cpu --size=nano --context_length=32 --batch_size=2 --repeats=1 --threads=1 '
        '--decode_context=16 --decode_tokens=4')


def missing_parts(done: dict[str, Any]) -> list[str]:
    return [name for name in PARTS if name not in done]


def measure_parts(names: Iterable[str], done: dict[str, Any], limit: float, rehearse: bool,
                  keep: Callable[[str, dict[str, Any]], None]) -> list[str]:
    """Run those of the parts that are not in `done`, each for `limit` seconds at most, and give
    what they measured to `keep`. Returns what went wrong, a line a part."""
    wrong = []
    for name in names:
        if name in done:
            say(f'{name}: measured already')
            continue
        command = PARTS[name]
        if rehearse and name != 'tests':
            command += ' --plan' if name == 'claims' else f' {TINY}'
        say(f'\n{name}: python {command}')
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            path = f'{folder}/part.json'
            own_json = [f'--json={path}'] if command.startswith('bench.py') else []
            words = [f'{ROOT}/{word}' if os.path.exists(f'{ROOT}/{word}') else word
                     for word in command.split()]
            # reproduce.py works in the project's folder
            code, output = run([*words, *own_json], limit, ROOT if name == 'claims' else None)
            result: dict[str, Any] = {'command': command, 'seconds': time.monotonic() - start}
            with contextlib.suppress(OSError), open(path, encoding='utf-8') as file:
                result |= json.load(file)
        say(output.strip())
        # without a GPU its tests are skipped
        if code == 0 and name == 'tests' and ' passed' not in output and not rehearse:
            code = 'no test ran'
        if code != 0:
            wrong.append(f'{name} ({code if isinstance(code, str) else f"exit code {code}"})')
            continue
        if not own_json:
            result['said'] = output.strip()[-4000:]
        keep(name, result)
    return wrong


def end(process: subprocess.Popen, number: int) -> None:
    """A signal to all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run(arguments: list[str], limit: float, cwd: str | None = None) -> tuple[int | str, str]:
    """The exit code, or why there is none, and the output of python with these arguments. What is
    cut off ends with all that it started, and may write its checkpoint first."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors='replace', cwd=cwd,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except BaseException as reason:
        try:
            end(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=CHECKPOINT_SECONDS)
        finally:
            end(process, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(reason, subprocess.TimeoutExpired):
            raise
        return f'more than {limit:.0f} s', output

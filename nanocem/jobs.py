"""Programs side by side, one CPU thread each."""
import os
import subprocess
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed


def run_side_by_side(commands: Mapping[Hashable, list[str]], jobs: int, quiet: bool,
                     ) -> Iterator[tuple[Hashable, str | None]]:
    """(key, None) of each command as it ends well, or (key, its exit code and last line). One
    thread each, so that numbers depend on nothing else that runs. `quiet`: what they print is not
    shown. Where the caller is interrupted, all are asked to end, and waited for."""
    children: set[subprocess.Popen] = set()
    pipe = subprocess.PIPE if quiet else None
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}

    def run(command: list[str]) -> str | None:
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment,
                              errors='replace') as child:
            children.add(child)
            out, err = child.communicate()
            children.discard(child)
        last_line = (err or out or '').strip().rpartition('\n')[2]
        return None if child.returncode == 0 else f'exit code {child.returncode}. {last_line}'

    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = {pool.submit(run, command): key for key, command in commands.items()}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in list(children):
            child.terminate()
        pool.shutdown()

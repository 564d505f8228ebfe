"""Processes that share jobs on a CPU and never outlive the program that started them."""
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

import torch


def start_worker() -> None:
    """One thread, and an end when the parent ends, however that does."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def workers(count: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """A pool of `count` processes; of one, None: this process does it."""
    if count == 1:
        return nullcontext()
    return ProcessPoolExecutor(count, multiprocessing.get_context('spawn'), start_worker)


def run_jobs(pool: ProcessPoolExecutor | None, function: Callable,
             jobs: dict[Any, tuple]) -> Iterator[tuple[Any, Any]]:
    """function(*arguments) of each job under the job's name, as they come."""
    if pool is None:
        for name, arguments in jobs.items():
            yield name, function(*arguments)
        return
    # inherited by the workers: the parent alone answers Ctrl-C
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    futures = {pool.submit(function, *arguments): name for name, arguments in jobs.items()}
    signal.signal(signal.SIGINT, handler)
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise

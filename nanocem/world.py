"""The processes of a run: their ranks and devices, how they communicate, and how they end."""
import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from configurator import UserError, check, error_line, fail

CPU = torch.device('cpu')
MICRO_BATCH_TOKENS = 16_384  # largest forward pass, unless micro_batch_size is given


@dataclass
class Distributed:
    """This process and the others that train with it."""
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # the rank on this machine
    device: torch.device = CPU

    def connect(self, minutes: float) -> None:
        """Select the GPU, then join the other processes, by NCCL on GPUs and gloo on CPUs. Each
        waits at most `minutes` for the others. UserError if they cannot be reached."""
        on_gpu = self.device.type == 'cuda'
        if on_gpu:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision('high')  # float32 products by TF32
        if self.size == 1:
            return
        check(self.device.type != 'mps', 'device=mps: needs a single process')
        timeout = timedelta(minutes=minutes)
        try:
            store, _, _ = next(rendezvous('env://', self.rank, self.size, timeout=timeout))
        except (RuntimeError, ValueError) as error:  # ValueError: no address in the environment
            reason = str(error).partition('\n')[0]
            fail(f'process {self.rank} of {self.size} finds no others: {reason}; torchrun starts '
                 'them', everywhere=True)
        if os.environ.get('LOCAL_WORLD_SIZE') == str(self.size):
            # torchrun keeps its store when it restarts the processes. The prefix hides the
            # addresses of the earlier ones. On several machines, where the number of restarts can
            # differ, read_environment asks for a new store instead.
            store = dist.PrefixStore(os.environ.get('TORCHELASTIC_RESTART_COUNT', ''), store)
        dist.init_process_group(
            'nccl' if on_gpu else 'gloo', store=store, rank=self.rank, world_size=self.size,
            timeout=timeout, device_id=self.device if on_gpu else None)

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes."""
        if self.size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set in any process."""
        return float(self.sum(torch.tensor(float(flag)))) > 0

    def run_on_rank0(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run function(*args) on rank 0 and return its result in every process. If it raises
        UserError or OSError, all processes end."""
        result, error = None, None
        if self.rank == 0:
            try:
                result = function(*args)
            except (UserError, OSError) as raised:
                error = raised
        shared = [result, error is not None]
        if self.size > 1:
            dist.broadcast_object_list(shared, device=self.device)
        result, failed = shared
        if failed:
            raise error or SystemExit(1)  # only rank 0 prints the error
        return result


def read_environment() -> Distributed:
    """Return the ranks and the number of processes that torchrun has set. UserError if they are
    wrong, or if processes that torchrun restarts could not find each other."""
    numbers = []
    for name, default in (('RANK', '0'), ('WORLD_SIZE', '1'), ('LOCAL_RANK', '0')):
        text = os.environ.get(name) or default
        check(text.isdecimal(), f'{name}={text} in the environment: expected a whole number')
        numbers.append(int(text))
    rank, size, local_rank = numbers
    check(rank < size, f'RANK={rank} and WORLD_SIZE={size} in the environment contradict each '
            'other: torchrun sets both; without torchrun, unset both')
    several_machines = os.environ.get('LOCAL_WORLD_SIZE') != os.environ.get('WORLD_SIZE')
    keeps_store = os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'
    check(not (may_restart() and several_machines and keeps_store),
            'torchrun --max-restarts on several machines needs --rdzv_backend=c10d, and '
            'TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before it: else restarted processes find the '
            'addresses of the dead ones')
    return Distributed(rank, size, local_rank)


def may_restart() -> bool:
    """Return whether torchrun restarts processes after a failure (--max-restarts)."""
    return int(os.environ.get('TORCHELASTIC_MAX_RESTARTS') or 0) > 0


def find_device(kind: str, local_rank: int = 0) -> torch.device:
    """Return the device that auto, cpu, cuda or mps names. auto is cuda if there is a GPU, or else
    cpu. UserError if this machine has no such device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == 'auto':
        kind = 'cuda' if gpus else 'cpu'
    if kind == 'cuda' and not gpus:
        fail('device=cuda: torch finds no GPU on this machine; set device=cpu')
    if kind == 'cuda' and local_rank >= gpus:
        fail(f'device=cuda: process {local_rank + 1} on this machine finds {gpus} GPUs; expected '
             f'torchrun --nproc_per_node={gpus}', everywhere=True)
    if kind == 'mps' and not torch.backends.mps.is_available():
        fail('device=mps: needs an Apple GPU; set device=cpu')
    return torch.device(kind, local_rank) if kind == 'cuda' else torch.device(kind)


def divide_batch(batch_size: int, micro_batch_size: int | None, processes: int, length: int) -> int:
    """Return the sequences per forward pass, a divisor of each process's share of the batch:
    micro_batch_size, or the largest with at most MICRO_BATCH_TOKENS tokens. UserError if
    batch_size or micro_batch_size does not divide."""
    share = batch_size // processes
    if batch_size % processes:
        fail(f'batch_size={batch_size} does not divide among {processes} processes; right would be '
             f'batch_size={(share + 1) * processes}')
    divisors = [m for m in range(1, share + 1) if share % m == 0]
    if micro_batch_size is None:
        return max(m for m in divisors if m == 1 or m * length <= MICRO_BATCH_TOKENS)
    if micro_batch_size not in divisors:
        fail(f'micro_batch_size={micro_batch_size} does not divide batch_size / processes = '
             f'{share}; right would be one of {", ".join(map(str, divisors))}')
    return micro_batch_size


@contextlib.contextmanager
def report_errors(world: Distributed) -> Iterator[None]:
    """Turn running out of memory and losing other processes into errors of one line. Only the first
    process on each machine prints such a line, unless the error has `everywhere`."""
    try:
        yield
    except BaseException as raised:
        error = explain(raised, world)
        in_one_line = isinstance(error, (UserError, OSError, KeyboardInterrupt))
        if in_one_line and world.local_rank > 0 and not getattr(error, 'everywhere', False):
            error = SystemExit(1)
        if not (dist.is_initialized() and dist.get_backend() == 'nccl'):
            if error is raised:
                raise
            raise error from None
        # NCCL's destructor can deadlock with the other processes: exit without it
        if not isinstance(error, SystemExit):
            message = error_line(error) if in_one_line else traceback.format_exc()
            print(message, file=sys.stderr, flush=True)
        os._exit(1)


def out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. Some allocators raise a RuntimeError or OSError about it."""
    first_line = str(error).partition('\n')[0]
    says_so = isinstance(error, (RuntimeError, OSError)) and re.search(
        'allocate memory|ALLOC_FAILED|CUDA error: out of memory', first_line)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(says_so)


def explain(error: BaseException, world: Distributed) -> BaseException:
    """Return a UserError if memory ran out, or if in a run of several processes a GPU or another
    process failed. Return any other error as it is."""
    reason = str(error).partition('\n')[0]
    if out_of_memory(error):
        return UserError('out of memory: halve micro_batch_size, or set --activation_checkpointing '
                         f'({reason})', everywhere=True)
    # gloo raises a plain RuntimeError, which names its source file
    by_gloo = isinstance(error, RuntimeError) and 'gloo' in reason
    failed = isinstance(error, dist.DistError | torch.AcceleratorError)
    # An assert on the GPU, such as an index out of range, is a mistake in the code
    if world.size > 1 and (by_gloo or failed) and 'device-side assert' not in reason:
        return UserError(f'process {world.rank} of {world.size} failed or lost the others: '
                         f'{reason}; once all can run again, go on with --init_from=resume',
                         everywhere=True)
    return error

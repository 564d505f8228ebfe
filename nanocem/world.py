"""This process among the others that torchrun started, and its device."""
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from configurator import UserError, fail


@dataclass
class Distributed:
    """This process among the others."""
    rank: int
    size: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over all processes."""
        if self.size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return float(self.sum(torch.tensor(float(flag)))) > 0

    def run_on_rank0(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args) run by rank 0, its result in every process. Where it fails, all end."""
        result, error = None, None
        if self.rank == 0:
            try:
                result = function(*args)
            except (UserError, OSError) as raised:
                error = raised
        box = [result, error is not None]
        if self.size > 1:
            dist.broadcast_object_list(box, device=self.device)
        if box[1]:
            raise error or UserError('rank 0 has said why')
        return box[0]


def find_device(kind: str, local_rank: int = 0) -> torch.device:
    """auto (cuda where there is one), cpu, cuda or mps as a device of this machine. SystemExit."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == 'auto':
        kind = 'cuda' if gpus else 'cpu'
    if kind == 'cuda' and local_rank >= gpus:
        fail(f'device=cuda: process {local_rank + 1} on this machine finds {gpus} GPUs; start as '
             'many processes as GPUs (torchrun --nproc_per_node), or set device=cpu',
             everywhere=True)
    if kind == 'mps' and not torch.backends.mps.is_available():
        fail('device=mps: needs an Apple GPU; set device=cpu')
    return torch.device(kind, local_rank) if kind == 'cuda' else torch.device(kind)


def start_world(kind: str, batch_size: int, micro_batch_size: int | None, minutes: float,
                ) -> Distributed:
    """Join the processes that torchrun started (NCCL on GPUs, gloo on CPUs), which wait so long for
    one another, or stand alone. SystemExit where the batch does not divide among them."""
    rank = int(os.environ.get('RANK', 0))
    size = int(os.environ.get('WORLD_SIZE', 1))
    device = find_device(kind, int(os.environ.get('LOCAL_RANK', 0)))
    if device.type == 'mps' and size > 1:
        fail('device=mps: needs a single process')
    micro_batch_size = micro_batch_size or 1
    if batch_size % (micro_batch_size * size):
        fitting = [m for m in range(micro_batch_size, 0, -1) if batch_size % (m * size) == 0]
        larger = -(-batch_size // (micro_batch_size * size)) * micro_batch_size * size
        right = f'micro_batch_size={fitting[0]}' if fitting else f'batch_size={larger}'
        fail(f'batch_size={batch_size} is not a multiple of micro_batch_size x processes = '
             f'{micro_batch_size} x {size}; right would be {right}')
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
    if size > 1:
        wait = timedelta(minutes=minutes)
        try:
            store, rank, size = next(rendezvous('env://', rank, size, timeout=wait))
        except (RuntimeError, ValueError) as error:  # ValueError: no address in the environment
            words = str(error).partition('\n')[0]
            fail(f'process {rank} of {size} finds no others: {words}; torchrun starts them',
                 everywhere=True)
        if os.environ.get('LOCAL_WORLD_SIZE') == str(size):
            # On one machine torchrun keeps its store when it restarts the group, and in it the
            # addresses of the dead.
            store = dist.PrefixStore(os.environ.get('TORCHELASTIC_RESTART_COUNT', ''), store)
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    return Distributed(rank, size, device)


@contextlib.contextmanager
def report_errors(world: Distributed) -> Iterator[None]:
    """Memory that ran out, and other processes that are gone, become one line and exit code 1."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        words = str(error).partition('\n')[0]
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or 'allocate memory' in words:
            fail('out of memory: halve micro_batch_size, or set --activation_checkpointing '
                 f'({words})', everywhere=True)
        if world.size == 1:
            raise
        fail(f'process {world.rank} of {world.size} failed or lost the others: {words}; once all '
             'can run again, go on with --init_from=resume', everywhere=True)

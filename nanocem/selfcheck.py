"""
A GPU that nobody has tried: at their first use the Triton kernels prove themselves on it.

Output and every gradient of small random cases are held to the readable formula in float64, twice,
and the time of the shape that is to come to that of torch's own attention with the bias formed.
Kernels that do not run, are wrong or are slower get one line of warning, and torch's own is used.

The answer is kept in $NANOCEM_CACHE, or ~/.cache/nanocem: once for a device, shape and version.
"""
import contextlib
import fcntl
import hashlib
import inspect
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanocem import fast, triton_attention
from nanocem.files import write_whole

CASES = ((2, 300), (2, 384))  # sequences, positions: the last tile cut, and all tiles whole
ROUNDS = 7  # calls that are timed, each way in turn
# Of a row, over its norm and a typical row's, in units of the dtype's epsilon. Right kernels reach
# 2 in float16, and round the same quantities in bfloat16; what is wrong altogether makes 128 there.
MOST_ERROR = 8
DIED = 'ended the process in which they were tried'


class Shape(NamedTuple):
    n_head: int  # K
    width: int  # R, of a head
    diagonals: int  # n: 0, 1 or K
    alibi: bool
    context_length: int  # J


VERDICTS: dict[tuple[str, torch.dtype, Shape], str] = {}  # of this process; '': all is well


def proven(device: torch.device, dtype: torch.dtype, n_head: int, width: int, diagonals: int,
           alibi: bool, context_length: int, batch_size: int) -> bool:
    """Whether the kernels may be used there, for a shape of those numbers."""
    if not is_untried(device):
        return True
    shape = Shape(n_head, width, diagonals, alibi, context_length)
    key = name_of(device), dtype, shape
    if key not in VERDICTS:
        with (torch.inference_mode(False), torch.enable_grad(),
              torch.autocast(device.type, enabled=False)):
            VERDICTS[key] = kept(subject(*key, batch_size),
                                 partial(verdict, device, dtype, shape, batch_size))
        if device.type == 'cuda':
            torch.cuda.empty_cache()
    return not VERDICTS[key]


def is_untried(device: torch.device) -> bool:
    """Not the interpreter, which the tests hold to the formula; nor a GPU elsewhere."""
    return device.type == 'cuda' and torch.cuda.is_available()


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


# What is kept

def subject(device: str, dtype: torch.dtype, shape: Shape, batch_size: int) -> dict[str, Any]:
    """All that an answer may depend on."""
    source = inspect.getsource(triton_attention)
    return {
        'device': device,
        'torch': torch.__version__,
        'triton': triton_attention.triton.__version__,
        'kernels': hashlib.sha256(source.encode()).hexdigest(),
        'dtype': str(dtype),
        'deterministic': torch.are_deterministic_algorithms_enabled(),
        'batch_size': batch_size,
        **shape._asdict(),
    }


def kept(subject: dict[str, Any], examine: Callable[[], str]) -> str:
    """What examine() says, or said when it was last asked. One process asks, the others wait."""
    name = hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:16]
    folder = os.environ.get('NANOCEM_CACHE') or os.path.expanduser('~/.cache/nanocem')
    path = f'{folder}/triton_{name}.json'
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then nothing is kept, and each process asks
            os.makedirs(folder, exist_ok=True)
            lock = stack.enter_context(open(f'{folder}/lock', 'w'))
            fcntl.flock(lock, fcntl.LOCK_EX)
        answer = read(path)
        if answer is None:
            # a fault of the kernels may be the process's last moment: the next one finds this
            write(path, {**subject, 'verdict': DIED})
            try:
                answer = examine()
            except BaseException:  # a key pressed says nothing about the kernels
                with contextlib.suppress(OSError):
                    os.remove(path)
                raise
            write(path, {**subject, 'verdict': answer})
    if answer and os.environ.get('RANK', '0') == '0':
        again = f'; delete {path} to try again' if os.path.exists(path) else ''
        with contextlib.suppress(OSError, ValueError):
            print(f'Warning: the Triton kernels {answer}: torch\'s own attention is used on '
                  f'{subject["device"]}{again}', file=sys.stderr)
    return answer


def read(path: str) -> str | None:
    try:
        with open(path, encoding='utf-8') as file:
            return str(json.load(file)['verdict'])
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
        return None


def write(path: str, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(content, indent=1).encode())


# What is asked

def verdict(device: torch.device, dtype: torch.dtype, shape: Shape, batch_size: int) -> str:
    """What is wrong with the kernels; '' where nothing is."""
    try:
        for B, J in CASES:
            if wrong := error(device, dtype, shape, B, J):
                return wrong
        tensors, do = inputs(device, dtype, shape, batch_size, shape.context_length)
        ours, torchs = times(*(partial(both_ways, way, shape, tensors, do)
                               for way in (by_triton, by_torch)), device)
    except Exception as fault:  # of Triton, LLVM, ptxas or the driver: any kind
        reason = (str(fault).strip() or 'no reason given').splitlines()[0]
        return f'do not run ({type(fault).__name__}: {reason})'
    if ours > torchs:
        return f"are slower than torch's own ({1e3 * ours:.3g} against {1e3 * torchs:.3g} ms)"
    return ''


def error(device: torch.device, dtype: torch.dtype, shape: Shape, B: int, J: int) -> str:
    """Where the kernels leave the readable formula by too much, or differ from call to call."""
    tensors, do = inputs(device, dtype, shape, B, J)
    once, again = (both_ways(by_triton, shape, tensors, do) for _ in range(2))
    exact = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    right = both_ways(readable, shape, exact, do.double())
    names = ['output', *(f'gradient of {name}' for name, t in
                         zip(('q', 'k', 'd u', 'h', 'b'), tensors, strict=True) if t is not None)]
    for name, one, two, x in zip(names, once, again, right, strict=True):
        if not torch.equal(one, two):
            return f'give a {name} that changes from call to call'
        rows = x.norm(dim=-1)
        typical = rows.square().mean().sqrt()
        off = ((one.double() - x).norm(dim=-1) / (rows + typical)).max().item()
        most = MOST_ERROR * torch.finfo(dtype).eps
        if not off <= most:  # NaN is not
            return f'give a wrong {name} (off by {off:.2g}, at most {most:.2g} is rounding)'
    return ''


def inputs(device: torch.device, dtype: torch.dtype, shape: Shape, B: int, J: int,
           ) -> tuple[list[Tensor | None], Tensor]:
    """q, k, du, h, b as leaves, and a gradient of the output. The program's own random numbers
    stay where they are."""
    generator = torch.Generator().manual_seed(0)
    K, D = shape.n_head, shape.n_head * shape.width

    def draw(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype).requires_grad_()
    q, k, h, do = (draw(B, J, D) for _ in range(4))
    du = (draw(B, shape.diagonals, J, D).detach() / D ** 0.5).requires_grad_()
    b = draw(K, dtype=torch.float32) if shape.alibi else None
    return [q, k, du if shape.diagonals else None, h if shape.diagonals else None, b], do.detach()


def both_ways(way: Callable[..., Tensor], shape: Shape, tensors: list[Tensor | None], do: Tensor,
              ) -> list[Tensor]:
    """The output (B, J, D), and the gradients of what is there."""
    o = way(shape, *tensors)
    return [o, *torch.autograd.grad(o, [t for t in tensors if t is not None], do)]


def by_triton(shape: Shape, q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None,
              b: Tensor | None) -> Tensor:
    return fast.attention(q, k, shape.n_head, shape.width ** -0.5, du, h, b, use_triton=True)


def by_torch(shape: Shape, q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None,
             b: Tensor | None) -> Tensor:
    q, k = fast.heads(q, shape.n_head), fast.heads(k, shape.n_head)
    attn = SimpleNamespace(rope=False, tau=shape.width ** 0.5)
    return fast.merge(fast.sdpa(attn, q, k, k, du, h, table(shape, q, b)))


def readable(shape: Shape, q: Tensor, k: Tensor, du: Tensor | None, h: Tensor | None,
             b: Tensor | None) -> Tensor:
    """As Attention.forward and Attention.scores."""
    q, k = fast.heads(q, shape.n_head), fast.heads(k, shape.n_head)
    scores = q * shape.width ** -0.5 @ k.mT + table(shape, q, b)
    if du is not None:
        scores = scores + du @ h[:, None].mT
    return fast.merge(scores.softmax(dim=-1) @ k)


def table(shape: Shape, q: Tensor, b: Tensor | None) -> Tensor:
    """b_k [i = j] - m_k (i - j), or 0 without ALiBi; -inf where j > i: (K, J, J) or (J, J)."""
    J, K = q.shape[2], shape.n_head
    like = dict(device=q.device, dtype=fast.at_least_float(q).dtype)
    i, j = torch.arange(J, **like)[:, None], torch.arange(J, **like)
    bias = torch.zeros(J, J, **like).masked_fill(j > i, -math.inf)
    if b is None:
        return bias
    m = fast.slopes(K, bias)
    return bias + torch.where(i == j, b[:, None, None], 0) - m[:, None, None] * (i - j)


def times(ours: Callable[[], Any], torchs: Callable[[], Any], device: torch.device,
          ) -> tuple[float, float]:
    """Median seconds of each, in turns after a warm-up. Infinite where memory does not suffice, or
    torch's own has no way (to be deterministic, say)."""
    taken: dict[Callable[[], Any], list[float]] = {ours: [], torchs: []}
    for n in range(ROUNDS + 1):
        for run, seconds in taken.items():
            if math.inf in seconds:
                continue
            start = time.perf_counter()
            try:
                run()
                if device.type == 'cuda':
                    torch.cuda.synchronize(device)
            except RuntimeError as error:
                if run is ours and not isinstance(error, torch.OutOfMemoryError):
                    raise
                seconds[:] = [math.inf]
            else:
                if n:
                    seconds.append(time.perf_counter() - start)
    return statistics.median(taken[ours]), statistics.median(taken[torchs])

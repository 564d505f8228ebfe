"""
Does this compute what that does? `compare` answers: for a faster function beside the lines of
model.py, or of whoever edited them, and for a model.py beside the one of a run (probe.py). If
results differ, a line says so and the readable lines stay. This file needs torch and
model.py alone.

Shapes: B batch, I queries, J keys, D width, K heads, R = D / K.
"""
import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import is_plug, sdpa

try:
    from .model import make_positions  # in an exported folder
except ImportError:
    from model import make_positions

# Largest error of a row in units of the dtype's epsilon, relative to its norm plus a typical row's.
# Correct kernels reach 2; a result that is wrong altogether has 128 in bfloat16. Of more precise
# numbers so many are allowed that the rounding of long sums is no error.
MOST_ERROR, MOST_ERROR_PRECISE = 8, 1000

MOST_POSITIONS = 4096  # of so many ids the positions are compared: each needs a row of a mask

Results = dict[str, Tensor]  # by name


def agrees(model: Any, attend: Callable, name: str, dtype: torch.dtype | None = None,
           lengths: tuple[int, ...] | None = None) -> bool:
    """Return whether attend(attn, q, k, v, pos, u, h) computes what the layers' own lines do, with
    queries and keys in dtype. If not, print a line on stderr that says what differs. Sequences of
    these lengths are tried, by default one."""
    if wrong := find_other_positions(model):
        print(f'Warning: {name} attention {wrong}: it is not used', file=sys.stderr)
        return False
    for attn in different_layers(model):
        # Two ids at least: of one, the gradient of its query is 0, and rounding no share of it
        tried = lengths or (min(150, max(2, model.cfg.context_length)),)
        errors = [find_error(attn, attend, dtype or attn.W_Q.dtype, n) for n in tried]
        if not any(errors):
            # sdpa takes one query, too, which saves the biases of all
            at_the_end = attend_end if attend is sdpa else attend_whole
            errors.append(find_far_error(attn, partial(at_the_end, attend),
                                         dtype or attn.W_Q.dtype))
        for wrong in filter(None, errors):
            print(f'Warning: {name} attention {wrong}: it is not used', file=sys.stderr)
            return False
    return True


@torch.no_grad()
def find_other_positions(model: Any) -> str:
    """Return a message if the layers get other positions than those of make_positions, or ''. What
    is faster may not read them: a mask of documents, for example, that an edit of `hidden` adds."""
    length, device, given = min(MOST_POSITIONS, model.cfg.context_length), model.head.device, []

    def note(x: Tensor, *positions: Any, **named: Any) -> Tensor:
        given.extend([*positions, *named.values()])
        return x

    generator = torch.Generator().manual_seed(0)  # does not disturb the global one
    idx = torch.randint(len(model.head), (2, length), generator=generator).to(device)
    # Let the layers note their positions, and compute nothing
    sublayers = [sublayer for block in model.blocks for sublayer in (block.attn, block.mlp)]
    replaced = [vars(sublayer).get('forward') for sublayer in sublayers]
    for sublayer in sublayers:
        sublayer.forward = note
    try:
        with torch.random.fork_rng(devices=[]):  # an edit may have a dropout
            expected = make_positions(model.cfg, model.hidden(idx))
    except Exception as error:  # of an edit, which may raise any
        return f'cannot be tried ({type(error).__name__}: {error})'
    finally:
        for sublayer, method in zip(sublayers, replaced, strict=True):
            del sublayer.forward
            if method is not None:
                sublayer.forward = method
    for pos in {id(pos): pos for pos in given}.values():
        alike = isinstance(pos, tuple) and len(pos) == len(expected) and all(
            a is b or (torch.is_tensor(a) and torch.is_tensor(b) and torch.equal(a, b))
            for a, b in zip(pos, expected, strict=True))
        if not alike:
            return 'may not read the positions of this model, which are not those of make_positions'
    return ''


def different_layers(model: Any) -> list[Any]:
    """Return copies of the attention layers without plugs, but of those that are alike only one.
    Layers with other methods, attributes or buffers can attend in another way."""
    layers = {}
    for block in model.blocks:
        attn = block.attn
        attributes = [(name, id(value) if callable(value) else repr(value))
                      for name, value in vars(attn).items()
                      if not (name.startswith('_') or is_plug(model, name, attn))]
        buffers = id(attn) if any(True for _ in attn.buffers()) else None
        layers[(type(attn), *attributes, buffers)] = attn
    copies = []
    for attn in layers.values():
        copies.append(copy.deepcopy(attn))
        if is_plug(model, 'attend', attn):
            del copies[-1].attend
    return copies


def compare(ours: Callable[[], Results], own: Callable[[], Results], most: float,
            whose: str = 'the lines of model.py') -> str:
    """Return what is wrong with ours(): a result whose error exceeds `most`, or is NaN, or that it
    does not run; or ''. own() has the right results, whose rows largest_error compares."""
    try:
        found, right = ours(), own()
    except Exception as error:  # Triton, LLVM, ptxas and the driver raise many types
        reason = (str(error).strip() or 'no reason given').splitlines()[0]
        return f'does not run ({type(error).__name__}: {reason})'
    for name, expected in right.items():
        if name not in found:
            return f'gives no {name}, unlike {whose}'
        error = largest_error(found[name], expected.detach().cpu().double())
        if not error <= most:  # true for NaN
            return (f'gives another {name} than {whose} (off by {error:.2g}, at most {most:.2g} is '
                    'rounding)')
    return ''


def find_error(attn: Any, attend: Callable, dtype: torch.dtype, length: int) -> str:
    """Compare an implementation's output and gradients, for random inputs and parameters of this
    layer, with its own lines in float64 on a CPU. Return a message about the first one that is
    wrong by more than the rounding of dtype, or ''."""
    device, weights = attn.W_Q.device, attn.W_Q.dtype
    dtype = dtype if weights == torch.float32 else weights  # autocast casts float32 alone
    layer, random = moved_layer(attn)
    # Draw queries, keys and values in dtype, as autocast has them, and u and h
    B, K, D = 2, attn.K, attn.W_Q.shape[1]
    q, k, v, grad = random(4, B, K, length, D // K).to(device, dtype)
    u, h = random(2, B, length, D).to(device, weights)
    inputs = {'q': q, 'k': k, 'v': v, 'u': u, 'h': h}
    if values_are_keys(attn.cfg):
        del inputs['v']

    def own() -> Results:
        exact = copy.deepcopy(layer).to('cpu', torch.float64)
        as_exact = {name: x.cpu().double() for name, x in inputs.items()}
        return with_gradients(exact, exact.attend, as_exact, grad.cpu().double())

    with (torch.inference_mode(False), torch.enable_grad(),
          torch.autocast(device.type, enabled=False)):
        return compare(lambda: with_gradients(layer, partial(attend, layer), inputs, grad), own,
                       most_error(device, dtype))


@torch.no_grad()
def find_far_error(attn: Any, attend: Callable, dtype: torch.dtype) -> str:
    """Compare the output of the last query of a whole context with the lines of a layer without
    plugs: a sliding window, for example, shows in long contexts alone. attend(attn, q, k, v, u, h)
    has all queries, and returns the last output (B, K, 1, R). Return a message, or ''."""
    device, weights = attn.W_Q.device, attn.W_Q.dtype
    dtype = dtype if weights == torch.float32 else weights
    length, K, D = attn.cfg.context_length, attn.K, attn.W_Q.shape[1]
    layer, random = moved_layer(attn)
    layer.W_K.copy_(random(D, D) / math.sqrt(D))  # scores of about 1: it attends to all keys
    q, v = random(2, 1, K, length, D // K).to(device, dtype)
    u, h = random(2, 1, length, D).to(device, weights)
    k = layer.shift(layer.split_heads(F.linear(h, layer.W_K))).to(dtype)
    v = k if values_are_keys(attn.cfg) else v

    def own() -> Results:
        exact = copy.deepcopy(layer).to('cpu', torch.float64)
        q_end, all_k, all_v, u_end, all_h = (
            x.cpu().double() for x in (q[:, :, -1:], k, v, u[:, -1:], h))
        pos = exact.add_match(all_h, make_positions(attn.cfg, all_h[:, -1:], length - 1))
        o = exact.attend(q_end, all_k, all_v, pos, u_end, all_h)
        return {'output at the end of a context': o}

    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        return compare(lambda: {'output at the end of a context': attend(layer, q, k, v, u, h)},
                       own, most_error(device, dtype))


def moved_layer(attn: Any) -> tuple[Any, Callable[..., Tensor]]:
    """Return a copy of a layer whose parameters are all moved, since zeros hide errors, and a
    function that draws normal numbers of a shape, without disturbing torch's own."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.inference_mode(False), torch.no_grad():
        layer = copy.deepcopy(attn).requires_grad_()
        for p in layer.parameters():
            p.add_((0.3 * random(*p.shape)).to(p))
    return layer, random


def values_are_keys(cfg: Any) -> bool:
    """Return whether attend gets the same k and v. With RoPE, Llama's tied values are the keys
    before their rotation, and CEM's are the rotated ones."""
    tied = cfg.tie in ('kv', 'both') and cfg.positions == 'alibi'
    return cfg.attn == 'cem' or tied


def attend_whole(attend: Callable, attn: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor,
                 h: Tensor) -> Tensor:
    """Return the last output of an implementation that attends to a whole sequence."""
    pos = attn.add_match(h, make_positions(attn.cfg, h))
    return attend(attn, q, k, v, pos, u, h)[:, :, -1:]


def attend_end(attend: Callable, attn: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor,
               h: Tensor) -> Tensor:
    """Return the last output of an implementation that attends with any number of queries."""
    pos = attn.add_match(h, make_positions(attn.cfg, h[:, -1:], h.shape[1] - 1))
    return attend(attn, q[:, :, -1:], k, v, pos, u[:, -1:], h)


def with_gradients(layer: Any, attend: Callable, inputs: dict[str, Tensor],
                   grad: Tensor) -> Results:
    """Return the output, and the gradients of all inputs and parameters that it depends on."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    q, k, u, h = (leaves[name] for name in ('q', 'k', 'u', 'h'))
    pos = layer.add_match(h, make_positions(layer.cfg, h))
    o = attend(q, k, leaves.get('v', k), pos, u, h)
    leaves |= dict(layer.named_parameters())
    gradients = [None] * len(leaves)
    if o.requires_grad:
        # Of a number: given the gradient of o, autograd would import SymPy, for half a second
        total = (o * grad).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    found = {f'gradient of {name}': torch.zeros_like(x) if g is None else g
             for (name, x), g in zip(leaves.items(), gradients, strict=True)}
    return {'output': o, **found}


def largest_error(found: Tensor, right: Tensor) -> float:
    """Return the largest error of a row, relative to its right norm plus a typical row's."""
    difference = (found.detach().cpu().double() - right).norm(dim=-1)
    rows = right.norm(dim=-1)
    typical = rows.square().mean().sqrt() + 1e-30  # not 0
    return (difference / (rows + typical)).max().item()


def most_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of a row that rounding in dtype explains."""
    eps = epsilon(device, dtype)
    return eps * (MOST_ERROR_PRECISE if eps < 1e-6 else MOST_ERROR)


def epsilon(device: torch.device, dtype: torch.dtype) -> float:
    """Return the relative rounding of products in dtype."""
    tf32 = device.type == 'cuda' and torch.get_float32_matmul_precision() != 'highest'
    if dtype == torch.float32 and tf32:
        return 2 ** -10
    return torch.finfo(dtype).eps

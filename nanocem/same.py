"""
Does a model compute what it should? These functions compare numbers, and never texts:

    find_change     are its logits for fixed ids those that its checkpoint keeps?
    is_causal       are they the same if the text is cut after them?
    cache_agrees    does generate's cache give those of the whole text?
    step_errors     is each step of a CEM layer minus the gradient of its energy?
    attend_error    does `attend` give the sums that `softmax_attention` writes out?
    file_change     do model.py's classes compute it as the file has them?
    is_llama        does model.py's Llama compute what transformers' does?

What no logit shows, such as dropout, can be seen only in the model.py that a run's folder keeps.
"""
import contextlib
import copy
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import warn
from model import FEW_QUERIES, NORM_EPS, Cache, ModelConfig, Transformer

N_IDS, TOKENS = 64, (1, 5, 20, 63)  # ids that a model reads, and places of kept logits
N_LOGITS = 16  # of a token, evenly spaced
MOST_ERROR = 1e-6  # of a norm; in float64 machines differ by 1e-12
# Options that small_model does not copy: the shape, P, and exact_update
NOT_COPIED = {'size', 'd_model', 'n_layer', 'n_head', 'n_kv_head', 'd_mlp', 'vocab_size',
              'context_length', 'init_std', 'preconditioner', 'attn_rank', 'mlp_rank',
              'exact_update'}


def device_of_checks(model: Any) -> str:
    """Return the type of device on which to check a model: its own, so that `attend` chooses the
    same implementation as in training. But Apple's GPUs have no float64: their models are checked
    on the CPU."""
    return 'cuda' if model.head.device.type == 'cuda' else 'cpu'


# Logits

def fixed_ids(model: Any) -> Tensor:
    """Return ids (J,) that do not depend on the random state."""
    length = min(N_IDS, model.cfg.context_length)
    return torch.arange(length, device=model.head.device) * 7919 % len(model.head)


@contextlib.contextmanager
def exact_copy(model: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield a copy of a model in float64, and fixed ids (1, J) for it. Inside, gradients are off,
    and random numbers are the same each time; the random state outside stays as it was."""
    device = device_of_checks(model)
    gpus = [torch.cuda.current_device()] if device == 'cuda' else []
    with (torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(gpus),
          torch.autocast(device, enabled=False)):
        torch.manual_seed(0)
        # Unlike to(dtype), double() leaves complex numbers alone, such as an edit's rotations
        exact = copy.deepcopy(model).to(device).double().eval()
        yield exact, fixed_ids(exact)[None]


def agree(found: Tensor, right: Tensor, most_error: float = MOST_ERROR) -> bool:
    """Return whether two tensors are equal, but for an error of this share of their norm. NaN and
    infinite numbers must be in the same places."""
    kinds = torch.isnan, torch.isposinf, torch.isneginf
    finite = right.isfinite()
    return (all(torch.equal(kind(found), kind(right)) for kind in kinds)
            and relative_error(found[finite], right[finite]) <= most_error)


def outputs(model: Any) -> list[str]:
    """Return some logits that a model gives with its own weights: a line for each token."""
    with exact_copy(model) as (exact, idx):
        tokens = [n for n in TOKENS if n < idx.shape[1]] or [idx.shape[1] - 1]
        kept = torch.linspace(0, len(model.head) - 1, N_LOGITS, device=idx.device).long()
        logits = exact(idx)[0][0, tokens][:, kept]
    return [' '.join(f'{x:.10g}' for x in row) for row in logits.tolist()]


def outputs_to_keep(model: Any) -> dict[str, list[str]]:
    """Return what a checkpoint keeps: the outputs, or nothing and a warning where an edit of
    model.py does not run in float64 or cannot be copied. A run does not end for that."""
    try:
        return {'outputs': outputs(model)}
    except Exception as error:  # of an edit, which may raise any
        warn(f'this model.py cannot be checked ({first_line(error)}): a checkpoint keeps no logits '
             'by which a later edit would be noticed')
        return {}


def find_change(model: Any, kept: list[str]) -> str:
    """Return how far the model's outputs are from those that its checkpoint keeps, or ''."""
    try:
        found, expected = (
            torch.tensor([[*map(float, line.split())] for line in lines], dtype=torch.float64)
            for lines in (outputs(model), kept))
    except Exception as error:  # of an edit, which may raise any
        return f'it does not run ({first_line(error)})'
    n = min(len(found), len(expected))  # a longer context has more
    if agree(found[:n], expected[:n]):
        return ''
    error = relative_error(found[:n], expected[:n])
    by = f' (off by {error:.1g} of their norm)' if math.isfinite(error) else ''
    return f'its logits are not those that were kept{by}: model.py or the weights have changed'


def file_change(model: Transformer, state: dict[str, Any]) -> str:
    """Return how what the file model.py computes differs from this model, whose classes a script
    may have replaced, or from what it computed when the weights of the checkpoint `state` were
    trained; or ''."""
    if state.get('change'):
        return state['change']
    # model.py as its file has it, without classes that a script has put in their place
    path = Path(__file__).parents[1] / 'model.py'
    spec = importlib.util.spec_from_file_location('model_as_its_file_has_it', path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        copied = module.Transformer(model.cfg)
        copied.load_state_dict(model.state_dict())
        same = not find_change(copied, outputs(model))
    except (KeyError, RuntimeError):  # layers that the file lacks, or other weights
        same = False
    return '' if same else ('its file does not compute what the classes do that a script has put '
                            'in place')


@torch.inference_mode(False)
@torch.no_grad()
def is_llama(grouped: bool) -> bool:
    """Return whether one layer of model.py's Llama, which may be edited, computes in float64 what
    LlamaForCausalLM of transformers does, as it is written out here: with or without grouped
    queries."""
    cfg = ModelConfig(d_model=16, n_layer=1, n_head=4, n_kv_head=2 if grouped else 4, d_mlp=24,
                      vocab_size=50, attn='llama', mlp='llama')
    model = Transformer(cfg).double()
    random = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=random))
    idx = torch.arange(80)[None] * 7919 % 50

    def norm(x: Tensor, module: Any) -> Tensor:
        return F.rms_norm(x, (cfg.d_model,), module.gain, NORM_EPS)

    def heads(x: Tensor, W: Tensor) -> Tensor:
        return (x @ W.mT).unflatten(-1, (-1, cfg.d_model // cfg.n_head)).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        J, R = x.shape[-2:]
        frequencies = cfg.rope_theta ** (-torch.arange(0, R, 2).double() / R)
        angles = torch.outer(torch.arange(J), frequencies).repeat(1, 2)
        a, b = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()

    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    x = model.embedding[idx]
    h = norm(x, attn.norm)
    q, k, v = rotate(heads(h, attn.W_Q)), rotate(heads(h, attn.W_K)), heads(h, attn.W_V)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + o.transpose(1, 2).flatten(-2) @ attn.W_O
    h = norm(x, mlp.norm)
    x = x + (F.silu(h @ mlp.V.mT) * (h @ mlp.W.mT)) @ mlp.W_d
    return agree(model(idx)[0], norm(x, model.norm) @ model.head.mT)


def is_causal(model: Any) -> bool:
    """Return whether logits stay the same if the text is cut after them. They do not if model.py
    was edited and the mask was lost: the model's losses are then low, and say nothing about the
    text that it writes."""
    with contextlib.suppress(Exception), exact_copy(model) as (exact, idx):  # of an edit: any
        n = idx.shape[1] // 2
        return agree(exact(idx[:, :n])[0][0, :n], exact(idx)[0][0, :n])
    return True  # it does not run here, which other checks report


def warn_if_not_causal(model: Any) -> None:
    if not is_causal(model):
        warn('this model.py is not causal, or is random: logits depend on later tokens. Its '
             'losses say nothing about text that it writes')


@torch.no_grad()
def cache_agrees(model: Any, prompt: Tensor) -> bool:
    """Return whether model.py's cache gives the logits of the whole text, but for rounding, after
    the ids (J,) of a prompt and some more. It does not after an edit that lets tokens meet outside
    attention."""
    ids = fixed_ids(model)
    half, length = len(ids) // 2, len(ids)
    idx = torch.cat([prompt[-half:], ids])[None, :length]
    cache = Cache()
    try:
        for begin, end in ((0, half), (half, length - 1), (length - 1, length)):
            if begin < end:
                found = model(idx[:, begin:end], next_only=True, cache=cache)[0]
        right = model(idx, next_only=True)[0]
    except Exception:  # of an edit without a cache
        return False
    rounding = torch.finfo(model.head.dtype).eps ** 0.5  # more than sums in this dtype are off by
    return agree(found, right, rounding)


# Layers

def small_model(model: Any) -> tuple[Any, Tensor]:
    """Return a small model in float64 with the layers of this one, but without P, and with the
    whole gradient of a diagonal; and an input of its layers. All weights are random."""
    cfg = model.cfg
    grouped = cfg.n_kv_head < cfg.n_head
    options = {name: value for name, value in vars(cfg).items() if name not in NOT_COPIED}
    small = type(model)(type(cfg)(
        **options, d_model=16, n_layer=1, n_head=2, n_kv_head=1 if grouped else 2, d_mlp=24,
        vocab_size=1, context_length=1,
        exact_update=cfg.kq_diag in ('shared', 'per_head'))).double()
    random = torch.Generator().manual_seed(0)
    for p in small.parameters():  # zeros hide errors
        p.data = torch.randn(p.shape, generator=random).double() / 3
    device = device_of_checks(model)
    x = torch.randn(1, FEW_QUERIES + 6, 16, generator=random).double()
    return small.to(device), x.to(device)


def take_steps(layer: Any, inputs: tuple, n: int) -> list[Tensor]:
    """Return a CEM layer's states after 0 to n steps on one context. Its T stays as it was."""
    trained_T, states = layer.T, []
    try:
        for T in range(n + 1):
            layer.T = T
            states.append(layer(*inputs))
    finally:
        layer.T = trained_T
    return states


def minus_gradient(layer: Any, state: Tensor, h: Tensor) -> Tensor:
    """Return minus the gradient of a CEM layer's energy with respect to u = norm(state)."""
    with torch.inference_mode(False), torch.enable_grad():
        u = layer.norm(state).detach().requires_grad_()
        gradient, = torch.autograd.grad(layer.energy(u, h).sum(), u)
    return -gradient


@torch.inference_mode(False)
@torch.no_grad()
def step_errors(model: Any) -> dict[str, float]:
    """Return by how much two steps of each layer that has an energy differ from -eta d energy / du,
    relative to its norm. The keys are the names of the layers' classes."""
    small, x = small_model(model)
    attn, mlp = small.blocks[0].attn, small.blocks[0].mlp
    errors = {}
    for layer, inputs in ((attn, (x, small.positions(x))), (mlp, (x,))):
        if not hasattr(layer, 'energy'):
            continue
        states, h = torch.stack(take_steps(layer, inputs, 2)), layer.norm(x)
        expected = [layer.eta * minus_gradient(layer, state, h) for state in states[:2]]
        errors[type(layer).__name__] = relative_error(states.diff(dim=0), torch.stack(expected))
    return errors


@torch.inference_mode(False)
@torch.no_grad()
def attend_error(model: Any) -> float:
    """Return by how much `attend` differs from `softmax_attention`, relative to its norm; 0 for a
    custom attention without these methods."""
    small, x = small_model(model)
    attn, pos = small.blocks[0].attn, small.positions(x)
    if not (hasattr(attn, 'attend') and hasattr(attn, 'softmax_attention')):
        return 0.0
    q, k, v = (attn.split_heads(x.roll(n, dims=2)) for n in (1, 2, 3))
    inputs = q, k, v, pos, x, x.flip(1)
    found, expected = attn.attend(*inputs)[0], attn.softmax_attention(*inputs)[0]
    return relative_error(found, expected)


def relative_error(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference relative to that of `right`. NaN if a number is not
    finite."""
    return float((found - right).norm()) / max(float(right.norm()), 1e-30)


def warn_of_wrong_layers(model: Any) -> None:
    """Print a line for each layer of this model.py whose steps are not minus the gradient of its
    energy, and one if `attend` differs from `softmax_attention`."""
    try:
        for name, error in step_errors(model).items():
            if not error <= MOST_ERROR:  # true for NaN
                warn(f'{name}: a step differs from minus the gradient of energy by {error:.2g} of '
                     'its norm: change forward and energy together, or rename energy')
        error = attend_error(model)
        if not error <= MOST_ERROR:
            warn('attend does not give the sums that softmax_attention and scores write out (off '
                 f'by {error:.2g} of their norm): change attend as well')
    except Exception as error:  # of an edit, which may raise any
        warn(f'this model.py cannot be checked ({first_line(error)}): whether its steps are minus '
             'the gradients of its energies is not known')


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message, for a warning of one line."""
    reason = (str(error).strip() or 'no reason given').splitlines()[0]
    return f'{type(error).__name__}: {reason:.150}'

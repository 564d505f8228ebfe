"""
What a model.py computes, in a few numbers, and whether another one still does.

Runs, checkpoints and exports carry these numbers. They are of a small model with their options and
with fixed weights, and do not depend on how a run trained its own. So they tell an edit of
model.py, or a class of one's own, from the first step on, and after any training elsewhere. The
run's own weights would not: some start at 0, and hide what they multiply. The numbers of many
layers are computed in float64: with residual=normed rounding grows from layer to layer.
"""
import contextlib
import importlib.util
import math
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any

import numpy as np
import torch

import model as model_py
from configurator import build

VOCAB_SIZE, HEAD_WIDTH = 256, 8  # of the small models
SHORT, LONG = 64, 2048  # ids at most: the readable lines keep the scores of all pairs in memory
N_POSITIONS, N_LOGITS = 4, 2  # so many logits are kept at each of so many positions
# In float32 rounding was up to 4e-6, in 14 layers of four steps from x; an epsilon of 1e-6 for 1e-5
# is 1e-4
MOST_ERROR = 3e-5
GRADIENT = 'gradient of '  # so begin the names of numbers that tell of training alone

Numbers = dict[str, list[float]]


def find_numbers(options: dict[str, Any], device: torch.device | str = 'cpu',
                 module: ModuleType = model_py, dtype: torch.dtype = torch.float64,
                 training: bool = True) -> Numbers:
    """Return what the classes of a model.py compute for these options of ModelConfig: logits of all
    layers and steps for a few ids, of one for a whole context, and losses; with training=True also
    the gradients' norms for the few ids. They are alike on all machines; many layers are computed
    in dtype if that is possible. UserError if ModelConfig refuses the options."""
    if torch.device(device).type == 'mps':  # it has no float64
        device = 'cpu'
    heads = options['n_head']
    small = options | dict(vocab_size=VOCAB_SIZE, d_model=HEAD_WIDTH * heads,
                           d_mlp=2 * HEAD_WIDTH * heads)
    one_pass = dict(n_layer=1, loops=1, attn_reuse=1, mlp_reuse=1, attn_steps=1, mlp_steps=1)

    def of_few_ids(dtype: torch.dtype) -> Numbers:
        model, idx = fixed_model(small, SHORT, device, module, dtype)
        return forward_numbers(model, idx) | (gradient_norms(model, idx) if training else {})

    with full_precision(torch.device(device).type):
        try:
            found = of_few_ids(dtype)
        except Exception:  # not every edit can be computed in float64
            found = of_few_ids(torch.float32)
        model, idx = fixed_model(small | one_pass, LONG, device, module, torch.float32)
        for name, values in forward_numbers(model, idx).items():
            found[name] += values
    return found


def fixed_model(cfg: dict[str, Any], longest: int, device: torch.device | str, module: ModuleType,
                dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """Return a model with fixed weights, and ids (1, J) of a context, of `longest` at most."""
    model = module.Transformer(build(module.ModelConfig, cfg))
    generator = torch.Generator()
    for name, w in model.named_parameters():
        # A weight is that of its name. Gains and biases are about 1, and matrices about keep the
        # norm of what they multiply
        generator.manual_seed(zlib.crc32(name.encode()))
        noise = 2 * torch.rand(w.shape, generator=generator) - 1
        w.copy_(1 + noise / 2 if w.dim() == 1 else 2 * noise / w.shape[-1] ** 0.5)
    generator.manual_seed(0)
    idx = torch.randint(VOCAB_SIZE, (1, min(cfg['context_length'], longest)), generator=generator)
    model.to(device)
    # Unlike to(dtype), double() leaves complex numbers alone, such as an edit's rotations
    return model.double() if dtype == torch.float64 else model, idx.to(device)


def forward_numbers(model: Any, idx: torch.Tensor) -> Numbers:
    """Return a few logits, next_logits' too, and the loss."""
    model.eval()
    positions = torch.linspace(0, idx.shape[1] - 1, N_POSITIONS, device=idx.device).long()
    found = {'logit': model(idx)[0][0, positions, :N_LOGITS].flatten(),
             'loss': model(idx, idx.flip(1))[1].view(1),
             'next logit': model.next_logits(idx)[0, :N_LOGITS]}
    # JSON has no NaN
    return {name: value.float().nan_to_num().tolist() for name, value in found.items()}


def gradient_norms(model: Any, idx: torch.Tensor) -> Numbers:
    """Return the norm of the gradient of each kind of weight, all layers together: a detach() or a
    dropout changes nothing else. A norm is 0 if it is random, since a seed gives other numbers on
    each device, and if it is rounding, as that of a bias that softmax cancels."""
    model.train()
    weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
    norms, others = (norms_of_seed(model, idx, weights, seed) for seed in (0, 1))
    rounding = 100 * torch.finfo(model.head.dtype).eps * max(norms.values(), default=0)
    return {kind: [norm if norm > rounding and math.isclose(norm, others[kind], rel_tol=MOST_ERROR)
                   else 0] for kind, norm in norms.items()}


def norms_of_seed(model: Any, idx: torch.Tensor, weights: dict[str, torch.Tensor],
                  seed: int) -> dict[str, float]:
    """Return gradient_norms' numbers for one seed, 0 for those that are not finite."""
    torch.manual_seed(seed)
    with torch.enable_grad():
        loss = model(idx, idx.flip(1))[1]
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    squares: dict[str, float] = {}
    for name, g in zip(weights, gradients, strict=True):
        kind = GRADIENT + re.sub(r'^blocks\.\d+\.', '', name)
        squares[kind] = squares.get(kind, 0) + (0 if g is None else float(g.square().sum()))
    norms = {kind: math.sqrt(square) for kind, square in squares.items()}
    return {kind: norm if math.isfinite(norm) else 0 for kind, norm in norms.items()}


@contextlib.contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Compute in float32 or more, without TF32 and gradients. Random numbers go on as before."""
    before, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision('highest')
    torch.set_default_dtype(torch.float32)  # torch.rand draws others in float64
    try:
        gpus = [torch.cuda.current_device()] if device_type == 'cuda' else []
        with (torch.random.fork_rng(gpus), torch.autocast(device_type, enabled=False),
              torch.inference_mode(False), torch.no_grad()):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_default_dtype(dtype)


def find_change(options: dict[str, Any], numbers: Numbers | None,
                device: torch.device | str = 'cpu', module: ModuleType = model_py,
                training: bool = False) -> str:
    """Return how a model.py computes something else than the one that found these numbers for these
    options, or ''; with training=True, also other gradients. Without numbers, as in a checkpoint of
    a loop of one's own, return which of the options this ModelConfig does not have, since `build`
    leaves them out."""
    known = {field.name for field in fields(module.ModelConfig)}
    unknown = [f'{name}={value}' for name, value in options.items() if name not in known]
    lacks = f'its model has {", ".join(unknown)}, unlike this model.py' if unknown else ''
    if not numbers:
        return lacks
    # Older numbers have no next logit, and were computed in float32
    dtype = torch.float64 if 'next logit' in numbers else torch.float32
    if not training:
        numbers = {name: values for name, values in numbers.items() if GRADIENT not in name}
    # An unknown option that changes no number is no change
    found = find_numbers(options, device, module, dtype, training)
    wrong = ', '.join(name for name, values in numbers.items() if not np.allclose(
        found.get(name, math.nan), values, MOST_ERROR, MOST_ERROR))
    wrong = wrong and f'gives another {wrong} than the one that made it'
    if not wrong:
        return ''
    reason = f'{wrong}; {lacks}' if lacks else wrong
    return (f'this model.py {reason}. An energy of your own runs through the file that trained it, '
            'as docs/new_energy.py does')


def change_of_file(state: dict[str, Any], cfg: model_py.ModelConfig) -> str:
    """Return how model.py's file computes something else than the checkpoint `state` says, or than
    the classes that a script has put in its place; or ''."""
    options = state.get('options', state.get('model_config', {}))
    if change := find_change(options, state.get('numbers')):
        return change
    numbers = find_numbers(vars(cfg), training=False)
    return find_change(vars(cfg), numbers, module=model_file())


def model_file() -> ModuleType:
    """Return model.py as its file has it, without classes that a script has put in their place."""
    spec = importlib.util.spec_from_file_location('model_as_its_file_has_it', model_py.__file__)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

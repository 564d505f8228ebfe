"""
What a model.py computes, in a few numbers, and whether another one still does.

Runs, checkpoints and exports carry these numbers. They are of a small model with their options and
with fixed weights, and do not depend on how a run trained its own. So they tell an edit of
model.py, or a class of one's own, from the first step on, and after any training elsewhere. The
run's own weights would not: some start at 0, and hide what they multiply.
"""
import contextlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch

import model as model_py
from configurator import build
from nanocem.trial import compare

VOCAB_SIZE, HEAD_WIDTH = 256, 8  # of the small models
SHORT, LONG = 64, 2048  # ids at most: the readable lines keep the scores of all pairs in memory
N_POSITIONS, N_LOGITS = 4, 2  # so many logits are kept at each of so many positions
# Rounding was up to 4e-6, in 14 layers of four steps; an epsilon of 1e-6 for 1e-5 is 1e-4
MOST_ERROR = 3e-5

Numbers = dict[str, list[float]]


@torch.no_grad()
def find_numbers(options: dict[str, Any], device: torch.device | str = 'cpu',
                 module: ModuleType = model_py) -> Numbers:
    """Return what the classes of a model.py compute for these options of ModelConfig: logits of all
    layers and steps for a few ids, of one for a whole context, and losses. They are alike on all
    machines. UserError if ModelConfig refuses the options."""
    found: Numbers = {'logit': [], 'loss': []}
    heads = options['n_head']
    small = options | dict(vocab_size=VOCAB_SIZE, d_model=HEAD_WIDTH * heads,
                           d_mlp=2 * HEAD_WIDTH * heads)
    with full_precision(torch.device(device).type):
        one_pass = dict(n_layer=1, loops=1, attn_reuse=1, mlp_reuse=1, attn_steps=1, mlp_steps=1)
        for cfg, longest in ((small, SHORT), (small | one_pass, LONG)):
            model = module.Transformer(build(module.ModelConfig, cfg)).eval()
            generator = torch.Generator()
            for name, w in model.named_parameters():
                # A weight is that of its name. Gains and biases are about 1, and matrices about
                # keep the norm of what they multiply
                generator.manual_seed(zlib.crc32(name.encode()))
                noise = 2 * torch.rand(w.shape, generator=generator) - 1
                w.copy_(1 + noise / 2 if w.dim() == 1 else 2 * noise / w.shape[-1] ** 0.5)
            model.to(device)
            length = min(options['context_length'], longest)
            generator.manual_seed(0)
            idx = torch.randint(VOCAB_SIZE, (1, length), generator=generator).to(device)
            positions = torch.linspace(0, length - 1, N_POSITIONS, device=device).long()
            logits, loss = model(idx)[0][0, positions, :N_LOGITS], model(idx, idx.flip(1))[1]
            for name, value in (('logit', logits.flatten()), ('loss', loss.view(1))):
                found[name] += value.float().nan_to_num().tolist()  # JSON has no NaN
    return found


@contextlib.contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Compute in float32 alone, without TF32. Random numbers go on as before."""
    before, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision('highest')
    torch.set_default_dtype(torch.float32)  # torch.rand draws others in float64
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_default_dtype(dtype)


def find_change(options: dict[str, Any], numbers: Numbers | None,
                device: torch.device | str = 'cpu', module: ModuleType = model_py) -> str:
    """Return how a model.py computes something else than the one that found these numbers for these
    options, or ''. Without numbers, as in a checkpoint of a loop of one's own, return which of the
    options this ModelConfig does not have, since `build` leaves them out."""
    known = {field.name for field in fields(module.ModelConfig)}
    unknown = [f'{name}={value}' for name, value in options.items() if name not in known]
    lacks = f'its model has {", ".join(unknown)}, unlike this model.py' if unknown else ''
    if not numbers:
        return lacks
    # An unknown option that changes no number is no change
    wrong = compare(lambda: as_tensors(find_numbers(options, device, module)),
                    lambda: as_tensors(numbers), MOST_ERROR, 'the one that made it')
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
    return find_change(vars(cfg), find_numbers(vars(cfg)), module=model_file())


def as_tensors(numbers: Numbers) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values)[:, None] for name, values in numbers.items()}


def model_file() -> ModuleType:
    """Return model.py as its file has it, without classes that a script has put in their place."""
    spec = importlib.util.spec_from_file_location('model_as_its_file_has_it', model_py.__file__)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

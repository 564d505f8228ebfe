"""
Is it the same? Three questions, asked here alone:

    Does this code with these weights give what it gave?     outputs, find_change
    Was model.py edited?                                     definitions, in_use, find_edits
    Are these plain values equal?                            differences, differing

A checkpoint, an export and a web page keep some logits of their own weights, and whoever loads them
compares. So an edit that computes something else is found, and so are other options, and weights of
the layers that have changed. What no logit shows, a detach or a dropout, is told by the text of
model.py.
"""
import ast
import contextlib
import copy
import importlib.util
import inspect
import sys
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

import model as model_py
from configurator import warn

N_IDS, TOKENS = 64, (1, 5, 20, 63)  # ids that a model reads, and places of kept logits
N_LOGITS = 16  # of a token, evenly spaced
MOST_ERROR = 1e-6  # of the logits' norm; in float64 machines differ by 1e-12


# Does this code with these weights give what it gave?

def outputs(model: Any) -> list[str]:
    """Return some logits that a model gives with its own weights for fixed ids, in float64: a line
    of numbers for each token."""
    with exact_copy(model) as (exact, idx):
        tokens = [n for n in TOKENS if n < idx.shape[1]] or [idx.shape[1] - 1]
        kept = torch.linspace(0, len(model.head) - 1, N_LOGITS, device=idx.device).long()
        logits = exact(idx)[0][0, tokens][:, kept]
    return [' '.join(f'{x:.10g}' for x in row) for row in logits.tolist()]


@contextlib.contextmanager
def exact_copy(model: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield a copy of a model in float64, and fixed ids (1, I) for it. Inside there are no
    gradients, and the same random numbers each time, which those outside do not notice."""
    # A GPU of Apple has no float64
    device = 'cuda' if model.head.device.type == 'cuda' else 'cpu'
    gpus = [torch.cuda.current_device()] if device == 'cuda' else []
    with (torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(gpus),
          torch.autocast(device, enabled=False)):
        torch.manual_seed(0)
        # Unlike to(dtype), double() leaves complex numbers alone, such as an edit's rotations
        exact = copy.deepcopy(model).to(device).double().eval()
        length = min(N_IDS, model.cfg.context_length)
        yield exact, torch.arange(length, device=device)[None] * 7919 % len(model.head)


def warn_if_not_causal(model: Any) -> None:
    """Print a warning if logits depend on later tokens, as after an edit of model.py that forgets
    the mask: its losses are low, and say nothing of the text that it writes."""
    with contextlib.suppress(Exception), exact_copy(model) as (exact, idx):  # of an edit: any
        n = idx.shape[1] // 2
        whole, part = exact(idx)[0][0, :n], exact(idx[:, :n])[0][0]
        if float((whole - part).norm()) > MOST_ERROR * float(whole.norm()):
            warn('this model.py lets a token see later ones, or is random: logits change if the '
                 'text is cut after them. Its losses say nothing about text that it writes')


def outputs_to_keep(model: Any) -> dict[str, list[str]]:
    """Return what a checkpoint keeps: the outputs, or nothing and a warning where an edit of
    model.py does not run in float64 or cannot be copied. A run does not end for that."""
    try:
        return {'outputs': outputs(model)}
    except Exception as error:  # of an edit, which may raise any
        reason = (str(error).strip() or 'no reason given').splitlines()[0]
        warn(f'this model.py cannot be checked ({type(error).__name__}: {reason:.150}): a '
             'checkpoint keeps no logits by which a later edit would be told')
        return {}


def find_change(model: Any, kept: list[str]) -> str:
    """Return how far the model's outputs are from those that its checkpoint keeps, or ''."""
    try:
        found = as_numbers(outputs(model))
    except Exception as error:
        return f'it does not run ({type(error).__name__}: {error})'
    expected = as_numbers(kept)
    n = min(len(found), len(expected))  # a longer context has more
    error = float((found[:n] - expected[:n]).norm() / expected[:n].norm().clamp(min=1e-30))
    if error <= MOST_ERROR:  # false for NaN
        return ''
    return (f'its logits are not those that were kept (off by {error:.1g} of their norm): model.py '
            'or the weights have changed')


def as_numbers(lines: list[str]) -> torch.Tensor:
    numbers = torch.tensor([[*map(float, line.split())] for line in lines], dtype=torch.float64)
    return numbers.nan_to_num(1e9)  # two NaN are equal


# Was model.py edited?

def syntax(node: Any) -> Any:
    """Return what a part of a program says, without its comments, docstrings and line ends. All
    versions of Python return the same: fields that are empty are left out."""
    if isinstance(node, list):
        return [syntax(item) for item in node if not is_docstring(item)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, syntax(value)) for name, value in ast.iter_fields(node)
              if value is not None and value != []]
    return type(node).__name__, fields


def is_docstring(node: Any) -> bool:
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str))


def checksum(node: ast.AST) -> str:
    return f'{zlib.crc32(repr(syntax(node)).encode()):08x}'


def definitions(text: str) -> dict[str, str]:
    """Return the checksum of each function, method and constant of a program: 'CEMMLP.forward'."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = checksum(node)
        elif isinstance(node, ast.ClassDef):
            found |= {f'{node.name}.{part.name}': checksum(part) for part in node.body
                      if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target): checksum(node) for target in targets}
    return found


def codes_of(code: CodeType) -> dict[str, CodeType]:
    """Return the compiled functions and methods of a program, by their names."""
    found = {}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found[part.co_qualname] = part
            found |= codes_of(part)
    return found


# The text that the program began with. Whoever saves model.py while it runs, runs the earlier one
MODEL_TEXT = Path(model_py.__file__).read_text(encoding='utf-8')
DEFINITIONS = definitions(MODEL_TEXT)
CODES = codes_of(compile(MODEL_TEXT, model_py.__file__, 'exec'))


def checksum_of(function: Any) -> str:
    """Return the checksum of the text of a function or method; '' for one without text, such as a
    partial, or one that was typed into a console."""
    code = code_of(function)
    if code is None:
        return ''
    if code == CODES.get(code.co_qualname):  # it is model.py's own
        return DEFINITIONS.get(code.co_qualname, '')
    try:
        return checksum(ast.parse(textwrap.dedent(inspect.getsource(code))).body[0])
    except (OSError, TypeError, SyntaxError, IndexError):
        return ''


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function, without a decorator of torch or of Python. A wrapper of
    anyone else's is another function, whatever it says that it wraps."""
    while hasattr(function, '__wrapped__'):
        file = getattr(getattr(function, '__code__', None), 'co_filename', '')
        if file != contextlib.__file__ and '/torch/' not in file.replace('\\', '/'):
            break
        function = function.__wrapped__
    return getattr(function, '__code__', None)


def in_use() -> dict[str, str]:
    """Return the definitions of model.py, and those that a script has put in their place."""
    found = dict(DEFINITIONS)
    for name in CODES.keys() & found.keys():
        value = model_py
        for part in name.split('.'):
            value = getattr(value, part, None)
        found[name] = checksum_of(value)
    return found


def model_file(text: str = MODEL_TEXT) -> ModuleType:
    """Return model.py as its file has it, without classes that a script has put in their place."""
    spec = importlib.util.spec_from_file_location('model_as_its_file_has_it', model_py.__file__)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    exec(compile(text, model_py.__file__, 'exec'), vars(module))
    return module


def find_edits(methods: Iterable[tuple[Any, str]], known: dict[str, str]) -> list[str]:
    """Return the names of those methods whose text is not the known one. Each method is given by
    its owner, an object, a class or a module, and its name."""
    edits = {}
    for owner, name in methods:
        method = getattr(owner, name, None)
        code = code_of(method)
        qualified = code.co_qualname if code else ''
        if known.get(qualified) != checksum_of(method):
            if not qualified.endswith(name):
                kind = owner if isinstance(owner, type) else type(owner)
                qualified = name if isinstance(owner, ModuleType) else f'{kind.__name__}.{name}'
            edits[qualified] = None
    return list(edits)


# Are these plain values equal?

def differing(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names whose values differ, or that one of the two lacks."""
    return [name for name in {**saved, **now}
            if (name in saved, saved.get(name)) != (name in now, now.get(name))]


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return in words which of the values `now` are not those saved. A name that was not saved is
    not compared."""
    return [f'{name}={saved[name]} (now {value})' for name, value in now.items()
            if saved.get(name, value) != value]

"""
Is it the same? Three questions, which nobody else asks.

    Does this code with these weights give what it gave?     outputs, find_change
    Was model.py edited?                                     definitions, find_edits
    Are these plain values equal?                            differences

A checkpoint, an export and a web page keep some logits of their own weights, and whoever loads them
compares. So an edit that computes something else is found, and so are damaged weights and other
options. What no logit shows, a detach or a dropout, is told by the text of model.py.
"""
import ast
import copy
import importlib.util
import inspect
import sys
import textwrap
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import model as model_py

N_IDS, EVERY = 64, 21  # ids that a model reads, and of every how many-th one logits are kept
N_LOGITS = 16  # of a token, evenly spaced
MOST_ERROR = 1e-6  # of the logits' norm; in float64 machines differ by 1e-12


# Does this code with these weights give what it gave?

def outputs(model: Any) -> list[str]:
    """Return some logits that a model gives with its own weights for fixed ids, in float64: a line
    of numbers for each token."""
    # A GPU of Apple has no float64
    device = 'cuda' if model.head.device.type == 'cuda' else 'cpu'
    vocab_size, length = len(model.head), min(N_IDS, model.cfg.context_length)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        # Unlike to(dtype), double() leaves complex numbers alone, such as an edit's rotations
        exact = copy.deepcopy(model).to(device).double().eval()
        idx = torch.arange(length, device=device)[None] * 7919 % vocab_size
        kept = torch.linspace(0, vocab_size - 1, N_LOGITS, device=device).long()
        logits = exact(idx)[0][0, ::EVERY, kept]
    return [' '.join(f'{x:.10g}' for x in row) for row in logits.tolist()]


def find_change(model: Any, kept: list[str]) -> str:
    """Return how far the model's outputs are from those that its checkpoint keeps, or ''."""
    try:
        found = as_numbers(outputs(model))
    except Exception as error:  # of an edit, which may raise any
        return f'does not run ({type(error).__name__}: {error})'
    n = min(len(found), len(kept))  # a longer context has more
    found, expected = found[:n], as_numbers(kept)[:n]
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    if error <= MOST_ERROR:  # false for NaN
        return ''
    return f'gives other logits with these weights (off by {error:.1g} of their norm)'


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


def checksum_of(function: Any) -> str:
    """Return the checksum of the text of a function or method; '' for one without text, such as a
    partial, or one that was typed into a console."""
    try:
        text = inspect.getsource(inspect.unwrap(function))
        return checksum(ast.parse(textwrap.dedent(text)).body[0])
    except (OSError, TypeError, SyntaxError, IndexError):
        return ''


def in_use() -> dict[str, str]:
    """Return the definitions of model.py, and those that a script has put in their place."""
    found = definitions(model_text())
    for name in found:
        value = model_py
        for part in name.split('.'):
            value = getattr(value, part, None)
        code = getattr(inspect.unwrap(value), '__code__', None) if callable(value) else None
        if code and (code.co_filename, code.co_qualname) != (model_py.__file__, name):
            found[name] = checksum_of(value)
    return found


def model_text() -> str:
    return Path(model_py.__file__).read_text(encoding='utf-8')


def model_file() -> ModuleType:
    """Return model.py as its file has it, without classes that a script has put in their place."""
    spec = importlib.util.spec_from_file_location('model_as_its_file_has_it', model_py.__file__)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_edits(methods: Iterable[tuple[Any, str]], known: dict[str, str]) -> list[str]:
    """Return those methods whose text is not the known one. Each is given by its owner, an object
    or a module, and its name."""
    edits = {}
    for owner, name in methods:
        method = getattr(owner, name)
        qualified = getattr(inspect.unwrap(method), '__qualname__', '')
        if known.get(qualified) != checksum_of(method):
            known_as = qualified.endswith(name)
            edits[qualified if known_as else f'{type(owner).__name__}.{name}'] = None
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

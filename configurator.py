"""
Options for every script, nanoGPT's habit with types:

    python train.py config/cem_t2.py --size=86m --learning_rate=1e-3

The dataclasses are the only declaration. A field's type (bool, int, float, str, Literal, tuple[X, ...], X | None) is
checked, its default holds unless a config file or a flag says otherwise (later ones win), and the comment that ends its
line is what --help prints. Config files only assign plain values; they are read, never executed.
"""
import ast
import dataclasses
import difflib
import inspect
import os
import re
import sys
import types
import typing
from typing import Any, NoReturn

UNION = (types.UnionType, typing.Union)  # what X | None is, by the kind of X


def fail(message: str, everywhere: bool = False) -> NoReturn:
    """End the program with one line on stderr and exit code 1. Of several processes only rank 0 speaks, unless
    `everywhere`: what went wrong may be known to this process alone."""
    if os.environ.get('RANK', '0') != '0' and not everywhere:
        sys.exit(1)
    raise SystemExit(f'{os.path.basename(sys.argv[0])}: {message}')


def read_options(argv: list[str], *classes: type) -> dict[str, Any]:
    """Options given in `argv` (config files and --key=value, in order), type-checked against the fields of `classes`.
    Only what was given is returned, so that a caller can tell it from a default. SystemExit on bad input and --help."""
    if '--help' in argv or '-h' in argv:
        print(_help(classes))
        sys.exit(0)
    hints = {k: hint for c in classes for k, hint in typing.get_type_hints(c).items()}
    given: dict[str, Any] = {}
    for arg in argv:
        if not arg.startswith('--'):
            for key, value, line in _read_file(arg):
                given[key] = _check(key, value, hints, f'{arg}:{line}: ')
            continue
        key, equals, text = arg[2:].partition('=')
        if not equals and hints.get(key) in (bool, bool | None):
            text = 'True'
        elif not equals and key in hints:
            fail(f'--{key} needs a value: --{key}=VALUE, with = and no space')
        given[key] = _check(key, text, hints, '--')
    return given


def build(cls: type, given: dict[str, Any]) -> Any:
    """cls(**the part of `given` that cls declares); its ValueError becomes one line and exit code 1."""
    try:
        return cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})
    except ValueError as error:
        fail(str(error))


def _read_file(path: str) -> list[tuple[str, Any, int]]:
    """(name, value, line) of every assignment in a config file."""
    try:
        with open(path, encoding='utf-8') as file:
            body = ast.parse(file.read()).body
    except OSError as error:
        fail(f'config file {path}: {error.strerror}; options are written --key=value, config files stand in config/')
    except (SyntaxError, ValueError) as error:  # ValueError: not text
        fail(f'config file {path}: not Python: {error}')
    out = []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        try:
            (target,) = node.targets
            out.append((target.id, ast.literal_eval(node.value), node.lineno))
        except (AttributeError, ValueError):
            fail(f'{path}:{node.lineno}: a config file holds only lines of the form: name = plain value')
    return out


def _check(key: str, value: Any, hints: dict[str, Any], where: str) -> Any:
    """`value` (text from a flag, or a literal from a file) as the type that `key` declares."""
    if key not in hints:
        near = difflib.get_close_matches(key, hints, n=3)
        fail(f'{where}{key}: no such option{"; near: " + ", ".join(near) if near else ""} (--help lists all)')
    try:
        return _convert(value, hints[key])
    except (TypeError, ValueError, OverflowError):
        sign = '=' if where == '--' else ' = '
        fail(f'{where}{key}{sign}{value if where == "--" else repr(value)}: expected {describe(hints[key])}')


def _convert(value: Any, hint: Any) -> Any:
    """`value` as type `hint`; ValueError where it is not one. 3.3B, 50M and 8K are numbers."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in UNION:  # X | None
        return None if value is None or value == 'None' else _convert(value, args[0])
    if typing.get_origin(hint) is typing.Literal:
        if value in args:
            return value
    elif typing.get_origin(hint) is tuple:
        items = value.split(',') if isinstance(value, str) else value
        return tuple(_convert(item, args[0]) for item in items)
    elif hint is str and isinstance(value, str):
        return value
    elif hint is bool and str(value).capitalize() in ('True', 'False'):
        return str(value).capitalize() == 'True'
    elif hint in (int, float) and not isinstance(value, bool):
        if isinstance(value, str) and (match := re.fullmatch(r'(.*\d)([KMB])', value)):
            value = float(match[1]) * {'K': 1e3, 'M': 1e6, 'B': 1e9}[match[2]]
        number = int(value) if hint is int and re.fullmatch(r'[+-]?\d+', str(value)) else float(value)
        if number == number and (hint is float or number == int(number)):
            return hint(number)
    raise ValueError


def describe(hint: Any) -> str:
    """A type in words: 'one of llama, cem', 'a whole number', ..."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in UNION:
        return f'{describe(args[0])}, or None'
    if typing.get_origin(hint) is typing.Literal:
        return 'one of ' + ', '.join(args)
    if typing.get_origin(hint) is tuple:
        return f'a comma-separated list, each {describe(args[0])}'
    return {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text'}[hint]


def _help(classes: tuple[type, ...]) -> str:
    lines = [inspect.getdoc(sys.modules['__main__']) or '', '']
    for cls in classes:
        comments = dict(re.findall(r'^    (\w+): .*?  # (.*)$', inspect.getsource(cls), re.MULTILINE))
        hints = typing.get_type_hints(cls)
        lines.append(f'{cls.__name__}: {inspect.getdoc(cls)}')
        for field in dataclasses.fields(cls):
            lines.append(f'  --{field.name}={field.default}\n        {comments[field.name]} [{describe(hints[field.name])}]')
        lines.append('')
    return '\n'.join(lines)

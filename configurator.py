"""
Options of every script, as in nanoGPT but typed: python SCRIPT.py config/FILE.py --key=value.

A dataclass declares a script's options: the name, type and default of each. The comment at the end
of its line is its --help text. Later config files override earlier ones, and flags override files.
Config files assign plain values; they are parsed, never executed.
"""
import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import numbers
import os
import re
import sys
import typing
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn

UNITS = {'K': 10**3, 'M': 10**6, 'B': 10**9}
WORDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text'}


class UserError(ValueError):
    """An error that the user can fix: it ends a script with one line. In a run of many processes
    only the first on each machine prints it. With `everywhere` all do: the first may have none."""
    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


def fail(message: str, everywhere: bool = False) -> NoReturn:
    raise UserError(message, everywhere)


def error_line(error: BaseException) -> str:
    """Describe in one line a UserError, OSError or KeyboardInterrupt that ends the program."""
    message = str(error)
    if isinstance(error, KeyboardInterrupt):
        message = 'stopped'
    elif isinstance(error, OSError):
        message = ': '.join(filter(None, [error.filename, error.strerror or message]))
    return f'{os.path.basename(sys.argv[0])}: {message}'.replace('\n', ' ')


def command_line(main: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """Decorate a script's main: an error of the user or the machine, or Ctrl-C, ends it with one
    line on stderr and exit code 1."""
    @functools.wraps(main)
    def run(argv: list[str]) -> Any:
        sys.stderr = sys.stderr or io.StringIO()  # None if it is closed
        try:
            return main(argv)
        except (UserError, OSError, KeyboardInterrupt) as error:
            raise SystemExit(error_line(error)) from None
    return run


# Mutually exclusive options: the one given later counts
EXCLUDES = {'text': 'data', 'data': 'text', 'tokens': 'tokens_per_param',
            'tokens_per_param': 'tokens'}
# Options whose values may begin with ~, the home folder
PATHS = ('out_dir', 'data', 'text', 'tokenizer', 'init_from', 'input', 'export')


def merge(options: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return `options` overridden by `later`, which also removes what its options exclude."""
    return {key: value for key, value in options.items() if EXCLUDES.get(key) not in later} | later


def read_options(argv: list[str], *classes: type) -> dict[str, Any]:
    """Read the config files, then the --key=value flags; later ones override earlier ones. Options
    are checked against the fields of `classes`; only those given are returned. UserError."""
    hints = {key: hint for cls in classes for key, hint in typing.get_type_hints(cls).items()}
    given: dict[str, Any] = {}
    if '--help' in argv or '-h' in argv:
        print_help(classes)
    for arg in sorted(argv, key=lambda arg: arg.startswith('--')):  # files first, in their order
        if not arg.startswith('--'):
            given = merge(given, read_config_file(arg, hints))
            continue
        key, equals, text = arg[2:].partition('=')
        if not equals and key in hints:
            check(hints[key] in (bool, bool | None),
                    f'--{key} needs a value: --{key}=VALUE, no space')
            text = 'True'
        given = merge(given, {key: parse_option(key, text, hints, '--')})
    return given


def check_values(values: dict[str, Any], where: str, *classes: type) -> dict[str, Any]:
    """Check saved values as those of a config file are checked. UserError."""
    hints = {key: hint for cls in classes for key, hint in typing.get_type_hints(cls).items()}
    return {key: parse_option(key, value, hints, f'{where}: ') for key, value in values.items()}


def convert_types(options: Any) -> None:
    """Convert every field of a dataclass to the type that it declares; a NumPy number, for example,
    to Python's own, which JSON can hold. UserError if that is not possible."""
    hints = typing.get_type_hints(type(options))
    for name in hints:
        setattr(options, name, parse_option(name, getattr(options, name), hints))


def resolve_defaults(options: Any, **defaults: Any) -> None:
    """Set the fields that are None to these defaults."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def check(ok: bool, otherwise: str) -> None:
    if not ok:
        fail(otherwise)


def only_with(options: Any, unless: str, **values: Any) -> None:
    """UserError unless these options have these values. `unless` is the setting, such as attn=cem,
    with which other values have an effect."""
    for name, value in values.items():
        given = getattr(options, name)
        check(given == value,
                f'{name}={given} has no effect: set {unless}, or else {name}={value}')


def in_range(options: Any, low: float, high: float, names: str) -> None:
    """UserError unless these options lie from `low` to `high`, or are None."""
    bounds = f'a positive number up to {high:,}' if 0 < low < 1e-9 else f'{low:,} to {high:,}'
    for name in names.split():
        value = getattr(options, name)
        check(value is None or low <= value <= high, f'{name}={value}: expected {bounds}')


def build(cls: type, given: dict[str, Any]) -> Any:
    """Make a `cls` from the given options; those that it does not declare are left out."""
    return cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})


def read_config_file(path: str, hints: dict[str, Any]) -> dict[str, Any]:
    """Read a config file, looked up in the current folder, then beside the scripts."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), path)
    found = path if os.path.exists(path) or not os.path.isfile(beside) else beside
    try:
        with open(found, encoding='utf-8-sig') as file:  # -sig: skip a BOM
            tree = ast.parse(file.read())
    except OSError as error:
        fail(f'config file {path}: {error.strerror}; options are written --key=value')
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: not text
        fail(f'config file {path}: not Python: {error}')
    given = {}
    for node in tree.body:
        if node is tree.body[0] and ast.get_docstring(tree) is not None:
            continue
        try:
            (target,) = node.targets
            key, value = target.id, ast.literal_eval(node.value)
            str(value)  # ValueError for a number of more than 4,300 digits
        except (AttributeError, ValueError, TypeError):
            fail(f'{path}:{node.lineno}: only lines of the form: name = plain value')
        given[key] = parse_option(key, value, hints, f'{path}:{node.lineno}: ')
    return given


def parse_option(key: str, value: Any, hints: dict[str, Any], where: str = '') -> Any:
    """Convert `value`, text from a flag or a value from Python, to the type of option `key`.
    `where` begins the message of a UserError."""
    if key not in hints:
        near = ', '.join(difflib.get_close_matches(key, hints, n=3))
        fail(f'{where}{key}: no such option{near and "; near: " + near} (--help lists all)')
    try:
        parsed = parse_value(value, hints[key])
    except (TypeError, ValueError, ArithmeticError):
        shown = f'={value}' if where in ('', '--') else f' = {value!r}'
        fail(f'{where}{key}{shown}: expected {describe(hints[key])}')
    if key in PATHS and parsed is not None:
        check(parsed != '', f'{where}{key}= is empty: expected a path')
        return os.path.expanduser(parsed)
    return parsed


def parse_value(value: Any, hint: Any) -> Any:
    """Convert `value` to type `hint`. 3.3B, 50M and 8K are numbers. ValueError, TypeError or
    ArithmeticError if that is not possible."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:  # X | None
        return None if value in (None, 'None') else parse_value(value, args[0])
    if kind is tuple:
        items = value.split(',') if isinstance(value, str) else value
        return tuple(parse_value(item, args[0]) for item in items)
    if kind is typing.Literal and value in args:
        return args[args.index(value)]  # a str, where NumPy's text is equal to it
    if hint is str and isinstance(value, str) and '\0' not in value:
        return str(value)
    if hint is bool and str(value).capitalize() in ('True', 'False'):
        return str(value).capitalize() == 'True'
    is_number = isinstance(value, (numbers.Real, str)) and not isinstance(value, bool)
    if hint in (int, float) and is_number:
        text, unit = str(value), UNITS.get(str(value)[-1:].upper())
        number = Decimal(text[:-1]) * unit if unit else Decimal(text)
        if abs(float(number)) < 1e300 and (hint is float or number == int(number)):
            return hint(number)
    raise ValueError


def describe(hint: Any) -> str:
    """Return a type in words: 'one of llama, cem', 'a whole number', ..."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:
        return f'{describe(args[0])}, or None'
    if kind is tuple:
        return f'a comma-separated list, each {describe(args[0])}'
    return 'one of ' + ', '.join(args) if kind is typing.Literal else WORDS[hint]


def print_help(classes: tuple[type, ...]) -> NoReturn:
    """Print the script's docstring and its options, and end the program."""
    lines = [inspect.getdoc(sys.modules['__main__']) or '']
    for cls in classes:
        comments = dict(re.findall(r'^    (\w+): .*?  # (.*)$', inspect.getsource(cls), re.M))
        hints = typing.get_type_hints(cls)
        lines.append(f'\n{cls.__name__}: {inspect.getdoc(cls)}')
        for field in dataclasses.fields(cls):
            words = f'{comments[field.name]} [{describe(hints[field.name])}]'
            lines.append(f'  --{field.name}={field.default}\n        {words}')
    with contextlib.suppress(OSError):  # --help | head
        os.write(1, '\n'.join([*lines, '']).encode())
    sys.exit(0)

"""
Options of every script, as in nanoGPT but typed: python SCRIPT.py config/FILE.py --key=value. And
the errors that a user can fix, each of which ends a script with one line.

A dataclass declares a script's options: the name, type and default of each. The comment at the end
of its line is its --help text. Later config files override earlier ones, and flags override files.
Config files assign plain values; they are parsed, never executed.

Class attributes of a dataclass, all optional, say which options depend on one another, and which
ones --help shows; --help=all shows all:

    EXCLUSIVE = (('text', 'data'),)    give only one; it replaces an earlier value of the other
    RESETS = (('size', 'width'),)      giving the first drops earlier values of the others
    FIRST = ('data', 'size')           the options that most people need
"""
import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

# The type of an option that is a path: it is not empty, and ~ at its beginning is the home folder
PathStr = Annotated[str, 'path']
UNITS = {'K': 3, 'M': 6, 'B': 9}  # powers of ten
# Names of options in nanoGPT and elsewhere, and what they are here
ELSEWHERE = {
    'block_size': 'context_length', 'n_embd': 'd_model', 'dataset': 'data or text',
    'lr': 'learning_rate',
    'max_iters': 'tokens, which are max_iters x batch_size x context_length',
    'lr_decay_iters': 'tokens: the rate falls until they are read',
    'warmup_iters': 'warmup, a fraction of the steps', 'min_lr': 'final_lr, a fraction',
    'gradient_accumulation_steps': 'batch_size (per step), micro_batch_size (per pass)',
    'eval_iters': 'eval_tokens', 'start': 'prompt', 'max_new_tokens': 'tokens',
    'dropout': 'not an option: the paper names none',
    'bias': 'not an option: no projection has one'}
WORDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text',
         PathStr: 'a name or path'}


# Errors

class UserError(ValueError):
    """An error that the user can fix: it ends a script with one line."""


def fail(message: str) -> NoReturn:
    raise UserError(message)


def check(ok: bool, message: str) -> None:
    if not ok:
        fail(message)


def warn(message: str) -> None:
    """Print a warning on stderr, so that stdout stays free of warnings."""
    print(f'Warning: {message}', file=sys.stderr, flush=True)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Re-raise ValueErrors from model.py, which does not know UserError, as UserErrors."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None


def command_line(main: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """Decorate a script's main: UserError, OSError (a missing file, a full disk), Ctrl-C, too
    little memory, or a package of requirements.txt that is not there ends it with one line on
    stderr and exit code 1."""
    @functools.wraps(main)
    def run(argv: list[str]) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that the locale lacks
            with contextlib.suppress(OSError):  # its terminal may have gone
                sys.stdout.reconfigure(errors='backslashreplace')
        try:
            return main(argv)
        except (UserError, OSError) as error:
            message = str(error).replace('\n', ' ')
        except KeyboardInterrupt:
            message = 'stopped'
        except ModuleNotFoundError as error:
            needed = Path(__file__).with_name('requirements.txt').read_text(encoding='utf-8')
            if f'\n{error.name}==' not in needed:
                raise
            message = f'this needs {error.name}: pip install {error.name}'
        except RuntimeError as error:
            # torch has OutOfMemoryError for a GPU, and these words for a CPU
            if type(error).__name__ != 'OutOfMemoryError' and 'allocate memory' not in str(error):
                raise
            message = 'out of memory: a smaller batch, micro-batch, context or model needs less'
        sys.exit(f'{os.path.basename(sys.argv[0])}: {message}')
    return run


# Options

def read_options(argv: list[str], *classes: type) -> dict[str, Any]:
    """Read config files in order, then --key=value flags. Later ones override earlier ones, but two
    flags for the same text, path or list are refused: both values may have been meant. Return the
    given options, which must be fields of `classes`. Raises UserError."""
    if {'--help', '-h', '--help=all'} & {*argv}:
        print_help(classes, everything='--help=all' in argv)
    hints = type_hints(*classes)
    given: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    for arg in argv:
        if not arg.startswith('--'):
            given = merge(given, read_config_file(arg, hints), *classes)
            continue
        key, equals, text = arg[2:].partition('=')
        if not equals:  # --key alone is --key=True
            hint = hints.get(key, bool)
            check(bool in (hint, *typing.get_args(hint)), f'--{key} needs a value: '
                  f'--{key}=VALUE, no space')
            text = 'True'
        check(key not in flags or not is_text_or_list(hints[key]), f'--{key} is given twice: '
              f'expected one (a shell makes two of --{key}={{a,b}})')
        flags[key] = parse_option(key, text, hints, '--')
    return merge(given, flags, *classes)


def is_text_or_list(hint: Any) -> bool:
    """Return whether an option of this type is a text, a path or a list."""
    kinds = (hint, *typing.get_args(hint))
    return any(kind in (str, PathStr) or typing.get_origin(kind) is tuple for kind in kinds)


def type_hints(*classes: type) -> dict[str, Any]:
    """Return the type of each option of these dataclasses."""
    hints = {}
    for cls in classes:
        hints |= typing.get_type_hints(cls, include_extras=True)  # extras: what makes a PathStr
    return hints


def merge(options: dict[str, Any], later: dict[str, Any], *classes: type) -> dict[str, Any]:
    """Return `options` overridden by `later`, without those that a later option replaces according
    to EXCLUSIVE and RESETS of the classes. UserError if `later` has both of an exclusive pair."""
    given = {name for name, value in later.items() if value is not None}
    replaced: set[str] = set()
    for cls in classes:
        for a, b in getattr(cls, 'EXCLUSIVE', ()):
            check(not {a, b} <= given, f'{a} and {b} exclude each other: give one')
            if {a, b} & given:
                replaced |= {a, b}
        for name, *others in getattr(cls, 'RESETS', ()):
            if name in given:
                replaced |= {*others}
    return {name: value for name, value in options.items() if name not in replaced} | later


def read_config_file(path: str, hints: dict[str, Any]) -> dict[str, Any]:
    """Read a config file from the current folder, or from beside the scripts. Raises UserError."""
    beside_scripts = os.path.join(os.path.dirname(os.path.abspath(__file__)), path)
    found = path if os.path.exists(path) else beside_scripts
    paths = [f'--{key}' for key, hint in hints.items()
             if PathStr in (hint, *typing.get_args(hint))]
    others = f'Options for other files and folders: {", ".join(paths) or "none"}'
    check(not os.path.isdir(path), f'{path} is a folder, not a config file. {others}')
    check(os.path.isfile(found), f'no config file {path}; options are written --key=value')
    with open(found, encoding='utf-8-sig') as file:  # -sig: Notepad writes a byte-order mark
        try:
            tree = ast.parse(file.read(), path)
        except (SyntaxError, ValueError) as error:  # ValueError: it is not UTF-8
            fail(f'{path} is not a config file: expected lines of the form: name = plain value '
                 f'({error}). {others}')
    given = {}
    statements = tree.body if ast.get_docstring(tree) is None else tree.body[1:]
    for node in statements:
        where = f'{path}:{node.lineno}: '
        try:
            (target,) = node.targets
            key, value = target.id, ast.literal_eval(node.value)
        except (AttributeError, ValueError):
            fail(f'{where}only lines of the form: name = plain value')
        given[key] = parse_option(key, value, hints, where)
    return given


def parse_option(key: str, value: Any, hints: dict[str, Any], where: str = '') -> Any:
    """Convert `value`, text from a flag or a value from Python, to the type of option `key`.
    `where` begins the message of a UserError."""
    if key not in hints:
        near = ', '.join(difflib.get_close_matches(key, hints, n=3))
        suggestion = f'; near: {near}' if near else ''
        if key in ELSEWHERE:
            suggestion = f'; here it is {ELSEWHERE[key]}'
        fail(f'{where}{key}: no such option{suggestion} (--help=all lists all)')
    try:
        return parse_value(value, hints[key])
    except (TypeError, ValueError, ArithmeticError):
        fail(f'{where}{key}={value}: expected {describe(hints[key])}')


def parse_value(value: Any, hint: Any) -> Any:
    """Convert `value` to type `hint`. 3.3B, 50M and 8K are numbers. ValueError, TypeError or
    OverflowError if that is not possible."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:  # X | None
        return None if value in (None, 'None') else parse_value(value, args[0])
    if kind is tuple:
        items = value.split(',') if isinstance(value, str) else value
        return tuple(parse_value(item, args[0]) for item in items)
    text = str(value)
    if hint == PathStr and value and isinstance(value, str):
        return os.path.expanduser(value)
    if isinstance(value, str) and (hint is str or value in args):
        return text
    if hint is bool and text.capitalize() in ('True', 'False'):
        return text.capitalize() == 'True'
    if hint in (int, float):
        number = parse_number(text)
        if math.isfinite(number) and (hint is float or number % 1 == 0):
            return hint(number)
    raise ValueError


def parse_number(text: str) -> int | float:
    """Read a number, which may end in K, M or B. It is an int if its digits are a whole number.
    ValueError if it is not a number."""
    power = UNITS.get(text[-1:].upper(), 0)
    digits = text[:-1] if power else text
    try:
        return int(digits) * 10 ** power
    except ValueError:
        # 2.3M is 2.3e6: the product 2.3 * 10**6 would be 2299999.9999999995
        return float(f'{digits}e{power}' if power else digits)


def describe(hint: Any) -> str:
    """Return a type in words: 'one of llama, cem', 'a whole number', ..."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:
        return f'{describe(args[0])}, or None'
    if kind is tuple:
        return f'a comma-separated list, each {describe(args[0])}'
    return 'one of ' + ', '.join(args) if kind is typing.Literal else WORDS[hint]


def print_help(classes: tuple[type, ...], everything: bool) -> NoReturn:
    """Print the script's docstring and its options, all or those that most people need, and end the
    program."""
    lines = [inspect.getdoc(sys.modules['__main__']) or '']
    left_out = 0
    for cls in classes:
        # The comment at the end of an option's line is its help
        sources = ''.join(inspect.getsource(part) for part in cls.__mro__[:-1])
        comments = dict(re.findall(r'^    (\w+): .*?  # (.*)$', sources, re.M))
        hints = type_hints(cls)
        # A class's own options stand before those of the class that it extends
        fields = sorted(dataclasses.fields(cls), key=lambda field: field.name not in vars(cls))
        first = getattr(cls, 'FIRST', ())
        shown = [field for field in fields if everything or not first or field.name in first]
        left_out += len(fields) - len(shown)
        lines.append(f'\n{cls.__name__}: {inspect.getdoc(cls)}')
        for field in shown:
            words = f'{comments[field.name]} [{describe(hints[field.name])}]'
            lines.append(f'  --{field.name}={field.default}\n        {words}')
    if left_out:
        lines.append(f'\n{left_out} more options: --help=all')
    print('\n'.join(lines))
    sys.exit(0)


def set_if_none(options: Any, **values: Any) -> None:
    """Set the fields that are None to these values, in place."""
    for name, value in values.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def in_range(options: Any, low: float, high: float, names: str) -> None:
    """UserError unless these options lie from `low` to `high`, or are None."""
    for name in names.split():
        value = getattr(options, name)
        check(value is None or low <= value <= high,
              f'{name}={value}: expected {low:,} to {high:,}')


def build(cls: type, given: dict[str, Any]) -> Any:
    """Make an instance of `cls` from those of the given options that are its fields. UserError if
    it refuses one."""
    names = {field.name for field in dataclasses.fields(cls)}
    with user_errors():
        return cls(**{name: value for name, value in given.items() if name in names})

"""Imports go one way: scripts -> nanocem/ -> model.py -> torch."""
import ast
from pathlib import Path

from running import ROOT

SCRIPTS = {'train', 'sample', 'evaluate', 'bench', 'reproduce', 'prepare_slimpajama',
           'synthetic_gp'}


def imports(path: Path) -> dict[str, set[str]]:
    """Return the modules that a file imports, and which names it takes from each."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom):
            found.setdefault(node.module or '', set()).update(a.name for a in node.names)
    return found


def test_no_script_imports_another() -> None:
    """But for the options of a run and their lists, in reproduce."""
    for path in (*ROOT.glob('*.py'), *ROOT.glob('nanocem/*.py')):
        if path.name.startswith(('test_', 'conftest')):
            continue
        found = imports(path)
        if path.name == 'reproduce.py':
            assert found.pop('train') <= {'TrainConfig', 'RECIPE', 'MAX_SKIPPED'}
        assert not SCRIPTS & found.keys(), path

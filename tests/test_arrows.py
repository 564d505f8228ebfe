"""Imports go one way: scripts -> nanocem/ -> model.py and configurator.py -> torch."""
import ast
import re
import sys
from pathlib import Path

import nanocem
from nanocem.hub import CODE
from running import ROOT

SCRIPTS = {'train', 'sample', 'evaluate', 'export', 'bench', 'reproduce', 'prepare_slimpajama',
           'synthetic_gp', 'results', 'verdicts', 'tables', 'pages'}


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
    """But study.py, the study's own module, for the options of a run and when it gives up, the
    tables of a later study for the statistics of verdicts.py, and pages.py for all tables."""
    for path in (*ROOT.glob('*.py'), *ROOT.glob('nanocem/*.py'), *ROOT.glob('results/*.py'),
                 *ROOT.glob('results/tokens/*.py'), *ROOT.glob('results/copies/*.py'),
                 ROOT / 'results/gradient/tables.py', ROOT / 'results/ties/tables.py'):
        if path.name.startswith(('test_', 'conftest')):
            continue
        found = imports(path)
        if path.name == 'study.py':
            assert found.pop('train') <= {'TrainConfig', 'MAX_SKIPPED'}
        if path.name == 'tables.py':
            found.pop('verdicts')
        if path.name == 'pages.py':
            found = {name: names for name, names in found.items() if not name.startswith('results')}
        assert not SCRIPTS & {name.partition('.')[0] for name in found}, path


def test_model_and_energy_import_torch_and_the_standard_library_alone() -> None:
    for name in ('model.py', 'energy.py'):
        packages = {module.partition('.')[0] for module in imports(ROOT / name)}
        assert packages - sys.stdlib_module_names == {'torch'}, name
    assert imports(ROOT / 'configurator.py').keys() <= sys.stdlib_module_names | {'collections.abc'}
    # What an export has imports nothing of ours but one another
    names = {Path(file).stem for file in CODE}
    for file in CODE:
        packages = {module.partition('.')[0] for module in imports(ROOT / file)}
        allowed = {'torch', 'transformers', *names - {'modeling_nanocem'}}
        assert packages - sys.stdlib_module_names <= allowed, file


def test_the_map_names_each_file_of_the_folder_once() -> None:
    files = [path.name for path in ROOT.glob('nanocem/*.py') if path.name != '__init__.py']
    assert sorted(re.findall(r'^ +(\w+\.py) ', nanocem.__doc__, re.M)) == sorted(files)

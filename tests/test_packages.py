"""torch and NumPy are enough to begin: any other package is imported where it is used."""
import subprocess
import sys
from pathlib import Path

import pytest

from running import ROOT, TINY, override

# What pip install torch numpy brings
BROUGHT = {'torch', 'torchgen', 'functorch', 'numpy', 'filelock', 'typing_extensions', 'setuptools',
           '_distutils_hack', 'pkg_resources', 'sympy', 'mpmath', 'networkx', 'jinja2',
           'markupsafe', 'fsspec'}
SCRIPT = f'''
import importlib
import sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec


def find_brought(name, path=None, target=None):
    """Find no package of site-packages but those that torch and NumPy bring."""
    spec = find_spec(name, path, target)
    if spec is None or name.partition('.')[0] in {BROUGHT}:
        return spec
    is_package = 'site-packages' in f'{{spec.origin}} {{spec.submodule_search_locations}}'
    return None if is_package else spec


PathFinder.find_spec = find_brought
sys.path.insert(0, {str(ROOT)!r})
for line in sys.stdin.read().splitlines():
    script, *argv = line.split('|')
    sys.argv = [script + '.py']
    importlib.import_module(script).main(argv)
'''


def run(cwd: Path, *lines: str) -> subprocess.CompletedProcess:
    """Call the main function of each line's script with the line's options, in one process."""
    return subprocess.run([sys.executable, '-c', SCRIPT], input='\n'.join(lines), cwd=cwd,
                          capture_output=True, text=True)


def test_training_sampling_and_evaluating_need_no_other(tmp_path: Path) -> None:
    """On the built-in text, with all options as they are on the front page, but a tiny model."""
    tiny = override(TINY, '--tensorboard=True', '--sample_tokens=5', '--tokens=400')
    done = run(tmp_path, '|'.join(['train', 'config/mini.py', *tiny, '--out_dir=out/a']),
               'train|--init_from=resume', 'sample|--tokens=5', 'evaluate|--tokens=99',
               'evaluate|--energies|--steps=2', 'evaluate|--compare=out/a,out/a',
               'synthetic_gp|--kernels=rbf|--models=Plain|--steps=1|--points=128|--test_points=9')
    assert done.returncode == 0, done.stderr
    assert done.stderr == 'out/a, the newest run in out/:\n'
    for words in ('Finished in', 'out/a is finished', 'bits per byte', 'cosine', 'Runs\n',
                  'No picture: pip install matplotlib', '; no picture: pip install matplotlib'):
        assert words in done.stdout, done.stdout
    assert not [*(tmp_path / 'out/a').glob('events*')]


@pytest.mark.parametrize(('line', 'package'), [
    (f'sample|--out_dir={ROOT}/pretrained/cem', 'safetensors'),
    ('train|--text=a.parquet', 'pyarrow')])
def test_a_package_that_something_else_needs_is_named(line: str, package: str,
                                                      tmp_path: Path) -> None:
    (tmp_path / 'a.parquet').write_bytes(b'PAR1' * 99)
    done = run(tmp_path, line)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f'{line.partition("|")[0]}.py: this needs {package}: pip install {package}'
    assert 'Traceback' not in done.stderr

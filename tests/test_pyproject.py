"""pyproject.toml: the ranges beside the tested versions, and the address of the repository."""
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch._functorch.config as compiler
from packaging.requirements import Requirement

from nanocem import page
from nanocem.hardware import set_switch
from running import ROOT

sys.path.insert(0, str(ROOT / 'docs'))
import address

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']


def pins(file: str) -> dict[str, str]:
    """Return the version of each package that a requirements file pins."""
    lines = (ROOT / file).read_text(encoding='utf-8')
    return dict(re.findall(r'^([\w-]+)==([^\s;]+)', lines, re.MULTILINE))


def ranges(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines]
    return {requirement.name: requirement for requirement in found if requirement.name != 'nanocem'}


def test_the_lock_is_in_the_ranges() -> None:
    """Both name the same packages, and each tested version is in its range."""
    groups = PROJECT['optional-dependencies']
    for file, lines in (('requirements.txt', PROJECT['dependencies'] + groups['everything']),
                        ('requirements-dev.txt', groups['dev'])):
        found, locked = ranges(lines), pins(file)
        assert sorted(found) == sorted(locked), file
        for name, version in locked.items():
            assert version in found[name].specifier, f'{name}=={version}'


def test_it_installs_what_the_scripts_need_and_no_module(tmp_path: Path) -> None:
    """As pip would ask setuptools to build it: the metadata, without a network."""
    code = ('from setuptools import build_meta; '
            f'print(build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r}))')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / done.stdout.splitlines()[-1]
    metadata = (folder / 'METADATA').read_text(encoding='utf-8')
    assert 'Requires-Dist: torch>=2.11' in metadata and 'Requires-Python: >=3.11' in metadata
    modules = folder / 'top_level.txt'
    assert not modules.exists() or not modules.read_text().strip()


def test_a_switch_that_torch_lacks_is_left_alone() -> None:
    with compiler.patch(ban_recompute_used_far_apart=True):
        set_switch(compiler, 'ban_recompute_used_far_apart', False)
        assert not compiler.ban_recompute_used_far_apart
    set_switch(compiler, 'no_such_switch', True)
    assert not hasattr(compiler, 'no_such_switch')


def test_all_files_have_the_one_address() -> None:
    """python docs/address.py would change nothing, and no other file names the repository."""
    names = {str(path.relative_to(ROOT)) for path in address.files()}
    assert names >= {'README.md', 'CITATION.cff', 'tour.ipynb', 'docs/index.html'}
    for path in address.files():
        text = path.read_text(encoding='utf-8')
        assert address.set_address(text, path.suffix, page.REPOSITORY) == text, path
    found = subprocess.run(['git', 'grep', '-lIiE', r'github\.com/[^/ ]+/nanocem\b'], cwd=ROOT,
                           capture_output=True, text=True).stdout.split()
    assert set(found) <= names | {'pyproject.toml'}


@pytest.mark.parametrize(('suffix', 'unset', 'set_'), [
    ('.md', '    git clone ADDRESS nanoCEM\n', '    git clone https://github.com/me/it nanoCEM\n'),
    ('.cff', 'license: MIT\n', "repository-code: 'https://github.com/me/it'\nlicense: MIT\n"),
    ('.ipynb', '"ADDRESS = \'\'  # "', '"ADDRESS = \'https://github.com/me/it\'  # "'),
    ('.html', '<a data-code="a.py" href="../a.py">',
     '<a data-code="a.py" href="https://github.com/me/it/blob/main/a.py">')])
def test_an_address_is_written_changed_and_removed(suffix: str, unset: str, set_: str) -> None:
    ours = 'https://github.com/me/it'
    assert address.set_address(unset, suffix, ours) == set_
    assert address.set_address(set_, suffix, ours) == set_
    assert address.set_address(set_.replace('/me/', '/you/'), suffix, ours) == set_
    assert address.set_address(set_, suffix, '') == unset

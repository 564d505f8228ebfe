"""README, docs and results: pages whose code runs and whose links lead somewhere."""
import argparse
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evaluate
import export
import running
import train
from model import ModelConfig, Transformer
from nanocem.optim import make_optimizers
from nanocem.runs import load_model
from running import ROOT

PAGES = ['README.md', *(f'docs/{path.name}' for path in sorted((ROOT / 'docs').glob('*.md')))]
RESULTS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / 'results').rglob('*.md'))]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding='utf-8').replace('\\\n', ' ')


def test_the_front_pages_code_is_the_files() -> None:
    """Lines between two `...` follow each other in the file, and all of them are in its order."""
    block = re.findall(r'```python\n(.*?)```', read('README.md'), re.DOTALL)[0]
    code, at = read('energy.py'), 0
    for part in re.split(r'^ *\.\.\.\n', block, flags=re.MULTILINE):
        at = code.find(part, at)
        assert part.count('\n') > 0 and at >= 0, part
        at += len(part)


def test_the_lines_of_take_model_py_train_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they stand, and the loss falls from about log 256."""
    code = re.findall(r'```python\n(.*?)```', read('docs/options.md'), re.DOTALL)[-1]
    monkeypatch.chdir(ROOT)
    torch.manual_seed(1)
    names: dict = {}
    exec(code, names)
    ids = names['ids']
    assert names['model'](ids[:, :-1], ids[:, 1:])[1] < math.log(256) - 2


def test_take_model_py_reads_a_pretrained_model_and_decays_its_matrices_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of docs/options.md, for every model of pretrained/."""
    code = re.search(r'```python\n(.*?)```', read('docs/options.md').partition('## Take')[2],
                     re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'pretrained').symlink_to(ROOT / 'pretrained')
    idx = torch.arange(40)[None] * 7919 % 2048
    for folder in (path.name for path in (ROOT / 'pretrained').iterdir() if path.is_dir()):
        names: dict = {}
        exec(code.replace('pretrained/cem/', f'pretrained/{folder}/'), names)
        ours, _ = load_model(str(ROOT / 'pretrained' / folder))
        with torch.no_grad():
            assert torch.equal(names['model'](idx)[0], ours(idx)[0])
        recipe = argparse.Namespace(optimizer='adamw', weight_decay=0.1, beta1=0.9, beta2=0.95,
                                    adam_eps=1e-8)
        groups = make_optimizers(names['model'], recipe, torch.float32)[0].param_groups
        for theirs, expected in zip(names['groups'], groups, strict=True):
            assert theirs['weight_decay'] == expected['weight_decay']
            assert set(theirs['params']) == set(expected['params'])
        saved = torch.load('model.pt', weights_only=True)
        Transformer(ModelConfig(**saved['options'])).load_state_dict(saved['weights'])


def test_the_layer_in_ones_own_code_runs() -> None:
    code = re.search(r'```python\n(.*?)```', read('docs/options.md'), re.DOTALL)[1]
    names: dict = {}
    exec(code, names)
    assert names['block'](torch.randn(2, 10, 64)).shape == (2, 10, 64)


def new_energy(place: Path, *argv: str) -> subprocess.CompletedProcess:
    return running.run_script(ROOT / 'docs/new_energy.py', *argv, cwd=place)


@pytest.mark.slow
def test_an_energy_of_ones_own_trains_and_descends(tmp_path: Path) -> None:
    data = running.write_data(tmp_path / 'data')
    for script in (['train', *running.TINY, '--mlp=relu', running.steps(2), f'--data={data}',
                    '--out_dir=o', '--stop_step=1'],
                   ['evaluate', '--out_dir=o', '--energies', '--steps=2']):
        done = new_energy(tmp_path, *script)
        assert done.returncode in (0, 75) and 'Warning: o:' not in done.stderr, done.stderr
    assert re.search(r'mlp 1 .*\| 1.00 ', done.stdout), done.stdout  # the cosine
    done = new_energy(tmp_path, 'export', '--out_dir=o', '--to=x')
    assert done.returncode == 1 and 'holds the classes of model.py' in done.stderr, done.stderr
    assert 'Traceback' not in done.stderr
    # Scripts without this energy say so
    o = str(tmp_path / 'o')
    for main, options in (
            (evaluate.main, [f'--out_dir={o}']), (export.main, [f'--out_dir={o}', '--to=x']),
            (train.main, [f'--out_dir={o}', '--init_from=resume', '--device=cpu'])):
        with pytest.raises(SystemExit, match='mlp=relu: expected one of llama, cem'):
            main(options)


def test_an_energy_of_ones_own_needs_no_gradient_of_its_own() -> None:
    """In inference mode, and with frozen weights, it computes what it does in training."""
    sys.path.insert(0, str(ROOT / 'docs'))
    import new_energy
    layer, x = new_energy.ReluMLP(ModelConfig(size='nano', mlp_steps=2)), torch.randn(2, 5, 32)
    right = layer(x.requires_grad_()).detach()
    x = x.detach()
    with torch.inference_mode():
        assert torch.equal(layer(x), right)
    layer.requires_grad_(False)
    assert torch.equal(layer(x), right)


@pytest.mark.parametrize('argv', [[], ['model'], ['--help']])
def test_what_runs_with_an_energy_of_ones_own_is_said(argv: list[str], tmp_path: Path) -> None:
    done = new_energy(tmp_path, *argv)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert 'expected train, evaluate' in done.stderr and done.stderr.count('\n') == 1


@pytest.mark.parametrize('page', PAGES + RESULTS)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r'\]\(([^)]+)\)|^\[\w+\]: (\S+)$', read(page), re.MULTILINE)
    paths = [link.partition('#')[0] for link in map(''.join, links) if not link.startswith('http')]
    assert [path for path in paths if not (ROOT / page).parent.joinpath(path).exists()] == []


@pytest.mark.parametrize('script', ['evaluate', 'synthetic_gp', 'bench', 'docs/new_energy',
                                    'results/reproduce'])
def test_scripts_that_write_files_need_no_backend(script: str, tmp_path: Path) -> None:
    """A notebook's environment names one that a fresh environment lacks."""
    argv = ['evaluate', '--help'] if script == 'docs/new_energy' else ['--help']
    done = running.run_script(ROOT / f'{script}.py', *argv, cwd=tmp_path, MPLBACKEND='nonsense')
    assert done.returncode == 0 and '--' in done.stdout, done.stderr

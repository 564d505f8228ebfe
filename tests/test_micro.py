"""microcem.py is energy.py without torch: the same layers, training, and gradients."""
import ast
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import energy
import microcem
from microcem import Value, Weights
from running import ROOT

FILE = ROOT / 'microcem.py'
N = 9  # letters
D, K, WIDTH = 8, 4, 12  # smaller than microcem.py's


def tensor(x: Value) -> Tensor:
    return torch.tensor(x.rows, dtype=torch.float64)


def same(x: Value | float, y: Tensor) -> None:
    x = tensor(x) if isinstance(x, Value) else torch.tensor(x, dtype=torch.float64)
    torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-9 * max(1.0, y.abs().max().item()))


def make_both(T: int = 1) -> tuple[Weights, energy.Transformer, dict]:
    """Return random weights, energy.py's model with the same, and its parameter of each name."""
    w = microcem.new_weights(N)
    for x in w.values():  # the gains, too, are random
        x.rows = [[a + random.gauss(0, 0.3) for a in row] for row in x.rows]
    model = energy.Transformer(D, K, WIDTH, n_layer=1, T=T).double()
    attn, mlp = model.layers
    parameters = {'embedding': model.embedding, 'head': model.head, 'gain': model.norm.weight,
                  ('gain', 0): attn.norm.weight, ('gain', 1): mlp.norm.weight,
                  'W_Q': attn.W_Q, 'W_K': attn.W_K, ('W', 1): mlp.W, ('V', 1): mlp.V}
    for name, parameter in parameters.items():
        parameter.data = joined(w, name)
    return w, model, parameters


def joined(w: Weights, name: str | tuple) -> Tensor:
    """Return a weight as energy.py has it: all heads in one, and a gain as a vector."""
    if name in ('W_Q', 'W_K'):
        return torch.cat([tensor(w[name, 0, k]) for k in range(1, K + 1)])
    return tensor(w[name]).squeeze(0)


def random_word() -> list[int]:
    return [random.randrange(N) for _ in range(random.randint(3, 9))]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(D=D, K=K, WIDTH=WIDTH).items():
        monkeypatch.setattr(microcem, name, value)
    random.seed(4)


@pytest.mark.parametrize('T', [1, 2, 3])
def test_layers_and_energies_are_energy_pys(T: int) -> None:
    w, model, _ = make_both(T)
    x = Value([[random.gauss(0, 1) for _ in range(D)] for _ in range(7)])
    u, h = microcem.randn(7, D), microcem.randn(7, D)
    for n, layer in enumerate(model.layers):
        same(microcem.descend(x, w, n, T, 1 / T), layer(tensor(x)[None])[0])
        same(microcem.LAYERS[n](u, h, w, n), layer.energy(tensor(u)[None], tensor(h)[None]).mT)


def test_logits_and_loss_are_energy_pys() -> None:
    w, model, _ = make_both()
    ids = random_word()
    logits = model(torch.tensor([ids[:-1]]))[0]
    same(microcem.logits(ids[:-1], w), logits)
    loss = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction='sum')
    same(microcem.word_loss(ids, w), loss.view(1, 1))


def test_training_is_energy_pys() -> None:
    """Six steps of Adam, the rate falling to zero: the losses, and all weights after them."""
    w, model, parameters = make_both()
    words = [random_word() for _ in range(5)]
    random.seed(5)
    losses = microcem.train(words, w, steps=6, batch_size=3, learning_rate=0.05)
    random.seed(5)
    optimizer = torch.optim.Adam(parameters.values(), lr=0.05, betas=(0.9, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
    for loss in losses:
        batch = random.choices(words, k=3)
        logits = torch.cat([model(torch.tensor([ids[:-1]]))[0] for ids in batch])
        expected = F.cross_entropy(logits, torch.tensor([i for ids in batch for i in ids[1:]]))
        same(loss, expected)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        schedule.step()
    assert losses[-1] < losses[0]
    for name, parameter in parameters.items():
        torch.testing.assert_close(joined(w, name), parameter.data, rtol=0, atol=1e-9)


def random_graph(leaves: list, exp: Callable, log: Callable, phi: Callable, total: Callable) -> Any:
    """Return a number made of square matrices by random operations. They are the same for Values
    and tensors if `random` has the same state."""
    made = list(leaves)
    for _ in range(12):
        x, y = 0.5 * random.choice(made), 0.5 * random.choice(made)
        positive = 1 + x * x
        made.append(random.choice([x + y, x - y, x * y, x @ y, x.T @ y, y.T, x + 0.1, exp(-1 * x),
                                   log(positive), positive ** -0.5, phi(3 * x)]))
    return sum(total(x * x) for x in made)


@pytest.mark.parametrize('seed', range(20))
def test_gradients_of_gradients_are_torchs(seed: int) -> None:
    """First to third derivatives of random graphs."""
    leaves = [microcem.randn(3, 3, std=1.0) for _ in range(3)]
    theirs = [tensor(x).requires_grad_() for x in leaves]
    random.seed(seed)
    y = random_graph(leaves, Value.exp, Value.log, microcem.phi, microcem.total)
    random.seed(seed)
    z = random_graph(theirs, Tensor.exp, Tensor.log, energy.Phi.apply,
                     lambda x: x.sum().view(1, 1))
    for _ in range(3):
        same(y, z)
        found = microcem.gradients(y, leaves)
        expected = torch.autograd.grad(z, theirs, create_graph=True)
        for x, t in zip(found, expected, strict=True):
            same(x, t)
        y = sum(microcem.total(x * x) for x in found)
        z = sum((t * t).sum() for t in expected).view(1, 1)


def test_phi_is_energy_pys() -> None:
    z = torch.linspace(-30, 30, 301, dtype=torch.float64).view(1, -1)
    same(microcem.phi(Value(z.tolist())), energy.Phi.apply(z))


def test_shapes_must_match() -> None:
    """zip and map would leave out what is too much."""
    x, y = microcem.full(2, 3, 1.0), microcem.full(2, 2, 1.0)
    for operation in (Value.__add__, Value.__mul__, Value.__matmul__):
        with pytest.raises(AssertionError, match=r'\(2, 3\) and \(2, 2\)'):
            operation(x, y)


# As a program

NO_PACKAGE = '''
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] not in sys.stdlib_module_names:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
names = {'__name__': 'microcem'}
exec(compile(open(sys.argv[1], encoding='utf-8').read(), sys.argv[1], 'exec'), names)
names.update(D=8, K=2, WIDTH=8)  # faster
names['main'](sys.argv[2], steps=20)
'''


@pytest.mark.parametrize('minor', [11, 12, 13, 14])
def test_it_needs_no_package(minor: int, tmp_path: Path) -> None:
    """It learns the only word of a file by heart, and its energies fall with each step."""
    python = sys.executable
    if minor != sys.version_info.minor:
        python = shutil.which(f'python3.{minor}')
        if not python or subprocess.run([python, '--version'], capture_output=True).returncode:
            pytest.skip(f'there is no Python 3.{minor} here')
    path = tmp_path / 'words.txt'
    path.write_bytes('\ufeff Łódź 1 \r\n\r\n'.encode())
    done = subprocess.run([python, '-I', '-S', '-c', NO_PACKAGE, FILE, path], capture_output=True,
                          encoding='utf-8')
    assert not done.stderr
    assert 'in the list: Łódź 1, Łódź 1' in done.stdout
    energies = re.findall(r'energy of .*: \[(.*)\]', done.stdout)
    assert len(energies) == 2
    for line in energies:
        values = [float(value) for value in line.split(', ')]
        assert len(values) == 5
        assert values == sorted(set(values), reverse=True)


def test_the_syntax_is_python_3_11s() -> None:
    ast.parse(FILE.read_text(encoding='utf-8'), feature_version=(3, 11))


def run(*args: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, FILE, *args], capture_output=True, text=True)


@pytest.mark.parametrize('content', [
    b'', b' \n\n', b'\xff\xfe\x00', b'word\n' + b'a b ' * 8 + b'\nword'])
def test_a_bad_file_gets_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / 'a'
    path.write_bytes(content)
    for missing, words in (tmp_path / 'none', 'No such file'), (tmp_path, 'Is a directory'):
        with pytest.raises(SystemExit, match=f'^microcem.py: {missing}: {words}'):
            microcem.read_words(str(missing))
    with pytest.raises(SystemExit, match=r'^microcem.py: .*a: expected a text file of words'):
        microcem.read_words(str(path))


def test_command_line() -> None:
    """The first argument is a file, --help prints the docstring."""
    done = run('no.txt')
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr == 'microcem.py: no.txt: No such file or directory\n'
    assert run('--help').stdout == f'{microcem.__doc__}\n'

"""microcem.py is energy.py without torch: the same layers, training, and gradients."""
import ast
import doctest
import math
import random
import re
import shutil
import signal
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
SOURCE = FILE.read_text(encoding='utf-8')
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


@pytest.mark.parametrize('n, by_hand', [(0, microcem.attention), (1, microcem.mlp)])
def test_layers_by_hand_are_minus_the_gradients(n: int, by_hand: Callable) -> None:
    """Also where u is no longer h, and against energy.py's energy."""
    w, model, _ = make_both()
    u, h = microcem.randn(7, D, 1.0), microcem.randn(7, D, 1.0)
    gradient, = microcem.gradients(microcem.total(microcem.LAYERS[n](u, h, w, n)), [u])
    same(by_hand(u, h, w, n), -tensor(gradient))
    state = tensor(u)[None].requires_grad_()
    expected, = torch.autograd.grad(model.layers[n].energy(state, tensor(h)[None]).sum(), state)
    same(by_hand(u, h, w, n), -expected[0])


def test_attention_has_512_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file says of its sizes. microgpt has four matrices of 16 x 16."""
    numbers = re.search(r'^D, K, WIDTH = (\d+), (\d+), (\d+) ', SOURCE, re.M).groups()
    for name, number in zip(('D', 'K', 'WIDTH'), numbers, strict=True):
        monkeypatch.setattr(microcem, name, int(number))
    w = microcem.new_weights(N)
    sizes = [math.prod(w[name].shape) for name in w if name[0] in ('W_Q', 'W_K')]
    assert sum(sizes) == 512 and 4 * microcem.D ** 2 == 1024
    assert '512' in microcem.__doc__ and '1,024' in microcem.__doc__


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
    losses = list(microcem.train(words, w, steps=6, batch_size=3, learning_rate=0.05))
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
    z = random_graph(theirs, Tensor.exp, Tensor.log, energy.phi,
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
    same(microcem.phi(Value(z.tolist())), energy.phi(z))


def test_what_can_be_typed_gives_what_it_says() -> None:
    found = doctest.testmod(microcem)
    assert found.failed == 0 and found.attempted == 3


def test_what_can_be_tried_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last comment's energy has the gradient that it names, and it is learned, as are twice as
    many layers."""
    comment = SOURCE[SOURCE.index('# Try'):]
    code = '\n'.join(line[6:] for line in comment.splitlines() if line.startswith('#     '))
    names = dict(vars(microcem))
    exec(code, names)
    squares = names['squares']
    for layers in [microcem.interaction, squares], microcem.LAYERS * 2:
        monkeypatch.setattr(microcem, 'LAYERS', layers)
        w = microcem.new_weights(N)
        words = [random_word() for _ in range(3)]
        losses = list(microcem.train(words, w, steps=25))
        assert sum(losses[-5:]) < sum(losses[:5]) - 2.5
        if squares in layers:
            u, h = microcem.randn(5, D), microcem.randn(5, D)
            gradient, = microcem.gradients(microcem.total(squares(u, h, w, 1)), [u])
            by_hand = (h @ w['W', 1].T * (u @ w['V', 1].T)) @ w['V', 1]
            same(by_hand, -tensor(gradient))


def test_an_invented_word_has_a_letter() -> None:
    """Also when the model would rather end it."""
    w = microcem.new_weights(2)
    w['head'] = Value([[100 * a for a in row] for row in w['head'].rows])
    letters = ['\n', 'a']
    for _ in range(20):
        w['embedding'] = microcem.randn(2, D, 1.0)
        word = microcem.sample(letters, w)
        assert word and set(word) == {'a'} and len(word) <= 30


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


def find_python(minor: int) -> str:
    """Return a Python 3.`minor`, or skip the test."""
    if minor == sys.version_info.minor:
        return sys.executable
    python = shutil.which(f'python3.{minor}')
    if not python or subprocess.run([python, '--version'], capture_output=True).returncode:
        pytest.skip(f'there is no Python 3.{minor} here')
    return python


@pytest.mark.parametrize('minor', [10, 11, 12, 13, 14])
def test_it_needs_no_package(minor: int, tmp_path: Path) -> None:
    """It learns the only word of a file by heart, its energies fall with each step, and the layers
    by hand are its gradients."""
    path = tmp_path / 'words.txt'
    path.write_bytes('\ufeff Łódź 1 \r\n\r\n'.encode())
    done = subprocess.run([find_python(minor), '-I', '-S', '-c', NO_PACKAGE, FILE, path],
                          capture_output=True, encoding='utf-8')
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == '1 words, 7 letters with the end mark, 392 weights'
    step, loss, letters, word = re.fullmatch(
        r'step (\d+): loss (.*), as uncertain as a guess among (.*) letters; it writes (.+)',
        lines[1]).groups()
    assert step == '1' and word
    assert float(letters) == pytest.approx(math.exp(float(loss)), rel=0.02)
    assert 'Łódź 1 (in the list), Łódź 1 (in the list)' in lines[2]
    energies = re.findall(r'^Łódź 1 goes down the \w+ energy: (.*)$', done.stdout, re.M)
    assert len(energies) == 2
    for line in energies:
        values = [float(value) for value in line.split(', ')]
        assert len(values) == 5
        assert values == sorted(set(values), reverse=True)
    apart = re.findall(r'^(\w+) by hand and minus the gradient: at most (.*) apart$',
                       done.stdout, re.M)
    assert [name for name, _ in apart] == ['attention', 'mlp']
    assert all(float(number) < 1e-12 for _, number in apart)
    assert lines[-1].endswith('apart')


@pytest.mark.parametrize('minor', [8, 9])
def test_an_older_python_gets_one_line(minor: int) -> None:
    done = subprocess.run([find_python(minor), FILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, '')
    assert done.stderr == 'microcem.py: expected Python 3.10 or later\n'


@pytest.mark.parametrize('minor', [8, 10])
def test_the_syntax_is_an_old_pythons(minor: int) -> None:
    """Python 3.8 comes as far as the line that names the version."""
    ast.parse(SOURCE, feature_version=(3, minor))


def run(*args: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, FILE, *args], capture_output=True, text=True)


@pytest.mark.parametrize('content, words', [
    (b'', 'expected words of 1 to 30 letters, not ""'),
    (b' \n\n', 'expected words of 1 to 30 letters, not ""'),
    (b'\xff\xfe\x00', 'expected a text in UTF-8'),
    ('Orléans\nNîmes\n'.encode('latin-1'), 'expected a text in UTF-8'),
    (b'word\n' + b'a b ' * 8 + b'\nword', 'expected words of 1 to 30 letters, not "a b a b a b')])
def test_a_bad_file_gets_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / 'a'
    path.write_bytes(content)
    with pytest.raises(SystemExit) as error:
        microcem.read_words(str(path))
    line = str(error.value)
    assert line.startswith(f'microcem.py: {path}: {words}') and '\n' not in line


def test_a_file_that_cannot_be_read_gets_one_line(tmp_path: Path) -> None:
    for missing, words in (tmp_path / 'none', 'No such file'), (tmp_path, 'Is a directory'):
        with pytest.raises(SystemExit, match=f'^microcem.py: {missing}: {words}'):
            microcem.read_words(str(missing))


def test_command_line() -> None:
    """The only argument is a file. -h and --help print the docstring."""
    done = run('no.txt')
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr == 'microcem.py: no.txt: No such file or directory\n'
    done = run('words.txt', '2000')
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr == 'microcem.py: expected one file of words, and not 2000 beside it\n'
    for option in ('-h', '--help'):
        assert run(option).stdout == f'{microcem.__doc__}\n'


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    process = subprocess.Popen([sys.executable, '-u', FILE], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert 'words' in process.stdout.readline()  # it has begun
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (-signal.SIGINT, '')

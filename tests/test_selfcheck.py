"""nanocem/selfcheck.py, on a CPU: the interpreter plays the GPU that nobody has tried."""
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import ModelConfig, Transformer
from nanocem import fast, selfcheck, triton_attention

pytestmark = pytest.mark.skipif(not fast.HAS_TRITON, reason='Triton is not installed')
CPU, HALF = torch.device('cpu'), torch.float16
CASE = (CPU, HALF, 2, 16, 1, True, 32, 1)
NAMES = ('q', 'k', 'd u', 'h', 'b')
TIMES = selfcheck.times


@pytest.fixture(autouse=True)
def untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device that has run nothing yet, on which our kernels would win. Returns the cache."""
    monkeypatch.setenv('NANOCEM_CACHE', str(tmp_path))
    monkeypatch.setattr(selfcheck, 'is_untried', lambda device: True)
    monkeypatch.setattr(selfcheck, 'VERDICTS', {})
    monkeypatch.setattr(selfcheck, 'CASES', ((1, 35),))
    monkeypatch.setattr(selfcheck, 'times', lambda *runs: (1.0, 2.0))
    return tmp_path


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is on the disk is left."""
    monkeypatch.setattr(selfcheck, 'VERDICTS', {})


def never(*args: object) -> None:
    raise AssertionError('the kernels were tried again')


def test_right_kernels_are_used_and_tried_once(untried: Path, capsys: pytest.CaptureFixture,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.random.get_rng_state()
    with torch.no_grad(), torch.autocast('cpu'):
        assert selfcheck.proven(*CASE)
    assert torch.equal(torch.random.get_rng_state(), before)
    (path,) = untried.glob('*.json')
    assert json.loads(path.read_text())['verdict'] == ''
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, 'verdict', never)
        assert selfcheck.proven(*CASE)
        another_process(patch)
        assert selfcheck.proven(*CASE)
        assert capsys.readouterr().err == ''
        for other in (4, 1), (6, 33), (7, 2):  # no diagonal's shape, another length, batch size
            changed = list(CASE)
            changed[other[0]] = other[1] if other[0] != 4 else 0
            another_process(patch)
            with pytest.raises(AssertionError, match='again'):
                selfcheck.proven(*changed)


def refused(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Torch's own way, and one line that says why; in the next process too, without a trial."""
    for _ in range(2):
        assert not selfcheck.proven(*CASE)
        assert not selfcheck.proven(*CASE)
        error = capsys.readouterr().err
        assert error.count('\n') == 1 and error.startswith('Warning: the Triton kernels')
        assert all(word in error for word in (*words, "torch's own", 'delete')), error
        monkeypatch.setattr(selfcheck, 'verdict', never)
        another_process(monkeypatch)


def test_kernels_that_do_not_compile(capsys: pytest.CaptureFixture,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*args: object, **options: object) -> None:
        raise ValueError('ptxas exited with code 255\nand a page of assembly')
    monkeypatch.setattr(triton_attention, 'launch', launch)
    refused(capsys, monkeypatch, 'do not run (ValueError: ptxas exited with code 255)')


@pytest.mark.parametrize('n', range(6))
def test_kernels_that_are_wrong(n: int, capsys: pytest.CaptureFixture,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    """In one row of one result: the output, then each gradient."""
    name, at = ('forward', 0) if n == 0 else ('backward', n - 1)
    right = getattr(triton_attention, name)

    def wrong(*args: object) -> tuple[Tensor, ...]:
        results = right(*args)
        results[at][..., -1] *= 1.5 if n == 5 else 1.2
        return results
    monkeypatch.setattr(triton_attention, name, wrong)
    what = 'output' if n == 0 else f'gradient of {NAMES[n - 1]}'
    refused(capsys, monkeypatch, f'give a wrong {what} (off by')


@pytest.mark.parametrize('factor, words', [
    (lambda: torch.nan, 'give a'), (lambda: 1 + 0.01 * torch.rand(()), 'changes from call to call'),
])
def test_kernels_that_read_what_they_should_not(
        factor: Callable, words: str, capsys: pytest.CaptureFixture,
        monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_attention.forward
    monkeypatch.setattr(triton_attention, 'forward', lambda *args: (
        right(*args)[0] * factor(), right(*args)[1]))
    refused(capsys, monkeypatch, words)


def test_kernels_that_are_slow(capsys: pytest.CaptureFixture,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the interpreter is slow in earnest
    monkeypatch.setattr(selfcheck, 'is_untried', lambda device: True)
    monkeypatch.setattr(selfcheck, 'VERDICTS', {})
    monkeypatch.setattr(selfcheck, 'CASES', ((1, 16),))
    monkeypatch.setenv('NANOCEM_CACHE', '/dev/null/no/such/folder')
    assert not selfcheck.proven(*CASE)
    error = capsys.readouterr().err
    assert "are slower than torch's own (" in error and 'delete' not in error  # nothing was kept


def test_times_are_of_what_runs() -> None:
    n = []

    def full() -> None:
        raise torch.OutOfMemoryError

    def refuses() -> None:
        raise RuntimeError('no deterministic implementation')
    assert TIMES(lambda: n.append(1), refuses, CPU)[1] == float('inf')
    assert len(n) == selfcheck.ROUNDS + 1
    assert TIMES(full, full, CPU) == (float('inf'), float('inf'))
    with pytest.raises(RuntimeError):
        TIMES(refuses, lambda: None, CPU)


def test_a_trial_that_ends_the_process_is_not_repeated(capsys: pytest.CaptureFixture) -> None:
    died = subprocess.run([sys.executable, '-c', 'import os\nfrom nanocem import selfcheck\n'
                           'selfcheck.kept({"device": "cpu"}, lambda: os._exit(139))'],
                          cwd=Path(__file__).parent.parent)
    assert died.returncode == 139
    assert selfcheck.kept({'device': 'cpu'}, never) == selfcheck.DIED
    assert 'ended the process' in capsys.readouterr().err


def test_a_trial_that_the_user_ends_is_repeated(untried: Path) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        selfcheck.kept({'device': 'cpu'}, interrupted)
    assert selfcheck.kept({'device': 'cpu'}, lambda: '') == ''


def test_a_damaged_answer_is_asked_again(untried: Path) -> None:
    assert selfcheck.kept({'device': 'cpu'}, lambda: '') == ''
    (path,) = untried.glob('*.json')
    for content in b'', b'[1]', b'\xff', b'{"verdict"':
        path.write_bytes(content)
        assert selfcheck.kept({'device': 'cpu'}, lambda: '') == ''
    assert json.loads(path.read_text()) == {'device': 'cpu', 'verdict': ''}


def model() -> tuple[Transformer, Tensor]:
    torch.manual_seed(0)
    cfg = ModelConfig(d_model=32, n_layer=1, n_head=2, d_mlp=20, vocab_size=50, context_length=32,
                      attn_impl='triton')
    return Transformer(cfg), torch.randint(50, (2, 33))


@pytest.mark.parametrize('broken', [False, True])
def test_models_take_the_way_that_is_proven(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first use, eager and compiled: the trial is made as torch.compile traces, and the graph is
    whole; prove makes it before."""
    ran, forward = [], triton_attention.forward

    def launch(*args: object) -> tuple[Tensor, ...]:
        ran.append(args[0].shape)
        if broken:
            raise ValueError('no')
        return forward(*args)
    monkeypatch.setattr(triton_attention, 'forward', launch)
    torch.compiler.reset()  # what was traced before knows another answer
    own, idx = model()
    losses = []
    for call in own, torch.compile(own, fullgraph=True, backend='aot_eager'):
        another_process(monkeypatch)
        for path in Path(os.environ['NANOCEM_CACHE']).glob('*.json'):
            path.unlink()
        ran.clear()
        with torch.autocast('cpu', HALF):
            losses.append(call(idx[:, :-1], idx[:, 1:])[1])
        losses[-1].backward()
        trials = [shape for shape in ran if shape[1] == 35]
        assert len(trials) == (1 if broken else 2)
        assert len(ran) - len(trials) == (0 if broken else 2)  # two steps
    assert (losses[0] - losses[1]).abs() <= 1e-3 * losses[0]
    another_process(monkeypatch)
    fast.prove(own, CPU, HALF, batch_size=8)
    assert list(selfcheck.VERDICTS) == [('cpu', HALF, selfcheck.Shape(2, 16, 1, True, 32))]
    assert bool(*selfcheck.VERDICTS.values()) == broken


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('n_head, width', [(12, 64), (12, 72), (8, 84)])  # 134m, 162m, 86m
def test_kernels_pass_on_this_gpu(n_head: int, width: int) -> None:
    """In a process that does not interpret. Their time beside torch's own is printed."""
    code = f"""
import torch
from functools import partial
from nanocem import selfcheck as s
case = torch.device('cuda'), torch.bfloat16, s.Shape({n_head}, {width}, 1, True, 2048)
for B, J in s.CASES:
    assert (wrong := s.error(*case, B, J)) == '', wrong
tensors, do = s.inputs(*case, 8, 2048)
runs = (partial(s.both_ways, way, case[2], tensors, do) for way in (s.by_triton, s.by_torch))
print('{n_head} heads of {width}: ours, torch, seconds:', *s.times(*runs, case[0]))
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parent.parent, text=True,
                          env={**os.environ, 'TRITON_INTERPRET': '0'}, capture_output=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)

"""nanocem/compute.py: the loss in pieces against the whole, and memory that is kept."""
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from model import ModelConfig, Transformer
from nanocem import compute

SMALL = dict(d_model=32, n_layer=2, n_head=2, d_mlp=20, vocab_size=50, context_length=20)


def test_loss_in_pieces_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, idx = Transformer(ModelConfig(**SMALL)).double(), torch.randint(50, (3, 18))
    results = []
    for at_once in (2 ** 26, 350, 50, 1):  # whole; 7 rows, the last piece shorter; a row; less
        monkeypatch.setattr(compute, 'LOGITS_AT_ONCE', at_once)
        logits, loss = model(idx[:, :-1], idx[:, 1:])
        assert logits is None
        results.append([loss, *torch.autograd.grad(3 * loss, list(model.parameters()))])
        with torch.no_grad():
            assert torch.equal(model(idx[:, :-1], idx[:, 1:])[1], loss)
    for whole, *pieces in zip(*results, strict=True):
        for piece in pieces:
            torch.testing.assert_close(piece, whole, rtol=1e-11, atol=1e-13)


def test_targets_of_minus_100_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in pieces, beside the mean over the others. None that count: no number."""
    torch.manual_seed(4)
    x, W = torch.randn(3, 17, 8).double(), torch.randn(50, 8).double()
    x.requires_grad_(), W.requires_grad_()
    targets, counts = torch.randint(50, (3, 17)), torch.rand(3, 17) < 0.6
    mean = nn.functional.cross_entropy((x @ W.mT)[counts], targets[counts])
    gradients = torch.autograd.grad(mean, (x, W))
    for at_once in (2 ** 26, 350, 50):
        monkeypatch.setattr(compute, 'LOGITS_AT_ONCE', at_once)
        loss = compute.cross_entropy(x, W, targets.where(counts, -100))
        torch.testing.assert_close(loss, mean)
        torch.testing.assert_close(torch.autograd.grad(loss, (x, W)), gradients)
        assert compute.cross_entropy(x, W, torch.full_like(targets, -100)).isnan()


@pytest.mark.parametrize('autocast', [False, True])
def test_loss_in_pieces_is_compiled_and_cast(autocast: bool,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    plain = dict(kq_diag='none', preconditioner='none', attn_steps=1, mlp_steps=1)
    cfg = ModelConfig(**{**SMALL, 'n_layer': 1}, **plain)
    model, idx, results = Transformer(cfg), torch.randint(50, (3, 18)), []
    model.activation_checkpointing = True
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    for at_once, call in ((2 ** 26, model), (350, model), (350, compiled)):
        monkeypatch.setattr(compute, 'LOGITS_AT_ONCE', at_once)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            loss = call(idx[:, :-1], idx[:, 1:])[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        assert all(g.dtype == torch.float32 for g in results[-1])
    for whole, piece, by_compiler in zip(*results, strict=True):
        for other in (piece, by_compiler):
            assert (whole - other).norm() <= (2e-2 if autocast else 1e-5) * whole.norm()


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='only glibc is told to keep memory')
def test_freed_memory_is_kept() -> None:
    # a few tensors of 16 MB made and freed, again and again: only the first take new pages
    code = ('from resource import RUSAGE_SELF, getrusage\n'
            'import torch; from nanocem import compute\n'
            'compute.keep_freed_memory()\n'
            'def faults():\n'
            '    before = getrusage(RUSAGE_SELF).ru_minflt\n'
            '    some = [torch.ones(2**22) for _ in range(4)]\n'
            '    return getrusage(RUSAGE_SELF).ru_minflt - before\n'
            'print(faults(), min(faults() for _ in range(5)))')
    printed = subprocess.run([sys.executable, '-c', code], cwd=Path(compute.__file__).parents[1],
                             capture_output=True, text=True, check=True, timeout=120).stdout
    first, later = map(int, printed.split())
    assert later < first / 10, printed

"""nanocem/loss.py: the loss in pieces against the whole."""
import pytest
import torch
from torch import nn

from model import ModelConfig, Transformer
from nanocem import loss as loss_fn

SMALL = dict(d_model=32, n_layer=2, n_head=2, d_mlp=20, vocab_size=50, context_length=20)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts may have any number of rows: the tests' have few."""
    monkeypatch.setattr(loss_fn, 'ROW_TILE', 1)


def test_loss_in_pieces_is_the_mean_over_targets_that_count(
        monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    x, W = torch.randn(3, 17, 8).double(), torch.randn(50, 8).double()
    x.requires_grad_(), W.requires_grad_()
    targets = torch.randint(50, (3, 17))
    for counts in torch.rand(3, 17) < 0.6, torch.ones(3, 17, dtype=torch.bool):
        mean = nn.functional.cross_entropy((x @ W.mT)[counts], targets[counts])
        gradients = torch.autograd.grad(3 * mean, (x, W))
        for at_once in (2 ** 26, 350, 50, 1):  # all rows; 7, the last piece shorter; 1; fewer
            monkeypatch.setattr(loss_fn, 'LOGITS_IN_CACHE', at_once)
            loss = loss_fn.cross_entropy(x, W, targets.where(counts, -100))
            torch.testing.assert_close(loss, mean)
            torch.testing.assert_close(torch.autograd.grad(3 * loss, (x, W)), gradients)
            with torch.no_grad():
                assert torch.equal(loss_fn.cross_entropy(x, W, targets.where(counts, -100)), loss)


@pytest.mark.parametrize('autocast', [False, True])
def test_loss_in_pieces_is_compiled_and_cast(autocast: bool,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    model = Transformer(ModelConfig(**{**SMALL, 'n_layer': 1}))
    idx, results = torch.randint(50, (3, 18)), []
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    for at_once, call in ((2 ** 26, model), (350, model), (350, compiled)):
        monkeypatch.setattr(loss_fn, 'LOGITS_IN_CACHE', at_once)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            loss = call(idx[:, :-1], idx[:, 1:])[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        assert all(g.dtype == torch.float32 for g in results[-1])
    for whole, piece, by_compiler in zip(*results, strict=True):
        for other in (piece, by_compiler):
            assert (whole - other).norm() <= (2e-2 if autocast else 1e-5) * whole.norm()


def test_a_second_derivative_of_the_loss_in_pieces_is_an_error(
        monkeypatch: pytest.MonkeyPatch) -> None:
    x, W = torch.randn(2, 5, 8, requires_grad=True), torch.randn(50, 8)
    monkeypatch.setattr(loss_fn, 'LOGITS_IN_CACHE', 50)
    loss = loss_fn.cross_entropy(x, W, torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(RuntimeError, match='no second derivative of a loss in parts'):
        torch.autograd.grad(loss, x, create_graph=True)


def test_parts_have_whole_tiles_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit, but at least one tile."""
    monkeypatch.undo()
    monkeypatch.setattr(loss_fn, 'LOGITS_IN_CACHE', 2 ** 10)
    rows = []
    monkeypatch.setattr(loss_fn.LinearCrossEntropy, 'apply', lambda *of: rows.append(of[3]))
    for vocab_size in (3, 7, 8, 50):  # 341, 146, 128 and 20 rows fit
        targets = torch.zeros(2, 2000, dtype=torch.long)
        loss_fn.cross_entropy(torch.zeros(2, 2000, 1), torch.zeros(vocab_size, 1), targets)
    assert rows == [256, 128, 128, 128]

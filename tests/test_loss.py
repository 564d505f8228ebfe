"""nanocem/loss.py: the loss in pieces against the whole; precision and compiler."""
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

from configurator import UserError
from model import ModelConfig, Transformer
from nanocem import loss as loss_fn

SMALL = dict(d_model=32, n_layer=2, n_head=2, d_mlp=20, vocab_size=50, context_length=20)


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
            none = loss_fn.cross_entropy(x, W, torch.full_like(targets, -100))
            assert not any(g.any() for g in torch.autograd.grad(none, (x, W)))
            with torch.no_grad():
                assert torch.equal(loss_fn.cross_entropy(x, W, targets.where(counts, -100)), loss)
                assert none.isnan()
                infinite = x.where(counts[..., None], math.inf)  # behind targets that do not count
                loss = loss_fn.cross_entropy(infinite, W, targets.where(counts, -100))
                torch.testing.assert_close(loss, mean)


@pytest.mark.parametrize('autocast', [False, True])
def test_loss_in_pieces_is_compiled_and_cast(autocast: bool,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    plain = dict(kq_diag='none', preconditioner='none', attn_steps=1, mlp_steps=1)
    cfg = ModelConfig(**{**SMALL, 'n_layer': 1}, **plain)
    model, idx, results = Transformer(cfg), torch.randint(50, (3, 18)), []
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
    with pytest.raises(RuntimeError, match='no second derivative'):
        torch.autograd.grad(loss, x, create_graph=True)


def test_torch_func_differentiates_the_loss_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.func the loss is in one piece: gradients, those of each sample, second ones."""
    torch.manual_seed(5)
    x, W = torch.randn(3, 5, 8), torch.randn(50, 8)
    targets = torch.randint(50, (3, 5))
    monkeypatch.setattr(loss_fn, 'LOGITS_IN_CACHE', 50)

    def loss(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_fn.cross_entropy(x[None], W, targets[None])
    by_sample = torch.func.vmap(torch.func.grad(loss))(x, targets)
    for sample, target, gradient in zip(x, targets, by_sample, strict=True):
        sample.requires_grad_()
        expected, = torch.autograd.grad(loss(sample, target), sample)
        torch.testing.assert_close(gradient, expected)
    assert torch.func.hessian(loss)(x[0], targets[0]).any()


@pytest.mark.parametrize('dtype, compiled, flops, amx, error, expected', [
    ('auto', None, 1e13, True, '', (torch.bfloat16, True, '')),
    ('auto', None, 1e12, True, '', (torch.float32, False, '')),  # too short a run
    ('bfloat16', False, 1e13, True, '', (torch.bfloat16, False, '')),
    ('auto', None, 1e13, False, '', (torch.float32, True, '')),
    ('auto', None, 1e13, True, 'no g++', (torch.float32, False, 'no g++')),
    ('auto', True, 1e13, True, 'no g++', 'compile=True: .* not work on cpu: no g\\+\\+'),
])
def test_precision_and_compiler(dtype: str, compiled: bool | None, flops: float, amx: bool,
                                error: str, expected: tuple | str,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: amx)
    monkeypatch.setattr(loss_fn, 'compiler_error', lambda device: error)
    options = torch.device('cpu'), dtype, compiled, flops
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            loss_fn.precision_and_compiler(*options)
    else:
        assert loss_fn.precision_and_compiler(*options) == expected


def test_why_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: object) -> None:
        raise RuntimeError('Failed to find C compiler.\nand a page of more')
    monkeypatch.setattr(torch, 'compile', fails)
    loss_fn.compiler_error.cache_clear()
    assert loss_fn.compiler_error(torch.device('cpu')) == 'Failed to find C compiler.'
    loss_fn.compiler_error.cache_clear()


def test_ddp_leaves_a_gpus_model_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients that it has uncompiled. A CPU stands in for the GPU."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        graphs.append(graph)
        return lookup_backend('aot_eager')(graph, inputs)

    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=backend))
    monkeypatch.setattr(loss_fn, 'LOGITS_IN_CACHE', 350)
    torch.manual_seed(3)
    model, ids = Transformer(ModelConfig(**SMALL, attn_steps=2)), torch.randint(50, (3, 20))
    model.set_attn_impl('readable')
    expected = torch.autograd.grad(model(ids, ids)[1], list(model.parameters()))
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    with (torch._dynamo.config.patch(optimize_ddp=True),
          torch._functorch.config.patch(ban_recompute_materialized_backward=True,
                                        ban_recompute_used_far_apart=True)):
        compiled = loss_fn.compile_for(torch.device('cuda'), model, 'triton attention')
        DistributedDataParallel(compiled, bucket_cap_mb=0.001)(ids, ids)[1].backward()
    dist.destroy_process_group()
    assert len(graphs) == 1
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)

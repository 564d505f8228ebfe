"""nanocem/attention.py: each implementation against the readable one, and which one runs where."""
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from model import ModelConfig, Transformer
from nanocem import attention, triton_attention
from test_model import SETS, TINY, describe, randomize

OLD = (attention.HAS_TRITON and triton_attention.triton.__version__.startswith('3.6.')
       and np.lib.NumpyVersion(np.__version__) >= '2.4.0')
interpreted = pytest.mark.skipif(
    not attention.HAS_TRITON or OLD,
    reason="no Triton, or Triton 3.6, whose interpreter does not run with numpy 2.4 and later")
SMALL = dict(d_model=32, n_layer=2, n_head=2, d_mlp=20, vocab_size=50, context_length=20)


def loss_and_gradients(cfg: ModelConfig, impl: str, dtype: torch.dtype,
                       compiler: Callable = lambda model: model) -> list[Tensor]:
    """Return the loss of a model with random weights, and the gradients of all parameters."""
    torch.manual_seed(8)
    model = randomize(Transformer(cfg), seed=9).to(dtype)
    model.set_attn_impl(impl)
    idx = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(1))
    loss = compiler(model)(idx[:, :-1], idx[:, 1:])[1]
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize('impl', ['blockwise', 'sdpa'])
@pytest.mark.parametrize('cfg', [
    *(c for c in SETS if not c.exact_update),
    ModelConfig(**{**TINY, 'd_model': 30}),  # a width that the fused path pads
], ids=describe)
def test_faster_attention_equals_the_readable_path(
        cfg: ModelConfig, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, 'BLOCK', 5)  # of 16 queries
    fused = loss_and_gradients(cfg, impl, torch.float64)
    expected = loss_and_gradients(cfg, 'readable', torch.float64)
    torch.testing.assert_close(fused, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize('impl', ['readable', 'blockwise',
                                  pytest.param('triton', marks=interpreted)])
def test_a_training_step_is_one_graph(impl: str) -> None:
    """With fullgraph=True torch.compile refuses a break."""
    cfg = ModelConfig(**{**SMALL, 'n_layer': 1, 'attn_steps': 2})
    compiled = loss_and_gradients(cfg, impl, torch.float32, lambda model: torch.compile(
        model, fullgraph=True, backend='aot_eager'))
    for a, b in zip(loss_and_gradients(cfg, impl, torch.float32), compiled, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


def test_the_readable_path_has_second_derivatives_of_rope() -> None:
    """On a CPU torch's fused attention has none."""
    model = randomize(Transformer(ModelConfig(**TINY, attn='llama', mlp='llama')), seed=21)
    idx = torch.randint(50, (1, 9))
    model.set_attn_impl('readable')
    loss = model(idx, idx)[1]
    gradient, = torch.autograd.grad(loss, model.embedding, create_graph=True)
    second, = torch.autograd.grad(gradient.square().sum(), model.embedding)
    assert second.isfinite().all() and second.any()


# Which implementation runs

def test_attention_falls_back_by_itself_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, half = torch.device('cpu'), torch.device('cuda'), torch.bfloat16
    def chosen(device: torch.device, dtype: torch.dtype, impl: str = 'auto', **options) -> str:
        with torch.device('meta'):
            model = Transformer(ModelConfig(**{**SMALL, **options}))
        model.set_attn_impl(impl)
        return attention.describe_attention(model, device, dtype).removesuffix(' attention')
    llama, rope, alibi = dict(attn='llama'), dict(positions='rope'), dict(positions='alibi')
    assert chosen(cpu, torch.float32) == chosen(cpu, half, **llama, **alibi) == 'blockwise'
    assert chosen(cpu, torch.float32, **rope) == 'sdpa'
    if attention.HAS_TRITON:
        assert chosen(cpu, torch.float32, 'triton') == 'triton'  # interpreted
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    assert 'triton cannot run' in chosen(cpu, torch.float32, 'triton')
    # On a GPU, where the kernels agree with the formula
    monkeypatch.setattr(attention, 'HAS_TRITON', True)
    monkeypatch.setattr(triton_attention, 'agrees', lambda *case: True)
    for options in {}, dict(**rope, kq_diag='shared'), dict(**llama, **alibi, tie='kv'):
        assert chosen(gpu, half, **options) == 'triton'
    for options in rope, llama, {**llama, **alibi}, dict(impl='sdpa'), dict(d_model=300):
        assert chosen(gpu, half, **options) == 'sdpa'
    for options in dict(impl='readable'), dict(exact_update=True, kq_diag='shared'):
        assert chosen(gpu, half, **options) == 'readable'
    assert chosen(gpu, torch.float32) == 'sdpa'
    # On a GPU, where they do not agree
    monkeypatch.setattr(triton_attention, 'agrees', lambda *case: False)
    assert chosen(gpu, half) == 'sdpa'

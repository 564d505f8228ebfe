"""The GPU's paths without a GPU. Fake tensors have a device and no numbers, and an operation on
tensors of two devices is an error: one that is made on the wrong device is found.

They stand on cuda where torch is a CUDA build, else on meta, which is not the CPU either. What the
kernels compute is not tried, nor, on cuda, the backward pass, which asks for a GPU.
"""
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import model as model_py
from configurator import build, read_options
from model import ModelConfig, Transformer
from nanocem import triton_attention
from nanocem.optim import Muon, block_matrices
from running import MODEL_FILES
from train import TrainConfig

DEVICE = 'cuda' if torch.version.cuda else 'meta'
SMALL = dict(d_model=32, n_layer=1, n_head=2, n_kv_head=2, d_mlp=48, vocab_size=50,
             context_length=4)
MODELS = {'CEM': dict(attn_steps=2, mlp_steps=2), 'Llama': dict(attn='llama', mlp='llama'),
          'exact RoPE': dict(positions='rope', kq_diag='none')}
launches: list[Any] = []


def launch(kernel: Any, *tensors: Tensor | None, **options: Any) -> None:
    """Replaces `launch`: checks that all tensors are on the device."""
    assert all(t is None or t.device.type == DEVICE for t in tensors)
    launches.append(kernel)


def with_its_code(op: Callable, code: Callable) -> Callable:
    """Run our operator's own code, which fake tensors would skip, then the operator."""
    def run(*args: Any) -> Any:
        with torch.no_grad():
            assert all(t.device.type == DEVICE for t in code(*args))
        return op(*args)
    return run


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All tensors are, and our kernels and all plugs are taken to run: there are no numbers."""
    monkeypatch.setattr(triton_attention, 'runs_triton', lambda *of: True)
    monkeypatch.setattr(triton_attention, 'find_error', lambda *of: '')
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True, raising=False)
    monkeypatch.setattr(triton_attention, 'launch', launch)
    for name, code in (('attention_op', 'forward'), ('backward_op', 'backward')):
        op, code = getattr(triton_attention, name), getattr(triton_attention, code)
        monkeypatch.setattr(triton_attention, name, with_its_code(op, code))
    launches.clear()
    with FakeTensorMode():
        yield


def try_out(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kernels: bool = True) -> None:
    """The loss both ways, gradients and a step of Muon; decoding until the context is full."""
    with torch.device(DEVICE):
        model = Transformer(ModelConfig(**{**options, **SMALL}))
        if kernels:
            triton_attention.use_kernels(model, torch.bfloat16)
        idx = torch.zeros(2, 4, dtype=torch.long)
    for few in (2 ** 26, 50):
        monkeypatch.setitem(model_py.FEW_LOGITS, 'cuda', (few, few))
        loss = model(idx, idx)[1]
        assert loss.device.type == DEVICE
        if DEVICE == 'meta':
            loss.backward()
    Muon(block_matrices(model), 0.01, 0.1).step()
    for use_cache in (True, False):
        new = model.generate(idx[:, :2], 4, 1.0, top_k=5, use_cache=use_cache)
        assert new.device.type == DEVICE and new.shape == (2, 6)


@pytest.mark.parametrize('kernels', [False, True])
@pytest.mark.parametrize('name', MODELS)
def test_every_implementation(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    try_out(MODELS[name], monkeypatch, kernels)
    assert bool(launches) == (name == 'CEM' and kernels)


@pytest.mark.parametrize('config', MODEL_FILES)
def test_every_config(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = read_options([config], TrainConfig, ModelConfig)
    try_out(vars(build(ModelConfig, given)), monkeypatch)


def test_a_tensor_on_the_wrong_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('model.alibi_slopes', lambda n_head, like: torch.ones(n_head))
    with pytest.raises(RuntimeError, match='device'):
        try_out({}, monkeypatch)

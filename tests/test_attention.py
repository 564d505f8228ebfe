"""nanocem/fast.py: each implementation against the readable one, and which one runs where."""
import copy
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType

import numpy as np
import pytest
import torch
from torch import Tensor

from model import Block, CEMAttention, ModelConfig, Positions, Transformer, make_positions
from nanocem import attention, fast, triton_attention
from nanocem.decode import Cache
from test_model import SETS, TINY, describe, randomize

OLD = (fast.HAS_TRITON and triton_attention.triton.__version__.startswith('3.6.')
       and np.lib.NumpyVersion(np.__version__) >= '2.4.0')
interpreted = pytest.mark.skipif(
    not fast.HAS_TRITON or OLD,
    reason="no Triton, or Triton 3.6, whose interpreter does not run with numpy 2.4 and later")
ROOT = Path(__file__).parent.parent
SMALL = dict(d_model=32, n_layer=2, n_head=2, d_mlp=20, vocab_size=50, context_length=20)


def loss_and_gradients(cfg: ModelConfig, impl: str, dtype: torch.dtype,
                       compiler: Callable = lambda model: model) -> list[Tensor]:
    """Return the loss of a model with random weights, and the gradients of all parameters."""
    torch.manual_seed(8)
    model = randomize(Transformer(cfg), seed=9).to(dtype)
    assert fast.plug_in(model, impl) == impl or (
        impl == 'triton' and not attention.has_bias(model.blocks[0].attn))
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
    torch.testing.assert_close(fused, expected, rtol=1e-9, atol=1e-10)


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
    loss = model(idx, idx)[1]
    gradient, = torch.autograd.grad(loss, model.embedding, create_graph=True)
    second, = torch.autograd.grad(gradient.square().sum(), model.embedding)
    assert second.isfinite().all() and second.any()


# Which implementation runs

def test_attention_falls_back_by_itself_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, half = torch.device('cpu'), torch.device('cuda'), torch.bfloat16
    tried = []

    def chosen(device: torch.device, dtype: torch.dtype, impl: str = 'auto', compiled: bool = False,
               **options) -> str:
        with torch.device('meta'):
            model = Transformer(ModelConfig(**{**SMALL, **options}))
        attn = model.blocks[0].attn
        first = [*fast.candidates(attn, impl, device, dtype), 'readable'][0]
        return attention.choose_attention(attn, device, compiled) if first == 'auto' else first
    llama, rope, alibi = dict(attn='llama'), dict(positions='rope'), dict(positions='alibi')
    assert chosen(cpu, torch.float32) == chosen(cpu, half, **llama, **alibi) == 'blockwise'
    assert chosen(cpu, torch.float32, **rope) == 'sdpa'
    assert chosen(cpu, torch.float32, compiled=True, **rope) == 'blockwise'  # the context is short
    if fast.HAS_TRITON:
        assert chosen(cpu, torch.float32, 'triton') == 'triton'  # interpreted
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    assert chosen(cpu, torch.float32, 'triton') == 'blockwise'
    assert fast.plug_in(Transformer(ModelConfig(**SMALL)), 'triton') == 'blockwise'
    # On a GPU
    monkeypatch.setattr(fast, 'HAS_TRITON', True)
    match = dict(match_bias='token')
    for options in ({}, dict(**rope, kq_diag='shared'), dict(**llama, **alibi, tie='kv'),
                    dict(**match, kq_diag='shared'), dict(**llama, **alibi, **match, tie='kv')):
        assert chosen(gpu, half, **options) == 'triton'
    # With RoPE Llama's tied values are not rotated: they are not the keys
    for options in (rope, llama, {**llama, **alibi}, dict(impl='sdpa'), dict(d_model=300),
                    dict(**llama, **rope, **match, tie='kv'),
                    dict(**match, kq_diag='per_head'), dict(match_bias='pair')):
        assert chosen(gpu, half, **options) == 'sdpa'
    for options in dict(impl='readable'), dict(exact_update=True, kq_diag='shared'):
        assert chosen(gpu, half, **options) == 'readable'
    assert chosen(gpu, torch.float32) == 'sdpa'
    # Where kernels do not compute what model.py does, the next implementation is tried
    monkeypatch.setattr(fast, 'runs_triton', lambda *of: True)
    monkeypatch.setattr(fast, 'agrees', lambda model, attend, name, *of: tried.append(name))
    assert fast.plug_in(Transformer(ModelConfig(**SMALL))) == 'readable'
    assert tried == ['blockwise']
    assert fast.plug_in(Transformer(ModelConfig(**SMALL)), 'triton') == 'readable'
    assert tried == ['blockwise', 'triton', 'blockwise']


class Named(Block):
    def forward(self, x: Tensor, pos: Positions) -> Tensor:
        return self.mlp(x=self.attn(x, pos=pos))


def test_positions_may_be_given_by_name() -> None:
    model = Transformer(ModelConfig(**SMALL))
    model.blocks = torch.nn.ModuleList([Named(model.cfg)])
    assert fast.plug_in(model) == 'blockwise'
    with Cache(model) as cache:
        assert cache.agrees


class Documents(Transformer):
    """An edit of `hidden`: a token attends to its own document, which id 0 begins."""
    def mask(self, mask: Tensor, idx: Tensor) -> Tensor:
        document = (idx == 0).cumsum(1)
        same = document[:, :, None] == document[:, None]
        return (mask + torch.zeros_like(mask).where(same, -torch.inf))[:, None]  # (B, 1, I, I)

    def hidden(self, idx: Tensor, past: int = 0) -> Tensor:
        x = torch.nn.functional.embedding(idx, self.embedding)
        pos = make_positions(self.cfg, x, past)
        pos = pos._replace(mask=self.mask(pos.mask, idx))
        for block in self.blocks:
            x = block(x, pos)
        return self.norm(x)


class Window(Documents):
    """Another edit: a token attends to itself and the four before it."""
    def mask(self, mask: Tensor, idx: Tensor) -> Tensor:
        return mask + torch.full_like(mask, -torch.inf).tril(-5)


@pytest.mark.parametrize('impl', ['auto', 'sdpa', 'blockwise',
                                  pytest.param('triton', marks=interpreted)])
@pytest.mark.parametrize('cls', [Documents, Window])
@pytest.mark.parametrize('options', [
    dict(attn='llama', mlp='llama'), dict(), dict(match_bias='token')], ids=str)
def test_positions_of_an_edited_model_are_read(
        options: dict, cls: type, impl: str, capsys: pytest.CaptureFixture) -> None:
    """sdpa without a bias and the kernels have their own causal mask."""
    model = randomize(cls(ModelConfig(**SMALL, **options)), seed=5).float()
    idx = torch.randint(5, (2, 20))
    logits = model(idx)[0]
    assert fast.plug_in(model, impl) == 'readable'
    assert 'may not read the positions of this model' in capsys.readouterr().err
    assert torch.equal(model(idx)[0], logits)
    with Cache(model):
        for n in (10, 11, 20):
            torch.testing.assert_close(model.next_logits(idx[:, :n]), logits[:, n - 1])


def test_a_smaller_last_batch_chooses_anew() -> None:
    """With RoPE and a short context a compiled model attends blockwise, another one by sdpa."""
    model = Transformer(ModelConfig(**SMALL, attn='llama', mlp='llama'))
    assert fast.plug_in(model, compiled=True) == 'blockwise'
    idx, used = torch.randint(50, (1, 9)), []

    def record(name: str) -> Callable:
        function = getattr(attention, name)
        return lambda *args: used.append(name) or function(*args)
    with pytest.MonkeyPatch.context() as patch:
        for name in ('blockwise', 'sdpa'):
            patch.setattr(attention, name, record(name))
        model(idx)
        assert used == ['sdpa', 'sdpa']
        patch.setattr(torch.compiler, 'is_compiling', lambda: True)
        model(idx)
    assert used[2:] == ['blockwise', 'blockwise']


# Whoever edits the model trains the edit

EDITS = {
    'attend': lambda o, *args: torch.zeros_like(o),
    'scores': lambda a, *args: 2 * a,
    'bias': lambda b, pos: b + (pos.distance == 0) * 0.5}


def check_plugs(model: Transformer, idx: Tensor, right: Tensor, lengths: tuple[int, ...]) -> None:
    """AssertionError unless each plug, and the cache for the first ids, gives these logits."""
    for impl in ('auto', 'blockwise', 'sdpa'):
        fast.plug_in(model, impl)
        torch.testing.assert_close(model(idx)[0], right, rtol=0, atol=1e-9)
        with Cache(model):
            for n in lengths:
                torch.testing.assert_close(
                    model.next_logits(idx[:, :n]), right[:, n - 1].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize('options', [
    dict(), dict(positions='rope'), dict(kq_diag='shared'),
    dict(positions='rope', kq_diag='per_head')], ids=str)
@pytest.mark.parametrize('method', EDITS)
@pytest.mark.parametrize('place', ['subclass', 'class', 'object'])
def test_an_edited_layer_is_what_runs(
        place: str, method: str, options: dict, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture) -> None:
    """A method is another one in a subclass, in the class itself, or in one layer alone."""
    model = randomize(Transformer(ModelConfig(**{**SMALL, **options})), seed=3)
    idx = torch.arange(12)[None]
    unedited, _ = model(idx)
    original = getattr(CEMAttention, method)

    def edited(self: CEMAttention, *args) -> torch.Tensor:
        return EDITS[method](original(self, *args), *args)
    if place == 'subclass':
        for block in model.blocks:
            block.attn.__class__ = type('Edited', (CEMAttention,), {method: edited})
    elif place == 'class':
        monkeypatch.setattr(CEMAttention, method, edited)
    else:
        attn = model.blocks[-1].attn
        setattr(attn, method, MethodType(edited, attn))
    right, _ = model(idx)
    assert not torch.allclose(right, unedited)
    check_plugs(model, idx, right, (5, 6, 12))
    if method != 'bias':
        assert 'Warning: sdpa attention gives another output' in capsys.readouterr().err


@pytest.mark.parametrize('options', [
    dict(attn='llama'), dict(positions='rope'), dict(kq_diag='shared'),
    dict(positions='rope', kq_diag='per_head')], ids=str)
@pytest.mark.parametrize('method', ['bias', 'scores'])
@pytest.mark.parametrize('window', [4, 20, 170])
def test_a_sliding_window_is_what_runs(
        window: int, method: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is shorter than the trial's text or longer, and the first layer has none."""
    config = ModelConfig(**{**SMALL, **options, 'context_length': 260})
    model = randomize(Transformer(config), seed=3)
    idx = torch.randint(50, (1, 240), generator=torch.Generator().manual_seed(4))
    unedited, _ = model(idx)
    kind = type(model.blocks[0].attn)
    original = getattr(kind, method)

    def windowed(self: CEMAttention, *args) -> torch.Tensor:
        pos = args[0] if method == 'bias' else args[2]
        return original(self, *args).masked_fill(pos.distance >= self.window, -torch.inf)
    monkeypatch.setattr(kind, method, windowed)
    for n, block in enumerate(model.blocks):
        block.attn.window = window if n else 10 ** 6
    right, _ = model(idx)
    if config.positions == 'rope':  # ALiBi's weights of such distances round to 0
        assert not torch.allclose(right, unedited)
    check_plugs(model, idx, right, (3, 239, 240))


def test_a_context_of_one_token_needs_no_warning(capsys: pytest.CaptureFixture) -> None:
    model = Transformer(ModelConfig(**{**SMALL, 'context_length': 1}))
    assert fast.plug_in(model, 'sdpa') == 'sdpa'
    assert capsys.readouterr().err == ''


def test_an_edited_loss_is_what_trains(capsys: pytest.CaptureFixture) -> None:
    class Smoothed(Transformer):
        def loss(self, x, targets):
            return super().loss(x, targets) + 0.1 * x.square().mean()
    model, idx = Smoothed(ModelConfig(**SMALL)), torch.arange(12)[None]
    right = model(idx, idx)[1]
    fast.plug_in(model)
    assert torch.equal(model(idx, idx)[1], right)
    assert 'the loss in parts gives another value' in capsys.readouterr().err


def test_an_edited_file_is_what_runs(tmp_path: Path) -> None:
    """A line of model.py is changed, and the scripts' code is as it is."""
    shutil.copytree(ROOT / 'nanocem', tmp_path / 'nanocem')
    shutil.copy(ROOT / 'configurator.py', tmp_path)
    lines = (ROOT / 'model.py').read_text(encoding='utf-8')
    edited = lines.replace('alpha = a.softmax(dim=-1)', 'alpha = (1.5 * a).softmax(dim=-1)')
    assert edited != lines
    (tmp_path / 'model.py').write_text(edited, encoding='utf-8')
    script = """
import torch
from model import ModelConfig, Transformer
from nanocem.decode import Cache
from nanocem.fast import plug_in
model = Transformer(ModelConfig(size='nano', vocab_size=50, context_length=16, init_std=0.5))
idx = torch.arange(16)[None]
right = model(idx)[0]
for impl in ('auto', 'blockwise', 'sdpa'):
    assert plug_in(model, impl) == 'readable', impl
    assert torch.equal(model(idx)[0], right)
with Cache(model):
    for n in (4, 5, 16):
        # In float32 two ways to sum differ by up to 2e-5; the edit changes logits by some tenths
        torch.testing.assert_close(model.next_logits(idx[:, :n]), right[:, n - 1],
                                   rtol=1e-3, atol=1e-3)
"""
    done = subprocess.run([sys.executable, '-c', script], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('attention gives another output than the lines of model.py') == 3


def test_a_plugged_model_is_saved_and_copied(tmp_path: Path) -> None:
    model, idx = Transformer(ModelConfig(**SMALL, positions='rope')), torch.arange(12)[None]
    fast.plug_in(model)
    right = model(idx, idx)[1]
    torch.save(model, tmp_path / 'model.pt')
    for other in (torch.load(tmp_path / 'model.pt', weights_only=False), copy.deepcopy(model)):
        assert torch.equal(other(idx, idx)[1], right)
        attend, loss = other.blocks[0].attn.attend, other.loss
        assert attend.args[0] is other.blocks[0].attn and loss.args[0] is other
        with torch.no_grad():
            other.blocks[0].attn.W_K.zero_()
            other.head.mul_(2)
        assert not torch.equal(other(idx, idx)[1], right)
        assert torch.equal(model(idx, idx)[1], right)


def test_a_model_says_what_is_plugged_in() -> None:
    """A method that someone else puts on a layer stays, also where a plug was."""
    model = Transformer(ModelConfig(**SMALL))
    fast.plug_in(model)
    assert model.plugs == {'loss': fast.loss_in_parts, 'attend': attention.automatic}
    with Cache(model):
        assert model.plugs.keys() == {'loss', 'attend', 'next_logits'}
    attn, own = model.blocks[0].attn, functools.partial(attention.sdpa, model.blocks[0].attn)
    attn.attend = own
    fast.plug_in(model, 'readable')
    assert model.plugs == {'loss': fast.loss_in_parts} and attn.attend is own
    assert 'attend' not in vars(model.blocks[1].attn)
    del model.plugs, model.loss
    with Cache(model):
        assert model.plugs == {'next_logits': Cache.next_logits}
    assert 'plugs' not in vars(model)


def test_the_check_disturbs_no_random_numbers() -> None:
    model, state = Transformer(ModelConfig(**SMALL)), torch.get_rng_state()
    fast.plug_in(model)
    with Cache(model):
        pass
    assert torch.equal(torch.get_rng_state(), state)

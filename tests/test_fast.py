"""nanocem/fast.py: each faster way against model.py's lines, and which one runs where."""
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
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import model as model_py
from model import CEMAttention, ModelConfig, Transformer, make_positions
from nanocem import fast, same, triton_attention
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
    assert fast.plug_in(model, impl) == impl or (impl == 'triton' and not cfg.has_bias())
    idx = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(1))
    loss = compiler(model)(idx[:, :-1], idx[:, 1:])[1]
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize('cfg', [
    *SETS, ModelConfig(**{**TINY, 'd_model': 30}),  # a width that attend pads
], ids=describe)
def test_blockwise_attention_is_model_pys(cfg: ModelConfig,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, 'BLOCK', 5)  # of 16 queries
    blocks, whole = (loss_and_gradients(cfg, impl, torch.float64) for impl in ('blockwise', 'sdpa'))
    torch.testing.assert_close(blocks, whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_attend_is_the_softmax_of_the_scores(cfg: ModelConfig) -> None:
    """What torch's fused attention gives, with all gradients, against the sums written out."""
    attn = randomize(Transformer(cfg), seed=9).blocks[0].attn
    q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    u, h = torch.randn(2, 2, 9, 24, dtype=torch.float64, requires_grad=True)
    pos = attn.add_match(h, make_positions(cfg, h))
    alpha = attn.scores(q, k, pos, u, h).softmax(dim=-1)
    outputs = attn.attend(q, k, v, pos, u, h)[0], alpha @ v
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    inputs = [q, k, v, *attn.parameters(), *([u, h] if cfg.needs_h() else [])]
    found, right = (torch.autograd.grad(o.square().sum(), inputs, allow_unused=True,
                                        retain_graph=True) for o in outputs)
    for a, b in zip(found, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize('options', [dict(), dict(match_bias='token', kq_diag='scaled')], ids=str)
@pytest.mark.parametrize('impl', ['sdpa', 'blockwise', pytest.param('triton', marks=interpreted)])
def test_a_training_step_is_one_graph(impl: str, options: dict) -> None:
    """With fullgraph=True torch.compile refuses a break."""
    if impl == 'triton' and options:
        pytest.skip('the kernels have no whole gradient')
    cfg = ModelConfig(**{**SMALL, 'n_layer': 1, 'attn_steps': 2, **options})
    compiled = loss_and_gradients(cfg, impl, torch.float32, lambda model: torch.compile(
        model, fullgraph=True, backend='aot_eager'))
    for a, b in zip(loss_and_gradients(cfg, impl, torch.float32), compiled, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


def test_second_derivatives_need_torchs_math() -> None:
    """The fused attention has none on a CPU, and says so."""
    model = randomize(Transformer(ModelConfig(**TINY, attn='llama', mlp='llama')), seed=21)
    idx = torch.randint(50, (1, 9))

    def second() -> Tensor:
        gradient, = torch.autograd.grad(model(idx, idx)[1], model.embedding, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), model.embedding)[0]
    with sdpa_kernel(SDPBackend.MATH):
        assert second().isfinite().all() and second().any()
    with pytest.raises(RuntimeError):
        second()


# Which implementation runs

def test_attention_is_chosen_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, half = torch.device('cpu'), torch.device('cuda'), torch.bfloat16

    def chosen(device: torch.device, dtype: torch.dtype, impl: str = 'auto', compiled: bool = False,
               **options) -> str:
        with torch.device('meta'):
            model = Transformer(ModelConfig(**{**SMALL, **options}))
        monkeypatch.setattr(fast, 'device_of', lambda model: device)
        return fast.choose_attention(model, impl, dtype, compiled)
    llama, rope, alibi = dict(attn='llama'), dict(positions='rope'), dict(positions='alibi')
    assert chosen(cpu, torch.float32) == chosen(cpu, half, **llama, **alibi) == 'blockwise'
    assert chosen(cpu, torch.float32, **rope) == 'sdpa'
    assert chosen(cpu, torch.float32, compiled=True, **rope) == 'blockwise'  # the context is short
    if fast.HAS_TRITON:
        assert chosen(cpu, torch.float32, 'triton') == 'triton'  # interpreted
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    assert chosen(cpu, torch.float32, 'triton') == 'blockwise'
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
    assert chosen(gpu, torch.float32) == 'sdpa'
    # The whole gradient needs the weights, which neither the kernels nor torch give
    for options in dict(exact_update=True, kq_diag='shared'), dict(kq_diag='scaled'):
        assert chosen(gpu, half, **options) == chosen(cpu, torch.float32, **options) == 'blockwise'


@interpreted
def test_kernels_that_compute_something_else_are_not_used(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    model, idx = randomize(Transformer(ModelConfig(**SMALL)), seed=3).float(), torch.arange(9)[None]
    right = model(idx)[0]
    own = triton_attention.attention
    monkeypatch.setattr(triton_attention, 'attention', lambda *of: 1.001 * own(*of))
    assert fast.plug_in(model, 'triton') == 'sdpa'
    assert 'triton attention gives another output than' in capsys.readouterr().err
    assert torch.equal(model(idx)[0], right)
    monkeypatch.setattr(triton_attention, 'attention', lambda *of: 1 / 0)
    assert fast.plug_in(model, 'triton') == 'sdpa'
    assert 'triton attention does not run (ZeroDivisionError' in capsys.readouterr().err


def test_a_wrong_loss_in_parts_is_not_used(monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture) -> None:
    model, idx = Transformer(ModelConfig(**SMALL)), torch.arange(12)[None]
    monkeypatch.setattr(fast, 'two_at_a_time', lambda model, *of: 1.01 * model.loss(*of))
    fast.plug_in(model)
    assert 'the loss in parts gives another output' in capsys.readouterr().err
    assert 'loss' not in vars(model) and model(idx, idx)[1].isfinite()


# Whoever edits model.py runs the edit

def test_the_texts_are_model_pys() -> None:
    """Whoever changes one of these definitions looks whether what stands for it still does the
    same, and copies the new table into nanocem/fast.py."""
    today = {'NORM_EPS': same.DEFINITIONS['NORM_EPS']}
    for kind in ('llama', 'cem'):
        model = Transformer(ModelConfig(**SMALL, attn=kind, mlp=kind))
        for definitions in (fast.ATTENTION, fast.LOSS, fast.TABLES, fast.CACHE, fast.LLAMA):
            for owner, name in fast.owners(model, definitions):
                name = same.code_of(getattr(owner, name)).co_qualname
                today[name] = same.DEFINITIONS[name]
    assert today == fast.TEXTS, '\n' + ', '.join(
        f'{name!r}: {text!r}' for name, text in sorted(today.items()))


def soft_cap(attend: Callable) -> Callable:
    def capped(self, *args):
        o, update = attend(self, *args)
        return 0.97 * o, update
    return capped


def clamped(scores: Callable) -> Callable:
    return lambda self, *args: scores(self, *args).clamp(max=0.1)


def masked(bias: Callable) -> Callable:
    """A sliding window, which a causal mask alone has no room for: None and a number raise."""
    def windowed(self, pos, u, h):
        b = bias(self, pos, u, h)
        b = model_py.causal_mask(pos.distance) if b is None else b
        return b.masked_fill(pos.distance >= 3, -torch.inf)
    return windowed


def documents(hidden: Callable) -> Callable:
    """A token attends to its own document, which id 0 begins."""
    def hidden_of_documents(self, idx, cache=None):
        x = F.embedding(idx, self.embedding)
        pos = make_positions(self.cfg, x, cache)
        document = (idx == 0).cumsum(1)
        other = document[:, :, None] != document[:, None]
        mask = model_py.causal_mask(pos.distance).masked_fill(other, -torch.inf)
        pos = pos._replace(mask=mask[:, None])
        for block in self.blocks:
            x = block(x, pos)
        return self.norm(x)
    return hidden_of_documents


EDITS = {'attend': (CEMAttention, soft_cap), 'bias': (CEMAttention, masked),
         'hidden': (Transformer, documents)}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('options', [dict(), dict(positions='rope'), dict(kq_diag='shared')],
                         ids=str)
@pytest.mark.parametrize('edit', EDITS)
@pytest.mark.parametrize('place', ['subclass', 'class', 'wraps', 'object', 'partial'])
def test_an_edit_is_what_runs(place: str, edit: str, options: dict, dtype: torch.dtype,
                              monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture) -> None:
    """A method is another one in a subclass, in the class itself, there with the name of the old
    one, or on one object alone. A line names it, and the flag that does without."""
    model = randomize(Transformer(ModelConfig(**{**SMALL, **options})), seed=3).to(dtype)
    idx = torch.randint(5, (2, 12), generator=torch.Generator().manual_seed(1))
    unedited, _ = model(idx)
    kind, make = EDITS[edit]
    edited = make(getattr(kind, edit))
    objects = [model] if kind is Transformer else [block.attn for block in model.blocks]
    if place == 'subclass':
        for owner in objects:
            owner.__class__ = type('Edited', (kind,), {edit: edited})
    elif place == 'class':
        monkeypatch.setattr(kind, edit, edited)
    elif place == 'wraps':
        monkeypatch.setattr(kind, edit, functools.wraps(getattr(kind, edit))(edited))
    else:
        bind = MethodType if place == 'object' else functools.partial
        setattr(objects[-1], edit, bind(edited, objects[-1]))
    right, _ = model(idx)
    assert not torch.allclose(right, unedited)
    assert fast.plug_in(model, dtype=dtype, compiled=True, flags=True) == 'sdpa'
    line = capsys.readouterr().err
    assert edit in line and '--attn_impl=blockwise (on a GPU triton) insists' in line
    assert torch.equal(model(idx)[0], right)
    # The cache goes by text, too
    assert not fast.may_use_cache(model)
    assert edit in capsys.readouterr().err


@pytest.mark.parametrize('kq_diag', ['none', 'shared'])
@torch.no_grad()
def test_an_edit_of_scores_is_followed(kq_diag: str, capsys: pytest.CaptureFixture) -> None:
    """torch computes the scores inside attend. Where the layer's own are edited, these run."""
    model = randomize(Transformer(ModelConfig(**SMALL, kq_diag=kq_diag)), seed=3)
    idx = torch.arange(12)[None]
    unedited = model(idx)[0]
    for block in model.blocks:
        block.attn.__class__ = type('Edited', (CEMAttention,),
                                    {'scores': clamped(CEMAttention.scores)})
    assert fast.plug_in(model) == 'scores'
    assert 'scores' in capsys.readouterr().err
    logits = model(idx)[0]
    assert not torch.allclose(logits, unedited)
    # The same as where model.py's own lines need the scores
    fast.unplug(model)
    for block in model.blocks:
        block.attn.whole_gradient, block.attn.diagonal_update = True, lambda *of: torch.zeros(())
    torch.testing.assert_close(logits, model(idx)[0])


@torch.no_grad()
def test_an_edited_mask_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of two tokens, by a mask. torch's own causal mask would leave it out."""
    model = randomize(Transformer(ModelConfig(**SMALL, attn='llama')), seed=3)
    mask = model_py.causal_mask
    monkeypatch.setattr(model_py, 'causal_mask',
                        lambda distance: mask(distance).masked_fill(distance > 1, -torch.inf))
    idx = torch.arange(12)[None]
    assert fast.plug_in(model) == 'scores'
    other = idx.clone()
    other[0, 4] = 40
    changed = (model(idx)[0] != model(other)[0]).any(-1)[0]
    n_layer = model.cfg.n_layer
    assert changed.tolist() == [4 <= n <= 4 + n_layer for n in range(12)]


@pytest.mark.parametrize('flag', ['auto', 'parts', 'whole'])
@pytest.mark.parametrize('edit', ['loss', 'forward'])
def test_an_edited_loss_is_what_trains(edit: str, flag: str,
                                       capsys: pytest.CaptureFixture) -> None:
    class Edited(Transformer):
        pass
    if edit == 'loss':
        def loss(self, x, targets):
            return Transformer.loss(self, x, targets.masked_fill(targets == 3, -100))
        Edited.loss = loss
    else:
        def forward(self, idx, targets=None, next_only=False, cache=None):
            logits = F.linear(self.hidden(idx), self.head).clamp(-0.5, 0.5)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        Edited.forward = forward
    model, idx = Edited(ModelConfig(**SMALL)), torch.arange(12)[None]
    right = model(idx, idx)[1]
    fast.plug_in(model, loss=flag, flags=True)
    line = capsys.readouterr().err
    assert ('--loss_impl=parts insists' in line and edit in line) == (flag == 'auto')
    assert ('loss' in vars(model)) == (flag == 'parts')
    if flag != 'parts':
        torch.testing.assert_close(model(idx, idx)[1], right, rtol=1e-5, atol=0)


def test_comments_and_docstrings_are_no_edit(tmp_path: Path) -> None:
    """A line of model.py is changed, or a comment, and the scripts' code is as it is."""
    shutil.copytree(ROOT / 'nanocem', tmp_path / 'nanocem')
    shutil.copy(ROOT / 'configurator.py', tmp_path)
    lines = (ROOT / 'model.py').read_text(encoding='utf-8')
    script = """
import torch
from model import ModelConfig, Transformer
from nanocem.fast import may_use_cache, plug_in
model = Transformer(ModelConfig(size='nano', vocab_size=50, context_length=16, init_std=0.5))
right = model(torch.arange(16)[None])[0]
print(plug_in(model), may_use_cache(model))
assert torch.allclose(model(torch.arange(16)[None])[0], right, atol=1e-4)
"""
    for old, new, says in [
            ('    def bias(', '    # A new comment\n\n    def bias(', 'blockwise True'),
            ('"""Take the steps of Algorithm 1, MHA', '"""Step on, MHA', 'blockwise True'),
            ('scale=1 / self.tau', 'scale=1.5 / self.tau', 'sdpa False')]:
        edited = lines.replace(old, new)
        assert edited != lines
        (tmp_path / 'model.py').write_text(edited, encoding='utf-8')
        done = subprocess.run([sys.executable, '-c', script], cwd=tmp_path, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(says), done.stdout
        assert ('BaseAttention.attend' in done.stderr) == ('False' in says)


def test_a_cache_beside_an_mlp_that_looks_back_is_told(capsys: pytest.CaptureFixture) -> None:
    class LooksBack(model_py.CEMMLP):
        def forward(self, x):
            return super().forward(x + torch.roll(x, 6, dims=1))
    model = randomize(Transformer(ModelConfig(**SMALL)), seed=5)
    model.blocks[1].mlp.__class__ = LooksBack
    assert not fast.may_use_cache(model)
    assert 'LooksBack.forward' in capsys.readouterr().err


def test_a_plugged_model_is_saved_and_copied(tmp_path: Path) -> None:
    model, idx = Transformer(ModelConfig(**SMALL)), torch.arange(12)[None]
    assert fast.plug_in(model) == 'blockwise'
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


def test_a_plug_goes_and_a_method_of_someone_else_stays() -> None:
    model = Transformer(ModelConfig(**SMALL))
    assert fast.plug_in(model) == 'blockwise' and 'attend' in vars(model.blocks[1].attn)
    own = functools.partial(CEMAttention.attend, model.blocks[0].attn)
    model.blocks[0].attn.attend = own
    assert fast.plug_in(model, 'sdpa', loss='whole') == 'sdpa'
    assert model.blocks[0].attn.attend is own and 'loss' not in vars(model)
    assert 'attend' not in vars(model.blocks[1].attn)


def test_the_trials_disturb_no_random_numbers() -> None:
    model, state = Transformer(ModelConfig(**SMALL)), torch.get_rng_state()
    fast.plug_in(model)
    fast.plug_in(model, 'triton')
    assert torch.equal(torch.get_rng_state(), state)

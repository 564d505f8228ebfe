"""The model's mathematics, against autograd of the energies and slow formulas.

In float64 the sums that are compared round by 1e-14 to 1e-13; bounds are 1e-12 and more."""
import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.integrate import quad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import energy
import model as model_py
from model import (
    CEMMLP,
    SIZES,
    CEMAttention,
    ModelConfig,
    Preconditioner,
    Transformer,
    make_positions,
    phi,
    straight_through_sign,
)
from nanocem.hardware import flops_per_token

TINY = dict(d_model=24, n_layer=2, n_head=3, d_mlp=20, vocab_size=50, context_length=16)
OPTIONS = dict(
    attn=['llama', 'cem'], mlp=['llama', 'cem'], attn_steps=[1, 2, 3], mlp_steps=[1, 2],
    attn_reuse=[1, 2], mlp_reuse=[1, 2], tie=['none', 'kv', 'qo', 'both'],
    positions=['alibi', 'rope'], key_shift=['none', 'half'], value_shift=['none', 'half'],
    match_bias=['none', 'token'],
    kq_diag=['none', 'shared', 'per_head', 'scaled'], score_scale=['head', 'model'],
    residual=['raw', 'normed'], preconditioner=['none', 'diag', 'diag_lowrank'],
    exact_update=[False, True], untied_output=[False, True], mlp_energy=['gated', 'sign_convex'],
    mlp_match=['dims', 'params'], n_kv_head=[None, 1])
GROUPED = dict(n_head=4, n_kv_head=2)  # two heads of keys and values for four of queries


def randomize(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Convert to float64, and move every parameter from its initial value: zeros hide errors."""
    torch.manual_seed(seed)
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return module


def covering(seed: int, n: int) -> list[ModelConfig]:
    """Return n random valid configurations, or more, until every value of every option occurs."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    missing = {(name, value) for name, values in OPTIONS.items() for value in values}
    while len(sets) < n or missing:
        options = {name: values[int(torch.randint(len(values), (1,), generator=generator))]
                   for name, values in OPTIONS.items()}
        with contextlib.suppress(ValueError):  # options that contradict each other
            sets.append(ModelConfig(**TINY, **options))
            missing -= set(options.items())
    return sets


def update(sublayer: CEMAttention | CEMMLP, u: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Return the step, divided by eta, that forward takes at this u in the context h."""
    T, norms = sublayer.T, iter([h, u])
    sublayer.T = 1
    sublayer.norm.forward = lambda x: next(norms)
    pos = (make_positions(sublayer.cfg, u),) if isinstance(sublayer, CEMAttention) else ()
    x = h if sublayer.cfg.residual == 'normed' else torch.zeros_like(h)
    step = (sublayer(x, *pos) - x) / sublayer.eta
    del sublayer.norm.forward
    sublayer.T = T
    return step


def describe(cfg: ModelConfig) -> str:
    return '-'.join(str(getattr(cfg, k)) for k in OPTIONS)


SETS = [*covering(seed=0, n=40), *(ModelConfig(**TINY, attn='llama', mlp='llama', positions=p)
                                  for p in OPTIONS['positions'])]


# Sizes

def test_parameter_counts() -> None:
    expected = {'86m': 86_371_488, '108m': 108_052_896, '134m': 134_105_856, '162m': 162_813_024}
    with torch.device('meta'):
        for size, count in expected.items():
            cem = Transformer(ModelConfig(size=size))
            llama = Transformer(cem.cfg.llama())
            assert llama.num_params() == count
            assert llama.cfg == ModelConfig(size=size, attn='llama', mlp='llama')
            for part, fraction in (('attn', 1 / 2), ('mlp', 2 / 3)):
                ours, theirs = (sum(p.numel() for p in getattr(model.blocks[0], part).parameters())
                                for model in (cem, llama))
                assert ours / theirs == pytest.approx(fraction, rel=1e-3)
        matched = Transformer(ModelConfig(size='86m', attn='llama', mlp_match='params'))
        assert matched.num_params() == expected['86m']


@pytest.mark.parametrize('size', SIZES)
def test_a_width_brings_heads_and_an_mlp_of_its_own(size: str) -> None:
    """Those of every size are what its d_model alone gives, and another width has no size's name,
    and no size's d_mlp."""
    preset = ModelConfig(size=size)
    D = preset.d_model
    assert {name: getattr(preset, name) for name in SIZES[size]} == SIZES[size]
    derived = ModelConfig(size=size, d_model=D)
    assert derived == preset == ModelConfig(**SIZES[size]) and preset.size == size
    assert ModelConfig(d_model=D).d_mlp == preset.d_mlp
    for options in (dict(d_model=2 * D), dict(n_layer=99), dict(n_head=1), dict(d_mlp=2 * D)):
        other = ModelConfig(size=size, **options)
        assert other.size is None and ModelConfig(**vars(other)) == other
        assert other.llama().size is None
    wider = ModelConfig(size=size, d_model=2 * D)
    assert (wider.n_head, wider.d_mlp) == (2 * preset.n_head, 2 * math.ceil(8 * D / 3))


def test_a_model_of_nanogpts_shape() -> None:
    cfg = ModelConfig(d_model=128, n_layer=4, n_head=4)
    assert (cfg.size, cfg.n_head, cfg.d_mlp) == (None, 4, 342)
    # Heads divide the width, and are 64 wide or wider
    assert [ModelConfig(d_model=D).n_head for D in (7, 100, 128, 1000)] == [1, 1, 2, 10]


@pytest.mark.parametrize('cfg', [c for c in SETS if c.preconditioner == 'none'], ids=describe)
def test_flops_are_those_counted_by_torch(cfg: ModelConfig) -> None:
    """At one token of context nothing is masked away: torch's own count of products must agree."""
    model = Transformer(ModelConfig(**{**vars(cfg), 'context_length': 1}))
    # torch does not count the products inside its fused attention on a CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 1, dtype=torch.long))
    assert flops_per_token(model) == 3 * counter.get_total_flops()


def test_flops_of_an_edited_model_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider second layer, a third energy, and an edit that cannot be counted."""
    model = Transformer(ModelConfig(size='nano', vocab_size=50, context_length=64))
    before, D = flops_per_token(model), 32

    class Edited(Transformer):
        def __init__(self, cfg: ModelConfig):
            super().__init__(cfg)
            wide = ModelConfig(size='nano', vocab_size=50, d_mlp=186)
            self.blocks[1].mlp = CEMMLP(wide)
            self.third = CEMMLP(cfg)

        def hidden(self, idx: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return self.third(super().hidden(idx, cache))

    # 3 for forward and backward, 2 for a multiply-add, 3 products with W and V of each width
    more = 3 * 2 * 3 * (100 + 86) * D
    assert flops_per_token(Edited(model.cfg)) == before + more
    monkeypatch.setattr(CEMMLP, 'forward', lambda self, x: x * float(x.sum()))
    assert math.isnan(flops_per_token(model))


# Llama

@pytest.mark.parametrize('tie,look', [
    ('none', {}), ('both', {}), ('both', dict(key_shift='half', match_bias='token')),
    ('both', GROUPED), ('none', dict(**GROUPED, kq_diag='scaled'))], ids=str)
def test_cem_with_one_step_is_llama_with_tied_weights(tie: str, look: dict) -> None:
    shape = TINY | look
    cem = randomize(Transformer(ModelConfig(**shape, score_scale='head')), seed=2)
    llama = Transformer(ModelConfig(**shape, attn='llama', mlp='llama', tie=tie,
                                    positions='alibi'))
    state = cem.state_dict()
    for name in llama.state_dict():
        tied = name.replace('W_V', 'W_K').replace('W_O', 'W_Q').replace('W_d', 'V')
        state[name] = state[tied]
    llama.double().load_state_dict(state)
    idx = torch.randint(50, (3, 16))
    torch.testing.assert_close(cem(idx)[0], llama(idx)[0], rtol=0, atol=1e-12)
    if tie == 'both':  # a shared matrix counts once
        assert flops_per_token(llama) == flops_per_token(cem)
        untied = sum(block.mlp.W_d.numel() for block in llama.blocks)
        assert llama.num_params() == cem.num_params() + untied


@pytest.mark.parametrize('options', [
    dict(), GROUPED, dict(key_shift='half', match_bias='token', kq_diag='scaled')], ids=str)
def test_one_step_with_an_output_of_its_own_is_llama_with_values_tied_to_keys(
        options: dict) -> None:
    cfg = dict(**TINY | options, mlp='llama', positions='alibi', score_scale='head')
    cem = randomize(Transformer(ModelConfig(**cfg, untied_output=True)), seed=35)
    llama = Transformer(ModelConfig(**cfg, attn='llama', tie='kv')).double()
    llama.load_state_dict(cem.state_dict())
    idx = torch.randint(50, (2, 16))
    torch.testing.assert_close(cem(idx)[0], llama(idx)[0], rtol=0, atol=1e-12)
    cem.set_steps(attn_steps=2)
    assert not torch.allclose(cem(idx)[0], llama(idx)[0])


def untied(tied: Transformer, cfg: ModelConfig) -> Transformer:
    """Return a Llama with values of its own, whose W_V is the tied model's W_K."""
    state = tied.state_dict()
    state |= {name.replace('W_K', 'W_V'): w for name, w in state.items() if name.endswith('W_K')}
    model = Transformer(cfg).double()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize('options', [
    dict(), dict(positions='alibi', match_bias='token', kq_diag='scaled'),
    dict(positions='alibi', **GROUPED)], ids=str)
def test_shifted_values_that_equal_the_shifted_keys_are_tied_values(options: dict) -> None:
    """With W_V = W_K, key_shift and value_shift together are tie=kv with key_shift alone."""
    options = dict(attn='llama', mlp='llama', key_shift='half') | options
    tied = randomize(Transformer(ModelConfig(**TINY | options, tie='kv')), seed=37)
    shifted = untied(tied, ModelConfig(**TINY | options, value_shift='half'))
    unshifted = untied(tied, ModelConfig(**TINY | options))
    idx = torch.randint(50, (2, 16))
    torch.testing.assert_close(shifted(idx)[0], tied(idx)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(unshifted(idx)[0], tied(idx)[0])


# Grouped queries

@pytest.mark.parametrize('options', [
    dict(attn='llama', mlp='llama'), dict(attn='llama', tie='kv', positions='alibi'),
    dict(attn='llama', tie='kv', key_shift='half'), dict(attn='llama', tie='both', attn_reuse=2),
    dict(attn='llama', value_shift='half'), dict(attn_steps=2),
    dict(attn_steps=2, positions='rope', preconditioner='diag_lowrank'),
    dict(key_shift='half', match_bias='token', kq_diag='scaled'),
    dict(kq_diag='per_head', exact_update=True)], ids=str)
def test_a_group_shares_what_equal_heads_have(options: dict) -> None:
    """The logits are those of a model in which the heads of a group have equal keys and values."""
    grouped = randomize(Transformer(ModelConfig(**TINY | GROUPED, **options)), seed=34)
    K, G, D = 4, 2, 24
    state = grouped.state_dict()
    for name, w in state.items():
        if name.endswith(('W_K', 'W_V')):
            assert w.shape == (G * D // K, D)
            heads = w.view(G, D // K, D)
            state[name] = torch.cat([heads[k // (K // G)] for k in range(K)])
    whole = Transformer(ModelConfig(**TINY | dict(n_head=K), **options)).double()
    whole.load_state_dict(state)
    idx = torch.randint(50, (2, 16))
    torch.testing.assert_close(grouped(idx)[0], whole(idx)[0], rtol=0, atol=1e-12)


def test_as_many_heads_of_keys_as_of_queries_are_the_default() -> None:
    cfg = ModelConfig(**TINY)
    assert cfg == ModelConfig(**TINY, n_kv_head=3) and cfg.n_kv_head == 3
    assert ModelConfig(d_model=128).n_kv_head == ModelConfig(d_model=128).n_head == 2
    # A Llama that sets a budget of tokens has no groups
    assert ModelConfig(**TINY, n_kv_head=1).llama() == cfg.llama()
    for n_kv_head in (2, 4, 6):
        with pytest.raises(ValueError, match=f'n_head=3 is not .* of n_kv_head={n_kv_head}'):
            ModelConfig(**TINY, n_kv_head=n_kv_head)


# energy.py: the same layers by autograd

class WithDiagonal(energy.Interaction):
    def scores(self, u: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Add h_j . (d * u_i) / tau, d the key-query diagonal of all heads (Eq. 12)."""
        return super().scores(u, h) + ((u * self.d) @ h.mT)[:, None] / self.tau


class WithRoPE(energy.Interaction):
    def scores(self, u: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys by their positions, as complex numbers, in place of ALiBi."""
        i, R = torch.arange(u.shape[1]), u.shape[-1] // self.K
        angle = i[:, None] * 10_000.0 ** (-torch.arange(0, R, 2).double() / R)
        turn = torch.polar(torch.ones_like(angle), angle)                       # (J, R / 2)
        q, k = ((x @ W.T).unflatten(-1, (self.K, 2, -1)).transpose(1, 2)        # (B, K, J, 2, R/2)
                for x, W in ((u, self.W_Q), (h, self.W_K)))
        q, k = (torch.complex(x[..., 0, :], x[..., 1, :]) * turn for x in (q, k))
        return ((q @ k.mH).real / self.tau).masked_fill(i[:, None] < i, -torch.inf)


def make_both(cfg: ModelConfig, interaction: type) -> tuple:
    """Return a model of energy.py, one of model.py, and the pairs of their parameters, which have
    the same values. model.py's biases have no partner and are zero."""
    slow = energy.Transformer(cfg.d_model, cfg.n_head, cfg.d_mlp, cfg.n_layer, cfg.attn_steps)
    fast = Transformer(cfg).double()
    pairs = [(slow.embedding, fast.embedding), (slow.head, fast.head),
             (slow.norm.weight, fast.norm.gain)]
    for n, block in enumerate(fast.blocks):
        attn, mlp = slow.layers[2 * n], slow.layers[2 * n + 1]
        attn.__class__ = interaction
        if cfg.kq_diag == 'shared':
            attn.d = torch.nn.Parameter(torch.zeros(1, cfg.d_model))
            pairs.append((attn.d, block.attn.kq_diag))
        pairs += [(attn.W_Q, block.attn.W_Q), (attn.W_K, block.attn.W_K), (mlp.W, block.mlp.W),
                  (mlp.V, block.mlp.V), (attn.norm.weight, block.attn.norm.gain),
                  (mlp.norm.weight, block.mlp.norm.gain)]
    randomize(slow, seed=30)
    with torch.no_grad():
        for theirs, ours in pairs:
            ours.copy_(theirs)
    return slow, fast, pairs


@pytest.mark.parametrize(('options', 'interaction'), [
    (dict(attn_steps=1, mlp_steps=1), energy.Interaction),
    (dict(attn_steps=2, mlp_steps=2), energy.Interaction),
    (dict(attn_steps=3, mlp_steps=3), energy.Interaction),
    (dict(attn_steps=2, mlp_steps=2, positions='rope'), WithRoPE),
    (dict(attn_steps=2, mlp_steps=2, kq_diag='shared', exact_update=True), WithDiagonal)], ids=str)
def test_energy_py_is_model_py(options: dict, interaction: type) -> None:
    """Logits, all gradients, and the energies of every sublayer."""
    cfg = ModelConfig(**{**TINY, 'vocab_size': 256}, **options)
    slow, fast, pairs = make_both(cfg, interaction)
    idx = torch.randint(256, (2, 16))
    logits = slow(idx), fast(idx)[0]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-12)
    with torch.no_grad():  # energy.py's layers need a gradient all the same
        assert torch.equal(slow(idx), logits[0])
    for value in logits:
        F.cross_entropy(value.flatten(0, 1), idx.roll(-1, 1).flatten()).backward()
    for theirs, ours in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    u, h = torch.randn(2, 2, 16, cfg.d_model, dtype=torch.float64)
    sublayers = [sublayer for block in fast.blocks for sublayer in (block.attn, block.mlp)]
    for theirs, ours in zip(slow.layers, sublayers, strict=True):
        torch.testing.assert_close(ours.energy(u, h), theirs.energy(u, h), rtol=0, atol=1e-12)


# Energies

def u_and_h() -> tuple[torch.Tensor, torch.Tensor]:
    u, h = torch.randn(2, 2, 7, 24, dtype=torch.float64)
    return u.requires_grad_(), h


def slow_energy(attn: CEMAttention, u: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Compute Eq. 2 term by term, with A_k formed, for u and h (J, D):
    -tau sum_k log sum_{j <= i} exp(h_j^T A_k(i, j)^T u_i / tau + b_ijk)."""
    cfg, total = attn.cfg, []
    K, R = cfg.n_head, cfg.d_model // cfg.n_head
    tau = math.sqrt(R if cfg.score_scale == 'head' else cfg.d_model)

    def rotation(i: int) -> torch.Tensor:
        out = torch.zeros(R, R, dtype=torch.float64)
        for r in range(R // 2):
            angle = i * cfg.rope_theta ** (-2 * r / R)
            out[r, r] = out[r + R // 2, r + R // 2] = math.cos(angle)
            out[r, r + R // 2], out[r + R // 2, r] = -math.sin(angle), math.sin(angle)
        return out

    for i in range(len(h)):
        for k in range(K):
            g = k * cfg.n_kv_head // K  # the head of keys that head k of queries shares
            W_Q, W_K = attn.W_Q[k * R:(k + 1) * R], attn.W_K[g * R:(g + 1) * R]
            q = W_Q @ u[i]
            if cfg.untied_output:
                q = W_Q @ h[i] + attn.W_O[k * R:(k + 1) * R] @ (u[i] - h[i])
            scores = []
            for j in range(i + 1):
                before = h[j - 1] if j > 0 else torch.zeros_like(h[0])
                key = W_K @ h[j]
                if cfg.key_shift == 'half':
                    key = torch.cat([W_K[:R // 2] @ before, W_K[R // 2:] @ h[j]])
                if cfg.positions == 'rope':
                    key = rotation(i).T @ rotation(j) @ key
                a = q @ key
                if cfg.kq_diag != 'none':
                    d = attn.kq_diag[k if cfg.kq_diag == 'per_head' else 0]
                    g = attn.diag_weight[k] if cfg.kq_diag == 'scaled' else 1
                    a = a + g * (u[i] * d @ h[j])
                b = 0.0
                if cfg.match_bias != 'none':
                    match = (attn.match_diag * h[i]) @ before / math.sqrt(cfg.d_model)
                    b = attn.match_weight[k] * match
                if cfg.positions == 'alibi':
                    b = b + (attn.b_self[k] if i == j else attn.b_cross[k])
                    b = b - 2.0 ** -(k + 1) * (i - j)
                scores.append(a / tau + b)
            total.append(-tau * torch.stack(scores).logsumexp(0))
    return torch.stack(total).view(len(h), K).sum(1)


@pytest.mark.parametrize('positions', OPTIONS['positions'])
@pytest.mark.parametrize('kq_diag', OPTIONS['kq_diag'])
@pytest.mark.parametrize('score_scale', OPTIONS['score_scale'])
@pytest.mark.parametrize('look', [
    dict(), dict(key_shift='half'), dict(match_bias='token'),
    dict(key_shift='half', match_bias='token'),
    dict(untied_output=True), dict(**GROUPED, key_shift='half', match_bias='token')], ids=str)
def test_attention_update_is_minus_the_energys_gradient(
        positions: str, kq_diag: str, score_scale: str, look: dict) -> None:
    cfg = ModelConfig(**TINY | look, positions=positions, kq_diag=kq_diag, score_scale=score_scale,
                      exact_update=kq_diag in ('shared', 'per_head'))
    attn = randomize(Transformer(cfg), seed=3).blocks[0].attn
    u, h = u_and_h()
    energy = attn.energy(u, h)
    slow = torch.stack([slow_energy(attn, *pair) for pair in zip(u, h, strict=True)])
    torch.testing.assert_close(energy, slow, rtol=0, atol=1e-9)
    gradient, = torch.autograd.grad(slow.sum(), u)
    torch.testing.assert_close(update(attn, u, h), -gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize('mlp_energy', OPTIONS['mlp_energy'])
def test_mlp_update_is_minus_the_energys_gradient(mlp_energy: str) -> None:
    cfg = ModelConfig(**TINY, mlp_energy=mlp_energy)
    mlp = randomize(Transformer(cfg), seed=5).blocks[0].mlp
    u, h = u_and_h()
    energy = mlp.energy(u, h)
    gradient, = torch.autograd.grad(energy.sum(), u)
    torch.testing.assert_close(update(mlp, u, h), -gradient, rtol=0, atol=1e-9)
    # The energy of one token, unit by unit
    units = list(zip((mlp.V @ u[0, 0]).tolist(), (mlp.W @ h[0, 0]).tolist(), strict=True))
    if mlp_energy == 'gated':
        terms = [g * integral_of_silu(z) for z, g in units]
    else:
        terms = [abs(g) * math.log(1 + math.exp(z if g > 0 else -z)) for z, g in units]
    assert energy[0, 0].item() == pytest.approx(-sum(terms), abs=1e-8)


def integral_of_silu(z: float) -> float:
    def silu(s: float) -> float:
        return s / (1 + math.exp(-s))
    knee = min(z, -20)  # quad would miss the small part below or the large part above
    return quad(silu, -100, knee, epsabs=1e-13)[0] + quad(silu, knee, z, epsabs=1e-13)[0]


def test_phi_is_the_integral_of_silu_from_minus_infinity() -> None:
    zs = [-800.0, -30.0, -2.0, -1e-9, 0.0, 1e-9, 0.5, 3.0, 40.0, 800.0]
    values = phi(torch.tensor(zs, dtype=torch.float64))
    assert torch.isfinite(values).all()
    for z, value in list(zip(zs, values.tolist(), strict=True))[1:-1]:
        assert value == pytest.approx(integral_of_silu(z), rel=1e-10, abs=1e-10)
    z = torch.tensor([*zs, *torch.linspace(-4, 4, 9)], dtype=torch.float64, requires_grad=True)
    slope, = torch.autograd.grad(phi(z).sum(), z)
    torch.testing.assert_close(slope, torch.nn.functional.silu(z), rtol=1e-13, atol=1e-13)
    torch.autograd.gradgradcheck(phi, z[-9:])
    # energy.py has its own, since either file is copied alone
    z = torch.cat([z.detach(), torch.tensor(zs)])
    torch.testing.assert_close(phi(z), energy.phi(z), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize('kind', [CEMMLP, energy.Elementwise])
def test_the_mlp_energy_has_forward_derivatives(kind: type) -> None:
    """Its Hessian in u is -V^T diag(gamma * silu'(V u)) V, and jvp is the gradient times a vector.
    Forward over reverse, reverse over forward and reverse twice agree."""
    torch.manual_seed(31)
    args = (ModelConfig(**TINY),) if kind is CEMMLP else (24, 20, 1)
    mlp = randomize(kind(*args), seed=31)
    u, h, direction = torch.randn(3, 24, dtype=torch.float64)
    z, gamma = mlp.V @ u, mlp.W @ h
    slope = z.sigmoid() * (1 + z * (1 - z.sigmoid()))  # silu'(z)
    right = -(mlp.V.T * (gamma * slope)) @ mlp.V

    def of_u(u: torch.Tensor) -> torch.Tensor:
        return mlp.energy(u, h)

    def of_h(h: torch.Tensor) -> torch.Tensor:
        return mlp.energy(u, h)

    for twice in (hessian(of_u), jacfwd(jacfwd(of_u)), jacrev(jacfwd(of_u)), jacrev(jacrev(of_u))):
        torch.testing.assert_close(twice(u), right, rtol=0, atol=1e-12)
    for function, x in ((of_u, u), (of_h, h)):
        _, derivative = jvp(function, (x,), (direction,))
        torch.testing.assert_close(derivative, grad(function)(x) @ direction, rtol=0, atol=1e-12)
    each = vmap(hessian(of_u))(torch.stack([u, u]))
    torch.testing.assert_close(each, right.expand(2, -1, -1), rtol=0, atol=1e-12)


def test_straight_through_sign_passes_gradients_to_gamma() -> None:
    torch.manual_seed(6)
    gamma, z = torch.randn(2, 5, dtype=torch.float64)
    gamma.requires_grad_()
    signed = z * straight_through_sign(gamma)
    torch.testing.assert_close(signed.detach(), z * gamma.detach().sign())
    gradient, = torch.autograd.grad(signed.sum(), gamma)
    assert torch.equal(gradient, z)
    large = torch.tensor([-300.0, 300.0], dtype=torch.bfloat16)  # too coarse for x + (sign - x)
    assert straight_through_sign(large).tolist() == [-1, 1]


# Preconditioners

@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('kind', OPTIONS['preconditioner'])
def test_folded_preconditioner_equals_the_dense_one(kind: str, exact: bool) -> None:
    """sum_k P_k W_k^Q^T o_k with each P_k formed as in Eq. 13, and P_mlp V^T g likewise."""
    cfg = ModelConfig(**TINY, preconditioner=kind, kq_diag='per_head', exact_update=exact)
    block = randomize(Transformer(cfg), seed=7).blocks[0]

    def dense(P: Preconditioner, k: int) -> torch.Tensor:
        out = torch.eye(24, dtype=torch.float64)
        if P.diag is not None:
            out = torch.diag(F.softplus(math.sqrt(24) * P.diag[k]))
        return out if P.left is None else out + P.left[k] @ P.right[k].T + P.right[k] @ P.left[k].T

    u, h = torch.randn(2, 1, 7, 24, dtype=torch.float64)
    attn, mlp = block.attn, block.mlp
    queries, keys = (attn.split_heads(F.linear(x, W)) for x, W in ((u, attn.W_Q), (h, attn.W_K)))
    alpha = attn.scores(queries, keys, make_positions(cfg, u), u, h).softmax(dim=-1)
    slow = 0
    for k in range(3):
        step = (alpha[:, k] @ keys[:, k]) @ attn.W_Q.unflatten(0, (3, 8))[k]
        if exact:
            step = step + attn.kq_diag[k] * (alpha[:, k] @ h)
        slow = slow + step @ dense(attn.P, k).T
    torch.testing.assert_close(update(attn, u, h), slow, rtol=0, atol=1e-10)
    slow = (F.linear(h, mlp.W) * F.silu(u @ mlp.V.T)) @ mlp.V @ dense(mlp.P, 0).T
    torch.testing.assert_close(update(mlp, u, h), slow, rtol=0, atol=1e-10)


@pytest.mark.parametrize('n_head', [1, 3, 8, 12, 32])
def test_alibis_slopes(n_head: int) -> None:
    """2^-k below eight heads, else K slopes in equal ratios that end at 1/256."""
    cfg = ModelConfig(**{**TINY, 'n_head': n_head, 'd_model': 2 * n_head})
    with torch.no_grad():
        x = torch.zeros(1, 2, 1)
        bias = Transformer(cfg).blocks[0].attn.bias(make_positions(cfg, x), x, x)
    m = -bias[:, 1, 0].double()
    expected = [0.5 ** k if n_head < 8 else 256.0 ** (-k / n_head) for k in range(1, n_head + 1)]
    torch.testing.assert_close(m, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


def test_initial_weights_are_the_papers() -> None:
    options = dict(preconditioner='diag_lowrank', kq_diag='shared')
    model = Transformer(ModelConfig(size='mini', vocab_size=500, **options))
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    assert model.embedding.std().item() == pytest.approx(1, rel=0.1)
    for w in (model.head, attn.W_Q, attn.W_K, mlp.W, mlp.V):
        assert w.std().item() == pytest.approx(0.02 * math.sqrt(768 / 64), rel=0.1)
    assert (attn.norm.gain == 1).all() and torch.equal(attn.kq_diag, torch.zeros(1, 64))
    P = mlp.P
    assert P.left.shape == (1, 64, 16) and attn.P.left.shape == (4, 64, 4)
    assert P.left.std().item() == pytest.approx(0.02, rel=0.2) and not P.right.any()
    torch.testing.assert_close(F.softplus(8 * P.diag), torch.full((1, 64), math.log(1 + math.e)))


# Every option set

@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_a_later_token_changes_no_earlier_logit(cfg: ModelConfig) -> None:
    model, idx = randomize(Transformer(cfg), seed=9), torch.randint(50, (2, 16))
    changed = idx.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 50
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_gradients_reach_every_parameter(cfg: ModelConfig) -> None:
    model = randomize(Transformer(cfg), seed=11)
    model(*torch.randint(50, (2, 2, 9)))[1].backward()
    for name, p in model.named_parameters():
        assert p.grad.any() and torch.isfinite(p.grad).all(), name


@pytest.mark.parametrize('kind', OPTIONS['attn'])
def test_reuse_applies_a_sublayer_to_its_own_output(kind: str) -> None:
    cfg = ModelConfig(**TINY, attn=kind, mlp=kind, attn_reuse=3, mlp_reuse=2)
    block = randomize(Transformer(cfg), seed=12).blocks[0]
    x = torch.randn(2, 8, 24, dtype=torch.float64)
    pos = make_positions(cfg, x)
    reused = block(x, pos)
    for _ in range(3):
        x = block.attn(x, pos)
    torch.testing.assert_close(block.mlp(block.mlp(x)), reused)


def test_steps_change_at_test_time() -> None:
    idx = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(13))
    eta = dict(attn_step_size=0.5, mlp_step_size=0.3)
    two, four = (Transformer(ModelConfig(**TINY, **eta, attn_steps=t, mlp_steps=t + 1))
                 for t in (2, 4))
    four.double().load_state_dict(randomize(two, seed=13).state_dict())
    assert not torch.allclose(two(idx)[0], four(idx)[0])
    two.set_steps(4, 5)
    with pytest.raises(ValueError, match='mlp_steps=0: expected 1, 2'):
        two.set_steps(mlp_steps=0)
    assert torch.equal(two(idx)[0], four(idx)[0])


@pytest.mark.parametrize('options', [
    dict(exact_update=True, kq_diag='per_head'), dict(attn='llama', mlp='llama'),
    dict(attn_steps=2, mlp_steps=2), dict(positions='rope', kq_diag='shared'),
    dict(match_bias='token', kq_diag='scaled')], ids=str)
def test_weights_in_bfloat16(options: dict) -> None:
    """Rounding alone explains the logits of a model in bfloat16, which also generates."""
    model = randomize(Transformer(ModelConfig(**TINY, **options)), seed=19)
    idx = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(20))
    with torch.no_grad():
        exact, _ = model(idx)
        rounded, _ = model.to(torch.bfloat16)(idx)
        longer = model.generate(idx, 4, temperature=0.0)
    assert rounded.dtype == torch.bfloat16 and longer.shape == (2, 12)
    assert (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize('residual', OPTIONS['residual'])
def test_three_steps_are_a_loop_of_single_steps(residual: str) -> None:
    cfg = ModelConfig(**TINY, residual=residual, attn_steps=3, mlp_steps=3)
    block = randomize(Transformer(cfg), seed=14).blocks[0]
    x0 = torch.randn(2, 7, 24, dtype=torch.float64)
    for sublayer in (block.attn, block.mlp):
        pos = (make_positions(cfg, x0),) if sublayer is block.attn else ()
        h = sublayer.norm(x0)
        x = {'raw': x0, 'normed': h}[residual]
        for _ in range(3):
            x = x + sublayer.eta * update(sublayer, sublayer.norm(x), h)
        torch.testing.assert_close(sublayer(x0, *pos), x, rtol=0, atol=1e-11)


def test_generate_calls_the_module_without_logits_of_all_positions() -> None:
    """Each new token is one forward pass, with its hooks, and one product with the head of the last
    position alone."""
    model = Transformer(ModelConfig(**TINY))
    shapes = []
    model.register_forward_hook(lambda module, inputs, output: shapes.append(output[0].shape))
    idx = torch.randint(50, (2, 5))
    longer = model.generate(idx, 3, temperature=0.0)
    assert shapes == [(2, 50)] * 3
    for n in range(5, 8):  # the likeliest token after all ids before it
        assert torch.equal(longer[:, n], model(longer[:, :n])[0][:, -1].argmax(dim=-1))
    torch.testing.assert_close(model(idx, next_only=True)[0], model(idx)[0][:, -1])


def test_fsdp_trains_and_generates(tmp_path: Path) -> None:
    """Sharded weights are whole only inside a call of the module."""
    model, plain = (Transformer(ModelConfig(**TINY)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        mesh = init_device_mesh('cpu', (1,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        idx = torch.randint(50, (2, 9))
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        assert torch.equal(model.generate(idx, 3, temperature=0.0),
                           plain.generate(idx, 3, temperature=0.0))
    finally:
        dist.destroy_process_group()


def test_top_k_draws_the_k_likeliest_tokens_and_no_other() -> None:
    model = randomize(Transformer(ModelConfig(**TINY)), seed=33)
    idx = torch.randint(50, (1, 5), generator=torch.Generator().manual_seed(33))
    likeliest = model(idx)[0][0, -1].topk(50).indices.tolist()
    for k in (1, 2, 3):
        drawn = model.generate(idx.expand(400, -1), 1, temperature=50.0, top_k=k,
                               generator=torch.Generator().manual_seed(k))[:, -1]
        assert set(drawn.tolist()) == set(likeliest[:k])


def test_top_k_draws_from_k_tokens_where_more_are_equal() -> None:
    """As logits in bfloat16 often are; with k = 1 it is the same token whatever the seed."""
    model = Transformer(ModelConfig(size='nano', vocab_size=50, context_length=8))
    torch.nn.init.zeros_(model.head)  # all logits are equal
    idx = torch.zeros(400, 1, dtype=torch.long)
    for k in (1, 3, 10):
        drawn = model.generate(idx, 1, top_k=k, generator=torch.Generator().manual_seed(k))[:, 1]
        assert len(drawn.unique()) == k


@pytest.mark.parametrize('name', ['attn', 'mlp'])
def test_energies_of_another_shape_are_refused(name: str) -> None:
    """They would be broadcast: one token's u with five h, or one text's h with two u."""
    sublayer = getattr(Transformer(ModelConfig(**TINY)).blocks[0], name)
    h = torch.randn(2, 5, 24)
    assert sublayer.energy(h, h).shape == (2, 5)
    for u, context in ((h[:, :1], h), (h[:1], h), (h, h[:, :1]), (h, h[:1]), (h[0], h)):
        with pytest.raises(ValueError, match='expected a state u for each h'):
            sublayer.energy(u, context)


def test_targets_of_another_shape_are_refused() -> None:
    model = Transformer(ModelConfig(**TINY))
    with pytest.raises(ValueError, match='a target for each token'):
        model(torch.zeros(2, 16, dtype=torch.long), torch.zeros(16, 2, dtype=torch.long))


def test_energy_py_as_a_library() -> None:
    """Its layers take the same steps under no_grad and inference_mode and with frozen weights, and
    phi has vmap, forward and backward."""
    torch.manual_seed(3)
    layers, x = energy.Transformer(D=16, K=2, width=24, T=2).layers, torch.randn(2, 5, 16)
    expected = layers(x)
    with torch.no_grad():
        assert torch.equal(layers(x), expected)
    with torch.inference_mode():
        inside = layers(x + 0)  # its input is made there
    assert torch.equal(inside, expected)
    layers.requires_grad_(False)
    assert torch.equal(layers(x), expected)
    x.requires_grad_()
    assert torch.equal(torch.autograd.grad(layers(x).sum(), x)[0].isfinite(), torch.ones(2, 5, 16))
    z = torch.linspace(-9, 9, 12).view(3, 4)
    for each in energy.phi, phi:  # the second is model.py's
        assert torch.equal(torch.func.vmap(each)(z), each(z))
        gradients = torch.func.vmap(torch.func.grad(lambda row, each=each: each(row).sum()))(z)
        torch.testing.assert_close(gradients, torch.nn.functional.silu(z))


@pytest.mark.parametrize('n', [None, 0, 256])
def test_energy_py_says_what_text_it_needs(n: int | None, tmp_path: Path) -> None:
    path = tmp_path / 'a'
    path.mkdir() if n is None else path.write_bytes(b'x' * n)
    with pytest.raises(SystemExit, match='a: expected a file of more than 256 bytes'):
        energy.main(str(path))


def test_energy_py_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match='none: no such file'):
        energy.main(f'{tmp_path}/none')


# What other programs do with a model

@pytest.mark.parametrize('options', [
    dict(tie='both'), dict(tie='kv', key_shift='half'), dict(tie='qo', positions='alibi')], ids=str)
def test_a_tied_model_stays_tied_wherever_its_weights_come_from(options: dict) -> None:
    """Made on the meta device, and given weights by assign=True or in place."""
    cfg = ModelConfig(**TINY, **options, attn='llama', mlp='llama')
    model = randomize(Transformer(cfg), seed=31)
    idx = torch.randint(50, (2, 9))
    state, right = model.state_dict(), model(idx)[0]
    for assign in True, False:
        with torch.device('meta'):
            other = Transformer(cfg)
        if not assign:
            other = other.double().to_empty(device='cpu')
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(idx)[0], right) and other.num_params() == model.num_params()


def test_rotations_are_a_table_that_no_cast_rounds_and_that_grows(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no weight, and is made once for each device, dtype and length. Inference may make it,
    and training go on."""
    cfg = ModelConfig(**TINY, attn='llama', mlp='llama')
    made, own = [], model_py.rope_table
    monkeypatch.setattr(model_py, 'rope_table',
                        lambda cfg, x, length: made.append(length) or own(cfg, x, length))
    model = randomize(Transformer(cfg), seed=32).float()
    assert not [name for name in model.state_dict() if 'table' in name]
    for length in (5, 16, 9, 20, 17):  # the context is 16
        idx = torch.arange(length)[None]
        with torch.inference_mode():
            found = model(idx)[0]
        assert torch.equal(found, model(idx, idx) and model(idx)[0])
        model(idx, idx)[1].backward()
    assert made == [16, 20]
    # In float64 it is exact, and in bfloat16 it stays in float32
    idx = torch.arange(16)[None]
    x = torch.zeros(1, 16, 24, dtype=torch.float64)
    model.double()(idx)
    assert torch.equal(model.table[0][:16], own(cfg, x, 16)[0])
    model.bfloat16()(idx)
    assert model.table[0].dtype == torch.float32


@pytest.mark.parametrize('options', [
    dict(attn='llama', mlp='llama'), dict(key_shift='half', match_bias='token', kq_diag='scaled')],
    ids=str)
def test_torch_export_takes_any_length(options: dict) -> None:
    """Up to the context's with RoPE, as long as its table is."""
    cfg = ModelConfig(**{**TINY, 'context_length': 80, 'n_layer': 1}, **options)
    model = Transformer(cfg)
    sizes = {0: torch.export.Dim('B'), 1: torch.export.Dim('J', max=80)}
    with torch.no_grad():
        exported = torch.export.export(model, (torch.randint(50, (3, 40)),),
                                       dynamic_shapes=(sizes,)).module()
        for shape in ((2, 2), (5, 80)):
            idx = torch.randint(50, shape)
            torch.testing.assert_close(exported(idx)[0], model(idx)[0], rtol=0, atol=1e-5)

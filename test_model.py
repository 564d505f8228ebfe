"""The model's mathematics: against Hugging Face, autograd of the stated energy, slow formulas, and its own readable path."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from torch.utils.flop_counter import FlopCounterMode

from model import SIZES, Attention, Cache, ModelConfig, Phi, Preconditioner, Transformer, positions

TINY = dict(d_model=24, n_layer=2, n_head=3, d_mlp=20, vocab_size=50, context_length=16)
OPTIONS = dict(
    attn=['llama', 'cem'], mlp=['llama', 'cem'], attn_steps=[1, 2, 3], mlp_steps=[1, 2], positions=['alibi', 'rope'],
    kq_diag=['none', 'shared', 'per_head'], score_scale=['head', 'model'], residual=['normed', 'raw'],
    preconditioner=['none', 'diag', 'diag_lowrank'], exact_update=[False, True], mlp_energy=['gated', 'sign_convex'],
    mlp_match=['dims', 'params'])


def randomize(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Every parameter away from its start (zeros hide errors), in float64."""
    torch.manual_seed(seed)
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return module


def valid(options: dict) -> ModelConfig | None:
    """A tiny model of these options, or None where they contradict each other."""
    try:
        return ModelConfig(**TINY, **options)
    except ValueError:
        return None


def covering(seed: int, n: int) -> list[ModelConfig]:
    """n random valid option sets in which every value of every option occurs."""
    random = torch.Generator().manual_seed(seed)
    sets = []
    while len(sets) < n or any(v not in {getattr(c, k) for c in sets} for k, vs in OPTIONS.items() for v in vs):
        drawn = {k: vs[int(torch.randint(len(vs), (1,), generator=random))] for k, vs in OPTIONS.items()}
        if cfg := valid(drawn):
            sets.append(cfg)
    return sets


def describe(cfg: ModelConfig) -> str:
    return '-'.join(str(getattr(cfg, k)) for k in OPTIONS)


SETS = covering(seed=0, n=40)
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other


# Sizes

def test_parameter_counts() -> None:
    expected = {'86m': 86_371_488, '108m': 108_052_896, '134m': 134_105_856, '162m': 162_813_024}
    with torch.device('meta'):
        for size, count in expected.items():
            llama = Transformer(ModelConfig(size=size).llama())
            cem = Transformer(ModelConfig(size=size, preconditioner='none', kq_diag='none'))
            assert llama.num_params() == count
            for part, share in (('attn', 1 / 2), ('mlp', 2 / 3)):
                ours, theirs = (sum(p.numel() for p in getattr(m.blocks[0], part).parameters()) for m in (cem, llama))
                assert ours / theirs == pytest.approx(share, rel=1e-3)
        assert len(Transformer(ModelConfig(size='256m')).blocks) == SIZES['256m']['n_layer'] + 2
        matched = Transformer(ModelConfig(size='86m', attn='llama', mlp_match='params', preconditioner='none', attn_steps=1))
        assert matched.num_params() == expected['86m']


@pytest.mark.parametrize('cfg', [c for c in SETS if c.preconditioner == 'none'], ids=describe)
def test_flops_are_those_counted_by_torch(cfg: ModelConfig) -> None:
    """At one token of context nothing is masked away, so that torch's own count of products must agree."""
    cfg.context_length, cfg.attn_impl = 1, 'math'
    model = Transformer(cfg)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 1, dtype=torch.long))
    assert counter.get_total_flops() == model.flops_per_token(training=False)
    assert model.estimate_mfu(100.0, 1e6) == pytest.approx(3 * counter.get_total_flops() * 100 / 1e6)


# Llama

@pytest.mark.parametrize('changes', [{}, {'num_key_value_heads': 2}, {'tie_word_embeddings': True},
                                     {'rope_parameters': {'rope_type': 'default', 'rope_theta': 500.0}}])
def test_logits_equal_hugging_face(changes: dict) -> None:
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(1)
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**dict(
        vocab_size=100, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2), **changes})).eval()
    idx = torch.randint(100, (2, 40))
    with torch.no_grad():
        theirs = hf(idx).logits
        ours, _ = Transformer.from_hf(hf)(idx)
        assert (ours - theirs).abs().max() < 1e-4
        if not changes:
            from_state, _ = Transformer.from_hf(hf.state_dict(), n_head=4)(idx)
            assert torch.equal(from_state, ours)
            loss = Transformer.from_hf(hf)(idx[:, :-1], idx[:, 1:])[1]
            assert loss.item() == pytest.approx(hf(idx, labels=idx).loss.item(), abs=1e-5)
            with pytest.raises(ValueError, match='n_head'):
                Transformer.from_hf(hf.state_dict())


def test_cem_with_one_step_is_llama_with_tied_weights() -> None:
    shared = dict(TINY, attn_steps=1, mlp_steps=1, positions='alibi')
    cem = randomize(Transformer(ModelConfig(**shared, kq_diag='none', preconditioner='none', residual='raw',
                                            score_scale='head')), seed=2)
    llama = Transformer(ModelConfig(**shared, attn='llama', mlp='llama')).double()
    state = cem.state_dict()
    for i in range(TINY['n_layer']):
        for tied, free in (('attn.W_K', 'attn.W_V'), ('attn.W_Q', 'attn.W_O'), ('mlp.V', 'mlp.W_d')):
            state[f'blocks.{i}.{free}'] = state[f'blocks.{i}.{tied}']
    llama.load_state_dict(state)
    idx = torch.randint(50, (3, 16))
    torch.testing.assert_close(cem(idx)[0], llama(idx)[0], rtol=0, atol=1e-12)


# Energies

ENERGIES = [dict(positions=p, kq_diag=d, score_scale=s, exact_update=d != 'none')
            for p, d, s in itertools.product(OPTIONS['positions'], OPTIONS['kq_diag'], OPTIONS['score_scale'])]


def slow_energy(attn: Attention, u: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Eq. 2 word for word: -tau sum_k log sum_{j <= i} exp(h_j^T A_k(i, j)^T u_i / tau + b_ijk), A_k formed."""
    cfg, total = attn.cfg, []
    K, R = cfg.n_head, cfg.d_model // cfg.n_head
    tau = math.sqrt(R if cfg.score_scale == 'head' else cfg.d_model)
    def R_matrix(i: int) -> torch.Tensor:
        out = torch.zeros(R, R, dtype=torch.float64)
        for r in range(R // 2):
            angle = i * cfg.rope_theta ** (-2 * r / R)
            out[r, r] = out[r + R // 2, r + R // 2] = math.cos(angle)
            out[r, r + R // 2], out[r + R // 2, r] = -math.sin(angle), math.sin(angle)
        return out
    for i in range(len(h)):
        for k in range(K):
            W_Q, W_K = attn.W_Q[k * R:(k + 1) * R], attn.W_K[k * R:(k + 1) * R]
            scores = []
            for j in range(i + 1):
                A = W_Q.T @ R_matrix(i).T @ R_matrix(j) @ W_K if cfg.positions == 'rope' else W_Q.T @ W_K
                if cfg.kq_diag != 'none':
                    A = A + torch.diag(attn.kq_diag[k if cfg.kq_diag == 'per_head' else 0])
                b = 0.0
                if cfg.positions == 'alibi':
                    b = -2.0 ** (-8 * (k + 1) / K) * (i - j) + (attn.b_self[k] if i == j else attn.b_cross[k])
                scores.append(u[i] @ A @ h[j] / tau + b)
            total.append(-tau * torch.stack(scores).logsumexp(0))
    return torch.stack(total).view(len(h), K).sum(1)


@pytest.mark.parametrize('options', ENERGIES, ids=lambda o: '-'.join(map(str, o.values())))
def test_attention_update_is_minus_the_energys_gradient(options: dict) -> None:
    cfg = ModelConfig(**TINY, preconditioner='none', **options)
    attn = randomize(Transformer(cfg), seed=3).blocks[0].attn
    u, h = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True), torch.randn(2, 7, 24, dtype=torch.float64)
    energy = attn.energy(u, h)
    slow = torch.stack([slow_energy(attn, *pair) for pair in zip(u, h, strict=True)])
    torch.testing.assert_close(energy, slow, rtol=0, atol=1e-9)
    gradient, = torch.autograd.grad(slow.sum(), u)
    update = attn.update(u, attn.context(h, positions(cfg, 7, dtype=torch.float64)), attn.output_weight())
    torch.testing.assert_close(update, -gradient, rtol=0, atol=1e-9)


def test_algorithm_1_leaves_out_the_diagonals_part_of_the_gradient() -> None:
    cfg = ModelConfig(**TINY, preconditioner='none', kq_diag='shared')
    attn = randomize(Transformer(cfg), seed=4).blocks[0].attn
    u, h = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True), torch.randn(2, 7, 24, dtype=torch.float64)
    gradient, = torch.autograd.grad(attn.energy(u, h).sum(), u)
    context = attn.context(h, positions(cfg, 7, dtype=torch.float64))
    alpha = attn.scores(attn.query(u, context), u, context).softmax(-1)
    missing = (attn.kq_diag * (alpha @ h[:, None])).sum(1)
    torch.testing.assert_close(attn.update(u, context, attn.output_weight()) + missing, -gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize('mlp_energy', OPTIONS['mlp_energy'])
def test_mlp_update_is_minus_the_energys_gradient(mlp_energy: str) -> None:
    cfg = ModelConfig(**TINY, preconditioner='none', mlp_energy=mlp_energy)
    mlp = randomize(Transformer(cfg), seed=5).blocks[0].mlp
    u, h = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True), torch.randn(2, 7, 24, dtype=torch.float64)
    energy = mlp.energy(u, h)
    gradient, = torch.autograd.grad(energy.sum(), u)
    gamma = F.linear(h, mlp.W)
    torch.testing.assert_close(mlp.update(u, gamma, mlp.output_weight()), -gradient, rtol=0, atol=1e-9)
    z = (mlp.V @ u[0, 0]).detach().numpy()  # one energy by numerical integration
    g = gamma[0, 0].detach().numpy()
    if mlp_energy == 'sign_convex':
        z, g = z * (g > 0) - z * (g < 0), abs(g)
    slow = -sum(gi * quad(lambda s: s / (1 + math.exp(-s)), -60, zi, epsabs=1e-12)[0] for gi, zi in zip(g, z, strict=True))
    assert energy[0, 0].item() == pytest.approx(slow, abs=1e-8)


def test_phi_is_the_integral_of_silu_from_minus_infinity() -> None:
    z = torch.tensor([-800.0, -30.0, -2.0, -1e-9, 0.0, 1e-9, 0.5, 3.0, 40.0, 800.0], dtype=torch.float64)
    assert torch.isfinite(Phi.apply(z)).all()
    for zi in z.tolist()[1:-1]:
        integral = sum(quad(lambda s: s / (1 + math.exp(-s)), a, b, epsabs=1e-13)[0]
                       for a, b in ((-100, min(zi, -20)), (min(zi, -20), zi)))
        assert Phi.apply(torch.tensor(zi, dtype=torch.float64)).item() == pytest.approx(integral, rel=1e-10, abs=1e-10)
    torch.autograd.gradcheck(Phi.apply, torch.linspace(-4, 4, 9, dtype=torch.float64, requires_grad=True))


def test_straight_through_sign_passes_gradients_to_gamma() -> None:
    mlp = randomize(Transformer(ModelConfig(**TINY, mlp_energy='sign_convex')), seed=6).blocks[0].mlp
    gamma = torch.randn(5, dtype=torch.float64, requires_grad=True)
    z = torch.randn(5, dtype=torch.float64)
    signed = mlp.signed(z, gamma)
    torch.testing.assert_close(signed.detach(), z * gamma.detach().sign())
    gradient, = torch.autograd.grad(signed.sum(), gamma)
    assert torch.equal(gradient, z)


# Preconditioners

@pytest.mark.parametrize('kind, exact', list(itertools.product(OPTIONS['preconditioner'], [False, True])))
def test_folded_preconditioner_equals_the_dense_one(kind: str, exact: bool) -> None:
    """sum_k P_k W_k^Q^T o_k with each P_k formed as in Eq. 13, and P_mlp V^T g likewise."""
    cfg = ModelConfig(**TINY, preconditioner=kind, kq_diag='per_head', exact_update=exact)
    block = randomize(Transformer(cfg), seed=7).blocks[0]
    def dense(P: Preconditioner, k: int) -> torch.Tensor:
        if kind == 'none':
            return torch.eye(24, dtype=torch.float64)
        out = torch.diag(F.softplus(math.sqrt(24) * P.p[k]))
        return out if P.U is None else out + P.U[k] @ P.V[k].T + P.V[k] @ P.U[k].T
    u, h = torch.randn(2, 1, 7, 24, dtype=torch.float64)
    attn, mlp = block.attn, block.mlp
    context = attn.context(h, positions(cfg, 7, dtype=torch.float64))
    alpha = attn.scores(attn.query(u, context), u, context).softmax(-1)
    slow = 0
    for k in range(3):
        step = (alpha[:, k] @ context.k[:, k]) @ attn.per_head(attn.W_Q)[k]
        if exact:
            step = step + attn.kq_diag[k] * (alpha[:, k] @ h)
        slow = slow + step @ dense(attn.P, k).T
    torch.testing.assert_close(attn.update(u, context, attn.output_weight()), slow, rtol=0, atol=1e-10)
    gamma = F.linear(h, mlp.W)
    slow = (gamma * F.silu(u @ mlp.V.T)) @ mlp.V @ dense(mlp.P, 0).T
    torch.testing.assert_close(mlp.update(u, gamma, mlp.output_weight()), slow, rtol=0, atol=1e-10)


def test_preconditioner_starts_as_the_paper_says() -> None:
    model = Transformer(ModelConfig(size='mini', vocab_size=50))
    P = model.blocks[0].mlp.P
    assert P.U.shape == (1, 64, 16) and model.blocks[0].attn.P.U.shape == (8, 64, 4)
    torch.testing.assert_close(F.softplus(8 * P.p), torch.full((1, 64), math.log(1 + math.e)))  # softplus(1)
    assert P.U.std().item() == pytest.approx(0.02, rel=0.2) and not P.V.any()


# Every option set

@pytest.mark.parametrize('cfg', [*(c for c in SETS if not c.exact_update),
                                 ModelConfig(**{**TINY, 'd_model': 30})], ids=describe)  # a width that the fused path pads
def test_faster_attention_equals_the_readable_path(cfg: ModelConfig) -> None:
    model, idx = randomize(Transformer(cfg), seed=8), torch.randint(50, (2, 17))
    results = []
    for impl in ('math', 'sdpa', 'rows'):
        cfg.attn_impl = impl
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for readable, *others in zip(*results, strict=True):
        for fused in others:
            torch.testing.assert_close(readable, fused, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_a_later_token_changes_no_earlier_logit(cfg: ModelConfig) -> None:
    model, idx = randomize(Transformer(cfg), seed=9), torch.randint(50, (2, 16))
    changed = idx.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 50
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize('cfg', SETS, ids=describe)
def test_cached_logits_equal_uncached_ones(cfg: ModelConfig) -> None:
    model, idx = randomize(Transformer(cfg), seed=10), torch.randint(50, (2, 16))
    cache, parts = Cache(16), []
    for part in idx.split([6, 1, 1, 3, 1, 4], dim=1):  # a prompt, single tokens, several at once
        parts.append(model(part, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, 1), model(idx)[0], rtol=0, atol=1e-9)
    # D_h numbers a token and layer for CEM attention, unless a diagonal meets rope; 2 D_h for Llama, for each reuse.
    widths = 2 * cfg.attn_steps if cfg.attn == 'llama' else 2 if cfg.positions == 'rope' and cfg.kq_diag != 'none' else 1
    assert cache.floats_per_token() == widths * cfg.d_model * cfg.n_layer


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({k: st.sampled_from(v) for k, v in OPTIONS.items()}))
def test_gradients_reach_every_parameter(options: dict) -> None:
    if cfg := valid(options):
        model = randomize(Transformer(cfg), seed=11)
        model(*torch.randint(50, (2, 2, 9)))[1].backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and torch.isfinite(p.grad).all(), name
            assert p.grad.any(), name


def test_a_llama_sublayer_with_steps_is_the_same_sublayer_again() -> None:
    cfg = ModelConfig(**TINY, attn='llama', mlp='llama', attn_steps=3, mlp_steps=2)
    model = randomize(Transformer(cfg), seed=12)
    once, x, pos = model.blocks[0], torch.randn(2, 8, 24, dtype=torch.float64), positions(cfg, 8, dtype=torch.float64)
    expected = once.attn(x, pos)
    model.set_steps(1, 1)
    for _ in range(3):
        x = once.attn(x, pos)
    torch.testing.assert_close(x, expected)
    model.set_steps(3, 2)
    expected = once.mlp(x)
    model.set_steps(1, 1)
    torch.testing.assert_close(once.mlp(once.mlp(x)), expected)


def test_steps_change_at_test_time() -> None:
    idx = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(13))
    two, four = (randomize(Transformer(ModelConfig(**TINY, attn_steps=t, mlp_steps=t + 1)), seed=13) for t in (2, 4))
    four.load_state_dict(two.state_dict())
    assert not torch.allclose(two(idx)[0], four(idx)[0])
    two.set_steps(4, 5)
    assert torch.equal(two(idx)[0], four(idx)[0])
    with pytest.raises(ValueError, match='mlp_steps=0'):
        two.set_steps(mlp_steps=0)


def test_energy_falls_along_small_steps() -> None:
    """With P = I, the whole gradient and a small eta, each step of u itself is descent on the stated energy."""
    cfg = ModelConfig(**TINY, preconditioner='none', exact_update=True)
    block = randomize(Transformer(cfg), seed=14).blocks[0]
    u, h = torch.randn(2, 2, 7, 24, dtype=torch.float64)
    context, gamma = block.attn.context(h, positions(cfg, 7, dtype=torch.float64)), F.linear(h, block.mlp.W)
    for energy, update in ((block.attn.energy, lambda u: block.attn.update(u, context, block.attn.output_weight())),
                           (block.mlp.energy, lambda u: block.mlp.update(u, gamma, block.mlp.output_weight()))):
        along = []
        v = u
        for _ in range(6):
            along.append(energy(v, h).sum().item())
            v = v + 0.003 * update(v)
        assert all(b < a for a, b in itertools.pairwise(along)), along


# Generation, memory, compilation

@pytest.mark.parametrize('options', [dict(attn='llama', mlp='llama'), {}, dict(positions='rope', kq_diag='none'),
                                     dict(positions='rope', kq_diag='per_head')], ids=str)
def test_generation_with_the_cache_gives_the_same_tokens(options: dict) -> None:
    model = randomize(Transformer(ModelConfig(**TINY, **options)), seed=15).eval()
    prompt = torch.randint(50, (2, 5))
    fast, slow = (model.generate(prompt, 40, temperature=0, use_cache=c) for c in (True, False))  # past the context of 16
    assert torch.equal(fast, slow) and fast.shape == (2, 45) and torch.equal(fast[:, :5], prompt)
    drawn = [model.generate(prompt, 10, 0.9, 5, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    long = torch.randint(50, (1, 30))  # a prompt longer than the context
    assert torch.equal(*(model.generate(long, 3, temperature=0, use_cache=c) for c in (True, False)))


def test_top_k_keeps_to_the_likeliest_tokens() -> None:
    model = randomize(Transformer(ModelConfig(**TINY)), seed=16)
    prompt = torch.randint(50, (64, 4))
    allowed = model(prompt)[0][:, -1].topk(3).indices
    new = model.generate(prompt, 1, 5.0, 3, torch.Generator().manual_seed(0))[:, -1:]
    assert (new == allowed).any(1).all() and len(new.unique()) > 3


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    model, idx = randomize(Transformer(ModelConfig(**TINY)), seed=17), torch.randint(50, (2, 17))
    results = []
    for model.activation_checkpointing in (False, True):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        results.append(torch.autograd.grad(loss, list(model.parameters())))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


# Bad configurations

@pytest.mark.parametrize('options, message', [
    (dict(size='7b'), 'expected one of nano'), (dict(d_model=65), 'multiple of n_head'), (dict(n_layer=0), 'n_layer=0'),
    (dict(d_model=12, n_head=4, positions='rope'), 'is odd'), (dict(attn='llama', kq_diag='shared'), 'set attn=cem'),
    (dict(mlp='llama', mlp_match='params'), 'set mlp=cem'), (dict(attn='llama', mlp='llama', residual='normed'), 'residual'),
    (dict(exact_update=True, kq_diag='none'), 'exact_update'), (dict(exact_update=True, attn_impl='sdpa'), 'attn_impl'),
    (dict(exact_update=True, attn_impl='rows'), 'attn_impl'),
    (dict(init_std=0.0), 'init_std'), (dict(extra_layers=-1), 'extra_layers')], ids=str)
def test_bad_configurations_say_what_would_be_right(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_a_llama_sublayer_has_no_energy() -> None:
    block = Transformer(ModelConfig(**TINY, attn='llama', mlp='llama')).blocks[0]
    x = torch.randn(1, 3, 24)
    for sublayer in (block.attn, block.mlp):
        with pytest.raises(ValueError, match='no energy'):
            sublayer.energy(x, x)

"""nanocem/muon.py: against torch's own, a slow formula, and itself."""
import pytest
import torch

from model import ModelConfig, Transformer
from nanocem import muon
from nanocem.muon import NEWTON_SCHULZ, Muon, block_matrices

SHAPES = ((24, 24), (20, 24), (24, 24), (40, 16), (1, 8))


def matrices(seed: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
            for shape in SHAPES]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_five_steps_stay_near_torchs_own(dtype: torch.dtype) -> None:
    """Torch multiplies in bfloat16: the two differ by its rounding and no more."""
    ours, theirs = matrices(1, torch.float32), matrices(1, torch.float32)
    options = dict(lr=0.02, weight_decay=0.1, momentum=0.95)
    both = [Muon(ours, dtype=dtype, **options),
            torch.optim.Muon(theirs, adjust_lr_fn='match_rms_adamw', nesterov=True, **options)]
    start = [w.detach().clone() for w in ours]
    for step in range(5):
        for a, b, g in zip(ours, theirs, matrices(2 + step, torch.float32), strict=True):
            a.grad, b.grad = g.detach().clone(), g.detach().clone()
        for optimizer in both:
            optimizer.step()
    for a, b, w in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < 0.02 * (b - w).norm()


@pytest.mark.parametrize('entries', [1, 1000, muon.BATCH_ENTRIES])
def test_a_step_equals_the_formula_one_matrix_at_a_time(
        entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, by the singular values: Newton-Schulz is a polynomial of each."""
    monkeypatch.setattr(muon, 'BATCH_ENTRIES', entries)
    weights, (a, b, c) = matrices(1, torch.float64), NEWTON_SCHULZ
    optimizer = Muon(weights, lr=0.01, weight_decay=0.2, momentum=0.9)
    momenta = [torch.zeros_like(w) for w in weights]
    for step in range(3):
        expected = []
        for w, m, g in zip(weights, momenta, matrices(7 + step, torch.float64), strict=True):
            w.grad = g.detach()
            m.mul_(0.9).add_(0.1 * w.grad)
            U, s, V = torch.linalg.svd(0.1 * w.grad + 0.9 * m, full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = a * s + b * s ** 3 + c * s ** 5
            update = (U * s) @ V * 0.2 * max(w.shape) ** 0.5
            expected.append(w.detach() * (1 - 0.01 * 0.2) - 0.01 * update)
        optimizer.step()
        for w, right in zip(weights, expected, strict=True):
            torch.testing.assert_close(w.detach(), right, rtol=0, atol=1e-12)


@pytest.mark.parametrize('attn', ['llama', 'cem'])
def test_it_takes_the_matrices_of_the_blocks_and_nothing_else(attn: str) -> None:
    model = Transformer(ModelConfig(size='nano', vocab_size=50, attn=attn, mlp='cem'))
    ids = {id(p) for p in block_matrices(model)}
    chosen = {name for name, p in model.named_parameters() if id(p) in ids}
    names = ['attn.W_Q', 'attn.W_K', 'mlp.W', 'mlp.V']
    names += ['attn.W_V', 'attn.W_O'] if attn == 'llama' else []
    assert chosen == {f'blocks.{n}.{name}' for n in range(2) for name in names}

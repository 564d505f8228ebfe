"""nanocem/optim.py against torch's own."""
import pytest
import torch

from model import ModelConfig, Transformer
from nanocem import optim
from nanocem.optim import Muon, block_matrices

SHAPES = ((24, 24), (20, 24), (24, 24), (40, 16), (1, 8))


def matrices(seed: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
            for shape in SHAPES]


@pytest.mark.parametrize('dtype, entries', [
    (torch.float32, 1), (torch.bfloat16, optim.BATCH_ENTRIES)])
def test_five_steps_stay_near_torchs_own(dtype: torch.dtype, entries: int,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch multiplies in bfloat16: the two differ by its rounding and no more."""
    monkeypatch.setattr(optim, 'BATCH_ENTRIES', entries)
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


@pytest.mark.parametrize('attn', ['llama', 'cem'])
def test_it_takes_the_matrices_of_the_blocks_and_nothing_else(attn: str) -> None:
    model = Transformer(ModelConfig(size='nano', vocab_size=50, attn=attn, mlp='cem'))
    ids = {id(p) for p in block_matrices(model)}
    chosen = {name for name, p in model.named_parameters() if id(p) in ids}
    names = ['attn.W_Q', 'attn.W_K', 'mlp.W', 'mlp.V']
    names += ['attn.W_V', 'attn.W_O'] if attn == 'llama' else []
    assert chosen == {f'blocks.{n}.{name}' for n in range(2) for name in names}

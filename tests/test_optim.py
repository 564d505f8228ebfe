"""nanocem/optim.py against torch's own."""
import pytest
import torch

from model import ModelConfig, Transformer
from nanocem.optim import Muon, make_optimizers
from train import TrainConfig

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


def names_of(model: Transformer, params: list[torch.Tensor]) -> set[str]:
    ids = {id(p) for p in params}
    return {name for name, p in model.named_parameters() if id(p) in ids}


@pytest.mark.parametrize('attn, matrices', [
    ('llama', ['attn.W_Q', 'attn.W_K', 'attn.W_V', 'attn.W_O']), ('cem', ['attn.W_Q', 'attn.W_K'])])
def test_which_parameters_muon_takes_and_which_decay(attn: str, matrices: list[str]) -> None:
    kq_diag = 'per_head' if attn == 'cem' else 'none'
    model = Transformer(ModelConfig(size='nano', vocab_size=50, attn=attn, mlp='cem', n_layer=1,
                                    kq_diag=kq_diag, positions='alibi',
                                    preconditioner='diag_lowrank'))
    in_blocks = {f'blocks.0.{name}' for name in [*matrices, 'mlp.W', 'mlp.V']}
    of_P = {name for name, _ in model.named_parameters() if name.endswith(('P.left', 'P.right'))}
    assert len(of_P) == (4 if attn == 'cem' else 2)
    for optimizer in 'adamw', 'muon':
        cfg = TrainConfig(optimizer=optimizer)
        adamw, *muon = make_optimizers(model, cfg, torch.float32)
        decayed, others = (names_of(model, group['params']) for group in adamw.param_groups)
        taken = [names_of(model, muon[0].param_groups[0]['params'])] if muon else []
        assert taken == ([in_blocks] if optimizer == 'muon' else [])
        assert decayed == {'embedding', 'head'} | of_P | (set() if muon else in_blocks)
        assert others == {name for name, _ in model.named_parameters()} - decayed - in_blocks


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_adamw_takes_the_steps_that_its_options_say(optimizer: str) -> None:
    """Three steps against the formula in float64. Matrices decay: no gains and no diagonals."""
    torch.manual_seed(4)
    model = Transformer(ModelConfig(size='nano', vocab_size=50, n_layer=1, kq_diag='per_head',
                                    preconditioner='diag_lowrank'))
    cfg = TrainConfig(optimizer=optimizer, beta1=0.7, beta2=0.8, adam_eps=0.5, weight_decay=2.0)
    adamw = make_optimizers(model, cfg, torch.float32)[0]
    mine = {id(p) for group in adamw.param_groups for p in group['params']}
    lr, (b1, b2) = 0.1, (0.7, 0.8)
    expected, m, v = ({name: torch.zeros_like(p, dtype=torch.float64)
                       for name, p in model.named_parameters() if id(p) in mine} for _ in range(3))
    kinds = set()
    for name, p in model.named_parameters():
        if name in expected:
            expected[name] += p.detach()
    for group in adamw.param_groups:
        group['lr'] = lr
    for t in range(1, 4):
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            if name in expected:
                g = p.grad.double()
                m[name] = b1 * m[name] + (1 - b1) * g
                v[name] = b2 * v[name] + (1 - b2) * g ** 2
                kind = name.split('.')[-1]
                decay = 0 if p.ndim == 1 or kind in ('kq_diag', 'diag') else cfg.weight_decay
                kinds.add((kind, decay))
                step = m[name] / (1 - b1 ** t) / ((v[name] / (1 - b2 ** t)).sqrt() + cfg.adam_eps)
                expected[name] = (1 - lr * decay) * expected[name] - lr * step
        adamw.step()
    assert {('gain', 0), ('kq_diag', 0), ('diag', 0), ('head', 2.0), ('left', 2.0)} <= kinds
    for name, p in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.double(), expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_what_has_a_side_of_1_is_no_matrix(optimizer: str) -> None:
    """A gain (1, D) and a temperature (K, 1) of one's own, in a block: no Muon and no decay."""
    model = Transformer(ModelConfig(size='nano', vocab_size=50))
    own = [torch.nn.Parameter(torch.ones(shape)) for shape in ((1, 32), (2, 1), (2, 32, 1))]
    block = model.blocks[0]
    block.gain, block.temperature, block.factor = own
    block.matrix = torch.nn.Parameter(torch.ones(2, 32))
    cfg = TrainConfig(optimizer=optimizer)
    found = {p: group['weight_decay'] for o in make_optimizers(model, cfg, torch.float32)
             for group in o.param_groups for p in group['params']}
    assert [found[p] for p in own] == [0, 0, 0] and found[block.matrix] == cfg.weight_decay
    muon = make_optimizers(model, cfg, torch.float32)[1:]
    assert not {*own} & {p for o in muon for group in o.param_groups for p in group['params']}

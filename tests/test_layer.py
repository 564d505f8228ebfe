"""results/layer/candidates.py: every candidate's update is minus the gradient of its energy."""
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import model
from model import ModelConfig
from nanocem import muon

PATH = Path(__file__).parents[1] / 'results/layer/candidates.py'
IN_A_LAYER = ('cem', 'wide', 'shift', 'head_gate', 'gate', 'forget', 'qknorm', 'slice', 'relu2',
              'offset', 'anchored', 'prior+mlp_prior',
              'prior+mlp_prior+sharpness', 'wide+shift+gate', 'anchored+shift+gate')


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(model, 'Block', model.Block)  # what put_in_force replaces
    monkeypatch.setattr(muon, 'MATRICES', muon.MATRICES)
    spec = importlib.util.spec_from_file_location('candidates', PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module.on.clear()


@pytest.mark.parametrize('names', IN_A_LAYER)
def test_updates_are_minus_the_gradient(candidates: ModuleType, names: str) -> None:
    candidates.put_in_force(names)
    torch.manual_seed(11)
    cfg = ModelConfig(d_model=16, n_layer=1, n_head=2, d_mlp=12, vocab_size=8, context_length=6,
                      kq_diag='none', preconditioner='none')
    net = candidates.Transformer(cfg).double()
    for p in net.parameters():
        p.data.normal_()
    block = net.blocks[0]
    u, h = torch.randn(2, 2, 6, 16, dtype=torch.float64).unbind()
    u.requires_grad_()
    pos = model.position_tables(cfg, h)
    context = block.attn.context(h, pos)
    for sublayer, update in (
            (block.attn, block.attn.update(u, h, context, pos, block.attn.P)),
            (block.mlp, block.mlp.update(u, h, block.mlp.context(h), block.mlp.P))):
        gradient, = torch.autograd.grad(sublayer.energy(u, h).sum(), u)
        torch.testing.assert_close(update, -gradient, rtol=1e-9, atol=1e-9)


def test_without_a_name_it_is_the_model(candidates: ModuleType) -> None:
    cfg = ModelConfig(d_model=16, n_layer=2, n_head=2, d_mlp=12, vocab_size=8, context_length=6)
    idx = torch.randint(8, (2, 6), generator=torch.Generator().manual_seed(1))
    logits = {}
    for made in (model, candidates):
        if made is candidates:
            candidates.put_in_force('cem')
        torch.manual_seed(3)
        logits[made] = made.Transformer(cfg)(idx)[0]
    torch.testing.assert_close(logits[candidates], logits[model])


def test_at_u_equal_to_h_prior_is_llamas_attention(candidates: ModuleType) -> None:
    """One step of energies whose scores and pre-activations read u - h is one Llama layer."""
    shape = dict(d_model=16, n_layer=2, n_head=2, d_mlp=12, vocab_size=8, context_length=6)
    torch.manual_seed(5)
    llama = model.Transformer(ModelConfig(**shape, attn='llama', mlp='llama', positions='alibi'))
    candidates.put_in_force('prior+mlp_prior')
    ours = candidates.Transformer(ModelConfig(
        **shape, attn_steps=1, mlp_steps=1, kq_diag='none', preconditioner='none',
        score_scale='head'))
    ours.load_state_dict(llama.state_dict())
    idx = torch.randint(8, (2, 6))
    torch.testing.assert_close(ours(idx)[0], llama(idx)[0])

"""results/ladder/second_step.py: what it says of a model's second step."""
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model import ModelConfig, Transformer

PATH = Path(__file__).parents[1] / 'results/ladder/second_step.py'
spec = importlib.util.spec_from_file_location('second_step', PATH)
second_step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(second_step)

SIZES = dict(size='nano', n_layer=2, vocab_size=20, context_length=8, attn='cem', mlp='cem')


def tiny(**options) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**SIZES, **options))


def tokens() -> torch.Tensor:
    return torch.randint(20, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('kind', ['attn', 'mlp'])
@torch.no_grad()
def test_one_step_of_twice_the_length(kind):
    """As a model with that step has it; and the model is left as it was."""
    model, x = tiny(), tokens()
    before = second_step.perplexity(model, x, x)
    other = tiny(**{f'{kind}_steps': 1, f'{kind}_step_size': 1.0})
    found = second_step.in_one_step(model, kind, x, x)
    assert found == pytest.approx(second_step.perplexity(other, x, x), rel=1e-6)
    assert found != before == second_step.perplexity(model, x, x)


@pytest.mark.parametrize('kind', ['attn', 'mlp'])
@torch.no_grad()
def test_second_update(kind):
    """x of the first layer's sublayer after one step and after two, by models that take so many."""
    model, x = tiny(), tokens()
    once = tiny(**{f'{kind}_steps': 1, f'{kind}_step_size': 0.5})
    ends, starts = [], []
    for of in (once, model):
        layer = getattr(of.blocks[0], kind)
        layer.register_forward_pre_hook(lambda of, given: starts.append(given[0]))
        layer.register_forward_hook(lambda of, given, out: ends.append(out))
        of.hidden(x)
    first, second = ends[0] - starts[0], ends[1] - ends[0]
    cosine, length = second_step.second_update(getattr(model.blocks[0], kind), model, x)
    right = F.cosine_similarity(first, second, dim=-1).mean()
    assert cosine == pytest.approx(float(right), abs=1e-4)
    right = (second.norm(dim=-1) / first.norm(dim=-1)).mean()
    assert length == pytest.approx(float(right), abs=1e-3)

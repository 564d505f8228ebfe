"""results/ladder/inside.py: what it says of trained models."""
import importlib.util
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model import ModelConfig, Transformer

PATH = Path(__file__).parents[1] / 'results/ladder/inside.py'
spec = importlib.util.spec_from_file_location('inside', PATH)
inside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inside)

SIZES = dict(size='nano', n_layer=2, vocab_size=20, context_length=8, attn='cem', mlp='cem')


def tiny(**options) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{**SIZES, **options}))


def tokens() -> torch.Tensor:
    return torch.randint(20, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('kind', ['attn', 'mlp'])
@torch.no_grad()
def test_one_step_of_twice_the_length(kind):
    """As a model with that step has it; and the model is left as it was."""
    model, x = tiny(), tokens()
    before = inside.perplexity(model, x, x)
    other = tiny(**{f'{kind}_steps': 1, f'{kind}_step_size': 1.0})
    found = inside.in_one_step(model, kind, x, x)
    assert found == pytest.approx(inside.perplexity(other, x, x), rel=1e-6)
    assert found != before == inside.perplexity(model, x, x)


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
    cosine, length = inside.second_update(getattr(model.blocks[0], kind), model, x)
    right = F.cosine_similarity(first, second, dim=-1).mean()
    assert cosine == pytest.approx(float(right), abs=1e-4)
    right = (second.norm(dim=-1) / first.norm(dim=-1)).mean()
    assert length == pytest.approx(float(right), abs=1e-3)


@torch.no_grad()
def test_without_its_diagonal():
    """As the model that has none, whose other weights are the same; and it is left as it was."""
    model, x = tiny(kq_diag_init=0.3), tokens()
    other = tiny(kq_diag='none')
    other.load_state_dict({name: value for name, value in model.state_dict().items()
                           if not name.endswith('kq_diag')})
    before = inside.perplexity(model, x, x)
    without, size = inside.diagonal(model, x, x)
    assert without == pytest.approx(inside.perplexity(other, x, x), rel=1e-6)
    assert size == pytest.approx(0.3) and without != before == inside.perplexity(model, x, x)


@torch.no_grad()
def test_llamas_sublayers_have_no_second_step():
    model, x = tiny(attn='llama', attn_steps=1), tokens()
    found = inside.second_step(model, x, x)
    assert all(map(math.isnan, found[:3])) and not any(map(math.isnan, found[3:]))
    assert inside.second_step_cells(2.0, *found)[:2] == ['', '']


class Copier:
    """Says that the next byte is the one four places before it, and knows nothing else."""
    def __call__(self, x, targets=None):
        logits = torch.zeros(*x.shape, 20)
        before = x[:, :-3]
        logits[:, 3:].scatter_(2, before[..., None], 50.0)
        return logits, None


def test_where_bytes_were_seen_before():
    """By hand, and with a slow search in random texts of few letters."""
    assert inside.seen_before(torch.tensor([[1, 2, 3, 4, 9, 1, 2, 3, 4, 4]])).tolist() == [
        [False] * 8 + [True, False]]
    x = torch.randint(2, (4, 30), generator=torch.Generator().manual_seed(5))
    slow = [[i >= 4 and any(row[j - 3:j + 1] == row[i - 3:i + 1] for j in range(3, i))
             for i in range(30)] for row in x.tolist()]
    assert inside.seen_before(x).tolist() == slow


def test_copying_in_text():
    """A model that copies four bytes back knows what was seen four before, and no more."""
    x = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 1]])
    found = inside.copying_in_text(Copier(), x[:, :-1], x[:, 1:])[2:]
    assert found == pytest.approx([1, 20 ** (3 / 7)])


def test_copying():
    """Texts of four different bytes, twice: a model that copies knows all of the second."""
    x = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(n))[:8]
                     for n in range(3)])
    first, again = inside.copying(Copier(), x, x)
    assert first == pytest.approx(20) and again == pytest.approx(1)


@pytest.mark.parametrize('argv', [['--help'], ['a.md', 'b.md'], ['../a.md'], ['a.md', 'val', 'x']])
def test_pages_of_other_names(argv):
    with pytest.raises(SystemExit, match='expected at most the name of a page'):
        inside.main(argv)

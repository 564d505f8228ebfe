"""docs/attention.py: the maps are the layers' own weights, and the command line."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_evaluate import cells, model_of, write_run

from model import make_positions
from running import ROOT

sys.path.insert(0, str(ROOT / 'docs'))
import attention


@pytest.mark.parametrize(('options', 'steps', 'uses'), [
    (dict(kq_diag='shared', attn_steps=3), 3, 1), (dict(attn='llama', attn_reuse=3), 1, 3),
    (dict(attn_reuse=4), 2, 4)], ids=str)
def test_attention_maps_are_the_weights_of_each_step(options: dict, steps: int, uses: int) -> None:
    model = model_of(**options)
    idx = torch.randint(257, (1, 9))
    before = model(idx)[0]
    maps = attention.attention_maps(model, idx)
    assert torch.equal(model(idx)[0], before)
    assert len(maps) == 2 * uses  # two layers
    for alpha in maps:
        assert alpha.shape == (steps, 2, 9, 9)
        assert alpha.sum(dim=-1).allclose(torch.ones(()))
        assert (alpha.triu(1) == 0).all()
    x = F.embedding(idx, model.embedding)
    first, pos = model.blocks[0].attn, make_positions(model.cfg, x)
    h = first.norm(x)
    q = first.rotate(first.split_heads(F.linear(h, first.W_Q)), pos)
    k = first.rotate(first.split_heads(F.linear(h, first.W_K)), pos)
    alpha = first.scores(q, k, pos, h, h).softmax(dim=-1)
    assert maps[0][0].allclose(alpha[0], atol=1e-6)


def test_a_report_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, idx = model_of(), torch.zeros(1, 3, dtype=torch.long)
    attn = model.blocks[0].attn
    before = {**vars(attn)}, model(idx)[0]
    monkeypatch.setattr(torch.Tensor, 'softmax', lambda *args, **options: 1 / 0)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attention.attention_maps(model, idx)
    monkeypatch.undo()
    assert vars(attn) == before[0] and torch.equal(model(idx)[0], before[1])


def test_the_command_line(place: Path, capsys: pytest.CaptureFixture) -> None:
    def printed(*options: str) -> str:
        attention.main([*options, '--device=cpu'])
        return capsys.readouterr().out

    page = printed('--prompt=word')
    assert page.startswith("out/run; 'word'\n\n| attention moved |")
    ids = torch.tensor([[256, *b'word']])
    shifts = [float((maps[1] - maps[0]).clamp(min=0).sum(dim=-1).mean())
              for maps in attention.attention_maps(model_of(), ids)]
    assert [row[1] for row in cells(page)] == [f'{s:.2%}' for s in shifts]
    more = printed('--prompt=A $word_d\u00e9j\u00e0', '--attn_steps=4', '--mlp_steps=4')
    assert [len(row) for row in cells(more)] == [4, 4]
    assert printed('--prompt=$x_$ and y').endswith('out/results/attention-run.png\n')  # no formula
    assert Path('out/results/attention-run.png').read_bytes()[:4] == b'\x89PNG'
    for options, words in (([f'--prompt={"long " * 9}'], 'has 45 tokens; expected 1 to 15'),
                           ([], 'has 0 tokens'), (['--layer=3'], 'layer=3: expected 1 to 2')):
        with pytest.raises(SystemExit, match=words):
            printed(*options)
    write_run(place / 'out/llama', Path('data'), model_of(attn='llama', attn_reuse=2))
    llama = '--prompt=word', '--out_dir=out/llama'
    assert 'No attention takes a second step' in printed(*llama)
    with pytest.raises(SystemExit, match='takes no steps'):
        printed(*llama, '--attn_steps=2')


def test_the_picture_has_the_maps() -> None:
    """Of a first step, and what the second changes."""
    llama = model_of(attn='llama', attn_reuse=2)
    ids = torch.tensor([[256, *b'word']])
    names = attention.names_of_maps(llama)
    maps = attention.attention_maps(llama, ids)
    figure = attention.draw(dict(zip(names, maps, strict=True)), ['BOS', 'word'])
    assert figure.axes[2].get_title() == 'layer 1, use 2\nhead 1'
    # One layer alone
    maps = attention.attention_maps(model_of(), ids)[1]
    figure = attention.draw({'layer 2': maps}, ['BOS', *'word'])
    assert len(figure.axes) == 2 * maps.shape[1]
    for t, drawn in ((0, maps[0].sqrt()), (1, maps[1] - maps[0])):
        for k in range(maps.shape[1]):
            found = figure.axes[t * maps.shape[1] + k].images[0].get_array()
            assert torch.equal(torch.as_tensor(found.data), drawn[k])


def test_one_layer_is_drawn_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(attention, 'save_picture', lambda figure, *of: drawn.append(figure))
    attention.main(['--prompt=word', '--layer=2', '--device=cpu'])
    assert [axes.get_title() for axes in drawn[0].axes[:2]] == [
        'layer 2\nstep 1, head 1', 'layer 2\nstep 1, head 2']

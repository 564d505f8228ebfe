"""model.py alone in an empty folder needs torch alone."""
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from running import ROOT

ALONE = '''
import importlib.abc
import sys


class Refuse(importlib.abc.MetaPathFinder):
    """Import none of ours but model, and no package that it could want."""
    refused = {REFUSED}

    def find_spec(self, name, path, target=None):
        if name.partition('.')[0] in self.refused:
            raise ImportError(f'{name} is refused')


sys.meta_path.insert(0, Refuse())
import torch
from model import ModelConfig, Transformer

torch.manual_seed(0)
TINY = dict(d_model=16, n_layer=2, n_head=2, d_mlp=24, vocab_size=50, context_length=16)
x = torch.arange(17).repeat(4, 1)
for kind in ('llama', 'cem'):
    model = Transformer(ModelConfig(**TINY, attn=kind, mlp=kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(10):
        _, loss = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    assert model.generate(x[:1, :4], 20, temperature=0.8, top_k=5).shape == (1, 24)

# Minus the gradient of each CEM sublayer's energy is its update, in the context h at the state u
CEM = [dict(), dict(positions='rope'), dict(kq_diag='shared', exact_update=True),
       dict(kq_diag='per_head', exact_update=True, positions='rope'),
       dict(mlp_energy='sign_convex'), dict(mlp_match='params', score_scale='head')]
for options in CEM:
    model = Transformer(ModelConfig(**TINY, **options)).double()
    states = []
    for block in model.blocks:
        for p in block.parameters():
            p.data += 0.3 * torch.randn_like(p)
        for sublayer in (block.attn, block.mlp):
            sublayer.register_forward_hook(lambda layer, x, y: states.append((layer, x[0], y)))
    model.hidden(x)
    assert len(states) == 4
    for layer, before, after in states:
        h = layer.norm(before).detach()
        u = h.clone().requires_grad_()  # in the first step the state is the context
        gradient, = torch.autograd.grad(layer.energy(u, h).sum(), u)
        torch.testing.assert_close((after - before) / layer.eta, -gradient, rtol=1e-9, atol=1e-9)
print('done')
'''


def test_model_alone_trains_generates_and_descends(tmp_path: Path) -> None:
    shutil.copy(ROOT / 'model.py', tmp_path)
    ours = {'nanocem', *(path.stem for path in ROOT.glob('*.py'))} - {'model'}
    refused = {*ours, 'scipy', 'transformers', 'safetensors', 'sentencepiece'}
    script = ALONE.replace('{REFUSED}', repr(refused))
    done = subprocess.run([sys.executable, '-c', script], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0 and done.stdout == 'done\n', done.stderr


@pytest.mark.parametrize('wrong, words', [
    ("size='7b'", 'size=7b: expected one of nano'), ('n_layer=True', 'expected a whole number'),
    ('n_layer=2.5', 'expected a whole number'), ('init_std=-1', 'expected a number above 0')])
def test_a_copy_whose_annotations_are_strings_checks_them_too(
        wrong: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (ROOT / 'model.py').read_text(encoding='utf-8')
    edited = lines.replace('\nimport math\n',
                           '\nfrom __future__ import annotations\nimport math\n')
    assert edited != lines
    (tmp_path / 'copied.py').write_text(edited, encoding='utf-8')
    spec = importlib.util.spec_from_file_location('copied', tmp_path / 'copied.py')
    copied = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'copied', copied)  # where dataclasses look for types
    spec.loader.exec_module(copied)
    assert copied.ModelConfig(size='nano').d_model == 32
    with pytest.raises(ValueError, match=re.escape(words)):
        eval(f'ModelConfig({wrong})', vars(copied))

"""nanocem/same.py: what tells an edit of model.py, damaged weights and other options."""
import copy
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import model as model_py
import running
from model import ModelConfig, Transformer
from nanocem import runs, same
from running import RESUME, ROOT, TINY, write_data
from test_model import randomize

# Edits, and whether the logits tell them. The definitions tell all of them
EDITS = {
    'SiLU -> GELU': (True, 'gamma * F.silu(z)', 'gamma * F.gelu(z)'),
    'eta x 1.001': (True, 'return eta * self(W)', 'return 1.001 * eta * self(W)'),
    'tau x 1.01': (True, 'self.tau = math', 'self.tau = 1.01 * math'),
    'slopes x 1.01': (True, 'return 2.0 ** (-8', 'return 1.01 * 2.0 ** (-8'),
    'the diagonal': (True, 'self.kq_diag[:, None] / self.tau',
                     '1.01 * self.kq_diag[:, None] / self.tau'),
    'a window': (True, 'b = pos.mask', 'b = pos.mask.masked_fill(pos.distance > 40, -torch.inf)'),
    'a long window': (False, 'b = pos.mask',
                      'b = pos.mask.masked_fill(pos.distance > 70, -torch.inf)'),
    'norm': (True, 'NORM_EPS = 1e-5', 'NORM_EPS = 2e-5'),
    'two losses': (False, 'F.cross_entropy(logits, targets.flatten())',
                   'F.cross_entropy(logits, targets.flatten()) + logits.logsumexp(-1).mean()'),
    'a detach': (False, 'h = self.norm(x)                                         # h_j <-',
                 'h = self.norm(x).detach()  #'),
    'a dropout': (False, 'x = F.embedding(idx, self.embedding)',
                  'x = F.dropout(F.embedding(idx, self.embedding), 0.1, self.training)'),
    'another name': (False, 'return x + g @ self.W_d', 'y = g @ self.W_d; return x + y')}
NO_EDITS = {
    'a comment': ('# Attend to', '# Now attend to'),
    'a docstring': ('"""Take the steps of Algorithm 1, MHA', '"""Step as in Algorithm 1'),
    'line ends': ('rotate(self, x: Tensor, pos', 'rotate(self, x: Tensor,\n               pos')}
OPTIONS = dict(size='nano', vocab_size=300, context_length=80, kq_diag='shared', attn_steps=2)


def edited_text(old: str, new: str) -> str:
    text = same.MODEL_TEXT
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize('edit', EDITS)
def test_an_edit_is_told(edit: str) -> None:
    shown, *lines = EDITS[edit]
    rope = dict(positions='rope') if 'window' in edit else {}  # ALiBi weighs such distances as 0
    model = randomize(Transformer(ModelConfig(**OPTIONS | rope)), seed=3).float()
    kept = same.outputs(model)
    assert same.find_change(model, kept) == ''
    text = edited_text(*lines)
    other = same.model_file(text).Transformer(model.cfg)
    other.load_state_dict(model.state_dict())
    assert ('are not those that were kept' in same.find_change(other, kept)) == shown
    assert same.differing(same.in_use(), same.definitions(text))


@pytest.mark.parametrize('edit', NO_EDITS)
def test_what_is_no_edit(edit: str) -> None:
    assert same.definitions(edited_text(*NO_EDITS[edit])) == same.in_use()


def test_definitions_are_named_as_they_are_found() -> None:
    found = same.in_use()
    assert {'CEMMLP.forward', 'alibi_slopes', 'NORM_EPS', 'Transformer.generate'} <= found.keys()
    (edit,) = same.differing(found, same.definitions(edited_text('2.0 ** (-8', '3.0 ** (-8')))
    assert edit == 'alibi_slopes'


def test_what_a_script_has_put_in_place_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = same.in_use()
    monkeypatch.setattr(model_py.CEMMLP, 'forward', lambda self, x: x)
    monkeypatch.setattr(model_py, 'alibi_slopes', lambda n_head, like: like)
    assert same.differing(before, same.in_use()) == ['alibi_slopes', 'CEMMLP.forward']


@pytest.mark.parametrize('residual', ['raw', 'normed'])
def test_rounding_is_no_change(residual: str) -> None:
    """Another order of sums, in many layers from normed starts, and other weights."""
    model = randomize(Transformer(ModelConfig(**OPTIONS | dict(
        n_layer=24, residual=residual, match_bias='token'))), seed=4).float()
    kept = same.outputs(model)
    for block in model.blocks:  # the scores written out
        block.attn.whole_gradient, block.attn.diagonal_update = True, lambda *of: torch.zeros(())
    assert same.find_change(model, kept) == ''
    with torch.no_grad():
        model.blocks[0].mlp.V[3, 3] += 1e-3
    assert 'are not those that were kept' in same.find_change(model, kept)


def test_damaged_weights_and_nan_are_told() -> None:
    model = randomize(Transformer(ModelConfig(**OPTIONS)), seed=5).float()
    kept = same.outputs(model)
    with torch.no_grad():
        model.embedding[7919 % 300] = math.nan
    assert 'are not those that were kept' in same.find_change(model, kept)
    assert same.find_change(model, same.outputs(model)) == ''  # NaN as before
    model.blocks[0].mlp.W = None
    assert 'does not run (TypeError' in same.find_change(model, kept)


def test_a_checkpoint_of_an_edit_that_cannot_be_copied_keeps_no_logits(
        capsys: pytest.CaptureFixture) -> None:
    model = Transformer(ModelConfig(**OPTIONS))
    model.embedded = [weight * 1 for weight in model.parameters()]  # copy.deepcopy raises
    assert same.outputs_to_keep(model) == {}
    assert 'cannot be checked (RuntimeError: Only Tensors created explicitly' in (
        capsys.readouterr().err)


@pytest.mark.parametrize('edit', [
    'gamma = gamma + F.linear(F.pad(h, (0, 0, -1, 1)), self.W)',  # looks one token ahead
    'gamma = gamma + gamma.mean(dim=1, keepdim=True)',
    'gamma = F.dropout(gamma, 0.5, training=True)', ''])
def test_a_model_that_sees_later_tokens_is_told(edit: str, capsys: pytest.CaptureFixture) -> None:
    line = 'gamma = F.linear(h, self.W)                              # gamma = W h_i, (B, I, D_v)'
    text = edited_text(line, f'{line}\n        {edit}')
    model = same.model_file(text).Transformer(ModelConfig(**OPTIONS))
    same.warn_if_not_causal(model)
    assert ('lets a token see later ones' in capsys.readouterr().err) == bool(edit)


def test_outputs_disturb_nothing_and_are_alike_in_any_precision_and_mode() -> None:
    model = randomize(Transformer(ModelConfig(**OPTIONS)), seed=6).float()
    state, kept = torch.get_rng_state(), same.outputs(model)
    with torch.autocast('cpu', torch.bfloat16), torch.inference_mode():
        found = same.outputs(model.train())
    assert found == kept and model.training and model.head.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert json.loads(json.dumps(kept)) == kept


def test_plain_values() -> None:
    assert same.differences({'a': 1, 'b': 2}, {'a': 1, 'b': 3, 'c': 4}) == ['b=2 (now 3)']
    assert same.differing({'a': 1, 'b': 2}, {'a': 1, 'c': 4}) == ['b', 'c']


def test_an_option_that_changes_nothing_raises_no_word() -> None:
    """What this model.py lacks counts where the logits differ, or where there are none."""
    model = randomize(Transformer(ModelConfig(**OPTIONS)), seed=7).float()
    state = {'model_config': vars(model.cfg) | {'gate': 'relu'}, 'outputs': same.outputs(model)}
    assert runs.describe_change(model, state) == ''
    lacks = 'its model has gate=relu, unlike this model.py'
    assert runs.describe_change(model, {**state, 'outputs': [' 1' * 16] * 8}).count(lacks) == 1
    del state['outputs']
    assert runs.describe_change(model, state) == lacks


# A run whose model.py is edited

def train(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, 'train.py', *options], cwd=folder, capture_output=True,
                          text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})


def test_a_run_goes_on_with_an_edit_that_changes_no_logit(tmp_path: Path) -> None:
    """A line names the definitions, and result.json says since when. An edit that computes
    something else is refused."""
    for name in ('train.py', 'configurator.py', 'model.py'):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / 'nanocem', tmp_path / 'nanocem')
    data = write_data(tmp_path / 'data')
    begun = train(tmp_path, *TINY, f'--data={data}', '--out_dir=o', running.steps(6),
                  '--stop_step=2')
    assert begun.returncode == 75, begun.stderr
    assert (tmp_path / 'o/model.py').read_text() == same.MODEL_TEXT
    # One that computes something else
    (tmp_path / 'model.py').write_text(edited_text(*EDITS['SiLU -> GELU'][1:]))
    refused = train(tmp_path, '--out_dir=o', RESUME)
    assert refused.returncode == 1 and 'Traceback' not in refused.stderr
    assert 'its logits are not those that were kept' in refused.stderr
    assert 'edited since step 2: LlamaMLP.forward, CEMMLP.forward' in refused.stderr
    # A dropout, and then the text of before
    (tmp_path / 'model.py').write_text(edited_text(*EDITS['a dropout'][1:]))
    resumed = train(tmp_path, '--out_dir=o', RESUME, '--stop_step=4')
    assert resumed.returncode == 75 and 'step 2: Transformer.hidden. The' in resumed.stderr
    assert 'diff o/model_until_2.py' in resumed.stderr
    assert 'F.dropout' in (tmp_path / 'o/model.py').read_text()
    assert (tmp_path / 'o/model_until_2.py').read_text() == same.MODEL_TEXT
    (tmp_path / 'model.py').write_text(same.MODEL_TEXT)
    ended = train(tmp_path, '--out_dir=o', RESUME)
    assert ended.returncode == 0 and 'edited since step 4' in ended.stderr, ended.stderr
    assert json.loads((tmp_path / 'o/result.json').read_text())['edits'] == [
        {'after_step': step, 'definitions': ['Transformer.hidden']} for step in (2, 4)]


def test_a_deep_copy_keeps_its_own_weights() -> None:
    model = randomize(Transformer(ModelConfig(**OPTIONS)), seed=8).float()
    other = copy.deepcopy(model)
    assert same.outputs(model) == same.outputs(other)

"""nanocem/same.py: what tells an edit of model.py, damaged weights and other options."""
import copy
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import running
from model import ModelConfig, Transformer
from nanocem import runs, same
from running import RESUME, ROOT, TINY, write_data
from test_model import randomize

# Edits, and whether the logits tell them. The text of model.py tells all of them
EDITS = {
    'SiLU -> GELU': (True, 'return F.silu(z)', 'return F.gelu(z)'),
    'eta x 1.001': (True, 'x = x + self.eta * dx', 'x = x + 1.001 * self.eta * dx'),
    'tau x 1.01': (True, 'self.tau = math', 'self.tau = 1.01 * math'),
    'slopes x 1.01': (True, 'return 2.0 ** (-8', 'return 1.01 * 2.0 ** (-8'),
    'the diagonal': (True, 'self.kq_diag[:, None] / self.tau',
                     '1.01 * self.kq_diag[:, None] / self.tau'),
    'a window': (True, 'b = pos.mask', 'b = pos.mask.masked_fill(pos.distance > 40, -torch.inf)'),
    'a long window': (False, 'b = pos.mask',
                      'b = pos.mask.masked_fill(pos.distance > 70, -torch.inf)'),
    'norm': (True, 'NORM_EPS = 1e-5', 'NORM_EPS = 2e-5'),
    'two losses': (False, "return F.cross_entropy(logits, targets, reduction='sum')",
                   "return F.cross_entropy(logits, targets, reduction='sum') + logits.sum()"),
    'a detach': (False, 'h = self.norm(x)                                         # h_j <-',
                 'h = self.norm(x).detach()  #'),
    'a dropout': (False, 'x = F.embedding(idx, self.embedding)',
                  'x = F.dropout(F.embedding(idx, self.embedding), 0.1, self.training)'),
    'another name': (False, 'return x + g @ self.W_d', 'y = g @ self.W_d; return x + y')}
OPTIONS = dict(size='nano', vocab_size=300, context_length=80, kq_diag='shared', attn_steps=2)


def edited_text(old: str, new: str) -> str:
    assert old in runs.MODEL_TEXT
    return runs.MODEL_TEXT.replace(old, new)


def module_of(text: str) -> ModuleType:
    module = ModuleType('edited_model')
    sys.modules[module.__name__] = module  # where dataclasses look for types
    exec(compile(text, 'edited_model.py', 'exec'), vars(module))
    return module


@pytest.mark.parametrize('edit', EDITS)
def test_an_edit_is_told(edit: str) -> None:
    shown, *lines = EDITS[edit]
    rope = dict(positions='rope') if 'window' in edit else {}  # ALiBi weighs such distances as 0
    model = randomize(Transformer(ModelConfig(**OPTIONS | rope)), seed=3).float()
    kept = same.outputs(model)
    assert same.find_change(model, kept) == ''
    text = edited_text(*lines)
    other = module_of(text).Transformer(model.cfg)
    other.load_state_dict(model.state_dict())
    assert ('are not those that were kept' in same.find_change(other, kept)) == shown


@pytest.mark.parametrize('residual', ['raw', 'normed'])
def test_rounding_is_no_change(residual: str) -> None:
    """Another order of sums, in many layers from normed starts, and other weights."""
    model = randomize(Transformer(ModelConfig(**OPTIONS | dict(
        n_layer=24, residual=residual, match_bias='token'))), seed=4).float()
    kept = same.outputs(model)
    for block in model.blocks:  # the scores written out
        block.attn.adds_diagonal = True
        block.attn.diagonal_update = lambda alpha, h: torch.zeros_like(h[:, :alpha.shape[2]])
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
    assert 'nan' not in same.find_change(model, kept)
    model.blocks[0].mlp.W = None
    assert 'does not run (TypeError' in same.find_change(model, kept)


@pytest.mark.parametrize('number', [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_hides_no_other_difference(number: float) -> None:
    """Such as the logits of ids that an edit never predicts."""
    right = torch.randn(5, 9, generator=torch.Generator().manual_seed(6))
    right[:, -1] = number
    found = right.clone()
    assert same.agree(found, right)
    found[2, 3] += 1e-3
    assert not same.agree(found, right)
    found = right.clone()
    for other in 1.0, -math.inf if number == math.inf else math.inf:
        found[2, -1] = other
        assert not same.agree(found, right) and not same.agree(right, found)


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
    model = module_of(text).Transformer(ModelConfig(**OPTIONS))
    same.warn_if_not_causal(model)
    assert ('is not causal' in capsys.readouterr().err) == bool(edit)


def test_outputs_disturb_nothing_and_are_alike_in_any_precision_and_mode() -> None:
    model = randomize(Transformer(ModelConfig(**OPTIONS)), seed=6).float()
    state, kept = torch.get_rng_state(), same.outputs(model)
    with torch.autocast('cpu', torch.bfloat16), torch.inference_mode():
        found = same.outputs(model.train())
    assert found == kept and model.training and model.head.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert json.loads(json.dumps(kept)) == kept


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

def forget_ours() -> None:
    """Let a process import the modules of the folder that it works in, and none of this one."""
    for name in [*sys.modules]:
        if name.partition('.')[0] in ('train', 'model', 'configurator', 'nanocem'):
            del sys.modules[name]


def train(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return running.run_script(folder / 'train.py', *options, cwd=folder, before=forget_ours)


def test_a_run_goes_on_with_an_edit_that_changes_no_logit(tmp_path: Path) -> None:
    """A line says so, and the run's folder has both texts. An edit that computes something else is
    refused."""
    for name in ('train.py', 'configurator.py', 'model.py'):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / 'nanocem', tmp_path / 'nanocem')
    data = write_data(tmp_path / 'data')
    begun = train(tmp_path, *TINY, f'--data={data}', '--out_dir=o', running.steps(6),
                  '--stop_step=2')
    assert begun.returncode == 75, begun.stderr
    assert (tmp_path / 'o/model.py').read_text() == runs.MODEL_TEXT
    # One that computes something else
    (tmp_path / 'model.py').write_text(edited_text(*EDITS['SiLU -> GELU'][1:]))
    refused = train(tmp_path, '--out_dir=o', RESUME)
    assert refused.returncode == 1 and 'Traceback' not in refused.stderr
    assert 'its logits are not those that were kept' in refused.stderr
    # A dropout, and then the text of before
    (tmp_path / 'model.py').write_text(edited_text(*EDITS['a dropout'][1:]))
    resumed = train(tmp_path, '--out_dir=o', RESUME, '--stop_step=4')
    assert resumed.returncode == 75 and 'model.py was edited since step 2' in resumed.stderr
    assert 'diff o/model_until_2.py' in resumed.stderr
    assert 'F.dropout' in (tmp_path / 'o/model.py').read_text()
    assert (tmp_path / 'o/model_until_2.py').read_text() == runs.MODEL_TEXT
    (tmp_path / 'model.py').write_text(runs.MODEL_TEXT)
    ended = train(tmp_path, '--out_dir=o', RESUME)
    assert ended.returncode == 0 and 'edited since step 4' in ended.stderr, ended.stderr
    assert (tmp_path / 'o/model_until_4.py').exists()


def test_every_text_that_has_trained_a_run_is_kept(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The run begins with A, and at step 4 goes on with B, and again, for B was stopped, with C."""
    for text, step in (('A', 0), ('A', 2), ('B', 4), ('C', 4), ('D', 6)):
        monkeypatch.setattr(runs, 'MODEL_TEXT', text)
        runs.keep_model_py(str(tmp_path), step)
        said = capsys.readouterr().err
        line = f'diff {tmp_path}/model_until_{step}.py {tmp_path}/model.py'
        assert (line in said) == (text != 'A') and said.count('\n') == (text != 'A')
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {'model.py': 'D', 'model_until_4.py': 'A', 'model_until_6.py': 'C'}


def test_a_deep_copy_keeps_its_own_weights() -> None:
    model = randomize(Transformer(ModelConfig(**OPTIONS)), seed=8).float()
    other = copy.deepcopy(model)
    assert same.outputs(model) == same.outputs(other)


# Layers: edits that break them, the options that show it, and the line that says so
MINUS_THE_GRADIENT = 'a step differs from minus the gradient of energy by'
BROKEN = {
    'SiLU -> GELU': ('return F.silu(z)', 'return F.gelu(z)', {}, 'CEMMLP'),
    'GELU beside P': ('return F.silu(z)', 'return F.gelu(z)',
                      dict(preconditioner='diag_lowrank'), 'CEMMLP'),
    'a sharper softmax': ('pos, u, h).softmax(', 'pos, u, h).mul(2).softmax(', {}, 'CEMAttention'),
    'a scaled score, fused': ('pos, u, h), self.tau), 0', 'pos, u, h), 2 * self.tau), 0',
                              dict(positions='rope'), 'CEMAttention'),
    'a dropped bias': ('self.scores(q, k, pos, u, h).softmax(',
                       '((q / self.tau) @ k.mT + pos.mask).softmax(', {}, 'CEMAttention'),
    'no way back': ('pos, inverse=True)', 'pos)', dict(positions='rope'), 'CEMAttention'),
    'no diagonal': ('return self.P(self.kq_diag', 'return 0 * self.P(self.kq_diag',
                    dict(kq_diag='shared'), 'CEMAttention'),
    'a longer step': ('x = x + self.eta * dx', 'x = x + 1.001 * self.eta * dx', {}, 'CEMMLP')}
SOFT_CAP = ('return (q / self.tau) @ k.mT', 'return 9 * torch.tanh((q / self.tau) @ k.mT / 9)')


def edited_model(old: str, new: str, **options: Any) -> Any:
    made = module_of(edited_text(old, new))
    return made.Transformer(made.ModelConfig(size='nano', vocab_size=50, **options))


@pytest.mark.parametrize('edit', BROKEN)
def test_an_edit_after_which_a_step_does_not_descend_is_told(
        edit: str, capsys: pytest.CaptureFixture) -> None:
    old, new, options, name = BROKEN[edit]
    model = edited_model(old, new, **options)
    assert same.step_errors(model)[name] > 5e-4
    same.warn_of_wrong_layers(model)
    assert f'{name}: {MINUS_THE_GRADIENT}' in capsys.readouterr().err


@pytest.mark.parametrize('options', [
    {}, dict(positions='rope', attn_steps=3), dict(residual='normed'), dict(kq_diag='shared'),
    dict(kq_diag='per_head', exact_update=True), dict(mlp_energy='sign_convex'),
    dict(preconditioner='diag_lowrank', attn_rank=7), dict(attn='llama', tie='both'),
    dict(kq_diag='scaled', key_shift='half', match_bias='token'),
    dict(untied_output=True, kq_diag='scaled'), dict(attn_steps=2, n_kv_head=1),
    dict(attn='llama', mlp='llama', positions='alibi')], ids=str)
def test_steps_are_minus_the_gradient(options: dict, capsys: pytest.CaptureFixture) -> None:
    model = Transformer(ModelConfig(size='nano', vocab_size=50, **options))
    errors = same.step_errors(model)
    kinds = {'CEMAttention': model.cfg.attn, 'CEMMLP': model.cfg.mlp}
    expected = {name for name, kind in kinds.items() if kind == 'cem'}
    assert set(errors) == expected and max([0, *errors.values()]) < 1e-12
    assert same.attend_error(model) < 1e-12
    same.warn_of_wrong_layers(model)
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('options', [
    dict(), dict(positions='rope'), dict(attn='llama'), dict(attn='llama', positions='alibi')],
    ids=str)
@pytest.mark.parametrize('on_gpu', [False, True])
def test_scores_that_attend_does_not_use_are_told(
        options: dict, on_gpu: bool, capsys: pytest.CaptureFixture,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """With RoPE, and on a GPU, torch's attention stands for them; else an edit of them runs."""
    monkeypatch.setattr(torch.Tensor, 'is_cuda', on_gpu)
    model = edited_model(*SOFT_CAP, **options)
    positions = options.get('positions', 'alibi' if 'attn' not in options else 'rope')
    fused = on_gpu or positions == 'rope'
    assert (same.attend_error(model) > 1e-4) == fused
    same.warn_of_wrong_layers(model)
    assert ('attend does not give the sums that softmax_attention and scores write out' in
            capsys.readouterr().err) == fused


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_layers_are_checked_where_they_train() -> None:
    """On a GPU `attend` may choose otherwise than on a CPU."""
    model = edited_model(*SOFT_CAP)
    assert same.attend_error(model) < 1e-12 and same.attend_error(model.cuda()) > 1e-4


def test_layers_that_cannot_be_checked_are_told(capsys: pytest.CaptureFixture) -> None:
    model = edited_model('return F.silu(z)', 'return z.item()')
    same.warn_of_wrong_layers(model)
    assert 'this model.py cannot be checked (RuntimeError: ' in capsys.readouterr().err

"""Exports: the folder alone gives transformers the same model and tokenizer, and is read back."""
import ast
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_evaluate import cells, model_of, write_run
from test_tokenizers import LLAMA, NASTY, WORDS, documents, small_gpt2

import evaluate
import export
import running
import sample
from model import CEMMLP, LlamaMLP, Transformer
from nanocem import hub
from nanocem.hub import WEIGHTS_FILE
from nanocem.hub_tokenizer import convert_tokenizer
from nanocem.runs import load_model
from nanocem.sampling import sample_text
from nanocem.tokenizers import (
    UNCONVERTED_FILE,
    ByteTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    train_bpe,
)

transformers = pytest.importorskip('transformers')
LLAMA_MODEL = dict(attn='llama', mlp='llama')
MODELS = [
    {}, dict(kq_diag='per_head', preconditioner='diag_lowrank', exact_update=True),
    dict(attn='llama', tie='kv'), dict(mlp='llama', residual='normed', attn_reuse=2),
    dict(LLAMA_MODEL, positions='alibi', tie='both'), dict(LLAMA_MODEL, rope_theta=500.0)]
FILES = {'README.md', 'config.json', 'generation_config.json', 'model.safetensors',
         'tokenizer.json', 'tokenizer_config.json'}
TEXTS = ['d\u00e9j\u00e0 <s>', 'Th', '', 'The energy']

# What a program elsewhere does with exported folders, this repository not being on its path
ELSEWHERE = """
import os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {}
for folder in sys.argv[1:]:
    code = dict(trust_remote_code=True) if os.path.exists(folder + '/model.py') else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **code)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    padded = tokenizer(TEXTS, return_tensors='pt', padding=True)
    idx = padded.input_ids
    logits = model(idx).logits
    for kept in (2, torch.tensor([-2, -1])):
        assert torch.equal(model(idx, logits_to_keep=kept).logits, logits[:, -2:])
    found[folder] = dict(
        padded=model(**padded).logits[padded.attention_mask.bool()], idx=idx,
        loss=model(idx, labels=idx).loss,
        generated=[model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=5)[0]
                   for ids in tokenizer(TEXTS).input_ids])
    model.save_pretrained(folder + '-again')  # what push_to_hub uploads
    again = AutoModelForCausalLM.from_pretrained(folder + '-again', **code)
    assert torch.equal(again(idx).logits, logits)
cem = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, attn_steps=5)
assert cem.model.cfg.attn_steps == 5
assert not {'model', 'nanocem', 'configurator'} & sys.modules.keys()
torch.save(found, 'found.pt')
""".replace('TEXTS', repr(TEXTS))
PRETRAINED = ['cem_one_tie', 'llama_three', 'cem', 'cem_plain', 'cem_plain_copies', 'llama_alibi']


def state_of(model: Transformer, tokenizer: str = 'byte') -> dict[str, Any]:
    return {'data': {'tokenizer': tokenizer, 'tokenizer_sha256': None, 'vocab_size': 257},
            'data_dir': 'gone', 'model_config': vars(model.cfg), 'step': 2}


@pytest.mark.slow
@torch.no_grad()
def test_a_program_elsewhere_finds_the_same_model(tmp_path: Path) -> None:
    models = {str(tmp_path / f'hub{n}'): model_of(**options) for n, options in enumerate(MODELS)}
    for folder, model in models.items():
        hub.export(model, folder, state_of(model))
        # A Llama with RoPE is transformers' own, and comes without code
        plain = folder.endswith('hub5')
        code = set() if plain else {Path(name).name for name in hub.CODE}
        assert {path.name for path in Path(folder).iterdir()} == FILES | code
        card = (Path(folder) / 'README.md').read_text()
        assert 'Tokenizer: byte, vocabulary 257. T' in card and 'arxiv.org/abs/2605.07588' in card
        assert ('trust_remote_code=True' in card) == (not plain)
        # The file has each weight once, in 4 bytes, and a header
        rest = os.path.getsize(f'{folder}/model.safetensors') - 4 * model.num_params()
        assert 0 < rest < 8000
    env = {**os.environ, 'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path / 'home')}
    env.pop('PYTHONPATH', None)
    done = subprocess.run([sys.executable, '-c', ELSEWHERE, *models], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    documents = [[256, *text.encode()] for text in TEXTS]
    for folder, found in torch.load(tmp_path / 'found.pt').items():
        model, idx = models[folder], found['idx']
        alone = torch.cat([model(torch.tensor([ids]))[0][0] for ids in documents])
        torch.testing.assert_close(found['padded'], alone, rtol=1e-5, atol=1e-5)
        logits, _ = model(idx)
        assert found['loss'].item() == pytest.approx(model(idx[:, :-1], idx[:, 1:])[1].item(), 1e-5)
        for ids, theirs in zip(documents, found['generated'], strict=True):
            ours = model.generate(torch.tensor([ids]), 5, temperature=0)[0].tolist()
            end = ours.index(256, 1) + 1 if 256 in ours[1:] else len(ours)
            assert theirs.tolist() == ours[:end]  # transformers stops at BOS
        for place in (folder, f'{folder}-again'):
            again, state = load_model(place)
            assert torch.equal(again(idx)[0], logits) and again.cfg == model.cfg
            assert again.num_params() == model.num_params() and state['step'] == 2


@torch.no_grad()
def test_what_the_exported_model_does_not_take_is_refused(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    folder, model = tmp_path / 'hub', model_of(preconditioner='diag')
    hub.export(model, str(folder), state_of(model))
    model = NanocemForCausalLM.from_pretrained(folder)
    idx = torch.randint(256, (2, 6))
    with pytest.raises(ValueError, match='does not take position_ids, use_cache'):
        model(idx, position_ids=torch.arange(6)[None], use_cache=True)
    # A tuple has what the object has
    for labels in (None, idx):
        asked = model(idx, labels=labels, return_dict=False)
        assert all(map(torch.equal, asked, model(idx, labels=labels).to_tuple()))
        assert type(asked) is tuple and len(asked) == 1 + (labels is not None)
    # A mask can only say that the end of a text is padding
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    assert torch.equal(model(idx, mask).logits, model(idx, mask.bool()).logits)
    for wrong in (mask.flip(1), mask.flip(1).bool(), torch.ones(2, 1, 6, 6)):
        with pytest.raises(ValueError, match='padding on the right alone'):
            model(idx, wrong)
    with pytest.raises(ValueError, match='this batch is padded'):
        model.generate(idx, attention_mask=mask, max_new_tokens=1)


@torch.no_grad()
@pytest.mark.parametrize('options', [
    {}, dict(kq_diag='shared'), dict(positions='rope', attn_steps=2),
    dict(LLAMA_MODEL, positions='alibi')], ids=str)
def test_generation_reads_only_new_tokens(
        options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams reorder their texts, and give what they give without a cache."""
    from nanocem.modeling_nanocem import NanocemForCausalLM
    hub.export(model_of(**options), str(tmp_path / 'hub'), state_of(model_of(**options)))
    model = NanocemForCausalLM.from_pretrained(tmp_path / 'hub')
    idx = torch.randint(256, (2, 6), generator=torch.Generator().manual_seed(1))
    idx, hidden, read = idx.index_fill(1, torch.tensor([0]), 256), Transformer.hidden, []
    for number, options in enumerate((
            dict(do_sample=False), dict(do_sample=True, top_k=20, num_return_sequences=2),
            dict(do_sample=False, num_beams=3), dict(do_sample=True, num_beams=2))):
        torch.manual_seed(number)
        # As many as make the text longer than the context of 16
        options = dict(options, max_new_tokens=14, min_new_tokens=14)
        right = transformers.GenerationMixin.generate(model, idx, **options)
        torch.manual_seed(number)
        assert torch.equal(model.generate(idx, **options), right) and right.shape[1] == 20
    monkeypatch.setattr(Transformer, 'hidden', lambda self, new, cache=None: (
        read.append(new.shape[1]) or hidden(self, new, cache)))
    model.generate(idx, do_sample=False, max_new_tokens=8, min_new_tokens=8)
    assert read[-8:] == [6, *[1] * 7]
    model.generate(idx, do_sample=False, max_new_tokens=3, min_new_tokens=3, use_cache=False)
    assert read[-3:] == [6, 7, 8]


def test_embeddings_are_the_models_own_and_can_be_resized(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    hub.export(model_of(), str(tmp_path / 'hub'), state_of(model_of()))
    model, info = NanocemForCausalLM.from_pretrained(tmp_path / 'hub', output_loading_info=True)
    assert not any(map(len, (info['missing_keys'], info['unexpected_keys'])))
    assert model.get_input_embeddings().weight is model.model.embedding
    assert model.get_output_embeddings().weight is model.model.head
    idx = torch.randint(256, (1, 6))
    with torch.no_grad():
        right = model(idx).logits
        assert model.resize_token_embeddings(300).weight.shape[0] == 300
        assert model(idx).logits.shape == (1, 6, 300)
        torch.testing.assert_close(model(idx).logits[..., :257], right)
    model(torch.tensor([[299, 1]]), labels=torch.tensor([[299, 1]])).loss.backward()
    assert model.model.embedding.grad[299].any() and model.model.head.grad.shape[0] == 300
    model.save_pretrained(tmp_path / 'larger')
    again = NanocemForCausalLM.from_pretrained(tmp_path / 'larger')
    assert torch.equal(again(idx).logits, model(idx).logits)
    assert again.model.cfg.vocab_size == model.model.cfg.vocab_size == 300


@pytest.mark.slow
def test_an_edited_export_is_what_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    edits = {'scores': ('(q / self.tau) @ k.mT', '(2 * q / self.tau) @ k.mT'),
             'activation': ('g = gamma * F.silu(z)', 'g = gamma * F.gelu(z)'),
             # An MLP that looks back, which a cache cannot
             'back': ('g = gamma * F.silu(z)', 'g = gamma * F.silu(z + z.roll(1, 1))')}
    for name, (line, other) in edits.items():
        hub.export(model_of(), str(tmp_path / name), state_of(model_of()))
        code = tmp_path / name / 'model.py'
        edited = code.read_text().replace(line, other)
        assert edited != code.read_text()
        code.write_text(edited)
    script = """
import sys
import torch
from transformers import AutoModelForCausalLM
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    idx = torch.arange(6)[None]
    with torch.no_grad():
        for new in model.generate(idx, do_sample=False, max_new_tokens=6, min_new_tokens=6)[0, 6:]:
            right = model(idx).logits[0, -1, :256].argmax()  # BOS ends a text
            assert new == right
            idx = torch.cat([idx, right[None, None]], dim=1)
"""
    (tmp_path / 'script.py').write_text(script)
    done = running.run_script(tmp_path / 'script.py', *edits, cwd=tmp_path, HF_HUB_OFFLINE='1',
                              HF_HOME=str(tmp_path / 'home'))
    assert done.returncode == 0, done.stderr
    # Here model.py's own classes run
    for name in edits:
        load_model(str(tmp_path / name))
        assert f'{name}/model.py was edited, and is not the model.py here' in (
            capsys.readouterr().err)


def test_an_edited_llama_is_exported_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """LlamaForCausalLM would compute something else."""
    model = model_of(**LLAMA_MODEL)
    assert hub.is_plain_llama(model)
    monkeypatch.setattr(LlamaMLP, 'forward', lambda self, x: x)
    assert not hub.is_plain_llama(model)


@torch.no_grad()
@pytest.mark.parametrize('options', [{}, LLAMA_MODEL], ids=['cem', 'llama'])
def test_label_smoothing_smooths_the_next_token(options: dict, tmp_path: Path) -> None:
    """Trainer's loss has the targets of the loss without smoothing, and not a text's own tokens."""
    from transformers import trainer_pt_utils
    model = model_of(**options)
    hub.export(model, str(tmp_path / 'hub'), state_of(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / 'hub', trust_remote_code=True)
    trainer = SimpleNamespace(  # what compute_loss asks of it
        label_smoother=trainer_pt_utils.LabelSmoother(epsilon=0.1), compute_loss_func=None,
        model_accepts_loss_kwargs=False, args=SimpleNamespace(average_tokens_across_devices=False),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model))
    ids = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(2))
    found = transformers.Trainer.compute_loss(trainer, theirs, {'input_ids': ids, 'labels': ids})
    log_p = model(ids)[0][:, :-1].log_softmax(dim=-1)
    right = torch.nn.functional.cross_entropy(
        log_p.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, right)


# A plain Llama, which any program may change

def save_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**config, **changes}))


@torch.no_grad()
def test_a_llama_that_transformers_changed_means_the_same_here(tmp_path: Path) -> None:
    source, new = tmp_path / 'hub', tmp_path / 'new'
    model = model_of(**LLAMA_MODEL, rope_theta=500.0)
    hub.export(model, str(source), state_of(model))
    idx = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(1))
    base = {'rope_theta': 50.0, 'rope_type': 'default'}
    for changes, field, value in [
            ({'rope_parameters': base}, 'rope_theta', 50.0),
            ({'max_position_embeddings': 40}, 'context_length', 40),
            ({'num_hidden_layers': 1}, 'n_layer', 1)]:
        config = transformers.AutoConfig.from_pretrained(source, **changes)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(source, config=config)
        theirs.save_pretrained(new)
        ours, state = load_model(str(new))
        assert getattr(ours.cfg, field) == value and state['step'] == 2
        torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)
    # transformers 4 writes the base beside rope_scaling, and a program may edit the file alone
    for changes in {'rope_scaling': None, 'rope_theta': 9.0}, {'rope_theta': 9.0}:
        hub.export(model_of(**LLAMA_MODEL), f'{tmp_path}/{len(changes)}', state_of(model_of()))
        save_config(tmp_path / str(len(changes)), **changes)
        assert load_model(f'{tmp_path}/{len(changes)}')[0].cfg.rope_theta == 9.0


@torch.no_grad()
@pytest.mark.parametrize('options', [LLAMA_MODEL, {}], ids=['llama', 'cem'])
def test_added_chat_tokens_are_read(
        tmp_path: Path, capfd: pytest.CaptureFixture, options: dict) -> None:
    """The larger vocabulary is that of the weights. Our tokenizer has no text for the new ids."""
    from nanocem.modeling_nanocem import NanocemForCausalLM
    source, new = str(tmp_path / 'hub'), str(tmp_path / 'new')
    hub.export(model_of(**options), source, state_of(model_of(**options)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    tokenizer.add_tokens(['<|user|>', '<|model|>'])
    Model = transformers.LlamaForCausalLM if options else NanocemForCausalLM
    theirs = Model.from_pretrained(source)
    theirs.resize_token_embeddings(len(tokenizer))
    theirs.save_pretrained(new)
    ours, _ = load_model(new)
    assert 'has 259 ids, its data had 257' in capfd.readouterr().out
    idx = torch.tensor([tokenizer('<|user|>A text<|model|>').input_ids])
    assert 258 in idx and ours.cfg.vocab_size == 259
    torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)
    sample.main([f'--out_dir={new}', '--device=cpu', '--tokens=4'])
    # config.json may say a size that its weights do not have
    save_config(Path(new), vocab_size=257)
    with pytest.raises(ValueError, match=r'not describe.*(lm_|model\.)head'):
        load_model(new)


CHANGES = [
    {'rope_parameters': {'rope_theta': 1e4, 'rope_type': 'linear', 'factor': 4.0}},
    {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, {'rms_norm_eps': 0.1},
    {'tie_word_embeddings': True}, {'attention_bias': True}, {'mlp_bias': True},
    {'hidden_act': 'gelu'}, {'sliding_window': 8}, {'head_dim': 4},
    {'quantization_config': {'quant_method': 'fp8'}}]


@pytest.mark.parametrize('change', CHANGES, ids=lambda change: next(iter(change)))
def test_what_our_llama_cannot_compute_is_refused_by_name(tmp_path: Path, change: dict) -> None:
    hub.export(model_of(**LLAMA_MODEL), f'{tmp_path}/hub', state_of(model_of(**LLAMA_MODEL)))
    save_config(tmp_path / 'hub', **change)
    name = 'rope_type' if 'rope' in next(iter(change)) else next(iter(change))
    with pytest.raises(ValueError, match=f'config.json: our model cannot compute {name}='):
        load_model(f'{tmp_path}/hub')


@torch.no_grad()
@pytest.mark.parametrize('n_kv_head', [2, 1])
def test_a_llama_with_grouped_queries_is_transformers_own(n_kv_head: int, tmp_path: Path) -> None:
    folder, again = tmp_path / 'hub', tmp_path / 'again'
    model = model_of(**LLAMA_MODEL, n_head=4, n_kv_head=n_kv_head)
    hub.export(model, str(folder), state_of(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == 'LlamaForCausalLM'
    assert theirs.config.num_key_value_heads == n_kv_head
    assert sum(p.numel() for p in theirs.parameters()) == model.num_params()
    idx = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(idx)[0], theirs(idx).logits, rtol=0, atol=1e-5)
    theirs.save_pretrained(again)
    for place in folder, again:
        ours, _ = load_model(str(place))
        assert ours.cfg == model.cfg
        assert all(map(torch.equal, ours.parameters(), model.parameters()))
    # A number that the weights do not have
    for value, said in ((4, 'not describe the weights'), (None, 'not describe the weights'),
                        (3, 'n_head=4 is not a multiple of n_kv_head=3')):
        save_config(again, num_key_value_heads=value)
        with pytest.raises(ValueError, match=said):
            load_model(str(again))


@torch.no_grad()
def test_an_export_of_cem_with_grouped_queries(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    model = model_of(n_head=4, n_kv_head=2)
    hub.export(model, str(tmp_path / 'hub'), state_of(model))
    theirs = NanocemForCausalLM.from_pretrained(tmp_path / 'hub')
    assert theirs.config.num_key_value_heads == theirs.config.n_kv_head == 2
    theirs.save_pretrained(tmp_path / 'again')
    idx = torch.arange(16)[None]
    for place in 'hub', 'again':
        ours, _ = load_model(f'{tmp_path}/{place}')
        assert ours.cfg == model.cfg and torch.equal(ours(idx)[0], theirs(idx).logits)


def test_a_missing_norm_eps_is_that_of_transformers(tmp_path: Path) -> None:
    hub.export(model_of(**LLAMA_MODEL), f'{tmp_path}/hub', state_of(model_of(**LLAMA_MODEL)))
    config = json.loads((tmp_path / 'hub/config.json').read_text())
    del config['rms_norm_eps']
    (tmp_path / 'hub/config.json').write_text(json.dumps(config))
    assert transformers.AutoConfig.from_pretrained(tmp_path / 'hub').rms_norm_eps == 1e-6
    with pytest.raises(ValueError, match='rms_norm_eps=1e-06'):
        load_model(f'{tmp_path}/hub')


@torch.no_grad()
@pytest.mark.parametrize('options', [{}, LLAMA_MODEL], ids=['cem', 'llama'])
def test_an_export_carries_what_it_computes(
    options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Also where transformers has trained it on, or changed an option. model.py is edited here, or
    in the folder."""
    folder, trained, classes = f'{tmp_path}/hub', f'{tmp_path}/trained', transformers
    hub.export(model_of(**options), folder, state_of(model_of(**options)))
    if not options:
        from nanocem import modeling_nanocem as classes
    name = 'LlamaForCausalLM' if options else 'NanocemForCausalLM'
    model = getattr(classes, name).from_pretrained(folder, max_position_embeddings=40)
    for w in model.parameters():
        w.mul_(1.1)
    model.save_pretrained(trained)
    for place in folder, trained:
        load_model(place)
    assert 'Warning' not in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, 'silu', torch.nn.functional.gelu)
        for place in folder, trained:
            load_model(place)
            said = f'Warning: {place}: its logits are not those that were kept'
            # What another program has trained on gives other logits anyway
            assert (said in capsys.readouterr().err) == (place == folder)
        again, state = load_model(folder)
        with pytest.raises(ValueError, match='an export holds the classes of model'):
            hub.export(again, f'{tmp_path}/again', state)
    with monkeypatch.context() as patch:  # a class that computes the same
        patch.setattr('model.CEMMLP', type('Mine', (CEMMLP,), {}))
        model, state = load_model(folder)
        hub.export(model, f'{tmp_path}/mine', state)
    # Another model with the same weights
    base = {'rope_theta': 9.0, 'rope_type': 'default'}
    save_config(Path(trained), **({'rope_parameters': base} if options else {'key_shift': 'half'}))
    capsys.readouterr()
    load_model(trained)
    what = 'rope_theta=10000.0 (now 9.0)' if options else 'key_shift=none (now half)'
    assert (f'Warning: {trained}/config.json was edited: it was exported with {what}'
            in capsys.readouterr().err)
    if not options:
        with open(f'{folder}/model.py', 'a') as file:
            file.write('NORM_EPS = 1e-6\n')
        load_model(folder)
        assert f'Warning: {folder}/model.py was edited' in capsys.readouterr().err


@pytest.mark.parametrize('name', PRETRAINED)
def test_pretrained_models_carry_what_they_compute(
        name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    load_model(str(running.ROOT / 'pretrained' / name))
    assert 'Warning' not in capsys.readouterr().err
    monkeypatch.setattr(torch.nn.functional, 'silu', torch.nn.functional.gelu)
    load_model(str(running.ROOT / 'pretrained' / name))
    assert 'its logits are not those that were kept' in capsys.readouterr().err


def test_another_program_s_model_is_refused_in_a_line(tmp_path: Path) -> None:
    hub.export(model_of(**LLAMA_MODEL), f'{tmp_path}/hub', state_of(model_of(**LLAMA_MODEL)))
    save_config(tmp_path / 'hub', model_type='mistral')
    with pytest.raises(ValueError, match=r'expected model_type=llama or nanocem \(it is mistral'):
        load_model(f'{tmp_path}/hub')


# config.json of exports by an older version: our fields stood beside those of transformers
OLD_SIZE = {'size': '134m', 'd_model': 16, 'n_layer': 2, 'n_head': 2, 'd_mlp': 24,
            'vocab_size': 257, 'context_length': 16}
OLD_IDS = {
    'bos_token_id': 256, 'eos_token_id': 256, 'pad_token_id': 256, 'dtype': 'float32',
    'run': {'step': 2, 'data_dir': '/home/me/data', 'data': {
        'tokenizer': 'byte', 'tokenizer_sha256': None, 'vocab_size': 257, 'train tokens': 4013}}}
OLD_LLAMA = {
    'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'hidden_act': 'silu',
    'vocab_size': 257, 'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 2,
    'num_attention_heads': 2, 'num_key_value_heads': 2, 'max_position_embeddings': 16,
    'rms_norm_eps': 1e-05, 'rope_theta': 500.0, 'tie_word_embeddings': False,
    'nanocem': {**OLD_SIZE, 'attn': 'llama', 'mlp': 'llama', 'tie': 'none', 'attn_steps': 1,
                'mlp_steps': 1, 'attn_reuse': 1, 'mlp_reuse': 1, 'attn_step_size': 1.0,
                'mlp_step_size': 1.0, 'positions': 'rope', 'kq_diag': 'none',
                'score_scale': 'head', 'preconditioner': 'none', 'attn_rank': 4, 'mlp_rank': 16,
                'residual': 'raw', 'exact_update': False, 'mlp_energy': 'gated',
                'mlp_match': 'dims', 'init_std': 0.13856406460551018, 'rope_theta': 500.0},
    **OLD_IDS}
OLD_CEM = {
    'model_type': 'nanocem', 'architectures': ['NanocemForCausalLM'],
    'auto_map': {'AutoConfig': 'modeling_nanocem.NanocemConfig',
                 'AutoModelForCausalLM': 'modeling_nanocem.NanocemForCausalLM'},
    **OLD_SIZE, 'attn': 'cem', 'mlp': 'cem', 'tie': 'none', 'attn_steps': 2, 'mlp_steps': 2,
    'attn_reuse': 1, 'mlp_reuse': 1, 'attn_step_size': 0.5, 'mlp_step_size': 0.5,
    'positions': 'alibi', 'kq_diag': 'none', 'score_scale': 'model', 'preconditioner': 'none',
    'attn_rank': 4, 'mlp_rank': 16, 'residual': 'raw', 'exact_update': False,
    'mlp_energy': 'gated', 'mlp_match': 'dims', 'init_std': 0.13856406460551018,
    'rope_theta': 10000.0, **OLD_IDS}


@torch.no_grad()
@pytest.mark.parametrize('config', [OLD_LLAMA, OLD_CEM], ids=['llama', 'cem'])
def test_older_exports_load(tmp_path: Path, config: dict) -> None:
    model = model_of(**{**LLAMA_MODEL, 'rope_theta': 500.0} if config is OLD_LLAMA else {})
    hub.export(model, f'{tmp_path}/hub', state_of(model))
    (tmp_path / 'hub/config.json').write_text(json.dumps(config))
    again, state = load_model(f'{tmp_path}/hub')
    assert again.cfg == model.cfg and state['data_dir'] == '/home/me/data'
    idx = torch.arange(16)[None]
    assert torch.equal(again(idx)[0], model(idx)[0])


def test_a_published_folder_has_no_path_of_this_machine(tmp_path: Path) -> None:
    for n, (data_dir, public) in enumerate([
            (f'{tmp_path}/corpus', 'corpus'), (f'{tmp_path}/corpus/', 'corpus'),
            ('../../me/corpus', 'corpus'), ('C:\\Users\\me\\corpus', 'corpus'),
            ('data/english', 'data/english')]):
        state = {**state_of(model_of()), 'data_dir': data_dir}
        hub.export(model_of(), f'{tmp_path}/{n}', state)
        assert load_model(f'{tmp_path}/{n}')[1]['data_dir'] == public
        files = [file.read_bytes() for file in (tmp_path / str(n)).iterdir()]
        assert not any(str(tmp_path).encode() in content for content in files)


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    folder, model = tmp_path / 'hub', model_of(preconditioner='diag')
    hub.export(model, str(folder), state_of(model))
    for options, name in ((dict(vocab_size=300, ignore_mismatched_sizes=True), 'model.embedding'),
                          (dict(preconditioner='none'), 'attn.P.diag')):
        with pytest.raises(ValueError, match=f'are not those.*{name}'):
            NanocemForCausalLM.from_pretrained(folder, **options)
    weights = load_file(folder / WEIGHTS_FILE)
    del weights['model.blocks.1.mlp.V']
    save_file(weights, folder / WEIGHTS_FILE, {'format': 'pt'})
    for read in NanocemForCausalLM.from_pretrained, hub.read_export:
        with pytest.raises(ValueError, match=r'blocks\.1\.mlp\.V'):
            read(str(folder))


def test_an_export_appears_whole_or_not_at_all(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, 'write_tokenizer', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hub.export(model_of(), str(tmp_path / 'hub'), state_of(model_of()))
    assert not list(tmp_path.iterdir())
    (tmp_path / 'mount/lost+found').mkdir(parents=True)  # a new disk
    monkeypatch.setattr(hub, 'write_tokenizer', lambda *_: '')
    hub.export(model_of(), str(tmp_path / 'mount'), state_of(model_of()))
    assert {'config.json', 'lost+found', WEIGHTS_FILE} < {*os.listdir(tmp_path / 'mount')}


# Tokenizers

@pytest.fixture(scope='module')
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Of bytes, our own pieces and Llama's: our tokenizer, and transformers' from an export."""
    folder = tmp_path_factory.mktemp('tokenizers')
    texts = [*documents(100, seed=3), (running.ROOT / 'model.py').read_text(encoding='utf-8')]
    train_bpe(f'{folder}/bpe.model', 600, texts)
    paths = [f'{folder}/bpe.model', *([LLAMA] if os.path.isfile(LLAMA) else [])]
    found = {}
    for ours in [ByteTokenizer(), *map(SentencePieceTokenizer, paths)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hub, 'tokenizer_of', lambda state, ours=ours: ours)
            hub.export(model_of(), f'{folder}/{ours.name}', state_of(model_of(), ours.name))
        theirs = transformers.AutoTokenizer.from_pretrained(
            f'{folder}/{ours.name}', trust_remote_code=False)
        found[ours.name] = ours, theirs
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(st.lists(st.sampled_from(WORDS), max_size=80).map(''.join), st.text(max_size=60)
                 .map(lambda text: text.encode('utf-8', 'replace').decode())))
@example('a <s> b </s><unk> <0x0A> <|endoftext|>')
@example(' '.join(NASTY))
def test_transformers_tokenizers_give_the_same_ids(pairs: dict, text: str) -> None:
    for ours, theirs in pairs.values():
        ids = theirs(text).input_ids
        assert ids == [ours.bos, *ours.encode(text)], ours.name
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
        assert (theirs.bos_token_id, theirs.padding_side) == (ours.bos, 'right')


def test_bos_is_in_the_loss_where_another_id_can_be_the_pad(pairs: dict) -> None:
    for name, (ours, theirs) in pairs.items():
        collate = transformers.DataCollatorForLanguageModeling(theirs, mlm=False)
        batch = collate([theirs(text) for text in ('A text', 'A longer text')])
        card = Path(theirs.name_or_path, 'README.md').read_text()
        if name == 'byte':  # its ids are bytes and BOS
            assert theirs.pad_token_id == ours.bos
            assert 'pads with BOS, since no other id is free' in card
        else:
            assert batch['labels'][:, 0].tolist() == [ours.bos] * 2
            assert 'pads with `</s>`, which no text contains' in card
            assert (batch['labels'] == -100).equal(batch['attention_mask'] == 0)


@torch.no_grad()
def test_a_padded_batch_of_a_plain_llama_continues_each_text(tmp_path: Path) -> None:
    model = model_of(**LLAMA_MODEL)
    hub.export(model, f'{tmp_path}/hub', state_of(model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hub')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hub')
    texts = ['Once', 'A longer']
    batch = tokenizer(texts, return_tensors='pt', padding=True)
    found = theirs.generate(**batch, do_sample=False, max_new_tokens=4)
    for text, ids in zip(texts, found, strict=True):
        alone = tokenizer(text, return_tensors='pt')
        expected = theirs.generate(**alone, do_sample=False, max_new_tokens=4)[0]
        assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(
            expected, skip_special_tokens=True)
    # BOS is trained, although bytes have no other id for padding
    theirs.train().requires_grad_(True)
    with torch.enable_grad():
        theirs(batch.input_ids, labels=batch.input_ids).loss.backward()
    assert theirs.model.embed_tokens.weight.grad[256].any()


@pytest.mark.parametrize('texts', [
    ['\u4e16\u754c\u548c\u5e73\u4eba\u6c11' * 40], ['a\u2581b \u2581c the \u2581\u2581 sea ' * 40],
    ['<s> </s> <unk> <0x0A>x</s>y ' * 40], ['one\r\n\t\ttwo   three\0 ' * 40]])
def test_pieces_trained_here_can_be_converted_always(tmp_path: Path, texts: list[str]) -> None:
    train_bpe(f'{tmp_path}/bpe.model', 350, [*texts, *documents(60, seed=4)])
    ours = SentencePieceTokenizer(f'{tmp_path}/bpe.model')
    assert convert_tokenizer(ours).encode(texts[0]).ids == [ours.bos, *ours.encode(texts[0])]


def test_requirements_have_every_package_that_is_imported() -> None:
    scripts = [*running.ROOT.glob('*.py')]
    files = [*scripts, *running.ROOT.glob('nanocem/*.py')]
    known = sys.stdlib_module_names | {file.stem for file in scripts} | {'nanocem'}
    known |= {'triton', 'transformers'}  # torch brings one, whoever loads an export has the other
    known |= set(re.findall(r'^([\w-]+)==', (running.ROOT / 'requirements.txt').read_text(), re.M))
    for file in files:
        if file.name.startswith(('test_', 'conftest')):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert not {name.split('.')[0] for name in names} - known, file


def test_llama_cpp_puts_a_space_before_a_text_if_the_model_does(pairs: dict) -> None:
    """Its converter reads tokenizer.model and this option, whose default is true."""
    for ours, theirs in pairs.values():
        config = json.loads(Path(theirs.name_or_path, 'tokenizer_config.json').read_text())
        assert config.get('add_prefix_space', True) == (ours.name == 'llama')
        assert Path(theirs.name_or_path, 'tokenizer.model').exists() == (ours.path is not None)


def test_a_tokenizer_that_transformers_does_not_get_is_said(
        tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(300, seed=3)), model_prefix=f'{tmp_path}/unigram',
        vocab_size=400, minloglevel=2, hard_vocab_limit=False)
    unigram = SentencePieceTokenizer(f'{tmp_path}/unigram.model')
    loads = transformers.AutoTokenizer.from_pretrained
    for n, (ours, cfg) in enumerate(itertools.product([unigram, small_gpt2()], [{}, LLAMA_MODEL])):
        folder = tmp_path / str(n)
        with monkeypatch.context() as patch:
            patch.setattr(hub, 'tokenizer_of', lambda state, ours=ours: ours)
            hub.export(model_of(**cfg), str(folder), state_of(model_of(**cfg), ours.name))
        assert 'Warning: the export has no tokenizer.json' in capfd.readouterr().err
        # AutoTokenizer and llama.cpp's converter would read any *.model, with other ids
        files = {path.name for path in folder.iterdir()}
        assert not {'tokenizer.json', 'tokenizer_config.json'} & files
        assert not any(name.endswith('.model') for name in files)
        with pytest.raises(ValueError, match='instantiate the backend tokenizer'):
            loads(folder, trust_remote_code=False)
        card = (folder / 'README.md').read_text()
        assert 'AutoTokenizer does not load this tokenizer' in card
        assert 'AutoTokenizer.from_pretrained' not in card
        # Our loaders find it, as they do where an older export has it as tokenizer.model
        if ours.path:
            meta = {'tokenizer': ours.name, 'vocab_size': ours.vocab_size,
                    'tokenizer_sha256': ours.sha256}
            text = 'The energy of a word'
            assert load_tokenizer(str(folder), meta).encode(text) == ours.encode(text)
            (folder / UNCONVERTED_FILE).rename(folder / 'tokenizer.model')
            assert load_tokenizer(str(folder), meta).encode(text) == ours.encode(text)


@pytest.mark.parametrize('name', PRETRAINED)
def test_autotokenizer_has_no_other_ids_in_pretrained(name: str) -> None:
    with pytest.raises(ValueError, match='instantiate the backend tokenizer'):
        transformers.AutoTokenizer.from_pretrained(
            running.ROOT / 'pretrained' / name, trust_remote_code=False)


# An exported folder in place of a run

@torch.no_grad()
def test_an_exported_folder_is_read_as_a_run_is(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / 'out/run', Path('gone'), model_of())
    export.main(['--to=hub', '--dtype=bfloat16'])
    # Those in pretrained/ have these files alone
    for path in set(Path('hub').iterdir()) - {Path('hub/config.json'), Path('hub', WEIGHTS_FILE)}:
        path.unlink()
    model, state = load_model('hub')
    for w, rounded in zip(model.parameters(), model_of().bfloat16().parameters(), strict=True):
        assert torch.equal(w, rounded.float()) and w.dtype == torch.float32
    assert (state['step'], state['data_dir'], model.cfg) == (2, 'gone', model_of().cfg)

    # Evaluate it
    Path('text.txt').write_text('A text')
    options = ['--out_dir=hub', '--device=cpu']
    capfd.readouterr()
    evaluate.main([*options, '--text=text.txt', '--steps=1,2'])
    page = capfd.readouterr().out
    assert page.startswith('hub, step 2; text.txt\n')
    ids = torch.tensor([[256, *b'A text']])
    assert float(cells(page)[1][2]) == pytest.approx(float(model(ids[:, :-1], ids[:, 1:])[1]), 1e-4)
    assert {path.name for path in Path('hub').iterdir()} == {'config.json', WEIGHTS_FILE}
    with pytest.raises(SystemExit, match='gone, the data to evaluate on, is not here'):
        evaluate.main(options)

    # Export it again
    export.main(['--out_dir=hub', '--to=again'])
    assert torch.equal(load_file('again/model.safetensors')['model.head'], model.head)
    with pytest.raises(SystemExit, match='again is not empty: give a new'):
        export.main(['--out_dir=hub', '--to=again'])

    # Sample from it
    def sampled(*flags: str) -> str:
        capfd.readouterr()
        sample.main([*options, '--tokens=9', *flags])
        return capfd.readouterr().out

    ids = model.generate(torch.tensor([[256]]), 9, temperature=0)[0].tolist()
    assert sampled('--temperature=0', '--num_samples=2') == 2 * (
        ByteTokenizer().decode(ids) + '\n---\n')
    assert sampled('--prompt_file=text.txt') == sampled('--prompt=A text')
    model.set_steps(3, 1)
    text = sample_text(model, ByteTokenizer(), '', 9, 0.8, 5, 3)
    assert sampled('--top_k=5', '--seed=3', '--attn_steps=3', '--mlp_steps=1') == text + '\n---\n'


def test_what_transformers_saved_lacks_the_tokenizer(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    NanocemForCausalLM.from_pretrained(running.ROOT / 'pretrained/cem').save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match='copy it from the folder that this one was made'):
        sample.main(['--device=cpu', f'--out_dir={tmp_path}'])

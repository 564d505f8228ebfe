"""Exports: the folder alone gives transformers the same model and tokenizer, and is read back."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import running
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from test_evaluate import LENGTH, PARTS, cells, loss_of, model_of, write_run
from test_evaluate import TEXT as LONG_TEXT
from test_tokenizers import LLAMA, NASTY, WORDS, documents, small_gpt2
from torch.utils.checkpoint import checkpoint

import evaluate
import sample
from model import Transformer
from nanocem import hf
from nanocem.decode import generate
from nanocem.hf import export
from nanocem.runs import load_run, new_options
from nanocem.tokenizers import ByteTokenizer, SentencePieceTokenizer, tokenizer_of, train_bpe

transformers = pytest.importorskip('transformers')
MODELS = [{}, dict(attn='llama'), dict(mlp='llama', preconditioner='diag', residual='normed'),
          dict(attn='llama', mlp='llama', positions='alibi'), dict(positions='rope', attn_reuse=2),
          dict(attn='llama', mlp='llama')]
CODE = {'attention.py', 'configurator.py', 'energy.py', 'loss.py', 'model.py',
        'modeling_nanocem.py', 'triton_attention.py'}
FILES = {'README.md', 'config.json', 'generation_config.json', 'model.safetensors',
         'tokenizer.json', 'tokenizer_config.json'}
TEXTS = ['d\u00e9j\u00e0 <s>', 'Th', '', 'The energy']

# What a program elsewhere does with exported folders, this repository not being on its path
ELSEWHERE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    left = tokenizer(TEXTS, return_tensors='pt', padding=True)
    right = tokenizer(TEXTS, return_tensors='pt', padding=True, padding_side='right')
    idx = left.input_ids
    bfloat16 = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype='bfloat16')
    found[folder] = dict(
        left=model(**left).logits[left.attention_mask.bool()],
        right=model(right.input_ids, right.attention_mask.bool()).logits[
            right.attention_mask.bool()],
        loss=model(idx, labels=idx).loss, bfloat16=bfloat16(idx).logits, idx=idx,
        generated=[model.generate(**left, do_sample=False, max_new_tokens=5, use_cache=cached)
                   for cached in (False, True)],
        ids=tokenizer(TEXTS).input_ids,
        texts=tokenizer.batch_decode(tokenizer(TEXTS).input_ids, skip_special_tokens=True))
    logits = model(idx).logits
    model.resize_token_embeddings(300, mean_resizing=False)
    assert torch.equal(model(idx).logits[..., :257], logits)
    model.save_pretrained(folder + '-again')  # what push_to_hub uploads
    again = AutoModelForCausalLM.from_pretrained(folder + '-again', trust_remote_code=True)
    assert torch.equal(again(idx).logits, model(idx).logits)
cem = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, attn_steps=5)
assert cem.model.cfg.attn_steps == 5
assert not {'model', 'nanocem', 'configurator'} & sys.modules.keys()
torch.save(found, 'found.pt')
""".replace('TEXTS', repr(TEXTS))


def state_of(model: Transformer, tokenizer: str = 'byte') -> dict[str, Any]:
    return {'data': {'tokenizer': tokenizer, 'tokenizer_sha256': None, 'vocab_size': 257},
            'data_dir': 'gone', 'model_config': vars(model.cfg), 'step': 2}


@torch.no_grad()
def test_a_program_elsewhere_finds_the_same_model(tmp_path: Path) -> None:
    models = {str(tmp_path / f'hub{n}'): model_of(**options) for n, options in enumerate(MODELS)}
    for folder, model in models.items():
        export(model, folder, state_of(model))
        assert {path.name for path in Path(folder).iterdir()} == FILES | CODE
        assert 'Tokenizer: byte, vocabulary 257' in (Path(folder) / 'README.md').read_text()
    bare = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    env = {**bare, 'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path / 'home')}
    done = subprocess.run([sys.executable, '-c', ELSEWHERE, *models], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    documents = [[256, *text.encode()] for text in TEXTS]
    for folder, found in torch.load(tmp_path / 'found.pt').items():
        model, idx = models[folder], found['idx']
        alone = torch.cat([model(torch.tensor([ids]))[0][0] for ids in documents])
        for side in ('left', 'right'):  # a padded text has the logits that it has alone
            torch.testing.assert_close(found[side], alone, rtol=0, atol=1e-5)
        logits, _ = model(idx)
        assert found['loss'].item() == pytest.approx(model(idx[:, :-1], idx[:, 1:])[1].item(), 1e-5)
        assert (found['bfloat16'] - logits).abs().mean() < 0.1 * logits.abs().mean()
        for generated in found['generated']:
            for ids, row in zip(documents, generated.tolist(), strict=True):
                ours = generate(model, torch.tensor([ids]), 5, temperature=0)[0, len(ids):].tolist()
                n = ours.index(256) + 1 if 256 in ours else 5  # transformers stops at BOS
                assert row[idx.shape[1]:][:n] == ours[:n]
        assert (found['ids'], found['texts']) == (documents, TEXTS)
        again, state = load_run(folder)
        assert torch.equal(again(idx)[0], logits) and again.cfg == model.cfg and state['step'] == 2
        resized, _ = load_run(f'{folder}-again')
        assert resized.cfg.vocab_size == 300
        torch.testing.assert_close(resized(idx)[0][..., :257], logits)


@torch.no_grad()
def test_what_the_exported_model_does_not_take_is_refused(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    export(model_of(), str(tmp_path / 'hub'), state_of(model_of()))
    model = NanocemForCausalLM.from_pretrained(tmp_path / 'hub')
    idx, cache = torch.randint(256, (2, 6)), transformers.DynamicCache()
    for name, value in [
            ('past_key_values', cache), ('use_cache', True), ('return_dict', False),
            ('output_hidden_states', True), ('output_attentions', True),
            ('inputs_embeds', torch.ones(2, 6, 16)), ('attention_mask', torch.ones(2, 1, 6, 6)),
            ('position_ids', torch.arange(6)[None])]:
        with pytest.raises(ValueError, match=f'does not take {name}'):
            model(idx, **{name: value})
    cache.update(torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 8), 0)
    for options in (dict(past_key_values=cache),
                    dict(output_hidden_states=True, return_dict_in_generate=True)):
        with pytest.raises(ValueError, match='does not take'):
            model.generate(idx, max_new_tokens=2, **options)
    options = dict(vocab_size=300, ignore_mismatched_sizes=True)
    with pytest.raises(RuntimeError, match=r'right shape .*model\.embedding'):
        NanocemForCausalLM.from_pretrained(tmp_path / 'hub', **options)
    weights = load_file(tmp_path / 'hub/model.safetensors')
    del weights['model.blocks.1.mlp.V']
    save_file(weights, tmp_path / 'hub/model.safetensors', {'format': 'pt'})
    with pytest.raises(RuntimeError, match=r'blocks\.1\.mlp\.V'):
        NanocemForCausalLM.from_pretrained(tmp_path / 'hub')


def test_gradient_checkpointing_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanocem.modeling_nanocem import NanocemConfig, NanocemForCausalLM
    torch.manual_seed(0)
    model = NanocemForCausalLM(NanocemConfig(**vars(model_of().cfg))).train()
    idx, gradients, recomputed = torch.randint(256, (2, 6)), [], []
    monkeypatch.setattr('model.checkpoint', lambda *args, **options: (
        recomputed.append(args[0]) or checkpoint(*args, **options)))
    for switch in (model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        switch()
        model.zero_grad()
        model(idx, labels=idx).loss.backward()
        gradients.append((model.is_gradient_checkpointing, model.model.embedding.grad.clone()))
    assert [on for on, _ in gradients] == [True, False] and len(recomputed) == 2
    torch.testing.assert_close(gradients[0][1], gradients[1][1])


# Tokenizers

@pytest.fixture(scope='module')
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Of each kind: our tokenizer, and transformers' from an exported folder."""
    folder = tmp_path_factory.mktemp('tokenizers')
    texts = [*documents(100, seed=3), (running.ROOT / 'model.py').read_text(encoding='utf-8')]
    lines = [line for text in texts for line in text.splitlines()]
    train_bpe(f'{folder}/bpe.model', 600, lines)
    options = dict(model_type='unigram', vocab_size=300, minloglevel=2)
    for name, more in (('unigram', {}), ('exact', dict(
            normalization_rule_name='identity', add_dummy_prefix=False, byte_fallback=True,
            remove_extra_whitespaces=False, vocab_size=600))):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_prefix=f'{folder}/{name}', **{**options, **more})
    paths = [f'{folder}/{name}.model' for name in ('bpe', 'unigram', 'exact')]
    found = {}
    for ours in [ByteTokenizer(), small_gpt2(), *map(SentencePieceTokenizer, paths),
                 *([SentencePieceTokenizer(LLAMA)] if os.path.isfile(LLAMA) else [])]:
        name = Path(ours.path).stem if ours.path else ours.name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf, 'tokenizer_of', lambda state, ours=ours: ours)
            export(model_of(), f'{folder}/{name}', state_of(model_of(), ours.name))
        theirs = transformers.AutoTokenizer.from_pretrained(
            f'{folder}/{name}', trust_remote_code=False)
        found[name] = ours, theirs
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(st.lists(st.sampled_from(WORDS), max_size=80).map(''.join), st.text(max_size=60)
                 .map(lambda text: text.encode('utf-8', 'replace').decode())))
@example('a <s> b </s><unk> <0x0A> <|endoftext|>')
def test_transformers_tokenizers_give_the_same_ids(pairs: dict, text: str) -> None:
    for ours, theirs in pairs.values():
        ids = theirs(text).input_ids
        assert ids == [ours.bos, *ours.encode(text)], ours.name
        if 0 not in ids[1:]:  # <unk>, which each spells in its way
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_tokenizers_on_nasty_texts_and_single_tokens(pairs: dict) -> None:
    for ours, theirs in pairs.values():
        for text in [*NASTY, *documents(20, seed=1)]:
            assert theirs(text).input_ids == [ours.bos, *ours.encode(text)], (ours.name, text)
        assert theirs.convert_tokens_to_ids('no such token') == theirs.unk_token_id
        assert (theirs.bos_token_id, theirs.padding_side) == (ours.bos, 'left')


def test_a_tokenizer_that_transformers_cannot_have_is_said(
        tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(300, seed=3)), model_prefix=f'{tmp_path}/own',
        model_type='bpe', vocab_size=150, minloglevel=2, user_defined_symbols=['energ'])
    ours = SentencePieceTokenizer(f'{tmp_path}/own.model')
    export(model_of(), str(tmp_path / 'gone'), state_of(model_of(), 'llama'))
    monkeypatch.setattr(hf, 'tokenizer_of', lambda state: ours)
    export(model_of(), str(tmp_path / 'own'), state_of(model_of(), ours.name))
    said = capfd.readouterr().out
    assert 'no tokenizer in' in said and 'Its tokenizer is tokenizer.model' in said
    for name, more in (('gone', set()), ('own', {'tokenizer.model'})):
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert files == (FILES | CODE | more) - {'tokenizer.json', 'tokenizer_config.json'}


# An exported folder in place of a run

@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As those in pretrained/: weights in bfloat16 and config.json alone, of data that is gone."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / 'out/run', Path('gone'), model_of())
    evaluate.main(['--export=hub', '--export_dtype=bfloat16', '--device=cpu'])
    folder = tmp_path / 'pretrained/cem'
    folder.mkdir(parents=True)
    for name in ('config.json', 'model.safetensors'):
        shutil.copy(tmp_path / 'hub' / name, folder)
    (tmp_path / 'text.txt').write_bytes(LONG_TEXT.encode()[:PARTS.shape[0] * LENGTH])
    return folder


def rounded() -> Transformer:
    return model_of().bfloat16().float()


def test_an_exported_folder_is_read_as_a_run_is(
        exported: Path, capfd: pytest.CaptureFixture) -> None:
    options = ['--out_dir=pretrained/cem', '--device=cpu']
    model, state = load_run('pretrained/cem')
    idx = torch.randint(257, (2, 12))
    assert torch.equal(model(idx)[0], rounded()(idx)[0]) and model.head.dtype == torch.float32
    assert state['step'] == 2 and state['data_dir'] == 'gone' and model.cfg == model_of().cfg

    before = {path: path.read_bytes() for path in exported.iterdir()}
    capfd.readouterr()
    evaluate.main([*options, '--text=text.txt', '--steps=1,2', '--energies', '--attention=word'])
    page = capfd.readouterr().out
    assert page.startswith('pretrained/cem, step 2; text.txt\n')
    assert float(cells(page)[-1][2]) == pytest.approx(loss_of(rounded()), abs=1e-4)
    assert {path.name for path in Path('out/results').iterdir()} == {
        'loss.png', 'energies.png', 'attention.png'}
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    with pytest.raises(SystemExit, match='gone, which the model was trained on, is not here'):
        evaluate.main(options)

    capfd.readouterr()
    sample.main([*options, '--tokens=9', '--temperature=0', '--num_samples=2'])
    ids = generate(rounded(), torch.tensor([[256]]), 9, temperature=0)[0]
    assert capfd.readouterr().out == 2 * (tokenizer_of(state).decode(ids.tolist()) + '\n---\n')
    model.set_steps(3, 1)
    sample.main([*options, '--tokens=9', '--top_k=5', '--seed=3', '--attn_steps=3',
                 '--mlp_steps=1'])
    text = sample.sample_text(model, ByteTokenizer(), '', 9, 0.8, 5, 3)
    assert capfd.readouterr().out == text + '\n---\n'
    Path('prompt.txt').write_text('A longer one')
    for prompt in ('--prompt=A longer one', '--prompt=FILE:prompt.txt'):
        sample.main([*options, '--tokens=5', '--temperature=0', prompt])
    said = capfd.readouterr().out
    assert said[:len(said) // 2] == said[len(said) // 2:]

    evaluate.main([*options, '--export=again'])
    written = load_file('again/model.safetensors')
    assert torch.equal(written['model.head'], rounded().head) and Path('again/model.py').exists()
    with pytest.raises(SystemExit, match='again is not empty: delete it'):
        evaluate.main([*options, '--export=again'])


def test_training_goes_on_from_an_exported_folder(exported: Path, tmp_path: Path) -> None:
    options = new_options({'init_from': 'pretrained/cem'})
    model = {name: options[name] for name in vars(model_of().cfg)}
    data = running.write_data(tmp_path / 'data', vocab_size=257)
    trainer = running.make_trainer(data, tmp_path / 'tuned', init_from='pretrained/cem', **model)
    trainer.restore(resume=False)
    weights = rounded().state_dict()
    assert all(torch.equal(w, weights[name]) for name, w in trainer.raw_model.state_dict().items())


def test_damaged_exports_get_one_line(exported: Path) -> None:
    weights, config = exported / 'model.safetensors', exported / 'config.json'
    whole, values, less = weights.read_bytes(), json.loads(config.read_text()), load_file(weights)
    del less['model.head']
    wrong = [dict(d_mlp=9), dict(d_mlp='9'), dict(run=None), dict(run={}),
             dict(run={**values['run'], 'data': {'tokenizer': 5}})]
    damages = [(weights, content) for content in (whole[:100], whole[:-1], b'', save(less))]
    damages += [(config, json.dumps({**values, **part}).encode()) for part in wrong]
    for path, content in (*damages, (config, b'{'), (config, b'{}')):
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(SystemExit, match=r'pretrained/cem.* is damaged') as error:
            sample.main(['--out_dir=pretrained/cem'])
        assert '\n' not in str(error.value)
        path.write_bytes(before)
    weights.unlink()
    with pytest.raises(SystemExit, match='no checkpoint in pretrained/cem'):
        evaluate.main(['--out_dir=pretrained/cem'])

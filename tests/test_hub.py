"""Exports: the folder alone gives transformers the same model and tokenizer, and is read back."""
import os
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
from safetensors.torch import load_file, save_file
from test_evaluate import cells, model_of, write_run
from test_tokenizers import LLAMA, NASTY, WORDS, documents, small_gpt2

import evaluate
import sample
from model import Transformer
from nanocem import hf
from nanocem.hf import WEIGHTS_FILE, export
from nanocem.runs import load_model
from nanocem.sampling import sample_text
from nanocem.tokenizers import ByteTokenizer, SentencePieceTokenizer, train_bpe

transformers = pytest.importorskip('transformers')
LLAMA_MODEL = dict(attn='llama', mlp='llama')
MODELS = [
    {}, dict(kq_diag='per_head', preconditioner='diag_lowrank', exact_update=True),
    dict(attn='llama', tie='kv', loops=2), dict(mlp='llama', residual='normed', attn_reuse=2),
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


def state_of(model: Transformer, tokenizer: str = 'byte') -> dict[str, Any]:
    return {'data': {'tokenizer': tokenizer, 'tokenizer_sha256': None, 'vocab_size': 257},
            'data_dir': 'gone', 'model_config': vars(model.cfg), 'step': 2}


@torch.no_grad()
def test_a_program_elsewhere_finds_the_same_model(tmp_path: Path) -> None:
    models = {str(tmp_path / f'hub{n}'): model_of(**options) for n, options in enumerate(MODELS)}
    for folder, model in models.items():
        export(model, folder, state_of(model))
        # A Llama with RoPE is transformers' own, and comes without code
        plain = folder.endswith('hub5')
        code = set() if plain else {Path(name).name for name in hf.CODE}
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
    export(model, str(folder), state_of(model))
    model = NanocemForCausalLM.from_pretrained(folder)
    idx = torch.randint(256, (2, 6))
    with pytest.raises(ValueError, match='does not take position_ids, use_cache'):
        model(idx, position_ids=torch.arange(6)[None], use_cache=True)
    # A mask can only say that the end of a text is padding
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    assert torch.equal(model(idx, mask).logits, model(idx, mask.bool()).logits)
    for wrong in (mask.flip(1), mask.flip(1).bool(), torch.ones(2, 1, 6, 6)):
        with pytest.raises(ValueError, match='padding on the right alone'):
            model(idx, wrong)
    with pytest.raises(ValueError, match='this batch is padded'):
        model.generate(idx, attention_mask=mask, max_new_tokens=1)


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    folder, model = tmp_path / 'hub', model_of(preconditioner='diag')
    export(model, str(folder), state_of(model))
    for options, name in ((dict(vocab_size=300, ignore_mismatched_sizes=True), 'model.embedding'),
                          (dict(preconditioner='none'), 'attn.P.p')):
        with pytest.raises(ValueError, match=f'are not those.*{name}'):
            NanocemForCausalLM.from_pretrained(folder, **options)
    weights = load_file(folder / WEIGHTS_FILE)
    del weights['model.blocks.1.mlp.V']
    save_file(weights, folder / WEIGHTS_FILE, {'format': 'pt'})
    for read in NanocemForCausalLM.from_pretrained, hf.read_export:
        with pytest.raises(ValueError, match=r'blocks\.1\.mlp\.V'):
            read(str(folder))


def test_an_export_appears_whole_or_not_at_all(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, 'write_tokenizer', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(model_of(), str(tmp_path / 'hub'), state_of(model_of()))
    assert not list(tmp_path.iterdir())


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
            patch.setattr(hf, 'tokenizer_of', lambda state, ours=ours: ours)
            export(model_of(), f'{folder}/{ours.name}', state_of(model_of(), ours.name))
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


def test_a_tokenizer_that_transformers_does_not_get_is_said(
        tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(300, seed=3)), model_prefix=f'{tmp_path}/unigram',
        vocab_size=400, minloglevel=2, hard_vocab_limit=False)
    unigram = SentencePieceTokenizer(f'{tmp_path}/unigram.model')
    for n, ours in enumerate([unigram, small_gpt2(), ByteTokenizer()]):
        monkeypatch.setattr(hf, 'tokenizer_of', lambda state, ours=ours: ours)
        if ours.name == 'byte':  # the package tokenizers is not installed
            monkeypatch.setattr(hf, 'find_spec', lambda name: None)
        export(model_of(), f'{tmp_path}/{n}', state_of(model_of(), ours.name))
        assert 'the export has no tokenizer.json' in capfd.readouterr().out
        files = {path.name for path in (tmp_path / str(n)).iterdir()}
        assert not {'tokenizer.json', 'tokenizer_config.json'} & files
        assert ('tokenizer.model' in files) == bool(ours.path)
        assert 'AutoTokenizer does not find' in (tmp_path / str(n) / 'README.md').read_text()


# An exported folder in place of a run

@torch.no_grad()
def test_an_exported_folder_is_read_as_a_run_is(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / 'out/run', Path('gone'), model_of())
    evaluate.main(['--export=hub', '--export_dtype=bfloat16', '--device=cpu'])
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
    evaluate.main([*options, '--text=text.txt', '--steps=1,2', '--attention=word'])
    page = capfd.readouterr().out
    assert page.startswith('hub, step 2; text.txt\n') and "hub; 'word'\n" in page
    ids = torch.tensor([[256, *b'A text']])
    assert float(cells(page)[1][2]) == pytest.approx(float(model(ids[:, :-1], ids[:, 1:])[1]), 1e-4)
    assert {path.name for path in Path('out/results').iterdir()} == {'attention-hub.png'}
    assert {path.name for path in Path('hub').iterdir()} == {'config.json', WEIGHTS_FILE}
    with pytest.raises(SystemExit, match='gone, the data to evaluate on, is not here'):
        evaluate.main(options)

    # Export it again
    evaluate.main([*options, '--export=again'])
    assert torch.equal(load_file('again/model.safetensors')['model.head'], model.head)
    with pytest.raises(SystemExit, match='again is not empty: give a new'):
        evaluate.main([*options, '--export=again'])

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

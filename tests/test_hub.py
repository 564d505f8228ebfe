"""Hugging Face's hub: an exported folder alone gives transformers the same model and tokenizer."""
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_evaluate import model_of, write_data, write_run
from test_tokenizers import LLAMA, NASTY, documents, needs_llama, small_gpt2

import evaluate
from model import ModelConfig, Transformer
from nanocem import hf
from nanocem.decode import generate
from nanocem.hf import export
from nanocem.tokenizers import LlamaTokenizer

transformers = pytest.importorskip('transformers')
MODELS = [{}, dict(attn='llama', mlp='llama'), dict(positions='rope', kq_diag='none'),
          dict(mlp='llama', preconditioner='diag'), dict(extra_layers=1, residual='normed')]
FILES = {'README.md', 'config.json', 'configurator.py', 'fast.py', 'generation_config.json',
         'model.py', 'model.safetensors', 'modeling_nanocem.py', 'tokenizer_config.json',
         'triton_attention.py'}
TEXT = 'd\u00e9j\u00e0 <|endoftext|>'

# What a program elsewhere does with exported folders, this repository not being on its path
ELSEWHERE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    idx = torch.load('idx.pt')
    out = model(idx, labels=idx)
    bfloat16 = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype='bfloat16')
    ids = tokenizer(TEXT).input_ids
    found[folder] = dict(
        logits=out.logits, loss=out.loss, bfloat16=bfloat16(idx).logits, ids=ids,
        tokens=[model.generate(idx[:, :3], do_sample=False, max_new_tokens=12, use_cache=cached)
                for cached in (False, True)],
        text=tokenizer.decode(ids, skip_special_tokens=True))
    try:
        model(idx, attention_mask=(idx > idx[:, :1]).long())
    except ValueError as error:
        found[folder]['padded'] = str(error)
model.save_pretrained('again')  # what push_to_hub uploads
tokenizer.save_pretrained('again')
again = AutoModelForCausalLM.from_pretrained('again', trust_remote_code=True)
assert torch.equal(again(idx).logits, out.logits)
again = AutoModelForCausalLM.from_pretrained('again', trust_remote_code=True, attn_steps=5)
assert again.model.cfg.attn_steps == 5
assert not {'model', 'nanocem', 'configurator'} & sys.modules.keys()
torch.save(found, 'found.pt')
""".replace('TEXT', repr(TEXT))


def state_of(model: Transformer, tokenizer: str = 'byte') -> dict[str, Any]:
    return {'data': {'tokenizer': tokenizer, 'vocab_size': 257}, 'data_dir': 'gone',
            'model_config': vars(model.cfg)}


@torch.no_grad()
def test_a_program_elsewhere_finds_the_same_model(tmp_path: Path) -> None:
    models = {str(tmp_path / f'hub{n}'): model_of(**options) for n, options in enumerate(MODELS)}
    for folder, model in models.items():
        export(model, folder, state_of(model))
        assert {path.name for path in Path(folder).iterdir()} == FILES
    place = tmp_path / 'elsewhere'
    place.mkdir()
    idx = torch.randint(256, (2, 12)).sort().values
    torch.save(idx, place / 'idx.pt')
    bare = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    env = {**bare, 'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path / 'home')}
    done = subprocess.run([sys.executable, '-c', ELSEWHERE, *models], cwd=place, env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for folder, found in torch.load(place / 'found.pt').items():
        model = models[folder]
        logits, _ = model(idx)
        assert torch.equal(found['logits'], logits)
        assert found['loss'].item() == pytest.approx(model(idx[:, :-1], idx[:, 1:])[1].item())
        assert (found['bfloat16'] - logits).abs().mean() < 0.1 * logits.abs().mean()
        greedy = generate(model, idx[:, :3], 12, temperature=0)
        assert all(torch.equal(tokens, greedy) for tokens in found['tokens'])
        assert found['ids'] == [256, *TEXT.encode()]
        assert found['text'] == TEXT
        assert 'pad on the right' in found['padded']
        config = json.loads((Path(folder) / 'config.json').read_text())
        ours = {name: config[name] for name in vars(model.cfg)}
        assert ModelConfig(**ours) == model.cfg
        assert 'Tokenizer: byte, vocabulary 257' in (Path(folder) / 'README.md').read_text()
    assert {path.name for path in (place / 'again').iterdir()} >= FILES - {'README.md'}


@pytest.mark.parametrize('name', ['gpt2', pytest.param('llama', marks=needs_llama)])
def test_transformers_own_tokenizers_give_the_same_ids(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = small_gpt2() if name == 'gpt2' else LlamaTokenizer(LLAMA)
    monkeypatch.setattr(hf, 'load_tokenizer', lambda folder: ours)
    export(model_of(), str(tmp_path / 'hub'), state_of(model_of(), name))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hub', local_files_only=True)
    assert theirs.bos_token_id == ours.bos
    for text in [*NASTY, *documents(20, seed=1), 'a <s> b </s><unk>', '<s>', TEXT]:
        ids = theirs(text).input_ids
        assert ids == [ours.bos, *ours.encode(text)]
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_a_tokenizer_that_is_gone_is_said_and_left_out(
        tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    export(model_of(), str(tmp_path / 'hub'), state_of(model_of(), 'llama'))
    assert 'no tokenizer in' in capfd.readouterr().out
    assert {path.name for path in (tmp_path / 'hub').iterdir()} == FILES - {'tokenizer_config.json'}


def test_evaluate_exports_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / 'out/run', tmp_path / 'gone', model_of())  # needs no data
    evaluate.main(['--export=hub', '--device=cpu'])
    written = load_file('hub/model.safetensors')
    weights = model_of().state_dict()
    assert all(torch.equal(written[f'model.{name}'], w) for name, w in weights.items())
    assert len(written) == len(weights)


def test_a_folder_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path / 'data', [1] * 100)
    run = write_run(tmp_path / 'out/run', data, model_of())
    before = {path: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(SystemExit, match='out/run is not empty; expected a new folder'):
        evaluate.main(['--export=out/run', '--device=cpu'])
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    with pytest.raises(SystemExit, match=r'export=data/meta\.json'):
        evaluate.main(['--export=data/meta.json', '--device=cpu'])


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    export(model_of(), str(tmp_path / 'hub'), state_of(model_of()))
    weights = load_file(tmp_path / 'hub/model.safetensors')
    del weights['model.blocks.1.mlp.V']
    save_file(weights, tmp_path / 'hub/model.safetensors', {'format': 'pt'})
    with pytest.raises(RuntimeError, match=r'blocks\.1\.mlp\.V'):
        NanocemForCausalLM.from_pretrained(tmp_path / 'hub')

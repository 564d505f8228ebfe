"""Hugging Face's hub: an exported folder alone gives transformers the same model and tokenizer."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import running
import torch
from safetensors.torch import load_file, save, save_file
from test_evaluate import LENGTH, PARTS, cells, loss_of, model_of, write_run
from test_evaluate import TEXT as LONG_TEXT
from test_tokenizers import LLAMA, NASTY, documents, needs_llama, small_gpt2

import evaluate
import sample
from model import ModelConfig, Transformer
from nanocem import hf
from nanocem.decode import generate
from nanocem.hf import export
from nanocem.runs import load_run, new_options
from nanocem.tokenizers import SentencePieceTokenizer, tokenizer_of

transformers = pytest.importorskip('transformers')
MODELS = [dict(attn_steps=2, mlp_steps=2), dict(attn='llama', mlp='llama'),
          dict(positions='rope', kq_diag='none'), dict(mlp='llama', preconditioner='diag'),
          dict(attn_reuse=2, residual='normed')]
FILES = {'README.md', 'compute.py', 'config.json', 'configurator.py', 'fast.py',
         'generation_config.json', 'model.py', 'model.safetensors', 'modeling_nanocem.py',
         'tokenizer_config.json', 'triton_attention.py'}
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
    return {'data': {'tokenizer': tokenizer, 'tokenizer_sha256': None, 'vocab_size': 257},
            'data_dir': 'gone', 'model_config': vars(model.cfg), 'step': 2}


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
    again, state = load_run(str(place / 'again'))
    assert torch.equal(again(idx)[0], logits) and state['step'] == 2


@pytest.mark.parametrize('name', ['gpt2', pytest.param('llama', marks=needs_llama)])
def test_transformers_own_tokenizers_give_the_same_ids(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = small_gpt2() if name == 'gpt2' else SentencePieceTokenizer(LLAMA)
    monkeypatch.setattr(hf, 'tokenizer_of', lambda state: ours)
    export(model_of(), str(tmp_path / 'hub'), state_of(model_of(), name))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hub', local_files_only=True)
    assert theirs.bos_token_id == ours.bos
    for text in [*NASTY, *documents(20, seed=1), 'a <s> b </s><unk>', '<s>', TEXT]:
        ids = theirs(text).input_ids
        assert ids == [ours.bos, *ours.encode(text)]
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    if name == 'llama':
        state = hf.read_export(str(tmp_path / 'hub'))
        state['data']['tokenizer_sha256'] = ours.sha256
        assert tokenizer_of(state).encode(TEXT) == ours.encode(TEXT)


def test_a_tokenizer_that_is_gone_is_said_and_left_out(
        tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    export(model_of(), str(tmp_path / 'hub'), state_of(model_of(), 'llama'))
    assert 'no tokenizer in' in capfd.readouterr().out
    assert {path.name for path in (tmp_path / 'hub').iterdir()} == FILES - {'tokenizer_config.json'}


def test_a_folder_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / 'out/run', running.write_data(tmp_path / 'data'), model_of())
    before = {path: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(SystemExit, match='out/run is not empty; expected a new folder'):
        evaluate.main(['--export=out/run', '--device=cpu'])
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    with pytest.raises(SystemExit, match=r'data/meta\.json'):
        evaluate.main(['--export=data/meta.json', '--device=cpu'])


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from nanocem.modeling_nanocem import NanocemForCausalLM
    export(model_of(), str(tmp_path / 'hub'), state_of(model_of()))
    weights = load_file(tmp_path / 'hub/model.safetensors')
    del weights['model.blocks.1.mlp.V']
    save_file(weights, tmp_path / 'hub/model.safetensors', {'format': 'pt'})
    with pytest.raises(RuntimeError, match=r'blocks\.1\.mlp\.V'):
        NanocemForCausalLM.from_pretrained(tmp_path / 'hub')


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
    evaluate.main([*options, '--text=text.txt', '--steps=1,2', '--energies', '--attention=word'])
    page = Path('out/results/cem/steps.md')
    assert page.read_text().startswith('pretrained/cem, step 2; text.txt\n')
    trained = cells(page)[model_of().cfg.attn_steps - 1]
    assert float(trained[2]) == pytest.approx(loss_of(rounded()), abs=1e-4)
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    with pytest.raises(SystemExit, match='gone, which the model was trained on, is not here'):
        evaluate.main(options)

    capfd.readouterr()
    sample.main([*options, '--tokens=9', '--temperature=0'])
    ids = generate(rounded(), torch.tensor([[256]]), 9, temperature=0)[0]
    assert capfd.readouterr().out == tokenizer_of(state).decode(ids.tolist()) + '\n---\n'

    evaluate.main([*options, '--export=again'])
    written = load_file('again/model.safetensors')
    assert torch.equal(written['model.head'], rounded().head) and Path('again/model.py').exists()


def test_training_goes_on_from_an_exported_folder(exported: Path, tmp_path: Path) -> None:
    options = new_options({'init_from': 'pretrained/cem'})
    model = {name: options[name] for name in vars(model_of().cfg)}
    data = running.write_data(tmp_path / 'data', vocab_size=257)
    trainer = running.make_trainer(data, tmp_path / 'tuned', init_from='pretrained/cem', **model)
    trainer.begin(resume=False)
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

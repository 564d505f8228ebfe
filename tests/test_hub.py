"""Hugging Face's hub: a model written in its form comes back with the same logits."""
import json
from pathlib import Path

import pytest
import torch
from test_evaluate import model_of, write_data, write_run

import evaluate
from model import ModelConfig, Transformer
from nanocem.hf import HubTransformer, export

DATA = {'tokenizer': 'byte', 'vocab_size': 257}
MODELS = [{}, dict(attn='llama', mlp='llama'), dict(extra_layers=1, residual='normed')]


@pytest.mark.parametrize('options', MODELS, ids=str)
@torch.no_grad()
def test_the_same_logits_come_back(options: dict, tmp_path: Path) -> None:
    model = model_of(**options)
    export(model, str(tmp_path / 'hub'), DATA)
    found = HubTransformer.from_pretrained(tmp_path / 'hub')
    idx = torch.randint(257, (2, 12))
    assert torch.equal(found(idx)[0], model(idx)[0])
    assert found.cfg == model.cfg
    assert not found.training
    assert isinstance(found, Transformer)
    assert {'config.json', 'model.safetensors', 'README.md'} == {
        path.name for path in (tmp_path / 'hub').iterdir()}
    config = json.loads((tmp_path / 'hub/config.json').read_text())
    assert ModelConfig(**config['cfg']) == model.cfg
    assert 'Tokenizer: byte, vocabulary 257' in (tmp_path / 'hub/README.md').read_text()


def test_evaluate_exports_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / 'out/run', tmp_path / 'gone', model_of())  # needs no data
    evaluate.main(['--export=hub', '--device=cpu'])
    idx = torch.randint(257, (2, 12))
    assert torch.equal(HubTransformer.from_pretrained('hub')(idx)[0], model_of()(idx)[0])


def test_a_folder_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path / 'data', [1] * 100)
    run = write_run(tmp_path / 'out/run', data, model_of())
    before = {path: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(SystemExit, match='out/run is not empty; expected a new folder'):
        evaluate.main(['--export=out/run', '--device=cpu'])
    assert {path: path.read_bytes() for path in run.iterdir()} == before

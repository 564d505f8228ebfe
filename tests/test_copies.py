"""results/copies: what its runs say, and that the pages say the same."""
import re

import numpy as np
import pytest
import torch

from configurator import read_options
from model import ModelConfig, Transformer
from nanocem.files import read_csv
from results.copies import run, tables
from running import ROOT

RUNS = [row for row in read_csv(f'{tables.HERE}/runs.csv') if int(row['seed']) < 100]


def test_the_files_are_those_of_the_runs(tmp_path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture) -> None:
    published = {path.name: path.read_text(encoding='utf-8') for path in tables.HERE.glob('*.csv')}
    (tmp_path / 'copies').mkdir()
    for name in ('runs', 'models', 'verdicts'):
        (tmp_path / f'copies/{name}.csv').write_text(published[f'{name}.csv'], encoding='utf-8')
    monkeypatch.setattr(tables, 'HERE', tmp_path / 'copies')
    monkeypatch.setitem(tables.RULES, tmp_path / 'copies', tables.copies_rule)
    tables.main()
    for name in ('effects', 'copying', 'ablations'):
        written = (tmp_path / f'copies/{name}.csv').read_text(encoding='utf-8')
        assert written == published[f'{name}.csv'], name
    # The intervals on the page, and the numbers of one seed, are among the printed ones
    printed = capsys.readouterr().out.replace('%', '')
    page = (ROOT / 'results/README.md').read_text(encoding='utf-8')
    cure = page[page.index('## What cures it?'):page.index('## Do the paper')]
    interval = r'[-+][.\d]+ \([-+][.\d]+ to [-+][.\d]+'
    shown = re.findall(interval, cure)
    assert len(shown) == 12 and not set(shown) - set(re.findall(interval, printed))
    for number in re.findall(r'M (\+[.\d]+)', cure):
        assert f'M {number}' in printed


def test_an_effect_is_the_mean_of_paired_differences() -> None:
    y = {(r['model'], r['seed']): float(r['y']) for r in RUNS if r['size'] == 'S'
         and not r['variant']}
    for row in read_csv(f'{tables.HERE}/effects.csv'):
        if row['size'] == 'S':
            d = [y[row['A'], s] - y[row['B'], s] for s in '1234'
                 if (row['A'], s) in y and (row['B'], s) in y]
            assert 100 * np.expm1(np.mean(d)) == pytest.approx(float(row['effect_%']), abs=1e-5)
            assert len(d) == int(row['seeds'])


def test_every_cell_names_a_model_and_a_published_rate() -> None:
    for cell in read_csv(f'{tables.HERE}/cells.csv'):
        options = dict(option.removeprefix('--').split('=')
                       for option in run.MODELS[cell['model']]['options'].split())
        assert cell['size'] in 'SM' and float(cell['rate']) > 0
        assert {'attn', 'mlp', 'positions'} <= options.keys()


@pytest.mark.parametrize(('file', 'model'), [
    ('cem_copies', 'attn-1-copies'), ('cem_plain_copies', 'cem-2-copies'),
    ('llama_copies', 'llama-alibi-copies')])
def test_config_files_are_models_of_the_study(file: str, model: str) -> None:
    theirs = read_options([f'config/{file}.py'], ModelConfig)
    ours = read_options(run.MODELS[model]['options'].split(), ModelConfig)
    assert ModelConfig(**theirs) == ModelConfig(**ours)


@pytest.mark.parametrize('variant', ['d=1', 'same id', 'first layer', 'last layer'])
def test_an_ablation_changes_the_match_bias_alone(variant: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """With all w_k at 0 logits stay as they are; with w_k at 1 they differ."""
    base = run.model_file.BaseAttention
    monkeypatch.setattr(base, 'add_match', base.add_match)
    for name in ('__init__', 'hidden'):
        monkeypatch.setattr(run.model_file.Transformer, name, getattr(Transformer, name))
    cfg = ModelConfig(size='nano', vocab_size=20, context_length=12, match_bias='token')
    idx = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(1))

    def logits(w: float) -> torch.Tensor:
        torch.manual_seed(2)
        model = Transformer(cfg)
        with torch.no_grad():
            for block in model.blocks:
                block.attn.match_weight.fill_(w)
                block.attn.match_diag.fill_(2)
        return model(idx)[0]

    plain, biased = logits(0), logits(1)
    run.patch(variant)
    torch.testing.assert_close(logits(0), plain)
    assert not torch.allclose(logits(1), biased)

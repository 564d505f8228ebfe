"""results/copies: what its runs say."""
import numpy as np
import pytest

from configurator import read_options
from model import ModelConfig
from nanocem.files import read_csv
from results.copies import tables
from running import ROOT

RUNS = [row for row in read_csv(f'{tables.HERE}/runs.csv') if int(row['seed']) < 100]


def test_the_files_are_those_of_the_runs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = {path.name: path.read_text(encoding='utf-8') for path in tables.HERE.glob('*.csv')}
    (tmp_path / 'copies').mkdir()
    for name in ('runs', 'models', 'verdicts'):
        (tmp_path / f'copies/{name}.csv').write_text(published[f'{name}.csv'], encoding='utf-8')
    monkeypatch.setattr(tables, 'HERE', tmp_path / 'copies')
    tables.main()
    for name in ('effects', 'copying', 'ablations'):
        written = (tmp_path / f'copies/{name}.csv').read_text(encoding='utf-8')
        assert written == published[f'{name}.csv'], name


def test_an_effect_is_the_mean_of_paired_differences() -> None:
    y = {(r['model'], r['seed']): float(r['y']) for r in RUNS if r['size'] == 'S'
         and not r['variant']}
    for row in read_csv(f'{tables.HERE}/effects.csv'):
        if row['size'] == 'S':
            d = [y[row['A'], s] - y[row['B'], s] for s in '1234'
                 if (row['A'], s) in y and (row['B'], s) in y]
            assert 100 * np.expm1(np.mean(d)) == pytest.approx(float(row['effect_%']), abs=1e-5)
            assert len(d) == int(row['seeds'])


@pytest.mark.parametrize(('file', 'model'), [
    ('cem_copies', 'attn-1-copies'), ('cem_plain_copies', 'cem-2-copies'),
    ('llama_copies', 'llama-alibi-copies'), ('cem_three', 'attn-1-three'),
    ('llama_three', 'llama-alibi-three')])
def test_config_files_are_models_of_the_study(file: str, model: str) -> None:
    theirs = read_options([f'config/{file}.py'], ModelConfig)
    rows = [row for study in ('copies', 'gradient')
            for row in read_csv(f'{ROOT}/results/{study}/models.csv')]
    row = next(row for row in rows if row['model'] == model)
    ours = read_options(row['options'].split(), ModelConfig)
    assert ModelConfig(**theirs) == ModelConfig(**ours)

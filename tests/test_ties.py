"""results/ties: what its runs say, from a few to all, and what an energy forces."""
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from configurator import read_options
from model import Cache, LlamaAttention, LlamaMLP, ModelConfig, Transformer, make_positions
from nanocem.files import csv_text, read_csv
from results.gradient.run import COLUMNS
from results.ties import run, tables
from study import RESULTS, draw_curves
from test_model import randomize, untied

OPTIONS = dict(d_model=24, n_layer=1, n_head=3, d_mlp=20, vocab_size=50, context_length=20,
               attn='llama', mlp='llama', positions='alibi')


def invented(cells: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return a run for each cell, with random losses."""
    rng = np.random.default_rng(3)
    models = {row['model']: row for row in read_csv(f'{RESULTS}/ties/models.csv')}
    rows = []
    for cell in cells:
        losses = dict.fromkeys(('repeated_loss', 'other_loss', 'read_once_loss',
                                'read_again_loss'), str(rng.uniform(1, 4)))
        numbers = dict(y=4.3 + 0.01 * rng.normal(), parameters=int(rng.integers(7e5, 8e5)),
                       rate=models[cell['model']][f'rate_{cell["size"]}'],
                       flops_per_token=rng.uniform(4e6, 5e6))
        counts = json.dumps([[n, round(rng.uniform(1, 4), 6)] for n in (5, 6, 7, 8)])
        row = {**dict.fromkeys(COLUMNS, ''), **cell, **losses, 'by_count': counts}
        rows.append(row | {name: str(value) for name, value in numbers.items()})
    return rows


def found_in(folder: Path, rows: list[dict[str, str]],
             monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, str]]]:
    """Return the CSVs that tables.py writes for these runs."""
    folder.mkdir()
    for name in 'models', 'verdicts', 'differences', 'losses':
        shutil.copy(RESULTS / f'ties/{name}.csv', folder)
    (folder / 'runs.csv').write_text(csv_text(rows), encoding='utf-8')
    monkeypatch.setattr(tables, 'HERE', folder)
    monkeypatch.setattr(tables, 'STUDIES', [*tables.STUDIES[:2], folder])
    tables.main()
    return {name: read_csv(f'{folder}/{name}.csv')
            for name in ('effects', 'differences_found', 'copying', 'counts')}


def groups(rows: list[dict[str, str]]) -> dict[tuple[str, str], dict[int, float]]:
    """Return y of all runs that count, by size and model, and seed."""
    y: dict[tuple[str, str], dict[int, float]] = {}
    for row in [*read_csv(f'{RESULTS}/copies/runs.csv'), *read_csv(f'{RESULTS}/gradient/runs.csv'),
                *rows]:
        if not row['variant'] and int(row['seed']) < 101:
            y.setdefault((row['size'], row['model']), {})[int(row['seed'])] = float(row['y'])
    return y


def test_the_files_are_those_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in(tmp_path / 'ties', read_csv(f'{RESULTS}/ties/runs.csv'), monkeypatch)
    for name, rows in found.items():
        assert rows == read_csv(f'{RESULTS}/ties/{name}.csv'), name


def test_a_curve_is_the_mean_over_the_seeds_that_both_have() -> None:
    """Llama has seeds 1 and 2. Seed 3 of the model, its ablation, and a line without runs are left
    out."""
    rows = []
    for model, seed, variant, loss in (
            ('llama-alibi-three', '1', '', 2.0), ('llama-alibi-three', '2', '', 3.0),
            ('a', '1', '', 2.5), ('a', '2', '', 3.1), ('a', '3', '', 9.0), ('a', '1', 'cut', 9.0)):
        for step in range(50, 2001, 50):
            rows.append({'size': 'S', 'model': model, 'seed': seed, 'variant': variant,
                         'step': str(step), 'loss': str(loss + step / 2000 * (model == 'a'))})
    figure = draw_curves(rows, [('S', 'a', 'C0-', 'a'), ('M', 'a', 'C1-', 'none')], 'title')
    line, _ = figure.axes[0].lines  # and the one at zero
    share, over = line.get_data()
    np.testing.assert_allclose(share, np.arange(20) * 5 + 2.5)
    # (0.5 + 0.1) / 2, and the mean of two of the forty steps
    np.testing.assert_allclose(over, 0.3 + (share + 1.25) / 100)


@pytest.mark.parametrize('n_cells', [10, 1000])
def test_an_effect_has_the_interval_of_the_rule(n_cells: int, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """RULE.md's formula, written again: two kinds of noise, pooled over S and M."""
    rows = invented(read_csv(f'{RESULTS}/ties/cells.csv')[:n_cells])
    y = groups(rows)
    found = found_in(tmp_path / 'ties', rows, monkeypatch)
    cem_mlp = {row['model']: row['noise'] == 'CEM MLP' for study in ('copies', 'gradient', 'ties')
               for row in read_csv(f'{RESULTS}/{study}/models.csv')}
    squares, freedom = [0.0, 0.0], [0, 0]
    for (size, model), runs in y.items():
        if size in 'SM':
            squares[cem_mlp[model]] += len(runs) * np.var([*runs.values()])
            freedom[cem_mlp[model]] += len(runs) - 1
    s2 = [each / f for each, f in zip(squares, freedom, strict=True)]
    m = {'effects': {'S': 5, 'M': 2}, 'differences_found': {'S': 1, 'M': 1}}
    intervals = 0
    for name, comparisons in m.items():
        for row in found[name]:
            a, b = y.get((row['size'], row['A']), {}), y.get((row['size'], row['B']), {})
            d = [a[seed] - b[seed] for seed in a if seed in b]
            assert bool(d) == bool(row['size'])
            if not d:
                continue
            assert 100 * math.expm1(np.mean(d)) == pytest.approx(float(row['effect_%']), abs=1e-5)
            if len(d) == 1:
                assert row['low_%'] == row['high_%'] == ''
                continue
            kinds = cem_mlp[row['A']], cem_mlp[row['B']]
            variance, f = sum(s2[kind] for kind in kinds), freedom[kinds[0]]
            if kinds[0] != kinds[1]:
                f = variance ** 2 / sum(s2[kind] ** 2 / freedom[kind] for kind in kinds)
            ends = student.interval(1 - 0.05 / comparisons[row['size']], f, np.mean(d),
                                    math.sqrt(variance / len(d)))
            assert [float(row['low_%']), float(row['high_%'])] == pytest.approx(
                [100 * math.expm1(end) for end in ends], abs=1e-5)
            intervals += 1
    assert intervals == {10: 6, 1000: 13}[n_cells]
    # Words are for the rows of verdicts.csv
    words = {row['verdict'] for row in found['effects']}
    assert words <= {'holds', 'does not hold', 'undecided', 'one seed', 'not run'}
    assert 'verdict' not in found['differences_found'][0]


def test_runs_of_the_other_studies_count_where_the_model_is_the_same() -> None:
    names = 'options', 'rate_S', 'rate_M', 'd_mlp_S', 'd_mlp_M'
    models: dict[str, dict[str, str]] = {}
    shared = set()
    for study in tables.STUDIES:
        for row in read_csv(f'{study}/models.csv'):
            if row['model'] in models:
                shared.add(row['model'])
                other = models[row['model']]
                # A study that has no run at M may leave its columns out
                assert all(row.get(name) == other.get(name) for name in names
                           if row.get(name) and other.get(name)), row['model']
            models.setdefault(row['model'], row)
    assert {'llama-alibi-three', 'attn-1-three-wide', 'cem-1-three-wide', 'llama-alibi'} <= shared
    published = {(row['size'], row['model']): row['seeds']
                 for row in read_csv(f'{RESULTS}/gradient/copying.csv')}
    found = {(row['size'], row['model']): row['seeds']
             for row in read_csv(f'{RESULTS}/ties/copying.csv')}
    assert all(int(found[key]) >= int(published[key]) for key in found if key in published)


def test_grouped_queries_have_the_flops_and_the_cache_of_tied_values(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = read_csv(f'{RESULTS}/ties/cells.csv')[:4]
    found = found_in(tmp_path / 'ties', invented(cells), monkeypatch)
    flops = {row['model']: row['flops_per_token'] for row in found['copying']}
    tied, grouped = 'llama-kv-three-wide-4-heads', 'llama-grouped-three-wide'
    assert flops[tied] == flops[grouped] != flops['llama-kv-three-wide']
    models = {row['model']: row for row in read_csv(f'{RESULTS}/ties/models.csv')}
    # Keys, their shifted half and the layer's input, over keys and values. The shifted half of
    # grouped keys is of two heads, too
    own = [tables.numbers_per_token(models[name]) for name in (tied, grouped)]
    assert own == [1.25, 1.125]


@pytest.mark.parametrize(('options', 'share'), [
    ('--attn=llama --positions=alibi', 1.0),
    ('--attn=llama --tie=qo --positions=alibi', 1.0),
    ('--attn=cem --kq_diag=none --positions=alibi', 0.5)])
def test_keys_and_values_are_what_the_cache_keeps(options: str, share: float) -> None:
    cfg = ModelConfig(**(OPTIONS | read_options(options.split(), ModelConfig)))
    cache = Cache()
    with torch.no_grad():
        Transformer(cfg).next_logits(torch.arange(5)[None], cache)
    assert cache.numbers_per_token() == share * 2 * cfg.d_model
    assert tables.numbers_per_token({'options': options}) == share


@torch.no_grad()
def test_the_recommended_config_is_the_model_of_the_study() -> None:
    """CEM attention with an output projection of its own is Llama's with W_V = W_K."""
    row = next(row for row in read_csv(f'{RESULTS}/ties/models.csv')
               if row['model'] == 'llama-kv-three-wide')
    shape = dict(size='nano', d_mlp=96, vocab_size=50)
    theirs = ModelConfig(**shape, **read_options(row['options'].split(), ModelConfig))
    ours = ModelConfig(**shape, **read_options(['config/cem_one_tie.py'], ModelConfig))
    cem = randomize(Transformer(ours), seed=7)
    llama = Transformer(theirs).double()
    llama.load_state_dict(cem.state_dict())
    idx = torch.arange(20)[None]
    torch.testing.assert_close(cem(idx)[0], llama(idx)[0], rtol=0, atol=1e-12)
    # A width of the MLP that is 3 d_model in place of 8/3 d_model makes up for the tie
    baseline = ModelConfig(size='nano', vocab_size=50,
                           **read_options(['config/llama_three.py'], ModelConfig))
    assert cem.num_params() == pytest.approx(Transformer(baseline).num_params(), rel=0.01)


@torch.no_grad()
def test_unshifted_values_are_the_keys_before_they_are_shifted(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an untied Llama with W_V = W_K, which shifts only its keys."""
    options = OPTIONS | dict(key_shift='half', match_bias='token', kq_diag='scaled')
    tied = randomize(Transformer(ModelConfig(**options, tie='kv')), seed=8)
    same = untied(tied, ModelConfig(**options))
    idx = torch.arange(20)[None]
    shifted = tied(idx)[0]
    monkeypatch.setattr(LlamaAttention, 'attend', LlamaAttention.attend)  # what `patch` replaces
    run.patch('unshifted values')
    torch.testing.assert_close(tied(idx)[0], same(idx)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(tied(idx)[0], shifted)


@pytest.mark.parametrize('tie', ['kv', 'none'])
def test_a_llama_layer_is_one_step_down_an_energy(tie: str) -> None:
    """The energies of results/README.md, written out, in float64 with random weights. With keys
    that are not the values, the moving part of a query meets the values."""
    cfg = ModelConfig(**OPTIONS, tie=tie)
    block = randomize(Transformer(cfg), seed=5).blocks[0]
    attn, mlp = block.attn, block.mlp
    assert type(attn) is LlamaAttention and type(mlp) is LlamaMLP
    x = torch.randn(2, 9, cfg.d_model, generator=torch.Generator().manual_seed(6)).double()
    pos = make_positions(cfg, x)
    h = attn.norm(x).detach()
    u = h.clone().requires_grad_()
    values = attn.W_K if tie == 'kv' else attn.W_V
    heads = [W.unflatten(0, (cfg.n_head, -1)) for W in (attn.W_Q, attn.W_K, values, attn.W_O)]
    energy = 0.0
    for k in range(cfg.n_head):
        W_Q, W_K, W_V, W_O = (W[k] for W in heads)
        a = (h @ W_Q.T) @ (h @ W_K.T).mT + ((u - h) @ W_O.T) @ (h @ W_V.T).mT
        bias = attn.bias(pos, u, h)[k]
        energy = energy - attn.tau * (a / attn.tau + bias).logsumexp(-1).sum()
    step = attn(x, pos) - x
    torch.testing.assert_close(step, -torch.autograd.grad(energy, u)[0], atol=1e-12, rtol=1e-10)

    h = mlp.norm(x).detach()
    u = h.clone().requires_grad_()
    z = h @ mlp.V.T + (u - h) @ mlp.W_d.T
    # phi' = SiLU: integrate from 0 to z by Gauss and Legendre
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(40))
    points = z[..., None] * (nodes + 1) / 2
    phi = (torch.nn.functional.silu(points) * weights).sum(-1) * z / 2
    energy = -((h @ mlp.W.T) * phi).sum()
    torch.testing.assert_close(mlp(x) - x, -torch.autograd.grad(energy, u)[0], atol=1e-9,
                               rtol=1e-7)

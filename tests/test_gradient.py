"""results/gradient: what its runs say, and its ablations."""
import itertools
import math

import numpy as np
import pytest
import torch

import model as model_py
from configurator import read_options
from model import CEMAttention, LlamaAttention, ModelConfig, Transformer, make_positions
from nanocem.files import read_csv
from results.gradient import run, tables
from running import write_data
from test_model import randomize

OPTIONS = dict(d_model=24, n_layer=1, n_head=3, d_mlp=20, vocab_size=50, context_length=20,
               mlp='llama', kq_diag='scaled', match_bias='token', key_shift='half')


def test_the_files_are_those_of_the_runs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = {path.name: path.read_text(encoding='utf-8') for path in tables.HERE.glob('*.csv')}
    (tmp_path / 'gradient').mkdir()
    for name in ('runs', 'losses', 'models', 'verdicts', 'pretrained'):
        (tmp_path / f'gradient/{name}.csv').write_text(published[f'{name}.csv'], encoding='utf-8')
    monkeypatch.setattr(tables, 'HERE', tmp_path / 'gradient')
    tables.main()
    names = {path.name for path in tables.HERE.glob('*.csv')}
    assert {'effects.csv', 'copying.csv', 'counts.csv', 'heads.csv', 'gaps.csv'} <= names
    for name in names:
        assert (tables.HERE / name).read_text(encoding='utf-8') == published[name], name
    assert (tables.HERE / 'curves.png').stat().st_size > 10_000


def test_an_effect_is_the_mean_of_paired_differences() -> None:
    y = {(r['size'], r['model'], r['seed']): float(r['y']) for r in tables.all_runs()
         if not r['variant']}
    found = 0
    for row in read_csv(f'{tables.HERE}/effects.csv'):
        size, A, B = row['size'], row['A'], row['B']
        d = [y[size, A, s] - y[size, B, s] for s in '1234'
             if (size, A, s) in y and (size, B, s) in y]
        if d and row['size'] and B != 'llama':
            assert 100 * np.expm1(np.mean(d)) == pytest.approx(float(row['effect_%']), abs=1e-5)
            assert str(len(d)) == (row['seeds'] or '1')
            found += 1
    assert found > 4


def test_a_try_elsewhere_trains_a_run_of_its_own(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With $OUT a cell neither goes on with a run of the study nor becomes one."""
    commands: list[list[str]] = []
    monkeypatch.setattr(run.train, 'main', lambda argv: commands.append(argv) or 1)
    monkeypatch.setattr(run.train, 'compile_for', run.train.compile_for)  # what a cell replaces
    monkeypatch.setattr(torch, 'set_float32_matmul_precision', lambda kind: None)
    monkeypatch.setenv('OUT', str(tmp_path / 'try'))
    with pytest.raises(SystemExit):
        run.train_cell(run.HERE, run.patch, 'S', 'attn-1-three', '1', '', '--tokens=40K')
    (argv,) = commands
    assert argv[0] == f'--out_dir={tmp_path}/try/S/attn-1-three_seed=1' and '--tokens=40K' in argv


@pytest.mark.parametrize('name', ['attn-1-three', 'llama-alibi-three'])
def test_models_with_as_many_weights_have_them(name: str) -> None:
    """Where d_mlp says so, parameters come closest to those of the Llama with the same options."""
    def parameters(row: dict[str, str], size: str, width: int = 0) -> int:
        options = [*run.SIZES[size], *row['options'].split(), '--vocab_size=2048']
        if width:
            options.append(f'--d_mlp={width}')
        with torch.device('meta'):
            return Transformer(ModelConfig(**{
                key: value for key, value in read_options(
                    options, ModelConfig, run.train.TrainConfig).items()
                if key in ModelConfig.__dataclass_fields__})).num_params()

    same = 'key_shift', 'match_bias', 'kq_diag'
    for row in run.models(run.HERE).values():
        for size in 'SM':
            if width := int(row[f'd_mlp_{size}'] or 0):
                options = read_options(row['options'].split(), ModelConfig)
                llama = {**row, 'options': ' '.join(
                    ['--attn=llama --mlp=llama --positions=alibi',
                     *(f'--{key}={options[key]}' for key in same)])}
                target = parameters(llama, size)
                errors = [abs(parameters(row, size, w) - target) for w in
                          (width - 1, width, width + 1)]
                assert errors[1] == min(errors), row['model']


def layer_and_energy(kind: type, cfg: ModelConfig) -> tuple:
    attn = randomize(Transformer(cfg), seed=4).blocks[0].attn
    assert type(attn) is kind
    x = torch.randn(2, 9, cfg.d_model, generator=torch.Generator().manual_seed(2)).double()
    return attn, x, make_positions(cfg, x)


@pytest.mark.parametrize('variant', ['one head', 'd = 1', 'vectors', "ALiBi's slopes"])
def test_an_ablation_that_keeps_the_gradient_takes_a_step_down_its_energy(
        variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(variant, monkeypatch)
    options = dict(OPTIONS)
    if variant == 'vectors':
        options |= dict(kq_diag='none', match_bias='none', key_shift='none')
    cfg = ModelConfig(**options)
    attn, x, pos = layer_and_energy(CEMAttention, cfg)
    h = attn.norm(x)
    u = h.detach().requires_grad_()
    energy = attn.energy(u, h.detach()).sum()
    if variant == 'vectors':  # one more head, and its logsumexp
        a = (h * (attn.c / math.sqrt(24))) @ model_py.previous(h).mT
        a = a + (u * (attn.d / attn.tau)) @ h.mT - pos.distance / 64
        a = a + model_py.causal_mask(pos.distance)
        energy = energy - attn.tau * a.logsumexp(-1).sum()
    step = attn(x, pos) - x
    torch.testing.assert_close(step, -torch.autograd.grad(energy, u)[0])
    if variant == "ALiBi's slopes":
        slopes = model_py.alibi_slopes(5, x)
        torch.testing.assert_close(slopes, torch.tensor(
            [2 ** (-8 * k / 5) for k in range(1, 6)], dtype=x.dtype))
    assert variant != 'd = 1' or not attn.kq_diag.requires_grad


@pytest.mark.parametrize('kind', ['cem', 'llama'])
def test_the_diagonal_s_gradient_alone_and_its_scores_alone(
        kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = ModelConfig(**OPTIONS, attn=kind)
    with_all, x, pos = layer_and_energy(CEMAttention if kind == 'cem' else LlamaAttention, cfg)
    weights, all_of_it = with_all.state_dict(), with_all(x, pos)
    updates = []
    for variant in 'scores alone', 'gradient alone':
        with monkeypatch.context() as patch:
            patched(variant, patch)
            attn, _, _ = layer_and_energy(type(with_all), cfg)
            attn.load_state_dict(weights)
            updates.append(attn(x, pos))
    # Without the gradient the same weights bring values alone
    _, dx = captured(with_all, x, pos)
    torch.testing.assert_close(updates[0], all_of_it - dx)
    # Without the scores the weights are those of no diagonal at u = h
    with monkeypatch.context() as patch:
        patch.setattr(model_py.BaseAttention, 'diagonal_scores', lambda self, u, h: 0.0)
        expected = with_all(x, pos)
    torch.testing.assert_close(updates[1], expected)
    assert not torch.allclose(updates[1], all_of_it)


def captured(attn, x: torch.Tensor, pos) -> tuple:
    """Return what attend gives in a forward pass."""
    found = []
    attend = attn.attend
    attn.attend = lambda *of: found.append(attend(*of)) or found[-1]
    attn(x, pos)
    del attn.attend
    return found[0]


def patched(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch model.py as run.py does, until the test ends."""
    for owner, names in ((model_py.BaseAttention, ('__init__', 'diagonal_scores',
                                                   'diagonal_update')),
                         (CEMAttention, ('__init__', 'forward')),
                         (LlamaAttention, ('__init__', 'forward')), (model_py, ('alibi_slopes',))):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    run.patch(variant)


def test_pairs_are_counted_in_the_training_text(tmp_path) -> None:
    """Repeated targets, each counted by hand; the losses are those of the model."""
    data = write_data(tmp_path / 'data')
    model = Transformer(ModelConfig(size='nano', vocab_size=257, context_length=20))
    shards = run.TokenDataset(str(data), 'train', 20).shards
    train = shards[0].astype(int).tolist()
    text = [*train[:8] * 7, *train[30:37] * 7]
    ids = torch.tensor(text).view(5, 21)
    losses, repeated = run.targets(model, ids, 256)
    assert torch.equal(losses, run.target_losses(model, ids, 256))
    found = run.by_count(losses, repeated, ids, str(data), 257)
    expected = [[] for _ in run.COUNTS]
    for row, loss in zip(ids.tolist(), losses, strict=True):
        for t in range(1, len(row)):
            pair, seen = (row[t - 1], row[t]), {*itertools.pairwise(row[:t])}
            if pair in seen and not math.isnan(loss[t - 1]):
                n = sum(pair == other for shard in shards
                        for other in itertools.pairwise(shard.tolist()))
                expected[max(i for i, low in enumerate(run.COUNTS) if n >= low)].append(
                    float(loss[t - 1]))
    assert [len(of) for of in expected] == [n for n, _ in found] and sum(map(len, expected)) > 5
    for of, (_, mean) in zip(expected, found, strict=True):
        assert not of or mean == pytest.approx(np.mean(of), abs=1e-5)

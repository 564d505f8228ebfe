"""evaluate.py: each number against another way to it, and the command line."""
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from running import edit_meta, write_data

import evaluate
from model import ModelConfig, Transformer, position_tables
from nanocem.compute import flops_per_token

LENGTH = 16
TEXT = 'The energy of a word falls, step by step: d\u00e9j\u00e0 vu.\n' * 8
BYTES = torch.tensor([1] * 256 + [0])
PARTS = torch.tensor([256, *TEXT.encode()]).unfold(0, LENGTH + 1, LENGTH)


def model_of(**options) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**dict(
        d_model=16, n_layer=2, n_head=2, d_mlp=24, vocab_size=257, context_length=LENGTH,
        init_std=0.3), **options}))
    for name, p in model.named_parameters():  # no zeros, or nothing shows
        if not name.endswith('gain'):
            torch.nn.init.normal_(p, std=0.3)
        p.requires_grad_(False)
    return model.eval()


def loss_of(model: Transformer) -> float:
    return float(model(PARTS[:, :-1], PARTS[:, 1:])[1])


def write_run(folder: Path, data: Path, model: Transformer, **line) -> Path:
    """A finished run's folder, of two logged steps and the beginning of another line."""
    folder.mkdir(parents=True)
    cfg = vars(model.cfg)
    torch.save({'model': model.state_dict(), 'model_config': cfg, 'step': 2, 'data_dir': str(data),
                'data': {'tokenizer': 'byte', 'tokenizer_sha256': None, 'vocab_size': 257}},
               folder / 'best.pt')
    config = {'train': {'data': str(data)}, 'model': cfg, 'launcher': ''}
    (folder / 'config.json').write_text(json.dumps(config))
    log = [{'step': 1, 'tokens': 1000, 'loss': 5.0, 'lr': 0.1, 'tokens_per_s': 100.0, **line},
           {'step': 2, 'tokens': 4000, 'loss': 4.0, 'lr': 0.1, 'tokens_per_s': 200.0, **line},
           {'step': 2, 'val_loss': 4.25, **line}]
    lines = [json.dumps(entry) for entry in log]
    (folder / 'log.jsonl').write_text('\n'.join([*lines, '{"step": 3, "tok']))
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the data of TEXT and a CEM run, out/run."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / 'data', vocab_size=257, ids=[256, *TEXT.encode()])
    write_run(tmp_path / 'out/run', Path('data'), model_of())
    (tmp_path / 'text.txt').write_text(TEXT, encoding='utf-8')
    return tmp_path


def cells(path: Path | str) -> list[list[str]]:
    """The rows of a page's Markdown tables, without their headers."""
    lines = [line for line in Path(path).read_text().splitlines() if line.startswith('|')]
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    heads = [n for n, row in enumerate(rows) if set(row[0]) == {'-'}]
    return [row for n, row in enumerate(rows) if n not in heads and n + 1 not in heads]


# What is measured

def test_measured_loss_is_the_models() -> None:
    model = model_of()
    ids = torch.randint(257, (5, LENGTH + 1))
    tokens, loss, _ = evaluate.measure(model, ids, BYTES)
    assert tokens == 5 * LENGTH
    assert loss == pytest.approx(float(model(ids[:, :-1], ids[:, 1:])[1]), rel=1e-6)
    short = F.pad(ids[-1:, :4], (0, LENGTH - 3), value=-100)
    tokens, loss, _ = evaluate.measure(model, torch.cat([ids[:4], short]), BYTES)
    total = sum(evaluate.measure(model, part, BYTES)[1] * n
                for part, n in ((ids[:4], 4 * LENGTH), (ids[-1:, :4], 3)))
    assert tokens == 4 * LENGTH + 3
    assert loss == pytest.approx(total / tokens, rel=1e-6)
    # a model that knows nothing: bits of the tokens that spell text, over their bytes
    torch.nn.init.zeros_(model.head)
    ids = torch.tensor([[256, *b'two texts', 256, *b'of twelve']])
    for size in 1, 2:
        assert evaluate.measure(model, ids, size * BYTES)[2] == pytest.approx(math.log2(257) / size)


def test_energies_are_those_of_the_sublayers() -> None:
    model = model_of(preconditioner='none', kq_diag='none', attn_step_size=0.01, mlp_step_size=0.01)
    x = torch.randint(257, (3, LENGTH))
    by_layer = evaluate.energies(model, x, steps=4)
    assert list(by_layer) == ['attn 1', 'attn 2', 'mlp 1', 'mlp 2']
    h = model.blocks[0].attn.norm(F.embedding(x, model.embedding))
    assert by_layer['attn 1'][0] == pytest.approx(float(model.blocks[0].attn.energy(h, h).mean()))
    for along in by_layer.values():
        assert len(along) == 5
        assert (np.diff(along) < 0).all()  # small steps down a gradient
    assert list(evaluate.energies(model_of(attn='llama'), x, steps=1)) == ['mlp 1', 'mlp 2']


@pytest.mark.parametrize('options', [
    {}, dict(attn='llama', mlp='llama'), dict(attn='llama', attn_steps=3), dict(attn_steps=4)],
    ids=str)
def test_attention_maps_are_the_weights_of_each_step(options: dict) -> None:
    model = model_of(**options)
    idx = torch.randint(257, (1, 9))
    before = model(idx)[0]
    maps = evaluate.attention_maps(model, idx)
    assert torch.equal(model(idx)[0], before)
    assert model.cfg.attn_impl == 'auto'
    for alpha in maps:
        assert alpha.shape == (model.cfg.attn_steps, 2, 9, 9)
        assert alpha.sum(dim=-1).allclose(torch.ones(()))
        assert (alpha.triu(1) == 0).all()
    x = F.embedding(idx, model.embedding)
    first, pos = model.blocks[0].attn, position_tables(model.cfg, x)
    h = first.norm(x)
    q, k = first.project(h, first.W_Q, pos), first.project(h, first.W_K, pos)
    alpha = first.scores(q, h, k, h, pos).softmax(dim=-1)
    assert maps[0][0].allclose(alpha[0], atol=1e-6)


def test_moved_is_the_share_that_goes_elsewhere() -> None:
    here, there = torch.eye(4), torch.eye(4).flip(0)
    maps = torch.stack([here, there, there, (here + there) / 2])[:, None]
    assert evaluate.moved(maps)[:, 0].tolist() == [1.0, 0.0, 0.5]


# The command line

def test_the_newest_run_on_its_test_split(place: Path, capsys: pytest.CaptureFixture) -> None:
    evaluate.main(['--device=cpu'])
    steps, tokens, loss, perplexity, bits = cells('out/run/loss.md')[0]
    right = loss_of(model_of())
    assert (steps, tokens) == ('as trained', f'{PARTS[:, 1:].numel():,}')
    assert float(loss) == pytest.approx(right, abs=1e-4)
    assert float(perplexity) == pytest.approx(math.exp(right), rel=1e-4)
    assert float(bits) == pytest.approx(right / math.log(2), abs=1e-3)
    page = Path('out/run/loss.md').read_text()
    assert page in capsys.readouterr().out
    assert page.startswith('best checkpoint of out/run, step 2; test split of data\n\n')


def test_a_runs_data_that_changed_is_not_read_unasked(
    halves: tuple[Path, Path], tmp_path: Path
) -> None:
    out, data = (Path(shutil.copytree(folder, tmp_path / folder.name))
                 for folder in (halves[0], halves[0].parent / 'data'))
    for path in out.glob('*.pt'):
        torch.save({**torch.load(path, weights_only=True), 'data_dir': str(data)}, path)
    content = (data / 'val.bin').read_bytes()
    (data / 'val.bin').write_bytes(bytes([content[0] ^ 1]) + content[1:])
    options = [f'--out_dir={out}', '--tokens=100', '--device=cpu']
    evaluate.main(options)
    with pytest.raises(SystemExit, match=r'val split of .* has changed since'):
        evaluate.main([*options, '--split=val'])
    evaluate.main([*options, '--split=val', f'--data={data}'])
    moved = data.rename(tmp_path / 'moved')
    evaluate.main([*options, f'--data={moved}'])  # its own tokenizer serves


def test_a_text_is_read_whole(place: Path) -> None:
    evaluate.main(['--text=text.txt', '--device=cpu', '--out_dir=out/run/best.pt'])
    assert Path('out/run/loss.md').read_text().startswith('out/run/best.pt, step 2; text.txt\n')
    _, tokens, loss, *_ = cells('out/run/loss.md')[0]
    ids = torch.tensor([256, *TEXT.encode()])
    assert int(tokens) == len(ids) - 1  # each byte is a target, once
    nats = [float(model_of()(part[None, :-1], part[None, 1:])[1]) * (len(part) - 1)
            for part in (ids[at:at + LENGTH + 1] for at in range(0, len(ids) - 1, LENGTH))]
    assert float(loss) == pytest.approx(sum(nats) / int(tokens), abs=1e-4)
    Path('short.txt').write_text('short')
    for text, count in ('text.txt', 2 * LENGTH), ('short.txt', 5):
        evaluate.main([f'--text={text}', '--tokens=40', '--device=cpu'])
        assert int(cells('out/run/loss.md')[0][1]) == count


def test_other_steps_at_test_time(place: Path) -> None:
    write_run(place / 'out/mixed', Path('data'), model_of(attn='llama'))
    evaluate.main(['--steps=1,2,3', '--device=cpu', '--out_dir=out/run'])
    evaluate.main(['--steps=1,3', '--energies', '--device=cpu', '--out_dir=out/mixed'])
    rows, mixed = cells('out/run/steps.md'), cells('out/mixed/steps.md')
    assert [row[0] for row in rows] == ['1', '2, as trained', '3']
    eta = dict(attn_step_size=0.5, mlp_step_size=0.5)  # 1 / T of training
    for T, row in enumerate(rows, 1):
        right = loss_of(model_of(attn_steps=T, mlp_steps=T, **eta))
        assert float(row[2]) == pytest.approx(right, abs=1e-4)
    assert len({row[2] for row in rows}) == 3
    # Llama's sublayers keep their steps
    right = loss_of(model_of(attn='llama', mlp_steps=3, mlp_step_size=0.5))
    assert float(mixed[1][2]) == pytest.approx(right, abs=1e-4)
    energies = [(row[0], len(row)) for row in cells('out/mixed/energies.md')]
    assert energies == [('mlp 1', 5), ('mlp 2', 5)]
    assert Path('out/run/steps.png').exists()
    assert not Path('out/run/loss.md').exists()  # what is asked for and no more


def test_energies_and_attention_of_a_run(place: Path) -> None:
    evaluate.main(['--energies', '--attention=A $word_d\u00e9j\u00e0', '--device=cpu'])
    assert [len(row) for row in cells('out/run/energies.md')] == [10] * 4
    ids = torch.tensor([[256, *'A $word_d\u00e9j\u00e0'.encode()]])
    shares = [float(evaluate.moved(maps).mean())
              for maps in evaluate.attention_maps(model_of(), ids)]
    assert [row[1] for row in cells('out/run/attention.md')] == [f'{s:.2%}' for s in shares]
    for name in ('energies', 'attention'):
        assert Path(f'out/run/{name}.png').read_bytes()[:4] == b'\x89PNG'
    evaluate.main(['--attention=word', '--steps=1,4', '--device=cpu'])
    assert all(len(row) == 4 for row in cells('out/run/attention.md'))


@pytest.mark.parametrize('argv', [['--device=cpu'], ['--compare', 'out/run']], ids=' '.join)
def test_numbers_that_cannot_be_written_are_printed(
        argv: list[str], place: Path, capsys: pytest.CaptureFixture,
        monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, data: bytes) -> None:
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(evaluate, 'write_atomic', full)
    evaluate.main(argv)
    said = capsys.readouterr().out
    assert said.index('| ') < said.index('not written (No space left on device)')


# Runs side by side

CURVES = 'out/results/compare/curves.md'


def test_runs_side_by_side(place: Path, capsys: pytest.CaptureFixture) -> None:
    better = write_run(place / 'out/better', Path('data'), model_of(n_layer=1), val_loss=3.5)
    odd = r'out/_$\frac$'  # which matplotlib would read as mathematics, wrongly written
    went_on = write_run(place / odd, Path('data'), model_of(), val_loss=None)
    for run, steps in ((better, 2), (went_on, 1)):
        (run / 'result.json').write_text(json.dumps({'test_loss': 3.25, 'steps': steps}))
    evaluate.main(['--compare', 'out/run', odd, 'out/better'])
    rows = cells(CURVES)
    assert [row[0] for row in rows] == ['out/better', 'out/run', odd]
    assert rows[0][5:8] == ['3.5000', '3.2500', f'{math.exp(3.25):.3f}']
    assert rows[1][5:8] == ['4.2500', 'nan', 'nan']
    assert rows[2][5:8] == ['nan', 'nan', 'nan']  # its result is that of fewer steps
    flops = 4000 * flops_per_token(model_of())
    assert rows[1][1:4] == [f'{model_of().num_params():,}', '4,000', f'{flops:.2e}']
    assert rows[1][4] == f'{(1000 / 100 + 3000 / 200) / 3600:.3f}'
    assert Path(CURVES).with_suffix('.png').read_bytes()[:4] == b'\x89PNG'


def test_runs_of_different_data_are_not_ranked_by_losses_a_token(place: Path) -> None:
    write_run(place / 'out/other', Path('other'), model_of(), val_loss=3.0)
    evaluate.main(['--compare', 'out/run', 'out/other'])
    page = Path(CURVES).read_text()
    assert 'losses a token do not compare' in page  # nor are they ranked by them
    assert [row[-2:] for row in cells(CURVES)] == [['data', '257'], ['other', '257']]


def test_names_that_matplotlib_would_read_otherwise(place: Path) -> None:
    names = ['_x', '$', r'a $\frac$ b', 'c$_d$', 'caf\udce9']
    folders = [str(write_run(place / f'out/{name}', Path('data'), model_of())) for name in names]
    _, figure = evaluate.compare(tuple(folders))
    figure.savefig('all.png')
    shown = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert shown == [*names[:4], 'caf?']


DAMAGE = [
    ('config.json', b'{'), ('config.json', b'\xff'), ('config.json', b'{"train": 1, "model": {}}'),
    ('config.json', b'{"train": {}, "model": {"n_head": 7}}'), ('result.json', b'['),
    ('config.json', b'{"train": {}, "model": {"z": 1}}'), ('log.jsonl', b'\x00\xff\n5\n{}'),
    ('log.jsonl', b'{"tokens": "3", "tokens_per_s": {}, "loss": []}'),
    ('log.jsonl', b'{"tokens": 1, "tokens_per_s": 0, "loss": 2}'),
]


def test_damaged_runs_are_passed_over(place: Path, capsys: pytest.CaptureFixture) -> None:
    folders = []
    for n, (name, content) in enumerate(DAMAGE):
        folders.append(str(write_run(place / f'out/damaged{n}', Path('data'), model_of())))
        (place / folders[-1] / name).write_bytes(content)
    evaluate.main(['--compare', *folders, 'out/run', 'data'])
    assert [row[0] for row in cells(CURVES)] == ['out/run']
    said = capsys.readouterr().out.splitlines()
    for folder in [*folders, 'data']:
        assert sum(line.startswith(f'{folder}: ') for line in said) == 1
    assert sum(line.endswith('; passed over') for line in said) == len(folders) + 1


BAD = [
    (['--text=nowhere.txt'], 'text=nowhere.txt: No such file'),
    (['--text=pipe'], 'text=pipe is no file'),
    (['--text=empty.txt'], 'empty.txt is empty'),
    (['--text=latin1.txt'], 'byte 1 is not UTF-8'),
    (['--text=text.txt', '--data=data'], 'give one'),
    (['--data=gpt2'], 'its tokenizer is gpt2, that of the run byte'),
    (['--tokens=0'], 'tokens=0: expected 1 to'),
    (['--steps=1,0'], 'steps=1,0: expected 1 to 1,000'),
    (['--attention=' + 'long ' * 9], 'has 45 tokens; expected 1 to 15'),
    (['--out_dir=out/llama', '--energies'], 'out/llama is all Llama'),
    (['--out_dir=nowhere'], 'no checkpoint in nowhere'),
    (['--compare', 'data'], 'no runs'),
    (['--compar', 'out/run'], 'no such option; near: compare'),
]


def test_bad_input_gets_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(place / 'out/llama', Path('data'), model_of(attn='llama', mlp='llama'))
    edit_meta(write_data(place / 'gpt2'), tokenizer='gpt2')
    (place / 'empty.txt').touch()
    (place / 'latin1.txt').write_bytes('d\u00e9j\u00e0'.encode('latin-1'))
    os.mkfifo('pipe')
    runs = sorted(place.rglob('out/**/*'))
    for argv, message in BAD:
        with pytest.raises(SystemExit) as error:
            evaluate.main(argv)
        assert message in str(error.value)
        assert '\n' not in str(error.value)
    assert sorted(place.rglob('out/**/*')) == runs
    monkeypatch.chdir(place / 'out')
    with pytest.raises(SystemExit, match='no run in out/'):
        evaluate.main([])

"""evaluate.py: each number against another way to it, and the command line."""
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_tokenizers import LLAMA, needs_llama

import evaluate
from model import ModelConfig, Transformer, make_positions
from nanocem import hub
from nanocem.documents import Reading
from nanocem.errors import UserError
from nanocem.loss import NO_TARGET
from nanocem.tokenizers import ByteTokenizer, SentencePieceTokenizer
from running import ROOT, edit_meta, write_data

LENGTH = 16
TEXT = 'The energy of a word falls, step by step: d\u00e9j\u00e0 vu.\n' * 8
PARTS = torch.tensor([256, *TEXT.encode()]).unfold(0, LENGTH + 1, LENGTH)


def model_of(**options) -> Transformer:
    """A model with two steps in its CEM sublayers, and no weight at zero."""
    torch.manual_seed(0)
    steps = {f'{kind}_steps': 2 for kind in ('attn', 'mlp') if options.get(kind) != 'llama'}
    size = dict(d_model=16, n_layer=2, n_head=2, d_mlp=24, vocab_size=257, context_length=LENGTH)
    model = Transformer(ModelConfig(**{**size, **steps, **options}))
    for name, p in model.named_parameters():
        if not name.endswith('gain'):
            torch.nn.init.normal_(p, std=0.3)
        p.requires_grad_(False)
    return model.eval()


def loss_of(model: Transformer) -> float:
    return float(model(PARTS[:, :-1], PARTS[:, 1:])[1])


def write_run(folder: Path, data: Path, model: Transformer) -> Path:
    """The folder of a run, as far as evaluate.py reads it."""
    folder.mkdir(parents=True)
    cfg = vars(model.cfg)
    torch.save({'model': model.state_dict(), 'model_config': cfg, 'step': 2, 'data_dir': str(data),
                'data': {'tokenizer': 'byte', 'tokenizer_sha256': None, 'vocab_size': 257}},
               folder / 'best.pt')
    config = {'train': {'data': str(data), 'tokens': 60, 'batch_size': 2}, 'model': cfg,
              'data': {'val checksum': 1, 'test checksum': 1}, 'max_steps': 2}
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'log.jsonl').write_text(
        '{"tokens": 1000, "loss": 5.0}\n{"val_loss": 4.2}\n{"event": "skipped", "loss": 9.0}\n'
        '{"tokens": 4000, "loss": 4.0}\n{"tok')
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the data of TEXT and a CEM run, out/run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('LLAMA_TOKENIZER', raising=False)
    write_data(tmp_path / 'data', vocab_size=257, ids=[256, *TEXT.encode()])
    write_run(tmp_path / 'out/run', Path('data'), model_of())
    return tmp_path


def cells(page: str) -> list[list[str]]:
    """The rows of a page's Markdown tables, without their headers."""
    lines = [line for line in page.splitlines() if line.startswith('|')]
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    heads = [n for n, row in enumerate(rows) if set(row[0]) == {'-'}]
    return [row for n, row in enumerate(rows) if n not in heads and n + 1 not in heads]


Report = Callable[..., str]


@pytest.fixture
def report(capsys: pytest.CaptureFixture) -> Report:
    """A function that returns what evaluate.py prints with these options."""
    def printed(*options: str) -> str:
        capsys.readouterr()
        evaluate.main([*options, '--device=cpu'])
        return capsys.readouterr().out
    return printed


# What is measured

def test_each_use_of_a_sublayer_has_its_energies() -> None:
    """Attention that is applied twice has two uses, each of the input that it gets."""
    model = model_of(n_layer=1, attn_reuse=2)
    x = torch.randint(257, (3, LENGTH))
    found = {name: energies for name, *_, energies in evaluate.descent(model, x)}
    assert list(found) == ['attn 1, use 1', 'attn 1, use 2', 'mlp 1']
    attn, state = model.blocks[0].attn, F.embedding(x, model.embedding)
    for use in 1, 2:
        h = attn.norm(state)
        assert found[f'attn 1, use {use}'][0] == pytest.approx(float(attn.energy(h, h).mean()))
        state = attn(state, make_positions(model.cfg, state))


@pytest.mark.parametrize('options', [
    dict(), dict(residual='normed'), dict(positions='rope'), dict(mlp_energy='sign_convex'),
    dict(attn_reuse=4), dict(kq_diag='per_head', exact_update=True)], ids=str)
def test_the_plain_layer_and_the_exact_update_descend(options: dict) -> None:
    model = model_of(**options, attn_step_size=1e-3, mlp_step_size=1e-3).double()
    for _, cosine, share, energies in evaluate.descent(model, torch.randint(257, (3, LENGTH)), 4):
        assert cosine == pytest.approx(1, abs=1e-9) and share == 1
        assert len(energies) == 5 and (np.diff(energies) < 0).all()
    assert model.blocks[0].attn.T == model.blocks[0].mlp.T == 2  # as before


def test_a_step_that_leaves_out_the_diagonal_is_not_the_gradient() -> None:
    for options in dict(kq_diag='shared'), dict(preconditioner='diag'):
        attention, *_ = evaluate.descent(model_of(**options), torch.randint(257, (3, LENGTH)))
        assert attention[1] < 0.99


@pytest.mark.parametrize(('options', 'steps', 'uses'), [
    (dict(kq_diag='shared', attn_steps=3), 3, 1), (dict(attn='llama', attn_reuse=3), 1, 3),
    (dict(attn_reuse=4), 2, 4)], ids=str)
def test_attention_maps_are_the_weights_of_each_step(options: dict, steps: int, uses: int) -> None:
    model = model_of(**options)
    idx = torch.randint(257, (1, 9))
    before = model(idx)[0]
    maps = evaluate.attention_maps(model, idx)
    assert torch.equal(model(idx)[0], before)
    assert len(maps) == 2 * uses  # two layers
    for alpha in maps:
        assert alpha.shape == (steps, 2, 9, 9)
        assert alpha.sum(dim=-1).allclose(torch.ones(()))
        assert (alpha.triu(1) == 0).all()
    x = F.embedding(idx, model.embedding)
    first, pos = model.blocks[0].attn, make_positions(model.cfg, x)
    h = first.norm(x)
    q = first.rotate(first.split_heads(F.linear(h, first.W_Q)), pos)
    k = first.rotate(first.split_heads(F.linear(h, first.W_K)), pos)
    alpha = first.scores(q, k, pos, h, h).softmax(dim=-1)
    assert maps[0][0].allclose(alpha[0], atol=1e-6)


# The command line

def test_the_newest_run_on_its_test_split(place: Path, report: Report) -> None:
    torch.save({**torch.load('out/run/best.pt'), 'step': 3}, 'out/run/step_00000003.pt')
    page = report()
    assert page.startswith('out/run, step 2; test split of data\n\n')  # best.pt
    steps, tokens, loss, perplexity, bits = cells(page)[0]
    right = loss_of(model_of())
    assert (steps, tokens) == ('as trained', f'{PARTS[:, 1:].numel():,}')
    assert float(loss) == pytest.approx(right, abs=1e-4)
    assert float(perplexity) == pytest.approx(math.exp(right), rel=1e-4)
    assert float(bits) == pytest.approx(right / math.log(2), abs=1e-3)
    assert int(cells(report('--tokens=40'))[0][1]) == 2 * LENGTH
    Path('short.txt').write_text('short')
    assert int(cells(report('--text=short.txt'))[0][1]) == 5


class LossyTokenizer(ByteTokenizer):
    """It loses all spaces and spells every other character in lower case."""
    def encode(self, text: str, begins: bool = True) -> list[int]:
        return super().encode(text.replace(' ', '').lower())


@pytest.mark.parametrize('tokenizer', [ByteTokenizer(), LossyTokenizer()], ids=['bytes', 'lossy'])
def test_a_text_is_read_whole(tokenizer: ByteTokenizer, place: Path, report: Report,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token but the first is a target, once. Bits per byte do not count BOS, which begins each
    document. There are none if the tokenizer loses text."""
    monkeypatch.setattr(evaluate, 'tokenizer_of', lambda state: tokenizer)
    documents = [TEXT.strip(), 'and another']
    Path('two.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in documents))
    page = report('--text=two.jsonl', '--out_dir=out/run/best.pt')
    assert 'out/run/best.pt, step 2; two.jsonl\n' in page
    Path('two.txt').write_text('<|x|>'.join(documents))
    assert cells(report('--text=two.txt', '--separator=<|x|>')) == cells(page)
    with pytest.raises(SystemExit, match=r'is in no text file of two\.txt'):
        report('--text=two.txt', '--separator=<|y|>')
    _, tokens, loss, _, *bits = cells(page)[0]
    ids = torch.tensor([i for text in documents for i in [256, *tokenizer.encode(text)]])
    parts = [ids[at:at + LENGTH + 1] for at in range(0, len(ids) - 1, LENGTH)]
    losses = torch.cat([F.cross_entropy(model_of()(part[None, :-1])[0][0], part[1:],
                                        reduction='none') for part in parts])
    assert int(tokens) == len(losses) == len(ids) - 1
    assert float(loss) == pytest.approx(float(losses.mean()), abs=1e-4)
    if type(tokenizer) is LossyTokenizer:
        assert bits == [] and 'the tokenizer of this data loses text' in page
        return
    nats, n_bytes = float(losses[ids[1:] != 256].sum()), len(''.join(documents).encode())
    assert float(bits[0]) == pytest.approx(nats / math.log(2) / n_bytes, abs=1e-3)


def test_data_that_have_changed_are_refused(place: Path, report: Report) -> None:
    state = torch.load('out/run/best.pt')
    known = state['data'] | {'test tokens': 1}
    torch.save(state | {'data': known}, 'out/run/best.pt')
    with pytest.raises(SystemExit, match=r'its test tokens is .*, that of the run 1; expected'):
        evaluate.main(['--device=cpu'])
    assert report('--data=data') and report('--split=val')  # given, or not known


def test_shards_of_a_tokenizer_that_loses_text_have_no_bits_per_byte(
        place: Path, report: Report) -> None:
    edit_meta(Path('data'), lossless=False)
    page = report()
    assert len(cells(page)[0]) == 4 and 'the tokenizer of this data loses text' in page


@needs_llama
def test_perplexity_per_llama_token(
        place: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('LLAMA_TOKENIZER', LLAMA)
    (place / 'text.txt').write_text(TEXT, encoding='utf-8')
    _, tokens, loss, *_, perplexity = cells(report('--text=text.txt'))[0]
    expected = float(loss) * int(tokens) / len(SentencePieceTokenizer(LLAMA).encode(TEXT))
    assert math.log(float(perplexity)) == pytest.approx(expected, 1e-4)


def test_other_steps_at_test_time(place: Path, report: Report) -> None:
    rows = cells(report('--steps=1,2,3'))
    assert [row[0] for row in rows] == ['1', '2', '3']
    eta = dict(attn_step_size=0.5, mlp_step_size=0.5)  # 1 / T of training
    for T, row in enumerate(rows, 1):
        right = loss_of(model_of(attn_steps=T, mlp_steps=T, **eta))
        assert float(row[2]) == pytest.approx(right, abs=1e-4)
    # Llama's sublayers have no steps
    write_run(place / 'out/mixed', Path('data'), model_of(attn='llama'))
    *energies, _, last = cells(report('--steps=1,3', '--energies', '--out_dir=out/mixed'))
    assert [(row[0], len(row)) for row in energies] == [('mlp 1', 7), ('mlp 2', 7)]
    right = loss_of(model_of(attn='llama', mlp_steps=3, mlp_step_size=0.5))
    assert float(last[2]) == pytest.approx(right, abs=1e-4)


def test_a_report_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, idx = model_of(), torch.zeros(1, 3, dtype=torch.long)
    attn = model.blocks[0].attn
    before = {**vars(attn)}, model(idx)[0]
    x = torch.ones(1, 3, 16)
    inputs = x, make_positions(model.cfg, x)
    monkeypatch.setattr(torch.Tensor, 'softmax', lambda *args, **options: 1 / 0)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *args, **options: 1 / 0)
    for fails in (lambda: evaluate.attention_maps(model, idx),
                  lambda: evaluate.measure_steps(attn, inputs, 2)):
        with pytest.raises(ZeroDivisionError):
            fails()
    monkeypatch.undo()
    assert vars(attn) == before[0] and torch.equal(model(idx)[0], before[1])


def test_energies_and_attention_of_a_run(place: Path, report: Report) -> None:
    energies, attention = report('--energies', '--attention=word').split('out/run; ')
    assert [len(row) for row in cells(energies)] == [12] * 4
    ids = torch.tensor([[256, *b'word']])
    shifts = [float((maps[1] - maps[0]).clamp(min=0).sum(dim=-1).mean())
              for maps in evaluate.attention_maps(model_of(), ids)]
    assert [row[1] for row in cells(attention)] == [f'{s:.2%}' for s in shifts]
    rows = cells(report('--attention=A $word_d\u00e9j\u00e0', '--steps=1,4'))
    assert [len(row) for row in rows] == [5, 5, 4, 4]
    assert 'attention-run.png' in report('--attention=$x_$ and y')  # no formula
    assert Path('out/results/attention-run.png').read_bytes()[:4] == b'\x89PNG'
    with pytest.raises(SystemExit, match='has 45 tokens; expected 1 to 15'):
        evaluate.main([f'--attention={"long " * 9}'])
    llama = model_of(attn='llama', attn_reuse=2)
    run = SimpleNamespace(model=llama, tokenizer=ByteTokenizer(), path='out/run',
                          cfg=evaluate.EvaluateConfig(attention='word'))
    _, text, figure, _ = evaluate.report_attention(run)
    assert text.startswith('No attention takes a second step')
    assert figure.axes[2].get_title() == 'layer 1, use 2\nhead 1'
    # One layer alone: its first step, and what the second changes
    run.model, run.cfg = model_of(), evaluate.EvaluateConfig(attention='word', layer=2)
    figure = evaluate.report_attention(run).figure
    maps = evaluate.attention_maps(run.model, ids)[1]
    assert len(figure.axes) == 2 * maps.shape[1]
    for t, drawn in ((0, maps[0].sqrt()), (1, maps[1] - maps[0])):
        for k in range(maps.shape[1]):
            found = figure.axes[t * maps.shape[1] + k].images[0].get_array()
            assert torch.equal(torch.as_tensor(found.data), drawn[k])
    run.cfg.layer = 3
    with pytest.raises(UserError, match='layer=3: expected 1 to 2'):
        evaluate.report_attention(run)


def test_runs_side_by_side(place: Path, capsys: pytest.CaptureFixture) -> None:
    bpe = write_run(place / 'out/bpe', Path('bpe'), model_of())
    (bpe / 'result.json').write_text(
        '{"test_loss": null, "parameters": 1234567, "steps": 2, "tokens": 64}')
    evaluate.main(['--compare=out/run,out/bpe'])
    assert Path('out/results/compare-run-bpe.png').exists()
    assert cells(capsys.readouterr().out) == [
        ['out/run', f'{model_of().num_params():,}', *[''] * 6],
        ['out/bpe', '1,234,567', '64', '', '', '', '', ''], ['data', 'data', 'bpe']]
    _, text, figure, _ = evaluate.compare_runs(['out/run', 'out/bpe'])
    assert 'Losses cannot be compared' not in text  # the same text in another folder
    line, _ = figure.axes[0].lines
    assert line.get_label() == 'run out/run'
    assert line.get_xydata().tolist() == [[1000, 5], [4000, 4]]
    assert 'compared' not in evaluate.compare_runs(['out/run', 'out/run']).text
    (bpe / 'result.json').write_text(  # of a shorter run
        '{"test_loss": 1.5, "steps": 1, "tokens": 32}')
    text = evaluate.compare_runs(['out/run', 'out/bpe']).text
    assert '1.5' not in text and 'is that of 1 steps, and config.json asks for 2' in text
    (bpe / 'result.json').unlink()
    (bpe / 'log.jsonl').unlink()  # a run that has just begun
    assert len(evaluate.compare_runs(['out/run', 'out/bpe']).figure.axes[0].lines) == 2
    config = json.loads(Path('out/bpe/config.json').read_text())
    for name in 'test checksum', 'val checksum':
        known = config['data'] | {name: 2}
        Path('out/bpe/config.json').write_text(json.dumps(config | {'data': known}))
        assert f'differ in {name}.' in evaluate.compare_runs(['out/run', 'out/bpe']).text


def test_exports_side_by_side(place: Path, capsys: pytest.CaptureFixture) -> None:
    """Beside a run, too: their options, and their losses on a text."""
    llama = model_of(attn='llama')
    for name, model in (('a', model_of()), ('b', llama)):
        hub.export(model, f'hub/{name}', {
            'step': 1, 'data_dir': 'data', 'model_config': vars(model.cfg),
            'data': {'tokenizer': 'byte', 'tokenizer_sha256': None, 'vocab_size': 257}})
    report = evaluate.compare_runs(['hub/a', 'hub/b', 'out/run'])
    assert report.figure is not None
    assert ['attn', 'cem', 'llama', 'cem'] in cells(report.text)
    assert 'hub/b is an export, without results: --text=FILE measures its loss.' in report.text
    assert evaluate.compare_runs(['hub/a', 'hub/b']).figure is None
    capsys.readouterr()
    Path('text.txt').write_text('A text of some words')
    evaluate.main(['--compare=hub/b,out/run,hub/a', '--text=text.txt', '--device=cpu'])
    rows = cells(capsys.readouterr().out)
    ids = torch.tensor([[256, *b'A text of some words']])
    losses = {}
    for name, model in (('hub/b', llama), ('hub/a', model_of())):
        parts = [model(ids[:, i:i + n], ids[:, i + 1:i + n + 1])[1] * n
                 for i, n in ((0, 16), (16, 4))]
        losses[name] = float(sum(parts)) / 20
    over = math.expm1(losses['hub/b'] - losses['hub/a'])
    assert rows[0][:3] == ['hub/b', f'{llama.num_params():,}', '20']
    assert float(rows[0][3]) == pytest.approx(losses['hub/b'] / math.log(2), abs=1e-3)
    assert float(rows[0][5].strip('%')) == pytest.approx(100 * over, abs=0.06)
    assert rows[2][5] == '+0.0%'
    with pytest.raises(SystemExit, match='takes folders and a --text alone, and not steps'):
        evaluate.main(['--compare=hub/b,hub/a', '--steps=1'])


@pytest.mark.parametrize('name', ['eval_tokens', 'test_tokens', 'batch_size', 'context_length',
                                  'vocab_size', 'n_layer'])
def test_what_makes_losses_incomparable_is_said(name: str, place: Path) -> None:
    """Tokens of the tested text and the context do, and options of training do not."""
    for n, folder in enumerate(('run', 'other')):
        if n:
            write_run(place / 'out/other', Path('data'), model_of())
        path = place / f'out/{folder}/config.json'
        config = json.loads(path.read_text())
        part = 'train' if name in ('eval_tokens', 'test_tokens', 'batch_size') else 'model'
        config[part] |= {name: 16 + 16 * n}
        path.write_text(json.dumps(config))
    text = evaluate.compare_runs(['out/run', 'out/other']).text
    assert [name, '16', '32'] in cells(text)
    assert (f'Losses cannot be compared: the runs differ in {name}.' in text) == (
        name not in ('batch_size', 'n_layer'))
    assert 'Bits per byte' not in text


def test_bits_per_byte_of_two_tokenizers_can_be_compared(place: Path) -> None:
    write_run(place / 'out/other', Path('data'), model_of())
    config = json.loads(Path('out/other/config.json').read_text())
    config['data'] = {'tokenizer': 'gpt2', 'val checksum': 2, 'test checksum': 2}
    Path('out/other/config.json').write_text(json.dumps(config))
    text = evaluate.compare_runs(['out/run', 'out/other']).text
    assert 'Losses cannot be compared: the runs differ in val checksum, test checksum.' in text
    assert 'Bits per byte of different tokenizers can be compared, if' in text


def test_copying_beside_another_tokenizer_is_refused_for_that(place: Path) -> None:
    other = write_run(place / 'out/other', Path('data'), model_of(key_shift='half'))
    state = torch.load(other / 'best.pt')
    torch.save(state | {'data': state['data'] | {'tokenizer': 'gpt2'}}, other / 'best.pt')
    with pytest.raises(SystemExit) as stop:
        evaluate.main(['--out_dir=out/run', '--copying=out/other', '--device=cpu'])
    assert 'the run in out/other has tokenizer=gpt2 (now byte)' in stop.value.code
    assert 'init_from' not in stop.value.code


def test_an_option_that_one_of_two_runs_lacks_is_compared(place: Path) -> None:
    write_run(place / 'out/shifted', Path('data'), model_of(key_shift='half'))
    config = json.loads(Path('out/run/config.json').read_text())
    del config['model']['key_shift']  # the run is older
    Path('out/run/config.json').write_text(json.dumps(config))
    rows = cells(evaluate.compare_runs(['out/run', 'out/shifted']).text)
    assert ['key_shift', 'none', 'half'] in rows


def test_a_run_of_another_model_py_is_named(place: Path) -> None:
    write_run(place / 'out/edited', Path('data'), model_of())
    Path('out/edited/model.py').write_text('another text')
    rows = cells(evaluate.compare_runs(['out/run', 'out/edited']).text)
    assert rows[2:] == [['model.py', 'out/run/model.py', 'out/edited/model.py']]


def test_a_run_whose_name_looks_like_a_formula_is_drawn(place: Path) -> None:
    write_run(place / 'out/lr_$1e-3^$', Path('data'), model_of())
    evaluate.main(['--compare=out/run,out/lr_$1e-3^$'])
    assert Path('out/results/compare-run-lr_$1e-3^$.png').read_bytes()[:4] == b'\x89PNG'


def test_repeated_targets_are_those_of_a_slow_search() -> None:
    """A target is repeated if it and the tokens before it stood earlier in the sequence."""
    torch.manual_seed(1)
    ids = torch.randint(3, (5, 40))
    for n_before in (1, 2, 4):
        found = evaluate.repeated_targets(ids, 3, n_before)
        for row, flags in zip(ids.tolist(), found.tolist(), strict=True):
            for t in range(1, len(row)):
                runs = [row[i - n_before:i + 1] for i in range(n_before, t + 1)]
                assert flags[t - 1] == (t >= n_before and runs[-1] in runs[:-1])


class Copier(torch.nn.Module):
    """Give the token that followed the last token's previous place a logit of `strength`."""
    def __init__(self, strength: float):
        super().__init__()
        self.strength, self.embedding = strength, torch.zeros(1)
        self.cfg = SimpleNamespace(vocab_size=5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits = torch.zeros(*x.shape, 5)
        for n, row in enumerate(x.tolist()):
            for t, token in enumerate(row):
                earlier = [i for i in range(t) if row[i] == token]
                if earlier:
                    logits[n, t, row[earlier[-1] + 1]] = self.strength
        return logits, None


def test_copying_tells_a_model_that_copies(capsys: pytest.CaptureFixture) -> None:
    """Losses, the second reading, and the part of the gap are those computed target by target."""
    torch.manual_seed(2)
    ids = torch.cat([torch.randint(1, 5, (4, 17)), torch.full((4, 4), NO_TARGET)], dim=1)
    ids[1, 5] = 0  # a BOS, which is no target
    ids[0, -4:] = torch.tensor([1, 2, 3, 4])  # one sequence without padding
    models = {'A': Copier(0.0), 'B': Copier(2.0)}
    sums = {name: {True: [], False: []} for name in models}
    for name, model in models.items():
        for row in ids.tolist():
            tokens = [token for token in row if token >= 0]
            log_p = model(torch.tensor([tokens]))[0][0].log_softmax(-1)
            pairs = list(itertools.pairwise(tokens))
            for t, (_, target) in enumerate(pairs):
                if target != 0:
                    sums[name][pairs[t] in pairs[:t]].append(-log_p[t, target].item())
    found = {name: evaluate.copying(model, ids, bos=0) for name, model in models.items()}
    for name, losses in found.items():
        for kind, repeated in (('repeated', True), ('other', False)):
            assert losses[kind].nansum() == pytest.approx(sum(sums[name][repeated]), rel=1e-5)
    assert found['B']['first'].shape == found['B']['second'].shape == (1, 9)
    assert found['A']['second'].mean() == pytest.approx(math.log(5))
    repeated = sum(sums['A'][True]) - sum(sums['B'][True])
    total = repeated + sum(sums['A'][False]) - sum(sums['B'][False])
    run = SimpleNamespace(models=models, sequences=(ids, None, None), subject='A, B',
                          source='a text', tokenizer=SimpleNamespace(name='of five', bos=0))
    text = evaluate.report_copying(run).text
    assert f'Of the gap {repeated / total:.0%} comes from repeated targets' in text
    run.models = {'A': Copier(2.0), 'B': Copier(2.0)}
    assert 'is not divided' in evaluate.report_copying(run).text


def test_a_text_of_many_blocks_has_one_bos(tmp_path: Path) -> None:
    """Its ids are those of the whole, and so are its bytes."""
    text = 'The energy falls, step by step. ' * 6000
    (tmp_path / 'a.txt').write_text(text)
    ids, n_bytes, llama_tokens = evaluate.read_text_sequences(
        str(tmp_path / 'a.txt'), ByteTokenizer(), 64, '', Reading())
    flat = [*ids[:, :-1].flatten().tolist(), int(ids[-1, -1])]
    assert [i for i in flat if i != NO_TARGET] == [256, *text.encode()]
    assert (n_bytes, llama_tokens) == (len(text), None)


@pytest.mark.parametrize('change', [0.01, 0.03])
def test_a_gap_below_two_per_cent_is_none(change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, 'copying', lambda model, *rest: {
        kind: torch.full((4,), 1 + change * (model == 'B')) for kind in evaluate.COPYING})
    run = SimpleNamespace(models={'A': 'A', 'B': 'B'}, sequences=(torch.zeros(1, 7), None, None),
                          subject='', source='', tokenizer=SimpleNamespace(name='of five', bos=0))
    text = evaluate.report_copying(run).text
    assert ('A gap of less than 2% is not divided.' in text) == (change < 0.02)
    assert ('Of the gap 50% comes from repeated targets.' in text) == (change > 0.02)


def test_a_gap_of_two_signs_has_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A is better where targets are repeated, and worse elsewhere."""
    repeated, other = torch.ones(2), torch.ones(4)
    losses = {'A': (1.0 * repeated, 2.0 * other), 'B': (2.0 * repeated, 1.9 * other)}
    monkeypatch.setattr(evaluate, 'copying', lambda model, *rest: dict(
        zip(evaluate.COPYING, losses[model] * 2, strict=True)))
    run = SimpleNamespace(models={'A': 'A', 'B': 'B'}, sequences=(torch.zeros(1, 7), None, None),
                          subject='', source='', tokenizer=SimpleNamespace(name='of five', bos=0))
    text = evaluate.report_copying(run).text
    assert 'the gap is repeated targets -0.3333 and other targets +0.0667.' in text
    assert 'Of the gap' not in text


@pytest.mark.parametrize(('text', 'words'), [
    ('a', 'have 1 tokens: expected a text, and a context, of 4 or more'),
    ('abcdefgh', 'no target is of the kind "repeated: their last 5 bytes stood earlier"')])
@pytest.mark.parametrize('copying', ['--copying', '--copying=out/other'])
def test_too_little_text_for_copying_is_refused(text: str, words: str, copying: str,
                                                place: Path) -> None:
    write_run(place / 'out/other', Path('data'), model_of(kq_diag='shared'))
    Path('text.txt').write_text(text)
    with pytest.raises(SystemExit, match=words):
        evaluate.main(['--out_dir=out/run', '--text=text.txt', copying, '--device=cpu'])


def test_a_short_context_is_too_little_for_copying(place: Path) -> None:
    write_run(place / 'out/one', Path('data'), model_of(context_length=1))
    with pytest.raises(SystemExit, match='have 1 tokens: expected a text, and a context, of 4'):
        evaluate.main(['--out_dir=out/one', '--copying', '--device=cpu'])


def test_a_loss_that_is_no_number_is_never_left_out(place: Path, report: Report) -> None:
    """As those of BOS and padding are."""
    model = model_of()
    model.embedding[ord('w')] = math.nan
    write_run(place / 'out/nan', Path('data'), model)
    with pytest.raises(SystemExit, match='a loss is NaN'):
        evaluate.main(['--out_dir=out/nan', '--copying', '--device=cpu'])
    assert cells(report('--out_dir=out/nan'))[0][2:] == ['nan'] * 3  # no perplexity of infinity


def test_copying_beside_the_same_model_is_refused(place: Path) -> None:
    """By whatever name: the gap would be 0."""
    shutil.copytree('out/run', 'out/copy')
    for other in 'out/run', 'out/run/', 'out/run/best.pt', 'out/copy':
        with pytest.raises(SystemExit, match=f'copying={other} has the weights of out/run'):
            evaluate.main(['--out_dir=out/run', f'--copying={other}', '--device=cpu'])


class Falling:
    """A sublayer whose energy is u^2, and whose first step lowers it for some tokens alone. Later
    steps raise it for all."""
    T = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tensor([0.5, 0.9, 2.0])[:, None]  # of three tokens
        return x * [1, first, 3][self.T]

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def energy(self, u: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return u.square().sum(dim=-1)


@pytest.mark.parametrize('steps', [1, 2])
def test_the_share_is_that_of_the_first_step(steps: int) -> None:
    _, share, energies = evaluate.measure_steps(Falling(), (torch.ones(1, 3, 2),), steps)
    assert share == pytest.approx(2 / 3)
    assert energies == pytest.approx([2, 2 * (0.25 + 0.81 + 4) / 3, 18][:steps + 1])


def test_copying_on_the_command_line(capsys: pytest.CaptureFixture) -> None:
    """Of the trained models, all-CEM loses most on what Llama with ALiBi copies."""
    options = [f'--out_dir={ROOT}/pretrained/cem', f'--text={ROOT}/pretrained/held_out.txt']
    evaluate.main([*options, f'--copying={ROOT}/pretrained/llama_alibi'])
    printed = capsys.readouterr().out
    assert 'repeated +110.9%, other +6.5%' in printed
    assert 'Of the gap 74% comes from repeated targets' in printed
    evaluate.main([*options, '--copying'])
    assert '19.3%' in capsys.readouterr().out

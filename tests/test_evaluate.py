"""evaluate.py: each number against another way to it, and the command line."""
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_tokenizers import LLAMA, needs_llama

import evaluate
from model import LlamaMLP, ModelConfig, Transformer, make_positions
from nanocem import hub
from nanocem.documents import Reading
from nanocem.measure import NO_TARGET, read_text_sequences
from nanocem.tokenizers import ByteTokenizer, SentencePieceTokenizer
from running import edit_meta

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
    return folder


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
    with pytest.raises(SystemExit, match=r'is in no text of .*two\.txt'):
        report('--text=two.txt', '--separator=<|y|>')
    _, tokens, loss, _, *bits = cells(page)[0]
    ids = torch.tensor([i for text in documents for i in [256, *tokenizer.encode(text)]])
    parts = [ids[at:at + LENGTH + 1] for at in range(0, len(ids) - 1, LENGTH)]
    losses = torch.cat([F.cross_entropy(model_of()(part[None, :-1])[0][0], part[1:],
                                        reduction='none') for part in parts])
    assert int(tokens) == len(losses) == len(ids) - 1
    assert float(loss) == pytest.approx(float(losses.mean()), abs=1e-4)
    if type(tokenizer) is LossyTokenizer:
        assert bits == [] and 'the tokenizer loses some of this text' in page
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
    monkeypatch.setattr(torch.Tensor, 'softmax', lambda *args, **options: 1 / 0)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate.measure_steps(attn, (x, make_positions(model.cfg, x)), 2)
    monkeypatch.undo()
    assert vars(attn) == before[0] and torch.equal(model(idx)[0], before[1])


def test_energies_of_a_run(place: Path, report: Report) -> None:
    page = report('--energies')
    assert [len(row) for row in cells(page)] == [12] * 4
    for name in 'CEMAttention', 'CEMMLP':
        assert re.search(rf'^{name}: .* minus the gradient by \de-1\d of its norm$', page, re.M)
    assert page.endswith('out/results/energies-run.png\n')
    assert Path('out/results/energies-run.png').read_bytes()[:4] == b'\x89PNG'
    assert [len(row) for row in cells(report('--energies', '--steps=1,4'))] == [8] * 4 + [5] * 2


def test_energies_of_a_model_with_a_layer_that_has_none() -> None:
    model, idx = model_of(), torch.zeros(1, 3, dtype=torch.long)
    model.blocks[1].mlp = LlamaMLP(model.cfg)
    assert [name for name, *_ in evaluate.descent(model, idx)] == ['attn 1', 'attn 2', 'mlp 1']
    model.set_steps(mlp_steps=2)
    assert model.blocks[0].mlp.T == 2 and not hasattr(model.blocks[1].mlp, 'T')


def test_runs_side_by_side(place: Path, capsys: pytest.CaptureFixture) -> None:
    bpe = write_run(place / 'out/bpe', Path('bpe'), model_of())
    (bpe / 'result.json').write_text(
        '{"test_loss": null, "parameters": 1234567, "steps": 2, "tokens": 14303232}')
    evaluate.main(['--compare=out/run,out/bpe'])
    assert cells(capsys.readouterr().out) == [
        ['out/run', f'{model_of().num_params():,}', *[''] * 6],
        ['out/bpe', '1,234,567', '14,303,232', *[''] * 5], ['data', 'data', 'bpe']]
    text = evaluate.compare_runs(['out/run', 'out/bpe'])
    assert 'Losses cannot be compared' not in text  # the same text in another folder
    assert 'compared' not in evaluate.compare_runs(['out/run', 'out/run'])
    (bpe / 'result.json').write_text(  # of a shorter run
        '{"test_loss": 1.5, "steps": 1, "tokens": 32}')
    text = evaluate.compare_runs(['out/run', 'out/bpe'])
    assert '1.5' not in text and 'is that of 1 steps, and config.json asks for 2' in text
    (bpe / 'result.json').unlink()
    config = json.loads(Path('out/bpe/config.json').read_text())
    for name in 'test checksum', 'val checksum':
        known = config['data'] | {name: 2}
        Path('out/bpe/config.json').write_text(json.dumps(config | {'data': known}))
        assert f'differ in {name}.' in evaluate.compare_runs(['out/run', 'out/bpe'])


def test_exports_side_by_side(place: Path, capsys: pytest.CaptureFixture) -> None:
    """Beside a run, too: their options, and their losses on a text."""
    llama = model_of(attn='llama')
    for name, model in (('a', model_of()), ('b', llama)):
        hub.export(model, f'hub/{name}', {
            'step': 1, 'data_dir': 'data', 'model_config': vars(model.cfg),
            'data': {'tokenizer': 'byte', 'tokenizer_sha256': None, 'vocab_size': 257}})
    report = evaluate.compare_runs(['hub/a', 'hub/b', 'out/run'])
    assert ['attn', 'cem', 'llama', 'cem'] in cells(report)
    assert 'hub/b is an export, without results: --text=FILE measures its loss.' in report
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
    over = losses['hub/b'] / losses['hub/a'] - 1
    assert rows[0][:3] == ['hub/b', f'{llama.num_params():,}', '20']
    assert float(rows[0][3]) == pytest.approx(losses['hub/b'] / math.log(2), abs=1e-3)
    assert float(rows[0][4].strip('%')) == pytest.approx(100 * over, abs=0.06)
    assert rows[2][4] == '+0.0%'
    with pytest.raises(SystemExit, match='takes only folders and --text, not steps'):
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
    text = evaluate.compare_runs(['out/run', 'out/other'])
    assert [name, '16', '32'] in cells(text)
    assert (f'Losses cannot be compared: the runs differ in {name}.' in text) == (
        name not in ('batch_size', 'n_layer'))
    assert 'Bits per byte' not in text


def test_bits_per_byte_of_two_tokenizers_can_be_compared(place: Path) -> None:
    write_run(place / 'out/other', Path('data'), model_of())
    config = json.loads(Path('out/other/config.json').read_text())
    config['data'] = {'tokenizer': 'gpt2', 'val checksum': 2, 'test checksum': 2}
    Path('out/other/config.json').write_text(json.dumps(config))
    text = evaluate.compare_runs(['out/run', 'out/other'])
    assert 'Losses cannot be compared: the runs differ in val checksum, test checksum.' in text
    assert 'Bits per byte of different tokenizers can be compared if' in text


def test_an_option_that_one_of_two_runs_lacks_is_compared(place: Path) -> None:
    write_run(place / 'out/shifted', Path('data'), model_of(key_shift='half'))
    config = json.loads(Path('out/run/config.json').read_text())
    del config['model']['key_shift']  # the run is older
    Path('out/run/config.json').write_text(json.dumps(config))
    rows = cells(evaluate.compare_runs(['out/run', 'out/shifted']))
    assert ['key_shift', 'none', 'half'] in rows


def test_a_run_of_another_model_py_is_named(place: Path) -> None:
    write_run(place / 'out/edited', Path('data'), model_of())
    for name in ('run', 'edited'):
        Path(f'out/{name}/model.py').write_text(f'the text of {name}')
    rows = cells(evaluate.compare_runs(['out/run', 'out/edited']))
    assert rows[2:] == [['model.py', 'out/run/model.py', 'out/edited/model.py']]


def test_the_loss_of_a_damaged_model_is_no_number(place: Path, report: Report) -> None:
    model = model_of()
    model.embedding[ord('w')] = math.nan
    write_run(place / 'out/nan', Path('data'), model)
    assert cells(report('--out_dir=out/nan'))[0][2:] == ['nan'] * 3  # no perplexity of infinity


def test_a_text_of_many_blocks_has_one_bos(tmp_path: Path) -> None:
    """Its ids are those of the whole, and so are its bytes."""
    text = 'The energy falls, step by step. ' * 6000
    (tmp_path / 'a.txt').write_text(text)
    ids, n_bytes, llama_tokens = read_text_sequences(
        str(tmp_path / 'a.txt'), ByteTokenizer(), 64, '', Reading())
    flat = [*ids[:, :-1].flatten().tolist(), int(ids[-1, -1])]
    assert [i for i in flat if i != NO_TARGET] == [256, *text.encode()]
    assert (n_bytes, llama_tokens) == (len(text), None)


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

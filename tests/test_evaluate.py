"""evaluate.py and nanocem/lens.py: each number against another way to it, and the command line."""
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
from model import ModelConfig, Transformer
from nanocem import lens
from nanocem.tokenizers import make_tokenizer

LENGTH = 16
TEXT = 'The energy of a word falls, step by step: d\u00e9j\u00e0 vu.\n' * 8
BYTES = torch.tensor([1] * 256 + [0])


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


def write_data(folder: Path, ids: list[int], **changes) -> Path:
    folder.mkdir(parents=True)
    data = np.array(ids, '<u2').tobytes()
    (folder / 'test.bin').write_bytes(data)
    shards = [{'file': 'test.bin', 'tokens': len(ids), 'documents': 1}]
    (folder / 'meta.json').write_text(json.dumps({
        'format': 1, 'tokenizer': 'byte', 'tokenizer_sha256': None, 'vocab_size': 257, 'bos': 256,
        'dtype': 'uint16', 'splits': {'test': {'tokens': len(ids), 'shards': shards}}, **changes}))
    return folder


def write_run(folder: Path, data: Path, model: Transformer, **line) -> Path:
    """A finished run's folder, of two logged steps."""
    folder.mkdir(parents=True)
    cfg = vars(model.cfg)
    torch.save({'model': model.state_dict(), 'model_config': cfg, 'step': 2, 'data_dir': str(data),
                'data': {'tokenizer': 'byte', 'tokenizer_sha256': None, 'vocab_size': 257}},
               folder / 'best.pt')
    (folder / 'config.json').write_text(json.dumps({'train': {}, 'model': cfg, 'launcher': ''}))
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
    write_data(tmp_path / 'data', [256, *TEXT.encode()])
    write_run(tmp_path / 'out/run', tmp_path / 'data', model_of())
    (tmp_path / 'text.txt').write_text(TEXT, encoding='utf-8')
    return tmp_path


def cells(path: Path) -> list[list[str]]:
    """The rows of a Markdown table."""
    lines = path.read_text().splitlines()
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines[2:]]


# What is measured

def test_measured_loss_is_the_models() -> None:
    model = model_of()
    ids = torch.randint(257, (5, LENGTH + 1))
    found = lens.measure(model, list(ids), BYTES)
    _, loss = model(ids[:, :-1], ids[:, 1:])
    assert found.loss == pytest.approx(float(loss), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert found.tokens == 5 * LENGTH
    first = torch.nn.functional.cross_entropy(model(ids[:, :1])[0][:, 0], ids[:, 1])
    assert found.by_position[0] == pytest.approx(float(first), rel=1e-6)
    assert found.by_position.mean() == pytest.approx(found.loss)


def test_bits_per_byte_of_a_model_that_knows_nothing() -> None:
    model = model_of()
    torch.nn.init.zeros_(model.head)
    ids = torch.tensor([256, *b'two texts', 256, *b'of twelve'])
    found = lens.measure(model, [ids], BYTES)
    assert found.loss == pytest.approx(math.log(257))
    assert found.bits_per_byte == pytest.approx(math.log2(257))
    spelled = torch.where(BYTES > 0, 2, 0)
    assert lens.measure(model, [ids], spelled).bits_per_byte == pytest.approx(math.log2(257) / 2)


def test_a_short_last_sequence_counts_by_its_tokens() -> None:
    model = model_of()
    ids = torch.randint(256, (2 * LENGTH + 4,))
    parts = [ids[:LENGTH + 1], ids[LENGTH:2 * LENGTH + 1], ids[2 * LENGTH:]]
    found = lens.measure(model, parts, BYTES)
    one_by_one = [lens.measure(model, [part], BYTES) for part in parts]
    total = sum(m.loss * m.tokens for m in one_by_one)
    assert found.tokens == 2 * LENGTH + 3
    assert found.loss == pytest.approx(total / found.tokens, rel=1e-6)


TEXTS = ['plain words', '  spaces  and\n\nlines\t', 'd\u00e9j\u00e0 \u4e16\u754c \U0001f30d', 'x']


@pytest.mark.parametrize('text', TEXTS)
def test_tokens_spell_the_bytes_of_their_text(text: str, tmp_path: Path) -> None:
    byte = make_tokenizer('byte', '')
    assert int(lens.bytes_of_tokens(byte)[byte.encode(text)].sum()) == len(text.encode())
    assert lens.bytes_of_tokens(byte)[byte.bos] == 0

    import sentencepiece
    (tmp_path / 'corpus').write_text('plain words and lines of spaces\n' * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / 'corpus'), model_prefix=str(tmp_path / 'm'), vocab_size=300,
        byte_fallback=True, hard_vocab_limit=False, normalization_rule_name='identity',
        remove_extra_whitespaces=False, minloglevel=2)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / 'm.model'))
    llama = SimpleNamespace(name='llama', model=model, vocab_size=model.vocab_size())
    spelled = lens.bytes_of_tokens(llama)
    # SentencePiece puts a space in front
    assert int(spelled[model.encode(text)].sum()) == len(text.encode()) + 1
    assert spelled[model.bos_id()] == 0

    import tiktoken
    ranks = {bytes([b]): b for b in range(256)} | {b'wo': 256, b'wor': 257}
    bpe = tiktoken.Encoding('tiny', pat_str=r'\S+|\s+', mergeable_ranks=ranks, special_tokens={})
    gpt2 = SimpleNamespace(name='gpt2', bpe=bpe, bos=258)
    assert int(lens.bytes_of_tokens(gpt2)[bpe.encode(text)].sum()) == len(text.encode())


def test_energies_are_those_of_the_sublayers() -> None:
    model = model_of(preconditioner='none', kq_diag='none', attn_step_size=0.01, mlp_step_size=0.01)
    x = torch.randint(257, (3, LENGTH))
    found = lens.energies(model, x, steps=4)
    assert list(found) == ['attn 1', 'attn 2', 'mlp 1', 'mlp 2']
    h = model.blocks[0].attn.norm(torch.nn.functional.embedding(x, model.embedding))
    assert found['attn 1'][0] == pytest.approx(float(model.blocks[0].attn.energy(h, h).mean()))
    for along in found.values():
        assert len(along) == 5
        assert (np.diff(along) < 0).all()  # small steps down a gradient
    assert list(lens.energies(model_of(attn='llama'), x, steps=1)) == ['mlp 1', 'mlp 2']


@pytest.mark.parametrize('options', [
    {}, dict(attn='llama', mlp='llama'), dict(attn='llama', attn_steps=3), dict(attn_steps=4)],
    ids=str)
def test_attention_maps_are_the_weights_of_each_step(options: dict) -> None:
    model = model_of(**options)
    idx = torch.randint(257, (1, 9))
    before = model(idx)[0]
    maps = lens.attention_maps(model, idx)
    assert torch.equal(model(idx)[0], before)
    assert model.cfg.attn_impl == 'auto'
    for alpha in maps:
        assert alpha.shape == (model.cfg.attn_steps, 2, 9, 9)
        assert alpha.sum(dim=-1).allclose(torch.ones(()))
        assert (alpha.triu(1) == 0).all()
    first, pos = model.blocks[0].attn, evaluate_positions(model, idx)
    h = first.norm(torch.nn.functional.embedding(idx, model.embedding))
    q, k = first.project(h, first.W_Q, pos), first.project(h, first.W_K, pos)
    alpha = first.scores(q, h, k, h, first.bias(pos)).softmax(dim=-1)
    assert maps[0][0].allclose(alpha[0], atol=1e-6)


def evaluate_positions(model: Transformer, idx: torch.Tensor):
    from model import position_tables
    return position_tables(model.cfg, torch.nn.functional.embedding(idx, model.embedding))


def test_moved_is_the_share_that_goes_elsewhere() -> None:
    here, there = torch.eye(4), torch.eye(4).flip(0)
    maps = torch.stack([here, there, there, (here + there) / 2])[:, None]
    assert lens.moved(maps)[:, 0].tolist() == [1.0, 0.0, 0.5]


# The command line

def test_the_newest_run_on_its_test_split(place: Path, capsys: pytest.CaptureFixture) -> None:
    evaluate.main(['--device=cpu'])
    tokens, loss, perplexity, bits = cells(place / 'out/run/loss.md')[0]
    ids = torch.tensor([256, *TEXT.encode()])
    parts = ids.unfold(0, LENGTH + 1, LENGTH)
    _, right = model_of()(parts[:, :-1], parts[:, 1:])
    assert int(tokens.replace(',', '')) == parts[:, 1:].numel()
    assert float(loss) == pytest.approx(float(right), abs=1e-4)
    assert float(perplexity) == pytest.approx(math.exp(float(right)), rel=1e-4)
    assert float(bits) == pytest.approx(float(right) / math.log(2), abs=1e-3)
    assert (place / 'out/run/loss.png').read_bytes()[:4] == b'\x89PNG'
    assert loss in capsys.readouterr().out


def test_a_text_is_read_whole(place: Path) -> None:
    evaluate.main(['--text=text.txt', '--device=cpu'])
    tokens, loss, _, _ = cells(place / 'out/run/loss.md')[0]
    assert int(tokens) == len(TEXT.encode())  # each byte is a target, once
    ids = torch.tensor([256, *TEXT.encode()])
    parts = [ids[at:at + LENGTH + 1] for at in range(0, len(ids) - 1, LENGTH)]
    right = lens.measure(model_of(), parts, BYTES)
    assert float(loss) == pytest.approx(right.loss, abs=1e-4)
    evaluate.main(['--text=text.txt', '--tokens=40', '--device=cpu'])
    assert int(cells(place / 'out/run/loss.md')[0][0]) == 2 * LENGTH


def test_other_steps_at_test_time(place: Path) -> None:
    evaluate.main(['--steps=1,2,3', '--device=cpu'])
    rows = cells(place / 'out/run/steps.md')
    assert [row[0] for row in rows] == ['1', '2, as trained', '3']
    parts = torch.tensor([256, *TEXT.encode()]).unfold(0, LENGTH + 1, LENGTH)
    for T, row in enumerate(rows, 1):
        eta = dict(attn_step_size=0.5, mlp_step_size=0.5)  # 1 / T of training
        right = model_of(attn_steps=T, mlp_steps=T, **eta)(parts[:, :-1], parts[:, 1:])[1]
        assert float(row[1]) == pytest.approx(float(right), abs=1e-4)
    assert len({row[1] for row in rows}) == 3
    assert (place / 'out/run/steps.png').exists()
    assert not (place / 'out/run/loss.md').exists()  # what is asked for and no more


def test_llama_sublayers_keep_their_steps(place: Path) -> None:
    write_run(place / 'out/mixed', place / 'data', model_of(attn='llama'))
    evaluate.main(['--steps=1,3', '--energies', '--device=cpu', '--out_dir=out/mixed'])
    parts = torch.tensor([256, *TEXT.encode()]).unfold(0, LENGTH + 1, LENGTH)
    as_trained = model_of(attn='llama', mlp_steps=3, mlp_step_size=0.5)
    right = as_trained(parts[:, :-1], parts[:, 1:])[1]
    assert float(cells(place / 'out/mixed/steps.md')[1][1]) == pytest.approx(float(right), abs=1e-4)
    energies = cells(place / 'out/mixed/energies.md')
    assert [(row[0], len(row)) for row in energies] == [('mlp 1', 5), ('mlp 2', 5)]


def test_energies_and_attention_of_a_run(place: Path) -> None:
    evaluate.main(['--energies', '--attention=A $word_d\u00e9j\u00e0', '--device=cpu'])
    energies = cells(place / 'out/run/energies.md')
    assert [len(row) for row in energies] == [10] * 4
    ids = torch.tensor([[256, *'A $word_d\u00e9j\u00e0'.encode()]])
    shares = [float(lens.moved(maps).mean()) for maps in lens.attention_maps(model_of(), ids)]
    assert [row[1] for row in cells(place / 'out/run/attention.md')] == [f'{s:.2%}' for s in shares]
    for name in ('energies', 'attention'):
        assert (place / f'out/run/{name}.png').read_bytes()[:4] == b'\x89PNG'
    evaluate.main(['--attention=word', '--steps=1,4', '--device=cpu'])
    assert all(len(row) == 4 for row in cells(place / 'out/run/attention.md'))


def test_runs_side_by_side(place: Path, capsys: pytest.CaptureFixture) -> None:
    better = write_run(place / 'out/better', place / 'data', model_of(n_layer=1), val_loss=3.5)
    (better / 'result.json').write_text(json.dumps({'test_loss': 3.25}))
    write_run(place / 'out/not_validated', place / 'data', model_of(), val_loss=None)
    evaluate.main(['--compare', 'out/run', 'out/not_validated', 'out/better', 'data'])
    rows = cells(place / 'out/results/compare/curves.md')
    assert [row[0] for row in rows] == ['out/better', 'out/run', 'out/not_validated']
    assert rows[0][5:] == ['3.5000', '3.2500', f'{math.exp(3.25):.3f}']
    assert rows[1][5:] == ['4.2500', 'nan', 'nan']
    flops = 4000 * model_of().flops_per_token()
    assert rows[1][1:4] == [f'{model_of().num_params():,}', '4,000', f'{flops:.2e}']
    assert rows[1][4] == f'{(1000 / 100 + 3000 / 200) / 3600:.3f}'
    assert (place / 'out/results/compare/curves.png').read_bytes()[:4] == b'\x89PNG'
    assert 'data: no run' in capsys.readouterr().out


BAD = [
    (['--text=nowhere.txt'], 'text=nowhere.txt: No such file'),
    (['--text=data'], 'text=data: Is a directory'),
    (['--text=empty.txt'], 'empty.txt is empty'),
    (['--text=latin1.txt'], 'byte 1 is not UTF-8'),
    (['--text=text.txt', '--data=data'], 'give one'),
    (['--data=gpt2'], 'its tokenizer is gpt2, that of the run byte'),
    (['--data=nowhere'], 'nowhere/meta.json is missing'),
    (['--split=val'], 'val split'),
    (['--tokens=0'], 'tokens=0: expected at least 1'),
    (['--steps=1,0'], 'steps=1,0: expected 1 to 1,000'),
    (['--steps=two'], 'steps=two: expected a comma-separated list'),
    (['--attention=' + 'long ' * 9], 'has 45 tokens; expected 1 to 15'),
    (['--out_dir=out/llama', '--energies'], 'out/llama is all Llama'),
    (['--out_dir=out/llama', '--steps=2'], 'out/llama is all Llama'),
    (['--out_dir=nowhere'], 'no checkpoint in nowhere'),
    (['--compare', 'data'], 'no runs'),
    (['--compare'], 'no runs'),
    (['--compar', 'out/run'], 'no such option; near: compare'),
]


@pytest.mark.parametrize('argv, message', BAD, ids=lambda value: ' '.join(value)[:40])
def test_bad_input_gets_one_line(place: Path, argv: list[str], message: str) -> None:
    write_run(place / 'out/llama', place / 'data', model_of(attn='llama', mlp='llama'))
    write_data(place / 'gpt2', [1] * 100, tokenizer='gpt2', vocab_size=50257)
    (place / 'empty.txt').touch()
    (place / 'latin1.txt').write_bytes('d\u00e9j\u00e0'.encode('latin-1'))
    runs = sorted(place.rglob('out/**/*'))
    with pytest.raises(SystemExit) as error:
        evaluate.main(argv)
    assert message in str(error.value)
    assert '\n' not in str(error.value)
    assert sorted(place.rglob('out/**/*')) == runs


def test_no_run_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match='no run in out/'):
        evaluate.main([])

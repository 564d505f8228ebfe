"""results/copying.py: each number against another way to it, and the command line."""
import itertools
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_evaluate import model_of, write_run

import copying
from nanocem.measure import NO_TARGET
from running import ROOT

OF_FIVE = SimpleNamespace(name='of five', bos=0)  # a tokenizer


def test_copying_beside_another_tokenizer_is_refused_for_that(place: Path) -> None:
    other = write_run(place / 'out/other', Path('data'), model_of(key_shift='half'))
    state = torch.load(other / 'best.pt')
    torch.save(state | {'data': state['data'] | {'tokenizer': 'gpt2'}}, other / 'best.pt')
    with pytest.raises(SystemExit) as stop:
        copying.main(['out/run', 'out/other', '--device=cpu'])
    assert 'the run in out/other has tokenizer=gpt2 (now byte)' in stop.value.code
    assert 'init_from' not in stop.value.code


def test_repeated_targets_are_those_of_a_slow_search() -> None:
    """A target is repeated if it and the tokens before it stood earlier in the sequence."""
    torch.manual_seed(1)
    ids = torch.randint(3, (5, 40))
    for n_before in (1, 2, 4):
        found = copying.repeated_targets(ids, 3, n_before)
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
    found = {name: copying.copying(model, ids, bos=0) for name, model in models.items()}
    for name, losses in found.items():
        for kind, repeated in (('repeated', True), ('other', False)):
            assert losses[kind].nansum() == pytest.approx(sum(sums[name][repeated]), rel=1e-5)
    assert found['B']['first'].shape == found['B']['second'].shape == (1, 9)
    assert found['A']['second'].mean() == pytest.approx(math.log(5))
    repeated = sum(sums['A'][True]) - sum(sums['B'][True])
    total = repeated + sum(sums['A'][False]) - sum(sums['B'][False])
    text = copying.report(models, ids, OF_FIVE, 'a text')
    assert f'Of the gap {repeated / total:.0%} comes from repeated targets' in text
    equal = {'A': Copier(2.0), 'B': Copier(2.0)}
    assert 'is not divided' in copying.report(equal, ids, OF_FIVE, 'a text')


@pytest.mark.parametrize('change', [0.01, 0.03])
def test_a_gap_below_two_per_cent_is_none(change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, 'copying', lambda model, *rest: {
        kind: torch.full((4,), 1 + change * (model == 'B')) for kind in copying.KINDS})
    text = copying.report({'A': 'A', 'B': 'B'}, torch.zeros(1, 7), OF_FIVE, '')
    assert ('A gap of less than 2% is not divided.' in text) == (change < 0.02)
    assert ('Of the gap 50% comes from repeated targets.' in text) == (change > 0.02)


def test_a_gap_of_two_signs_has_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A is better where targets are repeated, and worse elsewhere."""
    repeated, other = torch.ones(2), torch.ones(4)
    losses = {'A': (1.0 * repeated, 2.0 * other), 'B': (2.0 * repeated, 1.9 * other)}
    monkeypatch.setattr(copying, 'copying', lambda model, *rest: dict(
        zip(copying.KINDS, losses[model] * 2, strict=True)))
    text = copying.report({'A': 'A', 'B': 'B'}, torch.zeros(1, 7), OF_FIVE, '')
    assert 'the gap is repeated targets -0.3333 and other targets +0.0667.' in text
    assert 'Of the gap' not in text


@pytest.mark.parametrize(('text', 'words'), [
    ('a', 'have 1 tokens: expected a text, and a context, of 4 or more'),
    ('abcdefgh', 'no target is of the kind "repeated: their last 5 bytes stood earlier"')])
@pytest.mark.parametrize('other', [[], ['out/other']])
def test_too_little_text_for_copying_is_refused(text: str, words: str, other: list[str],
                                                place: Path) -> None:
    write_run(place / 'out/other', Path('data'), model_of(kq_diag='shared'))
    Path('text.txt').write_text(text)
    with pytest.raises(SystemExit, match=words):
        copying.main(['out/run', *other, '--text=text.txt', '--device=cpu'])


def test_a_short_context_is_too_little_for_copying(place: Path) -> None:
    write_run(place / 'out/one', Path('data'), model_of(context_length=1))
    with pytest.raises(SystemExit, match='have 1 tokens: expected a text, and a context, of 4'):
        copying.main(['out/one', '--device=cpu'])


def test_a_loss_that_is_no_number_is_never_left_out(place: Path) -> None:
    """As those of BOS and padding are."""
    model = model_of()
    model.embedding[ord('w')] = math.nan
    write_run(place / 'out/nan', Path('data'), model)
    with pytest.raises(SystemExit, match='a loss is NaN'):
        copying.main(['out/nan', '--device=cpu'])


def test_copying_beside_the_same_model_is_refused(place: Path) -> None:
    """By whatever name: the gap would be 0."""
    shutil.copytree('out/run', 'out/copy')
    for other in 'out/run', 'out/run/', 'out/run/best.pt', 'out/copy':
        with pytest.raises(SystemExit, match=f'{other} has the weights of out/run'):
            copying.main(['out/run', other, '--device=cpu'])


def test_copying_on_the_command_line(capsys: pytest.CaptureFixture) -> None:
    """Of the trained models, all-CEM loses most on what Llama with ALiBi copies."""
    text, cem = f'--text={ROOT}/pretrained/held_out.txt', f'{ROOT}/pretrained/cem'
    copying.main([cem, f'{ROOT}/pretrained/llama_alibi', text])
    printed = capsys.readouterr().out
    assert 'repeated +110.9%, other +6.5%' in printed
    assert 'Of the gap 74% comes from repeated targets' in printed
    copying.main([cem, text])
    assert '19.3%' in capsys.readouterr().out


def test_one_run_or_two(place: Path, capsys: pytest.CaptureFixture) -> None:
    """Without a folder it is the newest run; options may stand before folders."""
    copying.main(['--device=cpu', '--tokens=400'])
    printed = capsys.readouterr().out
    assert printed.startswith('out/run, step 2; test split of data\n\n| run')
    copying.main(['--device=cpu', '--tokens=400', 'out/run'])
    assert capsys.readouterr().out == printed
    for argv, words in ((['a', 'b', 'c'], 'a b c: expected one run, or two'),
                        (['--text=a.txt', '--split=val'], 'a text is read whole'),
                        (['--steps=2'], 'steps: no such option'),
                        (['--separator=x'], 'separator is for --text=FILE')):
        with pytest.raises(SystemExit, match=words):
            copying.main(argv)

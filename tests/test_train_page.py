"""docs/train.html learns what microcem.py does, from the same weights and words."""
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

import microcem
from browser import javascript
from running import ROOT

PAGE = (ROOT / 'docs/train.html').read_text('utf-8')
MATHEMATICS = re.search(r'<script id="mathematics">\n(.*?)</script>', PAGE, re.DOTALL)[1]
LISTS = {name.strip("'"): words.split() for name, words in re.findall(
    r'^  ([\w\' ]+): `\n(.*?)`,$', re.search(r'const LISTS = {(.*?)\n};', PAGE, re.DOTALL)[1],
    re.DOTALL | re.MULTILINE)}
STEPS = 10


def run(expression: str, **values: Any) -> Any:
    """Evaluate an expression in the page's mathematics."""
    given = ''.join(f'const {name} = {json.dumps(value)};\n' for name, value in values.items())
    return javascript(f'{MATHEMATICS}\n{given}', expression)


def name_of(name: str | tuple) -> str:
    """Return the page's name of a weight."""
    return ' '.join(map(str, name)) if isinstance(name, tuple) else name


def rows_of(w: microcem.Weights) -> dict[str, list]:
    return {name_of(name): [list(row) for row in x.rows] for name, x in w.items()}


WEIGHTS = '''Object.fromEntries(Object.entries(given).map(([name, rows]) =>
    [name, new Value(rows.length, rows[0].length, Float64Array.from(rows.flat()))]))'''


def flat(rows: list[list[float]]) -> list[float]:
    return [number for row in rows for number in row]


def start() -> tuple[list[list[int]], microcem.Weights]:
    """Return the towns as microcem.py has them, and its weights before the first step."""
    random.seed(0)
    words = microcem.TOWNS.split()
    letters = sorted(set(microcem.END.join(words) + microcem.END))
    ids = [[letters.index(c) for c in f'\n{word}\n'] for word in words]
    return ids, microcem.new_weights(len(letters))


def test_the_first_losses_are_microcem_pys() -> None:
    """Of ten steps, and all weights after them: both differentiations and Adam are the same."""
    ids, w = start()
    before = rows_of(w)
    state = random.getstate()
    batches = [random.choices(ids, k=4) for _ in range(STEPS)]
    random.setstate(state)
    training = microcem.train(ids, w, 700)
    losses = [next(training) for _ in range(STEPS)]
    assert losses[-1] < losses[0] - 0.3
    found, after = run(f'''(() => {{
        const w = {WEIGHTS}, losses = [];
        const training = train(batches, w, 700, () => batches[losses.length]);
        while (losses.length < {STEPS}) losses.push(training.next().value);
        return [losses, Object.entries(w).map(([name, x]) => [name, [...x.numbers]])];
    }})()''', given=before, batches=batches)
    assert found == pytest.approx(losses, rel=1e-9)
    expected = rows_of(w)
    assert len(after) == len(expected)
    for name, numbers in after:
        assert numbers == pytest.approx(flat(expected[name]), rel=1e-6, abs=1e-9), name


def test_hills_maps_and_chances_are_microcem_pys() -> None:
    """Those of each letter of a word: energies on the line through a letter's states before a layer
    and after it, attention's weights, and the chances of the next letter."""
    ids, w = start()
    word = ids[0][:-1]
    shown = run(f'[HILL, word.map((_, at) => lookInto(word, {WEIGHTS}, at))]', given=rows_of(w),
                word=word)
    places, letters = shown
    assert 0 in places and 1 in places and sorted(places) == places
    x = microcem.one_hot(word, len(w['embedding'].rows)) @ w['embedding']
    for n, energy in enumerate(microcem.LAYERS):
        h = microcem.norm(x, w['gain', n])
        after = microcem.descend(x, w, n)
        for i, place in enumerate(places):
            u = microcem.norm(x + place * (after - x), w['gain', n])
            rows = energy(u, h, w, n).rows
            for at, found in enumerate(letters):
                assert found['hills'][n][i] == pytest.approx(rows[at][0], rel=1e-6, abs=1e-9)
        if n == 0:
            for k, alpha in enumerate(letters[0]['maps'], start=1):
                e = microcem.scores(h, h, w, n, k).exp()
                rows = [[a / sum(row) for a in row] for row in e.rows]
                numbers = [alpha[str(at)] for at in range(len(alpha))]  # JSON of a Float64Array
                assert numbers == pytest.approx(flat(rows), rel=1e-6, abs=1e-12)
        x = after
    for row, found in zip(microcem.logits(word, w).rows, letters, strict=True):
        e = [math.exp(score) for score in row]
        assert found['next'] == pytest.approx([one / sum(e) for one in e], rel=1e-6)


def test_each_list_has_enough_words_to_invent_others() -> None:
    """And letters of one kind, so that none is rare."""
    assert list(LISTS) == ['Towns', 'First names', 'Dinosaurs', 'Minerals']
    for name, words in LISTS.items():
        assert len(words) == len({*words}) >= 150, name
        assert all(re.fullmatch('[a-z]{1,30}', word) for word in words), name


def test_sizes_and_words_are_microcem_pys() -> None:
    assert run('[D, K, WIDTH]') == [microcem.D, microcem.K, microcem.WIDTH]
    assert LISTS['Towns'] == microcem.TOWNS.split()
    assert run("Object.fromEntries(Object.entries(newWeights(26, randomFrom(1))).map(([name, x]) "
               "=> [name, [x.rows, x.columns]]))") == {
        name_of(name): list(x.shape) for name, x in start()[1].items()}


def test_it_learns_one_word_by_heart_and_invents_it() -> None:
    word, losses = run('''(() => {
        const letters = [...'\\nabn'], ids = [...'\\nbanana\\n'].map(c => letters.indexOf(c));
        const random = randomFrom(3), w = newWeights(4, random);
        const losses = [...train([ids], w, 60, words => [words[0]])];
        return [sample(letters, w, random, 0.1), losses];
    })()''')
    assert word == 'banana' and losses[-1] < 0.3 < losses[0]


@pytest.mark.parametrize('text, words', [
    ('bath\n\n  wells \r\nely', ['bath', 'wells', 'ely']),
    ('Anna, Bob;Zoë', ['Anna', 'Bob', 'Zoë']), ('bad ischl\n' + 'x' * 30, ['bad ischl', 'x' * 30])])
def test_words_are_read(text: str, words: list[str]) -> None:
    assert run('readWords(text)', text=text) == {'words': words}


@pytest.mark.parametrize('text, line', [
    ('', 'Type some words, one per line.'), (' \n,\n', 'Type some words, one per line.'),
    ('bath\n' + 'x' * 31, 'Expected words of at most 30 letters, one per line, and not “xx'),
    ('\n'.join(map(chr, range(0x4e00, 0x4f00))), 'Expected at most 150 different letters')])
def test_a_bad_text_gets_a_line(text: str, line: str) -> None:
    found = run('readWords(text)', text=text)
    assert list(found) == ['wrong'] and found['wrong'].startswith(line)


def test_the_page_is_one_file_that_loads_nothing() -> None:
    text = PAGE.replace('<a href="https://arxiv.org/abs/', '').replace(
        "'unsafe-inline' blob:;\n  worker-src blob:", '')
    assert not re.findall(r'https?:|src=|@import|fetch\(|url\(|importScripts', text)
    assert not re.findall(r'innerHTML|outerHTML|insertAdjacent|document\.write|eval\(', text)


def test_it_says_how_long_microcem_py_is() -> None:
    lines = len(Path(microcem.__file__).read_text('utf-8').splitlines())
    assert f'{lines} lines of plain Python' in PAGE

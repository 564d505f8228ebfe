"""The page of a model computes what model.py does, in a JavaScript engine."""
import base64
import copy
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import export
from browser import javascript
from configurator import UserError
from model import ModelConfig, Transformer
from nanocem import page
from nanocem.runs import load_model
from nanocem.sampling import sample_text
from nanocem.tokenizers import (
    LLAMA_SHA256,
    ByteTokenizer,
    SentencePieceTokenizer,
    find_llama,
    tokenizer_of,
    train_bpe,
)
from running import ROOT

MATHEMATICS, REST = re.findall('<script>\n(.*?)</script>', page.TEMPLATE.read_text('utf-8'),
                               re.DOTALL)
SHIPPED = str(ROOT / 'pretrained/cem_one_tie')
STATE = dict(step=3, data_dir='', data=dict(tokenizer='byte', vocab_size=257))
SHAPE = dict(size='nano', d_model=12, n_layer=2, n_head=2, d_mlp=10, vocab_size=257,
             context_length=9)
SPACES = ['', ' ', '   a', 'a  b \n\n\tc\r\n ', 'x' * 99, ' ' * 40]
TEXTS = [*SPACES, 'déjà vu, naïve Å ½', 'e\u0301 ﬁ 世界', '👍🏽 👩‍👩‍👧', '\0\x7f\u00a0\u3000\ufeff',
         '\u2581a\u2581\u2581', '<s> </s> <unk> <pad> <0x0A>', '</script><!-- <script>']


def content(html: str) -> str:
    """Return the JSON that a page holds. A browser ends it at the first end of a script, too."""
    found, = re.findall('id="model">(.*?)</script', html, re.DOTALL)
    return found


def run(html: str, expression: str) -> Any:
    """Evaluate an expression of `model` and `tokenizer` in a page's mathematics."""
    return javascript(
        f'{MATHEMATICS} const data = {content(html)}, model = new Model(data); '
        f'const tokenizer = new Tokenizer(data.tokenizer);', expression)


def make_model(**options: Any) -> Transformer:
    """Return a random model whose weights are as the page stores them. Those that begin as 0 or 1
    are random, too."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SHAPE | options)).eval()
    for w in model.parameters():
        w.data = (w + 0.3 * torch.randn_like(w)).bfloat16().float()
    return model


def energies(model: Transformer, idx: Tensor) -> list[list[float]]:
    """Return the energies of the last token at steps 0 to T, for each use of a CEM sublayer."""
    found = []

    def hook(sublayer: Any, inputs: tuple, output: Tensor) -> None:
        if not hasattr(sublayer, 'energy'):
            return
        states = []
        for T in range(sublayer.T + 1):
            other = copy.copy(sublayer)
            other.T = T
            states.append(other.forward(*inputs))
        h = sublayer.norm(inputs[0])
        found.append([sublayer.energy(sublayer.norm(x), h)[0, -1].item() for x in states])

    handles = [sublayer.register_forward_hook(hook) for block in model.blocks
               for sublayer in (block.attn, block.mlp)]
    model.hidden(idx)
    for handle in handles:
        handle.remove()
    return found


THREE = dict(key_shift='half', match_bias='token', kq_diag='scaled')
MODELS = [
    dict(),
    dict(attn_steps=3, mlp_steps=2, attn_step_size=0.7, mlp_step_size=0.4),
    dict(positions='rope', rope_theta=50.0, attn_steps=2),
    dict(kq_diag='shared', attn_steps=2),
    dict(kq_diag='per_head', exact_update=True, preconditioner='diag_lowrank', attn_rank=3,
         mlp_rank=5),
    dict(kq_diag='shared', exact_update=True, positions='rope', preconditioner='diag'),
    dict(preconditioner='diag_lowrank', residual='normed', attn_steps=2, mlp_steps=2),
    dict(mlp_energy='sign_convex', mlp_match='params', mlp_steps=2, score_scale='head'),
    dict(attn_reuse=2, mlp_reuse=3),
    dict(n_head=12, mlp='llama', attn_steps=2),
    dict(attn='llama', mlp='llama'),
    dict(attn='llama', mlp='llama', positions='alibi', tie='both'),
    dict(attn='llama', mlp='cem', tie='kv', mlp_steps=2),
    dict(attn='llama', mlp='llama', tie='qo', attn_reuse=2),
    dict(key_shift='half', match_bias='token', attn_steps=2),
    dict(key_shift='half', match_bias='token', positions='rope', kq_diag='per_head', attn_steps=2,
         exact_update=True),
    # The options of config/cem_three.py and config/llama_three.py, and more
    dict(mlp='llama', **THREE),
    dict(**THREE, attn_steps=2, attn_step_size=0.7, n_head=3),
    dict(kq_diag='scaled', positions='rope', residual='normed', score_scale='head'),
    dict(attn='llama', mlp='llama', positions='alibi', **THREE),
    dict(attn='llama', mlp='llama', positions='alibi', value_shift='half', **THREE),
    dict(attn='llama', mlp='llama', positions='alibi', tie='kv', **THREE),
    dict(attn='llama', mlp='llama', positions='rope', tie='both', attn_reuse=2, **THREE),
    dict(mlp='llama', untied_output=True, score_scale='head', **THREE),
    dict(untied_output=True, attn_steps=2, positions='rope', residual='normed',
         preconditioner='diag_lowrank', key_shift='half', match_bias='token'),
]


@pytest.mark.parametrize('options', MODELS, ids=str)
@torch.no_grad()
def test_logits_energies_and_maps_are_model_pys(options: dict[str, Any]) -> None:
    model = make_model(**options)
    idx = torch.randint(257, (1, 9), generator=torch.Generator().manual_seed(1))
    found = run(page.make_page(model, STATE), f'''{idx[0].tolist()}.map((id, i) => {{
        const {{logits, seen}} = model.read(id, i);
        return {{logits: [...logits], energies: seen.map(s => s.energies).filter(E => E.length),
                sums: seen.filter(s => s.alpha).map(s => s.alpha.reduce((a, b) => a + b))}};
    }}).concat([isModelPys(model, data.probe)])''')
    assert found.pop() is True
    logits = torch.tensor([token['logits'] for token in found])
    torch.testing.assert_close(logits, model(idx)[0][0], rtol=1e-4, atol=1e-4)
    for n, token in enumerate(found, 1):
        expected = energies(model, idx[:, :n])
        assert token['energies'] == [pytest.approx(E, rel=1e-4, abs=1e-4) for E in expected]
        assert token['sums'] == [pytest.approx(model.cfg.n_head)] * len(token['sums'])
    assert bool(token['energies']) == ('cem' in (model.cfg.attn, model.cfg.mlp))


@torch.no_grad()
def test_other_steps_are_set_steps() -> None:
    model = make_model(attn_steps=2)
    html = page.make_page(model, STATE)
    model.set_steps(attn_steps=1, mlp_steps=4)
    found = run(html, '(model.T = {attn: 1, mlp: 4}, [...model.read(65, 0).logits])')
    torch.testing.assert_close(torch.tensor(found), model(torch.tensor([[65]]))[0][0, 0],
                               rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('n', [1, 9, 25])
def test_the_page_continues_a_text_as_generate_does(n: int) -> None:
    """Across the end of the context, and with a prompt that is longer than it."""
    model = make_model(kq_diag='shared', key_shift='half', match_bias='token')
    ids = torch.randint(257, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    found = run(page.make_page(model, STATE), f'''(() => {{
        const text = new Text(model, {ids});
        while (text.tokens.length < {n} + 20) text.isRead() ? text.add(0, 0) : text.readNext();
        return text.tokens;
    }})()''')
    found_ids = [token['id'] for token in found]
    assert found_ids == model.generate(torch.tensor([ids]), 20, 0)[0].tolist()
    # Surprise is that of the text that was read
    if n < 9:
        log_p = model(torch.tensor([found_ids[:1]]))[0][0, 0].log_softmax(-1)
        assert found[1]['bits'] == pytest.approx(-log_p[found_ids[1]].item() / math.log(2), 1e-3)


def test_sampling_follows_the_temperature() -> None:
    html = page.make_page(make_model(), STATE)
    logits = [0.0, 1.0, 2.0]
    for temperature in (0.5, 1.0, 3.0):
        p = (torch.tensor(logits) / temperature).softmax(-1)
        ids = run(html, f'Array.from({{length: 999}}, (_, n) => '
                        f'choose({logits}, {temperature}, n / 999))')
        shares = torch.bincount(torch.tensor(ids), minlength=3) / 999
        torch.testing.assert_close(shares, p, rtol=0, atol=2e-3)


def texts(rng: random.Random) -> list[str]:
    """Return texts of spaces, words and rare characters, some of them cut into pieces."""
    words = ['the', 'energy', ' ', '  ', '\n', 'é', 'ß', '👍', '世', '\u2581', '1234', '\t', 'a']
    return [*TEXTS, *(''.join(rng.choices(words, k=rng.randrange(1, 30))) for _ in range(40))]


def same_ids(tokenizer: Any, samples: list[str]) -> None:
    packed = json.dumps(page.pack_tokenizer(tokenizer))
    found = javascript(f'{MATHEMATICS} const tokenizer = new Tokenizer({packed});', f'''
        {json.dumps(samples)}.map(text => {{
            const ids = tokenizer.encode(text);
            return [ids, ids.map(tokenizer.speller()).join("")];
        }})''')
    for text, (ids, spelled) in zip(samples, found, strict=True):
        assert ids == tokenizer.encode(text), text
        assert spelled == tokenizer.decode(ids)


@pytest.mark.parametrize('kind', ['byte', 'bpe'])
def test_ids_are_the_tokenizers(kind: str, tmp_path: Path) -> None:
    samples = texts(random.Random(0))
    if kind == 'byte':
        return same_ids(ByteTokenizer(), samples)
    train_bpe(f'{tmp_path}/bpe', 400, [(ROOT / 'README.md').read_text('utf-8')])
    same_ids(SentencePieceTokenizer(f'{tmp_path}/bpe'), samples)


def test_ids_are_those_of_pretrained_models() -> None:
    _, state = load_model(SHIPPED)
    held_out = (ROOT / 'pretrained/held_out.txt').read_text('utf-8')
    same_ids(tokenizer_of(state), [held_out, *texts(random.Random(1))])


def test_ids_are_llamas() -> None:
    llama = find_llama('data')
    if llama is None:
        pytest.skip(f'no tokenizer.model of Llama ({LLAMA_SHA256:.8})')
    same_ids(llama, texts(random.Random(2)))


def test_bytes_that_are_no_text_do_not_stop_the_page() -> None:
    ids = [0xC3, 65, 0xF0, 0x9F, 256, 0x80, 0xC3, 0xA9, 0xED, 0xA0, 0x80, 66, 300]
    found = run(page.make_page(make_model(), STATE), f'{ids}.map(tokenizer.speller()).join("")')
    assert found.replace('\ufffd', '') == 'Aé' + 'B' and '\ufffd' in found
    assert run(page.make_page(make_model(), STATE), r'tokenizer.encode("\ud83d")') == [
        *'\ufffd'.encode()]


# What is refused, and what is safe

class OtherModel(Transformer):
    pass


def refused(model: Transformer, *words: str, state: dict[str, Any] = STATE) -> None:
    with pytest.raises(UserError) as error:
        page.make_page(model, state)
    assert all(word in str(error.value) for word in words), error.value


def test_what_the_page_cannot_compute_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(OtherModel(make_model().cfg), 'OtherModel')
    gpt2 = type('Gpt2', (), dict(name='gpt2', vocab_size=257))()
    with monkeypatch.context() as patch:
        patch.setattr(page, 'tokenizer_of', lambda state: gpt2)
        refused(make_model(), 'gpt2')
    model = make_model()
    model.cfg.mlp_energy = 'quartic'
    refused(model, 'mlp_energy=quartic', 'gated, sign_convex')
    refused(make_model(n_kv_head=1), 'n_kv_head=1', 'expected one of 2')
    model = make_model()
    model.head.data[0, 0] = torch.nan
    refused(model, 'not finite')
    monkeypatch.setattr(page, 'MOST_WEIGHTS', 100)
    refused(make_model(), 'at most 100')


def test_the_page_knows_options_of_model_py_alone_and_each_once() -> None:
    names = [*page.CHOICES, *page.NUMBERS, *page.NOT_COMPUTED]
    assert len(names) == len({*names} & {*vars(make_model().cfg)})


def test_an_option_that_the_page_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(kq_diag='shared')
    refused_page = {name: words for name, words in page.CHOICES.items() if name != 'kq_diag'}
    monkeypatch.setattr(page, 'CHOICES', refused_page)
    refused(model, 'kq_diag=shared', 'expected one of none')


def test_a_prompt_or_a_piece_does_not_end_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = '</script><script>alert(1)</script><!--\u2028 👍'
    packed = dict(pieces=[*range(256), hostile], bos=256)
    monkeypatch.setattr(page, 'pack_tokenizer', lambda tokenizer: packed)
    monkeypatch.setattr(page, 'pack_lesson', lambda model, tokenizer: None)
    html = page.make_page(make_model(), STATE, prompt=hostile)
    assert hostile not in html and '<' not in content(html)
    assert run(html, '[data.prompt, data.tokenizer.pieces[256]]') == [hostile, hostile]


def loads(text: str) -> list[str]:
    """Return what looks as if a page fetched something."""
    text = text.replace('<a href="https://arxiv.org/abs/', '')
    return re.findall(r'https?:|src=|@import|fetch\(|url\(|importScripts', text)


def test_the_page_runs_no_text_and_loads_nothing() -> None:
    """It links to the paper."""
    assert not re.findall(r'innerHTML|outerHTML|insertAdjacent|document\.write|eval\(', REST)
    assert loads(page.TEMPLATE.read_text('utf-8')) == []


def test_a_page_whose_weights_are_others_says_so() -> None:
    html = page.make_page(make_model(), STATE)
    packed = json.loads(content(html))
    bits = bytearray(base64.b64decode(packed['weights']))
    bits[-200:] = bytes(200)
    packed['weights'] = base64.b64encode(bits).decode()
    other = html.replace(content(html), json.dumps(packed))
    assert run(html, 'isModelPys(model, data.probe)') is True
    assert run(other, 'isModelPys(model, data.probe)') is False


def test_a_page_of_an_edited_model_py_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit may change the logits by less than 1%."""
    model, state = load_model(SHIPPED)
    silu = torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, 'silu', lambda z: 1.002 * silu(z))
    monkeypatch.setattr(page, 'file_change', lambda *of: '')  # trained by the edited file
    html = page.make_page(model, state)
    assert run(html, 'isModelPys(model, data.probe)') is False
    ids = json.loads(content(html))['probe']['ids']
    assert 64 < len(ids) <= model.cfg.context_length  # an edit may show in long texts alone


def test_a_page_allows_rounding_that_grows_with_depth() -> None:
    """With large weights and residual=normed a small error is larger after each layer."""
    model = make_model(residual='normed', n_layer=12)
    with torch.no_grad():
        for w in model.blocks.parameters():
            if w.dim() == 2:
                w.mul_(4)
    html = page.make_page(model, STATE)
    assert json.loads(content(html))['probe']['tolerance'] > page.LOGIT_ERROR
    assert run(html, 'isModelPys(model, data.probe)') is True


def test_a_page_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / 'new' / 'page.html'
    page.write_page(str(path), make_model(), STATE, prompt='é')
    assert run(path.read_text('utf-8'), 'tokenizer.encode(data.prompt)') == [0xC3, 0xA9]
    with pytest.raises(UserError, match='exists'):
        page.write_page(str(path), make_model(), STATE)
    with pytest.raises(UserError, match=r'ends in \.html'):
        page.write_page(str(tmp_path / 'page'), make_model(), STATE)


def test_export_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / 'page.html'
    export.main([f'--out_dir={SHIPPED}', f'--page={path}', '--prompt=</script>'])
    assert 'open it in a browser (4.1 MB)' in capsys.readouterr().out
    assert json.loads(content(path.read_text('utf-8')))['prompt'] == '</script>'
    for options, words in (
            ([], '--page=FILE.html'), ([f'--page={path}'], 'exists'),
            ([f'--page={path}', '--dtype=bfloat16'], 'dtype is for --to'),
            ([f'--to={tmp_path}/new', '--prompt=a'], 'prompt is for --page'),
            ([f'--to={tmp_path}/new', '--title=a'], 'title is for --page'),
            ([f'--to={tmp_path}/new', '--about=a'], 'about is for --page')):
        with pytest.raises(SystemExit, match=words):
            export.main([f'--out_dir={SHIPPED}', *options])
    assert not (tmp_path / 'new').exists()


def test_weights_are_rounded_to_bfloat16_and_the_model_stays() -> None:
    model = make_model()
    model.head.data.mul_(1.003)
    before = copy.deepcopy(model.state_dict())
    found, probe, logits = run(page.make_page(model, STATE), '''[
        [...model.w.head], data.probe.logits,
        [...data.probe.ids.map((id, i) => model.read(id, i).logits).pop()]]''')
    assert torch.equal(torch.tensor(found), model.head.bfloat16().float().flatten())
    assert logits[:16] == pytest.approx(probe, rel=1e-4, abs=1e-4)  # of the rounded weights
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


# A title, what the model has read, and links

def test_a_page_says_what_it_is_and_what_the_model_has_read() -> None:
    html = page.make_page(make_model(), STATE, title='<b>Mine', about='It has read "A & B".')
    for place in ('<title>{}</title>', '<meta property="og:title" content="{}">', '<h1>{}</h1>'):
        assert place.format('&lt;b&gt;Mine') in html
    assert html.count('It has read &quot;A &amp; B&quot;.') == 3  # twice to other sites
    html = page.make_page(make_model(), STATE)
    assert f'<title>{page.QUESTION}</title>' in html and not re.search('GO(ES)? HERE', html)


def test_a_page_rounds_how_many_numbers_a_model_has() -> None:
    for n, words in ((7, '7'), (23_451, '23 thousand'), (994_999, '990 thousand'),
                     (999_499, '1 million'), (1_101_107, '1.1 million'),
                     (86_371_488, '86 million')):
        assert page.round_number(n) == words


def links(html: str) -> list[str]:
    return re.findall(r'<a [^>]*href="([^"]*)"', html)


def test_links_go_where_the_pages_are(tmp_path: Path) -> None:
    """Before there is an address, and with one; beside the other pages, and elsewhere."""
    template = page.TEMPLATE.read_text('utf-8')
    paper = 'https://arxiv.org/abs/2605.07588'
    site, code = 'https://me.github.io/mine/', 'https://github.com/me/mine/blob/main/README.md'
    local = [paper, 'index.html', 'train.html', '../README.md']
    for repository, has_pages, expected, picture in (
            ('', True, local, 'card.png'),
            ('', False, [paper], 'card.png'),
            ('https://github.com/me/mine', True, [*local[:3], code], f'{site}card.png'),
            ('https://github.com/me/mine', False,
             [paper, f'{site}index.html', f'{site}train.html', code], f'{site}card.png')):
        html = page.set_links(template, repository, has_pages)
        assert links(html) == expected
        assert f'<meta property="og:image" content="{picture}">' in html
        assert page.set_links(html, repository, has_pages) == html
    path = tmp_path / 'a.html'
    page.write_page(str(path), make_model(), STATE)
    assert links(path.read_text('utf-8')) == [paper]
    (tmp_path / 'descent.html').touch()
    path = tmp_path / 'b.html'
    page.write_page(str(path), make_model(), STATE)
    assert links(path.read_text('utf-8')) == local


PAGES = [ROOT / f'docs/{name}.html' for name in ('index', 'descent', 'train')]


def test_all_pages_have_the_one_address() -> None:
    """python docs/address.py would change nothing."""
    for path in PAGES:
        html = path.read_text('utf-8')
        assert page.set_links(html, page.REPOSITORY, has_pages=True) == html, path.name
        assert 'github.com' not in html or page.REPOSITORY in html
        for link in links(html):
            is_built = link == 'play.html'  # by the command of docs/programs.md
            assert is_built or link.startswith('https://') or (ROOT / 'docs' / link).exists(), link


def test_one_road_leads_through_the_pages() -> None:
    """At the foot of each page, with the same stops. The page itself is marked, and no link."""
    roads = []
    for path, stop in zip([*PAGES, page.TEMPLATE], (1, 1, 2, 3), strict=True):
        road, = re.findall('<nav .*?</nav>', path.read_text('utf-8'), re.DOTALL)
        assert re.findall(r'<a aria-current="page"><b>(\d)', road) == (
            [] if path.stem == 'descent' else [str(stop)])
        expected = ['index.html', 'train.html', 'play.html', '../README.md']
        if path.stem != 'descent':
            del expected[stop - 1]
        assert links(road) == expected
        roads.append(re.sub('<[^>]*>', '', road))
    assert len({*roads}) == 1
    assert re.findall(r'\d It (\w+)', roads[0]) == ['rolls', 'learns', 'copies']


# The lesson

LESSONS = """[true, false].map(matches => data.lesson.words.map(word => {
    const lesson = makeLesson(tokenizer, data.lesson.sentences, word), reader = model.copy();
    reader.matches = matches;
    const text = new Text(reader, lesson.ids);
    while (!text.isRead()) text.readNext();
    return lesson.places.map(at => text.tokens[at]).map(({id, bits, guess}) =>
        [tokenizer.pieces[id], 2 ** -bits, guess == id]);
}))"""


def test_a_lesson_has_the_guesses_of_model_py(play: Path) -> None:
    """And the counts that it shows are theirs. The word on which a page opens is copied."""
    html = play.read_text('utf-8')
    lesson = json.loads(content(html))['lesson']
    found = run(html, LESSONS)
    model, state = load_model(SHIPPED)
    tokenizer = tokenizer_of(state)
    for name, guesses in zip(('on', 'off'), found, strict=True):
        for word, pieces in zip(lesson['words'], guesses, strict=True):
            expected = page.guesses(model, tokenizer, word.join(page.LESSON), word)
            assert [piece[0] for piece in pieces] == [guess.piece for guess in expected]
            assert [piece[1] for piece in pieces] == pytest.approx(
                [guess.p for guess in expected], rel=0.01, abs=1e-6)
            assert [piece[2] for piece in pieces] == [guess.is_first for guess in expected]
        assert lesson[name] == sum(piece[2] for pieces in guesses for piece in pieces)
        assert lesson['pieces'] == sum(map(len, guesses))
        if name == 'on':
            whole = [all(piece[2] for piece in pieces) for pieces in guesses]
            assert lesson['whole'] == sum(whole) and whole == sorted(whole, reverse=True)
        for block in model.blocks:
            block.attn.match_weight.data.zero_()
    assert all(is_first for _, _, is_first in found[0][0])
    assert sorted(lesson['words']) == sorted(page.WORDS)
    assert lesson['on'] > 0.7 * lesson['pieces'] > 7 * lesson['off']


def make_lesson(word: str) -> Any:
    packed = json.dumps(page.pack_tokenizer(tokenizer_of(load_model(SHIPPED)[1])))
    return javascript(f'{MATHEMATICS} const tokenizer = new Tokenizer({packed});', f"""(() => {{
        const lesson = makeLesson(tokenizer, {json.dumps(page.LESSON)}, {json.dumps(word)});
        const pieces = lesson.places.map(at => tokenizer.pieces[lesson.ids[at]]);
        return [lesson.first, pieces, lesson.prompt];
    }})()""")


def test_a_lesson_finds_the_pieces_of_the_second_word() -> None:
    first, pieces, prompt = make_lesson('Zorblax')
    assert (first, pieces) == ('Z', ['or', 'b', 'l', 'ax'])
    assert prompt == 'The Zorblax is a rare fish. If the Zorblax is hungry,'
    assert make_lesson('file')[:2] == ['file', []]  # a single piece leaves nothing to guess
    first, pieces, _ = make_lesson('Gałczyński')
    assert first == 'G' and len(pieces) > 5
    first, pieces, _ = make_lesson('fish.')  # the sentence has it, too
    assert first + ''.join(pieces) == 'fish.'


def test_a_model_whose_context_is_short_has_no_lesson() -> None:
    assert json.loads(content(page.make_page(make_model(), STATE)))['lesson'] is None
    with_lesson = page.make_page(make_model(context_length=200), STATE)
    n_pieces = len(''.join(page.WORDS)) - len(page.WORDS)  # with bytes
    assert json.loads(content(with_lesson))['lesson']['pieces'] == n_pieces


def test_mean_surprise_and_fall_are_those_of_the_text() -> None:
    """Of the tokens after the first, as model.py has them, also with another T."""
    model = make_model(attn_steps=2, context_length=20)
    ids = torch.randint(257, (1, 12), generator=torch.Generator().manual_seed(3))
    html = page.make_page(model, STATE)
    for T in (2, 4):
        found = run(html, f'''(() => {{
            model.T.attn = {T};
            const text = new Text(model, {ids[0].tolist()});
            while (!text.isRead()) text.readNext();
            return text.means();
        }})()''')
        model.set_steps(attn_steps=T, mlp_steps=1)
        with torch.no_grad():
            log_p = model(ids)[0][0].log_softmax(-1)
            falls = [sum(E[0] - E[-1] for E in energies(model, ids[:, :n])) for n in range(2, 13)]
        bits = -log_p[:-1].gather(1, ids[0, 1:, None]).mean().item() / math.log(2)
        assert found['bits'] == pytest.approx(bits, rel=1e-4)
        assert found['fall'] == pytest.approx(sum(falls) / len(falls), rel=1e-3)


def test_a_copy_of_the_model_has_its_own_caches_and_steps() -> None:
    """The page checks its numbers while a text is read."""
    model = make_model(attn_steps=2)
    found = run(page.make_page(model, STATE), '''(() => {
        const last = () => [...model.read(66, 1).logits];
        model.read(65, 0);
        const before = last(), other = model.copy();
        model.T.attn = 4;
        const ok = isModelPys(other, data.probe);
        model.T.attn = 2;
        return [ok, String(before) == String(last())];
    })()''')
    assert found == [True, True]


def test_play_html_is_small_and_shows_no_text_of_another_model(play: Path) -> None:
    html = play.read_text('utf-8')
    assert len(html.encode()) < 4_500_000 and not re.search('GO(ES)? HERE', html)
    assert 'model is a list of 1.5 million numbers. It has read software manuals' in html


def test_play_html_writes_what_sample_py_does(play: Path) -> None:
    model, state = load_model(SHIPPED)
    expected = sample_text(model, tokenizer_of(state), 'The first', 10, 0, top_k=None, seed=1)
    found = run(play.read_text('utf-8'), '''(() => {
        const ids = tokenizer.encode('The first');
        const text = new Text(model, [tokenizer.bos, ...ids]), length = text.tokens.length + 10;
        while (text.tokens.length < length) text.isRead() ? text.add(0, 0) : text.readNext();
        return text.tokens.map(token => token.id).map(tokenizer.speller()).join('');
    })()''')
    assert found == expected


def test_index_html_is_the_sphere() -> None:
    html = (ROOT / 'docs/index.html').read_text('utf-8')
    assert re.findall(r'src="([^"]*)"', html) == ['descent.html#story']


def test_pages_can_be_sent_on() -> None:
    """Each has a title, a description, a picture for whoever shows its address, and an icon."""
    for path in [*PAGES, page.TEMPLATE]:
        html = path.read_text('utf-8')
        assert html.count('<link rel="icon" href="data:image/svg+xml,') == 1, path.name
        assert html.count('<main>') == 1, path.name
        kinds = re.findall('<meta property="og:([a-z]+)" content="[^"]+">', html)
        assert kinds == ['title', 'description', 'image'], path.name
        title = re.search('<title>(.*)</title>', html)[1]
        assert f'property="og:title" content="{title}"' in html

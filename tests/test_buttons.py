"""The pages in a real browser: what a reader presses does what it says."""
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from browser import Browser, start_browser
from nanocem import page
from running import ROOT
from test_page import STATE, make_model

HELD_OUT = (ROOT / 'pretrained/held_out.txt').read_text('utf-8')
PLAY = ROOT / 'docs/play.html'
PHONE = dict(width=380, height=780, phone=True)


@pytest.fixture(scope='module')
def wide() -> Iterator[Browser]:
    with start_browser(1200, 900) as browser:
        yield browser


@pytest.fixture(scope='module')
def phone() -> Iterator[Browser]:
    with start_browser(**PHONE) as browser:
        yield browser


def open_play(browser: Browser, path: Path = PLAY, fragment: str = '') -> None:
    """Open the page of a model, and wait until it has read its first text."""
    browser.open(path, fragment)
    wait_until_read(browser)


def wait_until_read(browser: Browser) -> None:
    browser.wait('text.isRead() && !working && todo == 0')


def given(browser: Browser) -> str:
    """Return the text's part that was the prompt."""
    return browser.run("[...document.querySelectorAll('#text .given')].map(s => s.textContent)"
                       ".join('')")


def write_and_stop(browser: Browser) -> None:
    """Press Write, and Stop when there are twenty tokens."""
    browser.run('''(async () => {
        $('again').click();
        while (text.tokens.length < 20) await new Promise(resolve => setTimeout(resolve, 5));
        $('go').click();
    })()''')


def address(browser: Browser) -> dict[str, str]:
    """Return what the address holds, once nothing changes any more."""
    browser.wait('location.hash.length > 1')
    browser.run("new Promise(resolve => setTimeout(resolve, 400)).then(() => 1)")
    return {name: values[0] for name, values in parse_qs(browser.run('location.hash.slice(1)'),
                                                         keep_blank_values=True).items()}


# play.html

def test_play_opens_with_a_copied_word(wide: Browser) -> None:
    open_play(wide)
    rows = wide.run("[...document.querySelectorAll('#repeats tr')].map(tr => "
                    "[...tr.children].map(cell => cell.textContent))")
    assert rows == [['its pieces', 'or', 'b', 'l', 'ax'],
                    ['this model', '73%', '94%', '97%', '52%'],
                    ['cem_plain', '0.0%', '1.7%', '0.7%', '0.0%']]
    assert 'Zorblax is no word. The model has read it once, and now expects each' in wide.text(
        '#copying')
    assert wide.text('#token') == 'Token 29: b (94%, 0.1 bits)'
    assert '14 of 49 heads (framed) look most at l, which followed the earlier b' in wide.text(
        '#looks')
    assert wide.run("document.querySelectorAll('#maps .found').length") == 14
    assert wide.text('#surprise') == ('Mean surprise of this text: 5.00 bits a token. '
                                      'Energies fall by 92.')
    assert wide.run('location.hash') == ''  # nobody did anything
    # The check against model.py comes after the first text
    assert wide.wait('document.body.dataset.checked') == 'true'
    assert wide.run("document.getElementById('wrong').hidden")
    wide.click('#repeats button')
    assert wide.text('#token').startswith('Token 28: or (73%')
    assert wide.errors() == []


def test_after_an_edit_the_old_text_is_not_continued(wide: Browser) -> None:
    open_play(wide)
    for button in '#go', '#one', '#again':
        wide.type('#prompt', ' now')
        prompt = wide.run("document.getElementById('prompt').value")
        assert wide.text('#status') == 'Edited: each button begins anew.'
        wide.click(button)
        wide.run('write(0)')
        assert given(wide) == prompt and prompt.endswith(' now')
        wait_until_read(wide)
    # Control and Enter write, too
    wide.type('#prompt', '!')
    wide.type('#prompt', '\ue009\ue007')
    wide.wait('text.tokens.some(token => !token.given)')
    assert given(wide) == prompt + '!'
    # While it writes, an edit stops it
    wide.type('#prompt', '?')
    assert wide.run('todo') == 0


def test_chips_begin_texts(wide: Browser) -> None:
    open_play(wide)
    wide.click('#chips button:nth-child(2)')
    wide.wait('text.tokens.length > 20')
    assert given(wide) == 'The first argument'
    assert wide.run("document.getElementById('copying').hidden")
    write_and_stop(wide)
    assert wide.run("[todo, $('go').textContent]") == [0, 'Continue']
    wide.click('#chips button:nth-child(3)')
    wait_until_read(wide)
    assert wide.run("[document.activeElement.id, text.tokens.length]") == ['prompt', 1]
    wide.type('#prompt', 'My cat Ulqorra sleeps. Call Ulqorra')
    wide.click('#again')
    wide.wait('isTold')
    wide.run('write(0)')
    wait_until_read(wide)
    assert 'Ulqorra stands here twice.' in wide.text('#copying')
    assert wide.run("document.querySelectorAll('#repeats tr').length") == 2  # nothing beside it
    wide.click('#chips button')
    wait_until_read(wide)
    assert given(wide) == page.COPYING


def test_more_steps_are_an_experiment(wide: Browser) -> None:
    """Of a text that the model has not read, the energies fall further, and the surprise rises."""
    open_play(wide)
    wide.run(f"open({json.dumps(HELD_OUT[:400])})")
    wide.run('write(0)')
    wait_until_read(wide)
    before = wide.run('text.means()')
    for kind in 'attn', 'mlp':
        wide.type(f'#{kind}', '\ue014' * 6)  # to the right
    wide.wait('model.T.attn == 8 && model.T.mlp == 8')
    wait_until_read(wide)
    after = wide.run('text.means()')
    assert after['fall'] > before['fall'] + 5 and after['bits'] > before['bits'] + 1
    assert f"{after['bits']:.2f} bits a token" in wide.text('#surprise')
    assert wide.text('#attn-is') == '8 (2 in training)'


def test_nothing_moves_while_it_writes(wide: Browser, phone: Browser) -> None:
    """The places of all parts are the same at every token."""
    for browser in wide, phone:
        open_play(browser)
        browser.click('#chips button:nth-child(2)')
        places = browser.run('''(async () => {
            const parts = 'again text surprise chart looks maps attn colour'.split(' ');
            const found = new Set();
            while (todo > 0) {
                found.add(JSON.stringify(parts.map(id => {
                    const {x, y, width, height} = $(id).getBoundingClientRect();
                    return [id, x, y + scrollY, width, height];
                })));
                await new Promise(resolve => setTimeout(resolve, 30));
            }
            return [...found];
        })()''')
        assert len(places) == 1, places


def test_the_address_holds_what_is_seen(wide: Browser) -> None:
    open_play(wide)
    wide.click('#chips button:nth-child(2)')
    write_and_stop(wide)
    wait_until_read(wide)
    wide.type('#temperature', '\ue012\ue012')
    wide.type('#mlp', '\ue014')
    wait_until_read(wide)
    wide.click('#text span:nth-child(7)')
    held = address(wide)
    assert held['prompt'] == 'The first argument' and held['token'] == '6'
    assert (held['T'], held['T_mlp'], held['temperature']) == ('2', '3', '0.7')
    seen = '[chosen, text.tokens.map(token => token.id), model.T]'
    before = wide.run(seen)
    open_play(wide, fragment=wide.run('location.hash'))
    after = wide.run(seen)
    # As many tokens, if not the same: T and the temperature were others when they were written
    assert (after[0], len(after[1]), after[2]) == (6, len(before[1]), {'attn': 2, 'mlp': 3})
    assert wide.text('#token').startswith('Token 6: ')
    # A text that was written with these settings is written again
    wide.click('#one')
    wait_until_read(wide)
    address(wide)
    before = wide.run('[text.tokens.map(token => token.id), location.hash]')
    open_play(wide, fragment=before[1])
    assert wide.run('text.tokens.map(token => token.id)') == before[0]
    # What no page wrote does no harm
    open_play(wide, fragment='#prompt=a&token=x&T=-1&T_mlp=1e9&temperature=&seed=no&more=-5')
    assert wide.run('[model.T, text.tokens.length]') == [{'attn': 2, 'mlp': 2}, 2]
    assert wide.errors() == []


def test_a_tap_brings_the_chart_into_view(phone: Browser) -> None:
    open_play(phone)
    phone.run('scrollTo(0, 250)')
    phone.run("document.querySelectorAll('#text span')[20].click()")
    phone.wait("document.getElementById('chart').getBoundingClientRect().bottom <= innerHeight")
    assert phone.run("document.getElementById('text').getBoundingClientRect().top >= 0")
    assert phone.text('#token').startswith('Token 20')
    phone.click('#after')
    assert phone.text('#token').startswith('Token 21')
    phone.click('#before')
    assert phone.text('#token').startswith('Token 20')


def test_the_heads_that_copy_are_one_tap_away(phone: Browser) -> None:
    open_play(phone)
    phone.click('#copying-is a')
    phone.wait("document.getElementById('maps').getBoundingClientRect().bottom <= innerHeight")
    assert phone.run("document.getElementById('heads').getBoundingClientRect().top >= 0")
    assert phone.run('location.hash') == ''


def test_a_finger_hits_a_token_of_one_letter(phone: Browser) -> None:
    open_play(phone)
    sizes = phone.run("[...document.querySelectorAll('#text span')].map(s => s.getClientRects())"
                      ".filter(r => r.length == 1).map(([r]) => [r.width, r.height])")
    assert len(sizes) > 30
    assert min(width for width, _ in sizes) >= 24 and min(height for _, height in sizes) >= 26
    assert not phone.run('document.documentElement.scrollWidth > innerWidth')


def test_a_model_without_energies_and_with_bytes_has_a_page(wide: Browser, tmp_path: Path) -> None:
    path = tmp_path / 'page.html'
    model = make_model(attn='llama', mlp='llama', context_length=150)
    path.write_text(page.make_page(model, STATE), 'utf-8')
    open_play(wide, path)
    assert wide.run("document.querySelectorAll('#repeats button').length") == len('orblax')
    assert 'still does not expect its next pieces' in wide.text('#copying')
    assert wide.run("document.getElementById('energies').hidden")
    wide.click('#one')
    wait_until_read(wide)
    assert wide.wait('document.body.dataset.checked') == 'true'
    assert wide.errors() == []


def test_numbers_that_are_not_model_pys_are_said_to_be(wide: Browser, tmp_path: Path) -> None:
    path = tmp_path / 'page.html'
    html = page.make_page(make_model(), STATE)
    path.write_text(html.replace('"logits": [', '"logits": [9', 1), 'utf-8')
    open_play(wide, path)
    assert wide.wait('document.body.dataset.checked') == 'false'
    assert not wide.run("document.getElementById('wrong').hidden")


def test_an_exported_page_opens_its_prompt_and_writes(wide: Browser, tmp_path: Path) -> None:
    path = tmp_path / 'page.html'
    path.write_text(page.make_page(make_model(context_length=60), STATE, 'See the '), 'utf-8')
    open_play(wide, path)
    assert given(wide) == 'See the '
    assert wide.run('text.tokens.length') > 20


# train.html

TRAIN = ROOT / 'docs/train.html'


def wait_until_learned(browser: Browser) -> None:
    browser.wait('!running && all.length == STEPS')


def test_train_learns_while_the_page_stays_alive(wide: Browser) -> None:
    """It begins by itself. The page draws many times while it learns, and nothing moves."""
    wide.open(TRAIN)
    frames, places, seen = wide.run('''(async () => {
        let frames = 0;
        const places = new Set(), seen = new Set();
        while (all.length < STEPS) {
            await new Promise(resolve => requestAnimationFrame(resolve));
            frames++;
            seen.add($('invented').textContent);
            places.add(JSON.stringify(['stop', 'losses', 'energies', 'maps'].map(id =>
                [id, ...Object.values($(id).getBoundingClientRect().toJSON())])));
        }
        return [frames, [...places], seen.size];
    })()''')
    assert frames > 30 and len(places) == 1 and seen > 5
    wait_until_learned(wide)
    assert wide.run('means().pop()') < 2.3 < 3 < wide.run('all[0]')
    status = wide.text('#status')
    assert status.startswith('Step 700 of 700: loss ') and status.endswith(' s).')
    energies = wide.run('last.energies')
    assert all(sorted(values, reverse=True) == values for values in energies)
    # Invent more, and look into another word
    before = wide.run("$('invented').children.length")
    wide.click('#more')
    wide.wait(f"$('invented').children.length == Math.min(60, {before} + 8)")
    wide.type('#word', '\ue009a')
    wide.type('#word', 'ab')
    wide.wait('last.seen == "ab" && last.maps[0].length == 9')
    wide.type('#word', 'Z')
    wide.wait("$('unknown').textContent == 'No word of the list has the letter “Z”.'")
    assert wide.errors() == []


def test_train_stops_goes_on_and_starts_again(wide: Browser) -> None:
    wide.open(TRAIN)
    wide.wait('all.length > 5')
    wide.click('#stop')
    wide.wait("!running && $('stop').textContent == 'Go on'")
    steps = wide.run('new Promise(r => setTimeout(() => r(all.length), 300))')
    assert 5 < steps < 700
    assert wide.run('new Promise(r => setTimeout(() => r(all.length), 300))') == steps
    wide.click('#stop')
    wide.wait(f'all.length > {steps}')
    wide.click('#again')
    assert wide.run('all.length') < steps
    wide.wait('all.length > 5')


def test_train_learns_words_of_a_visitor(wide: Browser) -> None:
    wide.open(TRAIN)
    wide.run("$('words').value = ''")
    wide.click('#learn')
    assert wide.text('#wrong') == 'Expected words, one a line.'
    wide.wait('all.length > 0')  # the towns are still learned
    wide.run("$('words').value = 'Łódź 1\\n'")
    wide.click('#learn')
    assert wide.text('#wrong') == ''
    wait_until_learned(wide)
    assert wide.run("$('invented').firstChild.textContent") == 'Łódź 1'
    assert wide.run("$('invented').firstChild.className") == 'known'
    assert wide.run("$('word').value") == 'Łódź 1'
    assert wide.errors() == []


# descent.html and index.html

DESCENT = ROOT / 'docs/descent.html'


def uphill(browser: Browser) -> int:
    """Return how many states went uphill, once all steps are taken."""
    browser.wait('t == T && !timer')
    return int(browser.text('#status').split('Went uphill: ')[1].split()[0])


def test_the_sphere_plays_again(wide: Browser) -> None:
    wide.open(DESCENT)
    assert uphill(wide) == 0 and wide.run('T') == 48
    wide.click('#again')
    assert wide.run('t < 40 && timer > 0')
    assert uphill(wide) == 0


def test_the_sphere_as_in_a_trained_layer(wide: Browser) -> None:
    wide.open(DESCENT)
    wide.click('#trained')
    assert uphill(wide) == 0
    assert wide.run('[T, now.eta, t]') == [1, 1, 1]
    assert wide.text('#eta-is') == '1'
    wide.click('#reset')
    assert uphill(wide) == 0
    assert wide.run('[T, Math.round(12 * now.eta), t]') == [48, 1, 48]


def test_the_sphere_asks_what_if_values_are_not_keys(wide: Browser) -> None:
    wide.open(DESCENT)
    assert wide.text('#answer').startswith('The values are the keys')
    wide.click('#turned')
    assert wide.text('#answer').startswith('Now the values are the keys turned by 90 degrees')
    assert uphill(wide) > 30
    # Reset also brings a star back that was moved
    wide.run('moveKey(0, [0, 1, 0.1])')
    wide.click('#reset')
    assert uphill(wide) == 0
    assert wide.run('keys == KEYS')
    assert wide.errors() == []


def test_half_of_a_telephones_screen_scrolls(phone: Browser) -> None:
    """The sphere takes touches, and what stays at the top is at most half of the screen."""
    phone.open(DESCENT)
    phone.run('scrollTo(0, 900)')
    sphere, stay = (phone.run(f"$('{id}').getBoundingClientRect().toJSON()")
                    for id in ('sphere', 'stay'))
    height = phone.run('innerHeight')
    assert stay['top'] == 0 and stay['height'] <= height / 2
    assert sphere['width'] <= 0.8 * phone.run('innerWidth') and sphere['height'] < 0.4 * height
    # Nothing looks out beside it, and a telephone is not told of arrow keys
    assert stay['left'] == 0 and stay['right'] == phone.run('innerWidth')
    assert not phone.run("document.querySelector('.keys').checkVisibility()")
    assert not phone.run('document.documentElement.scrollWidth > innerWidth')


def test_index_is_the_sphere_running(wide: Browser) -> None:
    wide.open(ROOT / 'docs/index.html')
    wide.frame('iframe')
    wide.wait('t > 3')
    assert wide.run("!$('chart').checkVisibility() && $('sphere').checkVisibility()")
    before = wide.run('JSON.stringify(view)')
    wide.wait(f"JSON.stringify(view) != {json.dumps(before)}")  # it turns
    wide.frame(None)
    wide.click('#sphere a')
    wide.wait("location.pathname.endsWith('/descent.html') && !document.body.matches('.bare')")
    assert wide.errors() == []

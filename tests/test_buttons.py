"""The pages in a real browser: what a reader presses does what it says."""
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from browser import Browser, start_browser
from nanocem import page
from running import ROOT
from test_page import STATE, make_model

HELD_OUT = (ROOT / 'pretrained/held_out.txt').read_text('utf-8')
PHONE = dict(width=380, height=780, phone=True)
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def wide() -> Iterator[Browser]:
    with start_browser(1200, 900) as browser:
        yield browser


@pytest.fixture(scope='module')
def still() -> Iterator[Browser]:
    with start_browser(1200, 900, still=True) as browser:
        yield browser


@pytest.fixture(scope='module')
def phone() -> Iterator[Browser]:
    with start_browser(**PHONE) as browser:
        yield browser


def open_play(browser: Browser, path: Path, fragment: str = '') -> None:
    """Open the page of a model, and wait for the lesson with which it begins."""
    browser.open(path, fragment)
    wait_until_taught(browser)


def wait_until_taught(browser: Browser) -> None:
    browser.wait("!data.lesson || $('verdict').textContent")


def teach(browser: Browser, word: str) -> str:
    """Teach a word, and return the verdict."""
    browser.type('#word', '\ue009a')
    browser.type('#word', word)
    browser.click('#teach')
    wait_until_taught(browser)
    return browser.text('#verdict')


def cards(browser: Browser) -> list[list[str]]:
    return browser.run("[...$('cards').children].map(card => [card.className.replace('card ', ''), "
                       "card.firstChild.textContent, card.lastChild.textContent])")


def look_inside(browser: Browser, prompt: str = '') -> None:
    """Open "Look inside", with a text of one's own or that of the lesson."""
    browser.run("$('inside').open = true")
    browser.wait('text != null')  # not the text itself, which would be sent
    if prompt:
        browser.run(f'(open({json.dumps(prompt)}), write(0))')
    wait_until_read(browser)


def wait_until_read(browser: Browser) -> None:
    browser.wait('text && text.isRead() && !working && todo == 0')


def given(browser: Browser) -> str:
    """Return the text's part that was the prompt."""
    return browser.run("(nodes => nodes.slice(0, nodes.findLastIndex(node => "
                       "node.classList?.contains('given')) + 1).map(node => node.textContent)"
                       ".join(''))([...$('text').childNodes])")


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

def test_play_opens_with_a_copied_word(wide: Browser, play: Path) -> None:
    wide.open(play)
    assert wide.wait("document.querySelectorAll('.card.down').length") > 1  # they turn one by one
    wait_until_taught(wide)
    assert cards(wide) == [['first', 'Z', 'given'], ['right', 'or', '87%'], ['right', 'b', '94%'],
                           ['right', 'l', '86%'], ['right', 'ax', '76%']]
    assert wide.text('#verdict') == 'It copied Zorblax: all 4 pieces were its first guess.'
    assert wide.text('#first') == 'The Zorblax is a rare fish.'
    assert wide.text('#off-is') == 'Switch off 49 of its 1,508,836 numbers'
    assert ('it copies 11 whole. Of their 120 pieces, it guesses 93 right with those '
            in wide.text('#off-says'))
    assert wide.text('#tally') == '' and wide.run('location.hash') == ''  # nobody did anything
    # The check against model.py comes after the first words
    assert wide.wait('document.body.dataset.checked') == 'true'
    assert wide.run("$('wrong').hidden")
    assert wide.errors() == []


def test_a_word_of_the_readers_is_taught_and_counted(still: Browser, play: Path) -> None:
    open_play(still, play)
    assert teach(still, 'Ulvarin') == 'It copied Ulvarin: all 4 pieces were its first guess.'
    assert still.text('#tally') == 'Your words: 1 of 1 copied whole, 4 of 4 pieces.'
    assert teach(still, 'Quizzle') == 'It guessed 3 of 4 pieces of Quizzle.'
    assert cards(still)[2][0] == 'wrong' and cards(still)[2][2].startswith('guessed ')
    assert still.text('#tally') == 'Your words: 1 of 2 copied whole, 7 of 8 pieces.'
    for word, problem in (('two words', 'without a space'), ('', 'Type a word.'),
                          ('file', 'is a single piece for this model')):
        still.run(f"$('word').value = {json.dumps(word)}")
        still.click('#teach')
        assert problem in still.text('#note')
        assert cards(still)[0][1] == 'Q'  # the last lesson stays
    still.click('#other')
    wait_until_taught(still)
    word = still.run("$('word').value")
    assert word in page.WORDS and still.text('#note') == ''
    assert still.text('#tally').startswith('Your words: 1 of 2 ')  # this one is the page's
    still.click('#other')
    wait_until_taught(still)
    before, word = word, still.run("$('word').value")
    assert word in page.WORDS and word != before
    # The address restores word and switch
    still.click('#off')
    assert address(still) == {'word': word, 'off': '1'}
    open_play(still, play, '#word=Florbin&off=1')
    assert still.run("$('off').checked && $('word').value == 'Florbin'")
    assert still.text('#verdict').startswith('With those numbers off it guesses 0 of ')
    assert still.errors() == []


def test_the_switch_takes_the_copying_away_and_brings_it_back(still: Browser, play: Path) -> None:
    open_play(still, play)
    look_inside(still)
    surprise = still.run('text.means().bits')
    assert len(still.run("[...document.querySelectorAll('#maps .found')]")) > 10
    still.click('#off')
    wait_until_taught(still)
    assert still.text('#verdict') == (
        'With those numbers off it guesses 0 of 4 pieces. With those numbers on: 4.')
    assert [kind for kind, *_ in cards(still)] == ['first'] + 4 * ['wrong']
    wait_until_read(still)
    assert still.run('text.means().bits') > surprise + 1  # inside it is off, too
    assert still.run("document.querySelectorAll('#maps .found').length") < 8
    still.click('#off')
    wait_until_taught(still)
    assert still.text('#verdict').endswith('first guess. With 49 numbers off: 0.')
    wait_until_read(still)
    assert still.run('text.means().bits') == surprise
    assert still.text('#tally') == ''  # the word is the page's
    # One of the reader's counts once it is read with all numbers on
    still.click('#off')
    teach(still, 'Ulvarin')
    assert still.text('#tally') == ''
    still.click('#off')
    wait_until_taught(still)
    assert still.text('#tally') == 'Your words: 1 of 1 copied whole, 4 of 4 pieces.'


def test_a_model_without_a_match_bias_has_no_switch(still: Browser, tmp_path: Path) -> None:
    """One without energies and with bytes, too."""
    path = tmp_path / 'page.html'
    model = make_model(attn='llama', mlp='llama', context_length=150)
    path.write_text(page.make_page(model, STATE), 'utf-8')
    open_play(still, path)
    assert [piece for _, piece, _ in cards(still)] == [*'Zorblax']
    assert still.run("$('switch').hidden")
    look_inside(still)
    assert still.run("$('energies').hidden")
    still.click('#one')
    wait_until_read(still)
    assert still.wait('document.body.dataset.checked') == 'true'
    assert still.errors() == []


def test_the_tab_key_stops_twenty_times_at_most(still: Browser, play: Path) -> None:
    """With everything open. The heads are one stop, from which arrow keys go on."""
    open_play(still, play)
    look_inside(still)
    still.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    still.run("$('word').focus()")
    stops = []
    for _ in range(40):
        stops.append(still.run("document.activeElement.outerHTML.slice(0, 60)"))
        still.press('\ue004')
        if stops[-1] in stops[:-1]:
            break
    stops = {stop for stop in stops if not stop.startswith('<body')}
    assert 15 < len(stops) <= 20, stops
    assert sum('<button title=' in stop for stop in stops) == 1, stops
    still.run("document.querySelector('#maps button[tabindex=\"0\"]').focus()")
    still.press('\ue014\ue015\ue013\ue015')  # right, down, up, down
    assert still.run("document.activeElement == headAt([1, 1])")
    still.press('\ue012\ue012\ue012')  # left of the first one there is none
    assert still.run("document.activeElement == headAt([1, 0])")
    still.press(' ')
    assert 'Green in the text: layer 2, head 1.' in still.text('#looks')
    assert still.run("document.activeElement == headAt([1, 0])")


def test_look_inside_shows_the_lessons_word(still: Browser, play: Path) -> None:
    open_play(still, play)
    still.click('#inside summary')
    wait_until_read(still)
    assert given(still) == 'The Zorblax is a rare fish. If the Zorblax is hungry,'
    assert still.text('#token').startswith('Token 20: b (94%, 0.1 bits)')
    assert '19 of 49 heads (framed) look most at “l”, which followed the earlier “b”' in still.text(
        '#looks')
    assert still.text('#surprise').startswith('Mean surprise of this text: 5.02 bits per token. En')
    # Another word is shown, too
    teach(still, 'Morvath')
    wait_until_read(still)
    assert 'Morvath is a rare fish' in given(still)
    still.run("$('prompt').value = ''")
    still.click('#again')
    still.run('write(0)')
    still.wait("/^1 token\\.|tokens/.test($('status').textContent)")


def test_after_an_edit_the_old_text_is_not_continued(still: Browser, play: Path) -> None:
    open_play(still, play)
    look_inside(still)
    for button in '#go', '#one', '#again':
        still.type('#prompt', ' now')
        prompt = still.run("document.getElementById('prompt').value")
        assert still.text('#status') == 'Edited: each button begins anew.'
        still.click(button)
        still.run('write(0)')
        assert given(still) == prompt and prompt.endswith(' now')
        wait_until_read(still)
    # Control and Enter write, too
    still.type('#prompt', '!')
    still.type('#prompt', '\ue009\ue007')
    still.wait('text.tokens.some(token => !token.given)')
    assert given(still) == prompt + '!'
    # While it writes, an edit stops it
    still.type('#prompt', '?')
    assert still.run('todo') == 0


def test_more_steps_are_an_experiment(still: Browser, play: Path) -> None:
    """Of a text that the model has not read, the energies fall further, and the surprise rises."""
    open_play(still, play)
    look_inside(still, HELD_OUT[:400])
    before = still.run('text.means()')
    assert still.text('#question').endswith('Try more than in training.')
    still.type('#attn', '\ue014' * 7)  # to the right
    still.wait('model.T.attn == 8')
    wait_until_read(still)
    after = still.run('text.means()')
    assert after['fall'] > before['fall'] + 5 and after['bits'] > before['bits'] + 1
    assert f"{after['bits']:.2f} bits per token" in still.text('#surprise')
    assert still.text('#attn-is') == '8 (1 in training)'
    assert still.text('#question') == (
        f"With these steps, energies fall by {after['fall']:.0f}; with those used in training, by "
        f"{before['fall']:.0f}. The surprise is {after['bits']:.2f} bits per token, and was "
        f"{before['bits']:.2f}: worse guesses.")


def test_nothing_moves_while_it_writes(wide: Browser, phone: Browser, play: Path) -> None:
    """The places of all parts are the same at every token."""
    for browser in wide, phone:
        open_play(browser, play)
        look_inside(browser)
        places = browser.run('''(async () => {
            const parts = 'again text surprise chart looks maps attn colour'.split(' ');
            const found = new Set();
            $('go').click();
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


def test_nothing_moves_while_pieces_turn(wide: Browser, phone: Browser, play: Path) -> None:
    """The switch stays where it is, so that a finger that goes to it meets it."""
    for browser in wide, phone:
        open_play(browser, play)
        places = browser.run('''(async () => {
            const found = new Set();
            $('off').click();
            do {
                found.add($('off').getBoundingClientRect().y + scrollY);
                await new Promise(resolve => setTimeout(resolve, 30));
            } while (!$('verdict').textContent);
            return [...found];
        })()''')
        assert len(places) == 1, places
        assert not browser.run('document.documentElement.scrollWidth > innerWidth')


def test_the_address_holds_what_is_seen(still: Browser, play: Path) -> None:
    open_play(still, play)
    look_inside(still)
    still.run("$('prompt').value = 'The first argument'")
    write_and_stop(still)
    wait_until_read(still)
    still.type('#temperature', '\ue012\ue012')
    still.type('#attn', '\ue014')
    wait_until_read(still)
    still.click('#text span:nth-child(7)')
    held = address(still)
    assert held['prompt'] == 'The first argument' and held['token'] == '6'
    assert (held['T'], held['temperature']) == ('2', '0.7')
    seen = '[chosen, text.tokens.map(token => token.id), model.T]'
    before = still.run(seen)
    open_play(still, play, still.run('location.hash'))
    wait_until_read(still)
    after = still.run(seen)
    # As many tokens, if not the same: T and the temperature were others when they were written
    assert (after[0], len(after[1]), after[2]) == (6, len(before[1]), {'attn': 2, 'mlp': 1})
    assert still.text('#token').startswith('Token 6: ')
    # A text that was written with these settings is written again
    still.click('#one')
    wait_until_read(still)
    address(still)
    before = still.run('[text.tokens.map(token => token.id), location.hash]')
    open_play(still, play, before[1])
    wait_until_read(still)
    assert still.run('text.tokens.map(token => token.id)') == before[0]
    # What no page wrote does no harm
    open_play(still, play, '#word=a+b&prompt=a&token=x&T=-1&T_mlp=1e9&temperature=&seed=no'
              '&more=-5')
    wait_until_read(still)
    assert still.run('[model.T, text.tokens.length]') == [{'attn': 1, 'mlp': 1}, 2]
    assert still.errors() == []


def test_a_tap_brings_the_chart_into_view(phone: Browser, play: Path) -> None:
    open_play(phone, play)
    look_inside(phone)
    phone.run('scrollTo(0, 250)')
    phone.run("document.querySelectorAll('#text span')[20].click()")
    phone.wait("document.getElementById('chart').getBoundingClientRect().bottom <= innerHeight")
    assert phone.run("document.getElementById('text').getBoundingClientRect().top >= 0")
    assert phone.text('#token').startswith('Token 20')
    phone.click('#after')
    assert phone.text('#token').startswith('Token 21')
    phone.click('#before')
    assert phone.text('#token').startswith('Token 20')


def test_the_switch_is_on_the_first_screen_of_a_telephone(phone: Browser, play: Path) -> None:
    open_play(phone, play)
    assert phone.run("$('off').getBoundingClientRect().bottom < innerHeight")


def test_while_the_model_is_loading_the_page_says_so(wide: Browser, play: Path) -> None:
    """What is there before the model: the head of the file alone."""
    head = play.read_text('utf-8').partition('<script type="application/json"')[0]
    path = play.with_name('head.html')
    path.write_text(head, 'utf-8')
    wide.open(path)
    assert re.fullmatch(r'Loading the model: 4\.1 MB\.', wide.text('#note'))
    assert wide.run("[...document.querySelectorAll('#ask :is(button, input)')]"
                    ".every(one => one.disabled)")
    assert wide.run("document.getElementById('switch').hidden")


def test_a_finger_hits_a_token_of_one_letter(phone: Browser, play: Path) -> None:
    open_play(phone, play)
    look_inside(phone)
    sizes = phone.run("[...document.querySelectorAll('#text span')].map(s => s.getClientRects())"
                      ".filter(r => r.length == 1).map(([r]) => [r.width, r.height])")
    assert len(sizes) > 20
    assert min(width for width, _ in sizes) >= 24 and min(height for _, height in sizes) >= 26
    assert not phone.run('document.documentElement.scrollWidth > innerWidth')


def test_numbers_that_are_not_model_pys_are_said_to_be(still: Browser, tmp_path: Path) -> None:
    path = tmp_path / 'page.html'
    html = page.make_page(make_model(), STATE)
    path.write_text(html.replace('"logits": [', '"logits": [9', 1), 'utf-8')
    open_play(still, path)
    assert still.wait('document.body.dataset.checked') == 'false'
    assert not still.run("document.getElementById('wrong').hidden")


def test_an_exported_page_opens_its_prompt_and_writes(wide: Browser, tmp_path: Path) -> None:
    path = tmp_path / 'page.html'
    path.write_text(page.make_page(make_model(context_length=40), STATE, 'See the '), 'utf-8')
    open_play(wide, path)
    wait_until_read(wide)
    assert given(wide) == 'See the ' and wide.run("$('lesson').hidden")
    wide.wait('text.tokens.length > 20')
    # Its MLP takes steps, too
    wide.type('#mlp', '\ue014')
    wait_until_read(wide)
    assert wide.run('model.T.mlp') == 2 and address(wide)['T_mlp'] == '2'
    open_play(wide, path, wide.run('location.hash'))
    assert wide.run('model.T') == {'attn': 1, 'mlp': 2}


# train.html

TRAIN = ROOT / 'docs/train.html'


def wait_until_learned(browser: Browser) -> None:
    browser.wait('!running && all.length == STEPS')


def test_train_learns_while_the_page_stays_alive(wide: Browser) -> None:
    """It begins by itself. The page draws many times while it learns, and nothing moves."""
    wide.open(TRAIN)
    frames, places, seen = wide.run('''(async () => {
        let frames = 0;
        const places = new Set(), seen = new Set(), end = performance.now() + 5000;
        while (performance.now() < end) {
            await new Promise(resolve => requestAnimationFrame(resolve));
            frames++;
            seen.add($('invented').textContent);
            places.add(JSON.stringify(['best', 'stop', 'hills', 'maps'].map(id =>
                [id, ...Object.values($(id).getBoundingClientRect().toJSON())])));
        }
        return [frames, [...places], seen.size];
    })()''')
    assert frames > 20 and len(places) == 1 and seen > 5
    wait_until_learned(wide)
    assert wide.run('mean()') < 2.3 < 3 < wide.run('all[0]')
    status = wide.text('#status')
    assert status.startswith('Step 700 of 700: the loss is ') and status.endswith(' s).')
    # Attention went down its hill
    assert wide.run('last.hills[0][HILL.indexOf(1)] < last.hills[0][HILL.indexOf(0)]')
    wide.wait("$('best').textContent.startsWith('Its three best new words:')")
    counts = re.match(r'(\d+) new, (\d+) from the list', wide.text('#counts'))
    new, known = map(int, counts.groups())
    assert wide.run("$('invented').children.length") == min(60, new + known) and new > known
    assert wide.run("$('heart').hidden")
    best = wide.text('#best b').split()
    assert len(best) == 3 and not {*best} & {*wide.run('learned')}
    # Invent more, and look into another word
    wide.click('#more')
    wide.wait("$('counts').textContent.match(/\\d+/g).reduce((a, b) => +a + +b) "
              f'== {new + known + 8}')
    assert wide.run("$('invented').children.length") == min(60, new + known + 8)
    wide.type('#word', '\ue009a')
    wide.type('#word', 'ab')
    wide.wait('last.seen == "ab" && last.maps[0].length == 9')
    assert wide.run("[...document.querySelectorAll('#letters span')].map(s => s.textContent)") == [
        '\u00b7', 'a', 'b']
    assert wide.wait("$('next').textContent").startswith('After \u201cab\u201d it expects ')
    wide.click('#letters label:nth-child(2)')
    wide.wait("last.at == 1 && $('next').textContent.startsWith('After \u201ca\u201d')")
    wide.type('#word', 'Z')
    wide.wait("$('unknown').textContent == 'No word of the list has the letter “Z”.'")
    assert wide.errors() == []


def test_train_stops_goes_on_and_starts_again(still: Browser) -> None:
    still.open(TRAIN)
    still.wait('all.length > 5')
    still.click('#stop')
    still.wait("!running && $('stop').textContent == 'Go on'")
    steps = still.run('new Promise(r => setTimeout(() => r(all.length), 300))')
    assert 5 < steps < 700
    assert still.run('new Promise(r => setTimeout(() => r(all.length), 300))') == steps
    still.click('#stop')
    still.wait(f'all.length > {steps}')
    still.click('#again')
    assert still.run('all.length') < steps
    still.wait('all.length > 5')


def test_train_learns_words_of_a_visitor(still: Browser) -> None:
    still.open(TRAIN)
    assert not still.run("$('words').checkVisibility()")
    still.click('#lists button:last-child')
    still.click('#learn')
    assert still.text('#wrong') == 'Type some words, one per line.'
    still.wait('all.length > 0')  # the towns are still learned
    still.run("$('words').value = 'Łódź 1\\n'")
    still.click('#learn')
    assert still.text('#wrong') == ''
    wait_until_learned(still)
    assert still.run("$('invented').firstChild.textContent") == 'Łódź 1'
    assert still.run("$('invented').firstChild.className") == 'known'
    assert still.run("$('word').value") == 'Łódź 1'
    assert still.text('#heart').startswith('The list has 1 word. With so few it learns them by he')
    still.wait("$('best').textContent == 'It has invented no new word.'")
    assert still.errors() == []


def test_a_link_to_train_restores_the_list_and_what_is_invented(still: Browser) -> None:
    still.open(TRAIN)
    still.click('#lists button:nth-child(4)')
    held = address(still)
    assert held['list'] == 'Minerals' and held['seed'].isdigit()
    still.open(TRAIN, '#list=Minerals&seed=5')
    assert still.run('[list, begunFrom, learned[0]]') == ['Minerals', 5, 'acanthite']
    found = []
    for _ in range(2):
        still.open(TRAIN, '#words=anna,bob,hannah,otto&seed=5')
        wait_until_learned(still)
        still.wait("!$('best').textContent.includes('come at the end')")
        found.append(still.run("[learned, list, mean(), $('best').textContent]"))
    assert found[0] == found[1]
    assert found[0][:2] == [['anna', 'bob', 'hannah', 'otto'], 'My own']
    # What no page wrote does no harm
    still.open(TRAIN, '#list=constructor&seed=-1')
    assert still.run('list') == 'Towns'
    assert still.errors() == []


# descent.html and index.html

DESCENT = ROOT / 'docs/descent.html'


def uphill(browser: Browser) -> int:
    """Return how many states went uphill, once all steps are taken."""
    browser.wait('t == T && !timer')
    found = re.search(r'(\d+|no) (of 40 )?states? went uphill', browser.text('#caption'))
    return 0 if found[1] == 'no' else int(found[1])


def test_the_sphere_plays_again(wide: Browser) -> None:
    wide.open(DESCENT)
    assert uphill(wide) == 0 and wide.run('T') == 48
    wide.click('#again')
    assert wide.run('t < 40 && timer > 0')
    assert uphill(wide) == 0


def test_captions_follow_the_steps(wide: Browser) -> None:
    wide.open(DESCENT)
    assert uphill(wide) == 0
    assert wide.text('#caption').endswith('Now untie the values, and watch some of them climb.')
    wide.run('go(0)')
    wide.click('#step')
    matched = wide.run('Math.max(...paths[choice][0].alpha)')
    assert wide.text('#caption') == (
        f'Step 1 of 48: bank matches river best ({100 * matched:.0f}%), so it moves there. '
        'All 40 states are going down.')
    wide.click('#untie')
    wide.wait("t > 5 && ($('run').click(), true)")  # before it ends
    found = wide.run("[t, uphill(t), $('caption').textContent]")
    assert f'Step {found[0]} of 48' in found[2] and found[1] > 10
    assert (f'but is pushed aside. {found[1]} of 40 states are going uphill (red triangles).'
            in found[2])


def test_the_sphere_as_in_a_trained_layer(still: Browser) -> None:
    still.open(DESCENT)
    still.click('#trained')
    assert uphill(still) == 0
    assert still.run('[T, now.eta, t]') == [1, 1, 1]
    assert still.text('#eta-is') == '1'
    for back in '#trained', '#reset':  # the button itself is the way back
        still.click(back)
        assert uphill(still) == 0
        assert still.run('[T, Math.round(12 * now.eta), t]') == [48, 1, 48]
        still.click('#trained')


def test_untied_values_go_uphill_and_reset_ties_them(still: Browser) -> None:
    still.open(DESCENT)
    still.click('#untie')
    assert uphill(still) > 30
    assert still.text('#untie') == 'Tie them again'
    # Reset also brings a star back that was moved
    still.run('moveKey(0, [0, 1, 0.1])')
    still.click('#reset')
    assert uphill(still) == 0
    assert still.run('keys == KEYS') and still.text('#untie') == 'Untie the values'
    assert not still.run("$('tau').checkVisibility()")
    still.click('#inside summary')
    assert still.run("$('tau').checkVisibility() && $('numbers').checkVisibility()")
    assert still.errors() == []


def test_labels_avoid_each_other(phone: Browser) -> None:
    """Also where the ball ends at a star, for all turns of the sphere."""
    phone.open(DESCENT)
    uphill(phone)
    for _ in range(20):
        overlaps = phone.run('''(() => {
            view = view.map(e => rotate(e, 0.3, 0.1));
            draw();
            return labels.some(([x, y, w], n) => labels.some(([left, base], m) =>
                m < n && left < x + w && x < left + labels[m][2] && Math.abs(base - y) < 16));
        })()''')
        assert not overlaps


def test_half_of_a_telephones_screen_scrolls(phone: Browser) -> None:
    """The sphere takes touches, and what stays at the top is at most half of the screen."""
    phone.open(DESCENT)
    phone.run('scrollTo(0, 400)')
    sphere, stay = (phone.run(f"$('{id}').getBoundingClientRect().toJSON()")
                    for id in ('sphere', 'stay'))
    height = phone.run('innerHeight')
    assert stay['top'] == 0 and stay['height'] <= height / 2
    assert sphere['width'] <= 0.8 * phone.run('innerWidth') and sphere['height'] < 0.4 * height
    # Nothing looks out beside it, and a telephone is not told of arrow keys
    assert stay['left'] == 0 and stay['right'] == phone.run('innerWidth')
    assert not phone.run("document.querySelector('.keys').checkVisibility()")
    assert not phone.run('document.documentElement.scrollWidth > innerWidth')


def test_index_rolls_to_the_word_that_is_tapped(wide: Browser) -> None:
    wide.open(ROOT / 'docs/index.html')
    wide.frame('iframe')
    assert wide.wait("$('caption').textContent") == 'Here a bank is the side of a river.'
    nearest = '(stars => stars.indexOf(Math.max(...stars)))(KEYS.map(k => dot(norm(k), state)))'
    assert wide.run(nearest) == 0 and wide.run("$('river').ariaPressed") == 'true'
    assert wide.run("!$('chart').checkVisibility() && $('sphere').checkVisibility()")
    wide.click('#money')
    assert wide.wait("$('caption').textContent") == 'Here a bank keeps your money.'
    assert wide.run(nearest) == 1 and wide.run('trail.length') > 10
    wide.click('#river')
    wide.wait("$('caption').textContent")
    assert wide.run(nearest) == 0
    # It turns by itself, and under a finger; no link lies on it
    before = wide.run('JSON.stringify(view)')
    wide.wait(f"JSON.stringify(view) != {json.dumps(before)}")
    for moment in 'pointerdown', 'pointerup':
        wide.run(f"$('sphere').addEventListener('{moment}', "
                 f"() => {{ {moment} = Math.atan2(view[0][2], view[0][0]); }})")
    wide.frame(None)
    wide.drag(200, 350, 60)
    assert wide.run("location.pathname").endswith('/index.html')
    wide.frame('iframe')
    assert wide.run('pointerdown - pointerup') == pytest.approx(wide.run('60 / zoom() / R'))
    wide.frame(None)
    assert wide.run("document.elementFromPoint(200, 300).tagName") == 'IFRAME'
    wide.click('main a')
    wide.wait("location.pathname.endsWith('/descent.html') && !document.body.matches('.story')")
    assert wide.errors() == []

"""JavaScript for tests of pages: an engine for their mathematics, and a real browser, Chromium
without a window, by chromedriver's web protocol."""
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from running import free_port

FLAGS = ('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
         '--disable-background-networking', '--disable-component-update', '--disable-sync',
         '--disable-dev-shm-usage', '--hide-scrollbars')
ELEMENT = 'element-6066-11e4-a52e-4f735466cecf'  # the protocol's name for an element's id


def javascript(code: str, expression: str) -> Any:
    """Run code, and return the value of an expression in it: in node, or else in quickjs, which is
    some thirty times slower."""
    answer = f'JSON.stringify({expression})'
    if node := shutil.which('node'):
        done = subprocess.run([node, '-'], input=f'{code}\nconsole.log({answer})', text=True,
                              capture_output=True, check=True)
        return json.loads(done.stdout)
    quickjs = pytest.importorskip('quickjs', reason='there is neither node nor quickjs here')
    return json.loads(quickjs.Context().eval(f'{code}\n{answer}'))


class Browser:
    """One tab. A selector is CSS; `run` returns the value of a JavaScript expression."""
    def __init__(self, port: int, options: dict[str, Any]):
        self.address = f'http://127.0.0.1:{port}'
        self.session = ''
        capabilities = {'alwaysMatch': {'goog:chromeOptions': options}}
        self.session = '/session/' + self.send('POST', '/session',
                                               capabilities=capabilities)['sessionId']

    def send(self, method: str, command: str, **values: Any) -> Any:
        body = json.dumps(values).encode() if method == 'POST' else None
        request = urllib.request.Request(self.address + self.session + command, body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)['value']
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)['value']['message']) from None

    def open(self, path: Path, fragment: str = '') -> None:
        self.send('POST', '/url', url='about:blank')  # another fragment alone would load nothing
        self.send('POST', '/url', url=path.resolve().as_uri() + fragment)

    def run(self, expression: str) -> Any:
        return self.send('POST', '/execute/sync', script=f'return ({expression})', args=[])

    def wait(self, expression: str, seconds: float = 90) -> Any:
        """Return the expression's value once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < end, f'not within {seconds} s: {expression}'
            time.sleep(0.05)
        return value

    def element(self, selector: str) -> str:
        return self.send('POST', '/element', using='css selector', value=selector)[ELEMENT]

    def frame(self, selector: str | None) -> None:
        """Go into a frame of the page, or back to the page."""
        found = {ELEMENT: self.element(selector)} if selector else None
        self.send('POST', '/frame', id=found)

    def click(self, selector: str) -> None:
        """Press what a reader would: it must be visible, and nothing may lie on it."""
        self.send('POST', f'/element/{self.element(selector)}/click')

    def type(self, selector: str, text: str) -> None:
        self.send('POST', f'/element/{self.element(selector)}/value', text=text)

    def press(self, keys: str) -> None:
        """Press keys, wherever the focus is."""
        actions = [dict(type=f'key{way}', value=key) for key in keys for way in ('Down', 'Up')]
        self.send('POST', '/actions', actions=[dict(type='key', id='keys', actions=actions)])

    def drag(self, x: int, y: int, by: int) -> None:
        """Press the mouse at a point of the window, move it to the right, and let it go."""
        move = dict(type='pointerMove', duration=50, origin='viewport')
        actions = [dict(move, x=x, y=y), dict(type='pointerDown', button=0),
                   dict(move, x=x + by, y=y), dict(type='pointerUp', button=0)]
        self.send('POST', '/actions', actions=[dict(type='pointer', id='mouse', actions=actions)])

    def text(self, selector: str) -> str:
        return self.run(f'document.querySelector({json.dumps(selector)}).textContent')

    def resize(self, width: int, height: int) -> None:
        self.send('POST', '/window/rect', width=width, height=height)

    def screenshot(self, path: str) -> None:
        Path(path).write_bytes(base64.b64decode(self.send('GET', '/screenshot')))

    def errors(self) -> list[str]:
        """Return what the console said since the last call."""
        return [line['message'] for line in self.send('POST', '/se/log', type='browser')]


@contextlib.contextmanager
def start_browser(width: int = 1200, height: int = 900, phone: bool = False,
                  still: bool = False) -> Iterator[Browser]:
    """Start Chromium, or skip the test where it is not installed. A still one asks pages not to
    move anything, as readers can."""
    chromium, driver = shutil.which('chromium'), shutil.which('chromedriver')
    if not chromium or not driver:
        pytest.skip('there is no Chromium here: apt-get install chromium chromium-driver')
    port = free_port()
    with tempfile.TemporaryDirectory() as profile:
        options: dict[str, Any] = dict(binary=chromium, args=[
            *FLAGS, f'--user-data-dir={profile}', f'--window-size={width},{height}'])
        if still:
            options['args'].append('--force-prefers-reduced-motion')
        if phone:
            options['mobileEmulation'] = dict(deviceMetrics=dict(
                width=width, height=height, pixelRatio=2, touch=True))
        process = subprocess.Popen([driver, f'--port={port}'], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 30
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f'http://127.0.0.1:{port}/status', timeout=5).close()
                    break
                assert time.monotonic() < end, 'chromedriver does not start'
                time.sleep(0.1)
            browser = Browser(port, options)
            try:
                yield browser
            finally:
                with contextlib.suppress(AssertionError, OSError):
                    browser.send('DELETE', '')
        finally:
            process.terminate()
            process.wait()

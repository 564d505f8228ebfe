"""results/english.py: what is prose, and what is said where a package has changed."""
import shutil
import subprocess
from pathlib import Path

import pytest

from configurator import UserError
from results import english

SENTENCE = 'This sentence has more than eight words, most of them made of letters.'


@pytest.mark.parametrize(('paragraph', 'prose'), [
    (SENTENCE, True), (SENTENCE[:-1], False), ('Fewwords' * 8 + ' is too few words.', False),
    ('a = 1; b = 2; c = 3; d = 4; e = 5; f = 6; g = 7; h = 8; i = 9; j = 10.', False),
    (SENTENCE.replace('letters', 'let\ufffdters'), False)])
def test_what_is_prose(paragraph: str, prose: bool) -> None:
    assert english.is_prose(paragraph) == prose


def test_paragraphs_of_pages() -> None:
    page = ('<h1>A &amp; B</h1><p>One\n <b>two</b>.<pre>code</pre></p><script>x</script>'
            '<li>Three¶</li>')
    assert [*filter(None, english.html_paragraphs(page))] == ['A & B', 'One two.', 'Three']
    pod = '=head1 NAME\n\nUse C<code> and L<text|url> E<lt>here.\n\n  code\n'
    assert english.pod_paragraphs(pod) == ['Use code and text <here.']


def test_a_paragraph_counts_once_and_a_long_page_is_cut(tmp_path: Path) -> None:
    sentences = [SENTENCE.replace('eight', word) for word in
                 ('seven', 'nine', 'ten', 'eleven', 'twelve', 'twenty', 'thirty', 'forty')]
    (tmp_path / 'a.html').write_text(''.join(f'<p>{s}</p>' for s in sentences))
    (tmp_path / 'b.html').write_text(f'<p>{sentences[0]}</p>' * 9)
    source = english.Source('x', 'x-doc', '1', '', '.', '*.html')
    (document,) = english.read_documents(source, tmp_path, set())
    assert document == '\n\n'.join(sentences)
    long = ' '.join(sentences * 90)
    (tmp_path / 'a.html').write_text(f'<p>{long}</p>')
    parts = english.read_documents(source, tmp_path, set())
    assert [len(part) for part in parts] == [40_000, len(long) - 40_000]


@pytest.mark.skipif(not shutil.which('dpkg-deb'), reason='dpkg-deb is not here')
def test_a_changed_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tmp_path / 'build/DEBIAN/control'
    control.parent.mkdir(parents=True)
    control.write_text('Package: x-doc\nVersion: 2\nArchitecture: all\nMaintainer: a <a@b>\n'
                       'Description: pages\n')
    (tmp_path / 'build/a.html').write_text(f'<p>{SENTENCE}</p>')
    subprocess.run(['dpkg-deb', '-b', tmp_path / 'build', tmp_path / 'x-doc_2_all.deb'],
                   check=True, capture_output=True)
    monkeypatch.setattr(english, 'SOURCES', [english.Source('x', 'x-doc', '1', 'f00', '.', '*')])
    with pytest.raises(SystemExit, match=r'another text .*: x-doc 2 \(expected 1\)'):
        english.main([f'--to={tmp_path}/new', f'--packages={tmp_path}'])
    assert not (tmp_path / 'new').exists()


def test_without_packages_a_line_says_what_is_needed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(UserError, match='no apt-get: expected Debian 12'):
        english.download(tmp_path)

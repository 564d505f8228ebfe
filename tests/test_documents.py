"""What a folder holds: which files are text, rows or neither, and what is said of them. Texts are
read by prepare_slimpajama.py, with one token a byte and nothing held out."""
import csv
import gzip
import io
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from test_prepare import book, parts_of, prepare, refused, texts_in
from test_tokenizers import PAGES

import train
from configurator import UserError, build, read_options
from nanocem import documents as docs
from nanocem import prepare as prep
from nanocem import sources
from nanocem.documents import BLOCK, Reading
from running import ROOT, TINY, run_script, steps, write_data


def files(folder: Path, contents: dict[str, str | bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def texts(n: int, words: int = 60) -> list[str]:
    return [f'{k}: {book(words, seed=k)}' for k in range(n)]


def read(where: Path, *options: str) -> tuple[list[str], str]:
    """Return the documents of an input, sorted, and what is printed."""
    with TemporaryDirectory() as folder:
        made = prepare(where, Path(folder, 'out'), '--held_out=0', *options)
    return sorted(parts_of(made)[0]), made['printed']


def as_rows(rows: list[str], field: str = 'text') -> str:
    return ''.join(json.dumps({'id': n, field: text}) + '\n' for n, text in enumerate(rows))


def as_table(rows: list[str], delimiter: str = ',', field: str = 'text') -> str:
    with io.StringIO(newline='') as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(['id', field])
        writer.writerows(enumerate(rows))
        return file.getvalue()


# Text is what is text

def test_every_text_is_a_document_whatever_its_suffix(tmp_path: Path) -> None:
    suffixes = ['md', 'org', 'tex', 'srt', 'eml', 'mbox', 'html', 'py', 'c', 'xml', 'log', 'TXT']
    named = {f'notes/{n}.{suffix}': text
             for n, (suffix, text) in enumerate(zip(suffixes, texts(12), strict=True))}
    named |= {'notes/Makefile': 'all:\n\tmake\n', 'notes/shopping.txt': 'bread\nmilk\n' * 700}
    found, printed = read(files(tmp_path / 'in', named))
    assert found == sorted(named.values())
    assert re.search(r'Files: 14, [\d,]+ bytes \(2 \.txt, 1 \.md, .*, \d of other suffixes\)\n',
                     printed)
    assert 'Left out' not in printed


TEXT = book(3000)
PRINTS = random.Random(1).randbytes(3000)


@pytest.mark.parametrize('name, content, words', [
    ('a.pdf', b'%PDF-1.4\n' + PRINTS, r'a\.pdf is PDF: pdftotext \S+a\.pdf converts'),
    ('a.txt', b'%PDF-1.4\n' + PRINTS, r'a\.txt is PDF: pdftotext'),
    ('a.txt', '{\\rtf1\\ansi ' + TEXT, 'is RTF: pandoc -f rtf -t plain'),
    ('a.epub', b'PK\x03\x04' + PRINTS, r'a\.epub is zipped: pandoc -t plain \S+a\.epub -o'),
    ('a.doc', b'\xd0\xcf\x11\xe0\xa1\xb1\0\0' + PRINTS, 'is of Office: soffice --convert-to txt'),
    ('a.txt.gz', gzip.compress(TEXT.encode()), r'is compressed: unpack it first .gunzip \S+\.gz'),
    ('a.tar', b'a.txt'.ljust(257, b'\0') + b'ustar\0' + b'\0' * 249, 'is packed: .* .tar xf'),
    ('a.txt', 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n', 'Git LFS: '),
    ('a.jsonl', 'version https://git-lfs.github.com/spec/v1\nsize 9\n', 'Git LFS: git lfs pull'),
    ('a.parquet', 'version https://git-lfs.github.com/spec/v1\nsize 9\n', 'to Git LFS: git lfs'),
    ('a.txt', '/annex/objects/SHA256E-s9\n', 'is left to git-annex: git annex get'),
    ('a.txt', TEXT.encode('utf-16-le'), 'is UTF-16 without a mark of byte order: --encoding='),
    ('a.txt', TEXT.encode('utf-16-be'), '--encoding=utf-16-be reads it'),
    ('a.txt', 'a few words\0 and more', r"with NUL bytes: damaged\? tr -d '\\000' < \S+ > NEW"),
    ('a.txt', TEXT + '\0' + TEXT, 'a NUL after byte|with NUL bytes'),
    ('a.txt', 'un café noir'.encode('latin1'), 'not UTF-8 at byte 6 .*: --encoding=cp1252'),
    ('a.txt', ('naïve café ' * 99).encode() + b'\xff', 'damaged UTF-8 at byte 1,287 .*: iconv'),
    ('a.dat', PRINTS, r'a\.dat is binary: expected text'),
    ('a.txt', b'\x89PNG\r\n\x1a\n\0\0', r'is binary: expected text')])
def test_what_is_no_text_is_refused_with_what_makes_text_of_it(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    """Alone, in a folder, and where it is most of one. It is left out where it is not."""
    folder = files(tmp_path / 'in', {name: content})
    assert re.search(words, refused(folder / name, tmp_path / 'out'))
    assert re.search(words, refused(folder, tmp_path / 'out'))
    small = files(tmp_path / 'small', {f'1{name}': content, f'2{name}': content, 'a.md': 'a b c'})
    if 'binary' in words:
        found, printed = read(small)
        assert found == ['a b c'] and 'Left out: 2 binary' in printed
    else:
        assert re.search(r'small: most is not read: 2 .*--suffixes=\.md reads the rest alone, 5 b',
                         refused(small, tmp_path / 'out')) or 'a NUL' in words
    stories = texts(30, words=600)
    many = files(tmp_path / 'many', {name: content} | {f's{n}': s for n, s in enumerate(stories)})
    if 'a NUL' not in words:  # it is seen later
        found, printed = read(many)
        assert found == sorted(stories)
        size = (folder / name).stat().st_size
        assert re.search(rf'\nLeft out: 1 .*, {size:,} bytes', printed)


def test_a_converted_text_beside_its_source_is_not_missed(tmp_path: Path) -> None:
    named: dict[str, str | bytes] = {f'{n}.pdf': b'%PDF-1.4\n' + PRINTS for n in range(9)}
    folder = files(tmp_path / 'in', named | {f'{n}.txt': text for n, text in enumerate(texts(9))})
    folder = files(folder, {'b.md.gz': gzip.compress(PRINTS), 'b.md': 'a note'})
    found, printed = read(folder)
    assert found == sorted([*texts(9), 'a note']) and 'Left out: 9 PDF' in printed


@pytest.mark.parametrize('encoding', ['utf-8-sig', 'utf-16', 'utf-32', 'utf-16-be with a mark'])
@pytest.mark.parametrize('kind', ['txt', 'jsonl', 'json', 'csv', 'long'])
def test_a_mark_of_byte_order_says_the_encoding_and_is_no_text(
    tmp_path: Path, encoding: str, kind: str
) -> None:
    rows = [f'naïve 世界 👍 {text}' for text in texts(5)] if kind != 'long' else [book(40_000)]
    content = {'txt': rows[0], 'jsonl': as_rows(rows), 'csv': as_table(rows), 'long': rows[0],
               'json': json.dumps([{'text': text} for text in rows], ensure_ascii=False)}[kind]
    mark, codec = ('\ufeff', 'utf-16-be') if 'with' in encoding else ('', encoding)
    folder = files(tmp_path / 'in', {f'a.{kind}': (mark + content).encode(codec)})
    found, _ = read(folder)
    assert found == sorted(rows if kind in ('jsonl', 'csv', 'json') else rows[:1])


def test_another_encoding_reads_what_is_not_utf8(tmp_path: Path) -> None:
    """Without it one file of thirty is left out, with a line. Each file is UTF-8 or the other."""
    stories = [f'café… {text}' for text in texts(30, 3000)]
    named: dict[str, str | bytes] = {f'{n:02d}.srt': text for n, text in enumerate(stories)}
    named['17.srt'] = stories[17].replace('世界', '').encode('cp1252')
    named['18.srt'] = (book(50_000) + stories[18].replace('世界', 'é')).encode('cp1252', 'replace')
    folder = files(tmp_path / 'in', named)
    found, printed = read(folder)
    expected = {name: content for name, content in named.items() if isinstance(content, str)}
    assert found == sorted(expected.values())
    assert re.search(r'Files: 28, .*\nLeft out: 2 not UTF-8, .* \(2 \.srt\): --encoding=', printed)
    found, printed = read(folder, '--encoding=cp1252')
    expected |= {name: named[name].decode('cp1252') for name in ('17.srt', '18.srt')}
    assert found == sorted(expected.values()) and 'Left out' not in printed
    assert 'encoding=klingon: expected the name of one' in refused(
        folder, tmp_path / 'out', '--encoding=klingon')
    assert "is neither UTF-8 nor ascii: the name of another --encoding" in refused(
        folder / '17.srt', tmp_path / 'out', '--encoding=ascii')
    # UTF-16 without a mark of byte order raises another error than others
    assert "is neither UTF-8 nor utf-16: the name of another" in refused(
        folder / '17.srt', tmp_path / 'out', '--encoding=utf-16')


@pytest.mark.parametrize('kind', ['jsonl', 'csv', 'json', 'txt'])
def test_rows_and_texts_of_another_encoding(tmp_path: Path, kind: str) -> None:
    rows = [f'{n} çà et là' for n in range(5)]
    content = {'jsonl': '\n'.join(f'{{"text": "{row}"}}' for row in rows), 'csv': as_table(rows),
               'json': json.dumps([{'text': row} for row in rows], ensure_ascii=False),
               'txt': '<|x|>'.join(rows)}[kind]
    where = files(tmp_path / 'in', {f'a.{kind}': content.encode('latin1')}) / f'a.{kind}'
    options = ['--encoding=latin1', *(['--separator=<|x|>'] if kind == 'txt' else [])]
    assert read(where, *options)[0] == rows


def test_utf8_with_a_damaged_byte_is_not_read_as_another_encoding(tmp_path: Path) -> None:
    where = files(tmp_path, {'a.txt': ('naïve café ' * 9000).encode() + b'\xff'}) / 'a.txt'
    assert 'is damaged UTF-8: iconv -c' in refused(where, tmp_path / 'out', '--encoding=cp1252')


# Rows are read as rows, wherever they are

ROWS = [f'{n}: {text},\n"so", he said;\t{n}' for n, text in enumerate(texts(40))]


@pytest.mark.parametrize('name, content', [
    ('a.txt', as_rows(ROWS)), ('RC_2015-01', as_rows(ROWS)), ('a.log', '\n\n' + as_rows(ROWS)),
    ('a.jsonl', gzip.compress(as_rows(ROWS).encode())), ('a.jsonl.gz', as_rows(ROWS)),
    ('a.json', json.dumps([{'id': n, 'text': row} for n, row in enumerate(ROWS)], indent=1)),
    ('a.txt', json.dumps([{'id': n, 'text': row} for n, row in enumerate(ROWS)])),
    ('a.json.gz', gzip.compress(json.dumps([{'text': row} for row in ROWS]).encode())),
    ('a.csv', as_table(ROWS)), ('a.csv', as_table(ROWS, ';')), ('a.TSV', as_table(ROWS, '\t')),
    ('a.csv.gz', gzip.compress(as_table(ROWS).encode())),
    ('a.csv', as_table(ROWS, ';').replace('id;', '"id, of all, in order";', 1)),
    ('a.csv', as_table(ROWS).replace('\r\n', '\n'))], ids=range(14))
def test_rows_are_rows_wherever_they_are(tmp_path: Path, name: str, content: str | bytes) -> None:
    folder = files(tmp_path / 'in', {name: content})
    assert read(folder)[0] == sorted(ROWS) == read(folder / name)[0]
    beside = files(folder, {'b.txt': 'a text beside rows', 'README.md': 'about them'})
    found, printed = read(beside)
    assert found == sorted([*ROWS, 'a text beside rows'])
    assert 'Left out: 1 about the rows, 10 bytes (1 .md)\n' in printed


@pytest.mark.parametrize('kind', ['csv', 'json', 'jsonl', 'txt'])
def test_rows_that_are_longer_than_a_block(tmp_path: Path, kind: str) -> None:
    rows = [book(n, seed=n) for n in (1, 90_000, 3, 400_000)]
    content = {'csv': as_table(rows), 'jsonl': as_rows(rows), 'txt': as_rows(rows[::-1]),
               'json': json.dumps([{'text': row} for row in rows])}[kind]
    assert read(files(tmp_path / 'in', {f'a.{kind}': content}))[0] == sorted(rows)


def test_the_values_of_an_array_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However its text is cut into blocks. Arrays with seed 5."""
    rng = random.Random(5)
    for _ in range(60):
        values = [{'text': 'x"]}' * rng.randrange(30), 'n': [rng.random()] * rng.randrange(9)}
                  for _ in range(rng.randrange(1, 30))]
        text = json.dumps(values, indent=rng.choice([None, 1, 4]))
        monkeypatch.setattr(docs, 'BLOCK', rng.randrange(2, 90))
        with io.StringIO(text) as file:
            assert [*docs.array_values(file.read)] == values
        for wrong in (text[:-1], text[:-3], text + '[', text + 'x'):
            with pytest.raises(json.JSONDecodeError):
                [*docs.array_values(io.StringIO(wrong).read)]


@pytest.mark.parametrize('name, content, words', [
    ('a.json', json.dumps([{'text': 'a'}, {'title': 'b'}]), r'a.json, row 2: expected {"text": '),
    ('a.json', json.dumps([{'text': 'a'}, {'text': ['b']}]), 'row 2: expected text .*, not a list'),
    ('a.jsonl', as_rows(['a']) + '{"text": {"b": 1}}', 'line 2: expected text in .* not an obj'),
    ('a.json', json.dumps([{'text': 'a'}]) + '\n[]', 'a.json is no array of rows: more text aft'),
    ('a.json', json.dumps([{'text': 'a' * 99}])[:-20], 'a.json is no array of rows: Unterminated'),
    ('a.csv', as_table(['a', 'b']) + '1,2,3\r\n', 'a.csv: CSV parse error: .*Expected 2 colum'),
    ('a.jsonl', as_rows(['a'] * 4000) + '\0' * 99, r'line 4001: expected .* not b.\\x00\\x00')])
def test_damaged_rows_are_refused_with_their_place(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    folder = files(tmp_path / 'in', {name: content})
    assert re.search(words, refused(folder, tmp_path / 'out'))


# What describes others is left out

def test_what_describes_the_others_is_left_out(tmp_path: Path) -> None:
    """Beside texts, or beside rows that have the column."""
    stories = texts(30)
    about: dict[str, str | bytes] = {
        'metadata.json': json.dumps({'title': 'Boats', 'n': 30}), 'tsconfig.json': '{\n // so\n}',
        'indented.json': json.dumps({'title': 'Boats'}, indent=1), 'list.json': '["0.txt", "1"]',
        'numbers.json': '[1, 2]', 'one.json': '1', 'log.jsonl': '{"step": 1}\n{"step": 2}\n',
        'line.jsonl': '{"step": 1}\n', 'index.csv': 'name,size\n0.txt,9\n',
        'map.geojson': '{"a": {}}'}
    for kind in ('texts', 'rows'):
        named = {f'{n:02d}.md': text for n, text in enumerate(stories)}
        named = named if kind == 'texts' else {'a.jsonl': as_rows(stories)}
        found, printed = read(files(tmp_path / kind, named | about))
        assert found == sorted(stories)
        left = printed.partition('Left out: ')[2].partition('\n')[0]
        counts = Counter(re.sub(r', only \w+', '', words) for words in re.findall(
            r'(?:\A|; )(\d+ [\w ,"]+?), \d+ bytes', left))
        assert counts == {'6 JSON without rows': 1, '3 without "text" in its rows': 1,
                          '1 JSON, a list of texts': 1}, left


def test_our_own_runs_and_data_are_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """train.py --text=. reads the same text again after a run, beside models and piped text."""
    monkeypatch.chdir(tmp_path)
    stories = texts(30)
    files(tmp_path, {f'{n:02d}.md': text for n, text in enumerate(stories)})
    shown = [*TINY, '--text=.', '--tokenizer=byte', steps(1)]
    assert train.main(shown) == 0
    first = capsys.readouterr().out
    write_data(tmp_path / 'more/data')
    files(tmp_path, {'data/stdin-0123456789abcdef.txt': 'piped', 'out/log/x/README.txt': 'about'})
    (tmp_path / 'pretrained').mkdir()
    (tmp_path / 'pretrained/cem').symlink_to(ROOT / 'pretrained/cem')
    assert train.main(shown) == 0
    second = capsys.readouterr().out
    assert 'Files: 30,' in first and 'Preparing' in first
    assert re.search(r'Files: 31, .*\nLeft out: .*5 of our own runs and data', second), second
    for folder in ('out/nano', 'more/data', 'pretrained/cem'):
        if os.path.isdir(folder):
            assert 'is a run or a data folder of nanoCEM' in refused(folder, tmp_path / 'none')
    source = sources.find_source('.', Reading())
    assert {*source.files} == {f'{n:02d}.md' for n in range(30)} | {'out/log/x/README.txt'}


def test_a_checkout_of_code(tmp_path: Path) -> None:
    """Code is text. Hidden files, installed packages and caches are not entered."""
    code = {f'src/m{n}.py': f'def f{n}():\n    """{text}"""\n' for n, text in enumerate(texts(20))}
    code |= {'README.md': '# Boats', 'requirements.txt': 'numpy\n', 'logo.svg': '<svg/>'}
    other: dict[str, str | bytes] = {
        '.git/config': '[core]', '.hidden': 'x', 'node_modules/a/index.js': 'x', 'src/.idea/a': 'x',
        'src/__pycache__/m.pyc': b'\0\0', 'venv/pyvenv.cfg': 'x', 'venv/lib/a.py': 'x',
        'target/CACHEDIR.TAG': 'x', 'target/a.d': 'x', 'build/a.o': b'\x7fELF\0', 'a.png': b'\0\0'}
    found, printed = read(files(tmp_path / 'in', code | other))
    assert found == sorted(code.values())
    assert 'Left out: 3 hidden; 4 of installed packages or a cache; 2 binary, 7 bytes' in printed


def test_the_suffixes_that_are_read(tmp_path: Path) -> None:
    folder = files(tmp_path / 'in', {'a.md': 'a', 'b.ORG': 'b', 'c.py': 'c', 'Makefile': 'd',
                                     'e.pdf': '%PDF', 'f.csv': 'x\n1\n', 'g.tar.gz': b'\x1f\x8b'})
    assert read(folder, '--suffixes=.md,.org')[0] == ['a', 'b']
    found, printed = read(folder, '--suffixes=md,*.py')
    assert found == ['a', 'c'] and 'Left out: 5 without one of the suffixes, ' in printed
    assert read(folder, '--suffixes=')[0] == ['d']  # as most is not read, says it
    assert 'holds no text: 7 without one of the suffixes' in refused(
        folder, tmp_path / 'out', '--suffixes=.txt')
    where = str(folder)
    assert [texts_in(where, suffixes=(end,)) for end in ('.md', '.py')] == [['a'], ['c']]


def test_what_is_left_out_is_said_where_a_text_is_evaluated(tmp_path: Path) -> None:
    folder = files(tmp_path / 'in', {'a.md': 'a', 'b.txt': 'b' * 9000, 'c.pdf': '%PDF'})
    with redirect_stderr(io.StringIO()) as said:
        assert texts_in(str(folder)) == ['a', 'b' * 9000]
    assert 'in is not read whole. Left out: 1 PDF, 4 bytes (1 .pdf): pdftotext' in said.getvalue()


# Folders of many kinds

def test_a_folder_is_entered_once(tmp_path: Path) -> None:
    """Whatever links lead to it: of packages to one another, to itself, to the newest."""
    named = {f'p{n}/README.txt': text for n, text in enumerate(texts(8))}
    folder = files(tmp_path / 'in', named)
    for a, b in itertools.permutations(range(8), 2):
        (folder / f'p{a}/deps').mkdir(exist_ok=True)
        (folder / f'p{a}/deps/p{b}').symlink_to(f'../../p{b}')
    for link, to in (('latest', 'p7'), ('self', '.'), ('up', '..'), ('p0/root', '../../in'),
                     ('loop', 'loop'), ('gone', '.git/annex/objects/gone')):
        (folder / link).symlink_to(to)
    (folder / 'elsewhere').symlink_to(files(tmp_path / 'other', {'a.txt': 'linked'}))
    begin = time.monotonic()
    found, printed = read(folder)
    assert found == sorted([*texts(8), 'linked']) and time.monotonic() - begin < 20
    assert 'Files: 9, ' in printed and 'Left out: 2 no file, or a link that leads now' in printed
    names = [*sources.find_source(str(folder), Reading()).files]
    assert names == [*named, 'elsewhere/a.txt']  # by their own names, where they have one


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would never end, nor would a hole of a terabyte."""
    folder = files(tmp_path / 'in', {'a.txt': 'text', 'sparse.txt': b'', 'sparse.bin': b''})
    os.mkfifo(folder / 'pipe')
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / 'socket'))
    (folder / 'zero').symlink_to('/dev/zero')
    for name in ('sparse.txt', 'sparse.bin'):
        os.truncate(folder / name, 1 << 40)
    for options in ([], ['--encoding=cp1252'], ['--separator=e']):
        printed = read(folder, *options)[1]
        assert re.search(r'Left out: .*3 no file', printed) and '2 binary, 2,199,023' in printed
    with open(folder / 'begins.txt', 'w') as file:
        file.write(book(20_000))
    os.truncate(folder / 'begins.txt', 1 << 40)
    assert re.search('begins.txt has a NUL after byte ', refused(folder, tmp_path / 'out'))


@pytest.mark.parametrize('change', ['shorter', 'longer', 'edited'])
@pytest.mark.parametrize('name', ['a.txt', 'a.jsonl'])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    """It may end earlier, or its documents be divided in two ways."""
    path = files(tmp_path / 'in', {name: book(90_000) if name == 'a.txt' else as_rows(texts(3000))})
    path /= name
    size, append = path.stat().st_size, prep.Writer.append

    def damage(*args: Any) -> None:
        monkeypatch.undo()
        if change == 'longer':
            with open(path, 'a') as file:
                file.write('{"text": "more"}\n')
        else:
            os.truncate(path, size // 2 if change == 'shorter' else size)
            os.utime(path, (1, 1))
        append(*args)

    monkeypatch.setattr(prep.Writer, 'append', damage)
    assert re.search('a.* (became shorter|has changed) while it was read|a.jsonl, line .* expected',
                     refused(path, tmp_path / 'out'))


def test_a_text_that_is_cut_does_not_hang(tmp_path: Path) -> None:
    path = files(tmp_path, {'log.txt': 'the sea was calm ' * 700_000}) / 'log.txt'
    blocks = iter(docs.TextFile(str(path)))
    next(blocks)
    os.truncate(path, BLOCK)
    with pytest.raises(UserError, match=r'log\.txt became shorter while it was read'):
        for _ in blocks:
            pass
    with open(path, 'a') as file:  # what is appended meanwhile is not read
        file.write('more')
        file.flush()
        for block in docs.TextFile(str(path)):
            file.write(block)
            file.flush()
    assert path.stat().st_size < 4 * BLOCK


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe512'])
def test_a_document_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """After a look at its first block: for the splits and a tokenizer, and for its tokens."""
    named = {f'{n}.md': text for n, text in enumerate([*texts(30), *PAGES])}
    folder = files(tmp_path / 'in', named)
    real, opened = open, Counter()

    def note(path: Any, *args: Any, **options: Any) -> Any:
        if folder in Path(str(path)).parents:
            opened[path] += 1
        return real(path, *args, **options)

    monkeypatch.setattr('builtins.open', note)
    prepare(folder, tmp_path / 'out', '--held_out=0.1', f'--tokenizer={tokenizer}')
    assert len(opened) == 30 + len(PAGES) and {*opened.values()} == {3}


@pytest.mark.parametrize('splits', ['names', 'none'])
def test_names_of_splits_can_be_switched_off(tmp_path: Path, splits: str) -> None:
    """The story "The Test" among sixty is then a story."""
    titles = ['The Test', 'A Valid Reason', *(f'Story {n}' for n in range(58))]
    folder = files(tmp_path / 'in', {f'{title}.txt': text for title, text
                                     in zip(titles, texts(60), strict=True)})
    made = prepare(folder, tmp_path / 'out', '--held_out=0.1', f'--splits={splits}')
    assert ('--splits=none reads them as any other' in made['printed']) == (splits == 'names')
    test = parts_of(made)[2]
    assert (test == texts(60)[:1]) == (splits == 'names') and len(test) > (splits == 'none')


def test_each_way_of_reading_has_its_own_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path / 'in', {f'{n}.md': text for n, text in enumerate(texts(30, 200))})
    files(tmp_path / 'in', {'b.csv': as_table(ROWS), 'c.csv': as_table(ROWS, field='body')})
    readings = [Reading(), Reading(column='body'), Reading(suffixes=('.md',)),
                Reading(encoding='latin1'), Reading(splits='none'), Reading(separator='energy')]
    made = [prep.find_data('', 'in', 'byte', reading=reading) for reading in readings]
    assert len({*made}) == len(readings)
    assert made == [prep.find_data('', 'in', 'byte', reading=reading) for reading in readings]


@pytest.mark.parametrize('option', ['column=a', 'encoding=cp1252', 'suffixes=.md', 'splits=none'])
def test_a_resumed_run_reads_its_text_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / 'data')
    with pytest.raises(SystemExit, match=f'{option.partition("=")[0]} is for --text=FILE'):
        train.main([*TINY, '--data=data', f'--{option}'])
    files(tmp_path / 'in', {'a.md': book(3000), 'b.csv': as_table(texts(9), field='a')})
    assert train.main([*TINY, '--text=in', '--tokenizer=byte', f'--{option}', '--out_dir=o',
                       steps(2), '--stop_step=1']) == train.STOPPED
    with pytest.raises(SystemExit, match=r'the run in o has'):
        train.main(['--out_dir=o', '--init_from=resume', '--device=cpu', '--column=b',
                    '--splits=names', '--encoding=ascii', '--suffixes=.csv'])
    assert train.main(['--out_dir=o', '--init_from=resume', '--device=cpu']) == 0


@pytest.mark.parametrize('name, made', [('.notes', 'notes'), ('..a.b', 'a'), ('.', 'in')])
def test_a_data_folder_has_the_name_of_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, made: str
) -> None:
    """A hidden folder's is no hidden one, nor data/ itself."""
    folder = files(tmp_path / 'in', {f'{name}/{n}.md': text for n, text in enumerate(texts(30))})
    monkeypatch.chdir(folder)
    assert prep.PrepareConfig(input=name).out_dir == f'data/{made}'
    done = run_script(ROOT / 'prepare_slimpajama.py', f'--input={name}', '--tokenizer=byte',
                      '--held_out=0.1', cwd=folder)
    assert done.returncode == 0 and (folder / f'data/{made}/meta.json').exists(), done.stderr


def test_documents_that_are_short_are_said(tmp_path: Path) -> None:
    for name, rows in (('chat', ['so it is'] * 30), ('letters', ['so it is ' * 12] * 30)):
        content = json.dumps([{'text': row} for row in rows])
        _, printed = read(files(tmp_path / name, {'a.json': content}))
        assert ('A document has 8 characters on average, and no' in printed) == (name == 'chat')


def test_separators_take_time_in_proportion_to_a_text(tmp_path: Path) -> None:
    """However long a document is, and wherever its blocks end."""
    seconds = []
    for size in (2, 16):
        text = 'words of one document ' * (size * 45_000)
        path = files(tmp_path, {f'{size}.txt': f'a<|x|>{text}<|x|>b'}) / f'{size}.txt'
        begin = time.process_time()
        found = [*docs.split_text(str(path), 'utf-8', '<|x|>')]
        seconds.append(time.process_time() - begin)
        assert found == ['a', text, 'b']
    assert seconds[1] < 24 * seconds[0]


def test_evaluating_a_text_needs_little_memory(tmp_path: Path) -> None:
    """Less than a byte for each byte of it, and not thirty."""
    path = files(tmp_path, {'a.txt': 'some words ' * 2_000_000}) / 'a.txt'
    script = ('import resource\n'
              'from nanocem.documents import Reading\n'
              'from nanocem.tokenizers import ByteTokenizer, read_text_sequences\n'
              'before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n'
              f'read_text_sequences({str(path)!r}, ByteTokenizer(), 64, "", Reading())\n'
              'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n')
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout) * 1024 < 22_000_000, done.stdout + done.stderr


# What docs/data.md says

PAGE = (ROOT / 'docs/data.md').read_text()
COMMANDS = re.findall(r'^    (python train\.py --text=.*?)(?: +#.*)?$', PAGE, re.MULTILINE)


@pytest.fixture(scope='module')
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's commands name."""
    folder, stories = tmp_path_factory.mktemp('brought'), texts(60, 200)
    mails = [f'From: a@example.org\nSubject: boat {n}\nContent-Type: text/plain; charset=latin1\n'
             f'\nÄlter: {text.replace("世界", "")}\n'.encode('latin1', 'replace')
             for n, text in enumerate(stories)]
    named: dict[str, str | bytes] = {
        'book.txt': book(9000), 'Inbox.mbox': b''.join(b'From a\n%s\n' % mail for mail in mails),
        'reviews.csv': as_table(stories, field='review'),
        'posts.jsonl': as_rows(stories, field='body'), 'stories.txt': '\n***\n'.join(stories),
        'result.json': json.dumps({'name': 'Boats', 'messages': [
            {'from': 'Ada', 'text': 'is it late?'},
            {'from': 'Dov', 'text': ['see ', {'type': 'link', 'text': 'this'}]}]})}
    for n, (text, mail) in enumerate(zip(stories, mails, strict=True)):
        named |= {f'NOTES/{n}.md': text, f'CHECKOUT/{n}.py': text, f'CHECKOUT/{n}.c': text,
                  f'SUBTITLES/{n}.srt': (text.encode() if n else 'café, façade'.encode('cp1252')),
                  f'MAIL/{n}.eml': mail}
    return files(folder, named)


@pytest.mark.parametrize('command', COMMANDS)
def test_the_pages_commands_read_what_they_say(
    command: str, brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the sixty texts is a document. A book has eight parts in val and in test."""
    monkeypatch.chdir(brought)
    words = subprocess.run(['bash', '-c', command.replace('python train.py', r'printf "%s\0"')],
                           capture_output=True, text=True, check=True).stdout.split('\0')[:-1]
    cfg = build(train.TrainConfig, read_options(words, train.TrainConfig))
    made = prep.find_data('', cfg.text, 'byte', reading=Reading.of(cfg))
    meta = json.loads(Path(made, 'meta.json').read_text())
    found = sum(split['documents'] for split in meta['splits'].values())
    assert found == (60 if 'book' not in command else 8 + 8 + 9)
    assert len(COMMANDS) > 7


@pytest.mark.skipif(not shutil.which('jq'), reason='needs jq')
def test_the_pages_line_for_chats_makes_one_document(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(brought)
    lines = re.search(r'^    (jq .*?chat\.jsonl)$', PAGE, re.MULTILINE | re.DOTALL)[1]
    subprocess.run(['bash', '-c', lines], check=True)
    assert texts_in('chat.jsonl') == ['Ada: is it late?\nDov: see this']


def test_the_pages_lines_for_mail_keep_its_words(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(brought)
    lines = re.search(r'^    import json, mailbox\n(    .*\n)+', PAGE, re.MULTILINE)[0]
    with redirect_stdout(io.StringIO()) as rows:
        exec(textwrap.dedent(lines), {})
    Path('mail.jsonl').write_text(rows.getvalue())
    found = texts_in('mail.jsonl')
    assert len(found) == 60 and all(text.startswith('Subject: boat') for text in found)
    assert all('Älter: ' in text and 'charset' not in text for text in found)


@pytest.mark.parametrize('name, content', [
    ('a.txt', ('naïve café ' * 99).encode() + b'\xff'), ('a.txt.gz', gzip.compress(TEXT.encode())),
    ('a.txt', f'{TEXT}\0'), ('a.txt', TEXT.encode('utf-16-le')),
    ('a.srt', 'un café noir'.encode('cp1252'))], ids=range(5))
def test_remedies_help(tmp_path: Path, name: str, content: bytes | str) -> None:
    """What is said is done, and the result is read."""
    path = files(tmp_path / 'in', {name: content}) / name
    said = refused(path, tmp_path / 'out')
    option = re.search(r'--encoding=[\w-]+', said)
    command = re.search(r'((tr|iconv) .*? NEW|gunzip [^,]+)', said)
    assert option or command, said
    if command:
        subprocess.run(['bash', '-c', command[0].replace('NEW', 'NEW.txt')], cwd=tmp_path,
                       check=name.endswith('.gz'))
    read_again = [path] if option else [*tmp_path.glob('NEW.txt'), *(tmp_path / 'in').glob('a.txt')]
    found, _ = read(read_again[0], *([option[0]] if option else []))
    assert len(found) == 1 and len(found[0]) > 10

"""What is read of files and folders, and what is said of the rest. Texts are read by
prepare_slimpajama.py, with one token per byte and nothing held out."""
import csv
import gzip
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_prepare import numbered, parts_of, prepare, refused
from test_tokenizers import PAGES

import train
from configurator import UserError, build, read_options
from nanocem import documents as docs
from nanocem import prepare as prep
from nanocem.documents import Reading
from running import RESUME, ROOT, TINY, run_script, steps, write_data


def files(folder: Path, contents: dict[str, str | bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def texts(n: int, words: int = 60) -> list[str]:
    """Texts of random words, some with commas, quotes, line ends and other scripts."""
    choice = ['of ', 'energy, ', 'the\n', 'naïve ', '"minimum". ', '世界 ', "it's; ", 'so\r\n']
    return [f'{k}: {"".join(random.Random(k).choices(choice, k=words))}.' for k in range(n)]


def read(where: Path, *options: str) -> tuple[list[str], str]:
    """Return the documents of an input, sorted, and what is printed."""
    with TemporaryDirectory() as folder:
        made = prepare(where, Path(folder, 'out'), '--held_out=0', *options)
    return sorted(parts_of(made)[0]), made['printed']


def read_by_evaluate(path: Path | str, **reading: Any) -> list[str]:
    return [''.join(blocks) for blocks in docs.text_documents(str(path), Reading(**reading))]


def as_rows(rows: list[str], field: str = 'text') -> str:
    return ''.join(json.dumps({'id': n, field: text}) + '\n' for n, text in enumerate(rows))


# Files

def test_a_folder_gives_its_rows_or_else_txt_and_md(tmp_path: Path) -> None:
    """What is hidden, installed, ours or no regular file is not there at all."""
    stories = texts(30)
    folder = files(tmp_path / 'in', {f'{n:02d}.{"md" if n % 2 else "TXT"}': text
                                     for n, text in enumerate(stories)})
    files(folder, {'.git/a.txt': 'x', '.b.txt': 'x', 'node_modules/c/README.md': 'x' * 99,
                   'out/a/config.json': '{}', 'out/a/log.jsonl': '{"text": "x"}',
                   'export/config.json': '{}', 'export/model.safetensors': 'x' * 99,
                   'logo.png': b'\x89PNG', 'a.py': 'import os', 'Makefile': 'all:'})
    write_data(folder / 'data/notes')
    os.mkfifo(folder / 'pipe.txt')
    (folder / 'gone.txt').symlink_to('nowhere')
    found, printed = read(folder)
    assert found == sorted(stories) == sorted(read_by_evaluate(folder))
    size = sum(len(text.encode()) for text in stories[::2]), sum(
        len(text.encode()) for text in stories[1::2])
    for n, suffix in enumerate(('txt', 'md')):
        assert f'15 .{suffix}, {size[n]:,} bytes' in printed
    assert 'Left out: 1 .py, 9 bytes; 1 without suffix, 4 bytes; 1 .png, 4 bytes\n' in printed
    rows = texts(90)
    files(folder, {'deep/a.jsonl': as_rows(rows[:50]), 'deep/b.json': json.dumps(
        [{'text': text} for text in rows[50:]])})
    found, printed = read(folder)
    assert found == sorted(rows)
    assert 'Left out: 15 .md' in printed or 'Left out: 15 .txt' in printed
    for ours in ('data/notes', 'out/a'):
        assert 'has nothing to read: hidden' in refused(folder / ours, tmp_path / 'no')


@pytest.mark.parametrize('suffixes, found', [
    ('.md,.org', 'ab'), ('md,*.py', 'ac'), ('', 'd'), ('.Jsonl,.md', 'afg'), ('.py,', 'cd')])
def test_the_suffixes_that_are_read(tmp_path: Path, suffixes: str, found: str) -> None:
    """Those of files may be in capitals, and packed. Rows and texts are read together if named."""
    folder = files(tmp_path / 'in', {
        'a.md': 'a', 'b.ORG': 'b', 'c.py': 'c', 'Makefile': 'd', 'e.pdf': '%PDF' * 99,
        'f.jsonl': as_rows(['f']), 'g.jsonl.gz': gzip.compress(as_rows(['g']).encode())})
    assert read(folder, f'--suffixes={suffixes}')[0] == [*found]
    assert sorted(read_by_evaluate(folder, suffixes=tuple(suffixes.split(',')))) == [*found]


def test_more_left_out_than_read_is_refused_with_the_suffixes(tmp_path: Path) -> None:
    notes = texts(9)
    folder = files(tmp_path / 'in', {f'{n}.md': text for n, text in enumerate(notes)})
    size = sum(len(text.encode()) for text in notes)
    files(folder, {'a.png': b'\x89' * size})
    with redirect_stderr(io.StringIO()) as said:
        assert sorted(read_by_evaluate(folder)) == read(folder)[0] == sorted(notes)
    assert f'in is not read whole. Left out: 1 .png, {size:,} bytes' in said.getvalue()
    files(folder, {'b.PNG': b'1', 'c.pdf': b'12'})
    words = (rf': 9 .md, {size:,} bytes would be read, and more left out \(2 .png, {size + 1:,} '
             r'bytes; 1 .pdf, 2 bytes\). Name what to')
    said = refused(folder, tmp_path / 'out')
    assert re.search(words, said) and said.endswith('--suffixes=.png,.md,.pdf')
    assert read(folder, '--suffixes=.md')[0] == sorted(notes)
    said = refused(folder, tmp_path / 'out', '--suffixes=.txt')
    assert 'nothing would be read, and more left out (2 .png' in said
    assert said.endswith('--suffixes=.png,.md,.pdf')


def test_a_folder_is_entered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever links lead to it: of packages to one another, to itself, to its parent."""
    folder = files(tmp_path / 'in', {f'p{n}/README.txt': text for n, text in enumerate(texts(8))})
    for a, b in itertools.permutations(range(8), 2):
        (folder / f'p{a}/deps').mkdir(exist_ok=True)
        (folder / f'p{a}/deps/p{b}').symlink_to(f'../../p{b}')
    for link, to in (('self', '.'), ('up', '..'), ('p0/root', '../../in'), ('loop', 'loop')):
        (folder / link).symlink_to(to)
    (folder / 'elsewhere').symlink_to(files(tmp_path / 'other', {'a.txt': 'linked'}))
    assert read(folder)[0] == sorted([*texts(8), 'linked'])

    def scandir(path: str) -> None:
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr('os.scandir', scandir)
    with pytest.raises(UserError, match='Permission denied'):
        docs.list_folder(str(folder))


def pipe_into(fd: int, file: Path) -> None:
    """Let this process read from `fd` what another one writes into a pipe."""
    with subprocess.Popen(['cat', file], stdout=subprocess.PIPE).stdout as pipe:
        os.dup2(pipe.fileno(), fd)


@pytest.mark.parametrize('content', [as_rows(texts(300)), numbered(9000)], ids=['rows', 'text'])
def test_a_pipe_is_kept_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Equal content gives the same file, so that its data folder is found again."""
    monkeypatch.chdir(tmp_path)
    source = files(tmp_path, {'a.jsonl' if content[0] == '{' else 'a.txt': content,
                              'empty': ''}) / ('a.jsonl' if content[0] == '{' else 'a.txt')
    script, options = ROOT / 'prepare_slimpajama.py', ('--tokenizer=byte', '--held_out=0.1')
    kept, changed = set(), set()
    for _ in range(2):
        done = run_script(script, '--input=-', *options, cwd=tmp_path,
                          before=partial(pipe_into, 0, source))
        assert done.returncode == 0, done.stderr
        kept.add(re.search(r'kept as (data/\S+)', done.stdout)[1])
        changed.add(Path(*kept).stat().st_mtime_ns)
    (path,) = map(Path, kept)
    assert path.name[0] == '.' and path.suffix == source.suffix and len(changed) == 1
    made = prepare(source, tmp_path / 'out', '--held_out=0.1')
    for name, shard in made['shards'].items():
        assert Path('data', path.stem[1:], name).read_bytes() == shard
    empty = run_script(script, '--input=-', cwd=tmp_path,
                       before=partial(pipe_into, 0, tmp_path / 'empty'))
    assert empty.returncode == 1 and 'gave no text' in empty.stderr
    os.mkfifo(tmp_path / 'fifo.txt')
    assert 'fifo.txt: no such file or folder (standard input is -)' in refused(
        tmp_path / 'fifo.txt', tmp_path / 'none')
    assert [*Path('data').glob('.*')] == [path]


def test_a_run_on_standard_input_is_resumed(tmp_path: Path) -> None:
    def train(*options: str) -> str:
        done = run_script(ROOT / 'train.py', *options, cwd=tmp_path,
                          before=partial(pipe_into, 0, tmp_path / 'book'))
        assert done.returncode in (0, 75), done.stderr
        return done.stdout

    (tmp_path / 'book').write_text(numbered(9000))
    train(*TINY, '--text=-', '--tokenizer=byte', steps(4), '--stop_step=2', '--out_dir=out/a')
    (tmp_path / 'book').write_text('')
    config = json.loads((tmp_path / 'out/a/config.json').read_text())['train']
    assert (tmp_path / config['text']).read_text() == numbered(9000)
    shutil.rmtree(tmp_path / config['data'])  # made again from what was kept
    assert 'resuming after step 2' in train(RESUME, '--out_dir=out/a')


def test_a_piped_prompt_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / 'a').write_text('The river')
    done = run_script(ROOT / 'sample.py', f'--out_dir={ROOT}/pretrained/cem', '--prompt_file=-',
                      '--tokens=3', '--device=cpu', cwd=tmp_path,
                      before=partial(pipe_into, 0, tmp_path / 'a'))
    assert done.stdout.startswith('The river') and [*tmp_path.iterdir()] == [tmp_path / 'a']


def test_models_are_compared_on_standard_input(tmp_path: Path) -> None:
    """It is read once, and each model gets all of it."""
    (tmp_path / 'a').write_text('The river runs to the sea.')
    run = f'{ROOT}/pretrained/cem'
    done = run_script(ROOT / 'evaluate.py', f'--compare={run},{run}', '--text=-', '--device=cpu',
                      cwd=tmp_path, before=partial(pipe_into, 0, tmp_path / 'a'))
    assert done.stdout.count(f'| {run} ') == 2, done.stderr
    assert done.stdout.count('Read 26 bytes') == 1


# Rows

def test_a_table_is_what_pythons_csv_says(tmp_path: Path) -> None:
    """With quotes, line ends and nothing in its cells, in any order of the columns."""
    rng = random.Random(1)
    rows = [['id', 'review', 'stars']]
    for n, text in enumerate(texts(3000)):
        rows.append([str(n), rng.choice([text, '', 'NA', 'null', ' ']), rng.choice(['5', '"4"'])])
    for delimiter, name, quoting in ((',', 'a.csv', csv.QUOTE_ALL), (';', 'a.csv', 0),
                                     ('\t', 'a.tsv', 0)):
        with open(tmp_path / name, 'w', newline='', encoding='utf-8-sig') as file:
            csv.writer(file, delimiter=delimiter, quoting=quoting).writerows(rows)
        with open(tmp_path / name, newline='', encoding='utf-8-sig') as file:
            right = [row['review'] for row in csv.DictReader(file, delimiter=delimiter)]
        found, printed = read(tmp_path / name, '--column=review')
        assert found == sorted(filter(None, right))
        assert f'{right.count(""):,} of 3,000 rows have no text' in printed


@pytest.mark.parametrize('dump', [
    lambda rows: json.dumps(rows), lambda rows: json.dumps(rows, indent=1),
    lambda rows: '\n\n'.join(map(json.dumps, rows)), lambda rows: json.dumps(rows[0], indent=1),
    lambda rows: ''.join(json.dumps(row, indent=1) for row in rows)])
def test_a_json_is_an_array_or_values_that_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dump: Callable[[Any], str]
) -> None:
    """However its text is cut into blocks, and however long a value is. Values with seed 5."""
    rng = random.Random(5)
    for _ in range(30):
        rows = [{'text': 'x"]}' * rng.randrange(1, 30), 'n': [rng.random()] * rng.randrange(9)}
                for _ in range(rng.randrange(2, 30))]
        content = dump(rows)
        right = rows if content != dump(rows[:1]) else rows[:1]
        monkeypatch.setattr(docs, 'BLOCK', rng.randrange(2, 90))
        assert [*docs.json_values(io.StringIO(content).read)] == right
        for wrong in (content[:-3], content + '['):
            with pytest.raises(json.JSONDecodeError):
                [*docs.json_values(io.StringIO(wrong).read)]
    monkeypatch.undo()
    rows = [{'text': text} for text in [numbered(90_000), 'a', numbered(40_000)]]
    found = read_by_evaluate(files(tmp_path, {'a.json': dump(rows)}) / 'a.json')
    assert found == [row['text'] for row in rows][:1 if dump(rows) == dump(rows[:1]) else 3]


def test_a_slack_export(tmp_path: Path) -> None:
    """Rows without the column, and null, are skipped and counted."""
    rng, right, n, without = random.Random(2), [], 0, 0
    folder = files(tmp_path / 'in', {
        'users.json': json.dumps([{'id': 'U1', 'name': 'ada'}, {'id': 'U2'}], indent=1),
        'channels.json': json.dumps([{'id': 'C1'}]), 'canvases.json': '[]'})
    for day in range(40):
        messages = []
        for text in texts(25):
            kind = rng.randrange(9)
            message = {'type': 'message', 'text': f'{day} {text}'} if kind else {'type': 'file'}
            messages.append(message if kind != 1 else message | {'text': None})
            right += [message['text']] if kind > 1 else []
        files(folder, {f'general/2024-01-{day:02d}.json': json.dumps(messages)})
    n, without = 1003, 1003 - len(right)
    with redirect_stderr(io.StringIO()) as said:
        assert sorted(read_by_evaluate(folder)) == sorted(right)
    found, printed = read(folder)
    assert found == sorted(right)
    for words in printed, said.getvalue():
        assert f'{without} of {n:,} rows have no text' in words


def test_rows_without_the_column_are_refused_if_they_are_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(6):
        rows = [{'body': 'a'} if n < k else {'text': f'{n}'} for n in range(10)]
        content = ''.join(json.dumps(row) + '\n' for row in rows)
        path = files(tmp_path, {f'{k}.jsonl': content}) / f'{k}.jsonl'
        assert read(path)[0] == [f'{n}' for n in range(k, 10)]
    files(tmp_path, {'6.jsonl': content + '{"body": "b", "n": 1}\n'})
    words = '6 of 11 rows have no column "text", but body, n: --column=NAME'
    assert words in refused(tmp_path / '6.jsonl', tmp_path / 'out')
    with pytest.raises(UserError, match=words):
        read_by_evaluate(tmp_path / '6.jsonl')
    empty = '{"text": ""}\n' * 99 + '{"text": "a"}\n'  # a column that is mostly empty
    assert read(files(tmp_path, {'e.jsonl': empty}) / 'e.jsonl')[0] == ['a']
    # A wrong name is told before all is read
    monkeypatch.setattr(docs, 'ENOUGH_ROWS', 5)
    files(tmp_path, {'long.jsonl': as_rows(['a'] * 9, 'body') + 'damaged'})
    assert '5 of 5 rows have no column' in refused(tmp_path / 'long.jsonl', tmp_path / 'out')


@pytest.mark.parametrize('name, content, words', [
    ('a.jsonl', as_rows(['a']) + '{"text": "caf\udce9"}\n',
     r"a\.jsonl, after row [01]: not UTF-8 in b'.*caf\\xe9.* --encoding"),
    ('a.jsonl', as_rows(['a']) + '{"text": "a", "n": ' + '[' * 10**5, r'after row 1: .*recursion'),
    ('a.jsonl', '{"text": "a", "n": ' + '9' * 5000 + '}', 'after row 0: .*digits'),
    ('a.jsonl', '["a"]', r'row 1: expected text in the column "text" .* not "\[.a.\]"'),
    ('a.jsonl', '{"text": "a"},\n', r'after row 0: no JSON \(Extra data\)'),
    ('a.jsonl', as_rows(['a']) + '\n{"text": "', r'after row 1: no JSON \(Unterminated'),
    ('a.jsonl', as_rows(['a']) + '{"text": ["b"]}', "row 2: expected text .*, not .*b"),
    ('a.jsonl', as_rows(['a'] * 4000) + '\0' * 99, 'after row 4000: no JSON'),
    ('a.json', '["a", "b"]', 'row 1: expected text in the column "text" .* not .a.'),
    ('a.json', json.dumps([{'text': 'a'}]) + '\n[]', 'after row 1: no JSON .more text after'),
    ('a.json', json.dumps([{'text': 'a'}, {'text': 3}]), 'row 2: expected text .* not .3'),
    ('a.json', json.dumps([{'text': 'a' * 99}])[:-20], r'after row 0: no JSON .Unterminated'),
    ('a.csv', 'id,text\n1,a\n1,2,3\n', 'after row 1: 3 columns, and its first line has 2'),
    ('a.csv', 'id,text\n1,"a\n', 'a.csv, after row 0: unexpected end of data'),
    ('a.csv.gz', gzip.compress(b'text\na', mtime=0)[:-9], 'gz, after row 0: Truncated compressed'),
    ('a.parquet', 'PAR1' * 9, 'a.parquet, after row 0: .*Parquet'),
    ('a.txt', 'un caf\udce9 noir', r"a\.txt: not UTF-8 in b'un caf\\xe9 noir' .*--encoding"),
    ('a.txt', 'a text'.encode('utf-16'), 'a.txt: not UTF-8 in b.*--encoding=utf-16 reads it'),
    ('a.txt', b'\x89PNG\0\0', 'a.txt: not UTF-8 in b.* It has NUL bytes: it is no text'),
    ('a.txt', 'naïve ' * 20_000 + '\udcc3', 'a.txt: not UTF-8 .*unexpected end of data'),
    ('a.txt', 'words ' * 20_000 + '\0', 'a.txt has NUL bytes'),
    ('a.txt.gz', b'\x1f\x8b', 'a.txt.gz: '),
    ('a.txt', '\n' + as_rows(['a', 'b']), 'a.txt: its first line is an object of JSON.* .jsonl'),
    ('a', as_rows(['word ' * 99_999]), 'a: its first line is an object of JSON')])
@pytest.mark.parametrize('in_folder', [False, True])
def test_what_is_damaged_is_refused_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, words: str, in_folder: bool
) -> None:
    content = content if isinstance(content, bytes) else content.encode(errors='surrogateescape')
    folder = files(tmp_path / 'in', {name: content})
    if in_folder:
        suffix = docs.suffix_of(name)
        said = refused(folder, tmp_path / 'out', f'--suffixes={suffix}')
    else:
        said = refused(folder / name, tmp_path / 'out', '--separator=<|x|>' if '.' not in name
                       else '--column=text')
    assert re.search(words, said), said


@pytest.mark.parametrize('column, message', [
    ('n', r'row 1: expected text in the column "n" .* not .1.'),
    ('bytes', r'row 1: expected text in the column "bytes" .* not'),
    ('lists', r'row 1: expected text in the column "lists" .* not'),
    ('broken', 'after row 1: not UTF-8'),
    ('none', '2 of 2 rows have no column "none", but n, bytes, lists, broken: --col')])
def test_columns_that_are_not_text(tmp_path: Path, column: str, message: str) -> None:
    broken = pa.array([b'a', b'caf\xe9'], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({'n': [1, 2], 'bytes': [b'a', b'b'], 'lists': [['a'], ['b']],
                             'broken': broken}), tmp_path / 'a.parquet')
    assert re.search(message, refused(tmp_path / 'a.parquet', tmp_path / 'out',
                                      f'--column={column}'))


# Texts

@pytest.mark.parametrize('encoding', ['latin1', 'utf-16', 'cp1251'])
@pytest.mark.parametrize('name', ['a.txt', 'a.txt.gz', 'a.jsonl', 'a.json', 'a.csv', 'b.txt'])
def test_another_encoding_is_pythons(tmp_path: Path, encoding: str, name: str) -> None:
    rows = [f'{n} {"çà et là" if encoding == "latin1" else "жизнь"}\r\n{n}' for n in range(5)]
    lines = '\n'.join(json.dumps({'text': row}, ensure_ascii=False) for row in rows)
    content = {'a.jsonl': lines, 'a.json': lines, 'b.txt': '<|x|>'.join(rows),
               'a.csv': ''.join(f'"{row}"\r\n' for row in ['text', *rows])}.get(name, rows[0])
    data = content.encode(encoding)
    path = files(tmp_path, {name: gzip.compress(data) if '.gz' in name else data}) / name
    options = [f'--encoding={encoding}', *(['--separator=<|x|>'] if name == 'b.txt' else [])]
    assert read(path, *options)[0] == (rows[:1] if name.startswith('a.txt') else rows)
    assert 'not UTF-8' in refused(path, tmp_path / 'out')
    assert 'encoding=klingon: expected the name' in refused(path, tmp_path, '--encoding=klingon')


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    files(tmp_path, {'a.txt': '\ufeffnaïve', 'a.jsonl': '\ufeff{"text": "a"}\n'})
    for options in [], ['--encoding=utf-8'], ['--encoding=UTF8']:
        assert read(tmp_path / 'a.txt', *options)[0] == ['naïve']
        assert read(tmp_path / 'a.jsonl', *options)[0] == ['a']


def test_texts_between_separators_are_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the blocks fall in which a file is read. It may stand in one file of several."""
    rng = random.Random(3)
    stories = [text.strip('\r\n') for text in [*texts(60), 'a  <|x|>', numbered(9000)]]
    content = '\n<|endoftext|>\n'.join([*stories, ''])
    for block in (7, 300, rng.randrange(8, 60)):
        monkeypatch.setattr(docs, 'BLOCK', block)
        folder = files(tmp_path / f'{block}', {'a.txt': content})
        assert read_by_evaluate(folder / 'a.txt', separator='<|endoftext|>') == stories
        files(folder, {'b.txt.gz': gzip.compress(b'another'),
                       'c.jsonl': as_rows(['<|endoftext|>'])})
        found = read_by_evaluate(folder, separator='<|endoftext|>', suffixes=('.txt', '.jsonl'))
        assert found == [*stories, 'another', '<|endoftext|>']
        for where in (folder / 'b.txt.gz', folder / 'c.jsonl'):
            assert f"separator='<|endoftext|>' is in no text of {where}: " in refused(
                where, tmp_path / 'out', '--separator=<|endoftext|>')
    assert read(folder / 'a.txt')[0] == [content]


def test_separators_take_time_in_proportion_to_a_text(tmp_path: Path) -> None:
    """However long a document is, and wherever its blocks end."""
    seconds = []
    for size in (2, 16):
        text = 'words of one document ' * (size * 45_000)
        files(tmp_path, {f'{size}.txt': f'a<|x|>{text}<|x|>b'})
        begin = time.process_time()
        found = read_by_evaluate(tmp_path / f'{size}.txt', separator='<|x|>')
        seconds.append(time.process_time() - begin)
        assert found == ['a', text, 'b']
    assert seconds[1] < 24 * seconds[0]


@pytest.mark.parametrize('change', ['shorter', 'longer', 'edited'])
@pytest.mark.parametrize('name', ['a.txt', 'a.jsonl'])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    """It may end earlier, or its documents be divided in two ways."""
    content = numbered(90_000) if name == 'a.txt' else as_rows(texts(3000))
    path = files(tmp_path / 'in', {name: content}) / name
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
    assert re.search('a.* has changed while it was read|a.jsonl, after row .* no JSON',
                     refused(path, tmp_path / 'out'))


@pytest.mark.parametrize('tokenizer, times', [('byte', 2), ('bpe512', 3)])
def test_a_document_is_read_for_its_split_a_tokenizer_and_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, times: int
) -> None:
    named = {f'{n}.md': text for n, text in enumerate([*texts(30), *PAGES])}
    folder = files(tmp_path / 'in', named)
    real, opened = open, Counter()

    def note(path: Any, *args: Any, **options: Any) -> Any:
        if folder in Path(str(path)).parents:
            opened[path] += 1
        return real(path, *args, **options)

    monkeypatch.setattr('builtins.open', note)
    prepare(folder, tmp_path / 'out', '--held_out=0.1', f'--tokenizer={tokenizer}')
    assert len(opened) == 30 + len(PAGES) and {*opened.values()} == {times}


# Options

def test_each_way_of_reading_has_its_own_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path / 'in', {f'{n}.txt': text for n, text in enumerate(texts(30, 200))})
    files(tmp_path / 'in', {'b.md': numbered(2000), 'c.md': numbered(3000)})
    readings = [Reading(), Reading(column='body'), Reading(suffixes=('.md',)),
                Reading(encoding='latin1'), Reading(separator='energy')]
    made = [prep.find_data('in', 'byte', reading=reading) for reading in readings]
    assert len({*made}) == len(readings)
    assert made == [prep.find_data('in', 'byte', reading=reading) for reading in readings]


@pytest.mark.parametrize('option', ['column=a', 'encoding=cp1252', 'suffixes=.md'])
def test_a_resumed_run_reads_its_text_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / 'data')
    with pytest.raises(SystemExit, match=f'{option.partition("=")[0]} is for --text=FILE'):
        train.main([*TINY, '--data=data', f'--{option}'])
    files(tmp_path / 'in', {'a.md': numbered(3000)})
    assert train.main([*TINY, '--text=in', '--tokenizer=byte', f'--{option}', '--out_dir=o',
                       steps(2), '--stop_step=1']) == train.STOPPED
    with pytest.raises(SystemExit, match=r'the run in o has'):
        train.main(['--out_dir=o', '--init_from=resume', '--device=cpu', '--column=b',
                    '--encoding=ascii', '--suffixes=.csv'])
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


@pytest.mark.slow
def test_evaluating_a_text_needs_little_memory(tmp_path: Path) -> None:
    """Less than a byte for each byte of it, and not thirty."""
    path = files(tmp_path, {'a.txt': 'some words ' * 2_000_000}) / 'a.txt'
    script = ('import resource\n'
              'from nanocem.documents import Reading\n'
              'from nanocem.measure import read_text_sequences\n'
              'from nanocem.tokenizers import ByteTokenizer\n'
              'before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n'
              f'read_text_sequences({str(path)!r}, ByteTokenizer(), 64, "", Reading())\n'
              'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n')
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout) * 1024 < 22_000_000, done.stdout + done.stderr


# What docs/data.md says

PAGE = (ROOT / 'docs/data.md').read_text()
COMMANDS = re.findall(r'^    (.*python train\.py --text=.*?)(?: +#.*)?$', PAGE, re.MULTILINE)


@pytest.fixture(scope='module')
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's commands name."""
    folder, stories = tmp_path_factory.mktemp('brought'), texts(60, 200)
    mails = [f'From: a@example.org\nSubject: boat {n}\nContent-Type: text/plain; charset=latin1\n'
             f'\nÄlter: {text.replace("世界", "")}\n'.encode('latin1', 'replace')
             for n, text in enumerate(stories)]
    named: dict[str, str | bytes] = {
        'book.txt': numbered(30_000),
        'Inbox.mbox': b''.join(b'From a\n%s\n' % mail for mail in mails),
        'reviews.csv': 'review\n' + ''.join(f'"{n} so"\n' for n in range(60)),
        'posts.jsonl': as_rows(stories, field='body'), 'stories.txt': '\n***\n'.join(stories),
        'SLACK/a/1.json': json.dumps([{'text': text} for text in stories]),
        'piped.txt': numbered(30_000), 'result.json': json.dumps({'name': 'Boats', 'messages': [
            {'from': 'Ada', 'text': 'is it late?'},
            {'from': 'Dov', 'text': ['see ', {'type': 'link', 'text': 'this'}]}]})}
    for n, (text, mail) in enumerate(zip(stories, mails, strict=True)):
        named |= {f'NOTES/{n}.md': text, f'NOTES/{n}.png': mail * 9, f'CHECKOUT/{n}.py': text,
                  f'CHECKOUT/{n}.c': text, f'SUBTITLES/{n}.srt': f'{n} café'.encode('cp1252')}
    return files(folder, named)


@pytest.mark.parametrize('command', COMMANDS)
def test_the_pages_commands_read_what_they_say(
    command: str, brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the sixty texts is a document. A book is many pieces."""
    monkeypatch.chdir(brought)
    line = command.replace('python train.py', r'printf "%s\0"')
    words = subprocess.run(['bash', '-c', line.rpartition('|')[2]], capture_output=True, text=True,
                           check=True).stdout.split('\0')[:-1]
    cfg = build(train.TrainConfig, read_options(words, train.TrainConfig))
    text = 'piped.txt' if cfg.text == '-' else cfg.text
    meta = json.loads(Path(prep.find_data(text, 'byte', None, cfg), 'meta.json').read_text())
    found = sum(split['documents'] for split in meta['splits'].values())
    assert found == 60 if text not in ('book.txt', 'piped.txt') else found > 10
    assert len(COMMANDS) == 10


@pytest.mark.skipif(not shutil.which('jq'), reason='needs jq')
def test_the_pages_line_for_chats_makes_one_document(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(brought)
    lines = re.search(r'^    (jq .*?chat\.jsonl)$', PAGE, re.MULTILINE | re.DOTALL)[1]
    subprocess.run(['bash', '-c', lines], check=True)
    assert read_by_evaluate('chat.jsonl') == ['Ada: is it late?\nDov: see this']


def test_the_pages_lines_for_mail_keep_its_words(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(brought)
    lines = re.search(r'^    import json, mailbox\n(    .*\n)+', PAGE, re.MULTILINE)[0]
    with redirect_stdout(io.StringIO()) as rows:
        exec(textwrap.dedent(lines), {})
    Path('mail.jsonl').write_text(rows.getvalue())
    found = read_by_evaluate('mail.jsonl')
    assert len(found) == 60 and all(text.startswith('Subject: boat') for text in found)
    assert all('Älter: ' in text and 'charset' not in text for text in found)

"""
Make the text of the study: 48.8 MB of English prose from the manuals of sixteen Debian packages.

    python results/english.py                    english.jsonl.zst, in a minute, on Debian 12
    python results/english.py --packages=FOLDER  of .deb files that are there already

The packages come by apt-get download, 186 MB, and are unpacked, not installed. A page of a manual
is a document, cut at 40,000 characters. Kept are paragraphs that are prose, each once: at least
eight words, mostly letters, that end like a sentence. The text's SHA-256 is checked. If a package
has changed since, a line says which one, and of which version the study's text is.
"""
import gzip
import hashlib
import html
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # configurator.py is a folder above

import pyarrow as pa

from configurator import PathStr, build, check, command_line, fail, read_options
from nanocem.files import write_atomic

SHA256 = '29f3a618470f111e462eb4e6df9e21da3aacd93475123a10124acca56139ffbd'  # of the JSON lines
LONGEST = 40_000  # characters of a document
DOC = 'usr/share/doc'


class Source(NamedTuple):
    """Pages of a package: a pattern of files below a folder, in these of its folders."""
    name: str
    package: str
    version: str  # of the study
    sha256: str  # how that of its documents begins
    folder: str
    pattern: str
    folders: str = '.'


SOURCES = [
    Source('python', 'python3.11-doc', '3.11.2-6+deb12u9', '5af110a6', f'{DOC}/python3.11/html',
           '**/*.html', 'library c-api whatsnew howto tutorial reference faq using extending '
           'install distutils'),
    Source('django', 'python-django-doc', '3:3.2.25-0+deb12u7', '80667d15',
           f'{DOC}/python-django-doc/html', '**/*.html',
           'releases ref topics howto intro internals misc faq'),
    Source('sqlalchemy', 'python-sqlalchemy-doc', '1.4.46+ds1-1', '4883fdad',
           f'{DOC}/python-sqlalchemy-doc/html', '**/*.html',
           'orm core changelog tutorial faq dialects'),
    Source('sqlite', 'sqlite3-doc', '3.40.1-2+deb12u2', '58667da3', f'{DOC}/sqlite3', '**/*.html'),
    Source('rust', 'rust-doc', '1.63.0+dfsg1-2', '2d3b8b0d', f'{DOC}/rust-doc/html', '**/*.html',
           'book nomicon reference rustc rustdoc embedded-book rust-by-example edition-guide '
           'unstable-book std cargo'),
    Source('libreoffice', 'libreoffice-help-en-us', '4:7.4.7-1+deb12u14', '900c6537',
           'usr/share/libreoffice/help/en-US', '**/*.html'),
    Source('gimp', 'gimp-help-en', '2.10.34-2', '333aaf5a', 'usr/share/gimp/2.0/help/en', '*.html'),
    Source('apache', 'apache2-doc', '2.4.71-1~deb12u1', '5c443ce2', f'{DOC}/apache2-doc/manual/en',
           '**/*.html'),
    Source('git', 'git-doc', '1:2.39.5-0+deb12u3', 'ae97bfc5', f'{DOC}/git-doc', '**/*.html'),
    Source('postgresql', 'postgresql-doc-15', '15.20-0+deb12u1', '25dee997',
           f'{DOC}/postgresql-doc-15/html', '*.html'),
    Source('perl', 'perl-doc', '5.36.0-7+deb12u4', '99c7cb94', 'usr/share/perl/5.36.0/pod',
           '*.pod'),
    Source('debian', 'debian-handbook', '11.20220922', '034f4a4d',
           f'{DOC}/debian-handbook/html/en-US', '*.html'),
    Source('erlang', 'erlang-doc', '1:25.2.3+dfsg-1+deb12u4', '5cba36f4', f'{DOC}/erlang-doc',
           '**/*.html'),
    Source('lilypond', 'lilypond-doc-html', '2.24.1-2', 'aeb08823',
           f'{DOC}/lilypond/html/Documentation', '*.html',
           'notation learning music-glossary usage essay contributor extending web'),
    Source('gnome', 'gnome-user-docs', '43.0-2', 'b6190452', 'usr/share/help/C', '**/*.page'),
    Source('foldoc', 'dict-foldoc', '20230119-1', '81c5eb98', 'usr/share/dictd', 'foldoc.dict.dz')]

# What holds no prose, and what ends a paragraph
DROPPED = re.compile(r'(?is)<(script|style|pre|head|nav|footer|table|svg|figure|code-block|screen|'
                     r'synopsis)\b[^>]*>.*?</\1>')
ENDS = re.compile(r'(?i)</?(p|li|dd|dt|h[1-6]|div|section|article|ul|ol|dl|blockquote|br|hr|td|tr|'
                  r'th|title|item|note|desc|steps|list|terms|media|body|main|header|aside|info|'
                  r'credit|link|revision|summary|details|form)\b[^>]*>')


# Paragraphs

def html_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a page of HTML or XML, without tags."""
    text = DROPPED.sub('\n', text)
    text = ENDS.sub('\n', re.sub(r'\s+', ' ', text))
    text = html.unescape(re.sub(r'(?s)<[^>]*>', '', text))
    return [re.sub(r'\s+', ' ', paragraph).strip(' ¶#') for paragraph in text.split('\n')]


MARKUP = re.compile(r'([A-Z])<<? ?([^<>]*?) ?>>?')  # of POD: C<code>, L<text|link>


def pod_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a page of Perl's POD, without headings, code and markup."""
    found = []
    for paragraph in re.split(r'\n\s*\n', text):
        if paragraph[:1] in ('=', ' ', '\t'):
            continue
        # Replace markup by what it marks, from the inside out
        while MARKUP.search(paragraph):
            paragraph = paragraph.replace('E<lt>', '\x01').replace('E<gt>', '\x02')
            paragraph = MARKUP.sub(lambda match: '' if match[1] in 'XZ'
                                   else match[2].split('|')[0], paragraph)
        paragraph = paragraph.replace('\x01', '<').replace('\x02', '>')
        found.append(re.sub(r'\s+', ' ', paragraph).strip())
    return found


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph has eight words or more, mostly letters, and ends like a
    sentence."""
    if len(paragraph) < 50 or len(paragraph.split()) < 8 or paragraph[-1] not in '.:!?)"”':
        return False
    letters = sum(c.isalpha() or c == ' ' for c in paragraph)
    return (letters / len(paragraph) > 0.86 and '\ufffd' not in paragraph
            and paragraph.isprintable())


# Documents

def read_pages(source: Source, unpacked: Path) -> Iterator[list[str]]:
    """Yield the paragraphs of each page of a package."""
    if source.name == 'foldoc':  # a dictionary: twelve entries are a page
        packed = (unpacked / source.folder / source.pattern).read_bytes()
        text = gzip.decompress(packed).decode('utf-8', 'replace')
        entries = re.split(r'\n(?=\S)', text)
        for n in range(0, len(entries), 12):
            page = re.sub(r'[{}]', '', '\n\n'.join(entries[n:n + 12]))
            yield [re.sub(r'\s+', ' ', part).strip() for part in re.split(r'\n\s*\n', page)]
        return
    files = {file for folder in source.folders.split()
             for file in (unpacked / source.folder / folder).glob(source.pattern)}
    for file in sorted(files, key=str):
        text = file.read_text(encoding='utf-8', errors='replace')
        yield pod_paragraphs(text) if file.suffix == '.pod' else html_paragraphs(text)


def read_documents(source: Source, unpacked: Path, seen: set[bytes]) -> list[str]:
    """Return the documents of a package: the prose of its pages, without paragraphs that are in
    `seen`, where numbers do not count."""
    documents = []
    for page in read_pages(source, unpacked):
        kept = []
        for paragraph in page:
            key = hashlib.sha256(re.sub(r'\d+', '0', paragraph).encode()).digest()[:12]
            if is_prose(paragraph) and key not in seen:
                seen.add(key)
                kept.append(paragraph)
        text = '\n\n'.join(kept)
        if len(text) < 400:
            continue
        parts = [text[n:n + LONGEST] for n in range(0, len(text), LONGEST)]
        documents += [part for part in parts if len(part) > 300]
    return documents


def digest(documents: list[str]) -> str:
    return hashlib.sha256('\0'.join(documents).encode()).hexdigest()


# Packages

def download(folder: Path) -> None:
    """Download the packages that a folder lacks. UserError without apt-get or a network."""
    missing = [source.package for source in SOURCES if not find_package(source, folder)]
    try:
        if missing:
            subprocess.run(['apt-get', 'download', '--quiet', *missing], cwd=folder, check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        fail('no apt-get: expected Debian 12 or its container (debian:bookworm), or '
             '--packages=FOLDER with the .deb files')
    except subprocess.CalledProcessError as error:
        fail(f'apt-get download: {error.stderr.strip().splitlines()[-1]}; is this Debian '
             '12, with a network, and apt-get update done?')


def find_package(source: Source, folder: Path) -> Path | None:
    return min(folder.glob(f'{source.package}_*.deb'), default=None)


def version_of(package: Path) -> str:
    """Return a package's version, which its name has after the first underscore."""
    return package.name.split('_')[1].replace('%3a', ':')


@dataclass
class EnglishConfig:
    """Where the text goes, and where packages are."""
    to: PathStr = 'english.jsonl.zst'  # the new file
    packages: PathStr | None = None  # a folder with the .deb files; default: they are downloaded


@command_line
def main(argv: list[str]) -> None:
    cfg = build(EnglishConfig, read_options(argv, EnglishConfig))
    check(not os.path.exists(cfg.to), f'to={cfg.to} exists already: give another name')
    documents, seen, changed = [], set(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(cfg.packages or scratch)
        download(folder)
        for source in SOURCES:
            # Unpack the package beside the others, and read its pages
            package, unpacked = find_package(source, folder), Path(scratch, source.package)
            subprocess.run(['dpkg-deb', '-x', str(package), str(unpacked)], check=True)
            found = read_documents(source, unpacked, seen)
            documents += [(source.name, document) for document in found]
            same = digest(found).startswith(source.sha256)
            print(f'{source.package:24} {version_of(package):22} {len(found):6,} documents'
                  f'{"" if same else "   not as in the study"}', flush=True)
            if not same:
                changed.append(f'{source.package} {version_of(package)} (expected '
                               f'{source.version})')
    check(not changed, f'another text than that of the study: {", ".join(changed)}. '
          'snapshot.debian.org has older packages; --packages=FOLDER reads them')
    # Shuffle the documents, and write one a line
    random.seed(1)
    random.shuffle(documents)
    lines = ''.join(json.dumps({'text': text, 'source': name}, ensure_ascii=False) + '\n'
                    for name, text in documents).encode()
    check(hashlib.sha256(lines).hexdigest() == SHA256, f'the text is not that of the study, whose '
          f'SHA-256 is {SHA256:.8}..., although each package is: another Python shuffles it')
    write_atomic(cfg.to, pa.Codec('zstd', compression_level=9).compress(lines, asbytes=True))
    print(f'{cfg.to}: {len(documents):,} documents, SHA-256 of the text {SHA256:.8}...')


if __name__ == '__main__':
    main(sys.argv[1:])

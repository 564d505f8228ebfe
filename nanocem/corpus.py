"""The ladder's text: source and English of the standard library and of the pinned packages."""
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files

from configurator import fail
from nanocem.files import say

CORPUS = 'data/corpus'
SUFFIXES = ('.py', '.md', '.rst', '.txt')


def package_files(requirements: str) -> Iterator[tuple[str, str]]:
    """(name, path) of the text files of the packages pinned in a requirements file, by name."""
    if not os.path.isfile(requirements):
        fail(f'{requirements} is missing: start in the project\'s folder')
    with open(requirements, encoding='utf-8') as file:
        packages = [re.split(r'[=;<>~ ]', line)[0] for line in file if re.match(r'\w', line)]
    for package in packages:
        try:
            found = files(package) or []
        except PackageNotFoundError:
            fail(f'{package} is not installed: pip install -r {requirements}')
        for file in sorted(found, key=str):
            if file.suffix in SUFFIXES and '..' not in file.parts:
                yield f'{package}/{file}', str(file.locate())


def library_files() -> Iterator[tuple[str, str]]:
    """(name, path) of the standard library's text files, by name."""
    root = sysconfig.get_paths()['stdlib']
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted({*subfolders} - {'site-packages', 'dist-packages', '__pycache__'})
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.endswith(SUFFIXES):
                yield f'python/{os.path.relpath(path, root)}', path


def write_documents(path: str, requirements: str = 'requirements.txt') -> int:
    """One JSON line a file, no content twice, as prepare_slimpajama.py reads them. How many bytes
    of text. Files that are not UTF-8 are left out."""
    seen: set[bytes] = set()
    size = 0
    with open(path, 'w', encoding='utf-8') as out:
        for name, source in [*library_files(), *package_files(requirements)]:
            try:
                with open(source, encoding='utf-8', newline='') as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen or not text.strip():
                continue
            seen.add(digest)
            size += len(text.encode())
            out.write(json.dumps({'text': text, 'name': name}, ensure_ascii=False) + '\n')
    return size


def make_corpus() -> None:
    """data/corpus, as bytes, unless it is there."""
    if os.path.exists(f'{CORPUS}/meta.json'):
        return
    text = f'{CORPUS}.jsonl'
    os.makedirs('data', exist_ok=True)
    if not os.path.exists(text):
        say(f'{CORPUS}: gathering the text of the installed packages')
        write_documents(f'{text}.part')
        os.replace(f'{text}.part', text)
    command = [sys.executable, 'prepare_slimpajama.py', f'--input={text}', f'--out_dir={CORPUS}',
               '--tokenizer=byte', '--held_out=0.01']
    if subprocess.run(command, check=False).returncode:
        fail(f'{CORPUS} is not made; the same command goes on')
    os.remove(text)

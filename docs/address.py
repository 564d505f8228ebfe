"""
Write the repository's address into the files that have it.

    python docs/address.py

The address is Repository in pyproject.toml. These files have a copy: the pages of docs/, tour.ipynb
(for Colab), README.md (git clone) and CITATION.cff. Without an address the pages link to the files
of a clone. With one they link to GitHub and to GitHub Pages, and name their picture by its whole
address, which a program needs that shows a preview of a link.
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # nanocem/ is in the folder above

from nanocem.page import REPOSITORY, set_links

ROOT = Path(__file__).parents[1]


def files() -> list[Path]:
    return [*sorted((ROOT / 'docs').glob('*.html')), ROOT / 'tour.ipynb', ROOT / 'README.md',
            ROOT / 'CITATION.cff']


def set_address(text: str, suffix: str, repository: str) -> str:
    """Return the text of a file with this suffix, with the address of the repository in it; '' is
    no address."""
    if suffix == '.ipynb':
        return re.sub("ADDRESS = '.*?'", f"ADDRESS = '{repository}'", text)
    if suffix == '.md':
        source = repository or 'ADDRESS'
        return re.sub(r'git clone \S+ nanoCEM', f'git clone {source} nanoCEM', text)
    if suffix == '.cff':
        text = re.sub('^repository-code: .*\n', '', text, flags=re.MULTILINE)
        line = f"repository-code: '{repository}'\n" if repository else ''
        return re.sub('^license:', f'{line}license:', text, flags=re.MULTILINE)
    return set_links(text, repository, has_pages=True)


if __name__ == '__main__':
    for path in files():
        text = path.read_text(encoding='utf-8')
        changed = set_address(text, path.suffix, REPOSITORY)
        path.write_text(changed, encoding='utf-8')
        print(path.name, 'has another address now' if changed != text else 'has it already')

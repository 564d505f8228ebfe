"""
Write the repository's address into the pages of this folder, and into tour.ipynb for Colab.

    python docs/address.py

The address stands in nanocem/page.py alone, as REPOSITORY. It is empty as long as there is none:
then the pages link to the files of a clone. With it they link to GitHub and to GitHub Pages, and
name their picture by its whole address, as those need who show a page that was sent to them.
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # nanocem/ is in the folder above

from nanocem.page import REPOSITORY, set_links

ROOT = Path(__file__).parents[1]


def set_address(page: str, is_tour: bool) -> str:
    """Return a page, or the notebook, with the repository's address."""
    if is_tour:
        return re.sub("ADDRESS = '.*?'", f"ADDRESS = '{REPOSITORY}'", page)
    return set_links(page, REPOSITORY, has_pages=True)


if __name__ == '__main__':
    for path in [*sorted((ROOT / 'docs').glob('*.html')), ROOT / 'tour.ipynb']:
        page = path.read_text(encoding='utf-8')
        changed = set_address(page, path.suffix == '.ipynb')
        path.write_text(changed, encoding='utf-8')
        print(path.name, 'has another address now' if changed != page else 'has it already')

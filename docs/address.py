"""
Write the repository's address into the pages of this folder.

    python docs/address.py

The address stands in nanocem/page.py alone, as REPOSITORY. It is empty as long as there is none:
then the pages link to the files of a clone. With it they link to GitHub and to GitHub Pages, and
name their picture by its whole address, as those need who show a page that was sent to them.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # nanocem/ is in the folder above

from nanocem.page import REPOSITORY, set_links

if __name__ == '__main__':
    for path in sorted(Path(__file__).parent.glob('*.html')):
        page = path.read_text(encoding='utf-8')
        changed = set_links(page, REPOSITORY, has_pages=True)
        path.write_text(changed, encoding='utf-8')
        print(path.name, 'has another address now' if changed != page else 'has it already')

"""The CSVs of the repository, as the csv module reads them."""
import csv
import io
from pathlib import Path

import pytest

from nanocem.files import csv_text, read_csv
from running import ROOT

PATHS = sorted(path.relative_to(ROOT) for folder in ('docs', 'results')
               for path in (ROOT / folder).rglob('*.csv'))


@pytest.mark.parametrize('path', PATHS, ids=str)
def test_each_row_has_a_value_for_each_name(path: Path) -> None:
    """The names differ, and what is read is written the same again, but for needless quotes."""
    with open(ROOT / path, encoding='utf-8', newline='') as file:
        names, *rows = csv.reader(file)
    assert len({*names}) == len(names) > 1 and '' not in names
    assert rows and {len(row) for row in rows} == {len(names)}
    read = read_csv(str(ROOT / path))
    assert [[*row.values()] for row in read] == rows
    with io.StringIO(csv_text(read), newline='') as written:
        assert [*csv.DictReader(written)] == read


def test_any_value_is_read_back() -> None:
    rows = [{'a, b': '1,5 "so"', 'c': 'two\nlines'}, {'a, b': '', 'c': ' é'}]
    with io.StringIO(csv_text(rows), newline='') as file:
        assert [*csv.DictReader(file)] == rows

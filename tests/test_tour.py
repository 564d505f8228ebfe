"""tour.ipynb runs as it stands. `python tests/test_tour.py` writes its outputs again."""
import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip('nbformat')
NotebookClient = pytest.importorskip('nbclient').NotebookClient

ROOT = Path(__file__).parent.parent
TOUR = ROOT / 'tour.ipynb'


def run() -> nbformat.NotebookNode:
    """Execute the notebook in a fresh kernel on one thread. CellExecutionError if a cell fails."""
    tour = nbformat.read(TOUR, as_version=4)
    client = NotebookClient(tour, timeout=500, resources={'metadata': {'path': ROOT}})
    client.execute(env={**os.environ, 'OMP_NUM_THREADS': '1'})
    for cell in tour.cells:
        cell.metadata.pop('execution', None)  # the time of day
    return tour


def test_it_runs() -> None:
    run()


def test_outputs_are_committed() -> None:
    tour = nbformat.read(TOUR, as_version=4)
    code = [cell for cell in tour.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum('iVBOR' in str(cell.outputs) for cell in code) == 7
    assert TOUR.stat().st_size < 500_000


if __name__ == '__main__':
    nbformat.write(run(), TOUR)

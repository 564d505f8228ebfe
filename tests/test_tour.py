"""tour.ipynb runs as it stands. `python tests/test_tour.py` writes its outputs anew."""
import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
TOUR = ROOT / 'tour.ipynb'


def run() -> nbformat.NotebookNode:
    """The notebook, executed by a fresh kernel on one thread. CellExecutionError where it fails."""
    tour = nbformat.read(TOUR, as_version=4)
    client = NotebookClient(tour, timeout=500, resources={'metadata': {'path': ROOT}})
    client.execute(env={**os.environ, 'OMP_NUM_THREADS': '1'})
    for cell in tour.cells:
        cell.metadata.pop('execution', None)  # the time of day
    return tour


def outputs(cell: nbformat.NotebookNode, kind: str) -> str:
    """What a cell shows of a kind, text/plain (printed or returned) or image/png."""
    return '\n'.join(output.get('text', '') if output.output_type == 'stream' else
                     output.get('data', {}).get(kind, '') for output in cell.get('outputs', []))


def test_it_runs_and_shows_what_it_says() -> None:
    tour = run()
    said = '\n'.join(outputs(cell, 'text/plain') for cell in tour.cells)
    *equal, truncated = sorted(map(float, re.findall(r'\de[+-]\d\d', said)))
    assert len(equal) == 7
    assert equal[-1] < 1e-12  # float64
    assert truncated > 0.1  # Algorithm 1 leaves a term out
    assert 'CEM: 96 numbers a token' in said
    assert 'Llama: 192 numbers a token' in said
    losses = dict(re.findall(r'T = (\d): ([\d.]+)', said))
    assert float(losses['2']) < 3  # of 5.5: it learns
    assert float(losses['2']) < float(losses['1'])


def test_outputs_are_committed() -> None:
    tour = nbformat.read(TOUR, as_version=4)
    code = [cell for cell in tour.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum('iVBOR' in outputs(cell, 'image/png') for cell in code) == 5
    assert TOUR.stat().st_size < 300_000


if __name__ == '__main__':
    nbformat.write(run(), TOUR)

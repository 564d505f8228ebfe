"""tour.ipynb runs as it stands, and so do the answers to its exercises. `python tests/test_tour.py`
writes its outputs again."""
import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip('nbformat')
NotebookClient = pytest.importorskip('nbclient').NotebookClient

ROOT = Path(__file__).parent.parent
TOUR = ROOT / 'tour.ipynb'


def run(answers: bool = False) -> nbformat.NotebookNode:
    """Execute the notebook in a fresh kernel on one thread, with the Python code of its answers as
    further cells if asked. CellExecutionError if a cell fails."""
    tour = nbformat.read(TOUR, as_version=4)
    if answers:
        for answer in re.findall('```python\n(.*?)```', tour.cells[-1].source, flags=re.DOTALL):
            tour.cells.append(nbformat.v4.new_code_cell(answer))
    client = NotebookClient(tour, timeout=500, coalesce_streams=True,
                            resources={'metadata': {'path': ROOT}})
    client.execute(env={**os.environ, 'OMP_NUM_THREADS': '1'})
    for cell in tour.cells:
        cell.metadata.pop('execution', None)  # the time of day
    return tour


def printed(cell: nbformat.NotebookNode) -> list[float]:
    """Return the numbers that a cell printed."""
    text = ''.join(output.text for output in cell.get('outputs', []) if 'text' in output)
    return [float(number) for number in re.findall(r'\d+(?:\.\d+)?', text.replace(',', ''))]


@pytest.mark.slow
def test_it_runs_with_its_answers_and_prints_what_is_committed() -> None:
    """Another CPU rounds otherwise. The last cell prints a random sample."""
    cells = nbformat.read(TOUR, as_version=4).cells
    ran = run(answers=True).cells
    assert len(ran) == len(cells) + 6
    code = [pair for pair in zip(cells, ran, strict=False) if pair[0].cell_type == 'code']
    for committed, found in code[:-1]:
        assert printed(found) == pytest.approx(printed(committed), rel=0.1, abs=1), found.source
    assert sum(len(printed(committed)) for committed, _ in code) > 50
    # Section 10: Algorithm 1 leaves out more of the gradient than it keeps
    (left_out,) = [found for _, found in code if 'the part that attention leaves out' in
                   found.source]
    assert min(printed(left_out)) > 1


def test_outputs_are_committed() -> None:
    tour = nbformat.read(TOUR, as_version=4)
    code = [cell for cell in tour.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum('image/png' in str(cell.outputs) for cell in code) == 10
    assert 'stderr' not in str([cell.outputs for cell in code])  # no warnings
    assert TOUR.stat().st_size < 750_000


if __name__ == '__main__':
    nbformat.write(run(), TOUR)

"""tour.ipynb runs as it stands. `python tests/test_tour.py` writes its outputs again."""
import os
import re
from pathlib import Path
from statistics import fmean

import nbformat
import pytest
from nbclient import NotebookClient

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


def outputs(cell: nbformat.NotebookNode, kind: str) -> str:
    """Return the outputs of a cell of one kind: text/plain (printed or returned) or image/png."""
    return '\n'.join(output.get('text', '') if output.output_type == 'stream' else
                     output.get('data', {}).get(kind, '') for output in cell.get('outputs', []))


@pytest.fixture(scope='module')
def said() -> str:
    """Execute the notebook, and return all that it prints."""
    return '\n'.join(outputs(cell, 'text/plain') for cell in run().cells)


def numbers(pattern: str, said: str) -> list[tuple[float, ...]]:
    """Return the numbers that each group of a pattern matches, a tuple for each group."""
    found = [map(float, match.groups()) for match in re.finditer(pattern, said)]
    return list(zip(*found, strict=True))


def test_a_layer_is_the_gradient_of_its_energy(said: str) -> None:
    *equal, truncated = sorted(map(float, re.findall(r'\de[+-]\d\d\b', said)))
    assert len(equal) == 7
    assert equal[-1] < 1e-12  # float64
    assert truncated > 0.1  # Algorithm 1 leaves a term out


def test_from_the_normed_input_a_step_turns_u_alike(said: str) -> None:
    raw, normed = numbers(r'by ([\d.]+) degrees \(raw\), ([\d.]+)', said)
    assert raw[0] > 3 * raw[1] > 9 * raw[2]
    assert max(normed) - min(normed) < 1


def test_small_models_lie_close_together(said: str) -> None:
    found = re.findall(r'(.+): [\d,]+ weights, loss ([\d.]+)\n', said)
    loss = {name: float(value) for name, value in found}
    assert len(loss) == 4
    assert max(loss.values()) < 2.5  # of 5.5: they learn
    assert max(loss.values()) - min(loss.values()) < 0.2
    assert min(loss, key=loss.get) == 'Llama'
    assert abs(loss['CEM, T = 2'] - loss['CEM, T = 1']) < 0.1


def test_energies_fall_on_while_the_loss_rises(said: str) -> None:
    (falling,), (sublayers,) = numbers(r'falls at each of 8 steps in (\d+) of (\d+)', said)
    assert falling == sublayers
    T, energy, further, as_far = numbers(
        r'T = (\d): energies (.+), loss (.+); as far as in training: loss (.+)', said)
    assert list(energy) == sorted(energy, reverse=True)
    trained = T.index(float(re.search(r'trained with T = (\d)', said)[1]))
    assert trained > 0  # with T = 1 section 12 would show little
    assert list(further[trained:]) == sorted(further[trained:])
    assert min(further) == further[trained] == as_far[trained]
    assert as_far[-1] - as_far[trained] < (further[-1] - further[trained]) / 2


def test_attention_repeats_its_step(said: str) -> None:
    attn, moved, mlp = numbers(r'cosine ([\d.]+), ([\d.]+)% moved; MLP, cosine ([\d.]+)', said)
    assert fmean(attn) > 0.9
    assert fmean(attn) > fmean(mlp)
    assert fmean(moved) < 15
    ((trained,),) = numbers(r'as trained: loss ([\d.]+)', said)
    ((attn_in_one, mlp_in_one),) = numbers(r'in one step as long: loss ([\d.]+)', said)
    assert abs(attn_in_one - trained) < mlp_in_one - trained


def test_outputs_are_committed() -> None:
    tour = nbformat.read(TOUR, as_version=4)
    code = [cell for cell in tour.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum('iVBOR' in outputs(cell, 'image/png') for cell in code) == 7
    assert TOUR.stat().st_size < 500_000


if __name__ == '__main__':
    nbformat.write(run(), TOUR)

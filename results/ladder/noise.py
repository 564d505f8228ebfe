"""
Where the noise is: how far the seeds of a model lie apart on each document of the held-out texts.

    python results/ladder/noise.py [SIZE]

Of the runs of `python reproduce.py ladder` whose folders are here, at one size (664k if none is
given), of models with two seeds or more there; writes noise.md beside itself.
"""
import os
import re
import sys
from collections.abc import Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import numpy as np  # noqa: E402  after the path is set
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from configurator import fail  # noqa: E402
from model import Transformer  # noqa: E402
from nanocem.files import write_whole  # noqa: E402
from nanocem.ladder import CONTROL, PAPERS, SCALES, SPLITS  # noqa: E402
from nanocem.runs import load_run  # noqa: E402
from nanocem.shards import CORPUS, Sequences, evenly_spaced  # noqa: E402
from reproduce import finished, own_runs  # noqa: E402

TOKENS = 400_000  # of each split, spread over it
BATCH, SHOWN = 32, 4


@torch.no_grad()
def losses(model: Transformer, data: Sequences, numbers: np.ndarray) -> np.ndarray:
    """Loss of every token (sequences, length), in nats."""
    found = []
    for at in range(0, len(numbers), BATCH):
        x, y = data.batch(numbers[at:at + BATCH])
        found.append(F.cross_entropy(model(x)[0].mT, y, reduction='none'))
    return torch.cat(found).numpy()


def documents(data: Sequences, numbers: np.ndarray, bos: int) -> np.ndarray:
    """Of which document each target is (sequences, length): their numbers in the split, from 1."""
    (tokens,) = data.shards
    places = numbers[:, None] * data.length + np.arange(1, data.length + 1)
    return np.cumsum(tokens == bos)[places]


def added(loss: np.ndarray, of: np.ndarray, names: np.ndarray) -> np.ndarray:
    """What each document adds to the mean loss."""
    return np.array([loss[of == name].sum() for name in names]) / loss.size


def spread(models: Sequence[np.ndarray]) -> np.ndarray:
    """Standard deviation over seeds, pooled over models, of (seeds, ...) each."""
    square = sum(((of - of.mean(axis=0)) ** 2).sum(axis=0) for of in models)
    return np.sqrt(square / sum(len(of) - 1 for of in models))


def first_line(data: Sequences, name: int, bos: int) -> str:
    """The first words of a document, three or more in a line."""
    (tokens,) = data.shards
    start, end = [*np.flatnonzero(tokens == bos), len(tokens)][name - 1:name + 1]
    text = bytes(tokens[start + 1:end][:400].tolist())
    words = re.findall(r'\w+(?: \w[\w.,-]*){2,}', text.decode(errors='replace'))
    return words[0][:50] if words else 'no words'


def rows(split: str, trained: Sequence[Sequence[Transformer]]) -> list[str]:
    """A split's lines: its documents that differ most, all of it, and all but the first."""
    data = Sequences(CORPUS, split, trained[0][0].cfg.context_length)
    numbers, bos = evenly_spaced(len(data), TOKENS // data.length), data.meta['bos']
    of = documents(data, numbers, bos)
    names = np.unique(of)
    every = [np.stack([added(losses(model, data, numbers), of, names) for model in models])
             for models in trained]
    apart = spread(every)
    order = np.argsort(-apart)
    share = np.array([(of == name).mean() for name in names])
    mean = sum(loss.sum(axis=0) for loss in every) / sum(map(len, every)) / share
    lines = [f'| {split} | {first_line(data, int(names[n]), bos)} | {share[n]:.1%} | '
             f'{mean[n]:.2f} | {apart[n]:.4f} |' for n in order[:SHOWN]]
    for text, some in (('all', order), ('all but the first', order[1:])):
        total = spread([loss[:, some].sum(axis=1) / share[some].sum() for loss in every])
        weight = share[some] / share[some].sum()
        lines.append(f'| {split} | {text}, {len(some)} documents | {share[some].sum():.1%} | '
                     f'{(mean[some] * weight).sum():.2f} | {total:.4f} |')
    return lines


def main(argv: Sequence[str]) -> None:
    scale = SCALES['ladder']
    size = argv[0] if argv else '664k'
    if len(argv) > 1 or size not in scale.sizes:
        fail(f'{" ".join(argv)}: expected at most one of {", ".join(scale.sizes)}')
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    for task in own_runs(scale, PAPERS + CONTROL, [size], scale.seeds):
        if finished(task):
            found.setdefault(task.model, []).append(task.folder)
    folders = [of for of in found.values() if len(of) > 1]
    if not folders:
        fail(f'no model has two finished seeds at {size}: python reproduce.py ladder')
    trained = [[load_run(folder, 'last')[0] for folder in of] for of in folders]
    page = [
        f'How far seeds lie apart, by `python results/ladder/noise.py {size}`: {len(trained)} '
        f'models of {sum(map(len, trained))} runs, on {TOKENS:,} bytes of each split. Spread: '
        'standard deviation over the seeds of a model, pooled over models, of what a document adds '
        'to the mean loss in nats, or of the mean loss itself; 0.01 is 1% of perplexity.', '',
        '| split | document | share | loss | spread |', '|---|---|---|---|---|',
        *(line for split in SPLITS for line in rows(split, trained)), '']
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'noise.md')
    write_whole(path, '\n'.join(page).encode())
    print('\n'.join(page))


if __name__ == '__main__':
    os.chdir(ROOT)
    main(sys.argv[1:])

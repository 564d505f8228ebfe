"""
How synthetic_gp.py's blind protocol was found: on the five Plain rows alone, the other 25 unseen.

    python -m nanocem.gp_calibrate    half an hour of a core; writes out_dir/calibration.csv

Each trial is Plain on a kernel, at the lengthscale where it has the paper's level; what is left
there is the misfit, log(test / train) less the paper's. First the protocol, with each kernel's
first shape, then with that protocol each kernel's shape. Of those whose misfits lie within TIE of
the smallest the first in its list is taken: the paper's recipe before AdamW's defaults, nn.Linear's
initial weights before others, 4,000 points before 2,000.
"""
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm

import synthetic_gp as gp
from configurator import build, fail, read_options
from nanocem.files import write_whole
from nanocem.gp_report import PAPER, csv_bytes

NAMES = ('recipe', 'init', 'learning_rate', 'points', 'steps')
PROTOCOLS = [dict(zip(NAMES, values, strict=True)) for values in (
    ('paper', 'linear', 2e-3, 4000, 500),
    ('paper', 'linear', 2e-3, 4000, 1000),
    ('paper', 'linear', 2e-3, 4000, 2000),
    ('paper', 'linear', 2e-3, 2000, 500),
    ('paper', 'linear', 2e-3, 2000, 1000),
    ('paper', 'linear', 1e-3, 4000, 1000),
    ('paper', 'linear', 1e-3, 4000, 2000),
    ('torch', 'linear', 2e-3, 4000, 1000),
    ('torch', 'linear', 2e-3, 4000, 2000),
    ('paper', 'xavier', 2e-3, 4000, 2000),
    ('paper', 'n02', 2e-3, 4000, 4000),
)]
SHAPES = {  # of each shape, the middle one of the three lengthscales tried
    'rbf': {(): 5.0},
    'matern': {(1.5,): 2.8, (0.5,): 13.0, (2.5,): 2.2},
    'periodic': {(2.0,): 13.0, (4.0,): 4.8, (8.0,): 2.1},
    'rational_quadratic': {(1.0,): 2.7, (0.5,): 3.2, (2.0,): 2.4, (4.0,): 2.3},
    'non_stationary': {(0.5,): 5.2, (0.25,): 3.6, (1.0,): 10.0},
}
LADDER, TIE = 1.4, 0.01
Shape = tuple[float, ...]


@dataclass
class Options:
    """The calibration."""
    repeats: int = 5  # draws and initial weights of a trial
    seed: int = 0  # of all of them
    out_dir: str = 'out/gp_calibration'  # calibration.csv


def match(o: gp.Options, k: str, shape: Shape, middle: float, draws: dict[Any, gp.Data],
          ladder: float = LADDER) -> dict[str, Any]:
    """Plain at three lengthscales in one batch; between them, in logarithms, the one where train x
    test RMSE is the paper's. What is left there is the misfit: log(test / train) less the paper's.
    The two RMSEs rise and fall together from draw to draw, so that their ratio tells protocols
    apart that all lie within the paper's std. `draws` are used again."""
    scales = [middle * ladder ** i for i in (-1, 0, 1)]
    for scale in scales:
        if (k, scale, shape, o.points) not in draws:
            draws[k, scale, shape, o.points] = gp.draw(o, k, range(o.repeats), (scale, *shape))
    parts = (draws[k, scale, shape, o.points] for scale in scales)
    data = gp.Data(*map(torch.cat, zip(*parts, strict=True)))
    _, found = gp.fit(o, 'Plain', data, [*range(o.repeats)] * len(scales))
    log_train, log_test = (torch.tensor(found[part]).view(-1, o.repeats).mean(1).log()
                           for part in ('train', 'test'))

    paper_train, _, paper_test, _ = PAPER[k, 'Plain']
    level = ((log_test + log_train) / 2).tolist()
    gap = (log_test - log_train).tolist()
    target = math.log(paper_train * paper_test) / 2
    # between lengthscales i and i + 1, or beyond the ends by one more at most
    i = 1 if level[1] > target else 0
    t = min(2, max(-1, (target - level[i]) / (level[i + 1] - level[i])))
    level_t, gap_t = (values[i] + t * (values[i + 1] - values[i]) for values in (level, gap))
    return dict(
        kernel=k, shape=' '.join(map(str, shape)),
        lengthscale=float(f'{scales[i] * ladder ** t:.3g}'),
        train=math.exp(level_t - gap_t / 2), test=math.exp(level_t + gap_t / 2),
        misfit=gap_t - math.log(paper_test / paper_train), chosen='')


def first_of_the_best(misfits: Sequence[float]) -> int:
    """Which candidate is taken; see TIE."""
    return next(i for i, value in enumerate(misfits) if value <= min(misfits) + TIE)


def calibrate(o: Options) -> None:
    """Protocol, then shapes; synthetic_gp.py's BLIND and KERNELS hold what is chosen here."""
    draws: dict[Any, gp.Data] = {}
    trials: list[dict[str, Any]] = []
    rms = []
    base = gp.Options(**gp.BLIND, protocol='blind', repeats=o.repeats, seed=o.seed, device='cpu')
    total = sum(len(PROTOCOLS) - 1 + len(shapes) for shapes in SHAPES.values())
    with tqdm(total=total) as bar:
        def trial(protocol: dict[str, Any], k: str, shape: Shape) -> dict[str, Any]:
            settings = replace(base, **protocol, init_cem=protocol['init'])
            trials.append(protocol | match(settings, k, shape, SHAPES[k][shape], draws))
            bar.update()
            return trials[-1]

        for protocol in PROTOCOLS:
            misfits = [trial(protocol, k, next(iter(shapes)))['misfit']
                       for k, shapes in SHAPES.items()]
            rms.append(math.sqrt(mean(m ** 2 for m in misfits)))
        best = first_of_the_best(rms)
        for i, (k, shapes) in enumerate(SHAPES.items()):
            others = [trial(PROTOCOLS[best], k, shape) for shape in [*shapes][1:]]
            tried = [trials[best * len(SHAPES) + i], *others]
            tried[first_of_the_best([abs(t['misfit']) for t in tried])]['chosen'] = 'yes'

    rows = [[f'{value:.4f}' if name in ('train', 'test', 'misfit') else value
             for name, value in t.items()] for t in trials]
    write_whole(f'{o.out_dir}/calibration.csv', csv_bytes([[*trials[0]], *rows]))
    for i, (protocol, value) in enumerate(zip(PROTOCOLS, rms, strict=True)):
        settings = ', '.join(f'{name} {v}' for name, v in protocol.items())
        print(f"{settings}, misfit {value:.3f}{', chosen' if i == best else ''}")
    for t in trials:
        if t['chosen']:
            print(f"{t['kernel']:18} shape {t['shape'] or '-':4} lengthscale {t['lengthscale']:<5g}"
                  f" train {t['train']:.4f}, test {t['test']:.4f}, misfit {t['misfit']:+.3f}")
    print(f'All trials: {o.out_dir}/calibration.csv')


def main() -> None:
    o = build(Options, read_options(sys.argv[1:], Options))
    torch.set_num_threads(1)
    try:
        os.makedirs(o.out_dir, exist_ok=True)
        calibrate(o)
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}')


if __name__ == '__main__':
    main()

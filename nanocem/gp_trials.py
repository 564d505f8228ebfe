"""
What the trials of python -m nanocem.gp_search say.

    python -m nanocem.gp_trials           search.md: ranking, chance; choices.png: misfit by choice
    python -m nanocem.gp_trials --settle  and print the best protocol for synthetic_gp.py, with
                                          lengthscales found anew over five repeats (minutes)
"""
import math
import random
import sys
from dataclasses import dataclass
from statistics import fmean

import matplotlib.pyplot as plt
import torch

import synthetic_gp as gp
from configurator import build, fail, read_options
from nanocem.files import write_whole
from nanocem.gp_calibrate import match
from nanocem.gp_report import PAPER, TITLES, deviations, markdown, save
from nanocem.gp_search import (
    CHOICES,
    RATIO,
    STAGES,
    Trials,
    best_shapes,
    misfit,
    ranking,
    read,
    rows_of,
)


@dataclass
class Options:
    """What to do with the trials."""
    out_dir: str = 'out/gp_search'  # trials.csv there; search.md and choices.png go there
    settle: bool = False  # print the best protocol for synthetic_gp.py


def furthest(trials: Trials) -> int:
    """The last stage that at least two protocols have passed."""
    return max(stage for stage in range(len(STAGES)) if len(ranking(trials, stage)) > 1)


def by_chance(trials: Trials, stage: int, permutations: int = 200) -> list[float]:
    """The best protocol's misfit where the paper's rows but Plain's are shuffled within each
    kernel: how well as many protocols would do on a table that none of them made."""
    rng = random.Random(0)
    passed = [[rows_of(t) | {'kernel': k} for k, t in best_shapes(trials, p, stage).items()]
              for score_, p in ranking(trials, stage) if math.isfinite(score_)]
    best = []
    for _ in range(permutations):
        shuffled = {}
        for k in gp.KERNELS:
            models = [m for m in passed[0][0] if m not in ('kernel', 'Plain')]
            for m, other in zip(models, rng.sample(models, len(models)), strict=True):
                shuffled[k, m] = PAPER[k, other]
            shuffled[k, 'Plain'] = PAPER[k, 'Plain']
        best.append(min(
            math.sqrt(fmean(misfit({m: row for m, row in rows.items() if m != 'kernel'},
                                   rows['kernel'], shuffled) ** 2 for rows in protocol))
            for protocol in passed))
    return best


def resisting(trials: Trials) -> list[str]:
    """Rows more than two of the paper's std off, in train or test, in each trial."""
    nearest: dict[tuple[str, str], float] = {}
    for t in trials.all:
        if math.isfinite(t['misfit']):
            ours = {(t['kernel'], m): row for m, row in rows_of(t).items()}
            for key in ours:
                off = max(map(abs, deviations(ours, key)))
                nearest[key] = min(off, nearest.get(key, math.inf))
    return [f'{TITLES[k]} {m}' for (k, m), off in nearest.items() if off > 2]


def report(trials: Trials, out_dir: str) -> None:
    """search.md and choices.png."""
    stage = furthest(trials)
    ranked = ranking(trials, stage)
    (best, protocol), (second, _) = ranked[:2]
    chance = by_chance(trials, stage)
    tried = len(ranking(trials, 0))
    lines = [['misfit', *(TITLES[k] for k in gp.KERNELS), 'protocol']]
    for i, (score_, p) in enumerate(ranked[:10]):
        shown = p if i == 0 else {name: v for name, v in p.items() if v != protocol[name]}
        each = best_shapes(trials, p, stage)
        kernels = [f"{each[k]['misfit']:.3f}" if k in each else '-' for k in gp.KERNELS]
        words = ', '.join(f'{name} {value}' for name, value in shown.items())
        lines.append([f'{score_:.3f}', *kernels, words])
    values = sum(map(len, CHOICES.values()))
    at = STAGES[stage]
    far = ', '.join(resisting(trials)) or 'none'
    as_well = sum(c <= best for c in chance)
    text = f"""{len(trials.all)} trials of {tried} protocols, out of {len(CHOICES)} choices with
{values} values; besides, a lengthscale for each kernel and a shape for four. To be fitted are
{2 * len(PAPER)} RMSEs, ten of them Plain's, whose five levels the lengthscales take. This is stage
{stage} of {len(STAGES) - 1}: {at.repeats} repeats, models up to {at.models[-1]}.

- Misfit of the best: {best:.3f}; of the runner-up: {second:.3f}.
- By chance, the paper's rows but Plain's shuffled within each kernel, the best of the same
  {len(ranked)} protocols has {fmean(chance):.3f} on average and {min(chance):.3f} at least;
  {as_well} of {len(chance)} shuffles do as well.
- Rows beyond two of the paper's std in every trial: {far}.

The best ten, and where each differs from the first:

{markdown(lines)}
"""
    write_whole(f'{out_dir}/search.md', text.encode())
    draw_choices(trials, f'{out_dir}/choices.png')
    print(text + f'Written to {out_dir}: search.md, choices.png')


def draw_choices(trials: Trials, path: str) -> None:
    """Misfit in the first stage by choice: a point a protocol, a line at the best of each value."""
    scored = [(s, p) for s, p in ranking(trials, 0) if math.isfinite(s)]
    fig, axes = plt.subplots(4, 4, figsize=(13, 11), squeeze=False)
    for ax, (name, values) in zip(axes.flat, CHOICES.items(), strict=True):
        for x, value in enumerate(values):
            misfits = [s for s, p in scored if p[name] == value]
            ax.plot([x] * len(misfits), misfits, 'o', color='tab:blue', alpha=0.4, ms=4)
            if misfits:
                ax.plot([x - 0.3, x + 0.3], [min(misfits)] * 2, color='tab:red')
        ax.set_title(name)
        ax.set_xticks(range(len(values)), map(str, values), fontsize=7)
        ax.set_yscale('log')
        ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel('misfit, RBF and Matern')
    save(fig, axes, path)


def settle(trials: Trials) -> None:
    """Print what synthetic_gp.py is to hold: the best protocol, and each kernel's parameters, the
    lengthscale interpolated so that Plain's level is the paper's over five repeats."""
    stage = furthest(trials)
    score_, protocol = ranking(trials, stage)[0]
    print(f'misfit {score_:.3f} in stage {stage}: ' +
          ', '.join(f'{name}={value!r}' for name, value in protocol.items()), flush=True)
    o = gp.Options(**protocol, device='cpu')
    for k, trial in best_shapes(trials, protocol, stage).items():
        shape = tuple(map(float, trial['shape'].split()))
        found = match(o, k, shape, float(trial['lengthscale']), {}, RATIO)
        print(f"{k}: {(found['lengthscale'], *shape)}, Plain {found['train']:.4f}, "
              f"{found['test']:.4f}", flush=True)


def main() -> None:
    o = build(Options, read_options(sys.argv[1:], Options))
    torch.set_num_threads(1)
    try:
        with open(f'{o.out_dir}/trials.csv', 'rb') as file:
            trials = read(file)
        if len(ranking(trials, 0)) < 2:
            fail(f'{o.out_dir}/trials.csv has fewer than two whole protocols: search first, with '
                 'python -m nanocem.gp_search')
        report(trials, o.out_dir)
        if o.settle:
            settle(trials)
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}')


if __name__ == '__main__':
    main()

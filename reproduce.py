"""
Measured answers, one command each: the runs a figure or table needs, run where missing, then drawn.

    python reproduce.py --list
    python reproduce.py curves                    mini Llama and CEM on the built-in corpus: loss curves and perplexities
    python reproduce.py choices --jobs=2          what the defaults were chosen by

A run is train.py with the options in the table, in out/reproduce/<its options>: finished ones are not done again, cut-off
ones go on. Results are written to results/: a Markdown table, a CSV, and for curves a PNG.
"""
import csv
import io
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import matplotlib
import numpy as np

from configurator import build, fail, read_options
from prepare_slimpajama import prepare_builtin, write_whole

matplotlib.use('Agg')
import matplotlib.pyplot as plt

LLAMA = 'config/llama.py --size=mini'
T1 = '--attn_steps=1 --mlp_steps=1'
ROPE = '--positions=rope --kq_diag=none'
ATTN = '--mlp=llama --mlp_steps=1 --preconditioner=diag --tokens=3M'  # CEM attention, Llama MLP
MLP = '--attn=llama --attn_steps=1 --preconditioner=diag --tokens=3M'  # Llama attention, CEM MLP

# What each table or figure compares: label -> options of train.py.
FIGURES: dict[str, dict[str, str]] = {
    'curves': {
        'Llama': LLAMA,
        'CEM, T = 1': T1,
        'CEM, T = 2': '',
        'CEM, T = 1, exact RoPE': f'{T1} {ROPE} --score_scale=head',
        'CEM, T = 2, exact RoPE': f'{ROPE} --score_scale=head',
    },
    'choices': {
        'Llama, init_std 0.02': f'{LLAMA} --init_std=0.02 --tokens=3M',
        'Llama, init_std 0.0693': f'{LLAMA} --init_std=0.0693 --tokens=3M',
        'Llama, init_std 0.125': f'{LLAMA} --init_std=0.125 --tokens=3M',
        'CEM T = 2, init_std 0.02': '--init_std=0.02 --tokens=3M',
        'CEM T = 2, init_std 0.0693': '--init_std=0.0693 --tokens=3M',
        'CEM T = 2, init_std 0.125': '--init_std=0.125 --tokens=3M',
        **{f'attention T = {t}, {label}': f'{ATTN} --attn_steps={t} {options}'.strip() for t in (1, 2) for label, options in {
            'Algorithm 1': '',
            'residual raw': '--residual=raw',
            'score_scale head': '--score_scale=head',
            'exact RoPE, no diagonal, score_scale head': f'{ROPE} --score_scale=head',
            'exact RoPE, no diagonal': ROPE,
            'exact RoPE, shared diagonal': '--positions=rope',
            'diagonal per head': '--kq_diag=per_head',
            'diagonal from 1': '--kq_diag_init=1',
            'no diagonal': '--kq_diag=none',
            'no diagonal, score_scale head': '--kq_diag=none --score_scale=head',
        }.items()},
        **{f'MLP T = {t}, {label}': f'{MLP} --mlp_steps={t} {options}'.strip() for t in (1, 2) for label, options in {
            'Algorithm 1': '',
            'residual raw': '--residual=raw',
        }.items()},
    },
}


@dataclass
class ReproduceConfig:
    """Which runs, and how."""
    seeds: tuple[int, ...] = (1, 2)  # every run is done once a seed
    jobs: int = 1  # runs side by side, the processor's cores shared among them
    list: bool = False  # print the runs and whether they are finished, and do nothing

    def __post_init__(self) -> None:
        if self.jobs < 1 or not self.seeds:
            raise ValueError(f'jobs={self.jobs}, seeds={self.seeds}: expected at least one of each')


def folder(options: str, seed: int) -> str:
    """Where a run lives: the same options share one run among all figures."""
    words = [word.removeprefix('--').removeprefix('config/').removesuffix('.py') for word in options.split()]
    return os.path.join('out', 'reproduce', '_'.join([*words, f'seed={seed}']))


def finished(out_dir: str) -> dict | None:
    """A run's result.json, None until it is finished."""
    try:
        with open(os.path.join(out_dir, 'result.json'), encoding='utf-8') as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def run(options: str, seed: int, jobs: int) -> str | None:
    """Do or finish one run; None if it went well, else the last line it printed."""
    out_dir = folder(options, seed)
    command = [sys.executable, 'train.py', *options.split(), f'--seed={seed}', f'--out_dir={out_dir}', '--tensorboard=False',
               '--sample_tokens=0']
    if os.path.exists(os.path.join(out_dir, 'config.json')):
        command.append('--init_from=resume')
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': threads}, check=False)
    return None if done.returncode == 0 else ((done.stderr or done.stdout).strip().splitlines() or ['no output'])[-1]


def run_missing(figures: list[str], cfg: ReproduceConfig) -> None:
    """All unfinished runs of these figures, with progress; failed ones are named and the rest go on."""
    wanted = {folder(o, s): (o, s) for f in figures for o in FIGURES[f].values() for s in cfg.seeds}
    missing = {out: run_ for out, run_ in wanted.items() if not finished(out)}
    print(f'{len(wanted)} runs, {len(wanted) - len(missing)} finished', flush=True)
    if missing and not os.path.exists('data/builtin/meta.json'):
        prepare_builtin('data/builtin')  # once, before runs side by side would
    start, done = time.monotonic(), 0
    with ThreadPoolExecutor(cfg.jobs) as pool:
        for out, error in zip(missing, pool.map(lambda r: run(*r, cfg.jobs), missing.values()), strict=True):
            done += 1
            left = timedelta(seconds=round((time.monotonic() - start) / done * (len(missing) - done)))
            print(f'{done}/{len(missing)} {out}: {f"FAILED: {error}" if error else "done"} | ETA {left}', flush=True)


def table(name: str, cfg: ReproduceConfig) -> None:
    """results/<name>.md and .csv: perplexities of every finished run, mean and standard deviation over seeds."""
    text, rows = io.StringIO(), []
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(['model', 'options', 'parameters', 'tokens', 'seed', 'val_perplexity', 'test_perplexity'])
    for label, options in FIGURES[name].items():
        results = [(s, r) for s in cfg.seeds if (r := finished(folder(options, s)))]
        for seed, r in results:
            writer.writerow([label, options, r['parameters'], r['tokens'], seed, round(r['val_perplexity'], 4),
                             round(r['test_perplexity'], 4)])
        if results:
            cells = [spread([r[k] for _, r in results]) for k in ('val_perplexity', 'test_perplexity')]
            cells = [label, f'`{options or "(defaults)"}`', f'{results[0][1]["parameters"]:,}', *cells, str(len(results))]
            rows.append(f'| {" | ".join(cells)} |')
    head = ['| model | options of train.py | parameters | validation perplexity | test perplexity | seeds |',
            '|---|---|---|---|---|---|']
    os.makedirs('results', exist_ok=True)
    write_whole(f'results/{name}.csv', text.getvalue().encode())
    write_whole(f'results/{name}.md', '\n'.join([*head, *rows, '']).encode())
    print('\n'.join(rows))


def spread(values: list[float]) -> str:
    return f'{statistics.fmean(values):.3f}' + (f' ± {statistics.stdev(values):.3f}' if len(values) > 1 else '')


def draw_curves(name: str, cfg: ReproduceConfig) -> None:
    """results/<name>.png: training loss (mean over seeds, smoothed) and validation loss (points) against tokens."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for n, (label, options) in enumerate(FIGURES[name].items()):
        logs = []
        for seed in cfg.seeds:
            if finished(folder(options, seed)):
                with open(os.path.join(folder(options, seed), 'log.jsonl'), encoding='utf-8') as file:
                    logs.append([json.loads(line) for line in file])
        if not logs:
            continue
        train = [[(line['tokens'], line['loss']) for line in log if 'lr' in line] for log in logs]
        tokens, loss = np.mean(train, axis=0).T
        per_step = tokens[0] / next(line['step'] for line in logs[0] if 'lr' in line)
        window = max(1, len(loss) // 12)
        smooth = np.convolve(loss, np.ones(window) / window, 'valid')
        axes.plot(tokens[window - 1:] / 1e6, smooth, color=f'C{n}', label=label, lw=1.5)
        val = [[(line['step'] * per_step / 1e6, line['val_loss']) for line in log if 'val_loss' in line] for log in logs]
        axes.plot(*np.mean(val, axis=0).T, 'o', color=f'C{n}', ms=4)
    axes.set(xlabel='million tokens (bytes)', ylabel='loss, nats a token', ylim=(1.1, 2.4))
    axes.set_title(f'mini models, built-in corpus: training (lines), validation (points), {len(cfg.seeds)} seeds', fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=120)
    write_whole(f'results/{name}.png', buffer.getvalue())


def main(argv: list[str]) -> None:
    names = [a for a in argv if not a.startswith('-')]
    cfg = build(ReproduceConfig, read_options([a for a in argv if a.startswith('-')], ReproduceConfig))
    for name in names:
        if name not in (*FIGURES, 'all'):
            fail(f'{name}: no such figure; there are {", ".join(FIGURES)}, all')
    figures = list(FIGURES) if 'all' in names or not names else names
    if cfg.list or not names:
        for name in figures:
            for label, options in FIGURES[name].items():
                done = sum(finished(folder(options, seed)) is not None for seed in cfg.seeds)
                print(f'{name}: {label}: train.py {options} ({done} of {len(cfg.seeds)} seeds finished)')
        return
    run_missing(figures, cfg)
    for name in figures:
        table(name, cfg)
        if name == 'curves':
            draw_curves(name, cfg)


if __name__ == '__main__':
    main(sys.argv[1:])

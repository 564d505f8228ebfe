"""
What a CEM model needs to train at twelve layers: the runs, the table and the pictures of this page.

    python results/depth/measure.py                   do the runs that are missing, two at a time
    python results/depth/measure.py --write_only      tables and pictures of those finished

Runs live in out/depth/ and are train.py's; each row of the tables is its options.
"""
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import matplotlib  # noqa: E402  after the path is set

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402

from model import ModelConfig, Transformer  # noqa: E402
from nanocem.files import read_json, read_json_lines, write_whole  # noqa: E402
from nanocem.shards import Sequences  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
BASE = ('--size=mini --n_layer=12 --n_head=4 --context_length=64 --tokens=1.5M '
        '--learning_rate=4e-3 --data=data/builtin --sample_tokens=0 --tensorboard=False '
        '--checkpoint_interval=100000 --eval_interval=1000000 --dtype=float32')
LLAMA = '--attn=llama --mlp=llama'
T1 = '--attn_steps=1 --mlp_steps=1'
ROPE = '--positions=rope --kq_diag=shared --score_scale=head'
SMALL = '--embedding_std=0.0693'  # as all other weights at this width
DISPLACED = '--residual=displacement'
HEAD = '--score_scale=head'
QUARTER = '--attn_step_size=0.25 --mlp_step_size=0.25'
WIDE = '--d_model=128 --n_head=8 --d_mlp=344 --tokens=0.8M --learning_rate=2.8e-3'
SEEDS = (1337, 1, 2)
DEPTHS = (2, 4, 8, 12, 16)

RATE, WIDER = '--learning_rate=8e-3', 'twice the width, 0.8 M bytes'
# Rows: options over BASE and the defaults. Three seeds, at the best rate:
FINAL = {
    'llama-8e-3': f'{LLAMA} {RATE}',
    'cem-1-8e-3': f'{T1} {RATE}',
    'cem-2-raw-8e-3': RATE,
    'cem-2-8e-3': f'{DISPLACED} {RATE}',
    'cem-1-head-8e-3': f'{T1} {HEAD} {RATE}',
    'cem-2-head-8e-3': f'{HEAD} {RATE}',
}
# One seed each, by question
CHOICES = {
    'other rates': {
        'llama': LLAMA,
        'cem-1': T1,
        'cem-2-raw': '',
        'llama-16e-3': f'{LLAMA} --learning_rate=16e-3',
        'cem-1-16e-3': f'{T1} --learning_rate=16e-3',
    },
    'positions': {
        'cem-1-rope': f'{T1} {ROPE}',
        'llama-alibi': f'{LLAMA} --positions=alibi',
        'cem-1-no-diagonal': f'{T1} --kq_diag=none',
    },
    'one sublayer': {
        'attn-1': f'{T1} --mlp=llama',
        'mlp-1': f'{T1} --attn=llama',
    },
    'residual and step size': {
        'cem-2': DISPLACED,
        'cem-2-normed': '--residual=normed',
        'cem-2-quarter': f'{DISPLACED} {QUARTER}',
    },
    'the embedding': {
        'llama-small': f'{LLAMA} {SMALL}',
        'cem-1-small': f'{T1} {SMALL}',
    },
    'heads': {
        'cem-1-heads-32': f'{T1} --n_head=2',
        'llama-heads-32': f'{LLAMA} --n_head=2',
    },
    'weights': {
        'cem-1-decay': f'{T1} --weight_decay=0',
        'cem-1-plain': f'{T1} --preconditioner=none',
    },
    WIDER: {
        'wide-llama': f'{LLAMA} {WIDE}',
        'wide-cem-1': f'{T1} {WIDE}',
        'wide-cem-2-raw': WIDE,
        'wide-cem-2': f'{DISPLACED} {WIDE}',
        'wide-llama-alibi': f'{LLAMA} {WIDE} --positions=alibi',
        'wide-llama-5.6e-3': f'{LLAMA} {WIDE} --learning_rate=5.6e-3',
        'wide-cem-1-5.6e-3': f'{T1} {WIDE} --learning_rate=5.6e-3',
        'wide-cem-1-heads-32': f'{T1} {WIDE} --n_head=4',
    },
}
# One seed at every depth of DEPTHS, 0.6 M bytes
BY_DEPTH = {
    'llama': LLAMA,
    'cem-1': T1,
    'cem-2-raw': '',
    'cem-2': DISPLACED,
}
SHAPE = ('--data=data/builtin --context_length=128 --batch_size=16 --micro_batch_size=16 '
         '--dtype=bfloat16 --tokens=409600 --warmup=0.25 --log_interval=1 --eval_interval=50 '
         '--eval_tokens=20000 --test_tokens=100000 --tensorboard=False --checkpoint_interval=100 '
         '--keep_checkpoints=1 --sample_tokens=0')
CEM = 'config/cem_t2.py'
SHAPES = {
    'shape-llama': 'config/llama.py',
    'shape-cem-raw': CEM,
    'shape-cem-head': f'{CEM} {HEAD}',
    'shape-cem': f'{CEM} {DISPLACED}',
    'shape-llama-small': 'config/llama.py --embedding_std=0.02',
    'shape-cem-small': f'{CEM} {DISPLACED} --embedding_std=0.02',
    'shape-cem-small-raw': f'{CEM} --embedding_std=0.02 --stop_step=100',
    'shape-cem-small-normed': f'{CEM} --embedding_std=0.02 --residual=normed --stop_step=77',
    'shape-cem-small-normed-quarter':
        f'{CEM} --embedding_std=0.02 --residual=normed {QUARTER} --stop_step=78',
    'shape-86m-llama': 'config/llama.py --size=86m --stop_step=40',
    'shape-86m-cem': f'{CEM} {DISPLACED} --size=86m --stop_step=40',
    'shape-162m-llama': 'config/llama.py --size=162m --stop_step=40',
    'shape-162m-cem': f'{CEM} {DISPLACED} --size=162m --stop_step=40',
}


def out_dir(name: str, seed: int) -> str:
    return os.path.join(ROOT, 'out', 'depth', f'{name}-{seed}')


def perplexity(name: str, seed: int) -> float | None:
    """Test perplexity of a finished run."""
    result = read_json(os.path.join(out_dir(name, seed), 'result.json'))
    return result and result['test_perplexity']


def train(name: str, options: str, seed: int) -> None:
    """Do or finish a run, on one thread."""
    folder = out_dir(name, seed)
    base = SHAPE if name in SHAPES else BASE
    command = [sys.executable, 'train.py', *base.split(), *options.split(), f'--seed={seed}',
               f'--out_dir={folder}']  # of an option given twice the later one holds
    if os.path.exists(os.path.join(folder, 'config.json')):
        command.append('--init_from=resume')
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, 'OMP_NUM_THREADS': '1'},
                          capture_output=True, text=True, check=False)
    last_line = (done.stderr or done.stdout).strip().rpartition('\n')[2]
    print(name, seed, perplexity(name, seed) or last_line, flush=True)


def rows() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every run but the paper's shape: name -> options over BASE, and seeds."""
    found = {name: (options, SEEDS) for name, options in FINAL.items()}
    for table in CHOICES.values():
        found |= {name: (options, SEEDS[:1]) for name, options in table.items()}
    for kind, options in BY_DEPTH.items():
        for layers in DEPTHS:
            found[f'{kind}-{layers}-layers'] = (
                f'{options} --n_layer={layers} --tokens=0.6M', SEEDS[:1])
    return found


def write_whole_text(name: str, text: str) -> None:
    write_whole(os.path.join(HERE, name), text.encode())


def cell(name: str, seeds: Sequence[int]) -> str:
    values = [p for seed in seeds if (p := perplexity(name, seed)) is not None]
    if not values:
        return ''
    spread = f' ± {statistics.stdev(values):.3f}' if len(values) > 1 else ''
    return f'{statistics.fmean(values):.3f}{spread}'


def shown(options: str) -> str:
    return f'`{options}`' if options else 'the defaults'


def row(name: str, beside: str = 'llama') -> list[str]:
    """A line of a table, or none: options, seeds, perplexity, and how far it is over `beside`."""
    options, seeds = rows()[name]
    seeds = [seed for seed in seeds if perplexity(name, seed) and perplexity(beside, seed)]
    if not seeds:
        return []
    gap = statistics.fmean(perplexity(name, seed) / perplexity(beside, seed) for seed in seeds) - 1
    return [f'| {shown(options)} | {len(seeds)} | {cell(name, seeds)} | {gap:+.1%} |']


def write_tables() -> None:
    """gap.md and depth.md, of the runs that are finished."""
    lines = []
    for title, names in {'at the best rate': FINAL, **CHOICES}.items():
        beside = {'at the best rate': 'llama-8e-3', WIDER: 'wide-llama'}.get(title, 'llama')
        found = [line for name in names for line in row(name, beside)]
        if found:
            lines += [f'| {title} | seeds | test perplexity | over Llama |', '|---|---|---|---|',
                      *found, '']
    write_whole_text('gap.md', '\n'.join(lines))
    if not any(cell(f'{kind}-{n}-layers', SEEDS[:1]) for kind in BY_DEPTH for n in DEPTHS):
        return
    heads = ' | '.join(f'{n} layers' for n in DEPTHS)
    lines = [f'| 64 wide, 0.6 M bytes | {heads} |', '|---' * (len(DEPTHS) + 1) + '|']
    for kind, options in BY_DEPTH.items():
        cells = (cell(f'{kind}-{n}-layers', SEEDS[:1]) for n in DEPTHS)
        lines.append(f'| {shown(options)} | {" | ".join(cells)} |')
    write_whole_text('depth.md', '\n'.join(lines) + '\n')


def profile(options: dict, steps: int = 100, rate: float = 2e-3) -> dict[int, tuple[list, list]]:
    """{step: (gradient norm by layer, size of each layer's update over its input)} at the start
    and after `steps` steps of AdamW, the warm-up a tenth of them."""
    data = Sequences(os.path.join(ROOT, 'data', 'builtin'), 'train', 64)
    cfg = ModelConfig(size='mini', n_layer=12, n_head=4, context_length=64, vocab_size=257,
                      **options)
    torch.manual_seed(1)
    model = Transformer(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-9)
    sizes: list[float] = []

    def look(block: torch.nn.Module, args: tuple, out: torch.Tensor) -> None:
        x = args[0].detach()
        sizes.append(float((out.detach() - x).norm() / x.norm()))

    for block in model.blocks:
        block.register_forward_hook(look)
    found = {}
    for step in range(steps + 1):
        sizes.clear()
        x, y = data.batch([(step * 32 + b) * 7919 % len(data) for b in range(32)])
        model.zero_grad()
        model(x, y)[1].backward()
        if step in (0, steps):
            norms = [sum(float(p.grad.norm()) ** 2 for p in block.parameters()) ** 0.5
                     for block in model.blocks]
            found[step] = (norms, list(sizes))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group['lr'] = rate * min(1.0, (step + 1) / (0.1 * steps))
        optimizer.step()
    return found


def draw_profile() -> None:
    """Gradient norms and update sizes by layer."""
    small = dict(embedding_std=0.0693)
    kinds = {'Llama': dict(attn='llama', mlp='llama'),
             'CEM, T = 1': dict(attn_steps=1, mlp_steps=1),
             'CEM, T = 2': {},
             'CEM, T = 2, small embedding': small,
             'CEM, T = 2, normed, steps of one': dict(
                 small, residual='normed', attn_step_size=1.0, mlp_step_size=1.0)}
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True)
    for kind, options in kinds.items():
        for column, (step, values) in enumerate(profile(options).items()):
            axes[0, column].set_title('at the start' if step == 0 else f'after {step} steps')
            for ax, by_layer in zip(axes[:, column], values, strict=True):
                ax.semilogy(range(1, 13), by_layer, marker='.', label=kind)
    axes[0, 0].set_ylabel('gradient norm of a layer')
    axes[1, 0].set_ylabel("a layer's update over its input")
    for ax in axes[1]:
        ax.set_xlabel('layer')
    axes[1, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(os.path.join(HERE, 'profile.png'), dpi=120)


def read_log(name: str) -> list[dict]:
    """What the first run of a shape logged; nothing where it is not begun."""
    path = os.path.join(out_dir(name, 1), 'log.jsonl')
    return read_json_lines(path) if os.path.exists(path) else []


def draw_shape() -> None:
    """The paper's shape: config/cem_t2.py beside config/llama.py; and the residuals tried there."""
    small = ', embedding N(0, 0.02)'
    panels = (
        ('config/cem_t2.py and config/llama.py', {
            'shape-llama': 'Llama', 'shape-cem-raw': 'CEM, T = 2',
            'shape-llama-small': 'Llama' + small}),
        ('residuals of CEM, T = 2', {
            'shape-cem-raw': 'raw', 'shape-cem': 'displacement',
            'shape-cem-small-raw': 'raw' + small, 'shape-cem-small': 'displacement' + small,
            'shape-cem-small-normed': 'normed' + small}))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for ax, (title, names) in zip(axes, panels, strict=True):
        for name, label in names.items():
            if not (log := [line for line in read_log(name) if 'lr' in line]):
                continue
            losses = [line['loss'] for line in log]
            means = [statistics.fmean(losses[max(0, i - 4):i + 1]) for i in range(len(losses))]
            style = '--' if small in label else '-'
            ax.plot([line['step'] for line in log], means, style, label=label)
        ax.set(xlabel='step of 2,048 bytes', title=title, ylim=(1.5, 4))
        ax.legend(fontsize=8)
    axes[0].set_ylabel('training loss, nats a byte, mean of 5 steps')
    figure.tight_layout()
    figure.savefig(os.path.join(HERE, 'shape.png'), dpi=120)


def write_shapes() -> None:
    """shapes.md: the paper's shapes beside Llama's."""
    lines = ['| 2,048 bytes a step, seed 1 | step 50 | 100 | 150 | test loss | perplexity |',
             '|---|---|---|---|---|---|']
    for name, options in SHAPES.items():
        if not (log := read_log(name)):
            continue
        vals = {line['step']: line['val_loss'] for line in log
                if line.get('val_loss') is not None}
        cells = [f'{vals[step]:.3f}' if step in vals else '' for step in (50, 100, 150)]
        p = perplexity(name, 1)
        if not vals and not p:  # stopped before its first validation
            continue
        cells += [f'{math.log(p):.3f}', f'{p:.3f}'] if p else ['', '']
        lines.append(f'| `{options}` | {" | ".join(cells)} |')
    write_whole_text('shapes.md', '\n'.join(lines) + '\n')


def main() -> None:
    if '--write_only' not in sys.argv:
        runs = [(name, options, seed) for name, (options, seeds) in rows().items()
                for seed in seeds if perplexity(name, seed) is None]
        runs += [(name, options, 1) for name, options in SHAPES.items()
                 if perplexity(name, 1) is None]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda run: train(*run), runs))
    write_tables()
    write_shapes()
    draw_shape()
    draw_profile()


if __name__ == '__main__':
    main()

"""
What a CEM model needs to train at twelve layers: the runs, the table and the pictures of this page.

    python results/depth/measure.py                   do the runs that are missing, two at a time
    python results/depth/measure.py --write_only      tables and pictures of those finished

Runs live in out/depth/ and are train.py's; each row of the tables is its options.
"""
import json
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
from nanocem.files import write_whole  # noqa: E402
from nanocem.shards import Sequences  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
BASE = ('--size=mini --n_layer=12 --n_head=4 --context_length=64 --tokens=1.5M '
        '--learning_rate=4e-3 --data=data/builtin --sample_tokens=0 --tensorboard=False '
        '--checkpoint_interval=100000 --eval_interval=1000000')
LLAMA = '--attn=llama --mlp=llama'
T1 = '--attn_steps=1 --mlp_steps=1'
ROPE = '--positions=rope --kq_diag=none --score_scale=head'
DIAG = '--positions=rope --kq_diag=shared --score_scale=head'
ALIBI = '--positions=alibi --kq_diag=shared --score_scale=model'
NORMED, SKIP = '--residual=normed', '--residual=displacement'
SEEDS = (1337, 1, 2)
DEPTHS = (2, 4, 8, 12, 16)

# Three seeds, each model at the best of the rates looked at
FINAL = {
    'llama': LLAMA,
    'cem-1-rope-diag-normed': f'{T1} {DIAG} {NORMED}',
    'cem-2-rope-diag-normed': f'{DIAG} {NORMED}',
}
# One seed each: what closes the gap to Llama, and what does not
HALF = '--attn_step_size=0.5 --mlp_step_size=0.5'
QUARTER = '--attn_step_size=0.25 --mlp_step_size=0.25'
EIGHTH = '--attn_step_size=0.125 --mlp_step_size=0.125'
ONES = '--attn_step_size=1 --mlp_step_size=1'
CHOICES = {
    # residual, step size
    'cem-1-normed-quarter': f'{T1} {DIAG} {NORMED} {QUARTER}',
    'cem-2-normed-quarter': f'{DIAG} {NORMED} {QUARTER}',
    'cem-1-normed-half': f'{T1} {DIAG} {NORMED} {HALF}',
    'cem-1-rope-diag': f'{T1} {DIAG} {SKIP}',
    'cem-2-rope-diag': f'{DIAG} {SKIP}',
    'cem-2-rope-diag-raw': f'{DIAG} --residual=raw',
    'cem-2-normed-eighth': f'{DIAG} {NORMED} {EIGHTH}',
    'cem-2-normed-one': f'{DIAG} {NORMED} {ONES}',
    # positions
    'cem-2-alibi': f'{ALIBI} {SKIP}',
    'cem-2-alibi-normed': f'{ALIBI} {NORMED}',
    'cem-2-alibi-normed-quarter': f'{ALIBI} {NORMED} {QUARTER}',
    'cem-1-alibi-normed-quarter': f'{T1} {ALIBI} {NORMED} {QUARTER}',
    'cem-1-alibi-normed': f'{T1} {ALIBI} {NORMED}',
    'cem-2-rope-normed': f'{ROPE} {NORMED}',
    'cem-1-rope': f'{T1} {ROPE} {SKIP}',
    'cem-2-rope': f'{ROPE} {SKIP}',
    'cem-1-alibi': f'{T1} {ALIBI} {SKIP}',
    'cem-2-alibi-eta1': f'{ALIBI} {SKIP} {ONES}',
    # learning rate
    'llama-8e-3': f'{LLAMA} --learning_rate=8e-3',
    'cem-1-normed-8e-3': f'{T1} {DIAG} {NORMED} --learning_rate=8e-3',
    'cem-2-normed-8e-3': f'{DIAG} {NORMED} --learning_rate=8e-3',
    'llama-2e-3': f'{LLAMA} --learning_rate=2e-3',
    'cem-1-normed-2e-3': f'{T1} {DIAG} {NORMED} --learning_rate=2e-3',
    'cem-2-normed-2e-3': f'{DIAG} {NORMED} --learning_rate=2e-3',
    # which sublayer
    'cem-attn-1': f'{T1} {DIAG} {NORMED} --mlp=llama',
    'cem-attn-2': f'{DIAG} {NORMED} --mlp=llama --mlp_steps=1',
    'cem-mlp-1': f'--attn=llama {T1} {NORMED}',
    'cem-mlp-2': f'--attn=llama --attn_steps=1 {NORMED}',
    # weights, heads
    'cem-1-init': f'{T1} {DIAG} {NORMED} --init_std=0.14',
    'cem-1-decay': f'{T1} {DIAG} {NORMED} --weight_decay=0',
    'llama-decay': f'{LLAMA} --weight_decay=0',
    'cem-1-plain': f'{T1} {DIAG} {NORMED} --preconditioner=none',
    'cem-1-heads-32': f'{T1} {DIAG} {NORMED} --n_head=2',
    'llama-heads-32': f'{LLAMA} --n_head=2',
    'cem-1-heads-64': f'{T1} {DIAG} {NORMED} --n_head=1',
    'llama-heads-64': f'{LLAMA} --n_head=1',
}
# Twice the width, one seed
WIDTH = '--d_model=128 --n_head=8 --d_mlp=344 --tokens=0.8M --learning_rate=2.8e-3'
WIDE = {
    'wide-llama': f'{LLAMA} {WIDTH}',
    'wide-cem-1-normed': f'{T1} {DIAG} {NORMED} {WIDTH}',
    'wide-cem-2-normed': f'{DIAG} {NORMED} {WIDTH}',
    'wide-cem-2': f'{DIAG} {SKIP} {WIDTH}',
}
# One seed at every depth of DEPTHS
BY_DEPTH = {
    'llama': LLAMA,
    'cem-1-normed': f'{T1} {DIAG} {NORMED}',
    'cem-2-normed': f'{DIAG} {NORMED}',
    'cem-2-normed-eta1': f'{DIAG} {NORMED} {ONES}',
    'cem-2': f'{DIAG} {SKIP}',
}
SHAPE = ('--data=data/builtin --context_length=128 --batch_size=16 --micro_batch_size=16 '
         '--dtype=bfloat16 --tokens=409600 --warmup=0.25 --log_interval=1 --eval_interval=50 '
         '--eval_tokens=20000 --test_tokens=100000 --tensorboard=False --checkpoint_interval=100 '
         '--keep_checkpoints=1')
SHAPES = {
    'shape-llama': 'config/llama.py',
    'shape-cem-normed': f'config/cem_t2.py {NORMED}',
    'shape-cem': f'config/cem_t2.py {SKIP}',
}


def out_dir(name: str, seed: int) -> str:
    return os.path.join(ROOT, 'out', 'depth', f'{name}-{seed}')


def perplexity(name: str, seed: int) -> float | None:
    """Test perplexity of a finished run."""
    path = os.path.join(out_dir(name, seed), 'result.json')
    if not os.path.exists(path):
        return None
    with open(path, encoding='utf-8') as file:
        return json.load(file)['test_perplexity']


def train(name: str, options: str, seed: int) -> None:
    """Do or finish a run, on one thread."""
    folder = out_dir(name, seed)
    base = SHAPE if name in SHAPES else BASE
    given = {word.partition('=')[0]: word for word in f'{options} {base}'.split()}
    given |= {word.partition('=')[0]: word for word in options.split()}  # a run's own win
    command = [sys.executable, 'train.py', *given.values(), f'--seed={seed}', f'--out_dir={folder}']
    if os.path.exists(os.path.join(folder, 'config.json')):
        command.append('--init_from=resume')
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, 'OMP_NUM_THREADS': '1'},
                          capture_output=True, text=True, check=False)
    last_line = (done.stderr or done.stdout).strip().rpartition('\n')[2]
    print(name, seed, perplexity(name, seed) or last_line, flush=True)


def rows() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every run but the paper's shape: name -> options over BASE, and seeds."""
    found = {name: (options, SEEDS) for name, options in FINAL.items()}
    found |= {name: (options, SEEDS[:1]) for name, options in CHOICES.items()}
    found |= {name: (options, SEEDS[:1]) for name, options in WIDE.items()}
    for kind, options in BY_DEPTH.items():
        for layers in DEPTHS:
            found[f'{kind}-{layers}'] = (
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


def write_tables() -> None:
    lines = ['| 12 layers, 64 wide, 1.5 M bytes | seeds | test perplexity | over Llama |',
             '|---|---|---|---|']
    for name, options in {**FINAL, **CHOICES}.items():
        seeds = [seed for seed in rows()[name][1]
                 if perplexity(name, seed) is not None and perplexity('llama', seed) is not None]
        if not seeds:
            continue
        pairs = [(perplexity(name, seed), perplexity('llama', seed)) for seed in seeds]
        gap = statistics.fmean(a / b - 1 for a, b in pairs)
        lines.append(f'| `{options}` | {len(seeds)} | {cell(name, seeds)} | {gap:+.1%} |')
    write_whole_text('gap.md', '\n'.join(lines) + '\n')
    heads = ' | '.join(f'{n} layers' for n in DEPTHS)
    lines = [f'| 64 wide, 0.6 M bytes | {heads} |', '|---' * (len(DEPTHS) + 1) + '|']
    for kind, options in BY_DEPTH.items():
        cells = (cell(f'{kind}-{n}', SEEDS[:1]) for n in DEPTHS)
        lines.append(f'| `{options}` | {" | ".join(cells)} |')
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
    """Gradient norms and update sizes by layer, for the three residuals and Llama."""
    llama = dict(attn='llama', mlp='llama')
    paper = dict(positions='alibi', kq_diag='shared', score_scale='model', attn_step_size=1.0,
                 mlp_step_size=1.0)
    kinds = {'Llama': llama, **{f'CEM, T = 2, {r}': dict(paper, residual=r)
                                for r in ('normed', 'raw', 'displacement')}}
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True)
    for kind, options in kinds.items():
        for column, (step, values) in enumerate(profile(options).items()):
            for row in (0, 1):
                axes[row, column].semilogy(range(1, 13), values[row], marker='.', label=kind)
                axes[0, column].set_title('at the start' if step == 0 else f'after {step} steps')
    axes[0, 0].set_ylabel('gradient norm of a layer')
    axes[1, 0].set_ylabel("a layer's update over its input")
    for ax in axes[1]:
        ax.set_xlabel('layer')
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(os.path.join(HERE, 'profile.png'), dpi=120)


def read_log(folder: str) -> list[dict]:
    with open(os.path.join(folder, 'log.jsonl'), encoding='utf-8') as file:
        return [json.loads(line) for line in file]


def draw_shape() -> None:
    """The paper's shape: config/cem_t2.py beside config/llama.py, loss by step."""
    figure, ax = plt.subplots(figsize=(6.4, 4))
    for name, label in (('shape-llama', 'Llama'), ('shape-cem', 'CEM, T = 2')):
        folder = out_dir(name, 1)
        if not os.path.exists(os.path.join(folder, 'log.jsonl')):
            continue
        log = [line for line in read_log(folder) if 'lr' in line]
        ax.plot([line['step'] for line in log], [line['loss'] for line in log], label=label)
    ax.set(xlabel='step of 2,048 bytes', ylabel='training loss, nats a byte')
    ax.legend()
    figure.tight_layout()
    figure.savefig(os.path.join(HERE, 'shape.png'), dpi=120)


def main() -> None:
    if '--write_only' not in sys.argv:
        runs = [(name, options, seed) for name, (options, seeds) in rows().items()
                for seed in seeds if perplexity(name, seed) is None]
        runs.sort(key=lambda run: SEEDS.index(run[2]))
        runs += [(name, options, 1) for name, options in SHAPES.items()
                 if perplexity(name, 1) is None]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda run: train(*run), runs))
    write_tables()
    draw_profile()
    draw_shape()


if __name__ == '__main__':
    main()

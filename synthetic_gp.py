"""
Reproduce the paper's table on recursion (its appendix): regression on Gaussian-process samples.

    python synthetic_gp.py                      the table: 6 models x 5 kernels, beside the paper's
    python synthetic_gp.py --protocol=blind     the same by the other protocol, see below
    python synthetic_gp.py --repeats=2 --points=1000 --steps=200        a first look
    python synthetic_gp.py --kernels=rbf,matern --models=Gated,CEM-T3,CEM-T16

The paper gives sizes and results but not the protocol. `inferred` is the protocol whose table is
nearest to the paper's. It evaluates the epoch with the lowest test error, so its test RMSE is too
low as an estimate of the error at new points. `blind` was tuned on the rows of the Plain model
alone, and evaluates the last step.

A row of the table is one model trained on one kernel, R times: every repeat has its own sample and
initial weights. The repeats train together: weights and batches have a leading dimension R, and the
gradient of the summed loss gives every repeat its own gradient. N counts points, D is the width.
"""
import csv
import hashlib
import math
import os
import re
import signal
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import active_children, get_context
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from configurator import build, command_line, fail, in_range, read_options
from nanocem.files import say, table, write_atomic

INPUTS, D = 10, 64
FLOP_ROWS = 200  # the paper counts the FLOPs of a forward pass over 200 rows
JITTER = 1e-6  # on the kernel's diagonal: noise of std 0.001, far below every RMSE of the table

# `parameters` are those of each kernel's function: the lengthscale, then Matern's nu, Periodic's
# period, Rational Quadratic's alpha, Non-Stationary's slope and nu.
INFERRED = dict(batch_size=64, steps=2000, learning_rate=5e-4, schedule='constant',
                init_cem='normal', checkpoint='best', parameters=dict(
                    rbf=(6.36,), matern=(16.4, 0.5), periodic=(2.42, 8.0),
                    rational_quadratic=(4.88, 0.1), non_stationary=(17.7, 0.5, 1.5)))
BLIND = dict(batch_size=200, steps=1000, learning_rate=2e-3, schedule='cosine',
             init_cem='linear', checkpoint='last', parameters=dict(
                 rbf=(4.83,), matern=(2.86, 1.5), periodic=(4.78, 4.0),
                 rational_quadratic=(2.76, 1.0), non_stationary=(5.36, 0.5)))
PROTOCOLS = {'inferred': INFERRED, 'blind': BLIND}
COLUMNS = ('train_rmse', 'train_std', 'test_rmse', 'test_std')
Row = list[float]  # one number for each of COLUMNS
Key = tuple[str, str]  # kernel and model


# Kernels: a (N, inputs), b (M, inputs) -> (N, M), ones on the diagonal

def sq_dist(a: Tensor, b: Tensor) -> Tensor:
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_(min=0)


def correlation(sq: Tensor, nu: float) -> Tensor:
    """Return Matern's correlation at squared distances in units of the squared lengthscale. nu is
    1/2, 3/2 or infinity, which is RBF."""
    if nu == math.inf:
        return torch.exp(-0.5 * sq)
    r = (2 * nu * sq).sqrt()
    return torch.exp(-r) if nu == 0.5 else (1 + r) * torch.exp(-r)


def matern(a: Tensor, b: Tensor, lengthscale: float, nu: float = math.inf) -> Tensor:
    """Return Matern's kernel; without nu it is RBF: exp(-|a - b|^2 / (2 lengthscale^2))."""
    return correlation(sq_dist(a, b) / lengthscale ** 2, nu)


def periodic(a: Tensor, b: Tensor, lengthscale: float, period: float) -> Tensor:
    """Return prod_d exp(-2 sin^2(pi (a_d - b_d) / period) / lengthscale^2). With the sine of the
    whole distance |a - b| it would not be positive definite. On a circle for each coordinate, two
    points have the squared distance 4 sin^2, so this is RBF between points on circles."""
    def on_circles(x: Tensor) -> Tensor:
        angles = 2 * math.pi / period * x
        return torch.cat([angles.cos(), angles.sin()], dim=1)
    return matern(on_circles(a), on_circles(b), lengthscale)


def rational_quadratic(a: Tensor, b: Tensor, lengthscale: float, alpha: float) -> Tensor:
    """Return (1 + |a - b|^2 / (2 alpha lengthscale^2))^-alpha, a mixture of RBF kernels."""
    return (1 + sq_dist(a, b) / (2 * alpha * lengthscale ** 2)) ** -alpha


def non_stationary(a: Tensor, b: Tensor, lengthscale: float, slope: float,
                   nu: float = math.inf) -> Tensor:
    """Return Matern's kernel with a lengthscale l(x) = lengthscale exp(slope x_1) at each point
    (Paciorek and Schervish 2004): (l(a) l(b) / s)^(inputs / 2) times Matern's at |a - b|^2 / s,
    s = (l(a)^2 + l(b)^2) / 2. Without nu it is Gibbs's (Rasmussen and Williams 2006, Eq. 4.32)."""
    la = lengthscale * torch.exp(slope * a[:, :1])
    lb = lengthscale * torch.exp(slope * b[:, 0])
    s = (la ** 2 + lb ** 2) / 2  # (N, M)
    return (la * lb / s) ** (a.shape[1] / 2) * correlation(sq_dist(a, b) / s, nu)


KERNELS = {
    'rbf': ('RBF', matern), 'matern': ('Matern', matern), 'periodic': ('Periodic', periodic),
    'rational_quadratic': ('Rational Quadratic', rational_quadratic),
    'non_stationary': ('Non-Stationary', non_stationary),
}
MODELS = ('Plain', 'Gated', 'CEM-T1', 'CEM-T2', 'CEM-T4', 'CEM-T8')


@dataclass
class Options:
    """What to run. Defaults from batch_size to checkpoint are those of --protocol=inferred."""
    protocol: Literal['inferred', 'blind'] = 'inferred'  # training and kernel parameters, see above
    kernels: tuple[Literal[tuple(KERNELS)], ...] = tuple(KERNELS)  # to sample from
    models: tuple[str, ...] = MODELS  # Plain, Gated, or CEM-T and the number of its steps
    repeats: int = 5  # R; each has its own sample and initial weights
    seed: int = 0  # for samples, initial weights and the order of batches
    points: int = 4000  # training points per sample, uniform on [-1, 1]^10
    test_points: int = 1000  # test points per sample
    batch_size: int = INFERRED['batch_size']  # points per step
    steps: int = INFERRED['steps']  # number of AdamW steps
    learning_rate: float = INFERRED['learning_rate']  # peak learning rate
    schedule: Literal['constant', 'cosine'] = INFERRED['schedule']  # cosine has a warm-up
    init_cem: Literal['linear', 'normal'] = INFERRED['init_cem']  # normal: W, V ~ N(0, 1/D)
    checkpoint: Literal['last', 'best'] = INFERRED['checkpoint']  # best: by test error
    jobs: int = 2  # number of processes, each with one thread
    out_dir: str = 'out/gp'  # folder for tables and figures

    def __post_init__(self) -> None:
        in_range(self, 2, 10**6, 'repeats')  # one has no standard deviation
        in_range(self, 1, 10**6, 'steps jobs')
        in_range(self, 1, 20_000, 'points test_points')  # the kernel's matrix must fit in memory
        in_range(self, 0, 2**63 - 1, 'seed')
        in_range(self, 0, 1000, 'learning_rate')
        in_range(self, 1, self.points, 'batch_size')
        for model in self.models:
            if not re.fullmatch(r'Plain|Gated|CEM-T[1-9]\d{0,3}', model):
                fail(f'models={model}: expected Plain, Gated or CEM-T1, CEM-T2, ...')


def generator(o: Options, repeat: int, purpose: str) -> torch.Generator:
    """Return the random number generator for a repeat's data, weights or batches. It does not
    depend on which other repeats, models or kernels run."""
    digest = hashlib.sha256(f'{o.seed} {repeat} {purpose}'.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], 'big'))


def sample_gp(o: Options, kernel: str, repeats: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Sample f = L z at training and test points, where L L^T is their kernel matrix. Returns
    inputs (R, N, 10) and values (R, N, 1). A repeat has the same inputs and z for every kernel."""
    N = o.points + o.test_points
    xs, ys = [], []
    for repeat in repeats:
        g = generator(o, repeat, 'data')
        x = 2 * torch.rand(N, INPUTS, generator=g, dtype=torch.float64) - 1
        z = torch.randn(N, 1, generator=g, dtype=torch.float64)
        K = KERNELS[kernel][1](x, x, *PROTOCOLS[o.protocol]['parameters'][kernel])
        K.diagonal().add_(JITTER)
        xs.append(x.float().numpy())
        ys.append((torch.linalg.cholesky(K) @ z).float().numpy())
    return np.stack(xs), np.stack(ys)


def recursion_steps(model: str) -> int:
    """Return T: the number at the end of a CEM model's name; 1 for the others."""
    return int(model.removeprefix('CEM-T')) if model.startswith('CEM-T') else 1


def init(o: Options, model: str, repeats: Sequence[int]) -> dict[str, Tensor]:
    """Return initial weights (R, out, in) and biases (R, 1, out) by name."""
    blocks = {'Plain': {'fc': (256, D), 'proj': (D, 256)},
              'Gated': {'gate': (170, D), 'up': (170, D), 'down': (D, 170)}}
    block = blocks.get(model, {'W': (170, D), 'V': (170, D)})
    copies = []
    for repeat in repeats:
        g = generator(o, repeat, 'weights')
        w = {'ln_gain': torch.ones(1, D), 'ln_bias': torch.zeros(1, D)}
        for name, (n_out, n_in) in {'in': (D, INPUTS), 'out': (1, D), **block}.items():
            bound = n_in ** -0.5  # nn.Linear's weights and biases are uniform in +-bound
            if name in ('W', 'V') and o.init_cem == 'normal':
                w[name] = bound * torch.randn(n_out, n_in, generator=g)
            else:
                w[name] = bound * (2 * torch.rand(n_out, n_in, generator=g) - 1)
            if name not in ('W', 'V'):
                w[name + '_bias'] = bound * (2 * torch.rand(1, n_out, generator=g) - 1)
        copies.append(w)
    return {name: torch.stack([w[name] for w in copies]).requires_grad_() for name in copies[0]}


def recursion(w: dict[str, Tensor], h: Tensor, T: int) -> Tensor:
    """Take T gradient steps from h on the element-wise energy xi(u | h) = -gamma . phi(V u),
    gamma = W h, phi' = SiLU (Eq. 7): x <- x + V^T (gamma * silu(V x)) (Eq. 15 with P = I).
    h and the result are (R, N, D)."""
    x = h
    gamma = h @ w['W'].mT  # (R, N, 170)
    for _ in range(T):
        x = torch.baddbmm(x, gamma * F.silu(x @ w['V'].mT), w['V'])
    return x


def forward(w: dict[str, Tensor], x: Tensor, T: int) -> Tensor:
    """Predict values (R, N, 1) at inputs (R, N, 10): Linear, LayerNorm, a residual block, Linear.
    The block's weights tell which model it is; T is for CEM alone. The residual stream is the
    normed h, as in Algorithm 1; unlike there, a step has no norm and no P, and its size is 1."""
    def linear(name: str, x: Tensor) -> Tensor:
        return torch.baddbmm(w[name + '_bias'], x, w[name].mT)
    h = torch.addcmul(w['ln_bias'], F.layer_norm(linear('in', x), (D,)), w['ln_gain'])
    if 'fc' in w:
        h = h + linear('proj', F.silu(linear('fc', h)))
    elif 'gate' in w:
        h = h + linear('down', F.silu(linear('gate', h)) * linear('up', h))
    else:
        h = recursion(w, h, T)
    return linear('out', h)


def sizes(model: str) -> tuple[int, int]:
    """Return a model's number of parameters and its FLOPs as fvcore counts them: one for a
    multiply-add, five for an element of the LayerNorm, none for the rest."""
    w = init(Options(), model, [0])
    with FlopCounterMode(display=False) as counter:
        forward(w, torch.zeros(1, FLOP_ROWS, INPUTS), recursion_steps(model))
    parameters = sum(p.numel() for p in w.values())
    return parameters, counter.get_total_flops() // 2 + 5 * FLOP_ROWS * D


def learning_rate(o: Options, step: int) -> float:
    """Return a step's learning rate: constant, or a linear warm-up over 5% of the steps and then a
    cosine to a tenth of the peak."""
    warmup = int(0.05 * o.steps)
    if o.schedule == 'constant':
        return o.learning_rate
    if step < warmup:
        return o.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (o.steps - warmup)))
    return o.learning_rate * (0.1 + 0.9 * cosine)


def train(o: Options, w: dict[str, Tensor], T: int, x: Tensor, y: Tensor,
          repeats: Sequence[int]) -> dict[str, Tensor]:
    """Train the weights w of all repeats in place, by AdamW with the settings of the paper's Table
    2. Returns each repeat's weights after its epoch with the lowest test error."""
    optimizer = torch.optim.AdamW(w.values(), betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1,
                                  fused=True)
    generators = [generator(o, repeat, 'batches') for repeat in repeats]
    batches = o.points // o.batch_size  # per epoch
    best = torch.full((len(repeats),), math.inf)
    # A repeat whose error is never finite has no best epoch: its weights stay NaN.
    best_w = {name: torch.full_like(p, math.nan, requires_grad=False) for name, p in w.items()}
    for step in range(o.steps):
        i = step % batches
        if i == 0:  # a new epoch: each repeat shuffles its own points
            order = torch.stack([torch.randperm(o.points, generator=g) for g in generators])
            epoch_x = x.gather(1, order[:, :, None].expand(-1, -1, INPUTS))
            epoch_y = y.gather(1, order[:, :, None])
        batch = slice(i * o.batch_size, (i + 1) * o.batch_size)
        optimizer.param_groups[0]['lr'] = learning_rate(o, step)
        loss = (forward(w, epoch_x[:, batch], T) - epoch_y[:, batch]).square().mean(dim=1).sum()
        optimizer.zero_grad()
        loss.backward()
        # Clip the gradient of each repeat to norm 1
        norms = sum(p.grad.square().sum(dim=(1, 2)) for p in w.values()).sqrt()  # (R,)
        for p in w.values():
            p.grad *= (1 / norms).clamp(max=1)[:, None, None]
        optimizer.step()

        if i == batches - 1 or step == o.steps - 1:  # the epoch's end
            test_rmse = rmse(w, x[:, o.points:], y[:, o.points:], T)  # (R,)
            better = test_rmse < best
            best = torch.where(better, test_rmse, best)
            for name, p in w.items():
                best_w[name] = torch.where(better[:, None, None], p.detach(), best_w[name])
    return best_w


@torch.no_grad()
def rmse(w: dict[str, Tensor], x: Tensor, y: Tensor, T: int) -> Tensor:
    """Return the root mean squared error of each repeat, (R,)."""
    return (forward(w, x, T) - y).square().mean(dim=(1, 2)).sqrt()


def train_row(o: Options, key: Key, data: tuple[np.ndarray, np.ndarray]) -> Row:
    """Train a model on a kernel's samples. Returns its row of the table."""
    _, model = key
    x, y = map(torch.from_numpy, data)
    T = recursion_steps(model)
    w = init(o, model, range(o.repeats))
    best = train(o, w, T, x, y, range(o.repeats))
    if o.checkpoint == 'best':
        w = best
    errors = torch.stack([rmse(w, x[:, :o.points], y[:, :o.points], T),
                          rmse(w, x[:, o.points:], y[:, o.points:], T)]).double()  # (2, R)
    return torch.stack([errors.mean(dim=1), errors.std(dim=1)], dim=1).flatten().tolist()


def start_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C run_table ends the workers


def run_table(o: Options) -> dict[Key, Row]:
    """Train all models on all kernels in o.jobs processes. UserError if one of them is killed."""
    keys = [(kernel, model) for kernel in o.kernels for model in o.models]
    with ProcessPoolExecutor(o.jobs, get_context('spawn'), start_worker) as pool:
        try:
            samples = pool.map(partial(sample_gp, o, repeats=range(o.repeats)), o.kernels)
            data = dict(zip(o.kernels, samples, strict=True))
            rows = pool.map(partial(train_row, o), keys, [data[kernel] for kernel, _ in keys])
            return dict(zip(keys, tqdm(rows, total=len(keys), unit='row'), strict=True))
        except BrokenProcessPool:
            fail('a worker process was killed: if memory ran out, give --jobs=1')
        except BaseException:
            for process in active_children():
                process.terminate()
            raise


def draw_figure(o: Options, rows: dict[Key, Row], paper: dict[Key, Row], path: str) -> None:
    """Plot each model's RMSE beside the paper's: a column for each kernel, train above test. The
    scale ends at five times the median, so that a model that diverged does not set it."""
    fig, axes = plt.subplots(2, len(o.kernels), figsize=(3.2 * len(o.kernels), 6), squeeze=False)
    for (line, column), ax in np.ndenumerate(axes):
        kernel = o.kernels[column]
        for source, label, style in ((rows, 'ours', 'o-'), (paper, 'paper', 's:')):
            models = [m for m in o.models if (kernel, m) in source]
            mean = [source[kernel, m][2 * line] for m in models]
            std = [source[kernel, m][2 * line + 1] for m in models]
            ax.errorbar(models, mean, std, fmt=style, capsize=3, label=label)
        ax.set_title(f'{KERNELS[kernel][0]}, {("train", "test")[line]} RMSE')
        means = np.array([rows[kernel, m][2 * line] for m in o.models])
        if np.isfinite(means).any():
            limit = 5 * np.median(means[np.isfinite(means)])
            ax.set_ylim(top=min(ax.get_ylim()[1], limit))
        ax.tick_params(axis='x', rotation=45)
    axes[0, 0].legend()
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def write_table(o: Options, rows: dict[Key, Row], suffix: str) -> None:
    """Print the table, then write it as Markdown and CSV, and its figure, under names with this
    suffix."""
    with open(f'{os.path.dirname(__file__)}/results/gp/paper.csv', encoding='utf-8') as file:
        paper = {(line['kernel'], line['model']): [float(line[name]) for name in COLUMNS]
                 for line in csv.DictReader(file)}
    lines = []
    header = ['model', 'parameters', 'flops', 'kernel', *COLUMNS, *('paper_' + x for x in COLUMNS)]
    csv_text = ','.join(header) + '\n'
    distances = []  # of each row, in the paper's standard deviations: train or test, the larger
    for (kernel, model), ours in rows.items():
        title = KERNELS[kernel][0]
        parameters, flops = sizes(model)
        theirs = paper.get((kernel, model))
        rmses = [f'{row[i]:.4f} ± {row[i + 1]:.4f}' if row else '-'
                 for i in (0, 2) for row in (ours, theirs)]
        off = '-'
        if theirs:
            train_off, test_off = ((ours[i] - theirs[i]) / theirs[i + 1] for i in (0, 2))
            distances.append(max(abs(train_off), abs(test_off)))
            off = f'{train_off:+.1f}, {test_off:+.1f}'
        size = f'{parameters / 1e3:.2f}K', f'{flops / 1e6:.2f}M'
        lines.append([model, *size, title, *rmses, off])
        numbers = [*(f'{x:.6f}' for x in ours), *map(str, theirs or [''] * 4)]
        csv_text += f'{model},{parameters},{flops},{title},{",".join(numbers)}\n'

    options = ', '.join(f'{name}={value}' for name, value in asdict(o).items()
                        if name not in ('kernels', 'models', 'jobs', 'out_dir'))
    text = f'Mean ± std over repeats: {options}.\n\n'
    text += table(['Model', 'Parameters', 'FLOPs', 'Kernel', 'Train RMSE', 'paper', 'Test RMSE',
                   'paper', "off by (paper's std)"], lines)
    within = [sum(distance <= limit for distance in distances) for limit in (1, 2)]
    text += ("\n\n- Train and test RMSE both within one of the paper's std: "
             f'{within[0]} of {len(distances)} rows; within two: {within[1]}.')
    if not np.isfinite(list(rows.values())).all():
        text += '\n- nan: training diverged; try a lower learning_rate.'
    say(text)
    write_atomic(f'{o.out_dir}/table{suffix}.md', f'{text}\n'.encode())
    write_atomic(f'{o.out_dir}/table{suffix}.csv', csv_text.encode())
    draw_figure(o, rows, paper, f'{o.out_dir}/figure{suffix}.png')
    say(f'Written to {o.out_dir}: table{suffix}.md, and beside it CSV and figure')


@command_line
def main(argv: list[str]) -> None:
    given = read_options(argv, Options)
    o = build(Options, PROTOCOLS[given.get('protocol', 'inferred')] | given)
    torch.set_num_threads(1)  # products this small would only wait for threads
    os.makedirs(o.out_dir, exist_ok=True)
    # Options are part of the file names, so that no other table replaces the full one.
    suffix = ''.join(f'_{name}={"-".join(value) if isinstance(value, tuple) else value}'
                     for name, value in given.items() if name not in ('jobs', 'out_dir'))
    if len(suffix) > 200:  # file names have at most 255 characters
        suffix = f'{suffix[:190]}-{zlib.crc32(suffix.encode()):08x}'
    write_table(o, run_table(o), suffix)


if __name__ == '__main__':
    main(sys.argv[1:])

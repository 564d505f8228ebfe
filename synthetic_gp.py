"""
Regression on Gaussian-process draws: the paper's table on recursion (in its appendix).

    python synthetic_gp.py                      the table: 6 models x 5 kernels, beside the paper's
    python synthetic_gp.py --stop=end           the same training, read at its last step
    python synthetic_gp.py --protocol=blind     under the other protocol
    python synthetic_gp.py --quick              fewer points, steps, repeats: a look, no table
    python synthetic_gp.py --kernels=rbf,matern --models=Gated,CEM-T3,CEM-T16

The paper gives sizes and results but not the protocol. `inferred` is the one, of all tried, under
which all thirty rows come nearest: an inference about the paper, not a prediction. It takes the
weights of the epoch that is best on the test points, so its test RMSE is the least of some thirty
and not that of unseen points. `blind` was tuned on the five Plain rows and takes the last weights:
the other 25 rows are as they fell. results/gp has both tables.

A cell of the table is a model on a kernel. Its R repeats (own draw, own weights) train together:
weights and batches have a leading dimension R, and the sum of the R losses gives each its own
gradient. N points, width D.
"""
import csv
import hashlib
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from configurator import build, command_line, fail, in_range, read_options
from nanocem.files import say, table, write_atomic

INPUTS, D, ROWS = 10, 64, 200  # ROWS: the paper's FLOPs are of a forward pass over 200 inputs
JITTER = 1e-6  # on the kernel's diagonal: noise of std 0.001, far below every RMSE of the table
# What the paper leaves open; of kernels lengthscale, then nu; period; alpha; slope, nu.
INFERRED = dict(batch_size=64, steps=2000, learning_rate=5e-4, schedule='constant',
                init_cem='normal', stop='test', parameters=dict(
                    rbf=(6.36,), matern=(16.4, 0.5), periodic=(2.42, 8.0),
                    rational_quadratic=(4.88, 0.1), non_stationary=(17.7, 0.5, 1.5)))
BLIND = dict(batch_size=200, steps=1000, learning_rate=2e-3, schedule='cosine',
             init_cem='linear', stop='end', parameters=dict(
                 rbf=(4.83,), matern=(2.86, 1.5), periodic=(4.78, 4.0),
                 rational_quadratic=(2.76, 1.0), non_stationary=(5.36, 0.5)))
PROTOCOLS = {'inferred': INFERRED, 'blind': BLIND}
STOPS = dict(end='the last step', test='the epoch that is best on the test points')
COLUMNS = ('train_rmse', 'train_std', 'test_rmse', 'test_std')
Row = list[float]  # as in COLUMNS
Key = tuple[str, str]  # kernel, model


# Kernels: a (N, inputs), b (M, inputs) -> (N, M), ones on the diagonal

def sq_dist(a: Tensor, b: Tensor) -> Tensor:
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_(min=0)


def correlation(sq: Tensor, nu: float) -> Tensor:
    """Matern's of squared distances in lengthscales, at nu 1/2, 3/2 and infinity, which is RBF."""
    if nu == math.inf:
        return torch.exp(-0.5 * sq)
    r = (2 * nu * sq).sqrt()
    return {0.5: 1, 1.5: 1 + r}[nu] * torch.exp(-r)


def matern(a: Tensor, b: Tensor, lengthscale: float, nu: float = math.inf) -> Tensor:
    """The higher nu, the smoother. Without nu RBF, exp(-|a - b|^2 / (2 lengthscale^2))."""
    return correlation(sq_dist(a, b) / lengthscale ** 2, nu)


def periodic(a: Tensor, b: Tensor, lengthscale: float, period: float) -> Tensor:
    """prod_d exp(-2 sin^2(pi (a_d - b_d) / period) / lengthscale^2): with the sine of the whole
    distance |a - b| it is not positive definite. 4 sin^2 is a circle's squared chord."""
    angles = (2 * math.pi / period * points for points in (a, b))
    on_circles = [torch.cat([angle.cos(), angle.sin()], dim=1) for angle in angles]
    return matern(*on_circles, lengthscale)


def rational_quadratic(a: Tensor, b: Tensor, lengthscale: float, alpha: float) -> Tensor:
    """(1 + |a - b|^2 / (2 alpha lengthscale^2))^-alpha, a mixture of RBFs."""
    return (1 + sq_dist(a, b) / (2 * alpha * lengthscale ** 2)) ** -alpha


def non_stationary(a: Tensor, b: Tensor, lengthscale: float, slope: float,
                   nu: float = math.inf) -> Tensor:
    """Matern's with a lengthscale l(x) = lengthscale exp(slope x_1) of its own at each point
    (Paciorek and Schervish 2004): (l(a) l(b) / s)^(inputs / 2) times Matern's at |a - b|^2 / s,
    s = (l(a)^2 + l(b)^2) / 2. At nu = inf it is Gibbs's (Rasmussen and Williams 2006, Eq. 4.32)."""
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
    """What to run. The protocol settles batch_size to stop, and the kernels' parameters."""
    protocol: Literal['inferred', 'blind'] = 'inferred'  # blind: other values than those shown here
    kernels: tuple[Literal[tuple(KERNELS)], ...] = tuple(KERNELS)  # rows of the table
    models: tuple[str, ...] = MODELS  # Plain, Gated and CEM-T1, CEM-T2, ..., T any number
    repeats: int = 5  # R: GP draws, each with its own initial weights
    seed: int = 0  # of all of them
    points: int = 4000  # training points of a draw, uniform on [-1, 1]^10
    test_points: int = 1000  # further points of the same draw
    batch_size: int = INFERRED['batch_size']  # points a step
    steps: int = INFERRED['steps']  # of AdamW
    learning_rate: float = INFERRED['learning_rate']  # the highest
    schedule: Literal['constant', 'cosine'] = INFERRED['schedule']  # cosine: and a warm-up
    init_cem: Literal['linear', 'normal'] = INFERRED['init_cem']  # W, V: nn.Linear's or N(0, 1 / D)
    stop: Literal['end', 'test'] = INFERRED['stop']  # weights: the last; of the best epoch on test
    jobs: int = 2  # processes of one thread
    out_dir: str | None = None  # default: out/gp, or out/gp_blind; with --quick, ..._quick
    quick: bool = False  # 2 repeats, 2000 points, 500 steps, unless given

    def __post_init__(self) -> None:
        in_range(self, 1, 10**6, 'repeats steps jobs')
        in_range(self, 1, 20_000, 'points test_points')  # a draw needs a square matrix of both
        in_range(self, 0, 2**63 - 1, 'seed learning_rate')
        in_range(self, 1, self.points, 'batch_size')
        for model in self.models:
            if not re.fullmatch(r'Plain|Gated|CEM-T[1-9]\d*', model):
                fail(f'models={model}: expected Plain, Gated or CEM-T1, CEM-T2, ...')
        kind = '_blind' * (self.protocol == 'blind') + '_quick' * self.quick
        self.out_dir = self.out_dir or f'out/gp{kind}'


def generator(o: Options, repeat: int, stream: str) -> torch.Generator:
    """One repeat's random numbers for its data, weights or batches, whatever else is trained."""
    digest = hashlib.sha256(f'{o.seed} {repeat} {stream}'.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], 'big'))


def draw(o: Options, k: str, repeats: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Exact draws f = L z, L L^T the kernel matrix of training and test points together: inputs
    (R, N, 10) and values (R, N, 1). Points and z of a repeat are the same for every kernel."""
    N = o.points + o.test_points
    xs, ys = [], []
    for repeat in repeats:
        g = generator(o, repeat, 'data')
        x = 2 * torch.rand(N, INPUTS, generator=g, dtype=torch.float64) - 1
        z = torch.randn(N, 1, generator=g, dtype=torch.float64)
        K = KERNELS[k][1](x, x, *PROTOCOLS[o.protocol]['parameters'][k])
        K.diagonal().add_(JITTER)
        xs.append(x.float().numpy())
        ys.append((torch.linalg.cholesky(K) @ z).float().numpy())
    return np.stack(xs), np.stack(ys)


def steps_of(model: str) -> int:
    """T of a model's name."""
    return int(model.removeprefix('CEM-T')) if model.startswith('CEM-T') else 1


def init(o: Options, model: str, repeats: Iterable[int]) -> dict[str, Tensor]:
    """Weights by name, (R, out, in), a bias (R, 1, out). Which there are tells models apart."""
    block = {
        'Plain': {'fc': (256, D), 'proj': (D, 256)},
        'Gated': {'gate': (170, D), 'up': (170, D), 'down': (D, 170)},
    }.get(model, {'W': (170, D), 'V': (170, D)})
    copies = []
    for repeat in repeats:
        g = generator(o, repeat, 'weights')
        w = {'ln_gain': torch.ones(1, D), 'ln_bias': torch.zeros(1, D)}
        for name, (n_out, n_in) in {'in': (D, INPUTS), 'out': (1, D), **block}.items():
            size = n_in ** -0.5
            if name in ('W', 'V') and o.init_cem == 'normal':
                w[name] = size * torch.randn(n_out, n_in, generator=g)
                continue
            w[name] = size * (2 * torch.rand(n_out, n_in, generator=g) - 1)
            if name not in ('W', 'V'):
                w[name + '_bias'] = size * (2 * torch.rand(1, n_out, generator=g) - 1)
        copies.append(w)
    return {name: torch.stack([w[name] for w in copies]).requires_grad_() for name in copies[0]}


def recursion(w: dict[str, Tensor], h: Tensor, T: int) -> Tensor:
    """T steps from h down the element-wise energy xi(u | h) = -gamma . phi(V u), gamma = W h,
    phi' = SiLU (Eq. 7): x <- x + V^T (gamma * silu(V x)) (Eq. 15 with P = I). All (R, N, D)."""
    x = h
    gamma = h @ w['W'].mT  # (R, N, 170)
    for _ in range(T):
        x = torch.baddbmm(x, gamma * F.silu(x @ w['V'].mT), w['V'])
    return x


def forward(w: dict[str, Tensor], x: Tensor, T: int) -> Tensor:
    """Inputs (R, N, 10) -> predictions (R, N, 1): Linear, LayerNorm, a residual block (in which the
    models differ; T concerns CEM alone) that adds to the normed h, as in Algorithm 1, Linear."""
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
    """Parameters of one copy, and FLOPs of a forward pass over 200 inputs as fvcore counts them: a
    multiply-add of a matrix product is one, a norm five an element, all else nothing."""
    w = init(Options(), model, [0])
    with FlopCounterMode(display=False) as counter:
        forward(w, torch.zeros(1, ROWS, INPUTS), steps_of(model))
    return sum(p.numel() for p in w.values()), counter.get_total_flops() // 2 + 5 * ROWS * D


def learning_rate(o: Options, step: int) -> float:
    """Constant; or a linear warm-up over 5% of the steps, then a cosine to a tenth."""
    warmup = int(0.05 * o.steps)
    if o.schedule == 'constant':
        return o.learning_rate
    if step < warmup:
        return o.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (o.steps - warmup)))
    return o.learning_rate * (0.1 + 0.9 * cosine)


def train(o: Options, w: dict[str, Tensor], T: int, x: Tensor, y: Tensor,
          repeats: Sequence[int]) -> dict[str, Tensor]:
    """o.steps of AdamW, set as in the paper's training table, on `w`, all repeats' weights. Returns
    each repeat's weights after the epoch that is best on the test points."""
    optimizer = torch.optim.AdamW(w.values(), betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1,
                                  fused=True)
    streams = [generator(o, repeat, 'batches') for repeat in repeats]
    batches = o.points // o.batch_size
    best = torch.full((len(repeats),), math.inf)
    # a repeat whose error is never finite has no best epoch
    best_w = {name: torch.full_like(p, math.nan, requires_grad=False) for name, p in w.items()}
    for step in range(o.steps):
        at = step % batches
        if at == 0:  # a new epoch, every repeat in its own order
            order = torch.stack([torch.randperm(o.points, generator=g)[:, None] for g in streams])
            epoch_x = x.gather(1, order.expand(-1, -1, INPUTS))
            epoch_y = y.gather(1, order)
        batch = slice(at * o.batch_size, (at + 1) * o.batch_size)
        optimizer.param_groups[0]['lr'] = learning_rate(o, step)
        loss = (forward(w, epoch_x[:, batch], T) - epoch_y[:, batch]).square().mean(dim=1).sum()
        optimizer.zero_grad()
        loss.backward()
        # the gradient of each repeat is clipped to norm 1
        norms = sum(p.grad.square().sum(dim=(1, 2)) for p in w.values()).sqrt()  # (R,)
        for p in w.values():
            p.grad *= (1 / norms).clamp(max=1)[:, None, None]
        optimizer.step()

        if at == batches - 1 or step == o.steps - 1:  # the epoch's end
            now = rmse(w, x[:, o.points:], y[:, o.points:], T)
            better = now < best  # (R,)
            best = torch.where(better, now, best)
            for name, p in w.items():
                best_w[name] = torch.where(better[:, None, None], p.detach(), best_w[name])
    return best_w


@torch.no_grad()
def rmse(w: dict[str, Tensor], x: Tensor, y: Tensor, T: int) -> Tensor:
    """Root mean squared error of each repeat."""
    return (forward(w, x, T) - y).square().mean(dim=(1, 2)).sqrt()


def settings(o: Options) -> dict[str, Any]:
    """The options that a cell's numbers depend on."""
    idle = ('kernels', 'models', 'stop', 'jobs', 'out_dir')
    return {name: value for name, value in asdict(o).items() if name not in idle}


def train_cell(o: Options, key: Key, data: tuple[np.ndarray, np.ndarray]) -> dict[str, Row]:
    """A cell's rows, with weights of the last step and of the best epoch."""
    x, y = (torch.from_numpy(array) for array in data)
    T = steps_of(key[1])
    repeats = range(o.repeats)
    last = init(o, key[1], repeats)
    best = train(o, last, T, x, y, repeats)
    rows = {}
    for stop, w in (('end', last), ('test', best)):
        parts = slice(o.points), slice(o.points, None)
        errors = torch.stack([rmse(w, x[:, part], y[:, part], T) for part in parts]).double()
        std = errors.std(dim=1, correction=min(1, o.repeats - 1))
        rows[stop] = torch.stack([errors.mean(dim=1), std], dim=1).flatten().tolist()
    return rows


def run_table(o: Options) -> dict[Key, dict[str, Row]]:
    """The rows of all cells for each of STOPS, in o.jobs processes of one thread."""
    keys = [(k, m) for k in o.kernels for m in o.models]
    with ProcessPoolExecutor(o.jobs, get_context('spawn'), torch.set_num_threads, (1,)) as pool:
        drawn = pool.map(partial(draw, o), o.kernels, [range(o.repeats)] * len(o.kernels))
        data = dict(zip(o.kernels, drawn, strict=True))
        cells = pool.map(partial(train_cell, o), keys, [data[k] for k, _ in keys])
        return dict(zip(keys, tqdm(cells, total=len(keys), unit='cell'), strict=True))


def deviations(row: Row, paper: Row) -> list[float]:
    """How far train and test RMSE lie from the paper's, in the paper's standard deviations."""
    return [(row[i] - paper[i]) / paper[i + 1] for i in (0, 2)]


def draw_figure(rows: dict[Key, Row], paper: dict[Key, Row], path: str) -> None:
    """RMSE of each model, the paper's beside ours, a column a kernel."""
    kernels, models = (list(dict.fromkeys(names)) for names in zip(*rows, strict=True))
    fig, axes = plt.subplots(2, len(kernels), figsize=(3.2 * len(kernels), 6), squeeze=False)
    for (line, column), ax in np.ndenumerate(axes):
        k = kernels[column]
        for source, who, style in ((rows, 'ours', 'o-'), (paper, 'paper', 's:')):
            there = [m for m in models if (k, m) in source]
            mean, std = ([source[k, m][2 * line + i] for m in there] for i in (0, 1))
            ax.errorbar(there, mean, std, fmt=style, capsize=3, label=who)
        ax.set_title(f'{KERNELS[k][0]}, {("train", "test")[line]} RMSE')
        ax.tick_params(axis='x', rotation=45)
    axes[0, 0].legend()
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def report(o: Options, cells: dict[Key, dict[str, Row]]) -> None:
    """The table on the screen and in files, and the figure."""
    with open(f'{os.path.dirname(__file__)}/results/gp/paper.csv', encoding='utf-8') as file:
        paper = {(line['kernel'], line['model']): [float(line[name]) for name in COLUMNS]
                 for line in csv.DictReader(file)}
    rows = {key: cell[o.stop] for key, cell in cells.items()}
    shown = []
    listed = [('model,parameters,flops,kernel', *COLUMNS, *(f'paper_{name}' for name in COLUMNS))]
    for (k, m), row in rows.items():
        theirs = paper.get((k, m))
        parameters, flops = sizes(m)
        pairs = [f'{of[i]:.4f} ± {of[i + 1]:.4f}' if of else '-'
                 for i in (0, 2) for of in (row, theirs)]
        off = '{:+.1f}, {:+.1f}'.format(*deviations(row, theirs)) if theirs else '-'
        size = [f'{parameters / 1e3:.2f}K', f'{flops / 1e6:.2f}M']
        shown.append([m, *size, KERNELS[k][0], *pairs, off])
        listed.append([m, parameters, flops, KERNELS[k][0], *(f'{value:.6f}' for value in row),
                       *(theirs or [''] * 4)])

    switches = ', '.join(f'{name}={value}' for name, value in settings(o).items())
    text = f'Weights of {STOPS[o.stop]}, mean ± std over repeats: {switches}.\n\n'
    text += table(['Model', 'Parameters', 'FLOPs', 'Kernel', 'Train RMSE', 'paper', 'Test RMSE',
                   'paper', "off by (paper's std)"], shown) + '\n'
    known = [key for key in cells if key in paper]
    for stop, words in STOPS.items():
        off = [max(map(abs, deviations(cells[key][stop], paper[key]))) for key in known]
        one, two = (sum(z <= limit for z in off) for limit in (1, 2))
        text += (f"\n- Weights of {words}: train and test RMSE both within one of the paper's std "
                 f'{one} of {len(off)} rows, within two {two}.')
    if not np.isfinite(list(rows.values())).all():
        text += '\n- nan: training diverged; a lower learning_rate would be right.'
    say(text)
    end = '' if o.stop == PROTOCOLS[o.protocol]['stop'] else f'_{o.stop}'
    write_atomic(f'{o.out_dir}/table{end}.md', f'{text}\n'.encode())
    lines = ''.join(','.join(map(str, line)) + '\n' for line in listed)
    write_atomic(f'{o.out_dir}/table{end}.csv', lines.encode())
    draw_figure(rows, paper, f'{o.out_dir}/figure{end}.png')


@command_line
def main(argv: list[str]) -> None:
    given = read_options(argv, Options)
    quick = dict(repeats=2, points=2000, steps=500) if given.get('quick') else {}
    o = build(Options, PROTOCOLS[given.get('protocol', 'inferred')] | quick | given)
    torch.set_num_threads(1)  # products this small would only wait for threads
    os.makedirs(o.out_dir, exist_ok=True)
    report(o, run_table(o))
    say(f'Written to {o.out_dir}: table and figure')


if __name__ == '__main__':
    main(sys.argv[1:])

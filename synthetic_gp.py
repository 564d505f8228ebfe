"""
Reproduce the paper's table on recursion: regression on Gaussian-process samples (its appendix).

    python synthetic_gp.py                      the table: 6 models x 5 kernels, beside the paper's
    python synthetic_gp.py --protocol=blind     under the other protocol
    python synthetic_gp.py --quick              fewer points, steps and repeats, in seconds
    python synthetic_gp.py --kernels=rbf,matern --models=Gated,CEM-T3,CEM-T16

The paper gives sizes and results but not the protocol. `inferred` is the protocol, of all that were
tried, whose thirty rows are nearest to the paper's: an inference about the paper, not a prediction.
It evaluates the weights of the epoch with the lowest test error, so its test RMSE is the lowest of
some thirty and not the error at unseen points. `blind` was tuned on the five rows of Plain alone
and evaluates the last weights. A second table, written beside the first, has the other weights.

A row of the table is a model on a kernel. Its R repeats, each with its own sample and its own
initial weights, train together: weights and batches have a leading dimension R. The gradient of
the summed loss gives every repeat its own gradient. N is the number of points, D the width.
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

INPUTS, D, ROWS = 10, 64, 200  # the paper counts the FLOPs of a forward pass over 200 rows
JITTER = 1e-6  # on the kernel's diagonal: noise of std 0.001, far below every RMSE of the table

# What the paper does not say. Parameters of kernels: the lengthscale, then Matern's nu, Periodic's
# period, Rational Quadratic's alpha, Non-Stationary's slope and nu. `stop` names the weights that
# are evaluated, see STOPS.
INFERRED = dict(batch_size=64, steps=2000, learning_rate=5e-4, schedule='constant',
                init_cem='normal', stop='test', parameters=dict(
                    rbf=(6.36,), matern=(16.4, 0.5), periodic=(2.42, 8.0),
                    rational_quadratic=(4.88, 0.1), non_stationary=(17.7, 0.5, 1.5)))
BLIND = dict(batch_size=200, steps=1000, learning_rate=2e-3, schedule='cosine',
             init_cem='linear', stop='end', parameters=dict(
                 rbf=(4.83,), matern=(2.86, 1.5), periodic=(4.78, 4.0),
                 rational_quadratic=(2.76, 1.0), non_stationary=(5.36, 0.5)))
PROTOCOLS = {'inferred': INFERRED, 'blind': BLIND}
STOPS = dict(end='the last step', test='the epoch with the lowest test error')
QUICK = dict(repeats=2, points=2000, steps=500)
COLUMNS = ('train_rmse', 'train_std', 'test_rmse', 'test_std')
Row = list[float]  # as in COLUMNS
Key = tuple[str, str]  # kernel, model


# Kernels: a (N, inputs), b (M, inputs) -> (N, M), ones on the diagonal

def sq_dist(a: Tensor, b: Tensor) -> Tensor:
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_(min=0)


def correlation(sq: Tensor, nu: float) -> Tensor:
    """Return Matern's correlation at nu = 1/2, 3/2 or infinity, which is RBF; sq are the squared
    distances in lengthscales."""
    if nu == math.inf:
        return torch.exp(-0.5 * sq)
    r = (2 * nu * sq).sqrt()
    return {0.5: 1, 1.5: 1 + r}[nu] * torch.exp(-r)


def matern(a: Tensor, b: Tensor, lengthscale: float, nu: float = math.inf) -> Tensor:
    """Matern's kernel; a higher nu is smoother. nu = inf: exp(-|a - b|^2 / (2 lengthscale^2))."""
    return correlation(sq_dist(a, b) / lengthscale ** 2, nu)


def periodic(a: Tensor, b: Tensor, lengthscale: float, period: float) -> Tensor:
    """prod_d exp(-2 sin^2(pi (a_d - b_d) / period) / lengthscale^2): with the sine of the whole
    distance |a - b| it would not be positive definite. Each coordinate becomes a point on a circle,
    where the squared distance of two points is 4 sin^2: so this is RBF on circles."""
    angles = (2 * math.pi / period * points for points in (a, b))
    on_circles = [torch.cat([angle.cos(), angle.sin()], dim=1) for angle in angles]
    return matern(*on_circles, lengthscale)


def rational_quadratic(a: Tensor, b: Tensor, lengthscale: float, alpha: float) -> Tensor:
    """(1 + |a - b|^2 / (2 alpha lengthscale^2))^-alpha: a mixture of RBF kernels."""
    return (1 + sq_dist(a, b) / (2 * alpha * lengthscale ** 2)) ** -alpha


def non_stationary(a: Tensor, b: Tensor, lengthscale: float, slope: float,
                   nu: float = math.inf) -> Tensor:
    """Matern's kernel with its own lengthscale l(x) = lengthscale exp(slope x_1) at each point
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
    """What to run. The protocol sets batch_size to init_cem, here as in `inferred`."""
    protocol: Literal['inferred', 'blind'] = 'inferred'  # sets what the paper does not say
    kernels: tuple[Literal[tuple(KERNELS)], ...] = tuple(KERNELS)  # rows of the table
    models: tuple[str, ...] = MODELS  # Plain, Gated, CEM-T1, CEM-T2, ... with any T
    repeats: int = 5  # R: samples, each with its own initial weights
    seed: int = 0  # of samples, weights and batches
    points: int = 4000  # training points of a sample, uniform on [-1, 1]^10
    test_points: int = 1000  # test points of the same sample
    batch_size: int = INFERRED['batch_size']  # points per step
    steps: int = INFERRED['steps']  # steps of AdamW
    learning_rate: float = INFERRED['learning_rate']  # peak learning rate
    schedule: Literal['constant', 'cosine'] = INFERRED['schedule']  # cosine: with a warm-up
    init_cem: Literal['linear', 'normal'] = INFERRED['init_cem']  # W, V: nn.Linear's or N(0, 1/D)
    jobs: int = 2  # processes, each with one thread
    out_dir: str = 'out/gp'  # where tables and figures go
    quick: bool = False  # 2 repeats, 2000 points and 500 steps, unless other numbers are given

    def __post_init__(self) -> None:
        in_range(self, 1, 10**6, 'repeats steps jobs')
        in_range(self, 1, 20_000, 'points test_points')  # a sample needs their square in memory
        in_range(self, 0, 2**63 - 1, 'seed learning_rate')
        in_range(self, 1, self.points, 'batch_size')
        for model in self.models:
            if not re.fullmatch(r'Plain|Gated|CEM-T[1-9]\d*', model):
                fail(f'models={model}: expected Plain, Gated or CEM-T1, CEM-T2, ...')

    def file_suffix(self) -> str:
        """Name what differs from the full table, so that no other table replaces it."""
        full = build_options(dict(protocol=self.protocol, quick=self.quick))
        suffix = '_blind' * (self.protocol == 'blind') + '_quick' * self.quick
        for name, value in asdict(self).items():
            if name not in ('jobs', 'out_dir') and value != getattr(full, name):
                suffix += f'_{name}={"-".join(value) if isinstance(value, tuple) else value}'
        return suffix


def build_options(given: dict[str, Any]) -> Options:
    """Apply the options that were given over those of --quick over the protocol's."""
    protocol = PROTOCOLS[given.get('protocol', 'inferred')]
    return build(Options, protocol | (QUICK if given.get('quick') else {}) | given)


def generator(o: Options, repeat: int, stream: str) -> torch.Generator:
    """Return the random numbers for one repeat's data, weights or batches. They do not depend on
    which other repeats, models or kernels run."""
    digest = hashlib.sha256(f'{o.seed} {repeat} {stream}'.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], 'big'))


def sample_gp(o: Options, k: str, repeats: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Sample f = L z, with L L^T the kernel matrix of training and test points together: inputs
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
    """Return T, which a CEM model's name ends with."""
    return int(model.removeprefix('CEM-T')) if model.startswith('CEM-T') else 1


def init(o: Options, model: str, repeats: Iterable[int]) -> dict[str, Tensor]:
    """Return the initial weights by name, (R, out, in), and biases, (R, 1, out). Their names
    identify the model."""
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
    """Take T gradient steps from h on the element-wise energy xi(u | h) = -gamma . phi(V u),
    gamma = W h, phi' = SiLU (Eq. 7): x <- x + V^T (gamma * silu(V x)) (Eq. 15 with P = I).
    All of shape (R, N, D)."""
    x = h
    gamma = h @ w['W'].mT  # (R, N, 170)
    for _ in range(T):
        x = torch.baddbmm(x, gamma * F.silu(x @ w['V'].mT), w['V'])
    return x


def forward(w: dict[str, Tensor], x: Tensor, T: int) -> Tensor:
    """Predict (R, N, 10) -> (R, N, 1): Linear, LayerNorm, a residual block, Linear. The models
    differ in the block, which adds to the normed h as in Algorithm 1. T is for CEM alone."""
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
    """Return a model's parameters, and the FLOPs of a forward pass over 200 rows as fvcore counts
    them: one for a product's multiply-add, five for a norm's element, none for the rest."""
    w = init(Options(), model, [0])
    with FlopCounterMode(display=False) as counter:
        forward(w, torch.zeros(1, ROWS, INPUTS), steps_of(model))
    return sum(p.numel() for p in w.values()), counter.get_total_flops() // 2 + 5 * ROWS * D


def learning_rate(o: Options, step: int) -> float:
    """Return the constant rate; or warm up linearly over 5% of the steps, then follow a cosine to a
    tenth of the peak."""
    warmup = int(0.05 * o.steps)
    if o.schedule == 'constant':
        return o.learning_rate
    if step < warmup:
        return o.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (o.steps - warmup)))
    return o.learning_rate * (0.1 + 0.9 * cosine)


def train(o: Options, w: dict[str, Tensor], T: int, x: Tensor, y: Tensor,
          repeats: Sequence[int]) -> dict[str, Tensor]:
    """Train the weights w of all repeats by o.steps of AdamW with the settings of the paper's Table
    2. Returns each repeat's weights after its epoch with the lowest test error."""
    optimizer = torch.optim.AdamW(w.values(), betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1,
                                  fused=True)
    streams = [generator(o, repeat, 'batches') for repeat in repeats]
    batches = o.points // o.batch_size
    best = torch.full((len(repeats),), math.inf)
    # A repeat whose error is never finite has no best epoch: its weights stay NaN.
    best_w = {name: torch.full_like(p, math.nan, requires_grad=False) for name, p in w.items()}
    for step in range(o.steps):
        at = step % batches
        if at == 0:  # a new epoch: each repeat shuffles its own points
            order = torch.stack([torch.randperm(o.points, generator=g)[:, None] for g in streams])
            epoch_x = x.gather(1, order.expand(-1, -1, INPUTS))
            epoch_y = y.gather(1, order)
        batch = slice(at * o.batch_size, (at + 1) * o.batch_size)
        optimizer.param_groups[0]['lr'] = learning_rate(o, step)
        loss = (forward(w, epoch_x[:, batch], T) - epoch_y[:, batch]).square().mean(dim=1).sum()
        optimizer.zero_grad()
        loss.backward()
        # Clip the gradient of each repeat to norm 1
        norms = sum(p.grad.square().sum(dim=(1, 2)) for p in w.values()).sqrt()  # (R,)
        for p in w.values():
            p.grad *= (1 / norms).clamp(max=1)[:, None, None]
        optimizer.step()

        if at == batches - 1 or step == o.steps - 1:  # the epoch's end
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


def train_row(o: Options, key: Key, data: tuple[np.ndarray, np.ndarray]) -> dict[str, Row]:
    """Train a model on a kernel. Returns its row with the weights of each of STOPS."""
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
    """Train all models on all kernels in o.jobs processes. Returns the rows for each of STOPS."""
    keys = [(k, m) for k in o.kernels for m in o.models]
    with ProcessPoolExecutor(o.jobs, get_context('spawn'), torch.set_num_threads, (1,)) as pool:
        samples = pool.map(partial(sample_gp, o), o.kernels, [range(o.repeats)] * len(o.kernels))
        data = dict(zip(o.kernels, samples, strict=True))
        rows = pool.map(partial(train_row, o), keys, [data[k] for k, _ in keys])
        return dict(zip(keys, tqdm(rows, total=len(keys), unit='row'), strict=True))


def deviations(row: Row, paper: Row) -> list[float]:
    """Return how far train and test RMSE are from the paper's, in its standard deviations."""
    return [(row[i] - paper[i]) / paper[i + 1] for i in (0, 2)]


def draw_figure(o: Options, rows: dict[Key, Row], paper: dict[Key, Row], path: str) -> None:
    """Plot the RMSE of each model beside the paper's, a column a kernel. A diverged model does not
    set the scale: it is named in the title."""
    fig, axes = plt.subplots(2, len(o.kernels), figsize=(3.2 * len(o.kernels), 6), squeeze=False)
    ours = 'ours' if o.repeats > 1 else 'ours, one repeat: no spread'
    for (line, column), ax in np.ndenumerate(axes):
        k = o.kernels[column]
        for source, label, style in ((rows, ours, 'o-'), (paper, 'paper', 's:')):
            models = [m for m in o.models if (k, m) in source]
            mean, std = ([source[k, m][2 * line + i] for m in models] for i in (0, 1))
            ax.errorbar(models, mean, std if any(std) else None, fmt=style, capsize=3, label=label)
        title = f'{KERNELS[k][0]}, {("train", "test")[line]} RMSE'
        means = {m: rows[k, m][2 * line] for m in o.models}
        finite = [mean for mean in means.values() if math.isfinite(mean)]
        limit = 5 * np.median(finite) if finite else math.inf
        if above := [m for m, mean in means.items() if not mean <= limit]:
            title += f'\noff the scale: {", ".join(above)}'
            if finite:
                ax.set_ylim(0, limit)
        ax.set_title(title)
        ax.tick_params(axis='x', rotation=45)
    axes[0, 0].legend()
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def write_table(o: Options, stop: str, results: dict[Key, dict[str, Row]],
                paper: dict[Key, Row]) -> str:
    """Write the table with the weights of one of STOPS, as Markdown and CSV, and the figure."""
    rows = {key: result[stop] for key, result in results.items()}
    shown = []
    lines = [['model,parameters,flops,kernel', *COLUMNS, *(f'paper_{name}' for name in COLUMNS)]]
    for (k, m), row in rows.items():
        theirs = paper.get((k, m))
        parameters, flops = sizes(m)
        pairs = [f'{of[i]:.4f} ± {of[i + 1]:.4f}' if of else '-'
                 for i in (0, 2) for of in (row, theirs)]
        if o.repeats == 1:  # the spread is unknown
            pairs[::2] = [pair.partition(' ±')[0] for pair in pairs[::2]]
        off = '{:+.1f}, {:+.1f}'.format(*deviations(row, theirs)) if theirs else '-'
        size = [f'{parameters / 1e3:.2f}K', f'{flops / 1e6:.2f}M']
        shown.append([m, *size, KERNELS[k][0], *pairs, off])
        numbers = ['' if o.repeats == 1 and i % 2 else f'{row[i]:.6f}' for i in range(4)]
        lines.append([m, parameters, flops, KERNELS[k][0], *numbers, *(theirs or [''] * 4)])
    options = ', '.join(f'{name}={value}' for name, value in asdict(o).items()
                        if name not in ('kernels', 'models', 'jobs', 'out_dir'))
    over = 'mean ± std over repeats' if o.repeats > 1 else 'one repeat, so its spread is unknown'
    text = f'Weights of {STOPS[stop]}, {over}: {options}.\n\n'
    text += table(['Model', 'Parameters', 'FLOPs', 'Kernel', 'Train RMSE', 'paper', 'Test RMSE',
                   'paper', "off by (paper's std)"], shown) + '\n'
    off = [max(map(abs, deviations(row, paper[key]))) for key, row in rows.items() if key in paper]
    one, two = (sum(z <= limit for z in off) for limit in (1, 2))
    text += ("\n- Train and test RMSE both within one of the paper's std: "
             f'{one} of {len(off)} rows; within two: {two}.')
    if not np.isfinite(list(rows.values())).all():
        text += '\n- nan: training diverged; try a lower learning_rate.'
    suffix = o.file_suffix() + f'_{stop}' * (stop != PROTOCOLS[o.protocol]['stop'])
    write_atomic(f'{o.out_dir}/table{suffix}.md', f'{text}\n'.encode())
    csv_text = ''.join(','.join(map(str, line)) + '\n' for line in lines)
    write_atomic(f'{o.out_dir}/table{suffix}.csv', csv_text.encode())
    draw_figure(o, rows, paper, f'{o.out_dir}/figure{suffix}.png')
    return text


def report(o: Options, results: dict[Key, dict[str, Row]]) -> None:
    """Write the tables with the weights of both STOPS, and print the protocol's own."""
    with open(f'{os.path.dirname(__file__)}/results/gp/paper.csv', encoding='utf-8') as file:
        paper = {(line['kernel'], line['model']): [float(line[name]) for name in COLUMNS]
                 for line in csv.DictReader(file)}
    texts = {stop: write_table(o, stop, results, paper) for stop in STOPS}
    say(texts[PROTOCOLS[o.protocol]['stop']])


@command_line
def main(argv: list[str]) -> None:
    """Run the command line."""
    o = build_options(read_options(argv, Options))
    torch.set_num_threads(1)  # products this small would only wait for threads
    os.makedirs(o.out_dir, exist_ok=True)
    report(o, run_table(o))
    say(f'Written to {o.out_dir}: table{o.file_suffix()}.md and others of that name')


if __name__ == '__main__':
    main(sys.argv[1:])

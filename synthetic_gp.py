"""
Reproduce the paper's table on recursion (its appendix): regression on Gaussian-process samples.

    python synthetic_gp.py                      the table: 6 models x 5 kernels, beside the paper's
    python synthetic_gp.py --protocol=blind     the same under another protocol
    python synthetic_gp.py --repeats=2 --points=1000 --steps=200        a first look
    python synthetic_gp.py --kernels=rbf,matern --models=Gated,CEM-T3,CEM-T16

The paper gives sizes and results but not the protocol. `inferred` is fitted to the paper's 30 rows:
of all protocols that we tried, its table is the nearest. It evaluates each model after the epoch
with the lowest test error, so its test RMSE underestimates the error at new points. `blind` was
chosen with only the five rows of the plain MLP, and evaluates the last step. results/gp compares
the two.

A row of the table is one model trained on one kernel, R times: every repeat has its own sample and
initial weights. The repeats train together: weights and batches have a leading dimension R, and the
gradient of the summed loss gives every repeat its own gradient. N counts points, D is the width.
"""
import hashlib
import math
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context
from typing import Literal

if __name__ == '__main__':  # pictures go into files, whatever backend a notebook asks for
    os.environ['MPLBACKEND'] = 'agg'

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import (
    PathStr,
    build,
    check,
    command_line,
    in_range,
    read_options,
    set_if_none,
)
from nanocem.files import csv_text, markdown_table, read_csv, short_name, write_atomic
from nanocem.process import keep_console_and_signals, progress_bar

INPUTS, D = 10, 64
FLOP_ROWS = 200  # the paper counts the FLOPs of a forward pass over 200 rows
JITTER = 1e-6  # added to the kernel's diagonal: noise of std 0.001, far below every RMSE here

COLUMNS = ('train_rmse', 'train_std', 'test_rmse', 'test_std')
Row = list[float]  # one number for each of COLUMNS
Key = tuple[str, str]  # the kernel and the model of a row


# Kernels: a (N, inputs), b (M, inputs) -> (N, M). A point's kernel with itself is 1

def sq_dist(a: Tensor, b: Tensor) -> Tensor:
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_(min=0)


def correlation(sq: Tensor, nu: float) -> Tensor:
    """Return Matern's correlation at the squared distances `sq`, in units of the lengthscale
    squared. nu is 1/2, 3/2 or infinity, which is RBF."""
    if nu == math.inf:
        return torch.exp(-0.5 * sq)
    r = (2 * nu * sq).sqrt()
    return torch.exp(-r) if nu == 0.5 else (1 + r) * torch.exp(-r)


def matern(a: Tensor, b: Tensor, lengthscale: float, nu: float = math.inf) -> Tensor:
    """Return Matern's kernel; without nu it is RBF: exp(-|a - b|^2 / (2 lengthscale^2))."""
    return correlation(sq_dist(a, b) / lengthscale ** 2, nu)


def periodic(a: Tensor, b: Tensor, lengthscale: float, period: float) -> Tensor:
    """Return prod_d exp(-2 sin^2(pi (a_d - b_d) / period) / lengthscale^2), which is RBF after each
    coordinate is mapped to a unit circle: there the squared distance is 4 sin^2. With the sine of
    |a - b| in place of the product, the kernel would not be positive definite."""
    def on_circles(x: Tensor) -> Tensor:
        angles = 2 * math.pi / period * x
        return torch.cat([angles.cos(), angles.sin()], dim=1)
    return matern(on_circles(a), on_circles(b), lengthscale)


def rational_quadratic(a: Tensor, b: Tensor, lengthscale: float, alpha: float) -> Tensor:
    """Return (1 + |a - b|^2 / (2 alpha lengthscale^2))^-alpha, a mixture of RBF kernels."""
    return (1 + sq_dist(a, b) / (2 * alpha * lengthscale ** 2)) ** -alpha


def non_stationary(a: Tensor, b: Tensor, lengthscale: float, slope: float,
                   nu: float = math.inf) -> Tensor:
    """Return Matern's kernel with a lengthscale l(x) = lengthscale exp(slope x_1) at each point:
    (l(a) l(b) / s)^(inputs / 2) correlation(|a - b|^2 / s, nu), s = (l(a)^2 + l(b)^2) / 2 (Paciorek
    and Schervish 2004). Without nu it is Gibbs's (Rasmussen and Williams 2006, Eq. 4.32)."""
    la = lengthscale * torch.exp(slope * a[:, :1])
    lb = lengthscale * torch.exp(slope * b[:, 0])
    s = (la ** 2 + lb ** 2) / 2  # (N, M)
    return (la * lb / s) ** (a.shape[1] / 2) * correlation(sq_dist(a, b) / s, nu)


# Each kernel's name in the paper, and its function
KERNELS = {
    'rbf': ('RBF', matern),
    'matern': ('Matern', matern),
    'periodic': ('Periodic', periodic),
    'rational_quadratic': ('Rational Quadratic', rational_quadratic),
    'non_stationary': ('Non-Stationary', non_stationary),
}


@dataclass(frozen=True)
class Protocol:
    """What the paper does not give. `parameters` are those of each kernel's function: the
    lengthscale, then Matern's nu, Periodic's period, Rational Quadratic's alpha, or
    Non-Stationary's slope and nu."""
    chosen_by: str
    batch_size: int
    steps: int
    learning_rate: float  # the peak
    schedule: Literal['constant', 'cosine']  # cosine: after a warm-up
    cem_init: Literal['normal', 'uniform']  # of CEM's W and V; uniform: as in nn.Linear
    checkpoint: Literal['last', 'best']
    parameters: dict[str, tuple[float, ...]]


PROTOCOLS = {
    'inferred': Protocol(
        "fitted to the paper's 30 rows", batch_size=64, steps=2000, learning_rate=5e-4,
        schedule='constant', cem_init='normal', checkpoint='best', parameters=dict(
            rbf=(6.36,), matern=(16.4, 0.5), periodic=(2.42, 8.0),
            rational_quadratic=(4.88, 0.1), non_stationary=(17.7, 0.5, 1.5))),
    'blind': Protocol(
        "chosen with the plain MLP's five rows alone", batch_size=200, steps=1000,
        learning_rate=2e-3, schedule='cosine', cem_init='uniform', checkpoint='last',
        parameters=dict(
            rbf=(4.83,), matern=(2.86, 1.5), periodic=(4.78, 4.0),
            rational_quadratic=(2.76, 1.0), non_stationary=(5.36, 0.5))),
}
MODELS = ('Plain', 'Gated', 'CEM-T1', 'CEM-T2', 'CEM-T4', 'CEM-T8')
STEPS = {'Plain': 1, 'Gated': 1} | {f'CEM-T{T}': T for T in range(1, 33)}  # T of each model


@dataclass
class GPConfig:
    """What to run. Options that are None get the protocol's values."""
    protocol: Literal[tuple(PROTOCOLS)] = 'inferred'  # inferred: fitted to the paper; or blind
    kernels: tuple[Literal[tuple(KERNELS)], ...] = tuple(KERNELS)  # of the Gaussian processes
    models: tuple[Literal[tuple(STEPS)], ...] = MODELS  # CEM-T8 takes 8 steps
    repeats: int = 5  # R; each has its own sample and initial weights
    seed: int = 0  # for samples, initial weights and the order of batches
    points: int = 4000  # training points per sample, uniform on [-1, 1]^10
    test_points: int = 1000  # test points per sample
    batch_size: int | None = None  # points per step; default: the protocol's
    steps: int | None = None  # number of AdamW steps; default: the protocol's
    learning_rate: float | None = None  # peak learning rate; default: the protocol's
    checkpoint: Literal['last', 'best'] | None = None  # to evaluate; best: by test error
    jobs: int = 2  # number of processes, each with one thread
    out_dir: PathStr = 'out/gp'  # folder for tables and figures

    def __post_init__(self) -> None:
        protocol = PROTOCOLS[self.protocol]
        set_if_none(self, batch_size=protocol.batch_size, steps=protocol.steps,
                    learning_rate=protocol.learning_rate, checkpoint=protocol.checkpoint)
        in_range(self, 2, 10**6, 'repeats')  # One repeat has no standard deviation
        in_range(self, 1, 10**6, 'steps jobs batch_size points test_points')
        in_range(self, 0, 10**6, 'learning_rate')
        check(self.batch_size <= self.points, f'points={self.points} are fewer than batch_size='
              f'{self.batch_size}: give more points or a smaller batch_size')

    def follows_the_protocol(self) -> bool:
        """Return whether errors can be compared with the paper's: nothing of the protocol, and no
        number of points, was changed."""
        same = GPConfig(protocol=self.protocol)
        return all(getattr(self, name) == getattr(same, name) for name in (
            'points', 'test_points', 'batch_size', 'steps', 'learning_rate', 'checkpoint'))


def generator(cfg: GPConfig, repeat: int, purpose: str) -> torch.Generator:
    """Return the random number generator for a repeat's data, weights or batches. It does not
    depend on which other repeats, models or kernels run."""
    digest = hashlib.sha256(f'{cfg.seed} {repeat} {purpose}'.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], 'big'))


def sample_gp(cfg: GPConfig, kernel: str, repeats: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Sample f = L z at training and test points; L L^T is their kernel matrix, z is standard
    normal. Return inputs (R, N, 10) and values (R, N, 1), the training points first. A repeat has
    the same inputs and z for every kernel."""
    N = cfg.points + cfg.test_points
    xs, ys = [], []
    for repeat in repeats:
        g = generator(cfg, repeat, 'data')
        x = 2 * torch.rand(N, INPUTS, generator=g, dtype=torch.float64) - 1
        z = torch.randn(N, 1, generator=g, dtype=torch.float64)
        _, function = KERNELS[kernel]
        K = function(x, x, *PROTOCOLS[cfg.protocol].parameters[kernel])  # (N, N)
        K.diagonal().add_(JITTER)
        xs.append(x.float().numpy())
        ys.append((torch.linalg.cholesky(K) @ z).float().numpy())
    return np.stack(xs), np.stack(ys)


def init(cfg: GPConfig, model: str, repeats: Sequence[int]) -> dict[str, Tensor]:
    """Return initial weights (R, out, in) and biases (R, 1, out) by name. W and V of CEM have no
    bias."""
    cem_init = PROTOCOLS[cfg.protocol].cem_init
    blocks = {'Plain': {'fc': (256, D), 'proj': (D, 256)},
              'Gated': {'gate': (170, D), 'up': (170, D), 'down': (D, 170)}}
    block = blocks.get(model, {'W': (170, D), 'V': (170, D)})
    copies = []
    for repeat in repeats:
        g = generator(cfg, repeat, 'weights')
        w = {'ln_gain': torch.ones(1, D), 'ln_bias': torch.zeros(1, D)}
        for name, (n_out, n_in) in {'in': (D, INPUTS), 'out': (1, D), **block}.items():
            of_cem = name in ('W', 'V')
            bound = n_in ** -0.5  # as in nn.Linear, weights and biases are uniform in +-bound
            if of_cem and cem_init == 'normal':  # N(0, 1/D)
                w[name] = bound * torch.randn(n_out, n_in, generator=g)
            else:
                w[name] = bound * (2 * torch.rand(n_out, n_in, generator=g) - 1)
            if not of_cem:
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
    The names of the weights tell which model it is; only CEM uses T. As in Algorithm 1, CEM's
    steps start from the normed h; but they apply no further norm, and P = I and eta = 1."""
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
    """Return a model's parameters and FLOPs, counted as by fvcore: one for a multiply-add, five for
    an element of the LayerNorm, none for the rest."""
    w = init(GPConfig(), model, [0])
    with FlopCounterMode(display=False) as counter:
        forward(w, torch.zeros(1, FLOP_ROWS, INPUTS), STEPS[model])
    parameters = sum(p.numel() for p in w.values())
    return parameters, counter.get_total_flops() // 2 + 5 * FLOP_ROWS * D  # torch counts two


def learning_rate(cfg: GPConfig, step: int) -> float:
    """Return the learning rate of a step: constant, or a linear warm-up over 5% of the steps, and
    then a cosine to a tenth of the peak."""
    if PROTOCOLS[cfg.protocol].schedule == 'constant':
        return cfg.learning_rate
    warmup = int(0.05 * cfg.steps)
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (cfg.steps - warmup)))
    return cfg.learning_rate * (0.1 + 0.9 * cosine)


def train(cfg: GPConfig, w: dict[str, Tensor], T: int, x: Tensor, y: Tensor,
          repeats: Sequence[int]) -> dict[str, Tensor]:
    """Train the weights w of all repeats in place, by AdamW with the betas, epsilon, weight decay
    and clipping of the paper's Table 2. x (R, N, 10), y (R, N, 1). Return the weights after each
    repeat's epoch of lowest test error or, as cfg.checkpoint says, after the last step."""
    optimizer = torch.optim.AdamW(w.values(), betas=(0.9, 0.95), eps=1e-9,
                                  weight_decay=0.1, fused=True)
    generators = [generator(cfg, repeat, 'batches') for repeat in repeats]
    batches = cfg.points // cfg.batch_size  # in each epoch
    lowest = torch.full((len(repeats),), math.inf)  # test RMSE
    # A repeat whose error is never finite has no best epoch: its kept weights stay NaN
    kept = {name: torch.full_like(p, math.nan, requires_grad=False) for name, p in w.items()}
    for step in range(cfg.steps):
        i = step % batches
        if i == 0:  # a new epoch: each repeat shuffles its own points
            order = torch.stack([torch.randperm(cfg.points, generator=g) for g in generators])
            epoch_x = x.gather(1, order[:, :, None].expand(-1, -1, INPUTS))
            epoch_y = y.gather(1, order[:, :, None])
        batch = slice(i * cfg.batch_size, (i + 1) * cfg.batch_size)
        loss = (forward(w, epoch_x[:, batch], T) - epoch_y[:, batch]).square().mean(dim=1).sum()
        optimizer.zero_grad()
        loss.backward()
        # Clip the gradient of each repeat to norm 1
        norms = sum(p.grad.square().sum(dim=(1, 2)) for p in w.values()).sqrt()  # (R,)
        for p in w.values():
            p.grad *= (1 / norms).clamp(max=1)[:, None, None]
        optimizer.param_groups[0]['lr'] = learning_rate(cfg, step)
        optimizer.step()
        if i == batches - 1 or step == cfg.steps - 1:  # the epoch's end
            test_rmse = rmse(w, x[:, cfg.points:], y[:, cfg.points:], T)  # (R,)
            keep = (test_rmse < lowest) | (cfg.checkpoint == 'last')
            lowest = torch.where(keep, test_rmse, lowest)
            for name, p in w.items():
                kept[name] = torch.where(keep[:, None, None], p.detach(), kept[name])
    return kept


@torch.no_grad()
def rmse(w: dict[str, Tensor], x: Tensor, y: Tensor, T: int) -> Tensor:
    """Return the root mean squared error of each repeat, (R,)."""
    return (forward(w, x, T) - y).square().mean(dim=(1, 2)).sqrt()


def train_row(cfg: GPConfig, model: str, data: tuple[np.ndarray, np.ndarray]) -> Row:
    """Train a model on a kernel's samples, and return its row of the table."""
    x, y = map(torch.from_numpy, data)
    T, repeats = STEPS[model], range(cfg.repeats)
    w = train(cfg, init(cfg, model, repeats), T, x, y, repeats)
    errors = torch.stack([rmse(w, x[:, :cfg.points], y[:, :cfg.points], T),
                          rmse(w, x[:, cfg.points:], y[:, cfg.points:], T)]).double()  # (2, R)
    return torch.stack([errors.mean(dim=1), errors.std(dim=1)], dim=1).flatten().tolist()


def begin_process() -> None:
    """Prepare a process of the pool: one thread, since matrices this small gain nothing from more.
    Ctrl-C goes to all processes, and the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def run_table(cfg: GPConfig) -> dict[Key, Row]:
    """Train all models on all kernels in cfg.jobs processes."""
    keys = [(kernel, model) for kernel in cfg.kernels for model in cfg.models]
    with ProcessPoolExecutor(cfg.jobs, get_context('spawn'), begin_process) as pool:
        try:
            samples = {kernel: pool.submit(sample_gp, cfg, kernel, range(cfg.repeats))
                       for kernel in cfg.kernels}
            data = {kernel: future.result() for kernel, future in samples.items()}
            rows = [pool.submit(train_row, cfg, model, data[kernel]) for kernel, model in keys]
            with progress_bar(total=len(keys), unit='row') as bar:
                table = {}
                for key, row in zip(keys, rows, strict=True):
                    table[key] = row.result()
                    bar.update()
            return table
        except BaseException:  # the pool would first finish what it has begun
            for process in active_children():
                process.terminate()
            raise


def draw_figure(cfg: GPConfig, rows: dict[Key, Row], paper: dict[Key, Row], path: str) -> str:
    """Plot each model's RMSE and the paper's: a panel for each kernel. Return the picture's path,
    or what it needs."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return 'no picture: pip install matplotlib'
    height = math.ceil((len(cfg.kernels) + 1) / 2)  # the last panel holds the legend
    figure = Figure((8.3, 2.8 * height), layout='constrained')  # a page shows it 830 pixels wide
    *panels, last = figure.subplots(height, 2).flat
    for kernel, axes in zip(cfg.kernels, panels, strict=False):
        for source, label, style in ((rows, 'ours', 'o-'), (paper, 'paper', 's:')):
            models = [m for m in cfg.models if (kernel, m) in source]
            for column, split, color in ((0, 'train', 'C0'), (2, 'test', 'C1')):
                mean = [source[kernel, m][column] for m in models]
                std = [source[kernel, m][column + 1] for m in models]
                axes.errorbar(models, mean, std, fmt=style, color=color, ms=4, capsize=3,
                              label=f'{split}, {label}')
        axes.set_title(KERNELS[kernel][0], fontsize=10)
        axes.set_ylabel('RMSE')
        axes.tick_params(labelsize=9)
        axes.tick_params(axis='x', rotation=0 if len(cfg.models) <= 6 else 45)
    for axes in (*panels[len(cfg.kernels):], last):
        axes.set_axis_off()
    last.legend(*panels[0].get_legend_handles_labels(), loc='center')
    figure.savefig(path, dpi=200)
    return path


def write_table(cfg: GPConfig, rows: dict[Key, Row], suffix: str) -> None:
    """Print the table. Write it as Markdown, CSV and a figure, whose names have this suffix."""
    paper = {(row['kernel'], row['model']): [float(row[name]) for name in COLUMNS]
             for row in read_csv(f'{os.path.dirname(__file__)}/results/gp/paper.csv')}
    columns = ['model', 'parameters', 'flops', 'kernel', *COLUMNS, *('paper_' + x for x in COLUMNS)]
    csv_rows, lines = [], []
    comparable = cfg.follows_the_protocol()
    deviations = []  # from the paper's RMSE, in its std: the larger of train and test
    for (kernel, model), ours in rows.items():
        title, theirs = KERNELS[kernel][0], paper.get((kernel, model))
        parameters, flops = sizes(model)
        rmses = [f'{row[i]:.4f} ± {row[i + 1]:.4f}' if row else '-'
                 for i in (0, 2) for row in (ours, theirs)]  # train, then test
        off = '-'
        if theirs and comparable:
            train_off, test_off = ((ours[i] - theirs[i]) / theirs[i + 1] for i in (0, 2))
            deviations.append(max(abs(train_off), abs(test_off)))
            off = f'{train_off:+.1f}, {test_off:+.1f}'
        lines.append([model, f'{parameters / 1e3:.2f}K', f'{flops / 1e6:.2f}M', title, *rmses, off])
        numbers = [*(f'{x:.6f}' for x in ours), *map(str, theirs or [''] * 4)]
        values = [model, str(parameters), str(flops), title, *numbers]
        csv_rows.append(dict(zip(columns, values, strict=True)))

    options = ', '.join(f'{name}={value}' for name, value in asdict(cfg).items()
                        if name not in ('kernels', 'models', 'jobs', 'out_dir'))
    header = ['Model', 'Parameters', 'FLOPs', 'Kernel', 'Train RMSE', 'paper', 'Test RMSE', 'paper',
              "off by (paper's std)"]
    chosen_by = PROTOCOLS[cfg.protocol].chosen_by
    text = (f'Protocol: {cfg.protocol}, {chosen_by}. Mean ± std over repeats: {options}.\n\n'
            f'{markdown_table(header, lines)}\n\n')
    if comparable:
        within = [sum(deviation <= limit for deviation in deviations) for limit in (1, 2)]
        text += ("- Train and test RMSE both within one of the paper's std: "
                 f'{within[0]} of {len(deviations)} rows; within two: {within[1]}.')
    else:
        text += "- With another protocol the errors are not compared with the paper's."
    print(text, flush=True)
    write_atomic(f'{cfg.out_dir}/table{suffix}.md', f'{text}\n'.encode())
    write_atomic(f'{cfg.out_dir}/table{suffix}.csv', csv_text(csv_rows).encode())
    picture = draw_figure(cfg, rows, paper, f'{cfg.out_dir}/figure{suffix}.png')
    print(f'Written to {cfg.out_dir}: table{suffix}.md and its CSV; {picture}', flush=True)


@command_line
@keep_console_and_signals()
def main(argv: list[str]) -> None:
    given = read_options(argv, GPConfig)
    cfg = build(GPConfig, given)
    os.makedirs(cfg.out_dir, exist_ok=True)
    # File names contain the given options, so that no other table replaces the full one
    suffix = ''.join(f'_{name}={"-".join(value) if isinstance(value, tuple) else value}'
                     for name, value in given.items() if name not in ('jobs', 'out_dir'))
    write_table(cfg, run_table(cfg), short_name(suffix))


if __name__ == '__main__':
    main(sys.argv[1:])

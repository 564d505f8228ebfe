"""
Regression on Gaussian-process draws: the paper's table on recursion (appendix, "Study recursion
on synthetic data").

    python synthetic_gp.py                    the table: 6 models x 5 kernels, ours beside the paper's
    python synthetic_gp.py --protocol=blind   under the protocol found on the Plain rows alone
    python synthetic_gp.py --quick            fewer points, steps and repeats: a look, not the table
    python synthetic_gp.py --T_max=32         deeper recursion than the paper's

The paper gives sizes and results but not the protocol: points, optimiser, initial weights, kernels'
parameters. Two answers are here. `inferred` is the protocol under which all thirty rows come nearest
to the paper's (python -m nanocem.gp_search): an inference about the paper, not a prediction.
`blind` has seen the five Plain rows only (python -m nanocem.gp_calibrate).

A cell of the table is a model and a kernel. Its repeats (own draw, own weights) train together:
every weight and every batch has a leading dimension R, and the sum of the R losses gives each
repeat its own gradient. On a CPU, two processes of one thread share the cells; finished ones are
kept in out_dir/cells, so that an interrupted run goes on. What the script leaves: table.csv,
table.md, figure.png, test_steps.png.

Shapes: R repeats, N points, D = 64 model width.
"""
import csv
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from statistics import mean, stdev
from threading import Thread
from typing import Any, Literal, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from configurator import build, fail, read_options
from nanocem.files import write_whole

INPUTS, D, ROWS = 10, 64, 200  # ROWS: the paper's FLOPs are those of a forward pass over 200 inputs
JITTER = 1e-6  # added to the kernel's diagonal: noise of std 0.001, far below every RMSE of the table
QUICK = dict(repeats=2, points=2000, steps=500)


# Kernels: a (N, inputs), b (M, inputs) -> (N, M), ones on the diagonal

def sq_dist(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances."""
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_(min=0)


def rbf(a: Tensor, b: Tensor, lengthscale: float) -> Tensor:
    """exp(-|a - b|^2 / (2 lengthscale^2))."""
    return torch.exp(-0.5 * sq_dist(a, b) / lengthscale ** 2)


def matern(a: Tensor, b: Tensor, lengthscale: float, nu: float) -> Tensor:
    """Matern's at the three nu where it needs no Bessel function; the higher nu, the smoother."""
    r = (2 * nu * sq_dist(a, b)).sqrt() / lengthscale
    return {0.5: 1, 1.5: 1 + r, 2.5: 1 + r + r ** 2 / 3}[nu] * torch.exp(-r)


def periodic(a: Tensor, b: Tensor, lengthscale: float, period: float) -> Tensor:
    """prod_d exp(-2 sin^2(pi (a_d - b_d) / period) / lengthscale^2). A product over dimensions: with
    the sine of the whole distance |a - b| it is not positive definite in 10 of them. 4 sin^2 is the
    squared chord between two points of a circle."""
    def circle(x: Tensor) -> Tensor:
        angle = 2 * math.pi / period * x
        return torch.cat([angle.cos(), angle.sin()], dim=1)
    return rbf(circle(a), circle(b), lengthscale)


def rational_quadratic(a: Tensor, b: Tensor, lengthscale: float, alpha: float) -> Tensor:
    """(1 + |a - b|^2 / (2 alpha lengthscale^2))^-alpha, a mixture of RBFs."""
    return (1 + sq_dist(a, b) / (2 * alpha * lengthscale ** 2)) ** -alpha


def gibbs(a: Tensor, b: Tensor, lengthscale: float, slope: float) -> Tensor:
    """Gibbs's non-stationary kernel (Rasmussen and Williams 2006, Eq. 4.32), l(x) = lengthscale
    exp(slope x_1): (2 l(a) l(b) / (l(a)^2 + l(b)^2))^(inputs / 2) exp(-|a - b|^2 / (l(a)^2 + l(b)^2))."""
    la = lengthscale * torch.exp(slope * a[:, :1])
    lb = lengthscale * torch.exp(slope * b[:, 0])
    scale = la ** 2 + lb ** 2  # (N, M)
    return (2 * la * lb / scale) ** (a.shape[1] / 2) * torch.exp(-sq_dist(a, b) / scale)


class Kernel(NamedTuple):
    title: str
    function: Callable[..., Tensor]
    inferred: tuple[float, ...]  # lengthscale, then nu, period, alpha or slope
    blind: tuple[float, ...]


KERNELS = {
    'rbf': Kernel('RBF', rbf, (4.83,), (4.83,)),
    'matern': Kernel('Matern', matern, (2.86, 1.5), (2.86, 1.5)),
    'periodic': Kernel('Periodic', periodic, (4.78, 4.0), (4.78, 4.0)),
    'rational_quadratic': Kernel('Rational Quadratic', rational_quadratic, (2.76, 1.0), (2.76, 1.0)),
    'non_stationary': Kernel('Non-Stationary', gibbs, (5.36, 0.5), (5.36, 0.5)),
}
# The paper's table: train RMSE, its std, test RMSE, its std.
PAPER = {
    ('rbf', 'Plain'): (0.0139, 0.0022, 0.0158, 0.0024),
    ('rbf', 'Gated'): (0.0109, 0.0014, 0.0122, 0.0015),
    ('rbf', 'CEM-T1'): (0.0102, 0.0010, 0.0119, 0.0011),
    ('rbf', 'CEM-T2'): (0.0074, 0.0008, 0.0092, 0.0008),
    ('rbf', 'CEM-T4'): (0.0068, 0.0006, 0.0086, 0.0007),
    ('rbf', 'CEM-T8'): (0.0066, 0.0008, 0.0088, 0.0012),
    ('matern', 'Plain'): (0.2129, 0.0205, 0.2308, 0.0237),
    ('matern', 'Gated'): (0.1903, 0.0205, 0.2162, 0.0253),
    ('matern', 'CEM-T1'): (0.1836, 0.0199, 0.2194, 0.0267),
    ('matern', 'CEM-T2'): (0.1623, 0.0170, 0.2166, 0.0274),
    ('matern', 'CEM-T4'): (0.1742, 0.0206, 0.2168, 0.0271),
    ('matern', 'CEM-T8'): (0.1676, 0.0174, 0.2161, 0.0248),
    ('periodic', 'Plain'): (0.0557, 0.0056, 0.0614, 0.0058),
    ('periodic', 'Gated'): (0.0386, 0.0036, 0.0445, 0.0043),
    ('periodic', 'CEM-T1'): (0.0352, 0.0036, 0.0421, 0.0044),
    ('periodic', 'CEM-T2'): (0.0240, 0.0022, 0.0342, 0.0033),
    ('periodic', 'CEM-T4'): (0.0238, 0.0029, 0.0340, 0.0042),
    ('periodic', 'CEM-T8'): (0.0242, 0.0037, 0.0344, 0.0053),
    ('rational_quadratic', 'Plain'): (0.0791, 0.0109, 0.0885, 0.0108),
    ('rational_quadratic', 'Gated'): (0.0599, 0.0070, 0.0715, 0.0075),
    ('rational_quadratic', 'CEM-T1'): (0.0578, 0.0072, 0.0709, 0.0082),
    ('rational_quadratic', 'CEM-T2'): (0.0409, 0.0039, 0.0596, 0.0068),
    ('rational_quadratic', 'CEM-T4'): (0.0417, 0.0033, 0.0606, 0.0067),
    ('rational_quadratic', 'CEM-T8'): (0.0406, 0.0035, 0.0606, 0.0060),
    ('non_stationary', 'Plain'): (0.0385, 0.0052, 0.0426, 0.0062),
    ('non_stationary', 'Gated'): (0.0315, 0.0030, 0.0358, 0.0039),
    ('non_stationary', 'CEM-T1'): (0.0305, 0.0044, 0.0356, 0.0051),
    ('non_stationary', 'CEM-T2'): (0.0257, 0.0027, 0.0330, 0.0042),
    ('non_stationary', 'CEM-T4'): (0.0267, 0.0030, 0.0330, 0.0043),
    ('non_stationary', 'CEM-T8'): (0.0243, 0.0030, 0.0317, 0.0043),
}
PAPER_SIZES = {
    'Plain': ('33.98K', '6.76M'),
    'Gated': ('33.94K', '6.73M'),
    'CEM-T1': ('22.66K', '6.73M'),
    'CEM-T2': ('22.66K', '11.08M'),
    'CEM-T4': ('22.66K', '19.79M'),
    'CEM-T8': ('22.66K', '37.20M'),
}


@dataclass
class Options:
    """What to run. points to stop are the protocol, one for all rows; its defaults are inferred."""
    protocol: Literal['inferred', 'blind'] = 'inferred'  # settings and kernels' parameters
    kernels: tuple[str, ...] = tuple(KERNELS)  # rows
    models: tuple[str, ...] | None = None  # default: Plain, Gated, CEM-T1, CEM-T2, ... up to T_max
    T_max: int = 8  # CEM models with T = 1, 2, 4, ... steps up to this many
    repeats: int = 5  # R: GP draws, each with its own initial weights
    seed: int = 0  # of all of them
    points: int = 4000  # training points of a draw
    test_points: int = 1000  # further points of the same draw
    inputs: Literal['cube', 'unit', 'normal'] = 'cube'  # [-1, 1]^10; [0, 1]^10, drawn on the cube; N(0, I)
    standardise: bool = False  # targets to mean 0, variance 1 on each draw's training points
    noise: float = 0.0  # standard deviation of the targets' noise, the kernels' being 1
    batch_size: int = 200  # points a step
    steps: int = 1000  # of the optimiser
    learning_rate: float = 2e-3  # the highest
    schedule: Literal['constant', 'cosine'] = 'constant'  # cosine: the recipe's, with its warm-up
    recipe: Literal['paper', 'torch', 'adam'] = 'paper'  # AdamW of the paper's training table; torch's
    init: Literal['linear', 'xavier', 'n02', 'normal', 'orthogonal'] = 'linear'  # of nn.Linear layers
    init_cem: Literal['linear', 'xavier', 'n02', 'normal', 'orthogonal'] = 'normal'  # of W and V
    activation: Literal['silu', 'gelu', 'relu', 'tanh'] = 'silu'  # of Plain
    residual: Literal['normed', 'displacement', 'raw'] = 'normed'  # what the block's output is added to
    stop: Literal['end', 'valid', 'test'] = 'end'  # weights: the last; best on held-out points; on test
    patience: int = 1000  # epochs without a better held-out RMSE that end a repeat's training
    precond: Literal['none', 'diag', 'diag_lowrank'] = 'none'  # P of CEM (Eq. 13), of rank 16
    norm: bool = False  # an RMSNorm in front of every step of the recursion
    device: Literal['auto', 'cpu', 'cuda'] = 'auto'  # auto: cuda where there is one
    jobs: int | None = None  # processes of one thread, on a CPU; default 2
    out_dir: str | None = None  # default: out/gp_PROTOCOL, with --quick out/gp_PROTOCOL_quick
    quick: bool = False  # 2 repeats, 2000 points, 500 steps, unless given

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f'{name}={getattr(self, name)}: expected at least {least}')
        for k in self.kernels:
            if k not in KERNELS:
                raise ValueError(f'kernels={k}: expected some of {", ".join(KERNELS)}')
        if self.batch_size > self.fitted:
            raise ValueError(f'batch_size={self.batch_size} is more than the {self.fitted} points '
                             f'trained on (points={self.points})')
        if self.points + self.test_points > 30_000:
            raise ValueError(f'points={self.points}: an exact draw needs a matrix of '
                             '(points + test_points)^2; at most 30,000 of them')
        if self.models is None:
            powers = {2 ** i for i in range(self.T_max.bit_length())}
            steps = sorted(powers | {self.T_max})
            self.models = ('Plain', 'Gated', *(f'CEM-T{T}' for T in steps))
        for model in self.models:
            if not re.fullmatch(r'Plain|Gated|CEM-T[1-9]\d*', model):
                raise ValueError(f'models={model}: expected Plain, Gated or CEM-T1, CEM-T2, ...')
        if self.device == 'cuda' and not torch.cuda.is_available():
            raise ValueError('device=cuda: this machine has no GPU that torch can use')
        if self.device == 'auto':
            self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        if self.device == 'cuda' and self.jobs not in (None, 1):
            raise ValueError(f'jobs={self.jobs}: on a GPU one process does it all')
        self.jobs = self.jobs or (1 if self.device == 'cuda' else 2)
        self.out_dir = self.out_dir or f'out/gp_{self.protocol}' + '_quick' * self.quick

    @property
    def fitted(self) -> int:
        """Training points that gradients see: a tenth is held out where it decides when to stop."""
        return self.points - self.points // 10 if self.stop == 'valid' else self.points


LEAST = dict(T_max=1, repeats=1, seed=0, points=1, test_points=1, noise=0, batch_size=1, steps=1,
             learning_rate=0, patience=1, jobs=1)
BLIND = dict(schedule='cosine', init_cem='linear')  # where the blind protocol differs


class Recipe(NamedTuple):
    """AdamW's settings, and the course of a scheduled learning rate in parts of the whole."""
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float  # largest gradient norm of a repeat
    warmup: float
    final: float


RECIPES = {
    'paper': Recipe(0.95, 1e-9, 0.1, 1.0, 0.05, 0.1),  # its training table, decay on all weights
    'torch': Recipe(0.999, 1e-8, 0.01, math.inf, 0.0, 0.0),  # AdamW's own
    'adam': Recipe(0.999, 1e-8, 0.0, math.inf, 0.0, 0.0),  # Adam's own
}


def generator(o: Options, repeat: int, use: Literal['data', 'weights', 'batches']) -> torch.Generator:
    """The random numbers of one repeat, for one use: no other repeat, model or kernel changes them."""
    digest = hashlib.sha256(f'{o.seed} {repeat} {use}'.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], 'big'))


class Data(NamedTuple):
    """The points of R draws."""
    x: Tensor  # (R, points, 10)
    y: Tensor  # (R, points, 1)
    x_test: Tensor  # (R, test_points, 10)
    y_test: Tensor  # (R, test_points, 1)


def draw(o: Options, k: str, repeats: Iterable[int], parameters: Sequence[float] | None = None) -> Data:
    """Exact draws f = L z, L L^T the kernel matrix of training and test points together. Points
    and z of a repeat are the same for every kernel. `parameters`: default, those of o.protocol."""
    parameters = parameters or getattr(KERNELS[k], o.protocol)
    N = o.points + o.test_points
    xs, ys = [], []
    for repeat in repeats:
        g = generator(o, repeat, 'data')
        if o.inputs == 'normal':
            x = torch.randn(N, INPUTS, generator=g, dtype=torch.float64).to(o.device)
        else:
            x = (2 * torch.rand(N, INPUTS, generator=g, dtype=torch.float64) - 1).to(o.device)
        z = torch.randn(N, 1, generator=g, dtype=torch.float64).to(o.device)
        K = KERNELS[k].function(x, x, *parameters)
        K.diagonal().add_(JITTER + o.noise ** 2)
        xs.append(x.float())
        ys.append((torch.linalg.cholesky(K) @ z).float())
    x, y = torch.stack(xs), torch.stack(ys)
    return as_seen(o, Data(x[:, :o.points], y[:, :o.points], x[:, o.points:], y[:, o.points:]))


def as_seen(o: Options, data: Data) -> Data:
    """Draws as the models see them: inputs moved to [0, 1], targets standardised, where o says so."""
    x, y, x_test, y_test = data
    if o.inputs == 'unit':
        x, x_test = (x + 1) / 2, (x_test + 1) / 2
    if o.standardise:
        std, centre = torch.std_mean(y, dim=1, keepdim=True)
        y, y_test = (y - centre) / std, (y_test - centre) / std
    return Data(x, y, x_test, y_test)


def weight(how: str, n_out: int, n_in: int, g: torch.Generator) -> Tensor:
    """Initial weights (n_out, n_in): nn.Linear's uniform ones, Xavier's, N(0, 0.02^2), N(0, 1 / n_in)
    or orthogonal columns."""
    if how in ('linear', 'xavier'):
        bound = math.sqrt(1 / n_in if how == 'linear' else 6 / (n_in + n_out))
        return bound * (2 * torch.rand(n_out, n_in, generator=g) - 1)
    w = torch.randn(n_out, n_in, generator=g)
    if how == 'orthogonal':
        return torch.nn.init.orthogonal_(w, generator=g)
    return w * (0.02 if how == 'n02' else n_in ** -0.5)


def init(o: Options, model: str, repeats: Iterable[int]) -> dict[str, Tensor]:
    """Weights by name, each (R, out, in) or (R, 1, out) for a bias. Which there are tells the models
    apart."""
    block = {
        'Plain': {'fc': (256, D), 'proj': (D, 256)},
        'Gated': {'gate': (170, D), 'up': (170, D), 'down': (D, 170)},
    }.get(model, {'W': (170, D), 'V': (170, D)})
    copies = []
    for repeat in repeats:
        g = generator(o, repeat, 'weights')
        w = {'ln_gain': torch.ones(1, D), 'ln_bias': torch.zeros(1, D)}
        for name, (n_out, n_in) in {'in': (D, INPUTS), 'out': (1, D), **block}.items():
            if name in ('W', 'V'):
                w[name] = weight(o.init_cem, n_out, n_in, g)
            else:
                w[name] = weight(o.init, n_out, n_in, g)
                bias = n_in ** -0.5 * (2 * torch.rand(1, n_out, generator=g) - 1)
                w[name + '_bias'] = bias if o.init == 'linear' else torch.zeros(1, n_out)
        if 'V' in w and o.precond != 'none':
            w['P_d'] = torch.full((1, D), D ** -0.5)
        if 'V' in w and o.precond == 'diag_lowrank':
            w['P_U'] = 0.02 * torch.randn(D, 16, generator=g)
            w['P_V'] = torch.zeros(D, 16)
        if 'V' in w and o.norm:
            w['rms_gain'] = torch.ones(1, D)
        copies.append(w)
    stacked = {name: torch.stack([w[name] for w in copies]) for name in copies[0]}
    return {name: p.to(o.device).requires_grad_() for name, p in stacked.items()}


def recursion(w: dict[str, Tensor], h: Tensor, T: int, x: Tensor | None = None) -> Tensor:
    """T steps down the element-wise energy xi(u | h) = -gamma . phi(V u), gamma = W h, phi' = SiLU
    (Eq. 7), from u = x (default h): x <- x + P V^T (gamma * silu(V u)) (Eq. 15). All (R, N, D)."""
    x = h if x is None else x
    gamma = h @ w['W'].mT
    W_out = w['V']
    if 'P_d' in w:  # P = diag(softplus(sqrt(D) d)) + U V^T + V U^T (Eq. 13), folded into W_out
        W_out = W_out * F.softplus(D ** 0.5 * w['P_d'])
    if 'P_U' in w:
        W_out = W_out + (w['V'] @ w['P_U']) @ w['P_V'].mT + (w['V'] @ w['P_V']) @ w['P_U'].mT
    for _ in range(T):
        u = F.rms_norm(x, (D,)) * w['rms_gain'] if 'rms_gain' in w else x
        x = torch.baddbmm(x, gamma * F.silu(u @ w['V'].mT), W_out)  # gamma * silu is (R, N, 170)
    return x


def forward(o: Options, w: dict[str, Tensor], x: Tensor, T: int) -> Tensor:
    """Inputs (R, N, 10) -> predictions (R, N, 1): Linear, LayerNorm, a residual block (here is where
    the models differ; T concerns CEM alone), Linear. o.residual: the block's output is added to the
    normed h, as in Algorithm 1, or to h itself; `raw` lets the recursion too start from h itself."""
    def linear(name: str, x: Tensor) -> Tensor:
        return torch.baddbmm(w[name + '_bias'], x, w[name].mT)

    raw = linear('in', x)
    h = torch.addcmul(w['ln_bias'], F.layer_norm(raw, (D,)), w['ln_gain'])
    if 'fc' in w:
        update = linear('proj', getattr(F, o.activation)(linear('fc', h)))
    elif 'gate' in w:
        update = linear('down', F.silu(linear('gate', h)) * linear('up', h))
    elif o.residual == 'displacement':
        update = recursion(w, h, T) - h
    else:
        return linear('out', recursion(w, h, T, raw if o.residual == 'raw' else h))
    return linear('out', update + (h if o.residual == 'normed' else raw))


def trained_steps(model: str) -> int:
    """T of a model's name."""
    return int(model[5:]) if model.startswith('CEM-T') else 1


def sizes(o: Options, model: str) -> tuple[int, int]:
    """Parameters of one copy, and the FLOPs of a forward pass over 200 inputs as fvcore counts them: a
    multiply-add of a matrix product is one, a norm five an element, all else nothing."""
    w, T = init(o, model, [0]), trained_steps(model)
    with FlopCounterMode(display=False) as counter:
        forward(o, w, torch.zeros(1, ROWS, INPUTS, device=o.device), T)
    norms = 1 + T * ('rms_gain' in w)
    products = counter.get_total_flops() // 2
    return sum(p.numel() for p in w.values()), products + 5 * norms * ROWS * D


def learning_rate(o: Options, step: int) -> float:
    """Constant, or a linear warm-up and then a cosine."""
    recipe = RECIPES[o.recipe]
    warmup = int(recipe.warmup * o.steps)
    if o.schedule == 'constant':
        return o.learning_rate
    if step < warmup:
        return o.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (o.steps - warmup)))
    return o.learning_rate * (recipe.final + (1 - recipe.final) * cosine)


def train(o: Options, w: dict[str, Tensor], T: int, data: Data, repeats: Sequence[int]) -> None:
    """o.steps of AdamW on the weights of all repeats at once; with o.stop, a repeat's weights are
    then those of its best epoch on held-out points."""
    recipe = RECIPES[o.recipe]
    optimizer = torch.optim.AdamW(w.values(), betas=(0.9, recipe.beta2), eps=recipe.eps,
                                  weight_decay=recipe.weight_decay, fused=True)
    orders = [generator(o, repeat, 'batches') for repeat in repeats]
    batches = o.fitted // o.batch_size
    best = Best(o, w, T, data) if o.stop != 'end' else None
    for step in range(o.steps):
        if step % batches == 0:
            # a new epoch, every repeat in its own order
            if best and step and best.finished():
                break
            order = torch.stack([torch.randperm(o.fitted, generator=g) for g in orders])
            order = order.to(o.device)[:, :, None]
            x, y = data.x.gather(1, order.expand(-1, -1, INPUTS)), data.y.gather(1, order)
        batch = slice(step % batches * o.batch_size, (step % batches + 1) * o.batch_size)
        optimizer.param_groups[0]['lr'] = learning_rate(o, step)
        loss = (forward(o, w, x[:, batch], T) - y[:, batch]).square().mean(dim=1).sum()
        optimizer.zero_grad()
        loss.backward()
        if recipe.grad_clip < math.inf:
            # (R,): repeats do not share a limit
            norms = sum(p.grad.square().sum(dim=(1, 2)) for p in w.values()).sqrt()
            for p in w.values():
                p.grad *= (recipe.grad_clip / norms).clamp(max=1)[:, None, None]
        optimizer.step()
    if best:
        best.finished()
        best.restore()


class Best:
    """Each repeat's weights at its best epoch so far, by RMSE on a tenth of the training points or,
    as is often done, on the test points."""

    def __init__(self, o: Options, w: dict[str, Tensor], T: int, data: Data) -> None:
        self.o, self.w, self.T = o, w, T
        held = data[:2] if o.stop == 'valid' else data[2:]
        self.x, self.y = (part[:, o.fitted:] if o.stop == 'valid' else part for part in held)
        self.rmse = torch.full((len(self.x), 1, 1), math.inf, device=o.device)
        self.waited = torch.zeros_like(self.rmse)  # epochs since
        self.weights = {name: p.detach().clone() for name, p in w.items()}

    @torch.no_grad()
    def finished(self) -> bool:
        """Look at the weights after an epoch; whether every repeat has waited long enough."""
        now = (forward(self.o, self.w, self.x, self.T) - self.y).square().mean((1, 2), keepdim=True).sqrt()
        better = (now < self.rmse) & (self.waited < self.o.patience)
        self.rmse = torch.where(better, now, self.rmse)
        self.waited = torch.where(better, 0, self.waited + 1)
        for name, p in self.w.items():
            self.weights[name] = torch.where(better, p, self.weights[name])
        return bool((self.waited >= self.o.patience).all())

    @torch.no_grad()
    def restore(self) -> None:
        for name, p in self.w.items():
            p.copy_(self.weights[name])


@torch.no_grad()
def rmse(o: Options, w: dict[str, Tensor], x: Tensor, y: Tensor, T: int) -> list[float]:
    """Root mean squared error of each repeat."""
    return (forward(o, w, x, T) - y).square().mean(dim=(1, 2)).sqrt().tolist()


def fit(o: Options, model: str, data: Data, repeats: Sequence[int]) -> tuple[dict[str, Tensor], dict]:
    """Weights of a model after training, and train and test RMSE of each repeat."""
    w, T = init(o, model, repeats), trained_steps(model)
    train(o, w, T, data, repeats)
    fitted = rmse(o, w, data.x[:, :o.fitted], data.y[:, :o.fitted], T)
    return w, {'train': fitted, 'test': rmse(o, w, data.x_test, data.y_test, T)}


def cell_path(o: Options, kernel: Kernel, model: str) -> str:
    """Where a cell is kept; the name holds a digest of all that its numbers depend on."""
    decides = [o.repeats, o.seed, o.points, o.test_points, o.batch_size, o.steps, o.learning_rate,
               RECIPES[o.recipe], o.init, o.precond, o.norm, kernel.lengthscale, kernel.shape, JITTER]
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]
    return f'{o.out_dir}/cells/{kernel.function.__name__}_{model}_{digest}.json'


def load_cell(o: Options, kernel: Kernel, model: str) -> dict[str, Any] | None:
    """A finished cell, or None."""
    try:
        with open(cell_path(o, kernel, model), encoding='utf-8') as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def train_cell(o: Options, kernel: Kernel, model: str, data: Data) -> dict[str, Any]:
    """Train a cell, keep and return it: train and test RMSE of each repeat and, for CEM, test RMSE after 1, 2, ... steps."""
    data = Data(*(torch.as_tensor(numbers, device=o.device) for numbers in data))
    w, T = init(o, model, range(o.repeats)), trained_steps(model)
    train(o, w, T, data, range(o.repeats))
    cell = {'train': rmse(w, data.x, data.y, T), 'test': rmse(w, data.x_test, data.y_test, T)}
    if 'V' in w:
        cell['test_steps'] = [rmse(w, data.x_test, data.y_test, t) for t in range(1, 2 * max(T, 8) + 1)]
    path = cell_path(o, kernel, model)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, json.dumps(cell).encode())
    return cell


def start_worker() -> None:
    """A process of one thread that ends when its parent does, however that ends."""
    torch.set_num_threads(1)
    Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def run_jobs(pool: ProcessPoolExecutor | None, function: Callable, jobs: dict[Any, tuple]) -> Iterator[tuple[Any, Any]]:
    """function(*arguments) of each job under the job's name, as they come."""
    if pool is None:
        yield from ((name, function(*arguments)) for name, arguments in jobs.items())
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the workers: the parent alone answers Ctrl-C
    futures = {pool.submit(function, *arguments): name for name, arguments in jobs.items()}
    signal.signal(signal.SIGINT, handler)
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise


def draw_arrays(*arguments: Any) -> Data:
    """draw's numbers as NumPy arrays, which travel between processes by value: nothing to fetch from one that is ended."""
    return Data(*(tensor.cpu().numpy() for tensor in draw(*arguments)))


def run_table(o: Options) -> dict[tuple[str, str], dict[str, Any]]:
    """All cells of the table, trained where they are not there yet, under a progress bar that counts multiply-adds."""
    cells = {(k, m): load_cell(o, KERNELS[k], m) for k in o.kernels for m in o.models}
    cost = {m: 3 * o.steps * o.repeats * o.batch_size // ROWS * sizes(o, m)[1] for m in o.models}  # backward passes included
    draw_cost = o.repeats * (o.points + o.test_points) ** 3 // 3
    todo = sorted((key for key in cells if cells[key] is None), key=lambda key: -cost[key[1]])  # long ones first
    kernels = [k for k in o.kernels if any(k == of for of, _ in todo)]
    if len(todo) < len(cells):
        print(f'{len(cells) - len(todo)} of {len(cells)} cells found in {o.out_dir}/cells', file=sys.stderr)
    spawn = multiprocessing.get_context('spawn')
    with (ProcessPoolExecutor(o.jobs, spawn, start_worker) if o.jobs > 1 else nullcontext() as pool,
          tqdm(total=len(kernels) * draw_cost + sum(cost[m] for _, m in todo), smoothing=0,
               bar_format='{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left') as bar):
        data = {}
        for k, drawn in run_jobs(pool, draw_arrays, {k: (o, KERNELS[k], range(o.repeats)) for k in kernels}):
            data[k] = drawn
            bar.update(draw_cost)
        for (k, m), cell in run_jobs(pool, train_cell, {(k, m): (o, KERNELS[k], m, data[k]) for k, m in todo}):
            cells[k, m] = cell
            bar.update(cost[m])
    return cells


Numbers = dict[tuple[str, str], tuple[float, float, float, float]]  # (kernel, model): as in PAPER


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over repeats."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def deviations(ours: Numbers, key: tuple[str, str]) -> tuple[float, float]:
    """How far our train and test RMSE lie from the paper's, in the paper's standard deviations."""
    return tuple((ours[key][i] - PAPER[key][i]) / PAPER[key][i + 1] for i in (0, 2))


def table(o: Options, ours: Numbers) -> list[list[str]]:
    """The lines of the table, header first; in ours and in the paper's columns a kernel's best is **bold**."""
    def number(source: Numbers, key: tuple[str, str], i: int) -> str:
        if key not in source:
            return '-'
        best = min((v[i] for (k, m), v in source.items() if k == key[0] and v[i] == v[i]), default=None)  # nan: diverged
        text = f'{source[key][i]:.4f} ± {source[key][i + 1]:.4f}'
        return f'**{text}**' if source[key][i] == best else text
    lines = [['Model', 'Parameters', 'FLOPs', 'Kernel', 'Train RMSE', 'paper', 'Test RMSE', 'paper', "off by (paper's std)"]]
    size = {m: sizes_text(o, m) for m in o.models}
    for k, m in ours:
        off = '{:+.1f}, {:+.1f}'.format(*deviations(ours, (k, m))) if (k, m) in PAPER else '-'
        lines.append([m, *size[m], KERNELS[k].title, number(ours, (k, m), 0), number(PAPER, (k, m), 0),
                      number(ours, (k, m), 2), number(PAPER, (k, m), 2), off])
    return lines


def sizes_text(o: Options, model: str) -> tuple[str, str]:
    """Parameters and FLOPs as the paper prints them."""
    parameters, flops = sizes(o, model)
    return f'{parameters / 1e3:.2f}K', f'{flops / 1e6:.2f}M'


def findings(o: Options, ours: Numbers) -> list[str]:
    """What the paper reads off its table, in ours and in the paper's numbers, and how near our rows land."""
    same = [a == b for m in PAPER_SIZES if m in o.models for a, b in zip(sizes_text(o, m), PAPER_SIZES[m], strict=True)]
    lines = [f'Parameters and FLOPs as printed in the paper: {sum(same)} of {len(same)}.']
    cem = ('CEM-T1', 'CEM-T2', 'CEM-T4', 'CEM-T8')

    def falls(row: dict[str, tuple[float, ...]], i: int) -> bool:
        return all(row[a][i] > row[b][i] for a, b in pairwise(cem))

    for claim, models, holds in (
            ('CEM-T1 at or below Gated in train RMSE', ('Gated', 'CEM-T1'), lambda row: row['CEM-T1'][0] <= row['Gated'][0]),
            ('CEM-T2 below CEM-T1 in train RMSE', cem[:2], lambda row: row['CEM-T2'][0] < row['CEM-T1'][0]),
            ('Train RMSE not monotone over T = 1, 2, 4, 8', cem, lambda row: not falls(row, 0)),
            ('Test RMSE not monotone over T = 1, 2, 4, 8', cem, lambda row: not falls(row, 2)),
            ('Best test RMSE not at Plain', tuple(PAPER_SIZES), lambda row: row['Plain'][2] > min(v[2] for v in row.values()))):
        if kernels := [k for k in o.kernels if all((k, m) in ours for m in models)]:
            yes, paper = ([k for k in kernels if holds({m: source[k, m] for m in models})] for source in (ours, PAPER))
            but = ', '.join(KERNELS[k].title for k in kernels if k not in yes)
            lines.append(f'{claim}: {len(yes)} of {len(kernels)} kernels{f" (not {but})" if but else ""}; paper {len(paper)}.')
    if kernels := [k for k in o.kernels if (k, 'CEM-T1') in ours and (k, 'CEM-T2') in ours]:
        gains = ([1 - source[k, 'CEM-T2'][0] / source[k, 'CEM-T1'][0] for k in kernels] for source in (ours, PAPER))
        lines.append('Train RMSE saved by the second step: ' + ', '.join(
            f'{KERNELS[k].title} {a:.0%} (paper {b:.0%})' for k, a, b in zip(kernels, *gains, strict=True)) + '.')
    for what, plain in (('The calibrated rows (Plain)', True), ('The other rows', False)):
        rows = [(k, m) for k, m in ours if (k, m) in PAPER and (m == 'Plain') == plain]
        one, two = ([key for key in rows if all(abs(off) <= z for off in deviations(ours, key))] for z in (1, 2))
        far = ', '.join(f'{KERNELS[k].title} {m}' for k, m in rows if (k, m) not in two)
        lines.append(f"{what}, train and test RMSE both within one of the paper's std: {len(one)} of {len(rows)}; within two: "
                     f'{len(two)}{f" (not {far})" if far else ""}.')
    return lines


def draw_figures(o: Options, ours: Numbers, cells: dict[tuple[str, str], dict[str, Any]]) -> None:
    """figure.png: RMSE against T for each kernel. test_steps.png: test RMSE against the steps taken at test time."""
    def panels(rows: int, xlabel: str) -> tuple[plt.Figure, Any]:
        fig, axes = plt.subplots(rows, len(o.kernels), figsize=(3.2 * len(o.kernels), 0.8 + 2.5 * rows), squeeze=False)
        for ax, k in zip(axes[0], o.kernels, strict=True):
            ax.set_title(KERNELS[k].title)
        for ax in axes.flat:
            ax.set_xscale('log', base=2)
            ax.xaxis.set_major_formatter(lambda T, _: f'{T:g}')
            ax.set_xlabel(xlabel if ax in axes[-1] else '')
            ax.grid(alpha=0.3)
        return fig, axes

    def save(fig: plt.Figure, axes: Any, name: str) -> None:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        fig.legend(handles, labels, loc='lower center', ncol=len(labels), frameon=False)
        fig.tight_layout(rect=(0, 0.3 / fig.get_figheight(), 1, 1))
        image = io.BytesIO()
        fig.savefig(image, format='png', dpi=130)
        plt.close(fig)
        write_whole(f'{o.out_dir}/{name}', image.getvalue())

    cem = [m for m in o.models if m.startswith('CEM')]
    fig, axes = panels(2, 'T, steps of the recursion')
    for (row, i, what), (column, k) in product(((0, 0, 'train'), (1, 2, 'test')), enumerate(o.kernels)):
        ax = axes[row, column]
        for source, who, line in ((ours, 'ours', '-'), (PAPER, 'paper', ':')):
            for m, colour in (('Plain', 'tab:gray'), ('Gated', 'tab:green')):
                if (k, m) in source and m in o.models:
                    ax.axhline(source[k, m][i], color=colour, ls=line, label=f'{m}, {who}')
            beside = 1 if who == 'ours' else 1.07  # so that error bars do not hide each other
            points = [(trained_steps(m) * beside, *source[k, m][i:i + 2]) for m in cem if (k, m) in source]
            if points:
                ax.errorbar(*zip(*points, strict=True), color='tab:blue', ls=line, marker='o', capsize=3,
                            mfc='tab:blue' if who == 'ours' else 'white', label=f'CEM, {who}')
        ax.set_ylabel(f'{what} RMSE' if column == 0 else '')
    save(fig, axes, 'figure.png')

    fig, axes = panels(1, 'steps at test time')
    for ax, k in zip(axes[0], o.kernels, strict=True):
        for m, colour in zip(cem, plt.cm.viridis(torch.linspace(0, 0.9, len(cem)).numpy()), strict=True):
            curve, T = [mean(values) for values in cells[k, m]['test_steps']], trained_steps(m)
            ax.plot(range(1, len(curve) + 1), curve, color=colour, label=f'trained with T = {T}')
            ax.plot(T, curve[T - 1], 'o', color=colour)
        ax.set_yscale('log')
        ax.set_ylim(top=2)  # the draws have variance 1: beyond, nothing is left to see
    axes[0, 0].set_ylabel('test RMSE')
    if cem:
        save(fig, axes, 'test_steps.png')


def report(o: Options, cells: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Table and findings on the screen and in files, and the figures."""
    ours = {key: (*spread(cell['train']), *spread(cell['test'])) for key, cell in cells.items()}
    lines, found = table(o, ours), findings(o, ours)
    switches = ''.join(f', {name}={getattr(o, name)}' for name in ('recipe', 'init', 'precond', 'norm')
                       if getattr(o, name) != getattr(Options, name))
    caption = (f'Mean ± std over {o.repeats} repeats; {o.points} points, {o.steps} steps of {o.batch_size}{switches}'
               + (" (--quick: a look, not the paper's table)." if o.quick else '.'))
    header = ['model', 'parameters', 'flops', 'kernel', 'train_rmse', 'train_std', 'test_rmse', 'test_std']
    write_csv(f'{o.out_dir}/table.csv', [header + [f'paper_{name}' for name in header[4:]], *(
        [m, *sizes(o, m), KERNELS[k].title, *(f'{v:.6f}' for v in ours[k, m]), *PAPER.get((k, m), [''] * 4)] for k, m in ours)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ['-' * width for width in widths])
    aligned = '\n'.join('| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in lines)
    markdown = '\n\n'.join([caption, aligned, '\n'.join(f'- {line}' for line in found)]) + '\n'
    write_whole(f'{o.out_dir}/table.md', markdown.encode())
    draw_figures(o, ours, cells)
    if sys.stdout.isatty():
        aligned = re.sub(r'\*\*(.+?)\*\*', '\033[1m\\1\033[0m    ', aligned)
    print(caption, aligned, *found, f'Written to {o.out_dir}: table.csv, table.md and the figures.', sep='\n')


def write_csv(path: str, lines: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(lines)
    write_whole(path, text.getvalue().encode())


def main() -> None:
    given = read_options(sys.argv[1:], Options)
    o = build(Options, (QUICK if given.get('quick') else {}) | given)
    for command, own in (('calibrate', 'kernels models T_max points steps recipe init learning_rate precond norm quick'),
                         ('benchmark', 'kernels steps')):
        if getattr(o, command) and (idle := [name for name in own.split() if name in given]):
            fail(f'{command} sets {", ".join(idle)} itself: leave it out')
    torch.set_num_threads(1)  # products this small gain little from threads and, on a busy machine, wait for them
    start = time.perf_counter()
    try:
        os.makedirs(f'{o.out_dir}/cells', exist_ok=True)
        if o.benchmark:
            benchmark(o)
        elif o.calibrate:
            calibrate(o)
        else:
            report(o, run_table(o))
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}')
    except (KeyboardInterrupt, BrokenProcessPool) as error:
        what = 'interrupted' if isinstance(error, KeyboardInterrupt) else 'a process died (out of memory?)'
        kept = '' if o.calibrate or o.benchmark else f'; finished cells are in {o.out_dir}/cells, and the same command goes on'
        fail(what + kept)
    print(f'{time.perf_counter() - start:.0f} s on {o.device}')


if __name__ == '__main__':
    main()

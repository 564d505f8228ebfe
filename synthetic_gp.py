"""
Regression on Gaussian-process draws: the paper's table on recursion (appendix, "Study recursion on
synthetic data").

    python synthetic_gp.py                      the table: 6 models x 5 kernels, beside the paper's
    python synthetic_gp.py --protocol=blind     under another, which also trains with --T_max=32
    python synthetic_gp.py --quick              fewer points, steps, repeats: a look, no table

The paper gives sizes and results but not the protocol. `inferred` is the one, of all tried, under
which all thirty rows come nearest (python -m nanocem.gp_search): an inference about the paper, not
a prediction. `blind` was tuned on the five Plain rows (python -m nanocem.gp_calibrate): the other
25 are as they fell.

A cell of the table is a model and a kernel. Its R repeats (own draw, own weights) train together:
weights and batches have a leading dimension R, and the sum of the R losses gives each its own
gradient. Finished cells are kept in out_dir/cells: an interrupted run goes on. N points, width D.
"""
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from configurator import build, fail, read_options
from nanocem.files import say, write_whole
from nanocem.gp_kernels import matern, non_stationary, periodic, rational_quadratic, rbf
from nanocem.gp_report import TITLES, Cells, Key, read_cell, report, tested_steps, trained_steps
from nanocem.workers import run_jobs, workers

INPUTS, D, ROWS = 10, 64, 200  # ROWS: the paper's FLOPs are of a forward pass over 200 inputs
JITTER = 1e-6  # on the kernel's diagonal: noise of std 0.001, far below every RMSE of the table
KERNEL_NAMES = tuple(TITLES)
Initial = Literal['linear', 'xavier', 'n02', 'normal', 'orthogonal']


class Kernel(NamedTuple):
    function: Callable[..., Tensor]
    inferred: tuple[float, ...]  # lengthscale, then nu; period; alpha; slope, nu
    blind: tuple[float, ...]


KERNELS = {
    'rbf': Kernel(rbf, (6.36,), (4.83,)),
    'matern': Kernel(matern, (16.4, 0.5), (2.86, 1.5)),
    'periodic': Kernel(periodic, (2.42, 8.0), (4.78, 4.0)),
    'rational_quadratic': Kernel(rational_quadratic, (4.88, 0.1), (2.76, 1.0)),
    'non_stationary': Kernel(non_stationary, (17.7, 0.5, 1.5), (5.36, 0.5)),
}
QUICK = dict(repeats=2, points=2000, steps=500)
# what --protocol=blind sets; Options' own defaults are the inferred protocol's
BLIND = dict(batch_size=200, steps=1000, learning_rate=2e-3, schedule='cosine', init_cem='linear',
             stop='end')


@dataclass
class Options:
    """What to run. From points to patience it is the protocol, one for all rows."""
    protocol: Literal['inferred', 'blind'] = 'inferred'  # settles points to patience, and kernels
    kernels: tuple[Literal[KERNEL_NAMES], ...] = KERNEL_NAMES  # rows
    models: tuple[str, ...] | None = None  # default: Plain, Gated, CEM-T1, CEM-T2, ... to T_max
    T_max: int = 8  # CEM models with T = 1, 2, 4, ... steps up to this many
    repeats: int = 5  # R: GP draws, each with its own initial weights
    seed: int = 0  # of all of them
    points: int = 4000  # training points of a draw
    test_points: int = 1000  # further points of the same draw
    inputs: Literal['cube', 'unit', 'normal'] = 'cube'  # [-1, 1]^10, or it as [0, 1]^10, or N(0, I)
    standardise: bool = False  # targets to mean 0, variance 1 over a draw's training points
    noise: float = 0.0  # standard deviation of the targets' noise; the kernels' is 1
    batch_size: int = 64  # points a step
    steps: int = 2000  # of AdamW
    learning_rate: float = 5e-4  # the highest
    schedule: Literal['constant', 'cosine'] = 'constant'  # cosine: and the recipe's warm-up
    recipe: Literal['paper', 'torch', 'adam'] = 'paper'  # of the optimiser, see RECIPES
    init: Initial = 'linear'  # of all layers but W and V: nn.Linear's
    init_cem: Initial = 'normal'  # of W and V: N(0, 1 / D)
    activation: Literal['silu', 'gelu', 'relu', 'tanh'] = 'silu'  # of Plain
    residual: Literal['normed', 'displacement', 'raw'] = 'normed'  # what updates are added to
    stop: Literal['end', 'valid', 'test'] = 'test'  # weights: last; best epoch on held-out, on test
    patience: int = 1000  # epochs without a better one after which a repeat looks no further
    precond: Literal['none', 'diag', 'diag_lowrank'] = 'none'  # P of CEM (Eq. 13), of rank 16
    norm: bool = False  # an RMSNorm in front of every step of the recursion
    device: Literal['auto', 'cpu', 'cuda'] = 'auto'  # auto: cuda where there is one
    jobs: int | None = None  # processes of one thread; default 2 on a CPU, 1 on a GPU
    out_dir: str | None = None  # default: out/gp, or out/gp_blind; with --quick, ..._quick
    quick: bool = False  # 2 repeats, 2000 points, 500 steps, unless given

    def __post_init__(self) -> None:
        least = dict(seed=0, noise=0, learning_rate=0)
        for name, value in asdict(self).items():
            if type(value) in (int, float) and value < least.get(name, 1):
                raise ValueError(f'{name}={value}: expected at least {least.get(name, 1)}')
        if self.batch_size > self.fitted:
            raise ValueError(f'batch_size={self.batch_size} is more than points={self.points} '
                             f'leave to train on ({self.fitted})')
        if self.points + self.test_points > 30_000:
            raise ValueError(f'points={self.points}: an exact draw needs a matrix of '
                             '(points + test_points)^2; at most 30,000')
        if self.models is None:
            steps = sorted({2 ** i for i in range(self.T_max.bit_length())} | {self.T_max})
            self.models = ('Plain', 'Gated', *(f'CEM-T{T}' for T in steps))
        for model in self.models:
            if not re.fullmatch(r'Plain|Gated|CEM-T[1-9]\d*', model):
                raise ValueError(f'models={model}: expected Plain, Gated or CEM-T1, CEM-T2, ...')
        if self.device == 'cuda' and not torch.cuda.is_available():
            raise ValueError('device=cuda: this machine has no GPU that torch can use')
        if self.device == 'auto':
            self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        self.jobs = self.jobs or (1 if self.device == 'cuda' else 2)
        name = 'out/gp' + '_blind' * (self.protocol == 'blind') + '_quick' * self.quick
        self.out_dir = self.out_dir or name

    @property
    def fitted(self) -> int:
        """Points that give gradients: a tenth is held out where it picks the epoch."""
        return self.points - self.points // 10 if self.stop == 'valid' else self.points


class Recipe(NamedTuple):
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float  # largest gradient norm of a repeat
    warmup: float  # part of the steps, with a schedule
    final: float  # part of the learning rate, with a schedule


RECIPES = {
    'paper': Recipe(0.95, 1e-9, 0.1, 1.0, 0.05, 0.1),  # of its table of training hyperparameters
    'torch': Recipe(0.999, 1e-8, 0.01, math.inf, 0.0, 0.0),  # AdamW's own
    'adam': Recipe(0.999, 1e-8, 0.0, math.inf, 0.0, 0.0),
}


# Data

def generator(o: Options, repeat: int, use: str) -> torch.Generator:
    """The random numbers of one repeat for one use, which are data, weights and batches: no other
    repeat, model or kernel changes them."""
    digest = hashlib.sha256(f'{o.seed} {repeat} {use}'.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], 'big'))


class Data(NamedTuple):
    """The points of R draws."""
    x: Tensor  # (R, points, 10)
    y: Tensor  # (R, points, 1)
    x_test: Tensor  # (R, test_points, 10)
    y_test: Tensor  # (R, test_points, 1)


def draw(o: Options, k: str, repeats: Iterable[int],
         parameters: Sequence[float] | None = None) -> Data:
    """Exact draws f = L z, L L^T the kernel matrix of training and test points together. Points and
    z of a repeat are the same for every kernel. `parameters`: default, those of o.protocol."""
    parameters = parameters or getattr(KERNELS[k], o.protocol)
    N = o.points + o.test_points
    xs, ys = [], []
    for repeat in repeats:
        g = generator(o, repeat, 'data')
        if o.inputs == 'normal':
            x = torch.randn(N, INPUTS, generator=g, dtype=torch.float64)
        else:
            x = 2 * torch.rand(N, INPUTS, generator=g, dtype=torch.float64) - 1
        x = x.to(o.device)
        z = torch.randn(N, 1, generator=g, dtype=torch.float64).to(o.device)
        K = KERNELS[k].function(x, x, *parameters)
        K.diagonal().add_(JITTER + o.noise ** 2)
        xs.append(x.float())
        ys.append((torch.linalg.cholesky(K) @ z).float())
    x, y = torch.stack(xs), torch.stack(ys)
    return as_seen(o, Data(x[:, :o.points], y[:, :o.points], x[:, o.points:], y[:, o.points:]))


def as_seen(o: Options, data: Data) -> Data:
    """Draws as the models see them: inputs moved to [0, 1], targets standardised, if o says so."""
    x, y, x_test, y_test = data
    if o.inputs == 'unit':
        x, x_test = (x + 1) / 2, (x_test + 1) / 2
    if o.standardise:
        std, centre = torch.std_mean(y, dim=1, keepdim=True)
        y, y_test = (y - centre) / std, (y_test - centre) / std
    return Data(x, y, x_test, y_test)


# Models

def weight(how: str, n_out: int, n_in: int, g: torch.Generator) -> Tensor:
    """Initial weights (n_out, n_in): nn.Linear's and Xavier's are uniform, n02 is N(0, 0.02^2),
    normal N(0, 1 / n_in), orthogonal has orthonormal columns or rows."""
    if how in ('linear', 'xavier'):
        bound = math.sqrt(1 / n_in if how == 'linear' else 6 / (n_in + n_out))
        return bound * (2 * torch.rand(n_out, n_in, generator=g) - 1)
    w = torch.randn(n_out, n_in, generator=g)
    if how == 'orthogonal':
        return torch.nn.init.orthogonal_(w, generator=g)
    return w * (0.02 if how == 'n02' else n_in ** -0.5)


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
            if name in ('W', 'V'):
                w[name] = weight(o.init_cem, n_out, n_in, g)
            else:
                w[name] = weight(o.init, n_out, n_in, g)
                bias = n_in ** -0.5 * (2 * torch.rand(1, n_out, generator=g) - 1)
                w[name + '_bias'] = bias if o.init == 'linear' else torch.zeros(1, n_out)
        if 'V' in w and o.precond != 'none':
            w['P_p'] = torch.full((1, D), D ** -0.5)
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
    (Eq. 7), from x, default h: x <- x + P V^T (gamma * silu(V x)) (Eq. 15). All (R, N, D)."""
    x = h if x is None else x
    gamma = h @ w['W'].mT
    W_out = w['V']
    if 'P_p' in w:  # P = diag(softplus(sqrt(D) p)) + U V^T + V U^T (Eq. 13), folded into W_out
        W_out = W_out * F.softplus(D ** 0.5 * w['P_p'])
    if 'P_U' in w:
        W_out = W_out + (w['V'] @ w['P_U']) @ w['P_V'].mT + (w['V'] @ w['P_V']) @ w['P_U'].mT
    for _ in range(T):
        u = F.rms_norm(x, (D,)) * w['rms_gain'] if 'rms_gain' in w else x
        x = torch.baddbmm(x, gamma * F.silu(u @ w['V'].mT), W_out)  # gamma * silu is (R, N, 170)
    return x


def forward(o: Options, w: dict[str, Tensor], x: Tensor, T: int) -> Tensor:
    """Inputs (R, N, 10) -> predictions (R, N, 1): Linear, LayerNorm, a residual block (in which the
    models differ; T concerns CEM alone), Linear. o.residual: updates are added to the normed h, as
    in Algorithm 1, or to h itself; with `raw` the recursion too starts from h itself."""
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


def sizes(o: Options, model: str) -> tuple[int, int]:
    """Parameters of one copy, and FLOPs of a forward pass over 200 inputs as fvcore counts them: a
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
    then those of its best epoch by RMSE on a tenth of the training points or on the test points."""
    recipe = RECIPES[o.recipe]
    optimizer = torch.optim.AdamW(w.values(), betas=(0.9, recipe.beta2), eps=recipe.eps,
                                  weight_decay=recipe.weight_decay, fused=True)
    orders = [generator(o, repeat, 'batches') for repeat in repeats]
    batches = o.fitted // o.batch_size
    held = [part[:, o.fitted:] for part in data[:2]] if o.stop == 'valid' else data[2:]
    best = torch.full((len(repeats),), math.inf, device=o.device)
    waited = torch.zeros_like(best)  # epochs since then
    best_w = {name: p.detach().clone() for name, p in w.items()}

    for step in range(o.steps):
        at = step % batches
        if at == 0:
            # a new epoch, every repeat in its own order
            order = torch.stack([torch.randperm(o.fitted, generator=g) for g in orders])
            order = order.to(o.device)[:, :, None]
            x, y = data.x.gather(1, order.expand(-1, -1, INPUTS)), data.y.gather(1, order)
        batch = slice(at * o.batch_size, (at + 1) * o.batch_size)
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

        if o.stop != 'end' and (at == batches - 1 or step == o.steps - 1):
            # the epoch's end: which repeats are better than ever, and not yet stopped?
            now = torch.tensor(rmse(o, w, *held, T), device=o.device)
            better = (now < best) & (waited < o.patience)
            best = torch.where(better, now, best)
            waited = torch.where(better, 0, waited + 1)
            for name, p in w.items():
                best_w[name] = torch.where(better[:, None, None], p.detach(), best_w[name])
            if (waited >= o.patience).all():
                break
    if best.isfinite().all():
        for name, p in w.items():
            p.data.copy_(best_w[name])


@torch.no_grad()
def rmse(o: Options, w: dict[str, Tensor], x: Tensor, y: Tensor, T: int) -> list[float]:
    """Root mean squared error of each repeat."""
    return (forward(o, w, x, T) - y).square().mean(dim=(1, 2)).sqrt().tolist()


def fit(o: Options, model: str, data: Data,
        repeats: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of a model after training, and train and test RMSE of each repeat."""
    w, T = init(o, model, repeats), trained_steps(model)
    train(o, w, T, data, repeats)
    fitted = rmse(o, w, data.x[:, :o.fitted], data.y[:, :o.fitted], T)
    return w, {'train': fitted, 'test': rmse(o, w, data.x_test, data.y_test, T)}


# Cells: a model on a kernel

def decides(o: Options) -> dict[str, Any]:
    """The options that a cell's numbers depend on."""
    idle = ('protocol', 'kernels', 'models', 'T_max', 'jobs', 'out_dir', 'quick')
    return {name: value for name, value in asdict(o).items() if name not in idle}


def cell_path(o: Options, k: str, model: str) -> str:
    """Where a cell is kept; the name holds a digest of all that its numbers depend on."""
    text = json.dumps([decides(o), getattr(KERNELS[k], o.protocol), RECIPES[o.recipe], JITTER])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f'{o.out_dir}/cells/{k}_{model}_{digest}.json'


def train_cell(o: Options, k: str, model: str, data: Data) -> dict[str, Any]:
    """Train a cell, keep and return it: train and test RMSE of each repeat and, for CEM, test RMSE
    after 1, 2, ... steps. Where training diverged nothing is kept, and {} returned."""
    data = Data(*(torch.as_tensor(numbers, device=o.device) for numbers in data))
    w, cell = fit(o, model, data, range(o.repeats))
    if not math.isfinite(sum(cell['train'] + cell['test'])):
        return {}
    if most := tested_steps(model):
        cell['test_steps'] = [rmse(o, w, *data[2:], t) for t in range(1, most + 1)]
    write_whole(cell_path(o, k, model), json.dumps(cell).encode())
    return cell


def draw_arrays(*arguments: Any) -> Data:
    """draw's numbers as NumPy arrays, which travel between processes by value."""
    return Data(*(tensor.cpu().numpy() for tensor in draw(*arguments)))


def run_table(o: Options) -> Cells:
    """All cells of the table, trained where they are not there yet; {} is one that diverged."""
    keys = [(k, m) for k in o.kernels for m in o.models]
    cells: dict[Key, Any] = {key: read_cell(cell_path(o, *key), key[1], o.repeats) for key in keys}
    # what the progress bar counts: multiply-adds, backward passes included
    cost = {m: 3 * o.steps * o.repeats * o.batch_size // ROWS * sizes(o, m)[1] for m in o.models}
    draw_cost = o.repeats * (o.points + o.test_points) ** 3 // 3
    # long ones first
    todo = sorted((key for key in cells if not cells[key]), key=lambda key: -cost[key[1]])
    kernels = [k for k in o.kernels if any(k == of for of, _ in todo)]
    if found := len(cells) - len(todo):
        print(f'{found} of {len(cells)} cells found in {o.out_dir}/cells', file=sys.stderr)
    total = len(kernels) * draw_cost + sum(cost[m] for _, m in todo)
    style = '{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left'
    with workers(o.jobs) as pool, tqdm(total=total, smoothing=0, bar_format=style) as bar:
        data = {}
        for k, drawn in run_jobs(pool, draw_arrays, {k: (o, k, range(o.repeats)) for k in kernels}):
            data[k] = drawn
            bar.update(draw_cost)
        jobs = {(k, m): (o, k, m, data[k]) for k, m in todo}
        for key, cells[key] in run_jobs(pool, train_cell, jobs):
            bar.update(cost[key[1]])
    return cells


def options(argv: list[str]) -> Options:
    """A command line's: what is given, then what --quick, then what the protocol sets."""
    given = read_options(argv, Options)
    blind = BLIND if given.get('protocol') == 'blind' else {}
    return build(Options, blind | (QUICK if given.get('quick') else {}) | given)


def main(argv: list[str]) -> None:
    o = options(argv)
    # products this small gain little from threads and, on a busy machine, wait for them
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        os.makedirs(f'{o.out_dir}/cells', exist_ok=True)
        cells = run_table(o)
        look = " (--quick: a look, not the paper's table)" * o.quick
        switches = ', '.join(f'{name}={value}' for name, value in decides(o).items())
        caption = f'Protocol {o.protocol}{look}, mean ± std over repeats: {switches}.'
        diverged = report(caption, cells, {m: sizes(o, m) for m in o.models}, o.out_dir)
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}')
    except (KeyboardInterrupt, BrokenProcessPool) as error:
        died = isinstance(error, BrokenProcessPool)
        fail(('a process died (out of memory?)' if died else 'interrupted') +
             f'; finished cells are in {o.out_dir}/cells, and the same command goes on')
    say(f'{time.perf_counter() - start:.0f} s on {o.device}')
    if diverged:
        fail(f'{diverged} diverged: a learning_rate below {o.learning_rate} would be right')


if __name__ == '__main__':
    main(sys.argv[1:])

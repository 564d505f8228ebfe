"""
Curves over sizes: the best learning rate and its law, what a step is worth, where a trend points.

All in float64, from plain arrays; nothing here knows what was trained.
"""
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.interpolate import Akima1DInterpolator
from scipy.stats import t as student

PHI_GRID = np.linspace(-3, 4, 29)
ALPHA_GRID = np.geomspace(0.02, 2, 25)
UNIT = 1e5  # sizes are counted in these, so that A is no astronomical number


def akima_optimum(rates: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Where Akima's interpolant of `values` over log(rates) (increasing) is lowest, and its value
    there; of equals the lowest rate. At an edge of the sweep the optimum may lie beyond.
    ValueError below two points."""
    if len(rates) < 2:
        raise ValueError(f'{len(rates)} rates: a sweep needs at least two')
    x = np.log(rates)
    curve = Akima1DInterpolator(x, values)
    flat = curve.derivative().roots(extrapolate=False)
    # roots() gives nan where a whole piece is flat
    candidates = np.sort(np.concatenate([x, flat[np.isfinite(flat)]]))
    best = candidates[np.argmin(np.round(curve(candidates), 12))]
    return float(np.exp(best)), float(curve(best))


def carry_rates(best: Mapping[str, Mapping[float, float]], sizes: Sequence[float],
                ) -> tuple[float, dict[str, list[float]]]:
    """best[family][N] is a swept optimum. The power law rate = c_family N^-g, least squares in logs
    with one g for all families (an exponent each, from two sizes, would carry their noise far up).
    Returns g, and each family's rates at `sizes`, to two digits."""
    g, level = 0.0, {}
    x = {family: np.log(list(of)) for family, of in best.items()}
    y = {family: np.log(list(of.values())) for family, of in best.items()}
    spread = sum(((v - v.mean()) ** 2).sum() for v in x.values())
    if spread:
        g = -sum(((x[f] - x[f].mean()) * (y[f] - y[f].mean())).sum() for f in best) / spread
    for family in best:
        level[family] = y[family].mean() + g * x[family].mean()
    carried = {family: [float(f'{math.exp(level[family] - g * math.log(N)):.2g}') for N in sizes]
               for family in best}
    return float(g), carried


class Trend(NamedTuple):
    """A straight line through differences over log N, read at one size."""
    at: float  # the line's value there
    error: float  # its standard error; nan where the points leave no freedom
    freedom: int
    slope: float  # a tenfold N
    slope_error: float

    def interval(self) -> tuple[float, float]:
        """95%; everything where there is no freedom."""
        return around(self.at, self.error, self.freedom)

    def slope_interval(self) -> tuple[float, float]:
        return around(self.slope, self.slope_error, self.freedom)

    def p_below(self, bound: float) -> float:
        """How likely so low a value is, were the truth `bound`: small says it lies below. 1 where
        there is no freedom."""
        if self.freedom < 1 or not math.isfinite(self.error):
            return 1.0
        if self.error == 0:
            return float(self.at >= bound)
        return float(student.cdf((self.at - bound) / self.error, self.freedom))


def around(value: float, error: float, freedom: int) -> tuple[float, float]:
    if freedom < 1 or not math.isfinite(error):
        return -math.inf, math.inf
    half = float(student.ppf(0.975, freedom)) * error
    return value - half, value + half


def trend(N: Sequence[float], d: Sequence[float], at: float) -> Trend:
    """The line through the differences d at sizes N, read at size `at`. With one size it is their
    mean, and its interval the paired t-test's."""
    x = np.log10(np.asarray(N, dtype=float))
    d = np.asarray(d, dtype=float)
    columns = [np.ones_like(x), x - math.log10(at)]
    n = 2 if len(set(N)) > 1 else 1
    X = np.stack(columns[:n], axis=1)
    covariance = np.linalg.inv(X.T @ X)
    line = covariance @ X.T @ d
    freedom = len(d) - n
    error = np.full(n, math.nan)
    if freedom > 0:
        error = np.sqrt(np.diag(covariance) * ((d - X @ line) ** 2).sum() / freedom)
    slope = (float(line[1]), float(error[1])) if n > 1 else (0.0, math.nan)
    return Trend(float(line[0]), float(error[0]), freedom, *slope)


class Runs(NamedTuple):
    """What a law is fitted to, one entry a run."""
    once: np.ndarray  # N_once: weights used once
    rec: np.ndarray  # N_rec: weights of the recursed sublayers
    steps: np.ndarray  # T
    seed: np.ndarray
    loss: np.ndarray  # nats a token


class Law(NamedTuple):
    """L = E + A (N_once + T^phi N_rec)^-alpha, tokens tied to size (arXiv 2604.21106)."""
    E: float
    A: float
    alpha: float
    phi: float
    misfit: float  # root mean square of what it misses, nats


def fit_law(runs: Runs) -> Law:
    """Least squares. For given alpha and phi the rest is linear with E, A >= 0; those two are
    looked for on a grid and then on ever finer ones. ValueError where phi cannot be told: fewer
    than two sizes, or one number of steps."""
    if len(set(runs.steps)) < 2 or len(set(runs.once + runs.rec)) < 2:
        raise ValueError('phi needs at least two sizes and two numbers of steps')

    alphas, phis = ALPHA_GRID, PHI_GRID
    ratio, width = alphas[1] / alphas[0], phis[1] - phis[0]
    for _ in range(16):
        alpha, phi = (grid.ravel() for grid in np.meshgrid(alphas, phis))
        rest, E, A = solve(runs, alpha, phi)
        best = np.argmin(rest)
        ratio, width = ratio ** 0.6, width * 0.6
        alphas = np.clip(alpha[best] * ratio ** np.arange(-3, 4), ALPHA_GRID[0], ALPHA_GRID[-1])
        phis = np.clip(phi[best] + width * np.arange(-3, 4), PHI_GRID[0], PHI_GRID[-1])
    A = A[best] * UNIT ** alpha[best]
    misfit = (rest[best] / len(runs.loss)) ** 0.5
    return Law(*(float(x) for x in (E[best], A, alpha[best], phi[best], misfit)))


def solve(runs: Runs, alpha: np.ndarray, phi: np.ndarray) -> tuple[np.ndarray, ...]:
    """For each pair of exponents the squared error, E and A (of N in UNITs), both at least 0."""
    N = (runs.once + runs.steps ** phi[:, None] * runs.rec) / UNIT
    z = N ** -alpha[:, None]
    y = runs.loss
    dz, dy = z - z.mean(axis=1, keepdims=True), y - y.mean()
    A = np.maximum((dz * dy).sum(axis=1) / (dz ** 2).sum(axis=1), 0)
    E = y.mean() - A * z.mean(axis=1)
    through_zero = (z * y).sum(axis=1) / (z ** 2).sum(axis=1)
    A = np.where(E < 0, through_zero, A)
    E = np.maximum(E, 0)
    rest = ((E[:, None] + A[:, None] * z - y) ** 2).sum(axis=1)
    return rest, E, A


def bootstrap_phi(runs: Runs, draws: int, seed: int) -> np.ndarray:
    """phi of `draws` resamples: sizes with replacement (at least three of them, if there are
    three), at each size seeds with replacement, a seed's runs at all T together, as they share
    their data."""
    rng = np.random.default_rng(seed)
    size = np.unique(runs.once + runs.rec, return_inverse=True)[1]
    members = {(s, k): np.flatnonzero((size == s) & (runs.seed == k))
               for s in np.unique(size) for k in np.unique(runs.seed[size == s])}
    seeds = {s: [k for of, k in members if of == s] for s in np.unique(size)}
    found = []
    while len(found) < draws:
        drawn = rng.choice(list(seeds), len(seeds))
        if len(set(drawn)) < min(3, len(seeds)):
            continue
        picked = [members[s, k] for s in drawn for k in rng.choice(seeds[s], len(seeds[s]))]
        sample = np.concatenate(picked)
        if len(set(runs.steps[sample])) > 1:
            found.append(fit_law(Runs(*(column[sample] for column in runs))).phi)
    return np.array(found)


def equal_flops(loss: float, losses: Sequence[float], flops: Sequence[float], E: float) -> float:
    """The FLOPs at which a curve of models (losses falling with FLOPs) reaches `loss`: straight
    lines of log FLOPs over log(loss - E) between its points, the first or last one carried on
    outside. nan where the curve does not fall there."""
    order = np.argsort(flops)
    x = np.log(np.asarray(flops)[order])
    y = np.log(np.asarray(losses)[order] - E)
    at = math.log(loss - E)
    n = int(np.clip(np.count_nonzero(y > at), 1, len(y) - 1))
    fall = y[n - 1] - y[n]
    if fall <= 0:
        return math.nan
    return float(np.exp(x[n - 1] + (x[n] - x[n - 1]) * (y[n - 1] - at) / fall))

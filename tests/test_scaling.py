"""nanocem/scaling.py: rates, the law of a step's worth on made-up data, trends. Seeds: fixed."""
import math

import numpy as np
import pytest
from scipy.stats import linregress, ttest_rel

from nanocem.scaling import (
    Runs,
    akima_optimum,
    bootstrap_phi,
    carry_rates,
    equal_flops,
    fit_law,
    trend,
)


class TestAkima:
    rates = tuple(0.0005 * 2 ** i for i in range(5))

    def test_interior(self):
        """A parabola in log rate, its minimum between two rates."""
        values = [3 + (math.log(r) - math.log(0.0017)) ** 2 for r in self.rates]
        rate, value = akima_optimum(self.rates, values)
        assert rate == pytest.approx(0.0017, rel=0.03) and value == pytest.approx(3, abs=0.01)

    def test_edges(self):
        falling, rising = akima_optimum(self.rates, [5, 4, 3, 2, 1]), akima_optimum(
            self.rates, [1, 2, 3, 4, 5])
        assert falling == (pytest.approx(0.008), pytest.approx(1))
        assert rising == (pytest.approx(0.0005), pytest.approx(1))

    def test_ties(self):
        flat = akima_optimum(self.rates, [2, 2, 2, 2, 2])
        assert flat == (pytest.approx(0.0005), pytest.approx(2))
        rate, _ = akima_optimum(self.rates, [2, 1, 3, 1, 2])
        assert rate < self.rates[2]  # of two equal valleys the lower rate's

    def test_never_above_the_points(self):
        rng = np.random.default_rng(1)
        for _ in range(50):
            values = rng.normal(size=5)
            assert akima_optimum(self.rates, values)[1] <= values.min() + 1e-9

    def test_too_few(self):
        with pytest.raises(ValueError, match='at least two'):
            akima_optimum([0.001], [1.0])


def test_rates_are_carried_by_one_power_law():
    """Two families that follow 3 N^-0.2 and twice that are met, far above what was swept."""
    sizes = [8e4, 2e5, 4e5, 1e6]
    best = {name: {N: factor * 3 * N ** -0.2 for N in sizes[:2]}
            for name, factor in (('a', 1), ('b', 2))}
    exponent, carried = carry_rates(best, sizes)
    assert exponent == pytest.approx(0.2)
    for name, factor in (('a', 1), ('b', 2)):
        assert carried[name] == pytest.approx([factor * 3 * N ** -0.2 for N in sizes], rel=0.05)
    # opposite noise in two families leaves the exponent; two digits, so that folders have names
    best['a'][8e4] *= 1.2
    best['b'][8e4] /= 1.2
    assert carry_rates(best, sizes)[0] == pytest.approx(0.2)
    assert all(rate == float(f'{rate:.2g}') for rates in carried.values() for rate in rates)


def made_up(phi, noise, seed, share=0.35, E=0.8, A=25.0, alpha=0.3):
    """Runs of five sizes, three seeds, T = 1 and 2, from the law itself; a seed's runs share half
    of their noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for layers in (3, 4, 5, 6, 7):
        N = 12.0 * (16 * layers) ** 2 * layers
        for s in (1, 2, 3):
            shared = rng.normal() * noise
            for T in (1, 2):
                once, rec = (1 - share) * N, share * N
                loss = E + A * (once + T ** phi * rec) ** -alpha
                rows.append((once, rec, T, s, loss + shared + rng.normal() * noise))
    return Runs(*np.array(rows).T)


@pytest.mark.parametrize('phi', [-0.5, 0.0, 0.46, 1.0])
def test_phi_is_recovered(phi):
    """Exactly without noise, and within its 95% interval with noise of 0.003 nats."""
    law = fit_law(made_up(phi, 0.0, 0))
    assert law.phi == pytest.approx(phi, abs=1e-3)
    assert law[:3] == (pytest.approx(0.8, abs=1e-3), pytest.approx(25, rel=1e-2),
                       pytest.approx(0.3, rel=1e-3))
    assert law.misfit < 1e-5
    runs = made_up(phi, 0.003, 3)
    low, high = np.percentile(bootstrap_phi(runs, 200, seed=1), (2.5, 97.5))
    assert low < phi < high and high - low < 0.5
    assert low <= fit_law(runs).phi <= high


def test_phi_interval_holds_its_promise():
    """Of 40 made-up ladders most intervals hold the truth; bootstrap over five sizes is a little
    short of its 95%."""
    held = 0
    for seed in range(40):
        runs = made_up(0.46, 0.003, seed)
        low, high = np.percentile(bootstrap_phi(runs, 60, seed=1), (2.5, 97.5))
        held += low < 0.46 < high
    assert held >= 30


def test_phi_needs_two_sizes_and_steps():
    runs = made_up(0.5, 0.0, 0)
    for keep in (runs.steps == 1, runs.once == runs.once[0]):
        with pytest.raises(ValueError, match='two sizes and two numbers of steps'):
            fit_law(Runs(*(column[keep] for column in runs)))


def test_trend_of_one_size_is_the_paired_t_test():
    rng = np.random.default_rng(1)
    a, b = rng.normal(5.1, 0.1, 4), rng.normal(5, 0.1, 4)
    line = trend([8e4] * 4, a - b, 8e4)
    right = ttest_rel(a, b).confidence_interval()
    assert line.interval() == (pytest.approx(right.low), pytest.approx(right.high))
    assert line.p_below(0.0) == pytest.approx(ttest_rel(a, b, alternative='less').pvalue)
    assert line.slope_interval() == (-math.inf, math.inf)


def test_trend_over_sizes_is_the_regression_line():
    rng = np.random.default_rng(1)
    N = np.repeat([8e4, 2e5, 1e6], 3)
    d = 0.02 - 0.01 * np.log10(N / 1e6) + rng.normal(size=9) * 0.003
    line, right = trend(N, d, 1e6), linregress(np.log10(N / 1e6), d)
    assert line.at == pytest.approx(right.intercept)
    assert line.error == pytest.approx(right.intercept_stderr)
    assert line.slope == pytest.approx(right.slope)
    assert line.slope_error == pytest.approx(right.stderr) and line.freedom == 7


def test_trend_without_freedom_says_nothing():
    for line in (trend([8e4], [0.1], 8e4), trend([8e4, 2e5], [0.1, 0.2], 2e5)):
        assert line.interval() == (-math.inf, math.inf) and line.p_below(0.0) == 1.0


def test_equal_flops():
    """Three models on L = 1.5 + (C / 1e12)^-0.2: between them, beyond them, in any order."""
    flops = [1e12, 1e13, 1e15]
    losses = [1.5 + (C / 1e12) ** -0.2 for C in flops]
    for C in (1e13, 3e12, 1e14, 1e17, 1e11):
        loss = 1.5 + (C / 1e12) ** -0.2
        assert equal_flops(loss, losses, flops, E=1.5) == pytest.approx(C)
        assert equal_flops(loss, losses[::-1], flops[::-1], E=1.5) == pytest.approx(C)
    assert math.isnan(equal_flops(1.75, [1.8, 1.9], [1e12, 1e13], E=0))

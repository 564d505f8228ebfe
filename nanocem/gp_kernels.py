"""Covariance functions of synthetic_gp.py: a (N, inputs), b (M, inputs) -> (N, M), ones on the
diagonal."""
import math

import torch
from torch import Tensor


def sq_dist(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances."""
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_(min=0)


def rbf(a: Tensor, b: Tensor, lengthscale: float) -> Tensor:
    """exp(-|a - b|^2 / (2 lengthscale^2))."""
    return correlation(sq_dist(a, b) / lengthscale ** 2, math.inf)


def matern(a: Tensor, b: Tensor, lengthscale: float, nu: float) -> Tensor:
    """Matern's at the three nu where it needs no Bessel function; the higher nu, the smoother."""
    return correlation(sq_dist(a, b) / lengthscale ** 2, nu)


def correlation(sq: Tensor, nu: float) -> Tensor:
    """Matern's of squared distances in lengthscales, at nu 0.5, 1.5, 2.5 and inf, which is RBF."""
    if nu == math.inf:
        return torch.exp(-0.5 * sq)
    r = (2 * nu * sq).sqrt()
    return {0.5: 1, 1.5: 1 + r, 2.5: 1 + r + r ** 2 / 3}[nu] * torch.exp(-r)


def periodic(a: Tensor, b: Tensor, lengthscale: float, period: float) -> Tensor:
    """prod_d exp(-2 sin^2(pi (a_d - b_d) / period) / lengthscale^2): with the sine of the whole
    distance |a - b| it is not positive definite. 4 sin^2 is a circle's squared chord."""
    circle_a, circle_b = (torch.cat([angle.cos(), angle.sin()], dim=1)
                          for angle in (2 * math.pi / period * a, 2 * math.pi / period * b))
    return rbf(circle_a, circle_b, lengthscale)


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

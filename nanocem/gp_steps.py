"""
Why recursion stops paying: CEM models of synthetic_gp.py trained with T steps, seen step by step.

    python -m nanocem.gp_steps --kernels=rational_quadratic

Takes synthetic_gp.py's options and writes out_dir/steps.md, a line for each T and each step t:

- RMSE where the head reads x_t in place of x_T, on training and on test points;
- the energy xi(x_t | h) less xi(x_0 | h), mean over test points: what a step is meant to lower;
- |x_t - x_(t-1)| / |x_0|, how far the step went;
- eigenvalues of V^T diag(gamma * silu'(V x_t)) V, mean over test points of the largest and the
  smallest. A step's Jacobian is the identity plus this matrix: where the largest is above zero the
  energy is not convex and steps drive points apart; below -2 a step overshoots its valley.
"""
import math
import os
import sys
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import synthetic_gp as gp
from configurator import fail
from nanocem.files import write_whole
from nanocem.gp_report import TITLES, markdown, trained_steps

HEADER = ['kernel', 'T', 't', 'train RMSE', 'test RMSE', 'energy', 'moved', 'largest', 'smallest']
LOOKED_AT = 100  # test points of each repeat, for all but the RMSE


def hidden(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the recursion starts from: inputs (R, N, 10) -> normed h (R, N, D)."""
    h = torch.baddbmm(w['in_bias'], x, w['in'].mT)
    return torch.addcmul(w['ln_bias'], F.layer_norm(h, (gp.D,)), w['ln_gain'])


def energy_change(w: dict[str, Tensor], h: Tensor, x: Tensor) -> Tensor:
    """xi(x | h) - xi(h | h) = -gamma . (phi(V x) - phi(V h)), phi the integral of SiLU, by
    quadrature between the two (R, N)."""
    nodes, weights = np.polynomial.legendre.leggauss(32)
    gamma, start, end = h @ w['W'].mT, h @ w['V'].mT, x @ w['V'].mT
    integral = sum(float(weight) / 2 * F.silu(start + (float(node) + 1) / 2 * (end - start))
                   for node, weight in zip(nodes, weights, strict=True)) * (end - start)
    return -(gamma * integral).sum(-1)


def eigenvalues(w: dict[str, Tensor], h: Tensor, x: Tensor) -> Tensor:
    """Of V^T diag(gamma * silu'(V x)) V at each point, ascending (R, N, D)."""
    slope = vmap(grad(F.silu))((x @ w['V'].mT).flatten()).view(*x.shape[:2], -1)
    curved = (h @ w['W'].mT) * slope  # (R, N, D_v)
    V = w['V'][:, None]  # (R, 1, D_v, D)
    return torch.linalg.eigvalsh(V.mT @ (curved[..., None] * V))


@torch.no_grad()
def step_by_step(o: gp.Options, w: dict[str, Tensor], T: int, data: gp.Data) -> list[list[str]]:
    """A line for each t up to 2 T, at least 4, or until |x_t|^2 overflows; see HEADER."""
    h = hidden(w, data.x_test[:, :LOOKED_AT])
    lines, before = [], h
    for t in range(max(2 * T, 4) + 1):
        x = gp.recursion(w, h, t)
        if not x.square().sum(dim=-1).isfinite().all():
            break
        train, test = (fmean(gp.rmse(o, w, *part, t)) for part in (data[:2], data[2:]))
        moved = ((x - before).norm(dim=-1) / h.norm(dim=-1)).mean()
        values = eigenvalues(w, h, x)
        energy = energy_change(w, h, x).mean()
        lines.append([f'{train:.4f}', f'{test:.4f}', f'{energy:.3f}', f'{moved:.3f}',
                      f'{values[..., -1].mean():.2f}', f'{values[..., 0].mean():.2f}'])
        before = x
    return lines


def main() -> None:
    o = gp.options(sys.argv[1:])
    if o.precond != 'none' or o.norm or o.residual != 'normed':
        fail('precond, norm and residual change what a step is: leave them at none, False, normed')
    torch.set_num_threads(1)
    lines, diverged = [HEADER], []
    try:
        os.makedirs(o.out_dir, exist_ok=True)
        for k in o.kernels:
            data = gp.draw(o, k, range(o.repeats))
            for model in (m for m in o.models if m.startswith('CEM')):
                w, errors = gp.fit(o, model, data, range(o.repeats))
                if not math.isfinite(sum(errors['train'])):
                    diverged.append(f'{TITLES[k]} {model}')
                    continue
                T = trained_steps(model)
                for t, line in enumerate(step_by_step(o, w, T, data)):
                    lines.append([TITLES[k], str(T), str(t), *line])
                    print(*lines[-1], sep='\t', flush=True)
        write_whole(f'{o.out_dir}/steps.md', (markdown(lines) + '\n').encode())
    except OSError as error:
        fail(f'{error.filename}: {error.strerror}')
    print(f'Written to {o.out_dir}: steps.md')
    if diverged:
        fail(f'{", ".join(diverged)} diverged: a learning_rate below {o.learning_rate} would be '
             'right')


if __name__ == '__main__':
    main()

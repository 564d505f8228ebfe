"""phi of the element-wise energy (Eq. 7), in closed form; and energies along the steps."""
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import spence
from torch import Tensor


class Phi(torch.autograd.Function):
    """phi(z) = z softplus(z) + Li2(-e^z), elementwise: the integral of SiLU from -inf to z."""
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        a = z.detach().double().cpu().numpy()
        dilog = spence(1 + np.exp(-abs(a)))  # Li2(-e^a); where a > 0 by its inversion: no overflow
        dilog = np.where(a > 0, -math.pi ** 2 / 6 - a ** 2 / 2 - dilog, dilog)
        return torch.as_tensor(a * np.logaddexp(0, a) + dilog).to(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * F.silu(ctx.saved_tensors[0])


@torch.no_grad()
def energies_along(sublayer: Any, x0: Tensor, *rest: Any, steps: int) -> Tensor:
    """A CEM sublayer's energy at each u_t of its steps from x0, u_0 to u_steps: (steps + 1, B, J).
    `rest`: what forward takes behind x0."""
    normed = []  # h, u_0 where that is another, u_1, ...
    hook = sublayer.norm.register_forward_hook(lambda norm, given, out: normed.append(out))
    own_steps = sublayer.steps
    sublayer.steps = steps + 1
    try:
        sublayer.forward(x0, *rest)
    finally:
        hook.remove()
        sublayer.steps = own_steps
    return torch.stack([sublayer.energy(u, normed[0]) for u in normed[-steps - 1:]])

"""
Muon for the matrices of the blocks, AdamW for all else.

Muon (Jordan et al., 2024) takes the momentum of a matrix's gradient to the nearest orthogonal
matrix, near enough by five Newton-Schulz steps, so that all its directions move alike. Its update
has the RMS of AdamW's (Liu et al., arXiv 2502.16982): one learning rate serves both.

As torch.optim.Muon (match_rms_adamw), which takes one matrix at a time and always multiplies in
bfloat16; here matrices of one shape go as one batch (on a CPU small ones), in the run's precision.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MATRICES = ('W_Q', 'W_K', 'W_V', 'W_O', 'W', 'V', 'W_d')  # of attention and MLP; not P's U, V
AT_ONCE = 2**20  # entries in one batch on a CPU: more of them leave its cache
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # X <- a X + (b A + c A A) X, A = X X^T


def block_matrices(model: Any) -> list[Tensor]:
    """What Muon takes: the matrices of the blocks' sublayers."""
    return [p for name, p in model.blocks.named_parameters()
            if name.split('.')[-1] in MATRICES and '.P.' not in name]


class Muon(torch.optim.Optimizer):
    """M <- momentum M + (1 - momentum) G; W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) O, with O
    the orthogonalised Nesterov momentum of an (m, n) matrix W, found in dtype (default: W's)."""
    def __init__(self, params: list[Tensor], lr: float, weight_decay: float,
                 momentum: float = 0.95, steps: int = 5, dtype: torch.dtype | None = None):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum,
                                      steps=steps))
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group['params']:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                rate = group['lr'] * 0.2 * max(shape) ** 0.5
                torch._foreach_mul_(matrices, 1 - group['lr'] * group['weight_decay'])
                on_cpu = matrices[0].device.type == 'cpu'
                few = max(1, AT_ONCE // shape.numel()) if on_cpu else len(matrices)
                for i in range(0, len(matrices), few):
                    batch = matrices[i:i + few]
                    M = torch.stack([self.nesterov(p, group['momentum']) for p in batch])
                    O = orthogonal(M.to(self.dtype or M.dtype), group['steps']).type_as(M)
                    torch._foreach_add_(batch, list(O.unbind()), alpha=-rate)

    def nesterov(self, p: Tensor, momentum: float) -> Tensor:
        """Takes the gradient into the momentum; returns what lies one step ahead of it."""
        state = self.state[p]
        if not state:
            state['momentum'] = torch.zeros_like(p)
        state['momentum'].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state['momentum'], momentum)


def orthogonal(G: Tensor, steps: int) -> Tensor:
    """Matrices G (n, rows, columns) with all singular values moved near 1 (0.7 to 1.2)."""
    a, b, c = NEWTON_SCHULZ
    X = G.mT if G.shape[-2] > G.shape[-1] else G
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.shape[-2] > G.shape[-1] else X

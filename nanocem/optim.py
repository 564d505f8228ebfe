"""
The optimizers: AdamW, or Muon for the blocks' matrices and AdamW for all other parameters.

Muon (Jordan et al., 2024) replaces a matrix's momentum by the nearest orthogonal matrix, so that
all directions move equally far. Five Newton-Schulz steps approximate it. The update is scaled to
the RMS of AdamW's (Liu et al., arXiv 2502.16982), so both use one learning rate.

torch.optim.Muon (match_rms_adamw) does the same for one matrix at a time and always in bfloat16.
Here all matrices of one shape form a batch, in the run's precision.
"""
from typing import Any

import torch
from torch import Tensor

DIAGONALS = ('kq_diag', 'diag')  # d_k and the diagonal of P: they hold a vector for each head
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c of X <- a X + (b A + c A A) X, A = X X^T


def make_optimizers(model: Any, cfg: Any, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Return AdamW and, with optimizer=muon, Muon for the layers' matrices, with products in dtype.
    Only matrices have weight decay. train.py sets the learning rate of each step."""
    muon_params = block_matrices(model) if cfg.optimizer == 'muon' else []
    decayed = [p for p in matrices(model) if p not in set(muon_params)]
    others = [p for p in model.parameters() if p not in {*muon_params, *decayed}]
    groups = [{'params': decayed, 'weight_decay': cfg.weight_decay},
              {'params': others, 'weight_decay': 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    if not muon_params:
        return [adamw]
    return [adamw, Muon(muon_params, cfg.learning_rate, cfg.weight_decay, dtype=dtype)]


def matrices(module: Any) -> list[Tensor]:
    """Return the parameters that are matrices or stacks of them: no gains, biases or diagonals. A
    matrix with a side of 1 is a vector."""
    return [p for name, p in module.named_parameters()
            if p.ndim > 1 and min(p.shape[-2:]) > 1 and name.split('.')[-1] not in DIAGONALS]


def block_matrices(model: Any) -> list[Tensor]:
    """Return the matrices of attention and MLP. Those of a Preconditioner have three dimensions,
    one of them for the head, and are left out."""
    return [p for p in matrices(model.blocks) if p.ndim == 2]


class Muon(torch.optim.Optimizer):
    """Update an (m, n) matrix W with gradient G:

        M <- momentum M + (1 - momentum) G
        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(m, n)) O

    where O is N = (1 - momentum) G + momentum M, orthogonalized in dtype (default: W's)."""
    def __init__(self, params: list[Tensor], lr: float, weight_decay: float,
                 momentum: float = 0.95, dtype: torch.dtype | None = None):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group['params']:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                rate = group['lr'] * 0.2 * max(shape) ** 0.5
                torch._foreach_mul_(params, 1 - group['lr'] * group['weight_decay'])
                N = torch.stack([self.nesterov(p, group['momentum']) for p in params])
                O = orthogonal(N.to(self.dtype or N.dtype)).type_as(N)
                torch._foreach_add_(params, list(O.unbind()), alpha=-rate)

    def nesterov(self, p: Tensor, momentum: float) -> Tensor:
        """Update the momentum M with the gradient G, and return Nesterov's momentum N."""
        state = self.state[p]
        if not state:
            state['momentum'] = torch.zeros_like(p)
        state['momentum'].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state['momentum'], momentum)


def orthogonal(G: Tensor) -> Tensor:
    """Move the singular values of the matrices G (n, rows, columns) to between 0.68 and 1.21. Those
    below 0.0016 of G's norm stay smaller."""
    a, b, c = NEWTON_SCHULZ
    X = G.mT if G.shape[-2] > G.shape[-1] else G
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.shape[-2] > G.shape[-1] else X

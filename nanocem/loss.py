"""
The loss of training, in parts where there are many logits.

F.linear_cross_entropy of torch 2.13 has parts, too, and in float32 the same speed, but autocast
does not reach it, and a loss that it computes in bfloat16 is rounded to bfloat16.
"""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocem.data import NO_TARGET

# The loss of many logits is computed in parts, which have at most this many logits
LOGITS_AT_ONCE = 2 ** 26  # on a GPU
LOGITS_IN_CACHE = 2 ** 20  # on a CPU: they fit into its cache
ROW_TILE = 128  # a part's rows are a multiple of this: whole tiles of a matrix product


def cross_entropy(x: Tensor, W: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the logits x W^T, for x (B, J, D), W (vocabulary, D) and
    targets (B, J); a target of -100 does not count. ValueError if the shapes differ."""
    if x.shape[:-1] != targets.shape:
        raise ValueError(f'targets {tuple(targets.shape)}: expected a target for each token')
    x, targets = x.flatten(0, 1), targets.flatten()
    on_cpu = x.device.type == 'cpu'
    part_logits = LOGITS_IN_CACHE if on_cpu else LOGITS_AT_ONCE
    # Compute few logits as a whole. On a CPU this is just as fast for up to four parts
    limit = 4 * part_logits if on_cpu else part_logits
    if len(x) * len(W) <= limit:
        logits = F.linear(x, W)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    # Compute more logits in parts, of so many rows of x
    rows = max(ROW_TILE, part_logits // len(W) // ROW_TILE * ROW_TILE)
    return LinearCrossEntropy.apply(x, W, targets, rows, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    """Compute the loss of x (N, D), W (vocabulary, D) and targets (N,), `rows` rows at a time. If
    with_grad, forward computes the gradients, too: no logits are kept, or computed again."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, targets: Tensor, rows: int,
                with_grad: bool) -> Tensor:
        loss, dx = 0, []
        if with_grad:
            dW = torch.zeros_like(W, dtype=torch.promote_types(W.dtype, torch.float32))
        counted = (targets != NO_TARGET)[:, None]  # (N, 1)
        targets = targets[:, None].where(counted, 0)
        x = x.where(counted, 0)  # a token that does not count adds nothing to W's gradient
        parts = zip(x.split(rows), targets.split(rows), counted.split(rows), strict=True)
        for x_part, target, mask in parts:
            logits = F.linear(x_part, W)  # (rows, vocabulary)
            log_p = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
            loss = loss - log_p.gather(-1, target).where(mask, 0).sum()
            if with_grad:
                # The gradient of the logits is p - one-hot. The compiler fuses a comparison with p;
                # uncompiled, changing one element of each row is faster
                if torch.compiler.is_compiling():
                    one_hot = torch.arange(len(W), device=x.device) == target
                    dlogits = log_p.exp() - one_hot.to(log_p.dtype)
                else:
                    one = torch.ones_like(target, dtype=log_p.dtype)
                    dlogits = log_p.exp_().scatter_add_(-1, target, -one)
                dlogits = dlogits.to(logits.dtype)
                dx.append((dlogits @ W).where(mask, 0).to(x.dtype))
                if dlogits.dtype == dW.dtype:
                    dW.addmm_(dlogits.mT, x_part)  # makes no second matrix like dW
                else:  # by autocast
                    dW += dlogits.mT @ x_part
        n = counted.sum()
        if with_grad:
            ctx.save_for_backward(torch.cat(dx), dW.to(W.dtype), n)
        return loss / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd cannot differentiate the gradients that forward computed: refuse to be wrong
        if torch.is_grad_enabled():
            raise RuntimeError('no second derivative of a loss in parts: without plug_in a model '
                               'has it, by the lines of model.py')
        dx, dW, n = ctx.saved_tensors
        grad = grad / n.clamp(min=1)
        return grad * dx, grad * dW, None, None, None

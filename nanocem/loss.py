"""The loss, and FLOPs of a model and of a GPU."""
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2 ** 26  # on a GPU: with more logits than this, the loss is computed in parts
ROW_TILE = 128  # there a part has a multiple of this many rows, which fills its matrix products
LOGITS_IN_CACHE = 2 ** 20  # on a CPU: the logits of a part, which fit into the processor's cache
NO_TARGET = -100  # the loss ignores tokens with this target, as F.cross_entropy does


# The loss

def cross_entropy(x: Tensor, W: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the logits x W^T, for x (B, J, D), W (vocabulary, D) and
    targets (B, J); a target of -100 does not count. ValueError if the shapes differ."""
    if x.shape[:-1] != targets.shape:
        raise ValueError(f'targets {tuple(targets.shape)}: expected a target for each token')
    x, targets = x.flatten(0, 1), targets.flatten()
    on_cpu = x.device.type == 'cpu'
    at_once = LOGITS_IN_CACHE if on_cpu else LOGITS_AT_ONCE
    limit = 4 * at_once if on_cpu else at_once  # up to this many, one piece is just as fast
    if len(x) * len(W) <= limit:
        logits = F.linear(x, W)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    rows = max(1, at_once // len(W))
    if not on_cpu and rows > ROW_TILE:
        rows -= rows % ROW_TILE
    return LinearCrossEntropy.apply(x, W, targets, rows, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    """Compute the loss `rows` rows at a time. With `with_grad` the forward pass computes the
    gradients as well, so that logits are neither kept nor computed again."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, targets: Tensor, rows: int,
                with_grad: bool) -> Tensor:
        loss, dx = 0, []
        if with_grad:
            dW = torch.zeros_like(W, dtype=torch.promote_types(W.dtype, torch.float32))
        counts = (targets != NO_TARGET)[:, None]
        targets = targets[:, None].where(counts, 0)
        x = x.where(counts, 0)  # so that the logits of a token that does not count are finite
        parts = zip(x.split(rows), targets.split(rows), counts.split(rows), strict=True)
        for x_n, target, count in parts:
            logits = F.linear(x_n, W)
            log_p = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
            loss = loss - log_p.gather(-1, target).where(count, 0).sum()
            if with_grad:
                # The gradient of the logits is p - one-hot. The compiler fuses a comparison with p;
                # uncompiled, changing one element of each row is faster
                if torch.compiler.is_compiling():
                    one_hot = torch.arange(len(W), device=x.device) == target
                    d = log_p.exp() - one_hot.to(log_p.dtype)
                else:
                    one = torch.ones_like(target, dtype=log_p.dtype)
                    d = log_p.exp_().scatter_add_(-1, target, -one)
                d = d.to(logits.dtype)
                dx.append((d @ W).where(count, 0).to(x.dtype))
                dW += d.mT @ x_n
        n = counts.sum()
        if with_grad:
            ctx.save_for_backward(torch.cat(dx), dW.to(W.dtype), n)
        return loss / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A second derivative would be wrong, and once_differentiable does not stop all of them.
        if torch.is_grad_enabled():
            raise RuntimeError('no second derivative of a loss of so many logits: set '
                               'loss.LOGITS_AT_ONCE, or on a CPU LOGITS_IN_CACHE, higher')
        dx, dW, n = ctx.saved_tensors
        grad = grad / n.clamp(min=1)
        return grad * dx, grad * dW, None, None, None


# FLOPs of a model and of a GPU

# FLOPs a second in dense bfloat16, by data sheet, for the first key found in the GPU's name
DENSE_BF16 = {'A100': 312e12, 'H100 PCIe': 756e12, 'NVL': 835e12, 'H100': 989e12, 'H200': 989e12,
              'B200': 2250e12}

def flops_per_token(model: Any) -> float:
    """Count the FLOPs of training, per token at full context. A multiply-add is 2, and a backward
    pass counts as two forward passes. Each step counts projections, scores, weighted values and the
    diagonal's scores; the head counts once. The masked half of attention does not count."""
    cfg, D = model.cfg, model.cfg.d_model
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp  # all blocks are alike
    mean_context = (cfg.context_length + 1) / 2  # average number of positions attended to
    if cfg.attn == 'cem':
        diagonals = {'none': 0, 'shared': 1, 'per_head': cfg.n_head}[cfg.kq_diag]
        step = 2 * D * D + (2 + diagonals) * mean_context * D
        if cfg.exact_update:
            rank = cfg.attn_rank if cfg.preconditioner == 'diag_lowrank' else 0
            step += cfg.n_head * (mean_context * D + 4 * rank * D)
        attn_macs = D * D + attn.T * step
    else:
        projections = 3 if cfg.tie in ('kv', 'both') else 4
        attn_macs = projections * D * D + 2 * mean_context * D
    mlp_macs = mlp.W.numel() * (1 + 2 * mlp.T if cfg.mlp == 'cem' else 3)
    layer = cfg.attn_reuse * attn_macs + cfg.mlp_reuse * mlp_macs
    macs = cfg.loops * cfg.n_layer * layer + cfg.vocab_size * D
    return 3 * 2.0 * macs


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return a GPU's FLOPs a second by its data sheet, dense bfloat16; NaN if that is unknown."""
    if device.type == 'cuda' and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, flops in DENSE_BF16.items():
            if known in name:
                return flops
    return math.nan

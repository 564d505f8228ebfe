"""
The loss, phi, the precision and compiler of a run, and FLOPs: what a model needs beside its layers.
"""
import contextlib
import ctypes
import math
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import spence
from torch import Tensor

WORTH_COMPILING = 2e12  # FLOPs; a shorter run, a minute on a CPU, ends before compiling pays
LOGITS_AT_ONCE = 2 ** 26  # with more logits than this, the loss is computed a few rows at a time
NO_TARGET = -100  # a target that does not count, as in F.cross_entropy


# Precision, and torch.compile

def precision_and_compiler(device: torch.device, dtype: str, compiled: bool | None, flops: float,
                           ) -> tuple[torch.dtype, bool]:
    """What train.py's dtype and compile mean for a run of so many FLOPs. On a CPU bfloat16 pays
    where it is multiplied in hardware (AMX) and what lies between the products is compiled.
    ValueError where compile=True cannot be."""
    on_gpu, on_cpu = device.type == 'cuda', device.type == 'cpu'
    if compiled is None:
        compiled = (on_gpu or (on_cpu and flops > WORTH_COMPILING)) and compiles(device)
    elif compiled and not compiles(device):
        raise ValueError(f'compile=True: torch.compile does not work here on {device.type}; does '
                         'it find a C++ compiler?')
    if dtype == 'auto':
        bf16 = ((on_gpu and torch.cuda.is_bf16_supported(including_emulation=False))
                or (on_cpu and compiled and torch.cpu._is_amx_tile_supported()))
        dtype = 'bfloat16' if bf16 else 'float32'
    return getattr(torch, dtype), compiled


@cache
def compiles(device: torch.device) -> bool:
    """Whether torch.compile works there, which asks for a C++ compiler."""
    try:
        torch.compile(torch.relu)(torch.ones(64, device=device))
    except Exception:  # of many kinds: nothing depends on which
        return False
    return True


def compile_for(device: torch.device, model: Any) -> Any:
    """The compiled model: on a GPU all of it; elsewhere its blocks, alike, by one graph for all."""
    if device.type == 'cuda':
        return torch.compile(model, dynamic=False)
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


def keep_freed_memory() -> None:
    """On a CPU: tensors take the memory of those before them. glibc would give it back to Linux,
    which clears each page that it hands out again; other C libraries are left as they are."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of malloc.h
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**25)  # bytes, the most that glibc takes
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 2**28)


def eager() -> Any:
    """A context in which compiled models run as if they were not: for shapes seen once."""
    return torch.compiler.set_stance('force_eager')


# The loss, and phi

def cross_entropy(x: Tensor, W: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the logits x W^T: x (B, J, D), W (vocabulary, D), targets (B, J), of
    which those of -100 do not count. ValueError where the shapes differ."""
    if x.shape[:-1] != targets.shape:
        raise ValueError(f'targets {tuple(targets.shape)}: expected a target for each token')
    x, targets = x.flatten(0, 1), targets.flatten()
    if len(x) * len(W) <= LOGITS_AT_ONCE:
        logits = F.linear(x, W)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    return LinearCrossEntropy.apply(x, W, targets, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    """A few rows at a time. With `learn`, gradients are made where the logits are at hand."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, targets: Tensor, learn: bool) -> Tensor:
        loss, dx, dW = 0, [], torch.zeros_like(W) if learn else None
        rows = max(1, LOGITS_AT_ONCE // len(W))
        counts = (targets != NO_TARGET)[:, None]
        targets = targets[:, None].where(counts, 0)
        parts = zip(x.split(rows), targets.split(rows), counts.split(rows), strict=True)
        for x_n, target, count in parts:
            logits = F.linear(x_n, W)
            log_p = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
            loss = loss - (log_p.gather(-1, target) * count).sum()
            if learn:
                one = torch.ones_like(log_p[:, :1])
                d = log_p.exp_().scatter_add_(-1, target, -one).to(logits.dtype)  # p - one-hot
                dx.append((d @ W).to(x.dtype) * count)
                dW += d.mT @ (x_n * count)
        n = counts.sum()
        if learn:
            ctx.save_for_backward(torch.cat(dx), dW, n)
        return loss / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dW, n = ctx.saved_tensors
        grad = grad / n
        return grad * dx, grad * dW, None, None


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


# FLOPs: a model's, a machine's

DENSE_BF16 = {'A100': 312e12, 'H100 PCIe': 756e12, 'NVL': 835e12, 'H100': 989e12, 'H200': 989e12,
              'B200': 2250e12}  # a second; the first that the GPU's name has


def flops_per_token(model: Any, training: bool = True) -> float:
    """FLOPs of a token at full context: 2 a multiply-add of every product with tokens in it
    (projections, scores, weighted values, the diagonal's scores, the head), T steps of them, half
    of attention masked away; a backward pass counts as two forward ones. No elementwise work."""
    cfg, D = model.cfg, model.cfg.d_model
    mean_context = (cfg.context_length + 1) / 2  # positions attended to, on average
    macs = cfg.vocab_size * D
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        if attn.cem:
            diagonals = 0 if attn.kq_diag is None else len(attn.kq_diag)
            step = 2 * D * D + (2 + diagonals) * mean_context * D
            if cfg.exact_update:
                rank = cfg.attn_rank if cfg.preconditioner == 'diag_lowrank' else 0
                step += cfg.n_head * (mean_context * D + 4 * rank * D)
            macs += cfg.attn_reuse * (D * D + attn.T * step)
        else:
            macs += cfg.attn_reuse * (4 * D * D + 2 * mean_context * D)
        if mlp.cem:
            macs += cfg.mlp_reuse * mlp.W.numel() * (1 + 2 * mlp.T)
        else:
            macs += cfg.mlp_reuse * mlp.W.numel() * 3
    return 2.0 * macs * (3 if training else 1)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second that a GPU can do by its data sheet, dense bf16; NaN where that is unknown."""
    if device.type == 'cuda' and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, flops in DENSE_BF16.items():
            if known in name:
                return flops
    return math.nan

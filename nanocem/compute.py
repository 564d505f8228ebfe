"""The loss, phi, precision, compiler and memory, and FLOPs: what is computed beside the layers."""
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
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from configurator import fail

WORTH_COMPILING = 2e12  # FLOPs; a shorter run, a minute on a CPU, ends before compiling pays
LOGITS_AT_ONCE = 2 ** 26  # with more logits than this, the loss is computed a few rows at a time
NO_TARGET = -100  # a target that does not count, as in F.cross_entropy


# Precision, compiler and memory

def precision_and_compiler(device: torch.device, dtype: str, compiled: bool | None, flops: float,
                           ) -> tuple[torch.dtype, bool, str]:
    """Resolve train.py's dtype and compile for a run of so many FLOPs. Returns the dtype of matrix
    products, whether to compile, and why not if that would pay. UserError if compile=True fails."""
    on_gpu, on_cpu = device.type == 'cuda', device.type == 'cpu'
    wanted = compiled or (compiled is None and (on_gpu or (on_cpu and flops > WORTH_COMPILING)))
    reason = compiler_error(device) if wanted else ''
    if compiled and reason:
        fail(f'compile=True: torch.compile does not work on {device.type}: {reason}')
    compiled = wanted and not reason
    if dtype == 'auto':
        # On a CPU bfloat16 pays with AMX, and if the operations between products are compiled.
        bf16 = ((on_gpu and torch.cuda.is_bf16_supported(including_emulation=False))
                or (on_cpu and compiled and torch.cpu._is_amx_tile_supported()))
        dtype = 'bfloat16' if bf16 else 'float32'
    return getattr(torch, dtype), compiled, reason


@cache
def compiler_error(device: torch.device) -> str:
    """Why torch.compile does not work on this device, such as a missing C++ compiler; else ''."""
    try:
        torch.compile(torch.relu)(torch.ones(64, device=device))
    except Exception as error:  # of many types, by the compiler's stage
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0]
    return ''


def compile_for(device: torch.device, model: Any, attention: str) -> Any:
    """Compile the model: on a GPU as one graph; elsewhere block by block, which are alike, so that
    one graph serves all. `attention` is fast.attention_path's answer."""
    if device.type == 'cuda':
        biased = model.cfg.positions == 'alibi' or model.cfg.kq_diag != 'none'
        # With torch's attention the compiler would keep the bias (B, K, J, J) of every step for the
        # backward pass, 30 GB at 134m. Both settings together make it compute the bias again.
        keep_bias = not (biased and attention.startswith('sdpa'))
        torch._functorch.config.ban_recompute_materialized_backward = keep_bias
        torch._functorch.config.ban_recompute_used_far_apart = keep_bias
        return torch.compile(model, dynamic=False)
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


def activation_bytes(model: Any, batch_size: int, device: torch.device, dtype: torch.dtype) -> int:
    """Count what autograd keeps of a batch for the backward pass if the model is not compiled. Fake
    tensors have no numbers, so this takes a second and no memory. Call fast.attention_path first:
    it tries the kernels, which needs real tensors."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x
    with (FakeTensorMode(), torch.device(device), saved_tensors_hooks(pack, lambda x: x),
          torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)):
        fake = type(model)(model.cfg)
        fake.set_attn_impl(model.blocks[0].attn.impl)
        fake.activation_checkpointing = model.activation_checkpointing
        ids = torch.zeros(batch_size, model.cfg.context_length, dtype=torch.long)
        fake(ids, ids)
    parameters = {p.untyped_storage()._cdata for p in fake.parameters()}
    return sum(x.nbytes() for name, x in kept.items() if name not in parameters)


def memory_warning(model: Any, batch_size: int, device: torch.device, dtype: torch.dtype,
                   ) -> list[str]:
    """Return a line that says, before the first step, that a micro-batch will not fit on this GPU
    if the model is not compiled; no line if it will."""
    room = torch.cuda.get_device_properties(device).total_memory
    weights = 16 * model.num_params()  # with gradients and AdamW's two moments, in float32
    needed = weights + activation_bytes(model, batch_size, device, dtype)
    if needed < room:
        return []
    return [f'without torch.compile a micro-batch of {batch_size} needs some {needed / 1e9:.0f} GB '
            f'and the GPU has {room / 1e9:.0f}: install a C compiler, give a smaller '
            'micro_batch_size, or set --activation_checkpointing']


def keep_freed_memory() -> None:
    """Let new tensors on a CPU reuse the memory of freed ones. glibc would return it to Linux,
    which clears every page that it hands out again. Other C libraries are left as they are."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # numbers of malloc.h
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**25)  # bytes, the largest that glibc accepts
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 2**28)


def eager() -> Any:
    """A context in which a compiled model runs uncompiled, for a batch shape that occurs once."""
    return torch.compiler.set_stance('force_eager')


# The loss, and phi

def cross_entropy(x: Tensor, W: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the logits x W^T: x (B, J, D), W (vocabulary, D), targets
    (B, J), where -100 does not count. ValueError if the shapes differ."""
    if x.shape[:-1] != targets.shape:
        raise ValueError(f'targets {tuple(targets.shape)}: expected a target for each token')
    x, targets = x.flatten(0, 1), targets.flatten()
    if len(x) * len(W) <= LOGITS_AT_ONCE:
        logits = F.linear(x, W)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    return LinearCrossEntropy.apply(x, W, targets, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    """Compute the loss a few rows at a time and, with `learn`, the gradients beside it, so that the
    logits are neither kept nor computed again. A second derivative through it is an error."""
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
                # The gradient of the logits is p - one-hot. A comparison instead of scatter_add_
                # lets the compiler make it in the same loop as p.
                one_hot = torch.arange(len(W), device=x.device) == target
                d = ((log_p.exp() - one_hot.to(log_p.dtype)) * count).to(logits.dtype)
                dx.append((d @ W).to(x.dtype))
                dW += d.mT @ x_n
        n = counts.sum()
        if learn:
            ctx.save_for_backward(torch.cat(dx), dW, n)
        return loss / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable would let a Hessian-vector product of the model pass, and be wrong
        if torch.is_grad_enabled():
            raise RuntimeError('no second derivative of the loss above compute.LOGITS_AT_ONCE '
                               'logits: set it higher')
        dx, dW, n = ctx.saved_tensors
        grad = grad / n
        return grad * dx, grad * dW, None, None


class Phi(torch.autograd.Function):
    """phi(z) = z softplus(z) + Li2(-e^z), elementwise: the integral of SiLU from -inf to z."""
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        a = z.detach().cpu().double().numpy()
        dilog = spence(1 + np.exp(-abs(a)))  # Li2(-e^a); where a > 0 by its inversion: no overflow
        dilog = np.where(a > 0, -math.pi ** 2 / 6 - a ** 2 / 2 - dilog, dilog)
        return torch.as_tensor(a * np.logaddexp(0, a) + dilog).to(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * F.silu(ctx.saved_tensors[0])


# FLOPs of a model and of a GPU

# FLOPs a second by the data sheets, dense bfloat16; the first key that occurs in the GPU's name
DENSE_BF16 = {'A100': 312e12, 'H100 PCIe': 756e12, 'NVL': 835e12, 'H100': 989e12, 'H200': 989e12,
              'B200': 2250e12}
# The share of them that training is expected to reach on an A100: an estimate from the kernels'
# work and the memory's traffic at 134m, for Llama and for all-CEM with T = 2 (docs/speed.md)
MFU_ESTIMATE = {'llama': 0.37, 'cem': 0.29}


def flops_per_token(model: Any, training: bool = True) -> float:
    """Count the FLOPs of a token at full context: 2 for a multiply-add, of every matrix product
    with tokens in it (projections, scores, weighted values, the diagonal's scores, the head), in
    every step. Half of attention is masked; a backward pass counts as two forward passes."""
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
    """Return a GPU's FLOPs a second by its data sheet, dense bfloat16; NaN if that is unknown."""
    if device.type == 'cuda' and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, flops in DENSE_BF16.items():
            if known in name:
                return flops
    return math.nan

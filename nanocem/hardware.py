"""The device: find it, know its peak speed, count the FLOPs of training, compile a model for it."""
import ctypes
import math
import platform
import re
import sys
from typing import Any

import torch
import torch._functorch.config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from configurator import check

# FLOPs per second in dense bfloat16, from data sheets, by words of the GPU's name: the first counts
DENSE_BF16 = {'A100': 312e12, 'H100 PCIe': 756e12, 'NVL': 835e12, 'H100': 989e12, 'H200': 989e12,
              'B200': 2250e12}


def find_device(kind: str) -> torch.device:
    """Return the device that auto, cpu, cuda or mps names. auto is cuda if there is a GPU, or else
    cpu. UserError if this machine has no such device."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if kind == 'auto':
        if mps:
            print('Found an Apple GPU: --device=mps uses it, which nobody has tried', flush=True)
        kind = 'cuda' if cuda else 'cpu'
    check({'cpu': True, 'cuda': cuda, 'mps': mps}[kind],
          f'device={kind}: torch finds no GPU of this kind on this machine; set device=cpu')
    return torch.device(kind)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return a GPU's peak FLOPs per second in dense bfloat16; NaN if it is unknown, as that of a
    part of a GPU is."""
    if device.type == 'cuda' and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        if re.search(r'\bMIG\b|\bGRID\b|-\d+[ABCQ]$', name):  # a slice, or a virtual GPU
            return math.nan
        for known, flops in DENSE_BF16.items():
            if re.search(rf'\b{known}\b', name):  # an RTX A1000 is no A100
                return flops
    return math.nan


def flops_per_token(model: Any) -> float:
    """Count the FLOPs of training per token, at full context. A multiply-add counts as two, and a
    backward pass as two forward passes. Keys after a query do not count, though some are computed.
    NaN for a model.py of one's own that does not run on torch's meta device."""
    try:
        # For a forward pass of n tokens torch counts a n + b n^2 + c FLOPs: b n^2 is attention's
        # part, and c is for folding P into the weights
        two, three, four = (count_products(model, n) for n in (2, 3, 4))
    except Exception:  # of any kind
        return math.nan
    b = (four - 2 * three + two) / 2
    a = three - two - 5 * b
    mean_context = (model.cfg.context_length + 1) / 2  # average number of keys up to the query
    return 3 * (a + b * mean_context)


def count_products(model: Any, n: int) -> int:
    """Return the FLOPs of the matrix products of a forward pass of n tokens, without computing."""
    with (torch.device('meta'), torch.enable_grad(), FlopCounterMode(display=False) as counter,
          sdpa_kernel(SDPBackend.MATH)):  # the products in a fused attention are not counted
        type(model)(model.cfg).eval()(torch.zeros(1, n, dtype=torch.long))
    return counter.get_total_flops()


def compile_for(device: torch.device, model: Any, by_kernels: bool) -> Any:
    """Compile the model: on a GPU as one graph, elsewhere block by block. Blocks are alike, so one
    compilation serves all. `by_kernels` says whether it attends by triton_attention.py."""
    # Let a later run reuse the traced graph, though it holds the loss's own backward pass
    set_switch(torch._functorch.config, 'autograd_cache_allow_custom_autograd_functions', True)
    if device.type == 'cuda':
        # Make RoPE's table on the GPU now: in the graph each kernel would compute cos and sin
        model.positions(torch.empty(1, model.cfg.context_length, 0, device=model.head.device))
        # With torch's attention the compiler would keep the bias (B, K, J, J) of every step for the
        # backward pass, 30 GB at 134m. False for both settings makes it compute the bias again
        keep_bias = (by_kernels or not model.cfg.has_bias()
                     or getattr(model.blocks[0].attn, 'adds_diagonal', False))
        set_switch(torch._functorch.config, 'ban_recompute_materialized_backward', keep_bias)
        set_switch(torch._functorch.config, 'ban_recompute_used_far_apart', keep_bias)
        # By default DDP cuts the graph, at 134m into 17, to sum gradients during the backward pass.
        # This saves milliseconds a step, but costs memory: nothing is recomputed across a cut
        set_switch(torch._dynamo.config, 'optimize_ddp', False)
        return torch.compile(model, dynamic=False)
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


def set_switch(config: Any, name: str, value: bool) -> None:
    """Set a switch of torch's compiler, if this version of torch has it. These switches are
    private, and affect only speed and memory."""
    if hasattr(config, name):
        setattr(config, name, value)


def keep_freed_memory() -> None:
    """Let new tensors on a CPU reuse the memory of freed ones. glibc would return it to Linux,
    which clears every page that it hands out again. Other C libraries are left as they are."""
    if sys.platform == 'linux' and platform.libc_ver()[0] == 'glibc':
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # numbers of malloc.h
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**25)  # bytes, the largest that glibc accepts
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 2**28)

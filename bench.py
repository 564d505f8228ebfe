"""
Measure how fast Llama and CEM train, and the memory and FLOPs that they need.

    python bench.py                     mini on a CPU; 134m on a GPU, compiled, in bfloat16
    python bench.py --compile=True      compiled on a CPU, too
    python bench.py --size=162m --batch_size=4

A row is printed as soon as it is measured. A step is a forward pass, a backward pass and an update
by AdamW; tokens/s is from the median time of a step. Each step follows one of Llama's, so that
other work on the machine slows both alike, and `/ Llama` is the median ratio of their speeds.
Llama's own ratio tells how much the machine's speed varies. MFU (model FLOPs utilization) is the
share of the GPU's peak in use, and GB the peak memory.
"""
import gc
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import build, command_line, in_range, read_options, set_if_none
from model import SIZES, ModelConfig, Transformer
from nanocem.hardware import (
    compile_for,
    find_device,
    flops_per_token,
    keep_freed_memory,
    peak_flops,
)
from nanocem.hub import LLAMA_SIZES, fixed_in_llama
from nanocem.triton_attention import use_kernels

# The config files of each model. The defaults are all-CEM, one step
ONE_TIE = 'CEM, one tie'
MODELS = {'Llama': ['config/llama.py'], 'CEM, T = 1': [], 'CEM, T = 2': ['config/cem_t2.py'],
          'Llama, additions': ['config/llama_three.py'], ONE_TIE: ['config/cem_one_tie.py']}
HF_LLAMA = 'Hugging Face Llama'
if importlib.util.find_spec('transformers'):
    MODELS[HF_LLAMA] = []  # transformers' own class: no config file
# The table's columns, and the format of their values
COLUMNS = {'model': '', 'parameters': ',', 'tokens/s': ',.0f', '/ Llama': '.2f',
           'MFLOP/token': ',.1f', 'MFU': '.1%', 'GB': '.1f'}


@dataclass
class BenchConfig:
    """What to measure, and how often."""
    size: Literal[tuple(SIZES)] | None = None  # default: 134m on a GPU, else mini
    vocab_size: int | None = None  # default: 257 for nano and mini, else 32,000
    context_length: int | None = None  # tokens of a sequence; default: 2048 on a GPU, else 128
    batch_size: int | None = None  # sequences per step; default: 8 on a GPU, else 32
    repeats: int = 10  # measured steps of each model
    device: Literal['cpu', 'cuda'] | None = None  # default: cuda if there is a GPU
    dtype: Literal['float32', 'bfloat16'] | None = None  # default: bfloat16 on a GPU
    compile: bool | None = None  # use torch.compile; default: on a GPU

    def __post_init__(self) -> None:
        in_range(self, 1, 1_000_000, 'vocab_size context_length batch_size repeats')
        set_if_none(self, device='cuda' if torch.cuda.is_available() else 'cpu')
        if find_device(self.device).type == 'cuda':
            set_if_none(self, size='134m', context_length=2048, batch_size=8, dtype='bfloat16',
                        compile=True)
        set_if_none(self, size='mini', context_length=128, batch_size=32, dtype='float32',
                    compile=False)
        set_if_none(self, vocab_size=257 if self.size in ('nano', 'mini') else 32_000)


def make_model(cfg: BenchConfig, name: str) -> torch.nn.Module:
    """Make a model by its name in the table."""
    if name != HF_LLAMA:
        options = read_options(MODELS[name], ModelConfig)
        sizes = dict(size=cfg.size, vocab_size=cfg.vocab_size, context_length=cfg.context_length)
        if name == ONE_TIE:  # the weights that the tie saves go into the MLP
            sizes['d_mlp'] = 3 * SIZES[cfg.size]['d_model']
        return Transformer(ModelConfig(**options, **sizes)).to(cfg.device)
    from transformers import LlamaConfig, LlamaForCausalLM
    size = SIZES[cfg.size] | dict(vocab_size=cfg.vocab_size, context_length=cfg.context_length)
    config = LlamaConfig(
        **{theirs: size[ours] for ours, theirs in LLAMA_SIZES.items()},
        **fixed_in_llama(size['d_model'], size['n_head']),
        use_cache=False, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM._from_config(config, attn_implementation='sdpa').to(cfg.device)


def make_step(cfg: BenchConfig, model: torch.nn.Module) -> Callable[[], float]:
    """Return a function that trains the model for a step on random tokens and returns its time in
    seconds."""
    ours = isinstance(model, Transformer)
    x = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.context_length), device=cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = model
    if ours:  # as train.py does
        by_kernels = cfg.device == 'cuda' and use_kernels(model, getattr(torch, cfg.dtype))
        forward = compile_for(x.device, model, by_kernels) if cfg.compile else model
    elif cfg.compile:
        forward = torch.compile(model, dynamic=False)

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == 'bfloat16'):
            loss = forward(x, x)[1] if ours else forward(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cfg.device == 'cuda':
            torch.cuda.synchronize()
        return time.perf_counter() - start
    return step


def measure(cfg: BenchConfig) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, with the values of COLUMNS that are known."""
    on_gpu = cfg.device == 'cuda'
    llama_flops = llama_step = None
    for name in MODELS:
        # Make the model, and take a first step, which compiles and makes AdamW's state
        gc.collect()  # free the memory of the previous model
        memory_before = torch.cuda.memory_allocated() if on_gpu else 0
        model = make_model(cfg, name)
        step = make_step(cfg, model)
        step()
        row = {'model': name, 'parameters': sum(p.numel() for p in model.parameters())}
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            step()
            row['GB'] = (torch.cuda.max_memory_allocated() - memory_before) / 1e9
        # Time the model's steps, each after one of Llama's, which is the first model. An untimed
        # step before each timed one brings the model into the caches
        llama_step = llama_step or step
        seconds, ratios = [], []
        for _ in range(cfg.repeats):
            llama_step()
            llama_seconds = llama_step()
            step()
            seconds.append(step())
            ratios.append(llama_seconds / seconds[-1])
        row['tokens/s'] = cfg.batch_size * cfg.context_length / statistics.median(seconds)
        row['/ Llama'] = statistics.median(ratios)
        # Count FLOPs. Hugging Face's Llama needs as many as ours
        flops = llama_flops if name == HF_LLAMA else flops_per_token(model)
        llama_flops = llama_flops or flops
        row['MFLOP/token'] = flops / 1e6
        peak = peak_flops(torch.device(cfg.device), getattr(torch, cfg.dtype))
        if not math.isnan(peak):
            row['MFU'] = flops * row['tokens/s'] / peak
        del model, step
        yield row


def print_row(name: str, *cells: str) -> None:
    print(f'| {name:<18} | ' + ' | '.join(f'{cell:>11}' for cell in cells) + ' |', flush=True)


@command_line
def main(argv: list[str]) -> None:
    cfg = build(BenchConfig, read_options(argv, BenchConfig))
    # Set up torch as train.py does
    keep_freed_memory()
    torch._dynamo.config.recompile_limit = 64  # every model compiles the same code anew
    machine = f'CPU ({torch.backends.cpu.get_cpu_capability()}), threads: {torch.get_num_threads()}'
    if cfg.device == 'cuda':
        torch.set_float32_matmul_precision('high')
        machine = torch.cuda.get_device_name()
    # Print what is measured, and a row of the table for each model
    print(f'{cfg.size}, {cfg.batch_size} x {cfg.context_length} tokens, vocabulary '
          f'{cfg.vocab_size:,}; {machine}; torch {torch.__version__}, {cfg.dtype}, '
          f'{"compiled" if cfg.compile else "not compiled"}\n', flush=True)
    print_row(*COLUMNS)
    print_row('-' * 18, *['-' * 11] * (len(COLUMNS) - 1))
    for row in measure(cfg):
        print_row(*(format(row[name], spec) if name in row else '-'
                    for name, spec in COLUMNS.items()))


if __name__ == '__main__':
    main(sys.argv[1:])

"""
Speed, memory and FLOPs, beside peers, each ratio measured in one run.

    python bench.py                              training, attention, decoding: on a GPU at 134m, on a CPU at mini
    python bench.py --size=134m --context_length=512 --batch_size=1 --what=train
    python bench.py --what=cost                  cost against T, J and size beside the formula: results/bench/cost_<device>.png

All variants of a table take turns, `repeats` rounds after a warm-up, and medians are shown: what else the machine does hits
all alike. Peers run where transformers is installed: its Llama, and its GPT-2, nanoGPT's shape, as wide as gives Llama's FLOPs.
"""
import contextlib
import gc
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import build, fail, read_options
from model import SIZES, ModelConfig, Transformer, position_tables, rotate
from nanocem import fast
from nanocem.decode import Cache, generate
from nanocem.files import write_whole

LLAMA = dict(attn='llama', mlp='llama', attn_steps=1, mlp_steps=1)
ROPE = dict(positions='rope', kq_diag='none', score_scale='head')
VARIANTS: dict[str, dict[str, Any]] = {
    'Llama': LLAMA,
    'CEM, T = 1': dict(attn_steps=1, mlp_steps=1, preconditioner='none'),
    'CEM, T = 2, diag_lowrank': {},
    'CEM, T = 2, exact RoPE': ROPE,
}


@dataclass
class BenchConfig:
    """What to measure, and how."""
    what: tuple[Literal['train', 'attention', 'decode', 'cost'], ...] = ('train', 'attention', 'decode')  # tables
    size: Literal['nano', 'micro', 'mini', '86m', '108m', '134m', '162m', '256m'] | None = None  # default: 134m on GPUs, mini
    vocab_size: int | None = None  # default: 32,000, or 257 at mini and below
    context_length: int | None = None  # J of training; default: 2048 on a GPU, else 128
    batch_size: int | None = None  # sequences; default: 8 on a GPU, else 32
    decode_context: int = 1024  # tokens that are there before decoding begins
    decode_tokens: int = 32  # tokens that are timed
    repeats: int = 5  # rounds, of which the median counts
    device: Literal['auto', 'cpu', 'cuda'] = 'auto'  # auto: cuda where there is one
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of the matrix products; auto: bfloat16 on a GPU
    activation_checkpointing: bool = False  # our models recompute every block in the backward pass
    compile: bool | None = None  # torch.compile, ours and peers alike; default: on a GPU
    threads: int | None = None  # CPU threads; default: torch's own choice
    json: str | None = None  # also write all numbers to this file

    def __post_init__(self) -> None:
        for name in ('vocab_size', 'context_length', 'batch_size', 'decode_context', 'decode_tokens', 'repeats', 'threads'):
            if getattr(self, name) is not None and not 1 <= getattr(self, name) <= 1_000_000:
                raise ValueError(f'{name}={getattr(self, name)}: expected 1 to 1,000,000')
        if self.device == 'auto':
            self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        if self.device == 'cuda' and not torch.cuda.is_available():
            raise ValueError('device=cuda: this machine has no GPU that torch can use')
        gpu = self.device == 'cuda'
        self.size = self.size or ('134m' if gpu else 'mini')
        self.vocab_size = self.vocab_size or (32_000 if self.size[0].isdigit() else 257)
        self.context_length = self.context_length or (2048 if gpu else 128)
        self.batch_size = self.batch_size or (8 if gpu else 32)
        self.dtype = self.dtype if self.dtype != 'auto' else 'bfloat16' if gpu else 'float32'
        self.compile = gpu if self.compile is None else self.compile

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == 'bfloat16')

    def model(self, **options: Any) -> Transformer:
        """A model of these options, by default of the benchmark's size, vocabulary and context."""
        torch.manual_seed(0)
        shape = dict(size=self.size, vocab_size=self.vocab_size, context_length=self.context_length)
        model = Transformer(ModelConfig(**{**shape, **options})).to(self.device)
        model.activation_checkpointing = self.activation_checkpointing
        return model


def seconds(run: Callable[[], Any], device: str) -> float:
    """Wall time of one call, the device's work included."""
    if device == 'cuda':
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - start


def turns(runs: dict[Any, Callable[[], Any]], cfg: BenchConfig, warmup: int = 2, settle: bool = True) -> dict[Any, float]:
    """Median seconds of each, all taking turns. To settle is to run twice and time the second: the memory is then its own, and
    not what another left."""
    for run in runs.values():
        for _ in range(warmup):
            run()
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(cfg.repeats):
        for name, run in runs.items():
            if settle:
                run()
            times[name].append(seconds(run, cfg.device))
    return {name: statistics.median(t) for name, t in times.items()}


def peers(cfg: BenchConfig, context_length: int) -> dict[str, torch.nn.Module]:
    """Hugging Face's Llama of the same weights' shape, and GPT-2 (nanoGPT's shape) of the same FLOPs, where installed."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    except ImportError:
        return {}
    s = SIZES[cfg.size]
    llama = LlamaConfig(vocab_size=cfg.vocab_size, hidden_size=s['d_model'], intermediate_size=s['d_mlp'],
                        num_hidden_layers=s['n_layer'], num_attention_heads=s['n_head'], max_position_embeddings=context_length,
                        rms_norm_eps=1e-5, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None)
    gpt = GPT2Config(vocab_size=cfg.vocab_size, n_embd=s['d_model'], n_inner=s['d_mlp'] * 3 // 2, n_layer=s['n_layer'],
                     n_head=s['n_head'], n_positions=context_length, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                     activation_function='gelu', eos_token_id=None, bos_token_id=None)
    found = {}
    for name, cls, config in (('Hugging Face Llama', LlamaForCausalLM, llama), ('GPT, nanoGPT\'s shape', GPT2LMHeadModel, gpt)):
        try:
            found[name] = cls._from_config(config, attn_implementation='sdpa').to(cfg.device)
        except (TypeError, ValueError):  # an older transformers, or a model without sdpa there
            found[name] = cls(config).to(cfg.device)
    return found


def train_table(cfg: BenchConfig) -> list[dict[str, Any]]:
    """A training step (forward, backward, AdamW) of every variant and peer."""
    x = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.context_length), device=cfg.device)
    models: dict[str, torch.nn.Module] = {name: cfg.model(**options) for name, options in VARIANTS.items()}
    llama_flops = models['Llama'].flops_per_token()
    for name, peer in peers(cfg, cfg.context_length).items():
        models[name], peer.config.use_cache = peer, False  # training keeps no keys
    runs, memory = {}, {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        forward = torch.compile(model, dynamic=False) if cfg.compile else model

        def step(forward: Any = forward, optimizer: Any = optimizer, ours: bool = name in VARIANTS) -> None:
            with cfg.autocast():
                loss = forward(x, x)[1] if ours else forward(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        runs[name] = step
        if cfg.device == 'cuda':  # what one step needs beside the others' weights
            step()
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - sum(
                t.numel() * t.element_size() * (3 if t.requires_grad else 1) for t in [*model.parameters(), *model.buffers()])
            step()
            memory[name] = (torch.cuda.max_memory_allocated() - others) / 1e9
    peak, tokens = fast.peak_flops(torch.device(cfg.device), cfg.torch_dtype), x.numel()
    rows, llama = [], None
    for name, took in turns(runs, cfg).items():
        flops = models[name].flops_per_token() if name in VARIANTS else llama_flops
        row = {'model': name, 'parameters': sum(p.numel() for p in models[name].parameters()), 'MFLOP/token': flops / 1e6,
               'tokens/s': tokens / took, 'MFU': flops * tokens / took / peak, 'GB': memory.get(name)}
        llama = llama or row
        row |= {'speed / Llama': row['tokens/s'] / llama['tokens/s'], 'MFU / Llama': row['MFU'] / llama['MFU']}
        rows.append(row)
    if cfg.device == 'cuda':
        for row in rows[:len(VARIANTS)]:  # the paper's 162m run at this utilisation
            with torch.device('meta'):
                paper = Transformer(ModelConfig(size='162m', **VARIANTS[row['model']]))
                tokens = 20 * Transformer(paper.cfg.llama()).num_params()
            row['A100-hours at 162m'] = tokens * paper.flops_per_token() / (row['MFU'] * 312e12) / 3600
    return rows


def attention_table(cfg: BenchConfig) -> list[dict[str, Any]]:
    """The core of one attention step at this size's heads, forward and backward: plain causal attention, and what adds ALiBi,
    the self and cross biases and the shared diagonal to it; exact RoPE needs none of them."""
    B, J, K, D = cfg.batch_size, cfg.context_length, SIZES[cfg.size]['n_head'], SIZES[cfg.size]['d_model']
    R, scale, on_gpu = D // K, D ** -0.5, cfg.device == 'cuda'
    heads = partial(fast.heads, n_head=K)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=cfg.device, dtype=cfg.torch_dtype, requires_grad=True)
    q, k, v, u, h, b = *(leaf(B, J, D) for _ in range(5)), leaf(K)
    grad, leaves = torch.randn(B, K, J, R, device=cfg.device, dtype=cfg.torch_dtype), (q, k, v, u, h, b)
    pos = position_tables(ModelConfig(size=cfg.size, context_length=J), q)
    slopes = 2.0 ** (-8 / K * torch.arange(1, K + 1, device=cfg.device))
    alibi = (pos.mask - slopes[:, None, None] * pos.distance).to(q.dtype)
    sdpa = F.scaled_dot_product_attention

    def rope() -> Tensor:
        turned = rotate(heads(k), pos)
        return rotate(sdpa(rotate(heads(q), pos), turned, turned, is_causal=True, scale=scale), pos, inverse=True)

    def bias() -> Tensor:  # (B, K, J, J)
        return (u * scale @ h.mT)[:, None] + alibi + torch.where(pos.distance == 0, b[:, None, None], 0)

    runs: dict[str, Callable[[], Tensor]] = {
        'plain causal attention': lambda: sdpa(heads(q), heads(k), heads(v), is_causal=True),
        'exact RoPE: keys are values, rotated back': rope,
        'biased: readable': lambda: (heads(q) * scale @ heads(k).mT + bias()).softmax(dim=-1) @ heads(k),
        'biased: SDPA with the bias formed': lambda: sdpa(heads(q), heads(k), heads(k), bias(), scale=scale),
    }
    if on_gpu:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        block_mask = create_block_mask(lambda n, head, i, j: i >= j, None, None, J, J, device=cfg.device)

        def flex() -> Tensor:
            diagonal = u * scale @ h.mT
            return flex_attention(heads(q), heads(k), heads(k), lambda s, n, head, i, j: s + diagonal[n, i, j]
                                  - slopes[head] * (i - j) + torch.where(i == j, b[head], 0), block_mask, scale)
        runs['biased: FlexAttention'] = flex
    if (fast.runs_triton if on_gpu else fast.runs_rows)(torch.device(cfg.device), cfg.torch_dtype):
        runs['biased: ours'] = lambda: heads(fast.attention(q, k, K, scale, u[:, None] * scale, h, b, on_gpu))
    for name, run in runs.items():
        if cfg.compile or name == 'biased: FlexAttention':  # which is nothing else
            runs[name] = torch.compile(run, dynamic=False)

    def both_ways(run: Callable[[], Tensor]) -> None:
        run().backward(grad)
        for tensor in leaves:
            tensor.grad = None
    took = turns({name: lambda run=run: both_ways(run) for name, run in runs.items()}, cfg)
    plain = took['plain causal attention']
    return [{'attention': name, 'ms': 1e3 * t, 'time / plain': t / plain} for name, t in took.items()]


def decode_table(cfg: BenchConfig) -> list[dict[str, Any]]:
    """Greedy decoding of one sequence behind `decode_context` tokens, with the cache and without, beside Hugging Face's."""
    have, new = cfg.decode_context, cfg.decode_tokens
    prompt = torch.randint(cfg.vocab_size, (1, have), device=cfg.device)
    models = {name: cfg.model(**options, context_length=have + new + 1).eval() for name, options in VARIANTS.items()}
    runs: dict[str, Callable[[int], Any]] = {}
    for name, model in models.items():
        runs[name] = lambda n, model=model: generate(model, prompt, n, temperature=0)
    runs['Llama, no cache'] = lambda n: generate(models['Llama'], prompt, n, temperature=0, use_cache=False)
    runs['CEM, T = 2, no cache'] = lambda n: generate(
        models['CEM, T = 2, diag_lowrank'], prompt, n, temperature=0, use_cache=False)
    hf = {name: model.eval() for name, model in peers(cfg, have + new + 1).items() if 'Llama' in name}
    for name, model in hf.items():
        runs[name] = lambda n, model=model: model.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False,
                                                          pad_token_id=0)
    few = {name: 3 if 'no cache' in name else new + 1 for name in runs}

    def call(name: str, n: int) -> Callable[[], Any]:
        def inner() -> None:
            with torch.no_grad(), cfg.autocast():
                runs[name](n)
        return inner
    took = turns({(name, n): call(name, n) for name in runs for n in (1, few[name])}, cfg, warmup=1, settle=False)
    rows = []
    for name in runs:
        each = max(took[name, few[name]] - took[name, 1], 1e-9) / (few[name] - 1)  # less the prompt's forward pass
        row = {'decoding': name, 'ms a token': 1e3 * each, 'tokens/s': 1 / each, 'cache, bytes a token': None}
        if name in models:
            cache = Cache(have)
            with torch.no_grad(), cfg.autocast():
                models[name].hidden(prompt[:, :8], cache)
            row['cache, bytes a token'] = cache.floats_per_token() * cfg.torch_dtype.itemsize
        rows.append(row)
    llama = rows[0]['ms a token']
    for row in rows:
        row['time / Llama'] = row['ms a token'] / llama
    return rows


def cost_table(cfg: BenchConfig) -> list[dict[str, Any]]:
    """A training step's cost against T, against J and against size, measured and by the formula, each over its first point;
    the plot goes to results/bench/."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    gpu = cfg.device == 'cuda'
    J, tokens = cfg.context_length, cfg.batch_size * cfg.context_length
    lengths = (512, 1024, 2048, 4096, 8192) if gpu else (128, 256, 512, 1024)
    sweeps: dict[str, dict[Any, dict[str, Any]]] = {
        'T': {T: dict(attn_steps=T, mlp_steps=T) for T in (1, 2, 4, 8)},
        'J': {n: dict(context_length=n) for n in lengths},
        'size': {s: dict(size=s) for s in (('86m', '108m', '134m', '162m', '256m') if gpu else ('nano', 'micro', 'mini'))},
    }
    rows, figure, panels = [], *plt.subplots(1, 3, figsize=(13, 3.8))
    for axes, (name, points) in zip(panels, sweeps.items(), strict=True):
        for kind, options in (('CEM, diagonal', {}), ('CEM, exact RoPE', ROPE)):
            runs, flops = {}, {}
            for at, point in points.items():
                model = cfg.model(**{**options, **point})
                length = point.get('context_length', J)
                x = torch.randint(cfg.vocab_size, (max(1, tokens // length), length), device=cfg.device)
                forward = torch.compile(model, dynamic=False) if cfg.compile else model

                def step(forward: Any = forward, model: Any = model, x: Tensor = x) -> None:
                    with cfg.autocast():
                        loss = forward(x, x)[1]
                    loss.backward()
                    model.zero_grad(set_to_none=True)
                runs[at], flops[at] = step, model.flops_per_token() * x.numel()
            took = turns(runs, cfg)
            first = next(iter(points))
            measured, formula = ([v[at] / v[first] for at in points] for v in (took, flops))
            rows += [{'against': name, 'at': at, 'variant': kind, 'ms': 1e3 * took[at], 'time / first': m, 'FLOPs / first': f}
                     for at, m, f in zip(points, measured, formula, strict=True)]
            ticks = [str(at) for at in points]
            (line,) = axes.plot(ticks, measured, 'o-', label=f'{kind}, measured')
            axes.plot(ticks, formula, '--', color=line.get_color(), label=f'{kind}, FLOPs')
            gc.collect()
        axes.set(xlabel=name, ylabel='a step over the first point')
        axes.legend(fontsize=7)
    figure.suptitle(f'{cfg.size}, J = {J}, {tokens:,} tokens a step, {machine(cfg)}', fontsize=9)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format='png', dpi=100)
    os.makedirs('results/bench', exist_ok=True)
    write_whole(f'results/bench/cost_{cfg.device}.png', image.getvalue())
    return rows


def machine(cfg: BenchConfig) -> str:
    """Device and versions, in a line."""
    cpu = f'{platform.machine()} CPU, {torch.get_num_threads()} threads'
    name = torch.cuda.get_device_name() if cfg.device == 'cuda' else cpu
    return f'{name}, torch {torch.__version__}, {cfg.dtype}{", compiled" if cfg.compile else ""}'


def show(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    def cell(value: Any, key: str) -> str:
        if value is None:
            return '-'
        if isinstance(value, float):
            return f'{value:.1%}' if key == 'MFU' else f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'
        return f'{value:,}' if isinstance(value, int) else str(value)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    lines = [keys, ['---'] * len(keys), *([cell(row.get(key), key) for key in keys] for row in rows)]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def main(argv: list[str]) -> None:
    cfg = build(BenchConfig, read_options(argv, BenchConfig))
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    if cfg.device == 'cuda':
        torch.set_float32_matmul_precision('high')
    torch._dynamo.config.recompile_limit = 64  # every variant is a new graph of the same code
    tables = {'train': train_table, 'attention': attention_table, 'decode': decode_table, 'cost': cost_table}
    results: dict[str, Any] = {'machine': machine(cfg), 'size': cfg.size, 'batch_size': cfg.batch_size,
                               'context_length': cfg.context_length, 'repeats': cfg.repeats}
    print(f'{cfg.size}, {cfg.batch_size} x {cfg.context_length} tokens, vocabulary {cfg.vocab_size:,}; {machine(cfg)}; medians '
          f'of {cfg.repeats} rounds', flush=True)
    for name in cfg.what:
        try:
            results[name] = tables[name](cfg)
        except torch.OutOfMemoryError:
            fail(f'out of memory in the table {name}: give a smaller --batch_size, --context_length or --size')
        note = ' (not compiled)' if name == 'decode' and cfg.compile else ''
        print(f'\n{name}{note}\n\n{show(results[name])}', flush=True)
        if cfg.json:
            write_whole(cfg.json, json.dumps(results, indent=1).encode())
        gc.collect()


if __name__ == '__main__':
    main(sys.argv[1:])

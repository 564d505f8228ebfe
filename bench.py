"""
Speed, memory and FLOPs, beside peers, each ratio measured in one run.

    python bench.py                       training, attention, decoding: 134m on a GPU, else mini
    python bench.py --what=train --json   the training table, and a line to paste into an issue
    python bench.py --what=gpu            every table, at the sizes that a GPU's day wants

All variants of a table take turns, `repeats` rounds after a warm-up, and medians are shown: what
else the machine does hits all alike. Peers run where transformers is installed: its Llama, and its
GPT-2, nanoGPT's shape, as wide as gives Llama's FLOPs.
"""
import contextlib
import gc
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from configurator import build, command_line, fail, in_range, read_options
from model import SIZES, ModelConfig, Transformer, position_tables
from nanocem import compute, fast
from nanocem.decode import Cache, generate
from nanocem.files import say, table

Row = dict[str, Any]
LLAMA = dict(attn='llama', mlp='llama')
ROPE = dict(positions='rope', kq_diag='none', score_scale='head')
VARIANTS: dict[str, Row] = {
    'Llama': LLAMA,
    'CEM, T = 1': dict(attn_steps=1, mlp_steps=1, preconditioner='none'),
    'CEM, T = 2, diag_lowrank': {},
    'CEM, T = 2, exact RoPE': ROPE,
}
GPU_DAY = (('train', '134m'), ('train', '162m'), ('attention', '134m'), ('attention', '162m'),
           ('decode', '134m'))
TABLE_NAMES = ('train', 'attention', 'decode')


@dataclass
class BenchConfig:
    """What to measure, and how."""
    what: tuple[Literal[*TABLE_NAMES, 'gpu'], ...] = TABLE_NAMES  # or gpu: all in turn
    size: Literal[tuple(SIZES)] | None = None  # default: 134m on a GPU, else mini
    vocab_size: int | None = None  # default: 32,000, or 257 at mini and below
    context_length: int | None = None  # J of training; default: 2048 on a GPU, else 128
    batch_size: int | None = None  # sequences; default: 8 on a GPU, else 32
    decode_context: int = 1024  # tokens that are there before decoding begins
    decode_tokens: int = 32  # tokens that are timed
    repeats: int = 5  # rounds, of which the median counts
    device: Literal['auto', 'cpu', 'cuda'] = 'auto'  # auto: cuda where there is one
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of products; auto: bfloat16 on a GPU
    compile: bool | None = None  # torch.compile, ours as train.py does; default: on a GPU
    json: bool = False  # after the training table, its numbers in one line to paste

    def __post_init__(self) -> None:
        in_range(self, 1, 1_000_000, 'vocab_size context_length batch_size decode_context '
                 'decode_tokens repeats')
        if 'gpu' in self.what and (len(self.what) > 1 or self.size):
            fail('what=gpu is every table, at sizes of its own: give it alone')
        gpu = torch.cuda.is_available() and self.device != 'cpu'
        if not gpu and ('gpu' in self.what or self.device == 'cuda'):
            fail('this machine has no GPU that torch can use, or device=cpu')
        self.device = 'cuda' if gpu else 'cpu'
        self.size = self.size or ('134m' if gpu else 'mini')
        self.vocab_size = self.vocab_size or (32_000 if self.size[0].isdigit() else 257)
        self.context_length = self.context_length or (2048 if gpu else 128)
        self.batch_size = self.batch_size or (8 if gpu else 32)
        if self.dtype == 'auto':
            self.dtype = 'bfloat16' if gpu else 'float32'
        self.compile = gpu if self.compile is None else self.compile

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == 'bfloat16')

    def wait(self) -> None:
        """For the device's work."""
        if self.device == 'cuda':
            torch.cuda.synchronize()

    def model(self, **options: Any) -> Transformer:
        """A model of these options, by default of the benchmark's size, vocabulary and context."""
        torch.manual_seed(0)
        shape = dict(size=self.size, vocab_size=self.vocab_size, context_length=self.context_length)
        return Transformer(ModelConfig(**{**shape, **options})).to(self.device)

    def machine(self) -> str:
        if self.device == 'cuda':
            return torch.cuda.get_device_name()
        name = platform.machine()
        with contextlib.suppress(OSError), open('/proc/cpuinfo', encoding='utf-8') as file:
            name = (re.findall(r'^model name\s*: (.*)', file.read(), re.M) or [name])[0]
        return (f'CPU {name}, {torch.backends.cpu.get_cpu_capability()}'
                f'{" with AMX" * torch.cpu._is_amx_tile_supported()}, '
                f'{torch.get_num_threads()} threads')

    def setting(self) -> str:
        return (f'{self.size}, {self.batch_size} x {self.context_length} tokens, vocabulary '
                f'{self.vocab_size:,}; {self.machine()}, torch {torch.__version__}, {self.dtype}'
                f'{", compiled" * self.compile}; medians of {self.repeats} rounds')


def turns(runs: dict[Any, Callable[[], Any]], cfg: BenchConfig, warmup: int = 2,
          settle: bool = True) -> dict[Any, float]:
    """Median seconds of each, all taking turns. To settle is to run twice and time the second: the
    memory is then its own, and not what another left."""
    for run in runs.values():
        for _ in range(warmup):
            run()
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(cfg.repeats):
        for name, run in runs.items():
            if settle:
                run()
            cfg.wait()
            start = time.perf_counter()
            run()
            cfg.wait()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def train_step(cfg: BenchConfig, forward: Any, x: Tensor, optimizer: Any = None,
               peer: bool = False) -> None:
    """Forward, backward and, where there is an optimizer, its step."""
    with cfg.autocast():
        loss = forward(input_ids=x, labels=x).loss if peer else forward(x, x)[1]
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    forward.zero_grad(set_to_none=True)


def peers(cfg: BenchConfig, context_length: int) -> dict[str, Callable[[], torch.nn.Module]]:
    """What makes Hugging Face's Llama of the same weights' shape, and GPT-2 (nanoGPT's shape) of
    the same FLOPs, where installed."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    except ImportError:
        return {}
    s = SIZES[cfg.size]
    common = dict(vocab_size=cfg.vocab_size, eos_token_id=None, bos_token_id=None, use_cache=False)
    llama = LlamaConfig(
        hidden_size=s['d_model'], intermediate_size=s['d_mlp'], num_hidden_layers=s['n_layer'],
        num_attention_heads=s['n_head'], max_position_embeddings=context_length,
        rms_norm_eps=1e-5, tie_word_embeddings=False, **common)
    gpt = GPT2Config(
        n_embd=s['d_model'], n_inner=s['d_mlp'] * 3 // 2, n_layer=s['n_layer'],
        n_head=s['n_head'], n_positions=context_length, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, activation_function='gelu', **common)

    def make(cls: Any, config: Any) -> torch.nn.Module:
        return cls._from_config(config, attn_implementation='sdpa').to(cfg.device)
    return {'Hugging Face Llama': partial(make, LlamaForCausalLM, llama),
            "GPT, nanoGPT's shape": partial(make, GPT2LMHeadModel, gpt)}


# Tables

def train_table(cfg: BenchConfig) -> list[Row]:
    """A training step (forward, backward, AdamW) of every variant and peer; and at that speed the
    hours of a run of 20 tokens a parameter of Llama's."""
    x = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.context_length), device=cfg.device)
    makers = {name: partial(cfg.model, **options) for name, options in VARIANTS.items()}
    models: Row = {}
    runs: dict[str, Callable[[], None]] = {}
    memory: dict[str, float] = {}
    for name, make in {**makers, **peers(cfg, cfg.context_length)}.items():
        before = torch.cuda.memory_allocated() if cfg.device == 'cuda' else 0
        models[name] = forward = make()
        optimizer = torch.optim.AdamW(forward.parameters(), lr=1e-4, fused=True)
        if cfg.compile and name in VARIANTS:
            forward = compute.compile_for(torch.device(cfg.device), forward)  # as train.py does
        elif cfg.compile:
            forward = torch.compile(forward, dynamic=False)
        runs[name] = partial(train_step, cfg, forward, x, optimizer, name not in VARIANTS)
        if cfg.device == 'cuda':
            runs[name]()
            torch.cuda.reset_peak_memory_stats()
            runs[name]()
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
    peak = compute.peak_flops(torch.device(cfg.device), cfg.torch_dtype)
    llama_flops = compute.flops_per_token(models['Llama'])
    budget = 20 * models['Llama'].num_params()
    rows: list[Row] = []
    for name, took in turns(runs, cfg).items():
        flops = compute.flops_per_token(models[name]) if name in VARIANTS else llama_flops
        speed = x.numel() / took
        rows.append({'model': name,
                     'parameters': sum(p.numel() for p in models[name].parameters()),
                     'MFLOP/token': flops / 1e6, 'tokens/s': speed, 'MFU': flops * speed / peak,
                     'GB': memory.get(name), 'hours': budget / speed / 3600})
    for row in rows:
        row['speed / Llama'] = row['tokens/s'] / rows[0]['tokens/s']
        row['MFU / Llama'] = row['MFU'] / rows[0]['MFU']
    return rows


def json_line(cfg: BenchConfig, rows: list[Row]) -> str:
    """What an issue needs to know of the training table."""
    names = ('size', 'batch_size', 'context_length', 'vocab_size', 'dtype', 'compile')
    return json.dumps({
        'device': cfg.machine(), 'torch': torch.__version__,
        **{name: getattr(cfg, name) for name in names},
        'tokens/s': {row['model']: round(row['tokens/s']) for row in rows},
        'MFU': {row['model']: round(row['MFU'], 4) for row in rows}})


def attention_table(cfg: BenchConfig) -> list[Row]:
    """One step of an attention sublayer, forward and backward: Llama's, exact RoPE, and CEM's with
    ALiBi and the diagonal by each attn_impl."""
    variants = {
        'Llama': LLAMA,
        'Llama, cuDNN': LLAMA,  # which has no gradient for a bias
        'CEM, exact RoPE': ROPE,
        'CEM, readable': dict(attn_impl='readable'),
        'CEM, sdpa': dict(attn_impl='sdpa'),
        'CEM, triton': dict(attn_impl='triton'),
    }
    if cfg.device == 'cpu':
        del variants['Llama, cuDNN'], variants['CEM, triton']

    def both_ways(forward: Any, pos: Any, inputs: list[Tensor], grad: Tensor) -> None:
        with cfg.autocast():
            o = forward(inputs[0], pos)
        torch.autograd.grad(o, inputs, grad)
    runs, paths = {}, {}
    for name, options in variants.items():
        model = cfg.model(**{**dict(attn_steps=1, preconditioner='none', n_layer=1), **options})
        attn = model.blocks[0].attn
        x, grad = torch.randn(2, cfg.batch_size, cfg.context_length, model.cfg.d_model,
                              device=cfg.device)
        pos = position_tables(model.cfg, x)

        # the backend is chosen within what is compiled: a graph made outside would serve all
        def forward(x: Tensor, pos: Any, attn: Any = attn, cudnn: bool = 'cuDNN' in name) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else contextlib.nullcontext():
                return attn(x, pos)
        if cfg.compile:
            forward = torch.compile(forward, dynamic=False)
        inputs = [x.requires_grad_(), *attn.parameters()]
        runs[name] = partial(both_ways, forward, pos, inputs, grad)
        path = fast.attention_path(model, torch.device(cfg.device), cfg.torch_dtype, cfg.compile)
        paths[name] = path.partition(' attention')[0]
    took = turns(runs, cfg)
    return [{'attention': name, 'path': paths[name], 'ms': 1e3 * t,
             'time / Llama': t / took['Llama']} for name, t in took.items()]


def decode_table(cfg: BenchConfig) -> list[Row]:
    """Greedy decoding of one sequence behind `decode_context` tokens, with a cache."""
    context, new = cfg.decode_context, cfg.decode_tokens
    prompt = torch.randint(cfg.vocab_size, (1, context), device=cfg.device)
    runs: dict[str, Callable[..., Any]] = {}
    cache_bytes: dict[str, int] = {}
    for name, options in VARIANTS.items():
        model = cfg.model(**options, context_length=context + new + 1).eval()
        runs[name] = partial(generate, model, prompt, temperature=0)
        cache = Cache(context)
        with torch.no_grad():
            model.hidden(prompt[:, :8], cache)
        cache_bytes[name] = cache.floats_per_token() * cfg.torch_dtype.itemsize
    for name, make in peers(cfg, context + new + 1).items():
        if 'Llama' in name:
            generate_with = partial(make().eval().generate, prompt, use_cache=True)
            runs[name] = partial(generate_with, do_sample=False, pad_token_id=0)

    def decode(name: str, n: int) -> None:
        with torch.no_grad(), cfg.autocast():
            runs[name](max_new_tokens=n)
    took = turns({(name, n): partial(decode, name, n) for name in runs for n in (1, new + 1)}, cfg,
                 warmup=1, settle=False)
    rows = []
    for name in runs:
        # less the prompt's forward pass
        each = max(took[name, new + 1] - took[name, 1], 1e-9) / new
        rows.append({'decoding': name, 'ms a token': 1e3 * each, 'tokens/s': 1 / each,
                     'cache, bytes a token': cache_bytes.get(name)})
    for row in rows:
        row['time / Llama'] = row['ms a token'] / rows[0]['ms a token']
    return rows


def markdown(rows: list[Row]) -> str:
    """A table without the columns that nothing is in."""
    def cell(key: str, value: Any) -> str:
        if isinstance(value, float) and key == 'MFU':
            return f'{value:.1%}'
        if isinstance(value, float) and value < 1000:
            return f'{value:.3g}'
        return '-' if value is None else value if isinstance(value, str) else f'{value:,.0f}'
    keys = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return table(keys, [[cell(key, row[key]) for key in keys] for row in rows])


TABLES = {'train': train_table, 'attention': attention_table, 'decode': decode_table}


@command_line
def main(argv: list[str]) -> None:
    """Run the command line."""
    cfg = build(BenchConfig, read_options(argv, BenchConfig))
    compute.keep_freed_memory()  # as train.py does
    if cfg.device == 'cuda':
        torch.set_float32_matmul_precision('high')
    torch._dynamo.config.recompile_limit = 64  # every variant is a new graph of the same code
    tables = GPU_DAY if 'gpu' in cfg.what else [(name, cfg.size) for name in cfg.what]
    failed = []
    for name, cfg.size in tables:
        try:
            rows = TABLES[name](cfg)
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) \
                    and 'allocate memory' not in str(error):
                raise
            failed.append(f'{name} at {cfg.size}')
        else:
            note = ' (not compiled)' if name == 'decode' and cfg.compile else ''
            say(f'\n{name}{note}: {cfg.setting()}\n\n{markdown(rows)}')
            if name == 'train' and cfg.json:
                say(f'\n{json_line(cfg, rows)}')
        gc.collect()
        torch._dynamo.reset()
    if failed:
        fail(f'out of memory: {", ".join(failed)}; give a smaller --batch_size, --context_length '
             'or --size')


if __name__ == '__main__':
    main(sys.argv[1:])

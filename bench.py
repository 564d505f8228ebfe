"""
Measure speed, memory and FLOPs of Llama, CEM and their peers.

    python bench.py                       training, attention, decoding: 134m on a GPU, else mini
    python bench.py --what=train          the training table alone
    python bench.py --what=gpu            every table at 134m; training, attention also at 162m

The rows of a table take turns, for `repeats` rounds after a warm-up, so that other work on the
machine slows all of them alike. The table shows medians. If transformers is installed, its Llama
trains and decodes too, and its GPT-2 trains, with nanoGPT's shape and an MLP for Llama's FLOPs.
"""
import contextlib
import gc
import math
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

from configurator import build, command_line, fail, in_range, read_options, resolve_defaults
from model import SIZES, ModelConfig, Transformer, make_positions
from nanocem import loss as loss_fn
from nanocem.attention import describe_attention, fastest_impl
from nanocem.decode import Cache, generate
from nanocem.files import say, table
from train import compile_for, keep_freed_memory

Row = dict[str, Any]
Run = Callable[[], Any]  # what is timed
Maker = Callable[[], tuple[Run, Row]]  # returns a Run, and the columns known before it
LLAMA = dict(attn='llama', mlp='llama')
CEM = dict(attn='cem', mlp='cem', positions='alibi', kq_diag='shared')
T1 = CEM | dict(attn_steps=1, mlp_steps=1, preconditioner='none')
T2 = CEM | dict(attn_steps=2, mlp_steps=2, preconditioner='diag_lowrank')
ROPE = dict(positions='rope', kq_diag='none', score_scale='head')
VARIANTS: dict[str, Row] = {
    'Llama': LLAMA,
    'CEM, T = 1': T1,
    'CEM, T = 2, diag_lowrank': T2,
    'CEM, T = 2, exact RoPE': T2 | ROPE,
}
GPU_TABLES = (('train', '134m'), ('attention', '134m'), ('decode', '134m'), ('attention', '162m'),
              ('train', '162m'))
TABLE_NAMES = ('train', 'attention', 'decode')


@dataclass
class BenchConfig:
    """What to measure, and how often."""
    what: tuple[Literal[*TABLE_NAMES, 'gpu'], ...] = TABLE_NAMES  # gpu: see above
    size: Literal[tuple(SIZES)] | None = None  # default: 134m on a GPU, else mini
    vocab_size: int | None = None  # default: 32,000, or 257 at mini and below
    context_length: int | None = None  # default: 2048 on a GPU, else 128
    batch_size: int | None = None  # sequences a step; default: 8 on a GPU, else 32
    decode_context: int = 1024  # tokens in the prompt
    decode_tokens: int = 32  # tokens decoded after it
    repeats: int = 5  # measurements of each row; the table shows their median
    device: Literal['auto', 'cpu', 'cuda'] = 'auto'  # auto: cuda if there is a GPU
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU
    compile: bool | None = None  # use torch.compile; default: on a GPU

    def __post_init__(self) -> None:
        in_range(self, 1, 1_000_000, 'vocab_size context_length batch_size decode_context '
                 'decode_tokens repeats')
        if 'gpu' in self.what and (len(self.what) > 1 or self.size):
            fail('what=gpu measures every table, and at two sizes: give it alone')
        gpu = torch.cuda.is_available() and self.device != 'cpu'
        if not gpu and ('gpu' in self.what or self.device == 'cuda'):
            fail('no GPU: torch finds none on this machine, or device=cpu hides it')
        self.device = 'cuda' if gpu else 'cpu'
        resolve_defaults(self, size='134m' if gpu else 'mini', compile=gpu,
                         context_length=2048 if gpu else 128, batch_size=8 if gpu else 32)
        resolve_defaults(self, vocab_size=32_000 if self.size[0].isdigit() else 257)
        if self.dtype == 'auto':
            self.dtype = 'bfloat16' if gpu else 'float32'

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == 'bfloat16')

    def synchronize(self) -> None:
        """Wait until the device has done its work."""
        if self.device == 'cuda':
            torch.cuda.synchronize()

    def model(self, **options: Any) -> Transformer:
        """Build a model with these options over the benchmark's size, vocabulary and context."""
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

    def setting(self, name: str) -> str:
        """Describe what a table was measured with, for its heading."""
        tokens = f'{self.batch_size} x {self.context_length} tokens'
        if name == 'decode':
            tokens = f'{self.decode_tokens} tokens after {self.decode_context}'
        compiled = self.compile and name != 'decode'  # generate runs the uncompiled model
        return (f'{self.size}, {tokens}, vocabulary {self.vocab_size:,}; {self.machine()}, torch '
                f'{torch.__version__}, {self.dtype}{", compiled" * compiled}; medians over '
                f'--repeats={self.repeats}')


def measure(makers: dict[Any, Maker], cfg: BenchConfig) -> dict[Any, Row]:
    """Build every run and time them in turn. Returns for each its median seconds and, on a GPU, its
    peak memory (GB), beside its maker's columns. A run that fails has the error instead."""
    rows: dict[Any, Row] = {}
    runs: dict[Any, Run] = {}
    on_gpu = cfg.device == 'cuda'
    for name, make in makers.items():
        before = torch.cuda.memory_allocated() if on_gpu else 0
        start = time.perf_counter()
        try:
            run, rows[name] = make()
            for _ in range(2):  # the first may compile
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                run()
        except Exception as error:  # no memory, no kernel for this shape, or a peer's own error
            message = str(error).strip() or type(error).__name__
            rows[name] = {'error': message.splitlines()[0]}
            run = None  # free its memory before the next run is built
            continue
        runs[name] = run
        if (seconds := time.perf_counter() - start) > 5:
            say(f'{name}: ready after {seconds:.0f} s')
        if on_gpu:
            rows[name]['GB'] = (torch.cuda.max_memory_allocated() - before) / 1e9
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(cfg.repeats):
        for name, run in runs.items():
            run()  # so that the timed run finds its data in the processor's caches
            cfg.synchronize()
            start = time.perf_counter()
            run()
            cfg.synchronize()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        rows[name]['seconds'] = statistics.median(seconds)
    return rows


def peers(cfg: BenchConfig, context_length: int) -> dict[str, Callable[[], torch.nn.Module]]:
    """Return makers of Hugging Face's Llama with the same shape, and of its GPT-2 (nanoGPT's shape)
    with the same FLOPs; none if transformers is not installed."""
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


def add_ratio(rows: list[Row], column: str, ratio: str) -> None:
    """Add a column `ratio`: `column` divided by Llama's, which is in the first row."""
    for row in rows:
        if column in row and column in rows[0]:
            row[ratio] = row[column] / rows[0][column]


# Tables: one row for each variant. A variant that does not run has its error instead of numbers.

def train_table(cfg: BenchConfig) -> list[Row]:
    """Time a training step (forward, backward, AdamW) of every variant and peer. `hours` is how
    long 20 tokens for each of Llama's parameters take."""
    x = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.context_length), device=cfg.device)
    device = x.device  # cuda:0, the name by which the kernels' check is cached
    llama = cfg.model(**LLAMA)
    llama_flops = loss_fn.flops_per_token(llama)
    token_budget = 20 * llama.num_params()
    del llama

    def make_step(name: str, make_model: Callable[[], torch.nn.Module]) -> tuple[Run, Row]:
        ours = name in VARIANTS
        model = make_model()
        forward = model
        flops = loss_fn.flops_per_token(model) if ours else llama_flops  # peers have Llama's FLOPs
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if cfg.compile and ours:  # as train.py does
            attention = describe_attention(model, device, cfg.torch_dtype, True)
            forward = compile_for(device, model, attention)
        elif cfg.compile:
            forward = torch.compile(model, dynamic=False)

        def step() -> None:
            with cfg.autocast():
                loss = forward(x, x)[1] if ours else forward(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return step, {'parameters': sum(p.numel() for p in model.parameters()),
                      'MFLOP/token': flops / 1e6}
    models = {name: partial(cfg.model, **options) for name, options in VARIANTS.items()}
    models |= peers(cfg, cfg.context_length)
    makers = {name: partial(make_step, name, make_model) for name, make_model in models.items()}
    peak = loss_fn.peak_flops(device, cfg.torch_dtype)
    rows = []
    for name, row in measure(makers, cfg).items():
        if 'seconds' in row:
            row['tokens/s'] = x.numel() / row.pop('seconds')
            row['TFLOP/s'] = row['MFLOP/token'] * row['tokens/s'] / 1e6
            row['MFU'] = None if math.isnan(peak) else 1e12 * row['TFLOP/s'] / peak
            row['hours'] = token_budget / row['tokens/s'] / 3600
        rows.append({'model': name, **row})
    add_ratio(rows, 'tokens/s', 'speed / Llama')
    return rows


def attention_table(cfg: BenchConfig) -> list[Row]:
    """Time one step of an attention sublayer, forward and backward: Llama's, CEM's with exact RoPE,
    and CEM's with ALiBi and the diagonal by readable, sdpa and triton."""
    variants = {'Llama': (LLAMA, 'auto'), 'CEM, exact RoPE': (T1 | ROPE, 'auto'),
                'CEM, readable': (T1, 'readable'), 'CEM, sdpa': (T1, 'sdpa')}
    if cfg.device == 'cuda':
        variants['CEM, triton'] = T1, 'triton'

    def make_run(options: Row, impl: str) -> tuple[Run, Row]:
        model = cfg.model(**options, n_layer=1)
        model.set_attn_impl(impl)
        attn = model.blocks[0].attn
        x, grad = torch.randn(2, cfg.batch_size, cfg.context_length, model.cfg.d_model,
                              device=cfg.device)
        pos = make_positions(model.cfg, x)
        path = fastest_impl(attn, x.device, cfg.torch_dtype, compiled=cfg.compile)
        forward = torch.compile(attn, dynamic=False) if cfg.compile else attn
        inputs = [x.requires_grad_(), *attn.parameters()]

        def run() -> None:
            with cfg.autocast():
                o = forward(x, pos)
            torch.autograd.grad(o, inputs, grad)
        return run, {'path': path}
    makers = {name: partial(make_run, *variant) for name, variant in variants.items()}
    rows = []
    for name, row in measure(makers, cfg).items():
        if 'seconds' in row:
            row['ms'] = 1e3 * row.pop('seconds')
        rows.append({'attention': name, **row})
    add_ratio(rows, 'ms', 'time / Llama')
    return rows


def decode_table(cfg: BenchConfig) -> list[Row]:
    """Time greedy decoding with a cache, for one sequence. Decoding one token is timed as well and
    subtracted, so that the pass over the prompt does not count."""
    n_tokens = cfg.decode_tokens
    prompt = torch.randint(cfg.vocab_size, (1, cfg.decode_context), device=cfg.device)
    context_length = cfg.decode_context + n_tokens + 1
    generators: dict[str, Callable[..., Any]] = {}
    cache_bytes: dict[str, int] = {}
    for name, options in VARIANTS.items():
        model = cfg.model(**options, context_length=context_length).eval()
        generators[name] = partial(generate, model, prompt, temperature=0)
        cache = Cache(context_length)
        with torch.no_grad():
            model.hidden(prompt[:, :8], cache)
        cache_bytes[name] = cache.floats_per_token() * cfg.torch_dtype.itemsize
    for name, make_model in peers(cfg, context_length).items():
        if 'Llama' in name:
            generators[name] = partial(make_model().eval().generate, prompt, use_cache=True,
                                       do_sample=False, pad_token_id=0)

    def make_run(name: str, max_new_tokens: int) -> tuple[Run, Row]:
        def run() -> None:
            with torch.no_grad(), cfg.autocast():
                generators[name](max_new_tokens=max_new_tokens)
        return run, {}
    makers = {(name, n): partial(make_run, name, n)
              for name in generators for n in (1, n_tokens + 1)}
    found = measure(makers, cfg)
    rows = []
    for name in generators:
        one, all_tokens = found[name, 1], found[name, n_tokens + 1]
        row = {'decoding': name, 'cache, bytes a token': cache_bytes.get(name)}
        rows.append(row)
        if error := one.get('error') or all_tokens.get('error'):
            row['error'] = error
            continue
        seconds = (all_tokens['seconds'] - one['seconds']) / n_tokens
        if seconds > 0:
            row['ms a token'] = 1e3 * seconds
        else:
            row['error'] = 'too short to time: give more --decode_tokens'
    add_ratio(rows, 'ms a token', 'time / Llama')
    return rows


def markdown(rows: list[Row]) -> str:
    """Format rows as a table, without the columns that no row has a value for."""
    def cell(key: str, value: Any) -> str:
        if isinstance(value, float) and key == 'MFU':
            return f'{value:.1%}'
        if isinstance(value, float) and value < 1000:
            return f'{value:.3g}'
        return '-' if value is None else value if isinstance(value, str) else f'{value:,.0f}'
    keys = dict.fromkeys(key for row in rows for key in row if row[key] is not None)
    return table([*keys], [[cell(key, row.get(key)) for key in keys] for row in rows])


TABLES = {'train': train_table, 'attention': attention_table, 'decode': decode_table}


@command_line
def main(argv: list[str]) -> None:
    cfg = build(BenchConfig, read_options(argv, BenchConfig))
    keep_freed_memory()  # as train.py does
    if cfg.device == 'cuda':
        torch.set_float32_matmul_precision('high')
    torch._dynamo.config.recompile_limit = 64  # every variant compiles the same code anew
    tables = GPU_TABLES if 'gpu' in cfg.what else [(name, cfg.size) for name in cfg.what]
    failed = []
    for name, size in tables:
        cfg.size = size
        rows = TABLES[name](cfg)
        say(f'\n{name}: {cfg.setting(name)}\n\n{markdown(rows)}')
        failed += [f'{name} at {size}' for row in rows if 'error' in row]
        gc.collect()
        torch._dynamo.reset()
    if failed:
        fail(f'rows without numbers: {", ".join(failed)}; if memory ran out, give a smaller '
             '--batch_size, --context_length or --size')


if __name__ == '__main__':
    main(sys.argv[1:])

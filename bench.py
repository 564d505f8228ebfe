"""
Speed, memory and FLOPs, beside peers, each ratio measured in one run.

    python bench.py                       training, attention, decoding: 134m on a GPU, else mini
    python bench.py --what=train --size=134m --context_length=512 --batch_size=1
    python bench.py --what=cost           a step's cost against T, J and size beside the formula
    python bench.py --what=gpu            a GPU's first day: everything, in parts of ten minutes at
                                          most; the same command again goes on where it ended
    python bench.py --what=gpu --rehearse    the same parts on a CPU, tiny

All variants of a table take turns, `repeats` rounds after a warm-up, and medians are shown: what
else the machine does hits all alike. Peers run where transformers is installed: its Llama, and its
GPT-2, nanoGPT's shape, as wide as gives Llama's FLOPs. Files go to out/results/bench/, or with
--publish to results/bench/.
"""
import contextlib
import gc
import io
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from configurator import build, fail, in_range, read_options
from model import SIZES, ModelConfig, Transformer, position_tables, rotate
from nanocem import fast
from nanocem.decode import Cache, generate
from nanocem.files import read_json, say, to_json, write_whole
from nanocem.first_day import PARTS, measure_parts, missing_parts

Row = dict[str, Any]
LLAMA = dict(attn='llama', mlp='llama')
ROPE = dict(positions='rope', kq_diag='none', score_scale='head')
VARIANTS: dict[str, dict[str, Any]] = {
    'Llama': LLAMA,
    'CEM, T = 1': dict(attn_steps=1, mlp_steps=1, preconditioner='none'),
    'CEM, T = 2, diag_lowrank': {},
    'CEM, T = 2, exact RoPE': ROPE,
}
A100_FLOPS = 312e12  # a second, dense bfloat16: the GPU of the paper's runs


@dataclass
class BenchConfig:
    """What to measure, and how."""
    what: tuple[Literal['train', 'attention', 'decode', 'cost', 'gpu'], ...] = (
        'train', 'attention', 'decode')  # tables, or gpu: all of them, in parts
    size: Literal[tuple(SIZES)] | None = None  # default: 134m on a GPU, else mini
    vocab_size: int | None = None  # default: 32,000, or 257 at mini and below
    context_length: int | None = None  # J of training; default: 2048 on a GPU, else 128
    batch_size: int | None = None  # sequences; default: 8 on a GPU, else 32
    decode_context: int = 1024  # tokens that are there before decoding begins
    decode_tokens: int = 32  # tokens that are timed
    against: tuple[Literal['T', 'J', 'size'], ...] = ('T', 'J', 'size')  # panels of what=cost
    repeats: int = 5  # rounds, of which the median counts
    device: Literal['auto', 'cpu', 'cuda'] = 'auto'  # auto: cuda where there is one
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of products; auto: bfloat16 on a GPU
    activation_checkpointing: bool = False  # our models recompute blocks in the backward pass
    compile: bool | None = None  # torch.compile, ours as train.py does; default: on a GPU
    threads: int | None = None  # CPU threads; default: torch's own choice
    json: str | None = None  # also write all numbers to this file
    rehearse: bool = False  # what=gpu: on a CPU, tiny
    parts: tuple[Literal[tuple(PARTS)], ...] = tuple(PARTS)  # of what=gpu
    part_seconds: int = 600  # what=gpu: a part that takes longer is ended
    publish: bool = False  # what=cost, what=gpu: write to results/bench/

    def __post_init__(self) -> None:
        in_range(self, 1, 1_000_000, 'vocab_size context_length batch_size decode_context '
                 'decode_tokens repeats part_seconds')
        in_range(self, 1, os.cpu_count() or 1, 'threads')
        if 'gpu' in self.what and len(self.what) > 1:
            raise ValueError('what=gpu is every table: give it alone')
        if self.publish and not {'cost', 'gpu'} & set(self.what):
            raise ValueError('publish files what=cost and what=gpu: give one of them')
        if self.publish and (self.rehearse or len(set(self.against)) < 3):
            raise ValueError('publish files what is complete: no rehearsal, every --against')
        if self.rehearse:
            self.device = 'cpu'
        if self.device == 'auto':
            self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        if self.device == 'cuda' and not torch.cuda.is_available():
            raise ValueError('device=cuda: this machine has no GPU that torch can use')
        gpu = self.device == 'cuda'
        if 'gpu' in self.what and not gpu and not self.rehearse:
            raise ValueError('what=gpu: this machine has no GPU that torch can use; --rehearse '
                             'runs the parts on a CPU')
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

    @property
    def folder(self) -> str:
        return 'results/bench' if self.publish else 'out/results/bench'

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == 'bfloat16')

    def model(self, **options: Any) -> Transformer:
        """A model of these options, by default of the benchmark's size, vocabulary and context."""
        torch.manual_seed(0)
        shape = dict(size=self.size, vocab_size=self.vocab_size, context_length=self.context_length)
        model = Transformer(ModelConfig(**{**shape, **options})).to(self.device)
        model.activation_checkpointing = self.activation_checkpointing
        fast.prove(model, torch.device(self.device), self.torch_dtype, self.batch_size)
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
            times[name].append(seconds(run, cfg.device))
    return {name: statistics.median(t) for name, t in times.items()}


def peers(cfg: BenchConfig, context_length: int) -> dict[str, torch.nn.Module]:
    """Hugging Face's Llama of the same weights' shape, and GPT-2 (nanoGPT's shape) of the same
    FLOPs, where installed."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    except ImportError:
        return {}
    s = SIZES[cfg.size]
    no_ends = dict(vocab_size=cfg.vocab_size, eos_token_id=None, bos_token_id=None)
    llama = LlamaConfig(
        hidden_size=s['d_model'], intermediate_size=s['d_mlp'], num_hidden_layers=s['n_layer'],
        num_attention_heads=s['n_head'], max_position_embeddings=context_length,
        rms_norm_eps=1e-5, tie_word_embeddings=False, **no_ends)
    gpt = GPT2Config(
        n_embd=s['d_model'], n_inner=s['d_mlp'] * 3 // 2, n_layer=s['n_layer'],
        n_head=s['n_head'], n_positions=context_length, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, activation_function='gelu', **no_ends)
    found = {}
    for name, cls, config in (('Hugging Face Llama', LlamaForCausalLM, llama),
                              ("GPT, nanoGPT's shape", GPT2LMHeadModel, gpt)):
        try:
            found[name] = cls._from_config(config, attn_implementation='sdpa')
        except (TypeError, ValueError):  # an older transformers, or a model without sdpa there
            found[name] = cls(config)
        found[name].to(cfg.device)
    return found


def train_table(cfg: BenchConfig) -> list[Row]:
    """A training step (forward, backward, AdamW) of every variant and peer; and at that speed the
    hours of a run of 20 tokens a parameter of Llama's, here, and on an A100 at the same MFU."""
    x = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.context_length), device=cfg.device)
    models: dict[str, Any] = {name: cfg.model(**options) for name, options in VARIANTS.items()}
    llama_flops = models['Llama'].flops_per_token()
    budget = 20 * models['Llama'].num_params()
    for name, peer in peers(cfg, cfg.context_length).items():
        models[name] = peer
        peer.config.use_cache = False  # training keeps no keys
    runs, memory = {}, {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        forward = model
        if cfg.compile and name in VARIANTS:
            forward = fast.compile_for(torch.device(cfg.device), model)  # as train.py does
        elif cfg.compile:
            forward = torch.compile(model, dynamic=False)

        def step(forward: Any = forward, optimizer: Any = optimizer,
                 ours: bool = name in VARIANTS) -> None:
            with cfg.autocast():
                loss = forward(x, x)[1] if ours else forward(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        runs[name] = step
        if cfg.device == 'cuda':
            memory[name] = peak_bytes(step, model) / 1e9
    peak = fast.peak_flops(torch.device(cfg.device), cfg.torch_dtype)
    rows: list[Row] = []
    for name, took in turns(runs, cfg).items():
        flops = models[name].flops_per_token() if name in VARIANTS else llama_flops
        speed = x.numel() / took
        mfu = flops * speed / peak
        rows.append({
            'model': name,
            'parameters': sum(p.numel() for p in models[name].parameters()),
            'MFLOP/token': flops / 1e6,
            'tokens/s': speed,
            'MFU': mfu,
            'GB': memory.get(name),
            'speed / Llama': speed / rows[0]['tokens/s'] if rows else 1.0,
            'MFU / Llama': mfu / rows[0]['MFU'] if rows else 1.0,
            'hours': budget / speed / 3600,
            'A100-hours': budget * flops / (mfu * A100_FLOPS) / 3600 if memory else None,
        })
    return rows


def peak_bytes(step: Callable[[], None], model: torch.nn.Module) -> int:
    """The GPU memory that one step needs, the other models' left out."""
    step()
    torch.cuda.reset_peak_memory_stats()
    own = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        # with AdamW's two moments
        own += tensor.numel() * tensor.element_size() * (3 if tensor.requires_grad else 1)
    others = torch.cuda.memory_allocated() - own
    step()
    return torch.cuda.max_memory_allocated() - others


def attention_cores(cfg: BenchConfig) -> tuple[dict[str, Callable[[], Tensor]], list[Tensor]]:
    """The core of one attention step at this size's heads, by name, as (B, K, J, R), and what it
    is computed from: plain causal attention; exact RoPE; and by several ways the scores with
    ALiBi, the self and cross biases and the shared diagonal."""
    B, J = cfg.batch_size, cfg.context_length
    K, D = SIZES[cfg.size]['n_head'], SIZES[cfg.size]['d_model']
    scale, on_gpu, device = D ** -0.5, cfg.device == 'cuda', torch.device(cfg.device)
    heads = partial(fast.heads, n_head=K)
    sdpa = F.scaled_dot_product_attention

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=cfg.torch_dtype, requires_grad=True)
    q, k, v, u, h, b = leaves = [*(leaf(B, J, D) for _ in range(5)), leaf(K)]
    pos = position_tables(ModelConfig(size=cfg.size, context_length=J), q)
    slopes = fast.slopes(K, pos.mask)
    alibi = (pos.mask - slopes[:, None, None] * pos.distance).to(q.dtype)

    def rope() -> Tensor:
        turned = rotate(heads(k), pos)
        o = sdpa(rotate(heads(q), pos), turned, turned, is_causal=True, scale=scale)
        return rotate(o, pos, inverse=True)

    def bias() -> Tensor:  # (B, K, J, J)
        by_diagonal = (u * scale @ h.mT)[:, None]
        return by_diagonal + alibi + torch.where(pos.distance == 0, b[:, None, None], 0)

    def readable() -> Tensor:
        return (heads(q) * scale @ heads(k).mT + bias()).softmax(dim=-1) @ heads(k)

    causal = create_block_mask(lambda n, head, i, j: i >= j, None, None, J, J, device=device)

    def flex() -> Tensor:
        diagonal = u * scale @ h.mT

        def score(s: Tensor, n: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s + diagonal[n, i, j] - slopes[head] * (i - j)
            return s + torch.where(i == j, b[head], 0)
        return flex_attention(heads(q), heads(k), heads(k), score, causal, scale)

    runs = {
        'plain causal attention': lambda: sdpa(heads(q), heads(k), heads(v), is_causal=True),
        'exact RoPE: keys are values, rotated back': rope,
        'biased: readable': readable,
        'biased: SDPA with the bias formed': lambda: sdpa(heads(q), heads(k), heads(k), bias(),
                                                          scale=scale),
        'biased: FlexAttention': flex,
    }
    if (fast.runs_triton if on_gpu else fast.runs_rows)(device, cfg.torch_dtype):
        runs['biased: ours'] = lambda: heads(
            fast.attention(q, k, K, scale, u[:, None] * scale, h, b, on_gpu))
    return runs, leaves


def attention_table(cfg: BenchConfig) -> list[Row]:
    """The cores, forward and backward."""
    runs, leaves = attention_cores(cfg)
    if cfg.device == 'cpu':
        del runs['biased: FlexAttention']  # compiled for GPUs alone
    B, J = cfg.batch_size, cfg.context_length
    K, D = SIZES[cfg.size]['n_head'], SIZES[cfg.size]['d_model']
    grad = torch.randn(B, K, J, D // K, device=cfg.device, dtype=cfg.torch_dtype)

    def both_ways(run: Callable[[], Tensor]) -> None:
        run().backward(grad)
        for tensor in leaves:
            tensor.grad = None
    for name, run in runs.items():
        # FlexAttention is nothing else
        if cfg.compile or name == 'biased: FlexAttention':
            runs[name] = torch.compile(run, dynamic=False)
    took = turns({name: partial(both_ways, run) for name, run in runs.items()}, cfg)
    plain = took['plain causal attention']
    return [{'attention': name, 'ms': 1e3 * t, 'time / plain': t / plain}
            for name, t in took.items()]


def decode_table(cfg: BenchConfig) -> list[Row]:
    """Greedy decoding of one sequence behind `decode_context` tokens, with the cache and without,
    beside Hugging Face's."""
    have, new = cfg.decode_context, cfg.decode_tokens
    prompt = torch.randint(cfg.vocab_size, (1, have), device=cfg.device)
    models = {name: cfg.model(**options, context_length=have + new + 1).eval()
              for name, options in VARIANTS.items()}
    runs: dict[str, Callable[[int], Any]] = {}
    for name, model in models.items():
        runs[name] = partial(generate, model, prompt, temperature=0)
    for name in 'Llama', 'CEM, T = 2, diag_lowrank':
        runs[f'{name}, no cache'] = partial(runs[name], use_cache=False)
    for name, model in peers(cfg, have + new + 1).items():
        if 'Llama' in name:
            model.eval()
            runs[name] = lambda max_new_tokens, model=model: model.generate(
                prompt, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens,
                do_sample=False, pad_token_id=0)
    few = {name: 3 if 'no cache' in name else new + 1 for name in runs}

    def call(name: str, n: int) -> None:
        with torch.no_grad(), cfg.autocast():
            runs[name](max_new_tokens=n)
    calls = {(name, n): partial(call, name, n) for name in runs for n in (1, few[name])}
    took = turns(calls, cfg, warmup=1, settle=False)
    rows = []
    for name in runs:
        # less the prompt's forward pass
        each = max(took[name, few[name]] - took[name, 1], 1e-9) / (few[name] - 1)
        kept = None
        if name in models:
            cache = Cache(have)
            with torch.no_grad(), cfg.autocast():
                models[name].hidden(prompt[:, :8], cache)
            kept = cache.floats_per_token() * cfg.torch_dtype.itemsize
        rows.append({'decoding': name, 'ms a token': 1e3 * each, 'tokens/s': 1 / each,
                     'cache, bytes a token': kept})
    for row in rows:
        row['time / Llama'] = row['ms a token'] / rows[0]['ms a token']
    return rows


def cost_table(cfg: BenchConfig) -> list[Row]:
    """A training step's cost against T, J and size, measured and by the formula, each over its
    first point."""
    gpu = cfg.device == 'cuda'
    lengths = (512, 1024, 2048, 4096, 8192) if gpu else (128, 256, 512, 1024)
    sizes = ('86m', '108m', '134m', '162m', '256m') if gpu else ('nano', 'micro', 'mini')
    sweeps: dict[str, dict[Any, dict[str, Any]]] = {
        'T': {T: dict(attn_steps=T, mlp_steps=T) for T in (1, 2, 4, 8)},
        'J': {J: dict(context_length=J) for J in lengths},
        'size': {size: dict(size=size) for size in sizes},
    }
    rows = []
    for against in cfg.against:
        for kind, options in (('CEM, diagonal', {}), ('CEM, exact RoPE', ROPE)):
            runs, flops = {}, {}
            for at, point in sweeps[against].items():
                model = cfg.model(**{**options, **point})
                if cfg.compile:
                    for block in model.blocks:  # one graph for all: at T = 8 twelve take minutes
                        block.compile(dynamic=False)
                J = model.cfg.context_length
                n = max(1, cfg.batch_size * cfg.context_length // J)
                x = torch.randint(cfg.vocab_size, (n, J), device=cfg.device)

                def step(model: Any = model, x: Tensor = x) -> None:
                    with cfg.autocast():
                        loss = model(x, x)[1]
                    loss.backward()
                    model.zero_grad(set_to_none=True)
                runs[at] = step
                flops[at] = model.flops_per_token() * x.numel()
            took = turns(runs, cfg)
            first = next(iter(runs))
            rows += [{'against': against, 'at': at, 'variant': kind, 'ms': 1e3 * took[at],
                      'time / first': took[at] / took[first],
                      'FLOPs / first': flops[at] / flops[first]} for at in runs]
            gc.collect()
    return rows


def cost_picture(rows: list[Row], title: str) -> bytes:
    """A panel for each of what cost was taken against, as a PNG."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    panels = list(dict.fromkeys(row['against'] for row in rows))
    figure, all_axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.8), squeeze=False)
    for axes, against in zip(all_axes[0], panels, strict=True):
        for kind in dict.fromkeys(row['variant'] for row in rows):
            line = [row for row in rows if (row['against'], row['variant']) == (against, kind)]
            at = [str(row['at']) for row in line]
            (drawn,) = axes.plot(at, [row['time / first'] for row in line], 'o-',
                                 label=f'{kind}, measured')
            axes.plot(at, [row['FLOPs / first'] for row in line], '--', color=drawn.get_color(),
                      label=f'{kind}, FLOPs')
        axes.set(xlabel=against, ylabel='a step over the first point')
        axes.legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format='png', dpi=100)
    plt.close(figure)
    return image.getvalue()


def machine(cfg: BenchConfig) -> str:
    """Device and versions, in a line."""
    cpu = f'{platform.machine()} CPU, {torch.get_num_threads()} threads'
    name = torch.cuda.get_device_name() if cfg.device == 'cuda' else cpu
    return f'{name}, torch {torch.__version__}, {cfg.dtype}{", compiled" if cfg.compile else ""}'


def setting(cfg: BenchConfig) -> str:
    return (f'{cfg.size}, {cfg.batch_size} x {cfg.context_length} tokens, vocabulary '
            f'{cfg.vocab_size:,}; {machine(cfg)}; medians of {cfg.repeats} rounds')


def show(rows: list[Row]) -> str:
    """A Markdown table."""
    def cell(value: Any, key: str) -> str:
        if value is None:
            return '-'
        if isinstance(value, float):
            if key == 'MFU':
                return f'{value:.1%}'
            return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'
        return f'{value:,}' if isinstance(value, int) else str(value)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    lines = [keys, ['---'] * len(keys)]
    lines += [[cell(row.get(key), key) for key in keys] for row in rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


# What is written

def own_json(path: str) -> Row:
    """What an earlier run wrote to --json, {} where there is nothing. SystemExit, before anything
    is measured, where the file is not ours or cannot be written."""
    if not path:
        fail("json=: expected a file's name")
    folder = os.path.dirname(path) or '.'
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f'json={path}: {folder} cannot be written to ({error.strerror})')
    if os.path.lexists(path) and not os.path.isfile(path):
        fail(f'json={path} is no plain file: name another')
    if os.path.exists(path) and os.path.getsize(path) == 0:
        return {}
    before = read_json(path, 'name another file')
    if before is not None and 'machine' not in before:
        fail(f'json={path} holds something else than measurements: name another file')
    return before or {}


def write(path: str, data: bytes) -> None:
    """After the numbers were shown: a full disk costs the file alone."""
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        fail(f'{path} could not be written ({error.strerror}); the numbers are above')


def first_day(cfg: BenchConfig) -> None:
    """The parts that are not in the file yet, then all in one page."""
    name = torch.cuda.get_device_name() if cfg.device == 'cuda' else 'rehearsal'
    name = ''.join(c if c.isalnum() else '_' for c in name.lower())
    try:
        os.makedirs('out/results/bench', exist_ok=True)
    except OSError as error:
        fail(f'out/results/bench: {error.strerror}; expected a folder to write in')
    path = cfg.json or f'out/results/bench/{name}.json'
    where = f'rehearsal, tiny: {machine(cfg)}' if cfg.rehearse else machine(cfg)
    day = own_json(path) or {'machine': where, 'parts': {}}
    if 'parts' not in day or day['machine'] != where:
        fail(f'{path} holds measurements of another kind ({day["machine"]}): name another --json')
    wrong = measure_parts(cfg.parts, day['parts'], cfg.part_seconds, cfg.rehearse,
                          partial(keep_part, path, day))
    page = day_page(day)
    say(page)
    missing = missing_parts(day['parts'])
    if not missing or not cfg.publish:
        write(f'{cfg.folder}/{name}.md', page.encode())
        write(f'{cfg.folder}/{name}.json', to_json(day, indent=1))
        if costs := cost_rows(day):
            write(f'{cfg.folder}/{name}_cost.png', cost_picture(costs, day['machine']))
        say(f'\nfiled in {cfg.folder}/')
    if wrong or (missing and cfg.publish):
        fail(f'not measured: {"; ".join(wrong) or ", ".join(missing)}: the same command tries '
             f'again what {path} lacks')


def keep_part(path: str, day: Row, name: str, result: Row) -> None:
    day['parts'][name] = result
    write(path, to_json(day, indent=1))


def cost_rows(day: Row) -> list[Row]:
    return [row for part in day['parts'].values() for row in part.get('cost', [])]


def day_page(day: Row) -> str:
    """README's table, then every part's."""
    rows: dict[str, Row] = {}
    for name, part in day['parts'].items():
        size = name.removeprefix('train ')
        for of in part.get('train', []):
            row = rows.setdefault(of['model'], {'training': of['model']})
            row |= {f'{size}: tokens/s': of['tokens/s'], f'{size}: MFU': f'{of["MFU"]:.1%}',
                    f"{size}: over Llama's": of['MFU / Llama'], f'{size}: GB': of['GB'],
                    f'{size}: hours': of['hours'], f'{size}: A100-hours': of['A100-hours']}
    lines = [f'# {day["machine"]}', "Hours: of a run of 20 tokens a parameter of Llama's, on one "
             'such GPU; A100-hours: at the same MFU.']
    lines += [show([*rows.values()])] if rows else []
    for name, part in day['parts'].items():
        lines.append(f'## {name}\n\n`python {part["command"]}`, {part["seconds"]:.0f} s')
        if 'setting' in part:
            lines.append(part['setting'])
        lines += [show(part[kind]) for kind in TABLES if kind in part]
        if 'said' in part:
            lines.append(f'```\n{part["said"]}\n```')
    return '\n\n'.join(lines) + '\n'


TABLES = {'train': train_table, 'attention': attention_table, 'decode': decode_table,
          'cost': cost_table}


def main(argv: list[str]) -> None:
    cfg = build(BenchConfig, read_options(argv, BenchConfig))
    if cfg.json is not None:
        own_json(cfg.json)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    if cfg.what == ('gpu',):
        return first_day(cfg)
    if cfg.device == 'cuda':
        torch.set_float32_matmul_precision('high')
    torch._dynamo.config.recompile_limit = 64  # every variant is a new graph of the same code
    results: Row = {'machine': machine(cfg), 'setting': setting(cfg)}
    say(setting(cfg))
    for name in cfg.what:
        try:
            results[name] = TABLES[name](cfg)
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) \
                    and 'allocate memory' not in str(error):
                raise
            fail(f'out of memory in the table {name}: give a smaller --batch_size, '
                 '--context_length or --size')
        note = ' (not compiled)' if name == 'decode' and cfg.compile else ''
        say(f'\n{name}{note}\n\n{show(results[name])}')
        if cfg.json:
            write(cfg.json, to_json(results, indent=1))
        if name == 'cost':
            write(f'{cfg.folder}/cost_{cfg.device}.png', cost_picture(results[name], setting(cfg)))
        gc.collect()


if __name__ == '__main__':
    main(sys.argv[1:])

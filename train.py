"""
Train Llama and CEM language models: on a laptop, a GPU, or many.

    python train.py                                                  the mini CEM model on the built-in corpus
    python train.py config/llama.py --size=86m                       one GPU
    torchrun --nproc_per_node=8 train.py config/cem_t2.py            eight
    python train.py --init_from=resume                               go on with the newest run, exactly where it was

Options are read from config files and --key=value, later ones win. A run lives in its out_dir: config.json, log.jsonl, the
last checkpoints, best.pt, TensorBoard's events, and result.json once it is finished.
"""
import contextlib
import glob
import io
import json
import math
import os
import resource
import signal
import socket
import statistics
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from configurator import build, fail, read_options
from model import ModelConfig, Transformer, peak_flops
from prepare_slimpajama import FORMAT, load_tokenizer, prepare_builtin, write_whole

BUILTIN = 'data/builtin'
STOPPED = 75  # exit code of a run that stopped early, checkpoint written (EX_TEMPFAIL: try again later)


@dataclass
class TrainConfig:
    """The run. Defaults are the paper's recipe (Table 2); config/mini.py overrides some where --size=mini."""
    data: str = 'data/slimpajama'  # folder of token shards; data/builtin is made on first use
    out_dir: str | None = None  # where the run lives; default: a new folder under out/, or to resume the newest
    init_from: Literal['scratch', 'resume'] = 'scratch'  # resume: from the last checkpoint in out_dir, with its options
    seed: int = 1337  # of the weights and of the order of the data
    tokens: int | None = None  # training tokens; default: tokens_per_param x the Llama counterpart's parameters
    tokens_per_param: float = 20.0  # Chinchilla's budget
    batch_size: int = 128  # sequences a step, over all processes
    micro_batch_size: int = 8  # sequences a forward pass
    learning_rate: float = 2e-3  # at its highest, after the warm-up
    warmup: float = 0.05  # share of the steps
    final_lr: float = 0.1  # the cosine's end, as a share of learning_rate
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    adam_eps: float = 1e-9  # AdamW
    weight_decay: float = 0.1  # on matrices only
    grad_clip: float = 1.0  # largest gradient norm
    eval_interval: int = 500  # steps between validations
    eval_tokens: int = 2_000_000  # validation reads this many tokens, the same pieces every time
    test_tokens: int = 10_000_000  # the final test reads this many
    log_interval: int = 10  # steps between log lines
    checkpoint_interval: int = 500  # steps between checkpoints
    keep_checkpoints: int = 2  # the last ones kept, besides the best by validation
    stop_step: int | None = None  # stop after this step of the schedule, checkpoint written
    max_minutes: float | None = None  # stop after this time, checkpoint written
    max_skipped: int = 10  # give up after this many steps in a row without a finite loss and gradient
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda where there is one
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of the matrix products; auto: bfloat16 on GPUs that have it
    compile: bool | None = None  # torch.compile; default: on a GPU
    activation_checkpointing: bool = False  # recompute a block in its backward pass: less memory, a third more work
    deterministic: bool = False  # refuse GPU operations that are not reproducible to the bit
    timeout_minutes: float = 10.0  # how long a process waits for the others
    tensorboard: bool = True  # write TensorBoard events beside log.jsonl
    sample_tokens: int = 400  # length of the text sampled at the end

    def __post_init__(self) -> None:
        for names, low, high in (
                ('batch_size micro_batch_size keep_checkpoints stop_step', 1, 10**6),
                ('eval_interval log_interval checkpoint_interval', 1, 10**6),
                ('tokens eval_tokens test_tokens', 1, 10**15), ('sample_tokens max_skipped', 0, 10**6), ('seed', 0, 2**63 - 1),
                ('tokens_per_param adam_eps grad_clip timeout_minutes', 1e-30, 10**6),
                ('learning_rate weight_decay max_minutes', 0, 10**6), ('warmup final_lr beta1 beta2', 0, 0.9999)):
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not low <= value <= high:
                    raise ValueError(f'{name}={value}: expected {low:,} to {high:,}')


@dataclass
class World:
    """This process among the others."""
    rank: int
    size: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over all processes."""
        if self.size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, in every process."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, device=self.device)
        return box[0]


def start_world(cfg: TrainConfig) -> World:
    """Join the processes torchrun started (NCCL on GPUs, gloo on CPUs), or stand alone."""
    rank, size, local = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    kind = cfg.device if cfg.device != 'auto' else 'cuda' if torch.cuda.is_available() else 'cpu'
    if kind == 'cuda' and local >= torch.cuda.device_count():
        fail(f'device=cuda: process {local + 1} on this machine finds {torch.cuda.device_count()} GPUs; start as many '
             'processes as GPUs (torchrun --nproc_per_node), or set device=cpu', everywhere=True)
    if kind == 'mps' and (not torch.backends.mps.is_available() or size > 1):
        fail('device=mps: needs an Apple GPU and a single process')
    per_step = cfg.micro_batch_size * size
    if cfg.batch_size % per_step:
        right = ', '.join(str(m) for m in range(cfg.micro_batch_size, 0, -1) if cfg.batch_size % (m * size) == 0)
        fail(f'batch_size={cfg.batch_size} is not a multiple of micro_batch_size x processes = {cfg.micro_batch_size} x {size}'
             f'; right would be batch_size={max(1, round(cfg.batch_size / per_step)) * per_step}'
             + (f', or micro_batch_size={right}' if right else ''))
    device = torch.device(kind, local) if kind == 'cuda' else torch.device(kind)
    if kind == 'cuda':
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
    if cfg.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
    if size > 1:
        store, rank, size = next(rendezvous('env://', rank, size, timeout=timedelta(minutes=cfg.timeout_minutes)))
        if os.environ.get('LOCAL_WORLD_SIZE') == str(size):  # torchrun on one machine keeps its store when it restarts the
            store = dist.PrefixStore(os.environ.get('TORCHELASTIC_RESTART_COUNT', ''), store)  # group, the dead's addresses too
        dist.init_process_group('nccl' if kind == 'cuda' else 'gloo', store=store, rank=rank, world_size=size,
                                timeout=timedelta(minutes=cfg.timeout_minutes))
    return World(rank, size, device)


class Pieces:
    """A split cut into pieces of `length` tokens: inputs tokens[p * length:][:length], targets the same one further on.
    Each shard is cut by itself. `meta` is the folder's meta.json. Bad files end the program with a line that names them."""
    def __init__(self, folder: str, split: str, length: int, vocab_size: int | None = None):
        self.meta, self.length = read_meta(folder), length
        self.vocab_size = vocab_size or self.meta['vocab_size']
        dtype = np.dtype(self.meta['dtype']).newbyteorder('<')
        self.paths, self.shards, fingerprint = [], [], 0
        for shard in self.meta['splits'].get(split, {}).get('shards', []):
            path = os.path.join(folder, shard['file'])
            if not os.path.isfile(path):
                fail(f'{path} is missing; prepare the data again')
            if os.path.getsize(path) != shard['tokens'] * dtype.itemsize:
                fail(f'{path} has {os.path.getsize(path)} bytes, {folder}/meta.json says {shard["tokens"]} tokens of '
                     f'{dtype.itemsize}: it was cut off or changed; prepare the data again')
            if shard['tokens'] <= length:
                continue  # too short for a piece
            tokens = np.memmap(path, dtype=dtype, mode='r')
            for at in np.linspace(0, len(tokens) - 4096, 32).clip(0).astype(int):  # a look at 32 places
                self.check(tokens[at:at + 4096], path)
                fingerprint = zlib.crc32(tokens[at:at + 4096].tobytes(), fingerprint)
            self.paths.append(path)
            self.shards.append(tokens)
        counts = [(len(tokens) - 1) // length for tokens in self.shards]
        self.starts = np.cumsum([0, *counts])  # the first piece of each shard
        if not self.shards:
            fail(f'{folder}: no shard of the {split} split holds a piece of context_length + 1 = {length + 1} tokens')
        self.identity = {'tokenizer': self.meta['tokenizer'], 'tokenizer_sha256': self.meta.get('tokenizer_sha256'),
                         'vocab_size': self.meta['vocab_size'], f'{split} tokens': sum(map(len, self.shards)),
                         f'{split} fingerprint': fingerprint}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def check(self, tokens: np.ndarray, path: str) -> None:
        if (highest := int(tokens.max())) >= self.vocab_size:
            fail(f'{path} holds token {highest}, outside the vocabulary of {self.vocab_size}: the data is another '
                 "tokenizer's or damaged (prepare_slimpajama.py --verify checks it)", everywhere=True)

    def batch(self, pieces: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, length) of these pieces."""
        rows = []
        for piece in pieces:
            shard = int(np.searchsorted(self.starts, piece, side='right')) - 1
            at = int(piece - self.starts[shard]) * self.length
            rows.append(self.shards[shard][at:at + self.length + 1])
            self.check(rows[-1], self.paths[shard])
        block = torch.from_numpy(np.stack(rows).astype(np.int64))
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def read_meta(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, 'meta.json')
    try:
        with open(path, encoding='utf-8') as file:
            meta = json.load(file)
        if meta['format'] != FORMAT:
            fail(f'{path}: format {meta["format"]}, this version reads {FORMAT}; prepare the data again')
        if not {'splits', 'vocab_size', 'dtype', 'tokenizer'} <= set(meta):
            raise KeyError
        return meta
    except FileNotFoundError:
        fail(f'{path} is missing: python prepare_slimpajama.py makes data/slimpajama; --data={BUILTIN} needs no download')
    except (ValueError, KeyError, TypeError):
        fail(f'{path} is damaged: prepare the data again')


class Order:
    """Which pieces step s reads: a pure function of (seed, s). Every epoch is a permutation of all pieces."""
    def __init__(self, n_pieces: int, batch_size: int, seed: int):
        self.n_pieces, self.batch_size, self.seed, self.epoch, self.permutation = n_pieces, batch_size, seed, -1, None

    def __call__(self, step: int) -> np.ndarray:
        return np.array([self.piece(step * self.batch_size + b) for b in range(self.batch_size)])

    def piece(self, n: int) -> int:
        if n // self.n_pieces != self.epoch:
            self.epoch = n // self.n_pieces
            self.permutation = np.random.default_rng([self.seed, self.epoch]).permutation(self.n_pieces)
        return self.permutation[n % self.n_pieces]


def lr_at(step: int, steps: int, cfg: TrainConfig) -> float:
    """Learning rate of step 0, 1, ..., steps - 1: linear warm-up, then a cosine down to final_lr."""
    warmup = round(cfg.warmup * steps)
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return cfg.learning_rate * (cfg.final_lr + (1 - cfg.final_lr) * (1 + math.cos(math.pi * progress)) / 2)


def save_checkpoint(out_dir: str, name: str, state: dict[str, Any]) -> bool:
    """Write a checkpoint whole or not at all. False, with a warning, where the disk does not take it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = os.path.join(out_dir, name)
    try:
        write_whole(path, buffer.getbuffer())
        return True
    except OSError as error:
        print(f'WARNING: {path} not written ({error.strerror}); the run goes on, earlier checkpoints are whole', flush=True)
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        return False


def checkpoints(out_dir: str) -> list[str]:
    """The numbered checkpoints, oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(out_dir), 'step_*.pt')))


def read_checkpoint(path: str) -> dict[str, Any]:
    """A checkpoint's content: tensors and plain values only, every byte checked. ValueError where it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f'checksum of {damaged}')
        return torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f'{path} is damaged ({str(error).splitlines()[0] if str(error) else type(error).__name__})') from None


def last_checkpoint(out_dir: str) -> dict[str, Any] | None:
    """The newest whole checkpoint; damaged ones are named and passed over. None where there is none."""
    for path in reversed(checkpoints(out_dir)):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            print(f'WARNING: {error}; trying the one before it', flush=True)
    return None


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """The fields of two descriptions that differ, in words; how attention is computed (attn_impl) makes no difference."""
    return ', '.join(f'{k}={saved.get(k)} (now {now[k]})' for k in now if now[k] != saved.get(k) and k != 'attn_impl')


class Log:
    """log.jsonl and TensorBoard from the same numbers; a disk that takes no more loses lines, not the run."""
    def __init__(self, out_dir: str, step: int, tensorboard: bool):
        self.path, self.writer = os.path.join(out_dir, 'log.jsonl'), None
        lines = []
        if os.path.exists(self.path):  # what came after the checkpoint will be done, and logged, again
            with open(self.path, encoding='utf-8', errors='replace') as file:
                for line in file:
                    with contextlib.suppress(ValueError):
                        if json.loads(line)['step'] <= step:
                            lines.append(line)
        write_whole(self.path, ''.join(lines).encode())
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
                self.writer = SummaryWriter(out_dir, purge_step=step + 1)
            except ImportError:
                print('TensorBoard is not installed; log.jsonl has the same numbers', flush=True)

    def __call__(self, step: int, **values: Any) -> None:
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}  # JSON has no NaN
        try:
            with open(self.path, 'a', encoding='utf-8') as file:
                file.write(json.dumps({'step': step, **values}) + '\n')
            for name, value in values.items():
                if self.writer and isinstance(value, (int, float)):
                    self.writer.add_scalar(name, value, step)
        except OSError as error:
            print(f'WARNING: step {step} not logged ({error.strerror})', flush=True)


class Signals:
    """SIGTERM and SIGINT ask for a stop after the step; a second SIGINT stops at once."""
    def __init__(self) -> None:
        self.received: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: Any) -> None:
        if self.received and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.received = signal.Signals(number).name


def memory_gb(device: torch.device) -> float:
    """The most memory used so far: the GPU's, or the process's."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024) / 1e9


class Trainer:
    """One training run: what it needs is made in order in __init__, `train` is the loop."""
    def __init__(self, cfg: TrainConfig, model_options: dict[str, Any], world: World):
        self.cfg, self.world = cfg, world
        if cfg.data.rstrip('/') == BUILTIN and not os.path.exists(os.path.join(BUILTIN, 'meta.json')):
            if world.rank == 0:
                print(f"Preparing {BUILTIN} from the Python standard library's source", flush=True)
                prepare_builtin(BUILTIN)
            world.share(None)  # wait for it
        data_vocab = read_meta(cfg.data)['vocab_size']
        self.model_cfg = build(ModelConfig, {'vocab_size': data_vocab, **model_options})
        if self.model_cfg.vocab_size < data_vocab:
            fail(f'vocab_size={self.model_cfg.vocab_size} is smaller than the vocabulary of {cfg.data}, {data_vocab}')
        self.data = {s: Pieces(cfg.data, s, self.model_cfg.context_length, data_vocab) for s in ('train', 'val', 'test')}
        self.order = Order(len(self.data['train']), cfg.batch_size, cfg.seed)
        with torch.device('meta'):
            llama_params = Transformer(self.model_cfg.llama()).num_params()
        self.tokens_per_step = cfg.batch_size * self.model_cfg.context_length
        self.steps = math.ceil((cfg.tokens or cfg.tokens_per_param * llama_params) / self.tokens_per_step)

        torch.manual_seed(cfg.seed)
        self.model = Transformer(self.model_cfg).to(world.device)
        self.model.activation_checkpointing = cfg.activation_checkpointing
        matrices = self.model.matrices()
        rest = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        self.optimizer = torch.optim.AdamW(
            [{'params': matrices, 'weight_decay': cfg.weight_decay}, {'params': rest, 'weight_decay': 0.0}],
            betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=world.device.type in ('cpu', 'cuda'))
        on_gpu = world.device.type == 'cuda'
        bf16 = cfg.dtype == 'bfloat16' or (
            cfg.dtype == 'auto' and on_gpu and torch.cuda.is_bf16_supported(including_emulation=False))
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)
        self.step, self.best, self.recent, self.skipped, self.in_a_row, self.val_loss = 0, math.inf, [], 0, 0, None
        if cfg.init_from == 'resume':
            self.resume()
        if world.rank == 0:
            self.save_config()
            self.log = Log(cfg.out_dir, self.step, cfg.tensorboard)
        compiled = cfg.compile or (cfg.compile is None and on_gpu)
        self.compiled = self.parallel = torch.compile(self.model) if compiled else self.model
        if world.size > 1:
            self.parallel = DistributedDataParallel(self.compiled, device_ids=[world.device] if on_gpu else None,
                                                    gradient_as_bucket_view=True)

    def resume(self) -> None:
        """Take model, optimizer and step from rank 0's last whole checkpoint; from the start where there is none yet."""
        state = self.world.share(last_checkpoint(self.cfg.out_dir) if self.world.rank == 0 else None)
        if state is None:
            if self.world.rank == 0:
                print(f'No checkpoint in {self.cfg.out_dir} yet: starting from step 0', flush=True)
            return
        if different := differences(state['model_config'], asdict(self.model_cfg)):
            fail(f'the checkpoint in {self.cfg.out_dir} is of another architecture: {different}')
        if different := differences(state['data'], self.data['train'].identity):
            fail(f'data={self.cfg.data} is not what the run in {self.cfg.out_dir} was trained on: {different}')
        self.model.load_state_dict(state['model'])
        self.optimizer.load_state_dict(state['optimizer'])
        for group, weight_decay in zip(self.optimizer.param_groups, (self.cfg.weight_decay, 0.0), strict=True):
            group.update(betas=(self.cfg.beta1, self.cfg.beta2), eps=self.cfg.adam_eps, weight_decay=weight_decay)
        self.step, self.best, self.recent, self.skipped = (state[k] for k in ('step', 'best', 'recent', 'skipped'))
        if self.world.rank == 0:
            print(f'Resuming {self.cfg.out_dir} after step {self.step}', flush=True)

    def save_config(self) -> None:
        os.makedirs(self.cfg.out_dir, exist_ok=True)
        for leftover in glob.glob(os.path.join(glob.escape(self.cfg.out_dir), '*.tmp')):
            os.remove(leftover)
        write_whole(os.path.join(self.cfg.out_dir, 'config.json'), json.dumps(
            {'train': asdict(self.cfg), 'model': asdict(self.model_cfg), 'launcher': launcher()}, indent=1).encode())

    def checkpoint(self, best: bool = False) -> None:
        """Write the state after self.step steps, and let the oldest numbered checkpoints go."""
        if self.world.rank != 0:
            return
        name = 'best.pt' if best else f'step_{self.step:08d}.pt'
        written = save_checkpoint(self.cfg.out_dir, name, {
            'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(), 'step': self.step,
            'best': self.best, 'recent': self.recent, 'skipped': self.skipped, 'model_config': asdict(self.model_cfg),
            'data': self.data['train'].identity, 'data_dir': self.cfg.data})
        if written and not best:
            for old in checkpoints(self.cfg.out_dir)[:-self.cfg.keep_checkpoints]:
                os.remove(old)

    def micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's part of the step's global batch, a micro-batch at a time."""
        mine = np.split(self.order(self.step), self.world.size)[self.world.rank]
        for pieces in np.split(mine, len(mine) // self.cfg.micro_batch_size):
            x, y = self.data['train'].batch(pieces)
            yield x.to(self.world.device, non_blocking=True), y.to(self.world.device, non_blocking=True)

    def train_step(self) -> tuple[float, float]:
        """Forward, backward, update. Returns the global batch's mean loss and gradient norm; skips the update, in all
        processes alike, unless both are finite."""
        lr = lr_at(self.step, self.steps, self.cfg)
        for group in self.optimizer.param_groups:
            group['lr'] = lr
        total, accumulation = torch.zeros((), device=self.world.device), self.cfg.batch_size // (
            self.world.size * self.cfg.micro_batch_size)
        for m, (x, y) in enumerate(self.micro_batches()):
            if self.world.size > 1:
                self.parallel.require_backward_grad_sync = m == accumulation - 1
            with self.autocast:
                loss = self.parallel(x, y)[1] / accumulation
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip)
        loss, norm = float(self.world.sum(total) / self.world.size), float(norm)
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @torch.no_grad()
    def evaluate(self, split: str, tokens: int) -> float:
        """Mean loss over fixed whole pieces of a split, evenly spaced where `tokens` does not reach for all."""
        data, world = self.data[split], self.world
        pieces = np.linspace(0, len(data), min(len(data), max(1, tokens // data.length)), endpoint=False).astype(int)
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        mine = pieces[world.rank::world.size]
        for at in range(0, len(mine), self.cfg.micro_batch_size):
            x, y = data.batch(mine[at:at + self.cfg.micro_batch_size])
            with self.autocast:
                total += float(self.compiled(x.to(world.device), y.to(world.device))[1]) * len(x)
        self.model.train()
        return float(world.sum(total)) / len(pieces)

    def watch(self, loss: float, norm: float) -> None:
        """Log spikes of the loss, count steps skipped for their numbers, give up after max_skipped of those in a row."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            if len(self.recent) >= 20 and loss > (mean := statistics.fmean(self.recent)) + max(
                    0.5, 6 * statistics.stdev(self.recent)):
                self.report(f'step {self.step}: loss spike, {loss:.3f} after {mean:.3f}', event='spike', loss=loss)
            self.recent = [*self.recent[-99:], loss]
            return
        self.in_a_row, self.skipped = self.in_a_row + 1, self.skipped + 1
        self.report(f'step {self.step} skipped: loss {loss}, gradient norm {norm}', event='skipped', loss=loss, grad_norm=norm)
        if self.in_a_row > self.cfg.max_skipped:
            last = (checkpoints(self.cfg.out_dir) or ['none'])[-1]
            fail(f'{self.in_a_row} steps in a row without a finite loss and gradient, up to batch {self.step - 1}; last good '
                 f'checkpoint: {last}; try a lower learning_rate, or look at that batch')

    def report(self, text: str, **values: Any) -> None:
        """A line on the screen and its values in the log, from rank 0."""
        if self.world.rank == 0:
            print(text, flush=True)
            self.log(self.step, **values)

    def train(self, signals: Signals) -> int:
        """The loop. Returns the exit code: 0 finished, STOPPED asked to stop, 1 given up."""
        cfg, world = self.cfg, self.world
        begin, spent, since = time.monotonic(), 0.0, self.step
        peak = peak_flops(world.device, self.dtype) * world.size
        if world.rank == 0:
            print(f'{cfg.out_dir}: {self.model.num_params():,} parameters, {self.steps:,} steps of {self.tokens_per_step:,} '
                  f'tokens = {self.steps * self.tokens_per_step:,}, {world.size} x {world.device.type}, '
                  f'{str(self.dtype).removeprefix("torch.")}, {self.model.attention_path(world.device, self.dtype)}; '
                  f'{len(self.data["train"]):,} pieces an epoch', flush=True)
        while self.step < self.steps:
            start = time.monotonic()
            loss, norm = self.train_step()
            spent += time.monotonic() - start
            self.step += 1
            self.watch(loss, norm)
            if self.step % cfg.log_interval == 0 or self.step == self.steps:
                rate, done = (self.step - since) * self.tokens_per_step / spent, self.step * self.tokens_per_step
                mfu, left = self.model.estimate_mfu(rate, peak), (self.steps - self.step) * self.tokens_per_step / rate
                lr, memory = self.optimizer.param_groups[0]['lr'], memory_gb(world.device)
                self.report(f'step {self.step:>6,}/{self.steps:,} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.2f} | '
                            f'{rate:,.0f} tok/s | MFU {mfu:.1%} | {memory:.2f} GB | ETA {timedelta(seconds=round(left))}',
                            tokens=done, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=rate, mfu=mfu, memory_gb=memory,
                            skipped=self.skipped)
                spent, since = 0.0, self.step
            if self.step % cfg.eval_interval == 0 or self.step == self.steps:
                self.val_loss = self.evaluate('val', cfg.eval_tokens)
                self.report(f'step {self.step:>6,}: validation loss {self.val_loss:.4f}, perplexity '
                            f'{perplexity(self.val_loss):.3f}', val_loss=self.val_loss)
                if self.val_loss < self.best:
                    self.best = self.val_loss
                    self.checkpoint(best=True)
            minutes = (time.monotonic() - begin) / 60
            reason = signals.received or (self.step >= (cfg.stop_step or math.inf) and 'stop_step') or (
                cfg.max_minutes is not None and minutes >= cfg.max_minutes and 'max_minutes') or ''
            stop = float(world.sum(torch.tensor(float(bool(reason))))) > 0
            if self.step % cfg.checkpoint_interval == 0 or self.step == self.steps or stop:
                self.checkpoint()
            if stop and self.step < self.steps:
                if world.rank == 0:
                    print(f'Stopped after step {self.step} ({reason or "another process was asked to"}); go on with '
                          f'--init_from=resume --out_dir={cfg.out_dir}', flush=True)
                return STOPPED
        self.finish(time.monotonic() - begin)
        return 0

    def finish(self, seconds: float) -> None:
        """Test perplexity, result.json, a sample of text."""
        test_loss, val_loss = self.evaluate('test', self.cfg.test_tokens), self.val_loss
        if val_loss is None:  # resumed after the last step
            val_loss = self.evaluate('val', self.cfg.eval_tokens)
        if self.world.rank != 0:
            return
        write_whole(os.path.join(self.cfg.out_dir, 'result.json'), json.dumps({
            'test_loss': test_loss, 'test_perplexity': perplexity(test_loss), 'val_loss': val_loss,
            'val_perplexity': perplexity(val_loss), 'parameters': self.model.num_params(), 'steps': self.steps,
            'tokens': self.steps * self.tokens_per_step, 'flops_per_token': self.model.flops_per_token(),
            'skipped': self.skipped, 'seconds': seconds}, indent=1).encode())
        print(f'Finished in {timedelta(seconds=round(seconds))}: test perplexity {perplexity(test_loss):.3f}, loss '
              f'{test_loss:.4f} nats a token. A sample; python sample.py --out_dir={self.cfg.out_dir} makes more:', flush=True)
        if self.cfg.sample_tokens:
            print(sample_text(self.model, self.cfg.data, '', self.cfg.sample_tokens, 0.8, None, self.cfg.seed), flush=True)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def sample_text(model: Transformer, data: str, prompt: str, tokens: int, temperature: float, top_k: int | None,
                seed: int) -> str:
    """`prompt` and its continuation, by the tokenizer of the data folder."""
    tokenizer = load_tokenizer(data)
    device = model.embedding.device
    idx = torch.tensor([[tokenizer.bos, *tokenizer.encode(prompt)]], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return tokenizer.decode(model.generate(idx, tokens, temperature, top_k, generator)[0].tolist())


def launcher() -> str:
    """What started this process, the same after torchrun restarts it."""
    return f'{socket.gethostname()}:{os.getppid()}'


def read_config(out_dir: str | None) -> dict[str, Any] | None:
    """A run's config.json; None where there is none that can be read."""
    try:
        with open(os.path.join(out_dir or '', 'config.json'), encoding='utf-8') as file:
            config = json.load(file)
        return config if {'train', 'model', 'launcher'} <= set(config) else None
    except (OSError, ValueError, TypeError):
        return None


def newest_run(mine: bool = False) -> str | None:
    """The folder under out/ whose run was started or resumed last, or last by this process's launcher."""
    runs = [os.path.dirname(path) for path in sorted(glob.glob('out/*/config.json'), key=os.path.getmtime)]
    if mine:
        runs = [run for run in runs if (read_config(run) or {}).get('launcher') == launcher()]
    return runs[-1] if runs else None


def fresh_run(model_options: dict[str, Any]) -> str:
    """A new folder under out/, named after the model."""
    cfg = build(ModelConfig, model_options)
    name = f'out/{cfg.size}-{cfg.attn}{cfg.attn_steps}-{cfg.mlp}{cfg.mlp_steps}'
    return next(path for n in range(1, 10_000) if not os.path.exists(path := name + (f'-{n}' if n > 1 else '')))


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    given = read_options(argv, TrainConfig, ModelConfig)
    restarted = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)) > 0  # torchrun --max-restarts
    resume, out_dir = given.get('init_from') == 'resume', given.get('out_dir')
    if restarted and not resume:
        out_dir = out_dir or newest_run(mine=True)
        resume = read_config(out_dir) is not None
    if resume:
        out_dir = out_dir or newest_run()
        saved = read_config(out_dir)
        if saved is None:
            fail(f'init_from=resume: no run in {out_dir or "out/"} (config.json is missing or damaged)')
        asked = {k: v for k, v in given.items() if k in saved['model'] and v is not None}
        if different := differences(saved['model'], asked):
            fail(f'the run in {out_dir} is of another architecture: {different}')
        given = {**saved['train'], 'stop_step': None, **saved['model'], **given, 'init_from': 'resume'}
    elif out_dir and (checkpoints(out_dir) or os.path.exists(os.path.join(out_dir, 'result.json'))):
        fail(f'out_dir={out_dir} holds a run already: --init_from=resume goes on with it, another --out_dir starts beside it')
    if given.get('size', 'mini') == 'mini' and not resume:
        mini = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'config', 'mini.py')
        given = {**read_options([mini], TrainConfig, ModelConfig), **given}
    cfg = build(TrainConfig, given)
    model_options = {k: v for k, v in given.items() if k in ModelConfig.__dataclass_fields__}
    world = start_world(cfg)
    cfg.out_dir = world.share(out_dir or fresh_run(model_options))
    signals = Signals()
    try:
        code = Trainer(cfg, model_options, world).train(signals)
    except torch.OutOfMemoryError as error:
        fail(f'out of memory at micro_batch_size={cfg.micro_batch_size}: halve it, or set --activation_checkpointing '
             f'({str(error).splitlines()[0]})', everywhere=True)
    except RuntimeError as error:  # what gloo and NCCL raise when another process is gone
        if world.size == 1:
            raise
        fail(f'process {world.rank} of {world.size} failed or lost the others: {str(error).splitlines()[0]}; once all can run '
             f'again, go on with --init_from=resume --out_dir={cfg.out_dir}', everywhere=True)
    if world.size > 1:
        dist.barrier()  # leave together: rank 0 was still writing
        dist.destroy_process_group()
    return code


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

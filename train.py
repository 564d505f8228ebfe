"""
Train Llama and CEM language models: on a laptop, a GPU, or many.

    python train.py                                                  the mini CEM model on the built-in corpus
    python train.py config/llama.py --size=86m                       one GPU
    torchrun --nproc_per_node=8 train.py config/cem_t2.py            eight
    python train.py --init_from=resume                               go on with the newest run, exactly where it was

Options are read from config files and --key=value, later ones win. A run lives in its out_dir: config.json, log.jsonl, the
last checkpoints, best.pt, TensorBoard's events, and result.json once it is finished.
"""
import glob
import json
import math
import os
import resource
import statistics
import sys
import time
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
from model import ModelConfig, Transformer
from nanocem.decode import generate
from nanocem.fast import attention_path, peak_flops
from nanocem.files import write_whole
from nanocem.runs import (
    Log,
    Signals,
    checkpoints,
    differences,
    fresh_run,
    last_checkpoint,
    launcher,
    newest_run,
    read_config,
    save_checkpoint,
)
from nanocem.shards import BUILTIN, Order, Pieces, read_meta
from nanocem.tokenizers import load_tokenizer

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


def lr_at(step: int, steps: int, cfg: TrainConfig) -> float:
    """Learning rate of step 0, 1, ..., steps - 1: linear warm-up, then a cosine down to final_lr."""
    warmup = round(cfg.warmup * steps)
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return cfg.learning_rate * (cfg.final_lr + (1 - cfg.final_lr) * (1 + math.cos(math.pi * progress)) / 2)


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
                from prepare_slimpajama import prepare_builtin
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
        matrices = self.model.decayed_parameters()
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
                  f'{str(self.dtype).removeprefix("torch.")}, {attention_path(self.model, world.device, self.dtype)}; '
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
    return tokenizer.decode(generate(model, idx, tokens, temperature, top_k, generator)[0].tolist())


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

"""
Train Llama and CEM language models: on a laptop, a GPU, or many.

    python train.py config/mini.py                           all-CEM on a laptop, in minutes
    python train.py config/llama.py config/mini.py           Llama, for comparison
    python train.py config/mini.py --text=book.txt           on a text of your own
    torchrun --nproc_per_node=8 train.py config/cem_t2.py    the paper's 134m on eight GPUs
    python train.py --init_from=resume                       continue the newest run

Later config files override earlier ones, and --key=value flags override files. A run's folder,
out_dir, holds config.json, log.jsonl, checkpoints, TensorBoard events and, at the end, result.json.
"""
import contextlib
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import UserError, build, command_line, convert_types, fail, in_range, read_options
from model import ModelConfig, Transformer
from nanocem import loss as loss_fn
from nanocem import runs
from nanocem.attention import describe_attention
from nanocem.data import BatchSampler, TokenDataset, evenly_spaced, read_meta
from nanocem.files import say, to_json, write_atomic
from nanocem.optim import make_optimizers
from nanocem.runs import perplexity
from nanocem.tokenizers import MODEL_FILE, load_tokenizer
from nanocem.world import Distributed, divide_batch, find_device, read_environment, report_errors
from prepare_slimpajama import find_data
from sample import sample_text

MAX_SKIPPED = 10  # after more consecutive steps without finite loss and gradient the run ends
STOPPED = 75  # exit code of a run that can continue (EX_TEMPFAIL: try again later)


@dataclass
class TrainConfig:
    """The run. The defaults are the paper's recipe (Table 2)."""
    data: str = 'data/slimpajama'  # folder of token shards; data/builtin is made on first use
    text: str | None = None  # train on this text file or folder instead, prepared on first use
    tokenizer: str | None = None  # for --text: byte, gpt2, llama, bpe2048 or FILE.model
    out_dir: str | None = None  # the run's folder; default: a new one, or the newest to resume
    init_from: str = 'scratch'  # resume: continue out_dir's run; RUN: start from its weights
    seed: int = 1337  # seed of the initial weights and of the order of the data
    tokens: int | None = None  # training tokens; default: tokens_per_param x parameters of Llama
    tokens_per_param: float = 20.0  # training tokens per parameter (Chinchilla)
    batch_size: int = 128  # sequences per step, over all processes
    micro_batch_size: int | None = None  # sequences per forward pass; default: up to 16,384 tokens
    optimizer: Literal['adamw', 'muon'] = 'adamw'  # muon: Muon for the layers' matrices
    learning_rate: float = 2e-3  # peak learning rate
    warmup: float = 0.05  # fraction of steps for warm-up
    final_lr: float = 0.1  # final learning rate, as a fraction of the peak
    beta1: float = 0.9  # AdamW's decay rate of the mean gradient
    beta2: float = 0.95  # AdamW's decay rate of the mean squared gradient
    adam_eps: float = 1e-9  # AdamW's epsilon
    weight_decay: float = 0.1  # weight decay, on matrices only
    grad_clip: float = 1.0  # clip gradients to this norm
    eval_interval: int = 500  # steps between validations
    eval_tokens: int = 2_000_000  # tokens per validation, the same ones every time
    test_tokens: int = 10_000_000  # tokens of the final test
    log_interval: int = 10  # steps between lines of log.jsonl
    checkpoint_interval: int = 1000  # steps between checkpoints, besides best.pt
    keep_checkpoints: int = 2  # number of checkpoints to keep, besides the best by validation
    stop_step: int | None = None  # write a checkpoint and stop after this step
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda if there is a GPU
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of matrix products; auto: by hardware
    attn_impl: Literal['auto', 'readable', 'blockwise', 'sdpa', 'triton'] = 'auto'  # nanocem
    compile: bool | None = None  # use torch.compile; default: on a GPU, or if it pays on a CPU
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    timeout_minutes: float = 10.0  # how long a process waits for the others
    tensorboard: bool = True  # write TensorBoard events beside log.jsonl
    sample_interval: int | None = None  # steps between samples of text; default: only at the end
    sample_tokens: int = 400  # length of a sample; 0: no sample

    def __post_init__(self) -> None:
        convert_types(self)
        in_range(self, 1, 10**6, 'batch_size micro_batch_size keep_checkpoints stop_step')
        in_range(self, 1, 10**6, 'eval_interval log_interval checkpoint_interval sample_interval')
        in_range(self, 1, 10**15, 'tokens eval_tokens test_tokens')
        in_range(self, 1e-30, 10**6, 'tokens_per_param adam_eps grad_clip timeout_minutes')
        in_range(self, 0, 10**6, 'learning_rate weight_decay sample_tokens')
        in_range(self, 0, 0.9999, 'warmup beta1 beta2')
        in_range(self, 0, 1, 'final_lr')
        in_range(self, 0, 2**63 - 1, 'seed')


# Options that must stay the same when a run is resumed; so must its model and its data
RECIPE = ('seed', 'batch_size', 'optimizer', 'learning_rate', 'warmup', 'final_lr', 'beta1',
          'beta2', 'adam_eps', 'weight_decay', 'grad_clip', 'eval_tokens')


def learning_rate(cfg: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of step 0, 1, ..., steps - 1: a linear warm-up to the peak, then a
    cosine down to the fraction final_lr of it."""
    warmup_steps = round(cfg.warmup * steps)
    if step < warmup_steps:
        return cfg.learning_rate * ((step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2  # from 1 to 0
    return cfg.learning_rate * (cfg.final_lr + (1 - cfg.final_lr) * cosine)


class Trainer:
    """One training run: __init__ makes what it needs, `train` is the loop."""
    def __init__(self, cfg: TrainConfig, options: dict[str, Any], world: Distributed):
        self.cfg, self.world = cfg, world

        # The data: three splits, cut into sequences, and the order of the training sequences
        vocab_size = read_meta(cfg.data)['vocab_size']
        self.model_cfg = build(ModelConfig, {'vocab_size': vocab_size, **options})
        if self.model_cfg.vocab_size < vocab_size:
            fail(f'vocab_size={self.model_cfg.vocab_size}: {cfg.data} needs {vocab_size} or more')
        length = self.model_cfg.context_length
        self.data = {split: TokenDataset(cfg.data, split, length)
                     for split in ('train', 'val', 'test')}
        self.micro_batch_size = divide_batch(
            cfg.batch_size, cfg.micro_batch_size, world.size, length)
        self.order = BatchSampler(len(self.data['train']), cfg.batch_size, cfg.seed)

        # The token budget is computed from the Llama of this size, also for CEM
        with torch.device('meta'):
            llama_params = Transformer(self.model_cfg.llama()).num_params()
        self.tokens_per_step = cfg.batch_size * length
        tokens = cfg.tokens or cfg.tokens_per_param * llama_params
        self.max_steps = math.ceil(tokens / self.tokens_per_step)

        # The model
        torch.manual_seed(cfg.seed)
        self.raw_model = Transformer(self.model_cfg).to(world.device)
        self.raw_model.gradient_checkpointing = cfg.activation_checkpointing
        self.raw_model.set_attn_impl(cfg.attn_impl)
        self.flops_per_token = loss_fn.flops_per_token(self.raw_model)

        # Precision, compiler, optimizers, processes
        flops = self.max_steps * self.tokens_per_step * self.flops_per_token
        self.dtype, compiled, reason = world.run_on_rank0(
            loss_fn.precision_and_compiler, world.device, cfg.dtype, cfg.compile, flops)
        self.optimizers = make_optimizers(self.raw_model, cfg, self.dtype)
        self.precision = str(self.dtype).removeprefix('torch.') + (', compiled' if compiled else '')
        self.autocast = torch.autocast(
            world.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)
        self.attention = describe_attention(self.raw_model, world.device, self.dtype, compiled)
        if world.rank == 0 and world.device.type == 'cuda' and not compiled:
            say(f'Not compiled, which takes more memory: {reason or "compile=False"}')
        self.model = self.raw_model
        if compiled:  # on a CPU this compiles the blocks of raw_model in place
            self.model = loss_fn.compile_for(world.device, self.raw_model, self.attention)
        if world.size > 1:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

        # The state of the run
        self.step = 0  # steps done
        self.loss = self.grad_norm = self.lr = math.nan  # of the last step
        self.tokens_per_s, self.mfu = math.nan, None  # since the last log_step
        self.skipped = self.consecutive_skips = 0  # steps without a finite loss and gradient
        self.best = math.inf  # lowest validation loss
        self.val_loss: float | None = None  # of the last validation
        self.val_bits: float | None = None  # its bits per byte, after the last step
        self.start_time = time.monotonic()  # moved back by the duration of earlier sessions
        self.last_logged = 0  # step of the last log_step
        self.train_time = 0.0  # seconds spent in steps since then
        self.log: runs.Log | None = None  # only on rank 0
        self.tokenizer: Any = None  # only on rank 0, and None there if the data has none
        self.bar = tqdm(disable=True)

    def identity(self) -> dict[str, Any]:
        """Return what must stay the same when the run is resumed."""
        data = {k: v for split in self.data.values() for k, v in split.identity.items()}
        return {'model_config': asdict(self.model_cfg), 'data': data,
                'recipe': {name: getattr(self.cfg, name) for name in RECIPE}}

    def restore(self, resume: bool) -> None:
        """Restore the checkpoint, or load initial weights. UserError if either does not fit."""
        world, cfg = self.world, self.cfg
        state = None
        if resume:
            state = world.run_on_rank0(runs.resumed_state, cfg.out_dir, self.identity())
        if state is None:  # a new run, or one that stopped before its first checkpoint
            if cfg.init_from != 'scratch':
                source = world.run_on_rank0(runs.read_run, cfg.init_from)
                runs.load_weights(self.raw_model, source, self.identity(), cfg.init_from)
            return
        self.raw_model.load_state_dict(state['model'])
        for optimizer, saved in zip(self.optimizers, state['optimizers'], strict=True):
            optimizer.load_state_dict(saved)
        self.step = self.last_logged = state['step']
        self.skipped, self.consecutive_skips = state['skipped'], state['consecutive_skips']
        self.best = state['best']
        self.start_time -= state['seconds']
        if self.max_steps < self.step:
            fail(f'tokens={self.max_steps * self.tokens_per_step}: the run in {cfg.out_dir} has '
                 f'seen {self.step * self.tokens_per_step} already')
        if state['max_steps'] != self.max_steps:
            self.report(f'{self.max_steps:,} steps instead of {state["max_steps"]:,}: the learning '
                        'rate is from now on that of the new length')

    def checkpoint(self, best: bool = False) -> None:
        """Write the state after self.step steps."""
        if self.world.rank != 0:
            return
        state = {
            'model': self.raw_model.state_dict(),
            'optimizers': [optimizer.state_dict() for optimizer in self.optimizers],
            'step': self.step, 'seconds': time.monotonic() - self.start_time, 'best': self.best,
            'skipped': self.skipped, 'consecutive_skips': self.consecutive_skips,
            'max_steps': self.max_steps, 'data_dir': self.cfg.data, **self.identity()}
        runs.save_checkpoint(self.cfg.out_dir, state, best, self.cfg.keep_checkpoints)

    def batch(self, split: str, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (B, J) each, of these sequences of a split, on the device."""
        x, y = self.data[split].batch(indices)
        device = self.world.device
        on_gpu = device.type == 'cuda'
        if on_gpu:  # from pinned memory the copy overlaps with the GPU's work
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(device, non_blocking=on_gpu), y.to(device, non_blocking=on_gpu)

    def train_step(self) -> tuple[float, float]:
        """Take one optimizer step on one global batch. Returns its mean loss and gradient norm."""
        cfg, world = self.cfg, self.world

        # Set the learning rate of this step
        self.lr = learning_rate(cfg, self.step, self.max_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group['lr'] = self.lr

        # This process's share of the global batch: indices (grad_accum_steps, micro_batch_size)
        batch = self.order(self.step).reshape(world.size, -1, self.micro_batch_size)[world.rank]
        grad_accum_steps = len(batch)

        # Accumulate gradients over forward and backward passes; DDP all-reduces them in the last
        loss = torch.zeros((), device=world.device)
        for micro_step, indices in enumerate(batch):
            x, y = self.batch('train', indices)
            if world.size > 1:
                self.model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            with self.autocast:
                _, micro_loss = self.model(x, y)
                micro_loss = micro_loss / grad_accum_steps
            micro_loss.backward()
            loss += micro_loss.detach()

        # Clip the gradient, and average the loss over processes
        grad_norm = torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), cfg.grad_clip)
        loss, grad_norm = float(world.sum(loss) / world.size), float(grad_norm)

        # Update the weights if both are finite; both are the same in all processes
        if math.isfinite(loss) and math.isfinite(grad_norm):
            for optimizer in self.optimizers:
                optimizer.step()
        self.raw_model.zero_grad(set_to_none=True)
        return loss, grad_norm

    @torch.no_grad()
    def evaluate(self, split: str, max_tokens: int, with_bits: bool = False,
                 ) -> tuple[float, float | None]:
        """Return a split's mean loss over at most `max_tokens` tokens, in the same evenly spaced
        sequences every time, and its bits per byte: None unless `with_bits`, or without a
        tokenizer. Tokens without bytes, such as BOS, do not count in bits per byte."""
        data, world, size = self.data[split], self.world, self.micro_batch_size
        token_bytes = world.run_on_rank0(self.padded_token_bytes) if with_bits else None
        if token_bytes is not None:
            token_bytes = token_bytes.to(world.device)
        indices = evenly_spaced(len(data), max_tokens // data.length)[world.rank::world.size]
        # (tokens that have bytes, others) x (nats, tokens, bytes)
        sums = torch.zeros(2, 3, dtype=torch.float64)
        self.raw_model.eval()
        # The model returns only a mean loss. So a first pass takes the tokens that have bytes, and
        # a second the others, in the sequences that hold some
        for row, is_text in enumerate((True, False)):
            left_out = np.zeros(len(indices), dtype=bool)  # sequences with tokens not in this pass
            for i in range(0, len(indices), size):
                x, y = self.batch(split, indices[i:i + size])
                n_bytes = torch.ones_like(y) if token_bytes is None else token_bytes[y]
                counts = (n_bytes > 0) == is_text
                left_out[i:i + size] = (~counts).any(dim=1).cpu()
                # Run a smaller last batch uncompiled: it is not worth a compilation
                stance = loss_fn.eager() if len(x) < size else contextlib.nullcontext()
                with self.autocast, stance:
                    loss = self.model(x, y.masked_fill(~counts, loss_fn.NO_TARGET))[1]
                n = int(counts.sum())
                sums[row] += torch.tensor([float(loss) * n if n else 0.0, n, int(n_bytes.sum())])
            indices = indices[left_out]
        self.raw_model.train()
        sums = world.sum(sums)
        (text_nats, _, text_bytes), (nats, tokens, _) = sums[0].tolist(), sums.sum(dim=0).tolist()
        bits = text_nats / max(1, text_bytes) / math.log(2)
        return nats / tokens, None if token_bytes is None else bits

    def padded_token_bytes(self) -> Tensor | None:
        """Return the number of bytes of each token (vocab_size,); None without a tokenizer."""
        if self.tokenizer is None:
            return None
        token_bytes = self.tokenizer.token_bytes()
        return F.pad(token_bytes, (0, self.model_cfg.vocab_size - len(token_bytes)))

    def train(self, signals: runs.Signals) -> int:
        """Train until the last step or a stop. Returns the exit code: 0, or STOPPED."""
        cfg, max_steps = self.cfg, self.max_steps
        stop_reason = self.stop_reason(signals)
        while self.step < max_steps and not stop_reason:
            # Take one optimizer step, and time it
            t0 = time.monotonic()
            self.loss, self.grad_norm = self.train_step()
            self.train_time += time.monotonic() - t0
            self.step += 1
            self.count_skips()
            self.measure_speed()
            last = self.step == max_steps
            # Log the training loss and the speed
            if self.step % cfg.log_interval == 0 or last:
                self.log_step()
            # Evaluate on the validation split, and keep the best weights
            if self.step % cfg.eval_interval == 0 or last:
                self.validate()
            # Print a sample of text
            if cfg.sample_interval and self.step % cfg.sample_interval == 0 and not last:
                self.sample()
            # Write a checkpoint, and stop if any process was told to
            stop_reason = self.stop_reason(signals)
            if self.step % cfg.checkpoint_interval == 0 or last or stop_reason:
                self.checkpoint()
        if self.step < max_steps:
            self.report(f'Stopped after step {self.step} ({stop_reason}); go on with '
                        f'--init_from=resume --out_dir={shlex.quote(cfg.out_dir)}')
            return STOPPED
        self.finish()
        return 0

    def count_skips(self) -> None:
        """Count and report skipped steps. UserError after too many consecutive ones."""
        if math.isfinite(self.loss) and math.isfinite(self.grad_norm):
            self.consecutive_skips = 0
            return
        self.skipped += 1
        self.consecutive_skips += 1
        self.report(f'step {self.step}: skipped, loss {self.loss}, gradient norm {self.grad_norm}',
                    event='skipped', loss=self.loss, grad_norm=self.grad_norm)
        if self.consecutive_skips > MAX_SKIPPED:
            fail(f'{self.consecutive_skips} consecutive steps without a finite loss and gradient, '
                 f'up to step {self.step}: try a lower learning_rate')

    def measure_speed(self) -> None:
        """Measure tokens per second and, if the GPU's peak is known, model FLOPs utilization."""
        self.tokens_per_s = (self.step - self.last_logged) * self.tokens_per_step / self.train_time
        peak = loss_fn.peak_flops(self.world.device, self.dtype) * self.world.size
        mfu = self.flops_per_token * self.tokens_per_s / peak
        self.mfu = mfu if math.isfinite(mfu) else None
        self.bar.set_postfix_str(f'loss {self.loss:.4f}, {self.tokens_per_s:,.0f} tok/s', False)
        self.bar.update()

    def log_step(self) -> None:
        """Write the training loss and the speed to the log."""
        if self.world.rank == 0:
            self.log(self.step, tokens=self.step * self.tokens_per_step, loss=self.loss,
                     lr=self.lr, grad_norm=self.grad_norm, tokens_per_s=self.tokens_per_s,
                     mfu=self.mfu, memory_gb=torch.cuda.max_memory_allocated() / 1e9,
                     skipped=self.skipped, seconds=time.monotonic() - self.start_time)
        self.last_logged, self.train_time = self.step, 0.0

    def validate(self) -> None:
        """Evaluate on the validation split, report, and write best.pt if the loss is the lowest."""
        steps = self.max_steps
        last = self.step == steps
        self.val_loss, self.val_bits = self.evaluate('val', self.cfg.eval_tokens, with_bits=last)
        seconds = round((steps - self.step) * self.tokens_per_step / self.tokens_per_s)
        mfu = '' if self.mfu is None else f'MFU {self.mfu:.1%} | '
        self.report(f'step {self.step:>6,}/{steps:,} | loss {self.loss:.4f} | validation loss '
                    f'{self.val_loss:.4f}, perplexity {perplexity(self.val_loss):.3f} | '
                    f'{self.tokens_per_s:,.0f} tok/s | {mfu}ETA {timedelta(seconds=seconds)}',
                    val_loss=self.val_loss)
        if self.val_loss < self.best:
            self.best = self.val_loss
            self.checkpoint(best=True)

    def stop_reason(self, signals: runs.Signals) -> str | None:
        """Return why the run should stop now, or None. All processes decide the same."""
        reason = signals.received
        if self.cfg.stop_step is not None and self.step >= self.cfg.stop_step:
            reason = 'stop_step'
        if self.world.any(reason is not None):
            return reason or 'another process was asked'
        return None

    def report(self, text: str, **values: Any) -> None:
        """Print a line, and write its values to the log. Only rank 0 does."""
        if self.world.rank == 0:
            self.bar.clear()
            say(text)
            if values:
                self.log(self.step, **values)

    def open_folder(self) -> None:
        """Write config.json, load the tokenizer, open the log, and print what the run will do."""
        cfg, steps, n_sequences = self.cfg, self.max_steps, len(self.data['train'])
        config = {'train': asdict(cfg), 'model': asdict(self.model_cfg)}
        write_atomic(f'{cfg.out_dir}/config.json', to_json(config, indent=1))
        try:
            self.tokenizer = load_tokenizer(cfg.data)
            if self.tokenizer.path:  # the run can be sampled and exported without its data
                write_atomic(f'{cfg.out_dir}/{MODEL_FILE}', Path(self.tokenizer.path).read_bytes())
        except UserError as error:
            say(f'WARNING: {error}; the run goes on, without samples and bits per byte')
        self.log = runs.Log(cfg.out_dir, self.step, cfg.tensorboard)
        epochs = steps * cfg.batch_size / n_sequences
        say(f'{cfg.out_dir}: {self.raw_model.num_params():,} parameters, {steps:,} steps of '
            f'{self.tokens_per_step:,} tokens = {steps * self.tokens_per_step:,}, '
            f'{epochs:.3g} epochs of {n_sequences:,} sequences; '
            f'{self.world.size} x {self.world.device.type}, {self.precision}, {self.attention}'
            + (f'; resuming after step {self.step}' if self.step else ''))
        # On a terminal, a progress bar
        self.bar = tqdm(total=steps, initial=self.step, unit='step', leave=False, disable=None)

    def sample(self) -> None:
        """Print a text of the model, and write it to the log."""
        cfg = self.cfg
        if self.tokenizer is None or not cfg.sample_tokens:
            return
        self.raw_model.eval()
        try:
            with loss_fn.eager():
                text = sample_text(self.raw_model, self.tokenizer, prompt='',
                                   tokens=cfg.sample_tokens, temperature=0.8, top_k=None,
                                   seed=cfg.seed)
        except UserError as error:  # logits that are not finite, for example, do not end a run
            text = f'No sample: {error}'
        self.raw_model.train()
        self.report(text, sample=text)

    def finish(self) -> None:
        """Evaluate the last weights on the test split, write result.json, print a sample."""
        cfg, seconds = self.cfg, time.monotonic() - self.start_time
        test_loss, test_bits = self.evaluate('test', cfg.test_tokens, with_bits=True)
        if self.val_loss is None:  # resumed after the last step
            self.val_loss, self.val_bits = self.evaluate('val', cfg.eval_tokens, with_bits=True)
        if not math.isfinite(test_loss):
            fail(f'test loss {test_loss}: try a lower learning_rate or init_std')
        self.report(f'Finished in {timedelta(seconds=round(seconds))}: test perplexity '
                    f'{perplexity(test_loss):.3f}, loss {test_loss:.4f} nats a token')
        result = {
            'val_bits_per_byte': self.val_bits, 'test_bits_per_byte': test_bits,
            'test_loss': test_loss, 'test_perplexity': perplexity(test_loss),
            'val_loss': self.val_loss, 'val_perplexity': perplexity(self.val_loss),
            'parameters': self.raw_model.num_params(), 'steps': self.step,
            'tokens': self.step * self.tokens_per_step, 'flops_per_token': self.flops_per_token,
            'skipped': self.skipped, 'precision': self.precision, 'seconds': seconds}
        path = f'{cfg.out_dir}/result.json'
        self.world.run_on_rank0(write_atomic, path, to_json(result, indent=1))
        self.sample()


@command_line
def main(argv: list[str]) -> int:
    world, code = read_environment(), 0
    with report_errors(world), contextlib.ExitStack() as stack:
        # Read the options. Those given override those of the run to resume or to start from
        given = read_options(argv, TrainConfig, ModelConfig)
        out_dir, resume = runs.find_run(given.get('init_from'), given.get('out_dir'))
        options = (runs.resumed_options(out_dir, given, TrainConfig) if resume
                   else runs.new_options(given))
        cfg = build(TrainConfig, options)
        world.device = find_device(cfg.device, world.local_rank)
        loss_fn.keep_freed_memory()

        # Find or prepare the data before the processes connect: it may take longer than they wait
        # for each other. One prepares it, and the others wait for its lock. Only rank 0 prints. A
        # resumed run uses the data that it has.
        if not (resume and os.path.exists(f'{cfg.data}/meta.json')):
            fine_tuning = cfg.text and cfg.init_from != 'scratch'  # the text gets its tokenizer
            with contextlib.redirect_stdout(None if world.rank else sys.stdout):
                cfg.data = find_data(cfg.data, cfg.text, cfg.tokenizer,
                                     runs.read_run(cfg.init_from) if fine_tuning else None)

        # Connect the processes, and lock the run's folder
        world.connect(cfg.timeout_minutes)
        signals = runs.Signals(announce=world.rank == 0)
        if resume:
            world.run_on_rank0(runs.lock_folder, out_dir, stack)
        trainer = Trainer(cfg, options, world)
        if not resume:
            out_dir = world.run_on_rank0(runs.new_folder, out_dir, trainer.model_cfg, stack)
        cfg.out_dir = out_dir

        # Train, unless the run is finished
        trainer.restore(resume)
        if resume and world.run_on_rank0(runs.is_finished, out_dir, trainer.max_steps):
            trainer.report(f'{out_dir} is finished after {trainer.max_steps:,} steps: a larger '
                           '--tokens trains on, evaluate.py evaluates it')
        else:
            world.run_on_rank0(trainer.open_folder)
            code = trainer.train(signals)
        del trainer  # its DDP must end before the process group, which could wait for it forever
        if world.size > 1:
            dist.barrier()  # wait for rank 0, which may still be writing
            dist.destroy_process_group()
    return code


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

"""
Train Llama and CEM language models: on a laptop, a GPU, or many.

    python train.py                                          the mini CEM model, built-in corpus
    python train.py --text=book.txt                          a text of your own
    python train.py config/llama.py --size=86m               one GPU
    torchrun --nproc_per_node=8 train.py config/cem_t2.py    eight
    python train.py --init_from=resume                       go on with the newest run

Options are read from config files and --key=value, later ones win. A run lives in its out_dir:
config.json, log.jsonl, checkpoints, TensorBoard's events, and result.json once it is finished.
"""
import contextlib
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import UserError, build, check_types, command_line, fail, in_range, read_options
from model import ModelConfig, Transformer
from nanocem import compute, fast, runs
from nanocem.data import BatchSampler, TokenDataset, evenly_spaced, read_meta
from nanocem.files import read_json, say, to_json, write_atomic
from nanocem.muon import Muon, block_matrices
from nanocem.runs import Schedule, perplexity
from nanocem.tokenizers import load_tokenizer
from nanocem.world import Distributed, report_errors, start_world
from prepare_slimpajama import find_data
from sample import sample_text

MAX_SKIPPED = 10  # steps in a row without a finite loss and gradient; more end the run
STOPPED = 75  # exit code of a run that can go on, checkpoint written (EX_TEMPFAIL: try again later)


@dataclass
class TrainConfig:
    """The run. Defaults are the paper's recipe (Table 2)."""
    data: str = 'data/slimpajama'  # folder of token shards; data/builtin is made on first use
    text: str | None = None  # train on this text file or folder instead, prepared on first use
    tokenizer: str | None = None  # of --text: byte, gpt2, llama, or llama's model file
    out_dir: str | None = None  # where the run lives; default: a new folder; to resume: the newest
    init_from: str = 'scratch'  # resume: the run in out_dir; or weights: a run's, or exported
    seed: int = 1337  # of the weights and of the order of the data
    tokens: int | None = None  # training tokens; default: tokens_per_param x its Llama's parameters
    tokens_per_param: float = 20.0  # Chinchilla's budget
    batch_size: int = 128  # sequences a step, over all processes
    micro_batch_size: int | None = None  # sequences a forward pass; default: at most 16,384 tokens
    optimizer: Literal['adamw', 'muon'] = 'adamw'  # muon: for the blocks' matrices
    learning_rate: float = 2e-3  # at its highest, after the warm-up
    warmup: float = 0.05  # share of the steps
    final_lr: float = 0.1  # the cosine's end, as a share of learning_rate
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    adam_eps: float = 1e-9  # AdamW
    weight_decay: float = 0.1  # on matrices only
    grad_clip: float = 1.0  # largest gradient norm
    eval_interval: int = 500  # steps between validations
    eval_tokens: int = 2_000_000  # validation reads this many tokens, the same every time
    test_tokens: int = 10_000_000  # the final test reads this many
    log_interval: int = 10  # steps between lines of log.jsonl; the screen has one a validation
    checkpoint_interval: int = 500  # steps between checkpoints
    keep_checkpoints: int = 2  # the last ones kept, besides the best by validation
    stop_step: int | None = None  # stop after this step of the schedule, checkpoint written
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda where there is one
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of products; auto: the faster
    attn_impl: Literal['auto', 'readable', 'sdpa', 'triton'] = 'auto'  # see nanocem/fast.py
    compile: bool | None = None  # torch.compile; default: on a GPU, in long runs on a CPU
    activation_checkpointing: bool = False  # recompute a block going back: less memory, more time
    deterministic: bool = False  # refuse GPU operations that are not reproducible to the bit
    timeout_minutes: float = 10.0  # how long a process waits for the others
    tensorboard: bool = True  # write TensorBoard events beside log.jsonl
    sample_interval: int | None = None  # steps between samples of text; default: at the end only
    sample_tokens: int = 400  # length of a sample; 0: none

    def __post_init__(self) -> None:
        check_types(self)
        in_range(self, 1, 10**6, 'batch_size micro_batch_size keep_checkpoints stop_step')
        in_range(self, 1, 10**6, 'eval_interval log_interval checkpoint_interval sample_interval')
        in_range(self, 1, 10**15, 'tokens eval_tokens test_tokens')
        in_range(self, 1e-30, 10**6, 'tokens_per_param adam_eps grad_clip timeout_minutes')
        in_range(self, 0, 10**6, 'learning_rate weight_decay sample_tokens')
        in_range(self, 0, 0.9999, 'warmup final_lr beta1 beta2')
        in_range(self, 0, 2**63 - 1, 'seed')
        if self.text == '':
            fail('text= is empty: expected a text file or folder')
        if self.tokenizer and not self.text:
            fail(f'tokenizer={self.tokenizer} is for --text=FILE: data has its own')


# What a run keeps to its last step, beside its model and data. All else may change when it is
# resumed, its length too (Schedule.extended).
RECIPE = ('text', 'tokenizer', 'seed', 'batch_size', 'optimizer', 'learning_rate', 'warmup',
          'final_lr', 'beta1', 'beta2', 'adam_eps', 'weight_decay', 'grad_clip', 'eval_tokens')


def make_optimizers(model: Transformer, cfg: TrainConfig,
                    dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """AdamW, which decays matrices only; with Muon, multiplying in dtype, it leaves it the matrices
    of the blocks. The learning rate is set at every step."""
    matrices = block_matrices(model) if cfg.optimizer == 'muon' else []
    decayed = [p for p in model.decayed_parameters() if p not in set(matrices)]
    rest = [p for p in model.parameters() if p not in {*matrices, *decayed}]
    groups = [{'params': decayed, 'weight_decay': cfg.weight_decay},
              {'params': rest, 'weight_decay': 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    return [adamw, *([Muon(matrices, cfg.learning_rate, cfg.weight_decay, dtype=dtype)] if matrices
                     else [])]


def largest_micro_batch(sequences: int, length: int) -> int:
    """Return the largest divisor of a process's sequences a step with at most 16,384 tokens."""
    return max(m for m in range(1, sequences + 1)
               if sequences % m == 0 and (m == 1 or m * length <= 16_384))


class Trainer:
    """One training run: __init__ makes what it needs, `train` is the loop."""
    def __init__(self, cfg: TrainConfig, options: dict[str, Any], world: Distributed):
        self.cfg, self.world = cfg, world

        # The data: every split cut into sequences, and the order in which training reads its own
        vocab_size = read_meta(cfg.data)['vocab_size']
        self.model_cfg = build(ModelConfig, {'vocab_size': vocab_size, **options})
        if self.model_cfg.vocab_size < vocab_size:
            fail(f'vocab_size={self.model_cfg.vocab_size} is smaller than the vocabulary of '
                 f'{cfg.data}, {vocab_size}')
        length = self.model_cfg.context_length
        self.data = {split: TokenDataset(cfg.data, split, length, vocab_size)
                     for split in ('train', 'val', 'test')}
        self.micro_batch_size = cfg.micro_batch_size or largest_micro_batch(
            cfg.batch_size // world.size, length)
        self.order = BatchSampler(len(self.data['train']), cfg.batch_size, cfg.seed)

        # The budget: as many tokens, whatever its own size, as the model's Llama counterpart
        with torch.device('meta'):
            llama_params = Transformer(self.model_cfg.llama()).num_params()
        self.tokens_per_step = cfg.batch_size * length
        tokens = cfg.tokens or cfg.tokens_per_param * llama_params
        steps = math.ceil(tokens / self.tokens_per_step)
        warmup = round(cfg.warmup * steps)
        self.schedule = Schedule(steps, warmup, cfg.learning_rate, cfg.final_lr, start=warmup)

        # The model and its optimizer
        torch.manual_seed(cfg.seed)
        self.raw_model = Transformer(self.model_cfg).to(world.device)
        self.raw_model.activation_checkpointing = cfg.activation_checkpointing
        self.raw_model.set_attn_impl(cfg.attn_impl)

        # How the model runs: precision, compiler, processes
        if cfg.deterministic:
            os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
            torch.use_deterministic_algorithms(True)
        flops = steps * self.tokens_per_step * compute.flops_per_token(self.raw_model)
        self.dtype, compiled, reason = world.run_on_rank0(
            compute.precision_and_compiler, world.device, cfg.dtype, cfg.compile, flops)
        self.optimizers = make_optimizers(self.raw_model, cfg, self.dtype)
        self.precision = str(self.dtype).removeprefix('torch.') + ', compiled' * compiled
        self.autocast = torch.autocast(
            world.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)
        self.attention = fast.attention_path(self.raw_model, world.device, self.dtype, compiled)
        if world.rank == 0 and world.device.type == 'cuda' and not compiled:
            warning = compute.memory_warning(
                self.raw_model, cfg.micro_batch_size, world.device, self.dtype)
            say('\n'.join([f'Not compiled: {reason or "compile=False"}', *warning]))
        self.model = self.raw_model
        if compiled:  # on a CPU in place, a block at a time
            self.model = compute.compile_for(world.device, self.raw_model, self.attention)
        if world.size > 1:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

        # Where it stands
        self.step = 0  # steps done
        self.best = math.inf  # lowest validation loss
        self.val_loss: float | None = None  # the last
        self.skipped = self.in_a_row = 0  # steps without a finite loss and gradient
        self.began = time.monotonic()  # less the time of sessions before this one
        self.log: runs.Log | None = None  # rank 0's
        self.bar = tqdm(disable=True)

    def identity(self) -> dict[str, Any]:
        """What must not change from session to session."""
        data = {k: v for split in self.data.values() for k, v in split.identity.items()}
        return {'model_config': asdict(self.model_cfg), 'data': data,
                'recipe': {name: getattr(self.cfg, name) for name in RECIPE}}

    def begin(self, resume: bool) -> None:
        """From where this run stopped, exactly as it was; or from step 0, with the weights of
        another run if asked for."""
        world, out_dir, origin = self.world, self.cfg.out_dir, self.cfg.init_from
        state = world.run_on_rank0(runs.resumed_state, out_dir, self.identity()) if resume else None
        if state is None:
            if origin != 'scratch':
                source = world.run_on_rank0(runs.read_run, origin)
                now = {name: self.data['train'].identity[name] for name in runs.TOKENIZER[:2]}
                if different := runs.changed_fields(source['data'], now):
                    fail(f'init_from={origin} is of data of another tokenizer: {different}')
                try:
                    self.raw_model.load_state_dict(source['model'])
                except RuntimeError as error:
                    fail(f'the model in {origin} does not fit: {" ".join(str(error).split())[:300]}')
            return
        self.raw_model.load_state_dict(state['model'])
        for optimizer, saved in zip(self.optimizers, state['optimizers'], strict=True):
            optimizer.load_state_dict(saved)
        self.skipped, self.in_a_row = state['skipped']
        self.step = state['step']
        self.best = state['best']
        self.began -= state['seconds']
        new_steps = self.schedule.steps
        self.schedule = Schedule(**state['schedule'])
        if new_steps < self.step:
            fail(f'tokens={new_steps * self.tokens_per_step}: the run in {out_dir} has seen '
                 f'{self.step * self.tokens_per_step} already')
        self.report(f'Resuming {out_dir} after step {self.step}')
        if new_steps != self.schedule.steps:
            lr = self.schedule(self.step)
            self.report(f'{new_steps:,} steps instead of {self.schedule.steps:,}: the learning '
                        f'rate goes in a new cosine from where it is, {lr:.2e}')
            self.schedule = self.schedule.extended(new_steps, self.step)

    def checkpoint(self, best: bool = False) -> None:
        """Write the state after self.step steps."""
        if self.world.rank != 0:
            return
        state = {
            'model': self.raw_model.state_dict(), 'optimizers': [o.state_dict() for o in self.optimizers],
            'step': self.step, 'seconds': time.monotonic() - self.began, 'best': self.best,
            'skipped': (self.skipped, self.in_a_row), 'schedule': asdict(self.schedule),
            'data_dir': self.cfg.data, **self.identity()}
        runs.save_checkpoint(self.cfg.out_dir, state, best, self.cfg.keep_checkpoints)

    def batch(self, split: str, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these sequences, on the device."""
        x, y = self.data[split].batch(numbers)
        if self.world.device.type == 'cuda':  # the copy then goes on beside the GPU's work
            x, y = x.pin_memory(), y.pin_memory()
        device = self.world.device
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def train_step(self) -> tuple[float, float]:
        """Forward, backward, update. Returns the global batch's mean loss and gradient norm; skips
        the update, in all processes alike, unless both are finite."""
        cfg, world = self.cfg, self.world
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group['lr'] = self.schedule(self.step)
        # The global batch: a part for each process, in it a row for each micro-batch
        numbers = self.order(self.step).reshape(world.size, -1, self.micro_batch_size)
        mine = numbers[world.rank]
        total = torch.zeros((), device=world.device)
        for m, row in enumerate(mine):
            x, y = self.batch('train', row)
            if world.size > 1:  # gradients are summed over processes once, at the end
                self.model.require_backward_grad_sync = m == len(mine) - 1
            with self.autocast:
                part = self.model(x, y)[1] / len(mine)
            part.backward()
            total += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), cfg.grad_clip)
        loss, norm = float(world.sum(total) / world.size), float(norm)
        if math.isfinite(loss) and math.isfinite(norm):
            for optimizer in self.optimizers:
                optimizer.step()
        self.raw_model.zero_grad(set_to_none=True)
        return loss, norm

    @torch.no_grad()
    def evaluate(self, split: str, tokens: int) -> float:
        """Mean loss over fixed whole sequences of a split, evenly spaced where `tokens` does not
        reach for all."""
        data, world, size = self.data[split], self.world, self.micro_batch_size
        numbers = evenly_spaced(len(data), tokens // data.length)
        mine = numbers[world.rank::world.size]
        total = torch.zeros((), dtype=torch.float64)
        self.raw_model.eval()
        for at in range(0, len(mine), size):
            x, y = self.batch(split, mine[at:at + size])
            last_few = compute.eager() if len(x) < size else contextlib.nullcontext()
            with self.autocast, last_few:
                loss = self.model(x, y)[1]
            total += float(loss) * len(x)
        self.raw_model.train()
        return float(world.sum(total)) / len(numbers)

    @torch.no_grad()
    def bits_per_byte(self, split: str, tokens: int) -> float | None:
        """Measure a split in bits per byte of text, BOS left out; None without its tokenizer."""
        try:
            tokenizer = load_tokenizer(self.cfg.data)
        except UserError:
            return None
        data, world, size = self.data[split], self.world, self.micro_batch_size
        token_bytes = tokenizer.token_bytes()
        ids = evenly_spaced(len(data), tokens // data.length)
        local = ids[world.rank::world.size]
        sums = torch.zeros(2, dtype=torch.float64)  # nats, bytes
        self.raw_model.eval()
        for i in range(0, len(local), size):
            x, y = self.batch(split, local[i:i + size])
            text = y.cpu() < len(token_bytes)
            text &= token_bytes[y.cpu().clamp(max=len(token_bytes) - 1)] > 0
            y = y.masked_fill(~text.to(y.device), compute.NO_TARGET)
            last_few = compute.eager() if len(x) < size else contextlib.nullcontext()
            with self.autocast, last_few:
                loss = self.model(x, y)[1]
            sums[0] += float(loss) * int(text.sum())
            sums[1] += int(token_bytes[y.cpu()[text]].sum())
        self.raw_model.train()
        nats, n_bytes = world.sum(sums).tolist()
        return nats / math.log(2) / n_bytes if n_bytes else None

    def check_numbers(self, loss: float, norm: float) -> None:
        """Report a skipped step; give up after too many in a row."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        self.report(f'step {self.step}: skipped, loss {loss:.3f}, gradient norm {norm:.3f}',
                    event='skipped', loss=loss, grad_norm=norm)
        if self.in_a_row > MAX_SKIPPED:
            fail(f'{self.in_a_row} steps in a row without a finite loss and gradient, up to '
                 f'batch {self.step - 1}: try a lower learning_rate, or look at that batch')

    def report(self, text: str, **values: Any) -> None:
        """From rank 0: a line on the screen, and its values in the log."""
        if self.world.rank == 0:
            self.bar.clear()
            say(text)
            if values:
                self.log(self.step, **values)

    def open_folder(self) -> None:
        """config.json, the log, and a line that says what is to come."""
        cfg, steps = self.cfg, self.schedule.steps
        config = {'train': asdict(cfg), 'model': asdict(self.model_cfg)}
        write_atomic(f'{cfg.out_dir}/config.json', to_json(config, indent=1))
        self.log = runs.Log(cfg.out_dir, self.step, cfg.tensorboard)
        say(f'{cfg.out_dir}: {self.raw_model.num_params():,} parameters, {steps:,} steps of '
            f'{self.tokens_per_step:,} tokens = {steps * self.tokens_per_step:,}, '
            f'{self.world.size} x {self.world.device.type}, {self.precision}, {self.attention}; '
            f'{len(self.data["train"]):,} sequences an epoch')
        # on a terminal, a line that moves
        self.bar = tqdm(total=steps, initial=self.step, unit='step', leave=False, disable=None)

    def train(self, signals: runs.Signals) -> int:
        """The loop. Returns the exit code: 0 finished, STOPPED it can go on."""
        cfg, world, steps = self.cfg, self.world, self.schedule.steps
        peak = compute.peak_flops(world.device, self.dtype) * world.size
        flops_per_token = compute.flops_per_token(self.raw_model)
        spent, since = 0.0, self.step  # seconds in steps since the last log line, and where it was
        while self.step < steps:
            # One step
            start = time.monotonic()
            loss, norm = self.train_step()
            spent += time.monotonic() - start
            self.step += 1
            self.check_numbers(loss, norm)
            last = self.step == steps
            rate = (self.step - since) * self.tokens_per_step / spent
            mfu = flops_per_token * rate / peak
            mfu = mfu if mfu <= 1 else None  # the peak was measured too low
            self.bar.set_postfix_str(f'loss {loss:.4f}, {rate:,.0f} tok/s', refresh=False)
            self.bar.update()

            # A line in the log
            if self.step % cfg.log_interval == 0 or last:
                if world.rank == 0:
                    self.log(self.step, tokens=self.step * self.tokens_per_step, loss=loss,
                             lr=self.schedule(self.step - 1), grad_norm=norm, tokens_per_s=rate,
                             mfu=mfu, memory_gb=torch.cuda.max_memory_allocated() / 1e9,
                             skipped=self.skipped, seconds=time.monotonic() - self.began)
                spent, since = 0.0, self.step

            # Validation, and a look at what it writes
            if self.step % cfg.eval_interval == 0 or last:
                self.val_loss = self.evaluate('val', cfg.eval_tokens)
                left = timedelta(seconds=round((steps - self.step) * self.tokens_per_step / rate))
                share = '' if mfu is None else f'MFU {mfu:.1%} | '
                self.report(f'step {self.step:>6,}/{steps:,} | loss {loss:.4f} | validation loss '
                            f'{self.val_loss:.4f}, perplexity {perplexity(self.val_loss):.3f} | '
                            f'{rate:,.0f} tok/s | {share}ETA {left}', val_loss=self.val_loss)
                if self.val_loss < self.best:
                    self.best = self.val_loss
                    self.checkpoint(best=True)
            if cfg.sample_interval and self.step % cfg.sample_interval == 0 and not last:
                self.sample()

            # A checkpoint, and a stop where one process or more was asked for it
            reason = signals.received
            if cfg.stop_step is not None and self.step >= cfg.stop_step:
                reason = 'stop_step'
            stop = world.any(reason is not None)
            if self.step % cfg.checkpoint_interval == 0 or last or stop:
                self.checkpoint()
            if stop and not last:
                self.report(f'Stopped after step {self.step} '
                            f'({reason or "another process was asked"}); go on with '
                            f'--init_from=resume --out_dir={shlex.quote(cfg.out_dir)}')
                return STOPPED
        self.finish()
        return 0

    def sample(self) -> None:
        """A text of the model's, on the screen and in the log."""
        cfg = self.cfg
        if self.world.rank != 0 or not cfg.sample_tokens:
            return
        self.raw_model.eval()
        try:
            with compute.eager():
                text = sample_text(self.raw_model, load_tokenizer(cfg.data), prompt='',
                                   tokens=cfg.sample_tokens, temperature=0.8, top_k=None,
                                   seed=cfg.seed)
        except UserError as error:  # no tokenizer, say: no reason to end a run
            text = f'No sample: {error}'
        self.raw_model.train()
        self.report(text, sample=text)

    def finish(self) -> None:
        """Test perplexity of the last weights, result.json, a sample of text."""
        cfg, seconds = self.cfg, time.monotonic() - self.began
        test_loss = self.evaluate('test', cfg.test_tokens)
        if self.val_loss is None:  # resumed after the last step
            self.val_loss = self.evaluate('val', cfg.eval_tokens)
        if not math.isfinite(test_loss):
            fail(f'test loss {test_loss}: try a lower learning_rate or init_std')
        self.report(f'Finished in {timedelta(seconds=round(seconds))}: test perplexity '
                    f'{perplexity(test_loss):.3f}, loss {test_loss:.4f} nats a token')
        bits = {f'{split}_bits_per_byte': self.bits_per_byte(split, tokens) for split, tokens in
                (('val', cfg.eval_tokens), ('test', cfg.test_tokens))}
        result = {
            **bits, 'test_loss': test_loss, 'test_perplexity': perplexity(test_loss),
            'val_loss': self.val_loss, 'val_perplexity': perplexity(self.val_loss),
            'parameters': self.raw_model.num_params(), 'steps': self.step,
            'tokens': self.step * self.tokens_per_step,
            'flops_per_token': compute.flops_per_token(self.raw_model), 'skipped': self.skipped,
            'precision': self.precision, 'seconds': seconds}
        self.world.run_on_rank0(write_atomic, f'{cfg.out_dir}/result.json', to_json(result, indent=1))
        self.sample()


@command_line
def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    given = read_options(argv, TrainConfig, ModelConfig)
    compute.keep_freed_memory()

    # Which run, a new one or one to go on with; and its options: what was given, over those it
    # began with, or over its size's
    out_dir, resume = runs.find_run(given.get('init_from'), given.get('out_dir'))
    if resume:
        options = runs.resumed_options(out_dir, given, TrainConfig)
    else:
        options = runs.new_options(given)
    cfg = build(TrainConfig, options)

    # Its processes; its folder, which no other run may touch; its data; and then training
    world = start_world(cfg.device, cfg.batch_size, cfg.micro_batch_size, cfg.timeout_minutes)
    with report_errors(world), contextlib.ExitStack() as stack:
        if resume:
            world.run_on_rank0(runs.lock_folder, out_dir, stack)
        cfg.data = world.run_on_rank0(find_data, cfg.data, None if resume else cfg.text, cfg.tokenizer)
        signals = runs.Signals()  # until here Ctrl-C ends it: preparing a text takes its time
        trainer, code = Trainer(cfg, options, world), 0
        if not resume:
            out_dir = world.run_on_rank0(runs.new_folder, out_dir, trainer.model_cfg, stack)
        cfg.out_dir = out_dir
        result = world.run_on_rank0(read_json, f'{out_dir}/result.json') if resume else {}
        if (result or {}).get('steps') == trainer.schedule.steps:
            trainer.report(f'{out_dir} is finished; a larger --tokens trains on')
        else:
            trainer.begin(resume)
            world.run_on_rank0(trainer.open_folder)
            code = trainer.train(signals)
        del trainer  # before its process group, whose end can wait for it for ever
        if world.size > 1:
            dist.barrier()  # leave together: rank 0 was still writing
            dist.destroy_process_group()
    return code


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

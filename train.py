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
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from configurator import build, fail, read_options
from model import ModelConfig, Transformer
from nanocem import fast, runs
from nanocem.files import say
from nanocem.health import Health, perplexity
from nanocem.options import in_range, new_options, resumed_options
from nanocem.schedule import Schedule
from nanocem.shards import Order, Sequences, evenly_spaced, read_meta
from nanocem.world import World, failures_in_words, memory_gb, start_world
from prepare_slimpajama import find_data
from sample import sample_text

STOPPED = 75  # exit code of a run that can go on, checkpoint written (EX_TEMPFAIL: try again later)


@dataclass
class TrainConfig:
    """The run. Defaults are the paper's recipe (Table 2); the small sizes bring config/SIZE.py."""
    data: str = 'data/slimpajama'  # folder of token shards; data/builtin is made on first use
    text: str | None = None  # train on this text file or folder instead, prepared on first use
    tokenizer: str | None = None  # of --text: byte, gpt2, llama, or llama's model file
    out_dir: str | None = None  # where the run lives; default: a new folder; to resume: the newest
    init_from: str = 'scratch'  # resume: the run in out_dir; or a run's folder or file: its weights
    seed: int = 1337  # of the weights and of the order of the data
    tokens: int | None = None  # training tokens; default: tokens_per_param x its Llama's parameters
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
    eval_tokens: int = 2_000_000  # validation reads this many tokens, the same every time
    test_tokens: int = 10_000_000  # the final test reads this many
    log_interval: int = 10  # steps between log lines
    checkpoint_interval: int = 500  # steps between checkpoints
    keep_checkpoints: int = 2  # the last ones kept, besides the best by validation
    stop_step: int | None = None  # stop after this step of the schedule, checkpoint written
    max_minutes: float | None = None  # stop after this time, checkpoint written
    max_skipped: int = 10  # give up after this many steps in a row without a finite gradient
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda where there is one
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of products; auto: the faster
    compile: bool | None = None  # torch.compile; default: on a GPU, in long runs on a CPU
    activation_checkpointing: bool = False  # recompute a block going back: less memory, more time
    deterministic: bool = False  # refuse GPU operations that are not reproducible to the bit
    timeout_minutes: float = 10.0  # how long a process waits for the others
    tensorboard: bool = True  # write TensorBoard events beside log.jsonl
    sample_interval: int | None = None  # steps between samples of text; default: at the end only
    sample_tokens: int = 400  # length of a sample

    def __post_init__(self) -> None:
        in_range(self, 1, 10**6, 'batch_size micro_batch_size keep_checkpoints stop_step')
        in_range(self, 1, 10**6, 'eval_interval log_interval checkpoint_interval sample_interval')
        in_range(self, 1, 10**15, 'tokens eval_tokens test_tokens')
        in_range(self, 1e-30, 10**6, 'tokens_per_param adam_eps grad_clip timeout_minutes')
        in_range(self, 0, 10**6, 'learning_rate weight_decay max_minutes sample_tokens max_skipped')
        in_range(self, 0, 0.9999, 'warmup final_lr beta1 beta2')
        in_range(self, 0, 2**63 - 1, 'seed')
        if self.tokenizer and not self.text:
            raise ValueError(f'tokenizer={self.tokenizer} is for --text=FILE: data has its own')


# What a run keeps to its last step, beside its model and data. All else may change when it is
# resumed, its length too (Schedule.extended).
RECIPE = ('text', 'tokenizer', 'seed', 'batch_size', 'learning_rate', 'warmup', 'final_lr', 'beta1',
          'beta2', 'adam_eps', 'weight_decay', 'grad_clip', 'eval_tokens')


class Trainer:
    """One training run: __init__ makes what it needs, `train` is the loop."""
    def __init__(self, cfg: TrainConfig, model_options: dict[str, Any], world: World):
        self.cfg, self.world = cfg, world

        # The data: every split cut into sequences, and the order in which training reads its own
        vocab_size = read_meta(cfg.data)['vocab_size']
        self.model_cfg = build(ModelConfig, {'vocab_size': vocab_size, **model_options})
        if self.model_cfg.vocab_size < vocab_size:
            fail(f'vocab_size={self.model_cfg.vocab_size} is smaller than the vocabulary of '
                 f'{cfg.data}, {vocab_size}')
        length = self.model_cfg.context_length
        self.data = {split: Sequences(cfg.data, split, length, vocab_size)
                     for split in ('train', 'val', 'test')}
        self.order = Order(len(self.data['train']), cfg.batch_size, cfg.seed)

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
        self.model = Transformer(self.model_cfg).to(world.device)
        self.model.activation_checkpointing = cfg.activation_checkpointing
        decayed = self.model.decayed_parameters()
        rest = [p for p in self.model.parameters() if all(p is not d for d in decayed)]
        self.optimizer = torch.optim.AdamW(
            [{'params': decayed, 'weight_decay': cfg.weight_decay},
             {'params': rest, 'weight_decay': 0.0}],
            betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)

        # How they run: precision, compiler, processes
        if cfg.deterministic:
            os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
            torch.use_deterministic_algorithms(True)
        on_gpu = world.device.type == 'cuda'
        flops = steps * self.tokens_per_step * self.model.flops_per_token()
        self.dtype, compiled = world.once(
            fast.precision_and_compiler, world.device, cfg.dtype, cfg.compile, flops)
        bf16 = self.dtype == torch.bfloat16
        self.precision = str(self.dtype).removeprefix('torch.') + ', compiled' * compiled
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)
        fast.prove(self.model, world.device, self.dtype, cfg.micro_batch_size)
        self.path = fast.attention_path(self.model, world.device, self.dtype, compiled)
        self.compiled = self.parallel = self.model
        if compiled:  # on a CPU the model itself, block by block
            self.compiled = self.parallel = fast.compile_for(world.device, self.model)
        if world.size > 1:
            self.parallel = DistributedDataParallel(
                self.compiled, device_ids=[world.device] if on_gpu else None,
                gradient_as_bucket_view=True)

        # Where it stands
        self.step = 0  # steps done
        self.best = math.inf  # lowest validation loss
        self.val_loss: float | None = None  # the last
        self.health = Health()
        self.earlier_seconds = 0.0  # of sessions before this one
        self.begin = time.monotonic()  # of this one
        self.log: Callable[..., None] = lambda *args, **values: None

    def begin_with(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint of this run, exactly as it was, or refuse by name. Without one,
        begin: with the weights of another run, a fresh optimizer and schedule, if asked for."""
        out_dir, origin = self.cfg.out_dir, self.cfg.init_from
        if state is None:
            if origin not in ('scratch', 'resume'):
                source = self.world.once(runs.read_run, origin)
                runs.check_same_tokenizer(origin, source['data'], self.data['train'].identity)
                runs.load_weights(self.model, source, origin)
            return
        runs.check_same(out_dir, state, self.identity())
        runs.load_weights(self.model, state, out_dir)
        self.optimizer.load_state_dict(state['optimizer'])
        vars(self.health).update(state['health'])
        self.step, self.best = state['step'], state['best']
        self.earlier_seconds = state['seconds']
        steps, self.schedule = self.schedule.steps, Schedule(**state['schedule'])
        if steps < self.step:
            fail(f'tokens={steps * self.tokens_per_step}: the run in {out_dir} has seen '
                 f'{self.step * self.tokens_per_step} already')
        self.tell(f'Resuming {out_dir} after step {self.step}')
        if state.get('precision', self.precision) != self.precision:
            self.tell(f'Its steps so far were {state["precision"]}; from here on {self.precision}')
        if steps != self.schedule.steps:
            self.tell(f'{steps:,} steps instead of {self.schedule.steps:,}: the learning rate goes '
                      f'in a new cosine from where it is, {self.schedule(self.step):.2e}')
            self.schedule = self.schedule.extended(steps, self.step)

    def identity(self) -> dict[str, Any]:
        """What must not change from session to session."""
        return {'model_config': asdict(self.model_cfg), 'data': self.data['train'].identity,
                'recipe': {name: getattr(self.cfg, name) for name in RECIPE}}

    def seconds(self) -> float:
        """Time spent training, over all sessions."""
        return self.earlier_seconds + time.monotonic() - self.begin

    def checkpoint(self, best: bool = False) -> None:
        """Write the state after self.step steps."""
        if self.world.rank != 0:
            return
        state = {
            'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(),
            'step': self.step, 'tokens': self.step * self.tokens_per_step,
            'seconds': self.seconds(), 'best': self.best, 'health': vars(self.health),
            'schedule': asdict(self.schedule), 'data_dir': self.cfg.data,
            'precision': self.precision, **self.identity()}
        runs.save_checkpoint(self.cfg.out_dir, state, best, self.cfg.keep_checkpoints)

    def micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's part of the step's global batch, a micro-batch at a time."""
        device = self.world.device
        mine = np.split(self.order(self.step), self.world.size)[self.world.rank]
        for numbers in np.split(mine, len(mine) // self.cfg.micro_batch_size):
            x, y = self.data['train'].batch(numbers)
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def train_step(self) -> tuple[float, float]:
        """Forward, backward, update. Returns the global batch's mean loss and gradient norm; skips
        the update, in all processes alike, unless both are finite."""
        for group in self.optimizer.param_groups:
            group['lr'] = self.schedule(self.step)
        accumulation = self.cfg.batch_size // (self.world.size * self.cfg.micro_batch_size)
        total = torch.zeros((), device=self.world.device)
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
        """Mean loss over fixed whole sequences of a split, evenly spaced where `tokens` does not
        reach for all."""
        data, world, size = self.data[split], self.world, self.cfg.micro_batch_size
        numbers = evenly_spaced(len(data), tokens // data.length)
        mine = numbers[world.rank::world.size]
        total = torch.zeros((), dtype=torch.float64)
        self.model.eval()
        for at in range(0, len(mine), size):
            x, y = data.batch(mine[at:at + size])
            last_few = fast.eager() if len(x) < size else contextlib.nullcontext()
            with self.autocast, last_few:
                loss = self.compiled(x.to(world.device), y.to(world.device))[1]
            total += float(loss) * len(x)
        self.model.train()
        return float(world.sum(total)) / len(numbers)

    def judge(self, loss: float, norm: float) -> None:
        """Say what the step's loss tells; give up after max_skipped skipped steps in a row."""
        for text, values in self.health.look(self.step, loss, norm):
            self.tell(text, **values)
        if self.step == 2 * self.schedule.warmup + 200:
            for text, values in self.health.no_context(self.data['train'].unigram_entropy()):
                self.tell(text, **values)
        if self.health.in_a_row > self.cfg.max_skipped:
            last = (runs.checkpoints(self.cfg.out_dir) or ['none'])[-1]
            fail(f'{self.health.in_a_row} steps in a row without a finite loss and gradient, up to '
                 f'batch {self.step - 1}; last good checkpoint: {last}; try a lower learning_rate, '
                 'or look at that batch')

    def tell(self, text: str, **values: Any) -> None:
        """A line on the screen, and its values in the log, from rank 0."""
        if self.world.rank == 0:
            say(text)
            if values:
                self.log(self.step, **values)

    def open_folder(self) -> None:
        """config.json and the log. A new run needs its config; one that goes on has it already."""
        out_dir = self.cfg.out_dir
        runs.save_config(out_dir, asdict(self.cfg), asdict(self.model_cfg), new=self.step == 0)
        self.log = runs.Log(out_dir, self.step, self.cfg.tensorboard)
        say(f'{out_dir}: {self.model.num_params():,} parameters, {self.schedule.steps:,} steps of '
            f'{self.tokens_per_step:,} tokens = {self.schedule.steps * self.tokens_per_step:,}, '
            f'{self.world.size} x {self.world.device.type}, '
            f'{self.precision}, {self.path}; '
            f'{len(self.data["train"]):,} sequences an epoch')

    def train(self, signals: runs.Signals) -> int:
        """The loop. Returns the exit code: 0 finished, STOPPED it can go on."""
        cfg, world, steps = self.cfg, self.world, self.schedule.steps
        if world.rank == 0:
            self.open_folder()
        peak = fast.peak_flops(world.device, self.dtype) * world.size
        self.begin = time.monotonic()
        spent, since = 0.0, self.step  # seconds in steps since the last line, and where it was
        while self.step < steps:
            # One step
            start = time.monotonic()
            loss, norm = self.train_step()
            spent += time.monotonic() - start
            self.step += 1
            self.judge(loss, norm)
            last = self.step == steps

            # A line in the log
            if self.step % cfg.log_interval == 0 or last:
                rate = (self.step - since) * self.tokens_per_step / spent
                left = timedelta(seconds=round((steps - self.step) * self.tokens_per_step / rate))
                lr, memory = self.schedule(self.step - 1), memory_gb(world.device)
                mfu = self.model.estimate_mfu(rate, peak)
                self.tell(
                    f'step {self.step:>6,}/{steps:,} | loss {loss:.4f} | lr {lr:.2e} | '
                    f'norm {norm:.2f} | {rate:,.0f} tok/s | MFU {mfu:.1%} | {memory:.2f} GB | '
                    f'ETA {left}',
                    tokens=self.step * self.tokens_per_step, loss=loss, lr=lr, grad_norm=norm,
                    tokens_per_s=rate, mfu=mfu, memory_gb=memory, skipped=self.health.skipped,
                    seconds=self.seconds())
                spent, since = 0.0, self.step

            # Validation, and a look at what it writes
            if self.step % cfg.eval_interval == 0 or last:
                self.val_loss = self.evaluate('val', cfg.eval_tokens)
                self.tell(f'step {self.step:>6,}: validation loss {self.val_loss:.4f}, perplexity '
                          f'{perplexity(self.val_loss):.3f}', val_loss=self.val_loss)
                if self.val_loss < self.best:
                    self.best = self.val_loss
                    self.checkpoint(best=True)
            if cfg.sample_interval and self.step % cfg.sample_interval == 0 and not last:
                self.sample()

            # A checkpoint, and a stop where one process or more was asked for it
            reason = signals.received
            if cfg.stop_step is not None and self.step >= cfg.stop_step:
                reason = 'stop_step'
            minutes = (time.monotonic() - self.begin) / 60
            if cfg.max_minutes is not None and minutes >= cfg.max_minutes:
                reason = 'max_minutes'
            stop = float(world.sum(torch.tensor(float(reason is not None)))) > 0
            if self.step % cfg.checkpoint_interval == 0 or last or stop:
                self.checkpoint()
            if stop and not last:
                self.tell(f'Stopped after step {self.step} ({reason or "another process was asked"}'
                          f'); go on with --init_from=resume --out_dir={cfg.out_dir}')
                return STOPPED
        return self.finish()

    def sample(self) -> None:
        """A text of the model's, on the screen and in the log."""
        if self.world.rank == 0 and self.cfg.sample_tokens:
            self.model.eval()
            try:
                with fast.eager():
                    text = sample_text(self.model, self.cfg.data, '', self.cfg.sample_tokens, 0.8,
                                       None, self.cfg.seed)
            except SystemExit as error:  # its tokenizer is gone, say: no reason to end a run
                text = f'No sample: {error}'
            self.model.train()
            self.tell(text, sample=text)

    def finish(self) -> int:
        """Test perplexity, result.json, a sample of text. Returns the exit code."""
        cfg, seconds = self.cfg, self.seconds()
        test_loss = self.evaluate('test', cfg.test_tokens)
        if self.val_loss is None:  # resumed after the last step
            self.val_loss = self.evaluate('val', cfg.eval_tokens)
        if self.health.skipped == self.step or not math.isfinite(test_loss):
            fail(f'no model came of {self.step} steps: {self.health.skipped} were skipped for '
                 f'their numbers, test loss {test_loss}; try a lower learning_rate or init_std')
        if self.world.rank != 0:
            return 0
        say(f'Finished in {timedelta(seconds=round(seconds))}: test perplexity '
            f'{perplexity(test_loss):.3f}, loss {test_loss:.4f} nats a token')
        written = runs.save_result(cfg.out_dir, {
            'test_loss': test_loss, 'test_perplexity': perplexity(test_loss),
            'val_loss': self.val_loss, 'val_perplexity': perplexity(self.val_loss),
            'parameters': self.model.num_params(), 'steps': self.step,
            'tokens': self.step * self.tokens_per_step,
            'flops_per_token': self.model.flops_per_token(), 'skipped': self.health.skipped,
            'precision': self.precision, 'seconds': seconds})
        if cfg.sample_tokens:
            say(f'A sample; python sample.py --out_dir={cfg.out_dir} makes more:')
            self.sample()
        return 0 if written else STOPPED


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    given = read_options(argv, TrainConfig, ModelConfig)

    # Which run, a new one or one to go on with; and its options: what was given, over those it
    # began with, or over its size's
    out_dir, resume = runs.which(given.get('init_from'), given.get('out_dir'))
    if resume:
        given, name = resumed_options(out_dir, given, TrainConfig, RECIPE), ''
    else:
        given, name = new_options(given, TrainConfig, RECIPE)
    cfg = build(TrainConfig, given)
    model_options = {k: v for k, v in given.items() if k in ModelConfig.__dataclass_fields__}

    # Its processes; its folder, which no other run may touch; its data; and then training
    world = start_world(cfg.device, cfg.batch_size, cfg.micro_batch_size, cfg.timeout_minutes)
    signals = runs.Signals()
    with failures_in_words(world), contextlib.ExitStack() as held:
        resume, cfg.out_dir = world.once(lambda: (resume, out_dir))
        if resume:
            world.once(runs.hold, cfg.out_dir, held)
        cfg.data = world.once(find_data, cfg.data, None if resume else cfg.text, cfg.tokenizer)
        trainer, code = Trainer(cfg, model_options, world), 0
        if not resume:
            cfg.out_dir = world.once(runs.claim, out_dir, name, held)
        if not (resume and world.once(runs.is_finished, cfg.out_dir, trainer.schedule.steps)):
            trainer.begin_with(world.once(runs.where_it_stood, cfg.out_dir) if resume else None)
            code = world.once(int, trainer.train(signals))
        del trainer  # before its process group, whose end can wait for it for ever
        if world.size > 1:
            dist.barrier()  # leave together: rank 0 was still writing
            dist.destroy_process_group()
    return code


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

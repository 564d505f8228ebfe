"""
Train Llama and CEM language models: on a laptop, a GPU, or many.

    python train.py config/mini.py                           all-CEM on a laptop, in minutes
    python train.py config/llama.py config/mini.py           Llama, for comparison
    python train.py config/mini.py --text=book.txt           on a text of your own
    torchrun --nproc_per_node=8 train.py config/cem_t2.py    the paper's 134m on eight GPUs
    python train.py --init_from=resume                       continue the newest run

Later config files override earlier ones, and --key=value flags override files. A run's folder,
out_dir, holds config.json, log.jsonl, checkpoints, TensorBoard events and, at the end, result.json,
the test results of the last weights. sample.py and evaluate.py use the weights with the lowest
validation loss.
"""
import atexit
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import PathStr, build, check, command_line, in_range, read_options, warn
from model import ModelConfig, Transformer
from nanocem import runs
from nanocem.data import TOKENIZER_KEYS, BatchSampler, TokenDataset, evenly_spaced, read_meta
from nanocem.documents import READING, Reading, keep_piped
from nanocem.files import to_json, write_atomic
from nanocem.hardware import (
    compile_for,
    find_device,
    flops_per_token,
    keep_freed_memory,
    peak_flops,
)
from nanocem.measure import bits_per_byte, loss_sums, perplexity
from nanocem.optim import make_optimizers
from nanocem.prepare import find_data
from nanocem.process import check_launcher, keep_console_and_signals, note_signals, progress_bar
from nanocem.same import first_line, outputs_to_keep, warn_if_not_causal, warn_of_wrong_layers
from nanocem.sampling import sample_text
from nanocem.tokenizers import MODEL_FILE, load_tokenizer, spelled_bytes

MICRO_BATCH_TOKENS = 16_384  # most tokens of a forward pass, unless micro_batch_size is given
MIN_FLOPS_TO_COMPILE = 2e12  # on a CPU a shorter run, under about a minute, is not compiled
MAX_SKIPPED = 10  # most steps in a row without finite loss and gradient: after one more, a run ends
STOPPED = 75  # exit code of a run that can be resumed (EX_TEMPFAIL: try again later)


@dataclass
class TrainConfig(Reading):
    """The run. The defaults are the paper's recipe (Table 2)."""
    # configurator.py says what these three mean
    EXCLUSIVE = (('text', 'data'), ('tokens', 'tokens_per_param'))
    # --data and --text drop what an earlier file said of its text
    RESETS = (('data', 'tokenizer', *READING), ('text', 'tokenizer'))
    FIRST = ('data', 'text', 'out_dir', 'init_from', 'tokens', 'batch_size', 'optimizer',
             'learning_rate', 'device', 'compile')
    data: PathStr = 'data/slimpajama'  # folder of token shards
    text: PathStr | None = None  # train on this file or folder instead, or on standard input (-)
    tokenizer: PathStr | None = None  # for --text: byte, gpt2, llama, bpe2048 or FILE.model
    out_dir: PathStr | None = None  # the run's folder; default: a new one, or the newest to resume
    init_from: PathStr = 'scratch'  # resume: continue out_dir's run; RUN: start from its weights
    seed: int = 1337  # seed of the initial weights and of the order of the data
    tokens: int | None = None  # training tokens; default: tokens_per_param x parameters of Llama
    tokens_per_param: float = 20.0  # training tokens per parameter of Llama (Chinchilla)
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
    checkpoint_interval: int = 1000  # steps between checkpoints; the last two and best.pt are kept
    stop_step: int | None = None  # write a checkpoint and stop after this step
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda if there is a GPU
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of matrix products; auto: by hardware
    kernels: bool = True  # use Triton kernels for attention on a GPU that runs them
    compile: bool | None = None  # use torch.compile; default: on a GPU, or if it pays on a CPU
    tensorboard: bool = True  # write TensorBoard events beside log.jsonl if it is installed
    sample_tokens: int = 400  # length of the sample of text at the end; 0: no sample

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, 1, 10**15, 'batch_size micro_batch_size tokens eval_tokens test_tokens')
        in_range(self, 1, 10**15, 'eval_interval log_interval checkpoint_interval stop_step')
        in_range(self, 1e-30, 10**6, 'tokens_per_param adam_eps grad_clip')
        in_range(self, 0, 10**6, 'learning_rate weight_decay sample_tokens')
        in_range(self, 0, 0.9999, 'warmup beta1 beta2')
        in_range(self, 0, 1, 'final_lr')
        in_range(self, 0, 2**63 - 1, 'seed')
        check(not self.tokenizer or bool(self.text),
              'tokenizer is for --text=FILE: data has its own')
        self.check_text(self.text)


def learning_rate(cfg: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of step 0, 1, ..., steps - 1: a linear warm-up to the peak, then a
    cosine down to the fraction final_lr of it."""
    warmup_steps = round(cfg.warmup * steps)
    if step < warmup_steps:
        return cfg.learning_rate * ((step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2  # from 1 to 0
    return cfg.learning_rate * (cfg.final_lr + (1 - cfg.final_lr) * cosine)


@command_line
@keep_console_and_signals()
def main(argv: list[str]) -> int:
    """Train a model, and test it. Return the exit code: 0, or STOPPED for a run that can go on."""
    # torchrun starts a process for each GPU, and sets its rank. Only rank 0 prints
    check_launcher(os.environ)
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    if rank > 0:
        sys.stdout = None  # print then does nothing

    # Read the options, and what the run starts from: start.config and start.state are config.json
    # and the last checkpoint of a run to resume, start.weights is the checkpoint of another run
    given = read_options(argv, TrainConfig, ModelConfig)
    if given.get('text'):  # keep standard input as a file, which a resumed run finds
        check(world_size == 1 or given['text'] != '-', 'only one process can read a pipe: '
              'prepare_slimpajama.py --input=- makes a data folder that several can read')
        given['text'] = keep_piped(given['text'])
    start = runs.start_from(given, rank, TrainConfig)
    cfg = build(TrainConfig, start.options)
    state = start.state
    resume = start.config is not None

    # Choose the device
    device = find_device(cfg.device)
    on_gpu = device.type == 'cuda'
    if on_gpu:
        device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # float32 products by TF32
    keep_freed_memory()

    # Find the data. A text is prepared on first use; later its folder is `data` in config.json
    data_dir = cfg.data
    if cfg.text and not (resume and os.path.exists(f'{data_dir}/meta.json')):
        data_dir = find_data(cfg.text, cfg.tokenizer, state or start.weights, cfg)
    meta = read_meta(data_dir)
    if start.weights:  # the weights fit one tokenizer's ids only, whatever the text
        runs.check_same(cfg.init_from, start.weights['data'],
                        {name: meta.get(name) for name in TOKENIZER_KEYS})
    tokenizer = load_tokenizer(data_dir)
    token_bytes = spelled_bytes(tokenizer, meta)

    # Open the sequences of each split, and draw a random order of those for training
    model_cfg = build(ModelConfig, {'vocab_size': meta['vocab_size'], **start.options})
    check(model_cfg.vocab_size >= meta['vocab_size'],
          f'vocab_size={model_cfg.vocab_size}: {data_dir} needs {meta["vocab_size"]} or more')
    length = model_cfg.context_length
    data = {split: TokenDataset(data_dir, split, length) for split in ('train', 'val', 'test')}
    sampler = BatchSampler(len(data['train']), cfg.batch_size, cfg.seed)
    data_identity = data['train'].identity | data['val'].identity | data['test'].identity

    micro_batch_size = divide_batch(cfg, length, world_size)

    # Compute the number of steps. A CEM model trains on as many tokens as the Llama of its shape
    tokens_per_step = cfg.batch_size * length
    max_steps = count_steps(cfg, model_cfg)

    # Resume a run only if its data is unchanged. Leave a finished run as it is
    out_dir = cfg.out_dir
    _lock = start.lock  # held until main returns
    if resume:
        runs.check_same(out_dir, start.config['data'], data_identity)
        if state and state['step'] == max_steps and os.path.exists(f'{out_dir}/result.json'):
            print(f'{out_dir} is finished, and result.json has its test loss: python evaluate.py '
                  f'--out_dir={shlex.quote(out_dir)} measures more', flush=True)
            return 0

    # Make and lock the run's folder. Connect the processes after the data is prepared, which can
    # take longer than they wait for one another
    if rank == 0 and not resume:
        out_dir, _lock = runs.new_folder(out_dir, model_cfg)
    if world_size > 1:
        dist.init_process_group('nccl' if on_gpu else 'gloo', device_id=device if on_gpu else None)
        # If an error ends this process, skip destructors: NCCL's can wait for the others forever
        atexit.register(os._exit, 1)

    def sum_over_processes(values: Tensor) -> Tensor:
        """Return the sum of these values over all processes."""
        if world_size > 1:
            values = values.to(device, copy=True)  # all_reduce writes into it
            dist.all_reduce(values)
        return values

    # Make the model and its optimizers, and choose the precision
    torch.manual_seed(cfg.seed)
    raw_model = Transformer(model_cfg).to(device)
    flops = flops_per_token(raw_model)
    compiled = should_compile(cfg, device, max_steps * tokens_per_step * flops)
    dtype = choose_dtype(cfg, device, compiled)
    precision = str(dtype).removeprefix('torch.') + (', compiled' if compiled else '')
    peak = peak_flops(device, dtype) * world_size  # NaN if it is unknown
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
    optimizers = make_optimizers(raw_model, cfg, dtype)

    # Warn if an edited model.py sees later tokens, or if its steps are not minus the gradient
    if rank == 0:
        warn_if_not_causal(raw_model)
        warn_of_wrong_layers(raw_model)

    # Use our Triton attention kernels where they run, compile, and average gradients over processes
    by_kernels = False
    if on_gpu and cfg.kernels:
        from nanocem.triton_attention import use_kernels
        by_kernels = use_kernels(raw_model, dtype)
    model = compile_for(device, raw_model, by_kernels) if compiled else raw_model
    if world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    # Load the checkpoint of the run to resume, or the weights to start from
    step = skipped = consecutive_skips = 0
    best, past_seconds = math.inf, 0.0  # best validation loss; training time before this start
    precisions = [precision]  # all that the run has used, in order
    if state:
        runs.load_weights(raw_model, state, out_dir)
        change = runs.describe_change(raw_model, state)
        check(not change, f'{out_dir} cannot be resumed: {change}')
        for optimizer, optimizer_state in zip(optimizers, state['optimizers'], strict=True):
            optimizer.load_state_dict(optimizer_state)
        step, best, past_seconds = state['step'], state['best'], state['seconds']
        skipped, consecutive_skips = state['skipped'], state['consecutive_skips']
        precisions = state['precisions']
        if precisions[-1] != precision:
            precisions = [*precisions, precision]
    elif start.weights:
        runs.load_weights(raw_model, start.weights, cfg.init_from)
    start = state = optimizer_state = None  # free their memory
    # Check that all processes are at the same step, and have weights with the same sum of bits
    if world_size > 1:
        sum_of_bits = sum(int(p.detach().view(torch.int32).sum()) for p in raw_model.parameters())
        local = torch.tensor([step, sum_of_bits])
        check(torch.equal(sum_over_processes(local).cpu(), local * world_size),
              f'the processes have read different checkpoints, process {rank} one of step {step}: '
              'all need the same files')

    # Write the options and the tokenizer, which sample.py reads, and begin the log, only on rank 0
    if rank == 0:
        config = {'train': asdict(cfg) | {'out_dir': out_dir, 'data': data_dir},
                  'model': asdict(model_cfg), 'data': data_identity, 'max_steps': max_steps}
        write_atomic(f'{out_dir}/config.json', to_json(config, indent=1))
        runs.keep_model_py(out_dir, step)
        if step < max_steps:  # an old result is not that of this run
            Path(out_dir, 'result.json').unlink(missing_ok=True)
        if tokenizer.path:
            write_atomic(f'{out_dir}/{MODEL_FILE}', Path(tokenizer.path).read_bytes())
    log = runs.Log(out_dir, step, cfg.tensorboard) if rank == 0 else lambda step, **values: None
    # Describe the run in a line, and show a progress bar if stderr is a terminal
    epochs = max_steps * cfg.batch_size / sampler.n_sequences
    attending = ', triton attention' if by_kernels else ''
    compiling = '; the first step compiles, which takes a while' if compiled else ''
    resuming = f'; resuming after step {step}' if step else ''
    print(f'{out_dir}: {raw_model.num_params():,} parameters, {max_steps:,} steps of '
          f'{tokens_per_step:,} tokens = {max_steps * tokens_per_step:,}, {epochs:.3g} epochs of '
          f'{sampler.n_sequences:,} sequences; {world_size} x {device.type}, {precision}'
          f'{attending}{compiling}{resuming}', flush=True)
    bar = progress_bar(total=max_steps, initial=step, unit='step', leave=False,
                       disable=rank > 0 or None)  # None: unless stderr is a terminal

    def checkpoint(name: str) -> bool:
        """Write the current state to a file in the run's folder, only on rank 0. Return False if
        that fails."""
        if rank > 0:
            return True
        return runs.save_checkpoint(f'{out_dir}/{name}', {
            'model': raw_model.state_dict(), 'optimizers': [o.state_dict() for o in optimizers],
            'step': step, 'best': best, 'seconds': time.monotonic() - started,
            'skipped': skipped, 'consecutive_skips': consecutive_skips,
            'precisions': precisions, 'model_config': asdict(model_cfg), 'data': data_identity,
            'data_dir': data_dir, **outputs_to_keep(raw_model)})

    def batch(split: str, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (B, J) each, of these sequences of a split, on the device."""
        x, y = data[split].batch(indices)
        if on_gpu:  # from pinned memory the copy overlaps with the GPU's work
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(device, non_blocking=on_gpu), y.to(device, non_blocking=on_gpu)

    @torch.no_grad()
    def evaluate(split: str, max_tokens: int) -> tuple[float, float | None]:
        """Return a split's mean loss in nats per token, and in bits per byte (None if the tokenizer
        loses text), always over the same evenly spaced sequences. Bits per byte leave out the
        loss of BOS."""
        raw_model.eval()
        sums = torch.zeros(4, dtype=torch.float64)  # tokens, nats, nats of text, bytes of text
        indices = evenly_spaced(len(data[split]), max_tokens // length)[rank::world_size]
        for i in range(0, len(indices), micro_batch_size):
            x, y = batch(split, indices[i:i + micro_batch_size])
            # Run a smaller last batch uncompiled: it is not worth a compilation
            stance = 'force_eager' if len(x) < micro_batch_size else 'default'
            with autocast, torch.compiler.set_stance(stance):
                logits, _ = model(x)
            sums[:3] += loss_sums(logits, y, tokenizer.bos)
            if token_bytes is not None:
                sums[3] += token_bytes[y.cpu()].sum()
        raw_model.train()
        tokens, nats, text_nats, text_bytes = sum_over_processes(sums).tolist()
        return nats / tokens, bits_per_byte(text_nats, text_bytes) if text_bytes else None

    # Let a signal such as SIGTERM, or Ctrl-C, stop the run after the current step
    signals = note_signals()

    # Train
    stop_step = min(max_steps, cfg.stop_step or max_steps)
    started = time.monotonic() - past_seconds  # as if the run had never been stopped
    first_step = timed_from = step
    timed_seconds = 0.0  # of the steps after timed_from, whose speed is shown
    val_loss, stopped = None, False
    written = True  # False if the last numbered checkpoint could not be written
    while step < stop_step and not stopped:
        # Set the learning rate of this step
        t0 = time.monotonic()
        lr = learning_rate(cfg, step, max_steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group['lr'] = lr

        # Accumulate gradients over micro-batches; DDP all-reduces them in the last
        micro_batches = sampler(step).reshape(world_size, -1, micro_batch_size)[rank]
        loss = torch.zeros((), device=device)
        for n, indices in enumerate(micro_batches, 1):
            x, y = batch('train', indices)
            # Dropout that you add draws the same numbers after a resume
            torch.manual_seed(cfg.seed + step * cfg.batch_size + rank * len(micro_batches) + n)
            if world_size > 1:
                model.require_backward_grad_sync = n == len(micro_batches)
            with autocast:
                micro_loss = model(x, y)[1] / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        if step == first_step:
            check_gradients(raw_model, world_size)

        # Clip the gradient. Average the loss, and stop if any process has received a signal
        grad_norm = float(torch.nn.utils.clip_grad_norm_(raw_model.parameters(), cfg.grad_clip))
        loss, n_signals = sum_over_processes(torch.tensor([float(loss), len(signals)])).tolist()
        loss /= world_size
        stopped = n_signals > 0

        # Update the weights, or in all processes skip the step if loss or gradient is not finite
        if math.isfinite(loss) and math.isfinite(grad_norm):
            consecutive_skips = 0
            for optimizer in optimizers:
                optimizer.step()
        else:
            skipped, consecutive_skips = skipped + 1, consecutive_skips + 1
            bar.clear()
            print(f'step {step + 1}: skipped, loss {loss}, gradient norm {grad_norm}', flush=True)
            log(step + 1, event='skipped', loss=loss, grad_norm=grad_norm)
            check(consecutive_skips <= MAX_SKIPPED, f'{consecutive_skips} consecutive steps, up to '
                  f'step {step + 1}, without finite loss and gradient: try a lower learning_rate')
        raw_model.zero_grad(set_to_none=True)
        step += 1
        timed_seconds += time.monotonic() - t0
        is_last = step == max_steps

        # Show the speed, with the share of the GPUs' peak (model FLOPs utilization)
        tokens_per_s = (step - timed_from) * tokens_per_step / timed_seconds
        mfu = flops * tokens_per_s / peak
        speed = f'{tokens_per_s:,.0f} tok/s' + (f', MFU {mfu:.1%}' if math.isfinite(mfu) else '')
        left = timedelta(seconds=round((max_steps - step) * tokens_per_step / tokens_per_s))
        progress = f'step {step:>6,}/{max_steps:,} | loss {loss:.4f} | {speed} | ETA {left}'
        bar.set_postfix_str(f'loss {loss:.4f}, {speed}', refresh=False)
        bar.update()
        if bar.disable and step == first_step + 10:  # without a bar, an early sign of life
            print(progress, flush=True)

        # Write a line of the log
        is_logged = step % cfg.log_interval == 0 or is_last
        if is_logged:
            log(step, tokens=step * tokens_per_step, loss=loss, lr=lr, grad_norm=grad_norm,
                tokens_per_s=tokens_per_s, mfu=mfu if math.isfinite(mfu) else None, skipped=skipped,
                memory_gb=torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
                seconds=time.monotonic() - started)
        # Time the next steps anew. The first may include compilation, and does not count
        if is_logged or step == first_step + 1:
            timed_from, timed_seconds = step, 0.0

        # Validate, and keep the best weights
        if step % cfg.eval_interval == 0 or is_last:
            val_loss, val_bits = evaluate('val', cfg.eval_tokens)
            bar.clear()
            print(f'{progress} | validation {in_words(val_loss, val_bits)}', flush=True)
            log(step, val_loss=val_loss)
            if val_loss < best:
                previous, best = best, val_loss
                if not checkpoint('best.pt'):  # compare later steps with the best on disk
                    best = previous

        # Write a checkpoint
        if step % cfg.checkpoint_interval == 0 or step == stop_step or stopped:
            written = checkpoint(f'step_{step:08d}.pt')
    bar.close()
    seconds = time.monotonic() - started

    # Test the last weights, unless the run was stopped. Then disconnect the processes
    if step == max_steps:
        test_loss, test_bits = evaluate('test', cfg.test_tokens)
        if val_loss is None:  # resumed after the last step
            val_loss, val_bits = evaluate('val', cfg.eval_tokens)
    # Try once more to write the last weights: the disk may have room again
    written = written or checkpoint(f'step_{step:08d}.pt')
    if world_size > 1:
        del model  # with DDP alive, ending the process group could take forever
        dist.barrier()  # rank 0 may still be writing a checkpoint
        dist.destroy_process_group()
        atexit.unregister(os._exit)
    go_on = f'--init_from=resume --out_dir={shlex.quote(out_dir)}'
    lost = (f'the checkpoint of step {step:,} could not be written: once there is room, {go_on} '
            'continues from the last one, or from the start')
    if step < max_steps:
        if written:
            print(f'Stopped after step {step}; go on with {go_on}', flush=True)
        else:  # a run without any checkpoint, best.pt included, has failed
            check(any(Path(out_dir).glob('*.pt')), lost)
            warn(lost)
        return STOPPED

    # Write the results and a sample of text
    check(math.isfinite(test_loss), f'test loss {test_loss}: try a lower learning_rate or init_std')
    print(f'Finished in {timedelta(seconds=round(seconds))}: validation '
          f'{in_words(val_loss, val_bits)}, test {in_words(test_loss, test_bits)}', flush=True)
    if rank == 0:
        result = {
            'val_bits_per_byte': val_bits, 'test_bits_per_byte': test_bits,
            'test_loss': test_loss, 'test_perplexity': perplexity(test_loss),
            'val_loss': val_loss, 'val_perplexity': perplexity(val_loss),
            'parameters': raw_model.num_params(), 'steps': step,
            'tokens': step * tokens_per_step,
            'flops_per_token': flops, 'skipped': skipped,
            'precision': ' then '.join(precisions), 'seconds': seconds}
        write_atomic(f'{out_dir}/result.json', to_json(result, indent=1))
        if cfg.sample_tokens:
            with torch.compiler.set_stance('force_eager'):
                text = sample_text(raw_model.eval(), tokenizer, '', cfg.sample_tokens,
                                   temperature=0.8, top_k=None, seed=cfg.seed, go_on=True)
            print(text, flush=True)
            log(step, sample=text)
    check(written, lost)
    return 0


def in_words(loss: float, bits: float | None) -> str:
    """Return a loss in bits per byte and in nats per token, for people to read."""
    nats = f'{loss:.4f} nats per token'
    return nats if bits is None else f'{bits:.4f} bits per byte ({nats})'


def count_steps(cfg: TrainConfig, model_cfg: ModelConfig) -> int:
    """Return how many steps a run takes. Without `tokens` it reads tokens_per_param tokens for each
    parameter of the Llama of the same shape."""
    with torch.device('meta'):
        llama_params = Transformer(model_cfg.llama()).num_params()
    tokens = cfg.tokens or cfg.tokens_per_param * llama_params
    return math.ceil(tokens / (cfg.batch_size * model_cfg.context_length))


def divide_batch(cfg: TrainConfig, length: int, world_size: int) -> int:
    """Divide the batch among the processes, and each share into micro-batches that fit into memory.
    Return how many sequences of this length a micro-batch has. UserError if a division leaves a
    remainder."""
    share, remainder = divmod(cfg.batch_size, world_size)  # sequences per process and step
    check(remainder == 0, f'batch_size={cfg.batch_size} does not divide among {world_size} '
          f'processes; try batch_size={(share + 1) * world_size}')
    divisors = [m for m in range(1, share + 1) if share % m == 0]
    fitting = [m for m in divisors if m * length <= MICRO_BATCH_TOKENS]
    micro_batch_size = cfg.micro_batch_size or max(fitting, default=1)
    check(micro_batch_size in divisors,
          f'micro_batch_size={micro_batch_size} does not divide batch_size / processes = {share}; '
          f'expected one of {", ".join(map(str, divisors))}')
    return micro_batch_size


def check_gradients(model: Transformer, world_size: int) -> None:
    """After the first backward pass, warn of parameters that the loss does not depend on. UserError
    with several processes: averaging needs a gradient of each."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        message = f'the loss does not depend on {", ".join(unused)}, which cannot learn'
        check(world_size == 1, f'{message}: several processes need a gradient of each parameter')
        warn(message)


def should_compile(cfg: TrainConfig, device: torch.device, run_flops: float) -> bool:
    """Return whether to compile. By default a GPU does, and a CPU only for a long run."""
    if cfg.compile is not None:
        return cfg.compile
    pays = device.type == 'cuda' or (device.type == 'cpu' and run_flops > MIN_FLOPS_TO_COMPILE)
    if not pays:
        return False
    try:
        torch.compile(torch.relu)(torch.ones(64, device=device))
    except Exception as error:  # such as a missing C++ compiler
        print(f'Not compiled, so the run is slower and needs more memory: {first_line(error)}',
              flush=True)
        return False
    return True


def choose_dtype(cfg: TrainConfig, device: torch.device, compiled: bool) -> torch.dtype:
    """Return the dtype of matrix products. By default it is bfloat16 on a GPU that has it, and on a
    CPU with AMX if the run is compiled; otherwise float32."""
    if cfg.dtype != 'auto':
        return getattr(torch, cfg.dtype)
    if device.type == 'cuda':
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        bf16 = device.type == 'cpu' and compiled and torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if bf16 else torch.float32


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

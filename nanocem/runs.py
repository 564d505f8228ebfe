"""Run folders: options, checkpoints and the log."""
import contextlib
import glob
import io
import itertools
import math
import os
import pickle
import re
import statistics
import zipfile
from dataclasses import fields
from typing import Any

import torch
from filelock import FileLock, Timeout

from configurator import UserError, build, check, fail, warn
from model import ModelConfig, Transformer
from nanocem.files import read_json, read_json_lines, to_json, write_atomic
from nanocem.hardware import find_device
from nanocem.hub import WEIGHTS_FILE, read_export
from nanocem.tokenizers import MODEL_FILE

# Relative: bfloat16's rounding is some 1%, and GELU for SiLU 4 to 20%
PROBE_ERROR = 0.02
Losses = dict[tuple[str, int], float]  # y of (model, seed), for the runs of one size


def newest_run() -> str:
    """Return the folder of the last started or resumed run in out/. UserError if there is none."""
    for path in sorted(glob.glob('out/*/config.json'), key=os.path.getmtime, reverse=True):
        try:
            read_config(os.path.dirname(path))
            return os.path.dirname(path)
        except ValueError as error:
            print(f'{path} is left out: {error}', flush=True)
    fail('no run in out/: python train.py makes one, --out_dir=FOLDER names one elsewhere')


def read_config(out_dir: str) -> dict[str, Any]:
    """Read a run's config.json. UserError if there is none, or if it is damaged or another
    program's."""
    config = read_json(f'{out_dir}/config.json') or {}
    check({'train', 'model'} <= {*config}, f'no run in {out_dir}')
    return config


def count_steps(train: dict[str, Any], cfg: ModelConfig) -> int:
    """Return how many steps a run of these training options takes. Without `tokens` it reads
    tokens_per_param tokens for each parameter of the Llama of the same shape."""
    with torch.device('meta'):
        llama_params = Transformer(cfg.llama()).num_params()
    tokens = train['tokens'] or train['tokens_per_param'] * llama_params
    return math.ceil(tokens / (train['batch_size'] * cfg.context_length))


def read_result(out_dir: str, config: dict[str, Any]) -> dict[str, Any]:
    """Read the result.json of a run with this config.json. {} if the run has not ended. UserError
    if it is damaged, or that of fewer or more tokens; KeyError if it lacks them."""
    result = read_json(f'{out_dir}/result.json')
    if result is None:
        return {}
    train, cfg = config['train'], build(ModelConfig, config['model'])
    tokens = count_steps(train, cfg) * train['batch_size'] * cfg.context_length
    check(result['tokens'] == tokens, f'{out_dir}/result.json is that of {result["tokens"]:,} '
          f'tokens, and config.json asks for {tokens:,}: --init_from=resume ends the run')
    return result


def split_failed(y: Losses) -> tuple[Losses, set[str]]:
    """Return the losses of runs that did not fail, and the models with failed runs. A run fails if
    y is not finite, or 0.5 nats above the median of the model's seeds."""
    finished = {}
    for (model, seed), loss in y.items():
        median = statistics.median(other for (name, _), other in y.items() if name == model)
        if loss < min(math.inf, median + 0.5):
            finished[model, seed] = loss
    return finished, {model for model, seed in y if (model, seed) not in finished}


def new_folder(out_dir: str | None, cfg: ModelConfig) -> str:
    """Make the folder of a new run: `out_dir`, or the first free one of out/NAME, out/NAME-2, ...,
    where NAME describes the model. UserError if `out_dir` holds a run."""
    if not out_dir:
        size = cfg.size or f'{cfg.n_layer}x{cfg.d_model}'
        name = f'out/{size}-{cfg.attn}{cfg.attn_steps}-{cfg.mlp}{cfg.mlp_steps}-{cfg.positions}'
        os.makedirs('out', exist_ok=True)
        for path in itertools.chain([name], (f'{name}-{n}' for n in itertools.count(2))):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)  # of two runs that try the same name one succeeds
                return path
    check_no_run(out_dir)
    os.makedirs(out_dir, exist_ok=True)
    return out_dir


def check_no_run(out_dir: str) -> None:
    """UserError if a folder holds a run."""
    files = glob.glob('config.json', root_dir=out_dir) + glob.glob('*.pt', root_dir=out_dir)
    check(not files, f'out_dir={out_dir} holds a run already: --init_from=resume '
          'continues it, another --out_dir starts a new one')


def lock_folder(out_dir: str) -> Any:
    """Lock a run's folder until the returned lock is deleted. UserError if another process trains
    there. None on a file system without locks."""
    try:
        return FileLock(f'{out_dir}/.lock').acquire(timeout=0)
    except Timeout:
        fail(f'out_dir={out_dir}: another process is training there; give another --out_dir')
    except OSError as error:
        warn(f'{out_dir} cannot be locked ({error}): start no second run there')


def check_match(saved: dict[str, Any] | None, must_match: dict[str, Any], path: str) -> None:
    """UserError unless `saved`, from the run in `path`, has the values of `must_match`. Names that
    `saved` lacks are not compared."""
    check(saved is not None, f'{path} is a run of an older version, which cannot be resumed: '
          f'--init_from={path} with another --out_dir starts a new run from its weights')
    different = [f'{name}={saved[name]} (now {value})' for name, value in must_match.items()
                 if saved.get(name, value) != value]
    check(not different, f'the run in {path} has {", ".join(different)}: expected the same; '
          '--init_from=scratch with another --out_dir starts a new run')


def own_classes(model: Transformer) -> list[str]:
    """Return the names of a model's classes that are not model.py's: of an energy of one's own."""
    return sorted({type(module).__name__ for module in model.modules()
                   if type(module).__module__ != Transformer.__module__
                   and not type(module).__module__.startswith('torch.')})


def check_classes(state: dict[str, Any], model: Transformer, path: str) -> None:
    """UserError unless the checkpoint that was read from `path` is of a model of these classes. One
    of an older version does not say."""
    found = own_classes(model)
    saved = state.get('must_match', {}).get('classes', found)
    check(saved == found, f'{path} was trained with {", ".join(saved) or "no class of your own"}, '
          f'and this script has {", ".join(found) or "the classes of model.py"}: run it through '
          'the file that trained it, as docs/new_energy.py does')


def left_out(options: dict[str, Any]) -> str:
    """Return those of a saved model's options that this model.py lacks, and `build` leaves out, as
    a warning; '' if there are none."""
    known = {field.name for field in fields(ModelConfig)}
    unknown = [f'{name}={value}' for name, value in options.items() if name not in known]
    return f'its model has {", ".join(unknown)}, unlike this model.py' if unknown else ''


@torch.no_grad()
def probe(model: Transformer) -> list[float]:
    """Return sixteen logits at the end of fixed ids. They say what a model computes,
    by whatever code, and in full precision they are alike on all machines."""
    vocab_size = len(model.head)
    idx = torch.arange(min(64, model.cfg.context_length), device=model.head.device) * 7919
    device = model.head.device.type
    with torch.compiler.set_stance('force_eager'), torch.autocast(device, enabled=False):
        logits = model.next_logits(idx[None] % vocab_size)[0]
    return logits[torch.arange(16, device=logits.device) * 7919 % vocab_size].tolist()


def other_logits(state: dict[str, Any], model: Transformer) -> str:
    """Return what a checkpoint says against a model that has loaded its weights: '' if both compute
    the same, up to rounding. One of an older version does not say."""
    saved = torch.tensor(state.get('probe', []))
    if not len(saved) or not saved.isfinite().all():
        return ''
    error = ((torch.tensor(probe(model)) - saved).norm() / saved.norm()).item()
    if error <= PROBE_ERROR:  # false for NaN
        return ''
    return (f'its logits are not those of the model that was saved (off by {error:.1%}): model.py, '
            'or the weights, have changed since')


def load_weights(model: Transformer, state: dict[str, Any], path: str,
                 resume: bool = False) -> None:
    """Load the weights of a checkpoint that was read from `path`. A line says whether this model
    computes something else than the one that was saved; a run to resume is then refused. UserError
    if the weights or classes are not this model's."""
    def object_to(wrong: str) -> None:
        check(not (wrong and resume), f'{path} cannot be resumed: {wrong}')
        if wrong:
            warn(f'{path}: {wrong}')

    if lost := left_out(state['model_config']):
        object_to(f'{lost}; it is read without')
    check_classes(state, model, path)
    try:
        model.load_state_dict(state['model'])
    except RuntimeError as error:
        fail(f'{path} does not have the weights of this model.py: expected the one that trained it '
             f'({" ".join(str(error).split()):.300})')
    # A new run with other options is meant to compute something else
    if resume or model.cfg == build(ModelConfig, state['model_config']):
        object_to(other_logits(state, model))


def checkpoints(out_dir: str) -> list[str]:
    """Return the paths of a run's numbered checkpoints, oldest first."""
    return sorted(glob.glob(f'{glob.escape(out_dir)}/step_{"[0-9]" * 8}.pt'))


def save_checkpoint(out_dir: str, name: str, state: dict[str, Any]) -> bool:
    """Write a checkpoint completely or not at all, and delete all numbered ones but the last two.
    If writing fails, print a warning and return False: earlier checkpoints stay."""
    path = f'{out_dir}/{name}'
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_atomic(path, buffer.getbuffer())
        # Do not count those of later steps: they are damaged, since the run was resumed before them
        for old in [old for old in checkpoints(out_dir) if os.path.basename(old) <= name][:-2]:
            os.remove(old)
    except OSError as error:
        warn(f'{path} not written ({error.strerror}); the run goes on, earlier checkpoints are '
             'intact')
        return False
    return True


def read_checkpoint(path: str) -> dict[str, Any]:
    """Read a checkpoint. Its checksums are verified, and only tensors and plain values are loaded.
    UserError if it is damaged, OSError if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            check(archive.testzip() is None, 'checksum')
        state = torch.load(path, map_location='cpu', weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError:  # such as torch.save(model)
        fail(f'{path} is no checkpoint of train.py: it holds other objects than tensors and plain '
             'values, which could run any code')
    except Exception as error:  # a damaged file can fail in any way
        fail(f'{path} is damaged ({" ".join(str(error).split()):.200})')
    check(isinstance(state, dict) and {'model', 'model_config'} <= {*state}, f'{path} is no '
          "checkpoint of train.py: expected one, which has the model's options beside its weights")
    # Strip the prefixes that torch.compile and DDP put before the names of weights
    state['model'] = {re.sub(r'^((_orig_mod|module)\.)+', '', name): w
                      for name, w in state['model'].items()}
    # Remember the folder if it holds the tokenizer
    if os.path.exists(os.path.join(os.path.dirname(path), MODEL_FILE)):
        state['folder'] = os.path.dirname(path)
    return state


def last_checkpoint(out_dir: str) -> dict[str, Any] | None:
    """Read a run's last checkpoint: the last numbered one that is not damaged, or best.pt if that
    is of a later step. Each damaged one prints a warning. None if there is no checkpoint, UserError
    if all are damaged."""
    numbered = [*reversed(checkpoints(out_dir))]
    best = glob.glob(f'{glob.escape(out_dir)}/best.pt')
    found = []
    for files in (numbered, best):
        for file in files:
            try:
                found.append(read_checkpoint(file))
                break
            except UserError as error:
                warn(f'{error}; it is passed over')
    check(bool(found) or not (best or numbered), f'no intact checkpoint in {out_dir}')
    return max(found, key=lambda state: state['step'], default=None)


def best_checkpoint(path: str) -> dict[str, Any]:
    """Read a checkpoint file, an export, or a run's best.pt, or else its last checkpoint. UserError
    if there is none."""
    if os.path.isfile(f'{path}/{WEIGHTS_FILE}'):
        return read_export(path)
    for file in (path, f'{path}/best.pt'):
        if os.path.isfile(file):
            return read_checkpoint(file)
    return last_checkpoint(path) or fail(f'no checkpoint in {path}: python train.py makes one')


def load_model(path: str, device: str = 'cpu') -> tuple[Transformer, dict[str, Any]]:
    """Load the model of best_checkpoint(path) onto a device, in evaluation mode. Return it and the
    checkpoint, whose `data` describes what it was trained on. UserError if there is none."""
    state = best_checkpoint(path)
    model = Transformer(build(ModelConfig, state['model_config']))
    load_weights(model, state, path)
    return model.to(find_device(device)).eval(), state


class Log:
    """Write numbers to log.jsonl and TensorBoard. If a line cannot be written, a warning says so,
    and the run goes on. A resumed run drops the lines of later steps than `step`."""
    def __init__(self, out_dir: str, step: int, tensorboard: bool):
        self.path = f'{out_dir}/log.jsonl'
        self.writer = None
        if os.path.exists(self.path):
            lines = [line for line in read_json_lines(self.path) if line['step'] <= step]
            write_atomic(self.path, b''.join(to_json(line) + b'\n' for line in lines))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(out_dir, purge_step=step + 1)

    def __call__(self, step: int, **values: Any) -> None:
        """Write a line. Numbers go to TensorBoard as well."""
        try:
            with open(self.path, 'ab') as file:
                file.write(to_json({'step': step, **values}) + b'\n')
            if self.writer:
                for name, value in values.items():
                    if isinstance(value, (int, float)):
                        self.writer.add_scalar(name, value, step)
                self.writer.flush()
        except Exception as error:  # TensorBoard raises errors of many types
            warn(f'step {step} is not in the log ({error}); the run goes on')

"""A run's folder: what a run starts from, its checkpoints, its log, and the model that it leaves.

    config.json, model.py    the options, and the text of model.py that trains
    step_00001000.pt         the last two checkpoints; best.pt has the best validation loss
    log.jsonl, result.json   losses and speed; the test of the last weights
"""
import contextlib
import glob
import io
import itertools
import os
import pickle
import shlex
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

import model as model_py
from configurator import UserError, check, fail, merge, warn
from model import ModelConfig, Transformer
from nanocem.files import read_json, read_json_lines, to_json, write_atomic
from nanocem.hardware import find_device
from nanocem.hub import WEIGHTS_FILE, read_export, saved_config, without_unused
from nanocem.same import find_change, warn_if_not_causal
from nanocem.tokenizers import MODEL_FILE

# Options that a resumed run may change. All others stay, since they decide what it computes
MAY_CHANGE = {'out_dir', 'init_from', 'data', 'micro_batch_size', 'eval_interval', 'test_tokens',
              'log_interval', 'checkpoint_interval', 'stop_step', 'device', 'dtype', 'kernels',
              'compile', 'tensorboard', 'sample_tokens'}
# Options that a new run needs to train on as an earlier one did
RECIPE = ('batch_size', 'optimizer', 'learning_rate', 'warmup', 'final_lr', 'beta1', 'beta2',
          'adam_eps', 'weight_decay', 'grad_clip')
# Options that decide which weights a model has, and must be those of the weights to start from
WEIGHTS = ('size', 'd_model', 'n_layer', 'n_head', 'n_kv_head', 'd_mlp', 'vocab_size', 'attn',
           'mlp', 'tie', 'positions', 'match_bias', 'kq_diag', 'preconditioner', 'attn_rank',
           'mlp_rank', 'mlp_match', 'untied_output')
# Options that a new run's folder is named for, where they are not the default
IN_NAME = {'tie': 'tie_{}', 'residual': '{}', 'mlp_energy': '{}', 'untied_output': 'untied',
           'preconditioner': 'P', 'kq_diag': 'diagonal', 'key_shift': 'half',
           'value_shift': 'half_values', 'match_bias': 'match'}
# model.py as it was when the program began: saving another one during a run changes nothing in it
MODEL_TEXT = Path(model_py.__file__).read_text(encoding='utf-8')


# What a run starts from

class Start(NamedTuple):
    """What a run starts from. From scratch there are only options."""
    options: dict[str, Any]  # those given, over those of the run to resume or of the weights
    config: dict[str, Any] | None = None  # the config.json of the run to resume
    state: dict[str, Any] | None = None  # its last checkpoint; None: it has none yet
    weights: dict[str, Any] | None = None  # the checkpoint of other weights
    lock: Any = None  # of the folder of the run to resume, until the process ends


def start_from(given: dict[str, Any], rank: int, train: type) -> Start:
    """Read what init_from names: nothing (scratch), a run to resume, or other weights. Raises
    UserError. `train` declares the run's options."""
    init_from = given.get('init_from', 'scratch')
    if init_from == 'scratch':
        return Start(given)
    if init_from == 'resume':
        return resume(given.get('out_dir') or newest_run(), given, rank)
    return start_from_weights(init_from, given, train)


def start_from_weights(path: str, given: dict[str, Any], train: type) -> Start:
    """Start a new run from the weights in `path`. UserError if an option is given that contradicts
    them."""
    weights = load_model(path)[1]
    saved = vars(saved_config(weights['model_config']))
    check_options(path, saved, {name: given[name] for name in WEIGHTS if name in given})
    others = {name: value for name, value in given.items() if name not in WEIGHTS}
    options = without_unused(saved) | {'data': weights['data_dir']}
    return Start(merge(options, others, train, ModelConfig), weights=weights)


def resume(out_dir: str, given: dict[str, Any], rank: int) -> Start:
    """Go on with a run, with its options but for those that may change."""
    config = read_config(out_dir)
    saved = vars(saved_config(config['model'])) | config['train']
    check_options(out_dir, saved, given)
    kept = {name: value for name, value in given.items() if name in MAY_CHANGE}
    options = without_unused(saved) | {'stop_step': None, **kept, 'out_dir': out_dir,
                                       'init_from': saved['init_from']}  # where it started
    lock = None
    if rank == 0:
        # Lock it first: the process that trains there may be about to write a checkpoint
        lock = lock_folder(out_dir)
        # Delete what a process that was killed has half written
        for half in glob.glob(f'{glob.escape(out_dir)}/*.pt.tmp'):
            with contextlib.suppress(OSError):
                os.remove(half)
    state = last_checkpoint(out_dir)
    from_scratch = options['init_from'] == 'scratch'
    weights = None if state or from_scratch else load_model(options['init_from'])[1]
    return Start(options, config, state, weights, lock)


def check_options(path: str, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """UserError if a given option that may not change is not that of the run in `path`."""
    fixed = {name: value for name, value in given.items()
             if value is not None and name not in MAY_CHANGE}
    recipe = ' '.join(f'--{name}={saved[name]}' for name in RECIPE if name in saved)
    remedy = (f'. A new run can train its weights further: --init_from={shlex.quote(path)} '
              f'--tokens=N {recipe}' if recipe else '')  # weights to start from have no recipe
    check_same(path, saved, fixed, remedy)


def check_same(path: str, saved: dict[str, Any], now: dict[str, Any], remedy: str = '') -> None:
    """UserError, which names them, if some values are not those of the run in `path`."""
    different = [f'{name}={saved[name]} (now {value})' for name, value in now.items()
                 if as_path(name, saved.get(name, value)) != as_path(name, value)]
    check(not different, f'the run in {path} has {", ".join(different)}: expected the '
          f'same{remedy}')


def as_path(name: str, value: Any) -> Any:
    return os.path.abspath(value) if name == 'text' and value else value  # b.txt is ./b.txt


def keep_model_py(out_dir: str, step: int) -> None:
    """Keep the text of model.py in a run's folder. If another one has trained the run until this
    step, keep both, and say so."""
    path, until = Path(out_dir, 'model.py'), Path(out_dir, f'model_until_{step}.py')
    if path.exists() and path.read_text(encoding='utf-8') == MODEL_TEXT:
        return
    if path.exists():
        if not until.exists():  # else the text in `path` has trained no step that was kept
            path.rename(until)
        warn(f'model.py was edited since step {step:,}, and the run goes on: diff {until} {path}')
    write_atomic(str(path), MODEL_TEXT.encode())


# Folders

def newest_run() -> str:
    """Return the folder of the last started or resumed run in out/. UserError if there is none."""
    for path in sorted(glob.glob('out/*/config.json'), key=os.path.getmtime, reverse=True):
        try:
            read_config(os.path.dirname(path))
            return os.path.dirname(path)
        except ValueError as error:
            print(f'{path} is left out: {error}', flush=True)
    fail('no run in out/: python train.py config/mini.py makes one, --out_dir=FOLDER names one '
         'elsewhere')


def read_config(out_dir: str) -> dict[str, Any]:
    """Read a run's config.json. UserError if there is none, or if it is damaged or another
    program's."""
    config = read_json(f'{out_dir}/config.json') or {}
    check('model_type' not in config, f'{out_dir} is an export, without the options and losses of '
          'its training: expected a run of train.py')
    check({'train', 'model'} <= {*config}, f'no run in {out_dir}')
    return config


def read_result(out_dir: str, config: dict[str, Any]) -> dict[str, Any]:
    """Read the result.json of a run with this config.json; {} if it has not ended. UserError if it
    is damaged, or that of fewer or more steps."""
    result = read_json(f'{out_dir}/result.json')
    if result is None:
        return {}
    steps = config.get('max_steps', result['steps'])  # the config.json of an older run has none
    check(result['steps'] == steps, f'{out_dir}/result.json is that of {result["steps"]:,} steps, '
          f'and config.json asks for {steps:,}: --init_from=resume completes the run')
    return result


def new_folder(out_dir: str | None, cfg: ModelConfig) -> tuple[str, Any]:
    """Make and lock the folder of a new run: `out_dir`, or the first free one of out/NAME,
    out/NAME-2, ..., where NAME describes the model. UserError if `out_dir` holds a run."""
    if not out_dir:
        size = cfg.size or f'{cfg.n_layer}x{cfg.d_model}'
        attn = 'llama' if cfg.attn == 'llama' else f'{cfg.attn}{cfg.attn_steps}'
        mlp = 'llama' if cfg.mlp == 'llama' else f'{cfg.mlp}{cfg.mlp_steps}'
        options = [word.format(getattr(cfg, option)) for option, word in IN_NAME.items()
                   if getattr(cfg, option) != getattr(ModelConfig, option)]
        if cfg.n_kv_head < cfg.n_head:
            options.append(f'gqa{cfg.n_kv_head}')
        name = 'out/' + '-'.join([size, attn, mlp, cfg.positions, *options])
        for n in itertools.count(1):
            out_dir = name if n == 1 else f'{name}-{n}'
            with contextlib.suppress(FileExistsError):
                os.makedirs(out_dir)  # of two runs that try the same name one succeeds
                return out_dir, lock_folder(out_dir)
    os.makedirs(out_dir, exist_ok=True)
    lock = lock_folder(out_dir)  # before the look: a run may be about to end
    files = glob.glob('config.json', root_dir=out_dir) + glob.glob('*.pt', root_dir=out_dir)
    check(not files, f'out_dir={out_dir} holds a run already: --init_from=resume '
          'continues it, another --out_dir starts a new one')
    return out_dir, lock


def lock_folder(out_dir: str) -> Any:
    """Lock a run's folder until the returned lock is deleted. UserError if another process trains
    there. None, with a warning, where the folder cannot be locked."""
    try:
        return FileLock(f'{out_dir}/.lock').acquire(timeout=0)
    except Timeout:
        fail(f'out_dir={out_dir}: another process is training there; give another --out_dir')
    except OSError as error:
        warn(f'{out_dir} cannot be locked ({error}): start no second run there')


# Checkpoints

def checkpoints(out_dir: str) -> list[str]:
    """Return the paths of a run's numbered checkpoints, oldest first."""
    return sorted(glob.glob(f'{glob.escape(out_dir)}/step_{"[0-9]" * 8}.pt'))


def save_checkpoint(path: str, state: dict[str, Any]) -> bool:
    """Write a checkpoint completely or not at all. After a numbered one is written, all earlier
    numbered ones but the last are deleted. If writing fails, print a warning and return False:
    earlier checkpoints stay."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_atomic(path, buffer.getbuffer())
    except OSError as error:
        warn(f'{path} not written ({error.strerror}); the run goes on, earlier checkpoints are '
             'intact')
        return False
    folder, name = os.path.split(path)
    if name == 'best.pt':  # it replaces only itself
        return True
    # Keep this one and the one before it. A checkpoint of a later step does not count: it is
    # damaged, since the run was resumed from an earlier one
    numbered = [old for old in checkpoints(folder) if os.path.basename(old) <= name]
    for old in numbered[:-2]:
        with contextlib.suppress(OSError):  # the next checkpoint tries again
            os.remove(old)
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
        fail(f'{path} is not a checkpoint of train.py: it holds objects other than tensors and '
             'plain values, and loading such objects could run any code')
    except Exception as error:  # a damaged file can fail in any way
        fail(f'{path} is damaged ({" ".join(str(error).split()):.200})')
    check(isinstance(state, dict) and {'model', 'model_config'} <= {*state}, f'{path} is not a '
          "checkpoint of train.py: expected one, which has the model's options and its weights")
    # Remember the folder if it holds the tokenizer
    if os.path.exists(os.path.join(os.path.dirname(path), MODEL_FILE)):
        state['folder'] = os.path.dirname(path)
    return state


def last_checkpoint(out_dir: str) -> dict[str, Any] | None:
    """Read a run's last intact checkpoint. Each damaged one that is passed over prints a warning.
    None if there is no checkpoint, UserError if all are damaged."""
    numbered, best = checkpoints(out_dir)[::-1], glob.glob(f'{glob.escape(out_dir)}/best.pt')
    found = []
    for files in numbered, best:  # best.pt may be of a later step than the last numbered one
        for file in files:
            try:
                found.append(read_checkpoint(file))
                break
            except UserError as error:
                warn(f'{error}; it is passed over')
    if (numbered or best) and not found:
        fail(f'no intact checkpoint in {out_dir}')
    return max(found, key=lambda state: state['step'], default=None)


def best_checkpoint(path: str) -> dict[str, Any]:
    """Read a checkpoint file, an export, or a run's best.pt, or else its last checkpoint. UserError
    if there is none."""
    if os.path.isfile(f'{path}/{WEIGHTS_FILE}'):
        return read_export(path)
    for file in (path, f'{path}/best.pt'):
        if os.path.isfile(file):
            return read_checkpoint(file)
    state = last_checkpoint(path)
    if state is None:
        begun = os.path.isfile(f'{path}/config.json')  # the first checkpoint comes later
        fail(f'no checkpoint in {path}: ' + ('--out_dir names another run' if begun else
                                             'python train.py config/mini.py makes a run'))
    return state


# Models

def load_model(path: str, device: str = 'cpu') -> tuple[Transformer, dict[str, Any]]:
    """Load the model of best_checkpoint(path) onto a device, in evaluation mode. Return it and the
    checkpoint, whose `data` describes what it was trained on. UserError if there is none."""
    state = best_checkpoint(path)
    model = Transformer(saved_config(state['model_config'])).to(find_device(device))
    load_weights(model, state, path)
    state['change'] = describe_change(model, state)
    if state['change']:
        warn(f'{path}: {state["change"]}')
    warn_if_not_causal(model)
    return model.eval(), state


def load_weights(model: Transformer, state: dict[str, Any], path: str) -> None:
    """Load the weights of a checkpoint that was read from `path`. UserError if they do not fit."""
    try:
        model.load_state_dict(state['model'])
    except RuntimeError as error:
        fail(f'{path} does not have the weights of these options, or of this model.py: expected '
             f'those that trained it ({" ".join(str(error).split()):.300})')


def describe_change(model: Transformer, state: dict[str, Any]) -> str:
    """Describe how what this model.py computes differs from what the model.py of a checkpoint
    computed, or return ''. `model` has the checkpoint's weights. A checkpoint from a custom
    training loop may have no logits to compare."""
    # An export also keeps the options that its logits were computed with: another program may
    # change those in its config.json
    options = state.get('options', state['model_config'])
    known = {field.name for field in fields(ModelConfig)}
    unknown = [f'{name}={value}' for name, value in options.items() if name not in known]
    lacks = f'its model has {", ".join(unknown)}, unlike this model.py' if unknown else ''
    if 'outputs' not in state:
        return lacks
    # Do not report an unknown option if the logits are the same: it changes nothing
    change = find_change(model, state['outputs'])
    return f'{change}; {lacks}' if change and lacks else change


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
            with contextlib.suppress(ImportError):  # it is not installed: there are no events
                from torch.utils.tensorboard import SummaryWriter
                self.writer = SummaryWriter(out_dir, purge_step=step + 1)

    def __call__(self, step: int, **values: Any) -> None:
        """Write a line of numbers, tensors, text, or lists of these. Numbers, and tensors that are
        one number, go to TensorBoard as well."""
        where = 'the log'
        try:
            with open(self.path, 'ab') as file:
                file.write(to_json({'step': step, **values}) + b'\n')
            where = "TensorBoard's events"
            if self.writer:
                for name, value in values.items():
                    number = value.tolist() if hasattr(value, 'tolist') else value
                    if isinstance(number, (int, float)):
                        self.writer.add_scalar(name, number, step)
                self.writer.flush()
        except Exception as error:  # TensorBoard raises errors of many types
            warn(f'step {step} is not in {where} ({error}); the run goes on')

"""Run folders: what a run starts from, its options, checkpoints and log."""
import contextlib
import glob
import io
import itertools
import os
import pickle
import shlex
import zipfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

import model as model_py
from configurator import UserError, check, fail, merge, warn
from model import ModelConfig, Transformer
from nanocem.documents import Reading
from nanocem.files import read_json, read_json_lines, to_json, write_atomic
from nanocem.hardware import find_device
from nanocem.hub import WEIGHTS_FILE, read_export, saved_config, with_a_part
from nanocem.same import differences, differing, find_change, warn_if_not_causal
from nanocem.tokenizers import MODEL_FILE

# Options that must stay the same when a run is resumed; so must its model and its data
RECIPE = ('seed', 'batch_size', 'optimizer', 'learning_rate', 'warmup', 'final_lr', 'beta1',
          'beta2', 'adam_eps', 'weight_decay', 'grad_clip', 'eval_tokens')
# Options that decide which weights a model has, and must be those of the weights to start from
WEIGHTS = ('size', 'd_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'attn', 'mlp', 'tie',
           'positions', 'match_bias', 'kq_diag', 'preconditioner', 'attn_rank', 'mlp_rank',
           'mlp_match')


# What a run starts from

class Start(NamedTuple):
    """What a run starts from."""
    options: dict[str, Any]  # those given, over those of the run to resume or of the weights
    out_dir: str | None = None  # the run's folder; None: a new one
    lock: Any = None  # of the run to resume, until the process ends
    config: dict[str, Any] | None = None  # the config.json of the run to resume
    state: dict[str, Any] | None = None  # its last checkpoint; None: it has none yet
    pretrained: dict[str, Any] | None = None  # the weights that the first step starts from

    def has_ended(self) -> bool:
        """Return whether the run to resume has been tested after its last step."""
        at_end = self.state is not None and self.state['step'] == self.state['max_steps']
        return at_end and os.path.exists(f'{self.out_dir}/result.json')

    def in_new_folder(self, cfg: ModelConfig) -> 'Start':
        """Make and lock the folder of a new run. UserError if it holds a run."""
        out_dir = new_folder(self.out_dir, cfg)
        lock = lock_folder(out_dir)
        check_no_run(out_dir)  # one may have ended since
        return self._replace(out_dir=out_dir, lock=lock)


def start_from(given: dict[str, Any], rank: int, train: type) -> Start:
    """Read what init_from names: nothing (scratch), a run to resume, or other weights. The given
    options override those read, but for a few that must be equal; `train` declares the run's.
    Raises UserError."""
    init_from, out_dir = given.get('init_from', 'scratch'), given.get('out_dir')
    if init_from == 'resume':
        return resume_from(out_dir or newest_run(), given, rank, train)
    if init_from == 'scratch':
        return Start(given, out_dir)
    pretrained = best_checkpoint(init_from)
    saved = pretrained['model_config'] | {'data': pretrained['data_dir']}
    options = override(saved, given, WEIGHTS, init_from, train)
    return Start(options, out_dir, pretrained=pretrained)


def resume_from(out_dir: str, given: dict[str, Any], rank: int, train: type) -> Start:
    """Read a run to resume, and lock its folder. Its text and how it was read cannot change. Raises
    UserError."""
    config = read_config(out_dir)
    saved = {**config['model'], **config['train'], 'stop_step': None}
    texts = [options.get('text') for options in (saved, given)]
    if all(texts) and os.path.abspath(texts[0]) == os.path.abspath(texts[1]):  # b.txt is ./b.txt
        given = given | {'text': saved['text']}
    given = given | {'init_from': saved['init_from']}  # where the run itself started
    fixed = ('text', 'tokenizer', *Reading._fields)
    options = override(saved, given, fixed, out_dir, train)
    # Lock it first: the process that trains there may be about to write a checkpoint
    lock = None
    if rank == 0:
        lock = lock_folder(out_dir)
        for half in glob.glob(f'{glob.escape(out_dir)}/*.pt.tmp'):  # of a process that was killed
            with contextlib.suppress(OSError):
                os.remove(half)
    state = last_checkpoint(out_dir)
    pretrained = None
    if saved['init_from'] != 'scratch' and not state:
        pretrained = best_checkpoint(saved['init_from'])
        options = override(saved, given, (*fixed, *WEIGHTS), saved['init_from'], train)
    return Start(options, out_dir, lock, config, state, pretrained)


def override(saved: dict[str, Any], given: dict[str, Any], fixed: tuple[str, ...],
             path: str, train: type) -> dict[str, Any]:
    """Return the saved options overridden by the given ones. UserError if a given one that is fixed
    is not as `saved` in path."""
    must_match = {name: given[name] for name in fixed if name in given}
    check_match(path, (with_defaults(saved), must_match))
    others = {name: value for name, value in given.items() if name not in fixed}
    return merge(with_a_part(saved), others, train, ModelConfig)


def with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """Return saved options, and the defaults of those that ModelConfig did not have then: the model
    was made without them."""
    return saved | asdict(saved_config(saved))


def check_match(
    path: str, *pairs: tuple[dict[str, Any], dict[str, Any]],
    remedy: str = '--init_from=scratch with another --out_dir starts a new run'
) -> None:
    """UserError unless what was saved in `path` has the values of now, the other one of each pair.
    Names that were not saved are not compared."""
    different = [words for saved, now in pairs for words in differences(saved, now)]
    check(not different, f'the run in {path} has {", ".join(dict.fromkeys(different))}: expected '
          f'the same; {remedy}')


def check_resumable(start: Start, train: dict[str, Any], cfg: ModelConfig, data: dict[str, Any],
                    steps: int) -> None:
    """UserError unless a run to resume has this recipe, model and data, and takes as many steps."""
    config, state, path = start.config, start.state or {}, start.out_dir
    check('code' in config, f'the run in {path} was begun by an older train.py. '
          f'{train_on(path, config)}')
    recipe = {name: train[name] for name in RECIPE}
    check_match(path, (config['train'], recipe), (state.get('recipe', {}), recipe),
                (with_defaults(config['model']), asdict(cfg)),
                (with_a_part(state.get('model_config', {})), asdict(cfg)),
                (config['data'], data), (state.get('data', {}), data))
    took = state.get('max_steps', config['max_steps'])
    check(took == steps, f'the run in {path} takes {took:,} steps (now {steps:,}), and had the '
          f'learning rates of that length. {train_on(path, config)}')


def train_on(path: str, config: dict[str, Any]) -> str:
    """Return what a user reads who wants more steps of the run in `path`: options of a new run that
    begins with its weights and has its recipe."""
    run = config['train']
    recipe = ' '.join(f'--{name}={run[name]}' for name in RECIPE if name in run)
    return (f'A new run trains its weights on: --init_from={shlex.quote(path)} '
            f'--tokens=N {recipe}')


def check_code(start: Start, model: Transformer, code: dict[str, str]) -> list[dict[str, Any]]:
    """Compare model.py, whose definitions are `code`, with the one that has trained a run so far.
    Return all edits since the run began, each with its step. UserError if the weights no longer
    give what they gave."""
    state, path = start.state, start.out_dir
    names, edits = differing(state.get('code', code), code), state.get('edits', [])
    edit = f'model.py was edited since step {state["step"]:,}: {short_list(names)}'
    change = describe_change(model, state)
    check(not change, f'{path} cannot be resumed: {f"{edit}; " if names else ""}{change}')
    if not names:
        return edits
    kept = 'The logits are as they were' if 'outputs' in state else 'There are no logits to compare'
    warn(f'{edit}. {kept}, and the run goes on: diff {text_until(path, state["step"])} '
         f'{model_py.__file__}')
    return [*edits, {'after_step': state['step'], 'definitions': names}]


def keep_text(out_dir: str, text: str, step: int) -> None:
    """Keep a text of model.py in a run's folder, and the one until this step if it was another."""
    path = Path(out_dir, 'model.py')
    if path.exists() and path.read_text(encoding='utf-8') != text:
        path.rename(text_until(out_dir, step))
    if not path.exists():
        write_atomic(str(path), text.encode())


def text_until(out_dir: str, step: int) -> str:
    return f'{out_dir}/model_until_{step}.py'


def short_list(names: list[str]) -> str:
    return ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')


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
    """Read the result.json of a run with this config.json. {} if the run has not ended. UserError
    if it is damaged, or that of fewer or more steps; KeyError if it lacks them."""
    result = read_json(f'{out_dir}/result.json')
    if result is None:
        return {}
    steps = config.get('max_steps', result['steps'])  # the config.json of an older run has none
    tokens = steps * config['train']['batch_size'] * config['model']['context_length']
    check(result['steps'] == steps, f'{out_dir}/result.json is that of {result["tokens"]:,} '
          f'tokens, and config.json asks for {tokens:,}: --init_from=resume ends the run')
    return result


# Options that a new run's folder is named for, where they are not `none`
IN_NAME = {'preconditioner': 'P', 'kq_diag': 'diagonal', 'key_shift': 'half', 'match_bias': 'match'}


def new_folder(out_dir: str | None, cfg: ModelConfig) -> str:
    """Make the folder of a new run: `out_dir`, or the first free one of out/NAME, out/NAME-2, ...,
    where NAME describes the model. UserError if `out_dir` holds a run."""
    if not out_dir:
        size = cfg.size or f'{cfg.n_layer}x{cfg.d_model}'
        attn = 'llama' if cfg.attn == 'llama' else f'cem{cfg.attn_steps}'
        mlp = 'llama' if cfg.mlp == 'llama' else f'cem{cfg.mlp_steps}'
        options = [word for option, word in IN_NAME.items() if getattr(cfg, option) != 'none']
        name = 'out/' + '-'.join([size, attn, mlp, cfg.positions, *options])
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


# Checkpoints

def warn_of_change(state: dict[str, Any], path: str) -> None:
    """Print a warning if this model.py computes something else than the one that made the
    checkpoint that was read from `path`."""
    model = Transformer(saved_config(state['model_config']))
    load_weights(model, state, path)
    if change := describe_change(model, state):
        warn(f'{path}: {change}')


def describe_change(model: Transformer, state: dict[str, Any]) -> str:
    """Return how this model.py computes something else than the one that made the checkpoint whose
    weights the model has, or ''."""
    # An export says of which options its logits are: another program may change those it has
    options = state.get('options', state['model_config'])
    known = {field.name for field in fields(ModelConfig)}
    unknown = [f'{name}={value}' for name, value in options.items() if name not in known]
    lacks = f'its model has {", ".join(unknown)}, unlike this model.py' if unknown else ''
    # A checkpoint of a loop of one's own may keep no logits
    if 'outputs' not in state:
        return lacks
    change = find_change(model, state['outputs'])
    if not change:  # an unknown option that changes nothing is no change
        return ''
    return (change + (f'; {lacks}' if lacks else '') + '. An energy of your own runs through the '
            'file that trained it, as docs/new_energy.py does')


def load_weights(model: Transformer, state: dict[str, Any], path: str) -> None:
    """Load the weights of a checkpoint that was read from `path`. UserError if they do not fit."""
    try:
        model.load_state_dict(state['model'])
    except RuntimeError as error:
        fail(f'{path} does not have the weights of this model.py: expected the one that trained it '
             f'({" ".join(str(error).split()):.300})')


def checkpoints(out_dir: str) -> list[str]:
    """Return the paths of a run's numbered checkpoints, oldest first."""
    return sorted(glob.glob(f'{glob.escape(out_dir)}/step_{"[0-9]" * 8}.pt'))


def save_checkpoint(out_dir: str, name: str, state: dict[str, Any]) -> bool:
    """Write a checkpoint completely or not at all. A numbered one deletes those before it but one.
    If writing fails, print a warning and return False: earlier checkpoints stay."""
    path = f'{out_dir}/{name}'
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_atomic(path, buffer.getbuffer())
    except OSError as error:
        warn(f'{path} not written ({error.strerror}); the run goes on, earlier checkpoints are '
             'intact')
        return False
    # Do not count those of later steps: they are damaged, since the run was resumed before them
    for old in [old for old in checkpoints(out_dir) if os.path.basename(old) <= name][:-2]:
        with contextlib.suppress(OSError):  # the next checkpoint tries again
            os.remove(old)
    return True


def describe_loss(out_dir: str, step: int) -> str:
    """Return what a user reads whose run could not write its last weights."""
    kept = [os.path.basename(path) for path in checkpoints(out_dir)]
    return (f'the weights after step {step:,} could not be written, and are lost: {out_dir} has '
            f'{kept[-1] if kept else "no checkpoint"}. Where there is room, --init_from=resume '
            f'--out_dir={shlex.quote(out_dir)} {"goes on from it" if kept else "begins anew"}')


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
            try:
                return read_checkpoint(file)
            except UserError as error:
                others = checkpoints(path)
                fail(f'{error}' + (f'; {others[-1]} is an earlier or later one' if others else ''))
    return last_checkpoint(path) or fail(f'no checkpoint in {path}: python train.py '
                                         'config/mini.py makes a run')


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
        try:
            with open(self.path, 'ab') as file:
                file.write(to_json({'step': step, **values}) + b'\n')
            if self.writer:
                for name, value in values.items():
                    number = value.tolist() if hasattr(value, 'tolist') else value
                    if isinstance(number, (int, float)):
                        self.writer.add_scalar(name, number, step)
                self.writer.flush()
        except Exception as error:  # TensorBoard raises errors of many types
            warn(f'step {step} is not in the log ({error}); the run goes on')

"""The options of a run: what a new one begins with, and what the next session of one may change."""
import os
from dataclasses import asdict, fields
from typing import Any

from configurator import build, check_values, fail, read_options
from model import ModelConfig
from nanocem.runs import differences, read_config, read_run

KINDS = ('size', 'attn', 'mlp', 'attn_steps', 'mlp_steps')  # what every folder's name begins with


def in_range(options: Any, low: float, high: float, names: str) -> None:
    """ValueError unless these options, where they are set, lie from `low` to `high`."""
    for name in names.split():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f'{name}={value}: expected {low:,} to {high:,}')


def new_options(given: dict[str, Any], cls: type,
                recipe: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """What was `given` for cls and the model, over the model that the run starts from (init_from)
    and what config/SIZE.py brings; and the name of the run's folder: its model, and what of the
    model, the budget and the `recipe` was changed."""
    origin = given.get('init_from', 'scratch')
    source = {} if origin == 'scratch' else read_run(origin)['model_config']
    if different := differences(source, {k: given[k] for k in ('size',) if k in given and source}):
        fail(f'init_from={origin} is of another size: {different}')
    if given.get('text') and 'data' in given:
        fail(f'text={given["text"]} and data={given["data"]}: give one')
    given = one_budget(given)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    size = source.get('size') or given.get('size', 'mini')
    path = os.path.join(root, 'config', f'{size}.py')
    brought = read_options([path], cls, ModelConfig) if os.path.exists(path) else {}
    brought = {**brought, **source}
    options = {**brought, **given}
    cfg = build(ModelConfig, options)
    plain = build(ModelConfig, {**brought, **{k: given[k] for k in KINDS if k in given}})
    default = {**asdict(cls()), **asdict(plain), **brought}
    telling = {*recipe, 'data', 'init_from', 'tokens', 'tokens_per_param'}
    telling |= {field.name for field in fields(ModelConfig)} - {*KINDS, 'attn_impl'}
    words = [f'{cfg.size}-{cfg.attn}{cfg.attn_steps}-{cfg.mlp}{cfg.mlp_steps}']
    for key, value in given.items():
        if key in telling and value is not None and value != default[key]:
            words.append(f'{key}={os.path.basename(str(value).rstrip("/"))}')
    return options, '-'.join(words)[:150]


def resumed_options(out_dir: str | None, given: dict[str, Any], cls: type,
                    recipe: tuple[str, ...]) -> dict[str, Any]:
    """The options of the run in `out_dir`, and over them those `given` for its next session.
    SystemExit where one would make it another model, or change its `recipe`."""
    saved = read_config(out_dir)
    if saved is None:
        fail(f'init_from=resume: no run in {out_dir or "out/"} (config.json is missing or damaged)')
    options = check_values({**saved['train'], **saved['model']}, f'{out_dir}/config.json', cls,
                           ModelConfig)
    asked = {k: v for k, v in given.items() if k in saved['model'] and v is not None}
    if different := differences(options, asked):
        fail(f'the run in {out_dir} is of another architecture: {different}')
    if different := differences(options, {k: given[k] for k in recipe if k in given}):
        fail(f'{different} would bend the run in {out_dir}; --init_from={out_dir} with another '
             '--out_dir starts a new run from its weights')
    given = one_budget(given)
    return {**options, 'stop_step': None, **given, 'init_from': options['init_from']}


def one_budget(given: dict[str, Any]) -> dict[str, Any]:
    """The options with no tokens beside tokens_per_param, which a size or a run may have set."""
    if given.get('tokens') and given.get('tokens_per_param'):
        fail(f'tokens={given["tokens"]} and tokens_per_param={given["tokens_per_param"]} are two '
             'budgets: give one')
    return {**given, 'tokens': None} if 'tokens_per_param' in given else given

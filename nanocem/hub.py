"""Weights and options of models in folders that Hugging Face's transformers loads: write, read."""
import copy
import shutil
import zlib
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from configurator import build, check, fail, warn
from model import NORM_EPS, ModelConfig, Transformer, unused_options
from nanocem.files import fill_folder, finish_folder, other_files, read_json, write_json
from nanocem.hub_tokenizer import find_pad, write_card, write_tokenizer
from nanocem.same import cache_agrees, file_change, fixed_ids, is_llama, outputs_to_keep
from nanocem.tokenizers import tokenizer_of

ROOT = Path(__file__).parents[1]
WEIGHTS_FILE = 'model.safetensors'
CODE = ('model.py', 'nanocem/modeling_nanocem.py')  # copied into exports
LLAMA_NAMES = {  # our names of weights -> those of LlamaForCausalLM
    'embedding': 'model.embed_tokens', 'norm.gain': 'model.norm', 'head': 'lm_head',
    'attn.norm.gain': 'input_layernorm', 'attn.W_Q': 'self_attn.q_proj',
    'attn.W_K': 'self_attn.k_proj', 'attn.W_V': 'self_attn.v_proj', 'attn.W_O': 'self_attn.o_proj',
    'mlp.norm.gain': 'post_attention_layernorm', 'mlp.W': 'mlp.up_proj', 'mlp.V': 'mlp.gate_proj',
    'mlp.W_d': 'mlp.down_proj'}
LLAMA_SIZES = {  # our names of sizes -> those of LlamaConfig
    'vocab_size': 'vocab_size', 'd_model': 'hidden_size', 'd_mlp': 'intermediate_size',
    'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
    'context_length': 'max_position_embeddings'}
OURS_ALONE = ('size', 'init_std')  # options that LlamaConfig lacks; our config.json keeps them
# What another program changes for good reasons: it adds tokens, or trains on longer texts
OTHERS_CHANGE = (*OURS_ALONE, 'vocab_size', 'context_length')


def is_plain_llama(model: Transformer) -> bool:
    """Return whether transformers' own LlamaForCausalLM computes the same."""
    cfg = model.cfg
    return (cfg.attn == cfg.mlp == 'llama' and cfg.positions == 'rope'
            and cfg.tie == cfg.key_shift == cfg.value_shift == 'none'
            and cfg.match_bias == cfg.kq_diag == 'none'
            and cfg.attn_reuse == cfg.mlp_reuse == 1 and is_llama(cfg.n_kv_head < cfg.n_head))


def exported_name(name: str, plain: bool) -> str:
    """Return the name that one of our weights has in an export, of a plain Llama or another."""
    if not plain:
        return f'model.{name}'
    layer = ''
    if name.startswith('blocks.'):
        _, n, name = name.split('.', 2)
        layer = f'model.layers.{n}.'
    return f'{layer}{LLAMA_NAMES[name]}.weight'


def convert_layout(name: str, w: Tensor, plain: bool) -> Tensor:
    """Convert a weight from our layout to an export's, or back. Only a plain Llama's differs."""
    return w.T.contiguous() if plain and name.endswith(('W_O', 'W_d')) else w


def export(model: Transformer, folder: str, state: dict[str, Any],
           dtype: torch.dtype = torch.float32) -> None:
    """Write the model to a folder that transformers loads; a plain Llama as a LlamaForCausalLM. Its
    checkpoint `state` names tokenizer and data. UserError if the folder is not empty."""
    finish_folder(folder, 'config.json')  # of a process that was killed
    check(not other_files(folder), f'to={folder} is not empty: give a new folder')
    reason = file_change(model, state)
    check(not reason, f'to={folder}: an export holds the classes of model.py, and {reason}')
    with fill_folder(folder, 'config.json') as inside:
        write_files(inside, model, state, dtype)


def write_files(path: Path, model: Transformer, state: dict[str, Any], dtype: torch.dtype) -> None:
    """Write all files of an export."""
    from safetensors.torch import save
    cfg, plain = model.cfg, is_plain_llama(model)
    # Write the weights
    weights = {exported_name(name, plain): convert_layout(name, w.detach().to(dtype), plain)
               for name, w in model.named_parameters()}
    (path / WEIGHTS_FILE).write_bytes(save(weights, {'format': 'pt'}))
    # Write the tokenizer
    tokenizer = tokenizer_of(state)
    # A batch is continued at its right end: pads are on the left, which our own code does not take
    pad_side = 'left' if plain else 'right'
    about_tokenizer = write_tokenizer(path, tokenizer, cfg.context_length, pad_side)
    # Describe the model in config.json. If transformers does not know it, copy our code
    if plain:
        config: dict[str, Any] = dict(
            model_type='llama', architectures=['LlamaForCausalLM'],
            **{theirs: getattr(cfg, ours) for ours, theirs in LLAMA_SIZES.items()},
            num_key_value_heads=cfg.n_kv_head, rope_theta=cfg.rope_theta,
            **fixed_in_llama(cfg.d_model, cfg.n_head),
            nanocem={name: getattr(cfg, name) for name in OURS_ALONE})
    else:
        for source in CODE:
            shutil.copyfile(ROOT / source, path / Path(source).name)
        auto = {'AutoConfig': 'modeling_nanocem.NanocemConfig',
                'AutoModelForCausalLM': 'modeling_nanocem.NanocemForCausalLM'}
        config = dict(model_type='nanocem', architectures=['NanocemForCausalLM'], auto_map=auto,
                      read_once=cache_agrees(model, fixed_ids(model)), **vars(cfg))
    # BOS is EOS, too: generation stops where the next document would begin
    ids = dict(bos_token_id=tokenizer.bos, eos_token_id=tokenizer.bos,
               pad_token_id=find_pad(tokenizer))
    write_json(path / 'generation_config.json', use_cache=plain, **ids)
    # A LlamaForCausalLM never trains the embedding of config.json's pad: that must not be BOS
    if ids['pad_token_id'] == tokenizer.bos:
        del ids['pad_token_id']
    # The folder may be published: of a path on this machine, or on one with Windows, write the name
    run = {name: state[name] for name in ('step', 'data', 'data_dir')}
    rounded = copy.deepcopy(model).to(dtype).float()
    run |= {'options': vars(cfg), 'code': checksum_of_text(ROOT / 'model.py'),
            **outputs_to_keep(rounded)}
    data_dir = PureWindowsPath(run['data_dir'])  # it reads the paths of both
    if data_dir.anchor or '..' in data_dir.parts:
        run['data_dir'] = data_dir.name
    write_json(path / 'config.json', **config, **ids, run=run,
               dtype=str(dtype).removeprefix('torch.'))
    write_card(path, state['data'], tokenizer.bos, about_tokenizer, with_code=not plain)


def without_unused(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a saved model without those that have no part in it, such as a Llama's
    attn_steps: model.py may have got other defaults since, which these would contradict."""
    unused = unused_options(SimpleNamespace(**vars(ModelConfig) | saved))
    return {name: value for name, value in saved.items() if name not in unused}


def saved_config(saved: dict[str, Any]) -> ModelConfig:
    return build(ModelConfig, without_unused(saved))


def read_export(folder: str) -> dict[str, Any]:
    """Read an export, or what transformers' save_pretrained made of it, as a checkpoint with
    weights in float32. UserError if config.json does not describe the weights."""
    path = f'{folder}/config.json'
    config = read_json(path) or {}
    kind = config.get('model_type')
    check(kind in ('llama', 'nanocem') and 'run' in config, f'{path} is not of an export: expected '
          f'model_type=llama or nanocem (it is {kind}), and run, what the model was trained on')
    plain = kind == 'llama'
    cfg = saved_config(read_llama(config, path) if plain else config)
    with torch.device('meta'):
        model = Transformer(cfg)
    weights = read_weights(folder, model, plain)
    run = config['run']
    if 'transformers_version' in config:  # it was saved there, and may have been trained on
        run = {name: value for name, value in run.items() if name != 'outputs'}
    warn_of_edits(folder, run, model, plain)
    return {**run, 'folder': folder, 'model_config': vars(cfg), 'model': weights}


def read_weights(folder: str, model: Transformer, plain: bool) -> dict[str, Tensor]:
    """Return the weights of an export by our names, in float32. UserError if they are not those of
    this model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    try:
        found = load_file(f'{folder}/{WEIGHTS_FILE}')
    except SafetensorError as error:  # of half a file, or of Git LFS's pointer to one
        fail(f'{folder}/{WEIGHTS_FILE} is damaged, or not downloaded: copy it again ({error})')
    # Find the name and the shape that each parameter has in the file
    exported = {name: exported_name(name, plain) for name, _ in model.named_parameters()}
    shapes = {exported[name]: convert_layout(name, w, plain).shape
              for name, w in model.named_parameters()}
    different = sorted(name for name in found.keys() | shapes.keys()
                       if name not in found or found[name].shape != shapes.get(name))
    check(not different, f'{folder} is not an export of a model of this version: config.json does '
          f'not describe the weights, or some are missing: {different[:3]}')
    return {name: convert_layout(name, found[exported[name]].float(), plain) for name in exported}


def warn_of_edits(folder: str, run: dict[str, Any], model: Transformer, plain: bool) -> None:
    """Say where an export is no longer what was exported: more ids, another model.py, other
    options. `run` is what the model was trained on."""
    cfg = model.cfg
    if cfg.vocab_size > run['data']['vocab_size']:
        print(f'{folder}: its model has {cfg.vocab_size} ids, its data had '
              f'{run["data"]["vocab_size"]}; later ones, such as added chat tokens, have no text '
              'here', flush=True)
    code = Path(folder, 'model.py')
    if code.is_file() and checksum_of_text(code) != run.get('code'):
        warn(f'{code} was edited, and is not the model.py here, which computes these numbers; '
             'transformers runs the one in the folder')
    if 'outputs' not in run:
        same_code = checksum_of_text(ROOT / 'model.py') == run.get('code')
        if not (is_plain_llama(model) if plain else same_code):
            warn(f'{folder}: model.py here is not the one that was exported, and no logits were '
                 'kept by which to tell whether it computes the same')
    # The weights fit other options, too, but were not trained with them
    trained = vars(saved_config(run.get('options', vars(cfg))))
    changed = [f'{name}={value} (now {getattr(cfg, name)})' for name, value in trained.items()
               if name not in OTHERS_CHANGE and value != getattr(cfg, name)]
    if changed:
        warn(f'{folder}/config.json was edited: it was exported with {", ".join(changed)}')


def checksum_of_text(path: Path) -> int:
    """Return the checksum of a text file, whatever its line ends."""
    return zlib.crc32(path.read_text(encoding='utf-8').encode())


def fixed_in_llama(d_model: int, n_head: int) -> dict[str, Any]:
    """Return the fields of LlamaConfig that can have only one value in our model."""
    return dict(hidden_act='silu', rms_norm_eps=NORM_EPS, head_dim=d_model // n_head,
                tie_word_embeddings=False, attention_bias=False, mlp_bias=False)


def read_llama(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Return ModelConfig's options of a LlamaForCausalLM, whose `config` any program may have
    written: transformers' own fields count. UserError naming those that our model cannot follow."""
    missing = [theirs for theirs in LLAMA_SIZES.values() if theirs not in config]
    check(not missing, f'{path} lacks {", ".join(missing)}')
    sizes = {ours: config[theirs] for ours, theirs in LLAMA_SIZES.items()}
    # transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters
    rope = config.get('rope_scaling') or config.get('rope_parameters') or {}
    found = {'rms_norm_eps': 1e-6, **config,  # where LlamaConfig's default is not ours
             'rope_type': rope.get('rope_type', rope.get('type', 'default'))}
    expected = {**fixed_in_llama(sizes['d_model'], sizes['n_head']), 'rope_type': 'default',
                'sliding_window': None, 'quantization_config': None}
    # A field that is null or missing has LlamaConfig's default, which is what we expect
    different = [f'{name}={found[name]} (here {value})' for name, value in expected.items()
                 if found.get(name) is not None and found[name] != value]
    check(not different, f'{path}: our model cannot compute {", ".join(different)}')
    # Take only our options: `nanocem` may have copies of the sizes, which transformers' fields set
    ours = {name: value for name, value in config.get('nanocem', {}).items() if name in OURS_ALONE}
    return {**ours, **sizes, 'n_kv_head': config.get('num_key_value_heads'),
            'attn': 'llama', 'mlp': 'llama', 'positions': 'rope',
            'rope_theta': rope.get('rope_theta', config.get('rope_theta', 10_000.0))}

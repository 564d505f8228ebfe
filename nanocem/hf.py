"""Hugging Face: Llama's weights in ours, and our models as folders that transformers loads."""
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from configurator import fail
from model import ModelConfig, Transformer
from nanocem.files import read_json, say
from nanocem.tokenizers import tokenizer_json, tokenizer_of

ROOT = Path(__file__).parents[1]
WEIGHTS_FILE, PREFIX = 'model.safetensors', 'model.'  # in an exported folder; of its weights' names
CODE = ('model.py', 'configurator.py', 'nanocem/fast.py', 'nanocem/triton_attention.py',
        'nanocem/modeling_nanocem.py')  # what an exported folder holds of this repository

OURS = {  # in a block -> in a Hugging Face layer
    'attn.norm.gain': 'input_layernorm',
    'attn.W_Q': 'self_attn.q_proj',
    'attn.W_K': 'self_attn.k_proj',
    'attn.W_V': 'self_attn.v_proj',
    'attn.W_O': 'self_attn.o_proj',
    'mlp.norm.gain': 'post_attention_layernorm',
    'mlp.W': 'mlp.up_proj',
    'mlp.V': 'mlp.gate_proj',
    'mlp.W_d': 'mlp.down_proj',
}


def from_hf(source: Any, n_head: int | None = None) -> Transformer:
    """A LlamaForCausalLM, or its state dict and n_head, as a Transformer of float32 weights with
    the same logits. ValueError where our baseline has no such part (scaled rope, biases, another
    activation)."""
    state = source if isinstance(source, dict) else source.state_dict()
    config = getattr(source, 'config', None)
    n_head = n_head or getattr(config, 'num_attention_heads', None)
    if n_head is None:
        raise ValueError('a state dict does not say how many heads: from_hf(state, n_head=...)')
    rope = getattr(config, 'rope_parameters', None) or {}
    activation = getattr(config, 'hidden_act', 'silu')
    if rope.get('rope_type', 'default') != 'default' or activation != 'silu':
        raise ValueError(f'only plain rope and SiLU: rope {rope}, activation {activation}')
    if biases := [name for name in state if name.endswith('bias')]:
        raise ValueError(f'only Llamas without biases: {biases[0]}')
    vocab_size, D = state['model.embed_tokens.weight'].shape
    R = getattr(config, 'head_dim', None) or D // n_head
    if R * n_head != D:
        raise ValueError(f'head_dim {R} x {n_head} heads is not the width {D}')
    layers = [int(name.split('.')[2]) for name in state if name.startswith('model.layers.')]
    model = Transformer(ModelConfig(
        attn='llama', mlp='llama', d_model=D, n_layer=1 + max(layers), n_head=n_head,
        d_mlp=len(state['model.layers.0.mlp.up_proj.weight']), vocab_size=vocab_size,
        context_length=getattr(config, 'max_position_embeddings', 2048),
        rope_theta=rope.get('rope_theta') or getattr(config, 'rope_theta', None) or 10_000.0,
        norm_eps=getattr(config, 'rms_norm_eps', 1e-5)))
    tied = 'lm_head.weight' not in state
    weights = {
        'embedding': state['model.embed_tokens.weight'],
        'norm.gain': state['model.norm.weight'],
        'head': state['model.embed_tokens.weight' if tied else 'lm_head.weight'],
    }
    for i in range(len(model.blocks)):
        for name, theirs in OURS.items():
            w = state[f'model.layers.{i}.{theirs}.weight']
            weights[f'blocks.{i}.{name}'] = in_our_shape(name, w, D, R)
    model.load_state_dict(weights)
    return model


def in_our_shape(name: str, w: Tensor, D: int, R: int) -> Tensor:
    if name.endswith(('W_O', 'W_d')):
        return w.T
    if name.endswith(('W_K', 'W_V')) and len(w) < D:
        # grouped queries: a head's own copy of its group's rows
        return w.unflatten(0, (-1, R)).repeat_interleave(D // len(w), dim=0).flatten(0, 1)
    return w


CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
A language model by nanoCEM, an implementation of
[Causal Energy Minimization](https://arxiv.org/abs/2605.07588). It needs torch, transformers, numpy
and scipy:

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(FOLDER_OR_NAME, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER_OR_NAME, trust_remote_code=True)

Tokenizer: {tokenizer}, vocabulary {vocab_size}.
"""


def export(model: Transformer, folder: str, state: dict[str, Any],
           dtype: torch.dtype = torch.float32) -> None:
    """Write the model to a new or empty folder that transformers loads; `state`, its checkpoint,
    names the tokenizer and the data. SystemExit."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            fail(f'export={folder} is not empty; expected a new folder')
        weights = {PREFIX + name: w.to(dtype).contiguous()
                   for name, w in model.state_dict().items()}
        (path / WEIGHTS_FILE).write_bytes(save(weights, {'format': 'pt'}))
        for source in CODE:
            code = (ROOT / source).read_text(encoding='utf-8')
            (path / Path(source).name).write_text(beside(code), encoding='utf-8')
        (path / 'README.md').write_text(CARD.format(**state['data']), encoding='utf-8')
        auto = {'AutoConfig': 'modeling_nanocem.NanocemConfig',
                'AutoModelForCausalLM': 'modeling_nanocem.NanocemForCausalLM'}
        begin = {'bos_token_id': write_tokenizer(path, state)}
        run = {name: state[name] for name in ('step', 'data', 'data_dir')}
        write_json(path / 'config.json', model_type='nanocem', auto_map=auto, run=run,
                   dtype=str(dtype).removeprefix('torch.'), architectures=['NanocemForCausalLM'],
                   **begin, **vars(model.cfg))
        write_json(path / 'generation_config.json', use_cache=False, **begin)
    except OSError as error:
        fail(f'export={folder}: {error.strerror}; expected a folder to write in')


def read_export(folder: str) -> dict[str, Any]:
    """What `export` wrote, as a checkpoint holds it, its weights in float32; unchecked. An error of
    any kind where it is damaged."""
    config = read_json(f'{folder}/config.json', 'export the model again') or {}
    weights = load_file(f'{folder}/{WEIGHTS_FILE}')
    names = [field.name for field in fields(ModelConfig) if field.name in config]
    return {**config.get('run', {}), 'folder': folder,
            'model': {name.removeprefix(PREFIX): w.float() for name, w in weights.items()},
            'model_config': {name: config[name] for name in names}}


def beside(code: str) -> str:
    """A file of ours with imports from the folder it is in, the only ones transformers follows."""
    code = re.sub(r'^( *)from nanocem import', r'\1from . import', code, flags=re.M)
    return re.sub(r'^( *)from (?:nanocem\.)?(configurator|model|fast|triton_attention) import',
                  r'\1from .\2 import', code, flags=re.M)


def write_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')


def write_tokenizer(path: Path, state: dict[str, Any]) -> int | None:
    """The files of transformers' fast tokenizers, or of the one in modeling_nanocem.py for bytes.
    Returns BOS; None, and a warning, where the tokenizer is not at hand."""
    try:
        tokenizer = tokenizer_of(state)
    except SystemExit as error:
        say(f'WARNING: no tokenizer in {path}: {str(error).partition(": ")[2]}')
        return None
    options: dict[str, Any]
    if tokenizer.name == 'byte':
        kind = 'NanocemTokenizer'
        options = {'auto_map': {'AutoTokenizer': [f'modeling_nanocem.{kind}', None]}}
    else:
        kind = 'PreTrainedTokenizerFast'
        bpe, special = tokenizer_json(tokenizer)
        write_json(path / 'tokenizer.json', **bpe)
        options = {'split_special_tokens': True, 'clean_up_tokenization_spaces': False, **special}
        if tokenizer.name == 'llama':  # for sample.py and evaluate.py
            shutil.copyfile(tokenizer.path, path / 'tokenizer.model')
    write_json(path / 'tokenizer_config.json', tokenizer_class=kind, **options,
               model_max_length=state['model_config']['context_length'])
    return tokenizer.bos

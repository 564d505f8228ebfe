"""Export models to folders that Hugging Face's transformers loads, and read them back."""
import json
import re
import shutil
import tempfile
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from configurator import UserError, check
from model import NORM_EPS, ModelConfig, Transformer
from nanocem.files import read_json, write_atomic
from nanocem.tokenizers import MODEL_FILE, tokenizer_of

ROOT = Path(__file__).parents[1]
WEIGHTS_FILE = 'model.safetensors'
CODE = ('model.py', 'configurator.py', 'energy.py', 'nanocem/loss.py',  # copied by export
        'nanocem/attention.py', 'nanocem/triton_attention.py', 'nanocem/modeling_nanocem.py')
LLAMA_NAMES = {  # our weights, and those of LlamaForCausalLM. W_O and W_d are transposed there
    'embedding': 'model.embed_tokens', 'norm.gain': 'model.norm', 'head': 'lm_head',
    'attn.norm.gain': 'input_layernorm', 'attn.W_Q': 'self_attn.q_proj',
    'attn.W_K': 'self_attn.k_proj', 'attn.W_V': 'self_attn.v_proj', 'attn.W_O': 'self_attn.o_proj',
    'mlp.norm.gain': 'post_attention_layernorm', 'mlp.W': 'mlp.up_proj', 'mlp.V': 'mlp.gate_proj',
    'mlp.W_d': 'mlp.down_proj'}

CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: mit
---
A language model by nanoCEM, an implementation of the paper
[Causal Energy Minimization](https://arxiv.org/abs/2605.07588).

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(FOLDER_OR_NAME{trust})
    tokenizer = {call}

{about}

Tokenizer: {tokenizer}, vocabulary {vocab_size}. Texts begin with BOS.
generate stops at the next BOS.
"""
ABOUT_LLAMA = 'It is a plain LlamaForCausalLM without code: other programs read it, too.'
ABOUT_NANOCEM = """It needs torch, transformers 5, numpy and scipy, and runs this folder's code.

- There is no cache: each new token reads the whole text again (nanoCEM's sample.py has a cache).
- Pad on the right, never on the left. generate takes texts of one length.
- torch.export makes programs for one shape: the length of the text cannot be dynamic.
- The weights are parameters without nn.Linear, so LoRA's all-linear finds none. Name them:
  LoraConfig(target_modules=[], target_parameters=['attn.W_Q', 'mlp.V'])"""


def is_plain_llama(cfg: ModelConfig) -> bool:
    """Return whether transformers' own LlamaForCausalLM computes the same."""
    return (cfg.attn == cfg.mlp == 'llama' and cfg.positions == 'rope' and cfg.tie == 'none'
            and cfg.loops == cfg.attn_reuse == cfg.mlp_reuse == 1)


def exported_name(name: str, cfg: ModelConfig) -> str:
    """Return the name that one of our weights has in an export."""
    if not is_plain_llama(cfg):
        return f'model.{name}'
    layer = ''
    if name.startswith('blocks.'):
        _, n, name = name.split('.', 2)
        layer = f'model.layers.{n}.'
    return f'{layer}{LLAMA_NAMES[name]}.weight'


def convert(name: str, w: Tensor, cfg: ModelConfig) -> Tensor:
    """Convert one of our weights to the form that it has in an export, or back."""
    transposed = is_plain_llama(cfg) and name.endswith(('W_O', 'W_d'))
    return w.T.contiguous() if transposed else w


def export(model: Transformer, folder: str, state: dict[str, Any],
           dtype: torch.dtype = torch.float32) -> None:
    """Write the model to a new or empty folder that transformers loads. A Llama with RoPE becomes a
    LlamaForCausalLM. `state`, its checkpoint, names the tokenizer and data. UserError, OSError."""
    path = Path(folder)
    check(not path.exists() or not any(path.iterdir()),
          f'export={folder} is not empty: delete it, or give a new folder')
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write the folder under another name and rename it: it appears whole or not at all
    with tempfile.TemporaryDirectory(prefix='.export-', dir=path.parent) as temporary:
        new = Path(temporary, 'new')
        new.mkdir()
        write_files(new, model, state, dtype)
        if path.exists():
            path.rmdir()
        new.rename(path)


def write_files(path: Path, model: Transformer, state: dict[str, Any], dtype: torch.dtype) -> None:
    """Write all files of an export."""
    cfg = model.cfg
    # Write the weights. named_parameters lists a matrix that a tie shares once
    weights = {exported_name(name, cfg): convert(name, w.detach().to(dtype), cfg)
               for name, w in model.named_parameters()}
    write_atomic(f'{path}/{WEIGHTS_FILE}', save(weights, {'format': 'pt'}))
    # Write the tokenizer. Its BOS ends a document, too
    bos = write_tokenizer(path, state)
    ids = dict(bos_token_id=bos, eos_token_id=bos, pad_token_id=bos)
    # Describe the model, and copy the code that transformers lacks
    plain = is_plain_llama(cfg)
    if plain:
        config: dict[str, Any] = dict(
            model_type='llama', architectures=['LlamaForCausalLM'], hidden_act='silu',
            vocab_size=cfg.vocab_size, hidden_size=cfg.d_model, intermediate_size=cfg.d_mlp,
            num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head,
            num_key_value_heads=cfg.n_head, max_position_embeddings=cfg.context_length,
            rms_norm_eps=NORM_EPS, rope_theta=cfg.rope_theta, tie_word_embeddings=False,
            nanocem=vars(cfg))
    else:
        for source in CODE:
            code = (ROOT / source).read_text(encoding='utf-8')
            write_atomic(f'{path}/{Path(source).name}', to_relative_imports(code).encode())
        auto = {'AutoConfig': 'modeling_nanocem.NanocemConfig',
                'AutoModelForCausalLM': 'modeling_nanocem.NanocemForCausalLM'}
        config = dict(model_type='nanocem', architectures=['NanocemForCausalLM'], auto_map=auto,
                      **vars(cfg))
    run = {name: state[name] for name in ('step', 'data', 'data_dir')}
    write_json(path / 'config.json', **config, **ids, run=run,
               dtype=str(dtype).removeprefix('torch.'))
    write_json(path / 'generation_config.json', use_cache=plain, **ids)
    # Say how the folder is used
    call = 'AutoTokenizer.from_pretrained(FOLDER_OR_NAME, trust_remote_code=False)'
    if not (path / 'tokenizer.json').exists():
        call = '...  # this folder has none for transformers'
    card = CARD.format(**state['data'], call=call, about=ABOUT_LLAMA if plain else ABOUT_NANOCEM,
                       trust='' if plain else ', trust_remote_code=True')
    write_atomic(f'{path}/README.md', card.encode())


def read_export(folder: str) -> dict[str, Any]:
    """Read an export, or what transformers saved of it, into a checkpoint with weights in float32.
    UserError for a model that is not ours, and for weights that config.json does not describe."""
    config = read_json(f'{folder}/config.json', 'export the model again') or {}
    check(config.get('model_type') == 'nanocem' or 'nanocem' in config,
          f'{folder} is not an export of a model of this version: export it again')
    # transformers may have resized the vocabulary
    options = {**config.get('nanocem', config), 'vocab_size': config['vocab_size']}
    names = [field.name for field in fields(ModelConfig) if field.name in options]
    cfg = ModelConfig(**{name: options[name] for name in names})
    # The file has a matrix that a tie shares once, by its first name
    with torch.device('meta'):
        model = Transformer(cfg)
    first = {w: name for name, w in model.named_parameters()}
    found = load_file(f'{folder}/{WEIGHTS_FILE}')
    different = found.keys() ^ {exported_name(name, cfg) for name in first.values()}
    check(not different, f'{folder}: config.json does not describe the weights, or some are '
          f'missing: {sorted(different)[:3]}')
    weights = {name: convert(name, found[exported_name(name, cfg)].float(), cfg)
               for name in first.values()}
    return {**config.get('run', {}), 'folder': folder, 'exported': True, 'model_config': vars(cfg),
            'model': {name: weights[first[w]]
                      for name, w in model.named_parameters(remove_duplicate=False)}}


def to_relative_imports(code: str) -> str:
    """Make the imports of our files relative: transformers copies no other files."""
    code = re.sub(r'^( *)from nanocem import', r'\1from . import', code, flags=re.M)
    ours = '|'.join(Path(name).stem for name in CODE)
    return re.sub(rf'^( *)from (?:nanocem\.)?({ours}) import', r'\1from .\2 import', code,
                  flags=re.M)


def write_json(path: Path, **values: Any) -> None:
    write_atomic(str(path), json.dumps(values, indent=2).encode() + b'\n')


# Tokenizers

# Texts on which tokenizers differ if they differ at all
PROBE = [' a  b \n\tc\r\n', '\u2581a\u2581\u2581', 'ﬁ ½ Å e\u0301 世界👍',
         '\0\x7f\u00a0\u3000', '<s> </s> <unk> <pad> <0x0A>', 'x' * 99, ' ' * 40]


def write_tokenizer(path: Path, state: dict[str, Any]) -> int | None:
    """Write the checkpoint's tokenizer: a SentencePiece model as tokenizer.model, which our scripts
    read, and for transformers tokenizer.json, if that was seen to give the same ids. Print a line
    if it is not written. Return BOS, or None if the tokenizer is missing."""
    try:
        tokenizer = tokenizer_of(state)
    except UserError as error:
        print(f'WARNING: the export has no tokenizer: {error}', flush=True)
        return None
    if tokenizer.path:
        shutil.copyfile(tokenizer.path, path / MODEL_FILE)
    content = tokenizer_json(tokenizer)
    reason = ''
    if content is None:
        reason = "only bytes, our own byte-pair pieces and Llama's model have one"
    elif find_spec('tokenizers') is None:
        reason = 'to check it, pip install tokenizers, and export again'
    elif not same_ids(tokenizer, content):
        reason = 'transformers would give other ids'
    if reason:
        what = f'{MODEL_FILE}, which sentencepiece reads' if tokenizer.path else tokenizer.name
        print(f'WARNING: the export has no tokenizer.json ({reason}). Its tokenizer is {what}',
              flush=True)
        return tokenizer.bos
    bos, = content['post_processor']['special_tokens']
    write_json(path / 'tokenizer.json', **content)
    write_json(path / 'tokenizer_config.json', tokenizer_class='PreTrainedTokenizerFast',
               bos_token=bos, eos_token=bos, pad_token=bos,
               unk_token=content['model']['unk_token'],
               split_special_tokens=True, clean_up_tokenization_spaces=False, padding_side='right',
               model_input_names=['input_ids', 'attention_mask'],
               model_max_length=state['model_config']['context_length'])
    return tokenizer.bos


def same_ids(tokenizer: Any, content: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json gives the ids of our tokenizer, on hostile texts and its own
    tokens."""
    from tokenizers import Tokenizer
    theirs = Tokenizer.from_str(json.dumps(content))
    theirs.encode_special_tokens = True
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    texts = [*PROBE, ''.join(pieces), ' '.join(reversed(pieces))]
    return all(theirs.encode(text).ids == [tokenizer.bos, *tokenizer.encode(text)]
               for text in texts)


def tokenizer_json(tokenizer: Any) -> dict[str, Any] | None:
    """Return a tokenizer as Hugging Face's tokenizer.json; None unless it is bytes or like our own
    SentencePiece models and Llama's, which join the pairs of bytes or letters of a text as is."""
    if tokenizer.name == 'byte':
        # As in GPT-2 each byte is a letter: itself if it can be printed, else one from 256 on
        printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = [i for i in range(256) if i not in printed]
        letters = [chr(i) if i in printed else chr(256 + others.index(i)) for i in range(256)]
        by_bytes = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
                    'use_regex': False}
        return assemble_json([*letters, '<|endoftext|>'], [], tokenizer.bos, tokenizer.bos,
                             pre_tokenizer=by_bytes, decoder=by_bytes)
    return sentencepiece_json(tokenizer) if tokenizer.path else None


def sentencepiece_json(tokenizer: Any) -> dict[str, Any] | None:
    """Return a SentencePiece model as tokenizer.json; None unless it is like our own or Llama's."""
    from sentencepiece import sentencepiece_model_pb2
    sp = tokenizer.model
    proto = sentencepiece_model_pb2.ModelProto.FromString(sp.serialized_model_proto())
    spec = proto.normalizer_spec
    ids = range(tokenizer.vocab_size)
    if (proto.trainer_spec.model_type != proto.trainer_spec.BPE or not any(map(sp.is_byte, ids))
            or spec.precompiled_charsmap or spec.remove_extra_whitespaces):
        return None
    # If the model can encode U+2581 itself, its pieces spell a space as ' '
    space = '\u2581' if tokenizer.u2581 is None else ' '
    pieces = [sp.id_to_piece(i).replace('\u2581', space) for i in ids]
    # Two pieces that are a piece together are merged, those of a higher score first
    special = (sp.is_control, sp.is_unknown, sp.is_byte, sp.is_unused)
    normal = [i for i in ids if not any(is_special(i) for is_special in special)]
    words = dict.fromkeys(pieces[i] for i in sorted(normal, key=sp.get_score, reverse=True))
    merges = [[word[:n], word[n:]] for word in words for n in range(1, len(word))
              if word[:n] in words and word[n:] in words]
    # Spell a space as the pieces do, and put one before the text if the model does
    normalizers: list[Any] = []
    decoders: list[Any] = [{'type': 'ByteFallback'}, {'type': 'Fuse'}]
    if spec.add_dummy_prefix:
        normalizers.append({'type': 'Prepend', 'prepend': space})
        decoders.append({'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0})
    if space != ' ':
        normalizers.append({'type': 'Replace', 'pattern': {'String': ' '}, 'content': space})
        decoders.insert(0, {'type': 'Replace', 'pattern': {'String': space}, 'content': ' '})
    return assemble_json(pieces, merges, tokenizer.bos, sp.unk_id(),
                         normalizer={'type': 'Sequence', 'normalizers': normalizers},
                         decoder={'type': 'Sequence', 'decoders': decoders})


def assemble_json(pieces: list[str], merges: list[list[str]], bos: int, unknown: int, **steps: Any,
                  ) -> dict[str, Any]:
    """Return the whole tokenizer.json of pieces and their merges. Texts begin with BOS."""
    begin = {'SpecialToken': {'id': pieces[bos], 'type_id': 0}}
    text, second = ({'Sequence': {'id': name, 'type_id': 0}} for name in 'AB')
    return {
        'version': '1.0',
        'added_tokens': [
            {'id': i, 'content': pieces[i], 'special': True, 'normalized': False,
             'single_word': False, 'lstrip': False, 'rstrip': False}
            for i in sorted({bos, unknown})],
        'post_processor': {
            'type': 'TemplateProcessing', 'single': [begin, text], 'pair': [begin, text, second],
            'special_tokens': {
                pieces[bos]: {'id': pieces[bos], 'ids': [bos], 'tokens': [pieces[bos]]}}},
        'model': {'type': 'BPE', 'vocab': {piece: i for i, piece in enumerate(pieces)},
                  'merges': merges, 'unk_token': pieces[unknown], 'byte_fallback': True,
                  'fuse_unk': True},
        **steps}

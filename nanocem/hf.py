"""Our models as folders that Hugging Face's transformers loads."""
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from configurator import UserError, fail
from model import Transformer
from nanocem.files import read_json, say, write_atomic
from nanocem.tokenizers import tokenizer_of

ROOT = Path(__file__).parents[1]
WEIGHTS_FILE, PREFIX = 'model.safetensors', 'model.'  # in an exported folder; of its weights' names
CODE = ('model.py', 'configurator.py', 'nanocem/compute.py', 'nanocem/fast.py',  # copied by export
        'nanocem/triton_attention.py', 'nanocem/modeling_nanocem.py')

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
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        fail(f'export={folder} is not empty; expected a new folder')
    weights = {PREFIX + name: w.to(dtype).contiguous()
               for name, w in model.state_dict().items()}
    write_atomic(f'{path}/{WEIGHTS_FILE}', save(weights, {'format': 'pt'}))
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


def read_export(folder: str) -> dict[str, Any]:
    """What `export` wrote, as a checkpoint holds it, its weights in float32; unchecked. An error of
    any kind where it is damaged."""
    config = read_json(f'{folder}/config.json', 'export the model again') or {}
    weights = load_file(f'{folder}/{WEIGHTS_FILE}')
    return {**config.get('run', {}), 'folder': folder,
            'model': {name.removeprefix(PREFIX): w.float() for name, w in weights.items()},
            'model_config': config}


def beside(code: str) -> str:
    """A file of ours with imports from the folder it is in, the only ones transformers follows."""
    code = re.sub(r'^( *)from nanocem import', r'\1from . import', code, flags=re.M)
    ours = 'configurator|model|compute|fast|triton_attention'
    return re.sub(rf'^( *)from (?:nanocem\.)?({ours}) import', r'\1from .\2 import', code,
                  flags=re.M)


def write_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')


def write_tokenizer(path: Path, state: dict[str, Any]) -> int | None:
    """The files of transformers' fast tokenizers, or of the one in modeling_nanocem.py for bytes.
    Returns BOS; None, and a warning, where the tokenizer is not at hand."""
    try:
        tokenizer = tokenizer_of(state)
    except UserError as error:
        say(f'WARNING: no tokenizer in {path}: {error}')
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
        if tokenizer.name == 'sentencepiece':  # for sample.py and evaluate.py
            shutil.copyfile(tokenizer.path, path / 'tokenizer.model')
    write_json(path / 'tokenizer_config.json', tokenizer_class=kind, **options,
               model_max_length=state['model_config']['context_length'])
    return tokenizer.bos


def tokenizer_json(tokenizer: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """gpt2 or llama as Hugging Face's tokenizer.json has them, and their special tokens by role."""
    if tokenizer.name == 'gpt2':
        shown = {*range(33, 127), *range(161, 173), *range(174, 256)}  # these bytes as they are
        rest = [i for i in range(256) if i not in shown]
        letters = [chr(i) if i in shown else chr(256 + rest.index(i)) for i in range(256)]
        ranks = tokenizer.bpe._mergeable_ranks
        words = {''.join(letters[i] for i in word): rank
                 for word, rank in sorted(ranks.items(), key=lambda item: item[1])}
        special = ['<|endoftext|>'] * 3
        words[special[0]] = tokenizer.bos
        by_bytes = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
        steps = {'pre_tokenizer': by_bytes, 'decoder': by_bytes}
    else:
        model = tokenizer.model
        ids = sorted(range(tokenizer.vocab_size), key=model.get_score, reverse=True)
        words = {model.id_to_piece(i): i for i in ids}
        special = ['<s>', '</s>', '<unk>']
        spaces = [{'type': 'Prepend', 'prepend': '\u2581'},
                  {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '\u2581'}]
        back = [{'type': 'Replace', 'pattern': {'String': '\u2581'}, 'content': ' '},
                {'type': 'ByteFallback'}, {'type': 'Fuse'},
                {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0}]
        steps = {'normalizer': {'type': 'Sequence', 'normalizers': spaces},
                 'decoder': {'type': 'Sequence', 'decoders': back}}
    # neighbours that are a word together are joined, the first such word of all first
    merges = [[word[:n], word[n:]] for word in words for n in range(1, len(word))
              if word[:n] in words and word[n:] in words]
    bos = special[0]
    begin = {'SpecialToken': {'id': bos, 'type_id': 0}}
    text = {'Sequence': {'id': 'A', 'type_id': 0}}
    more = {'Sequence': {'id': 'B', 'type_id': 0}}
    return {
        'version': '1.0',
        'added_tokens': [
            {'id': words[word], 'content': word, 'special': True, 'normalized': False,
             'single_word': False, 'lstrip': False, 'rstrip': False} for word in set(special)],
        'post_processor': {
            'type': 'TemplateProcessing', 'single': [begin, text], 'pair': [begin, text, more],
            'special_tokens': {bos: {'id': bos, 'ids': [tokenizer.bos], 'tokens': [bos]}}},
        'model': {'type': 'BPE', 'vocab': words, 'merges': merges, 'byte_fallback': True,
                  'fuse_unk': True, 'unk_token': special[2]},
        **steps,
    }, dict(zip(('bos_token', 'eos_token', 'unk_token'), special, strict=True))

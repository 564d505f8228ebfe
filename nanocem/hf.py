"""Export models to folders that Hugging Face's transformers loads, and read them back."""
import base64
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
from nanocem.tokenizers import MODEL_FILE, tokenizer_of

ROOT = Path(__file__).parents[1]
WEIGHTS_FILE = 'model.safetensors'
PREFIX = 'model.'  # of weight names
CODE = ('model.py', 'configurator.py', 'energy.py', 'nanocem/loss.py',  # copied by export
        'nanocem/attention.py', 'nanocem/triton_attention.py', 'nanocem/modeling_nanocem.py')

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
A language model by nanoCEM, an implementation of
[Causal Energy Minimization](https://arxiv.org/abs/2605.07588).

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(FOLDER_OR_NAME, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER_OR_NAME, trust_remote_code=False)

It needs torch, transformers 4.46 or later, numpy and scipy, and runs this folder's code.
There is no cache: each new token reads the whole text again (nanoCEM's sample.py has a cache).

Tokenizer: {tokenizer}, vocabulary {vocab_size}. Texts begin with BOS.
generate stops at the next BOS.
"""


def export(model: Transformer, folder: str, state: dict[str, Any],
           dtype: torch.dtype = torch.float32) -> None:
    """Write the model to a new or empty folder that transformers loads. `state`, its checkpoint,
    names the tokenizer and data. UserError, OSError."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        fail(f'export={folder} is not empty: delete it, or give a new folder')
    for source in CODE:
        code = (ROOT / source).read_text(encoding='utf-8')
        write_atomic(f'{path}/{Path(source).name}', to_relative_imports(code).encode())
    weights = {PREFIX + name: w.to(dtype) for name, w in model.state_dict().items()}
    write_atomic(f'{path}/{WEIGHTS_FILE}', save(weights, {'format': 'pt'}))
    write_atomic(f'{path}/README.md', CARD.format(**state['data']).encode())
    bos = write_tokenizer(path, state)
    ids = dict(bos_token_id=bos, eos_token_id=bos, pad_token_id=bos)  # BOS ends a document, too
    run = {name: state[name] for name in ('step', 'data', 'data_dir')}
    auto = {'AutoConfig': 'modeling_nanocem.NanocemConfig',
            'AutoModelForCausalLM': 'modeling_nanocem.NanocemForCausalLM'}
    write_json(path / 'config.json', model_type='nanocem', architectures=['NanocemForCausalLM'],
               auto_map=auto, **vars(model.cfg), **ids, run=run,
               dtype=str(dtype).removeprefix('torch.'))
    write_json(path / 'generation_config.json', use_cache=False, **ids)


def read_export(folder: str) -> dict[str, Any]:
    """Read an export into a checkpoint, with weights in float32. Nothing is checked: a
    damaged folder raises an error of any kind."""
    config = read_json(f'{folder}/config.json', 'export the model again') or {}
    if config.get('model_type') != 'nanocem':
        fail('not an export of a model of this version: export it again')
    weights = load_file(f'{folder}/{WEIGHTS_FILE}')
    return {**config.get('run', {}), 'folder': folder, 'exported': True,
            'model': {name.removeprefix(PREFIX): w.float() for name, w in weights.items()},
            'model_config': config}


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
    """Write the checkpoint's tokenizer as transformers' fast tokenizers have it; a SentencePiece
    model also as tokenizer.model, for sample.py and evaluate.py. Return BOS. Warn, and return None,
    if the tokenizer is missing."""
    try:
        tokenizer = tokenizer_of(state)
    except UserError as error:
        say(f'WARNING: no tokenizer in {path}: {error}')
        return None
    if tokenizer.path:
        shutil.copyfile(tokenizer.path, path / MODEL_FILE)
    content, special = tokenizer_json(tokenizer)
    if not same_ids(tokenizer, content):
        say(f'WARNING: {path} has no tokenizer.json: transformers would give other ids. Its '
            'tokenizer is tokenizer.model, which sentencepiece reads')
        return tokenizer.bos
    write_json(path / 'tokenizer.json', **content)
    write_json(path / 'tokenizer_config.json', tokenizer_class='PreTrainedTokenizerFast',
               split_special_tokens=True, clean_up_tokenization_spaces=False, padding_side='left',
               model_input_names=['input_ids', 'attention_mask'], **special,
               pad_token=special['bos_token'],
               model_max_length=state['model_config']['context_length'])
    return tokenizer.bos


def same_ids(tokenizer: Any, content: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json gives the ids of our tokenizer, on hostile texts and its own
    tokens; True if the package tokenizers is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return True
    theirs = Tokenizer.from_str(json.dumps(content))
    theirs.encode_special_tokens = True
    pieces = [tokenizer.decode([i]) for i in range(min(tokenizer.vocab_size, 1 << 16))]
    texts = [*PROBE, ''.join(pieces), ' '.join(reversed(pieces))]
    return all(theirs.encode(text).ids == [tokenizer.bos, *tokenizer.encode(text)]
               for text in texts)


def tokenizer_json(tokenizer: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a tokenizer as Hugging Face's tokenizer.json, and its special tokens by role."""
    if tokenizer.path:
        return sentencepiece_json(tokenizer)
    # Bytes become letters as in GPT-2: printable ones stay, the others are 256, 257, ...
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [i for i in range(256) if i not in printed]
    letters = [chr(i) if i in printed else chr(256 + others.index(i)) for i in range(256)]
    if tokenizer.name == 'byte':
        words = {letter: i for i, letter in enumerate(letters)}
    else:
        ranks = sorted(tokenizer.bpe._mergeable_ranks.items(), key=lambda item: item[1])
        words = {''.join(letters[i] for i in word): rank for word, rank in ranks}
    merges = [] if tokenizer.name == 'byte' else find_merges(words)
    bos = '<|endoftext|>'
    words[bos] = tokenizer.bos
    by_bytes = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
                'use_regex': tokenizer.name != 'byte'}
    model = {'type': 'BPE', 'vocab': words, 'merges': merges, 'unk_token': bos}
    return assemble_json(tokenizer, model, [bos] * 3, pre_tokenizer=by_bytes, decoder=by_bytes)


def sentencepiece_json(tokenizer: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a SentencePiece model, BPE or unigram, as tokenizer.json, and its special tokens."""
    from sentencepiece import sentencepiece_model_pb2
    sp = tokenizer.model
    proto = sentencepiece_model_pb2.ModelProto.FromString(sp.serialized_model_proto())
    spec = proto.normalizer_spec
    # If the model can encode U+2581 itself, its pieces spell a space as ' '
    space = '\u2581' if tokenizer.u2581 is None else ' '
    pieces = [sp.id_to_piece(i).replace('\u2581', space) for i in range(tokenizer.vocab_size)]
    normal = [i for i in range(tokenizer.vocab_size)
              if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_byte(i) or sp.is_unused(i))]
    model: dict[str, Any] = {'byte_fallback': any(map(sp.is_byte, range(tokenizer.vocab_size)))}
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        normal.sort(key=sp.get_score, reverse=True)
        model.update(type='BPE', vocab={piece: i for i, piece in enumerate(pieces)},
                     merges=find_merges({pieces[i]: i for i in normal}), fuse_unk=True,
                     unk_token=pieces[sp.unk_id()])
    else:
        scores = {i: sp.get_score(i) for i in normal}
        model.update(type='Unigram', unk_id=sp.unk_id(),  # a text never spells a special piece
                     vocab=[[piece, scores.get(i, -1e5)] for i, piece in enumerate(pieces)])
    normalizers: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        normalizers.append({'type': 'Precompiled', 'precompiled_charsmap': charsmap})
    if spec.remove_extra_whitespaces:
        normalizers += [{'type': 'Strip', 'strip_left': True, 'strip_right': True},
                        {'type': 'Replace', 'pattern': {'Regex': ' {2,}'}, 'content': ' '}]
    if spec.add_dummy_prefix:
        normalizers.append({'type': 'Prepend', 'prepend': space})
    decoders: list[dict[str, Any]] = [{'type': 'ByteFallback'}, {'type': 'Fuse'}]
    if space != ' ':
        normalizers.append({'type': 'Replace', 'pattern': {'String': ' '}, 'content': space})
        decoders.insert(0, {'type': 'Replace', 'pattern': {'String': space}, 'content': ' '})
    if spec.add_dummy_prefix:
        decoders.append({'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0})
    eos = sp.eos_id() if sp.eos_id() >= 0 else tokenizer.bos
    return assemble_json(tokenizer, model, [pieces[i] for i in (tokenizer.bos, eos, sp.unk_id())],
                         normalizer={'type': 'Sequence', 'normalizers': normalizers},
                         decoder={'type': 'Sequence', 'decoders': decoders})


def find_merges(words: dict[str, int]) -> list[list[str]]:
    """Return the pairs of words that are a word together, in the order of these words."""
    return [[word[:n], word[n:]] for word in words for n in range(1, len(word))
            if word[:n] in words and word[n:] in words]


def assemble_json(tokenizer: Any, model: dict[str, Any], special: list[str], **steps: Any,
                  ) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the whole tokenizer.json of a model, whose texts begin with BOS, and the special
    tokens BOS, end of text and unknown by role."""
    bos = special[0]
    vocab = model['vocab']
    ids = vocab if isinstance(vocab, dict) else {word: i for i, (word, _) in enumerate(vocab)}
    begin = {'SpecialToken': {'id': bos, 'type_id': 0}}
    text, second = ({'Sequence': {'id': name, 'type_id': 0}} for name in 'AB')
    return {
        'version': '1.0',
        'added_tokens': [
            {'id': ids[word], 'content': word, 'special': True, 'normalized': False,
             'single_word': False, 'lstrip': False, 'rstrip': False}
            for word in sorted(set(special), key=ids.__getitem__)],
        'post_processor': {
            'type': 'TemplateProcessing', 'single': [begin, text], 'pair': [begin, text, second],
            'special_tokens': {bos: {'id': bos, 'ids': [tokenizer.bos], 'tokens': [bos]}}},
        'model': model, **steps,
    }, dict(zip(('bos_token', 'eos_token', 'unk_token'), special, strict=True))

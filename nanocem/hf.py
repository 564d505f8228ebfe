"""Export models to folders that Hugging Face's transformers loads, and read them back."""
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from configurator import build, check
from model import NORM_EPS, ModelConfig, Transformer
from nanocem.files import read_json, to_json
from nanocem.tokenizers import MODEL_FILE, tokenizer_of

WEIGHTS_FILE = 'model.safetensors'
CODE = ('model.py', 'nanocem/decode.py', 'nanocem/modeling_nanocem.py')  # copied into exports
LLAMA_NAMES = {  # our names of weights -> those of LlamaForCausalLM
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
    tokenizer = AutoTokenizer.from_pretrained(FOLDER_OR_NAME, trust_remote_code=False)

Tokenizer: {tokenizer}, vocabulary {vocab_size}{missing}. Texts begin with BOS.
generate stops at the next BOS.{about}
"""
ABOUT_CODE = """

The model needs torch and transformers 5, and runs this folder's code. generate takes texts of one
length, and reads each token once; with beams it reads texts again. Pad on the right, never on the
left."""


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


def convert_layout(name: str, w: Tensor, cfg: ModelConfig) -> Tensor:
    """Convert a weight from our layout to an export's, or back. Only a plain Llama's differs."""
    transposed = is_plain_llama(cfg) and name.endswith(('W_O', 'W_d'))
    return w.T.contiguous() if transposed else w


def export(model: Transformer, folder: str, state: dict[str, Any],
           dtype: torch.dtype = torch.float32) -> None:
    """Write the model to a folder that transformers loads; a plain Llama as a LlamaForCausalLM. Its
    checkpoint `state` names tokenizer and data. UserError if the folder is not empty."""
    path = Path(folder)
    check(not path.exists() or not any(path.iterdir()),
          f'export={folder} is not empty: give a new folder')
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write the folder elsewhere and rename it: it appears whole or not at all
    with tempfile.TemporaryDirectory(prefix='.export-', dir=path.parent) as temporary:
        new = Path(temporary, 'new')
        new.mkdir()
        write_files(new, model, state, dtype)
        new.rename(path)


def write_files(path: Path, model: Transformer, state: dict[str, Any], dtype: torch.dtype) -> None:
    """Write all files of an export."""
    cfg, plain = model.cfg, is_plain_llama(model.cfg)
    # Write the weights. named_parameters lists a tied matrix once, by its first name
    weights = {exported_name(name, cfg): convert_layout(name, w.detach().to(dtype), cfg)
               for name, w in model.named_parameters()}
    (path / WEIGHTS_FILE).write_bytes(save(weights, {'format': 'pt'}))
    # Write the tokenizer
    tokenizer = tokenizer_of(state)
    write_tokenizer(path, tokenizer, cfg.context_length)
    # Describe the model in config.json. If transformers does not know it, copy our code
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
            shutil.copyfile(Path(__file__).parents[1] / source, path / Path(source).name)
        auto = {'AutoConfig': 'modeling_nanocem.NanocemConfig',
                'AutoModelForCausalLM': 'modeling_nanocem.NanocemForCausalLM'}
        config = dict(model_type='nanocem', architectures=['NanocemForCausalLM'], auto_map=auto,
                      **vars(cfg))
    # BOS is EOS, too: generation stops where the next document would begin
    ids = dict.fromkeys(['bos_token_id', 'eos_token_id', 'pad_token_id'], tokenizer.bos)
    run = {name: state[name] for name in ('step', 'data', 'data_dir')}
    write_json(path / 'config.json', **config, **ids, run=run,
               dtype=str(dtype).removeprefix('torch.'))
    write_json(path / 'generation_config.json', use_cache=plain, **ids)
    # Write a README.md that says how the folder is used
    has_tokenizer = (path / 'tokenizer.json').exists()
    missing = '' if has_tokenizer else ', which AutoTokenizer does not find here'
    trust, about = ('', '') if plain else (', trust_remote_code=True', ABOUT_CODE)
    card = CARD.format(**state['data'], missing=missing, trust=trust, about=about)
    (path / 'README.md').write_text(card, encoding='utf-8')


def write_json(path: Path, **values: Any) -> None:
    path.write_bytes(to_json(values, indent=2) + b'\n')


def read_export(folder: str) -> dict[str, Any]:
    """Read an export, or what transformers' save_pretrained made of it, as a checkpoint with
    weights in float32. UserError if config.json does not describe the weights."""
    config = read_json(f'{folder}/config.json') or {}
    cfg = build(ModelConfig, config.get('nanocem', config))
    # Find the name that each parameter has in the file. A tied matrix is there by its first name
    with torch.device('meta'):
        model = Transformer(cfg)
    exported = {w: exported_name(name, cfg) for name, w in model.named_parameters()}
    found = load_file(f'{folder}/{WEIGHTS_FILE}')
    different = sorted(found.keys() ^ set(exported.values()))
    check(not different, f'{folder} is not an export of a model of this version: config.json does '
          f'not describe the weights, or some are missing: {different[:3]}')
    weights = {name: convert_layout(name, found[exported[w]].float(), cfg)
               for name, w in model.named_parameters(remove_duplicate=False)}
    return {**config.get('run', {}), 'folder': folder, 'model_config': vars(cfg), 'model': weights}


# Tokenizers

# Texts on which tokenizers are likely to differ
PROBES = [' a  b \n\tc\r\n', '\u2581a\u2581\u2581', 'ﬁ ½ Å e\u0301 世界👍',
          '\0\x7f\u00a0\u3000', '<s> </s> <unk> <pad> <0x0A>', 'x' * 99, ' ' * 40]


def write_tokenizer(path: Path, tokenizer: Any, context_length: int) -> None:
    """Write a SentencePiece model as tokenizer.model, which our scripts read, and any tokenizer as
    tokenizer.json, which transformers reads. If its ids would differ, print a line instead."""
    if tokenizer.path:
        shutil.copyfile(tokenizer.path, path / MODEL_FILE)
    converted = convert_tokenizer(tokenizer)
    if converted is None:
        print("WARNING: the export has no tokenizer.json: only bytes, our own byte-pair pieces and "
              "Llama's model have one, and pip install tokenizers is needed", flush=True)
        return
    converted.save(str(path / 'tokenizer.json'))
    bos = converted.id_to_token(tokenizer.bos)
    write_json(path / 'tokenizer_config.json', tokenizer_class='PreTrainedTokenizerFast',
               bos_token=bos, eos_token=bos, pad_token=bos, unk_token=converted.model.unk_token,
               split_special_tokens=True, clean_up_tokenization_spaces=False, padding_side='right',
               model_input_names=['input_ids', 'attention_mask'], model_max_length=context_length)


def convert_tokenizer(tokenizer: Any) -> Any:
    """Convert a tokenizer to one of Hugging Face's package tokenizers. None without that package,
    for gpt2, and if some ids differ, as those of another kind of SentencePiece model do."""
    if tokenizer.name == 'gpt2' or not find_spec('tokenizers'):
        return None
    from tokenizers import AddedToken, processors
    converted = convert_sentencepiece(tokenizer) if tokenizer.path else convert_bytes()
    # Begin each text with BOS, and read "<s>" in a text as text
    bos = converted.id_to_token(tokenizer.bos)
    converted.add_special_tokens([AddedToken(token, normalized=False)
                                  for token in (bos, converted.model.unk_token)])
    converted.post_processor = processors.TemplateProcessing(
        f'{bos} $A', f'{bos} $A $B', [(bos, tokenizer.bos)])
    converted.encode_special_tokens = True
    # Compare the ids of the probes, and of all pieces in a row
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    texts = [*PROBES, ''.join(pieces), ' '.join(reversed(pieces))]
    same = all(converted.encode(text).ids == [tokenizer.bos, *tokenizer.encode(text)]
               for text in texts)
    return converted if same else None


def convert_bytes() -> Any:
    """Convert ByteTokenizer: byte-pair encoding without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    # The alphabet of GPT-2: a printable byte is its own letter, the n-th other is chr(256 + n)
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [i for i in range(256) if i not in printable]
    letters = [chr(i) if i in printable else chr(256 + others.index(i)) for i in range(256)]
    vocabulary = {letter: i for i, letter in enumerate([*letters, '<|endoftext|>'])}
    converted = Tokenizer(models.BPE(vocabulary, [], unk_token='<|endoftext|>'))
    converted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted.decoder = decoders.ByteLevel()
    return converted


def convert_sentencepiece(tokenizer: Any) -> Any:
    """Convert a SentencePiece model as if it were Llama's, or trained by us."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    sp = tokenizer.model
    ids = range(tokenizer.vocab_size)
    # In Llama's model a space is U+2581. Here ours gets ' ', because U+2581 has ids of its own
    like_llama = tokenizer.u2581_ids is None
    space = '\u2581' if like_llama else ' '
    pieces = [sp.id_to_piece(i).replace('\u2581', space) for i in ids]
    # A merge joins two pieces whose concatenation is a piece, the one of the highest score first
    normal = [i for i in ids if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_byte(i))]
    words = dict.fromkeys(pieces[i] for i in sorted(normal, key=sp.get_score, reverse=True))
    merges = [(word[:n], word[n:]) for word in words for n in range(1, len(word))
              if word[:n] in words and word[n:] in words]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    converted = Tokenizer(models.BPE(vocabulary, merges, unk_token=pieces[sp.unk_id()],
                                     fuse_unk=True, byte_fallback=True))
    steps = [decoders.ByteFallback(), decoders.Fuse()]
    if like_llama:  # it puts a space before every text
        converted.normalizer = normalizers.Sequence(
            [normalizers.Prepend(space), normalizers.Replace(' ', space)])
        steps = [decoders.Replace(space, ' '), *steps, decoders.Strip(' ', 1, 0)]
    converted.decoder = decoders.Sequence(steps)
    return converted

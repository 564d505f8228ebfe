"""Tokenizers and README.md of an export: as transformers reads them, and in words."""
import shutil
from pathlib import Path
from typing import Any

from configurator import warn
from nanocem.files import write_json
from nanocem.tokenizers import MODEL_FILE, UNCONVERTED_FILE

CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: mit
---
A language model by nanoCEM, an implementation of the paper
[Causal Energy Minimization](https://arxiv.org/abs/2605.07588).

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(FOLDER_OR_NAME{trust})
{load}
Tokenizer: {tokenizer}, vocabulary {vocab_size}. Texts begin with BOS, id {bos}.
generate stops at the next BOS.
{about_tokenizer}{about}
"""
LOAD_TOKENIZER = """
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(FOLDER_OR_NAME, trust_remote_code=False)
"""
NO_TOKENIZER = 'AutoTokenizer does not load this tokenizer: {package} does, and adds no BOS.'
ABOUT_PAD = """\
The tokenizer pads{side} with `{pad}`, which no text contains. BOS ends a text, too: leave it
in the labels."""
ABOUT_BOS_AS_PAD = """\
The tokenizer pads{side} with BOS, since no other id is free. DataCollatorForLanguageModeling leaves
pads out of the loss, and so every BOS: train on texts of one length, with labels of your own."""
ABOUT_CODE = """

The model needs torch and transformers 5, and runs this folder's code. generate takes texts of one
length, and reads each token once; with beams it reads texts again. Pad on the right, never on the
left."""

# Texts on which tokenizers are likely to differ
PROBES = [' a  b \n\tc\r\n', '\u2581a\u2581\u2581', 'ﬁ ½ Å e\u0301 世界👍',
          '\0\x7f\u00a0\u3000', '<s> </s> <unk> <pad> <0x0A>', 'x' * 99, ' ' * 40]


def write_card(path: Path, data: dict[str, Any], bos: int, about_tokenizer: str,
               with_code: bool) -> None:
    """Write a README.md that says how the folder is used."""
    load = LOAD_TOKENIZER if (path / 'tokenizer.json').exists() else ''
    trust, about = (', trust_remote_code=True', ABOUT_CODE) if with_code else ('', '')
    card = CARD.format(**data, bos=bos, about_tokenizer=about_tokenizer, load=load, trust=trust,
                       about=about)
    (path / 'README.md').write_text(card, encoding='utf-8')


def write_tokenizer(path: Path, tokenizer: Any, context_length: int, pad_side: str) -> str:
    """Write a tokenizer as tokenizer.json, which transformers reads, and a SentencePiece model also
    as tokenizer.model, which our scripts and llama.cpp's converter read. If tokenizer.json would
    have other ids, only our scripts find the model. Return sentences about it."""
    converted = convert_tokenizer(tokenizer)
    if tokenizer.path:
        shutil.copyfile(tokenizer.path, path / (MODEL_FILE if converted else UNCONVERTED_FILE))
    if converted is None:
        warn('the export has no tokenizer.json: only bytes, our own byte-pair pieces and '
             "Llama's model have one")
        package = ("tiktoken's get_encoding('gpt2')" if tokenizer.name == 'gpt2' else
                   f"sentencepiece's SentencePieceProcessor(model_file='{UNCONVERTED_FILE}')")
        return NO_TOKENIZER.format(package=package)
    converted.save(str(path / 'tokenizer.json'))
    bos, pad = map(converted.id_to_token, (tokenizer.bos, find_pad(tokenizer)))
    # llama.cpp would put a space before every text of a SentencePiece model
    no_space = {} if tokenizer.path and tokenizer.adds_space else {'add_prefix_space': False}
    write_json(path / 'tokenizer_config.json', tokenizer_class='PreTrainedTokenizerFast',
               bos_token=bos, eos_token=bos, pad_token=pad, unk_token=converted.model.unk_token,
               split_special_tokens=True, clean_up_tokenization_spaces=False, padding_side=pad_side,
               model_input_names=['input_ids', 'attention_mask'],
               model_max_length=context_length, **no_space)
    about = ABOUT_BOS_AS_PAD if pad == bos else ABOUT_PAD
    return about.format(pad=pad, side=' on the left' if pad_side == 'left' else '')


def find_pad(tokenizer: Any) -> int:
    """Return an id for padding that no text has and that is not BOS, or else BOS. A SentencePiece
    model has one if it has another control piece, such as EOS."""
    ids = range(tokenizer.vocab_size) if tokenizer.path else ()
    return next((i for i in ids if tokenizer.model.is_control(i) and i != tokenizer.bos),
                tokenizer.bos)


def convert_tokenizer(tokenizer: Any) -> Any:
    """Convert a tokenizer to one of Hugging Face's package tokenizers. None for gpt2, and if some
    ids differ, as those of another kind of SentencePiece model do."""
    if tokenizer.name == 'gpt2':
        return None
    from tokenizers import AddedToken, processors
    converted = convert_sentencepiece(tokenizer) if tokenizer.path else convert_bytes()
    # Begin each text with BOS, and read "<s>" in a text as text
    bos, pad = map(converted.id_to_token, (tokenizer.bos, find_pad(tokenizer)))
    converted.add_special_tokens([AddedToken(token, normalized=False)
                                  for token in (bos, pad, converted.model.unk_token)])
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

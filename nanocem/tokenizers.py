"""Tokenizers: bytes, tiktoken's gpt2, and Llama's SentencePiece model."""
import hashlib
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from configurator import fail
from nanocem.files import say
from nanocem.shards import read_meta

LLAMA_SHA256 = '9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347'
# The character before a space or line end: no token of ours crosses from one to the other, so that
# both sides can be tokenized apart.
CUT = re.compile('[^\\s\u2581](?=[ \\n])')


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and BOS, 256."""
    name, vocab_size, bos, sha256 = 'byte', 257, 256, None

    def encode(self, text: str) -> list[int]:
        return list(text.encode('utf-8', 'replace'))

    def encode_parts(self, parts: list[Any], threads: int) -> list[np.ndarray]:
        """The tokens of each part's text; one that begins no document goes on from another."""
        return [np.frombuffer(part.text.encode('utf-8', 'replace'), np.uint8) for part in parts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode('utf-8', 'replace')

    def token_bytes(self) -> torch.Tensor:
        """How many bytes of text each token spells, (vocabulary,): BOS and its like none."""
        return torch.tensor([1] * 256 + [0])


class Gpt2Tokenizer:
    """tiktoken's gpt2, fetched on first use; BOS is <|endoftext|>."""
    name, vocab_size, bos = 'gpt2', 50257, 50256

    def __init__(self) -> None:
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as error:  # whatever the HTTP library of the day raises
            fail(f'tokenizer gpt2: no vocabulary ({type(error).__name__}); is there a network?')
        vocabulary = (self.bpe.decode_single_token_bytes(i) for i in range(self.bos))
        self.sha256 = hashlib.sha256(b'\n'.join(vocabulary)).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode_ordinary(text)

    def encode_parts(self, parts: list[Any], threads: int) -> list[np.ndarray]:
        texts = [part.text for part in parts]
        ids = self.bpe.encode_ordinary_batch(texts, num_threads=threads)
        return [np.array(i, np.uint32) for i in ids]

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.bos])

    def token_bytes(self) -> torch.Tensor:
        """How many bytes of text each token spells, (vocabulary,): BOS and its like none."""
        spelled = [len(self.bpe.decode_single_token_bytes(i)) for i in range(self.bos)]
        return torch.tensor([*spelled, 0])


class LlamaTokenizer:
    """SentencePiece with Llama's model file: the ids of the LlamaTokenizerFast of 2023, but "<s>",
    "</s>" and "<unk>" in a text are text, or struck-out HTML would begin a document."""
    name, bos = 'llama', 1

    def __init__(self, path: str):
        from sentencepiece import SentencePieceProcessor
        with open(path, 'rb') as file:
            model = file.read()
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.path = path
        if self.sha256 != LLAMA_SHA256:
            fail(f"{path} is not Llama's tokenizer.model, whose SHA-256 is {LLAMA_SHA256}")
        self.model = SentencePieceProcessor(model_proto=model)
        self.vocab_size = self.model.vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text)

    def encode_parts(self, parts: list[Any], threads: int) -> list[np.ndarray]:
        # SentencePiece puts a space before every text. Before a later part of a document goes a
        # line end, and both leave again.
        texts = [part.text if part.begins else '\n' + part.text for part in parts]
        ids = self.model.encode(texts, num_threads=threads, return_type='numpy')
        return [i if part.begins else i[2:] for i, part in zip(ids, parts, strict=True)]

    def decode(self, ids: list[int]) -> str:
        return self.model.decode([i for i in ids if i < self.vocab_size])

    def token_bytes(self) -> torch.Tensor:
        """How many bytes of text each token spells, (vocabulary,): BOS and its like none."""
        spelled = []
        for i in range(self.vocab_size):
            # SentencePiece's sign for a space is three bytes long
            piece = self.model.id_to_piece(i).replace('\u2581', ' ')
            nothing = self.model.is_control(i) or self.model.is_unknown(i)
            spelled.append(0 if nothing else 1 if self.model.is_byte(i) else len(piece.encode()))
        return torch.tensor(spelled)


def make_tokenizer(name: str, model: str) -> Any:
    """Tokenizer 'byte', 'gpt2' or 'llama', the last from the file `model`."""
    if name == 'llama':
        return LlamaTokenizer(model)
    return {'byte': ByteTokenizer, 'gpt2': Gpt2Tokenizer}[name]()


def load_tokenizer(data_dir: str, meta: dict[str, Any] | None = None) -> Any:
    """The tokenizer that made `data_dir`, as its meta.json says, or `meta`: then the folder is
    needed for Llama's alone. SystemExit if it is missing or another one."""
    meta = meta or read_meta(data_dir)
    try:
        tokenizer = make_tokenizer(meta['tokenizer'], os.path.join(data_dir, 'tokenizer.model'))
    except (OSError, KeyError) as error:
        fail(f'{data_dir}: no tokenizer {meta["tokenizer"]:.40} ({error}); prepare the data again')
    vocab_size, sha256 = meta['vocab_size'], meta.get('tokenizer_sha256')
    if vocab_size > tokenizer.vocab_size or sha256 != tokenizer.sha256:
        fail(f'the data of {data_dir} is of another {tokenizer.name} tokenizer: vocabulary '
             f'{vocab_size}, SHA-256 {sha256}; prepare the data again')
    return tokenizer


def tokenizer_of(state: dict[str, Any]) -> Any:
    """That of a run's checkpoint, or of an exported folder, which has Llama's model file within."""
    return load_tokenizer(state.get('folder', state['data_dir']), state['data'])


def as_it_comes(tokenizer: Any, ids: list[int], total: int) -> Callable[[Any], None]:
    """A function that takes one more token at a time: it prints the text of `ids`, and then of
    these, once their last character is whole, or they are `total` in all."""
    begin = end = 0  # of what was printed last; the next is decoded behind it, for a word may lose
    # its space where a text begins

    def take(token: Any) -> None:
        nonlocal begin, end
        ids.append(int(token))
        printed = tokenizer.decode(ids[begin:end])
        text = tokenizer.decode(ids[begin:])
        if not text.endswith('\ufffd') or len(ids) == total:
            say(text[len(printed):], end='')
            begin, end = end, len(ids)
    return take


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

"""Tokenizers: bytes, tiktoken's gpt2, and SentencePiece: Llama's model, your own, or one trained."""
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from configurator import fail
from nanocem.data import read_meta
from nanocem.files import say

LLAMA_SHA256 = '9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347'
LINE = 4096  # characters; a longer line is cut before a tokenizer is trained on it
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


class SentencePieceTokenizer:
    """Any SentencePiece model file. Llama's ids are those of LlamaTokenizerFast of 2023, except that
    "<s>", "</s>" and "<unk>" in a text are text, or struck-out HTML would begin a document."""
    def __init__(self, path: str):
        from sentencepiece import SentencePieceProcessor
        with open(path, 'rb') as file:
            model = file.read()
        try:
            self.model = SentencePieceProcessor(model_proto=model)
            pieces = self.model.encode('a', out_type=str)
        except (RuntimeError, TypeError) as error:  # TypeError: an empty file
            fail(f'{path} is not a SentencePiece model ({error})')
        self.path = path
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.name = 'llama' if self.sha256 == LLAMA_SHA256 else 'sentencepiece'
        self.vocab_size = self.model.vocab_size()
        # A model without BOS begins a document with its end-of-text token, or else with <unk>.
        special = (self.model.bos_id(), self.model.eos_id(), self.model.unk_id())
        self.bos = next(i for i in special if i >= 0)
        self.newline = self.model.encode('\n')
        # SentencePiece spells a space as U+2581. A model that adds no space before a text can keep
        # the two apart: a U+2581 in the text becomes its three bytes.
        adds_space = ''.join(pieces).startswith('\u2581')
        sign = [self.model.piece_to_id(f'<0x{byte:02X}>') for byte in '\u2581'.encode()]
        self.sign = sign if not adds_space and all(map(self.model.is_byte, sign)) else None

    def encode(self, text: str) -> list[int]:
        text = text.encode('utf-8', 'replace').decode()  # half a surrogate pair becomes "?"
        if self.sign is None:
            return self.model.encode(text)
        first, *others = self.model.encode(text.split('\u2581'))
        return first + [i for ids in others for i in (*self.sign, *ids)]

    def encode_parts(self, parts: list[Any], threads: int) -> list[np.ndarray]:
        if self.sign is not None and any('\u2581' in part.text for part in parts):
            return [np.array(self.encode(part.text), np.int32) for part in parts]
        # Llama's model puts a space before every text. A later part of a document gets a newline
        # before it instead, whose tokens are then removed.
        texts = [part.text if part.begins else '\n' + part.text for part in parts]
        ids = self.model.encode(texts, num_threads=threads, return_type='numpy')
        n = len(self.newline)
        return [i if part.begins or list(i[:n]) != self.newline else i[n:]
                for i, part in zip(ids, parts, strict=True)]

    def decode(self, ids: list[int]) -> str:
        return self.model.decode([i for i in ids if i < self.vocab_size])

    def token_bytes(self) -> torch.Tensor:
        """Count the bytes of text that each token spells: (vocabulary,), 0 for BOS and its like."""
        counts = []
        for i in range(self.vocab_size):
            piece = self.model.id_to_piece(i).replace('\u2581', ' ')
            special = self.model.is_control(i) or self.model.is_unknown(i)
            counts.append(0 if special else 1 if self.model.is_byte(i) else len(piece.encode()))
        return torch.tensor(counts)


def train_bpe(path: str, vocab_size: int, texts: Iterable[str]) -> None:
    """Train byte-pair merges on these texts and write them to `path` as a SentencePiece model.

    The model spells every text exactly, and unknown characters by their bytes. No piece crosses
    the end of a line. UserError where the texts are too few."""
    from sentencepiece import SentencePieceTrainer
    lines = (line[at:at + LINE] for text in texts for line in text.splitlines()
             for at in range(0, len(line), LINE))
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, model_type='bpe', vocab_size=vocab_size,
            byte_fallback=True, split_digits=True, normalization_rule_name='identity',
            add_dummy_prefix=False, remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True, character_coverage=0.9995,
            num_threads=1,  # the file keeps this number: the same file on every machine
            max_sentence_length=4 * LINE, minloglevel=2)
    except RuntimeError as error:
        limit = re.search(r'<= (\d+)|required_chars. \d+ vs (\d+)', str(error))
        expected = '' if not limit else (f'at most bpe{limit[1]}' if limit[1] else
                                         f'more than bpe{limit[2]}, its characters alone')
        fail(f'tokenizer=bpe{vocab_size}: not for this text; expected '
             f'{expected or "more text"}, or --tokenizer=byte')
    with open(path, 'wb') as file:
        file.write(model.getvalue())


def make_tokenizer(name: str, folder: str) -> Any:
    """'byte', 'gpt2', or any other name: SentencePiece, with folder/tokenizer.model."""
    if name in ('byte', 'gpt2'):
        return {'byte': ByteTokenizer, 'gpt2': Gpt2Tokenizer}[name]()
    return SentencePieceTokenizer(os.path.join(folder, 'tokenizer.model'))


def load_tokenizer(folder: str, meta: dict[str, Any] | None = None) -> Any:
    """The tokenizer that made a data folder, as its meta.json says, or `meta`: then the folder is
    needed for SentencePiece alone. SystemExit if it is missing or another one."""
    meta = meta or read_meta(folder)
    try:
        tokenizer = make_tokenizer(meta['tokenizer'], folder)
    except OSError as error:
        fail(f'{folder}: no tokenizer {meta["tokenizer"]:.40} ({error}); prepare the data again')
    vocab_size, sha256 = meta['vocab_size'], meta.get('tokenizer_sha256')
    if vocab_size > tokenizer.vocab_size or sha256 != tokenizer.sha256:
        fail(f'the data of {folder} is of another {tokenizer.name} tokenizer: vocabulary '
             f'{vocab_size}, SHA-256 {sha256}; prepare the data again')
    return tokenizer


def tokenizer_of(state: dict[str, Any]) -> Any:
    """That of a run's checkpoint, or of an exported folder, which has Llama's model file within."""
    return load_tokenizer(state.get('folder', state['data_dir']), state['data'])


def stream_text(tokenizer: Any, ids: list[int], total: int) -> Callable[[Any], None]:
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

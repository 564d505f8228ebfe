"""Tokenizers: bytes, tiktoken's gpt2, and SentencePiece models (Llama's, a user's, trained)."""
import hashlib
import io
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from configurator import fail
from nanocem.data import read_meta

LLAMA_SHA256 = '9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347'
MODEL_FILE = 'tokenizer.model'  # the SentencePiece model of a data folder
LINE = 4096  # A tokenizer is trained on lines of at most this many characters.
# The last character of a word before a space or line end. No token holds it and the space, so the
# texts on both sides can be tokenized separately. (A user's SentencePiece model may differ.)
WORD_END = re.compile('[^\\s\u2581](?=[ \\n])')


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255. BOS is 256."""
    name, vocab_size, bos, sha256, path = 'byte', 257, 256, None, None

    def encode(self, text: str) -> list[int]:
        return list(text.encode('utf-8', 'replace'))

    def encode_parts(self, parts: list[Any], threads: int) -> list[np.ndarray]:
        """Encode parts of documents (prepare_slimpajama.Part), each with the ids that it has in its
        whole document."""
        return [np.frombuffer(part.text.encode('utf-8', 'replace'), np.uint8) for part in parts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode('utf-8', 'replace')

    def token_bytes(self) -> torch.Tensor:
        """Return how many bytes each token spells (vocab_size,): 0 for BOS and other marks."""
        return torch.tensor([1] * 256 + [0])


class Gpt2Tokenizer:
    """tiktoken's gpt2, downloaded on first use. BOS is <|endoftext|>."""
    name, vocab_size, bos, path = 'gpt2', 50257, 50256, None

    def __init__(self) -> None:
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as error:  # The HTTP library raises many classes of its own.
            fail(f'tokenizer=gpt2: no vocabulary ({type(error).__name__}); is there a network?')
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
        counts = [len(self.bpe.decode_single_token_bytes(i)) for i in range(self.bos)]
        return torch.tensor([*counts, 0])


class SentencePieceTokenizer:
    """Any SentencePiece model file. Llama's ids are those of LlamaTokenizerFast of 2023, except
    that "<s>", "</s>" and "<unk>" in a text are not BOS, EOS and unknown: HTML may contain <s>."""
    def __init__(self, path: str):
        from sentencepiece import SentencePieceProcessor
        with open(path, 'rb') as file:
            model = file.read()
        try:
            self.model = SentencePieceProcessor(model_proto=model)
            self.newline = self.model.encode('\n')
        except RuntimeError:
            fail(f'{path} is not a SentencePiece model')
        self.path = path
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.name = 'llama' if self.sha256 == LLAMA_SHA256 else 'sentencepiece'
        self.vocab_size = self.model.vocab_size()
        # A model without BOS begins a document with EOS or <unk>.
        special = (self.model.bos_id(), self.model.eos_id(), self.model.unk_id())
        self.bos = next(i for i in special if i >= 0)
        # SentencePiece writes a space as U+2581. A U+2581 in a text is encoded as its three bytes,
        # if the model has bytes and puts no space before a text.
        adds_space = self.model.encode('a', out_type=str)[0].startswith('\u2581')
        ids = [self.model.piece_to_id(f'<0x{byte:02X}>') for byte in '\u2581'.encode()]
        self.u2581 = ids if not adds_space and all(map(self.model.is_byte, ids)) else None

    def encode(self, text: str) -> list[int]:
        text = text.encode('utf-8', 'replace').decode()  # half a surrogate pair becomes "?"
        if self.u2581 is None:
            return self.model.encode(text)
        first, *others = self.model.encode(text.split('\u2581'))
        return first + [i for ids in others for i in (*self.u2581, *ids)]

    def encode_parts(self, parts: list[Any], threads: int) -> list[np.ndarray]:
        if self.u2581 is not None and any('\u2581' in part.text for part in parts):
            return [np.array(self.encode(part.text), np.int32) for part in parts]
        # Llama's model puts a space before every text, but not after a newline. So the later parts
        # of a document are encoded with a newline before them, whose tokens are then removed.
        texts = [part.text if part.begins else '\n' + part.text for part in parts]
        ids = self.model.encode(texts, num_threads=threads, return_type='numpy')
        n = len(self.newline)
        return [i if part.begins or list(i[:n]) != self.newline else i[n:]
                for i, part in zip(ids, parts, strict=True)]

    def decode(self, ids: list[int]) -> str:
        return self.model.decode([i for i in ids if i < self.vocab_size])

    def token_bytes(self) -> torch.Tensor:
        counts = []
        for i in range(self.vocab_size):
            piece = self.model.id_to_piece(i).replace('\u2581', ' ')
            if self.model.is_control(i) or self.model.is_unknown(i):
                piece = ''
            counts.append(1 if self.model.is_byte(i) else len(piece.encode()))
        return torch.tensor(counts)


def train_bpe(path: str, vocab_size: int, texts: Iterable[str]) -> None:
    """Train byte-pair merges on these texts and write them to `path` as a SentencePiece model. It
    keeps every character of a text; rare ones are encoded as their bytes. No piece contains a line
    end. UserError if the texts are too few."""
    from sentencepiece import SentencePieceTrainer
    lines = [line[at:at + LINE] for text in texts for line in text.splitlines()
             for at in range(0, len(line), LINE)]
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type='bpe',
            vocab_size=vocab_size, byte_fallback=True, split_digits=True,
            normalization_rule_name='identity', add_dummy_prefix=False,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            character_coverage=0.9995,
            num_threads=1,  # The file stores this number, and must be the same everywhere.
            max_sentence_length=4 * LINE, minloglevel=2)
    except RuntimeError as error:
        most = re.search(r'<= (\d+)', str(error))
        least = re.search(r'\d+ vs (\d+)', str(error))  # the characters need a piece each
        expected = f'at most bpe{most[1]}' if most and int(most[1]) >= 512 else 'more text'
        expected = f'at least bpe{least[1]}' if least else expected
        fail(f'tokenizer=bpe{vocab_size} does not suit this text: expected {expected}, or '
             '--tokenizer=byte')
    with open(path, 'wb') as file:
        file.write(model.getvalue())


def make_tokenizer(name: str, path: str) -> Any:
    """Make the tokenizer byte or gpt2; any other name means the SentencePiece model at `path`.
    UserError, OSError."""
    if name == 'byte':
        return ByteTokenizer()
    return Gpt2Tokenizer() if name == 'gpt2' else SentencePieceTokenizer(path)


def load_tokenizer(folder: str, meta: dict[str, Any] | None = None) -> Any:
    """Load the tokenizer of a data folder, as described by `meta` or by the folder's meta.json.
    UserError if it is missing or is not the one that made the data."""
    meta = meta or read_meta(folder)
    vocab_size, sha256 = meta['vocab_size'], meta.get('tokenizer_sha256')
    path = os.path.join(folder, MODEL_FILE)
    if sha256 == LLAMA_SHA256:
        path = find_llama_model(folder) or path
    try:
        tokenizer = make_tokenizer(meta['tokenizer'], path)
    except OSError as error:
        remedy = 'prepare the data again'
        if os.path.isfile(os.path.join(folder, 'model.safetensors')):  # transformers saved a model
            remedy = 'copy it from the folder that evaluate.py --export wrote, or from the run'
        fail(f'{path}: no tokenizer {meta["tokenizer"]:.40} ({error.strerror}); {remedy}')
    if vocab_size > tokenizer.vocab_size or sha256 != tokenizer.sha256:
        fail(f'{folder} was made with another {tokenizer.name} tokenizer, of vocabulary '
             f'{vocab_size} and SHA-256 {sha256}; prepare the data again')
    return tokenizer


def tokenizer_of(state: dict[str, Any]) -> Any:
    """Load the tokenizer of a checkpoint or export. Its model file is beside it, or in the data
    folder. UserError."""
    return load_tokenizer(state.get('folder', state['data_dir']), state['data'])


def find_llama_model(folder: str) -> str | None:
    """Find Llama's tokenizer.model in a data folder or at $LLAMA_TOKENIZER; None if in neither."""
    for path in (os.path.join(folder, MODEL_FILE), os.environ.get('LLAMA_TOKENIZER', '')):
        if os.path.isfile(path):
            with open(path, 'rb') as file:
                if hashlib.sha256(file.read()).hexdigest() == LLAMA_SHA256:
                    return path
    return None

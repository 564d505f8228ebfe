"""Tokenizers: bytes, tiktoken's gpt2, and SentencePiece models (Llama's, a user's, or one trained
here)."""
import hashlib
import io
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from configurator import check, fail
from nanocem.data import read_meta

LLAMA_SHA256 = '9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347'
MODEL_FILE = 'tokenizer.model'  # the SentencePiece model of a data folder
# The same in an export, where other programs would get other ids from it: they look for *.model
UNCONVERTED_FILE = 'tokenizer.sentencepiece'
LINE = 4096  # A tokenizer is trained on lines of at most this many characters.


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255. BOS is 256."""
    name, vocab_size, bos, sha256, path = 'byte', 257, 256, None, None

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """Encode a document, or a block of one that it `begins` or continues. Adds no BOS."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode('utf-8', 'replace')

    def token_bytes(self) -> torch.Tensor:
        """Return how many bytes of text each token spells, (vocab_size,). BOS spells none."""
        return torch.tensor([1] * 256 + [0])


class Gpt2Tokenizer:
    """tiktoken's gpt2, downloaded on first use. BOS is <|endoftext|>."""
    name, vocab_size, bos, sha256, path = 'gpt2', 50257, 50256, None, None

    def __init__(self) -> None:
        import tiktoken
        self.bpe = tiktoken.get_encoding('gpt2')

    def encode(self, text: str, begins: bool = True) -> list[int]:
        return self.bpe.encode_ordinary(text)

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
        model = Path(path).read_bytes()
        try:
            self.model = SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            fail(f'{path} is not a SentencePiece model')
        self.path = path
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.name = 'llama' if self.sha256 == LLAMA_SHA256 else 'sentencepiece'
        self.vocab_size = self.model.vocab_size()
        # In a model without BOS (its id is -1), EOS or <unk> takes its place.
        special = (self.model.bos_id(), self.model.eos_id(), self.model.unk_id())
        self.bos = next(i for i in special if i >= 0)
        # SentencePiece writes a space as U+2581. A text's own U+2581 is encoded as its three bytes:
        # these ids, or None if the model has no bytes or puts a space before every text.
        self.adds_space = self.model.encode('a', out_type=str)[0].startswith('\u2581')
        ids = [self.model.piece_to_id(f'<0x{byte:02X}>') for byte in '\u2581'.encode()]
        self.u2581_ids = ids if not self.adds_space and all(map(self.model.is_byte, ids)) else None

    def encode(self, text: str, begins: bool = True) -> list[int]:
        if self.u2581_ids is not None:
            ids, *parts = self.model.encode(text.split('\u2581'))
            return ids + [i for part in parts for i in self.u2581_ids + part]
        if begins:
            return self.model.encode(text)
        # Llama's model puts a space before every text. Put a line end there, and remove both.
        return self.model.encode('\n' + text)[len(self.model.encode('\n')):]

    def decode(self, ids: list[int]) -> str:
        return self.model.decode([i for i in ids if i < self.vocab_size])

    def token_bytes(self) -> torch.Tensor:
        counts = torch.zeros(self.vocab_size, dtype=torch.int64)
        for i in range(self.vocab_size):
            if self.model.is_byte(i):
                counts[i] = 1
            elif not (self.model.is_control(i) or self.model.is_unknown(i)):
                counts[i] = len(self.model.id_to_piece(i).replace('\u2581', ' ').encode())
        if self.adds_space:
            counts[self.bos] = -1  # the space that the model adds to the document is not its text
        return counts


WITHOUT_FILE = {'byte': ByteTokenizer, 'gpt2': Gpt2Tokenizer}


# Training and loading

def train_bpe(path: str, vocab_size: int, texts: Iterable[str]) -> None:
    """Train byte-pair encoding on these texts and write a SentencePiece model to `path`. It encodes
    every text without loss, rare characters as their bytes. No piece contains a line end. UserError
    if the texts are too short, or have too many characters."""
    from sentencepiece import SentencePieceTrainer
    lines = [line[at:at + LINE] for text in texts for line in text.splitlines()
             for at in range(0, len(line), LINE)]
    # Ask for a piece for spaces where they are rare. Without it a space becomes three bytes.
    spaces_are_rare = sum(line.count(' ') for line in lines) < sum(map(len, lines)) / 1000
    required = {'required_chars': '\u2581'} if spaces_are_rare else {}
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type='bpe',
            vocab_size=vocab_size, byte_fallback=True, split_digits=True,
            normalization_rule_name='identity', add_dummy_prefix=False,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            character_coverage=0.9995,
            num_threads=1,  # The file stores this number, and must be the same everywhere.
            max_sentence_length=4 * LINE, minloglevel=2, **required)
    except RuntimeError as error:
        reason = re.sub(r'.*\] | Increase.*', '', str(error))
        fail(f'tokenizer=bpe{vocab_size} does not suit this text: expected more text, another '
             f'number or --tokenizer=byte ({reason})')
    Path(path).write_bytes(model.getvalue())


def load_tokenizer(folder: str, meta: dict[str, Any] | None = None) -> Any:
    """Load the tokenizer of a data folder, as described by `meta` or by the folder's meta.json.
    UserError if it is missing or is not the one that made the data."""
    meta = meta or read_meta(folder)
    name, vocab_size, sha256 = meta['tokenizer'], meta['vocab_size'], meta.get('tokenizer_sha256')
    if name in WITHOUT_FILE:
        tokenizer = WITHOUT_FILE[name]()
    else:
        paths = [os.path.join(folder, file) for file in (UNCONVERTED_FILE, MODEL_FILE)]
        path = next(filter(os.path.isfile, paths), None)
        check(path is not None, f'{folder}/{MODEL_FILE} (or {UNCONVERTED_FILE}): no such file; '
              'copy it from the folder that this one was made from (an export, or a data folder), '
              'or prepare the data again')
        tokenizer = SentencePieceTokenizer(path)
    check(vocab_size <= tokenizer.vocab_size and sha256 == tokenizer.sha256,
          f'{folder} was made with another {tokenizer.name} tokenizer, of vocabulary {vocab_size} '
          f'and SHA-256 {sha256}; prepare the data again')
    return tokenizer


def tokenizer_of(state: dict[str, Any]) -> Any:
    """Load the tokenizer of a checkpoint or export. Its model file is beside it, or in the data
    folder. Raises UserError."""
    return load_tokenizer(state.get('folder', state['data_dir']), state['data'])


def find_llama(folder: str) -> SentencePieceTokenizer | None:
    """Load Llama's tokenizer from $LLAMA_TOKENIZER or else from a data folder. None if neither has
    it. UserError if $LLAMA_TOKENIZER is another model."""
    given = os.environ.get('LLAMA_TOKENIZER')
    path = given or os.path.join(folder, MODEL_FILE)
    content = Path(path).read_bytes() if os.path.isfile(path) else b''
    if hashlib.sha256(content).hexdigest() == LLAMA_SHA256:
        return SentencePieceTokenizer(path)
    check(not given, f"LLAMA_TOKENIZER={given} is not Llama's tokenizer.model: expected the file "
          f'of Llama 1 or 2, whose SHA-256 begins with {LLAMA_SHA256:.8}')
    return None


# Text

def keeps_text(tokenizer: Any, ids: list[int], text: str) -> bool:
    """Return whether the ids of a text decode to it. Llama's model turns U+2581 into a space and
    drops one at the start: neither counts."""
    decoded = tokenizer.decode(ids)
    return decoded.replace('\u2581', ' ').lstrip(' ') == text.replace('\u2581', ' ').lstrip(' ')


def spelled_bytes(tokenizer: Any, meta: dict[str, Any]) -> torch.Tensor | None:
    """Return how many bytes of text each token spells, (vocab_size,), for bits per byte. If the
    tokenizer lost text of the data that `meta` describes, print a line and return None."""
    if meta.get('lossless', True):
        return tokenizer.token_bytes()
    print('No bits per byte: the tokenizer of this data loses text', flush=True)
    return None

"""Tokenizers: bytes, tiktoken's gpt2, and Llama's SentencePiece model."""
import hashlib
import os
import re
from typing import Any

from configurator import fail
from nanocem.shards import read_meta

LLAMA_SHA256 = '9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347'


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and BOS, 256."""
    name, vocab_size, bos, eos, sha256 = 'byte', 257, 256, None, None

    def encode(self, text: str, begins: bool = True) -> list[int]:
        return list(text.encode('utf-8', 'replace'))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode('utf-8', 'replace')


class Gpt2Tokenizer:
    """tiktoken's gpt2; BOS is <|endoftext|>. tiktoken fetches the vocabulary on first use (TIKTOKEN_CACHE_DIR keeps it)."""
    name, vocab_size, bos, eos = 'gpt2', 50257, 50256, None

    def __init__(self) -> None:
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as error:  # whatever the HTTP library of the day raises
            fail(f'tokenizer gpt2: tiktoken cannot fetch its vocabulary ({type(error).__name__}); is there a network?')
        self.sha256 = hashlib.sha256(b'\n'.join(self.bpe.decode_single_token_bytes(i) for i in range(self.bos))).hexdigest()

    def encode(self, text: str, begins: bool = True) -> list[int]:
        return self.bpe.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.bos])


class LlamaTokenizer:
    """SentencePiece with Llama's model file: the ids of the LlamaTokenizerFast of 2023. One difference, on purpose: "<s>",
    "</s>" and "<unk>" in a text are text (as with split_special_tokens=True), or struck-out HTML would begin a document."""
    name, bos, eos = 'llama', 1, 2

    def __init__(self, path: str):
        from sentencepiece import SentencePieceProcessor
        with open(path, 'rb') as file:
            model = file.read()
        self.sha256 = hashlib.sha256(model).hexdigest()
        if self.sha256 != LLAMA_SHA256:
            fail(f"{path} is not Llama's tokenizer.model: its SHA-256 is {self.sha256}, expected {LLAMA_SHA256}")
        self.model = SentencePieceProcessor(model_proto=model)
        self.vocab_size = self.model.vocab_size()
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """The ids of a text, or of a later part of one (begins=False). Word by word, most words from a cache: four times as
        fast as SentencePiece, and the same ids, since no piece of this vocabulary reaches over a word's end or a line's."""
        ids: list[int] = []
        text = '\u2581' * (begins and bool(text)) + text.replace(' ', '\u2581')
        for word in re.findall('\n|\u2581*[^\u2581\n]+|\u2581+', text):
            found = self.cache.get(word)
            if found is None:
                found = self.model.encode('\n' + word)[2:]  # less the space SentencePiece puts in front, and the line end
                if len(self.cache) < 200_000 and len(word) < 32:
                    self.cache[word] = found
            ids += found
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids)


def make_tokenizer(name: str, model: str) -> Any:
    """Tokenizer 'byte', 'gpt2' or 'llama', the last from the file `model`."""
    return {'byte': ByteTokenizer, 'gpt2': Gpt2Tokenizer}[name]() if name != 'llama' else LlamaTokenizer(model)


def load_tokenizer(data_dir: str) -> Any:
    """The tokenizer that made `data_dir`: encode, decode, bos, vocab_size. SystemExit if it is missing or another one."""
    meta = read_meta(data_dir)
    try:
        tokenizer = make_tokenizer(meta['tokenizer'], os.path.join(data_dir, 'tokenizer.model'))
    except FileNotFoundError as error:
        fail(f'{error.filename} is missing; prepare the data again')
    right = meta['vocab_size'], meta.get('tokenizer_sha256')
    if tokenizer.sha256 and right != (tokenizer.vocab_size, tokenizer.sha256):
        fail(f'{data_dir}/meta.json names another {tokenizer.name} tokenizer: vocabulary {right[0]}, SHA-256 {right[1]}, '
             f'not {tokenizer.vocab_size}, {tokenizer.sha256}; prepare the data again')
    return tokenizer

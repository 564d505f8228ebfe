"""Tokenizers: the ids of texts, whole or in parts.
Tests that need Llama's tokenizer.model look for it at $LLAMA_TOKENIZER or
../shared/data/llama_tokenizer.model and are skipped without it."""
import hashlib
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import ROOT

from nanocem.tokenizers import ByteTokenizer, Gpt2Tokenizer, SentencePieceTokenizer, stream_text
from prepare_slimpajama import Part

LLAMA = os.environ.get('LLAMA_TOKENIZER') or str(ROOT / '../shared/data/llama_tokenizer.model')
needs_llama = pytest.mark.skipif(not os.path.isfile(LLAMA),
                                 reason='no Llama tokenizer.model ($LLAMA_TOKENIZER)')

NASTY = ['', ' ', '  ', '\n', '\n\n', '\t', '\r\n', '\0', '\x7f\x01', 'a', ' a', 'a ', '  a  b   c',
         'a\n b\n\n  c\t\td', '\u2581', '\u2581a \u2581\u2581b', 'a\u00a0b\u3000c\u2028d\u200be',
         '\ufeffBOM', 'naïve café Ünï', 'e\u0301 é', 'ﬁ ½ Å', '你好\uff0c世界', 'こんにちは 世界',
         'مرحبا بالعالم', 'हिन्दी में', '👩‍👩‍👧‍👦🏳️‍🌈 👍🏽', '\U0001f600' * 50, '\U0010ffff\ue000',
         'def f(x):\n    return {"a": [x, "\\n"]}\n', 'https://a.b/c?d=%20&e#f', '<0x0A> <unk >',
         '1234567890 3.14159', 'x' * 1000, ' ' * 1000, '\n' * 1000, 'word ' * 1000,
         'don\'t "quote" — …', '\r', ' \r ', '\u2581\r\u2581\u00a0\u2002']
WORDS = ['word', ' ', '\n', '  ', '\u2581', 'é', '.', '世', "'s", '12', '\t', '\r\n', '\u00a0']


def documents(n: int, seed: int, characters: int = 400) -> list[str]:
    """Texts of random words, some with line ends and other scripts."""
    rng = random.Random(seed)
    words = ['the', 'of', 'energy', 'é', '世界', 'x=1', '👍', '\n', '\n\n', ' ', 'a' * 30,
             'minimization', 'Hopfield,', '\t']
    return [' '.join(rng.choices(words, k=rng.randrange(1, characters // 2))) + f' {i}'
            for i in range(n)]


def small_gpt2() -> Gpt2Tokenizer:
    """tiktoken's gpt2 with another vocabulary, which needs no network: the bytes, all parts of a
    text up to 8 bytes, and noise up to the right size."""
    import tiktoken
    rng = random.Random(0)
    text = ' '.join(documents(5, seed=0)).encode()
    found = {text[i:i + n] for i in range(len(text) - 8) for n in range(2, 9)}
    words = [bytes([i]) for i in range(256)] + sorted(found, key=lambda part: (len(part), part))
    while len(words) < 50_256:
        words.append(rng.randbytes(12))
    pattern = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s")
    bpe = tiktoken.Encoding('gpt2', pat_str=pattern, special_tokens={'<|endoftext|>': 50_256},
                            mergeable_ranks={word: i for i, word in enumerate(words)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken, 'get_encoding', lambda name: bpe)
        return Gpt2Tokenizer()


TOKENIZERS = [ByteTokenizer(), small_gpt2()]
if os.path.isfile(LLAMA):
    TOKENIZERS.append(SentencePieceTokenizer(LLAMA))


@needs_llama
def test_llama_ids_are_those_of_2023() -> None:
    """As transformers 4's SentencePieceTokenizerFast gave them, from which the digest is."""
    llama = SentencePieceTokenizer(LLAMA)
    texts = [*NASTY, *documents(50, seed=1), 'ab' * 100_000, 'a ' * 100_000]
    ids = repr([llama.encode(text) for text in texts]).encode()
    assert hashlib.sha256(ids).hexdigest() == (
        '47c1058d909ac141ed04d49aeda29f6867d296e4ff5479f8c783af71933f27c7')
    # marks in a text are text: the one difference, on purpose
    text = 'a <s>struck out</s> word <unk>'
    assert not {0, 1, 2} & set(llama.encode(text))
    assert llama.decode([1, *llama.encode(text)]) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.one_of(st.lists(st.sampled_from(WORDS), max_size=80).map(''.join),
                 st.text(st.characters(exclude_categories=['Cs']), max_size=60)),
       st.integers(1, 12), st.integers(1, 30), st.integers(1, 3))
def test_a_document_in_parts_has_the_ids_of_the_whole(
    text: str, size: int, chunk: int, threads: int
) -> None:
    chunks = [text[i:i + chunk] for i in range(0, len(text), chunk)]
    made = [Part('train', part, n == 0) for n, part in enumerate(split_text(chunks, size))]
    assert ''.join(part.text for part in made) == text
    for tokenizer in TOKENIZERS:
        ids = tokenizer.encode_parts(made, threads)
        assert np.concatenate([[], *ids]).tolist() == tokenizer.encode(text), tokenizer.name


def test_decoding_gives_the_text_back_and_tokens_spell_its_bytes() -> None:
    for tokenizer in TOKENIZERS:
        for text in ('naïve 世界 👍', 'a\n b\n\n  c', '<|endoftext|> <s>'):
            ids = [tokenizer.bos, *tokenizer.encode(text)]
            assert tokenizer.decode(ids) == text and tokenizer.bos not in ids[1:]
            space = tokenizer.name == 'llama'  # which SentencePiece puts in front
            assert tokenizer.token_bytes()[ids].sum() == len(text.encode()) + space


@pytest.mark.parametrize('name', ['byte', 'gpt2', pytest.param('llama', marks=needs_llama)])
def test_text_as_it_comes_is_the_whole_text(name: str, capfd: pytest.CaptureFixture) -> None:
    tokenizer = {'byte': ByteTokenizer, 'gpt2': small_gpt2,
                 'llama': lambda: SentencePieceTokenizer(LLAMA)}[name]()
    for text in [*NASTY[:-10], ' '.join(documents(5, seed=2))]:
        ids = [tokenizer.bos, *tokenizer.encode(text)]
        take = stream_text(tokenizer, ids[:2], len(ids) + 1)
        parts = []
        for token in [*ids[2:], 240]:  # at the end, for bytes, the beginning of a character
            take(token)
            parts.append(capfd.readouterr().out)
        assert ''.join(parts) == tokenizer.decode([*ids, 240]) or len(ids) < 2
        assert not any('\ufffd' in part for part in parts[:-1])

"""Tokenizers: the ids of texts, whole or in blocks, training, and text files. Tests that need
Llama's tokenizer.model look for it at $LLAMA_TOKENIZER or ../shared/data/llama_tokenizer.model and
are skipped without it."""
import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocem import documents as reading
from nanocem.documents import TextFile
from nanocem.tokenizers import (
    ByteTokenizer,
    Gpt2Tokenizer,
    SentencePieceTokenizer,
    find_llama,
    train_bpe,
)
from running import ROOT

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
PAGES = [page.read_text(encoding='utf-8') for page in sorted(ROOT.glob('docs/*.md'))]


def documents(n: int, seed: int, characters: int = 400) -> list[str]:
    """Texts of random words, some with line ends and other scripts."""
    rng = random.Random(seed)
    words = ['the', 'of', 'energy', 'é', '世界', 'x=1', '👍', '\n', '\n\n', ' ', 'a' * 30,
             'minimization', 'Hopfield,', '\t']
    return [' '.join(rng.choices(words, k=rng.randrange(1, characters // 2))) + f' {i}'
            for i in range(n)]


def small_gpt2() -> Gpt2Tokenizer:
    """Return tiktoken's gpt2 with a vocabulary that needs no network: all bytes, all strings of
    2 to 8 bytes in a text, and numbers for the rest."""
    import tiktoken
    text = ' '.join(documents(5, seed=0)).encode()
    found = {text[i:i + n] for i in range(len(text) - 8) for n in range(2, 9)}
    words = [bytes([i]) for i in range(256)] + sorted(found, key=lambda part: (len(part), part))
    words += [n.to_bytes(12, 'big') for n in range(50_256 - len(words))]
    pattern = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s")
    bpe = tiktoken.Encoding('gpt2', pat_str=pattern, special_tokens={'<|endoftext|>': 50_256},
                            mergeable_ranks={word: i for i, word in enumerate(words)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken, 'get_encoding', lambda name: bpe)
        return Gpt2Tokenizer()


def training_texts() -> list[str]:
    return [*PAGES, *documents(30, seed=1), *NASTY, ' <s>marks</s> <0x0A> <unk>' * 500]


@pytest.fixture(scope='module')
def bpe(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path = str(tmp_path_factory.mktemp('bpe') / 'tokenizer.model')
    train_bpe(path, 1000, training_texts())
    return SentencePieceTokenizer(path)


@pytest.fixture(scope='module')
def tokenizers(bpe: SentencePieceTokenizer) -> list[Any]:
    llama = [SentencePieceTokenizer(LLAMA)] if os.path.isfile(LLAMA) else []
    return [ByteTokenizer(), small_gpt2(), bpe, *llama]


@needs_llama
def test_llama_ids_are_those_of_2023() -> None:
    """The digest is of ids from transformers 4."""
    llama = SentencePieceTokenizer(LLAMA)
    texts = [*NASTY, *documents(50, seed=1), 'ab' * 100_000, 'a ' * 100_000]
    ids = repr([llama.encode(text) for text in texts]).encode()
    assert hashlib.sha256(ids).hexdigest() == (
        '47c1058d909ac141ed04d49aeda29f6867d296e4ff5479f8c783af71933f27c7')
    # The one difference is on purpose: <s> in a text is not BOS.
    text = 'a <s>struck out</s> word <unk>'
    assert not {0, 1, 2} & set(llama.encode(text))
    assert llama.decode([1, *llama.encode(text)]) == text


PHRASES = st.lists(st.sampled_from(WORDS), max_size=8).map(''.join)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(PHRASES, max_size=30).map('word '.join), st.integers(64, 200))
def test_a_text_in_blocks_has_the_ids_of_the_whole(
    tokenizers: list[Any], bpe: SentencePieceTokenizer, text: str, size: int
) -> None:
    path = Path(bpe.path).with_name('text.txt')
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, 'BLOCK', size)
        blocks = [*TextFile(str(path))]
    assert ''.join(blocks) == text and all(len(block) < 2 * size for block in blocks)
    for tokenizer in tokenizers:
        ids = [i for n, block in enumerate(blocks) for i in tokenizer.encode(block, n == 0)]
        assert ids == tokenizer.encode(text), tokenizer.name


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(NASTY) | st.lists(PHRASES).map(''.join) | st.text(max_size=60))
def test_a_trained_tokenizer_spells_every_text(bpe: SentencePieceTokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text and bpe.bos not in ids
    assert bpe.token_bytes()[ids].sum() == len(text.encode())


def test_decoding_gives_the_text_back_and_tokens_spell_its_bytes(tokenizers: list[Any]) -> None:
    for tokenizer in tokenizers:
        for text in ('naïve 世界 👍', 'a\n b\n\n  c', '<|endoftext|> <s> <0x0A>'):
            ids = [tokenizer.bos, *tokenizer.encode(text)]
            assert tokenizer.decode(ids) == text and tokenizer.bos not in ids[1:]
            assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_the_same_texts_train_the_same_file(tmp_path: Path) -> None:
    """Data that others prepared from the same text has the same tokenizer."""
    path = str(tmp_path / 'a.model')
    train_bpe(path, 350, documents(300, seed=1))
    tokenizer = SentencePieceTokenizer(path)
    assert tokenizer.sha256 == (
        '759bc30bf27a2a88a987b03be44e297560c3128602a41723eb123e77696589e2')
    pieces = [tokenizer.model.id_to_piece(i) for i in range(350) if not tokenizer.model.is_byte(i)]
    assert not any('\n' in piece for piece in pieces) and '▁the' in pieces


@pytest.mark.parametrize('options, bos', [
    (dict(model_type='unigram'), 1), (dict(bos_id=-1), 2), (dict(bos_id=-1, eos_id=-1), 0)])
def test_any_sentencepiece_model(tmp_path: Path, options: dict[str, Any], bos: int) -> None:
    from sentencepiece import SentencePieceTrainer
    path = tmp_path / 'own.model'
    SentencePieceTrainer.train(
        sentence_iterator=iter('\n'.join(PAGES).split('\n')), model_prefix=path.with_suffix(''),
        minloglevel=2, **{'model_type': 'bpe', 'vocab_size': 500, **options})
    tokenizer = SentencePieceTokenizer(str(path))
    assert (tokenizer.name, tokenizer.bos) == ('sentencepiece', bos)
    text = 'the data of a model'
    ids = [bos, *tokenizer.encode(text)]
    assert tokenizer.decode(ids).strip(' \u2047') == text
    # The model puts a space before a text, which is not the text's
    assert tokenizer.token_bytes()[ids].sum() == len(text)


@pytest.mark.parametrize('text', ['', ' ', 'a b' + 'x' * 3000, '\u2581 \u2581'])
def test_rare_spaces_are_kept(tmp_path: Path, text: str) -> None:
    """A trained tokenizer has a piece for spaces, however few its text has."""
    letters = [chr(0x4e00 + 2 * i) for i in range(40)]
    rng = random.Random(1)
    chinese = ''.join(rng.choices(letters, k=9000))
    train_bpe(str(tmp_path / 'a.model'), 512, [chinese[:5000] + text, chinese[5000:]])
    tokenizer = SentencePieceTokenizer(str(tmp_path / 'a.model'))
    for new in (chinese + text, 'a b  c ', 'a\u2581b \u2581', ' \n '):
        ids = tokenizer.encode(new)
        assert tokenizer.decode(ids) == new
        assert tokenizer.token_bytes()[ids].sum() == len(new.encode())


@needs_llama
def test_llamas_model_in_a_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('LLAMA_TOKENIZER', '')
    for content, found in ((b'another model', False), (Path(LLAMA).read_bytes(), True)):
        (tmp_path / 'tokenizer.model').write_bytes(content)
        assert bool(find_llama(str(tmp_path))) == found



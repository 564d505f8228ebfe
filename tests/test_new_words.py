"""docs/new_words.py: how well models copy a word that they have read once."""
import re
import sys

import pytest
import torch

from model import ModelConfig, Transformer
from nanocem.page import guesses
from nanocem.tokenizers import ByteTokenizer
from running import ROOT

sys.path.insert(0, str(ROOT / 'docs'))
import new_words

PAGE = (ROOT / 'pretrained/README.md').read_text('utf-8')


@pytest.mark.parametrize('name', ['cem_one_tie', 'llama_three', 'cem_plain_copies', 'llama_alibi'])
def test_the_table_is_what_the_command_prints(name: str, capsys: pytest.CaptureFixture) -> None:
    new_words.main([str(ROOT / 'pretrained' / name)])
    header, _, row = capsys.readouterr().out.splitlines()
    for line in header, row:
        assert re.sub(r' +', ' ', line) in PAGE


def test_each_word_stands_twice_in_each_of_24_sentences() -> None:
    assert len(set(new_words.INVENTED)) == 12 and len(new_words.SENTENCES) == 2
    for sentence in new_words.SENTENCES:
        assert sentence.count('{word}') == sentence.count('{other}') == 2
    assert new_words.SENTENCES[0].format(word='Zorblax', other='Quimby') == new_words.COPYING


def test_guesses_are_those_of_a_model_that_reads_piece_by_piece() -> None:
    """With bytes as pieces: all letters of the second word but its first."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(size='nano', vocab_size=257, context_length=64))
    tokenizer = ByteTokenizer()
    found = guesses(model, tokenizer, 'Ab, cd. Xyz is Xyz, no', 'Xyz')
    assert [guess.piece for guess in found] == ['y', 'z']
    for read, guess in zip(('Ab, cd. Xyz is X', 'Ab, cd. Xyz is Xy'), found, strict=True):
        ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(read)]])
        with torch.no_grad():
            p = model(ids)[0][0, -1].softmax(-1)
        assert p[ord(guess.piece)].item() == pytest.approx(guess.p, rel=1e-4)
        assert (p.argmax().item() == ord(guess.piece)) == guess.is_first


def test_a_folder_without_a_model_gets_one_line(tmp_path: object) -> None:
    with pytest.raises(SystemExit, match=f'{tmp_path}'):
        new_words.main([str(tmp_path)])

"""Text from a model: what BOS, which spells nothing, does to it."""
import pytest
import torch

from model import ModelConfig, Transformer
from nanocem.sampling import sample_text
from nanocem.tokenizers import ByteTokenizer

MODEL = Transformer(ModelConfig(size='nano', vocab_size=257, context_length=16))


@pytest.mark.parametrize(('written', 'stops', 'goes_on'), [
    (b'The end.|Once|', ['>The end.'], ['>The end.', 'Once', '']), (b'Once', ['>Once'], ['>Once']),
    (b'|The end.', ['>'], ['>', 'The end.'])])
def test_a_text_stops_where_the_next_document_begins(
    written: bytes, stops: list[str], goes_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the border is shown. Here | stands for BOS."""
    ids = torch.tensor([256 if byte == ord('|') else byte for byte in written])
    monkeypatch.setattr(MODEL, 'generate', lambda idx, *options: torch.cat(
        [idx, ids.expand(len(idx), -1)], dim=1))
    options = (MODEL, ByteTokenizer(), '>', 9, 0.8, None, 1)
    assert sample_text(*options).split('\n---\n') == stops
    assert sample_text(*options, n=2, go_on=True).split('\n---\n') == goes_on * 2
    # A tokenizer without BOS, whose unknown token takes its place, may have it in a prompt, too
    unknown = ByteTokenizer()
    unknown.bos = ord('x')
    assert sample_text(MODEL, unknown, 'axb', 9, 0.8, None, 1).startswith('xaxb')

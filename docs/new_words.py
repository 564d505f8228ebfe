"""
Does a model copy a word that it has read once? Twelve invented words, which the training text does
not have, stand twice in each of two sentences. The second time the model knows the first piece of
the word, and has to guess the others.

    python docs/new_words.py              the models of pretrained/
    python docs/new_words.py out/RUN      models of yours

A row has the probabilities of the pieces in the sentence with which docs/play.html begins. For each
of the 24 sentences take the mean probability (geometric) of a piece after the first: the last two
columns are the median and the largest of these.
"""
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # model.py is in the folder above

import torch

from configurator import command_line
from model import Transformer
from nanocem.files import markdown_table
from nanocem.page import COPYING
from nanocem.runs import load_model
from nanocem.tokenizers import tokenizer_of

SHIPPED = Path(__file__).parents[1] / 'pretrained'
WORDS = ('Zorblax', 'Quimby', 'Fendril', 'Morvath', 'Drumbolt', 'Skelnar', 'Wobrick', 'Tarquel',
         'Nimbrosk', 'Gravenol', 'Brizzock', 'Jalpent')
SENTENCES = (
    COPYING.replace('Zorblax', '{word}').replace('Quimby', '{other}'),
    'Options of {word} are read from a file, and those of {other} from the command line. To start '
    '{word}, type the name of {other}')


@torch.no_grad()
def guesses(model: Transformer, tokenizer: object, sentence: str, word: str) -> dict[str, float]:
    """Return the pieces of the last `word` in a sentence, and the probability of each, given all
    before it. The first piece with a letter, and a space before it, are left out."""
    before = sentence[:sentence.rindex(word)].rstrip(' ')
    begin = len(tokenizer.encode(before))
    end = len(tokenizer.encode(f'{before} {word}'))
    ids = tokenizer.encode(sentence)
    while not tokenizer.decode(ids[begin:begin + 1]).strip():
        begin += 1
    logits = model(torch.tensor([[tokenizer.bos, *ids]]))[0][0]
    # The logits at BOS are those of the first id
    return {f'{at}: {tokenizer.decode(ids[at:at + 1])}': logits[at].softmax(dim=-1)[ids[at]].item()
            for at in range(begin + 1, end)}


def percent(p: float) -> str:
    """Two digits of a probability, as docs/play.html shows them."""
    return f'{100 * p:.0f}%' if p >= 0.0995 else f'{100 * p:.1f}%'


@command_line
def main(paths: list[str]) -> None:
    shipped = sorted(str(path) for path in SHIPPED.iterdir() if path.is_dir())
    rows = []
    for path in paths or shipped:
        model, state = load_model(path)
        tokenizer = tokenizer_of(state)
        first = guesses(model, tokenizer, COPYING, 'Zorblax')
        means = []
        for word, other in zip(WORDS, WORDS[1:] + WORDS[:1], strict=True):
            for sentence in SENTENCES:
                found = guesses(model, tokenizer, sentence.format(word=word, other=other), word)
                means.append(math.exp(sum(map(math.log, found.values())) / len(found)))
        rows.append([Path(path).name, *map(percent, first.values()),
                     percent(statistics.median(means)), percent(max(means))])
    pieces = [name.partition(': ')[2] for name in first]
    print(markdown_table(['model', *pieces, '24 sentences: median', 'largest'], rows))


if __name__ == '__main__':
    print(__doc__) if {'-h', '--help'} & {*sys.argv} else main(sys.argv[1:])

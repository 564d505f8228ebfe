"""
Does a model copy a word that it has read once? Twelve invented words, which the training text does
not have, stand twice in each of two sentences. The second time the model knows the first piece of
the word, and has to guess the others.

    python docs/new_words.py              the models of pretrained/
    python docs/new_words.py out/RUN      models of yours

A row begins with the probabilities of the pieces of Zorblax in COPYING. Each of the 24 sentences
has a mean probability (geometric) of a piece after the first: the last two columns are the median
and the largest of these.
"""
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # model.py is in the folder above

from configurator import command_line
from nanocem.files import markdown_table
from nanocem.page import WORDS, guesses
from nanocem.runs import load_model
from nanocem.tokenizers import tokenizer_of

SHIPPED = Path(__file__).parents[1] / 'pretrained'
INVENTED = WORDS[:12]
# No model has read its two names
COPYING = ('The Zorblax function returns a tuple. The Quimby module reads a file. If the Zorblax '
           'function fails, call the Quimby')
SENTENCES = (
    COPYING.replace('Zorblax', '{word}').replace('Quimby', '{other}'),
    'Options of {word} are read from a file, and those of {other} from the command line. To start '
    '{word}, type the name of {other}')


def percent(p: float) -> str:
    """Two digits of a probability, as a page shows them."""
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
        for word, other in zip(INVENTED, INVENTED[1:] + INVENTED[:1], strict=True):
            for sentence in SENTENCES:
                found = guesses(model, tokenizer, sentence.format(word=word, other=other), word)
                means.append(math.exp(sum(math.log(guess.p) for guess in found) / len(found)))
        rows.append([Path(path).name, *(percent(guess.p) for guess in first),
                     percent(statistics.median(means)), percent(max(means))])
    pieces = [guess.piece for guess in first]
    print(markdown_table(['model', *pieces, '24 sentences: median', 'largest'], rows))


if __name__ == '__main__':
    print(__doc__) if {'-h', '--help'} & {*sys.argv} else main(sys.argv[1:])

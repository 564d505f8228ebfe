"""
Turn SlimPajama, or any text, into token shards that train.py reads.

    python prepare_slimpajama.py                      its first 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --input=FOLDER       your texts and rows, of any suffix
    zcat book.txt.gz | python prepare_slimpajama.py --input=- --out_dir=data/book
    python prepare_slimpajama.py --input=book.txt --tokenizer=bpe2048
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT

A BOS token begins each document; they are concatenated in train_00000.bin, ..., val.bin and
test.bin (little-endian unsigned integers). meta.json describes them, and is written last. The names
of files decide what is train, val and test, or else a hash of each document: of a text, or of a row
of JSON, .csv or Parquet. Of fewer than twenty documents val and test get parts from several places
of each. What is printed says what was read, what was left out, and which of these was done.
"""
import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import command_line, read_options
from nanocem.documents import Reading
from nanocem.prepare import PrepareConfig, prepare
from nanocem.process import process_of_a_run
from nanocem.sources import keep_piped


@command_line
@process_of_a_run()
def main(argv: list[str]) -> None:
    given = read_options(argv, PrepareConfig)
    if given.get('input'):
        given['input'] = keep_piped(given['input'], Reading.of(SimpleNamespace(**given)))
    prepare(PrepareConfig(**given))


if __name__ == '__main__':
    main(sys.argv[1:])

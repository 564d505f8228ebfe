"""
Turn SlimPajama, or any text, into token shards that train.py reads.

    python prepare_slimpajama.py                      its first 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --input=FOLDER       your JSON, CSV or Parquet, else .txt and .md
    zcat book.txt.gz | python prepare_slimpajama.py --input=- --out_dir=data/book
    python prepare_slimpajama.py --input=book.txt --tokenizer=bpe2048
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT

A BOS token begins each document; they are concatenated in train_00000.bin, ..., val.bin and
test.bin (little-endian unsigned integers). meta.json describes them, and is written last. What is
printed says what was read, what was left out, and how it was divided (docs/data.md).
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import command_line, read_options
from nanocem.documents import keep_piped
from nanocem.prepare import PrepareConfig, prepare
from nanocem.process import keep_console_and_signals


@command_line
@keep_console_and_signals()
def main(argv: list[str]) -> None:
    given = read_options(argv, PrepareConfig)
    if given.get('input'):
        given['input'] = keep_piped(given['input'])
    prepare(PrepareConfig(**given))


if __name__ == '__main__':
    main(sys.argv[1:])

"""
Turn SlimPajama, or any text, into token shards that train.py reads.

    python prepare_slimpajama.py                      its first 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    zcat book.txt.gz | python prepare_slimpajama.py --input=- --out_dir=data/book
    python prepare_slimpajama.py --input=book.txt --tokenizer=bpe2048
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT

A BOS token begins each document; they are concatenated in train_00000.bin, ..., val.bin and
test.bin (little-endian unsigned integers). meta.json describes them, and is written last. The names
of files decide what is train, val and test, or else a hash of each document: of a row of a .parquet
or .jsonl file, or of a .txt file where there are twenty or more. Of fewer .txt files the end is
test, and an equal part before it is val. The last lines printed say which of these was done.
"""
import sys

from configurator import command_line, read_options
from nanocem.documents import keep_piped
from nanocem.prepare import PrepareConfig, prepare
from nanocem.process import process_of_a_run


@command_line
@process_of_a_run()
def main(argv: list[str]) -> None:
    given = read_options(argv, PrepareConfig)
    if given.get('input'):
        given['input'] = keep_piped(given['input'])
    prepare(PrepareConfig(**given))


if __name__ == '__main__':
    main(sys.argv[1:])

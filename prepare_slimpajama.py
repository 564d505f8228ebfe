"""
Turn SlimPajama, or any text, into token shards that train.py reads.

    python prepare_slimpajama.py                      its first 3.3 B tokens, from the Hub
    python prepare_slimpajama.py --input=FOLDER       your .parquet, .jsonl (.zst, .gz), .txt files
    python prepare_slimpajama.py --input=book.txt --tokenizer=bpe2048
    python prepare_slimpajama.py --input=hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT

A BOS token begins each document; they are concatenated in train_00000.bin, ..., val.bin and
test.bin (little-endian unsigned integers). meta.json describes them. A row of a .parquet or .jsonl
file is a document, and a hash of its text sends it to train, val or test. The end of a .txt file is
test, and an equal part before it is val. The folder appears when it is complete.
"""
import sys

from configurator import command_line, read_options
from nanocem.prepare import PrepareConfig, prepare
from nanocem.process import process_of_a_run


@command_line
@process_of_a_run()
def main(argv: list[str]) -> None:
    prepare(PrepareConfig(**read_options(argv, PrepareConfig)))


if __name__ == '__main__':
    main(sys.argv[1:])

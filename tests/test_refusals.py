"""What is wrong is one line that says what would be right, and exit code 1: a table of them."""
import importlib
import os
import re
import sys
from pathlib import Path

import pytest
from running import TINY, edit_meta, write_data

REFUSED = """
model               --size=7b                              size=7b: expected one of nano
model               --d_model=0                            d_model=0: expected 1 to
model               --d_model=65                           multiple of n_head
model               --exact_update --kq_diag=none          need the diagonal
model               --attn=llama --kq_diag=shared          set attn=cem
model               --mlp=llama --mlp_match=params         set mlp=cem
model               --attn=llama --mlp=llama --residual=normed   set attn=cem or mlp=cem
model               --d_model=12 --n_head=4 --positions=rope     is odd
model               --init_std=nan                         init_std=nan: expected a number
train               --atn_steps=2                          no such option; near: attn_steps
train               --size                                 --size=VALUE, no space
train               --attn_steps=2.5                       attn_steps=2.5: expected a whole number
train               --tensorboard=maybe                    True or False
train               config/none.py                         config file config/none.py: No such file
train               code.py                                code.py:1: only lines of the form
train               --batch_size=3 --micro_batch_size=2    right would be micro_batch_size=1
train               --device=cuda                          finds 0 GPUs
train               --data=none                            none/meta.json is missing
train               --data=short                           no shard of the val split
train               --data=cut                             test.bin has 4000 bytes
train               --data=old                             is damaged, or of another version
train               --text=a.txt --data=data               give one
train               --init_from=resume --out_dir=none      no run in none
train               --init_from=none                       no checkpoint in none
train               --tokens=1K --tokens_per_param=3       two budgets: give one
sample              --temperature=-1                       temperature=-1.0: expected 0, or 0.001 to
sample              --out_dir=none                         no checkpoint in none
evaluate            --steps=1,0                            steps=1,0: expected 1 to 1,000
evaluate            --compare data                         data: no run
evaluate            --text=a.txt --data=data               give one
bench               --what=speed                           what=speed: expected
bench               --device=cuda                          no GPU
bench               --what=gpu,train                       give it alone
reproduce           --scale=huge                           scale=huge: expected one of english
prepare_slimpajama  --input=none                           no such file or folder
prepare_slimpajama  --input=data                           holds no .parquet, .jsonl
prepare_slimpajama  --input=a.txt --tokenizer=bert         none of llama, gpt2, byte
prepare_slimpajama  --input=a.txt --tokenizer=a.txt        not a SentencePiece model
prepare_slimpajama  --input=a.txt --tokenizer=byte         too little text for
prepare_slimpajama  --input=latin1.txt --tokenizer=byte    latin1.txt: not UTF-8
prepare_slimpajama  --input=bad.jsonl --tokenizer=byte     line 2 is no JSON with "text"
prepare_slimpajama  --input=bad.parquet --tokenizer=byte   --skip_bad leaves it out
prepare_slimpajama  --input=a.txt --tokenizer=bpe100       expected bpe512 to bpe65536
prepare_slimpajama  --input=a.txt --tokenizer=bpe512 --held_out=0   at most bpe
prepare_slimpajama  --input=a.txt --out_dir=               out_dir= is empty
prepare_slimpajama  --held_out=0.7                         held_out=0.7: expected 0 to 0.49
synthetic_gp        --kernels=rbf,linear                   kernels=rbf,linear: expected
synthetic_gp        --models=CEM-T0                        models=CEM-T0: expected Plain
synthetic_gp        --batch_size=7000                      batch_size=7000: expected 1 to 4,000
synthetic_gp        --repeats=1                            repeats=1: expected 2 to
synthetic_gp        --out_dir=/dev/null/x                  Not a directory
"""
CASES = [re.split(r'  +', line) for line in REFUSED.strip().splitlines()]


@pytest.fixture(scope='module')
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('refusals')
    for name, text in (('a.txt', 'w'), ('code.py', 'import os'), ('latin1.txt', 'é'),
                       ('bad.jsonl', '{"text": "a"}\n{"t'), ('bad.parquet', 'PAR1')):
        (path / name).write_bytes(text.encode('latin1'))
    short, old, cut = (write_data(path / name) for name in ('short', 'old', 'cut'))
    write_data(path / 'data')
    os.truncate(cut / 'test.bin', 4000)
    edit_meta(old, format=99)
    edit_meta(short, splits={**edit_meta(short), 'val': {}})
    return path


@pytest.mark.parametrize('case', CASES, ids=' '.join)
def test_refused_in_one_line(case: list[str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, argv, words = case
    before = {path for path in here.rglob('*') if '.lock' not in path.name}
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, 'argv', [f'{script}.py'])
    options = [*TINY, '--data=data', *argv.split()] if script in ('model', 'train') else argv.split()
    if 'resume' in argv or 'text' in argv:
        options = argv.split()
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(script.replace('model', 'train')).main(options)
    assert words in stop.value.code and '\n' not in stop.value.code, stop.value.code
    assert {path for path in here.rglob('*') if '.lock' not in path.name} == before | {here / 'data'}

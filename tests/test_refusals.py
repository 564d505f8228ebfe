"""What is wrong is one line that says what would be right, and exit code 1: a table of them."""
import importlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from running import ROOT, TINY, edit_meta, override, steps, write_data

REFUSED = """
model               --size=7b                              size=7b: expected one of nano
model               --d_model=0                            d_model=0: expected a whole
model               --d_model=65                           multiple of n_head
model               --n_head=4 --n_kv_head=3               n_head=4 is not a multiple of n_kv_head=3
model               --exact_update --kq_diag=none          needs a diagonal whose gradient
model               --kq_diag=scaled --preconditioner=diag    sums over heads before P_k
model               --attn=llama --kq_diag=shared --attn_steps=1          kq_diag=none or scaled
model               --attn=llama --attn_steps=1 --kq_diag=shared   or else kq_diag=none
model               config/llama.py --attn_steps=1 --mlp_steps=1 --residual=normed   for attn=cem or
model               config/cem_t2.py config/llama.py   for attn=cem: set that, or else attn_steps=1
model             --preconditioner=diag --mlp_rank=3  preconditioner=diag_lowrank: set that, or else
model               --d_model=12 --n_head=4 --positions=rope     is odd
train               --atn_steps=2                          no such option; near: attn_steps
train               --size                                 --size=VALUE, no space
train               --out_dir=                             --out_dir=: expected a name or path
train               config/none.py                         no config file config/none.py
train               code.py                                code.py:1: only lines of the form
train               a.txt --size=nano                      a.txt is not a config file
train               latin1.txt                             other files and folders: --data, --text
bench               a.txt                                  other files and folders: none
train               wrong.py                               attn_steps=[1]: expected a whole number
train               --device=cuda                          finds no GPU of this kind
train               --data=none                            python train.py config/mini.py needs
train               --data=short                           no shard of the val split
train               --data=old                             of another version
train               --text=nothing.txt                     nothing.txt: no such file or folder
train               --text=a.txt --data=data               text and data exclude each other
train               --text=packed.txt.gz                   packed.txt.gz: Truncated
train               --tokens=1e1000000000                  tokens=1e1000000000: expected a whole
train               --tokenizer=byte                       tokenizer is for --text=FILE
train               --init_from=resume                     no run in out/: python train.py config/
train               --init_from=resume --out_dir=none      no run in none
train               --init_from=none                       no checkpoint in none
train               --init_from=llama --attn=cem           attn=llama (now cem)
train               --init_from=llama config/cem_t2.py     preconditioner=none (now diag_lowrank)
train               --init_from=llama --tie=kv             tie=none (now kv)
train               --init_from=llama --n_kv_head=1        n_kv_head=7 (now 1)
train               --out_dir=data                         data holds a run already
sample              --out_dir=llama --attn_steps=2         a Llama sublayer takes no steps
sample              --prompt=a --prompt_file=a.txt         prompt and prompt_file exclude each other
sample              --seed=18446744073709551616            seed=18446744073709551616: expected 0 to
sample              --out_dir=llama --prompt_file=latin1.txt   latin1.txt: not UTF-8
evaluate            --out_dir=llama --data=none            none, the data to evaluate on, is not
evaluate            --out_dir=llama --data=gpt2            its tokenizer is gpt2, that of the run
evaluate            --out_dir=llama --text=empty.txt       empty.txt is empty
evaluate            --out_dir=llama --steps=2              llama is all Llama
evaluate            --out_dir=llama --steps=2,0 --energies   steps=(2, 0): expected 1, 2, 3
evaluate            --out_dir=llama --text=a.txt --tokens=5        a text is read whole
evaluate            --compare=llama,gone                  no run in gone
sample              llama                                  other files and folders: --out_dir
evaluate            --out_dir=llama --separator=x          separator is for --text=FILE
evaluate            --out_dir=llama --text=a.txt --split=val       a text is read whole
evaluate            --compare=llama --energies --tokens=5          --text, not energies, tokens
evaluate            --compare=llama,                       a comma-separated list, each a name
evaluate            --compare llama,half                   --compare=VALUE, no space
evaluate            --out_dir=weights.pt                   weights.pt is not a checkpoint of train
evaluate            --out_dir=whole.pt                     whole.pt is not a checkpoint of train.py
evaluate            --out_dir=half                         half/model.safetensors is damaged, or not
evaluate            --out_dir=edited                       edited/config.json is damaged (
evaluate            --tokens=5                             no run in out/: python train.py config/
export              --out_dir=llama --dtype=bfloat16       expected a new folder: --to=DIR
export              --out_dir=llama --to=half              to=half is not empty: give a new folder
export              --to=x                                 no run in out/: python train.py config/
bench               --device=cuda                          finds no GPU
reproduce           --figure=3d                            figure=3d: expected one of 2a
reproduce           --figure=3a --size=85m                 size=85m: expected one of XS
reproduce           --size=XS                              size=XS is for --figure
prepare_slimpajama  --input=none                           no such file or folder
prepare_slimpajama  --input=data                           nothing to read: hidden files
prepare_slimpajama  --input=a.txt --tokenizer=bert         none of llama, gpt2, byte
prepare_slimpajama  --input=a.txt --tokenizer=a.txt        a.txt is not a SentencePiece model
prepare_slimpajama  --input=a.txt --tokenizer=byte         too little text for
prepare_slimpajama  --input=a.txt --tokens=0               tokens=0: expected 1 to
prepare_slimpajama  --input=a.txt --held_out=0.5           held_out=0.5: expected 0 to 0.49
prepare_slimpajama  --input=a.txt --tokenizer=bpe100 --held_out=0   does not suit this text
prepare_slimpajama  --input=a.txt --tokenizer=bpe512 --held_out=0   expected more text
synthetic_gp        --kernels=rbf,linear                   kernels=rbf,linear: expected
synthetic_gp        --learning_rate=-1                     learning_rate=-1.0: expected 0 to
synthetic_gp        --batch_size=7000                      fewer than batch_size=7000
"""
CASES = [re.split(r'  +', line) for line in REFUSED.strip().splitlines()]


@pytest.fixture(scope='module')
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('refusals')
    for name, text in (('a.txt', 'w 1'), ('empty.txt', ''), ('code.py', 'import os'),
                       ('latin1.txt', 'é'), ('packed.txt.gz', '\x1f\x8b'),
                       ('wrong.py', 'attn_steps = [1]')):
        (path / name).write_bytes(text.encode('latin1'))
    short, old = (write_data(path / name) for name in ('short', 'old'))
    write_data(path / 'data')
    (path / 'data/config.json').write_text('{"of": "another program"}')
    edit_meta(write_data(path / 'gpt2'), tokenizer='gpt2')
    for name in ('llama', 'half', 'edited'):
        shutil.copytree(ROOT / 'pretrained/llama_alibi', path / name)
    os.truncate(path / 'half/model.safetensors', 10_000)
    (path / 'edited/config.json').write_text('{"model_type": "nanocem",}')
    torch.save({'embedding': torch.zeros(1)}, path / 'weights.pt')
    torch.save(torch.nn.Linear(1, 1), path / 'whole.pt')
    edit_meta(old, format=99)
    edit_meta(short, splits={**edit_meta(short), 'val': {'shards': []}})
    return path


@pytest.mark.parametrize('case', CASES, ids=' '.join)
def test_refused_in_one_line(case: list[str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, argv, words = case
    before = {path for path in here.rglob('*') if '.lock' not in path.name}
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, 'argv', [f'{script}.py'])
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    tiny = [*TINY, steps(1)] if script in ('model', 'train') else []
    if tiny and not re.search('--(text|data)=', argv):
        tiny.append('--data=data')
    options = override([word for word in tiny if 'resume' not in argv], *argv.split())
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(script.replace('model', 'train')).main(options)
    assert words in stop.value.code and '\n' not in stop.value.code, stop.value.code
    after = {path for path in here.rglob('*') if '.lock' not in path.name}
    assert after == before

"""
The candidates of candidates.py, trained and compared: the runs of this folder's page.

    python results/layer/measure.py          train what runs.csv lacks, then print the table
    python results/layer/measure.py --table  only print it

From the project's root. Twelve layers, 64 wide, 1.5 M bytes, as in results/muon; two runs at a
time, one thread each; what is finished in out/layer is not done again.
"""
import csv
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

HERE = os.path.dirname(os.path.relpath(__file__))
COMMON = ('--size=mini --n_layer=12 --context_length=64 --data=data/builtin --tokens=1.5M '
          '--batch_size=32 --micro_batch_size=32 --eval_interval=1000000 --eval_tokens=300000 '
          '--test_tokens=300000 --checkpoint_interval=100 --keep_checkpoints=1 --dtype=float32 '
          '--compile=False --tensorboard=False --sample_tokens=0 --optimizer=muon '
          '--learning_rate=8e-3')
ONE, TWO = '--attn_steps=1 --mlp_steps=1', '--attn_steps=2 --mlp_steps=2'
LLAMA = f'--attn=llama --mlp=llama --positions=alibi {ONE}'


class Run(NamedTuple):
    label: str
    names: str  # of candidates.py
    options: str
    seed: int = 1

    @property
    def folder(self) -> str:
        return f'out/layer/{re.sub("[^a-zA-Z0-9]+", "_", self.label)}-{self.seed}'


PLAIN = '--preconditioner=none --kq_diag=none'  # as many weights as Llama's, where it has both
RUNS = [
    Run('all-CEM', 'cem', ONE),
    Run('Llama, ALiBi', 'cem', LLAMA),
    Run('anchored', 'anchored', ONE),
    Run('wide', 'wide', ONE),
    Run('prior, mlp_prior, T = 2', 'prior+mlp_prior', f'{TWO} {PLAIN}'),
    Run('anchored, mlp_prior', 'anchored+mlp_prior', f'{ONE} {PLAIN}'),
    Run('P of rank 16 in attention', 'cem', f'{ONE} --attn_rank=16'),
    Run('MLP of Llama\'s weights', 'cem', f'{ONE} --mlp_match=params'),
    Run('offset, mlp_prior', 'offset+mlp_prior', f'{ONE} {PLAIN}'),
    Run('prior, mlp_prior, sharpness, T = 2', 'prior+mlp_prior+sharpness', f'{TWO} {PLAIN}'),
    Run('Llama, ALiBi, MLP of 96', 'cem', f'{LLAMA} --d_mlp=96'),  # as many weights as all-CEM
    Run('gate', 'gate', ONE),
    Run('shift', 'shift', ONE),
    Run('Llama, ALiBi, shift', 'shift', LLAMA),
    Run('x0', 'x0', ONE),
    Run('wide, shift, MLP of 220', 'wide+shift', f'{ONE} --d_mlp=220'),  # Llama's weights
    Run('relu2', 'relu2', ONE),
    Run('Llama, ALiBi, x0', 'x0', LLAMA),
]
Found = dict[tuple[str, int], tuple[int, float, float]]  # parameters, validation loss, perplexity


def train(run: Run) -> None:
    """One run, or what is left of it. One that fails says why in the folder's .txt."""
    command = (f'{sys.executable} results/layer/candidates.py {run.names} {run.options} {COMMON} '
               f'--seed={run.seed} --out_dir={run.folder}')
    if os.path.exists(f'{run.folder}/config.json'):
        command += ' --init_from=resume'
    os.makedirs('out/layer', exist_ok=True)
    with open(f'{run.folder}.txt', 'w', encoding='utf-8') as file:
        subprocess.run(command.split(), env={**os.environ, 'OMP_NUM_THREADS': '1'}, stdout=file,
                       stderr=file, check=False)


def collect() -> Found:
    """The runs of runs.csv, and those in out/layer, which are added to it."""
    found: Found = {}
    if os.path.exists(f'{HERE}/runs.csv'):
        with open(f'{HERE}/runs.csv', encoding='utf-8') as file:
            for label, seed, parameters, *values in list(csv.reader(file))[1:]:
                found[label, int(seed)] = (int(parameters), *map(float, values))
    for run in RUNS:
        if (run.label, run.seed) not in found and os.path.exists(f'{run.folder}/result.json'):
            with open(f'{run.folder}/result.json', encoding='utf-8') as file:
                result = json.load(file)
            found[run.label, run.seed] = (result['parameters'], round(result['val_loss'], 6),
                                          round(result['test_perplexity'], 5))
    with open(f'{HERE}/runs.csv.tmp', 'w', encoding='utf-8', newline='') as file:
        rows = csv.writer(file, lineterminator='\n')
        rows.writerow(['layer', 'seed', 'parameters', 'validation_loss', 'test_perplexity'])
        rows.writerows([*key, *values] for key, values in found.items())
    os.replace(f'{HERE}/runs.csv.tmp', f'{HERE}/runs.csv')
    return found


def table(found: Found) -> str:
    """Perplexity over all-CEM's with T = 1, of the same seed, by validation and by test."""
    lines = ['| layer | parameters | test perplexity | over all-CEM: validation | test |',
             '|---|---|---|---|---|']
    for (label, seed), (parameters, loss, perplexity) in sorted(found.items(),
                                                                key=lambda item: item[1][1]):
        base = found.get(('all-CEM', seed))
        if base is None:
            continue
        lines.append(f'| {label} | {parameters:,} | {perplexity:.3f} '
                     f'| {100 * math.expm1(loss - base[1]):+.1f}% '
                     f'| {100 * (perplexity / base[2] - 1):+.1f}% |')
    return '\n'.join(lines)


def main(argv: list[str]) -> None:
    found = collect()
    if '--table' not in argv:
        with ThreadPoolExecutor(2) as pool:
            missing = [run for run in RUNS if (run.label, run.seed) not in found]
            for _ in pool.map(train, missing):
                found = collect()
    print(table(found))


if __name__ == '__main__':
    main(sys.argv[1:])

"""
Train the models of this study, and measure how they copy.

    python prepare_slimpajama.py --input=english.jsonl.zst --held_out=0.05 --tokenizer=bpe2048 \\
        --out_dir=data/english
    nice -n 19 python results/gradient/run.py               the cells without a row in runs.csv
    nice -n 19 python results/gradient/run.py --at_once=2   two at a time, on a core each
    OUT=/tmp/try python results/gradient/run.py --tokens=40K      every command once, elsewhere

RULE.md has the rule, cells.csv the order. Each cell is a process of its own with one thread, which
goes on where it was stopped: S takes 20 to 30 minutes, M some 90. When it ends its row goes to
runs.csv and its losses go to losses.csv. $OUT names another folder for these, the logs and the runs
themselves.
"""
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import model as model_file
import train
from copying import copying, repeated_targets, target_losses
from nanocem import runs
from nanocem.data import TokenDataset
from nanocem.files import read_csv, read_json, read_json_lines
from nanocem.hardware import compile_for
from nanocem.measure import Measured, read_sequences
from nanocem.tokenizers import tokenizer_of
from study import loss_per_llama_token

FROM_RESULT = ('parameters', 'tokens', 'flops_per_token', 'seconds', 'val_bits_per_byte',
               'test_bits_per_byte')  # of a run's result.json
COLUMNS = ['size', 'model', 'rate', 'seed', 'variant', *FROM_RESULT, 'y', 'repeated_targets',
           'other_targets', 'repeated_loss', 'other_loss', 'read_once_loss', 'read_again_loss',
           'by_count', 'device', 'w_k', 'g_k']
KEY = 'size', 'model', 'seed', 'variant'  # what tells a cell from all others
COUNTS = 0, 11, 101, 1001  # repeated targets are divided by how often their pair is in training
EVERY = 50  # steps whose mean loss is published
SIZES = {row['size']: row['options'].split()
         for row in read_csv(f'{ROOT}/results/tokens/sizes.csv')}


# Ablations

def add_vector_head(kind: type) -> None:
    """Give a class of attention one more head, made of two vectors c and d: it finds by
    (c * h_i) . h_(j-1), and brings d * h_j. It is for one step, where u is h."""
    init, forward = kind.__init__, kind.forward

    def init_with_head(self, cfg) -> None:
        init(self, cfg)
        self.c = nn.Parameter(torch.ones(cfg.d_model))
        self.d = nn.Parameter(torch.zeros(cfg.d_model))

    def forward_with_head(self, x: Tensor, pos) -> Tensor:
        h = self.norm(x)
        a = (h * (self.c / h.shape[-1] ** 0.5)) @ model_file.previous(h).mT
        a = a + (h * (self.d / self.tau)) @ h.mT - pos.distance / 64
        alpha = (a + model_file.causal_mask(pos.distance)).softmax(dim=-1)
        return forward(self, x, pos) + self.d * (alpha.type_as(h) @ h)
    kind.__init__, kind.forward = init_with_head, forward_with_head


def patch(variant: str) -> None:
    """Change model.py as an ablation asks."""
    Base = model_file.BaseAttention
    init, scores = Base.__init__, Base.diagonal_scores
    if variant == 'vectors':
        add_vector_head(model_file.LlamaAttention)
        add_vector_head(model_file.CEMAttention)
        return
    if variant == "ALiBi's slopes":
        model_file.alibi_slopes = lambda n_head, like: like.new_tensor(
            [2 ** (-8 * k / n_head) for k in range(1, n_head + 1)])
        return
    if variant == 'one head':
        # All other weights g_k stay at 0, and the last head has the flattest slope
        def one_score(self, u: Tensor, h: Tensor) -> Tensor:
            g = F.pad(self.diag_weight[-1:], (self.K - 1, 0))[:, None, None]
            return g * (self.diagonal_queries(u) @ h[:, None].mT)

        def one_update(self, alpha: Tensor, h: Tensor) -> Tensor:
            return self.kq_diag * ((self.diag_weight[-1] * alpha[:, -1]).type_as(h) @ h)
        Base.diagonal_scores, Base.diagonal_update = one_score, one_update
        return
    name, shared = variant.removesuffix(', shared beside'), variant.endswith('shared beside')

    def ablated_init(self, cfg) -> None:
        init(self, cfg)
        if shared:
            self.shared_diag = nn.Parameter(torch.zeros(cfg.d_model))
        if name == 'scores alone':
            self.adds_diagonal = False
        elif name == 'd = 1' and self.kq_diag is not None:
            self.kq_diag.requires_grad_(False)

    def ablated_scores(self, u: Tensor, h: Tensor) -> Tensor:
        h_i = h[:, -u.shape[1]:]
        a = scores(self, u - h_i if name == 'gradient alone' else u, h)
        if shared:
            a = a + ((u * (self.shared_diag / self.tau)) @ h.mT)[:, None]
        return a
    if variant:
        Base.__init__, Base.diagonal_scores = ablated_init, ablated_scores


# One cell

def models(folder: Path) -> dict[str, dict[str, str]]:
    """Return the models of a study by their names."""
    return {row['model']: row for row in read_csv(f'{folder}/models.csv')}


def options_of(model: dict[str, str], size: str, seed: str, variant: str) -> list[str]:
    """Return train.py's options for a cell."""
    options = [*SIZES[size], *model['options'].split(),
               f'--learning_rate={model[f"rate_{size}"]}', f'--seed={seed}']
    if width := model[f'd_mlp_{size}']:
        options.append(f'--d_mlp={width}')
    if variant == 'vectors':  # in place of all three
        options += ['--key_shift=none', '--match_bias=none', '--kq_diag=none']
    if variant:
        options.append('--kernels=False')  # model.py's lines follow the patches
    return options


def targets(model: torch.nn.Module, ids: Tensor, bos: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each target, NaN where it is not text, and whether it is repeated."""
    losses = target_losses(model, ids, bos)
    return losses, repeated_targets(ids, model.cfg.vocab_size) & ~losses.isnan()


def by_count(losses: Tensor, repeated: Tensor, ids: Tensor, data_dir: str,
             V: int) -> list[list[float]]:
    """Return the number and the mean loss of repeated targets, by how often their pair stands in
    the training text: from each of COUNTS up to the next. V is the size of the vocabulary."""
    length = ids.shape[1] - 1
    counts = np.zeros(V * V, dtype=np.int64)
    for tokens in TokenDataset(data_dir, 'train', length).shards:
        pairs = tokens[:-1].astype(np.int64) * V + tokens[1:]
        counts += np.bincount(pairs, minlength=V * V)
    n = torch.from_numpy(counts)[(ids[:, :-1].clamp(min=0) * V + ids[:, 1:].clamp(min=0))]
    found = []
    for low, high in zip(COUNTS, (*COUNTS[1:], 1 << 62), strict=True):
        loss = losses[repeated & (n >= low) & (n < high)]
        found.append([len(loss), round(float(loss.mean()), 6)])
    return found


def head_weights(model: torch.nn.Module, name: str) -> str:
    """Return a weight of each layer and head as JSON; '' if the model has none of this name."""
    if not hasattr(model.blocks[0].attn, name):
        return ''
    return json.dumps([[round(float(w), 3) for w in getattr(block.attn, name).detach()]
                       for block in model.blocks])


def out_folder(folder: Path) -> Path:
    """Return where the runs of a study go: a try, in another folder, resumes none of the study."""
    return Path(os.environ.get('OUT', ROOT / 'out' / folder.name)).resolve()


def train_cell(folder: Path, patch: Callable[[str], None], size: str, name: str, seed: str,
               variant: str, *options: str) -> None:
    """Train one model of a study, measure it, and print its row and its losses as JSON in the last
    line. `patch` changes model.py as a variant asks."""
    model_row = models(folder)[name]
    variant_of_model = variant or model_row.get('variant', '')
    torch.set_float32_matmul_precision = lambda kind: None  # no TF32: products as on a CPU
    # Compile block by block, as on a CPU: blocks are alike, so one compilation serves all
    train.compile_for = lambda device, *of: compile_for(torch.device('cpu'), *of)
    patch(variant_of_model)
    words = '_'.join([name, f'seed={seed}', variant]).rstrip('_').replace(' ', '-')
    out_dir = f'{out_folder(folder)}/{size}/{words}'
    args = [*options_of(model_row, size, seed, variant_of_model), *options]
    if os.path.exists(f'{out_dir}/config.json'):
        args = ['--init_from=resume']
    if code := train.main([f'--out_dir={out_dir}', *args]):
        sys.exit(code)
    result = read_json(f'{out_dir}/result.json')
    # Measure copying with the last weights, on the tokens of the test text that evaluate.py reads
    model, state = runs.load_model(runs.checkpoints(out_dir)[-1], 'auto')
    tokenizer = tokenizer_of(state)
    ids, _, _ = read_sequences(Measured(), state, tokenizer, model.cfg.context_length)
    found = copying(model, ids, tokenizer.bos)
    losses = {kind: loss[~loss.isnan()] for kind, loss in found.items()}
    means = {kind: f'{float(loss.mean()):.6f}' for kind, loss in losses.items()}
    counted = by_count(*targets(model, ids, tokenizer.bos), ids, state['data_dir'],
                       model.cfg.vocab_size)
    row = {
        'size': size, 'model': name, 'rate': model_row[f'rate_{size}'], 'seed': seed,
        'variant': variant, **{key: result[key] for key in FROM_RESULT},
        'y': loss_per_llama_token(result),
        'repeated_targets': len(losses['repeated']), 'other_targets': len(losses['other']),
        'repeated_loss': means['repeated'], 'other_loss': means['other'],
        'read_once_loss': means['first'], 'read_again_loss': means['second'],
        'by_count': json.dumps(counted),
        'device': torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU',
        'w_k': head_weights(model, 'match_weight'), 'g_k': head_weights(model, 'diag_weight')}
    steps = [line['loss'] for line in read_json_lines(f'{out_dir}/log.jsonl') if 'loss' in line]
    curve = [[end, round(statistics.fmean(steps[end - EVERY:end]), 4)]
             for end in range(EVERY, len(steps) + 1, EVERY)]
    row = {key: str(value) for key, value in row.items()}
    print(json.dumps({'row': row, 'losses': curve}), flush=True)


# All cells

def append(path: Path, header: list[str], rows: list[list[str]]) -> None:
    """Append rows to a CSV, which gets its header first."""
    new = not path.exists()
    with open(path, 'a', newline='', encoding='utf-8') as file:
        csv.writer(file, lineterminator='\n').writerows([header, *rows] if new else rows)


def key_of(cell: dict[str, str]) -> tuple[str, ...]:
    return tuple(cell[name] for name in KEY)


def train_all(folder: Path, at_once: int, options: list[str]) -> None:
    """Train the cells of a study that have no row yet, each in a process of its own, which runs
    the study's run.py."""
    out = Path(os.environ.get('OUT', folder))
    logs = out_folder(folder) / 'logs'
    logs.mkdir(parents=True, exist_ok=True)
    append(out / 'runs.csv', COLUMNS, [])
    finished = {key_of(row) for row in read_csv(f'{out}/runs.csv')}
    waiting = [cell for cell in read_csv(f'{folder}/cells.csv') if key_of(cell) not in finished]
    running: list[tuple] = []
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    while waiting or running:
        while waiting and len(running) < at_once:
            arguments = key_of(waiting.pop(0))
            log = logs / ('_'.join(arguments).replace(' ', '-') + '.txt')
            with open(log, 'ab') as file:
                process = subprocess.Popen(
                    [sys.executable, f'{folder}/run.py', 'cell', *arguments, *options],
                    stdout=file, stderr=file, cwd=ROOT, env=environment)
            running.append((process, log, arguments))
        time.sleep(0.2)
        for entry in [entry for entry in running if entry[0].poll() is not None]:
            running.remove(entry)
            process, log, arguments = entry
            last = (log.read_text(encoding='utf-8').strip().splitlines() or [''])[-1]
            if process.returncode:
                print(f'{" ".join(arguments)} ended with {process.returncode}: {last[:300]}',
                      flush=True)
                continue
            found = json.loads(last)
            row = found['row']
            append(out / 'runs.csv', COLUMNS, [[row[name] for name in COLUMNS]])
            append(out / 'losses.csv', [*KEY, 'step', 'loss'],
                   [[*arguments, *point] for point in found['losses']])
            print(f'{" ".join(arguments)}: y {float(row["y"]):.4f}, repeated '
                  f'{row["repeated_loss"]}, other {row["other_loss"]}', flush=True)


def main(folder: Path, patch: Callable[[str], None], help_text: str, argv: list[str]) -> None:
    """Run the command of a study."""
    if argv[:1] == ['cell']:
        train_cell(folder, patch, *argv[1:])
    elif '--help' in argv:
        print(help_text)
    else:
        others = [a for a in argv if not a.startswith('--at_once=')]
        if others and 'OUT' not in os.environ:
            sys.exit('run.py: options of train.py make other runs than those of runs.csv: set OUT')
        at_once = [int(a.partition('=')[2]) for a in argv if a.startswith('--at_once=')]
        train_all(folder, at_once[0] if at_once else 1, others)


if __name__ == '__main__':
    main(HERE, patch, __doc__, sys.argv[1:])

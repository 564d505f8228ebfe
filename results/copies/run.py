"""
Train the models of this study, and measure how they copy.

    python prepare_slimpajama.py --input=english.jsonl.zst --held_out=0.05 --tokenizer=bpe2048 \\
        --out_dir=data/english
    python results/copies/run.py                  the cells without a row in runs.csv, side by side
    python results/copies/run.py --at_once=1      one at a time, as on a CPU: S takes 25 minutes
    OUT=/tmp/try python results/copies/run.py --tokens=40K     every command once, elsewhere

RULE.md has the rule, cells.csv the order. Each cell is a process of its own, whose run can be
resumed. Its row goes to runs.csv when it ends. $OUT names another folder for runs.csv and the logs,
$KEEP one for the weights, and $BUDGET the seconds after which no cell runs on.
"""
import csv
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import evaluate
import model as model_file
import train
from nanocem import runs
from nanocem.files import read_csv
from nanocem.hardware import compile_for
from nanocem.tokenizers import tokenizer_of
from reproduce import loss_per_llama_token

COLUMNS = ['size', 'model', 'rate', 'seed', 'variant', 'parameters', 'tokens', 'flops_per_token',
           'seconds', 'val_bits_per_byte', 'test_bits_per_byte', 'y', 'repeated_targets',
           'other_targets', 'repeated_loss', 'other_loss', 'read_once_loss', 'read_again_loss',
           'device', 'w_k']
TRIAL_SEED = 101
BETTER = 0.01  # another rate is taken if its validation perplexity is lower by more than this


MODELS = {row['model']: row for row in read_csv(f'{HERE}/models.csv')}
TEXT = read_csv(f'{ROOT}/results/tokens/text.csv')
SIZES = {row['size']: row['options'].split()
         for row in read_csv(f'{ROOT}/results/tokens/sizes.csv')}


# One cell

def patch(variant: str) -> None:
    """Change model.py's match bias as an ablation asks."""
    Base, add_match = model_file.BaseAttention, model_file.BaseAttention.add_match
    if variant == 'd=1':
        def with_d_of_1(self, h: Tensor, pos):
            h_i = h[:, -len(pos.distance):] / math.sqrt(h.shape[-1])
            return pos._replace(match=h_i @ model_file.previous(h).mT)
        Base.add_match = with_d_of_1
    elif variant == 'same id':
        hidden = model_file.Transformer.hidden

        def remember_ids(self, idx: Tensor, cache=None):
            before = torch.nn.functional.pad(idx, (1, -1), value=-1)
            Base.same_id = (idx[:, :, None] == before[:, None]).float()
            return hidden(self, idx, cache)

        def with_ids(self, h: Tensor, pos):
            return pos._replace(match=Base.same_id)
        model_file.Transformer.hidden, Base.add_match = remember_ids, with_ids
    elif variant.endswith('layer'):
        init = model_file.Transformer.__init__

        def number_layers(self, cfg):
            init(self, cfg)
            layer = {'first layer': 0, 'middle layer': cfg.n_layer // 2}.get(variant, -1)
            for block in self.blocks:
                block.attn.looks = block is self.blocks[layer]

        def in_one_layer(self, h: Tensor, pos):
            return add_match(self, h, pos) if self.looks else pos
        model_file.Transformer.__init__, Base.add_match = number_layers, in_one_layer


def train_cell(size: str, name: str, rate: str, seed: str, variant: str, *options: str) -> None:
    """Train one model, measure it, and print its row as JSON in the last line."""
    torch.set_float32_matmul_precision = lambda kind: None  # no TF32: products as on a CPU
    # Compile block by block, as on a CPU: blocks are alike, so one compilation serves all
    train.compile_for = lambda device, *of: compile_for(torch.device('cpu'), *of)
    patch(variant)
    out_dir = f'out/copies/{size}/{name}_rate={rate}_seed={seed}{"_" + variant if variant else ""}'
    out_dir = out_dir.replace(' ', '-')
    args = [*SIZES[size], *MODELS[name]['options'].split(), f'--learning_rate={rate}',
            f'--seed={seed}', *options]
    if variant == 'two in a row':
        args.append('--match_bias=pair')
    if variant == 'same id':
        args.append('--compile=False')
    if torch.cuda.is_available():
        args.append('--attn_impl=sdpa')
    begun = os.path.exists(f'{out_dir}/config.json')
    code = train.main([f'--out_dir={out_dir}', *(['--init_from=resume'] if begun else args)])
    if code:
        sys.exit(code)
    result = json.loads(Path(out_dir, 'result.json').read_text())
    y = loss_per_llama_token(result)
    # Measure copying with the last weights, on the tokens of the test text that evaluate.py reads
    model, state = runs.load_model(runs.checkpoints(out_dir)[-1], 'auto')
    tokenizer = tokenizer_of(state)
    ids, _, _ = evaluate.read_shards(evaluate.EvaluateConfig(), state, state['data_dir'], tokenizer,
                                     model.cfg.context_length)
    found = evaluate.copying(model, ids, tokenizer.bos)
    losses = {kind: loss[~loss.isnan()] for kind, loss in found.items()}
    w_k = ''
    if model.cfg.match_bias != 'none':
        w_k = json.dumps([[round(float(w), 3) for w in block.attn.match_weight.detach()]
                          for block in model.blocks])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'
    means = [f'{float(losses[kind].mean()):.6f}'
             for kind in ('repeated', 'other', 'first', 'second')]
    row = [size, name, rate, seed, variant, *(result[key] for key in COLUMNS[5:11]), y,
           len(losses['repeated']), len(losses['other']), *means, device, w_k]
    # Keep the weights without the optimizer's state
    if seed == '1' and not variant:
        kept = Path(os.environ.get('KEEP', out_dir))
        kept.mkdir(parents=True, exist_ok=True)
        state.pop('optimizers')
        torch.save(state, kept / f'{size}_{name}.pt')
    print(json.dumps(dict(zip(COLUMNS, map(str, row), strict=True))), flush=True)


# All cells

def is_trial(cell: dict[str, str]) -> bool:
    return int(cell['seed']) == TRIAL_SEED


def key_of(cell: dict[str, str], rate: str) -> tuple[str, ...]:
    """Return what tells a cell from all others. Trials differ in their rates alone."""
    names = 'size', 'model', 'seed', 'variant'
    return *map(cell.get, names), rate if is_trial(cell) else ''


def main(at_once: int, options: list[str]) -> None:
    out = Path(os.environ.get('OUT', HERE))
    runs_csv = out / 'runs.csv'
    if not runs_csv.exists():
        runs_csv.write_text(','.join(COLUMNS) + '\n', encoding='utf-8')
    began, deadline = time.monotonic(), float(os.environ.get('BUDGET', 'inf'))
    (out / 'logs').mkdir(exist_ok=True)
    waiting, running = read_csv(f'{HERE}/cells.csv'), []
    factors = {}  # of the rates of models with both options, as the trials decide
    while waiting or running:
        done = read_csv(str(runs_csv))
        finished = {key_of(row, row['rate']) for row in done}
        for kind in ('attn-1', 'llama-alibi'):
            if kind not in factors and (factor := best_factor(f'{kind}-copies', done)):
                factors[kind] = factor
                print(f'{kind}-copies takes {factor:g} times its rate', flush=True)
        # Start the first cell whose rate is known
        for cell in list(waiting):
            if len(running) >= at_once or time.monotonic() - began > deadline - 60:
                break
            factor = float(cell['factor'])
            has_rate = is_trial(cell) or cell['variant'] == 'rate 2e-3'
            if cell['model'].endswith('copies') and not has_rate:
                kind = 'llama-alibi' if 'llama' in cell['model'] else 'attn-1'
                if kind not in factors:
                    continue
                factor = factors[kind]
            rate = f'{float(cell["rate"]) * factor:.4g}'
            waiting.remove(cell)
            if key_of(cell, rate) in finished:
                continue
            arguments = [cell['size'], cell['model'], rate, cell['seed'], cell['variant']]
            log = out / 'logs' / ('_'.join(arguments).replace(' ', '-') + '.txt')
            with open(log, 'ab') as file:
                process = subprocess.Popen([sys.executable, __file__, 'cell', *arguments, *options],
                                           stdout=file, stderr=file, cwd=ROOT)
            running.append((process, log, arguments, time.monotonic()))
        if time.monotonic() - began > deadline:
            for process, *_ in running:
                process.kill()
            break
        if not running:
            break
        for entry in list(running):
            process, log, arguments, started = entry
            if process.poll() is None:
                continue
            running.remove(entry)
            last = (log.read_text(encoding='utf-8').strip().splitlines() or [''])[-1]
            name = ' '.join(arguments)
            if process.returncode:
                print(f'{name} ended with {process.returncode}: {last[:200]}', flush=True)
                continue
            row = json.loads(last)
            with open(runs_csv, 'a', newline='', encoding='utf-8') as file:
                csv.writer(file, lineterminator='\n').writerow(row.values())
            print(f'{time.monotonic() - began:4.0f} s  {name}: y {float(row["y"]):.4f}, '
                  f'repeated {row["repeated_loss"]}, other {row["other_loss"]}, '
                  f'{time.monotonic() - started:.0f} s', flush=True)
        time.sleep(0.2)


def best_factor(name: str, done: list[dict[str, str]]) -> float | None:
    """Return the factor of a model's rate that its trials choose; None until all three have
    ended."""
    bits = {float(row['rate']) / float(MODELS[name]['rate_S']): float(row['val_bits_per_byte'])
            for row in done if row['model'] == name and is_trial(row)}
    if len(bits) < 3:
        return None
    val, = (row for row in TEXT if row['split'] == 'val')
    nats = {factor: math.log(2) * b * int(val['bytes']) / int(val['llama_tokens'])
            for factor, b in bits.items()}
    published = min(nats, key=lambda factor: abs(factor - 1))
    best = min(nats, key=nats.get)
    return round(best, 1) if nats[published] - nats[best] > math.log1p(BETTER) else 1.0


if __name__ == '__main__':
    if sys.argv[1:2] == ['cell']:
        train_cell(*sys.argv[2:])
    elif '--help' in sys.argv:
        print(__doc__)
    else:
        others = [a for a in sys.argv[1:] if not a.startswith('--at_once=')]
        if others and 'OUT' not in os.environ:
            sys.exit('run.py: options of train.py make other runs than those of runs.csv: set OUT')
        at_once = [int(a.partition('=')[2]) for a in sys.argv if a.startswith('--at_once=')]
        main(at_once[0] if at_once else 14,
             others)

"""
Which tie makes copying late? Two-layer models learn nothing but to copy: a random text stands over
and over in a context. Counted are the batches until a model knows what comes next.

    python results/copying/measure.py          # runs what steps.csv lacks; minutes on one core

Each model counts at the best of three rates (or four), by the median over three seeds. The models
are Llama with ALiBi, the same with W_V tied to W_K, with W_O tied to W_Q, with both ties, and CEM
attention, which has both and takes one step; further Llama with RoPE. All have Llama's MLP.

Expected, committed before the first run: 215 batches for Llama with ALiBi, 400 with W_V tied, 250
with W_O tied, 430 with both and in CEM attention, 235 for Llama with RoPE. If keys as values are
the reason why CEM copies late, W_V tied needs at least 1.5 times as many batches as no tie, and at
least 1.2 times as many as W_O tied. Found: 1.24 and 1.20 times, so this reason does not hold alone.

Later rows: which of key_shift and match_bias makes copying early? Expected, committed before their
first run, in batches for CEM attention and for Llama with ALiBi: with half keys 205 and 140, with
the match bias 130 and 120, with both 115 and 105, with half keys and pairs within 10% of both. A
weight w_k must grow from 0 to some 0.7, which takes some 70 batches, and the mean follows 30 later.
Found: with half keys 210 and 103, with the match bias 90 and 96, with both 107 and 86, each at the
highest rate. The match bias alone brings CEM attention, 396 without, level with Llama here.
"""
import statistics
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))  # model.py is two folders above

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from model import ModelConfig, Transformer
from nanocem.files import read_csv, write_atomic

SHORTEST, LONGEST, CONTEXT, KINDS = 6, 32, 64, 64  # a text's tokens, and how many kinds there are
BATCH, WARMUP, LIMIT = 32, 50, 1500
RATES, SEEDS = (0.004, 0.008, 0.016), (1, 2, 3)
MORE_RATES = {'both': (0.002,)}  # added after the first runs, whose lowest rate was its best
LLAMA = dict(attn='llama', positions='alibi')
MODELS = {
    'Llama with ALiBi': LLAMA,
    'W_V tied to W_K': LLAMA | dict(tie='kv'),
    'W_O tied to W_Q': LLAMA | dict(tie='qo'),
    'both': LLAMA | dict(tie='both'),
    'CEM attention': dict(attn='cem', positions='alibi'),
    'Llama with RoPE': dict(attn='llama', positions='rope')}
HALF, TOKEN, PAIR = dict(key_shift='half'), dict(match_bias='token'), dict(match_bias='pair')
for looks, more in {'both options': HALF | TOKEN, 'half keys': HALF, 'match bias': TOKEN,
                    'half keys and pairs': HALF | PAIR}.items():
    for name in ('CEM attention', 'Llama with ALiBi'):
        MODELS[f'{name} with {looks}'] = MODELS[name] | more


def draw_texts(generator: torch.Generator) -> Tensor:
    """Return ids (BATCH, CONTEXT): in each row a random text, as often as it fits."""
    length = torch.randint(SHORTEST, LONGEST + 1, (BATCH, 1), generator=generator)
    tokens = torch.randint(KINDS, (BATCH, LONGEST), generator=generator)
    return tokens.gather(1, torch.arange(CONTEXT) % length)


def batches_to_copy(options: dict, rate: float, seed: int) -> int:
    """Train until the loss of tokens that came before, a mean over some twenty batches, is below
    one nat; it begins at log 64 = 4.2. Return how many batches that takes, at most LIMIT."""
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(mlp='llama', n_layer=2, d_model=64, n_head=4, d_mlp=168,
                                    vocab_size=KINDS, context_length=CONTEXT, **options))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    mean = 4.2
    for step in range(1, LIMIT):
        x = draw_texts(generator)
        losses = F.cross_entropy(model(x)[0][:, :-1].mT, x[:, 1:], reduction='none')
        optimizer.param_groups[0]['lr'] = rate * min(1, step / WARMUP)
        optimizer.zero_grad()
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        mean = 0.95 * mean + 0.05 * losses[:, LONGEST:].mean().item()
        if mean < 1:
            return step
    return LIMIT


def main() -> None:
    torch.set_num_threads(1)
    rows = read_csv(str(FOLDER / 'steps.csv'))
    for name, options in MODELS.items():
        # Run the rates that have no row, and write each row when its last seed ends
        for rate in (*MORE_RATES.get(name, ()), *RATES):
            if any(row['model'] == name and float(row['rate']) == rate for row in rows):
                continue
            steps = [batches_to_copy(options, rate, seed) for seed in tqdm(SEEDS, leave=False)]
            rows.append(dict(model=name, rate=str(rate), median=str(statistics.median(steps)))
                        | {f'seed_{seed}': str(n) for seed, n in zip(SEEDS, steps, strict=True)})
            lines = [rows[0].keys(), *(row.values() for row in rows)]
            text = ''.join(','.join(line) + '\n' for line in lines)
            write_atomic(str(FOLDER / 'steps.csv'), text.encode())
        medians = {row['rate']: int(row['median']) for row in rows if row['model'] == name}
        best = min(medians, key=medians.get)
        print(f'{name}: {medians[best]} batches at a rate of {best}', flush=True)


if __name__ == '__main__':
    main()

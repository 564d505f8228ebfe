"""
Two hops: does a second CEM step follow an edge that the first step found?

    python results/copies/hops.py              # runs what hops.csv lacks, in the order of cells()
    python results/copies/hops.py mixed half   # of these those whose rows have these values
    python results/copies/hops.py --table      # prints the table of hops.md

A sequence lists the edges x -> y of one cycle over all symbols, "x y ;" in random order, and then
asks "? x" (one hop: y) or "! x" (two hops: the y of y) a few times. No answer stands in it. The
questions of a run are of one kind, or mixed, half of each. Models are one layer of CEM attention
with T steps, and Llama of one and of two layers; all have ALiBi and Llama's MLP. They have eight
heads, so that those with the flattest slopes reach the first edge.

Counted are the batches until 99% of the answers are right, a mean over some twenty batches, and at
the end the accuracy on fresh sequences. Chance is 1 / 15: no symbol is its own answer. One that
knows one hop, and excludes it, has 1 / 14.

Expected, committed before the first run ("both" is half keys and match_bias=token):
- One hop: all with half keys, the match bias or both within 500 batches; one layer without them
  stays at chance, since a key knows nothing of the token before; Llama of two layers needs 1,500.
- Two hops, one layer without half keys: chance for all T. Two hops, one layer of Llama, or T = 1:
  chance with all options, as what the question finds is not asked for again.
- Two hops, half keys or both, T = 2 to 4: chance after 3,000 batches. A second hop can be written
  with these weights: the first brings y into a subspace where the second looks. But a first hop
  alone earns nothing here, so that there is little to climb. Llama of two layers: likewise chance
  without options; with both 99% within 3,000, as its second layer has matrices of its own.
- Mixed: the first hop is paid for. T = 1 answers one hop and no second, 50 to 55% in all. T = 2
  and 4 with both learn two hops to 50% at least, Llama of two layers with both to 99%.
- Four heads, twice as wide, were added when eight with half keys alone had not learned one hop in
  3,000 batches: half of a head has but 4 features for 16 symbols. Expected, before their first
  run: half keys answer one hop; two hops stay at chance for T = 2, also mixed with both.
"""
import csv
import itertools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))  # model.py is two folders above

import torch
import torch.nn.functional as F
from torch import Tensor

from model import ModelConfig, Transformer
from nanocem.files import markdown_table, read_csv

SYMBOLS, ASKED, BATCH = 16, 8, 8  # symbols of a cycle, questions of a sequence, sequences
SEPARATOR, ONE, TWO = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2  # the tokens ";", "?" and "!"
CONTEXT = 3 * SYMBOLS + 2 * ASKED
WARMUP, LIMIT, FRESH = 50, 3000, 40  # batches; FRESH measures the accuracy
RATES, SEEDS, QUESTIONS = (0.004, 0.008), (1, 2), ('two', 'mixed', 'one')
OPTIONS = {
    'both': dict(key_shift='half', match_bias='token'),
    'half': dict(key_shift='half'),
    'none': {},
    'match': dict(match_bias='token'),
    'half and pair': dict(key_shift='half', match_bias='pair')}
OPTIONS |= {f'{looks}, 4 heads': OPTIONS[looks] | dict(n_head=4) for looks in ('half', 'both')}
LLAMA = dict(attn='llama', positions='alibi')
MODELS = {
    'CEM, T = 2': dict(attn='cem', attn_steps=2),
    'Llama, 2 layers': LLAMA | dict(n_layer=2),
    'CEM, T = 1': dict(attn='cem'),
    'CEM, T = 4': dict(attn='cem', attn_steps=4),
    'Llama, 1 layer': LLAMA,
    'CEM, T = 3': dict(attn='cem', attn_steps=3)}
COLUMNS = ['questions', 'options', 'model', 'rate', 'seed', 'batches', 'accuracy_one',
           'accuracy_two']


def draw(generator: torch.Generator, questions: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (BATCH, CONTEXT); the answers (BATCH, ASKED), whose questions are the last ids,
    two tokens each; and which of them ask for two hops."""
    cycle = torch.rand(BATCH, SYMBOLS, generator=generator).argsort(dim=1)
    follows = torch.empty_like(cycle).scatter_(1, cycle, cycle.roll(-1, dims=1))
    x = torch.rand(BATCH, SYMBOLS, generator=generator).argsort(dim=1)
    edges = torch.stack([x, follows.gather(1, x), torch.full_like(x, SEPARATOR)], dim=2)
    # Ask for distinct symbols
    x = torch.rand(BATCH, SYMBOLS, generator=generator).argsort(dim=1)[:, :ASKED]
    if questions == 'mixed':
        two = torch.rand(BATCH, ASKED, generator=generator) < 0.5
    else:
        two = torch.full((BATCH, ASKED), questions == 'two')
    asked = torch.stack([torch.where(two, TWO, ONE), x], dim=2)
    y = follows.gather(1, x)
    answers = torch.where(two, follows.gather(1, y), y)
    return torch.cat([edges.flatten(1), asked.flatten(1)], dim=1), answers, two


def train_and_measure(questions: str, options: dict, rate: float,
                      seed: int) -> tuple[int, float, float]:
    """Return the batches until 99% of the answers are right, at most LIMIT, and the accuracy on
    fresh sequences for one and for two hops, NaN for one that is not asked."""
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**dict(n_layer=1, mlp='llama', d_model=64, n_head=8, d_mlp=128,
                                           vocab_size=TWO + 1, context_length=CONTEXT) | options))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    mean = 0.0
    for step in range(1, LIMIT + 1):
        ids, answers, _ = draw(generator, questions)
        logits = model(ids)[0][:, -2 * ASKED + 1::2]  # at the symbols that are asked for
        optimizer.param_groups[0]['lr'] = rate * min(1, step / WARMUP)
        optimizer.zero_grad()
        F.cross_entropy(logits.mT, answers).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        right = (logits.argmax(dim=-1) == answers).float().mean().item()
        mean = 0.95 * mean + 0.05 * right
        if mean >= 0.99:
            break
    with torch.no_grad():
        batches = [draw(generator, questions) for _ in range(FRESH)]
        ids, answers, two = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        logits = model(ids)[0][:, -2 * ASKED + 1::2]
        right = (logits.argmax(dim=-1) == answers).float()
    return step, right[~two].mean().item(), right[two].mean().item()


def cells() -> Iterator[tuple[str, str, str, float, int]]:
    """Yield all runs, the first rate and seed of all before the others."""
    for seed, rate in itertools.product(SEEDS, RATES):
        for looks, questions, name in itertools.product(OPTIONS, QUESTIONS, MODELS):
            yield questions, looks, name, rate, seed


def table(rows: list[dict[str, str]]) -> str:
    """Return a line for each kind of question, options and model: over seeds, the mean at the best
    rate, which is the one of the highest accuracy and among equals of the fewest batches."""
    lines = []
    for questions, looks, name in itertools.product(QUESTIONS, OPTIONS, MODELS):
        found = [row for row in rows
                 if [row['questions'], row['options'], row['model']] == [questions, looks, name]]
        by_rate = []
        for rate in {row['rate'] for row in found}:
            runs = [row for row in found if row['rate'] == rate]
            one, two, batches = (statistics.fmean(float(row[column]) for row in runs)
                                 for column in ('accuracy_one', 'accuracy_two', 'batches'))
            total = sum(value for value in (one, two) if value == value)
            by_rate.append((round(total, 2), -batches, rate, len(runs), one, two))
        if by_rate:
            _, negative, rate, runs, *accuracies = max(by_rate)
            shown = ['' if value != value else f'{value:.1%}' for value in accuracies]
            lines.append([questions, looks, name, *shown, f'{-negative:,.0f}', rate, str(runs)])
    return markdown_table(['questions', 'options', 'model', 'one hop', 'two hops', 'batches',
                           'rate', 'runs'], lines)


def main(values: list[str]) -> None:
    torch.set_num_threads(1)
    path = FOLDER / 'hops.csv'
    if not path.exists():
        path.write_text(','.join(COLUMNS) + '\n', encoding='utf-8')
    done = {tuple(row[column] for column in COLUMNS[:5]) for row in read_csv(str(path))}
    for questions, looks, name, rate, seed in cells():
        key = (questions, looks, name, str(rate), str(seed))
        if key in done or not set(values) <= set(key):
            continue
        options = MODELS[name] | OPTIONS[looks]
        step, one, two = train_and_measure(questions, options, rate, seed)
        with open(path, 'a', newline='', encoding='utf-8') as file:
            csv.writer(file, lineterminator='\n').writerow(
                [*key, step, f'{one:.4f}', f'{two:.4f}'])
        print(*key, step, f'{one:.4f}', f'{two:.4f}', flush=True)


if __name__ == '__main__':
    if sys.argv[1:] == ['--table']:
        print(table(read_csv(str(FOLDER / 'hops.csv'))))
    else:
        main(sys.argv[1:])

"""
How soon layers learn to copy: texts of random tokens, each repeated to fill the context, and the
steps of training until a model of two layers knows what comes next from the second time on.

    python results/copying/measure.py

Every model at each of RATES, three seeds; the best rate counts. An hour of two cores beside other
work; a run that is done is kept in out/copying.json. Writes copying.md beside itself.
"""
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import torch  # noqa: E402  after the path is set
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

from model import ModelConfig, Transformer  # noqa: E402
from nanocem.files import read_json, write_whole  # noqa: E402
from reproduce import MODELS, configs  # noqa: E402

SHAPE = '--n_layer=2 --d_model=64 --n_head=4 --d_mlp=168 --vocab_size=64 --context_length=64'
SHORTEST, LONGEST = 6, 32  # texts, in tokens
BATCH, WARMUP, LIMIT = 32, 50, 1500
RATES, SEEDS = (0.004, 0.008, 0.016), (1, 2, 3)
ROWS = {
    'Llama': MODELS['llama'],
    'Llama with ALiBi': MODELS['llama-alibi'],
    **{f'{name}, T = {T}': MODELS[f'{model}-{T}']
       for model, name in (('attn', 'CEM attention'), ('cem', 'all-CEM')) for T in (1, 2)},
    **{f'CEM attention, T = {T}, tau = sqrt(D_r)': f'{MODELS[f"attn-{T}"]} --score_scale=head'
       for T in (1, 2)},
    **{f'CEM attention, T = {T}, no diagonal': MODELS[f'attn-{T}-nodiag'] for T in (1, 2)},
    **{f'CEM attention, T = {T}, exact RoPE': MODELS[f'attn-{T}-rope'] for T in (1, 2)}}


def texts(vocabulary: int, context: int, generator: torch.Generator) -> Tensor:
    """(BATCH, context) ids: in each row a random text, as often as it fits."""
    length = torch.randint(SHORTEST, LONGEST + 1, (BATCH, 1), generator=generator)
    tokens = torch.randint(vocabulary, (BATCH, LONGEST), generator=generator)
    return tokens.gather(1, torch.arange(context) % length)


def steps_to_copy(cfg: ModelConfig, rate: float, seed: int) -> int:
    """Until the loss of tokens that came before, a mean over some twenty steps, is below one nat of
    the log(64) = 4.2 it starts at; LIMIT where that does not happen."""
    torch.manual_seed(seed)
    model, mean = Transformer(cfg), None
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, LIMIT):
        x = texts(cfg.vocab_size, cfg.context_length, generator)
        losses = F.cross_entropy(model(x)[0][:, :-1].mT, x[:, 1:], reduction='none')
        optimizer.param_groups[0]['lr'] = rate * min(1, step / WARMUP)
        optimizer.zero_grad()
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        known = float(losses.detach()[:, LONGEST:].mean())
        mean = known if mean is None else 0.95 * mean + 0.05 * known
        if mean < 1:
            return step
    return LIMIT


def key(row: str, rate: float, seed: int) -> str:
    return f'{row}; {rate}; {seed}'


def table(found: Mapping[str, int]) -> list[str]:
    """Each model's steps at its best rate, by the median over seeds, and at the others."""
    lines = ['| two layers | rate | steps, median | by seed | medians at the rates '
             f'{", ".join(f"{rate:g}" for rate in RATES)} |', '|---|---|---|---|---|']
    for row in ROWS:
        steps = {rate: [found[key(row, rate, seed)] for seed in SEEDS] for rate in RATES}
        medians = {rate: statistics.median(of) for rate, of in steps.items()}
        best = min(medians, key=medians.get)
        words = [words_of(n) for n in (medians[best], *steps[best], *medians.values())]
        lines.append(f'| {row} | {best:g} | {words[0]} | {", ".join(words[1:4])} | '
                     f'{", ".join(words[4:])} |')
    return lines


def words_of(steps: float) -> str:
    return f'over {LIMIT}' if steps >= LIMIT else f'{steps:g}'


def main() -> None:
    done = 'out/copying.json'
    found = read_json(done) or {}
    jobs = {key(row, rate, seed): (configs(f'{SHAPE} {options}')[1], rate, seed)
            for seed in SEEDS for row, options in ROWS.items() for rate in RATES}
    missing = {name: job for name, job in jobs.items() if name not in found}
    os.makedirs('out', exist_ok=True)
    spawn = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(os.cpu_count(), spawn, torch.set_num_threads, (1,)) as pool:
        names = {pool.submit(steps_to_copy, *job): name for name, job in missing.items()}
        for future in tqdm(as_completed(names), total=len(names)):
            found[names[future]] = future.result()
            write_whole(done, json.dumps(found, indent=1).encode())
            tqdm.write(f'{names[future]}: {words_of(future.result())}')
    page = ['Steps until a token that came before is known (loss below one nat), by '
            '`python results/copying/measure.py`.', '', *table(found), '']
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'copying.md')
    write_whole(path, '\n'.join(page).encode())


if __name__ == '__main__':
    os.chdir(ROOT)
    main()

"""
What a trained model's second step does: the ladder's T = 2 models, looked at step by step.

    python results/ladder/second_step.py

Of the runs of `python reproduce.py ladder` that are finished; writes second_step.md beside itself.
"""
import math
import os
import statistics
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import torch  # noqa: E402  after the path is set
import torch.nn.functional as F  # noqa: E402

from configurator import fail  # noqa: E402
from model import MLP, Attention, Transformer  # noqa: E402
from nanocem.files import write_whole  # noqa: E402
from nanocem.ladder import SCALES  # noqa: E402
from nanocem.runs import load_run  # noqa: E402
from nanocem.shards import Sequences, spread  # noqa: E402
from reproduce import finished, own_runs  # noqa: E402

TOKENS = 16_384  # of the test split, spread over it
INTRODUCTION = f'''What the second step does in the ladder's models (T = 2, raw residual), by
`python results/ladder/second_step.py`: test perplexity on {TOKENS:,} bytes, of the model as it was
trained, and with no further training where its attention, or its MLP, takes one step of twice the
length in place of two; and the second update beside the first, means over tokens and layers: the
cosine between them, and the second's length over the first's. Means over seeds.
'''
MODELS = {'cem-2': 'all-CEM', 'rope-2': 'all-CEM, exact RoPE', 'attn-2': 'CEM attention',
          'mlp-2': 'CEM MLP'}
HEADER = ['model', 'size', 'seeds', 'as trained', 'attention in one step', 'MLP in one step',
          'attention: second update', 'MLP: second update']


def perplexity(model: Transformer, x: torch.Tensor, y: torch.Tensor) -> float:
    return math.exp(float(model(x, y)[1]))


def in_one_step(model: Transformer, kind: str, x: torch.Tensor, y: torch.Tensor) -> float:
    """Perplexity where all sublayers of a kind take one step of twice the length."""
    layers = [getattr(block, kind) for block in model.blocks]
    for layer in layers:
        layer.steps, layer.eta = 1, 2 * layer.eta
    found = perplexity(model, x, y)
    for layer in layers:
        layer.steps, layer.eta = 2, layer.eta / 2
    return found


def second_update(layer: Attention | MLP, model: Transformer, x: torch.Tensor,
                  ) -> tuple[float, float]:
    """A sublayer's second update beside its first, with residual=raw, means over tokens: the cosine
    between the two, and how long it is as a part of the first's length."""
    seen = []  # x_0, x_1 go into the norm, x_2 is what comes out
    hooks = [layer.norm.register_forward_hook(lambda of, given, out: seen.append(given[0])),
             layer.register_forward_hook(lambda of, given, out: seen.append(out))]
    model.hidden(x)
    for hook in hooks:
        hook.remove()
    start, middle, end = seen
    first, second = middle - start, end - middle
    length = (second.norm(dim=-1) / first.norm(dim=-1)).mean()
    return float(F.cosine_similarity(first, second, dim=-1).mean()), float(length)


@torch.no_grad()
def look(out_dir: str) -> list[float]:
    """The numbers of HEADER from `as trained` on for one run; nan where the sublayer is Llama's."""
    model, state = load_run(out_dir, 'last')
    data = Sequences(state['data_dir'], 'test', model.cfg.context_length)
    x, y = data.batch(spread(len(data), TOKENS // data.length))
    found = [perplexity(model, x, y)]
    kinds = [kind for kind in ('attn', 'mlp') if getattr(model.blocks[0], kind).cem]
    found += [in_one_step(model, kind, x, y) if kind in kinds else math.nan
              for kind in ('attn', 'mlp')]
    for kind in ('attn', 'mlp'):
        both = [second_update(getattr(block, kind), model, x) if kind in kinds
                else (math.nan, math.nan) for block in model.blocks]
        found += [statistics.fmean(values) for values in zip(*both, strict=True)]
    return found


def main() -> None:
    torch.set_num_threads(1)
    scale = SCALES['ladder']
    lines = [f'| {" | ".join(HEADER)} |', '|' + '---|' * len(HEADER)]
    for model, name in MODELS.items():
        for size in scale.sizes:
            runs = [r for task in own_runs(scale, [model], [size], scale.seeds)
                    if (r := finished(task))]
            if not runs:
                continue
            trained, attn, mlp, *updates = (statistics.fmean(column) for column in
                                            zip(*(look(r['out_dir']) for r in runs), strict=True))
            words = [name, size, str(len(runs)), f'{trained:.3f}']
            words += ['' if math.isnan(p) else f'{p:.3f} ({100 * (p / trained - 1):+.0f}%)'
                      for p in (attn, mlp)]
            words += ['' if math.isnan(cosine) else f'cosine {cosine:.2f}, length {part:.2f}'
                      for cosine, part in (updates[:2], updates[2:])]
            lines.append(f'| {" | ".join(words)} |')
            print(lines[-1], flush=True)
    if len(lines) == 2:
        fail('no run of the ladder is finished: python reproduce.py ladder')
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'second_step.md')
    write_whole(path, '\n'.join([INTRODUCTION, *lines, '']).encode())


if __name__ == '__main__':
    os.chdir(ROOT)
    main()

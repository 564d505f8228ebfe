"""What reproduce.py trains: models by name, as train.py's options, and the scales they come in."""
import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from configurator import fail
from nanocem.files import read_json

LLAMA = '--attn=llama --mlp=llama --attn_steps=1 --mlp_steps=1'
ROPE = '--positions=rope --kq_diag=none --score_scale=head'
LOW_RANK = '--preconditioner=diag_lowrank'
NO_P = '--preconditioner=none'


def attn(T: int) -> str:
    return f'--attn=cem --mlp=llama --attn_steps={T} --mlp_steps=1 {LOW_RANK}'


def mlp(T: int) -> str:
    return f'--attn=llama --mlp=cem --attn_steps=1 --mlp_steps={T} {LOW_RANK}'


def cem(T: int) -> str:
    return f'--attn=cem --mlp=cem --attn_steps={T} --mlp_steps={T} {LOW_RANK}'


class Model(NamedTuple):
    """A family (the model whose name it is) has its own swept rate and is trained at every size;
    its variants take its rate, and the ladder's two smallest sizes, a few of them larger ones."""
    family: str
    options: str


MODELS: dict[str, Model] = {
    'llama': Model('llama', LLAMA),
    **{f'attn-{T}': Model(f'attn-{T}', attn(T)) for T in (1, 2)},
    **{f'mlp-{T}': Model(f'mlp-{T}', mlp(T)) for T in (1, 2)},
    **{f'cem-{T}': Model(f'cem-{T}', cem(T)) for T in (1, 2)},
    **{f'rope-{T}': Model(f'rope-{T}', f'{cem(T)} {ROPE}') for T in (1, 2)},
    # positions, reuse, preconditioner
    'llama-alibi': Model('llama', f'{LLAMA} --positions=alibi'),
    'llama-attn-twice': Model('llama', f'{LLAMA} --attn_steps=2'),
    'llama-mlp-twice': Model('llama', f'{LLAMA} --mlp_steps=2'),
    **{f'attn-{T}-none': Model(f'attn-{T}', f'{attn(T)} {NO_P}') for T in (1, 2)},
    **{f'mlp-{T}-none': Model(f'mlp-{T}', f'{mlp(T)} {NO_P}') for T in (1, 2)},
    'mlp-1-none-params': Model('mlp-1', f'{mlp(1)} {NO_P} --mlp_match=params'),
    **{f'mlp-{T}-params': Model(f'mlp-{T}', f'{mlp(T)} --mlp_match=params') for T in (1, 2)},
    # diagonal, exact RoPE
    **{f'attn-{T}-nodiag': Model(f'attn-{T}', f'{attn(T)} --kq_diag=none') for T in (1, 2)},
    'attn-1-perhead': Model('attn-1', f'{attn(1)} --kq_diag=per_head'),
    **{f'attn-{T}-rope': Model(f'attn-{T}', f'{attn(T)} {ROPE}') for T in (1, 2)},
    # a third step
    'attn-3': Model('attn-2', attn(3)),
    'mlp-3': Model('mlp-2', mlp(3)),
}
FAMILIES = [name for name, model in MODELS.items() if model.family == name]
PAPERS = [name for name in FAMILIES if not name.startswith('rope')]  # exact RoPE is ours
VARIANTS = [name for name in MODELS if name not in FAMILIES]
# at the third size as well: results/ladder/expectations.md says why
THIRD_SIZE = ['llama-alibi', 'attn-1-nodiag', 'llama-attn-twice', 'llama-mlp-twice']
CONTROL = ['llama-alibi']  # Llama with the positions of CEM, at every size
MODELS |= {
    'cem-3': Model('cem-2', cem(3)),
    # the other temperature of scores
    'cem-2-tau': Model('cem-2', f'{cem(2)} --score_scale=head'),
    'rope-2-tau': Model('rope-2', f'{cem(2)} {ROPE} --score_scale=model'),
    'cem-2-displacement': Model('cem-2', f'{cem(2)} --residual=displacement'),
    **{f'{kind}-{T}-diag': Model(f'{kind}-{T}', f'{layer(T)} --preconditioner=diag')
       for kind, layer in (('attn', attn), ('mlp', mlp)) for T in (1, 2)},
    **{f'attn-{T}-exact': Model(f'attn-{T}', f'{attn(T)} --exact_update') for T in (1, 2)},
    # the diagonal of A_k beside the paper's P
    **{f'attn-1-diag-{name}': Model('attn-1', f'{attn(1)} --preconditioner=diag --kq_diag={kind}')
       for name, kind in (('nodiag', 'none'), ('perhead', 'per_head'))},
}
FURTHER = [name for name in MODELS if name not in FAMILIES + VARIANTS]
# twice the tokens: is ten a parameter too few?
MODELS |= {f'{name}-20': Model(name, f'{MODELS[name].options} --tokens_per_param=20')
           for name in PAPERS}
LONGER = [name for name in MODELS if name.endswith('-20')]


@dataclass(frozen=True)
class Scale:
    """Where the figures are run: each size's options, rates of the sweep, seeds, launcher."""
    name: str
    sizes: dict[str, str]
    rates: tuple[float, ...]  # of the sweep; at the ladder it goes on where the best is an edge
    rate: float | None  # of every other run; None: each model's own best
    sweep_sizes: dict[str, str]
    seeds: tuple[int, ...]
    launcher: tuple[str, ...]
    only: tuple[str, ...] | None = None  # of the sizes, those that are asked for


# n layers, n heads of 16, so d = 16 n: one number grows, depth and width keep their ratio. In heads
# of 16 RoPE has more room than in 4 to 6, and three are the fewest whose ALiBi slopes see near
# and far. The names are the weights of Llama's blocks.
LADDER = {
    '83k': 'config/ladder.py --n_layer=3 --d_model=48 --n_head=3 --d_mlp=128 '
           '--dtype=float32 --compile=False',  # which does not pay in so short runs
    '195k': 'config/ladder.py --n_layer=4 --d_model=64 --n_head=4 --d_mlp=168',
    '387k': 'config/ladder.py --n_layer=5 --d_model=80 --n_head=5 --d_mlp=216',
    '664k': 'config/ladder.py --n_layer=6 --d_model=96 --n_head=6 --d_mlp=256',
    '1.05m': 'config/ladder.py --n_layer=7 --d_model=112 --n_head=7 --d_mlp=296'}
# The next two, for a GPU: in larger batches and at one rate for all.
LARGER = {
    '3.06m': 'config/ladder.py --n_layer=10 --d_model=160 --n_head=10 --d_mlp=424',
    '10.4m': 'config/ladder.py --n_layer=15 --d_model=240 --n_head=15 --d_mlp=640'}
LARGER = {size: f'{shape} --batch_size=128 --micro_batch_size=128'
          for size, shape in LARGER.items()}
PAPER = {size: f'--size={size}' for size in ('86m', '108m', '134m', '162m')}
SCALES = {
    'ladder': Scale('ladder', LADDER, (0.004, 0.008, 0.016), None,
                    {size: LADDER[size] for size in ('83k', '195k')}, (1, 2, 3), (sys.executable,)),
    'gpu': Scale('gpu', LARGER, (0.004,), 0.004, {}, (1,), (sys.executable,)),
    'paper': Scale('paper', PAPER, (0.0005, 0.001, 0.002, 0.004, 0.008), 0.002,
                   {**PAPER, '256m': '--size=256m'}, (1,), ('torchrun', '--nproc_per_node=8'))}


def canonical(options: str) -> str:
    """The same options in one spelling: config files first, of each --key its last value."""
    words = options.split()
    last = {word.partition('=')[0]: word for word in words if word.startswith('--')}
    return ' '.join([*(word for word in words if not word.startswith('--')), *last.values()])


class Task(NamedTuple):
    """One training run."""
    scale: str
    size: str
    model: str
    rate: float
    seed: int

    @property
    def shape(self) -> str:
        """Its options but for the learning rate."""
        scale = SCALES[self.scale]
        size = {**scale.sweep_sizes, **scale.sizes}[self.size]
        return canonical(f'{size} {MODELS[self.model].options}')

    @property
    def options(self) -> str:
        return f'{self.shape} --learning_rate={self.rate:g}'

    @property
    def folder(self) -> str:
        return (f'out/reproduce/{self.scale}/{self.size}/'
                f'{self.model}_rate={self.rate:g}_seed={self.seed}')


# What a run and the sweeps leave. A file that is damaged is named; SystemExit.

SPLITS = {'test': 'Test', 'val': 'Validation'}  # the texts whose perplexity a result has


def above_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def read_settings(folder: str) -> dict[str, Any]:
    """A run's options, from its config.json; {} where it is not begun."""
    config = read_json(f'{folder}/config.json')
    parts = [{}] if config is None else [config.get('train'), config.get('model')]
    if not all(isinstance(part, dict) for part in parts):
        fail(f'{folder}/config.json is damaged: delete the folder')
    return {key: value for part in parts for key, value in part.items()}


def read_result(folder: str) -> dict[str, Any] | None:
    """A run's result.json; None where a number is missing: where steps were skipped it is null."""
    result = read_json(f'{folder}/result.json') or {}
    names = ('test_perplexity', 'val_perplexity', 'parameters', 'tokens', 'flops_per_token',
             'seconds')
    return result if all(above_zero(result.get(name)) for name in names) else None


def read_rates(scale: Scale) -> dict[str, Any] | None:
    """What the sweeps chose; None until they have. What is published holds."""
    for path in (f'results/{scale.name}/rates.json', f'out/results/{scale.name}/rates.json'):
        if chosen := read_json(path):
            try:
                rates = [chosen['rates'][of][size] for of in FAMILIES for size in scale.sizes]
            except (KeyError, TypeError):
                rates = [None]
            if not all(map(above_zero, rates)):
                fail(f'{path} lacks rates: delete it, and the sweeps choose them anew')
            return chosen
    return None

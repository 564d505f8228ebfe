"""
Evaluate a trained model.

    python evaluate.py                         bits per byte, loss and perplexity of the newest run
    python evaluate.py --text=book.txt         the same on a text; --data=FOLDER: on other data
    python evaluate.py --steps=1,2,3,4,8       the same for other T at test time
    python evaluate.py --energies              energies along the steps: does step 1 lower them?
    python evaluate.py --compare=out/a,out/b   the results of runs, and the options that differ;
                                               with --text=FILE their bits per byte on it

Tables are printed. --compare takes exports, too. The picture of --energies goes into out/results.
results/copying.py asks how well a model repeats its context, and docs/attention.py draws its
attention.
"""
import math
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

if __name__ == '__main__':  # pictures go into files, whatever backend a notebook asks for
    os.environ['MPLBACKEND'] = 'agg'

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import PathStr, UserError, build, check, command_line, read_options
from model import Transformer
from nanocem.data import TOKENIZER_KEYS
from nanocem.documents import READING, keep_piped
from nanocem.files import markdown_table, save_picture
from nanocem.hub import WEIGHTS_FILE, read_export, saved_config
from nanocem.measure import (
    NO_TARGET,
    TOKENS_AT_ONCE,
    Measured,
    Sequences,
    bits_per_byte,
    describe_source,
    loss_sums,
    perplexity,
    read_sequences,
)
from nanocem.runs import load_model, newest_run, read_config, read_result
from nanocem.same import minus_gradient, step_errors, take_steps
from nanocem.tokenizers import tokenizer_of

CHECKSUMS = ('val checksum', 'test checksum')  # of the data
# Options in which runs must agree if their losses are to be compared
MUST_AGREE = ('vocab_size', 'context_length', 'eval_tokens', 'test_tokens', *CHECKSUMS)


@dataclass
class EvaluateConfig(Measured):
    """A model, the text that it is evaluated on, and what to report."""
    out_dir: PathStr | None = None  # a run (its best.pt), a .pt or export; default: newest in out/
    steps: tuple[int, ...] = ()  # numbers of steps T to test, in place of the trained T
    energies: bool = False  # energies at steps 0 to 8, or to the largest of --steps
    compare: tuple[PathStr, ...] = ()  # folders of runs to compare: --compare=out/a,out/b

    def __post_init__(self) -> None:
        super().__post_init__()
        check(all(T >= 1 for T in self.steps), f'steps={self.steps}: expected 1, 2, 3, ...')


class Evaluated:
    """A run, and the sequences to evaluate it on: these are read when a report first needs them."""
    def __init__(self, options: EvaluateConfig):
        self.options = options
        self.path = options.out_dir or newest_run()
        self.model, self.state = load_model(self.path, options.device)
        self.tokenizer = tokenizer_of(self.state)

    @property
    def subject(self) -> str:
        source = describe_source(self.options, self.state)
        return f'{self.path}, step {self.state["step"]}; {source}'

    @cached_property
    def sequences(self) -> Sequences:
        length = self.model.cfg.context_length
        return read_sequences(self.options, self.state, self.tokenizer, length)


def cem_layers(model: Transformer) -> list[tuple[str, int, Any]]:
    """Return the sublayers that take steps down an energy, attention first: the kind of each (attn
    or mlp), the number of its block, and the sublayer."""
    found = []
    for kind in ('attn', 'mlp'):
        for n, block in enumerate(model.blocks, 1):
            sublayer = getattr(block, kind)
            if hasattr(sublayer, 'energy'):
                found.append((kind, n, sublayer))
    return found


# Loss

@torch.no_grad()
def evaluate_loss(model: Transformer, ids: Tensor, bos: int) -> list[float]:
    """Return the number of targets in sequences (n, length + 1), their summed loss in nats, and the
    summed loss of those that are not BOS."""
    device = model.embedding.device
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in ids.split(max(1, TOKENS_AT_ONCE // ids.shape[1])):
        x, y = batch[:, :-1].long().clamp(min=0), batch[:, 1:].long()
        sums += loss_sums(model(x.to(device))[0], y.to(device), bos)
    return sums.tolist()


def report_loss(run: Evaluated) -> str:
    """Format the loss with T as trained, or at each T of `steps`, as a table."""
    model, bos = run.model, run.tokenizer.bos
    ids, text_bytes, llama_tokens = run.sequences
    kinds = {kind for kind, *_ in cem_layers(model)}
    rows = []
    for T in run.options.steps or (None,):
        model.set_steps(**{f'{kind}_steps': T for kind in kinds})
        n_targets, nats, text_nats = evaluate_loss(model, ids, bos)
        loss = nats / n_targets
        row = {'T': str(T or 'as trained'), 'tokens': f'{n_targets:,.0f}',
               'nats per token': f'{loss:.4f}', 'perplexity': f'{perplexity(loss):.6g}'}
        if text_bytes:
            row['bits per byte'] = f'{bits_per_byte(text_nats, text_bytes):.4f}'
        if llama_tokens:
            row['perplexity per Llama token'] = f'{perplexity(text_nats / llama_tokens):.6g}'
        rows.append(row)
    text = markdown_table([*rows[0]], [[*row.values()] for row in rows])
    if text_bytes and run.options.text and not llama_tokens:
        text += ("\n\nFor perplexity per Llama token, as in results/, let $LLAMA_TOKENIZER name "
                 "Llama's tokenizer.model.")
    return text


# Energies

@torch.no_grad()
def descent(model: Transformer, x: Tensor, steps: int = 1) -> list[tuple]:
    """Measure on ids x (B, J) whether CEM sublayers descend. Return for each use of a sublayer,
    attention first, its name and what measure_steps returns."""
    # Run the model, and record the inputs of each use: a sublayer may be used several times
    uses: dict[Any, list[tuple]] = defaultdict(list)
    hook = register_module_forward_pre_hook(lambda module, inputs: uses[module].append(inputs))
    try:
        model.hidden(x)
    finally:
        hook.remove()
    found = []
    for kind, n, sublayer in cem_layers(model):
        for use, inputs in enumerate(uses[sublayer], 1):
            name = f'{kind} {n}, use {use}' if len(uses[sublayer]) > 1 else f'{kind} {n}'
            found.append((name, *measure_steps(sublayer, inputs, steps)))
    return found


def measure_steps(sublayer: Any, inputs: tuple, steps: int) -> tuple[float, float, list[float]]:
    """Return the cosine between a token's first step and minus the gradient of the energy, mean
    over tokens; the share of tokens whose energy the first step lowers; and the mean energies at
    steps 0 to `steps`."""
    states = take_steps(sublayer, inputs, steps)  # x_t for t from 0, (B, J, D) each
    h = sublayer.norm(inputs[0])
    # Compare the first step with the gradient at its beginning
    down = minus_gradient(sublayer, states[0], h)
    cosine = F.cosine_similarity(states[1] - states[0], down, dim=-1).mean()
    # Compute the energies along the steps, with the same context h
    energies = torch.stack([sublayer.energy(sublayer.norm(x_t), h) for x_t in states])
    share = (energies[1] < energies[0]).double().mean()
    return float(cosine), float(share), energies.mean(dim=(1, 2)).tolist()


def report_energies(run: Evaluated) -> str:
    """Format the mean energy at steps 0 to 8, or to the largest of `steps`, for each use of a CEM
    sublayer, and whether its first step descends. The picture shows each energy minus that at step
    0. Only about 4,096 tokens are read."""
    steps = max(run.options.steps, default=8)
    ids, *_ = run.sequences
    x = ids[:max(1, 4096 // ids.shape[1]), :-1].long()
    x = x[(x != NO_TARGET).all(dim=1)]  # leave out the last sequence of a text if it is padded
    found = descent(run.model, x.to(run.model.head.device), steps)
    header = ['energy at step', *map(str, range(steps + 1)), 'cosine', 'lowered']
    rows = []
    for name, cosine, share, energies in found:
        cells = [f'{energy:.4g}' for energy in energies]
        rows.append([name, *cells, f'{cosine:.2f}', f'{share:.0%}'])
    lines = ["cosine: between the first step and minus the energy's gradient, averaged over tokens",
             'lowered: the share of tokens whose energy the first step lowers']
    for name, error in step_errors(run.model).items():
        lines.append(f'{name}: in a small layer with random weights and no P, a step differs from '
                     f'minus the gradient by {error:.1g} of its norm')
    lines.append(draw_energies(run, {name: energies for name, *_, energies in found}))
    return '\n'.join([markdown_table(header, rows), '', *lines])


def draw_energies(run: Evaluated, found: dict[str, list[float]]) -> str:
    """Draw the energies of each sublayer. Return the picture's path, or what it needs."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return 'No picture: pip install matplotlib'
    figure = Figure((9, 3.5), layout='constrained')
    panels = dict(zip(('attn', 'mlp'), figure.subplots(1, 2), strict=True))
    for name, energies in found.items():
        axes = panels[name.split()[0]]
        axes.plot(np.subtract(energies, energies[0]), marker='o', ms=3, label=name)
        axes.set(xlabel='step', ylabel='energy minus that at step 0')
        axes.legend(fontsize=7)
    return save_picture(figure, 'energies', run.path, run.subject)


# Runs side by side

def compare_on_text(cfg: EvaluateConfig) -> str:
    """Format the bits per byte of runs and exports on a text, whatever their tokens, and how much
    higher they are than those of the last one. NaN if a tokenizer loses text."""
    rows, bits = [], []
    for folder in cfg.compare:
        run = Evaluated(replace(cfg, out_dir=folder))
        ids, text_bytes, _ = run.sequences
        n_targets, _, text_nats = evaluate_loss(run.model, ids, run.tokenizer.bos)
        bits.append(bits_per_byte(text_nats, text_bytes) if text_bytes else math.nan)
        rows.append([folder, f'{run.model.num_params():,}', f'{n_targets:,.0f}',
                     f'{bits[-1]:.4f}'])
    last = bits[-1]
    for row, of_run in zip(rows, bits, strict=True):
        row.append(f'{of_run / last - 1:+.1%}')
    header = ['run', 'parameters', 'tokens', 'bits per byte', f'over {cfg.compare[-1]}']
    return markdown_table(header, rows)


def config_of(folder: str) -> dict[str, Any]:
    """Return the config.json of a run, or what an export knows of it: its `train` is empty. Raises
    UserError."""
    if not os.path.isfile(f'{folder}/{WEIGHTS_FILE}'):
        return read_config(folder)
    state = read_export(folder)
    return {'train': {}, 'model': state['model_config'], 'data': state['data']}


def compare_runs(folders: Sequence[str]) -> str:
    """Format the results of runs and the options in which they differ. A line names what makes the
    losses incomparable. UserError if a folder has no run."""
    configs = [config_of(folder) for folder in folders]
    results, notes = compare_results(folders, configs)
    parts = [results]
    different = differing_options(folders, configs)
    if different:
        parts.append(markdown_table(['option', *folders], different))
    reasons = [name for name, *_ in different if name in MUST_AGREE]
    if reasons:
        notes.append(f'Losses cannot be compared: the runs differ in {", ".join(reasons)}.')
    if len({tuple(config['data'].get(name) for name in TOKENIZER_KEYS) for config in configs}) > 1:
        notes.append('Bits per byte of different tokenizers can be compared if the runs were '
                     'tested on the same text.')
    return '\n\n'.join([*parts, *notes])


def compare_results(folders: Sequence[str],
                    configs: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Format the results of runs, given their config.json. Return the table, and notes on results
    that do not count."""
    columns = {'parameters': ',', 'tokens': ',', 'val_bits_per_byte': ',.7g',
               'test_bits_per_byte': ',.7g', 'val_loss': ',.7g', 'test_loss': ',.7g',
               'seconds': ',.7g'}
    rows, notes = [], []
    for folder, config in zip(folders, configs, strict=True):
        # Before a run ends, its row has only the number of parameters
        with torch.device('meta'):
            result = {'parameters': Transformer(saved_config(config['model'])).num_params()}
        try:
            result |= read_result(folder, config)
        except UserError as error:
            notes.append(f'No result of {folder}: {error}.')
        cells = [format(result[name], spec) if result.get(name) else ''
                 for name, spec in columns.items()]
        rows.append([folder, *cells])
        if not config['train']:
            notes.append(f'{folder} is an export, without results: --text=FILE measures its loss.')
    return markdown_table(['run', *columns], rows), notes


def differing_options(folders: Sequence[str],
                      configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the options in which runs differ, given their config.json: each with its value in
    every run. The checksums of the data, and the text of model.py, count as options."""
    # Collect the options of each run
    all_options, texts = [], {}
    for folder, config in zip(folders, configs, strict=True):
        options = config['train'] | vars(saved_config(config['model']))
        options |= {name: config['data'].get(name) for name in CHECKSUMS}
        # Name each text of model.py by the first folder that has it: diff shows the difference
        path = Path(folder, 'model.py')  # an export of a plain Llama has none
        if path.exists():
            options['model.py'] = texts.setdefault(path.read_bytes(), str(path))
        all_options.append(options)
    # Compare those that all have: an older run lacks some
    shared = [name for name in all_options[0]
              if name != 'out_dir' and all(name in options for options in all_options)]
    rows = [[name, *(str(options[name]) for options in all_options)] for name in shared]
    return [row for row in rows if len(set(row[1:])) > 1]


# The command line

@command_line
def main(argv: list[str]) -> None:
    given = read_options(argv, EvaluateConfig)
    cfg = build(EvaluateConfig, given)
    cfg.check_given(given)
    if cfg.text:  # standard input is read once, for all models
        cfg.text = keep_piped(cfg.text)
    if cfg.compare:
        allowed = {'compare', 'text', 'device', *READING}
        others = ', '.join(name for name in given if name not in allowed)
        check(not others, f'--compare takes only folders and --text, not {others}')
        if cfg.text:
            print(f'Bits per byte on {cfg.text}\n\n{compare_on_text(cfg)}', flush=True)
        else:
            print(f'Runs\n\n{compare_runs(cfg.compare)}', flush=True)
        return
    run = Evaluated(cfg)
    if cfg.steps or cfg.energies:
        check(bool(cem_layers(run.model)),
              f'{run.path} is all Llama: --steps and --energies are for CEM sublayers')
    if cfg.energies:  # before the losses: report_loss changes the model's T
        print(f'{run.subject}\n\n{report_energies(run)}', flush=True)
    if cfg.steps or not cfg.energies:
        print(f'{run.subject}\n\n{report_loss(run)}', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])

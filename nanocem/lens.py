"""What evaluate.py shows: losses by position, energies, attention maps, the history of a run."""
import contextlib
import math
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import build, check_values
from model import Attention, ModelConfig, Transformer
from nanocem.energy import energies_along
from nanocem.fast import LOGITS_AT_ONCE
from nanocem.files import read_json, read_json_lines
from nanocem.runs import read_config

# Loss

def bytes_of_tokens(tokenizer: Any) -> Tensor:
    """How many bytes of text each token spells, (vocabulary,): BOS and its like none."""
    if tokenizer.name == 'byte':
        return torch.tensor([1] * 256 + [0])
    if tokenizer.name == 'gpt2':
        decode = tokenizer.bpe.decode_single_token_bytes
        return torch.tensor([len(decode(i)) for i in range(tokenizer.bos)] + [0])
    spelled = []
    model = tokenizer.model
    for i in range(tokenizer.vocab_size):
        if model.is_byte(i):
            spelled.append(1)
        elif model.is_control(i) or model.is_unknown(i):
            spelled.append(0)
        else:
            # SentencePiece's sign for a space is three bytes long
            spelled.append(len(model.id_to_piece(i).replace('\u2581', ' ').encode()))
    return torch.tensor(spelled)


def batches(sequences: list[Tensor], vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (B, J) of sequences of J + 1 tokens, those of one length together."""
    size = max(1, min(32, LOGITS_AT_ONCE // (len(sequences[0]) * vocab_size)))
    for length in sorted({len(s) for s in sequences}, reverse=True):
        same = torch.stack([s for s in sequences if len(s) == length])
        for block in same.split(size):
            yield block[:, :-1], block[:, 1:]


class Measured(NamedTuple):
    """Losses in nats."""
    tokens: int
    loss: float  # a token
    bits_per_byte: float  # of the tokens that spell text: comparable across tokenizers
    by_position: np.ndarray  # loss at positions 1 to J of the context

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def measure(model: Transformer, sequences: list[Tensor], spelled: Tensor) -> Measured:
    """The loss of every target, what stands before it in its own sequence being its context. The
    first sequence is a longest one; `spelled`: the bytes of each token."""
    device = model.embedding.device
    J = len(sequences[0]) - 1
    nats, count = np.zeros(J), np.zeros(J)
    text_nats, text_bytes = 0.0, 0
    for x, y in batches(sequences, model.cfg.vocab_size):
        logits = model(x.to(device))[0].float().flatten(0, 1)
        losses = F.cross_entropy(logits, y.to(device).flatten(), reduction='none')
        losses = losses.view(y.shape).cpu().double()  # (B, J)
        nats[:y.shape[1]] += losses.sum(dim=0).numpy()
        count[:y.shape[1]] += len(y)
        text_nats += float(losses[spelled[y] > 0].sum())
        text_bytes += int(spelled[y].sum())
    bits = text_nats / math.log(2) / text_bytes if text_bytes else math.nan
    return Measured(int(count.sum()), float(nats.sum() / count.sum()), bits, nats / count)


# Energies and attention maps

@torch.no_grad()
def energies(model: Transformer, x: Tensor, steps: int) -> dict[str, np.ndarray]:
    """The energy of every CEM sublayer at its steps 0 to `steps`, mean over the tokens x (B, J);
    what a sublayer is given comes from the model as it stands."""
    given: dict[Any, tuple[Any, ...]] = {}
    layers = {f'{kind} {n}': getattr(block, kind) for kind in ('attn', 'mlp')
              for n, block in enumerate(model.blocks, 1) if getattr(block, kind).cem}
    hooks = [layer.register_forward_pre_hook(lambda layer, args: given.update({layer: args}))
             for layer in layers.values()]
    model.hidden(x)
    for hook in hooks:
        hook.remove()
    return {name: energies_along(layer, *given[layer], steps=steps).mean(dim=(1, 2)).cpu().numpy()
            for name, layer in layers.items()}


@torch.no_grad()
def attention_maps(model: Transformer, idx: Tensor) -> list[Tensor]:
    """alpha_ijk of ids (1, J), at each step of each layer: a (T, K, J, J) a layer."""
    maps: list[list[Tensor]] = [[] for _ in model.blocks]

    def keep(n: int, *given: Tensor) -> Tensor:
        scores = Attention.scores(model.blocks[n].attn, *given)
        maps[n].append(scores.softmax(dim=-1)[0].cpu())
        return scores

    # the readable way alone asks for all scores of a step
    attn_impl, model.cfg.attn_impl = model.cfg.attn_impl, 'readable'
    for n, block in enumerate(model.blocks):
        block.attn.scores = partial(keep, n)
    try:
        model.hidden(idx)
    finally:
        model.cfg.attn_impl = attn_impl
        for block in model.blocks:
            del block.attn.scores
    return [torch.stack(steps) for steps in maps]


def moved(maps: Tensor) -> Tensor:
    """The share of each head's attention that goes elsewhere with each further step, mean over
    queries: (T, K, J, J) -> (T - 1, K)."""
    return maps.diff(dim=0).abs().sum(dim=-1).mean(dim=-1) / 2


# Runs

class History(NamedTuple):
    """A run from its log: an entry a logged step."""
    tokens: np.ndarray  # seen in training so far
    flops: np.ndarray  # spent on them
    hours: np.ndarray  # spent in steps
    losses: np.ndarray  # training, nats a token
    val_loss: float  # the last; nan where there is none yet
    test_loss: float
    parameters: int


def is_number(value: Any) -> bool:
    """A log's nan is null, and a damaged one may hold anything."""
    return type(value) in (int, float)


def read_history(out_dir: str) -> History | None:
    """None where there is no run, or none that has logged a step."""
    config, lines = read_config(out_dir), []
    with contextlib.suppress(OSError):
        lines = read_json_lines(os.path.join(out_dir, 'log.jsonl'))
    needed = ('tokens', 'tokens_per_s', 'loss')
    steps = [line for line in lines if all(is_number(line.get(name)) for name in needed)]
    if config is None or not steps:
        return None
    with torch.device('meta'):
        given = check_values(config['model'], f'{out_dir}/config.json', ModelConfig)
        model = Transformer(build(ModelConfig, given))
    tokens = np.array([line['tokens'] for line in steps], dtype=float)
    seconds = np.diff(tokens, prepend=0) / [line['tokens_per_s'] for line in steps]
    val_losses = [line['val_loss'] for line in lines if is_number(line.get('val_loss'))]
    test_loss = (read_json(os.path.join(out_dir, 'result.json')) or {}).get('test_loss')
    return History(
        tokens, tokens * model.flops_per_token(), np.cumsum(seconds) / 3600,
        np.array([line['loss'] for line in steps]), [math.nan, *val_losses][-1],
        test_loss if is_number(test_loss) else math.nan, model.num_params())

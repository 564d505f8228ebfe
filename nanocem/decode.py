"""Generation with a cache: D numbers a token and layer for CEM, half of Llama's (with a diagonal
and rope, or the exact update, 2 D)."""
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import fail
from model import position_tables
from nanocem.fast import heads, merge


class Cache:
    """What decoding keeps of the past, in buffers (B, max_length, D): keys for CEM, or h where a
    diagonal reads it (W_K is then absorbed into query and output), or both where keys are needed
    too; keys and values for Llama. Each forward pass calls `begin`, and then `update` once for each
    attention, in their order."""
    def __init__(self, max_length: int):
        self.max_length = max_length
        self.past = self.length = 0  # tokens before this forward pass, and with it
        self.buffers: list[Tensor] = []
        self.next = 0  # the buffer that the pass comes to next

    def begin(self, tokens: int) -> int:
        """A pass of so many new tokens; returns how many stand before them."""
        self.past, self.length, self.next = self.length, self.length + tokens, 0
        return self.past

    def update(self, attn: Any, h: Tensor, k: Tensor, v: Tensor,
               ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """h, k, v of the new tokens -> those of past and new; k and v are None where W_K is
        absorbed."""
        diagonal = attn.kq_diag is not None
        if diagonal:
            h = self.append(h)
        if diagonal and not attn.rope and not attn.cfg.exact_update:
            return (h, k, v) if self.past == 0 else (h, None, None)
        k = heads(self.append(merge(k)), attn.K)
        if attn.cem:
            return h, k, k
        return h, k, heads(self.append(merge(v)), attn.K)

    def append(self, new: Tensor) -> Tensor:
        """Store `new` (B, I, D) after the past and return both, (B, length, D)."""
        new = to_autocast_dtype(new)
        if self.next == len(self.buffers):
            B, _, D = new.shape
            self.buffers.append(new.new_empty(B, self.max_length, D))
        buffer = self.buffers[self.next]
        self.next += 1
        buffer[:, self.past:self.length] = new
        return buffer[:, :self.length]

    def floats_per_token(self) -> int:
        return sum(buffer.shape[-1] for buffer in self.buffers)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in the precision of autocast's matrix products, where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@contextlib.contextmanager
def weights_at_hand(model: Any) -> Iterator[None]:
    """Inside it, what no token changes is made but once: every sublayer's output weight, P folded
    in, and the bias of a single token, which depends on distances alone."""
    past = model.cfg.context_length - 1
    last = position_tables(model.cfg, model.embedding.new_empty(1, 1, 0), past)
    made = [(block, block.attn.bias(last), to_autocast_dtype(block.attn.output_weight()),
             to_autocast_dtype(block.mlp.output_weight())) for block in model.blocks]
    for block, row, attn_out, mlp_out in made:
        block.attn.bias = partial(bias_at_hand, block.attn.bias, row)
        block.attn.output_weight = lambda weight=attn_out: weight
        block.mlp.output_weight = lambda weight=mlp_out: weight
    try:
        yield
    finally:
        for block in model.blocks:
            del block.attn.bias, block.attn.output_weight, block.mlp.output_weight


def bias_at_hand(bias: Any, last: Tensor, pos: Any) -> Tensor:
    """The bias of one token is the end of that of the last one that fits."""
    I, J = pos.mask.shape
    return last[..., -J:] if I == 1 else bias(pos)


@torch.no_grad()
def generate(model: Any, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
             top_k: int | None = None, generator: torch.Generator | None = None,
             use_cache: bool = True, show: Callable[[Tensor], None] | None = None) -> Tensor:
    """Continue idx (B, J) to (B, J + max_new_tokens). Temperature 0 takes the likeliest token. When
    the context is full, it starts again from the last half of it. `show` gets the tokens of each
    step, (B, 1). ValueError for a temperature below 0 or a top_k below 1."""
    if not temperature >= 0 or (top_k is not None and top_k < 1):
        fail(f'temperature={temperature}, top_k={top_k}: expected at least 0, and 1')
    length = model.cfg.context_length
    start = max(0, idx.shape[1] - length)  # the context's first token
    cache = None
    with weights_at_hand(model):
        for _ in range(max_new_tokens):
            if idx.shape[1] - start > length:
                start = idx.shape[1] - max(1, length // 2)
                cache = None
            if use_cache and cache is None:
                cache = Cache(length)
            seen = cache.length if cache else 0
            hidden = model.hidden(idx[:, start + seen:], cache)
            logits = F.linear(hidden[:, -1], model.head).float()  # (B, vocabulary)
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -torch.inf)
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)
            else:
                p = (logits / temperature).softmax(dim=-1)
                new = torch.multinomial(p, 1, generator=generator)
            idx = torch.cat([idx, new], dim=1)
            if show is not None:
                show(new)
    return idx

"""Generation with a cache: D numbers a token and layer for CEM, half of Llama's (with rope and a
diagonal 2 D)."""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import position_tables
from nanocem.fast import heads, merge


class Cache:
    """What decoding keeps of the past, in buffers (B, max_length, D) filled up to `length`: keys
    for CEM, or h where a diagonal reads it (W_K is then absorbed into query and output), or both
    with rope; keys and values for Llama. And what a sublayer need make but once."""
    def __init__(self, max_length: int):
        self.max_length = max_length
        self.length = 0
        self.buffers: dict[tuple[Any, int, str], Tensor] = {}
        self.made: dict[Any, MadeOnce] = {}

    def context(self, attn: Any, use: int, h: Tensor, pos: Any,
                ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """h, k, v of past and new tokens, from the new tokens' h; k and v are None where W_K is
        absorbed. use: of a reused Llama sublayer, which keeps keys of each."""
        diagonal = attn.kq_diag is not None
        h_new = h
        if diagonal:
            h = self.append((attn, use, 'h'), h)
            if not attn.rope and self.length > 0:
                return h, None, None
        k = attn.project(h_new, attn.W_K, pos)
        if attn.rope or not diagonal:
            k = heads(self.append((attn, use, 'k'), merge(k)), attn.K)
        if attn.cem:
            return h, k, k
        v = attn.project(h_new, attn.W_V)
        return h, k, heads(self.append((attn, use, 'v'), merge(v)), attn.K)

    def append(self, name: tuple[Any, int, str], new: Tensor) -> Tensor:
        """Store `new` (B, I, D) behind the past and return both, (B, length + I, D)."""
        new = as_multiplied(new)
        B, I, D = new.shape
        if name not in self.buffers:
            self.buffers[name] = new.new_empty(B, self.max_length, D)
        self.buffers[name][:, self.length:self.length + I] = new
        return self.buffers[name][:, :self.length + I]

    def of(self, sublayer: Any) -> 'MadeOnce':
        if sublayer not in self.made:
            self.made[sublayer] = MadeOnce(sublayer, self.max_length)
        return self.made[sublayer]

    def floats_per_token(self) -> int:
        return sum(buffer.shape[-1] for buffer in self.buffers.values())


class MadeOnce:
    """A sublayer's output weight and bias, for as long as its weights stay."""
    def __init__(self, sublayer: Any, max_length: int):
        self.sublayer, self.max_length = sublayer, max_length
        self.W_out: Tensor | None = None
        self.last_row: Tensor | None = None  # the bias of the last token that fits, (K or 1, J)

    def output_weight(self) -> Tensor:
        """P folded in."""
        if self.W_out is None:
            self.W_out = as_multiplied(self.sublayer.output_weight())
        return self.W_out

    def bias(self, pos: Any) -> Tensor:
        """Attention.bias. It depends on distances alone: one token's is the end of the last's."""
        I, J = pos.mask.shape
        if I > 1:
            return self.sublayer.bias(pos)
        if self.last_row is None:
            x = pos.mask.new_empty(1, 1, 0)
            last = position_tables(self.sublayer.cfg, x, past=self.max_length - 1)
            self.last_row = self.sublayer.bias(last)
        return self.last_row[..., -J:]


def as_multiplied(x: Tensor) -> Tensor:
    """x in the precision of autocast's matrix products, where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@torch.no_grad()
def generate(model: Any, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
             top_k: int | None = None, generator: torch.Generator | None = None,
             use_cache: bool = True) -> Tensor:
    """Continue idx (B, J) to (B, J + max_new_tokens). Temperature 0 takes the likeliest token. When
    the context is full, it starts again from the last half of it."""
    length = model.cfg.context_length
    start = max(0, idx.shape[1] - length)  # the context's first token
    cache = None
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
    return idx

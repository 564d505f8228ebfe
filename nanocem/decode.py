"""
Generate text with a KV cache. For each token and layer it stores this many numbers:

    Llama                                       2 D    keys and values
    CEM                                           D    keys, which are the values
    CEM with the key-query diagonal               D    h
    CEM with the diagonal and one of these:
        RoPE, exact_update                      2 D    h and keys
"""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import check


class Cache:
    """Store what the table above says in buffers (B, max_length, D), and the output weights of CEM,
    which must not change meanwhile. Each forward pass calls `begin`, then `update` for each
    attention, always in the same order."""
    def __init__(self, max_length: int):
        self.max_length = max_length
        self.past = self.length = 0  # number of tokens before and after this forward pass
        self.buffers: list[Tensor] = []
        self.next = 0  # index of the buffer that `append` fills next
        self.weights: dict[Any, Tensor] = {}

    def begin(self, idx: Tensor) -> int:
        """Begin a pass over new ids (B, I), and return how many tokens precede them. UserError if
        they do not fit, or have another batch size."""
        fits = not self.buffers or len(idx) == len(self.buffers[0])
        check(fits and self.length + idx.shape[1] <= self.max_length,
              f'ids {tuple(idx.shape)} do not fit: {self.length} of {self.max_length} are taken')
        self.past = self.length
        self.length += idx.shape[1]
        self.next = 0
        return self.past

    def update(self, attn: Any, h: Tensor, k: Tensor, v: Tensor,
               ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Insert the new h (B, I, D) and k, v (B, K, I, R), and return those of all tokens so far.
        Without a diagonal h stays the new one. If h alone is stored, k and v are None after the
        first pass."""
        cfg = attn.cfg
        if cfg.kq_diag != 'none':
            h = self.append(h)
            if cfg.positions == 'alibi' and not cfg.exact_update:  # store h alone
                return (h, k, v) if self.past == 0 else (h, None, None)
        k = attn.split_heads(self.append(attn.merge_heads(k)))
        if cfg.attn == 'cem':  # values are keys
            return h, k, k
        v = attn.split_heads(self.append(attn.merge_heads(v)))
        return h, k, v

    def append(self, new: Tensor) -> Tensor:
        """Append new (B, I, D) to the next buffer, and return all that it holds, (B, length, D)."""
        if self.next == len(self.buffers):
            B, _, D = new.shape
            self.buffers.append(new.new_empty(B, self.max_length, D))
        buffer = self.buffers[self.next]
        self.next += 1
        buffer[:, self.past:self.length] = new
        return buffer[:, :self.length]

    def output_weight(self, sublayer: Any) -> Tensor:
        """Return a CEM sublayer's output weight, which is computed once for all tokens."""
        if sublayer not in self.weights:
            self.weights[sublayer] = sublayer.output_weight()
        return self.weights[sublayer]

    def floats_per_token(self) -> int:
        return sum(buffer.shape[-1] for buffer in self.buffers)


@torch.no_grad()
def generate(model: Any, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
             top_k: int | None = None, generator: torch.Generator | None = None,
             use_cache: bool = True) -> Tensor:
    """Continue ids (B, J), J > 0, to (B, J + max_new_tokens). Temperature 0 chooses the likeliest
    token. When the context is full, its last half becomes the context."""
    length = model.cfg.context_length
    start = max(0, idx.shape[1] - length)  # the first token of the context
    cache = Cache(length)
    for _ in range(max_new_tokens):
        if idx.shape[1] - start > length:  # the context is full
            start = idx.shape[1] - max(1, length // 2)
            cache = Cache(length)
        # Compute the logits of the next token from the tokens that are not in the cache
        new = idx[:, start + cache.length:]
        hidden = model.hidden(new, cache if use_cache else None)
        logits = F.linear(hidden[:, -1], model.head).float()  # (B, vocabulary)
        if top_k is not None:  # keep the top_k largest logits
            kth_largest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < kth_largest, -torch.inf)
        # Choose or sample the next token, and append it
        if temperature == 0:
            next_ids = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
        else:
            p = (logits / temperature).softmax(dim=-1)
            next_ids = torch.multinomial(p, 1, generator=generator)
        idx = torch.cat([idx, next_ids], dim=1)
    return idx

"""
A KV cache for a model of model.py. This file needs torch alone.

For each token and layer the cache stores this many numbers:

    Llama                                       2 D    keys and values
    CEM                                           D    keys, which are the values
    CEM with the key-query diagonal               D    h
    CEM with the diagonal and one of these:
        RoPE, exact_update                      2 D    h and keys
    the match bias: CEM as with the diagonal; Llama 3 D, h as well
    key_shift=half                                     the last key, once a sublayer

It is plugged in where trial.py finds that it computes what the model's own lines do.

Shapes: B batch, I queries, J keys (J = I, or more), D width, K heads, R = D / K.
"""
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import choose_attention, is_plug, sdpa
from .trial import compare, different_layers, find_far_error, find_other_positions, most_error

try:
    from .model import make_positions  # in an exported folder
except ImportError:
    from model import make_positions


class Cache:
    """Let a model read each id once, while its weights stay the same:

        with Cache(model):
            model.generate(idx, 100)

    It is a memo: the same call gives the same logits. Ids that do not begin with those read before
    are read from the start, and so are all with another T."""
    def __init__(self, model: Any):
        self.model = model
        self.ids: Tensor | None = None  # a copy of the ids read so far, (B, length)
        self.steps: list[int | None] = []  # T of all sublayers as they were read
        # How many of them were read before this pass; None in passes that are not the cache's
        self.past: int | None = None
        # One or two buffers for each time that an attention sublayer runs in a pass
        self.buffers: list[Tensor] = []
        self.next_buffer = 0
        self.last_keys: list[Tensor] = []  # the same for the last key, before it is shifted
        self.next_key = 0
        self.new_k: Tensor | None = None  # the keys of the sublayer that runs
        self.all_h: Tensor | None = None  # its h of all ids, with the match bias
        self.context: tuple = ()  # its k, v and h of all ids
        self.replaced: list[tuple] = []  # (object, name, what was set on it) of each method
        self.agrees: bool | None = None  # with the model's own lines; None: not tried yet

    def __enter__(self) -> 'Cache':
        if self.agrees is None:
            wrong = self.find_error()
            self.agrees = not wrong
            if wrong:
                print(f'Warning: the cache {wrong}: it is not used', file=sys.stderr)
        if self.agrees:
            self.plug()
        return self

    def __exit__(self, *error: Any) -> None:
        self.unplug()

    def plug(self) -> None:
        self.ids, self.buffers, self.last_keys = None, [], []
        plugs = {**vars(self.model).get('plugs', {}), 'next_logits': Cache.next_logits}
        methods = [(self.model, 'next_logits', self.next_logits), (self.model, 'plugs', plugs)]
        for block in self.model.blocks:
            attn = block.attn
            methods.append((attn, 'attend',
                            partial(self.attend, attn, attn.attend, self.own_attend(attn))))
            if attn.cfg.key_shift != 'none':
                methods.append((attn, 'shift', partial(self.shift, attn.shift)))
            if attn.cfg.match_bias != 'none':
                methods.append((attn, 'add_match', partial(self.add_match, attn.add_match)))
            for sublayer in (block.attn, block.mlp):
                if hasattr(sublayer, 'output_weight'):  # with P folded in, once for all ids
                    W = sublayer.output_weight().detach()
                    methods.append((sublayer, 'output_weight', lambda W=W: W))
        # Replace these methods, and remember what was set on the objects before: None or a plug
        self.replaced = [(module, name, vars(module).get(name)) for module, name, _ in methods]
        for method in methods:
            setattr(*method)

    def unplug(self) -> None:
        for module, name, method in self.replaced:
            delattr(module, name)
            if method is not None:
                setattr(module, name, method)
        self.replaced = []
        self.new_k, self.all_h, self.context = None, None, ()

    @torch.no_grad()
    def find_error(self) -> str:
        """Compare logits with the cache, for a few random ids, with those without it. Return a
        message if they differ by more than rounding, or ''."""
        model = self.model
        if wrong := find_other_positions(model):
            return wrong
        for attn in different_layers(model):
            plugged = 'attend' in vars(model).get('plugs', {})
            by_sdpa = plugged and choose_attention(attn, model.head.device) == 'sdpa'
            if wrong := find_far_error(attn, partial(attend_last, by_sdpa), attn.W_Q.dtype):
                return wrong
        W, length = model.head, min(6, model.cfg.context_length)
        generator = torch.Generator().manual_seed(0)  # does not disturb the global one
        idx = torch.randint(len(W), (1, length), generator=generator).to(W.device)
        parts = [n for n in (3, 4, 6) if n <= length]  # a prompt, one new id, two new ids

        def logits() -> dict[str, Tensor]:
            return {f'logit after {n} ids': model.next_logits(idx[:, :n]) for n in parts}

        def with_cache() -> dict[str, Tensor]:
            self.plug()
            try:
                return logits()
            finally:
                self.unplug()

        return compare(with_cache, logits, most_error(W.device, W.dtype))

    def next_logits(self, idx: Tensor) -> Tensor:
        """Return what the model's own next_logits does, for ids (B, J)."""
        past = 0 if self.ids is None else self.ids.shape[1]
        steps = [getattr(sublayer, 'T', None) for block in self.model.blocks
                 for sublayer in (block.attn, block.mlp)]
        # Compare all ids at each token: the cache is never wrong
        if (past == 0 or past >= idx.shape[1] or steps != self.steps
                or not torch.equal(self.ids, idx[:, :past])):
            past, self.buffers, self.last_keys = 0, [], []
        # Nothing is read until the pass ends: one that is interrupted leaves buffers half filled
        self.ids, self.past, self.next_buffer, self.next_key = None, past, 0, 0
        try:
            x = self.model.hidden(idx[:, past:], past)
        finally:
            self.past = None
        self.ids, self.steps = idx.clone(), steps  # the caller may change idx in place
        return F.linear(x[:, -1], self.model.head).float()

    def own_attend(self, attn: Any) -> Callable:
        """Return what attends with any number of queries: sdpa if it is plugged in, or else the
        layer's own lines. Other plugs may need the queries of all keys."""
        if not is_plug(self.model, 'attend', attn):
            return attn.attend
        if choose_attention(attn, self.model.head.device) == 'sdpa':
            return partial(sdpa, attn)
        return partial(type(attn).attend, attn)

    def attend(self, attn: Any, replaced: Callable, own: Callable, q: Tensor, k: Tensor, v: Tensor,
               pos: Any, u: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        """Insert the new k, v (B, K, I, R) or h (B, I, D), and attend to those of all ids.
        `replaced` is the method that this one takes the place of, and `own` what own_attend
        returns."""
        if self.past is None:
            return replaced(q, k, v, pos, u, h)
        # The steps of one sublayer pass the same keys; other keys are those of the next one
        if k is not self.new_k:
            self.new_k = k
            self.context = self.insert(attn, k, v, h)
        if self.past == 0:  # k and v are those of all ids
            return replaced(q, k, v, pos, u, h)
        all_k, all_v, all_h = self.context
        if attn.cfg.attn == 'cem' and v is not k:  # the exact update attends to h, too
            all_v = all_h[:, None]
        return attend_to_stored(attn, own, q, all_k, all_v, pos, u, all_h)

    def shift(self, replaced: Callable, k: Tensor) -> Tensor:
        """Shift new keys (B, K, I, R), the first of which follows the last key of the last pass."""
        if self.past is None:
            return replaced(k)
        n, last = self.next_key, k[:, :, -1:]
        self.next_key += 1
        if self.past == 0:
            self.last_keys.append(last)
            return replaced(k)
        before, self.last_keys[n] = self.last_keys[n], last
        return replaced(torch.cat([before, k], dim=2))[:, :, 1:]

    def add_match(self, replaced: Callable, h: Tensor, pos: Any) -> Any:
        """Insert the new h (B, I, D), and compare it with those of all ids."""
        if self.past is None:
            return replaced(h, pos)
        self.all_h = self.append(h)
        return replaced(self.all_h, pos)

    def insert(self, attn: Any, k: Tensor, v: Tensor, h: Tensor | None) -> tuple:
        """Insert what the table above says. Return k, v and h of all ids. If h alone is stored, k
        and v are None."""
        cfg = attn.cfg
        if cfg.match_bias != 'none':  # add_match has inserted it
            h = self.all_h
        elif cfg.kq_diag != 'none':
            h = self.append(h)
        if stores_h_alone(cfg):
            return None, None, h
        all_k = attn.split_heads(self.append(attn.merge_heads(k)))
        if cfg.attn == 'cem':  # values are keys
            return all_k, all_k, h
        return all_k, attn.split_heads(self.append(attn.merge_heads(v))), h

    def append(self, new: Tensor) -> Tensor:
        """Append new (B, I, D) to the next buffer, and return all that it holds, (B, J, D)."""
        B, I, D = new.shape
        end = self.past + I
        if self.next_buffer == len(self.buffers):
            length = max(end, self.model.cfg.context_length)
            self.buffers.append(new.new_empty(B, length, D))
        buffer = self.buffers[self.next_buffer]
        if end > buffer.shape[1]:  # a text longer than the context: double the buffer, or more
            buffer = torch.cat([buffer, buffer.new_empty(B, end, D)], dim=1)
            self.buffers[self.next_buffer] = buffer
        self.next_buffer += 1
        buffer[:, self.past:end] = new
        return buffer[:, :end]

    def floats_per_token(self) -> int:
        """Return how many numbers are stored for a token, as in the table above, in all layers."""
        return sum(buffer.shape[-1] for buffer in self.buffers)


def attend_to_stored(attn: Any, own: Callable, q: Tensor, k: Tensor | None, v: Tensor | None,
                     pos: Any, u: Tensor | None, h: Tensor | None) -> Tensor:
    """Attend to k, v and h of all ids by `own`. k and v are None if h alone is stored. Returns
    (B, K, I, R)."""
    return attend_to_h(attn, q, u, h, pos) if k is None else own(q, k, v, pos, u, h)


def stores_h_alone(cfg: Any) -> bool:
    """Return whether the cache holds h and no keys."""
    needs_h = cfg.attn == 'cem' and (cfg.kq_diag != 'none' or cfg.match_bias != 'none')
    return needs_h and cfg.positions == 'alibi' and not cfg.exact_update


def attend_last(by_sdpa: bool, attn: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor,
                h: Tensor) -> Tensor:
    """Attend with the last query to a stored context, as a cache of this layer does."""
    own = partial(sdpa, attn) if by_sdpa else attn.attend
    pos = attn.add_match(h, make_positions(attn.cfg, h[:, -1:], h.shape[1] - 1))
    if stores_h_alone(attn.cfg):
        k = v = None
    return attend_to_stored(attn, own, q[:, :, -1:], k, v, pos, u[:, -1:], h)


def attend_to_h(attn: Any, q: Tensor, u: Tensor, h: Tensor, pos: Any) -> Tensor:
    """Attend without keys, since k_j . q_i = h_j . (W_K^T q_i): the cache stores h alone. The
    queries of all heads are rows of one matrix, so that h is read once. Returns (B, K, I, R)."""
    I = q.shape[2]
    W_K = attn.W_K.unflatten(0, (attn.K, -1))  # (K, R, D)
    # With key_shift=half the first half of a query meets h_(j-1), the second half h_j
    halves = [W_K] if attn.cfg.key_shift == 'none' else list(W_K.chunk(2, dim=1))
    parts = (q / attn.tau).split([W.shape[1] for W in halves], dim=-1)
    queries = [part @ W for part, W in zip(parts, halves, strict=True)]  # (B, K, I, D) each
    if attn.cfg.kq_diag != 'none':
        queries[-1] = queries[-1] + attn.scaled_diagonal(u)
    products = (torch.cat(queries, dim=1).flatten(1, 2) @ h.mT).unflatten(1, (-1, I))
    *before, a = products.split(attn.K, dim=1)  # (B, K, I, J)
    for shifted in before:
        a = a + F.pad(shifted, (1, -1))
    alpha = (a + attn.bias(pos)).softmax(dim=-1).type_as(h)
    # sum_j alpha_ij h_(j-1) is sum_j alpha_i(j+1) h_j
    weights = [F.pad(alpha, (-1, 1)) for _ in before] + [alpha]
    sums = (torch.cat(weights, dim=1).flatten(1, 2) @ h).unflatten(1, (-1, I)).split(attn.K, dim=1)
    return torch.cat([x @ W.mT for x, W in zip(sums, halves, strict=True)], dim=-1)

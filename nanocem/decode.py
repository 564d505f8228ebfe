"""
Plug what reading and writing text need into a model of model.py: attention that keeps few scores
in memory, and a KV cache. This file needs torch alone, and an export has it beside model.py.

For each token and layer the cache stores this many numbers:

    Llama                                       2 D    keys and values
    CEM                                           D    keys, which are the values
    CEM with the key-query diagonal               D    h
    CEM with the diagonal and one of these:
        RoPE, exact_update                      2 D    h and keys

A plug takes the place of a method on one object. It is a functools.partial, which torch.save and
deepcopy can copy. It is tried first on random inputs: if it does not compute what the lines of
model.py do, or those of whoever edited them, a line says so and those lines stay.

Shapes: B batch, I queries, J keys (J = I, or more with a cache), D width, K heads, R = D / K.
"""
import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from .model import make_positions  # in an exported folder
except ImportError:
    from model import make_positions

SHORT_CONTEXT = 256  # up to here, blockwise attention compiled for a CPU is faster than sdpa
BLOCK = 64  # the smallest block of queries in blockwise attention
# Largest error of a row in units of the dtype's epsilon, relative to its norm plus a typical row's.
# Correct kernels reach 2; a result that is wrong altogether has 128 in bfloat16. Of more precise
# numbers so many are allowed that the rounding of long sums is no error.
MOST_ERROR, MOST_ERROR_PRECISE = 8, 1000


# Attention to whole sequences, I = J

def blockwise(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None = None,
              h: Tensor | None = None) -> Tensor:
    """Attend as model.py does, in at most four blocks of queries. A block leaves out the keys after
    it, so four blocks compute 5/8 of all scores. Returns (B, K, I, R)."""
    I = q.shape[2]
    size = max(BLOCK, math.ceil(I / 4))
    outputs = []
    for begin in range(0, I, size):
        end = min(begin + size, I)
        block = slice(begin, end)
        # A copy of the named tuple, with these positions alone
        block_pos = pos._replace(distance=pos.distance[block, :end], mask=pos.mask[block, :end])
        u_and_h = (None, None) if u is None else (u[:, block], h[:, :end])
        a = attn.scores(q[:, :, block], k[:, :, :end], block_pos, *u_and_h)  # (B, K, size, end)
        alpha = a.softmax(dim=-1).type_as(v)
        outputs.append(alpha @ v[:, :, :end])
    return torch.cat(outputs, dim=2)


def sdpa(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None = None,
         h: Tensor | None = None) -> Tensor:
    """Attend with torch's fused attention, whose mask is causal, or the biases: (B, K, I, R). On a
    CPU it has no second derivatives."""
    I, R = q.shape[2:]
    bias = attn.bias(pos)
    # Without a bias, torch's causal mask suits a whole sequence, and a single query needs none. An
    # edited bias is no longer the mask itself
    if not has_bias(attn) and bias is pos.mask and I in (1, k.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, scale=1 / attn.tau, is_causal=I > 1)
    if attn.cfg.kq_diag != 'none':
        bias = bias + attn.scaled_diagonal(u) @ h[:, None].mT
    # With a bias, the fused kernel needs widths that are multiples of 8
    pad = (8 - R % 8) % 8
    if pad > 0:
        q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=1 / attn.tau)
    return o[..., :R]


def has_bias(attn: Any) -> bool:
    """Return whether something but the causal mask is added to the products of queries and keys."""
    return attn.cfg.positions == 'alibi' or attn.cfg.kq_diag != 'none'


def choose_attention(attn: Any, device: torch.device, compiled: bool = False) -> str:
    """Return which of readable, blockwise and sdpa is the fastest on this device."""
    if attn.cfg.exact_update:  # it attends to h, whose width is D, a second time
        return 'readable'
    # On a CPU torch's fused attention has no backward pass for a bias. Without a bias it is the
    # fastest, unless blockwise attention is compiled for a short context
    compiled_and_short = compiled and attn.cfg.context_length <= SHORT_CONTEXT
    if device.type == 'cuda' or not (has_bias(attn) or compiled_and_short):
        return 'sdpa'
    return 'blockwise'


def automatic(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor | None = None,
              h: Tensor | None = None) -> Tensor:
    """Attend in the fastest of these ways. A compiled model runs a smaller last batch uncompiled,
    and there another way can be the fastest: so the choice is made at each call."""
    chosen = choose_attention(attn, q.device, torch.compiler.is_compiling())
    attend = {'readable': type(attn).attend, 'blockwise': blockwise, 'sdpa': sdpa}[chosen]
    return attend(attn, q, k, v, pos, u, h)


# Plugs

def agrees(model: Any, attend: Callable, name: str, dtype: torch.dtype | None = None,
           lengths: tuple[int, ...] | None = None) -> bool:
    """Return whether attend(attn, q, k, v, pos, u, h) computes what the layers' own lines do, with
    queries and keys in dtype. If not, print a line on stderr that says what differs. Sequences of
    these lengths are tried, by default one."""
    for attn in different_layers(model):
        # Two ids at least: of one, the gradient of its query is 0, and rounding no share of it
        tried = lengths or (min(150, max(2, model.cfg.context_length)),)
        errors = [find_error(attn, attend, dtype or attn.W_Q.dtype, n) for n in tried]
        if not any(errors):
            # sdpa takes one query, too, which saves the biases of all
            at_the_end = attend_end if attend is sdpa else attend_whole
            errors.append(find_far_error(attn, partial(at_the_end, attend),
                                         dtype or attn.W_Q.dtype))
        for wrong in filter(None, errors):
            print(f'Warning: {name} attention {wrong}: it is not used', file=sys.stderr)
            return False
    return True


def different_layers(model: Any) -> list[Any]:
    """Return the attention layers, but of those that are alike only one. Layers with other methods,
    attributes or buffers can attend in another way."""
    layers = {}
    for block in model.blocks:
        attn = block.attn
        attributes = [(name, id(value) if callable(value) else repr(value))
                      for name, value in vars(attn).items() if not name.startswith('_')]
        buffers = id(attn) if any(True for _ in attn.buffers()) else None
        layers[(type(attn), *attributes, buffers)] = attn
    return list(layers.values())


def plug_attention(model: Any, attend: Callable) -> None:
    """Let all layers attend by attend(attn, q, k, v, pos, u, h)."""
    for block in model.blocks:
        block.attn.attend = partial(attend, block.attn)


def unplug_attention(model: Any) -> None:
    """Let all layers attend by their own lines again. A method that someone else has put on a layer
    is its own, too."""
    for block in model.blocks:
        if isinstance(vars(block.attn).get('attend'), partial):
            del block.attn.attend


def find_error(attn: Any, attend: Callable, dtype: torch.dtype, length: int) -> str:
    """Compare an implementation's output and gradients, for random inputs and parameters of this
    layer, with its own lines in float64 on a CPU. Return a message about the first one that is
    wrong by more than the rounding of dtype, or ''."""
    device, weights = attn.W_Q.device, attn.W_Q.dtype
    dtype = dtype if weights == torch.float32 else weights  # autocast casts float32 alone
    try:
        with (torch.inference_mode(False), torch.enable_grad(),
              torch.autocast(device.type, enabled=False)):
            generator = torch.Generator().manual_seed(0)  # does not disturb the global one

            def random(*shape: int) -> Tensor:
                return torch.randn(shape, generator=generator)

            # Move every parameter of a copy from its value, since zeros hide errors
            layer = copy.deepcopy(attn).requires_grad_()
            for p in layer.parameters():
                p.data += 0.3 * random(*p.shape).to(p)
            # Draw queries, keys and values in dtype, as autocast has them, and u and h
            B, K, D = 2, attn.K, attn.W_Q.shape[1]
            q, k, v, grad = random(4, B, K, length, D // K).to(device, dtype)
            u, h = random(2, B, length, D).to(device, weights)
            inputs = {'q': q, 'k': k, 'v': v, 'u': u, 'h': h}
            if attn.cfg.attn == 'cem' or attn.cfg.tie in ('kv', 'both'):  # the values are the keys
                del inputs['v']
            ours = with_gradients(layer, partial(attend, layer), inputs, grad)
            layer = copy.deepcopy(layer).to('cpu', torch.float64)
            inputs = {name: x.cpu().double() for name, x in inputs.items()}
            exact = with_gradients(layer, layer.attend, inputs, grad.cpu().double())
            for name, right in exact.items():
                error = largest_error(ours[name], right)
                most = most_error(device, dtype)
                if not error <= most:  # true for NaN
                    return (f'gives another {name} than the lines of model.py (off by {error:.2g}, '
                            f'at most {most:.2g} is rounding)')
    except Exception as error:  # Triton, LLVM, ptxas and the driver raise many types
        reason = (str(error).strip() or 'no reason given').splitlines()[0]
        return f'does not run ({type(error).__name__}: {reason})'
    return ''


def find_far_error(attn: Any, attend: Callable, dtype: torch.dtype) -> str:
    """Compare the output of the last query of a whole context: a sliding window, for example, shows
    in long contexts alone. attend(attn, q, k, v, u, h) has all queries, and returns the last output
    (B, K, 1, R). Return a message if it is wrong, or ''."""
    device, weights = attn.W_Q.device, attn.W_Q.dtype
    dtype = dtype if weights == torch.float32 else weights
    length, K, D = attn.cfg.context_length, attn.K, attn.W_Q.shape[1]
    generator = torch.Generator().manual_seed(0)
    try:
        with (torch.inference_mode(False), torch.no_grad(),
              torch.autocast(device.type, enabled=False)):
            layer = copy.deepcopy(attn)
            for p in layer.parameters():
                p.add_((0.3 * torch.randn(p.shape, generator=generator)).to(p))
            # Scores of about 1: the query attends to all keys
            W_K = torch.randn(D, D, generator=generator) / math.sqrt(D)
            layer.W_K.copy_(W_K)
            q, v = torch.randn(2, 1, K, length, D // K, generator=generator).to(device, dtype)
            u, h = torch.randn(2, 1, length, D, generator=generator).to(device, weights)
            k = layer.split_heads(F.linear(h, layer.W_K)).to(dtype)
            if attn.cfg.attn == 'cem' or attn.cfg.tie in ('kv', 'both'):  # the values are the keys
                v = k
            found = attend(layer, q, k, v, u, h)
            layer = copy.deepcopy(layer).to('cpu', torch.float64)
            q, k, v, u, h = (x.cpu().double() for x in (q, k, v, u, h))
            pos = make_positions(attn.cfg, h[:, -1:], length - 1)
            right = own_lines(layer, layer.attend)(q[:, :, -1:], k, v, pos, u[:, -1:], h)
            error, most = largest_error(found, right), most_error(device, dtype)
            if not error <= most:  # true for NaN
                return (f'gives another output than the lines of model.py at the end of a context '
                        f'(off by {error:.2g}, at most {most:.2g} is rounding)')
    except Exception as error:
        reason = (str(error).strip() or 'no reason given').splitlines()[0]
        return f'does not run on a whole context ({type(error).__name__}: {reason})'
    return ''


def attend_whole(attend: Callable, attn: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor,
                 h: Tensor) -> Tensor:
    """Return the last output of an implementation that attends to a whole sequence."""
    return attend(attn, q, k, v, make_positions(attn.cfg, h), u, h)[:, :, -1:]


def attend_end(attend: Callable, attn: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor,
               h: Tensor) -> Tensor:
    """Return the last output of an implementation that attends with any number of queries."""
    pos = make_positions(attn.cfg, h[:, -1:], h.shape[1] - 1)
    return attend(attn, q[:, :, -1:], k, v, pos, u[:, -1:], h)


def with_gradients(layer: Any, attend: Callable, inputs: dict[str, Tensor],
                   grad: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of all inputs and parameters that it depends on."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    q, k, u, h = (leaves[name] for name in ('q', 'k', 'u', 'h'))
    pos = make_positions(layer.cfg, h)
    o = attend(q, k, leaves.get('v', k), pos, u, h)
    leaves |= dict(layer.named_parameters())
    gradients = [None] * len(leaves)
    if o.requires_grad:
        gradients = torch.autograd.grad(o, list(leaves.values()), grad, allow_unused=True)
    found = {f'gradient of {name}': torch.zeros_like(x) if g is None else g
             for (name, x), g in zip(leaves.items(), gradients, strict=True)}
    return {'output': o, **found}


def largest_error(found: Tensor, right: Tensor) -> float:
    """Return the largest error of a row, relative to its right norm plus a typical row's."""
    difference = (found.detach().cpu().double() - right.detach()).norm(dim=-1)
    rows = right.detach().norm(dim=-1)
    typical = rows.square().mean().sqrt() + 1e-30  # not 0
    return (difference / (rows + typical)).max().item()


def most_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of a row that rounding in dtype explains."""
    eps = epsilon(device, dtype)
    return eps * (MOST_ERROR_PRECISE if eps < 1e-6 else MOST_ERROR)


def epsilon(device: torch.device, dtype: torch.dtype) -> float:
    """Return the relative rounding of products in dtype."""
    tf32 = device.type == 'cuda' and torch.get_float32_matmul_precision() != 'highest'
    if dtype == torch.float32 and tf32:
        return 2 ** -10
    return torch.finfo(dtype).eps


# The cache

class Cache:
    """Let a model read each id once, while its weights stay the same:

        with Cache(model):
            model.generate(idx, 100)

    It is a memo: the same call gives the same logits. Ids that do not begin with those read before
    are read from the start."""
    def __init__(self, model: Any):
        self.model = model
        self.ids: Tensor | None = None  # ids read so far, (B, length)
        self.past = 0  # how many of them were read before this pass
        # One or two buffers for each time that an attention sublayer runs in a pass
        self.buffers: list[Tensor] = []
        self.next_buffer = 0
        self.new_k: Tensor | None = None  # the keys of the sublayer that runs
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
        self.ids, self.buffers = None, []
        methods = [(self.model, 'next_logits', self.next_logits)]
        for block in self.model.blocks:
            methods.append((block.attn, 'attend',
                            partial(self.attend, block.attn, block.attn.attend)))
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
        self.new_k, self.context = None, ()

    @torch.no_grad()
    def find_error(self) -> str:
        """Compare logits with the cache, for a few random ids, with those without it. Return a
        message if they differ by more than rounding, or ''."""
        model = self.model
        for attn in different_layers(model):
            if wrong := find_far_error(attn, attend_last, attn.W_Q.dtype):
                return wrong
        W, length = model.head, min(6, model.cfg.context_length)
        generator = torch.Generator().manual_seed(0)  # does not disturb the global one
        idx = torch.randint(len(W), (1, length), generator=generator).to(W.device)
        parts = [n for n in (3, 4, 6) if n <= length]  # a prompt, one new id, two new ids
        right = [model.next_logits(idx[:, :n]) for n in parts]
        try:
            self.plug()
            found = [self.next_logits(idx[:, :n]) for n in parts]
        except Exception as error:
            return f'does not run ({type(error).__name__}: {error})'
        finally:
            self.unplug()
        # Rounding grows with each layer
        most = min(0.1, MOST_ERROR_PRECISE * epsilon(W.device, W.dtype))
        for logits, expected in zip(found, right, strict=True):
            error = largest_error(logits, expected.cpu().double())
            if not error <= most:  # true for NaN
                return (f'gives other logits than the lines of model.py (off by {error:.2g}, at '
                        f'most {most:.2g} is rounding)')
        return ''

    def next_logits(self, idx: Tensor) -> Tensor:
        """Return what the model's own next_logits does, for ids (B, J)."""
        past = 0 if self.ids is None else self.ids.shape[1]
        # Compare all ids at each token: the cache is never wrong
        if past == 0 or past >= idx.shape[1] or not torch.equal(self.ids, idx[:, :past]):
            past, self.buffers = 0, []
        self.ids, self.past, self.next_buffer = idx, past, 0
        x = self.model.hidden(idx[:, past:], past)
        return F.linear(x[:, -1], self.model.head).float()

    def attend(self, attn: Any, replaced: Callable, q: Tensor, k: Tensor, v: Tensor, pos: Any,
               u: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        """Insert the new k, v (B, K, I, R) or h (B, I, D), and attend to those of all ids.
        `replaced` is the method that this one takes the place of."""
        # The steps of one sublayer pass the same keys; other keys are those of the next one
        if k is not self.new_k:
            self.new_k = k
            self.context = self.insert(attn, k, v, h)
        if self.past == 0:  # k and v are those of all ids
            return replaced(q, k, v, pos, u, h)
        all_k, all_v, all_h = self.context
        if attn.cfg.attn == 'cem' and v is not k:  # the exact update attends to h, too
            all_v = all_h[:, None]
        return attend_to_stored(attn, replaced, q, all_k, all_v, pos, u, all_h)

    def insert(self, attn: Any, k: Tensor, v: Tensor, h: Tensor | None) -> tuple:
        """Insert what the table above says. Return k, v and h of all ids. If h alone is stored, k
        and v are None."""
        cfg = attn.cfg
        if cfg.kq_diag != 'none':
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
        if end > buffer.shape[1]:  # a text longer than the context: double the buffer
            buffer = torch.cat([buffer, torch.empty_like(buffer)], dim=1)
            self.buffers[self.next_buffer] = buffer
        self.next_buffer += 1
        buffer[:, self.past:end] = new
        return buffer[:, :end]

    def floats_per_token(self) -> int:
        """Return how many numbers are stored for a token, as in the table above, in all layers."""
        return sum(buffer.shape[-1] for buffer in self.buffers)


def attend_to_stored(attn: Any, replaced: Callable, q: Tensor, k: Tensor | None, v: Tensor | None,
                     pos: Any, u: Tensor | None, h: Tensor | None) -> Tensor:
    """Attend to k, v and h of all ids. k and v are None if h alone is stored. `replaced` is the
    layer's own attend, or a plug. Returns (B, K, I, R)."""
    if k is None:
        return attend_to_h(attn, q, u, h, pos)
    if isinstance(replaced, partial) and choose_attention(attn, q.device) == 'sdpa':
        return sdpa(attn, q, k, v, pos, u, h)
    # A plug may need the queries of all keys. The layer's own lines do not
    return own_lines(attn, replaced)(q, k, v, pos, u, h)


def own_lines(attn: Any, attend: Callable) -> Callable:
    """Return the layer's own attend: this one, unless it is a plug."""
    return partial(type(attn).attend, attn) if isinstance(attend, partial) else attend


def stores_h_alone(cfg: Any) -> bool:
    """Return whether the cache holds h and no keys."""
    return cfg.kq_diag != 'none' and cfg.positions == 'alibi' and not cfg.exact_update


def attend_last(attn: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor, h: Tensor) -> Tensor:
    """Attend with the last query to a stored context, as a cache of this layer does."""
    pos = make_positions(attn.cfg, h[:, -1:], h.shape[1] - 1)
    if stores_h_alone(attn.cfg):
        k = v = None
    return attend_to_stored(attn, attn.attend, q[:, :, -1:], k, v, pos, u[:, -1:], h)


def attend_to_h(attn: Any, q: Tensor, u: Tensor, h: Tensor, pos: Any) -> Tensor:
    """Attend without keys, since k_j . q_i = h_j . (W_K^T q_i): the cache stores h alone. The
    queries of all heads are rows of one matrix, so that h is read once. Returns (B, K, I, R)."""
    I = q.shape[2]
    W_K = attn.W_K.unflatten(0, (attn.K, -1))  # (K, R, D)
    queries = (q / attn.tau @ W_K + attn.scaled_diagonal(u)).flatten(1, 2)  # (B, K I, D)
    a = (queries @ h.mT).unflatten(1, (-1, I)) + attn.bias(pos)  # (B, K, I, J)
    alpha = a.softmax(dim=-1).type_as(h)
    return (alpha.flatten(1, 2) @ h).unflatten(1, (-1, I)) @ W_K.mT

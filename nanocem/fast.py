"""
What is faster than lines of model.py on some machines, chosen once for a model:

    blockwise    attention on a CPU: a block of queries at a time, without the keys after it
    triton       attention on a GPU, by the kernels of triton_attention.py
    parts        the loss of many logits, by loss.py, which keeps none of them
    tables       RoPE's cosines and sines as inputs of a graph that is compiled for a GPU

Each takes the place of a method on one object, and stands for the definitions of model.py that it
was written from. Where one of these has another text, by an edit, a subclass or a patch, model.py's
own lines run, and a warning says so.

Shapes: B batch, I queries, D width, K heads, R = D / K.
"""
import copy
import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from configurator import warn
from model import BaseAttention, Transformer, make_positions
from nanocem.data import NO_TARGET
from nanocem.loss import LinearCrossEntropy, cross_entropy
from nanocem.same import DEFINITIONS, find_edits

Results = dict[str, Tensor]  # by name
HAS_TRITON = importlib.util.find_spec('triton') is not None
SHORT_CONTEXT = 256  # up to here, blockwise attention compiled for a CPU is faster than torch's
BLOCK = 64  # the smallest block of queries in blockwise attention
# The largest error of a row that is rounding, in units of its dtype's epsilon
MOST_ERROR = 8

# What a faster way stands for: methods of a layer, a block and a model, and functions
ATTENTION = dict(
    attn=('forward', 'attend', 'scores', 'bias', 'rotate', 'shift', 'add_match', 'split_heads',
          'merge_heads', 'diagonal_scores', 'scaled_diagonal', 'diagonal_update'),
    block=('forward',), model=('hidden', 'positions'),
    functions=('make_positions', 'causal_mask', 'previous', 'alibi_slopes'))
LOSS = dict(model=('forward', 'loss'))
TABLES = dict(model=('positions',), functions=('make_positions',))
# The cache is model.py's own, and right where tokens meet in attention alone, as it is written
CACHE = ATTENTION | dict(
    attn=(*ATTENTION['attn'], 'recall', 'attend_to_h', 'output_weight'),
    mlp=('forward', 'output_weight'), norm=('forward',), P=('forward', 'fold'),
    cache=('begin', 'append', 'previous'),
    model=('forward', 'hidden', 'positions', 'next_logits', 'generate', 'fold_once'))
# What LlamaForCausalLM of transformers computes, too
LLAMA = {name: CACHE[name] for name in ('attn', 'block', 'mlp', 'norm', 'functions')} | dict(
    model=('hidden', 'positions'))
# The checksums of these texts (same.py); tests/test_fast.py prints those of today
TEXTS = {
    'BaseAttention.add_match': '4831617d', 'BaseAttention.attend': 'd6762020',
    'BaseAttention.bias': 'ef371a76', 'BaseAttention.diagonal_scores': '375695f0',
    'BaseAttention.diagonal_update': 'a3519390', 'BaseAttention.merge_heads': '9a5967e0',
    'BaseAttention.rotate': '03f4c235', 'BaseAttention.scaled_diagonal': 'a8d9f165',
    'BaseAttention.scores': '48e5fada', 'BaseAttention.shift': '22b6afd5',
    'BaseAttention.split_heads': '9f9a6118', 'Block.forward': 'df9fe283',
    'CEMAttention.attend_to_h': '87644aff', 'CEMAttention.forward': '0dbb4b83',
    'CEMAttention.output_weight': '8b2ce450', 'CEMAttention.recall': '53dc6499',
    'CEMMLP.forward': 'c9e8830c', 'CEMMLP.output_weight': '5dea46ce', 'Cache.append': '932e1af2',
    'Cache.begin': '6205591a', 'Cache.previous': 'ebfee3c8', 'LlamaAttention.forward': '97602449',
    'LlamaMLP.forward': '7ba0946a', 'NORM_EPS': 'bdf7711f', 'Preconditioner.fold': '06cc1544',
    'Preconditioner.forward': '3db317ab', 'RMSNorm.forward': '1536aa19',
    'Transformer.fold_once': '88b873af', 'Transformer.forward': '6ce22b86',
    'Transformer.generate': 'c818fcd6', 'Transformer.hidden': '8731bf27',
    'Transformer.loss': '2060a599', 'Transformer.next_logits': '65b35e7a',
    'Transformer.positions': '537c8c4b', 'alibi_slopes': '6e1ec471', 'causal_mask': '58831617',
    'make_positions': 'f569aaef', 'previous': '46eee1b9'}


def plug_in(model: Transformer, impl: str = 'auto', dtype: torch.dtype = torch.float32,
            compiled: bool = False, loss: str = 'auto', flags: bool = False) -> str:
    """Plug attention and loss into a model that stays on its device, and whose products are in
    dtype. Return the name of the attention that runs: sdpa is model.py's own. An edit of what one
    stands for is what runs, and a warning says so, unless impl or loss asks for one by its name;
    with `flags` the warning names the flags of train.py for that."""
    unplug(model)
    name = choose_attention(model, impl, dtype, compiled)
    edits = {}
    # An attention that was asked for by its name runs as it is. Any other yields to an edit
    if name != impl:
        found = find_edits(owners(model, ATTENTION), TEXTS)
        own = own_attention(found) if found else name
        edits['attention'] = found if own != name else []
        name = own
    edits['loss'] = find_edits(owners(model, LOSS), TEXTS) if loss == 'auto' else []
    # Try what depends on the machine
    if name == 'triton' and not kernels_agree(model, dtype):
        name = 'sdpa'
    in_parts = loss == 'parts' or (loss == 'auto' and not edits['loss'] and parts_agree(model))
    # Put what is faster in place
    if in_parts:
        model.loss = partial(loss_in_parts, model)
    if name != 'sdpa':
        for block in model.blocks:
            block.attn.attend = partial(ATTEND[name], block.attn)
    if compiled and device_of(model).type == 'cuda':
        plug_tables(model)
    warn_of_edits(edits, flags)
    return name


def own_attention(edits: list[str]) -> str:
    """Return how an edited model attends: by `scores`, if these are edited and attend is not, which
    leaves them to torch and would not see it; or else by its own attend, sdpa."""
    methods = {edit.rpartition('.')[2] for edit in edits}
    return 'scores' if {'scores', 'causal_mask'} & methods and 'attend' not in methods else 'sdpa'


def warn_of_edits(edits: dict[str, list[str]], flags: bool) -> None:
    """Print a line that says which edits make model.py's own lines run, if any do."""
    names = dict.fromkeys(name for found in edits.values() for name in found)
    if not names:
        return
    kinds = ' and '.join(kind for kind, found in edits.items() if found)
    insist = {'attention': '--attn_impl=blockwise (on a GPU triton)', 'loss': '--loss_impl=parts'}
    how = ' or '.join(insist[kind] for kind, found in edits.items() if found)
    warn(f'model.py was edited ({", ".join([*names][:3])}): its own lines compute {kinds}, which '
         'is slower or takes more memory' + (f'; {how} insists on the faster way' if flags else ''))


def unplug(model: Transformer) -> None:
    """Let model.py's own methods run again. A method that someone else has set stays."""
    for owner in (model, *(block.attn for block in model.blocks if hasattr(block, 'attn'))):
        for name in ('loss', 'attend', 'positions'):
            if is_plug(owner, name):
                delattr(owner, name)


def is_plug(owner: Any, name: str) -> bool:
    """Return whether what runs as the owner's method of this name was plugged in here."""
    function = getattr(vars(owner).get(name), 'func', None)
    return function in (loss_in_parts, positions_by_tables, *ATTEND.values())


def may_use_cache(model: Any, flag: str = '') -> bool:
    """Return whether model.py's cache gives this model's own tokens: not if an edit could let
    tokens meet elsewhere than in attention as it is written. If so, print a warning, which names
    the flag that uses it all the same."""
    edits = find_edits(owners(model, CACHE), TEXTS)
    if edits:
        warn(f'model.py was edited ({", ".join(edits[:3])}): text is generated without its cache, '
             'and read again for each token' + (f'; {flag} uses the cache' if flag else ''))
    return not edits


def is_known_llama(model: Any) -> bool:
    """Return whether the texts that a Llama runs are those that transformers computes, too."""
    same_eps = DEFINITIONS['NORM_EPS'] == TEXTS['NORM_EPS']
    return same_eps and not find_edits(owners(model, LLAMA), TEXTS)


# Which attention

def choose_attention(model: Transformer, impl: str, dtype: torch.dtype, compiled: bool) -> str:
    """Return the name of the fastest attention that can run, or the wanted one if it can: sdpa is
    model.py's own, torch's fused attention."""
    layers, device = [getattr(block, 'attn', None) for block in model.blocks], device_of(model)
    if not all(isinstance(attn, BaseAttention) for attn in layers):  # someone's own
        return 'sdpa'
    attn = layers[0]
    can_triton = fits_kernels(attn) and runs_triton(device, dtype, attn.cfg.d_model // attn.K)
    if impl in ('sdpa', 'blockwise') or (impl == 'triton' and can_triton):
        return impl
    if device.type == 'cuda' and can_triton:
        return 'triton'
    # Torch's fused attention gives no weights, which the whole gradient needs. Without CUDA it has
    # no backward pass for a bias, and is slower when it is compiled for a short context
    short = compiled and model.cfg.context_length <= SHORT_CONTEXT
    pays = device.type != 'cuda' and (attn.cfg.has_bias() or short)
    return 'blockwise' if attn.whole_gradient or pays else 'sdpa'


def device_of(model: Transformer) -> torch.device:
    return model.head.device


def fits_kernels(attn: Any) -> bool:
    """Return whether the kernels compute this attention, and pay: they need values that are the
    keys, a bias, and have room for one diagonal beside the match bias."""
    cfg = attn.cfg
    # With RoPE Llama's tied values are the keys before their rotation
    tied = cfg.attn == 'cem' or (cfg.tie in ('kv', 'both') and cfg.positions == 'alibi')
    one_match = cfg.match_bias == 'none' or (cfg.match_bias == 'token'
                                             and cfg.kq_diag != 'per_head')
    return tied and cfg.has_bias() and one_match and not attn.whole_gradient


def runs_triton(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return whether there are Triton kernels for this device and dtype, and heads of this width R.
    Whether they compute the right numbers is tried later."""
    if not HAS_TRITON or head_width > 128:
        return False
    if os.environ.get('TRITON_INTERPRET') == '1':  # on a CPU, in tests; without bfloat16
        return device.type == 'cpu' and dtype in (torch.float16, torch.float32)
    return device.type == 'cuda' and dtype in (torch.float16, torch.bfloat16)


def owners(model: Any, definitions: dict[str, tuple[str, ...]]) -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of each definition, as this model runs it."""
    module = sys.modules[Transformer.__module__]
    blocks = list(model.blocks)
    kinds = {'model': [model], 'block': blocks, 'functions': [module], 'cache': [module.Cache],
             'attn': [getattr(block, 'attn', None) for block in blocks],
             'mlp': [getattr(block, 'mlp', None) for block in blocks]}
    sublayers = kinds['attn'] + kinds['mlp']
    kinds['norm'] = [model.norm, *(getattr(sublayer, 'norm', None) for sublayer in sublayers)]
    kinds['P'] = [getattr(sublayer, 'P', None) for sublayer in sublayers]
    seen = set()
    for kind, names in definitions.items():
        for o, name in itertools.product(filter(None, kinds[kind]), names):
            owner = o
            # A method that the object has not itself is its class's. What is plugged in is asked
            # for what it stands for
            is_object = not isinstance(o, type | ModuleType)
            if is_object and (name not in vars(o) or is_plug(o, name)):
                owner = type(o)
            if (id(owner), name) not in seen and (hasattr(owner, name) or name == 'forward'):
                seen.add((id(owner), name))
                yield owner, name


# Attention

def blockwise(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor,
              h: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attend as model.py does, in at most four blocks of queries. A block leaves out the keys after
    it, so four blocks compute 5/8 of all scores."""
    if pos.cache is not None:  # few queries
        return type(attn).attend(attn, q, k, v, pos, u, h)
    I = q.shape[2]
    size = max(BLOCK, math.ceil(I / 4))
    outputs, updates = [], []
    for begin in range(0, I, size):
        end = min(begin + size, I)
        block = slice(begin, end)
        # The positions of these queries and keys alone
        pairs = {'distance': (block, slice(end)), 'mask': (block, slice(end)),
                 'match': (slice(None), block, slice(end)),
                 'pair_match': (slice(None), block, slice(end))}
        block_pos = pos._replace(**{name: getattr(pos, name)[index] for name, index in pairs.items()
                                    if getattr(pos, name) is not None})
        a = attn.scores(q[:, :, block], k[:, :, :end], block_pos, u[:, block], h[:, :end])
        alpha = a.softmax(dim=-1).type_as(v)  # (B, K, size, end)
        outputs.append(alpha @ v[:, :, :end])
        if attn.whole_gradient:
            updates.append(attn.diagonal_update(alpha, h[:, :end]))
    return torch.cat(outputs, dim=2), torch.cat(updates, dim=1) if updates else None


def by_scores(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor,
              h: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attend by the layer's own scores, where they are edited: all of them are in memory."""
    alpha = attn.scores(q, k, pos, u, h).softmax(dim=-1).type_as(v)
    return alpha @ v, attn.diagonal_update(alpha, h) if attn.whole_gradient else None


def triton_kernels(attn: Any, q: Tensor, k: Tensor, v: Tensor, pos: Any, u: Tensor,
                   h: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attend to a whole sequence by the kernels of triton_attention.py, which read k alone."""
    # Untied values, a cache, and a dtype without kernels, as of the sample at the end of a run
    if v is not k or pos.cache is not None or not runs_triton(q.device, q.dtype, q.shape[-1]):
        return type(attn).attend(attn, q, k, v, pos, u, h)
    from nanocem import triton_attention
    b = None
    if attn.cfg.positions == 'alibi':  # softmax depends on the difference of the biases alone
        b = attn.b_self - attn.b_cross
    d_u = None if attn.cfg.kq_diag == 'none' else attn.scaled_diagonal(u)
    w = None if attn.cfg.match_bias == 'none' else attn.match_weight
    q, k = attn.merge_heads(q), attn.merge_heads(k)  # (B, I, D)
    o = triton_attention.attention(q, k, attn.K, 1 / attn.tau, d_u, h, b, pos.match, w)
    return attn.split_heads(o), None


ATTEND = {'blockwise': blockwise, 'triton': triton_kernels, 'scores': by_scores}


# RoPE

def plug_tables(model: Transformer) -> None:
    """Let a model with RoPE read its angles' cosines and sines from tables. Computed in the graph,
    the compiler would write pow, cos and sin into each kernel that rotates, for each number."""
    if model.cfg.positions == 'rope' and not find_edits(owners(model, TABLES), TEXTS):
        x = model.embedding.detach()[:1, None].expand(1, model.cfg.context_length, -1)
        pos = make_positions(model.cfg, x)
        model.positions = partial(positions_by_tables, model, pos.cos.clone(), pos.sin.clone())


def positions_by_tables(model: Transformer, cos: Tensor, sin: Tensor, x: Tensor,
                        cache: Any = None) -> Any:
    """Return model.py's positions, with rows of the tables (J, R / 2) where these reach."""
    pos = make_positions(model.cfg, x, cache)
    past = 0 if cache is None else cache.length
    end = past + x.shape[1]
    if end > len(cos) or pos.cos.dtype != cos.dtype or x.device != cos.device:
        return pos
    return pos._replace(cos=cos[past:end], sin=sin[past:end])


# The loss

def loss_in_parts(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    """Return model.py's loss. Of many logits it is computed in parts, which are not kept."""
    return cross_entropy(x, model.head, targets)


def two_at_a_time(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    """Return the loss in parts of two rows."""
    return LinearCrossEntropy.apply(x[0], model.head, targets[0], 2, True)


# Trials at the start. Triton, LLVM, ptxas and the driver may all be wrong

def parts_agree(model: Transformer) -> bool:
    """Return whether the loss in parts is model.py's, with its gradients, for random inputs. If
    not, print a warning."""
    W, random = model.head, torch.Generator().manual_seed(0)  # which disturbs no other numbers
    x = torch.randn(1, 5, W.shape[1], generator=random).to(W)
    targets = torch.randint(len(W), (1, 5), generator=random).to(W.device)
    targets[0, 2] = NO_TARGET

    def loss(function: Callable) -> Results:
        return with_gradients(lambda x: function(x, targets), {'x': x}, {'the head': W})
    wrong = find_error(lambda: loss(partial(two_at_a_time, model)), lambda: loss(model.loss),
                       W.device, W.dtype)
    if wrong:
        warn(f'the loss in parts {wrong}: it is not used')
    return not wrong


def kernels_agree(model: Transformer, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels attend as model.py does in the first layer. If not, print a
    warning."""
    attn = model.blocks[0].attn
    # A GPU has other kernels for a multiple of 16 than for 300, whose last tile is cut off
    for length in (300, 256) if attn.W_Q.device.type == 'cuda' else (150,):
        if wrong := find_kernel_error(attn, dtype, length):
            warn(f'triton attention {wrong}: it is not used')
            return False
    return True


def find_kernel_error(attn: Any, dtype: torch.dtype, length: int) -> str:
    """Compare the kernels' output and gradients, for random inputs and parameters of this layer,
    with its own lines in float64 on a CPU. Return a message about the first one that is wrong by
    more than the rounding of dtype, or ''."""
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        layer = copy.deepcopy(attn).requires_grad_()
        for p in layer.parameters():  # zeros hide errors
            p.add_((0.3 * torch.randn(p.shape, generator=random)).to(p))
    exact = copy.deepcopy(layer).to('cpu', torch.float64)
    K, D, device = attn.K, attn.cfg.d_model, attn.W_Q.device
    q, k = torch.randn(2, 2, K, length, D // K, generator=random).to(dtype)
    u, h = torch.randn(2, 2, length, D, generator=random)
    inputs = {'q': q, 'k': k, 'u': u, 'h': h}

    def attend(layer: Any, function: Callable, inputs: Results) -> Results:
        def output(q: Tensor, k: Tensor, u: Tensor, h: Tensor) -> Tensor:
            pos = layer.add_match(h, make_positions(layer.cfg, h))
            return function(layer, q, k, k, pos, u, h)[0]
        return with_gradients(output, inputs, dict(layer.named_parameters()))
    return find_error(
        lambda: attend(layer, triton_kernels, {name: x.to(device) for name, x in inputs.items()}),
        lambda: attend(exact, type(exact).attend, {name: x.double() for name, x in inputs.items()}),
        device, dtype)


def find_error(ours: Callable[[], Results], theirs: Callable[[], Results], device: torch.device,
               dtype: torch.dtype) -> str:
    """Return what is wrong with our results: the first one whose error is more than rounding in
    dtype, or NaN, or that they do not run; or ''."""
    try:
        with (torch.inference_mode(False), torch.enable_grad(),
              torch.autocast(device.type, enabled=False)):
            found, right = ours(), theirs()
    except Exception as error:  # of many types
        reason = (str(error).strip() or 'no reason given').splitlines()[0]
        return f'does not run ({type(error).__name__}: {reason})'
    limit = MOST_ERROR * epsilon(device, dtype)
    for name, expected in right.items():
        error = largest_error(found[name], expected)
        if not error <= limit:  # true for NaN
            return (f'gives another {name} than the lines of model.py (off by {error:.2g}, at most '
                    f'{limit:.2g} is rounding)')
    return ''


def with_gradients(function: Callable, inputs: Results, parameters: Results) -> Results:
    """Return a function's result, and the gradients of its inputs and of these parameters."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = function(*leaves.values())
    leaves |= {name: p for name, p in parameters.items() if p.requires_grad}
    # Of a number: given the gradient of y, autograd would import SymPy, for half a second
    weights = torch.linspace(-1, 1.5, y.numel(), device=y.device).view(y.shape)
    gradients = torch.autograd.grad((y * weights.to(y)).sum(), list(leaves.values()),
                                    allow_unused=True)
    return {'output': y} | {
        f'gradient of {name}': torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), gradients, strict=True)}


def largest_error(found: Tensor, right: Tensor) -> float:
    """Return the largest error of a row, relative to its right norm plus a typical row's."""
    found, right = (x.detach().cpu().double().reshape(-1, x.shape[-1] if x.dim() else 1)
                    for x in (found, right))
    rows = right.norm(dim=-1)
    typical = rows.square().mean().sqrt() + 1e-30  # not 0
    return float(((found - right).norm(dim=-1) / (rows + typical)).max())


def epsilon(device: torch.device, dtype: torch.dtype) -> float:
    """Return the relative rounding of products in dtype."""
    tf32 = device.type == 'cuda' and torch.get_float32_matmul_precision() != 'highest'
    if dtype == torch.float32 and tf32:
        return 2 ** -10
    # Of more precise numbers more is allowed: the rounding of long sums is no error
    eps = torch.finfo(dtype).eps
    return 100 * eps if eps < 1e-6 else eps

"""
Print how much memory the backward pass needs, by model and implementation, without a GPU.

    python docs/memory.py        GB that a micro-batch of 8 x 2,048 tokens saves for it

Compiled: AOTAutograd traces the joint graph of four layers on fake CPU tensors, with Inductor's
decompositions, and its min-cut partition says what the forward pass saves. Not compiled: autograd
says it. Our kernels are one operator, as on a GPU; torch's fused attention is replaced by the
operator that it calls on a GPU. Eight more layers are counted as four less three.
"""
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).parents[1]))
from model import ModelConfig, Transformer
from nanocem import fast

BATCH, LENGTH, VOCABULARY = 8, 2048, 32_000
T1 = dict(attn='cem', mlp='cem', attn_steps=1, mlp_steps=1, preconditioner='none',
          kq_diag='shared', positions='alibi')
MODELS = {
    'Llama': dict(attn='llama', mlp='llama', attn_steps=1, mlp_steps=1),
    'CEM, T = 1': T1,
    'CEM, T = 2': {**T1, 'attn_steps': 2, 'mlp_steps': 2, 'preconditioner': 'diag_lowrank'},
}


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None,
                    scale: float | None = None, is_causal: bool = False) -> Tensor:
    """What F.scaled_dot_product_attention calls on a GPU."""
    if bias is None:
        if q.dtype == torch.float32:
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, is_causal=is_causal, scale=scale)[0]
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, is_causal=is_causal, scale=scale)[0]
    bias = bias.expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, scale=scale)[0]


def base_of(node: Any) -> Any:
    """The node whose memory a view shows."""
    while getattr(node.target, 'is_view', False):
        node = node.args[0]
    return node


class Traced(Exception):
    """Ends a compilation when the partition is known."""


def compiled_bytes(model: Transformer, ids: Tensor, dtype: torch.dtype) -> int:
    """What the partitioned forward graph saves, its inputs left out."""
    saved = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> None:
        forward, _ = min_cut_rematerialization_partition(
            joint, inputs, compiler='inductor', num_fwd_outputs=num_fwd_outputs, **options)
        (output,) = forward.graph.find_nodes(op='output')
        bases = {base_of(node) for node in output.args[0][num_fwd_outputs:]}
        for node in bases:
            if node.op != 'placeholder' and isinstance(node.meta.get('val'), Tensor):
                saved.append(node.meta['val'].untyped_storage().nbytes())
        raise Traced
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, partition_fn=partition,
                           decompositions=select_decomp_table())
    torch._dynamo.reset()
    step = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    try:
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
            step(ids, ids)
    except Exception as error:
        if not saved:
            raise error
    return sum(saved)


def eager_bytes(model: Transformer, ids: Tensor, dtype: torch.dtype) -> int:
    """What autograd saves, parameters left out."""
    storages = {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in own:
            storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        keep.append(x)
        return x
    keep: list[Tensor] = []
    with saved_tensors_hooks(pack, lambda x: x), \
            torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(ids, ids)[1]
    assert loss.requires_grad
    return sum(storages.values())


def gigabytes(size: str, options: dict[str, Any], impl: str, compiled: bool,
              dtype: torch.dtype) -> float:
    """Count four layers, and for eight more the difference between four and three."""
    fast.choose_impl = lambda *args, **kwargs: impl
    found = []
    for n_layer in (3, 4):
        shape = dict(size=size, vocab_size=VOCABULARY, context_length=LENGTH, n_layer=n_layer)
        with FakeTensorMode():
            model = Transformer(ModelConfig(**{**options, **shape}))
            ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
            found.append((compiled_bytes if compiled else eager_bytes)(model, ids, dtype))
    each = found[1] - found[0]
    return (found[1] + 8 * each) / 1e9


def main() -> None:
    torch.nn.functional.scaled_dot_product_attention = fused_attention
    rows = [('triton', True, torch.bfloat16, False), ('sdpa', True, torch.bfloat16, False),
            ('sdpa', True, torch.bfloat16, True), ('triton', False, torch.bfloat16, False),
            ('sdpa', False, torch.bfloat16, False), ('sdpa', False, torch.float32, False)]
    for size in ('134m', '162m'):
        for name, options in MODELS.items():
            for impl, compiled, dtype, recompute in rows:
                if name == 'Llama' and (impl == 'triton' or recompute):
                    continue
                with functorch_config.patch(ban_recompute_materialized_backward=not recompute,
                                            ban_recompute_used_far_apart=not recompute):
                    total = gigabytes(size, options, impl, compiled, dtype)
                words = f'{impl}{", bias recomputed" * recompute}'
                print(f'{size} | {name} | {words} | {"compiled" if compiled else "not compiled"} | '
                      f'{str(dtype)[6:]} | {total:.1f}', flush=True)


if __name__ == '__main__':
    main()

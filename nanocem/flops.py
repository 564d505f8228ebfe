"""FLOPs of training a model."""
from typing import Any


def flops_per_token(model: Any) -> float:
    """Count the FLOPs of training per token, at full context. A multiply-add counts as two, a
    backward pass as two forward passes. Every step of CEM counts its projections, scores, values
    and diagonal, and a sublayer its match bias once. The output head counts once, and attention's
    masked half does not count."""
    cfg, D = model.cfg, model.cfg.d_model
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp  # all blocks are alike
    mean_context = (cfg.context_length + 1) / 2  # average number of positions attended to
    # Products of width D with the context, beside those for scores and values: with the diagonals,
    # and for their gradient with h, of each head, or once for all
    contexts = 0 if cfg.kq_diag == 'none' else len(attn.kq_diag)
    if attn.whole_gradient:
        contexts += cfg.n_head if cfg.exact_update else 1
    if cfg.attn == 'cem':
        # A step multiplies by W_Q and W_O
        step = 2 * D * D + (2 + contexts) * mean_context * D
        if cfg.exact_update and cfg.preconditioner == 'diag_lowrank':  # P acts on each head
            step += 4 * cfg.n_head * cfg.attn_rank * D
        attn_macs = D * D + attn.T * step
    else:
        projections = 3 if cfg.tie in ('kv', 'both') else 4
        attn_macs = projections * D * D + (2 + contexts) * mean_context * D
    attn_macs += {'none': 0, 'token': 1, 'pair': 2}[cfg.match_bias] * mean_context * D
    mlp_macs = mlp.W.numel() * (1 + 2 * mlp.T if cfg.mlp == 'cem' else 3)
    layer = cfg.attn_reuse * attn_macs + cfg.mlp_reuse * mlp_macs
    macs = cfg.loops * cfg.n_layer * layer + cfg.vocab_size * D
    return 3 * 2.0 * macs  # 3: a forward and a backward pass; 2: a multiplication and an addition

"""The paper's full model: CEM attention and MLP, two steps each, diagonal-plus-low-rank
preconditioners, shared diagonal."""
attn = 'cem'
mlp = 'cem'
attn_steps = 2
mlp_steps = 2
preconditioner = 'diag_lowrank'
kq_diag = 'shared'
positions = 'alibi'

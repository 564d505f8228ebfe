"""The paper's full model: CEM attention and MLP, two steps each, diagonal-plus-low-rank
preconditioners, shared diagonal. Algorithm 1 leaves out the diagonal's part of the gradient, and P
changes the step, so attention's steps are far from the gradient of its energy."""
attn = 'cem'
mlp = 'cem'
attn_steps = 2
mlp_steps = 2
preconditioner = 'diag_lowrank'
kq_diag = 'shared'
positions = 'alibi'

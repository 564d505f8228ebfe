"""CEM attention in two steps, Llama MLP (paper, Figure 2c)."""
attn = 'cem'
mlp = 'llama'
attn_steps = 2
preconditioner = 'diag_lowrank'
kq_diag = 'shared'

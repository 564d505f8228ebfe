"""CEM attention in two steps, Llama MLP (paper, Figure 2c)."""
size = '134m'
attn = 'cem'
mlp = 'llama'
attn_steps = 2
mlp_steps = 1
preconditioner = 'diag_lowrank'

"""CEM MLP in two steps, Llama attention (paper, Figure 2d)."""
attn = 'llama'
mlp = 'cem'
mlp_steps = 2
preconditioner = 'diag_lowrank'

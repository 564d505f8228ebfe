"""CEM MLP in two steps, Llama attention (paper, Figure 2d)."""
size = '134m'
attn = 'llama'
mlp = 'cem'
attn_steps = 1
mlp_steps = 2
preconditioner = 'diag_lowrank'

"""CEM attention in one step, Llama MLP: the weight tying alone, no preconditioner (paper, Figure
2a)."""
size = '134m'
attn = 'cem'
mlp = 'llama'
attn_steps = 1
mlp_steps = 1
preconditioner = 'none'

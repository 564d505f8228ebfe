"""Beyond the paper: all-CEM, two steps, with exact rotary positions instead of ALiBi and a
diagonal, so that torch's fused attention runs it. At XS, with one step, its perplexity is 15%
higher than with ALiBi (results/notes.md)."""
attn = 'cem'
mlp = 'cem'
attn_steps = 2
mlp_steps = 2
preconditioner = 'diag_lowrank'
kq_diag = 'none'
positions = 'rope'
score_scale = 'head'

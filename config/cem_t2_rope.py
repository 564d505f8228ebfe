"""Beyond the paper: all-CEM, two steps, with exact rotary positions instead of ALiBi and a
diagonal; plain flash attention. Up to a million weights it is the worse one (results/earlier)."""
attn = 'cem'
mlp = 'cem'
attn_steps = 2
mlp_steps = 2
preconditioner = 'diag_lowrank'
kq_diag = 'none'
positions = 'rope'
score_scale = 'head'

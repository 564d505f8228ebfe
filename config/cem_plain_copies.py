"""All-CEM whose steps are exactly minus the energy's gradient, and which looks for what followed a
token: no diagonal, no P, two steps (results/README.md)."""
attn = 'cem'
mlp = 'cem'
attn_steps = 2
mlp_steps = 2
kq_diag = 'none'
preconditioner = 'none'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'

"""The best CEM model of results/README.md: attention in one step, which looks for what followed a
token, beside Llama's MLP. With the diagonal its steps follow the energy only roughly.

    python train.py config/cem_copies.py config/mini.py
"""
attn = 'cem'
mlp = 'llama'
attn_steps = 1
kq_diag = 'shared'
preconditioner = 'none'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'

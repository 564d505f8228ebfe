"""Llama with ALiBi that has what config/cem_three.py gives CEM: the baseline to compare it with."""
attn = 'llama'
mlp = 'llama'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'
kq_diag = 'scaled'

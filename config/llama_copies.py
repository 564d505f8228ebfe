"""Llama with ALiBi that has what config/cem_copies.py gives CEM: what to compare it with."""
attn = 'llama'
mlp = 'llama'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'

"""Llama with ALiBi, key_shift and match_bias: the baseline for config/cem_copies.py."""
attn = 'llama'
mlp = 'llama'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'

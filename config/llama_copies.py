"""Llama with ALiBi that has what config/cem_copies.py gives CEM: the baseline of the cured models,
and the best model of results/README.md."""
attn = 'llama'
mlp = 'llama'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'

"""Llama with ALiBi and our three options: the baseline of cem_one_tie.py and cem_three.py."""
attn = 'llama'
mlp = 'llama'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'
kq_diag = 'scaled'

"""Llama with ALiBi and our three additions: the baseline of cem_one_tie.py and cem_three.py."""
attn = 'llama'
mlp = 'llama'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'
kq_diag = 'scaled'

"""CEM attention in one step, which looks for what followed a token, beside Llama's MLP. With the
paper's diagonal its steps follow the energy only roughly. Those of config/cem_three.py follow it
exactly, and its loss is lower.

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

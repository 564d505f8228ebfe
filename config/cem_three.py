"""CEM attention with both of its ties, in one step, beside Llama's MLP. Three options that are not
the paper's let a head look for what followed a token, and bring it. Each step is exactly minus the
gradient of its energy. config/cem_one_tie.py has the first tie alone.

    python train.py config/cem_three.py config/mini.py
"""
attn = 'cem'
mlp = 'llama'
attn_steps = 1
preconditioner = 'none'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'
kq_diag = 'scaled'

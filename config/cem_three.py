"""CEM attention with both of its ties, in one step, with Llama's MLP. Three options that are not in
the paper let a head look for what followed a token, and copy it. The step is exactly minus the
gradient of the energy. config/cem_one_tie.py has only the first tie.

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

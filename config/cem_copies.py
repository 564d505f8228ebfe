"""CEM attention that takes one step and looks for what followed a token, with Llama's MLP. It has
the paper's diagonal, whose part of the gradient is left out. The step of config/cem_three.py is the
whole gradient, and that model has a lower loss.

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

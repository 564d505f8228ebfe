"""The recommended model: CEM attention in which only the values are tied, to the keys. The output
projection W_O is a matrix of its own, and each step is still exactly minus the gradient of an
energy. One step equals Llama's attention with tie=kv, so the MLP and the temperature are also
Llama's.

The tie saves d_model^2 weights per layer. With d_mlp = 3 d_model instead of 8/3 d_model, they go
into the MLP, and the model is as large as that of config/llama_three.py:

    python train.py config/cem_one_tie.py config/mini.py --d_mlp=192
"""
attn = 'cem'
mlp = 'llama'
untied_output = True
score_scale = 'head'
attn_steps = 1
preconditioner = 'none'
positions = 'alibi'
key_shift = 'half'
match_bias = 'token'
kq_diag = 'scaled'

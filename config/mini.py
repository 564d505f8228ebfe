"""Laptop scale: minutes on two CPU cores. train.py reads this under all other options where size is
mini, the default."""
size = 'mini'
context_length = 128
attn_steps = 1  # a second step costs half of the speed and buys nothing here (results/ladder)
mlp_steps = 1
data = 'data/builtin'
tokens = 4_000_000  # about 30 a parameter of the body
batch_size = 16
micro_batch_size = 16
optimizer = 'muon'  # results/muon
learning_rate = 16e-3
eval_interval = 250
eval_tokens = 250_000
test_tokens = 500_000
checkpoint_interval = 500

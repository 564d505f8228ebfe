"""Laptop scale: minutes on two CPU cores. train.py reads this under all other options where size is
mini, the default."""
size = 'mini'
context_length = 128
data = 'data/builtin'
tokens = 4_000_000  # about 30 a parameter of the body
batch_size = 32
micro_batch_size = 32
learning_rate = 8e-3
eval_interval = 250
eval_tokens = 250_000
checkpoint_interval = 250
sample_interval = 500

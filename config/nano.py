"""A look in a minute or two. train.py reads this under all other options where size is nano."""
size = 'nano'
context_length = 64
data = 'data/builtin'
batch_size = 32
micro_batch_size = 32
learning_rate = 16e-3
eval_interval = 250
eval_tokens = 250_000
checkpoint_interval = 250

"""The smallest size, for any of the models: a first run takes half a minute."""
size = 'nano'
context_length = 64
text = 'shakespeare'
tokenizer = 'byte'
tokens = 1_000_000
batch_size = 32
optimizer = 'adamw'
learning_rate = 16e-3
eval_interval = 250
eval_tokens = 250_000
test_tokens = 250_000
checkpoint_interval = 250

"""reproduce.py's runs on a laptop: Chinchilla's 20 tokens a parameter of the built-in corpus, short
context, small batches."""
size = 'nano'  # or micro, mini
context_length = 64
data = 'data/builtin'
tokens = None
batch_size = 32
micro_batch_size = 32
learning_rate = 16e-3
eval_interval = 1_000_000  # at the end only
eval_tokens = 250_000
checkpoint_interval = 500

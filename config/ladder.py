"""reproduce.py's runs: ten tokens a parameter of installed source text, context 128, small batches.

reproduce.py has data/corpus made, and gives each size its shape and each model its rate.
"""
size = 'nano'  # the shape is always given: --d_model, --n_layer, --n_head, --d_mlp
context_length = 128
vocab_size = 257  # bytes, and what begins a document
data = 'data/corpus'
tokens_per_param = 10.0
batch_size = 16
micro_batch_size = 16
learning_rate = 8e-3
eval_interval = 1_000_000  # at the end only
eval_tokens = 300_000
test_tokens = 300_000
checkpoint_interval = 500
keep_checkpoints = 1

"""Laptop scale, minutes on two CPU cores: size, data, budget and recipe, for any of the models.

    python train.py config/mini.py                       plain all-CEM, one step
    python train.py config/llama.py config/mini.py       Llama, with RoPE
"""
size = 'mini'
context_length = 128
text = 'shakespeare'
tokenizer = 'byte'
tokens = 4_000_000
batch_size = 16
optimizer = 'muon'  # results/notes.md
learning_rate = 16e-3
final_lr = 0
eval_interval = 500
eval_tokens = 100_000
test_tokens = 500_000
checkpoint_interval = 500

"""nanoGPT's Shakespeare on CPU cores: the loss of its GPU recipe with a tenth of the parameters.

    python train.py config/cem_three.py config/shakespeare.py     CEM attention, three additions
    python train.py config/llama_three.py config/shakespeare.py   Llama with the same options
"""
d_model = 160
n_layer = 4
n_head = 5
d_mlp = 428
context_length = 256
text = 'shakespeare'
tokenizer = 'byte'
tokens = 5_000_000
batch_size = 8
optimizer = 'muon'
learning_rate = 11e-3
final_lr = 0
eval_interval = 500
eval_tokens = 100_000
test_tokens = 500_000
checkpoint_interval = 500

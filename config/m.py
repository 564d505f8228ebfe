r"""Size M of the study in results/tokens: 1.05 M weights in Llama's layers, 30 M tokens. Eighty
minutes on one CPU core. The learning rate is the one for Llama with RoPE (for other models, see
results/copies/models.csv). results/tokens describes the text.

    python prepare_slimpajama.py --input=TEXT --held_out=0.05 --tokenizer=bpe2048 \
        --out_dir=data/english
    python train.py config/llama.py config/m.py
"""
n_layer = 7
d_model = 112
n_head = 7
d_mlp = 296
context_length = 256
vocab_size = 2048
data = 'data/english'
tokens = 30_000_000
batch_size = 16
micro_batch_size = 16
learning_rate = 0.014
eval_interval = 1_000_000  # only at the end
eval_tokens = 1_000_000_000
test_tokens = 1_000_000_000
log_interval = 1
checkpoint_interval = 500
dtype = 'float32'
compile = True
tensorboard = False
sample_tokens = 0

r"""Size S of the study in results/tokens: 388 k weights in Llama's layers, 14.3 M tokens. Twenty
minutes on one CPU core. The learning rate is the one for Llama with RoPE (for other models, see
results/copies/models.csv). results/tokens describes the text.

    python prepare_slimpajama.py --input=TEXT --held_out=0.05 --tokenizer=bpe2048 \
        --out_dir=data/english
    python train.py config/llama.py config/s.py
"""
n_layer = 5
d_model = 80
n_head = 5
d_mlp = 216
context_length = 256
vocab_size = 2048
data = 'data/english'
tokens = 14_300_000
batch_size = 16
micro_batch_size = 16
learning_rate = 0.0168
eval_interval = 1_000_000  # only at the end
eval_tokens = 1_000_000_000
test_tokens = 1_000_000_000
log_interval = 1
checkpoint_interval = 500
dtype = 'float32'
compile = True
tensorboard = False
sample_tokens = 0

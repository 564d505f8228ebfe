"""Fine-tune a run or an exported model on a text: small batches, 1 M tokens, and an eighth of
config/mini.py's learning rate.

    python train.py config/finetune.py --init_from=pretrained/cem --text=book.txt
"""
tokens = 1_000_000
batch_size = 8
optimizer = 'muon'
learning_rate = 2e-3
eval_interval = 100
eval_tokens = 100_000
test_tokens = 250_000
checkpoint_interval = 250

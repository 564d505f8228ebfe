"""Llama with CEM's positions, ALiBi: the baseline that differs from CEM only in its layers."""
attn = 'llama'
mlp = 'llama'
positions = 'alibi'

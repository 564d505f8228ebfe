"""Llama with CEM's positions, ALiBi: the baseline that differs from CEM in its layers alone."""
attn = 'llama'
mlp = 'llama'
positions = 'alibi'

"""The baseline: Llama, with rotary positions."""
attn = 'llama'
mlp = 'llama'
positions = 'rope'

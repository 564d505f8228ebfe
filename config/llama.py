"""The baseline. Other sizes: --size=86m (108m, 162m, 256m, mini)."""
size = '134m'
attn = 'llama'
mlp = 'llama'
attn_steps = 1
mlp_steps = 1

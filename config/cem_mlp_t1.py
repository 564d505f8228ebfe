"""CEM MLP in one step, Llama attention: the weight tying alone (paper, Figure 2b). As many weights:
--mlp_match=params."""
size = '134m'
attn = 'llama'
mlp = 'cem'
attn_steps = 1
mlp_steps = 1
preconditioner = 'none'

"""CEM MLP in one step, Llama attention with RoPE: the weight tying alone (paper, Figure 2b). With
as many weights as Llama: --mlp_match=params."""
attn = 'llama'
mlp = 'cem'
mlp_steps = 1
preconditioner = 'none'

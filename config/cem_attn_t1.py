"""CEM attention in one step, Llama MLP: weight tying and one diagonal for all heads, no
preconditioner (paper, Figure 2a, as we read it; without the diagonal: --kq_diag=none)."""
attn = 'cem'
mlp = 'llama'
attn_steps = 1
kq_diag = 'shared'
preconditioner = 'none'

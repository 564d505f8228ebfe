"""CEM attention in one step, Llama MLP: weight tying and the shared diagonal, no preconditioner
(paper, Figure 2a; without the diagonal: --kq_diag=none)."""
attn = 'cem'
mlp = 'llama'
attn_steps = 1
kq_diag = 'shared'
preconditioner = 'none'

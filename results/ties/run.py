"""
Train the models of the study of the three ties, and measure how they copy.

    python prepare_slimpajama.py --input=english.jsonl.zst --held_out=0.05 --tokenizer=bpe2048 \\
        --out_dir=data/english
    nice -n 19 python results/ties/run.py               the cells without a row in runs.csv
    nice -n 19 python results/ties/run.py --at_once=2   two at a time, on a core each
    OUT=/tmp/try python results/ties/run.py --tokens=40K      every command once, elsewhere

RULE.md has the rule, and cells.csv the order. results/gradient/run.py does the work: each cell is a
process of its own with one thread, which continues where it was stopped. S takes some 30 minutes,
and M some 95. This file has the layers that model.py does not have.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import model as model_file
from results.gradient import run


def weigh_heads() -> None:
    """Give each head's energy in CEM attention a weight w_k, from 1. Its gradient, and so what the
    head writes, gets the same factor; where the head looks does not change."""
    kind = model_file.CEMAttention
    init, merge, update = kind.__init__, kind.merge_heads, kind.diagonal_update

    def init_with_weights(self, cfg) -> None:
        init(self, cfg)
        self.head_weight = nn.Parameter(torch.ones(cfg.n_head))

    def weighted_merge(self, o: Tensor) -> Tensor:
        return merge(self, self.head_weight[:, None, None] * o)

    def weighted_update(self, alpha: Tensor, h: Tensor) -> Tensor:
        return update(self, self.head_weight[:, None, None] * alpha, h)
    kind.__init__ = init_with_weights
    kind.merge_heads = weighted_merge
    kind.diagonal_update = weighted_update


def take_two_steps() -> None:
    """Take two steps of length 1/2 down the energies of which a Llama layer with W_V = W_K is one:

        attention: scores k_j . (W_Q h_i + W_O (u_i - h_i)) / tau + b_ijk, values k_j
        MLP:       -gamma . phi(V h + W_d (u - h)), gamma = W h"""
    def attend(self, x: Tensor, pos) -> Tensor:
        h = self.norm(x)
        k = self.keys(h, pos)
        q_h = F.linear(h, self.W_Q)
        for _ in range(2):
            u = self.norm(x)
            q = self.split_heads(q_h + F.linear(u - h, self.W_O))
            o, update = self.attend(q, k, k, pos, u, h)
            x = x + (self.merge_heads(o) @ self.W_O + update) / 2
        return x

    def mlp(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gamma = F.linear(h, self.W)
        z_h = F.linear(h, self.V)
        for _ in range(2):
            u = self.norm(x)
            g = gamma * F.silu(z_h + F.linear(u - h, self.W_d))
            x = x + g @ self.W_d / 2
        return x
    model_file.LlamaAttention.forward = attend
    model_file.LlamaMLP.forward = mlp


def leave_values_unshifted() -> None:
    """With W_V = W_K, let the values be the keys before key_shift=half shifts them."""
    attend = model_file.LlamaAttention.attend

    def attend_unshifted(self, q: Tensor, k: Tensor, v: Tensor, pos, u: Tensor, h: Tensor):
        return attend(self, q, k, self.split_heads(F.linear(h, self.W_K)), pos, u, h)
    model_file.LlamaAttention.attend = attend_unshifted


VARIANTS = {'': lambda: None, 'head weights': weigh_heads, 'two steps': take_two_steps,
            'unshifted values': leave_values_unshifted}


def patch(variant: str) -> None:
    """Change model.py as a model of models.csv asks."""
    VARIANTS[variant]()


if __name__ == '__main__':
    run.main(HERE, patch, __doc__, sys.argv[1:])

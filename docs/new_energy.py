"""
Train an energy of your own: a class, and a name for it. Here it is an MLP, and autograd takes the
gradient. The class may as well stand in model.py, beside its name in MLP; then all scripts know it.

    python docs/new_energy.py train config/mini.py --mlp=relu --compile=False
    python docs/new_energy.py evaluate --energies        # the other scripts, with the same energy
    python docs/new_energy.py sample

torch.compile cannot take the second derivatives that training needs here.
"""
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # model.py is in the folder above

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import MLP, ModelConfig, RMSNorm, normal_param


class ReluMLP(nn.Module):
    """T steps down xi(u | h) = -gamma . phi(V u + b), phi(z) = relu(z)^3 / 3: each is -eta d energy
    / du. phi' is the squared ReLU, and b is learned."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.T, self.eta = cfg.mlp_steps, cfg.mlp_step_size
        self.norm = RMSNorm(cfg.d_model)
        self.W = normal_param(cfg.d_mlp, cfg.d_model, std=cfg.init_std)
        self.V = normal_param(cfg.d_mlp, cfg.d_model, std=cfg.init_std)
        self.b = nn.Parameter(torch.zeros(cfg.d_mlp))

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        gamma = F.linear(h, self.W)
        return -(gamma * F.linear(u, self.V, self.b).relu() ** 3 / 3).sum(dim=-1)

    @torch.inference_mode(False)  # the layer needs a gradient, also where others do without
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        # With frozen weights nothing else would make u require a gradient
        x = x if x.requires_grad else x.clone().requires_grad_()
        h = self.norm(x)
        for _ in range(self.T):
            u = self.norm(x)
            gradient, = torch.autograd.grad(self.energy(u, h).sum(), u, create_graph=True)
            x = x - self.eta * gradient
        return x


MLP['relu'] = ReluMLP

if __name__ == '__main__':
    os.environ['MPLBACKEND'] = 'agg'  # pictures go into files
    scripts = ('train', 'evaluate', 'sample', 'export')
    if not set(sys.argv[1:2]) & {*scripts}:
        sys.exit(f'new_energy.py: expected {", ".join(scripts)}, and its options')
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])

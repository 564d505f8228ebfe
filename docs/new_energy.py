"""
Train an energy of your own. Here it takes the place of the MLP's, and autograd its gradient.

    python docs/new_energy.py train config/mini.py --compile=False
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

import model


class ReluMLP(model.CEMMLP):
    """T steps down xi(u | h) = -gamma . phi(V u + b), phi(z) = relu(z)^3 / 3. phi' is the squared
    ReLU, and b is learned. P, residual and mlp_energy have no part in it. A checkpoint has a few
    numbers by which the scripts tell another energy, unless they run through this file."""
    def __init__(self, cfg: model.ModelConfig):
        super().__init__(cfg)
        self.b = nn.Parameter(torch.zeros(self.V.shape[0]))

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        gamma = F.linear(h, self.W)
        return -(gamma * F.linear(u, self.V, self.b).relu() ** 3 / 3).sum(dim=-1)

    @torch.enable_grad()  # evaluation runs under no_grad, and steps need the gradient there, too
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        for _ in range(self.T):
            u = self.norm(x)
            gradient, = torch.autograd.grad(self.energy(u, h).sum(), u, create_graph=True)
            x = x - self.eta * gradient
        return x


if __name__ == '__main__':
    os.environ['MPLBACKEND'] = 'agg'  # pictures go into files
    scripts = ('train', 'evaluate', 'sample', 'export')
    if not set(sys.argv[1:2]) & {*scripts}:
        sys.exit(f'new_energy.py: expected {", ".join(scripts)}, and its options')
    model.CEMMLP = ReluMLP  # what a Block takes for mlp=cem
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])

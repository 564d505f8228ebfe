"""
A Transformer from two energies: the idea of CEM (arXiv 2605.07588), and nothing else.

No attention and no MLP is written below. A layer is an energy of a token's state u, given its
context h, and the layer's output is T steps down that energy. Autograd takes the gradient, and what
comes out is attention with tied weights, and a gated MLP with tied weights. model.py writes both
gradients out, which is faster, and adds the paper's options; test_model.py keeps them equal.

    python energy.py               learn a page of English by heart, in about a minute
    python energy.py book.txt      learn a text of yours
"""
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.special import spence


class Phi(torch.autograd.Function):
    """phi(z) = z softplus(z) + Li2(-e^z): the integral of SiLU, which has no name in torch."""
    @staticmethod
    def forward(z):
        a = z.detach().cpu().double().numpy()
        dilog = spence(1 + np.exp(-abs(a)))                                    # Li2(-e^-|a|)
        dilog = np.where(a > 0, -np.pi ** 2 / 6 - a ** 2 / 2 - dilog, dilog)   # Li2(-e^a)
        return torch.as_tensor(a * np.logaddexp(0, a) + dilog).to(z)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * F.silu(ctx.saved_tensors[0])


class Descent(nn.Module):
    """Move the state x of each token down an energy, in T steps: (B, J, D) -> (B, J, D)."""
    def __init__(self, D, T):
        super().__init__()
        self.T, self.gain = T, nn.Parameter(torch.ones(D))

    def norm(self, x):
        return F.rms_norm(x, self.gain.shape, self.gain, 1e-5)

    def forward(self, x):
        h = self.norm(x)  # the context, the same for all steps
        self.path = []    # the mean energy before each step, to look at
        for _ in range(self.T):
            u = self.norm(x)
            energy = self.energy(u, h).sum()
            gradient, = torch.autograd.grad(energy, u, create_graph=self.training)
            x = x - gradient / self.T
            self.path.append(energy.item() / u[..., 0].numel())
        return x


class Interaction(Descent):
    """The energy that becomes attention. It is low if u matches the keys of its past (Eq. 2)."""
    def __init__(self, D, K, T):
        super().__init__(D, T)
        self.K, self.tau = K, D ** 0.5
        self.W_Q = nn.Parameter(torch.randn(D, D) / D ** 0.5)
        self.W_K = nn.Parameter(torch.randn(D, D) / D ** 0.5)

    def energy(self, u, h):
        """-tau sum_k log sum_{j <= i} exp(k_jk . q_ik / tau - m_k (i - j)): (B, J, D) -> (B, J)."""
        q, k = ((x @ W.T).unflatten(-1, (self.K, -1)).transpose(1, 2)    # (B, K, J, R)
                for x, W in ((u, self.W_Q), (h, self.W_K)))
        i = torch.arange(u.shape[1])
        distance = i[:, None] - i                                        # (J, J)
        m = 2.0 ** -torch.arange(1, self.K + 1)[:, None, None]           # ALiBi's slopes
        a = q @ k.mT / self.tau - m * distance                           # (B, K, J, J)
        return -self.tau * a.masked_fill(distance < 0, -torch.inf).logsumexp(dim=-1).sum(dim=1)


class Elementwise(Descent):
    """The energy that becomes a gated MLP: gamma says which features of u lower it (Eq. 7)."""
    def __init__(self, D, width, T):
        super().__init__(D, T)
        self.W = nn.Parameter(torch.randn(width, D) / D ** 0.5)
        self.V = nn.Parameter(torch.randn(width, D) / D ** 0.5)

    def energy(self, u, h):
        """-gamma . phi(V u), with gamma = W h: (B, J, D) -> (B, J)."""
        gamma = h @ self.W.T
        return -(gamma * Phi.apply(u @ self.V.T)).sum(dim=-1)


class Transformer(nn.Module):
    """Map bytes (B, J) to logits of the next byte, (B, J, 256)."""
    def __init__(self, D=64, K=4, width=172, n_layer=2, T=1):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(256, D))
        self.head = nn.Parameter(torch.randn(256, D) / D ** 0.5)
        self.gain = nn.Parameter(torch.ones(D))
        self.layers = nn.Sequential(*(layer for _ in range(n_layer) for layer in
                                      (Interaction(D, K, T), Elementwise(D, width, T))))

    def forward(self, idx):
        x = self.layers(self.embedding[idx])
        return F.rms_norm(x, self.gain.shape, self.gain, 1e-5) @ self.head.T


def main(path='pretrained/held_out.txt', J=64, steps=400):
    torch.manual_seed(0)
    text = torch.tensor(list(Path(path).read_bytes()))
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - J, (16, 1))
        batch = text[starts + torch.arange(J + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 100 == 0:
            print(f'step {step}: loss {loss:.3f} nats a byte')
    # Take more steps than in training, and look at the energies
    model.eval()
    for n, layer in enumerate(model.layers, 1):
        layer.T = 4
        model(batch[:, :-1])
        falls = ', '.join(f'{e - layer.path[0]:.3f}' for e in layer.path)
        print(f'layer {n}, {type(layer).__name__}: energy along four steps {falls}')
        layer.T = 1
    written = text[:J].tolist()
    for _ in range(200):
        logits = model(torch.tensor([written[-J:]]))[0, -1]
        written.append(int(torch.multinomial((logits / 0.7).softmax(-1), 1)))
    print(bytes(written[J:]).decode(errors='replace'))


if __name__ == '__main__':
    main(*sys.argv[1:])

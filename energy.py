"""
A Transformer from two energies: the idea of CEM (arXiv 2605.07588), and nothing else.

No attention and no MLP is written below. A layer is an energy of a token's state u, given its
context h, and autograd takes T steps down that energy. This gives attention whose values are its
keys, and a gated MLP whose down projection is the matrix inside its SiLU, transposed. model.py
writes both gradients out, which is faster, and adds the paper's options. A test compares the two.

    python energy.py [book.txt]    learn a page of English, or a text of yours, in half a minute
"""
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.special import spence
from torch import Tensor


class Phi(torch.autograd.Function):
    """phi(z) = z softplus(z) + Li2(-e^z), the integral of SiLU. scipy's spence(z) is Li2(1 - z)."""
    @staticmethod
    def forward(z: Tensor) -> Tensor:
        b = z.detach().cpu().double().abs()
        dilog = torch.as_tensor(spence((1 + (-b).exp()).numpy()))  # Li2(-e^-b)
        left = dilog - b * (-b).exp().log1p()                      # phi(-b)
        right = b ** 2 / 2 - torch.pi ** 2 / 6 - left              # phi(b), by inversion of Li2
        return torch.where(z.cpu() > 0, right, left).to(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * F.silu(ctx.saved_tensors[0])


class Descent(nn.Module):
    """Move the state x of each token down an energy, in T steps: (B, J, D) -> (B, J, D). The
    gradient is by u = norm(x): the norm's own derivative is left out, as in the paper."""
    def __init__(self, D: int, T: int):
        super().__init__()
        self.T, self.eta = T, 1 / T  # the number of steps, and their length
        self.norm = nn.RMSNorm(D, eps=1e-5)

    @torch.enable_grad()  # the layer needs a gradient, also under torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)  # the context, which stays as it is
        for _ in range(self.T):
            u = self.norm(x)
            energy = self.energy(u, h).sum()  # each token's own; no energy reads another token's u
            gradient, = torch.autograd.grad(energy, u, create_graph=True)  # by u alone, not by h
            x = x - self.eta * gradient       # added to x: the residual connection
        return x


class Interaction(Descent):
    """The energy that becomes attention (Eq. 2). It is low if u matches a key of its past. The
    derivative of log-sum-exp is softmax, so minus the gradient is W_Q^T sum_j alpha_j k_j."""
    def __init__(self, D: int, K: int, T: int):
        super().__init__(D, T)
        self.K, self.tau = K, D ** 0.5  # Algorithm 1's tau; Llama's is sqrt(D / K)
        self.W_Q = nn.Parameter(torch.randn(D, D) / D ** 0.5)
        self.W_K = nn.Parameter(torch.randn(D, D) / D ** 0.5)

    def scores(self, u: Tensor, h: Tensor) -> Tensor:
        """a_ijk = k_jk . q_ik / tau - m_k (i - j), or -inf if j > i: (B, J, D) -> (B, K, J, J)."""
        q = (u @ self.W_Q.T).unflatten(-1, (self.K, -1)).transpose(1, 2)     # (B, K, J, D / K)
        k = (h @ self.W_K.T).unflatten(-1, (self.K, -1)).transpose(1, 2)
        i = torch.arange(u.shape[1])
        distance = i[:, None] - i                                            # (J, J)
        m = 2.0 ** -torch.arange(1, self.K + 1)[:, None, None]               # ALiBi's slopes, 2^-k
        return (q @ k.mT / self.tau - m * distance).masked_fill(distance < 0, -torch.inf)

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """-tau sum_k log sum_j exp(a_ijk): (B, J, D) -> (B, J)."""
        return -self.tau * self.scores(u, h).logsumexp(dim=-1).sum(dim=1)


class Elementwise(Descent):
    """The energy that becomes a gated MLP (Eq. 7). The gate gamma says which features V u lower the
    energy, and how much. phi' is SiLU, so minus the gradient is V^T (gamma * silu(V u))."""
    def __init__(self, D: int, width: int, T: int):
        super().__init__(D, T)
        self.W = nn.Parameter(torch.randn(width, D) / D ** 0.5)
        self.V = nn.Parameter(torch.randn(width, D) / D ** 0.5)

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """-gamma . phi(V u), with gamma = W h: (B, J, D) -> (B, J)."""
        gamma = h @ self.W.T
        return -(gamma * Phi.apply(u @ self.V.T)).sum(dim=-1)


class Transformer(nn.Module):
    """Map bytes (B, J) to logits of the next byte, (B, J, 256)."""
    def __init__(self, D: int = 64, K: int = 4, width: int = 172, n_layer: int = 2, T: int = 1):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(256, D))
        self.head = nn.Parameter(torch.randn(256, D) / D ** 0.5)
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.layers = nn.Sequential()
        for _ in range(n_layer):
            self.layers.extend([Interaction(D, K, T), Elementwise(D, width, T)])

    def forward(self, idx: Tensor) -> Tensor:
        return self.norm(self.layers(self.embedding[idx])) @ self.head.T


def main(path: str = f'{Path(__file__).parent}/pretrained/held_out.txt', J: int = 64) -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(Path(path).read_bytes()))
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 401):
        batch = text[torch.randint(len(text) - J, (16, 1)) + torch.arange(J + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 100 == 0:
            print(f'step {step}: training loss {loss:.3f} nats a byte', flush=True)
    # Continue the text from its first J bytes
    written = text[:J].tolist()
    for _ in range(200):
        logits = model(torch.tensor([written[-J:]]))[0, -1]
        written.append(int(torch.multinomial((logits / 0.7).softmax(-1), 1)))
    print(bytes(written[J:]).decode(errors='replace'))
    # Divide each layer's step into four, and print the change of its energy after each of them
    x = model.embedding[batch[:, :-1]]
    for layer in model.layers:
        layer.eta = 1 / 4
        path = []
        for T in range(5):
            layer.T = T
            after = layer(x)
            path.append(layer.energy(layer.norm(after), layer.norm(x)).mean().item())
        print(type(layer).__name__, 'energy:', [round(energy - path[0], 2) for energy in path])
        x = after


if __name__ == '__main__':
    main(*sys.argv[1:])

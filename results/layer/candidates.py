"""
Layers that were tried beside CEM's, each still a step down an energy: train.py with other layers.

    python results/layer/candidates.py NAME[+NAME...] [train.py's options]

NAMES says what there is. Only u, the normed x, is bound by an energy: keys, biases and gates may be
any function of the context h. Where the names change the energy, `energy` below is the new one.
"""
import os
import sys
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

import torch  # noqa: E402  after the path is set
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

import model  # noqa: E402
from model import ModelConfig, drawn  # noqa: E402
from nanocem import fast, muon  # noqa: E402

NAMES = {
    'wide': 'W_Q, W_K of (2 D, D): heads twice as wide',
    'shift': 'keys and gamma from h_j + w * h_(j-1)',
    'x0': 'x <- lambda x + mu x_0 before each layer, x_0 the embedding',
    'first': 'k <- k + lambda k of the first layer',
    'velocity': 'x moves on by beta of its last move, and u looks ahead by mu of it',
    'head_gate': 'each head times 2 sigmoid(w_k . h_i)',
    'gate': 'q = g * W_Q u with g = 2 sigmoid(W_G h_i), so that the output is g * o',
    'forget': 'a bias sum_l log sigmoid(w_k . h_l + 4) over the tokens l between j and i',
    'qknorm': 'q and k are normed, with the gradient of that',
    'slice': 'head k also has its R coordinates of h as keys and values, d * u as query',
    'relu2': "phi' = ReLU^2 in the MLP",
    'rounds': 'T rounds of attention step and MLP step from one context of the block',
    'own_gain': 'a norm of its own for each step',
    'own_p': 'a P of its own for each step',
    'anchored': 'scores also read v_j . W_O (u - h_i): values of their own, W_V h_j, by W_O^T',
    'prior': 'scores k_j . W_Q h_i + v_j . W_O (u - h_i): at u = h it is Llama\'s attention',
    'sharpness': 'u - h counts beta times in prior, mlp_prior: learned, one a head, a hidden unit',
    'offset': 'q = W_Q u + W_B h_i: the output matrix need not be the one that asks',
    'mlp_prior': 'z = V h + W_d (u - h): at u = h it is Llama\'s MLP',
}
on: set[str] = set()  # the names in force
shared: dict[str, Any] = {}  # what layers hand on, in one forward pass


def before(h: Tensor) -> Tensor:
    """h_(j-1) at each j, 0 at the first."""
    return F.pad(h[:, :-1], (0, 0, 1, 0))


def gate_of(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(x)


def forgotten(h: Tensor, w: Tensor) -> Tensor:
    """sum_l log sigmoid(w_k . h_l + 4) over the tokens l between j and i: (B, K, I, J)."""
    kept = F.logsigmoid(h @ w.mT + 4).mT.cumsum(dim=-1)  # (B, K, J)
    return kept[..., :, None] - kept[..., None, :]


class Attention(model.Attention):
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        D, K = cfg.d_model, self.K
        if 'wide' in on:
            self.W_Q, self.W_K = (drawn(2 * D, D, std=cfg.init_std) for _ in range(2))
        if on & {'anchored', 'prior'}:
            self.W_V, self.W_O = (drawn(D, D, std=cfg.init_std) for _ in range(2))
        self.beta = nn.Parameter(torch.ones(K, 1, 1)) if 'sharpness' in on else 1.0
        self.W_B = drawn(D, D, std=cfg.init_std) if 'offset' in on else None
        self.w = nn.Parameter(torch.zeros(D)) if 'shift' in on else None
        self.first = nn.Parameter(torch.zeros(())) if 'first' in on else None
        self.W_G = nn.Parameter(torch.zeros(len(self.W_Q), D)) if 'gate' in on else None
        self.w_head = nn.Parameter(torch.zeros(K, D)) if 'head_gate' in on else None
        self.w_forget = nn.Parameter(torch.zeros(K, D)) if 'forget' in on else None
        self.temper = nn.Parameter(torch.ones(K, 1, 1)) if 'qknorm' in on else None
        self.d = nn.Parameter(torch.zeros(D)) if 'slice' in on else None
        self.norms = nn.ModuleList(
            model.RMSNorm(D, cfg.norm_eps) for _ in range(self.steps)) if 'own_gain' in on else None
        self.Ps = nn.ModuleList(
            model.Preconditioner(cfg, K, cfg.attn_rank)
            for _ in range(self.steps)) if 'own_p' in on else None

    def forward(self, x: Tensor, pos: Any, cache: Any = None) -> Tensor:
        h = self.norm(x)
        context = self.context(h, pos)
        for t in range(self.steps):
            x = x + self.eta * self.step(x, h, context, pos, t)
        return x

    def context(self, h: Tensor, pos: Any) -> tuple[Tensor, ...]:
        """All that the steps read of h: keys, values and what depends on i alone."""
        c = h if self.w is None else h + self.w * before(h)
        k = self.project(c, self.W_K, pos)
        if self.first is not None:
            k = k + self.first * shared.setdefault('k', k)
        if self.temper is not None:
            k = F.rms_norm(k, k.shape[-1:])
        v = self.project(h, self.W_V) if on & {'anchored', 'prior'} else None
        return k, v, c, self.rest(h, pos)

    def rest(self, h: Tensor, pos: Any) -> Tensor:
        """b_ijk, and what else does not depend on u."""
        b = self.bias(pos)
        if self.w_forget is not None:
            b = b + forgotten(h, self.w_forget)
        return b

    def scores(self, u: Tensor, h: Tensor, context: tuple[Tensor, ...], pos: Any) -> Tensor:
        """a_ijk, (B, K, I, J)."""
        k, v, c, b = context
        a = self.query(u, h, pos)[0] / self.tau @ k.mT + b
        if self.kq_diag is not None:
            a = a + (u[:, None] * (self.kq_diag[:, None] / self.tau)) @ c[:, None].mT
        if v is not None:
            a = a + self.project(u - h, self.W_O) * (self.beta / self.tau) @ v.mT
        if self.d is not None:
            a = a + self.project_slice(self.d * u) / self.tau @ self.project_slice(h).mT
        return a

    def query(self, u: Tensor, h: Tensor, pos: Any) -> tuple[Tensor, Any]:
        """q, (B, K, I, R), and the length it had where it is normed."""
        q, length = self.project(h if 'prior' in on else u, self.W_Q, pos), None
        if self.W_B is not None:
            q = q + self.project(h, self.W_B)
        if self.W_G is not None:
            q = gate_of(self.project(h, self.W_G)) * q
        if self.temper is not None:
            length = q.square().mean(dim=-1, keepdim=True).add(1e-5).sqrt()
            q = self.temper * q / length
        return q, length

    def project_slice(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.K, -1)).transpose(1, 2)

    def step(self, x: Tensor, h: Tensor, context: tuple[Tensor, ...], pos: Any, t: int) -> Tensor:
        """P times minus the gradient of `energy`; without the diagonal's part, as Algorithm 1."""
        u = (self.norm if self.norms is None else self.norms[t])(x)
        return self.update(u, h, context, pos, self.P if self.Ps is None else self.Ps[t])

    def update(self, u: Tensor, h: Tensor, context: tuple[Tensor, ...], pos: Any, P: Any) -> Tensor:
        k, v, *_ = context
        alpha = self.scores(u, h, context, pos).softmax(dim=-1)
        rows = lambda W: P(W.unflatten(0, (self.K, -1))).flatten(0, 1)  # noqa: E731
        gates = 1.0 if self.w_head is None else self.gates(h)
        dx = 0.0
        if 'prior' not in on:
            o = alpha @ k
            if self.temper is not None:  # through q's norm
                q, length = self.query(u, h, pos)
                unit = q / self.temper
                o = self.temper * (o - unit * (unit * o).mean(dim=-1, keepdim=True)) / length
            if self.W_G is not None:
                o = gate_of(self.project(h, self.W_G)) * o
            dx = self.merge(gates * o, pos) @ rows(self.W_Q)
        if v is not None:
            dx = dx + self.merge(gates * (alpha @ v), pos) @ rows(self.W_O)
        if self.d is not None:  # P = I here
            dx = dx + self.d * self.merge(gates * (alpha @ self.project_slice(h)), pos)
        return dx

    def gates(self, h: Tensor) -> Tensor:
        return gate_of(h @ self.w_head.mT).mT[..., None]  # (B, K, I, 1)

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """Of normed u and h, (B, J, D) -> (B, J)."""
        pos = model.position_tables(self.cfg, h)
        a = self.scores(u, h, self.context(h, pos), pos)
        gates = 1.0 if self.w_head is None else self.gates(h)[..., 0]
        if 'sharpness' in on:
            gates = gates / self.beta[..., 0]
        return -self.tau * (gates * a.logsumexp(dim=-1)).sum(dim=1)


class MLP(model.MLP):
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        D = cfg.d_model
        if 'mlp_prior' in on:
            self.W_d = drawn(*self.V.shape, std=cfg.init_std)
        self.beta = nn.Parameter(torch.ones(len(self.V))) if 'sharpness' in on else 1.0
        self.w = nn.Parameter(torch.zeros(D)) if 'shift' in on else None
        self.norms = nn.ModuleList(
            model.RMSNorm(D, cfg.norm_eps) for _ in range(self.steps)) if 'own_gain' in on else None
        self.Ps = nn.ModuleList(
            model.Preconditioner(cfg, 1, cfg.mlp_rank)
            for _ in range(self.steps)) if 'own_p' in on else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        context = self.context(h)
        for t in range(self.steps):
            x = x + self.eta * self.step(x, h, context, t)
        return x

    def context(self, h: Tensor) -> Tensor:
        return F.linear(h if self.w is None else h + self.w * before(h), self.W)

    def step(self, x: Tensor, h: Tensor, gamma: Tensor, t: int) -> Tensor:
        u = (self.norm if self.norms is None else self.norms[t])(x)
        return self.update(u, h, gamma, self.P if self.Ps is None else self.Ps[t])

    def hidden(self, u: Tensor, h: Tensor) -> Tensor:
        if 'mlp_prior' in on:
            return F.linear(h, self.V) + self.beta * F.linear(u - h, self.W_d)
        return F.linear(u, self.V)

    def update(self, u: Tensor, h: Tensor, gamma: Tensor, P: Any) -> Tensor:
        z = self.hidden(u, h)
        W_out = P((self.W_d if 'mlp_prior' in on else self.V)[None])[0]
        return gamma * (F.relu(z).square() if 'relu2' in on else F.silu(z)) @ W_out

    def energy(self, u: Tensor, h: Tensor) -> Tensor:
        """Of normed u and h, (B, J, D) -> (B, J)."""
        z = self.hidden(u, h)
        phi = F.relu(z) ** 3 / 3 if 'relu2' in on else fast.Phi.apply(z)
        return -(self.context(h) * phi / self.beta).sum(dim=-1)


class LlamaAttention(model.Attention):
    """Llama's with the same: keys (and values) from the shifted context; a forgetting gate, which
    needs attn_impl=readable."""
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        D, K = cfg.d_model, self.K
        self.w = nn.Parameter(torch.zeros(D)) if 'shift' in on else None
        self.w_forget = nn.Parameter(torch.zeros(K, D)) if 'forget' in on else None

    def project(self, x: Tensor, W: Tensor, pos: Any = None) -> Tensor:
        if self.w is not None and W is self.W_K:
            x = x + self.w * before(x)
        return super().project(x, W, pos)

    def scores(self, q: Tensor, u: Tensor, k: Tensor, h: Tensor, pos: Any) -> Tensor:
        a = super().scores(q, u, k, h, pos)
        return a if self.w_forget is None else a + forgotten(h, self.w_forget)


class LlamaMLP(model.MLP):
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.w = nn.Parameter(torch.zeros(cfg.d_model)) if 'shift' in on else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        c = h if self.w is None else h + self.w * before(h)
        return x + F.linear(c, self.W) * F.silu(F.linear(h, self.V)) @ self.W_d


class Block(model.Block):
    def __init__(self, cfg: ModelConfig):
        nn.Module.__init__(self)
        self.attn = Attention(cfg) if cfg.attn == 'cem' else LlamaAttention(cfg)
        self.mlp = MLP(cfg) if cfg.mlp == 'cem' else LlamaMLP(cfg)
        if 'x0' in on:
            self.mix = nn.Parameter(torch.tensor([1.0, 0.0]))
        if 'velocity' in on:  # beta and mu of attention, of the MLP
            self.beta, self.mu = (nn.Parameter(torch.zeros(2)) for _ in range(2))

    def forward(self, x: Tensor, pos: Any, cache: Any = None) -> Tensor:
        if 'x0' in on:
            x = self.mix[0] * x + self.mix[1] * shared.setdefault('x0', x)
        if 'rounds' in on:
            h, g = self.attn.norm(x), self.mlp.norm(x)
            context, gamma = self.attn.context(h, pos), self.mlp.context(g)
            for t in range(self.attn.steps):
                x = x + self.attn.eta * self.attn.step(x, h, context, pos, t)
                x = x + self.mlp.eta * self.mlp.step(x, g, gamma, t)
            return x
        if 'velocity' in on:
            for n, sublayer in enumerate((lambda y: self.attn(y, pos), self.mlp)):
                moved = shared.get('v', 0.0)
                ahead = x + self.mu[n] * moved
                shared['v'] = self.beta[n] * moved + (sublayer(ahead) - ahead)
                x = x + shared['v']
            return x
        for _ in range(self.attn.reuse):
            x = self.attn(x, pos)
        for _ in range(self.mlp.reuse):
            x = self.mlp(x)
        return x


class Transformer(model.Transformer):
    def hidden(self, idx: Tensor, cache: Any = None) -> Tensor:
        shared.clear()
        return super().hidden(idx, cache)


def put_in_force(names: str) -> None:
    """Let model.py's Transformer have the named layers. SystemExit for a name there is not."""
    on.clear()
    on.update(name for name in names.split('+') if name != 'cem')
    if on - set(NAMES):
        raise SystemExit(f'{names}: expected names of {", ".join(NAMES)}')
    model.Block = Block
    muon.MATRICES = (*muon.MATRICES, 'W_B', 'W_G')


if __name__ == '__main__':
    put_in_force(sys.argv[1])
    import train
    train.Transformer = Transformer
    sys.exit(train.main(sys.argv[2:]))

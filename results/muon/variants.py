"""
train.py with another Muon: what was looked at once, beside Muon as it is.

    python results/muon/variants.py three_steps | heads | preconditioner [train.py's options]
"""
import os
import sys
from functools import partial
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from torch import Tensor  # noqa: E402  after the path is set

import train  # noqa: E402
from nanocem import muon  # noqa: E402

whole = muon.orthogonal


def by_head(n_head: int, G: Tensor, steps: int) -> Tensor:
    """Square matrices are W_Q and W_K: their heads' (R, D) rows each on their own."""
    if G.shape[-1] != G.shape[-2]:
        return whole(G, steps)
    return whole(G.unflatten(-2, (n_head, -1)), steps).flatten(-3, -2)


def with_preconditioners(model: Any) -> list[Tensor]:
    return [p for name, p in model.blocks.named_parameters()
            if name.split('.')[-1] in (*muon.MATRICES, 'U')]


def main(variant: str, argv: list[str]) -> int:
    if variant == 'three_steps':
        train.Muon = partial(muon.Muon, steps=3)
    elif variant == 'heads':
        muon.orthogonal = partial(by_head, 4)
    elif variant == 'preconditioner':
        train.block_matrices = with_preconditioners
    else:
        raise SystemExit(f'{variant}: expected three_steps, heads or preconditioner')
    return train.main(argv)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1], sys.argv[2:]))

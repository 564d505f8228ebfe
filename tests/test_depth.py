"""The main job in small: the default CEM model learns at the paper's twelve layers."""
import math
import os
from pathlib import Path

import numpy as np
import torch

from model import ModelConfig, Transformer

STEPS, BATCH, LENGTH, RATE = 60, 16, 32, 2e-3


def text() -> np.ndarray:
    """Bytes of the standard library's source."""
    folder = Path(os.__file__).parent
    return np.concatenate([np.frombuffer((folder / name).read_bytes(), np.uint8)
                           for name in ('argparse.py', 'ast.py', 'datetime.py', 'inspect.py')])


def below_unigrams(**options: str | float) -> float:
    """Nats a byte by which the last ten of 60 steps lie below the text's unigram entropy."""
    data = text()
    p = np.bincount(data) / len(data)
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    torch.manual_seed(1)
    model = Transformer(ModelConfig(d_model=32, n_layer=12, n_head=2, d_mlp=86, vocab_size=256,
                                    context_length=LENGTH, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-9)
    rng, losses = np.random.default_rng(1), []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group['lr'] = RATE * min(1, (step + 1) / 10)
        at = rng.integers(0, len(data) - LENGTH, BATCH)
        rows = torch.from_numpy(np.stack([data[a:a + LENGTH + 1] for a in at]).astype(np.int64))
        loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())[1]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return entropy - sum(losses[-10:]) / 10


def test_the_default_model_learns_at_twelve_layers() -> None:
    margin = below_unigrams()
    assert margin > 0.1, f'{margin:.3f} nats below the unigram entropy'


def test_steps_of_one_from_a_normed_start_do_not() -> None:
    """So the canary can fail: without a skip past the norm, the loss stays where it is."""
    margin = below_unigrams(residual='normed', attn_step_size=1.0, mlp_step_size=1.0)
    assert margin < 0.05, f'{margin:.3f} nats below the unigram entropy'

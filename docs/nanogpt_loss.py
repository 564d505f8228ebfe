"""
The loss of a nanoGPT on its whole validation text, one window of its context after the other.
Its own train.py samples 20 batches. Run this in nanoGPT's folder, on the checkpoint of its recipe
for a CPU:

    python data/shakespeare_char/prepare.py
    python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 \\
        --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 \\
        --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
    python .../docs/nanogpt_loss.py out-shakespeare-char/ckpt.pt
"""
import math
import os
import sys

import numpy as np
import torch

sys.path.insert(0, os.getcwd())


@torch.no_grad()
def main(path: str) -> None:
    from model import GPT, GPTConfig  # nanoGPT's
    checkpoint = torch.load(path, map_location='cpu', weights_only=False)
    model = GPT(GPTConfig(**checkpoint['model_args'])).eval()
    prefix = '_orig_mod.'  # of a compiled model
    model.load_state_dict({name.removeprefix(prefix): w for name, w in checkpoint['model'].items()})
    tokens = np.fromfile('data/shakespeare_char/val.bin', dtype=np.uint16).astype(np.int64)
    ids = torch.from_numpy(tokens)
    J, total = model.config.block_size, 0.0
    for start in range(0, len(ids) - 1, J):
        targets = ids[start + 1:start + J + 1]
        _, loss = model(ids[None, start:start + len(targets)], targets[None])
        total += loss.item() * len(targets)
    nats = total / (len(ids) - 1)
    parameters = sum(p.numel() for p in model.parameters())
    print(f'{parameters:,} parameters: {nats:.4f} nats per character, '
          f'{nats / math.log(2):.4f} bits per byte')


if __name__ == '__main__':
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])

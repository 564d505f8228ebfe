"""
Text from a trained model.

    python sample.py                                                 from the newest run
    python sample.py --out_dir=out/mini-cem2-cem2 --prompt="def " --temperature=0.7 --top_k=40 --attn_steps=4
"""
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from configurator import build, fail, read_options
from model import ModelConfig, Transformer
from nanocem.runs import last_checkpoint, newest_run, read_checkpoint
from train import sample_text


@dataclass
class SampleConfig:
    """What to generate."""
    out_dir: str | None = None  # the run; default: the newest under out/
    checkpoint: Literal['best', 'last'] = 'best'  # best by validation, or the last one written
    prompt: str = ''  # the text to continue
    tokens: int = 500  # how many to add
    samples: int = 1  # how many texts
    temperature: float = 0.8  # 0 takes the likeliest token every time
    top_k: int | None = None  # draw among the k likeliest tokens only
    seed: int = 1337  # of the draws
    attn_steps: int | None = None  # T_eps at test time; default: as trained
    mlp_steps: int | None = None  # T_xi at test time; default: as trained
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda where there is one

    def __post_init__(self) -> None:
        for name, low in (('tokens', 1), ('samples', 1), ('temperature', 0), ('top_k', 1), ('attn_steps', 1), ('mlp_steps', 1)):
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ValueError(f'{name}={getattr(self, name)}: expected at least {low}')


def main(argv: list[str]) -> None:
    cfg = build(SampleConfig, read_options(argv, SampleConfig))
    out_dir = cfg.out_dir or newest_run()
    best = os.path.join(out_dir or '', 'best.pt')
    try:
        state = read_checkpoint(best) if cfg.checkpoint == 'best' and os.path.exists(best) else last_checkpoint(out_dir or '')
    except ValueError as error:
        fail(f'{error}; --checkpoint=last takes the last one')
    if state is None:
        fail(f'no checkpoint in {out_dir or "out/"}: python train.py makes one')
    device = cfg.device if cfg.device != 'auto' else 'cuda' if torch.cuda.is_available() else 'cpu'
    model = Transformer(ModelConfig(**state['model_config']))
    model.load_state_dict(state['model'])
    model.to(device).eval().set_steps(cfg.attn_steps, cfg.mlp_steps)
    for s in range(cfg.samples):
        print(sample_text(model, state['data_dir'], cfg.prompt, cfg.tokens, cfg.temperature, cfg.top_k, cfg.seed + s))
        print('---')


if __name__ == '__main__':
    main(sys.argv[1:])

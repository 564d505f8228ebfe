"""
Generate text with a trained model.

    python sample.py                                         with the newest run
    python sample.py --out_dir=out/RUN --prompt="def " --temperature=0.7
    python sample.py --prompt_file=intro.txt                 continue the text in a file
"""
import os
import sys
from dataclasses import dataclass
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import (
    PathStr,
    build,
    check,
    command_line,
    in_range,
    read_options,
    user_errors,
    warn,
)
from nanocem.documents import TextFile
from nanocem.runs import load_model, newest_run
from nanocem.sampling import sample_text
from nanocem.tokenizers import tokenizer_of


@dataclass
class SampleConfig:
    """The text to generate."""
    EXCLUSIVE = (('prompt', 'prompt_file'),)
    out_dir: PathStr | None = None  # a run (its best.pt), a .pt or export; default: newest in out/
    prompt: str = ''  # the text to continue
    prompt_file: PathStr | None = None  # continue the text in this file; -: standard input
    tokens: int = 500  # maximum number of tokens to generate; the model may end a text sooner
    num_samples: int = 1  # number of texts, generated as one batch
    temperature: float = 0.8  # divides the logits; 0: always take the likeliest token
    top_k: int | None = None  # sample only from the k likeliest tokens
    seed: int = 1  # seed of the sampling
    attn_steps: int | None = None  # T of CEM attention; default: as trained
    mlp_steps: int | None = None  # T of the CEM MLP; default: as trained
    use_cache: bool | None = None  # keep a KV cache; default: if it changes no logit
    device: Literal['auto', 'cpu', 'cuda', 'mps'] = 'auto'  # auto: cuda if there is a GPU

    def __post_init__(self) -> None:
        in_range(self, 1, 10**6, 'tokens num_samples top_k attn_steps mlp_steps')
        in_range(self, 0, 2**63 - 1, 'seed')
        check(self.temperature == 0 or 1e-3 <= self.temperature <= 1e3,
              f'temperature={self.temperature}: expected 0, or 0.001 to 1,000')


@command_line
def main(argv: list[str]) -> None:
    # Read the options and the prompt
    cfg = build(SampleConfig, read_options(argv, SampleConfig))
    if cfg.prompt_file:
        file = '/dev/stdin' if cfg.prompt_file == '-' else cfg.prompt_file
        cfg.prompt = ''.join(TextFile(file))
    # Load the model, and set its numbers of gradient steps
    if not cfg.out_dir:
        cfg.out_dir = newest_run()
        print(f'{cfg.out_dir}, the newest run in out/:', file=sys.stderr, flush=True)
    model, state = load_model(cfg.out_dir, cfg.device)
    with user_errors():
        model.set_steps(cfg.attn_steps, cfg.mlp_steps)
    for name in ('attn_steps', 'mlp_steps'):
        T, trained = getattr(cfg, name), getattr(model.cfg, name)
        if T and trained < T:
            warn(f'{name}={T}: the model was trained with {trained}. The step size stays the same, '
                 'so the state moves further in total, and text gets worse (docs/options.md)')
    # Generate text and print it
    text = sample_text(model, tokenizer_of(state), cfg.prompt, cfg.tokens, cfg.temperature,
                       cfg.top_k, cfg.seed, cfg.num_samples, use_cache=cfg.use_cache)
    print(f'{text}\n---', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])

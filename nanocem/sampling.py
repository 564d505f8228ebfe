"""Text from a model: encode a prompt, generate tokens, decode them."""
from typing import Any

import torch

from configurator import check
from nanocem.decode import Cache


@torch.no_grad()
def sample_text(model: Any, tokenizer: Any, prompt: str, tokens: int, temperature: float,
                top_k: int | None, seed: int, n: int = 1) -> str:
    """Return n texts that begin with `prompt`, joined by lines of ---. UserError if the model's
    logits are not finite."""
    ids = [tokenizer.bos, *tokenizer.encode(prompt)]
    idx = torch.tensor([ids] * n, device=model.embedding.device)
    finite = bool(model(idx[:1, -model.cfg.context_length:])[0].isfinite().all())
    check(finite, 'the logits of the model are not finite: it cannot be sampled from')
    generator = torch.Generator(idx.device).manual_seed(seed)
    with Cache(model):
        idx = model.generate(idx, tokens, temperature, top_k, generator)
    return '\n---\n'.join(tokenizer.decode(row.tolist()) for row in idx)

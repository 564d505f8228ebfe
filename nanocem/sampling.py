"""Text from a model."""
from typing import Any

import torch

from configurator import check, warn
from nanocem.same import cache_agrees


@torch.no_grad()
def sample_text(model: Any, tokenizer: Any, prompt: str, tokens: int, temperature: float,
                top_k: int | None, seed: int, n: int = 1, go_on: bool = False,
                use_cache: bool | None = None) -> str:
    """Return n texts that begin with `prompt`, joined by lines of ---. Each stops where the model
    begins another document, by a BOS; with go_on the other documents follow, joined in the same
    way. By default a cache is used if it gives the same logits as reading the whole text. UserError
    if logits are not finite."""
    ids = [tokenizer.bos, *tokenizer.encode(prompt)]
    idx = torch.tensor([ids] * n, device=model.embedding.device)
    finite = bool(model(idx[:1, -model.cfg.context_length:])[0].isfinite().all())
    check(finite, 'the logits of the model are not finite: it cannot be sampled from')
    generator = torch.Generator(idx.device).manual_seed(seed)
    if use_cache is None:
        use_cache = cache_agrees(model, idx[0])
        if not use_cache:
            warn('with a cache this model.py gives other logits than without, so the whole text is '
                 'read again for each token: --use_cache=True uses the cache anyway')
    idx = model.generate(idx, tokens, temperature, top_k, generator, use_cache)
    # Divide each row where the model begins a document: decode leaves out BOS
    texts: list[str] = []
    for row in idx.cpu():
        begins = (row[len(ids):] == tokenizer.bos).nonzero().flatten() + len(ids)
        documents = [tokenizer.decode(part.tolist()) for part in row.tensor_split(begins)]
        texts += documents if go_on else documents[:1]
    return '\n---\n'.join(texts)

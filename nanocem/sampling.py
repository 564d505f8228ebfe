"""Text from a model: encode a prompt, generate tokens, decode them."""
from typing import Any

import torch

from nanocem.errors import check
from nanocem.fast import may_use_cache


@torch.no_grad()
def sample_text(model: Any, tokenizer: Any, prompt: str, tokens: int, temperature: float,
                top_k: int | None, seed: int, n: int = 1, go_on: bool = False,
                use_cache: bool | None = None) -> str:
    """Return n texts that begin with `prompt`, joined by lines of ---. Each stops where the model
    begins another document, by a BOS; with go_on the other documents follow, joined alike. By
    default there is a cache unless model.py was edited. UserError if the model's logits are not
    finite."""
    ids = [tokenizer.bos, *tokenizer.encode(prompt)]
    idx = torch.tensor([ids] * n, device=model.embedding.device)
    finite = bool(model(idx[:1, -model.cfg.context_length:])[0].isfinite().all())
    check(finite, 'the logits of the model are not finite: it cannot be sampled from')
    generator = torch.Generator(idx.device).manual_seed(seed)
    if use_cache is None:
        use_cache = may_use_cache(model)
    idx = model.generate(idx, tokens, temperature, top_k, generator, use_cache)
    # Divide each row where the model begins a document: decode leaves out BOS
    texts: list[str] = []
    for row in idx.cpu():
        begins = (row[len(ids):] == tokenizer.bos).nonzero().flatten() + len(ids)
        documents = [tokenizer.decode(part.tolist()) for part in row.tensor_split(begins)]
        texts += documents if go_on else documents[:1]
    return '\n---\n'.join(texts)

"""
A Transformer of model.py as transformers has models, and the byte tokenizer as it has tokenizers.

evaluate.py --export copies this file beside model.py into the folder it writes, where
AutoModelForCausalLM and AutoTokenizer find it with trust_remote_code=True.
"""
from dataclasses import fields
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizer
from transformers.modeling_outputs import CausalLMOutput

from model import ModelConfig, Transformer

# transformers brings the files along that such a line names, and no others
from nanocem.compute import cross_entropy  # noqa: F401
from nanocem.fast import way  # noqa: F401
from nanocem.triton_attention import attention  # noqa: F401


class NanocemConfig(PreTrainedConfig):
    """ModelConfig's fields, by their own names."""
    model_type = 'nanocem'
    attribute_map: ClassVar[dict[str, str]] = {
        'hidden_size': 'd_model', 'num_hidden_layers': 'n_layer', 'num_attention_heads': 'n_head',
        'max_position_embeddings': 'context_length'}

    def __init__(self, **options: Any):
        names = [field.name for field in fields(ModelConfig) if field.name in options]
        ours = ModelConfig(**{name: options.pop(name) for name in names})
        super().__init__(**vars(ours), **{'tie_word_embeddings': False, **options})


class NanocemForCausalLM(PreTrainedModel, GenerationMixin):
    """Every pass reads its whole text: there is no cache."""
    config_class = NanocemConfig

    def __init__(self, config: NanocemConfig):
        super().__init__(config)
        names = [field.name for field in fields(ModelConfig)]
        self.model = Transformer(ModelConfig(**{name: getattr(config, name) for name in names}))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """RuntimeError where a weight is missing, which would be left as memory had it."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        if info['missing_keys']:
            raise RuntimeError(f'no weights for {", ".join(sorted(info["missing_keys"]))}')
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: Any) -> None:
        """The modules have drawn their weights when they were made."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None,
                labels: Tensor | None = None, logits_to_keep: int = 0, **rest: Any,
                ) -> CausalLMOutput:
        """Ids (B, I) -> logits (B, I, vocabulary), of the last `logits_to_keep` positions if that
        is not 0; with labels (B, I) also their loss. Padding may stand on the right alone."""
        if attention_mask is not None and (attention_mask.diff(dim=-1) > 0).any():
            raise ValueError('the model has no mask for padding on the left: pad on the right, or '
                             'give one text at a time')
        x = self.model.hidden(input_ids)[:, -logits_to_keep:]
        logits = F.linear(x, self.model.head)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **rest)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Any = None,
                                      **rest: Any) -> dict[str, Any]:
        return dict(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=1)


class NanocemTokenizer(PreTrainedTokenizer):
    """UTF-8 bytes as tokens 0 to 255, and <|endoftext|>, 256, which begins every text."""
    model_input_names = ('input_ids', 'attention_mask')
    vocab_size = 256

    def __init__(self, **options: Any):
        super().__init__(**{**dict(
            bos_token='<|endoftext|>', eos_token='<|endoftext|>', pad_token='<|endoftext|>',
            padding_side='right', special_tokens_pattern='bos', split_special_tokens=True),
            **options})

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **rest: Any) -> list[str]:
        return [chr(i) for i in text.encode('utf-8', 'replace')]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        spelled = (token.encode('latin-1', 'ignore') for token in tokens)
        return b''.join(spelled).decode('utf-8', 'replace')

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple:
        return ()  # bytes need no file

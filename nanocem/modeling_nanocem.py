"""
A Transformer of model.py as a model of Hugging Face's transformers.

evaluate.py --export copies this file beside model.py into the folder it writes, where
AutoModelForCausalLM finds it with trust_remote_code=True.
"""
from dataclasses import fields
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from configurator import fail
from energy import Phi  # noqa: F401
from model import ModelConfig, Transformer
from nanocem.attention import choose_impl  # noqa: F401

# so that transformers copies these files as well
from nanocem.loss import cross_entropy  # noqa: F401
from nanocem.triton_attention import attention  # noqa: F401


class NanocemConfig(PretrainedConfig):
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
    """A causal language model without a cache: every forward pass reads its whole text."""
    config_class = NanocemConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: NanocemConfig):
        super().__init__(config)
        names = [field.name for field in fields(ModelConfig)]
        self.model = Transformer(ModelConfig(**{name: getattr(config, name) for name in names}))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load weights. RuntimeError if some are missing or of another shape: transformers would
        leave them uninitialized."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        if missing := [*info['missing_keys'], *info['mismatched_keys']]:
            raise RuntimeError(f'no weights of the right shape for {missing}')
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: Any) -> None:
        """Initialize the layers that resize_token_embeddings makes. Ours initialize themselves."""
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=self.config.init_std)

    def get_input_embeddings(self) -> nn.Embedding:
        return nn.Embedding(*self.model.embedding.shape, _weight=self.model.embedding)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value.weight

    def get_output_embeddings(self) -> nn.Linear:
        linear = nn.Linear(*self.model.head.shape[::-1], bias=False, device='meta')
        linear.weight = self.model.head
        return linear

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.model.head = value.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None,
                labels: Tensor | None = None, logits_to_keep: int = 0,
                num_items_in_batch: Any = None, return_dict: bool | None = None, **others: Any,
                ) -> CausalLMOutput:
        """Map ids (B, I) to logits (B, I, vocabulary), those of the last `logits_to_keep` positions
        if that is not 0, and with labels (B, I) to their loss, too. attention_mask (B, I) is 0 at
        padding. UserError for an argument that this model does not take."""
        refused = [name for name, value in others.items()
                   if value is not None and value is not False]
        if return_dict is False:
            refused.append('return_dict=False')
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            refused.append(f'attention_mask {tuple(attention_mask.shape)}, not (batch, length)')
        if refused:
            fail(f'this model does not take {", ".join(refused)}')
        if attention_mask is not None and attention_mask.all():  # faster attention can run
            attention_mask = None
        x = self.model.hidden(input_ids, key_mask=attention_mask)[:, -logits_to_keep:]
        logits = F.linear(x, self.model.head)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size,
                                      num_items_in_batch=num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
            self, input_ids: Tensor, attention_mask: Any = None, past_key_values: Any = None,
            output_attentions: Any = None, output_hidden_states: Any = None, **unused: Any,
    ) -> dict[str, Any]:
        """Return forward's arguments. generate makes a cache of its own, which stays empty."""
        if past_key_values is not None and not past_key_values.get_seq_length():
            past_key_values = None
        return dict(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=1,
                    past_key_values=past_key_values, output_attentions=output_attentions,
                    output_hidden_states=output_hidden_states)

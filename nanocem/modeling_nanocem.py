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

from configurator import check
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

    def __init__(self, config: NanocemConfig):
        super().__init__(config)
        names = [field.name for field in fields(ModelConfig)]
        self.model = Transformer(ModelConfig(**{name: getattr(config, name) for name in names}))
        # Name the matrices that a tie makes one, so that transformers saves and loads it once
        first = {w: name for name, w in self.named_parameters()}
        names = [(name, first[w]) for name, w in self.named_parameters(remove_duplicate=False)]
        self._tied_weights_keys = {name: source for name, source in names if name != source}
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the second name of each shared matrix, and its first."""
        return dict(self._tied_weights_keys)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load weights. UserError if they are not those that the configuration describes:
        transformers would leave missing ones uninitialized, and drop others."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        untied = model._tied_weights_keys.keys() - model.all_tied_weights_keys.keys()
        different = [*info['missing_keys'], *info['mismatched_keys'], *info['unexpected_keys'],
                     *untied]
        check(not different, 'the weights are not those that the configuration describes. They '
              f'differ in {sorted(map(str, different))[:3]}')
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
                labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
                num_items_in_batch: Any = None, **others: Any) -> CausalLMOutput:
        """Map ids (B, I) to logits (B, I, vocabulary), and with labels (B, I) to their loss, too.
        logits_to_keep is a number of last positions, or the positions themselves. attention_mask
        (B, I) is 0 at padding, which must be on the right: no token attends to later ones.
        UserError for an argument that this model does not take."""
        refused = [name for name, value in others.items()
                   if name != 'return_dict' and value is not None and value is not False]
        check(not refused, f'this model does not take {", ".join(refused)}')
        if attention_mask is not None:
            check(attention_mask.shape == input_ids.shape,
                  f'attention_mask {tuple(attention_mask.shape)}: expected (batch, length)')
            check(not (attention_mask[:, 1:] > attention_mask[:, :-1]).any(),
                  "attention_mask: padding on the left; expected padding_side='right'")
        last = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if last else logits_to_keep
        logits = F.linear(self.model.hidden(input_ids)[:, kept], self.model.head)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size,
                                      num_items_in_batch=num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
            self, input_ids: Tensor, attention_mask: Tensor | None = None,
            past_key_values: Any = None, **unused: Any) -> dict[str, Any]:
        """Return forward's arguments. generate makes a cache of its own, which stays empty."""
        check(past_key_values is None or not past_key_values.get_seq_length(),
              'generate: this model does not take past_key_values')
        check(attention_mask is None or bool(attention_mask.all()),
              'generate: expected texts of one length, or one text at a time; this batch is padded')
        return dict(input_ids=input_ids, logits_to_keep=1)

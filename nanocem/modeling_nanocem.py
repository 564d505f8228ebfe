"""A Transformer of model.py as a model of Hugging Face's transformers. An export has this file
beside model.py, and AutoModelForCausalLM finds it with trust_remote_code=True."""
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

# transformers copies only files that are imported here: imports with noqa are for that alone
from configurator import build, check
from energy import Phi  # noqa: F401
from model import ModelConfig, Transformer
from nanocem.attention import choose_impl  # noqa: F401
from nanocem.loss import cross_entropy  # noqa: F401
from nanocem.triton_attention import attention  # noqa: F401


class NanocemConfig(PretrainedConfig):
    """ModelConfig's fields, by their own names."""
    model_type = 'nanocem'
    attribute_map: ClassVar[dict[str, str]] = {
        'hidden_size': 'd_model', 'num_hidden_layers': 'n_layer', 'num_attention_heads': 'n_head',
        'max_position_embeddings': 'context_length'}

    def __init__(self, **options: Any):
        fields = vars(build(ModelConfig, options))
        super().__init__(**{'tie_word_embeddings': False, **options, **fields})


class NanocemForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model without a cache: every forward pass reads its whole text."""
    config_class = NanocemConfig

    def __init__(self, config: NanocemConfig):
        super().__init__(config)
        self.model = Transformer(build(ModelConfig, vars(config)))
        # Map each further name of a tied matrix to its first: transformers saves only the first
        first = {w: name for name, w in self.named_parameters()}
        names = self.named_parameters(remove_duplicate=False)
        self._tied_weights_keys = {name: first[w] for name, w in names if name != first[w]}
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the map. transformers' own method expects a tied head, and returns none."""
        return dict(self._tied_weights_keys)

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """Load weights. UserError if they are not those that the configuration describes:
        transformers would leave missing ones uninitialized, and drop others."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        different = [*info['missing_keys'], *info['mismatched_keys'], *info['unexpected_keys']]
        check(not different, 'the weights are not those that the configuration describes. They '
              f'differ in {sorted(map(str, different))[:3]}')
        return model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None,
                labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
                num_items_in_batch: Any = None, **others: Any) -> CausalLMOutput:
        """Map ids (B, I) to logits (B, I, vocabulary), and with labels (B, I) to their loss, too.
        logits_to_keep is how many last positions get logits (0: all), or those positions.
        attention_mask (B, I) is 0 at padding, which must be on the right: no token attends to it
        there. UserError for left padding, or an argument that this model does not take."""
        refused = [name for name, value in others.items()
                   if name != 'return_dict' and value is not None and value is not False]
        check(not refused, f'this model does not take {", ".join(refused)}')
        if attention_mask is not None:
            check(attention_mask.shape == input_ids.shape
                  and not (attention_mask[:, 1:] > attention_mask[:, :-1]).any(),
                  'attention_mask: expected (batch, length), and padding on the right alone')
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = F.linear(self.model.hidden(input_ids)[:, kept], self.model.head)
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = self.loss_function(logits, labels, self.config.vocab_size,
                                  num_items_in_batch=num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
            self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any) -> dict:
        """Return forward's arguments for the next token. UserError for a batch with padding."""
        check(attention_mask is None or bool(attention_mask.all()),
              'generate: expected texts of one length, or one text at a time; this batch is padded')
        return dict(input_ids=input_ids, logits_to_keep=1)

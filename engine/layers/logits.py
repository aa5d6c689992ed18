"""The wrapper of the language-model head.

A row uses the adapter of its prompt where the model computes the logits of last tokens only, and of
its token where it computes all.
"""

from typing import Final

from torch import Tensor, nn

from engine.layers.replicated import ReplicatedLinearWithLoRA

VOCABULARY_MAX: Final = 258_048
"""The largest vocabulary whose head is wrapped; adapters of larger heads are refused."""


class LogitsProcessorWithLoRA(ReplicatedLinearWithLoRA):
    """A head with one slice; A and B are whole. A head tied to the embedding stays tied."""

    base_layer: nn.Linear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Linear heads whose vocabulary is within the limit."""
        return isinstance(layer, nn.Linear) and layer.out_features <= VOCABULARY_MAX

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits with deltas; x: [..., hidden], one row per prompt or per token."""
        # Each prompt's last token is a strided view; with frozen weights PyTorch would multiply it
        # prompt by prompt, in bfloat16 on a CPU a hundred times slower than in one product.
        x = x.contiguous()
        y = self.transform_rows(self._base_output(x))
        if self._punica is not None and self._slices is not None:
            self._punica.add_lora_logits(y.view(-1, y.shape[-1]), x, self._slices)
            self.replace_rows(y, x)
        return y

    def _base_output(self, x: Tensor) -> Tensor:
        """Return the base layer's output, [..., vocabulary]."""
        return self.plain_product(x) if type(self.base_layer) is nn.Linear else self.base_layer(x)

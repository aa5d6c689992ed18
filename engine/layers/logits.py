"""The language-model head, over the sampled rows.

What it is: the wrapper of the layer that makes logits. What it is not: a sampler. One rule: a row
has the adapter of its prompt where the model asks for the last token's logits only, and of its
token where it asks for all.
"""

from typing import Final

from torch import Tensor, nn

from engine.layers.replicated import ReplicatedLinearWithLoRA

VOCABULARY_MAX: Final = 258_048
"""Heads over more tokens are not wrapped; adapters that touch them are refused."""


class LogitsProcessorWithLoRA(ReplicatedLinearWithLoRA):
    """A head with one slice; A and B are whole. A head tied to the embedding stays tied."""

    base_layer: nn.Linear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Linear heads whose vocabulary is not over the limit."""
        return isinstance(layer, nn.Linear) and layer.out_features <= VOCABULARY_MAX

    def forward(self, x: Tensor) -> Tensor:
        """The logits, deltas included; x: [..., hidden], a row a prompt or a row a token."""
        # Each prompt's last token is a strided view; with frozen weights PyTorch would multiply it
        # prompt by prompt, in bfloat16 on a CPU a hundred times slower than in one product.
        x = x.contiguous()
        y: Tensor = self.base_layer(x)
        if self._punica is not None and self._slices is not None:
            rows = x.reshape(-1, x.shape[-1])
            self._punica.add_lora_logits(y.view(len(rows), -1), rows, self._slices)
        return y

"""The wrapper of the language-model head.

A row uses the adapter of its prompt where the model computes the logits of last tokens only, and of
its token where it computes all. The vocabulary may have any size.
"""

from torch import Tensor, nn

from loradock.engine.layers.base import SliceShape
from loradock.engine.layers.replicated import ReplicatedLinearWithLoRA
from loradock.engine.layers.tensor_parallel import ParallelHead


class LogitsProcessorWithLoRA(ReplicatedLinearWithLoRA):
    """A head with one slice; A and B are whole. A head tied to the embedding stays tied."""

    base_layer: nn.Linear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Linear heads."""
        return isinstance(layer, nn.Linear)

    @property
    def token_shapes(self) -> tuple[SliceShape, ...]:
        """The head, if it is a plain product; every rank holds an adapter's rows.

        A rank of several has only a part of a bias.
        """
        base = self.base_layer
        is_split = isinstance(base, ParallelHead) and base.bias is None
        if type(base) is not nn.Linear and not is_split:
            return ()
        return (SliceShape(base.in_features, base.out_features),)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits with deltas; x: [..., hidden], one row per prompt or per token."""
        # Each prompt's last token is a strided view; with frozen weights PyTorch would multiply it
        # prompt by prompt, in bfloat16 on a CPU a hundred times slower than in one product.
        x = x.contiguous()
        y = self.own_output(self._base_output(x), x)
        if self._punica is not None and self._slices is not None:
            self._punica.add_lora_logits(y.view(-1, y.shape[-1]), x, self._slices)
        return y

    def own_output(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the logits as the base class, with those of trained tokens."""
        y = super().own_output(y, x)
        if self._tokens and self._bound().has_heads:
            rows, inputs = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
            for tokens in self._tokens:
                for trained in tokens.vectors_of(self._punica, x.shape[:-1], self.row_order):
                    trained.replace_logits(rows, inputs, self.base_layer.bias)
        return y

    def _base_output(self, x: Tensor) -> Tensor:
        """Return the base layer's output, [..., vocabulary]."""
        return self.plain_product(x) if type(self.base_layer) is nn.Linear else self.base_layer(x)

"""A base model that answers for whole texts: it embeds them or classifies them.

What it is: one forward pass over a batch of texts, and the vector of each. What it is not: a queue
(`pooler`), or a judge of texts. One rule: texts are padded on the right, where no position that a
text's own tokens have depends on it, and what a padded text gives is what it gives alone.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.pooling_options import NOTHING_SAID, Pooling, PoolingOptions
from engine.probe import Prompts, pooling_trial, sees_what_follows
from engine.punica import LoRAMapping
from engine.served import ServedModel, Tokenizer
from messages.requests import PoolingTask


class PooledModel(ServedModel):
    """An encoder, a decoder without its head, or either with a classification head.

    `labels`: what each number of a classification stands for; empty where the model embeds.
    `foreign_token`: a token that no text may end with, because batches are padded with it; None
    where the model has a padding token of its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora_config: LoRAConfig,
        tokenizer: Tokenizer = None,
        context_tokens_max: int = 0,
        task: PoolingTask = "embed",
        options: PoolingOptions = NOTHING_SAID,
    ) -> None:
        """Wrap the layers of `model` in place."""
        super().__init__(model, tokenizer, context_tokens_max)
        self.task = task
        limits = (self.context_tokens_max, options.tokens_max, _positions_max(model))
        self.context_tokens_max = min(limit for limit in limits if limit > 0)
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self.foreign_token: int | None = None
        self._padding = self._find_padding()
        self._normalize = options.normalize
        self.labels: tuple[str, ...] = ()
        if task == "classify":
            count, names = model.config.num_labels, model.config.id2label
            self.labels = tuple(str(names[place]) for place in range(count))
        else:
            self.pooling = options.pooling or self._natural_pooling()
        self._prepare(pooling_trial(self.forward), lora_config)

    @torch.inference_mode()
    def forward(self, prompts: Prompts) -> Tensor:
        """Each text's pooled states, or its labels' logits: [rows, width] float32."""
        tokens = self._pad(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        own = (torch.arange(tokens.shape[1], device=self.device) < lengths[:, None]).long()
        arguments: dict[str, Any] = {"attention_mask": own}
        if "use_cache" in self._accepts:
            arguments["use_cache"] = False
        output = self.model(tokens, **arguments)
        if self.task == "classify":
            logits: Tensor = output.logits
            return logits.float()
        return _pooled(self.pooling, output.last_hidden_state.float(), own)

    def results(self, pooled: Tensor) -> Tensor:
        """What a client gets of `forward`'s rows: vectors, or scores of the labels.

        Scores are logits of a regression, each label's own probability where several may hold (or
        there is one), else probabilities that add up to 1.
        """
        if self.task == "embed":
            return normalize(pooled) if self._normalize else pooled
        kind = self.model.config.problem_type
        if kind == "regression":
            return pooled
        many = kind == "multi_label_classification" or len(self.labels) == 1
        return pooled.sigmoid() if many else pooled.softmax(-1)

    def mapping(self, prompts: Prompts, adapter_ids: Sequence[int]) -> LoRAMapping:
        """Each text's adapter at its own tokens, the base model at the padding after them."""
        ids, width = torch.tensor(adapter_ids), max(map(len, prompts))
        own = torch.arange(width) < torch.tensor([len(prompt) for prompt in prompts])[:, None]
        return LoRAMapping((own * ids[:, None]).flatten(), ids, is_prefill=True)

    def _pad(self, prompts: Prompts) -> Tensor:
        width = max(map(len, prompts))
        padded = [[*prompt, *[self._padding] * (width - len(prompt))] for prompt in prompts]
        return torch.tensor(padded, device=self.device)

    def _find_padding(self) -> int:
        """The token that fills rows; models that look for it are told where they have none."""
        own = self.model.config.get_text_config(decoder=True)
        found = self._padding_of(own)
        if found is not None:
            return found
        found = self._padding_of(self.tokenizer)
        if found is None:
            found = self.foreign_token = 0
        own.pad_token_id = self.model.config.pad_token_id = found
        return found

    def _padding_of(self, owner: object) -> int | None:
        """What `owner` names; None also for one that is not embedded, as the -1 of old configs."""
        found = getattr(owner, "pad_token_id", None)
        return found if found is not None and 0 <= found < self.vocab_size else None

    def _natural_pooling(self) -> Pooling:
        """The last token knows the whole text where every token sees those before it only."""
        self.pooling = Pooling.CLS
        return Pooling.MEAN if sees_what_follows(self.forward, self.vocab_size) else Pooling.LAST


def _pooled(pooling: Pooling, states: Tensor, own: Tensor) -> Tensor:
    """One vector a text, [rows, hidden], from `states` [rows, tokens, hidden].

    own: [rows, tokens] int64, 1 where a token is the text's own.
    """
    match pooling:
        case Pooling.MEAN:
            return (states * own[..., None]).sum(1) / own.sum(1)[:, None]
        case Pooling.CLS:
            return states[:, 0]
        case Pooling.LAST:
            return states[torch.arange(len(own), device=own.device), own.sum(1) - 1]


def _positions_max(model: PreTrainedModel) -> int:
    """How many positions a table of them has for tokens; 0 where the model has none.

    One that counts on from its padding's row (RoBERTa's) has as many fewer.
    """
    tables = [
        layer
        for name, layer in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(layer, torch.nn.Embedding)
    ]
    first = [0 if table.padding_idx is None else table.padding_idx + 1 for table in tables]
    return min((t.num_embeddings - f for t, f in zip(tables, first, strict=True)), default=0)

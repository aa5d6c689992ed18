"""A base model that answers for whole texts: it embeds them or classifies them.

What it is: one forward pass over a batch of texts, and the vector of each. What it is not: a queue
(`pooler`), or a judge of texts. One rule: texts are padded on the right, where no position that a
text's own tokens have depends on it, and what a padded text gives is what it gives alone.
"""

import inspect
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.errors import ModelRefused
from engine.models.pooling_options import NOTHING_SAID, Pooling, PoolingOptions
from engine.models.probe import Prompts, pooling_trial, sees_what_follows
from engine.models.served_model import ServedModel, Tokenizer
from engine.punica.mapping import LoRAMapping
from messages.requests import PoolingTask

VECTOR_NUMBERS_MAX: Final = (1 << 22) // 4
"""The most numbers of one vector that a report carries."""


class PooledModel(ServedModel):
    """An encoder, a decoder without its head, or either with a classification head.

    `labels`: what each number of a classification stands for; empty where the model embeds.
    `width`: the numbers of a vector. `prompt`: what a text is put behind; `skipped`: how many of
    its tokens then have no part in a mean. `rows_max`: the most texts of one forward.
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
        # A tokenizer that was never told a limit has one that no text reaches.
        read_max = options.tokens_max or getattr(tokenizer, "model_max_length", 0)
        limits = (self.context_tokens_max, read_max, _positions_max(model))
        self.context_tokens_max = min(limit for limit in limits if limit > 0)
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._padding = self._own_padding()
        # One token has to be left for padding that ends none of them.
        self.rows_max = self.vocab_size - 1
        self.prompt = options.prompt
        self.skipped = 0 if options.pools_prompt else _tokens_of_prompt(tokenizer, self.prompt)
        self._normalize = options.normalize
        self.labels = _labels(model.config) if task == "classify" else ()
        if task == "embed":
            self.pooling = options.pooling or self._natural_pooling()
        self._prepare(pooling_trial(self.forward, model.dtype), lora_config)
        self.width = self.forward([[0]]).shape[-1]
        if self.width > VECTOR_NUMBERS_MAX:
            raise ModelRefused(
                f"the model gives {self.width} numbers for a text; at most {VECTOR_NUMBERS_MAX} "
                "are sent"
            )

    @torch.inference_mode()
    def forward(self, prompts: Prompts, firsts: Sequence[int] = ()) -> Tensor:
        """Each text's pooled states, or its labels' logits: [rows, width] float32.

        `firsts`: the first token of each text that counts in a mean; all do where it is empty.
        """
        output = self._run(prompts)
        if self.task == "classify":
            logits: Tensor = output.logits
            return logits.float()
        begins = self._tensor(firsts or [0] * len(prompts))
        return _pooled(self.pooling, output.last_hidden_state, begins, self._ends(prompts))

    @torch.inference_mode()
    def _run(self, prompts: Prompts) -> Any:
        """What the model gives for a batch."""
        tokens = self._pad(prompts)
        places = torch.arange(tokens.shape[1], device=self.device)
        own = (places < self._ends(prompts)[:, None]).long()
        arguments: dict[str, Any] = {"attention_mask": own}
        if "use_cache" in self._accepts:
            arguments["use_cache"] = False
        return self.model(tokens, **arguments)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def _ends(self, prompts: Prompts) -> Tensor:
        return self._tensor([len(prompt) for prompt in prompts])

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
        padding = self._padding
        if padding is None:
            padding = self._free_padding({prompt[-1] for prompt in prompts})
        width = max(map(len, prompts))
        padded = [[*prompt, *[padding] * (width - len(prompt))] for prompt in prompts]
        return torch.tensor(padded, device=self.device)

    def _own_padding(self) -> int | None:
        """The config's; None also for one that is not embedded, as the -1 of old configs."""
        found = self.model.config.get_text_config(decoder=True).pad_token_id
        return found if found is not None and 0 <= found < self.vocab_size else None

    def _free_padding(self, ends: Collection[int]) -> int:
        """A token that is not among `ends`, and that the model takes for padding in this batch.

        A classifier looks for a text's end before its padding; so a text that ended with the token
        would be cut.
        """
        found = next(token for token in range(self.vocab_size) if token not in ends)
        config = self.model.config
        config.get_text_config(decoder=True).pad_token_id = config.pad_token_id = found
        return found

    def _natural_pooling(self) -> Pooling:
        """The last token knows the whole text where every token sees those before it only."""

        def states(prompts: Prompts) -> Tensor:
            given: Tensor = self._run(prompts).last_hidden_state
            return given

        return Pooling.MEAN if sees_what_follows(states, self.vocab_size) else Pooling.LAST


def _pooled(pooling: Pooling, states: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """One vector a text, [rows, hidden] float32, from `states` [rows, tokens, hidden].

    begins, ends: [rows] int64, the places of a text's first token that counts in a mean, and of
    what follows its last one.
    """
    match pooling:
        case Pooling.MEAN:
            places = torch.arange(states.shape[1], device=states.device)
            counted = (places >= begins[:, None]) & (places < ends[:, None])
            return (states.float() * counted[..., None]).sum(1) / (ends - begins)[:, None]
        case Pooling.CLS:
            return states[:, 0].float()
        case Pooling.LAST:
            return states[torch.arange(len(ends), device=ends.device), ends - 1].float()


def _labels(config: Any) -> tuple[str, ...]:
    """The name of each label, or the number that stands for one without."""
    return tuple(str(config.id2label.get(at, at)) for at in range(config.num_labels))


def _tokens_of_prompt(tokenizer: Tokenizer, prompt: str) -> int:
    """How many tokens come before a text's own; what ends every text is no part of a prompt."""
    if tokenizer is None or not prompt:
        return 0
    tokens = tokenizer(prompt)["input_ids"]
    return len(tokens) - int(tokens[-1] in tokenizer.all_special_ids)


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

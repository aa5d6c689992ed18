"""A base model that answers for whole texts: it embeds them or classifies them.

Texts are padded on the right, where no position of a text's own tokens depends on the padding, so
that a padded text has the same result as the text alone.
"""

import inspect
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from loradock.engine.config import LoRAConfig
from loradock.engine.errors import Malformed, ModelRefused
from loradock.engine.models.library.names import PreTrainedModel
from loradock.engine.models.positions import scale_by_length
from loradock.engine.models.probing import Prompts, is_bidirectional, pooling_probe
from loradock.engine.models.saved_settings import NO_OPTIONS, Pooling, PoolingOptions
from loradock.engine.models.served_model import ServedModel, Tokenizer
from loradock.engine.punica.mapping import LoRAMapping
from loradock.messages.views import PoolingTask

VECTOR_NUMBERS_MAX: Final = (1 << 22) // 4
"""The most numbers of one vector that a report can contain."""


class PoolingModel(ServedModel):
    """An encoder, a decoder without its head, or either with a classification head.

    `labels`: the name of each number of a classification; empty if the model embeds. `width`: the
    numbers of a vector. `prompt`: a text that is prepended to every input; `skipped_tokens`: the
    number of its tokens that a mean leaves out. `rows_max`: the most texts of one forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora_config: LoRAConfig,
        tokenizer: Tokenizer = None,
        max_model_len: int = 0,
        task: PoolingTask = "embed",
        options: PoolingOptions = NO_OPTIONS,
    ) -> None:
        """Wrap the layers of `model` in place."""
        super().__init__(model, tokenizer, max_model_len)
        self.task = task
        self._row_lengths = scale_by_length(model)
        # The limit of a tokenizer that was saved without one is beyond any text.
        read_max = options.tokens_max or getattr(tokenizer, "model_max_length", 0)
        limits = (self.max_model_len, read_max, _positions_max(model))
        self.max_model_len = min(limit for limit in limits if limit > 0)
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._padding = self._config_padding()
        # Padding needs one token that ends none of the texts.
        self.rows_max = self.vocab_size - 1
        self.prompt = options.prompt
        self.skipped_tokens = (
            0 if options.pools_prompt else _tokens_of_prompt(tokenizer, self.prompt)
        )
        self._normalize = options.normalize
        self.labels = _labels(model.config) if task == "classify" else ()
        if task == "embed":
            self.pooling = options.pooling or self._default_pooling()
        self._prepare([pooling_probe(self.forward, model.dtype)], lora_config)
        self.width = self.forward([[0]]).shape[-1]
        if self.width > VECTOR_NUMBERS_MAX:
            raise ModelRefused(
                f"embedding dimension {self.width} exceeds the limit of {VECTOR_NUMBERS_MAX}"
            )

    @torch.inference_mode()
    def forward(self, prompts: Prompts, starts: Sequence[int] = ()) -> Tensor:
        """Return each text's pooled states, or the logits of its labels: [rows, width] float32.

        `starts`: per text, the first token that counts in a mean; 0 for each if it is empty.
        """
        output = self._run(prompts)
        if self.task == "classify":
            logits: Tensor = output.logits
            return logits.float()
        first_tokens = self._tensor(starts or [0] * len(prompts))
        ends = self._ends(prompts)
        return _pooled(self.pooling, output.last_hidden_state, first_tokens, ends)

    @torch.inference_mode()
    def _run(self, prompts: Prompts) -> Any:
        """Return the model's output for a batch."""
        tokens = self._pad(prompts)
        columns = torch.arange(tokens.shape[1], device=self.device)
        mask = (columns < self._ends(prompts)[:, None]).long()
        arguments: dict[str, Any] = {"attention_mask": mask}
        if "use_cache" in self._accepts:
            arguments["use_cache"] = False
        lengths = [[len(prompt)] for prompt in prompts]
        with self._row_lengths.of(lengths, max(map(len, prompts)), self.device):
            return self.model(tokens, **arguments)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def _ends(self, prompts: Prompts) -> Tensor:
        return self._tensor([len(prompt) for prompt in prompts])

    def results(self, pooled: Tensor) -> Tensor:
        """Return a client's result for `forward`'s rows: vectors, or scores of the labels.

        Scores are the logits of a regression. They are independent probabilities if several labels
        can hold or there is only one, else probabilities with a sum of 1.
        """
        if self.task == "embed":
            return normalize(pooled) if self._normalize else pooled
        problem = self.model.config.problem_type
        if problem == "regression":
            return pooled
        is_independent = problem == "multi_label_classification" or len(self.labels) == 1
        return pooled.sigmoid() if is_independent else pooled.softmax(-1)

    def check_dimensions(self, dimensions: int) -> None:
        """Raise `Malformed` for a length of vectors that the model was not trained for."""
        if not dimensions:
            return
        if self.task != "embed":
            raise Malformed("dimensions are of embeddings, and the model classifies")
        trained = getattr(self.model.config, "matryoshka_dimensions", None)
        if not trained and not getattr(self.model.config, "is_matryoshka", False):
            raise Malformed(
                f"dimensions {dimensions}, and the model was not trained for shorter vectors than "
                f"its own (matryoshka_dimensions or is_matryoshka in its config.json): leave "
                f"dimensions out, for vectors of {self.width} numbers"
            )
        allowed = trained or range(1, self.width + 1)
        if dimensions not in allowed or dimensions > self.width:
            shown = f"one of {sorted(trained)}" if trained else f"1 to {self.width}"
            raise Malformed(f"dimensions must be {shown} for this model, got {dimensions}")

    def shortened(self, row: Tensor, dimensions: int) -> Tensor:
        """Return the first `dimensions` numbers of a vector, 0 for all; row: [width] float32."""
        if not dimensions:
            return row
        row = row[:dimensions]
        return normalize(row, dim=0) if self._normalize else row

    def mapping(self, prompts: Prompts, adapter_ids: Sequence[int]) -> LoRAMapping:
        """Return a mapping of each text's tokens to its adapter; padding uses the base model."""
        ids, width = torch.tensor(adapter_ids), max(map(len, prompts))
        mask = torch.arange(width) < torch.tensor([len(prompt) for prompt in prompts])[:, None]
        return LoRAMapping((mask * ids[:, None]).flatten(), ids, is_prefill=True)

    def _pad(self, prompts: Prompts) -> Tensor:
        padding = self._padding
        if padding is None:
            padding = self._choose_padding({prompt[-1] for prompt in prompts})
        width = max(map(len, prompts))
        padded = [[*prompt, *[padding] * (width - len(prompt))] for prompt in prompts]
        return torch.tensor(padded, device=self.device)

    def _config_padding(self) -> int | None:
        """Return the config's padding token, or None if it is not in the embedding.

        Old configs have -1.
        """
        token = self.model.config.get_text_config(decoder=True).pad_token_id
        return token if token is not None and 0 <= token < self.vocab_size else None

    def _choose_padding(self, ends: Collection[int]) -> int:
        """Choose a token that is not among `ends`, and make it the config's padding for this batch.

        A classifier searches for a text's end before its padding, so a text that ends with the
        padding token would be cut.
        """
        chosen = next(token for token in range(self.vocab_size) if token not in ends)
        config = self.model.config
        config.get_text_config(decoder=True).pad_token_id = config.pad_token_id = chosen
        return chosen

    def _default_pooling(self) -> Pooling:
        """Return the mean, or the last token if tokens attend only to those before them."""

        def states(prompts: Prompts) -> Tensor:
            hidden: Tensor = self._run(prompts).last_hidden_state
            return hidden

        return Pooling.MEAN if is_bidirectional(states, self.vocab_size) else Pooling.LAST


def _pooled(pooling: Pooling, states: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Return one vector per text, [rows, hidden] float32, from `states` [rows, tokens, hidden].

    starts, ends: [rows] int64, the index of a text's first token that counts in a mean, and the
    index after its last token.
    """
    match pooling:
        case Pooling.MEAN:
            columns = torch.arange(states.shape[1], device=states.device)
            counted = (columns >= starts[:, None]) & (columns < ends[:, None])
            return (states.float() * counted[..., None]).sum(1) / (ends - starts)[:, None]
        case Pooling.CLS:
            return states[:, 0].float()
        case Pooling.LAST:
            return states[torch.arange(len(ends), device=ends.device), ends - 1].float()


def _labels(config: Any) -> tuple[str, ...]:
    """Return the name of each label, or its number if it has no name."""
    return tuple(str(config.id2label.get(label, label)) for label in range(config.num_labels))


def _tokens_of_prompt(tokenizer: Tokenizer, prompt: str) -> int:
    """Return the tokens before a text's own, not counting a special token that ends every text."""
    if tokenizer is None or not prompt:
        return 0
    tokens = tokenizer(prompt)["input_ids"]
    return len(tokens) - int(tokens[-1] in tokenizer.all_special_ids)


def _positions_max(model: PreTrainedModel) -> int:
    """Return the positions that a position table has for tokens; 0 if the model has none.

    A table that counts from the row after its padding's (RoBERTa's) has fewer positions than rows.
    """
    tables = [
        layer
        for name, layer in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(layer, torch.nn.Embedding)
    ]
    first_rows = [0 if table.padding_idx is None else table.padding_idx + 1 for table in tables]
    pairs = zip(tables, first_rows, strict=True)
    return min((table.num_embeddings - first for table, first in pairs), default=0)

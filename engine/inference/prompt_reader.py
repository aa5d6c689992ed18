"""What a generation needs before it is queued: its prompt's tokens and its compiled structure."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

import torch

from loradock.engine.errors import RequestRefused
from loradock.engine.inference.sequence import PreparedPrompt
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_processor import ProcessedPrompt
from loradock.engine.models.tokenization import check_text, prompt_tokens
from loradock.engine.sampling.logprobs import WHOLE_LOGITS_BYTES_MAX
from loradock.engine.sampling.structure import StructureCompiler
from loradock.messages.prompts import IllustratedPrompt, Prompt, Sampling

INLINE_TEXT_MAX: Final = 4096
"""Longer texts, in characters, are tokenized by a job, because the main loop would stand still."""


class Preparation(NamedTuple):
    """The function that prepares a prompt, and whether a job has to call it."""

    prepare: Callable[[], PreparedPrompt]
    is_long: bool


class PromptReader:
    """Checks what can be checked at once, and returns how the rest is prepared."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._structures = StructureCompiler(model.tokenizer, model.vocab_size, model.eos_ids)

    def preparation_of(self, prompt: Prompt, sampling: Sampling) -> Preparation:
        """Return how a request is prepared; raises `EngineError` where it can't be run."""
        self._check(sampling)
        read, is_long = self._read(prompt, sampling)
        structure = sampling.structure
        if structure is None:
            return Preparation(lambda: PreparedPrompt(read()), is_long)

        def prepare() -> PreparedPrompt:
            # Before the prompt, which may contain images and takes longer.
            guide = self._structures.compile(structure)
            return PreparedPrompt(read(), guide)

        return Preparation(prepare, is_long=True)

    def _check(self, sampling: Sampling) -> None:
        if self._model.tokenizer is None and sampling.stop:
            raise RequestRefused(
                "the model's directory has no tokenizer, so stop strings can't be found"
            )
        if self._model.tokenizer is None and sampling.structure is not None:
            raise RequestRefused(
                "the model's directory has no tokenizer, so outputs can't have a structure"
            )
        if sampling.structure is not None and sampling.min_tokens:
            raise RequestRefused("min_tokens and a structure exclude each other")
        self._check_known("logit_bias", [token for token, _ in sampling.logit_bias])
        self._check_known("stop_token_ids", sampling.stop_token_ids)

    def _check_known(self, option: str, tokens: Iterable[int]) -> None:
        unknown = [token for token in tokens if token >= self._model.vocab_size]
        if unknown:
            raise RequestRefused(
                f"{option} has token {unknown[0]}; this model's are 0 to "
                f"{self._model.vocab_size - 1}"
            )

    def _check_scored(self, prompt: ProcessedPrompt) -> ProcessedPrompt:
        """Refuse more tokens than may have logits at once: images are read in one pass."""
        tokens_max = WHOLE_LOGITS_BYTES_MAX // (torch.float32.itemsize * self._model.vocab_size)
        if len(prompt.tokens) > tokens_max:
            raise RequestRefused(
                f"prompt_logprobs of a prompt with images need the logits of all its "
                f"{len(prompt.tokens)} tokens at once; with this model's vocabulary at most "
                f"{tokens_max} tokens are served"
            )
        return prompt

    def _read(
        self, prompt: Prompt, sampling: Sampling
    ) -> tuple[Callable[[], ProcessedPrompt], bool]:
        model = self._model
        if isinstance(prompt, IllustratedPrompt):
            if model.prompt_reader is None:
                raise RequestRefused(
                    f"images in the prompt, but the model is served for text only: "
                    f"{model.no_images_reason}"
                )
            read = partial(model.prompt_reader.read, prompt, sampling.max_tokens or 1)
            if sampling.prompt_logprobs is None:
                return read, True
            return lambda: self._check_scored(read()), True

        def tokenize() -> ProcessedPrompt:
            return ProcessedPrompt(prompt_tokens(model, prompt, sampling.max_tokens or 1))

        is_long = isinstance(prompt, str) and len(prompt) > INLINE_TEXT_MAX
        if isinstance(prompt, str) and is_long:
            check_text(model, prompt)
        return tokenize, is_long

"""`POST /v1/completions`: texts and token ids continued, one choice or several."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from loradock.gateway.http.endpoint import INFERENCE, post
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import ServerSentEvents
from loradock.gateway.inference.answer import InferenceAnswer
from loradock.gateway.inference.logprobs import (
    CharacterCount,
    CompletionLogprobs,
    Entries,
    PromptLogprobs,
    TokenTextOf,
    completion_logprobs,
    prompt_logprobs,
)
from loradock.gateway.inference.sampling import (
    Logprobs,
    Rendered,
    SamplingDefaults,
    SamplingFields,
    check_length,
    rendered,
    sampling_of,
    truncated,
    truncation_of,
)
from loradock.gateway.inference.service import (
    GenerationStart,
    Service,
    TokenIds,
    Usage,
    UsageCount,
    finish_reason,
    generated_tokens,
    random_id,
    returned_ids,
    token_text_of,
)
from loradock.messages.prompts import (
    PROMPT_TOKENS_MAX,
    TokenId,
    Truncation,
)
from loradock.messages.requests import TokensStreamed
from loradock.messages.views import TokenLogprob

MAX_TOKENS_DEFAULT = 16
"""As in the OpenAI protocol."""

PROMPTS_MAX: Final = 2048
CHOICES_PER_REQUEST_MAX: Final = 2048

IdList = list[TokenId]

Prompts = Sequence[str | list[int]]
"""Prompts of one kind: all strings, or all token ids."""


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body: a prompt or a list of prompts, each a string or token ids."""

    prompt: str | Annotated[list[str | int | IdList], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class CompletionChoice(Struct, frozen=True):
    """One text; `finish_reason` is null before its end."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to `POST /v1/completions`, and a chunk of its stream.

    `usage` is null in chunks before the last one of a stream that has it, and absent without.
    """

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Completions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @post("/v1/completions", errors=INFERENCE, span="text_completion")
    async def complete(self, body: CompletionRequest) -> Completion | ServerSentEvents:
        """Continue prompts.

        The answer has all texts, or is a stream of chunks.
        """
        service, count = self._service, body.n or 1
        adapter = await service.models.find(body.model)
        files = await service.files_of(adapter)
        sampling = _sampling(body, files.defaults)
        text_of = token_text_of(service, body, has_logprobs=body.logprobs is not None)
        prompts = await self._prompts_of(body, sampling["max_tokens"], count)
        echoes = await self._echoes(body, prompts) if body.echo else []
        usage = _usage(body, prompts)
        starts = [
            GenerationStart(tuple(prompt) if isinstance(prompt, list) else prompt, sampling)
            for prompt in prompts
        ]
        run = await service.start(adapter, starts, count)
        answer = _Answer(service, adapter, usage, body, echoes, text_of)
        if body.return_token_ids:
            answer.prompt_ids = [tuple(one) for one in prompts if isinstance(one, list)]
        return await answer.response(run, body)

    @post("/v1/completions/render", errors=INFERENCE)
    async def render(self, body: CompletionRequest) -> list[Rendered]:
        """Token ids and parameters of completions.

        They are what `complete` would generate from, one item per prompt.
        """
        service = self._service
        adapter = await service.models.find(body.model)
        files = await service.files_of(adapter)
        sampling = _sampling(body, files.defaults)
        # Rendered prompts are token ids.
        body.return_token_ids = True
        prompts = await self._prompts_of(body, sampling["max_tokens"], 1)
        shown_id = random_id("cmpl")
        ids = [shown_id] if len(prompts) == 1 else [f"{shown_id}-{i}" for i in range(len(prompts))]
        tokens = [tuple(prompt) for prompt in prompts if isinstance(prompt, list)]
        return rendered(dict(zip(ids, tokens, strict=True)), sampling, body)

    async def _prompts_of(self, body: CompletionRequest, max_tokens: int, count: int) -> Prompts:
        """Return the prompts of a request; strings become token ids if the gateway needs these."""
        context = self._service.context
        prompts = prompts_of(body.prompt, context)
        _check_choices(len(prompts) * count)
        special = body.add_special_tokens is not False
        truncation = truncation_of(body.truncate_prompt_tokens, body.truncation_side, "left")
        if truncation is not None:
            space = context and context - max_tokens
            return await self._truncated(prompts, truncation, space, special=special)
        if special and not body.return_token_ids and not _has_prompt_tokens(body):
            return prompts
        limit = context or PROMPT_TOKENS_MAX
        return await self._as_tokens(prompts, special=special, tokens_max=limit)

    async def _as_tokens(
        self, prompts: Prompts, *, special: bool, tokens_max: int | None
    ) -> list[list[int]]:
        texts = [one for one in prompts if isinstance(one, str)]
        if not texts:
            return [one for one in prompts if isinstance(one, list)]
        return await self._service.tokens_of(texts, special=special, tokens_max=tokens_max)

    async def _truncated(
        self, prompts: Prompts, truncation: Truncation, space: int | None, *, special: bool
    ) -> list[list[int]]:
        tokens = await self._as_tokens(prompts, special=special, tokens_max=None)
        contents = await self._as_tokens(prompts, special=False, tokens_max=None)
        return [
            truncated(truncation, whole, content, space)
            for whole, content in zip(tokens, contents, strict=True)
        ]

    async def _echoes(self, body: CompletionRequest, prompts: Prompts) -> "list[_Echo]":
        """Return the echo of each prompt, which is the request's own text if it is whole."""
        if body.truncate_prompt_tokens is None:
            texts = [one for one in prompts_of(body.prompt, None) if isinstance(one, str)]
        else:
            texts = []
        if not texts:
            ids = [one for one in prompts if isinstance(one, list)]
            decode, size = self._service.tokenizer.decode, sum(map(len, ids))
            texts = await self._service.workers.run(size, lambda: [decode(one) for one in ids])
        firsts = [one[0] if one and isinstance(one, list) else 0 for one in prompts]
        return [_Echo(text, first) for text, first in zip(texts, firsts, strict=True)]


def _check_choices(count: int) -> None:
    """Raise `HttpError` for more texts than a request can produce."""
    if count > CHOICES_PER_REQUEST_MAX:
        message = f"a request can produce at most {CHOICES_PER_REQUEST_MAX} texts, got {count}"
        raise HttpError(400, message, "n")


def _has_prompt_tokens(body: CompletionRequest) -> bool:
    """Return whether the answer has the number of a prompt's tokens or, in an echo, the first."""
    is_continuous = body.stream_options is not None and body.stream_options.is_continuous
    return is_continuous or bool(body.echo and body.logprobs is not None)


def _usage(body: CompletionRequest, prompts: Prompts) -> UsageCount:
    """Return the counter of tokens, with the prompts' if chunks need them."""
    usage = UsageCount(body.n or 1)
    if body.stream_options and body.stream_options.is_continuous:
        for index, prompt in enumerate(prompts):
            usage.on_prompt(index, len(prompt))
    return usage


def _sampling(body: CompletionRequest, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the keywords of `AsyncClient.generate`."""
    if body.max_tokens == 0 and not body.echo:
        message = "max_tokens must be at least 1, or 0 with echo: true, got 0"
        raise HttpError(400, message, "max_tokens")
    max_tokens = MAX_TOKENS_DEFAULT if body.max_tokens is None else max(1, body.max_tokens)
    sampling = sampling_of(body, defaults, max_tokens)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo:
            sampling["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return sampling


def prompts_of(
    prompt: str | list[str | int | list[int]], context: int | None, param: str = "prompt"
) -> Prompts:
    """Return each prompt of a request.

    Raises `HttpError` for a list of several kinds, for too many, and for one that is never sent.
    """
    if isinstance(prompt, str):
        check_length(prompt, context, param)
        return [prompt]
    kind = type(prompt[0])
    # Numbers are compared before anything is done with each item.
    if kind is int:
        check_length(prompt, context, param)
    elif len(prompt) > PROMPTS_MAX:
        message = f"a request can have at most {PROMPTS_MAX} prompts, got {len(prompt)}"
        raise HttpError(400, message, param)
    if not all(type(one) is kind for one in prompt):
        raise HttpError(400, "prompts must be all strings or all lists of token ids", param)
    prompts: list[Any] = [prompt] if kind is int else prompt
    for one in prompts:
        check_length(one, context, param)
    return prompts


class _Echo(NamedTuple):
    """A prompt's text, and its first token, for which there is no log-probability."""

    text: str
    first_token: int


class _Answer(InferenceAnswer[Completion, CompletionChoice, Completion]):
    """The answer to one request; `echoes`: one per prompt, if they are part of it."""

    def __init__(
        self,
        service: Service,
        adapter: str | None,
        usage: UsageCount,
        body: CompletionRequest,
        echoes: "list[_Echo]",
        text_of: TokenTextOf,
    ) -> None:
        super().__init__(service, "cmpl", adapter, usage)
        self._echoes = echoes
        self._per_prompt = body.n or 1
        self._body = body
        self._text_of = text_of
        # The choices that have begun; per prompt what its first choice has received, and per choice
        # the characters of tokens.
        self._begun: set[int] = set()
        self.prompt_ids: list[tuple[int, ...]] = []
        self._prompts: dict[int, Entries] = {}
        self._characters: dict[int, CharacterCount] = {}

    def _whole(self, choices: list[TokensStreamed]) -> Completion:
        parts = [self._first_part(index, choice) for index, choice in enumerate(choices)]
        return self._chunk(parts, self.usage.usage())

    def _parts(self, choice: int, chunk: TokensStreamed | None) -> list[CompletionChoice]:
        if chunk is None:
            return []
        is_first = choice not in self._begun
        return [self._first_part(choice, chunk) if is_first else self._choice(choice, chunk)]

    def _first_part(self, index: int, chunk: TokensStreamed) -> CompletionChoice:
        """Return the whole choice, or its first chunk, with what is known of its prompt."""
        prompt = self._prompt_of(index, chunk)
        shown = None
        if self._body.prompt_logprobs is not None:
            shown = prompt_logprobs(prompt, self._text_of)
        choice = self._choice(index, chunk, self._echo(index), shown)
        if not self.prompt_ids:
            return choice
        ids = self.prompt_ids[index // self._per_prompt]
        return msgspec.structs.replace(choice, prompt_token_ids=ids)

    def _choice(
        self,
        index: int,
        chunk: TokensStreamed,
        echo: str = "",
        shown_prompt: PromptLogprobs | None = None,
    ) -> CompletionChoice:
        has_output = self._body.max_tokens != 0
        scores = self._logprobs(index, chunk, has_output=has_output)
        self._begun.add(index)
        text = echo + (chunk.text if has_output else "")
        reason = finish_reason(chunk) if has_output else "length"
        ids = returned_ids(chunk, self._body) if has_output else UNSET
        return CompletionChoice(index, text, reason, scores, chunk.stop_reason, shown_prompt, ids)

    def _logprobs(
        self, index: int, chunk: TokensStreamed, *, has_output: bool
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of the chunk's tokens, after the prompt's in an echo."""
        is_echo = bool(self._echoes) and index not in self._begun
        generated = generated_tokens(chunk)
        if self._body.logprobs is None or not (generated or is_echo):
            return None
        tokens = list(generated) if has_output else []
        entries: list[TokenLogprob | None] = list(chunk.logprobs) if has_output else []
        if is_echo:
            number = index // self._per_prompt
            prompt, first = self._prompts.get(number, ()), self._echoes[number].first_token
            entries = [*prompt, *entries]
            tokens = [first if one is None else one.token for one in prompt] + tokens
        count = self._characters.setdefault(index, CharacterCount())
        return completion_logprobs(tokens, entries, self._text_of, count)

    def _prompt_of(self, choice: int, chunk: TokensStreamed) -> Entries:
        """Return the entries of a choice's prompt, which its first choice receives."""
        prompt = choice // self._per_prompt
        if chunk.prompt_logprobs:
            self._prompts[prompt] = chunk.prompt_logprobs
        return self._prompts.get(prompt, ())

    def _echo(self, choice: int) -> str:
        return self._echoes[choice // self._per_prompt].text if self._echoes else ""

    def _chunk(self, parts: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=parts, usage=usage
        )

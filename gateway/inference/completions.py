"""`POST /v1/completions`: texts and token ids continued, one choice or several."""

from typing import Annotated, Any, NamedTuple

from msgspec import Meta, UnsetType
from starlette.requests import Request

from gateway.http.endpoints import Answer
from gateway.http.errors import HttpError
from gateway.inference.answer import InferenceAnswer
from gateway.inference.answers import Completion, CompletionChoice, Usage
from gateway.inference.logprobs import (
    CharacterCount,
    CompletionLogprobs,
    Entries,
    PromptLogprobs,
    TokenTextOf,
    completion_logprobs,
    prompt_logprobs,
)
from gateway.inference.sampling import (
    Logprobs,
    SamplingDefaults,
    SamplingFields,
    sampling_of,
)
from gateway.inference.service import Service, Start, UsageCount, finish_reason, token_text_of
from messages.prompts import TokenId
from messages.requests import TokensStreamed
from messages.views import TokenLogprob

MAX_TOKENS_DEFAULT = 16
"""As in the OpenAI protocol."""

PROMPTS_MAX = 2048

Prompt = Annotated[str, Meta(max_length=1_000_000)]
TokenIds = Annotated[list[TokenId], Meta(max_length=262_144)]


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body: one prompt or a list of them, each a text or token ids."""

    prompt: Prompt | Annotated[list[str | int | TokenIds], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class Completions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def complete(self, _: Request, body: CompletionRequest) -> Answer:
        """Answer with all texts, or with a stream of chunks."""
        service, count = self._service, body.n or 1
        adapter = await service.models.find(body.model)
        files = await service.files_of(adapter)
        sampling = _sampling(body, files.defaults)
        text_of = token_text_of(service, body, has_logprobs=body.logprobs is not None)
        prompts = prompts_of(body.prompt)
        if body.add_special_tokens is False:
            prompts = [self._without_special_tokens(prompt) for prompt in prompts]
        echoes = [self._echo_of(prompt) for prompt in prompts] if body.echo else []
        usage = self._usage(body, prompts)
        starts = [
            Start(tuple(prompt) if isinstance(prompt, list) else prompt, sampling)
            for prompt in prompts
        ]
        run = await service.start(adapter, starts, count)
        answer = _Answer(service, adapter, usage, body, echoes, text_of)
        return await answer.response(run, body)

    def _without_special_tokens(self, prompt: str | list[int]) -> str | list[int]:
        tokenizer = self._service.tokenizer
        return tokenizer.encode(prompt, special=False) if isinstance(prompt, str) else prompt

    def _echo_of(self, prompt: str | list[int]) -> "_Echo":
        if isinstance(prompt, list):
            return _Echo(self._service.tokenizer.decode(prompt), prompt[0] if prompt else 0)
        tokenizer = self._service.adapter_files.base.tokenizer
        tokens = tokenizer.encode(prompt, special=True) if tokenizer is not None else []
        return _Echo(prompt, tokens[0] if tokens else 0)

    def _usage(self, body: CompletionRequest, prompts: list[str | list[int]]) -> UsageCount:
        """Return the counter of tokens, with those of the prompts if chunks need them."""
        usage = UsageCount(body.n or 1)
        if body.stream_options and body.stream_options.continuous_usage_stats:
            for index, prompt in enumerate(prompts):
                if isinstance(prompt, str):
                    tokens = self._service.tokenizer.encode(prompt, special=True)
                    usage.on_prompt(index, len(tokens))
                else:
                    usage.on_prompt(index, len(prompt))
        return usage


def _sampling(body: CompletionRequest, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the keywords of `AsyncClient.generate`."""
    if body.max_tokens == 0 and not body.echo:
        raise HttpError(400, "max_tokens is 0; at least 1, or 0 with echo: true", "max_tokens")
    max_tokens = MAX_TOKENS_DEFAULT if body.max_tokens is None else max(1, body.max_tokens)
    sampling = sampling_of(body, defaults, max_tokens)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo:
            sampling["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return sampling


def prompts_of(
    prompt: str | list[str | int | list[int]], param: str = "prompt"
) -> list[str | list[int]]:
    """Return each prompt of a request; raises `HttpError` for a list of several kinds."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [one for one in prompt if isinstance(one, str)]
    tokens = [one for one in prompt if isinstance(one, int)]
    lists = [one for one in prompt if isinstance(one, list)]
    if len(tokens) == len(prompt):
        return [tokens]
    if len(prompt) not in (len(texts), len(lists)):
        raise HttpError(400, "prompts of several kinds; all texts or all lists of ids", param)
    return [*texts, *lists]


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
        # Per prompt what its first choice has received, and per choice the characters of tokens.
        self._prompts: dict[int, Entries] = {}
        self._characters: dict[int, CharacterCount] = {}

    def _whole(self, choices: list[TokensStreamed]) -> Completion:
        parts = [self._first_part(index, choice) for index, choice in enumerate(choices)]
        return self._chunk(parts, self.usage.usage())

    def _first_parts(self, choice: int) -> list[CompletionChoice]:
        """Return nothing: an echo precedes the first chunk of its choice."""
        del choice
        return []

    def _parts(self, choice: int, chunk: TokensStreamed | None) -> list[CompletionChoice]:
        if chunk is None:
            return []
        is_first = choice not in self._characters
        return [self._first_part(choice, chunk) if is_first else self._choice(choice, chunk)]

    def _first_part(self, index: int, chunk: TokensStreamed) -> CompletionChoice:
        """Return the whole choice, or its first chunk, with what is known of its prompt."""
        prompt = self._prompt_of(index, chunk)
        shown = None
        if self._body.prompt_logprobs is not None:
            shown = prompt_logprobs(prompt, self._text_of)
        return self._choice(index, chunk, self._echo(index), shown)

    def _choice(
        self,
        index: int,
        chunk: TokensStreamed,
        echo: str = "",
        shown_prompt: PromptLogprobs | None = None,
    ) -> CompletionChoice:
        has_output = self._body.max_tokens != 0
        scores = self._logprobs(index, chunk, has_output=has_output)
        self._characters.setdefault(index, CharacterCount())
        text = echo + (chunk.text if has_output else "")
        reason = finish_reason(chunk) if has_output else "length"
        return CompletionChoice(index, text, reason, scores, chunk.stop_reason, shown_prompt)

    def _logprobs(
        self, index: int, chunk: TokensStreamed, *, has_output: bool
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of the chunk's tokens, after the prompt's in an echo."""
        is_echo = bool(self._echoes) and index not in self._characters
        if self._body.logprobs is None or not (chunk.tokens or is_echo):
            return None
        tokens = list(chunk.tokens) if has_output else []
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

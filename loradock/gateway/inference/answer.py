"""Answers to generations: choices, whole or as a stream.

`InferenceAnswer` streams chunks of choices, as in OpenAI's protocols of texts and chats;
`EventAnswer` streams typed events about the blocks of one output.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

from msgspec import UNSET, Struct, UnsetType

from loradock.client import LoradockError
from loradock.gateway.http.errors import HttpError, error_of
from loradock.gateway.http.streams import (
    DONE,
    ServerSentEvents,
    data_event,
    error_events,
    typed_event,
)
from loradock.gateway.inference.sampling import SamplingFields, StreamOptions
from loradock.gateway.inference.service import (
    ChoiceOutput,
    Run,
    Service,
    Usage,
    UsageCount,
    generated_tokens,
    new_id,
)
from loradock.gateway.inference.tool_parsers import Block, Step
from loradock.gateway.inference.tools import OutputReader, ToolPlan
from loradock.gateway.recorder import unix_seconds
from loradock.messages.requests import TokensStreamed

_LOGPROB_SIZE: Final = 32
_CHOICE_SIZE: Final = 64
"""The characters that showing the most likely tokens at a place, and a choice, take as long as."""

Event = dict[str, Any]
"""An event of a protocol; `type` is its name."""

Whole = TypeVar("Whole")
Part = TypeVar("Part")
Chunk = TypeVar("Chunk")


class RunAnswer(ABC, Generic[Whole]):
    """The answer to one request: `Whole`, or events."""

    def __init__(
        self,
        service: Service,
        prefix: str,
        adapter: str | None,
        usage: UsageCount,
        separator: str = "-",
    ) -> None:
        self.id = new_id(prefix, separator)
        self.created = unix_seconds()
        self.model = service.models.names.shown(adapter)
        self.usage = usage
        self._workers = service.workers

    async def respond(self, run: Run, *, stream: bool) -> Whole | ServerSentEvents:
        """Return the whole answer, or a stream that begins with the first output.

        Raises `LoradockError`. The run is closed with the answer.
        """
        if not stream:
            return await self._collected(run)
        try:
            await run.wait_for_first()
        except BaseException:
            await run.close()
            raise
        return ServerSentEvents(self._events(run), run.close)

    async def _collected(self, run: Run) -> Whole:
        """Read the whole run, close it, and return the answer."""
        try:
            outputs = await run.collected()
        finally:
            await run.close()
        for output in outputs:
            self._count(output)
        choices = [output.chunk for output in outputs if output.chunk is not None]
        if (size := _size_of(choices)) == 0:
            return self._whole(choices)
        return await self._workers.run(size, partial(self._whole, choices))

    @abstractmethod
    def _whole(self, choices: list[TokensStreamed]) -> Whole:
        """Return the answer; every choice is one message, with its finish reason."""

    @abstractmethod
    def _events(self, run: Run) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""

    def _count(self, output: ChoiceOutput) -> None:
        if output.done is not None:
            self.usage.on_done(output.choice, output.done)
        if output.chunk is not None:
            self.usage.on_tokens(output.choice, len(generated_tokens(output.chunk)))


class InferenceAnswer(RunAnswer[Whole], Generic[Whole, Part, Chunk]):
    """An answer of the OpenAI protocol whose stream is a `Chunk` per `Part` of a choice."""

    _options = StreamOptions()

    async def response(self, run: Run, body: SamplingFields) -> Whole | ServerSentEvents:
        """Return the whole answer, or a stream as the request's options have it."""
        self._options = body.stream_options or self._options
        return await self.respond(run, stream=bool(body.stream))

    async def _events(self, run: Run) -> AsyncGenerator[bytes, None]:
        options = self._options
        try:
            for choice in range(run.choices):
                for part in self._first_parts(choice):
                    yield self._event(choice, part, options)
            async for output in run.outputs():
                self._count(output)
                for part in await self._parts_of(output):
                    yield self._event(output.choice, part, options)
        except LoradockError as error:
            yield error_events(error_of(error))
            return
        if options.include_usage:
            yield data_event(self._chunk([], self.usage.usage()))
        yield DONE

    async def _parts_of(self, output: ChoiceOutput) -> list[Part]:
        chunk = output.chunk
        if chunk is None or not chunk.prompt_logprobs:
            return self._parts(output.choice, chunk)
        return await self._workers.run(
            _size_of([chunk]), partial(self._parts, output.choice, chunk)
        )

    def _first_parts(self, choice: int) -> list[Part]:  # noqa: ARG002 - for those that have some
        """Return what the stream of a choice begins with, before its first chunk."""
        return []

    @abstractmethod
    def _parts(self, choice: int, chunk: TokensStreamed | None) -> list[Part]:
        """Return what a chunk adds to a choice; None ends a generation."""

    @abstractmethod
    def _chunk(self, parts: list[Part], usage: Usage | UnsetType | None) -> Chunk:
        """Return an event's content."""

    def _event(self, choice: int, part: Part, options: StreamOptions) -> bytes:
        usage: Usage | UnsetType | None = None if options.include_usage else UNSET
        if options.is_continuous:
            usage = self.usage.usage_of(choice)
        return data_event(self._chunk([part], usage))


def _size_of(choices: Sequence[TokensStreamed]) -> int:
    """Return a number of characters that showing choices takes as long as."""
    places = sum(len(one.logprobs) + len(one.prompt_logprobs) for one in choices)
    return _LOGPROB_SIZE * places + _CHOICE_SIZE * (len(choices) - 1)


class Chat(Struct, frozen=True):
    """A chat whose generation has started; its reader closes the run.

    `prompt_ids`: the tokens of the prompt; None if the engine makes them, as with images.
    """

    run: Run
    adapter: str | None
    usage: UsageCount
    plan: ToolPlan
    prompt_ids: tuple[int, ...] | None


class EventAnswer(RunAnswer[Whole]):
    """The answer to a chat with one choice: `Whole`, or typed events."""

    def __init__(self, service: Service, prefix: str, chat: Chat) -> None:
        super().__init__(service, prefix, chat.adapter, chat.usage, "_")
        self._reader = OutputReader(chat.plan)
        # How the output ended, from its last chunk.
        self.reason: str | None = None
        self.stop_text: str | None = None

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of the output so far."""
        return self._reader.blocks.all

    def _whole(self, choices: list[TokensStreamed]) -> Whole:
        self._read(choices[0])
        return self._final()

    async def _events(self, run: Run) -> AsyncGenerator[bytes, None]:
        for event in self._begun():
            yield typed_event(event)
        try:
            async for output in run.outputs():
                self._count(output)
                if output.chunk is None:
                    continue
                for step in self._read(output.chunk):
                    for event in self._changed(step):
                        yield typed_event(event)
        except LoradockError as error:
            yield typed_event(self._failed(error_of(error)))
            return
        for event in self._ended():
            yield typed_event(event)

    def _read(self, chunk: TokensStreamed) -> list[Step]:
        steps = self._reader.read(chunk)
        self.reason = self._reader.finish_reason(chunk)
        self.stop_text = chunk.stop_reason if isinstance(chunk.stop_reason, str) else None
        return steps

    @abstractmethod
    def _final(self) -> Whole:
        """Return the answer, of all blocks."""

    @abstractmethod
    def _begun(self) -> Sequence[Event]:
        """Return the events with which a stream begins."""

    @abstractmethod
    def _changed(self, step: Step) -> Sequence[Event]:
        """Return the events about a block."""

    @abstractmethod
    def _ended(self) -> Sequence[Event]:
        """Return the events that end a stream."""

    @abstractmethod
    def _failed(self, error: HttpError) -> Event:
        """Return the event that ends a stream with an error."""

"""What the answers of texts and chats have in common: choices, whole or as a stream of chunks."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from msgspec import UNSET, UnsetType

from loradock.client import LoradockError
from loradock.gateway.http.endpoints import Answer
from loradock.gateway.http.errors import error_of
from loradock.gateway.http.streams import DONE, EventStream, data_event, error_events, json_response
from loradock.gateway.inference.answers import Usage
from loradock.gateway.inference.run import Output, Run, generated_tokens
from loradock.gateway.inference.sampling import SamplingFields, StreamOptions
from loradock.gateway.inference.service import Service, UsageCount
from loradock.gateway.timestamps import unix_seconds
from loradock.messages.requests import TokensStreamed

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
        self.id = service.new_id(prefix, separator)
        self.created = unix_seconds()
        self.model = service.models.names.shown(adapter)
        self.usage = usage

    async def respond(self, run: Run, *, stream: bool) -> Answer:
        """Return the whole answer, or a stream that begins with the first output.

        Raises `LoradockError`. The run is closed with the answer.
        """
        if not stream:
            return json_response(await self._collected(run))
        try:
            await run.wait_for_first()
        except BaseException:
            await run.close()
            raise
        return EventStream(self._events(run), run.close)

    async def _collected(self, run: Run) -> Whole:
        """Read the whole run, close it, and return the answer."""
        try:
            outputs = await run.collected()
        finally:
            await run.close()
        for output in outputs:
            self._count(output)
        return self._whole([output.chunk for output in outputs if output.chunk is not None])

    @abstractmethod
    def _whole(self, choices: list[TokensStreamed]) -> Whole:
        """Return the answer; every choice is one message, with its finish reason."""

    @abstractmethod
    def _events(self, run: Run) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""

    def _count(self, output: Output) -> None:
        if output.done is not None:
            self.usage.on_done(output.choice, output.done)
        if output.chunk is not None:
            self.usage.on_tokens(output.choice, len(generated_tokens(output.chunk)))


class InferenceAnswer(RunAnswer[Whole], Generic[Whole, Part, Chunk]):
    """An answer of the OpenAI protocol whose stream is a `Chunk` per `Part` of a choice."""

    _options = StreamOptions()

    async def response(self, run: Run, body: SamplingFields) -> Answer:
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
                for part in self._parts(output.choice, output.chunk):
                    yield self._event(output.choice, part, options)
        except LoradockError as error:
            yield error_events(error_of(error))
            return
        if options.include_usage:
            yield data_event(self._chunk([], self.usage.usage()))
        yield DONE

    @abstractmethod
    def _first_parts(self, choice: int) -> list[Part]:
        """Return what a stream begins with."""

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

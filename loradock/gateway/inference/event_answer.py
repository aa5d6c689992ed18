"""Answers to chats in protocols whose streams are events about blocks: one output, read once."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from msgspec import Struct

from loradock.client import LoradockError
from loradock.gateway.http.endpoints import Answer
from loradock.gateway.http.errors import HttpError, error_of
from loradock.gateway.http.streams import typed_event
from loradock.gateway.inference.answer import RunAnswer
from loradock.gateway.inference.chat import Chat
from loradock.gateway.inference.run import Run
from loradock.gateway.inference.service import Service
from loradock.gateway.inference.tools import OutputReader
from loradock.gateway.tools.blocks import Block, Step
from loradock.messages.requests import TokensStreamed

Whole = TypeVar("Whole")


class EventAnswer(RunAnswer[Whole]):
    """The answer to a chat with one choice: `Whole`, or typed events."""

    def __init__(self, service: Service, prefix: str, chat: Chat) -> None:
        super().__init__(service, prefix, chat.adapter, chat.usage, "_")
        self._chat = chat
        self._reader = OutputReader(chat.plan)
        # How the output ended, from its last chunk.
        self.reason: str | None = None
        self.stop_text: str | None = None

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of the output so far."""
        return self._reader.blocks.all

    async def response(self, *, stream: bool) -> Answer:
        """Return the whole answer, or a stream that begins with the first output."""
        return await self.respond(self._chat.run, stream=stream)

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
    def _begun(self) -> Sequence[Struct]:
        """Return the events with which a stream begins."""

    @abstractmethod
    def _changed(self, step: Step) -> Sequence[Struct]:
        """Return the events about a block."""

    @abstractmethod
    def _ended(self) -> Sequence[Struct]:
        """Return the events that end a stream."""

    @abstractmethod
    def _failed(self, error: HttpError) -> Struct:
        """Return the event that ends a stream with an error."""

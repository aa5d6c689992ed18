"""A generation of the asyncio client."""

from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, Protocol, Self

from loradock.client.calls import ClientCall, GenerationCall
from loradock.client.prepared import PreparedGeneration
from loradock.client.session import answer_of
from loradock.messages.requests import GenerationDone, TokensStreamed


class GenerationClient(Protocol):
    """The client that a generation belongs to."""

    async def _begin_generation(self, prepared: PreparedGeneration) -> GenerationCall:
        """Send the request."""

    async def _wait(self, call: ClientCall, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, which is called after every change of the call."""

    async def _cancel(self, generation: GenerationCall) -> bool:
        """Request a cancellation and return whether the generation was running."""

    def _abandon(self, call: GenerationCall) -> None:
        """Cancel a generation whose output and end nothing waits for."""

    def _drop(self, call: GenerationCall) -> None:
        """Cancel a generation that nothing refers to; any thread may call this."""


class AsyncGeneration:
    """A generation: `async for` its chunks as they arrive, or `await` its `text()`.

    It starts when it is awaited, which returns it, or used for the first time. A chunk is a
    `TokensStreamed`: `tokens[i]` is token `offset + i` of output `index`, each once. Only one task
    may read it. Leaving the `async with` block, `close()`, and dropping the last reference to it,
    as by leaving an `async for` loop over it, cancel a generation that was not read to its end.
    """

    def __init__(self, client: GenerationClient, prepared: PreparedGeneration) -> None:
        self._client = client
        self._prepared = prepared
        self._begun: GenerationCall | None = None
        self._closed = False

    def __await__(self) -> Generator[Any, None, Self]:
        return self._start().__await__()

    async def _start(self) -> Self:
        await self._call()
        return self

    async def _call(self) -> GenerationCall:
        """Return the call, which begins with the first use."""
        if self._begun is None:
            self._begun = await self._client._begin_generation(self._prepared)
        return self._begun

    def __del__(self) -> None:
        if self._begun is not None and not self._closed and not self._begun.settled:
            self._client._drop(self._begun)

    @property
    def request_id(self) -> str:
        """The id under which the controller knows it, empty before its start.

        A further attempt has another one.
        """
        return "" if self._begun is None else self._begun.request_id

    @property
    def result(self) -> GenerationDone | None:
        """How it ended and its numbers of tokens; None before the end, or if it failed."""
        return None if self._begun is None else self._begun.result

    def __aiter__(self) -> AsyncIterator[TokensStreamed]:
        return self

    async def __anext__(self) -> TokensStreamed:
        call = self._begun or await self._call()
        # `_wait` is a coroutine, which output that has arrived does not need.
        if not (call.chunks or self._closed or call.settled):
            await self._client._wait(call, lambda: bool(call.chunks) or call.settled)
        if call.chunks:
            return call.pop()
        if not self._closed:
            answer_of(call, GenerationDone)
        raise StopAsyncIteration

    async def read(self, on_chunk: Callable[[TokensStreamed], None]) -> GenerationDone:
        """Call a function with each further chunk as it arrives, and return how it ended.

        This costs less than iterating, because the task continues only at the end.
        """
        call = await self._call()

        def has_ended() -> bool:
            while call.chunks:
                on_chunk(call.pop())
            return call.settled

        if not self._closed:
            await self._client._wait(call, has_ended)
        has_ended()
        return answer_of(call, GenerationDone)

    async def text(self) -> str:
        """Wait for the end and return the whole text, including chunks iterated over before.

        Of several outputs (`n`) it is the first one's.
        """
        return (await self.texts())[0]

    async def texts(self) -> tuple[str, ...]:
        """Wait for the end and return the whole text of each output."""
        call = await self._call()
        if not self._closed:
            await self._client._wait(call, lambda: call.settled)
            answer_of(call, GenerationDone)
        return call.texts()

    async def cancel(self) -> bool:
        """End it early; its output can still be read. False if it was not running."""
        return await self._client._cancel(await self._call())

    async def close(self) -> None:
        """Stop reading; a running generation is cancelled without waiting for the answer."""
        if self._begun is not None and not self._closed and not self._begun.settled:
            self._client._abandon(self._begun)
        self._closed = True

    async def __aenter__(self) -> Self:
        return await self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

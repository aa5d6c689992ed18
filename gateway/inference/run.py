"""The generations of one request: started together, read as one sequence of outputs.

Closing a run cancels the generations that have not ended.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from controller.client import AsyncGeneration, LoradockError
from gateway.metrics.recorder import Recorder
from messages.requests import GenerationDone, TokensStreamed


class Output(NamedTuple):
    """A chunk of a choice, the last one with a finish reason; or the end of its generation."""

    choice: int
    chunk: TokensStreamed | None = None
    done: GenerationDone | None = None


class Run:
    """Generations in flight, each with `per_generation` choices."""

    def __init__(
        self, generations: Sequence[AsyncGeneration], recorder: Recorder, per_generation: int = 1
    ) -> None:
        self._generations = generations
        self._per_generation = per_generation
        self._measurements = [recorder.begin() for _ in generations]
        self._readers: list[asyncio.Task[None]] = []
        self._first: Output | None = None
        self._source = self._read_one(0) if len(generations) == 1 else self._read_all()

    @property
    def choices(self) -> int:
        """The number of choices."""
        return len(self._generations) * self._per_generation

    async def wait_for_first(self) -> None:
        """Wait for the first output: what fails before it can still be answered with a status."""
        self._first = await anext(self._source)

    def outputs(self) -> AsyncGenerator[Output, None]:
        """Return every output, and per generation one with `done`; raises `LoradockError`."""
        return self._source if self._first is None else self._from_first(self._first)

    async def _from_first(self, first: Output) -> AsyncGenerator[Output, None]:
        yield first
        async for output in self._source:
            yield output

    async def close(self) -> None:
        """Cancel what has not ended."""
        for reader in self._readers:
            reader.cancel()
        for generation, measurement in zip(self._generations, self._measurements, strict=True):
            measurement.on_closed()
            await generation.close()

    async def _read_one(self, number: int) -> AsyncGenerator[Output, None]:
        generation, measurement = self._generations[number], self._measurements[number]
        first = number * self._per_generation
        running = set(range(self._per_generation))
        try:
            async for chunk in generation:
                if chunk.tokens:
                    measurement.on_tokens(len(chunk.tokens))
                if chunk.finish_reason is not None:
                    running.discard(chunk.index)
                yield Output(first + chunk.index, chunk)
        except LoradockError:
            measurement.on_failed()
            raise
        result = generation.result
        if result is not None:
            measurement.on_done(result)
            for index in sorted(running):
                reason = result.finish_reason
                end = TokensStreamed(result.request_id, 0, (), index=index, finish_reason=reason)
                yield Output(first + index, end)
            yield Output(first, done=result)

    async def _read_all(self) -> AsyncGenerator[Output, None]:
        outputs: asyncio.Queue[Output | LoradockError] = asyncio.Queue(maxsize=1)
        for number in range(len(self._generations)):
            self._readers.append(asyncio.create_task(self._forward(number, outputs)))
        running = len(self._generations)
        while running:
            output = await outputs.get()
            if isinstance(output, LoradockError):
                raise output
            running -= output.done is not None
            yield output

    async def _forward(self, number: int, outputs: "asyncio.Queue[Output | LoradockError]") -> None:
        try:
            async for output in self._read_one(number):
                await outputs.put(output)
        except LoradockError as error:
            # Raised again where the outputs are read.
            await outputs.put(error)

"""The generations of one request: started together, read as one sequence of outputs.

Closing a run cancels the generations that have not ended.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from controller.client import AsyncGeneration, LoradockError
from gateway.metrics.recorder import Recorder
from messages.requests import GenerationDone


class Output(NamedTuple):
    """New text and tokens of a choice, or its end."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    done: GenerationDone | None = None


class Run:
    """Generations in flight; `choices` is their number."""

    def __init__(self, generations: Sequence[AsyncGeneration], recorder: Recorder) -> None:
        self._generations = generations
        self._measurements = [recorder.begin() for _ in generations]
        self._readers: list[asyncio.Task[None]] = []
        self._first: Output | None = None
        self._source = self._read_one(0) if len(generations) == 1 else self._read_all()

    @property
    def choices(self) -> int:
        """The number of generations."""
        return len(self._generations)

    async def wait_for_first(self) -> None:
        """Wait for the first output: what fails before it can still be answered with a status."""
        self._first = await anext(self._source)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Yield every output, and per choice one with `done`; raises `LoradockError`."""
        if self._first is not None:
            yield self._first
        async for output in self._source:
            yield output

    async def close(self) -> None:
        """Cancel what has not ended."""
        for reader in self._readers:
            reader.cancel()
        for generation, measurement in zip(self._generations, self._measurements, strict=True):
            measurement.on_closed()
            await generation.close()

    async def _read_one(self, choice: int) -> AsyncGenerator[Output, None]:
        generation, measurement = self._generations[choice], self._measurements[choice]
        try:
            async for chunk in generation:
                measurement.on_tokens(len(chunk.tokens))
                yield Output(choice, chunk.text, chunk.tokens)
        except LoradockError:
            measurement.on_failed()
            raise
        result = generation.result
        if result is not None:
            measurement.on_done(result)
            yield Output(choice, "", (), result)

    async def _read_all(self) -> AsyncGenerator[Output, None]:
        outputs: asyncio.Queue[Output | LoradockError] = asyncio.Queue(maxsize=1)
        for choice in range(self.choices):
            self._readers.append(asyncio.create_task(self._forward(choice, outputs)))
        running = self.choices
        while running:
            output = await outputs.get()
            if isinstance(output, LoradockError):
                raise output
            running -= output.done is not None
            yield output

    async def _forward(self, choice: int, outputs: "asyncio.Queue[Output | LoradockError]") -> None:
        try:
            async for output in self._read_one(choice):
                await outputs.put(output)
        except LoradockError as error:
            # Raised again where the outputs are read.
            await outputs.put(error)

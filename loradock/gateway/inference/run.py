"""The generations of one request: started together, read as a whole or as one sequence of outputs.

Closing a run cancels the generations that have not ended.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from loradock.client import AsyncGeneration, LoradockError
from loradock.gateway.inference.sampling import SamplingFields
from loradock.gateway.metrics.recorder import Recorder
from loradock.messages.requests import GenerationDone, TokensStreamed


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

    async def collected(self) -> list[Output]:
        """Read everything; return a chunk per choice, in order, and then each generation's end.

        Raises `LoradockError`.
        """
        chunks: list[list[TokensStreamed]] = [[] for _ in range(self.choices)]
        if len(self._generations) == 1:
            ends = [await self._collect(0, chunks)]
        else:
            numbers = range(len(self._generations))
            tasks = [asyncio.create_task(self._collect(number, chunks)) for number in numbers]
            try:
                ends = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return [*(Output(choice, _joined(parts)) for choice, parts in enumerate(chunks)), *ends]

    async def wait_for_first(self) -> None:
        """Wait for the first output: what fails before it can still be answered with a status."""
        self._first = await anext(self._source)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Yield every output, and per generation one with `done`; raises `LoradockError`."""
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

    def on_output(self, output: Output) -> None:
        """Note an output as it arrives: for a run that is traced."""

    def on_error(self, error: LoradockError) -> None:
        """Note why a generation failed: for a run that is traced."""

    async def _collect(self, number: int, chunks: list[list[TokensStreamed]]) -> Output:
        measurement = self._measurements[number]
        first = number * self._per_generation

        def on_chunk(chunk: TokensStreamed) -> None:
            if generated := generated_tokens(chunk):
                measurement.on_tokens(chunk.index, len(generated))
            chunks[first + chunk.index].append(chunk)
            self.on_output(Output(first + chunk.index, chunk))

        try:
            result = await self._generations[number].read(on_chunk)
        except LoradockError as error:
            self._fail(number, error)
            raise
        for index in range(self._per_generation):
            parts = chunks[first + index]
            if not parts or parts[-1].finish_reason is None:
                parts.append(_end(result, index))
                self.on_output(Output(first + index, parts[-1]))
        return self._finish(number, result)

    async def _read_one(self, number: int) -> AsyncGenerator[Output, None]:
        generation, measurement = self._generations[number], self._measurements[number]
        first = number * self._per_generation
        running = set(range(self._per_generation))
        try:
            async for chunk in generation:
                if generated := generated_tokens(chunk):
                    measurement.on_tokens(chunk.index, len(generated))
                if chunk.finish_reason is not None:
                    running.discard(chunk.index)
                output = Output(first + chunk.index, chunk)
                self.on_output(output)
                yield output
        except LoradockError as error:
            self._fail(number, error)
            raise
        result = generation.result
        if result is not None:
            for index in sorted(running):
                output = Output(first + index, _end(result, index))
                self.on_output(output)
                yield output
            yield self._finish(number, result)

    def _finish(self, number: int, result: GenerationDone) -> Output:
        self._measurements[number].on_done(result)
        output = Output(number * self._per_generation, done=result)
        self.on_output(output)
        return output

    def _fail(self, number: int, error: LoradockError) -> None:
        self._measurements[number].on_failed()
        self.on_error(error)

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


def generated_tokens(chunk: TokensStreamed) -> tuple[int, ...]:
    """Return the tokens of a chunk, with the one that ended the output."""
    return chunk.tokens if chunk.end_token is None else (*chunk.tokens, chunk.end_token)


def returned_ids(chunk: TokensStreamed, body: SamplingFields) -> tuple[int, ...] | UnsetType:
    """Return the token ids of a chunk if the request has `return_token_ids`."""
    return generated_tokens(chunk) if body.return_token_ids else UNSET


def _end(result: GenerationDone, index: int) -> TokensStreamed:
    """Return the end of an output whose stream has none."""
    return TokensStreamed(result.request_id, 0, (), index=index, finish_reason=result.finish_reason)


def _joined(parts: list[TokensStreamed]) -> TokensStreamed:
    """Return the chunks of a choice as one."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    return msgspec.structs.replace(
        parts[0],
        tokens=tuple(chain.from_iterable([part.tokens for part in parts])),
        text="".join([part.text for part in parts]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        end_token=last.end_token,
        logprobs=tuple(chain.from_iterable([part.logprobs for part in parts])),
    )

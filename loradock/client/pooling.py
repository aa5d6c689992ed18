"""Embeddings and classifications: their requests, the call that collects vectors, the results.

Vectors are tuples of plain floats. A result is complete, with one vector per input in the order of
the inputs; anything less is an error.
"""

import sys
from array import array
from collections.abc import Iterable

from msgspec import Struct

from loradock.client.calls import NO_ID, StreamingCall
from loradock.messages.prompts import Inputs, TextPrompt, Truncation
from loradock.messages.requests import Classify, Embed, PoolingDone, Reply, VectorsStreamed


class Embedding(Struct, frozen=True):
    """One vector per input and the total of input tokens; `adapter` None is the base model."""

    adapter: str | None
    vectors: tuple[tuple[float, ...], ...]
    input_tokens: int


class Classification(Struct, frozen=True):
    """One score per input and label: `scores[i][j]` is the score of input i for `labels[j]`."""

    adapter: str | None
    labels: tuple[str, ...]
    scores: tuple[tuple[float, ...], ...]
    input_tokens: int

    @property
    def best(self) -> tuple[str, ...]:
        """The label with the highest score, per input."""
        indices = (max(range(len(row)), key=row.__getitem__) for row in self.scores)
        return tuple(self.labels[index] for index in indices)


def embed_request(
    texts: str | Iterable[TextPrompt],
    adapter: str | None,
    trace: str = "",
    truncation: Truncation | None = None,
    dimensions: int = 0,
) -> Embed:
    """Return a request that the session has not numbered yet."""
    inputs = _inputs(texts)
    return Embed(NO_ID, adapter, inputs, trace=trace, truncation=truncation, dimensions=dimensions)


def classify_request(
    texts: str | Iterable[TextPrompt],
    adapter: str | None,
    trace: str = "",
    truncation: Truncation | None = None,
) -> Classify:
    """Return a request that the session has not numbered yet."""
    return Classify(NO_ID, adapter, _inputs(texts), trace=trace, truncation=truncation)


def _inputs(texts: str | Iterable[TextPrompt]) -> Inputs:
    """Return the texts as a tuple; a single string is one text, not its characters."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


class PoolingCall(StreamingCall[PoolingDone]):
    """An `Embed` or `Classify` in flight: vectors in any order, and the final reply."""

    request: Embed | Classify

    def _reset_attempt(self) -> None:
        super()._reset_attempt()
        self._vectors: dict[int, bytes] = {}
        self._labels: tuple[str, ...] = ()

    def on_reply(self, reply: Reply, now: float) -> None:
        """Process vectors, the final reply or a refusal."""
        if isinstance(reply, VectorsStreamed):
            self._vectors |= enumerate(reply.vectors, reply.offset)
            self._labels = reply.labels
            self._extend_output_deadline(now)
            # A repeated request makes the engine send all vectors again, so a working engine
            # receives one late.
            self.send_at = now + self.timing.retry_s_max
        elif isinstance(reply, PoolingDone):
            self._on_final(reply, now)
        else:
            super().on_reply(reply, now)
            return
        if self._final is not None and self._has_all_output(self._final):
            self.settle(self._final)

    def _has_all_output(self, final: PoolingDone) -> bool:
        return len(self._vectors) >= final.inputs

    def _lost_output(self, final: PoolingDone) -> str:
        return (
            f"{final.inputs} inputs were done and only {len(self._vectors)} of their vectors "
            "arrived: the engine that held them is gone; send the request again"
        )

    def embedding(self, final: PoolingDone) -> Embedding:
        """Return the result of a settled `Embed`."""
        return Embedding(final.adapter, self._rows(final), final.input_tokens)

    def classification(self, final: PoolingDone) -> Classification:
        """Return the result of a settled `Classify`."""
        rows = self._rows(final)
        return Classification(final.adapter, self._labels, rows, final.input_tokens)

    def _rows(self, final: PoolingDone) -> tuple[tuple[float, ...], ...]:
        return tuple(_floats(self._vectors[index]) for index in range(final.inputs))


def _floats(vector: bytes) -> tuple[float, ...]:
    """Return the numbers of a vector of little-endian float32."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)

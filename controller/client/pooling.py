"""Embeddings and classifications as a client gets them.

What it is: the requests, the call that gathers vectors until all are there, and the two results.
What it is not: the arithmetic of vectors; they are plain floats, for whatever library there is.
One rule: a result is complete, one vector for each input in the inputs' order, or it is an error.
"""

import sys
from array import array
from collections.abc import Iterable

from msgspec import Struct

from controller.client.calls import NEW, AccountedCall
from messages.requests import (
    Classify,
    Embed,
    Inputs,
    PoolingDone,
    Reply,
    TextPrompt,
    VectorsStreamed,
)


class Embedding(Struct, frozen=True):
    """One vector for each input, `input_tokens` in all; `adapter` None is the base model."""

    adapter: str | None
    vectors: tuple[tuple[float, ...], ...]
    input_tokens: int


class Classification(Struct, frozen=True):
    """One score for each label and input: `scores[i][j]` is what input i gets for `labels[j]`."""

    adapter: str | None
    labels: tuple[str, ...]
    scores: tuple[tuple[float, ...], ...]
    input_tokens: int

    @property
    def best(self) -> tuple[str, ...]:
        """The label with the highest score, for each input."""
        places = (max(range(len(row)), key=row.__getitem__) for row in self.scores)
        return tuple(self.labels[place] for place in places)


def embed_request(texts: str | Iterable[TextPrompt], adapter: str | None) -> Embed:
    """A request that the session has not numbered yet."""
    return Embed(NEW, adapter, _inputs(texts))


def classify_request(texts: str | Iterable[TextPrompt], adapter: str | None) -> Classify:
    """A request that the session has not numbered yet."""
    return Classify(NEW, adapter, _inputs(texts))


def _inputs(texts: str | Iterable[TextPrompt]) -> Inputs:
    """The texts as a tuple; one text alone is not taken for its characters."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


class PoolingCall(AccountedCall[PoolingDone]):
    """An `Embed` or `Classify`: vectors in any order and number, and their account."""

    request: Embed | Classify

    def _restart(self) -> None:
        super()._restart()
        self._vectors: dict[int, bytes] = {}
        self._labels: tuple[str, ...] = ()

    def take(self, reply: Reply, now: float) -> None:
        """Vectors, the account, or a refusal."""
        if isinstance(reply, VectorsStreamed):
            self._vectors |= enumerate(reply.vectors, reply.offset)
            self._labels = reply.labels
            self._expect_output(now)
            # Whoever works needs no reminder soon: a repeat has all of it sent again.
            self.send_at = now + self.timing.retry_s_max
        elif isinstance(reply, PoolingDone):
            self._take_account(reply, now)
        else:
            super().take(reply, now)
            return
        if self._account is not None and self._has_output_of(self._account):
            self.settle(self._account)

    def _has_output_of(self, account: PoolingDone) -> bool:
        return len(self._vectors) >= account.inputs

    def _lost(self, account: PoolingDone) -> str:
        return (
            f"{account.inputs} inputs were done and only {len(self._vectors)} of their vectors "
            "arrived: the engine that held them is gone; ask again"
        )

    def embedding(self, account: PoolingDone) -> Embedding:
        """What an `Embed` has brought, once it is settled."""
        return Embedding(account.adapter, self._rows(account), account.input_tokens)

    def classification(self, account: PoolingDone) -> Classification:
        """What a `Classify` has brought, once it is settled."""
        rows = self._rows(account)
        return Classification(account.adapter, self._labels, rows, account.input_tokens)

    def _rows(self, account: PoolingDone) -> tuple[tuple[float, ...], ...]:
        return tuple(_floats(self._vectors[place]) for place in range(account.inputs))


def _floats(vector: bytes) -> tuple[float, ...]:
    """The numbers of a vector: float32, little endian."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)

"""One request to embed or to classify: its texts, and the vectors computed so far."""

import sys
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from loradock.messages.commands import StartPooling
from loradock.messages.requests import VectorsStreamed


class TokenizedText(NamedTuple):
    """An input's tokens; `first`: the index of the first token that counts in a mean."""

    tokens: list[int]
    first: int = 0


@dataclass(eq=False)
class PoolingRequest:
    """A request's texts, the indices of the remaining ones, and vectors by index.

    `remaining` has the longest text first and is consumed from its end: texts of similar length
    share a forward pass, with little padding.
    """

    command: StartPooling
    texts: list[TokenizedText]
    remaining: list[int] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)
    is_finite: bool = True

    def __post_init__(self) -> None:
        def length(index: int) -> int:
            return len(self.texts[index].tokens)

        self.remaining = sorted(range(len(self.texts)), key=length, reverse=True)

    def add_result(self, row: Tensor, is_finite: bool) -> None:
        """Store the result of the last remaining text; row: [width] float32."""
        self.is_finite = self.is_finite and is_finite
        self.vectors[self.remaining.pop()] = pack_vector(row)

    def report(self, labels: tuple[str, ...]) -> VectorsStreamed:
        """Return all vectors, in the order of the inputs."""
        vectors = tuple(self.vectors[index] for index in range(len(self.texts)))
        return VectorsStreamed(self.command.request_id, 0, vectors, labels)

    @property
    def input_tokens(self) -> int:
        """The tokens of all inputs that have vectors."""
        return sum(len(self.texts[index].tokens) for index in self.vectors)


def pack_vector(row: Tensor) -> bytes:
    """Encode a vector for the wire: float32, little endian."""
    numbers = array("f", row.tolist())
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()

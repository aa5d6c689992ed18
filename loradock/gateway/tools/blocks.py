"""The blocks of an output: texts and calls of tools, each begun, extended and ended in order."""

from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct, field

from loradock.gateway.tools.parts import ArgumentsAdded, CallBegun, CallEnded, Part, Text


class Block(Struct):
    """A text, or a call whose arguments are `text`.

    `index` is its place among all blocks, and `call_index` a call's place among the calls.
    """

    index: int
    kind: Literal["text", "call"] = "text"
    name: str = ""
    id: str = ""
    call_index: int = 0
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of the text, or of the arguments, so far."""
        return "".join(self.pieces)


class Step(Struct, frozen=True):
    """A block begins, gets more `text`, or ends."""

    kind: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one output; `new_id` returns the id of a call."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._open: Block | None = None
        self.all: list[Block] = []

    @property
    def calls(self) -> list[Block]:
        """The calls so far."""
        return [block for block in self.all if block.kind == "call"]

    @property
    def text(self) -> str:
        """All texts so far."""
        return "".join([block.text for block in self.all if block.kind == "text"])

    def add(self, parts: Iterable[Part]) -> list[Step]:
        """Add parts; return what changes."""
        steps: list[Step] = []
        for part in parts:
            match part:
                case Text(text=text):
                    if self._open is None or self._open.kind != "text":
                        steps += [*self.finish(), self._begin(Block(len(self.all)))]
                    steps.append(self._extend(text))
                case CallBegun(name=name):
                    call = Block(len(self.all), "call", name, self._new_id(), len(self.calls))
                    steps += [*self.finish(), self._begin(call)]
                case ArgumentsAdded(text=text):
                    steps.append(self._extend(text))
                case CallEnded():
                    steps += self.finish()
        return steps

    def finish(self) -> list[Step]:
        """End the block that is open, if any."""
        if self._open is None:
            return []
        block, self._open = self._open, None
        return [Step("end", block)]

    def _begin(self, block: Block) -> Step:
        self._open = block
        self.all.append(block)
        return Step("begin", block)

    def _extend(self, text: str) -> Step:
        # The last block is the open one: parsers extend nothing that they have not begun.
        block = self.all[-1]
        block.pieces.append(text)
        return Step("more", block, text)

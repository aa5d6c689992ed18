"""Calls of tools in an output: from its text, as it arrives, to the blocks of an answer.

Every parser adds to `Blocks` in the order of the text, and every protocol's answer consists of
them. The blocks of an output do not depend on how its text is divided. A call that the model was
free to write is added when it is complete, because only then it is known to be one; what turns out
to be none is text. Calls that a structure enforces are added at once.
"""

import json
import re
from collections.abc import Callable
from typing import Final, Literal, Protocol

from msgspec import Struct, field

from loradock.gateway.inference.tool_formats import Format, Schemas

CALL_CHARACTERS_MAX: Final = 1 << 20
"""Bound on the text that is held back until a call is complete."""

SPACES_MAX: Final = 64
"""Bound on the spaces before a tag that belong to it."""


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
    """The blocks of one output, to which a parser adds; `new_id` returns the id of a call."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._open: Block | None = None
        self._steps: list[Step] = []
        self.all: list[Block] = []

    @property
    def calls(self) -> list[Block]:
        """The calls so far."""
        return [block for block in self.all if block.kind == "call"]

    @property
    def text(self) -> str:
        """All texts so far."""
        return "".join([block.text for block in self.all if block.kind == "text"])

    def take_steps(self) -> list[Step]:
        """Return and clear what has changed."""
        steps, self._steps = self._steps, []
        return steps

    def add_text(self, text: str) -> None:
        """Add a piece of text for the user."""
        if self._open is None or self._open.kind != "text":
            self._begin(Block(len(self.all)))
        self._extend(text)

    def begin_call(self, name: str) -> None:
        """Begin a call of a tool."""
        self._begin(Block(len(self.all), "call", name, self._new_id(), len(self.calls)))

    def add_arguments(self, text: str) -> None:
        """Add a piece of the call's arguments, which are JSON when it has ended."""
        self._extend(text)

    def end(self) -> None:
        """End the block that is open, if any."""
        if self._open is not None:
            self._steps.append(Step("end", self._open))
            self._open = None

    def _begin(self, block: Block) -> None:
        self.end()
        self._open = block
        self.all.append(block)
        self._steps.append(Step("begin", block))

    def _extend(self, text: str) -> None:
        # The last block is the open one: parsers extend nothing that they have not begun.
        block = self.all[-1]
        block.pieces.append(text)
        self._steps.append(Step("more", block, text))


class Parser(Protocol):
    """A reader of the text of an output."""

    def add(self, text: str) -> None:
        """Add to the blocks what `text` completes."""

    def finish(self) -> None:
        """Add what was held back, at the end of the output."""


class PlainText:
    """Text without calls."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def add(self, text: str) -> None:
        """Add the text."""
        if text:
            self._blocks.add_text(text)

    def finish(self) -> None:
        """Add nothing."""


class FreeCalls:
    """Text with calls in a format, each of one of the tools in `schemas`.

    `parallel`: all calls are yielded; otherwise the first one.
    """

    def __init__(
        self, blocks: Blocks, of: Format, schemas: Schemas, *, parallel: bool = True
    ) -> None:
        self._blocks = blocks
        self._format = of
        self._schemas = schemas
        self._parallel = parallel
        # Outside calls: spaces and the beginning of a tag. Inside: what precedes the body.
        self._held = ""
        self._is_inside = False
        self._body: list[str] = []
        self._body_characters = 0
        # The end of the body that may be the beginning of a tag.
        self._tail = ""
        self._is_at_start = bool(of.bare)
        self._calls = 0
        self._follows_call = False

    def add(self, text: str) -> None:
        """Add what `text` completes."""
        while text:
            text = self._read_call(text) if self._is_inside else self._read_text(text)

    def finish(self) -> None:
        """Add what was held back: a call without its end, or text."""
        if self._is_inside:
            self._close("")
        rest, self._held = self._held, ""
        if rest and not (self._follows_call and rest.isspace()):
            self._blocks.add_text(rest)

    def _read_text(self, text: str) -> str:
        """Read up to the next call; return the text after its tag."""
        text = self._held + text
        self._held = ""
        if self._is_at_start and (content := text.lstrip()):
            self._is_at_start = False
            if content.startswith(self._format.bare):
                self._open(text[: len(text) - len(content)])
                return content
        begin = self._format.begin
        at = text.find(begin)
        shown = text[:at] if at >= 0 else text[: len(text) - _overlap(text, begin)]
        shown = shown[: max(len(shown.rstrip()), len(shown) - SPACES_MAX)]
        if shown:
            self._blocks.add_text(shown)
            self._follows_call = False
        if at < 0:
            self._held = text[len(shown) :]
            return ""
        self._open(text[len(shown) : at + len(begin)])
        return text[at + len(begin) :]

    def _open(self, held: str) -> None:
        self._held, self._is_inside = held, True
        self._body, self._body_characters, self._tail = [], 0, ""

    def _read_call(self, text: str) -> str:
        """Read up to the end of the call; return the text after it."""
        tag = self._format.end or self._format.begin
        window = self._tail + text
        at = window.find(tag)
        if at < 0:
            self._body.append(text)
            self._body_characters += len(text)
            self._tail = window[max(0, len(window) - len(tag) + 1) :]
            if self._body_characters > CALL_CHARACTERS_MAX:
                self._blocks.add_text(self._held + "".join(self._body))
                self._held, self._is_inside, self._follows_call = "", False, False
            return ""
        # The tag may have begun in what is part of the body already.
        end = at + len(tag) if self._format.end else at
        body = "".join(self._body)
        body = body[: len(body) - len(self._tail)] + window[:at]
        self._body = [body]
        self._close(self._format.end)
        return window[end:]

    def _close(self, end: str) -> None:
        """End the calls: add them, or their text."""
        body = "".join(self._body)
        calls = self._format.read(body, self._schemas)
        if calls is None:
            self._blocks.add_text(self._held + body + end)
        for call in calls or ():
            if self._parallel or not self._calls:
                self._blocks.begin_call(call.name)
                self._blocks.add_arguments(call.arguments)
                self._blocks.end()
            self._calls += 1
        self._follows_call = calls is not None
        self._held, self._is_inside = "", False


class ForcedArguments:
    """An output that is the arguments of one tool."""

    def __init__(self, blocks: Blocks, name: str) -> None:
        self._blocks = blocks
        self._name = name

    def add(self, text: str) -> None:
        """Add the text as arguments."""
        if text:
            if not self._blocks.all:
                self._blocks.begin_call(self._name)
            self._blocks.add_arguments(text)

    def finish(self) -> None:
        """Add nothing: the call ends with the output."""


FORCED_NAME: Final = "name"
FORCED_ARGUMENTS: Final = "parameters"
"""The members of a call in an output that is a list of calls, in this order."""

_STRING: Final = r'(?P<value>"(?:[^"\\]|\\.)*")'
_HEADER: Final = re.compile(
    rf'\s*[\[,]\s*\{{\s*"{FORCED_NAME}"\s*:\s*{_STRING}\s*,\s*"{FORCED_ARGUMENTS}"\s*:\s*(?=\{{)'
)
_BETWEEN: Final = re.compile(r"\s*\}")
_END: Final = re.compile(r"\s*\]\s*")
_MARK: Final = re.compile(r'["\\{}\[\]]')


class ForcedCalls:
    """An output that is a JSON list of calls, as a structure enforces it."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._pending = ""
        self._object: _ObjectScan | None = None

    def add(self, text: str) -> None:
        """Add the calls and arguments that `text` has."""
        text, self._pending = self._pending + text, ""
        while text:
            if self._object is None:
                header = _HEADER.match(text)
                if header is None:
                    self._pending = text
                    break
                self._blocks.begin_call(json.loads(header["value"]))
                self._object = _ObjectScan()
                text = text[header.end() :]
            else:
                size = self._object.add(text)
                if size:
                    self._blocks.add_arguments(text[:size])
                text = text[size:]
                if self._object.is_complete:
                    between = _BETWEEN.match(text)
                    if between is None:
                        self._pending = text
                        break
                    self._blocks.end()
                    self._object = None
                    text = text[between.end() :]

    def finish(self) -> None:
        """Add text that is no call; a call that was cut off ends with the output."""
        is_over = not self._pending.strip() or _END.fullmatch(self._pending)
        if self._object is None and not is_over:
            self._blocks.add_text(self._pending)


class _ObjectScan:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def add(self, text: str) -> int:
        """Return how many characters belong to the object."""
        if self.is_complete:
            return 0
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            mark = _MARK.search(text, position)
            if mark is None:
                return len(text)
            position = mark.end()
            self._on_mark(mark[0])
            if self.is_complete:
                return position
        return len(text)

    def _on_mark(self, mark: str) -> None:
        if mark == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = mark == "\\"
        else:
            self._depth += (mark in "{[") - (mark in "}]")
            self.is_complete = self._depth == 0


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)

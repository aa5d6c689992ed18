"""Parsers: from the text of an output, as it arrives, to its parts.

The parts of an output do not depend on how its text is divided. A call that the model was free to
write is yielded when it is complete, because only then it is known to be one; what turns out to be
none is text. Calls that a structure enforces are yielded as they are generated.
"""

import json
import re
from typing import Final, Protocol

from loradock.gateway.tools.formats import Call, Format, Schemas
from loradock.gateway.tools.parts import ArgumentsAdded, CallBegun, CallEnded, Part, Text

CALL_CHARACTERS_MAX: Final = 1 << 20
"""Bound on the text that is held back until a call is complete."""

SPACES_MAX: Final = 64
"""Bound on the spaces before a tag that belong to it."""


class Parser(Protocol):
    """What reads the text of one output."""

    def add(self, text: str) -> list[Part]:
        """Return what `text` completes."""

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the output."""


class PlainText:
    """Text without calls."""

    def add(self, text: str) -> list[Part]:
        """Return the text."""
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        """Return nothing."""
        return []


class FreeCalls:
    """Text with calls in a format, each of one of the tools in `schemas`.

    `parallel`: all calls are yielded; otherwise the first one.
    """

    def __init__(self, of: Format, schemas: Schemas, *, parallel: bool = True) -> None:
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

    def add(self, text: str) -> list[Part]:
        """Return what `text` completes."""
        parts: list[Part] = []
        while text:
            text = self._read_call(text, parts) if self._is_inside else self._read_text(text, parts)
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back: a call without its end, or text."""
        parts: list[Part] = []
        if self._is_inside:
            self._close("", parts)
        rest, self._held = self._held, ""
        if rest and not (self._follows_call and rest.isspace()):
            parts.append(Text(rest))
        return parts

    def _read_text(self, text: str, parts: list[Part]) -> str:
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
            parts.append(Text(shown))
            self._follows_call = False
        if at < 0:
            self._held = text[len(shown) :]
            return ""
        self._open(text[len(shown) : at + len(begin)])
        return text[at + len(begin) :]

    def _open(self, held: str) -> None:
        self._held, self._is_inside = held, True
        self._body, self._body_characters, self._tail = [], 0, ""

    def _read_call(self, text: str, parts: list[Part]) -> str:
        """Read up to the end of the call; return the text after it."""
        tag = self._format.end or self._format.begin
        window = self._tail + text
        at = window.find(tag)
        if at < 0:
            self._body.append(text)
            self._body_characters += len(text)
            self._tail = window[max(0, len(window) - len(tag) + 1) :]
            if self._body_characters > CALL_CHARACTERS_MAX:
                parts.append(Text(self._held + "".join(self._body)))
                self._held, self._is_inside, self._follows_call = "", False, False
            return ""
        # The tag may have begun in what is part of the body already.
        end = at + len(tag) if self._format.end else at
        body = "".join(self._body)
        body = body[: len(body) - len(self._tail)] + window[:at]
        self._body = [body]
        self._close(self._format.end, parts)
        return window[end:]

    def _close(self, end: str, parts: list[Part]) -> None:
        """End the calls: yield them, or their text."""
        body = "".join(self._body)
        calls = self._format.read(body, self._schemas)
        if calls is None:
            parts.append(Text(self._held + body + end))
        for call in calls or ():
            if self._parallel or not self._calls:
                parts += _whole(call)
            self._calls += 1
        self._follows_call = calls is not None
        self._held, self._is_inside = "", False


def _whole(call: Call) -> list[Part]:
    return [CallBegun(call.name), ArgumentsAdded(call.arguments), CallEnded()]


class ForcedArguments:
    """An output that is the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def add(self, text: str) -> list[Part]:
        """Return the text as arguments."""
        if not text:
            return []
        begun: list[Part] = [] if self._has_begun else [CallBegun(self._name)]
        self._has_begun = True
        return [*begun, ArgumentsAdded(text)]

    def finish(self) -> list[Part]:
        """Return the end of the call."""
        return [CallEnded()] if self._has_begun else []


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

    def __init__(self) -> None:
        self._pending = ""
        self._object: _ObjectScan | None = None

    def add(self, text: str) -> list[Part]:
        """Return the calls and arguments that `text` adds."""
        parts: list[Part] = []
        text, self._pending = self._pending + text, ""
        while text:
            if self._object is None:
                header = _HEADER.match(text)
                if header is None:
                    self._pending = text
                    break
                parts.append(CallBegun(json.loads(header["value"])))
                self._object = _ObjectScan()
                text = text[header.end() :]
            else:
                size = self._object.add(text)
                if size:
                    parts.append(ArgumentsAdded(text[:size]))
                text = text[size:]
                if self._object.is_complete:
                    between = _BETWEEN.match(text)
                    if between is None:
                        self._pending = text
                        break
                    parts.append(CallEnded())
                    self._object = None
                    text = text[between.end() :]
        return parts

    def finish(self) -> list[Part]:
        """Return the end of a call that was cut off, or text that is no call."""
        if self._object is not None:
            return [CallEnded()]
        is_over = not self._pending.strip() or _END.fullmatch(self._pending)
        return [] if is_over else [Text(self._pending)]


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

"""The files of the page, and the documents made of them: one each, without other requests."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from loradock.messages.events import Published

_FILES: Final = Path(__file__).parent
_DRAWING: Final = ("tools.js", "world.js", "lanes.js")


class LiveEvent(Struct, frozen=True):
    """One event; `event` has its type in the field `type`."""

    seq: int
    time_ms: int
    event: dict[str, Any]


def live_event(published: Published) -> LiveEvent:
    """Return one event as readers see it."""
    event = published.event
    fields = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
    return LiveEvent(published.seq, published.time_ns // 1_000_000, fields)


def page() -> str:
    """Return the page of a gateway."""
    scripts = ("vendor/uplot.js", *_DRAWING, "rates.js", "panels.js", "main.js")
    return _document("index.html", ("vendor/uplot.css", "style.css"), scripts)


def timeline(events: Iterable[Published]) -> str:
    """Return a document that draws events, oldest first."""
    # A JSON text in a script element must not end it.
    data = msgspec.json.encode([*map(live_event, events)]).decode().replace("<", "\\u003c")
    text = _document("timeline.html", ("style.css",), (*_DRAWING, "timeline.js"))
    return text.replace("<!-- events -->", data)


def _document(name: str, styles: tuple[str, ...], scripts: tuple[str, ...]) -> str:
    text = (_FILES / name).read_text()
    for mark, tag, files in (("style", "style", styles), ("script", "script", scripts)):
        joined = "".join((_FILES / file).read_text() for file in files)
        text = text.replace(f"<!-- {mark} -->", f"<{tag}>\n{joined}</{tag}>")
    return text

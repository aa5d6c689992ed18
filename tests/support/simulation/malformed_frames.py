"""Malformed requests, each of which has to be answered with `L012`.

Each violates the format in one place and would be valid without that.
"""

from loradock.messages import reports as rp
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import MultimodalPrompt, Sampling
from loradock.messages.wire import FRAME_BYTES_MAX, REPLIES, REPORTS, REQUESTS

NAMES = ("..", "a..b", ".", "", "a/b", "/etc", "a\n", "a\0", "a b", "ä", "x" * 129)


HEAD_BYTES = 32


def _frame(request: rq.Request) -> bytes:
    return REQUESTS.encode((request,))


def _nested(depth: int) -> bytes:
    return _frame(rq.ShowStatus("x"))[:HEAD_BYTES] + b"\x91" * depth


FRAMES: dict[str, tuple[bytes, ...]] = {
    "nothing": (b"",),
    "one byte": (b"L",),
    "a header alone": (_frame(rq.ShowStatus("x"))[:HEAD_BYTES],),
    "half a header": (_frame(rq.ShowStatus("x"))[:11],),
    "half a body": (_frame(rq.LoadAdapter("x", "caesar"))[:-4],),
    "a byte too much": (_frame(rq.ShowStatus("x")) + b"\0",),
    "another version": (b"LD\x63Q" + _frame(rq.ShowStatus("x"))[4:],),
    "another channel": (REPORTS.encode(rp.WeightsLoaded(1)),),
    "a reply": (REPLIES.encode((rq.Refused("x", ErrorCode.CONFLICT, "x"),)),),
    "deep nesting": (_nested(500_000),),
    "two frames": (_frame(rq.ShowStatus("x")), _frame(rq.ShowStatus("y"))),
    "an empty frame first": (b"", _frame(rq.ShowStatus("x"))),
    "two megabytes of prompt": (_frame(rq.Generate("x", None, "p" * (2 << 20))),),
    "two megabytes of nothing": (bytes(2 * FRAME_BYTES_MAX),),
    "two megabytes of an image to embed": (
        _frame(rq.Embed("x", None, (MultimodalPrompt("i", (bytes(2 << 20),)),))),
    ),
    "an image to classify": (_frame(rq.Classify("x", None, (MultimodalPrompt("i", (b"x",)),))),),
    "more images than may be": (
        _frame(rq.Generate("x", None, MultimodalPrompt("i", (b"x",) * 17))),
    ),
    "an id with a newline": (_frame(rq.ShowStatus("a\nb")),),
    "an id that is too long": (_frame(rq.ShowStatus("x" * 65)),),
    "an endless timeout": (_frame(rq.StageAdapter("x", "caesar", "", 2**40)),),
    "an empty batch": (_frame(rq.ActivateBatch("x", ())),),
    "a negative place": (_frame(rq.FetchEvents("x", -1)),),
    "no temperature": (_frame(rq.Generate("x", None, "p", Sampling(temperature=float("nan")))),),
    **{f"a name {name[:4]!r}": (_frame(rq.LoadAdapter("x", name, "caesar")),) for name in NAMES},
}

WITHOUT_ID = (
    *("nothing", "one byte", "a header alone", "half a header", "another version"),
    *("another channel", "a reply", "deep nesting", "two frames", "an empty frame first"),
    *("two megabytes of nothing", "an id with a newline", "an id that is too long"),
)
"""Frames whose request's id can't be read; the others are refused under the id `x`."""

"""Malformed requests, each of which has to be answered with `L012`.

Each violates the format in one place and would be valid without that.
"""

from messages import reports as rp
from messages import requests as rq
from messages.errors import ErrorCode
from messages.wire import FRAME_BYTES_MAX, REPLIES, REPORTS, REQUESTS

NAMES = ("..", "a..b", ".", "", "a/b", "/etc", "a\n", "a\0", "a b", "ä", "x" * 129)


def _nested(depth: int) -> bytes:
    return REQUESTS.encode(rq.ShowStatus("x"))[:20] + b"\x91" * depth


FRAMES: dict[str, tuple[bytes, ...]] = {
    "nothing": (b"",),
    "one byte": (b"L",),
    "a header alone": (REQUESTS.encode(rq.ShowStatus("x"))[:20],),
    "half a header": (REQUESTS.encode(rq.ShowStatus("x"))[:11],),
    "half a body": (REQUESTS.encode(rq.LoadAdapter("x", "caesar"))[:-4],),
    "a byte too much": (REQUESTS.encode(rq.ShowStatus("x")) + b"\0",),
    "another version": (b"LD\x63Q" + REQUESTS.encode(rq.ShowStatus("x"))[4:],),
    "another channel": (REPORTS.encode(rp.WeightsLoaded(1)),),
    "a reply": (REPLIES.encode(rq.Refused("x", ErrorCode.CONFLICT, "x")),),
    "deep nesting": (_nested(500_000),),
    "two frames": (REQUESTS.encode(rq.ShowStatus("x")), REQUESTS.encode(rq.ShowStatus("y"))),
    "an empty frame first": (b"", REQUESTS.encode(rq.ShowStatus("x"))),
    "two megabytes of prompt": (REQUESTS.encode(rq.Generate("x", None, "p" * (2 << 20))),),
    "two megabytes of nothing": (bytes(2 * FRAME_BYTES_MAX),),
    "two megabytes of an image to embed": (
        REQUESTS.encode(rq.Embed("x", None, (rq.IllustratedPrompt("i", (bytes(2 << 20),)),))),
    ),
    "an image to classify": (
        REQUESTS.encode(rq.Classify("x", None, (rq.IllustratedPrompt("i", (b"x",)),))),
    ),
    "more images than may be": (
        REQUESTS.encode(rq.Generate("x", None, rq.IllustratedPrompt("i", (b"x",) * 17))),
    ),
    "an id with a newline": (REQUESTS.encode(rq.ShowStatus("a\nb")),),
    "an id that is too long": (REQUESTS.encode(rq.ShowStatus("x" * 65)),),
    "an endless timeout": (REQUESTS.encode(rq.StageAdapter("x", "caesar", "", 2**40)),),
    "an empty batch": (REQUESTS.encode(rq.ActivateBatch("x", ())),),
    "a negative place": (REQUESTS.encode(rq.FetchEvents("x", -1)),),
    "no temperature": (
        REQUESTS.encode(rq.Generate("x", None, "p", rq.Sampling(temperature=float("nan")))),
    ),
    **{
        f"a name {name[:4]!r}": (REQUESTS.encode(rq.LoadAdapter("x", name, "caesar")),)
        for name in NAMES
    },
}

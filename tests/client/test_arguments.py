"""Arguments that are not allowed are named in words, before a frame is sent."""

import re

import pytest

from loradock.client.calls import TIMING
from loradock.client.session import Session
from loradock.messages import control
from loradock.messages import requests as rq
from loradock.messages.errors import Malformed
from loradock.messages.prompts import Sampling
from loradock.messages.wire import FRAME_BYTES_MAX

NAME = "use 1 to 128 of the characters A-Z a-z 0-9 . _ - and no two dots in a row"


def generate(**sampling):
    return rq.Generate("", None, "p", Sampling(**sampling))


CASES = [
    (rq.LoadAdapter("", "with space"), f"'with space' is not a valid adapter name: {NAME}"),
    *(
        (rq.LoadAdapter("", name), f"{name!r} is not a valid adapter name: {NAME}")
        for name in ("a\n", "..", "a..b", "", "x" * 129)
    ),
    (rq.ActivateBatch("", ("a", "b c")), f"'b c' is not a valid adapter name: {NAME}"),
    (rq.LoadAdapter("", 5), "adapter must be a string, got 5"),
    (rq.LoadAdapter("", "a", "x" * 5000), "path must have at most 4096 characters, got 5000"),
    (rq.ActivateBatch("", ()), "adapters must have at least 1 value, got 0"),
    (rq.Embed("", None, (object(),)), "one of texts must be a string or a list, got <object"),
    (rq.Embed("", None, ("x",) * 2049), "texts must have at most 2048 values, got 2049"),
    (rq.Generate("", None, "x" * FRAME_BYTES_MAX), "prompt must have at most "),
    (rq.Generate("", None, "lone \ud800"), "'utf-8' codec can't encode"),
    (generate(seed=2**70), "seed must be at least "),
    (rq.CancelGeneration("", ""), "'' is not a valid request id: use 1 to 96 characters"),
    (rq.Embed("", None, ()), "texts must have at least 1 value, got 0"),
    (generate(top_p=0.0), "top_p must be above 0 and at most 1, got 0.0"),
    (generate(temperature=-1.0), "temperature must be at least 0 and at most 100, got -1.0"),
    (generate(max_tokens=2.5), "max_tokens must be an integer, got 2.5"),
    (generate(seed="x"), "seed must be an integer or None, got 'x'"),
    (generate(stop=("",)), "one of stop must have at least 1 character, got 0"),
    (generate(stop=("x",) * 17), "stop must have at most 16 values, got 17"),
    (
        generate(logit_bias=((1, 200.0),)),
        "one of logit_bias must be at least -100 and at most 100, got 200.0",
    ),
    (
        rq.Generate("", None, (-1,)),
        "one of prompt must be at least 0 and at most 2147483647, got -1",
    ),
    (
        generate(max_tokens=2_000_000),
        "max_tokens must be at least 0 and at most 1000000, got 2000000",
    ),
    (
        generate(repetition_penalty=0.0),
        "repetition_penalty must be at least 0.01 and at most 100, got 0.0",
    ),
    (
        rq.Generate("", None, None),
        "prompt must be a string or a list or a prompt with images, got None",
    ),
    (control.CancelRequest("", "a b"), "'a b' is not a valid request id: use 1 to 96 characters"),
]


@pytest.mark.parametrize(("request_", "text"), CASES, ids=lambda value: str(value)[:40])
def test_a_wrong_argument_is_named_with_what_is_allowed(request_, text):
    session = Session(b"t" * 12, TIMING)
    with pytest.raises(Malformed) as caught:
        session.begin(request_, 0.0)
    message = caught.value.message
    assert message.startswith(text)
    assert not re.search(r"\$\[|regex|`|\\Z", message.replace("`loradock requests`", ""))
    assert len(session) == 0
    assert session.due(1.0) == []


def test_allowed_arguments_are_sent():
    session = Session(b"t" * 12, TIMING)
    session.begin(rq.Generate("", None, (1, 2), Sampling(seed=3, logit_bias=((1, 2),))), 0.0)
    session.begin(rq.ActivateBatch("", ("a", "b")), 0.0)
    assert len(session.due(1.0)) == 1

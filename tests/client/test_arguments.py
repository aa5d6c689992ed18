"""Arguments that are not allowed are named in words, before a frame is sent."""

import re

import pytest

from loradock.client.calls import TIMING
from loradock.client.errors import Malformed
from loradock.client.session import Session
from loradock.messages import control
from loradock.messages import requests as rq
from loradock.messages.prompts import Sampling

NAME = "use 1 to 128 of the characters A-Z a-z 0-9 . _ - and no two dots in a row"


def generate(**sampling):
    return rq.Generate("", None, "p", Sampling(**sampling))


CASES = [
    (rq.LoadAdapter("", "with space"), f"'with space' is not a valid adapter name: {NAME}"),
    (rq.LoadAdapter("", "a\n"), f"'a\\n' is not a valid adapter name: {NAME}"),
    (rq.ActivateBatch("", ("a", "b c")), f"'b c' is not a valid adapter name: {NAME}"),
    (rq.LoadAdapter("", 5), "adapter is 5; a text is needed"),
    (rq.LoadAdapter("", "a", "x" * 5000), "path has 5000 characters; at most 4096 are allowed"),
    (rq.ActivateBatch("", ()), "adapters is empty; at least 1 value is needed"),
    (rq.Embed("", None, ()), "texts is empty; at least 1 value is needed"),
    (generate(top_p=0.0), "top_p is 0.0; it has to be above 0 and at most 1"),
    (generate(temperature=-1.0), "temperature is -1.0; it may be from 0 to 100"),
    (generate(max_tokens=2.5), "max_tokens is 2.5; a whole number is needed"),
    (generate(seed="x"), "seed is 'x'; a whole number or None is needed"),
    (generate(stop=("",)), "one of stop is empty; at least 1 character is needed"),
    (generate(stop=("x",) * 17), "stop has 17 values; at most 16 are allowed"),
    (generate(logit_bias=((1, 200.0),)), "one of logit_bias is 200.0; it may be from -100 to 100"),
    (rq.Generate("", None, (-1,)), "one of prompt is -1; it may be from 0 to 2147483647"),
    (generate(max_tokens=2_000_000), "max_tokens is 2000000; it may be from 0 to 1000000"),
    (generate(repetition_penalty=0.0), "repetition_penalty is 0.0; it may be from 0.01 to 100"),
    (rq.Generate("", None, None), "prompt is None; a text or a list or a prompt with images"),
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

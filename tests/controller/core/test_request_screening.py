"""Screening: what is known of a request by its id and its body, without changing anything.

That screening refuses what handling would is checked for every input of every history by
`tests/support/simulation/deployment.py`.
"""

from loradock.controller.core.actions import SendReply
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.controller.core.request_handlers import Pending
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode


def test_a_request_is_known_by_its_id_and_its_body() -> None:
    controller = Controller(Limits(requests_max=1), checked=True)
    load, cancel = rq.LoadAdapter("c:load", "a"), rq.CancelGeneration("c:cancel", "c:x")
    assert controller.screen(load, 1) is None
    controller.handle(load, 1, 1)
    controller.handle(cancel, 1, 2)
    digest = controller.digest()
    assert controller.screen(load, 1) is Pending.PENDING
    assert controller.screen(cancel, 2) == rq.CancelDone("c:cancel", "c:x", False)
    refusals = []
    for request, body in ((load, 2), (cancel, 1)):
        refused = controller.screen(request, body)
        assert isinstance(refused, rq.Refused)
        assert refused.code is ErrorCode.CONFLICT
        refusals.append((request, body, refused))
    overloaded = controller.screen(rq.LoadAdapter("c:new", "b"), 3)
    assert isinstance(overloaded, rq.Refused)
    assert overloaded.code is ErrorCode.OVERLOADED
    assert overloaded.retry_after_ms > 0
    assert controller.digest() == digest
    for request, body, refused in refusals:
        assert controller.handle(request, 1, body) == [SendReply(refused)]
        # The first request's answer and place are as before.
        assert controller.screen(load, 1) is Pending.PENDING
        assert controller.screen(cancel, 2) == rq.CancelDone("c:cancel", "c:x", False)


def test_the_body_of_a_request_is_kept_until_its_answer_is_dropped() -> None:
    controller = Controller(Limits(answers_per_client_max=2), checked=True)
    for number in range(4):
        controller.handle(rq.CancelGeneration(f"c:{number}", "c:x"), 1, number)
    known = [controller.screen(rq.CancelGeneration(f"c:{n}", "c:x"), n) for n in range(4)]
    assert [reply is not None for reply in known] == [False, False, True, True]
    # Another client's answers are in another window.
    for number in range(9):
        controller.handle(rq.CancelGeneration(f"d:{number}", "d:x"), 1, number)
    assert controller.screen(rq.CancelGeneration("c:3", "c:x"), 3) == known[3]

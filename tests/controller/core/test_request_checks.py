"""Checks: what is known of a request before it is handled, without changing anything.

That a check refuses what handling would, and that an earlier check leads to the same state as one
during the handling, is verified for every input of every history by
`tests/support/simulation/deployment.py`.
"""

from loradock.controller.core.actions import SendReply
from loradock.controller.core.context import Checked
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.controller.core.requests import Pending
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode


def test_a_request_is_known_by_its_id_and_its_body() -> None:
    controller = Controller(Limits(requests_max=1), checked=True)
    load, cancel = rq.LoadAdapter("c:load", "a"), rq.CancelGeneration("c:cancel", "c:x")
    assert isinstance(controller.check(load, 1), Checked)
    controller.handle(load, 1, 1)
    controller.handle(cancel, 1, 2)
    digest = controller.digest()
    assert controller.check(load, 1) is Pending.PENDING
    assert controller.check(cancel, 2) == rq.CancelDone("c:cancel", "c:x", False)
    refusals = []
    for request, body in ((load, 2), (cancel, 1)):
        refused = controller.check(request, body)
        assert isinstance(refused, rq.Refused)
        assert refused.code is ErrorCode.CONFLICT
        refusals.append((request, body, refused))
    overloaded = controller.check(rq.LoadAdapter("c:new", "b"), 3)
    assert isinstance(overloaded, rq.Refused)
    assert overloaded.code is ErrorCode.OVERLOADED
    assert overloaded.retry_after_ms > 0
    assert controller.digest() == digest
    for request, body, refused in refusals:
        assert controller.handle(request, 1, body) == [SendReply(refused)]
        # The first request's answer and place are as before.
        assert controller.check(load, 1) is Pending.PENDING
        assert controller.check(cancel, 2) == rq.CancelDone("c:cancel", "c:x", False)


def test_the_body_of_a_request_is_kept_until_its_answer_is_dropped() -> None:
    controller = Controller(Limits(answers_per_client_max=2), checked=True)
    for number in range(4):
        controller.handle(rq.CancelGeneration(f"c:{number}", "c:x"), 1, number)
    known = [controller.check(rq.CancelGeneration(f"c:{n}", "c:x"), n) for n in range(4)]
    assert [not isinstance(reply, Checked) for reply in known] == [False, False, True, True]
    # Another client's answers are in another window.
    for number in range(9):
        controller.handle(rq.CancelGeneration(f"d:{number}", "d:x"), 1, number)
    assert controller.check(rq.CancelGeneration("c:3", "c:x"), 3) == known[3]


def test_a_check_counts_for_the_next_input_alone() -> None:
    controller = Controller(Limits(), checked=True)
    controller.handle(rq.LoadAdapter("c:load", "a"), 1)
    remove = rq.RemoveAdapter("c:remove", "a", force=True)
    checked = controller.check(remove, 2)
    assert isinstance(checked, Checked)
    controller.handle(rq.RemoveAdapter("d:remove", "a", force=True), 2)
    (reply,) = controller.handle(remove, 3, 2, checked=checked)
    assert isinstance(reply, SendReply)
    assert isinstance(reply.message, rq.Refused)
    assert reply.message.code is ErrorCode.UNKNOWN_ADAPTER


def test_a_check_does_not_count_under_other_settings() -> None:
    controller = Controller(Limits(known_adapters_max=9), checked=True)
    load = rq.LoadAdapter("c:load", "a")
    controller.handle(rq.LoadAdapter("c:first", "b"), 1)
    checked = controller.check(load, 1)
    assert isinstance(checked, Checked)
    controller.reconfigure(Limits(known_adapters_max=1), "lru")
    (reply,) = controller.handle(load, 1, 1, checked=checked)
    assert isinstance(reply, SendReply)
    assert isinstance(reply.message, rq.Refused)
    assert reply.message.code is ErrorCode.NO_ROOM

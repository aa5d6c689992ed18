"""Tests of `Session`: each call is settled once, by the answer to its request."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.client.calls import NO_ID
from loradock.client.session import Session, answer_of
from loradock.messages import requests as rq
from loradock.messages.errors import (
    ERRORS,
    MEANINGS,
    AdapterNotFound,
    EngineGone,
    ErrorCode,
    LoradockError,
    Malformed,
    Overloaded,
)
from loradock.messages.prompts import MultimodalPrompt
from loradock.messages.wire import BATCH_MAX, REPLIES, REQUESTS
from tests.support.simulation.client_examples import TIMING, done, load, reply, sent, session


def all_subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from all_subclasses(one)


def test_every_code_has_one_error_and_every_error_one_code():
    assert set(ERRORS) == set(ErrorCode)
    with_codes = {one for one in all_subclasses(LoradockError) if "code" in vars(one)}
    assert set(ERRORS.values()) == with_codes
    for code, error in ERRORS.items():
        raised = rq.Refused("r1", code, "what was found").error()
        assert type(raised) is error
        assert (raised.code, raised.message, raised.request_id) == (code, "what was found", "r1")
        assert raised.retryable == MEANINGS[code].retryable
        assert str(raised) == f"{code} {MEANINGS[code].summary}: what was found"


def test_the_same_frame_is_sent_at_growing_intervals_until_the_deadline():
    client = session()
    call = load(client, now=100.0)
    times, frames = [], []
    while not call.settled:
        now = client.wake_at()
        for frame in client.due(now):
            times.append(now - 100.0)
            frames.append(frame)
    assert times == [0.0, 0.5, 1.5, 3.5, 7.5]
    assert len(set(frames)) == 1
    assert now == 100.0 + 10.0 + TIMING.slack_s
    assert isinstance(call.outcome, EngineGone)
    assert call.outcome.request_id == call.request_id
    assert len(client) == 0
    assert client.wake_at() == math.inf
    with pytest.raises(EngineGone, match="no answer within 10 s"):
        answer_of(call, rq.AdapterDone)


def test_silence_is_explained():
    client = Session(b"c0ffeec0ffee", TIMING, silence=lambda: "no server there")
    call = load(client, now=100.0)
    client.due(call.deadline)
    with pytest.raises(EngineGone, match=r"no answer within 10 s: no server there"):
        answer_of(call, rq.AdapterDone)


def test_ids_are_never_used_twice_and_fit_the_wire():
    client = session()
    ids = {load(client).request_id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(request_id) <= 64 for request_id in ids)


def test_the_time_limit_is_part_of_requests_that_have_one():
    client = session()
    load(client, timeout_s=0.0301)
    client.begin(rq.ShowStatus(NO_ID), 0.0, 3.0)
    (first, second) = sent(client.due(0.0))
    assert first.timeout_ms == 31
    assert not hasattr(second, "timeout_ms")


def test_an_answer_settles_its_call_and_a_second_one_is_ignored():
    client = session()
    first, second = load(client), load(client)
    client.due(0.0)
    client.receive(reply(done(second)), 0.1)
    assert second.settled
    assert not first.settled
    client.receive(reply(rq.Refused(second.request_id, ErrorCode.CONFLICT, "late")), 0.2)
    assert answer_of(second, rq.AdapterDone) == done(second)
    client.receive(reply(rq.Refused(first.request_id, ErrorCode.NOT_FOUND, "gone")), 0.2)
    with pytest.raises(AdapterNotFound, match=r"L002 .*: gone"):
        answer_of(first, rq.AdapterDone)


@given(st.binary(max_size=40))
def test_malformed_frames_are_ignored_and_reported_at_the_deadline(data):
    client = session()
    call = load(client)
    client.receive(data, 0.0)
    client.receive(REPLIES.prefix + data, 0.0)
    client.receive(reply(rq.Refused("", ErrorCode.MALFORMED, "not decoded")), 0.0)
    client.receive(reply(rq.CancelDone("another-client", "x", True)), 0.0)
    assert not call.settled
    client.due(1000.0)
    with pytest.raises(EngineGone, match="could not be used: not decoded"):
        answer_of(call, rq.AdapterDone)


def test_an_answer_of_another_type_is_an_error():
    client = session()
    call = load(client)
    client.receive(reply(rq.CancelDone(call.request_id, "x", True)), 0.0)
    with pytest.raises(
        Malformed, match="LoadAdapter must be answered by AdapterDone, got CancelDone"
    ):
        answer_of(call, rq.AdapterDone)


def test_after_a_restart_unanswered_frames_are_sent_at_once():
    client = session()
    waiting, other = load(client), load(client)
    client.due(0.0)
    client.receive(reply(done(other), epoch=3), 0.1)
    assert sent(client.due(0.1)) == [waiting.request], "it was sent to no known start"
    third = load(client, now=0.2)
    client.due(0.2)
    client.receive(reply(done(third), epoch=4), 0.3)
    assert sent(client.due(0.3)) == [waiting.request]


def refused(call):
    return rq.Refused(call.request_id, ErrorCode.CONFLICT, "in use")


def test_a_refusal_of_an_earlier_start_is_no_answer_and_other_answers_are():
    client = session()
    first, second = load(client), load(client)
    client.receive(reply(rq.Refused("", ErrorCode.CONFLICT, "an earlier start"), epoch=3), 0.0)
    assert sent(client.due(0.0)) == [first.request, second.request]
    client.receive(reply(refused(first), epoch=2), 0.1)
    client.receive(reply(done(second), epoch=2), 0.1)
    assert (first.settled, second.outcome) == (False, done(second))
    client.receive(reply(refused(first), epoch=3), 0.2)
    assert first.settled


def test_an_overloaded_fetch_is_sent_again_and_other_requests_fail():
    client = session()
    fetch = client.begin(rq.FetchEvents(NO_ID, 1), 0.0, 10.0)
    other = load(client)
    client.due(0.0)
    for call in (fetch, other):
        client.receive(reply(rq.Refused(call.request_id, ErrorCode.OVERLOADED, "later")), 0.1)
    assert isinstance(other.outcome, Overloaded)
    assert sent(client.due(0.5)) == [fetch.request]
    client.due(1000.0)
    with pytest.raises(Overloaded, match="later"):
        answer_of(fetch, rq.EventsFetched)


def test_requests_that_are_due_together_share_frames():
    client = session()
    calls = [load(client) for _ in range(BATCH_MAX + 3)]
    frames = client.due(0.0)
    assert [len(REQUESTS.decode(frame).message) for frame in frames] == [BATCH_MAX, 3]
    assert sent(frames) == [call.request for call in calls]
    client.receive(REPLIES.encode(tuple(done(call) for call in calls[:10]), 1), 0.1)
    assert [call.settled for call in calls] == [True] * 10 + [False] * (BATCH_MAX - 7)


def test_frames_are_shared_within_the_bound_on_their_bytes():
    client = session()
    texts = [100, 524_288, 520_000, 100, 990_000, 9]
    for size in texts:
        client.begin(rq.Generate(NO_ID, None, "x" * size), 0.0, 1.0)
    image = MultimodalPrompt("<image>", (bytes(2 << 20),))
    client.begin(rq.Generate(NO_ID, None, image), 0.0, 1.0)
    load(client)
    frames = client.due(0.0)
    assert [len(REQUESTS.decode(frame).message) for frame in frames] == [4, 2, 1, 1]
    assert [request.request_id for request in sent(frames)] == [str(n) for n in range(1, 9)]


def test_a_session_has_its_own_token_in_every_frame():
    first, second = session(), Session(b"another's t.", TIMING)
    for client, token in ((first, b"c0ffeec0ffee"), (second, b"another's t.")):
        load(client)
        [frame] = client.due(0.0)
        assert REQUESTS.decode_each(frame).token == token


def test_a_suggested_pause_is_kept():
    client = session()
    fetch = client.begin(rq.FetchEvents(NO_ID, 1), 0.0, 100.0)
    other = load(client)
    generation = client.begin(rq.Generate(NO_ID, None, "p"), 0.0, 60.0, 2)
    client.due(0.0)
    for call in (fetch, other, generation):
        refused = rq.Refused(call.request_id, ErrorCode.OVERLOADED, "later", 7000)
        client.receive(reply(refused), 0.1)
    assert other.outcome.retry_after_s == 7.0
    assert client.due(7.0) == []
    again = sorted(sent(client.due(7.2)), key=lambda request: request.request_id)
    assert again == [fetch.request, generation.request]


@pytest.mark.parametrize("timeout_s", [0, -1, 3601, math.nan, math.inf])
def test_a_time_limit_has_bounds(timeout_s):
    with pytest.raises(ValueError, match="timeout_s"):
        session().begin(rq.ShowStatus(NO_ID), 0.0, timeout_s)


def test_closing_settles_every_call_and_refuses_new_ones():
    client = session()
    call = load(client)
    client.close("the client was closed")
    assert isinstance(call.outcome, EngineGone)
    with pytest.raises(ValueError, match="closed"):
        load(client)

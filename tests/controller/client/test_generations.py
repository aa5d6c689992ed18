"""A generation's tokens come once and whole, whatever gets lost on their way."""

import pytest
from client_examples import (
    OUTPUT,
    TIMING,
    account,
    done,
    generate,
    load,
    reply,
    sent,
    session,
    stream,
    tokens_streamed,
)
from hypothesis import given
from hypothesis import strategies as st

from controller.client.errors import EngineGone, LoradockError, NoRoom
from controller.client.session import answer_of
from messages import requests as rq
from messages.errors import ErrorCode
from messages.wire import REQUESTS


def test_a_generation_ends_with_its_account_or_with_its_last_token():
    for account_first in (False, True):
        client = session()
        call = generate(client)
        steps = [lambda c=client, k=call: stream(c, k), lambda c=client, k=call: account(c, k)]
        for step in reversed(steps) if account_first else steps:
            assert not call.settled
            step()
        assert call.result == rq.GenerationDone(call.request_id, "upper", "length", 1, 3)
        assert call.text() == "one"


def test_lost_tokens_are_asked_for_until_they_are_overdue():
    client = session()
    call = generate(client)
    client.due(0.0)
    stream(client, call, now=1.0, end=1)
    account(client, call, now=2.0)
    stream(client, call, now=3.0, end=2)
    sendings = 0
    while not call.settled:
        now = client.wake_at()
        for _ in client.due(now):
            sendings += 1
            account(client, call, now)
    assert sendings > 2
    assert 0.0 <= now - (3.0 + TIMING.lost_tokens_s) <= TIMING.retry_s_max
    with pytest.raises(EngineGone, match=r"3 tokens and only 2 of them arrived.*engine.*is gone"):
        answer_of(call, rq.GenerationDone)
    assert call.text() == "on"


def test_lost_tokens_that_come_after_all_end_the_generation():
    client = session()
    call = generate(client)
    client.due(0.0)
    stream(client, call, end=1)
    account(client, call)
    assert len(client.due(client.wake_at())) == 1
    stream(client, call, now=1.0)
    assert call.result is not None
    assert call.text() == "one"


def test_a_hole_is_asked_for_soon_however_much_comes_after_it():
    client = session()
    call = generate(client)
    client.due(0.0)
    for now, start, end in ((10.0, 0, 1), (12.0, 1, 2)):
        stream(client, call, now, start, end)
    assert call.send_at == 12.0 + TIMING.retry_s_max
    assert client.due(12.0) == []
    for now in (13.0, 13.2, 13.4):
        client.receive(reply(tokens_streamed(call.request_id, 7, OUTPUT)), now)
    assert client.wake_at() == call.send_at == 13.0 + TIMING.retry_s_min
    assert client.due(13.5) == [call.frame]


def test_a_stream_is_waited_for_as_its_pace_makes_sense_of_it():
    for pause_s, patience_s in ((0.01, 0.5), (1.0, 4.0), (3.0, 5.0)):
        client = session()
        call = generate(client)
        client.due(0.0)
        stream(client, call, 1.0, 0, 1)
        assert call.send_at == 1.0 + TIMING.retry_s_min
        stream(client, call, 1.0 + pause_s, 1, 2)
        assert call.send_at == pytest.approx(1.0 + pause_s + patience_s)


def test_after_a_restart_the_account_is_believed_with_the_repeated_output_only():
    client = session()
    call = generate(client)
    client.due(0.0)
    stream(client, call)
    client.receive(reply(done(load(client)), epoch=2), 1.0)
    client.due(1.0)
    account(client, call, now=1.1)
    assert not call.settled
    whole = rq.TokensStreamed(call.request_id, 0, (1, 2, 3), "one...")
    client.receive(reply(whole, epoch=2), 1.2)
    assert call.result is not None
    assert call.text() == "one..."


def test_after_a_restart_the_account_is_believed_when_nothing_follows_it():
    client = session()
    call = generate(client)
    client.due(0.0)
    stream(client, call)
    client.receive(reply(done(load(client)), epoch=2), 1.0)
    account(client, call, now=1.1)
    while not call.settled:
        now = client.wake_at()
        client.due(now)
    assert now >= 1.1 + TIMING.lost_tokens_s
    assert call.result is not None
    assert call.text() == "one"


def refuse(client, call, code=ErrorCode.NO_ROOM):
    client.receive(reply(rq.Refused(call.request_id, code, "full")), 1.0)


def test_another_attempt_has_another_id_and_comes_later():
    client = session()
    call = generate(client, attempts=2)
    (first,) = client.due(0.0)
    stream(client, call, end=2)
    refuse(client, call)
    assert not call.settled
    assert client.due(1.0) == []
    (second,) = client.due(client.wake_at())
    assert sent([first])[0].request_id != sent([second])[0].request_id == call.request_id
    stream(client, call)
    account(client, call)
    assert call.text() == "one"
    assert len(client) == 0


def test_no_attempt_follows_what_can_not_help_or_was_handed_over_or_the_last_one():
    client = session()
    hopeless, handed, cancelled, last = (generate(client, attempts=2) for _ in range(4))
    client.due(0.0)
    refuse(client, hopeless, ErrorCode.UNKNOWN_ADAPTER)
    stream(client, handed, end=1)
    handed.pop()
    refuse(client, handed)
    client.begin_cancel(cancelled, 0.5)
    refuse(client, cancelled)
    refuse(client, last)
    client.due(client.wake_at())
    refuse(client, last)
    for call in (hopeless, handed, cancelled, last):
        assert isinstance(call.outcome, LoradockError)
    assert isinstance(last.outcome, NoRoom)


def test_cancelling_what_was_not_sent_ends_it_here():
    client = session()
    call = generate(client)
    assert client.begin_cancel(call, 0.0) is None
    assert call.result.finish_reason == "cancelled"
    assert client.due(0.0) == []
    running = generate(client)
    client.due(0.0)
    cancel = client.begin_cancel(running, 0.1)
    assert cancel.request.target == running.request_id
    assert sent(client.due(0.1)) == [cancel.request]


# A whole conversation over a network that loses, repeats and delays


class Controller:
    """Answers each id once, and then with what it answered first."""

    def __init__(self):
        self.answers = {}
        self.done = []

    def on_frame(self, frame):
        request = REQUESTS.decode(frame).message
        repeated = request.request_id in self.answers
        if not repeated:
            self.done.append(request)
            self.answers[request.request_id] = self.answer(request)
        final = self.answers[request.request_id]
        if not isinstance(final, rq.GenerationDone):
            return [final]
        size = 2 if repeated else 1
        chunks = [
            tokens_streamed(request.request_id, i, OUTPUT[i : i + size]) for i in range(0, 3, size)
        ]
        return [final, *chunks] if repeated else [*chunks, final]

    def answer(self, request):
        if isinstance(request, rq.Generate):
            return rq.GenerationDone(request.request_id, request.adapter, "length", 1, 3)
        return rq.AdapterDone(request.request_id, request.adapter, "cpu-cached")


def network(frames, fates):
    for frame in frames:
        yield from [frame] * {"keep": 1, "lose": 0, "repeat": 2}[next(fates, "keep")]


@given(st.lists(st.sampled_from(["keep", "lose", "repeat"]), max_size=30), st.integers(1, 4))
def test_whatever_gets_lost_each_request_is_done_once_and_answered_right(fates, count):
    client, controller, now = session(), Controller(), 0.0
    loads = [load(client, timeout_s=600.0) for _ in range(count)]
    generations = [generate(client) for _ in range(count)]
    fates = iter(fates)
    while len(client):
        now = max(now, client.wake_at())
        for frame in network(client.due(now), fates):
            for answer in network([reply(a) for a in controller.on_frame(frame)], fates):
                client.receive(answer, now)
    assert sorted(r.request_id for r in controller.done) == sorted(controller.answers)
    for call in loads:
        assert answer_of(call, rq.AdapterDone) == done(call)
    for call in generations:
        if call.result is None:
            # The account came and its tokens were lost three times over.
            assert "is gone" in call.outcome.message
            assert "one".startswith(call.text())
        else:
            assert call.text() == "one"

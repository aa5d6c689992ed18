"""Tests of `GenerationCall`: each token arrives once, regardless of lost frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.client.session import answer_of
from loradock.messages import requests as rq
from loradock.messages.errors import EngineGone, ErrorCode, LoradockError, NoRoom
from tests.support.simulation.client_examples import (
    OUTPUT,
    TIMING,
    done,
    finish,
    generate,
    load,
    reply,
    sent,
    session,
    stream,
    tokens_streamed,
)


def test_a_generation_ends_with_its_final_reply_or_with_its_last_token():
    for final_first in (False, True):
        client = session()
        call = generate(client)
        for receive in (finish, stream) if final_first else (stream, finish):
            assert not call.settled
            receive(client, call)
        assert call.result == rq.GenerationDone(call.request_id, "upper", "length", 1, 3)
        assert call.text() == "one"


def test_lost_tokens_are_requested_until_they_are_overdue():
    client = session()
    call = generate(client)
    client.due(0.0)
    stream(client, call, now=1.0, end=1)
    finish(client, call, now=2.0)
    stream(client, call, now=3.0, end=2)
    sendings = 0
    while not call.settled:
        now = client.wake_at()
        for _ in client.due(now):
            sendings += 1
            finish(client, call, now)
    assert sendings > 2
    assert 0.0 <= now - (3.0 + TIMING.lost_tokens_s) <= TIMING.retry_s_max
    with pytest.raises(EngineGone, match=r"3 tokens and only 2 of them arrived.*engine.*is gone"):
        answer_of(call, rq.GenerationDone)
    assert call.text() == "on"


def test_a_gap_is_requested_soon_also_if_chunks_follow_it():
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
    assert sent(client.due(13.5)) == [call.request]


def test_the_wait_for_tokens_grows_with_the_pauses_between_them():
    for pause_s, wait_s in ((0.01, 0.5), (1.0, 4.0), (3.0, 5.0)):
        client = session()
        call = generate(client)
        client.due(0.0)
        stream(client, call, 1.0, 0, 1)
        assert call.send_at == 1.0 + TIMING.retry_s_min
        stream(client, call, 1.0 + pause_s, 1, 2)
        assert call.send_at == pytest.approx(1.0 + pause_s + wait_s)


def test_after_a_restart_the_final_reply_counts_only_with_the_repeated_output():
    client = session()
    call = generate(client)
    client.due(0.0)
    stream(client, call)
    client.receive(reply(done(load(client)), epoch=2), 1.0)
    client.due(1.0)
    finish(client, call, now=1.1)
    assert not call.settled
    whole = rq.TokensStreamed(call.request_id, 0, (1, 2, 3), "one...")
    client.receive(reply(whole, epoch=2), 1.2)
    assert call.result is not None
    assert call.text() == "one..."


def test_after_a_restart_the_final_reply_counts_when_output_is_overdue():
    client = session()
    call = generate(client)
    client.due(0.0)
    stream(client, call)
    client.receive(reply(done(load(client)), epoch=2), 1.0)
    finish(client, call, now=1.1)
    while not call.settled:
        now = client.wake_at()
        client.due(now)
    assert now >= 1.1 + TIMING.lost_tokens_s
    assert call.result is not None
    assert call.text() == "one"


def refuse(client, call, code=ErrorCode.NO_ROOM):
    client.receive(reply(rq.Refused(call.request_id, code, "full")), 1.0)


def test_another_attempt_has_another_id_and_is_sent_later():
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
    finish(client, call)
    assert call.text() == "one"
    assert len(client) == 0


def test_no_attempt_follows_a_permanent_failure_or_delivered_output_or_the_last_one():
    client = session()
    permanent, delivered, cancelled, last = (generate(client, attempts=2) for _ in range(4))
    client.due(0.0)
    refuse(client, permanent, ErrorCode.UNKNOWN_ADAPTER)
    stream(client, delivered, end=1)
    delivered.pop()
    refuse(client, delivered)
    client.begin_cancel(cancelled, 0.5)
    refuse(client, cancelled)
    refuse(client, last)
    client.due(client.wake_at())
    refuse(client, last)
    for call in (permanent, delivered, cancelled, last):
        assert isinstance(call.outcome, LoradockError)
    assert isinstance(last.outcome, NoRoom)


def test_cancelling_an_unsent_generation_needs_no_request():
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


# Complete exchanges over a network that loses and repeats frames


class RepeatingController:
    """Executes each request once, and answers a repeated one with the first answer."""

    def __init__(self):
        self.answers = {}
        self.executed = []

    def on_frame(self, frame):
        return [answer for request in sent([frame]) for answer in self.on_request(request)]

    def on_request(self, request):
        repeated = request.request_id in self.answers
        if not repeated:
            self.executed.append(request)
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
def test_with_any_losses_each_request_is_executed_once_and_answered_correctly(fates, count):
    client, controller, now = session(), RepeatingController(), 0.0
    loads = [load(client, timeout_s=600.0) for _ in range(count)]
    generations = [generate(client) for _ in range(count)]
    fates = iter(fates)
    while len(client):
        now = max(now, client.wake_at())
        for frame in network(client.due(now), fates):
            for answer in network([reply(a) for a in controller.on_frame(frame)], fates):
                client.receive(answer, now)
    assert sorted(r.request_id for r in controller.executed) == sorted(controller.answers)
    for call in loads:
        assert answer_of(call, rq.AdapterDone) == done(call)
    for call in generations:
        if call.result is None:
            # The final reply arrived and its tokens were lost every time.
            assert "is gone" in call.outcome.message
            assert "one".startswith(call.text())
        else:
            assert call.text() == "one"

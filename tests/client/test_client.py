"""Tests of the blocking client: a controller that loses answers, restarts and falls silent."""

import threading

import pytest
import zmq
from msgspec import structs

from loradock.client import (
    Client,
    EngineGone,
    Gap,
    Malformed,
    NoRoom,
    UnknownAdapter,
)
from loradock.messages import requests as rq
from loradock.messages.addresses import endpoint
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling
from loradock.messages.wire import REPLIES, REQUESTS
from tests.support.simulation.client_examples import FAST, resumed
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.waiting import HANG_S

# Requests and their answers


def test_each_method_sends_its_request_and_returns_its_answer(client, controller):
    names = ("upper",)
    replies = [
        (client.load("upper", "a/b", replace=True), rq.LoadAdapter, rq.AdapterDone),
        (client.stage("upper", "a/b"), rq.StageAdapter, rq.AdapterDone),
        (client.activate("upper", "a/b"), rq.ActivateAdapter, rq.AdapterDone),
        (client.hold("upper", "a/b"), rq.HoldAdapter, rq.AdapterDone),
        (client.release("upper"), rq.ReleaseAdapter, rq.AdapterDone),
        (client.deactivate("upper"), rq.DeactivateAdapter, rq.AdapterDone),
        (client.evict("upper"), rq.EvictAdapter, rq.AdapterDone),
        (client.remove("upper", force=True), rq.RemoveAdapter, rq.AdapterDone),
        (client.activate_batch(names), rq.ActivateBatch, rq.BatchDone),
        (client.list(), rq.ListAdapters, rq.AdaptersListed),
        (client.show("upper"), rq.ShowAdapter, rq.AdapterShown),
        (client.status(), rq.ShowStatus, rq.StatusShown),
        (client.cancel("some-id"), rq.CancelGeneration, rq.CancelDone),
    ]
    received = {request.request_id: request for request in controller.received}
    for expected, request in zip(replies, received.values(), strict=True):
        reply, request_type, reply_type = expected
        assert type(request) is request_type
        assert type(reply) is reply_type
        assert reply.request_id == request.request_id
        assert getattr(request, "path", "a/b") == "a/b"
        assert getattr(request, "timeout_ms", HANG_S * 1000) == HANG_S * 1000
    assert controller.requests(rq.LoadAdapter)[0].replace
    assert controller.requests(rq.RemoveAdapter)[0].force


def test_a_refusal_is_raised_as_its_error(client):
    with pytest.raises(UnknownAdapter, match="no adapter is called 'nobody'") as raised:
        client.load("nobody")
    assert raised.value.code == ErrorCode.UNKNOWN_ADAPTER
    assert not raised.value.retryable
    with pytest.raises(Malformed):
        client.load("no such name!")


def test_a_request_whose_answer_is_lost_is_sent_again_and_gets_the_same_answer(client, controller):
    controller.lose = 2
    reply = client.load("upper")
    assert len(controller.repeated(rq.LoadAdapter)) >= 3
    (sent,) = controller.requests(rq.LoadAdapter)
    assert sent.request_id == reply.request_id


def test_a_controller_that_comes_later_is_waited_for(tmp_path):
    (tmp_path / "run").mkdir()
    stand_in = StandIn(tmp_path)
    timer = threading.Timer(0.2, stand_in.start)
    with Client(tmp_path, timing=FAST) as client:
        timer.start()
        assert client.status().epoch == 1
    stand_in.stop()


def test_a_call_survives_a_restart(client, controller):
    client.status()
    controller.answers[rq.LoadAdapter] = lambda request: None
    timer = threading.Timer(0.1, controller.restart)
    timer.start()

    def answer_after_the_restart(request):
        if controller.epoch == 1:
            return None
        return rq.AdapterDone(request.request_id, request.adapter, "cpu-cached")

    controller.answers[rq.LoadAdapter] = answer_after_the_restart
    assert client.load("upper").state == "cpu-cached"
    timer.join()
    assert controller.epoch == 2


def test_silence_ends_in_an_error_and_the_client_stays_usable(client, controller):
    controller.answers[rq.LoadAdapter] = lambda request: None
    with pytest.raises(EngineGone, match=r"no answer within 0\.2 s") as raised:
        client.load("upper", timeout_s=0.2)
    # An answer to the next request shows that the one before has arrived.
    assert client.show("upper").adapter.adapter == "upper"
    sent = controller.requests(rq.LoadAdapter)
    assert raised.value.request_id == sent[0].request_id
    assert sent[0].timeout_ms == 200


def test_a_directory_without_a_server_is_named_with_the_command_that_starts_one(tmp_path):
    (tmp_path / "run").mkdir()
    with (
        Client(tmp_path, timeout_s=0.05, timing=FAST) as client,
        pytest.raises(EngineGone, match=r"start one: loradock --dir .* serve"),
    ):
        client.status()


def test_a_directory_of_other_files_is_refused_when_the_client_is_made(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(EngineGone, match=r"start one: loradock --dir .* serve"):
        Client(tmp_path)


def test_malformed_frames_are_ignored(tmp_path):
    (tmp_path / "run").mkdir()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(endpoint(tmp_path, "requests.sock"))

        def answer():
            route, _ = router.recv_multipart()
            router.send_multipart([route, b"malformed"])
            router.send_multipart([route, b"two", b"parts"])
            # The client sends its frame again, because nothing of this answers it.
            route, frame = router.recv_multipart()
            [request] = REQUESTS.decode(frame).message
            request_id = request.request_id
            done = rq.AdapterDone(request_id, "upper", "cpu-cached")
            router.send_multipart([route, REPLIES.encode((done,), 1, 0)])

        thread = threading.Thread(target=answer)
        thread.start()
        with Client(tmp_path, timeout_s=HANG_S, timing=FAST) as client:
            assert client.load("upper").state == "cpu-cached"
        thread.join()


def test_a_closed_client_and_a_wrong_time_limit_are_refused(controller):
    client = Client(controller.directory)
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.status()
    with pytest.raises(ValueError, match="timeout_s"):
        Client(controller.directory, timeout_s=0)


# Generations


def test_tokens_arrive_as_chunks_and_the_result_at_the_end(client, controller):
    generation = client.generate("p", "upper", max_tokens=2, temperature=0.5, stop=("x",))
    chunks = list(generation)
    assert [chunk.offset for chunk in chunks] == [0, 1]
    assert [chunk.tokens for chunk in chunks] == [(1,), (2,)]
    assert generation.text() == "on"
    assert generation.result.output_tokens == 2
    (request,) = controller.requests(rq.Generate)
    assert request.sampling == Sampling(max_tokens=2, temperature=0.5, stop=("x",))
    assert (request.adapter, request.prompt, request.timeout_ms) == ("upper", "p", 600_000)
    assert request.request_id == generation.request_id


@pytest.mark.parametrize("done_first", [False, True])
@pytest.mark.parametrize("lost", [(0, 1), (1, 0), (2, 0), (0, 3), (1, 2)])
def test_lost_answers_and_chunks_change_nothing(client, controller, lost, done_first):
    controller.lose, controller.lose_chunks = lost
    controller.done_first = done_first
    generation = client.generate("p", "upper")
    assert [token for chunk in generation for token in chunk.tokens] == [1, 2, 3]
    assert generation.text() == "one"


def test_lost_output_is_an_error(controller):
    controller.lose_chunks = 1000
    timing = structs.replace(FAST, lost_tokens_s=0.3)
    with (
        Client(controller.directory, timeout_s=HANG_S, timing=timing) as client,
        pytest.raises(EngineGone, match="the engine that held the output is gone"),
    ):
        client.generate("p", "upper").text()
    assert len(controller.repeated(rq.Generate)) > 2


def test_two_generations_are_read_alternately(client):
    first, second = client.generate("p", "upper"), client.generate("q")
    texts = [(a.text, b.text) for a, b in zip(first, second, strict=True)]
    assert texts == [("o", "o"), ("n", "n"), ("e", "e")]
    assert first.result.adapter == "upper"
    assert second.result.adapter is None


def refuse_first(code, count):
    """Refuse the first `count` generations, then generate."""
    refused = set()

    def answer(request):
        if len(refused) < count:
            refused.add(request.request_id)
            return rq.Refused(request.request_id, code, "not now")
        return rq.GenerationDone(request.request_id, request.adapter, "length", 1, 3)

    return answer


def test_another_attempt_is_made_only_on_request(client, controller):
    controller.answers[rq.Generate] = refuse_first(ErrorCode.NO_ROOM, 2)
    with pytest.raises(NoRoom):
        client.generate("p", "upper").text()
    assert client.generate("p", "upper", attempts=2).text() == "one"
    assert len(controller.requests(rq.Generate)) == 3


def test_a_generation_is_cancelled_by_request_or_by_leaving_it(client, controller):
    controller.answers[rq.Generate] = lambda request: None
    with client.generate("p") as generation:
        assert generation.result is None
        assert generation.cancel()
    assert list(generation) == []
    with client.generate("p") as left:
        pass
    client.status()
    targets = [request.target for request in controller.requests(rq.CancelGeneration)]
    assert targets == [generation.request_id, generation.request_id, left.request_id]


# Events


def test_past_and_new_events_arrive_in_order(client, controller):
    controller.publish(*resumed(1, 2))
    with client.events(since=0) as stream:
        controller.publish(*resumed(3))
        assert [next(stream).seq for _ in range(3)] == [1, 2, 3]
        controller.publish(*resumed(4, 5))
        assert [next(stream).event.epoch for _ in range(2)] == [4, 5]
        assert stream.seq == 5
        assert stream.next_within(0.0) is None


def test_a_stream_without_since_starts_at_the_call(client, controller):
    controller.publish(*resumed(1, 2))
    with client.events() as stream:
        controller.publish(*resumed(3))
        assert next(stream).seq == 3


def test_without_follow_the_stream_ends_with_the_newest_event(client, controller):
    controller.publish(*resumed(*range(2000)))
    assert [item.seq for item in client.events(since=1, follow=False)] == list(range(2, 2001))
    assert list(client.events(follow=False)) == []


def test_lost_events_are_fetched_also_the_newest_and_after_a_restart(client, controller):
    with client.events(since=0) as stream:
        controller.publish(*resumed(1))
        assert next(stream).seq == 1
        controller.publish(*resumed(2, 3), silently=True)
        assert [next(stream).seq, next(stream).seq] == [2, 3]
        controller.restart()
        controller.publish(*resumed(4), silently=True)
        controller.publish(*resumed(5))
        assert [next(stream).seq, next(stream).seq] == [4, 5]


def test_events_older_than_the_log_are_a_gap(client, controller):
    controller.publish(*resumed(1, 2, 3, 4))
    controller.first_seq = 3
    items = list(client.events(since=1, follow=False))
    assert items[0] == Gap(expected=2, found=3)
    assert [item.seq for item in items[1:]] == [3, 4]


def test_events_that_are_not_kept_are_replaced_by_a_snapshot_on_request(client, controller):
    controller.publish(*resumed(1, 2, 3, 4))
    controller.first_seq = 3
    with client.events(since=1, follow=False, snapshot=True) as stream:
        [snapshot] = list(stream)
        assert stream.seq == 4
    assert (snapshot.expected, snapshot.seq) == (2, 4)
    assert {adapter.adapter for adapter in snapshot.adapters} == {"upper", "reverse"}
    assert [item.seq for item in client.events(since=2, follow=False, snapshot=True)] == [3, 4]


def list_in_pages(controller):
    """Let the controller list seven adapters in pages of three."""
    views = [view(f"a-{number}", adapter_id=number) for number in range(7)]

    def page(request):
        left = [v for v in views if (v.adapter, v.adapter_id) > (request.after, request.after_id)]
        return rq.AdaptersPage(request.request_id, tuple(left[:3]), 9 + len(left), len(left) > 3)

    controller.answers[rq.ListAdapters] = page
    return views


def test_a_long_snapshot_is_fetched_in_pages(client, controller):
    views = list_in_pages(controller)
    controller.publish(*resumed(1, 2, 3, 4))
    controller.answers[rq.FetchEvents] = lambda request: rq.SnapshotFetched(
        request.request_id, tuple(views[:3]), 4, True
    )
    [snapshot] = client.events(since=0, follow=False, snapshot=True)
    assert snapshot.adapters == tuple(views)
    # The number of the first page: all later changes follow it.
    assert (snapshot.expected, snapshot.seq) == (1, 4)


def test_a_long_list_is_fetched_in_pages_and_returned_as_one(client, controller):
    views = list_in_pages(controller)
    listed = client.list()
    assert listed.adapters == tuple(views)
    assert listed.request_id == controller.received[-1].request_id
    # The number of the first page: all later changes follow it.
    assert listed.events_seq == 16
    assert len(controller.requests(rq.ListAdapters)) == 3

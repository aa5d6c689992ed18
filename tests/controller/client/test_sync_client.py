"""The blocking client against a controller that loses answers, restarts and falls silent."""

import inspect
import threading

import pytest
import zmq

from controller.client import (
    AsyncClient,
    AsyncEventStream,
    AsyncGeneration,
    Client,
    EngineGone,
    EventStream,
    Gap,
    Generation,
    LoradockError,
    Malformed,
    NoRoom,
    Timing,
    UnknownAdapter,
)
from controller.client.sockets import (
    SOCKET_PATH_BYTES_MAX,
    events_endpoint,
    requests_endpoint,
    runtime_directory,
)
from messages import events as ev
from messages import requests as rq
from messages.errors import ErrorCode
from tests.support.simulation.standin_controller import StandIn

FAST = Timing(retry_s_min=0.05, retry_s_max=0.2, slack_s=0.1, lost_tokens_s=0.3)


@pytest.fixture
def controller(tmp_path):
    with StandIn(tmp_path) as stand_in:
        yield stand_in


@pytest.fixture
def client(controller):
    with Client(controller.directory, timeout_s=20.0, timing=FAST) as one:
        yield one


def resumed(*epochs):
    return [ev.ControllerResumed(epoch) for epoch in epochs]


# Where the controller is


def test_the_directory_is_the_argument_or_the_variable_or_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("LORADOCK_DIR", raising=False)
    assert str(runtime_directory()) == ".loradock"
    monkeypatch.setenv("LORADOCK_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path
    assert str(runtime_directory("elsewhere")) == "elsewhere"
    assert requests_endpoint(tmp_path) == f"ipc://{tmp_path}/run/requests.sock"
    assert events_endpoint(tmp_path) == f"ipc://{tmp_path}/run/events.sock"


def test_a_socket_path_that_unix_can_not_hold_is_told(tmp_path):
    rest = len("/run/requests.sock")
    longest = "d" * (SOCKET_PATH_BYTES_MAX - rest)
    assert requests_endpoint(runtime_directory(longest))
    with pytest.raises(ValueError, match=r"has 108 bytes and Unix allows 107.*shorter"):
        Client(longest + "d")


# Requests and their answers


def test_each_method_sends_its_request_and_returns_its_answer(client, controller):
    names = ("upper",)
    asked = [
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
    for (reply, request_type, reply_type), request in zip(asked, controller.received, strict=True):
        assert type(request) is request_type
        assert type(reply) is reply_type
        assert reply.request_id == request.request_id
        assert getattr(request, "path", "a/b") == "a/b"
        assert getattr(request, "timeout_ms", 20_000) == 20_000
    assert controller.requests(rq.LoadAdapter)[0].replace
    assert controller.requests(rq.RemoveAdapter)[0].force


def test_both_clients_have_the_same_methods():
    for blocking, asynchronous in (
        (Client, AsyncClient),
        (Generation, AsyncGeneration),
        (EventStream, AsyncEventStream),
    ):
        for name, method in vars(blocking).items():
            if name.startswith("_") or isinstance(method, property):
                continue
            twin = inspect.signature(getattr(asynchronous, name)).parameters
            assert inspect.signature(method).parameters == twin, name


def test_a_refusal_is_raised_as_its_error(client):
    with pytest.raises(UnknownAdapter, match="no adapter is called 'nobody'") as raised:
        client.load("nobody")
    assert raised.value.code == ErrorCode.UNKNOWN_ADAPTER
    assert not raised.value.retryable
    with pytest.raises(Malformed):
        client.load("no such name!")


def test_a_lost_answer_is_asked_for_again_and_is_the_same(client, controller):
    controller.lose = 2
    reply = client.load("upper")
    asked = controller.requests(rq.LoadAdapter)
    assert len(asked) == 3
    assert {request.request_id for request in asked} == {reply.request_id}


def test_a_controller_that_comes_later_is_waited_for(tmp_path):
    stand_in = StandIn(tmp_path)
    timer = threading.Timer(0.2, stand_in.start)
    with Client(tmp_path, timing=FAST) as client:
        timer.start()
        assert client.status().epoch == 1
    stand_in.stop()


def test_a_restart_in_the_middle_of_a_call_is_not_noticed(client, controller):
    client.status()
    controller.answers[rq.LoadAdapter] = lambda request: None
    timer = threading.Timer(0.1, controller.restart)
    timer.start()

    def answer_in_the_next_life(request):
        if controller.epoch == 1:
            return None
        return rq.AdapterDone(request.request_id, request.adapter, "cpu-cached")

    controller.answers[rq.LoadAdapter] = answer_in_the_next_life
    assert client.load("upper").state == "cpu-cached"
    timer.join()
    assert controller.epoch == 2


def test_silence_ends_in_an_error_and_the_client_stays_usable(client, controller):
    controller.answers[rq.LoadAdapter] = lambda request: None
    with pytest.raises(EngineGone, match=r"no answer within 0\.2 s") as raised:
        client.load("upper", timeout_s=0.2)
    asked = controller.requests(rq.LoadAdapter)
    assert raised.value.request_id == asked[0].request_id
    assert asked[0].timeout_ms == 200
    assert client.show("upper").adapter.adapter == "upper"


def test_garbage_on_the_line_is_ignored(tmp_path):
    (tmp_path / "run").mkdir()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(requests_endpoint(tmp_path))

        def talk():
            route, _ = router.recv_multipart()
            router.send_multipart([route, b"garbage"])
            router.send_multipart([route, b"two", b"parts"])

        thread = threading.Thread(target=talk)
        thread.start()
        with (
            Client(tmp_path, timing=FAST) as client,
            pytest.raises(EngineGone, match="could not be used: not a LoRADock frame"),
        ):
            client.load("upper", timeout_s=0.2)
        thread.join()


def test_a_closed_client_says_so(controller):
    client = Client(controller.directory)
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.status()
    with pytest.raises(ValueError, match="timeout_s"):
        Client(controller.directory, timeout_s=0)


# Generations


def test_tokens_come_as_chunks_and_the_account_at_the_end(client, controller):
    generation = client.generate("p", "upper", max_tokens=2, temperature=0.5, stop=("x",))
    assert generation.result is None
    chunks = list(generation)
    assert [chunk.offset for chunk in chunks] == [0, 1]
    assert [chunk.tokens for chunk in chunks] == [(1,), (2,)]
    assert generation.text() == "on"
    assert generation.result.output_tokens == 2
    (request,) = controller.requests(rq.Generate)
    assert request.sampling == rq.Sampling(max_tokens=2, temperature=0.5, stop=("x",))
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


def test_lost_output_is_an_error(client, controller):
    controller.lose_chunks = 1000
    with pytest.raises(EngineGone, match="the engine that held the output is gone"):
        client.generate("p", "upper").text()
    assert len(controller.requests(rq.Generate)) > 2


def test_two_generations_are_read_in_turns(client):
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


def test_another_attempt_is_made_only_if_asked_for(client, controller):
    controller.answers[rq.Generate] = refuse_first(ErrorCode.NO_ROOM, 2)
    with pytest.raises(NoRoom):
        client.generate("p", "upper").text()
    assert client.generate("p", "upper", attempts=2).text() == "one"
    assert len({request.request_id for request in controller.requests(rq.Generate)}) == 3


def test_a_generation_is_cancelled_by_request_or_by_leaving_it(client, controller):
    controller.answers[rq.Generate] = lambda request: None
    with client.generate("p") as generation:
        assert generation.cancel()
    assert list(generation) == []
    with client.generate("p") as left:
        pass
    client.status()
    targets = [request.target for request in controller.requests(rq.CancelGeneration)]
    assert targets == [generation.request_id, generation.request_id, left.request_id]


# Events


def test_events_come_in_order_from_the_past_and_the_present(client, controller):
    controller.publish(*resumed(1, 2))
    with client.events(since=0) as stream:
        controller.publish(*resumed(3))
        assert [next(stream).seq for _ in range(3)] == [1, 2, 3]
        controller.publish(*resumed(4, 5))
        assert [next(stream).event.epoch for _ in range(2)] == [4, 5]
        assert stream.seq == 5
        assert stream.next_within(0.0) is None


def test_now_means_the_moment_of_the_call(client, controller):
    controller.publish(*resumed(1, 2))
    with client.events() as stream:
        controller.publish(*resumed(3))
        assert next(stream).seq == 3


def test_without_following_the_stream_ends_where_it_is(client, controller):
    controller.publish(*resumed(*range(2000)))
    assert [item.seq for item in client.events(since=1, follow=False)] == list(range(2, 2001))
    assert list(client.events(follow=False)) == []


def test_lost_events_are_fetched_also_the_last_ones_and_over_a_restart(client, controller):
    with client.events(since=0) as stream:
        controller.publish(*resumed(1))
        assert next(stream).seq == 1
        controller.publish(*resumed(2, 3), silently=True)
        assert [next(stream).seq, next(stream).seq] == [2, 3]
        controller.restart()
        controller.publish(*resumed(4), silently=True)
        controller.publish(*resumed(5))
        assert [next(stream).seq, next(stream).seq] == [4, 5]


def test_events_that_the_log_has_no_more_leave_a_gap(client, controller):
    controller.publish(*resumed(1, 2, 3, 4))
    controller.first_seq = 3
    told = list(client.events(since=1, follow=False))
    assert told[0] == Gap(expected=2, found=3)
    assert [item.seq for item in told[1:]] == [3, 4]


def test_every_error_is_caught_by_the_base(client):
    with pytest.raises(LoradockError):
        client.show("nobody")

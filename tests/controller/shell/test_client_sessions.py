"""Routes and payloads, which are not logged: their bounds, and when they are dropped."""

from typing import Any

import pytest

from controller.shell import client_sessions as sessions_module
from controller.shell.client_sessions import ROUTES_PER_REQUEST
from controller.shell.query_queue import QUERIES_PER_CLIENT_MAX
from messages import records
from messages import requests as rq
from messages.errors import ErrorCode
from messages.wire import REQUESTS
from tests.support.simulation.session_bench import LIMITS, SessionBench


def generate(request_id: str, prompt: Any = "hello") -> rq.Generate:
    return rq.Generate(request_id, None, prompt, rq.Sampling(5, seed=3), 700)


@pytest.fixture
def bench() -> SessionBench:
    return SessionBench()


def test_a_prompt_is_sent_to_the_engine_and_not_logged(bench: SessionBench) -> None:
    logged = bench.receive(generate("r", (1, 2, 3)))
    assert logged == records.GenerationRequested("r", None, 700)
    complete = bench.start("r")
    assert (complete.prompt, complete.sampling) == ((1, 2, 3), rq.Sampling(5, seed=3))
    bench.sessions.answer(rq.TokensStreamed("r", 0, (1,), "x"))
    assert bench.start("r") is not None
    bench.sessions.answer(rq.GenerationDone("r", None, "stop", 1, 1))
    assert bench.start("r") is None


@pytest.mark.parametrize(("kind", "task"), [(rq.Embed, "embed"), (rq.Classify, "classify")])
def test_inputs_are_sent_to_the_engine_and_vectors_to_the_client(
    bench: SessionBench, kind: type, task: rq.PoolingTask
) -> None:
    logged = bench.receive(kind("r", None, ("hello", (1, 2)), 700))
    assert logged == records.PoolingRequested("r", None, task, 700)
    assert bench.pool("r", task).inputs == ("hello", (1, 2))
    bench.sessions.forward(rq.VectorsStreamed("r", 0, (b"1234",), ("good",)))
    assert bench.take_sent() == [(b"c", rq.VectorsStreamed("r", 0, (b"1234",), ("good",)))]
    assert bench.pool("r", task) is not None
    bench.sessions.answer(rq.PoolingDone("r", None, task, 2, 5))
    assert bench.pool("r", task) is None
    bench.take_sent()
    # Its output may be sent again after the final reply.
    bench.sessions.forward(rq.VectorsStreamed("r", 1, (b"5678",)))
    assert bench.take_sent() == [(b"c", rq.VectorsStreamed("r", 1, (b"5678",)))]


def test_a_payload_of_another_kind_is_not_used(bench: SessionBench) -> None:
    bench.receive(rq.Embed("r", None, ("hello",)))
    assert bench.start("r") is None


def test_the_latest_of_two_prompts_is_used(bench: SessionBench) -> None:
    bench.receive(generate("r", "old"))
    bench.receive(generate("r", "new"))
    assert bench.start("r").prompt == "new"


def test_prompts_take_bounded_memory(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    frame_bytes = len(REQUESTS.encode_body(generate("r-1")))
    monkeypatch.setattr(sessions_module, "PAYLOAD_BYTES_MAX", 2 * frame_bytes)
    for request_id in ("r-1", "r-2", "r-1"):
        assert bench.receive(generate(request_id)) is not None
    assert bench.receive(generate("r-3")) is None
    [(client, refused)] = bench.take_sent()
    assert (client, refused.request_id, refused.code) == (b"c", "r-3", ErrorCode.OVERLOADED)
    assert bench.start("r-3") is None
    # An answer frees its bytes, and the refused request may be repeated.
    bench.sessions.answer(rq.GenerationDone("r-1", None, "stop", 1, 1))
    assert bench.receive(generate("r-3")) is not None
    assert bench.start("r-3").prompt == "hello"


def test_prompts_of_pending_requests_have_a_bound_of_their_own(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_bytes = len(REQUESTS.encode_body(generate("r-1")))
    monkeypatch.setattr(sessions_module, "PAYLOAD_BYTES_MAX", frame_bytes)
    for request_id in ("r-1", "r-2", "r-3"):
        bench.controller.handle(records.GenerationRequested(request_id, None, 0), 1)
    assert bench.receive(generate("new")) is not None
    assert bench.receive(generate("r-1")) is not None
    assert bench.start("r-1").prompt == "hello"
    # The next one counts as lost; it is answered when the core ends it, not before.
    assert bench.receive(generate("r-2")) is not None
    assert bench.start("r-2") is None
    assert bench.take_sent() == []
    # A longer prompt does not replace the one that is stored.
    assert bench.receive(generate("new", "longer than before" * 10)) is not None
    assert bench.start("new").prompt == "hello"
    bench.sessions.answer(rq.GenerationDone("r-1", None, "stop", 1, 1))
    assert bench.receive(generate("r-3")) is not None
    assert bench.start("r-3").prompt == "hello"


def test_images_are_sent_to_the_engine_and_count_as_prompts(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "PAYLOAD_BYTES_MAX", 5 << 20)
    prompt = rq.IllustratedPrompt("<image>", (bytes(2 << 20), b"x"))
    logged = bench.receive(generate("r-1", prompt))
    assert logged == records.GenerationRequested("r-1", None, 700)
    assert bench.receive(generate("r-2", prompt)) is not None
    assert bench.receive(generate("r-3", prompt)) is None
    assert bench.start("r-1").prompt == bench.start("r-2").prompt == prompt


def test_an_answer_is_sent_to_the_last_client_of_its_request(bench: SessionBench) -> None:
    bench.receive(generate("r"), b"first")
    bench.receive(generate("r"), b"second")
    bench.sessions.answer(rq.GenerationDone("r", None, "stop", 1, 1))
    assert [client for client, _ in bench.take_sent()] == [b"second"]
    # Its output may be sent again after the final reply.
    bench.sessions.answer(rq.TokensStreamed("r", 0, (1,), "x"))
    assert [client for client, _ in bench.take_sent()] == [b"second"]


def test_an_answer_without_a_route_is_not_sent(bench: SessionBench) -> None:
    bench.sessions.answer(rq.Refused("nobody", ErrorCode.CONFLICT, "x"))
    assert bench.take_sent() == []


def test_routes_are_bounded_and_the_least_recently_used_is_dropped_first(
    bench: SessionBench,
) -> None:
    routes_max = ROUTES_PER_REQUEST * LIMITS.requests_max
    bench.sessions.receive(b"old", REQUESTS.encode((rq.LoadAdapter("old", "a"),)))
    bench.sessions.receive(b"kept", REQUESTS.encode((rq.LoadAdapter("kept", "a"),)))
    for number in range(routes_max - 1):
        bench.sessions.receive(b"kept", REQUESTS.encode((rq.LoadAdapter("kept", "a"),)))
        bench.sessions.receive(b"c", REQUESTS.encode((rq.LoadAdapter(f"r-{number}", "a"),)))
    for request_id in ("old", "kept"):
        bench.sessions.answer(rq.Refused(request_id, ErrorCode.CONFLICT, "x"))
    assert [client for client, _ in bench.take_sent()] == [b"kept"]


def test_a_request_that_can_not_be_logged_is_refused_unless_an_earlier_copy_is_known(
    bench: SessionBench,
) -> None:
    bench.receive(rq.ReleaseAdapter("answered", "nobody"))
    [(_, answer)] = bench.take_sent()
    bench.receive(generate("waits"))
    for request_id in ("answered", "waits", "new"):
        bench.sessions.receive(b"c", REQUESTS.encode((generate(request_id),)))
        bench.sessions.refuse_unlogged(request_id, "full")
    assert [reply for _, reply in bench.take_sent()] == [
        answer,
        rq.Refused("new", ErrorCode.LOG_UNAVAILABLE, "full"),
    ]
    assert bench.start("waits") is not None
    assert bench.start("new") is None


def test_a_repeated_request_of_a_started_generation_lacks_its_output(bench: SessionBench) -> None:
    bench.sessions.note_resend("r")
    bench.receive(generate("r"))
    assert bench.sessions.take_resends() == ()
    bench.sessions.note_resend("r")
    assert bench.sessions.take_resends() == ("r",)
    assert bench.sessions.take_resends() == ()


def test_queries_are_answered_after_the_inputs_and_never_logged(bench: SessionBench) -> None:
    seq = bench.controller.world.seq
    assert bench.receive(rq.ShowStatus("s")) is None
    assert bench.receive(rq.ShowAdapter("a", "nobody"), b"other") is None
    assert bench.receive(rq.ListAdapters("l")) is None
    assert bench.take_sent() == []
    bench.sessions.answer_queries()
    assert [(client, reply.request_id) for client, reply in bench.take_sent()] == [
        (b"c", "s"),
        (b"other", "a"),
        (b"c", "l"),
    ]
    bench.sessions.answer_queries()
    assert bench.take_sent() == []
    assert bench.controller.world.seq == seq


def test_between_two_answers_to_a_greedy_client_the_others_are_answered(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "QUERIES_NS_MAX", 0)
    for number in range(QUERIES_PER_CLIENT_MAX):
        bench.receive(rq.ListAdapters(f"greedy-{number}"), b"greedy")
    for number in range(3):
        bench.receive(rq.ShowStatus(f"other-{number}"), b"other")
    order = []
    while bench.sessions.has_queries:
        # Without time for queries, an iteration answers one.
        bench.sessions.answer_queries()
        [(client, _)] = bench.take_sent()
        order.append(client)
    assert order[:6] == [b"greedy", b"other"] * 3
    assert len(order) == QUERIES_PER_CLIENT_MAX + 3


def test_queries_beyond_a_bound_are_refused_at_once(bench: SessionBench) -> None:
    for number in range(QUERIES_PER_CLIENT_MAX):
        bench.receive(rq.ShowStatus(f"r-{number}"), b"greedy")
    assert bench.take_sent() == []
    bench.receive(rq.ShowStatus("beyond"), b"greedy")
    [(client, refused)] = bench.take_sent()
    assert (client, refused.request_id, refused.code) == (
        b"greedy",
        "beyond",
        ErrorCode.OVERLOADED,
    )


def test_a_client_that_does_not_read_is_refused_queries_at_once(bench: SessionBench) -> None:
    slow = {b"slow"}
    bench.sessions._can_reply = lambda client: client not in slow
    for client in (b"slow", b"other"):
        bench.receive(rq.ShowStatus(client.decode()), client)
    [(client, refused)] = bench.take_sent()
    assert (client, refused.code) == (b"slow", ErrorCode.OVERLOADED)
    bench.sessions.answer_queries()
    [(client, _)] = bench.take_sent()
    assert client == b"other"

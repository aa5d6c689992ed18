"""Routes and payloads, which are not logged: their bounds, and when they are dropped."""

from typing import Any

import msgspec
import pytest

from loradock.controller.server import clients, queries
from loradock.controller.server.clients import SHARED_BYTES_MAX
from loradock.controller.server.queries import QUERIES_PER_CLIENT_MAX
from loradock.controller.server.sessions import LOG_RETRY_MS
from loradock.messages import records
from loradock.messages import requests as rq
from loradock.messages.commands import StartGeneration, StopGeneration
from loradock.messages.control import CancelRequest, StopServer
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import MultimodalPrompt, Sampling
from loradock.messages.views import PoolingTask
from loradock.messages.wire import BATCH_MAX, REQUESTS, TOKEN_BYTES
from tests.support.simulation.session_bench import LIMITS, TOKEN, SessionBench, id_of

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def generate(request_id: str, prompt: Any = "hello") -> rq.Generate:
    return rq.Generate(request_id, None, prompt, Sampling(5, seed=3), 700)


@pytest.fixture
def bench() -> SessionBench:
    return SessionBench()


def test_a_prompt_is_sent_to_the_engine_and_not_logged(bench: SessionBench) -> None:
    request = msgspec.structs.replace(generate("r", (1, 2, 3)), trace=TRACE)
    assert bench.receive(request) == records.GenerationRequested(id_of("r"), None, 700)
    complete = bench.start("r")
    assert (complete.prompt, complete.sampling) == ((1, 2, 3), Sampling(5, seed=3))
    assert complete.trace == TRACE
    bench.sessions.answer(rq.TokensStreamed(id_of("r"), 0, (1,), "x"))
    assert bench.start("r") is not None
    bench.end("r")
    assert bench.start("r") is None


@pytest.mark.parametrize("target", ["no-client", ":", "client:", "client:own", ":own"])
def test_any_target_of_a_cancellation_has_an_answer_that_can_be_read(
    bench: SessionBench, target: str
) -> None:
    bench.receive(CancelRequest("r", target))
    [(_, done)] = bench.take_sent()
    assert (done.request_id, done.found) == ("r", False)


@pytest.mark.parametrize(("kind", "task"), [(rq.Embed, "embed"), (rq.Classify, "classify")])
def test_inputs_are_sent_to_the_engine_and_vectors_to_the_client(
    bench: SessionBench, kind: type, task: PoolingTask
) -> None:
    logged = bench.receive(kind("r", None, ("hello", (1, 2)), 700, TRACE))
    assert logged == records.PoolingRequested(id_of("r"), None, task, 700)
    assert (bench.pool("r", task).inputs, bench.pool("r", task).trace) == (("hello", (1, 2)), TRACE)
    bench.sessions.forward(rq.VectorsStreamed(id_of("r"), 0, (b"1234",), ("good",)))
    assert bench.take_sent() == [(b"c", rq.VectorsStreamed("r", 0, (b"1234",), ("good",)))]
    assert bench.pool("r", task) is not None
    bench.end("r")
    assert bench.pool("r", task) is None
    bench.take_sent()
    # Its output may be sent again after the final reply.
    bench.sessions.forward(rq.VectorsStreamed(id_of("r"), 1, (b"5678",)))
    assert bench.take_sent() == [(b"c", rq.VectorsStreamed("r", 1, (b"5678",)))]


def test_a_payload_of_another_kind_is_not_used(bench: SessionBench) -> None:
    bench.receive(rq.Embed("r", None, ("hello",)))
    assert bench.start("r") is None


def test_prompts_take_bounded_memory(bench: SessionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    body_bytes = len(REQUESTS.encode_body(generate("r-1")))
    monkeypatch.setattr(clients, "PAYLOAD_BYTES_MAX", 2 * body_bytes)
    for request_id in ("r-1", "r-2"):
        assert bench.receive(generate(request_id)) is not None
    assert bench.receive(generate("r-3")) is None
    [(client, refused)] = bench.take_sent()
    assert (client, refused.request_id, refused.code) == (b"c", "r-3", ErrorCode.OVERLOADED)
    assert refused.retry_after_ms > 0
    assert bench.start("r-3") is None
    # An answer frees its bytes.
    bench.end("r-1")
    assert bench.receive(generate("r-4")) is not None
    assert bench.start("r-4").prompt == "hello"


def test_prompts_of_pending_requests_have_a_bound_of_their_own(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    body_bytes = len(REQUESTS.encode_body(generate("r-1")))
    monkeypatch.setattr(clients, "PAYLOAD_BYTES_MAX", body_bytes)
    for request_id in ("r-1", "r-2", "r-3"):
        bench.receive(generate(request_id))
        bench.restart()
    assert bench.receive(generate("new")) is not None
    assert bench.receive(generate("r-1")) is None
    assert bench.start("r-1").prompt == "hello"
    # The next one counts as lost; it is answered when the core ends it, not before.
    assert bench.receive(generate("r-2")) is None
    assert bench.start("r-2") is None
    assert bench.take_sent() == []
    bench.end("r-1")
    assert bench.receive(generate("r-3")) is None
    assert bench.start("r-3").prompt == "hello"


def test_images_are_sent_to_the_engine_and_count_as_prompts(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "PAYLOAD_BYTES_MAX", 5 << 20)
    prompt = MultimodalPrompt("<image>", (bytes(2 << 20), b"x"))
    logged = bench.receive(generate("r-1", prompt))
    assert logged == records.GenerationRequested(id_of("r-1"), None, 700)
    assert bench.receive(generate("r-2", prompt)) is not None
    assert bench.receive(generate("r-3", prompt)) is None
    assert bench.start("r-1").prompt == bench.start("r-2").prompt == prompt


@pytest.mark.parametrize(("epoch", "is_executed"), [(0, True), (1, False), (2, True), (3, True)])
def test_nothing_of_a_frame_to_an_earlier_start_is_executed(
    bench: SessionBench, epoch: int, is_executed: bool
) -> None:
    """Epoch 0 is of clients that do not follow epochs: their frames are executed at any time."""
    bench.handle(records.ControllerStarted(2))
    batch = (rq.LoadAdapter("r-1", "a"), rq.ListAdapters("r-2"), StopServer("r-3"))
    bench.sessions.receive(b"c", REQUESTS.encode(batch, epoch, token=TOKEN))
    assert len(bench.sessions.take_group()) == is_executed
    bench.queries.answer()
    answered = {reply.request_id for _, reply in bench.take_sent()}
    assert answered == ({"r-2", "r-3"} if is_executed else {""})


OTHER = b"o" * TOKEN_BYTES


def test_an_answer_is_sent_over_the_last_connection_of_its_client(bench: SessionBench) -> None:
    bench.receive(generate("r"), b"first")
    assert bench.receive(generate("r"), b"second") is None
    bench.sessions.answer(rq.GenerationDone(id_of("r"), None, "stop", 1, 1))
    done = rq.GenerationDone("r", None, "stop", 1, 1)
    assert bench.take_sent() == [(b"second", done)]
    # Its output may be sent again after the final reply.
    bench.sessions.answer(rq.TokensStreamed(id_of("r"), 0, (1,), "x"))
    assert [route for route, _ in bench.take_sent()] == [b"second"]


def test_an_answer_without_a_route_is_not_sent(bench: SessionBench) -> None:
    bench.sessions.answer(rq.Refused(id_of("nobody"), ErrorCode.CONFLICT, "x"))
    bench.sessions.answer(rq.Refused("made-by-the-controller", ErrorCode.CONFLICT, "x"))
    assert bench.take_sent() == []


def test_clients_with_the_same_request_ids_do_not_meet(bench: SessionBench) -> None:
    bench.receive(generate("r", "mine"), b"mine")
    bench.receive(generate("r", "other"), b"other", OTHER)
    assert bench.start("r").prompt == "mine"
    # Neither sees nor cancels the other's generation.
    bench.receive(rq.CancelGeneration("cancel", "unknown"), b"other", OTHER)
    bench.receive(rq.CancelGeneration("too", "r"), b"other", OTHER)
    assert [reply for _, reply in bench.take_sent()] == [
        rq.CancelDone("cancel", "unknown", False),
        rq.CancelDone("too", "r", True),
    ]
    stopped = [command for command in bench.commands if isinstance(command, StopGeneration)]
    started = {c.op: c.request_id for c in bench.commands if isinstance(c, StartGeneration)}
    assert [started[command.target] for command in stopped] == [id_of("r", OTHER)]


def test_another_request_under_a_used_id_is_refused_and_changes_nothing(
    bench: SessionBench,
) -> None:
    bench.receive(generate("waits", "first"))
    bench.receive(rq.ReleaseAdapter("refused", "nobody"))
    bench.receive(rq.LoadAdapter("loads", "a"))
    bench.receive(rq.CancelGeneration("answered", "x"))
    bench.take_sent()
    digest = bench.controller.digest()
    for request_id in ("waits", "refused", "loads", "answered"):
        for other in (rq.EvictAdapter(request_id, "a"), generate(request_id, "another")):
            assert bench.receive(other, b"thief") is None
            [(route, refused)] = bench.take_sent()
            assert (route, refused.code) == (b"thief", ErrorCode.CONFLICT)
            assert "belongs to another request" in refused.message
    assert bench.controller.digest() == digest
    assert bench.start("waits").prompt == "first"
    assert bench.sessions.take_resends() == ()


def test_another_request_under_an_id_of_the_same_frame_is_refused(bench: SessionBench) -> None:
    logged = bench.group(generate("r", "first"), generate("r", "second"), generate("r", "first"))
    assert len(logged) == 3
    [(_, refused)] = bench.take_sent()
    assert (refused.request_id, refused.code) == ("r", ErrorCode.CONFLICT)
    assert bench.start("r").prompt == "first"


def test_what_is_repeated_or_refused_is_not_logged(bench: SessionBench) -> None:
    bench.receive(rq.CancelGeneration("c", "x"))
    bench.receive(generate("g"))
    bench.take_sent()
    seq = bench.controller.world.seq
    for _ in range(3):
        bench.receive(rq.CancelGeneration("c", "x"))
        bench.receive(generate("g"))
        bench.receive(rq.ReleaseAdapter("unknown", "nobody"))
    for number in range(LIMITS.requests_max - 1):
        bench.receive(rq.LoadAdapter(f"fills-{number}", f"a-{number}"))
    seq += LIMITS.requests_max - 1
    bench.take_sent()
    for _ in range(3):
        bench.receive(rq.LoadAdapter("overload", "b"))
    refusals = [reply for _, reply in bench.take_sent()]
    assert len(refusals) == 3
    assert refusals.count(refusals[0]) == 3
    assert refusals[0].code is ErrorCode.OVERLOADED
    assert refusals[0].retry_after_ms > 0
    assert bench.controller.world.seq == seq


def test_a_refusal_is_repeated_also_when_the_reason_is_gone(bench: SessionBench) -> None:
    bench.receive(rq.Generate("r", "a", "p"))
    [(_, refused)] = bench.take_sent()
    bench.receive(rq.LoadAdapter("l", "a"))
    assert bench.receive(rq.Generate("r", "a", "p")) is None
    assert bench.take_sent() == [(b"c", refused)]
    assert bench.receive(rq.Generate("new", "a", "p")) is not None


def test_a_request_sees_those_before_it_in_its_frame(bench: SessionBench) -> None:
    assert len(bench.group(rq.LoadAdapter("l", "a"), rq.Generate("g", "a", "p"))) == 2
    assert not [reply for _, reply in bench.take_sent() if isinstance(reply, rq.Refused)]


def test_replies_of_an_iteration_share_frames_in_order(bench: SessionBench) -> None:
    count = BATCH_MAX + 10
    first = [rq.CancelGeneration(f"c-{n}", "x") for n in range(BATCH_MAX)]
    bench.group(*first)
    bench.group(*[rq.CancelGeneration(f"c-{n}", "x") for n in range(BATCH_MAX, count)])
    bench.group(rq.CancelGeneration("other", "x"), route=b"other", token=OTHER)
    sent = bench.take_sent()
    assert bench.frames == 3
    assert [reply.request_id for route, reply in sent if route == b"c"] == [
        f"c-{n}" for n in range(count)
    ]
    for n in range(4):
        bench.sessions.forward(rq.TokensStreamed(id_of("c-1"), n, (1,), "x" * SHARED_BYTES_MAX))
    assert [reply.offset for _, reply in bench.take_sent()] == [0, 1, 2, 3]
    assert bench.frames == 3 + 4


def test_a_request_that_can_not_be_logged_is_refused_unless_an_earlier_copy_is_known(
    bench: SessionBench,
) -> None:
    bench.receive(rq.CancelGeneration("answered", "nothing"))
    [(_, answer)] = bench.take_sent()
    bench.receive(generate("waits"))
    frame = REQUESTS.encode((generate("new"),), token=TOKEN)
    bench.sessions.receive(b"c", frame)
    [new] = bench.sessions.take_group()
    known = [records.GenerationRequested(id_of(name), None, 700) for name in ("answered", "waits")]
    for logged, body in (*((one, 0) for one in known), (new.message, new.body)):
        bench.sessions.refuse_unlogged(logged, body, "full")
    refused = rq.Refused("new", ErrorCode.LOG_UNAVAILABLE, "full", LOG_RETRY_MS)
    assert [reply for _, reply in bench.take_sent()] == [answer, refused]
    assert bench.start("waits") is not None
    assert bench.start("new") is None
    # Its client may have been answered: a late copy of its frame is not executed.
    bench.sessions.receive(b"c", frame)
    assert bench.sessions.take_group() == []
    assert bench.take_sent() == [(b"c", refused)]


def test_a_repeated_request_of_a_started_generation_lacks_its_output(bench: SessionBench) -> None:
    bench.receive(generate("r"))
    assert bench.sessions.take_resends() == ()
    bench.receive(generate("r"))
    assert bench.sessions.take_resends() == (id_of("r"),)
    assert bench.sessions.take_resends() == ()


def test_a_payload_that_a_restart_lost_is_taken_from_a_repetition(bench: SessionBench) -> None:
    bench.receive(generate("r"))
    bench.restart()
    assert bench.start("r") is None
    assert bench.receive(generate("r")) is None
    assert bench.start("r").prompt == "hello"


def test_queries_are_answered_after_the_inputs_and_never_logged(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "QUIET_SLICE_NS", 1 << 60)
    seq = bench.controller.world.seq
    assert bench.receive(rq.ShowStatus("s")) is None
    assert bench.receive(rq.ShowAdapter("a", "nobody"), b"other") is None
    assert bench.receive(rq.ListAdapters("l")) is None
    assert bench.take_sent() == []
    bench.queries.answer()
    assert [(client, reply.request_id) for client, reply in bench.take_sent()] == [
        (b"c", "s"),
        (b"c", "l"),
        (b"other", "a"),
    ]
    bench.queries.answer()
    assert bench.take_sent() == []
    assert bench.controller.world.seq == seq


def test_between_two_answers_to_a_greedy_client_the_others_are_answered(
    bench: SessionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "QUIET_SLICE_NS", 0)
    for number in range(QUERIES_PER_CLIENT_MAX):
        bench.receive(rq.ListAdapters(f"greedy-{number}"), b"greedy")
    for number in range(3):
        bench.receive(rq.ShowStatus(f"other-{number}"), b"other")
    order = []
    while bench.queries.wait_ns(0) is not None:
        # Without time for queries, an iteration answers one.
        bench.queries.answer()
        [(client, _)] = bench.take_sent()
        order.append(client)
    assert order[:6] == [b"greedy", b"other"] * 3
    assert len(order) == QUERIES_PER_CLIENT_MAX + 3


def test_a_query_is_answered_after_the_earlier_requests_of_its_client_alone() -> None:
    bench = SessionBench()
    other = b"o" * TOKEN_BYTES
    bench.sessions.receive(
        b"c", REQUESTS.encode((rq.LoadAdapter("l", "a"), rq.ShowAdapter("s", "a")), token=TOKEN)
    )
    bench.sessions.receive(b"o", REQUESTS.encode((rq.ShowStatus("s"),), token=other))
    bench.queries.answer()
    assert [route for route, _ in bench.take_sent()] == [b"o"]
    for received in bench.sessions.take_group():
        bench.handle(received.message, received.body)
    bench.queries.answer()
    [(route, reply)] = bench.take_sent()
    assert (route, reply.request_id) == (b"c", "s")
    assert isinstance(reply, rq.AdapterShown)


def test_queries_beyond_a_bound_are_refused_at_once(bench: SessionBench) -> None:
    for number in range(QUERIES_PER_CLIENT_MAX):
        bench.receive(rq.ShowStatus(f"r-{number}"), b"greedy")
    assert bench.take_sent() == []
    bench.receive(rq.ShowStatus("beyond"), b"greedy")
    [(client, refused)] = bench.take_sent()
    assert (client, refused.request_id) == (b"greedy", "beyond")
    assert (refused.code, refused.retry_after_ms > 0) == (ErrorCode.OVERLOADED, True)


def test_a_client_that_does_not_read_is_refused_queries_at_once(bench: SessionBench) -> None:
    slow = {b"slow"}
    bench.queries._can_reply = lambda client: client not in slow
    for client in (b"slow", b"other"):
        bench.receive(rq.ShowStatus(client.decode()), client)
    [(client, refused)] = bench.take_sent()
    assert (client, refused.code) == (b"slow", ErrorCode.OVERLOADED)
    bench.queries.answer()
    [(client, _)] = bench.take_sent()
    assert client == b"other"

"""What the desk keeps beside the log (routes, prompts), how much of it, and for how long."""

from typing import Any

import pytest

from controller.core.controller import Controller
from controller.core.limits import Limits
from controller.shell import client_sessions as desk_module
from controller.shell.client_sessions import ROUTES_PER_REQUEST, Desk
from controller.shell.default_adapters import DefaultAdapters
from messages import commands, records, reports
from messages import requests as rq
from messages.errors import ErrorCode
from messages.wire import REPLIES, REQUESTS

LIMITS = Limits(requests_max=4)
ENGINE = reports.EngineInventory("e", 1, "m", 8, 1 << 30)


class Counter:
    """A desk over a core with an engine, and what went out by it."""

    def __init__(self, default_path: str = "") -> None:
        self.controller = Controller(LIMITS, checked=True)
        self.controller.handle(records.ControllerStarted(1), 1)
        self.controller.handle(ENGINE, 1)
        self.sent: list[tuple[bytes, Any]] = []
        defaults = DefaultAdapters({"image": default_path} if default_path else {})
        self.desk = Desk(self.controller, None, self._send, 1, defaults)  # type: ignore[arg-type]

    def _send(self, client: bytes, frame: bytes) -> None:
        self.sent.append((client, REPLIES.decode(frame).message))

    def take_sent(self) -> list[tuple[bytes, Any]]:
        sent, self.sent = self.sent, []
        return sent

    def receive(self, message: rq.Request, client: bytes = b"c") -> Any:
        """The message's own input, which is the last; all are handled and their answers go out."""
        inputs = self.desk.receive(client, REQUESTS.encode(message))
        assert [sender for _, sender in inputs] in ([], [client], [b"", client])
        for asked, _ in inputs:
            for action in self.controller.handle(asked, 1):
                if isinstance(getattr(action, "message", None), rq.Reply):
                    self.desk.answer(action.message)
        return inputs[-1][0] if inputs else None

    def start(self, request_id: str, op: int = 1) -> commands.StartGeneration | None:
        return self.desk.with_payload(commands.StartGeneration(op, request_id, 0, -1, 0))

    def pool(self, request_id: str, task: rq.PoolingTask) -> commands.StartPooling | None:
        return self.desk.with_payload(commands.StartPooling(1, request_id, 0, -1, 0, task))


def generate(request_id: str, prompt: Any = "hello") -> rq.Generate:
    return rq.Generate(request_id, None, prompt, rq.Sampling(5, seed=3), 700)


@pytest.fixture
def counter() -> Counter:
    return Counter()


def test_a_prompt_goes_to_the_engine_and_not_into_the_log(counter: Counter) -> None:
    asked = counter.receive(generate("r", (1, 2, 3)))
    assert asked == records.GenerationRequested("r", None, 700)
    complete = counter.start("r")
    assert (complete.prompt, complete.sampling) == ((1, 2, 3), rq.Sampling(5, seed=3))
    counter.desk.answer(rq.TokensStreamed("r", 0, (1,), "x"))
    assert counter.start("r") is not None
    counter.desk.answer(rq.GenerationDone("r", None, "stop", 1, 1))
    assert counter.start("r") is None


@pytest.mark.parametrize(("kind", "task"), [(rq.Embed, "embed"), (rq.Classify, "classify")])
def test_inputs_go_to_the_engine_and_vectors_to_the_client(
    counter: Counter, kind: type, task: rq.PoolingTask
) -> None:
    asked = counter.receive(kind("r", None, ("hello", (1, 2)), 700))
    assert asked == records.PoolingRequested("r", None, task, 700)
    assert counter.pool("r", task).inputs == ("hello", (1, 2))
    counter.desk.stream(reports.VectorsComputed("r", 0, (b"1234",), ("good",)))
    assert counter.take_sent() == [(b"c", rq.VectorsStreamed("r", 0, (b"1234",), ("good",)))]
    assert counter.pool("r", task) is not None
    counter.desk.answer(rq.PoolingDone("r", None, task, 2, 5))
    assert counter.pool("r", task) is None
    counter.take_sent()
    # Its output may be sent once more behind that.
    counter.desk.stream(reports.VectorsComputed("r", 1, (b"5678",)))
    assert counter.take_sent() == [(b"c", rq.VectorsStreamed("r", 1, (b"5678",)))]


def test_a_payload_of_another_kind_is_none(counter: Counter) -> None:
    counter.receive(rq.Embed("r", None, ("hello",)))
    assert counter.start("r") is None


def test_of_two_prompts_the_latest_counts(counter: Counter) -> None:
    counter.receive(generate("r", "old"))
    counter.receive(generate("r", "new"))
    assert counter.start("r").prompt == "new"


def test_prompts_take_bounded_memory(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    frame_bytes = len(REQUESTS.encode(generate("r-1")))
    monkeypatch.setattr(desk_module, "PROMPT_BYTES_MAX", 2 * frame_bytes)
    for request_id in ("r-1", "r-2", "r-1"):
        assert counter.receive(generate(request_id)) is not None
    assert counter.receive(generate("r-3")) is None
    [(client, refused)] = counter.take_sent()
    assert (client, refused.request_id, refused.code) == (b"c", "r-3", ErrorCode.OVERLOADED)
    assert counter.start("r-3") is None
    # Its place is free with the answer, and the refused one may come again.
    counter.desk.answer(rq.GenerationDone("r-1", None, "stop", 1, 1))
    assert counter.receive(generate("r-3")) is not None
    assert counter.start("r-3").prompt == "hello"


def test_prompts_of_requests_that_were_taken_up_have_as_much_room_again(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_bytes = len(REQUESTS.encode(generate("r-1")))
    monkeypatch.setattr(desk_module, "PROMPT_BYTES_MAX", frame_bytes)
    for request_id in ("r-1", "r-2", "r-3"):
        counter.controller.handle(records.GenerationRequested(request_id, None, 0), 1)
    assert counter.receive(generate("new")) is not None
    assert counter.receive(generate("r-1")) is not None
    assert counter.start("r-1").prompt == "hello"
    # One more is as if its prompt were lost; nobody is told that it ended before it does.
    assert counter.receive(generate("r-2")) is not None
    assert counter.start("r-2") is None
    assert counter.take_sent() == []
    # Nor does a longer one displace the prompt that was kept.
    assert counter.receive(generate("new", "longer than before" * 10)) is not None
    assert counter.start("new").prompt == "hello"
    counter.desk.answer(rq.GenerationDone("r-1", None, "stop", 1, 1))
    assert counter.receive(generate("r-3")) is not None
    assert counter.start("r-3").prompt == "hello"


def test_images_go_to_the_engine_and_count_as_prompts(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "PROMPT_BYTES_MAX", 5 << 20)
    prompt = rq.IllustratedPrompt("<image>", (bytes(2 << 20), b"x"))
    asked = counter.receive(generate("r-1", prompt))
    assert asked == records.GenerationRequested("r-1", None, 700)
    assert counter.receive(generate("r-2", prompt)) is not None
    assert counter.receive(generate("r-3", prompt)) is None
    assert counter.start("r-1").prompt == counter.start("r-2").prompt == prompt


def test_an_answer_goes_where_the_request_came_from_last(counter: Counter) -> None:
    counter.receive(generate("r"), b"first")
    counter.receive(generate("r"), b"second")
    counter.desk.answer(rq.GenerationDone("r", None, "stop", 1, 1))
    assert [client for client, _ in counter.take_sent()] == [b"second"]
    # Its output may be sent once more behind that.
    counter.desk.answer(rq.TokensStreamed("r", 0, (1,), "x"))
    assert [client for client, _ in counter.take_sent()] == [b"second"]


def test_an_answer_without_a_way_is_kept_for_who_asks_again(counter: Counter) -> None:
    counter.desk.answer(rq.Refused("nobody", ErrorCode.CONFLICT, "x"))
    assert counter.take_sent() == []


def test_routes_are_bounded_and_the_stalest_goes_first(counter: Counter) -> None:
    routes_max = ROUTES_PER_REQUEST * LIMITS.requests_max
    counter.desk.receive(b"old", REQUESTS.encode(rq.LoadAdapter("old", "a")))
    counter.desk.receive(b"kept", REQUESTS.encode(rq.LoadAdapter("kept", "a")))
    for number in range(routes_max - 1):
        counter.desk.receive(b"kept", REQUESTS.encode(rq.LoadAdapter("kept", "a")))
        counter.desk.receive(b"c", REQUESTS.encode(rq.LoadAdapter(f"r-{number}", "a")))
    for request_id in ("old", "kept"):
        counter.desk.answer(rq.Refused(request_id, ErrorCode.CONFLICT, "x"))
    assert [client for client, _ in counter.take_sent()] == [b"kept"]


def test_what_can_not_be_logged_is_refused_unless_it_was_before(counter: Counter) -> None:
    counter.receive(rq.ReleaseAdapter("answered", "nobody"))
    [(_, answer)] = counter.take_sent()
    counter.receive(generate("waits"))
    for request_id in ("answered", "waits", "new"):
        counter.desk.receive(b"c", REQUESTS.encode(generate(request_id)))
        counter.desk.refuse_unlogged(request_id, "full")
    assert [reply for _, reply in counter.take_sent()] == [
        answer,
        rq.Refused("new", ErrorCode.LOG_UNAVAILABLE, "full"),
    ]
    assert counter.start("waits") is not None
    assert counter.start("new") is None


def test_who_asks_again_for_a_started_generation_lacks_its_output(counter: Counter) -> None:
    counter.desk.note_repeated("r")
    counter.receive(generate("r"))
    assert counter.desk.take_repeated() == ()
    counter.desk.note_repeated("r")
    assert counter.desk.take_repeated() == ("r",)
    assert counter.desk.take_repeated() == ()


def test_looking_is_answered_after_the_turn_and_never_logged(counter: Counter) -> None:
    seq = counter.controller.world.seq
    assert counter.receive(rq.ShowStatus("s")) is None
    assert counter.receive(rq.ShowAdapter("a", "nobody"), b"other") is None
    assert counter.receive(rq.ListAdapters("l")) is None
    assert counter.take_sent() == []
    counter.desk.answer_queries()
    assert [(client, reply.request_id) for client, reply in counter.take_sent()] == [
        (b"c", "s"),
        (b"other", "a"),
        (b"c", "l"),
    ]
    counter.desk.answer_queries()
    assert counter.take_sent() == []
    assert counter.controller.world.seq == seq

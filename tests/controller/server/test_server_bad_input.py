"""Bad input changes no other adapter, and the engine continues to answer correctly.

One real controller, which verifies every invariant after every input, and one real engine. After
each bad input all adapters are compared with those before, and a trained adapter has to generate a
known text.
"""

import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from loradock.messages import reports as rp
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling
from loradock.messages.views import AdapterCounters
from loradock.messages.wire import REPORTS, REQUESTS, WireError
from tests.support.parallel.processes import TINY, ControllerProcess, controller, engine
from tests.support.simulation.damaged_adapters import (
    DAMAGES,
    NAN,
    copy_adapter,
    with_config,
    with_value,
)
from tests.support.simulation.malformed_frames import FRAMES, WITHOUT_ID
from tests.support.simulation.shell_examples import Peer, RawClient, eventually

WITNESS = "upper"


@dataclass
class Stack:
    """The processes, and the client of the tests."""

    client: RawClient
    process: ControllerProcess
    engine_pid: int
    directory: Path
    root: Path
    garbage: int = 0

    def call(self, kind: Callable[..., rq.Request], *fields: Any, **named: Any) -> rq.Reply:
        return self.client.call(kind(self.client.new_id(), *fields, **named))

    def generate(self, adapter: str | None, prompt: Any, **sampling: Any) -> rq.Reply:
        return self.call(rq.Generate, adapter, prompt, Sampling(**sampling))

    def text(self, adapter: str, prompt: str) -> str:
        request = rq.Generate(self.client.new_id(), adapter, prompt, Sampling(16))
        self.client.send_request(request)
        parts = []
        while isinstance(reply := self.client.reply(), rq.TokensStreamed):
            parts.append(reply.text if reply.request_id == request.request_id else "")
        assert isinstance(reply, rq.GenerationDone), reply
        return "".join(parts)

    def adapters(self) -> dict[str, rq.AdapterView]:
        """Return every adapter's view by name, without what is counted under the name."""
        found = {}
        counted = dict.fromkeys(("uses", "hits", "loads", "failures", "last_used_ns"), 0)
        for view in self.client.list().adapters:
            assert view.adapter not in found
            found[view.adapter] = structs.replace(view, counters=AdapterCounters(), **counted)
        return found


def damaged_path(root: Path, name: str) -> Path:
    return root / name.replace(" ", "-")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    base = tmp_path_factory.mktemp("bad")
    directory, root = base / "d", base / "root"
    directory.mkdir()
    root.mkdir()
    # A file that has just been written is waited for, so they are written before the start.
    for name, (damage, _) in DAMAGES.items():
        damage(copy_adapter("caesar", damaged_path(root, name)))
    roots = (TINY / "adapters", root)
    with controller(directory, checked=True) as process, engine(directory, roots) as engine_process:
        with RawClient(directory) as client:
            found = Stack(client, process, engine_process.pid, directory, root)
            assert found.call(rq.HoldAdapter, "count").slot == 0
            for name in ("caesar", WITNESS):
                assert client.activate(name).state == "gpu-slot"
            assert found.call(rq.StageAdapter, "devowel").state == "pinned"
            assert client.load("double").state == "cpu-cached"
            yield found
        assert process.stop() == 0, process.output()


@pytest.fixture
def unharmed(stack: Stack) -> Iterator[Callable[..., None]]:
    """Check that all adapters but the named ones are unchanged, and that the witness works."""
    own: list[str] = []
    before = stack.adapters()
    yield lambda *names: own.extend(names)
    after = stack.adapters()
    for name in own:
        before.pop(name, None)
        after.pop(name, None)
    assert after == before
    assert stack.text(WITNESS, "hello>") == "HELLO"
    assert stack.process._process.poll() is None


def is_refused(reply: rq.Reply, code: ErrorCode) -> bool:
    assert isinstance(reply, rq.Refused), reply
    assert reply.code == code, reply
    assert reply.message
    return True


@pytest.mark.parametrize("name", DAMAGES)
def test_a_broken_adapter_is_refused(stack: Stack, unharmed: Any, name: str) -> None:
    _, code = DAMAGES[name]
    path = damaged_path(stack.root, name)
    assert is_refused(stack.client.load("broken", path=str(path)), code)
    assert is_refused(stack.call(rq.HoldAdapter, "broken", path.name), code)


@pytest.mark.parametrize("damage", [with_value(NAN), with_config(r=0)])
def test_a_broken_replacement_keeps_the_old_version(
    stack: Stack, unharmed: Any, tmp_path: Path, damage: Any
) -> None:
    path = copy_adapter("double", stack.root / tmp_path.name)
    damage(path)
    before = stack.adapters()
    reply = stack.client.load("caesar", path=str(path), replace=True)
    assert is_refused(reply, reply.code)
    assert reply.code in (ErrorCode.NOT_FINITE, ErrorCode.CONFIG_REFUSED)
    assert stack.adapters() == before
    unharmed("caesar")
    assert stack.text("caesar", "hello>") == "khoor"


def _outside(stack: Stack, tmp_path: Path) -> str:
    return str(copy_adapter("caesar", tmp_path / "caesar"))


@pytest.mark.parametrize("place", [_outside, lambda *_: "a\0b"])
def test_a_path_out_of_the_roots_is_refused(
    stack: Stack, unharmed: Any, tmp_path: Path, place: Callable[[Stack, Path], str]
) -> None:
    reply = stack.client.load("elsewhere", path=place(stack, tmp_path))
    assert is_refused(reply, ErrorCode.PATH_NOT_ALLOWED)


@pytest.mark.parametrize("name", FRAMES)
def test_a_malformed_message_is_refused(stack: Stack, unharmed: Any, name: str) -> None:
    stack.client.send(*FRAMES[name])
    reply = stack.client.reply()
    assert is_refused(reply, ErrorCode.MALFORMED)
    assert reply.request_id == ("" if name in WITHOUT_ID else "x")


def test_garbage_is_refused(stack: Stack, unharmed: Any) -> None:
    seed = int(os.environ.get("LORADOCK_SEED", "1"))
    print(f"LORADOCK_SEED={seed}")
    rng = random.Random(seed)
    valid = REQUESTS.encode((rq.LoadAdapter("x", "caesar", "caesar"),))
    frames = [rng.randbytes(rng.randrange(200)) for _ in range(200)]
    for _ in range(400):
        # The name's bytes stay: with a bit changed there, the frame is a valid request.
        changed = bytearray(valid[:20] + rng.randbytes(12))
        changed[rng.randrange(20)] ^= 1 << rng.randrange(8)
        frames.append(bytes(changed))
    for frame in frames:
        stack.client.send(frame)
    replies = stack.client.replies_until(rq.ShowStatus(stack.client.new_id()))
    assert len(replies) == len(frames)
    assert all(is_refused(reply, ErrorCode.MALFORMED) for reply in replies)


def test_a_frame_of_fifty_megabytes_ends_its_connection(stack: Stack, unharmed: Any) -> None:
    with RawClient(stack.directory) as intruder:
        intruder.send(bytes(50 << 20))
        assert stack.client.status().seq
    with RawClient(stack.directory) as again:
        assert again.status().seq


def _other_content(stack: Stack) -> tuple[rq.Reply, ErrorCode]:
    return stack.client.load("caesar", path="reverse"), ErrorCode.CONFLICT


def _long_prompt(stack: Stack) -> tuple[rq.Reply, ErrorCode]:
    return stack.generate(None, (65,) * 513), ErrorCode.CONTEXT_EXCEEDED


def _foreign_tokens(stack: Stack) -> tuple[rq.Reply, ErrorCode]:
    return stack.generate(None, (1, 2, 259)), ErrorCode.MALFORMED


@pytest.mark.parametrize("refused", [_other_content, _long_prompt, _foreign_tokens])
def test_impossible_requests_are_refused(stack: Stack, unharmed: Any, refused: Any) -> None:
    assert is_refused(*refused(stack))


def test_an_answered_request_gets_its_first_answer_again(stack: Stack, unharmed: Any) -> None:
    client, done, refused = stack.client, stack.client.new_id(), stack.client.new_id()
    first = client.call(rq.DeactivateAdapter(done, "devowel"))
    assert isinstance(first, rq.AdapterDone)
    held = client.call(rq.EvictAdapter(refused, "count"))
    assert is_refused(held, ErrorCode.CONFLICT)
    seq = client.status().seq
    for request_id in (done, refused):
        for other in (
            rq.EvictAdapter(request_id, "caesar"),
            rq.RemoveAdapter(request_id, "caesar", force=True),
            rq.Generate(request_id, None, "hello>"),
            rq.LoadAdapter(request_id, "fresh", "caesar"),
        ):
            answer = client.call(other)
            assert is_refused(answer, ErrorCode.CONFLICT)
            assert "belongs to another request" in answer.message
    assert client.call(rq.DeactivateAdapter(done, "devowel")) == first
    assert client.call(rq.EvictAdapter(refused, "count")) == held
    assert client.status().seq == seq, "repetitions and refusals were logged"


def test_another_client_with_the_same_request_id_is_another_request(
    stack: Stack, unharmed: Any
) -> None:
    request_id = stack.client.new_id()
    assert stack.client.call(rq.DeactivateAdapter(request_id, "devowel")).adapter == "devowel"
    with RawClient(stack.directory) as other:
        reply = other.call(rq.EvictAdapter(request_id, "count"))
        assert is_refused(reply, ErrorCode.CONFLICT)
        assert "is held" in reply.message


def test_a_client_on_a_new_connection_is_answered_there(stack: Stack, unharmed: Any) -> None:
    request = rq.Generate(stack.client.new_id(), None, "hello>", Sampling(3))
    with RawClient(stack.directory) as lost:
        lost.token = stack.client.token
        lost.send_request(request)
    done = stack.client.call(request)
    assert done.output_tokens == 3
    assert stack.client.call(request) == done


def test_a_request_that_waits_is_answered_once(stack: Stack, unharmed: Any) -> None:
    client, request_id = stack.client, stack.client.new_id()
    os.kill(stack.engine_pid, signal.SIGSTOP)
    try:
        for path in ("reverse", "reverse", "spell"):
            client.send_request(rq.LoadAdapter(request_id, "fresh", path))
        [refused] = client.replies_until(rq.ShowStatus(client.new_id()))
        assert is_refused(refused, ErrorCode.CONFLICT)
    finally:
        os.kill(stack.engine_pid, signal.SIGCONT)
    assert client.final_reply(request_id).state == "cpu-cached"
    assert stack.call(rq.ShowAdapter, "fresh").adapter.path == "reverse"
    assert stack.call(rq.RemoveAdapter, "fresh").state == "unregistered"
    assert client.replies_until(rq.ShowStatus(client.new_id())) == []


def _send_to_the_engine_socket(stack: Stack, intruder: Peer, frames: list[bytes]) -> None:
    """Send, and wait until all was read: malformed frames are logged at every power of two."""
    stack.garbage += sum(map(_is_garbage, frames))
    logged = 1 << stack.garbage.bit_length()
    for frame in (*frames, *[b"garbage"] * (logged - stack.garbage)):
        intruder.send(frame)
    stack.garbage = logged
    eventually(lambda: re.search(rf"count={logged}\b", stack.process.output()), "the garbage")


def _is_garbage(frame: bytes) -> bool:
    try:
        REPORTS.decode(frame)
    except WireError:
        return True
    return False


def test_an_intruder_at_the_engine_socket_changes_nothing(stack: Stack, unharmed: Any) -> None:
    before, events_seq = stack.client.status(), stack.client.list().events_seq
    spoof = rp.EngineInventory(before.engine_id, 1, "x", 1, 1)
    other = rp.EngineInventory("another", 1, "x", 1, 1)
    epoch, many = before.epoch, range(1, 40)
    frames = [b"", b"\0" * 20, REPORTS.prefix, REQUESTS.encode((rq.ShowStatus("x"),))]
    # From an unknown peer; of a later epoch; of a second engine.
    frames += [REPORTS.encode(rp.WeightsLoaded(op), epoch, op) for op in many]
    frames += [REPORTS.encode(rq.TokensStreamed("x", 0, (1,), "x"), epoch, 1)]
    frames += [REPORTS.encode(report, epoch + 1, 1) for report in (spoof, other)]
    frames += [REPORTS.encode(rp.EngineBeat(before.engine_id, 1), epoch + 1, 1)]
    frames += [REPORTS.encode(report, 0, 1) for report in (other, rp.EngineBeat("another", 1))]
    frames += [REPORTS.encode(rp.OperationFailed(op, "L001", "x"), epoch, op) for op in many]
    with Peer(stack.directory, "engine.sock") as intruder:
        _send_to_the_engine_socket(stack, intruder, frames)
    after = stack.client.status()
    assert after.engine_id == before.engine_id
    assert after.tiers == before.tiers
    assert stack.client.list().events_seq == events_seq


def test_an_intruder_at_the_engine_socket_can_not_send_output(stack: Stack, unharmed: Any) -> None:
    client, request_id = stack.client, stack.client.new_id()
    os.kill(stack.engine_pid, signal.SIGSTOP)
    try:
        client.send_request(rq.Generate(request_id, WITNESS, "hello>", Sampling(3)))
        frames = [REPORTS.encode(rq.TokensStreamed(request_id, 0, (1,), "x"))]
        ended = [rp.GenerationEnded(op, "stop", 1, 0) for op in range(1, 2000)]
        frames += [REPORTS.encode(report, 0, report.op) for report in ended]
        with Peer(stack.directory, "engine.sock") as intruder:
            _send_to_the_engine_socket(stack, intruder, frames)
        assert client.replies_until(rq.ShowStatus(client.new_id())) == []
    finally:
        os.kill(stack.engine_pid, signal.SIGCONT)
    assert client.final_reply(request_id).output_tokens == 3

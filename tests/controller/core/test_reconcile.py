"""One module of the core sends operations, and a handler of a request sends none."""

import ast

import pytest

from loradock.controller.core.actions import SendCommand, SendReply
from loradock.controller.core.reports import SUCCESS_OF
from loradock.controller.core.requests import REQUESTS
from loradock.messages import commands, records
from loradock.messages.requests import ActivateBatch, BatchDone
from loradock.messages.views import Placement
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.message_examples import members
from tests.support.sources import ROOT


def test_reconcile_alone_makes_operations() -> None:
    making = {
        path.name
        for path in (ROOT / "controller/core").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Operation"
    }
    assert making == {"reconcile.py"}


def test_each_operation_has_its_report() -> None:
    assert set(SUCCESS_OF) == {kind.__name__ for kind in members(commands.Operation)}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (records.GenerationRequested, ("a",)),
        (records.GenerationRequested, (None,)),
        (records.PoolingRequested, ("a", "embed")),
    ],
)
def test_what_needs_no_move_is_sent_with_the_request(kind: type, fields: tuple[object]) -> None:
    bench = CoreBench()
    bench.activate("a")
    assert kind in REQUESTS
    actions = bench.controller.handle(kind("r", *fields), bench.now + 1)
    sent = [action.message for action in actions if isinstance(action, SendCommand)]
    assert len(sent) == 1
    assert isinstance(sent[0], commands.Operation)


def test_a_batch_whose_adapters_are_in_slots_is_answered_at_once() -> None:
    bench = CoreBench(slots=2)
    bench.activate("a", "b")
    actions = bench.controller.handle(ActivateBatch("r", ("b", "a", "b")), bench.now + 1)
    places = [(a.name, a.slot, a.generation) for a in map(bench.adapter, "ba")]
    done = BatchDone("r", tuple(Placement(*place) for place in places))
    assert actions == [SendReply(done)]

"""A restarted controller, a link with gaps, a log without its tail: what the inventory corrects."""

from controller.core.controller import Controller
from controller.core.limits import Limits
from messages import records, reports, requests
from messages.errors import ErrorCode
from messages.requests import ActivateAdapter, AdapterDone, LoadAdapter
from tests.support.simulation.engine import Held
from tests.support.simulation.rules_examples import Bench


def test_a_restarted_controller_touches_nothing_that_agrees() -> None:
    bench = Bench(slots=2)
    bench.activate("a", "b")
    running = bench.generate("a")
    before = bench.facts()
    bench.restart_controller()
    bench.settle()
    assert bench.facts() == before
    assert not bench.channel
    bench.end_generation(running)
    assert bench.reply(running).finish_reason == "stop"


def test_nothing_is_asked_of_an_engine_before_its_inventory() -> None:
    bench = Bench()
    bench.restart_controller()
    bench.ask(ActivateAdapter, "a")
    assert not bench.world.operations
    bench.settle()
    assert bench.state("a") == "gpu-slot"
    bench.restart_controller()
    batch = bench.ask(requests.ActivateBatch, ("a",))
    running = [bench.ask(records.GenerationRequested, name) for name in ("a", None)]
    assert not bench.world.operations
    bench.settle()
    assert isinstance(bench.reply(batch), requests.BatchDone)
    assert all(bench.world.waiting[request].op for request in running)


def test_commands_lost_on_their_way_are_sent_again_under_their_number() -> None:
    bench = Bench()
    request = bench.ask(ActivateAdapter, "a")
    (lost,) = bench.channel
    bench.cut_link(1)
    bench.transmit(1)
    bench.deliver(1)
    assert bench.channel == [lost]
    bench.settle()
    assert isinstance(bench.reply(request), AdapterDone)


def test_a_restarted_controller_corrects_what_its_log_lost() -> None:
    bench = Bench(slots=2)
    bench.activate("a")
    inputs = len(bench.inputs)
    bench.activate("b")
    bench.generate("b")
    bench.restart_controller(lost_inputs=len(bench.inputs) - inputs)
    # The generation that nobody knows is stopped first, then the stranger is driven out.
    assert "b" not in bench.world.names
    bench.settle()
    assert [type(c).__name__ for c in bench.channel] == []
    (op,) = bench.engine.running  # type: ignore[union-attr]
    assert bench.engine.running[op].stopped  # type: ignore[union-attr]
    assert not bench.world.ready
    bench.complete(0)
    bench.settle()
    assert {h.name for h in bench.engine.held.values()} == {"a"}  # type: ignore[union-attr]
    assert bench.in_slots() == {"a"}
    bench.activate("b")


def test_a_number_that_the_engine_has_for_other_content_is_left_to_it() -> None:
    bench = Bench(slots=2, engine=False)
    bench.ask(ActivateAdapter, "a")
    assert bench.adapter("a").id == 1
    stranger = Held(1, "b", "b", bench.files["b"], "gpu-slot", True, 0, 7)
    bench.start_engine(held={1: stranger}, seen={20}, generations_seen={7})
    bench.settle()
    assert bench.adapter("a").id != 1
    assert bench.state("a") == "gpu-slot"
    assert [h.content.fingerprint for h in bench.engine.held.values()] == ["content of a"]  # type: ignore[union-attr]


def test_an_inventory_that_contradicts_itself_is_refused() -> None:
    good = reports.InventoryAdapter(1, "a", "a", "f", 8, "gpu-slot", 0, 1, 10, 10)
    wrong = {
        "twice": (good, good),
        "of 2 slots": (reports.InventoryAdapter(1, "a", "a", "f", 8, "gpu-slot", 5, 1, 10, 10),),
        "is told to be": (reports.InventoryAdapter(1, "a", "a", "f", 8, "evicted", -1, 0, 10, 10),),
        "in slot -1": (reports.InventoryAdapter(1, "a", "a", "f", 8, "gpu-slot", -1, 0, 10, 10),),
    }
    for text, adapters in wrong.items():
        controller = Controller(Limits(slots_max=2), checked=True)
        controller.handle(records.ControllerStarted(1), 1)
        inventory = reports.EngineInventory("e", 1, "m", 2, 100, 0, (), adapters)
        actions = controller.handle(inventory, 2)
        assert text in str(actions)
        assert controller.world.engine is None


def test_a_generation_whose_prompt_is_lost_is_forgotten_and_may_be_asked_again() -> None:
    bench = Bench()
    bench.activate("a")
    request = bench.ask(records.GenerationRequested, "a")
    bench.restart_controller()
    bench.settle()
    assert request not in bench.world.waiting
    assert bench.reply(request) is None
    assert (bench.adapter("a").leases, bench.adapter("a").uses) == (0, 1)
    bench.handle(records.GenerationRequested(request, "a"))
    bench.settle()
    bench.end_generation(request)
    assert bench.reply(request).finish_reason == "stop"


def test_a_stop_that_was_lost_is_repeated() -> None:
    bench = Bench()
    bench.activate("a")
    running = bench.generate("a")
    bench.ask(requests.CancelGeneration, running)
    bench.restart_controller()
    bench.settle()
    bench.end_generation(running)
    assert bench.reply(running).finish_reason == "cancelled"


def test_a_cancelled_generation_that_never_arrived_is_not_begun_again() -> None:
    bench = Bench()
    bench.activate("a")
    lost = bench.ask(records.GenerationRequested, "a")
    bench.channel.clear()
    bench.ask(requests.CancelGeneration, lost)
    bench.cut_link(0)
    bench.settle()
    assert bench.reply(lost).finish_reason == "cancelled"
    assert not bench.engine.running  # type: ignore[union-attr]


def test_a_generation_that_was_lost_with_a_replaced_version_is_refused() -> None:
    bench = Bench()
    bench.activate("a")
    lost = bench.ask(records.GenerationRequested, "a")
    del bench.channel[-1]
    bench.get(LoadAdapter, "a", "b", replace=True)
    bench.cut_link(0)
    bench.settle()
    reply = bench.reply(lost)
    assert (reply.code, "replaced" in reply.message) == (ErrorCode.ENGINE_GONE, True)
    assert [a.path for a in bench.world.adapters.values()] == ["b"]


def test_a_generation_that_was_lost_is_begun_again() -> None:
    bench = Bench()
    bench.activate("a")
    lost = bench.ask(records.GenerationRequested, "a")
    del bench.channel[-1]
    bench.get(LoadAdapter, "b")
    bench.cut_link(0)
    bench.settle()
    bench.end_generation(lost)
    assert bench.reply(lost).finish_reason == "stop"


def test_a_replacement_whose_report_was_lost_with_the_logs_tail_takes_place() -> None:
    bench = Bench()
    bench.activate("a")
    request = bench.ask(LoadAdapter, "a", "b", replace=True)
    for _ in range(2):
        bench.transmit(1)
        bench.complete(0)
        bench.deliver(1)
    bench.unacknowledged.clear()
    bench.restart_controller(lost_inputs=1)
    assert bench.adapter("a").path == "a"
    bench.settle()
    assert bench.reply(request).state == "cpu-cached"
    assert (bench.adapter("a").path, bench.state("a")) == ("b", "gpu-slot")
    assert len(bench.world.adapters) == 1

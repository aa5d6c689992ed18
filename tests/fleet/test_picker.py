"""The rule that orders docks: laws of single decisions, and traffic against simpler rules."""

from statistics import mean

import pytest

from benchmarks.fleet_simulation import Traffic, simulate
from loradock.fleet.catalogue import WantedAdapter
from loradock.fleet.picker import (
    GAIN_OF_OTHERS,
    NAME_CHARS_KEPT,
    UNSEEN_S,
    Decision,
    Load,
    Picker,
    Seen,
)

DOCKS = ("a:1", "b:1", "c:1")
LOAD = Load(0, 2, 0.1, 0.4, 0.05, 0.05)


def picker(**states: dict[str, str]) -> Picker:
    """Docks that report adapters' states; `a={"upper": "pinned"}` is of the dock a:1."""
    found = Picker()
    found.set_docks(dict.fromkeys(DOCKS, 2))
    found.set_wanted({name: WantedAdapter(name) for name in ("upper", "lower", "other")})
    for dock in DOCKS:
        seen = {name: Seen(state) for name, state in states.get(dock[0], {}).items()}
        found.on_snapshot(dock, seen)
        found.on_load(dock, LOAD, 0.0)
    return found


def busy(found: Picker, dock: str, requests: int, now: float = 0.0) -> None:
    found.on_load(dock, Load(requests, 2, 0.1, 0.4, 0.05, 0.05), now)


def first(found: Picker, name: str, now: float = 0.0) -> str:
    return found.pick(name, now).docks[0]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # In a slot, then the cheapest step, then any.
        ({"b": {"upper": "gpu-slot"}, "c": {"upper": "pinned"}}, ["b:1", "c:1", "a:1"]),
        ({"a": {"upper": "cpu-cached"}, "b": {"upper": "gpu-slot"}}, ["b:1", "a:1", "c:1"]),
    ],
)
def test_docks_are_tried_in_the_order_of_their_costs(
    states: dict[str, dict[str, str]], expected: list[str]
) -> None:
    assert picker(**states).pick("upper", 0.0).docks == expected


def test_a_home_is_left_only_for_a_gain_that_exceeds_the_load() -> None:
    work_s = 0.5
    for gain_s, leaves in ((work_s, False), (GAIN_OF_OTHERS * work_s + 0.5, True)):
        found = picker(b={"upper": "gpu-slot"})
        assert first(found, "upper") == "b:1"
        busy(found, "b:1", int(gain_s / 0.1), UNSEEN_S * 2)
        decision = found.pick("upper", UNSEEN_S * 2)
        assert (decision.docks[0] != "b:1") == leaves, decision
        assert ("load elsewhere" in decision.reason) == leaves


@pytest.mark.parametrize("copies", [0, 2])
def test_a_home_that_demand_does_not_need_is_given_up_unless_it_is_wanted(copies: int) -> None:
    found = picker(b={"upper": "gpu-slot"})
    found.set_wanted({"upper": WantedAdapter("upper", copies=copies)})
    first(found, "upper")
    busy(found, "b:1", 1000, 1.0)
    other = first(found, "upper", 1.0)
    assert other != "b:1"
    found.on_adapter(other, "upper", Seen("gpu-slot"))
    # Its home again, which costs less now: the other is not needed.
    busy(found, "b:1", 0, 2.0)
    busy(found, other, 1, 2.0)
    assert first(found, "upper", 2.0) == "b:1"
    # As if it had been evicted there; a home would be used, for its shorter queue.
    found.on_adapter(other, "upper", Seen("cpu-cached"))
    busy(found, "b:1", 5, 3.0)
    busy(found, other, 0, 3.0)
    assert (first(found, "upper", 3.0) == other) == (copies == 2)


def test_own_decisions_count_before_any_report() -> None:
    found = picker()
    for dock in DOCKS:
        found.on_adapter(dock, "upper", Seen("gpu-slot"))
    adapter = [first(found, "base") for _ in range(9)]
    assert {dock: adapter.count(dock) for dock in DOCKS} == dict.fromkeys(DOCKS, 3)


def test_one_dock_loads_an_adapter_for_many_requests_at_once() -> None:
    found = picker()
    assert len({first(found, "upper") for _ in range(8)}) == 1


def test_new_adapters_go_where_demand_is_least() -> None:
    found = picker()
    assert {first(found, name) for name in ("upper", "lower", "other")} == {*DOCKS}


def test_a_dock_that_is_lost_or_not_ready_or_gone_gets_nothing() -> None:
    found = picker(b={"upper": "gpu-slot"})
    found.on_load("b:1", Load(unready="stopping"), 0.0)
    assert "b:1" not in found.pick("upper", 0.0).docks
    found.on_load("b:1", LOAD, 0.0)
    assert first(found, "upper") in DOCKS
    found.lose("b:1")
    assert "b:1" not in found.pick("upper", 0.0).docks
    found.set_docks({"c:1": 2})
    assert found.pick("upper", 0.0).docks == ["c:1"]
    found.set_docks({})
    assert found.pick("upper", 0.0) == Decision("upper", [], "no dock that is ready can serve it")
    # A new dock gets nothing before its snapshot and its first report.
    found.set_docks({"d:1": 2})
    assert found.pick("upper", 0.0).docks == []


def test_a_dock_with_other_files_is_left_out_and_says_so() -> None:
    found = picker()
    found.set_wanted({"upper": WantedAdapter("upper", "good")})
    found.on_adapter("a:1", "upper", Seen("gpu-slot", "bad"))
    found.on_adapter("b:1", "upper", Seen("evicted", "good"))
    assert {*found.pick("upper", 0.0).docks} == {"b:1", "c:1"}
    refusals = found.shown(0.0).refusals
    assert refusals == {"upper": {"a:1": "its files have the fingerprint bad, not good"}}


def test_an_adapter_outside_the_catalogue_is_served_where_it_was_loaded() -> None:
    found = picker(c={"private": "evicted"})
    assert found.pick("private", 0.0).docks == ["c:1"]
    found.on_adapter("c:1", "private", None)
    assert len(found.pick("private", 0.0).docks) == 3


def test_traffic_loads_less_than_by_turns_and_by_hashing_and_is_balanced() -> None:
    seeds = range(2)
    results = {
        rule: [simulate(rule, Traffic(4000, 160.0), seed) for seed in seeds]
        for rule in ("picker", "round-robin", "hashing")
    }
    loads = {rule: mean(one.activations for one in found) for rule, found in results.items()}
    assert loads["picker"] <= 0.55 * loads["round-robin"], (loads, seeds)
    assert loads["picker"] <= 1.0 * loads["hashing"], (loads, seeds)
    assert mean(one.busiest for one in results["picker"]) <= 0.40


def test_a_hot_adapter_gets_the_throughput_of_all_docks() -> None:
    hot = Traffic(2000, 1000.0, hot=0.5)
    assert simulate("picker", hot, docks=1).seconds >= 2.5 * simulate("picker", hot).seconds


def test_the_clock_of_a_machine_that_runs_for_years_is_no_matter() -> None:
    found = picker(a={"upper": "gpu-slot"})
    year_s = 365 * 86400.0
    assert sorted(first(found, "", year_s + one) for one in range(3)) == sorted(DOCKS)
    assert first(found, "upper", 2 * year_s) == "a:1"


def test_nothing_is_kept_of_docks_that_are_gone() -> None:
    found = Picker()
    for number in range(50):
        dock = f"pod-{number}:1"
        found.set_docks({dock: 2})
        found.set_wanted({"upper": WantedAdapter("upper")})
        found.on_snapshot(dock, {f"own-{number}": Seen("gpu-slot"), "upper": Seen("gpu-slot")})
        found.on_load(dock, LOAD, 0.0)
        assert first(found, "upper") == first(found, f"own-{number}") == dock
        # As a stream ends before the lease; the last dock is still followed.
        if number < 49:
            found.lose(dock)
    assert found._adapters.keys() == {"upper", "own-49"}
    assert found._adapters["upper"].homes == ["pod-49:1"]
    assert found._docks.keys() == {"pod-49:1"}


def test_nothing_is_kept_of_names_that_are_gone() -> None:
    found = picker()
    for number in range(50):
        name = f"own-{number}"
        found.set_wanted({name: WantedAdapter(name)})
        # It is not there before it is removed again.
        first(found, name)
    found.set_wanted({})
    assert not any(dock.loading for dock in found._docks.values())
    assert not found._adapters


def test_of_a_name_that_a_client_has_invented_only_its_begin_is_kept() -> None:
    found = picker()
    found.pick("x" * 1_000_000, 0.0)
    assert [len(one.adapter) for one in found.decisions] == [NAME_CHARS_KEPT]


def test_a_dock_that_registers_with_other_slots_gets_its_share() -> None:
    found = picker()
    found.set_docks({"a:1": 2, "b:1": 6, "c:1": 2})
    # The base model goes to the shortest queue per slot.
    chosen = [first(found, "") for _ in range(10)]
    assert {dock: chosen.count(dock) for dock in DOCKS} == {"a:1": 2, "b:1": 6, "c:1": 2}


def test_an_adapter_that_was_removed_everywhere_is_forgotten() -> None:
    found = picker(a={"own": "gpu-slot"})
    known = len(found._adapters)
    found.on_adapter("a:1", "own", None)
    assert not found.knows("own")
    found.set_wanted({"upper": WantedAdapter("upper")})
    assert len(found._adapters) == known - 3


def test_an_adapter_that_was_removed_while_its_dock_was_lost_is_forgotten() -> None:
    found = picker(a={"own": "gpu-slot"})
    found.lose("a:1")
    found.on_snapshot("a:1", {})
    assert found._adapters.keys() == {"upper", "lower", "other"}

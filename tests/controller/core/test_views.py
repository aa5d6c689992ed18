"""Views equal the world, change nothing, and stay true to their moment."""

from typing import Any

import pytest

from loradock.controller.core.actions import SendCommand
from loradock.controller.core.context import Refusal
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.controller.core.views import AdapterPages, list_adapters, show_adapter, show_status
from loradock.messages import commands, records, reports
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.simulation.core_bench import CoreBench

LIMITS = Limits(max_loras=2, max_cpu_loras=5)
ENGINE = reports.EngineInventory("e", 4242, "tiny", 2, 1 << 20)


class SynchronousDeployment:
    """A core whose engine completes every command at once, except generations."""

    def __init__(self) -> None:
        self.controller = Controller(LIMITS, checked=True)
        self.time_ns = 0
        self.generations: list[commands.StartGeneration] = []
        self.content = "1"
        for message in (records.ControllerStarted(9), ENGINE):
            self.handle(message)

    def handle(self, message: Any) -> None:
        self.time_ns += 1
        for action in self.controller.handle(message, self.time_ns):
            if isinstance(action, SendCommand):
                self._execute(action.message)

    def _execute(self, command: Any) -> None:
        match command:
            case commands.StartGeneration():
                self.generations.append(command)
            case commands.CheckAdapter():
                size = (8, 100, 50)
                self.handle(reports.AdapterChecked(command.op, self.content, *size))
            case commands.LoadWeights():
                self.handle(reports.WeightsLoaded(command.op))
            case commands.StageWeights():
                self.handle(reports.WeightsStaged(command.op))
            case commands.WriteSlot():
                self.handle(reports.SlotWritten(command.op))

    def list(self) -> dict[tuple[str, bool], rq.AdapterView]:
        listed = list_adapters(self.controller.world, rq.ListAdapters("l"))
        assert listed.request_id == "l"
        assert listed.events_seq == self.controller.world.events_seq
        return {(view.adapter, view.retired): view for view in listed.adapters}


@pytest.fixture
def deployment() -> SynchronousDeployment:
    deployment = SynchronousDeployment()
    deployment.handle(rq.ActivateAdapter("r-1", "zeta"))
    deployment.handle(rq.HoldAdapter("r-2", "alpha"))
    deployment.handle(rq.StageAdapter("r-3", "mu"))
    return deployment


def test_adapters_are_listed_by_name_with_their_counters(deployment: SynchronousDeployment) -> None:
    listed = deployment.list()
    assert [name for name, _ in listed] == ["alpha", "mu", "zeta"]
    assert [view.state for view in listed.values()] == ["gpu-slot", "pinned", "gpu-slot"]
    alpha = listed["alpha", False]
    assert (alpha.held, alpha.slot, alpha.generation > 0) == (True, 1, True)
    assert (alpha.host_bytes, alpha.pinned_bytes, alpha.device_bytes) == (0, 50, 50)
    assert (alpha.uses, alpha.loads, alpha.fingerprint, alpha.rank) == (0, 1, "1", 8)
    assert listed["mu", False].device_bytes == 0


def test_times_in_views_and_events_are_labels_of_their_epoch(
    deployment: SynchronousDeployment,
) -> None:
    used_ns = {name: view.last_used_ns for (name, _), view in deployment.list().items()}
    deployment.handle(records.ControllerStarted(10, 5_000))
    deployment.handle(ENGINE)
    deployment.handle(rq.ActivateAdapter("r-4", "zeta"))
    world, later_ns = deployment.controller.world, deployment.time_ns
    assert world.time_ns == later_ns
    found = {name: view.last_used_ns for (name, _), view in deployment.list().items()}
    assert found == used_ns | {"zeta": later_ns + 5_000}
    [resumed, *_] = deployment.controller.handle(records.ControllerStarted(11, -7), later_ns + 10)
    assert resumed.message.time_ns == later_ns + 3


def test_a_replaced_version_is_shown_next_to_the_new_one(deployment: SynchronousDeployment) -> None:
    deployment.handle(records.GenerationRequested("g", "zeta"))
    deployment.content = "2"
    deployment.handle(rq.LoadAdapter("r-4", "zeta", "elsewhere", replace=True))
    listed = deployment.list()
    assert list(listed) == [("alpha", False), ("mu", False), ("zeta", False), ("zeta", True)]
    shown = show_adapter(deployment.controller.world, rq.ShowAdapter("s", "zeta"))
    assert shown.adapter == listed["zeta", False]
    assert shown.retired == (listed["zeta", True],)
    assert (shown.adapter.fingerprint, shown.retired[0].fingerprint) == ("2", "1")
    assert (shown.adapter.leases, shown.retired[0].leases) == (0, 1)


def test_an_unknown_adapter_is_refused(deployment: SynchronousDeployment) -> None:
    with pytest.raises(Refusal) as refused:
        show_adapter(deployment.controller.world, rq.ShowAdapter("s", "missing"))
    assert refused.value.code == ErrorCode.UNKNOWN_ADAPTER
    assert "missing" in refused.value.message


def test_the_status_has_the_totals(deployment: SynchronousDeployment) -> None:
    deployment.handle(records.GenerationRequested("g", None))
    deployment.handle(rq.ReleaseAdapter("r-5", "missing"))
    status = show_status(deployment.controller, rq.ShowStatus("s"))
    core = deployment.controller.world
    assert (status.request_id, status.epoch, status.seq) == ("s", 9, core.seq)
    assert (status.digest, status.events_seq) == (core.digest(), core.events_seq)
    assert (status.engine_id, status.engine_pid, status.model) == ("e", 4242, "tiny")
    assert (status.adapters, status.requests, status.operations) == (3, 1, 1)
    assert (status.answered, status.refused) == (4, 1)
    tiers = {tier.name: (tier.count, tier.count_max, tier.size_bytes) for tier in status.tiers}
    assert tiers["host"] == (3, 5, 0)
    assert (tiers["pinned"][2], tiers["device"]) == (150, (2, 2, 100))


def test_an_inference_runs_or_waits_in_the_engine_or_for_a_slot(
    deployment: SynchronousDeployment,
) -> None:
    for number, name in enumerate((None, "mu", "mu", "zeta")):
        deployment.handle(records.GenerationRequested(f"g-{number}", name))
    world = deployment.controller.world
    operations = {key: one.op for key, one in world.pending_requests.items()}
    # The engine has those of the base model and of an adapter in a slot; one of them has begun.
    served = [op for op in operations.values() if op]
    message = rq.ShowStatus("s", uses=True)
    status = show_status(deployment.controller, message, frozenset((served[0], 999)))
    assert (status.running, status.queued) == (1, len(served) - 1)
    assert status.running + status.queued + status.waiting == len(operations) == 4
    by_name = {use.adapter: use for use in status.uses}
    assert sum(use.running + use.queued + use.waiting for use in status.uses) == 3
    assert {name: (one.leases, one.waiters) for name, one in by_name.items()} == {
        name: (view.leases, view.waiting)
        for (name, retired), view in deployment.list().items()
        if name in by_name and not retired
    }
    assert sum(count for _, count in status.states) == status.adapters
    assert show_status(deployment.controller, rq.ShowStatus("s")).uses == ()


def test_uses_are_those_of_names_that_the_client_may_see(
    deployment: SynchronousDeployment,
) -> None:
    message = rq.ShowStatus("s", uses=True)
    everything = show_status(deployment.controller, message).uses
    seen = show_status(deployment.controller, message, sees="mu".__eq__).uses
    assert seen == tuple(use for use in everything if use.adapter == "mu")
    assert len(everything) > len(seen)


def test_without_an_engine_its_fields_are_empty() -> None:
    status = show_status(Controller(LIMITS), rq.ShowStatus("s"))
    assert (status.engine_id, status.engine_pid, status.model) == ("", 0, "")


def test_a_view_changes_nothing_and_stays_as_it_was(deployment: SynchronousDeployment) -> None:
    before = deployment.controller.digest()
    listed = deployment.list()
    show_adapter(deployment.controller.world, rq.ShowAdapter("s", "mu"))
    show_status(deployment.controller, rq.ShowStatus("s"))
    assert deployment.controller.world.digest_from_scratch() == before
    deployment.handle(rq.ReleaseAdapter("r-6", "alpha"))
    assert listed["alpha", False].held
    assert not deployment.list()["alpha", False].held


def pages_of(pages: AdapterPages, limit: int, between: Any = lambda: None) -> list[Any]:
    """Return the adapters of all pages; `between` is called after each page."""
    found: list[rq.AdapterView] = []
    more = True
    while more:
        after = (found[-1].adapter, found[-1].adapter_id) if found else ("", 0)
        page: Any = pages.answer(rq.ListAdapters("l", *after, limit))
        assert 0 < len(page.adapters) <= limit
        found += page.adapters
        more = page.more
        between()
    return found


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 256])
def test_the_pages_together_are_the_list(deployment: SynchronousDeployment, limit: int) -> None:
    deployment.handle(records.GenerationRequested("g", "zeta"))
    deployment.content = "2"
    deployment.handle(rq.LoadAdapter("r-4", "zeta", "elsewhere", replace=True))
    found = pages_of(AdapterPages(deployment.controller.world), limit)
    found.sort(key=lambda view: (view.adapter, view.retired))
    assert found == list(deployment.list().values())


def test_adapters_that_stay_are_on_exactly_one_page_of_a_changing_list(
    deployment: SynchronousDeployment,
) -> None:
    stay, changes = {"alpha", "mu", "zeta"}, iter(range(100))

    def change() -> None:
        number = next(changes)
        deployment.handle(rq.LoadAdapter(f"c-{number}", f"{'an'[number % 2]}-{number}"))
        deployment.handle(rq.EvictAdapter(f"d-{number}", "mu"))

    found = pages_of(AdapterPages(deployment.controller.world), 1, change)
    names = [view.adapter for view in found]
    assert sorted(name for name in names if name in stay) == sorted(stay)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("limit", [1, rq.LIST_PAGE_ADAPTERS_MAX])
def test_a_page_has_as_many_adapters_as_requested(
    deployment: SynchronousDeployment, limit: int
) -> None:
    for number in range(rq.LIST_PAGE_ADAPTERS_MAX):
        deployment.handle(rq.LoadAdapter(f"p-{number}", f"p-{number}"))
    pages = AdapterPages(deployment.controller.world)
    page = pages.answer(rq.ListAdapters("l", limit=limit))
    assert isinstance(page, rq.AdaptersPage)
    assert (len(page.adapters), page.more) == (limit, True)


def test_a_list_beyond_a_page_is_refused_to_clients_without_pages(
    deployment: SynchronousDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = AdapterPages(deployment.controller.world)
    monkeypatch.setattr(rq, "LIST_PAGE_ADAPTERS_MAX", 3)
    request = rq.ListAdapters("l")
    assert pages.answer(request) == list_adapters(deployment.controller.world, request)
    monkeypatch.setattr(rq, "LIST_PAGE_ADAPTERS_MAX", 2)
    with pytest.raises(Refusal, match="3 adapters are known") as refused:
        pages.answer(request)
    assert refused.value.code == ErrorCode.MALFORMED


def test_a_snapshot_for_a_subscriber_is_the_first_page() -> None:
    bench = CoreBench()
    bench.request(rq.LoadAdapter, "a")
    fetched = AdapterPages(bench.world).snapshot(rq.FetchEvents("q", 1))
    assert [view.adapter for view in fetched.adapters] == ["a"]
    assert (fetched.events_seq, fetched.more) == (bench.world.events_seq, False)


def test_requests_that_only_prepare_an_adapter_are_no_inference() -> None:
    bench = CoreBench(engine=False)
    bench.send(rq.LoadAdapter, "a")
    status = show_status(bench.controller, rq.ShowStatus("q"))
    assert (status.requests, status.running, status.queued, status.waiting) == (1, 0, 0, 0)

"""The files with the docks, which the proxy reads: who gets requests, and who is still checked."""

import asyncio
import json
from pathlib import Path

from loradock.fleet.envoy import DockFiles, configuration, write_docks

DOCK, OTHER = "10.0.0.1:8001", "10.0.0.2:8001"


def written(directory: Path) -> tuple[set[str], set[str]]:
    """Return the docks that get requests, and those that have a cluster."""
    clusters = json.loads((directory / "clusters.json").read_text())["resources"]
    (docks,) = json.loads((directory / "docks.json").read_text())["resources"]
    endpoints = [one for group in docks["endpoints"] for one in group["lb_endpoints"]]
    return (
        {one["metadata"]["filter_metadata"]["loradock"]["cluster"] for one in endpoints},
        {one["name"] for one in clusters},
    )


def test_a_dock_that_leaves_is_checked_for_a_while_after_its_last_end(tmp_path: Path) -> None:
    async def run() -> None:
        files = DockFiles(tmp_path)
        files.set_docks([DOCK, OTHER])
        assert written(tmp_path) == ({DOCK, OTHER}, {DOCK, OTHER})
        files.set_docks([OTHER])
        assert written(tmp_path) == ({OTHER}, {DOCK, OTHER})
        first = files._left[DOCK]
        # It is back, and leaves again: the time since then counts.
        files.set_docks([DOCK, OTHER])
        assert first.cancelled()
        files.set_docks([OTHER])
        assert not files._left[DOCK].cancelled()
        files._forget(DOCK)
        assert written(tmp_path) == ({OTHER}, {OTHER})
        files.set_docks([])
        assert written(tmp_path) == (set(), {OTHER})

    asyncio.run(run())


def test_slow_clients_take_neither_docks_nor_the_picker_from_others(tmp_path: Path) -> None:
    write_docks(tmp_path, [DOCK])
    (dock,) = json.loads((tmp_path / "clusters.json").read_text())["resources"]
    found = configuration(tmp_path, "127.0.0.1", 80, None)["static_resources"]["clusters"]
    for cluster in (dock, *found):
        (limits,) = cluster["circuit_breakers"]["thresholds"]
        # Envoy's own is 1,024 of each.
        assert min(limits.values()) >= 100_000, cluster["name"]

"""A fleet of many machines, for the commands: its file, its catalogue, and its errors."""

# Heavy modules are imported when a command runs: help and completion answer at once. The fleet's
# own libraries are an extra.
# ruff: noqa: PLC0415

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from loradock.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from loradock.fleet.catalogue import Catalogue
    from loradock.fleet.config import FleetConfig
    from loradock.fleet.status import FleetShown
    from loradock.messages.views import AdapterView

FleetFile = Annotated[
    Path,
    typer.Option(
        "--fleet",
        envvar="LORADOCK_FLEET",
        metavar="FILE",
        help="The fleet's file, which `loradock fleet init` has written.",
    ),
]
FLEET_FILE: Final = Path("fleet.toml")

AUTO_COPIES: Final = 0
"""Stands for as many copies as demand needs."""

_DECISIONS_SHOWN: Final = 10

Found = TypeVar("Found")


@contextmanager
def fleet_errors() -> Iterator[None]:
    """End the command for a fleet that can't be used, or whose libraries are not installed."""
    try:
        from loradock.fleet.catalogue import CatalogueError
        from loradock.fleet.config import FleetError

        yield
    except ModuleNotFoundError as error:
        raise CommandError(
            ExitCode.USAGE,
            f"a fleet needs {error.name}, which is not installed here",
            "install it with pip install 'loradock[fleet]'",
        ) from error
    except CatalogueError as error:
        raise CommandError(
            ExitCode.UNREACHABLE, str(error), "is etcd running, and does most of it?"
        ) from error
    except FleetError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def with_catalogue(
    file: Path, use: "Callable[[Catalogue, FleetConfig], Awaitable[Found]]"
) -> Found:
    """Return what `use` returns for the catalogue of a fleet; errors end the command."""
    with fleet_errors():
        from loradock.fleet.catalogue import Catalogue
        from loradock.fleet.config import read_config

        async def run() -> Found:
            config = read_config(file)
            async with Catalogue(config) as catalogue:
                return await use(catalogue, config)

        return asyncio.run(run())


def want(
    file: Path, name: str, path: str, view: "AdapterView", copies: int, *, replace: bool
) -> None:
    """Write an adapter that this server has loaded to the catalogue of a fleet.

    Raises `CommandError` if the fleet has other content under the name, unless `replace`.
    """

    async def write(catalogue: "Catalogue", _: "FleetConfig") -> bool:
        from loradock.fleet.catalogue import WantedAdapter

        before = await catalogue.get(WantedAdapter, name)
        is_other = before is not None and before.record.fingerprint != view.fingerprint
        if is_other and not replace:
            return False
        wanted = WantedAdapter(path, view.fingerprint, view.rank, view.held, copies)
        return await catalogue.put(name, wanted, changed=before.changed if before else 0)

    if not with_catalogue(file, write):
        raise CommandError(
            ExitCode.REFUSED,
            f"the fleet has other content under the name {name}, or it was changed just now",
            "add --replace to replace it in all docks",
        )


def status_tables(found: "FleetShown") -> "Iterator[Table]":
    """Yield what `loradock fleet status` prints."""
    from rich.table import Table

    docks = Table("dock", "model", "slots", "epoch", box=None)
    for dock in found.docks:
        docks.add_row(dock.address, dock.model, str(dock.weight), str(dock.epoch))
    yield docks
    adapters = Table("adapter", "copies", "hold", "path", box=None)
    for one in found.adapters:
        copies = str(one.copies) if one.copies else "auto"
        adapters.add_row(one.name, copies, "yes" if one.hold else "", one.path)
    yield adapters
    for front in found.fronts:
        if front.picker is None:
            yield Table(f"front {front.address}: {front.problem}", box=None)
            continue
        seen = Table(f"front {front.address}", "ready", "requests", "in slots", "per s", box=None)
        for address, load in sorted(front.picker.docks.items()):
            ready, rate = "yes" if load.ready else "no", f"{load.rate:.1f}"
            seen.add_row(address, ready, str(load.requests), str(load.in_slots), rate)
        yield seen
        copies_table = Table("in slots of", "docks", "left out", box=None)
        for name in sorted({*front.picker.copies, *front.picker.refusals}):
            refused = front.picker.refusals.get(name, {})
            left_out = "; ".join(f"{dock}: {why}" for dock, why in sorted(refused.items()))
            copies_table.add_row(name, " ".join(front.picker.copies.get(name, ())), left_out)
        yield copies_table
        decisions = Table("last decisions", "dock", "reason", box=None)
        for decision in front.picker.decisions[-_DECISIONS_SHOWN:]:
            chosen = decision.docks[0] if decision.docks else "-"
            decisions.add_row(decision.adapter or "(base model)", chosen, decision.reason)
        yield decisions

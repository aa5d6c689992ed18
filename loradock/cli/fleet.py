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
    from loradock.cli.output import Renderable
    from loradock.fleet.catalogue import Catalogue
    from loradock.fleet.config import FleetConfig
    from loradock.fleet.picker import PickerShown
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


def status_tables(found: "FleetShown") -> "Iterator[Renderable]":
    """Yield what `loradock fleet status` prints."""
    from loradock.cli.output import FittingTable, safe

    yield FittingTable(
        ("dock", "model", "slots", "epoch"),
        ((dock.address, dock.model, str(dock.weight), str(dock.epoch)) for dock in found.docks),
    )
    yield FittingTable(
        ("adapter", "copies", "hold", "path"),
        (
            (one.name, str(one.copies or "auto"), "yes" if one.hold else "", one.path)
            for one in found.adapters
        ),
    )
    for front in found.fronts:
        if front.picker is None:
            yield safe(f"front {front.address}: {front.problem}")
        else:
            yield from _picker_tables(front.address, front.picker)


def _picker_tables(address: str, picker: "PickerShown") -> "Iterator[Renderable]":
    from loradock.cli.output import FittingTable

    yield FittingTable(
        (f"front {address}", "ready", "requests", "in slots", "per s"),
        (
            (
                *(dock, "yes" if load.ready else "no"),
                *(str(load.requests), str(load.in_slots), f"{load.rate:.1f}"),
            )
            for dock, load in sorted(picker.docks.items())
        ),
    )
    refusals = {
        name: "; ".join(f"{dock}: {why}" for dock, why in sorted(refused.items()))
        for name, refused in picker.refusals.items()
    }
    yield FittingTable(
        ("in slots of", "docks", "left out"),
        (
            (name, " ".join(picker.copies.get(name, ())), refusals.get(name, ""))
            for name in sorted({*picker.copies, *picker.refusals})
        ),
    )
    yield FittingTable(
        ("last decisions", "dock", "reason"),
        (
            (one.adapter or "(base model)", one.docks[0] if one.docks else "-", one.reason)
            for one in picker.decisions[-_DECISIONS_SHOWN:]
        ),
    )

"""What `loradock fleet status` shows: the catalogue, and what each front's picker knows."""

import ssl

import httpx
import msgspec
from msgspec import Struct

from loradock.fleet.catalogue import Catalogue, Dock, Front, WantedAdapter
from loradock.fleet.config import FleetConfig
from loradock.fleet.picker import PickerShown
from loradock.fleet.processor import STATUS_PATH


class ShownDock(Dock, frozen=True, kw_only=True):
    """A dock; `epoch` grows with each of its registrations."""

    epoch: int


class ShownAdapter(WantedAdapter, frozen=True, kw_only=True):
    """An adapter that is wanted."""

    name: str


class ShownFront(Struct, frozen=True):
    """A front, with what its picker knows; or the reason why it did not say so."""

    address: str
    picker: PickerShown | None = None
    problem: str = ""


class FleetShown(Struct, frozen=True):
    """A fleet: all docks, its fronts, and the adapters that are wanted."""

    docks: list[ShownDock]
    fronts: list[ShownFront]
    adapters: list[ShownAdapter]


async def read_status(catalogue: Catalogue, config: FleetConfig) -> FleetShown:
    """Return what the catalogue and the fronts have; raises `CatalogueError`."""
    docks = await catalogue.read(Dock)
    wanted = await catalogue.read(WantedAdapter)
    return FleetShown(
        [
            ShownDock(one.record.address, one.record.model, one.record.weight, epoch=one.epoch)
            for _, one in sorted(docks.items())
        ],
        [
            await _ask(one.record, config)
            for _, one in sorted((await catalogue.read(Front)).items())
        ],
        [
            ShownAdapter(
                one.record.path,
                one.record.fingerprint,
                one.record.rank,
                one.record.hold,
                one.record.copies,
                name=name,
            )
            for name, one in sorted(wanted.items())
        ],
    )


async def _ask(front: Front, config: FleetConfig) -> ShownFront:
    headers = {"Authorization": f"Bearer {config.key}"}
    try:
        async with httpx.AsyncClient(
            headers=headers, verify=_trusting(front), trust_env=False
        ) as http:
            answer = await http.get(f"{front.address}{STATUS_PATH}")
        answer.raise_for_status()
        return ShownFront(front.address, msgspec.json.decode(answer.content, type=PickerShown))
    except (httpx.HTTPError, OSError, msgspec.MsgspecError) as error:
        return ShownFront(front.address, problem=str(error) or type(error).__name__)


def _trusting(front: Front) -> ssl.SSLContext | bool:
    """Return a context that trusts the front's own certificate alone, whatever its names are."""
    if not front.certificate:
        return True
    context = ssl.create_default_context(cadata=front.certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context

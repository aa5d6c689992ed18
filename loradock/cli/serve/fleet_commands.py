"""The commands on a fleet of many machines: `fleet init`, `front`, `picker` and `status`."""

# Heavy modules are imported when a command runs: help and completion answer at once. The fleet's
# own libraries are an extra.
# ruff: noqa: PLC0415

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loradock.cli.context import AdapterArgument, AsJson, output_of, replace_process
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.fleet import FLEET_FILE, FleetFile, fleet_errors, status_tables, with_catalogue
from loradock.cli.gateway import check_certificate
from loradock.gateway.address import parse_address
from loradock.messages.engine_options import LogFormat
from loradock.processes.subprocesses import process_command

if TYPE_CHECKING:
    from loradock.fleet.catalogue import Catalogue
    from loradock.fleet.config import FleetConfig

app = typer.Typer()
fleet_app = typer.Typer(no_args_is_help=True, help="Serve with many machines behind one address.")
app.add_typer(fleet_app, name="fleet")


@fleet_app.command()
def init(
    ctx: typer.Context,
    members: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT],...",
            help="The machines that run etcd: 1, 3 or 5. Its port is 2379 unless it is given, and "
            "its peers use the next one.",
        ),
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Where to write the files.")
    ] = Path(),
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the fleet, if others use the same etcd.")
    ] = "loradock",
    as_json: AsJson = False,
) -> None:
    """Write fleet.toml, certificates, and a systemd unit for etcd on each of its machines."""
    output = output_of(ctx, as_json)
    with fleet_errors():
        from loradock.fleet.setup import parse_members, write_fleet
    try:
        files = write_fleet(directory, parse_members(members), name)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
    except FileExistsError as error:
        raise CommandError(
            ExitCode.REFUSED, f"{error.filename} exists", "name another directory: keys are kept"
        ) from error
    if as_json:
        output.document({"files": files})
        return
    typer.echo(
        f"{directory / 'fleet.toml'} and {len(files) - 1} other files are written. Copy them to "
        "/etc/loradock on each machine,\n"
        "start etcd on its machines with its unit, and then each dock:\n"
        "  loradock serve --http 0.0.0.0:8001 --join /etc/loradock/fleet.toml ..."
    )


@fleet_app.command()
def front(
    ctx: typer.Context,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to serve at.")
    ] = "127.0.0.1:8000",
    fleet: FleetFile = FLEET_FILE,
    ssl_certfile: Annotated[
        str, typer.Option(metavar="FILE", help="Certificate for HTTPS. Default: none.")
    ] = "",
    ssl_keyfile: Annotated[
        str, typer.Option(metavar="FILE", help="Private key for HTTPS. Default: none.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Serve a fleet at one address: the proxy Envoy, and the picker that chooses a dock for it."""
    output_of(ctx, as_json)
    host, port = _address("--http", http)
    certificate = _certificate(ssl_certfile, ssl_keyfile)
    with fleet_errors():
        from loradock.cli.serve.front import serve_front
        from loradock.fleet.config import read_config
        from loradock.fleet.picker_process import PickerConfig

        read_config(fleet)
        config = PickerConfig(
            fleet=str(fleet.resolve()),
            listen="",
            host=host,
            port=port,
            certificate=certificate,
            log_format=_log_format(as_json),
        )
        try:
            ended = serve_front(config, (ssl_certfile, ssl_keyfile) if ssl_certfile else None)
        except FileNotFoundError as error:
            raise CommandError(
                ExitCode.USAGE, str(error), "install it with pip install 'loradock[fleet]'"
            ) from error
    if ended.status:
        raise CommandError(ExitCode.FAILURE, f"the front has ended: {ended.reason}")


@fleet_app.command()
def picker(
    ctx: typer.Context,
    grpc: Annotated[
        str,
        typer.Option(
            "--grpc", metavar="HOST:PORT", help="Address at which gateways ask, over gRPC."
        ),
    ],
    fleet: FleetFile = FLEET_FILE,
    as_json: AsJson = False,
) -> None:
    """Choose docks for another gateway, as the endpoint picker of an InferencePool."""
    output_of(ctx, as_json)
    _address("--grpc", grpc)
    with fleet_errors():
        from loradock.fleet.config import read_config
        from loradock.fleet.picker_process import PickerConfig

        read_config(fleet)
        config = PickerConfig(
            fleet=str(fleet.resolve()), listen=grpc, log_format=_log_format(as_json)
        )
    replace_process(process_command("picker", config))


def _address(flag: str, text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, f"{flag} {error}") from error


def _certificate(file: str, key_file: str) -> str:
    """Return the front's own certificate as PEM, the first one of the file; empty for HTTP."""
    if file and not key_file:
        raise CommandError(ExitCode.USAGE, "--ssl-certfile needs --ssl-keyfile here")
    check_certificate(file, key_file)
    if not file:
        return ""
    chain = Path(file).read_text(encoding="ascii", errors="replace")
    content = chain.partition(ssl.PEM_HEADER)[2].partition(ssl.PEM_FOOTER)[0]
    return f"{ssl.PEM_HEADER}{content}{ssl.PEM_FOOTER}\n"


def _log_format(as_json: bool) -> LogFormat:
    return "json" if as_json else "console"


@fleet_app.command()
def remove(
    ctx: typer.Context,
    adapter: AdapterArgument,
    fleet: FleetFile = FLEET_FILE,
    as_json: AsJson = False,
) -> None:
    """Remove an adapter from a fleet, and from the docks that keep a copy."""
    output = output_of(ctx, as_json)

    async def delete(catalogue: "Catalogue", _: "FleetConfig") -> bool:
        from loradock.fleet.catalogue import WantedAdapter

        found = await catalogue.get(WantedAdapter, adapter)
        if found is None:
            return False
        return await catalogue.delete(WantedAdapter, adapter, changed=found.changed)

    if not with_catalogue(fleet, delete):
        raise CommandError(ExitCode.NOT_FOUND, f"the fleet has no adapter {adapter!r}")
    if as_json:
        output.document({"removed": adapter})


@fleet_app.command()
def status(
    ctx: typer.Context,
    fleet: FleetFile = FLEET_FILE,
    as_json: AsJson = False,
) -> None:
    """Show docks, fronts, the copies of each adapter, and the last decisions with their reasons."""
    from loradock.fleet.status import read_status

    output = output_of(ctx, as_json)
    found = with_catalogue(fleet, read_status)
    if as_json:
        output.document(found)
    else:
        output.show(*status_tables(found))

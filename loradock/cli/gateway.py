"""The `gateway` command: a gateway process for a server that runs here or elsewhere."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from collections.abc import Iterable

import msgspec
import typer

from loradock.cli.context import AsJson, Settings, output_of, replace_process, settings_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.options import with_options
from loradock.gateway.address import parse_address
from loradock.gateway.options import GatewayConfig, GatewayOptions, GatewayStart
from loradock.processes.subprocesses import process_command

app = typer.Typer()


@app.command()
@with_options
def gateway(
    ctx: typer.Context, start: GatewayStart, options: GatewayOptions, as_json: AsJson = False
) -> None:
    """Serve the OpenAI protocol, metrics and a page over HTTP, for a server that runs here.

    Each option is also an environment variable: LORADOCK_SSL_KEYFILE for --ssl-keyfile.
    """
    output_of(ctx, as_json)
    config = gateway_config(
        settings_of(ctx),
        options,
        start.http,
        start.model,
        start.adapter_roots,
        start.max_model_len,
    )
    check_certificate(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    if as_json:
        config = msgspec.structs.replace(config, log_format="json")
    replace_process(process_command("gateway", config))


def gateway_config(
    settings: Settings,
    options: GatewayOptions,
    http: str,
    model: str,
    adapter_roots: Iterable[str],
    max_model_len: int,
) -> GatewayConfig:
    """Return the configuration of a gateway process; raises `CommandError` for a wrong address."""
    from loradock.client.sockets import runtime_directory

    try:
        host, port = parse_address(http)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, f"--http {error}") from error
    return GatewayConfig(
        **msgspec.structs.asdict(options),
        directory="" if settings.address else str(runtime_directory(settings.directory)),
        address=settings.address,
        key=settings.key,
        server_key=settings.server_key,
        host=host,
        port=port,
        model=model,
        adapter_roots=tuple(adapter_roots),
        max_model_len=max_model_len,
    )


def check_certificate(file: str, key_file: str, authorities: str = "") -> None:
    """Raise `CommandError` for files that HTTPS can't use; no `file` is HTTP."""
    import ssl

    if not file and (key_file or authorities):
        raise CommandError(
            ExitCode.USAGE, "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile, for HTTPS"
        )
    if not file:
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(file, key_file or None)
    except OSError as error:
        files = f"--ssl-certfile {file} and --ssl-keyfile {key_file or file}"
        reason = f"{files} are no certificate and its key: {error}"
        raise CommandError(ExitCode.USAGE, reason) from error
    try:
        if authorities:
            context.load_verify_locations(authorities)
    except OSError as error:
        reason = f"--ssl-ca-certs {authorities} has no certificates: {error}"
        raise CommandError(ExitCode.USAGE, reason) from error

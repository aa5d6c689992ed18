"""The commands `config show` and `config set`: limits and policy of a running server."""

# Heavy modules are imported when a command runs: help and completion answer at once.

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from loradock.cli.context import QUERY_TIMEOUT_S, AsJson, QueryTimeout, run_request
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.serve_settings import LIMIT_OPTIONS
from loradock.controller.core.limits import FIXED
from loradock.controller.server.startup.sizes import parse_size

app = typer.Typer()
config_app = typer.Typer(
    no_args_is_help=True, help="Show and change the limits and the policy of a running server."
)
app.add_typer(config_app, name="config")

POLICY: Final = "policy"

FIELDS: Final = {flag.removeprefix("--"): field for field, (flag, _) in LIMIT_OPTIONS.items()}
"""The name of a limit's option -> its field."""


def complete_setting() -> list[str]:
    """Return the names of the settings that can be changed, with the sign that follows."""
    names = [name for name, field in FIELDS.items() if field not in FIXED]
    return [f"{name}=" for name in sorted((*names, POLICY))]


Changes = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME=VALUE...",
        help="A limit under its name in `loradock serve --help`, without dashes, or policy: "
        "host-adapters=128, host-bytes=8GiB, request-timeout=60 (seconds), policy=none.",
        autocompletion=complete_setting,
    ),
]


@config_app.command()
def show(
    ctx: typer.Context, timeout: QueryTimeout = QUERY_TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Show the limits and the policy that are in force."""
    run_request(ctx, as_json, "querying", lambda client: client.settings(timeout))


@config_app.command("set")
def set_(
    ctx: typer.Context,
    changes: Changes,
    timeout: QueryTimeout = QUERY_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Change limits and the policy while the server runs; no adapter is evicted for it.

    The change is kept when the server is started again with the same options.
    """
    limits, policy = parse_changes(changes)
    run_request(
        ctx, as_json, "changing", lambda client: client.change_settings(limits, policy, timeout)
    )


def parse_changes(changes: Sequence[str]) -> tuple[dict[str, int], str]:
    """Return the limits, as their fields have them, and the policy, empty for no change."""
    limits: dict[str, int] = {}
    policy = ""
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or not text:
            raise CommandError(
                ExitCode.USAGE, f"{change!r} is no change; write NAME=VALUE: host-adapters=128"
            )
        if name == POLICY:
            policy = text
            continue
        field = FIELDS.get(name.replace("_", "-"))
        if field is None:
            close = difflib.get_close_matches(name, [*FIELDS, POLICY], 1)
            hint = (
                f"did you mean {close[0]}?" if close else f"known are {', '.join(FIELDS)}, policy"
            )
            raise CommandError(ExitCode.USAGE, f"{name!r} is no setting", hint)
        if field in FIXED:
            raise CommandError(
                ExitCode.REFUSED,
                f"{name} is fixed while an engine runs",
                f"restart the server with --{name} {text}",
            )
        limits[field] = _value(name, field, text)
    return limits, policy


def _value(name: str, field: str, text: str) -> int:
    units: dict[str, Any] = {"_ms": ("a number of seconds", lambda one: round(float(one) * 1000))}
    # The error of a size states which units there are.
    units["_bytes_max"] = ("", parse_size)
    wanted, parse = next(
        (unit for end, unit in units.items() if field.endswith(end)), ("a whole number", int)
    )
    try:
        return int(parse(text))
    except (ValueError, OverflowError) as error:
        reason = f"{wanted} is needed" if wanted else str(error)
        raise CommandError(ExitCode.USAGE, f"{name}={text}: {reason}") from error

"""The commands on what runs: `requests`, `cancel`, `slow`, `config show` and `config set`."""

# Heavy modules are imported when a command runs: help and completion answer at once.

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from loradock.cli.context import (
    QUERY_TIMEOUT_S,
    AsJson,
    QueryTimeout,
    completions,
    run_request,
)
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.controller.core.limits import FIXED, Limits
from loradock.messages.options import options_of

app = typer.Typer()
config_app = typer.Typer(
    no_args_is_help=True, help="Show and change the limits and the policy of a running server."
)
app.add_typer(config_app, name="config")

POLICY: Final = "policy"

LIMITS: Final = {option.flag.removeprefix("--"): option for option in options_of(Limits)}
"""The name of a limit's option -> its declaration."""


def complete_setting() -> list[str]:
    """Return the names of the settings that can be changed, with the sign that follows."""
    names = [name for name, option in LIMITS.items() if option.field not in FIXED]
    return [f"{name}=" for name in sorted((*names, POLICY))]


def complete_request(ctx: typer.Context) -> list[str]:
    """Return the ids of requests in progress; none if the server does not answer at once."""
    return completions(
        ctx, lambda client: [view.request_id for view in client.list_requests().requests]
    )


RequestArgument = Annotated[
    str,
    typer.Argument(
        metavar="REQUEST",
        help="The request's id, as `loradock requests` shows it.",
        autocompletion=complete_request,
    ),
]


@app.command()
def requests(
    ctx: typer.Context, timeout: QueryTimeout = QUERY_TIMEOUT_S, as_json: AsJson = False
) -> None:
    """List the requests in progress: id, adapter, age, and tokens sent so far."""
    run_request(ctx, as_json, "querying", lambda client: client.list_requests(timeout))


@app.command()
def slow(
    ctx: typer.Context, timeout: QueryTimeout = QUERY_TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Show the slowest operations on adapters and the slowest requests of the last hour."""
    run_request(ctx, as_json, "querying", lambda client: client.list_slow(timeout))


@app.command()
def cancel(
    ctx: typer.Context,
    request: RequestArgument,
    timeout: QueryTimeout = QUERY_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Stop a running generation of any client; its client gets the output so far."""

    def stop(client: Any) -> Any:
        reply = client.cancel_request(request, timeout)
        if not reply.found:
            raise CommandError(
                ExitCode.NOT_FOUND,
                f"no generation runs under the id {request!r}",
                "`loradock requests` lists the requests in progress",
            )
        return reply

    run_request(ctx, as_json, "cancelling", stop)


Changes = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME=VALUE",
        help="A limit under its name in `loradock serve --help-all`, without dashes, or policy: "
        "max-cpu-loras=128, host-bytes=8GiB, request-timeout=60 (seconds), policy=none.",
        autocompletion=complete_setting,
    ),
]


@config_app.command()
def show(
    ctx: typer.Context, timeout: QueryTimeout = QUERY_TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Show the limits and the policy that are current."""
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
                ExitCode.USAGE, f"{change!r} is not a change; write NAME=VALUE: max-cpu-loras=128"
            )
        if name == POLICY:
            policy = text
            continue
        option = LIMITS.get(name.replace("_", "-"))
        if option is None:
            former = [new for new, one in LIMITS.items() if one.former == f"--{name}"]
            close = former or difflib.get_close_matches(name, [*LIMITS, POLICY], 1)
            hint = (
                f"did you mean {close[0]}?" if close else f"known are {', '.join(LIMITS)}, policy"
            )
            raise CommandError(ExitCode.USAGE, f"{name!r} is not a setting", hint)
        if option.field in FIXED:
            raise CommandError(
                ExitCode.REFUSED,
                f"{name} is fixed while an engine runs",
                f"restart the server with {option.flag} {text}",
            )
        try:
            limits[option.encoded] = option.parse_text(text)
        except ValueError as error:
            raise CommandError(ExitCode.USAGE, f"{change}: {error}") from error
    return limits, policy

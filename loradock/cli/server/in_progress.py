"""The commands `requests`, `cancel` and `slow`: what runs, its end, and what took long."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from typing import Annotated, Any

import typer

from loradock.cli.context import (
    QUERY_TIMEOUT_S,
    AsJson,
    QueryTimeout,
    open_client,
    output_of,
    run_request,
)
from loradock.cli.exit_codes import CommandError, ExitCode

app = typer.Typer()


def complete_request(ctx: typer.Context) -> list[str]:
    """Return the ids of requests in progress; none if the server does not answer at once."""
    from loradock.cli.context import completions

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
    from loradock.cli.render import renderables

    output = output_of(ctx, as_json)
    with open_client(ctx) as client:
        reply: Any = client.cancel_request(request, timeout)
    if not reply.found:
        raise CommandError(
            ExitCode.NOT_FOUND,
            f"no generation runs under the id {request!r}",
            "`loradock requests` lists the requests in progress",
        )
    if as_json:
        output.document(reply)
    else:
        output.show(*renderables(reply))

"""The commands `lab`, which compares eviction policies, and `advise`, which tries changes."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer
from msgspec import Struct

from loradock.cli.context import AsJson, directory_of, output_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.log_commands import open_log
from loradock.cli.options import with_options
from loradock.cli.what_if import what_if_text
from loradock.messages.options import option

if TYPE_CHECKING:
    from loradock.cli.output import Output
    from loradock.lab.advice import Advice
    from loradock.lab.comparison import Row
    from loradock.lab.workloads import Workload

app = typer.Typer()

_PLOTTED: Final = (0.05, 0.1, 0.2, 0.4)


class LabOptions(Struct, frozen=True, kw_only=True):
    """The comparison's policies and sizes."""

    VARIABLES: ClassVar = False

    policies: Annotated[
        str,
        option(
            "Policies to compare, separated by commas.",
            flag="--policies",
            metavar="NAMES",
        ),
    ] = "fifo,lru,sieve,gdsf,adaptive"
    memory: Annotated[
        float,
        option("Memory, as a share of the bytes of all adapters.", ge=0.001, le=1, metavar="SHARE"),
    ] = 0.1
    adapters: Annotated[int, option("Number of adapters.", ge=2, le=100_000, metavar="NUMBER")] = (
        200
    )
    requests: Annotated[
        int, option("Number of requests.", ge=1, le=10_000_000, metavar="NUMBER")
    ] = 10_000
    seed: Annotated[int, option("Seed of the workloads.", ge=0, metavar="NUMBER")] = 0
    serve: Annotated[
        bool, option("Simulate a server for each row too, which shows waits and first tokens.")
    ] = False


def _workload_names(incomplete: str) -> list[str]:
    from loradock.lab.workloads import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


@app.command()
@with_options
def lab(
    ctx: typer.Context,
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="Names of workloads, or files of public traces: Azure LLM inference, BurstGPT, "
            "Mooncake, ServeGen. Default: all that need no file.",
            autocompletion=_workload_names,
        ),
    ] = None,
    *,
    options: LabOptions,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="SVG file with load times by size of memory."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare eviction policies on generated workloads and public traces, with an offline bound."""
    from loradock.lab.comparison import compare

    output = output_of(ctx, as_json)
    draw = None if plot is None else _plotter(plot)
    names = options.policies.split(",")
    _check_policies(names)
    made = _workloads(workloads or [], options)
    shares = () if draw is None else _PLOTTED
    with output.progress("simulating", len(made) * len(names) * (1 + len(shares))) as advance:
        rows, plotted = [], []
        for one in made:
            for row in compare(one, names, options.memory, serve=options.serve):
                rows.append(row)
                advance(1)
            for row in (row for share in shares for row in compare(one, names, share)):
                plotted.append(row)
                advance(1)
    _show_rows(output, rows)
    if draw is not None and plot is not None:
        draw(plotted, plot)


def _plotter(path: Path) -> "Callable[[Sequence[Row], Path], None]":
    if path.suffix != ".svg":
        raise CommandError(ExitCode.USAGE, f"{path} must end in .svg")
    try:
        from loradock.lab.plots import plot_load_time
    except ModuleNotFoundError as error:
        hint = "pip install 'loradock[lab]' installs it"
        raise CommandError(ExitCode.REFUSED, "plots need matplotlib", hint) from error
    return plot_load_time


def _check_policies(names: Sequence[str]) -> None:
    from loradock.controller.log.policies import PolicyUnknownError, check_policy
    from loradock.lab.comparison import ranking_named

    try:
        for name in names:
            check_policy(name)
            ranking_named(name)
    except (PolicyUnknownError, ValueError) as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error


def _workloads(names: list[str], options: LabOptions) -> "list[Workload]":
    from loradock.lab.traces import TraceError, read_trace
    from loradock.lab.workloads import NAMES, from_trace, make_workload

    sizes = options.adapters, options.requests, options.seed
    made = []
    for name in names or NAMES:
        if name in NAMES:
            made.append(make_workload(name, *sizes))
        elif Path(name).exists():
            try:
                traced = read_trace(Path(name), options.requests, options.seed)
            except TraceError as error:
                raise CommandError(ExitCode.USAGE, str(error)) from error
            made.append(from_trace(Path(name).name, traced, *sizes))
        else:
            known = f"known are {', '.join(NAMES)}, or a trace's file"
            raise CommandError(ExitCode.USAGE, f"there is no workload {name!r}", known)
    return made


def _show_rows(output: "Output", rows: "list[Row]") -> None:
    from loradock.cli.output import FittingTable

    if output.as_json:
        output.document(rows)
        return
    columns = ("workload", "policy", "loads", "load time", "of LRU's", "gap closed")
    served = ("wait p99", "first token p95") if rows[0].served is not None else ()
    output.show(FittingTable((*columns, *served), [_cells(row) for row in rows], kept=6))
    output.note(f"gap closed: of the way from LRU to the offline bound ({rows[0].bound})")


def _cells(row: "Row") -> tuple[str, ...]:
    closed = "-" if row.gap_closed is None else f"{row.gap_closed:.2f}"
    found = (row.workload, row.policy, str(row.loads), f"{row.load_s:.0f} s", f"{row.of_lru:.3f}")
    if row.served is None:
        return (*found, closed)
    times = row.served.wait_s.p99, row.served.first_token_s.p95
    return (*found, closed, *(f"{time_s:.2f} s" for time_s in times))


@app.command()
def advise(
    ctx: typer.Context,
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIRECTORY", help="The controller's directory. Default: --dir."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the durations that are drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show which changes of the settings would have gained most for the logged requests."""
    from loradock.lab.advice import GAIN_MIN, simulations
    from loradock.lab.advice import advise as advice_for
    from loradock.lab.traffic import read_traffic

    output = output_of(ctx, as_json)
    chosen = directory or directory_of(ctx)
    with open_log(chosen) as log_directory:
        with output.progress("reading the log"):
            traffic = read_traffic(log_directory)
        with output.progress("simulating", simulations(traffic)) as advance:
            found = advice_for(traffic, seed, advance)
    if output.as_json:
        output.document(found)
        return
    for number, advice in enumerate(found, 1):
        output.text(_advice_text(number, advice, chosen))
    if not found:
        output.text(
            "No change of policy, slots, bytes, holds, prefetches or replicas would have gained "
            f"{100 * GAIN_MIN:.0f} %."
        )


def _advice_text(number: int, advice: "Advice", directory: Path) -> str:
    before, after = advice.before, advice.after
    change = what_if_text(advice.changes)
    return (
        f"{number}. {advice.kind}: {change}\n"
        f"   first token p95 {1000 * before.first_token_s.p95:.0f} -> "
        f"{1000 * after.first_token_s.p95:.0f} ms, loads {before.loads} -> {after.loads}, "
        f"load time {before.load_s:.1f} -> {after.load_s:.1f} s\n"
        f"   costs {advice.cost}\n"
        f"   shown by: loradock replay {directory} --what-if {change}"
    )

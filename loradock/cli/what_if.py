"""The part of `replay --what-if`: reads the changes, and shows the runs side by side."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.running import LIMITS

if TYPE_CHECKING:
    from loradock.cli.output import Output
    from loradock.lab.outcome import Outcome, Percentiles
    from loradock.lab.simulator import Changes, Run
    from loradock.lab.traffic import Traffic

_OTHERS: Final = ("policy", "holds", "prefetch", "storage", "arrivals")
_PREFETCHES: Final = ("as-logged", "none", "history")
_DIGEST_SHOWN: Final = 16
_RUNS: Final = ("as logged", "simulated", "what if")


def parse_what_if(text: str) -> "Changes":
    """Return the changes of `NAME=VALUE,...`; raises `CommandError`."""
    from loradock.lab.simulator import Changes

    values: dict[str, Any] = {}
    limits: dict[str, int] = {}
    for change in text.split(","):
        name, _, value = change.partition("=")
        option = LIMITS.get(name.replace("_", "-"))
        try:
            if not value:
                raise ValueError("a change is NAME=VALUE")
            if option is not None:
                limits[option.field] = option.parse_text(value)
            elif name in _OTHERS:
                values[name] = _parsed(name, value)
            else:
                known = ", ".join((*_OTHERS, *LIMITS))
                raise ValueError(f"there is no {name!r}; known are {known}")
        except ValueError as error:
            raise CommandError(ExitCode.USAGE, f"--what-if {change}: {error}") from error
    return Changes(limits=limits, **values)


def _parsed(name: str, value: str) -> Any:
    if name == "policy":
        return value
    if name == "holds":
        return () if value == "none" else tuple(value.split("+"))
    if name == "prefetch":
        if value not in _PREFETCHES:
            known = " or ".join(_PREFETCHES)
            raise ValueError(f"prefetch must be {known}, got {value!r}")
        return value
    factor = float(value)
    if not 0 < factor < 1e6:
        raise ValueError(f"{name} must be a factor above 0, got {value}")
    return factor


def what_if_text(changes: "Changes") -> str:
    """Return the text that `parse_what_if` reads, for changes of limits in bytes and numbers."""
    names = {option.field: name for name, option in LIMITS.items()}
    found = [f"policy={changes.policy}"] if changes.policy else []
    found += [f"{names[field]}={value}" for field, value in changes.limits.items()]
    if changes.holds is not None:
        found.append(f"holds={'+'.join(changes.holds) or 'none'}")
    if changes.prefetch != "as-logged":
        found.append(f"prefetch={changes.prefetch}")
    factors = (("storage", changes.storage), ("arrivals", changes.arrivals))
    found += [f"{name}={factor:g}" for name, factor in factors if factor != 1]
    return ",".join(found)


def run_what_if(
    output: "Output", log_directory: Path, changes: "Changes", seed: int, drawing: Path | None
) -> None:
    """Simulate a log with changes; print both runs, and the simulation of the log as it was."""
    from loradock.controller.log.policies import PolicyUnknownError, check_policy
    from loradock.lab.simulator import BELADY, simulate, what_if
    from loradock.lab.traffic import read_traffic

    if drawing is not None and drawing.suffix != ".html":
        raise CommandError(ExitCode.USAGE, f"{drawing} must end in .html; its page saves an SVG")
    try:
        if changes.policy not in ("", BELADY):
            check_policy(changes.policy)
        with output.progress("simulating"):
            traffic = read_traffic(log_directory)
            changed = what_if(traffic, changes, seed)
            repeated = simulate(traffic, seed=seed)
    except (PolicyUnknownError, ValueError) as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
    _show(output, traffic, repeated, changed)
    if drawing is not None:
        drawing.write_text(_drawing(traffic, changed))


def _show(output: "Output", traffic: "Traffic", repeated: "Run", changed: "Run") -> None:
    from loradock.cli.output import FittingTable

    outcomes = (traffic.logged, repeated.outcome, changed.outcome)
    if output.as_json:
        named = zip(("logged", "simulated", "what_if"), outcomes, strict=True)
        output.document({**dict(named), "left_out": traffic.simplified})
        return
    assert traffic.logged is not None  # noqa: S101 - it is of a log
    columns = [_column(one) for one in (traffic.logged, repeated.outcome, changed.outcome)]
    # They are judged in simulations alone.
    columns[0] |= {name: "" for name in columns[0] if name.startswith("- ")}
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    output.show(FittingTable(("", *_RUNS), rows, kept=4))
    if traffic.simplified:
        output.note(f"the simulations leave out: {', '.join(traffic.simplified)}")


def _column(outcome: "Outcome") -> dict[str, str]:
    """Return the cells of a run by the names of the rows; all fit into 80 columns."""
    return {
        "policy": outcome.policy,
        "requests": f"{outcome.requests} ({outcome.refused} refused)",
        "loads": str(outcome.loads),
        "bytes loaded": f"{outcome.load_bytes / 1e6:.1f} MB",
        "slot writes": str(outcome.activations),
        "load and write": f"{outcome.load_s:.2f} s",
        **_percentiles("wait", outcome.wait_s),
        **_percentiles("first token", outcome.first_token_s),
        "tokens/s": f"{outcome.tokens_per_s:.1f}",
        "fairness (Jain)": f"{outcome.fairness:.3f}",
        "prefetches": str(outcome.prefetches),
        "- useful": str(outcome.prefetches_useful),
        "- useless": str(outcome.prefetches_useless),
        "- harmful": str(outcome.prefetches_harmful),
        "digest": outcome.digest[:_DIGEST_SHOWN],
    }


def _percentiles(name: str, found: "Percentiles") -> dict[str, str]:
    values = {"p50": found.p50, "p95": found.p95, "p99": found.p99}
    return {f"{name} {p}": f"{1000 * value:.1f} ms" for p, value in values.items()}


def _drawing(traffic: "Traffic", changed: "Run") -> str:
    """Return a document with the page's drawing of both runs."""
    from loradock.gateway import web

    frames = [
        f'<figure><figcaption>{name}</figcaption><iframe srcdoc="{escape(document)}"></iframe>'
        "</figure>"
        for name, document in (
            ("as logged", web.timeline(traffic.events)),
            ("what if", web.timeline(changed.events)),
        )
    ]
    style = (
        "body{display:flex;margin:0;font:14px sans-serif}figure{flex:1;margin:4px}"
        "iframe{width:100%;height:95vh;border:0}"
    )
    head = f'<meta charset="utf-8"><title>LoRADock: what if</title><style>{style}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(frames)}</body></html>\n'
    )

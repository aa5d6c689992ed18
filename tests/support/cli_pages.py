"""The pages that the command prints: tables and errors, and the files that keep them.

`PYTHONPATH=. python -m tests.support.cli_pages` writes the files.
"""

import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import torch
import typer
from rich.console import Console

from loradock.cli import bench, top
from loradock.cli.exit_codes import EXIT_CODES, HINTS, CommandError, ServerNotRunning, failure_of
from loradock.cli.main import app
from loradock.cli.render import classification, embedding, renderables
from loradock.cli.running import parse_changes
from loradock.cli.serve.start_checks import Start, StartRefused, check_start
from loradock.client.arguments import check_arguments
from loradock.client.calls import Classification, Embedding
from loradock.controller.core.limits import FIXED, LOGGED_NAMES, Limits, limits_to
from loradock.engine.adapters import read_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.errors import EngineError
from loradock.messages import control
from loradock.messages import requests as rq
from loradock.messages.engine_options import EngineOptions, LoRAOptions
from loradock.messages.errors import MEANINGS, ErrorCode, LoradockError
from loradock.messages.prompts import Sampling
from loradock.messages.views import FailureView
from tests.support.engine.adapter_examples import (
    CONFIG,
    LORA_CONFIG,
    MODULES,
    Q,
    V,
    pair,
    tensors,
    write,
)
from tests.support.parallel.processes import TINY
from tests.support.simulation.message_examples import example_of
from tests.support.simulation.standin_controller import view

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "pages"
ERRORS: Final = GOLDEN / "errors.md"
WIDTHS: Final = (80, 120)
LONG_NAME: Final = "a-very-long-name-of-an-adapter-" * 4


def golden_tables(width: int) -> Path:
    return GOLDEN / f"tables-{width}.txt"


def help_pages(width: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the help page of each command."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(width)}):
        yield from _pages(typer.main.get_command(app), "loradock")


def _pages(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield context.command_path, command.get_help(context)
    for each, one in getattr(command, "commands", {}).items():
        yield from _pages(one, each, context)


def _replies() -> Iterator[tuple[str, list[Any]]]:
    now = view("upper", last_used_ns=0)
    moving = view(LONG_NAME[:128], "cpu-cached", goal="gpu-slot", held=True, last_used_ns=0)
    missing = ("layers 3 and 7 have no tensors in the file", "chat_template.jinja is not used")
    now = msgspec.structs.replace(now, warnings=missing)
    yield "load upper", renderables(rq.AdapterDone("1", "upper", "cpu-cached", warnings=missing))
    yield "list", renderables(rq.AdaptersListed("1", (moving, now), 7))
    failure = FailureView(ErrorCode.DOES_NOT_FIT, "6 of its 6 modules differ", ("q_proj",), 9000)
    reason = (
        "a padded row's results differ from the row alone (relative norm 1.2e-01, at most 1e-03)"
    )
    found = rq.AdapterShown("1", now, (), failure, "single", reason)
    yield "show upper", renderables(found)
    # As long as they are in a server.
    ids = {"digest": "cd" * 16, "engine_id": "e" * 32}
    status = msgspec.structs.replace(example_of(rq.StatusShown), **ids)
    yield "status", renderables(status)
    listed = rq.AdaptersListed("1", (moving, msgspec.structs.replace(now, waiting=3)), 7)
    yield "top --once", [top.screen(None, top.Reading(0.0, status, listed))]
    durations = {"p50": 0.0123, "p90": 0.4567, "p99": 12.3456}
    measured = bench.Result(100, 98, {"L011": 2}, 12.5, 7.8, 249.6, durations, durations, durations)
    yield "bench", bench._tables(measured)
    request = control.RequestView("c" * 16 + ":17", "generate", "upper", "running", 65_000, 112)
    yield "requests", renderables(control.RequestsListed("1", (request,), 3))
    slow = control.SlowView("load", "upper", 1_234, 60_000, "done")
    yield "slow", renderables(control.SlowListed("1", (slow,), ()))
    shown = control.SettingsShown(
        "1", limits_to(Limits()), "lru", tuple([LOGGED_NAMES[name] for name in FIXED])
    )
    yield "config show", renderables(shown)
    texts = [f"text number {number}" for number in range(1, 13)]
    vectors = tuple((1.0, float(number), 0.0) for number in range(12))
    yield "embed", embedding(texts, Embedding(None, vectors, 40))
    labels = tuple(f"label-{number}" for number in range(12))
    scores = tuple(tuple(place / 12 for place in range(12)) for _ in texts)
    yield "classify", classification(texts, Classification(None, labels, scores, 40))


def tables(width: int) -> str:
    """Return what commands print for people, on a terminal of this width."""
    pages = []
    for command, parts in _replies():
        file = io.StringIO()
        console = Console(file=file, width=width, markup=False, emoji=False, highlight=False)
        for part in parts:
            console.print(part)
        lines = "\n".join(line.rstrip() for line in file.getvalue().splitlines())
        pages.append(f"$ loradock {command}\n{lines}\n")
    return "\n".join(pages)


def _usage_errors() -> Iterator[tuple[str, Exception]]:
    requests = {
        "loradock load 'with space'": rq.LoadAdapter("", "with space"),
        "loradock generate PROMPT --top-p 0": rq.Generate("", None, "p", Sampling(top_p=0.0)),
        "loradock generate PROMPT --stop ''": rq.Generate("", None, "p", Sampling(stop=("",))),
    }
    for command, request in requests.items():
        try:
            check_arguments(request)
        except LoradockError as error:
            yield command, error
    for change in ("max-loras=4", "max-cpu-lora=4", "retry-backoff=soon", "requests"):
        try:
            parse_changes([change])
        except CommandError as error:
            yield f"loradock config set {change}", error
    yield "loradock status", ServerNotRunning(Path(".loradock"), "no socket there")
    yield "loradock status", ServerNotRunning(Path(".loradock"), "no socket there", 4242)


def _start_errors() -> Iterator[tuple[str, StartRefused]]:
    model = TINY / "model"
    starts = {
        "--model nowhere": Start(Path("nowhere")),
        "--adapter-root nowhere": Start(model, (Path("nowhere"),)),
        "--device gpu": Start(model, engine=EngineOptions(device="gpu")),
        "--target-module q_prj": Start(model, lora=LoRAOptions(target_modules=("q_prj",))),
        "--device cpu --dual-stream": Start(
            model, lora=LoRAOptions(dual_stream=True), engine=EngineOptions(device="cpu")
        ),
    }
    for words, start in starts.items():
        try:
            check_start(start)
        except StartRefused as error:
            yield f"loradock serve {words}", error


def _adapter_errors() -> Iterator[tuple[str, str]]:
    """Yield what was done wrong and the text of the engine."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "adapters"
        (root / "empty").mkdir(parents=True)
        write(root / "runs" / "checkpoint-100")
        write(root / "no-config" / "adapter").parent.joinpath("notes.txt").touch()
        (root / "no-config" / "adapter" / "adapter_config.json").unlink()
        merged = write(root / "merged")
        (merged / "adapter_config.json").rename(merged / "config.json")
        (merged / "adapter_model.safetensors").rename(merged / "model.safetensors")
        cut = write(root / "cut-off") / "adapter_model.safetensors"
        cut.write_bytes(cut.read_bytes()[:-8])
        other = tensors(q_A=torch.ones(4, 96), v_A=torch.ones(4, 96))
        write(root / "other-model", {**CONFIG, "base_model_name_or_path": "other/model"}, other)
        write(root / "large-rank", {**CONFIG, "r": 64}, pair(Q, 64) | pair(V, 64))
        paths = (
            "nowhere",
            "adapters/runs/checkpoint-100",
            "empty",
            "runs",
            "no-config/adapter",
            "merged",
        )
        for path in (*paths, "cut-off", "other-model", "large-rank"):
            try:
                read_adapter(path, [root], AdapterTarget(MODULES, LORA_CONFIG), adapter="mine")
            except EngineError as error:
                details = "".join(f"\n  - {detail}" for detail in error.details)
                text = f"{error}{details}".replace(f"{name}/", "/srv/")
                yield f"loradock load mine --verbose --path {path}", text


def errors() -> str:
    """Return the manual page of errors: each code, and examples of texts."""
    parts = [
        "# Errors",
        "What a command prints is an error's code, its summary and the cause, then what to do. "
        "Programs decide by the code or by the exit code. This page is generated from the code.",
    ]
    for code in ErrorCode:
        meaning = MEANINGS[code]
        retry = "may succeed later" if meaning.retryable else "fails again"
        parts += [
            f"## {code.value}: {meaning.summary}",
            f"Typical cause: {meaning.typical_cause}. The same request {retry}. "
            f"Exit code {EXIT_CODES[code].value}.",
            f"What to do: {HINTS[code]}.",
        ]
    parts.append("## Before a request is sent")
    for command, error in _usage_errors():
        failure = failure_of(error)
        lines = [f"$ {command}", failure.line]
        if failure.hint:
            lines.append(f"  {failure.hint}")
        parts.append("\n".join(["```", *lines, "```"]))
    parts.append("## Before a server starts")
    for command, refused in _start_errors():
        lines = [f"$ {command}", str(refused)]
        if refused.hint:
            lines.append(f"  {refused.hint}")
        parts.append("\n".join(["```", *lines, "```"]))
    parts.append("## Where an adapter can't be read, with --adapter-root /srv/adapters")
    parts += [
        "\n".join(["```", f"$ {command}", text, "```"]) for command, text in _adapter_errors()
    ]
    return "\n\n".join(parts).replace(str(TINY.parent.parent) + "/", "") + "\n"


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for columns in WIDTHS:
        golden_tables(columns).write_text(tables(columns))
    ERRORS.write_text(errors())

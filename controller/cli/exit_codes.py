"""How commands end.

What it is: the table of exit codes, and what to do about each error. What it is not: the errors'
texts, which come with them. One rule: a script can decide by the exit code alone.
"""

from enum import IntEnum
from typing import Any, Final, NamedTuple

from controller.client.errors import LoradockError
from messages.errors import MEANINGS, ErrorCode


class ExitCode(IntEnum):
    """The exit codes of every command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    NO_ROOM = 5
    UNREACHABLE = 6
    LOG = 7
    INTERRUPTED = 130


MEANS: Final[dict[ExitCode, str]] = {
    ExitCode.OK: "done",
    ExitCode.FAILURE: "failed in a way that has no code of its own",
    ExitCode.USAGE: "wrong usage: an option, a name or a request that can't be read (L012)",
    ExitCode.NOT_FOUND: "unknown adapter, or its files are not there (L002, L006)",
    ExitCode.REFUSED: "refused: the adapter or the request is not acceptable "
    "(L003, L005, L007, L008, L009, L010, L013, L016)",
    ExitCode.NO_ROOM: "no room, out of memory or overloaded; may succeed later (L001, L004, L015)",
    ExitCode.UNREACHABLE: "controller or engine gone, or no answer in time (L011)",
    ExitCode.LOG: "the log is damaged, diverges, or can't be written (L014)",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}

EXIT_OF: Final[dict[ErrorCode, ExitCode]] = {
    ErrorCode.NO_ROOM: ExitCode.NO_ROOM,
    ErrorCode.NOT_FOUND: ExitCode.NOT_FOUND,
    ErrorCode.DOES_NOT_FIT: ExitCode.REFUSED,
    ErrorCode.DEVICE_OUT_OF_MEMORY: ExitCode.NO_ROOM,
    ErrorCode.CONFIG_REFUSED: ExitCode.REFUSED,
    ErrorCode.UNKNOWN_ADAPTER: ExitCode.NOT_FOUND,
    ErrorCode.NOT_RESIDENT: ExitCode.REFUSED,
    ErrorCode.NOT_FINITE: ExitCode.REFUSED,
    ErrorCode.PATH_NOT_ALLOWED: ExitCode.REFUSED,
    ErrorCode.CONFLICT: ExitCode.REFUSED,
    ErrorCode.ENGINE_GONE: ExitCode.UNREACHABLE,
    ErrorCode.MALFORMED: ExitCode.USAGE,
    ErrorCode.NOT_ALLOWED: ExitCode.REFUSED,
    ErrorCode.LOG_UNAVAILABLE: ExitCode.LOG,
    ErrorCode.OVERLOADED: ExitCode.NO_ROOM,
    ErrorCode.NOT_SERVED: ExitCode.REFUSED,
}

HINTS: Final[dict[ErrorCode, str]] = {
    ErrorCode.NO_ROOM: "see `loradock list` for what is held or in use; `loradock release` or "
    "`loradock evict` makes room",
    ErrorCode.NOT_FOUND: "give the adapter's directory with --path, absolute or relative to an "
    "adapter root of the server",
    ErrorCode.DOES_NOT_FIT: "the adapter was trained for another model, or the engine was "
    "started for less than it needs: see --max-lora-rank, --enable-tower-connector-lora "
    "and --target-module in `loradock serve --help`",
    ErrorCode.DEVICE_OUT_OF_MEMORY: "lower --device-bytes of the server, or evict adapters",
    ErrorCode.CONFIG_REFUSED: "see the adapter's adapter_config.json for what is named",
    ErrorCode.UNKNOWN_ADAPTER: "see `loradock list` for the names that are known, or "
    "`loradock load` it first",
    ErrorCode.NOT_RESIDENT: "activate it again",
    ErrorCode.NOT_FINITE: "train or export the adapter again; nothing of it was kept",
    ErrorCode.PATH_NOT_ALLOWED: "put the adapter under one of the server's --adapter-root "
    "directories",
    ErrorCode.CONFLICT: "see `loradock show` for what it is doing; --replace takes a name over, "
    "--force removes what is held",
    ErrorCode.ENGINE_GONE: "check with `loradock status`; is `loradock serve` running, with this "
    "--dir?",
    ErrorCode.MALFORMED: "correct the name, the option, or the prompt and its images; if they are "
    "right, client and server differ in version",
    ErrorCode.NOT_ALLOWED: "use a key that has this right",
    ErrorCode.LOG_UNAVAILABLE: "free some disk space where the server's directory lies",
    ErrorCode.OVERLOADED: "try again in a moment",
    ErrorCode.NOT_SERVED: "serve a model that is for this, or name what it is for: "
    "`loradock serve --task generate|embed|classify`",
}


class CommandError(Exception):
    """A failure that no `LoradockError` tells: what happened, what to do, and how to exit."""

    def __init__(self, exit_code: ExitCode, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.hint = hint


class Failure(NamedTuple):
    """An error as a command ends with it: for the shell, for a person, for a program."""

    exit_code: ExitCode
    line: str
    hint: str
    fields: dict[str, Any]


def failure_of(error: LoradockError | CommandError | OSError) -> Failure:
    """What to tell about an error."""
    if isinstance(error, LoradockError):
        fields = {
            "code": error.code.value,
            "summary": MEANINGS[error.code].summary,
            "message": error.message,
            "request_id": error.request_id,
            "retryable": error.retryable,
        }
        return Failure(EXIT_OF[error.code], str(error), HINTS[error.code], fields)
    if isinstance(error, CommandError):
        return Failure(error.exit_code, str(error), error.hint, {"message": str(error)})
    told = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return Failure(ExitCode.FAILURE, told, "", {"message": told})


def table_of_exits() -> str:
    """The table as the help shows it."""
    rows = (f"{code.value}  {MEANS[code]}" for code in ExitCode)
    return "Exit codes:\n\n" + "\n\n".join(rows)

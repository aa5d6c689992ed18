"""Exit codes of the commands, and a hint for each error code.

A script can decide by the exit code alone. The errors' texts come with the errors.
"""

import shlex
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from loradock.messages.errors import MEANINGS, EngineGone, ErrorCode, LoradockError


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


EXIT_MEANINGS: Final[dict[ExitCode, str]] = {
    ExitCode.OK: "done",
    ExitCode.FAILURE: "failed for a reason that has no separate exit code (also L017)",
    ExitCode.USAGE: "wrong usage: an invalid option, name or request (L012, L019)",
    ExitCode.NOT_FOUND: "unknown adapter, or its files were not found (L002, L006)",
    ExitCode.REFUSED: "refused: the adapter or the request is not acceptable "
    "(L003, L005, L007, L008, L009, L010, L013, L016)",
    ExitCode.NO_ROOM: "no space, out of memory or overloaded; can succeed later (L001, L004, L015)",
    ExitCode.UNREACHABLE: "server or engine gone or stopping, or no answer in time (L011, L018)",
    ExitCode.LOG: "the log is corrupt, diverges, or can't be written (L014)",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}

EXIT_CODES: Final[dict[ErrorCode, ExitCode]] = {
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
    ErrorCode.HANDLING_FAILED: ExitCode.FAILURE,
    ErrorCode.STOPPING: ExitCode.UNREACHABLE,
    ErrorCode.CONTEXT_EXCEEDED: ExitCode.USAGE,
}

HINTS: Final[dict[ErrorCode, str]] = {
    ErrorCode.NO_ROOM: "`loradock list` shows which adapters are held or in use; `loradock "
    "release` or `loradock evict` frees space",
    ErrorCode.NOT_FOUND: "--path is relative to the server's --adapter-root, or absolute inside "
    "it; without --path it is the adapter's name",
    ErrorCode.DOES_NOT_FIT: "an adapter fits the model that it was trained for, if the server's "
    "--max-lora-rank, --target-module and --enable-tower-connector-lora admit it",
    ErrorCode.DEVICE_OUT_OF_MEMORY: "lower --device-bytes of the server, or evict adapters",
    ErrorCode.CONFIG_REFUSED: "see the named settings in the adapter's adapter_config.json",
    ErrorCode.UNKNOWN_ADAPTER: "`loradock list` shows the known names; `loradock load` adds an "
    "adapter",
    ErrorCode.NOT_RESIDENT: "`loradock activate` copies it into a slot again",
    ErrorCode.NOT_FINITE: "train or export the adapter again; nothing of it was kept",
    ErrorCode.PATH_NOT_ALLOWED: "the server loads adapters only from below its --adapter-root; "
    "links can lead to places below a root",
    ErrorCode.CONFLICT: "`loradock show` shows its state; `load --replace` replaces the content "
    "of a name, `remove --force` removes a held adapter",
    ErrorCode.ENGINE_GONE: "`loradock status` shows whether an engine is attached, `loradock "
    "ready` waits for one; `loradock serve` logs why it can't start one",
    ErrorCode.MALFORMED: "correct the named value; `loradock COMMAND --help` states what "
    "is allowed",
    ErrorCode.NOT_ALLOWED: "use a key that is allowed and has this right; `loradock keys list` "
    "on the server shows the rights of all keys, and the file for --server-key",
    ErrorCode.LOG_UNAVAILABLE: "free disk space on the file system of the server's directory",
    ErrorCode.OVERLOADED: "try again in a moment, or raise the named limit with `loradock "
    "config set`",
    ErrorCode.NOT_SERVED: "serve a model for this task (`loradock serve --task "
    "generate|embed|classify`), or install the package that the message names",
    ErrorCode.HANDLING_FAILED: "report a bug, with the controller's messages and its log",
    ErrorCode.STOPPING: "start the server again: loradock serve",
    ErrorCode.CONTEXT_EXCEEDED: "shorten the prompt or lower --max-tokens, or serve with a larger "
    "--max-model-len if the model allows it",
}


class CommandError(Exception):
    """A failure without an error code: its exit code, its message and what to do."""

    def __init__(self, exit_code: ExitCode, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.hint = hint


class NotReached(EngineGone):
    """No server accepts connections; nothing was sent."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.code} {self.message}"


class ServerNotRunning(NotReached):
    """No server accepts connections in the directory; nothing was sent.

    `pid`: the server that holds the directory and does not serve yet; 0 for none.
    """

    def __init__(self, directory: Path, reason: str, pid: int = 0) -> None:
        command = f"loradock --dir {shlex.quote(str(directory))}"
        hint = f"start one: {command} serve --model MODEL --adapter-root ADAPTERS"
        if pid:
            hint = f"process {pid} is starting or stopping one: {command} ready waits for it"
        super().__init__(f"no LoRADock server answers at {directory} ({reason})", hint)
        self.pid = pid


class Failure(NamedTuple):
    """An error at the end of a command: for the shell, for a person, for a program."""

    exit_code: ExitCode
    line: str
    hint: str
    fields: dict[str, Any]
    details: tuple[str, ...] = ()


def failure_of(error: LoradockError | CommandError | OSError) -> Failure:
    """Return what a command prints for an error, and its exit code."""
    if isinstance(error, LoradockError):
        fields = {
            "code": error.code.value,
            "summary": MEANINGS[error.code].summary,
            "message": error.message,
            "request_id": error.request_id,
            "retryable": error.retryable,
            "details": list(error.details),
        }
        hint = error.hint if isinstance(error, NotReached) else HINTS[error.code]
        return Failure(EXIT_CODES[error.code], str(error), hint, fields, error.details)
    if isinstance(error, CommandError):
        return Failure(error.exit_code, str(error), error.hint, {"message": str(error)})
    message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return Failure(ExitCode.FAILURE, message, "", {"message": message})

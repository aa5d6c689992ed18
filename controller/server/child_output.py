"""The stderr of child processes in JSON: a line that is not JSON becomes the event of one that is.

Libraries write to stderr on their own, and a process that is killed by a signal can't wrap its
last words itself.
"""

import os
import threading
from typing import Final

import msgspec
import structlog

from loradock.processes import process_log

_LINE_BYTES_MAX: Final = 4 * process_log.LINE_CHARACTERS_MAX
_READ_BYTES: Final = 64 << 10

log = structlog.get_logger("serve")


class ChildOutput:
    """A pipe for the stderr of a child, and the thread that forwards its lines."""

    def __init__(self, child: str) -> None:
        self._child = child
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"stderr of {child}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close this process's end for writing: the thread ends after the last child's."""
        os.close(self.write_fd)

    def join(self, timeout_s: float) -> None:
        """Wait for the last lines of a child that has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        rest = b""
        while data := os.read(self._read_fd, _READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._forward(line)
            if len(rest) > _LINE_BYTES_MAX:
                self._forward(rest)
                rest = b""
        if rest:
            self._forward(rest)
        os.close(self._read_fd)

    def _forward(self, line: bytes) -> None:
        text = line.decode(errors="backslashreplace")
        if is_json(line):
            process_log.write_line(text)
        elif text.strip():
            log.warning(text, child=self._child)


def is_json(line: bytes) -> bool:
    """Whether a line is one JSON object."""
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except msgspec.DecodeError:
        return False

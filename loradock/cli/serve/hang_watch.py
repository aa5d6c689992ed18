"""True if a supervised process hangs: it is stopped, or its main loop exceeds a step's bound.

A process that is only starved of the processor is in neither state. Time counts only while the
supervisor ran itself, so a suspended machine or a stopped container ends nothing when it resumes.
"""

import contextlib
from pathlib import Path
from typing import Final

from loradock.processes.progress import START_BOUND_S, Step

_TICKS_PER_TIMEOUT: Final = 8
_TICK_MS_MIN: Final = 10
_TICK_MS_MAX: Final = 250


class HangWatch:
    """Judges one process from what is observed of it once per tick.

    A process that is stopped is reported after half of `hang_timeout_ms`; the rest is for delays of
    the supervisor and for the end of the process.
    """

    def __init__(self, hang_timeout_ms: int) -> None:
        tick_ms = min(hang_timeout_ms // _TICKS_PER_TIMEOUT, _TICK_MS_MAX)
        self.tick_ms: Final = max(tick_ms, _TICK_MS_MIN)
        self._stopped_ns_max: Final = max(hang_timeout_ms // 2, self.tick_ms) * 1_000_000
        self.restart(0)

    def restart(self, now_ns: int) -> None:
        """Begin to observe a new process."""
        self._observed_ns = now_ns
        self._number = 0
        self._in_step_ns = 0
        self._stopped_ns = 0
        self._was_stopped = False

    def observe(self, now_ns: int, step: Step | None, *, is_stopped: bool) -> str:
        """Return why the process hangs; empty if it does not.

        `step`: None if none can be read.
        """
        # A longer time means that the supervisor did not run, so it can't judge others.
        elapsed_ns = min(now_ns - self._observed_ns, 2 * self.tick_ms * 1_000_000)
        self._observed_ns = now_ns
        self._stopped_ns = self._stopped_ns + elapsed_ns if self._was_stopped and is_stopped else 0
        self._was_stopped = is_stopped
        if self._stopped_ns >= self._stopped_ns_max:
            return "it is stopped"
        number = step.number if step else self._number
        self._in_step_ns = self._in_step_ns + elapsed_ns if number == self._number else 0
        self._number = number
        bound_ns = step.bound_ns if step else START_BOUND_S * 1_000_000_000
        if self._in_step_ns <= bound_ns:
            return ""
        return f"step {step.name if step else 'start'} exceeds {bound_ns / 1e9:g} s"


def process_tree(pid: int) -> list[int]:
    """Return a process and those that its main thread started, directly or indirectly."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            found += map(int, children.split())
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False for a process that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The state follows the name of the program, which is in parentheses and can contain some.
    return stat.rpartition(b")")[2].split()[0] == b"T"

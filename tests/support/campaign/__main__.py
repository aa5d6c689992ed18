"""The campaign as a command: `python -m tests.support.campaign`.

Without `--seed` it runs `--count` schedules on all cores. A failing one is one line with its seed.
`--seed` repeats a schedule twice, compares the traces, and prints the end of the trace of one that
fails. `--bugs` searches every planted bug and prints which check found it.
"""

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Iterable

from tests.support.campaign.campaign import STEPS, ScheduleFailed, run_schedule
from tests.support.campaign.machine import simulated_machine
from tests.support.campaign.planted_bugs import BUGS, find_bug

_TRACE_LINES = 200
_COLLECTED_AFTER = 50
"""Schedules between two garbage collections, which are off while a schedule runs."""


def main() -> int:
    """Run the command; the status is 1 if a schedule failed or a bug was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.campaign")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--bugs", action="store_true")
    options = parser.parse_args()
    if options.bugs:
        return _search_bugs(options.count)
    if options.seed is not None:
        return _repeat(options.seed, options.steps)
    if options.jobs > 1:
        return _run_on_cores(options)
    failed = run_schedules(range(options.first, options.first + options.count), options.steps)
    return int(failed > 0)


def run_schedules(seeds: Iterable[int], steps: int = STEPS) -> int:
    """Run schedules and print the failing ones; return their number."""
    failed = 0
    with simulated_machine():
        for number, seed in enumerate(seeds):
            try:
                run_schedule(seed, steps)
            except ScheduleFailed as error:
                failed += 1
                print(error, flush=True)
            # Cycles of one schedule take 0.2 MiB: a million would not fit into memory.
            if number % _COLLECTED_AFTER == 0:
                gc.collect()
    return failed


def _run_on_cores(options: argparse.Namespace) -> int:
    share, rest = divmod(options.count, options.jobs)
    first, processes = options.first, []
    for job in range(options.jobs):
        count = share + (job < rest)
        numbers = {"first": first, "count": count, "steps": options.steps, "jobs": 1}
        arguments = [f"--{name}={number}" for name, number in numbers.items()]
        command = [sys.executable, "-m", "tests.support.campaign", *arguments]
        processes.append(subprocess.Popen(command))
        first += count
    failed = sum(process.wait() != 0 for process in processes)
    print(f"{options.count} schedules of {options.steps} steps; parts with failures: {failed}")
    return int(failed > 0)


def _repeat(seed: int, steps: int) -> int:
    """Run a schedule twice; print the end of its trace if it fails."""
    traces, failures = [], []
    with simulated_machine():
        for _ in range(2):
            log: list[str] = []
            try:
                traces.append(run_schedule(seed, steps, log).trace)
            except ScheduleFailed as error:
                failures.append(str(error))
                traces.append(str(hash(tuple(log))))
    if failures:
        print(*log[-_TRACE_LINES:], *failures, sep="\n")
    equal = "equal" if traces[0] == traces[1] else "different"
    print(f"SEED={seed} STEPS={steps}: two runs have {equal} traces ({traces[0]})")
    return int(bool(failures) or traces[0] != traces[1])


def _search_bugs(seeds_max: int) -> int:
    missed = 0
    with simulated_machine():
        for name in BUGS:
            found = find_bug(name, range(seeds_max))
            missed += found is None
            where = "not found" if found is None else f"{found.schedules:6}  {found.check}"
            print(f"{name:34} {where}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The shared page of a process's step: other processes read it at any time."""

import os
import subprocess
import sys
import threading
from random import Random

import pytest

from loradock.processes.progress import REASON_BYTES_MAX, Progress, loading_step, loading_text
from tests.support.parallel.processes import ROOT

NAMES = ("wait", "receive", "step", "report")


def test_a_step_of_reading_a_model_is_told_in_words() -> None:
    page = Progress()
    assert loading_text(page.read()) == ""
    page.enter(loading_step(12_345, 99_999), 1.0)
    assert loading_text(page.read()) == "12345 of 99999 tensors of its model are read"
    page.enter("wait", 1.0)
    assert loading_text(page.read()) == ""


def test_a_step_is_read_as_it_was_written() -> None:
    page = Progress()
    assert page.read() is None
    page.enter("wait", 2.5)
    first = page.read()
    assert (first.name, first.pid, first.bound_ns) == ("wait", os.getpid(), 2_500_000_000)
    page.enter("wait", 2.5)
    second = page.read()
    assert second.number != first.number
    assert second.since_ns >= first.since_ns
    page.clear()
    assert page.read() is None


@pytest.mark.parametrize("name", ["", "s" * 16, "s" * 40, "é" * 9])
def test_any_name_and_bound_can_be_written(name: str) -> None:
    page = Progress()
    for bound_s in (0, 1e9):
        page.enter(name, bound_s)
        assert page.read().bound_ns == bound_s * 10**9


def test_other_processes_write_and_read_a_shared_page() -> None:
    page = Progress.share()
    code = (
        "import sys; from loradock.processes.progress import Progress\n"
        "page = Progress(sys.argv[1]); page.enter('a', 1); page.enter('b', 2)"
    )
    for _ in range(2):
        page.clear()
        writer = subprocess.Popen([sys.executable, "-c", code, page.path], cwd=ROOT)
        assert writer.wait() == 0
        for reader in (page, Progress(page.path)):
            step = reader.read()
            assert (step.name, step.pid, step.bound_ns) == ("b", writer.pid, 2_000_000_000)


def test_a_damaged_record_is_not_read() -> None:
    random = Random(seed := 7)
    print(f"seed {seed}")
    page = Progress()
    for _ in range(500):
        page.enter("step", 1)
        at = random.randrange(len(page._page) - REASON_BYTES_MAX)
        page._page[at] ^= 1 << random.randrange(8)
        assert page.read() is None


def test_a_reader_never_sees_parts_of_two_steps() -> None:
    page = Progress.share()
    reader, done = Progress(page.path), threading.Event()

    def write() -> None:
        while not done.is_set():
            for number, name in enumerate(NAMES):
                page.enter(name, number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        steps = [step for _ in range(20_000) if (step := reader.read())]
    finally:
        done.set()
        thread.join()
    assert steps
    for step in steps:
        assert step.bound_ns == NAMES.index(step.name) * 10**9
        assert step.number % len(NAMES) == (NAMES.index(step.name) + 1) % len(NAMES)
    numbers = [step.number for step in steps]
    assert numbers == sorted(numbers)


def test_a_process_records_why_it_ends() -> None:
    page = Progress.share()
    assert page.reason() == ""
    Progress(page.path).end("wrong configuration: é" + "x" * 5000)
    assert page.reason().startswith("wrong configuration: é")
    assert len(page.reason()) < 5000
    page.enter("wait", 1.0)
    assert page.reason()
    page.clear()
    assert page.reason() == ""

"""Recorded histories: the same inputs lead to the same world in every version.

A file `rules-N-….jsonl` in `tests/histories` begins with a line with rules number, policy, limits
and the final digest. Every further line is one `records.Record` in hexadecimal, some of them with
the digest of the world before it. A change of what the core decides changes a digest. It then needs
a new number (`loradock.controller.core.limits.RULES`) and new histories in place of the old ones:

    python -m tests.controller.core.test_controller_histories

writes the missing ones of the current rules and replaces none.
"""

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import RULES, limits_from, limits_to
from loradock.messages.records import Input, Record
from tests.support.simulation.workload import random_history

HISTORIES = Path(__file__).parents[2] / "histories"
SEEDS = (3, 12, 18, 21)
STEPS = 300
DIGEST_INTERVAL = 50

_decoder = msgspec.msgpack.Decoder(Record)


REPLAYED = sorted(HISTORIES.glob(f"rules-{RULES}-*.jsonl"))


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return a history's head and records."""
    first, *lines = path.read_text().splitlines()
    head = msgspec.json.decode(first)
    return head, [_decoder.decode(bytes.fromhex(line)) for line in lines]


def write(path: Path, seed: int) -> None:
    """Record the history of a seed."""
    deployment = random_history(seed, STEPS).deployment
    controller = Controller(deployment.limits)
    lines = []
    for seq, data in enumerate(deployment.inputs):
        record = _decoder.decode(data)
        digest = controller.digest() if seq % DIGEST_INTERVAL == 0 else ""
        lines.append(msgspec.msgpack.encode(msgspec.structs.replace(record, digest=digest)).hex())
        controller.handle(record.input, record.time_ns)
    head = {
        "rules": RULES,
        "policy": "lru",
        "limits": limits_to(deployment.limits),
        "digest": controller.digest(),
    }
    with path.open("x") as file:
        file.write("\n".join([msgspec.json.encode(head).decode(), *lines]) + "\n")


def test_there_are_histories_of_the_current_rules_alone() -> None:
    assert len(REPLAYED) == len(SEEDS), f"rules {RULES} have too few histories; see above"
    assert sorted(HISTORIES.iterdir()) == REPLAYED


def controller_of(head: dict[str, Any]) -> Controller:
    return Controller(limits_from(head["limits"]), head["policy"])


@pytest.mark.parametrize("path", REPLAYED, ids=lambda path: path.name)
def test_a_recorded_history_leads_to_its_digests(path: Path) -> None:
    head, records = read(path)
    assert path.name.startswith(f"rules-{head['rules']}-")
    controller = controller_of(head)
    compared = 0
    for seq, record in enumerate(records):
        if record.digest:
            compared += 1
            assert controller.digest() == record.digest, f"other decisions before input {seq}"
        controller.handle(record.input, record.time_ns)
    assert controller.digest() == head["digest"], "other decisions: they need a new RULES number"
    assert compared == 1 + (len(records) - 1) // DIGEST_INTERVAL
    assert len(records) > STEPS // 2


@pytest.mark.parametrize("path", REPLAYED, ids=lambda path: path.name)
def test_one_input_less_changes_the_digest(path: Path) -> None:
    """The digests depend on the history: a replay without one input is noticed."""
    head, records = read(path)
    controller = controller_of(head)
    for record in records[:-1]:
        controller.handle(record.input, record.time_ns)
    assert controller.digest() != head["digest"]


def test_histories_meet_every_kind_of_input() -> None:
    met = {type(record.input).__name__ for path in REPLAYED for record in read(path)[1]}
    # A skip changes nothing in the core; the shell's tests and the log's have them.
    assert met == {kind.__name__ for kind in get_args(Input)} - {"InputSkipped"}


if __name__ == "__main__":
    HISTORIES.mkdir(exist_ok=True)
    for history_seed in SEEDS:
        history = HISTORIES / f"rules-{RULES}-seed-{history_seed}.jsonl"
        if not history.exists():
            write(history, history_seed)

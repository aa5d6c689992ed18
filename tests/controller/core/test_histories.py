"""Recorded histories, kept for ever: the same inputs add up to the same world in every version.

A file `rules-N-….jsonl` in `tests/histories` begins with a line that tells rules, policy, limits
and the final digest; every further line is one `records.Record` in hexadecimal, some of them with
the digest of the world before it. A change of what the core decides makes a digest differ. It then
gets a new number (`controller.core.limits.RULES`), and a new history beside the old ones:

    python -m tests.controller.core.test_histories

writes those of the present rules that are missing, over none that is there. Histories of former
rules stay, as what `loradock replay` has to refuse or to read by their own rules.
"""

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from controller.core.controller import Controller
from controller.core.limits import RULES, limits_from, limits_to
from messages.records import Input, Record
from tests.support.simulation.clients import random_history

HISTORIES = Path(__file__).parents[2] / "histories"
SEEDS = (3, 12, 18)
LATER_SEEDS = (21,)
"""Added when there was a new kind of input: the rules for the others stayed as they were."""
STEPS = 300
DIGEST_INTERVAL = 50

_decoder = msgspec.msgpack.Decoder(Record)


def files(rules: int) -> list[Path]:
    """The recorded histories of one number of rules."""
    return sorted(HISTORIES.glob(f"rules-{rules}-*.jsonl"))


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """A history's head and records."""
    head, *lines = path.read_text().splitlines()
    return msgspec.json.decode(head), [_decoder.decode(bytes.fromhex(line)) for line in lines]


def write(path: Path, seed: int) -> None:
    """Record the history that a seed stands for."""
    sim = random_history(seed, STEPS).sim
    controller = Controller(sim.limits)
    lines = []
    for seq, data in enumerate(sim.inputs):
        record = _decoder.decode(data)
        digest = controller.digest() if seq % DIGEST_INTERVAL == 0 else ""
        lines.append(msgspec.msgpack.encode(msgspec.structs.replace(record, digest=digest)).hex())
        controller.handle(record.input, record.time_ns)
    head = {
        "rules": RULES,
        "policy": "lru",
        "limits": limits_to(sim.limits),
        "digest": controller.digest(),
    }
    with path.open("x") as file:
        file.write("\n".join([msgspec.json.encode(head).decode(), *lines]) + "\n")


def test_there_are_histories_of_the_present_rules() -> None:
    assert len(files(RULES)) >= len(SEEDS), f"rules {RULES} have no recorded history; see above"


@pytest.mark.parametrize("path", files(RULES), ids=lambda path: path.name)
def test_a_recorded_history_adds_up_to_its_digests(path: Path) -> None:
    head, records = read(path)
    assert head["rules"] == RULES
    controller = Controller(limits_from(head["limits"]), head["policy"])
    compared = 0
    for seq, record in enumerate(records):
        if record.digest:
            compared += 1
            assert controller.digest() == record.digest, f"other decisions before input {seq}"
        controller.handle(record.input, record.time_ns)
    assert controller.digest() == head["digest"], "other decisions: they need a new RULES number"
    assert compared == 1 + (len(records) - 1) // DIGEST_INTERVAL
    assert len(records) > STEPS // 2


@pytest.mark.parametrize("path", files(RULES), ids=lambda path: path.name)
def test_one_input_less_gives_another_digest(path: Path) -> None:
    """The digests see what the history does: a fold that forgets an input is found out."""
    head, records = read(path)
    controller = Controller(limits_from(head["limits"]), head["policy"])
    for record in records[:-1]:
        controller.handle(record.input, record.time_ns)
    assert controller.digest() != head["digest"]


def test_histories_meet_every_kind_of_input() -> None:
    met = {type(record.input).__name__ for path in files(RULES) for record in read(path)[1]}
    assert met == {kind.__name__ for kind in get_args(Input)}


if __name__ == "__main__":
    HISTORIES.mkdir(exist_ok=True)
    for history_seed in (*SEEDS, *LATER_SEEDS):
        history = HISTORIES / f"rules-{RULES}-seed-{history_seed}.jsonl"
        if not history.exists():
            write(history, history_seed)

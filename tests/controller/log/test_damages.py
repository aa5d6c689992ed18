"""Every damage of every file of a log leads to a serving controller, and the texts are true."""

import random
import re
import shutil
from pathlib import Path

import pytest

from loradock.controller.log.repair import repair_plan, verify
from loradock.controller.log.segments import segment_paths
from tests.support.seeds import fresh_seed
from tests.support.simulation import log_damages
from tests.support.simulation.log_damages import (
    BEGIN,
    DAMAGES,
    END,
    FILES,
    RECORDS,
    REPAIR,
    Outcome,
    digests,
    outcome,
    outcomes,
    table,
    write_log,
)
from tests.support.sources import ROOT

PAIRS = 40


@pytest.fixture(autouse=True)
def without_syncs(without_fsync: None) -> None:
    """The damages are done to files that no process has open."""


def assert_texts_are_true(found: Outcome, directory: Path) -> None:
    """What is claimed about records agrees with the records that are left."""
    lost = range(found.records + 1, RECORDS + 1)
    text = " ".join(found.texts)
    if found.plan is not None:
        assert "loradock log repair" in text or "move it to another directory" in text
        assert found.plan.next_seq == found.records + 1
        claim = found.plan.loss
        if claim == "no record is lost":
            assert not lost
        elif not claim.endswith("if there were any"):
            assert lost
    elif lost:
        assert re.search(rf"'seq': {found.records + 1},.*an unfinished record was cut", text)
    # Whatever a text says is missing or in a snapshot has a number that the log had.
    for number in re.findall(r"(?:record|records up to|to) (\d+)", text):
        assert int(number) <= RECORDS + 1
    for name in re.findall(r"/(\d{20}\.\w+)", text):
        assert list((directory / "log").glob(f"{name}*")) or name in FILES.values()


def bytes_of(directory: Path) -> list[bytes]:
    """The contents of a log's segments and snapshots, and of what was put aside."""
    paths = (path for path in (directory / "log").iterdir() if path.name[:20].isdigit())
    return [path.read_bytes() for path in paths if path.is_file()]


def test_every_damage_leads_to_a_serving_controller(tmp_path: Path) -> None:
    found = outcomes(tmp_path)
    for (file, damage), cell in found.items():
        directory = tmp_path / f"{file} {damage}"
        assert cell.digest == digests()[cell.records], (file, damage)
        assert_texts_are_true(cell, directory)
        # Only the last segment has records that no snapshot has.
        assert cell.lost == "none" or file == "segment 4", (file, damage)
        assert (REPAIR in cell.commands) == (cell.plan is not None)
        if cell.plan is not None:
            assert repair_plan(directory / "log") is None
    page = (ROOT / "docs" / "operating.md").read_text()
    assert page.split(BEGIN)[1].split(END)[0] == table(found), "run `make damages`"


def test_a_repair_after_any_damage_leaves_a_log_without_problems(tmp_path: Path) -> None:
    """Also after damages that a start does not notice, and with every byte still there."""
    whole, other = tmp_path / "whole", tmp_path / "other" / "log"
    write_log(whole / "log")
    write_log(other, log_damages.OTHER_SEED)
    for file, name in FILES.items():
        for damage, do in DAMAGES.items():
            if damage == "of another version" and file.startswith("segment"):
                continue
            directory = tmp_path / f"{file} {damage}"
            shutil.copytree(whole, directory)
            do(directory / "log" / name, other)
            before = bytes_of(directory)
            log_damages.repair(directory / "log")
            left = bytes_of(directory)
            assert all(content in left for content in before), (file, damage)
            found = verify(directory / "log")
            assert (found.segments.corruption, found.problems) == (None, ()), (file, damage)
            texts: list[str] = []
            assert log_damages.start(directory, texts) is not None, (file, damage, texts)


def test_two_damages_lead_to_a_serving_controller(tmp_path: Path) -> None:
    seed = fresh_seed()
    rng = random.Random(seed)
    whole, other = tmp_path / "whole", tmp_path / "other" / "log"
    write_log(whole / "log")
    write_log(other, log_damages.OTHER_SEED)
    excluded = ("of another version", "swapped with the next")
    damages = [do for name, do in DAMAGES.items() if name not in excluded]
    for number in range(PAIRS):
        directory = tmp_path / str(number)
        shutil.copytree(whole, directory)
        files = rng.sample([*FILES.values()], 2)
        done = [rng.choice(damages) for _ in files]
        for name, do in zip(files, done, strict=True):
            do(directory / "log" / name, other)
        found = outcome(directory, directory / "log" / files[0])
        assert found.digest == digests()[found.records], (seed, files, done)
        assert segment_paths(directory / "log")

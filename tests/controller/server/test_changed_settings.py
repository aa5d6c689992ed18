"""A change of settings is in force and outlives the process, or nothing of it happened."""

from pathlib import Path
from typing import Any

import pytest

from loradock.controller.log.format import LogFull
from loradock.controller.log.replay import replay
from loradock.controller.log.writer import Log
from loradock.controller.server import admin
from loradock.messages.control import ChangeSettings, ShowSettings
from loradock.messages.errors import ErrorCode
from tests.support.simulation.stepped_clocks import RequestClient, SteppedClocks, serving


def change(client: RequestClient, rest_ms: int) -> Any:
    return client.call(ChangeSettings(client.new_id(), {"rest_ms": rest_ms}))


def rest_ms(client: RequestClient) -> int:
    return int(client.call(ShowSettings(client.new_id())).limits["rest_ms"])


def full(*_: object, **__: object) -> None:
    raise OSError("no space left")


def full_log(*_: object, **__: object) -> None:
    raise LogFull("no space left")


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [(admin, "write_file", full), (Log, "change_header", full_log), (Log, "begin_group", full_log)],
    ids=["file", "header", "record before the header"],
)
def test_a_change_that_can_not_be_stored_changes_nothing(
    owner: Any, name: str, failing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = SteppedClocks()
    with serving(tmp_path, clocks.clocks) as client:
        assert not hasattr(change(client, 7), "code")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            assert change(client, 8).code is ErrorCode.LOG_UNAVAILABLE
            assert rest_ms(client) == 7
    with serving(tmp_path, clocks.clocks) as client:
        assert rest_ms(client) == 7
    assert replay(tmp_path / "log", from_start=True).divergence is None

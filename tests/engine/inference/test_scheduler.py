"""The task of an engine: requests for another one are refused."""

import pytest

from loradock.engine.errors import NotServed
from loradock.engine.inference.scheduler import check_task
from loradock.messages.commands import StartGeneration, StartPooling


@pytest.mark.parametrize("served", ["generate", "embed", "classify"])
def test_an_engine_has_one_task(served: str) -> None:
    fields = (1, "r", 0, -1, 0)
    commands = {
        "generate": StartGeneration(*fields),
        "embed": StartPooling(*fields, "embed"),
        "classify": StartPooling(*fields, "classify"),
    }
    for task, command in commands.items():
        if task == served:
            check_task(served, command)
        else:
            with pytest.raises(NotServed, match=f"to {served}, not to {task}"):
                check_task(served, command)

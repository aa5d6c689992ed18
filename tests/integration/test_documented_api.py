"""Programs in the words of vLLM's documentation: its names, argument orders and error branches."""

from pathlib import Path

import pytest
import torch

from engine.adapters import LoRARequest
from engine.errors import EngineError
from engine.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    WorkerLoRAManager,
)
from tests.support.engine.manager_examples import CLASSES, CONTENTS, full_manager, make_manager

torch.set_num_threads(1)


def add_with_handling(worker: WorkerLoRAManager, request: LoRARequest) -> str:
    """Return the branch of the documented error handling that was reached."""
    try:
        return "added" if worker.add_adapter(request) else "known"
    except RuntimeError as error:
        if "No free adapter slots" not in str(error):
            raise
        worker.remove_oldest_adapter()
        worker.add_adapter(request)
        return "added after removing the oldest"
    except FileNotFoundError:
        return "missing"
    except ValueError:
        return "incompatible"
    except KeyError:
        return "unknown"


def test_the_documented_error_handling_reaches_its_branches(tmp_path: Path) -> None:
    for number, content in enumerate(CONTENTS, 1):
        content.save(tmp_path / str(number))
    wide = tmp_path / "wide"
    CONTENTS[0].save(wide)
    config = wide / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 64'))
    worker = WorkerLoRAManager(make_manager(LoRAModelManager, slots=2, capacity=2))

    def add(number: int, directory: str) -> str:
        return add_with_handling(worker, LoRARequest(directory, number, str(tmp_path / directory)))

    assert [add(1, "1"), add(1, "1"), add(2, "2")] == ["added", "known", "added"]
    assert add(3, "nowhere") == "missing"
    assert worker.list_adapters() == {1, 2}
    assert add(3, "3") == "added after removing the oldest"
    assert worker.list_adapters() == {2, 3}
    assert add(4, "wide") == "incompatible"


@pytest.mark.parametrize("cls", CLASSES)
def test_a_manager_without_room_raises_what_is_documented(cls: type[LoRAModelManager]) -> None:
    manager = full_manager(cls, slots=1, capacity=2)
    manager.pin_adapter(1)
    if cls is LoRAModelManager:
        with pytest.raises(RuntimeError, match="No free adapter slots"):
            manager.add_adapter(CONTENTS[2].model(3))
    with pytest.raises(ValueError, match="No free lora slots") as caught:
        manager.activate_adapter(2)
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(KeyError, match="9"):
        manager.activate_adapter(9)
    with pytest.raises(ValueError, match="LoRA 9 is not registered"):
        manager.pin_adapter(9)


def test_more_adapters_than_slots_is_a_runtime_error(tmp_path: Path) -> None:
    worker = LRUCacheWorkerLoRAManager(make_manager(LRUCacheLoRAModelManager, slots=2))
    batch = {
        LoRARequest(str(number), number, str(CONTENTS[number - 1].save(tmp_path / str(number))))
        for number in (1, 2, 3)
    }
    with pytest.raises(RuntimeError, match=r"number of requested LoRAs \(3\)") as caught:
        worker.set_active_adapters(batch)
    assert isinstance(caught.value, EngineError)
    assert worker.list_adapters() == set()

"""Batches by request: files, paths, holds and memory, on both worker managers."""

import gc
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer

from loradock.engine.adapters import LoRAModel, LoRARequest
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import (
    AdapterDoesNotFit,
    AdapterNotFound,
    Conflict,
    NoRoom,
    NotResident,
    PathNotAllowed,
)
from loradock.engine.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    WorkerLoRAManager,
    create_lora_manager,
)
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.manager_examples import (
    CLASSES,
    CONTENTS,
    ERROR_MAX,
    check_rows,
    full_manager,
    make_manager,
    manager_state,
    mapping_of,
)

torch.set_num_threads(1)


EXAMPLES = Path(__file__).parents[3] / "examples" / "tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the files of every content, by number."""
    for number, content in enumerate(CONTENTS, 1):
        content.save(tmp_path / str(number))
    return tmp_path


def request(folder: Path, number: int, **fields: object) -> LoRARequest:
    values = {
        "lora_name": f"n{number}",
        "lora_int_id": number,
        "lora_path": str(folder / str(number)),
    }
    return LoRARequest(**(values | fields))


@pytest.mark.parametrize("worker_class", [WorkerLoRAManager, LRUCacheWorkerLoRAManager])
def test_a_batch_too_large_next_to_a_held_adapter_is_refused_before_reading(
    worker_class: type[WorkerLoRAManager], folder: Path
) -> None:
    manager = full_manager(LRUCacheLoRAModelManager, slots=2, capacity=3)
    manager.pin_adapter(1)
    worker = worker_class(manager)
    before = manager_state(manager)
    unread = [request(folder, number, lora_path="/nowhere") for number in (8, 9)]
    with pytest.raises(NoRoom, match="held keep 1 slots"):
        worker.set_active_adapters(unread, mapping_of(8, 9))
    assert manager_state(manager) == before
    assert manager.metrics.loads.count == 0
    with pytest.raises(AdapterNotFound, match="there is no directory"):
        worker.set_active_adapters(unread[:1], mapping_of(8))
    assert manager_state(manager) == before


def test_unchanged_files_are_read_once(
    folder: Path,
) -> None:
    """Also where each request has `load_inplace`."""
    manager = make_manager(LRUCacheLoRAModelManager)
    worker = LRUCacheWorkerLoRAManager(manager)
    again = request(folder, 1, load_inplace=True)
    for _ in range(3):
        worker.set_active_adapters([again], mapping_of(1))
        assert manager.metrics.loads.count == 1
    assert worker.add_adapter(again) is False
    CONTENTS[2].save(folder / "1")
    for _ in range(3):
        worker.set_active_adapters([request(folder, 1)], mapping_of(1))
        check_rows(manager, {1: CONTENTS[0]}, 1)
    for _ in range(3):
        worker.set_active_adapters([again], mapping_of(1))
        check_rows(manager, {1: CONTENTS[2]}, 1)
        assert manager.metrics.loads.count == 2
    # Two ids with the same bytes have their own stamps.
    CONTENTS[2].save(folder / "2")
    for _ in range(3):
        both = [again, request(folder, 2, load_inplace=True)]
        worker.set_active_adapters(both, mapping_of(1, 2))
    assert manager.metrics.loads.count == 3


def test_an_adapter_that_is_read_again_stays_held_and_in_its_slot(folder: Path) -> None:
    manager = make_manager(LoRAModelManager, slots=1, capacity=1)
    worker = WorkerLoRAManager(manager)
    worker.add_adapter(request(folder, 1))
    worker.pin_adapter(1)
    (folder / "1" / "adapter_model.safetensors").write_bytes(b"what is no adapter")
    before = manager_state(manager)
    with pytest.raises(AdapterDoesNotFit):
        worker.add_adapter(request(folder, 1, load_inplace=True))
    assert manager_state(manager) == before
    CONTENTS[3].save(folder / "1")
    assert worker.add_adapter(request(folder, 1, load_inplace=True))
    assert manager.is_pinned(1)
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: CONTENTS[3]}, 1)


def in_arrays(model: LoRAModel) -> tuple[LoRAModel, list[weakref.ref[np.ndarray]]]:
    """Move A into arrays; return the model and references that show when the arrays are freed."""
    arrays = [lora.lora_a.numpy().copy() for lora in model.loras.values()]
    for lora, array in zip(model.loras.values(), arrays, strict=True):
        lora.lora_a = torch.from_numpy(array)
    return model, [weakref.ref(array) for array in arrays]


@pytest.mark.parametrize("leave", ["remove", "evict", "replace"])
def test_a_removed_adapter_frees_all_its_memory(leave: str, folder: Path) -> None:
    """On the host and on the device, and the tensors that were added."""
    manager = make_manager(LRUCacheLoRAModelManager, slots=1, capacity=1)
    empty = manager_state(manager)
    if leave == "replace":
        worker = LRUCacheWorkerLoRAManager(manager)
        worker.add_adapter(request(folder, 1))
    else:
        model, arrays = in_arrays(CONTENTS[0].model(1))
        manager.add_adapter(model)
        del model
        gc.collect()
        assert not any(array() is not None for array in arrays)
        manager.activate_adapter(1)
    blob = weakref.ref(next(iter(manager._engine.residency.host_adapters.values())).weights.data)
    if leave == "evict":
        manager.add_adapter(CONTENTS[1].model(2))
    elif leave == "replace":
        CONTENTS[1].save(folder / "1")
        worker.add_adapter(request(folder, 1, load_inplace=True))
    else:
        manager.remove_adapter(1)
    gc.collect()
    assert blob() is None
    manager.remove_all_adapters()
    assert manager_state(manager) == empty
    assert not manager._core.world.adapters


class Recording(LRUCacheLoRAModelManager):
    """A manager of a program that extends the documented methods."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.calls: list[tuple[str, int, bool]] = []

    def add_adapter(self, adapter: LoRAModel) -> bool:
        # What a program changes here is what is served.
        for lora in adapter.loras.values():
            lora.lora_b.zero_()
        added = super().add_adapter(adapter)
        self.calls.append(("add", adapter.id, added))
        return added

    def activate_adapter(self, lora_id: int) -> bool:
        activated = super().activate_adapter(lora_id)
        self.calls.append(("activate", lora_id, activated))
        return activated


@pytest.mark.parametrize("worker_class", [WorkerLoRAManager, LRUCacheWorkerLoRAManager])
def test_the_methods_of_a_subclass_are_called(
    worker_class: type[WorkerLoRAManager], folder: Path
) -> None:
    """Also the second time, for files that changed, and where a batch has base rows (None)."""
    manager = make_manager(Recording)
    worker = worker_class(manager)
    worker.add_adapter(request(folder, 1))
    assert manager.calls == [("add", 1, True), ("activate", 1, True)]
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: None}, 1)
    manager.calls.clear()
    worker.set_active_adapters([request(folder, 2), None, request(folder, 1)], mapping_of(1, 0, 2))
    first, added, last = manager.calls
    assert first == ("activate", 1, False)
    assert (added, last) == (("add", 2, True), ("activate", 2, True))
    manager.calls.clear()
    manager.pin_adapter(1)
    CONTENTS[2].save(folder / "1")
    worker.set_active_adapters([request(folder, 1, load_inplace=True)])
    assert manager.calls == [("add", 1, True), ("activate", 1, True)]
    assert manager.is_pinned(1)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_oldest_adapter_is_removed_unless_all_are_pinned(
    cls: type[LoRAModelManager], folder: Path
) -> None:
    worker = WorkerLoRAManager(make_manager(cls))
    manager = worker.manager
    assert worker.remove_oldest_adapter() is False
    for number in (1, 2):
        manager.add_adapter(CONTENTS[number].model(number))
    manager.pin_adapter(1)
    assert worker.remove_oldest_adapter()
    assert worker.list_adapters() == {1}
    before = manager_state(manager)
    with pytest.raises(RuntimeError, match="all 1 adapters are pinned"):
        worker.remove_oldest_adapter()
    assert manager_state(manager) == before


def test_a_worker_has_the_managers_facts_for_warming_up() -> None:
    worker = WorkerLoRAManager(make_manager(LoRAModelManager))
    assert worker.get_dummy_lora_warmup_rank(8) == 8
    assert worker.supports_tower_connector_lora() is False


def test_ids_and_paths_are_one_to_one(folder: Path) -> None:
    manager = make_manager(LRUCacheLoRAModelManager)
    worker = LRUCacheWorkerLoRAManager(manager)
    assert worker.add_adapter(request(folder, 1))
    assert not worker.add_adapter(request(folder, 1))
    assert not worker.add_adapter(request(folder, 1, lora_path=""))
    before = manager_state(manager)
    other = request(folder, 1, lora_path=str(folder / "2"))
    with pytest.raises(Conflict, match="another lora_int_id"):
        worker.add_adapter(other)
    with pytest.raises(Conflict, match="in one batch"):
        worker.set_active_adapters([request(folder, 1), other])
    for path in ("/no/where", "zero\0byte", "\ud800", "x" * 5000):
        with pytest.raises(AdapterNotFound):
            worker.add_adapter(request(folder, 3, lora_path=path))
    with pytest.raises(AdapterNotFound, match="no lora_path"):
        worker.add_adapter(request(folder, 3, lora_path=""))
    with pytest.raises(NotResident, match=r"\[2\]"):
        worker.set_active_adapters([request(folder, 1)], mapping_of(1, 2))
    assert manager_state(manager) == before
    assert worker.add_adapter(request(folder, 1, lora_path=other.lora_path, load_inplace=True))
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: CONTENTS[1]}, 1)


def test_paths_outside_the_roots_are_refused(folder: Path) -> None:
    outside = CONTENTS[0].save(folder.parent / f"{folder.name}-outside")
    worker = WorkerLoRAManager(make_manager(LoRAModelManager), adapter_roots=[folder])
    assert worker.add_adapter(request(folder, 1))
    for path in (outside, folder / "1" / ".." / ".." / outside.name):
        with pytest.raises(PathNotAllowed):
            worker.add_adapter(request(folder, 2, lora_path=str(path)))
    (folder / "link").symlink_to(outside)
    with pytest.raises(PathNotAllowed):
        worker.add_adapter(request(folder, 2, lora_path=str(folder / "link")))


def test_the_lru_worker_keeps_other_adapters_and_the_plain_one_does_not(folder: Path) -> None:
    for worker_class, kept in ((WorkerLoRAManager, {3}), (LRUCacheWorkerLoRAManager, {1, 2, 3})):
        cls = CLASSES[worker_class is LRUCacheWorkerLoRAManager]
        worker = worker_class(make_manager(cls))
        worker.set_active_adapters([request(folder, 1), request(folder, 2)], mapping_of(1, 2))
        worker.set_active_adapters([request(folder, 3)], mapping_of(3, 0))
        assert worker.list_adapters() == kept
        check_rows(worker.manager, {3: CONTENTS[2]}, 3, 0)
        worker.set_active_adapters([], LoRAMapping([], []))
        assert worker.remove_all_adapters() == (worker_class is LRUCacheWorkerLoRAManager)


def test_metrics_count_calls(folder: Path) -> None:
    ticks = iter(range(1000))
    manager = make_manager(LRUCacheLoRAModelManager, clock=lambda: float(next(ticks)))
    worker = LRUCacheWorkerLoRAManager(manager)
    worker.add_adapter(request(folder, 1))
    worker.set_active_adapters([request(folder, 1), request(folder, 2)])
    manager.add_adapter(CONTENTS[2].model(3))
    manager.activate_adapter(3)
    manager.activate_adapter(3)
    metrics = worker.get_lora_metrics()
    assert metrics["adapters"] == {
        "registered": 3,
        "active": 2,
        "capacity": 3,
        "utilization": 1.0,
        "host_utilization": 1.0,
    }
    performance = metrics["performance"]
    assert (performance["avg_activation_time"], performance["avg_switching_time"]) == (1.0, 5.0)
    assert (performance["hits"], performance["misses"], performance["evictions"]) == (2, 3, 1)
    assert sum(one["activations"] for one in metrics["counters"].values()) == 3
    assert {name: performance[name]["count"] for name in ("activations", "switches", "loads")} == {
        "activations": 3,
        "switches": 1,
        "loads": 2,
    }
    assert performance["loads"] == {
        "count": 2,
        "seconds": 2.0,
        "longest_seconds": 1.0,
        "last_seconds": 1.0,
    }
    sizes = metrics["memory"]["adapters"]
    assert sizes[1]["device_bytes"] == 0 < sizes[1]["pinned_bytes"]
    assert sizes[3]["device_bytes"] == sizes[3]["pinned_bytes"]


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the example model is not in this checkout")
def test_the_example_adapters_are_pefts_through_the_manager() -> None:
    names = sorted(path.name for path in (EXAMPLES / "adapters").iterdir())
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "model")
    config = LoRAConfig(max_lora_rank=64, max_loras=len(names))
    rows, tokens = len(names) + 1, (72, 101, 108, 108, 111)
    manager = create_lora_manager(
        model, rows, 256, model.config.vocab_size, config, None, "cpu", LRUCacheLoRAModelManager
    )
    worker = LRUCacheWorkerLoRAManager(manager)
    ids = dict(enumerate(names, 1))
    requested = [
        LoRARequest(name, number, str(EXAMPLES / "adapters" / name)) for number, name in ids.items()
    ]
    index = [number for number in (0, *ids) for _ in tokens]
    worker.set_active_adapters(requested, LoRAMapping(index, [0, *ids], is_prefill=True))
    with torch.no_grad():
        found = manager.model(torch.tensor([tokens] * rows)).logits
        for number, name in ids.items():
            fresh = AutoModelForCausalLM.from_pretrained(EXAMPLES / "model")
            peft = PeftModel.from_pretrained(fresh, EXAMPLES / "adapters" / name).eval()
            expected = peft(torch.tensor([tokens])).logits[0]
            assert relative_error(found[number], expected) < ERROR_MAX, name


def test_a_tokenizer_that_differs_from_the_models_is_reported_in_the_log(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "model")
    shutil.copytree(EXAMPLES / "adapters" / "upper", tmp_path / "upper")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "model")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "upper")
    config = LoRAConfig(max_lora_rank=64, max_loras=2)
    manager = create_lora_manager(
        model, 4, 256, model.config.vocab_size, config, None, "cpu", LRUCacheLoRAModelManager
    )
    worker = LRUCacheWorkerLoRAManager(manager)
    with capture_logs() as logs:
        worker.add_adapter(LoRARequest("upper", 1, str(tmp_path / "upper")))
        worker.add_adapter(LoRARequest("count", 2, str(EXAMPLES / "adapters" / "count")))
    [entry] = [entry for entry in logs if "warnings" in entry]
    assert entry["adapter"] == 1
    assert "'<new>'" in entry["warnings"][0]

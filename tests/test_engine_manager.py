"""The manager's calls one by one: what they refuse, what they give back, and the known traps."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.adapters import LoRALayerWeights, LoRAModel, LoRARequest
from engine.config import LoRAConfig
from engine.errors import (
    AdapterDoesNotFit,
    AdapterNotFound,
    Conflict,
    DeviceOutOfMemory,
    EngineError,
    NoRoom,
    NotFinite,
    NotResident,
    PathNotAllowed,
    UnknownAdapter,
)
from engine.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    WorkerLoRAManager,
    create_lora_manager,
)
from engine.punica import LoRAMapping
from messages.errors import ErrorCode
from tests.engine_examples import relative_error
from tests.manager_examples import (
    CONTENTS,
    ERROR_MAX,
    MLP,
    PROMPT,
    VOCABULARY,
    base,
    check_rows,
    forward,
    logits_of,
    make_manager,
    mapping_of,
)

EXAMPLES = Path(__file__).parent.parent / "examples" / "tiny"
CLASSES = (LoRAModelManager, LRUCacheLoRAModelManager)
Change = Callable[[LoRALayerWeights], LoRALayerWeights]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every content as files, by number."""
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


def held(manager: LoRAModelManager) -> object:
    """Everything that a refused call must leave as it was."""
    pinned = [adapter_id for adapter_id in manager.adapter_ids if manager.is_pinned(adapter_id)]
    memory = manager.get_lora_metrics()["memory"]
    return manager.adapter_ids, manager.lora_index_to_id, pinned, memory


def full(cls: type[LoRAModelManager], slots: int = 2, capacity: int = 2) -> LoRAModelManager:
    """A manager with adapters 1 to `capacity`, of which the first are in slots."""
    manager = make_manager(cls, slots, capacity)
    for adapter_id in range(1, capacity + 1):
        manager.add_adapter(CONTENTS[adapter_id - 1].model(adapter_id))
        if adapter_id <= slots:
            manager.activate_adapter(adapter_id)
    return manager


def changed(number: int, module: str, change: Change) -> LoRAModel:
    """Content `number` as adapter 9, with one module's weights changed."""
    model = CONTENTS[number].model(9)
    model.loras[module] = change(model.loras[module])
    return model


def poked(letter: str, value: float) -> Change:
    def change(lora: LoRALayerWeights) -> LoRALayerWeights:
        getattr(lora, letter)[0, 0] = value
        return lora

    return change


def reshaped(**shapes: tuple[int, int]) -> Change:
    return lambda lora: replace(lora, **{name: torch.ones(shape) for name, shape in shapes.items()})


UP = MLP[1]
BAD: dict[str, tuple[Callable[[], LoRAModel], type[EngineError], str]] = {
    "NaN in A": (lambda: changed(0, UP, poked("lora_a", torch.nan)), NotFinite, "up_proj"),
    "infinity in B": (lambda: changed(0, UP, poked("lora_b", torch.inf)), NotFinite, "up_proj"),
    "beyond the dtype once scaled": (
        lambda: changed(0, UP, poked("lora_b", 2e38)),
        NotFinite,
        "too far",
    ),
    "too wide": (
        lambda: changed(0, UP, reshaped(lora_a=(4, 17))),
        AdapterDoesNotFit,
        "[4, 17]",
    ),
    "too low": (
        lambda: changed(0, UP, reshaped(lora_b=(23, 4))),
        AdapterDoesNotFit,
        "[24, 4]",
    ),
    "integers": (
        lambda: changed(0, UP, lambda lora: replace(lora, lora_a=lora.lora_a.int())),
        AdapterDoesNotFit,
        "int32",
    ),
    "a rank over the maximum": (
        lambda: LoRAModel(
            9, 9, {UP: LoRALayerWeights(UP, 9, 9, torch.ones(9, 16), torch.ones(24, 9))}
        ),
        AdapterDoesNotFit,
        "max_lora_rank",
    ),
    "an unknown module": (
        lambda: LoRAModel(
            9,
            1,
            {"up_proj": LoRALayerWeights("up_proj", 1, 1, torch.ones(1, 16), torch.ones(24, 1))},
        ),
        AdapterDoesNotFit,
        "up_proj",
    ),
    "no module": (lambda: LoRAModel(9, 1, {}), AdapterDoesNotFit, "no module"),
}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_moves_nobody(cls: type[LoRAModelManager], name: str) -> None:
    """Trap 1: the check comes before anybody leaves for it."""
    make, error, word = BAD[name]
    manager = full(cls)
    before = held(manager)
    with pytest.raises(error, match="adapter 9") as caught:
        manager.add_adapter(make())
    assert word in str(caught.value)
    assert held(manager) == before


def test_all_that_is_wrong_is_told_at_once() -> None:
    model = CONTENTS[0].model(9)
    model.loras[UP] = reshaped(lora_a=(4, 17))(model.loras[UP])
    model.loras["elsewhere"] = model.loras[MLP[0]]
    with pytest.raises(AdapterDoesNotFit, match=r"(?s)up_proj.*elsewhere"):
        full(LoRAModelManager).add_adapter(model)


def test_an_adapter_in_a_used_slot_gets_no_rows_of_the_last_one() -> None:
    """Trap 2: a mapping names adapters, not slots; one that outlived its adapter fails."""
    manager = full(LoRAModelManager, slots=1, capacity=2)
    manager.set_adapter_mapping(mapping_of(1, 0))
    manager.deactivate_adapter(1)
    manager.activate_adapter(2)
    assert manager.lora_index_to_id == [2]
    with pytest.raises(NotResident, match=r"\[1\].*another mapping"):
        forward(manager, 2)
    with pytest.raises(NotResident):
        manager.set_adapter_mapping(mapping_of(1, 0))
    manager.deactivate_adapter(2)
    manager.activate_adapter(1)
    check_rows(manager, {1: CONTENTS[0]}, 1, 0)


def test_rows_follow_their_adapter_to_another_slot() -> None:
    manager = full(LoRAModelManager)
    manager.set_adapter_mapping(mapping_of(2, 0, 1))
    for adapter_id in (1, 2):
        manager.deactivate_adapter(adapter_id)
    for adapter_id in (2, 1):
        manager.activate_adapter(adapter_id)
    assert manager.lora_index_to_id == [2, 1]
    check_rows(manager, {1: CONTENTS[0], 2: CONTENTS[1]}, 2, 0, 1)


def test_an_id_that_comes_back_with_other_weights_has_those() -> None:
    manager = full(LoRAModelManager)
    manager.set_adapter_mapping(mapping_of(1))
    manager.remove_adapter(1)
    manager.add_adapter(CONTENTS[3].model(1))
    with pytest.raises(NotResident):
        forward(manager, 1)
    manager.activate_adapter(1)
    check_rows(manager, {1: CONTENTS[3]}, 1)


@pytest.mark.parametrize("worker_class", [WorkerLoRAManager, LRUCacheWorkerLoRAManager])
def test_a_batch_beside_a_pinned_adapter_is_refused_before_a_file_is_read(
    worker_class: type[WorkerLoRAManager], folder: Path
) -> None:
    """Trap 3."""
    manager = full(LRUCacheLoRAModelManager, slots=2, capacity=3)
    manager.pin_adapter(1)
    worker = worker_class(manager)
    before = held(manager)
    unread = [request(folder, number, lora_path="/nowhere") for number in (8, 9)]
    with pytest.raises(NoRoom, match="held keep 1 slots"):
        worker.set_active_adapters(unread, mapping_of(8, 9))
    assert held(manager) == before
    assert manager.books.loads.count == 0
    with pytest.raises(AdapterNotFound):
        worker.set_active_adapters(unread[:1], mapping_of(8))
    assert held(manager) == before


def test_files_that_did_not_change_are_read_once_however_often_they_are_asked(
    folder: Path,
) -> None:
    """Trap 5: `load_inplace` left set."""
    manager = make_manager(LRUCacheLoRAModelManager)
    worker = LRUCacheWorkerLoRAManager(manager)
    again = request(folder, 1, load_inplace=True)
    for _ in range(3):
        worker.set_active_adapters([again], mapping_of(1))
        assert manager.books.loads.count == 1
    assert worker.add_adapter(again) is False
    CONTENTS[2].save(folder / "1")
    for _ in range(3):
        worker.set_active_adapters([request(folder, 1)], mapping_of(1))
        check_rows(manager, {1: CONTENTS[0]}, 1)
    for _ in range(3):
        worker.set_active_adapters([again], mapping_of(1))
        check_rows(manager, {1: CONTENTS[2]}, 1)
        assert manager.books.loads.count == 2
    # Two ids of the same bytes don't take each other's files for theirs.
    CONTENTS[2].save(folder / "2")
    for _ in range(3):
        both = [again, request(folder, 2, load_inplace=True)]
        worker.set_active_adapters(both, mapping_of(1, 2))
    assert manager.books.loads.count == 3


def test_an_adapter_that_is_read_anew_stays_pinned_and_keeps_its_place(folder: Path) -> None:
    manager = make_manager(LoRAModelManager, slots=1, capacity=1)
    worker = WorkerLoRAManager(manager)
    worker.add_adapter(request(folder, 1))
    worker.pin_adapter(1)
    (folder / "1" / "adapter_model.safetensors").write_bytes(b"what is no adapter")
    before = held(manager)
    with pytest.raises(AdapterDoesNotFit):
        worker.add_adapter(request(folder, 1, load_inplace=True))
    assert held(manager) == before
    CONTENTS[3].save(folder / "1")
    assert worker.add_adapter(request(folder, 1, load_inplace=True))
    assert manager.is_pinned(1)
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: CONTENTS[3]}, 1)


def in_arrays(model: LoRAModel) -> tuple[LoRAModel, list[weakref.ref[np.ndarray]]]:
    """The same in memory whose end can be seen, whatever views there are of it."""
    arrays = [lora.lora_a.numpy().copy() for lora in model.loras.values()]
    for lora, array in zip(model.loras.values(), arrays, strict=True):
        lora.lora_a = torch.from_numpy(array)
    return model, [weakref.ref(array) for array in arrays]


@pytest.mark.parametrize("leave", ["remove", "evict", "replace"])
def test_who_leaves_gives_everything_back(leave: str, folder: Path) -> None:
    """Trap 6: neither the host's nor the device's memory stays, nor what was handed over."""
    manager = make_manager(LRUCacheLoRAModelManager, slots=1, capacity=1)
    empty = held(manager)
    if leave == "replace":
        worker = LRUCacheWorkerLoRAManager(manager)
        worker.add_adapter(request(folder, 1))
    else:
        model, handed = in_arrays(CONTENTS[0].model(1))
        manager.add_adapter(model)
        del model
        gc.collect()
        assert not any(array() is not None for array in handed)
        manager.activate_adapter(1)
    blob = weakref.ref(next(iter(manager._engine.residency.held.values())).weights.data)
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
    assert held(manager) == empty
    assert not manager._core.world.adapters


def test_what_is_handed_over_may_be_changed_afterwards() -> None:
    manager = make_manager(LoRAModelManager)
    model = CONTENTS[0].model(1)
    manager.add_adapter(model)
    for lora in model.loras.values():
        lora.lora_a.fill_(torch.nan)
        lora.lora_b.zero_()
    manager.activate_adapter(1)
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: CONTENTS[0]}, 1)


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "with gradients": lambda t: t.clone().requires_grad_(),
    "the end of a computation": lambda t: t.clone().requires_grad_() * 1,
    "not contiguous": lambda t: t.T.contiguous().T,
    "a view of something larger": lambda t: torch.stack([t, t], 1)[:, 0],
    "expanded": lambda t: t[:, :1].expand(t.shape),
    "an nn.Parameter": torch.nn.Parameter,
    "made in inference mode": torch.inference_mode()(torch.clone),
    "float64": lambda t: t.double(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_any_sort_of_tensor_is_taken_as_the_numbers_that_it_holds(name: str) -> None:
    manager = make_manager(LoRAModelManager)
    given, plain = CONTENTS[0].model(1), CONTENTS[0].model(2)
    for module, lora in given.loras.items():
        a, b = TENSORS[name](lora.lora_a), TENSORS[name](lora.lora_b)
        given.loras[module] = replace(lora, lora_a=a, lora_b=b)
        values = {"lora_a": a.detach().float().clone(), "lora_b": b.detach().float().clone()}
        plain.loras[module] = replace(lora, **values)
    for model in (given, plain):
        manager.add_adapter(model)
        manager.activate_adapter(model.id)
    manager.set_adapter_mapping(mapping_of(1, 2, 0))
    found = forward(manager, 3)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    kept = manager.get_adapter(1)
    assert kept is not None
    assert not any(lora.lora_b.requires_grad for lora in kept.loras.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adapters_are_widened(dtype: torch.dtype) -> None:
    manager = make_manager(LoRAModelManager)
    model = CONTENTS[0].model(1)
    for module, lora in model.loras.items():
        a, b = lora.lora_a.to(dtype), lora.lora_b.to(dtype)
        model.loras[module] = replace(lora, lora_a=a, lora_b=b)
    manager.add_adapter(model)
    kept = manager.get_adapter(1)
    assert kept is not None
    for module, lora in model.loras.items():
        assert torch.equal(kept.loras[module].lora_a, lora.lora_a.float())
        assert torch.equal(kept.loras[module].lora_b, lora.lora_b.float() * lora.scaling)


def test_what_is_finite_in_its_own_dtype_alone_is_refused() -> None:
    manager = make_manager(LoRAModelManager, lora_dtype="float16")
    with pytest.raises(NotFinite, match="float16"):
        manager.add_adapter(changed(0, UP, poked("lora_b", 60_000.0)))


def test_base_rows_never_meet_the_last_slot() -> None:
    """Trap 10: the base's slot is -1, which as an index is the last one."""
    manager = full(LoRAModelManager)
    manager.set_adapter_mapping(mapping_of(0, 2, 0))
    check_rows(manager, {2: CONTENTS[1]}, 0, 2, 0)
    assert torch.equal(forward(manager, 3)[0], forward(manager, 3)[2])
    manager.set_adapter_mapping(mapping_of(0, 0))
    check_rows(manager, {}, 0, 0)


def test_rows_within_a_sequence_may_differ() -> None:
    manager = full(LoRAModelManager)
    manager.set_adapter_mapping(LoRAMapping([0, 1, 2, 1, 0], [0]))
    mixed = forward(manager, 1)[0]
    manager.set_adapter_mapping(mapping_of(0))
    assert relative_error(mixed[0], forward(manager, 1)[0, 0]) < ERROR_MAX
    assert relative_error(mixed[1], logits_of(CONTENTS[0])[1]) > 0.01


def test_without_a_mapping_and_with_an_empty_one_the_model_is_the_base() -> None:
    manager = full(LoRAModelManager)
    check_rows(manager, {}, 0)
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: CONTENTS[0]}, 1)
    manager.set_adapter_mapping(LoRAMapping([], []))
    for rows in (1, 3):
        check_rows(manager, {}, *([0] * rows))


def test_a_batch_of_other_rows_than_its_mapping_is_an_error() -> None:
    manager = full(LoRAModelManager)
    manager.set_adapter_mapping(mapping_of(1, 2))
    with pytest.raises(ValueError, match="10"):
        forward(manager, 3)


def test_generate_goes_on_from_prefill_to_decode() -> None:
    """As people call it: `transformers` generates, with a mapping for each sort of step."""
    manager = full(LoRAModelManager)
    ids = torch.tensor([PROMPT])
    manager.set_adapter_mapping(mapping_of(1))
    with torch.no_grad():
        out = manager.model(ids, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        manager.set_adapter_mapping(LoRAMapping([1], [1]))
        step = manager.model(token, past_key_values=out.past_key_values, use_cache=True)
        manager.set_adapter_mapping(LoRAMapping([1] * 6, [1]))
        whole = manager.model(torch.cat([ids, token], 1)).logits
    assert relative_error(step.logits[0, -1], whole[0, -1]) < ERROR_MAX


def test_an_unknown_adapter_is_l006_or_nothing_to_do() -> None:
    manager = full(LoRAModelManager)
    before = held(manager)
    for call in (manager.activate_adapter, manager.pin_adapter):
        with pytest.raises(UnknownAdapter, match="7") as caught:
            call(7)
        assert caught.value.code is ErrorCode.UNKNOWN_ADAPTER
    for call in (manager.deactivate_adapter, manager.remove_adapter, manager.unpin_adapter):
        assert call(7) is False
    assert manager.get_adapter(7) is None
    assert held(manager) == before
    empty = make_manager(LoRAModelManager)
    assert empty.remove_all_adapters() is False
    assert empty.remove_oldest_adapter() is False


def test_no_room_says_what_is_taken() -> None:
    manager = full(LoRAModelManager, slots=1, capacity=2)
    for call in (
        lambda: manager.add_adapter(CONTENTS[2].model(3)),
        lambda: manager.activate_adapter(2),
    ):
        with pytest.raises(NoRoom, match=r"2 of 2 adapters.*1 of 1 slots") as caught:
            call()
        assert caught.value.code is ErrorCode.NO_ROOM
    pinned = full(LRUCacheLoRAModelManager, slots=1, capacity=2)
    pinned.pin_adapter(1)
    with pytest.raises(NoRoom, match="held adapters keep 1 slots"):
        pinned.activate_adapter(2)
    pinned.unpin_adapter(1)
    assert pinned.activate_adapter(2)


def test_a_small_arena_is_a_bound_of_its_own() -> None:
    manager = make_manager(LRUCacheLoRAModelManager, device_bytes_max=3000)
    manager.add_adapter(CONTENTS[0].model(1))
    with pytest.raises(NoRoom, match="bytes of device memory"):
        manager.activate_adapter(1)
    manager.add_adapter(CONTENTS[3].model(2))
    assert manager.activate_adapter(2)
    assert manager.lora_index_to_id == [2, None]
    with pytest.raises(DeviceOutOfMemory):
        make_manager(LoRAModelManager, device_bytes_max=1 << 60)


def test_ids_and_paths_are_one_to_one(folder: Path) -> None:
    manager = make_manager(LRUCacheLoRAModelManager)
    worker = LRUCacheWorkerLoRAManager(manager)
    assert worker.add_adapter(request(folder, 1))
    assert not worker.add_adapter(request(folder, 1))
    assert not worker.add_adapter(request(folder, 1, lora_path=""))
    before = held(manager)
    other = request(folder, 1, lora_path=str(folder / "2"))
    with pytest.raises(Conflict, match="another lora_int_id"):
        worker.add_adapter(other)
    with pytest.raises(Conflict, match="in one batch"):
        worker.set_active_adapters([request(folder, 1), other])
    with pytest.raises(AdapterNotFound, match="no lora_path"):
        worker.add_adapter(request(folder, 3, lora_path=""))
    with pytest.raises(NotResident, match=r"\[2\]"):
        worker.set_active_adapters([request(folder, 1)], mapping_of(1, 2))
    assert held(manager) == before
    assert worker.add_adapter(request(folder, 1, lora_path=other.lora_path, load_inplace=True))
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: CONTENTS[1]}, 1)


def test_roots_bound_where_adapters_may_lie(folder: Path) -> None:
    outside = CONTENTS[0].save(folder.parent / f"{folder.name}-outside")
    worker = WorkerLoRAManager(make_manager(LoRAModelManager), adapter_roots=[folder])
    assert worker.add_adapter(request(folder, 1))
    for path in (outside, folder / "1" / ".." / ".." / outside.name):
        with pytest.raises(PathNotAllowed):
            worker.add_adapter(request(folder, 2, lora_path=str(path)))
    (folder / "link").symlink_to(outside)
    with pytest.raises(PathNotAllowed):
        worker.add_adapter(request(folder, 2, lora_path=str(folder / "link")))


def test_the_lru_worker_keeps_others_and_the_plain_one_the_batch_alone(folder: Path) -> None:
    for worker_class, kept in ((WorkerLoRAManager, {3}), (LRUCacheWorkerLoRAManager, {1, 2, 3})):
        cls = CLASSES[worker_class is LRUCacheWorkerLoRAManager]
        worker = worker_class(make_manager(cls))
        worker.set_active_adapters([request(folder, 1), request(folder, 2)], mapping_of(1, 2))
        worker.set_active_adapters([request(folder, 3)], mapping_of(3, 0))
        assert worker.list_adapters() == kept
        check_rows(worker.manager, {3: CONTENTS[2]}, 3, 0)
        worker.set_active_adapters([], LoRAMapping([], []))
        assert worker.remove_all_adapters() == (worker_class is LRUCacheWorkerLoRAManager)


def test_metrics_count_what_was_done(folder: Path) -> None:
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
    }
    told = metrics["performance"]
    assert (told["hits"], told["misses"], told["evictions"]) == (2, 3, 1)
    assert {name: told[name]["count"] for name in ("activations", "switches", "loads")} == {
        "activations": 1,
        "switches": 1,
        "loads": 2,
    }
    assert told["loads"] == {
        "count": 2,
        "seconds": 2.0,
        "longest_seconds": 1.0,
        "last_seconds": 1.0,
    }
    sizes = metrics["memory"]["adapters"]
    assert sizes[1]["device_bytes"] == 0 < sizes[1]["pinned_bytes"]
    assert sizes[3]["device_bytes"] == sizes[3]["pinned_bytes"]


def test_warm_up_adapters_take_room_and_add_nothing() -> None:
    manager = make_manager(LoRAModelManager)
    dummy = manager.create_dummy_lora(7, 8)
    assert dummy.loras.keys() == manager.side.modules.keys()
    manager.add_adapter(dummy)
    manager.activate_adapter(7)
    manager.set_adapter_mapping(mapping_of(7))
    assert relative_error(forward(manager, 1)[0], logits_of(None)) < ERROR_MAX
    memory = manager.get_lora_metrics()["memory"]
    assert memory["adapters"][7]["device_bytes"] * 2 == memory["device"]["size_bytes"]
    assert manager.get_dummy_lora_warmup_rank(5) == 5
    for rank in (0, 9):
        with pytest.raises(ValueError, match="max_lora_rank"):
            manager.get_dummy_lora_warmup_rank(rank)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": VOCABULARY + 1}, f"embeds {VOCABULARY}"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(fields: dict[str, int], word: str) -> None:
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 9, "vocab_size": VOCABULARY} | fields
    model = AutoModelForCausalLM.from_config(base().config)
    with pytest.raises(ValueError, match=word):
        create_lora_manager(model, lora_config=LoRAConfig(), device="cpu", **sizes)


def test_a_mapping_may_have_as_many_rows_as_the_manager_was_made_for() -> None:
    manager = full(LoRAModelManager)
    manager.set_adapter_mapping(LoRAMapping([1] * 256, [1] * 16))
    for index, prompt, name in ((257, 1, "index_mapping"), (1, 17, "prompt_mapping")):
        with pytest.raises(ValueError, match=name):
            manager.set_adapter_mapping(LoRAMapping([1] * index, [1] * prompt))


def test_capacities_are_the_configuration_s() -> None:
    manager = make_manager(LoRAModelManager, slots=2, capacity=5)
    assert (manager.capacity, manager.lora_slots, manager.adapter_slots) == (5, 2, 2)
    assert len(manager) == 0
    assert manager.lora_index_to_id == [None, None]


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the example model is not in this checkout")
def test_the_example_adapters_are_pefts_through_the_manager() -> None:
    names = sorted(path.name for path in (EXAMPLES / "adapters").iterdir())
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "model")
    config = LoRAConfig(max_lora_rank=64, max_loras=len(names))
    rows, tokens = len(names) + 1, (72, 101, 108, 108, 111)
    manager = create_lora_manager(
        model, rows, 256, model.config.vocab_size, config, "cpu", LRUCacheLoRAModelManager
    )
    worker = LRUCacheWorkerLoRAManager(manager)
    ids = dict(enumerate(names, 1))
    asked = [
        LoRARequest(name, number, str(EXAMPLES / "adapters" / name)) for number, name in ids.items()
    ]
    index = [number for number in (0, *ids) for _ in tokens]
    worker.set_active_adapters(asked, LoRAMapping(index, [0, *ids], is_prefill=True))
    with torch.no_grad():
        found = manager.model(torch.tensor([tokens] * rows)).logits
        for number, name in ids.items():
            fresh = AutoModelForCausalLM.from_pretrained(EXAMPLES / "model")
            peft = PeftModel.from_pretrained(fresh, EXAMPLES / "adapters" / name).eval()
            expected = peft(torch.tensor([tokens])).logits[0]
            assert relative_error(found[number], expected) < ERROR_MAX, name

"""The calls of the manager: effects, refusals, metrics, and the meaning of a mapping."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from loradock.engine.config import LoRAConfig
from loradock.engine.errors import (
    DeviceOutOfMemory,
    NoRoom,
    NotResident,
    UnknownAdapter,
)
from loradock.engine.layout import columns_of_one_adapter
from loradock.engine.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    create_lora_manager,
)
from loradock.engine.models.library.generation import cache_argument
from loradock.engine.punica import LoRAMapping, MappingType
from loradock.messages.errors import ErrorCode
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.manager_examples import (
    CONTENTS,
    ERROR_MAX,
    PROMPT,
    VOCABULARY,
    base,
    check_rows,
    forward,
    full_manager,
    logits_of,
    make_manager,
    manager_state,
    mapping_of,
)

torch.set_num_threads(1)


def test_an_adapter_in_a_reused_slot_gets_no_rows_of_its_predecessor() -> None:
    """A mapping names adapters, not slots; if one of them is in no slot, the forward fails."""
    manager = full_manager(LoRAModelManager, slots=1, capacity=2)
    manager.set_adapter_mapping(mapping_of(1, 0))
    manager.deactivate_adapter(1)
    manager.activate_adapter(2)
    assert manager.lora_index_to_id == [2]
    with pytest.raises(NotResident, match=r"\[1\].*another mapping"):
        forward(manager, 2)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        part, expected = (model.model(ids)[0] for model in (manager.model, base()))
    assert relative_error(part, expected) < ERROR_MAX, "a part of the model that is called directly"
    with pytest.raises(NotResident):
        manager.set_adapter_mapping(mapping_of(1, 0))
    manager.deactivate_adapter(2)
    manager.activate_adapter(1)
    check_rows(manager, {1: CONTENTS[0]}, 1, 0)


def test_rows_follow_their_adapter_to_another_slot() -> None:
    manager = full_manager(LoRAModelManager)
    manager.set_adapter_mapping(mapping_of(2, 0, 1))
    for adapter_id in (1, 2):
        manager.deactivate_adapter(adapter_id)
    for adapter_id in (2, 1):
        manager.activate_adapter(adapter_id)
    assert manager.lora_index_to_id == [2, 1]
    check_rows(manager, {1: CONTENTS[0], 2: CONTENTS[1]}, 2, 0, 1)


def test_an_id_that_is_added_again_has_its_new_weights() -> None:
    manager = full_manager(LoRAModelManager)
    manager.set_adapter_mapping(mapping_of(1))
    manager.remove_adapter(1)
    manager.add_adapter(CONTENTS[3].model(1))
    with pytest.raises(NotResident):
        forward(manager, 1)
    manager.activate_adapter(1)
    check_rows(manager, {1: CONTENTS[3]}, 1)


def test_base_rows_never_use_the_last_slot() -> None:
    """The base model's slot is -1, which as an index is the last one."""
    manager = full_manager(LoRAModelManager)
    manager.set_adapter_mapping(mapping_of(0, 2, 0))
    check_rows(manager, {2: CONTENTS[1]}, 0, 2, 0)
    assert torch.equal(forward(manager, 3)[0], forward(manager, 3)[2])
    manager.set_adapter_mapping(mapping_of(0, 0))
    check_rows(manager, {}, 0, 0)


def test_rows_within_a_sequence_may_differ() -> None:
    manager = full_manager(LoRAModelManager)
    manager.set_adapter_mapping(LoRAMapping([0, 1, 2, 1, 0], [0]))
    mixed = forward(manager, 1)[0]
    manager.set_adapter_mapping(mapping_of(0))
    assert relative_error(mixed[0], forward(manager, 1)[0, 0]) < ERROR_MAX
    assert relative_error(mixed[1], logits_of(CONTENTS[0])[1]) > 0.01


def test_without_a_mapping_and_with_an_empty_one_the_model_is_the_base() -> None:
    manager = full_manager(LoRAModelManager)
    check_rows(manager, {}, 0)
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: CONTENTS[0]}, 1)
    manager.set_adapter_mapping(LoRAMapping([], []))
    for rows in (1, 3):
        check_rows(manager, {}, *([0] * rows))


def test_a_batch_with_more_rows_than_its_mapping_is_an_error() -> None:
    manager = full_manager(LoRAModelManager)
    manager.set_adapter_mapping(mapping_of(1, 2))
    with pytest.raises(ValueError, match="10"):
        forward(manager, 3)


def test_decode_continues_a_prefill() -> None:
    """With the cache of `transformers`, and one mapping per kind of step."""
    manager = full_manager(LoRAModelManager)
    ids = torch.tensor([PROMPT])
    manager.set_adapter_mapping(mapping_of(1))
    with torch.no_grad():
        cached = {cache_argument(manager.model): DynamicCache(), "use_cache": True}
        out = manager.model(ids, **cached)
        token = out.logits[:, -1:].argmax(-1)
        manager.set_adapter_mapping(LoRAMapping([1], [1]))
        step = manager.model(token, **cached)
        manager.set_adapter_mapping(LoRAMapping([1] * 6, [1]))
        whole = manager.model(torch.cat([ids, token], 1)).logits
    assert relative_error(step.logits[0, -1], whole[0, -1]) < ERROR_MAX


def test_an_unknown_adapter_is_l006_or_false() -> None:
    manager = full_manager(LoRAModelManager)
    before = manager_state(manager)
    for call in (manager.activate_adapter, manager.pin_adapter):
        with pytest.raises(UnknownAdapter, match="7") as caught:
            call(7)
        assert caught.value.code is ErrorCode.UNKNOWN_ADAPTER
    for call in (manager.deactivate_adapter, manager.remove_adapter, manager.unpin_adapter):
        assert call(7) is False
    assert manager.get_adapter(7) is None
    assert manager_state(manager) == before
    empty = make_manager(LoRAModelManager)
    assert empty.remove_all_adapters() is False
    assert empty.remove_oldest_adapter() is False


def test_no_room_names_what_is_in_use() -> None:
    manager = full_manager(LoRAModelManager, slots=1, capacity=2)
    for call in (
        lambda: manager.add_adapter(CONTENTS[2].model(3)),
        lambda: manager.activate_adapter(2),
    ):
        with pytest.raises(NoRoom, match=r"2 of 2 adapters.*1 of 1 slots") as caught:
            call()
        assert caught.value.code is ErrorCode.NO_ROOM
    pinned = full_manager(LRUCacheLoRAModelManager, slots=1, capacity=2)
    pinned.pin_adapter(1)
    with pytest.raises(NoRoom, match="held adapters keep 1 slots"):
        pinned.activate_adapter(2)
    pinned.unpin_adapter(1)
    assert pinned.activate_adapter(2)


def test_a_small_arena_limits_slots_by_bytes() -> None:
    manager = make_manager(LRUCacheLoRAModelManager, device_bytes_max=3000)
    with pytest.raises(DeviceOutOfMemory, match="bytes of device memory"):
        manager.add_adapter(CONTENTS[0].model(1))
    assert manager.list_adapters() == {}
    manager.add_adapter(CONTENTS[3].model(2))
    assert manager.activate_adapter(2)
    assert manager.lora_index_to_id == [2, None]
    with pytest.raises(DeviceOutOfMemory):
        make_manager(LoRAModelManager, device_bytes_max=1 << 60)


def test_warm_up_adapters_have_full_size_and_change_no_output() -> None:
    manager = make_manager(LoRAModelManager)
    dummy = manager.create_dummy_lora(7, 8)
    fillable = columns_of_one_adapter(manager.adapter_target.modules.values())
    assert dummy.loras.keys() == {shape.name for shape in fillable}
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
        ({"max_num_seqs": 0}, "max_num_seqs must .*, got 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must .*, got -1"),
        ({"vocab_size": True}, "vocab_size must .*, got True"),
        ({"vocab_size": VOCABULARY + 1}, f"embeds {VOCABULARY}"),
    ],
)
def test_invalid_sizes_are_refused(fields: dict[str, int], word: str) -> None:
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 9, "vocab_size": VOCABULARY} | fields
    model = AutoModelForCausalLM.from_config(base().config)
    with pytest.raises(ValueError, match=word):
        create_lora_manager(model, lora_config=LoRAConfig(), device="cpu", **sizes)


def test_a_mapping_has_at_most_the_rows_that_the_manager_was_made_for() -> None:
    manager = full_manager(LoRAModelManager)
    manager.set_adapter_mapping(LoRAMapping([1] * 256, [1] * 16))
    for index, prompt, name in ((257, 1, "index_mapping"), (1, 17, "prompt_mapping")):
        with pytest.raises(ValueError, match=name):
            manager.set_adapter_mapping(LoRAMapping([1] * index, [1] * prompt))


@pytest.mark.parametrize("part", [MappingType.TOWER, MappingType.CONNECTOR])
def test_a_mapping_for_a_part_that_the_model_lacks_is_refused(part: MappingType) -> None:
    manager = full_manager(LoRAModelManager)
    with pytest.raises(ValueError, match=part.value):
        manager.set_adapter_mapping(LoRAMapping([1], [1], type=part))


def test_capacities_are_those_of_the_configuration() -> None:
    manager = make_manager(LoRAModelManager, slots=2, capacity=5)
    assert (manager.capacity, manager.lora_slots, manager.adapter_slots) == (5, 2, 2)
    assert len(manager) == 0
    assert manager.lora_index_to_id == [None, None]


def test_the_least_recently_used_adapter_leaves_wherever_it_is() -> None:
    """The case of capacity 2 that users of `LRUCacheLoRAModelManager` know."""
    manager = make_manager(LRUCacheLoRAModelManager, slots=2, capacity=2)
    first, second, third = (CONTENTS[0].model(i) for i in (1, 2, 3))
    for model in (first, second):
        assert manager.add_adapter(model)
        assert manager.activate_adapter(model.id)
    # A use through `add_adapter`: the second one is the oldest, though both are in slots.
    assert not manager.add_adapter(first)
    assert manager.add_adapter(third)
    assert set(manager.list_adapters()) == {1, 3}
    assert manager.activate_adapter(3)
    assert set(manager.lora_index_to_id) == {1, 3}
    assert manager.pin_adapter(1)
    # The one that was just added is not evicted before one that was used earlier.
    assert manager.add_adapter(second)
    assert set(manager.list_adapters()) == {1, 2}
    assert manager.activate_adapter(2)
    assert set(manager.lora_index_to_id) == {1, 2}
    assert manager.remove_oldest_adapter()
    assert set(manager.list_adapters()) == {1}
    with pytest.raises(RuntimeError, match="pinned"):
        manager.remove_oldest_adapter()


def test_an_added_adapter_is_not_evicted_before_an_older_one_in_a_slot() -> None:
    manager = make_manager(LRUCacheLoRAModelManager, slots=1, capacity=2)
    for adapter_id in (1, 2):
        manager.add_adapter(CONTENTS[0].model(adapter_id))
    manager.activate_adapter(1)
    manager.add_adapter(CONTENTS[0].model(2))
    manager.add_adapter(CONTENTS[0].model(3))
    assert set(manager.list_adapters()) == {2, 3}
    assert manager.activate_adapter(2)

"""Programs in the words of vLLM's documentation: its names, argument orders and error branches."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.adapters import LoRAModel, LoRARequest, PEFTHelper, get_adapter_absolute_path
from engine.config import LoRAConfig
from engine.errors import EngineError
from engine.layers import BaseLayerWithLoRA
from engine.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    WorkerLoRAManager,
    create_lora_manager,
)
from engine.punica import LoRAMapping, LoRAMappingType
from tests.support.engine.manager_examples import (
    CLASSES,
    CONTENTS,
    PROMPT,
    VOCABULARY,
    base,
    check_rows,
    full_manager,
    make_manager,
    mapping_of,
)

torch.set_num_threads(1)


def load_base() -> PreTrainedModel:
    return deepcopy(base())


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


def test_register_activate_map_and_run() -> None:
    """The whole life of an adapter in memory, with the documented constructor."""
    manager = create_lora_manager(
        load_base(), 4, 64, VOCABULARY, LoRAConfig(8, 2, False, 3), None, torch.device("cpu")
    )
    assert manager.add_adapter(CONTENTS[0].model(1))
    assert not manager.add_adapter(CONTENTS[0].model(1))
    assert manager.activate_adapter(1)
    assert manager.list_adapters().keys() == {1}
    assert manager.get_adapter(1) is not None
    tokens = [0] * len(PROMPT) + [1] * len(PROMPT)
    manager.set_adapter_mapping(
        LoRAMapping(tuple(tokens), (0, 1), is_prefill=True, type=LoRAMappingType.LANGUAGE)
    )
    check_rows(manager, {1: CONTENTS[0]}, 0, 1)
    assert manager.deactivate_adapter(1)
    assert manager.remove_adapter(1)
    assert manager.list_adapters() == {}


def test_a_manager_has_the_documented_attributes() -> None:
    vllm_config = object()
    sizes = (4, 64, VOCABULARY, LoRAConfig(8, 2))
    manager = LRUCacheLoRAModelManager(load_base(), *sizes, "cpu", vllm_config=vllm_config)
    assert (manager.max_num_seqs, manager.max_num_batched_tokens, manager.vocab_size) == sizes[:3]
    assert manager.device == torch.device("cpu")
    assert manager.vllm_config is vllm_config
    assert manager.adapter_type == "LoRA"
    assert manager.model.lora_manager is manager
    assert manager.punica_wrapper_mapping == {LoRAMappingType.LANGUAGE: manager.punica_wrapper}
    assert not manager.is_pooling_model
    assert not manager.supports_mm
    assert not manager.supports_tower_connector_lora
    for name, layer in manager.modules.items():
        assert isinstance(layer, BaseLayerWithLoRA)
        assert manager.model.get_submodule(name) is layer
    attention = "model.layers.0.self_attn"
    assert manager.packed_modules[f"{attention}.qkv_proj"] == [
        f"{attention}.{name}_proj" for name in "qkv"
    ]
    assert manager.packed_modules_mapping == {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    assert set(manager.supported_lora_modules) == {
        *("embed_tokens", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
    }
    dummy = manager.create_dummy_lora(9, 4, embedding_modules={"embed_tokens": "input_embeddings"})
    assert manager.add_adapter(dummy)


def test_the_device_comes_after_the_configuration_of_vllm() -> None:
    with pytest.raises(TypeError, match="pass the device as device="):
        create_lora_manager(load_base(), 4, 64, VOCABULARY, LoRAConfig(), "cpu")


def test_the_documented_loader_reads_what_the_manager_accepts(tmp_path: Path) -> None:
    """The steps of a worker manager's loader, in the documented words."""
    request = LoRARequest("one", 3, str(CONTENTS[0].save(tmp_path / "one")))
    manager = make_manager(LRUCacheLoRAModelManager)
    expected: list[str] = []
    for module in manager.supported_lora_modules:
        expected.extend(manager.packed_modules_mapping.get(module, [module]))
    lora_path = get_adapter_absolute_path(request.lora_path)
    peft_helper = PEFTHelper.from_local_dir(lora_path, 4096, request.tensorizer_config_dict)
    peft_helper.validate_legal(manager.lora_config)
    lora = LoRAModel.from_local_checkpoint(
        lora_path,
        set(expected),
        peft_helper=peft_helper,
        lora_model_id=request.lora_int_id,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        tensorizer_config_dict=request.tensorizer_config_dict,
        weights_mapper=getattr(manager.model, "hf_to_vllm_mapper", None),
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )
    assert manager.add_adapter(lora)
    manager.activate_adapter(3)
    manager.set_adapter_mapping(mapping_of(3, 0))
    check_rows(manager, {3: CONTENTS[0]}, 3, 0)


def test_pin_and_evict() -> None:
    manager = full_manager(LRUCacheLoRAModelManager, slots=2, capacity=3)
    assert manager.pin_adapter(1)
    manager.activate_adapter(3)
    assert manager.lora_index_to_id == [1, 3]
    assert manager.remove_oldest_adapter()
    assert manager.list_adapters().keys() == {1, 3}
    with pytest.warns(UserWarning, match="adapter 1 was pinned"):
        assert manager.deactivate_adapter(1)
    assert not manager.is_pinned(1)


def test_the_active_set_of_a_worker(tmp_path: Path) -> None:
    worker = LRUCacheWorkerLoRAManager(make_manager(LRUCacheLoRAModelManager))
    paths = [str(content.save(tmp_path / str(at))) for at, content in enumerate(CONTENTS)]
    requests = {LoRARequest(f"a{at}", at + 1, path) for at, path in enumerate(paths[:2])}
    worker.set_active_adapters(requests, mapping_of(1, 2, 0))
    check_rows(worker.manager, {1: CONTENTS[0], 2: CONTENTS[1]}, 1, 2, 0)
    assert worker.pin_adapter(2)
    third = {LoRARequest("a2", 3, paths[2])}
    worker.set_active_adapters(third, mapping_of(3))
    assert worker.list_adapters() == {1, 2, 3}
    assert worker.remove_oldest_adapter()
    assert worker.list_adapters() == {2, 3}
    assert worker.remove_adapter(3)
    worker.remove_all_adapters()
    assert worker.list_adapters() == set()

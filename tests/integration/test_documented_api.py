"""Programs in the words of vLLM's documentation: its names, argument orders and error branches."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import numpy
import pytest
import torch
from transformers import PreTrainedModel

from loradock.engine.adapters import LoRAModel, LoRARequest, PEFTHelper, get_adapter_absolute_path
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import EngineError
from loradock.engine.kernels import IMPLEMENTATIONS
from loradock.engine.layers import BaseLayerWithLoRA
from loradock.engine.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    WorkerLoRAManager,
    create_lora_manager,
)
from loradock.engine.punica import LoRAMapping, LoRAMappingType
from tests.support.documents import blocks_of
from tests.support.engine.engine_examples import relative_error
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
from tests.support.models.expert_adapters import make_model, save_fused, save_per_expert
from tests.support.models.pooling_examples import EMBEDDERS, save_adapters
from tests.support.models.pooling_examples import VOCABULARY as POOLED_VOCABULARY

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


def test_ids_come_out_of_arrays() -> None:
    one = numpy.int64(1)
    manager = make_manager(LRUCacheLoRAModelManager)
    adapter = CONTENTS[0].model(1)
    assert manager.add_adapter(LoRAModel(one, adapter.rank, adapter.loras))
    assert manager.activate_adapter(one)
    assert LoRARequest("a", one, "a").adapter_id == 1
    manager.set_adapter_mapping(
        LoRAMapping(numpy.repeat([one, 0], len(PROMPT)), numpy.array([1, 0]))
    )
    check_rows(manager, {1: CONTENTS[0]}, 1, 0)


WRONG_KINDS: dict[str, tuple[Callable[[LoRAModelManager], object], str]] = {
    "a request for a manager": (
        lambda manager: manager.add_adapter(LoRARequest("a", 1, "a")),
        "adapter must be a LoRAModel, got LoRARequest; a worker manager adds",
    ),
    "an adapter for a worker": (
        lambda manager: WorkerLoRAManager(manager).add_adapter(CONTENTS[0].model(1)),
        "request must be a LoRARequest, got LoRAModel; a manager adds",
    ),
    "a worker over a model": (
        lambda manager: WorkerLoRAManager(manager.model),
        "manager must be a LoRAModelManager, got LlamaForCausalLM; create_lora_manager",
    ),
    "a manager of a path": (
        lambda _: LoRAModelManager("llama", 4, 64, VOCABULARY, LoRAConfig(), "cpu"),
        "the model must be a Module, got str",
    ),
    "no configuration": (
        lambda _: LoRAModelManager(load_base(), 4, 64, VOCABULARY, None, "cpu"),
        "lora_config must be a LoRAConfig, got NoneType",
    ),
    "a pair for a mapping": (
        lambda manager: manager.set_adapter_mapping(([0], [0])),
        "mapping must be a LoRAMapping, got tuple",
    ),
    "a fraction for an adapter": (lambda _: LoRAMapping([1.5], [1]), "float.*one integer per row"),
    "rows of rows": (
        lambda _: LoRAMapping([[1], [1]], [1]),
        r"shape \[2, 1\]; one integer per row",
    ),
}


@pytest.mark.parametrize("case", WRONG_KINDS)
def test_an_argument_of_another_kind_is_named(case: str) -> None:
    call, text = WRONG_KINDS[case]
    with pytest.raises((TypeError, ValueError), match=text):
        call(make_manager(LRUCacheLoRAModelManager))


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


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = blocks_of("docs/from-vllm.md")
    CONTENTS[0].save(tmp_path / "adapters" / "sql")
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {"model": load_base(), "tokens": torch.tensor([PROMPT])}
    exec(block.text, names)
    check_rows(names["manager"], {1: CONTENTS[0]}, 1)


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
    worker.set_active_adapters(requests=third, mapping=mapping_of(3))
    assert worker.list_adapters() == {1, 2, 3}
    assert worker.remove_oldest_adapter()
    assert worker.list_adapters() == {2, 3}
    assert worker.remove_adapter(3)
    worker.remove_all_adapters()
    assert worker.list_adapters() == set()
    for is_new in (True, False):
        assert worker.add_dummy_lora(LoRARequest("warm-up", 7, "/nowhere"), rank=4) is is_new
    assert worker.manager.activate_adapter(lora_id=7)


def logits_of_rows(manager: LoRAModelManager, prompt: Sequence[int], *ids: int) -> torch.Tensor:
    """Return the logits of a prompt in one row per adapter, [rows, tokens, vocabulary]."""
    for adapter_id in {*ids} - {0}:
        manager.activate_adapter(adapter_id)
    index = [adapter_id for adapter_id in ids for _ in prompt]
    manager.set_adapter_mapping(LoRAMapping(index, ids, is_prefill=True))
    with torch.no_grad():
        return manager.model(torch.tensor([prompt] * len(ids))).logits


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_expert_adapters_of_both_formats_are_loaded_and_added(family: str, tmp_path: Path) -> None:
    """Without an option; single experts also without the model, fused ones with it."""
    fused = save_fused(family, tmp_path)["all"]
    single = save_per_expert(family, tmp_path / "single")
    config = LoRAConfig(8, 2, max_cpu_loras=4)
    manager = LRUCacheLoRAModelManager(make_model(family), 4, 64, 64, config, "cpu")
    expected = set(manager.supported_lora_modules)
    for module in manager.supported_lora_modules:
        expected.update(manager.packed_modules_mapping.get(module, [module]))

    def load(name: str, adapter_id: int, **options: object) -> LoRAModel:
        path = str(tmp_path / name)
        helper = PEFTHelper.from_local_dir(path)
        more = {f"experts.{at}.{name}" for at in range(4) for name in ("w1", "w2", "w3")}
        options["lora_model_id"] = adapter_id
        return LoRAModel.from_local_checkpoint(path, expected | more, helper, **options)

    alone = load("single", 1)
    assert not alone.is_3d_lora_weight
    assert manager.add_adapter(alone)
    assert manager.add_adapter(load("single", 2, model=manager))
    both = load("all", 3, model=manager.model)
    assert both.is_3d_lora_weight
    assert manager.add_adapter(both)
    prompt = (5, 1, 44, 3)
    references = {0: make_model(family), 1: single, 2: single, 3: fused}
    for rows in ((1, 0, 3), (2, 3)):
        for row, found in zip(rows, logits_of_rows(manager, prompt, *rows), strict=True):
            with torch.no_grad():
                wanted = references[row](input_ids=torch.tensor([prompt])).logits[0]
            assert relative_error(found, wanted) < 1e-5, row


def test_fused_experts_are_checked_if_a_request_names_them(tmp_path: Path) -> None:
    """By default, which is that of vLLM's request, the files decide."""
    save_fused("mixtral", tmp_path)
    save_per_expert("mixtral", tmp_path / "single")
    manager = LRUCacheLoRAModelManager(make_model("mixtral"), 4, 64, 64, LoRAConfig(8), "cpu")
    worker = LRUCacheWorkerLoRAManager(manager)
    paths = {name: str(tmp_path / name) for name in ("all", "single")}
    for number, (name, is_3d) in enumerate([("all", True), ("all", False), ("single", False)]):
        request = LoRARequest(name, number + 1, paths[name], is_3d_lora_weight=is_3d)
        assert worker.add_adapter(request)
    with pytest.raises(ValueError, match=r"is True, and .* are for single experts \(2-D\)"):
        worker.add_adapter(LoRARequest("single", 9, paths["single"], is_3d_lora_weight=True))


def test_an_adapter_of_a_pooling_model_is_loaded_without_the_model(tmp_path: Path) -> None:
    """Its paths begin with the prefix of the class with a head, which this model lacks."""
    example = EMBEDDERS[0]
    reference = save_adapters(example, tmp_path)["wide"]
    path, config = str(tmp_path / "wide"), LoRAConfig(8, 2)
    helper = PEFTHelper.from_local_dir(path)
    names = helper.target_modules
    prefix = f"{example.make().base_model_prefix}."
    adapter = LoRAModel.from_local_checkpoint(
        path, set(names), helper, lora_model_id=1, weights_mapper=lambda path: prefix + path
    )
    assert all(name.startswith(prefix) for name in adapter.loras)
    manager = LRUCacheLoRAModelManager(example.make(), 4, 64, POOLED_VOCABULARY, config, "cpu")
    assert manager.add_adapter(adapter)
    assert manager.is_pooling_model
    manager.activate_adapter(1)
    manager.set_adapter_mapping(LoRAMapping([1, 1, 1], [1], is_prefill=True))
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        found = manager.model(input_ids=tokens).last_hidden_state
        wanted = reference(input_ids=tokens).last_hidden_state
    assert relative_error(found, wanted) < 1e-5


def test_the_metrics_report() -> None:
    manager = full_manager(LRUCacheLoRAModelManager, slots=2, capacity=4)
    manager.deactivate_adapter(2)
    metrics = manager.get_lora_metrics()
    assert metrics["adapters"] == {
        "registered": 4,
        "active": 1,
        "capacity": 4,
        "utilization": 0.5,
        "host_utilization": 1.0,
    }
    memory, performance = metrics["memory"], metrics["performance"]
    sizes = memory["adapters"].values()
    on_host = sum(one["host_bytes"] + one["pinned_bytes"] for one in sizes)
    assert memory["adapter_memory_mb"] == on_host / 2**20 > 0
    assert (memory["gpu_memory_usage"] > 0) is torch.cuda.is_available()
    used = memory["device"]["size_bytes"] - memory["device"]["free_bytes"]
    assert memory["memory_efficiency"] == pytest.approx(used / memory["device"]["size_bytes"])
    assert performance["avg_activation_time"] == performance["activations"]["seconds"] / 2
    assert performance["avg_switching_time"] == 0.0
    assert performance["punica_kernel_enabled"] is True
    assert performance["punica_kernels"] in IMPLEMENTATIONS

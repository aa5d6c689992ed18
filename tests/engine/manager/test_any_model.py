"""The manager with models that are no text models of `transformers`, or are called unusually."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from loradock.engine.adapters import LoRALayerWeights, LoRAModel, LoRARequest
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit, ModelRefused
from loradock.engine.layers import PPMissingLayer
from loradock.engine.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
)
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.manager_examples import CONTENTS, full_manager, mapping_of
from tests.support.models.peft_adapters import save_adapter

torch.set_num_threads(1)
WIDTH, TOKENS, SAMPLES = 8, 5, 3


class Block(nn.Module):
    """A transformer block whose scale depends on the diffusion step of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(1, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        hidden = self.fc1(x * self.step(steps)[:, None]).relu()
        return x + self.fc2(hidden)


class Diffusion(nn.Module):
    """A custom model without an embedding, a head or a config."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, steps) if isinstance(block, Block) else block(x)
        return x


TARGETS = ["fc1", "fc2", "step"]


def diffusion() -> Diffusion:
    torch.manual_seed(7)
    return Diffusion().eval()


def adapted(directory: Path, seed: int) -> nn.Module:
    """Save an adapter of the custom model with PEFT; return PEFT's model."""
    fields = {"r": seed, "lora_alpha": 3, "target_modules": TARGETS}
    return save_adapter(diffusion(), directory, seed, **fields)


def manager_of(model: nn.Module, **fields: object) -> LRUCacheLoRAModelManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=2, **fields)
    return LRUCacheLoRAModelManager(model, 8, 256, 1000, config, "cpu", checked=True)


@torch.no_grad()
def test_a_custom_model_serves_adapters_and_the_base_in_one_batch(tmp_path: Path) -> None:
    references = [diffusion(), *(adapted(tmp_path / str(at), at) for at in (1, 2))]
    worker = LRUCacheWorkerLoRAManager(manager_of(diffusion()))
    requests = [LoRARequest(str(at), at, str(tmp_path / str(at))) for at in (1, 2)]
    rows = (2, 0, 1)
    tokens = [row for row in rows for _ in range(TOKENS)]
    worker.set_active_adapters(requests, LoRAMapping(tokens, rows))
    x, steps = torch.randn(SAMPLES, TOKENS, WIDTH), torch.rand(SAMPLES, 1)
    found = worker.manager.model(x, steps)
    for at, row in enumerate(rows):
        alone = references[row](x[at : at + 1], steps[at : at + 1])[0]
        assert relative_error(found[at], alone) < 1e-5, row
    assert not worker.manager.is_pooling_model


def test_layers_that_are_computed_from_their_weights_are_not_wrapped() -> None:
    names = manager_of(diffusion()).modules.keys()
    assert {name.rpartition(".")[2] for name in names} == set(TARGETS)
    encoder = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16))
    assert manager_of(encoder).modules.keys() == {"0"}


def test_targets_of_a_custom_model_are_checked() -> None:
    assert all(
        name.endswith("fc1") for name in manager_of(diffusion(), target_modules=["fc1"]).modules
    )
    with pytest.raises(ModelRefused, match="name no layer that can be wrapped"):
        manager_of(diffusion(), target_modules=["q_proj"])
    for model, text in ((nn.LayerNorm(3), "no layer of a kind"), (nn.ReLU(), "no floating param")):
        with pytest.raises(ValueError, match=text):
            manager_of(model)


@torch.no_grad()
def test_layers_of_another_pipeline_stage_are_skipped(tmp_path: Path) -> None:
    whole = adapted(tmp_path / "a", 2)
    model = diffusion()
    model.blocks[1] = PPMissingLayer()
    manager = manager_of(model)
    worker = LRUCacheWorkerLoRAManager(manager)
    assert worker.add_adapter(LoRARequest("a", 1, str(tmp_path / "a")))
    assert {name.split(".")[1] for name in manager.get_adapter(1).loras} == {"0"}
    manager.set_adapter_mapping(LoRAMapping([1] * TOKENS, [1]))
    x, steps = torch.randn(1, TOKENS, WIDTH), torch.rand(1, 1)
    expected = whole.base_model.model.blocks[0](x, steps)
    assert relative_error(manager.model(x, steps), expected) < 1e-5
    lora = LoRALayerWeights("blocks.1.fc1", 1, 1.0, torch.ones(1, 8), torch.ones(16, 1))
    here = LoRALayerWeights("blocks.0.fc1", 1, 1.0, torch.ones(1, 8), torch.ones(16, 1))
    manager.add_adapter(LoRAModel(2, 1, {"blocks.1.fc1": lora, "blocks.0.fc1": here}))
    assert manager.get_adapter(2).loras.keys() == {"blocks.0.fc1"}
    with pytest.raises(AdapterDoesNotFit, match="no module is touched"):
        manager.add_adapter(LoRAModel(3, 1, {"blocks.1.fc1": lora}))


class CalledByName(nn.Module):
    """A text model that names arguments, reads its layers' sizes, and ties its head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, WIDTH)
        self.shifted = Shifted(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 31, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(input=ids) * self.tokens.embedding_dim**0.5
        assert self.shifted.out_features == self.shifted.weight.shape[0]
        x = self.shifted(hidden=self.shifted(x, shift=2.0)).relu()
        return self.head(input=x)


class Shifted(nn.Linear):
    """A linear layer whose forward has other arguments; the model calls it twice."""

    def forward(self, hidden: Tensor, shift: float = 0.0) -> Tensor:
        return super().forward(hidden) + shift


def merged(model: nn.Module, adapter: LoRAModel) -> nn.Module:
    """Return the model with an adapter in its weights, which no layer shares."""
    result = deepcopy(model)
    for name, lora in adapter.loras.items():
        layer = result.get_submodule(name)
        delta = lora.scaling * lora.lora_b @ lora.lora_a
        is_lookup = isinstance(layer, nn.Embedding)
        layer.weight = nn.Parameter(layer.weight + (delta.T if is_lookup else delta))
    return result


def random_adapter(manager: LoRAModelManager, adapter_id: int) -> LoRAModel:
    torch.manual_seed(adapter_id)
    loras = {
        name: LoRALayerWeights(
            *(name, 2, 3.0, torch.randn(2, shape.in_features), torch.randn(shape.out_features, 2))
        )
        for name, shape in manager.adapter_target.modules.items()
        if not shape.is_optional
    }
    return LoRAModel(adapter_id, 2, loras)


def tiny_t5() -> nn.Module:
    """Encoder and decoder: the model does not run with token ids alone."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=31, tie_word_embeddings=False, **sizes))


def token_labeller() -> nn.Module:
    """A head whose results are neither one vector nor one set of labels per text."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return BertForTokenClassification(BertConfig(vocab_size=31, num_attention_heads=2, **sizes))


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "layers called by name": (CalledByName, lambda model, ids: model(ids)),
    "an encoder and a decoder": (
        tiny_t5,
        lambda model, ids: model(input_ids=ids, decoder_input_ids=ids).logits,
    ),
    "labels of tokens": (token_labeller, lambda model, ids: model(input_ids=ids).logits),
}


@pytest.mark.parametrize("case", UNUSUAL)
@pytest.mark.filterwarnings("ignore:the model is taken as it is:UserWarning")
@torch.no_grad()
def test_models_that_are_called_unusually_are_served(case: str) -> None:
    make, call = UNUSUAL[case]
    torch.manual_seed(11)
    base = make().eval()
    manager = LRUCacheLoRAModelManager(
        deepcopy(base), 8, 64, 31, LoRAConfig(8, 2), "cpu", checked=True
    )
    # The relative positions of T5 are looked up once per head and not once per token.
    names = [name for name in manager.modules if not name.endswith("relative_attention_bias")]
    models = {0: base}
    for adapter_id in (1, 2):
        adapter = random_adapter(manager, adapter_id)
        adapter = LoRAModel(adapter_id, 2, {name: adapter.loras[name] for name in names})
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter_id)
        models[adapter_id] = merged(base, adapter)
    rows = (2, 0, 1)
    manager.set_adapter_mapping(LoRAMapping([row for row in rows for _ in range(TOKENS)], rows))
    ids = torch.randint(31, (len(rows), TOKENS))
    found = call(manager.model, ids)
    for at, row in enumerate(rows):
        alone = call(models[row], ids[at : at + 1])[0]
        assert relative_error(found[at], alone) < 1e-5, row
    assert relative_error(found[0], call(base, ids)[0]) > 0.01, "the adapter has no effect"


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "several devices": (lambda: nn.DataParallel(diffusion()), "the model is DataParallel.*.module"),
    "compiled": (
        # As `torch.compile` returns it, which loads the compiler.
        lambda: nn.Sequential(nn.ModuleDict({"_orig_mod": diffusion()})),
        r"^0 is compiled.*then compile manager\.model",
    ),
    "TorchScript": (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "TorchScript"),
    "PEFT": (
        lambda: get_peft_model(diffusion(), LoraConfig(r=1, target_modules=["fc1"])),
        r"base_model.model.blocks.0.fc1 has adapters of PEFT.*unload\(\)",
    ),
    "one layer": (lambda: nn.Linear(2, 2), "the model is a single layer"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape yet; run the model"),
    "meta": (lambda: nn.Sequential(nn.Linear(2, 2, device="meta")), "0.weight is on the meta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_was_made_of_a_model_is_refused_with_what_to_pass(case: str) -> None:
    make, text = REFUSED[case]
    with pytest.raises(ModelRefused, match=text):
        manager_of(make())


def test_a_model_is_not_called_for_gradients_or_with_rounding() -> None:
    model = manager_of(nn.Sequential(nn.Linear(2, 2))).model
    with pytest.raises(ValueError, match=r"call the model under torch\.no_grad"):
        model(torch.ones(1, 2, requires_grad=True))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="load the model"):
        model(torch.ones(1, 2))


@torch.no_grad()
def test_a_compiled_model_follows_the_mapping_and_is_not_compiled_again() -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(7)
    manager, inputs = manager_of(Block().eval()), (torch.randn(3, 1, WIDTH), torch.rand(3, 1))
    for at in (1, 2):
        weights = LoRALayerWeights("fc1", 1, at, torch.ones(1, WIDTH), torch.ones(2 * WIDTH, 1))
        manager.add_adapter(LoRAModel(at, 1, {"fc1": weights}))
        manager.activate_adapter(at)
    compiled, counts = torch.compile(manager.model, backend=backend), set()
    for rows in ((0, 0, 0), (2, 0, 1), (1, 1, 0)):
        manager.set_adapter_mapping(LoRAMapping(rows, rows))
        assert relative_error(compiled(*inputs), manager.model(*inputs)) < 1e-6
        counts.add(len(graphs))
    assert len(counts - {0}) == 1


@torch.no_grad()
def test_an_image_classifier_is_served(tmp_path: Path) -> None:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    torch.manual_seed(3)
    base = ViTForImageClassification(config).eval()
    targets = ["q_proj", "v_proj", "classifier"]
    peft = save_adapter(deepcopy(base), tmp_path, 3, r=2, target_modules=targets)
    manager = manager_of(deepcopy(base))
    worker = LRUCacheWorkerLoRAManager(manager)
    images = torch.randn(2, 3, 8, 8)
    tokens = 5
    worker.set_active_adapters(
        [LoRARequest("a", 1, str(tmp_path))], LoRAMapping([0] * tokens + [1] * tokens, [0, 1])
    )
    found = manager.model(pixel_values=images).logits
    assert relative_error(found[0], base(pixel_values=images).logits[0]) < 1e-5
    assert relative_error(found[1], peft(pixel_values=images).logits[1]) < 1e-5


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=31, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("length", [1, 4, 5])
@torch.no_grad()
def test_gpt2_is_called_without_positions(length: int, tmp_path: Path) -> None:
    """Its position embedding then sees one row of ids for all four sequences of the batch."""
    fields = {"r": 2, "target_modules": ["wte", "wpe", "c_fc"], "fan_in_fan_out": True}
    references = {0: gpt2()}
    for at in (1, 2):
        references[at] = save_adapter(gpt2(), tmp_path / str(at), at, **fields)
    worker = LRUCacheWorkerLoRAManager(manager_of_gpt2())
    rows = (1, 0, 2, 1)
    requests = [LoRARequest(str(at), at, str(tmp_path / str(at))) for at in (1, 2)]
    index = [row for row in rows for _ in range(length)]
    worker.set_active_adapters(requests, LoRAMapping(index, rows, is_prefill=True))
    tokens = torch.randint(31, (len(rows), length))
    found = worker.manager.model(tokens).logits
    for at, row in enumerate(rows):
        alone = references[row](input_ids=tokens[at : at + 1]).logits[0]
        assert relative_error(found[at], alone) < 1e-5, (at, row)
    with pytest.raises(ValueError, match="mapping has"):
        worker.manager.model(tokens[:1].expand(3, -1))


def manager_of_gpt2() -> LoRAModelManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=2)
    return LRUCacheLoRAModelManager(gpt2(), 8, 256, 31, config, "cpu", checked=True)


def test_a_second_manager_over_one_model_is_refused() -> None:
    manager = full_manager(LoRAModelManager)
    with pytest.raises(ValueError, match=r"wrapped by another manager; use that one, model\.lora_"):
        LoRAModelManager(manager.model, 4, 64, 31, LoRAConfig(), "cpu")


def test_a_wrapped_model_warns_when_it_is_saved(tmp_path: Path) -> None:
    manager = manager_of_gpt2()
    with (
        pytest.warns(UserWarning, match="save the model before a manager is made"),
        # `transformers` does not find that its head is tied.
        pytest.raises(RuntimeError, match="shared tensors"),
    ):
        manager.model.save_pretrained(tmp_path)


def test_a_closed_manager_refuses_every_change() -> None:
    manager = full_manager(LRUCacheLoRAModelManager)
    manager.set_adapter_mapping(mapping_of(1))
    manager.close()
    manager.close()
    for call in (
        lambda: manager.add_adapter(CONTENTS[3].model(4)),
        lambda: manager.activate_adapter(1),
        lambda: manager.remove_adapter(1),
        lambda: manager.set_adapter_mapping(mapping_of(2)),
    ):
        with pytest.raises(RuntimeError, match="the manager is closed; load the model again"):
            call()

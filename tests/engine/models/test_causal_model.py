"""A prepared model: its wrapped layers, its refusals, and batches that answer like their rows."""

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from loradock.engine.config import LoRAConfig
from loradock.engine.errors import ModelNotRun, ModelRefused
from loradock.engine.layers import (
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from loradock.engine.layout import ModuleKind
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.models.preparation import find_candidates
from tests.support.engine.engine_examples import (
    ATTENTION,
    CONTEXT_TOKENS_MAX,
    MLP,
    relative_error,
    tiny_config,
)
from tests.support.models.causal_configs import build_config, build_model

pytest_plugins = ("tests.support.engine.engine_fixtures",)


def prepare(model: object, **lora_fields: object) -> CausalModel:
    return CausalModel(model, LoRAConfig(**lora_fields), max_model_len=64)


def tiny_model(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes))


def sliding_model() -> MistralForCausalLM:
    torch.manual_seed(0)
    fields = tiny_config().to_dict() | {"sliding_window": 4}
    del fields["rope_parameters"]
    return MistralForCausalLM(MistralConfig(**fields))


def test_every_layer_of_the_table_is_wrapped(prepared_model: CausalModel) -> None:
    wrappers = {name.rpartition(".")[2]: type(one) for name, one in prepared_model.layers.items()}
    assert wrappers == {
        "qkv_proj": MergedQKVParallelLinearWithLoRA,
        "o_proj": ReplicatedLinearWithLoRA,
        "gate_up_proj": MergedColumnParallelLinearWithLoRA,
        "down_proj": ReplicatedLinearWithLoRA,
        "embed_tokens": VocabParallelEmbeddingWithLoRA,
        "lm_head": LogitsProcessorWithLoRA,
    }
    assert len(prepared_model.layers) == 10
    for name, layer in prepared_model.layers.items():
        assert prepared_model.model.get_submodule(name) is layer
    required = [shape for shape in prepared_model.shapes if not shape.is_optional]
    names = {shape.name.rpartition(".")[2] for shape in required}
    assert names == {*ATTENTION, *MLP, "embed_tokens", "lm_head"}
    assert [shape.index for shape in prepared_model.shapes] == list(
        range(len(prepared_model.shapes))
    )
    for shape in required:
        widths = tuple(prepared_model.model.get_submodule(shape.name).weight.shape)
        is_looked_up = shape.kind is ModuleKind.EMBEDDING
        expected = (shape.in_features, shape.out_features)
        assert widths == (expected if is_looked_up else expected[::-1])


def test_a_tied_head_stays_tied() -> None:
    model = prepare(tiny_model(tie_word_embeddings=True)).model
    assert type(model.lm_head) is LogitsProcessorWithLoRA
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_module_with_two_paths_is_wrapped_once() -> None:
    model = tiny_model()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    layers = prepare(model).layers
    assert "model.layers.1.mlp.gate_up_proj" not in layers
    assert model.model.layers[1].mlp.gate_up_proj is layers["model.layers.0.mlp.gate_up_proj"]


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["o_proj"], {"0.self_attn.o_proj", "1.self_attn.o_proj"}),
        (["model.layers.1.mlp.down_proj"], {"1.mlp.down_proj"}),
        (["model.layers.1.mlp.up_proj"], {"1.mlp.gate_up_proj"}),
        (["v_proj"], {"0.self_attn.qkv_proj", "1.self_attn.qkv_proj"}),
        (["qkv_proj"], {"0.self_attn.qkv_proj", "1.self_attn.qkv_proj"}),
        (["model.layers.0.mlp.gate_up_proj"], {"0.mlp.gate_up_proj"}),
    ],
)
def test_target_modules_select_by_suffix_or_full_name(targets: list[str], layers: set[str]) -> None:
    found = prepare(tiny_model(), target_modules=targets).layers
    assert {name.removeprefix("model.layers.") for name in found} == layers


@pytest.mark.parametrize("target", ["proj", "norm", "layers.7.mlp.up_proj"])
def test_a_target_that_names_nothing_is_refused(target: str) -> None:
    with pytest.raises(ModelRefused, match=f"{target}.*these suffixes.*down_proj"):
        prepare(tiny_model(), target_modules=["o_proj", target])


class PartialMLP(nn.Module):
    """A module with a layer that receives some tokens, and one whose weight is read directly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 1)
        self.expert = nn.Linear(width, width)
        self.bypassed = nn.Linear(width, width)
        self.shared = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.bypassed.weight) + self.shared(x)
        chosen = self.router(x).squeeze(-1) > 0
        y[chosen] += self.expert(x[chosen])
        return y


def test_rows_of_a_model_with_layers_that_choose_tokens_are_run_alone() -> None:
    model = tiny_model()
    model.model.layers[0].mlp = PartialMLP(32)
    prepared = prepare(model)
    names = {name for name in prepared.layers if name.startswith("model.layers.0.mlp")}
    wrapped = {name.rpartition(".")[2] for name in names}
    assert prepared.batching == "single"
    assert wrapped == {"router", "expert", "bypassed", "shared"}
    others = tiny_model()
    others.model.layers[0].mlp = PartialMLP(32)
    assert prepare(others, target_modules=["o_proj", "shared"]).batching == "padded"


@pytest.mark.parametrize(
    "make",
    [
        tiny_model,
        sliding_model,
        lambda: tiny_model(attn_implementation="eager"),
        lambda: GemmaForCausalLM(
            GemmaConfig(**(tiny_config().to_dict() | {"head_dim": 8, "hidden_act": "gelu"}))
        ),
    ],
)
def test_unequal_rows_in_one_prefill_answer_as_alone(make: object) -> None:
    torch.manual_seed(4)
    model = prepare(make())
    prompts = [torch.randint(0, 250, (length,)) for length in (1, 9, 17, 4)]
    cache = BatchKVCache([len(prompt) for prompt in prompts])
    padded = torch.stack([nn.functional.pad(p, (17 - len(p), 0), value=11) for p in prompts])
    steps = [model.forward(padded, cache)]
    for token in (5, 6):
        cache.grow(1)
        steps.append(model.forward(torch.full((4, 1), token), cache))
    for row, prompt in enumerate(prompts):
        whole = torch.cat([prompt, torch.tensor([5, 6])])
        for step, logits in enumerate(steps):
            length = len(prompt) + step
            alone = model.model(whole[None, :length]).logits[0, -1]
            assert relative_error(logits[row], alone) < 1e-5


def test_a_state_space_model_is_served_row_by_row() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1))
    assert prepare(mamba).batching == "single"


@pytest.mark.parametrize(("name", "batching"), [("lfm2", "together"), ("minimax", "single")])
def test_rows_with_states_have_the_logits_of_all_their_tokens(name: str, batching: str) -> None:
    torch.manual_seed(0)
    model = prepare(AutoModelForCausalLM.from_config(build_config(name)).eval())
    assert model.batching == batching
    rows = [[5, 7, 9, 11, 3, 2], [4, 6, 8]]
    cache = model.new_cache([6, 3])
    logits = model.forward_all(torch.tensor([rows[0], [0] * 3 + rows[1]]), cache)
    for row, tokens in enumerate(rows):
        assert relative_error(logits[row, -len(tokens) :], model._forward_whole(tokens)) < 1e-5


def test_models_without_a_layer_to_wrap_are_refused() -> None:
    bare = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=1, n_head=1, n_layer=0, n_positions=8))
    assert list(find_candidates(bare)) == ["transformer.wte", "transformer.wpe", "lm_head"]
    bare.transformer.wte, bare.transformer.wpe = (
        nn.Embedding(9, 1, max_norm=1.0) for _ in range(2)
    )
    bare.lm_head = nn.Identity()
    with pytest.raises(ModelRefused, match="no layer of a kind"):
        prepare(bare)


def test_a_model_with_several_tokens_at_a_position_is_refused() -> None:
    with pytest.raises(ModelRefused, match="embed_tokens is a ModuleList of 2 embeddings"):
        prepare(build_model("musicgen"))


class IgnoresMask(LlamaForCausalLM):
    """A model that attends to its padding."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, **others):
        return super().forward(input_ids=input_ids, **others)


def test_a_model_whose_padded_rows_differ_is_not_batched() -> None:
    torch.manual_seed(0)
    model = prepare(IgnoresMask(tiny_config()))
    assert model.batching == "single"
    assert "results differ from the row alone" in model.refusals[0]


class Averaged(nn.Module):
    """Adds the average over all tokens of the batch, later tokens and padding included."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(dim=(0, 1), keepdim=True)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this")


@pytest.mark.parametrize(
    ("planted", "error", "text"),
    [
        (Averaged(), ModelRefused, "with more tokens after it a row's results differ"),
        (Failing(), ModelNotRun, "does not run.*RuntimeError: no kernel for this"),
    ],
)
def test_a_model_that_is_wrong_however_it_is_run_is_refused_with_the_reason(
    planted: nn.Module, error: type[ModelRefused], text: str
) -> None:
    model = tiny_model()
    model.model.layers[1].mlp = planted
    with pytest.raises(error, match=text):
        prepare(model)


def test_limits_and_ends_come_from_the_model(prepared_model: CausalModel) -> None:
    assert prepared_model.max_model_len == CONTEXT_TOKENS_MAX
    assert prepared_model.eos_ids == {258}
    assert prepared_model.vocab_size == 259
    assert prepare(tiny_model(eos_token_id=[3, 4])).eos_ids == {3, 4}
    assert prepare(tiny_model()).max_model_len == 64
    assert CausalModel(tiny_model(), LoRAConfig()).max_model_len == CONTEXT_TOKENS_MAX
    long = CausalModel(tiny_model(), LoRAConfig(), max_model_len=10**6)
    assert long.max_model_len == CONTEXT_TOKENS_MAX

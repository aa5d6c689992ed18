"""The weights of a model: packed in large ones, and with one choice on all ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.kernels.packed_linear import PackedWeight
from loradock.engine.layers import LogitsProcessorWithLoRA, ReplicatedLinearWithLoRA
from loradock.engine.models import binding
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.loading import load_model
from loradock.engine.parallel import SINGLE
from tests.support.parallel.threads import RANKS, on_all_ranks

pytest_plugins = ("tests.support.engine.engine_fixtures",)

LARGE = nn.Linear(4096, 4097, device="meta")
SMALL = nn.Linear(8, 8)


def test_a_weight_that_several_layers_read_is_not_packed() -> None:
    embedding, own = nn.Embedding(9, 8), nn.Linear(8, 8)
    head = nn.Linear(8, 9, bias=False)
    head.weight = embedding.weight
    layers = {"own": ReplicatedLinearWithLoRA(own), "head": LogitsProcessorWithLoRA(head)}
    model = nn.ModuleList([embedding, *layers.values()])
    binding._pack_weights(SimpleNamespace(model=model, layers=layers))
    assert isinstance(own.weight, PackedWeight)
    assert head.weight is embedding.weight
    assert not isinstance(head.weight, PackedWeight)


@pytest.mark.parametrize("leading", [LARGE, SMALL])
@pytest.mark.parametrize("following", [LARGE, SMALL])
def test_all_ranks_pack_if_the_part_of_rank_0_is_large(
    leading: nn.Module, following: nn.Module
) -> None:
    """Their parts of a model may be on either side of the least size."""

    def packs(group: object) -> bool:
        model = following if getattr(group, "rank", 0) else leading
        return binding._packs_weights(SimpleNamespace(model=model, group=group))

    assert on_all_ranks(packs) == [leading is LARGE] * RANKS
    assert packs(SINGLE) == (leading is LARGE)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_model_computes_the_same_with_packed_weights(
    engine_config: EngineConfig,
    lora_config: LoRAConfig,
    monkeypatch: pytest.MonkeyPatch,
    batch_invariant: bool,
) -> None:
    prepared_model = load_model(engine_config, lora_config)
    config = LoRAConfig(max_lora_rank=16, max_loras=2, batch_invariant=batch_invariant)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])

    def logits() -> torch.Tensor:
        cache = prepared_model.new_cache([5])
        return prepared_model.forward(tokens, cache)

    before = logits()
    monkeypatch.setattr(binding, "PACKED_BYTES_MIN", 0)
    weights = {name: one.clone() for name, one in prepared_model.model.named_parameters()}
    bind_lora(prepared_model, config, 1 << 20)
    packed = [
        name
        for name, one in prepared_model.model.named_parameters()
        if isinstance(one, PackedWeight)
    ]
    assert bool(packed) == (not batch_invariant)
    torch.testing.assert_close(logits(), before)
    for name, one in prepared_model.model.named_parameters():
        assert torch.equal(one, weights[name])

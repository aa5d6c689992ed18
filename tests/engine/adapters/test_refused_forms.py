"""Forms of adapters that PEFT trains and that are refused for some layers: the error names them."""

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from loradock.engine.adapters import LoRARequest
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    ConvolutionWithLoRA,
    RouterWithLoRA,
    RowParallelLinearWithLoRA,
)
from loradock.engine.layers.experts import ExpertsWithLoRA
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager


class Rounded(nn.Linear):
    """A linear layer with a product of its own, as quantised ones have."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.round(decimals=2), self.bias)


def model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(7, 4),
            "convolution": nn.Conv1d(4, 4, 3),
            "rounded": Rounded(4, 4),
            "linear": nn.Linear(4, 4),
            "mixer": nn.Bilinear(4, 4, 4),
        }
    )


DORA, SAVED = {"use_dora": True}, "linear"
CASES = {
    "DoRA of an embedding": ("tokens", DORA, r"tokens\.lora_magnitude_vector is a magnitude of a"),
    "DoRA of a convolution": ("convolution", DORA, "convolution.* for which none is served"),
    "DoRA of a quantised layer": ("rounded", DORA, "rounded.* that are not quantised"),
    "a bias in B of a convolution": ("convolution", {"lora_bias": True}, "is a bias in B of a"),
    "a bias of a quantised layer": ("rounded", {"bias": "lora_only"}, "rounded.*bias is a bias of"),
    "a saved convolution": (SAVED, {"modules_to_save": ["convolution"]}, "convolution.*two dim"),
    "a saved quantised layer": (SAVED, {"modules_to_save": ["rounded"]}, "rounded"),
    "a saved module of another kind": (SAVED, {"modules_to_save": ["mixer"]}, "mixer"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_form_is_refused_by_the_name_of_its_layer(case: str, tmp_path: Path) -> None:
    target, fields, text = CASES[case]
    peft = get_peft_model(model(), LoraConfig(r=2, target_modules=[target], **fields))
    peft.save_pretrained(tmp_path)
    config = LoRAConfig(max_lora_rank=8, max_loras=1)
    manager = LRUCacheLoRAModelManager(model(), 4, 64, 7, config, "cpu", device_bytes_max=1 << 18)
    with pytest.raises(AdapterDoesNotFit, match=text):
        LRUCacheWorkerLoRAManager(manager).add_adapter(LoRARequest("a", 1, str(tmp_path)))
    assert not manager.list_adapters()


def test_layers_without_a_scale_or_a_whole_copy_have_no_columns_for_them() -> None:
    """Several ranks split the first two; their weights are parts."""
    split = (ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA)
    for wrapper in (*split, ConvolutionWithLoRA, RouterWithLoRA, ExpertsWithLoRA):
        assert wrapper.affine_shapes is BaseLayerWithLoRA.affine_shapes
        assert wrapper.saved_shapes is BaseLayerWithLoRA.saved_shapes

"""Convolutions of models that are taken as they are: adapters as PEFT trains and applies them."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from loradock.engine.adapters import LoRALayerWeights, LoRAModel, LoRARequest, PEFTHelper
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layers import ConvolutionWithLoRA
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.models.peft_adapters import save_adapter

torch.set_num_threads(1)
WIDTH, TOKENS, SAMPLES = 8, 6, 3
ROWS = (2, 0, 1)
CASES = {
    "width one": (nn.Conv1d(WIDTH, 5, 1), (TOKENS,)),
    "1x1": (nn.Conv2d(WIDTH, 5, 1, bias=False), (3, 2)),
    "patches": (nn.Conv2d(WIDTH, 5, (2, 3), stride=(2, 3)), (6, 6)),
    "padded": (nn.Conv2d(WIDTH, 5, 3, padding=1), (2, 3)),
    "padded by name, even": (nn.Conv1d(WIDTH, 5, 4, padding="same"), (TOKENS,)),
    "not padded, by name": (nn.Conv1d(WIDTH, 5, 2, padding="valid"), (TOKENS + 1,)),
    "reflected": (nn.Conv1d(WIDTH, 5, 3, padding=1, padding_mode="reflect"), (TOKENS,)),
    "video": (nn.Conv3d(WIDTH, 5, (1, 2, 2), padding=(0, 0, 1), stride=(1, 1, 2)), (2, 2, 6)),
}
"""Layers and the sizes of an input, by what is special about them."""


class Block(nn.Module):
    """A block whose shift and gain depend on the diffusion step, with a gated 1x1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        shift, gain = self.modulation(step)[:, None].chunk(2, dim=-1)
        y = x * (1 + gain) + shift
        scores = self.to_q(y) @ self.to_k(y).transpose(1, 2) / WIDTH**0.5
        y = scores.softmax(-1) @ self.to_v(y)
        return x + y * self.gate(y.transpose(1, 2)).transpose(1, 2).sigmoid()


class DiffusionTransformer(nn.Module):
    """Images to patches, blocks that know step and class of each sample, and patches to images."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.classes = nn.Embedding(4, WIDTH)
        self.step = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.smooth = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, padding_mode="reflect")
        self.final = nn.Linear(WIDTH, 12)

    def forward(self, images: Tensor, steps: Tensor, classes: Tensor) -> Tensor:
        x = self.patch_embed(images)
        size = x.shape[2:]
        x, step = x.flatten(2).transpose(1, 2), self.step(steps) + self.classes(classes)
        for block in self.blocks:
            x = block(x, step)
        x = self.smooth(x.transpose(1, 2).unflatten(2, size)).flatten(2).transpose(1, 2)
        return self.final(x)


def saved(model: nn.Module, directory: Path, seed: int, targets: list[str]) -> nn.Module:
    """Save an adapter with PEFT, which changes the model; return PEFT's."""
    return save_adapter(model, directory, seed, r=seed + 1, lora_alpha=3, target_modules=targets)


def worker_of(model: nn.Module) -> LRUCacheWorkerLoRAManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=2)
    return LRUCacheWorkerLoRAManager(
        LRUCacheLoRAModelManager(model, 8, 256, 4, config, "cpu", checked=True)
    )


def activate(worker: LRUCacheWorkerLoRAManager, root: Path, positions: int) -> None:
    index = [row for row in ROWS for _ in range(positions)]
    requests = [LoRARequest(str(at), at, str(root / str(at))) for at in (1, 2)]
    worker.set_active_adapters(requests, LoRAMapping(index, ROWS, is_prefill=True))


@torch.no_grad()
def test_a_diffusion_transformer_serves_adapters_and_the_base_in_one_batch(tmp_path: Path) -> None:
    def model() -> DiffusionTransformer:
        torch.manual_seed(5)
        return DiffusionTransformer().eval()

    targets = ["patch_embed", "classes", "step", "modulation", "to_q", "to_k", "to_v"]
    targets += ["gate", "smooth", "final"]
    references = [model(), *(saved(model(), tmp_path / str(at), at, targets) for at in (1, 2))]
    worker = worker_of(model())
    activate(worker, tmp_path, 6)
    inputs = (torch.randn(SAMPLES, 3, 4, 6), torch.rand(SAMPLES, 1), torch.tensor([3, 0, 2]))
    found = worker.manager.model(*inputs)
    for at, row in enumerate(ROWS):
        alone = references[row](*(one[at : at + 1] for one in inputs))[0]
        assert relative_error(found[at], alone) < 1e-5, row
        assert not row or relative_error(found[at], model()(*inputs)[at]) > 1e-2


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_convolution_is_that_of_peft(case: str, tmp_path: Path) -> None:
    layer, sizes = CASES[case]
    models = [nn.Sequential(deepcopy(layer)) for _ in range(4)]
    references = [models[0], *(saved(models[at], tmp_path / str(at), at, ["0"]) for at in (1, 2))]
    worker = worker_of(models[3])
    x = torch.randn(SAMPLES, WIDTH, *sizes)
    expected = torch.stack([references[row](x)[at] for at, row in enumerate(ROWS)])
    activate(worker, tmp_path, expected[0, 0].numel())
    assert relative_error(worker.manager.model(x), expected) < 1e-5
    worker.manager.set_adapter_mapping(LoRAMapping([1] * expected[0, 0].numel(), [1]))
    assert relative_error(worker.manager.model(x[0]), references[1](x[:1])[0]) < 1e-5


@torch.no_grad()
def test_a_convolution_without_an_adapter_in_the_batch_takes_any_rows(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3), nn.Conv1d(WIDTH, 4, 1))
    saved(nn.Sequential(model[0], model[1]), tmp_path / "1", 1, ["1"])
    worker = worker_of(model)
    worker.set_active_adapters(
        [LoRARequest("1", 1, str(tmp_path / "1"))], LoRAMapping([1] * 5, [1], is_prefill=True)
    )
    first = worker.manager.modules["0"]
    x = torch.randn(2, WIDTH, 9)
    assert torch.equal(first(x), first.base_layer(x))
    with pytest.raises(ValueError, match="a batch of 18 rows, but the mapping has 5"):
        worker.manager.modules["1"](x)


def test_convolutions_that_peft_serves_differently_are_refused_by_name(tmp_path: Path) -> None:
    class Own(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    layers = {
        "groups": (
            nn.Conv1d(WIDTH, WIDTH, 3, groups=2),
            "of 2 groups[,;] (and )?A and B are stored whole",
        ),
        "dilated": (nn.Conv1d(WIDTH, WIDTH, 3, dilation=2), "dilated convolution, and PEFT's A"),
        "own": (Own(WIDTH, WIDTH, 1), "a forward of its own"),
    }
    for name, (layer, text) in layers.items():
        model = nn.ModuleDict({"good": nn.Linear(3, 3), "conv": layer})
        copy = nn.ModuleDict({"good": nn.Linear(3, 3), "conv": layer})
        saved(copy, tmp_path / name, 1, ["conv"])
        worker = worker_of(model)
        with pytest.raises(AdapterDoesNotFit, match=text):
            worker.add_adapter(LoRARequest(name, 1, str(tmp_path / name)))
        lora = LoRALayerWeights("conv", 1, 1.0, torch.ones(1, 8), torch.ones(8, 1))
        with pytest.raises(AdapterDoesNotFit, match=text):
            worker.manager.add_adapter(LoRAModel(2, 1, {"conv": lora}))


def test_tensors_of_another_kernel_are_refused(tmp_path: Path) -> None:
    saved(nn.Sequential(nn.Conv2d(WIDTH, 5, (2, 3))), tmp_path / "a", 1, ["0"])
    worker = worker_of(nn.Sequential(nn.Conv2d(WIDTH, 5, (3, 2))))
    with pytest.raises(AdapterDoesNotFit, match=r"has A \[2, 8, 2, 3\] and B"):
        worker.add_adapter(LoRARequest("a", 1, str(tmp_path / "a")))
    linear = worker_of(nn.Sequential(nn.Linear(WIDTH * 6, 5)))
    with pytest.raises(AdapterDoesNotFit, match=r"has A \[2, 8, 2, 3\] and B"):
        linear.add_adapter(LoRARequest("a", 1, str(tmp_path / "a")))


@torch.no_grad()
def test_tensors_in_memory_and_slots_take_the_shapes_of_files(tmp_path: Path) -> None:
    peft = saved(nn.Sequential(nn.Conv2d(WIDTH, 5, 2)), tmp_path / "a", 1, ["0"])
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    worker = worker_of(nn.Sequential(peft.base_model.model[0].base_layer))
    helper = PEFTHelper.from_local_dir(str(tmp_path / "a"))
    worker.manager.add_adapter(LoRAModel.from_lora_tensors(1, tensors, helper))
    worker.manager.activate_adapter(1)
    layer = worker.manager.modules["0"]
    assert isinstance(layer, ConvolutionWithLoRA)
    x = torch.randn(1, WIDTH, 3, 3)
    worker.manager.set_adapter_mapping(LoRAMapping([1] * 4, [1]))
    assert relative_error(layer(x), peft(x)) < 1e-5
    a, b = (next(t for name, t in tensors.items() if letter in name) for letter in ("_A", "_B"))
    layer.set_lora(worker.manager.lora_index_to_id.index(1), a, b)
    doubled = layer.base_layer(x) + (peft(x) - layer.base_layer(x)) * 2 / 3
    assert relative_error(layer(x), doubled) < 1e-5

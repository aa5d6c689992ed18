"""The engine's logits are peft's: alone, in mixed batches, and after any history of slots."""

from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import EngineConfig, LoRAConfig
from engine.errors import DeviceOutOfMemory
from engine.models.causal_model import PreparedModel
from engine.models.loading import load_model
from tests.support.engine.engine_examples import ADAPTERS, relative_error
from tests.support.engine.parity_bench import Bench, Row

pytest_plugins = ("tests.support.engine.engine_fixtures",)

ERROR_MAX = 1e-5
EXAMPLES = Path(__file__).parents[2] / "examples" / "tiny"


class Yardstick:
    """The same rows one by one through peft."""

    def __init__(self, models: Mapping[str, PreTrainedModel | PeftModel]) -> None:
        self._models = models
        self._known: dict[Row, Tensor] = {}

    @torch.no_grad()
    def logits(self, name: str | None, tokens: tuple[int, ...]) -> Tensor:
        if (name, tokens) not in self._known:
            ids = torch.tensor([tokens])
            if name is None:
                model = next(iter(self._models.values()))
                with model.disable_adapter():
                    logits = model(input_ids=ids).logits[0, -1]
            else:
                logits = self._models[name](input_ids=ids).logits[0, -1]
            self._known[name, tokens] = logits
        return self._known[name, tokens]

    def check(self, bench: Bench, rows: list[Row]) -> None:
        for row, found in zip(rows, bench.logits(rows), strict=True):
            assert relative_error(found, self.logits(*row)) < ERROR_MAX, row


@pytest.fixture(scope="module")
def yardstick(peft_models: dict[str, PeftModel]) -> Yardstick:
    return Yardstick(peft_models)


@pytest.fixture
def bench(prepared_model: PreparedModel, adapter_root: Path) -> Bench:
    return Bench(prepared_model, adapter_root, slots=5, device_bytes=1 << 20)


PROMPTS = ((72, 101, 108), (1, 2, 3, 4, 5, 6, 7, 8, 9), (200,), (65, 66, 65, 66, 65))


def test_adapters_differ_from_the_base_and_from_each_other(yardstick: Yardstick) -> None:
    logits = [yardstick.logits(name, PROMPTS[0]) for name in (None, *ADAPTERS)]
    for at, one in enumerate(logits):
        assert all(relative_error(other, one) > 0.05 for other in logits[:at])


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_an_adapter_alone_is_pefts(bench: Bench, yardstick: Yardstick, name: str | None) -> None:
    if name is not None:
        bench.write(len(bench.residents) - 1, name)
    for prompt in PROMPTS:
        yardstick.check(bench, [(name, prompt)])
    yardstick.check(bench, [(name, prompt) for prompt in PROMPTS])


def test_all_adapters_and_the_base_in_one_batch_are_pefts(
    bench: Bench, yardstick: Yardstick
) -> None:
    for slot, name in enumerate(ADAPTERS):
        bench.write(slot, name)
    names = (None, *ADAPTERS, None)
    yardstick.check(bench, [(name, prompt) for prompt in PROMPTS for name in names])
    yardstick.check(bench, [(name, PROMPTS[at % 4]) for at, name in enumerate(reversed(names))])


def test_after_200_writes_and_resets_the_logits_are_still_pefts(
    prepared_model: PreparedModel, adapter_root: Path, yardstick: Yardstick
) -> None:
    seed = torch.seed() % 2**32
    print(f"seed {seed}")
    random = Random(seed)
    bench = Bench(prepared_model, adapter_root, slots=5, device_bytes=1 << 20)
    # Room for about three adapters, so that writes are refused, and others slide extents together.
    room = sum(blob.size_bytes for blob in bench.blobs.values()) * 3 // 5
    bench = Bench(prepared_model, adapter_root, slots=5, device_bytes=room)
    refused = 0
    for step in range(200):
        slot = random.randrange(5)
        if bench.residents[slot] is not None:
            bench.reset(slot)
        absent = [name for name in ADAPTERS if name not in bench.residents]
        try:
            bench.write(slot, random.choice(absent))
        except DeviceOutOfMemory:
            refused += 1
        bench.arena.check()
        if step % 8 == 0 or step >= 195:
            resident = [name for name in bench.residents if name is not None]
            rows = [(name, random.choice(PROMPTS)) for name in (None, *resident, *resident)]
            random.shuffle(rows)
            yardstick.check(bench, rows)
    assert 0 < refused < 150


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the example model is not in this checkout")
def test_the_example_adapters_are_pefts() -> None:
    root = EXAMPLES / "adapters"
    config = EngineConfig(EXAMPLES / "model", (root,), device="cpu")
    names = sorted(path.name for path in root.iterdir())
    bench = Bench(load_model(config, LoRAConfig()), root, len(names), 64 << 20)
    models = {
        name: PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(EXAMPLES / "model"), root / name
        ).eval()
        for name in names
    }
    for slot, name in enumerate(names):
        bench.write(slot, name)
    rows = [(name, prompt) for name in (None, *names) for prompt in PROMPTS]
    Yardstick(models).check(bench, rows)

"""The engine's logits are PEFT's: alone, in mixed batches, and after any history of slots."""

from pathlib import Path
from random import Random

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import DeviceOutOfMemory
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.loading import load_model
from tests.support.engine.engine_examples import ADAPTERS, relative_error
from tests.support.engine.parity_bench import ParityBench, PeftReference

pytest_plugins = ("tests.support.engine.engine_fixtures",)

ERROR_MAX = 1e-5
EXAMPLES = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def reference(peft_models: dict[str, PeftModel]) -> PeftReference:
    return PeftReference(peft_models)


@pytest.fixture
def bench(prepared_model: CausalModel, adapter_root: Path) -> ParityBench:
    return ParityBench(prepared_model, adapter_root, slots=5, device_bytes=1 << 20)


PROMPTS = ((72, 101, 108), (1, 2, 3, 4, 5, 6, 7, 8, 9), (200,), (65, 66, 65, 66, 65))


def test_adapters_differ_from_the_base_and_from_each_other(reference: PeftReference) -> None:
    logits = [reference.logits(name, PROMPTS[0]) for name in (None, *ADAPTERS)]
    for index, one in enumerate(logits):
        assert all(relative_error(other, one) > 0.05 for other in logits[:index])


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_an_adapter_alone_matches_peft(
    bench: ParityBench, reference: PeftReference, name: str | None
) -> None:
    if name is not None:
        bench.write(len(bench.residents) - 1, name)
    for prompt in PROMPTS:
        reference.check(bench, [(name, prompt)])
    reference.check(bench, [(name, prompt) for prompt in PROMPTS])


def test_all_adapters_and_the_base_in_one_batch_match_peft(
    bench: ParityBench, reference: PeftReference
) -> None:
    for slot, name in enumerate(ADAPTERS):
        bench.write(slot, name)
    names = (None, *ADAPTERS, None)
    reference.check(bench, [(name, prompt) for prompt in PROMPTS for name in names])
    reference.check(bench, [(name, PROMPTS[i % 4]) for i, name in enumerate(reversed(names))])


def test_after_200_writes_and_resets_the_logits_still_match_peft(
    prepared_model: CausalModel, adapter_root: Path, reference: PeftReference
) -> None:
    seed = torch.seed() % 2**32
    print(f"seed {seed}")
    random = Random(seed)
    bench = ParityBench(prepared_model, adapter_root, slots=5, device_bytes=1 << 20)
    # Enough for about three adapters, so that some writes are refused, and others compact extents.
    device_bytes = sum(blob.size_bytes for blob in bench.blobs.values()) * 3 // 5
    bench = ParityBench(prepared_model, adapter_root, slots=5, device_bytes=device_bytes)
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
            reference.check(bench, rows)
    assert 0 < refused < 150


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the example model is not in this checkout")
def test_the_example_adapters_match_peft() -> None:
    root = EXAMPLES / "adapters"
    config = EngineConfig(EXAMPLES / "model", (root,), device="cpu")
    names = sorted(path.name for path in root.iterdir())
    bench = ParityBench(load_model(config, LoRAConfig()), root, len(names), 64 << 20)
    models = {
        name: PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(EXAMPLES / "model"), root / name
        ).eval()
        for name in names
    }
    for slot, name in enumerate(names):
        bench.write(slot, name)
    rows = [(name, prompt) for name in (None, *names) for prompt in PROMPTS]
    PeftReference(models).check(bench, rows)

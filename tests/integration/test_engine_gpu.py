"""The engine on a CUDA device answers right, in each way that it can run steps.

Skipped without a device; `pytest --simulated-device` runs it on a simulated one.
"""

from pathlib import Path

import pytest
import torch

from examples.transformations import TRANSFORMATIONS, answer_of, prompt_of
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model
from loradock.engine.residency.extents import Compactor
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages import requests
from loradock.messages.ids import GPU_SLOT
from loradock.messages.prompts import Sampling
from tests.support.engine.engine_bench import EngineBench

TINY = Path(__file__).parents[2] / "examples" / "tiny"
WORD = "word"
TOKENS = 3
"""So few of each answer that Triton's interpreter takes half a minute for all."""
SLOTS = 3
DEVICE_BYTES = 1_950_000
"""The adapters that are in slots together fit with few bytes left, so the arena is compacted."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def generate(bench: EngineBench, number: int, name: str) -> int:
    """Load an adapter while others generate, and start a generation."""
    bench.promote(number, name, GPU_SLOT, number % SLOTS, number)
    return bench.submit(
        cm.StartGeneration,
        adapter_id=number,
        slot=number % SLOTS,
        generation=number,
        request_id=name,
        prompt=prompt_of(WORD),
        sampling=Sampling(max_tokens=TOKENS),
    )


@pytest.mark.parametrize(
    ("dual_stream", "capture_steps", "adapters"), [(True, False, 8), (False, True, 4)]
)
def test_every_adapter_answers_from_a_slot_on_the_device(
    dual_stream: bool, capture_steps: bool, adapters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(TRANSFORMATIONS)[:adapters]
    holes: list[object] = []
    make_hole = Compactor.make_hole
    monkeypatch.setattr(
        Compactor, "make_hole", lambda *args: holes.append(moved := make_hole(*args)) or moved
    )
    config = EngineConfig(
        *(TINY / "model", (TINY / "adapters",)),
        device="cuda",
        device_bytes_max=DEVICE_BYTES,
        capture_steps=capture_steps,
        # Each number of rows is captured at start, in minutes where Triton's interpreter runs it.
        max_num_seqs=SLOTS,
    )
    lora_config = LoRAConfig(max_lora_rank=64, max_loras=SLOTS, dual_stream=dual_stream)
    bench = EngineBench(load_model(config, lora_config), config, lora_config)
    ops: dict[int, int] = {}
    for number, name in enumerate(names, start=1):
        if number > SLOTS:
            assert isinstance(bench.wait(ops[number - SLOTS]), rp.GenerationEnded)
            bench.do(cm.ResetSlot, slot=number % SLOTS, generation=number - SLOTS)
        ops[number] = generate(bench, number, name)
    for op in ops.values():
        assert isinstance(bench.wait(op), rp.GenerationEnded)
    bench.engine.close()
    parts = [r for r in bench.reports if isinstance(r, requests.TokensStreamed)]
    texts = {name: "".join(p.text for p in parts if p.request_id == name) for name in names}
    assert texts == {name: answer_of(name, WORD)[:TOKENS] for name in names}
    assert any(holes) or adapters < len(TRANSFORMATIONS), "nothing was moved"

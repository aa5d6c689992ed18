"""The engine on a CUDA device generates what it generates on the CPU; skipped without a device."""

from pathlib import Path

import pytest
import torch

from examples.transformations import TRANSFORMATIONS, answer_of, prompt_of
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages import requests
from loradock.messages.ids import GPU_SLOT
from loradock.messages.prompts import Sampling
from tests.support.engine.engine_bench import EngineBench

TINY = Path(__file__).parents[2] / "examples" / "tiny"
SLOTS = 3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def test_every_adapter_answers_correctly_from_a_slot_on_the_device() -> None:
    config = EngineConfig(TINY / "model", (TINY / "adapters",), "cuda", device_bytes_max=8 << 20)
    lora_config = LoRAConfig(max_lora_rank=64, max_loras=SLOTS)
    bench = EngineBench(load_model(config, lora_config), config, lora_config)
    for number, name in enumerate(TRANSFORMATIONS, start=1):
        slot = number % SLOTS
        if number > SLOTS:
            bench.do(cm.ResetSlot, slot=slot, generation=number - SLOTS)
        bench.promote(number, name, GPU_SLOT, slot, number)
        start = {
            "adapter_id": number,
            "slot": slot,
            "generation": number,
            "request_id": name,
        }
        sampling = Sampling(max_tokens=32)
        op = bench.submit(cm.StartGeneration, **start, prompt=prompt_of("hello"), sampling=sampling)
        assert isinstance(bench.wait(op), rp.GenerationEnded)
        parts = [r for r in bench.reports if isinstance(r, requests.TokensStreamed)]
        text = "".join(part.text for part in parts if part.request_id == name)
        assert text == answer_of(name, "hello")
    bench.engine.close()

"""An engine in this process without a controller: commands in, tokens out, one step at a time.

A bare GPU machine needs PyTorch, Triton, transformers, safetensors, tokenizers, msgspec, structlog,
google-re2 and xxhash for it.
"""

import time
from collections.abc import Sequence
from typing import Any

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.worker.engine import Engine
from loradock.messages import commands, reports
from loradock.messages.prompts import Prompt, Sampling
from loradock.messages.requests import TokensStreamed


class DirectEngine:
    """An engine whose slots the caller assigns; every wait steps the running sequences."""

    def __init__(self, model: CausalModel, config: EngineConfig, lora_config: LoRAConfig) -> None:
        self.engine = Engine(model, config, lora_config, "e" * 32)
        self.texts: dict[str, str] = {}
        self.token_count = 0
        self._op = 0
        self._ended: dict[int, reports.Report] = {}
        self._versions = [0] * lora_config.max_loras
        self._fingerprints: dict[str, str] = {}

    def step(self) -> None:
        """Run one step, and take its reports; RuntimeError if an operation failed."""
        self.engine.step()
        for report in self.engine.poll():
            if isinstance(report, reports.OperationFailed):
                raise RuntimeError(report.message)
            if isinstance(report, TokensStreamed):
                text = self.texts.get(report.request_id, "")
                self.texts[report.request_id] = text + report.text
                self.token_count += len(report.tokens)
            elif (op := getattr(report, "op", None)) is not None:
                self._ended[op] = report

    def submit(self, kind: type, **fields: Any) -> int:
        """Submit a command and return its operation."""
        self._op += 1
        self.engine.submit(kind(op=self._op, **fields))
        return self._op

    def wait(self, op: int) -> Any:
        """Step until an operation has ended, and return its report."""
        while op not in self._ended:
            self.step()
            if self.engine.is_idle:
                time.sleep(0.0005)
        return self._ended.pop(op)

    def do(self, kind: type, **fields: Any) -> Any:
        """Submit a command, and wait for its end."""
        return self.wait(self.submit(kind, **fields))

    def load(self, adapter_id: int, name: str) -> None:
        """Check, load and stage an adapter."""
        if name not in self._fingerprints:
            fields = {"adapter_id": 1_000_000 + self._op, "adapter": name, "path": name}
            self._fingerprints[name] = self.do(commands.CheckAdapter, **fields).fingerprint
        source = {"adapter": name, "path": "", "fingerprint": self._fingerprints[name]}
        self.do(commands.LoadWeights, adapter_id=adapter_id, **source)
        self.do(commands.StageWeights, adapter_id=adapter_id)

    def write(self, adapter_id: int, slot: int) -> None:
        """Write a staged adapter into a slot, and reset the slot before if it is taken."""
        if self._versions[slot]:
            self.do(commands.ResetSlot, slot=slot, generation=self._versions[slot])
        self._versions[slot] += 1
        place = {"slot": slot, "generation": self._versions[slot]}
        self.do(commands.WriteSlot, adapter_id=adapter_id, **place)

    def generate(self, name: str, prompt: Prompt, adapter_id: int, slot: int, tokens: int) -> int:
        """Start to generate; slot -1 is the base model, with adapter id 0."""
        return self.submit(
            commands.StartGeneration,
            adapter_id=adapter_id,
            slot=slot,
            generation=self._versions[slot] if slot >= 0 else 0,
            request_id=name,
            prompt=prompt,
            sampling=Sampling(max_tokens=tokens, ignore_eos=not isinstance(prompt, str)),
        )

    def wait_all(self, ops: Sequence[int]) -> None:
        """Step until all of these operations have ended."""
        for op in ops:
            self.wait(op)

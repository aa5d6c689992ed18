"""An engine without a process: commands in, all reports kept, bounded waits."""

import threading

from msgspec import structs

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.worker.engine import Engine
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages import requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import GPU_SLOT, PINNED
from loradock.messages.prompts import Sampling
from tests.support.waiting import PAUSE_S, wait_until

PROMPT = (72, 101, 108, 108, 111)


class EngineBench:
    """An engine, its wake-ups, and every report so far."""

    def __init__(self, model: CausalModel, config: EngineConfig, lora_config: LoRAConfig) -> None:
        self.woken = threading.Event()
        self.engine = Engine(model, config, lora_config, "e" * 32, self.woken.set)
        self.reports: list[rp.Report] = []
        self.fingerprints: dict[str, str] = {}
        self.op = 0

    def submit(self, kind: type, **fields: object) -> int:
        self.op += 1
        self.engine.submit(kind(op=self.op, **fields))
        return self.op

    def poll(self) -> None:
        self.reports += self.engine.poll()

    def reports_of(self, op: int) -> list[rp.Report]:
        return [report for report in self.reports if getattr(report, "op", None) == op]

    def wait(self, op: int) -> rp.Report:
        """Step the engine until an operation has its report, and return it."""

        def report() -> list[rp.Report]:
            if self.engine.is_idle:
                self.woken.wait(PAUSE_S)
                self.woken.clear()
            self.engine.step()
            self.poll()
            return self.reports_of(op)

        what = f"a report of operation {op}"
        return wait_until(report, lambda: len(self.reports), what, pause_s=0.0)[0]

    def do(self, kind: type, **fields: object) -> rp.Report:
        return self.wait(self.submit(kind, **fields))

    def fingerprint(self, name: str) -> str:
        if name not in self.fingerprints:
            # An id names one version, so that no load of a test is for this check.
            fields = {"adapter_id": 1_000_000 + self.op, "adapter": name, "path": name}
            report = self.do(cm.CheckAdapter, **fields)
            assert isinstance(report, rp.AdapterChecked)
            self.fingerprints[name] = report.fingerprint
        return self.fingerprints[name]

    def promote(self, adapter_id: int, name: str, state: str, slot: int = 0, generation: int = 1):
        """Load an adapter and take it through its states up to `state`."""
        fields = {"adapter_id": adapter_id}
        source = {"adapter": name, "path": "", "fingerprint": self.fingerprint(name)}
        reports = [self.do(cm.LoadWeights, **fields, **source)]
        if state in (PINNED, GPU_SLOT):
            reports.append(self.do(cm.StageWeights, **fields))
        if state == GPU_SLOT:
            write = {"slot": slot, "generation": generation}
            reports.append(self.do(cm.WriteSlot, **fields, **write))
        assert not [report for report in reports if isinstance(report, rp.OperationFailed)]

    def adapters(self) -> dict[int, rp.InventoryAdapter]:
        """Return the adapters of the engine's inventory, by id."""
        return {adapter.adapter_id: adapter for adapter in self.engine.inventory().adapters}

    def state(self) -> object:
        """Return everything that a failed operation must not change."""
        return structs.replace(self.engine.inventory(), last_op=0)

    def generate(self, adapter_id: int, slot: int, generation: int, max_tokens: int = 12) -> int:
        return self.submit(
            cm.StartGeneration,
            request_id=f"r{self.op}",
            adapter_id=adapter_id,
            slot=slot,
            generation=generation,
            prompt=PROMPT,
            sampling=Sampling(max_tokens=max_tokens),
        )

    def tokens(self, op: int) -> list[int]:
        streamed = [r for r in self.reports if isinstance(r, requests.TokensStreamed)]
        return [token for r in streamed if r.request_id == f"r{op - 1}" for token in r.tokens]


def failure(report: rp.Report, code: ErrorCode, *words: str) -> None:
    assert isinstance(report, rp.OperationFailed), report
    assert report.code == code
    assert all(word in report.message for word in words), report.message

"""A generation scheduler without an engine: one slot per example adapter, and its reports."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from loradock.engine.adapters import read_adapter
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.jobs import InlineJobs, Jobs
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import Blob, stage
from loradock.engine.serving.paged_batch import PagedBatch
from loradock.engine.serving.queue import SlotTable
from loradock.engine.serving.scheduler import GenerationScheduler
from loradock.messages.commands import StartGeneration
from loradock.messages.ids import OpId
from loradock.messages.prompts import Prompt, Sampling
from loradock.messages.reports import GenerationEnded, OperationFailed
from loradock.messages.requests import TokensStreamed
from tests.support.engine.engine_examples import ADAPTERS

NAMES = tuple(ADAPTERS)
PROMPTS = ((72, 101, 108), (1, 2, 3, 4, 5, 6, 7, 8, 9), (200,), (65, 66, 65, 66, 65))
REQUESTS = [(name, prompt) for prompt in PROMPTS for name in (None, *NAMES)]
AroundPass = Callable[[list[int], Callable[[], torch.Tensor]], torch.Tensor]
SIXTEEN = Sampling(max_tokens=16)


class SchedulerDriver:
    """Starts generations; adapter number `n` of `names` is in slot `n`, generation 1, id `n + 1`.

    The request id is the operation's number. `residents`: the adapter in each slot of `arena`.
    `blobs`: what is written into slots, by id.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of an engine
        self,
        model: CausalModel,
        punica: PunicaWrapper,
        arena: Arena,
        residents: list[int | None],
        config: EngineConfig,
        names: Sequence[str],
        jobs: Jobs[OpId],
    ) -> None:
        self.model, self.names, self.reports, self.op = model, names, [], 0
        self.arena, self.residents = arena, residents
        self.blobs: dict[int, Blob] = {}
        slots = SlotTable(arena, residents)
        emit = self.reports.append
        self.scheduler = GenerationScheduler(model, punica, slots, config, emit, jobs)

    def start(
        self, name: str | None, prompt: Prompt, sampling: Sampling = SIXTEEN, **fields: object
    ) -> int:
        """Start a generation and return its operation."""
        self.op += 1
        slot = -1 if name is None else self.names.index(name)
        command = StartGeneration(
            op=self.op,
            request_id=str(self.op),
            adapter_id=slot + 1,
            slot=slot,
            generation=0 if name is None else 1,
            prompt=prompt,
            sampling=sampling,
        )
        self.scheduler.start(structs.replace(command, **fields))
        return self.op

    def write(self, slot: int, adapter_id: int, generation: int) -> None:
        """Write an adapter into a slot."""
        self.arena.begin_write(slot, generation, self.blobs[adapter_id])
        self.arena.finish_write(slot)
        self.residents[slot] = adapter_id

    def clear(self, slot: int, generation: int) -> None:
        """Clear a slot."""
        self.arena.reset(slot, generation)
        self.residents[slot] = None

    def suspend(self, slot: int, generation: int) -> None:
        """Let an adapter leave its slot at the end of its turn, and clear the slot."""
        self.scheduler.leave(slot, generation)
        self.clear(slot, generation)
        self.scheduler.collect()

    def write_again(self, slot: int) -> None:
        """Let the adapter that was in a slot at the start enter it again."""
        self.write(slot, slot + 1, 2)

    def run(self, steps: int = 1000) -> None:
        """Run at most `steps` steps; without an argument, until the scheduler is idle."""
        for _ in range(steps):
            self.scheduler.collect()
            if self.scheduler.is_idle:
                return
            self.scheduler.step()
        assert steps < 1000, "generations do not end"

    def outputs(
        self, requests: Iterable[tuple[object, ...]], steps_between: int = 0
    ) -> list[tuple[list[int], str]]:
        """Run requests (the arguments of `start`) in one batch; return their outputs.

        steps_between: those after the start of each request.
        """
        ops = []
        for request in requests:
            ops.append(self.start(*request))
            self.run(steps_between)
        self.run()
        return [self.output(op) for op in ops]

    def record_preemptions(self) -> list[object]:
        """Return the list of all sequences that are preempted from now on."""
        preempted: list[object] = []
        on_preemption = self.scheduler.on_preemption
        self.scheduler.on_preemption = lambda sequences: (
            preempted.extend(sequences) or on_preemption(sequences)
        )
        return preempted

    def intercept(self, monkeypatch: pytest.MonkeyPatch, around: AroundPass) -> None:
        """Call `around` in place of each forward pass, with every row's tokens and the pass."""
        batch = self.scheduler.batch
        if isinstance(batch, PagedBatch):
            flat = batch._packed.forward
            monkeypatch.setattr(
                batch._packed,
                "forward",
                lambda rows: around([len(row.tokens) for row in rows], lambda: flat(rows)),
            )
        else:
            padded = self.model.forward
            monkeypatch.setattr(
                self.model,
                "forward",
                lambda ids, *rest: around([ids.shape[1]] * len(ids), lambda: padded(ids, *rest)),
            )

    def output(self, op: int) -> tuple[list[int], str]:
        """Return what was streamed for one request, in the order of its pieces."""
        tokens: list[int] = []
        text = ""
        for report in self.reports:
            if isinstance(report, TokensStreamed) and report.request_id == str(op):
                assert report.offset == len(tokens), "offsets have a gap"
                assert report.tokens or report.text or report.finish_reason
                tokens += report.tokens
                text += report.text
        return tokens, text

    def end(self, op: int) -> GenerationEnded | OperationFailed:
        """Return the one report that ended an operation; nothing may be streamed after it."""
        ends = [r for r in self.reports if not isinstance(r, TokensStreamed) and r.op == op]
        assert len(ends) == 1, ends
        later = self.reports[self.reports.index(ends[0]) :]
        assert not [r for r in later if isinstance(r, TokensStreamed) and r.request_id == str(op)]
        return ends[0]

    def alone(self, name: str | None, prompt: Prompt, sampling: Sampling = SIXTEEN):
        """Run one request from its start to its end and return its output."""
        op = self.start(name, prompt, sampling)
        self.run()
        return self.output(op)


class GenerationBench(SchedulerDriver):
    """A text model with adapters of `root`."""

    def __init__(
        self,
        model: CausalModel,
        root: Path,
        config: EngineConfig,
        names: Sequence[str] = NAMES,
        **lora_fields: object,
    ) -> None:
        fields = {"max_lora_rank": 16, "max_loras": len(names), "lora_dtype": "float32"}
        wanted = LoRAConfig(**fields | lora_fields)
        arena, punica, self.lora_config = bind_lora(model, wanted, 4 << 20)
        arena.data.fill_(torch.nan)
        super().__init__(model, punica, arena, [None] * len(names), config, names, InlineJobs())
        for slot, name in enumerate(names):
            loaded = read_adapter(name, [root], model.adapter_target(self.lora_config))
            self.blobs[slot + 1] = stage(loaded.model, model.shapes, torch.float32)
            self.write(slot, slot + 1, 1)

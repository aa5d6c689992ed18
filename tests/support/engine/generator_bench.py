"""A generator without an engine: a slot for each adapter of the examples, and what it reported."""

from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec import structs

from engine.adapters import read_adapter
from engine.config import EngineConfig, LoRAConfig
from engine.inference.admission import Slots
from engine.inference.generator import Generator
from engine.jobs import InlineJobs, Jobs
from engine.models.binding import equip
from engine.models.causal_model import PreparedModel
from engine.punica import PunicaWrapper
from engine.residency.staging import stage
from messages.commands import StartGeneration
from messages.ids import OpId
from messages.reports import GenerationEnded, OperationFailed, TokensGenerated
from messages.requests import Prompt, Sampling
from tests.support.engine.engine_examples import ADAPTERS

NAMES = tuple(ADAPTERS)
PROMPTS = ((72, 101, 108), (1, 2, 3, 4, 5, 6, 7, 8, 9), (200,), (65, 66, 65, 66, 65))
ROWS = [(name, prompt) for prompt in PROMPTS for name in (None, *NAMES)]
SIXTEEN = Sampling(max_tokens=16)


class Driver:
    """Adapter number `n` of `names` is in slot `n`, generation 1; its id is one more.

    An operation's number is its request id.
    """

    def __init__(
        self,
        model: PreparedModel,
        punica: PunicaWrapper,
        slots: Slots,
        config: EngineConfig,
        names: Sequence[str],
        jobs: Jobs[OpId],
    ) -> None:
        self.model, self.names, self.reports, self.op = model, names, [], 0
        self.generator = Generator(model, punica, slots, config, self.reports.append, jobs)

    def start(
        self, name: str | None, prompt: Prompt, sampling: Sampling = SIXTEEN, **fields: object
    ) -> int:
        """Start a generation; its operation, also its request id."""
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
        self.generator.start(structs.replace(command, **fields))
        return self.op

    def run(self, steps: int = 1000) -> None:
        for _ in range(steps):
            self.generator.collect()
            if self.generator.is_idle:
                return
            self.generator.step()
        assert steps < 1000, "generations do not end"

    def output(self, op: int) -> tuple[list[int], str]:
        """What was streamed for one request, in the order of its pieces."""
        tokens: list[int] = []
        text = ""
        for report in self.reports:
            if isinstance(report, TokensGenerated) and report.request_id == str(op):
                assert report.offset == len(tokens), "offsets have a gap"
                assert report.tokens or report.text
                tokens += report.tokens
                text += report.text
        return tokens, text

    def end(self, op: int) -> GenerationEnded | OperationFailed:
        """The one report that ended an operation; nothing is streamed after it."""
        ends = [r for r in self.reports if not isinstance(r, TokensGenerated) and r.op == op]
        assert len(ends) == 1, ends
        later = self.reports[self.reports.index(ends[0]) :]
        assert not [r for r in later if isinstance(r, TokensGenerated) and r.request_id == str(op)]
        return ends[0]

    def alone(self, name: str | None, prompt: Prompt, sampling: Sampling = SIXTEEN):
        """A request by itself, from its start to its end."""
        op = self.start(name, prompt, sampling)
        self.run()
        return self.output(op)


class GeneratorBench(Driver):
    """A text model with the adapters of the examples."""

    def __init__(
        self, model: PreparedModel, root: Path, config: EngineConfig, **lora_fields: object
    ) -> None:
        wanted = LoRAConfig(
            max_lora_rank=16, max_loras=len(NAMES), lora_dtype="float32", **lora_fields
        )
        self.arena, punica, lora_config = equip(model, wanted, 1 << 20)
        self.arena.data.fill_(torch.nan)
        self.residents: list[int | None] = [None] * len(NAMES)
        slots = Slots(self.arena, self.residents)
        super().__init__(model, punica, slots, config, NAMES, InlineJobs())
        for slot, name in enumerate(NAMES):
            loaded = read_adapter(name, [root], model.side(lora_config))
            self.blob = stage(loaded.model, model.shapes, torch.float32, False)
            self.write(slot, slot + 1, 1)

    def write(self, slot: int, adapter_id: int, generation: int) -> None:
        """Put the last staged blob into a slot."""
        self.arena.begin_write(slot, generation, self.blob)
        self.arena.finish_write(slot)
        self.residents[slot] = adapter_id

"""A load of adapters in turns: the real core, engine and scheduler, over simulated time.

A step lasts `STEP_MS`, and `ROW_MS` and `PROMPT_TOKEN_MS` more for each row and each token of a
prompt, about as a Llama of 100 million parameters in bfloat16 on one core. The controller's answers
arrive `ANSWER_MS` after what they answer. Nothing is computed, so a run depends on decisions alone:

    python -m tests.support.engine.turns_load
"""

import heapq
import random
import shutil
import tempfile
import time
from collections import defaultdict
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from msgspec import structs
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from loradock.controller.core.actions import SendCommand, SendReply
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import TURNS, Limits
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model
from loradock.engine.serving.paged_batch import PagedBatch
from loradock.engine.worker.engine import Engine
from loradock.engine.worker.worker import ANSWER_WAIT_MS
from loradock.messages import commands, records, reports, requests
from loradock.messages.prompts import Sampling
from tests.support.engine.engine_examples import ADAPTERS, tiny_config

SLOTS = 8
STEP_MS, ROW_MS, PROMPT_TOKEN_MS, WRITE_MS = 38.0, 3.3, 2.0, 5.0
ANSWER_MS = 1.0
IDLE_MS = 0.5
OUTPUT_TOKENS = 48
PROMPT_TOKENS = (50, 150)
NS_PER_MS = 1_000_000


class Run(NamedTuple):
    """Figures of a run: `first_steps` are the steps from a request to its first token (median)."""

    tokens_per_s: float
    rows: float
    steps: int
    writes: int
    first_steps: float
    first_ms: float
    gap_p95_ms: float
    gap_ms_max: float
    others_tokens_max: int
    """The most tokens that one other adapter generated while a request waited for its first."""


def write_files(root: Path, adapters: int = 2 * SLOTS) -> None:
    """Write a tiny model, and adapters `a0`, `a1`... next to it."""
    torch.manual_seed(7)
    LlamaForCausalLM(tiny_config(max_position_embeddings=512)).save_pretrained(root / "model")
    base = LlamaForCausalLM.from_pretrained(root / "model")
    config = LoraConfig(task_type="CAUSAL_LM", **ADAPTERS["output"])
    get_peft_model(base, config).save_pretrained(root / "a0")
    for number in range(1, adapters):
        shutil.copytree(root / "a0", root / f"a{number}")


class TurnsLoad:
    """Clients of a core and an engine, each with one request at a time; `now_ms` is simulated."""

    def __init__(self, root: Path, rows: int, turn_tokens: int) -> None:
        config = EngineConfig(
            root / "model",
            (root,),
            device="cpu",
            device_bytes_max=1 << 20,
            max_num_seqs=rows,
            max_num_batched_tokens=128,
            prefix_caching=False,
        )
        lora = LoRAConfig(max_lora_rank=16, max_loras=SLOTS)
        self.engine = Engine(load_model(config, lora), config, lora, "turns")
        self.now_ms = 0.0
        self._core = Controller(
            Limits(max_loras=SLOTS, device_bytes_max=1 << 20, turn_tokens=turn_tokens)
        )
        self._numbers = count()
        self._arriving: list[tuple[float, int, commands.Command]] = []
        self._payloads: dict[str, Any] = {}
        self._replies: dict[str, Any] = {}
        self._adapters: dict[str, str] = {}
        self._tokens: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._steps: list[tuple[int, int]] = []
        self._generated: list[tuple[int, str]] = []
        self._charged_writes = 0
        self._slot_changed = False
        self._compute_nothing()
        self._handle(self.engine.inventory())
        for path in sorted(root.glob("a*")):
            self._stage(path.name)

    def run(self, adapters: int, clients: int, requests_: int = 64) -> Run:
        """Run requests of the first adapters in turn, of mixed prompts."""
        lengths = random.Random(2)
        waiting = [
            (f"a{number % adapters}", lengths.randint(*PROMPT_TOKENS))
            for number in reversed(range(requests_))
        ]
        self._steps.clear()
        self._generated.clear()
        arrived: dict[str, tuple[int, float, int]] = {}
        running: set[str] = set()
        started_ms, writes = self.now_ms, self.engine.residency.arena.writes
        while waiting or running:
            while waiting and len(running) < clients:
                request_id = self._generate(*waiting.pop())
                arrived[request_id] = (len(self._steps), self.now_ms, len(self._generated))
                running.add(request_id)
            self._iterate()
            running = {one for one in running if one not in self._replies}
        firsts = {one: self._tokens[one][0] for one in arrived}
        times = [[at_ms for _, at_ms in self._tokens[one]] for one in arrived]
        gaps = sorted(later - token for own in times for token, later in pairwise(own))
        rows = [rows for rows, _ in self._steps]
        return Run(
            1000 * requests_ * OUTPUT_TOKENS / (self.now_ms - started_ms),
            sum(rows) / len(rows),
            len(rows),
            self.engine.residency.arena.writes - writes,
            median(firsts[one][0] - step for one, (step, _, _) in arrived.items()),
            median(firsts[one][1] - at_ms for one, (_, at_ms, _) in arrived.items()),
            gaps[int(0.95 * len(gaps))],
            gaps[-1],
            max(self._others(one, begin) for one, (_, _, begin) in arrived.items()),
        )

    def _others(self, request_id: str, begin: int) -> int:
        own, counts = self._adapters[request_id], defaultdict[str, int](int)
        for _, generated_for in self._generated[begin:]:
            if generated_for == request_id:
                break
            counts[self._adapters[generated_for]] += 1
        return max((number for name, number in counts.items() if name != own), default=0)

    def _compute_nothing(self) -> None:
        batch = self.engine._inference.batch
        assert isinstance(batch, PagedBatch)
        vocabulary = batch._runner.model.vocab_size

        def forward(chunks: list[Any]) -> torch.Tensor:
            sizes = [len(chunk.tokens) for chunk in chunks]
            self._steps.append((sizes.count(1), sum(size for size in sizes if size > 1)))
            return torch.zeros(sum(chunk.logits for chunk in chunks), vocabulary)

        batch._packed.forward = forward
        batch._runner.forward = lambda _, __, run, images=(): run()

    def _generate(self, name: str, length: int) -> str:
        number = next(self._numbers)
        request_id = f"r{number}"
        prompt = tuple(9 + (7 * at + number) % 200 for at in range(length))
        self._payloads[request_id] = (prompt, Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
        self._adapters[request_id] = name
        self._handle(records.GenerationRequested(request_id, name))
        return request_id

    def _stage(self, name: str) -> None:
        request_id = f"r{next(self._numbers)}"
        self._handle(requests.StageAdapter(request_id, name))
        while request_id not in self._replies:
            self._iterate()
            time.sleep(0.0005)

    def _handle(self, message: Any) -> None:
        for action in self._core.handle(message, round(self.now_ms * NS_PER_MS)):
            match action:
                case SendReply(message=reply):
                    assert not isinstance(reply, requests.Refused), reply
                    self._replies[reply.request_id] = reply
                case SendCommand(message=command):
                    at_ms = self.now_ms + ANSWER_MS
                    heapq.heappush(self._arriving, (at_ms, next(self._numbers), command))

    def _iterate(self) -> None:
        """Run an iteration of an engine's process: wait, receive, step, report."""
        if self._slot_changed and self._arriving:
            wait_ms = self._arriving[0][0] - self.now_ms
            self.now_ms += min(max(0.0, wait_ms), ANSWER_WAIT_MS)
        self._receive()
        before = len(self._steps)
        self.engine.step()
        writes = self.engine.residency.arena.writes
        self.now_ms += WRITE_MS * (writes - self._charged_writes)
        self._charged_writes = writes
        if len(self._steps) > before:
            rows, tokens = self._steps[-1]
            self.now_ms += STEP_MS + ROW_MS * rows + PROMPT_TOKEN_MS * tokens
        else:
            self.now_ms += IDLE_MS
        if 0 < self._core.world.timer_ns <= self.now_ms * NS_PER_MS:
            self._handle(records.TimerFired())
        self._report()

    def _receive(self) -> None:
        residency = self.engine.residency
        while self._arriving and self._arriving[0][0] <= self.now_ms:
            command: Any = heapq.heappop(self._arriving)[2]
            if isinstance(command, commands.RequestInventory):
                self._handle(self.engine.inventory())
                continue
            if isinstance(command, commands.StartGeneration):
                prompt, sampling = self._payloads.pop(command.request_id)
                command = structs.replace(command, prompt=prompt, sampling=sampling)
            self.engine.submit(command)
            # A copy ends within the step that it begins with.
            while not all(residency.arena.is_copied(slot) for slot in residency._copies):
                time.sleep(0.0001)

    def _report(self) -> None:
        self._slot_changed = False
        for report in self.engine.poll():
            self._slot_changed |= isinstance(report, reports.SlotReset | reports.SlotWritten)
            if isinstance(report, requests.TokensStreamed):
                entry = (len(self._steps), self.now_ms)
                self._tokens[report.request_id] += [entry] * len(report.tokens)
                self._generated += [(entry[0], report.request_id)] * len(report.tokens)
            else:
                self._handle(report)


def main() -> None:
    """Print the figures of each goal, for as many clients as adapters and twice as many."""
    with tempfile.TemporaryDirectory() as directory:
        write_files(Path(directory))
        for clients in (2 * SLOTS, 4 * SLOTS):
            for goal, tokens in TURNS:
                load = TurnsLoad(Path(directory), 2 * SLOTS, tokens)
                fit, more = (load.run(adapters, clients) for adapters in (SLOTS, 2 * SLOTS))
                load.engine.close()
                kept = more.tokens_per_s / fit.tokens_per_s
                first = more.first_ms / fit.first_ms
                print(f"{clients} clients, {goal}: throughput {kept:.3f}, first token {first:.2f}")
                print(f"  {SLOTS} adapters: {fit}\n  {2 * SLOTS} adapters: {more}")


if __name__ == "__main__":
    main()

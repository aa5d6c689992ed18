"""A scheduler whose adapters take turns in fewer slots, as the controller orders it."""

import sys
from collections import deque
from pathlib import Path
from typing import Any

from loradock.engine.config import EngineConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.messages.prompts import Sampling
from loradock.messages.reports import GenerationEnded, OperationFailed
from loradock.messages.requests import TokensStreamed
from tests.support.engine.generation_bench import NAMES, GenerationBench

SLOTS = 2


class Rotation(GenerationBench):
    """Adapters in turns in `SLOTS` slots; `suspensions`: how often generations lost theirs.

    `patience`: the most calls of `rotate` for which a slot is kept without a new token.
    `turn_tokens`: those of a turn.
    """

    def __init__(self, model: CausalModel, root: Path, config: EngineConfig) -> None:
        super().__init__(model, root, config)
        for slot in range(len(NAMES)):
            self.clear(slot, 1)
        self.suspensions = 0
        self.patience, self.turn_tokens = sys.maxsize, 1
        # Calls of `rotate` since each slot was entered.
        self._ages = [0] * SLOTS
        self._generation = 1
        self._in_slots: list[tuple[int, int]] = [(0, 0)] * SLOTS
        self._waiting: deque[int] = deque()
        self._requests: dict[int, list[tuple[int, Any]]] = {}
        self._started: set[int] = set()

    def want(self, number: int, name: str | None, prompt: Any, sampling: Sampling) -> None:
        """Request a generation, which begins when its adapter is in a slot.

        If it is in one and others wait, it begins in the next turn.
        """
        adapter_id = 0 if name is None else NAMES.index(name) + 1
        self._requests.setdefault(adapter_id, []).append((number, (name, prompt, sampling)))
        if adapter_id == 0:
            self._begin(number, -1, 0, (name, prompt, sampling))
        elif adapter_id not in (*self._waiting, *(one for one, _ in self._in_slots)):
            self._waiting.append(adapter_id)
        self._begin_unless_others_wait()

    def rotate(self) -> None:
        """Give each slot to the next adapter, if the one in it has had its turn."""
        for slot, (adapter_id, generation) in enumerate(self._in_slots):
            self._ages[slot] += 1
            is_over = self._ages[slot] > self.patience
            if not self._waiting or not (
                is_over or self.scheduler.is_turn_over(slot, generation, self.turn_tokens)
            ):
                continue
            if adapter_id:
                before = len(self.scheduler.suspended)
                self.scheduler.leave(slot, generation)
                self.suspensions += len(self.scheduler.suspended) - before
                self.clear(slot, generation)
                if self._unfinished(adapter_id):
                    self._waiting.append(adapter_id)
            self._enter(slot, self._waiting.popleft())
        self._begin_unless_others_wait()

    def _begin_unless_others_wait(self) -> None:
        if not self._waiting:
            for slot in range(SLOTS):
                self._begin_all(slot)

    def _enter(self, slot: int, adapter_id: int) -> None:
        self._generation += 1
        self._ages[slot] = 0
        self.write(slot, adapter_id, self._generation)
        self._in_slots[slot] = (adapter_id, self._generation)
        self._begin_all(slot)

    def _begin_all(self, slot: int) -> None:
        """Begin the requests for the adapter in a slot."""
        adapter_id, generation = self._in_slots[slot]
        for number, request in self._unfinished(adapter_id):
            if number not in self._started:
                self._begin(number, slot, generation, request)

    def _begin(self, number: int, slot: int, generation: int, request: Any) -> None:
        name, prompt, sampling = request
        self._started.add(number)
        place = {"op": number, "request_id": str(number), "slot": slot, "generation": generation}
        self.start(name, prompt, sampling, **place)

    def _unfinished(self, adapter_id: int) -> list[tuple[int, Any]]:
        ends = (GenerationEnded, OperationFailed)
        ended = {report.op for report in self.reports if isinstance(report, ends)}
        return [one for one in self._requests.get(adapter_id, ()) if one[0] not in ended]

    def streams(self, op: int) -> list[Any]:
        """Return everything that was streamed, per output; log-probabilities are rounded."""
        found: dict[int, list[Any]] = {}
        for report in self.reports:
            if isinstance(report, TokensStreamed) and report.request_id == str(op):
                tokens, text, scores, prompt, ends = found.setdefault(
                    report.index, [[], "", [], [], []]
                )
                tokens += report.tokens
                found[report.index][1] = text + report.text
                scores += [(one.token, round(one.logprob, 3)) for one in report.logprobs]
                prompt += [
                    one and (one.token, round(one.logprob, 3)) for one in report.prompt_logprobs
                ]
                ends += [(report.finish_reason, report.stop_reason)] if report.finish_reason else []
        return [found[index] for index in sorted(found)]

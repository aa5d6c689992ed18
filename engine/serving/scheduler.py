"""Continuous batching: requests join and leave the running batch between two forward passes.

A step is one decode step of all running sequences and one chunk of waiting prompts, within a budget
of tokens. Who is next is decided here and in three places below: the queue orders what waits
(`engine/serving/queue.py`), the batch admits from it what fits into its blocks
(`engine/serving/paged_batch.py`), and a sequence that runs is taken out here: if its adapter's slot
is given to another one (`leave`), if another adapter or client waits long (`_preempt_for_others`),
or if memory lacks (`on_preemption`, `on_failure`). Its KV cache is then kept or computed again.

Before every forward pass each sequence's slot and slot version are checked against the arena; a
stale sequence fails alone (L007). Adapters are not scheduled here: a request names its slot.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from loradock.engine.config import EngineConfig
from loradock.engine.errors import NotResident
from loradock.engine.jobs import Jobs
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.serving.forward import ForwardError, KVUse, Waiting
from loradock.engine.serving.generations import Generation, Generations
from loradock.engine.serving.pooling import PoolingScheduler
from loradock.engine.serving.prompts import PromptPrefetcher, PromptReader
from loradock.engine.serving.queue import (
    Owner,
    SlotTable,
    WaitingQueue,
    check_admission,
    other_task,
)
from loradock.engine.serving.sequence import Sequence
from loradock.engine.serving.startup import choose_batch
from loradock.messages.commands import (
    PreemptSlot,
    StartGeneration,
    StartInference,
)
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import OpId, RequestId, Slot
from loradock.messages.reports import Report

PREEMPT_AFTER_STEPS: Final = 32
"""A waiting owner with fewer running sequences than another one waits at most this many steps."""

NEW_OWNER_STEPS: Final = 4
"""The same for a waiting owner with no running sequence."""

RECOVERY_STEPS: Final = 64
"""After a lack of memory, one more sequence runs together after each of these steps."""


class Shares:
    """How many of some sequences are of each adapter, and of each owner."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.owners: Final = Counter(one.owner for one in sequences)
        self.adapters: Final = Counter(one.command.adapter_id for one in sequences)

    def of(self, owner: Owner) -> tuple[int, int]:
        """Return the sequences of an owner's adapter, and its own."""
        return self.adapters[owner[0]], self.owners[owner]

    def exceed(self, owner: Owner, other: Owner) -> bool:
        """Return whether one of an owner's places is due to another owner."""
        if owner[0] != other[0]:
            return self.adapters[owner[0]] > self.adapters[other[0]] + 1
        return self.owners[owner] > self.owners[other] + 1


class GenerationScheduler:
    """The sequences of all generations of an engine: those that wait, and those that run.

    Used by one thread, which calls `step` while not idle. `batch`: the sequences that are computed,
    which report to this class. Reports leave through `emit`; `jobs` processes images and long
    texts, and compiles structures.

    Suspended generations have no slot: they keep their outputs, samplers and, while memory allows,
    their keys and values, until their adapter is in a slot again.
    """

    def __init__(
        self,
        model: CausalModel,
        punica: PunicaWrapper,
        slots: SlotTable,
        config: EngineConfig,
        emit: Callable[[Report], None],
        jobs: Jobs[OpId],
    ) -> None:
        self._slots = slots
        self._config = config
        self._prompts = PromptReader(model)
        self._prefetcher = PromptPrefetcher(jobs)
        self._generations = Generations(model, emit)
        self._waiting: WaitingQueue[Sequence] = WaitingQueue(slots.weight_of)
        # The number of the next waiting sequences that are prefilled one at a time.
        self._prefill_singly = 0
        # Fewer than the configuration allows after a lack of memory.
        self._sequences_max = config.max_num_seqs
        self._steps = 0
        # The number of steps in which sequences waited for the batch or for memory.
        self._full_steps = 0
        self.batch = choose_batch(model, punica, slots, config, self)

    @property
    def is_idle(self) -> bool:
        """True if `step` would do nothing."""
        return not self._waiting and not self.batch.size

    @property
    def is_reading(self) -> bool:
        """True if prompts are being processed on any rank; only `collect` detects the end."""
        return self._prefetcher.is_busy

    @property
    def operations(self) -> list[OpId]:
        """The operations whose generations have not ended."""
        return self._generations.operations

    @property
    def suspended(self) -> list[OpId]:
        """The operations whose generations wait for a slot, in order."""
        return sorted(self._generations.suspended)

    @property
    def running(self) -> list[OpId]:
        """The operations that take part in the next step."""
        return [sequence.command.op for sequence in self.batch.sequences]

    @property
    def kv_use(self) -> KVUse:
        """The memory of keys and values."""
        return self.batch.kv_use

    def start(self, command: StartInference) -> None:
        """Queue a generation; raises `EngineError` if it can't be run."""
        if not isinstance(command, StartGeneration):
            raise other_task("generate", command)
        waiting = self._waiting.clients + self._prefetcher.clients
        waiting_max = self._config.queue_requests_max
        check_admission(command, self._slots, waiting, waiting_max, self._generations)
        preparation = self._prompts.preparation_of(command.prompt, command.sampling)
        if preparation.needs_job:
            self._prefetcher.add(self._generations.add(command), preparation, self._ready)
        else:
            prepared = preparation.prepare()
            sequence = self._generations.add(command)
            self._generations.of(sequence).set_prompt(prepared)
            self._enqueue(sequence)

    def stop(self, target: OpId) -> None:
        """End the generation that operation `target` started; do nothing if it has ended."""
        ended = self._generations.cancel(target)
        self.batch.forget(ended)
        waiting = [one for one in ended if self._waiting.remove(one.owner, one)]
        for sequence in ended:
            if sequence not in waiting:
                self._prefetcher.cancel(sequence)
        if len(waiting) < len(ended):
            self.batch.keep(lambda one: one not in ended)

    def is_turn_over(self, slot: Slot, slot_version: int, tokens: int) -> bool:
        """Return whether a slot can be taken from its generations.

        The oldest has a new token since the slot was written, and one of them has `tokens`; or none
        is left.
        """
        using = self._generations.using(slot, slot_version)
        if not using:
            return True
        return using[0].slice_tokens > 0 and max(one.slice_tokens for one in using) >= tokens

    def leave(self, slot: Slot, slot_version: int) -> None:
        """Let all generations of a slot be suspended once it no longer holds their adapter.

        They leave the batch then, until their adapter is in a slot again. Prompts that are being
        processed continue to be.
        """
        for generation in self._generations.using(slot, slot_version):
            self._generations.suspended[generation.op] = generation

    def resend(self, request_id: RequestId) -> None:
        """Send running or recent outputs again from their first tokens, if they are known."""
        self._generations.resend(request_id)

    def collect(self) -> None:
        """Move sequences whose prompts have been processed to the queue, and follow the slots."""
        self._follow_slots()
        if not len(self._prefetcher):
            return
        for sequence, future in self._prefetcher.collect(self._ready):
            error = future.exception()
            if error is not None:
                self._fail(sequence, error)
            else:
                self._generations.of(sequence).set_prompt(future.result())
                if self._generations.of(sequence).is_computed:
                    self._enqueue(sequence)

    def close(self) -> None:
        """Start no more jobs."""
        self._prefetcher.close()

    def step(self) -> None:
        """Admit waiting sequences, prefill a chunk of prompts, and decode a token per sequence."""
        self._steps += 1
        if self._steps % RECOVERY_STEPS == 0:
            self._sequences_max = min(self._sequences_max + 1, self._config.max_num_seqs)
        self._follow_slots()
        self.batch.keep(self._is_resident)
        self._preempt_for_others()
        single = self._prefill_singly > 0
        waiting = Waiting(self._waiting, self._sequences_max, single, self._is_resident)
        if self.batch.admit(waiting):
            self._prefill_singly = max(0, self._prefill_singly - 1)
        self.batch.budget.begin_step(is_disturbed=self._is_disturbed())
        self.batch.step()
        self.batch.budget.end_step()

    def on_tokens(self, sequences: list[Sequence], tokens: list[int]) -> list[int]:
        """Append a token to each sequence; return the indices of those that continue."""
        if self._waiting:
            for sequence in sequences:
                # The first one is part of the cost of the prompt.
                if sequence.output.tokens:
                    self._waiting.charge(sequence.owner, 1)
        continuing = []
        for index, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if self._generations.append(sequence, token):
                continuing.append(index)
            if sequence.is_active and sequence.command.sampling.n > 1:
                self._enqueue_first(self._generations.of(sequence).others())
        return continuing

    def on_preemption(self, sequences: list[Sequence]) -> None:
        """Let sequences wait again that had to give up their memory or their place."""
        self._enqueue_first(sequences)

    def on_failure(self, sequences: list[Sequence], failure: ForwardError) -> None:
        """Fail the sequences of a forward pass that failed, or prefill them again one at a time.

        One prompt's images may be the cause, which must not affect the other sequences. If memory
        lacks, fewer sequences run together afterwards, and only one alone fails.
        """
        lacks_memory = failure.error.code is ErrorCode.DEVICE_OUT_OF_MEMORY
        if len(sequences) == 1 or not (failure.has_images or lacks_memory):
            for sequence in sequences:
                self._fail(sequence, failure.error)
            return
        if lacks_memory:
            self._sequences_max = max(1, len(sequences) // 2)
        again = [one for one in sequences if one.can_recompute]
        for sequence in sequences:
            if sequence not in again:
                self._fail(sequence, failure.error)
        self._enqueue_first(again)
        self._prefill_singly = len(again)

    def _follow_slots(self) -> None:
        """Suspend and resume generations as their adapters leave slots and enter others."""
        left = []
        for _, generation in sorted(self._generations.suspended.items()):
            place = self._slots.place_of(generation.adapter_id)
            if place is None:
                left.append(generation)
            elif place != generation.place:
                self._resume(generation, *place)
        self._stop_computing(left)

    def _stop_computing(self, generations: list[Generation]) -> None:
        leaving = []
        for generation in generations:
            if generation.is_computed:
                generation.is_computed = False
                leaving += generation.unfinished
        if leaving:
            self.batch.suspend([one for one in leaving if not self._waiting.remove(one.owner, one)])

    def _resume(self, generation: Generation, slot: Slot, slot_version: int) -> None:
        """Continue a generation in a slot, from where it was suspended if it was."""
        del self._generations.suspended[generation.op]
        for sequence in generation.sequences:
            sequence.resume(slot, slot_version)
        if not generation.is_computed:
            generation.is_computed = True
            for sequence in generation.unfinished:
                # A prompt that is being processed is queued when it is collected.
                if sequence.prompt:
                    self._enqueue(sequence)

    @property
    def _ready(self) -> int:
        """The number of waiting sequences with processed images."""
        return sum(sequence.images is not None for sequence in self._waiting)

    def _enqueue(self, sequence: Sequence) -> None:
        command = sequence.command
        self._waiting.append(sequence.owner, sequence, len(sequence.tokens), command.priority)

    def _enqueue_first(self, sequences: list[Sequence]) -> None:
        """Let sequences that were dequeued or preempted wait before the others of their adapter."""
        for sequence in reversed(sequences):
            command, cost = sequence.command, len(sequence.tokens)
            self._waiting.append_first(sequence.owner, sequence, cost, command.priority)

    def _is_resident(self, sequence: Sequence) -> bool:
        """Return whether the adapter is still in its slot; if not, fail the generation.

        A sequence of a generation that has ended is not.
        """
        if not sequence.is_active:
            return False
        try:
            self._slots.check(sequence.command)
        except NotResident as error:
            self._fail(sequence, error)
            return False
        return True

    def _preempt_for_others(self) -> None:
        """Preempt a sequence of the owner with most of them, if another owner waits long.

        Adapters are compared first, and then the clients of one. No sequence of a more urgent
        priority is preempted: it would be the next one again.
        """
        batch = self.batch
        is_full = batch.size >= self._sequences_max or batch.lacks_memory
        self._full_steps = self._full_steps + 1 if self._waiting and is_full else 0
        if self._full_steps < NEW_OWNER_STEPS:
            return
        shares = Shares(batch.sequences)
        for owner in sorted(self._waiting.owners, key=shares.of):
            if shares.owners[owner] and self._full_steps < PREEMPT_AFTER_STEPS:
                return
            chosen = self._preempted_for(owner, shares)
            if chosen is not None:
                self._exchange(chosen, owner)
                return

    def _exchange(self, chosen: Sequence, owner: Owner) -> None:
        """Let a sequence of the batch wait, and make it the turn of an owner."""
        self.batch.keep(lambda one: one is not chosen)
        self.on_preemption([chosen])
        self._waiting.serve_next(owner)
        self._full_steps = 0

    def _preempted_for(self, owner: Owner, shares: "Shares") -> Sequence | None:
        """Return the sequence that is preempted for an owner; None if no other has more of them.

        Of the owner with most, it is one whose prompt is not in the cache yet, the youngest first,
        or the one with the fewest tokens to compute again.
        """
        decoded = {id(one) for one in self.batch.running}
        candidates = [
            one
            for one in self.batch.sequences
            if one.can_resume
            and one.command.priority >= self._waiting.priority
            and shares.exceed(one.owner, owner)
        ]

        def cost(one: Sequence) -> tuple[int, ...]:
            adapter, client = shares.of(one.owner)
            tokens = len(one.tokens) if id(one) in decoded else 0
            return -adapter, -client, tokens, -one.command.op

        return min(candidates, key=cost, default=None)

    def _is_disturbed(self) -> bool:
        """Return whether an owner waits that has no sequence in the batch."""
        if not self._waiting:
            return False
        running = {one.owner for one in self.batch.sequences}
        return not running.issuperset(self._waiting.owners)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        sequences = self._generations.of(sequence).sequences if sequence.is_active else []
        self._generations.fail(sequence, error)
        self.batch.forget(sequences)


Scheduler = GenerationScheduler | PoolingScheduler
"""The requests of an engine's one task, which wait or run; used by one thread."""


def choose_scheduler(
    model: CausalModel | PoolingModel,
    punica: PunicaWrapper,
    slots: SlotTable,
    config: EngineConfig,
    emit: Callable[[Report], None],
    jobs: Jobs[OpId],
) -> Scheduler:
    """Return the scheduler of this model's requests; `jobs` processes prompts with images.

    Raises `ValueError` for an option that this task does not have.
    """
    if isinstance(model, PoolingModel):
        if config.capture_steps:
            raise ValueError(
                f"capture_steps is on, and this model is served to {model.task}, which has no "
                "decode steps: leave it off"
            )
        return PoolingScheduler(model, punica, slots, config, emit)
    return GenerationScheduler(model, punica, slots, config, emit, jobs)


PROMPT_STEPS_MAX: Final = 128
"""A turn has at most this many steps more than tokens: its generations may wait for the batch."""

TURN_S_MAX: Final = 15.0
"""A turn that takes longer than this many seconds after the order is over: steps may be so slow
that its tokens would take longer than the controller allows an operation."""


class SlotTurns:
    """The slots whose adapters are to leave them at the end of their turns.

    The controller orders an adapter to leave as soon as others wait for a slot. When its turn is
    over is decided here, because tokens are counted here: once a generation has the tokens of a
    turn since the slot was written, and the oldest has one. So, regardless of the order of turns,
    each completes something, or a part of a prompt that is kept until the next one.

    A slot whose turn is over is reported as reset at once, and its generations are computed until
    the next adapter is copied (`Residency.vacate_slot`, `GenerationScheduler.leave`): no slot is
    unused while the controller decides and the copy runs. `vacate` executes an order: it reports
    the slot as reset.
    """

    def __init__(self, scheduler: Scheduler, vacate: Callable[[PreemptSlot], None]) -> None:
        self._scheduler = scheduler
        self._vacate = vacate
        # The orders, with the steps since each of them, and the time of the first one.
        self._orders: dict[OpId, PreemptSlot] = {}
        self._steps: dict[OpId, int] = {}
        self._since_s: dict[OpId, float] = {}

    @property
    def operations(self) -> tuple[OpId, ...]:
        """The operations that have not ended."""
        return tuple(self._orders)

    def add(self, order: PreemptSlot) -> None:
        """Let an adapter leave its slot at the end of its turn, which `after_step` finds."""
        self._orders[order.op] = order

    def after_step(self, now_s: float) -> None:
        """Let the adapters leave whose turns are over; `now_s` is equal on all ranks."""
        for order in tuple(self._orders.values()):
            steps = self._steps[order.op] = self._steps.get(order.op, 0) + 1
            since_s = self._since_s.setdefault(order.op, now_s)
            is_late = steps > order.tokens + PROMPT_STEPS_MAX or now_s > since_s + TURN_S_MAX
            place = (order.slot, order.generation)
            if is_late or self._scheduler.is_turn_over(*place, order.tokens):
                del self._orders[order.op], self._steps[order.op], self._since_s[order.op]
                self._scheduler.leave(*place)
                self._vacate(order)

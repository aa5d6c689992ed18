"""The traffic of a log: what arrived, what adapters it named, and how long the engine took.

Arrivals are the requests of clients, at their recorded times. Everything else in the log follows
from the engine and the settings, and is what a simulation derives anew.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from loradock.controller.core.actions import Action, PublishEvent, SendCommand
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.controller.log.format import LogError
from loradock.controller.log.replay import replay
from loradock.lab.outcome import Meter, Outcome
from loradock.lab.service import Line, Service, Step, fit_line, least_squares
from loradock.messages import commands, records, reports
from loradock.messages.errors import ErrorCode
from loradock.messages.events import Published
from loradock.messages.requests import ActivateBatch, LifecycleRequest

_STARTS: Final = (commands.StartGeneration, commands.StartPooling)


class Arrival(Struct, frozen=True):
    """A client's request; `body` is the hash in its record."""

    time_ns: int
    message: records.Input
    body: int = 0


def adapters_of(message: Any) -> tuple[str, ...]:
    """Return the adapters that a request names."""
    if isinstance(message, ActivateBatch):
        return message.adapters
    name = getattr(message, "adapter", None)
    return () if name is None else (name,)


class Facts(Struct, frozen=True):
    """What an engine finds in an adapter's files; with `code`, that they are refused."""

    fingerprint: str = ""
    rank: int = 0
    host_bytes: int = 0
    blob_bytes: int = 0
    code: ErrorCode | None = None


class Work(Struct, frozen=True):
    """The size of an inference; of a pooling, `prompt_tokens` are those of its inputs."""

    prompt_tokens: int = 0
    output_tokens: int = 0


class Traffic(Struct, frozen=True, kw_only=True):
    """All that a simulation needs: of a log, or made otherwise.

    `files` maps adapter paths to facts; `works` has the inferences by request id, and those that
    it lacks are as `usual_work`. `logged` and `events` are of the log's own run, `simplified` says
    what of the log a simulation leaves out.
    """

    limits: Limits
    policy: str
    inventory: reports.EngineInventory
    arrivals: list[Arrival]
    files: dict[str, Facts]
    works: dict[str, Work]
    service: Service
    usual_work: Work = Work()
    logged: Outcome | None = None
    events: list[Published] = []
    simplified: tuple[str, ...] = ()


def read_traffic(log_directory: Path) -> Traffic:
    """Read a whole log; raises `LogError` if its first records or an engine are missing."""
    reader = _Reader()
    result = replay(log_directory, from_start=True, observe=reader.observe)
    if result.controller is None or reader.inventory is None:
        raise LogError("there is no traffic in the log: no engine was attached")
    if result.divergence is not None:
        raise LogError(f"its replay diverges before record {result.divergence.seq}")
    return reader.traffic(result.controller)


class _Running(Struct):
    """A generation that takes part in steps: since when, with the integrals at that time."""

    adapter_id: int
    since: tuple[float, ...]
    active: tuple[float, ...] = (0.0,) * 4


class _Samples(Struct):
    """Durations to fit: by command, (size, nanoseconds); of generations, rows of features."""

    operations: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    generations: list[tuple[tuple[float, ...], float]] = field(default_factory=list)
    poolings: list[tuple[int, int]] = field(default_factory=list)


class _Reader:
    """Collects the traffic of a log from its records and the actions that followed."""

    def __init__(self) -> None:
        self.inventory: reports.EngineInventory | None = None
        self.arrivals: list[Arrival] = []
        self.files: dict[str, Facts] = {}
        self.works: dict[str, Work] = {}
        self.events: list[Published] = []
        self.samples = _Samples()
        self.meter = Meter()
        self._sent: dict[int, tuple[commands.Operation, int]] = {}
        self._paths: dict[int, str] = {}
        self._slots: dict[int, int] = {}
        self._running: dict[int, _Running] = {}
        self._paused: dict[int, _Running] = {}
        self._losses = self._sessions = self._failures = 0
        # Integrals over time of 1, rows, adapters and ranks while any generation runs.
        self._integrals: tuple[float, ...] = (0.0,) * 4
        self._rates = (1.0, 0.0, 0.0, 0.0)
        self._time_ns = 0

    def observe(self, record: records.Record, actions: list[Action]) -> None:
        """Take one record and the actions that it led to."""
        self._advance(record.time_ns)
        self._take_input(record)
        for action in actions:
            if isinstance(action, SendCommand):
                self._take_command(action.message, record.time_ns)
            elif isinstance(action, PublishEvent):
                self.events.append(action.message)

    def traffic(self, controller: Controller) -> Traffic:
        """Return what was collected; `controller` has handled it."""
        assert self.inventory is not None  # noqa: S101 - `read_traffic` refuses such a log
        service = _fitted(self.samples)
        return Traffic(
            limits=controller.limits,
            policy=controller.policy_name,
            inventory=self.inventory,
            arrivals=self.arrivals,
            files=self.files,
            works=self.works,
            service=service,
            usual_work=_usual(self.works.values()),
            logged=self.meter.outcome(controller),
            events=self.events,
            simplified=self._simplified(),
        )

    def _simplified(self) -> tuple[str, ...]:
        found = {
            "losses of the engine": self._losses,
            "later starts of the controller": max(0, self._sessions - 1),
            "failed operations on adapters": self._failures,
        }
        return tuple(f"{count} {what}" for what, count in found.items() if count)

    def _take_input(self, record: records.Record) -> None:
        message: Any = record.input
        if isinstance(message, LifecycleRequest | records.InferenceRequested):
            self.arrivals.append(Arrival(record.time_ns, message, record.body))
            if isinstance(message, records.InferenceRequested):
                self.meter.arrive(message.request_id, message.adapter or "", record.time_ns)
        elif isinstance(message, reports.EngineInventory):
            self.inventory = self.inventory or message
        elif isinstance(message, records.ControllerStarted):
            self._sessions += 1
        elif isinstance(message, records.EngineLost):
            self._losses += 1
            self._sent.clear()
            self._running.clear()
            self._paused.clear()
            self._set_rates()
        elif isinstance(message, reports.OperationReport):
            self._take_report(message, record.time_ns)

    def _take_command(self, command: commands.Command, time_ns: int) -> None:
        if not isinstance(command, commands.Operation):
            return
        self._sent[command.op] = (command, time_ns)
        if isinstance(command, commands.CheckAdapter | commands.LoadWeights):
            self._paths[command.adapter_id] = command.path
        if isinstance(command, _STARTS):
            self.meter.start(command.request_id, time_ns)
        if isinstance(command, commands.StartGeneration):
            self._running[command.op] = _Running(command.adapter_id, self._integrals)
            self._set_rates()

    def _take_report(self, report: Any, time_ns: int) -> None:
        sent = self._sent.pop(report.op, None)
        if sent is None:
            return
        command, sent_ns = sent
        if isinstance(report, reports.OperationFailed):
            self._take_failure(command, report)
            return
        if isinstance(command, _STARTS):
            self._take_end(command, report, sent_ns, time_ns)
            self.meter.end(command.request_id, time_ns, getattr(report, "output_tokens", 0))
            return
        if isinstance(report, reports.AdapterChecked) and isinstance(
            command, commands.CheckAdapter
        ):
            self.files[command.path] = Facts(
                report.fingerprint, report.rank, report.host_bytes, report.blob_bytes
            )
        self._move(command)
        # The end of a turn decides when this ends.
        if not isinstance(command, commands.PreemptSlot):
            size = self._size_of(command)
            found = self.samples.operations.setdefault(type(command).__name__, [])
            found.append((size, time_ns - sent_ns))
            if isinstance(command, commands.LoadWeights):
                self.meter.load_bytes += size

    def _take_failure(self, command: commands.Operation, report: reports.OperationFailed) -> None:
        self._running.pop(command.op, None)
        self._paused.pop(command.op, None)
        self._set_rates()
        if isinstance(command, commands.CheckAdapter):
            self.files.setdefault(command.path, Facts(code=report.code))
        elif not isinstance(command, _STARTS):
            self._failures += 1

    def _take_end(
        self, command: commands.StartInference, report: Any, sent_ns: int, time_ns: int
    ) -> None:
        if isinstance(command, commands.StartPooling):
            self.samples.poolings.append((report.input_tokens, time_ns - sent_ns))
            self.works[command.request_id] = Work(report.input_tokens)
            return
        prompt, output = report.prompt_tokens, report.output_tokens
        self.works[command.request_id] = Work(prompt, output)
        if report.first_token_ns:
            self.meter.begin_tokens(command.request_id, sent_ns + report.first_token_ns)
        running = self._running.pop(command.op, None) or self._paused.pop(command.op, None)
        if running is None:
            return
        active_ns, rows, adapters, ranks = _plus(running, self._integrals)
        self._set_rates()
        if not active_ns or not output:
            return
        taken = {output: active_ns}
        # Of generations alone that are equally long, prompts and steps can't be told apart.
        if report.first_token_ns and not any(running.active):
            taken[1] = report.first_token_ns
        means = [one / active_ns for one in (rows, adapters, ranks)]
        for steps, taken_ns in taken.items():
            features = (1.0, float(prompt), float(steps), *(steps * mean for mean in means))
            self.samples.generations.append((features, taken_ns))

    def _move(self, command: commands.Operation) -> None:
        """Pause and continue the generations of an adapter that leaves or enters a slot."""
        if isinstance(command, commands.WriteSlot):
            self._slots[command.slot] = command.adapter_id
            self._switch(self._paused, self._running, command.adapter_id)
        elif isinstance(command, commands.PreemptSlot):
            self._switch(self._running, self._paused, self._slots.get(command.slot, 0))

    def _switch(
        self, source: dict[int, _Running], target: dict[int, _Running], adapter_id: int
    ) -> None:
        for op in [op for op, one in source.items() if one.adapter_id == adapter_id]:
            running = source.pop(op)
            active = _plus(running, self._integrals) if target is self._paused else running.active
            target[op] = _Running(adapter_id, self._integrals, active)
        self._set_rates()

    def _size_of(self, command: Any) -> int:
        adapter_id = getattr(command, "adapter_id", 0)
        if not adapter_id and isinstance(command, commands.ResetSlot):
            adapter_id = self._slots.get(command.slot, 0)
        facts = self.files.get(self._paths.get(adapter_id, ""), Facts())
        is_file = isinstance(command, commands.CheckAdapter | commands.LoadWeights)
        return facts.host_bytes if is_file else facts.blob_bytes

    def _advance(self, time_ns: int) -> None:
        passed = time_ns - self._time_ns if self._time_ns else 0
        self._time_ns = time_ns
        pairs = zip(self._integrals, self._rates, strict=True)
        self._integrals = tuple([whole + passed * rate for whole, rate in pairs])

    def _set_rates(self) -> None:
        adapters = {one.adapter_id for one in self._running.values()} - {0}
        ranks = sum(self.files.get(self._paths.get(a, ""), Facts()).rank for a in adapters)
        self._rates = (1.0, float(len(self._running)), float(len(adapters)), float(ranks))


def _plus(running: _Running, integrals: tuple[float, ...]) -> tuple[float, ...]:
    """Return what a generation's integrals are, up to now."""
    parts = zip(running.active, integrals, running.since, strict=True)
    return tuple([active + now - since for active, now, since in parts])


def _fitted(samples: _Samples) -> Service:
    operations: dict[str, Line] = {
        name: fit_line(found) for name, found in samples.operations.items()
    }
    step = Step()
    if samples.generations:
        rows, targets = zip(*samples.generations, strict=True)
        step = Step(*least_squares(rows, targets))
    return Service(operations, step, fit_line(samples.poolings))


def _usual(works: Iterable[Work]) -> Work:
    """Return the median of each size."""
    found = list(works)
    if not found:
        return Work()
    middle = len(found) // 2
    return Work(
        sorted(one.prompt_tokens for one in found)[middle],
        sorted(one.output_tokens for one in found)[middle],
    )

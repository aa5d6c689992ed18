"""A rank of an engine in which one collective call fails: `main`, with `FailingRank` as argument.

It is the rank's own process, from its options to its exit status. Only the socket is replaced:
rank 0 has the commands of two generations, and writes what it would send.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from loradock.engine import parallel
from loradock.engine.jobs import InlineJobs
from loradock.engine.models import binding
from loradock.engine.residency.copier import ThreadCopier, ThreadCopy
from loradock.engine.worker import engine as engine_module
from loradock.engine.worker import leader, process
from loradock.engine.worker.leader import Leader
from loradock.messages import commands as cm
from loradock.messages.engine_options import EngineProcess
from loradock.messages.ids import GPU_SLOT
from loradock.messages.prompts import Sampling
from loradock.messages.reports import GenerationEnded, OperationFailed
from loradock.messages.requests import TokensStreamed
from tests.support.engine.engine_bench import EngineBench
from tests.support.parallel.forked_processes import ROOT
from tests.support.waiting import HANG_S

CALLS = ("all_reduce", "all_gather", "broadcast")
NO_CALL = -1
_ENGINE = ROOT / "engine"
_GROUP = _ENGINE / "parallel.py"
PROMPTS = ("parallel ranks>", "ab>")
TOKENS = 6


class FailingRank(Struct, frozen=True):
    """`at`: which of its collective calls fails, from 0. `output`: a file for what it did."""

    at: int
    output: str
    options: EngineProcess


class RankRecord(Struct):
    """`sites`: where each collective call was made. `tokens`: what was sent, by request."""

    sites: list[str] = []
    tokens: dict[str, list[int]] = {}
    ends: list[str] = []


class CollectiveCalls:
    """The collective calls of this process while it serves, of which number `at` fails."""

    def __init__(self, at: int, record: RankRecord) -> None:
        self._at, self._record = at, record
        self.is_serving = False

    def replace(self) -> None:
        for name in CALLS:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if self.is_serving:
                self._record.sites.append(_site(name))
                if len(self._record.sites) - 1 == self._at:
                    raise RuntimeError("this call was made to fail")
            return call(*arguments, **named)

        return counted


def _site(name: str) -> str:
    """Return a call's name and the function of the engine that needed it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ENGINE) and path != _GROUP:
            return f"{name} for {path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return name


class InlineCopier(ThreadCopier):
    """A copier whose copies have ended when `start` returns."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> ThreadCopy:
        copy = super().start(target, source)
        copy.wait()
        return copy


class LeaderBench(EngineBench):
    """Rank 0's engine; everything that it reports is recorded at once."""

    def __init__(self, engine: Leader, record: RankRecord) -> None:
        self.engine, self.record, self.op = engine, record, 0
        self.reports, self.fingerprints = [], {}
        self.woken = torch.multiprocessing.Event()

    def poll(self) -> None:
        for report in self.engine.poll():
            self.reports.append(report)
            if isinstance(report, TokensStreamed):
                self.record.tokens.setdefault(report.request_id, []).extend(report.tokens)
            elif isinstance(report, GenerationEnded | OperationFailed):
                self.record.ends.append(type(report).__name__)

    def serve(self) -> None:
        self.promote(1, "upper", GPU_SLOT)
        ops = [
            self.submit(
                cm.StartGeneration,
                request_id=str(adapter_id),
                adapter_id=adapter_id,
                slot=adapter_id - 1,
                generation=adapter_id,
                prompt=prompt,
                sampling=Sampling(max_tokens=TOKENS, ignore_eos=True),
            )
            for adapter_id, prompt in enumerate(PROMPTS)
        ]
        for op in ops:
            self.wait(op)
        self.engine.close()


def main() -> int:
    given = msgspec.json.decode(sys.argv[1], type=FailingRank)
    record = RankRecord()
    calls = CollectiveCalls(given.at, record)
    calls.replace()
    torch.set_num_threads(1)
    # Jobs and copies end in the step that starts them, so that every run makes the same calls.
    engine_module.ThreadedJobs = lambda *_: InlineJobs()  # type: ignore[assignment, misc]
    binding.copier_for = lambda _: InlineCopier()
    # A rank that only this bound ends counts as one that hangs.
    parallel.TIMEOUT_S = 10 * HANG_S  # type: ignore[misc]

    def serve(engine: Leader, *_: object) -> None:
        calls.is_serving = True
        LeaderBench(engine, record).serve()

    def follow(*arguments: Any) -> None:
        calls.is_serving = True
        leader.follow(*arguments)

    process._serve = serve  # type: ignore[assignment]
    process.follow = follow
    try:
        status = process.run(given.options)
    finally:
        Path(given.output).write_bytes(msgspec.json.encode(record))
    process.end(status)
    return status

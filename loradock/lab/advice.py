"""Advice from a log: the changes that would have gained most, each by a simulation.

Each change is simulated and compared with the simulation of the log as it was, with the same seed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct

from loradock.lab.comparison import COMPARED
from loradock.lab.outcome import Outcome
from loradock.lab.simulator import Changes, simulate
from loradock.lab.traffic import Traffic
from loradock.messages import records

GAIN_MIN: Final = 0.05
"""Smaller gains are not advised: fits of a log are not more exact."""

_ADVICE_MAX: Final = 3
_MEGABYTE: Final = 1e6


class Advice(Struct, frozen=True, kw_only=True):
    """A change with its cost, and what it would have gained.

    `gain` is the part of the 95th percentile of the first token that is saved, or of the load time
    if no request generated tokens.
    """

    kind: str
    changes: Changes
    cost: str
    gain: float
    before: Outcome
    after: Outcome


def advise(
    traffic: Traffic, seed: int = 0, observe: Callable[[int], None] = lambda _: None
) -> list[Advice]:
    """Return up to three changes of different kinds that would have gained, best first.

    `observe` is called with 1 after each of the `simulations` that it makes.
    """
    before = simulate(traffic, seed=seed).outcome
    best: dict[str, Advice] = {}
    for kind, changes, cost in _candidates(traffic):
        observe(1)
        after = simulate(traffic, changes, seed).outcome
        gain = _gain(before, after)
        if gain >= GAIN_MIN and (kind not in best or gain > best[kind].gain):
            best[kind] = Advice(
                kind=kind, changes=changes, cost=cost, gain=gain, before=before, after=after
            )
    observe(1)
    return sorted(best.values(), key=lambda one: -one.gain)[:_ADVICE_MAX]


def simulations(traffic: Traffic) -> int:
    """Return the number of simulations that advice needs."""
    return 1 + sum(1 for _ in _candidates(traffic))


def _gain(before: Outcome, after: Outcome) -> float:
    if after.refused > before.refused:
        return 0.0
    if before.first_token_s.p95:
        return 1 - after.first_token_s.p95 / before.first_token_s.p95
    return 1 - after.load_s / before.load_s if before.load_s else 0.0


def _candidates(traffic: Traffic) -> Iterator[tuple[str, Changes, str]]:
    """Yield kinds, changes and costs."""
    limits = traffic.limits
    largest = max((facts.blob_bytes for facts in traffic.files.values()), default=0)
    for policy in COMPARED:
        if policy != traffic.policy:
            yield "policy", Changes(policy=policy), "nothing; `loradock config set` changes it"
    slots = 2 * limits.max_loras
    device_bytes = max(limits.device_bytes_max, slots * largest)
    more = device_bytes - limits.device_bytes_max
    grown = {
        "max_loras": slots,
        "max_cpu_loras": max(limits.max_cpu_loras, slots),
        "device_bytes_max": device_bytes,
        "pinned_bytes_max": max(limits.pinned_bytes_max, device_bytes),
    }
    yield "slots", Changes(limits=grown), f"{_megabytes(more)} of device memory, and a restart"
    host = {
        "max_cpu_loras": 2 * limits.max_cpu_loras,
        "host_bytes_max": 2 * limits.host_bytes_max,
        "pinned_bytes_max": 2 * limits.pinned_bytes_max,
    }
    bytes_more = limits.host_bytes_max + limits.pinned_bytes_max
    yield "bytes", Changes(limits=host), f"up to {_megabytes(bytes_more)} of host memory"
    if held := _popular(traffic, limits.max_loras // 4):
        cost = f"{len(held)} of {limits.max_loras} slots, which others cannot use"
        yield "holds", Changes(holds=held), cost
    restart = "nothing; a restart with --prefetch-history"
    yield "prefetch", Changes(prefetch="history"), restart
    yield "replicas", Changes(arrivals=0.5), "a second server, which takes half of the requests"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / _MEGABYTE:,.0f} MB"


def _popular(traffic: Traffic, count: int) -> tuple[str, ...]:
    """Return the adapters with the most inferences whose paths the log has."""
    paths = {
        getattr(one.message, "adapter", "")
        for one in traffic.arrivals
        if getattr(one.message, "path", "")
    }
    uses = Counter(
        one.message.adapter
        for one in traffic.arrivals
        if isinstance(one.message, records.InferenceRequested) and one.message.adapter in paths
    )
    return tuple(name for name, _ in uses.most_common(count) if name)

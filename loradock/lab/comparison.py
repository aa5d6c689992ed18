"""Comparisons of policies on workloads: loads and load time, and waits of a simulated server."""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from msgspec import Struct

from loradock.controller.core.eviction import POLICIES, ranking_of
from loradock.controller.core.rankings import Cache, Lru, Ranking
from loradock.lab.bounds import Bound, offline_bound
from loradock.lab.outcome import Outcome
from loradock.lab.simulator import Changes, simulate
from loradock.lab.workloads import Workload

COMPARED: Final = ("fifo", "lru", "sieve", "gdsf", "adaptive")
"""The policies that a comparison has unless others are named."""


class Row(Struct, frozen=True, kw_only=True):
    """One policy on one workload, with `memory_share` of the bytes of all adapters.

    `loads` and `load_s` are of a memory that serves one request after the other, in the order of
    arrival: what the bound is a bound of. `of_lru` is the load time relative to LRU's; `gap_closed`
    is the part of the way from LRU to the bound, None if LRU is at the bound. `served` is the
    outcome of a simulated server, None unless it was asked for.
    """

    workload: str
    policy: str
    memory_share: float
    requests: int
    loads: int
    load_s: float
    of_lru: float
    gap_closed: float | None
    bound_s: float
    bound: str
    served: Outcome | None = None


def compare(
    workload: Workload,
    policies: Iterable[str] = COMPARED,
    memory_share: float = 0.1,
    *,
    serve: bool = False,
) -> Iterator[Row]:
    """Yield a row per policy; raises `ValueError` for a policy that has no order of its own."""
    capacity_bytes = workload.capacity_bytes(memory_share)
    bound = offline_bound(workload, capacity_bytes)
    base = run_cache(workload, Lru(), capacity_bytes)
    for policy in policies:
        cache = run_cache(workload, ranking_named(policy)(), capacity_bytes)
        row = _row(workload, policy, (cache, base), bound)
        row = msgspec.structs.replace(row, memory_share=memory_share)
        if serve:
            run = simulate(workload.traffic(memory_share), Changes(policy=policy))
            row = msgspec.structs.replace(row, served=run.outcome)
        yield row


def ranking_named(policy: str) -> type[Ranking]:
    """Return the ranking of a policy; raises `ValueError`."""
    kind = Lru if policy == "lru" else ranking_of(POLICIES[policy])
    if kind is None:
        raise ValueError(f"policy {policy} can't be compared: it is no ranking")
    return kind


def run_cache(workload: Workload, ranking: Ranking, capacity_bytes: int) -> Cache:
    """Return a memory after all requests of a workload, which it served in their order."""
    count = len(workload.ranks)
    cache = Cache(ranking, count, capacity_bytes)
    for request in workload.requests:
        # 0 is the base model's id.
        one = request.adapter
        cache.access(1 + one, workload.size_bytes(one), workload.load_ns(one))
    return cache


def _row(workload: Workload, policy: str, caches: tuple[Cache, Cache], bound: Bound) -> Row:
    cache, base = caches
    gap_ns = base.cost_ns - bound.load_ns
    return Row(
        workload=workload.name,
        policy=policy,
        memory_share=0.0,
        requests=len(workload.requests),
        loads=cache.loads,
        load_s=cache.cost_ns / 1e9,
        of_lru=cache.cost_ns / base.cost_ns,
        # HiGHS is exact to about nine digits.
        gap_closed=(base.cost_ns - cache.cost_ns) / gap_ns
        if gap_ns > 1e-6 * base.cost_ns
        else None,
        bound_s=bound.load_ns / 1e9,
        bound=bound.kind,
    )

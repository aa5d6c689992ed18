"""Policies against other implementations and against bounds that no policy can be below."""

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from loradock.controller.core.rankings import Adaptive, Fifo, Gdsf, Lru, Ranking, Sieve
from loradock.lab.bounds import foo_ns, offline_bound, pfoo_ns
from loradock.lab.comparison import compare, ranking_named, run_cache
from loradock.lab.traces import TraceError, read_trace, shipped_trace
from loradock.lab.traffic import Work
from loradock.lab.workloads import GENERATED, NAMES, Request, Workload, from_trace, make_workload
from tests.support.simulation.command_runs import run

ADAPTERS = 60


def workload(adapters: Sequence[int], ranks: Sequence[int] = (8,) * ADAPTERS) -> Workload:
    """Return a workload of the given adapters, one request after the other."""
    found = [Request(float(n), one, Work(1, 1)) for n, one in enumerate(adapters)]
    return Workload("given", tuple(ranks), found)


def drawn(seed: int, count: int) -> list[int]:
    """Return requests that mix popularity, drift and scans."""
    rng = random.Random(seed)
    weights = [1 / (1 + n) ** rng.uniform(0.6, 1.2) for n in range(ADAPTERS)]
    popular = rng.choices(range(ADAPTERS), weights, k=count)
    return [(n // 3 if n % 7 == 0 else one + n // 900) % ADAPTERS for n, one in enumerate(popular)]


@pytest.mark.parametrize(("name", "kind"), [("LRU", Lru), ("FIFO", Fifo), ("Sieve", Sieve)])
def test_loads_are_exactly_those_of_libcachesim(name: str, kind: type[Ranking]) -> None:
    libcachesim = pytest.importorskip("libcachesim")
    for seed in range(10):
        made, places = workload(drawn(seed, 10_000)), 4 + 3 * seed
        capacity = places * made.size_bytes(0)
        cache = getattr(libcachesim, name)(cache_size=places)
        request = libcachesim.Request()
        request.obj_size = 1
        misses = 0
        for one in made.requests:
            request.obj_id = one.adapter
            misses += not cache.get(request)
        assert run_cache(made, kind(), capacity).loads == misses, f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_is_below_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choices((8, 16, 32, 64, 128), k=ADAPTERS)
    made = workload(drawn(seed, 1_000), ranks)
    capacity = made.capacity_bytes(0.15)
    pytest.importorskip("scipy")
    found = foo_ns(made, capacity)
    assert pfoo_ns(made, capacity) <= found
    assert offline_bound(made, capacity) == (found, "FOO")
    for kind in (Lru, Fifo, Sieve, Gdsf, Adaptive):
        assert run_cache(made, kind(), capacity).cost_ns >= found


def best_possible_ns(made: Workload, capacity: int) -> int:
    """Return the least load time of all sequences of decisions, by trying all."""
    states = {frozenset[int](): 0}
    for request in made.requests:
        after: dict[frozenset[int], int] = {}
        for kept, cost_ns in states.items():
            one = request.adapter
            taken_ns = cost_ns + (0 if one in kept else made.load_ns(one))
            others = sorted(kept - {one})
            for choice in product((False, True), repeat=len(others)):
                held = frozenset(
                    [one, *(o for o, keep in zip(others, choice, strict=True) if keep)]
                )
                if sum(map(made.size_bytes, held)) <= capacity:
                    after[held] = min(taken_ns, after.get(held, taken_ns))
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_at_most_the_best_possible_and_exact_for_equal_sizes(seed: int) -> None:
    pytest.importorskip("scipy")
    rng = random.Random(seed)
    adapters = rng.choices(range(6), k=24)
    mixed = workload(adapters, rng.choices((8, 16, 32), k=6))
    capacity = 56 * mixed.size_bytes(0) // mixed.ranks[0]
    best_ns = best_possible_ns(mixed, capacity)
    assert pfoo_ns(mixed, capacity) <= foo_ns(mixed, capacity) <= best_ns + 10
    equal = workload(adapters, (8,) * 6)
    capacity = 3 * equal.size_bytes(0)
    assert foo_ns(equal, capacity) == pytest.approx(best_possible_ns(equal, capacity), abs=10)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_a_function_of_its_seed(name: str) -> None:
    made = make_workload(name, 50, 700, seed=3)
    assert made == make_workload(name, 50, 700, seed=3)
    assert made.requests != make_workload(name, 50, 700, seed=4).requests
    times = [one.time_s for one in made.requests]
    assert len(times) == 700
    assert times == sorted(times)
    assert {one.adapter for one in made.requests} <= set(range(50))


def test_workloads_differ_as_their_rules_say() -> None:
    def popular(made: Workload, part: slice) -> set[int]:
        uses = [one.adapter for one in made.requests[part]]
        return set(sorted(set(uses), key=lambda one: -uses.count(one))[:5])

    early, late = slice(0, 2_000), slice(-2_000, None)
    made = {name: make_workload(name, 100, 10_000) for name in GENERATED}
    assert len(popular(made["zipf"], early) & popular(made["zipf"], late)) >= 4
    assert not popular(made["drift"], early) & popular(made["drift"], late)
    scanned = [one.adapter for one in made["scan"].requests[::3]][:100]
    assert len(set(scanned)) == 100
    crowd = [one.adapter for one in made["flash"].requests[1000:1300]]
    assert max(crowd.count(one) for one in set(crowd)) > 120


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 19:09:12.9540000,200,3\n"
    "2023-11-16 19:09:13.4541000,900,4\n"
    "2023-11-16 19:09:14.0000000,201,5\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,Conversation log\n"
    "118.5,GPT-4,417,276,693,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1158, "output_length": 191, "hash_ids": [0, 7, 8]}\n'
    '{"timestamp": 6000, "input_length": 900, "output_length": 42, "hash_ids": [0]}\n'
    '{"timestamp": 9000, "input_length": 1400, "output_length": 9, "hash_ids": [0, 7, 8, 9]}\n'
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", AZURE, [(0, 200, 3), (0.5001, 900, 4), (1.046, 201, 5)]),
        ("b.csv", BURSTGPT, [(0, 472, 18), (113.5, 417, 276)]),
        ("m.jsonl", MOONCAKE, [(0, 1158, 191), (3, 900, 42), (6, 1400, 9)]),
    ],
)
def test_published_formats_are_read(
    tmp_path: Path, name: str, text: str, expected: list[tuple[float, int, int]]
) -> None:
    (tmp_path / name).write_text(text)
    traced = read_trace(tmp_path / name, 100, 0)
    assert [(one.time_s, one.prompt_tokens, one.output_tokens) for one in traced] == expected
    made = from_trace(name, traced, 1000, 2 * len(traced))
    assert len(made.requests) == 2 * len(traced)
    adapters = [one.adapter for one in made.requests]
    if name != "b.csv":
        # The third request continues the session of the first, the second is another one.
        assert adapters[0] == adapters[2] != adapters[1]
        # Sessions of a repetition are others.
        assert adapters[:3] != adapters[3:]


def test_servegens_clients_are_adapters(tmp_path: Path) -> None:
    for client, rate in ((3, 2.0), (20, 0.5)):
        lines = [f"0,{rate},1.0,Gamma,1.0,{1 / rate}", "600,0,0,,0,0"]
        lines += [f"1200,{rate},1.2,Weibull,0.9,{1 / rate}"]
        (tmp_path / f"chunk-{client}-trace.csv").write_text("\n".join(lines) + "\n")
    traced = read_trace(tmp_path, 10_000, 0)
    made = from_trace("servegen", traced, 200, len(traced))
    uses = [one.adapter for one in made.requests]
    assert len(made.ranks) == 2
    assert 3 < max(map(uses.count, (0, 1))) / min(map(uses.count, (0, 1))) < 5
    assert not [one for one in traced if 610 < one.time_s < 1190]


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", AZURE + "yesterday,1,1\n", AZURE + "2023-11-16 19:09:13.0,1,1\n"]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(TraceError, match=r"x\.csv"):
        read_trace(tmp_path / "x.csv", 10, 0)


def test_shipped_excerpts_are_whole() -> None:
    assert [len(shipped_trace(name)) for name in ("azure-code", "azure-conversation")] == [157, 158]


def test_a_simulated_server_loads_at_most_as_often_as_a_memory() -> None:
    made = make_workload("zipf", 40, 400)
    for row in compare(made, ("lru", "sieve"), 0.2, serve=True):
        assert row.served is not None
        assert (row.served.served, row.served.refused) == (400, 0)
        # Each adapter is loaded once before the requests. Requests that wait for a load share it,
        # and what is read and not staged yet is kept besides.
        assert 40 < row.served.loads <= 40 + row.loads
    with pytest.raises(ValueError, match="none can't be compared"):
        ranking_named("none")


def test_the_command_compares_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    few = ("--adapters", "30", "--requests", "300", "--policies", "lru,sieve")
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    plot = tmp_path / "lab.svg"
    person = run("lab", "zipf", str(tmp_path / "m.jsonl"), *few, "-o", str(plot))
    assert person.exit_code == 0, person.stderr
    assert "sieve" in person.stdout
    assert plot.read_text().count("<svg") == 1
    rows = json.loads(run("lab", "drift", *few, "--json").stdout)
    assert [(row["policy"], row["workload"]) for row in rows] == [
        ("lru", "drift"),
        ("sieve", "drift"),
    ]
    for wrong in (("nothing",), ("zipf", "--policies", "none"), ("zipf", "-o", "a.png")):
        assert run("lab", *wrong).exit_code == 2

"""What a simulation of a traffic promises: its own log to the digest, and plain caches exactly."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loradock.cli.exit_codes import CommandError
from loradock.cli.what_if import parse_what_if
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits, LimitsError
from loradock.controller.core.rankings import Adaptive, Cache, Fifo, Lru, Ranking, Sieve
from loradock.controller.log.format import LogError
from loradock.controller.log.replay import replay
from loradock.lab.outcome import jain, percentiles
from loradock.lab.service import Line, Service, Step, fit_line, least_squares
from loradock.lab.simulator import BELADY, Changes, simulate, what_if
from loradock.lab.traffic import Arrival, Facts, Traffic, Work, _Reader, read_traffic
from loradock.messages import records, reports, requests
from tests.support.simulation.command_runs import run
from tests.support.simulation.logged_histories import write_history

ADAPTERS, PLACES, SIZE = 20, 6, 1000
SECOND = 1_000_000_000
INSTANT = Service()
SLOW = Service(
    {"LoadWeights": Line(30e6, 50.0), "WriteSlot": Line(5e6), "ResetSlot": Line(1e6)},
    Step(1e6, 1e4, 5e6, 1e6, 1e6, 1e3),
)


def traffic(requests_count: int, service: Service = INSTANT, seed: int = 1) -> Traffic:
    """Return a traffic of popular and rare adapters, which are known from the start."""
    generator = random.Random(seed)
    arrivals = [
        Arrival(1 + n, requests.LoadAdapter(f"l{n}", f"a{n}", f"at/{n}")) for n in range(ADAPTERS)
    ]
    arrivals.append(Arrival(ADAPTERS + 1, requests.PrefetchAdapter("p", "a3", "", "pinned")))
    names = generator.choices(
        range(ADAPTERS), [1 / (1 + n) for n in range(ADAPTERS)], k=requests_count
    )
    for number, name in enumerate(names, 1):
        message = records.GenerationRequested(f"r{number}", f"a{name}")
        arrivals.append(Arrival(SECOND + number * SECOND // 20, message))
    limits = Limits(max_loras=PLACES, max_cpu_loras=PLACES)
    return Traffic(
        limits=limits,
        policy="lru",
        inventory=reports.EngineInventory("e", 1, "m", PLACES, limits.device_bytes_max),
        arrivals=arrivals,
        files={f"at/{n}": Facts(f"content {n}", 8, SIZE, SIZE) for n in range(ADAPTERS)},
        works={f"r{n}": Work(10, 1 + n % 40) for n in range(1, requests_count + 1)},
        service=service,
    )


@pytest.mark.parametrize(
    ("policy", "kind"), [("lru", Lru), ("fifo", Fifo), ("sieve", Sieve), ("adaptive", Adaptive)]
)
@pytest.mark.parametrize("seed", range(3))
def test_without_service_times_loads_are_those_of_a_plain_cache(
    policy: str, kind: type[Ranking], seed: int
) -> None:
    made = traffic(1500, seed=seed)
    cache = Cache(kind(), PLACES, 1 << 40)
    arrivals = []
    for one in made.arrivals:
        if isinstance(one.message, records.GenerationRequested):
            name = int(str(one.message.adapter)[1:])
            cache.access(name + 1, SIZE, 1)
            use = requests.ActivateAdapter(one.message.request_id, f"a{name}", f"at/{name}")
            arrivals.append(Arrival(one.time_ns, use))
    plain = msgspec.structs.replace(made, arrivals=arrivals, policy=policy)
    assert simulate(plain).outcome.loads == cache.loads


@pytest.mark.parametrize("turns", [0, 8])
@pytest.mark.parametrize("policy", ["lru", "fifo", "sieve", "gdsf", "adaptive", BELADY])
def test_every_request_is_served_and_a_seed_is_one_run(policy: str, turns: int) -> None:
    made = traffic(300, SLOW)
    changes = Changes(policy=policy, limits={"turn_tokens": turns, "max_loras": 2})
    first, again = (simulate(made, changes, seed=3) for _ in range(2))
    outcome = first.outcome
    assert (outcome.served, outcome.refused) == (300, 0)
    assert outcome.output_tokens == sum(work.output_tokens for work in made.works.values())
    assert (again.outcome, again.events) == (first.outcome, first.events)
    assert outcome.wait_s.p50 <= outcome.wait_s.p95 <= outcome.wait_s.p99


def test_more_slots_faster_storage_and_fewer_requests_make_it_better() -> None:
    made = traffic(400, SLOW)
    base = simulate(made).outcome
    ample = {"max_loras": ADAPTERS, "max_cpu_loras": ADAPTERS}
    assert simulate(made, Changes(limits=ample)).outcome.loads == ADAPTERS < base.loads
    assert base.prefetches == 1
    assert simulate(made, Changes(storage=4.0)).outcome.load_s < base.load_s / 2
    assert simulate(made, Changes(policy=BELADY)).outcome.loads < base.loads
    assert simulate(made, Changes(arrivals=0.5)).outcome.duration_s > 1.9 * base.duration_s
    assert simulate(made, Changes(prefetch="none")).outcome.prefetches == 0
    held = simulate(made, Changes(holds=("a7",))).events
    assert any(type(one.event).__name__ == "AdapterHeld" for one in held)


def test_changes_that_contradict_or_name_nothing_are_refused() -> None:
    made = traffic(3)
    with pytest.raises(LimitsError, match="at least max-loras"):
        simulate(made, Changes(limits={"max_cpu_loras": 1}))
    with pytest.raises(ValueError, match="'b' is not in the log"):
        simulate(made, Changes(holds=("b",)))
    assert parse_what_if("policy=gdsf,max-loras=4,host-bytes=2GiB,holds=a+b,storage=2") == Changes(
        policy="gdsf",
        limits={"max_loras": 4, "host_bytes_max": 2 << 30},
        holds=("a", "b"),
        storage=2.0,
    )
    for prefetch in ("as-logged", "none", "history"):
        assert parse_what_if(f"prefetch={prefetch}").prefetch == prefetch
    names = ("max-loras", "max_loras")
    assert [parse_what_if(f"{name}=4").limits for name in names] == 2 * [{"max_loras": 4}]
    for text in ("max-loras", "max-loras=x", "slots=3", "prefetch=yes", "storage=0"):
        with pytest.raises(CommandError, match="--what-if"):
            parse_what_if(text)


@pytest.mark.parametrize("seed", [3, 9, 14])
def test_a_log_without_changes_has_its_own_digest_and_loads(tmp_path: Path, seed: int) -> None:
    write_history(tmp_path / "log", seed)
    own = replay(tmp_path / "log")
    assert own.controller is not None
    read = read_traffic(tmp_path / "log")
    for changes in (Changes(), Changes(policy="lru", limits={"max_loras": read.limits.max_loras})):
        found = what_if(read, changes).outcome
        assert (found.digest, found.loads) == (own.digest, own.controller.world.totals.loads)
    assert what_if(read, Changes(policy="sieve")).outcome.policy == "sieve"


def test_the_times_of_prompts_and_of_steps_are_told_apart_although_all_are_equally_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = msgspec.structs.replace(traffic(400, SLOW), works={}, usual_work=Work(100, 24))
    reader, handle = _Reader(), Controller.handle
    reader.files.update(made.files)
    controllers = []

    def observed(controller: Controller, message: Any, now_ns: int, body: int = 0) -> Any:
        controllers.append(controller)
        actions = handle(controller, message, now_ns, body)
        reader.observe(records.Record(now_ns, message, body=body), actions)
        return actions

    monkeypatch.setattr(Controller, "handle", observed)
    run = simulate(made).outcome
    read = reader.traffic(controllers[-1])
    assert read.logged is not None
    assert read.logged.first_token_s == run.first_token_s
    found = read.service.step
    assert found.prompt_ns(100) == pytest.approx(SLOW.step.prompt_ns(100), rel=0.1)
    assert found.step_ns(4, 4, 32) == pytest.approx(SLOW.step.step_ns(4, 4, 32), rel=0.1)


def test_the_command_shows_both_runs_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write_history(tmp_path / "log", 3)
    what = ("replay", "--what-if", "policy=fifo")
    person = run(*what, "-o", str(tmp_path / "both.html"), directory=tmp_path)
    assert person.exit_code == 0, person.stderr
    assert "as logged" in person.stdout
    assert "what if" in person.stdout
    assert "…" not in person.stdout
    assert max(map(len, person.stdout.splitlines())) <= 80
    assert (tmp_path / "both.html").read_text().count("<iframe") == 2
    document = json.loads(run(*what, "--json", directory=tmp_path).stdout)
    assert document["what_if"]["policy"] == "fifo"
    assert {*document} == {"logged", "simulated", "what_if", "left_out"}
    for wrong in ("policy=missing", "max-cpu-loras=1,max-loras=9"):
        assert run("replay", "--what-if", wrong, directory=tmp_path).exit_code == 2
    assert run(*what, "-o", str(tmp_path / "both.png"), directory=tmp_path).exit_code == 2


def test_a_log_without_an_engine_has_no_traffic(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(LogError, match="no engine"):
        read_traffic(tmp_path / "log")


def test_fits_find_the_line_and_no_negative_time() -> None:
    generator = random.Random(4)
    sizes = [generator.randrange(1, 10_000) for _ in range(200)]
    line = fit_line([(size, 5_000 + 3 * size) for size in sizes])
    assert (round(line.fixed_ns), round(line.per_unit_ns, 3)) == (5_000, 3)
    assert abs(line.draw(5_000, generator) - 20_000) < 10
    rows = [(1.0, float(n), float(generator.randrange(50))) for n in range(100)]
    found = least_squares(rows, [7 + 2 * row[1] - 3 * row[2] + 200 for row in rows])
    assert found[2] == 0
    assert min(found) >= 0
    assert least_squares([(1.0,)], [-5.0]) == [0.0]
    assert fit_line([]).draw(5, generator) == 0


def test_percentiles_and_fairness() -> None:
    assert percentiles([SECOND * n for n in range(1, 101)]).p50 == 51
    assert percentiles([]).p99 == 0
    assert (jain([2, 2]), jain([1, 0, 0, 0]), jain([])) == (1, 0.25, 1)

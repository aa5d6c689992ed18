"""Every command in every state, and random commands: failures change nothing."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import torch

from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import CPU_CACHED, GPU_SLOT, PINNED
from tests.support.engine.engine_bench import EngineBench, failure
from tests.support.engine.engine_examples import ADAPTERS

pytest_plugins = ("tests.support.engine.engine_fixtures",)

NAMES = tuple(ADAPTERS)


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench]) -> EngineBench:
    return make_engine()


STATES = ("unknown", CPU_CACHED, PINNED, GPU_SLOT)
COMMANDS = {
    cm.LoadWeights: {"adapter_id": 1, "adapter": "mlp", "path": ""},
    cm.StageWeights: {"adapter_id": 1},
    cm.UnstageWeights: {"adapter_id": 1},
    cm.WriteSlot: {"adapter_id": 1, "slot": 2, "generation": 5},
    cm.ResetSlot: {"slot": 0, "generation": 1},
    cm.DropWeights: {"adapter_id": 1},
}
ALLOWED = {
    ("unknown", cm.LoadWeights),
    (CPU_CACHED, cm.StageWeights),
    (CPU_CACHED, cm.DropWeights),
    (PINNED, cm.UnstageWeights),
    (PINNED, cm.WriteSlot),
    (PINNED, cm.DropWeights),
    (GPU_SLOT, cm.ResetSlot),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", COMMANDS)
def test_every_command_in_every_state(bench: EngineBench, state: str, kind: type) -> None:
    fields = dict(COMMANDS[kind])
    if kind is cm.LoadWeights:
        fields["fingerprint"] = bench.fingerprint("mlp")
    if state != "unknown":
        bench.promote(1, "mlp", state)
    before = bench.state()
    report = bench.do(kind, **fields)
    if (state, kind) in ALLOWED:
        assert not isinstance(report, rp.OperationFailed)
        assert bench.state() != before
        return
    if kind is cm.ResetSlot:
        failure(report, ErrorCode.NOT_RESIDENT)
    elif state == "unknown":
        failure(report, ErrorCode.UNKNOWN_ADAPTER, "1", "load")
    else:
        failure(report, ErrorCode.CONFLICT)
    assert bench.state() == before


WEIGHTS = {
    cm.LoadWeights: 3,
    cm.StageWeights: 4,
    cm.UnstageWeights: 1,
    cm.DropWeights: 1,
    cm.WriteSlot: 6,
    cm.ResetSlot: 3,
}
"""How often each command is drawn, so that each also succeeds."""


def random_command(
    random: Random, bench: EngineBench, generations: Counter[int]
) -> tuple[type, dict]:
    """Return a command on any of three adapters and two slots, allowed or not."""
    (kind,) = random.choices(list(WEIGHTS), list(WEIGHTS.values()))
    fields: dict[str, object] = {}
    if kind is not cm.ResetSlot:
        fields["adapter_id"] = random.randint(1, 3)
    if kind is cm.LoadWeights:
        name = random.choice(NAMES)
        fingerprint = "other" if random.random() < 0.1 else bench.fingerprint(name)
        fields |= {"adapter": name, "path": "", "fingerprint": fingerprint}
    slot = random.randrange(2)
    if kind is cm.WriteSlot:
        generations[slot] += random.random() < 0.9
        fields |= {"slot": slot, "generation": generations[slot]}
    if kind is cm.ResetSlot:
        here = [found.generation for found in bench.adapters().values() if found.slot == slot]
        fields = {"slot": slot, "generation": random.choice([*here, *here, generations[slot]])}
    return kind, fields


def test_random_commands_get_one_report_each_and_failures_change_nothing(
    bench: EngineBench,
) -> None:
    seed = torch.seed() % 2**32
    print(f"seed {seed}")
    random = Random(seed)
    generations, outcomes = Counter[int](), Counter[str]()
    # Some seeds draw the rarest success late.
    while outcomes.total() < 300 or (len(outcomes) < 7 and outcomes.total() < 5000):
        kind, fields = random_command(random, bench, generations)
        before = bench.state()
        report = bench.do(kind, **fields)
        outcomes[type(report).__name__] += 1
        assert (bench.state() == before) == isinstance(report, rp.OperationFailed)
        slots = [found.slot for found in bench.adapters().values() if found.slot >= 0]
        assert len(slots) == len(set(slots))
        bench.engine.residency.arena.check()
    assert len(outcomes) == 7, outcomes
    bench.poll()
    assert Counter(r.op for r in bench.reports) == Counter(range(1, bench.op + 1))

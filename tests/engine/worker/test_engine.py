"""The engine's commands: every operation ends in one report, and a failed one changes nothing."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from peft import PeftModel

from loradock.engine.models.causal_model import CausalModel
from loradock.engine.residency.residency import ResidencyCommand
from loradock.engine.worker.engine import EngineCommand
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import CPU_CACHED, GPU_SLOT, PINNED
from loradock.messages.prompts import Sampling
from tests.support.engine.engine_bench import PROMPT, EngineBench, failure
from tests.support.engine.engine_examples import ADAPTERS

pytest_plugins = ("tests.support.engine.engine_fixtures",)

NAMES = tuple(ADAPTERS)


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench]) -> EngineBench:
    return make_engine()


def test_each_step_of_a_life_cycle_has_one_report_and_shows_in_the_inventory(
    bench: EngineBench,
) -> None:
    fingerprint = bench.fingerprint("attention")
    checked = bench.reports[-1]
    assert isinstance(checked, rp.AdapterChecked)
    assert checked.rank == 4
    assert bench.adapters() == {}
    source = {"adapter": "attention", "path": "", "fingerprint": fingerprint}
    slot = {"slot": 3, "generation": 7}
    steps = [
        (cm.LoadWeights, {"adapter_id": 5, **source}, rp.WeightsLoaded, CPU_CACHED),
        (cm.StageWeights, {"adapter_id": 5}, rp.WeightsStaged, PINNED),
        (cm.WriteSlot, {"adapter_id": 5, **slot}, rp.SlotWritten, GPU_SLOT),
        (cm.ResetSlot, slot, rp.SlotReset, PINNED),
        (cm.UnstageWeights, {"adapter_id": 5}, rp.WeightsUnstaged, CPU_CACHED),
        (cm.StageWeights, {"adapter_id": 5}, rp.WeightsStaged, PINNED),
        (cm.WriteSlot, {"adapter_id": 5, "slot": 3, "generation": 9}, rp.SlotWritten, GPU_SLOT),
        (cm.ResetSlot, {"slot": 3, "generation": 9}, rp.SlotReset, PINNED),
        (cm.DropWeights, {"adapter_id": 5}, rp.WeightsDropped, None),
    ]
    for kind, fields, report, state in steps:
        assert type(bench.do(kind, **fields)) is report
        adapters = bench.adapters()
        if state is None:
            assert adapters == {}
            continue
        where = (fields["slot"], fields["generation"]) if state == GPU_SLOT else (-1, 0)
        assert adapters[5] == rp.InventoryAdapter(
            *(5, "attention", "", fingerprint, 4, state, *where),
            *(checked.host_bytes, checked.blob_bytes),
        )
    assert Counter(report.op for report in bench.reports) == Counter(range(1, bench.op + 1))
    assert bench.engine.inventory().running == ()


def test_generations_are_pefts_through_all_commands(
    bench: EngineBench, peft_models: dict[str, PeftModel]
) -> None:
    for slot, name in enumerate(NAMES[:4]):
        bench.promote(slot + 1, name, GPU_SLOT, slot)
    ops = {name: bench.generate(slot + 1, slot, 1) for slot, name in enumerate(NAMES[:4])}
    base = bench.generate(0, -1, 0)
    bench.wait(base)
    ids = torch.tensor([PROMPT])
    for name, op in ops.items():
        report = bench.wait(op)
        assert isinstance(report, rp.GenerationEnded)
        expected = peft_models[name].generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        expected = [token for token in expected[0, len(PROMPT) :].tolist() if token != 258]
        assert bench.tokens(op) == expected
        assert report.output_tokens == len(expected)


def test_slots_are_refused_before_a_change(
    bench: EngineBench, make_engine: Callable[..., EngineBench]
) -> None:
    bench.promote(1, "mlp", GPU_SLOT, slot=0)
    bench.promote(2, "attention", PINNED)
    before = bench.state()
    for slot, generation, code in [
        (0, 2, ErrorCode.CONFLICT),
        (4, 1, ErrorCode.NOT_RESIDENT),
        (-1, 1, ErrorCode.NOT_RESIDENT),
        (1, 0, ErrorCode.CONFLICT),
    ]:
        report = bench.do(cm.WriteSlot, adapter_id=2, slot=slot, generation=generation)
        failure(report, code)
        assert bench.state() == before
    for slot, generation in [(0, 2), (1, 1), (4, 1), (-1, 0)]:
        failure(bench.do(cm.ResetSlot, slot=slot, generation=generation), ErrorCode.NOT_RESIDENT)
        assert bench.state() == before
    small = make_engine(device_bytes_max=4096)
    before = small.state()
    report = small.do(cm.CheckAdapter, adapter_id=1, adapter="everything", path="everything")
    failure(report, ErrorCode.DEVICE_OUT_OF_MEMORY)
    assert small.state() == before


def test_a_prefix_is_reused_by_the_fingerprint_of_an_adapter(bench: EngineBench) -> None:
    """Also after the adapter was in another slot, and never by another adapter in its slot."""
    prompt = tuple(range(40))

    def generate(adapter_id: int, slot: int, generation: int) -> tuple[list[int], int]:
        fields = {"adapter_id": adapter_id, "slot": slot, "generation": generation}
        sampling = Sampling(max_tokens=8)
        op = bench.submit(
            cm.StartGeneration,
            request_id=f"r{bench.op}",
            prompt=prompt,
            sampling=sampling,
            **fields,
        )
        bench.engine.step()
        reused = [row.table.reused for row in bench.engine._inference.batch._members]
        bench.wait(op)
        return bench.tokens(op), sum(reused)

    bench.promote(1, "everything", GPU_SLOT, slot=0, generation=1)
    first, reused = generate(1, 0, 1)
    assert reused == 0
    bench.do(cm.ResetSlot, slot=0, generation=1)
    bench.promote(2, "mlp", GPU_SLOT, slot=0, generation=2)
    other, reused = generate(2, 0, 2)
    assert other != first
    assert reused == 0
    bench.do(cm.WriteSlot, adapter_id=1, slot=1, generation=1)
    assert generate(1, 1, 1) == (first, 32)
    assert generate(2, 0, 2) == (other, 32)
    assert generate(0, -1, 0)[1] == 0


def test_every_residency_command_has_a_handler(bench: EngineBench) -> None:
    assert bench.engine.residency._handlers.keys() == set(ResidencyCommand.__args__)
    others = {cm.StartGeneration, cm.StartPooling, cm.StopGeneration, cm.ResendTokens}
    assert set(EngineCommand.__args__) == {*ResidencyCommand.__args__, *others}


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, torch.OutOfMemoryError])
def test_a_failing_compaction_is_raised_because_it_ends_the_engine(
    make_engine: Callable[..., EngineBench], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    first = make_engine()
    names = ("output", "mlp", "attention")
    checks = [first.do(cm.CheckAdapter, adapter_id=1, adapter=name, path="") for name in names]
    _, mlp_bytes, attention_bytes = (checked.blob_bytes for checked in checks)
    bench = make_engine(device_bytes_max=mlp_bytes + attention_bytes)
    bench.promote(1, "output", GPU_SLOT, slot=0)
    bench.promote(2, "mlp", GPU_SLOT, slot=1)
    bench.promote(3, "attention", PINNED)
    bench.do(cm.ResetSlot, slot=0, generation=1)

    def failing_move(target: torch.Tensor, source: torch.Tensor) -> None:
        raise kind("the device failed")

    monkeypatch.setattr(bench.engine.residency.arena._copier, "move", failing_move)
    with pytest.raises(RuntimeError, match="the device failed"):
        bench.do(cm.WriteSlot, adapter_id=3, slot=0, generation=2)


def test_a_request_with_several_outputs_is_one_in_the_statistics(
    make_engine: Callable[..., EngineBench], no_eos: None
) -> None:
    bench = make_engine()
    sampling = Sampling(max_tokens=8, temperature=1.0, n=3)
    fields = {"adapter_id": 0, "slot": -1, "generation": 0, "prompt": PROMPT, "sampling": sampling}
    op = bench.submit(cm.StartGeneration, request_id="several", **fields)
    for _ in range(3):
        bench.engine.step()
    found = bench.engine.statistics()
    assert (found.running, found.waiting) == (1, 0)
    bench.wait(op)
    assert bench.engine.statistics().preempted == 0


@pytest.mark.parametrize(
    ("changes", "batching", "refusal"),
    [({}, "paged", ""), ({"paged_attention": False}, "padded", "paged_attention is off")],
)
def test_the_batching_mode_is_shown_with_the_reason(
    make_engine: Callable[..., EngineBench],
    prepared_model: CausalModel,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, bool],
    batching: str,
    refusal: str,
) -> None:
    # The model is shared with other tests, which add theirs.
    monkeypatch.setattr(prepared_model, "refusals", ())
    found = make_engine(**changes).engine.statistics()
    assert (found.batching, found.batching_refusal) == (batching, refusal)

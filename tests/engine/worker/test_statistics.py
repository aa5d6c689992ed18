"""The engine's own statistics of requests."""

from collections.abc import Callable

import pytest

from loradock.messages import commands as cm
from loradock.messages.prompts import Sampling
from tests.support.engine.engine_bench import PROMPT, EngineBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)


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
def test_the_way_of_running_sequences_is_shown_with_the_reason(
    make_engine: Callable[..., EngineBench],
    changes: dict[str, bool],
    batching: str,
    refusal: str,
) -> None:
    found = make_engine(**changes).engine.statistics()
    assert (found.batching, found.batching_refusal) == (batching, refusal)

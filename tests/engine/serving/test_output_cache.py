"""The latest outputs of ended requests are kept, within the bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.engine.serving import generations
from loradock.engine.serving.generations import OutputCache
from loradock.messages.reports import PrivateReport
from loradock.messages.requests import TokensStreamed, VectorsStreamed

COUNT_MAX, BYTES_MAX = 3, 100
IDS = ("a", "b", "c", "d", "e")

tokens = st.builds(
    lambda name, count, text: TokensStreamed(name, 0, (7,) * count, text),
    *(st.sampled_from(IDS), st.integers(0, 9), st.text("x", max_size=40)),
)
vectors = st.builds(
    lambda name, widths: VectorsStreamed(name, 0, tuple(bytes(width) for width in widths)),
    *(st.sampled_from(IDS), st.lists(st.integers(0, 60), max_size=3)),
)


def size_of(output: PrivateReport) -> int:
    if isinstance(output, TokensStreamed):
        return 8 * len(output.tokens) + len(output.text)
    return sum(len(vector) for vector in output.vectors)


@given(st.lists(tokens | vectors, max_size=12))
def test_the_cache_holds_the_latest_outputs_that_fit(outputs: list[PrivateReport]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generations, "OUTPUTS_MAX", COUNT_MAX)
        patched.setattr(generations, "OUTPUTS_BYTES_MAX", BYTES_MAX)
        cache = OutputCache()
        expected: list[PrivateReport] = []
        for output in outputs:
            cache.put(output)
            expected = [one for one in expected if one.request_id != output.request_id]
            expected.append(output)
            while len(expected) > COUNT_MAX or sum(map(size_of, expected)) > BYTES_MAX:
                expected.pop(0)
            by_id = {one.request_id: (one,) for one in expected}
            assert {name: cache.get(name) for name in IDS} == {n: by_id.get(n, ()) for n in IDS}

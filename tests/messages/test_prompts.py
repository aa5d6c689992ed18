"""Truncation of prompts: what is kept, in every case of special tokens and sides."""

from hypothesis import given
from hypothesis import strategies as st

from loradock.messages.prompts import Truncation

TOKENS = st.lists(st.integers(1, 9), max_size=12)
SPECIAL = st.lists(st.just(0), max_size=2)


@given(
    before=SPECIAL,
    content=TOKENS,
    after=SPECIAL,
    limit=st.integers(1, 16),
    side=st.sampled_from(["left", "right"]),
)
def test_a_prompt_keeps_its_special_tokens_and_one_end_of_its_content(
    before: list[int], content: list[int], after: list[int], limit: int, side: str
) -> None:
    tokens = [*before, *content, *after]
    cut = Truncation(limit, side).cut(tokens, content, limit)
    assert len(cut) == min(limit, len(tokens))
    if len(tokens) <= limit:
        assert cut == tokens
    elif limit > len(before) + len(after):
        kept = cut[len(before) : len(cut) - len(after)]
        assert [*before, *kept, *after] == cut
        assert kept == (content[-len(kept) :] if side == "left" else content[: len(kept)])
    else:
        assert cut == (tokens[-limit:] if side == "left" else tokens[:limit])

"""Output and events are put together once and in order, whatever gets lost or repeated."""

from hypothesis import given
from hypothesis import strategies as st

from controller.client.streams import EventCursor, Gap, TokenOutput
from messages import events as ev
from messages import requests as rq
from messages.wire import EVENTS

# Output tokens

pieces = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "bc", "ü"])), min_size=1, max_size=12
)


def chunk(start, part):
    tokens = tuple(token for token, _ in part)
    return rq.TokensStreamed("g", start, tokens, "".join(text for _, text in part))


@st.composite
def runs(draw, truth):
    """One streaming from offset 0 in chunks of any size, some of them lost."""
    chunks, start = [], 0
    while start < len(truth):
        size = draw(st.integers(1, len(truth) - start))
        if draw(st.booleans()):
            chunks.append(chunk(start, truth[start : start + size]))
        start += size
    return chunks


@st.composite
def deliveries(draw):
    truth = draw(pieces)
    lossy = [draw(runs(truth)) for _ in range(draw(st.integers(0, 4)))]
    arrived = [piece for run in lossy for piece in run]
    arrived = draw(st.permutations(arrived)) if draw(st.booleans()) else arrived
    start, whole = 0, []
    while start < len(truth):
        size = draw(st.integers(1, len(truth) - start))
        whole.append(chunk(start, truth[start : start + size]))
        start += size
    return truth, [*arrived, *whole]


@given(deliveries())
def test_output_is_a_prefix_of_the_truth_at_any_time_and_all_of_it_in_the_end(delivery):
    truth, chunks = delivery
    output, tokens, text = TokenOutput(), [], ""
    for arrived in chunks:
        fresh = output.add(arrived)
        if fresh is None:
            continue
        assert fresh.offset == len(tokens)
        tokens.extend(fresh.tokens)
        text += fresh.text
        assert tokens == [token for token, _ in truth[: len(tokens)]]
        assert text == "".join(text for _, text in truth[: len(tokens)])
    assert len(tokens) == len(truth)
    assert output.tokens == len(truth)


def test_text_without_a_token_comes_once_however_it_is_repeated():
    first = [chunk(0, [(1, "a"), (2, "")]), rq.TokensStreamed("g", 2, (), "b")]
    whole = [rq.TokensStreamed("g", 0, (1, 2), "ab")]
    for order in (first + whole + first, first + whole + first[1:], whole + first):
        output = TokenOutput()
        fresh = [output.add(arrived) for arrived in order]
        assert "".join(piece.text for piece in fresh if piece is not None) == "ab"


def test_a_chunk_after_a_hole_is_told_and_not_used():
    output = TokenOutput()
    late = chunk(3, [(4, "d")])
    assert output.misses(late)
    assert output.add(late) is None
    assert output.tokens == 0


# Events


def happened(count):
    return [ev.Published(seq, 0, ev.ControllerResumed(seq)) for seq in range(1, count + 1)]


def batch(events, last):
    return EVENTS.encode(tuple(events), 1, last)


def seqs(cursor):
    items = []
    while cursor.ready:
        item = cursor.pop()
        items.append(item if isinstance(item, Gap) else item.seq)
    return items


@given(
    total=st.integers(1, 40),
    since=st.integers(0, 40),
    first_kept=st.integers(1, 40),
    page=st.integers(1, 5),
    losses=st.lists(st.booleans(), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
def test_events_come_in_order_once_and_only_a_gap_skips(
    total, since, first_kept, page, losses, cuts
):
    truth = happened(total)
    since, first_kept = min(since, total), min(first_kept, total + 1)
    cursor = EventCursor(since + 1, behind=True)
    position, turn = 0, 0
    while position < total or cursor.behind:
        if cursor.behind:
            first = max(cursor.fetch().first_seq, first_kept)
            found = tuple(e for e in truth[:position] if e.seq >= first)[:page]
            cursor.on_fetched(rq.EventsFetched("f", found, max(position, since)))
        else:
            end = min(total, position + cuts[turn % len(cuts)])
            if not losses[turn % len(losses)]:
                cursor.on_frame(batch(truth[position:end], end))
            position, turn = end, turn + 1
            if position == total:
                cursor.on_frame(batch((), total))
    told = seqs(cursor)
    expected = since + 1
    for item in told:
        if isinstance(item, Gap):
            assert item.expected == expected < item.found
            assert item.found <= max(first_kept, total + 1)
            expected = item.found
        else:
            assert item == expected
            expected += 1
    assert expected == max(total, since) + 1 == cursor.next_seq == cursor.seq + 1
    if first_kept <= since + 1:
        assert not any(isinstance(item, Gap) for item in told)


def test_frames_that_can_not_be_read_are_as_good_as_lost():
    cursor = EventCursor(1, behind=False)
    cursor.on_frame(b"LD\x01Egarbage")
    cursor.on_frame(b"")
    assert not cursor.ready
    assert not cursor.behind
    cursor.on_frame(batch(happened(2), 2))
    assert seqs(cursor) == [1, 2]


def test_a_log_that_begins_again_is_told():
    cursor = EventCursor(1, behind=False)
    cursor.on_frame(batch(happened(5), 5))
    assert seqs(cursor) == [1, 2, 3, 4, 5]
    cursor.on_frame(batch((), 2))
    assert seqs(cursor) == [Gap(6, 1)]
    assert cursor.behind
    cursor.on_fetched(rq.EventsFetched("f", tuple(happened(2)), 2))
    assert seqs(cursor) == [1, 2]
    assert not cursor.behind


def test_a_start_after_the_end_is_told():
    cursor = EventCursor(101, behind=True)
    cursor.on_fetched(rq.EventsFetched("f", (), 3))
    assert seqs(cursor) == [Gap(101, 1)]
    assert cursor.fetch().first_seq == 1

"""Tests of the assembly of output and events from lost, repeated and reordered frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.client.calls import TokenOutput
from loradock.client.streams import EventCursor, Gap, Snapshot
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.wire import EVENTS

# Output tokens

outputs = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "bc", "ü"])), min_size=1, max_size=12
)


def chunk(start, output):
    tokens = tuple(token for token, _ in output)
    return rq.TokensStreamed("g", start, tokens, "".join(text for _, text in output))


@st.composite
def lossy_streams(draw, truth):
    """Stream from offset 0 in chunks of any size, some of which are lost."""
    chunks, start = [], 0
    while start < len(truth):
        size = draw(st.integers(1, len(truth) - start))
        if draw(st.booleans()):
            chunks.append(chunk(start, truth[start : start + size]))
        start += size
    return chunks


@st.composite
def deliveries(draw):
    truth = draw(outputs)
    streams = [draw(lossy_streams(truth)) for _ in range(draw(st.integers(0, 4)))]
    arrived = [part for stream in streams for part in stream]
    arrived = draw(st.permutations(arrived)) if draw(st.booleans()) else arrived
    start, whole = 0, []
    while start < len(truth):
        size = draw(st.integers(1, len(truth) - start))
        whole.append(chunk(start, truth[start : start + size]))
        start += size
    return truth, [*arrived, *whole]


@given(deliveries())
def test_output_is_always_a_prefix_of_the_truth_and_complete_at_the_end(delivery):
    truth, chunks = delivery
    output, tokens, text = TokenOutput(), [], ""
    for arrived in chunks:
        new = output.add(arrived)
        if new is None:
            continue
        assert new.offset == len(tokens)
        tokens.extend(new.tokens)
        text += new.text
        assert tokens == [token for token, _ in truth[: len(tokens)]]
        assert text == "".join(text for _, text in truth[: len(tokens)])
    assert len(tokens) == len(truth)
    assert output.tokens == len(truth)


def test_text_without_a_token_is_added_once():
    first = [chunk(0, [(1, "a"), (2, "")]), rq.TokensStreamed("g", 2, (), "b")]
    whole = [rq.TokensStreamed("g", 0, (1, 2), "ab")]
    for order in (first + whole + first, first + whole + first[1:], whole + first):
        output = TokenOutput()
        added = [output.add(arrived) for arrived in order]
        assert "".join(part.text for part in added if part is not None) == "ab"


def test_a_chunk_after_a_gap_is_not_used():
    output = TokenOutput()
    late = chunk(3, [(4, "d")])
    assert output.has_gap_before(late)
    assert output.add(late) is None
    assert output.tokens == 0


# Events


def published(count):
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
    fetches=st.tuples(st.integers(1, 5), st.booleans()),
    losses=st.lists(st.booleans(), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
def test_events_are_yielded_once_and_in_order_and_only_a_gap_skips_numbers(
    total, since, first_kept, fetches, losses, cuts
):
    truth = published(total)
    page, explicit = fetches
    since, first_kept = min(since, total), min(first_kept, total + 1)
    cursor = EventCursor(since + 1, needs_fetch=True)
    position, step = 0, 0
    while position < total or cursor.needs_fetch:
        if cursor.needs_fetch:
            first = max(cursor.fetch_request().first_seq, first_kept)
            found = tuple(e for e in truth[:position] if e.seq >= first)[:page]
            last = max(position, since)
            if explicit and cursor.fetch_request().first_seq < first:
                cursor.on_fetched(rq.EventsTooOld("f", min(first, last + 1), last))
            else:
                cursor.on_fetched(rq.EventsFetched("f", found, last))
        else:
            end = min(total, position + cuts[step % len(cuts)])
            if not losses[step % len(losses)]:
                cursor.on_frame(batch(truth[position:end], end))
            position, step = end, step + 1
            if position == total:
                cursor.on_frame(batch((), total))
    items = seqs(cursor)
    expected = since + 1
    for item in items:
        if isinstance(item, Gap):
            assert item.expected == expected < item.found
            assert item.found <= max(first_kept, total + 1)
            expected = item.found
        else:
            assert item == expected
            expected += 1
    assert expected == max(total, since) + 1 == cursor.next_seq == cursor.seq + 1
    if first_kept <= since + 1:
        assert not any(isinstance(item, Gap) for item in items)


def test_malformed_frames_are_ignored():
    cursor = EventCursor(1, needs_fetch=False)
    cursor.on_frame(b"LD\x01Egarbage")
    cursor.on_frame(b"")
    assert not cursor.ready
    assert not cursor.needs_fetch
    cursor.on_frame(batch(published(2), 2))
    assert seqs(cursor) == [1, 2]


def test_restarted_numbers_are_a_gap():
    cursor = EventCursor(1, needs_fetch=False)
    cursor.on_frame(batch(published(5), 5))
    assert seqs(cursor) == [1, 2, 3, 4, 5]
    cursor.on_frame(batch((), 2))
    assert seqs(cursor) == [Gap(6, 1)]
    assert cursor.needs_fetch
    cursor.on_fetched(rq.EventsFetched("f", tuple(published(2)), 2))
    assert seqs(cursor) == [1, 2]
    assert not cursor.needs_fetch


def test_a_start_after_the_newest_event_is_a_gap():
    cursor = EventCursor(101, needs_fetch=True)
    cursor.on_fetched(rq.EventsFetched("f", (), 3))
    assert seqs(cursor) == [Gap(101, 1)]
    assert cursor.fetch_request().first_seq == 1


def test_a_snapshot_stands_for_the_events_up_to_its_number():
    cursor = EventCursor(3, needs_fetch=True, wants_snapshot=True)
    assert cursor.fetch_request().snapshot
    cursor.on_fetched(rq.AdaptersListed("f", (), 7))
    cursor.on_frame(batch(published(9)[7:], 9))
    items = [cursor.pop() for _ in range(3)]
    assert items[0] == Snapshot(3, 7, ())
    assert [item.seq for item in items] == [7, 8, 9]
    assert cursor.seq == 9
    assert not cursor.needs_fetch


@pytest.mark.parametrize("oldest", [0, 3, 5, 9, 2**62])
def test_any_answer_that_events_are_too_old_advances_the_cursor(oldest):
    cursor = EventCursor(5, needs_fetch=True)
    cursor.on_fetched(rq.EventsTooOld("f", oldest, 8))
    [gap] = cursor.ready
    assert gap.expected == 5
    assert 5 < gap.found <= 9
    assert cursor.next_seq == gap.found


def test_events_of_a_log_that_was_replaced_are_a_gap():
    cursor = EventCursor(50, needs_fetch=True, wants_snapshot=True)
    cursor.on_fetched(rq.AdaptersListed("f", (), 7))
    assert seqs(cursor) == [Gap(50, 1)]
    assert cursor.needs_fetch

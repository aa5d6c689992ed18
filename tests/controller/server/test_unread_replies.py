"""The bytes of long replies that were not read: bounded per client and together."""

from loradock.controller.server.transport import (
    UNREAD_BYTES_MAX,
    UNREAD_BYTES_PER_CLIENT_MAX,
    UnreadReplies,
)


class Reply:
    """A tracker that a test completes."""

    done = False


def test_a_client_that_does_not_read_has_bounded_bytes() -> None:
    unread, size = UnreadReplies(), UNREAD_BYTES_PER_CLIENT_MAX // 4
    sent = []
    while unread.allows(b"a", size):
        sent.append(Reply())
        unread.add(b"a", sent[-1], size)
    assert len(sent) == 4
    assert unread.allows(b"b", size)
    sent[0].done = True
    assert unread.allows(b"a", size)
    assert not unread.allows(b"a", size + 1)
    assert unread.size_bytes == 3 * size


def test_one_reply_may_be_longer_than_the_bound() -> None:
    unread, reply = UnreadReplies(), Reply()
    assert unread.allows(b"a", 2 * UNREAD_BYTES_PER_CLIENT_MAX)
    unread.add(b"a", reply, 2 * UNREAD_BYTES_PER_CLIENT_MAX)
    assert not unread.allows(b"a", 1)
    reply.done = True
    assert unread.allows(b"a", 1)
    assert unread.size_bytes == 0


def test_beyond_the_bound_for_all_each_client_may_have_one_reply() -> None:
    unread, size = UnreadReplies(), UNREAD_BYTES_PER_CLIENT_MAX // 2
    replies = [Reply() for _ in range(UNREAD_BYTES_MAX // size)]
    for number, reply in enumerate(replies):
        unread.add(b"%d" % number, reply, size)
    assert not unread.allows(b"0", size)
    assert unread.allows(b"new", size)
    # What another client has read makes room.
    replies[-1].done = True
    assert unread.allows(b"0", size)


def test_clients_that_have_read_everything_and_are_gone_are_forgotten() -> None:
    unread, waiting = UnreadReplies(), Reply()
    unread.add(b"waits", waiting, 1)
    for number in range(1000):
        read = Reply()
        read.done = True
        assert unread.allows(b"%d" % number, 1)
        unread.add(b"%d" % number, read, 1)
        assert len(unread) <= 3
    assert unread.size_bytes <= 3
    waiting.done = True
    for _ in range(3):
        unread.add(b"last", read, 1)
    assert len(unread) <= 1

"""Windows of answers: what is kept, for how long, and at whose cost."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.core.answers import Answer, AnswerWindows, WindowBounds
from loradock.messages.ids import client_name, client_of, scoped, unscoped
from loradock.messages.requests import CancelDone
from tests.controller.core.test_window_sizes import entries

BOUNDS = WindowBounds(count_max=12, client_max=5, kept_ns=100)


def windows(bounds: WindowBounds = BOUNDS) -> AnswerWindows:
    return AnswerWindows(bounds)


def answer(client: str, number: int, time_ns: int = 0) -> Answer:
    return Answer(CancelDone(scoped(client, str(number)), "x", False), number, time_ns)


class Model:
    """All answers that were ever added, in order; what has to be kept is read from them."""

    def __init__(self) -> None:
        self.windows = windows()
        self.added: list[Answer] = []
        self.time_ns = 0

    def add(self, client: str, pause_ns: int) -> None:
        self.time_ns += pause_ns
        self.added.append(answer(client, len(self.added), self.time_ns))
        self.windows.add(self.added[-1])

    def of(self, client: str) -> list[Answer]:
        return [a for a in self.added if client_of(a.reply.request_id) == client]

    def kept(self, client: str) -> list[str]:
        return list(self.windows.window(client))


def kept_by_rule(added: list[Answer], bounds: WindowBounds) -> list[Answer]:
    """Return the answers that are kept of those that were added, by the rule in its own words."""
    kept: list[Answer] = []
    for new in added:
        kept.append(new)
        mine = client_of(new.reply.request_id)
        last = {client_of(a.reply.request_id): place for place, a in enumerate(kept)}
        for client in dict.fromkeys((min(last, key=last.__getitem__), mine)):
            oldest = [a for a in kept if client_of(a.reply.request_id) == client][:2]
            expired = [a for a in oldest if a.time_ns <= new.time_ns - bounds.kept_ns]
            kept = [a for a in kept if a not in expired]
        sizes = Counter(client_of(a.reply.request_id) for a in kept)
        largest = min(sizes, key=lambda client: (-sizes[client], client))
        full = [mine] if sizes[mine] > bounds.client_max else []
        for client in full or ([largest] if len(kept) > bounds.count_max else []):
            kept.remove(next(a for a in kept if client_of(a.reply.request_id) == client))
    return kept


steps = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40)), max_size=60)


@given(steps)
@settings(max_examples=300)
def test_windows_keep_the_newest_of_each_client_within_their_bounds(
    history: list[tuple[str, int]],
) -> None:
    model = Model()
    for client, pause_ns in history:
        model.add(client, pause_ns)
        found = model.windows
        assert len(found) <= BOUNDS.count_max
        assert [*found] == [a.reply.request_id for a in model.added if a.reply.request_id in found]
        for other in "abcd":
            kept = model.kept(other)
            assert len(kept) <= BOUNDS.client_max
            newest = model.of(other)[len(model.of(other)) - len(kept) :]
            assert kept == [a.reply.request_id for a in newest]
        assert sum(len(model.kept(other)) for other in "abcd") == len(found)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 20)), max_size=60),
    st.builds(WindowBounds, st.integers(1, 12), st.integers(1, 5), st.integers(1, 200)),
)
@settings(max_examples=300)
def test_exactly_those_are_kept_that_the_rule_keeps(
    history: list[tuple[str, int]], bounds: WindowBounds
) -> None:
    model = Model()
    model.windows.set_bounds(bounds)
    for client, pause_ns in history:
        model.add(client, pause_ns)
        assert [*model.windows.by_id.values()] == kept_by_rule(model.added, bounds)


@given(steps)
@settings(max_examples=300)
def test_an_answer_inside_number_and_time_is_returned_unless_all_windows_are_full(
    history: list[tuple[str, int]],
) -> None:
    model = Model()
    # Below the bound of all windows: an answer is dropped for its own client's window only.
    model.windows.set_bounds(BOUNDS._replace(count_max=1000))
    for client, pause_ns in history:
        model.add(client, pause_ns)
        for other in "abcd":
            for kept in model.of(other)[-BOUNDS.client_max :]:
                if kept.time_ns > model.time_ns - BOUNDS.kept_ns:
                    assert model.windows.get(kept.reply.request_id) == kept


@given(mine=st.integers(1, 5), floods=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_a_flood_drops_nothing_of_a_client_with_fewer_answers(mine: int, floods: list[int]) -> None:
    bounds = BOUNDS._replace(count_max=mine * (len(floods) + 1), client_max=1000)
    model = Model()
    model.windows.set_bounds(bounds)
    for _ in range(mine):
        model.add("mine", 0)
    for number, flood in enumerate(floods):
        for _ in range(flood):
            model.add(f"flood-{number}", 0)
            assert len(model.kept("mine")) == mine


@given(steps)
def test_the_windows_can_be_derived_from_the_answers_in_order(
    history: list[tuple[str, int]],
) -> None:
    model = Model()
    for client, pause_ns in history:
        model.add(client, pause_ns)
    derived = windows(BOUNDS._replace(kept_ns=1 << 60))
    for kept in model.windows.by_id.values():
        derived.add(kept)
    derived.set_bounds(BOUNDS)
    for client in "abcdabcdabcd":
        model.add(client, 30)
        derived.add(model.added[-1])
        assert [*derived] == [*model.windows]


def test_the_answers_of_clients_that_have_left_are_dropped_in_time() -> None:
    found = windows(WindowBounds(1000, 5, 100))
    for number in range(500):
        found.add(answer(f"left-{number}", 0, number // 10))
    for number in range(500):
        found.add(answer("stays", number, 1000))
    assert len(found) == 5


def test_memory_is_proportional_to_the_windows_however_many_answers_there_were() -> None:
    found = windows(WindowBounds(12, 5, 1000))
    rng = Random(1)
    # The bound of all windows is reached, then only that of one, then only that of time.
    answers = [answer(rng.choice("abcdefghijklmnop"), number) for number in range(2000)]
    answers += [answer("a", 2000 + number) for number in range(1000)]
    answers += [answer(f"client-{number}", number, 2000 * number) for number in range(1000)]
    for each in answers:
        found.add(each)
        assert found._sizes is None or entries(found._sizes) <= 3 * len(found._windows)
        assert len(found._windows) <= len(found) <= 12


def test_lower_bounds_drop_the_oldest_of_the_largest_windows() -> None:
    found = windows(WindowBounds(1000, 100, 1000))
    for client, count in (("a", 10), ("b", 4), ("c", 7)):
        for number in range(count):
            found.add(answer(client, number))
    found.set_bounds(WindowBounds(12, 6, 1000))
    assert [len(found.window(client)) for client in "abc"] == [4, 4, 4]
    assert found.window("c") == tuple(scoped("c", str(number)) for number in (3, 4, 5, 6))


def test_a_clients_name_is_of_its_token_and_its_user() -> None:
    tokens = [bytes([number]) * 12 for number in range(10)]
    users = ["", "ada", "bob", "a name that is longer than the parameter of the hash"]
    names = {client_name(token, user) for token in tokens for user in users}
    assert len(names) == len(tokens) * len(users)
    assert {len(name) for name in names} == {16}
    assert not any(":" in name for name in names)
    longest = "r" * 64
    scoped_id = scoped(names.pop(), longest)
    assert len(scoped_id) <= 96
    for own_id in (longest, "a:b:c", ":"):
        assert unscoped(scoped("name", own_id)) == own_id
        assert client_of(scoped("name", own_id)) == "name"
    assert client_of("made-by-the-controller") == ""

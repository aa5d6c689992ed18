"""Properties of patterns: an accepted key matches as in PEFT, in a bounded number of steps."""

import re
from typing import Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from loradock.engine.adapters import PEFTHelper, bounded_regex
from loradock.engine.adapters.bounded_regex import PatternRefused, PatternTable
from loradock.engine.errors import AdapterConfigRefused
from tests.support.engine.adapter_examples import CONFIG

CHARACTERS = st.sampled_from(
    [*"ab.1-_", r"\.", r"\d", r"\w", r"\-", "[ab]", "[^.]", "[a-b1]", r"[\d.]", "[a-]"]
)
COUNTS = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{0,2}"])
ITEMS = st.tuples(CHARACTERS, COUNTS).map("".join)
SEQUENCES = st.lists(ITEMS, max_size=3).map("".join)
GROUPS = st.tuples(
    st.sampled_from(["(", "(?:"]),
    st.lists(SEQUENCES, min_size=1, max_size=3).map("|".join),
    st.sampled_from([")", ")?"]),
).map("".join)
ALTERNATIVES = st.tuples(
    st.sampled_from(["", "", "^"]),
    st.lists(ITEMS | GROUPS | st.just(".*"), min_size=1, max_size=4).map("".join),
    st.sampled_from(["", "", "$"]),
).map("".join)
KEYS: Final = st.lists(ALTERNATIVES, min_size=1, max_size=2).map("|".join)
"""Keys of the subset; some have too many repeats."""

PATHS = st.lists(st.text("ab.1-_", max_size=8), min_size=1, max_size=6)
PIECES = st.sampled_from(
    [*"ab.|()*+?[]^$-{}\\1", r"\d", "(?:", "[^", "{2}", "{1,2}", "*?", "++", "(?!", r"\b", "--"]
)


def table_of(key: str) -> PatternTable[int] | None:
    try:
        return PatternTable({key: 1})
    except PatternRefused:
        return None


def matches_in_peft(key: str, path: str) -> bool:
    # PEFT returns the path itself where no key matches.
    return get_pattern_key([key, "(?!)"], path) == key


@settings(max_examples=700)
@given(KEYS | st.lists(PIECES, max_size=7).map("".join), PATHS)
def test_an_accepted_key_matches_as_in_peft_and_re(key: str, paths: list[str]) -> None:
    table = table_of(key)
    assume(table is not None)
    assert table is not None
    for path in paths:
        assume(key != path)
        expected = re.match(rf"(.*\.)?({key})$", path) is not None
        assert matches_in_peft(key, path) == expected
        assert (table.find(path) is not None) == expected, (key, path)


@settings(max_examples=300)
@given(KEYS)
def test_only_the_number_of_repeats_refuses_a_key_of_the_subset(key: str) -> None:
    text = ""
    try:
        PatternTable({key: 1})
    except PatternRefused as error:
        text = str(error)
    assert text == "" or "at most 4 are allowed" in text


USED = {
    "q_proj": ("model.layers.0.q_proj", "model.layers.0.xq_proj"),
    "layers.0.q_proj": ("layers.0.q_proj", "layers.10.q_proj"),
    "a.b": ("x.aXb", "x.ab"),
    "^model.layers.0": ("model.layers.0", "base.model.layers.0"),
    r"layers\.\d+\.mlp": ("model.layers.12.mlp", "model.layers.x.mlp"),
    r".*\.layers\.(0|1)\..*_proj": ("model.layers.1.attn.k_proj", "model.layers.2.attn.k_proj"),
    r"layers.[0-9]{1,2}.(?:up|gate)_proj": ("layers.31.up_proj", "layers.131.up_proj"),
    r"layers.[0-9]{1,2}.(?:self_attn.)?q": ("layers.31.q", "layers.31.mlp.q"),
    r"[^.]+\.weight$": ("a.b.weight", "weight"),
    r"q_proj|model\.layers\.\d+\.mlp\.(up|gate)_proj": (
        "model.layers.3.mlp.gate_proj",
        "model.layers.3.mlp.down_proj",
    ),
}


@pytest.mark.parametrize("key", USED)
def test_the_keys_of_published_adapters_are_accepted(key: str) -> None:
    table = PatternTable({key: 1})
    matching, other = USED[key]
    assert table.find(matching) == 1
    assert table.find(other) is None


REFUSED = {
    "nested repeats": ("(a+)+", "(a*)*", "(.*.*)*x", "(a|b){2}", "(((a*)*)*)*x"),
    "nested groups": ("((a))", "(a(?:b))"),
    "lookarounds": ("(?=a)a", "(?!a)b", "a(?<=a)", "(?<!b)a"),
    "backreferences": (r"(a)\1", "(?P<x>a)", "(?P<x>a)(?P=x)"),
    "flags and boundaries": ("(?i)a", r"\ba", r"a\Z", r"\u0061"),
    "possessive and atomic": ("a*+", "(?>a)"),
    "not valid in re": ("a**", "*a", "^*", "(a", "a)", "[b-a]", "[a", "a{2,1}"),
    "large counts": ("a{10}", "a{1,99}"),
    "many repeats": ("a?" * 5, ".*.*.*.*.*x"),
    "sets of doubtful meaning": ("[a--b]", "[a&&b]", "[[a]", "[]a]", "[]", "[^]", "[^]]", "[^]a+]"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_keys_outside_the_subset_are_refused(kind: str) -> None:
    for key in REFUSED[kind]:
        assert table_of(key) is None, key


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("(a+)+$", "'(a+)+$' has '+$' in it; allowed are literals"),
        ("(a|a)*b", "groups that are not nested and not repeated"),
        ("[b-a]", "'[b-a]' is not a pattern"),
        ("(a", "'(a' is not a pattern: missing )"),
        ("a?" * 60, "has 60 of *, +, ? and {m,n}; at most 4 are allowed"),
    ],
)
def test_a_refusal_names_the_field_the_key_and_what_is_allowed(
    field: str, key: str, text: str
) -> None:
    with pytest.raises(AdapterConfigRefused) as caught:
        PEFTHelper.from_dict({**CONFIG, field: {"q_proj": 4, key: 2}})
    assert caught.value.message.startswith(f"{field} is ")
    assert text in str(caught.value)


# Each of them would keep `re` busy for hours on the path below.
CATASTROPHIC: dict[str, str] = {
    "alternatives that are alike": "(a|a)" * 60 + "x",
    "optional groups": "(a)?" * 60 + "a" * 60,
    "alternatives with dots": "(a|.|ab|[a-c])" * 40 + "x",
    "escaped and not": r"(\-|-|a|a)" * 40 + "x",
    "four repeats": "a.*.*.*.*x",
}


@pytest.mark.parametrize("name", CATASTROPHIC)
def test_a_catastrophic_pattern_is_refused_before_it_is_matched(name: str) -> None:
    table = PatternTable({CATASTROPHIC[name]: 1})
    with pytest.raises(PatternRefused, match=r"could need \d+ steps .* at most 20000000 are"):
        table.find("a" * 500)


Item = tuple[str, str]
Group = list[list[Item]]
COUNTED = st.tuples(CHARACTERS, st.sampled_from(["", "", "*", "+", "?"]))
ALTERNATIVES_OF_ITEMS = st.lists(st.lists(COUNTED, max_size=2), min_size=1, max_size=3)


def count_ways(rest: list[Item | Group], start: int, path: str) -> int:
    """Return how often plain backtracking reaches the end of `rest`, from `start` in `path`."""
    if not rest:
        return 1
    first, others = rest[0], rest[1:]
    if isinstance(first, list):
        return sum(count_ways([*items, *others], start, path) for items in first)
    character, count = first
    low, high = {"": (1, 1), "*": (0, None), "+": (1, None), "?": (0, 1)}[count]
    total, end = 0, start
    for number in range((len(path) if high is None else high) + 1):
        if number >= low:
            total += count_ways(others, end, path)
        if end == len(path) or not re.fullmatch(character, path[end]):
            break
        end += 1
    return total


def text_of(item: Item | Group) -> str:
    if isinstance(item, list):
        return f"({'|'.join(''.join(map(''.join, items)) for items in item)})"
    return "".join(item)


@settings(max_examples=400)
@given(
    st.lists(COUNTED | ALTERNATIVES_OF_ITEMS, min_size=1, max_size=4),
    st.text("ab.1-_", max_size=8),
)
def test_the_bound_holds_for_plain_backtracking(items: list[Item | Group], path: str) -> None:
    key = "".join(map(text_of, items))
    assume(table_of(key) is not None)
    dots = [] if key.startswith(".*") else [i for i, letter in enumerate(path) if letter == "."]
    counted = sum(count_ways(items, start, path) for start in (0, *(dot + 1 for dot in dots)))
    assert counted <= bounded_regex._Pattern(key).ways(path)


def test_the_steps_of_all_keys_and_paths_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_regex, "STEPS_MAX", 300_000)
    table = PatternTable({".*.*x": 1, "a*": 2})
    assert table.find("a" * 3) == 2
    with pytest.raises(PatternRefused, match="fewer keys"):
        [table.find("a" * length) for length in range(4, 200)]


def test_plain_keys_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_regex, "STEPS_MAX", 40_000)
    table = PatternTable({f"m{i}": i for i in range(100)})
    assert [table.find(f"m{i}") for i in range(10)] == list(range(10))
    with pytest.raises(PatternRefused, match="fewer keys"):
        [table.find(f"x.{i}") for i in range(20)]


def test_a_large_model_with_usual_patterns_stays_within_the_steps() -> None:
    layers = "|".join(map(str, range(80)))
    keys = (rf".*\.layers\.({layers})\.mlp\..*(up|down)_proj", r"layers.\d+.self_attn.(q|k|v)_proj")
    table = PatternTable({key: index for index, key in enumerate(keys)})
    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.experts.63.down_proj")
    for layer in range(80):
        found = [table.find(f"model.language_model.layers.{layer}.{one}") for one in modules]
        assert found == [1, None, 0, 0]


def test_only_plain_names_may_be_long_together() -> None:
    names = {f"model.layers.{i}.self_attn.q_proj": i for i in range(4000)}
    assert PatternTable(names).find("model.layers.3999.self_attn.q_proj") == 3999
    with pytest.raises(PatternRefused, match="at most 65536"):
        PatternTable({f"^{name}": i for name, i in names.items()})

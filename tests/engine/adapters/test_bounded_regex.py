"""Laws of the patterns: what is accepted means what `re` means, and takes a bounded time."""

import re
import warnings
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.adapters.bounded_regex import PatternRefused, PatternTable

PIECES = [
    *"aab.1|()*+?[]^$-{}\\",
    *(r"\d", r"\.", r"\w", "(?:", "[^", "a-b", "[ab]", "(a|b)", "[]", "[a-]", "(?!"),
    *("{2}", "{1,2}", "{,2}", "{0,}", "{,}", "{}", "*?", "++", "(a*)*"),
]
KEYS = st.lists(st.sampled_from(PIECES), max_size=7).map("".join)
NAMES = st.lists(st.text("ab.1-^", max_size=7), min_size=1, max_size=5)


def compiled(key: str) -> PatternTable[int] | None:
    try:
        return PatternTable({key: 1})
    except PatternRefused:
        return None


@settings(max_examples=700, deadline=None)
@given(KEYS, NAMES)
def test_what_is_accepted_means_what_re_means(key: str, names: list[str]) -> None:
    table = compiled(key)
    assume(table is not None)
    assert table is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = re.compile(rf"(.*\.)?({key})$")
    for name in names:
        assert (table.find(name) is not None) == bool(expected.match(name)), (key, name)


USED = {
    "q_proj": ("model.layers.0.q_proj", "model.layers.0.xq_proj"),
    "layers.0.q_proj": ("layers.0.q_proj", "layers.10.q_proj"),
    "a.b": ("x.aXb", "x.ab"),
    "^model.layers.0": ("model.layers.0", "base.model.layers.0"),
    r"layers\.\d+\.mlp": ("model.layers.12.mlp", "model.layers.x.mlp"),
    r".*\.layers\.(0|1)\..*_proj": ("model.layers.1.attn.k_proj", "model.layers.2.attn.k_proj"),
    r"layers.[0-9]{1,2}.(?:up|gate)_proj": ("layers.31.up_proj", "layers.131.up_proj"),
    r"[^.]+\.weight$": ("a.b.weight", "weight"),
}


@pytest.mark.parametrize("key", USED)
def test_the_keys_that_people_use_are_understood(key: str) -> None:
    table = PatternTable({key: 1})
    matching, other = USED[key]
    assert table.find(matching) == 1
    assert table.find(other) is None


@pytest.mark.parametrize("key", ["(?P<x>a)", r"\b", r"(a)\1", "(?i)a", "a**", "a*+", "*a", "^*"])
def test_what_is_not_understood_is_refused(key: str) -> None:
    assert compiled(key) is None


@pytest.mark.parametrize(
    "key", ["(.*.*)*x", "(a|a|a.|.a)*x", "(((a*)*)*)*x", "(a?){64}(a?){64}x", "a?" * 60 + "x" * 60]
)
def test_what_would_keep_re_busy_for_ever_is_answered(key: str) -> None:
    assert PatternTable({key: 1}).find("a" * 100) is None


def test_the_steps_of_all_patterns_and_names_are_counted_together() -> None:
    with patch("engine.adapters.bounded_regex.STEPS_MAX", 3000):
        table = PatternTable({"(.*.*)*x": 1, "a*": 2})
    assert table.find("a" * 3) == 2
    for length in range(4, 20):
        table.find("a" * length)
    with pytest.raises(PatternRefused, match="plainer"):
        table.find("a" * 300)


def test_plain_keys_are_counted_too() -> None:
    with patch("engine.adapters.bounded_regex.STEPS_MAX", 1000):
        table = PatternTable({f"m{i}": i for i in range(100)})
    assert [table.find(f"m{i}") for i in range(10)] == list(range(10))
    with pytest.raises(PatternRefused, match="plainer"):
        [table.find(f"x.{i}") for i in range(20)]


def test_only_names_may_be_many() -> None:
    names = {f"model.layers.{i}.self_attn.q_proj": i for i in range(4000)}
    assert PatternTable(names).find("model.layers.3999.self_attn.q_proj") == 3999
    with pytest.raises(PatternRefused, match="at most 65536"):
        PatternTable({f"^{name}": i for name, i in names.items()})


def test_groups_are_not_nested_without_bound() -> None:
    assert compiled("(" * 10 + "a" + ")" * 10) is not None
    assert compiled("(" * 400 + "a" + ")" * 400) is None

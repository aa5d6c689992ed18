"""Properties of patterns: an accepted key matches as in PEFT, in bounded time and memory."""

import re
import resource
import time
import warnings
from typing import Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from loradock.engine.adapters import PEFTHelper, bounded_parsing
from loradock.engine.adapters.bounded_parsing import PatternRefused, PatternTable
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
    st.sampled_from([")", ")?", ")*", "){1,3}"]),
).map("".join)
ALTERNATIVES = st.tuples(
    st.sampled_from(["", "", "^"]),
    st.lists(ITEMS | GROUPS | st.just(".*"), min_size=1, max_size=4).map("".join),
    st.sampled_from(["", "", "$"]),
).map("".join)
KEYS: Final = st.lists(ALTERNATIVES, min_size=1, max_size=2).map("|".join)
PATHS = st.lists(st.text("ab.1-_ [:]{,}", min_size=1, max_size=8), min_size=1, max_size=6)
PIECES = st.sampled_from(
    [
        *"ab.|()*+?[]^$-{}\\1,:A",
        *(r"\d", r"\D", r"\S", r"\W", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\Q", r"\C", r"\pL"),
        *("(?:", "(?i:", "(?s:", "(?i)", "(?U)", "(?!", "(?>", "(?P<n>", "(?<n>", "(?P=n)", "(?#"),
        *("[^", "[[:alpha:]]", "[a", "{2}", "{1,2}", "{,2}", "*?", "++", "--", "&&", r"\x61"),
    ]
)


def table_of(key: str) -> PatternTable[int] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PatternTable({key: 1})
    except PatternRefused:
        return None


def matches_in_peft(key: str, path: str) -> bool:
    # PEFT returns the path itself if no key matches.
    return get_pattern_key([key, "(?!)"], path) == key


@settings(max_examples=300)
@given(KEYS | st.lists(PIECES, max_size=7).map("".join), PATHS)
def test_an_accepted_key_matches_as_in_peft_and_re(key: str, paths: list[str]) -> None:
    table = table_of(key)
    assume(table is not None)
    assert table is not None
    for path in paths:
        assume(key != path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = re.match(rf"(.*\.)?({key})$", path) is not None
            assert matches_in_peft(key, path) == expected
        assert (table.find(path) is not None) == expected, (key, path)


@settings(max_examples=60)
@given(KEYS)
def test_keys_of_literals_sets_groups_and_repeats_are_accepted(key: str) -> None:
    assert table_of(key) is not None


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
    "lookarounds": ("(?=a)a", "(?!a)b", "a(?<=a)", "(?<!b)a"),
    "backreferences": (r"(a)\1", "(?P<x>a)(?P=x)"),
    "flags and escapes": ("(?i)a", r"a\Z", r"\u0061", r"\pL", r"\Qa\E", r"\C"),
    "possessive and atomic": ("a*+", "(?>a)"),
    "not valid in re": ("a**", "*a", "^*", "(a", "a)", "[b-a]", "[a", "a{2,1}", "[]"),
    "read differently": (
        "[[:alpha:]]",
        "[^[:digit:]]",
        "a{,2}",
        "[[a]",
        "\N{LATIN SMALL LETTER LONG S}+",
    ),
    "too large": ("(a{1000}){1000}", ".{0,900}x", "a{1001}"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_keys_that_peft_matches_otherwise_are_refused(kind: str) -> None:
    for key in REFUSED[kind]:
        assert table_of(key) is None, key


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("[b-a]", "'[b-a]' can't be used as a pattern: invalid character class range: b-a"),
        ("(a", "'(a' can't be used as a pattern: missing )"),
        ("(?=a)", "'(?=a)' can't be used as a pattern: invalid perl operator: (?="),
        ("a{,2}", "'a{,2}' must be ASCII and must not contain any of '[:', '{,', '[['"),
    ],
)
def test_a_refusal_names_the_field_the_key_and_the_reason(field: str, key: str, text: str) -> None:
    with pytest.raises(AdapterConfigRefused) as caught:
        PEFTHelper.from_dict({**CONFIG, field: {"q_proj": 4, key: 2}})
    assert caught.value.message.startswith(f"{field} is ")
    assert text in str(caught.value)


# `re` would need hours or all memory for each of them, to compile or to match.
HOSTILE: Final = (
    "(a|a)" * 90 + "x",
    "(a)?" * 60 + "a" * 60,
    "(a|.|ab|[a-c])" * 30 + "x",
    r"(\-|-|a|a)" * 40 + "x",
    "a.*.*.*.*x",
    "(a+)+x",
    "(a*)*x",
    "(.*.*)*x",
    "(((a*)*)*)*x",
    "(a|b|ab)*x",
    "((a{9}){9}){9}",
    "((((a{2,9}){2,9}){2,9}){2,9}){2,9}",
    "(a{0,10}){0,100}b",
    "(" * 250 + "a" + ")*" * 125 + ")" * 125,
    r"(?i:[\x00-\xff])" * 30,
)


def test_hostile_keys_are_refused_or_matched_with_little_time_and_memory() -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.thread_time()
    tables = [table for key in HOSTILE if (table := table_of(key)) is not None]
    found = [table.find("a" * 500) for table in tables]
    took_s = time.thread_time() - started_s
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert len(found) >= 8
    # They take milliseconds and kilobytes; by backtracking most of them would not end.
    assert took_s < 60
    assert grown_kb < 512 << 10


def test_the_time_of_all_keys_and_paths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for keys in ({"(a{0,10}){0,100}b": 1}, {f"m{i}": i for i in range(4000)}):
        monkeypatch.setattr(bounded_parsing, "CPU_S_MAX", 0.05)
        table: PatternTable[int] = PatternTable(keys)
        with pytest.raises(PatternRefused, match=r"more than 0.05 s .* fewer keys"):
            [table.find("a" * 400 + str(number)) for number in range(100_000)]


def test_a_path_that_re_would_match_otherwise_needs_names() -> None:
    table = PatternTable({r"\w+": 1, "b": 2})
    with pytest.raises(PatternRefused, match="is not printable ASCII"):
        table.find("layers.\N{LATIN SMALL LETTER E WITH ACUTE}")
    assert PatternTable({"b": 2}).find("\N{LATIN SMALL LETTER E WITH ACUTE}.b") == 2


def test_only_plain_names_may_be_long_together() -> None:
    names = {f"model.layers.{i}.self_attn.q_proj": i for i in range(4000)}
    assert PatternTable(names).find("model.layers.3999.self_attn.q_proj") == 3999
    many = {f"^{name}": i for i, name in enumerate(list(names)[:1500])}
    assert PatternTable(many).find("model.layers.1499.self_attn.q_proj") == 1499
    with pytest.raises(PatternRefused, match="at most 65536"):
        PatternTable({f"^{name}": i for name, i in names.items()})

"""Tests of sizes such as `64MiB`: parsing and formatting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.server.startup.sizes import format_size, parse_size


@given(st.integers(0, 2**22), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_is_parsed_in_any_spelling(number, unit):
    power = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit or "B")
    for text in (f"{number}{unit}", f" {number} {unit.lower()} ", f"{number}.0{unit.upper()}"):
        assert parse_size(text) == number * 1024**power


@given(st.integers(0, 2**53))
def test_a_formatted_size_is_short_and_within_half_a_percent(size_bytes):
    shown = format_size(size_bytes)
    assert len(shown) <= len("0.976 TiB") or size_bytes >= 1000 * 1024**4
    number, unit = shown.split()
    read = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(read - size_bytes) <= 0.005 * size_bytes


def test_sizes_by_example():
    for text, size_bytes in {
        "64MiB": 64 << 20,
        "1.5 GiB": 3 << 29,
        "0.5KiB": 512,
        "2GB": 2 * 10**9,
        "3kB": 3000,
        "4096": 4096,
        "0.1 TB": 10**11,
    }.items():
        assert parse_size(text) == size_bytes
    for size_bytes, text in {
        0: "0 B",
        999: "999 B",
        1000: "0.977 KiB",
        1536: "1.5 KiB",
        64 << 20: "64 MiB",
        1 << 30: "1 GiB",
        1023 << 20: "0.999 GiB",
    }.items():
        assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("64M", "powers of 1024"),
        ("64 X", "powers of 1024"),
        ("0.3B", "whole number"),
        ("1.0001KiB", "whole number"),
        ("", "not a size"),
        ("-1", "not a size"),
        ("1e9", "not a size|unit"),
        ("MiB", "not a size"),
        ("1 2", "not a size"),
        ("0x10", "not a size"),
        ("٣", "not a size"),
        ("8388608TiB", "more than any machine has"),
        (f"{'9' * 400}GiB", "more than any machine has"),
    ],
)
def test_what_is_not_a_size_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_size(text)

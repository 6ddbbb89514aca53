"""Sizes and times: what people write, and what they read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.errors import InputError
from tightfit.units import format_bytes, format_enough, format_seconds, parse_bytes, parse_rate

SPELLINGS = ["KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512", 512),
        ("512B", 512),
        ("8KB", 8 * 10**3),
        ("8MB", 8 * 10**6),
        ("8GB", 8 * 10**9),
        ("8TB", 8 * 10**12),
        ("8KiB", 8 * 2**10),
        ("8MiB", 8 * 2**20),
        ("8GiB", 8 * 2**30),
        ("8TiB", 8 * 2**40),
        ("1.5 GiB", 3 * 2**29),
        (".5MB", 500_000),
        ("0.5 kib", 512),
        ("  12gb\n", 12 * 10**9),
        ("12GIB", 12 * 2**30),
        ("1.2345KB", 1234),
    ],
)
def test_a_size_is_read_as_it_is_spelled(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("size", [1, 8 * 10**9, 2**70])
def test_a_number_is_a_number_of_bytes(size: int) -> None:
    assert parse_bytes(size) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "8G",
        "8GBB",
        "8 gigs",
        "-8GB",
        "+8GB",
        "1e9",
        "8,5GB",
        "8.GB",
        "1.2.3GB",
        "8GB RAM",
        "0x10",
        "inf",
        "nan",
    ],
)
def test_what_is_no_size_is_refused_with_a_size_that_would_be(text: str) -> None:
    with pytest.raises(
        InputError, match=r"is not a size: write it like 8GB \(10⁹ bytes each\) or 8GiB \(2³⁰\)"
    ) as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)
    assert error.value.facts == {"size": text}


@pytest.mark.parametrize("size", [None, True, False, 8.0, [8]])
def test_what_is_neither_text_nor_whole_is_refused(size: object) -> None:
    with pytest.raises(InputError, match="is not a size"):
        parse_bytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, "0", "0GB", "0.0001B"])
def test_less_than_one_byte_is_refused(size: str | int) -> None:
    with pytest.raises(InputError, match="a size must be at least one byte, not ") as error:
        parse_bytes(size)
    assert error.value.facts == {"size": str(size)}


@settings(deadline=None)
@given(
    st.integers(1, 10**6),
    st.sampled_from(SPELLINGS),
    st.sampled_from(["", " "]),
    st.sampled_from([str.lower, str.upper]),
)
def test_case_and_space_do_not_matter(count: int, unit: str, space: str, spelled: object) -> None:
    assert callable(spelled)
    base = 1024 if "i" in unit else 1000
    assert parse_bytes(spelled(f"{count}{space}{unit}")) == count * base ** ("KMGT".index(unit[0]) + 1)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),  # never four digits
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (8 * 10**9, "7.45 GiB"),
        (8 * 2**30, "8 GiB"),
        (24_292_000_000, "22.6 GiB"),
        (99.94 * 2**20, "99.9 MiB"),
        (99.96 * 2**20, "100 MiB"),
        (999 * 2**30, "999 GiB"),
        (1000 * 2**30, "0.977 TiB"),
        (3 * 2**40, "3 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_a_size_is_written_in_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


@settings(deadline=None)
@given(st.integers(1, 999 * 2**40))
def test_what_is_written_reads_back_within_one_percent(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.01)


@settings(deadline=None)
@given(st.integers(0, 999 * 2**40))
def test_a_written_size_is_short(count: int) -> None:
    assert len(format_bytes(count)) <= len("0.999 GiB")


@settings(deadline=None)
@given(st.integers(1, 2**49), st.integers(1, 2**49))
def test_the_larger_is_never_written_as_the_smaller(one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert parse_bytes(format_bytes(small)) <= parse_bytes(format_bytes(large))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4238, "0.424 s"),
        (12.34, "12.3 s"),
        (59.4, "59.4 s"),
        (60, "1 min 00 s"),
        (65.4, "1 min 05 s"),
        (119.7, "2 min 00 s"),
        (3599, "59 min 59 s"),
        (3599.7, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_times_are_written_as_people_read_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_whole_numbers_of_any_length_stay_whole() -> None:
    assert parse_bytes("9007199254740993") == 9007199254740993
    assert parse_bytes("9" * 400) == int("9" * 400)


@settings(deadline=None)
@given(st.integers(1, 2**49))
def test_what_is_said_to_be_enough_is(size: int) -> None:
    said = parse_bytes(format_enough(size))
    assert size <= said <= max(1.015 * size, size + 1)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("100Gbit", 12.5e9), ("25 Gbit/s", 3.125e9), ("12.5GB/s", 12.5e9), (".5gb", 5e8), ("8bit", 1.0), ("1TB", 1e12)],
)
def test_rates_of_links(text: str, bytes_per_second: float) -> None:
    assert parse_rate(text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize(
    "text", ["", "100", "fast", "0Gbit", "-1GB", "1GiB", "1e9bit", "9" * 2000 + "bit", "9" * 400 + "Tbit"]
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(InputError, match="not the rate of a link"):
        parse_rate(text)

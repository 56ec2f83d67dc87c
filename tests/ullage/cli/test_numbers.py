import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.schedule.tasks import Lane
from ullage.cli.arguments import cores, fraction, parse_bytes, positive_float, positive_int, seconds
from ullage.output.formatting import LANE_WORDS, binds, duration, percent, si, signed_percent, sparkline


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("150MB", 150_000_000),
        ("1.5GiB", 1_610_612_736),
        ("2e9", 2_000_000_000),
        ("1e3 kB", 1_000_000),
        ("2KiB", 2048),
        ("3MiB", 3 * 2**20),
        ("4 tib", 4 * 2**40),
        ("5TB", 5_000_000_000_000),
        (".5kb", 500),
        ("1000", 1000),
        ("7B", 7),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "12 apples", "-1", "0", "0.4", "1e400", "nan", "1.5.2", "1KB2", "5 G B", "1 i"]
)
def test_no_sizes(text):
    with pytest.raises(ValueError, match="give bytes with an optional unit"):
        parse_bytes(text)


def test_a_small_number_lacks_its_unit():
    with pytest.raises(ValueError, match="'24' is 24 bytes; give the unit that is meant, as in 24GB"):
        parse_bytes("24")


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "x", "", "²"])
def test_no_counts(text):
    with pytest.raises(ValueError):
        positive_int(text)


@pytest.mark.parametrize("text", ["0", "-3", "inf", "nan", "x"])
def test_no_positive_numbers(text):
    with pytest.raises(ValueError):
        positive_float(text)


FACTORS = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


@given(st.floats(1e-7, 1e20))
@example(999.4)
@example(999.6)
@example(1.0)
@example(999_950.0)
def test_si_reads_back(value):
    number, unit = si(value, "B").split()
    assert math.isclose(float(number) * FACTORS[unit.removesuffix("B")], value, rel_tol=5.1e-3)
    assert 1 <= float(number) < 1000
    assert len(number.replace(".", "")) == 3


def test_si_examples():
    assert [si(v, "s") for v in (0, 2.666, 0.00459, 1234.5)] == ["0 s", "2.67 s", "4.59 ms", "1.23 ks"]
    assert si(-2.5e9, "B") == "-2.50 GB"
    assert (percent(0.123), signed_percent(0.1), signed_percent(-0.5)) == ("12.3 %", "+10.0 %", "-50.0 %")


@given(st.lists(st.integers(0, 100), min_size=1))
def test_sparkline_grows_with_its_values(values):
    line = sparkline(values, 100)
    assert len(line) == len(values)
    for a, x in zip(line, values, strict=True):
        assert (a == " ") == (x == 0)
        assert (a == "█") == (x >= 88)  # the top eighth
        for b, y in zip(line, values, strict=True):
            assert not (x < y and a > b)


def test_what_binds_is_stated_in_words_largest_first():
    assert set(LANE_WORDS) == set(Lane)
    message = binds({"h2d": 0.1, "compute": 0.895, "d2h": 0.005}, 1.0)
    assert message == "computing 89.5 %, copies of parameters to the device 10.0 %"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", "auto"), ("free", "free"), ("3", (3,)), ("0-3,8", (0, 1, 2, 3, 8)), ("2,0-2", (0, 1, 2)), ("4-3", ())],
)
def test_cores(text: str, expected: object) -> None:
    assert cores(text) == expected


@pytest.mark.parametrize("text", ["", "all", "1;2", "-1", "1-", "1,,2"])
def test_what_names_no_cores(text: str) -> None:
    with pytest.raises(ValueError, match="give auto, free, or a list such as 0-31,64-95"):
        cores(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("6h", 21600.0), (" 30 d", 2592000.0), ("1e9", 1e9)],
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1h", "h", "6 hours", "1e999", "nan"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="give 90s, 10m, 6h or 30d"):
        seconds(text)


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.5 %", 0.005), ("0.02", 0.02)])
def test_fractions(text: str, value: float) -> None:
    assert fraction(text) == value


@pytest.mark.parametrize("text", ["", "%", "0", "100%", "1", "-1%", "nan"])
def test_no_fractions(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("give 1% or 0.01")):
        fraction(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0032, "3.20 ms"),
        (45.0, "45.0 s"),
        (75.0, "1.25 min"),
        (750.0, "12.5 min"),
        (10_800.0, "3 h"),
        (216_000.0, "2.5 d"),
        (1e9, "31.7 years"),
        (math.inf, "more than 1000 years"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text

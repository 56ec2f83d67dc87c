import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.whatif.values import Number, expand, parse_number


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("64GB", "bytes", 64e9),
        ("1.5GiB", "bytes", 1.5 * 2**30),
        ("25GB/s", "bytes_per_s", 25e9),
        ("25G", "bytes_per_s", 25e9),
        ("300TFLOP/s", "flop_per_s", 300e12),
        ("2Gparam/s", "params_per_s", 2e9),
        ("10us", "s", 1e-5),
        ("5ms", "s", 5e-3),
        ("1.5", "s", 1.5),
        ("1e3", "count", 1e3),
        ("0", "", 0.0),
    ],
)
def test_absolute_values(text, unit, value):
    found = parse_number(text, unit)
    assert (found.value, found.relative) == (pytest.approx(value, rel=1e-15), False)


def test_factors():
    assert parse_number("2x", "bytes") == Number(2.0, relative=True)
    assert parse_number("0.5x", "") == Number(0.5, relative=True)


@pytest.mark.parametrize(
    ("text", "unit"), [("64GB", "s"), ("10us", "bytes"), ("0x", "bytes"), ("-1", ""), ("fast", "")]
)
def test_what_is_no_value_names_one_that_is(text, unit):
    with pytest.raises(ValueError, match=r"give .*factor such as 2x"):
        parse_number(text, unit)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 7))
def test_ranges_are_those_of_python(low, length, step):
    high = low + length
    assert expand(f"{low}..{high}", whole=True) == [str(i) for i in range(low, high + 1)]
    assert expand(f"{low}..{high}..{step}", whole=False) == [str(i) for i in range(low, high + 1, step)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,4", ["1", "2", "4"]),
        ("1x..8x..*2", ["1x", "2x", "4x", "8x"]),
        ("10..40..10GB/s", ["10GB/s", "20GB/s", "30GB/s", "40GB/s"]),
        ("0.1..0.3..0.1", ["0.1", "0.2", "0.3"]),
        ("h100,a100-80", ["h100", "a100-80"]),
        ("1,4..6", ["1", "4", "5", "6"]),
        ("0.5x..4x", [("0.5x", "4x")]),
    ],
)
def test_lists_and_ranges(text, values):
    assert expand(text, whole=True) == values


@pytest.mark.parametrize("text", ["4..1", "1..8..*1", "0..8..*2", "1..2..0", "1,,2", "1GB..2s..1", "a..b", "0..1e9"])
def test_bad_ranges_are_refused(text):
    with pytest.raises(ValueError, match="; "):
        expand(text, whole=True)

"""Parse values of fields: ``2x``, ``64GB``, ``25GB/s``, ``10us``, ``0..12``, ``1..64..*2``."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Final, Literal

Design = Literal["cartesian", "zip", "random"]
Question = Literal["fits", "cheapest", "upgrade", "scale", "longest", "largest"]

# Spellings of a unit after the prefix of a number, by the unit of the field.
_UNIT_WORDS: Final = {
    "bytes": ("B",),
    "bytes_per_s": ("B/s", "Bps"),
    "flop_per_s": ("FLOP/s", "FLOPS"),
    "params_per_s": ("param/s", "params/s"),
    "s": ("s",),
    "ratio": (),
    "count": (),
    "": (),
}
_PREFIXES: Final = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_PREFIXES_LARGE: Final = {"T": 1e12, "P": 1e15, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_VALUE = re.compile(rf"({_NUMBER})\s*(.*)")
_RANGE = re.compile(rf"({_NUMBER})([^.]*)\.\.({_NUMBER})([^.]*)(?:\.\.(\*?)({_NUMBER})([^.]*))?")
_MOST_VALUES: Final = 10_000


@dataclasses.dataclass(frozen=True)
class Number:
    """A number; if ``relative``, a factor of the present value. With ``high``, any number up to that."""

    value: float
    relative: bool = False
    high: float | None = None

    def at(self, share: float) -> "Number":
        """Return the number at a fraction of the interval, on a logarithmic scale if both ends are above 0."""
        if (high := self.high) is None:
            return self
        low = self.value
        return Number(low * (high / low) ** share if low > 0 else low + (high - low) * share, self.relative)


def parse_number(text: str, unit: str) -> Number:
    """Parse a number with an optional prefix and unit.

    Args:
        text: text such as ``2x`` (a factor), ``64GB``, ``1.5e9``.
        unit: unit of the field: ``bytes``, ``bytes_per_s``, ``flop_per_s``, ``params_per_s``, ``s``, or empty.

    Raises:
        ValueError: the text is not a number, is below 0, or has another unit.
    """
    if found := _VALUE.fullmatch(text.strip()):
        value, suffix = float(found[1]), found[2].strip()
        if suffix == "x" and value > 0:
            return Number(value, relative=True)
        if (scale := _scale(suffix, unit)) is not None and math.isfinite(value * scale):
            return Number(value * scale)
    raise ValueError(f"{text!r} is not a value in {unit or 'plain numbers'}; give {example(unit)}")


def example(unit: str) -> str:
    """Return example values of a field with a unit, for error messages."""
    own = {
        "bytes": "64GB or 1.5GiB",
        "bytes_per_s": "25GB/s",
        "flop_per_s": "300TFLOP/s",
        "params_per_s": "2Gparam/s",
        "s": "10us or 1.5s",
    }.get(unit, "a number such as 4")
    return f"{own}, or a factor such as 2x"


def expand(text: str, *, whole: bool) -> list[str | tuple[str, str]]:
    """Return the values of a list such as ``1,2,4``, ``0..12`` or ``1x..8x..*2``.

    Args:
        text: values and ranges, separated by commas. ``a..b`` has a step of 1 if numbers are ``whole``, ``a..b..s`` has
            the step s, and ``a..b..*r`` the ratio r. A unit after one of a range's numbers applies to all of them.
        whole: the field takes only whole numbers.

    Returns:
        The values as texts; a range without a step is a pair of its ends.

    Raises:
        ValueError: a range is empty, endless or too long, or has two units.
    """
    values: list[str | tuple[str, str]] = []
    for part in text.split(","):
        values += _range(part.strip(), whole=whole) if ".." in part else [part.strip()]
    if not all(values):
        raise ValueError(f"{text!r} has an empty value; separate values by single commas, as in 1,2,4")
    return values


def _range(text: str, *, whole: bool) -> Iterator[str | tuple[str, str]]:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a range; give 0..12, 10..40..10GB/s or 1x..8x..*2")
    suffixes = {suffix for suffix in (found[2], found[4], found[7]) if suffix}
    if len(suffixes) > 1:
        raise ValueError(f"{text!r} is in {' and in '.join(sorted(suffixes))}; write the unit once")
    suffix = suffixes.pop() if suffixes else ""
    low, high = float(found[1]), float(found[3])
    if low > high:
        raise ValueError(f"{text!r} is empty: {found[1]} is above {found[3]}; begin with the smaller one")
    if found[6] is None and not (whole and not suffix):
        yield f"{found[1]}{suffix}", f"{found[3]}{suffix}"
        return
    step, by_ratio = float(found[6] or 1), bool(found[5])
    if step <= (1 if by_ratio else 0) or (by_ratio and low == 0):
        raise ValueError(f"{text!r} never ends; give a step above 0, or a ratio above 1 from a number above 0")
    slack, count = (high - low) * 1e-9, 0
    while (value := low * step**count if by_ratio else low + step * count) <= high + slack:
        yield f"{value:.12g}{suffix}"
        count += 1
        if count > _MOST_VALUES:
            raise ValueError(f"{text!r} has more than {_MOST_VALUES} values; give a larger step")


def _scale(suffix: str, unit: str) -> float | None:
    """Return the factor of a prefix, with or without the unit; ``None`` if the suffix has another unit."""
    words = ("", *_UNIT_WORDS[unit])
    for word in sorted(words, key=len, reverse=True):
        prefix = suffix.removesuffix(word) if word else suffix
        if suffix.endswith(word) and (scale := (_PREFIXES | _PREFIXES_LARGE).get(prefix)) is not None:
            return scale
    return None

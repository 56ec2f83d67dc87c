"""Types of command-line arguments. Each error states the value, the rule and an example."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.terms import LEVELS, AuditTime, CoreChoice, Level

if TYPE_CHECKING:
    from planner.models.adapters import Lora
    from planner.models.captured import CapturedInput

WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a weight in a saved model, by the name of its type."""

_OF_TRAINERS = (".jsonl", ".json", ".parquet", ".arrow", ".csv")

_MOST_COUNT = 10**9
_MOST = 2**62 - 1

_CORES = re.compile(r"(\d+)(?:-(\d+))?")
_AMOUNT = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*|%)", re.IGNORECASE)
_BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BINARY_BYTES = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SHARE = "a share between 0 and 1; give 1% or 0.01"
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _amount(text: str, units: Mapping[str, float], rule: str, least: float = math.ulp(0.0)) -> float:
    """Return a number times its unit; it must be finite and at least ``least``. ``rule`` is the end of the error."""
    found = _AMOUNT.fullmatch(text.strip())
    value = float(found[1]) * units.get(found[2].lower(), math.nan) if found else math.nan
    if not least <= value < math.inf:
        raise ValueError(f"{text!r} is not {rule}")
    return value


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``150MB``, ``1.5GiB`` or ``2e9`` (kB, MB, GB, TB are powers of 1000).

    Raises:
        ValueError: the text is not a size, is less than one byte, or seems to lack its unit.
    """
    rule = "a size; give bytes with an optional unit: 150MB, 1.5GiB, 2e9"
    found = round(_amount(text, _BYTES | _BINARY_BYTES, rule, least=1))
    if found < 1000 and text.strip()[-1].isdigit():
        raise ValueError(f"{text!r} is {found} bytes; give the unit that is meant, as in {text}GB")
    return found


def positive_int(text: str) -> int:
    """Return a whole number from 1 to a thousand million.

    Raises:
        ValueError: it is not one.
    """
    return _whole(text, 1, _MOST_COUNT)


def non_negative_int(text: str) -> int:
    """Return a whole number of at least 0 that fits in 62 bits, such as a data position or a seed.

    Raises:
        ValueError: it is not one.
    """
    return _whole(text, 0, _MOST)


def _whole(text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a whole number from {least} on")
    digits = text.lstrip("0") or "0"  # Python refuses to read thousands of digits
    if len(digits) > len(str(most)) or int(digits) > most:
        raise ValueError(f"{text[:40]!r} is too large; give a whole number of at most {most}")
    if int(digits) < least:
        raise ValueError(f"{text!r} is not a whole number from {least} on")
    return int(digits)


def switch(text: str) -> bool:
    """Return whether a text such as ``yes`` means yes.

    Raises:
        ValueError: it means neither yes nor no.
    """
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(f"{text!r} is neither yes nor no; give one of them")
    return known[text.lower()]


def parts(text: str, readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Return the values in a text such as ``tensor=2,pipeline=4`` or ``corpus.bin,dtype=uint16``, by their names.

    Args:
        text: what stands before all names, if ``readers`` has one for ``""``, and then named values.
        readers: function that reads a value, by name.

    Raises:
        ValueError: a name is unknown or is given twice, or a value is wrong.
    """
    pieces, found = text.split(","), {}
    while pieces:
        name, equals, value = pieces[-1].partition("=")
        if not (equals and name in readers):
            break
        if name in found:
            raise ValueError(f"{text!r} has {name} twice; give it once")
        found[name] = value
        pieces.pop()
    names = ", ".join(f"{name}=..." for name in readers if name)
    values = {name: readers[name](value) for name, value in found.items()}
    if first := ",".join(pieces):
        if "" not in readers:
            raise ValueError(f"{pieces[-1]!r} in {text!r} is not understood; give one of {names}")
        try:
            values[""] = readers[""](first)
        except ValueError as error:
            raise ValueError(f"{error}, or {names}") from error
    return values


def counts(text: str) -> dict[str, int]:
    """Return numbers by name, from ``a100-80=4,v100=2``.

    Raises:
        ValueError: a name is empty or is given twice, or what follows is no number of at least 1.
    """
    found: dict[str, int] = {}
    for piece in text.split(","):
        name, equals, value = piece.rpartition("=")
        if not (name and equals) or name in found:
            raise ValueError(f"{text!r} must name each kind once, with its number, as in a100-80=4")
        found[name] = positive_int(value)
    return found


def choice(*known: str) -> Callable[[str], str]:
    """Return a function that returns one of the known values, and refuses others."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}; give one of them")
        return text

    return read


def saved_weights(text: str) -> dict[str, Any]:
    """Return the folder (by ``""``) and the type of weights in ``DIR[,dtype=TYPE]``; see :func:`parts`."""
    return parts(text, {"": Path, "dtype": choice(*WEIGHT_BYTES)})


def data(text: str) -> dict[str, Any]:
    """Return what to train on, from a text such as ``corpus.npy`` or ``corpus.bin,dtype=uint16,skip=8000``.

    The path of the file is named ``""``. ``dtype`` is the type of the tokens in a raw file, and ``skip`` a number of
    sequences.

    Raises:
        ValueError: the text does not say it, or a trainer of ``transformers`` trains on such a file.
    """
    found = parts(text, {"": Path, "dtype": choice("uint16", "uint32"), "skip": non_negative_int})
    path = found.get("")
    if path is not None and path.suffix in _OF_TRAINERS:
        raise ValueError(
            f"{path} is for a trainer: `ullage.offloaded(trl.SFTTrainer)(model=model, train_dataset=data).train()` in "
            "Python, with its options for chats, packing, epochs and evaluation; docs/howto/data.md has the whole "
            "program"
        )
    return found


def audit(text: str) -> AuditTime:
    """Return when to audit: ``first``, ``off``, or a number of iterations.

    Raises:
        ValueError: the text is none of these.
    """
    words: dict[str, AuditTime] = {"first": "first", "off": "off"}
    if text in words:
        return words[text]
    try:
        return positive_int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not first, off, or a whole number from 1 on") from None


def cores(text: str) -> CoreChoice:
    """Return the core numbers of a list such as ``0-3,8``; ``auto`` and ``free`` are returned as they are.

    Raises:
        ValueError: the text is none of these.
    """
    words: dict[str, CoreChoice] = {"auto": "auto", "free": "free"}
    if text in words:
        return words[text]
    found: list[int] = []
    for part in text.split(","):
        if (bounds := _CORES.fullmatch(part)) is None:
            raise ValueError(f"{text!r} names no cores; give auto, free, or a list such as 0-31,64-95")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        found += range(first, last + 1)
    return tuple(sorted(set(found)))


def positive_float(text: str) -> float:
    """Return a finite number above 0.

    Raises:
        ValueError: it is not one.
    """
    return _amount(text, {"": 1}, "a number above 0")


def tokens(text: str) -> float:
    """Return a number of tokens such as ``300B``, ``1.5T`` or ``2e9`` (k, M, B, T are powers of 1000).

    Raises:
        ValueError: the text is not a number, or not above 0.
    """
    return _amount(text, _COUNTS, "a number of tokens; give 300B, 1.5T or 2e9")


def input_shape(text: str) -> "CapturedInput":
    """Return the input of a captured model that the text describes; see :meth:`CapturedInput.read`.

    Raises:
        ValueError: the text does not describe an input.
    """
    from planner.models.captured import CapturedInput  # noqa: PLC0415 - slow to import, and seldom needed

    return CapturedInput.read(text)


def lora(text: str) -> "Lora | None":
    """Return adapters from a text such as ``rank=16,targets=q_proj+v_proj``; ``None`` for ``none``.

    Raises:
        ValueError: the text does not describe adapters.
    """
    from planner.models.adapters import Lora  # noqa: PLC0415 - slow to import, and seldom needed

    return None if text == "none" else Lora.read(text)


def seconds(text: str) -> float:
    """Return the seconds of a time such as ``90s``, ``10m``, ``6h`` or ``30d``; a number without unit is seconds.

    Raises:
        ValueError: the text is not a time, or not above 0.
    """
    return _amount(text, _SECONDS, "a time above 0; give 90s, 10m, 6h or 30d")


def fraction(text: str) -> float:
    """Return a fraction from a text such as ``1%`` or ``0.01``.

    Raises:
        ValueError: the fraction is not between 0 and 1.
    """
    if (value := _amount(text, {"": 1, "%": 0.01}, _SHARE)) >= 1:
        raise ValueError(f"{text!r} is not {_SHARE}")
    return value


def mtbf(text: str) -> dict[Level, float]:
    """Return times between failures in seconds by level, from ``6h`` or ``memory=2h,nvme=1d,pfs=30d``.

    A time without a level is for failures that every durable level survives: the node's drives and slower levels.

    Raises:
        ValueError: the text has neither form.
    """
    found = parts(text, {"": seconds, **dict.fromkeys(LEVELS, seconds)})
    if {"", "nvme"} <= found.keys():
        raise ValueError(f"{text!r} has nvme twice: a time without a level is for nvme; give one")
    return {level: found[level] for level in LEVELS if level in found} | ({"nvme": found[""]} if "" in found else {})

"""Changes with which a request that does not fit in memory would fit."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.choices.request import Request
from planner.models.adapters import Lora
from planner.models.choice import DEGREES
from planner.plan.remedies import what_would_fit
from ullage.cli.options import Options, is_captured
from ullage.cli.request import trained


class Remedy(NamedTuple):
    """A change with which a request fits.

    Attributes:
        change: options or words.
        iteration_s: predicted seconds of an iteration, from a very short search.
        effect: effect on training, beside memory; empty if it has none.
    """

    change: str
    iteration_s: float
    effect: str


def remedies_of(asked: Options, request: Request) -> Iterator[Remedy]:
    """Yield, for every kind of change, the smallest one that makes a request fit, as soon as it is found."""
    for words, iteration_s in what_would_fit(request, functools.partial(_with_adapters, asked)):
        yield Remedy(words, iteration_s, _effect_words(words))


def _with_adapters(asked: Options, request: Request) -> Iterator[tuple[str, Request]]:
    """Yield requests with adapters in place of all weights, and then with quantized frozen weights, if not given."""
    shared = (getattr(asked, name) for name in DEGREES if name != "data_parallel")
    if (
        is_captured(asked.model) or max(count or 1 for count in shared) > 1
    ):  # models with adapters are captured, and a capture cannot be shared by ranks
        return
    ways: list[tuple[str, dict[str, Any]]] = [("--lora rank=16", {"lora": Lora(rank=16)})] if asked.lora is None else []
    if asked.quantize in {None, "none"}:
        ways.append((" ".join([*(words for words, _ in ways), "--quantize nf4"]), {"quantize": "nf4"}))
    changed: dict[str, Any] = {}
    on_gpu = request.hardware.device.kind == "gpu"
    for words, options in ways:
        changed |= options
        with contextlib.suppress(ValueError):  # a library is missing, or the model has no projections
            model, seq_len, _ = trained(dataclasses.replace(asked, **changed), request.types, as_on_gpu=on_gpu)
            yield words, dataclasses.replace(request, model=model, seq_len=seq_len)


def _effect_words(words: str) -> str:
    """Return the effect of a change on training, beside memory; empty if it has none."""
    if "--lora" in words:
        return "only adapters are trained; all other weights stay as they are" + (
            ", rounded to 4 bits" if "--quantize" in words else ""
        )
    return "the frozen weights are rounded to 4 bits" if "--quantize" in words else ""

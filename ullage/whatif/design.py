"""The points of a study: axes, their values, and combinations of values."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hwprofiles.registry import load_profile
from ullage.cli.default_hardware import default_hardware
from ullage.cli.request import checkpoints_of, request_of, trained, types_of, with_pfs
from ullage.whatif.fields import (
    Field,
    changed_machine,
    changed_model,
    field_named,
    fields_of,
    of_machine,
    of_model,
    options_of,
)
from ullage.whatif.running.point import Effort, PointRequest, digest_of
from ullage.whatif.study import Axis, Result, StudyRequest, Value, Varied
from ullage.whatif.values import Number

MAX_POINTS: Final = 1_000_000
Level = Number | Value


class Space:
    """The points of a study.

    Args:
        request: the request of the study.
        effort: effort for each point. Default: a plan, with a proof if the request asks for one.

    Attributes:
        effort: effort for each point.
        fields: all fields that can be varied, by name.
        axes: the fields that vary.

    Raises:
        ValueError: a field or value does not exist, or the values cannot be combined as the design says.
    """

    def __init__(self, request: StudyRequest, effort: Effort | None = None) -> None:
        self.request = request
        self.effort: Effort = effort or ("certify" if request.certify else "plan")
        self._default_hardware = default_hardware()[0]
        self.fields = _fields(request, self._default_hardware)
        self._set = {self.field(name).name: self.field(name).parse(text) for name, text in request.set.items()}
        self._levels = {self.field(name).name: self._levels_of(name, texts) for name, texts in request.sweep.items()}
        if twice := sorted(self._set.keys() & self._levels.keys()):
            raise ValueError(f"{twice[0]} is both set and swept; leave out one of them")
        if request.design == "random" and request.num_points is None:
            raise ValueError("a random design needs a number of points; give --design random,points=100")
        self._rows = self._combined()
        self.axes = tuple(self._axis(name, position) for position, name in enumerate(self._levels))

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self._rows)

    def field(self, name: str) -> Field:
        """Return a field by any of its names; see :func:`ullage.whatif.fields.field_named`."""
        return field_named(name, self.fields)

    def cases(self) -> Iterator[PointRequest]:
        """Yield the points in the order of the design; the last axis varies fastest."""
        names = list(self._levels)
        return (self.case(dict(zip(names, row, strict=True))) for row in self._rows)

    @property
    def hardware(self) -> str:
        """Name of the machine of points that do not set another."""
        return str(self._set.get("hardware", self._default_hardware))

    def values(self, name: str) -> list[Value]:
        """Return the values of a field in the order in which they were given; that of all points is one."""
        if name in self._levels:
            return [_plain(level) for level in self._levels[name]]
        return [_plain(self._set[name])] if name in self._set else []

    def case(self, levels: Mapping[str, Level], effort: Effort | None = None) -> PointRequest:
        """Return the point at some values of axes or other fields.

        Args:
            levels: values by name of the field. They override values that the study sets.
            effort: effort for the point. Default: that of the study.
        """
        given = {**self._set, **levels}
        kinds = {name: self.field(name).kind for name in given}
        options: dict[str, Any] = {"hardware": self._default_hardware}
        options |= {name: value for name, value in given.items() if kinds[name] == "option"}
        machine, model = ({n: v for n, v in given.items() if kinds[n] == k} for k in ("machine", "model"))
        settings = {name: _plain(level) for name, level in levels.items()}
        varied: dict[str, Varied] = {}
        names = {name: str(options.get(name, "")) for name in ("hardware", "model")}
        try:
            asked = options_of(options)
            checkpoints = checkpoints_of(asked)
            request = request_of(
                asked,
                lambda whole: _recorded(whole, changed_machine(whole, machine), machine, of_machine, varied),
                lambda whole: _recorded(whole, changed_model(whole, model), model, of_model, varied),
            )
            if asked.pfs_bandwidth is not None:
                request = dataclasses.replace(request, hardware=with_pfs(request.hardware, asked.pfs_bandwidth))
        except ValueError as error:
            refused = Result(status="refused", reason=" ".join(str(error).split()))
            return PointRequest(settings, varied, names["hardware"], names["model"], None, "", refused)
        key = digest_of(request, effort or self.effort, checkpoints)
        return PointRequest(
            settings, varied, request.hardware.name, request.model.name, request, key, checkpoints=checkpoints
        )

    def _levels_of(self, name: str, texts: Sequence[str]) -> list[Level]:
        field = self.field(name)
        levels: list[Level] = []
        for text in itertools.chain.from_iterable(map(field.values, texts)):
            if isinstance(text, str):
                levels.append(field.parse(text))
                continue
            low, high = (field.parse(end) for end in text)
            if self.request.design != "random" or not isinstance(low, Number) or not isinstance(high, Number):
                raise ValueError(
                    f"{name}={text[0]}..{text[1]} has no step; give one, as in 1x..4x..0.5x or 1x..8x..*2, or draw "
                    "values with --design random"
                )
            if low.relative is not high.relative:
                raise ValueError(f"{name} mixes factors and absolute values; give all values as factors (2x), or none")
            levels.append(dataclasses.replace(low, high=high.value))
        if not levels:
            raise ValueError(f"{name} has no values; give some, as in {name}=1,2,4")
        if len({_is_relative(level) for level in levels}) > 1:
            raise ValueError(f"{name} mixes factors and absolute values; give all values as factors (2x), or none")
        return levels

    def _combined(self) -> list[tuple[Any, ...]]:
        """Return one row of values for each point."""
        levels, design = list(self._levels.values()), self.request.design
        total = math.prod(map(len, levels))
        if design == "random" and levels:
            return self._drawn(levels, total)
        if design == "zip" and len({len(of_axis) for of_axis in levels}) > 1:
            counts = ", ".join(f"{name} {len(of_axis)}" for name, of_axis in self._levels.items())
            raise ValueError(f"--design zip needs the same number of values on each axis, but there are {counts}")
        if design == "cartesian" and total > MAX_POINTS:
            raise ValueError(
                f"all combinations are {total:,} points, more than {MAX_POINTS:,}; give fewer values, or draw some "
                "with --design random,points=1000"
            )
        rows = zip(*levels, strict=True) if design == "zip" and levels else itertools.product(*levels)
        return list(rows)

    def _drawn(self, levels: Sequence[Sequence[Level]], total: int) -> list[tuple[Any, ...]]:
        """Draw random points. If the number of combinations is finite, no point is drawn twice."""
        rng, count = random.Random(self.request.seed), self.request.num_points or 0  # noqa: S311 - not for secrets
        if any(isinstance(level, Number) and level.high is not None for of_axis in levels for level in of_axis):
            picked = ([rng.choice(of_axis) for of_axis in levels] for _ in range(count))
            return [
                tuple(level.at(rng.random()) if isinstance(level, Number) else level for level in row) for row in picked
            ]
        positions = rng.sample(range(total), min(count, total))
        places = np.unravel_index(positions, [len(of_axis) for of_axis in levels])
        return [
            tuple(of_axis[at] for of_axis, at in zip(levels, row, strict=True)) for row in zip(*places, strict=True)
        ]

    def _axis(self, name: str, position: int) -> Axis:
        field = self.field(name)
        values = tuple(dict.fromkeys(_plain(row[position]) for row in self._rows))
        relative = any(_is_relative(row[position]) for row in self._rows)
        if self.request.design == "random":
            values = tuple(sorted(values, key=lambda value: (isinstance(value, str), value)))
        return Axis(name=name, words=field.words, unit=field.unit, relative=relative, values=values)


def _fields(request: StudyRequest, default_hardware: str) -> dict[str, Field]:
    """Return the fields of the base point. If there are several machines or models, the first one counts."""
    first = {
        name: Field(name, "option", "").values(",".join(texts))[0] for name, texts in request.sweep.items() if texts
    }
    texts = {name.removeprefix("--").replace("-", "_"): str(text) for name, text in {**first, **request.set}.items()}
    if "model" not in texts:
        raise ValueError("a study needs a model; give --model opt-13b, or --sweep model=opt-13b,opt-30b")
    named = ("model", "hardware", "input_shape", "precision", "master", "lora", "quantize", "batches")
    options = {name: Field(name, "option", "").parse(texts[name]) for name in named if name in texts}
    hardware = load_profile(str(options.get("hardware", default_hardware)))
    as_on_gpu, given = hardware.device.kind == "gpu", options_of(options)
    model, *_ = trained(given, types_of(given, hardware), as_on_gpu=as_on_gpu)
    return fields_of(hardware, model)


def _recorded(before: Any, after: Any, changes: Mapping[str, Level], read: Any, varied: dict[str, Varied]) -> Any:
    """Return ``after``, and record in ``varied`` every number that differs from ``before``."""
    for name in changes:
        try:
            now: Value | None = read(after, name)
        except ValueError:  # the field no longer exists, such as drives
            now = None
        varied[name] = Varied(before=read(before, name), after=now)
    return after


def _is_relative(level: Level) -> bool:
    return isinstance(level, Number) and level.relative


def _plain(level: Level) -> Value:
    if not isinstance(level, Number):
        return level
    value = float(level.value)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value

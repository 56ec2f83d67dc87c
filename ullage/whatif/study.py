"""The file of a study: the request, and the result of every point.

A file with only ``request`` is a study to be run (``ullage whatif STUDY``). A finished study also has ``points``, and
can be run again. Numbers are in the base unit of their field (bytes, seconds, amounts per second). If an axis is
*relative*, its numbers are factors of the value of the machine or model.
"""

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from hwprofiles.complaints import read_document
from hwprofiles.quantity import Frozen
from planner.schedule.tasks import Lane, Tier
from planner.simulate.prediction import Prediction
from planner.terms import Level
from ullage.whatif.prices import Prices
from ullage.whatif.values import Design, Question

SCHEMA_VERSION: Final = 3

Value = bool | int | float | str
Status = Literal["fits", "lacks-memory", "refused", "failed"]


class StudyRequest(Frozen):
    """The request of a study.

    Attributes:
        set: fields that are the same at every point, by name, as on the command line (``2x``, ``64GB``, ``h100``);
            ``model`` is one of them.
        sweep: fields that vary, each with its values, in the order of the table's columns.
        design: ``cartesian``: all combinations of values; ``zip``: the first values of all axes, then the second, and
            so on; ``random``: independent random values.
        num_points: number of points of a ``random`` design.
        seed: seed of a ``random`` design.
        certify: prove for every point how far its plan can be from the best.
        tokens: tokens of a whole run; ``None``: costs are only per token.
        deadline_s: seconds within which the run must end; ``None``: no deadline.
        question: the question that chose the axes, if any.
    """

    set: dict[str, str]
    sweep: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    design: Design = "cartesian"
    num_points: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    certify: bool = False
    tokens: Annotated[float, Field(gt=0)] | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    question: Question | None = None


class Axis(Frozen):
    """One field that varies.

    Attributes:
        name: name of the field.
        words: description of the field.
        unit: unit of its values, such as ``bytes`` or ``bytes_per_s``; empty for counts and text.
        relative: values are factors of the present value.
        values: all values, in the order of the request.
    """

    name: str
    words: str
    unit: str = ""
    relative: bool = False
    values: tuple[Value, ...]


class Varied(Frozen):
    """One field at one point, in its unit.

    Attributes:
        before: the value without the study's change; ``None`` if the field did not exist.
        after: the value at the point.
    """

    before: Value | None = None
    after: Value | None = None


class Checkpoints(Frozen):
    """Intervals of checkpoints for the failures of a point, and the cost of both.

    Attributes:
        every: iterations between checkpoints by level, fastest first.
        waste: expected fraction of the time that is lost to checkpoints and failures.
        overhead: time that checkpoints add to training, as a fraction of the training time.
        most_lost_s: maximum seconds of work that one failure loses.
    """

    every: dict[Level, int]
    waste: Annotated[float, Field(ge=0, lt=1)]
    overhead: float
    most_lost_s: float


class Figures(Prediction):
    """The prediction for a point's plan, with the following fields and those of plans.

    Attributes:
        tokens_per_iteration: over all devices.
        num_devices, num_nodes: in use.
        choice: parallel degrees and batch in words.
        placement: placement of state and activations in words.
        engines: predicted seconds per iteration of engine policies; ``None`` for those that do not fit.
        bound_s: proven lower bound on the iteration time; ``None`` unless requested.
        gap: how much slower the plan is than the bound, as a fraction.
        num_simulations: number of schedules that the search simulated.
        checkpoints: checkpoints for the failures of the point; ``None`` without failures.
    """

    tokens_per_iteration: int
    num_devices: int
    num_nodes: int
    choice: str
    placement: str
    engines: dict[str, float | None]
    bound_s: float | None = None
    gap: float | None = None
    num_simulations: int
    checkpoints: Checkpoints | None = None

    @property
    def bound_by(self) -> Lane:
        """The lane with the largest share of the critical path."""
        return Lane(next(iter(self.critical_s)))

    @property
    def goodput_tokens_per_s(self) -> float:
        """Tokens per second over all the time, including checkpoints and failures."""
        return self.tokens_per_s * (1 - self.checkpoints.waste if self.checkpoints else 1)


class Result(Frozen):
    """The result of planning a point. It depends only on the point.

    Attributes:
        status: ``fits``; ``lacks-memory``: no plan was found that fits; ``refused``: the request is not possible
            (degrees that do not divide, a machine without a network); ``failed``: the planner failed, which is a bug.
        reason: the reason in one line if there is no plan.
        missing_bytes: memory that the best trial lacks, by tier.
        proven: it is proven that no schedule fits.
        figures: figures of the plan.
    """

    status: Status
    reason: str | None = None
    missing_bytes: dict[Tier, int] = Field(default_factory=dict)
    proven: bool = False
    figures: Figures | None = None


class Cost(Frozen):
    """The cost of a point in the currency of the prices.

    Attributes:
        per_hour: cost per hour of all nodes in use.
        per_million_tokens: cost at the predicted speed, with checkpoints and failures if the point has any.
        run_s: seconds of the whole run.
        run: cost of the whole run.
        in_time: whether the run ends within the deadline; ``None`` without a deadline.
    """

    per_hour: float
    per_million_tokens: float
    run_s: float | None = None
    run: float | None = None
    in_time: bool | None = None


class Point(Frozen):
    """One point of a study.

    Attributes:
        settings: the value of every axis.
        varied: every number of the machine or the model that the study changes.
        hardware, model: names of machine and model.
        key: digest of everything that determines the result.
        result: result of planning.
        cost: cost, if the point fits and has a price.
        on_front: no other point is both faster and cheaper per token.
    """

    settings: dict[str, Value]
    varied: dict[str, Varied] = Field(default_factory=dict)
    hardware: str
    model: str
    key: str
    result: Result
    cost: Cost | None = None
    on_front: bool = False

    @property
    def figures(self) -> Figures | None:
        """Figures of the point, if it fits."""
        return self.result.figures if self.result.status == "fits" else None

    @property
    def goodput_tokens_per_s(self) -> float:
        """See :class:`Figures`; 0 if the point does not fit."""
        return self.figures.goodput_tokens_per_s if self.figures else 0.0


class Side(Frozen):
    """The result of planning with more or less of a resource.

    Attributes:
        factor: factor of the present value.
        value: value of the resource in its unit.
        iteration_s: iteration time of the plan; ``None`` if no plan fits.
        bound_by: the lane that bounds the plan.
    """

    factor: float
    value: float
    iteration_s: float | None = None
    bound_by: Lane | None = None


AS_GOOD_AS_NONE: Final = 0.05
"""Smaller elasticities may be errors of the search; see :mod:`ullage.whatif.sensitivity`."""


class Sensitivity(Frozen):
    """The effect of one resource on the study's base point, planned anew with more and with less of it.

    Attributes:
        name: name of the field.
        words: description of the field.
        unit: unit of the value.
        value: present value.
        less, more: results with less and with more of the resource.
        elasticity_less, elasticity_more: relative change of the iteration time per relative change of the resource on
            each side (d ln T / d ln r). -1: inversely proportional; 0: no effect. They differ if the best plan changes.
            ``None``: no plan fits there.
        step_words: a step that people buy, such as ``1 GB/s`` or ``1 core``.
        seconds_per_step: change of the iteration time for one more step, from ``elasticity_more``.
        below, above: just beyond the nearest values at which another lane binds; ``None`` if there is none within the
            searched range.
    """

    name: str
    words: str
    unit: str
    value: float
    less: Side
    more: Side
    elasticity_less: float | None = None
    elasticity_more: float | None = None
    step_words: str
    seconds_per_step: float | None = None
    below: Side | None = None
    above: Side | None = None

    @property
    def saved_s(self) -> float | None:
        """Seconds that one more step saves; 0 if the effect is negligible, ``None`` if no plan fits there."""
        if self.seconds_per_step is None or self.elasticity_more is None:
            return None
        return -self.seconds_per_step if abs(self.elasticity_more) >= AS_GOOD_AS_NONE else 0.0


class Sensitivities(Frozen):
    """The effect of every resource around one point.

    Attributes:
        base: result of the point.
        step: relative change of each resource.
        range: crossings were searched from one over this factor to this factor.
        rows: effects, largest first.
    """

    base: Result
    step: float
    range: float
    rows: tuple[Sensitivity, ...]


class Minimum(Frozen):
    """The least amounts of one machine with which a plan was found, each varied alone.

    Attributes:
        hardware: name of the profile.
        num_devices: least number of devices.
        device_memory_bytes: memory of each device.
        host_memory_bytes: host memory of each node.
        num_drives: drives of each node; ``None`` if the study may not use drives or needs none.
    """

    hardware: str
    num_devices: int
    device_memory_bytes: float
    host_memory_bytes: float
    num_drives: int | None = None


class Answer(Frozen):
    """The answer to a question.

    Attributes:
        question: the question.
        words: the answer in sentences, one per line.
        points: indices of the points that the answer rests on, best first.
        least: least amounts of each machine (question ``fits``).
        efficiency: for every point, speed per device relative to the smallest number of devices that fits (question
            ``scale``).
    """

    question: Question
    words: tuple[str, ...]
    points: tuple[int, ...] = ()
    least: tuple[Minimum, ...] = ()
    efficiency: tuple[float | None, ...] = ()


class Study(Frozen):
    """A study: its request and results.

    Attributes:
        program_version: version of the program that planned the points.
        request: the request of the study.
        axes: fields that vary.
        prices: prices for the costs of points.
        points: points in the order of the design; empty before the study is run.
        complete: whether all points of the design are planned.
        sensitivities: effects of resources around the base point.
        answer: answer to the question.
        notes: notes about the figures, such as assumed prices, fields that cost nothing, extrapolation.
    """

    schema_version: Literal[3] = 3
    program_version: str = ""
    request: StudyRequest
    axes: tuple[Axis, ...] = ()
    prices: Prices | None = None
    points: tuple[Point, ...] = ()
    complete: bool = False
    sensitivities: Sensitivities | None = None
    answer: Answer | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the text of the file. Equal studies have equal text."""
        data = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def load_study(path: Path | str) -> Study:
    """Read and check a study file.

    Raises:
        ValueError: the file is missing, is not a study, or has another schema version.
    """
    remedy = "make a study with `ullage whatif`, whose --help shows one"
    return read_document(Study, Path(path), "study", remedy, "run it again")
